"""Chunks of a batch dimension: the plan that cuts it, and the job that runs the function on one chunk."""

import hashlib
import inspect
import os
import random
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import UnsupportedError, as_count, error
from tdfunc.core.memory import mapped_file
from tdfunc.ops.edits.storage_writes import write_row


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
            end = begin + rest + (number < more)
            return begin, end
        step = self.chunksize or 1
        return number * step, min((number + 1) * step, self.size)

    def where(self, number: int) -> str:
        """Return the name of a chunk in messages."""
        begin, end = self.bounds(number)
        if self.chunksize == 0:
            return f"on chunk {number} (row {begin})"
        return f"on chunk {number} (rows {begin}:{end})"


def make_plan(size: int, chunksize: int | None, num_chunks: int | None, workers: int) -> Plan:
    """Return the plan for the arguments of `map`; without any, one chunk for each worker."""
    if chunksize is not None and num_chunks is not None:
        raise error(
            ValueError,
            "map: chunksize and num_chunks exclude each other.",
            expected="chunksize, or num_chunks",
            got=f"chunksize={chunksize}, num_chunks={num_chunks}",
        )
    if chunksize is not None:
        chunksize = as_count("map: chunksize", chunksize, 0)
    if num_chunks is not None:
        num_chunks = as_count("map: num_chunks", num_chunks)
    if chunksize == 0:
        return Plan(size, size, 0)
    if chunksize is None:
        chunks = min(num_chunks or max(workers, 1), size)
    else:
        # Rounded up.
        chunks = -(-size // chunksize)
    # An empty batch is one empty chunk, which has the keys of the result.
    return Plan(size, max(1, chunks), chunksize)


class Modes(NamedTuple):
    """The modes of the calling thread, in which the function runs."""

    grad: bool
    inference: bool
    dtype: torch.dtype


def takes_generator(fn: Callable[..., Any]) -> bool:
    """Return whether a function has an argument called `generator`, for which `map` makes one of each chunk's seed."""
    try:
        found = inspect.signature(fn).parameters.get("generator")
    except (TypeError, ValueError):
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


class Outcome(Enum):
    """Results in place of None."""

    # The function wrote to a copy of its rows, and returned nothing.
    LOST = 1


class Job(NamedTuple):
    """The part of a call that all chunks share; called with a chunk's number, its rows, and its tree or None."""

    # Workers keep the job of this key.
    key: str
    fn: Any
    dim: int
    # The tree, where a worker has it or can map its files; then chunks are cut there.
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
        if chunk is None:
            chunk = take(self.tree, self.dim, rows)
        versions: list[int] = []
        seed = self._seed_of(number)
        # In the caller's process the default generators are the caller's, and writes are not lost.
        if os.getpid() != self.parent:
            versions = _versions(chunk)
            self._set_up(seed)
        options = {}
        if self.generator:
            options = {"generator": torch.Generator().manual_seed(seed)}
        with torch.inference_mode(self.modes.inference), torch.set_grad_enabled(self.modes.grad):
            result = self.fn(chunk, **options)
        if self.out is not None:
            write_result(self.out, self.dim, rows, result)
            return None
        if result is None and versions and versions != _versions(chunk):
            return Outcome.LOST
        return result

    def _seed_of(self, number: int) -> int:
        """Return the seed of a chunk; seeds of different chunks and different base seeds are unrelated."""
        digest = hashlib.blake2b(f"{self.seed}:{number}".encode(), digest_size=8).digest()
        # A generator on CUDA takes 63 bits.
        return int.from_bytes(digest, "little") >> 1

    def _set_up(self, seed: int) -> None:
        """Set the state of a worker process that the function may depend on."""
        torch.manual_seed(seed)
        random.seed(seed)
        # numpy takes 32 bits.
        np.random.seed(seed % 2**32)
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.modes.dtype)


def _versions(chunk: Any) -> list[int]:
    """Return the number of writes to each leaf of a chunk whose memory is not a file which others see."""
    versions: list[int] = []
    for _, leaf in iter_leaves(chunk):
        # Tensors made in inference mode have no version.
        if not isinstance(leaf, torch.Tensor) or leaf.is_inference():
            continue
        file = mapped_file(leaf)
        if file is None or file.mode != "r+":
            versions.append(leaf._version)
    return versions


def take(tree: Any, dim: int, rows: Any) -> Any:
    """Return rows of a tree along a batch dimension, as views except for a list of rows."""
    return tree._index((*[slice(None)] * dim, rows))


def write_result(out: Any, dim: int, rows: Any, result: Any) -> None:
    """Write the result of one chunk to its rows of `out`."""
    if not isinstance(result, TensorCollection):
        raise UnsupportedError(
            "map: with out= the function returned no tree to write.",
            expected="a tree",
            got=type(result).__name__,
        )
    write_row(out, (*[slice(None)] * dim, rows), result)
