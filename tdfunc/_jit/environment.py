"""The Python values that a function reads from around itself: closure cells, defaults and globals."""

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from tdfunc._errors import UnsupportedError, explain

_ATOMS = (bool, int, str, bytes, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_MISSING = object()
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


# Any: values of every type are frozen into hashable ones.
def freeze(value: Any) -> Any:
    """Return something hashable that differs when the value does: contents of containers, else the object itself."""
    kind = type(value)
    if kind is float:
        # 0.0 == -0.0 and nan != nan: their text tells them apart, and finds them again.
        return kind, repr(value)
    if isinstance(value, _ATOMS):
        return kind, value
    if isinstance(value, (tuple, list)):
        return kind, tuple([freeze(item) for item in value])
    if isinstance(value, Mapping):
        return kind, tuple([(freeze(key), freeze(item)) for key, item in value.items()])
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(map(freeze, value))
    if isinstance(value, nn.Module):
        return Same(value), tuple([module.training for module in value.modules()])
    if isinstance(value, Tensor):
        return kind, value.shape, value.dtype, value.device
    return Same(value)


def static_part(value: Any, where: str) -> Any:
    """Return the part of a call's key that a non-tensor argument makes; values that cannot be hashed are refused."""
    frozen = freeze(value)
    if type(frozen) is Same and not isinstance(value, (types.FunctionType, type)):
        try:
            hash(value)
        except TypeError:
            raise UnsupportedError(
                explain(
                    f"jit: the argument {where} is neither a tensor nor a value that can be part of the cache key.",
                    expected="tensors, trees, numbers, strings, containers of these, or hashable objects",
                    got=type(value).__name__,
                    hint="pass it as a tensor (torch.as_tensor), or close over it.",
                )
            ) from None
        if type(value).__eq__ is not object.__eq__:
            return type(value), value
    return frozen


class Environment:
    """What the code of a function, and of its own package's functions that it names, reads from outside."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._values: list[Any] = []
        self._discover()

    def _discover(self) -> None:
        self._readers: list[Callable[[], Any]] = []
        self.names: list[str] = []
        for name, read in _readers(self._fn):
            self.names.append(name)
            self._readers.append(read)
        self._values = [read() for read in self._readers]
        self._token = tuple(map(freeze, self._values))
        # What `is` cannot tell: the same container with other contents, the same module in another mode.
        self._changeable = [isinstance(v, (list, Mapping, set, nn.Module, tuple)) for v in self._values]
        self._watched = any(self._changeable)

    def token(self) -> tuple[Any, ...]:
        """Return a hashable that differs when one of the values does."""
        values = [read() for read in self._readers]
        if all(map(is_, values, self._values)):
            if not self._watched:
                return self._token
            token = tuple(
                [freeze(v) if c else t for v, c, t in zip(values, self._changeable, self._token, strict=True)]
            )
            if token == self._token:
                return self._token
        # A function may have been replaced by another, which reads other names.
        self._discover()
        return self._token

    def named_values(self) -> Iterator[tuple[str, Any]]:
        """Yield (how the code spells it, value)."""
        return zip(self.names, [read() for read in self._readers], strict=True)


def _readers(fn: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
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
            bound = function
            yield "partial arguments", lambda p=bound: (p.args, p.keywords)
        elif isinstance(function, types.MethodType):
            todo.append(function.__func__)
            yield "self", lambda m=function: m.__self__
        elif isinstance(function, types.FunctionType):
            if package is None and _package(function) not in _LIBRARIES:
                package = _package(function)
            # Of a library's functions (torch.vmap(fn), torch.func.grad(fn)) only what they were given is followed.
            for name, read in _readers_of(function, own=_package(function) == package):
                yield name, read
                todo.append(read())
        elif function is fn:
            yield "self", lambda: fn
            todo.append(type(fn).__call__)


def _package(function: types.FunctionType) -> str:
    return str(function.__globals__.get("__name__", "")).partition(".")[0]


def _readers_of(function: types.FunctionType, *, own: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, lambda cell=cell: contents(cell)
    if not own:
        return
    if function.__defaults__:
        yield "defaults", lambda: function.__defaults__
    if function.__kwdefaults__:
        yield "defaults", lambda: function.__kwdefaults__
    scope = function.__globals__
    for name in sorted(_named(function.__code__)):
        if name in scope and not isinstance(scope[name], types.ModuleType):
            yield name, lambda name=name: scope.get(name, _MISSING)


def contents(cell: types.CellType) -> Any:
    """Return what a closure cell holds, or a marker while it holds nothing."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _named(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _named(constant)
    return names
