"""The Python values around a module's forward: globals, defaults, closure cells, attributes of classes and objects.

A trace reads them once. Followed are the forwards of a module's classes and the functions of the same packages that
they reach; torch's own code is not. What cannot be followed is named: then a trace is not replayed unasked.
"""

import dis
import types
from collections.abc import Callable, Hashable, Iterator
from enum import Enum
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tdfunc._jit.environment import can_change, contents, freeze

_LIBRARIES = ("torch", "builtins")
# Packages whose functions return the same for the same arguments.
_PURE = frozenset((
    *_LIBRARIES, "tdfunc", "math", "cmath", "operator", "_operator", "typing", "typing_extensions", "functools",
    "itertools", "collections", "dataclasses", "enum", "abc", "types", "numbers", "numpy", "einops", "warnings",
    "contextlib", "copy", "__future__",
))  # fmt: skip
_IMPURE_NAMES = frozenset(("random", "load", "loadtxt", "genfromtxt", "fromfile", "memmap"))
_IMPURE_BUILTINS = frozenset((
    "open", "input", "globals", "locals", "vars", "getattr", "eval", "exec", "__import__", "id", "dir",
))  # fmt: skip
_ATOMS = (
    bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.layout, Tensor,
    torch.memory_format, np.generic, range, slice, type(...), property,
)  # fmt: skip
_CONTAINERS = (tuple, list, dict, set, frozenset)
# As `freeze` looks at no more.
_MAX_ITEMS, _MAX_DEPTH, _MAX_FUNCTIONS = 1000, 8, 300
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__", "__call__")

Read = Callable[[], Any]


class _State(NamedTuple):
    """The values at one moment, and what to look at; never changed, so that threads can share it."""

    read: list[Read]
    values: list[Any]
    frozen: list[Hashable]
    watched: list[int]
    token: Hashable


class Globals:
    """Reads the values; `token` differs when one of them does. `unknown` names what cannot be read, or is None."""

    # Any: a global may hold anything.
    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.unknown, self._read = _survey(module)
        self._state = _State(self._read, [], [], [], ())

    def token(self) -> Hashable:
        """Return something hashable that stands for the present values."""
        # One look at the attribute: another thread may replace it.
        state = self._state
        values = [read() for read in state.read]
        same = len(values) == len(state.values) and all(map(is_, values, state.values))
        # The same container may have other contents.
        if same and all([freeze(values[i]) == state.frozen[i] for i in state.watched]):
            return state.token
        if state.values and not all(map(_is_plain_change, values, state.values)):
            # Another function or object reads other names.
            self.unknown, self._read = _survey(self._module)
            state = state._replace(read=self._read)
            values = [read() for read in state.read]
        frozen = [freeze(value) for value in values]
        watched = [i for i, value in enumerate(values) if can_change(value)]
        self._state = _State(state.read, values, frozen, watched, tuple(frozen))
        return self._state.token


def _is_plain_change(now: Any, before: Any) -> bool:
    return (now is before and not can_change(now)) or (isinstance(now, _ATOMS) and isinstance(before, _ATOMS))


def _package(module: str | None) -> str:
    return str(module).partition(".")[0]


def _own(cls: type) -> list[type]:
    """Return the classes among a class and its bases that are no library's."""
    return [owner for owner in cls.__mro__ if _package(owner.__module__) not in _PURE]


def _reader(cls: type, name: str) -> Read:
    """Return what reads a class attribute: the same object each time, where getattr would bind a method anew."""
    found = _look_up(cls, name)
    bound = hasattr(type(found), "__get__") and not isinstance(found, (types.FunctionType, staticmethod, property))
    return partial(_look_up, cls, name) if bound else partial(getattr, cls, name, None)


def _look_up(cls: type, name: str) -> Any:
    return next((vars(owner)[name] for owner in cls.__mro__ if name in vars(owner)), None)


def _survey(module: nn.Module) -> tuple[str | None, list[Read]]:
    survey = _Survey(module)
    survey.run(module)
    return survey.unknown, list(survey.places.values())


