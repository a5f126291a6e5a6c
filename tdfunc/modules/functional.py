"""`functional`: a module as a pure function of its parameters and buffers, safe under threads and transforms."""

import copy as copying
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Size, Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from tdfunc.core.context import (
    in_functorch,
    in_vmap,
    is_compiling,
    is_recording,
    is_tracing,
    outside,
    recorded_writes,
)
from tdfunc.core.errors import UnsupportedError, brief, error, explain, warn_user
from tdfunc.core.generators import default_generators, refuse_draws
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.objects import open_objects
from tdfunc.core.shapes import EMPTY
from tdfunc.core.types import Kind, Path
from tdfunc.core.walk import replace
from tdfunc.modules.batching import PACKED, Batching, reads_packed
from tdfunc.modules.checkpoint import Unmarked, recomputing_by_name
from tdfunc.modules.extract import from_module, split, unwrap
from tdfunc.modules.lost import Lost
from tdfunc.modules.plan import Spec, Straight, extra_values
from tdfunc.modules.poison import Originals, Watch, places_of, weak_weights
from tdfunc.modules.random import seeded
from tdfunc.modules.skeletons.copies import duplicate, find_hooked, is_recomputing, make_template
from tdfunc.modules.skeletons.skeleton import Skeleton
from tdfunc.modules.unsharded import unsharded
from tdfunc.ops.base.foreach import can_foreach
from tdfunc.ops.base.reading import entries
from tdfunc.random.draws import KeyLike, key_of

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

_RESERVED = ("buffers", "rng")
_PAST_KEY = (
    "call these functions, or pass a number that was drawn outside; without rng= generators are drawn from as the "
    'module would, and Ensemble(apply, how="loop") seeds torch\'s default one for each member.'
)
# Of torch, where members share the statistics that each would write.
_SHARED_STATISTICS = "Batch norm got a batched tensor as input while the running_mean or running_var"


class _Learned(NamedTuple):
    """The results of a forward's watched call: the places of the leaves that it may write, and if it hides writes."""

    params: list[int]
    buffers: list[int]
    hidden: bool
    # The places of all leaves that it wrote.
    written: frozenset[int]


