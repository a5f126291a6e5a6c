"""Instances from the values of their fields."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Size, Tensor

from tdfunc._tensorclass.fields import check_annotations, make_node, settle_annotations
from tdfunc.core.collection import Static, TensorCollection
from tdfunc.core.errors import error
from tdfunc.core.shapes import as_names, as_size
from tdfunc.core.types import Names, Node
from tdfunc.ops.cast import as_device
from tdfunc.ops.convert import _lifted


def unchanged(instance: Any) -> Any:
    """Return the instance that the constructor gives: this one, or one made from it."""
    return instance


def build(cls: Any, values: dict[str, Any], batch_size: Any, device: Any, names: Any) -> Any:
    """Make an instance: what every generated constructor calls."""
    size = as_size(batch_size)
    place = None if device is None else as_device(device)
    static = None
    if place is not None or cls._looks_up or not _are_tensors(values, size):
        values, static = read_fields(cls, values, size, place)
    new = cls._make(values, size, place, None if names is None else as_names(names, len(size)), static)
    complete = cls.__post_init__
    return new if complete is unchanged else _completed(cls, complete, new)


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


def read_fields(
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
        raise error(
            TypeError,
            f"{cls.__name__}.__post_init__ returned something else.",
            expected=f"a {cls.__name__}, or None for no change",
            got=type(result).__name__,
            hint="return self.replace(field=value).",
        )
    return result


def make_with_dict(
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
