"""Plain Python objects in a tree: dicts, lists, tuples, numbers and strings, with tensors, arrays and trees in them.

The state of an optimizer or scheduler is such an object. If JSON cannot hold it unchanged, it becomes a node with its
tensors, arrays of numpy and trees as children, and with the rest as the node's own data.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor, nn

from tdfunc.core.collection import Static, TensorCollection
from tdfunc.core.errors import error
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.storage.tree.specs import malformed

MAX_DEPTH = 200
# Python can be set to read ints of at most 640 digits.
_MAX_INT_BITS = 2048
_DICTS: dict[str, type[Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_NAMES = {cls: name for name, cls in _DICTS.items()}
# The kinds of dtypes of numpy whose values are their bytes.
_NUMPY_KINDS = frozenset("biufcSUmM")
# Those that are leaves of the same dtype; others are leaves of bytes.
_SHARED_DTYPES = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
    + ["float16", "float32", "float64", "complex64"]
)
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class PlainObject(TensorCollection):
    """The node of a plain object: its tensors (as non-tensor data) and trees by their places, and the rest as `own`."""

    __slots__ = ()


# The recorded name of this class; no module has it.
OBJECT = "object"


def as_tree(value: Any, call: str) -> TensorCollection:
    """Return a tree, or the tree of a mapping: tensors and trees as they are, other objects as values."""
    if isinstance(value, TensorCollection):
        return value
    if not isinstance(value, Mapping) or not all(type(key) is str and key for key in value):
        raise error(
            TypeError,
            f"{call}: the value must be a tree, or a mapping of names.",
            expected="a TensorDict, or a dict whose keys are str",
            got=f"a dict with the keys {list(value)}"[:200] if isinstance(value, Mapping) else type(value).__name__,
            hint="tdfunc.from_module(module) is the tree of a module; {'name': x} gives anything else a name.",
        )
    known = (Tensor, TensorCollection, NonTensorBase, np.ndarray)
    return TensorCollection._open(
        {key: node if isinstance(node, known) else NonTensorData(node) for key, node in value.items()}
    )


def parts_of(value: Any) -> Iterator[Any]:
    """Yield the tensors and trees in a plain object that is in a tree."""
    if isinstance(value, (Tensor, TensorCollection)):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from parts_of(part)


def map_parts(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Return a plain object around other tensors and trees. It may be as deep as `pack` allows."""
    if isinstance(value, (Tensor, TensorCollection)):
        return fn(value)
    kind = type(value)
    if kind in (list, tuple):
        return kind([map_parts(part, fn) for part in value])
    if kind in _NAMES:
        return kind({key: map_parts(part, fn) for key, part in value.items()})
    return value


def is_json(value: Any) -> bool:
    """Return whether JSON returns a value unchanged: exact types, finite numbers, str keys."""
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            if type(item) is list:
                deeper.extend(item)
            elif type(item) is dict and all(type(key) is str for key in item):
                deeper.extend(item.values())
            elif not _is_scalar(item) or (type(item) is float and not math.isfinite(item)):
                return False
        if not deeper:
            return True
        level = deeper
    return False


def _is_scalar(item: Any) -> bool:
    if type(item) is int:
        return item.bit_length() <= _MAX_INT_BITS
    return item is None or type(item) in (str, bool, float)


def is_plain(value: Any) -> bool:
    """Return whether a file can hold a value that has no parts, and give it back as it is."""
    if isinstance(value, np.generic):
        return type(value) is value.dtype.type and is_plain_dtype(value.dtype)
    return _is_scalar(value)


