"""The names in a memmap folder, and its `meta.json` files.

The layout is tensordict's. The empty key of `meta.json`, which tensordict ignores, contains the node in the grammar of
`tree/encode.py`, as in a safetensors header; tensordict's own fields follow from it. This module writes nothing.
`docs/formats.md` is the specification, and `folder.py` reads it.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.types import Path, Ties
from tdfunc.storage.safetensors.plan import address_of
from tdfunc.storage.tree.decode import Description, kinds_in
from tdfunc.storage.tree.encode import IS_VALUE, outline
from tdfunc.storage.tree.objects import OBJECT, parts_of
from tdfunc.storage.tree.specs import FOLDER_CODES, Spec

VERSION = 2
META = "meta.json"
LEAF_SUFFIX = ".memmap"
PICKLES = ("other.pickle", "pickle.pkl")
# The keys of meta.json that are not entries of tensordict, and the key of the document.
RESERVED = ("shape", "device", "_type", "")
_TYPE_START = "<class '"
TREE_TYPE = "<class 'tensordict._td.TensorDict'>"
LAZY_TYPE = "<class 'tensordict._lazy.LazyStackedTensorDict'>"
VALUE_TYPE = "<class 'tensordict.tensorclass.NonTensorData'>"
VALUES_TYPE = "<class 'tensordict.tensorclass.NonTensorStack'>"
# tensordict's load of a whole folder fails at a leaf of any other dtype.
_SHARED_DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16",
    "float32", "float64", "complex32", "complex64", "complex128",
)  # fmt: skip
SHARED_DTYPES = {f"torch.{name}": getattr(torch, name) for name in _SHARED_DTYPES if hasattr(torch, name)}
# The characters that tensordict writes as `%XX`.
_ENCODED = {ord(char): f"%{ord(char):02X}" for char in '/<>:"|?*\\ \x7f%' + "".join(map(chr, range(32)))}
# A file name has 255 bytes, of which the suffix takes 7.
_MAX_BYTES = 248


def encoded(key: str) -> str:
    """Return the name under which tensordict stores a key, without the suffix of leaves."""
    if key in (".", ".."):
        return "%2E" * len(key)
    return key.translate(_ENCODED)


def hashed(key: str) -> str:
    """Return a name for any key, which no key has under the encoding and no key can be made to have."""
    return f"%~{blake2b(key.encode(), digest_size=20).hexdigest()}"


def stem_of(key: str, *, leaf: bool) -> str:
    """Return the name of a key's folder, or of its file without the suffix: encoded if tensordict can hold it."""
    name = encoded(key)
    # A folder of such a name could be where another key's leaf, or a node's own files, must be.
    taken = not leaf and (name.endswith(LEAF_SUFFIX) or name == META or name in PICKLES)
    if taken or key in RESERVED or len(name.encode()) > _MAX_BYTES:
        return hashed(key)
    return name


def is_raw_name(key: str) -> bool:
    """Return whether an unchanged key can be the name of a file, as in folders of old versions of tensordict."""
    if key in ("", ".", "..") or "/" in key or "\\" in key or "\0" in key:
        return False
    return not (len(key) >= 2 and key[0].isalpha() and key[1] == ":")


def join_name(folder: str, name: str) -> str:
    """Return a name inside a folder; the name of the root is empty."""
    if folder:
        return f"{folder}/{name}"
    return name


class Owned(NamedTuple):
    """The names that belong to a node's folder."""

    files: set[str]
    folders: set[str]
    # True if folders whose names are numbers are its trees.
    numbered: bool = False


def owned_names(meta: dict[str, Any]) -> Owned:
    """Return the names of the files and folders that a `meta.json` describes."""
    own = meta.get("")
    document: dict[str, Any] = {}
    if type(own) is dict:
        document = own
    if "tdfunc" not in document and not str(meta.get("_type")).startswith(_TYPE_START):
        # Another program's, which may name files in any way.
        return Owned(set(), set())
    if own is None:
        files, folders = _names_of_entries(meta)
    else:
        files, folders = _names_of_node(document.get("node", {}))
    files.add(META)
    is_numbered = meta.get("_type") in (LAZY_TYPE, VALUES_TYPE)
    return Owned(files, folders, is_numbered)


