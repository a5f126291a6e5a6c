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
from operator import is_, itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.hooks import RemovableHandle

from tdfunc.core.errors import LeakError, UnsupportedError
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.modules.checkpoint import stand_in as checkpoint
from tdfunc.modules.extract import is_renormed, unwrap, walk
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
    modules = list(module.modules())
    tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values())]
    own = {id(part) for part in (*modules, *tensors) if part is not None}
    functions: list[tuple[types.FunctionType, types.FunctionType]] = []
    for name, value in found:
        replacement = None
        if isinstance(value, Tensor):
            replacement = stand_in(value, name)
        elif isinstance(value, _SHARED):
            replacement = value
        elif isinstance(value, types.FunctionType) and _reaches(value, own):
            # Cells that lead to parts of the module are filled below; the others stay shared.
            cells = [
                types.CellType() if _is_filled(cell) and _reaches(cell.cell_contents, own) else cell
                for cell in value.__closure__ or ()
            ]
            replacement = types.FunctionType(
                value.__code__, value.__globals__, value.__name__, None, tuple(cells) or None
            )
            replacement.__dict__.update(value.__dict__)
            functions.append((value, replacement))
        if replacement is not None:
            memo[id(value)] = replacement
    try:
        # The wrappers of torch.compile: the innermost first.
        for _, value in reversed(found):
            if isinstance(value, nn.Module) and unwrap(value, "functional") is not value:
                memo[id(value)] = copy.deepcopy(unwrap(value, "functional"), memo)
        copied = copy.deepcopy(module, memo)
        for old, new in functions:
            for cell, source in zip(new.__closure__ or (), old.__closure__ or (), strict=True):
                if cell is not source:
                    cell.cell_contents = copy.deepcopy(source.cell_contents, memo)
            new.__defaults__ = copy.deepcopy(old.__defaults__, memo)
            new.__kwdefaults__ = copy.deepcopy(old.__kwdefaults__, memo)
    # A class's own __deepcopy__ or __reduce__ may raise anything.
    except Exception as err:
        raise UnsupportedError(
            f"functional: {type(module).__name__} cannot be copied.",
            expected="attributes that copy.deepcopy accepts",
            got=f"{type(err).__name__}: {err}",
            hint="give the class of the object a __deepcopy__, or make the object inside forward.",
        ) from err
    return copied


