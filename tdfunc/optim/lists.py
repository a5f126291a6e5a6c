"""Arithmetic on lists of tensors: one foreach kernel for all leaves, or leaf by leaf with functions for transforms.

A rule is written once, in these terms. Its coefficients are floats, or where members differ tensors over the leading
dimensions of the leaves.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdfunc.ops.edits.at import as_leaf

# A number, or a float64 tensor over the leading dimensions of the leaves.
Coefficient: TypeAlias = float | Tensor
Leaves: TypeAlias = list[Tensor]
# Their numbers are computed in float32, and so is what a state keeps of them: a factor such as 0.999 rounds to 1 in
# bfloat16, so that a running average would never decay.
LOW_PRECISION = (torch.float16, torch.bfloat16)


class Lists:
    """List arithmetic, in place by foreach kernels or out of place leaf by leaf.

    In place, a method overwrites its first list, which must be the rule's own: parameters, slots or a temporary.
    With `keep=True` it does not; gradients are always kept.

    Args:
        inplace: Overwrite the lists, which must be real tensors; else every operation makes new ones.
    """

    __slots__ = ("_inplace",)

    def __init__(self, *, inplace: bool) -> None:
        self._inplace = inplace

    def add(self, xs: Leaves, ys: Leaves, scale: Coefficient, *, keep: bool = False) -> Leaves:
        """`x + scale * y`."""
        if isinstance(scale, Tensor):
            return self.run("addcmul", xs, ys, scale, keep=keep)
        return self.run("add", xs, ys, keep=keep, alpha=scale)

    def addcmul(self, xs: Leaves, ys: Leaves, zs: Leaves, scale: Coefficient) -> Leaves:
        """`x + scale * y * z`."""
        if isinstance(scale, Tensor):
            return self.run("addcmul", xs, self.run("mul", ys, scale, keep=True), zs)
        return self.run("addcmul", xs, ys, zs, value=scale)

    def addcdiv(self, xs: Leaves, ys: Leaves, zs: Leaves, scale: Coefficient) -> Leaves:
        """`x + scale * y / z`."""
        if isinstance(scale, Tensor):
            return self.run("addcdiv", xs, self.run("mul", ys, scale, keep=True), zs)
        return self.run("addcdiv", xs, ys, zs, value=scale)

    def sqrt(self, xs: Leaves) -> Leaves:
        """`sqrt(x)`, kept; its derivative is 0 where x is 0, because an infinite one times 0 would be nan."""
        if self._inplace:
            return self.run("sqrt", xs, keep=True)
        return [torch.threshold(x, 0.0, 1.0).sqrt() * x.sign() for x in xs]

    # Any: the options of the kernel.
    def run(self, name: str, xs: Leaves, *others: Leaves | Coefficient, keep: bool = False, **options: Any) -> Leaves:
        """Call the function of torch with this name on the lists, and on coefficients spread over them."""
        if not self._inplace:
            return self.each(getattr(torch, name), xs, *others, **options)
        operands = [spread(item, xs) if isinstance(item, Tensor) else item for item in others]
        if keep:
            return list(getattr(torch, f"_foreach_{name}")(xs, *operands, **options))
        getattr(torch, f"_foreach_{name}_")(xs, *operands, **options)
        return xs

    # Any: what the function takes and returns.
    def each(self, fn: Callable[..., Any], xs: Leaves, *others: Leaves | Coefficient, **options: Any) -> list[Any]:
        """Call a function that writes to nothing on each leaf, the entries of other lists and coefficients."""
        operands = [spread(item, xs) if isinstance(item, Tensor) else item for item in others]
        columns = [item if isinstance(item, list) else [item] * len(xs) for item in operands]
        return [fn(*row, **options) for row in zip(xs, *columns, strict=True)]


def choose(mask: bool | Tensor, value: Coefficient, other: Coefficient) -> Coefficient:
    """Return a coefficient where the mask is True, else the other."""
    if not isinstance(mask, Tensor):
        return value if mask else other
    return torch.where(mask, value, other)


def scalar_dtype() -> torch.dtype:
    """Return the dtype in which torch.optim keeps numbers in the state."""
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32


def rounded(value: Coefficient) -> Coefficient:
    """Return a coefficient as torch.optim would read it back from the state."""
    if isinstance(value, Tensor):
        return value.to(scalar_dtype()).double()
    return torch.tensor(value, dtype=scalar_dtype()).item()


def wide_dtype(leaf: Tensor) -> torch.dtype:
    """Return the dtype in which a state keeps numbers of this leaf."""
    return torch.float32 if leaf.dtype in LOW_PRECISION else leaf.dtype


def widen(leaves: Leaves) -> Leaves:
    """Return 16-bit leaves as float32."""
    return [leaf.float() if leaf.dtype in LOW_PRECISION else leaf for leaf in leaves]


def restore(leaves: Leaves, like: Leaves) -> Leaves:
    """Return leaves in the dtypes of others."""
    return [leaf.to(old.dtype) for leaf, old in zip(leaves, like, strict=True)]


def split_complex(leaves: Leaves) -> Leaves:
    """Return complex leaves as real ones, with a last dimension of real and imaginary parts."""
    return [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in leaves]


def join_complex(leaves: Leaves, like: Leaves) -> Leaves:
    """Return leaves as complex ones where others are complex."""
    joined: Leaves = []
    for leaf, old in zip(leaves, like, strict=True):
        if old.is_complex():
            if leaf.stride(-1) != 1:
                leaf = leaf.contiguous()
            leaf = torch.view_as_complex(leaf)
        joined.append(leaf)
    return joined


def place_alike(leaves: Leaves, like: Leaves) -> Leaves:
    """Return leaves of which DTensors have the placements of others."""
    # No function for each leaf, for speed.
    if all([type(leaf) is Tensor for leaf in leaves]):
        return leaves
    return [_placed_like(leaf, old) for leaf, old in zip(leaves, like, strict=True)]


# Any: tensors of any class.
def _placed_like(leaf: Any, old: Any) -> Any:
    wanted = getattr(old, "placements", None)
    given = getattr(leaf, "placements", None)
    if wanted is None or given is None or wanted == given or leaf.device_mesh != old.device_mesh:
        return leaf
    return leaf.redistribute(placements=wanted)


def spread(value: Tensor, leaves: Leaves, *, dtype: torch.dtype | None = None) -> Leaves:
    """Return a coefficient as one broadcastable tensor for each leaf, in its dtype if no other is given."""
    known: dict[tuple[int, torch.dtype, torch.device, Any], Tensor] = {}
    result: Leaves = []
    for leaf in leaves:
        mesh = getattr(leaf, "device_mesh", None)
        kind = (leaf.dim(), leaf.dtype, leaf.device, mesh)
        if kind not in known:
            row = value.to(leaf.device, leaf.dtype if dtype is None else dtype)
            row = row.reshape((*value.shape, *[1] * (leaf.dim() - value.dim())))
            known[kind] = as_leaf(row, leaf)
        result.append(known[kind])
    return result
