"""`map` and `map_iter`: a function of the chunks of a tree, run by processes, threads or any executor."""

import os
import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection, check_one_shape, iter_leaves
from tdfunc.core.errors import LeafMismatchError, UnsupportedError, WorkerError, error
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.shapes import as_count, dim_index, dim_size
from tdfunc.ops import join
from tdfunc.parallel.chunks import (
    Job,
    Plan,
    current_modes,
    is_writable_file,
    make_plan,
    take,
    takes_generator,
    write_result,
)
from tdfunc.parallel.in_place import check_rows_apart
from tdfunc.parallel.pool import DiedError, Failure, WorkerPool, count_cpus, error_of, failure_of
from tdfunc.parallel.transfer import (
    Parcel,
    dumps_by_value,
    from_parcel,
    is_in_file,
    is_wrapped,
    sending_chunk,
    sending_result,
    to_parcel,
)

# Results are joined when there are so many: each may be a mapping, of which a process has some 65,000.
_JOIN_AT = 64
_COUNTS = ("num_workers", "chunksize", "num_chunks", "max_tasks_per_child", "worker_threads")
# Chunks that wait or run for each worker: one waits, so that no worker does.
_AHEAD = 2


class Options(NamedTuple):
    """The arguments of `map` and `map_iter` beside the tree and the function."""

    num_workers: int | None
    chunksize: int | None
    num_chunks: int | None
    generator: torch.Generator | None
    max_tasks_per_child: int | None
    worker_threads: int
    mp_start_method: str | None
    executor: Any
    pbar: bool


class Runner(NamedTuple):
    """How chunks are run: `submit(job, task)` returns a future, `settle` its result."""

    submit: Callable[[Job, Any], "Future[Any]"]
    settle: Callable[[Any, str], Any]
    # How many chunks may be submitted and not yet taken.
    ahead: int


# -- who runs the chunks ----------------------------------------------------------------------------------------


class _Inline(Executor):
    """Runs each call when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as err:
            future.set_exception(err)
        return future


def _kind(options: Options) -> Literal["inline", "threads", "pool", "other"]:
    """Return how chunks reach the function: as they are, or as messages to our workers or to another executor's."""
    executor = options.executor
    if executor is None or executor == "processes":
        return "pool" if options.num_workers != 0 else "inline"
    if executor == "threads":
        return "threads" if options.num_workers != 0 else "inline"
    if isinstance(executor, ThreadPoolExecutor):
        return "threads"
    if isinstance(executor, Executor):
        return "pool" if isinstance(executor, WorkerPool) else "other"
    raise error(
        TypeError,
        "map: executor cannot run chunks.",
        expected="'processes', 'threads' or an Executor",
        got=repr(executor) if isinstance(executor, str) else type(executor).__name__,
        hint="concurrent.futures has executors; a multiprocessing.Pool is none, it hangs when a worker dies.",
    )


def _is_own(options: Options) -> bool:
    """Whether the workers are started for this call."""
    return options.executor is None or isinstance(options.executor, str)


def _workers(options: Options) -> int:
    count = options.num_workers
    if count is None:
        count = getattr(options.executor, "_max_workers", None)
    return count if isinstance(count, int) else count_cpus()


def _check_options(options: Options) -> None:
    if options.generator is not None and not isinstance(options.generator, torch.Generator):
        raise error(
            TypeError,
            "map: generator is none.",
            expected="a torch.Generator",
            got=repr(options.generator),
            hint="generator=torch.Generator().manual_seed(3).",
        )
    count = options.num_workers
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        raise error(ValueError, "map: num_workers is no such number.", expected="0 or more", got=repr(count))
    if _is_own(options) and options.executor != "threads":
        return
    for name in ("mp_start_method", "max_tasks_per_child"):
        if (value := getattr(options, name)) is not None:
            raise error(
                ValueError,
                f"map: {name} is for the processes that map starts.",
                got=f"{name}={value!r} and executor={options.executor!r}",
                hint="give it to WorkerPool(...) when you make one.",
            )


