"""`AsyncSaver`: saves that continue while the program runs, in a bounded queue whose errors cannot get lost.

A tree does not change, so it is its own snapshot, unless the memory of a leaf is written to. Leaves that a module, an
optimizer or another process may write to are copied. Every other leaf must still have its earlier digest when it is
written. That digest is taken when the save is submitted. If only the tree refers to the memory, a thread that starts
then takes the digest. Until it is taken, the leaf's version and a word of every 16 kB must not change.
"""

import os
import pathlib
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain
from queue import SimpleQueue
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import xxhash
from torch import Tensor, nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import in_functorch, outside
from tdfunc.core.errors import ConcurrencyError, as_count, explain
from tdfunc.core.memory import mapped_file
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.types import Kind
from tdfunc.storage.disk.handlers import is_in_handler
from tdfunc.storage.disk.raw import memory_of
from tdfunc.storage.disk.remote import anchored, is_remote
from tdfunc.storage.safetensors.plan import is_plain
from tdfunc.storage.safetensors.save import check_target, save_outline
from tdfunc.storage.safetensors.write import changed_error, pieces
from tdfunc.storage.tree.encode import Outline, outline
from tdfunc.storage.tree.objects import as_tree, parts_of

if TYPE_CHECKING:
    from typing_extensions import Self

# A path, or the string of a URL. Any: callers that save to a folder of this machine need not exclude the string.
SavedPath: TypeAlias = pathlib.Path | Any
Write: TypeAlias = Callable[[], SavedPath]
# The kinds that a module writes to in its forward. A parameter is a new tensor after each functional update.
_LIVE_KINDS = (Kind.BUFFER, Kind.NON_PERSISTENT, Kind.EXTRA_STATE)
# Below this many bytes of large leaves starting threads costs more than they save.
_THREADS_FROM_BYTES = 16 << 20
_SMALL_BYTES = 1 << 16
_MAX_THREADS = 4
# More groups than threads, so that a thread that is done early takes another.
_GROUPS = 16
# Two pages, and a prime number, so that the words are not all in one column of a matrix.
_SAMPLE_WORDS = 2039
# A signal handler waits this long for a save that does not move, which the interrupted frame may hold up.
_PATIENCE_S = 0.5
_LOOK_S = 0.005


# -- snapshots --------------------------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """A tree as it was at one moment: its outline, with copies where needed, and the digests of all other leaves."""

    outline: Outline
    # The digests that were taken at that moment, and the digests that a thread takes.
    taken: dict[str, str]
    coming: "Future[dict[str, str]] | None" = None

    def digests(self) -> dict[str, str]:
        """Wait for the digests of all leaves that were not copied.

        Raises:
            ConcurrencyError: A leaf changed before its digest was taken.
        """
        if self.coming is None:
            return self.taken
        return self.taken | self.coming.result()


class _Private(NamedTuple):
    """A leaf that only the tree refers to, as it is at one moment."""

    name: str
    leaf: Tensor
    version: int
    sample: bytes

    def is_changed(self) -> bool:
        return self.leaf._version != self.version or _sample(self.leaf) != self.sample


def take_snapshot(td: TensorCollection, copy: bool | None) -> Snapshot:
    """Copy the leaves that may be written to (None), no leaves or all; take the digests of the others, or begin to."""
    outlined = outline(td)
    live = _live_ids(td)
    leaves = list(outlined.leaves)
    kept: list[tuple[str, Tensor]] = []
    private: list[_Private] = []
    # A signal handler may save in the middle of a transform, in which a copy would belong to the transform or trace.
    with torch.no_grad(), outside() if in_functorch() else nullcontext():
        for i, leaf in enumerate(leaves):
            if not leaf.is_cpu:
                continue
            if copy:
                leaves[i] = leaf.detach().clone()
                continue
            is_live = id(leaf) in live
            if not is_live and _is_private(leaf):
                private.append(_Private(outlined.names[i], leaf, leaf._version, _sample(leaf)))
            elif copy is None and (is_live or _is_live(leaf)):
                leaves[i] = leaf.detach().clone()
            else:
                kept.append((outlined.names[i], leaf))
        _fetch(leaves)
        taken = _digests(kept)
    coming = None
    if private:
        coming = _begin(partial(_digests_of_private, private))
    return Snapshot(outlined._replace(leaves=leaves), taken, coming)


