"""A memmap folder as a description of a tree: all of its `meta.json` files, checked before a leaf is looked at.

What the files say is hostile until it was checked: names come from keys by encoding only, links may not leave the
folder, no pickle is read, and a leaf is mapped only where its file has the bytes that its shape needs.
"""

import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Size

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import CorruptCheckpointError, UnsupportedError
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.types import Kind, Names, Path, Ties
from tdfunc.storage.disk.descriptor import Descriptor
from tdfunc.storage.disk.mapped import open_inside
from tdfunc.storage.memmap.folder_meta import (
    fit_names,
    in_order,
    inline_value,
    join_name,
    malformed_meta,
    names_of,
    object_in,
    own_fields,
    parse_meta,
    size_of,
    stack_of,
    ties_of,
    unnested,
    where,
)
from tdfunc.storage.memmap.folder_plan import DTYPES, LAZY_TYPE, VALUE_TYPE, VALUES_TYPE
from tdfunc.storage.memmap.names import LEAF_SUFFIX, META, PICKLES, RESERVED, encoded, is_raw_name, special_name
from tdfunc.storage.tree.build import Classes, resolve_class
from tdfunc.storage.tree.decode import are_flags
from tdfunc.storage.tree.encode import IS_PARAMETER, IS_VALUE, KIND_FLAGS, MAX_TIE_KEYS, REQUIRES_GRAD, restrict

_KINDS = {flag: kind for kind, flag in KIND_FLAGS.items()}
_FLAGS = frozenset((*_KINDS, IS_PARAMETER, REQUIRES_GRAD, IS_VALUE))
_MAX_META_BYTES = 100_000_000
_TOO_LARGE = 2**63


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
class Node:
    """A folder that is a tree of its own."""

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
    # The fields of tensordict's tensorclass that are no tensors.
    further: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # What is under each key, in order: the number of a leaf, or a child.
    items: dict[str, "Child | int | NonTensorBase"] = field(default_factory=dict[str, Any])


class Child(NamedTuple):
    """A sub-tree, by the number of its node; -1 until that is read."""

    node: int


