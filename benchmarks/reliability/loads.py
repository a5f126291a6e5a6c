"""Inputs for the loaders, and what must be true of each: it raises one of our errors, or gives what the files hold.

The fuzzer (`fuzz.py`), the tests of mutated inputs, and the counts for the page call the same checks.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

import safetensors.torch
import torch
import xxhash
from torch import nn

from tdfunc import (
    CorruptCheckpointError,
    MissingKeyError,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TreeStructureError,
    UnsupportedError,
    lazy_stack,
    load,
    save,
)
from tdfunc import open as open_file
from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.storage.safetensors.header import lay_out, render, seal
from tdfunc.storage.tree.decode import Description, parse_tree
from tests.storage.trees import retie, same_bytes

# The meta.json files of the memmap folder.
_METAS = ("meta.json", "n/meta.json", "v/meta.json", "s/meta.json", "lazy/meta.json", "lazy/0/meta.json")
OURS = (CorruptCheckpointError, UnsupportedError, TreeStructureError)
INDEX = "model.safetensors.index.json"


def example() -> TensorDict:
    """A small tree with something of everything."""
    shared = nn.Parameter(torch.tensor([[1.5, 2.5], [3.5, 4.5]]))
    inner = {"w": shared, "h": torch.ones(2, 3).bfloat16(), "e": torch.ones(2, 0)}
    values = {
        "v": NonTensorData({"a": [1, None]}, (2,)),
        "s": NonTensorStack("x", "y"),
        "m": torch.tensor([True, False]),
    }
    tree = TensorDict({"n": inner, "shape": shared, **values}, [2], names=["row"])
    return retie(tree, [[("n", "w"), ("shape",)]])


def mapped_example() -> TensorDict:
    """The same, with a lazy stack, as a memmap folder holds it."""
    rows = [TensorDict({"r": torch.ones(i + 1)}) for i in range(2)]
    return example().set("lazy", lazy_stack(rows))


def prepare(root: Path) -> None:
    """Write the good files that inputs are made of."""
    save(example(), root / "good.safetensors")
    save(example(), root / "shards", max_shard_size=30)
    mapped_example().memmap(root / "mapped")


def outcome(call, *args, **options):
    """The tree that a load gives, or the message of the error of ours that it raises; others pass through."""
    try:
        return call(*args, **options)
    except OURS as err:
        return str(err)


# -- one file ---------------------------------------------------------------------------------------------------


def reseal(raw: bytes) -> bytes:
    """Make the length, and the digest in a header of ours, right again: damage then reaches what comes after them."""
    end = raw.rfind(b"}", 8, 8 + int.from_bytes(raw[:8], "little") + 64) + 1
    if end <= 8:
        return raw
    head = bytearray(raw[:end])
    head[:8] = (end - 8).to_bytes(8, "little")
    mark = b'"tdfunc.header":"xxh3-64:'
    at = head.find(mark) + len(mark)
    if at > len(mark) and len(head) > at + 16:
        head[at : at + 16] = b"0" * 16
        head[at : at + 16] = xxhash.xxh3_64_hexdigest(bytes(head)).encode()
    return bytes(head) + raw[end:].lstrip(b" ")


def check_file(root: Path, raw: bytes) -> str:
    """Load a file as it is and with its digest made right, whole and in parts, and compare it with safetensors."""
    results = []
    for data in (raw, reseal(raw)):
        path = root / "input.safetensors"
        path.write_bytes(data)
        for verify in (True, False):
            results.append(_check_loaded(path, data, verify))
        assert path.read_bytes() == data, "a load wrote"
    return " ".join(results)


def _check_loaded(path: Path, data: bytes, verify: bool) -> str:
    tree = outcome(load, path, verify=verify)
    part = outcome(_read_parts, path, verify)
    if isinstance(tree, str):
        assert str(path) in tree, f"the file is not named: {tree}"
        return "raised"
    assert isinstance(tree, TensorCollection)
    sizes = {id(leaf): leaf.nbytes for leaf in _tensors(tree)}
    assert sum(sizes.values()) <= len(data), "more than the file holds"
    if not isinstance(part, str):
        for (path_a, a), (path_b, b) in zip(iter_leaves(tree), iter_leaves(part), strict=True):
            assert path_a == path_b
            assert not isinstance(a, torch.Tensor) or same_bytes(a, b), path_a
    _compare_with_safetensors(path, tree)
    return "loaded"


def _read_parts(path: Path, verify: bool):
    with open_file(path, verify=verify) as f:
        tree = outcome(f.load)
        outcome(f.spec)
        paths = outcome(f.paths)
        # Leaves are found without reading the whole description.
        for at in [("n", "w"), ("a",), ("v",), ("shape",)] if isinstance(paths, str) else paths[:8]:
            with suppress(MissingKeyError, TypeError):
                leaf = outcome(f.slice, at, slice(None), verify=verify)
                assert isinstance(leaf, str | torch.Tensor)
            with suppress(MissingKeyError):
                leaf = outcome(f.__getitem__, at)
                if not isinstance(tree, str) and isinstance(leaf, torch.Tensor):
                    assert same_bytes(leaf, tree[at]), at
        return tree


def _tensors(tree):
    # Non-tensor data may be one tensor.
    leaves = [leaf._value if isinstance(leaf, NonTensorData) else leaf for _, leaf in iter_leaves(tree)]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _compare_with_safetensors(path: Path, tree) -> None:
    try:
        theirs = safetensors.torch.load_file(path)
    # They refuse some that we read (a name that is no str to Python, dtypes); what both read must be equal.
    except Exception:
        return
    ours = list({id(leaf): leaf for leaf in _tensors(tree)}.values())
    for leaf in ours:
        assert any(same_bytes(leaf, other) for other in theirs.values()), "a leaf that safetensors does not see"


# -- the description of a tree ----------------------------------------------------------------------------------


def check_tree(root: Path, raw: bytes) -> str:
    """Put text in the place of the description of a tree; the entries are what it implies, as far as it is one."""
    text = raw.decode("utf-8", "surrogateescape").encode("utf-8", "replace").decode()
    try:
        plan = Description(parse_tree(text))
        layout = lay_out(plan.name_leaves(100_000), plan.specs)
        fits = layout.size_bytes < 1_000_000
        head = render(text, layout) if fits else None
    # Whatever is wrong with it: the load has to find it in a file without leaves.
    except Exception:
        head = None
    plain = lay_out([], [])
    size_bytes = 0 if head is None else layout.size_bytes
    head = render(text, plain) if head is None else head
    if size_bytes:
        order = [plan.specs[i].size_bytes for i in layout.order]
        seal(head, [xxhash.xxh3_64_hexdigest(bytes(size)) for size in order])
    else:
        seal(head, [])
    return check_file(root, bytes(head) + bytes(size_bytes))


# -- the index of shards ----------------------------------------------------------------------------------------


def reseal_index(raw: bytes) -> bytes:
    """Make the digest in an index of ours right."""
    mark = b'"tdfunc.index":"xxh3-64:'
    at = raw.find(mark) + len(mark)
    if at <= len(mark):
        return raw
    raw = raw[:at] + b"0" * 16 + raw[at + 16 :]
    return raw[:at] + xxhash.xxh3_64_hexdigest(raw).encode() + raw[at + 16 :]


def check_index(root: Path, raw: bytes) -> str:
    """Load shards with another index, as it is and with its digest made right."""
    results = []
    folder = root / "shards"
    good = example()
    before = snapshot(folder, INDEX)
    for data in (raw, reseal_index(raw)):
        (folder / INDEX).write_bytes(data)
        for verify in (True, False):
            tree = outcome(load, folder, verify=verify)
            part = outcome(_read_parts, folder, verify)
            results.append("raised" if isinstance(tree, str) else "loaded")
            if isinstance(tree, str):
                assert str(folder) in tree, f"the folder is not named: {tree}"
                continue
            known = _tensors(good)
            for leaf in _tensors(tree):
                assert any(same_bytes(leaf, other) for other in known), "a leaf that no shard has"
            del part
    assert snapshot(folder, INDEX) == before, "a load wrote"
    return " ".join(results)


# -- memmap folders ---------------------------------------------------------------------------------------------


def check_memmap(root: Path, raw: bytes) -> str:
    """Load a memmap folder in which the first byte chooses a meta.json, which is replaced by the rest."""
    folder = root / "mapped"
    target = folder / _METAS[raw[0] % len(_METAS) if raw else 0]
    good = target.read_bytes()
    try:
        target.write_bytes(raw[1:])
        return check_folder(folder)
    finally:
        target.write_bytes(good)


def check_folder(folder: Path) -> str:
    """Load a memmap folder: an error of ours, or leaves that fit their files; nothing is written."""
    before = snapshot(folder)
    tree = outcome(TensorDict.load_memmap, folder)
    if not isinstance(tree, str):
        for leaf in _tensors(tree):
            leaf.to(torch.uint8, copy=True) if not leaf.dtype.is_complex else leaf.clone()
        sizes = sum(size for _, size, _ in before.values())
        found = {(leaf.untyped_storage().data_ptr()): leaf.nbytes for leaf in _tensors(tree)}
        assert sum(found.values()) <= sizes, "more than the files hold"
    assert snapshot(folder) == before, "a load wrote"
    return "raised" if isinstance(tree, str) else "loaded"


def snapshot(folder: Path, *without: str) -> dict:
    """Names, inodes, sizes and times of all files in a folder."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            if name not in without:
                state = os.stat(os.path.join(place, name), follow_symlinks=False)
                found[os.path.join(place, name)] = (state.st_ino, state.st_size, state.st_mtime_ns)
    return found


