"""Where a command writes: which format, whether something is there, and the streaming save of that format."""

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tdfunc.cli.leaves import plain_values, stored_leaves
from tdfunc.cli.output import safe
from tdfunc.cli.streams import note
from tdfunc.cli.torch_files import state_of, without_values, write_torch
from tdfunc.core.collection import LeafOp, TensorCollection
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.ops.display.text import count_text
from tdfunc.storage.disk.remote import is_remote, local_path
from tdfunc.storage.manager.manager import ABOUT_FILE
from tdfunc.storage.manager.steps import list_steps
from tdfunc.storage.memmap.folder_owned import check_target as check_memmap
from tdfunc.storage.memmap.layout import META
from tdfunc.storage.safetensors.index import INDEX, SINGLE
from tdfunc.storage.safetensors.plan import as_bytes
from tdfunc.storage.safetensors.stream import memmap_stream, save_stream

FORMATS = ("safetensors", "shards", "memmap", "torch")
_TORCH = (".pt", ".pth", ".bin", ".ckpt")
# What Hugging Face's tools take without being told.
_SHARD_SIZE = "5GB"
Values = Callable[[Tensor], Iterable[Tensor]]


class Target(NamedTuple):
    """A place and a format."""

    path: str
    format: str
    max_shard_size: str | None


def make_target(
    path: str, format: str | None, max_shard_size: str | None, source_format: str, *, force: bool
) -> Target:
    """Decide how to write to a path, and that it may be.

    Raises:
        ValueError: No format follows from the name, or the name does not fit the format.
        FileExistsError: There is something, and `force` was not given (or it is no checkpoint).
    """
    path = local_path(path)
    path = path.rstrip("/") or path
    chosen = format or _format_of(path, max_shard_size, source_format)
    if chosen not in FORMATS:
        raise error(ValueError, f"--to {chosen}: there is no such format.", expected=", ".join(FORMATS), got=chosen)
    if max_shard_size is not None:
        as_bytes(max_shard_size)
        if chosen != "shards":
            raise error(
                ValueError,
                "--max-shard-size is for a folder of shards.",
                expected="a folder",
                got=f"{path} as {chosen}",
            )
    _check_name(path, chosen)
    if not is_remote(path):
        _check_run(path, chosen)
    taken = _taken(path, chosen)
    if taken is not None and not force:
        raise error(FileExistsError, f"{taken} exists.", expected="a new name", hint="--force replaces it.")
    if chosen == "memmap" and not is_remote(path):
        check_memmap(os.path.realpath(path), "convert", exist_ok=True)
    return Target(path, chosen, (max_shard_size or _SHARD_SIZE) if chosen == "shards" else None)


def _format_of(path: str, max_shard_size: str | None, source_format: str) -> str:
    if max_shard_size is not None:
        return "shards"
    suffix = os.path.splitext(path)[1]
    if suffix == ".safetensors":
        return "safetensors"
    if suffix in _TORCH:
        return "torch"
    if source_format in ("shards", "memmap"):
        return source_format
    raise error(
        ValueError,
        f"{path}: the name does not say which format to write.",
        expected=", ".join(FORMATS),
        hint="name it x.safetensors or x.pt, or say what it is: --to shards, --to memmap.",
    )


def _check_name(path: str, format: str) -> None:
    suffix = os.path.splitext(path)[1]
    what = {"safetensors": (".safetensors",), "torch": _TORCH}.get(format)
    is_folder = os.path.isdir(path)
    if (what is not None and (suffix not in what or is_folder)) or (
        what is None and suffix in (".safetensors", *_TORCH)
    ):
        raise error(
            ValueError,
            f"{path} does not fit the format {format}.",
            expected=f"a file that ends in {' or '.join(what)}" if what else "a folder",
            got="a folder" if is_folder else path,
        )
    if is_remote(path) and format in ("memmap", "torch"):
        raise UnsupportedError(f"{path}: {format} is written on this machine only.", expected="a local path")


def _check_run(path: str, format: str) -> None:
    """Raise for what a `CheckpointManager` keeps: other files there would hide its steps, or be called damage."""
    is_file = format in ("safetensors", "torch")
    if not is_file and list_steps(path):
        raise error(
            FileExistsError,
            f"{path} holds the steps of a run.",
            expected="a folder without steps",
            hint="choose another folder.",
        )
    folder = os.path.dirname(path) if is_file else path
    if (os.path.basename(path) == SINGLE or not is_file) and os.path.isfile(os.path.join(folder, ABOUT_FILE)):
        raise error(
            FileExistsError,
            f"{folder} is a step of a run.",
            expected="a place outside of it",
            hint="CheckpointManager.save(..., overwrite=True) replaces it.",
        )


def _taken(path: str, format: str) -> str | None:
    """Return what a write to a path would replace."""
    if is_remote(path):
        return None
    if format in ("safetensors", "torch"):
        index = os.path.join(os.path.dirname(path), INDEX)
        if os.path.basename(path) == SINGLE and os.path.lexists(index):
            return index
        return path if os.path.lexists(path) else None
    if os.path.lexists(path) and not os.path.isdir(path):
        raise error(FileExistsError, f"{path} is a file.", expected="the name of a folder")
    inside = (INDEX, SINGLE, META)
    found = next((name for name in inside if os.path.lexists(os.path.join(path, name))), None)
    if format == "shards" and found == META:
        raise error(
            FileExistsError,
            f"{path} holds a memmapped tree.",
            expected="a folder without one",
            hint="choose another folder.",
        )
    return os.path.join(path, found) if found is not None else None


def write(target: Target, tree: TensorCollection, values: Values) -> None:
    """Write a tree without values, asking for those of each leaf when its turn comes."""
    if target.format == "torch":
        state, hidden = state_of(tree)
        others = [".".join(path) for path in plain_values(tree)]
        others += [one.name for one in stored_leaves(tree) if one.is_value]
        if lost := [*hidden, *others]:
            names = ", ".join(map(safe, lost[:5])) + (", ..." if len(lost) > 5 else "")
            note(f"{target.path} is a state dict, which has no place for {count_text(len(lost), 'entry')}: {names}")
        write_torch(state, values, target.path)
    elif target.format == "memmap":
        memmap_stream(tree, values, target.path, existsok=True)
    else:
        save_stream(tree, values, target.path, max_shard_size=target.max_shard_size)


def cast_tree(tree: TensorCollection, dtype: torch.dtype) -> tuple[TensorCollection, dict[int, Tensor]]:
    """Return the tree with floating leaves of another dtype, and the leaf that each new one is of, by its id."""
    origins: dict[int, Tensor] = {}
    made: dict[int, Tensor] = {}

    def cast(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point() or leaf.dtype == dtype:
            return leaf
        if id(leaf) not in made:
            new = made[id(leaf)] = without_values(leaf, dtype)
            origins[id(new)] = leaf
        return made[id(leaf)]

    return tree._map(LeafOp("cast", cast)), origins
