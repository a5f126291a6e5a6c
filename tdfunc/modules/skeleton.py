"""Private skeletons: copies of a module that share nothing writable with it and hold poison where weights belong.

A skeleton runs one call at a time. Between calls its slots are empty, so a forward that reaches an original weight
in some other way (a closure, a cached reference) meets a poison tensor and raises instead of computing with it.
`make_template` copies a module, `Skeleton` is one runnable copy of that template.

One rule keeps calls apart. A skeleton runs another call only if nothing outside of it holds a part of it (a function
that forward returned, a cache keyed by `self`), and if every change to its parts shows. Otherwise the next call gets a
new copy.
"""

import copy
import copyreg
import functools
import gc
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.hooks import RemovableHandle

from tdfunc.core.errors import LeakError, UnsupportedError, brief
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.modules.checkpoint import stand_in as checkpoint
from tdfunc.modules.extract import Slot, is_renormed, unwrap, walk
from tdfunc.modules.plan import Straight, make_filler
from tdfunc.modules.poison import Poison, is_equal, storage_of

# The tables of nn.Module itself; the rest of a module's `__dict__` is its own.
_OWN_TABLES = frozenset(nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# They write their statistics in training mode only, and nothing else ever.
_NORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm} | {
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
}  # fmt: skip
_MODULES = itemgetter("_modules")
_TRAINING = itemgetter("training")
_ATOMS = (str, bytes, int, float, complex, type(None), type, range, torch.dtype, torch.device, torch.layout)
_SEQUENCES = (list, tuple, set, frozenset, deque)
# A copy shares them: generators move on from call to call, and a lock in several copies guards nothing.
_SHARED = (torch.Generator, type(threading.Lock()), type(threading.RLock()))
# They cannot change themselves, whatever their parts do.
_FROZEN = (tuple, frozenset, types.FunctionType, types.MethodType, functools.partial)
# Closures are followed through these: an object of any other class may hold a whole program.
_FOLLOWED = (dict, *_SEQUENCES, types.FunctionType, types.MethodType, functools.partial, nn.Module)


# -- copies -------------------------------------------------------------------------------------------------------


def duplicate(
    module: nn.Module, memo: dict[int, Any], stand_in: Callable[[Tensor, str], Tensor | None] = lambda *_: None
) -> nn.Module:
    """Return a deep copy of a module.

    Unlike with `copy.deepcopy` alone, closures over parts of the module follow the copy, generators and locks are
    shared, and submodules wrapped by `torch.compile` come out unwrapped.

    Args:
        module: The module.
        memo: The replacement of each object by its id, as for `copy.deepcopy`. It is filled.
        stand_in: A function that returns the replacement of a tensor in an attribute of this name, or None to copy it.

    Raises:
        UnsupportedError: `copy.deepcopy` refuses an object in the module, such as a file.
    """
    # The list keeps everything alive, so that ids stay valid.
    found = [item for item in _reachable(module, set(memo)) if id(item[1]) not in memo]
    own = _ids_of_parts(module)
    functions: list[tuple[types.FunctionType, types.FunctionType]] = []
    for name, value in found:
        replacement = None
        if isinstance(value, Tensor):
            replacement = stand_in(value, name)
        elif isinstance(value, _SHARED):
            replacement = value
        elif isinstance(value, types.FunctionType) and _reaches(value, own):
            replacement = _copy_unfilled(value, own)
            functions.append((value, replacement))
        if replacement is not None:
            memo[id(value)] = replacement
    try:
        # The wrappers of torch.compile: the innermost first.
        for _, value in reversed(found):
            if isinstance(value, nn.Module):
                inner = unwrap(value, "functional")
                if inner is not value:
                    memo[id(value)] = copy.deepcopy(inner, memo)
        copied = copy.deepcopy(module, memo)
        for old, new in functions:
            _fill_function(new, old, memo)
    # A class's own __deepcopy__ or __reduce__ may raise anything.
    except Exception as err:
        raise UnsupportedError(
            f"functional: {type(module).__name__} cannot be copied.",
            expected="attributes that copy.deepcopy accepts",
            got=f"{type(err).__name__}: {err}",
            hint="give the class of the object a __deepcopy__, or make the object inside forward.",
        ) from err
    return copied


def _ids_of_parts(module: nn.Module) -> set[int]:
    """Return the ids of a module's submodules, parameters and buffers."""
    ids: set[int] = set()
    for sub in module.modules():
        ids.add(id(sub))
        for tensor in (*sub._parameters.values(), *sub._buffers.values()):
            if tensor is not None:
                ids.add(id(tensor))
    return ids


