"""Recomputation: `checkpoint` makes a function keep its inputs for the derivative, and run again there.

Outside of transforms this is `torch.utils.checkpoint`, which works by hooks on saved tensors. `torch.func` has no such
hooks. Inside it the function runs once under a mode that finds the tensors it reads besides its arguments. One node of
autograd, which holds these inputs, takes the place of the graph of its results. The node's derivative is a function of
the same kind, so derivatives of any order keep only inputs. Values that leave in another way, by a list or an
attribute, keep the graph of the first run.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from tdfunc.core.context import in_functorch, is_compiling, is_fake, is_random, is_recording
from tdfunc.core.errors import UnsupportedError
from tdfunc.modules.batching import Batching
from tdfunc.modules.named import answered_by
from tdfunc.modules.random import seeded

# Tensors to tensors.
Flat: TypeAlias = Callable[..., tuple[Tensor, ...]]
# Arguments that torch.utils.checkpoint.checkpoint takes itself.
_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
# They hold no tensors.
_ATOMS = (int, float, str, torch.dtype, torch.device, torch.Size, type(None))


P = ParamSpec("P")
R = TypeVar("R")


def checkpoint(fn: Callable[P, R]) -> Callable[P, R]:
    """Return the function with its intermediate results computed again for the derivative, not kept.

    It works where `torch.utils.checkpoint` does, and inside `torch.func` transforms: `grad`, `vjp`, `jacrev`, `vmap`,
    nested, and under `jit`. Tensors that the function reads besides its arguments get their gradients, and so do
    tensors that leave by a list or an attribute; these keep what their derivative needs. Where derivatives are taken
    forward (`jvp`, `jacfwd`, `hessian`) and in transforms inside `torch.compile`, the function runs as it is: that
    saves no memory, and gives the same numbers.

    Args:
        fn: A function that computes the same a second time. The second run repeats the draws of the first, from
            torch's default generators or by `rng=`, and its settings of autocast.

    Returns:
        A function with the arguments and results of `fn`: trees, tensors and anything else.

    Raises:
        UnsupportedError: A variable of an enclosing function is another object at the second run. In a transform, `fn`
            writes to an argument, or reads a tensor with a gradient that the second run cannot be given: inside
            another transform, inside an object that torch's pytree does not open, or another tensor each time. In a
            trace, `fn` draws from torch's default generator, which a replay would not repeat.

    Source:
        Chen et al., Training Deep Nets with Sublinear Memory Cost (2016); `jax.checkpoint`.

    Examples:
        >>> block = tdf.checkpoint(lambda p, x: torch.tanh(x @ p["w"]))
        >>> params, x = TensorDict({"w": torch.eye(2)}), torch.zeros(3, 2)
        >>> torch.func.grad(lambda p: block(p, x + 1).sum())(params)["w"].shape
        torch.Size([2, 2])
    """

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or (in_functorch() and _runs_plainly()):
            return fn(*args, **kwargs)
        if is_compiling():
            return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)
        again = _with_same_variables(fn)
        if in_functorch():
            return _in_transform(_unmarked(again), args, kwargs)

        # Options of torch's have names that keywords of fn may have.
        def bound(*args: Any) -> Any:
            with _no_draws_in_a_trace():
                return again(*args, **kwargs)

        return torch_checkpoint.checkpoint(bound, *args, use_reentrant=False)

    return run


def stand_in(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
    """Do as `torch.utils.checkpoint.checkpoint` does, also inside transforms.

    Private copies of modules have it in attributes. Unlike a call by torch's name, it works in compiled transforms.
    """
    if not in_functorch():
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
    own = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    return checkpoint(function)(*args, **own)


def recomputing_by_name() -> contextlib.AbstractContextManager[None]:
    """Let this thread's calls of `torch.utils.checkpoint.checkpoint` by its name also work inside transforms."""
    return answered_by(_answer)


