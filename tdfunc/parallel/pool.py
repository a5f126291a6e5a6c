"""Worker processes: pools of `concurrent.futures` with torch loaded, one torch thread, and an end with their parent."""

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import connection, forkserver
from types import ModuleType
from typing import Any

import torch

from tdfunc.core.errors import WorkerError
from tdfunc.core.system import platform
from tdfunc.parallel.chunks import Job
from tdfunc.parallel.parcel import Parcel, from_parcel, to_parcel


def wait_cancelled(futures: "Iterable[Future[Any]]") -> None:
    """Return when futures that were cancelled are done; they are cancelled again each second.

    Ray loses a cancellation that arrives while the task starts: https://github.com/ray-project/ray/issues/24359.
    """
    while futures := wait(futures, timeout=1).not_done:
        for future in futures:
            future.cancel()


class WorkerPool(ProcessPoolExecutor):
    """Worker processes for `td.map` that several calls share, so that only the first call waits for their start.

    It is a `concurrent.futures.ProcessPoolExecutor`. Its processes start from a server that has imported torch, have a
    fixed number of torch threads, ignore Ctrl-C and end with this process. Like any such executor, it is broken when a
    process dies.

    Args:
        num_workers: The number of processes. By default one for each processor.
        worker_threads: The number of torch's threads in each process.
        mp_start_method: "forkserver" if the system has it, else "spawn"; or "fork", whose workers have the modules and
            functions that existed when they started.

    Examples:
        >>> with tdf.WorkerPool(2) as pool:
        ...     pool.submit(pow, 2, 5).result()
        32
    """

    def __init__(
        self, num_workers: int | None = None, *, worker_threads: int = 1, mp_start_method: str | None = None
    ) -> None:
        super().__init__(**pool_options(num_workers, worker_threads, mp_start_method))


def pool_options(count: int | None, threads: int, method: str | None, job: "Job | Parcel | None" = None) -> Any:
    """Return the arguments of a `ProcessPoolExecutor`; its workers have `job`, which a fork need not copy."""
    if method is None:
        has_server = "forkserver" in multiprocessing.get_all_start_methods()
        method = "forkserver" if has_server else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        # Added to what others preload, which can be read nowhere else.
        wanted: list[str] = forkserver._forkserver._preload_modules  # pyright: ignore[reportAttributeAccessIssue]
        context.set_forkserver_preload(list(dict.fromkeys([*wanted, __name__])))
    workers = platform.count_cpus() if count is None else count
    return {"max_workers": workers, "mp_context": context, "initializer": _begin, "initargs": (threads, job)}


def end_workers(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool at once."""
    # `ProcessPoolExecutor.terminate_workers` from Python 3.14 on.
    for process in list((pool._processes or {}).values()):
        process.terminate()


# The job with which the worker was started, and the one that it has read, from this or from a task.
_given: "Job | Parcel | None" = None
_job: "Job | None" = None


def _begin(threads: int, job: "Job | Parcel | None") -> None:
    """Prepare a worker process."""
    global _given
    _given = job
    # Ctrl-C reaches all processes of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Before anything else: in a forked process OpenMP's threads are gone, and waiting for them would hang.
    torch.set_num_threads(threads)

    def end_with_parent() -> None:
        parent: Any = multiprocessing.parent_process()
        connection.wait([parent.sentinel])
        os._exit(1)

    # A parent that is killed cannot end its workers, which would wait for tasks for ever.
    threading.Thread(target=end_with_parent, daemon=True).start()


def run_chunk(task: Parcel, key: str, job: Parcel | None = None, fn: Any = None) -> Parcel:
    """Run one chunk of a job, of the task or the worker; `fn` is for a job without a function."""
    try:
        found = _read_job(key, job)
        if fn is not None:
            found = found._replace(fn=fn)
        return to_parcel(found(*from_parcel(task)), "result", by_value=task.by_value)
    except BaseException as err:
        # SystemExit and KeyboardInterrupt would end the parent.
        if isinstance(err, Exception) and (task.by_value or _is_copied(err)):
            raise
        raise WorkerError(
            "map: the function raised an error that pickle cannot copy.", got=f"{type(err).__name__}: {err}"
        ) from err


def _is_copied(err: Exception) -> bool:
    """Return whether pickle can copy an error."""
    try:
        return pickle.loads(pickle.dumps(err)) is not None
    # The pickling of a class of errors may raise anything.
    except Exception:
        return False


def _read_job(key: str, parcel: Parcel | None) -> Job:
    """Return the job of a key: the last one, the one in a parcel, or the one that the worker started with."""
    global _job
    if _job is not None and _job.key == key:
        return _job
    given = _given if parcel is None else parcel
    if isinstance(given, Parcel):
        module, file = given.origin
        is_here = module in ("", "__main__") or module in sys.modules
        try:
            if not is_here and file is not None:
                _import_module(module, file)
            given = from_parcel(given)
        except (AttributeError, ImportError) as err:
            raise WorkerError(
                "map: a worker cannot import the function.",
                got=f"{type(err).__name__}: {err}",
                hint="a function of a notebook needs mp_start_method='fork' or executor='threads', or a module.",
            ) from err
    assert isinstance(given, Job)
    _job = given
    return given


def _import_module(name: str, file: str) -> None:
    """Import a module from its file where its name is not found, as pytest imports test files."""
    try:
        importlib.import_module(name)
    except ImportError:
        # None for a file that is not Python, which raises AttributeError.
        spec: Any = spec_from_file_location(name, file)
        module = module_from_spec(spec)
        # Pickle looks a dotted name up through the first of its packages.
        first = name.partition(".")[0]
        sys.modules.setdefault(first, ModuleType(first))
        sys.modules[name] = module
        spec.loader.exec_module(module)