def _copy_unfilled(function: types.FunctionType, own: set[int]) -> types.FunctionType:
    """Return a copy of a function with empty cells where a variable leads to a part of the module.

    It shares the other cells, and has no defaults: `_fill_function` completes it.
    """
    cells: list[types.CellType] = []
    for cell in function.__closure__ or ():
        if _is_filled(cell) and _reaches(cell.cell_contents, own):
            cells.append(types.CellType())
        else:
            cells.append(cell)
    copied = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(cells) or None)
    copied.__dict__.update(function.__dict__)
    return copied


def _fill_function(new: types.FunctionType, old: types.FunctionType, memo: dict[int, Any]) -> None:
    """Fill the empty cells and the defaults of a copied function with copies of what the original has there."""
    for cell, source in zip(new.__closure__ or (), old.__closure__ or (), strict=True):
        if cell is not source:
            cell.cell_contents = copy.deepcopy(source.cell_contents, memo)
    new.__defaults__ = copy.deepcopy(old.__defaults__, memo)
    new.__kwdefaults__ = copy.deepcopy(old.__kwdefaults__, memo)


def _reachable(root: Any, known: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield (name, object), each object once, of all that a copy looks into; known objects are not entered."""
    seen = {id(root)}
    queue: deque[tuple[str, Any]] = deque([("", root)])
    while queue:
        name, value = queue.popleft()
        yield name, value
        if id(value) in known:
            continue
        for inner, child in _children_of(value):
            if id(child) not in seen and not isinstance(child, _ATOMS):
                seen.add(id(child))
                queue.append((inner, child))


def _children_of(value: Any) -> list[tuple[str, Any]]:
    """Return (name, value) of the parts of an object that a deep copy enters, and closures of functions."""
    if isinstance(value, dict):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, _SEQUENCES):
        return [(str(i), item) for i, item in enumerate(value)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        inner = [(name, cell.cell_contents) for name, cell in cells if _is_filled(cell)]
        return [*inner, ("__defaults__", value.__defaults__), ("__kwdefaults__", value.__kwdefaults__)]
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__), ("__func__", value.__func__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords), *vars(value).items()]
    if isinstance(value, (*_ATOMS, Tensor)):
        return []
    if isinstance(value, nn.Module) or _is_plain(value):
        slots = [(name, getattr(value, name)) for name in _slots_of(value) if hasattr(value, name)]
        return [*getattr(value, "__dict__", {}).items(), *slots]
    return []


def _slots_of(value: Any) -> list[str]:
    # As `copy` finds them, where the names of private slots are mangled.
    return copyreg._slotnames(type(value))  # pyright: ignore[reportAttributeAccessIssue]


def _is_plain(value: Any) -> bool:
    """Return whether an object is copied attribute by attribute, rather than in a way of its class's own."""
    cls = type(value)
    if isinstance(value, (types.ModuleType, weakref.ref)) or hasattr(cls, "__deepcopy__"):
        return False
    return cls.__reduce__ is object.__reduce__ and cls.__reduce_ex__ is object.__reduce_ex__


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    # A variable that was never assigned.
    except ValueError:
        return False


def _reaches(value: Any, targets: set[int]) -> bool:
    """Return whether containers, closures, partials, methods and modules lead from an object to one of the targets."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        value = stack.pop()
        if id(value) in targets:
            return True
        if id(value) not in seen and isinstance(value, _FOLLOWED):
            seen.add(id(value))
            stack += [child for _, child in _children_of(value)]
    return False


def make_template(module: nn.Module) -> nn.Module:
    """Return a copy of a module in which every reference to one of its weights is poison.

    Attributes that hold `torch.utils.checkpoint.checkpoint` get one that also works in transforms.

    Raises:
        UnsupportedError: It cannot be copied, or its copy keeps a weight of the original.
    """
    slots = _weight_slots(module)
    memo: dict[int, Any] = {id(torch_checkpoint.checkpoint): checkpoint}
    # The path of the first weight in each storage.
    storages: dict[Any, Path] = {}
    for slot in slots:
        if id(slot.value) not in memo:
            memo[id(slot.value)] = Poison.of(slot.value, slot.path)
            storages.setdefault(storage_of(slot.value), slot.path)
    # Tensors without memory share nothing.
    storages.pop(None, None)

    def stand_in(tensor: Tensor, name: str) -> Tensor | None:
        # A view of a weight, or a tensor computed from one, is stale under other weights.
        path = storages.get(storage_of(tensor))
        if path is None and tensor.grad_fn is not None:
            path = (name,)
        if path is None:
            return None
        return Poison.of(tensor, path)

    _refuse_numpy_views(module, set(memo), storages)
    template = duplicate(module, memo, stand_in)
    _check_independent(type(module).__name__, slots, _weight_slots(template))
    return template


def _weight_slots(module: nn.Module) -> list[Slot]:
    """Return the slots of parameters and buffers: all but extra state."""
    return [slot for slot in walk(module, "functional") if slot.store is not None]


def _check_independent(name: str, slots: list[Slot], copies: list[Slot]) -> None:
    """Raise unless a copy has the slots of its module, with poison in each."""
    kept = [dotted(slot.path) for slot in copies if not isinstance(slot.value, Poison)]
    if not kept and [slot.path for slot in copies] == [slot.path for slot in slots]:
        return
    raise UnsupportedError(
        f"functional: the copy of {name} is not independent of it.",
        expected="a copy with the same parameters and buffers, none of them shared",
        got=f"its own weights at {brief(kept)}" if kept else "other slots",
        hint="a __deepcopy__ must make a new module and pass its memo on to copy.deepcopy for every attribute.",
    )


def _refuse_numpy_views(module: nn.Module, known: set[int], storages: dict[Any, Path]) -> None:
    """Raise if the module has a numpy array that shares the memory of a weight: poison cannot take its place."""
    for name, value in _reachable(module, known):
        if not isinstance(value, np.ndarray):
            continue
        base = value
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, Tensor) and storage_of(base) in storages:
            raise LeakError(
                f"functional: the numpy array {name!r} shares the memory of a weight.",
                expected="weights read from their module at each call",
                got=f"a view of {dotted(storages[storage_of(base)])!r}, which is not the weight of a call",
                hint="make it inside forward: self.weight.detach().numpy().",
            )


def is_recomputing(template: nn.Module) -> bool:
    """Return whether a template has an attribute that recomputes a part."""
    return any(value is checkpoint for _, value in _reachable(template, set()))


def find_hooked(template: nn.Module) -> list[str]:
    """Return the names of the modules that have hooks of the backward pass."""
    found: list[str] = []
    for name, module in template.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            found.append(name or type(module).__name__)
    return found


# -- one runnable copy --------------------------------------------------------------------------------------------

# A container, a copy of it, and the keys of a dict.
Kept: TypeAlias = tuple[Any, Any, list[Any] | None]


class Target(NamedTuple):
    """A slot of a copy, and the place of the leaf that fills it."""

    store: dict[str, Any]
    name: str
    place: int


class _ModuleBefore(NamedTuple):
    """A module of a copy as it is before a call, for compiled regions."""

    module: nn.Module
    # The names in its `__dict__`.
    names: set[str]
    submodules: dict[str, Any]
    submodules_before: dict[str, Any]
    # (name, value) of the attributes that forward may assign.
    attributes: list[tuple[str, Any]]


def _state_before(module: nn.Module) -> _ModuleBefore:
    submodules = module._modules
    attributes = [("training", module.training), *_own_attributes(module)]
    return _ModuleBefore(module, set(module.__dict__), submodules, dict(submodules), attributes)


class Skeleton:
    """One runnable copy: where each leaf goes, and how to leave it as it was before the call."""

    __slots__ = (
        "__weakref__", "_filler", "_modules_before", "_objects", "_places", "_poison", "_registered", "_stores",
        "_tables", "_vacant", "is_ready", "lent", "module", "owners", "renormed", "targets",
    )  # fmt: skip

    def __init__(
        self, template: nn.Module, order: dict[Path, int], first: dict[Path, Path], fillers: dict[Hashable, Straight]
    ) -> None:
        memo: dict[int, Any] = {}
        self.module: nn.Module = duplicate(template, memo)
        slots = walk(self.module, "functional")
        # Where extra state goes.
        self.owners: dict[Path, nn.Module] = {slot.path: slot.owner for slot in slots if slot.store is None}
        # In the order of the leaves, so that they fill the slots as they come.
        self.targets: list[Target] = _find_targets(slots, order, first)
        self._poison = [target.store[target.name] for target in self.targets]
        # None where the leaves fill the slots as they come, without ties.
        self._places: list[int] | None = [target.place for target in self.targets]
        if self._places == list(range(len(order))):
            self._places = None
        # The tables that hold the slots, each once.
        self._stores = list({id(target.store): target.store for target in self.targets}.values())
        self._filler: Straight = _find_filler(self.targets, self._stores, fillers)

        modules = [unwrap(m, "functional") for m in self.module.modules()]
        # Embeddings with max_norm write the rows that they look up.
        self.renormed: set[int] = self._places_in([m._parameters for m in modules if is_renormed(m)])
        self.lent: set[int] = self._places_in([m._buffers for m in modules if _is_idle_norm(m)])
        self._note_state(modules, memo)
        # Whether no call, and no caller who got a constant, has written one. Every call of apply asks, so that a method
        # in between would cost each of them a call.
        self.is_ready: Callable[[], bool] = self._objects.is_unwritten

    def _note_state(self, modules: list[nn.Module], memo: dict[int, Any]) -> None:
        """Note the state that each call starts from; `memo` has the objects that were copied."""
        # A slot that is None may be filled by forward: a cache registered in advance.
        stores = _stores_of(modules)
        self._vacant: list[tuple[dict[str, Any], str]] = []
        for store in stores:
            self._vacant += [(store, name) for name, value in store.items() if value is None]
        self._tables = _Tables(modules)
        copied = {id(new) for old, new in memo.items() if id(new) != old}
        self._objects = _Objects(modules, copied)
        # For compiled regions.
        self._registered = [(store, set(store)) for store in stores]
        self._modules_before = list(map(_state_before, modules))

    def _places_in(self, stores: list[dict[str, Any]]) -> set[int]:
        """Return the places of the leaves that fill slots of some tables."""
        ids = set(map(id, stores))
        return {target.place for target in self.targets if id(target.store) in ids}

    def bind(self, leaves: list[Any]) -> None:
        """Put the leaves, in plan order, into their slots."""
        if not self._objects.count:
            self._objects.mark()
        if self._places is not None:
            leaves = [leaves[i] for i in self._places]
        self._filler.run(self._stores, leaves)

    def bind_traced(self, leaves: list[Any]) -> None:
        """`bind` in a compiled region, which cannot compile code."""
        for store, name, place in self.targets:
            store[name] = leaves[place]

    def has_hidden_writes(self) -> bool:
        """Return whether a call wrote attributes of torch's own modules, or constants past their version counters."""
        return self._tables.has_hidden_writes() or self._objects.has_hidden_writes()

    def constants(self) -> list[Tensor]:
        """Return the tensors in attributes, other than leaves."""
        return self._objects.list_tensors()

    def find_made_parameter(self) -> str | None:
        """Return the name of a trainable parameter that forward registered where no leaf goes, or None."""
        known = {(id(target.store), target.name) for target in self.targets}
        for path, module in self.module.named_modules():
            for name, value in module._parameters.items():
                is_new = (id(module._parameters), name) not in known
                if is_new and isinstance(value, nn.Parameter) and value.requires_grad:
                    return f"{path}.{name}".lstrip(".")
        return None

    def find_replaced(self, bound: list[Any]) -> dict[int, Tensor]:
        """Return the tensors that forward put in place of the leaves that were bound, by the places of the leaves."""
        replaced: dict[int, Tensor] = {}
        for store, name, place in self.targets:
            now = store.get(name)
            if now is not None and now is not bound[place]:
                replaced[place] = now
        return replaced

    def reset(self) -> bool:
        """Empty the slots and undo the writes of forward to its modules and to the objects that they hold.

        Returns:
            Whether the skeleton can run another call.
        """
        self._filler.run(self._stores, self._poison)
        for store, name in self._vacant:
            store[name] = None
        self._tables.restore()
        return self._objects.restore()

    def reset_traced(self) -> None:
        """`reset` in a compiled region, where writes to a module show in `module.__dict__` alone."""
        for (store, name, _), nothing in zip(self.targets, self._poison, strict=True):
            store[name] = nothing
        for store, name in self._vacant:
            store[name] = None
        for store, names in self._registered:
            _remove_others(store, names)
        for before in self._modules_before:
            own = before.module.__dict__
            _remove_others(own, before.names)
            for name, value in before.attributes:
                if own.get(name) is not value:
                    own[name] = value
            if list(before.submodules.values()) != list(before.submodules_before.values()):
                _refill(before.submodules, before.submodules_before)
        _restore(self._objects.containers)


def _is_idle_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm of torch's in evaluation mode, which writes nothing."""
    return type(module) in _NORMS and not module.training and _is_stateless(module)


def _find_targets(slots: list[Slot], order: dict[Path, int], first: dict[Path, Path]) -> list[Target]:
    """Return the slots that leaves fill, in the order of the leaves.

    Tied slots share the leaf of their first path; a shared submodule has its slots once.
    """
    targets: dict[tuple[int, str], Target] = {}
    for path, owner, store, _ in slots:
        if store is not None:
            place = order[first.get(path, path)]
            targets.setdefault((id(owner), path[-1]), Target(store, path[-1], place))
    return sorted(targets.values(), key=attrgetter("place"))


def _find_filler(targets: list[Target], stores: list[dict[str, Any]], fillers: dict[Hashable, Straight]) -> Straight:
    """Return the code that fills the targets: the code of an earlier skeleton of these slots, if there is one."""
    numbers = {id(store): number for number, store in enumerate(stores)}
    slots = tuple([(numbers[id(target.store)], target.name) for target in targets])
    return fillers.setdefault(slots, make_filler(slots))


class _Tables:
    """The tables of `nn.Module` in all modules of a copy, and how a write to them shows."""

    __slots__ = (
        "_custom", "_empty", "_everything", "_filled", "_length", "_modes", "_next_hook", "_own", "_parents", "_plain",
        "_submodules",
    )  # fmt: skip

    def __init__(self, modules: list[nn.Module]) -> None:
        stores = _stores_of(modules)
        children = [m._modules for m in modules]
        hooks: list[Any] = []
        for m in modules:
            hooks += [m.__dict__[name] for name in (*_HOOKS, "_non_persistent_buffers_set")]
        self._own = [m.__dict__ for m in modules]
        self._modes = list(map(_TRAINING, self._own))
        self._next_hook = RemovableHandle.next_id
        self._parents = [m.__dict__ for m in modules if m._modules]
        self._submodules = list(map(tuple, map(dict.values, map(_MODULES, self._parents))))
        # Additions to torch's own modules show in the number of entries; `any` is the faster test of an empty table.
        counted = [*self._own, *stores, *[table for table in children if not table]]
        self._filled = [table for table in counted if table]
        self._empty = [table for table in counted if not table]
        self._length = sum(map(len, self._filled))
        # Modules of other classes may write anything that they hold.
        self._custom: list[Kept] = []
        self._plain: list[Kept] = []
        for m in modules:
            kept = self._plain if _is_stateless(m) else self._custom
            kept.append(_keep(m.__dict__))
        self._everything = [_keep(table) for table in [*self._own, *stores, *children, *hooks]]

    def restore(self) -> None:
        """Undo the writes of a call."""
        _restore(self._custom)
        # All loops are in C, for speed.
        if (
            # One number for all tables: removed entries are put back above, so that additions cannot hide.
            sum(map(len, self._filled)) != self._length
            or any(self._empty)
            # A hook was registered somewhere since the last look: maybe here.
            or RemovableHandle.next_id != self._next_hook
            or list(map(_TRAINING, self._own)) != self._modes
            or list(map(tuple, map(dict.values, map(_MODULES, self._parents)))) != self._submodules
        ):
            self._next_hook = RemovableHandle.next_id
            _restore(self._everything)

    def has_hidden_writes(self) -> bool:
        """Return whether a call assigned attributes of torch's own modules, which `restore` does not look at."""
        return any(_ids_of_values(own) != _ids_of_values(before) for own, before, _ in self._plain)


class _Objects:
    """The modules of a copy and the objects that they hold, and how a change to them shows.

    Args:
        modules: The modules.
        copied: The ids of the objects that are copies. Others are shared with the rest of the program.
    """

    __slots__ = ("_constants", "_is_known", "_marks", "_originals", "_parts", "containers", "count")

    def __init__(self, modules: list[nn.Module], copied: set[int]) -> None:
        self.containers: list[Kept] = []
        # Tensors that are not leaves, copies of them, and numpy arrays.
        self._constants: list[Any] = []
        self._originals: list[Tensor] = []
        # The versions of the constants, or their bytes.
        self._marks: list[Any] = []
        # Whether every change to the objects shows.
        self._is_known = True
        # The objects that nothing else may hold between calls, and how many references to each there are then.
        self._parts: list[Any] = [*modules]
        self.count: int = 0
        left = copied - set(map(id, modules))
        for module in modules:
            for _, value in _own_attributes(module):
                self._note(value, left)

    def _note(self, value: Any, left: set[int]) -> None:
        """Note an object of the module and its parts.

        Args:
            value: The object.
            left: The ids of copied objects that are not noted yet.
        """
        if id(value) not in left or isinstance(value, Poison):
            return
        left.discard(id(value))
        if isinstance(value, (Tensor, np.ndarray)):
            self._note_constant(value)
        elif not _is_value(value):
            self._note_object(value)
            self._parts.append(value)
            for _, child in _children_of(value):
                self._note(child, left)

    def _note_constant(self, value: Tensor | np.ndarray) -> None:
        if isinstance(value, np.ndarray):
            self._constants.append(value)
        # Tensors of inference mode have no version counter.
        elif not value.is_inference():
            self._constants.append(value)
            self._originals.append(value.detach().clone())

    def _note_object(self, value: Any) -> None:
        """Note how a change to an object shows, but not to the objects in it."""
        if isinstance(value, (dict, list, set, deque)):
            self.containers.append(_keep(value))
        elif _is_plain(value) and not _slots_of(value):
            self.containers.append(_keep(getattr(value, "__dict__", {})))
            # A module that is not registered has state in its tables.
            if isinstance(value, nn.Module):
                self._is_known = False
        elif not isinstance(value, _FROZEN):
            self._is_known = False

    def mark(self) -> None:
        """Note the state before the first call, when nothing else holds the objects."""
        self.count = sum(map(sys.getrefcount, self._parts))
        self._marks = self._read_constants()

    def _read_constants(self) -> list[Any]:
        return [x._version if isinstance(x, Tensor) else x.tobytes() for x in self._constants]

    def is_unwritten(self) -> bool:
        """Return whether the constants are as they were before the first call."""
        return not (self._constants and self.count) or self._read_constants() == self._marks

    def has_hidden_writes(self) -> bool:
        """Return whether a call wrote tensors past their version counters."""
        return not all(map(is_equal, self.list_tensors(), self._originals))

    def list_tensors(self) -> list[Tensor]:
        """Return the tensors that are not leaves."""
        return [x for x in self._constants if isinstance(x, Tensor)]

    def restore(self) -> bool:
        """Refill the containers that changed; return whether nothing else has changed and nothing else holds a part."""
        if self.containers:
            _restore(self.containers)
        if not self._is_known:
            return False
        if self._constants and self._read_constants() != self._marks:
            return False
        # One number for all: no count can fall.
        if sum(map(sys.getrefcount, self._parts)) == self.count:
            return True
        # A function that calls itself holds its variables until the collector runs.
        gc.collect(0)
        return sum(map(sys.getrefcount, self._parts)) == self.count


def _is_value(value: Any) -> bool:
    """Return whether an object hashes by its value, and so does not change it."""
    if isinstance(value, (dict, list, set, deque, *_FROZEN)) or (_is_plain(value) and not _slots_of(value)):
        return False
    return type(value).__hash__ not in (None, object.__hash__)


def _stores_of(modules: list[nn.Module]) -> list[dict[str, Any]]:
    """Return the tables of parameters and buffers."""
    return [table for m in modules for table in (m._parameters, m._buffers)]


def _own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, value) of the attributes that forward may write, besides the tables and the mode."""
    if _is_stateless(module):
        return []
    return [(name, value) for name, value in module.__dict__.items() if name not in _OWN_TABLES]


def _keep(container: Any) -> Kept:
    if isinstance(container, dict):
        copied = dict(cast("dict[Any, Any]", container))
        return container, copied, list(copied)
    return container, list(container), None


def _values(container: Any) -> Iterable[Any]:
    if isinstance(container, dict):
        return container.values()
    return container


def _restore(kept: list[Kept]) -> None:
    """Refill the containers that changed: by identity, since comparing tensors computes."""
    for container, before, keys in kept:
        is_same = len(container) == len(before) and all(map(is_, _values(container), _values(before)))
        # A value may have got another key.
        if not is_same or (keys is not None and [*container] != keys):
            _refill(container, before)


def _ids_of_values(table: dict[str, Any]) -> list[int]:
    return list(map(id, table.values()))


def _remove_others(table: dict[str, Any], names: set[str]) -> None:
    """Remove the entries that have other names."""
    for name in list(table):
        if name not in names:
            del table[name]


def _refill(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(before)
    else:
        container.extend(before)


def _is_stateless(module: nn.Module) -> bool:
    """Return whether a module's class is torch's own and writes nothing on itself in forward.

    Recurrent layers keep `_flat_weights`.
    """
    if not type(module).__module__.startswith("torch.nn.modules") or isinstance(module, nn.RNNBase):
        return False
    return not any(module.__dict__[name] for name in _HOOKS)
