"""The definition of a typed class: its options, fields and constructor, and the names that it cannot use."""

import dataclasses
import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Size, Tensor

from tdfunc._tensorclass.fields import (
    CONSTRUCTOR,
    OPTIONS,
    Options,
    check_annotations,
    looks_up,
    make_node,
    merge_options,
    read_annotations,
    resolve_again,
)
from tdfunc.core.collection import Slots, Static, TensorCollection
from tdfunc.core.errors import error
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.pytree import register
from tdfunc.core.shapes import as_names, as_size
from tdfunc.core.types import Node
from tdfunc.ops.base.cast import as_device
from tdfunc.ops.base.convert import lift_ties
from tdfunc.ops.base.reading import value_of
from tdfunc.ops.base.spelling import PURE_CALLS


def unchanged(instance: Any) -> Any:
    """Return the instance that the constructor gives: this one, or one made from it."""
    return instance


def build(cls: Any, values: dict[str, Any], batch_size: Any, device: Any, names: Any) -> Any:
    """Make an instance, for a generated constructor."""
    size = as_size(batch_size)
    place = None if device is None else as_device(device)
    static = None
    if place is not None or cls._looks_up or not _are_tensors(values, size):
        values, static = read_fields(cls, values, size, place)
    if names is not None:
        names = as_names(names, len(size))
    new = cls._make(values, size, place, names, static)
    complete = cls.__post_init__
    if complete is unchanged:
        return new
    result = complete(new)
    if result is None:
        return new
    if not isinstance(result, cls):
        raise error(
            TypeError,
            f"{cls.__name__}.__post_init__ did not return an instance.",
            expected=f"a {cls.__name__}, or None for no change",
            got=type(result).__name__,
            hint="return self.replace(field=value).",
        )
    return result


def _are_tensors(values: dict[str, Any], size: Size) -> bool:
    """Return True if all values are plain tensors that start with the batch size: the common case."""
    ndim = len(size)
    last = size
    for value in values.values():
        # A strided nested tensor has no shape to compare.
        if type(value) is not Tensor or value.is_nested:
            return False
        # Leaves of a tree share shapes.
        shape = value.shape
        if shape != last:
            if shape[:ndim] != size:
                return False
            last = shape
    return True


def read_fields(
    cls: Any, values: Mapping[str, Any], size: Size, device: torch.device | None
) -> tuple[dict[str, Node], Static | None]:
    """Return the nodes of the fields that are not None, and the ties of the trees among them."""
    if cls._looks_up:
        resolve_again(cls)
    plain = device is None and not cls._looks_up
    ndim = len(size)
    data: dict[str, Node] = {}
    holds_trees = False
    for key, value in values.items():
        if value is None:
            continue
        if plain and type(value) is Tensor and not value.is_nested and value.shape[:ndim] == size:
            data[key] = value
            continue
        node = make_node(cls, key, value, size, device, f"{cls.__name__}.{key}")
        if node is not None:
            data[key] = node
            holds_trees = holds_trees or isinstance(node, TensorCollection)
    if cls._looks_up:
        check_annotations(cls, data, data)
    static = lift_ties(data) if holds_trees else None
    return data, static


class Meta(ABCMeta):
    """Gives a class its fields when it is defined."""

    _options: Options

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any) -> "Meta":
        options = {option: bool(keywords.pop(option)) for option in OPTIONS if option in keywords}
        has_fields = "_is_base" not in namespace
        constructor = {"__init__", "__new__"} & namespace.keys()
        if constructor and has_fields:
            raise error(
                TypeError,
                f"{name}.{constructor.pop()} would replace the constructor of the fields.",
                hint="complete an instance in __post_init__, or write a classmethod that returns cls(...).",
            )
        # Before the class exists: instances have the slots of a tree, and no dict.
        namespace.setdefault("__slots__", ())
        # Any: the attributes of TensorClass, on a class that a type checker sees as its metaclass.
        cls: Any = super().__new__(mcls, name, bases, namespace, **keywords)
        inherited = [base._options for base in bases if isinstance(base, Meta)]
        cls._options = merge_options(name, inherited or [Options()], options)
        lazy = TensorCollection._lazy
        if lazy is not None and issubclass(cls, lazy):
            # It keeps its fields in the trees that it stacks, under its own keys.
            cls._any_key = True
        elif has_fields:
            _define_fields(cls, namespace)
        if cls.__dictoffset__:
            cls._make = classmethod(_make_with_dict)
        return cls

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, namespace)


