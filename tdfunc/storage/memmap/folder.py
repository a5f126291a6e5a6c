"""The description of a tree in a memmap folder: all of its `meta.json` files, read and checked.

The files may be hostile: names come from keys by encoding only, links must not leave the folder, and no pickle is read.
"""

import os
import stat
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import CorruptCheckpointError, TreeStructureError, UnsupportedError, damaged
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path, Ties
from tdfunc.storage.disk.commit import Folder
from tdfunc.storage.disk.mapped import open_inside
from tdfunc.storage.memmap.layout import (
    LAZY_TYPE,
    LEAF_SUFFIX,
    META,
    PICKLES,
    SHARED_DTYPES,
    VALUE_TYPE,
    VALUES_TYPE,
    VERSION,
    encoded,
    is_raw_name,
    join_name,
    shared_fields,
    stem_of,
)
from tdfunc.storage.memmap.leaf import LeafFile
from tdfunc.storage.tree.build import Classes, build_tree, flag_leaf, lazy_name
from tdfunc.storage.tree.decode import MALFORMED, Description, kinds_in
from tdfunc.storage.tree.encode import check_tie_size, restrict
from tdfunc.storage.tree.specs import FOLDER_CODES, Spec, malformed, parse_json, spec_for, spec_of

_MAX_META_BYTES = 100_000_000


class _Place(NamedTuple):
    """A folder to read, and the place of its number."""

    folder: str
    path: Path
    # The number of the node that it is in, and the place of its item there.
    parent: int = -1
    at: int = 0
    # For the trees of tensordict's tensorclass: their class, and the fields that are not tensors.
    cls: str | None = None
    further: Mapping[str, Any] = {}


class _Node(NamedTuple):
    """A node as its `meta.json` describes it, in the grammar of `tree/encode.py`."""

    # The folder with its leaves.
    place: _Place
    fields: dict[str, Any]
    specs: list[Spec]
    # The name of each item's file or folder, without the suffix of leaves.
    stems: list[str]
    ties: Ties = ()
    # The dimension of a lazy stack whose batch size follows from its trees.
    stack_dim: int | None = None
    # True if tdfunc wrote it: its files are then of the right size exactly.
    is_own: bool = False


class _Slot(NamedTuple):
    """The place of an item in the list of a node's items, where another can be put."""

    items: list[Any]
    at: int


