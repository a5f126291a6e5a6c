"""One run of a function on fake tensors, recorded as a graph of aten operations.

Fake tensors have shapes and no data, so nothing is computed, drawn or written. Operations that a replay could not
repeat are refused while they happen, with the name of the tensor and the user's own line.
"""

import gc
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from traceback import walk_tb
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, fx, nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._subclasses.fake_tensor import DataDependentOutputException as ValueUsed
from torch._subclasses.fake_tensor import DynamicOutputShapeException as ShapeUnknown
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from tdfunc._jit.environment import Environment
from tdfunc._jit.memory import written_by
from tdfunc._jit.readers import contents, seeds_error
from tdfunc._jit.recording import served
from tdfunc._jit.recording.asked import answer_traced
from tdfunc._jit.recording.reads import Read, make_read, serve
from tdfunc._jit.results import Build, make_builder
from tdfunc._jit.signature import refill
from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.context import in_vmap, is_tracing, outside
from tdfunc.core.errors import CaptureError, ImmutableError, LeafMismatchError, UnsupportedError, user_line
from tdfunc.core.memory import storage_id
from tdfunc.core.pytree import flatten_with_paths
from tdfunc.modules.batching.table import RULES
from tdfunc.modules.functional import Apply

_READ_DEVICE = torch.ops.prim.device.default
_READ_NUMBER = torch.ops.aten._local_scalar_dense.default


class Capture(NamedTuple):
    """A tensor that a function uses besides its arguments, and the fake one in its place."""

    tensor: Tensor
    fake: Tensor
    # The line of the user.
    line: str
    # The state of the tensor when it was found.
    state: tuple[int, int]


