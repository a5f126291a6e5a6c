"""Indexing along batch dimensions: rows by index, mask, gather and condition."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Size, Tensor

from tdfunc._collection import LeafOp, TensorCollection
from tdfunc._errors import explain
from tdfunc._keys import is_key
from tdfunc._nontensor import NonTensorBase
from tdfunc._shapes import dim_index
from tdfunc.ops import edit

T = TypeVar("T", bound=TensorCollection)


def _right_align(index: Tensor, leaf: Any) -> Tensor:
    """Give an index or condition over the batch the leaf's feature dimensions, of size 1."""
    return index.reshape(*index.shape, *[1] * (leaf.dim() - index.dim()))


def gather(tree: T, dim: int, index: Tensor) -> T:
    """`torch.gather` along a batch dimension: the index has the batch dimensions, features follow whole."""
    n = len(tree._batch_size)
    if index.dim() != n:
        raise ValueError(explain("gather: the index must have one dimension for each of the batch.", expected=f"{n} dimensions", got=f"shape {list(index.shape)}"))
    dim = dim_index(dim, n, "gather")

    def leaf(x: Any) -> Any:
        if isinstance(x, NonTensorBase):
            grid = torch.meshgrid(*[torch.arange(s) for s in index.shape], indexing="ij") if n > 1 else (torch.arange(index.shape[0]),)
            return x[tuple(index if i == dim else g for i, g in enumerate(grid))]
        return torch.gather(x, dim, _right_align(index, x).expand(*index.shape, *x.shape[n:]))

    return tree._shape(LeafOp("gather", leaf, lambda old: index.shape + old[n:], lambda names: names, True, (dim, index)))


def masked_select(tree: T, mask: Tensor) -> T:
    """Return the rows where a mask over the leading batch dimensions is True, in one new dimension."""
    return tree._index(mask)


def where(condition: Tensor, tree: T, other: Any) -> T:
    """Return `tree` where the condition (over the batch) holds and `other` (a tree or a number) elsewhere."""
    n = condition.dim()
    size = tree._batch_size
    if torch.broadcast_shapes(condition.shape, size[:n]) != size[:n] or n > len(size):
        raise ValueError(explain("where: the condition does not fit the batch.", expected=f"shape {list(size)}", got=f"shape {list(condition.shape)}"))
    if isinstance(other, TensorCollection):
        return tree._shape(LeafOp("where", lambda x, y: torch.where(_right_align(condition, x), x, y) if isinstance(x, Tensor) else torch.where(condition, x, y), None, None, True, (condition,)), other)
    return tree._map(LeafOp("where", lambda x: torch.where(_right_align(condition, x), x, other)))


def unbind(tree: T, dim: int) -> tuple[T, ...]:
    """Return the slices along a batch dimension."""
    n = len(tree._batch_size)
    dim = dim_index(dim, n, "unbind")
    parts = tree._batch_size[dim]
    index = [((slice(None),) * dim + (i,)) for i in range(parts)]
    return split_leaves(tree, index, lambda x: x.unbind(dim), lambda old, _: old[:dim] + old[dim + 1 :], lambda names: names[:dim] + names[dim + 1 :])


def split_leaves(tree: T, index: Sequence[Any], pieces: Any, size: Any, names: Any) -> tuple[T, ...]:
    """Return the trees at several indices, from an operation that cuts each leaf into these pieces in one call."""
    cut: dict[int, Any] = {}

    # The first tree's map calls `pieces`; all are kept by the leaf's identity for the other trees.
    def piece(i: int) -> Any:
        def take(leaf: Any) -> Any:
            if id(leaf) not in cut:
                cut[id(leaf)] = pieces(leaf)
            return cut[id(leaf)][i]

        return take

    return tuple(
        tree._shape(LeafOp("index", piece(i), lambda old, i=i: size(old, i), names, True, (parts,))) for i, parts in enumerate(index)
    )


class IndexMethods(TensorCollection):
    """`td[...]` and its named forms."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        """Return the value under a key, or the tree of the rows at an index of the batch dimensions."""
        if type(index) is str:
            node = self._get(index)
            return node.value if isinstance(node, NonTensorBase) else node  # pyright: ignore
        if isinstance(index, tuple) and is_key(index):  # pyright: ignore[reportUnknownArgumentType]
            return edit.get_value(self, index)  # pyright: ignore[reportUnknownArgumentType]
        return self._index(index)

    def __len__(self) -> int:
        if not self._batch_size:
            raise TypeError(explain("len: a tree with batch size [] has no length.", hint="len(td.keys()) counts the entries."))
        return self._batch_size[0]

    def __iter__(self) -> Iterator[Any]:
        if not self._batch_size:
            raise TypeError(explain("iter: a tree with batch size [] has no rows.", hint="iterate over td.keys(), td.values() or td.items()."))
        return iter(unbind(self, 0))

    def __bool__(self) -> bool:
        raise RuntimeError(explain("bool: a tree is neither true nor false.", hint="use .all(), .any(), .is_empty(), or `is not None`."))

    def gather(self, dim: int, index: Tensor) -> Any:
        """Return the rows at an integer index along a batch dimension, as `torch.gather`.

        Shapes:
            index has as many dimensions as the batch; a leaf (*batch, *F) becomes (*index.shape, *F).
        """
        return gather(self, dim, index)

    def masked_select(self, mask: Tensor) -> Any:
        """Return the rows where the mask holds: batch size [number of True, ...]."""
        return masked_select(self, mask)

    def where(self, condition: Tensor, other: Any) -> Any:
        """Return this tree where the condition over the batch holds, and `other` elsewhere."""
        return where(condition, self, other)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return the slices along a batch dimension."""
        return unbind(self, dim)

    def get_at(self, key: Any, index: Any, default: Any = None) -> Any:
        """Return the rows of one entry."""
        node = edit.get(self, key, None)
        return default if node is None else node[index]


def as_batch(size: Any) -> Size:
    """Alias kept for the type checker."""
    return Size(size)
