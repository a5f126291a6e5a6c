"""`AsyncSaver`: saves that go on while the program does, in a bounded queue whose errors cannot get lost.

A tree does not change, so it is its own snapshot, unless the memory of a leaf is written to. Leaves that a module, an
optimizer or another process may write to are copied; every other one must have, when it is written, the digest that it
had before. That digest is taken when the save is submitted, or, where only the tree refers to the memory, in a thread
that starts then: until it is taken, the leaf's version and a word of every 8 kB must stay as they are.
"""

import os
import pathlib
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from threading import BoundedSemaphore, main_thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import xxhash
from torch import Tensor, nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import ConcurrencyError, error, explain
from tdfunc.core.memory import mapped_file
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.types import Kind
from tdfunc.storage.disk.raw import memory_of
from tdfunc.storage.disk.remote import anchored, is_remote
from tdfunc.storage.safetensors.plan import is_plain
from tdfunc.storage.safetensors.save import check_target, save_outline
from tdfunc.storage.safetensors.write import changed_error, pieces
from tdfunc.storage.tree.encode import Outline, outline
from tdfunc.storage.tree.objects import as_tree, parts_of

if TYPE_CHECKING:
    from typing_extensions import Self

# A path or, of a URL, its text. Any: saves to a folder of this machine need not rule out the text.
SavedPath: TypeAlias = pathlib.Path | Any
Write: TypeAlias = Callable[[], SavedPath]
# The name of a leaf, the leaf, its version and its sample.
_Private: TypeAlias = tuple[str, Tensor, int, bytes]
# The kinds that a module writes to in its forward. A parameter is a new tensor after each functional update.
_LIVE_KINDS = (Kind.BUFFER, Kind.NON_PERSISTENT, Kind.EXTRA_STATE)
# Below this many bytes of large leaves starting threads costs more than they save.
_THREADS_FROM_BYTES = 16 << 20
_SMALL_BYTES = 1 << 16
_MAX_THREADS = 4
# More than threads, so that one that is done early takes another.
_GROUPS = 16
# Of two pages, and prime, so that the words are not all of one column of a matrix.
_SAMPLE_WORDS = 1021


# -- snapshots --------------------------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """A tree as it was at one moment: its outline, with copies where needed, and the digests of all other leaves."""

    outline: Outline
    # Those that were taken at that moment, and those that a thread takes.
    taken: dict[str, str]
    coming: "Future[dict[str, str]] | None" = None

    def digests(self) -> dict[str, str]:
        """Wait for the digests of all leaves that were not copied.

        Raises:
            ConcurrencyError: A leaf changed before its digest was taken.
        """
        return self.taken if self.coming is None else self.taken | self.coming.result()


def take_snapshot(td: TensorCollection, copy: bool | None) -> Snapshot:
    """Copy the leaves that may be written to (None), none or all; take the digests of the others, or begin to."""
    out = outline(td)
    live, leaves = _live_ids(td), list(out.leaves)
    kept: list[tuple[str, Tensor]] = []
    alone: list[_Private] = []
    with torch.no_grad():
        for i, leaf in enumerate(leaves):
            if not leaf.is_cpu:
                continue
            if not copy and id(leaf) not in live and _is_private(leaf):
                alone.append((out.names[i], leaf, leaf._version, _sample(leaf)))
            elif copy or (copy is None and (id(leaf) in live or _is_live(leaf))):
                leaves[i] = leaf.detach().clone()
            else:
                kept.append((out.names[i], leaf))
        _fetch(leaves)
        named = _digests(kept)
    return Snapshot(out._replace(leaves=leaves), named, _begin(partial(_digests_of_private, alone)) if alone else None)


def _fetch(leaves: list[Tensor]) -> None:
    """Replace leaves on other devices by copies here, which are private; of leaves on GPUs in pinned memory."""
    gpus = {leaf.device for leaf in leaves if leaf.is_cuda}
    for i, leaf in enumerate(leaves):
        if not leaf.is_cpu:
            copy = torch.empty_like(leaf, device="cpu", pin_memory=leaf.is_cuda, requires_grad=False)
            leaves[i] = copy.copy_(leaf.detach(), non_blocking=leaf.is_cuda)
    # All copies are under way before the first is waited for.
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()