class FolderReader:
    """The description of a tree in a folder, read and checked.

    Args:
        root: The open folder, through which everything in it is opened: the name may come to mean another one.
        classes: The classes of nodes, as in `load`.
    """

    def __init__(self, root: Folder, classes: Classes = ()) -> None:
        self.root = root
        self.classes = classes
        self.files: list[LeafFile] = []
        self._nodes: list[_Node] = []
        specs = self._read_nodes()
        with _checking("the folder"):
            self._measure_stacks()
            ties = self._tie(specs)
            codes = [[spec.code, spec.shape] for spec in specs]
            nodes = [node.fields for node in self._nodes]
            self.plan: Description = Description({"specs": codes, "nodes": nodes, "ties": ties})
            for node in self._nodes:
                self._list_files(node)

    def build(self, leaves: Sequence[Tensor], device: torch.device | None) -> TensorCollection:
        """Return the tree around leaves in the order of `files`, all on the device."""
        with _checking("the folder"):
            flagged = [flag_leaf(leaf, flags) for leaf, flags in zip(leaves, self.plan.flags, strict=True)]
            return build_tree(self.plan, flagged, self.classes, device)

    def _read_nodes(self) -> list[Spec]:
        """Read all nodes, each after the one around it; return the specs of their leaves."""
        specs: list[Spec] = []
        stack = [_Place("", ())]
        while stack:
            place = stack.pop()
            number = len(self._nodes)
            if number:
                items = self._nodes[place.parent].fields["items"]
                items[place.at] = {**items[place.at], "tree": number}
            with _checking(f"meta.json of {where(place.path)}"):
                node = self._read_node(place)
                self._nodes.append(node)
                children = self._resolve_items(number, node, len(specs))
                specs.extend(node.specs)
            stack.extend(reversed(children))
        return specs

    def _list_files(self, node: _Node) -> None:
        """Add the leaves of a node to `files`."""
        keys = node.fields["keys"]
        items = node.fields["items"]
        for key, item, stem in zip(keys, items, node.stems, strict=True):
            if type(item) is dict:
                continue
            spec = self.plan.specs[len(self.files)]
            name = join_name(node.place.folder, stem + LEAF_SUFFIX)
            path = (*node.place.path, key)
            self.files.append(LeafFile(name, path, spec.dtype, spec.size, spec.size_bytes, exact=node.is_own))

    def _read_node(self, place: _Place) -> _Node:
        """Read one node from its folder."""
        meta = self._meta(place.folder, place.path)
        own = meta.get("")
        _check_version(own, place.path)
        self._check_pickles(place.folder, place.path)
        inner = join_name(place.folder, "_tensordict")
        if own is None and "shape" not in meta and self._is_folder(inner, place.path):
            place, meta = self._tensorclass(place, meta)
        if own is not None:
            return self._document(place, meta, own)
        if meta.get("_type") == LAZY_TYPE:
            return self._stack(place, meta)
        return self._entries(place, meta)

    def _resolve_items(self, number: int, node: _Node, first_spec: int) -> list[_Place]:
        """Number the specs of a node's leaves from `first_spec`; return the places of its sub-trees."""
        children: list[_Place] = []
        keys = node.fields["keys"]
        items = node.fields["items"]
        for at, (key, item, stem) in enumerate(zip(keys, items, node.stems, strict=True)):
            if type(item) is not dict:
                items[at] = _shift_spec(key, item, len(node.specs), first_spec)
            elif "tree" in item:
                path = (*node.place.path, key)
                folder = join_name(node.place.folder, stem)
                self._check_folder(folder, path)
                child = _Place(folder, path, parent=number, at=at)
                # The trees of a stack are of the class that tensordict records for the stack.
                if node.stack_dim is not None:
                    child = child._replace(cls=node.place.cls, further=node.place.further)
                children.append(child)
        return children

    def _document(self, place: _Place, meta: dict[str, Any], own: dict[str, Any]) -> _Node:
        """Read a node of this version; tensordict's fields must follow from it."""
        fields = own["node"]
        specs = [spec_of(code, shape) for code, shape in own["specs"]]
        expected = shared_fields(fields, specs)
        shared = {key: value for key, value in meta.items() if key}
        if shared != expected:
            raise damaged(
                f"meta.json of {where(place.path)}: tensordict's fields differ from tdfunc's.",
                repr(expected)[:300],
                repr(shared)[:300],
                hint="another program changed them: restore the file from a copy.",
            )
        keys = fields["keys"]
        items = fields["items"]
        stems = [stem_of(key, leaf=type(item) is not dict) for key, item in zip(keys, items, strict=True)]
        size = fields.setdefault("size", [])
        fields.setdefault("device", None)
        for at, item in enumerate(items):
            if type(item) is dict and "data" in item:
                shape = item.get("shape", size)
                more = {field: item[field] for field in ("flags", "shape") if field in item}
                value = self._value(place, keys[at], stems[at], len(shape), shape)
                items[at] = {**value, **more}
        ties = tuple([_tuple_paths(group) for group in own.get("ties", ())])
        return _Node(place, fields, specs, stems, ties, is_own=True)

    def _stack(self, place: _Place, meta: dict[str, Any]) -> _Node:
        """Read a lazy stack of tensordict."""
        dim = meta.get("stack_dim")
        found = {name for name in self.root.names(place.folder) if name.isascii() and name.isdigit()}
        keys = [str(i) for i in range(len(found))]
        if not found or found != set(keys):
            raise malformed("the folders 0, 1, ... of a lazy stack", f"{sorted(found)}")
        if type(dim) is not int:
            raise malformed("the dimension of a lazy stack", repr(dim))
        items = [{"tree": None} for _ in keys]
        fields = {"class": lazy_name(), "keys": keys, "items": items, "device": None}
        return _Node(place, fields, specs=[], stems=keys, stack_dim=dim)

    def _tensorclass(self, place: _Place, meta: dict[str, Any]) -> tuple[_Place, dict[str, Any]]:
        """Read a tensorclass of tensordict: fields that are not tensors, and the tree or stack of the others."""
        kind = meta.pop("_type", None)
        if type(kind) is not str:
            raise _unknown(place.path, kind)
        folder = join_name(place.folder, "_tensordict")
        place = place._replace(folder=folder, cls=self._class_name(kind), further=meta)
        return place, self._meta(place.folder, place.path)

    def _class_name(self, kind: str) -> str | None:
        """Return our name of a class that tensordict names, if it is one of the given classes."""
        name = kind.removeprefix("<class '").removesuffix("'>")
        if isinstance(self.classes, type):
            classes: Any = (self.classes,)
        elif isinstance(self.classes, Mapping):
            classes = self.classes.values()
        else:
            classes = self.classes
        own_name = None
        # Of classes with one name the last is used.
        for cls in classes:
            if f"{cls.__module__}.{cls.__qualname__}" == name:
                own_name = f"{cls.__module__}:{cls.__qualname__}"
        return own_name

    def _entries(self, place: _Place, meta: dict[str, Any]) -> _Node:
        """Read a node of tensordict."""
        if type(meta.get("_type")) is not str or "shape" not in meta or meta["_type"] in (VALUE_TYPE, VALUES_TYPE):
            raise _unknown(place.path, meta.get("_type"))
        size = meta["shape"]
        specs: list[Spec] = []
        items: dict[str, Any] = {}
        stems: list[str] = []
        for key, entry in meta.items():
            # tensordict has further fields.
            if type(entry) is not dict:
                continue
            is_leaf = "type" not in entry
            stem = self._entry_stem(place.folder, key, is_leaf)
            stems.append(stem)
            if is_leaf:
                items[key] = len(specs)
                specs.append(_entry_spec((*place.path, key), entry))
            elif entry["type"] in ("NonTensorData", "NonTensorStack"):
                # One value for each element of the batch, and at least one dimension.
                items[key] = self._value(place, key, stem, max(len(size), 1), size)
            else:
                items[key] = {"tree": None}
        for key, value in place.further.items():
            if value is not None and key and key not in items:
                items[key] = {"value": value}
                stems.append("")
        fields: dict[str, Any] = {"size": size, "device": None, "keys": list(items), "items": list(items.values())}
        if meta.get("device", "None") not in ("None", None):
            fields["device"] = "cpu"
        if place.cls is not None:
            fields["class"] = place.cls
        return _Node(place, fields, specs, stems)

    def _entry_stem(self, folder: str, key: str, is_leaf: bool) -> str:
        """Return the name of an entry's file or folder: old versions of tensordict did not encode the key."""
        stem = encoded(key)
        if not is_raw_name(key):
            return stem
        suffix = LEAF_SUFFIX if is_leaf else ""
        if self._mode(join_name(folder, stem + suffix)):
            return stem
        return key

    def _value(self, place: _Place, key: str, stem: str, dims: int, shape: Sequence[int]) -> dict[str, Any]:
        """Read non-tensor data, whose values are lists nested `dims` deep, as an item."""
        path = (*place.path, key)
        folder = join_name(place.folder, stem)
        self._check_folder(folder, path)
        self._check_pickles(folder, path)
        meta = self._meta(folder, path)
        if meta.get("_type") == VALUE_TYPE:
            return {"value": meta["data"]}
        if meta.get("_type") != VALUES_TYPE:
            raise malformed("non-tensor data", repr(meta.get("_type")))
        flat, found = _flatten(meta["data"], dims)
        if found != list(shape):
            return {"values": flat, "shape": found}
        return {"values": flat}

    def _meta(self, folder: str, path: Path) -> dict[str, Any]:
        what = f"meta.json of {where(path)}"
        try:
            file = open_inside(self.root, join_name(folder, META), what)
        except (FileNotFoundError, NotADirectoryError) as err:
            if not folder:
                raise
            raise damaged(f"{what} is missing.", join_name(folder, META)) from err
        with file as fd:
            size_bytes = os.fstat(fd).st_size
            if size_bytes > _MAX_META_BYTES:
                raise malformed(f"at most {_MAX_META_BYTES} bytes", f"{size_bytes} bytes")
            with open(fd, "rb", closefd=False) as raw:
                meta = parse_json(raw.read(_MAX_META_BYTES))
        if type(meta) is not dict:
            raise malformed("an object", repr(meta))
        return meta

    def _check_pickles(self, folder: str, path: Path) -> None:
        for name in PICKLES:
            if self._mode(join_name(folder, name)):
                # A folder cannot lack an entry that the description of its parent names.
                rest = ""
                if path:
                    rest = f".exclude({path!r})"
                raise UnsupportedError(
                    f"{where(path)} has pickled data, which can run any code when it is read.",
                    expected="non-tensor data as JSON",
                    got=join_name(folder, name),
                    hint="tdfunc never reads pickles. If the folder is trusted, tensordict writes the rest: "
                    f"TensorDict.load_memmap(folder, allow_pickle=True){rest}.memmap(other, copy_existing=True).",
                )

    def _mode(self, name: str) -> int:
        """Return the type and permissions of a file or link; 0 if it does not exist."""
        try:
            return self.root.mode(name)
        except OSError:
            return 0

    def _is_folder(self, folder: str, path: Path) -> bool:
        kind = self._mode(folder)
        if stat.S_ISLNK(kind):
            raise damaged(
                f"{where(path)} is a link to a folder.", got=folder, hint="put the folder there in place of the link."
            )
        return stat.S_ISDIR(kind)

    def _check_folder(self, folder: str, path: Path) -> None:
        if not self._is_folder(folder, path):
            raise damaged(f"the folder of {dotted(path)!r} is missing.", folder)

    # -- the tree -----------------------------------------------------------------------------------------------

    def _measure_stacks(self) -> None:
        """Compute the batch sizes of lazy stacks that do not record theirs; a node comes after the one around it."""
        for node in reversed(self._nodes):
            if node.stack_dim is None:
                continue
            trees = [self._nodes[item["tree"]].fields["size"] for item in node.fields["items"]]
            inner = _common_sizes(trees)
            if node.stack_dim > len(inner):
                raise malformed(f"a dimension of at most {len(inner)}", str(node.stack_dim))
            node.fields["size"] = [*inner[: node.stack_dim], len(trees), *inner[node.stack_dim :]]
            node.fields["own"] = node.stack_dim - len(inner) - 1

    def _tie(self, specs: Sequence[Spec]) -> list[list[tuple[int, str]]]:
        """Make aliases of tied leaves and return their groups."""
        self._check_ties()
        numbers = {node.place.path: number for number, node in enumerate(self._nodes)}
        groups: list[list[tuple[int, str]]] = []
        orders: dict[int, dict[str, int]] = {}
        for number, group in enumerate(self._nodes[0].ties):
            refs = [(numbers[path[:-1]], path[-1]) for path in group]
            first: Spec | None = None
            for slot in self._find_slots(refs, orders):
                item = slot.items[slot.at]
                place, flags = item[:2] if type(item) is list else (item, "")
                spec = specs[int(place)]
                if first is None:
                    first = spec
                    continue
                if spec != first:
                    raise malformed(f"leaves of one dtype and shape tied to {dotted(group[0])!r}", "others")
                slot.items[slot.at] = {"tie": number, "flags": kinds_in(flags)}
            groups.append(refs)
        return groups

    def _check_ties(self) -> None:
        """Raise unless every sub-tree records the groups of its parent."""
        size = 0
        for node in self._nodes:
            for group in node.ties:
                size += sum(len(path) ** 2 for path in group)
        check_tie_size(size, CorruptCheckpointError)
        # The groups of each node's sub-trees, by their keys.
        inner: list[dict[str, Ties]] = []
        for node in self._nodes:
            path = node.place.path
            expected = inner[node.place.parent].get(path[-1], ()) if inner else node.ties
            if set(map(frozenset, expected)) != set(map(frozenset, node.ties)):
                # A part of a larger folder that was replaced by itself has other ties; that is also damage.
                raise damaged(
                    f"{where(path)} and the folder around it have different ties.",
                    repr(expected)[:300],
                    repr(node.ties)[:300],
                )
            inner.append(restrict(node.ties))

    def _find_slots(self, refs: list[tuple[int, str]], orders: dict[int, dict[str, int]]) -> list[_Slot]:
        """Return the places of items by node and key; `orders` keeps the place of each key in the nodes seen before."""
        slots: list[_Slot] = []
        for number, key in refs:
            fields = self._nodes[number].fields
            if number not in orders:
                orders[number] = {name: at for at, name in enumerate(fields["keys"])}
            slots.append(_Slot(fields["items"], orders[number][key]))
        return slots


