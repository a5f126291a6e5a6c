"""Private skeletons: copies of a module that share nothing writable with it and hold poison where weights belong.

A skeleton runs one call at a time. Between calls its slots are empty, so a forward that reaches an original weight
in some other way (a closure, a cached reference) meets a poison tensor and raises instead of computing with it.
"""

import operator
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Size, Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from tdfunc.core.errors import LeakError, UnsupportedError
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.modules.duplicate import Copied, children_of, duplicate, is_plain
from tdfunc.modules.slots import is_renormed, unwrap, walk
from tdfunc.modules.straight import Straight, make_filler

# What torch asks of a tensor that it only lists: `state_dict` detaches.
HARMLESS = {torch.ops.aten.detach.default}
# The tables of nn.Module itself; the rest of a module's `__dict__` is its own.
_OWN_TABLES = frozenset(nn.Module().__dict__)
# They write their statistics in training mode only, and nothing else ever.
_NORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm} | {
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
}  # fmt: skip
_MODULES = itemgetter("_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Poison(Tensor):
    """A tensor with the shape, dtype and device of a weight, no storage, and no operation that does not raise."""

    path: Path

    # Reading metadata must not go through Python dispatch; every operation still reaches `__torch_dispatch__`.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def of(weight: Tensor, path: Path) -> "Poison":
        """Return the poison for one weight."""
        strides = weight.stride() if weight.layout is torch.strided and not weight.is_nested else None
        return _poison(weight.shape, strides, weight.dtype, weight.device, path, isinstance(weight, nn.Parameter))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HARMLESS:
            return args[0]
        leaked = [a for a in tree_leaves((args, kwargs or {})) if isinstance(a, Poison)]
        return leak(leaked[0].path, str(func))

    def __deepcopy__(self, memo: Any) -> "Poison":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _poison, (self.shape, self.stride(), self.dtype, self.device, self.path, hasattr(self, "_is_param"))

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Poison({dotted(self.path)}, shape={tuple(self.shape)})"


def _poison(shape: Size, strides: Any, dtype: torch.dtype, device: torch.device, path: Path, is_param: bool) -> Poison:
    make: Any = Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
    poison = make(Poison, shape, strides, dtype=dtype, device=device, requires_grad=False)
    poison.path = path
    if is_param:
        # nn.Module accepts it in a parameter slot.
        poison._is_param = True
    return poison


def leak(path: Path, func: str) -> NoReturn:
    """Raise the error for an operation that used a weight which the call was not given."""
    raise LeakError(
        f"apply: forward used the weight {dotted(path)!r} that was not given to it ({func}).",
        expected="weights read from their module at each call, as self.weight",
        got="a reference kept elsewhere (a closure, a cache, another object), or a buffer that was not passed",
        hint="read the weight inside forward, or register it as a buffer.",
    )


class Template(NamedTuple):
    """A module without weights, from which skeletons are made, and the objects that all of them share."""

    module: nn.Module
    shared: list[Any]

    def in_mode(self, training: bool) -> "Template":
        """Return a copy of the template in which every submodule is in the given mode."""
        copied = duplicate(self.module, {}, self.shared)
        copied.module.train(training)
        return Template(copied.module, copied.shared)


def make_template(module: nn.Module) -> Template:
    """Return a copy of a module in which every reference to one of its weights is poison.

    Raises:
        UnsupportedError: It cannot be copied, or its copy keeps a weight of the original.
    """
    slots = [slot for slot in walk(module, "functional") if slot.store is not None]
    memo: dict[int, Any] = {}
    storages: dict[Any, Path] = {}
    for slot in slots:
        if id(slot.value) not in memo:
            memo[id(slot.value)] = Poison.of(slot.value, slot.path)
            storages.setdefault(storage_of(slot.value), slot.path)
    storages.pop(None, None)

    def stand_in(tensor: Tensor, name: str) -> Tensor | None:
        # A view of a weight, or a tensor computed from one, would be stale under other weights.
        path = storages.get(storage_of(tensor), (name,) if tensor.grad_fn is not None else None)
        return Poison.of(tensor, path) if path is not None else None

    copied = duplicate(module, memo, [], stand_in)
    now = [slot for slot in walk(copied.module, "functional") if slot.store is not None]
    kept = [slot.path for slot in now if not isinstance(slot.value, Poison)]
    if kept or [slot.path for slot in now] != [slot.path for slot in slots]:
        raise UnsupportedError(
            f"functional: the copy of {type(module).__name__} is not independent of it.",
            expected="a copy with the same parameters and buffers, none of them shared",
            got=f"its own weights at {[dotted(path) for path in kept]}" if kept else "other slots",
            hint="a __deepcopy__ must make a new module and pass its memo on to copy.deepcopy for every attribute.",
        )
    return Template(copied.module, copied.shared)


def storage_of(tensor: Tensor) -> Any:
    """Return what identifies a tensor's memory, None if it has none of its own."""
    try:
        pointer = tensor.untyped_storage().data_ptr()
    # Wrapper subclasses, sparse and fake tensors.
    except (RuntimeError, NotImplementedError):
        return None
    return (pointer, tensor.device) if pointer else None


# A slot of a skeleton, as (store, name), and the number of the leaf that goes into it.
Target: TypeAlias = tuple[dict[str, Any], str, int]


class _Tables:
    """Dicts and sets with what was in them, noticed by their size."""

    __slots__ = ("_before", "_tables", "empty", "filled", "length")

    def __init__(self, tables: list[Any]) -> None:
        self._tables = tables
        self._before = list(map(_snapshot, tables))
        # `any` asks an empty one in a third of the time that `len` takes.
        self.filled, self.empty = [table for table in tables if table], [table for table in tables if not table]
        self.length = sum(map(len, self.filled))

    def restore(self) -> None:
        for table, before in zip(self._tables, self._before, strict=True):
            if len(table) != len(before):
                _refill(table, before)


def _order(places: list[int], n: int) -> Callable[[list[Any]], Sequence[Any]] | None:
    """Return what picks some of n leaves by their places; None for all of them as they come."""
    if places == list(range(n)):
        return None
    # Of one place itemgetter would return no tuple.
    return itemgetter(*places) if len(places) > 1 else lambda leaves: [leaves[i] for i in places]


class Skeleton:
    """One runnable copy: where each leaf goes, and how to leave it as it was before the call."""

    __slots__ = (
        "_attributes", "_children", "_containers", "_filler", "_handles", "_hooks", "_modes", "_order", "_own",
        "_parents", "_poison", "_registered", "_seen", "_stores", "_tables", "_tensors", "_traced", "_vacant",
        "module", "norms", "owners", "renormed", "targets",
    )  # fmt: skip

    def __init__(self, template: Template, order: dict[Path, int], first: dict[Path, Path]) -> None:
        copied = duplicate(template.module, {}, template.shared)
        self.module = copied.module
        walked = walk(self.module, "functional")
        # Where extra state goes.
        self.owners = {slot.path: slot.owner for slot in walked if slot.store is None}
        # Tied slots share a leaf, that of their first path; a shared submodule has its slots once.
        targets: dict[tuple[int, str], Target] = {}
        for path, owner, store, _ in walked:
            if store is not None:
                targets.setdefault((id(owner), path[-1]), (store, path[-1], order[first.get(path, path)]))
        # In the order of the leaves, so that they fill the slots as they come.
        self.targets = sorted(targets.values(), key=itemgetter(2))
        self._stores = list({id(store): store for store, _, _ in self.targets}.values())
        self._poison = [store[name] for store, name, _ in self.targets]
        self._order = _order([i for _, _, i in self.targets], len(order))
        self._filler: Straight | None = None
        norms = {
            id(m._buffers) for m in self.module.modules() if type(m) in _NORMS and not m.training and _stateless(m)
        }
        self.norms = [target for target in self.targets if id(target[0]) in norms]
        # Embeddings with max_norm write the rows that they look up.
        tables = {id(m._parameters) for m in self.module.modules() if is_renormed(m)}
        self.renormed = tuple(sorted({i for store, _, i in self.targets if id(store) in tables}))
        self._remember([unwrap(m, "functional") for m in self.module.modules()], copied)

    def _remember(self, modules: list[nn.Module], copied: Copied) -> None:
        """Note everything that a forward may write, to put it back after each call."""
        both = [table for m in modules for table in (m._parameters, m._buffers)]
        # A slot that is None may be filled by forward: a cache registered in advance.
        self._vacant = [(table, name) for table in both for name, value in table.items() if value is None]
        self._own = [m.__dict__ for m in modules]
        self._modes = [own["training"] for own in self._own]
        custom = [m for m in modules if not _stateless(m)]
        self._tables = _Tables([*self._own, *both, *[m._modules for m in modules if not m._modules]])
        self._hooks = _Tables([m.__dict__[name] for m in modules for name in (*_HOOKS, "_non_persistent_buffers_set")])
        self._handles = RemovableHandle.next_id
        self._parents = [m.__dict__ for m in modules if m._modules]
        self._children = [(own, own["_modules"], dict(own["_modules"])) for own in self._parents]
        self._seen = _children(self._parents)
        seen = {id(value) for value in copied.shared}
        containers: list[Any] = []
        tensors: list[Tensor] = []
        for module in custom:
            for name, value in module.__dict__.items():
                if name not in _OWN_TABLES:
                    _writable(value, seen, containers, tensors)
        extra = [(m.__dict__, [(n, v) for n, v in m.__dict__.items() if n not in _OWN_TABLES]) for m in custom]
        self._attributes = [(own, attributes, dict(own)) for own, attributes in extra if attributes]
        self._containers = [(c, _snapshot(c), list(_values(c))) for c in containers]
        own_names = {id(own): attributes for own, attributes, _ in self._attributes}
        self._registered = [(table, set(table)) for table in both]
        self._traced = [
            (m, set(m.__dict__), [("training", m.training), *own_names.get(id(m.__dict__), [])]) for m in modules
        ]
        originals = {id(new): old for new, old in copied.tensors}
        self._tensors = [(tensor, tensor._version, originals[id(tensor)]) for tensor in tensors]

    def bind(self, leaves: list[Any], fillers: dict[Hashable, Straight]) -> None:
        """Put the leaves into their slots.

        Args:
            leaves: The leaves in plan order.
            fillers: Code made for the slots of earlier skeletons.
        """
        if self._filler is None:
            numbers = {id(store): number for number, store in enumerate(self._stores)}
            slots = tuple([(numbers[id(store)], name) for store, name, _ in self.targets])
            self._filler = fillers.get(slots) or fillers.setdefault(slots, make_filler(slots))
        self._filler.run(self._stores, leaves if self._order is None else self._order(leaves))

    def bind_traced(self, leaves: list[Any]) -> None:
        """`bind` in a compiled region, which cannot compile code."""
        for store, name, i in self.targets:
            store[name] = leaves[i]

    def _empty(self) -> None:
        for (store, name, _), nothing in zip(self.targets, self._poison, strict=True):
            store[name] = nothing
        for table, name in self._vacant:
            table[name] = None

    def reset(self) -> None:
        """Empty the slots and put back what forward wrote on its modules and on what they hold."""
        if self._filler is None:
            self._empty()
        else:
            self._filler.run(self._stores, self._poison)
            for table, name in self._vacant:
                table[name] = None
        # One number for all: what was removed is put back above or below, so that additions cannot hide.
        if sum(map(len, self._tables.filled)) != self._tables.length or any(self._tables.empty):
            self._tables.restore()
            self._hooks.restore()
        if RemovableHandle.next_id != self._handles:
            # A hook was registered somewhere since the last look: maybe here.
            self._handles = RemovableHandle.next_id
            self._hooks.restore()
        if [own["training"] for own in self._own] != self._modes:
            for own, mode in zip(self._own, self._modes, strict=True):
                own["training"] = mode
        for own, attributes, before in self._attributes:
            # Identity, not equality: comparing tensors would compute.
            for name, value in attributes:
                if own.get(name) is not value:
                    _refill(own, before)
                    break
        if _children(self._parents) != self._seen:
            for own, table, before in self._children:
                # nn.ModuleList makes another table when it gives up a child.
                own["_modules"] = table
                _refill(table, before)
        self._restore_containers()
        if self._tensors:
            self._restore_tensors()

    def reset_traced(self) -> None:
        """`reset` in a compiled region, where writes to a module show in `module.__dict__` alone."""
        self._empty()
        for table, names in self._registered:
            for name in list(table):
                if name not in names:
                    del table[name]
        for module, names, attributes in self._traced:
            own = module.__dict__
            for name in list(own):
                if name not in names:
                    del own[name]
            for name, value in attributes:
                if own.get(name) is not value:
                    own[name] = value
        for _, table, before in self._children:
            if list(table.values()) != list(before.values()):
                _refill(table, before)
        self._restore_containers()

    def _restore_containers(self) -> None:
        for container, before, values in self._containers:
            if len(container) != len(values) or not all(map(operator.is_, _values(container), values)):
                _refill(container, before)

    def _restore_tensors(self) -> None:
        for i, (tensor, version, original) in enumerate(self._tensors):
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(original)
                self._tensors[i] = (tensor, tensor._version, original)


def _writable(value: Any, seen: set[int], containers: list[Any], tensors: list[Tensor]) -> None:
    """Collect the containers, attribute dicts and tensors that belong to a module, at any depth."""
    if id(value) in seen or isinstance(value, nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if not isinstance(value, Poison) and not value.is_inference():
            tensors.append(value)
        return
    if isinstance(value, (dict, list, set, deque)):
        containers.append(value)
    elif is_plain(value) and hasattr(value, "__dict__"):
        containers.append(value.__dict__)
    for _, child in children_of(value):
        _writable(child, seen, containers, tensors)


def _values(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _children(parents: list[dict[str, Any]]) -> list[tuple[nn.Module, ...]]:
    """Return the submodules of modules that are given by their `__dict__`."""
    return list(map(tuple, map(dict.values, map(_MODULES, parents))))


def _snapshot(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _refill(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(before)
    else:
        container.extend(before)


def _stateless(module: nn.Module) -> bool:
    """Whether a module's class is torch's own and writes nothing on itself in forward (RNNs keep `_flat_weights`)."""
    if not type(module).__module__.startswith("torch.nn.modules") or isinstance(module, nn.RNNBase):
        return False
    return not any(module.__dict__[name] for name in _HOOKS)
