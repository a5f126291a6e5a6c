"""The bytes of a save: leaves with checksums, in one file or in shards with an index, committed as one.

Shards have names that no other save uses. The index is replaced last, in one step. After that, the save removes the one
file of an old save, which readers prefer to an index, and then the shards of tdfunc that no index in the folder names.
A reader finds the complete old checkpoint or the complete new one.
"""

import ctypes
import os
import re
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from tdfunc.core.errors import ConcurrencyError, CorruptCheckpointError, UnsupportedError
from tdfunc.core.system import platform
from tdfunc.storage.disk.commit import Folder, locked, naming, put_file, replace_named, settle, staged_folder, sweep
from tdfunc.storage.disk.raw import memory_of, raw_bytes, write_all
from tdfunc.storage.disk.remote import Files, LocalFiles, RemoteFiles, is_remote
from tdfunc.storage.progress import bytes_bar
from tdfunc.storage.safetensors.folder import join, read_index
from tdfunc.storage.safetensors.header import is_ours, seal
from tdfunc.storage.safetensors.index import INDEX, SINGLE, is_index
from tdfunc.storage.safetensors.plan import FilePlan, SavePlan, is_plain
from tdfunc.storage.safetensors.read import read_bytes

# A piece is still in the processor's cache when it is written after it was hashed.
_PIECE_BYTES = 4 << 20
# Up to this size a copy into the shared buffer is faster than a system call.
SMALL_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 20
SHARD = re.compile(r"model-[0-9a-f]{8}-\d{5,}-of-\d{5,}\.safetensors")
_START_BYTES = 64


def write_file(fd: int, plan: FilePlan) -> str:
    """Write everything: the data, then the header, which holds its checksums, in front of it.

    Args:
        fd: An empty file.
        plan: The places of the leaves.

    Returns:
        The digest of the header.

    Raises:
        ConcurrencyError: A leaf does not have its expected digest.
    """
    digests: list[str] = []
    values = plan.values or pieces
    stage = None
    if plan.expected:
        stage = np.empty(_PIECE_BYTES, dtype=np.uint8)
    buffer = np.empty(_BUFFER_BYTES, dtype=np.uint8)
    view = buffer.data
    start = buffer.ctypes.data
    used = 0
    memmove = ctypes.memmove
    hexdigest = xxhash.xxh3_64_hexdigest
    os.lseek(fd, len(plan.head), os.SEEK_SET)
    with torch.no_grad():
        for address, size_bytes, leaf in plan.work:
            if size_bytes > SMALL_BYTES or plan.values is not None:
                write_all(fd, view[:used])
                plan.tick(used)
                used = 0
                digests.append(_write_large(fd, values(leaf), size_bytes, stage, plan.tick))
                continue
            end = used + size_bytes
            if end > _BUFFER_BYTES:
                write_all(fd, view[:used])
                plan.tick(used)
                used = 0
                end = size_bytes
            if address:
                memmove(start + used, address, size_bytes)
            elif size_bytes:
                buffer[used:end] = raw_bytes(leaf)
            digests.append(hexdigest(view[used:end]))
            used = end
    write_all(fd, view[:used])
    plan.tick(used)
    _check_unchanged(plan, digests)
    # A copy: where the file has to be written twice, the plan is used twice.
    head = bytearray(plan.head)
    own = seal(head, digests)
    os.lseek(fd, 0, os.SEEK_SET)
    write_all(fd, memoryview(head))
    return own


def _write_large(
    fd: int, parts: Iterable[memoryview], size_bytes: int, stage: Any, tick: Callable[[int], object]
) -> str:
    state = xxhash.xxh3_64()
    for piece in parts:
        size_bytes -= len(piece)
        if stage is not None:
            # Another thread may write to the leaf now: the hashed bytes must be those that the file gets.
            copy = stage[: len(piece)]
            copy[:] = piece
            piece = copy.data
        state.update(piece)
        write_all(fd, piece)
        tick(len(piece))
    assert not size_bytes
    return state.hexdigest()


def _check_unchanged(plan: FilePlan, digests: list[str]) -> None:
    changed: list[str] = []
    first = ("", "")
    for (name, expected), found in zip(plan.expected, digests, strict=False):
        if expected is not None and expected != found:
            if not changed:
                first = (expected, found)
            changed.append(name)
    if changed:
        expected, found = first
        raise changed_error(changed, expected=f"values with the digest {expected}", got=found)