@contextmanager
def _running(options: Options, job: Job, chunks: int) -> Generator[Runner, None, None]:
    """Give a runner for the options; when it is left no chunk runs any more."""
    kind, count = _kind(options), max(1, min(_workers(options), chunks))
    ahead = _AHEAD * count
    if kind == "inline":
        yield Runner(partial(_submit_direct, _Inline()), _settle_direct, 1)
    elif kind == "threads":
        if not _is_own(options):
            yield Runner(partial(_submit_direct, options.executor), _settle_direct, ahead)
            return
        executor = ThreadPoolExecutor(count, thread_name_prefix="tdfunc-map")
        try:
            yield Runner(partial(_submit_direct, executor), _settle_direct, ahead)
        finally:
            executor.shutdown(cancel_futures=True)
    elif kind == "other":
        yield Runner(partial(_submit_parcel, options.executor), _settle_parcel, ahead)
    elif not _is_own(options):
        yield Runner(options.executor._submit, _settle_pair, ahead)
    else:
        shared = job if options.mp_start_method == "fork" else None
        pool = WorkerPool._for(
            shared, count, options.worker_threads, options.mp_start_method, options.max_tasks_per_child
        )
        with pool:
            yield Runner(pool._submit, _settle_pair, ahead)


def _submit_direct(executor: Executor, job: Job, task: Any) -> "Future[Any]":
    return executor.submit(job, *task)


def _settle_direct(result: Any, where: str) -> Any:
    return result


def _settle_pair(pair: tuple[Any, Failure | None], where: str) -> Any:
    result, failure = pair
    if failure is not None:
        raise error_of(failure, where)
    return result


def _submit_parcel(executor: Executor, job: Job, task: Any) -> "Future[Any]":
    # The function goes beside the parcel: Ray and Dask pickle functions that Python does not.
    by_value = bool(getattr(executor, "_by_value", False))
    with sending_chunk():
        parcels = to_parcel(job._replace(fn=None), by_value=by_value), to_parcel(task, by_value=by_value)
    return executor.submit(run_parcel, job.fn, *parcels)


def run_parcel(fn: Callable[..., Any], job: Parcel, task: Parcel) -> Parcel:
    """Run one chunk in a process of another executor."""
    try:
        result = from_parcel(job)._replace(fn=fn)(*from_parcel(task))
        with sending_result():
            return to_parcel((result, None), by_value=task.by_value)
    except Exception as err:
        return to_parcel((None, failure_of(err, dumps_by_value if task.by_value else pickle.dumps)))


def _settle_parcel(parcel: Parcel, where: str) -> Any:
    return _settle_pair(from_parcel(parcel), where)


# -- chunk by chunk ---------------------------------------------------------------------------------------------


class _Work(NamedTuple):
    """A call of `map`, all arguments checked."""

    tree: TensorCollection
    plan: Plan
    job: Job
    options: Options
    order: Tensor | None

    def task(self, number: int) -> tuple[int, Any, Any]:
        """Return the arguments of `Job.__call__` for one chunk."""
        begin, end = self.plan.bounds(number)
        rows: Any = slice(begin, end) if self.plan.chunksize != 0 else begin
        if self.order is not None:
            rows = self.order[begin:end] if self.plan.chunksize != 0 else int(self.order[begin])
        return number, rows, None if self.job.tree is not None else take(self.tree, self.job.dim, rows)


