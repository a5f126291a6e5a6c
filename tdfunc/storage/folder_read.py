"""A memmap folder to a tree: first all of its `meta.json` files, checked, then the leaves, then the tree.

What the files say is hostile until it was checked: names come from keys by encoding only, links may not leave the
folder, no pickle is read, and a leaf is mapped only where its file has the bytes that its shape needs.
"""

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Size, Tensor, nn

from tdfunc._collection import Static, TensorCollection
from tdfunc._errors import CorruptCheckpointError, UnsupportedError, explain
from tdfunc._keys import dotted
from tdfunc._nontensor import NonTensorBase, NonTensorData, NonTensorStack
from tdfunc._shapes import as_names
from tdfunc._types import Kind, Names, Path, Ties
from tdfunc.storage.build import Classes, check_fields, resolve_class
from tdfunc.storage.decode import are_flags
from tdfunc.storage.encode import (
    IS_PARAMETER,
    IS_VALUE,
    KIND_FLAGS,
    MAX_TIE_KEYS,
    REQUIRES_GRAD,
    restrict,
)
from tdfunc.storage.folder_plan import DTYPES, LAZY_TYPE, VALUE_TYPE, VALUES_TYPE, VERSION
from tdfunc.storage.format import find_surrogate
from tdfunc.storage.mapped import open_inside
from tdfunc.storage.names import LEAF_SUFFIX, META, PICKLES, RESERVED, encoded, is_raw_name, special_name

_KINDS = {flag: kind for kind, flag in KIND_FLAGS.items()}
_FLAGS = frozenset((*_KINDS, IS_PARAMETER, REQUIRES_GRAD, IS_VALUE))
_MAX_META_BYTES = 100_000_000
_TOO_LARGE = 2**63
_NO_BATCH = Size(())


class LeafFile(NamedTuple):
    """A leaf as meta.json states it."""

    # Relative to the folder, without links.
    name: str
    path: Path
    dtype: torch.dtype
    shape: Size
    size_bytes: int
    # Whether the file has these bytes and no more: tensordict leaves files longer that an older tree needed.
    exact: bool
    flags: str


@dataclass
class _Node:
    folder: str
    path: Path
    # The number of the node that it is in, and the batch size of that where it must start with it.
    parent: int
    outer: Size | None
    size: Size = Size(())
    has_device: bool = False
    names: Names | None = None
    # The dimension of a lazy stack.
    stack_dim: int | None = None
    cls: Any = None
    ties: Ties = ()
    kinds: dict[str, Kind] = field(default_factory=dict[str, Kind])
    # Of non-tensor data that are stored as leaves, where it is not the batch size.
    shapes: dict[str, Size] = field(default_factory=dict[str, Size])
    # What is under each key, in order: the number of a leaf, or a child.
    items: dict[str, "_Child | int | NonTensorBase"] = field(default_factory=dict[str, Any])


class _Child(NamedTuple):
    node: int


