"""The fields of a typed tree: its options, its annotations, and how a value becomes a node."""

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, get_args, get_origin

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import in_functorch, is_compiling
from tdfunc.core.errors import LeafMismatchError, error
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.types import Node
from tdfunc.ops.base.convert import as_rows, convert

# The arguments that every constructor takes: no option makes these fields.
CONSTRUCTOR = ("batch_size", "device", "names")


class Options(NamedTuple):
    """How a class treats the values of its fields."""

    autocast: bool = False
    nocast: bool = False
    frozen: bool = False
    tensor_only: bool = False
    shadow: bool = False


OPTIONS = Options._fields


def merge_options(name: str, inherited: Iterable[Options], given: Mapping[str, bool]) -> Options:
    """Return the options of a class: the options of all its bases, and its own."""
    merged = Options(*map(any, zip(*inherited, strict=True)))._replace(**given)
    chosen = [option for option in ("autocast", "nocast", "tensor_only") if getattr(merged, option)]
    if len(chosen) > 1:
        raise error(
            TypeError,
            f"{name}: these options exclude each other.",
            got=", ".join(chosen),
            hint=f"keep one; {chosen[0]}=False turns an inherited option off.",
        )
    return merged


class Unresolved(NamedTuple):
    """An annotation with a name that is not defined yet; it is read again at the first construction."""

    annotation: Any
    scope: dict[str, Any]


def read_annotations(cls: Any) -> dict[str, Any]:
    """Return the types that the annotations of a class mean, `Unresolved` where a name is not defined yet."""
    # From Python 3.14 on annotations are evaluated when they are read; format 3 (FORWARDREF) never fails.
    options: dict[str, Any] = {"format": 3} if sys.version_info >= (3, 14) else {}
    # The code that defines the class: the nearest frame of its module.
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != cls.__module__:
        frame = frame.f_back
    if frame is None:
        scope = getattr(sys.modules.get(cls.__module__), "__dict__", {})
        names = {cls.__name__: cls}
    else:
        scope = frame.f_globals
        names = {**frame.f_locals, cls.__name__: cls}
    annotations = inspect.get_annotations(cls, **options)
    return {key: _resolve(annotation, scope, names) for key, annotation in annotations.items()}


def _resolve(annotation: Any, scope: dict[str, Any], names: Mapping[str, Any]) -> Any:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation
    # A holder of one annotation: one that cannot be resolved leaves the others alone.
    holder = types.SimpleNamespace(__annotations__={"x": annotation})
    try:
        return typing.get_type_hints(holder, scope, dict(names))["x"]
    # Any error: names that only a type checker imports are not defined at run time.
    except Exception:
        return Unresolved(annotation, scope)


def resolve_again(cls: Any) -> None:
    """Read the annotations again that were not resolved when the class was defined; Any where they still are not."""
    pending = {key: hint for key, hint in cls._hints.items() if type(hint) is Unresolved}
    # Dynamo (torch 2.13) cannot trace it; the first eager call does it.
    if not pending or is_compiling():
        return
    for key, hint in pending.items():
        again = _resolve(hint.annotation, hint.scope, {cls.__name__: cls})
        cls._hints[key] = Any if type(again) is Unresolved else again
    cls._looks_up = looks_up(cls)


def looks_up(cls: Any) -> bool:
    """Return True if values are compared with annotations, also those that are tensors."""
    if cls._options.autocast:
        return True
    return any(type(hint) is Unresolved or _shape_annotations(hint) for hint in cls._hints.values())


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union except None, or the one type."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(arg for arg in get_args(hint) if arg is not type(None))
    return (hint,)


def _members(hint: Any) -> list[Any]:
    """Return the members of a union except None, or the one type, without type arguments."""
    return [get_origin(each) or each for each in _alternatives(hint)]


def _is_tree(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, TensorCollection)


def _holds_lists(member: Any) -> bool:
    """Return True if a list may be a value of a member of an annotation."""
    if not isinstance(member, type) or member is Any:
        return member is not typing.Literal
    try:
        return issubclass(list, member)
    except TypeError:  # a protocol or a TypedDict
        return True