def _names_of_node(node: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return the names of the files and folders of a node that tdfunc wrote."""
    files = set[str]()
    folders = set[str]()
    # The lists of a damaged file may differ in length; only names that both give are known.
    for key, item in zip(node.get("keys", ()), node.get("items", ()), strict=False):
        if type(item) is dict:
            folders.add(stem_of(key, leaf=False))
        else:
            files.add(stem_of(key, leaf=True) + LEAF_SUFFIX)
    return files, folders


def _names_of_entries(meta: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return the names of the files and folders of a node that tensordict wrote."""
    files = set[str](PICKLES)
    folders = set[str]()
    for key, entry in meta.items():
        if type(entry) is not dict:
            continue
        # tensordict also writes names as they are, and several leaves for one nested tensor.
        for name in {encoded(key), key}:
            if "type" in entry:
                folders.add(name)
                continue
            files.add(name + LEAF_SUFFIX)
            if entry.get("is_nested"):
                files.add(f"{name}.shape{LEAF_SUFFIX}")
    # A tensorclass keeps its tensors in a folder of this name.
    if "shape" not in meta:
        folders.add("_tensordict")
    return files, folders


class FileLeaf(NamedTuple):
    """A leaf and its file, relative to the folder."""

    name: str
    leaf: Tensor
    path: Path
    size_bytes: int
    # True for non-tensor data, whose memory is never written to.
    is_value: bool


class FolderPlan(NamedTuple):
    """The contents of a folder, by relative names; an outer folder comes before those in it."""

    # The `meta.json` files: (name, text).
    metas: list[tuple[str, str]]
    files: list[FileLeaf]
    # Second names of tied leaves: (name, the file that has the values).
    links: list[tuple[str, str]]
    # The same for one tensor under several keys that are not tied: the names must lead to one file.
    same: list[tuple[str, str]]
    # The classes in the tree, by which it is read back: a local class cannot be found by its name.
    classes: list[type[TensorCollection]]
    size_bytes: int


def plan_folder(tree: TensorCollection, call: str, *, values: bool = True) -> FolderPlan:
    """Lay out a tree; without `values` the leaves need not have any (they may be on the meta device).

    Raises:
        UnsupportedError: A leaf, value or key that a folder cannot hold unchanged; the message names it.
        BatchSizeError: A leaf does not start with the batch size.
        TieError: Tied paths hold different leaves.
    """
    outlined = outline(tree, call=call, values=values, codes=FOLDER_CODES, named=False)
    if values:
        for name, leaf in zip(outlined.names, outlined.leaves, strict=True):
            address_of(call, name, leaf)
    assert outlined.text is not None
    document = json.loads(outlined.text)
    for node in document["nodes"]:
        # The leaves will be on the CPU.
        if node.get("device") is not None:
            node["device"] = "cpu"
    plan = Description(document)
    folders = _name_folders(plan)
    leaves = _name_leaves(plan, folders, outlined.leaves)
    # tensordict keeps no file for a leaf without elements.
    files = [file for file in leaves if file.size_bytes]
    links = _name_links(plan, folders, leaves)
    ties = plan.ties
    metas: list[tuple[str, str]] = []
    for number, folder in enumerate(folders):
        metas.extend(_metas(plan, number, folder, ties))
    size_bytes = sum(file.size_bytes for file in files)
    return FolderPlan(metas, files, links, same=[], classes=_classes_in(tree), size_bytes=size_bytes)


def _name_folders(plan: Description) -> list[str]:
    """Return the name of each node's folder."""
    folders = [""] * len(plan.nodes)
    for number, above in enumerate(plan.parents):
        if above is not None:
            parent, key = above
            folders[number] = join_name(folders[parent], stem_of(key, leaf=False))
    return folders


def _name_leaf(folder: str, key: str) -> str:
    """Return the name of a leaf's file."""
    return join_name(folder, stem_of(key, leaf=True) + LEAF_SUFFIX)


def _name_leaves(plan: Description, folders: list[str], leaves: Sequence[Tensor]) -> list[FileLeaf]:
    """Return all leaves with the names of their files, in the order of the description."""
    files: list[FileLeaf] = []
    for number, folder in enumerate(folders):
        path = plan.path(number)
        for key, item in zip(plan.keys[number], plan.items[number], strict=True):
            if type(item) is dict:
                continue
            at = len(files)
            files.append(
                FileLeaf(
                    name=_name_leaf(folder, key),
                    leaf=leaves[at],
                    path=(*path, key),
                    size_bytes=plan.specs[at].size_bytes,
                    is_value=IS_VALUE in plan.flags[at],
                )
            )
    return files


def _name_links(plan: Description, folders: list[str], leaves: list[FileLeaf]) -> list[tuple[str, str]]:
    """Return the further names of tied leaves, each with the name of the file that has the values."""
    links: list[tuple[str, str]] = []
    for group, refs in enumerate(plan.groups):
        first = leaves[plan.tied[group]]
        # tensordict keeps no file for a leaf without elements.
        if not first.size_bytes:
            continue
        for number, key in refs[1:]:
            links.append((_name_leaf(folders[number], key), first.name))
    return links


def _classes_in(tree: TensorCollection) -> list[type[TensorCollection]]:
    """Return the classes of all trees in a tree, also of those in its non-tensor data."""
    # A dict, which keeps the order.
    classes: dict[type[TensorCollection], None] = {}
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, TensorCollection):
            classes[type(node)] = None
            stack.extend(node._data.values())
        elif isinstance(node, NonTensorBase):
            stack.extend(parts_of(node.value))
    return list(classes)


