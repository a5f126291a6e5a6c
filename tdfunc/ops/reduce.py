"""Reductions: over whole leaves, batch dimensions or feature dimensions, leaf by leaf or to one tensor."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Size, Tensor

from tdfunc._collection import LeafOp, TensorCollection, iter_leaves
from tdfunc._errors import explain
from tdfunc._shapes import EMPTY, dim_index

T = TypeVar("T", bound=TensorCollection)


def reduce_leaves(tree: T, name: str, dim: Any, keepdim: bool, fn: Callable[..., Any]) -> T:
    """Reduce every leaf: `fn(leaf, dims, keepdim)` with the dimensions as a tuple."""
    n = len(tree._batch_size)
    if dim == "feature":
        return tree._map(LeafOp(name, lambda x: fn(x, tuple(range(n, x.dim())), keepdim) if x.dim() > n else x))
    if dim is None:
        return tree._map(LeafOp(name, lambda x: fn(x, tuple(range(x.dim())), keepdim), lambda old: _reduced(old, range(len(old)), keepdim)))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    dims = tuple(sorted({dim_index(d, n, name) for d in dims}))
    op = LeafOp(
        name, lambda x: fn(x, dims, keepdim), lambda old: _reduced(old, dims, keepdim),
        lambda names: tuple(name for i, name in enumerate(names) if keepdim or i not in dims), args=(dims, keepdim),
    )  # fmt: skip
    return tree._map(op)


def _reduced(size: Size, dims: Any, keepdim: bool) -> Size:
    gone = set(dims)
    return Size([1 if i in gone else s for i, s in enumerate(size) if keepdim or i not in gone])


def truth(tree: TensorCollection, dim: Any, fn: Callable[..., Tensor], combine: Callable[..., bool]) -> Any:
    """`all` and `any`: a bool for the whole tree, or a tree for a dimension."""
    if dim is None:
        results = [fn(x.bool()) for _, x in iter_leaves(tree)]
        return combine(bool(r) for r in results)
    return reduce_leaves(tree, fn.__name__, dim, False, lambda x, dims, _: _over(x.bool(), dims, fn))


def _over(x: Tensor, dims: tuple[int, ...], fn: Callable[..., Tensor]) -> Tensor:
    for d in sorted(dims, reverse=True):
        x = fn(x, d)
    return x


def reduce(tree: T, name: str, dim: Any, keepdim: bool, whole: bool | None, **kwargs: Any) -> Any:
    """Reduce with `torch.<name>`; `whole` gives one tensor for all leaves."""
    fn: Callable[..., Tensor] = getattr(torch, name)
    if whole:
        if dim not in (None, "feature"):
            raise ValueError(explain(f"{name}: reduce=True reduces all leaves to one value.", expected="dim None", got=repr(dim)))
        flat = [x.reshape(-1) for _, x in iter_leaves(tree)]
        return fn(torch.cat(flat), **kwargs)
    if name == "prod":
        return reduce_leaves(tree, name, dim, keepdim, lambda x, dims, keep: _prod(x, dims, keep, **kwargs))
    return reduce_leaves(tree, name, dim, keepdim, lambda x, dims, keep: fn(x, dims, keepdim=keep, **kwargs) if dims else fn(x, **kwargs))


def _prod(x: Tensor, dims: tuple[int, ...], keepdim: bool, **kwargs: Any) -> Tensor:
    for d in sorted(dims, reverse=True):
        x = torch.prod(x, d, keepdim=keepdim, **kwargs)
    return x


class ReduceMethods(TensorCollection):
    """Reductions over leaves, batch dimensions (`dim=0`) or feature dimensions (`dim="feature"`)."""

    __slots__ = ()

    def all(self, dim: Any = None) -> Any:
        """Return whether every element of every leaf is true; with `dim`, a tree of bools."""
        return truth(self, dim, torch.all, all)

    def any(self, dim: Any = None) -> Any:
        """Return whether any element of any leaf is true; with `dim`, a tree of bools."""
        return truth(self, dim, torch.any, any)

    def sum(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, reduce: bool | None = None) -> Any:
        """Return the sum of each leaf, over all, batch or feature dimensions; `reduce=True` gives one tensor."""
        return reduce_tree(self, "sum", dim, keepdim, reduce, dtype=dtype)

    def mean(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, reduce: bool | None = None) -> Any:
        """Return the mean of each leaf, over all, batch or feature dimensions; `reduce=True` gives one tensor."""
        return reduce_tree(self, "mean", dim, keepdim, reduce, dtype=dtype)

    def prod(self, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, reduce: bool | None = None) -> Any:
        """Return the product of each leaf, over all, batch or feature dimensions; `reduce=True` gives one tensor."""
        return reduce_tree(self, "prod", dim, keepdim, reduce, dtype=dtype)

    def amax(self, dim: Any = None, keepdim: bool = False, *, reduce: bool | None = None) -> Any:
        """Return the largest value of each leaf."""
        return reduce_tree(self, "amax", dim, keepdim, reduce)

    def amin(self, dim: Any = None, keepdim: bool = False, *, reduce: bool | None = None) -> Any:
        """Return the smallest value of each leaf."""
        return reduce_tree(self, "amin", dim, keepdim, reduce)

    def std(self, dim: Any = None, keepdim: bool = False, *, correction: int = 1, reduce: bool | None = None) -> Any:
        """Return the standard deviation of each leaf."""
        return reduce_tree(self, "std", dim, keepdim, reduce, correction=correction)

    def var(self, dim: Any = None, keepdim: bool = False, *, correction: int = 1, reduce: bool | None = None) -> Any:
        """Return the variance of each leaf."""
        return reduce_tree(self, "var", dim, keepdim, reduce, correction=correction)


# `reduce` is also the name of an argument of the methods.
reduce_tree = reduce

__all__ = ["EMPTY"]
