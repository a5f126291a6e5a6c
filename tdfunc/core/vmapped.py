"""Which dimension of a tree's leaves `torch.vmap` took, and where it put it: torch says neither to what it rebuilds.

A node that is flattened notes how its leaves lie in memory; when it is rebuilt, its new leaves are compared with that,
and its non-tensor values, one for each row, are moved as the leaves were.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Size, Tensor

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


# Sizes and strides; nested and sparse tensors, and parameters without values, lack one of the two.
Memory = tuple[tuple[int, ...], tuple[int, ...]] | None


class Layout(NamedTuple):
    """How a leaf lies in memory, as it is seen and under the wrapper of the vmap that maps it."""

    memory: Memory = None
    # Of the vmap, -1 for none.
    level: int = -1
    # The dimension under the wrapper that vmap has taken.
    mapped: int | None = None
    under: Memory = None


# For each dimension that vmap has taken its level, and where it was if that was none of the values' batch.
Mapped = tuple[tuple[int | None, int | None], ...]


class Rows(NamedTuple):
    """A value for each element of a batch: the array has the dimensions that vmap has taken in front."""

    array: np.ndarray[Any, Any]
    # The number of dimensions after the batch.
    features: int
    mapped: Mapped

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[hidden_dims(self.mapped) :]


class Move(NamedTuple):
    """What vmap, or an `expand`, did to the leaves of a node: it took a dimension, or gave one back."""

    # Of the running transform, None for none.
    level: int | None
    taken: bool
    # Where the dimension was, or is now: several where the leaves do not tell, none where they contradict each other.
    places: frozenset[int]


# Where the rows of what is rebuilt are being stacked, if they are.
_stacked: ContextVar[int | None] = ContextVar("_stacked", default=None)


@contextmanager
def stacking(dim: int) -> Generator[None]:
    """Say that the leaves of what is rebuilt meanwhile are those of several rows, stacked."""
    token = _stacked.set(dim)
    try:
        yield
    finally:
        _stacked.reset(token)


def layout_of(leaf: Any) -> Layout:
    """Return how a leaf lies in memory."""
    if not isinstance(leaf, Tensor):
        return Layout()
    if not _functorch.is_batchedtensor(leaf):
        return Layout(_memory(leaf))
    under = _memory(_functorch.get_unwrapped(leaf))
    return Layout(_memory(leaf), _functorch.maybe_get_level(leaf), _functorch.maybe_get_bdim(leaf), under)


def _memory(leaf: Tensor) -> Memory:
    try:
        return leaf.shape, leaf.stride()
    except (RuntimeError, ValueError):
        return None


def came_to(before: Layout, now: Layout, place: int) -> bool:
    """Whether the mapped dimension of a leaf has become dimension `place`."""
    if before.under is None or before.mapped is None:
        return False
    sizes, strides = before.under
    order = [dim for dim in range(len(sizes)) if dim != before.mapped]
    order.insert(place, before.mapped)
    return (tuple([sizes[dim] for dim in order]), tuple([strides[dim] for dim in order])) == now.memory


def read_move(before: Iterable[Layout], leaves: Iterable[Any]) -> Move | None:
    """Return what became of the leaves whose layouts were noted, None where it was nothing that vmap does."""
    dim = _stacked.get()
    if dim is not None:
        return Move(None, False, frozenset([dim]))
    level: int | None = _functorch.maybe_current_level()
    pairs = [(old, layout_of(leaf)) for old, leaf in zip(before, leaves, strict=False)]
    # Beside mapped leaves there may be some with `in_dims` None.
    taken = [now.mapped for old, now in pairs if now.level > old.level and now.mapped is not None]
    if taken:
        return Move(level, True, frozenset(taken) if len(set(taken)) == 1 else frozenset())
    given = [places for places in (_places(old, now) for old, now in pairs) if places is not None]
    if not given:
        return None
    return Move(level, False, frozenset.intersection(*given))


def _places(old: Layout, now: Layout) -> frozenset[int] | None:
    """Return where a leaf may have got a dimension; None if it got none."""
    if old.memory is None or now.memory is None:
        return None
    (had, steps), (sizes, strides) = old.memory, now.memory
    if now.level < old.level:
        return frozenset([place for place in range(len(sizes)) if came_to(old, now, place)])
    # vmap repeats a leaf that it did not map, in front.
    repeated = sizes[1:] == had and strides[1:] == steps and (strides[:1] == (0,) or sizes[:1] == (1,))
    return frozenset([0]) if repeated else None


def hidden_dims(mapped: Mapped) -> int:
    """Return how many dimensions of the values vmap has taken."""
    return len([1 for _, place in mapped if place is None])


def follow_rows(rows: Rows, old_ndim: int, size: Size, move: Move | None) -> Rows | None:
    """Return values that moved as the leaves did: out of sight, back, or repeated; None if that cannot be known."""
    if rows.features < 0:
        return None
    # Values that lie along other dimensions than the leaves cannot move with them.
    if move is not None and (len(rows.shape) - rows.features == old_ndim or _is_foreign(rows, move)):
        made = [_moved(rows, old_ndim, size, move, place) for place in sorted(move.places)]
        chosen = _only([new for new in made if new is not None], size)
        if chosen is None:
            return None
        rows = chosen
    # vmap puts chunks of rows together, and what was repeated for one chunk is repeated for all.
    array, hidden = rows.array, hidden_dims(rows.mapped)
    shape = (*array.shape[:hidden], *size, *array.shape[array.ndim - rows.features :])
    return rows._replace(array=_repeated(array, shape)) if len(shape) == array.ndim else rows


def _only(made: list[Rows], size: Size) -> Rows | None:
    """Return the values at the right one of the places that the leaves do not tell apart; None if it is not known."""
    for i, new in enumerate(made):
        # Of one shape: they may be read at the wrong place.
        if any([other.shape == new.shape and not _identical(new, other) for other in made[:i]]):
            return None
    # Of one chunk of rows none has the size; if the first has not that of all chunks either, it is not read.
    fitting = [new for new in made if new.shape[: len(new.shape) - new.features] == size]
    return next(iter(fitting or made), None)


def _is_foreign(rows: Rows, move: Move) -> bool:
    """Whether vmap brings a dimension of features back."""
    return not move.taken and bool(rows.mapped) and rows.mapped[-1][0] == move.level and rows.mapped[-1][1] is not None


def _moved(rows: Rows, ndim: int, size: Size, move: Move, place: int) -> Rows | None:
    """Take dimension `place` of the `ndim` of the batch, or bring it back there; None if there is no such place."""
    array, mapped, hidden = rows.array, rows.mapped, hidden_dims(rows.mapped)
    if move.taken:
        # A dimension of features goes away without the values, and has to come back where it was.
        inside = place < ndim
        array = np.moveaxis(array, hidden + place, hidden) if inside else array
        return rows._replace(array=array, mapped=(*mapped, (move.level, None if inside else place)))
    if mapped and mapped[-1][0] == move.level:
        rows, was = rows._replace(mapped=mapped[:-1]), mapped[-1][1]
        if was is not None:
            return rows if was == place else None
        return rows._replace(array=np.moveaxis(array, hidden - 1, hidden - 1 + place)) if place <= ndim else None
    # Made inside: the same for each row.
    if place > ndim or place >= len(size):
        return None
    shape = [*array.shape[: hidden + place], size[place], *array.shape[hidden + place :]]
    return rows._replace(array=np.broadcast_to(np.expand_dims(array, hidden + place), shape))


def _repeated(array: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Repeat values as often as another shape says, if they are repeated along the dimensions that differ."""
    sizes = list(zip(array.shape, shape, array.strides, strict=True))
    if array.shape == shape or array.size == 0 or any([old != new and step for old, new, step in sizes]):
        return array
    return np.broadcast_to(array[tuple([slice(None) if step else slice(1) for step in array.strides])], shape)


def _identical(a: Rows, b: Rows) -> bool:
    return all(x is y for x, y in zip(a.array.flat, b.array.flat, strict=True))
