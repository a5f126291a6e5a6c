"""`TensorClass`: a dataclass whose instances have every tree operation."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

import torch
from torch import Size, Tensor
from typing_extensions import dataclass_transform

from tdfunc._tensorclass.define import Meta, read_fields, unchanged
from tdfunc._tensorclass.fields import (
    CONSTRUCTOR,
    OPTIONS,
    Options,
    check_annotations,
    make_node,
    resolve_again,
)
from tdfunc._tensordict import TreeMethods
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import ImmutableError, MissingKeyError, TreeStructureError, error
from tdfunc.core.keys import did_you_mean
from tdfunc.core.types import Device, Kind, Node
from tdfunc.ops.base.cast import all_shared
from tdfunc.ops.display.text import describe_leaf
from tdfunc.ops.edits.edit import replace_nodes, replacements

if TYPE_CHECKING:
    from typing_extensions import Self

    In = TypeVar("In")
    Out = TypeVar("Out")

    class _Given(Generic[In, Out]):
        """A property to type checkers, whose type in the constructor is another than when it is read."""

        def __get__(self, instance: Any, owner: Any) -> Out: ...
        def __set__(self, instance: Any, value: In) -> None: ...


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(dataclasses.field,))
class _Typed(TreeMethods, metaclass=Meta):
    """The base for type checkers: subclasses of its subclasses are frozen dataclasses."""

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
    `autocast` makes values instances of their annotation (an `int` stays an int), `nocast` keeps Python values as they
    are, `tensor_only` refuses values that cannot be tensors and reads faster, `shadow` allows fields with the names of
    methods, `frozen` changes nothing: instances always are.

    Annotations of jaxtyping (`Float[Tensor, "*batch n 3"]`) are checked on construction and by edits such as `set` and
    `replace`, an axis of one name having one size in all fields; `replace` changes several fields at once. Code that
    `torch.compile` traces is not checked, and an axis like `n+1` is checked only if a field gives `n`.

    Raises:
        AttributeError: A field has the name of a method or property of a tree or lazy stack.
        TypeError: A field is missing or unknown, or options exclude each other.
        BatchSizeError: A value does not start with the batch size; the message names the field.
        LeafMismatchError: A value does not fit an annotation that is checked.

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
    # True if a constructor must compare values with annotations, also those that are tensors.
    _looks_up: ClassVar[bool] = False
    # The value of a field at pads, where it is not the one that the caller of `pad` gives.
    _pads: ClassVar[dict[str, Any]] = {}
    # A lazy stack of instances has other keys than the fields.
    _any_key: ClassVar[bool] = False
    __slots__ = ()

    if TYPE_CHECKING:
        # Part of every constructor; for type checkers only, and by keyword, so that subclasses' fields come first.
        batch_size: _Given[Sequence[int] | int | None, Size] = dataclasses.field(default=None, kw_only=True)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
        device: _Given[Device | None, torch.device | None] = dataclasses.field(default=None, kw_only=True)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
        names: _Given[Sequence[str | None] | None, list[str | None]] = dataclasses.field(default=None, kw_only=True)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    else:

        def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
            """Raise: only a class with fields gets a constructor."""
            raise error(TypeError, f"{cls.__name__} is a base class; its subclasses have instances.")

    def __class_getitem__(cls, item: Any) -> Any:
        """Return the class with options; of a generic class, the class with type arguments."""
        above: Any = super()
        if hasattr(above, "__class_getitem__"):
            return above.__class_getitem__(item)
        given = item if isinstance(item, tuple) else (item,)
        takes_options = "_is_base" in cls.__dict__
        if not takes_options or not all(option in OPTIONS for option in given):
            raise error(
                TypeError,
                f"{cls.__name__}[...]: options are given to TensorClass, type arguments to classes that are Generic.",
                expected=", ".join(OPTIONS),
                got=repr(item),
            )
        name = f"{cls.__name__}[{', '.join(map(repr, given))}]"
        namespace = {"_is_base": True, "__module__": cls.__module__, "__doc__": cls.__doc__}
        return Meta(name, (cls,), namespace, **dict.fromkeys(given, True))

    # Returns the instance that the constructor gives: this one, or one made from it.
    __post_init__ = unchanged

    @classmethod
    def fields(cls) -> "tuple[dataclasses.Field[Any], ...]":
        """Return the fields, as `dataclasses.fields` does."""
        return dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]

    def replace(self, changes: Mapping[str, Any] | TensorCollection | None = None, /, **entries: Any) -> "Self":
        """Return an instance with some fields replaced (None empties one); `__post_init__` does not run.

        Args:
            changes: New values by name, or a tree of them.
            **entries: More new values, by keyword.

        Raises:
            MissingKeyError: A name is not the name of a field.
            BatchSizeError: A value does not start with the batch size; the message names the field.

        Examples:
            >>> class Point(TensorClass):
            ...     x: torch.Tensor
            ...     y: torch.Tensor | None = None
            >>> Point(torch.zeros(2), batch_size=[2]).replace(y=torch.ones(2, 3)).y.shape
            torch.Size([2, 3])
        """
        if self._is_lazy:
            return TensorCollection._lazy.replace(self, changes, **entries)
        given = replacements(changes, entries)
        self._check_names(given)
        nodes = {key: self._accept(key, value, f"{type(self).__name__}.{key}") for key, value in given.items()}
        if self._ties:
            return replace_nodes(self, nodes)
        return self._put(nodes)

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
            tensordict: A tree whose keys are fields; trees in it become instances of the annotated classes.
            non_tensordict: Values of further fields, which replace values of the tree.
            safe: Require the fields that have no default; otherwise they may be empty.

        Raises:
            TreeStructureError: A key is not a field, or a field without a default is missing.
        """
        # The class of a lazy stack stands for the class of its trees.
        cls = getattr(cls, "_stacked", cls)
        if tensordict._is_lazy:
            return tensordict._each(lambda t, part: cls.from_tensordict(t, part, safe), non_tensordict)
        further = non_tensordict or {}
        _check_keys(cls, list(dict.fromkeys([*tensordict._keys(), *further])), safe)
        size = tensordict._batch_size
        place = tensordict._device
        static = tensordict._static
        values = {key: tensordict._get(key) for key in tensordict._keys()}
        data, _ = read_fields(cls, values, size, place)
        if static is not None:
            kinds = {key: kind for key, kind in static.kinds.items() if key in data}
            static = static._replace(kinds=kinds)
        new: Any = cls._make(data, size, place, tensordict._names, static)
        if further:
            # Emptied first: a path that gets another value leaves the group that it was tied in.
            new = TensorClass.replace(new._put(dict.fromkeys(further)), further)
        return new

    @classmethod
    def from_dataclass(cls, source: Any, *, batch_size: Any = None, device: Any = None, names: Any = None) -> "Self":
        """Return an instance with the fields of a dataclass instance; it is constructed, so `__post_init__` runs."""
        cls = getattr(cls, "_stacked", cls)
        values: dict[str, Any] = {f.name: getattr(source, f.name) for f in dataclasses.fields(source)}
        return cls(**values, batch_size=batch_size, device=device, names=names)

    def _accept(self, key: str, value: Any, where: str) -> Node:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return a value of a field as a node, None where it empties the field."""
        cls = type(self)
        size = self._batch_size
        is_plain = type(value) is Tensor and self._device is None and not cls._looks_up and not value.is_nested
        if is_plain and value.shape[: len(size)] == size:
            return value
        if cls._looks_up:
            resolve_again(cls)
        return make_node(cls, key, value, size, self._device, where)

    def _put(self, changes: dict[str, Node], kinds: dict[str, Kind] | None = None) -> "Self":
        self._check_names(changes)
        new = super()._put(changes, kinds)
        if type(self)._looks_up:
            check_annotations(type(self), new._data, changes)
        return new

    # Any: the options of `TensorCollection._replace`.
    def _replace(self, data: dict[str, Node], **options: Any) -> "Self":
        self._check_names(data)
        return super()._replace(data, **options)

    @classmethod
    def _check_names(cls, names: Any) -> None:
        if cls._known.issuperset(names) or cls._any_key:
            return
        unknown = [name for name in names if name not in cls._fields]
        raise MissingKeyError(
            f"{cls.__name__} has no field {unknown[0]!r}.",
            expected=f"one of {list(cls._fields)}",
            hint=did_you_mean(unknown[0], cls._fields) or "to_tensordict() gives a tree with open keys.",
        )

    def __setattr__(self, name: str, value: object) -> None:
        if name in CONSTRUCTOR:
            super().__setattr__(name, value)
        what = f"{type(self).__name__} is immutable"
        fields = None
        if name not in self._fields:
            what += f" and has no field {name!r}"
            fields = f"one of {list(self._fields)}"
        raise ImmutableError(
            f"{what}.",
            expected=fields,
            got=f".{name} = value",
            hint=f"new = old.replace({name}=value); in __post_init__: return self.replace({name}=value).",
        )

    def __repr__(self) -> str:
        parts: list[str] = []
        keys = sorted(self._keys())
        for key in keys:
            node = self._get(key)
            text = repr(node) if isinstance(node, TensorCollection) else describe_leaf(node)
            parts.append(f"    {key}={text}".replace("\n", "\n    "))
        parts += [f"    {name}=None" for name in self._fields if name not in keys]
        parts.append(f"    batch_size={self._batch_size}")
        parts.append(f"    device={self._device}")
        parts.append(f"    is_shared={all_shared(self)}")
        if self._names is not None:
            parts.append(f"    names={list(self._names)}")
        return f"{type(self).__name__}(\n" + ",\n".join(parts) + ")"


def _check_keys(cls: Any, given: Sequence[str], safe: bool) -> None:
    """Raise unless the keys of a tree are fields, and if `safe`, all fields without a default are among them."""
    unknown = [key for key in given if key not in cls._fields]
    lacking: list[str] = []
    if safe:
        lacking = [name for name in cls._required if name not in given]
    if unknown or lacking:
        raise TreeStructureError(
            f"{cls.__name__}.from_tensordict: the keys are not the fields.",
            expected=f"{list(cls._fields)}",
            got=f"{given}: unknown {unknown}, missing {lacking}",
            hint="select() the fields first." if unknown else "safe=False leaves missing fields empty.",
        )


def tensorclass(cls: Any = None, /, **options: bool) -> Any:
    """Make a plain class with annotated fields a `TensorClass`.

    The result is a new class, so that `super()` without arguments does not work in its methods, and type checkers see
    no base class: derive from `TensorClass` where either matters.

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
    if issubclass(cls, TensorClass):
        if any(getattr(cls._options, option, None) is not on for option, on in options.items()):
            given = ", ".join(f"{option}={on}" for option, on in options.items())
            raise error(
                TypeError,
                f"tensorclass: {cls.__name__} is a TensorClass already.",
                got=given,
                hint=f"class {cls.__name__}(..., {given}), without the decorator.",
            )
        return cls
    if "__dataclass_fields__" in vars(cls):
        raise error(
            TypeError,
            f"tensorclass: {cls.__name__} is a dataclass, whose constructor would be lost.",
            hint="leave @dataclass out.",
        )
    skipped = {"__dict__", "__weakref__", "__slots__"}
    namespace = {key: value for key, value in vars(cls).items() if key not in skipped}
    namespace["__qualname__"] = cls.__qualname__
    bases = (*(base for base in cls.__bases__ if base is not object), TensorClass)
    return Meta(cls.__name__, bases, namespace, **options)
