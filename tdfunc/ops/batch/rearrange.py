"""Rows of the batch in another order or number: flip, repeat, repeat_interleave; pad.

All but `pad` are indexings and described as such: a lazy stack does them without becoming dense.
"""

from collections.abc import Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.core.collection import LeafOp, TensorCollection
from tdfunc.core.errors import LeafMismatchError, as_count, error
from tdfunc.core.nontensor import NonTensorBase, NonTensorStack
from tdfunc.core.shapes import dim_index, dim_size, dims_of, put_first
from tdfunc.core.types import LeafFn, Names
from tdfunc.ops.base.cast import keeps_number
from tdfunc.ops.batch.shape import reshape

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound=TensorCollection)


def same_names(names: Names) -> Names:
    """Return the names of a batch whose dimensions stay."""
    return names


def _take(tree: T, dim: int, rows: Tensor, leaf: LeafFn) -> T:
    """Return the tree of the rows along a dimension; `leaf` is torch's own way of taking them."""
    size = tree._batch_size
    index = (*(slice(None),) * dim, rows)

    def take(x: Any) -> Any:
        if isinstance(x, NonTensorBase):
            return x[index]
        return leaf(x)

    new = put_first(Size((*size[:dim], len(rows), *size[dim + 1 :])), len(size))
    return tree._shape(LeafOp("index", take, new, same_names, True, (index,), plain=lambda _: leaf))


def flip(tree: T, dims: "int | Sequence[int]") -> T:
    """Reverse the rows along dimensions."""
    given = [dim_index(dim, len(tree._batch_size), "flip") for dim in dims_of(dims)]
    for dim in sorted(set(given)):
        rows = torch.arange(dim_size(tree._batch_size, dim, "flip"), device="cpu").flip(0)
        tree = _take(tree, dim, rows, methodcaller("flip", dim))
    return tree


