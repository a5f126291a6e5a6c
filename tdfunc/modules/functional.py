"""`functional`: a module as a pure function of its parameters and buffers, safe under threads and transforms."""

import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tdfunc._collection import TensorCollection
from tdfunc._errors import LeafMismatchError, TieError, TreeStructureError, UnsupportedError, explain
from tdfunc._keys import dotted
from tdfunc._shapes import EMPTY
from tdfunc._ties import group_of
from tdfunc._types import Path
from tdfunc.modules.bind import in_transform
from tdfunc.modules.extract import from_module, split
from tdfunc.modules.random import Seed, seeded
from tdfunc.modules.skeleton import Skeleton, make_template
from tdfunc.modules.slots import same_memory, unwrap
from tdfunc.ops.edit import get
from tdfunc.ops.pointwise_base import can_foreach
from tdfunc.ops.structure import entries, keep_leaves

_RESERVED = ("buffers", "rng")
_MANY_STATS = "Batch norm got a batched tensor as input while the running_mean or running_var"


class _NodePlan:
    """How to read the leaves of one node of a fitting tree: its leaf keys, then its sub-trees, in a fixed order."""

    __slots__ = ("children", "count", "leaves")

    def __init__(self) -> None:
        self.leaves: list[str] = []
        self.children: list[tuple[str, _NodePlan]] = []
        self.count = 0


class Plan:
    """The leaves that a call takes from one tree: their paths, the shapes they must have, and how to read them fast."""

    def __init__(self, tree: TensorCollection) -> None:
        self.root = _NodePlan()
        self.paths: list[Path] = []
        self.shapes: list[torch.Size] = []
        self.first: list[Path] = []
        self._stacked: tuple[torch.Size, list[torch.Size]] | None = None
        self._fill(self.root, tree, (), tree)

    def _fill(self, node: _NodePlan, tree: TensorCollection, at: Path, root: TensorCollection) -> None:
        for key, value in tree._data.items():
            if isinstance(value, Tensor):
                node.leaves.append(key)
                self.paths.append((*at, key))
                self.shapes.append(value.shape)
                self.first.append(group_of(root._ties, (*at, key))[0])
        for key, value in tree._data.items():
            if isinstance(value, TensorCollection):
                child = _NodePlan()
                node.children.append((key, child))
                self._fill(child, value, (*at, key), root)
        node.count = len(tree._data)

    def shapes_after(self, lead: torch.Size) -> list[torch.Size]:
        """Return the shapes that leaves have when every one starts with `lead`."""
        if not lead:
            return self.shapes
        if self._stacked is None or self._stacked[0] != lead:
            self._stacked = (lead, [lead + shape for shape in self.shapes])
        return self._stacked[1]

    def read(self, tree: TensorCollection) -> list[Any] | None:
        """Return the leaves in the order of `paths`, or None if the tree's keys are not exactly these."""
        leaves: list[Any] = []
        try:
            return leaves if _read(self.root, tree, leaves) else None
        except (KeyError, AttributeError):
            return None

    def rebuild(self, tree: Any, leaves: list[Any]) -> Any:
        """Return a tree that fits, around new leaves in the order of `paths`; None if it is not known to fit."""
        bound = getattr(tree, "_bound", None)
        fits = (bound is not None and bound.plan is self) or self.read(tree) is not None
        return _rebuild(self.root, tree, iter(leaves)) if fits else None


def _rebuild(plan: _NodePlan, tree: TensorCollection, leaves: Iterator[Any]) -> TensorCollection:
    data = dict(tree._data)
    for key in plan.leaves:
        data[key] = next(leaves)
    for key, child in plan.children:
        data[key] = _rebuild(child, data[key], leaves)
    return tree._make(data, tree._batch_size, tree._device, tree._names, tree._static)


def _read(plan: _NodePlan, tree: TensorCollection, leaves: list[Any]) -> bool:
    data = tree._data
    if len(data) != plan.count:
        return False
    for key in plan.leaves:
        leaves.append(data[key])
    return all(_read(child, data[key], leaves) for key, child in plan.children)


