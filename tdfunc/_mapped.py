"""Where a tensor on a file remembers its file: an attribute of its storage, which views share and copies lack."""

from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

# "c": copy-on-write, writes stay in the memory of this process. "r+": writes reach the file.
MapMode: TypeAlias = Literal["c", "r+"]
_ATTRIBUTE = "_tdfunc_file"


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


def mark_mapped(tensor: Tensor, path: str | None, mode: MapMode, file_id: tuple[int, int]) -> None:
    """Note on the storage of a tensor which file it is mapped from."""
    storage = tensor.untyped_storage()
    setattr(storage, _ATTRIBUTE, (path, mode, file_id, storage.data_ptr()))


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
    path, mode, file_id, address = found
    if storage.data_ptr() != address:
        # `share_memory_`, or torch's pickling for another process, moved it off the file.
        return None
    return MappedFile(path, tensor.storage_offset() * tensor.element_size(), mode, file_id, storage.nbytes())
