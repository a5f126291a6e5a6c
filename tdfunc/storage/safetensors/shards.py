"""A tree in several files, in the layout of Hugging Face: shards, and an index that commits them as one.

Shards carry names that no other save uses. The index is replaced last, in one step, and only then the files go that
no index names any more. Whoever reads meanwhile finds the whole old checkpoint or the whole new one.
"""

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from tdfunc.core.errors import UnsupportedError, error
from tdfunc.storage.disk.commit import locked, replace_file, sweep
from tdfunc.storage.disk.raw import write_all
from tdfunc.storage.disk.remote import Files, LocalFiles, RemoteFiles
from tdfunc.storage.safetensors.files import read_index
from tdfunc.storage.safetensors.header import MAX_HEADER_BYTES
from tdfunc.storage.safetensors.index import INDEX, SINGLE, render_index
from tdfunc.storage.safetensors.write import FilePlan, Values, plan_file, write_file
from tdfunc.storage.tree.encode import Outline

_SHARD = re.compile(r"model-[0-9a-f]{8}-\d{5,}-of-\d{5,}\.safetensors")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", re.IGNORECASE)
_UNITS = {f"{unit}{i}": (1024 if i else 1000) ** power for power, unit in enumerate(" KMGT") for i in ("", "I")}
Tick = Callable[[int], object] | None