def state_of(tensor: Tensor) -> tuple[int, int]:
    """Return what changes when a tensor is written: its version, and its place in memory for an assigned `.data`."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


class Trace(NamedTuple):
    """A recorded run: the graph, whose output is a list of tensors, and how to make the result of them."""

    graph: fx.Graph
    # Has the captured tensors, under the names in the graph.
    constants: nn.Module
    build: Build
    # Outputs that the function made to require grad.
    trained: tuple[int, ...]
    # The tensors from outside that it holds.
    captures: list[Capture]
    # Called when the graph has let go of its fake tensors: raises if one is alive.
    refuse_kept: Callable[[], None]
    # The values of the arguments that the function read, with their prints.
    reads: list[tuple[Read, bytes]]


class Recorder(TorchDispatchMode):
    """Sees every operation of a trace first: collects captured tensors, refuses writes to arguments and seeds.

    Args:
        tracer: The recorder of operations.
        fake_mode: The mode that makes the tensors in place of captured ones.
        names: The argument that each storage belongs to.
        find: A function that returns the path from the function to a captured object, or None.
        list_constants: A function that returns the storages of the tensors that no call can change.
        generators: The generators that the function can reach.
        leaves: The real tensors among the arguments.
        deferred: True if `call` may be used; a compiler's backend could not read inside.
    """

    def __init__(
        self,
        tracer: Any,
        fake_mode: FakeTensorMode,
        names: dict[int, str],
        find: Callable[[object], str | None],
        list_constants: Callable[[], set[int]],
        generators: Iterable[torch.Generator],
        leaves: list[Tensor],
        *,
        deferred: bool,
    ) -> None:
        super().__init__()
        self._tracer = tracer
        self._leaves = leaves
        self.reads: list[tuple[Read, bytes]] = []
        self._fake_mode = fake_mode
        self._names = names
        self._find = find
        self._list_constants = list_constants
        self.deferred = deferred
        self._is_strict = False
        # By identity; the tensors are kept, so their ids stay theirs.
        self.captures: dict[int, Capture] = {}
        # Those that no call can change, each with the copy of it that the graph holds.
        self.constants: dict[int, tuple[Tensor, Capture]] = {}
        self._fixed: set[int] | None = None
        self._seed = torch.initial_seed()
        self._state = torch.get_rng_state()
        self._states: list[tuple[torch.Generator, Tensor, Tensor]] = []
        for one in generators:
            if one is not torch.default_generator:
                # A state that the function cannot set, so that setting the present one also shows.
                state = one.get_state()
                seed = random.SystemRandom().getrandbits(63)
                self._states.append((one, state, one.manual_seed(seed).get_state()))
        # The fake tensors so far, each with its origin: an argument or an operation.
        self.made: list[tuple[weakref.ref[Tensor], object]] = []
        # The storages that operations wrote, in their order.
        self.writes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Half of all calls: each read of a fake tensor's device is one.
        if func is _READ_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is _READ_NUMBER:
            value = self.read(args[0])
            if value is not None:
                return value.item()
        # `Guard` is there for the calls of the function, not for those that torch makes to run an operation.
        with torch._C.DisableTorchFunction():
            if func not in _LIFTS:
                args, kwargs = self._lift_all(func, args, kwargs)
            self._refuse_writes(func, args, kwargs)
            out = func(*args, **kwargs)
        made = optree.tree_leaves(out)
        self.made += [(weakref.ref(leaf), func) for leaf in made if isinstance(leaf, Tensor)]
        return out

    def _lift_all(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of an operation with fake tensors alone; refuse generators that it may not draw from."""
        given: Any = [args, kwargs]
        leaves = optree.tree_leaves(given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse_seeds([leaf for leaf in leaves if isinstance(leaf, torch.Generator)])
        # Nearly all are fake already, and to rebuild the arguments takes longer than to look.
        if any([isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) for leaf in leaves]):
            return torch_pytree.tree_map_only(Tensor, self._lift, (args, kwargs))
        return args, kwargs

    def _refuse_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise if an operation writes to a tensor that was given or captured; note the other writes."""
        for tensor in written_by(func, args, kwargs):
            storage = storage_id(tensor)
            self.writes.append(storage)
            name = self._names.get(storage)
            if name is not None:
                raise self._write_error(name or self._name_captured(tensor), func)

    def _name_captured(self, fake: Tensor) -> str:
        """Return how the function reaches a tensor that it captured."""
        same = [one.tensor for one in self.captures.values() if storage_id(one.fake) == storage_id(fake)]
        return self._find(same[0]) or "a captured tensor"

    def _write_error(self, name: str, func: Any) -> ImmutableError:
        return ImmutableError(
            f"jit: the function writes to {name} in place ({func}).",
            got=user_line(),
            hint="return a new tensor, write to a clone, or use optim's update(..., donate=True).",
        )

    def call(self, fn: Callable[[list[Tensor], list[Tensor]], None], writes: list[Tensor], reads: list[Tensor]) -> None:
        """Record a call of `fn(writes, reads)`, made at each replay on real tensors; `fn` writes to the first."""
        written = [self._node(tensor) for tensor in writes]
        read = [self._node(tensor) for tensor in reads]
        node = self._tracer.graph.create_node("call_function", Deferred(fn), (written, read), {})
        node.meta["writes"] = written

    def make(
        self, fn: Callable[[list[Tensor]], list[Tensor]], like: Callable[[], Tensor], reads: list[Tensor]
    ) -> Tensor:
        """Record a call of `fn(reads)`, made at each replay on real tensors; it returns new ones, here like one."""
        with _disable_current_modes(), self._fake_mode:
            made = like()
        call = self._tracer.create_proxy("call_function", Deferred(fn), ([self._proxy(x) for x in reads],), {})
        item = call[0]
        proxy_tensor.track_tensor_tree(made, item, constant=None, tracer=self._tracer)
        call.node.meta["val"] = [item.node.meta["val"]]
        self.made.append((weakref.ref(made), fn))
        return made

    def read(self, tensor: Tensor) -> Tensor | None:
        """Return the real value of a tensor that depends only on integers among the arguments; of others None."""
        # Of a constant, torch's own tracer knows the value.
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return None
        slot = proxy_tensor.get_proxy_slot(tensor, self._tracer, None)
        if slot is None:
            return None
        read = make_read(slot.proxy.node, self._tracer.root, self._leaves, user_line())
        if read is None:
            return None
        value, found = serve(read, self._leaves)
        # What depends on no argument stays, and what was read before has the same value.
        if read.places and read.code not in [known.code for known, _ in self.reads]:
            self.reads.append((read, found))
        return value

    def is_given(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares its memory with an argument or a captured tensor."""
        return storage_id(tensor) in self._names

    def _proxy(self, tensor: Tensor) -> fx.Proxy:
        return proxy_tensor.get_proxy_slot(self._lift(tensor), self._tracer).proxy

    def _node(self, tensor: Tensor) -> fx.Node:
        return self._proxy(tensor).node

    def attempt(self, fn: Callable[[], Any]) -> Any:
        """Return the result of a function, or None if it uses a tensor from outside of the trace."""
        self._is_strict = True
        try:
            return fn()
        except CaptureError:
            return None
        finally:
            self._is_strict = False

    def _lift(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor in place of one from outside of the trace."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) in self.constants:
            return self.constants[id(tensor)][1].fake
        found = self.captures.get(id(tensor))
        if found is None:
            name = ""
            if type(tensor) is Tensor and self._is_constant(tensor):
                name = self._find(tensor) or "a constant of a module"
                found = self._hold(tensor, copied=True)
                self.constants[id(tensor)] = tensor, found
            elif self._is_strict or type(tensor) not in (Tensor, nn.Parameter):
                raise self.capture_error(tensor)
            else:
                found = self.captures[id(tensor)] = self._hold(tensor)
            self._names[storage_id(found.fake)] = name
        return found.fake

    def _hold(self, tensor: Tensor, *, copied: bool = False) -> Capture:
        """Make a tensor from outside, or a copy of it, part of the graph."""
        name = f"_captured{len(self.captures) + len(self.constants)}"
        with _disable_current_modes():
            value = tensor.detach()
            if copied:
                tensor = value = value.clone()
            fake = self._fake_mode.from_tensor(value)
        setattr(self._tracer.root, name, value)
        proxy = self._tracer.create_proxy("get_attr", name, (), {})
        proxy_tensor.track_tensor_tree(fake, proxy, constant=None, tracer=self._tracer)
        return Capture(tensor, fake, user_line(), state_of(tensor))

    def _is_constant(self, tensor: Tensor) -> bool:
        """Return whether no call can change a tensor from outside of the trace."""
        if self._fixed is None:
            self._fixed = self._list_constants()
        return storage_id(tensor) in self._fixed

    def capture_error(self, *more: Tensor) -> CaptureError:
        """Return the error that names the tensors from outside of the trace."""
        found = [(one.tensor, one.line) for one in self.captures.values()]
        found += [(tensor, user_line()) for tensor in more if id(tensor) not in self.captures]
        names = [self._find(tensor) or "a tensor whose name was not found" for tensor, _ in found[:_MAX_NAMED]]
        texts = [f"shape {list(tensor.shape)}, {tensor.dtype} at {line}" for tensor, line in found]
        what = "a tensor that is not one of its arguments"
        if len(found) > 1:
            what = "tensors that are not among its arguments"
            texts = [f"{name}: {text}" for name, text in zip(names, texts, strict=False)]
            names += [f"and {len(found) - _MAX_NAMED} more"] if len(found) > _MAX_NAMED else []
        return CaptureError(
            f"jit: the function uses {', '.join(names)}, {what}.",
            expected="every tensor among the arguments: a replay would keep using the present value of another",
            got="\n            ".join(texts),
            hint="pass it as an argument (a module's weights: apply, params, buffers = tdfunc.functional(module)), or "
            'record its present value: jit(fn, captures="constants").',
        )

    def refuse_seeds(self, generators: Sequence[torch.Generator] = ()) -> None:
        """Raise if a draw is from a generator that the function makes, or if it has seeded one.

        Operations on fake tensors draw nothing, so the states of generators stay during a trace.
        """
        with _disable_current_modes():
            moved = any([not torch.equal(one.get_state(), mark) for one, _, mark in self._states])
            if torch.initial_seed() != self._seed:
                moved = True
                torch.set_rng_state(self._state)
        if moved or any([self._find(generator) is None for generator in generators]):
            raise seeds_error("the function", user_line())

    def restore(self) -> None:
        """Give the generators the states that they had before the trace."""
        with _disable_current_modes():
            for one, state, _ in self._states:
                one.set_state(state)

    def refuse_kept(self) -> None:
        """Raise if a tensor of the trace is alive after it: it has no value that another reader could use."""
        if not any([ref() is not None for ref, _ in self.made]):
            return
        gc.collect()
        for ref, origin in self.made:
            tensor = ref()
            if tensor is not None:
                raise UnsupportedError(
                    "jit: the function keeps a tensor outside of its result, which has no values while it is recorded.",
                    expected="no cache, global or attribute that holds tensors of the function",
                    got=f"{self._find(tensor) or 'an unknown holder'}, of {origin}, shape {list(tensor.shape)}",
                    hint="clear that cache; return the tensor, or pass it as an argument.",
                )


class Guard(TorchFunctionMode):
    """Finds the calls of a trace that a graph of operations does not contain: reads of tensors, checks of values."""

    def __init__(self, recorder: Recorder, arguments: dict[int, str]) -> None:
        super().__init__()
        # By the id of the fake tensor.
        self._recorder = recorder
        self._arguments = arguments

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            return self._read(func, args, kwargs)
        if func == _SET_DATA:
            raise UnsupportedError(
                "jit: the function assigns to .data, which a replay does not.",
                got=user_line(),
                hint="write values by copy_(), or give the new tensor its own name.",
            )
        if func in _UNKEYED and id(args[0]) in self._arguments:
            raise UnsupportedError(
                f"jit: the function reads {_UNKEYED[func]} of {self._arguments[id(args[0])]}, which a replay does not.",
                expected="shapes, strides, dtypes, devices and values of tensors",
                got=user_line(),
                hint="pass the value as a separate argument.",
            )
        serve_call = served.find(func)
        if serve_call is not None:
            return serve_call(func, *args, **kwargs)
        # As in a forward: the function may call torch's vmap itself.
        rule = RULES.get(func)
        if rule is not None and in_vmap():
            return rule(self, func, *args, **kwargs)
        return func(*args, **kwargs)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a reader of values; raise if a replay could not repeat the read."""
        tensor = args[0]
        while _functorch.is_gradtrackingtensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        if not isinstance(tensor, FakeTensor) and not _functorch.is_functorch_wrapped_tensor(tensor):
            raise self._recorder.capture_error(tensor)
        value = self._recorder.read(tensor)
        if value is None:
            raise ValueUsed(func)
        with outside():
            return func(value, *args[1:], **kwargs)


# Readers of values that no dispatch mode sees.
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
_SET_DATA: Any = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
_UNKEYED: dict[Any, str] = {
    Tensor.grad.__get__: ".grad",  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    Tensor.storage_offset: ".storage_offset()",
}


class Deferred:
    """A call left for the replay, spelled as a function for the graph's code."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn: Any = fn
        self.__name__ = self.__qualname__ = "deferred"
        self.__module__ = __name__

    def __call__(self, *tensors: list[Tensor]) -> Any:
        return self.fn(*tensors)


_LIFTS = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}


