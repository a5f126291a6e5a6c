"""`functional`: a module as a pure function of its parameters and buffers, safe under threads and transforms."""

import copy as copying
import inspect
import operator
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Size, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from tdfunc.core.context import in_functorch, is_compiling, is_tracing
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.shapes import EMPTY
from tdfunc.core.types import Path
from tdfunc.core.walk import replace
from tdfunc.modules.extract import from_module, split
from tdfunc.modules.plan import Spec, extra_states, extra_values
from tdfunc.modules.random import Seed, seeded
from tdfunc.modules.skeleton import Skeleton, Template, make_template
from tdfunc.modules.slots import unwrap
from tdfunc.modules.straight import Straight
from tdfunc.modules.watch import Originals, Watch
from tdfunc.ops.foreach import can_foreach
from tdfunc.ops.structure import entries, keep_leaves

_RESERVED = ("buffers", "rng")
_VERSION = operator.attrgetter("_version")
# The version of a fresh clone.
_NEW = torch._foreach_clone([torch.zeros(())])[0]._version  # pyright: ignore[reportPrivateImportUsage]


class Apply:
    """A module as a pure function: `apply(params, *inputs, buffers=, rng=)`.

    Made by `functional`. Each call runs on a private copy of the module, so calls from many threads and inside
    transforms do not meet, and neither the module nor the trees are written. `params` may carry the buffers too.
    """

    def __init__(
        self, template: Template, spec: Spec, reserved: Sequence[str], originals: Originals | None = None
    ) -> None:
        self._template, self._spec, self._reserved = template, spec, tuple(reserved)
        # The weights that the first call is watched for.
        self._originals = originals
        self._pool: deque[Skeleton] = deque()
        # Dynamo and make_fx cannot trace a deep copy: one skeleton stands ready, and compiled regions have their own.
        self._pool.append(self._new_skeleton())
        self._traced = self._new_skeleton()
        # The code that puts leaves into the slots of skeletons, by those slots.
        self._fillers: dict[Hashable, Straight] = {}
        # Buffers of norms in evaluation mode, which need no clone; None until a call has shown that it wrote to none.
        self._quiet: _Quiet | None = None
        # Places of the parameters that forward writes, which need a clone; None until a watched call has shown them.
        self._written: tuple[int, ...] | None = None

    def _new_skeleton(self) -> Skeleton:
        return Skeleton(self._template, self._spec.order, self._spec.first)

    def __reduce__(self) -> Any:
        return Apply, (self._template, self._spec, self._reserved)

    def __copy__(self) -> "Apply":
        return self

    def __deepcopy__(self, memo: Any) -> "Apply":
        return self

    def __repr__(self) -> str:
        mode = "train" if self.training else "eval"
        return f"Apply({self._spec.name}, {mode}, {len(self._spec.order)} leaves)"

    @property
    def training(self) -> bool:
        """The mode of the module's root."""
        return self._template.module.training

    @property
    def module(self) -> nn.Module:
        """The structure that is run, with poison in place of weights: for reading hyperparameters."""
        return self._template.module

    def train(self, mode: bool = True) -> "Apply":
        """Return an apply in which every submodule is in training mode (or not)."""
        return Apply(self._template.in_mode(mode), self._spec, self._reserved, self._originals)

    def eval(self) -> "Apply":
        """Return an apply in which every submodule is in evaluation mode."""
        return self.train(False)

    def __call__(self, params: Any, /, *args: Any, buffers: Any = None, rng: Seed = None, **kwargs: Any) -> Any:
        """Return what the module's forward returns with these parameters.

        Args:
            params: The tree of parameters, or of parameters and buffers.
            *args: What forward takes.
            buffers: The tree of buffers, unless `params` holds them.
            rng: A seed or generator for the random functions that forward calls; without it torch's default
                generator is drawn from, as the module would.
            **kwargs: What forward takes by keyword.

        Raises:
            TreeStructureError: A leaf is missing or unknown; the message names it.
            LeafMismatchError: A leaf has the wrong shape.
            TieError: Two paths of one tensor of the module have different leaves.
            LeakError: Forward used a weight that it did not get from the trees.
            UnsupportedError: Forward has an argument that is called as one of ours, or draws past `rng`.
        """
        if self._reserved:
            self._refuse_names(self._reserved)
        return self._run(params, buffers, args, kwargs, rng)[0]

    def call(
        self,
        params: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        buffers: Any = None,
        rng: Seed = None,
    ) -> Any:
        """`apply` with forward's arguments as a tuple and a dict, whatever they are called."""
        return self._run(params, buffers, tuple(args), dict(kwargs or {}), rng)[0]

    def with_buffers(self, params: Any, buffers: Any, /, *args: Any, rng: Seed = None, **kwargs: Any) -> Any:
        """Return forward's output and the buffers after it; the given ones are not written.

        This is how BatchNorm trains under `vmap` and `grad`: the statistics are an output.

        Args:
            params: The tree of parameters, or of parameters and buffers.
            buffers: The tree of buffers, or None if `params` holds them; then that tree is returned with new buffers.
            *args: What forward takes.
            rng: As for `apply`.
            **kwargs: What forward takes by keyword.

        Returns:
            The pair (output, buffers): those that were given. What forward registers anew, and a buffer that was None
            and that it fills, are not among them.

        Raises:
            UnsupportedError: Forward deleted a buffer, or set it to None.

        Examples:
            >>> apply, params, buffers = tdf.functional(nn.BatchNorm1d(3))
            >>> _, new = apply.with_buffers(params, buffers, torch.randn(8, 3))
            >>> int(new["num_batches_tracked"]), int(buffers["num_batches_tracked"])
            (1, 0)
        """
        if "rng" in self._reserved:
            self._refuse_names(["rng"])
        out, store, states = self._run(params, buffers, args, kwargs, rng, keep=True)
        new = self._spec.rebuild_buffers(params, buffers, store)
        return out, replace(new, states) if states else new

    def rebuild_buffers(self, params: Any, buffers: Any, leaves: list[Any]) -> Any:
        """Return the tree that held the buffers, around new ones in plan order."""
        return self._spec.rebuild_buffers(params, buffers, leaves)

    def leaves(self, params: Any, buffers: Any, lead: Size = EMPTY) -> list[Any]:
        """Return the leaves that a call binds, in plan order; `lead` is what stacked trees have before each shape.

        Raises:
            UnsupportedError: The trees hold extra state that differs from the module's: leaves cannot carry it.
        """
        for path, values in extra_values(params, buffers).items() if self._traced.owners else ():
            state = self._traced.owners[path].get_extra_state()
            if not all(_same(value, state) for value in values):
                raise UnsupportedError(
                    f"apply: the extra state {dotted(path)!r} of a member is not that of the module.",
                    expected=f"{state!r} for all members",
                    got=f"{values[:3]!r}",
                    hint="run the members one by one: apply(tree[i], x) sets each one's extra state.",
                )
        return self._spec.leaves(params, buffers, lead)

    # -- one call -----------------------------------------------------------------------------------------------

    def _refuse_names(self, names: Sequence[str]) -> NoReturn:
        raise UnsupportedError(
            f"apply: forward of {self._spec.name} has an argument called {' and '.join(map(repr, names))}.",
            expected="names that apply does not use itself",
            hint="use apply.call(params, args, kwargs, buffers=, rng=).",
        )

    def _run(self, params: Any, buffers: Any, args: Any, kwargs: Any, rng: Seed, keep: bool = False) -> Any:
        leaves = self._spec.leaves(params, buffers)
        mode = seeded(rng, strict=True) if rng is not None else None
        states = extra_states(params, buffers) if self._traced.owners else {}
        return self._bind_and_run(leaves, states, args, kwargs, mode, keep)

    def run_leaves(
        self, leaves: list[Any], args: Any, kwargs: Any, rng: Any = None, *, keep: bool = False
    ) -> tuple[Any, list[Any]]:
        """Run on leaves in plan order (what `Ensemble` maps over); return the output and, if kept, the new buffers."""
        owners = self._traced.owners if keep else {}
        states = {path: copying.deepcopy(owner.get_extra_state()) for path, owner in owners.items()}
        mode = seeded(rng) if rng is not None else None
        out, new, after = self._bind_and_run(leaves, states, args, kwargs, mode, keep)
        for path, state in after.items():
            if not _same(state.value, states[path]):
                raise UnsupportedError(
                    f"Ensemble: forward changed the extra state {dotted(path)!r} of a member.",
                    expected=f"{states[path]!r}, as before",
                    got=repr(state.value),
                    hint="run the members one by one: apply.with_buffers(tree[i], None, x) returns it.",
                )
        return out, new

    def _bind_and_run(
        self, leaves: list[Any], states: dict[Path, Any], args: Any, kwargs: Any, rng: Any, keep: bool
    ) -> tuple[Any, list[Any], dict[Path, Any]]:
        compiling = is_compiling()
        if not compiling and parametrize._cache_enabled:
            raise _cached_parametrization()
        plain = not compiling and len(leaves) > self._spec.n_params and not in_functorch()
        quiet = self._quiet if plain else None
        kept = quiet.pick(leaves) if quiet is not None and quiet.places else ()
        version = _version(kept)
        # Inductor removes the clones that nothing writes; what was learned would be a guard.
        written = None if compiling else self._written
        bound = self._with_own(leaves, written, quiet if version is not None else None)
        skeleton = self._traced if compiling else self._take()
        try:
            if compiling:
                skeleton.bind_traced(bound)
            else:
                skeleton.bind(bound, self._fillers)
            for path, value in states.items():
                # Forward may write to it; the tree keeps its own.
                skeleton.owners[path].set_extra_state(copying.deepcopy(value))
            if compiling or written is not None:
                out = self._forward(skeleton.module, args, kwargs, rng)
            else:
                out = self._first_forward(leaves, bound, skeleton.module, args, kwargs, rng)
            new = self._read_back(skeleton) if keep else []
            after = _states_of(skeleton, states) if keep else {}
            if plain and quiet is None:
                self._quiet = self._unwritten(skeleton, bound)
        except Exception as err:
            if kept and version is not None and _version(kept) != version:
                raise self._late_write() from err
            raise
        finally:
            if compiling:
                skeleton.reset_traced()
            else:
                skeleton.reset()
                self._pool.append(skeleton)
        if kept and version is not None and _version(kept) != version:
            raise self._late_write()
        return out, new, after

    def _with_own(self, leaves: list[Any], written: tuple[int, ...] | None, quiet: "_Quiet | None") -> list[Any]:
        """Return the leaves with what forward may write to cloned: all buffers but the quiet, and such parameters."""
        n = self._spec.n_params
        bound = leaves
        if len(leaves) > n:
            if quiet is None or not quiet.places:
                bound = leaves[:n] + _clones(leaves[n:])
            elif quiet.others:
                bound = list(leaves)
                for i, clone in zip(quiet.others, _clones([leaves[i] for i in quiet.others]), strict=True):
                    bound[i] = clone
        if written is None:
            return list(map(_own, leaves[:n])) + bound[n:]
        if written:
            bound = list(bound)
            for i in written:
                bound[i] = _own(leaves[i])
        return bound

    def _unwritten(self, skeleton: Skeleton, bound: list[Any]) -> "_Quiet":
        """Return which buffers belong to a norm in evaluation mode and were not written by the call that just ran."""
        n = self._spec.n_params
        try:
            norms = [i for store, name, i in skeleton.norms if store[name] is bound[i] and bound[i]._version <= _NEW]
        except RuntimeError:  # inference tensors do not count their versions
            norms = []
        if len(norms) < 2:  # itemgetter of one place returns no tuple; a norm has three buffers
            norms = []
        others = sorted(set(range(n, len(bound))) - set(norms))
        # Often those of all norms are all the buffers: the end of the list.
        pick = operator.itemgetter(*norms) if others and norms else operator.itemgetter(slice(n, None))
        return _Quiet(norms, others, pick if norms else _nothing)

    def _late_write(self) -> UnsupportedError:
        self._quiet = _Quiet([], [], _nothing)
        return UnsupportedError(
            f"apply: a buffer of a norm of {self._spec.name} was written during a call in evaluation mode.",
            expected="forwards that write to such statistics in training mode only, or at each call",
            got="a write to a given tensor that the first call did not make",
            hint="call again: from now on forward gets clones; or another thread wrote the tensor.",
        )

    def _read_back(self, skeleton: Skeleton) -> list[Any]:
        # Read from the module, not from the clones: forward may have registered a new tensor under the name.
        found = {i: store.get(name) for store, name, i in skeleton.targets}
        new = [found[i] for i in self._spec.buffer_places]
        if type(None) in map(type, new):
            path = next(path for path, leaf in zip(self._spec.buffers.paths, new, strict=True) if leaf is None)
            raise UnsupportedError(
                f"with_buffers: forward of {self._spec.name} left no tensor in the buffer {dotted(path)!r}.",
                expected="the buffers that the tree holds, with new values",
                got="None, or a buffer that was deleted",
                hint="apply(params, x, buffers=buffers) returns the output alone.",
            )
        return new

    def _forward(self, module: nn.Module, args: Any, kwargs: Any, rng: Any) -> Any:
        try:
            if rng is None:
                return module(*args, **kwargs)
            with rng:
                return module(*args, **kwargs)
        except RuntimeError as err:
            better = _explained(str(err))
            if better is None:
                raise
            raise better from err

    def _first_forward(
        self, leaves: list[Any], bound: list[Any], module: nn.Module, args: Any, kwargs: Any, rng: Any
    ) -> Any:
        """Run under a watch for the original weights and for writes to parameters; no later call pays for it."""
        if is_tracing():  # the next call will do
            return self._forward(module, args, kwargs, rng)
        given = [*leaves, *bound, *tree_leaves((args, kwargs))]
        originals = {} if self._originals is None else self._originals.storages(given)
        watch = Watch(originals, bound[: self._spec.n_params])
        with watch:
            out = self._forward(module, args, kwargs, rng)
        written = watch.written()
        if written is not None:
            self._written = tuple(sorted({*written, *self._traced.renormed}))
        return out

    def _take(self) -> Skeleton:
        try:
            return self._pool.pop()
        except IndexError:
            return self._new_skeleton()


