"""Objects that hold tensors in their attributes: the caches of keys and values that models of transformers return.

torch's pytree does not know them, so `vmap`, `grad` and `jit` would lose their tensors. `open_objects` replaces each by
a copy of a subclass that the pytree knows; the object's own class stays as it is for the rest of the program.
"""

import sys
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

# Any: attributes are of every type, here and below.
_opened: dict[type, type | None] = {}


class _Hole:
    """Stands for a tensor among the values that an object holds."""


_HOLE = _Hole()


class _Frame:
    """Everything about an object except its tensors."""

    def __init__(self, kind: type, spec: torch_pytree.TreeSpec, values: list[Any]) -> None:
        self.kind = kind
        self.spec = spec
        self.values = values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Frame) or (self.kind, self.spec) != (other.kind, other.spec):
            return False
        return all([a is b or (type(a) is type(b) and a == b) for a, b in zip(self.values, other.values, strict=True)])

    def __hash__(self) -> int:
        return hash(self.kind)

    def __repr__(self) -> str:
        return self.kind.__name__


def is_cache(value: object) -> bool:
    """Return whether an object is a cache of transformers."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def open_objects(out: Any) -> Any:
    """Return an output whose caches are nodes of torch's pytree, each a copy; the tensors are the same."""
    if isinstance(out, Tensor) or not any(map(is_cache, torch_pytree.tree_leaves(out))):
        return out
    return torch_pytree.tree_map(_open_cache, out)


def _open_cache(value: Any) -> Any:
    return _open(value) if is_cache(value) else value


def _open(value: Any) -> Any:
    """Return a copy of an object that holds tensors, as a node; return other values as they are."""
    if not hasattr(value, "__dict__") or callable(value) or isinstance(value, (Tensor, torch.Generator)):
        return value
    kind = type(value)
    if kind not in _opened:
        _opened[kind] = _make_node_class(kind)
    subclass = _opened[kind]
    if subclass is None:
        return value
    new = _fill(subclass, vars(value))
    try:
        tensors, _ = _flatten(new)
    # An object in it leads back to it.
    except RecursionError:
        return value
    return new if tensors else value


def _fill(kind: type, attributes: dict[str, Any]) -> Any:
    """Return an object of a class with these attributes; its own initialiser might compute."""
    new = cast(Any, object.__new__(kind))
    new.__dict__.update(attributes)
    return new


def _make_node_class(kind: type) -> type | None:
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


def _flatten(value: Any) -> tuple[list[Tensor], _Frame]:
    leaves, spec = torch_pytree.tree_flatten(torch_pytree.tree_map(_open, dict(vars(value))))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    values = [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tensors, _Frame(type(value), spec, values)


def _unflatten(given: Iterable[Any], frame: _Frame) -> Any:
    given = list(given)
    # torch fills in dimensions, to count leaves.
    if not all([isinstance(value, Tensor) for value in given]):
        return _Filled(given, frame)
    tensors = iter(given)
    values = [next(tensors) if value is _HOLE else value for value in frame.values]
    return _fill(frame.kind, torch_pytree.tree_unflatten(values, frame.spec))


class _Filled:
    """An object with other values than tensors in their places."""

    def __init__(self, given: list[Any], frame: _Frame) -> None:
        self.given = given
        self.frame = frame


torch_pytree.register_pytree_node(_Filled, lambda filled: (filled.given, filled.frame), _unflatten)
