"""`TensorClass`: a tree with named, typed fields; a dataclass whose instances have every tree operation."""

import dataclasses
import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

import torch
from torch import Size, Tensor
from typing_extensions import dataclass_transform

from tdfunc._collection import Slots, Static, TensorCollection
from tdfunc._errors import ImmutableError, MissingKeyError, TreeStructureError, explain
from tdfunc._fields import (
    CONSTRUCTOR,
    OPTIONS,
    Field,
    Options,
    check_annotations,
    defining_scope,
    has_default,
    looks_up,
    make_constructor,
    make_node,
    merge_options,
    own_annotations,
    resolve_annotations,
    settle_annotations,
)
from tdfunc._keys import did_you_mean
from tdfunc._nontensor import NonTensorData
from tdfunc._pytree import register
from tdfunc._shapes import as_names, as_size
from tdfunc._tensordict import TreeMethods
from tdfunc._types import Device, Kind, Names, Node, Ties
from tdfunc.ops.cast import all_shared, as_device, clone
from tdfunc.ops.convert import _lifted
from tdfunc.ops.edit import replacements, set_
from tdfunc.ops.show import describe_leaf

if TYPE_CHECKING:
    from typing_extensions import Self

    In = TypeVar("In")
    Out = TypeVar("Out")

    class _Given(Generic[In, Out]):
        """A property to type checkers, whose type in the constructor is another than when it is read."""

        def __get__(self, instance: Any, owner: Any) -> Out: ...
        def __set__(self, instance: Any, value: In) -> None: ...


T = TypeVar("T", bound="TensorClass")


def _check_definition(
    name: str, bases: tuple[type, ...], namespace: Mapping[str, Any], keywords: Mapping[str, Any]
) -> None:
    """Raise for what a typed tree cannot have."""
    hooked = any("__init_subclass__" in vars(c) for b in bases for c in b.__mro__ if c not in (object, Generic))
    if keywords and not hooked:
        what = f"{name}: there is no option {next(iter(keywords))!r}."
        raise TypeError(explain(what, expected=", ".join(OPTIONS)))
    if "_is_base" in namespace:
        return
    for method in ("__init__", "__new__"):
        owner = next((c for c in bases if _own_constructor(c, method)), None)
        if method in namespace or owner is not None:
            where = f"{name}.{method}" if owner is None else f"{name} inherits {owner.__name__}.{method}, which"
            hint = "complete an instance in __post_init__, or write a classmethod that returns cls(...)."
            raise TypeError(explain(f"{where} would replace the constructor of the fields.", hint=hint))
    if namespace.get("__slots__"):
        got = repr(namespace["__slots__"])
        raise TypeError(
            explain(f"{name}: instances hold fields only.", got=f"__slots__ = {got}", hint="annotate them.")
        )


def _own_constructor(cls: type, method: str) -> bool:
    """Whether a class that is no tree brings an `__init__` or `__new__` of its own."""
    if issubclass(cls, TensorCollection):
        return False
    return getattr(cls, method) is not getattr(object, method) and cls is not Generic


class _Meta(ABCMeta):
    """Gives a class its fields when it is defined."""

    _options: Options

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any) -> "_Meta":
        options = {option: bool(keywords.pop(option)) for option in OPTIONS if option in keywords}
        _check_definition(name, bases, namespace, keywords)
        # Before the class exists: instances have the slots of a tree, and no dict.
        namespace.setdefault("__slots__", ())
        # Any: the attributes of TensorClass, on a class that a type checker sees as its metaclass.
        cls: Any = super().__new__(mcls, name, bases, namespace, **keywords)
        cls._options = merge_options(name, [b._options for b in bases if isinstance(b, _Meta)] or [Options()], options)
        lazy = TensorCollection._lazy
        if lazy is not None and issubclass(cls, lazy):
            # It keeps its fields in the trees that it stacks, under keys of its own.
            cls._any_key = True
        elif "_is_base" not in namespace:
            _define_fields(cls, namespace)
        if cls.__dictoffset__:
            cls._make = classmethod(_make_with_dict)
        return cls

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, namespace)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class _Typed(TreeMethods, metaclass=_Meta):
    """What type checkers read: subclasses of its subclasses are frozen dataclasses."""

    _is_base: ClassVar[bool] = True
    _options: ClassVar[Options] = Options()
    __slots__ = ()