def typed_class(cls: Any, key: str, value: Any) -> Any:
    """Return the class with fields that a value of a field is converted to; None to leave it as it is."""
    if isinstance(value, TensorCollection):
        convertible = type(value) in (TensorCollection._open, TensorCollection._lazy)
    else:
        is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
        convertible = is_record or isinstance(value, Mapping)
    if not convertible:
        return None
    members = _members(cls._hints.get(key, Any))
    typed = [member for member in members if _has_fields(member)]
    others = [member for member in members if not _has_fields(member)]
    # With two classes, or another member that takes the value, the annotation is ambiguous.
    if len(typed) != 1 or any(_takes(member, value) for member in others):
        return None
    return typed[0]


def _has_fields(member: Any) -> bool:
    return _is_tree(member) and bool(getattr(member, "_fields", None))


def _takes(member: Any, value: Any) -> bool:
    """Return True if a member of an annotation, which has no fields, takes a tree, mapping or dataclass as it is."""
    if member in (Any, object, *type(value).__mro__) or _is_tree(member):
        return True
    return isinstance(member, type) and issubclass(member, Mapping)


def make_node(
    cls: Any, key: str, value: Any, size: Size, device: torch.device | None, where: str
) -> Node:  # None where the field is left empty
    """Return the value of a field as a node, by the options and annotations of the class."""
    if value is None or (isinstance(value, NonTensorData) and value.data is None):
        return None
    options = cls._options
    if options.nocast or options.tensor_only or options.autocast:
        value = _by_options(options, cls._hints.get(key, Any), value, size, where)
    if not isinstance(value, (Tensor, NonTensorBase)):
        value = _by_annotation(cls, key, value, size, device)
    node = convert(value, size, device, where)
    if options.tensor_only and isinstance(node, NonTensorBase):
        raise LeafMismatchError(
            f"{where!r}: the value is not a tensor.",
            expected="a tensor, tree, number or list of numbers",
            got=type(value).__name__,
            hint='derive from TensorClass without "tensor_only".',
        )
    return node


def _by_options(options: Options, hint: Any, value: Any, size: Size, where: str) -> Any:
    """Return a value as `nocast`, `tensor_only` or `autocast` treats it; these options exclude each other."""
    is_data = isinstance(value, NonTensorBase)
    if options.nocast and not is_data and not isinstance(value, (Tensor, TensorCollection)):
        # A list in a field that holds no lists is a value for each row.
        is_rows = isinstance(value, list) and size and not any(map(_holds_lists, _members(hint)))
        if is_rows:
            return as_rows(value, len(size), size, where)
        return NonTensorData(value, size)
    if options.tensor_only and is_data:
        return value.value
    if options.autocast and not is_data and not isinstance(value, TensorCollection):
        wanted = _cast_target(hint)
        if wanted is not None:
            return _cast(value, wanted, size, where)
    return value


def _by_annotation(cls: Any, key: str, value: Any, size: Size, device: torch.device | None) -> Any:
    """Return a tree, mapping or dataclass as an instance of the annotated class; a mapping of none as data."""
    typed = typed_class(cls, key, value)
    if typed is None:
        is_data = isinstance(value, Mapping) and not cls._options.tensor_only
        if is_data and not any(map(_is_tree, _members(cls._hints.get(key, Any)))):
            return NonTensorData(value, size)
        return value
    if isinstance(value, TensorCollection):
        return typed.from_tensordict(value)
    if isinstance(value, Mapping):
        given: Any = value
    else:
        given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return typed(**given, batch_size=size, device=device)


def _cast_target(hint: Any) -> type | None:
    """Return the one class that an annotation names, without type arguments and `| None`; None without such a class."""
    members = _members(hint)
    if len(members) != 1:
        return None
    wanted = members[0]
    if not isinstance(wanted, type) or wanted in (object, Any) or _is_shaped(wanted):
        return None
    return wanted