def _make_with_dict(
    cls: Any, data: dict[str, Node], batch_size: Size, device: Any = None, names: Any = None, static: Any = None
) -> Any:
    """`_make` for a class whose instances have a dict, from a base without `__slots__`: none can be given it later."""
    return cls._fill(object.__new__(cls), data, batch_size, device, names, static)


@dataclasses.dataclass
class _Constructor:
    batch_size: dataclasses.InitVar[Any] = dataclasses.field(default=None, kw_only=True)
    device: dataclasses.InitVar[Any] = dataclasses.field(default=None, kw_only=True)
    names: dataclasses.InitVar[Any] = dataclasses.field(default=None, kw_only=True)


# Fields of many classes; the methods that they hide are seldom called, and `TensorClass.kind(instance)` calls them.
_COMMON = ("data", "kind", "leaves", "nested", "paths", "summary")


def _define_fields(cls: Any, namespace: dict[str, Any]) -> None:
    """Give a class its fields: the dataclass that `dataclasses` sees, a property for each field, and a constructor."""
    hints = read_annotations(cls)
    _check_free(cls, hints)
    _check_no_overwrite(cls, hints, namespace)
    own_doc = cls.__doc__
    _make_dataclass(cls, hints, namespace)
    fields = dataclasses.fields(cls)
    cls._fields = tuple(field.name for field in fields)
    cls._known = frozenset(cls._fields)
    cls._required = tuple(field.name for field in fields if _has_no_default(field))
    for name in cls._fields:
        setattr(cls, name, Field(name, cls._options.tensor_only))
    cls._hints = _all_hints(cls, hints)
    cls._looks_up = looks_up(cls)
    cls.__new__ = _make_constructor(cls)
    if own_doc:
        cls.__doc__ = own_doc
    else:
        cls.__doc__ = f"{cls.__name__}{inspect.signature(cls.__new__)}".replace("(__cls__, ", "(")
    register(cls)


def _check_free(cls: Any, hints: Mapping[str, Any]) -> None:
    """Raise if a field has the name of a method or property of trees."""
    base = next(each for each in cls.__mro__ if "_is_base" in vars(each))
    # A lazy stack of instances has the fields, and its own names.
    taken = {*dir(base), *dir(TensorCollection._lazy)} - {*_COMMON, *PURE_CALLS}
    public = {name for name in taken if not name.startswith("_")}
    for name in hints:
        # A tree's own slots and helpers; other names with an underscore are free.
        is_hidden = name.startswith("_") and hasattr(base, name)
        is_reserved = name in CONSTRUCTOR or is_hidden or name in Slots.__slots__
        is_shadowing = name in public and not cls._options.shadow
        if not is_reserved and not is_shadowing:
            continue
        hint = "rename it."
        if not is_reserved:
            hint = (
                f'rename it, or write class {cls.__name__}(TensorClass["shadow"]): the method is then '
                f"TensorClass.{name}(instance)."
            )
        raise error(
            AttributeError,
            f"{cls.__name__}: the field {name!r} has the name of a method or property of trees.",
            hint=hint,
        )


def _check_no_overwrite(cls: Any, hints: Mapping[str, Any], namespace: Mapping[str, Any]) -> None:
    """Raise if the body of a class gives a field of its bases another value without annotating it."""
    for name in cls._fields:
        if name in namespace and name not in hints:
            raise error(
                AttributeError,
                f"{cls.__name__}: {name!r} is a field of a base class, and is given something else here.",
                got=repr(namespace[name]),
                hint=f"annotate it to give the field a default ({name}: type = value), or use another name.",
            )


