"""The values that a function reads from around itself: variables and attributes, in keys that compare."""

import functools
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from decimal import Decimal
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from tdfunc._jit.attributes import Bound, has_attributes
from tdfunc._jit.readers import Reader, find_parameters, find_readers
from tdfunc.core.errors import ConcurrencyError, UnsupportedError, brief

_ATOMS = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONTAINERS = (tuple, list, dict, set, frozenset, deque, bytearray)
_CHANGEABLE = (list, dict, set, deque, bytearray, np.ndarray, nn.Module)
_MAX_ITEMS = 1000
_MAX_DEPTH = 8
# Of the objects among the arguments whose attributes are read.
_MAX_OBJECTS = 256
# Of an attribute, during traces, until it counts as changed by the function.
_MAX_CHANGES = 3


class Same:
    """An object compared by identity, and kept alive so that its identity is not given to another."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


# Any: values of every type.
def by_equality(value: Any) -> Any:
    """Return the key of an object that counts by its own `==`, or else as itself; dataclasses count by their fields."""
    kind = type(value)
    if kind.__eq__ is object.__eq__ or kind.__hash__ is None:
        return Same(value)
    if is_dataclass(value):
        parts = [freeze(getattr(value, field.name), by_tensor=True, other=by_equality) for field in fields(value)]
        return kind, tuple(parts)
    return kind, value


# Any: values of every type are frozen into hashable ones.
def freeze(value: Any, depth: int = 0, *, by_tensor: bool = False, other: Callable[[Any], Any] = Same) -> Any:
    """Return a hashable key that differs when the value does: contents of containers, else the object itself.

    Containers and arrays of more items than a configuration has, or nested deeper, count as objects, whose keys are
    made by `other`. A tensor counts by its shape, dtype and device, or as an object.
    """
    # All cases are in one function for speed: each call of a jitted function freezes its arguments without tensors.
    inner = functools.partial(freeze, depth=depth + 1, by_tensor=by_tensor, other=other)
    kind = type(value)
    if isinstance(value, (float, complex)):
        # 0.0 == -0.0 and nan != nan: their text tells them apart, and finds them again.
        return kind, repr(value)
    if isinstance(value, _ATOMS):
        return kind, value
    if isinstance(value, Tensor):
        if by_tensor:
            return Same(value)
        return (kind, value.shape, value.dtype, value.device)
    if isinstance(value, (np.ndarray, np.generic)) and value.size <= _MAX_ITEMS and not value.dtype.hasobject:
        return kind, value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, Decimal):
        # Zeros of both signs are equal, and so are numbers with other numbers of digits.
        return kind, str(value)
    if isinstance(value, nn.Module):
        held = ()
        if by_tensor:
            held = map(Same, (*value.parameters(), *value.buffers()))
        return Same(value), tuple([module.training for module in value.modules()]), *held
    if isinstance(value, (slice, range)):
        return kind, freeze((value.start, value.stop, value.step))
    if not isinstance(value, _CONTAINERS) or len(value) > _MAX_ITEMS or depth > _MAX_DEPTH:
        return other(value)
    if isinstance(value, dict):
        return kind, tuple([(inner(key), inner(item)) for key, item in value.items()])
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(map(inner, value))
    return kind, tuple(map(inner, value))


def can_change(value: Any) -> bool:
    """Return whether a value may change and stay the same object: a container, an array, a module with a mode."""
    return isinstance(value, _CHANGEABLE) or (isinstance(value, (tuple, frozenset)) and any(map(can_change, value)))


def static_part(value: Any, where: str) -> Any:
    """Return the part of a call's key that a non-tensor argument makes; values that cannot be hashed are refused."""
    frozen = freeze(value)
    if type(frozen) is Same and not isinstance(value, (types.FunctionType, type)):
        try:
            hash(value)
        except TypeError:
            raise UnsupportedError(
                f"jit: the argument {where} is neither a tensor nor a value that can be part of the cache key.",
                expected="tensors, trees, numbers, strings, containers of these, or hashable objects",
                got=type(value).__name__,
                hint="pass it as a tensor (torch.as_tensor), or close over it.",
            ) from None
        if is_dataclass(value):
            return type(value), tuple([static_part(getattr(value, field.name), where) for field in fields(value)])
        if type(value).__eq__ is not object.__eq__:
            return type(value), value
    return frozen


# An owner and a name.
_Place: TypeAlias = tuple[Same, str]


