"""A memmap folder as a tree: all of its `meta.json` files are read and checked before a leaf is opened.

A folder that another process replaces meanwhile is read again; `folder.py` reads the description, `leaf.py` the leaves.
"""

import errno
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import is_fake
from tdfunc.core.errors import CorruptCheckpointError, TreeStructureError, UnsupportedError, check_choice, explain
from tdfunc.core.memory import MapMode
from tdfunc.core.system import platform
from tdfunc.core.types import Device
from tdfunc.ops.edits import storage_writes
from tdfunc.storage.disk.commit import Folder, is_at, locate
from tdfunc.storage.disk.handlers import is_in_handler
from tdfunc.storage.disk.raw import outside_transforms
from tdfunc.storage.disk.remote import local_folder
from tdfunc.storage.memmap.folder import FolderReader
from tdfunc.storage.memmap.leaf import LeafFile, map_leaf
from tdfunc.storage.tree.build import Classes, move_leaf

In = TypeVar("In")
Out = TypeVar("Out")
# Each takes about a millisecond; while writers never rest a reader may need some.
_RETRIES = 100


def load_memmap(
    prefix: "str | os.PathLike[str]",
    device: "Device | None" = None,
    non_blocking: bool = False,
    *,
    out: TensorCollection | None = None,
    num_threads: int = 0,
    mode: MapMode = "c",
    classes: Classes = (),
) -> Any:
    """Open a memmap folder; a leaf is read when it is first used."""
    check_choice("load_memmap: the mode", mode, get_args(MapMode))
    name = local_folder(prefix, "load_memmap")
    # Only values are copied to `out`, so the classes of the nodes need not be here.
    classes = classes if out is None else TensorCollection._open
    place = None
    if device is not None:
        place = torch.device(device)

    def read(root: Folder) -> TensorCollection:
        return read_tree(root, os.path.realpath(name), mode, num_threads, classes, place, non_blocking)

    tree = read_folder(name, "load_memmap", read)
    if out is None:
        return tree
    storage_writes.write_tree(out, tree, complete=True)
    return out


def read_folder(name: str, call: str, read: Callable[[Folder], Out]) -> Out:
    """Return the result of `read` on an open folder, all from one save, also while other processes save.

    Raises:
        FileNotFoundError: The folder does not exist.
        NotADirectoryError: The path is a file.
        OSError: The folder was replaced again and again.
    """
    for _ in range(_RETRIES):
        with opened(name, call) as root, naming(name, call), outside_transforms():
            try:
                result = read(root)
                # Behind a descriptor there is one folder; behind a path there may have been two.
                if root.fd != platform.NO_FD or is_at(root, os.path.realpath(locate(name))):
                    return result
            except (CorruptCheckpointError, UnsupportedError, OSError):
                # A writer may have put another folder here meanwhile, and deleted this one.
                if is_at(root, os.path.realpath(locate(name))):
                    raise
    raise OSError(errno.EBUSY, f"{call}: the folder was replaced again and again while it was read", name)


def read_tree(
    root: Folder,
    where: str | None,
    mode: MapMode,
    threads: int,
    classes: Classes,
    place: torch.device | None = None,
    non_blocking: bool = False,
) -> TensorCollection:
    """Read an open folder; the leaves remember the path `where`."""
    reader = FolderReader(root, classes)

    def read_leaf(file: LeafFile) -> Tensor:
        if is_fake(place):
            return torch.empty(file.shape, dtype=file.dtype, device=place or "cpu")
        leaf = map_leaf(root, file, where, mode)
        if place is None or place.type == "cpu":
            return leaf
        return move_leaf(leaf, place, non_blocking=non_blocking)

    return reader.build(map_each(read_leaf, reader.files, threads), place)


def map_each(fn: Callable[[In], Out], items: Sequence[In], threads: int) -> list[Out]:
    """Return the results of a function, called by this thread or by several threads."""
    if threads < 2 or len(items) < 2 or is_in_handler():
        return [fn(item) for item in items]
    with ThreadPoolExecutor(threads, thread_name_prefix="tdfunc-memmap") as pool:
        return list(pool.map(fn, items))


def _open_root(name: str) -> Folder:
    """Open a folder, or the old one of a writer that was killed between two steps."""
    try:
        return Folder(name)
    except FileNotFoundError:
        return Folder(locate(name))


@contextmanager
def opened(name: str, call: str) -> Generator[Folder, None, None]:
    """Open a folder by its name, for the block."""
    try:
        root = _open_root(name)
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, explain(f"{call}: the folder does not exist.", expected="a folder with meta.json"), name
        ) from None
    except NotADirectoryError as err:
        hint = "tdfunc.load reads a .safetensors file."
        raise NotADirectoryError(
            errno.ENOTDIR, explain(f"{call}: this is a file.", expected="a folder with meta.json", hint=hint), name
        ) from err
    with root:
        yield root


@contextmanager
def naming(name: str, call: str) -> Generator[None, None, None]:
    """Add the name of the folder to errors in the block."""
    try:
        yield
    except (CorruptCheckpointError, TreeStructureError, UnsupportedError) as err:
        raise type(err)(f"{call} {name}: {err}") from err
    except FileNotFoundError as err:
        what = explain(f"{call}: the folder has no meta.json.", expected="a memmap folder")
        raise FileNotFoundError(errno.ENOENT, what, name) from err
