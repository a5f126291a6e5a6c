"""Checkpoints written leaf by leaf: the tree has no values, and a function returns the values of one leaf at a time.

The files are equal to the files of `save` and `memmap`; memory holds the pieces of one leaf at a time.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.storage.disk.raw import raw_bytes, write_all
from tdfunc.storage.memmap.layout import FileLeaf, plan_folder
from tdfunc.storage.memmap.write import check_prefix, create, replace_folder, write_files
from tdfunc.storage.safetensors.plan import Values
from tdfunc.storage.safetensors.save import check_target, save_outline
from tdfunc.storage.tree.encode import outline

# Returns the values of a leaf of the tree in row-major order, as tensors of any shape.
Pieces: TypeAlias = Callable[[Tensor], Iterable[Tensor]]


def save_stream(
    spec: TensorCollection,
    values: Pieces,
    path: "str | os.PathLike[str]",
    *,
    max_shard_size: int | str | None = None,
    fsync: bool = True,
) -> None:
    """Save like `save`, without the values of all leaves in memory at once.

    Args:
        spec: The tree, whose leaves need no values (they may be on the meta device).
        values: A function of a leaf of `spec`, which returns its values. It is called once for each leaf, and again if
            the file has to be written again. A tied leaf counts once.
        path: The file, or the folder for shards.
        max_shard_size: The largest size of a shard; without it there is one file.
        fsync: Wait until the data is on the disk.

    Raises:
        ValueError: The file name has another suffix, or `max_shard_size` is not a size.
        UnsupportedError: A leaf or value cannot be stored; the message names it. Nothing was written.
        OSError: Writing failed; the old checkpoint is unchanged.
        Exception: `values` raised this error; the old checkpoint is unchanged.
    """
    target, max_bytes = check_target(path, max_shard_size)
    save_outline(outline(spec, values=False), target, max_bytes, fsync=fsync, values=_bytes_of(values))


def memmap_stream(
    spec: TensorCollection, values: Pieces, prefix: "str | os.PathLike[str]", *, existsok: bool = True
) -> None:
    """Write a memmap folder like `memmap`, without the values of all leaves in memory at once.

    Args:
        spec: The tree, whose leaves need no values.
        values: A function of a leaf of `spec`, as for `save_stream`. It is not called for leaves without elements.
        prefix: The folder.
        existsok: Replace an existing memmap folder.

    Raises:
        FileExistsError: The folder contains other files, or (without `existsok`) a memmapped tree.
        UnsupportedError: A leaf or value cannot be stored; the message names it. Nothing was written.
        Exception: `values` raised this error; the old folder is unchanged.
    """
    target = check_prefix(prefix, "memmap")
    plan = plan_folder(spec, "memmap", values=False)
    source = _bytes_of(values)

    def fill(folder: str, file: FileLeaf) -> None:
        with create(os.path.join(folder, file.name)) as fd:
            for piece in source(file.leaf):
                write_all(fd, piece)
            assert os.fstat(fd).st_size == file.size_bytes

    def write(folder: str) -> None:
        write_files(folder, plan, fill, threads=0)

    assert target is not None
    replace_folder(target, write, call="memmap", exist_ok=existsok, sync=True)


def _bytes_of(values: Pieces) -> Values:
    def pieces(leaf: Tensor) -> Iterator[memoryview]:
        for piece in values(leaf):
            assert piece.dtype == leaf.dtype
            yield memoryview(raw_bytes(piece))

    return pieces