class TensorClass(_Typed):
    """A tree with named, typed fields.

    Subclass it and annotate fields, as in a dataclass; instances take the fields by position or keyword and
    `batch_size`, `device` and `names` by keyword. A field that is None is absent from the tree. Every operation of
    `TensorDict` works and gives the same class.

    Define `__post_init__` to check or complete an instance. It runs in the constructor only; since instances are
    immutable, it returns the completed one: `return self.replace(total=self.a + self.b)`.

    Options are given as `TensorClass["nocast"]` or `class A(TensorClass, nocast=True)`, and inherited:
    `autocast` makes values what the annotation says (an `int` stays an int), `nocast` keeps Python values as they
    are, `tensor_only` refuses what cannot be a tensor and reads faster, `shadow` allows fields with the names of
    methods, `frozen` changes nothing: instances always are.

    Annotations of jaxtyping (`Float[Tensor, "*batch 3"]`) are checked on construction and by `set` and `replace`.

    Raises:
        AttributeError: A field has the name of a method or property.
        TypeError: A field is missing or unknown, or options exclude each other.
        BatchSizeError: A value does not start with the batch size; the message names the field.
        LeafMismatchError: A value does not fit its annotation, where that is checked.

    Examples:
        >>> class Batch(TensorClass):
        ...     image: torch.Tensor
        ...     label: torch.Tensor
        ...     note: str = "plain"
        >>> batch = Batch(torch.zeros(8, 3, 4), label=torch.arange(8), batch_size=[8])
        >>> batch[:2].image.shape, batch.note
        (torch.Size([2, 3, 4]), 'plain')
    """

    _is_base: ClassVar[bool] = True
    _fields: ClassVar[tuple[str, ...]] = ()
    _known: ClassVar[frozenset[str]] = frozenset()
    # The fields without a default.
    _required: ClassVar[tuple[str, ...]] = ()
    _hints: ClassVar[dict[str, Any]] = {}
    # Whether a constructor must compare values with annotations, also those that are tensors.
    _looks_up: ClassVar[bool] = False
    # A lazy stack of instances has other keys than the fields.
    _any_key: ClassVar[bool] = False
    __slots__ = ()

    if TYPE_CHECKING:
        # Part of every constructor; for type checkers only, and by keyword, so that subclasses' fields come first.
        batch_size: _Given[Sequence[int] | int | None, Size] = dataclasses.field(default=None, kw_only=True)  # pyright: ignore
        device: _Given[Device | None, torch.device | None] = dataclasses.field(default=None, kw_only=True)  # pyright: ignore
        names: _Given[Sequence[str | None] | None, list[str | None]] = dataclasses.field(default=None, kw_only=True)  # pyright: ignore
    else:

        def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
            """Refuse: a class defined with fields gets a constructor of its own."""
            hint = f"class Mine({cls.__name__}): with annotated fields."
            raise TypeError(explain(f"{cls.__name__} is a base class and has no instances.", hint=hint))

    def __class_getitem__(cls, item: Any) -> Any:
        """Return the class with options; of a generic class, the class with type arguments."""
        given = item if isinstance(item, tuple) else (item,)
        if "_is_base" in cls.__dict__ and not issubclass(cls, Generic):
            unknown = [option for option in given if option not in OPTIONS]
            if unknown:
                what = f"{cls.__name__}[...]: {unknown[0]!r} is no option."
                raise TypeError(explain(what, expected=", ".join(OPTIONS)))
            name = f"{cls.__name__}[{', '.join(map(repr, given))}]"
            namespace = {"_is_base": True, "__module__": cls.__module__, "__doc__": cls.__doc__}
            return _Meta(name, (cls,), namespace, **dict.fromkeys(given, True))
        above: Any = super()
        if not hasattr(above, "__class_getitem__"):
            hint = "options are for TensorClass itself; type arguments for classes that derive from Generic."
            raise TypeError(explain(f"{cls.__name__}[...]: the class takes no arguments.", got=repr(item), hint=hint))
        return above.__class_getitem__(item)

    def __post_init__(self) -> Any:
        """Return the instance that the constructor gives: this one, or one made from it."""
        return self

    # -- making instances ---------------------------------------------------------------------------------------

    @classmethod
    def fields(cls) -> "tuple[dataclasses.Field[Any], ...]":
        """Return the fields, as `dataclasses.fields` does."""
        return dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]

    def replace(self, changes: Mapping[str, Any] | TensorCollection | None = None, /, **entries: Any) -> "Self":
        """Return an instance with some fields replaced (None empties one); `__post_init__` does not run.

        Args:
            changes: New values by name, or a tree of them.
            **entries: More of them, by keyword.

        Raises:
            MissingKeyError: There is no such field.
            BatchSizeError: A value does not start with the batch size; the message names the field.

        Examples:
            >>> class Point(TensorClass):
            ...     x: torch.Tensor
            ...     y: torch.Tensor | None = None
            >>> Point(torch.zeros(2), batch_size=[2]).replace(y=torch.ones(2, 3)).y.shape
            torch.Size([2, 3])
        """
        given = replacements(changes, entries)
        done = self._each(lambda t, part: TensorClass.replace(t, part), given)
        if done is not None:
            return done
        self._check_names(given)
        if not self._ties:
            nodes = {key: self._accept(key, value, f"{type(self).__name__}.{key}") for key, value in given.items()}
            return self._put(nodes)
        new: Any = self
        for key, value in given.items():
            new = set_(new, key, value)
        return new

    def __replace__(self, **changes: Any) -> "Self":
        """`copy.replace` of Python 3.13."""
        # By this name, which no field can shadow.
        new: Any = TensorClass.replace(self, changes)
        return new

    @classmethod
    def from_tensordict(
        cls, tensordict: TensorCollection, non_tensordict: Mapping[str, Any] | None = None, safe: bool = True
    ) -> "Self":
        """Return an instance with the entries of a tree; `__post_init__` does not run, defaults are not filled in.

        Args:
            tensordict: A tree whose keys are fields; trees in it become what the fields are annotated with.
            non_tensordict: Values of further fields, which win over those of the tree.
            safe: Require the fields that have no default; otherwise those that are missing stay empty.

        Raises:
            TypeError: The source is no tree.
            TreeStructureError: A key is no field, or a field without a default is missing.
        """
        if not isinstance(tensordict, TensorCollection):
            hint = f"{cls.__name__}(**values) takes a dict of fields."
            what, got = f"{cls.__name__}.from_tensordict: this is no tree.", type(tensordict).__name__
            raise TypeError(explain(what, expected="a tree", got=got, hint=hint))
        # The class of a lazy stack stands for that of its trees.
        cls = getattr(cls, "_stacked", cls)
        done: Any = tensordict._each(lambda t, part: cls.from_tensordict(t, part, safe), non_tensordict)
        if done is not None:
            return done
        given = list(dict.fromkeys([*tensordict._keys(), *(non_tensordict or {})]))
        unknown = [key for key in given if key not in cls._fields]
        lacking = [name for name in cls._required if safe and name not in given]
        if unknown or lacking:
            raise TreeStructureError(
                explain(
                    f"{cls.__name__}.from_tensordict: the keys are not the fields.",
                    expected=f"{list(cls._fields)}",
                    got=f"{given}: unknown {unknown}, missing {lacking}",
                    hint="select() the fields first." if unknown else "safe=False leaves missing fields empty.",
                )
            )
        size, place, static = tensordict._batch_size, tensordict._device, tensordict._static
        data = _read_fields(cls, {key: tensordict._get(key) for key in tensordict._keys()}, size, place)[0]
        if static is not None:
            static = static._replace(kinds={key: kind for key, kind in static.kinds.items() if key in data})
        new: Any = cls._make(data, size, place, tensordict._names, static)
        if non_tensordict:
            # Emptied first: a path that gets another value leaves the group that it was tied in.
            new = TensorClass.replace(new._put(dict.fromkeys(non_tensordict)), non_tensordict)
        return new

    def to_tensordict(self, *, retain_none: bool | None = None) -> Any:
        """Return a `TensorDict` with copies of all entries; instances inside become `TensorDict`s too.

        Args:
            retain_none: Write empty fields as non-tensor None, which `from_tensordict` reads; False leaves them out.
        """
        return _plain(clone(self, recurse=True), retain_none is not False)

    @classmethod
    def from_dataclass(cls, source: Any, *, batch_size: Any = None, device: Any = None, names: Any = None) -> "Self":
        """Return an instance with the fields of a dataclass instance; it is constructed, so `__post_init__` runs.

        Raises:
            TypeError: The source is no dataclass instance, or has fields that this class lacks.
        """
        cls = getattr(cls, "_stacked", cls)
        if not dataclasses.is_dataclass(source) or isinstance(source, type):
            what = f"{cls.__name__}.from_dataclass: this is no dataclass instance."
            raise TypeError(explain(what, expected="an instance", got=repr(source)))
        values: dict[str, Any] = {f.name: getattr(source, f.name) for f in dataclasses.fields(source)}
        return cls(**values, batch_size=batch_size, device=device, names=names)

    # -- the primitives know the fields -------------------------------------------------------------------------

    def _accept(self, key: str, value: Any, where: str) -> Node:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return a value of a field as a node, None where it empties the field."""
        cls = type(self)
        self._check_names((key,))
        size = self._batch_size
        plain = type(value) is Tensor and self._device is None and not cls._looks_up and not value.is_nested
        if plain and value.shape[: len(size)] == size:
            return value
        if cls._looks_up:
            settle_annotations(cls)
        node = make_node(cls, key, value, size, self._device, where)
        if cls._looks_up:
            check_annotations(cls, {key: node})
        return node

    def _put(self, changes: dict[str, Node], kinds: dict[str, Kind] | None = None) -> "Self":
        self._check_names(changes)
        return super()._put(changes, kinds)

    def _replace(
        self,
        data: dict[str, Node] | None = None,
        *,
        batch_size: Size | None = None,
        names: Names | None = None,
        kinds: dict[str, Kind] | None = None,
        ties: Ties | None = None,
    ) -> "Self":
        if data is not None:
            self._check_names(data)
        return super()._replace(data, batch_size=batch_size, names=names, kinds=kinds, ties=ties)

    @classmethod
    def _check_names(cls, names: Any) -> None:
        if cls._known.issuperset(names) or cls._any_key:
            return
        unknown = [name for name in names if name not in cls._fields]
        raise MissingKeyError(
            explain(
                f"{cls.__name__} has no field {unknown[0]!r}.",
                expected=f"one of {list(cls._fields)}",
                hint=did_you_mean(unknown[0], cls._fields) or "to_tensordict() gives a tree with open keys.",
            )
        )

    def __setattr__(self, name: str, value: object) -> None:
        cls = type(self)
        if name not in cls._fields and name not in CONSTRUCTOR:
            what = f"{cls.__name__} is immutable and has no field {name!r}."
            raise ImmutableError(explain(what, expected=f"one of {list(cls._fields)}", got=f".{name} = value"))
        if name in CONSTRUCTOR:
            super().__setattr__(name, value)
        hint = f"new = old.replace({name}=value); in __post_init__: return self.replace({name}=value)."
        raise ImmutableError(explain(f"{cls.__name__} is immutable: .{name} = value cannot be written.", hint=hint))

    def __delattr__(self, name: str) -> None:
        if name not in self._fields:
            super().__delattr__(name)
        what = f"{type(self).__name__} is immutable: del .{name} cannot be done."
        raise ImmutableError(explain(what, hint=f"new = old.replace({name}=None) empties the field."))

    def __repr__(self) -> str:
        keys = list(self._keys())
        parts = [f"    {key}={_shown(self._get(key))}" for key in sorted(keys)]
        parts += [f"    {name}=None" for name in self._fields if name not in keys]
        parts += [f"    batch_size={self._batch_size}", f"    device={self._device}"]
        parts += [f"    is_shared={all_shared(self)}"]
        if self._names is not None:
            parts.append(f"    names={list(self._names)}")
        return f"{type(self).__name__}(\n" + ",\n".join(parts) + ")"

    def _show_absent(self) -> dict[str, str]:
        keys = list(self._keys())
        return {name: "None" for name in self._fields if name not in keys}


def _shown(node: Any) -> str:
    return (repr(node) if isinstance(node, TensorCollection) else describe_leaf(node)).replace("\n", "\n    ")


def _plain(tree: TensorCollection, retain_none: bool) -> Any:
    done = tree._each(lambda t: _plain(t, retain_none))
    if done is not None:
        return done
    data = {key: _plain(n, retain_none) if isinstance(n, TensorCollection) else n for key, n in tree._data.items()}
    if retain_none and isinstance(tree, TensorClass):
        data |= {name: NonTensorData(None, tree._batch_size) for name in tree._fields if name not in data}
    return TensorCollection._open._make(data, tree._batch_size, tree._device, tree._names, tree._static)


# -- construction -----------------------------------------------------------------------------------------------


def _build(cls: Any, values: dict[str, Any], batch_size: Any, device: Any, names: Any) -> Any:
    """Make an instance: what every generated constructor calls."""
    size = as_size(batch_size)
    place = None if device is None else as_device(device)
    static = None
    if place is not None or cls._looks_up or not _are_tensors(values, size):
        values, static = _read_fields(cls, values, size, place)
    new = cls._make(values, size, place, None if names is None else as_names(names, len(size)), static)
    complete = cls.__post_init__
    return new if complete is _UNCHANGED else _completed(cls, complete, new)


_UNCHANGED = TensorClass.__post_init__


def _are_tensors(values: dict[str, Any], size: Size) -> bool:
    """Whether all values are plain tensors that start with the batch size: the common case."""
    ndim, last = len(size), size
    for value in values.values():
        # The shape of a nested tensor cannot be asked for.
        if type(value) is not Tensor or value.is_nested:
            return False
        # Leaves of a tree share shapes.
        shape = value.shape
        if shape != last:
            if shape[:ndim] != size:
                return False
            last = shape
    return True


def _read_fields(
    cls: Any, values: Mapping[str, Any], size: Size, device: torch.device | None
) -> tuple[dict[str, Node], Static | None]:
    """Return the nodes of the fields that are not None, and what ties the trees among them bring."""
    if cls._looks_up:
        settle_annotations(cls)
    plain = device is None and not cls._looks_up
    ndim = len(size)
    data: dict[str, Node] = {}
    trees = False
    for key, value in values.items():
        if value is None:
            continue
        if plain and type(value) is Tensor and not value.is_nested and value.shape[:ndim] == size:
            data[key] = value
            continue
        node = make_node(cls, key, value, size, device, f"{cls.__name__}.{key}")
        if node is not None:
            data[key] = node
            trees = trees or isinstance(node, TensorCollection)
    if cls._looks_up:
        check_annotations(cls, data)
    return data, _lifted(data) if trees else None


def _completed(cls: Any, complete: Callable[[Any], Any], new: Any) -> Any:
    result = complete(new)
    if result is None:
        return new
    if not isinstance(result, cls):
        expected, hint = f"a {cls.__name__}, or None for no change", "return self.replace(field=value)."
        what = f"{cls.__name__}.__post_init__ returned something else."
        raise TypeError(explain(what, expected=expected, got=type(result).__name__, hint=hint))
    return result


def _make_with_dict(
    cls: Any,
    data: dict[str, Node],
    batch_size: Size,
    device: torch.device | None = None,
    names: Names | None = None,
    static: Static | None = None,
) -> Any:
    """`_make` for a class whose instances have a dict, from a base without `__slots__`: none can be given it later."""
    new = object.__new__(cls)
    object.__setattr__(new, "_data", data)
    object.__setattr__(new, "_batch_size", batch_size)
    object.__setattr__(new, "_device", device)
    object.__setattr__(new, "_names", names)
    object.__setattr__(new, "_static", static)
    object.__setattr__(new, "_cache", None)
    return new


# -- defining a class -------------------------------------------------------------------------------------------


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
    inherited = [vars(base)["_hints"] for base in reversed(cls.__mro__[1:]) if "_hints" in vars(base)]
    cls._hints = {key: hint for hints in (*inherited, known) for key, hint in hints.items()}
    cls._looks_up = looks_up(cls)
    cls.__new__ = make_constructor(cls, _abstract if cls.__abstractmethods__ else _build)
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
    raise TypeError(explain(f"{cls.__name__} is abstract.", expected=f"a class that defines {missing}"))


def _check_names_of(cls: Any, annotations: Mapping[str, Any], namespace: Mapping[str, Any]) -> None:
    """Raise for fields with the names of something else, and for names of fields that are given to something else."""
    # `data` is a field of many classes, and only another name of `detach()`.
    public = {name for name in dir(TensorClass) if not name.startswith("_") and name != "data"}
    for name in annotations:
        # A tree's own slots and helpers; names of a user's with an underscore are free.
        hidden = name.startswith("_") and hasattr(TensorClass, name)
        always = name in CONSTRUCTOR or hidden or name in Slots.__slots__
        if always or (name in public and not cls._options.shadow):
            what = f"{cls.__name__}: the field {name!r} has the name of a method or property of trees."
            hint = "rename it." if always else 'rename it, or derive from TensorClass["shadow"].'
            raise AttributeError(explain(what, hint=hint))
    for name in cls._fields:
        if name in namespace and name not in annotations:
            what = f"{cls.__name__}: {name!r} is a field of a base class, and is given something else here."
            hint = f"annotate it to give the field a default ({name}: type = value), or use another name."
            raise AttributeError(explain(what, got=repr(namespace[name]), hint=hint))


def _check_kinds(cls: Any) -> None:
    for name, field in cls.__dataclass_fields__.items():
        # The kind of a field is private to `dataclasses`, but its name has stood since Python 3.7.
        if field._field_type.name == "_FIELD_INITVAR" and name not in CONSTRUCTOR:
            hint = "write a classmethod that takes it and returns cls(...), or make it a field."
            what = f"{cls.__name__}: {name!r} is an InitVar, which no other operation than the constructor would have."
            raise TypeError(explain(what, hint=hint))


# -- the decorator ----------------------------------------------------------------------------------------------


def tensorclass(cls: Any = None, /, **options: bool) -> Any:
    """Make a plain class with annotated fields a `TensorClass`.

    No type checker understands that a decorator adds a base class: derive from `TensorClass` where that matters.

    Args:
        cls: The class; without it, a decorator with these options.
        **options: `autocast`, `nocast`, `frozen`, `tensor_only`, `shadow`, as for `TensorClass`.

    Raises:
        TypeError: The class is a dataclass, or a `TensorClass` without these options.

    Examples:
        >>> @tensorclass
        ... class Point:
        ...     x: torch.Tensor
        ...     y: torch.Tensor
        >>> Point(torch.zeros(3), torch.ones(3), batch_size=[3])[0].y
        tensor(1.)
    """
    if cls is None:
        return lambda plain: tensorclass(plain, **options)
    if not isinstance(cls, type):
        hint = "options go by keyword: @tensorclass(autocast=True)."
        raise TypeError(explain("tensorclass: not a class.", expected="a class", got=repr(cls), hint=hint))
    if issubclass(cls, TensorClass):
        if any(getattr(cls._options, option, None) is not on for option, on in options.items()):
            given = ", ".join(f"{option}={on}" for option, on in options.items())
            hint = f"class {cls.__name__}(..., {given}), without the decorator."
            raise TypeError(explain(f"tensorclass: {cls.__name__} is a TensorClass already.", got=given, hint=hint))
        return cls
    if "__dataclass_fields__" in vars(cls):
        what = f"tensorclass: {cls.__name__} is a dataclass, whose constructor would be lost."
        raise TypeError(explain(what, hint="leave @dataclass out."))
    skipped = {"__dict__", "__weakref__", "__slots__"}
    namespace = {key: value for key, value in vars(cls).items() if key not in skipped}
    namespace["__qualname__"] = cls.__qualname__
    new = _Meta(
        cls.__name__, (*(base for base in cls.__bases__ if base is not object), TensorClass), namespace, **options
    )
    _point_super(cls, new)
    return new


def _point_super(old: type, new: Any) -> None:
    """Make zero-argument `super()` of the methods, which all share one cell, mean the new class."""
    for value in vars(old).values():
        for member in (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel"))):
            for cell in getattr(inspect.unwrap(member), "__closure__", None) or () if callable(member) else ():
                # An empty cell has no contents to ask for.
                if _contents(cell) is old:
                    cell.cell_contents = new


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
