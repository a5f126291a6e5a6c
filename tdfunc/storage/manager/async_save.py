"""Saving while the program goes on: leaves that nobody else can write to are not copied, but checked.

A tree does not change, so it is its own snapshot, unless somebody writes into the memory of a leaf. What is written
must have the digest that the leaf had when the save was submitted.
"""

import ctypes
import os
import pathlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import ConcurrencyError, error
from tdfunc.core.memory import mapped_file
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.shapes import as_count
from tdfunc.core.types import Kind
from tdfunc.storage.api import check_folder, check_target, outline_of, save_outline, save_sharded
from tdfunc.storage.disk.remote import anchored, is_remote
from tdfunc.storage.manager.background import PendingSave, SavedPath, SaveQueue, WaitMethods
from tdfunc.storage.safetensors.shards import as_bytes
from tdfunc.storage.safetensors.write import _SMALL_BYTES as SMALL_BYTES
from tdfunc.storage.safetensors.write import _is_plain as is_plain
from tdfunc.storage.safetensors.write import pieces
from tdfunc.storage.tree.encode import Outline

# What a module writes to in its forward. A parameter's kind says nothing: after an update the leaf is a new tensor.
_LIVE_KINDS = (Kind.BUFFER, Kind.NON_PERSISTENT, Kind.EXTRA_STATE)
# Below this many bytes starting threads costs more than they save.
_THREADS_FROM_BYTES = 16 << 20
_MAX_THREADS = 4
_GROUP_BYTES = 8 << 20


class Snapshot(NamedTuple):
    """A tree as it was at one moment: its outline, with copies where needed, and the digests of all other leaves."""

    outline: Outline
    digests: dict[str, str]


def take_snapshot(td: TensorCollection, copy: bool | None) -> Snapshot:
    """Copy the leaves that may be written to (None), none or all; take the digests of the others.

    Raises:
        UnsupportedError: The tree cannot be stored unchanged.
    """
    out = outline_of(td)
    live = _live_leaves(td) if copy is None else set[int]()
    leaves = list(out.leaves)
    kept: list[int] = []
    with torch.no_grad():
        for i, leaf in enumerate(leaves):
            if copy or id(leaf) in live or (copy is None and is_live(leaf)):
                leaves[i] = leaf.detach().clone()
            if leaf.is_cpu:
                if leaves[i] is leaf:
                    kept.append(i)
            else:
                # Its bytes have to come here anyway, and then they are private.
                leaves[i] = leaves[i].detach().cpu()
        digests = _digests([leaves[i] for i in kept])
    named = dict(zip([out.names[i] for i in kept], digests, strict=True))
    return Snapshot(out._replace(leaves=leaves), named)


def is_live(leaf: Tensor) -> bool:
    """Whether others are expected to write to a leaf: optimizers to Parameters, anybody to a file that is mapped."""
    if type(leaf) is nn.Parameter:
        return True
    file = mapped_file(leaf)
    return file is not None and file.mode == "r+"


def _live_leaves(td: TensorCollection) -> set[int]:
    """Return the ids of leaves whose kind says that a module may write to them."""
    live: set[int] = set()
    stack = [td]
    while stack:
        node = stack.pop()
        kinds = node._kinds
        for key, value in node._data.items():
            if isinstance(value, TensorCollection):
                stack.append(value)
            elif kinds and kinds.get(key) in _LIVE_KINDS:
                live.add(id(value.data if isinstance(value, NonTensorData) else value))
    return live


def _digests(leaves: Sequence[Tensor]) -> list[str]:
    sizes = [leaf.numel() * leaf.element_size() for leaf in leaves]
    # When the interpreter ends, no threads can be started.
    threads = min(_MAX_THREADS, os.cpu_count() or 1) if threading.main_thread().is_alive() else 1
    large = [i for i, size in enumerate(sizes) if size > SMALL_BYTES]
    if threads == 1 or sum([sizes[i] for i in large]) < _THREADS_FROM_BYTES:
        return _digest_each(leaves)
    digests = [""] * len(leaves)
    groups = _grouped(large, sizes)
    with ThreadPoolExecutor(threads) as pool:
        done = pool.map(lambda group: _digest_each([leaves[i] for i in group]), groups)
        # Small leaves keep the interpreter busy, so that more threads would only be in each other's way.
        small = [i for i, size in enumerate(sizes) if size <= SMALL_BYTES]
        for group, found in zip([small, *groups], [_digest_each([leaves[i] for i in small]), *done], strict=True):
            for i, digest in zip(group, found, strict=True):
                digests[i] = digest
    return digests


