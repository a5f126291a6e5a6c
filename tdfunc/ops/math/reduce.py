"""Reductions: over whole leaves, batch dimensions or feature dimensions, leaf by leaf or to one tensor."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Size, Tensor

from tdfunc.core.collection import PLAIN, LeafOp, TensorCollection, iter_leaves, leaf_items, note_leaf, with_leaves
from tdfunc.core.context import is_compiling
from tdfunc.core.errors import check_choice, error
from tdfunc.core.shapes import EMPTY, as_int, dim_index, dims_of, one_shape, put_first
from tdfunc.core.ties import node_at
from tdfunc.core.types import LeafFn, Names
from tdfunc.ops.base.reading import check_dense

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)
DType: TypeAlias = torch.dtype | None
# Takes a leaf, the dimensions (at least one) and keepdim.
Kernel = Callable[[Tensor, tuple[int, ...], bool], Tensor]


class Extremes(NamedTuple):
    """Two trees: the extreme values, and the position along the dimension of each."""

    values: Any
    indices: Any


def _reduce_leaves(
    tree: T, name: str, dim: Any, keepdim: bool, kernel: Kernel, direct: Callable[[Any], LeafFn] | None = None
) -> T:
    """Reduce every leaf by a kernel; `direct` makes one that C calls, for given dimensions or None for all."""
    n = len(tree._batch_size)

    def over(x: Tensor, dims: tuple[int, ...]) -> Tensor:
        # A leaf without the dimensions has one element along them.
        if dims:
            return kernel(x, dims, keepdim)
        return kernel(x.unsqueeze(-1), (x.dim(),), False)

    if dim == "feature":
        # Each node has its own batch size, so its leaves have their own features.
        done: list[Tensor] = []
        for path, leaf in leaf_items(tree):
            batch_ndim = len(node_at(tree, path[:-1])._batch_size)
            done.append(over(leaf, tuple(range(batch_ndim, leaf.dim()))))
        return with_leaves(tree, done)
    if dim is None:
        plain = direct(None) if direct is not None and not keepdim else None

        def size(old: Size) -> Size:
            return Size((1,) * len(old)) if keepdim else EMPTY

        return tree._map(LeafOp(name, lambda x: over(x, tuple(range(x.dim()))), size, plain=_always(plain)))
    if isinstance(dim, str):
        raise error(
            ValueError,
            f"{name}: dim must be a batch dimension (or several), None for all, or 'feature'.",
            got=repr(dim),
        )
    given = (dim,) if isinstance(dim, int) else dims_of(dim)
    dims = tuple(sorted({dim_index(d, n, name) for d in given}))

    def names_after(names: Names) -> Names:
        return tuple([given for i, given in enumerate(names) if keepdim or i not in dims])

    def bind(dims: tuple[int, ...], _: bool) -> LeafFn:
        return lambda x: over(x, dims)

    new = put_first(reduced_size(tree._batch_size, dims, keepdim), n)
    plain = direct(dims) if direct is not None and dims else None
    args = (dims, keepdim)
    # By position: keywords take longer.
    return tree._map(LeafOp(name, bind(*args), new, names_after, False, args, False, False, _always(plain), bind))


def _always(leaf: LeafFn | None) -> Callable[[Any], LeafFn] | None:
    if leaf is None:
        return None
    return lambda _: leaf


def reduced_size(size: Size, dims: Sequence[int], keepdim: bool) -> Size:
    """Return the batch size after a reduction."""
    return Size([1 if i in dims else s for i, s in enumerate(size) if keepdim or i not in dims])


# A leaf of more elements takes longer to copy than its own reduction does to start.
_SMALL = 4096


def truth(tree: TensorCollection, dim: Any, keepdim: bool, name: str) -> Any:
    """`all` and `any`: a bool for the whole tree, or a tree for a dimension."""
    fn: Callable[..., Tensor] = getattr(torch, name)
    if dim is None:
        leaves = tree._data.values()
        # One call reduces the leaves of a flat tree of small masks, stacked to one tensor.
        if len(leaves) > 1 and not is_compiling() and PLAIN.issuperset(map(type, leaves)):
            shape = one_shape(leaves)
            if shape is not None and shape.numel() <= _SMALL and all([x.dtype is torch.bool for x in leaves]):
                with suppress(RuntimeError):  # on several devices
                    return bool(fn(torch.stack(list(leaves))))
        results = (bool(fn(x)) for _, x in iter_leaves(tree))
        if name == "all":
            return all(results)
        return any(results)
    return _reduce_leaves(tree, name, dim, keepdim, lambda x, dims, keep: fn(x, dims, keepdim=keep))


def reduce(tree: TensorCollection, name: str, dim: Any, keepdim: bool, whole: bool | None, **kwargs: Any) -> Any:
    """Reduce with `torch.<name>`; `whole` gives one tensor for all leaves, or all features, a tied one counted once."""
    fn: Callable[..., Tensor] = _OWN.get(name) or getattr(torch, name)
    if whole:
        check_choice(f"{name}: with reduce=True dim", dim, (None, "feature"))
        if dim == "feature":
            check_dense(tree, name)
        # The features of all leaves side by side; without `dim` all their elements.
        size = tree._batch_size if dim == "feature" else EMPTY
        flat = [x.reshape(*size, x.shape[len(size) :].numel()) for _, x in leaf_items(tree)]
        if not flat:
            raise error(ValueError, f"{name}: the tree does not have a leaf.")
        return fn(torch.cat(flat, -1), (len(size),), **kwargs)
    direct = None
    if name in _METHODS:
        direct = partial(_method, name, keepdim, kwargs)

    def each(x: Tensor, dims: tuple[int, ...], keep: bool) -> Tensor:
        return fn(x, dims, keepdim=keep, **kwargs)

    try:
        return _reduce_leaves(tree, name, dim, keepdim, each, direct)
    except RuntimeError as err:
        note_leaf(err, name)
        raise


# Methods of a tensor that take dimensions, or none for all of them.
_METHODS = frozenset(("sum", "mean", "amax", "amin", "std", "var", "nansum", "nanmean"))


def _method(name: str, keepdim: bool, options: dict[str, Any], dims: tuple[int, ...] | None) -> LeafFn:
    """Return a reduction that C calls: over all dimensions, or over these."""
    options = {key: value for key, value in options.items() if value is not None}
    if dims is None:
        return methodcaller(name, **options)
    # torch reads one number faster than a tuple of it, and positions faster than names.
    given = dims[0] if len(dims) == 1 else dims
    if options:
        return methodcaller(name, given, keepdim=keepdim, **options)
    return methodcaller(name, given, keepdim)


def _prod(x: Tensor, dim: tuple[int, ...], keepdim: bool = False, **kwargs: Any) -> Tensor:
    # torch.prod takes one dimension or all; all at once rounds once.
    if len(dim) == x.dim():
        out = torch.prod(x, **kwargs)
        if keepdim:
            return out.reshape([1] * x.dim())
        return out
    for d in sorted(dim, reverse=True):
        x = torch.prod(x, d, keepdim=keepdim, **kwargs)
    return x


def _norm(x: Tensor, dim: tuple[int, ...], keepdim: bool = False, *, p: float, dtype: torch.dtype | None) -> Tensor:
    return torch.linalg.vector_norm(x, p, dim, keepdim, dtype=dtype)


def _quantile(x: Tensor, dim: tuple[int, ...], keepdim: bool = False, *, q: Any, how: str) -> Tensor:
    # torch.quantile takes one dimension or all.
    if len(dim) == 1:
        return torch.quantile(x, q, dim[0], keepdim, interpolation=how)
    last = x.movedim(dim, tuple(range(-len(dim), 0))).flatten(-len(dim))
    out = torch.quantile(last, q, -1, interpolation=how)
    if keepdim:
        return out.reshape(reduced_size(x.shape, dim, True))
    return out


# Spelled otherwise in torch, or with other arguments.
_OWN: dict[str, Callable[..., Tensor]] = {"norm": _norm, "prod": _prod, "quantile": _quantile}


def extremes(tree: T, name: str, dim: Any, keepdim: bool) -> T:
    """Reduce with `torch.max`, `min`, `argmax` or `argmin` over one dimension, all features, or whole leaves."""
    fn: Callable[..., Any] = getattr(torch, name)
    if getattr(dim, "ndim", None) == 0:
        # An integer of numpy or of a tensor.
        dim = as_int(dim)
    if dim not in (None, "feature") and not isinstance(dim, int):
        raise error(
            ValueError,
            f"{name}: dim must be one batch dimension, None for all, or 'feature'.",
            got=repr(dim),
        )

    def kernel(x: Tensor, dims: tuple[int, ...], keep: bool) -> Any:
        if len(dims) == 1:
            return fn(x, dims[0], keepdim=keep)
        # Positions count through all the dimensions.
        out = fn(x.flatten(dims[0], dims[-1]), dims[0])
        size = reduced_size(x.shape, dims, keep)
        if isinstance(out, Tensor):
            return out.reshape(size)
        return tuple(part.reshape(size) for part in out)

    return _reduce_leaves(tree, name, dim, keepdim, kernel)


def extreme(
    tree: TensorCollection, name: str, dim: Any, keepdim: bool, whole: bool | None, return_indices: bool
) -> Any:
    """`max` and `min`: values, and with a dimension where they were found."""
    if dim is None or whole:
        return reduce(tree, f"a{name}", dim, keepdim, whole)
    pairs = extremes(tree, name, dim, keepdim)
    found = Extremes(*[pairs._map(LeafOp("item", itemgetter(i))) for i in range(2)])
    return found if return_indices else found.values


class ReduceMethods(TensorCollection):
    """Reductions of every leaf: over all its elements, batch dimensions (`dim=0`) or features (`dim="feature"`).

    With `reduce=True` all leaves together give one tensor: without `dim` one number, with `dim="feature"` one for each
    element of the batch.
    """

    __slots__ = ()

    def all(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Return True if every element of every leaf is true; with `dim`, the tree of `torch.all(leaf, dim)`."""
        return truth(self, dim, keepdim, "all")

    def any(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Return True if any element of any leaf is true; with `dim`, the tree of `torch.any(leaf, dim)`."""
        return truth(self, dim, keepdim, "any")

    def sum(self, dim: Any = None, keepdim: bool = False, *, dtype: DType = None, reduce: bool | None = None) -> Any:
        """Return the sum of each leaf.

        Raises:
            IndexError: The batch dimension does not exist.
            ValueError: `reduce` is given with a batch dimension, or the tree has no leaves.

        Examples:
            >>> td = TensorDict({"a": torch.ones(3, 2)}, [3])
            >>> td.sum(0)["a"], td.sum(dim="feature")["a"], td.sum(reduce=True)
            (tensor([3., 3.]), tensor([2., 2., 2.]), tensor(6.))
            >>> td.set("b", torch.arange(3)).sum(dim="feature", reduce=True)
            tensor([2., 3., 4.])
        """
        return reduce_tree(self, "sum", dim, keepdim, reduce, dtype=dtype)

    def mean(self, dim: Any = None, keepdim: bool = False, *, dtype: DType = None, reduce: bool | None = None) -> Any:
        """Return the mean of each leaf."""
        return reduce_tree(self, "mean", dim, keepdim, reduce, dtype=dtype)

    def prod(self, dim: Any = None, keepdim: bool = False, *, dtype: DType = None, reduce: bool | None = None) -> Any:
        """Return the product of each leaf."""
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

    def nansum(self, dim: Any = None, keepdim: bool = False, *, dtype: DType = None, reduce: bool | None = None) -> Any:
        """Return the sum of each leaf without NaN values."""
        return reduce_tree(self, "nansum", dim, keepdim, reduce, dtype=dtype)

    def nanmean(
        self, dim: Any = None, keepdim: bool = False, *, dtype: DType = None, reduce: bool | None = None
    ) -> Any:
        """Return the mean of each leaf without NaN values."""
        return reduce_tree(self, "nanmean", dim, keepdim, reduce, dtype=dtype)

    def logsumexp(self, dim: Any = None, keepdim: bool = False, *, reduce: bool | None = None) -> Any:
        """Return the logarithm of the sum of exponentials of each leaf."""
        return reduce_tree(self, "logsumexp", dim, keepdim, reduce)

    def norm(
        self, p: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: DType = None, reduce: bool | None = None
    ) -> Any:
        """Return the norm of order `p` of each leaf, seen as a vector.

        Examples:
            >>> grads = TensorDict({"w": torch.full((2, 2), 3.0), "b": torch.zeros(2)})
            >>> grads.norm()["w"], grads.norm(reduce=True)
            (tensor(6.), tensor(6.))
        """
        return reduce_tree(self, "norm", dim, keepdim, reduce, p=p, dtype=dtype)

    def quantile(
        self,
        q: float | Tensor,
        dim: Any = None,
        keepdim: bool = False,
        *,
        interpolation: str = "linear",
        reduce: bool | None = None,
    ) -> Any:
        """Return a quantile of each leaf.

        Raises:
            ValueError: `q` is several quantiles; `torch.stack` one tree for each.
        """
        if isinstance(q, Tensor) and q.dim():
            raise error(
                ValueError,
                "quantile: q must be a number.",
                got=f"shape {list(q.shape)}",
                hint="torch.stack([td.quantile(each, dim) for each in q]).",
            )
        return reduce_tree(self, "quantile", dim, keepdim, reduce, q=q, how=interpolation)


class ExtremeMethods(TensorCollection):
    """Largest and smallest values, and where they are."""

    __slots__ = ()

    def max(
        self, dim: Any = None, keepdim: bool = False, *, reduce: bool | None = None, return_indices: bool = True
    ) -> Any:
        """Return the largest value of each leaf, and with `dim` its position.

        Args:
            dim: A batch dimension, or "feature"; the indices count through all features.
            keepdim: Keep the dimension, with size 1.
            reduce: Return the largest value of all leaves, or of all their features, as a tensor.
            return_indices: With `dim` return `(values, indices)`, two trees; otherwise the values.

        Raises:
            ValueError: `dim` is several dimensions; `amax` takes them.

        Examples:
            >>> td = TensorDict({"a": torch.tensor([[1, 5], [7, 2]])}, [2])
            >>> td.max(0).values["a"], td.max(0).indices["a"], td.max()["a"]
            (tensor([7, 5]), tensor([1, 0]), tensor(7))
        """
        return extreme(self, "max", dim, keepdim, reduce, return_indices)

    def min(
        self, dim: Any = None, keepdim: bool = False, *, reduce: bool | None = None, return_indices: bool = True
    ) -> Any:
        """Return the smallest value of each leaf, and with `dim` its position, with the arguments of `max`."""
        return extreme(self, "min", dim, keepdim, reduce, return_indices)

    def argmax(self, dim: Any = None, keepdim: bool = False) -> "Self":
        """Return the position of the largest value of each leaf: in a batch dimension, its features or all of it."""
        return extremes(self, "argmax", dim, keepdim)

    def argmin(self, dim: Any = None, keepdim: bool = False) -> "Self":
        """Return the position of the smallest value of each leaf: in a batch dimension, its features or all of it."""
        return extremes(self, "argmin", dim, keepdim)


# `reduce` is also the name of an argument of the methods.
reduce_tree = reduce