class FolderReader:
    """The description of a tree in a folder, read and checked; `folder_build.py` puts the leaves in.

    Args:
        root: A descriptor of the folder, by which everything in it is opened: the name may come to mean another one.
        classes: The classes of nodes, as `load` takes them.
        types: The class of each folder, where the writer of the folder asks.
    """

    def __init__(self, root: int, classes: Classes, types: Mapping[str, Any] | None = None) -> None:
        self.root = root
        self.classes = classes
        self.types = types
        self.nodes: list[Node] = []
        self.leaves: list[LeafFile] = []
        stack = [Node("", (), -1, Size(()))]
        while stack:
            node = stack.pop()
            number = len(self.nodes)
            self.nodes.append(node)
            if node.parent >= 0:
                self.nodes[node.parent].items[node.path[-1]] = Child(number)
            stack.extend(reversed(self._read(number, node)))
        self._check_ties()

    # -- meta.json ----------------------------------------------------------------------------------------------

    def _read(self, number: int, node: Node) -> list[Node]:
        """Read one node; return its sub-trees."""
        meta = self._meta(node.folder, node.path)
        kind = meta.get("_type")
        own = own_fields(meta, node.path)
        if kind == LAZY_TYPE:
            return self._lazy(number, node, meta, own)
        if kind in (VALUE_TYPE, VALUES_TYPE):
            raise UnsupportedError(
                f"{where(node.path)} is one value and no tree.", got=str(kind), hint="load the folder above it."
            )
        if "shape" not in meta and self._is_folder(join_name(node.folder, "_tensordict"), node.path):
            return self._tensorclass(number, node, meta)
        if type(kind) is not str or "shape" not in meta:
            raise self._unknown(node.path, kind)
        return self._entries(number, node, meta, own)

    def _unknown(self, path: Path, kind: Any) -> Exception:
        return UnsupportedError(
            f"{where(path)} is of a type that is not read.",
            expected="a TensorDict, lazy stack, tensorclass or non-tensor data",
            got=repr(kind)[:200],
        )

    def _meta(self, folder: str, path: Path) -> dict[str, Any]:
        what = f"meta.json of {where(path)}"
        try:
            opened = open_inside(self.root, join_name(folder, META), what)
        except (FileNotFoundError, NotADirectoryError) as err:
            if not folder:
                raise
            raise CorruptCheckpointError(
                f"{what} is missing.", expected=join_name(folder, META), hint="restore it from a copy."
            ) from err
        with opened as fd:
            size_bytes = os.fstat(fd).st_size
            if size_bytes > _MAX_META_BYTES:
                raise malformed_meta(what, f"at most {_MAX_META_BYTES} bytes", f"{size_bytes} bytes")
            with open(fd, "rb", closefd=False) as file:
                raw = file.read(_MAX_META_BYTES)
        self._check_pickles(folder, path)
        return parse_meta(raw, what)

    def _check_pickles(self, folder: str, path: Path) -> None:
        for name in PICKLES:
            try:
                os.stat(join_name(folder, name), dir_fd=self.root, follow_symlinks=False)
            except OSError:
                continue
            raise UnsupportedError(
                f"{where(path)} has pickled data, which can run any code when it is read.",
                expected="non-tensor data as JSON",
                got=join_name(folder, name),
                hint="tdfunc never reads pickles: delete the file, or write the folder again without that data.",
            )

    def _is_folder(self, folder: str, path: Path) -> bool:
        try:
            kind = os.stat(folder, dir_fd=self.root, follow_symlinks=False).st_mode
        except OSError:
            return False
        if stat.S_ISLNK(kind):
            raise CorruptCheckpointError(
                f"{where(path)} is a link to a folder.", got=folder, hint="put the folder there in place of the link."
            )
        return stat.S_ISDIR(kind)

    def _lazy(self, number: int, node: Node, meta: dict[str, Any], own: dict[str, Any] | None) -> list[Node]:
        what = f"the lazy stack at {where(node.path)}"
        dim = meta.get("stack_dim")
        if type(dim) is not int or not 0 <= dim < 64:
            raise malformed_meta(what, "a dimension", repr(dim))
        found = {name for name in self._list(node.folder) if name.isascii() and name.isdigit()}
        count = own.get("count") if own is not None else len(found)
        # The numbers are compared first: a small file may name a large one.
        if type(count) is not int or count < 1 or count != len(found) or found != {str(i) for i in range(count)}:
            expected = (
                f"the folders 0 to {count - 1}"[:200] if type(count) is int and count > 0 else "folders 0, 1, ..."
            )
            raise malformed_meta(what, expected, f"{sorted(found)}"[:200])
        # Of a tensorclass in tensordict, whose class and further fields are those of each tree.
        cls, node.stack_dim, node.cls = node.cls, dim, TensorCollection._lazy
        if own is not None:
            node.names = names_of(own, what)
            node.has_device = own.get("device") == "cpu"
            node.ties = ties_of(own, what)
        trees = [Node(join_name(node.folder, str(i)), (*node.path, str(i)), number, None) for i in range(count)]
        for tree in trees:
            tree.cls, tree.further = cls, node.further
            if not self._is_folder(tree.folder, tree.path):
                raise malformed_meta(what, f"the folder {tree.folder}", "a file")
        return trees

    def _list(self, folder: str) -> list[str]:
        with Descriptor(folder or ".", os.O_RDONLY | getattr(os, "O_DIRECTORY", 0), dir_fd=self.root) as fd:
            return os.listdir(fd)

    def _tensorclass(self, number: int, node: Node, meta: dict[str, Any]) -> list[Node]:
        """Read what tensordict writes for a tensorclass: fields that are no tensors, and the tree of the others."""
        kind = meta.pop("_type", None)
        if type(kind) is not str:
            raise self._unknown(node.path, kind)
        node.cls = _foreign_class(kind, self.classes)
        node.folder, node.further = join_name(node.folder, "_tensordict"), meta
        inner = self._meta(node.folder, node.path)
        own = own_fields(inner, node.path)
        if inner.get("_type") == LAZY_TYPE:
            return self._lazy(number, node, inner, own)
        if "shape" not in inner:
            raise self._unknown(node.path, inner.get("_type"))
        return self._entries(number, node, inner, own)

    def _entries(self, number: int, node: Node, meta: dict[str, Any], own: dict[str, Any] | None) -> list[Node]:
        what = f"meta.json of {where(node.path)}"
        node.size = size_of(meta["shape"], what)
        if node.outer is not None and node.size[: len(node.outer)] != node.outer:
            raise malformed_meta(what, f"a batch size that starts with {list(node.outer)}", str(list(node.size)))
        node.has_device = meta.get("device", "None") not in ("None", None)
        entries = {key: value for key, value in meta.items() if key not in RESERVED}
        special: dict[str, Any] = {}
        flags: dict[str, Any] = {}
        if own is not None:
            special, flags = object_in(own, "special", what), object_in(own, "flags", what)
            entries = in_order(entries, special, own, what)
            node.names = names_of(own, what)
            node.ties = ties_of(own, what)
            node.cls = self._class(node, own.get("class"), what)
        shapes = object_in(own, "shapes", what) if own is not None else {}
        children: list[Node] = []
        for key, entry in entries.items():
            if type(entry) is not dict:
                # tensordict's own further fields; ours has none.
                if own is not None:
                    raise malformed_meta(what, f"an entry at {key!r}", repr(entry)[:100])
                continue
            flag = flags.get(key, "")
            if not are_flags(flag, _FLAGS):
                raise malformed_meta(what, f"the flags of {key!r}", repr(flag)[:100])
            for kind in _KINDS.keys() & set(flag):
                node.kinds[key] = _KINDS[kind]
            batch = size_of(shapes[key], what, node.size) if key in shapes else None
            at = _Entry(node, key, entry, flag, batch, key in special, own is not None)
            child = self._item(number, at, what)
            if child is not None:
                children.append(child)
        for key, value in node.further.items():
            if value is not None and key and key not in node.items:
                node.items[key] = NonTensorData(value, node.size)
        node.names = fit_names(node.names, len(node.size), what)
        return children

    def _class(self, node: Node, name: Any, what: str) -> Any:
        if name is None:
            return None
        if self.types is not None:
            return self.types[node.folder]
        if type(name) is not str:
            raise malformed_meta(what, "the name of a class", repr(name)[:100])
        return resolve_class(name, self.classes)

    def _item(self, number: int, at: "_Entry", what: str) -> Node | None:
        """Enter what is under one key; return it where it is a tree."""
        node, key, entry = at.node, at.key, at.entry
        path = (*node.path, key)
        if at.special and ("value" in entry or "values" in entry):
            node.items[key] = inline_value(entry, node.size if at.batch is None else at.batch, what)
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
        node.items[key] = Child(-1)
        return Node(folder, path, number, node.size)

    def _folder_of(self, at: "_Entry", path: Path) -> str:
        name = special_name(at.key) if at.special else encoded(at.key)
        folder = join_name(at.node.folder, name)
        if not at.own and not self._is_folder(folder, path) and is_raw_name(at.key):
            folder = join_name(at.node.folder, at.key)
        if not self._is_folder(folder, path):
            raise CorruptCheckpointError(
                f"the folder of {dotted(path)!r} is missing.", expected=folder, hint="restore it from a copy."
            )
        return folder

    def _leaf_file(self, at: "_Entry", path: Path, what: str) -> LeafFile:
        entry, key = at.entry, at.key
        code, shape = entry.get("dtype"), entry.get("shape")
        if entry.get("is_nested"):
            raise UnsupportedError(
                f"leaf {dotted(path)!r} is a nested tensor.", hint="write padded tensors, or the parts as leaves."
            )
        dtype = DTYPES.get(code) if type(code) is str else None
        if dtype is None:
            if type(code) is str and code.startswith("torch."):
                raise UnsupportedError(
                    f"leaf {dotted(path)!r}: no such dtype.", expected=f"one of {', '.join(DTYPES)}", got=code
                )
            raise malformed_meta(what, f"the dtype of {key!r}", repr(code)[:100])
        is_value = IS_VALUE in at.flags
        size = size_of(shape, what, Size(()) if is_value else at.node.size)
        size_bytes = math.prod(size) * dtype.itemsize
        if size_bytes >= _TOO_LARGE:
            raise malformed_meta(what, f"{key!r} to have a size in 64 bits", str(list(size)))
        name = join_name(at.node.folder, (special_name(key) if at.special else encoded(key)) + LEAF_SUFFIX)
        if not at.own and is_raw_name(key) and encoded(key) != key and not self._exists(name):
            name = join_name(at.node.folder, key + LEAF_SUFFIX)
        return LeafFile(name, path, dtype, size, size_bytes, at.own, at.flags)

    def _exists(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self.root, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _value(self, folder: str, path: Path, at: "_Entry") -> NonTensorBase:
        what = f"meta.json of {where(path)}"
        meta = self._meta(folder, path)
        size = at.node.size if at.batch is None else at.batch
        if "data" not in meta:
            raise malformed_meta(what, "the data", ", ".join(meta)[:200])
        data = meta["data"]
        if meta.get("_type") == VALUE_TYPE:
            return NonTensorData(data, size)
        if meta.get("_type") != VALUES_TYPE:
            raise malformed_meta(what, "non-tensor data", repr(meta.get("_type"))[:200])
        # Without a recorded shape: one value for each element of the batch, and at least one dimension.
        dims = len(size) if at.batch is not None else max(len(size), 1)
        shape, flat = unnested(data, dims, what)
        if shape[: len(size)] != size:
            raise malformed_meta(what, f"values for a batch of {list(size)}", str(list(shape)))
        return stack_of(flat, shape)

    # -- ties ---------------------------------------------------------------------------------------------------

    def _check_ties(self) -> None:
        """Check that ties name leaves of one shape, and that a sub-tree knows those of its parent."""
        keys = sum(len(path) ** 2 for node in self.nodes for group in node.ties for path in group)
        if keys > MAX_TIE_KEYS:
            raise malformed_meta("the ties", f"at most {MAX_TIE_KEYS} keys", str(keys))
        known: list[dict[str, Ties]] = [{} for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            if node.parent >= 0:
                inherited = known[node.parent].get(node.path[-1], ())
                if {frozenset(group) for group in inherited} != {frozenset(group) for group in node.ties}:
                    # A part of a larger folder that was replaced by itself does not know; that is damage too.
                    raise malformed_meta(
                        f"the ties of {where(node.path)}", "those of its parent", repr(node.ties)[:200]
                    )
            known[number] = restrict(node.ties)
        for group in self.nodes[0].ties:
            leaves = [self._tied_leaf(path) for path in group]
            first = self.leaves[leaves[0]]
            for path, leaf in zip(group, leaves, strict=True):
                found = self.leaves[leaf]
                if (found.dtype, found.shape) != (first.dtype, first.shape):
                    expected, got = f"{first.dtype} {list(first.shape)}", f"{found.dtype} {list(found.shape)}"
                    raise malformed_meta(f"the tie of {dotted(path)!r} and {dotted(group[0])!r}", expected, got)

    def _tied_leaf(self, path: Path) -> int:
        number = 0
        for key in path[:-1]:
            child = self.nodes[number].items.get(key)
            if not isinstance(child, Child):
                raise malformed_meta("the ties", f"a leaf at {dotted(path)!r}", "none")
            number = child.node
        leaf = self.nodes[number].items.get(path[-1])
        if type(leaf) is not int:
            raise malformed_meta("the ties", f"a leaf at {dotted(path)!r}", "none")
        return leaf

    def aliases(self) -> dict[int, int]:
        """Return for the leaves of tied paths, but the first, the leaf that they are."""
        result: dict[int, int] = {}
        for group in self.nodes[0].ties:
            first = self._tied_leaf(group[0])
            result.update({self._tied_leaf(path): first for path in group[1:]})
        return result


class _Entry(NamedTuple):
    """One entry of a node's meta.json."""

    node: Node
    key: str
    entry: dict[str, Any]
    flags: str
    # The recorded shape of non-tensor data, where it is not the batch size.
    batch: Size | None
    special: bool
    # Whether tdfunc wrote it.
    own: bool


def _foreign_class(kind: str, classes: Classes) -> Any:
    """Return the class that tensordict's name of a tensorclass means here; a plain tree where there is none."""
    name = kind.removeprefix("<class '").removesuffix("'>")
    given: Iterable[Any] = (classes,) if isinstance(classes, type) else classes
    for cls in given:
        if f"{cls.__module__}.{cls.__qualname__}" == name:
            return cls
    return None
