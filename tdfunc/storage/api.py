"""`save` and `load`: a tree in one safetensors file, or in shards, that any reader of the format opens."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tdfunc.core.collection import TensorCollection
from tdfunc.core.keys import FilterLike
from tdfunc.core.types import Device
from tdfunc.storage.disk.ranks import find_sharded
from tdfunc.storage.disk.raw import outside_transforms
from tdfunc.storage.disk.remote import LocalFiles, RemoteFiles, find, is_remote
from tdfunc.storage.memmap.read import load_memmap
from tdfunc.storage.safetensors.contents import warn_unlisted
from tdfunc.storage.safetensors.folder import is_memmap, open_contents
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
) -> None:
    """Save a tree to a safetensors file or to a folder of shards.

    On a local file system the save is atomic: at every moment, `path` holds either the complete old checkpoint or the
    complete new one. `load` returns an equal tree, with the same key order, batch sizes, dimension names, devices, tied
    weights (stored once, under the first path), kinds, Parameters and `requires_grad`. Each leaf and the header get a
    checksum. Strides are not kept: every leaf is written in row-major order.

    Besides tensors, a tree may contain None, bools, numbers, strings, and lists, tuples and dicts of these and of
    tensors, trees, and numpy's arrays and numbers. The `state_dict()` of a torch optimizer is an example.

    All ranks of the default process group save a tree with DTensors together: all of them call this with the same path.
    If the mesh has one dimension and only some of the ranks, these ranks call it. Each rank writes its own parts into
    one file, and nothing is gathered. All other leaves and the options must be equal on all ranks. If one rank fails or
    dies, or its call differs, all ranks raise, and the old file stays.

    With `max_shard_size`, `path` is a folder in the layout of Hugging Face: shards and `model.safetensors.index.json`.
    The save replaces the checkpoint in that folder and leaves other files alone. In the same way, a save of one file as
    `model.safetensors` replaces an index in its folder.

    Args:
        td: The tree to save, or a mapping from names to trees, tensors and plain values.
        path: The file, with the suffix `.safetensors`, or the folder for shards. The parent folder must exist. With
            fsspec installed, a URL such as `s3://bucket/model.safetensors` also works.
        max_shard_size: The largest size of a shard, in bytes or as a string such as `"5GB"`. A leaf that is larger gets
            its own shard.
        fsync: Wait until the data is on the disk. Without it, a power failure can undo the save; a crash of the program
            cannot.

    Raises:
        ValueError: `path` has a different suffix, or `max_shard_size` is not a size or `path` not a folder for shards.
        UnsupportedError: A leaf or value cannot be stored unchanged; the message names it and nothing is written.
        OSError: Writing failed, for example because the disk is full. The old checkpoint is unchanged and no partial
            file remains. Once the new checkpoint is in place, an error is a `RuntimeWarning`.
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
    leaf = find_sharded(td)
    if leaf is not None:
        save_by_ranks(td, path, leaf, max_shard_size, fsync)
        return
    target, max_bytes = check_target(path, max_shard_size)
    tree = as_tree(td, f"save {target}")
    save_outline(outline(tree), target, max_bytes, fsync=fsync)