class Apply:
    """A module as a pure function: `apply(params, *inputs, buffers=, rng=)`.

    Made by `functional`. Each call runs on a private copy of the module, so calls from many threads and inside
    transforms do not meet, and neither the module nor the trees are written. `params` may also hold the buffers.
    """

    def __init__(self, template: nn.Module, spec: Spec, reserved: Sequence[str], originals: Originals = ()) -> None:
        self._template = template
        self._spec = spec
        self._reserved = tuple(reserved)
        # The weights that the first call is watched for.
        self._originals = originals
        self._recomputes = is_recomputing(template)
        self._reads_packed = reads_packed(template)
        # The submodules with hooks of the backward pass, by their names.
        self._hooked = find_hooked(template)
        # The code that puts leaves into the slots of skeletons, by those slots.
        self._fillers: dict[Hashable, Straight] = {}
        # All that are alive.
        self._skeletons: list[weakref.ref[Skeleton]] = []
        # Dynamo and make_fx (torch 2.13) cannot trace a deep copy: one skeleton is ready, and compiled regions have
        # their own.
        self._pool = deque([self._new_skeleton()])
        self._traced = self._new_skeleton()
        # None until a watched call.
        self._learned: _Learned | None = None
        # Of parameters that forward writes.
        self._lost = Lost(self._spec.name)
        # Whether a call under a key was watched for other draws: from all generators (True), from foreign ones.
        self._keyed: set[bool] = set()

    def _new_skeleton(self) -> Skeleton:
        """Return another skeleton, the same in any call: none of the caller's modes reaches the copy."""
        with _alone():
            new = Skeleton(self._template, self._spec.order, self._spec.first, self._fillers)
        alive = [ref for ref in self._skeletons if ref() is not None]
        self._skeletons = [*alive, weakref.ref(new)]
        return new

    def __reduce__(self) -> Any:
        return Apply, (self._template, self._spec, self._reserved)

    def __deepcopy__(self, memo: Any) -> "Apply":
        return self

    def __repr__(self) -> str:
        mode = "train" if self.training else "eval"
        return f"Apply({self._spec.name}, {mode}, {len(self._spec.order)} leaves)"

    @property
    def training(self) -> bool:
        """The mode of the module's root."""
        return self._template.training

    @property
    def module(self) -> nn.Module:
        """The structure that is run, with poison in place of weights: for reading hyperparameters."""
        return self._template

    def copies(self) -> list[tuple[nn.Module, list[Tensor]]]:
        """Return the private copies that calls run on, each with its constants.

        These are tensors in plain attributes. A copy whose constants were written is not used again.
        """
        skeletons = [ref() for ref in self._skeletons]
        return [(skeleton.module, skeleton.constants()) for skeleton in skeletons if skeleton is not None]

    def train(self, mode: bool = True) -> "Apply":
        """Return an apply in which every submodule is in training mode, or with `mode=False` in evaluation mode."""
        return self._vary(lambda module: module.train(mode))

    def eval(self) -> "Apply":
        """Return an apply in which every submodule is in evaluation mode."""
        return self.train(False)

    def _vary(self, change: Callable[[nn.Module], object]) -> "Apply":
        """Return an apply of a copy whose modes or hyperparameters `change` writes; its weights hold no numbers."""
        with _alone():
            module = duplicate(self._template, {})
        change(module)
        return Apply(module, self._spec, self._reserved, self._originals)

    def __call__(
        self, params: Any, /, *args: Any, buffers: Any = None, rng: KeyLike | None = None, **kwargs: Any
    ) -> Any:
        """Run the module's forward with these parameters, and return its output.

        Args:
            params: The tree of parameters, or of parameters and buffers.
            *args: Arguments of forward.
            buffers: The tree of buffers, unless `params` holds them.
            rng: A random key for the random functions that forward calls, or a seed of one; a generator gives another
                key at each call. Without it forward draws from torch's default generator, as the module does.
            **kwargs: Keyword arguments of forward.

        Raises:
            TreeStructureError: A leaf is missing or unknown; the message names it.
            LeafMismatchError: A leaf has the wrong shape.
            TieError: Two paths of one tensor of the module have different leaves.
            LeakError: Forward used a weight that it did not get from the trees.
            UnsupportedError: Forward has an argument with the name of one of these, draws random numbers past `rng`, or
                makes a new parameter; or a module has backward hooks, which torch's vmap does not run.
        """
        if self._reserved:
            raise self._name_error(self._reserved)
        return self._run(params, buffers, args, kwargs, rng)[0]

    def call(
        self,
        params: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        buffers: Any = None,
        rng: KeyLike | None = None,
    ) -> Any:
        """`apply` with forward's arguments as a tuple and a dict, whatever they are called."""
        return self._run(params, buffers, tuple(args), dict(kwargs or {}), rng)[0]

    def with_buffers(self, params: Any, buffers: Any, /, *args: Any, rng: KeyLike | None = None, **kwargs: Any) -> Any:
        """Return forward's output and the buffers after it; the given ones are not written.

        This is how BatchNorm trains under `vmap` and `grad`: the statistics are an output.

        Args:
            params: The tree of parameters, or of parameters and buffers.
            buffers: The tree of buffers, or None if `params` holds them; then that tree is returned with new buffers.
            *args: Arguments of forward.
            rng: A random key, a seed or a generator, as for `apply`.
            **kwargs: Keyword arguments of forward.

        Returns:
            The pair (output, buffers). The buffers have the structure of the given ones: a buffer that forward adds, or
            that was None before, is left out.

        Raises:
            UnsupportedError: Forward deleted a buffer, or set it to None.

        Examples:
            >>> apply, params, buffers = tdf.functional(nn.BatchNorm1d(3))
            >>> _, new = apply.with_buffers(params, buffers, torch.randn(8, 3))
            >>> int(new["num_batches_tracked"]), int(buffers["num_batches_tracked"])
            (1, 0)
        """
        if "rng" in self._reserved:
            raise self._name_error(["rng"])
        out, store, states = self._run(params, buffers, args, kwargs, rng, keep=True)
        new = self._spec.rebuild_buffers(params, buffers, store)
        return out, replace(new, states) if states else new

    def rebuild_buffers(self, params: Any, buffers: Any, leaves: list[Any]) -> Any:
        """Return the tree that held the buffers, around new ones in plan order."""
        return self._spec.rebuild_buffers(params, buffers, leaves)

    @property
    def n_params(self) -> int:
        """The number of parameters among the leaves, which come first."""
        return self._spec.n_params

    @property
    def paths(self) -> list[Path]:
        """The paths of the leaves in plan order: parameters, then buffers."""
        return list(self._spec.order)

    @property
    def frozen(self) -> Set[Path]:
        """The paths of the parameters that did not require grad in the module."""
        return self._spec.frozen

    @property
    def written_buffers(self) -> list[Path]:
        """The paths of the buffers that the first call wrote."""
        written = set[int]() if self._learned is None else self._learned.written
        return [path for i, path in enumerate(self.paths) if i in written and i >= self.n_params]

    def leaves(self, params: Any, buffers: Any, lead: Size = EMPTY, shared: Set[Path] = frozenset()) -> list[Any]:
        """Return the leaves that a call binds, in plan order.

        Stacked trees have `lead` before each shape, except at the `shared` paths.

        Raises:
            UnsupportedError: The trees hold extra state that differs from the module's: leaves cannot carry it.
        """
        if self._traced.owners:
            self._check_states(params, buffers)
        return self._spec.leaves(params, buffers, lead, shared)

    def _check_states(self, params: Any, buffers: Any) -> None:
        for path, values in extra_values(params, buffers).items():
            state = self._traced.owners[path].get_extra_state()
            if not all(_same(value, state) for value in values):
                raise UnsupportedError(
                    f"apply: the extra state {dotted(path)!r} of a member differs from the module's.",
                    expected=f"{state!r} for all members",
                    got=f"{values[:3]!r}",
                    hint="run the members one by one: apply(tree[i], x) sets each one's extra state.",
                )

    # -- one call -----------------------------------------------------------------------------------------------

    def _name_error(self, names: Sequence[str]) -> UnsupportedError:
        return UnsupportedError(
            f"apply: forward of {self._spec.name} has an argument called {' and '.join(map(repr, names))}.",
            expected="names that apply does not use itself",
            hint="use apply.call(params, args, kwargs, buffers=, rng=).",
        )

    def _run(self, params: Any, buffers: Any, args: Any, kwargs: Any, rng: KeyLike | None, keep: bool = False) -> Any:
        leaves = self._spec.leaves(params, buffers)
        mode = None
        if rng is not None:
            mode = seeded(key_of(rng), strict=True)
        states = {}
        if self._traced.owners:
            states = {path: values[0] for path, values in extra_values(params, buffers).items()}
        return self._bind_and_run(leaves, states, args, kwargs, mode, keep)

    def run_leaves(
        self, leaves: list[Any], args: Any, kwargs: Any, mode: seeded | None = None, *, keep: bool = False
    ) -> tuple[Any, list[Any]]:
        """Run on leaves in plan order (`Ensemble` maps over them); return the output and, if kept, the new buffers."""
        owners = self._traced.owners if keep else {}
        states = {path: copying.deepcopy(owner.get_extra_state()) for path, owner in owners.items()}
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
        self, leaves: list[Any], states: dict[Path, Any], args: Any, kwargs: Any, mode: seeded | None, keep: bool
    ) -> tuple[Any, list[Any], dict[Path, Any]]:
        compiling = is_compiling()
        if not compiling and parametrize._cache_enabled:
            raise _cache_error()
        # Inductor removes the clones that nothing writes; places learned by a call become a guard.
        learned = None if compiling else self._learned
        bound = self._with_clones(leaves, learned)
        hidden = learned is not None and learned.hidden
        if compiling:
            skeleton = self._traced
        else:
            # Not a separate function: every call comes here.
            try:
                skeleton = self._pool.pop()
                while not skeleton.is_ready():
                    skeleton = self._pool.pop()
            except IndexError:
                skeleton = self._new_skeleton()
        new: list[Any] = []
        after: dict[Path, Any] = {}
        try:
            if compiling:
                skeleton.bind_traced(bound)
            else:
                skeleton.bind(bound)
            for path, value in states.items():
                # Forward may write to it; the tree keeps its own.
                skeleton.owners[path].set_extra_state(copying.deepcopy(value))
            # Not watched in a trace or on fake tensors: the next call will do.
            if compiling or learned is not None:
                out = self._forward(skeleton.module, args, kwargs, mode)
            elif is_tracing():
                out = self._forward_traced(skeleton, bound, args, kwargs, mode)
            else:
                # Under a watch for the original weights and for writes to leaves; no later call pays for it.
                try:
                    with Watch(self._originals, tree_leaves((args, kwargs)), leaves, bound) as watch:
                        out = self._forward(skeleton.module, args, kwargs, mode)
                    self._check_complete(skeleton)
                finally:
                    hidden = skeleton.has_hidden_writes()
                self._learn(watch, skeleton, hidden)
            if keep:
                new = self._read_back(skeleton)
                for path in states:
                    after[path] = NonTensorData(copying.deepcopy(skeleton.owners[path].get_extra_state()))
        finally:
            if compiling:
                skeleton.reset_traced()
            elif skeleton.reset() and not hidden:
                self._pool.append(skeleton)
            else:
                # A function that forward returned, and a graph that runs it again, have the weights of this call.
                skeleton.bind(bound)
                # Where a part runs again it writes its buffers again.
                new = _clones(new)
        if not compiling and in_functorch():
            out = open_objects(out)
        return out, new, after

    def _forward_traced(self, skeleton: Skeleton, bound: list[Any], args: Any, kwargs: Any, mode: seeded | None) -> Any:
        """Run forward in a trace, where writes are known by the operations: values cannot be compared."""
        writes = recorded_writes()
        before = len(writes)
        out = self._forward(skeleton.module, args, kwargs, mode)
        self._check_complete(skeleton)
        self._warn_of_writes({*places_of(writes[before:], bound), *skeleton.find_replaced(bound)}, skeleton)
        return out

    def _check_complete(self, skeleton: Skeleton) -> None:
        """Raise an error if forward made a parameter: the next call would make another one, which is never trained."""
        made = skeleton.find_made_parameter()
        if made is not None:
            raise UnsupportedError(
                f"apply: forward of {self._spec.name} made the parameter {made!r}, which the trees do not hold.",
                expected="layers that exist before `functional`",
                got="a layer that forward builds, new in each call",
                hint="run each module once on an example input, before functional and stack_modules.",
            )

    def _learn(self, watch: Watch, skeleton: Skeleton, hidden: bool) -> None:
        """Note the leaves that later calls must copy, if the watched call shows them."""
        changed = watch.changed()
        written = watch.written(changed)
        if written is None:
            return
        n_params = self._spec.n_params
        all_buffers = set(range(n_params, len(self._spec.order)))
        may_be_written = written | skeleton.renormed | (all_buffers - skeleton.lent)
        params = [i for i in may_be_written if i < n_params]
        buffers = sorted(i for i in may_be_written if i >= n_params)
        # First, so that a warning that is an error also comes from the next call: Ensemble then tries a loop.
        self._warn_of_writes(changed | watch.differing(skeleton.find_replaced(watch.bound)), skeleton)
        self._learned = _Learned(params, buffers, hidden, frozenset(written))

    def _warn_of_writes(self, places: set[int], skeleton: Skeleton) -> None:
        """Warn of what forward wrote and no call returns: parameters among these places, and attributes."""
        written = [i for i in sorted(places) if i < self._spec.n_params]
        scaled = [self.paths[i] for i in written if i in skeleton.renormed]
        lost = [self.paths[i] for i in written if i not in skeleton.renormed]
        if lost:
            self._lost.warn_of_parameters(lost)
        # In evaluation the same rows are scaled again in each call, so that nothing is lost.
        if scaled and self.module.training:
            self._lost.warn_of_scaled_rows(scaled)
        attributes = skeleton.find_lost()
        if attributes:
            self._lost.warn_of_attributes(attributes)

    def _with_clones(self, leaves: list[Any], learned: _Learned | None) -> list[Any]:
        """Return the leaves, with clones of those that forward may write: of all before the watched call."""
        n_params = self._spec.n_params
        if learned is None:
            return list(map(_clone, leaves[:n_params])) + _clones(leaves[n_params:])
        bound = list(leaves)
        for i in learned.params:
            bound[i] = _clone(leaves[i])
        if learned.buffers:
            clones = _clones([leaves[i] for i in learned.buffers])
            for i, clone in zip(learned.buffers, clones, strict=True):
                bound[i] = clone
        return bound

    def _forward(self, module: nn.Module, args: Any, kwargs: Any, mode: seeded | None) -> Any:
        if self._hooked and torch.is_grad_enabled() and in_vmap():
            raise _hooks_error(self._hooked)
        try:
            if is_compiling() or not in_functorch():
                return self._forward_in_modes(module, args, kwargs, mode)
            with recomputing_by_name():
                return self._forward_in_modes(module, args, kwargs, mode)
        except RuntimeError as err:
            if _SHARED_STATISTICS not in str(err):
                raise
            hint = "give each member its own statistics (vmap over params and buffers, in_dims 0), or use apply.eval()."
            # Of torch's own class: code that falls back to a loop catches RuntimeError.
            raise error(type(err), f"apply: {str(err).splitlines()[0]}", hint=hint) from err

    def _forward_in_modes(self, module: nn.Module, args: Any, kwargs: Any, mode: seeded | None) -> Any:
        rules = self._rules()
        if mode is None and not self._recomputes and rules is None:
            return module(*args, **kwargs)
        unmarked = nullcontext()
        if self._recomputes and in_functorch():
            unmarked = Unmarked()
        # The last to be entered sees a call first; the draws of a rule come to the mode of the key.
        inner = rules or nullcontext()
        if mode is None or mode.strict in self._keyed or is_compiling():
            with mode or nullcontext(), unmarked, inner:
                return module(*args, **kwargs)
        # The first call under a key is watched for draws that do not come from it.
        generators = ()
        if mode.strict:
            generators = default_generators(tree_leaves((args, kwargs)))
        watched = refuse_draws("apply: forward draws random numbers past rng=.", _PAST_KEY, generators)
        with watched, mode, unmarked, inner:
            out = module(*args, **kwargs)
        self._keyed.add(mode.strict)
        return out

    def _rules(self) -> Batching | None:
        """Return the mode for the functions of forward that torch cannot run in the caller's transforms or trace."""
        if in_vmap():
            return Batching()
        if self._reads_packed and not is_compiling() and (in_functorch() or is_recording()):
            return Batching(PACKED)
        return None

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


