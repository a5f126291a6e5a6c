"""The digits of an estimate of a divergence; `test_policy.py` has the formulas."""

import torch

from tdfunc.llm.losses.divergences import k3


def test_k3_of_nearly_equal_log_probs_keeps_its_digits():
    """exp(d) - 1 - d of a small d is about d**2 / 2, also in float32."""
    d = torch.tensor(1e-3)

    torch.testing.assert_close(k3(-d, torch.tensor(0.0)), d**2 / 2 + d**3 / 6, rtol=1e-3, atol=0)
