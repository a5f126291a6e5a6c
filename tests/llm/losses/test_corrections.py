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
@given(st.integers(0, 2**31), st.sampled_from(LEVELS), st.sampled_from([0.7, 1]), st.sampled_from([1, 1.4]))
def test_corrections_are_their_formulas(seed, level, low, high):
    """Cut, left out, rejected, but not at a limit; 0 or False where the mask is False; no gradient flows."""
    s = make(seed)
    s.log_probs[0] = s.old[0]
    s.log_probs.requires_grad_()
    s.old.requires_grad_()
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


@pytest.mark.parametrize("correction", [truncated_is, masked_is])
@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_that_is_no_number_is_handed_on(correction, level):
    """An engine's NaN does not become a token of weight 0."""
    log_probs = torch.tensor([[-1.0, math.nan, -2.0]])

    found = correction(log_probs, torch.full((1, 3), -1.0), torch.ones(1, 3), level=level)

    assert found[0, 1].isnan()
