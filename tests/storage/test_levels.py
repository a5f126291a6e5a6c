"""Checkpoints inside of `torch.func` transforms: what a file holds is a constant there."""

import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vmap

import tdfunc
from tdfunc import TensorDict, load, save
from tdfunc.storage import api as checkpoint
from tdfunc.storage.disk.raw import is_wrapped
from tdfunc.storage.safetensors import saved as open_module
from tdfunc.storage.safetensors import select
from tests.storage.trees import assert_same


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tree, and a folder where it is in a file, in shards and in a memmap folder."""
    folder = tmp_path_factory.mktemp("levels")
    tree = TensorDict(
        {
            "a": torch.arange(5.0),
            "p": nn.Parameter(torch.arange(5.0)),
            "n": {"g": torch.arange(5.0).requires_grad_(), "h": torch.arange(5.0).bfloat16(), "i": torch.arange(5)},
            "none": torch.empty(0, 3),
        }
    )
    save(tree, folder / "x.safetensors", fsync=False)
    save(tree, folder / "shards", max_shard_size=20, fsync=False)
    tree.memmap(folder / "mapped")
    return tree, folder


WAYS = {
    "load": lambda folder: load(folder / "x.safetensors")["a"],
    "without checks": lambda folder: load(folder / "x.safetensors", verify=False)["a"],
    "shards": lambda folder: load(folder / "shards")["n", "i"],
    "keys": lambda folder: load(folder / "x.safetensors", where="n.*")["n", "g"],
    "like": lambda folder: load(folder / "shards", like=load(folder / "x.safetensors", device="meta"))["p"],
    "dtype": lambda folder: load(folder / "shards", dtype=torch.float64)["n", "h"],
    "a memmap folder": lambda folder: load(folder / "mapped", dtype=torch.float64)["p"],
    "load_memmap": lambda folder: TensorDict.load_memmap(folder / "mapped")["n", "g"],
}
PARTS = {
    "a leaf": lambda f: f["a"],
    "a Parameter": lambda f: f["p"],
    "requires grad": lambda f: f["n", "g"],
    "a sub-tree": lambda f: f["n"].load()["h"],
    "the tree": lambda f: f.load()["p"],
    "chosen": lambda f: f.load(where="p")["p"],
}
TRANSFORMS = {
    "grad": lambda fn, z: grad(fn)(z),
    "grad twice": lambda fn, z: grad(lambda q: grad(lambda r: fn(r) + q.sum())(q).sum() + fn(q))(z),
    "jvp": lambda fn, z: torch.stack([jvp(fn, (z,), (row,))[1] for row in torch.eye(5)]),
    "vmap of grad": lambda fn, z: vmap(grad(fn))(z.expand(2, 5))[1],
    "grad of vmap": lambda fn, z: grad(lambda q: vmap(fn)(q).sum())(z.expand(2, 5))[0],
}


def transformed(transform, read):
    """The gradient of a product with the leaf that is read, and whether torch has wrapped it."""
    wrapped = []

    def product(z):
        leaf = read()
        wrapped.append(is_wrapped(leaf))
        return (leaf.to(z.dtype) * z).sum()

    return TRANSFORMS[transform](product, torch.ones(5)).tolist(), any(wrapped)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("way", WAYS)
def test_loads(way, transform, saved):
    """A load inside of a transform gives plain tensors, which are constants there."""
    assert transformed(transform, lambda: WAYS[way](saved[1])) == ([0.0, 1.0, 2.0, 3.0, 4.0], False)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["x.safetensors", "shards"])
@pytest.mark.parametrize("part", PARTS)
def test_reads_of_parts(part, name, transform, saved):
    """A leaf or part of an open file that is read inside of a transform is a constant there."""
    with tdfunc.open(saved[1] / name) as f:
        assert transformed(transform, lambda: PARTS[part](f)) == ([0.0, 1.0, 2.0, 3.0, 4.0], False)


@pytest.mark.parametrize("index", [slice(5), [0, 1, 2, 3, 4], torch.arange(5), torch.ones(5) > 0, ...], ids=str)
def test_rows(index, saved):
    """The rows that an index names are the same inside of a transform."""
    with tdfunc.open(saved[1] / "x.safetensors") as f:
        assert transformed("grad", lambda: f.slice("a", index))[0] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_rows_by_a_mapped_index(saved):
    """Inside of vmap an index has another value for each member."""
    with tdfunc.open(saved[1] / "x.safetensors") as f:
        assert vmap(lambda i: f.slice("a", i))(torch.tensor([3, 0])).tolist() == [3.0, 0.0]
        assert grad(lambda z: (f.slice("a", torch.arange(2, 4)) * z).sum())(torch.ones(2)).tolist() == [2.0, 3.0]


def test_saves(saved, tmp_path):
    """Constants of a transform can be saved in it, and are the same as outside."""
    tree, _ = saved

    def fn(z):
        save(tree, tmp_path / "y.safetensors", fsync=False)
        on_files = tree.memmap(tmp_path / "mapped")
        return (on_files["a"] * z).sum()

    assert torch.equal(grad(fn)(torch.ones(5)), tree["a"])

    assert_same(load(tmp_path / "y.safetensors"), tree)
    assert_same(load(tmp_path / "mapped"), tree)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), TypeError("a bug"), ValueError("a bug"), KeyError("x")])
def test_errors_of_reading_are_not_damage(error, saved, monkeypatch):
    """An error of reading passes through as it is: it is not a sign of damage."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(open_module, "read_leaf", fail)
    monkeypatch.setattr(select, "view_leaves", fail)

    with tdfunc.open(saved[1] / "x.safetensors") as f, pytest.raises(type(error)) as caught:
        f["a"]
    assert caught.value is error
    with pytest.raises(type(error)) as caught:
        checkpoint.load(saved[1] / "x.safetensors")
    assert caught.value is error
