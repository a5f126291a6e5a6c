"""Steps of a trace: on tensors of one layout, again and again, so that what the layout decides is decided once."""

from collections.abc import Callable
from typing import TypeAlias

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
        self._kernel, self._shorten = kernel, shorten
        self._looked = False
        self._short: Short | None = None

    def __call__(self, writes: Leaves, reads: Leaves) -> None:
        if not self._looked:
            self._short, self._looked = self._shorten(writes, reads), True
        if self._short is None or not self._short(writes, reads):
            self._kernel(writes, reads)


def are_apart(lengths: list[int], tensors: Leaves) -> bool:
    """Return whether tensors that are so many bytes long are certain not to overlap."""
    end = 0
    for begin, length in sorted(zip([tensor.data_ptr() for tensor in tensors], lengths, strict=True)):
        if begin < end:
            return False
        end = begin + length
    return True
