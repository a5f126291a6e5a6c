"""Operations on the batch dimensions of all leaves: reshape, permute, squeeze, expand, split and their kin.

Feature dimensions follow untouched. A nested tree with a longer batch keeps its own trailing batch dimensions.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Size, Tensor

from tdfunc.core.collection import LeafOp, TensorCollection, by_shape
from tdfunc.core.errors import error
from tdfunc.core.shapes import as_int, dim_index, dim_size, dims_of, fill_size, int_or_ints, put_first
from tdfunc.core.types import LeafFn, Names
from tdfunc.ops.batch.index import split_leaves

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)


def _ints(args: tuple[Any, ...]) -> tuple[int, ...]:
    if len(args) != 1 or isinstance(args[0], int):
        return args
    given = int_or_ints(args[0])
    if isinstance(given, list):
        return tuple(given)
    return (given,)


# Methods by name, called from C, take a third less time on a leaf than functions of ours.


def _resized_op(
    n: int,
    new: Size,
    method: str,
    name: str = "reshape",
    names: Callable[[Names], Names | None] | None = None,
) -> LeafOp:
    """Describe `leaf.<method>(*new, *features)` for leaves of a batch of n dimensions."""

    def call(shape: Size) -> LeafFn:
        # Ints as arguments are twice as fast as a Size in torch's parser; none at all is spelled with an empty tuple.
        return methodcaller(method, *((*new, *shape[n:]) or ((),)))

    leaf, plain = by_shape(call)
    return LeafOp(name, leaf, put_first(new, n), names, True, (new, method), plain=plain)


def reshape(tree: T, shape: tuple[int, ...], method: str = "reshape") -> T:
    """Give the batch another shape of the same number of elements."""
    old = tree._batch_size
    # A ragged batch has no number of elements; a lazy stack takes the sizes as they are.
    if -1 in old:
        size = Size(shape)
    else:
        size = fill_size(shape, old.numel(), method)
    if size == old:
        return tree
    return tree._shape(_resized_op(len(old), size, method))


def flatten(tree: T, start: int, end: int) -> T:
    """Merge a range of batch dimensions."""
    size = tree._batch_size
    # As in torch, a tree without dimensions has one here.
    ndim = len(size) or 1
    start = dim_index(start, ndim, "flatten")
    end = dim_index(end, ndim, "flatten")
    if not size:
        return reshape(tree, (1,))
    if start > end:
        raise error(RuntimeError, "flatten: start_dim comes after end_dim.", got=f"{start} > {end}")
    if start == end:
        return tree
    names = tree._names
    op = _resized_op(ndim, Size((*size[:start], size[start : end + 1].numel(), *size[end + 1 :])), "reshape")
    # Unlike `reshape`, this method works without the other sizes of a leaf.
    new = tree._shape(op._replace(plain=lambda _: methodcaller("flatten", start, end)))
    if names:
        return _name_dims(new, (*names[:start], None, *names[end + 1 :]))
    return new


def unflatten(tree: T, dim: int, sizes: Sequence[int]) -> T:
    """Split one batch dimension into several."""
    size = tree._batch_size
    dim = dim_index(dim, len(size), "unflatten")
    full = fill_size(sizes, size[dim], "unflatten")
    names = tree._names
    new = reshape(tree, (*size[:dim], *full, *size[dim + 1 :]))
    return _name_dims(new, (*names[:dim], *[None] * len(full), *names[dim + 1 :]) if names else None)


def _name_dims(tree: T, names: Names | None) -> T:
    if names is None or not any(names):
        return tree
    return tree._make(tree._data, tree._batch_size, tree._device, names, tree._static)


def permute(tree: T, dims: tuple[int, ...]) -> T:
    """Reorder the batch dimensions."""
    n = len(tree._batch_size)
    if any(not -n <= d < n for d in dims) or sorted(d % n for d in dims) != list(range(n)):
        raise error(
            ValueError,
            "permute: a batch dimension is missing, or named twice.",
            expected=f"an order of {list(range(n))}",
            got=list(dims),
        )
    order = tuple([d % n for d in dims])
    if order == tuple(range(n)):
        return tree
    return tree._shape(_permute_op(tree._batch_size, order))


def _permute_op(size: Size, order: tuple[int, ...]) -> LeafOp:
    n = len(size)

    def call(ndim: int) -> LeafFn:
        return methodcaller("permute", *order, *range(n, ndim))

    def leaf(x: Any) -> Any:
        return call(x.dim())(x)

    def plain(leaves: Collection[Tensor]) -> LeafFn:
        ndims = set(map(Tensor.dim, leaves))
        if len(ndims) == 1:
            return call(ndims.pop())
        return leaf

    def names(old: Names) -> Names:
        return (*[old[d] for d in order], *old[n:])

    new = put_first(Size([size[d] for d in order]), n)
    return LeafOp("permute", leaf, new, names, True, (order,), plain=plain)


def transpose(tree: T, dim0: int, dim1: int) -> T:
    """Swap two batch dimensions."""
    size = tree._batch_size
    n = len(size)
    dim0 = dim_index(dim0, n, "transpose")
    dim1 = dim_index(dim1, n, "transpose")
    if dim0 == dim1:
        return tree
    order = list(range(n))
    order[dim0] = dim1
    order[dim1] = dim0
    op = _permute_op(size, tuple(order))
    return tree._shape(op._replace(leaf=methodcaller("transpose", dim0, dim1), plain=None))


def unsqueeze(tree: T, dim: int) -> T:
    """Insert a batch dimension of size 1."""
    size = tree._batch_size
    dim = dim_index(dim, len(size) + 1, "unsqueeze")
    op = LeafOp(
        "unsqueeze",
        methodcaller("unsqueeze", dim),
        put_first(Size((*size[:dim], 1, *size[dim:])), len(size)),
        lambda names: (*names[:dim], None, *names[dim:]),
        True,
        (dim,),
    )
    return tree._shape(op)


def squeeze(tree: T, dim: "int | tuple[int, ...] | None") -> T:
    """Remove batch dimensions of size 1 (all, or the given ones that have it)."""
    size = tree._batch_size
    if dim is None:
        given = range(len(size))
    else:
        given = dims_of(dim)
    dims = {dim_index(d, len(size), "squeeze") for d in given}
    gone = [d for d in dims if size[d] == 1]
    for d in sorted(gone, reverse=True):
        size = tree._batch_size
        new = put_first(size[:d] + size[d + 1 :], len(size))
        leaf = methodcaller("squeeze", d)
        tree = tree._shape(LeafOp("squeeze", leaf, new, lambda names, d=d: names[:d] + names[d + 1 :], True, (d,)))
    return tree


def _grows_to(size: int | None, new: int) -> bool:
    """Return True if a dimension expands to a new size; one of None is new."""
    if new == size:
        return True
    return new >= 0 and size in (1, None)


def expand(tree: T, shape: tuple[int, ...]) -> T:
    """Expand batch dimensions of size 1, and add new ones in front, without copying."""
    old = tree._batch_size
    n = len(tree._batch_size)
    lead = len(shape) - n
    # None for a dimension that is new; -1 for a ragged one, which stays.
    before = (*[None] * lead, *old)
    full = tuple([new if size is None or new != -1 else size for new, size in zip(shape, before, strict=False)])
    if lead < 0 or not all([_grows_to(size, new) for size, new in zip(before, full, strict=True)]):
        raise error(
            RuntimeError,
            "expand: only sizes of 1 can grow, and new dimensions come first.",
            expected=f"a shape of at least {n} dimensions that fits batch size {list(old)}",
            got=list(shape),
        )
    if full == tuple(old):
        return tree
    # New dimensions go before all of the leaf's own.
    return tree._shape(_resized_op(n, Size(full), "expand", "expand", lambda names: (None,) * lead + names))


def split(tree: T, sizes: "int | Sequence[int]", dim: int) -> tuple[T, ...]:
    """Cut the batch along a dimension into parts of the given size or sizes."""
    size = tree._batch_size
    dim = dim_index(dim, len(size), "split")
    total = dim_size(size, dim, "split")
    given = int_or_ints(sizes)
    if not isinstance(given, list):
        sizes = given
        parts = [min(sizes, total - i) for i in range(0, total, sizes)] or [0]
    else:
        parts = given
        if sum(parts) != total or any(p < 0 for p in parts):
            raise error(
                ValueError,
                "split: the sizes do not add up to the dimension.",
                expected=str(total),
                got=f"{parts} (sum {sum(parts)})",
            )
    ends = list(accumulate(parts))
    before = (slice(None),) * dim
    index = [(*before, slice(end - part, end)) for end, part in zip(ends, parts, strict=True)]
    # Tensor.split without its Python part.
    cut = methodcaller("split_with_sizes", parts, dim)
    return split_leaves(tree, index, cut, [Size((*size[:dim], part, *size[dim + 1 :])) for part in parts])


def chunk(tree: T, chunks: int, dim: int) -> tuple[T, ...]:
    """Cut the batch into at most this many parts of one size (the last may be smaller)."""
    chunks = as_int(chunks)
    dim = dim_index(dim, len(tree._batch_size), "chunk")
    total = dim_size(tree._batch_size, dim, "chunk")
    # As torch: a dimension of size 0 is cut into so many empty parts.
    if total:
        return split(tree, -(-total // chunks), dim)
    return split(tree, [0] * chunks, dim)


class ShapeMethods(TensorCollection):
    """Shape operations on the batch dimensions."""

    __slots__ = ()

    @property
    def batch_size(self) -> Size:
        """The leading dimensions that all leaves share."""
        return self._batch_size

    @property
    def shape(self) -> Size:
        """The batch size."""
        return self._batch_size

    @property
    def batch_dims(self) -> int:
        """The number of batch dimensions."""
        return len(self._batch_size)

    @property
    def ndim(self) -> int:
        """The number of batch dimensions."""
        return len(self._batch_size)

    @property
    def names(self) -> list[str | None]:
        """The names of the batch dimensions."""
        if self._names is not None:
            return list(self._names)
        return [None] * len(self._batch_size)

    def dim(self) -> int:
        """Return the number of batch dimensions."""
        return len(self._batch_size)

    def size(self, dim: int | None = None) -> Any:
        """Return the batch size, or one of its dimensions."""
        if dim is None:
            return self._batch_size
        return self._batch_size[dim_index(dim, len(self._batch_size), "size")]

    def numel(self) -> int:
        """Return the number of elements of the batch (1 for a batch of no dimensions)."""
        return self._batch_size.numel()

    def reshape(self, *shape: Any) -> "Self":
        """Return the tree with another batch shape."""
        return reshape(self, _ints(shape))

    def view(self, *shape: Any) -> "Self":
        """Return a view of the tree with another batch shape (or dtype); the leaves share memory.

        Raises:
            RuntimeError: The strides of a leaf do not allow a view; use `reshape`.
        """
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            return self._map(LeafOp("view", lambda x: x.view(shape[0])))
        return reshape(self, _ints(shape), "view")

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "Self":
        """Return the tree with a range of batch dimensions merged."""
        return flatten(self, start_dim, end_dim)

    def unflatten(self, dim: int, unflattened_size: Sequence[int]) -> "Self":
        """Return the tree with one batch dimension split into several."""
        return unflatten(self, dim, unflattened_size)

    def permute(self, *dims: Any) -> "Self":
        """Return the tree with its batch dimensions in another order."""
        return permute(self, _ints(dims))

    def transpose(self, dim0: int, dim1: int) -> "Self":
        """Return the tree with two batch dimensions swapped."""
        return transpose(self, dim0, dim1)

    def unsqueeze(self, dim: int) -> "Self":
        """Return the tree with a new batch dimension of size 1; -1 puts it last among the batch dimensions."""
        return unsqueeze(self, dim)

    def squeeze(self, dim: Any = None) -> "Self":
        """Return the tree without batch dimensions of size 1."""
        return squeeze(self, dim)

    def expand(self, *shape: Any) -> "Self":
        """Return the tree expanded to a batch shape, without copying; -1 keeps a dimension."""
        return expand(self, _ints(shape))

    def expand_as(self, other: "Tensor | TensorCollection") -> "Self":
        """Return the tree with its batch expanded to the shape of a tensor or the batch size of a tree.

        `td.apply(lambda x, y: x.expand_as(y), other)` also expands features.
        """
        return expand(self, tuple(other.shape))  # pyright: ignore[reportAttributeAccessIssue]

    def split(self, split_size: "int | Sequence[int]", dim: int = 0) -> "tuple[Self, ...]":
        """Return parts along a batch dimension, each of the given size (or sizes)."""
        return split(self, split_size, dim)

    def chunk(self, chunks: int, dim: int = 0) -> "tuple[Self, ...]":
        """Return at most `chunks` parts along a batch dimension."""
        return chunk(self, chunks, dim)