def _make_dataclass(cls: Any, hints: Mapping[str, Any], namespace: Mapping[str, Any]) -> None:
    for name in hints:
        # A base's attribute of this name (its field's property, a shadowed method) must not become the default.
        if name not in namespace and hasattr(cls, name):
            setattr(cls, name, dataclasses.field())
    # Without a docstring `dataclass` would write one, from a signature that is not ours.
    cls.__doc__ = cls.__doc__ or cls.__name__
    dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    # `dataclasses.replace` passes on InitVars, which are not fields: so the batch size is kept.
    cls.__dataclass_fields__ |= _Constructor.__dataclass_fields__
    # From Python 3.13 on `dataclass` puts its own there, which would lose the batch size.
    if "__replace__" in vars(cls) and "__replace__" not in namespace:
        del cls.__replace__


def _has_no_default(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _all_hints(cls: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hints of all fields: the hints of the bases, replaced by the class's own."""
    merged: dict[str, Any] = {}
    for base in reversed(cls.__mro__[1:]):
        merged |= vars(base).get("_hints", {})
    merged |= own
    return {name: hint for name, hint in merged.items() if name in cls._known}


class Field(property):
    """The property of a field; a separate class, so that a field that is annotated again is recognized."""

    def __init__(self, name: str, tensor_only: bool) -> None:
        def read(instance: Any) -> Any:
            try:
                node = instance._data[name]
            except KeyError:
                # None, and for dynamo (2.13) a guard that the field is empty: it sets none on a lookup that fails.
                return instance._data.get(name)
            if type(node) is Tensor or not isinstance(node, NonTensorBase):
                return node
            return value_of(instance, name, node)

        # Nothing needs to be unwrapped.
        def read_tensor(instance: Any) -> Any:
            try:
                return instance._data[name]
            except KeyError:
                return instance._data.get(name)

        reader = read_tensor if tensor_only else read
        reader.__name__ = reader.__qualname__ = name
        super().__init__(reader)
        self._made_from = name, tensor_only

    def __reduce__(self) -> Any:
        """Let cloudpickle (Ray, Dask) send a class by value, such as one that a script defines."""
        return Field, self._made_from


class _Factory:
    def __repr__(self) -> str:
        return "<factory>"


_FACTORY: Any = _Factory()


def _make_constructor(cls: Any) -> Callable[..., Any]:
    """Return `__new__` with the fields in its signature, which hands their values to `build`.

    As `dataclasses` does, it is compiled for exactly these fields, so that Python itself checks the arguments.
    """
    fields = dataclasses.fields(cls)
    scope: dict[str, Any] = {
        "__build__": _refuse_abstract if cls.__abstractmethods__ else build,
        "__factory__": _FACTORY,
    }
    by_place: list[str] = []
    by_name: list[str] = []
    given: list[str] = []
    for field in fields:
        parameter, value = _field_source(field, scope)
        given.append(f"{field.name!r}: {value}")
        if field.init and field.kw_only:
            by_name.append(parameter)
        elif field.init:
            by_place.append(parameter)
    options = [f"{name}=None" for name in CONSTRUCTOR]
    signature = ", ".join(["__cls__", *by_place, "*", *by_name, *options])
    call = f"__build__(__cls__, {{{', '.join(given)}}}, {', '.join(CONSTRUCTOR)})"
    exec(f"def __new__({signature}):\n return {call}", scope)
    new: Any = scope["__new__"]
    new.__qualname__ = cls.__qualname__
    new.__module__ = cls.__module__
    new.__annotations__ = {field.name: field.type for field in fields if field.init}
    new.__doc__ = f"Make a {cls.__name__} from its fields."
    return new


def _refuse_abstract(cls: Any, *_: Any) -> Any:
    """Let Python raise its own error: it makes no object of an abstract class."""
    return object.__new__(cls)


def _field_source(field: "dataclasses.Field[Any]", scope: dict[str, Any]) -> tuple[str, str]:
    """Return the source of a field's parameter and of its value in the constructor; its default goes into the scope."""
    name = field.name
    if field.default_factory is not dataclasses.MISSING:
        factory = f"__make_{name}__"
        scope[factory] = field.default_factory
        made = f"{factory}()"
        if field.init:
            return f"{name}=__factory__", f"{made} if {name} is __factory__ else {name}"
        return name, made
    if field.default is not dataclasses.MISSING:
        default = f"__default_{name}__"
        scope[default] = field.default
        return f"{name}={default}", name if field.init else default
    # A field that is not an argument and has no default is empty.
    return name, name if field.init else "None"