def _answer(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if in_functorch():
        return stand_in(function, *args, **kwargs)
    with answered_by(None):
        return torch_checkpoint.checkpoint(function, *args, **kwargs)


_MARKS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # pyright: ignore[reportAttributeAccessIssue]


class Unmarked(TorchFunctionMode):
    """Inside transforms, `x.requires_grad_()` and `x.requires_grad = True` do nothing.

    Models that checkpoint mark the output of their embeddings so, or T5 its position bias, for the reentrant kind.
    torch refuses to do it there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A transform that begins inside marks its tensors itself, with leave of functorch.
        if func in _MARKS and in_functorch() and not _functorch.get_inplace_requires_grad_allowed():
            return args[0]
        return func(*args, **(kwargs or {}))


def _unmarked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose runs are `Unmarked`."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with Unmarked():
            return function(*args, **kwargs)

    return run


def _runs_plainly() -> bool:
    # Tangents of what the function computes without a graph would lack theirs.
    return is_compiling() or forward_ad._current_level >= 0


def _is_symbolic() -> bool:
    return is_recording() or is_fake(None)


def _with_same_variables(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a check, at each run, that variables of enclosing functions are as they are now."""
    cells = getattr(fn, "__closure__", None) or ()
    now = [_read(cell) for cell in cells]

    def run(*args: Any, **kwargs: Any) -> Any:
        for place, (cell, value) in enumerate(zip(cells, now, strict=True)):
            if _read(cell) is not value:
                raise UnsupportedError(
                    f"checkpoint: the variable {fn.__code__.co_freevars[place]!r} changed before the second run.",
                    expected="the object that it was at the call",
                    got=type(_read(cell)).__name__,
                    hint="pass it as an argument, or bind it: lambda x, layer=layer: layer(x).",
                )
        return fn(*args, **kwargs)

    return run


def _read(cell: Any) -> Any:
    try:
        return cell.cell_contents
    # A variable that is assigned later.
    except ValueError:
        return None


class _NoDraws(TorchDispatchMode):
    """Raises at a draw from a default generator."""

    # Seen and passed on, like every other operation.
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and is_random(func, args, kwargs):
            raise UnsupportedError(
                f"checkpoint: the function draws random numbers in a trace ({func}).",
                expected="draws by a key, which are the same when the function runs again",
                got="a draw from torch's default generator, which each replay would do twice",
                hint="tdf.random, or rng=key.",
            )
        return func(*args, **kwargs)


def _no_draws_in_a_trace() -> contextlib.AbstractContextManager[Any]:
    if _is_symbolic():
        return _NoDraws()
    return contextlib.nullcontext()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif not isinstance(value, _ATOMS):
            yield from [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _layers(tensor: Tensor) -> list[Tensor]:
    """Return a tensor and those inside it, of one transform after the other.

    An outer function that is recomputed must not take what is asked of them for reads.
    """
    found = [tensor]
    while _functorch.is_functorch_wrapped_tensor(found[-1]):
        found.append(_functorch.get_unwrapped(found[-1]))
    return found


def _version(tensor: Tensor) -> list[int]:
    with torch._C.DisableTorchFunction():
        return [0 if layer.is_inference() else layer._version for layer in _layers(tensor)]


def _has_gradient(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return any([layer.requires_grad for layer in _layers(tensor)])


def _edges(tensors: Iterable[Tensor]) -> list[tuple[Any, int]]:
    """Return where tensors leave the graphs of autograd, for all transforms."""
    layers = [layer for tensor in tensors for layer in _layers(tensor)]
    with torch._C.DisableTorchFunction():
        return [(layer.grad_fn, layer.output_nr) for layer in layers if layer.grad_fn is not None]


def _sequence_number() -> int:
    """Return the number of the next node of a graph; each thread counts its own."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


class _Found(NamedTuple):
    """A tensor that a function reads besides its arguments, and how it was before that."""

    tensor: Tensor
    version: list[int]
    # None of a tensor with a gradient.
    copy: Tensor | None


class _Outside(TorchFunctionMode):
    """Finds the tensors of outer transforms and graphs that a function reads besides the given ones.

    At a second run operations get other tensors in place of some.
    """

    def __init__(self, given: Sequence[Tensor], old: "Sequence[weakref.ref[Tensor]]" = ()) -> None:
        super().__init__()
        self.found: dict[int, _Found] = {}
        # To be raised after the run: operators turn it into another error.
        self.unserved: UnsupportedError | None = None
        # By identity, since comparing tensors computes. The results of calls are held weakly.
        self._given = {id(tensor): tensor for tensor in given}
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._level = _functorch.maybe_current_level() or 0
        self._start = _sequence_number()
        self._is_second_run = bool(old)
        # Those that are gone are not read, and new tensors may have their ids.
        self._alive: list[Tensor] = []
        self._swaps: dict[int, Tensor] = {}
        for ref, new in zip(old, given, strict=False):
            tensor = ref()
            if tensor is not None:
                self._alive.append(tensor)
                self._swaps[id(tensor)] = new

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._swaps and any([id(value) in self._swaps for value in _tensors((*args, *kwargs.values()))]):
            args, kwargs = tree_map_only(Tensor, self.swap, (args, kwargs))
        for value in _tensors((*args, *kwargs.values())):
            if not self._is_known(value):
                self._add(value)
        out = func(*args, **kwargs)
        for value in _tensors((out,)):
            if id(value) not in self._given and id(value) not in self.found:
                self._made[id(value)] = weakref.ref(value)
        return out

    def swap(self, tensor: Tensor) -> Tensor:
        return self._swaps.get(id(tensor), tensor)

    def made(self, tensor: Tensor) -> bool:
        """Return whether a tensor is made in this run: the result of a call, or, after a transform, by its graph."""
        ref = self._made.get(id(tensor))
        if ref is not None and ref() is tensor:
            return True
        return any([self._start <= node._sequence_nr() < _sequence_number() for node, _ in _edges([tensor])])

    def _is_known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._given or id(tensor) in self.found or self.made(tensor)

    def enters_elsewhere(self, results: Sequence[Tensor], operands: Sequence[Tensor]) -> bool:
        """Return whether results depend on something with a gradient that is not among the operands."""
        todo = _edges(results)
        known = set(_edges(operands))
        seen = set[Any]()
        leaves = [layer for tensor in operands for layer in _layers(tensor)]
        while todo:
            edge = todo.pop()
            node = edge[0]
            if node is None or edge in known or node in seen:
                continue
            seen.add(node)
            # Only the node of a leaf has a variable; it has no number.
            variable = getattr(node, "variable", None)
            if variable is not None:
                is_outside = not any([variable is leaf for leaf in leaves])
            else:
                is_outside = node._sequence_nr() < self._start
            if is_outside:
                return True
            todo.extend(node.next_functions)
        return False

    def _add(self, tensor: Tensor) -> None:
        # A transform in the function makes its tensors unseen.
        inner = next(layer for layer in _layers(tensor) if _functorch.maybe_get_level(layer) <= self._level)
        has_gradient = _has_gradient(inner)
        if inner is not tensor:
            if has_gradient and not self._is_known(inner):
                self._refuse("gives a tensor from outside to its own transform", inner)
        elif self._is_second_run:
            if _edges([tensor]):
                self._refuse("reads another tensor when it runs again", tensor)
        elif has_gradient or _functorch.is_functorch_wrapped_tensor(tensor):
            copy = None if has_gradient else tensor.clone()
            self.found[id(tensor)] = _Found(tensor, _version(tensor), copy)

    def _refuse(self, fault: str, tensor: Tensor) -> None:
        """Note the error for a tensor that the second run cannot be given, unless there is one."""
        if self.unserved is None:
            self.unserved = _unserved(fault, tensor)


def _unserved(fault: str, tensor: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"checkpoint: the function {fault}.",
        expected="its arguments, or results in it",
        got=f"a tensor with a gradient, shape {list(tensor.shape)}, {tensor.dtype}",
        hint="pass it as an argument of the function.",
    )


class _Surroundings:
    """What a function runs under, for another run: generators, autocast, default device, key and rules of batching."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kinds = {"cpu", *[t.device.type for t in tensors]} - {"meta"}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        ]
        self._cache = torch.is_autocast_cache_enabled()
        modes = _get_current_function_mode_stack()
        # The innermost, if there is one.
        self._default_device = [mode for mode in modes if isinstance(mode, DeviceContext)][-1:]
        self._rules = [mode for mode in modes if isinstance(mode, Batching)][-1:]
        # The key may be of a transform: it is among the inputs of the second run.
        self.keys: list[Tensor] = []
        self._draws: int | None = None
        for mode in modes:
            if isinstance(mode, seeded):
                self.keys = [mode.key]
                self._draws = mode.count
        self._symbolic = _is_symbolic()
        self._kind = next(iter(kinds - {"cpu"}), "cpu")
        if not self._symbolic:
            self._state = torch.get_rng_state()
            self._devices, self._states = torch_checkpoint.get_device_states(*tensors)

    @contextlib.contextmanager
    def restored(self, keys: Sequence[Tensor]) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            if self._symbolic:
                stack.enter_context(_NoDraws())
            else:
                stack.enter_context(torch.random.fork_rng(self._devices, device_type=self._kind))
                torch.set_rng_state(self._state)
                torch_checkpoint.set_device_states(self._devices, self._states, device_type=self._kind)
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._cache))
            for mode in self._default_device:
                stack.enter_context(mode)
            if self._draws is not None:
                stack.enter_context(seeded(keys[0], self._draws))
            # The rules see a call first; their draws come to the key.
            for mode in self._rules:
                stack.enter_context(mode)
            yield


def _in_transform(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    call = _Call(fn, args, kwargs)
    out = call.run()
    call.check_unwritten()
    return call.attach(out)


class _Call:
    """A call of a function in a transform: its run, and the tensors that its derivative needs."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._fn = fn
        self._args = args
        self._kwargs = kwargs
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self._places = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self._inputs = [self._leaves[i] for i in self._places]
        self._surroundings = _Surroundings(self._inputs)
        self._versions = list(map(_version, self._inputs))
        self._outside = _Outside(self._inputs)
        # The tensors that the run read besides its arguments, and the places of those that it wrote: buffers.
        self._found: list[_Found] = []
        self._written: list[int] = []

    def run(self) -> Any:
        """Return the results, with a graph: values that leave by lists and attributes have their gradients.

        `attach` drops the graph of the others.
        """
        with self._outside, _no_draws_in_a_trace():
            out = self._fn(*self._args, **self._kwargs)
        if self._outside.unserved is not None:
            raise self._outside.unserved
        self._found = list(self._outside.found.values())
        self._written = [i for i, found in enumerate(self._found) if _version(found.tensor) != found.version]
        return out

    def check_unwritten(self) -> None:
        """Raise if the run wrote to an argument or to a tensor with a gradient."""
        is_input_written = list(map(_version, self._inputs)) != self._versions
        if is_input_written or any([self._found[i].copy is None for i in self._written]):
            raise UnsupportedError(
                "checkpoint: the function writes to one of its arguments, or to a tensor with a gradient.",
                expected="inputs that are the same when the function runs again",
                hint="clone what is written: x.clone().add_(1), or x + 1.",
            )

    def attach(self, out: Any) -> Any:
        """Return the results, where one node that runs the function again takes the place of their graph."""
        results, spec = tree_flatten(out)
        # Others leave as they are: they have no derivative, or are from outside.
        chosen = [i for i, result in enumerate(results) if self._is_made(result)]
        made = [results[i] for i in chosen]
        operands = self._operands()
        if self._outside.enters_elsewhere(made, operands):
            raise _unserved("depends on a tensor from outside that no torch function is given", made[0])
        read = [found.tensor for found in self._found]
        again = _SecondRun(
            fn=self._fn,
            leaves=[None if isinstance(leaf, Tensor) else leaf for leaf in self._leaves],
            spec=self._spec,
            places=self._places,
            old=list(map(weakref.ref, (*self._inputs, *read))),
            written=self._written,
            chosen=chosen,
            surroundings=self._surroundings,
        )
        new = _attach(again, [tensor.detach() for tensor in made], operands)
        for place, tensor in zip(chosen, new, strict=True):
            results[place] = tensor
        return tree_unflatten(results, spec)

    def _is_made(self, result: Any) -> bool:
        return isinstance(result, Tensor) and self._outside.made(result) and _has_gradient(result)

    def _operands(self) -> list[Tensor]:
        """Return everything that the second run is given: the inputs, the tensors read, and the key."""
        read = [found.tensor for found in self._found]
        for i in self._written:
            # The second run begins with the numbers that the first one began with.
            read[i] = cast("Tensor", self._found[i].copy)
        operands = [*self._inputs, *read, *self._surroundings.keys]
        # Operations of this run got what the second run of an outer function puts in place of them.
        for mode in reversed(_get_current_function_mode_stack()):
            if isinstance(mode, _Outside):
                operands = list(map(mode.swap, operands))
        return operands


# Compared by identity, and no NamedTuple, which torch's pytree would open.
@dataclass(frozen=True, eq=False)
class _SecondRun:
    """Runs a function again, on inputs, the other tensors that it reads, and the key.

    It holds none of them: only the node does.
    """

    fn: Callable[..., Any]
    # The leaves of the arguments, with None in the places of tensors.
    leaves: list[Any]
    spec: Any
    places: list[int]
    # The inputs and the tensors read in the first run. Weakly: results of transforms in the function are also among
    # them, and nothing else holds these.
    old: "list[weakref.ref[Tensor]]"
    # Those that the function writes, by their places among the tensors read.
    written: list[int]
    # The results with a derivative, by their places.
    chosen: list[int]
    surroundings: _Surroundings

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        n_inputs = len(self.places)
        inputs = tensors[:n_inputs]
        read = list(tensors[n_inputs : len(self.old)])
        keys = tensors[len(self.old) :]
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, inputs, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        for i in self.written:
            # The operands keep their numbers for another run.
            read[i] = read[i].clone()
        outside = _Outside((*inputs, *read), self.old)
        with self.surroundings.restored(keys), recomputing_by_name(), outside:
            results = tree_leaves(self.fn(*args, **kwargs))
        if outside.unserved is not None:
            raise outside.unserved
        return tuple([outside.swap(results[i]) for i in self.chosen])


def _attach(function: Flat, results: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return results of a function, computed without a graph, as results of a node that runs it again."""
    if not results:
        return ()
    return _Node.apply(function, len(results), *results, *operands)  # pyright: ignore[reportReturnType]


# Any: the signatures of autograd.Function.
class _Node(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(function: Flat, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple([tensor.detach() for tensor in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.function, ctx.count, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.count :])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        first = 2 + ctx.count
        needed = [i for i, yes in enumerate(ctx.needs_input_grad[first:]) if yes]
        operands = tuple(map(_revive, (*cotangents, *ctx.saved_tensors)))
        pull = _pullback(ctx.function, ctx.count, needed)
        if not torch.is_grad_enabled() or _runs_plainly():
            found = pull(*operands)
        else:
            with torch.no_grad():
                found = pull(*operands)
            found = _attach(pull, found, operands)
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, grad in zip(needed, found, strict=True):
            grads[first + place] = grad
        return tuple(grads)


def _revive(tensor: Tensor) -> Tensor:
    """Return a tensor without the wrappers of levels that are over, which cannot enter a new level."""
    inner = _functorch.unwrap_if_dead(tensor)
    if inner is not tensor:
        return _revive(inner)
    if not _functorch.is_batchedtensor(tensor):
        return tensor
    inner = _functorch.get_unwrapped(tensor)
    new = _revive(inner)
    if new is inner:
        return tensor
    return _functorch._add_batch_dim(new, _functorch.maybe_get_bdim(tensor), _functorch.maybe_get_level(tensor))


def _pullback(function: Flat, count: int, needed: Sequence[int]) -> Flat:
    """Return the function of cotangents and operands for the gradients by the operands at the places needed."""

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        cotangents = tensors[:count]
        operands = list(tensors[count:])

        def part(*primals: Tensor) -> tuple[Tensor, ...]:
            given = list(operands)
            for place, primal in zip(needed, primals, strict=True):
                given[place] = primal
            return function(*given)

        pull = torch.func.vjp(part, *[operands[i] for i in needed])[1]
        return pull(cotangents)

    return run