def load(
    path: str | os.PathLike[str],
    *,
    like: Any = None,  # a tree or spec of anything that has a shape and a dtype
    where: "FilterLike | None" = None,
    dtype: torch.dtype | None = None,
    device: "Device | None" = None,
    classes: "Classes" = (),
    verify: bool = True,
    dequantize: bool = False,
) -> "TensorDict":
    """Load a tree from a safetensors file, from shards with an index, or from a memmap folder.

    Files are mapped copy-on-write: leaves are read when they are first used, in-place writes to them stay in
    memory, and the file does not change. A file of another program becomes a nested tree by its dotted names, or a
    flat tree if the names do not nest (`a` and `a.b`).

    In a folder, the first of these files decides the format:

    - `model.safetensors`: one file.
    - `model.safetensors.index.json`: shards.
    - `meta.json`: a memmap folder.
    - `adapter_model.safetensors`: an adapter under PEFT's names. `tdfunc.lora.load` reads it as adapters of a base.
    - the only variant, such as `model.fp16.safetensors` or `model.safetensors.index.fp16.json`.

    If the index of another program does not name all leaves of its files, a warning names the others.

    Args:
        path: The file or folder; with fsspec also a URL, whose files are fetched first.
        like: The expected leaves: a tree (on any device), a nested mapping, or a spec, of anything with a shape and a
            dtype. The keys, shapes and dtypes of the result must be equal to it; values, batch sizes and non-tensor
            data are not compared. Of the paths that it ties, one is enough. A file without kinds (a state dict, or a
            copy of one) may lack buffers that are not persistent, and then the result lacks them. Where `like` has
            a DTensor, the leaf becomes a DTensor with that mesh and placements, and only this rank's part of it is
            read.
        where: A glob on dotted paths or a `Filter`, as in `partition`: only these leaves are read and verified. A
            predicate gets leaves without values (on the meta device), which have a shape and a dtype.
        dtype: The dtype to which leaves of floating dtypes (also float8) are cast. Other leaves do not change, and a
            scale of integer codes keeps its dtype. FP8 codes beside a scale are not cast: see `dequantize`.
        device: The device of the leaves. By default the device of the saved tree (the CPU for a tree without a
            device). `"meta"` reads only the header, as does `FakeTensorMode`.
        classes: The classes of the tree's nodes that are not TensorDicts. Classes of imported modules are found
            without it. A class that was defined in a script, moved or renamed is found by its qualified name, else by
            its fields, or named: `{"__main__:Batch": Batch}`. `TensorDict` loads all nodes as TensorDicts.
        verify: Read everything once and compare the checksums. Files of other programs have no checksums.
        dequantize: Multiply FP8 codes by their scales (for a tensor, a row or a block), which then are not in the
            result, nor are scales of inputs. The numbers have `dtype`, by default float32. Without it, codes and scales
            are loaded as they are.

    Returns:
        The saved tree, in its own class. `Class.load` returns the same with the type of the class.

    Raises:
        CorruptCheckpointError: The file was damaged or altered; the message names the leaf and both values.
        UnsupportedError: This machine does not have the class, dtype, device or format version, a predicate in `where`
            reads values, `dtype` would cast codes, or codes are of a layout that cannot be dequantized.
        TreeStructureError: The keys differ from the keys of `like`, or a class does not have an entry as a field any
            more. The message lists every difference.
        LeafMismatchError: Shapes or dtypes differ from the leaves of `like`; the message lists all of them.
        FilterError: A pattern in `where` matches no leaf.
        FileNotFoundError: The file does not exist, or the folder does not contain a checkpoint.
    """
    place = None
    if device is not None:
        place = torch.device(device)
    return load_choice(find(path), Choice(where, like, dtype, place, classes, dequantize), verify=verify)


def load_choice(name: str, choice: Choice, *, verify: bool, mapped: bool = True) -> Any:
    """Load the chosen part of a file, shards or a memmap folder; leaves that are not `mapped` are read at once."""
    if is_remote(name):
        files = RemoteFiles(name, fetch=choice.where is None)
    else:
        files = LocalFiles()
    if is_memmap(name, files):
        with outside_transforms():
            return narrow_tree(load_memmap(name, choice.device, classes=choice.classes), choice, name)
    contents = open_contents(name, files, verify=verify)
    try:
        warn_unlisted(contents)
        # Codes are told apart from numbers by the leaves beside them, which the glob may not choose.
        is_cast = choice.dtype is not None or choice.dequantize
        if isinstance(choice.where, str) and choice.like is None and not is_cast:
            contents.narrow(choice.where)
        # Of a part of a remote file, ranges are fetched; only a file that was fetched whole can be mapped.
        is_in_ranges = is_remote(name) and choice.where is not None
        return read_tree(contents, choice, mapped=mapped and not is_in_ranges)
    finally:
        contents.close()