def changed_error(names: Sequence[str], *, expected: str, got: str) -> ConcurrencyError:
    """Return the error for leaves that were written to while they waited for a save."""
    return ConcurrencyError(
        f"leaf {', '.join(names[:5])} changed after the save was submitted; nothing was saved.",
        expected=expected,
        got=got,
        hint="submit with copy=True, or do not write to the tree until the save is done.",
    )


def pieces(leaf: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a leaf in row-major order, a few MB at a time; plain leaves are not copied."""
    if is_plain(leaf):
        data = memory_of(leaf)
        for begin in range(0, len(data), _PIECE_BYTES):
            yield data[begin : begin + _PIECE_BYTES]
    elif leaf.numel() * leaf.element_size() <= _PIECE_BYTES or leaf.dim() == 0:
        yield memoryview(raw_bytes(leaf))
    elif leaf.is_contiguous() and leaf.dim() > 1:
        yield from pieces(leaf.view(-1))
    else:
        rows = max(1, _PIECE_BYTES * leaf.shape[0] // (leaf.numel() * leaf.element_size()))
        for part in leaf.split(rows):
            if rows == 1:
                part = part.squeeze(0)
            yield from pieces(part)


def commit(plan: SavePlan, target: str, *, fsync: bool) -> None:
    """Write a plan to its place, a file or a folder of shards, which holds the old checkpoint or the new one."""
    with _shown(plan, target) as shown:
        _commit(shown, target, fsync)


@contextmanager
def _shown(plan: SavePlan, target: str) -> Generator[SavePlan]:
    """Yield a plan that shows a progress bar while it is written."""
    # The caller that computes the values may show their progress itself.
    sizes = [file.size_bytes for file in plan.files if file.values is None]
    with bytes_bar(f"save {os.path.basename(target)}", sum(sizes)) as tick:
        yield plan._replace(files=[file._replace(tick=tick) for file in plan.files])


def _commit(plan: SavePlan, target: str, fsync: bool) -> None:
    if is_remote(target):
        _upload(plan, target)
    elif plan.render is not None:
        _commit_shards(plan, target, fsync)
    elif os.path.basename(target) == SINGLE:
        folder = os.path.dirname(target)
        with locked(folder) as held:
            _replace(put_file, plan.files[0], target, fsync)
            _clear(folder, [], fsync, held, os.path.join(folder, INDEX))
    else:
        _replace(replace_named, plan.files[0], target, fsync)


def write_into(plan: SavePlan, folder: str, *, fsync: bool) -> None:
    """Write a plan into a folder without other writers, which the caller makes durable; the index comes last."""
    with _shown(plan, folder) as shown:
        _write_into(shown, folder, fsync)


def _write_into(plan: SavePlan, folder: str, fsync: bool) -> None:
    paths = [os.path.join(folder, name) for name in plan.names or [SINGLE]]
    digests = [_replace(put_file, file, path, fsync) for file, path in zip(plan.files, paths, strict=True)]
    if plan.render is not None:
        raw = plan.render(digests)
        index = os.path.join(folder, INDEX)
        put_file(index, lambda fd, _: write_all(fd, memoryview(raw)), size_bytes=len(raw), fsync=fsync)


def _replace(put: Callable[..., None], file: FilePlan, path: str, fsync: bool) -> str:
    """Write one file; return the digest of its header."""
    digests: list[str] = []
    put(path, lambda fd, _: digests.append(write_file(fd, file)), size_bytes=file.size_bytes, fsync=fsync)
    return digests[-1]


def _commit_shards(plan: SavePlan, folder: str, fsync: bool) -> None:
    """Replace the checkpoint in a folder by shards; other files in it stay."""
    with suppress(FileExistsError), naming("save", folder, "the folder above must exist, and take a new one"):
        os.mkdir(folder)
    index = os.path.join(folder, INDEX)
    single = os.path.join(folder, SINGLE)
    with locked(folder) as held:
        with naming("save", folder, "the checkpoint was not replaced"):
            # Readers take this file before an index: it is the old checkpoint until it goes.
            has_single = False
            with suppress(FileNotFoundError):
                has_single = not stat.S_ISDIR(os.lstat(single).st_mode)
            sweep(folder)
            with staged_folder(index) as place:
                _write_into(plan, place, fsync)
                _move_into(held, place, plan.names, fsync)
            if has_single:
                if fsync:
                    held.sync()
                with suppress(FileNotFoundError):
                    platform.remove(single)
        _clear(folder, plan.names, fsync, held)


def _move_into(folder: Folder, place: str, names: Sequence[str], fsync: bool) -> None:
    """Move shards into a folder, and then the index, which replaces the old one.

    Args:
        folder: The folder.
        place: The folder that the new files are in.
        names: The shards.
        fsync: Wait until the disk has the shards, before the index is replaced.
    """
    index = os.path.join(folder.path, INDEX)
    new = os.path.join(place, INDEX)
    platform.copy_mode(index, new)
    made = {os.path.join(place, name): os.path.join(folder.path, name) for name in names}
    try:
        for source, target in made.items():
            platform.rename(source, target)
        if fsync:
            folder.sync()
        platform.replace(new, index)
    except BaseException:
        # As long as the new index is here, the old one has its place, and names none of these.
        if os.path.lexists(new):
            moved = [target for source, target in made.items() if not os.path.lexists(source)]
            for target in moved:
                with suppress(OSError):
                    platform.remove(target)
        raise


def _clear(folder: str, own: Iterable[str], fsync: bool, held: Folder, index: str | None = None) -> None:
    """Remove what a save replaced, once the disk has what replaces it: an index, and shards that no index names."""

    def clear() -> None:
        # A folder of this name is a sub-tree of a memmap.
        if index is not None and not os.path.isdir(index):
            with suppress(FileNotFoundError):
                platform.remove(index)
        sweep(folder)
        remove_shards(folder or ".", os.listdir(folder or "."), own, LocalFiles())

    if not fsync or settle(folder, "a power failure may undo it", held.sync):
        settle(folder, "files of the old checkpoint are still there", clear)


def remove_shards(folder: str, names: Iterable[str], own: Iterable[str], files: Files) -> None:
    """Remove shards of tdfunc that no index names from some files; `own` files always stay.

    Raises:
        OSError: An index cannot be read. Nothing was removed.
    """
    found = [name for name in set(names).difference(own) if SHARD.fullmatch(name)]
    if not found:
        return
    named: set[str] = set()
    for index in [name for name in files.names(folder) if is_index(name)]:
        # One that is not an index names nothing; one that cannot be read may name any.
        with suppress(IsADirectoryError, CorruptCheckpointError, UnsupportedError):
            named.update(read_index(join(folder, index), files, verify=False)[1].files)
    for name in sorted({*found} - named):
        path = join(folder, name)
        # Another program may use such a name.
        data = files.open(path)
        try:
            is_shard = is_ours(read_bytes(data, 0, min(data.size_bytes, _START_BYTES)))
        finally:
            data.close()
        if is_shard:
            files.remove(path)


def _upload(plan: SavePlan, target: str) -> None:
    """Upload all files, the index last; then remove those that readers would prefer or that no index names any more."""
    files = RemoteFiles(target, fetch=False)
    if plan.render is None:
        folder, _, name = target.rpartition("/")
    else:
        folder = target.rstrip("/")
        name = ""
    index = f"{folder}/{INDEX}"
    old = list[str]()
    if plan.render is not None or name == SINGLE:
        # Shards of other saves may be of one that runs.
        with suppress(OSError, TypeError, ValueError):
            old = read_index(index, files, verify=False)[1].files
    digests: list[str] = []
    for file, own in zip(plan.files, plan.names or [name], strict=True):
        files.replace(f"{folder}/{own}", lambda fd, file=file: digests.append(write_file(fd, file)))
    if plan.render is not None:
        raw = plan.render(digests)
        files.replace(index, lambda fd: write_all(fd, memoryview(raw)))
        if files.exists(f"{folder}/{SINGLE}"):
            files.remove(f"{folder}/{SINGLE}")

    def clear() -> None:
        if name == SINGLE and files.exists(index):
            files.remove(index)
        remove_shards(folder, old, plan.names, files)

    settle(target, "files of the old checkpoint are still there", clear)
