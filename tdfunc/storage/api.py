"""`save` and `load`: a whole tree in one safetensors file, or in shards, that any reader of the format opens."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tdfunc.core.collection import TensorCollection
from tdfunc.core.keys import FilterLike
from tdfunc.core.types import Device
from tdfunc.storage.disk.progress import progress_bar
from tdfunc.storage.disk.ranks import has_sharded
from tdfunc.storage.disk.raw import outside_transforms
from tdfunc.storage.disk.remote import LocalFiles, RemoteFiles, find, is_remote
from tdfunc.storage.memmap.read import load_memmap
from tdfunc.storage.safetensors.contents import is_memmap, open_contents
from tdfunc.storage.safetensors.ranks import save_by_ranks
from tdfunc.storage.safetensors.save import check_target, save_outline
from tdfunc.storage.safetensors.select import Choice, narrow_tree, read_tree
from tdfunc.storage.tree.build import Classes
from tdfunc.storage.tree.encode import outline
from tdfunc.storage.tree.objects import as_tree

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict


def save(
    td: TensorCollection | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    fsync: bool = True,
    progress: bool = False,
) -> None:
    """Save a tree as safetensors; at every moment the path holds the whole old tree or the whole new one.

    Everything is kept: batch sizes, devices, names, key order, empty sub-trees, ties (stored once, under the first
    path), kinds, Parameters, `requires_grad`, and plain objects: None, numbers, texts, and lists, tuples and dicts
    of these and of tensors and trees, such as the `state_dict()` of an optimizer. Each leaf and the header get a
    checksum. Memory layout is not kept: leaves are written row by row.

    A tree with DTensors is saved by all ranks of the default process group, which all call this with the same path; on
    a mesh of one dimension that has some of them, by those.
    Each writes its own parts into one file, nothing is gathered, and what is not a DTensor must be equal on all ranks.
    If one rank fails or dies, all raise, and the old file stays.

    Without `max_shard_size` this writes one file. With it, it writes a folder as Hugging Face does: shards next to
    `model.safetensors.index.json`, which replaces the checkpoint that was in the folder, one file or shards. A file
    that is saved as `model.safetensors` also replaces an index in its folder. Of the other files only old shards go,
    which tdfunc wrote and no index in the folder names.

    Args:
        td: The tree, or several trees, tensors and plain objects by name.
        path: The file, which must end in `.safetensors`, or for shards the folder; the folder around it must
            exist. With fsspec also a URL such as `s3://bucket/model.safetensors`.
        max_shard_size: The most bytes of leaves in one shard, as a number or as `"5GB"`; a larger leaf gets a shard
            of its own.
        fsync: Wait until the disk has it. Without it a power failure (not a crash of the program) may undo the save.
        progress: Show a bar; needs tqdm.

    Raises:
        ValueError: The file name has another suffix, or `max_shard_size` is not a size.
        UnsupportedError: A leaf or value cannot be stored unchanged; the message names it. Nothing was written.
        OSError: It could not be written; the old checkpoint is whole and nothing is left behind. After the new one is
            in place an error is a `RuntimeWarning`.
        TimeoutError: Another process kept the lock of the folder.

    Examples:
        >>> import tempfile
        >>> td = TensorDict({"w": torch.ones(2, 3), "note": "first"}, batch_size=[2], names=["row"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tdf.save(td, folder + "/tree.safetensors")
        ...     back = tdf.load(folder + "/tree.safetensors")
        >>> bool((back == td).all()), back.names, back["note"]
        (True, ['row'], 'first')
    """
    target, max_bytes = check_target(path, max_shard_size)
    tree = as_tree(td, f"save {target}")
    if max_bytes is None and not is_remote(target) and has_sharded(tree):
        save_by_ranks(tree, target, fsync=fsync)
        return
    save_outline(outline(tree), target, max_bytes, fsync=fsync, progress=progress)


def load(
    path: str | os.PathLike[str],
    *,
    like: Any = None,  # a tree or spec of anything that has a shape and a dtype
    where: "FilterLike | None" = None,
    dtype: torch.dtype | None = None,
    device: "Device | None" = None,
    classes: "Classes" = (),
    verify: bool = True,
    progress: bool = False,
) -> "TensorDict":
    """Load a tree from a safetensors file, from shards with an index, or from a memmap folder.

    Files are mapped copy-on-write: leaves are read when they are first used, in-place writes to them stay in
    memory, and the file does not change. A file of another program becomes a nested tree by its dotted names, or a
    flat one where the names do not nest (`a` and `a.b`).

    A folder with `model.safetensors` is one file, else with `model.safetensors.index.json` shards, else with
    `meta.json` a memmap folder, else with `adapter_model.safetensors` an adapter under PEFT's names, which
    `tdfunc.lora.load` reads into one of a base.

    Args:
        path: The file or folder; with fsspec also a URL, whose files are fetched first.
        like: The expected leaves, as a tree (on any device), a nested mapping, or a spec, of anything with a shape and
            a dtype. Its keys, shapes and dtypes must be those of the result (of paths that it ties, one is enough, and
            a file of another program may lack buffers that are not persistent, which the result then lacks too);
            values, batch sizes and non-tensor data are not compared, and nothing is tied that was not saved so. Where
            `like` is a tree with a DTensor, the leaf is one with that mesh and placements, and no more than this rank's
            part of it is read.
        where: A glob on dotted paths or a `Filter`, as in `partition`: only these leaves are read and verified. A
            predicate gets leaves without values (on the meta device), which have a shape and a dtype.
        dtype: Cast leaves of floating dtypes (float8 included); integers, bools and complex leaves stay as they are.
        device: Where the leaves are put; without it, where the tree was (leaves of a tree without a device are on
            the CPU). `"meta"` reads the header only, as does `FakeTensorMode`.
        classes: The classes of the tree's nodes where they are not TensorDicts; those of imported modules are
            found without it. One that was defined in a script, moved or renamed is matched by its qualified name, else
            by its fields, or named: `{"__main__:Batch": Batch}`. `TensorDict` loads all nodes as that.
        verify: Read everything once and compare the checksums. Files of other programs have none.
        progress: Show a bar of the bytes that are verified; needs tqdm.

    Returns:
        The tree that was saved, in its own class, for which `Class.load` has the type.

    Raises:
        CorruptCheckpointError: The file was damaged or altered; the message names the leaf and both values.
        UnsupportedError: A class, dtype, device or format version that is not here, or a predicate in `where` that
            reads values.
        TreeStructureError: Keys are not those of `like`, or an entry is not a field of the class that it was
            saved from, which has changed since. The message lists every difference.
        LeafMismatchError: Shapes or dtypes are not those of `like`; the message lists all of them.
        FilterError: A pattern in `where` matches no leaf.
        FileNotFoundError: The file does not exist, or the folder is without a checkpoint.
    """
    place = torch.device(device) if device is not None else None
    return load_choice(find(path), Choice(where, like, dtype, place, classes), verify=verify, progress=progress)


def load_choice(name: str, choice: Choice, *, verify: bool, progress: bool = False) -> Any:
    """Load what was chosen from a file, shards or a memmap folder."""
    files = RemoteFiles(name, fetch=choice.where is None) if is_remote(name) else LocalFiles()
    if is_memmap(name, files):
        with outside_transforms():
            return narrow_tree(load_memmap(name, choice.device, classes=choice.classes), choice, name)
    contents = open_contents(name, files, verify=verify)
    try:
        total = sum(source.size_bytes - source.begin for source in contents.sources)
        with progress_bar(progress, total, "load") as tick:
            mapped = not (is_remote(name) and choice.where is not None)
            return read_tree(contents, replace(choice, tick=tick), mapped=mapped)
    finally:
        contents.close()