def _fetch(leaves: list[Tensor]) -> None:
    """Replace leaves on other devices by private copies here; copies of leaves on GPUs are in pinned memory."""
    gpus = {leaf.device for leaf in leaves if leaf.is_cuda}
    for i, leaf in enumerate(leaves):
        if not leaf.is_cpu:
            copy = torch.empty_like(leaf, device="cpu", pin_memory=leaf.is_cuda, requires_grad=False)
            leaves[i] = copy.copy_(leaf.detach(), non_blocking=leaf.is_cuda)
    # All copies start before the first wait.
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()


def _live_ids(td: TensorCollection) -> set[int]:
    """Return the ids of leaves of kinds that a module may write to, and of leaves in plain objects."""
    live: set[int] = set()
    stack = [td]
    while stack:
        node = stack.pop()
        for key, value in node._data.items():
            if isinstance(value, TensorCollection):
                stack.append(value)
                continue
            is_data = isinstance(value, NonTensorData)
            if node._kinds and node._kinds.get(key) in _LIVE_KINDS:
                live.add(id(value.data if is_data else value))
            elif isinstance(value, NonTensorBase) and not isinstance(value.value, Tensor):
                for part in parts_of(value.value):
                    if isinstance(part, TensorCollection):
                        stack.append(part)
                    else:
                        live.add(id(part))
    return live


def _is_live(leaf: Tensor) -> bool:
    """Return whether a leaf is a Parameter, which optimizers write to, or on a file that is mapped for writing."""
    if type(leaf) is nn.Parameter:
        return True
    file = mapped_file(leaf)
    return file is not None and file.mode == "r+"


def _is_private(leaf: Tensor) -> bool:
    """Return whether a large leaf is the only tensor on its memory, which torch allocated and numpy does not use."""
    if type(leaf) is not Tensor or leaf.nbytes <= _SMALL_BYTES:
        return False
    # A tensor that was made in inference mode has no version.
    if not is_plain(leaf) or leaf.is_inference():
        return False
    storage = leaf.untyped_storage()
    # The object `storage` is one reference. A DLPack capsule refers to the tensor; `numpy()` and memory of
    # another library make a storage that cannot be resized.
    # The stubs of torch lack `_use_count`.
    references: int = leaf._use_count()  # pyright: ignore[reportAttributeAccessIssue]
    is_alone = torch._C._storage_Use_Count(storage._cdata) == 2 and references == 1
    return is_alone and storage.resizable() and not storage.is_shared()


def _sample(leaf: Tensor) -> bytes:
    """Return a word of every 16 kB of a leaf."""
    return memory_of(leaf)[: leaf.nbytes & -8].cast("Q")[::_SAMPLE_WORDS].tobytes()


def _digests_of_private(leaves: Sequence[_Private]) -> dict[str, str]:
    # The caller continues first: it waits for this thread to start, and this thread has the interpreter's lock.
    time.sleep(0)
    found = _digests([(private.name, private.leaf) for private in leaves])
    changed = [private.name for private in leaves if private.is_changed()]
    if changed:
        raise changed_error(changed, expected="the values of that moment", got="other values")
    return found


