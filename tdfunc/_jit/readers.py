"""The places that functions, and functions that they reach, read values from: variables and attributes."""

import argparse
import dis
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, nn

from tdfunc._jit.attributes import (
    MISSING,
    Bound,
    Chain,
    Link,
    chains_of,
    find_link,
    find_super,
    has_attributes,
    held_by,
    is_library,
    parameters_of,
)
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import UnsupportedError
from tdfunc.modules.functional import Apply

_MAX_ITEMS = 1000
_SEEDERS = {"manual_seed", "fork_rng", "set_rng_state"}
Counted: TypeAlias = Literal["contents", "identity", "nothing"]


class Reader(NamedTuple):
    """One place that code reads a value from."""

    # As the code spells it.
    name: str
    owner: Any
    read: Callable[[], Any]
    # True if the code that was followed assigns it.
    own: bool = False
    is_attribute: bool = False
    # The part of the value that tells calls apart. Where the code only reads attributes of it, they do so instead.
    counted: Counted = "contents"

    @property
    def key(self) -> str:
        """The name of the place in its owner."""
        if self.is_attribute:
            return self.name.rpartition(".")[2]
        return self.name


def find_readers(roots: Iterable[Any]) -> list[Reader]:
    """Return the places that functions, and functions of their packages that they reach, read values from.

    Args:
        roots: The functions, `Bound` functions, callable objects, or containers of these.
    """
    return _Walk(list(roots)).run()


# Any: functions, or what holds some.
def find_parameters(functions: Iterable[Any], place: str) -> list[tuple[types.FunctionType, str]]:
    """Return the code that an argument of the first function is given to, with its name there.

    Args:
        functions: The function, and others that it calls.
        place: The name of the argument, or the text of its number. An object inside of another argument may be each
            parameter of each function.
    """
    first, *others = functions
    function, shift = _unwrap(first)
    if function is None:
        return _parameters_in(others)
    code = function.__code__
    if place.isdecimal():
        names = code.co_varnames[: code.co_argcount][int(place) + shift :][:1]
    else:
        names = [name for name in parameters_of(code) if name == place]
    return [(function, name) for name in names] or _parameters_in([first, *others])


def _unwrap(fn: Any) -> tuple[types.FunctionType | None, int]:
    """Return the function that a call of an object runs at last, and how many arguments it gets before the call's."""
    shift = 0
    wrapped = fn
    while wrapped is not None:
        fn = wrapped
        wrapped = held_by(fn).get("__wrapped__")
        if isinstance(fn, functools.partial):
            shift += len(fn.args)
            wrapped = fn.func
        elif isinstance(fn, types.MethodType):
            shift += 1
            wrapped = fn.__func__
        elif isinstance(fn, Bound):
            shift += 1
            wrapped = fn.function
        elif isinstance(fn, Apply):
            # Its first argument is the tree, in the place of the module.
            wrapped = type(fn.module).forward
        elif isinstance(fn, nn.Module):
            shift += 1
            wrapped = type(fn).forward
        elif wrapped is None and not isinstance(fn, (type, types.FunctionType)):
            shift += 1
            wrapped = getattr(type(fn), "__call__", None)  # noqa: B004
            if not isinstance(wrapped, types.FunctionType):
                return None, 0
    if isinstance(fn, types.FunctionType):
        return fn, shift
    return None, 0


