"""`nuslerp`: spherical interpolation between two models, or between their task vectors."""

import torch
from torch import Tensor

from tdfunc.weights.averages.sphere import arc, is_far, long_arc, units
from tdfunc.weights.method import method


@method(
    "b + slerp(d_1, d_2, w_2 / (w_1 + w_2))",
    source="mergekit, NuSLERP",
    base="optional",
    least=2,
    most=2,
)
def nuslerp(
    base: Tensor | None, stacked: Tensor, weights: Tensor, *, row_wise: bool = False, flatten: bool = True
) -> Tensor:
    """Merge by a point on the arc between two models; with a base, between their differences from it.

    Args:
        base: The origin, or None for zeros.
        stacked: Two models.
        weights: Their weights; if they sum to 0, the point is in the middle.
        row_wise: Without `flatten`, take columns of the first dimension as vectors, not rows of the last.
        flatten: Take each leaf as one vector.

    Source:
        mergekit's NuSLERP, in which `row_wise` and `flatten` are `nuslerp_row_wise` and `nuslerp_flatten`.
    """
    x = stacked if base is None else stacked - base
    # A number has no rows.
    if flatten or x.dim() == 1:
        x = x.reshape(2, -1)
    elif row_wise:
        x = x.transpose(1, -1)
    total = weights.sum()
    is_zero = total.abs() < 1e-6
    t = torch.where(is_zero, 0.5, weights[1] / torch.where(is_zero, 1, total))
    u, _ = units(x, 1e-7)
    cos = (u[0] * u[1]).sum(-1, keepdim=True)
    far = is_far(cos)
    gap = torch.linalg.vector_norm(torch.where(far, u[0] + u[1], 0), dim=-1, keepdim=True)
    is_line = far | (1 - cos.square() <= 1e-16)
    near = arc(t, x[0], x[1], cos, is_line)
    merged = torch.where(far, long_arc(t, x[0], x[1], gap), near)
    if row_wise and not flatten:
        merged = merged.transpose(0, -1)
    merged = merged.reshape(stacked.shape[1:])
    if base is None:
        return merged
    return base + merged
