"""`WorkerPool`: processes that each wait on a pipe of their own, so that it is known what a dead one was doing.

A thread of the parent serves each process: it takes a task, sends it and waits for the answer or for the end of the
process. Workers start with one torch thread, ignore Ctrl-C (the parent ends them) and end when the parent does.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from multiprocessing import connection, forkserver, resource_tracker, util
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tdfunc.core.errors import WorkerError, error
from tdfunc.core.shapes import as_count
from tdfunc.parallel.transfer import (
    Message,
    from_parcel,
    pack,
    receive,
    send,
    sending_chunk,
    sending_result,
    to_parcel,
    unpack,
)

# The second lets the interrupts in that `_preload` keeps out.
_PRELOAD = ["tdfunc.parallel.pool", "tdfunc.parallel.preloaded"]
_READY = b"ready"
# How long a process may take to end when it is told to, before it is killed.
_GRACE_S = 2.0
# Sentinels and pipes tell of an end at once but where another process holds copies of them (fork).
_LOOK_S = 1.0
# How often, and after how long, a fork server that has ended is asked again, which starts a new one.
_REFUSALS, _RETRY_S = 40, 0.05
# The fork servers that have started a process.
_proven: set[int | None] = set()
# A process that forks while another thread has the child's end of a pipe open would keep that pipe alive.
_starting = threading.Lock()


class Failure(NamedTuple):
    """What a function raised in another process: the pickled exception, if it can be read back, and its traceback."""

    error: bytes | None
    name: str
    text: str


class WorkerTraceback(Exception):
    """The text of a traceback in another process; the cause of the exception that came from there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def failure_of(err: BaseException, dumps: Callable[[Any], bytes] = pickle.dumps) -> Failure:
    """Return an exception in a form that crosses processes."""
    text = "".join(traceback.format_exception(type(err), err, err.__traceback__))
    data = None
    # SystemExit and KeyboardInterrupt would end the parent.
    if isinstance(err, Exception):
        try:
            data = dumps(err)
            pickle.loads(data)
        except Exception:
            data = None
    return Failure(data, f"{type(err).__name__}: {err}", text)


def error_of(failure: Failure, where: str) -> Exception:
    """Return the exception that a failure stands for, with its traceback as cause."""
    if failure.error is not None:
        err = pickle.loads(failure.error)
    else:
        expected = "an Exception that pickle can copy"
        err = WorkerError(f"map: the function failed {where}.", expected=expected, got=failure.name)
    err.__cause__ = WorkerTraceback(f"{where}\n{failure.text}")
    return err


class DiedError(WorkerError):
    """A worker that ended while it had a task."""

    def __init__(self, reason: str) -> None:
        super().__init__("a worker died during its task.", expected="a result", got=reason)
        self.reason = reason


class Call(NamedTuple):
    """A function with its arguments, for one worker."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# -- in the worker ----------------------------------------------------------------------------------------------


def serve(pipe: Any, threads: int, shared: Any, parent_end: Any) -> None:
    """Run tasks until the pipe closes: the main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent_end is not None:
        parent_end.close()
        _forget_parent()
    # Before anything else: in a forked process OpenMP's threads are gone, and waiting for them would hang.
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pipe.send_bytes(_READY)
    while True:
        try:
            received = receive(pipe)
        except (EOFError, OSError):
            return
        shared, answer = _answer(received, shared)
        if answer is None:
            return
        try:
            send(pipe, answer)
        except OSError:
            return
        # Not kept while waiting for the next task.
        received = answer = None


