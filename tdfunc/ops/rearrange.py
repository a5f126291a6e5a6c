"""Rows of the batch in another order or number: flip, roll, repeat, narrow and their kin; pad.

All but `pad` are indexings or permutations, and say so symbolically: a lazy stack does them without becoming dense.
"""

from collections.abc import Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.core.collection import LeafOp, TensorCollection
from tdfunc.core.errors import LeafMismatchError, error
from tdfunc.core.nontensor import NonTensorBase, NonTensorStack
from tdfunc.core.shapes import as_ints, dim_index, dim_size, dims_of, int_or_ints, put_first, slice_length
from tdfunc.core.types import LeafFn, Names
from tdfunc.ops.at import _keeps
from tdfunc.ops.index import split_leaves
from tdfunc.ops.shape import expand, permute, reshape, transpose, unsqueeze

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)


def _same_names(names: Names) -> Names:
    return names


def _as_dims(dims: "int | Sequence[int]", n: int, call: str) -> list[int]:
    """Return distinct batch dimensions, counted from the front."""
    given = dims_of(dims, call)
    found = [dim_index(dim, n, call) for dim in given]
    if len(set(found)) != len(found):
        raise error(ValueError, f"{call}: a dimension is given twice.", expected="each once", got=str(given))
    return found


def _take(tree: T, dim: int, rows: Tensor, leaf: LeafFn) -> T:
    """Return the tree of the rows along a dimension; `leaf` is torch's own way of taking them."""
    size, index = tree._batch_size, (*(slice(None),) * dim, rows)

    def take(x: Any) -> Any:
        return x[index] if isinstance(x, NonTensorBase) else leaf(x)

    new = put_first(Size((*size[:dim], len(rows), *size[dim + 1 :])), len(size))
    return tree._shape(LeafOp("index", take, new, _same_names, True, (index,), plain=lambda _: leaf))


def narrow(tree: T, dim: int, start: int, length: int) -> T:
    """Return `length` rows from `start` on, sharing memory."""
    dim = dim_index(dim, len(tree._batch_size), "narrow")
    total = dim_size(tree._batch_size, dim, "narrow")
    first = start + total if start < 0 else start
    if first < 0 or length < 0 or first + length > total:
        raise error(
            IndexError,
            "narrow: the rows do not exist.",
            expected=f"rows in 0..{total}",
            got=f"start {start}, length {length}",
        )
    return tree._index(((slice(None),) * dim) + (slice(first, first + length),))


def tensor_split(tree: T, sections: "int | Sequence[int] | Tensor", dim: int) -> tuple[T, ...]:
    """Cut the batch into nearly equal parts, or at the given positions."""
    dim = dim_index(dim, len(tree._batch_size), "tensor_split")
    total = dim_size(tree._batch_size, dim, "tensor_split")
    sections = int_or_ints(sections, "tensor_split: sections and positions are ints.")
    if not isinstance(sections, list):
        if sections < 1:
            raise error(
                ValueError,
                "tensor_split: the number of parts must be positive.",
                expected="1 or more",
                got=str(sections),
            )
        small, longer = divmod(total, sections)
        cuts = [i * small + min(i, longer) for i in range(1, sections)]
    else:
        cuts = sections
    parts = [slice(start, end) for start, end in zip([0, *cuts], [*cuts, total], strict=True)]
    size, before = tree._batch_size, (slice(None),) * dim
    sizes = [Size((*size[:dim], slice_length(part, total), *size[dim + 1 :])) for part in parts]
    return split_leaves(tree, [(*before, part) for part in parts], methodcaller("tensor_split", cuts, dim), sizes)


def flip(tree: T, dims: "int | Sequence[int]") -> T:
    """Reverse the rows along dimensions."""
    for dim in _as_dims(dims, len(tree._batch_size), "flip"):
        rows = torch.arange(dim_size(tree._batch_size, dim, "flip"), device="cpu").flip(0)
        tree = _take(tree, dim, rows, methodcaller("flip", dim))
    return tree


