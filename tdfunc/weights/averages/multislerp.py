"""`multislerp`: the weighted mean of directions, in the tangent space at their Euclidean mean."""

import torch
from torch import Tensor

from tdfunc.core.context import has_values
from tdfunc.core.errors import error
from tdfunc.weights.averages.sphere import units
from tdfunc.weights.method import columns, method, shares


@method(
    "b + exp_m(sum_k w_k log_m(d_k / |d_k|)) sum_k w_k |d_k|, with m the direction of sum_k w_k d_k / |d_k|",
    source="Goddard, MultiSLERP (2024)",
    base="optional",
    mean="normalize_weights",
)
def multislerp(
    base: Tensor | None, stacked: Tensor, weights: Tensor, *, normalize_weights: bool = True, eps: float = 1e-8
) -> Tensor:
    """Merge by the barycentre of the models on a sphere; with a base, of their differences from it.

    Args:
        base: The origin, or None for zeros.
        stacked: The models.
        weights: The weight of each.
        normalize_weights: Divide the weights by their sum.
        eps: The norm below which a direction is undefined.

    Raises:
        ValueError: Three or more directions cancel out.

    Source:
        Goddard, "MultiSLERP" (2024).
    """
    x = stacked if base is None else stacked - base
    x = x.reshape(stacked.shape[0], -1)
    if normalize_weights:
        weights = shares(weights)
    w = columns(weights, x)
    u, norms = units(x, eps)
    (mean,), (length,) = units((u * w).sum(0, keepdim=True), eps)
    is_lost = length <= eps
    if len(x) > 2 and has_values() and bool(is_lost) and bool((norms > eps).any()):
        raise error(ValueError, "multislerp: the directions cancel out.", hint="choose other weights.")
    # The logarithms at the direction of the sum add up to 0, whose exponential is that direction.
    merged = torch.where(is_lost, (x * w).sum(0), mean * (norms * w).sum())
    merged = merged.reshape(stacked.shape[1:])
    if base is None:
        return merged
    return base + merged
