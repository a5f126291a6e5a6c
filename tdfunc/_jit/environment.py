"""The values that a function reads from around itself: closure cells, defaults, globals, in keys that compare."""

import dis
import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from decimal import Decimal
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tdfunc.core.errors import ConcurrencyError, UnsupportedError, brief

_ATOMS = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONTAINERS = (tuple, list, dict, set, frozenset, deque, bytearray)
_CHANGEABLE = (list, dict, set, deque, bytearray, np.ndarray, nn.Module)
_MAX_ITEMS = 1000
_MAX_DEPTH = 8
_MISSING = object()
_SEEDERS = {"manual_seed", "fork_rng", "set_rng_state"}
_LIBRARIES = ("torch", "tdfunc", "optree", "numpy")


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


def seeds_error(function: str, where: str) -> UnsupportedError:
    """Return the error of a function that seeds a generator."""
    return UnsupportedError(
        f"jit: {function} seeds or makes a generator that it draws from, which a replay would not do again.",
        expected="draws from generators that are given, or from torch's default one as it is",
        got=where,
        hint="make and seed the torch.Generator outside of the function and pass it as an argument.",
    )


class _Reader(NamedTuple):
    """One place that code reads a value from."""

    name: str
    owner: Any
    read: Callable[[], Any]
    # True if the code assigns it.
    own: bool = False

    @property
    def place(self) -> tuple[Same, str]:
        return Same(self.owner), self.name


class Snapshot(NamedTuple):
    """The values at one moment; never changed, so that threads can share it."""

    readers: list[_Reader]
    values: list[Any]
    token: tuple[Any, ...]
    # The places of those that can change and stay the same object.
    changeable: list[int]


class Environment:
    """The values that functions, and functions of their packages that they name, read from outside."""

    def __init__(self, *functions: Callable[..., Any], by_tensor: bool = False) -> None:
        self._functions = functions
        self._freeze = functools.partial(freeze, by_tensor=by_tensor)
        self._ignored: set[tuple[Same, str]] = set()
        # Taken at the first call: while an object is copied, its attributes are not there yet.
        self._last: Snapshot | None = None

    def _take(self) -> Snapshot:
        readers = [reader for reader in self._readers() if reader.place not in self._ignored]
        values = [reader.read() for reader in readers]
        changeable = [i for i, value in enumerate(values) if can_change(value)]
        return Snapshot(readers, values, tuple(map(self._freeze, values)), changeable)

    def snapshot(self) -> Snapshot:
        """Return the present values; its `token` is hashable and differs when one of them does."""
        last = self._last
        if last is None:
            self._last = last = self._take()
            return last
        values = [reader.read() for reader in last.readers]
        same = all(map(is_, values, last.values))
        if same and all([self._freeze(values[i]) == last.token[i] for i in last.changeable]):
            return last
        # A function may have been replaced by another, which reads other names.
        self._last = last = self._take()
        return last

    def settle(self, before: Snapshot) -> Snapshot:
        """Return the values after a trace, from then on without those that the function itself has changed."""
        now = self._take()
        old = {r.place: (v, part) for r, v, part in zip(before.readers, before.values, before.token, strict=True)}
        own = {reader.place for reader in now.readers if reader.own}
        changed: set[tuple[Same, str]] = set()
        for reader, value, part in zip(now.readers, now.values, now.token, strict=True):
            was, key = old.get(reader.place, (value, part))
            if key != part:
                changed.add(reader.place)
                if was is not value and reader.place not in own:
                    raise ConcurrencyError(
                        f"jit: {reader.name!r} was assigned while the function was recorded, and not by its code.",
                        expected="values of closures and globals that stay during the first call",
                        got=f"{brief(was)}, then {brief(value)}",
                        hint="call again; assign it in the thread that calls.",
                    )
        if changed:
            self._ignored |= changed
            now = self._take()
        self._last = now
        return now

    def named_values(self) -> Iterator[tuple[str, Any]]:
        """Yield (how the code spells it, value)."""
        return ((reader.name, reader.read()) for reader in self._readers())

    def _readers(self) -> Iterator[_Reader]:
        return chain.from_iterable(map(_readers, self._functions))


def _readers(fn: Any) -> Iterator[_Reader]:
    package: str | None = None
    todo: list[Any] = [fn]
    seen: set[int] = set()
    while todo:
        function = todo.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        if isinstance(function, functools.partial):
            todo.append(function.func)
            yield _Reader("partial arguments", function, lambda p=function: p.args)
            yield _Reader("partial keywords", function, lambda p=function: p.keywords)
        elif isinstance(function, types.MethodType):
            todo.append(function.__func__)
            yield _Reader("self", function.__self__, lambda m=function: m.__self__)
        elif isinstance(function, types.FunctionType):
            if package is None and _package(function) not in _LIBRARIES:
                package = _package(function)
            readers = _closure_readers(function)
            # Of a library's functions (torch.vmap(fn), torch.func.grad(fn)) only their arguments are followed.
            if _package(function) == package:
                readers += _default_readers(function)
                _refuse_seeders(function)
                readers += _global_readers(function)
            for reader in readers:
                yield reader
                todo.append(reader.read())
        elif hasattr(function, "__wrapped__") and function is not fn:
            todo.append(function.__wrapped__)
        elif function is fn:
            yield _Reader("self", fn, lambda: fn)
            todo.append(type(fn).__call__)


def _stored_names(function: types.FunctionType) -> frozenset[str]:
    return _names(function.__code__, "STORE_GLOBAL", "STORE_DEREF")


def _closure_readers(function: types.FunctionType) -> list[_Reader]:
    stored = _stored_names(function)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [_Reader(name, cell, lambda cell=cell: contents(cell), name in stored) for name, cell in cells]


def _default_readers(function: types.FunctionType) -> list[_Reader]:
    readers: list[_Reader] = []
    if function.__defaults__:
        readers.append(_Reader("defaults", function, lambda: function.__defaults__))
    if function.__kwdefaults__:
        readers.append(_Reader("keyword defaults", function, lambda: function.__kwdefaults__))
    return readers


def _global_readers(function: types.FunctionType) -> list[_Reader]:
    stored = _stored_names(function)
    scope = function.__globals__
    names = _names(function.__code__, "LOAD_GLOBAL")
    readers: list[_Reader] = []
    for name in sorted(names & scope.keys()):
        if not isinstance(scope[name], types.ModuleType):
            readers.append(_Reader(name, scope, functools.partial(scope.get, name, _MISSING), name in stored))
    # Builtins, which a global may hide, and names that are assigned later.
    absent = names - scope.keys()
    if absent:
        readers.append(_Reader("new globals", function, functools.partial(scope.keys().isdisjoint, absent)))
    return readers


def _refuse_seeders(function: types.FunctionType) -> None:
    used = _names(function.__code__, "LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL")
    if not _SEEDERS.isdisjoint(used):
        raise seeds_error(function.__qualname__, " or ".join(sorted(_SEEDERS)))


def _package(function: types.FunctionType) -> str:
    return str(function.__globals__.get("__name__", "")).partition(".")[0]


def contents(cell: types.CellType) -> Any:
    """Return the contents of a closure cell, or a marker while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


@functools.lru_cache(maxsize=1000)
def _names(code: types.CodeType, *operations: str) -> frozenset[str]:
    """Return the names that code, and the code of functions inside it, loads or stores in these ways."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in operations}
    inner = [_names(constant, *operations) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(names.union(*inner))