def roll(tree: T, shifts: "int | Sequence[int]", dims: "int | Sequence[int] | None") -> T:
    """Shift the rows along dimensions, the last ones to the front; without dimensions, of the flattened batch."""
    given = int_or_ints(shifts, "roll: shifts are ints.")
    if dims is None:
        if isinstance(given, list):
            raise error(
                ValueError,
                "roll: several shifts need several dimensions.",
                expected="dims",
                got=f"shifts {shifts} and no dims",
            )
        return reshape(roll(reshape(tree, (-1,)), given, 0), tuple(tree._batch_size))
    steps = given if isinstance(given, list) else [given]
    n = len(tree._batch_size)
    where = [dim_index(dim, n, "roll") for dim in dims_of(dims, "roll")]
    if len(steps) != len(where):
        raise error(
            ValueError,
            "roll: shifts and dims differ in number.",
            expected=f"{len(where)} shifts, one for each of dims",
            got=str(steps),
        )
    for step, dim in zip(steps, where, strict=True):
        rows = torch.arange(dim_size(tree._batch_size, dim, "roll"), device="cpu").roll(step)
        tree = _take(tree, dim, rows, methodcaller("roll", step, dim))
    return tree


def rot90(tree: T, k: int, dims: Sequence[int]) -> T:
    """Turn the plane of two dimensions, from the first towards the second."""
    plane = _as_dims(dims, len(tree._batch_size), "rot90")
    if len(plane) != 2:
        raise error(ValueError, "rot90: a plane has two dimensions.", expected="2", got=str(list(dims)))
    k %= 4
    if k == 2:
        return flip(tree, plane)
    return transpose(flip(tree, plane[1] if k == 1 else plane[0]), *plane) if k else tree


def repeat(tree: T, repeats: tuple[int, ...]) -> T:
    """Repeat the whole batch along each dimension."""
    n = len(tree._batch_size)
    if len(repeats) != n or any(times < 0 for times in repeats):
        raise error(
            ValueError,
            "repeat: one number for each batch dimension.",
            expected=f"{n} numbers of 0 or more, one for each dimension of {list(tree._batch_size)}",
            got=str(list(repeats)),
            hint="tile() takes fewer or more.",
        )
    for dim, times in enumerate(repeats):
        if times != 1:
            rows = torch.arange(dim_size(tree._batch_size, dim, "repeat"), device="cpu").repeat(times)
            tree = _take(tree, dim, rows, _repeater(dim, times))
    return tree


# torch.repeat takes ten times as long as a copy of a small tensor, and torch.cat as long.
_FEW = 16


def _repeater(dim: int, times: int) -> LeafFn:
    def repeat(x: Tensor) -> Tensor:
        # Other layouts of memory stay with `cat`, which `repeat` does not.
        if 0 < times <= _FEW and type(x) is Tensor and x.is_contiguous():
            return torch.cat((x,) * times, dim)
        return x.repeat(*[times if i == dim else 1 for i in range(x.dim())])

    return repeat


def tile(tree: T, dims: tuple[int, ...]) -> T:
    """Repeat the batch; missing dimensions of either are ones in front."""
    n = len(tree._batch_size)
    for _ in range(len(dims) - n):
        tree = unsqueeze(tree, 0)
    return repeat(tree, ((1,) * (n - len(dims)) + dims) if len(dims) < n else dims)


def repeat_interleave(tree: T, repeats: "int | Tensor", dim: int | None, output_size: int | None) -> T:
    """Repeat each row along a dimension; without one, of the flattened batch."""
    if dim is None:
        tree, dim = reshape(tree, (-1,)), 0
    dim = dim_index(dim, len(tree._batch_size), "repeat_interleave")
    total = dim_size(tree._batch_size, dim, "repeat_interleave")
    if isinstance(repeats, int) and repeats >= 0 and output_size is None:
        rows = torch.arange(total, device="cpu").repeat_interleave(repeats)
        return _take(tree, dim, rows, _repeater_of_rows(dim, repeats, rows))
    times = torch.as_tensor(repeats, device=None if isinstance(repeats, Tensor) else "cpu")
    if times.dim() > 1 or (times.dim() == 1 and len(times) not in (1, total)):
        raise error(
            ValueError,
            "repeat_interleave: repeats do not fit.",
            expected=f"a number, or one for each of {total} rows",
            got=f"shape {list(times.shape)}",
        )
    counts = times.expand(total)
    rows = torch.repeat_interleave(torch.arange(total, device=counts.device), counts, output_size=output_size)

    def leaf(x: Tensor) -> Tensor:
        times = repeats if isinstance(repeats, int) else counts.to(x.device)
        return torch.repeat_interleave(x, times, dim, output_size=output_size)

    return _take(tree, dim, rows, leaf)


