"""`map` and `map_iter`: a function of the chunks of a tree, run by processes, threads or any executor."""

import os
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdfunc import random
from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import LeafMismatchError, UnsupportedError, WorkerError, as_count, error, explain
from tdfunc.core.keys import dotted
from tdfunc.core.memory import Places, extent_of, find_overlaps
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.shapes import dim_index, dim_size
from tdfunc.core.system import platform
from tdfunc.core.types import Path
from tdfunc.ops.batch import join
from tdfunc.parallel.chunks import Job, Modes, Outcome, Plan, make_plan, take, takes_generator, write_result
from tdfunc.parallel.parcel import Parcel, from_parcel, is_in_file, is_shared_file, to_parcel
from tdfunc.parallel.pool import end_workers, pool_options, run_chunk, wait_cancelled
from tdfunc.random.draws import KeyLike, key_of
from tdfunc.storage.disk.raw import is_wrapped
from tdfunc.storage.progress import progress_bar

# Chunks that wait or run for each worker: one waits, so that no worker does.
_AHEAD = 2
_LOST = explain(
    "map: the function wrote to its rows in place and returned None; the writes are lost.",
    expected="a new tree as the result, or rows that workers share with the caller",
    got="a copy of the rows, in another process",
    hint="return the rows; or executor='threads', or a tree on files that are open for writing (memmap).",
)
# The errors of functions that join results of different shapes, keys or dtypes.
_MISFITS = (ValueError, RuntimeError, TypeError, IndexError)
# The names of executors that a call of `map` makes.
_OWN = (None, "processes", "threads")


class Options(NamedTuple):
    """The arguments of `map` and `map_iter` except the tree, the function and `out`."""

    num_workers: int | None
    chunksize: int | None
    num_chunks: int | None
    key: KeyLike | None
    worker_threads: int
    mp_start_method: str | None
    executor: Any
    pbar: bool


class _Work(NamedTuple):
    """A call of `map`, all arguments checked."""

    tree: TensorCollection
    plan: Plan
    job: Job
    options: Options
    # How many workers there are, at most one for each chunk; 0 where this thread runs the function, or nothing does.
    workers: int
    # True if chunks reach the function as they are, in this process, not as parcels.
    is_direct: bool
    # The job for processes that do not have it.
    parcel: Parcel | None
    # The row that comes at each place, if rows are shuffled.
    order: Tensor | None

    def rows(self, number: int) -> Any:
        """Return the rows of a chunk: a slice, a number, or indices in another order."""
        begin, end = self.plan.bounds(number)
        if self.plan.chunksize == 0:
            if self.order is None:
                return begin
            return int(self.order[begin])
        if self.order is None:
            return slice(begin, end)
        return self.order[begin:end]


# -- arguments --------------------------------------------------------------------------------------------------


class _Route(NamedTuple):
    """The way to the workers, which depends on the executor."""

    # True if this thread runs the function.
    is_here: bool
    # True if chunks reach the function as they are, in this process.
    is_direct: bool
    # True if workers have the memory of this process, as it is at their start.
    is_forked: bool
    # True if the function goes to the executor with each chunk, not in the parcel of the job. Python's own processes
    # find functions by their names; other executors may copy them.
    is_function_apart: bool


def _route_of(options: Options, workers: int) -> _Route:
    executor = options.executor
    is_own = executor in _OWN
    is_here = is_own and workers == 0
    is_direct = is_here or executor == "threads" or isinstance(executor, ThreadPoolExecutor)
    is_forked = is_own and not is_direct and options.mp_start_method == "fork"
    is_of_python = is_own or isinstance(executor, (ProcessPoolExecutor, ThreadPoolExecutor))
    return _Route(is_here, is_direct, is_forked, is_function_apart=not is_of_python)


