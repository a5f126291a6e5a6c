"""`Batcher`: single requests from any thread, run together in batches.

It owns the waiting, the order of answers and the isolation of failures. It does not interpret requests and results; a
wrapper submits one row of tokens at a time, and runs its engine on a list of them.
"""

import itertools
import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

from tdfunc.core.errors import ConcurrencyError, as_count, error

# How long the end of a program waits for the batch that runs, in seconds.
_LAST_BATCH_S = 10.0

Q = TypeVar("Q")
R = TypeVar("R")


class Batcher(Generic[Q, R]):
    """Answers requests from many threads by calling a function on batches of them, one batch at a time.

    A batch starts when `min_batch_size` requests of a group wait, or when one of them has waited for `timeout_s`. It
    contains all waiting requests of the group, oldest first, up to `max_batch_size`. A failed batch is split and run
    again, so that only a bad request fails, with its own error. `run` may therefore receive a request several times.

    `run` is called in a thread of the batcher, with torch's own defaults (for example, gradients are on). The thread
    ends with the batcher. When a program ends, waiting requests are cancelled, and the running batch has ten seconds. A
    copy, from pickle, `copy` or a fork, has the same function and options, and no requests.

    Args:
        run: The function from a list of requests to their results, in the same order.
        min_batch_size: The number of requests that a batch waits for.
        max_batch_size: The maximum number of requests in a batch; by default all waiting requests.
        timeout_s: The longest time that a request waits for others, in seconds.

    Raises:
        ValueError: The sizes or the timeout are out of range.

    Examples:
        >>> with Batcher(lambda rows: [sum(row) for row in rows], max_batch_size=8) as batcher:
        ...     futures = [batcher.submit([i, i]) for i in range(3)]
        >>> [future.result() for future in futures]
        [0, 2, 4]
    """

    def __init__(
        self,
        run: Callable[[list[Q]], Iterable[R]],
        *,
        min_batch_size: int = 1,
        max_batch_size: int | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        min_batch_size = as_count("Batcher: min_batch_size", min_batch_size)
        if max_batch_size is not None:
            max_batch_size = as_count("Batcher: max_batch_size", max_batch_size)
        if max_batch_size is not None and min_batch_size > max_batch_size:
            raise error(
                ValueError,
                "Batcher: min_batch_size is above max_batch_size, or below 1.",
                expected="1 <= min_batch_size <= max_batch_size",
                got=f"min_batch_size {min_batch_size}, max_batch_size {max_batch_size}",
            )
        if not timeout_s >= 0:
            raise error(ValueError, "Batcher: timeout_s must be 0 or more seconds.", got=timeout_s)
        self._run = run
        self._options = (min_batch_size, max_batch_size, timeout_s)
        self._closed = False
        self._start_empty()

    def submit(self, request: Q, *, group: Hashable = None) -> "Future[R]":
        """Return the future of a request's result.

        Args:
            request: An element of the list that `run` receives.
            group: The group; a batch contains only one group. Put options that hold for a complete call here.

        Raises:
            RuntimeError: The batcher is closed.
        """
        future: Future[R] = Future()
        queue = self._queue
        with queue.changed:
            if self._closed:
                raise RuntimeError("Batcher.submit: the batcher is closed.")
            # It may not have started: Ctrl-C comes between calls, and a system may have no more threads.
            if queue.thread is None or not queue.thread.is_alive():
                queue.thread = threading.Thread(target=_serve, args=(queue,), name="tdfunc-batcher", daemon=True)
                queue.thread.start()
            queue.put(_Entry(future, request, group, time.monotonic(), self))
        future.add_done_callback(queue.forget)
        return future

    def state(self) -> dict[str, Any]:
        """Return the current counts, and the options.

        `queue_size` counts the waiting requests; `pending_futures` also counts the requests of the running batch.
        """
        with self._queue.changed:
            waiting = len(self._queue.waiting)
            running = len(self._queue.running)
        return {
            "queue_size": waiting,
            "pending_futures": waiting + running,
            "processing": running > 0,
            "min_batch_size": self._options[0],
            "max_batch_size": self._options[1],
            "timeout_s": self._options[2],
        }

    def cleanup(self, *, flush: bool = False) -> "list[Future[R]]":
        """Empty the queue, and return the futures that were in it, all done, in the order of their submission.

        Args:
            flush: Run the requests now, and wait for them and for the running batch, whose futures are also returned.
                Otherwise cancel the requests.

        Raises:
            ConcurrencyError: `run` or a callback of a future flushes, so that it would wait for itself.
        """
        if not flush:
            return self._queue.cancel()
        self._check_flush("cleanup")
        futures = self._queue.hurry()
        wait(futures)
        return futures

    def close(self, *, flush: bool = False) -> "list[Future[R]]":
        """Refuse further requests, and return the futures of `cleanup`.

        Args:
            flush: As for `cleanup`.

        Raises:
            ConcurrencyError: As for `cleanup`; the batcher stays open.
        """
        if flush:
            self._check_flush("close")
        with self._queue.changed:
            self._closed = True
        futures = self.cleanup(flush=flush)
        self._queue.close()
        return futures

    def _check_flush(self, call: str) -> None:
        if threading.current_thread() is self._queue.thread:
            raise ConcurrencyError(
                f"Batcher.{call}: flush=True in the batcher's own thread would wait for itself.",
                expected="a call from outside of `run` and of the callbacks of futures",
                hint="use flush=False to cancel the waiting requests, or call it in another thread.",
            )

    def __enter__(self) -> "Batcher[Q, R]":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.close(flush=kind is None)

    def __getstate__(self) -> dict[str, Any]:
        return {"_run": self._run, "_options": self._options, "_closed": self._closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_empty()

    def _start_empty(self) -> None:
        """Begin without requests and without a thread."""
        self._made = _Queue(*self._options)
        weakref.finalize(self, _end, self._made)

    @property
    def _queue(self) -> "_Queue":
        """The queue of this process: in a child the thread is missing, and the lock may be held for ever."""
        if self._made.process != os.getpid():
            self._start_empty()
        return self._made


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A request that waits; it keeps its batcher alive."""

    future: "Future[Any]"
    request: Any
    group: Hashable
    arrived_s: float
    owner: "Batcher[Any, Any]"


class _Queue:
    """The requests that wait, oldest first; it has no reference to the batcher other than by them."""

    def __init__(self, min_size: int, max_size: int | None, timeout_s: float) -> None:
        self.min_size = min_size
        self.max_size = max_size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        # OrderedDicts, since the first key of a dict is slow to find after many others were removed before it.
        self.waiting: OrderedDict[Future[Any], _Entry] = OrderedDict()
        # The requests of each group, oldest first; and the groups with enough of them, as they came to have enough.
        self.groups: dict[Hashable, OrderedDict[Future[Any], _Entry]] = {}
        self.full: OrderedDict[Hashable, None] = OrderedDict()
        self.running: list[Future[Any]] = []
        self.hurried_s = -math.inf
        self.closed = False
        self.thread: threading.Thread | None = None
        self.process = os.getpid()

    def put(self, entry: _Entry) -> None:
        """Add a request."""
        with self.changed:
            members = self.groups.setdefault(entry.group, OrderedDict())
            members[entry.future] = entry
            self.waiting[entry.future] = entry
            if len(members) >= self.min_size:
                self.full[entry.group] = None
            self.changed.notify()

    def forget(self, future: "Future[Any]") -> None:
        """Remove the request of a future that was cancelled."""
        with self.changed:
            removed = self._pop(future)
        if removed:
            # Only then do `wait` and `as_completed` return.
            future.set_running_or_notify_cancel()

    def hurry(self) -> "list[Future[Any]]":
        """Make all that wait due at once; return their futures, after those that run."""
        with self.changed:
            self.hurried_s = time.monotonic()
            self.changed.notify()
            return [*self.running, *self.waiting]

    def cancel(self) -> "list[Future[Any]]":
        """Cancel all that wait, and return their futures."""
        with self.changed:
            futures = list(self.waiting)
            self.waiting.clear()
            self.groups.clear()
            self.full.clear()
        for future in futures:
            future.cancel()
            future.set_running_or_notify_cancel()
        return futures

    def close(self) -> None:
        """End the thread, and cancel all that wait."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.cancel()

    def take(self) -> list[_Entry]:
        """Wait for a batch, and return its requests as running; none when the queue is closed."""
        with self.changed:
            self.running = []
            while not self.closed:
                entries = self._next_batch()
                self.running = [entry.future for entry in entries]
                if entries:
                    return entries
            return []

    def _next_batch(self) -> list[_Entry]:
        """Return the requests of a batch that may start; else wait for a change, and return none."""
        if not self.waiting:
            self.changed.wait()
            return []
        oldest = next(iter(self.waiting.values()))
        due_s = oldest.arrived_s + self.timeout_s
        if oldest.arrived_s <= self.hurried_s or due_s <= time.monotonic():
            return self._take_group(oldest.group)
        if self.full:
            return self._take_group(next(iter(self.full)))
        self.changed.wait(min(due_s - time.monotonic(), threading.TIMEOUT_MAX))
        return []

    def _take_group(self, group: Hashable) -> list[_Entry]:
        """Remove the oldest requests of a group, and return those that were not cancelled."""
        entries = list(itertools.islice(self.groups[group].values(), self.max_size))
        for entry in entries:
            self._pop(entry.future)
        return [entry for entry in entries if entry.future.set_running_or_notify_cancel()]

    def _pop(self, future: "Future[Any]") -> bool:
        """Remove a request, and return True if it waited."""
        entry = self.waiting.pop(future, None)
        if entry is None:
            return False
        members = self.groups[entry.group]
        del members[future]
        if len(members) < self.min_size:
            self.full.pop(entry.group, None)
        if not members:
            del self.groups[entry.group]
        return True


def _serve(queue: _Queue) -> None:
    """Answer the requests of a queue until it is closed."""
    while _serve_batch(queue):
        pass


def _serve_batch(queue: _Queue) -> bool:
    """Answer one batch; a separate function, so that no local variable keeps the batcher alive between batches."""
    entries = queue.take()
    if not entries:
        return False
    parts = [entries]
    while parts:
        part = parts.pop()
        outcome = _attempt(part[0].owner._run, [entry.request for entry in part])
        if not isinstance(outcome, BaseException):
            for entry, result in zip(part, outcome, strict=True):
                entry.future.set_result(result)
        elif len(part) == 1:
            part[0].future.set_exception(outcome)
        else:
            middle = len(part) // 2
            parts += [part[middle:], part[:middle]]
    return True


def _attempt(run: Callable[[list[Any]], Iterable[Any]], requests: list[Any]) -> list[Any] | BaseException:
    """Return the results of requests, or the error of their run."""
    expected = len(requests)
    try:
        results = list(run(requests))
        if len(results) != expected:
            raise error(
                ValueError,
                "Batcher: `run` did not return a result for each request.",
                expected=expected,
                got=len(results),
            )
    # The thread must outlive every error, SystemExit included.
    except BaseException as err:
        return err
    return results


def _end(queue: _Queue) -> None:
    """Close the queue of a batcher that is gone, or whose program ends: torch aborts one that ends inside its code."""
    if queue.process != os.getpid():
        return
    queue.close()
    thread = queue.thread
    if thread is not None and thread.is_alive() and thread is not threading.current_thread():
        thread.join(_LAST_BATCH_S)
