"""The places of tensors: their memory or file, their overlaps, and rows of files read ahead.

A tensor's place is a range of bytes: interleaved views of one storage, such as columns of a matrix, count as
overlapping. The file is an attribute of the storage, which views share and copies lack.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tdfunc.core.context import is_compiling
from tdfunc.core.system import platform

# "c": copy-on-write, writes stay in the memory of this process. "r+": writes reach the file.
MapMode: TypeAlias = Literal["c", "r+"]
_ATTRIBUTE = "_tdfunc_file"
_READ_ONLY = "_tdfunc_read_only"


class MappedFile(NamedTuple):
    """The file under a tensor's storage, and where in it the tensor begins."""

    # Absolute; None where the file has no name (a memmap without a folder).
    path: str | None
    offset: int
    mode: MapMode
    # Device and inode: another file may have the name by now, as a folder is replaced when it is written again.
    file_id: tuple[int, int]
    # Of the whole storage.
    size_bytes: int
    # The folder that was opened or written, which is replaced as a whole; None where only the file is known.
    root: str | None = None


def mark_mapped(
    tensor: Tensor, path: str | None, mode: MapMode, file_id: tuple[int, int], root: str | None = None
) -> None:
    """Note on the storage of a tensor which file it is mapped from."""
    storage = tensor.untyped_storage()
    setattr(storage, _ATTRIBUTE, (path, mode, file_id, storage.data_ptr(), root))


def mapped_file(tensor: Any) -> MappedFile | None:
    """Return the file that a tensor, or the tensor that it is a view of, is mapped from; None for one in memory.

    Only tensors mapped by tdfunc (`load_memmap`, `memmap`, ...) are known.
    """
    try:
        storage = tensor.untyped_storage()
    # A wrapper (inside vmap, sparse, nested) or no tensor at all.
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    found = getattr(storage, _ATTRIBUTE, None)
    if found is None:
        return None
    path, mode, file_id, address, root = found
    if storage.data_ptr() != address:
        # `share_memory_`, or torch's pickling for another process, moved it off the file.
        return None
    return MappedFile(path, tensor.storage_offset() * tensor.element_size(), mode, file_id, storage.nbytes(), root)


# Set by the first tensor on read-only memory, so that all others cost one comparison.
_has_read_only = False


def mark_read_only(tensor: Tensor) -> None:
    """Note on the storage of a tensor that a write to its memory ends the process."""
    global _has_read_only
    storage = tensor.untyped_storage()
    setattr(storage, _READ_ONLY, storage.data_ptr())
    _has_read_only = True


def is_read_only(tensor: Tensor) -> bool:
    """Return True if a tensor is on the read-only memory of an array that tdfunc converted."""
    if not _has_read_only:
        return False
    try:
        storage = tensor.untyped_storage()
    # A wrapper (inside vmap, sparse, nested).
    except (NotImplementedError, RuntimeError):
        return False
    address = getattr(storage, _READ_ONLY, None)
    # `share_memory_` moves it elsewhere.
    return address is not None and address == storage.data_ptr()


# Of a tensor: the space of its bytes (None for this process's memory, else a device, or a file's device and inode),
# its first byte and the one after its last. A plain tuple: every write makes one for each leaf.
Extent: TypeAlias = tuple[Any, int, int]
_NOWHERE: Extent = (None, 0, 0)


def extent_of(tensor: Any) -> Extent | None:
    """Return the place of a tensor; None if it cannot be known (inside vmap, sparse, nested, not a tensor)."""
    try:
        storage = tensor.untyped_storage()
        size_bytes = tensor.nbytes
        if not size_bytes or tensor.is_meta:
            return _NOWHERE
        if not tensor.is_contiguous():
            size_bytes = _count_steps(tensor) * tensor.element_size()
        file = None
        if getattr(storage, _ATTRIBUTE, None) is not None:
            file = mapped_file(tensor)
        if file is not None:
            space = file.file_id
            begin = file.offset
        # torch warns where a fake tensor is asked for its address.
        elif isinstance(tensor, FakeTensor):
            return None
        else:
            space = None if tensor.is_cpu else tensor.device
            begin = tensor.data_ptr()
            if not begin:
                return None
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return space, begin, begin + size_bytes


def storage_id(tensor: Tensor) -> int:
    """Return a number that a tensor, fake or real, has in common with its views and with nothing else alive."""
    return tensor.untyped_storage()._cdata


def _count_steps(tensor: Tensor) -> int:
    """Return the number of elements from a tensor's first to its last, with those that it leaves out."""
    return 1 + sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])