def _cache_error() -> UnsupportedError:
    return UnsupportedError(
        "apply: called inside `torch.nn.utils.parametrize.cached()`.",
        expected="weights computed from the parameters given to this call",
        got="a cache with the weights of an earlier call",
        hint="leave the cached() block first.",
    )


def _hooks_error(names: list[str]) -> UnsupportedError:
    return UnsupportedError(
        f"apply: the backward hooks of {brief(names)} do not run under torch's vmap.",
        expected="no hooks of register_full_backward_hook or register_full_backward_pre_hook",
        got="a gradient without them, which would be another one",
        hint='Ensemble(apply, how="loop") and backward() call them; without a gradient, use torch.no_grad().',
    )


@contextmanager
def _alone() -> Generator[None]:
    """Copy a template as outside of traces, transforms and inference mode: its tensors outlive the call.

    Dynamo reads the source, and copies nothing here.
    """
    if is_compiling():
        yield
    else:
        with outside(), torch.inference_mode(False):
            yield


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    # Tensors and arrays have no single truth value.
    except (RuntimeError, ValueError, TypeError):
        return False


def _clones(leaves: list[Any]) -> list[Any]:
    # With a gradient, the kernel for lists of torch 2.13 takes no integers.
    if leaves and can_foreach() and not any([leaf.requires_grad for leaf in leaves]):
        return list(torch._foreach_clone(leaves))  # pyright: ignore[reportPrivateImportUsage]
    return [leaf.clone() for leaf in leaves]


