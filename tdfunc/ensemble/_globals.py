"""The Python values around a module's forward: globals, defaults and closure cells that a trace would read once.

Followed are the forwards of a module's classes, the methods and functions of the same package that they name, and
functions kept as attributes; torch's own code is not.
"""

import types
from collections.abc import Callable, Hashable, Iterator
from operator import is_
from typing import Any

from torch import nn

from tdfunc._jit.environment import contents, freeze

_LIBRARIES = ("torch", "builtins")
_CHANGEABLE = (list, dict, set, nn.Module)


class Globals:
    """Reads the values; `token` differs when one of them does."""

    # Any: a global may hold anything.
    def __init__(self, module: nn.Module) -> None:
        places: dict[Hashable, Callable[[], Any]] = {}
        seen: set[Any] = set()
        for sub in module.modules():
            cls = type(sub)
            _follow(getattr(cls, "forward", None), cls, _package(cls.__module__), places, seen)
            for value in vars(sub).values():
                _follow(value, cls, _package(getattr(value, "__module__", None)), places, seen)
        self._read = list(places.values())
        self._values: list[Any] = []
        self._frozen: list[Hashable] = []
        self._watched: list[int] = []
        self._token: Hashable = ()

    def token(self) -> Hashable:
        """Return something hashable that stands for the present values."""
        values = [read() for read in self._read]
        # One look at the attributes: another thread may replace them.
        before, frozen, watched, token = self._values, self._frozen, self._watched, self._token
        same = len(values) == len(before) and all(map(is_, values, before))
        # The same container may have other contents.
        if same and all([freeze(values[i]) == frozen[i] for i in watched]):
            return token
        self._frozen = [freeze(value) for value in values]
        self._watched = [i for i, value in enumerate(values) if _can_change(value)]
        token = self._token = tuple(self._frozen)
        self._values = values
        return token


def _can_change(value: Any) -> bool:
    return isinstance(value, _CHANGEABLE) or (isinstance(value, tuple) and any(map(_can_change, value)))


def _package(module: str | None) -> str:
    return str(module).partition(".")[0]


def _follow(found: Any, cls: type, package: str, places: dict[Hashable, Callable[[], Any]], seen: set[Any]) -> None:
    """Collect what a function reads, and what the functions that it names read."""
    todo = [found]
    while todo:
        function = _function(todo.pop())
        if function is None or (function, cls) in seen or _package(function.__module__) != package:
            continue
        if package in _LIBRARIES:
            continue
        seen.add((function, cls))
        for place, read in _reads(function):
            places[place] = read
            todo.append(read())
        todo += [
            vars(owner)[name] for name in _names(function.__code__) for owner in cls.__mro__ if name in vars(owner)
        ]


def _function(value: Any) -> types.FunctionType | None:
    value = getattr(value, "fget", value) if isinstance(value, property) else value
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


def _reads(function: types.FunctionType) -> Iterator[tuple[Hashable, Callable[[], Any]]]:
    for cell in function.__closure__ or ():
        yield id(cell), lambda cell=cell: contents(cell)
    yield (function, "defaults"), lambda: function.__defaults__
    yield (function, "keyword defaults"), lambda: function.__kwdefaults__
    scope = function.__globals__
    for name in _names(function.__code__):
        if not isinstance(scope.get(name, scope), types.ModuleType) and name in scope:
            yield (id(scope), name), lambda name=name: scope.get(name)


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)