def _reachable(root: Any, known: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield (name, object), each object once, of all that a copy looks into; known objects are not entered."""
    seen = {id(root)}
    queue: deque[tuple[str, Any]] = deque([("", root)])
    while queue:
        name, value = queue.popleft()
        yield name, value
        for inner, child in [] if id(value) in known else _children_of(value):
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
    if isinstance(value, (*_ATOMS, Tensor)) or not (isinstance(value, nn.Module) or _is_plain(value)):
        return []
    slots = [(name, getattr(value, name)) for name in _slots_of(value) if hasattr(value, name)]
    return [*getattr(value, "__dict__", {}).items(), *slots]


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
    except ValueError:  # a variable that was never assigned
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
    slots = [slot for slot in walk(module, "functional") if slot.store is not None]
    memo: dict[int, Any] = {id(torch_checkpoint.checkpoint): checkpoint}
    storages: dict[Any, Path] = {}
    for slot in slots:
        if id(slot.value) not in memo:
            memo[id(slot.value)] = Poison.of(slot.value, slot.path)
            storages.setdefault(storage_of(slot.value), slot.path)
    storages.pop(None, None)

    def stand_in(tensor: Tensor, name: str) -> Tensor | None:
        # A view of a weight, or a tensor computed from one, is stale under other weights.
        path = storages.get(storage_of(tensor), (name,) if tensor.grad_fn is not None else None)
        if path is not None:
            return Poison.of(tensor, path)
        return None

    for name, value in _reachable(module, set(memo)):
        base = value
        while isinstance(base, np.ndarray):
            base = base.base
        if base is not value and isinstance(base, Tensor) and storage_of(base) in storages:
            raise LeakError(
                f"functional: the numpy array {name!r} shares the memory of a weight.",
                expected="weights read from their module at each call",
                got=f"a view of {dotted(storages[storage_of(base)])!r}, which is not the weight of a call",
                hint="make it inside forward: self.weight.detach().numpy().",
            )
    template = duplicate(module, memo, stand_in)
    now = [slot for slot in walk(template, "functional") if slot.store is not None]
    kept = [dotted(slot.path) for slot in now if not isinstance(slot.value, Poison)]
    if kept or [slot.path for slot in now] != [slot.path for slot in slots]:
        raise UnsupportedError(
            f"functional: the copy of {type(module).__name__} is not independent of it.",
            expected="a copy with the same parameters and buffers, none of them shared",
            got=f"its own weights at {kept}" if kept else "other slots",
            hint="a __deepcopy__ must make a new module and pass its memo on to copy.deepcopy for every attribute.",
        )
    return template


def is_recomputing(template: nn.Module) -> bool:
    """Return whether a template has an attribute that recomputes a part."""
    return any(value is checkpoint for _, value in _reachable(template, set()))


# -- one runnable copy --------------------------------------------------------------------------------------------

# A container and a copy of it.
Kept: TypeAlias = tuple[Any, Any]


class Skeleton:
    """One runnable copy: where each leaf goes, and how to leave it as it was before the call."""

    __slots__ = (
        "_constants", "_containers", "_count", "_custom", "_empty_tables", "_everything", "_filled_tables", "_filler",
        "_handles", "_is_known", "_length", "_marks", "_modes", "_originals", "_own", "_parents", "_parts", "_places",
        "_plain", "_poison", "_registered", "_seen", "_stores", "_traced", "_vacant", "lent", "module", "owners",
        "renormed", "targets",
    )  # fmt: skip

    def __init__(
        self, template: nn.Module, order: dict[Path, int], first: dict[Path, Path], fillers: dict[Hashable, Straight]
    ) -> None:
        memo: dict[int, Any] = {}
        self.module: nn.Module = duplicate(template, memo)
        walked = walk(self.module, "functional")
        # Where extra state goes.
        self.owners: dict[Path, nn.Module] = {slot.path: slot.owner for slot in walked if slot.store is None}
        # Tied slots share the leaf of their first path; a shared submodule has its slots once.
        targets: dict[tuple[int, str], tuple[dict[str, Any], str, int]] = {}
        for path, owner, store, _ in walked:
            if store is not None:
                targets.setdefault((id(owner), path[-1]), (store, path[-1], order[first.get(path, path)]))
        # (store, name, place of the leaf), in the order of the leaves, so that they fill the slots as they come.
        self.targets: list[tuple[dict[str, Any], str, int]] = sorted(targets.values(), key=itemgetter(2))
        self._stores = list({id(store): store for store, _, _ in self.targets}.values())
        self._poison = [store[name] for store, name, _ in self.targets]
        # None where the leaves fill the slots as they come, without ties.
        places = [i for _, _, i in self.targets]
        self._places = None if places == list(range(len(order))) else places
        numbers = {id(store): number for number, store in enumerate(self._stores)}
        slots = tuple([(numbers[id(store)], name) for store, name, _ in self.targets])
        # The code that earlier skeletons of these slots made.
        self._filler: Straight = fillers.setdefault(slots, make_filler(slots))
        modules = [unwrap(m, "functional") for m in self.module.modules()]
        # Embeddings with max_norm write the rows that they look up; norms in evaluation mode write nothing.
        tables = {id(m._parameters) for m in modules if is_renormed(m)}
        norms = {id(m._buffers) for m in modules if type(m) in _NORMS and not m.training and _is_stateless(m)}
        self.renormed: set[int] = {i for store, _, i in self.targets if id(store) in tables}
        self.lent: set[int] = {i for store, _, i in self.targets if id(store) in norms}
        self._remember(modules, {id(new) for old, new in memo.items() if id(new) != old})

    def _remember(self, modules: list[nn.Module], copied: set[int]) -> None:
        """Note everything that a forward may write, to put it back after each call."""
        both = [table for m in modules for table in (m._parameters, m._buffers)]
        # A slot that is None may be filled by forward: a cache registered in advance.
        self._vacant = [(table, name) for table in both for name, value in table.items() if value is None]
        self._own = [m.__dict__ for m in modules]
        self._modes = list(map(_TRAINING, self._own))
        self._handles = RemovableHandle.next_id
        self._parents = [m.__dict__ for m in modules if m._modules]
        self._seen = _submodules(self._parents)
        # Additions to torch's own modules show in the number of entries; `any` is the faster test of an empty table.
        sized = [*self._own, *both, *[m._modules for m in modules if not m._modules]]
        self._filled_tables = [t for t in sized if t]
        self._empty_tables = [t for t in sized if not t]
        self._length = sum(map(len, self._filled_tables))
        hooks = [m.__dict__[name] for m in modules for name in (*_HOOKS, "_non_persistent_buffers_set")]
        self._everything = [_keep(table) for table in [*self._own, *both, *[m._modules for m in modules], *hooks]]
        # Modules of other classes may write anything that they hold.
        custom = [m for m in modules if not _is_stateless(m)]
        self._custom = [_keep(m.__dict__) for m in custom]
        self._plain = [_keep(m.__dict__) for m in modules if _is_stateless(m)]
        self._containers: list[Kept] = []
        # Tensors that are not leaves, copies of them, and numpy arrays.
        self._constants: list[Any] = []
        self._originals: list[Tensor] = []
        self._marks: list[Any] = []
        self._is_known = True
        # The objects that nothing else may hold between calls, and how many references to each there are then.
        self._parts: list[Any] = [*modules]
        self._count = 0
        own_names = {id(m): [(n, v) for n, v in m.__dict__.items() if n not in _OWN_TABLES] for m in custom}
        left = copied - set(map(id, modules))
        for attributes in own_names.values():
            for _, value in attributes:
                self._note(value, left)
        self._registered = [(table, set(table)) for table in both]
        self._traced = [
            (m, set(m.__dict__), m._modules, dict(m._modules), [("training", m.training), *own_names.get(id(m), [])])
            for m in modules
        ]

    def _note(self, value: Any, left: set[int]) -> None:
        """Note an object of the module and its parts, and how a change to it shows.

        Args:
            value: The object.
            left: The ids of objects that are copies and not noted yet. Others are shared with the rest of the program.
        """
        if id(value) not in left or isinstance(value, Poison):
            return
        left.discard(id(value))
        if isinstance(value, (Tensor, np.ndarray)):
            if isinstance(value, np.ndarray):
                self._constants.append(value)
            elif not value.is_inference():
                self._constants.append(value)
                self._originals.append(value.detach().clone())
            return
        if isinstance(value, (dict, list, set, deque)):
            self._containers.append(_keep(value))
        elif _is_plain(value) and not _slots_of(value):
            self._containers.append(_keep(getattr(value, "__dict__", {})))
            # A module that is not registered has state in its tables.
            self._is_known &= not isinstance(value, nn.Module)
        elif not isinstance(value, _FROZEN):
            # Objects that hash by their value do not change it.
            if type(value).__hash__ not in (None, object.__hash__):
                return
            self._is_known = False
        self._parts.append(value)
        for _, child in _children_of(value):
            self._note(child, left)

    def bind(self, leaves: list[Any]) -> None:
        """Put the leaves, in plan order, into their slots."""
        if not self._count:
            self._count = sum(map(sys.getrefcount, self._parts))
            self._marks = self._read_constants()
        self._filler.run(self._stores, leaves if self._places is None else [leaves[i] for i in self._places])

    def bind_traced(self, leaves: list[Any]) -> None:
        """`bind` in a compiled region, which cannot compile code."""
        for store, name, i in self.targets:
            store[name] = leaves[i]

    def _empty(self) -> None:
        for (store, name, _), nothing in zip(self.targets, self._poison, strict=True):
            store[name] = nothing
        for table, name in self._vacant:
            table[name] = None

    def is_ready(self) -> bool:
        """Return whether no call, and no caller who got a constant, has written one."""
        return not (self._constants and self._count) or self._read_constants() == self._marks

    def _read_constants(self) -> list[Any]:
        return [x._version if isinstance(x, Tensor) else x.tobytes() for x in self._constants]

    def has_hidden_writes(self) -> bool:
        """Return whether a call wrote attributes of torch's own modules, or constants past their version counters."""
        tensors = [x for x in self._constants if isinstance(x, Tensor)]
        changed = any([list(map(id, own.values())) != list(map(id, kept.values())) for own, kept in self._plain])
        return changed or not all(map(is_equal, tensors, self._originals))

    def reset(self) -> bool:
        """Empty the slots and undo the writes of forward to its modules and to the objects that they hold.

        Returns:
            Whether the skeleton can run another call.
        """
        self._filler.run(self._stores, self._poison)
        for table, name in self._vacant:
            table[name] = None
        _restore(self._custom)
        if (
            # One number for all tables: removed entries are put back above, so that additions cannot hide.
            sum(map(len, self._filled_tables)) != self._length
            or any(self._empty_tables)
            # A hook was registered somewhere since the last look: maybe here.
            or RemovableHandle.next_id != self._handles
            or list(map(_TRAINING, self._own)) != self._modes
            or _submodules(self._parents) != self._seen
        ):
            self._handles = RemovableHandle.next_id
            _restore(self._everything)
        if self._containers:
            _restore(self._containers)
        if not self._is_known or not self.is_ready():
            return False
        # One number for all: no count can fall.
        if sum(map(sys.getrefcount, self._parts)) == self._count:
            return True
        # A function that calls itself holds its variables until the collector runs.
        gc.collect(0)
        return sum(map(sys.getrefcount, self._parts)) == self._count

    def reset_traced(self) -> None:
        """`reset` in a compiled region, where writes to a module show in `module.__dict__` alone."""
        self._empty()
        for table, names in self._registered:
            for name in list(table):
                if name not in names:
                    del table[name]
        for module, names, table, before, attributes in self._traced:
            own = module.__dict__
            for name in list(own):
                if name not in names:
                    del own[name]
            for name, value in attributes:
                if own.get(name) is not value:
                    own[name] = value
            if list(table.values()) != list(before.values()):
                _refill(table, before)
        _restore(self._containers)


def _submodules(parents: list[dict[str, Any]]) -> list[tuple[nn.Module, ...]]:
    """Return the submodules of modules that are given by their `__dict__`."""
    return list(map(tuple, map(dict.values, map(_MODULES, parents))))


def _keep(container: Any) -> Kept:
    return container, dict(container) if isinstance(container, dict) else list(container)


def _values(container: Any) -> Iterable[Any]:
    if isinstance(container, dict):
        return container.values()
    return container


def _restore(kept: list[Kept]) -> None:
    """Refill the containers that changed: by identity, since comparing tensors computes."""
    for container, before in kept:
        if len(container) != len(before) or not all(map(is_, _values(container), _values(before))):
            _refill(container, before)


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
