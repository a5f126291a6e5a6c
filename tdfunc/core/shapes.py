"""Batch-size arithmetic: the leading dimensions after an index or a reshape, and of a set of leaves."""

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.core.context import has_values, is_compiling
from tdfunc.core.errors import BatchSizeError, error, refuse_text
from tdfunc.core.types import Names

EMPTY = Size(())
_ALL = slice(None)
_INTS = (int, torch.SymInt)


def as_size(value: Any, call: str = "batch_size") -> Size:
    """Return a batch size given as None, an int or a sequence of ints."""
    if value is None:
        return EMPTY
    if isinstance(value, Size):
        return value
    if isinstance(value, int) or getattr(value, "ndim", 1) == 0:
        value = (operator.index(value),)
    size = Size(tuple(value))
    if size and min(size) < 0:
        raise error(ValueError, f"{call}: sizes must be 0 or more.", got=repr(value))
    return size


def shape_of(leaf: Tensor) -> Size | None:
    """Return the shape of a leaf: -1 where a strided nested tensor is ragged, None of an uninitialised parameter."""
    try:
        return leaf.shape
    except (RuntimeError, ValueError):
        rows: Any = leaf._nested_tensor_size() if leaf.is_nested else None
    if rows is None:
        return None
    # Without rows a size is not known, and a nested tensor of no dimensions has no columns.
    columns = rows.t().tolist() if rows.dim() == 2 else []
    sizes = [column[0] if len(set(column)) == 1 else -1 for column in columns]
    return Size([leaf.size(0), *sizes])


def as_names(names: Sequence[str | None] | None, ndim: int) -> Names | None:
    """Check dimension names; all-None names are None."""
    if names is None:
        return None
    refuse_text("names: the names of dimensions", names)
    result = tuple(names)
    given = [name for name in result if name is not None]
    if not all(isinstance(name, str) for name in given):
        raise error(TypeError, "names: a name must be a str or None.", got=repr(result))
    if len(result) != ndim or len(set(given)) != len(given):
        raise error(
            ValueError,
            "names: there is not one distinct name, or None, for each batch dimension.",
            expected=f"{ndim} names",
            got=repr(result),
        )
    return result if given else None


def common_prefix(first: Size, second: Size) -> Size:
    """Return the longest common leading part of two sizes."""
    if first == second:
        return first
    n = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        n += 1
    return first[:n]


def starts_with(leaf: Tensor, size: Size) -> bool:
    """Return True if a leaf has a shape, and it starts with a batch size."""
    try:
        return leaf.shape[: len(size)] == size
    except RuntimeError:  # a strided nested tensor
        return False


def put_first(new: Size, n: int) -> Callable[[Size], Size]:
    """Return a function that puts `new` in place of the first n dimensions of a batch size."""
    return lambda old: new if len(old) == n else new + old[n:]


def common_size(sizes: Sequence[Size]) -> Size:
    """Return the size that all share, -1 where they differ; of sizes of unequal length, their leading dimensions."""
    return Size([each[0] if len(set(each)) == 1 else -1 for each in zip(*sizes, strict=False)])


def stacked_size(size: Size, dim: int, count: int) -> Size:
    """Return a batch size with the dimension of a stack in it."""
    return size[:dim] + Size((count,)) + size[dim:]


def one_shape(tensors: Collection[Tensor]) -> Size | None:
    """Return the shape that all tensors have, or None if they differ, are none or have no shape."""
    try:
        shapes = [x.shape for x in tensors]
    except RuntimeError:  # a strided nested tensor
        return None
    if shapes and shapes.count(shapes[0]) == len(shapes):
        return shapes[0]
    return None


def as_int(value: Any) -> int:
    """Return an int that may be of another library, or symbolic."""
    return value if isinstance(value, _INTS) else operator.index(value)  # pyright: ignore[reportReturnType]


def int_or_ints(value: Any) -> int | list[int]:
    """Return an int, or the ints of a sequence, array or tensor."""
    given = value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value
    if isinstance(given, Iterable):
        return [as_int(item) for item in given]
    return as_int(given)


