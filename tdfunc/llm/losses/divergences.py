"""Per-token estimates of the divergence KL(p || q), in nats, from tokens that were sampled from p.

The expected values of `k1` and `k3` are the divergence; the expected value of `k2` is close to it if p and q are close.
In a loss only the gradient matters. The gradient of `k2` is unbiased, the gradient of `k3` is biased, and the gradient
of `k1` is zero on average.
"""

from torch import Tensor

from tdfunc._mixture import widen


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
    return gap.expm1() - gap
