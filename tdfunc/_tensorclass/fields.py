"""The fields of a typed tree: its options, what the annotations say, and how a value becomes a node."""

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import in_functorch
from tdfunc.core.errors import LeafMismatchError, error
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.types import Node
from tdfunc.ops.convert import convert
from tdfunc.ops.reading import value_of

# What the constructor itself takes: no option makes these fields.
CONSTRUCTOR = ("batch_size", "device", "names")


class Options(NamedTuple):
    """How a class treats the values of its fields."""

    autocast: bool = False
    nocast: bool = False
    frozen: bool = False
    tensor_only: bool = False
    shadow: bool = False


OPTIONS = Options._fields
_EXCLUSIVE = ("autocast", "nocast", "tensor_only")


def merge_options(name: str, inherited: Iterable[Options], given: Mapping[str, bool]) -> Options:
    """Return the options of a class: those of all its bases, and its own."""
    merged = Options(*map(any, zip(*inherited, strict=True)))._replace(**given)
    chosen = [option for option in _EXCLUSIVE if getattr(merged, option)]
    if len(chosen) > 1:
        raise error(
            TypeError,
            f"{name}: these options exclude each other.",
            got=", ".join(chosen),
            hint=f"keep one; {chosen[0]}=False turns an inherited option off.",
        )
    return merged


# -- annotations ------------------------------------------------------------------------------------------------


class Unresolved(NamedTuple):
    """An annotation that names something not defined yet; it is read again at the first construction."""

    annotation: Any
    scope: dict[str, Any]


def own_annotations(cls: type) -> dict[str, Any]:
    """Return the annotations that a class itself has, where names may be undefined yet."""
    # From Python 3.14 on annotations are evaluated when they are read; format 3 (FORWARDREF) never fails.
    options: dict[str, Any] = {"format": 3} if sys.version_info >= (3, 14) else {}
    return inspect.get_annotations(cls, **options)


