"""The state of a copy of a module before a call: how a write to it shows, and how it is undone.

`Tables` has the tables of `nn.Module` in all modules of the copy, `Objects` the other objects that they hold.
"""

import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Iterable
from operator import is_, itemgetter
from typing import Any, TypeAlias, cast

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tdfunc.modules.poison import Poison, is_equal
from tdfunc.modules.skeletons.parts import children_of, is_plain, slots_of

# The tables of nn.Module itself; the rest of a module's `__dict__` is its own.
_OWN_TABLES = frozenset(nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# The lists of weights that recurrent layers make of their parameters, and a mark of transformers.
_CACHES = frozenset(["_flat_weights", "_flat_weight_refs", "_output_capturing_hooks_installed"])
_MODULES = itemgetter("_modules")
_TRAINING = itemgetter("training")
_NUMBERS = (bool, int, float, complex, str, bytes)
# They cannot change themselves, whatever their parts do.
_FROZEN = (tuple, frozenset, types.FunctionType, types.MethodType, functools.partial)
# A container, a copy of it, and the keys of a dict.
Kept: TypeAlias = tuple[Any, Any, list[Any] | None]


class Tables:
    """The tables of `nn.Module` in all modules of a copy, and how a write to them shows."""

    __slots__ = (
        "_custom", "_empty", "_everything", "_filled", "_length", "_modes", "_next_hook", "_own", "_parents", "_plain",
        "_submodules",
    )  # fmt: skip

    def __init__(self, modules: list[nn.Module]) -> None:
        stores = stores_of(modules)
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
            kept = self._plain if is_stateless(m) else self._custom
            kept.append(_keep(m.__dict__))
        self._everything = [_keep(table) for table in [*self._own, *stores, *children, *hooks]]

    def restore(self) -> None:
        """Undo the writes of a call."""
        restore_all(self._custom)
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
            restore_all(self._everything)

    def find_assigned(self, module: nn.Module) -> list[str]:
        """Return the names of the attributes of a module to which forward assigned another value.

        The older spectral norm of torch computes `weight` of `weight_orig` in each call.
        """
        own = module.__dict__
        for table, before, _ in (*self._custom, *self._plain):
            if table is own:
                names = [name for name in {**before, **own} if name not in _OWN_TABLES and name not in _CACHES]
                assigned = [name for name in names if not _is_same(own.get(name), before.get(name))]
                return [name for name in assigned if f"{name}_orig" not in module._parameters]
        return []

    def has_hidden_writes(self) -> bool:
        """Return whether a call assigned attributes of torch's own modules, which `restore` does not look at."""
        return any(_ids_of_values(own) != _ids_of_values(before) for own, before, _ in self._plain)


class Objects:
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
            for _, value in own_attributes(module):
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
            for _, child in children_of(value):
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
        elif is_plain(value) and not slots_of(value):
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

    def find_written(self) -> set[int]:
        """Return the ids of the containers, tensors and arrays whose contents a call changed."""
        written = {
            id(container) for container, before, keys in self.containers if not _is_kept(container, before, keys)
        }
        for constant, now, mark in zip(self._constants, self._read_constants(), self._marks, strict=True):
            if now != mark:
                written.add(id(constant))
        return written

    def list_tensors(self) -> list[Tensor]:
        """Return the tensors that are not leaves."""
        return [x for x in self._constants if isinstance(x, Tensor)]

    def restore(self) -> bool:
        """Refill the containers that changed; return whether nothing else has changed and nothing else holds a part."""
        if self.containers:
            restore_all(self.containers)
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
    if isinstance(value, (dict, list, set, deque, *_FROZEN)) or (is_plain(value) and not slots_of(value)):
        return False
    return type(value).__hash__ not in (None, object.__hash__)


def stores_of(modules: list[nn.Module]) -> list[dict[str, Any]]:
    """Return the tables of parameters and buffers."""
    return [table for m in modules for table in (m._parameters, m._buffers)]


def own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, value) of the attributes that forward may write, besides the tables and the mode."""
    if is_stateless(module):
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


def restore_all(kept: list[Kept]) -> None:
    """Refill the containers that changed: by identity, since comparing tensors computes."""
    for container, before, keys in kept:
        if not _is_kept(container, before, keys):
            refill(container, before)


# Any: a container and a copy of it.
def _is_kept(container: Any, before: Any, keys: list[Any] | None) -> bool:
    """Return whether a container has the contents, and a dict the keys, that it had before."""
    is_same = len(container) == len(before) and all(map(is_, _values(container), _values(before)))
    # A value may have got another key.
    return is_same and (keys is None or [*container] == keys)


# Any: values of attributes.
def _is_same(value: Any, before: Any) -> bool:
    """Return whether an attribute has the value that it had: the same object, or an equal number or text.

    A tensor that was computed from weights is poison before, and is computed again in each call.
    """
    if value is before or isinstance(before, Poison):
        return True
    return isinstance(value, _NUMBERS) and type(value) is type(before) and value == before


def _ids_of_values(table: dict[str, Any]) -> list[int]:
    return list(map(id, table.values()))


def remove_others(table: dict[str, Any], names: set[str]) -> None:
    """Remove the entries that have other names."""
    for name in list(table):
        if name not in names:
            del table[name]


def refill(container: Any, before: Any) -> None:
    """Give a container the contents that it had before."""
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(before)
    else:
        container.extend(before)


def is_stateless(module: nn.Module) -> bool:
    """Return whether a module's class is torch's own and writes nothing on itself in forward.

    Recurrent layers keep `_flat_weights`.
    """
    if not type(module).__module__.startswith("torch.nn.modules") or isinstance(module, nn.RNNBase):
        return False
    return not any(module.__dict__[name] for name in _HOOKS)