# Any: values of JSON.
def _check_version(own: Any, path: Path) -> None:
    """Raise unless the empty key of a `meta.json` is missing or has a document of this version."""
    if own is None:
        return
    if type(own) is not dict or "tdfunc" not in own:
        raise UnsupportedError(
            f"{where(path)} has an entry with an empty key, which tdfunc does not read.",
            hint="load it with tensordict and rename the key.",
        )
    version: Any = own["tdfunc"]
    if version != VERSION:
        raise UnsupportedError(
            f"this version of tdfunc cannot read the format of {where(path)}.",
            expected=str(VERSION),
            got=repr(version)[:100],
            hint="install the tdfunc that wrote it, or a newer one.",
        )


def _shift_spec(key: str, item: Any, count: int, first_spec: int) -> Any:
    """Return the item of a leaf with the number of its spec, which is below `count`, counted from `first_spec`."""
    number, *rest = item if type(item) is list else (item,)
    if type(number) is not int or not 0 <= number < count:
        raise malformed(f"the number of a spec at {key!r}", repr(item))
    if rest:
        return [number + first_spec, *rest]
    return number + first_spec


def _tuple_paths(group: list[list[str]]) -> tuple[Path, ...]:
    return tuple([tuple(path) for path in group])


def _entry_spec(path: Path, entry: dict[str, Any]) -> Spec:
    """Return the spec of a leaf of tensordict."""
    is_nested = entry.get("is_nested")
    dtype = entry["dtype"]
    # Any other text is malformed.
    is_unknown = dtype not in SHARED_DTYPES and str(dtype).startswith("torch.")
    if is_nested or is_unknown:
        raise UnsupportedError(
            f"leaf {dotted(path)!r} is not a dense tensor of a dtype that torch has.",
            expected=f"one of {', '.join(SHARED_DTYPES)}",
            got="a nested tensor" if is_nested else dtype,
        )
    spec = spec_for(SHARED_DTYPES[dtype], entry["shape"], FOLDER_CODES)
    assert spec is not None
    return spec


