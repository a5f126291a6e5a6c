"""Corrections against loops over tokens, and against what they are for: means under another distribution."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdfunc.llm.losses.corrections import masked_is, reject, truncated_is
from tests.llm.losses.data import make, tokens

LEVELS = ["token", "sequence", "geometric"]


def ratios(s, level):
    """The ratio of each token, for each row."""
    found = []
    for b, row in enumerate(tokens(s.mask)):
        gaps = [(s.log_probs[b, t] - s.old[b, t]).item() for t in row]
        whole = math.exp(sum(gaps) / (max(len(row), 1) if level == "geometric" else 1))
        found.append({t: math.exp(gap) if level == "token" else whole for t, gap in zip(row, gaps, strict=True)})
    return found


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), level=st.sampled_from(LEVELS), low=st.floats(0.5, 0.99), high=st.floats(1.01, 2))
def test_corrections_are_their_formulas(seed, level, low, high):
    """Cut, left out, rejected; 0 or False where the mask is False, whatever stands there."""
    s = make(seed)
    cut, left, kept = (torch.zeros(s.mask.shape, dtype=torch.float64) for _ in range(3))
    for b, row in enumerate(ratios(s, level)):
        for t, r in row.items():
            cut[b, t] = min(max(r, low), high)
            kept[b, t] = low <= r <= high
            left[b, t] = r if kept[b, t] else 0
    options = {"level": level, "low": low, "high": high}

    torch.testing.assert_close(truncated_is(s.log_probs, s.old, s.mask, **options), cut)
    torch.testing.assert_close(masked_is(s.log_probs, s.old, s.mask, **options), left)
    assert torch.equal(reject(s.log_probs, s.old, s.mask, **options), kept.bool())


def test_weights_are_constants():
    """No gradient flows through them."""
    s = make(1)
    log_probs = s.log_probs.requires_grad_()

    assert not truncated_is(log_probs, s.old, s.mask).requires_grad
    assert not masked_is(log_probs, s.old, s.mask).requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_engines_far_off_give_finite_weights(level):
    """Differences of a thousand nats."""
    far, mask = torch.full((1, 3), -1000.0), torch.ones(1, 3)

    for pair in ((far, 0 * far), (0 * far, far)):
        assert truncated_is(*pair, mask, level=level, high=math.inf).isfinite().all()
        assert not reject(*pair, mask, level=level, low=0.1, high=10).any()


def test_members_and_narrow_log_probs():
    """Vmap is a loop; 16 bits are computed in float32."""
    s = make(2, lead=(3,))
    found = torch.vmap(lambda x, y, m: truncated_is(x, y, m, level="geometric"))(s.log_probs, s.old, s.mask)
    x, y = s.log_probs.bfloat16(), s.old.bfloat16()

    for i in range(3):
        torch.testing.assert_close(found[i], truncated_is(s.log_probs[i], s.old[i], s.mask[i], level="geometric"))
    assert torch.equal(truncated_is(x, y, s.mask), truncated_is(x.float(), y.float(), s.mask))
