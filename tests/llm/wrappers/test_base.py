"""The layout of inputs and outputs, on a backend whose numbers are known."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdfunc import TensorDict
from tdfunc.llm import Text, Tokens
from tests.llm.tokens import make_tokenizer
from tests.llm.wrappers.fake import FakeWrapper


def rows_of(values, mask):
    """The values at the tokens of each row."""
    pairs = zip(*[each.reshape(-1, each.shape[-1]) for each in (values, mask)], strict=True)
    return [row[valid] for row, valid in pairs]


@st.composite
def padded_tokens(draw, least=1):
    """A batch of rows with pads anywhere."""
    lead = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    width = draw(st.integers(max(least, 1), 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    ids = torch.randint(1, 90, (*lead, width), generator=generator)
    mask = torch.rand(ids.shape, generator=generator) < 0.6
    mask[..., -1] |= least > 0
    return ids, mask


def padded_output(ids, mask, samples, scored):
    """A tree of prompts, and what the backend whose numbers are known gives for it, padded."""
    lead = ids.shape[:-1]
    tokens = Tokens(prompt=ids, batch_size=lead)
    td = TensorDict({"tokens": tokens, "attention_mask": mask, "x": torch.ones(lead)}, lead)
    options = {"pad_output": True, "num_samples": samples} | ({"prompt_log_probs": True} if scored else {})
    return td, FakeWrapper(input_mode="tokens", generate_kwargs={"temperature": 1.0}, **options)(td, key=0)


def size_of(ids, samples):
    """The batch size of the output."""
    return torch.Size([*ids.shape[:-1], *([] if samples is None else [samples])])


SAMPLES = st.sampled_from([None, 1, 2])


@settings(max_examples=10, deadline=None)
@given(data=padded_tokens(), samples=SAMPLES, scored=st.booleans())
def test_padded_outputs_have_the_size_of_the_batch_and_of_samples(data, samples, scored):
    """All records, and the entries that the tree had; the tree itself is left alone."""
    ids, mask = data
    td, out = padded_output(ids, mask, samples, scored)
    size = size_of(ids, samples)

    sizes = {"tree": out.batch_size} | {name: out[name].batch_size for name in ("tokens", "masks", "log_probs")}
    assert sizes == dict.fromkeys(["tree", "tokens", "masks", "log_probs"], size)
    assert out["x"].shape == size
    assert td.keys() == {"tokens", "attention_mask", "x"}


@settings(max_examples=10, deadline=None)
@given(data=padded_tokens(), samples=SAMPLES, scored=st.booleans())
def test_padded_outputs_hold_each_row(data, samples, scored):
    """Prompts end and responses begin at one position; the masks lie as the tokens."""
    ids, mask = data
    _, out = padded_output(ids, mask, samples, scored)
    tokens, lead, width = out["tokens"], len(size_of(ids, samples)), ids.shape[-1]
    prompts = [row for row in rows_of(ids, mask) for _ in range(samples or 1)]
    answers = [prompt[-1] + 1 + torch.arange(1 + k % 3) for k, prompt in enumerate(prompts)]
    full, whole, known = (
        x.reshape(-1, *x.shape[lead:]) for x in (tokens.full, out["masks"].all_attention_mask, out["log_probs"].mask)
    )

    assert torch.equal(tokens.full, torch.cat([tokens.prompt, tokens.response], -1))
    assert tokens.prompt.shape[-1] == width
    pairs = list(zip(prompts, answers, strict=True))
    expected = [[*prompt.tolist(), *answer.tolist()] for prompt, answer in pairs]
    assert [row[valid].tolist() for row, valid in zip(full, whole, strict=True)] == expected
    places = [list(range(width - len(prompt), width + len(answer))) for prompt, answer in pairs]
    assert [valid.nonzero().flatten().tolist() for valid in whole] == places
    # The first token of a prompt has no log-prob.
    places = [range(width - len(prompt) + 1 if scored else width, width + len(answer)) for prompt, answer in pairs]
    assert [valid.nonzero().flatten().tolist() for valid in known] == [list(place) for place in places]


@settings(max_examples=10, deadline=None)
@given(data=padded_tokens(), samples=SAMPLES, scored=st.booleans())
def test_padded_outputs_hold_the_numbers_of_each_row(data, samples, scored):
    """Log-probs, behaviour, support, ends and versions lie as the tokens."""
    ids, mask = data
    _, out = padded_output(ids, mask, samples, scored)
    tokens, log_probs, size = out["tokens"], out["log_probs"], size_of(ids, samples)
    prompts = [row for row in rows_of(ids, mask) for _ in range(samples or 1)]
    answers = [(prompt[-1] + 1 + torch.arange(1 + k % 3)).tolist() for k, prompt in enumerate(prompts)]
    count = len(prompts)

    assert torch.equal(log_probs.full, torch.where(log_probs.mask, -tokens.full.float(), 0.0))
    assert torch.equal(log_probs.behaviour, 2 * log_probs.response)
    assert tokens.is_complete.flatten().tolist() == [k % 2 == 0 for k in range(count)]
    versions = log_probs.version if size else [log_probs.version]
    assert torch.tensor(versions).flatten().tolist() == list(range(count))
    # One row alone was not cut.
    support = [[[-1, -1]] * len(answers[0]), *[[[token, token + 1] for token in each] for each in answers[1:]]]
    found = [] if count == 1 else log_probs.support.reshape(count, -1, 2)
    assert [row[: len(each)].tolist() for row, each in zip(found, answers, strict=False)] == support[: len(found)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@settings(max_examples=8, deadline=None)
@given(data=padded_tokens(least=0), layout=st.sampled_from([None, torch.jagged, torch.strided]))
def test_scores_lie_as_the_tokens(data, layout):
    """Padded scores lie where the tokens lie, ragged ones are the rows."""
    ids, mask = data
    lead = ids.shape[:-1]
    td = TensorDict({"tokens": Tokens(full=ids, batch_size=lead), "attention_mask": mask}, lead)
    wrapper = FakeWrapper(input_mode="tokens", generate=False, pad_output=True)
    out = wrapper(td)

    lp, first = out["log_probs"], mask.cumsum(-1) == 1
    assert torch.equal(lp.mask, mask & ~first)
    assert torch.equal(lp.full, torch.where(lp.mask, -ids.float(), 0.0))
    assert torch.equal(out["tokens"].full, ids)
    assert torch.equal(out["masks"].all_attention_mask, mask)
    assert torch.equal(wrapper.log_prob(td), lp.full)
    if layout is not None and len(lead) != 1:
        return
    ragged = wrapper.get_new_version(pad_output=False, layout=layout)(td)
    rows = ragged["log_probs"].full
    rows = rows.unbind() if layout is not None else rows
    for _ in lead[1:]:
        rows = [row for part in rows for row in part]
    rows = [rows] if not lead else list(rows)
    assert [row.tolist() for row in rows] == [row.tolist() for row in rows_of(lp.full, mask)]


def test_results_are_on_the_device_of_the_wrapper_or_of_the_tree():
    """Texts have none: without either they are on the CPU."""
    td = TensorDict({"text": Text(full=["a", "b"], batch_size=[2])}, [2])
    wrapper = FakeWrapper(tokenizer=make_tokenizer(), input_mode="text", generate=False, pad_output=True)
    outs = wrapper(td), wrapper.get_new_version(device="meta")(td), wrapper(td.to("meta"))

    assert [out["log_probs"].full.device.type for out in outs] == ["cpu", "meta", "meta"]