def _flatten(data: Any, dims: int) -> tuple[list[Any], list[int]]:
    """Return the values in lists nested `dims` deep, and the lengths of the lists."""
    flat: list[Any] = [data]
    shape: list[int] = []
    for _ in range(dims):
        lengths = {len(part) if type(part) is list else -1 for part in flat}
        if len(lengths) != 1 or -1 in lengths:
            raise malformed(f"lists nested {dims} deep, of equal lengths", repr(data))
        shape.append(lengths.pop())
        flat = [value for part in flat for value in part]
    return flat, shape


def _common_sizes(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the size that all shapes have at each dimension; -1 where they differ."""
    common: list[int] = []
    for sizes in zip(*shapes, strict=True):
        is_common = len(set(sizes)) == 1
        common.append(sizes[0] if is_common else -1)
    return common


def where(path: Path) -> str:
    """Return the name of a node for messages."""
    if path:
        return repr(dotted(path))
    return "the root"


def _unknown(path: Path, kind: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{where(path)} is of an unknown type.",
        expected="a TensorDict, lazy stack, tensorclass or non-tensor data",
        got=repr(kind)[:200],
        hint="one value is read with the folder above it.",
    )


@contextmanager
def _checking(what: str) -> Generator[None, None, None]:
    """Replace errors of a malformed description by ours."""
    try:
        yield
    except (CorruptCheckpointError, TreeStructureError, UnsupportedError):
        raise
    except (AssertionError, *MALFORMED) as err:
        raise damaged(
            f"{what} is malformed.", "the description of a tree", f"{type(err).__name__}: {err}"[:300]
        ) from err
