"""Whether tensors that a step overwrites share memory with others: found once, checked at each replay of a trace."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from tdfunc._jit.recording.tracing import recorder
from tdfunc.core.errors import UnsupportedError
from tdfunc.core.memory import find_overlaps, is_read_only, repeats_itself, span_bytes
from tdfunc.optim.lists import Leaves


def lie_apart(names: Callable[[], list[str]], writes: Leaves, reads: Leaves) -> bool:
    """Return whether no memory of the first list is shared: it may be overwritten. A trace checks it at each replay."""
    reads = [read._values() if read.is_sparse else read for read in reads]
    if any(map(is_read_only, writes)):
        return False
    if any(map(repeats_itself, writes)) or any(_find_shared(writes, reads)):
        return False
    trace = recorder()
    if trace is not None:
        # New memory overlaps nothing at a replay either.
        given = [(name, x) for name, x in zip(names(), (*writes, *reads), strict=False) if trace.is_given(x)]
        tensors = [x for _, x in given]
        n = sum(map(trace.is_given, writes))
        lengths = list(map(span_bytes, tensors))
        refuse = partial(_refuse_shared, [name for name, _ in given])
        trace.call(Apart(refuse, lengths[:n], lengths[n:]), tensors[:n], tensors[n:])
    return True


def _refuse_shared(names: list[str], writes: Leaves, reads: Leaves) -> None:
    """Raise if leaves share memory, or cannot be written to, and it was otherwise when they were traced."""
    for name, leaf in zip(names, writes, strict=False):
        if is_read_only(leaf):
            raise UnsupportedError(
                f"update(donate=True): {name!r} is on a read-only array, a write would end the process.",
                expected="memory that can be written to, as when the function was traced",
                hint="clone() the tree before the first step, or leave out donate.",
            )
    leaves = [*writes, *reads]
    for i, j in _find_shared(writes, reads):
        raise UnsupportedError(
            f"update(donate=True): {names[i]!r} and {names[j]!r} share memory, which one would overwrite.",
            expected="leaves apart in memory, as they were when the function was traced",
            got=f"overlapping tensors of shapes {list(leaves[i].shape)} and {list(leaves[j].shape)}",
            hint="clone() the tree before the first step, or leave out donate.",
        )


def _find_shared(writes: Leaves, reads: Leaves) -> Iterator[tuple[int, int]]:
    """Yield pairs of tensors that overlap, at least one of them of the first list."""
    return (pair for pair in find_overlaps([*writes, *reads]) if min(pair) < len(writes))


class Apart:
    """The check of a trace that the tensors written at each replay overlap none of these.

    They have the lengths of the trace, so that places found apart once are apart again.

    Args:
        refuse: A function that raises for tensors that overlap.
        writes: Bytes of each tensor that is written.
        reads: Bytes of each tensor that is read.
    """

    def __init__(self, refuse: Callable[[Leaves, Leaves], None], writes: list[int], reads: list[int]) -> None:
        self._refuse = refuse
        self._writes = writes
        self._reads = reads
        # The places of the written tensors, and in their order where memory begins that is free, or ends.
        self._known: tuple[list[int], list[int]] = ([], [])

    def __call__(self, writes: Leaves, reads: Leaves) -> None:
        """Raise for tensors that overlap."""
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
