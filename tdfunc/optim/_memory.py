"""Leaves that must not be overwritten because their memory is also another's, or another element's."""

from collections.abc import Sequence

import torch

from tdfunc.core.errors import UnsupportedError
from tdfunc.core.memory import find_overlaps, repeats_itself
from tdfunc.optim._lists import Leaves


def owned(writes: Leaves, reads: Leaves) -> Leaves:
    """Return the leaves to write to: copies of those whose memory is also another's, or another element's."""
    shared = {i for pair in find_overlaps([*writes, *reads]) for i in pair}
    return [
        leaf.clone(memory_format=torch.contiguous_format) if i in shared or repeats_itself(leaf) else leaf
        for i, leaf in enumerate(writes)
    ]


def check_apart(writes: Leaves, reads: Leaves, names: Sequence[str]) -> None:
    """Raise if two leaves share memory that did not when they were traced; `names` are those of both lists."""
    for i, j in find_overlaps([*writes, *reads]):
        if min(i, j) < len(writes):
            raise UnsupportedError(
                f"update(donate=True): {names[i]!r} and {names[j]!r} share memory, which one would overwrite.",
                expected="leaves apart in memory, as they were when the function was traced",
                got=f"overlapping tensors of shapes {[list((*writes, *reads)[k].shape) for k in (i, j)]}",
                hint="clone() the tree before the first step, or leave out donate.",
            )
