"""Which leaves must not be overwritten because their memory is also another's, or another element's."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tdfunc._jit.tracing import storage_of
from tdfunc.core.errors import UnsupportedError
from tdfunc.optim._lists import Leaves


def owned(writes: Leaves, reads: Leaves) -> Leaves:
    """Return the leaves to write to: copies of those whose memory is also another's, or another element's."""
    shared = {i for pair in _overlaps([*writes, *reads]) for i in pair}
    return [
        leaf.clone(memory_format=torch.contiguous_format) if i in shared or _repeats(leaf) else leaf
        for i, leaf in enumerate(writes)
    ]


def check_apart(writes: Leaves, reads: Leaves, names: Sequence[str]) -> None:
    """Raise if two leaves share memory that did not when they were traced; `names` are those of both lists."""
    for i, j in _overlaps([*writes, *reads]):
        if min(i, j) < len(writes):
            raise UnsupportedError(
                f"update(donate=True): {names[i]!r} and {names[j]!r} share memory, which one would overwrite.",
                expected="leaves apart in memory, as they were when the function was traced",
                got=f"overlapping tensors of shapes {[list((*writes, *reads)[k].shape) for k in (i, j)]}",
                hint="clone() the tree before the first step, or leave out donate.",
            )


def _overlaps(leaves: Leaves) -> Iterator[tuple[int, int]]:
    """Yield pairs of leaves whose stretches of memory overlap; each leaf that has one is in some pair.

    Interleaved columns of one matrix count as well.
    """
    # Two calls for most leaves: this is done at every step.
    spans = [
        (0, leaf.data_ptr(), leaf.nbytes, i)
        if leaf.is_contiguous() and not isinstance(leaf, FakeTensor)
        else (*_span(leaf), i)
        for i, leaf in enumerate(leaves)
    ]
    spans.sort()
    storage, end, last = -1, -1, -1
    for space, start, length, i in spans:
        if length and space == storage and start < end:
            yield last, i
        if length and (space != storage or start + length > end):
            storage, end, last = space, start + length, i


def _span(leaf: Tensor) -> tuple[int, int, int]:
    """Return (address space, first byte, bytes up to the last element)."""
    length = leaf.nbytes if leaf.is_contiguous() else _extent(leaf) * leaf.itemsize
    if isinstance(leaf, FakeTensor):
        return storage_of(leaf), int(leaf.storage_offset()) * leaf.itemsize, length
    return 0, leaf.data_ptr(), length


def _extent(leaf: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))


def _repeats(leaf: Tensor) -> bool:
    """Whether some elements are one in memory, as those of an expanded tensor."""
    return not leaf.is_contiguous() and leaf.numel() > _extent(leaf)