class Apply:
    """A module as a pure function: `apply(params, *inputs, buffers=, rng=)`.

    Made by `functional`. Each call runs on a private copy of the module, so calls from many threads and inside
    transforms do not meet, and neither the module nor the trees are written. `params` may carry the buffers too.
    """

    def __init__(self, module: nn.Module, tree: TensorCollection, call_only: bool, training: bool | None = None) -> None:
        self._source = type(module).__name__
        self._call_only = call_only
        self._template = make_template(module)
        if training is not None:
            self._template.train(training)
        self._tree = tree
        params, buffers = split(tree) if entries(tree) else (tree, tree)
        self._plans = (Plan(params), Plan(buffers), Plan(tree))
        # Positions of leaves are those of the params plan followed by the buffers plan.
        self._first: dict[Path, Path] = dict(zip(self._plans[2].paths, self._plans[2].first, strict=True))
        order = [path for path in (*self._plans[0].paths, *self._plans[1].paths)]
        self._order = {path: i for i, path in enumerate(order)}
        self._n_params = len(self._plans[0].paths)
        self._from_whole = [self._plans[2].paths.index(path) for path in order]
        self._pool: deque[Skeleton] = deque()
        # Dynamo and make_fx cannot trace a deep copy: one skeleton stands ready, and compiled regions have their own.
        self._pool.append(self._skeleton())
        self._traced = self._skeleton()

    def _skeleton(self) -> Skeleton:
        return Skeleton(self._template, self._order, lambda path: self._first.get(path, path))

    @property
    def training(self) -> bool:
        """The mode of the module's root."""
        return self._template.training

    @property
    def module(self) -> nn.Module:
        """The structure that is run, with poison in place of weights: for reading hyperparameters."""
        return self._template

    def train(self, mode: bool = True) -> "Apply":
        """Return an apply in which every submodule is in training mode (or not)."""
        return Apply(self._template, self._tree, self._call_only, mode)

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
            LeakError: Forward used a weight that it did not get from the trees.
        """
        if self._call_only:
            raise UnsupportedError(
                explain(f"apply: forward of {self._source} has an argument called buffers or rng.", hint="use apply.call(params, args, kwargs, buffers=, rng=).")
            )
        return self._run(params, buffers, args, kwargs, rng)[0]

    def call(self, params: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, buffers: Any = None, rng: Seed = None) -> Any:
        """`apply` with forward's arguments as a tuple and a dict, whatever they are called."""
        return self._run(params, buffers, tuple(args), dict(kwargs or {}), rng)[0]

    def with_buffers(self, params: Any, buffers: Any, /, *args: Any, rng: Seed = None, **kwargs: Any) -> tuple[Any, Any]:
        """Return forward's output and the buffers after it; the given ones are not written.

        This is how BatchNorm trains under `vmap` and `grad`: the statistics are an output.
        """
        out, store = self._run(params, buffers, args, kwargs, rng, keep=True)
        return out, self.rebuild_buffers(params, buffers, store)

    def rebuild_buffers(self, params: Any, buffers: Any, leaves: list[Any]) -> Any:
        """Return the tree that held the buffers, around new ones in plan order."""
        source, plan = params if buffers is None else buffers, self._plans[1]
        new = plan.rebuild(source, leaves) if buffers is not None else None
        return new if new is not None else _replace_leaves(source, dict(zip(plan.paths, leaves, strict=True)))

    # -- one call -----------------------------------------------------------------------------------------------

    def _run(self, params: Any, buffers: Any, args: Any, kwargs: Any, rng: Seed, keep: bool = False) -> tuple[Any, list[Any]]:
        return self.run_leaves(self.leaves(params, buffers), args, kwargs, rng, keep=keep)

    def run_leaves(self, leaves: list[Any], args: Any, kwargs: Any, rng: Any = None, *, keep: bool = False) -> tuple[Any, list[Any]]:
        """Run on leaves in plan order (what `Ensemble` maps over); return the output and, if kept, the new buffers."""
        compiling = torch.compiler.is_compiling()
        if not compiling and parametrize._cache_enabled:
            raise UnsupportedError(
                explain("apply: inside `parametrize.cached()` a weight computed from other parameters would be used.", hint="leave the cached() block first.")
            )
        n = self._n_params
        if len(leaves) > n:
            leaves = leaves[:n] + _clones(leaves[n:])
        skeleton = self._traced if compiling else self._take()
        try:
            for store, name, i in skeleton.targets:
                store[name] = leaves[i]  # pyright: ignore[reportOptionalSubscript]
            out = self._forward(skeleton.module, args, kwargs, rng)
            return out, self._read_back(skeleton) if keep else []
        finally:
            skeleton.reset()
            if not compiling:
                self._pool.append(skeleton)

    def _read_back(self, skeleton: Skeleton) -> list[Any]:
        # Read from the module, not from the clones: forward may have registered a new tensor under the name.
        found = {i: store[name] for store, name, i in skeleton.targets if i >= self._n_params}
        return [found[self._order[self._first[path]]] for path in self._plans[1].paths]

    def _forward(self, module: nn.Module, args: Any, kwargs: Any, rng: Seed) -> Any:
        try:
            if rng is None:
                return module(*args, **kwargs)
            with seeded(rng):
                return module(*args, **kwargs)
        except RuntimeError as err:
            if _MANY_STATS in str(err):
                raise UnsupportedError(
                    explain(
                        "apply: BatchNorm in training mode updates statistics that all members share.",
                        expected="one set of buffers for each member",
                        hint="map the buffers too (vmap over params and buffers, in_dims 0), or use apply.eval().",
                    )
                ) from err
            raise

    def _take(self) -> Skeleton:
        try:
            return self._pool.pop()
        except IndexError:
            return self._skeleton()

    # -- reading trees ------------------------------------------------------------------------------------------

    def leaves(self, params: Any, buffers: Any, lead: torch.Size = EMPTY) -> list[Any]:
        """Return the leaves that a call binds, in plan order; `lead` is what stacked trees have before each shape."""
        own, shared, whole = self._plans
        if not isinstance(params, TensorCollection) or (buffers is not None and not isinstance(buffers, TensorCollection)):
            got = params if not isinstance(params, TensorCollection) else buffers
            raise TypeError(explain("apply: params and buffers must be trees.", got=type(got).__name__, hint="apply(params, x, ..., buffers=buffers)."))
        first = _checked(params, own, lead)
        if first is not None and (buffers is not None or not shared.paths):
            second = _checked(buffers, shared, lead) if buffers is not None else []
            if second is not None:
                return first + second
        elif first is None and buffers is None:
            both = _checked(params, whole, lead)
            if both is not None:
                return [both[i] for i in self._from_whole]
        return self._slow_leaves(params, buffers, lead)

    def _slow_leaves(self, params: Any, buffers: Any, lead: torch.Size) -> list[Any]:
        """Read by path: trees in another arrangement, or the error that says what is wrong with them."""
        found: dict[Path, Any] = {}
        for tree in (params, buffers):
            for entry in entries(tree) if tree is not None else []:
                for path in entry.paths:
                    known = found.setdefault(path, entry.leaf)
                    if known is not entry.leaf:
                        raise TreeStructureError(explain(f"apply: {dotted(path)!r} is in params and in buffers.", hint="pass it once."))
        wanted = dict(zip(self._plans[2].paths, self._plans[2].shapes_after(lead), strict=True))
        missing = [path for path in self._order if path not in found]
        extra = [path for path in found if path not in wanted]
        if missing or extra:
            raise self._structure_error(missing, extra, buffers)
        for path, shape in wanted.items():
            _check_shape(path, found[path], shape)
        for path, first in self._first.items():
            if path != first and not same_memory(found[path], found[first]) and (in_transform() or not torch.equal(found[path], found[first])):
                raise TieError(explain(f"apply: {dotted(first)!r} and {dotted(path)!r} are one tensor in the module.", got="two tensors that differ", hint="set one of them to the other."))
        return [found[path] for path in self._order]

    def _structure_error(self, missing: list[Path], extra: list[Path], buffers: Any) -> TreeStructureError:
        lacking = [dotted(path) for path in missing]
        hint = None
        if missing and buffers is None and set(missing) <= set(self._plans[1].paths):
            hint = "pass buffers=buffers; buffers are never taken from the module silently."
        return TreeStructureError(
            explain(
                f"apply: the trees do not fit {self._source}" + (f": {lacking[0]!r} is missing." if missing else f": {dotted(extra[0])!r} is not one of its leaves."),
                expected=f"missing: {lacking[:10]}" if missing else "exactly the module's leaves",
                got=f"unknown: {[dotted(path) for path in extra[:10]]}" if extra else None,
                hint=hint,
            )
        )