def _prepare(
    tree: TensorCollection,
    fn: Callable[..., Any],
    dim: int,
    options: Options,
    *,
    out: Any = None,
    shuffle: bool = False,
) -> _Work:
    """Check the arguments and draw the seed."""
    if not callable(fn):
        raise error(TypeError, "map: fn cannot be called.", expected="a function", got=type(fn).__name__)
    # Those of numpy too.
    options = options._replace(**{name: as_count(getattr(options, name)) for name in _COUNTS})
    kind = _kind(options)
    _check_options(options)
    if any(isinstance(leaf, Tensor) and is_wrapped(leaf) for _, leaf in iter_leaves(tree)):
        raise UnsupportedError(
            "map: the leaves have no values of their own inside a torch.func transform.",
            expected="plain tensors",
            got="wrapped ones",
            hint="call map outside of vmap and grad, or vmap inside the function.",
        )
    dim = dim_index(dim, len(tree._batch_size), "map")
    size = dim_size(tree._batch_size, dim, "map")
    plan = make_plan(size, options.chunksize, options.num_chunks, _workers(options))
    if out is not None:
        _check_out(out, dim, size)
        check_rows_apart(tree, out, dim)
    forked = kind == "pool" and options.mp_start_method == "fork"
    if kind == "pool" and not forked:
        _check_function(fn)
    apart = kind in ("pool", "other")
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=options.generator))
    job = Job(
        fn=fn,
        dim=dim,
        tree=tree if forked or (apart and _is_in_files(tree)) else None,
        out=out if apart and out is not None and is_writable_file(out) else None,
        modes=current_modes(),
        seed=seed,
        generator=takes_generator(fn),
        parent=os.getpid(),
        threads=options.worker_threads,
    )
    order = torch.randperm(size, generator=options.generator, device="cpu") if shuffle else None
    return _Work(tree, plan, job, options, order)


def _check_out(out: Any, dim: int, size: int) -> None:
    if not isinstance(out, TensorCollection):
        raise error(TypeError, "map: out is no tree.", expected="a tree", got=type(out).__name__)
    check_one_shape(out, "map: out")
    if len(out._batch_size) <= dim or out._batch_size[dim] != size:
        raise LeafMismatchError(
            "map: out does not have the rows of the tree.",
            expected=f"{size} at batch dimension {dim}",
            got=f"batch size {list(out._batch_size)}",
        )
    if not any(isinstance(leaf, Tensor) for _, leaf in iter_leaves(out)):
        raise LeafMismatchError(
            "map: out has no leaves to write to.",
            got=repr(list(out._keys())),
            hint="out=fn(td[:1]).new_zeros([len(td)]) has room for all keys of the result.",
        )