def _forget_parent() -> None:
    """Make a forked process able to have workers of its own."""
    global _starting
    # The thread that forked held it, and does not exist here.
    _starting = threading.Lock()
    # It is no child of this process, which multiprocessing would wait for in vain.
    server: Any = forkserver._forkserver
    server.__init__()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _answer(received: Any, shared: Any) -> tuple[Any, Message | None]:
    """Run one task; what the function raises, or returns and cannot be sent, is answered as a failure."""
    result: Any = None
    try:
        kind, *rest = unpack(received)
        if kind == "end":
            return None, None
        if kind == "run":
            result = shared(*rest)
        else:
            origin, parcel = rest
            _ensure_module(*origin)
            value = from_parcel(parcel)
            if kind == "share":
                shared = value
            else:
                result = value.fn(*value.args, **value.kwargs)
        with sending_result():
            return shared, pack((result, None))
    except BaseException as err:
        return shared, pack((None, failure_of(err)))


def origin_of(fn: Any) -> tuple[str, str | None]:
    """Return the module of a function and its file, for a process whose path does not lead there."""
    while hasattr(fn, "func"):
        fn = fn.func
    name = getattr(fn, "__module__", None) or ""
    return name, getattr(sys.modules.get(name), "__file__", None)


def _ensure_module(name: str, file: str | None) -> None:
    """Import a module from its file where its name is not found (pytest imports test files so)."""
    if name in sys.modules or name in ("", "__main__") or file is None:
        return
    try:
        found = find_spec(name)
    except (ImportError, ValueError):
        found = None
    spec = spec_from_file_location(name, file) if found is None else None
    if spec is not None and spec.loader is not None:
        # Pickle looks a dotted name up through the first of its packages.
        first = name.partition(".")[0]
        if first != name and first not in sys.modules:
            sys.modules[first] = ModuleType(first)
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)


# -- in the parent ----------------------------------------------------------------------------------------------


