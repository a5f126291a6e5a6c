"""`save` and `load`: a whole tree in one safetensors file, or in shards, that any reader of the format opens."""

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.core.keys import FilterLike
from tdfunc.core.ranks import has_sharded
from tdfunc.core.types import Device
from tdfunc.storage.disk.raw import outside_transforms
from tdfunc.storage.disk.remote import LocalFiles, RemoteFiles, is_remote, local_path
from tdfunc.storage.memmap.read import load_memmap
from tdfunc.storage.safetensors.contents import is_memmap, open_contents
from tdfunc.storage.safetensors.plan import Values, as_bytes, plan_save
from tdfunc.storage.safetensors.ranks import save_by_ranks
from tdfunc.storage.safetensors.select import Choice, narrow_tree, read_tree
from tdfunc.storage.safetensors.write import commit
from tdfunc.storage.tree.build import Classes
from tdfunc.storage.tree.encode import Outline, outline
from tdfunc.storage.tree.objects import as_tree

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

_SUFFIX = ".safetensors"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


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
    that is saved as `model.safetensors` also replaces an index in its folder. Other files in the folder stay.

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
        OSError: It could not be written; the old checkpoint is whole and nothing is left behind.

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


def save_outline(
    out: Outline,
    target: str,
    max_bytes: int | None = None,
    *,
    fsync: bool = True,
    digests: Mapping[str, str] | None = None,
    values: Values | None = None,
    progress: bool = False,
) -> None:
    """Write a tree that was outlined, as one file or as shards of `max_bytes`; a leaf with a digest must still have it.

    With `values` the leaves need none: their bytes come from that.
    """
    plan = plan_save(out, max_bytes, digests, values)
    with progress_bar(progress, plan.size_bytes, "save") as tick:
        commit(plan, target, fsync=fsync, tick=tick)


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
    `meta.json` a memmap folder.

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
    return load_choice(as_name(path), Choice(where, like, dtype, place, classes), verify=verify, progress=progress)


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


@contextmanager
def progress_bar(show: bool, size_bytes: int, what: str) -> Generator[Callable[[int], object] | None, None, None]:
    """Yield a function to call with each number of bytes done; None where nothing is to be shown."""
    if not show:
        yield None
        return
    try:
        from tqdm.auto import tqdm  # pyright: ignore[reportMissingModuleSource]
    except ImportError as err:
        raise UnsupportedError("progress=True needs tqdm, which is not installed.", hint="pip install tqdm.") from err
    with tqdm(total=size_bytes, unit="B", unit_scale=True, unit_divisor=1000, desc=what) as bar:
        yield bar.update


def as_name(path: "str | bytes | os.PathLike[str]") -> str:
    """Return a path as text, of a file of this machine without its protocol."""
    return local_path(os.fsdecode(path))


def check_target(path: str | os.PathLike[str], max_shard_size: int | str | None = None) -> tuple[str, int | None]:
    """Return the name of a file or folder that a tree can be saved as, and the most bytes of a shard."""
    target = as_name(path)
    if max_shard_size is not None:
        taken = not is_remote(target) and os.path.lexists(target) and not os.path.isdir(target)
        if taken or target.endswith((_SUFFIX, *_TORCH_SUFFIXES)):
            raise error(
                ValueError,
                f"save {target}: shards are saved in a folder.",
                expected="the name of a folder",
                got="that of a file",
                hint="name a folder, or leave out max_shard_size=.",
            )
        return target.rstrip("/") or target, as_bytes(max_shard_size)
    suffix = os.path.splitext(target)[1]
    if suffix != _SUFFIX:
        raise error(
            ValueError,
            f"save {target}: the file name must end in {_SUFFIX}.",
            expected=_SUFFIX,
            got=suffix or "none",
            hint="torch.save(td.state_dict(), path) writes .pt; max_shard_size= writes a folder of shards.",
        )
    if not is_remote(target) and os.path.isdir(target):
        raise error(IsADirectoryError, f"save {target}: this is a folder.", expected="the name of a file")
    return target, None