def _prepare(
    tree: TensorCollection, fn: Any, dim: int, options: Options, *, out: Any = None, shuffle: bool = False
) -> _Work:
    """Check the arguments and draw the seed."""
    _check_plain(tree)
    dim = dim_index(dim, len(tree._batch_size), "map")
    size = dim_size(tree._batch_size, dim, "map")
    if out is not None:
        _check_rows(tree, out, dim, size)
        _check_memory(tree, out)
    workers = _count_workers(options)
    plan = make_plan(size, options.chunksize, options.num_chunks, workers)
    route = _route_of(options, workers)
    source = torch.default_generator if options.key is None else options.key
    key = key_of(source).cpu()
    modes = Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    job = Job(
        key=uuid.uuid4().hex,
        fn=fn,
        dim=dim,
        tree=tree if _is_tree_there(tree, route) else None,
        out=out if _is_out_there(out, route) else None,
        modes=modes,
        seed=int(random.bits(random.fold_in(key, 0))),
        generator=takes_generator(fn),
        parent=os.getpid(),
        threads=options.worker_threads,
    )
    parcel = None
    if not route.is_direct and not route.is_forked:
        sent = job._replace(fn=None) if route.is_function_apart else job
        parcel = to_parcel(sent, "function", fn=fn, by_value=getattr(options.executor, "_by_value", False))
    order = None
    if shuffle:
        order = random.permutation(random.fold_in(key, 1), torch.arange(size, device="cpu"))
    count = 0 if route.is_here else min(workers, plan.chunks)
    return _Work(tree, plan, job, options, count, route.is_direct, parcel, order)


def _check_plain(tree: TensorCollection) -> None:
    """Raise if a leaf has no separate values."""
    for _, leaf in iter_leaves(tree):
        if isinstance(leaf, Tensor) and is_wrapped(leaf):
            raise UnsupportedError(
                "map: a leaf is a tensor inside a torch.func transform.",
                hint="call map outside of vmap and grad, or vmap inside the function.",
            )


def _count_workers(options: Options) -> int:
    if options.num_workers is not None:
        return as_count("map: num_workers", options.num_workers, 0)
    # Executors of `concurrent.futures` have no public name for it.
    return getattr(options.executor, "_max_workers", None) or platform.count_cpus()


def _is_tree_there(tree: TensorCollection, route: _Route) -> bool:
    """Return whether workers have the tree, or can map its files; they then cut the chunks."""
    if route.is_direct:
        return False
    return route.is_forked or _all_leaves(tree, is_in_file)


def _is_out_there(out: TensorCollection | None, route: _Route) -> bool:
    """Return whether workers in other processes can write the results to `out`."""
    if out is None or route.is_direct:
        return False
    return _all_leaves(out, is_shared_file)


def _check_rows(tree: TensorCollection, out: TensorCollection, dim: int, size: int) -> None:
    """Raise unless `out` has leaves, and the rows of the tree."""
    has_rows = len(out._batch_size) > dim and out._batch_size[dim] == size
    if has_rows and any(True for _ in iter_leaves(out)):
        return
    raise LeafMismatchError(
        "map: out does not have leaves and the rows of the tree.",
        expected=f"{size} at batch dimension {dim}",
        got=f"batch size {list(out._batch_size)} and keys {list(out._keys())}",
        hint="out=fn(td[:1]).new_zeros([len(td)]) has room for all keys of the result.",
    )


def _check_memory(tree: TensorCollection, out: TensorCollection) -> None:
    """Raise if a leaf of `out` overlaps the tree, except exactly over the tree's leaf under the same path."""
    targets = list(iter_leaves(out))
    known = {path: leaf for path, leaf in iter_leaves(tree) if extent_of(leaf) is not None}
    views = {path: _view_of(leaf) for path, leaf in known.items()}
    in_place = {path: target for path, target in targets if views.get(path) == _view_of(target)}
    others = Places([leaf for path, leaf in known.items() if path not in in_place])
    # Two leaves of `out` may be exactly over leaves of the tree that overlap each other.
    paths = list(in_place)
    overlapping: set[Path] = set()
    for first, second in find_overlaps(list(in_place.values())):
        overlapping |= {paths[first], paths[second]}
    for path, target in targets:
        is_over_others = extent_of(target) is not None and others.holds(target)
        if path in overlapping or is_over_others:
            raise LeafMismatchError(
                f"map: leaf {dotted(path)!r} of out shares memory with the tree: "
                "rows would be read after they were overwritten.",
                expected="separate memory, or the leaf of the tree itself (in place)",
                got="a part of the tree's memory",
                hint="out=td.clone(), or tree.clone().map(...); without out= the results are a new tree.",
            )


