"""`jit`: a function replaced by the replay of its trace."""

import copy
import functools
import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import torch
from torch import fx, nn

from tdfunc._jit.code import compile_graph
from tdfunc._jit.cudagraphs import CudaGraphs
from tdfunc._jit.environment import Environment
from tdfunc._jit.graph import clean, draws
from tdfunc._jit.pool import Pool
from tdfunc._jit.reads import Read, ReadTree
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
from tdfunc._jit.tracing import name_of, named_leaves, state_of, trace
from tdfunc.core.context import has_values, make_lock
from tdfunc.core.errors import CaptureError, UnsupportedError, check_choice, check_least, explain
from tdfunc.core.generators import refuse_draws
from tdfunc.core.memory import keep_freed_memory

P = ParamSpec("P")
R = TypeVar("R")
Captures: TypeAlias = Literal["refused", "constants"]
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
        self._keep_bytes = keep_bytes
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
        return [self._fn, self._backend, self._cache_size, self._reads, self._constants, self._keep_bytes]

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
        given = Arguments([], [], [])
        for i, value in enumerate(args):
            describe(self._contexts, value, given, str(i))
        for name, value in kwargs.items():
            given.parts.append(name)
            describe(self._contexts, value, given, name)
        given.parts.append(aliases(given.leaves))
        return (given.parts, len(args), self._environment.snapshot().token, modes()), given

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
                before = self._environment.snapshot()
                program = self._trace(args, kwargs, given)
                self._misses += 1
                self._warn_of_numbers(args, kwargs)
                key = (*key[:2], self._environment.settle(before).token, key[3])
                self._keep((tuple(key[0]), *key[1:], tensors), program)
            else:
                self._plain += 1
                if self._plain == 1:
                    self._warn_of_shapes(args, kwargs, tensors)
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

    def _warn_of_shapes(self, args: Any, kwargs: Any, tensors: tuple[Any, ...]) -> None:
        """Warn that calls are not recorded any more, and name the dimensions whose sizes vary."""
        names = [name for name, _ in named_leaves(args, kwargs, torch.Tensor)]
        kept = [key[-1] for key in self._programs if len(key[-1]) == len(tensors)]
        found = describe_sizes(names, [*kept, tensors])
        hint = f"make records for more kinds of calls: jit(fn, cache_size={2 * self._cache_size})."
        if found:
            hint = (
                "pad these dimensions to a few sizes, or use batch sizes that divide the data (drop_last=True of a "
                f"DataLoader); or {hint}"
            )
        if len(found) > _MAX_NAMED:
            found[_MAX_NAMED:] = [f"and {len(found) - _MAX_NAMED} more"]
        shown = "; ".join(found) or "Python values, structures or layouts of its arguments vary"
        message = f"{self} was called in more ways than it keeps records, {self._cache_size}; others are not recorded."
        warnings.warn(explain(message, expected="a few shapes, each called often", got=shown, hint=hint), stacklevel=4)

    def _warn_of_numbers(self, args: Any, kwargs: Any) -> None:
        for name, number in named_leaves(args, kwargs, int, float):
            values = self._numbers.setdefault(name, set())
            if len(values) == _MANY_VALUES - 1 and number not in values:
                message = f"{self}: {name} is a number that has had {_MANY_VALUES} values, and each is recorded anew."
                hint = f"pass a tensor, which is recorded once: torch.tensor({number!r})."
                warnings.warn(explain(message, hint=hint), stacklevel=4)
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
        # They hold the fake tensors.
        for node in graph.nodes:
            node.meta.clear()
        recorded.refuse_kept()
        return _Program(run, recorded.build, recorded.trained, graph, constants, captured, recorded.reads)


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


