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
    else:
        scope = frame.f_globals
    names = {**({} if frame is None else frame.f_locals), cls.__name__: cls}
    return {key: _resolve(each, scope, names) for key, each in inspect.get_annotations(cls, **options).items()}


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
    # Dynamo cannot trace it; the first eager call does it.
    if not pending or is_compiling():
        return
    for key, hint in pending.items():
        again = _resolve(hint.annotation, hint.scope, {cls.__name__: cls})
        cls._hints[key] = Any if type(again) is Unresolved else again
    cls._looks_up = looks_up(cls)


def looks_up(cls: Any) -> bool:
    """Return True if values are compared with annotations, also those that are tensors."""
    hints = cls._hints.values()
    return cls._options.autocast or any(type(hint) is Unresolved or _shape_annotations(hint) for hint in hints)


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
    typed = [each for each in members if _has_fields(each)]
    others = [each for each in members if not _has_fields(each)]
    # With two classes, or another member that takes the value, the annotation is ambiguous.
    names = (Any, object, *type(value).__mro__)
    taken = [
        each
        for each in others
        if each in names or _is_tree(each) or isinstance(each, type) and issubclass(each, Mapping)
    ]
    if len(typed) == 1 and not taken:
        return typed[0]
    return None


def _has_fields(member: Any) -> bool:
    return _is_tree(member) and bool(getattr(member, "_fields", None))


def make_node(
    cls: Any, key: str, value: Any, size: Size, device: torch.device | None, where: str
) -> Node:  # None where the field is left empty
    """Return the value of a field as a node, by the options and annotations of the class."""
    if value is None or (isinstance(value, NonTensorData) and value.data is None):
        return None
    options = cls._options
    hint = cls._hints.get(key, Any)
    # The one class that the annotation names, without type arguments and `| None`.
    named = _members(hint)
    found = None
    if len(named) == 1:
        found = named[0]
    wanted = found if isinstance(found, type) and found not in (object, Any) and not _is_shaped(found) else None
    if options.nocast and not isinstance(value, (Tensor, TensorCollection, NonTensorBase)):
        # A list in a field that holds no lists is a value for each row.
        is_rows = isinstance(value, list) and size and not any(map(_holds_lists, named))
        if is_rows:
            value = as_rows(value, len(size), size, where)
        else:
            value = NonTensorData(value, size)
    elif options.tensor_only and isinstance(value, NonTensorBase):
        value = value.value
    elif options.autocast and wanted is not None and not isinstance(value, (TensorCollection, NonTensorBase)):
        value = _cast(value, wanted, size, where)
    typed = None
    if not isinstance(value, (Tensor, NonTensorBase)):
        typed = typed_class(cls, key, value)
    if typed is not None and isinstance(value, TensorCollection):
        value = typed.from_tensordict(value)
    elif typed is not None:
        # Any: an instance of a dataclass, which has no class in common with others.
        record: Any = value
        is_mapping = isinstance(value, Mapping)
        if is_mapping:
            given = record
        else:
            given = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
        value = typed(**given, batch_size=size, device=device)
    elif isinstance(value, Mapping) and not options.tensor_only and not any(map(_is_tree, named)):
        value = NonTensorData(value, size)
    node = convert(value, size, device, where)
    if options.tensor_only and isinstance(node, NonTensorBase):
        raise LeafMismatchError(
            f"{where!r}: the value must be a tensor.",
            expected="a tensor, tree, number or list of numbers",
            got=type(value).__name__,
            hint='derive from TensorClass without "tensor_only".',
        )
    return node


def _cast(value: Any, wanted: type, size: Size, where: str) -> Any:
    """Return a value as the annotated class: a tensor or tree, or else non-tensor data."""
    if issubclass(wanted, TensorCollection) or isinstance(value, wanted) and issubclass(wanted, Tensor):
        return value
    try:
        if issubclass(wanted, Tensor):
            return torch.as_tensor(value)
        # A bool is an int to Python, not to a reader of annotations.
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            if isinstance(value, Tensor) and value.numel() == 1:
                plain = value.item()
            else:
                plain = value
            call: Callable[[Any], Any] = np.asarray if wanted is np.ndarray else wanted
            value = call(plain)
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
    shaped = any(map(_is_shaped, alternatives)) and all(isinstance(each, type) for each in alternatives)
    return alternatives if shaped else ()


def check_annotations(cls: Any, nodes: Mapping[str, Node], edited: Collection[str]) -> None:
    """Raise unless the edited fields fit their jaxtyping annotations, with one size for an axis of one name.

    Other fields that do not fit are ignored: operations may change shapes and dtypes.
    """
    if is_compiling():
        return
    # Inside vmap the batch dimension of some fields may be hidden.
    keys = [key for key in nodes if key not in edited and not in_functorch()] + [key for key in nodes if key in edited]
    hints = {key: _shape_annotations(cls._hints.get(key)) for key in keys if nodes[key] is not None}
    given = {key: (nodes[key], types) for key, types in hints.items() if types}
    if not given:
        return
    import jaxtyping  # an annotation of its types exists, so it is installed

    # A new context, whatever function with its own checks is running.
    with jaxtyping.jaxtyped("context"):
        fits = {key: _fits(*each) for key, each in given.items()}
        misfits = [key for key, fit in fits.items() if fit is False and key in edited]
        # All fields have bound their axes: an axis such as `n+1` can be checked, unless no field gives `n`.
        misfits += [key for key, fit in fits.items() if fit is None and _fits(*given[key]) is False]
    if not misfits:
        return
    wrong = misfits[0]
    others = " and ".join(f"{key!r} has {_described(each[0])}" for key, each in given.items() if key != wrong)
    hint = f"an axis of one name has one size in all fields, and {others}; replace() takes several in one call."
    raise LeafMismatchError(
        f"{f'{cls.__name__}.{wrong}'!r}: the value must fit its annotation.",
        expected=" or ".join(each.__name__ for each in given[wrong][1]),
        got=_described(given[wrong][0]),
        hint=hint if others else None,
    )


def _fits(node: Any, alternatives: Iterable[Any]) -> bool | None:
    """Return True if a value is one of the types; None where this needs an axis that no field has bound yet."""
    import jaxtyping

    try:
        return any([isinstance(node, each) for each in alternatives])
    except jaxtyping.AnnotationError:
        return None


def _described(node: Any) -> str:
    if isinstance(node, Tensor):
        return f"{node.dtype} of shape {list(node.shape)}"
    return type(node).__name__