class _Walk:
    """One walk from functions along everything that their code reaches."""

    def __init__(self, roots: list[Any]) -> None:
        self._roots = set(map(id, roots))
        self._todo = roots[::-1]
        # By owner and name; the readers hold the owners, so that ids stay.
        self._readers: dict[tuple[int, str], Reader] = {}
        # By ids; the objects are kept, so that ids stay.
        self._seen: dict[tuple[int, ...], Any] = {}
        # The package whose functions are followed.
        self._package: str | None = None
        # The names of the attributes that code assigns.
        self._assigned: set[str] = set()

    def run(self) -> list[Reader]:
        while self._todo:
            value = self._todo.pop()
            if isinstance(value, Bound):
                self._visit_bound(value)
            elif self._is_new(value):
                self._visit(value)
        return [
            reader._replace(own=True) if reader.is_attribute and reader.key in self._assigned else reader
            for reader in self._readers.values()
        ]

    def _is_new(self, *objects: Any) -> bool:
        """Return whether the walk comes to these objects together for the first time."""
        key = tuple(map(id, objects))
        if key in self._seen:
            return False
        self._seen[key] = objects
        return True

    def _add(self, reader: Reader) -> None:
        place = (id(reader.owner), reader.key)
        known = self._readers.get(place)
        if known is not None:
            counted = known.counted
            if counted == "nothing" or reader.counted == "contents":
                counted = reader.counted
            reader = known._replace(own=known.own or reader.own, counted=counted)
        self._readers[place] = reader

    # Any: a value that code reads.
    def _visit(self, value: Any) -> None:
        """Follow the functions that a value is or holds."""
        if isinstance(value, types.FunctionType):
            self._follow(value)
            self._read_chains(value)
        elif isinstance(value, functools.partial):
            self._add(Reader("partial arguments", value, lambda: value.args))
            self._add(Reader("partial keywords", value, lambda: value.keywords))
            self._todo += [value.args, value.keywords, value.func]
        elif isinstance(value, types.MethodType):
            self._add(Reader("self", value, lambda: value.__self__))
            self._todo.append(Bound(value.__func__, value.__self__))
        elif isinstance(value, dict):
            if len(value) <= _MAX_ITEMS:
                self._todo += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            if len(value) <= _MAX_ITEMS:
                self._todo += value
        elif isinstance(value, Apply):
            self._visit_modules(value.module, is_private=True)
        elif not isinstance(value, TensorCollection):
            self._visit_object(value)

    def _visit_object(self, value: Any) -> None:
        kind = type(value)
        if id(value) in self._roots:
            self._add(Reader("self", value, lambda: value))
        held = held_by(value)
        if "__wrapped__" in held:
            self._todo.append(held["__wrapped__"])
        elif isinstance(value, nn.Module):
            self._visit_modules(value, is_private=False)
        elif isinstance(getattr(kind, "__call__", None), types.FunctionType) and not is_library(kind.__module__):  # noqa: B004
            self._todo.append(Bound(kind.__call__, value))
        elif kind.__module__.partition(".")[0] == "tdfunc":
            # An ensemble or an optimizer calls the functions that it was made with.
            self._todo += held.values()

    def _visit_modules(self, module: nn.Module, *, is_private: bool) -> None:
        """Follow the forward of a module and of all modules in it."""
        for one in module.modules():
            self._is_new(one)
            if not is_library(type(one).__module__):
                self._todo.append(Bound(type(one).forward, one, is_private))

    def _visit_bound(self, bound: Bound) -> None:
        function = bound.function
        if not self._is_new(function, bound.owner, bound.parameter):
            return
        wrapped = held_by(function).get("__wrapped__")
        if wrapped is not None:
            self._todo.append(bound._replace(function=wrapped))
        if isinstance(function, types.FunctionType):
            if not bound.only_attributes:
                self._follow(function, refuse_seeders=not bound.is_private)
            self._read_chains(function, bound)

    def _is_followed(self, function: types.FunctionType) -> bool:
        package = _package(function)
        if self._package is None and not is_library(package):
            self._package = package
        return package == self._package

    def _follow(self, function: types.FunctionType, *, refuse_seeders: bool = True) -> None:
        """Read the variables of a function, and follow their values."""
        readers = _closure_readers(function)
        # Of a library's functions (torch.vmap(fn), torch.func.grad(fn)) only their arguments are followed.
        if self._is_followed(function):
            readers += _default_readers(function)
            if refuse_seeders:
                _refuse_seeders(function)
            readers += _global_readers(function)
        for reader in readers:
            self._add(reader)
            self._todo.append(reader.read())

    def _read_chains(self, function: types.FunctionType, bound: Bound | None = None) -> None:
        """Read the attributes that a function reads from variables, and follow their values."""
        if not self._is_followed(function):
            return
        self._assigned |= _names(function.__code__, "STORE_ATTR", "DELETE_ATTR")
        for chain in chains_of(function.__code__):
            if chain.scope == "super":
                if bound is not None:
                    self._read_super(chain, function, bound)
            elif chain.scope == "parameter":
                if bound is not None and chain.root == bound.parameter_name():
                    self._read_parameter(chain, bound)
            elif chain.attributes and (bound is None or not bound.only_attributes):
                self._read_chain(chain.root, _read_variable(function, chain), chain.attributes)
        self._hand_on(function, bound)

    def _hand_on(self, function: types.FunctionType, bound: Bound | None) -> None:
        """Follow the objects that a function names into the functions that it names: `grad(loss)(params, cfg)`.

        Each object may be each argument. It is not followed further where it has no attributes of the names that the
        code reads from the argument.
        """
        given: list[Any] = []
        named: list[Any] = []
        for chain in chains_of(function.__code__):
            if chain.scope in ("cell", "global"):
                named.append(_last_value(_read_variable(function, chain), chain.attributes))
            elif bound is not None and chain.root == bound.parameter_name():
                given.append(_last_value(bound.owner, chain.attributes))
        objects = list(filter(_is_plain_object, given))
        if bound is None or not bound.only_attributes:
            objects += filter(_is_plain_object, named)
        if not objects:
            return
        is_private = bound is not None and bound.is_private
        for callee, name in _parameters_in([*given, *named]):
            for one in objects:
                self._todo.append(Bound(callee, one, is_private, name, only_attributes=True))

    def _read_super(self, chain: Chain, function: types.FunctionType, bound: Bound) -> None:
        link = find_super(function, bound.owner, chain.attributes[0])
        if link is not None:
            self._add_link(f"super().{chain.attributes[0]}", bound.owner, link, "contents", bound.is_private)
            self._visit_later(link.value, bound.is_private)

    def _read_parameter(self, chain: Chain, bound: Bound) -> None:
        is_found = chain.attributes and self._read_chain(
            chain.root, bound.owner, chain.attributes, bound.is_private, is_guess=bound.only_attributes
        )
        # The key of a call holds its arguments.
        if not is_found and not bound.is_private and not bound.only_attributes:
            owner = bound.owner
            self._add(Reader(chain.root, owner, lambda: owner, is_attribute=True, counted="identity"))

    def _read_chain(
        self, spelled: str, owner: Any, names: tuple[str, ...], is_private: bool = False, is_guess: bool = False
    ) -> bool:
        """Read an attribute of an object, of that one the next, and so on; return whether the first one was found."""
        link = find_link(owner, names[0])
        if link is None or (link.value is MISSING and is_guess):
            return False
        name = f"{spelled}.{names[0]}"
        value = link.value
        # What a class holds is not copied with its objects.
        is_private = is_private and (link.shared is None or isinstance(value, Bound))
        has_value = value is not MISSING and not isinstance(value, Bound)
        goes_on = len(names) > 1 and has_value and self._read_chain(name, value, names[1:], is_private, is_guess)
        self._add_link(name, owner, link, _count(owner, value, goes_on), is_private)
        if not goes_on:
            self._visit_later(value, is_private)
        return True

    def _add_link(self, name: str, owner: Any, link: Link, counted: Counted, is_private: bool) -> None:
        # A cached property assigns itself.
        own = isinstance(link.value, Bound)
        if link.own is not None and not is_private:
            self._add(Reader(name, owner, link.own, own, is_attribute=True, counted=counted))
        if link.shared is not None:
            self._add(Reader(name, type(owner), link.shared, own, is_attribute=True, counted=counted))

    def _visit_later(self, value: Any, is_private: bool) -> None:
        if isinstance(value, Bound):
            self._todo.append(value._replace(is_private=is_private))
        elif not is_private:
            self._todo.append(value)


