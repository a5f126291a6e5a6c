"""The names in a memmap folder, and its `meta.json` files.

The layout is tensordict's. The empty key of `meta.json`, which tensordict ignores, contains the node in the grammar of
`tree/encode.py`, as in a safetensors header; tensordict's own fields follow from it. This module writes nothing.
`docs/memmap.md` is the specification, and `read.py` reads it.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.nontensor import NonTensorData
from tdfunc.core.types import Path, Ties
from tdfunc.storage.safetensors.plan import address_of
from tdfunc.storage.tree.build import ties_of
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
    # A folder of such a name could stand where another key's leaf, or a node's own files, must be.
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
    files = {META}
    folders = set[str]()
    own = meta.get("")
    fields: dict[str, Any] = own if type(own) is dict else {}
    if "tdfunc" not in fields and not str(meta.get("_type")).startswith(_TYPE_START):
        # Another program's, which may name files in any way.
        return Owned(set(), set())
    node = fields.get("node", {})
    for key, item in zip(node.get("keys", ()), node.get("items", ()), strict=False):
        is_leaf = type(item) is not dict
        (files if is_leaf else folders).add(stem_of(key, leaf=is_leaf) + LEAF_SUFFIX * is_leaf)
    if own is None:
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
        files.update(PICKLES)
        folders |= {"_tensordict"} if "shape" not in meta else set()
    return Owned(files, folders, meta.get("_type") in (LAZY_TYPE, VALUES_TYPE))


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
    out = outline(tree, call=call, values=values, codes=FOLDER_CODES, named=False)
    if values:
        for name, leaf in zip(out.names, out.leaves, strict=True):
            address_of(call, name, leaf)
    assert out.text is not None
    doc = json.loads(out.text)
    for node in doc["nodes"]:
        # The leaves will be on the CPU.
        node |= {"device": "cpu"} if node.get("device") is not None else {}
    plan = Description(doc)
    folders = [""] * len(plan.nodes)
    for number, above in enumerate(plan.parents):
        if above is not None:
            folders[number] = join_name(folders[above[0]], stem_of(above[1], leaf=False))
    files: list[FileLeaf] = []
    for number, folder in enumerate(folders):
        path = plan.path(number)
        for key in [k for k, item in zip(plan.keys[number], plan.items[number], strict=True) if type(item) is not dict]:
            at = len(files)
            name = join_name(folder, stem_of(key, leaf=True) + LEAF_SUFFIX)
            size_bytes = plan.specs[at].size_bytes
            is_value = IS_VALUE in plan.flags[at]
            files.append(FileLeaf(name, out.leaves[at], (*path, key), size_bytes, is_value))
    links = [
        (join_name(folders[number], stem_of(key, leaf=True) + LEAF_SUFFIX), files[plan.tied[group]].name)
        for group, refs in enumerate(plan.groups)
        for number, key in refs[1:]
        if files[plan.tied[group]].size_bytes
    ]
    # tensordict keeps no file for a leaf without elements.
    files = [file for file in files if file.size_bytes]
    ties = ties_of(plan)
    metas = [meta for number in range(len(folders)) for meta in _metas(plan, number, folders[number], ties)]
    classes: dict[type[TensorCollection], None] = {}
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, TensorCollection):
            classes[type(node)] = None
            stack.extend(node._data.values())
        elif isinstance(node, NonTensorData):
            stack.extend(parts_of(node.data))
    return FolderPlan(metas, files, links, [], list(classes), sum(file.size_bytes for file in files))


def _metas(plan: Description, number: int, folder: str, ties: dict[int, Ties]) -> list[tuple[str, str]]:
    """Return the `meta.json` of a node, and those of its non-tensor data, by their names."""
    node = plan.nodes[number]
    size = list(plan.sizes[number])
    leaf = plan.starts[number]
    specs: dict[Spec, int] = {}
    items: list[Any] = []
    metas: list[tuple[str, str]] = []

    def tensor(at: int, flags: str, shape: Sequence[Any]) -> Any:
        place = specs.setdefault(plan.specs[at], len(specs))
        if flags:
            return [place, flags, *shape]
        return place

    for key, item in zip(plan.keys[number], plan.items[number], strict=True):
        if type(item) is not dict:
            items.append(tensor(leaf, plan.flags[leaf], item[2:] if type(item) is list else ()))
            leaf += 1
        elif "tie" in item:
            first = plan.tied[item["tie"]]
            flags = plan.flags[first]
            items.append(tensor(first, item.get("flags", "") + flags.replace(kinds_in(flags), ""), ()))
        elif "tree" in item:
            items.append({**item, "tree": None})
        else:
            data = None
            if stem_of(key, leaf=False) == encoded(key):
                data = _value_fields(item, item.get("shape", size))
            if data is not None:
                metas.append((join_name(join_name(folder, encoded(key)), META), _text(data)))
                held = "value" if "value" in item else "values"
                item = {"data": held, **{field: item[field] for field in ("flags", "shape") if field in item}}
            items.append(item)
    fields: dict[str, Any] = {field: node[field] for field in ("names", "class", "own") if field in node}
    if size:
        fields["size"] = size
    if plan.devices[number] is not None:
        fields["device"] = "cpu"
    described = {**fields, "keys": plan.keys[number], "items": items}
    document: dict[str, Any] = {"tdfunc": VERSION, "specs": [[s.code, list(s.shape)] for s in specs], "node": described}
    if number in ties and ties[number]:
        document["ties"] = ties[number]
    meta = {**shared_fields(described, list(specs)), "": document}
    return [(join_name(folder, META), _text(meta)), *metas]


def _value_fields(item: dict[str, Any], shape: Sequence[int]) -> dict[str, Any] | None:
    """Return non-tensor data as tensordict writes them; None if it would alter them."""
    if "value" in item:
        return {"_type": VALUE_TYPE, "data": item["value"], "_is_non_tensor": True, "_metadata": None}
    flat = item["values"]
    # tensordict takes lists inside for further batch dimensions, and keeps no empty stack.
    if not shape or not flat or not all(type(value) in (str, bool, int, float) for value in flat):
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
        is_leaf = type(item) is not dict
        if stem_of(key, leaf=is_leaf) != encoded(key):
            continue
        if is_leaf:
            if type(item) is int:
                place, flags = (item, "")
            else:
                place, flags = item[:2]
            spec = specs[place]
            if IS_VALUE not in flags and str(spec.dtype) in SHARED_DTYPES:
                entries[key] = {
                    "device": "cpu", "shape": list(spec.size), "dtype": str(spec.dtype), "is_nested": False
                }  # fmt: skip
        elif "tree" in item:
            entries[key] = {"type": "TensorDict"}
        elif "data" in item:
            entries[key] = {"type": "NonTensorData" if item["data"] == "value" else "NonTensorStack"}
    place = "None" if node.get("device") is None else "cpu"
    return {**entries, "shape": size, "device": place, "_type": TREE_TYPE}