def _live_ids(td: TensorCollection) -> set[int]:
    """Return the ids of leaves of kinds that a module may write to, and of those in plain objects."""
    live: set[int] = set()
    stack = [td]
    while stack:
        node = stack.pop()
        for key, value in node._data.items():
            if isinstance(value, TensorCollection):
                stack.append(value)
            elif node._kinds and node._kinds.get(key) in _LIVE_KINDS:
                live.add(id(value.data if isinstance(value, NonTensorData) else value))
            elif isinstance(value, NonTensorData) and not isinstance(value.data, Tensor):
                for part in parts_of(value.data):
                    stack.append(part) if isinstance(part, TensorCollection) else live.add(id(part))
    return live


def _is_live(leaf: Tensor) -> bool:
    """Return whether it is a Parameter, which optimizers write to, or on a file that is mapped for writing."""
    return type(leaf) is nn.Parameter or ((file := mapped_file(leaf)) is not None and file.mode == "r+")


def _is_private(leaf: Tensor) -> bool:
    """Return whether a large leaf is the one tensor on its memory, which torch allocated and numpy has not seen."""
    if type(leaf) is not Tensor or leaf.nbytes <= _SMALL_BYTES or not is_plain(leaf) or leaf.is_inference():
        return False
    storage = leaf.untyped_storage()
    # One reference is that of the object `storage`. A DLPack capsule refers to the tensor; `numpy()` and memory that
    # another library gave make a storage that cannot be resized.
    # The stubs of torch lack `_use_count`.
    references: int = leaf._use_count()  # pyright: ignore[reportAttributeAccessIssue]
    counts = torch._C._storage_Use_Count(storage._cdata), references
    return counts == (2, 1) and storage.resizable() and not storage.is_shared()


def _sample(leaf: Tensor) -> bytes:
    """Return a word of every 8 kB of a leaf."""
    return memory_of(leaf)[: leaf.nbytes & -8].cast("Q")[::_SAMPLE_WORDS].tobytes()


def _digests_of_private(leaves: Sequence[_Private]) -> dict[str, str]:
    found = _digests([(name, leaf) for name, leaf, *_ in leaves])
    changed = [name for name, leaf, version, sample in leaves if leaf._version != version or _sample(leaf) != sample]
    if changed:
        raise changed_error(changed, expected="the values of that moment", got="other values")
    return found


def _begin(work: Callable[[], dict[str, str]]) -> "Future[dict[str, str]]":
    """Start a piece of work in a thread, or do it where none can be started."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="tdfunc-digest")
    try:
        return pool.submit(work)
    except RuntimeError:
        # The interpreter is ending, or the system is out of threads.
        done: Future[dict[str, str]] = Future()
        done.set_result(work())
        return done
    finally:
        pool.shutdown(wait=False)


def _digests(leaves: Sequence[tuple[str, Tensor]]) -> dict[str, str]:
    # When the interpreter ends, no threads can be started.
    threads = min(_MAX_THREADS, os.cpu_count() or 1) if main_thread().is_alive() else 1
    large_bytes = sum([leaf.nbytes for _, leaf in leaves if leaf.nbytes > _SMALL_BYTES])
    if threads == 1 or large_bytes < _THREADS_FROM_BYTES:
        return {name: _digest(leaf) for name, leaf in leaves}
    groups = [leaves[i::_GROUPS] for i in range(_GROUPS)]
    try:
        with ThreadPoolExecutor(threads) as pool:
            parts = pool.map(lambda group: [(name, _digest(leaf)) for name, leaf in group], groups)
            return dict(chain.from_iterable(parts))
    except RuntimeError:
        # It has begun to end since.
        return {name: _digest(leaf) for name, leaf in leaves}


def _digest(leaf: Tensor) -> str:
    if leaf.nbytes <= _SMALL_BYTES and is_plain(leaf):
        return xxhash.xxh3_64_hexdigest(memory_of(leaf))
    state = xxhash.xxh3_64()
    with torch.no_grad():
        for piece in pieces(leaf):
            state.update(piece)
    return state.hexdigest()


# -- the queue --------------------------------------------------------------------------------------------------


class PendingSave(Future[SavedPath]):
    """A save that may still run; its result is the path that was written, or the URL.

    A `concurrent.futures.Future`: `result()` waits and raises the error of the save, `done()` does not wait, `cancel()`
    succeeds while the save waits for another one, and `concurrent.futures.wait` takes several.
    """

    def __init__(self, path: SavedPath, write: Write | None = None, queue: "SaveQueue | None" = None) -> None:
        super().__init__()
        self._path = path
        # The rest of the work until it begins, and the queue, which shows lost errors when it goes, until it has ended.
        self._write, self._queue = write, queue
        # True once `result` or `exception` has returned or raised.
        self._is_seen = False
        self._process = os.getpid()

    def result(self, timeout: float | None = None) -> SavedPath:
        """Wait for the save and return its path (of a URL, the text).

        Args:
            timeout: Seconds to wait at most.

        Raises:
            OSError: The file system refused.
            ConcurrencyError: A leaf changed while it was saved; or a forked process waits for its parent's save.
            TimeoutError: The save still runs.
            CancelledError: The save was cancelled.
        """
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save and return its error, or None.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            ConcurrencyError: A forked process waits for its parent's save.
            TimeoutError: The save still runs.
            CancelledError: The save was cancelled.
        """
        if self._process != os.getpid() and not self.done():
            raise ConcurrencyError(
                f"save {self._path}: only the process that submitted a save can wait for it.",
                got="a forked process, in which the save does not run",
                hint="wait before os.fork(), or load the file once the parent has saved it.",
            )
        found = super().exception(timeout)
        self._is_seen = True
        return found


