"""Non-tensor data, kinds, ties, names and classes as a file and a memmap folder record them.

Inputs are JSON of these alone. `check_values` puts it into both formats, each otherwise good; whatever loads must be
what the JSON says, in both the same, and the same again after it was saved and loaded.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.reliability.loads import check_folder, check_tree, outcome
from tdfunc import Kind, NonTensorData, NonTensorStack, TensorClass, TensorDict, load, save
from tdfunc.core.shapes import as_names
from tests.storage.trees import assert_same, plain

_TREE = "<class 'tensordict._td.TensorDict'>"
_LAZY = "tdfunc._lazystack.stack:LazyStack"
_KINDS = {"p": Kind.PARAMETER, "b": Kind.BUFFER, "n": Kind.NON_PERSISTENT, "x": Kind.EXTRA_STATE}
# The leaves of the tree: of its root, and of `n`, in which the values are.
_LEAVES = {(0, "t"): "F32", (1, "w"): "F32", (1, "i"): "I64"}
_DTYPES = {"F32": "torch.float32", "I64": "torch.int64"}


class Sample(TensorClass):
    """The classes that a file may record."""

    w: torch.Tensor
    i: torch.Tensor
    note: Any
    more: Any = None


def check_values(root: Path, raw: bytes) -> str:
    """Load the tree that the JSON describes from a file and from a memmap folder."""
    try:
        doc = json.loads(raw)
    except (RecursionError, ValueError):
        return "raised"
    if type(doc) is not dict:
        return "raised"
    doc["values"] = doc["values"] if type(doc.get("values")) is dict else {}
    results = [check_tree(root, json.dumps(_description(doc)).encode())]
    trees = [outcome(load, root / "input.safetensors")]
    folder = root / "valued"
    shutil.rmtree(folder, ignore_errors=True)
    _write_folder(doc, folder)
    results.append(check_folder(folder))
    trees.append(outcome(TensorDict.load_memmap, folder))
    loaded = [tree for tree in trees if not isinstance(tree, str)]
    for tree in loaded:
        _compare(tree["n"], doc)
        _save_again(tree, root)
    if len(loaded) == 2:
        assert_same(loaded[0].delete("rows"), loaded[1])
    return " ".join(results)


# -- writing ----------------------------------------------------------------------------------------------------


def _ranks(doc: dict[str, Any]) -> dict[Any, tuple[int, int]]:
    """The group of each tied leaf, and its place in it."""
    found = {}
    for number, group in enumerate(_groups(doc) or ()):
        for rank, (node, key) in enumerate(group):
            found.setdefault((node, key), (number, rank))
    return found


def _groups(doc: dict[str, Any]) -> list[list[Any]] | None:
    """The ties, as lists of a node (the root, or `n`) and a key; None where they are something else."""
    groups = doc.get("ties", [])
    if type(groups) is not list or any(type(group) is not list for group in groups):
        return None
    refs = [ref for group in groups for ref in group]
    whole = all(type(ref) is list and list(map(type, ref)) == [int, str] and ref[0] in (0, 1) for ref in refs)
    return groups if whole else None


def _flags(doc: dict[str, Any]) -> dict[str, Any]:
    flags = doc.get("flags")
    return flags if type(flags) is dict else {}


def _description(doc: dict[str, Any]) -> dict[str, Any]:
    ranks = _ranks(doc)

    def leaf(at: tuple[int, str], spec: int) -> Any:
        group, rank = ranks.get(at, (0, 0))
        flags = [_flags(doc)[at[1]]] if at[0] and at[1] in _flags(doc) else []
        if rank:
            return {"tie": group, **({"flags": flags[0]} if flags else {})}
        return [spec, *flags] if flags else spec

    more = {key: doc[key] for key in ("size", "names", "class") if key in doc}
    inner = {**more, "keys": ["w", "i", *doc["values"]]}
    inner["items"] = [leaf((1, "w"), 0), leaf((1, "i"), 1), *doc["values"].values()]
    part = {"size": [], "keys": ["w", "note"], "items": [0, next(iter(doc["values"].values()), {"value": 0})]}
    if "class" in doc:
        part["class"] = doc["class"]
    rows = {"size": [2], "class": _LAZY, "own": doc.get("own", -1), "keys": ["0", "1"]}
    nodes = [
        {"keys": ["n", "t", "rows"], "items": [{"tree": 1}, leaf((0, "t"), 0), {"tree": 2}]},
        inner,
        {**rows, "items": [{"tree": 3}, {"tree": 4}]},
        part,
        part,
    ]
    return {"specs": [["F32", [2]], ["I64", [2]]], "nodes": nodes, "ties": doc.get("ties", [])}


def _write_folder(doc: dict[str, Any], folder: Path) -> None:
    (folder / "n").mkdir(parents=True)
    entries: list[dict[str, Any]] = [{}, {}]
    for (node, key), code in _LEAVES.items():
        shape = {"device": "cpu", "shape": [2], "dtype": _DTYPES[code], "is_nested": False}
        entries[node][key] = shape
        # As a file without values reads: zeros.
        (folder / ("n" if node else "") / f"{key}.memmap").write_bytes(bytes(8 if code == "F32" else 16))
    groups = _groups(doc)
    paths = [[["n", key] if node else [key] for node, key in group] for group in groups or ()]
    below = [[path[1:] for path in group if len(path) == 2] for group in paths]
    own: dict[str, Any] = {"tdfunc": 1, "special": doc["values"], "order": ["w", "i", *doc["values"]]}
    own |= {key: doc[key] for key in ("flags", "names", "class") if key in doc}
    own["shapes"] = {
        key: item["shape"] for key, item in doc["values"].items() if type(item) is dict and "shape" in item
    }
    own["ties"] = [group for group in below if len(group) > 1]
    outer = {"n": {"type": "TensorDict"}, **entries[0], "shape": [], "device": "None", "_type": _TREE}
    inner = {**entries[1], "shape": doc.get("size", []), "device": "None", "_type": _TREE, "": own}
    (folder / "meta.json").write_text(
        json.dumps({**outer, "": {"tdfunc": 1, "ties": paths if groups is not None else doc["ties"]}})
    )
    (folder / "n" / "meta.json").write_text(json.dumps(inner))


# -- comparing --------------------------------------------------------------------------------------------------


def _compare(tree: Any, doc: dict[str, Any]) -> None:
    """Check that a tree is the one that the JSON describes."""
    size = tuple(doc.get("size", []))
    assert tree._batch_size == size
    assert tree._names == (as_names(doc["names"], len(size)) if doc.get("names") is not None else None)
    if "class" in doc and doc["class"] is not None:
        assert f"{type(tree).__module__}:{type(tree).__qualname__}" == doc["class"]
    assert list(tree._data) == ["w", "i", *doc["values"]]
    for key, item in doc["values"].items():
        # A leaf or a tree may stand in its place.
        if type(item) is not dict or not ("value" in item or "values" in item):
            continue
        found, expected = tree._data[key], _value_of(item, torch.Size(item.get("shape", size)))
        assert type(found) is type(expected), key
        assert (found.shape, repr(plain(found))) == (expected.shape, repr(plain(expected))), key
    flags, ranks = _flags(doc), _ranks(doc)
    for key in ("w", "i"):
        assert tree._kinds.get(key) is _kind(flags.get(key, "")), key
        # A tied leaf is what the first of its paths says.
        if not ranks.get((1, key), (0, 0))[1]:
            assert isinstance(tree._data[key], torch.nn.Parameter) == ("P" in flags.get(key, "")), key
    below = [group for group in _groups(doc) or () if {node for node, _ in group} == {1}]
    assert {frozenset(group) for group in tree._ties} == {frozenset((key,) for _, key in group) for group in below}


def _value_of(item: dict[str, Any], size: torch.Size) -> NonTensorData | NonTensorStack:
    if "value" in item:
        return NonTensorData(item["value"], size)
    array = np.empty(len(item["values"]), dtype=object)
    for i, value in enumerate(item["values"]):
        array[i] = value
    assert len(array) == math.prod(size)
    return NonTensorStack._wrap(array.reshape(size))


def _kind(flags: str) -> Kind | None:
    found = [_KINDS[flag] for flag in flags if flag in _KINDS]
    return found[-1] if found else None


def _save_again(tree: Any, root: Path) -> None:
    """Check that a loaded tree can be saved, and comes back as it is."""
    path, folder = root / "again.safetensors", root / "again"
    shutil.rmtree(folder, ignore_errors=True)
    repr(tree)
    save(tree, path, fsync=False)
    assert_same(load(path), tree)
    tree.memmap(folder, copy_existing=True)
    assert_same(TensorDict.load_memmap(folder), tree)


# -- good inputs ------------------------------------------------------------------------------------------------


def value_seeds(root: Path) -> list[bytes]:
    """Inputs with something of everything."""
    del root
    name = f"{__name__}:{Sample.__qualname__}"
    values = {"note": {"value": {"a": [1, None, "é", -0.0, 1e300, True]}}}
    more = {"more": {"values": ["x", {"b": []}]}}
    docs = [
        {"values": {**values, **more}, "size": [2], "names": ["row"], "class": name, "flags": {"w": "pPg", "i": "b"}},
        {"values": {"v": {"values": [1, 2, 3, 4], "shape": [2, 2]}}, "size": [2], "ties": [[[1, "w"], [0, "t"]]]},
        {
            "values": {"v": {"value": [[]], "shape": [0, 3]}, "é": {"value": ""}},
            "own": -1,
            "flags": {"i": "n", "w": "g"},
        },
        {"values": {"v": {"value": 2**60}}, "names": [], "ties": [[[0, "t"], [1, "w"]]], "flags": {"w": "x"}},
    ]
    return [json.dumps(doc).encode() for doc in docs]