def _begin(work: Callable[[], dict[str, str]]) -> "Future[dict[str, str]]":
    """Start a piece of work in a thread, or do it now if no thread can be started."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="tdfunc-digest")
    try:
        return pool.submit(work)
    except RuntimeError:
        # The interpreter is ending, or the system has no more threads.
        done: Future[dict[str, str]] = Future()
        done.set_result(work())
        return done


def _digests(leaves: Sequence[tuple[str, Tensor]]) -> dict[str, str]:
    # When the interpreter ends, no threads can be started.
    threads = 1
    if threading.main_thread().is_alive():
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
    large_bytes = sum([leaf.nbytes for _, leaf in leaves if leaf.nbytes > _SMALL_BYTES])
    if threads == 1 or large_bytes < _THREADS_FROM_BYTES:
        return {name: _digest(leaf) for name, leaf in leaves}
    groups = [leaves[i::_GROUPS] for i in range(_GROUPS)]
    try:
        with ThreadPoolExecutor(threads) as pool:
            return dict(chain.from_iterable(pool.map(_digests_of_group, groups)))
    except RuntimeError:
        # It has begun to end since.
        return {name: _digest(leaf) for name, leaf in leaves}


def _digests_of_group(leaves: Sequence[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    return [(name, _digest(leaf)) for name, leaf in leaves]


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
    """A save that may still run; its result is the written path, or the URL.

    It is a `concurrent.futures.Future`: `result()` waits and raises the error of the save, `done()` does not wait, and
    `cancel()` succeeds while the save waits for another save. `concurrent.futures.wait` takes several of them.
    """

    def __init__(self, path: SavedPath, write: Write | None = None, queue: "SaveQueue | None" = None) -> None:
        super().__init__()
        self._path = path
        # The remaining work until it begins. Until it has ended, also the queue, which shows lost errors when it ends.
        self._write = write
        self._queue = queue
        # True once `result` or `exception` has returned or raised.
        self._is_seen = False
        # True while a thread writes it.
        self._is_writing = False
        # The outcome. A signal handler reads it without the locks of `Future`, which the frame that it interrupted may
        # have. A save that was cancelled has ended and has not run.
        self._is_ended = False
        self._has_run = False
        self._error: BaseException | None = None
        # Given up when it ends. Unlike an event or a condition, it has no second lock inside.
        self._running = threading.Lock()
        self._running.acquire()
        self._process = os.getpid()

    def result(self, timeout: float | None = None) -> SavedPath:
        """Wait for the save and return its path, or the string of its URL.

        Args:
            timeout: The largest number of seconds to wait.

        Raises:
            OSError: Writing failed.
            ConcurrencyError: A leaf changed while it was saved, or a forked process waits for its parent's save, or
                a signal handler waits for a save that it has interrupted.
            TimeoutError: The save still runs.
            CancelledError: The save was cancelled.
        """
        err = self.exception(timeout)
        if err is not None:
            try:
                raise err
            finally:
                # The traceback refers to this frame.
                del err
        return self._path

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save and return its error, or None.

        Args:
            timeout: The largest number of seconds to wait.

        Raises:
            ConcurrencyError: A forked process waits for its parent's save, or a signal handler waits for a save that
                it has interrupted.
            TimeoutError: The save still runs.
            CancelledError: The save was cancelled.
        """
        if self._process != os.getpid() and not self.done():
            raise ConcurrencyError(
                f"save {self._path}: only the process that submitted a save can wait for it.",
                got="a forked process, in which the save does not run",
                hint="wait before os.fork(), or load the file once the parent has saved it.",
            )
        self._wait(timeout)
        if not self._has_run:
            # A TimeoutError or a CancelledError.
            return super().exception(0)
        self._is_seen = True
        return self._error

    def done(self) -> bool:
        """Return True if the save has ended or was cancelled."""
        return self._is_ended

    def cancel(self) -> bool:
        """Cancel the save if it has not begun; return True if it is cancelled."""
        is_cancelled = super().cancel()
        if is_cancelled:
            self._end()
        return is_cancelled

    def set_result(self, result: SavedPath) -> None:
        """End the save with the written path."""
        self._path = result
        self._has_run = True
        self._end()
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        """End the save with an error."""
        self._error = exception
        self._has_run = True
        self._end()
        super().set_exception(exception)

    def _wait(self, timeout_s: float | None) -> None:
        """Wait until the save has ended, or for a time."""
        if self._is_ended:
            return
        if is_in_handler(*_waiting()):
            _wait_in_handler([self], timeout_s)
            return
        # A lock's own sign of no limit.
        limit_s = -1.0
        if timeout_s is not None:
            limit_s = min(max(timeout_s, 0), threading.TIMEOUT_MAX)
        has_ended = self._running.acquire(timeout=limit_s)
        if has_ended:
            self._running.release()

    def _end(self) -> None:
        """Let those continue that wait for the save."""
        if not self._is_ended:
            self._is_ended = True
            self._running.release()