# -- good inputs to start from ----------------------------------------------------------------------------------


def file_seeds(root: Path):
    """Files of tdfunc and of another program."""
    save(TensorDict({"a": torch.ones(2)}), root / "seed.safetensors")
    safetensors.torch.save_file({"a.b": torch.ones(2), "c": torch.zeros(1).bool()}, root / "other.safetensors")
    return [(root / name).read_bytes() for name in ("good.safetensors", "seed.safetensors", "other.safetensors")]


def tree_seeds(root: Path):
    """Descriptions of trees."""
    raw = (root / "good.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    small = {"specs": [["F32", [2]]], "nodes": [{"keys": ["a"], "items": [0]}], "ties": []}
    value = {"specs": [], "nodes": [{"keys": ["a"], "items": [{"value": [1, {"b": None}]}]}], "ties": []}
    return [header["__metadata__"]["tdfunc.tree"].encode(), *(json.dumps(doc).encode() for doc in (small, value))]


def index_seeds(root: Path):
    """An index of tdfunc, and one of another program."""
    raw = (root / "shards" / INDEX).read_bytes()
    weights = json.loads(raw)["weight_map"]
    return [raw, json.dumps({"metadata": {}, "weight_map": weights}).encode()]


def memmap_seeds(root: Path):
    """Every meta.json of the folder, behind the number of the file."""
    return [bytes([i]) + (root / "mapped" / name).read_bytes() for i, name in enumerate(_METAS)]