@overload
def jit(
    fn: Callable[P, R],
    *,
    backend: str | Callable[..., Any] | None = None,
    cache_size: int = 64,
    captures: Captures = "refused",
    keep_bytes: int | None = None,
) -> Jitted[P, R]: ...
@overload
def jit(
    fn: None = None,
    *,
    backend: str | Callable[..., Any] | None = None,
    cache_size: int = 64,
    captures: Captures = "refused",
    keep_bytes: int | None = None,
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
def jit(
    fn: Any = None,
    *,
    backend: str | Callable[..., Any] | None = None,
    cache_size: int = 64,
    captures: Captures = "refused",
    keep_bytes: int | None = None,
) -> Any:
    """Record a function of tensors and trees once for each kind of arguments, and replay the record from then on.

    The first call runs the function on fake tensors and records every operation; no compiler is needed. A replay
    skips Python, `torch.vmap` and `torch.func.grad`, which cost more than the arithmetic of small models.

    The function is recorded anew when any of these change:

    - the structure, batch sizes, devices, names, kinds and key order of trees;
    - shapes, strides, dtypes, devices, `requires_grad` and identity of tensors, and other arguments;
    - Python values in closure cells, defaults and globals that the code of the function reads, or the code of functions
      of its package that it names, and the mode of modules among these;
    - grad mode, autocast, default dtype and device, deterministic algorithms;
    - values that the function reads (`if`, `.item()`, `.tolist()`), if they depend only on integers and booleans among
      the arguments, such as tokens and masks. Each call computes these values first, to find its record.

    Libraries that call `torch.compiler.is_compiling()` get the answer yes while a record is made. Tensors in plain
    attributes of the module of a pure function (`tdf.functional`) are constants of the record.

    State that the function reaches in another way (attributes of objects, containers and arrays of over 1000 items,
    files, the clock), or changes itself, is read once, and its side effects happen once. Every replay draws torch's
    random numbers anew.

    Gradients are taken inside the function: its results are not differentiable.

    Args:
        fn: A function that returns tensors, trees, numbers, or containers of these. Without it, a decorator with
            these options.
        backend: A backend of `torch.compile` that the record is handed to. Or, experimental, `"cudagraphs"`: the
            record is captured once as a CUDA graph, and a call launches it as a whole. It takes tensors on one GPU,
            random draws by keys, and nothing that waits for the device. Results are copies; donated leaves are written
            in place, and the record keeps them alive. Not run yet on a GPU.
        cache_size: The number of records to keep; the one not used for longest goes first. Where calls are of more
            kinds, further ones run the function itself, with a warning that names the dimension that varies: pad it, or
            use batch sizes that divide the data.
        captures: The treatment of tensors that the function uses besides its arguments: `refused`, or kept as
            `constants` of the record. If the variable or module of a constant holds another tensor, the function is
            recorded anew. If a constant was written, the call raises. If an attribute of another object no longer
            holds it, the constant stays.
        keep_bytes: The most bytes of large blocks (16 MB and more, on the CPU) that are kept for the next calls, or 0
            for none. By default they are what the results of two calls and all intermediate results take, in the
            record that takes most. A block is used again when nothing else refers to its memory, and `cache_clear()`
            frees them.

    Returns:
        The function, with `cache_info()`, `cache_clear()` and `graph(*args)`.

    Raises:
        CaptureError: The function uses tensors that are not among its arguments; the message names all of them. Or
            a captured constant was written since it was recorded.
        ImmutableError: The function writes to an argument in place, other than through `donate=True`.
        UnsupportedError: An argument requires grad while grad mode is on; the function uses the value of a parameter,
            of another float or of an intermediate result; it reads `.grad` or `.storage_offset()` of an argument; it
            assigns to `.data`; it seeds a generator, or draws from numpy's or Python's; it keeps a tensor outside of
            its result; an argument cannot be part of the key; a result cannot be made again.
        ConcurrencyError: Another thread assigned a closure's variable or a global during the first call.

    Examples:
        >>> @tdf.jit
        ... def member_grads(params, x):
        ...     loss = lambda p: (x @ p["w"]).square().mean()
        ...     return torch.vmap(torch.func.grad(loss))(params)
        >>> params = TensorDict({"w": torch.ones(4, 3)}, [4])
        >>> member_grads(params, torch.ones(2, 3))["w"].shape
        torch.Size([4, 3])
        >>> member_grads(params, torch.zeros(2, 3)) is not None, member_grads.cache_info().misses
        (True, 1)
    """
    check_least("jit: cache_size", cache_size)
    check_choice("jit: captures", captures, ("refused", "constants"))
    if keep_bytes is not None:
        check_least("jit: keep_bytes", keep_bytes, 0)
    if fn is None:
        return lambda wrapped: jit(
            wrapped, backend=backend, cache_size=cache_size, captures=captures, keep_bytes=keep_bytes
        )
    return Jitted(fn, backend, cache_size, constants=captures == "constants", keep_bytes=keep_bytes)
