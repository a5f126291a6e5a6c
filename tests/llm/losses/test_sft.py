"""Supervised losses against their formulas."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdfunc.llm.losses import minor_sft, sft
from tests.llm.losses.data import average, combine, make, tokens
from tests.llm.losses.test_policy import SEEDS, close
from tests.llm.losses.test_preference import OPTIONS, log_sigmoid


@settings(max_examples=8)
@given(seed=SEEDS, normalize=st.sampled_from(["token", "sequence", 7.5]), weighted=st.booleans())
def test_sft_is_its_formula(seed, normalize, weighted):
    """With and without weights; those of rows are those of their tokens."""
    s = make(seed)
    weights = s.weights if weighted else torch.ones_like(s.weights)
    parts = [[-s.log_probs[b, t].item() * weights[b, t].item() for t in row] for b, row in enumerate(tokens(s.mask))]

    found = sft(s.log_probs, s.mask, weights=s.weights if weighted else None, normalize=normalize)
    close(found.loss, combine(parts, normalize))
    close(found.metrics["nll"], sft(s.log_probs, s.mask).loss.item())
    rows = s.advantages.abs()
    spread = rows.unsqueeze(-1).expand(s.mask.shape)
    assert torch.equal(sft(s.log_probs, s.mask, weights=rows).loss, sft(s.log_probs, s.mask, weights=spread).loss)


@settings(max_examples=8)
@given(seed=SEEDS, options=OPTIONS)
def test_minor_sft_is_its_formula(seed, options):
    """Rows that are far above the reference hardly learn."""
    s, beta, mean = make(seed), options.get("beta", 0.1), options.get("average", True)
    losses = []
    for b, row in enumerate(tokens(s.mask)):
        gap = sum(s.log_probs[b, t].item() - s.ref[b, t].item() for t in row)
        losses.append(-log_sigmoid(beta * (gap / len(row) if mean else gap)) if row else 0.0)

    loss, metrics = minor_sft(s.log_probs, s.ref, s.mask, **options)
    close(loss, average(losses))
    close(metrics["nll"], sft(s.log_probs, s.mask).loss.item())
