"""`jit`: a function replaced by the replay of its trace."""

import copy
import functools
import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import fx, nn

from tdfunc._jit.cudagraphs import CudaGraphs
from tdfunc._jit.environment import Environment, Snapshot
from tdfunc._jit.graph import clean, draws
from tdfunc._jit.memory import tensors_of
from tdfunc._jit.recording.reads import Read, ReadTree
from tdfunc._jit.recording.tracing import name_of, named_leaves, state_of, trace
from tdfunc._jit.replay.code import compile_graph
from tdfunc._jit.replay.pool import Pool
from tdfunc._jit.results import Build
from tdfunc._jit.signature import (
    Arguments,
    Contexts,
    aliases,
    describe,
    describe_sizes,
    in_function_mode,
    layouts,
    make_guard,
    modes,
)
from tdfunc.core.context import has_values, make_lock
from tdfunc.core.errors import CaptureError, UnsupportedError, explain
from tdfunc.core.generators import refuse_draws
from tdfunc.core.memory import keep_freed_memory

P = ParamSpec("P")
R = TypeVar("R")
_MANY_VALUES = 8
# Past the number of records, one in so many calls may still be recorded: a recording takes as long as some 50 calls of
# the function, and a program that has gone on to other shapes gets its records back.
_CALLS_FOR_A_RECORD = 256
_MAX_NAMED = 3


class CacheInfo(NamedTuple):
    """How often a call found its trace, how many traces are kept, and the bytes of the memory that they reuse."""

    hits: int
    misses: int
    maxsize: int
    currsize: int
    held_bytes: int = 0


class _Program(NamedTuple):
    """A trace that is ready to be replayed."""

    run: Callable[..., Any]
    build: Build
    trained: tuple[int, ...]
    graph: fx.Graph
    constants: nn.Module
    # Captured tensors, and what shows that they were written.
    captured: tuple[tuple[torch.Tensor, tuple[int, int]], ...]
    # Bytes of the largest intermediate result that is not shaped like an argument, as gradients are.
    activation_bytes: int
    # The values of its arguments that the function read, with their prints.
    reads: list[tuple[Read, bytes]]

    def holds(self, leaves: list[torch.Tensor]) -> bool:
        """Return whether the function would read the same values of these leaves."""
        return all([read.print_of(leaves) == found for read, found in self.reads])

    def prints(self) -> tuple[bytes, ...]:
        """Return the prints of the values that the function read."""
        return tuple([found for _, found in self.reads])