class _Quiet(NamedTuple):
    """Places of the buffers that need no clone, and of the other buffers."""

    places: list[int]
    others: list[int]
    pick: Callable[[list[Any]], Any]


def _nothing(leaves: list[Any]) -> tuple[()]:
    return ()


def _version(tensors: Sequence[Any]) -> int | None:
    """Return a number that grows with every write to one of the tensors."""
    if not tensors:
        return 0
    try:
        return sum(map(_VERSION, tensors))
    except RuntimeError:  # inference tensors do not count their versions
        return None


def _states_of(skeleton: Skeleton, states: Mapping[Path, Any]) -> dict[Path, Any]:
    return {path: NonTensorData(copying.deepcopy(skeleton.owners[path].get_extra_state())) for path in states}


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    # Tensors and arrays have no single truth value.
    except (RuntimeError, ValueError, TypeError):
        return False


def _cached_parametrization() -> UnsupportedError:
    return UnsupportedError(
        "apply: called inside `torch.nn.utils.parametrize.cached()`.",
        expected="weights computed from the parameters given to this call",
        got="a cache that returns those of an earlier one",
        hint="leave the cached() block first.",
    )


def _explained(message: str) -> Exception | None:
    """Return a clearer error for what torch says of a module that cannot run in a transform."""
    if "Batch norm got a batched tensor as input while the running_mean or running_var" in message:
        return UnsupportedError(
            "apply: BatchNorm in training mode updates statistics that all members share.",
            expected="one set of buffers for each member",
            got="buffers that the vmap does not map",
            hint="map the buffers too (vmap over params and buffers, in_dims 0), or use apply.eval().",
        )
    # Of torch's own class: code that falls back to a loop catches RuntimeError.
    if "Batching rule not implemented for" in message:
        return error(
            RuntimeError,
            f"apply: {message.split(';')[0].rstrip('.')}.",
            expected="operations that torch.vmap can map (LSTM, GRU and LSTMCell are not among them)",
            hint='use tdfunc.Ensemble(apply, how="loop"), or call apply in a loop over the members.',
        )
    if "calling .item() on a Tensor" in message or "data-dependent control flow" in message:
        return error(
            RuntimeError,
            f"apply: forward needs the value of a tensor that differs between members. {message.splitlines()[0]}",
            expected="no .item(), float(tensor) or `if tensor:` (BatchNorm(momentum=None) has one)",
            hint='use tdfunc.Ensemble(apply, how="loop"), or call apply in a loop over the members.',
        )
    if "you can only change requires_grad flags of leaf variables" in message:
        return error(
            RuntimeError,
            "apply: forward turns off requires_grad of a given tensor.",
            expected="tensors that the caller gave, with the flags that they came with",
            hint="use self.weight.detach() in forward; or give a tree without requires_grad.",
        )
    if "forward AD" in message and "scaled_dot_product" in message:
        return error(
            NotImplementedError,
            "apply: torch's fused attention has no forward-mode derivative.",
            expected="operations with a forward-mode formula",
            got=message.split(" because ")[0],
            hint='load Hugging Face models with attn_implementation="eager", or use reverse mode.',
        )
    return None