def _count(owner: Any, value: Any, goes_on: bool) -> Counted:
    if isinstance(value, nn.Module):
        # The modes of all modules in a module count with it.
        if isinstance(owner, nn.Module):
            return "identity"
        return "contents"
    if goes_on:
        return "nothing"
    return "contents"


def _last_value(owner: Any, names: tuple[str, ...]) -> Any:
    """Return the value of an attribute of an attribute, or `MISSING` if that is not known without running code."""
    for name in names:
        if owner is MISSING or isinstance(owner, Bound):
            return MISSING
        link = find_link(owner, name)
        if link is None:
            return MISSING
        owner = link.value
    return owner


def _is_plain_object(value: Any) -> bool:
    """Return whether a value is an object, class or module of a program, whose attributes code reads by their names."""
    if value is MISSING or isinstance(value, (Bound, types.FunctionType, types.MethodType, Tensor, TensorCollection)):
        return False
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace)):
        return True
    if isinstance(value, (type, types.ModuleType)):
        return not is_library(value.__dict__.get("__module__", value.__name__))
    return has_attributes(type(value)) and not is_library(type(value).__module__)


def _parameters_in(values: list[Any]) -> list[tuple[types.FunctionType, str]]:
    """Return the functions that values are or hold, each with the name of a parameter that a call may fill."""
    # In their order, which is the order of a token.
    found: dict[tuple[types.FunctionType, str], None] = {}
    for value in values:
        held = [value]
        if isinstance(value, dict):
            held = list(value.values())
        elif isinstance(value, (list, tuple)):
            held = list(value)
        for one in held[:_MAX_ITEMS]:
            function, first = _unwrap(one)
            if function is not None:
                # The tree of a pure function is in the place of the module.
                first = max(first, int(isinstance(one, Apply)))
                names = parameters_of(function.__code__)[first:]
                found.update(dict.fromkeys([(function, name) for name in names]))
    return list(found)