def defining_scope(module: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return globals and locals of the code that is defining a class: the nearest frame of its module."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return frame.f_globals, frame.f_locals
        frame = frame.f_back
    return getattr(sys.modules.get(module), "__dict__", {}), {}


def resolve_annotations(
    annotations: Mapping[str, Any], scope: dict[str, Any], names: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the types that annotations mean, `Unresolved` where a name is not there (yet)."""
    return {key: _resolve(annotation, scope, names) for key, annotation in annotations.items()}


def _resolve(annotation: Any, scope: dict[str, Any], names: Mapping[str, Any]) -> Any:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation
    # A holder of one annotation: one that cannot be resolved leaves the others alone.
    holder = types.SimpleNamespace(__annotations__={"x": annotation})
    try:
        return typing.get_type_hints(holder, scope, dict(names))["x"]
    # Whatever an annotation raises, a class can be defined: a type checker's imports are not there at run time.
    except Exception:
        return Unresolved(annotation, scope)


def settle_annotations(cls: Any) -> None:
    """Read annotations again that were not resolved when the class was defined; what still is not means Any."""
    pending = {key: hint for key, hint in cls._hints.items() if type(hint) is Unresolved}
    # Dynamo could not trace it; an eager call will come.
    if not pending or torch.compiler.is_compiling():
        return
    for key, hint in pending.items():
        again = _resolve(hint.annotation, hint.scope, {cls.__name__: cls})
        cls._hints[key] = Any if type(again) is Unresolved else again
    cls._looks_up = looks_up(cls)


def looks_up(cls: Any) -> bool:
    """Whether values have to be compared with annotations, also those that are tensors."""
    hints = cls._hints.values()
    return cls._options.autocast or any(type(hint) is Unresolved or shape_annotations(hint) for hint in hints)


def inherited_hints(cls: Any) -> dict[str, Any]:
    """Return what the annotations of the bases mean here: `class Ints(Box[int])` says what the variables of Box are."""
    given = {get_origin(base): get_args(base) for base in vars(cls).get("__orig_bases__", ())}
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__[1:]):
        variables = dict(zip(getattr(base, "__parameters__", ()), given.get(base, ()), strict=False))
        hints |= {key: _specialized(hint, variables) for key, hint in vars(base).get("_hints", {}).items()}
    return hints


def _specialized(hint: Any, variables: Mapping[Any, Any]) -> Any:
    """Return an annotation with type arguments for type variables."""
    if isinstance(hint, TypeVar):
        return variables.get(hint, hint)
    # A generic class without arguments has parameters, too, but says nothing of them.
    generic: Any = None if isinstance(hint, type) or not variables else hint
    parameters = getattr(generic, "__parameters__", ())
    try:
        return generic[tuple([variables.get(each, each) for each in parameters])] if parameters else hint
    # Of parameter specifications and the like no field is cast.
    except TypeError:
        return hint


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union but None, or the one type."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(arg for arg in get_args(hint) if arg is not type(None))
    return (hint,)


def _class_of(hint: Any) -> type | None:
    """Return the one class that an annotation asks for, without type arguments and `| None`, if it is one."""
    given = _alternatives(hint)
    found = (get_origin(given[0]) or given[0]) if len(given) == 1 else None
    return found if isinstance(found, type) and found not in (object, Any) and not _is_shaped(found) else None


def typed_class(cls: Any, key: str, value: Any) -> Any:
    """Return the class with fields that the value of a field is to become an instance of; None for none."""
    if isinstance(value, TensorCollection):
        convertible = type(value) in (TensorCollection._open, TensorCollection._lazy)
    else:
        convertible = isinstance(value, Mapping) or _is_record(value)
    if not convertible:
        return None
    members = [get_origin(each) or each for each in _alternatives(cls._hints.get(key, Any))]
    typed = [each for each in members if _has_fields(each)]
    others = [each for each in members if not _has_fields(each)]
    # Two classes, or one and something else that takes the value: nothing says which one is meant.
    return typed[0] if len(typed) == 1 and not any(_takes(each, value) for each in others) else None


def _has_fields(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, TensorCollection) and bool(getattr(member, "_fields", None))


def _takes(member: Any, value: Any) -> bool:
    if member is Any or member is object or member in type(value).__mro__:
        return True
    return isinstance(member, type) and issubclass(member, (TensorCollection, Mapping))


# -- values into nodes ------------------------------------------------------------------------------------------


def make_node(
    cls: Any, key: str, value: Any, size: Size, device: torch.device | None, where: str
) -> Node:  # None where the field is left empty
    """Return the value of a field as a node, by the options and annotations of the class."""
    if value is None or (isinstance(value, NonTensorData) and value.data is None):
        return None
    options, hint = cls._options, cls._hints.get(key, Any)
    wanted = _class_of(hint)
    if options.nocast and not isinstance(value, (Tensor, TensorCollection, NonTensorBase)):
        value = NonTensorData(value, size)
    elif options.tensor_only and isinstance(value, NonTensorBase):
        value = value.value
    elif options.autocast and wanted is not None and not isinstance(value, (TensorCollection, NonTensorBase)):
        value = _cast(value, wanted, size, where)
    typed = None if isinstance(value, (Tensor, NonTensorBase)) else typed_class(cls, key, value)
    if typed is not None:
        value = _as_typed(value, typed, size, device, where)
    node = convert(value, size, device, where)
    if options.tensor_only and isinstance(node, NonTensorBase):
        raise LeafMismatchError(
            f"{where!r}: this cannot be a tensor.",
            expected="a tensor, tree, number or list of numbers",
            got=type(value).__name__,
            hint='derive from TensorClass without "tensor_only".',
        )
    return node


def _cast(value: Any, wanted: type, size: Size, where: str) -> Any:
    """Return a value as the annotated class; what is no tensor or tree stays as it is, as non-tensor data."""
    if issubclass(wanted, TensorCollection) or isinstance(value, wanted) and issubclass(wanted, Tensor):
        return value
    try:
        if issubclass(wanted, Tensor):
            return torch.as_tensor(value)
        # A bool is an int to Python, not to a reader of annotations.
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            call: Callable[[Any], Any] = np.asarray if wanted is np.ndarray else wanted
            value = call(plain)
    except (TypeError, ValueError, RuntimeError) as err:
        raise LeafMismatchError(
            f"{where!r}: autocast cannot make this the annotated type.",
            expected=wanted.__name__,
            got=f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value),
        ) from err
    return NonTensorData(value, size)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _as_typed(value: Any, typed: Any, size: Size, device: torch.device | None, where: str) -> Any:
    """Return a dict, dataclass or open tree as an instance of a class with fields."""
    if isinstance(value, TensorCollection):
        return typed.from_tensordict(value)
    given = value if isinstance(value, Mapping) else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    fields = [f for f in dataclasses.fields(typed) if f.init]
    unknown = [key for key in given if key not in [f.name for f in fields]]
    lacking = [f.name for f in fields if f.name not in given and not has_default(f)]
    if unknown or lacking:
        raise LeafMismatchError(
            f"{where!r}: the value does not fit.",
            expected=f"the fields {list(typed._fields)} of {typed.__name__}",
            got=f"{list(given)}: unknown {unknown}, missing {lacking}",
        )
    return typed(**given, batch_size=size, device=device)


# -- jaxtyping --------------------------------------------------------------------------------------------------


def _is_shaped(hint: Any) -> bool:
    # No test of `sys.modules` would be cheaper, and an annotation of jaxtyping has imported it.
    return isinstance(hint, type) and hasattr(hint, "dim_str") and hasattr(hint, "dtypes")


def shape_annotations(hint: Any) -> tuple[Any, ...]:
    """Return the jaxtyping types of an annotation if it has any, with the classes beside them in a union."""
    alternatives = _alternatives(hint)
    shaped = any(map(_is_shaped, alternatives)) and all(isinstance(each, type) for each in alternatives)
    return alternatives if shaped else ()


def check_annotations(cls: Any, nodes: Mapping[str, Node], edited: Collection[str] | None = None) -> None:
    """Raise unless fields fit their jaxtyping annotations, an axis of one name having one size in all of them.

    After an edit only what it made wrong is an error: operations are not held to annotations.
    """
    if torch.compiler.is_compiling():
        return
    new = _shaped(cls, nodes, nodes if edited is None else edited)
    if not new:
        return
    old = {} if edited is None else _shaped(cls, nodes, [key for key in nodes if key not in edited])
    if old:
        # Inside vmap some fields may have a dimension that others do not show.
        off = list(old) if in_functorch() else _misfits(old, [*old])
        old = {key: each for key, each in old.items() if key not in off}
    given = {**old, **new}
    wrong = _misfits(given, [*given])
    if wrong:
        first = next((key for key in wrong if key in new), wrong[0])
        raise _misfit(cls.__name__, first, given, bool(old))


def _shaped(cls: Any, nodes: Mapping[str, Node], keys: Iterable[str]) -> "_Given":
    """Return those of the fields whose values are held to jaxtyping annotations."""
    given = {key: (nodes.get(key), shape_annotations(cls._hints.get(key))) for key in keys}
    return {key: each for key, each in given.items() if each[0] is not None and each[1]}


# A value, and the types that its annotation allows.
_Given = Mapping[str, tuple[Any, tuple[Any, ...]]]


def _misfits(given: _Given, keys: Sequence[str]) -> list[str]:
    """Return those of the fields that do not fit, the first one that names an axis giving its size."""
    import jaxtyping  # an annotation of its types exists, so it is installed

    wrong: list[str] = []
    # A context of our own, whatever function with checks of its own we are called from.
    with jaxtyping.jaxtyped("context"):
        while keys:
            fits = {key: _fits(*given[key]) for key in keys}
            wrong += [key for key, fit in fits.items() if fit is False]
            # `n+1` can be told when a later field has given `n`, and not at all where that is empty.
            waiting = [key for key, fit in fits.items() if fit is None]
            keys = waiting if len(waiting) < len(keys) else ()
    return wrong


def _fits(node: Any, alternatives: Iterable[Any]) -> bool | None:
    """Whether a value is one of the types; None where this needs the size of an axis that no field has given yet."""
    import jaxtyping

    unknown = False
    for each in alternatives:
        try:
            if isinstance(node, each):
                return True
        except jaxtyping.AnnotationError as err:
            if not isinstance(err.__cause__, NameError):
                raise
            unknown = True
    return None if unknown else False


def _misfit(name: str, key: str, given: _Given, edit: bool) -> LeafMismatchError:
    node, alternatives = given[key]
    expected = " or ".join(alternative.__name__ for alternative in alternatives)
    hint = None
    # Alone it may fit, where another field gives its axes other sizes.
    if not _misfits(given, [key]):
        others = [other for other in given if other != key]
        blamed = [other for other in others if _misfits(given, [other, key])][:1] or others
        have = " and ".join(f"{other!r} has {_shape(given[other][0])}" for other in blamed)
        hint = f"an axis of one name has one size in all fields, and {have}"
        hint += "; replace() takes several in one call." if edit else "."
    return LeafMismatchError(
        f"{f'{name}.{key}'!r}: the value does not fit its annotation.", expected=expected, got=_shown(node), hint=hint
    )


def _shown(node: Any) -> str:
    return f"{node.dtype} of {_shape(node)}" if isinstance(node, Tensor) else type(node).__name__


def _shape(node: Any) -> str:
    return f"shape {list(node.shape)}" if isinstance(node, Tensor) else f"a {type(node).__name__}"


# -- what a class gets ------------------------------------------------------------------------------------------


class Field(property):
    """The property of a field; a class of its own, so that a field that is annotated again is known."""

    def __init__(self, name: str, tensor_only: bool) -> None:
        read = _tensor_reader(name) if tensor_only else _reader(name)
        read.__name__ = read.__qualname__ = name
        super().__init__(read)
        self._made_from = name, tensor_only

    def __reduce__(self) -> Any:
        """Let cloudpickle (Ray, Dask) send a class by value, such as one that a script defines."""
        return Field, self._made_from


def _reader(name: str) -> Callable[[Any], Any]:
    def read(self: Any) -> Any:
        try:
            node = self._data[name]
        except KeyError:
            # None, and for dynamo a guard that the field is empty: it sets none on a lookup that fails.
            return self._data.get(name)
        if type(node) is Tensor or not isinstance(node, NonTensorBase):
            return node
        return value_of(self, name, node)

    return read


def _tensor_reader(name: str) -> Callable[[Any], Any]:
    # Nothing needs to be unwrapped.
    def read(self: Any) -> Any:
        try:
            return self._data[name]
        except KeyError:
            return self._data.get(name)

    return read


class _Factory:
    def __repr__(self) -> str:
        return "<factory>"


_FACTORY: Any = _Factory()


def has_default(field: "dataclasses.Field[Any]") -> bool:
    """Whether a field need not be given."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def make_constructor(cls: Any, build: Callable[..., Any]) -> Callable[..., Any]:
    """Return `__new__` with the fields in its signature, which hands their values to `build`."""
    fields = dataclasses.fields(cls)
    _check_order(cls.__name__, [f for f in fields if f.init and not f.kw_only])
    scope: dict[str, Any] = {"__build__": build, "__factory__": _FACTORY}
    by_place = [_parameter(f, scope) for f in fields if f.init and not f.kw_only]
    by_name = [_parameter(f, scope) for f in fields if f.init and f.kw_only]
    taken = ", ".join(["__cls__", *by_place, "*", *by_name, *(f"{name}=None" for name in CONSTRUCTOR)])
    given = ", ".join(f"{f.name!r}: {_source(f, scope)}" for f in fields)
    # As `dataclasses` does: code for exactly these fields, so that Python itself checks the arguments.
    exec(f"def __new__({taken}):\n return __build__(__cls__, {{{given}}}, {', '.join(CONSTRUCTOR)})", scope)
    new: Any = scope["__new__"]
    new.__qualname__, new.__module__ = cls.__qualname__, cls.__module__
    new.__annotations__ = {f.name: f.type for f in fields if f.init}
    new.__doc__ = f"Make a {cls.__name__} from its fields."
    return new


def _check_order(name: str, fields: "list[dataclasses.Field[Any]]") -> None:
    before = ""
    for f in fields:
        if has_default(f):
            before = f.name
        elif before:
            raise error(
                TypeError,
                f"{name}: the field {f.name!r} without a default follows {before!r}, which has one.",
                hint=f"give {f.name!r} a default, or field(kw_only=True).",
            )


def _parameter(field: "dataclasses.Field[Any]", scope: dict[str, Any]) -> str:
    if field.default is not dataclasses.MISSING:
        scope[f"__default_{field.name}__"] = field.default
        return f"{field.name}=__default_{field.name}__"
    return field.name if field.default_factory is dataclasses.MISSING else f"{field.name}=__factory__"


def _source(field: "dataclasses.Field[Any]", scope: dict[str, Any]) -> str:
    """Return the expression of a field's value inside the constructor."""
    name = field.name
    if field.default_factory is not dataclasses.MISSING:
        scope[f"__make_{name}__"] = field.default_factory
        return f"__make_{name}__() if {name} is __factory__ else {name}" if field.init else f"__make_{name}__()"
    if field.init:
        return name
    scope[f"__default_{name}__"] = None if field.default is dataclasses.MISSING else field.default
    return f"__default_{name}__"
