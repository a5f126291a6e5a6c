"""Indexing a lazy stack, and writing rows at an index: the part for its own dimension names trees."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, cast

import numpy as np
from torch import Size, Tensor

from tdfunc._lazystack.ragged import check_same_ndim, same_keys
from tdfunc.core.collection import LeafOp, TensorCollection
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, error
from tdfunc.core.shapes import broadcast_sizes
from tdfunc.ops import at, index, shape, storage_writes

# A part of an index with its place, by which dimensions that it makes are told apart.
Part = tuple[int, Any]


def is_rows(part: Any) -> bool:
    return isinstance(part, bool) or (isinstance(part, Tensor) and part.dim() > 0)


def find(parts: Sequence[Any], dim: int) -> int | None:
    """Return the place of the part that indexes a dimension."""
    seen = 0
    for place, part in enumerate(parts):
        if part is None or isinstance(part, bool):
            continue
        if seen == dim:
            return place
        seen += 1
    return None


def layout(parts: Sequence[Part], dims: Sequence[int]) -> list[Any]:
    """Name the dimensions of the result in order: kept ones by number, new ones and rows by what makes them."""
    rest = iter(dims)
    labels: list[Any] = []
    rows: list[Size] = []
    places: list[int] = []
    order = 0
    for place, part in parts:
        if part is None:
            labels.append(("new", place))
        elif isinstance(part, slice):
            labels.append(next(rest))
        elif is_rows(part):
            rows.append(Size((int(part),)) if isinstance(part, bool) else part.shape)
            places.append(order)
            if not isinstance(part, bool):
                next(rest)
        else:
            next(rest)
            continue
        order += 1
    if rows:
        # As torch: rows side by side stay in place, others go first.
        where = places[0] if places == list(range(places[0], places[0] + len(places))) else 0
        labels[where:where] = [("rows", i) for i in range(len(broadcast_sizes(rows)))]
    return [*labels, *rest]


def pick(stack: Any, parts: tuple[Any, ...]) -> Any:
    """Index a lazy stack: the part for its own dimension takes trees, the others index each tree."""
    dim, trees, n = stack._dim, stack._trees, len(stack._batch_size)
    tagged = list(enumerate(parts))
    whole = layout(tagged, range(n))
    place = find(parts, dim)
    if place is None:
        return stack._like([_indexed(tree, parts) for tree in trees], whole.index(dim))
    here, rest = parts[place], [item for item in tagged if item[0] != place]
    if isinstance(here, Tensor) and here.dim() == 0:
        here = int(here)
    if isinstance(here, int):
        check_number(here, here, len(trees), dim)
        return _indexed(trees[here], [part for _, part in rest])
    if isinstance(here, Tensor):
        return _pick_rows(stack, here, rest, whole)
    chosen = trees[here]
    inner = layout(rest, [d for d in range(n) if d != dim])
    order = [inner.index(label) for label in whole if label != dim]
    done = [_indexed(tree, [part for _, part in rest]) for tree in chosen]
    # Rows that the slice stood between lie side by side in a tree.
    if order != list(range(len(order))):
        done = [shape.permute(tree, tuple(order)) for tree in done]
    return nest(stack, done, (len(done),), whole.index(dim))


def _pick_rows(stack: Any, here: Tensor, rest: list[Part], whole: list[Any]) -> Any:
    """Take trees by an index tensor; with other index tensors, one element of a tree at a time."""
    trees, size = stack._trees, len(stack._data)
    at_ = whole.index(("rows", 0))
    grid, rest = _row_grid(here, rest)
    numbers: list[int] = here.expand(grid).reshape(-1).tolist()
    for number in numbers:
        check_number(number, here, size, stack._dim)
    columns = {place: part.expand(grid).reshape(-1).tolist() for place, part in rest if is_rows(part)}
    done: list[Any] = []
    for i, number in enumerate(numbers):
        parts = [columns[place][i] if place in columns else part for place, part in rest]
        done.append(_indexed(trees[number], parts))
    return nest(stack, done, tuple(grid), at_)


def _row_grid(here: Tensor, rest: Sequence[Part]) -> tuple[Size, list[Part]]:
    """Return the shape of the rows that an index takes, and its parts without the bools, of which only that is left."""
    shapes = [Size((int(part),)) if isinstance(part, bool) else part.shape for _, part in rest if is_rows(part)]
    return broadcast_sizes([here.shape, *shapes]), [item for item in rest if not isinstance(item[1], bool)]


def _indexed(tree: Any, parts: Sequence[Any]) -> Any:
    return tree if all(isinstance(p, slice) and p == slice(None) for p in parts) else tree._index(tuple(parts))


def check_number(number: int, given: Any, count: int, dim: int) -> None:
    if not -count <= number < count:
        raise error(
            IndexError,
            f"index: {number} is out of range for batch dimension {dim}, along which the trees lie.",
            expected=f"{-count} <= index < {count}",
            got=None if given is number else str(given),
        )


def nest(stack: Any, trees: Sequence[Any], sizes: tuple[int, ...], dim: int) -> Any:
    """Return trees in row-major order as a lazy stack (of lazy stacks), whose dimensions start at `dim`."""
    if 0 in sizes:
        raise error(
            IndexError,
            "index: a lazy stack keeps one tree at least.",
            got="an index of none",
            hint="test the length of the index before.",
        )
    if len(sizes) > 1:
        step = prod(sizes[1:])
        trees = [nest(stack, trees[i : i + step], sizes[1:], dim) for i in range(0, len(trees), step)]
    return stack._of(trees, dim)


def write(stack: Any, op: LeafOp, others: Sequence[Any]) -> Any:
    """Write rows: into the trees that the index names, at what it leaves of each."""
    (parts, call), (value,) = op.args, others
    dim, trees, n = stack._dim, stack._trees, len(stack._batch_size)
    tagged = list(enumerate(parts))
    whole = layout(tagged, range(n))
    place = find(parts, dim)
    rest = [item for item in tagged if item[0] != place]
    if place is None or isinstance(parts[place], slice):
        numbers = list(range(len(trees)))[slice(None) if place is None else parts[place]]
        cuts = _cut_rows(value, whole.index(dim), len(numbers), len(whole))
        writes = [(k, [part for _, part in rest], cut) for k, cut in zip(numbers, cuts, strict=True)]
    elif isinstance(parts[place], Tensor) and parts[place].dim():
        writes = _row_writes(parts[place], rest, value, whole)
    else:
        number = int(parts[place])
        check_number(number, number, len(trees), dim)
        writes = [(number, [part for _, part in rest], value)]
    for number, inner, cut in writes:
        trees[number] = _write(trees[number], tuple(inner), cut, call)
    return stack._like(trees)


def _row_writes(here: Tensor, rest: list[Part], value: Any, whole: list[Any]) -> list[tuple[int, list[Any], Any]]:
    grid, rest = _row_grid(here, rest)
    columns = {place: part.expand(grid) for place, part in rest if is_rows(part)}
    numbers, first = here.expand(grid), whole.index(("rows", 0))
    writes: list[tuple[int, list[Any], Any]] = []
    for spot in np.ndindex(*grid):
        inner = [int(columns[place][spot]) if place in columns else part for place, part in rest]
        cut = value
        for i, position in enumerate(spot):
            ndim = len(whole) - i
            cut = _cut_rows(cut, first, grid[i], ndim)[position]
        writes.append((int(numbers[spot]), inner, cut))
    return writes


def _cut_rows(value: Any, dim: int, count: int, ndim: int) -> list[Any]:
    """Return the part of new rows, laid out in `ndim` dimensions, for each of the trees along one of them."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        parts = {key: _cut_rows(part, dim, count, ndim) for key, part in entries.items()}
        return [{key: part[i] for key, part in parts.items()} for i in range(count)]
    if isinstance(value, TensorCollection):
        if len(value._batch_size) <= dim or value._batch_size[dim] != count:
            raise BatchSizeError(
                "at[...]: the rows have another batch size.",
                expected=f"{count} at dimension {dim}",
                got=f"batch size {list(value._batch_size)}",
            )
        return list(index.unbind(value, dim))
    if not isinstance(value, Tensor) or value.dim() == 0:
        return [value] * count
    lead = value.reshape(*[1] * (ndim - value.dim()), *value.shape)
    if lead.shape[dim] not in (1, count):
        raise BatchSizeError(
            "at[...]: the rows have another shape.",
            expected=f"a shape that broadcasts to {count} at dimension {dim}",
            got=f"shape {list(value.shape)}",
        )
    return [lead.select(dim, i if lead.shape[dim] > 1 else 0) for i in range(count)]


def _write(tree: Any, parts: tuple[Any, ...], value: Any, call: str) -> Any:
    if call == "check_":
        storage_writes.check_row(tree, parts, value)
        return tree
    if call == "set_":
        return storage_writes.write_row(tree, parts, value)
    trivial = all(isinstance(p, slice) and p == slice(None) for p in parts)
    same = isinstance(value, TensorCollection) and value._batch_size != tree._batch_size
    if not (trivial and same and call == "set"):
        return at.write_rows(tree, parts, value, call)
    # A whole tree may give way to one of another length.
    check_same_ndim([tree, value], "at[...].set")
    for key, nodes in same_keys([tree, value], "at[...].set", ()):
        if isinstance(nodes[0], Tensor) and nodes[0].dtype != nodes[1].dtype:
            raise LeafMismatchError(
                f"at[...].set: the rows for {key!r} do not fit.",
                expected=str(nodes[0].dtype),
                got=str(nodes[1].dtype),
                hint="cast them first.",
            )
    return value
