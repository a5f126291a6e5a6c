"""Steps of a trace: on tensors of one layout, again and again, so that what the layout decides is decided once."""

from bisect import bisect_right
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from tdfunc.core.memory import is_read_only
from tdfunc.optim._lists import Leaves

# Writes to tensors of the first list.
Kernel: TypeAlias = Callable[[Leaves, Leaves], None]
# As well, or returns False and leaves them as they are.
Short: TypeAlias = Callable[[Leaves, Leaves], bool]


class Replay:
    """A kernel that reads the layout of its tensors once, since later calls have the same layout.

    Args:
        kernel: The kernel for tensors of any layout.
        shorten: A function that returns a shorter way for tensors laid out like these, or None.
    """

    def __init__(self, kernel: Kernel, shorten: Callable[[Leaves, Leaves], Short | None]) -> None:
        self._kernel = kernel
        self._shorten = shorten
        self._looked = False
        self._short: Short | None = None

    def __call__(self, writes: Leaves, reads: Leaves) -> None:
        if not self._looked:
            self._short = self._shorten(writes, reads)
            self._looked = True
        if self._short is None or not self._short(writes, reads):
            self._kernel(writes, reads)


class Apart:
    """The check of a trace that the tensors written at each replay overlap none of these.

    They have the lengths of the trace, so that places found apart once are apart again.

    Args:
        refuse: Raises for tensors that overlap.
        writes: Bytes of each tensor that is written.
        reads: Bytes of each tensor that is read.
    """

    def __init__(self, refuse: Kernel, writes: list[int], reads: list[int]) -> None:
        self._refuse = refuse
        self._writes = writes
        self._reads = reads
        # The places of the written tensors, and in their order where memory begins that is free, or ends.
        self._known: tuple[list[int], list[int]] = ([], [])

    def __call__(self, writes: Leaves, reads: Leaves) -> None:
        places = list(map(_place_of, writes))
        known, edges = self._known
        if places != known:
            edges = []
            if not any(map(is_read_only, writes)):
                edges = find_edges(places, self._writes)
            self._known = (places, edges)
        for place, length in zip(map(_place_of, reads), self._reads, strict=True):
            at = bisect_right(edges, place)
            if at % 2 or (at < len(edges) and place + length > edges[at]):
                edges = []
        if not edges and writes:
            self._refuse(writes, reads)


_place_of: Callable[[Tensor], int] = Tensor.data_ptr


def find_edges(places: list[int], lengths: list[int]) -> list[int]:
    """Return where each of so many bytes begins and ends, in order; nothing if some overlap."""
    spans = sorted([(begin, begin + length) for begin, length in zip(places, lengths, strict=True) if length])
    edges = [edge for span in spans for edge in span]
    return edges if edges == sorted(edges) else []