def recorder() -> Recorder | None:
    """Return the recorder of the trace that the caller runs in, if there is one that takes deferred calls."""
    if not is_tracing():
        return None
    found = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder) and mode.deferred]
    if found:
        return found[-1]
    return None


def trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: list[Tensor],
    environment: Environment,
    *,
    deferred: bool,
    constants: bool = False,
) -> Trace:
    """Run `fn` once on fake tensors and record its operations on them; `constants` are captured tensors allowed."""
    tracer = _make_tracer()
    fake_mode = FakeTensorMode(allow_fallback_kernels=True)
    fakes = _make_fakes(leaves, fake_mode)
    names = [name for name, _ in named_leaves(args, kwargs, Tensor)]
    storages = dict(zip(map(storage_id, fakes), names, strict=True))
    find = lambda value: name_of(value, environment, args, kwargs)  # noqa: E731
    reached = _walk(environment, args, kwargs)
    generators = dict.fromkeys(value for _, value in reached if isinstance(value, torch.Generator))
    list_constants = lambda: _list_constants(_walk(environment, args, kwargs))  # noqa: E731
    watch = Recorder(tracer, fake_mode, storages, find, list_constants, generators, leaves, deferred=deferred)
    watch.made += zip(map(weakref.ref, fakes), names, strict=True)
    guard = Guard(watch, dict(zip(map(id, fakes), names, strict=True)))
    proxy_mode = proxy_tensor.ProxyTorchDispatchMode(tracer, "fake")
    nodes: list[Any] = []
    with fake_mode, proxy_mode, proxy_tensor.disable_autocast_cache():
        _add_placeholders(tracer, fakes)
        fake_args, fake_kwargs = refill((args, kwargs), iter(fakes), nodes)
        try:
            with watch, guard, answer_traced():
                out = _run(fn, fake_args, fake_kwargs)
                watch.refuse_seeds()
        except Exception as err:
            if watch.captures and not constants:
                raise watch.capture_error() from err
            raise
        finally:
            watch.restore()
        slots: list[Tensor] = []
        build = make_builder(out, slots, nodes)
        outputs = [watch._node(tensor) for tensor in slots]
        if watch.captures and not constants:
            raise watch.capture_error()
        tracer.graph.output(outputs)
    trained = tuple(i for i, tensor in enumerate(slots) if tensor.requires_grad and tensor.is_leaf)
    held = [*watch.captures.values(), *[one for _, one in watch.constants.values()]]
    return Trace(tracer.graph, tracer.root, build, trained, held, watch.refuse_kept, watch.reads)