def _cast(value: Any, wanted: type, size: Size, where: str) -> Any:
    """Return a value as the annotated class: a tensor or tree, or else non-tensor data."""
    if issubclass(wanted, TensorCollection):
        return value
    if issubclass(wanted, Tensor) and isinstance(value, wanted):
        return value
    # A bool is an int to Python, not to a reader of annotations.
    fits = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    try:
        if issubclass(wanted, Tensor):
            return torch.as_tensor(value)
        if not fits:
            plain = value
            if isinstance(value, Tensor) and value.numel() == 1:
                plain = value.item()
            make: Callable[[Any], Any] = np.asarray if wanted is np.ndarray else wanted
            value = make(plain)
    except (TypeError, ValueError, RuntimeError) as err:
        raise LeafMismatchError(
            f"{where!r}: autocast cannot convert the value to the annotated type.",
            expected=wanted.__name__,
            got=_described(value) if isinstance(value, Tensor) else repr(value),
        ) from err
    return NonTensorData(value, size)


def _is_shaped(hint: Any) -> bool:
    # By its attributes, without an import: a class without such annotations may run where jaxtyping is not installed.
    return isinstance(hint, type) and hasattr(hint, "dim_str") and hasattr(hint, "dtypes")


def _shape_annotations(hint: Any) -> tuple[Any, ...]:
    """Return the jaxtyping types of an annotation if it has any, with the other classes of a union."""
    alternatives = _alternatives(hint)
    if not any(map(_is_shaped, alternatives)):
        return ()
    if not all(isinstance(each, type) for each in alternatives):
        return ()
    return alternatives


class _Shaped(NamedTuple):
    """The node of a field with a jaxtyping annotation, and the types of the annotation."""

    node: Node
    types: tuple[Any, ...]


def check_annotations(cls: Any, nodes: Mapping[str, Node], edited: Collection[str]) -> None:
    """Raise unless the edited fields fit their jaxtyping annotations, with one size for an axis of one name.

    Other fields that do not fit are ignored: operations may change shapes and dtypes.
    """
    if is_compiling():
        return
    # The fields that do not change come first: they bind the axes that an edited field must fit.
    # Inside vmap the batch dimension of some of them may be hidden.
    keys = [key for key in nodes if key in edited]
    if not in_functorch():
        keys = [key for key in nodes if key not in edited] + keys
    shaped: dict[str, _Shaped] = {}
    for key in keys:
        types = _shape_annotations(cls._hints.get(key))
        if types and nodes[key] is not None:
            shaped[key] = _Shaped(nodes[key], types)
    if not shaped:
        return
    wrong = _first_misfit(shaped, edited)
    if wrong is None:
        return
    others = " and ".join(f"{key!r} has {_described(field.node)}" for key, field in shaped.items() if key != wrong)
    hint = f"an axis of one name has one size in all fields, and {others}; replace() takes several in one call."
    raise LeafMismatchError(
        f"{f'{cls.__name__}.{wrong}'!r}: the value does not fit its annotation.",
        expected=" or ".join(each.__name__ for each in shaped[wrong].types),
        got=_described(shaped[wrong].node),
        hint=hint if others else None,
    )


def _first_misfit(shaped: Mapping[str, _Shaped], edited: Collection[str]) -> str | None:
    """Return the first edited field whose value does not fit its annotation."""
    import jaxtyping  # an annotation of its types exists, so it is installed

    # A new context, whatever function with its own checks is running.
    with jaxtyping.jaxtyped("context"):
        fits = {key: _fits(field) for key, field in shaped.items()}
        for key, fit in fits.items():
            if fit is False and key in edited:
                return key
        # All fields have bound their axes: an axis such as `n+1` can be checked, unless no field gives `n`.
        for key, fit in fits.items():
            if fit is None and _fits(shaped[key]) is False:
                return key
    return None


def _fits(field: _Shaped) -> bool | None:
    """Return True if a value is one of the types; None where this needs an axis that no field has bound yet."""
    import jaxtyping

    try:
        # A list, so that all types bind their axes, also those after one that fits.
        return any([isinstance(field.node, each) for each in field.types])
    except jaxtyping.AnnotationError:
        return None


def _described(node: Any) -> str:
    if isinstance(node, Tensor):
        return f"{node.dtype} of shape {list(node.shape)}"
    return type(node).__name__
