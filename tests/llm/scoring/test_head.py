"""The head in chunks against whole logits: log-probs, all gradients, and the memory that it takes."""

import itertools

import pytest
import torch

from tdfunc.llm.scoring.head import Head, chosen_log_probs, log_probs_of


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("head", [Head(), Head(scale=0.5, softcap=3.0)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("heat", [1.0, 2.0, "each"])
def test_gradients_are_those_of_whole_logits(head, has_bias, heat, size):
    """In chunks that divide the positions or not: of the states, the weight, the bias and the temperatures."""
    made = [torch.randn(7, 5), torch.randn(11, 5), torch.randn(11), torch.rand(7) + 0.5]
    hidden, weight, bias, each = leaves = [leaf.double().requires_grad_() for leaf in made]
    output, temperature = (weight, bias if has_bias else None), each if heat == "each" else heat
    ids, slope = torch.randint(11, (7, 2)), torch.randn(7, 2, dtype=torch.float64)
    expected = log_probs_of(head.logits(hidden, *output), ids, temperature)

    found = chosen_log_probs(head, hidden, output, ids, temperature=temperature, chunk_size=size)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(x, leaves, slope, allow_unused=True) for x in (found, expected)]
    torch.testing.assert_close(*[[g for g in one if g is not None] for one in grads])


def test_the_peak_is_one_chunk_of_logits():
    """All that the log-probs of chosen tokens allocate at a time, temporary tensors of operations included."""
    hidden, weight, size = torch.randn(256, 8), torch.randn(1000, 8), 32
    ids = torch.randint(1000, (256, 1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        chosen_log_probs(Head(), hidden, (weight, None), ids, chunk_size=size)
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    live = list(itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))

    chunk = size * 1000 * 4
    assert chunk <= max(live) < 1.2 * chunk


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("temperature", [0.7, 0.3, 1.3])
def test_a_temperature_is_not_rounded_to_the_dtype_of_the_states(dtype, temperature, generator):
    """The log-probs of a chunk are those of the same logits in full."""
    hidden = torch.randn(4, 16, generator=generator).to(dtype)
    weight = (torch.randn(32, 16, generator=generator) * 3).to(dtype)
    ids = torch.randint(32, (4, 2), generator=generator)

    found = chosen_log_probs(Head(), hidden, (weight, None), ids, temperature=temperature)

    expected = log_probs_of(Head().logits(hidden, weight, None), ids, temperature)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_gradients_of_many_chunks_are_rounded_once(dtype, part, generator):
    """The gradient of the head is as near to float64 as that of whole logits, however many chunks it is a sum of."""
    hidden = torch.randn(2048, 16, generator=generator).to(dtype)
    output = {"weight": (torch.randn(64, 16, generator=generator) / 4).to(dtype), "bias": torch.zeros(64, dtype=dtype)}
    # Chunks of one sign: the sum grows, and each chunk is small beside it.
    ids = torch.zeros(2048, 1, dtype=torch.int64)
    wide = {name: leaf.double().requires_grad_() for name, leaf in output.items()}
    whole = log_probs_of(Head().logits(hidden.double(), **wide), ids).mean()
    (expected,) = torch.autograd.grad(whole, wide[part])
    output[part].requires_grad_()

    chunks = chosen_log_probs(Head(), hidden, tuple(output.values()), ids, chunk_size=8).mean()

    (found,) = torch.autograd.grad(chunks, output[part])
    assert (found.double() - expected).norm() < torch.finfo(dtype).eps * expected.norm() + 1e-5