def dim_index(dim: int, ndim: int, call: str) -> int:
    """Return a non-negative batch dimension."""
    dim = as_int(dim)
    if not -ndim <= dim < ndim:
        raise error(
            IndexError,
            f"{call}: batch dimension {dim} does not exist.",
            expected=f"{-ndim} <= dim < {ndim}" if ndim else "a tree with batch dimensions; this one has none",
            hint="only batch dimensions can be addressed; for dimensions of the leaves use td.apply.",
        )
    return dim % ndim


def dims_of(dims: Any) -> list[int]:
    """Return one batch dimension, or several, as a list."""
    given = int_or_ints(dims)
    if isinstance(given, list):
        return given
    return [given]


def dim_size(size: Size, dim: int, call: str) -> int:
    """Return the size of a batch dimension, which a ragged one (-1) does not have."""
    if size[dim] < 0:
        raise BatchSizeError(
            f"{call}: batch dimension {dim} is ragged, and has no single size.",
            got=f"batch size {list(size)}",
            hint="pad() the lazy stack first, or call it on each of its trees.",
        )
    return size[dim]


def fill_size(sizes: Sequence[int], numel: int, call: str) -> Size:
    """Replace the one -1 of a requested shape."""
    rest = math.prod([size for size in sizes if size != -1])
    if sizes.count(-1) == 1 and rest > 0 and numel % rest == 0:
        sizes = [numel // rest if size == -1 else size for size in sizes]
    if math.prod(sizes) != numel or (sizes and min(sizes) < 0):
        raise error(
            RuntimeError,
            f"{call}: the shape does not have the number of elements of the batch.",
            expected=f"{numel} elements",
            got=str(tuple(sizes)),
        )
    return Size(sizes)


def broadcast(*sizes: Size) -> Size | None:
    """Return the shape that shapes broadcast to, or None if they do not.

    `torch.broadcast_shapes` takes ten times as long, and imports sympy when it is first called.
    """
    result = sizes[0]
    for size in sizes[1:]:
        if size == result:
            continue
        long = size
        short = result
        if len(long) < len(short):
            long, short = short, long
        lead = long[: len(long) - len(short)]
        pairs = list(zip(long[len(lead) :], short, strict=True))
        if not all([a == b or a == 1 or b == 1 for a, b in pairs]):
            return None
        result = lead + Size([b if a == 1 else a for a, b in pairs])
    return result


def fits_into(shape: Size, size: Size) -> bool:
    """Return True if a shape broadcasts to this very size."""
    skipped = len(size) - len(shape)
    return skipped >= 0 and all([a in (1, b) for a, b in zip(shape, size[skipped:], strict=True)])


# -- indexing ---------------------------------------------------------------------------------------------------


_INDEX_DTYPES = (torch.int64, torch.int32)
_MASK_DTYPES = (torch.bool, torch.uint8)
# Torch takes these from numpy, but not as tensors.
_NARROW = (torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64)


def normalize_index(index: Any, size: Size) -> tuple[Any, ...]:
    """Return the index as a tuple of int, slice, None, bool and integer tensors, with no Ellipsis and no masks.

    Boolean masks become their nonzero positions once, for all leaves.
    """
    given: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    items = [_index_item(item, index) for item in given]
    used = sum([_count_dims(item) for item in items])
    if used > len(size):
        raise _too_many(index, used, size)
    parts: list[Any] = []
    dim = 0
    skipped = len(size) - used
    for item in items:
        if item is Ellipsis:
            if skipped < 0:
                raise error(IndexError, "index: there is more than one Ellipsis.", got=repr(index))
            parts += [_ALL] * skipped
            dim = dim + skipped
            skipped = -1
        elif isinstance(item, Tensor) and item.dtype is torch.bool:
            covered = size[dim : dim + item.dim()]
            if item.shape != covered:
                raise error(
                    IndexError,
                    "index: the mask does not have the shape of the batch dimensions that it covers.",
                    expected=str(list(covered)),
                    got=str(list(item.shape)),
                )
            parts += item.nonzero(as_tuple=True)
            dim += item.dim()
        else:
            parts.append(item)
            dim += _count_dims(item)
    return tuple(parts)


def _too_many(index: Any, used: int, size: Size) -> IndexError:
    hint = "a tree without a batch size has no rows: TensorDict(..., batch_size=[n]). Keys are text: td['0']."
    if size:
        hint = "only batch dimensions can be indexed; for dimensions of the leaves use td.apply(lambda x: x[...])."
    return error(
        IndexError,
        "index: there are more indices than batch dimensions.",
        expected=f"at most {len(size)} for batch size {list(size)}",
        got=f"{used} in {index!r}",
        hint=hint,
    )


def _count_dims(item: Any) -> int:
    """Return the number of batch dimensions that one item of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, Tensor) and item.dtype is torch.bool:
        return item.dim()
    return 1


def _index_item(item: Any, whole: Any) -> Any:
    """Return one item as None, Ellipsis, bool, int, slice, or a tensor of positions or bools."""
    if isinstance(item, slice):
        if item.step is not None and item.step <= 0:
            raise error(
                ValueError,
                "index: the step of a slice must be positive.",
                got=f"{item!r}",
                hint="td.flip(0) reverses rows.",
            )
        return item
    if item is None or item is Ellipsis or isinstance(item, _INTS):
        return item
    if isinstance(item, (np.integer, np.bool_)):
        # A number, also where an array of its type would be a mask.
        return item.item()
    if isinstance(item, (list, range, np.ndarray)):
        item = _as_index_tensor(item, whole)
    if not isinstance(item, Tensor):
        raise _bad_index(item, whole)
    if item.dtype in _MASK_DTYPES:
        if item.dim():
            return item.bool()
        return bool(item)
    if item.dtype not in _INDEX_DTYPES:
        raise error(
            IndexError,
            "index: a tensor does not hold integers or bools.",
            expected="int64, int32 or bool",
            got=str(item.dtype),
        )
    return item


def _as_index_tensor(item: Any, whole: Any) -> Tensor:
    """Return a list, range or array as a tensor of positions or bools."""
    values: Any = list(item) if isinstance(item, range) else item
    try:
        positions = torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as err:
        raise _bad_index(item, whole) from err
    # An empty list is of floats, and numpy's narrow integers are indices; uint8 is an old spelling of a mask.
    is_empty = not positions.numel() and positions.dtype is not torch.bool
    if is_empty or positions.dtype in _NARROW:
        return positions.long()
    return positions


def _bad_index(item: Any, whole: Any) -> IndexError:
    # Any: whatever a caller wrote between brackets.
    given: Any = whole
    hint = "a key and an index do not mix: td[index][key] reads, td.at[key].apply(fn) writes."
    if isinstance(whole, list) and all([isinstance(each, str) for each in given]):
        keys = ", ".join([repr(each) for each in given])
        hint = f"several keys are chosen by td.select({keys})."
    elif isinstance(whole, tuple) and all([isinstance(each, (str, int)) for each in given]):
        keys = ", ".join([repr(str(each)) for each in given])
        hint += f" Keys are text: td[{keys}]."
    return error(
        IndexError,
        "index: an item is not an index.",
        expected="int, slice, Ellipsis, None, bool, or a tensor, list, range or array of ints or bools",
        got=f"{item!r} in {whole!r}",
        hint=hint,
    )


def slice_length(item: slice, length: int) -> int:
    """Return the number of rows that a slice takes."""
    if not is_compiling() or item.step not in (None, 1):
        return len(range(*item.indices(length)))
    # A compiler keeps these symbolic; `indices` would make it compile again for each length.
    start = 0 if item.start is None else item.start
    stop = length if item.stop is None else item.stop
    return max(_bounded(stop, length) - _bounded(start, length), 0)


def _bounded(end: int, length: int) -> int:
    """Return an end of a slice, counted from the first of `length` rows."""
    return max(end + length, 0) if end < 0 else min(end, length)


class _Layout(NamedTuple):
    """The dimensions of a normalized index: where each one of the result comes from."""

    # Slices with their dimensions, and None with None, in the order of the result.
    kept: list[tuple[Any, int | None]]
    # Tensors with their dimensions, and bools with None; their common dimensions go to `place` among those kept.
    advanced: list[tuple[Any, int | None]]
    place: int
    # Ints and tensors without dimensions, with their dimensions, which the result lacks.
    ints: list[tuple[Any, int]]
    # How many dimensions the index takes.
    used: int


def _read_layout(index: tuple[Any, ...]) -> _Layout:
    kept: list[Any] = []
    advanced: list[Any] = []
    ints: list[Any] = []
    places: list[int] = []
    dim = 0
    for item in index:
        is_bool = isinstance(item, bool)
        if (isinstance(item, _INTS) and not is_bool) or (isinstance(item, Tensor) and not item.dim()):
            ints.append((item, dim))
        elif item is None or isinstance(item, slice):
            kept.append((item, None if item is None else dim))
        else:
            places.append(len(kept) + len(advanced))
            advanced.append((item, None if is_bool else dim))
        dim += item is not None and not is_bool
    # Advanced indices side by side leave their result in place, else it goes first.
    together = bool(places) and places[-1] - places[0] == len(places) - 1
    return _Layout(kept, advanced, places[0] if together else 0, ints, dim)


def index_size(index: tuple[Any, ...], size: Size) -> Size:
    """Return the batch size after a normalized index, by torch's rules."""
    layout = _read_layout(index)
    for item, dim in layout.ints:
        _check_int(item, dim, size)
    result = [1 if dim is None else slice_length(item, size[dim]) for item, dim in layout.kept]
    if layout.advanced:
        shapes = [Size((int(item),)) if dim is None else item.shape for item, dim in layout.advanced]
        shape = broadcast(*shapes)
        if shape is None:
            got = ", ".join(str(list(each)) for each in shapes)
            raise error(IndexError, "index: the index tensors do not broadcast together.", got=f"shapes {got}")
        is_empty = any([dim is not None and size[dim] == 0 for _, dim in layout.advanced])
        # As torch: any position in an empty dimension is out of range.
        # The sizes first: to a compiler the number of elements that a mask takes may be unknown.
        if is_empty and shape.numel():
            raise error(
                IndexError,
                "index: an empty batch dimension has no positions.",
                expected="no positions, or a dimension with elements",
                got=f"positions of shape {list(shape)}, batch size {list(size)}",
            )
        result[layout.place : layout.place] = shape
    return Size(result) + size[layout.used :]


def index_names(index: tuple[Any, ...], names: Names) -> Names | None:
    """Return the names after a normalized index.

    Slices and single lists of rows keep the name of their dimension; ints drop it, and new dimensions have none.
    """
    layout = _read_layout(index)
    result = [None if dim is None else names[dim] for _, dim in layout.kept]
    if layout.advanced:
        rows = [None if dim is None else names[dim] for _, dim in layout.advanced]
        ndim = max([1 if dim is None else item.dim() for item, dim in layout.advanced])
        if len(rows) == ndim == 1:
            result[layout.place : layout.place] = rows
        else:
            result[layout.place : layout.place] = [None] * ndim
    result.extend(names[layout.used :])
    return as_names(result, len(result))


def _check_int(item: Any, dim: int, size: Size) -> None:
    if isinstance(item, int) and not -size[dim] <= item < size[dim]:
        raise error(
            IndexError,
            f"index: {item} is out of range for batch dimension {dim}.",
            expected=f"{-size[dim]} <= index < {size[dim]}",
        )


def check_positions(index: tuple[Any, ...], size: Size) -> None:
    """Refuse positions that do not exist, for a tree in which no tensor is there to refuse them.

    Those on another device are not read, which would wait for it, nor those that a transformation or mode stands for.
    """
    if not has_values():
        return
    dim = 0
    # As torch, which reads no position of rows without elements, unless there is no row at all.
    is_read = index_size(index, size).numel() > 0
    for item in index:
        is_checked = type(item) is Tensor and (is_read or item.dim() == 0 or size[dim] == 0)
        if is_checked and item.device.type == "cpu" and item.numel():
            for end in item.aminmax():
                _check_int(int(end), dim, size)
        dim += item is not None and not isinstance(item, bool)


def check_lead(shape: Size, size: Size, where: str) -> None:
    """Raise unless `shape` starts with the batch size."""
    if shape[: len(size)] != size:
        raise BatchSizeError(
            f"{where!r}: the leading dimensions are not the batch size.",
            expected=f"shape {list(size)} + (...)" if size else "any shape",
            got=f"shape {list(shape)}",
            hint="give batch_size the leading dimensions that all entries share.",
        )