# Any: torch has no types for its tracer.
def _make_tracer() -> Any:
    tracer: Any = proxy_tensor.PythonKeyTracer()
    tracer.root = nn.Module()
    tracer.graph = fx.Graph(tracer_cls=proxy_tensor.PythonKeyTracer)
    tracer.tensor_attrs = {}
    return tracer


def _make_fakes(leaves: list[Tensor], fake_mode: FakeTensorMode) -> list[Tensor]:
    """Return a fake tensor for each object: the function may compare arguments by identity, and so does the key."""
    made: dict[int, Tensor] = {}
    for leaf in leaves:
        if type(leaf) is nn.Parameter:
            kept = nn.Parameter(leaf.detach(), leaf.requires_grad)
        else:
            kept = leaf.detach()
        made[id(leaf)] = fake_mode.from_tensor(kept).requires_grad_(leaf.requires_grad)
    return [made[id(leaf)] for leaf in leaves]


def _add_placeholders(tracer: Any, fakes: list[Tensor]) -> None:
    """Make each fake tensor an argument of the graph; one that comes again stays the first argument."""
    tracked: set[int] = set()
    for i, fake in enumerate(fakes):
        proxy = tracer.create_proxy("placeholder", f"arg{i}", (), {})
        if id(fake) not in tracked:
            tracked.add(id(fake))
            proxy_tensor.track_tensor_tree(fake, proxy, constant=None, tracer=tracer)