class _SpecNumbers:
    """The specs of one `meta.json`, numbered as they are first used."""

    def __init__(self) -> None:
        self._numbers: dict[Spec, int] = {}

    def all(self) -> list[Spec]:
        return list(self._numbers)

    # Any: an item of the JSON.
    def item_of(self, spec: Spec, flags: str, shape: Sequence[Any] = ()) -> Any:
        """Return the item of a leaf: the number of its spec, or a list of the number, the flags and the shape."""
        number = self._numbers.setdefault(spec, len(self._numbers))
        if flags:
            return [number, flags, *shape]
        return number


def _metas(plan: Description, number: int, folder: str, ties: dict[int, Ties]) -> list[tuple[str, str]]:
    """Return the `meta.json` of a node, and the files of its non-tensor data, by their names."""
    size = list(plan.sizes[number])
    leaf = plan.starts[number]
    specs = _SpecNumbers()
    items: list[Any] = []
    metas: list[tuple[str, str]] = []
    for key, item in zip(plan.keys[number], plan.items[number], strict=True):
        if type(item) is int:
            items.append(specs.item_of(plan.specs[leaf], plan.flags[leaf]))
            leaf += 1
        elif type(item) is list:
            items.append(specs.item_of(plan.specs[leaf], plan.flags[leaf], item[2:]))
            leaf += 1
        elif "tie" in item:
            first = plan.tied[item["tie"]]
            items.append(specs.item_of(plan.specs[first], _alias_flags(item, plan.flags[first])))
        elif "tree" in item:
            items.append({**item, "tree": None})
        else:
            value = _value_fields(key, item, item.get("shape", size))
            if value is None:
                items.append(item)
                continue
            metas.append((join_name(join_name(folder, encoded(key)), META), _text(value)))
            items.append(_stored_item(item))
    described = {**_node_fields(plan, number), "keys": plan.keys[number], "items": items}
    codes = [[spec.code, list(spec.shape)] for spec in specs.all()]
    document: dict[str, Any] = {"tdfunc": VERSION, "specs": codes, "node": described}
    if ties.get(number):
        document["ties"] = ties[number]
    meta = {**shared_fields(described, specs.all()), "": document}
    return [(join_name(folder, META), _text(meta)), *metas]


