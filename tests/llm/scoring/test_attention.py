"""`attention_inputs` against each row alone, for eager and fused attention."""

import pytest
import torch

from tdfunc import functional
from tdfunc.llm import attention_inputs
from tests.llm.models import FAMILIES, VOCAB, make

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Model config"),
]
QUICK = ("llama", "gpt2", "mistral, window", "qwen3", "opt")
# Those with alibi take no mask of pairs, and Mamba has no attention.
SLOW = [name for name in FAMILIES if name not in (*QUICK, "falcon, alibi", "bloom", "mamba")]
EAGER = ("gemma2", "gemma2, window", "gpt_oss")
CASES = [
    pytest.param(name, attention, marks=pytest.mark.slow if name in SLOW else ())
    for name in (*QUICK, *SLOW)
    for attention in (("eager",) if name in EAGER else ("eager", "sdpa"))
]
# Their masks are one tensor for all layers.
ONE_MASK = [name for name in QUICK if name != "qwen3"]
SIDES = pytest.mark.parametrize("side", ["left", "right"])


def padded(side):
    """Three rows of random tokens, and the mask of their pads at a side."""
    ids = torch.randint(VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    lengths, at = torch.tensor([[9], [6], [3]]), torch.arange(9)
    return ids, at >= 9 - lengths if side == "left" else at < lengths


@SIDES
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_padded_rows_are_rows_alone(name, attention, side):
    """Their logits are those of the row without pads."""
    model = make(name, attn_implementation=attention)
    ids, mask = padded(side)

    with torch.no_grad():
        found = model(ids, use_cache=False, **attention_inputs(model, mask)).logits
        alone = [model(row[valid][None], use_cache=False).logits[0] for row, valid in zip(ids, mask, strict=True)]
    torch.testing.assert_close(
        [row[valid] for row, valid in zip(found, mask, strict=True)], alone, rtol=1e-4, atol=2e-5
    )


@SIDES
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ONE_MASK)
def test_gradients_of_padded_rows_are_those_of_rows_alone(name, attention, side):
    """The gradient of each sample under vmap."""
    model = make(name, attn_implementation=attention)
    ids, mask = padded(side)
    inputs = attention_inputs(model, mask)
    apply, params, buffers = functional(model)

    def total(params, ids, valid, inputs):
        each = {key: value[None] for key, value in inputs.items()}
        out = apply(params, ids[None], buffers=buffers, use_cache=False, **each).logits[0].log_softmax(-1)
        return torch.where(valid, out[:, 5], 0).sum()

    grads = torch.vmap(torch.func.grad(total), in_dims=(None, 0, 0, 0))(params, ids, mask, inputs)
    short = torch.func.grad(
        lambda p: apply(p, ids[2, mask[2]][None], buffers=buffers).logits.log_softmax(-1)[..., 5].sum()
    )
    torch.testing.assert_close(grads[2].leaves(), short(params).leaves(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, {"rtol": 1e-5, "atol": 1e-6}), (torch.bfloat16, {"rtol": 0.1, "atol": 0.02})],
    ids=["float64", "bfloat16"],
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rows_of_pads_are_finite_in_other_dtypes(attention, dtype, tolerance):
    """Left pads give the tokens of a wide or narrow model no nan, and the logits of the row alone."""
    model, mask = make("llama", attn_implementation=attention).to(dtype), torch.tensor([[False, True, True]])
    ids = torch.tensor([[0, 5, 7]])

    with torch.no_grad():
        found = model(ids, use_cache=False, **attention_inputs(model, mask)).logits[0, 1:]
        expected = model(ids[:, 1:], use_cache=False).logits[0]
    torch.testing.assert_close(found, expected, **tolerance)