def _repeater_of_rows(dim: int, times: int, rows: Tensor) -> LeafFn:
    def repeat(x: Tensor) -> Tensor:
        # Half the time of torch's own way, which other classes and devices are left to.
        if type(x) is Tensor and x.device == rows.device:
            return x.index_select(dim, rows)
        return x.repeat_interleave(times, dim)

    return repeat


def movedim(tree: T, source: "int | Sequence[int]", destination: "int | Sequence[int]") -> T:
    """Move dimensions to other places; the others keep their order."""
    n = len(tree._batch_size)
    old, new = _as_dims(source, n, "movedim"), _as_dims(destination, n, "movedim")
    if len(old) != len(new):
        raise error(
            ValueError,
            "movedim: source and destination differ in number.",
            expected="as many",
            got=f"{len(old)} and {len(new)}",
        )
    rest = iter([dim for dim in range(n) if dim not in old])
    moved = dict(zip(new, old, strict=True))
    return permute(tree, tuple(moved[dim] if dim in moved else next(rest) for dim in range(n)))


def atleast(tree: T, ndim: int) -> T:
    """Add dimensions of size 1 until there are this many, where `torch.atleast_1d`, `_2d` and `_3d` put them."""
    n = len(tree._batch_size)
    for have in range(n, ndim):
        tree = unsqueeze(tree, have if have == 2 else 0)
    return tree


def pad(tree: T, pad_size: Sequence[int], value: float = 0.0) -> T:
    """Pad batch dimensions with a constant.

    Non-tensor data are padded with None where their values differ; one value for all stays so.

    Args:
        tree: A tree with batch dimensions.
        pad_size: Rows before and after, for the first batch dimension, then for the next.
        value: What the new rows hold.

    Shapes:
        (B, *S) becomes (before + B + after, *S), for a `pad_size` of two numbers.

    Raises:
        ValueError: The numbers do not come in pairs, are negative, or are more than the dimensions.
        LeafMismatchError: A leaf's dtype cannot hold the value.

    Examples:
        >>> tdf.pad(TensorDict({"a": torch.ones(2)}, [2]), [1, 0])["a"]
        tensor([0., 1., 1.])
    """
    size = tree._batch_size
    sizes = as_ints(pad_size, "pad: rows before and after are ints.")
    pairs = list(zip(sizes[::2], sizes[1::2], strict=False))
    if len(sizes) % 2 or len(pairs) > len(size) or any(count < 0 for count in sizes):
        raise error(
            ValueError,
            "pad: two numbers for each padded batch dimension.",
            expected=f"at most {len(size)} pairs of numbers of 0 or more",
            got=str(sizes),
        )
    for dim in range(len(pairs)):
        dim_size(size, dim, "pad")

    def grown(old: Size) -> Size:
        return Size([*[before + s + after for (before, after), s in zip(pairs, old, strict=False)], *old[len(pairs) :]])

    def leaf(x: Any) -> Any:
        if isinstance(x, NonTensorBase):
            return _pad_values(x, pairs, grown(x.shape))
        if not _keeps(value, x.dtype):
            raise LeafMismatchError(
                "pad: the value would be altered.",
                got=f"{value!r} for {x.dtype}",
                hint="cast the leaf first, or pad it by itself.",
            )
        # `torch.nn.functional.pad` counts dimensions from the last.
        last_first = [n for pair in reversed(pairs) for n in pair]
        return torch.nn.functional.pad(x, [*[0] * (2 * (x.dim() - len(pairs))), *last_first], value=value)

    return tree._shape(LeafOp("pad", leaf, grown, _same_names, True, (tuple(sizes), value)))


def _pad_values(node: NonTensorBase, pairs: Sequence[tuple[int, int]], size: Size) -> Any:
    if not isinstance(node, NonTensorStack):
        return node.rebatch(size)
    array: Any = np.full(tuple(size), None, dtype=object)
    inner = tuple(slice(before, before + n) for (before, _), n in zip(pairs, node.shape, strict=False))
    array[inner] = node._array
    return NonTensorStack._wrap(array)