class SaveQueue:
    """At most so many saves at a time, in order, in one thread; an interpreter that ends finishes them first."""

    def __init__(self, max_pending: int) -> None:
        if max_pending < 1:
            raise error(ValueError, "max_pending must be 1 or more.", got=repr(max_pending))
        self._max_pending = max_pending
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tdfunc-save")
        self._places = BoundedSemaphore(self._max_pending)
        # Those that have not ended, and those that have since the last call.
        self._saves: list[PendingSave] = []
        weakref.finalize(self, _show_unseen, self._saves, self._process)

    def submit(self, path: SavedPath, prepare: Callable[[], Write], timeout_s: float | None = None) -> PendingSave:
        """Wait for a place, prepare in this thread, and leave the rest to the background."""
        self.raise_failed()
        places = self._places
        if not places.acquire(timeout=timeout_s):
            raise error(
                TimeoutError,
                f"save {path}: earlier saves are still running; nothing was submitted.",
                expected=f"a free place of {self._max_pending} within {timeout_s} s",
                got=_names(self.pending) or "a save that is being submitted",
                hint="save less often, or raise max_pending, which costs memory.",
            )
        try:
            self.raise_failed()
            save = PendingSave(path, prepare(), self)
        except BaseException:
            places.release()
            raise
        save.add_done_callback(lambda _: places.release())
        self._saves.append(save)
        try:
            self._pool.submit(_run, save)
        except RuntimeError:
            # The interpreter is ending, or the system is out of threads.
            _run(save)
        return save

    def wait(self, timeout_s: float | None) -> None:
        """Wait until nothing is pending; raise the first error."""
        pending = self.pending
        futures.wait(pending, timeout_s)
        if not all(save.done() for save in pending):
            raise error(
                TimeoutError, "wait: saves are still running.", expected=f"{timeout_s} s", got=_names(self.pending)
            )
        self.raise_failed()

    def raise_failed(self) -> None:
        """Raise the first error that no call has raised yet; those after it follow at the next calls."""
        for save in [save for save in self._own() if save.done()]:
            try:
                self._saves.remove(save)
            except ValueError:
                # Another thread was here first.
                continue
            if not save._is_seen and not save.cancelled():
                save.result()

    @property
    def pending(self) -> list[PendingSave]:
        """The saves that have not ended."""
        return [save for save in self._own() if not save.done()]

    def _own(self) -> list[PendingSave]:
        """Return the saves of this process: a forked one has no thread, and locks that may be taken for ever."""
        if self._process != os.getpid():
            self._start()
        return self._saves


def _run(save: PendingSave) -> None:
    write, save._write = save._write, None
    if write is not None and save.set_running_or_notify_cancel():
        try:
            path = write()
        # Every error must reach the caller, and the next save its turn.
        except BaseException as err:
            # Before the place is given away: the leaves are memory that the next save may need.
            del write
            cause: BaseException | None = err
            while cause is not None:
                # The frames of a failed save refer to leaves.
                traceback.clear_frames(cause.__traceback__)
                cause = cause.__cause__ or cause.__context__
            save.set_exception(err)
        else:
            del write
            save.set_result(path)
    save._queue = None


class WaitMethods:
    """The methods of an owner of a queue of saves, which can be used in a `with` statement."""

    __slots__ = ()
    if TYPE_CHECKING:
        _queue: SaveQueue

    def wait(self, *, timeout_s: float | None = None) -> None:
        """Wait until all saves in the background have ended, and raise the error of the first one that failed.

        Args:
            timeout_s: How long to wait at most.

        Raises:
            TimeoutError: Saves are still running.
            Exception: The error of a save that no call has raised yet.
        """
        self._queue.wait(timeout_s)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error that is on its way goes first; saves that failed are shown as a warning when the queue is gone.
        if kind is None:
            self.wait()