class SaveQueue:
    """A bounded number of saves, in order, in one thread; an interpreter that ends finishes them first."""

    def __init__(self, max_pending: int) -> None:
        self._max_pending = as_count("max_pending", max_pending)
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tdfunc-save")
        # A queue takes no lock of Python, as a semaphore does, so that a signal handler may interrupt it.
        self._places: SimpleQueue[None] = SimpleQueue()
        for _ in range(self._max_pending):
            self._places.put(None)
        # The saves that have not ended, and the saves that have ended since the last call.
        self._saves: list[PendingSave] = []
        weakref.finalize(self, _show_unseen, self._saves, self._process)

    def submit(self, path: SavedPath, prepare: Callable[[], Write], write_here: Write) -> PendingSave:
        """Wait for a place, prepare in this thread, and leave the rest to the background.

        A signal handler may have interrupted this thread in a call that has the place. It must not wait for the place,
        and calls `write_here` instead, which saves the tree as it is.
        """
        self.raise_failed()
        if is_in_handler(*_waiting()):
            save = PendingSave(path, write_here)
            _run(save)
            save.result()
            return save
        places = self._places
        held: list[None] = []

        def give_back(_: Any = None) -> None:
            with suppress(IndexError):
                held.pop()
                places.put(None)

        save = PendingSave(path, None, self)
        try:
            # One call of C code takes the place and notes it: Ctrl-C, which comes between calls, cannot lose it.
            held.extend(map(SimpleQueue.get, [places]))
            self.raise_failed()
            save._write = prepare()
            save.add_done_callback(give_back)
            self._saves.append(save)
            self._start_save(save)
        except BaseException:
            # A save that is running already ends by itself.
            if save.cancel():
                give_back()
            raise
        return save

    def _start_save(self, save: PendingSave) -> None:
        """Leave a save to the thread, or do it now if no thread can be started."""
        try:
            self._pool.submit(_run, save)
        except RuntimeError:
            # The interpreter is ending, or the system has no more threads.
            _run(save)

    def wait(self) -> None:
        """Wait until nothing is pending; raise the first error."""
        pending = self.pending
        if pending and is_in_handler(*_waiting()):
            _wait_in_handler(pending, None)
        for save in pending:
            save._wait(None)
        self.raise_failed()

    def raise_failed(self) -> None:
        """Raise the first error that no call has raised yet; the next calls raise the others."""
        ended = [save for save in self._own() if save.done()]
        for save in ended:
            try:
                self._saves.remove(save)
            except ValueError:
                # Another thread was here first.
                continue
            if save._has_run and not save._is_seen:
                save.result()

    @property
    def pending(self) -> list[PendingSave]:
        """The saves that have not ended."""
        return [save for save in self._own() if not save.done()]

    def _own(self) -> list[PendingSave]:
        """Return the saves of this process: a forked process has no thread, and its locks may be taken for ever."""
        if self._process != os.getpid():
            self._start()
        return self._saves


def _waiting() -> tuple[CodeType, ...]:
    """Return the functions that a signal handler may interrupt while they have a place or a lock."""
    return SaveQueue.submit.__code__, SaveQueue.wait.__code__


def _wait_in_handler(saves: Sequence[PendingSave], timeout_s: float | None) -> None:
    """Wait in a signal handler until saves have ended, as long as one of them is written."""
    start_s = moved_s = time.monotonic()
    while not all([save.done() for save in saves]):
        now_s = time.monotonic()
        if any([save._is_writing for save in saves]):
            moved_s = now_s
        if timeout_s is not None and now_s - start_s > timeout_s:
            return
        if now_s - moved_s > _PATIENCE_S:
            raise ConcurrencyError(
                f"save {saves[0]._path}: the signal handler interrupted the call that this save waits for.",
                got="a save that cannot continue before the handler has returned",
                hint="return from the handler, or exit: an interpreter that ends finishes its saves.",
            )
        time.sleep(_LOOK_S)


