"""Checkpoints written leaf by leaf: the tree is without values, and a function gives those of each leaf in its turn.

The bytes are those of `save` and `memmap`; memory holds the pieces of one leaf at a time.
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

# Called with a leaf of the tree: its values in row-major order, as tensors of any shape.
Pieces: TypeAlias = Callable[[Tensor], Iterable[Tensor]]


def save_stream(
    spec: TensorCollection,
    values: Pieces,
    path: "str | os.PathLike[str]",
    *,
    max_shard_size: int | str | None = None,
    fsync: bool = True,
) -> None:
    """Save as `save` does, without having the values of all leaves at once.

    Args:
        spec: The tree, whose leaves need no values (they may be on the meta device).
        values: Called with a leaf of `spec`, when its turn comes (again, if the file has to be written again);
            a tied leaf has one turn.
        path: The file, or for shards the folder.
        max_shard_size: The most bytes of leaves in one shard; without it there is one file.
        fsync: Wait until the disk has it.

    Raises:
        ValueError: The file name has another suffix, or `max_shard_size` is not a size.
        UnsupportedError: A leaf or value cannot be stored; the message names it. Nothing was written.
        OSError: It could not be written; the old checkpoint is whole.
        Exception: An error of `values`; the old checkpoint is whole.
    """
    target, max_bytes = check_target(path, max_shard_size)
    save_outline(outline(spec, values=False), target, max_bytes, fsync=fsync, values=_bytes_of(values))


def memmap_stream(
    spec: TensorCollection, values: Pieces, prefix: "str | os.PathLike[str]", *, existsok: bool = True
) -> None:
    """Write a memmap folder as `memmap` does, without having the values of all leaves at once.

    Args:
        spec: The tree, whose leaves need no values.
        values: Called with a leaf of `spec`, as for `save_stream`; a leaf without elements has no turn.
        prefix: The folder.
        existsok: Replace a memmap folder that is there.

    Raises:
        FileExistsError: The name is taken by other files, or (without `existsok`) by a memmap folder.
        UnsupportedError: A leaf or value cannot be stored; the message names it. Nothing was written.
        Exception: An error of `values`; the old folder is whole.
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