class RearrangeMethods(TensorCollection):
    """Rows of the batch in another order or number."""

    __slots__ = ()

    def narrow(self, dim: int, start: int, length: int) -> "Self":
        """Return `length` rows from `start` on along a batch dimension, sharing memory.

        Raises:
            IndexError: There are no such rows, or no such dimension.
        """
        return narrow(self, dim, start, length)

    def tensor_split(self, indices_or_sections: "int | Sequence[int] | Tensor", dim: int = 0) -> "tuple[Self, ...]":
        """Return parts along a batch dimension: as many as asked for, nearly equal, or cut at these positions.

        Raises:
            ValueError: The number of parts is not positive.
        """
        return tensor_split(self, indices_or_sections, dim)

    def flip(self, dims: "int | Sequence[int]", *more: int) -> "Self":
        """Return the tree with its rows reversed along batch dimensions.

        Raises:
            ValueError: A dimension is given twice.
        """
        return flip(self, (dims, *more) if isinstance(dims, int) else dims)

    def fliplr(self) -> "Self":
        """Return the tree reversed along its second batch dimension."""
        return flip(self, 1)

    def flipud(self) -> "Self":
        """Return the tree reversed along its first batch dimension."""
        return flip(self, 0)

    def roll(self, shifts: "int | Sequence[int]", dims: "int | Sequence[int] | None" = None) -> "Self":
        """Return the tree with its rows shifted; without `dims`, those of the flattened batch.

        Raises:
            ValueError: There is not one shift for each dimension.

        Examples:
            >>> TensorDict({"a": torch.arange(4)}, [4]).roll(1, 0)["a"]
            tensor([3, 0, 1, 2])
        """
        return roll(self, shifts, dims)

    def rot90(self, k: int = 1, dims: Sequence[int] = (0, 1)) -> "Self":
        """Return the tree turned `k` times by 90 degrees in the plane of two batch dimensions.

        Raises:
            ValueError: There are not two different dimensions.
        """
        return rot90(self, k, dims)

    def repeat(self, *repeats: Any) -> "Self":
        """Return the batch repeated as a whole along each batch dimension, as `Tensor.repeat`.

        Raises:
            ValueError: There is not one number for each batch dimension.
        """
        given: Any = repeats[0] if len(repeats) == 1 and not isinstance(repeats[0], int) else repeats
        return repeat(self, tuple(int(times) for times in given))

    def tile(self, *dims: Any) -> "Self":
        """Return the batch repeated as a whole, as `Tensor.tile`: missing dimensions are ones in front."""
        return tile(self, tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else dims)

    def repeat_interleave(
        self, repeats: "int | Tensor", dim: int | None = None, *, output_size: int | None = None
    ) -> "Self":
        """Return the tree with each row repeated; without `dim`, those of the flattened batch.

        Args:
            repeats: How often: one number, or one for each row.
            dim: The batch dimension.
            output_size: The number of rows of the result, where it is known: saves a synchronisation.

        Raises:
            ValueError: The numbers do not fit the rows.

        Examples:
            >>> TensorDict({"a": torch.arange(2)}, [2]).repeat_interleave(2)["a"]
            tensor([0, 0, 1, 1])
        """
        return repeat_interleave(self, repeats, dim, output_size)

    def movedim(self, source: "int | Sequence[int]", destination: "int | Sequence[int]") -> "Self":
        """Return the tree with batch dimensions at other places; the others keep their order.

        Raises:
            ValueError: There are not as many places as dimensions, or one is given twice.
        """
        return movedim(self, source, destination)

    def moveaxis(self, source: "int | Sequence[int]", destination: "int | Sequence[int]") -> "Self":
        """Return what `movedim` does."""
        return movedim(self, source, destination)

    def swapaxes(self, axis0: int, axis1: int) -> "Self":
        """Return what `transpose` does."""
        return transpose(self, axis0, axis1)

    def swapdims(self, dim0: int, dim1: int) -> "Self":
        """Return what `transpose` does."""
        return transpose(self, dim0, dim1)

    def atleast_1d(self) -> "Self":
        """Return the tree with a batch dimension of size 1 where it has none."""
        return atleast(self, 1)

    def atleast_2d(self) -> "Self":
        """Return the tree with at least two batch dimensions; a row stays a row: (n) becomes (1, n)."""
        return atleast(self, 2)

    def atleast_3d(self) -> "Self":
        """Return the tree with at least three batch dimensions: (n) becomes (1, n, 1), (m, n) becomes (m, n, 1)."""
        return atleast(self, 3)

    def broadcast_to(self, *shape: Any) -> "Self":
        """Return the tree expanded to a batch shape, without copying."""
        return expand(self, tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape)