def _grouped(numbers: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Cut into runs of a few MB: enough for a thread to be worth it, and few enough to share evenly."""
    groups: list[list[int]] = []
    size = _GROUP_BYTES
    for i in numbers:
        if size >= _GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += sizes[i]
    return groups


def _digest_each(leaves: Sequence[Tensor]) -> list[str]:
    digests: list[str] = []
    buffer = np.empty(SMALL_BYTES, dtype=np.uint8)
    start, view, memmove, hexdigest = buffer.ctypes.data, buffer.data, ctypes.memmove, xxhash.xxh3_64_hexdigest
    with torch.no_grad():
        for leaf in leaves:
            size_bytes = leaf.numel() * leaf.element_size()
            if size_bytes <= SMALL_BYTES and is_plain(leaf):
                # A copy of so little costs less than describing its memory to Python.
                memmove(start, leaf.data_ptr(), size_bytes)
                digests.append(hexdigest(view[:size_bytes]))
                continue
            state = xxhash.xxh3_64()
            for piece in pieces(leaf):
                state.update(piece)
            digests.append(state.hexdigest())
    return digests


class AsyncSaver(WaitMethods):
    """Saves trees in the background: `save` returns once nothing that the program does can change what is saved.

    The caller is blocked for the digest of each leaf, and for copies of the leaves that are expected to be written to:
    Parameters, the buffers of modules, and memmaps that can be written to. No other leaf is copied: trees do not
    change. If somebody does write into the memory of a leaf (an optimizer with `donate=True`, say), the digest of
    what is written differs and the save fails, naming the leaf; the old file stays.

    An error is raised by `result()` of the handle, or else by the next `save` or `wait`; if there is none, a warning
    names the file and the error at the latest when the interpreter ends. An interpreter that ends normally finishes
    its saves first. A forked process starts with nothing pending.

    Args:
        max_pending: How many saves may be waiting or running. Another `save` waits for a place.

    Raises:
        ValueError: `max_pending` is less than 1.

    Examples:
        >>> import tempfile
        >>> params = TensorDict({"w": torch.zeros(3)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with tdf.AsyncSaver() as saver:
        ...         for i in range(3):
        ...             params = params + 1
        ...             handle = saver.save(params, folder + "/params.safetensors")
        ...     tdf.load(folder + "/params.safetensors")["w"], handle.done()
        (tensor([3., 3., 3.]), True)
    """

    def __init__(self, *, max_pending: int = 1) -> None:
        self._queue = SaveQueue(check_max_pending(max_pending))

    def save(
        self,
        td: TensorCollection,
        path: str | os.PathLike[str],
        *,
        max_shard_size: int | str | None = None,
        fsync: bool = True,
        copy: bool | None = None,
        timeout_s: float | None = None,
    ) -> PendingSave:
        """Save a tree as `tdfunc.save` does, in the background.

        Args:
            td: The tree.
            path: The file, which must end in `.safetensors`, or for shards the folder; what it is in must exist.
            max_shard_size: The most bytes of leaves in one shard, as in `tdfunc.save`.
            fsync: Wait (in the background) until the disk has the file.
            copy: True copies all leaves before the call returns, False none; without it those that are expected to be
                written to (above).
            timeout_s: How long to wait for a place if `max_pending` saves have not ended; 0 does not wait.

        Returns:
            A handle whose `result()` waits for the save and raises what went wrong.

        Raises:
            ValueError: The file name has another suffix, or the size of shards is none.
            UnsupportedError: A leaf or value cannot be stored unchanged; the message names it.
            TimeoutError: There was no place in time. Nothing was submitted.
            Exception: An earlier save failed and nobody was told; this is its error. Nothing was submitted.
        """
        max_bytes = as_bytes(max_shard_size) if max_shard_size is not None else None
        target = anchored(check_target(path) if max_bytes is None else check_folder(path))

        def prepare() -> "_FileWrite":
            return _FileWrite(take_snapshot(td, copy), target, max_bytes, fsync)

        return self._queue.submit(_named(target), prepare, timeout_s)

    def __repr__(self) -> str:
        return f"AsyncSaver({len(self._queue.pending)} pending)"


class _FileWrite(NamedTuple):
    """What is left to do when the tree was snapshotted."""

    snapshot: Snapshot
    target: str
    max_bytes: int | None
    fsync: bool

    def __call__(self) -> SavedPath:
        outline, digests = self.snapshot
        try:
            if self.max_bytes is None:
                save_outline(outline, self.target, fsync=self.fsync, digests=digests)
            else:
                save_sharded(outline, self.target, self.max_bytes, fsync=self.fsync, digests=digests)
        except ConcurrencyError as err:
            raise ConcurrencyError(f"save {self.target}: {err}") from err
        return _named(self.target)


def _named(target: str) -> SavedPath:
    # A path would make one slash of the two of a URL.
    return target if is_remote(target) else pathlib.Path(target)


def as_positive(value: Any) -> int | None:
    """Return a number of 1 or more as a plain int; None for anything else."""
    number = as_count(value)
    return number if type(number) is int and number >= 1 else None


def check_max_pending(max_pending: int) -> int:
    """Return how many saves a queue holds; raise for one that could hold nothing."""
    number = as_positive(max_pending)
    if number is None:
        raise error(ValueError, "max_pending is no number of saves.", expected="1 or more", got=repr(max_pending))
    return number
