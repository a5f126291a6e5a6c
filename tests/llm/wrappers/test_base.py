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


@settings(max_examples=10, deadline=None)
@given(data=padded_tokens(), samples=st.sampled_from([None, 1, 2]), scored=st.booleans())
def test_padded_outputs_hold_each_row(data, samples, scored):
    """Prompts end and responses begin at one position; masks, log-probs, behaviour and support lie as the tokens."""
    ids, mask = data
    lead = ids.shape[:-1]
    kwargs = {"temperature": 1.0}
    tokens = Tokens(prompt=ids, batch_size=lead)
    td = TensorDict({"tokens": tokens, "attention_mask": mask, "x": torch.ones(lead)}, lead)
    options = {"pad_output": True, "num_samples": samples} | ({"prompt_log_probs": True} if scored else {})
    out = FakeWrapper(input_mode="tokens", generate_kwargs=kwargs, **options)(td, key=0)

    size = torch.Size([*lead, *([] if samples is None else [samples])])
    tokens, masks, lp = out["tokens"], out["masks"], out["log_probs"]
    assert out.batch_size == tokens.batch_size == masks.batch_size == lp.batch_size == size
    assert out["x"].shape == size
    assert td.keys() == {"tokens", "attention_mask", "x"}
    assert torch.equal(tokens.full, torch.cat([tokens.prompt, tokens.response], -1))
    width = ids.shape[-1]
    assert tokens.prompt.shape[-1] == width
    expected = [row for row in rows_of(ids, mask) for _ in range(samples or 1)]
    flat = [x.reshape(-1, *x.shape[len(size) :]) for x in (tokens.full, masks.all_attention_mask, lp.full, lp.mask)]
    for k, (prompt, full, valid, values, known) in enumerate(zip(expected, *flat, strict=True)):
        answer = prompt[-1] + 1 + torch.arange(1 + k % 3)
        assert full[valid].tolist() == [*prompt.tolist(), *answer.tolist()]
        assert valid[width - 1 : width + 1].all()
        assert not valid[: width - len(prompt)].any()
        start = width - len(prompt) + 1 if scored else width
        assert known.nonzero().flatten().tolist() == list(range(start, width + len(answer)))
        assert values[known].tolist() == [-float(token) for token in full[known]]
        assert (values[~known] == 0).all()
        each = {name: lp.get(name).reshape(len(expected), -1) for name in ("behaviour", "response")}
        assert tokens.is_complete.flatten()[k].tolist() is (k % 2 == 0)
        assert each["behaviour"][k].tolist() == [2 * value for value in each["response"][k].tolist()]
        support = [[token, token + 1] if k else [-1, -1] for token in answer.tolist()]
        assert len(expected) == 1 or lp.support.reshape(len(expected), -1, 2)[k, : len(answer)].tolist() == support
    versions = lp.version if size else [lp.version]
    assert torch.tensor(versions).flatten().tolist() == list(range(len(expected)))


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