def span_bytes(tensor: Tensor) -> int:
    """Return the number of bytes from a tensor's first to its last, with those that it leaves out."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return _count_steps(tensor) * tensor.itemsize


def find_overlaps(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield pairs of indices of tensors that overlap; each tensor that overlaps another is in some pair."""
    # Files and devices are told apart by their addresses here: optimizers do this at every step.
    spans: list[tuple[int, int, int, int]] = []
    for i, tensor in enumerate(tensors):
        length = span_bytes(tensor)
        if isinstance(tensor, FakeTensor):
            # Inside `jit` a mode refuses this read to the function.
            with torch._C.DisableTorchFunction():
                begin = int(tensor.storage_offset()) * tensor.itemsize
            spans.append((storage_id(tensor), begin, length, i))
        else:
            spans.append((0, tensor.data_ptr(), length, i))
    spans.sort()
    space = -1
    end = -1
    last = -1
    for other, begin, length, i in spans:
        if length and other == space and begin < end:
            yield last, i
        if length and (other != space or begin + length > end):
            space = other
            end = begin + length
            last = i


def repeats_itself(tensor: Tensor) -> bool:
    """Return True if elements of one tensor may share memory, as in an expanded tensor or the windows of `unfold`."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            # Each step leaves the memory of the steps below it, as in every other view that torch makes.
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


# A little less than the largest block that malloc learns from (DEFAULT_MMAP_THRESHOLD_MAX).
_LEARNED_BYTES = (32 << 20) - (1 << 16)


def keep_freed_memory() -> None:
    """Have malloc keep freed memory, up to 64 MB, for what is allocated next.

    Else it gives the memory of a step back to the system, which clears each page of it for the next step. glibc raises
    its thresholds when a large block is freed; one that nothing has written to takes no memory.

    Source:
        mallopt(3), M_MMAP_THRESHOLD: "dynamic adjustment".
    """
    torch.empty(_LEARNED_BYTES, dtype=torch.uint8, device="cpu")


class Places:
    """The memory under some tensors, in which others can be looked for."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        extents = []
        if not is_compiling():
            extents = [extent_of(tensor) for tensor in tensors]
        # Where one cannot be known, none can be ruled out.
        self._known = None not in extents and not is_compiling()
        # For each space, the runs of bytes without gaps, in order.
        self._merged: dict[Any, list[tuple[int, int]]] = {}
        known = [extent for extent in extents if extent is not None]
        for space, begin, end in sorted(known, key=itemgetter(1)):
            runs = self._merged.setdefault(space, [])
            if runs and begin < runs[-1][1]:
                runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
            elif begin < end:
                runs.append((begin, end))

    def holds(self, tensor: Any) -> bool:
        """Return True if a tensor may share memory with one of these."""
        extent = None
        if self._known:
            extent = extent_of(tensor)
        return extent is None or self.find(extent) is not None

    def find(self, extent: Extent) -> tuple[int, int] | None:
        """Return the first byte, and the one after the last, of the memory here that an extent meets; None if none."""
        space, begin, end = extent
        runs = self._merged.get(space, ())
        at = bisect_left(runs, (end, 0)) - 1
        if at >= 0 and begin < runs[at][1]:
            return runs[at]
        return None


# Smaller leaves are read whole by the system's own read-ahead.
MIN_BYTES = 16 << 20
_MAX_BYTES = 1 << 30
_SAMPLES = 4


def read_rows_ahead(leaf: Tensor, rows: Tensor) -> None:
    """Have the system read the rows (indices of the first dimension) of a leaf that is on a file and not in memory.

    A cold gather then waits for the disk once; without it each row is a page fault that also reads its surroundings.
    """
    count = rows.numel()
    if not platform.KNOWS_PAGES or not count or mapped_file(leaf) is None:
        return
    start = leaf.data_ptr()
    step = leaf.stride(0) * leaf.element_size()
    if _is_resident(start, step, rows[:: -(-count // _SAMPLES)].tolist(), leaf.shape[0]):
        return
    index = rows.numpy()
    span = leaf.element_size() * _count_steps(leaf[0])
    # A row that does not exist is refused by the gather.
    if span * count <= _MAX_BYTES:
        begins = start + index * step
        first = begins - begins % platform.PAGE_BYTES
        platform.want_memory(first.tolist(), (begins + span).tolist())


def _is_resident(start: int, step: int, rows: list[int], count: int) -> bool:
    """Return True if a sample of the rows is in memory: a look at each would take longer than a warm gather."""
    page = platform.PAGE_BYTES
    # A row that does not exist is refused by the gather.
    places = [start + row * step for row in rows if 0 <= row < count]
    return platform.are_resident([place // page * page for place in places])
