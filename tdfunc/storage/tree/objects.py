"""Plain Python objects in a tree: dicts, lists, tuples, numbers and strings, with tensors, arrays and trees in them.

The state of an optimizer or scheduler is such an object. If JSON cannot hold it unchanged, it becomes a node with its
tensors, arrays of numpy and trees as children, and with the rest as the node's own data.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor, nn

from tdfunc.core.collection import Static, TensorCollection
from tdfunc.core.errors import error
from tdfunc.core.nontensor import NonTensorBase, NonTensorData, NonTensorStack
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
# The key of a description of one object for each element of a batch.
_EACH = "each"


def as_tree(value: Any, call: str) -> TensorCollection:
    """Return a tree, or the tree of a mapping: tensors and trees as they are, other objects as values."""
    if isinstance(value, TensorCollection):
        return value
    if not isinstance(value, Mapping) or not all([type(key) is str and key for key in value]):
        got = type(value).__name__
        if isinstance(value, Mapping):
            got = f"a dict with the keys {list(value)}"[:200]
        raise error(
            TypeError,
            f"{call}: the value is not a tree or a mapping of names.",
            expected="a TensorDict, or a dict whose keys are str",
            got=got,
            hint="tdfunc.from_module(module) is the tree of a module; {'name': x} gives anything else a name.",
        )
    known = (Tensor, TensorCollection, NonTensorBase, np.ndarray)
    entries: dict[str, Any] = {}
    for key, node in value.items():
        entries[key] = node if isinstance(node, known) else NonTensorData(node)
    return TensorCollection._open(entries)


def parts_of(value: Any) -> Iterator[Any]:
    """Yield the tensors and trees in a plain object that is in a tree."""
    if isinstance(value, (Tensor, TensorCollection)):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        parts = value.values() if isinstance(value, dict) else value
        for part in parts:
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
    packer = _Packer(refuse)
    own = packer.describe(value, ())
    return PlainObject._make(packer.data, size, static=Static(own=own))


def pack_each(values: Sequence[Any], size: Size, refuse: Callable[[str, str], Exception]) -> PlainObject:
    """Return the node of one plain object for each element of a batch, row by row."""
    node = pack(list(values), size, refuse)
    assert node._static is not None
    return PlainObject._make(node._data, size, static=Static(own={_EACH: node._static.own}))


class _Packer:
    """Describes a plain object in JSON, and collects the tensors, arrays and trees in it.

    Recursive functions: two calls for each level, so that `MAX_DEPTH` levels stay far from Python's limit.
    """

    def __init__(self, refuse: Callable[[str, str], Exception]) -> None:
        self._refuse = refuse
        # The tensors and trees by their keys in the node.
        self.data: dict[str, Any] = {}
        # By the id of a tensor or tree its key.
        self._keys: dict[int, str] = {}
        # By the id of an array: the key of its tensor, and what this needs to be the array again.
        self._arrays: dict[int, list[Any]] = {}

    # Any: any object; JSON of it.
    def describe(self, part: Any, place: tuple[str, ...]) -> Any:
        """Return JSON for a part of the object: itself, or a dict of one key, which is its kind."""
        if len(place) > MAX_DEPTH:
            raise self._refuse("", f"containers nested over {MAX_DEPTH} deep")
        if isinstance(part, (Tensor, TensorCollection)):
            return {"at": self._enter(part, place)}
        kind = type(part)
        if kind is np.ndarray and is_plain_dtype(part.dtype):
            return {"array": self._enter_array(part, place)}
        if issubclass(kind, np.generic) and is_plain(part):
            return {"scalar": [part.dtype.str, part.tobytes().hex()]}
        if kind is float and not math.isfinite(part):
            return {"float": str(part)}
        if _is_scalar(part):
            return part
        if kind is list:
            return self._describe_items(part, place)
        if kind is tuple:
            return {"tuple": self._describe_items(part, place)}
        if kind in _NAMES:
            entries = self._describe_entries(part, place)
            if entries is not None:
                return {_NAMES[kind]: entries}
        raise self._refuse(".".join(place), f"{kind.__name__} {_shown(part)}".strip())

    def _enter(self, part: Tensor | TensorCollection, place: tuple[str, ...]) -> str:
        """Return the key of a tensor or tree, which is entered once."""
        if id(part) not in self._keys:
            key = ".".join(place) or "value"
            while key in self.data:
                key += "~"
            self.data[key] = NonTensorData(part) if isinstance(part, Tensor) else part
            self._keys[id(part)] = key
        return self._keys[id(part)]

    def _enter_array(self, array: "np.ndarray[Any, Any]", place: tuple[str, ...]) -> list[Any]:
        if id(array) not in self._arrays:
            leaf, needs = tensor_of(array)
            self._arrays[id(array)] = [self._enter(leaf, place), *needs]
        return self._arrays[id(array)]

    def _describe_items(self, part: Sequence[Any], place: tuple[str, ...]) -> list[Any]:
        items: list[Any] = []
        for i, item in enumerate(part):
            items.append(self.describe(item, (*place, str(i))))
        return items

    def _describe_entries(self, part: Mapping[Any, Any], place: tuple[str, ...]) -> list[list[Any]] | None:
        """Return the keys and values of a dict; None if a tensor or tree is in a key."""
        before = len(self.data)
        keys = [self.describe(key, place) for key in part]
        if len(self.data) != before:
            return None
        entries: list[list[Any]] = []
        for key, own in zip(keys, part, strict=True):
            entries.append([key, self.describe(part[own], (*place, str(own)))])
        return entries


def _shown(part: Any) -> str:
    """Return an object that cannot be stored, for a message."""
    # Python refuses to print an int of thousands of digits, and a module prints all of them.
    if type(part) is int:
        return f"of {part.bit_length()} bits"
    if isinstance(part, nn.Module):
        return ""
    return repr(part)


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


def unpack(data: Mapping[str, Any], own: Any, size: Size) -> NonTensorBase:
    """Return the plain object of a node, or one for each element of its batch; its data may come from a file."""
    has_each = type(own) is dict and own.keys() == {_EACH}
    unpacker = _Unpacker(data)
    value = unpacker.read(own[_EACH] if has_each else own)
    if unpacker.used != set(data):
        raise malformed("an object with each of its tensors", f"{sorted(set(data) - unpacker.used)} in none")
    if not has_each:
        return NonTensorData(value, size)
    is_whole = type(value) is list and len(value) == size.numel()
    if not is_whole:
        raise malformed(f"a list of one object for each element of {list(size)}", repr(value)[:100])
    return NonTensorStack._of_values(value, size)


class _Unpacker:
    """Makes a plain object of the JSON that `_Packer` described it with, and of its tensors and trees."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self.used: set[str] = set()
        self._arrays: dict[str, Any] = {}

    # Any: JSON; any object.
    def read(self, part: Any) -> Any:
        """Return the object that a part of the JSON describes."""
        if type(part) is list:
            return [self.read(item) for item in part]
        if type(part) is not dict:
            return part
        ((kind, content),) = part.items()
        if kind == "at":
            self.used.add(content)
            node = self._data[content]
            return node.data if isinstance(node, NonTensorData) else node
        if kind == "array":
            return self._read_array(content)
        if kind == "scalar":
            return scalar_of(*content)
        if kind == "float":
            return _FLOATS[content]
        if kind == "tuple":
            return tuple([self.read(item) for item in content])
        return self._read_entries(_DICTS[kind](), content)

    def _read_array(self, content: Any) -> Any:
        key, *needs = content
        self.used.add(key)
        if key not in self._arrays:
            self._arrays[key] = array_of(self._data[key].data, needs)
        return self._arrays[key]

    def _read_entries(self, made: Any, entries: Any) -> Any:
        """Fill an empty dict."""
        for key, item in entries:
            made[self.read(key)] = self.read(item)
        if len(made) != len(entries):
            raise malformed("distinct keys", "a key twice in a dict")
        return made