def repeat(tree: T, repeats: tuple[int, ...]) -> T:
    """Repeat the whole batch along each dimension."""
    n = len(tree._batch_size)
    repeats = tuple([as_count("repeat: a number of repetitions", times, 0) for times in repeats])
    if len(repeats) != n:
        raise error(
            ValueError,
            "repeat: there is not one number for each batch dimension.",
            expected=f"{n} numbers of 0 or more, one for each dimension of {list(tree._batch_size)}",
            got=list(repeats),
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
        # `cat` keeps the layout of memory, and `repeat` does not: only a contiguous leaf takes either.
        if 0 < times <= _FEW and type(x) is Tensor and x.is_contiguous():
            return torch.cat((x,) * times, dim)
        return x.repeat(*[times if i == dim else 1 for i in range(x.dim())])

    return repeat


def repeat_interleave(tree: T, repeats: "int | Tensor", dim: int | None, output_size: int | None) -> T:
    """Repeat each row along a dimension; without one, of the flattened batch."""
    if dim is None:
        tree = reshape(tree, (-1,))
        dim = 0
    dim = dim_index(dim, len(tree._batch_size), "repeat_interleave")
    total = dim_size(tree._batch_size, dim, "repeat_interleave")
    if isinstance(repeats, int) and repeats >= 0 and output_size is None:
        rows = torch.arange(total, device="cpu").repeat_interleave(repeats)

        def repeated(x: Tensor) -> Tensor:
            # Faster than torch's own way, and for plain tensors on this device only.
            same = type(x) is Tensor and x.device == rows.device
            if same:
                return x.index_select(dim, rows)
            return x.repeat_interleave(repeats, dim)

        return _take(tree, dim, rows, repeated)
    times = torch.as_tensor(repeats, device=None if isinstance(repeats, Tensor) else "cpu")
    counts = times.expand(total)
    rows = torch.repeat_interleave(torch.arange(total, device=counts.device), counts, output_size=output_size)

    def leaf(x: Tensor) -> Tensor:
        return torch.repeat_interleave(x, counts.to(x.device), dim, output_size=output_size)

    return _take(tree, dim, rows, leaf)


def pad(tree: T, pad_size: Sequence[int], value: float = 0.0) -> T:
    """Pad batch dimensions with a constant.

    Non-tensor data with a value for each row are padded with None; one value for all rows is kept.

    Args:
        tree: A tree with batch dimensions.
        pad_size: The numbers of rows before and after, for the first batch dimension, then for the next.
        value: The value of the new rows.

    Shapes:
        (B, *S) becomes (before + B + after, *S), for a `pad_size` of two numbers.

    Raises:
        ValueError: The numbers do not form pairs, are negative, or are for more dimensions than the batch has.
        LeafMismatchError: A leaf's dtype cannot hold the value.

    Examples:
        >>> tdf.pad(TensorDict({"a": torch.ones(2)}, [2]), [1, 0])["a"]
        tensor([0., 1., 1.])
    """
    size = tree._batch_size
    sizes = dims_of(pad_size)
    # For each batch dimension the numbers before and after it.
    pairs = list(zip(sizes[::2], sizes[1::2], strict=False))
    if len(sizes) % 2 or len(pairs) > len(size) or any(count < 0 for count in sizes):
        raise error(
            ValueError,
            "pad: a padded batch dimension does not have two numbers.",
            expected=f"at most {len(size)} pairs of numbers of 0 or more",
            got=sizes,
        )
    for dim in range(len(pairs)):
        dim_size(size, dim, "pad")

    def grown(old: Size) -> Size:
        padded = [before + length + after for (before, after), length in zip(pairs, old, strict=False)]
        return Size([*padded, *old[len(pairs) :]])

    # `torch.nn.functional.pad` counts dimensions from the last.
    last_first = [count for pair in reversed(pairs) for count in pair]

    def leaf(x: Any) -> Any:
        if isinstance(x, NonTensorBase):
            return pad_values(x, pairs, grown(x.shape))
        if not keeps_number(value, x.dtype):
            raise LeafMismatchError(
                "pad: the value would be altered.",
                got=f"{value!r} for {x.dtype}",
                hint="cast the leaf first, or pad it by itself.",
            )
        unpadded = [0, 0] * (x.dim() - len(pairs))
        return torch.nn.functional.pad(x, [*unpadded, *last_first], value=value)

    return tree._shape(LeafOp("pad", leaf, grown, same_names, True, (tuple(sizes), value)))


def pad_values(node: NonTensorBase, pairs: Sequence[tuple[int, int]], size: Size) -> Any:
    """Return non-tensor data of a padded batch: None in the new rows, or one value for all as before."""
    if not isinstance(node, NonTensorStack):
        return node.rebatch(size)
    array: Any = np.full(tuple(size), None, dtype=object)
    inner = tuple(slice(before, before + n) for (before, _), n in zip(pairs, node.shape, strict=False))
    array[inner] = node._array
    return NonTensorStack._wrap(array)


class RearrangeMethods(TensorCollection):
    """Rows of the batch in another order or number."""

    __slots__ = ()

    def flip(self, dims: "int | Sequence[int]", *more: int) -> "Self":
        """Return the tree with its rows reversed along batch dimensions."""
        return flip(self, (dims, *more) if isinstance(dims, int) else dims)

    def repeat(self, *repeats: Any) -> "Self":
        """Return the batch repeated as a whole along each batch dimension, as `Tensor.repeat`.

        Raises:
            ValueError: `repeats` does not have one number for each batch dimension.
        """
        is_one_sequence = len(repeats) == 1 and isinstance(repeats[0], (list, tuple))
        given: Any = repeats[0] if is_one_sequence else repeats
        return repeat(self, tuple(given))

    def repeat_interleave(
        self, repeats: "int | Tensor", dim: int | None = None, *, output_size: int | None = None
    ) -> "Self":
        """Return the tree with each row repeated; without `dim`, each row of the flattened batch.

        Args:
            repeats: The number of repetitions, or one number for each row.
            dim: The batch dimension.
            output_size: The number of rows of the result, if it is known; this saves a synchronisation.

        Examples:
            >>> TensorDict({"a": torch.arange(2)}, [2]).repeat_interleave(2)["a"]
            tensor([0, 0, 1, 1])
        """
        return repeat_interleave(self, repeats, dim, output_size)
