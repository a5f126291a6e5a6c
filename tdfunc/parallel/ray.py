"""`RayExecutor`: tasks on a Ray cluster, as an executor of `concurrent.futures`."""

from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from concurrent.futures import wait as wait_for
from typing import Any

from tdfunc.core.errors import needs
from tdfunc.parallel.pool import wait_cancelled


class _Task(Future[Any]):
    """The result of a Ray task; done when no process works on the task any more."""

    def __init__(self, ray: Any, task: Any) -> None:
        super().__init__()
        self._ray = ray
        self._task = task
        self._is_ended = False
        task.future().add_done_callback(self._settle)

    def cancel(self) -> bool:
        """Make Ray leave out the task, or end its process; return whether it is cancelled already."""
        # Read once: the task may end in another thread meanwhile.
        task = self._task
        if task is not None:
            self._is_ended = True
            # An exception there could stop an import, and later tasks of the process would find half of a module.
            self._ray.cancel(task, force=True)
        return self.cancelled()

    def _settle(self, inner: "Future[Any]") -> None:
        # Kept until now: Ray drops a task that nobody refers to.
        self._task = None
        errors = self._ray.exceptions
        err = inner.exception()
        was_ended_here = self._is_ended and isinstance(err, errors.WorkerCrashedError)
        if was_ended_here or isinstance(err, errors.TaskCancelledError):
            super().cancel()
        if not self.set_running_or_notify_cancel():
            return
        if err is None:
            self.set_result(inner.result())
        elif isinstance(err, (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError)):
            self.set_exception(BrokenExecutor(str(err).partition("\n")[0]))
        else:
            self.set_exception(err)


class RayExecutor(Executor):
    """Runs each call as a task of a Ray cluster, and starts a cluster here if none is connected.

    Use it as `td.map(fn, executor=RayExecutor())`. It requires the package ray. Functions need not be importable,
    because Ray sends their code. A cancelled future is done when Ray has left its task out, or has ended its process.
    If a process dies, its future raises `BrokenExecutor`, and the executor continues.

    Args:
        **options: The options of the tasks, as for `ray.remote`: `num_cpus`, `num_gpus`, `memory`, `max_retries`,
            `runtime_env` and so on.
    """

    # Classes and functions that a script or a notebook defines go by value, as Ray sends its own arguments.
    _by_value = True

    def __init__(self, **options: Any) -> None:
        with needs("RayExecutor", "ray", "tdfunc[ray]"):
            import ray

        # Any: the names in Ray are found when it is imported.
        self._ray: Any = ray
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        self._max_workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
        # A task that kills its worker would also kill the next one.
        self._call: Any = self._ray.remote(**{"max_retries": 0, **options})(_call)
        self._running: set[_Task] = set()
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run `fn(*args, **kwargs)` as a task and return its future result."""
        if self._closed:
            raise RuntimeError("RayExecutor: submit after shutdown.")
        future = _Task(self._ray, self._call.remote(fn, args, kwargs))
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more tasks; the cluster does not change."""
        self._closed = True
        running = list(self._running)
        if cancel_futures:
            for future in running:
                future.cancel()
        if wait and cancel_futures:
            wait_cancelled(running)
        elif wait:
            wait_for(running)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)
