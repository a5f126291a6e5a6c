"""Saves that run in a thread of their own: a bounded queue, handles, and errors that cannot get lost."""

import os
import pathlib
import threading
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tdfunc.core.errors import ConcurrencyError, error, explain

if TYPE_CHECKING:
    from typing_extensions import Self

# A path or, of a URL, its text. Any: whoever saves to a folder of this machine need not rule out the text.
SavedPath: TypeAlias = pathlib.Path | Any
# What a caller's thread prepares (and is blocked for), and what it leaves to the background.
Write: TypeAlias = Callable[[], SavedPath]
Prepare: TypeAlias = Callable[[], Write]


class PendingSave(Future[SavedPath]):
    """A save that may still run; its result is the path that was written, or the URL.

    A `concurrent.futures.Future`: `result()` waits and raises what went wrong, `done()` does not wait, `cancel()`
    succeeds while the save waits for another one, and `concurrent.futures.wait` takes several.
    """

    def __init__(self, path: SavedPath) -> None:
        super().__init__()
        self._path = path
        self._process = os.getpid()
        # Whether anybody was told that it failed.
        self._is_seen = False

    def result(self, timeout: float | None = None) -> SavedPath:
        """Wait for the save and return its path (of a URL, the text).

        Args:
            timeout: Seconds to wait at most.

        Raises:
            OSError: The file system refused.
            ConcurrencyError: A leaf changed while it was saved, or this is a forked process, which has no part in
                the save.
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
            ConcurrencyError: This is a forked process, which has no part in the save.
            TimeoutError: The save still runs.
            CancelledError: The save was cancelled.
        """
        if self._process != os.getpid() and not self.done():
            raise ConcurrencyError(
                f"save {self._path}: the save runs in another process.",
                expected=f"process {self._process}, which submitted it",
                got=f"process {os.getpid()}, forked from it",
                hint="wait for the save before the fork, or in the parent.",
            )
        error = super().exception(timeout)
        self._is_seen = True
        return error


class _Job(NamedTuple):
    save: PendingSave
    write: Write


class _State:
    """What the queue and its thread share. When both are gone, errors that nobody saw are shown."""

    def __init__(self) -> None:
        self.process = os.getpid()
        # Taken as itself: Ctrl-C inside of Condition.__enter__, which is Python, would leave it locked.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        # Waiting or running, and those of callers who still prepare.
        self.open: list[PendingSave] = []
        self.promised: list[PendingSave] = []
        self.jobs: deque[_Job] = deque()
        self.is_running = False
        self.failed: list[PendingSave] = []
        weakref.finalize(self, _show_unseen, self.failed, self.process)


