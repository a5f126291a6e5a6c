"""Objects that hold tensors in their attributes: the caches of keys and values that models of transformers return.

torch's pytree does not know them, so `vmap`, `grad` and `jit` would lose their tensors. `open_objects` replaces each by
a copy of a subclass that the pytree knows; the object's own class stays as it is for the rest of the program.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

_HOLE = object()
# The subclass of each class; None where an object cannot be made of its attributes.
_subclasses: dict[type, type | None] = {}


class _ClosedError(Exception):
    """An object holds tensors in other ways than attributes, lists, tuples and dicts, or leads back to itself."""


# Any: attributes are of every type, here and below.
class _Frame:
    """An object without its tensors: its class, and its attributes with holes."""

    def __init__(self, kind: type, attributes: dict[str, Any]) -> None:
        self.kind = kind
        self.attributes = attributes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frame) and self.kind is other.kind and self.attributes == other.attributes

    def __hash__(self) -> int:
        return hash(self.kind)

    def __repr__(self) -> str:
        return self.kind.__name__


class _Filled:
    """A frame with other values than tensors in its holes: torch fills in dimensions, to count leaves."""

    def __init__(self, values: list[Any], frame: _Frame) -> None:
        self.values = values
        self.frame = frame


def open_objects(out: Any) -> Any:
    """Return an output whose caches are nodes of torch's pytree, each a copy; the tensors are the same."""
    if isinstance(out, Tensor) or not any(map(_is_cache, torch_pytree.tree_leaves(out))):
        return out
    return torch_pytree.tree_map(_open, out)


def _is_cache(value: object) -> bool:
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def _open(value: Any) -> Any:
    """Return a cache as a node; return other values, and caches that cannot be made again, as they are."""
    if not _is_cache(value):
        return value
    subclass = _subclass_of(type(value))
    if subclass is None:
        return value
    node = _fill(subclass, vars(value))
    try:
        _flatten(node)
    except _ClosedError:
        return value
    return node


def _subclass_of(kind: type) -> type | None:
    if kind not in _subclasses:
        _subclasses[kind] = _make_subclass(kind)
    return _subclasses[kind]


def _make_subclass(kind: type) -> type | None:
    """Return a subclass that torch's pytree knows; None for a class whose state is not only in its `__dict__`."""
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return None
    if any([vars(base).get("__slots__") for base in kind.__mro__]):
        return None

    def reduce(self: Any, protocol: object) -> Any:
        # Copies and pickles have the class that programs can import.
        return _fill, (kind, dict(vars(self)))

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce_ex__": reduce}
    try:
        subclass = type(kind)(kind.__name__, (kind,), names)
        object.__new__(subclass)
    # A class may refuse subclasses, or extend a built-in one.
    except Exception:
        return None
    torch_pytree.register_pytree_node(subclass, _flatten, _unflatten)
    return subclass


def _fill(kind: type, attributes: dict[str, Any]) -> Any:
    """Return an object of a class with these attributes; its own initialiser might compute."""
    new = cast(Any, object.__new__(kind))
    new.__dict__.update(attributes)
    return new


def _flatten(node: Any) -> tuple[list[Tensor], _Frame]:
    tensors: list[Tensor] = []
    return tensors, _Frame(type(node), _take(vars(node), tensors, frozenset([id(node)])))


def _take(value: Any, tensors: list[Tensor], around: frozenset[int]) -> Any:
    """Return a value with holes in place of its tensors, which are appended to a list; `around` has what holds it."""
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return _HOLE
    if kind is list or kind is tuple:
        return kind([_take(item, tensors, around) for item in value])
    if kind is dict:
        return {key: _take(item, tensors, around) for key, item in value.items()}
    if kind in torch_pytree.SUPPORTED_NODES:
        if any([isinstance(leaf, Tensor) for leaf in torch_pytree.tree_leaves(value)]):
            raise _ClosedError
        return value
    if not hasattr(value, "__dict__") or callable(value) or isinstance(value, torch.Generator):
        return value
    if id(value) in around:
        raise _ClosedError
    count = len(tensors)
    attributes = _take(vars(value), tensors, around | {id(value)})
    if len(tensors) == count:
        # Configurations and the like stay the objects that they are.
        return value
    if _subclass_of(kind) is None:
        raise _ClosedError
    return _Frame(kind, attributes)


def _unflatten(values: Iterable[Any], frame: _Frame) -> Any:
    values = list(values)
    if not all([isinstance(value, Tensor) for value in values]):
        return _Filled(values, frame)
    return _put(frame, iter(values))


def _put(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a value with tensors in its holes."""
    kind = type(value)
    if value is _HOLE:
        return next(tensors)
    if kind is list or kind is tuple:
        return kind([_put(item, tensors) for item in value])
    if kind is dict:
        return {key: _put(item, tensors) for key, item in value.items()}
    if kind is _Frame:
        return _fill(value.kind, _put(value.attributes, tensors))
    return value


torch_pytree.register_pytree_node(_Filled, lambda filled: (filled.values, filled.frame), _unflatten)
