"""How a batch dimension is cut into chunks, and what happens to one chunk, in whatever process or thread it is."""

import hashlib
import inspect
import os
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import UnsupportedError, WorkerError, error
from tdfunc.ops.storage_writes import write_row
from tdfunc.parallel.transfer import is_shared_file


class Plan(NamedTuple):
    """A dimension of `size` rows in some number of chunks."""

    size: int
    chunks: int
    # Rows in each chunk but the last; None for chunks of nearly equal size, 0 for single rows without the dimension.
    chunksize: int | None

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the first row of a chunk and the one after its last."""
        if self.chunksize is None:
            rest, more = divmod(self.size, self.chunks)
            begin = number * rest + min(number, more)
            return begin, begin + rest + (number < more)
        step = self.chunksize or 1
        return number * step, min((number + 1) * step, self.size)

    def where(self, number: int) -> str:
        """Return how a message names a chunk."""
        begin, end = self.bounds(number)
        return f"on chunk {number} (row {begin})" if self.chunksize == 0 else f"on chunk {number} (rows {begin}:{end})"


def make_plan(size: int, chunksize: int | None, num_chunks: int | None, workers: int) -> Plan:
    """Return the plan for the arguments of `map`; without any, one chunk for each worker.

    Raises:
        ValueError: Both arguments are given, or one is too small.
    """
    if chunksize is not None and num_chunks is not None:
        raise error(
            ValueError,
            "map: chunks are counted or measured.",
            expected="one of the two",
            got=f"chunksize={chunksize}, num_chunks={num_chunks}",
        )
    for name, value, least in (("chunksize", chunksize, 0), ("num_chunks", num_chunks, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise error(ValueError, f"map: {name} is no such number.", expected=f"{least} or more", got=repr(value))
    if chunksize is None:
        # An empty batch is one empty chunk, so that the function says what it makes of it.
        return Plan(size, max(1, min(num_chunks or max(workers, 1), size)), None)
    if chunksize == 0:
        return Plan(size, size, 0)
    return Plan(size, max(1, -(-size // chunksize)), chunksize)


class Modes(NamedTuple):
    """What of the caller's state the function meets in another thread or process."""

    grad: bool
    inference: bool
    dtype: torch.dtype


def current_modes() -> Modes:
    """Return the modes of this thread."""
    return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())


@contextmanager
def _entered(modes: Modes, elsewhere: bool) -> Generator[None, None, None]:
    if elsewhere:
        torch.set_default_dtype(modes.dtype)
    with torch.inference_mode(modes.inference), torch.set_grad_enabled(modes.grad):
        yield


def chunk_seed(seed: int, number: int) -> int:
    """Return the seed of one chunk: those of different chunks and different base seeds are unrelated."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    # torch takes 64 bits, but a generator on CUDA is seeded with a signed number.
    return int.from_bytes(digest, "little") >> 1


def takes_generator(fn: Callable[..., Any]) -> bool:
    """Whether a function has an argument called `generator`, for which `map` makes one of each chunk's seed."""
    try:
        found = inspect.signature(fn).parameters.get("generator")
    except (TypeError, ValueError):
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


class Job(NamedTuple):
    """What all chunks of one call share; called with a chunk's number and rows and, unless `tree` has it, the chunk."""

    fn: Callable[..., Any]
    dim: int
    # The tree, where a worker can map its files itself; then chunks are cut there.
    tree: Any
    # The tree that results are written to by the worker.
    out: Any
    modes: Modes
    seed: int
    generator: bool
    parent: int
    threads: int

    def __call__(self, number: int, rows: Any, chunk: Any) -> Any:
        """Run the function on one chunk and return its result, or None if it was written to `out`."""
        elsewhere = os.getpid() != self.parent
        if chunk is None:
            chunk = take(self.tree, self.dim, rows)
        seed = chunk_seed(self.seed, number)
        options = {"generator": torch.Generator().manual_seed(seed)} if self.generator else {}
        # In the caller's process the default generators are the caller's.
        if elsewhere:
            _seed_all(seed)
            if torch.get_num_threads() != self.threads:
                torch.set_num_threads(self.threads)
        with _entered(self.modes, elsewhere):
            result = self.fn(chunk, **options)
        if self.out is None:
            return result
        if not is_writable_file(self.out):
            raise WorkerError(
                "map: the files of out are not those that this process has mapped.",
                expected="the files that the caller mapped",
                got="others by now",
            )
        write_result(self.out, self.dim, rows, result)
        return None


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def place(dim: int, rows: Any) -> tuple[Any, ...]:
    """Return the index of rows along a dimension."""
    return (*[slice(None)] * dim, rows)


def take(tree: Any, dim: int, rows: Any) -> Any:
    """Return rows of a tree along a batch dimension; without copying, but for a list of rows."""
    return tree._index(place(dim, rows))


def is_writable_file(tree: Any) -> bool:
    """Whether all leaves lie in files in which other processes' writes are seen."""
    leaves = [leaf for _, leaf in iter_leaves(tree)]
    return bool(leaves) and all([is_shared_file(leaf) for leaf in leaves])


def write_result(out: Any, dim: int, rows: Any, result: Any) -> None:
    """Write the result of one chunk to its rows of `out`.

    Raises:
        UnsupportedError: The result is no tree.
        BatchSizeError: It has another number of rows.
    """
    if not isinstance(result, TensorCollection):
        raise UnsupportedError(
            "map: the result cannot be written to out.",
            expected="a tree",
            got=type(result).__name__,
            hint="with out= the function returns the tree that is written there.",
        )
    write_row(out, place(dim, rows), result)