def _read_variable(function: types.FunctionType, chain: Chain) -> Any:
    """Return the value of a global, or of a variable in a closure cell."""
    if chain.scope == "global":
        return function.__globals__.get(chain.root, MISSING)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return contents(cells[chain.root])


def _stored_names(function: types.FunctionType) -> frozenset[str]:
    return _names(function.__code__, "STORE_GLOBAL", "STORE_DEREF")


def _closure_readers(function: types.FunctionType) -> list[Reader]:
    stored = _stored_names(function)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [Reader(name, cell, lambda cell=cell: contents(cell), name in stored) for name, cell in cells]


def _default_readers(function: types.FunctionType) -> list[Reader]:
    readers: list[Reader] = []
    if function.__defaults__:
        readers.append(Reader("defaults", function, lambda: function.__defaults__))
    if function.__kwdefaults__:
        readers.append(Reader("keyword defaults", function, lambda: function.__kwdefaults__))
    return readers


def _global_readers(function: types.FunctionType) -> list[Reader]:
    stored = _stored_names(function)
    scope = function.__globals__
    names = _names(function.__code__, "LOAD_GLOBAL")
    readers: list[Reader] = []
    for name in sorted(names & scope.keys()):
        if not isinstance(scope[name], types.ModuleType):
            readers.append(Reader(name, scope, functools.partial(scope.get, name, MISSING), name in stored))
    # Builtins, which a global may hide, and names that are assigned later.
    absent = names - scope.keys()
    if absent:
        readers.append(Reader("new globals", function, functools.partial(scope.keys().isdisjoint, absent)))
    return readers


def seeds_error(function: str, where: str) -> UnsupportedError:
    """Return the error of a function that seeds a generator."""
    return UnsupportedError(
        f"jit: {function} seeds or makes a generator that it draws from, which a replay would not do again.",
        expected="draws from generators that are given, or from torch's default one as it is",
        got=where,
        hint="make and seed the torch.Generator outside of the function and pass it as an argument.",
    )


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
        return MISSING


@functools.lru_cache(maxsize=1000)
def _names(code: types.CodeType, *operations: str) -> frozenset[str]:
    """Return the names that code, and the code of functions inside it, loads or stores in these ways."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in operations}
    inner = [_names(constant, *operations) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(names.union(*inner))