class FolderReader:
    """The description of a tree in a folder, read and checked; `build` puts the leaves in.

    Args:
        root: A descriptor of the folder, by which everything in it is opened: the name may come to mean another one.
        classes: The classes of nodes, as `load` takes them.
        types: The class of each folder, where the writer of the folder asks.
    """

    def __init__(self, root: int, classes: Classes, types: Mapping[str, Any] | None = None) -> None:
        self.root = root
        self.classes = classes
        self.types = types
        self.nodes: list[_Node] = []
        self.leaves: list[LeafFile] = []
        stack = [_Node("", (), -1, Size(()))]
        while stack:
            node = stack.pop()
            number = len(self.nodes)
            self.nodes.append(node)
            if node.parent >= 0:
                self.nodes[node.parent].items[node.path[-1]] = _Child(number)
            stack.extend(reversed(self._read(number, node)))
        self._check_ties()

    # -- meta.json ----------------------------------------------------------------------------------------------

    def _read(self, number: int, node: _Node) -> list[_Node]:
        """Read one node; return its sub-trees."""
        meta = self._meta(node.folder, node.path)
        kind = meta.get("_type")
        own = _own(meta, node.path)
        if kind == LAZY_TYPE:
            return self._lazy(number, node, meta, own)
        if kind in (VALUE_TYPE, VALUES_TYPE):
            hint = "load the folder above it."
            raise UnsupportedError(explain(f"{_at(node.path)} is one value and no tree.", got=str(kind), hint=hint))
        if "shape" not in meta and self._is_folder(_join(node.folder, "_tensordict"), node.path):
            return self._tensorclass(number, node, meta)
        if type(kind) is not str or "shape" not in meta:
            raise self._unknown(node.path, kind)
        return self._entries(number, node, meta, own)

    def _unknown(self, path: Path, kind: Any) -> Exception:
        return UnsupportedError(
            explain(
                f"{_at(path)} is of a type that is not read.",
                expected="a TensorDict, lazy stack, tensorclass or non-tensor data",
                got=repr(kind)[:200],
            )
        )

    def _meta(self, folder: str, path: Path) -> dict[str, Any]:
        what = f"meta.json of {_at(path)}"
        try:
            fd = open_inside(self.root, _join(folder, META), what)
        except (FileNotFoundError, NotADirectoryError) as err:
            if not folder:
                raise
            raise CorruptCheckpointError(
                explain(f"{what} is missing.", expected=_join(folder, META), hint="restore it from a copy.")
            ) from err
        try:
            size_bytes = os.fstat(fd).st_size
            if size_bytes > _MAX_META_BYTES:
                raise _malformed(what, f"at most {_MAX_META_BYTES} bytes", f"{size_bytes} bytes")
            with os.fdopen(os.dup(fd), "rb") as file:
                raw = file.read(_MAX_META_BYTES)
        finally:
            os.close(fd)
        self._check_pickles(folder, path)
        try:
            meta = json.loads(raw, object_pairs_hook=_unique, parse_constant=_no_constant)
        # A nesting too deep, an int of thousands of digits, no UTF-8, no JSON.
        except (RecursionError, ValueError) as err:
            raise _malformed(what, "JSON", f"{type(err).__name__}: {err}"[:300]) from err
        if type(meta) is not dict:
            raise _malformed(what, "an object", repr(meta)[:100])
        if b"\\u" in raw and (half := find_surrogate(_keys(meta))) is not None:
            raise _malformed(what, "keys of whole characters", repr(half)[:100])
        return meta

    def _check_pickles(self, folder: str, path: Path) -> None:
        for name in PICKLES:
            try:
                os.stat(_join(folder, name), dir_fd=self.root, follow_symlinks=False)
            except OSError:
                continue
            raise UnsupportedError(
                explain(
                    f"{_at(path)} has pickled data, which can run any code when it is read.",
                    expected="non-tensor data as JSON",
                    got=_join(folder, name),
                    hint="tdfunc never reads pickles: delete the file, or write the folder again without that data.",
                )
            )

    def _is_folder(self, folder: str, path: Path) -> bool:
        try:
            kind = os.stat(folder, dir_fd=self.root, follow_symlinks=False).st_mode
        except OSError:
            return False
        if stat.S_ISLNK(kind):
            hint = "put the folder there in place of the link."
            raise CorruptCheckpointError(explain(f"{_at(path)} is a link to a folder.", got=folder, hint=hint))
        return stat.S_ISDIR(kind)

    def _lazy(self, number: int, node: _Node, meta: dict[str, Any], own: dict[str, Any] | None) -> list[_Node]:
        what = f"the lazy stack at {_at(node.path)}"
        dim = meta.get("stack_dim")
        if type(dim) is not int or not 0 <= dim < 64:
            raise _malformed(what, "a dimension", repr(dim))
        found = {name for name in self._list(node.folder) if name.isascii() and name.isdigit()}
        count = own.get("count") if own is not None else len(found)
        if type(count) is not int or count < 1 or found != {str(i) for i in range(count)}:
            expected = f"the folders 0 to {count - 1}" if type(count) is int and count > 0 else "folders 0, 1, ..."
            raise _malformed(what, expected, f"{sorted(found)}"[:200])
        node.stack_dim, node.cls = dim, TensorCollection._lazy
        if own is not None:
            node.names = _names(own, what)
            node.has_device = own.get("device") == "cpu"
            node.ties = _ties(own, what)
        trees = [_Node(_join(node.folder, str(i)), (*node.path, str(i)), number, None) for i in range(count)]
        for tree in trees:
            if not self._is_folder(tree.folder, tree.path):
                raise _malformed(what, f"the folder {tree.folder}", "a file")
        return trees

    def _list(self, folder: str) -> list[str]:
        fd = os.open(folder or ".", os.O_RDONLY | getattr(os, "O_DIRECTORY", 0), dir_fd=self.root)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def _tensorclass(self, number: int, node: _Node, meta: dict[str, Any]) -> list[_Node]:
        """Read what tensordict writes for a tensorclass: fields that are no tensors, and the tree of the others."""
        kind = meta.pop("_type", None)
        if type(kind) is not str:
            raise self._unknown(node.path, kind)
        node.cls = _foreign_class(kind, self.classes)
        node.folder = _join(node.folder, "_tensordict")
        inner = self._meta(node.folder, node.path)
        children = self._entries(number, node, inner, _own(inner, node.path))
        for key, value in meta.items():
            if value is not None and key and key not in node.items:
                node.items[key] = NonTensorData(value, node.size)
        return children

    def _entries(self, number: int, node: _Node, meta: dict[str, Any], own: dict[str, Any] | None) -> list[_Node]:
        what = f"meta.json of {_at(node.path)}"
        node.size = _size(meta["shape"], what)
        if node.outer is not None and node.size[: len(node.outer)] != node.outer:
            raise _malformed(what, f"a batch size that starts with {list(node.outer)}", str(list(node.size)))
        node.has_device = meta.get("device", "None") not in ("None", None)
        entries = {key: value for key, value in meta.items() if key not in RESERVED}
        special: dict[str, Any] = {}
        flags: dict[str, Any] = {}
        if own is not None:
            special, flags = _object(own, "special", what), _object(own, "flags", what)
            entries = _ordered(entries, special, own, what)
            node.names = _names(own, what)
            node.ties = _ties(own, what)
            node.cls = self._class(node, own.get("class"), what)
        shapes = _object(own, "shapes", what) if own is not None else {}
        children: list[_Node] = []
        for key, entry in entries.items():
            if type(entry) is not dict:
                # tensordict's own further fields; ours has none.
                if own is not None:
                    raise _malformed(what, f"an entry at {key!r}", repr(entry)[:100])
                continue
            flag = flags.get(key, "")
            if not are_flags(flag, _FLAGS):
                raise _malformed(what, f"the flags of {key!r}", repr(flag)[:100])
            for kind in _KINDS.keys() & set(flag):
                node.kinds[key] = _KINDS[kind]
            batch = _size(shapes[key], what, node.size) if key in shapes else None
            at = _Entry(node, key, entry, flag, batch, key in special, own is not None)
            child = self._item(number, at, what)
            if child is not None:
                children.append(child)
        node.names = _fit(node.names, len(node.size), what)
        return children

    def _class(self, node: _Node, name: Any, what: str) -> Any:
        if name is None:
            return None
        if self.types is not None:
            return self.types[node.folder]
        if type(name) is not str:
            raise _malformed(what, "the name of a class", repr(name)[:100])
        return resolve_class(name, self.classes)

    def _item(self, number: int, at: "_Entry", what: str) -> _Node | None:
        """Enter what is under one key; return it where it is a tree."""
        node, key, entry = at.node, at.key, at.entry
        path = (*node.path, key)
        if at.special and ("value" in entry or "values" in entry):
            node.items[key] = _inline(entry, node.size if at.batch is None else at.batch, what)
            return None
        if "type" not in entry:
            self.leaves.append(self._leaf_file(at, path, what))
            if at.batch is not None:
                node.shapes[key] = at.batch
            node.items[key] = len(self.leaves) - 1
            return None
        folder = self._folder_of(at, path)
        if entry["type"] in ("NonTensorData", "NonTensorStack") and not at.special:
            node.items[key] = self._value(folder, path, at)
            return None
        node.items[key] = _Child(-1)
        return _Node(folder, path, number, node.size)

    def _folder_of(self, at: "_Entry", path: Path) -> str:
        name = special_name(at.key) if at.special else encoded(at.key)
        folder = _join(at.node.folder, name)
        if not at.own and not self._is_folder(folder, path) and is_raw_name(at.key):
            folder = _join(at.node.folder, at.key)
        if not self._is_folder(folder, path):
            raise CorruptCheckpointError(
                explain(f"the folder of {dotted(path)!r} is missing.", expected=folder, hint="restore it from a copy.")
            )
        return folder

    def _leaf_file(self, at: "_Entry", path: Path, what: str) -> LeafFile:
        entry, key = at.entry, at.key
        code, shape = entry.get("dtype"), entry.get("shape")
        if entry.get("is_nested"):
            hint = "write padded tensors, or the parts as leaves."
            raise UnsupportedError(explain(f"leaf {dotted(path)!r} is a nested tensor.", hint=hint))
        dtype = DTYPES.get(code) if type(code) is str else None
        if dtype is None:
            if type(code) is str and code.startswith("torch."):
                expected = f"one of {', '.join(DTYPES)}"
                raise UnsupportedError(explain(f"leaf {dotted(path)!r}: no such dtype.", expected=expected, got=code))
            raise _malformed(what, f"the dtype of {key!r}", repr(code)[:100])
        is_value = IS_VALUE in at.flags
        size = _size(shape, what, Size(()) if is_value else at.node.size)
        size_bytes = math.prod(size) * dtype.itemsize
        if size_bytes >= _TOO_LARGE:
            raise _malformed(what, f"{key!r} to have a size in 64 bits", str(list(size)))
        name = _join(at.node.folder, (special_name(key) if at.special else encoded(key)) + LEAF_SUFFIX)
        if not at.own and is_raw_name(key) and encoded(key) != key and not self._exists(name):
            name = _join(at.node.folder, key + LEAF_SUFFIX)
        return LeafFile(name, path, dtype, size, size_bytes, at.own, at.flags)

    def _exists(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.root, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _value(self, folder: str, path: Path, at: "_Entry") -> NonTensorBase:
        what = f"meta.json of {_at(path)}"
        meta = self._meta(folder, path)
        size = at.node.size if at.batch is None else at.batch
        if "data" not in meta:
            raise _malformed(what, "the data", ", ".join(meta)[:200])
        data = meta["data"]
        if meta.get("_type") == VALUE_TYPE:
            return NonTensorData(data, size)
        if meta.get("_type") != VALUES_TYPE:
            raise _malformed(what, "non-tensor data", repr(meta.get("_type"))[:200])
        # Without a recorded shape: one value for each element of the batch, and at least one dimension.
        dims = len(size) if at.batch is not None else max(len(size), 1)
        shape, flat = _unnested(data, dims, what)
        if shape[: len(size)] != size:
            raise _malformed(what, f"values for a batch of {list(size)}", str(list(shape)))
        return _stack(flat, shape)

    # -- ties ---------------------------------------------------------------------------------------------------

    def _check_ties(self) -> None:
        """Check that ties name leaves of one shape, and that a sub-tree knows those of its parent."""
        keys = sum(len(path) ** 2 for node in self.nodes for group in node.ties for path in group)
        if keys > MAX_TIE_KEYS:
            raise _malformed("the ties", f"at most {MAX_TIE_KEYS} keys", str(keys))
        known: list[dict[str, Ties]] = [{} for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            if node.parent >= 0:
                inherited = known[node.parent].get(node.path[-1], ())
                if {frozenset(group) for group in inherited} != {frozenset(group) for group in node.ties}:
                    # A part of a larger folder that was replaced by itself does not know; that is damage too.
                    raise _malformed(f"the ties of {_at(node.path)}", "those of its parent", repr(node.ties)[:200])
            known[number] = restrict(node.ties)
        for group in self.nodes[0].ties:
            leaves = [self._tied_leaf(path) for path in group]
            first = self.leaves[leaves[0]]
            for path, leaf in zip(group, leaves, strict=True):
                found = self.leaves[leaf]
                if (found.dtype, found.shape) != (first.dtype, first.shape):
                    expected, got = f"{first.dtype} {list(first.shape)}", f"{found.dtype} {list(found.shape)}"
                    raise _malformed(f"the tie of {dotted(path)!r} and {dotted(group[0])!r}", expected, got)

    def _tied_leaf(self, path: Path) -> int:
        number = 0
        for key in path[:-1]:
            child = self.nodes[number].items.get(key)
            if not isinstance(child, _Child):
                raise _malformed("the ties", f"a leaf at {dotted(path)!r}", "none")
            number = child.node
        leaf = self.nodes[number].items.get(path[-1])
        if type(leaf) is not int:
            raise _malformed("the ties", f"a leaf at {dotted(path)!r}", "none")
        return leaf

    def aliases(self) -> dict[int, int]:
        """Return for the leaves of tied paths, but the first, the leaf that they are."""
        result: dict[int, int] = {}
        for group in self.nodes[0].ties:
            first = self._tied_leaf(group[0])
            result.update({self._tied_leaf(path): first for path in group[1:]})
        return result

    # -- building -----------------------------------------------------------------------------------------------

    def build(self, leaves: Sequence[Tensor | None], device: torch.device | None) -> TensorCollection:
        """Return the tree around leaves in the order of `self.leaves` (None for an alias), all on the device."""
        values = [_flagged(leaf, file.flags) for leaf, file in zip(leaves, self.leaves, strict=True)]
        for alias, first in self.aliases().items():
            values[alias] = values[first]
        built: list[Any] = [None] * len(self.nodes)
        # A node comes after the one that it is in, so going back its sub-trees are there.
        for number in reversed(range(len(self.nodes))):
            built[number] = self._node(self.nodes[number], values, built, device)
        return built[0]

    def _node(self, node: _Node, values: Sequence[Any], built: list[Any], device: torch.device | None) -> Any:
        data: dict[str, Any] = {}
        for key, item in node.items.items():
            if isinstance(item, _Child):
                data[key] = built[item.node]
            elif isinstance(item, int):
                value = values[item]
                if IS_VALUE in self.leaves[item].flags:
                    value = NonTensorData(value, node.shapes.get(key, node.size))
                data[key] = value
            else:
                data[key] = item
        if node.has_device and device is None:
            device = torch.device("cpu")
        if node.stack_dim is not None:
            return self._stack(node, list(data.values()), device)
        static = Static(node.kinds, node.ties)
        cls = node.cls or TensorCollection._open
        check_fields(cls, data, node.path)
        return cls._make(data, node.size, device, node.names, static if static != Static() else None)

    def _stack(self, node: _Node, trees: list[Any], device: torch.device | None) -> Any:
        what, dim = f"the lazy stack at {_at(node.path)}", node.stack_dim
        assert dim is not None
        if len({len(tree._batch_size) for tree in trees}) > 1 or len({type(tree) for tree in trees}) > 1:
            raise _malformed(what, "trees of one class with one number of batch dimensions", "different ones")
        if dim > len(trees[0]._batch_size):
            raise _malformed(what, f"a dimension of at most {len(trees[0]._batch_size)}", str(dim))
        made = TensorCollection._lazy._of(trees, dim)
        if node.outer is not None and made._batch_size[: len(node.outer)] != node.outer:
            raise _malformed(what, f"a batch size that starts with {list(node.outer)}", str(list(made._batch_size)))
        names = _fit(node.names, len(made._batch_size), what)
        static = made._static._replace(ties=node.ties)
        return made._make(made._data, made._batch_size, device, names, static)


class _Entry(NamedTuple):
    """One entry of a node's meta.json."""

    node: _Node
    key: str
    entry: dict[str, Any]
    flags: str
    # The recorded shape of non-tensor data, where it is not the batch size.
    batch: Size | None
    special: bool
    # Whether tdfunc wrote it.
    own: bool


def _own(meta: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Return what tdfunc wrote into a meta.json; None where tensordict did it."""
    own = meta.get("")
    if own is None:
        return None
    if type(own) is not dict or "tdfunc" not in own:
        hint = "load it with tensordict and rename the key."
        raise UnsupportedError(explain(f"{_at(path)} has an entry with an empty key.", expected="a key", hint=hint))
    if own["tdfunc"] != VERSION:
        expected, got = str(VERSION), repr(own["tdfunc"])[:100]
        hint = "install the tdfunc that wrote it, or a newer one."
        raise UnsupportedError(
            explain(f"{_at(path)} has another format version.", expected=expected, got=got, hint=hint)
        )
    return own


def _ordered(entries: dict[str, Any], special: dict[str, Any], own: dict[str, Any], what: str) -> dict[str, Any]:
    if not special:
        return entries
    order = own.get("order")
    both = {**entries, **special}
    if len(both) != len(entries) + len(special) or "" in both:
        raise _malformed(what, "distinct keys", "one twice")
    if type(order) is not list or any(type(key) is not str for key in order) or sorted(order) != sorted(both):
        raise _malformed(what, f"the order of the keys {list(both)}"[:300], repr(order)[:300])
    return {key: both[key] for key in order}


def _inline(entry: dict[str, Any], size: Size, what: str) -> NonTensorBase:
    if "value" in entry and "values" in entry:
        raise _malformed(what, "a value or values", ", ".join(map(repr, entry)))
    if "value" in entry:
        return NonTensorData(entry["value"], size)
    values = entry["values"]
    if type(values) is not list or len(values) != math.prod(size):
        raise _malformed(what, f"values for a batch of {list(size)}", repr(values)[:100])
    return _stack(values, size)


def _stack(flat: Sequence[Any], shape: Size) -> NonTensorBase:
    array = np.empty(len(flat), dtype=object)
    for i, value in enumerate(flat):
        array[i] = value
    return NonTensorStack._wrap(array.reshape(shape))


def _unnested(data: Any, dims: int, what: str) -> tuple[Size, list[Any]]:
    """Return the shape and values of lists nested `dims` deep."""
    flat: list[Any] = [data]
    shape: list[int] = []
    for _ in range(dims):
        lengths = {len(part) if type(part) is list else -1 for part in flat}
        if len(lengths) > 1 or -1 in lengths:
            raise _malformed(what, f"lists nested {dims} deep, of equal lengths", repr(data)[:200])
        shape.append(lengths.pop() if lengths else 0)
        flat = [value for part in flat for value in part]
    return Size(shape), flat


def _flagged(leaf: Tensor | None, flags: str) -> Any:
    if leaf is None or not flags:
        return leaf
    try:
        if IS_PARAMETER in flags:
            return nn.Parameter(leaf, REQUIRES_GRAD in flags)
        return leaf.requires_grad_() if REQUIRES_GRAD in flags else leaf
    except RuntimeError as err:
        raise CorruptCheckpointError(explain("A leaf cannot have a gradient.", got=f"{err}"[:200])) from err


def _foreign_class(kind: str, classes: Classes) -> Any:
    """Return the class that tensordict's name of a tensorclass means here; a plain tree where there is none."""
    name = kind.removeprefix("<class '").removesuffix("'>")
    given: Iterable[Any] = (classes,) if isinstance(classes, type) else classes
    for cls in given:
        if f"{cls.__module__}.{cls.__qualname__}" == name:
            return cls
    return None


def _at(path: Path) -> str:
    return repr(dotted(path)) if path else "the root"


def _malformed(what: str, expected: str, got: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(explain(f"{what} is malformed.", expected=expected, got=got[:400]))


def _object(own: dict[str, Any], name: str, what: str) -> dict[str, Any]:
    found = own.get(name, {})
    if type(found) is not dict:
        raise _malformed(what, f"an object under {name!r}", repr(found)[:100])
    return found


def _size(sizes: Any, what: str, batch: Size = _NO_BATCH) -> Size:
    if type(sizes) is not list or any(type(size) is not int or not 0 <= size < _TOO_LARGE for size in sizes):
        raise _malformed(what, "a list of sizes", repr(sizes)[:100])
    if math.prod([max(size, 1) for size in sizes]) >= _TOO_LARGE:
        raise _malformed(what, "elements that can be counted in 64 bits", repr(sizes)[:100])
    if tuple(sizes[: len(batch)]) != batch:
        raise _malformed(what, f"shapes that start with the batch size {list(batch)}", repr(sizes)[:100])
    return Size(sizes)


def _names(own: dict[str, Any], what: str) -> Names | None:
    """Return the recorded names, whose number is still to be checked."""
    names = own.get("names")
    if names is None:
        return None
    if type(names) is not list or any(name is not None and type(name) is not str for name in names):
        raise _malformed(what, "names of dimensions", repr(names)[:100])
    try:
        as_names(names, len(names))
    except (TypeError, ValueError) as err:
        raise _malformed(what, "names of dimensions", repr(names)[:100]) from err
    return tuple(names)


def _fit(names: Names | None, ndim: int, what: str) -> Names | None:
    if names is not None and len(names) != ndim:
        raise _malformed(what, f"{ndim} names", repr(names)[:100])
    return as_names(names, ndim)


def _ties(own: dict[str, Any], what: str) -> Ties:
    groups = own.get("ties", [])
    if type(groups) is not list:
        raise _malformed(what, "a list of ties", repr(groups)[:100])
    seen: set[Path] = set()
    for group in groups:
        if type(group) is not list or len(group) < 2:
            raise _malformed(what, "ties of two paths or more", repr(group)[:100])
        for path in group:
            if type(path) is not list or not path or any(type(key) is not str or not key for key in path):
                raise _malformed(what, "paths as lists of keys", repr(path)[:100])
            if tuple(path) in seen:
                raise _malformed(what, "each path in one tie", repr(path)[:100])
            seen.add(tuple(path))
    return tuple(tuple(tuple(path) for path in group) for group in groups)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return result


def _keys(meta: dict[str, Any]) -> list[str]:
    """Return all that may become a name of a file."""
    own = meta.get("")
    special = own.get("special") if type(own) is dict else None
    return [*meta, *(special if type(special) is dict else ())]


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