def pack(value: Any, size: Size, refuse: Callable[[str, str], Exception]) -> PlainObject:
    """Return the node of a plain object; `refuse` makes the error for a part from its place and description."""
    data: dict[str, Any] = {}
    places: dict[int, str] = {}
    # By the id of an array, what its tensor needs to be that array again.
    arrays: dict[int, list[Any]] = {}

    def describe(part: Any, place: tuple[str, ...]) -> Any:
        if len(place) > MAX_DEPTH:
            raise refuse("", f"containers nested over {MAX_DEPTH} deep")
        if isinstance(part, (Tensor, TensorCollection)):
            if id(part) not in places:
                key = ".".join(place) or "value"
                while key in data:
                    key += "~"
                data[key] = NonTensorData(part) if isinstance(part, Tensor) else part
                places[id(part)] = key
            return {"at": places[id(part)]}
        kind = type(part)
        if kind is np.ndarray and is_plain_dtype(part.dtype):
            if id(part) not in arrays:
                leaf, arrays[id(part)] = tensor_of(part)
                places[id(part)] = describe(leaf, place)["at"]
            return {"array": [places[id(part)], *arrays[id(part)]]}
        if issubclass(kind, np.generic) and is_plain(part):
            return {"scalar": [part.dtype.str, part.tobytes().hex()]}
        if kind is float and not math.isfinite(part):
            return {"float": str(part)}
        if _is_scalar(part):
            return part
        if kind in (list, tuple):
            items = [describe(item, (*place, str(i))) for i, item in enumerate(part)]
            if kind is list:
                return items
            return {"tuple": items}
        if kind in _NAMES:
            before = len(data)
            keys = [describe(key, place) for key in part]
            if len(data) == before:
                items = [[key, describe(part[own], (*place, str(own)))] for key, own in zip(keys, part, strict=True)]
                return {_NAMES[kind]: items}
        # Python refuses to print an int of thousands of digits, and a module prints all of its own.
        if kind is int:
            shown = f"of {part.bit_length()} bits"
        else:
            shown = ""
            if not isinstance(part, nn.Module):
                shown = repr(part)
        raise refuse(".".join(place), f"{kind.__name__} {shown}".strip())

    own = describe(value, ())
    return PlainObject._make(data, size, static=Static(own=own))


def is_plain_dtype(dtype: "np.dtype[Any]") -> bool:
    """Return whether the values of a dtype of numpy are their bytes, on every machine."""
    # The largest floats differ from machine to machine.
    largest = {"f": 8, "c": 16}.get(dtype.kind, dtype.itemsize)
    return dtype.kind in _NUMPY_KINDS and dtype.itemsize <= largest


def tensor_of(array: "np.ndarray[Any, Any]") -> tuple[Tensor, list[Any]]:
    """Return the tensor of an array, and what it needs to be the array again: dtype and shape if torch has no such."""
    # A copy, because a save in the background writes it later.
    copied = np.array(array, order="C", copy=True)
    if array.dtype.isnative and str(array.dtype) in _SHARED_DTYPES:
        return torch.from_numpy(copied), []
    raw = np.frombuffer(copied.tobytes(), np.uint8).copy()
    return torch.from_numpy(raw), [array.dtype.str, list(array.shape)]


def array_of(leaf: Any, how: list[Any]) -> Any:
    """Return the array that `tensor_of` made a tensor of; a leaf without values stays one."""
    if not isinstance(leaf, Tensor) or leaf.is_meta or type(leaf) is not Tensor:
        return leaf
    array = leaf.cpu().numpy()
    if not how:
        return array
    text, shape = how
    dtype = _find_dtype(text)
    if not dtype.itemsize or not array.size:
        return np.zeros(shape, dtype)
    return array.view(dtype).reshape(shape)


def scalar_of(text: Any, digits: Any) -> Any:
    """Return the number of numpy with a dtype and bytes."""
    dtype = _find_dtype(text)
    if not dtype.itemsize:
        return dtype.type()
    return np.frombuffer(bytes.fromhex(digits), dtype)[0]


def _find_dtype(text: Any) -> "np.dtype[Any]":
    dtype = None
    if type(text) is str:
        dtype = np.dtype(text)
    if dtype is None or not is_plain_dtype(dtype):
        raise malformed("a dtype of numpy", repr(text)[:100])
    return dtype


def unpack(data: Mapping[str, Any], own: Any, size: Size) -> NonTensorData:
    """Return the plain object of a node, whose data may come from a file."""
    used: set[str] = set()
    arrays: dict[str, Any] = {}

    def read(part: Any) -> Any:
        if type(part) is list:
            return [read(item) for item in part]
        if type(part) is not dict:
            return part
        ((kind, content),) = part.items()
        if kind == "at":
            used.add(content)
            node = data[content]
            return node.data if isinstance(node, NonTensorData) else node
        if kind == "array":
            place, *how = content
            used.add(place)
            if place not in arrays:
                arrays[place] = array_of(data[place].data, how)
            return arrays[place]
        if kind == "scalar":
            return scalar_of(*content)
        if kind in ("float", "tuple"):
            if kind == "float":
                return _FLOATS[content]
            return tuple([read(item) for item in content])
        made = _DICTS[kind]()
        for key, item in content:
            made[read(key)] = read(item)
        if len(made) != len(content):
            raise malformed("distinct keys", "a key twice in a dict")
        return made

    value = read(own)
    if used != set(data):
        raise malformed("an object with each of its tensors", f"{sorted(set(data) - used)} in none")
    return NonTensorData(value, size)
