"""What happens when a typed class is defined: its options, its fields, and what it cannot have."""

import dataclasses
import inspect
import keyword
from abc import ABCMeta
from collections.abc import Mapping
from typing import Any, Generic, NoReturn

from tdfunc._tensorclass.build import build, make_with_dict
from tdfunc._tensorclass.fields import (
    CONSTRUCTOR,
    OPTIONS,
    Field,
    Options,
    defining_scope,
    has_default,
    inherited_hints,
    looks_up,
    make_constructor,
    merge_options,
    own_annotations,
    resolve_annotations,
)
from tdfunc.core.collection import Slots, TensorCollection
from tdfunc.core.errors import error
from tdfunc.core.pytree import register


class Meta(ABCMeta):
    """Gives a class its fields when it is defined."""

    _options: Options

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any) -> "Meta":
        options = {option: bool(keywords.pop(option)) for option in OPTIONS if option in keywords}
        _check_definition(name, bases, namespace, keywords)
        # Before the class exists: instances have the slots of a tree, and no dict.
        namespace.setdefault("__slots__", ())
        # Any: the attributes of TensorClass, on a class that a type checker sees as its metaclass.
        cls: Any = super().__new__(mcls, name, bases, namespace, **keywords)
        cls._options = merge_options(name, [b._options for b in bases if isinstance(b, Meta)] or [Options()], options)
        lazy = TensorCollection._lazy
        if lazy is not None and issubclass(cls, lazy):
            # It keeps its fields in the trees that it stacks, under keys of its own.
            cls._any_key = True
        elif "_is_base" not in namespace:
            _define_fields(cls, namespace)
        if cls.__dictoffset__:
            cls._make = classmethod(make_with_dict)
        return cls

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, namespace)


def _check_definition(
    name: str, bases: tuple[type, ...], namespace: Mapping[str, Any], keywords: Mapping[str, Any]
) -> None:
    """Raise for what a typed tree cannot have."""
    hooked = any("__init_subclass__" in vars(c) for b in bases for c in b.__mro__ if c not in (object, Generic))
    if keywords and not hooked:
        raise error(TypeError, f"{name}: there is no option {next(iter(keywords))!r}.", expected=", ".join(OPTIONS))
    if "_is_base" in namespace:
        return
    for method in ("__init__", "__new__"):
        owner = next((c for c in bases if _own_constructor(c, method)), None)
        if method in namespace or owner is not None:
            where = f"{name}.{method}" if owner is None else f"{name} inherits {owner.__name__}.{method}, which"
            raise error(
                TypeError,
                f"{where} would replace the constructor of the fields.",
                hint="complete an instance in __post_init__, or write a classmethod that returns cls(...).",
            )
    if namespace.get("__slots__"):
        got = repr(namespace["__slots__"])
        raise error(TypeError, f"{name}: instances hold fields only.", got=f"__slots__ = {got}", hint="annotate them.")


def _own_constructor(cls: type, method: str) -> bool:
    """Whether a class that is no tree brings an `__init__` or `__new__` of its own."""
    if issubclass(cls, TensorCollection):
        return False
    return getattr(cls, method) is not getattr(object, method) and cls is not Generic