class _Checked:
    """Remembers in a tree's cache that it fits a plan, with its leaves: a tree never changes."""

    __slots__ = ("lead", "leaves", "plan")

    def __init__(self, plan: Plan, lead: torch.Size, leaves: list[Any]) -> None:
        self.plan, self.lead, self.leaves = plan, lead, leaves


def _checked(tree: Any, plan: Plan, lead: torch.Size) -> list[Any] | None:
    """Return a tree's leaves in plan order if its keys are the plan's; shapes are checked once for each tree."""
    compiling = torch.compiler.is_compiling()
    bound = None if compiling else getattr(tree, "_bound", None)
    if bound is not None and bound.plan is plan and bound.lead == lead:
        return bound.leaves
    leaves = plan.read(tree)
    if leaves is None:
        return None
    for i, (leaf, shape) in enumerate(zip(leaves, plan.shapes_after(lead), strict=True)):
        if leaf.shape != shape:
            _check_shape(plan.paths[i], leaf, shape)
    if plan.first != plan.paths and not _tied_alike(tree, plan):
        return None
    if not compiling:
        object.__setattr__(tree, "_bound", _Checked(plan, lead, leaves))
    return leaves


def _tied_alike(tree: TensorCollection, plan: Plan) -> bool:
    return all(first == path or get(tree, first, None) is get(tree, path, None) for path, first in zip(plan.paths, plan.first, strict=True))