class SaveQueue:
    """At most so many saves at a time, in order, in one thread that lives while there is work.

    The thread is no daemon: an interpreter that ends normally finishes the saves first.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._state = _State()

    def submit(self, path: SavedPath, prepare: Prepare, timeout_s: float | None) -> PendingSave:
        """Wait for a place, prepare in this thread, and leave the rest to the background."""
        state = self._own()
        self.raise_failed()
        save = PendingSave(path)
        # Ctrl-C comes between any two lines: whatever was done of this is taken back, unless the save runs already.
        try:
            self._take_place(state, save, timeout_s)
            self.raise_failed()
            self._enqueue(state, _Job(save, prepare()))
        except BaseException:
            _withdraw(state, save)
            raise
        return save

    def wait(self, timeout_s: float | None) -> None:
        """Wait until nothing is pending; raise what failed."""
        state = self._own()
        with state.lock:
            if not state.changed.wait_for(lambda: not state.open, timeout_s):
                raise error(
                    TimeoutError,
                    "wait: saves are still running.",
                    expected=f"{timeout_s} s",
                    got=", ".join(str(save._path) for save in state.open),
                )
        self.raise_failed()

    def raise_failed(self) -> None:
        """Raise the first error that nobody was told of; those after it follow at the next calls."""
        state = self._own()
        for save in list(state.failed):
            with state.lock:
                if save in state.failed:
                    state.failed.remove(save)
            if not save._is_seen:
                save.result()

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """The saves that have not ended."""
        return tuple(self._own().open)

    def _enqueue(self, state: _State, job: _Job) -> None:
        with state.lock:
            state.open.append(job.save)
            state.jobs.append(job)
            state.promised.remove(job.save)
            start = not state.is_running
        if not threading.main_thread().is_alive():
            # The interpreter is ending: a thread that starts now would be cut off.
            _work(state)
        elif start:
            threading.Thread(target=_work_alone, args=(state,), name="tdfunc-save").start()

    def _own(self) -> _State:
        # The thread and the pending saves of a forked process stayed with its parent, locks maybe taken.
        if self._state.process != os.getpid():
            self._state = _State()
        return self._state

    def _take_place(self, state: _State, save: PendingSave, timeout_s: float | None) -> None:
        end = None if timeout_s is None else monotonic() + timeout_s
        with state.lock:
            while len(state.open) + len(state.promised) >= self._max_pending:
                left = None if end is None else end - monotonic()
                if left is not None and left <= 0:
                    raise error(
                        TimeoutError,
                        f"save {save._path}: earlier saves are still running; nothing was submitted.",
                        expected=f"a free place of {self._max_pending} within {timeout_s} s",
                        got=", ".join(str(save._path) for save in state.open) or "a save that is being submitted",
                        hint="save less often, or raise max_pending, which costs memory.",
                    )
                state.changed.wait(left)
            state.promised.append(save)


class WaitMethods:
    """What has a queue of saves can be waited for, and be used in a `with` statement."""

    __slots__ = ()
    if TYPE_CHECKING:
        _queue: SaveQueue

    def wait(self, *, timeout_s: float | None = None) -> None:
        """Wait until all saves in the background have ended, and raise the error of the first one that failed.

        Args:
            timeout_s: How long to wait at most.

        Raises:
            TimeoutError: Saves are still running.
            Exception: What a save raised that nobody was told of.
        """
        self._queue.wait(timeout_s)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        # The error that is on its way goes first; saves that failed are shown as a warning when the queue is gone.


def finished(path: pathlib.Path) -> PendingSave:
    """Return the handle of a save that has happened."""
    save = PendingSave(path)
    save.set_result(path)
    return save


def _withdraw(state: _State, save: PendingSave) -> None:
    """Forget a save that was not submitted, or not as a whole; one that a thread has taken goes on."""
    with state.lock:
        waits = [job for job in state.jobs if job.save is save]
        if waits or save in state.promised:
            state.jobs = deque([job for job in state.jobs if job.save is not save])
            state.open, state.promised = [[s for s in held if s is not save] for held in (state.open, state.promised)]
        state.changed.notify_all()


def _claimed(state: _State) -> bool:
    """Whether this thread is the one that works: whoever started it may have been cut short, and not know."""
    with state.lock:
        first, state.is_running = not state.is_running, True
    return first


def _work_alone(state: _State) -> None:
    if _claimed(state):
        _work(state)
    # An error that somebody holds refers to this frame, too.
    del state


def _work(state: _State) -> None:
    while (job := _next_job(state)) is not None:
        if job.save.set_running_or_notify_cancel():
            path, error = _attempt(job.write)
        else:
            path, error = None, None
        save = job.save
        # Before the place is given away: what the save held is memory that the next one may need.
        del job
        _forget_locals(error)
        _finish(state, save, path, error)
        del save, error
    # An error that somebody holds refers to this frame.
    del state


def _next_job(state: _State) -> _Job | None:
    with state.lock:
        if state.jobs:
            return state.jobs.popleft()
        state.is_running = False
        return None


def _attempt(write: Write) -> tuple[SavedPath | None, BaseException | None]:
    try:
        return write(), None
    # Whatever it is, it must reach the caller, and the next save its turn.
    except BaseException as err:
        return None, err


def _finish(state: _State, save: PendingSave, path: SavedPath | None, error: BaseException | None) -> None:
    with state.lock:
        if error is not None:
            state.failed.append(save)
    if error is not None:
        save.set_exception(error)
    elif path is not None:
        save.set_result(path)
    with state.lock:
        state.open.remove(save)
        state.changed.notify_all()


def _forget_locals(error: BaseException | None) -> None:
    """Let go of the leaves that the frames of a failed save refer to."""
    for _ in range(20):
        if error is None:
            return
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _show_unseen(failed: list[PendingSave], process: int) -> None:
    unseen = [save for save in failed if not save._is_seen]
    if unseen and process == os.getpid():
        # One warning: where warnings are errors, a second one would not be reached.
        shown = "\n".join(f"{save._path}: {error!r}" for save in unseen if (error := Future.exception(save)))
        warnings.warn(
            explain(
                f"{len(unseen)} save(s) in the background failed, and nobody looked.",
                got=shown,
                hint="call .result() on what save returned, or .wait() at the end.",
            ),
            RuntimeWarning,
            stacklevel=2,
        )