class ShardPlan:
    """Everything that a save in shards writes, checked before the first byte.

    Raises:
        UnsupportedError: A header or the index would be too long.
    """

    def __init__(
        self,
        outline: Outline,
        max_bytes: int,
        digests: Mapping[str, str] | None = None,
        values: Values | None = None,
    ) -> None:
        self._outline = outline
        self.groups = _group([spec.size_bytes for spec in outline.specs], max_bytes)
        generation, count = secrets.token_hex(4), len(self.groups)
        self.names = [f"model-{generation}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        self.files = [plan_file(_part(outline, group), digests, values) for group in self.groups]
        self.size_bytes = sum(spec.size_bytes for spec in outline.specs)
        length = len(self.index(["0" * 16] * count))
        if length > MAX_HEADER_BYTES:
            raise UnsupportedError(
                "save: the index would be too long; nothing was written.",
                expected=f"at most {MAX_HEADER_BYTES} bytes",
                got=f"{length} bytes",
                hint="save parts of the tree.",
            )

    def index(self, digests: Sequence[str]) -> bytes:
        """Return the index, given the digest of each shard's header."""
        outline = self._outline
        homes = [""] * len(outline.names)
        for name, group in zip(self.names, self.groups, strict=True):
            for i in group:
                homes[i] = name
        assert outline.text is not None
        shards = dict(zip(self.names, digests, strict=True))
        return render_index(outline.text, outline.names, homes, shards, self.size_bytes)


def as_bytes(size: int | str) -> int:
    """Return the number of bytes in `5_000_000_000`, `"5000000000"`, `"5GB"` or `"4.7 GiB"`.

    Raises:
        ValueError: It is no size, or none that can hold a byte.
    """
    if type(size) is int and size > 0:
        return size
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    count = int(float(found[1]) * _UNITS[(found[2] or " ").upper()]) if found is not None else 0
    if count <= 0:
        raise error(
            ValueError,
            "save: max_shard_size is no size.",
            expected='a number of bytes, or a text as "5GB" or "512MiB"',
            got=repr(size),
        )
    return count


def _group(sizes: Sequence[int], max_bytes: int) -> list[list[int]]:
    """Fill one shard after the other; a leaf that is larger gets one of its own."""
    groups: list[list[int]] = [[]]
    used = 0
    for i, size in enumerate(sizes):
        if groups[-1] and used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(i)
        used += size
    return groups


def _part(outline: Outline, group: Sequence[int]) -> Outline:
    names, specs, leaves = outline.names, outline.specs, outline.leaves
    return Outline(None, [names[i] for i in group], [specs[i] for i in group], [leaves[i] for i in group])


# -- this machine -----------------------------------------------------------------------------------------------


def save_shards(plan: ShardPlan, folder: str, *, fsync: bool, tick: Tick = None) -> None:
    """Write all shards and then the index, which replaces the checkpoint in the folder."""
    with suppress(FileExistsError):
        try:
            os.mkdir(folder)
        except FileNotFoundError as err:
            raise OSError(err.errno, f"save: {err.strerror}; the folder above must exist", folder) from err
    paths = [os.path.join(folder, name) for name in plan.names]
    with locked(folder) as fd:
        old = _named_by(os.path.join(folder, INDEX), LocalFiles())
        # What a killed save left takes space.
        _sweep(folder, old, set())
        try:
            write_shards(plan, folder, fsync=fsync, tick=tick)
        except BaseException:
            # The index may have been replaced before the error.
            if not _named_by(os.path.join(folder, INDEX), LocalFiles()).intersection(plan.names):
                _remove(paths)
            raise
        _sweep(folder, set(plan.names), old | {SINGLE})
        if fsync:
            os.fsync(fd)


def write_shards(plan: ShardPlan, folder: str, *, fsync: bool, tick: Tick = None) -> None:
    """Write all shards and then the index into a folder that nobody else writes to."""
    paths = [os.path.join(folder, name) for name in plan.names]
    # One after the other: several threads were measured to be no faster.
    digests = [write_plan(file, path, fsync=fsync, tick=tick) for file, path in zip(plan.files, paths, strict=True)]
    raw = plan.index(digests)
    index = os.path.join(folder, INDEX)
    replace_file(index, lambda at: write_all(at, memoryview(raw)), size_bytes=len(raw), fsync=fsync)


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        with suppress(OSError):
            os.unlink(path)


def write_plan(file: FilePlan, path: str, *, fsync: bool, tick: Tick = None) -> str:
    """Write one file as a whole; return the digest of its header."""
    digests: list[str] = []
    replace_file(path, lambda fd: digests.append(write_file(fd, file, tick)), size_bytes=file.size_bytes, fsync=fsync)
    # The last one, where the file system made a second try necessary.
    return digests[-1]


def save_single(path: str, write: Callable[[int], None], *, size_bytes: int, fsync: bool) -> None:
    """Write the one file of a folder, and remove the index beside it, which readers would prefer, with its shards."""
    folder = os.path.dirname(path) or "."
    index = os.path.join(folder, INDEX)
    with locked(folder) as fd:
        replace_file(path, write, size_bytes=size_bytes, fsync=fsync)
        if not os.path.lexists(index):
            return
        old = _named_by(index, LocalFiles())
        os.unlink(index)
        _sweep(folder, set(), old)
        if fsync:
            os.fsync(fd)


def _named_by(index: str, files: Files) -> set[str]:
    """Return the shards that an index names; none if it cannot be read, which no save may depend on."""
    try:
        return set(read_index(index, files, verify=False)[1].files)
    except (OSError, TypeError, ValueError):
        return set()


def _sweep(folder: str, keep: set[str], old: set[str]) -> None:
    """Remove shards of saves that were killed or replaced, and `old` files of other names."""
    sweep(folder)
    for name in os.listdir(folder or "."):
        if name not in keep and (name in old or _SHARD.fullmatch(name)):
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))


# -- other machines ---------------------------------------------------------------------------------------------


def save_remote_shards(plan: ShardPlan, folder: str, files: RemoteFiles, *, tick: Tick = None) -> None:
    """Upload all shards and then the index."""
    index = f"{folder}/{INDEX}"
    old = _named_by(index, files)
    digests: list[str] = []
    for file, name in zip(plan.files, plan.names, strict=True):
        files.replace(f"{folder}/{name}", lambda fd, file=file: digests.append(write_file(fd, file, tick)))
    raw = plan.index(digests)
    files.replace(index, lambda fd: write_all(fd, memoryview(raw)))
    _remove_remote(folder, old | {SINGLE}, files)


def save_remote_file(path: str, write: Callable[[int], None], files: RemoteFiles) -> None:
    """Upload one file; named as the one file of a folder, it replaces an index and its shards."""
    files.replace(path, write)
    folder, _, name = path.rpartition("/")
    if name == SINGLE:
        _remove_remote(folder, {INDEX, *_named_by(f"{folder}/{INDEX}", files)}, files)


def _remove_remote(folder: str, names: set[str], files: RemoteFiles) -> None:
    """Delete what is there of some files."""
    for name in sorted(names):
        if files.exists(f"{folder}/{name}"):
            files.remove(f"{folder}/{name}")