def _clone(leaf: Any) -> Any:
    """Return a clone that takes gradients if the leaf does, whatever the grad mode: forward may turn it on."""
    if not leaf.requires_grad or is_compiling():
        return leaf.clone()
    with torch.enable_grad():
        return leaf.clone()


def _with_copied_states(tree: "TensorDict") -> "TensorDict":
    states = extra_values(tree)
    if not states:
        return tree
    return replace(tree, {path: NonTensorData(copying.deepcopy(values[0])) for path, values in states.items()})


def make_apply(
    template: nn.Module,
    tree: "TensorDict",
    reserved: Sequence[str] = (),
    originals: Originals = (),
    frozen: Set[Path] = frozenset(),
) -> "tuple[Apply, TensorDict, TensorDict]":
    """Return the function that runs a template with the leaves of `tree`, and its parameters and buffers."""
    params, buffers = split(tree)
    spec = Spec(type(template).__name__, params, buffers, tree, frozen)
    return Apply(template, spec, reserved, originals), params, buffers


def functional(
    module: nn.Module, *, copy: bool = True, call_only: bool = False
) -> "tuple[Apply, TensorDict, TensorDict]":
    """Return a module as a pure function, with its parameters and buffers as trees.

    `apply(params, x)` runs forward with the given trees on a private copy of the module's structure (its hooks,
    mode and hyperparameters as they are now), so it is safe under threads and transforms and changes nothing.

    The first call runs on copies of all leaves, and notes the leaves that forward writes in place. Later calls copy
    only these leaves, all buffers except the statistics of norms in evaluation mode, and embeddings with `max_norm`.
    Later calls are not watched: a forward that then writes other leaves writes into the given tree.

    No call keeps what forward writes into parameters: the first one that sees such a write warns, and names them. A
    mask that forward multiplies into a weight in place (`weight.data.mul_(mask)`) has no other effect than this
    warning. The rows of an embedding with `max_norm` are such a write in training mode; in evaluation mode, each call
    scales the same rows. A call also begins with the same attributes, and warns if forward writes some.

    Args:
        module: Any module; one wrapped by `torch.compile` is unwrapped. If `fully_shard` (FSDP2) or
            `DistributedDataParallel` wraps it, only its layers run, and nothing is reduced between ranks. Under FSDP2
            the leaves are DTensors, and inputs must also be DTensors.
        copy: Copy the trees, so that training the module does not change them. Otherwise they share its storage.
            Either way they are detached.
        call_only: Accept a forward with an argument called `buffers` or `rng`; then only `apply.call` works. It
            also passes these names to a forward that takes any keyword.

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
    module = unsharded(unwrap(module, "functional"))
    signature = inspect.signature(module.forward)
    reserved = [name for name in _RESERVED if name in signature.parameters]
    if reserved and not call_only:
        raise UnsupportedError(
            f"functional: forward of {type(module).__name__} has an argument called {reserved[0]!r}, "
            "which apply uses itself.",
            expected="other names than 'buffers' and 'rng'",
            got=f"forward{signature}",
            hint="functional(m, call_only=True) and apply.call(params, args, kwargs, buffers=, rng=).",
        )
    _warn_of_hooks(module)
    live = from_module(module)
    tree = live.apply(lambda leaf: leaf.detach().clone() if copy else leaf.detach())
    if copy:
        tree = _with_copied_states(tree)
    return make_apply(make_template(module), tree, reserved, weak_weights(module), _find_frozen(live))


def _warn_of_hooks(module: nn.Module) -> None:
    """Warn if parameters have hooks: they belong to the module's own tensors, not to the leaves."""
    hooked = [name for name, value in module.named_parameters() if value._backward_hooks]
    if hooked:
        message = f"functional: the hooks of the parameters {brief(hooked)} are not applied."
        hint = "change the gradients where they are computed: grads.at[path].mul(mask), for example."
        warn_user(explain(message, hint=hint))


def _find_frozen(live: "TensorDict") -> Set[Path]:
    """Return the paths of the parameters of a module that do not require grad."""
    frozen: set[Path] = set()
    for entry in entries(live):
        if entry.kind is Kind.PARAMETER and not entry.leaf.requires_grad:
            frozen.update(entry.paths)
    return frozen