def _run(save: PendingSave) -> None:
    write = save._write
    save._write = None
    if write is not None and save.set_running_or_notify_cancel():
        try:
            save._is_writing = True
            try:
                path = write()
            finally:
                save._is_writing = False
        # Every error must reach the caller, and the next save its turn.
        except BaseException as err:
            # Before the place is given away: the leaves are memory that the next save may need.
            del write
            cause: BaseException | None = err
            while cause is not None:
                # The frames of a failed save refer to leaves.
                traceback.clear_frames(cause.__traceback__)
                cause = cause.__context__
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

    def wait(self) -> None:
        """Wait until all saves in the background have ended, and raise the error of the first one that failed.

        `concurrent.futures.wait` takes the handles, and a timeout.

        Raises:
            Exception: A save failed with this error, which no call has raised yet.
        """
        self._queue.wait()

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error that is on its way goes first; saves that failed are shown as a warning when the queue is gone.
        if kind is None:
            self.wait()


def _show_unseen(saves: list[PendingSave], process: int) -> None:
    """Warn of errors that no call has raised."""
    # The saves of a forked process stayed with its parent.
    if process != os.getpid():
        return
    shown: list[str] = []
    for save in saves:
        if not save.done() or save.cancelled() or save._is_seen:
            continue
        # Not the method of `save`, which would count the error as seen.
        err = Future.exception(save)
        if err is not None:
            shown.append(f"{save._path}: {err!r}")
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
    """Saves trees in the background: once `save` returns, the program cannot change the saved values.

    `save` copies the leaves that are likely to be written to before it returns: Parameters, the buffers of modules, and
    memmaps that can be written to. It does not copy other leaves, because trees do not change. If their memory is
    written to nevertheless (by an optimizer with `donate=True`), the save fails, the message names the leaf, and the
    old file stays. A digest detects such a write. The digest of a leaf is taken before the call returns if the leaf has
    at most 64 kB, or if other tensors, arrays of numpy, processes or mapped files use its memory.

    If only the tree uses the memory (of a result of an optimizer, of `jit`, of a tree operation), a thread that starts
    with the call takes the digest. Until then, for some milliseconds, the version that torch counts and a word of every
    16 kB detect a change. They do not detect a smaller change that torch does not count (through `.data` or numpy, in a
    leaf that was read from the tree in these milliseconds). `copy=True` excludes that.

    `result()` of the handle raises an error of the save, or else the next `save` or `wait`. If none of them is called,
    a warning names the file and the error, at the latest when the interpreter ends. An interpreter that ends normally
    finishes its saves first. A forked process starts without pending saves.

    Args:
        max_pending: The largest number of saves that wait or run. Another `save` waits for a place.

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
    ) -> PendingSave:
        """Save a tree like `tdfunc.save`, in the background.

        Args:
            td: The tree, or several trees, tensors and plain objects by name.
            path: The file, with the suffix `.safetensors`, or the folder for shards. The parent folder must exist.
            max_shard_size: The largest size of a shard, as in `tdfunc.save`.
            fsync: Wait (in the background) until the file is on the disk.
            copy: The leaves to copy before the call returns: all (True), none (False), or by default the leaves that
                are likely to be written to (above).

        Returns:
            A handle whose `result()` waits for the save and raises its error.

        Raises:
            ValueError: The file name has another suffix, or `max_shard_size` is not a size.
            UnsupportedError: A leaf or value cannot be stored unchanged; the message names it.
            Exception: An earlier save failed with this error, which no call has raised yet. Nothing was submitted.
        """
        target, max_bytes = check_target(path, max_shard_size)
        tree = as_tree(td, f"save {target}")
        target = anchored(target)
        # A path would make one slash of the two of a URL.
        name: SavedPath = target if is_remote(target) else pathlib.Path(target)

        def prepare() -> Write:
            snapshot = take_snapshot(tree, copy)
            return partial(_save_snapshot, snapshot, name, target, max_bytes, fsync)

        def write_here() -> SavedPath:
            snapshot = Snapshot(outline(tree), {})
            return _save_snapshot(snapshot, name, target, max_bytes, fsync)

        return self._queue.submit(name, prepare, write_here)

    def __repr__(self) -> str:
        return f"AsyncSaver({len(self._queue.pending)} pending)"


def _save_snapshot(snapshot: Snapshot, name: SavedPath, target: str, max_bytes: int | None, fsync: bool) -> SavedPath:
    try:
        save_outline(snapshot.outline, target, max_bytes, fsync=fsync, digests=snapshot.digests())
    except ConcurrencyError as err:
        raise ConcurrencyError(f"save {target}: {err}") from err
    return name
