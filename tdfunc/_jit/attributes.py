"""The attributes that code reads from variables: found in its bytecode, and looked up without running any code."""

import dis
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, nn

from tdfunc.core.collection import TensorCollection

LIBRARIES = ("torch", "tdfunc", "optree", "numpy")
MISSING = object()
Scope: TypeAlias = Literal["global", "cell", "parameter", "super"]

_ATTRIBUTE_LOADS = {"LOAD_ATTR", "LOAD_METHOD"}
_ATTRIBUTE_STORES = {"STORE_ATTR", "DELETE_ATTR"}
# They keep the object that was loaded last on top of the stack, as in `self.count += 1`.
_COPIES = {"COPY", "DUP_TOP", "EXTENDED_ARG"}
# The call `super()`, up to Python 3.11.
_CALLS = {"PRECALL", "CALL", "CALL_FUNCTION"}


class Chain(NamedTuple):
    """A variable from outside of a function, and the attributes that the code reads from it one after the other."""

    scope: Scope
    root: str
    attributes: tuple[str, ...] = ()

    def then(self, *names: str) -> "Chain":
        """Return the chain with further attributes."""
        return self._replace(attributes=(*self.attributes, *names))


class _Step(NamedTuple):
    """What an instruction does to variables and attributes."""

    kind: Literal["load", "load global", "load super", "store", "attribute", "set attribute", "other"]
    name: str = ""


def parameters_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of a function's parameters, without `*args` and `**kwargs`."""
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@functools.lru_cache(maxsize=1000)
def chains_of(code: types.CodeType) -> tuple[Chain, ...]:
    """Return the chains that code, and the code of functions inside it, reads; a bare variable has no attributes.

    A local variable stands for what was last assigned to it, in the order of the code.
    """
    found: dict[Chain, None] = {}
    aliases: dict[str, list[Chain]] = {}

    # The chains of the object that was loaded last.
    present: list[Chain] = []
    for kind, name in _steps(code):
        if kind == "attribute":
            present = [chain.then(name) for chain in present]
            continue
        if kind == "store":
            aliases[name] = present
        elif kind != "set attribute":
            found.update(dict.fromkeys(present))
        present = []
        if kind == "load":
            present = _resolve(code, aliases, name)
        elif kind == "load global":
            present = [Chain("global", name)]
        elif kind == "load super":
            present = [Chain("super", "super()", (name,))]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found.update(dict.fromkeys(_chains_of_inner(inner, code, aliases)))
    return tuple(found)


def _resolve(code: types.CodeType, aliases: dict[str, list[Chain]], name: str) -> list[Chain]:
    """Return what a variable of code may be: what was assigned to it, a variable from outside, or a parameter."""
    chains = aliases.get(name, [])
    if name in code.co_freevars:
        return [*chains, Chain("cell", name)]
    if name in parameters_of(code):
        return [*chains, Chain("parameter", name)]
    return chains


def _chains_of_inner(inner: types.CodeType, outer: types.CodeType, aliases: dict[str, list[Chain]]) -> Iterator[Chain]:
    """Yield the chains that a function inside another reads, from the view of the outer one."""
    for chain in chains_of(inner):
        if chain.scope == "global":
            yield chain
        elif chain.scope == "cell":
            for start in _resolve(outer, aliases, chain.root):
                yield start.then(*chain.attributes)


def _steps(code: types.CodeType) -> Iterator[_Step]:
    is_super = False
    for instruction in dis.get_instructions(code):
        operation = instruction.opname
        value = instruction.argval
        if operation == "LOAD_SUPER_ATTR" or (is_super and operation in _ATTRIBUTE_LOADS):
            yield _Step("load super", value)
        elif operation in _ATTRIBUTE_LOADS:
            yield _Step("attribute", value)
        elif operation in _ATTRIBUTE_STORES:
            yield _Step("set attribute", value)
        elif operation == "LOAD_GLOBAL":
            yield _Step("load global", value)
        elif "FAST" in operation or "DEREF" in operation:
            yield from _variable_steps(operation, value)
        elif operation not in _COPIES:
            yield _Step("other")
        is_super = (operation == "LOAD_GLOBAL" and value == "super") or (is_super and operation in _CALLS)


def _variable_steps(operation: str, value: Any) -> Iterator[_Step]:
    """Yield the steps of an instruction, which from Python 3.13 may be two: LOAD_FAST_LOAD_FAST."""
    names = value
    if isinstance(value, str):
        names = (value,)
    for verb, name in zip(re.findall("LOAD|STORE|DELETE", operation), names, strict=False):
        if verb == "LOAD":
            yield _Step("load", name)
        else:
            yield _Step("store", name)


class Link(NamedTuple):
    """An attribute of an object, found without running any code of its class."""

    # Its value, if that is known without running code, or a method or property bound to the object.
    value: Any
    # The reader of the object itself.
    own: Callable[[], Any] | None = None
    # The reader of its class.
    shared: Callable[[], Any] | None = None


class Bound(NamedTuple):
    """A function whose first parameter, or another one, is an object."""

    function: Any
    owner: Any
    # True for the private copy of an object: nobody changes its attributes.
    is_private: bool = False
    parameter: str | None = None
    # Only the attributes of the parameter count; the variables of the function are followed elsewhere.
    only_attributes: bool = False

    def parameter_name(self) -> str | None:
        """Return the name of the parameter that is the object."""
        if self.parameter is not None or not isinstance(self.function, types.FunctionType):
            return self.parameter
        return next(iter(parameters_of(self.function.__code__)), None)