class _Worker:
    """One process, and this end of its pipe."""

    def __init__(self, method: str, threads: int, shared: Any) -> None:
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            _preload(context)
        self.pid: int | None = None
        self.tasks = 0
        self._shared = shared
        with _starting:
            self._pipe, theirs = context.Pipe()
            forked = (shared, self._pipe) if method == "fork" else (None, None)
            self._process = context.Process(target=serve, args=(theirs, threads, *forked), name="tdfunc-worker")
            try:
                _start(self._process)
            # The fork server ends when the main module, which it imports, raises.
            except (EOFError, OSError) as err:
                self._pipe.close()
                raise _not_started(f"{type(err).__name__}: {err}") from err
            finally:
                theirs.close()
        if method != "fork":
            self._shared = None
        try:
            self._wait()
            self._pipe.recv_bytes()
        except (EOFError, OSError) as err:
            raise _not_started(self._reason()) from err

    def run(self, shared: Any, task: Any) -> Any:
        """Return what the worker makes of a task, as a pair of a result and a failure."""
        if shared is None:
            return self._ask(("call", origin_of(task.fn), to_parcel(task)))
        if shared is not self._shared:
            _, failure = self._ask(("share", origin_of(shared.fn), to_parcel(shared)))
            if failure is not None:
                hint = "a function of a notebook needs mp_start_method='fork' or executor='threads', or a module."
                what = "map: the function cannot be loaded in a worker."
                expected = "one that it can import"
                err = WorkerError(what, expected=expected, got=failure.name, hint=hint)
                raise err from WorkerTraceback(failure.text)
            self._shared = shared
        self.tasks += 1
        return self._ask(("run", *task))

    def _ask(self, message: Any) -> Any:
        with sending_chunk():
            packed = pack(message)
        try:
            send(self._pipe, packed)
            del packed
            self._wait()
            received = receive(self._pipe)
        except (EOFError, OSError) as err:
            raise DiedError(self._reason()) from err
        return unpack(received)

    def _wait(self) -> None:
        """Wait until there is something to read; raise if the process ends before."""
        while self._pipe not in connection.wait([self._pipe, self._process.sentinel], _LOOK_S):
            if not self._process.is_alive() and not self._pipe.poll():
                raise EOFError

    def _reason(self) -> str:
        """Return how the process ended."""
        self.end(kill=False)
        code = self._process.exitcode
        if code is None:
            return "its pipe broke"
        if code >= 0:
            return f"it ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "unknown"
        return f"it was killed by signal {-code} ({name})"

    def end(self, *, kill: bool) -> None:
        """End the process and wait for it: after its task, or at once."""
        if not kill:
            with suppress(OSError):
                send(self._pipe, pack(("end",)))
        else:
            self._process.terminate()
        self._process.join(_GRACE_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def terminate(self) -> None:
        """Tell the process to end at once; the thread that serves it does the rest."""
        self._process.terminate()


def _not_started(got: str) -> WorkerError:
    return WorkerError(
        "map: a worker could not start.",
        expected="a process",
        got=got,
        hint="a script calls map under `if __name__ == '__main__':`, since workers import it.",
    )


def _start(process: Any) -> None:
    server: Any = forkserver._forkserver
    for _ in range(_REFUSALS):
        asked = server._forkserver_pid
        try:
            process.start()
            _proven.add(server._forkserver_pid)
            return
        # The fork server has just ended; it is started again when the system has noticed.
        except ConnectionRefusedError:
            time.sleep(_RETRY_S)
        except (EOFError, ConnectionError):
            # Others end at once, by an error in what they import.
            if asked not in _proven:
                raise
            _proven.discard(asked)
    process.start()


def _preload(context: Any) -> None:
    """Have the fork server import torch once, so that each of its processes starts in milliseconds."""
    server: Any = forkserver._forkserver
    wanted = list(server._preload_modules)
    if not set(_PRELOAD) <= set(wanted):
        context.set_forkserver_preload([*wanted, *_PRELOAD])
    # It unblocks signals where it starts a process.
    resource_tracker.ensure_running()
    # A Ctrl-C goes to all processes of a terminal. The server ignores it, but not yet while it imports torch.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Item(NamedTuple):
    """A task that waits for a worker, and where its result goes."""

    future: "Future[Any]"
    shared: Any
    task: Any


class _Crew:
    """What the threads of a pool share; the pool itself is not among it, so that a dropped pool ends."""

    def __init__(self, method: str, threads: int, most_tasks: int | None, shared: Any) -> None:
        self.queue: SimpleQueue[_Item | None] = SimpleQueue()
        self.killed = False
        # Reentrant: the garbage collector may end a pool while a thread holds it.
        self._lock = threading.RLock()
        self._workers: set[_Worker] = set()
        self._new = lambda: _Worker(method, threads, shared)
        self._most_tasks = most_tasks

    def serve(self) -> None:
        """Give tasks to one worker, replaced when it has died or has had its number of tasks."""
        worker: _Worker | None = None
        while (item := self.queue.get()) is not None:
            if self.killed:
                item.future.cancel()
            if not item.future.set_running_or_notify_cancel():
                continue
            try:
                worker = worker or self._started()
                result = worker.run(item.shared, item.task)
            except WorkerError as err:
                worker = self._ended(worker)
                item.future.set_exception(err)
            # What cannot be sent was not sent: the worker is as it was.
            except BaseException as err:
                item.future.set_exception(err)
            else:
                _settle(item, *result)
                if worker.tasks == self._most_tasks:
                    worker = self._ended(worker)
            item = result = None
        self._ended(worker)

    def _started(self) -> _Worker:
        worker = self._new()
        with self._lock:
            self._workers.add(worker)
            if self.killed:
                worker.terminate()
        return worker

    def _ended(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.end(kill=self.killed)
            with self._lock:
                self._workers.discard(worker)

    def kill(self) -> None:
        """End all processes at once; tasks that run or wait are cancelled or get an error."""
        with self._lock:
            self.killed = True
            for worker in self._workers:
                worker.terminate()

    def cancel(self) -> None:
        """Cancel the tasks that wait."""
        with suppress(Empty):
            while True:
                item = self.queue.get_nowait()
                if item is not None and item.future.cancel():
                    item.future.set_running_or_notify_cancel()

    def close(self, threads: int) -> None:
        """Let each thread end after the tasks before this call."""
        for _ in range(threads):
            self.queue.put(None)


def _kill(crew: _Crew, threads: list[threading.Thread]) -> None:
    crew.kill()
    crew.close(len(threads))
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def count_cpus() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class WorkerPool(Executor):
    """Worker processes for `td.map`, kept from call to call: only the first pays for their start.

    An executor like those of `concurrent.futures`, made for trees: they cross as one block of bytes or by the names of
    their files, and a worker that dies is replaced, and fails its own task only.

    Args:
        num_workers: How many processes; without it, one for each processor.
        worker_threads: How many threads torch uses in each.
        mp_start_method: "forkserver" where the system has it, else "spawn"; or "fork", whose workers know what
            existed when they started.
        max_tasks_per_child: After how many tasks a process is replaced by a new one.

    Raises:
        ValueError: A number is not positive, or there is no such start method.
        RuntimeError: `submit` after `shutdown`.

    Examples:
        >>> with tdf.WorkerPool(2) as pool:
        ...     pool.submit(pow, 2, 5).result()
        32
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        worker_threads: int = 1,
        mp_start_method: str | None = None,
        max_tasks_per_child: int | None = None,
    ) -> None:
        self._open(num_workers, worker_threads, mp_start_method, max_tasks_per_child, None)

    @classmethod
    def _for(cls, shared: Any, count: int, threads: int, method: str | None, most_tasks: int | None) -> "WorkerPool":
        """Make a pool for one job, which forked workers find in their memory."""
        pool = object.__new__(cls)
        pool._open(count, threads, method, most_tasks, shared)
        return pool

    def _open(self, count: Any, threads: Any, method: Any, most_tasks: Any, shared: Any) -> None:
        # Any: callers without types are told what is wrong.
        count = count_cpus() if count is None else count
        count, threads, most_tasks = map(as_count, (count, threads, most_tasks))
        for name, value in (("num_workers", count), ("worker_threads", threads), ("max_tasks_per_child", most_tasks)):
            if value is not None and (type(value) is not int or value < 1):
                raise error(ValueError, f"map: {name} is no such number.", expected="1 or more", got=repr(value))
        known = multiprocessing.get_all_start_methods()
        if method is None:
            method = "forkserver" if "forkserver" in known else "spawn"
        if method not in known:
            raise error(ValueError, "map: there is no such start method.", expected=", ".join(known), got=repr(method))
        crew = _Crew(method, threads, most_tasks, shared)
        self._crew, self._lock, self._closed = crew, threading.Lock(), False
        self._max_workers = count
        self._threads = [threading.Thread(target=crew.serve, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        # Before multiprocessing waits for processes at the interpreter's end, in workers of workers too.
        self._end = util.Finalize(self, _kill, (crew, self._threads), exitpriority=100)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run `fn(*args, **kwargs)` in a worker and return its future result."""
        return self._submit(None, Call(fn, args, kwargs))

    def _submit(self, shared: Any, task: Any) -> "Future[Any]":
        """Return the future result of a call; or, of `shared` (sent to each worker once), of a result and a failure."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise error(RuntimeError, "submit: the pool was shut down.", hint="make a new WorkerPool.")
            self._crew.queue.put(_Item(future, shared, task))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers after their tasks, or after those that already run."""
        with self._lock:
            self._closed = True
        if cancel_futures:
            self._crew.cancel()
        self._crew.close(len(self._threads))
        if wait:
            for thread in self._threads:
                thread.join()

    def __exit__(self, kind: Any, *_: Any) -> None:
        """End the workers: after their tasks, or at once where the block was left by an exception."""
        if kind is None:
            self.shutdown()
        else:
            self._terminate()

    def _terminate(self) -> None:
        """End the workers at once."""
        with self._lock:
            self._closed = True
        self._end()


def _settle(item: _Item, result: Any, failure: Failure | None) -> None:
    if item.shared is not None:
        item.future.set_result((result, failure))
    elif failure is not None:
        item.future.set_exception(error_of(failure, "in a worker"))
    else:
        item.future.set_result(result)
