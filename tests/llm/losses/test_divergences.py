"""Estimates of divergences against torch's exact ones."""

import torch
from torch.distributions import Categorical, kl_divergence

from tdfunc.llm.losses.divergences import k1, k2, k3


def pair(scale):
    """Log-probs (9,) of two categoricals that differ by about `scale`."""
    p = torch.randn(9, dtype=torch.float64)
    return p.log_softmax(0), (p + scale * torch.randn(9, dtype=torch.float64)).log_softmax(0)


def test_k1_and_k3_have_the_divergence_as_their_mean():
    """Over all tokens, weighted by p, exactly; k3 and k2 are never negative."""
    p, q = pair(1.0)
    exact = kl_divergence(Categorical(logits=p), Categorical(logits=q))

    for estimate in (k1, k3):
        torch.testing.assert_close((p.exp() * estimate(p, q)).sum(), exact)
    assert (k2(p, q) >= 0).all()
    assert (k3(p, q) >= 0).all()


def test_k3_of_nearly_equal_log_probs_keeps_its_digits():
    """exp(d) - 1 - d of a small d is about d**2 / 2, also in float32."""
    d = torch.tensor(1e-3)

    torch.testing.assert_close(k3(-d, torch.tensor(0.0)), d**2 / 2 + d**3 / 6, rtol=1e-3, atol=0)
