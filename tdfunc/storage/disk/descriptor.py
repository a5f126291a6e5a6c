"""An open descriptor as an object, so that a Ctrl-C at any moment gives it back."""

import os
from collections import deque
from functools import partial
from itertools import repeat
from typing import NoReturn

from tdfunc.core.errors import UnsupportedError


class Descriptor:
    """A descriptor that is closed after its `with` block, or with this object when it does not come to the block.

    The system's locks go with it: a descriptor that stayed open would keep others from removing what it had locked.
    """

    __slots__ = ("_open",)

    def __init__(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._open: list[int] = []
        # One call, of C alone: Python runs the handlers of signals between two bytecodes, and a number that is on its
        # way from `os.open` to a variable would be lost.
        self._open.extend(map(partial(os.open, dir_fd=dir_fd), (path,), (flags,), (mode,)))

    @property
    def fd(self) -> int:
        """The number; the object must live as long as it is used."""
        return self._open[0]

    def close(self) -> None:
        """Give it back; a second time nothing happens."""
        # One call, as above: neither is it lost nor is a number closed that means another file by now.
        deque(map(os.close, map(self._open.pop, repeat(-1, len(self._open)))), maxlen=0)

    def __reduce__(self) -> NoReturn:
        # Not of a number: two objects would close it, the second one after the system has given it to another file.
        raise UnsupportedError("An open descriptor cannot be copied or pickled.", hint="open the file again.")

    def __enter__(self) -> int:
        return self._open[0]

    def __exit__(self, *args: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", None):
            self.close()
