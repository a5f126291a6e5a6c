"""An outlined tree, written to a checked target: one file, or shards in a folder."""

import os
from collections.abc import Mapping

from tdfunc.core.errors import error
from tdfunc.storage.disk.remote import as_name, is_remote
from tdfunc.storage.safetensors.plan import Values, as_bytes, plan_save
from tdfunc.storage.safetensors.write import commit
from tdfunc.storage.tree.encode import Outline

_SUFFIX = ".safetensors"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


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
                got="the name of a file",
                hint="name a folder, or leave out max_shard_size=.",
            )
        return target, as_bytes(max_shard_size)
    suffix = os.path.splitext(target)[1]
    if suffix != _SUFFIX:
        raise error(
            ValueError,
            f"save {target}: the file name does not end in {_SUFFIX}.",
            expected=_SUFFIX,
            got=suffix or "none",
            hint="torch.save(td.state_dict(), path) writes .pt; max_shard_size= writes a folder of shards.",
        )
    if not is_remote(target) and os.path.isdir(target):
        raise error(IsADirectoryError, f"save {target}: this is a folder.", expected="the name of a file")
    return target, None


def save_outline(
    out: Outline,
    target: str,
    max_bytes: int | None = None,
    *,
    fsync: bool,
    digests: Mapping[str, str] | None = None,
    values: Values | None = None,
) -> None:
    """Write an outlined tree as one file or as shards of `max_bytes`; a leaf with a digest must still have it.

    With `values`, a function that returns the bytes of each leaf, the leaves do not need values.
    """
    commit(plan_save(out, max_bytes, digests, values), target, fsync=fsync)
