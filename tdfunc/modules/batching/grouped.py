"""Products of groups of rows with a matrix for each group, as experts compute them: one call for all members.

T is the number of rows, G the number of groups, K and N the number of features. Group g has the rows up to `ends[g]`.
The kernel computes each group by itself, so the members' groups follow one another.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdfunc.core.context import is_recording
from tdfunc.modules.batching.fold import fold, to_front, unfold, where_batched
from tdfunc.modules.batching.rule import Rule, by_body
from tdfunc.modules.operators import define

_grouped_mm: Any = vars(torch)["_grouped_mm"]
# Those that the kernel takes, and that torch cannot trace.
UNTRACED = (torch.float32, torch.float16)


def _run(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return _grouped_mm(left, right, offs=ends)


def _like(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return a tensor like the kernel's, whose rows start at multiples of 16 bytes."""
    rows = left.shape[0]
    columns = right.shape[-1]
    step = 16 // left.element_size()
    stride = (columns + step - 1) // step * step
    if right.dim() == 3:
        return left.new_empty_strided((rows, columns), (stride, 1))
    return left.new_empty_strided((len(ends), rows, columns), (rows * stride, stride, 1))


# The kernel as an operation that a trace can record in every dtype of the kernel.
_own = define("grouped_mm(Tensor left, Tensor right, Tensor ends) -> Tensor", _run, _like, ("CPU", "CUDA"))


def _multiply(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return the kernel's products; a trace records them as one operation."""
    if is_recording() and left.dtype in UNTRACED and left.dtype == right.dtype:
        return _own(left, right, ends)
    return _run(left, right, ends)


class _Products(torch.autograd.Function):
    """Rows (T, K) times the matrices (G, K, N) of their groups: (T, N)."""

    @staticmethod
    def forward(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        return _multiply(rows, matrices, ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, matrices, ends = ctx.saved_tensors
        return _Products.apply(grads[0], matrices.mT, ends), _Outer.apply(rows, grads[0], ends), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        rows, matrices, ends = args
        members = info.batch_size
        folded_ends = _fold_ends(ends, in_dims[2], members, rows, in_dims[0])
        rows = _fold_rows(rows, in_dims[0], members, folded_ends)
        matrices = fold(matrices, in_dims[1], members)
        return unfold(_Products.apply(rows, matrices, folded_ends), members), 0


class _Outer(torch.autograd.Function):
    """The products (G, K, N) of the rows (T, K) of a group, transposed, with its rows (T, N): gradients of matrices."""

    @staticmethod
    def forward(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
        return _multiply(left.mT, right, ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        left, right, ends = ctx.saved_tensors
        return _Products.apply(right, grads[0].mT, ends), _Products.apply(left, grads[0], ends), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        left, right, ends = args
        members = info.batch_size
        folded_ends = _fold_ends(ends, in_dims[2], members, left, in_dims[0])
        left = _fold_rows(left, in_dims[0], members, folded_ends)
        right = _fold_rows(right, in_dims[1], members, folded_ends)
        return unfold(_Outer.apply(left, right, folded_ends), members), 0


def _fold_ends(ends: Tensor, dim: int | None, members: int, rows: Tensor, rows_dim: int | None) -> Tensor:
    """Return the ends (E * G) of the groups of all members."""
    length = rows.shape[0] if rows_dim is None else rows.movedim(rows_dim, 0).shape[1]
    starts = torch.arange(members, device=ends.device, dtype=ends.dtype) * length
    return (to_front(ends, dim, members) + starts[:, None]).flatten()


def _fold_rows(rows: Tensor, dim: int | None, members: int, ends: Tensor) -> Tensor:
    """Return the rows (E * T, K); those behind a member's last group would come to the next member's first one."""
    stacked = to_front(rows, dim, members)
    length = stacked.shape[1]
    places = torch.arange(members * length, device=ends.device).reshape(members, length)
    last = ends.reshape(members, -1)[:, -1:]
    return stacked.masked_fill((places >= last)[..., None], 0.0).flatten(0, 1)


def products(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Any:
    """Return the products that `F.grouped_mm` returns, or NotImplemented where these are not rows by group."""
    of_groups = mat_a.dim() == 2 and mat_b.dim() == 3 and offs is not None and offs.dim() == 1 and len(offs)
    if not of_groups or bias is not None or out_dtype is not None:
        return NotImplemented
    return _Products.apply(mat_a, mat_b, offs)


def _counts(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Return the number of rows of each group, and other histograms of a given range."""
    is_float = input.dtype in (torch.float32, torch.float64) and input.device.type == "cpu"
    is_integer = not input.dtype.is_floating_point and not input.dtype.is_complex and input.dtype != torch.bool
    # Without a range, the kernel takes the range of the numbers. Other kernels of floats round in another order.
    if min >= max or bins < 1 or not (is_float or is_integer) or torch.are_deterministic_algorithms_enabled():
        return NotImplemented
    flat = input.flatten()
    if is_float:
        low, high = torch.tensor([min, max], dtype=input.dtype)
        places = (flat - low) / (high - low) * bins
    else:
        low, high = int(min), int(max)
        if low == high:
            return NotImplemented
        places = (flat.long() - low) * bins // (high - low)
    inside = (flat >= low) & (flat <= high)
    places = torch.where(inside, places, 0).long().clamp(max=bins - 1)
    return input.new_zeros(bins).scatter_add(0, places, inside.to(input.dtype))


RULES: dict[Any, Rule] = {
    **dict.fromkeys((torch.histc, Tensor.histc), where_batched(_counts)),
    F.grouped_mm: by_body(F.grouped_mm),
    _grouped_mm: where_batched(products),
}
