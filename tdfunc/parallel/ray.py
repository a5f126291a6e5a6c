"""`RayExecutor`: tasks on a Ray cluster, as an executor of `concurrent.futures`."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from threading import Lock
from typing import Any

from tdfunc.core.errors import error
from tdfunc.parallel.pool import DiedError


class _TaskFuture(Future[Any]):
    """The result of a Ray task; done when no process works on the task any more."""

    def __init__(self, ray: Any, task: Any) -> None:
        super().__init__()
        self._ray, self._task = ray, task
        inner: Future[Any] = task.future()
        inner.add_done_callback(self._settle)

    def cancel(self) -> bool:
        """Ask Ray to leave or interrupt the task.

        Returns:
            Whether it is cancelled already. Ray says later, and does not say whether a task has begun.
        """
        task = self._task
        if task is not None:
            self._ray.cancel(task)
        return self.cancelled()

    def _settle(self, inner: "Future[Any]") -> None:
        # Kept until now: what nobody refers to is dropped by Ray.
        self._task = None
        errors, err = self._ray.exceptions, inner.exception()
        if isinstance(err, errors.TaskCancelledError):
            super().cancel()
        if not self.set_running_or_notify_cancel():
            return
        if err is None:
            self.set_result(inner.result())
        elif isinstance(err, (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError)):
            died = DiedError(str(err).partition("\n")[0])
            died.__cause__ = err
            self.set_exception(died)
        else:
            self.set_exception(err)


class RayExecutor(Executor):
    """Runs each call as a task of a Ray cluster, which is started here if none is connected.

    For `td.map(fn, executor=RayExecutor())`. Needs `pip install tdfunc[ray]`. Functions need not be importable:
    Ray sends their code. A future that is cancelled is done when Ray has left its task out, or has interrupted
    it at its next line of Python.

    Args:
        **options: Options of the tasks, as for `ray.remote`: `num_cpus`, `num_gpus`, `memory`, `max_retries`,
            `runtime_env` and so on.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: `submit` after `shutdown`.
        WorkerError: From a result: the process, its machine or its memory ended. Other errors are Ray's: those of the
            function are instances of their own class, too.
    """

    # Classes and functions that a script or a notebook defines go by value, as Ray sends its own arguments.
    _by_value = True

    def __init__(self, **options: Any) -> None:
        try:
            import ray
        except ImportError as err:
            raise error(
                ImportError,
                "RayExecutor: Ray is missing.",
                expected="ray",
                got=str(err),
                hint="pip install tdfunc[ray].",
            ) from err
        # Any: what Ray offers is decided when it is imported.
        self._ray: Any = ray
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        self._max_workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
        # A task that kills its worker would kill the next one too.
        self._call: Any = self._ray.remote(**{"max_retries": 0, **options})(_call)
        self._running: set[_TaskFuture] = set()
        self._lock, self._closed = Lock(), False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run `fn(*args, **kwargs)` as a task and return its future result."""
        with self._lock:
            if self._closed:
                raise error(RuntimeError, "submit: the executor was shut down.", hint="make a new RayExecutor.")
            future = _TaskFuture(self._ray, self._call.remote(fn, args, kwargs))
            self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks; the cluster stays as it is.

        Args:
            wait: Wait for those that were submitted.
            cancel_futures: Cancel them first, those that have begun too.
        """
        with self._lock:
            self._closed = True
            running = list(self._running)
        if cancel_futures:
            for future in running:
                future.cancel()
        if wait:
            wait_for(running)


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)