def _check_function(fn: Callable[..., Any]) -> None:
    """Raise now for a function that could not be sent to a process."""
    try:
        to_parcel(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as err:
        if isinstance(err, UnsupportedError):
            raise
        raise UnsupportedError(
            "map: the function cannot be sent to another process.",
            expected="a function that pickle finds by its name",
            got=str(err),
            hint="define it at the top of a module; or mp_start_method='fork', where the system has it, "
            "or executor='threads'.",
        ) from err


def _is_in_files(tree: TensorCollection) -> bool:
    leaves = [leaf for _, leaf in iter_leaves(tree)]
    return bool(leaves) and all([is_in_file(leaf) for leaf in leaves])


def _results(work: _Work) -> Iterator[tuple[int, Any]]:
    """Yield (number, result) of each chunk in order; few chunks are under way at a time."""
    plan, pending = work.plan, deque[tuple[int, "Future[Any]"]]()
    with _progress(plan.chunks, work.options.pbar) as step, _running(work.options, work.job, plan.chunks) as runner:
        try:
            for number in range(plan.chunks):
                if len(pending) == runner.ahead:
                    yield _settled(runner, plan, pending)
                    step()
                pending.append((number, runner.submit(work.job, work.task(number))))
            while pending:
                yield _settled(runner, plan, pending)
                step()
        finally:
            _drop(pending, work.options)


class _StoppedError(Exception):
    """A StopIteration of the function: raised itself, it would not leave a generator."""

    def __init__(self, error: StopIteration, where: str) -> None:
        super().__init__(error, where)
        self.error, self.where = error, where


def _settled(runner: Runner, plan: Plan, pending: "deque[tuple[int, Future[Any]]]") -> tuple[int, Any]:
    number, future = pending[0]
    where = plan.where(number)
    try:
        result = runner.settle(future.result(), where)
    except DiedError as err:
        raise WorkerError(
            f"map: a worker died {where}.",
            expected="a result",
            got=err.reason,
            hint="smaller chunks need less memory; num_workers=0 runs the function here, where a debugger sees it.",
        ) from None
    except BrokenExecutor as err:
        running = ", ".join([str(n) for n, _ in pending])
        raise WorkerError(
            f"map: the executor broke {where} or one after it.",
            expected=f"results of chunks {running}",
            got=str(err),
            hint="a WorkerPool tells which chunk it was, and goes on with the others.",
        ) from err
    except Exception as err:
        if hasattr(err, "add_note"):
            err.add_note(f"map: raised {where}.")
        if isinstance(err, StopIteration):
            raise _StoppedError(err, where) from err
        raise
    pending.popleft()
    return number, result


def _drop(pending: "deque[tuple[int, Future[Any]]]", options: Options) -> None:
    """Cancel what has not begun; what runs in somebody else's executor is waited for."""
    # `wait` does not return for a cancelled future until its executor meets it, which not every executor does.
    begun = [future for _, future in pending if not future.cancel()]
    if not _is_own(options):
        wait(begun)


@contextmanager
def _progress(total: int, shown: bool) -> Generator[Callable[[], Any], None, None]:
    if not shown:
        yield lambda: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError as err:
        raise error(
            ImportError,
            "map: pbar=True needs tqdm.",
            expected="tqdm",
            got=str(err),
            hint="pip install tqdm, or leave pbar out.",
        ) from err
    with tqdm(total=total, unit="chunk") as bar:
        yield bar.update


# -- results into one -------------------------------------------------------------------------------------------


class _Joined:
    """Results on their way into one: rows are stacked, chunks concatenated, some at a time."""

    def __init__(self, plan: Plan, dim: int) -> None:
        self._plan, self._dim = plan, dim
        self._numbers: list[int] = []
        self._waiting: list[Any] = []
        self._blocks: list[Any] = []
        self._first: Any = None

    def add(self, number: int, result: Any) -> None:
        """Take the result of a chunk; None leaves its rows out."""
        if result is None:
            return
        if not isinstance(result, (TensorCollection, Tensor)) or isinstance(result, NonTensorBase):
            raise UnsupportedError(
                f"map: the result {self._plan.where(number)} cannot be joined.",
                expected="a tree, a tensor, or None to leave the rows out",
                got=type(result).__name__,
                hint="map_iter yields results of any kind.",
            )
        if self._first is None:
            self._first = result
        self._check(number, result)
        self._numbers.append(number)
        self._waiting.append(result)
        if len(self._waiting) == _JOIN_AT:
            self._join()

    def _check(self, number: int, result: Any) -> None:
        first = self._first
        mine, other = _describe(first), _describe(result)
        if mine != other:
            raise LeafMismatchError(
                f"map: the result {self._plan.where(number)} is not like that of the first chunk.",
                expected=mine,
                got=other,
            )
        ndim = len(result._batch_size) if isinstance(result, TensorCollection) else result.dim()
        least = self._dim + (self._plan.chunksize != 0)
        if ndim < least:
            what = f"map: the result {self._plan.where(number)} has no dimension {self._dim} to be joined along."
            size = result._batch_size if isinstance(result, TensorCollection) else result.shape
            raise LeafMismatchError(
                what,
                expected=f"{least} batch dimensions or more",
                got=f"{list(size)}",
                hint="keep the batch size of the chunk, or chunksize=0 for a function of one row.",
            )

    def _join(self) -> None:
        self._blocks.append(self._one_of(self._waiting, stacked=self._plan.chunksize == 0))
        self._waiting, self._numbers = [], []

    def _one_of(self, parts: list[Any], *, stacked: bool) -> Any:
        if len(parts) == 1 and not stacked:
            return parts[0]
        trees = isinstance(parts[0], TensorCollection)
        joined: Any = (join.stack if stacked else join.cat) if trees else (torch.stack if stacked else torch.cat)
        try:
            return joined(parts, self._dim)
        except (ValueError, RuntimeError, TypeError) as err:
            raise self._explained(err, joined, parts) from err

    def _explained(self, err: Exception, joined: Any, parts: list[Any]) -> Exception:
        """Return the error with the number of the first chunk that does not fit the first of its block."""
        for number, part in zip(self._numbers, parts, strict=False):
            try:
                joined([parts[0], part], self._dim)
            except (ValueError, RuntimeError, TypeError) as cause:
                where = self._plan.where(number)
                return LeafMismatchError(
                    f"map: the result {where} does not fit those before it: {cause}",
                    hint="list(td.map_iter(fn)) keeps results of unequal shapes; tdf.lazy_stack stacks them.",
                )
        return err

    def result(self) -> Any:
        """Return the one result; None if there was none."""
        if self._waiting:
            self._join()
        return self._one_of(self._blocks, stacked=False) if self._blocks else None


def _describe(result: Any) -> str:
    if isinstance(result, TensorCollection):
        return f"a {type(result).__name__}"
    return f"a tensor of {result.dtype}"


# -- the public functions ---------------------------------------------------------------------------------------


def map_chunks(tree: TensorCollection, fn: Callable[..., Any], dim: int, out: Any, options: Options) -> Any:
    """Return the joined results of `fn` on the chunks of a tree, or `out` with the results in it."""
    work = _prepare(tree, fn, dim, options, out=out)
    try:
        return _mapped(work, out)
    except _StoppedError as stopped:
        error = stopped.error
    try:
        raise error
    finally:
        # Its traceback refers to this frame.
        del error


def _mapped(work: _Work, out: Any) -> Any:
    if out is not None:
        for number, result in _results(work):
            if work.job.out is None:
                _write(work, number, out, result)
        return out
    if work.plan.chunks == 0:
        raise error(
            ValueError,
            "map: there are no rows, and the function is one of single rows.",
            expected="one row or more",
            got="none",
            hint="chunksize=1 calls it on the empty batch.",
        )
    joined = _Joined(work.plan, work.job.dim)
    for number, result in _results(work):
        joined.add(number, result)
    return joined.result()


def _write(work: _Work, number: int, out: TensorCollection, result: Any) -> None:
    try:
        write_result(out, work.job.dim, work.task(number)[1], result)
    except Exception as err:
        if hasattr(err, "add_note"):
            err.add_note(f"map: raised {work.plan.where(number)}.")
        raise


def _each(work: _Work) -> Iterator[Any]:
    """Yield the results; a StopIteration of the function would be taken for their end."""
    try:
        for _, result in _results(work):
            yield result
    except _StoppedError as stopped:
        raise error(
            RuntimeError,
            f"map_iter: the function raised StopIteration {stopped.where}.",
            expected="a result",
            got=repr(stopped.error),
            hint="the exception is its cause; map raises it as it is.",
        ) from stopped.error


class ParallelMethods(TensorCollection):
    """`map` and `map_iter`."""

    __slots__ = ()

    def map(
        self,
        fn: Callable[..., Any],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        out: Any = None,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        mp_start_method: str | None = None,
        executor: Any = None,
        pbar: bool = False,
    ) -> Any:
        """Return the joined results of `fn` on chunks of the batch, which worker processes run side by side.

        Rows keep their order. A tree crosses to a worker as one block of bytes; leaves that are mapped from files
        cross by the name of the file and are not copied. Each chunk has a seed of its own, to which a worker sets
        the default generators of torch, numpy and `random`; a function with an argument `generator` is given a
        `torch.Generator` with that seed, wherever it runs.

        Args:
            fn: A function of a tree. The trees or tensors that it returns are concatenated along `dim` (stacked, with
                a chunksize of 0); rows for which it returns None are left out.
            dim: The batch dimension that is cut.
            num_workers: How many processes or threads; 0 runs the function here. Without it, one for each processor.
            out: A tree to write the results to, with as many rows, which is returned. Where its leaves are mapped from
                files for writing, the workers write them and nothing comes back. It may be the tree itself (each
                chunk is written over its own rows), but not share memory with other rows of it.
            chunksize: Rows in a chunk; 0 passes single rows without the dimension.
            num_chunks: How many chunks, in place of their size. Without either, one for each worker.
            generator: Draws the base of the chunks' seeds; without it torch's default generator does.
            max_tasks_per_child: After how many chunks a process is replaced by a new one.
            worker_threads: How many threads torch uses in each process.
            mp_start_method: "forkserver" where the system has it, else "spawn"; "fork" for functions that exist in
                a notebook only.
            executor: "processes", "threads", or an executor: a `WorkerPool`, a `RayExecutor`, or one of
                `concurrent.futures`.
            pbar: Show a progress bar (tqdm).

        Returns:
            A tree or tensor of all results, or `out`; None where every result was None.

        Raises:
            UnsupportedError: The function, a leaf or a result cannot cross to or from a process; the message says why.
            WorkerError: A worker died or could not start; the message names its chunk. Other exceptions are those
                of the function, with the chunk in a note and the worker's traceback as cause.
            LeafMismatchError: The results do not fit each other, or `out`; or `out` lies over other rows of the tree.
            ValueError: An argument has no meaning, or there are no rows for a chunksize of 0.
            TypeError: `fn` cannot be called, or `executor` or `generator` is none.
            IndexError: There is no such batch dimension.

        Examples:
            >>> td = TensorDict({"x": torch.arange(6.0)}, [6])
            >>> td.map(lambda rows: rows * 2, num_workers=2, executor="threads")["x"]
            tensor([ 0.,  2.,  4.,  6.,  8., 10.])
        """
        return map_chunks(
            self, fn, dim, out,
            Options(
                num_workers, chunksize, num_chunks, generator, max_tasks_per_child, worker_threads, mp_start_method,
                executor, pbar,
            ),
        )  # fmt: skip

    def map_iter(
        self,
        fn: Callable[..., Any],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        shuffle: bool = False,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        mp_start_method: str | None = None,
        executor: Any = None,
        pbar: bool = False,
    ) -> Iterator[Any]:
        """Yield the result of `fn` on each chunk, in order, while the next ones are worked on.

        Only a few chunks for each worker are under way at a time, however slowly the results are taken. Closing the
        iterator (or dropping it) ends the workers.

        Args:
            fn: A function of a tree; what it returns is yielded, of whatever kind.
            dim: As for `map`, like all arguments that are not named here.
            num_workers: As for `map`.
            shuffle: Put the rows in a random order first, so that a chunk has rows from everywhere.
            chunksize: As for `map`.
            num_chunks: As for `map`.
            generator: Draws the order and the base of the chunks' seeds.
            max_tasks_per_child: As for `map`.
            worker_threads: As for `map`.
            mp_start_method: As for `map`.
            executor: As for `map`.
            pbar: As for `map`.

        Raises:
            RuntimeError: The function raised StopIteration, which is its cause.
            UnsupportedError: As for `map`, like the other errors.

        Examples:
            >>> td = TensorDict({"x": torch.arange(4)}, [4])
            >>> for rows in td.map_iter(lambda rows: rows["x"] + 1, num_workers=0, chunksize=3):
            ...     print(rows)
            tensor([1, 2, 3])
            tensor([4])
        """
        options = Options(
            num_workers, chunksize, num_chunks, generator, max_tasks_per_child, worker_threads, mp_start_method,
            executor, pbar,
        )  # fmt: skip
        work = _prepare(self, fn, dim, options, shuffle=shuffle)
        return _each(work)
