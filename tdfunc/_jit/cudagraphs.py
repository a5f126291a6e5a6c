"""`jit(backend="cudagraphs")`: a record captured once as a CUDA graph, and replayed on the same memory.

A CUDA graph is a list of kernels and the addresses that they read and write; its replay runs no Python. Arguments are
therefore copied into buffers that stay, and results out of memory that the next replay overwrites. Donated arguments
are captured where they are: the usual next step gets them back in the same place, and copies nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tdfunc._jit.memory import writes_of
from tdfunc.core.context import is_random, make_lock
from tdfunc.core.errors import UnsupportedError
from tdfunc.core.memory import find_overlaps, repeats_itself, span_bytes, storage_id

aten = torch.ops.aten
# Runs before a capture, in which libraries choose their kernels and make their workspaces.
_WARM_UPS = 3
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MOVES = {aten._to_copy.default, aten.copy_.default, aten.lift_fresh.default}


class AbstractPool(Protocol):
    """Captures and replays on one device; the graphs of a pool use the same memory, one after another."""

    def capture(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Call a function, perhaps several times, and return its results and what computes them anew in their place."""
        ...

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy values after the work of the pool so far, and before what follows."""
        ...


class CudaPool:
    """Graphs of CUDA kernels.

    Source:
        "CUDA semantics" of torch's documentation: warm-up on a side stream, one memory pool for graphs that never run
        at the same time, captures that do not forbid other threads their calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)
        self._last = torch.cuda.current_stream(device)

    def capture(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Warm up and capture on the side stream; the replay is on the caller's stream."""
        graph = torch.cuda.CUDAGraph()
        now = self._join()
        self._side.wait_stream(now)
        with torch.cuda.stream(self._side):
            for _ in range(_WARM_UPS):
                run()
        now.wait_stream(self._side)
        options: dict[str, Any] = {"pool": self._memory, "stream": self._side, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.device(self._device), torch.cuda.graph(graph, **options):
                outputs = run()
        except RuntimeError as err:
            hint = "look for an operation that waits for the device, such as x[mask] = 0; or call without a backend."
            raise UnsupportedError(
                'jit(backend="cudagraphs"): CUDA cannot capture an operation of the function.', got=str(err), hint=hint
            ) from err
        return outputs, graph.replay

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy on the caller's stream."""
        self._join()
        copy_all(targets, sources)

    def _join(self) -> Any:
        """Return the caller's stream, which waits for the one that the pool was last used on."""
        now = torch.cuda.current_stream(self._device)
        if now != self._last:
            now.wait_stream(self._last)
            self._last = now
        return now


class CudaGraphs:
    """Captures the records of one function.

    Args:
        pool: A function that makes the pool of a device.
        kind: The type of device that all tensors must be on.
    """

    def __init__(self, pool: Callable[[torch.device], AbstractPool] = CudaPool, kind: str = "cuda") -> None:
        self._make_pool = pool
        self._kind = kind
        self._lock = make_lock()
        self._pools: dict[torch.device, AbstractPool] = {}

    def capture(
        self, run: Callable[..., list[Tensor]], graph: fx.Graph, names: list[str], leaves: list[Tensor]
    ) -> Callable[..., list[Tensor]]:
        """Return a function like `run`, the code of a graph, for arguments laid out like these."""
        device = next((leaf.device for leaf in leaves if leaf.device.type == self._kind), torch.device(self._kind))
        for name, leaf in zip(names, leaves, strict=True):
            if leaf.device != device:
                raise UnsupportedError(
                    f'jit(backend="cudagraphs"): {name} is not on the device of the graph.',
                    expected=f"tensors on one device, here {device}",
                    got=f"{leaf.device}, shape {list(leaf.shape)}",
                    hint=f'move it and an optimizer state with tree.to("{device}"), or call without a backend.',
                )
        with self._lock:
            pool = self._pools[device] = self._pools.get(device) or self._make_pool(device)
            return _Captured(pool, self._lock, run, _find_donated(graph), names, leaves)


class _Watch(TorchDispatchMode):
    """Refuses what a graph cannot hold while a record runs: what its kernels are does not depend on the values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A value on the CPU is a constant of the record: arguments are on the device.
        given = [x for x in torch_pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not _WAITS.isdisjoint(func.tags) and any([x.device.type != "cpu" for x in given]):
            raise _refuse(func, "reads a value of the device", "use torch.where and masks of fixed shape")
        if is_random(func, args, kwargs):
            raise _refuse(func, "draws from a generator", "pass a key, and draw by tdfunc.random or `rng=`")
        out = func(*args, **kwargs)
        made = [x for x in torch_pytree.tree_leaves(out) if isinstance(x, Tensor)]
        kinds = {x.device.type for x in (*given, *made) if x.dim() or func in _MOVES}
        if len(kinds) > 1 or (func is aten.lift_fresh.default and kinds - {"cpu"}):
            raise _refuse(func, "moves values between devices", "pass the tensor, or make it by torch.full(device=)")
        return out


def _refuse(func: Any, what: str, hint: str) -> UnsupportedError:
    return UnsupportedError(
        f'jit(backend="cudagraphs"): {func} {what}, which the replay of a CUDA graph does not.',
        expected="operations that the device does without the CPU, the same at each call",
        got=str(func),
        hint=f"{hint}; or call without a backend.",
    )


def _find_donated(graph: fx.Graph) -> list[int]:
    """Return the places of the arguments that a graph writes to, itself or through views."""
    written = {target for node in graph.nodes for target in writes_of(node)}
    views = {storage_id(node.meta["val"]) for node in written if node.op != "placeholder"}
    inputs = [(node, node.meta.get("val")) for node in graph.nodes if node.op == "placeholder"]
    return [
        i
        for i, (node, value) in enumerate(inputs)
        if node in written or (isinstance(value, Tensor) and storage_id(value) in views)
    ]


class _Result(NamedTuple):
    """Where a result is: so many bytes into the memory of an argument, else of a copy; None for an argument itself."""

    argument: int | None
    copy: int
    offset: int | None
    like: Tensor


class _Captured:
    """A captured record, called like its code."""

    def __init__(
        self,
        pool: AbstractPool,
        lock: Any,
        run: Callable[..., list[Tensor]],
        donated: list[int],
        names: list[str],
        leaves: list[Tensor],
    ) -> None:
        self._pool = pool
        self._lock = lock
        self._names = names
        # A copy cannot write to an expanded tensor, but to the memory under it.
        self._read = {i: repeats_itself(leaf) for i, leaf in enumerate(leaves) if i not in donated}
        self._buffers = [_copy_layout(leaf) if i in self._read else leaf.detach() for i, leaf in enumerate(leaves)]
        self._places = {i: leaves[i].data_ptr() for i in donated}
        own = [self._buffers[i] for i in donated]
        before = [leaf.clone() for leaf in own]

        def watched() -> list[Tensor]:
            with _Watch():
                return run(*self._buffers)

        try:
            outputs, self._replay = pool.capture(watched)
        finally:
            # Every run is a step.
            pool.copy(own, before)
        self._sources: dict[int, Tensor] = {}
        # Buffers hold the values of conjugates and negatives, and not their memory.
        self._viewed = [not (leaf.is_conj() or leaf.is_neg()) for leaf in leaves]
        # A tensor that is returned twice is one object.
        distinct = {id(out): out for out in outputs}
        self._order = [list(distinct).index(id(out)) for out in outputs]
        self._results = list(map(self._locate, distinct.values()))

    def __call__(self, *given: Tensor) -> list[Tensor]:
        with self._lock:
            self._pool.copy(self._flatten(self._buffers), self._flatten(given))
            moved = [i for i, place in self._places.items() if given[i].data_ptr() != place]
            if moved:
                self._replay_moved(given, moved)
            else:
                self._replay()
            # As kernels outside of a graph do, for those who compare versions.
            torch.autograd.graph.increment_version([given[i] for i in self._places if not given[i].is_inference()])
            copies = [torch.empty_like(source) for source in self._sources.values()]
            self._pool.copy(copies, list(self._sources.values()))
        found = [self._return(result, given, copies) for result in self._results]
        return [found[i] for i in self._order]

    def _replay_moved(self, given: Sequence[Tensor], moved: list[int]) -> None:
        """Replay on donated arguments in other memory; the capture's memory, which may be in use, stays as it is."""
        donated = list(self._places)
        for pair in find_overlaps([given[i] for i in donated]):
            a, b = [donated[i] for i in pair]
            raise UnsupportedError(
                f"update(donate=True): {self._names[a]} and {self._names[b]} share memory, which one would overwrite.",
                expected="leaves apart in memory, as they were when the function was traced",
                got=f"overlapping tensors of shapes {list(given[a].shape)} and {list(given[b].shape)}",
                hint="clone() the tree before the first step, or leave out donate.",
            )
        own = [self._buffers[i] for i in moved]
        theirs = [given[i] for i in moved]
        before = [x.clone() for x in own]
        values = [x.clone() for x in theirs]
        self._pool.copy(own, values)
        self._replay()
        self._pool.copy(values, own)
        self._pool.copy(own, before)
        self._pool.copy(theirs, values)

    def _flatten(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        return [_span(leaves[i]) if repeats else leaves[i] for i, repeats in self._read.items()]

    def _locate(self, out: Tensor) -> _Result:
        """Find out where a result of the capture is."""
        for i, buffer in enumerate(self._buffers):
            if out is buffer:
                return _Result(i, 0, None, out)
            offset = out.data_ptr() - buffer.data_ptr()
            if self._viewed[i] and storage_id(out) == storage_id(buffer) and 0 <= offset < span_bytes(buffer):
                return _Result(i, 0, offset, out)
        memory = storage_id(out)
        if memory not in self._sources or out.itemsize < self._sources[memory].itemsize:
            whole = out.untyped_storage()
            self._sources[memory] = _lay(whole, 0, out, (whole.nbytes() // out.itemsize,))
        return _Result(None, list(self._sources).index(memory), int(out.storage_offset()) * out.itemsize, out)

    def _return(self, result: _Result, given: Sequence[Tensor], copies: list[Tensor]) -> Tensor:
        like = result.like
        offset = result.offset
        if result.argument is None:
            memory = copies[result.copy]
        else:
            memory = given[result.argument]
        if offset is None:
            return memory
        offset += int(memory.storage_offset()) * memory.itemsize
        new = _lay(memory.untyped_storage(), offset // like.itemsize, like, like.shape, like.stride())
        if like.is_conj():
            new = new.conj()
        return torch._neg_view(new) if like.is_neg() else new  # pyright: ignore[reportPrivateImportUsage]


# Any: storages, which torch's annotations leave out.
def _lay(memory: Any, offset: int, like: Tensor, *layout: tuple[int, ...]) -> Tensor:
    """Return a tensor of the dtype of another on a storage."""
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(memory, offset, *layout)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy values into tensors, by one kernel for each dtype."""
    groups: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for pair in zip(targets, sources, strict=True):
        groups.setdefault(pair[0].dtype, []).append(pair)
    with torch.no_grad():
        for pairs in groups.values():
            torch._foreach_copy_([x for x, _ in pairs], [x for _, x in pairs])  # pyright: ignore[reportPrivateImportUsage]


def _copy_layout(leaf: Tensor) -> Tensor:
    """Return a copy with the strides of a tensor, gaps and expanded dimensions included."""
    return _span(leaf.detach()).clone().as_strided(leaf.shape, leaf.stride())


def _span(leaf: Tensor) -> Tensor:
    return leaf.as_strided((span_bytes(leaf) // leaf.itemsize,), (1,))