@functools.lru_cache(maxsize=1000)
def has_attributes(kind: type) -> bool:
    """Return whether objects of a class may have attributes that change, or are functions that read such."""
    has_slots = any(["__slots__" in vars(base) for base in kind.__mro__])
    return bool(kind.__dictoffset__) or has_slots or kind is types.MethodType


def is_library(name: str) -> bool:
    """Return whether a module belongs to one of the libraries below tdfunc, or to Python's."""
    package = str(name).partition(".")[0]
    return package in LIBRARIES or package in sys.stdlib_module_names


# Any: an object of any type, here and below.
def held_by(owner: Any) -> dict[str, Any]:
    """Return the attributes in an object's dict, without running code of its class."""
    if not type(owner).__dictoffset__:
        return {}
    return object.__getattribute__(owner, "__dict__")


def find_link(owner: Any, name: str) -> Link | None:
    """Return an attribute of an object, class or module; None if code, or a library, decides about its value."""
    kind = type(owner)
    # A lookup written in Python may return anything.
    has_lookup = not isinstance(kind.__getattribute__, types.WrapperDescriptorType)
    if isinstance(owner, (Tensor, TensorCollection)) or has_lookup:
        return None
    if isinstance(owner, types.ModuleType):
        if is_library(owner.__name__):
            return None
        read = functools.partial(vars(owner).get, name, MISSING)
        return Link(read(), own=read)
    if isinstance(owner, type):
        return _link_of_class(owner, name)
    return _link_of_object(owner, name)


def _link_of_class(owner: type, name: str) -> Link | None:
    stored = inspect.getattr_static(owner, name, MISSING)
    if stored is MISSING or is_library(owner.__module__):
        return None
    if isinstance(stored, classmethod):
        return Link(Bound(stored.__func__, owner), own=functools.partial(_read_stored, owner, name))
    read = functools.partial(getattr, owner, name, MISSING)
    if isinstance(stored, (types.FunctionType, staticmethod)) or not hasattr(type(stored), "__get__"):
        return Link(read(), own=read)
    return None


def _link_of_object(owner: Any, name: str) -> Link | None:
    kind = type(owner)
    held = held_by(owner)
    stored = inspect.getattr_static(owner, name, MISSING)
    if stored is MISSING:
        return _link_of_missing(owner, name)
    if name in held and held[name] is stored:
        return Link(stored, own=_own_reader(owner, name))
    if isinstance(stored, types.MemberDescriptorType):
        read = functools.partial(getattr, owner, name, MISSING)
        return Link(read(), own=read)
    value = _bind(stored, owner)
    if value is MISSING or is_library(kind.__module__) or _is_of_library(stored):
        return None
    own = None
    if kind.__dictoffset__:
        own = functools.partial(held.get, name, MISSING)
    shared = functools.partial(getattr, kind, name, MISSING)
    if isinstance(stored, classmethod):
        # Each read from the class makes another method.
        shared = functools.partial(_read_stored, kind, name)
    return Link(value, own, shared)


def _own_reader(owner: Any, name: str) -> Callable[[], Any]:
    if hasattr(type(owner), "__getattr__"):
        # It is called for an attribute that was deleted.
        return functools.partial(owner.__dict__.get, name, MISSING)
    return functools.partial(getattr, owner, name, MISSING)


def _link_of_missing(owner: Any, name: str) -> Link | None:
    if isinstance(owner, nn.Module):
        # Tensors count with the module, or are arguments.
        if name not in owner._modules:
            return None
        return Link(owner._modules[name], own=functools.partial(owner._modules.get, name, MISSING))
    if hasattr(type(owner), "__getattr__") or is_library(type(owner).__module__):
        return None
    # It may be assigned later.
    return Link(MISSING, own=functools.partial(getattr, owner, name, MISSING))


def _is_of_library(stored: Any) -> bool:
    """Return whether a class attribute is a function of a library's class."""
    return isinstance(stored, types.FunctionType) and is_library(stored.__module__)


def _read_stored(cls: type, name: str) -> Any:
    """Return what a class or one of its bases stores under a name."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return MISSING


def _bind(stored: Any, owner: Any) -> Any:
    """Return what a class attribute is for an object of it, or `MISSING` if that is not known without running code."""
    if isinstance(stored, staticmethod):
        return stored.__func__
    if isinstance(stored, classmethod):
        return Bound(stored.__func__, type(owner))
    if isinstance(stored, property):
        return Bound(stored.fget, owner)
    if isinstance(stored, functools.cached_property):
        return Bound(stored.func, owner)
    if isinstance(stored, types.FunctionType) or "__wrapped__" in getattr(stored, "__dict__", ()):
        return Bound(stored, owner)
    if hasattr(type(stored), "__get__"):
        return MISSING
    return stored


def find_super(function: types.FunctionType, owner: Any, name: str) -> Link | None:
    """Return the method that `super().name` means in a method of an object, or of a class."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    kind = owner
    if not isinstance(owner, type):
        kind = type(owner)
    if "__class__" not in cells:
        return None
    here = cells["__class__"].cell_contents
    if here not in kind.__mro__:
        return None
    for base in kind.__mro__[kind.__mro__.index(here) + 1 :]:
        if name in base.__dict__:
            value = _bind(base.__dict__[name], owner)
            if value is MISSING or is_library(base.__module__):
                return None
            return Link(value, shared=functools.partial(base.__dict__.get, name, MISSING))
    return None