def _define_fields(cls: Any, namespace: dict[str, Any]) -> None:
    annotations = own_annotations(cls)
    _check_names_of(cls, annotations, namespace)
    for name in annotations:
        # What a base has under the name (its field's property, a shadowed method) is no default.
        if name not in namespace and hasattr(cls, name):
            setattr(cls, name, dataclasses.field())
    doc, cls.__doc__ = cls.__doc__, cls.__doc__ or cls.__name__
    dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    _check_kinds(cls)
    cls.__dataclass_fields__ |= _CONSTRUCTOR_FIELDS
    # From Python 3.13 on `dataclass` puts its own there, which would lose the batch size.
    if "__replace__" in vars(cls) and "__replace__" not in namespace:
        del cls.__replace__
    fields = dataclasses.fields(cls)
    cls._fields = tuple(f.name for f in fields)
    cls._known = frozenset(cls._fields)
    cls._required = tuple(f.name for f in fields if not has_default(f))
    for name in cls._fields:
        setattr(cls, name, Field(name, cls._options.tensor_only))
    scope, names = defining_scope(cls.__module__)
    own = {key: annotation for key, annotation in annotations.items() if key in cls._fields}
    known = resolve_annotations(own, scope, {**names, cls.__name__: cls})
    cls._hints = inherited_hints(cls) | known
    cls._looks_up = looks_up(cls)
    cls.__new__ = make_constructor(cls, _abstract if cls.__abstractmethods__ else build)
    cls.__doc__ = doc or f"{cls.__name__}{inspect.signature(cls.__new__)}".replace("(__cls__, ", "(")
    register(cls)


@dataclasses.dataclass
class _Constructor:
    batch_size: dataclasses.InitVar[Any] = dataclasses.field(default=None, kw_only=True)
    device: dataclasses.InitVar[Any] = dataclasses.field(default=None, kw_only=True)
    names: dataclasses.InitVar[Any] = dataclasses.field(default=None, kw_only=True)


# `dataclasses.replace` passes on what is declared like this, though it is no field; without it, a batch would be lost.
_CONSTRUCTOR_FIELDS: dict[str, Any] = _Constructor.__dataclass_fields__


def _abstract(cls: Any, *_: Any) -> NoReturn:
    missing = ", ".join(sorted(cls.__abstractmethods__))
    raise error(TypeError, f"{cls.__name__} is abstract.", expected=f"a class that defines {missing}")


def _check_names_of(cls: Any, annotations: Mapping[str, Any], namespace: Mapping[str, Any]) -> None:
    """Raise for fields with the names of something else, and for names of fields that are given to something else."""
    base = next(each for each in cls.__mro__ if "_is_base" in vars(each))
    # `data` and `nested` are fields of many classes; the one is only another name of `detach()`, the other a method of
    # lazy stacks that `LazyStack.nested(stack)` calls.
    # A lazy stack of instances has the fields, and names of its own.
    both = {*dir(base), *dir(TensorCollection._lazy)}
    public = {name for name in both if not name.startswith("_") and name not in ("data", "nested")}
    for name in annotations:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise error(
                TypeError,
                f"{cls.__name__}: {name!r} is no name of a field.",
                expected="an identifier that is no keyword",
                hint="fields are attributes and arguments; a TensorDict takes any string as a key.",
            )
        # A tree's own slots and helpers; names of a user's with an underscore are free.
        hidden = name.startswith("_") and hasattr(base, name)
        always = name in CONSTRUCTOR or hidden or name in Slots.__slots__
        if always or (name in public and not cls._options.shadow):
            raise error(
                AttributeError,
                f"{cls.__name__}: the field {name!r} has the name of a method or property of trees.",
                hint="rename it." if always else 'rename it, or derive from TensorClass["shadow"].',
            )
    for name in cls._fields:
        if name in namespace and name not in annotations:
            raise error(
                AttributeError,
                f"{cls.__name__}: {name!r} is a field of a base class, and is given something else here.",
                got=repr(namespace[name]),
                hint=f"annotate it to give the field a default ({name}: type = value), or use another name.",
            )


def _check_kinds(cls: Any) -> None:
    for name, field in cls.__dataclass_fields__.items():
        # The kind of a field is private to `dataclasses`, but its name has stood since Python 3.7.
        if field._field_type.name == "_FIELD_INITVAR" and name not in CONSTRUCTOR:
            raise error(
                TypeError,
                f"{cls.__name__}: {name!r} is an InitVar, which no other operation than the constructor would have.",
                hint="write a classmethod that takes it and returns cls(...), or make it a field.",
            )