def _run(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return fn(*args, **kwargs)
    except (ValueUsed, ShapeUnknown) as err:
        raise _data_error(err) from err
    except RuntimeError as err:
        if _NO_GRADIENT in str(err):
            raise _no_gradient(args, kwargs) from err
        # Kernels that read an index or a length from memory: `tensor_split`, packed sequences.
        if any([text in str(err) for text in _NO_MEMORY]):
            raise _data_error(err) from err
        raise


# torch's message where a gradient is taken by an integer, which names no leaf.
_NO_GRADIENT = "only Tensors of floating point dtype can require gradients"
# Of torch, where a kernel asks for the memory of a fake tensor.
_NO_MEMORY = ("data is not allocated yet", "Cannot access data pointer of Tensor")


# Any: the arguments of the traced function.
def _no_gradient(args: Any, kwargs: Any) -> LeafMismatchError:
    """Return the error for a gradient by an integer leaf, such as the counter of a BatchNorm layer."""
    leaves = [(name, leaf) for name, leaf in named_leaves(args, kwargs, Tensor)]
    integers = [(name, leaf.dtype) for name, leaf in leaves if not leaf.is_floating_point() and not leaf.is_complex()]
    if integers:
        name, dtype = integers[0]
    else:
        name, dtype = ("a tensor", "an integer or bool")
    return LeafMismatchError(
        f"jit: the function takes a gradient by integers, such as {name}.",
        expected="leaves of a floating-point dtype",
        got=str(dtype).removeprefix("torch."),
        hint="params, buffers = tdf.split(tree) separates buffers; tdf.grad leaves integers out.",
    )


def named_leaves(args: tuple[Any, ...], kwargs: dict[str, Any], *kinds: type) -> list[tuple[str, Any]]:
    """Return (name, value) for the leaves of these classes among the arguments, in their order."""
    found: list[tuple[str, Any]] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        for path, leaf in flatten_with_paths(value)[0]:
            if isinstance(leaf, kinds):
                found.append((f"argument {key}{torch_pytree.keystr(path)}", leaf))
    return found


def _data_error(err: BaseException) -> UnsupportedError:
    hint = "use torch.where and masks instead of `if`, .item() and boolean indexing, or jit less."
    if any(["torch.distributions." in str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(err.__traceback__)]):
        hint = "make the distribution with validate_args=False: it checks its arguments by their values."
    return UnsupportedError(
        "jit: the function uses the value of a tensor, which a trace does not have.", got=user_line(err), hint=hint
    )


_MAX_SEARCHED = 20_000
_MAX_NAMED = 10


def name_of(
    target: object,
    environment: Environment,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> str | None:
    """Search the values that the function can reach for one and return how it is reached."""
    return next((repr(name) for name, value in _walk(environment, args, kwargs) if _is_same(value, target)), None)


def _walk(environment: Environment, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of those that the function can reach, breadth first."""
    todo = list(environment.named_values())
    todo += [(f"argument {i}", value) for i, value in enumerate(args)]
    todo += [(f"argument {name}", value) for name, value in kwargs.items()]
    seen: set[int] = set()
    for name, value in todo:
        yield name, value
        if id(value) not in seen and len(todo) < _MAX_SEARCHED:
            seen.add(id(value))
            todo += _reachable(name, value)


def _list_constants(reached: Iterable[tuple[str, object]]) -> set[int]:
    """Return the storages of the tensors that the modules of pure functions hold in plain attributes."""
    found: set[int] = set()
    for _, value in reached:
        if isinstance(value, Apply):
            for _, constants in value.copies():
                found.update(map(storage_id, constants))
    return found


def _is_same(value: object, target: object) -> bool:
    """Return whether a value is the target, or a tensor that shares its memory."""
    if isinstance(value, torch.Generator) and isinstance(target, torch.Generator):
        # An operation is given another Python object for it.
        return value._cdata == target._cdata  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, Tensor) and isinstance(target, Tensor) and value is not target:
        with suppress(RuntimeError, NotImplementedError):
            return value.numel() > 0 and storage_id(value) == storage_id(target)
    return value is target


def _reachable(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return (name, value) of the parts of a value."""
    if isinstance(value, TensorCollection):
        return [(f"{name}[{'.'.join(path)!r}]", leaf) for path, leaf in iter_leaves(value)]
    if isinstance(value, Apply):
        return [(name, module) for module, _ in value.copies()]
    if isinstance(value, nn.Module):
        named = [*value.named_parameters(), *value.named_buffers(), *value.named_children(), *vars(value).items()]
        return [(f"{name}.{key}", item) for key, item in named]
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, type):
        return _tensor_defaults(name, value)
    if isinstance(value, ModuleType):
        return []
    found = [(f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items()]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        found += [(f"{name}.{variable}", contents(cell)) for variable, cell in cells]
    return found


# Any: a class.
def _tensor_defaults(name: str, cls: Any) -> list[tuple[str, Any]]:
    """Return the tensors that are defaults of the fields of a typed class."""
    if not is_dataclass(cls):
        return []
    return [(f"{name}.{field.name}", field.default) for field in fields(cls) if isinstance(field.default, Tensor)]
