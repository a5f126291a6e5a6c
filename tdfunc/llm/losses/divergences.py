"""Estimates, token by token, of the divergence KL(p || q), in nats, from tokens that were drawn from p.

The mean of `k1` and that of `k3` over many tokens is the divergence, that of `k2` nearly so when p and q are close. As
a term of a loss, the gradient of `k2` is on average that of the divergence; that of `k3` is not, and that of `k1` is 0
on average.
"""

from torch import Tensor

from tdfunc._mixture import widen


def k1(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return log p - log q: without bias, of high variance, of either sign.

    Args:
        log_p: The log-probs of tokens under the distribution that they were drawn from.
        log_q: Those under the other.

    Source:
        Schulman, "Approximating KL Divergence" (2020).

    Examples:
        >>> k1(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([ 0.5000, -1.0000])
    """
    return widen(log_p) - widen(log_q)


def k2(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return (log p - log q)**2 / 2: never negative, of low variance, with a bias that grows with the divergence.

    Args:
        log_p: The log-probs of tokens under the distribution that they were drawn from.
        log_q: Those under the other.

    Source:
        Schulman, "Approximating KL Divergence" (2020).

    Examples:
        >>> k2(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.1250, 0.5000])
    """
    return (widen(log_p) - widen(log_q)).square() / 2


def k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return q / p - 1 - log(q / p): without bias, never negative; it is large where p is far below q.

    Args:
        log_p: The log-probs of tokens under the distribution that they were drawn from.
        log_q: Those under the other.

    Source:
        Schulman, "Approximating KL Divergence" (2020).

    Examples:
        >>> k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.1065, 0.7183])
    """
    gap = widen(log_q) - widen(log_p)
    return gap.expm1() - gap