def _clones(leaves: list[Any]) -> list[Any]:
    if can_foreach():
        return list(torch._foreach_clone(leaves))  # pyright: ignore[reportPrivateImportUsage]
    return [leaf.clone() for leaf in leaves]


def _own(leaf: Any) -> Any:
    """Return a clone that takes gradients if the leaf does, whatever the grad mode: forward may turn it on."""
    if not leaf.requires_grad or is_compiling():
        return leaf.clone()
    with torch.enable_grad():
        return leaf.clone()


def functional(module: nn.Module, *, copy: bool = True, call_only: bool = False) -> tuple[Apply, Any, Any]:
    """Return a module as a pure function, with its parameters and buffers as trees.

    `apply(params, x)` runs forward with the given trees on a private copy of the module's structure (its hooks,
    mode and hyperparameters as they are now), so it is safe under threads and transforms and changes nothing.

    The first call runs on copies of all parameters, to learn which of them forward writes in place; later calls copy
    those alone (and embeddings with `max_norm`, always). A forward that starts to write others later, or takes another
    branch that does, writes into the given tree: later calls are not watched, which would slow each one down.

    Args:
        module: Any module; one wrapped by `torch.compile` is unwrapped.
        copy: Whether the trees are copies, which training the module does not change; otherwise they share its
            storage. Either way they are detached.
        call_only: Accept a forward with an argument called `buffers` or `rng`; then only `apply.call` works.

    Returns:
        The function, the parameters and the buffers (extra state among them).

    Raises:
        UnsupportedError: Forward has a reserved argument name, or the module cannot be copied or is lazy.

    Source:
        The same idea as `torch.func.functional_call`, with the binding planned once.

    Examples:
        >>> apply, params, buffers = tdf.functional(nn.Linear(3, 2))
        >>> apply(params, torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """
    module = unwrap(module, "functional")
    reserved = _reserved_names(module)
    if reserved and not call_only:
        raise UnsupportedError(
            f"functional: forward of {type(module).__name__} has an argument called {reserved[0]!r}, "
            "which apply uses itself.",
            expected="other names than 'buffers' and 'rng'",
            got=f"forward{inspect.signature(module.forward)}",
            hint="functional(m, call_only=True) and apply.call(params, args, kwargs, buffers=, rng=).",
        )
    tree = detached(from_module(module), copy)
    params, rest = split(tree) if entries(tree) else (keep_leaves(tree, set()), tree)
    spec = Spec(type(module).__name__, params, rest, tree)
    return Apply(make_template(module), spec, reserved, Originals(module)), params, rest


def _reserved_names(module: nn.Module) -> list[str]:
    try:
        names = inspect.signature(module.forward).parameters
    # A forward written in C, or with a signature that Python cannot read.
    except (TypeError, ValueError):
        return []
    return [name for name in _RESERVED if name in names]


def detached(tree: Any, copy: bool) -> Any:
    """Return a tree of plain tensors without gradient history; a copy has its own extra state too."""
    new = tree.apply(lambda leaf: leaf.detach().clone() if copy else leaf.detach())
    states = extra_states(tree) if copy else {}
    return (
        replace(new, {path: NonTensorData(copying.deepcopy(value)) for path, value in states.items()})
        if states
        else new
    )