def _names(saves: Sequence[PendingSave]) -> str:
    return ", ".join(str(save._path) for save in saves)


def _show_unseen(saves: list[PendingSave], process: int) -> None:
    # The saves of a forked process stayed with its parent.
    ended = [save for save in saves if process == os.getpid() and save.done() and not save.cancelled()]
    unseen = [save for save in ended if not save._is_seen]
    shown = [f"{save._path}: {error!r}" for save in unseen if (error := Future.exception(save)) is not None]
    if shown:
        # One warning: where warnings are errors, a second one would not be reached.
        warnings.warn(
            explain(
                f"{len(shown)} save(s) in the background failed, and no call raised it.",
                got="\n".join(shown),
                hint="call .result() of the handle that save returns, or .wait() at the end.",
            ),
            RuntimeWarning,
            stacklevel=2,
        )


class AsyncSaver(WaitMethods):
    """Saves trees in the background: once `save` returns, nothing that the program does changes the saved values.

    Copied before the call returns are the leaves that are expected to be written to: Parameters, the buffers of
    modules, and memmaps that can be written to. No other leaf is copied: trees do not change. If the memory of a leaf
    is written to all the same (by an optimizer with `donate=True`), the save fails, naming the leaf; the old file
    stays. A digest shows it, which is taken before the call returns where other tensors, arrays of numpy, processes or
    mapped files use the memory of the leaf, and where the leaf has at most 64 kB.

    The digest of a leaf whose memory is used by nothing but the tree (the result of an optimizer, of `jit`, of a tree
    operation) is taken by a thread that starts with the call. Until then, milliseconds later, a change is noticed by
    the version that torch counts and by a word of every 8 kB; a smaller change that torch does not count (through
    `.data` or numpy, of a leaf read from the tree in these milliseconds) is not. `copy=True` rules that out.

    An error is raised by `result()` of the handle, or else by the next `save` or `wait`; if there is none, a warning
    names the file and the error at the latest when the interpreter ends. An interpreter that ends normally finishes
    its saves first. A forked process starts with nothing pending.

    Args:
        max_pending: How many saves may be waiting or running. Another `save` waits for a place.

    Raises:
        ValueError: `max_pending` is below 1.

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
        self._queue = SaveQueue(max_pending)

    def save(
        self,
        td: TensorCollection | Mapping[str, Any],
        path: str | os.PathLike[str],
        *,
        max_shard_size: int | str | None = None,
        fsync: bool = True,
        copy: bool | None = None,
        timeout_s: float | None = None,
    ) -> PendingSave:
        """Save a tree as `tdfunc.save` does, in the background.

        Args:
            td: The tree, or several trees, tensors and plain objects by name.
            path: The file, which must end in `.safetensors`, or for shards the folder; the folder around it must
                exist.
            max_shard_size: The most bytes of leaves in one shard, as in `tdfunc.save`.
            fsync: Wait (in the background) until the disk has the file.
            copy: True copies all leaves before the call returns, False none; without it those that are expected to be
                written to (above).
            timeout_s: How long to wait for a place if `max_pending` saves have not ended; 0 does not wait.

        Returns:
            A handle whose `result()` waits for the save and raises its error.

        Raises:
            ValueError: The file name has another suffix, or `max_shard_size` is not a size.
            UnsupportedError: A leaf or value cannot be stored unchanged; the message names it.
            TimeoutError: No place was free in time. Nothing was submitted.
            Exception: The error of an earlier save, which no call has raised yet. Nothing was submitted.
        """
        target, max_bytes = check_target(path, max_shard_size)
        target, tree = anchored(target), as_tree(td, f"save {target}")
        # A path would make one slash of the two of a URL.
        name: SavedPath = target if is_remote(target) else pathlib.Path(target)

        def prepare() -> Write:
            return partial(_save_snapshot, take_snapshot(tree, copy), name, target, max_bytes, fsync)

        return self._queue.submit(name, prepare, timeout_s)

    def __repr__(self) -> str:
        return f"AsyncSaver({len(self._queue.pending)} pending)"


def _save_snapshot(snapshot: Snapshot, name: SavedPath, target: str, max_bytes: int | None, fsync: bool) -> SavedPath:
    try:
        save_outline(snapshot.outline, target, max_bytes, fsync=fsync, digests=snapshot.digests())
    except ConcurrencyError as err:
        raise ConcurrencyError(f"save {target}: {err}") from err
    return name
