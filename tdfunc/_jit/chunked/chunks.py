"""A function of members that is replayed for some of them at a time, where the activations of all leave the cache.

A chunk is a view of the arguments, so that donated state is written where it is. The function must treat each member by
itself: the first call of a kind runs it for a few members and compares.
"""

import copy
import functools
from collections.abc import Iterator
from typing import Any, Generic, Literal, ParamSpec, TypeAlias, TypeVar

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from tdfunc._jit.call import CacheInfo, Jitted
from tdfunc._jit.chunked.apart import LEAST, Trial
from tdfunc._jit.chunked.split import InDims, Split, split_members
from tdfunc._jit.chunked.whole import Whole
from tdfunc._jit.replay.pool import Pool
from tdfunc._jit.signature import in_function_mode
from tdfunc.core.context import has_values
from tdfunc.core.errors import UnsupportedError

P = ParamSpec("P")
R = TypeVar("R")
ChunkSize: TypeAlias = int | Literal["auto"]
# Bytes of the largest activation of a chunk, with which it stays in the caches of present processors.
_CHUNK_BYTES = 4 << 20
# Below, all members run together: chunks would gain nothing.
_WHOLE_BYTES = 2 * _CHUNK_BYTES
_MOST_KINDS = 1024


class Chunked(Generic[P, R]):
    """A jitted function whose calls are made of calls for some members at a time."""

    def __init__(self, jitted: Jitted[P, R], chunk_size: ChunkSize, in_dims: InDims) -> None:
        # Without the attributes of the jitted function, which are its own.
        functools.update_wrapper(self, jitted, updated=())
        self._jitted = jitted
        # Any: parts of the arguments have the types of all arguments, which pyright cannot know.
        self._run: Jitted[..., Any] = jitted
        self._chunk_size: ChunkSize = chunk_size
        self._in_dims = in_dims
        # The number of members at a time that was found for each kind of arguments.
        self._sizes: dict[Any, int] = {}
        self._pool = Pool(jitted.keep_bytes)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function for each chunk of members, and join the results along their first dimension."""
        if not has_values() or in_function_mode():
            return self._jitted(*args, **kwargs)
        split = split_members(args, self._in_dims)
        if split.members < 2:
            return self._jitted(*args, **kwargs)
        size = self._size(split, kwargs)
        if size >= split.members:
            return self._jitted(*args, **kwargs)
        whole = Whole(split, self._pool)
        result: Any = None
        for begin, end in _bounds(split.members, size):
            part = split.take_rows(begin, end)
            result = self._run(*part, **kwargs)
            if begin == 0:
                whole.begin(part, result)
            whole.add(result, begin, end)
        return whole.end(result)

    def _size(self, split: Split, kwargs: dict[str, Any]) -> int:
        """Return the number of members at a time; the first call of a kind also checks that they are apart."""
        key = self._run.key_of(*split.args, **kwargs)
        size = self._sizes.get(key)
        if size is None:
            size = self._find_size(split, kwargs)
            if len(self._sizes) >= _MOST_KINDS:
                self._sizes.clear()
            self._sizes[key] = size
        return size

    def _find_size(self, split: Split, kwargs: dict[str, Any]) -> int:
        if any([isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(split.args)]):
            return split.members
        # Its records are of no use later.
        trial = Trial(copy.deepcopy(self._run), split, kwargs)
        if trial.draws():
            raise UnsupportedError(
                "jit: a function with chunk_size draws from torch's default generator, in another order for each size.",
                expected="draws by keys, one for each member",
                got="a draw from the default generator",
                hint="pass tdf.random.split(key, members) with in_dims 0, and draw by rng=.",
            )
        size = self._chunk_size
        if size == "auto":
            size = choose_chunk_size(trial.activation_bytes(), split.members)
        if size < split.members:
            trial.check(size)
        return size

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind like a function, so that a method can be decorated."""
        if instance is None:
            return self
        return functools.partial(self, instance)

    def chunk_size(self, *args: P.args, **kwargs: P.kwargs) -> int:
        """Return the number of members that a call with these arguments computes at a time."""
        split = split_members(args, self._in_dims)
        return min(self._size(split, kwargs), split.members)

    def graph(self, *args: P.args, **kwargs: P.kwargs) -> fx.GraphModule:
        """Return the graph that the first chunk of a call with these arguments replays."""
        split = split_members(args, self._in_dims)
        size = self._size(split, kwargs)
        begin, end = next(_bounds(split.members, min(size, split.members)))
        return self._run.graph(*split.take_rows(begin, end), **kwargs)

    def cache_info(self) -> CacheInfo:
        """Return what the jitted function counts: a call for each chunk."""
        info = self._jitted.cache_info()
        return info._replace(held_bytes=info.held_bytes + self._pool.held_bytes())

    def cache_clear(self) -> None:
        """Forget all traces, counts and sizes of chunks, and free the memory that they reuse."""
        self._sizes.clear()
        self._pool.release()
        self._jitted.cache_clear()

    def __repr__(self) -> str:
        return f"{self._jitted!r} in chunks of {self._chunk_size}"


def _bounds(members: int, size: int) -> Iterator[tuple[int, int]]:
    """Return the first member and the end of each chunk: as few chunks as the size allows, as equal as they can be."""
    count = -(-members // size)
    if members // count < LEAST <= size:
        count -= 1
    small, larger = divmod(members, count)
    begin = 0
    for number in range(count):
        end = begin + small + (number < larger)
        yield begin, end
        begin = end


def choose_chunk_size(activation_bytes: float, members: int) -> int:
    """Return a number of members whose activations stay in the cache, or all members if all do.

    Args:
        activation_bytes: The bytes of the largest activation of one member.
        members: The number of members.
    """
    if activation_bytes * members <= _WHOLE_BYTES:
        return members
    size = max(LEAST, int(_CHUNK_BYTES / activation_bytes))
    # One record for all chunks, if that does not make chunks much smaller.
    for fewer in range(size, size // 2, -1):
        if members % fewer == 0:
            return max(fewer, LEAST)
    return size