def _node_fields(plan: Description, number: int) -> dict[str, Any]:
    """Return the fields of a node except its keys and items."""
    node = plan.nodes[number]
    fields: dict[str, Any] = {name: node[name] for name in ("names", "class", "own") if name in node}
    # In a description a node inherits them; each `meta.json` records its own.
    if plan.sizes[number]:
        fields["size"] = list(plan.sizes[number])
    if plan.devices[number] is not None:
        fields["device"] = "cpu"
    return fields


def _alias_flags(item: dict[str, Any], first_flags: str) -> str:
    """Return the flags of a tied leaf: its own kinds, and the other flags of the leaf with the values."""
    shared_flags = first_flags.replace(kinds_in(first_flags), "")
    return item.get("flags", "") + shared_flags


def _stored_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return the item of non-tensor data that are in a separate folder."""
    stored: dict[str, Any] = {"data": "value" if "value" in item else "values"}
    for field in ("flags", "shape"):
        if field in item:
            stored[field] = item[field]
    return stored


def _value_fields(key: str, item: dict[str, Any], shape: Sequence[int]) -> dict[str, Any] | None:
    """Return non-tensor data as tensordict writes them; None if it would alter them, or has no name for the key."""
    if stem_of(key, leaf=False) != encoded(key):
        return None
    if "value" in item:
        return {"_type": VALUE_TYPE, "data": item["value"], "_is_non_tensor": True, "_metadata": None}
    flat = item["values"]
    # tensordict takes lists inside for further batch dimensions, and keeps no empty stack.
    if not shape or not flat:
        return None
    if not all(type(value) in (str, bool, int, float) for value in flat):
        return None
    array = np.empty(len(flat), dtype=object)
    array[:] = flat
    return {"_type": VALUES_TYPE, "stack_dim": 0, "device": None, "data": array.reshape(tuple(shape)).tolist()}


def _text(meta: dict[str, Any]) -> str:
    return json.dumps(meta, ensure_ascii=False, separators=(",", ":"))


def shared_fields(node: dict[str, Any], specs: Sequence[Spec]) -> dict[str, Any]:
    """Return tensordict's fields of a `meta.json`, which follow from the node in tdfunc's document."""
    size = node.get("size", [])
    if "own" in node and node["class"] != OBJECT:
        return {"_type": LAZY_TYPE, "stack_dim": len(size) + node["own"]}
    entries: dict[str, Any] = {}
    for key, item in zip(node["keys"], node["items"], strict=True):
        # tensordict would look for these under another name.
        if stem_of(key, leaf=type(item) is not dict) != encoded(key):
            continue
        entry = _shared_entry(item, specs)
        if entry is not None:
            entries[key] = entry
    device = "None" if node.get("device") is None else "cpu"
    return {**entries, "shape": size, "device": device, "_type": TREE_TYPE}


# Any: an item of the JSON.
def _shared_entry(item: Any, specs: Sequence[Spec]) -> dict[str, Any] | None:
    """Return tensordict's entry of an item; None for an item that tensordict cannot read."""
    if type(item) is dict:
        if "tree" in item:
            return {"type": "TensorDict"}
        if "data" in item:
            return {"type": "NonTensorData" if item["data"] == "value" else "NonTensorStack"}
        return None
    if type(item) is int:
        number = item
        flags = ""
    else:
        number, flags = item[:2]
    spec = specs[number]
    if IS_VALUE in flags or str(spec.dtype) not in SHARED_DTYPES:
        return None
    return {"device": "cpu", "shape": list(spec.size), "dtype": str(spec.dtype), "is_nested": False}
