"""The bytes of a save: leaves checksummed as they are written, and one file or shards with an index, committed as one.

Shards carry names that no other save uses. The index is replaced last, in one step, and only then the files go that
no index names any more, the one file of an old save first, which readers prefer to an index. A reader finds the whole
old checkpoint or the whole new one.
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from tdfunc.core.errors import ConcurrencyError
from tdfunc.storage.disk.commit import locked, replace_file, sweep
from tdfunc.storage.disk.raw import raw_bytes, raw_view, write_all
from tdfunc.storage.disk.remote import Files, LocalFiles, RemoteFiles, is_remote
from tdfunc.storage.safetensors.contents import read_index
from tdfunc.storage.safetensors.header import seal
from tdfunc.storage.safetensors.index import INDEX, SINGLE
from tdfunc.storage.safetensors.plan import FilePlan, SavePlan, is_plain

# A piece is still in the processor's cache when it is written after it was hashed.
_PIECE_BYTES = 4 << 20
# Up to this size a copy into the shared buffer is faster than a system call.
SMALL_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 20
_SHARD = re.compile(r"model-[0-9a-f]{8}-\d{5,}-of-\d{5,}\.safetensors")
Tick = Callable[[int], object] | None


def write_file(fd: int, plan: FilePlan, tick: Callable[[int], object] | None = None) -> str:
    """Write everything: the data, then the header, which holds its checksums, in front of it.

    Args:
        fd: An empty file.
        plan: The places of the leaves.
        tick: Called with the bytes of each leaf that is written.

    Returns:
        The digest of the header.

    Raises:
        ConcurrencyError: A leaf has not the digest that was expected of it.
    """
    digests: list[str] = []
    stage = np.empty(_PIECE_BYTES, dtype=np.uint8) if plan.expected else None
    buffer = np.empty(_BUFFER_BYTES, dtype=np.uint8)
    view, start, used = buffer.data, buffer.ctypes.data, 0
    memmove, hexdigest = ctypes.memmove, xxhash.xxh3_64_hexdigest
    os.lseek(fd, len(plan.head), os.SEEK_SET)
    with torch.no_grad():
        for address, size_bytes, leaf in plan.work:
            if tick is not None:
                tick(size_bytes)
            if size_bytes > SMALL_BYTES or plan.values is not None:
                write_all(fd, view[:used])
                used = 0
                digests.append(_write_large(fd, (plan.values or pieces)(leaf), size_bytes, stage))
                continue
            end = used + size_bytes
            if end > _BUFFER_BYTES:
                write_all(fd, view[:used])
                used, end = 0, size_bytes
            if address:
                memmove(start + used, address, size_bytes)
            elif size_bytes:
                buffer[used:end] = raw_bytes(leaf)
            digests.append(hexdigest(view[used:end]))
            used = end
    write_all(fd, view[:used])
    _check_unchanged(plan, digests)
    # A copy: where the file has to be written twice, the plan is used twice.
    head = bytearray(plan.head)
    own = seal(head, digests)
    os.lseek(fd, 0, os.SEEK_SET)
    write_all(fd, memoryview(head))
    return own


def _write_large(fd: int, parts: Iterable[memoryview], size_bytes: int, stage: Any) -> str:
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
    assert not size_bytes
    return state.hexdigest()


def _check_unchanged(plan: FilePlan, digests: list[str]) -> None:
    changed = [
        (name, expected, found)
        for (name, expected), found in zip(plan.expected, digests, strict=False)
        if expected is not None and expected != found
    ]
    if changed:
        name, expected, found = changed[0]
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise ConcurrencyError(
            f"leaf {name}{more} changed after the save was submitted; nothing was saved.",
            expected=f"values with the digest {expected}",
            got=found,
            hint="submit with copy=True, or do not write to the tree until the save is done.",
        )


def pieces(leaf: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a leaf in row-major order, a few MB at a time; only leaves that need it are copied."""
    if is_plain(leaf):
        data = memoryview(raw_view(leaf))
        for begin in range(0, len(data), _PIECE_BYTES):
            yield data[begin : begin + _PIECE_BYTES]
    elif leaf.numel() * leaf.element_size() <= _PIECE_BYTES or leaf.dim() == 0:
        yield memoryview(raw_bytes(leaf))
    elif leaf.is_contiguous() and leaf.dim() > 1:
        yield from pieces(leaf.view(-1))
    else:
        rows = max(1, _PIECE_BYTES * leaf.shape[0] // (leaf.numel() * leaf.element_size()))
        for part in leaf.split(rows):
            yield from pieces(part.squeeze(0) if rows == 1 else part)


def commit(plan: SavePlan, target: str, *, fsync: bool, tick: Tick = None) -> None:
    """Write a plan to its place, a file or a folder of shards, which holds the old checkpoint or the new one."""
    if is_remote(target):
        _upload(plan, target, tick)
    elif plan.render is None and os.path.basename(target) != SINGLE:
        _replace(plan.files[0], target, fsync, tick)
    else:
        _commit_folder(plan, target if plan.render is not None else os.path.dirname(target), fsync, tick)


def write_into(plan: SavePlan, folder: str, *, fsync: bool, tick: Tick = None) -> None:
    """Write a plan into a folder without other writers; the index comes last."""
    paths = [os.path.join(folder, name) for name in plan.names or [SINGLE]]
    digests = [_replace(file, path, fsync, tick) for file, path in zip(plan.files, paths, strict=True)]
    if plan.render is not None:
        raw = plan.render(digests)
        index = os.path.join(folder, INDEX)
        replace_file(index, lambda fd: write_all(fd, memoryview(raw)), size_bytes=len(raw), fsync=fsync)


def _replace(file: FilePlan, path: str, fsync: bool, tick: Tick) -> str:
    """Write one file; return the digest of its header."""
    digests: list[str] = []
    replace_file(path, lambda fd: digests.append(write_file(fd, file, tick)), size_bytes=file.size_bytes, fsync=fsync)
    return digests[-1]


def _commit_folder(plan: SavePlan, folder: str, fsync: bool, tick: Tick) -> None:
    """Replace the checkpoint in a folder; other files in it stay."""
    if plan.render is not None:
        with suppress(FileExistsError):
            try:
                os.mkdir(folder)
            except FileNotFoundError as err:
                raise OSError(err.errno, f"save: {err.strerror}; the folder above must exist", folder) from err
    index = os.path.join(folder, INDEX)
    with locked(folder) as fd:
        old = _named_by(index, LocalFiles())
        if plan.render is not None:
            # Shards of a save that was killed take space.
            _sweep(folder, old, set())
        try:
            write_into(plan, folder, fsync=fsync, tick=tick)
        except BaseException:
            # The index may have been replaced before the error.
            if plan.names and not _named_by(index, LocalFiles()).intersection(plan.names):
                _sweep(folder, old, set(plan.names))
            raise
        if plan.render is not None:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, SINGLE))
            _sweep(folder, set(plan.names), old)
        elif os.path.lexists(index):
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


def _upload(plan: SavePlan, target: str, tick: Tick) -> None:
    """Upload all files, the index last; then remove those that readers would prefer or that no index names any more."""
    files = RemoteFiles(target, fetch=False)
    folder, _, name = target.rpartition("/") if plan.render is None else (target, "", "")
    old = _named_by(f"{folder}/{INDEX}", files) if plan.render is not None or name == SINGLE else set[str]()
    digests: list[str] = []
    for file, own in zip(plan.files, plan.names or [name], strict=True):
        files.replace(f"{folder}/{own}", lambda fd, file=file: digests.append(write_file(fd, file, tick)))
    if plan.render is not None:
        raw = plan.render(digests)
        files.replace(f"{folder}/{INDEX}", lambda fd: write_all(fd, memoryview(raw)))
        old.add(SINGLE)
    elif name == SINGLE:
        old.add(INDEX)
    for name in sorted(old):
        if files.exists(f"{folder}/{name}"):
            files.remove(f"{folder}/{name}")
