"""The writes of memmaps that end in `_`: onto files, from files, and a second look at files."""

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdfunc._collection import TensorCollection, iter_leaves
from tdfunc._errors import LeafMismatchError, UnsupportedError, explain
from tdfunc._keys import dotted
from tdfunc._mapped import MappedFile, mapped_file
from tdfunc._types import Path
from tdfunc.ops import storage_writes
from tdfunc.storage.descriptor import Descriptor
from tdfunc.storage.folder_read import FolderReader, LeafFile
from tdfunc.storage.memmap import map_leaf, start, write_folder


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
            hint = 'td.to("cpu").memmap_(prefix), or td.memmap(prefix), which returns a tree on the files.'
            what = f"memmap_: leaf {dotted(path)!r} is not in the memory of the CPU."
            raise UnsupportedError(explain(what, expected="cpu", got=str(leaf.device), hint=hint))
        if leaf.is_inference() and not torch.is_inference_mode_enabled():
            hint = "td.clone() is a tree of normal tensors."
            what = f"memmap_: leaf {dotted(path)!r} was made in inference mode and cannot be changed outside of it."
            raise UnsupportedError(explain(what, expected="a normal tensor", got="an inference tensor", hint=hint))
    task = partial(_move_onto_files, td, prefix, copy_existing, num_threads, existsok)
    return start(task, "memmap_", num_threads, return_early, share_non_tensor)


def _move_onto_files(
    td: TensorCollection,
    prefix: "str | os.PathLike[str] | None",
    copy_existing: bool,
    threads: int,
    existsok: bool,
) -> Any:
    written = write_folder("memmap_", td, prefix, copy_existing, threads, existsok, sync=False)
    mapped = dict(_tensors(written))
    for path, leaf in _tensors(td):
        # As `share_memory_` the tensor stays the same object; views that were taken of it before keep the old memory.
        leaf.data = mapped[path].data
    return td


def load_(td: TensorCollection, source: TensorCollection) -> Any:
    """Copy the values of a loaded tree into the leaves of this one."""
    storage_writes.write_tree(td, source, complete=True)
    return td


def refresh_(td: TensorCollection) -> Any:
    """Map every leaf again from the name of its file, which may be another file by now."""
    found: list[tuple[Tensor, Tensor]] = []
    known: dict[str, dict[str, LeafFile]] = {}
    for path, leaf in _tensors(td):
        file = mapped_file(leaf)
        if file is not None and file.path is not None:
            found.append((leaf, _mapped_now(path, leaf, file, file.path, known)))
        elif leaf.numel():
            got = "a tensor in memory" if file is None else "a memmap without a folder"
            hint = "td.memmap(prefix), or load_memmap."
            what = f"memmap_refresh_: leaf {dotted(path)!r} is on no file; nothing was changed."
            raise UnsupportedError(explain(what, expected="a leaf of a memmap folder", got=got, hint=hint))
    # All files were found to fit before the first leaf changes.
    for leaf, new in found:
        leaf.data = new
    return td


def _mapped_now(path: Path, leaf: Tensor, file: MappedFile, name: str, known: dict[str, dict[str, LeafFile]]) -> Tensor:
    what = f"memmap_refresh_: leaf {dotted(path)!r}"
    folder, base = os.path.split(name)
    if folder not in known:
        known[folder] = _files_of(folder)
    now = known[folder].get(base)
    hint = "load_memmap opens what the folder holds now."
    if now is None:
        raise LeafMismatchError(explain(f"{what} has no file any more.", expected=name, hint=hint))
    # A view of some rows does not say what the whole has for a shape.
    is_whole = leaf.numel() * leaf.element_size() == file.size_bytes
    if (now.dtype, now.size_bytes) != (leaf.dtype, file.size_bytes) or (is_whole and now.shape != leaf.shape):
        expected = f"{leaf.dtype}, {file.size_bytes} bytes" + (f", shape {list(leaf.shape)}" if is_whole else "")
        got = f"{now.dtype}, {now.size_bytes} bytes, shape {list(now.shape)}"
        raise LeafMismatchError(
            explain(f"{what}: its file holds another one by now.", expected=expected, got=got, hint=hint)
        )
    with Descriptor(folder, os.O_RDONLY) as root:
        whole = map_leaf(root, now, folder, file.mode)
    return whole.view(-1).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())


def _files_of(folder: str) -> dict[str, LeafFile]:
    try:
        with Descriptor(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)) as root:
            return {leaf.name: leaf for leaf in FolderReader(root, TensorCollection._open).leaves}
    except FileNotFoundError:
        return {}


def _tensors(td: TensorCollection) -> list[tuple[Path, Tensor]]:
    return [(path, leaf) for path, leaf in iter_leaves(td) if isinstance(leaf, Tensor)]
