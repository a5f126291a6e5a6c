"""`karcher`: the mean of directions on the sphere, by steps along geodesics."""

import torch
from torch import Tensor

from tdfunc.core.errors import as_count
from tdfunc.weights.averages.sphere import units
from tdfunc.weights.method import columns, is_cancelled, method, shares


@method(
    "m sum_k w_k |x_k|, with m the point of the sphere where sum_k w_k log_m(x_k / |x_k|) = 0",
    source="Karcher, Riemannian center of mass (1977)",
    base="unused",
    weight=None,
    mean=True,
)
def karcher(base: Tensor | None, stacked: Tensor, weights: Tensor, *, max_iter: int = 10, tol: float = 1e-5) -> Tensor:
    """Merge by the Karcher mean of the directions of the models, times the mean of their norms.

    Args:
        base: Not used.
        stacked: The models.
        weights: The weight of each, divided by their sum; mergekit's are equal.
        max_iter: The number of steps.
        tol: The length of a step at which they end, and the norm below which a model has no direction.

    Source:
        Karcher, "Riemannian center of mass and mollifier smoothing" (1977); mergekit's `karcher`.
    """
    del base
    x = stacked.reshape(stacked.shape[0], -1)
    w = columns(shares(weights), x)
    u, norms = units(x, 0.0)
    is_valid = norms > tol
    own = torch.where(is_valid, w, 0)
    total = own.sum()
    own = own / torch.where(is_cancelled(own.flatten(), total), 1, total)
    mean, length = units((own * u).sum(0), tol)
    # Directions that cancel out start at the first one.
    first = is_valid.int().argmax(0).expand_as(u[:1])
    mean = torch.where(length <= tol, (u * is_valid).gather(0, first)[0], mean)
    is_done = torch.zeros_like(length, dtype=torch.bool)
    for _ in range(as_count("max_iter", max_iter, least=0)):
        cos = (u * mean).sum(-1, keepdim=True).clamp(-1, 1)
        is_same = cos.abs() == 1
        angle = torch.acos(torch.where(is_same, 0, cos))
        pull = torch.where(is_same, 0, angle / torch.sin(angle))
        tangent = (own * pull * (u - cos * mean)).sum(0)
        direction, step = units(tangent, 0.0)
        is_done = is_done | (step < tol)
        moved = torch.cos(step) * mean + torch.sin(step) * direction
        mean = torch.where(is_done, mean, units(moved, tol)[0])
    merged = (w * norms).sum() * mean * is_valid.any()
    return merged.reshape(stacked.shape[1:])
