"""Where tensors lie: in which file (an attribute of the storage, which views share and copies lack) or memory."""

from bisect import bisect_left
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

# "c": copy-on-write, writes stay in the memory of this process. "r+": writes reach the file.
MapMode: TypeAlias = Literal["c", "r+"]
_ATTRIBUTE = "_tdfunc_file"
_BEGIN = itemgetter(1)


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
    """Return the file that a tensor, or what it is a view of, is mapped from; None for one in memory.

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


# The device (None for the CPU) or the device and inode of the file that a tensor is mapped from, and its first byte
# and the one after its last, between which it may leave out some. A plain tuple: writes ask for it of each leaf.
Extent: TypeAlias = tuple[Any, int, int]
_NOWHERE: Extent = (None, 0, 0)


def extent_of(tensor: Any) -> Extent | None:
    """Return where a tensor lies, to be compared with others; None where nobody can tell."""
    try:
        noted = getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
        begin, size_bytes = tensor.data_ptr(), tensor.nbytes
        if not size_bytes or tensor.is_meta:
            return _NOWHERE
        if not tensor.is_contiguous():
            steps = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
            size_bytes = (sum(steps) + 1) * tensor.element_size()
        space = None if tensor.is_cpu else tensor.device
    # A wrapper (inside vmap, sparse, nested) or no tensor at all.
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    if noted is not None and (file := mapped_file(tensor)) is not None:
        space, begin = file.file_id, file.offset
    elif not begin:
        return None
    return space, begin, begin + size_bytes


class Places:
    """The memory under some tensors, in which others can be looked for."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        extents = [extent_of(tensor) for tensor in tensors]
        # Nobody can tell of one of them, so nobody can tell of any.
        self.unknown = None in extents
        self._merged: dict[Any, list[tuple[int, int]]] = {}
        for space, begin, end in sorted([extent for extent in extents if extent is not None], key=_BEGIN):
            runs = self._merged.setdefault(space, [])
            if runs and begin < runs[-1][1]:
                runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
            elif begin < end:
                runs.append((begin, end))

    def find(self, extent: Extent) -> tuple[int, int] | None:
        """Return the first byte, and the one after the last, of what a tensor shares memory with; None if nothing."""
        space, begin, end = extent
        runs = self._merged.get(space, ())
        at = bisect_left(runs, (end, 0)) - 1
        return runs[at] if at >= 0 and begin < runs[at][1] and begin < end else None
