"""A pool of large storages: a replay writes into memory that an earlier one has left, so that the system clears none.

glibc gives blocks of more than 32 MB back to the system at once, and each page of a new one is cleared when it is first
written. A training step of 64 networks of width 512 spends half of its time there.

A storage of the pool is used again only if nothing else refers to it. Two counts show what does: the owners of the
storage (tensors, arrays of numpy, capsules, nodes of autograd), and the references to its Python object, which
`x.untyped_storage()` returns. `_Row` keeps one of each. Where the counts are not what a probe expects, nothing is
pooled.
"""

import sys
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tdfunc.core.system import platform

# malloc keeps smaller blocks: see `keep_freed_memory`.
MIN_BYTES = 16 << 20
# The results of a call are in use while the next one makes its own.
_CALLS = 2
# Private in torch 2.13; without it nothing is pooled.
_count_owners: Any = getattr(torch._C, "_storage_Use_Count", None)


class _Row:
    """A storage, the only reference of the pool to it, and what it was when it was made."""

    __slots__ = ("_address", "_cdata", "size_bytes", "storage")

    def __init__(self, tensor: Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self._cdata = self.storage._cdata
        self._address = self.storage.data_ptr()
        self.size_bytes = self.storage.nbytes()

    def count(self) -> tuple[int, int]:
        """Return the numbers of owners and of references to the Python object, with the reference of this call."""
        return _count_owners(self._cdata), sys.getrefcount(self.storage)

    def is_whole(self) -> bool:
        """Return whether it is the memory that it was: `resize_` and `share_memory_` move it."""
        return self.storage.data_ptr() == self._address and self.storage.nbytes() == self.size_bytes


def _probe() -> tuple[int, int] | None:
    """Return the counts of a storage that only its row refers to; None where they do not show who else does."""
    if _count_owners is None:
        return None
    # Without the lock of the interpreter a count is over before it is read.
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    tensor: Any = torch.empty(4, device="cpu")
    row = _Row(tensor)
    with_tensor = row.count()
    del tensor
    alone = row.count()
    kept: Any = row.storage
    with_object = row.count()
    del kept
    again = torch.empty(0, device="cpu").set_(row.storage, 0, (4,), (1,))
    with_another = row.count()
    del again
    owners, references = alone
    seen = with_tensor[0] == with_another[0] == owners + 1 and with_object[1] == references + 1
    if seen and row.count() == alone:
        return alone
    return None


_ALONE = _probe()


class Pool:
    """Large storages by their sizes, for the records of one function; `max_bytes` of them at most, if it is given.

    All records together keep what the largest of them expects: memory does not grow with the number of shapes.

    It needs no lock, and is safe in handlers of signals and after a fork: a row is taken out of its queue, which is one
    step, before it is looked at. A row that is lost on the way is freed like any memory.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        # The sizes that were taken last are at the end. If two threads take one at a time, rows may be lost.
        self._rows: dict[int, deque[_Row]] = {}
        # The most rows of each size.
        self._limits: dict[int, int] = {}
        self._most_bytes = 0

    def expect(self, sizes: Sequence[int]) -> None:
        """Make room for a record that takes blocks of these sizes."""
        for size_bytes, count in Counter(sizes).items():
            self._limits[size_bytes] = max(self._limits.get(size_bytes, 0), _CALLS * count)
        self._most_bytes = max(self._most_bytes, _CALLS * sum(sizes))
        if self._max_bytes is not None:
            self._most_bytes = min(self._most_bytes, self._max_bytes)

    def takes(self, tensor: Tensor) -> bool:
        """Return whether results like this one come from the pool."""
        if _ALONE is None or self._max_bytes == 0 or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return False
        size_bytes = tensor.numel() * tensor.element_size()
        return size_bytes >= MIN_BYTES and tensor.untyped_storage().nbytes() == size_bytes

    def take(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, size_bytes: int) -> Tensor:
        """Return a tensor of any values, in a storage of the pool that nothing else refers to, or in a new one."""
        rows: deque[_Row] = self._rows.pop(size_bytes, deque())
        self._rows[size_bytes] = rows
        for _ in range(len(rows)):
            try:
                row = rows.popleft()
            # Other threads have taken the rest.
            except IndexError:
                break
            if row.count() != _ALONE:
                rows.append(row)
            elif row.is_whole():
                tensor = torch.empty(0, dtype=dtype, device="cpu").set_(row.storage, 0, shape, stride)
                rows.append(row)
                return tensor
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        platform.want_large_pages(tensor.data_ptr(), size_bytes)
        self._keep(tensor, rows)
        return tensor

    def _keep(self, tensor: Tensor, rows: deque[_Row]) -> None:
        """Add a new storage, and forget the ones that have been in use for longest: the caller keeps their tensors."""
        size_bytes = tensor.untyped_storage().nbytes()
        rows.append(_Row(tensor))
        if len(rows) > self._limits.get(size_bytes, 0):
            with suppress(IndexError):
                rows.popleft()
        excess = self.held_bytes() - self._most_bytes
        for each in list(self._rows.values()):
            while each and excess > 0:
                with suppress(IndexError):
                    excess -= each.popleft().size_bytes

    def held_bytes(self) -> int:
        """Return the bytes of all storages, those in use included."""
        return sum([size_bytes * len(rows) for size_bytes, rows in list(self._rows.items())])

    def release(self) -> None:
        """Let go of every storage; those in use are freed with their last tensor."""
        self._rows = {}
        self._limits = {}
        self._most_bytes = 0
