"""`RayExecutor`: tasks on a Ray cluster, as an executor of `concurrent.futures`."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any

from tdfunc._errors import explain


class RayExecutor(Executor):
    """Runs each call as a task of a Ray cluster, which is started here if none is connected.

    For `td.map(fn, executor=RayExecutor())`. Needs `pip install tdfunc[ray]`. Functions need not be importable:
    Ray sends their code.

    Args:
        **options: Options of the tasks, as for `ray.remote`: `num_cpus`, `num_gpus`, `memory`, `max_retries`,
            `runtime_env` and so on.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: `submit` after `shutdown`.
    """

    def __init__(self, **options: Any) -> None:
        try:
            import ray
        except ImportError as err:
            hint = "pip install tdfunc[ray]."
            raise ImportError(explain("RayExecutor: Ray is missing.", expected="ray", got=str(err), hint=hint)) from err
        # Any: what Ray offers is decided when it is imported.
        self._ray: Any = ray
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        self._max_workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
        # A task that kills its worker would kill the next one too.
        self._call: Any = self._ray.remote(**{"max_retries": 0, **options})(_call)
        self._running: dict[Any, Future[Any]] = {}
        self._lock, self._closed = Lock(), False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run `fn(*args, **kwargs)` as a task and return its future result."""
        with self._lock:
            if self._closed:
                raise RuntimeError(explain("submit: the executor was shut down.", hint="make a new RayExecutor."))
            task = self._call.remote(fn, args, kwargs)
            future: Future[Any] = task.future()
            self._running[task] = future
        future.add_done_callback(lambda _: self._running.pop(task, None))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks; the cluster stays as it is.

        Args:
            wait: Wait for those that were submitted.
            cancel_futures: Cancel them first.
        """
        with self._lock:
            self._closed = True
            running = list(self._running)
        if cancel_futures:
            for task in running:
                self._ray.cancel(task)
        if wait and running:
            self._ray.wait(running, num_returns=len(running))


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)
