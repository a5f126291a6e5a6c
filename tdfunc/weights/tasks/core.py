"""The shared parts of methods on task vectors: ranks of numbers, random masks, the vote on signs, the weighted sum."""

import torch
from torch import Tensor

from tdfunc import random
from tdfunc.core.context import require_values
from tdfunc.core.errors import brief, error
from tdfunc.random.draws import KeyLike, key_of
from tdfunc.weights.method import PerModel, columns, is_cancelled


def per_model(value: PerModel, flat: Tensor) -> Tensor:
    """Return a number, or one for each model, as a column in float64, in which counts are exact."""
    return torch.as_tensor(value, dtype=torch.float64, device=flat.device).reshape(-1, 1)


def share_of(name: str, value: PerModel, flat: Tensor) -> Tensor:
    """Return a share, or one for each model, as a column in float64.

    Raises:
        ValueError: A share is not between 0 and 1: a percentage, for example, would keep all numbers.
    """
    share = per_model(value, flat)
    what = f"{name} is a share of the numbers."
    fits = (share >= 0) & (share <= 1)
    require_values(fits, lambda: error(ValueError, what, expected=f"0 <= {name} <= 1", got=brief(value)))
    return share


def spread_of(name: str, value: PerModel, flat: Tensor) -> Tensor:
    """Return a distance, or one for each model, as a column in float64.

    Raises:
        ValueError: It is negative.
    """
    spread = per_model(value, flat)
    what = f"{name} must not be negative."
    require_values(spread >= 0, lambda: error(ValueError, what, got=brief(value)))
    return spread


def keep_ranks(flat: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Return the mask of the numbers [K, N] whose place among the absolute values of their row is in [first, last)."""
    order = flat.abs().sort(dim=1, stable=True).indices
    places = torch.arange(flat.shape[1], device=flat.device)
    kept = (places >= first) & (places < last)
    return torch.zeros_like(order, dtype=torch.bool).scatter(1, order, kept.expand_as(order))


def rescale_l1(x: Tensor, masked: Tensor) -> Tensor:
    """Return masked rows [K, *S] scaled to the sums of absolute values that they had."""
    before = x.abs().reshape(x.shape[0], -1).sum(1)
    after = masked.abs().reshape(x.shape[0], -1).sum(1)
    is_small = (before < 1e-7) | (after < 1e-7)
    factor = torch.where(is_small, 1, before / torch.where(is_small, 1, after))
    return masked * columns(factor, x)


def keep_largest(x: Tensor, density: PerModel, rescale: bool) -> Tensor:
    """Return task vectors [K, *S] with the share `density` of their largest numbers, at least one; others are 0."""
    flat = x.reshape(x.shape[0], -1)
    share = share_of("density", density, flat)
    n = flat.shape[1]
    count = torch.where(share > 0, (share * n).floor().clamp(1, n), 0)
    masked = x * keep_ranks(flat, n - count, count.new_tensor(n)).reshape(x.shape)
    if rescale:
        return rescale_l1(x, masked)
    return masked


def keep_middle(x: Tensor, density: PerModel, gamma: PerModel, rescale: bool) -> Tensor:
    """Return task vectors without the share `gamma` of their largest numbers, and with the next `density`."""
    flat = x.reshape(x.shape[0], -1)
    share = share_of("density", density, flat)
    n = flat.shape[1]
    count = (share * n).floor()
    top = (share_of("gamma", gamma, flat) * n).floor()
    first = torch.where(share >= 1, 0, (n - count - top).clamp(min=0))
    last = first + torch.where(share >= 1, n, count)
    masked = x * keep_ranks(flat, first, last).reshape(x.shape)
    if rescale:
        return rescale_l1(x, masked)
    return masked


def keep_random(x: Tensor, probability: Tensor, key: KeyLike, rescale: bool) -> Tensor:
    """Return task vectors of which each number is kept with its probability, and divided by it if `rescale`."""
    kept = random.bernoulli(key_of(key).to(x.device), probability.expand(x.shape))
    if rescale:
        scale = 1 / torch.where(probability > 0, probability, 1)
    else:
        scale = torch.ones_like(probability)
    return x * (kept * scale).to(x.dtype)


def keep_by_rank(x: Tensor, density: PerModel, epsilon: PerModel, key: KeyLike, rescale: bool) -> Tensor:
    """Return task vectors whose numbers are kept at random, the larger ones of a row more often.

    The probabilities of a row rise by rank from density - epsilon to density + epsilon. Their mean stays the density:
    epsilon is at most the distance to 0 and 1.
    """
    if x.dim() > 2:
        rows = x.reshape(*x.shape[:2], -1)
    else:
        rows = x.reshape(x.shape[0], 1, -1)
    n = rows.shape[-1]
    rank = rows.abs().sort(dim=-1, stable=True).indices.argsort(-1).to(torch.float64)
    if n > 1:
        place = rank / (n - 1)
    else:
        # A row of one number has the middle rank.
        place = rank + 0.5
    share = columns(share_of("density", density, x).reshape(-1), rows)
    spread = columns(spread_of("epsilon", epsilon, x).reshape(-1), rows)
    spread = torch.minimum(spread, torch.minimum(share, 1 - share))
    probability = (share + spread * (2 * place - 1)).clamp(0, 1)
    return keep_random(x, probability.reshape(x.shape), key, rescale)


def elect(x: Tensor) -> Tensor:
    """Return where task vectors [K, *S] have the sign of their sum; a sum of 0 counts as positive."""
    return x.sign() == torch.where(x.sum(0) >= 0, 1, -1)


def add_up(base: Tensor, x: Tensor, weights: Tensor, *, vote: bool, normalize: bool, lambda_: float | Tensor) -> Tensor:
    """Return the base plus `lambda_` times the weighted sum of task vectors [K, *S].

    Args:
        base: The base.
        x: The task vectors, sparse or not.
        weights: A number for each.
        vote: Sum only the numbers that have the elected sign.
        normalize: Divide by the sum of the weights that were summed, unless it is 0.
        lambda_: A factor of the sum.
    """
    w = columns(weights, x)
    x = x * w
    if vote:
        mask = elect(x)
    else:
        mask = torch.ones_like(x, dtype=torch.bool)
    total = (x * mask).sum(0)
    if normalize:
        divisor = (w * mask).sum(0)
        # Such a sum has no mean: as in mergekit, it stays a sum.
        is_zero = (divisor.abs() < 1e-8) | is_cancelled(w * mask, divisor)
        total = total / torch.where(is_zero, 1, divisor)
    return base + lambda_ * total
