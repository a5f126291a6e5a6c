"""Indexing along batch dimensions: rows by index, mask, gather and condition."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.core.collection import PLAIN, LeafOp, TensorCollection, by_shape
from tdfunc.core.context import is_compiling
from tdfunc.core.errors import error
from tdfunc.core.keys import is_key
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.shapes import dim_index, dim_size, put_first
from tdfunc.core.types import LeafFn, Names, NestedKey
from tdfunc.ops.base.foreach import broadcast_size, broadcaster, check_same, over_batch_op
from tdfunc.ops.base.reading import get_value, value_of

if TYPE_CHECKING:
    from types import EllipsisType

    from typing_extensions import Self

    # One part of an index of rows.
    Index: TypeAlias = (
        int | slice | Tensor | Sequence[int | bool] | np.ndarray[Any, Any] | np.generic | EllipsisType | None
    )

T = TypeVar("T", bound=TensorCollection)


def gather(tree: T, dim: int, index: Tensor) -> T:
    """`torch.gather` along a batch dimension: the index has the batch dimensions, features follow whole."""
    n = len(tree._batch_size)
    if index.dim() != n:
        raise error(
            ValueError,
            "gather: the index does not have one dimension for each of the batch.",
            expected=f"{n} dimensions",
            got=f"shape {list(index.shape)}",
        )
    dim = dim_index(dim, n, "gather")

    def call(shape: Size) -> LeafFn:
        features = shape[n:]
        if features:
            wide = index.reshape(index.shape + (1,) * len(features))
        else:
            wide = index
        return methodcaller("gather", dim, wide.expand(index.shape + features))

    gathered, plain = by_shape(call)

    def leaf(x: Any) -> Any:
        if not isinstance(x, NonTensorBase):
            return gathered(x)
        ranges = [torch.arange(size, device=index.device) for size in index.shape]
        grid = list(torch.meshgrid(*ranges, indexing="ij"))
        grid[dim] = index
        return x[tuple(grid)]

    new = put_first(index.shape, n)
    return tree._shape(LeafOp("gather", leaf, new, lambda names: names, True, (dim, index), plain=plain))


def masked_select(tree: T, mask: Any) -> T:
    """Return the rows where a mask over the leading batch dimensions is True, in one new dimension."""
    if isinstance(mask, (np.ndarray, list, tuple)):
        mask = torch.as_tensor(np.array(mask), device="cpu")
    if mask.dtype is not torch.bool:
        raise error(
            TypeError,
            "masked_select: the mask does not hold bools.",
            got=mask.dtype,
            hint="td[index] takes integers.",
        )
    return tree._index(mask)


def check_condition(tree: TensorCollection, condition: Any, call: str) -> None:
    """Raise unless a condition has one bool for each element of the batch, sizes of 1 expanded."""
    is_tensor = isinstance(condition, Tensor)
    ndims = (0, len(tree._batch_size))
    if not is_tensor or condition.dtype is not torch.bool or condition.dim() not in ndims:
        raise error(
            ValueError,
            f"{call}: the condition is not a tensor with one bool for each element of the batch.",
            expected=f"bool of shape {list(tree._batch_size)} (sizes of 1 are expanded)",
            got=f"{condition.dtype} of shape {list(condition.shape)}" if is_tensor else type(condition).__name__,
            hint="condition.unsqueeze(dim) adds a dimension.",
        )


def where(condition: Tensor, tree: T, other: Any) -> T:
    """Return `tree` where the condition (over the batch) holds and `other` elsewhere: a tree, number or tensor."""
    check_condition(tree, condition, "where")
    if isinstance(other, TensorCollection):
        check_same(tree, other, "where")
        size = broadcast_size(tree, other, "where")

        def choose(x: Any, holds: Tensor, y: Any) -> Any:
            if isinstance(x, NonTensorBase):
                return x.where(holds, y)
            return torch.where(holds, x, y)

        def plain(leaves: Collection[Tensor]) -> LeafFn:
            ndims = set(map(Tensor.dim, leaves))
            if len(ndims) == 1:
                return partial(torch.where, operand(ndims.pop()))
            return op.leaf

        op = over_batch_op(tree, "where", choose, condition)
        operand = broadcaster(*op.args, at_least=condition.dim() > 0)
        return tree._shape(op._replace(size=size, batch=True, plain=plain), other)
    if isinstance(other, Tensor):
        return tree._map(over_batch_op(tree, "where", lambda x, holds, y: torch.where(holds, x, y), condition, other))
    return tree._map(over_batch_op(tree, "where", lambda x, holds: torch.where(holds, x, other), condition))


def unbind(tree: T, dim: int) -> tuple[T, ...]:
    """Return the slices along a batch dimension."""
    dim = dim_index(dim, len(tree._batch_size), "unbind")
    if tree._is_lazy and tree._dim == dim:
        # Any: the children of a lazy stack are trees.
        trees: Any = tree._data.values()
        return tuple(trees)
    size = tree._batch_size
    before = (slice(None),) * dim
    count = dim_size(size, dim, "unbind")
    sizes = [size[:dim] + size[dim + 1 :]] * count
    return split_leaves(tree, [(*before, i) for i in range(count)], methodcaller("unbind", dim), sizes, dim)


def split_leaves(
    tree: T,
    index: Sequence[tuple[Any, ...]],
    cut: Callable[[Any], Sequence[Any]],
    sizes: Sequence[Size],
    gone: int | None = None,
) -> tuple[T, ...]:
    """Return the trees at several indices, from an operation that cuts each tensor into these pieces in one call.

    `sizes` are their batch sizes, and `gone` is the dimension that they lack.
    """

    def kept(names: Names) -> Names:
        if gone is None:
            return names
        return names[:gone] + names[gone + 1 :]

    data = tree._data
    if data and not is_compiling() and not tree._ties and PLAIN.issuperset(map(type, data.values())):
        names = None if tree._names is None else kept(tree._names)
        rows = zip(*map(cut, data.values()), strict=True)
        parts: list[T] = []
        for leaves, size in zip(rows, sizes, strict=True):
            part = dict(zip(data, leaves, strict=True))
            parts.append(tree._make(part, size, tree._device, names, tree._static))
        return tuple(parts)
    n = len(tree._batch_size)
    take = _taker(cut)
    parts = []
    for i, (at, size) in enumerate(zip(index, sizes, strict=True)):
        parts.append(tree._shape(LeafOp("index", take(i, at), put_first(size, n), kept, True, (at,))))
    return tuple(parts)


def _taker(cut: Callable[[Any], Sequence[Any]]) -> Callable[[int, tuple[Any, ...]], LeafFn]:
    """Return the function that makes, for the number and index of a piece, the function of a leaf that takes it.

    The first tree's map cuts; all pieces are kept by the leaf's identity for the other trees.
    """
    pieces: dict[int, Sequence[Any]] = {}

    def piece(i: int, at: tuple[Any, ...]) -> LeafFn:
        def take(leaf: Any) -> Any:
            if isinstance(leaf, NonTensorBase):
                return leaf[at]
            # A compiler would guard on the identity, and compile again for every new tensor.
            if is_compiling():
                return cut(leaf)[i]
            parts = pieces.get(id(leaf))
            if parts is None:
                parts = pieces[id(leaf)] = cut(leaf)
            return parts[i]

        return take

    return piece


def _size_of_rows(tree: TensorCollection, call: str) -> Size:
    if not tree._batch_size:
        hint = "len(td.keys()) counts the entries; iterate over td.keys(), td.values() or td.items()."
        raise error(TypeError, f"{call}: a tree with batch size [] has no rows.", hint=hint)
    return tree._batch_size


class IndexMethods(TensorCollection):
    """`td[...]`, and rows by index, mask or condition."""

    __slots__ = ()

    # The value of a key may be anything; rows are a tree of this class.
    @overload
    def __getitem__(self, index: NestedKey) -> Any: ...

    @overload
    def __getitem__(self, index: "Index | tuple[Index, ...]") -> "Self": ...

    def __getitem__(self, index: Any) -> Any:
        """Return the value under a key, or the tree of the rows at an index of the batch dimensions."""
        if type(index) is str:
            node = self._get(index)
            if isinstance(node, NonTensorBase):
                return value_of(self, index, node)
            return node
        if isinstance(index, (tuple, str)) and is_key(index):
            return get_value(self, index)
        return self._index(index)

    def __getitems__(self, indices: Any) -> "Self":
        """Return the rows at several positions; a `DataLoader` takes a batch from a tree with this one call.

        A tuple of positions selects one row for each, as torch's own `[data[i] for i in indices]`; a list of tuples
        selects one element for each, by its position in several batch dimensions.
        """
        if not isinstance(indices, (Tensor, np.ndarray)):
            indices = list(indices)
            if indices and all(isinstance(each, tuple) for each in indices):
                return self._index(tuple(map(list, zip(*indices, strict=True))))
        return self._index(indices)

    def __len__(self) -> int:
        return dim_size(_size_of_rows(self, "len"), 0, "len")

    def __iter__(self) -> "Iterator[Self]":
        _size_of_rows(self, "iter")
        return iter(unbind(self, 0))

    def __bool__(self) -> bool:
        raise error(
            RuntimeError,
            "bool: a tree is neither true nor false.",
            hint="use .all(), .any(), .is_empty(), or `is not None`.",
        )

    def gather(self, dim: int, index: Tensor) -> "Self":
        """Return the rows at an integer index along a batch dimension, as `torch.gather`.

        Shapes:
            index has as many dimensions as the batch; a leaf (*batch, *F) becomes (*index.shape, *F).

        Raises:
            ValueError: The index does not have one dimension for each batch dimension.
            IndexError: The batch dimension does not exist.
        """
        return gather(self, dim, index)

    def masked_select(self, mask: "Tensor | np.ndarray[Any, Any] | Sequence[Any]") -> "Self":
        """Return the rows at which the mask is True: batch size [number of True, ...].

        Raises:
            TypeError: The mask does not hold bools.
            IndexError: The mask does not have the shape of the leading batch dimensions.
        """
        return masked_select(self, mask)

    def where(self, condition: Tensor, other: Any) -> "Self":
        """Return this tree at the elements of the batch for which the condition is True, and `other` at all others.

        Raises:
            ValueError: The condition does not hold one bool for each element of the batch.
            TreeStructureError: `other` is a tree with other keys.
        """
        return where(condition, self, other)

    def unbind(self, dim: int = 0) -> "tuple[Self, ...]":
        """Return the slices along a batch dimension."""
        return unbind(self, dim)