class Jitted(Generic[P, R]):
    """A function that `jit` has wrapped; `reads` are other functions that it calls, whose globals count as its own."""

    def __init__(
        self,
        fn: Callable[P, R],
        backend: str | Callable[..., Any] | None,
        cache_size: int,
        reads: tuple[Callable[..., Any], ...] = (),
        constants: bool = False,
        keep_bytes: int | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._backend = backend
        self._cache_size = cache_size
        self._reads = reads
        self._constants = constants
        self.keep_bytes = keep_bytes
        if backend == "cudagraphs":
            self._graphs = CudaGraphs()
        else:
            self._graphs = backend if isinstance(backend, CudaGraphs) else None
        self._environment = Environment(fn, *reads, by_tensor=constants)
        self._contexts = Contexts()
        self._pool = Pool(keep_bytes)
        self._lock = make_lock()
        self.cache_clear()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Replay the trace for these arguments, or make it."""
        # Transforms, compilers and other traces must see the function itself.
        if not has_values() or in_function_mode():
            return self._fn(*args, **kwargs)
        key, given = self._key(args, kwargs)
        last_key, guard, program = self._last
        if last_key == key and guard(*given.leaves) and (not program.reads or program.holds(given.leaves)):
            self._hits += 1
        else:
            program = self._look_up(key, args, kwargs, given)
            if program is None:
                if any([leaf.requires_grad for leaf in given.leaves]):
                    _check_leaves(args, kwargs)
                return self._fn(*args, **kwargs)
        for tensor, state in program.captured:
            if state_of(tensor) != state:
                raise self._stale(tensor)
        if key[-1][-1] is None:
            outputs = program.run(*given.leaves)
        else:
            # The casts are in the graph; a replay under autocast would make them twice.
            with _suspend_autocast(key[-1][-1]):
                outputs = program.run(*given.leaves)
        for i in program.trained:
            outputs[i].requires_grad_()
        return program.build(outputs, given.nodes, self._contexts)

    def __deepcopy__(self, memo: Any) -> "Jitted[P, R]":
        """Return one without traces, of a copy of the function: itself, but for a method or module its copy."""
        new: Jitted[P, R] = object.__new__(type(self))
        # First, since a copy of the function may lead back here: a method of the object that holds this one.
        memo[id(self)] = new
        Jitted.__init__(new, copy.deepcopy(self._fn, memo), *self.options()[1:])
        return new

    def options(self) -> list[Any]:
        """Return the function and the options that it was made with."""
        return [self._fn, self._backend, self._cache_size, self._reads, self._constants, self.keep_bytes]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind like a function, so that a method can be decorated."""
        if instance is None:
            return self
        return functools.partial(self, instance)

    def graph(self, *args: P.args, **kwargs: P.kwargs) -> fx.GraphModule:
        """Return the graph that a call with these arguments replays; `print(fn.graph(x).code)` shows it."""
        program = self._record(args, kwargs)
        # Only here, since it spells the graph as a program, which takes a fifth of the time of a trace.
        return fx.GraphModule(program.constants, program.graph)

    def draws(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Return whether a call with these arguments draws random numbers."""
        return draws(self._record(args, kwargs).graph)

    def _record(self, args: Any, kwargs: Any) -> _Program:
        """Return the record of a call, made now if there is none."""
        key, given = self._key(args, kwargs)
        program = self._look_up(key, args, kwargs, given, always=True)
        assert program is not None
        return program

    def key_of(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Return what tells this call from calls that need another record; it is hashable."""
        key, given = self._key(args, kwargs)
        return tuple(key[0]), *key[1:], layouts(given.leaves)

    def activation_bytes(self, *args: P.args, **kwargs: P.kwargs) -> int:
        """Return the bytes of the largest intermediate result that is not shaped like an argument."""
        return self._record(args, kwargs).activation_bytes

    def cache_info(self) -> CacheInfo:
        """Return hits, misses, the largest and the present number of traces, and the bytes of blocks that they reuse.

        Hits are approximate under threads. `held_bytes` counts blocks that are in use.
        """
        return CacheInfo(self._hits, self._misses, self._cache_size, len(self._programs), self._pool.held_bytes())

    def cache_clear(self) -> None:
        """Forget all traces and counts, and free the memory that they reuse."""
        self._pool.release()
        with self._lock:
            self._programs: OrderedDict[Any, _Program] = OrderedDict()
            self._contexts.clear()
            self._environment.forget_arguments()
            # Its key without the tensors, their check, the record.
            self._last: tuple[Any, ...] = (None, None, None)
            # The recorded values of each number among the arguments.
            self._numbers: dict[str, set[float]] = {}
            # By kind of call, for those that read values of their arguments.
            self._trees: dict[Any, ReadTree] = {}
            self._hits = self._misses = 0
            # Calls past the number of records, which run the function itself.
            self._plain = 0

    def __repr__(self) -> str:
        return f"jit({getattr(self._fn, '__qualname__', self._fn)})"

    def _key(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], Arguments]:
        given = Arguments([], [], [], [])
        for i, value in enumerate(args):
            describe(self._contexts, value, given, str(i))
        for name, value in kwargs.items():
            given.parts.append(name)
            describe(self._contexts, value, given, name)
        given.parts.append(aliases(given.leaves))
        token = self._environment.snapshot().token
        for where, value in given.objects:
            token += self._environment.of_argument(where, value).snapshot().token
        return (given.parts, len(args), token, modes()), given

    def _environments(self, given: Arguments) -> list[Environment]:
        """Return the values that the function reads from outside, and those from each object among the arguments."""
        own = self._environment
        return [own, *[own.of_argument(where, value) for where, value in given.objects]]

    def _look_up(
        self, key: tuple[Any, ...], args: Any, kwargs: Any, given: Arguments, *, always: bool = False
    ) -> _Program | None:
        """Return the record of a call, made now if there is none; None if there are too many, unless `always`."""
        # Lists compare without being copied, a dict needs a tuple.
        tensors = layouts(given.leaves)
        kind = (tuple(key[0]), *key[1:], tensors)
        with self._lock:
            program = self._programs.get((self._prints(kind, given), *kind))
            if program is not None:
                self._hits += 1
                self._programs.move_to_end((program.prints(), *kind))
            elif always or self._may_record():
                environments = self._environments(given)
                before = [one.snapshot() for one in environments]
                program = self._trace(args, kwargs, given)
                self._misses += 1
                settled = [one.settle(was) for one, was in zip(environments, before, strict=True)]
                after = [one for one in settled if one is not None]
                if len(after) < len(settled):
                    return program
                self._warn_of_numbers(args, kwargs, after)
                key = (*key[:2], _join_tokens(after), key[3])
                self._keep((tuple(key[0]), *key[1:], tensors), program)
            else:
                self._plain += 1
                if self._plain == 1:
                    self._warn_of_shapes(args, kwargs, tensors, self._name_varying(given))
                return None
            self._last = (key, make_guard(given.leaves), program)
        return program

    def _prints(self, kind: Any, given: Arguments) -> tuple[bytes, ...]:
        """Return the prints of the values that calls of a kind read of their arguments, as far as they are known."""
        # Kinds are long to hash, and few functions read values.
        tree = self._trees.get(kind) if self._trees else None
        if tree is None:
            return ()
        return tree.prints(given.leaves)

    def _keep(self, kind: Any, program: _Program) -> None:
        """Keep the record of a kind of calls, and the reads by which such calls find it."""
        if program.reads:
            tree = self._trees.setdefault(kind, ReadTree())
            tree.add(program.reads)
            self._warn_of_reads(tree, program)
        self._programs[(program.prints(), *kind)] = program
        if len(self._programs) > self._cache_size:
            self._programs.popitem(last=False)

    def _may_record(self) -> bool:
        """Return whether another call may be recorded: one at each call would cost more than all replays save."""
        if len(self._programs) < self._cache_size:
            return True
        most = self._cache_size + max(1, self._cache_size // 8)
        return self._misses < most + (self._hits + self._plain) // _CALLS_FOR_A_RECORD

    def _name_varying(self, given: Arguments) -> list[str]:
        """Return a sentence for each value from outside that differs between the records and the present call."""
        parts = _named_parts([one.snapshot() for one in self._environments(given)])
        # A key ends in the token, the modes and the layouts.
        tokens = [key[-3] for key in self._programs if len(key[-3]) == len(parts)]
        varying = [name for i, (name, _, part) in enumerate(parts) if any([token[i] != part for token in tokens])]
        return [f"the value of {name} varies" for name in dict.fromkeys(varying)]

    def _warn_of_shapes(self, args: Any, kwargs: Any, tensors: tuple[Any, ...], outside: list[str]) -> None:
        """Warn that calls are not recorded any more, and name the dimensions and values that vary."""
        names = [name for name, _ in named_leaves(args, kwargs, torch.Tensor)]
        kept = [key[-1] for key in self._programs if len(key[-1]) == len(tensors)]
        found = describe_sizes(names, [*kept, tensors])
        hint = f"make records for more kinds of calls: jit(fn, cache_size={2 * self._cache_size})."
        if outside:
            hint = f"pass values that vary as arguments that are tensors; or {hint}"
        if found:
            hint = (
                "pad these dimensions to a few sizes, or use batch sizes that divide the data (drop_last=True of a "
                f"DataLoader); or {hint}"
            )
        found += outside
        if len(found) > _MAX_NAMED:
            found[_MAX_NAMED:] = [f"and {len(found) - _MAX_NAMED} more"]
        shown = "; ".join(found) or "Python values, structures or layouts of its arguments vary"
        message = f"{self} was called in more ways than it keeps records, {self._cache_size}; others are not recorded."
        warnings.warn(explain(message, expected="a few shapes, each called often", got=shown, hint=hint), stacklevel=4)

    def _warn_of_numbers(self, args: Any, kwargs: Any, outside: list[Snapshot]) -> None:
        for name, number in named_leaves(args, kwargs, int, float):
            self._count_number(name, number, "pass a tensor, which is recorded once")
        for name, value, _ in _named_parts(outside):
            if isinstance(value, (int, float)):
                self._count_number(name, value, "pass it as an argument that is a tensor, which is recorded once")

    def _count_number(self, name: str, number: float, cure: str) -> None:
        """Note a number of a new record, and warn once if it has had many values."""
        values = self._numbers.setdefault(name, set())
        if len(values) == _MANY_VALUES - 1 and number not in values:
            message = f"{self}: {name} is a number that has had {_MANY_VALUES} values, and each is recorded anew."
            warnings.warn(explain(message, hint=f"{cure}: torch.tensor({number!r})."), stacklevel=5)
        values.add(number)

    def _warn_of_reads(self, tree: ReadTree, program: _Program) -> None:
        if tree.added != _MANY_VALUES + 1:
            return
        lines = list(dict.fromkeys([read.line for read, _ in program.reads]))
        message = f"{self} reads values of its arguments, which have been {tree.added} kinds, each recorded anew."
        hint = "use torch.where and masks instead of `if` and .item(), so that one record serves all values."
        warnings.warn(explain(message, got="\n            ".join(lines[:_MAX_NAMED]), hint=hint), stacklevel=5)

    def _stale(self, tensor: torch.Tensor) -> CaptureError:
        return CaptureError(
            f"jit: {name_of(tensor, self._environment) or 'a captured tensor'} was written since it was recorded.",
            expected="captured tensors with the values of the first call",
            got=f"another version, shape {list(tensor.shape)}, {tensor.dtype}",
            hint="pass it as an argument, or call cache_clear() after it was written.",
        )

    def _trace(self, args: Any, kwargs: Any, given: Arguments) -> _Program:
        _check_leaves(args, kwargs)
        keep_freed_memory()
        hint = "draw by torch or tdfunc.random, which replays do anew; or pass the number as a tensor."
        with (
            _pause_collection(),
            refuse_draws(f"{self} draws while it is recorded.", hint, named=self._environment.named_values()),
        ):
            recorded = trace(
                self._fn,
                args,
                kwargs,
                given.leaves,
                self._environment,
                deferred=self._backend is None or self._graphs is not None,
                constants=self._constants,
            )
        for one in recorded.captures:
            _refuse_trained(name_of(one.tensor, self._environment) or "a captured tensor", one.tensor)
        captured = tuple([(one.tensor, one.state) for one in recorded.captures])
        graph = recorded.graph
        constants = recorded.constants
        memory = clean(graph)
        if self._backend is None:
            run = compile_graph(graph, constants, memory, self._pool)
        else:
            with _suspend_autocast(modes()[-1] or ()):
                if self._graphs is not None:
                    names = [name for name, _ in named_leaves(args, kwargs, torch.Tensor)]
                    run = self._graphs.capture(compile_graph(graph, constants, memory), graph, names, given.leaves)
                else:
                    # Not through torch.compile, which would look at the guards of a trace of the trace at each call.
                    compiler = torch._dynamo.lookup_backend(self._backend)
                    run = compiler(fx.GraphModule(constants, graph), given.leaves)
        activation_bytes = _find_activation_bytes(graph)
        # They hold the fake tensors.
        for node in graph.nodes:
            node.meta.clear()
        recorded.refuse_kept()
        return _Program(
            run, recorded.build, recorded.trained, graph, constants, captured, activation_bytes, recorded.reads
        )


def _named_parts(snapshots: list[Snapshot]) -> list[tuple[str, Any, Any]]:
    """Return (quoted name, value, part of the token) of the values from outside."""
    return [(repr(name), value, part) for one in snapshots for name, value, part in one.named_parts()]


def _join_tokens(snapshots: list[Snapshot]) -> tuple[Any, ...]:
    return tuple([part for one in snapshots for part in one.token])


def _check_leaves(args: Any, kwargs: Any) -> None:
    """Raise for tensors among the arguments that no record takes."""
    for name, leaf in named_leaves(args, kwargs, torch.Tensor):
        if leaf.layout is not torch.strided:
            raise UnsupportedError(
                f"jit: the layout of {name} cannot be traced.",
                expected=str(torch.strided),
                got=str(leaf.layout),
                hint="call the function without jit.",
            )
        _refuse_trained(name, leaf)


def _refuse_trained(name: str, leaf: torch.Tensor) -> None:
    if leaf.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"jit: {name} requires grad, and autograd cannot look into a replay.",
            expected="gradients taken inside the function, by torch.func.grad",
            got=f"a tensor of shape {list(leaf.shape)} with requires_grad=True, with grad mode on",
            hint="detach it, or call under torch.no_grad().",
        )


def _find_activation_bytes(graph: fx.Graph) -> int:
    """Return the bytes of the largest tensor that a graph makes in new memory, without those shaped as arguments."""
    shapes: set[Any] = set()
    given: set[int] = set()
    largest = 0
    for node in graph.nodes:
        for value in tensors_of(node):
            storage = value.untyped_storage()
            if node.op in ("placeholder", "get_attr"):
                shapes.add(value.shape)
                given.add(storage._cdata)
            elif value.shape not in shapes and storage._cdata not in given:
                largest = max(largest, storage.nbytes())
    return largest


@contextmanager
def _pause_collection() -> Generator[None]:
    """Leave garbage alone: a trace makes many objects that live, which each collection would go through."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _suspend_autocast(devices: Sequence[str]) -> Generator[None]:
    for device in devices:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in devices:
            torch.set_autocast_enabled(device, True)
