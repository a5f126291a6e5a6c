"""A tree that a file or folder cannot hold unchanged is refused, by the name of the leaf, before the first byte."""

import enum

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from tdfunc import BatchSizeError, NonTensorData, NonTensorStack, TensorDict, TieError, UnsupportedError
from tdfunc.storage.api import load, save
from tdfunc.storage.tree import encode
from tests.storage.trees import assert_same, retie

WRITERS = {
    "file": lambda tree, folder: save(tree, folder / "t.safetensors"),
    "shards": lambda tree, folder: save(tree, folder / "t", max_shard_size=1),
    "memmap": lambda tree, folder: tree.memmap(folder / "t"),
}


class Level(enum.IntEnum):
    """An int that JSON makes a plain one."""

    LOW = 1


class Sub(torch.Tensor):
    """A tensor of another class."""


def freed():
    """A tensor whose storage was taken away, as FSDP does."""
    leaf = torch.ones(4)
    leaf.untyped_storage().resize_(0)
    return leaf


def nested(key, leaf):
    """A tree with one leaf at `n.bad` that no check has seen."""
    return TensorDict({"ok": torch.ones(2)})._put({"n": TensorDict({})._put({key: leaf})})


def tied(*groups, **entries):
    """A tree with ties that no check has seen."""
    tree = TensorDict(entries)
    return tree._replace(tree._data, ties=groups)


SHARED = torch.ones(1)
INNER = retie(TensorDict({"a": SHARED, "b": SHARED}), [[("a",), ("b",)]])
LEAVES = {
    "sub-byte": lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
    "float4 scalar": lambda: torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)[0],
    "meta": lambda: torch.zeros(2, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], size=(1, 1), check_invariants=False),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "subclass": lambda: torch.zeros(2).as_subclass(Sub),
    "uninitialised": lambda: nn.LazyLinear(3).weight,
    "freed": freed,
    "number": lambda: 3,
}
VALUES = {
    "object": object(),
    "bytes": b"x",
    "set": {1},
    "enum": Level.LOW,
    "numpy": np.longdouble(1),
    "dtype": torch.float32,
}
TREES = {
    "half a character as key": (UnsupportedError, r"UTF-8\D*'a\\ud8", lambda: TensorDict({"a\ud800": torch.ones(1)})),
    "half a character as value": (UnsupportedError, r"UTF-8\D*'b\\ud8", lambda: TensorDict({"a": "b\ud800"})),
    "half a character, empty": (UnsupportedError, r"UTF-8\D*\\udfff", lambda: TensorDict({"s": {"\udfff": {}}})),
    "batch of a leaf": (BatchSizeError, '"a"', lambda: TensorDict._make({"a": torch.ones(3)}, torch.Size([2]))),
    "batch of data": (BatchSizeError, '"s"', lambda: TensorDict._make({"s": NonTensorData("x", [3])}, torch.Size([2]))),
    "a stack of data": (
        UnsupportedError,
        r'"s" cannot be stored[\s\S]*got: +complex \(1\+2j\) at 0',
        lambda: TensorDict({"s": NonTensorStack(1 + 2j, 1)}, [2]),
    ),
    "a tie of two tensors": (
        TieError,
        '"b" is tied to "a"',
        lambda: tied((("a",), ("b",)), a=torch.ones(1), b=torch.zeros(1)),
    ),
    "a tie without a leaf": (TieError, r"a, b\.c", lambda: tied((("a",), ("b", "c")), a=torch.ones(1))),
    "a tie of a part alone": (
        TieError,
        "different ties",
        lambda: tied()._put({"s": INNER})._replace({"s": INNER}, ties=()),
    ),
}


@pytest.fixture(params=WRITERS)
def refused(request, tmp_path):
    """Check that a writer refuses a tree and leaves nothing behind."""

    def check(tree, kind=UnsupportedError, match=None):
        with pytest.raises(kind, match=match):
            WRITERS[request.param](tree, tmp_path)
        assert list(tmp_path.iterdir()) == []

    return check


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("case", LEAVES)
def test_leaves_that_no_format_holds(case, refused):
    """A leaf that a file cannot hold unchanged is refused by its path."""
    refused(nested("bad", LEAVES[case]()), match=r'leaf "n\.bad"[\s\S]*got: ')


def test_complex_leaves_that_a_file_cannot_hold(tmp_path):
    """complex128 is refused by a file, and kept by a folder."""
    tree = nested("bad", torch.zeros(2, dtype=torch.complex128))

    with pytest.raises(UnsupportedError, match=r'leaf "n\.bad"[\s\S]*complex128[\s\S]*view_as_real'):
        save(tree, tmp_path / "t.safetensors")
    assert_same(tree.memmap(tmp_path / "t"), tree)


@pytest.mark.parametrize("case", VALUES)
def test_values_that_no_format_holds(case, refused):
    """A non-tensor value that no format holds is refused by its path, and its place in a container."""
    refused(nested("bad", NonTensorData({"deep": [VALUES[case]]})), match=r'leaf "n\.bad"[\s\S]*got: .* at deep\.0')


def test_values_nested_too_deep(refused, tmp_path):
    """A value that is nested over 200 deep, or a cycle, is refused; 200 levels are kept."""
    cycle, deep = [], "x"
    cycle.append(cycle)
    for _ in range(199):
        deep = [deep]
    for value in (cycle, [[deep]]):
        refused(nested("bad", NonTensorData(value)), match=r'leaf "n\.bad"[\s\S]*200 deep')

    save(TensorDict({"ok": NonTensorData(deep)}), tmp_path / "t.safetensors")
    assert load(tmp_path / "t.safetensors")["ok"] == deep


@pytest.mark.parametrize("case", TREES)
def test_trees_that_are_not_consistent(case, refused):
    """A tree whose parts contradict each other is refused."""
    kind, match, make = TREES[case]
    refused(make(), kind, match)


def test_leaves_inside_a_transformation(refused):
    """Inside of vmap a leaf has no memory of its own to write."""

    def write(x):
        refused(TensorDict({"x": x}), match=r'"x" has no memory[\s\S]*torch\.func')
        return x

    torch.vmap(write)(torch.ones(3))


def test_fake_mode(refused):
    """Fake tensors have no values to write."""
    with FakeTensorMode():
        refused(TensorDict({"a": torch.ones(1)}), match="FakeTensorMode")


def test_ties_so_deep_that_they_fill_the_memory(tmp_path, monkeypatch):
    """A small file with a path for every pair of levels is neither written nor loaded."""
    leaf = torch.ones(1)
    tree = retie(TensorDict({"s": {"s": {"a": leaf, "b": leaf}}}), [[("s", "s", "a"), ("s", "s", "b")]])
    tree.memmap(tmp_path / "m")
    monkeypatch.setattr(encode, "MAX_TIE_KEYS", 18)
    save(tree, tmp_path / "t.safetensors")
    monkeypatch.setattr(encode, "MAX_TIE_KEYS", 17)

    with pytest.raises(UnsupportedError, match=r"at most 17[\s\S]*18"):
        save(tree, tmp_path / "u.safetensors")
    for name in ("t.safetensors", "m"):
        with pytest.raises(ValueError, match=r"at most 17[\s\S]*\d\d"):
            load(tmp_path / name)
    monkeypatch.undo()
    assert_same(load(tmp_path / "t.safetensors"), tree)