def _check_shape(path: Path, leaf: Any, shape: torch.Size) -> None:
    if not isinstance(leaf, Tensor) or leaf.shape != shape:
        got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
        stacked = isinstance(leaf, Tensor) and leaf.shape[1:] == shape
        raise LeafMismatchError(
            explain(
                f"apply: leaf {dotted(path)!r} does not fit the module.",
                expected=f"shape {tuple(shape)}",
                got=f"shape {got}",
                hint="the tree is stacked: use tdfunc.Ensemble(apply)(tree, x), torch.vmap, or one member, tree[i]." if stacked else "the tree belongs to another architecture.",
            )
        )


def _clones(leaves: list[Any]) -> list[Any]:
    if can_foreach():
        return list(torch._foreach_clone(leaves))
    return [leaf.clone() for leaf in leaves]


def _replace_leaves(tree: TensorCollection, leaves: dict[Path, Any], at: Path = ()) -> Any:
    data = {
        key: _replace_leaves(node, leaves, (*at, key)) if isinstance(node, TensorCollection) else leaves.get((*at, key), node)
        for key, node in tree._data.items()
    }
    return tree._replace(data)


def functional(module: nn.Module, *, copy: bool = True, call_only: bool = False) -> tuple[Apply, Any, Any]:
    """Return a module as a pure function, with its parameters and buffers as trees.

    `apply(params, x)` runs forward with the given trees on a private copy of the module's structure (its hooks,
    mode and hyperparameters as they are now), so it is safe under threads and transforms and changes nothing.

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
    reserved = [name for name in inspect.signature(module.forward).parameters if name in _RESERVED]
    if reserved and not call_only:
        raise UnsupportedError(
            explain(
                f"functional: forward of {type(module).__name__} has an argument called {reserved[0]!r}, which apply uses itself.",
                hint="functional(m, call_only=True) and apply.call(params, args, kwargs, buffers=, rng=).",
            )
        )
    live = from_module(module)
    tree = detached(live, copy)
    params, buffers = split(tree) if entries(tree) else (keep_leaves(tree, set()), tree)
    return Apply(module, tree, bool(reserved)), params, buffers


def detached(tree: Any, copy: bool) -> Any:
    """Return a tree of plain tensors without gradient history."""
    return tree.apply(lambda leaf: leaf.detach().clone() if copy else leaf.detach())