def _view_of(leaf: Tensor) -> tuple[Hashable, ...]:
    """Return all that says which elements of the memory a leaf shows, and how."""
    return leaf.shape, leaf.stride(), leaf.dtype, extent_of(leaf)


def _all_leaves(tree: TensorCollection, condition: Callable[[Any], bool]) -> bool:
    """Return whether there are leaves, and a condition holds for all of them."""
    leaves = [leaf for _, leaf in iter_leaves(tree)]
    return bool(leaves) and all([condition(leaf) for leaf in leaves])


# -- chunk by chunk ---------------------------------------------------------------------------------------------


class _Inline(Executor):
    """Runs each call when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as err:
            future.set_exception(err)
        return future


@contextmanager
def _executor(work: _Work) -> Generator[Executor, None, None]:
    """Give the executor of a call; when it is left, no chunk runs any more."""
    options = work.options
    count = work.workers
    if options.executor not in _OWN:
        yield options.executor
        return
    if count == 0:
        yield _Inline()
        return
    if options.executor == "threads":
        executor: Executor = ThreadPoolExecutor(count, thread_name_prefix="tdfunc-map")
    else:
        # A fork has the job itself.
        job = work.job if work.parcel is None else work.parcel
        executor = ProcessPoolExecutor(**pool_options(count, options.worker_threads, options.mp_start_method, job))
    try:
        yield executor
    except BaseException:
        if isinstance(executor, ProcessPoolExecutor):
            end_workers(executor)
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _submit(work: _Work, executor: Executor, number: int) -> "Future[Any]":
    job = work.job
    rows = work.rows(number)
    chunk = None
    if job.tree is None:
        chunk = take(work.tree, job.dim, rows)
    if work.is_direct:
        return executor.submit(job, number, rows, chunk)
    by_value = work.parcel is not None and work.parcel.by_value
    task = to_parcel((number, rows, chunk), "chunk", by_value=by_value)
    if executor is work.options.executor:
        fn = None if isinstance(executor, ProcessPoolExecutor) else job.fn
        return executor.submit(run_chunk, task, job.key, work.parcel, fn)
    try:
        # The workers were started with the job.
        return executor.submit(run_chunk, task, job.key)
    # The fork server ends when the main module, which it imports, raises.
    except (EOFError, ConnectionError) as err:
        raise BrokenExecutor(f"{type(err).__name__}: {err}") from err


def _results(work: _Work) -> Iterator[tuple[int, Any]]:
    """Yield (number, result) of each chunk in order; few chunks are under way at a time."""
    plan = work.plan
    ahead = max(1, _AHEAD * work.workers)
    numbers = iter(range(plan.chunks))
    pending = deque[tuple[int, "Future[Any]"]]()
    bar = progress_bar("map: pbar=True", show=work.options.pbar, unit="chunk", total=plan.chunks)
    with bar as report, _executor(work) as executor:
        try:
            while True:
                for number in islice(numbers, ahead - len(pending)):
                    pending.append((number, _submit(work, executor, number)))
                if not pending:
                    return
                number, future = pending[0]
                result = _result_of(future, plan.where(number))
                pending.popleft()
                if isinstance(result, Parcel):
                    result = from_parcel(result)
                if result is Outcome.LOST:
                    warnings.warn(_LOST, stacklevel=4)
                    result = None
                yield number, result
                report(1)
        except BrokenExecutor as err:
            raise _broken(work, pending, err) from err
        finally:
            # `wait` does not return for a cancelled future until its executor meets it, which not every executor does.
            running = [future for _, future in pending if not future.cancel()]
            if executor is work.options.executor:
                wait_cancelled(running)


# Any: whatever the function returned, or a parcel of it.
def _result_of(future: "Future[Any]", where: str) -> Any:
    """Wait for a result; an error of the function gets a note with the chunk."""
    try:
        return future.result()
    except BrokenExecutor:
        raise
    except Exception as err:
        # Python has no notes before 3.11.
        if hasattr(err, "add_note"):
            err.add_note(f"map: raised {where}.")
        raise


def _broken(work: _Work, pending: "deque[tuple[int, Future[Any]]]", err: BaseException) -> WorkerError:
    """Return the error for a worker that died: it names the chunks that were running."""
    # Chunks begin in order, so those that ran are the first ones without a result.
    without_result = [number for number, future in pending if not future.done() or future.exception() is not None]
    running = [work.plan.where(number).removeprefix("on ") for number in without_result[: work.workers]]
    chunks = " and ".join(running) or "the first chunk"
    return WorkerError(
        "map: a worker died, or could not start.",
        expected=f"a result of {chunks}",
        got=f"{type(err).__name__}: {err}",
        hint="smaller chunks need less memory; num_workers=0 runs the function here; a script calls map below "
        "`if __name__ == '__main__':`, since workers import it.",
    )


# -- results into one -------------------------------------------------------------------------------------------


def _join(work: _Work, results: list[tuple[int, Any]]) -> Any:
    """Return results as one: rows are stacked, chunks concatenated; None if there are none."""
    if not results:
        return None
    parts = [part for _, part in results]
    first = parts[0]
    dim = work.job.dim
    is_stack = work.plan.chunksize == 0
    # Any: functions of trees, or of tensors.
    unite: Any
    if isinstance(first, TensorCollection):
        unite = join.stack if is_stack else join.cat
    else:
        unite = torch.stack if is_stack else torch.cat
    try:
        return unite(parts, dim)
    except _MISFITS as err:
        # The first chunk that does not fit the first one.
        for number, part in results:
            try:
                unite([first, part], dim)
            except _MISFITS as cause:
                raise LeafMismatchError(
                    f"map: the result {work.plan.where(number)} does not fit those before it: {cause}",
                    hint="list(td.map_iter(fn)) keeps results of any shape; tdf.lazy_stack stacks them.",
                ) from err
        raise


def map_chunks(tree: TensorCollection, fn: Callable[..., Any], dim: int, out: Any, options: Options) -> Any:
    """Return the joined results of `fn` on the chunks of a tree, or `out` with the results in it."""
    work = _prepare(tree, fn, dim, options, out=out)
    if out is not None:
        for number, result in _results(work):
            if work.job.out is None:
                write_result(out, work.job.dim, work.rows(number), result)
        return out
    if work.plan.chunks == 0:
        raise error(
            ValueError,
            "map: the tree has no row, which chunksize=0 needs.",
            hint="chunksize=1 calls the function on the empty batch.",
        )
    results: list[tuple[int, Any]] = []
    first = ""
    for number, result in _results(work):
        if result is None:
            continue
        kind = _kind_of(result, work.plan.where(number))
        first = first or kind
        if kind != first:
            raise LeafMismatchError(
                f"map: the result {work.plan.where(number)} is not like the result of the first chunk.",
                expected=first,
                got=kind,
            )
        results.append((number, result))
    return _join(work, results)


# Any: whatever the function returned.
def _kind_of(result: Any, where: str) -> str:
    """Return the kind that all results share; raise for results that cannot be joined."""
    if isinstance(result, NonTensorBase) or not isinstance(result, (TensorCollection, Tensor)):
        raise UnsupportedError(
            f"map: the result {where} is not a tree or tensor, nor None to leave the rows out.",
            got=type(result).__name__,
            hint="map_iter yields results of any kind.",
        )
    if isinstance(result, TensorCollection):
        return f"a {type(result).__name__}"
    return f"a tensor of {result.dtype}"


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
        key: KeyLike | None = None,
        worker_threads: int = 1,
        mp_start_method: str | None = None,
        executor: Any = None,
        pbar: bool = False,
    ) -> Any:
        """Return the joined results of `fn` on chunks of the batch, which worker processes run side by side.

        Rows keep their order. A worker gets a tree as one block of bytes; of leaves that are mapped from files it gets
        the name of the file, and they are not copied. Each chunk has its own seed, with which a worker seeds the
        default generators of torch, numpy and `random`. A function with an argument `generator` gets a
        `torch.Generator` with that seed, wherever it runs.

        Args:
            fn: A function of a tree. The trees or tensors that it returns are concatenated along `dim` (stacked, with
                a chunksize of 0). Rows for which it returns None are left out.
            dim: The batch dimension to split.
            num_workers: The number of processes or threads; 0 runs the function here. By default the number of
                processors.
            out: A tree with as many rows, to which the results are written; it is returned. If its leaves are mapped
                from files for writing, the workers write to them and send nothing back. A leaf may be the tree's leaf
                under the same path (each chunk overwrites its own rows), but must not share memory with it otherwise.
            chunksize: The number of rows in a chunk; 0 passes single rows without the dimension.
            num_chunks: The number of chunks, in place of their size. Without either, one chunk for each worker.
            key: A random key, a seed or a generator for the seeds of the chunks. By default torch's default generator.
            worker_threads: The number of torch's threads in each process.
            mp_start_method: "forkserver" if the system has it, else "spawn". Use "fork" for functions that exist only
                in a notebook.
            executor: "processes", "threads", or an executor: a `WorkerPool`, a `RayExecutor`, or one of
                `concurrent.futures`.
            pbar: Show a progress bar. Requires tqdm.

        Returns:
            A tree or tensor of all results, or `out`. None if every result was None. A function that writes to its
            rows in place and returns nothing changes the tree in threads, in this process, and on files that are open
            for writing. In other processes it writes to copies, and `map` warns.

        Raises:
            UnsupportedError: The function, a leaf or a result cannot be sent to or from a process; the message has the
                reason.
            WorkerError: A worker died or could not start; the message names the chunks that were running.
            Exception: The function raised this error. A note has the chunk, and its cause the worker's traceback.
            LeafMismatchError: The results do not fit each other or `out`, or `out` shares memory with the tree.
            ValueError: A number is out of range, or a chunksize of 0 was given for a tree without rows.
            IndexError: The batch dimension does not exist.

        Examples:
            >>> td = TensorDict({"x": torch.arange(6.0)}, [6])
            >>> td.map(lambda rows: rows * 2, num_workers=2, executor="threads")["x"]
            tensor([ 0.,  2.,  4.,  6.,  8., 10.])
        """
        return map_chunks(
            self, fn, dim, out,
            Options(num_workers, chunksize, num_chunks, key, worker_threads, mp_start_method, executor, pbar),
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
        key: KeyLike | None = None,
        worker_threads: int = 1,
        mp_start_method: str | None = None,
        executor: Any = None,
        pbar: bool = False,
    ) -> Iterator[Any]:
        """Yield the result of `fn` on each chunk, in order, while workers run the next chunks.

        Only a few chunks for each worker run or wait at a time, however slowly the results are taken. Closing the
        iterator (or dropping it) ends the workers.

        Args:
            fn: A function of a tree; its results may be of any type.
            dim: The batch dimension to split, as for `map`.
            num_workers: The number of processes or threads, as for `map`.
            shuffle: Put the rows in a random order first, so that a chunk has rows from everywhere.
            chunksize: The number of rows in a chunk, as for `map`.
            num_chunks: The number of chunks, as for `map`.
            key: The source of the chunks' seeds, as for `map`, and of the order of the rows.
            worker_threads: The number of torch's threads in each process, as for `map`.
            mp_start_method: The way to start processes, as for `map`.
            executor: The executor, as for `map`.
            pbar: Show a progress bar, as for `map`.

        Raises:
            UnsupportedError: The function, a leaf or a result cannot be sent, as for `map`, like the other errors.

        Examples:
            >>> td = TensorDict({"x": torch.arange(4)}, [4])
            >>> for rows in td.map_iter(lambda rows: rows["x"] + 1, num_workers=0, chunksize=3):
            ...     print(rows)
            tensor([1, 2, 3])
            tensor([4])
        """
        options = Options(num_workers, chunksize, num_chunks, key, worker_threads, mp_start_method, executor, pbar)
        work = _prepare(self, fn, dim, options, shuffle=shuffle)
        return (result for _, result in _results(work))
