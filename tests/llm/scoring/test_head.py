"""The head in chunks against whole logits: log-probs, all gradients, and the memory that it takes."""

import itertools

import pytest
import torch

from tdfunc.llm.scoring.head import Head, Wanted, head_scores, scores_of


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
    expected = scores_of(head.logits(hidden, *output), ids, temperature).log_probs

    found = head_scores(head, hidden, output, ids, temperature=temperature, chunk_size=size).log_probs
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(x, leaves, slope, allow_unused=True) for x in (found, expected)]
    torch.testing.assert_close(*[[g for g in one if g is not None] for one in grads])


def test_the_peak_is_one_chunk_of_logits():
    """All that the log-probs of chosen tokens allocate at a time, temporary tensors of operations included."""
    hidden, weight, size = torch.randn(256, 8), torch.randn(1000, 8), 32
    ids = torch.randint(1000, (256, 1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        head_scores(Head(), hidden, (weight, None), ids, chunk_size=size)
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

    found = head_scores(Head(), hidden, (weight, None), ids, temperature=temperature).log_probs

    expected = scores_of(Head().logits(hidden, weight, None), ids, temperature).log_probs
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
    whole = scores_of(Head().logits(hidden.double(), **wide), ids).log_probs.mean()
    (expected,) = torch.autograd.grad(whole, wide[part])
    output[part].requires_grad_()

    chunks = head_scores(Head(), hidden, tuple(output.values()), ids, chunk_size=8).log_probs.mean()

    (found,) = torch.autograd.grad(chunks, output[part])
    assert (found.double() - expected).norm() < torch.finfo(dtype).eps * expected.norm() + 1e-5


# -- entropies and the likeliest tokens -------------------------------------------------------------------------


def whole_entropy(logits, heat):
    """Oracle: a sum over the vocabulary."""
    divisor = heat.unsqueeze(-1) if isinstance(heat, torch.Tensor) else heat
    log_probs = (logits / divisor).log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("head", [Head(), Head(scale=0.5, softcap=3.0)])
@pytest.mark.parametrize("heat", [1.0, 2.0, "each"])
def test_entropies_and_their_gradients_are_those_of_whole_logits(head, heat, size, generator):
    """With log-probs beside them: of the states, the weight, the bias and the temperatures."""
    made = [torch.randn(each, generator=generator).double() for each in [(7, 5), (11, 5), (11,), (7,)]]
    made[3] = made[3].abs() + 0.5
    hidden, weight, bias, each = leaves = [leaf.requires_grad_() for leaf in made]
    temperature = each if heat == "each" else heat
    ids = torch.randint(11, (7, 2), generator=generator)
    slopes = torch.randn(7, 2, generator=generator).double(), torch.randn(7, generator=generator).double()
    logits = head.logits(hidden, weight, bias)
    expected = scores_of(logits, ids, temperature).log_probs, whole_entropy(logits, temperature)

    found = head_scores(
        head, hidden, (weight, bias), ids, temperature=temperature, chunk_size=size, wanted=Wanted(entropy=True)
    )

    torch.testing.assert_close((found.log_probs, found.entropy), expected)
    grads = [
        torch.autograd.grad(x, leaves, slopes, allow_unused=True, materialize_grads=True)
        for x in ((found.log_probs, found.entropy), expected)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_likeliest_tokens_are_those_of_whole_logits(size, generator):
    """With their log-probs and gradients."""
    hidden = torch.randn(7, 5, generator=generator).double().requires_grad_()
    weight = torch.randn(11, 5, generator=generator).double()
    ids = torch.randint(11, (7, 2), generator=generator)
    slope = torch.randn(7, 4, generator=generator).double()
    expected = (hidden @ weight.T).log_softmax(-1).topk(4)

    found = head_scores(Head(), hidden, (weight, None), ids, chunk_size=size, wanted=Wanted(topk=4))

    assert torch.equal(found.topk_ids, expected.indices)
    torch.testing.assert_close(found.topk_log_probs, expected.values)
    grads = [torch.autograd.grad(x, hidden, slope)[0] for x in (found.topk_log_probs, expected.values)]
    torch.testing.assert_close(*grads)


def test_second_derivatives_of_entropies(generator):
    """The backward pass has the same derivatives as whole logits."""
    hidden = torch.randn(3, 4, generator=generator).double()
    weight = torch.randn(6, 4, generator=generator).double()
    ids = torch.zeros(3, 1, dtype=torch.int64)

    def chunks(x):
        return head_scores(Head(), x, (weight, None), ids, chunk_size=2, wanted=Wanted(entropy=True)).entropy.sum()

    found = torch.func.jacrev(torch.func.grad(chunks))(hidden)

    expected = torch.func.hessian(lambda x: whole_entropy(x @ weight.T, 1.0).sum())(hidden)
    torch.testing.assert_close(found, expected)


def test_members_have_their_own_entropies(generator):
    """`vmap` over heads and states is a loop."""
    hidden = torch.randn(3, 5, 4, generator=generator).double()
    weight = torch.randn(3, 6, 4, generator=generator).double()
    ids = torch.zeros(5, 1, dtype=torch.int64)
    options = {"chunk_size": 2, "wanted": Wanted(entropy=True, topk=2)}

    def run(x, w):
        found = head_scores(Head(), x, (w, None), ids, **options)
        return found.entropy, found.topk_log_probs, found.topk_ids

    found = torch.func.vmap(run)(hidden, weight)

    looped = [run(x, w) for x, w in zip(hidden, weight, strict=True)]
    expected = tuple(torch.stack(each) for each in zip(*looped, strict=True))
    torch.testing.assert_close(found, expected)


def test_tokens_of_probability_zero_add_nothing_to_an_entropy():
    """As those that a bias of -inf forbids; the gradient is finite."""
    hidden = torch.randn(2, 3).double().requires_grad_()
    weight, bias = torch.randn(4, 3).double(), torch.tensor([0.0, -torch.inf, 0.0, 0.0]).double()
    ids = torch.zeros(2, 1, dtype=torch.int64)

    found = head_scores(Head(), hidden, (weight, bias), ids, wanted=Wanted(entropy=True)).entropy

    expected = whole_entropy((hidden @ weight.T)[:, [0, 2, 3]], 1.0)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(x.sum(), hidden)[0] for x in (found, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("wanted", [Wanted(topk=4), Wanted(entropy=True), Wanted(entropy=True, topk=4)], ids=str)
def test_no_tensor_of_all_positions_and_the_vocabulary_exists(wanted):
    """Neither forwards nor backwards is a tensor larger than a chunk allocated."""
    hidden, weight, size = torch.randn(256, 8, requires_grad=True), torch.randn(1000, 8), 32
    ids = torch.randint(1000, (256, 1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        found = head_scores(Head(), hidden, (weight, None), ids, chunk_size=size, wanted=wanted)
        sum(each.sum() for each in found if each is not None and each.requires_grad).backward()
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]

    assert max(each.nbytes() for each in events) <= size * 1000 * 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("temperature", [1.0, 0.7, "each"])
def test_gradients_are_the_same_when_compiled(temperature, generator):
    """Of log-probs, entropies and the likeliest tokens."""
    hidden = torch.randn(13, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(30, (13, 2), generator=generator)
    heat = torch.rand(13, generator=generator).double() + 0.5 if temperature == "each" else temperature

    def run(hidden, weight):
        found = head_scores(Head(), hidden, (weight, None), ids, temperature=heat, wanted=Wanted(entropy=True, topk=3))
        return found.log_probs.square().sum() + found.entropy.square().sum() + found.topk_log_probs.square().sum()

    found = torch.autograd.grad(torch.compile(run, backend="aot_eager")(hidden, weight), [hidden, weight])

    torch.testing.assert_close(found, torch.autograd.grad(run(hidden, weight), [hidden, weight]))
