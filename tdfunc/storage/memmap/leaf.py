"""The file of one leaf in a memmap folder: a leaf is mapped only if its file has the bytes that its shape requires."""

import os
from typing import NamedTuple

import torch
from torch import Size, Tensor

from tdfunc.core.errors import damaged
from tdfunc.core.keys import dotted
from tdfunc.core.memory import MapMode
from tdfunc.core.types import Path
from tdfunc.storage.disk.commit import Descriptor, Folder
from tdfunc.storage.disk.mapped import map_descriptor, open_inside


class LeafFile(NamedTuple):
    """A leaf as in meta.json."""

    # Relative to the folder, without links.
    name: str
    path: Path
    dtype: torch.dtype
    shape: Size
    size_bytes: int
    # False if the file may be longer: tensordict does not shorten the files of an older tree.
    exact: bool


def open_leaf(root: Folder, leaf: LeafFile, *, writable: bool = False) -> Descriptor:
    """Open the file of a leaf, and check its size."""
    what = f"leaf {dotted(leaf.path)!r}"
    file = open_inside(root, leaf.name, what, writable=writable)
    found = file.status().st_size
    if found < leaf.size_bytes:
        fault = "cut short"
    elif leaf.exact and found > leaf.size_bytes:
        fault = "too long"
    else:
        return file
    raise damaged(
        f"{what}: its file {leaf.name} is {fault}.",
        f"{leaf.size_bytes} bytes for {leaf.dtype} {list(leaf.shape)}",
        f"{found} bytes",
    )


def map_leaf(root: Folder, leaf: LeafFile, where: str | None, mode: MapMode, top: str | None = None) -> Tensor:
    """Map the file of one leaf in an open folder; the leaf remembers it as a file in `where`.

    It also remembers the folder that was opened: `top`, if that is a folder around `where`.
    """
    # tensordict keeps no file for a leaf without elements.
    if not leaf.size_bytes:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    try:
        file = open_leaf(root, leaf, writable=mode == "r+")
    except FileNotFoundError as err:
        raise damaged(f"leaf {dotted(leaf.path)!r}: its file is missing.", leaf.name) from err
    with file as fd:
        path = None
        if where is not None:
            path = os.path.join(where, leaf.name)
        above = top or where
        return map_descriptor(fd, path, mode, leaf.dtype, leaf.shape, leaf.size_bytes, above, place=file.path)