class Snapshot(NamedTuple):
    """The values at one moment; never changed, so that threads can share it."""

    readers: list[Reader]
    values: list[Any]
    token: tuple[Any, ...]
    # The places of those that can change and stay the same object.
    changeable: list[int]

    def named_parts(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield (how the code spells it, value, part of the token)."""
        names = [reader.name for reader in self.readers]
        return zip(names, self.values, self.token, strict=True)


class Environment:
    """The values that functions read from outside, and functions of their packages that they reach."""

    def __init__(self, *functions: Any, by_tensor: bool = False) -> None:
        self._functions = functions
        self._by_tensor = by_tensor
        self._ignored: set[_Place] = set()
        # How often an attribute changed during a trace, not by code in sight.
        self._changes: Counter[_Place] = Counter()
        # Taken at the first call: while an object is copied, its attributes are not there yet.
        self._last: Snapshot | None = None
        # By argument, and object or class of it; the objects are kept, so that ids stay.
        self._arguments: dict[tuple[str, int], tuple[Any, Environment]] = {}

    def of_argument(self, where: str, value: Any) -> "Environment":
        """Return the values that the functions read from an object that is an argument."""
        known = self._arguments.get((where, id(value)))
        if known is not None:
            return known[1]
        by_value = _is_in_key(value)
        kept = value
        if by_value:
            kept = type(value)
        known = self._arguments.get((where, id(kept)))
        if known is not None:
            return known[1]
        roots: list[Any] = []
        for function, name in find_parameters(self._functions, where):
            roots.append(Bound(function, value, is_private=by_value, parameter=name, only_attributes=True))
        if not by_value:
            roots.append([value])
        new = Environment(*roots, by_tensor=self._by_tensor)
        if len(self._arguments) >= _MAX_OBJECTS:
            self._arguments.clear()
        self._arguments[where, id(kept)] = kept, new
        return new

    def forget_arguments(self) -> None:
        """Let go of the objects that were arguments."""
        self._arguments.clear()

    def _part(self, reader: Reader, value: Any) -> Any:
        """Return the part of the token that a value makes."""
        if reader.counted == "nothing":
            return None
        if reader.counted == "identity":
            return Same(value)
        return freeze(value, by_tensor=self._by_tensor)

    def _take(self) -> Snapshot:
        readers = [reader for reader in find_readers(self._functions) if _place(reader) not in self._ignored]
        values = [reader.read() for reader in readers]
        token = tuple(map(self._part, readers, values))
        whole = [i for i, reader in enumerate(readers) if reader.counted == "contents"]
        return Snapshot(readers, values, token, [i for i in whole if can_change(values[i])])

    def _known(self) -> Snapshot:
        """Return the values that were read last, or now at the first call."""
        last = self._last
        if last is None:
            self._last = last = self._take()
        return last

    def snapshot(self) -> Snapshot:
        """Return the present values; its `token` is hashable and differs when one of them does."""
        last = self._known()
        if not last.readers:
            return last
        values = [reader.read() for reader in last.readers]
        same = all(map(is_, values, last.values))
        if same and all([self._part(last.readers[i], values[i]) == last.token[i] for i in last.changeable]):
            return last
        # A function may have been replaced by another, which reads other names.
        self._last = last = self._take()
        return last

    def settle(self, before: Snapshot) -> Snapshot | None:
        """Return the values after a trace, from then on without those that the function itself has changed.

        Return None where an attribute has changed that the code does not assign in sight: code of a library may have
        done so, or another thread, which makes the record one of neither value.
        """
        now = self._take()
        changed, foreign = _find_changes(before, now)
        self._changes.update(foreign)
        # Code that is not followed changes these each time.
        changed += [place for place in foreign if self._changes[place] >= _MAX_CHANGES]
        if changed:
            self._ignored.update(changed)
            now = self._take()
        self._last = now
        if foreign:
            return None
        return now

    def named_values(self) -> Iterator[tuple[str, Any]]:
        """Yield (how the code spells it, value) of the variables."""
        variables = [reader for reader in self._known().readers if not reader.is_attribute]
        return ((reader.name, reader.read()) for reader in variables)


def _find_changes(before: Snapshot, now: Snapshot) -> tuple[list[_Place], list[_Place]]:
    """Return the places that the recorded code has changed during a trace, and the attributes that something else has.

    Raises:
        ConcurrencyError: A variable was assigned, and not by the code.
    """
    old = dict(zip(map(_place, before.readers), zip(before.values, before.token, strict=True), strict=True))
    own = {_place(reader) for reader in (*before.readers, *now.readers) if reader.own}
    changed: list[_Place] = []
    foreign: list[_Place] = []
    for reader, value, part in zip(now.readers, now.values, now.token, strict=True):
        place = _place(reader)
        was, key = old.get(place, (value, part))
        if key == part:
            continue
        if was is value or place in own:
            changed.append(place)
        elif reader.is_attribute:
            foreign.append(place)
        else:
            raise ConcurrencyError(
                f"jit: {reader.name!r} was assigned while the function was recorded, and not by its code.",
                expected="values of closures and globals that stay during the first call",
                got=f"{brief(was)}, then {brief(value)}",
                hint="call again; assign it in the thread that calls.",
            )
    return changed, foreign


def _is_in_key(value: Any) -> bool:
    """Return whether the key of a call holds all values in an object: only what its methods read is left."""
    if not is_dataclass(value) or isinstance(value, type):
        return False
    return not any([has_attributes(type(getattr(value, field.name))) for field in fields(value)])


def _place(reader: Reader) -> _Place:
    return Same(reader.owner), reader.key
