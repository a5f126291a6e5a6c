"""Per-token estimates of the divergence KL(p || q), in nats, from tokens that were sampled from p.

The expected values of `k1` and `k3` are the divergence; the expected value of `k2` is close to it if p and q are close.
In a loss only the gradient matters. The gradient of `k2` is unbiased, the gradient of `k3` is biased, and the gradient
of `k1` is zero on average.
"""

import math

import torch
from torch import Tensor

from tdfunc.llm.losses.streams import MAX_LOG_RATIO
from tdfunc.mixture import widen


def k1(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return log p - log q, an unbiased estimate of either sign with a high variance.

    Args:
        log_p: The log-probs of tokens under the distribution that they were sampled from.
        log_q: The log-probs under the other distribution.

    Source:
        Schulman, "Approximating KL Divergence" (2020).

    Examples:
        >>> k1(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([ 0.5000, -1.0000])
    """
    return widen(log_p) - widen(log_q)


def k2(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return (log p - log q)**2 / 2, which is never negative; its variance is low, its bias grows with the divergence.

    Args:
        log_p: The log-probs of tokens under the distribution that they were sampled from.
        log_q: The log-probs under the other distribution.

    Source:
        Schulman, "Approximating KL Divergence" (2020).

    Examples:
        >>> k2(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.1250, 0.5000])
    """
    return (widen(log_p) - widen(log_q)).square() / 2


def k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return q / p - 1 - log(q / p), which is unbiased and never negative; it is large where p is far below q.

    Where log(q / p) is above 20, the ratio grows along a straight line, so that it and its gradient stay finite.

    Args:
        log_p: The log-probs of tokens under the distribution that they were sampled from.
        log_q: The log-probs under the other distribution.

    Source:
        Schulman, "Approximating KL Divergence" (2020).

    Examples:
        >>> k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.1065, 0.7183])
    """
    gap = widen(log_q) - widen(log_p)
    bounded = gap.clamp(max=MAX_LOG_RATIO)
    beyond = (gap - MAX_LOG_RATIO).relu()
    far = bounded.expm1() - bounded + math.expm1(MAX_LOG_RATIO) * beyond
    # exp(d) - 1 - d of a small d cancels, and its derivative as well: there it is its Taylor series.
    is_near = gap.abs() < 0.03
    d = torch.where(is_near, gap, 0)
    series = 1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d * (1 / 720 + d / 5040))))
    return torch.where(is_near, d.square() * series, far)