class _Survey:
    """One walk over all that the forwards of a module can read."""

    def __init__(self, module: nn.Module) -> None:
        self.places: dict[Hashable, Read] = {}
        self.unknown: str | None = None
        self._modules = {id(sub) for sub in module.modules()}
        self._packages = {_package(owner.__module__) for sub in module.modules() for owner in _own(type(sub))}
        self._names: set[str] = set()
        self._functions: set[types.FunctionType] = set()
        # Of classes all attributes (True) or those that some code names; objects by identity, kept alive.
        self._classes: dict[type, bool] = {}
        self._objects: dict[int, Any] = {}

    def run(self, module: nn.Module) -> None:
        for sub in module.modules():
            self._start(sub)
        size = -1
        # Each function may name more attributes of what was found before.
        while size != (size := len(self._names) + len(self._functions) + len(self._classes) + len(self._objects)):
            for cls, whole in list(self._classes.items()):
                self._look_into_class(cls, whole)
            for value in list(self._objects.values()):
                self._look_into_object(value)

    def _refuse(self, what: str) -> None:
        self.unknown = self.unknown or what

    def _start(self, sub: nn.Module) -> None:
        cls = type(sub)
        own = _own(cls)
        if own:
            if getattr(cls, "__getattr__", None) is not nn.Module.__getattr__:
                self._refuse(f"{cls.__qualname__}.__getattr__")
            # The forward of a library's layer may call methods that its own code does not name.
            self._classes[cls] = any(owner not in (nn.Module, object) and owner not in own for owner in cls.__mro__)
            self._place((cls, "forward"), partial(getattr, cls, "forward", None), "forward")
            self._place((cls, "__call__"), partial(getattr, cls, "__call__", None), "__call__")
        for name, value in vars(sub).items():
            if isinstance(value, types.FunctionType):
                if _package(value.__module__) not in _PURE:
                    self._packages.add(_package(value.__module__))
                self._value(value, name)
            elif own and name not in nn.Module().__dict__:
                self._value(value, f"self.{name}")

    def _place(self, place: Hashable, read: Read, what: str) -> None:
        if place not in self.places:
            self.places[place] = read
            self._value(read(), what)

    def _look_into_class(self, cls: type, whole: bool) -> None:
        for owner in _own(cls):
            for name in list(vars(owner)):
                if name in self._names or (whole and not name.startswith("__")):
                    what = f"{cls.__qualname__}.{name}"
                    self._place((cls, name), _reader(cls, name), what)

    def _look_into_object(self, value: Any) -> None:
        cls = type(value)
        own: dict[str, Any] = getattr(value, "__dict__", {})
        for owner in _own(cls):
            for name, found in list(vars(owner).items()):
                special = name.startswith("__") and isinstance(found, types.FunctionType) and name not in _CONSTRUCTORS
                if name in self._names or name == "__call__" or (special and name not in ("__repr__", "__str__")):
                    slot = isinstance(found, types.MemberDescriptorType)
                    read = partial(getattr, value, name, None) if slot else _reader(cls, name)
                    self._place((id(value) if slot else cls, name), read, f"{cls.__qualname__}.{name}")
        for name in self._names.intersection(own) | self._names.intersection(self._class_names(cls)):
            self._place((id(value), name, "own"), partial(own.get, name), f"{cls.__qualname__}.{name}")

    def _class_names(self, cls: type) -> Iterator[str]:
        return (name for owner in _own(cls) for name in vars(owner))

    # Any: a global may hold anything.
    def _value(self, value: Any, what: str, depth: int = 0) -> None:
        """Look into a value that code can reach."""
        if id(value) in self._modules or (isinstance(value, _ATOMS) and not isinstance(value, property)):
            return None
        if isinstance(value, types.ModuleType):
            return self._namespace(value, what, self._names, set())
        if isinstance(value, (types.FunctionType, types.MethodType, property, staticmethod, classmethod, partial)):
            return self._callable(value, what, depth)
        if isinstance(value, type):
            if _package(value.__module__) in self._packages:
                self._classes.setdefault(value, False)
                for name in _CONSTRUCTORS:
                    if any(name in vars(owner) for owner in _own(value)):
                        self._place((value, name), _reader(value, name), f"{value.__qualname__}.{name}")
                return None
            return self._from(value.__module__, what)
        if isinstance(value, types.BuiltinFunctionType):
            home = value.__self__ if isinstance(value.__self__, type) else type(value.__self__)
            return self._from(value.__module__ or home.__module__, what)
        if isinstance(value, np.ndarray) and value.size <= _MAX_ITEMS and not value.dtype.hasobject:
            return None
        if isinstance(value, _CONTAINERS) and len(value) <= _MAX_ITEMS and depth <= _MAX_DEPTH:
            for item in value.values() if isinstance(value, dict) else value:
                self._value(item, what, depth + 1)
            return None
        return self._object(value, what)

    def _object(self, value: Any, what: str) -> None:
        cls = type(value)
        wrapped = getattr(value, "__wrapped__", None) if cls.__module__ == "functools" else None
        if wrapped is not None:
            return self._value(wrapped, what)
        if isinstance(value, (nn.Module, np.ndarray, *_CONTAINERS)):
            return self._refuse(f"{what}, a {cls.__qualname__}")
        if _package(cls.__module__) in self._packages:
            if hasattr(cls, "__getattr__") or cls.__getattribute__ is not object.__getattribute__:
                self._refuse(f"{what}, whose {cls.__qualname__}.__getattr__ may read anything")
            self._objects[id(value)] = value
            return None
        return self._from(cls.__module__, what)

    def _from(self, module: str | None, what: str) -> None:
        if _package(module) not in _PURE:
            self._refuse(f"{what} of {module}" if _package(module) not in what else what)

    def _callable(self, value: Any, what: str, depth: int) -> None:
        if isinstance(value, types.FunctionType):
            return self._follow(value, what)
        if isinstance(value, property):
            parts: tuple[Any, ...] = (value.fget,)
        elif isinstance(value, partial):
            parts = (value.func, value.args, value.keywords)
        elif isinstance(value, types.MethodType):
            parts = (value.__func__, value.__self__)
        else:
            parts = (value.__func__,)
        for part in parts if depth <= _MAX_DEPTH else ():
            self._value(part, what, depth + 1)
        return None

    def _follow(self, function: types.FunctionType, what: str) -> None:
        package = _package(function.__module__)
        if package in _PURE or package.startswith("namedtuple_") or function in self._functions:
            return None
        if package not in self._packages or len(self._functions) > _MAX_FUNCTIONS:
            return self._refuse(f"{what} of {function.__module__}")
        self._functions.add(function)
        self._names |= _names(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            # The class around a method, for super(): its attributes are read as those of the module's class.
            if name != "__class__":
                self._place(id(cell), partial(contents, cell), name)
        if function.__defaults__:
            self._place((function, "defaults"), partial(getattr, function, "__defaults__"), f"{what}'s defaults")
        if function.__kwdefaults__:
            self._place((function, "kwdefaults"), partial(getattr, function, "__kwdefaults__"), f"{what}'s defaults")
        self._scope(function)
        return None

    def _scope(self, function: types.FunctionType) -> None:
        scope, names = function.__globals__, _names(function.__code__)
        for opname, name in _uses(function.__code__):
            if opname == "IMPORT_NAME":
                self._from(name, "an import")
            elif name not in scope:
                if name in _IMPURE_BUILTINS:
                    self._refuse(f"{name}()")
            elif isinstance(scope[name], types.ModuleType):
                self._namespace(scope[name], name, names, set())
            else:
                self._place((id(scope), name), partial(scope.get, name), name)
        if "__dict__" in names:
            self._refuse("__dict__")

    def _namespace(self, module: types.ModuleType, what: str, names: set[str], seen: set[int]) -> None:
        """Look at the attributes of a Python module that code may name."""
        pure = _package(module.__name__) in _PURE
        own = vars(module)
        if id(module) in seen:
            return
        seen.add(id(module))
        if "__getattr__" in own and not pure:
            self._refuse(f"{what}.__getattr__")
        for name in names.intersection(own):
            value, at = own[name], f"{what}.{name}"
            if pure and name in _IMPURE_NAMES and _package(module.__name__) in ("numpy", "torch"):
                self._refuse(at)
            elif isinstance(value, types.ModuleType):
                self._namespace(value, at, names, seen)
            elif not pure or isinstance(value, types.FunctionType):
                self._place((id(own), name), partial(own.get, name), at)
            else:
                self.places.setdefault((id(own), name), partial(own.get, name))


def _uses(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Yield (operation, name) of the globals and imports in some code, that of functions inside it too."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"):
            yield step.opname, step.argval
        elif isinstance(step.argval, types.CodeType):
            yield from _uses(step.argval)


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)
