"""The writes of memmaps that end in `_`: onto files, from files, and a second look at files."""

import os
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import LeafMismatchError, UnsupportedError
from tdfunc.core.keys import dotted
from tdfunc.core.memory import MappedFile, mapped_file
from tdfunc.core.types import Path
from tdfunc.ops import storage_writes
from tdfunc.storage.memmap.folder_read import FolderReader, LeafFile
from tdfunc.storage.memmap.memmap import map_leaf, read_folder, start, write_folder


def memmap_(
    td: TensorCollection,
    prefix: "str | os.PathLike[str] | None",
    copy_existing: bool,
    *,
    num_threads: int,
    return_early: bool,
    share_non_tensor: bool,
    existsok: bool,
) -> Any:
    """Write a folder and move the storage of every leaf onto its file."""
    for path, leaf in _tensors(td):
        if not leaf.is_cpu:
            raise UnsupportedError(
                f"memmap_: leaf {dotted(path)!r} is not in the memory of the CPU.",
                expected="cpu",
                got=str(leaf.device),
                hint='td.to("cpu").memmap_(prefix), or td.memmap(prefix), which returns a tree on the files.',
            )
        if leaf.is_inference() and not torch.is_inference_mode_enabled():
            raise UnsupportedError(
                f"memmap_: leaf {dotted(path)!r} was made in inference mode and cannot be changed outside of it.",
                expected="a normal tensor",
                got="an inference tensor",
                hint="td.clone() is a tree of normal tensors.",
            )
    task = partial(_move_onto_files, td, prefix, copy_existing, num_threads, existsok)
    return start(task, "memmap_", num_threads, return_early, share_non_tensor)


def _move_onto_files(
    td: TensorCollection,
    prefix: "str | os.PathLike[str] | None",
    copy_existing: bool,
    threads: int,
    existsok: bool,
) -> Any:
    written = write_folder("memmap_", td, prefix, copy_existing, threads, existsok, sync=False, one_file=True)
    mapped = dict(_tensors(written))
    # A tensor under two keys has one file with two names.
    first = {id(leaf): (path, leaf) for path, leaf in reversed(_tensors(td))}
    for path, leaf in first.values():
        # As `share_memory_` the tensor stays the same object; views that were taken of it before keep the old memory.
        leaf.data = mapped[path].data
    return td


def load_(td: TensorCollection, source: TensorCollection) -> Any:
    """Copy the values of a loaded tree into the leaves of this one."""
    storage_writes.write_tree(td, source, complete=True)
    return td


class _Place(NamedTuple):
    """A leaf, and the file that it is mapped from."""

    path: Path
    leaf: Tensor
    file: MappedFile
    # Absolute, like the folder in which it was found.
    name: str
    top: str


def refresh_(td: TensorCollection) -> Any:
    """Map every leaf again from the name of its file, which may be another file by now."""
    folders: dict[str, list[_Place]] = {}
    for path, leaf in _tensors(td):
        file = mapped_file(leaf)
        if file is not None and file.path is not None:
            top = file.root or os.path.dirname(file.path)
            folders.setdefault(top, []).append(_Place(path, leaf, file, file.path, top))
        elif leaf.numel():
            raise UnsupportedError(
                f"memmap_refresh_: leaf {dotted(path)!r} is on no file; nothing was changed.",
                expected="a leaf of a memmap folder",
                got="a tensor in memory" if file is None else "a memmap without a folder",
                hint="td.memmap(prefix), or load_memmap.",
            )
    # All files were found to fit before the first leaf changes.
    for places, mapped in [(places, _mapped_now(places)) for places in folders.values()]:
        for place, new in zip(places, mapped, strict=True):
            place.leaf.data = new
    return td


def _mapped_now(places: list[_Place]) -> list[Tensor]:
    """Map the leaves of one folder again, all from one writing of it."""
    # What is in it is replaced with it; the rest of a large folder need not be looked at.
    folder = os.path.commonpath([os.path.dirname(place.name) for place in places])

    def read(root: int) -> list[Tensor]:
        files = {leaf.name: leaf for leaf in FolderReader(root, TensorCollection._open).leaves}
        return [_map_again(root, folder, place, files.get(os.path.relpath(place.name, folder))) for place in places]

    try:
        return read_folder(folder, "memmap_refresh_", read)
    except (FileNotFoundError, NotADirectoryError) as err:
        raise _gone(places[0]) from err


def _gone(place: _Place) -> LeafMismatchError:
    return LeafMismatchError(
        f"memmap_refresh_: leaf {dotted(place.path)!r} has no file any more; nothing was changed.",
        expected=place.name,
        hint="load_memmap opens what the folder holds now.",
    )


def _map_again(root: int, folder: str, place: _Place, now: LeafFile | None) -> Tensor:
    path, leaf, file, _, top = place
    if now is None:
        raise _gone(place)
    # A view of some rows does not say what the whole has for a shape.
    is_whole = leaf.numel() * leaf.element_size() == file.size_bytes
    if (now.dtype, now.size_bytes) != (leaf.dtype, file.size_bytes) or (is_whole and now.shape != leaf.shape):
        raise LeafMismatchError(
            f"memmap_refresh_: leaf {dotted(path)!r}: its file holds another one by now; nothing was changed.",
            expected=f"{leaf.dtype}, {file.size_bytes} bytes" + (f", shape {list(leaf.shape)}" if is_whole else ""),
            got=f"{now.dtype}, {now.size_bytes} bytes, shape {list(now.shape)}",
            hint="load_memmap opens what the folder holds now.",
        )
    whole = map_leaf(root, now, folder, file.mode, top)
    return whole.view(-1).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())


def _tensors(td: TensorCollection) -> list[tuple[Path, Tensor]]:
    return [(path, leaf) for path, leaf in iter_leaves(td) if isinstance(leaf, Tensor)]
