"""`compare` against formulas written out, and the causes that it names, made on random distributions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdfunc.llm import LogProbs, compare
from tests.helpers import assert_trees_equal

V = 50


def drawn(seed, rows=8, length=64):
    """Logits and tokens drawn from them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, length, V, generator=generator, dtype=torch.float64)
    ids = torch.multinomial(logits.flatten(0, 1).softmax(-1), 1, generator=generator).view(rows, length, 1)
    return logits, ids


def log_probs(logits, ids):
    """The log-probs of tokens."""
    return logits.log_softmax(-1).gather(-1, ids).squeeze(-1)


@given(seed=st.integers(0, 2**16))
def test_the_numbers_are_the_formulas(seed):
    """Divergences, the effective sample size and the worst tokens, over the tokens of the mask alone."""
    generator = torch.Generator().manual_seed(seed)
    a, b = -3 * torch.rand(2, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=generator) < 0.7
    mask[0, 0] = True
    cases = (mask, None), (~mask, mask)
    report, same = [compare(LogProbs(full=a, mask=own, batch_size=[4]), b, given, worst=3) for own, given in cases]
    gap = (b - a)[mask]
    ratio = gap.exp()

    assert_trees_equal(same, report)
    torch.testing.assert_close(report["ratio"], gap.abs().exp().mean())
    torch.testing.assert_close(report["k1"], (a - b)[mask].mean())
    torch.testing.assert_close(report["k3"], (ratio - 1 - ratio.log()).mean())
    torch.testing.assert_close(report["ess"], ratio.sum() ** 2 / (ratio**2).sum() / len(ratio))
    (row, column), *others = report["worst"].tolist()
    assert len(others) == min(3, int(mask.sum())) - 1
    assert mask[row, column]
    torch.testing.assert_close((b - a)[row, column].abs(), report["largest"])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("size", "errors", "cause"), [(0.4, 2.5, "dtype"), (0.4, 3.5, "unknown"), (0.52, 0.0, "unknown")]
)
def test_causes(seed, size, errors, cause):
    """Each cause is named on data that have it."""
    logits, ids = drawn(seed)
    a = log_probs(logits, ids)
    kept = torch.where(logits >= logits.topk(10, -1).values[..., -1:], logits, -torch.inf)
    inside = kept.gather(-1, ids).squeeze(-1).isfinite()

    assert len(compare(a, a + 1e-5)["worst"]) == 5
    assert compare(a, a + 1e-5)["cause"] == "none"
    assert {compare(a, inside * a.roll(shift, -1), inside)["cause"] for shift in (1, -1)} == {"shift by one"}
    assert compare(a, log_probs(logits.bfloat16(), ids))["cause"] == "dtype"
    assert {compare(a, log_probs(logits / heat, ids))["cause"] for heat in (0.5, 1.7)} == {"temperature"}
    assert compare(a, log_probs(kept, ids).nan_to_num(), inside)["cause"] == "truncation"
    assert compare(a, log_probs(drawn(seed + 10)[0], ids))["cause"] == "unknown"
    # Rounding is below half a nat, and its mean within three standard errors of 0.
    signs = (-1.0) ** torch.arange(a.numel()).view(a.shape)
    assert compare(a, a + size * (signs + errors / a.numel() ** 0.5))["cause"] == cause
