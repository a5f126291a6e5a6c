"""`load` with `like=`, `where=` and `dtype=`: what is compared, read and cast."""

import types
from collections import namedtuple

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tdfunc
from tdfunc import (
    CorruptCheckpointError,
    Filter,
    FilterError,
    LeafMismatchError,
    TensorDict,
    TreeStructureError,
    lazy_stack,
    partition,
)
from tdfunc.core.collection import iter_leaves
from tdfunc.storage.api import load, save
from tests.helpers import examples
from tests.storage.trees import DTYPES, assert_same, of_dtype, tied_trees, trees

Spec = namedtuple("Spec", ["shape", "dtype"])


def saved(tree, folder, **options):
    """The name of a file (or folder of shards) that holds a tree."""
    path = folder / ("shards" if options else "t.safetensors")
    save(tree, path, fsync=False, **options)
    return path


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 30}], ids=["file", "shards"])
@examples(0.4)
@given(tree=trees() | tied_trees(), choice=st.randoms(use_true_random=False))
def test_keys_choose_as_partition_does(options, tree, choice, tmp_path_factory):
    """A filter chooses the leaves that `partition` chooses, with their ties, and no non-tensor data."""
    path = saved(tree, tmp_path_factory.getbasetemp(), **options)
    chosen = {at for at, _ in iter_leaves(tree) if choice.random() < 0.5}
    where = Filter(lambda at, leaf: at in chosen)

    assert_same(load(path, where=where), partition(load(path), where)[0])
    with tdfunc.open(path) as f:
        assert_same(f.load(where=where), partition(load(path), where)[0])


@examples(0.4)
@given(tree=trees() | tied_trees())
def test_a_tree_is_like_itself(tree, tmp_path_factory):
    """A tree is like itself, its meta tree, and a nested dict of specs."""
    path = saved(tree, tmp_path_factory.getbasetemp())
    specs = {at: Spec(tuple(leaf.shape), leaf.dtype) for at, leaf in iter_leaves(tree)}

    for like in (tree, load(path, device="meta"), specs):
        assert_same(load(path, like=like), tree)


def test_filters_read_and_verify_only_their_leaves(tmp_path):
    """A filter maps, reads and verifies its own leaves; a pattern that matches none is an error."""
    path = saved(TensorDict({"a": torch.ones(100), "b": torch.zeros(100)}), tmp_path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)

    assert_same(chosen := load(path, where="a"), TensorDict({"a": torch.ones(100)}))
    assert (path / "/proc/self/maps").read_text().count(f"{path}\n") == len(chosen.keys())
    with pytest.raises(CorruptCheckpointError, match='leaf "b" is damaged'):
        load(path, where="b")
    with pytest.raises(FilterError, match="'c' matches no leaf"):
        load(path, where="c")


@pytest.mark.parametrize(
    "line",
    [
        "4 differences",
        "missing:    e (bool [1])",
        "unexpected: b.d (float32 [1])",
        "shape:      a: expected [4], got [2]",
        "dtype:      b.c: expected int64, got float32",
    ],
)
def test_every_difference_is_listed(tmp_path, line):
    """One error lists all differences, each with both sides."""
    path = saved(TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(3), "d": torch.zeros(1)}, "n": "x"}), tmp_path)
    like = {"a": Spec((4,), torch.float32), "b": {"c": Spec((3,), torch.int64)}, "e": Spec((1,), torch.bool)}

    with pytest.raises(TreeStructureError) as caught:
        load(path, like=like)

    message = str(caught.value)
    assert f"load {path}: " in message
    assert line in message


def test_dots_in_keys(tmp_path):
    """Where dots in keys are the difference, the error shows both and gives the line that mends it."""
    tree = TensorDict.from_module(nn.Linear(3, 2)).detach()
    path = saved(TensorDict({"net": tree}), tmp_path)
    flat = {f"net.{name}": leaf for name, leaf in tree.items()}
    with pytest.raises(TreeStructureError, match=r"missing:    \('net\.bias',\)[\s\S]*unexpected: \('net', 'bias'\)"):
        load(path, like=flat)
    with pytest.raises(TreeStructureError, match=r"like= has keys with dots: [\s\S]*unflatten_keys\('\.'\)"):
        load(path, like=flat)
    assert load(path, like=TensorDict(flat).unflatten_keys(".")).paths() == [("net", "weight"), ("net", "bias")]

    path, like = saved(TensorDict(flat), tmp_path), TensorDict({"net": tree})
    with pytest.raises(TreeStructureError, match=r"the checkpoint has keys with dots: [\s\S]*unflatten_keys\('\.'\)"):
        load(path, like=like)
    assert load(path, like=like.flatten_keys(".")).unflatten_keys(".").paths() == like.paths()


def test_what_may_be_like(tmp_path):
    """A module's tree on the meta device, numpy arrays and specs without a shape or dtype can be `like`."""
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    real = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    path = saved(TensorDict.from_module(real), tmp_path)
    specs = types.SimpleNamespace(keys=lambda: ["0"], items=lambda: [("0", {"weight": np.ones((2, 3), np.float32)})])

    assert_same(load(path, like=TensorDict.from_module(meta)), TensorDict.from_module(real))
    assert load(path, like=specs, where="0.weight").paths() == [("0", "weight")]
    assert load(path, like={("0", "bias"): Spec((2,), None)}, where="0.bias").paths() == [("0", "bias")]
    assert load(path, like={"0": {"bias": Spec(None, np.float32)}}, where="0.bias").paths() == [("0", "bias")]


def test_like_of_a_lazy_stack(tmp_path):
    """The trees of a lazy stack are compared one by one."""
    tree = TensorDict({"s": lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (1, 2)])})
    path = saved(tree, tmp_path)
    other = TensorDict({"s": lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (1, 3)])})

    assert_same(load(path, like=tree), tree)
    with pytest.raises(LeafMismatchError, match=r"s\.1\.x: expected \[3\], got \[2\]"):
        load(path, like=other)


@pytest.fixture
def mixed(tmp_path):
    """A tree with a leaf of each dtype, a Parameter and a value, and its file."""
    tree = TensorDict({name: of_dtype(name, (2, 4)) for name in DTYPES[:-2]}, [2])
    tree = tree.set("p", nn.Parameter(torch.randn(2, 2), requires_grad=False))
    tree = tree.set("v", tdfunc.NonTensorData(torch.ones(2), [2]))
    return tree, saved(tree, tmp_path)


def test_dtype_casts_floating_leaves_and_no_others(mixed):
    """Other leaves and values do not change."""
    tree, path = mixed
    back = load(path, dtype=torch.bfloat16)

    leaves = {key: tree[key].detach() for key in (*DTYPES[:-2], "p")}
    expected = {key: leaf.to(torch.bfloat16) if leaf.is_floating_point() else leaf for key, leaf in leaves.items()}
    found = {key: back[key].detach() for key in leaves}
    assert {key: leaf.dtype for key, leaf in found.items()} == {key: leaf.dtype for key, leaf in expected.items()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert back["v"].dtype == torch.float32


def test_cast_parameters_stay_parameters(mixed):
    """Without a gradient where they had none."""
    back = load(mixed[1], dtype=torch.bfloat16)

    assert type(back["p"]) is nn.Parameter
    assert not back["p"].requires_grad


@pytest.mark.parametrize("options", [{"device": "meta"}, {"where": "p"}], ids=["meta", "where"])
def test_dtype_casts_what_is_loaded_in_another_way(mixed, options):
    """Without values, or of one leaf."""
    assert load(mixed[1], dtype=torch.float16, **options)["p"].dtype == torch.float16


def test_like_compares_what_dtype_gives(tmp_path):
    """`like` is compared with the cast leaves."""
    path = saved(TensorDict({"a": torch.ones(2), "i": torch.arange(2)}), tmp_path)
    like = {"a": Spec((2,), torch.bfloat16), "i": Spec((2,), torch.int64)}

    assert load(path, like=like, dtype=torch.bfloat16)["a"].dtype == torch.bfloat16
    with pytest.raises(LeafMismatchError, match="a: expected bfloat16, got float32"):
        load(path, like=like)


def test_memmap_folders(tmp_path):
    """The options work on a memmap folder."""
    tree = TensorDict({"a": torch.ones(2, 3), "b": {"i": torch.arange(2)}, "s": "text"}, [2])
    tree.memmap(tmp_path / "m")

    assert_same(load(tmp_path / "m"), tree)
    assert load(tmp_path / "m", where="b.*").paths() == [("b", "i")]
    assert load(tmp_path / "m", dtype=torch.float16)["a"].dtype == torch.float16
    with pytest.raises(LeafMismatchError, match=r"a: expected \[3\], got \[2, 3\]"):
        load(tmp_path / "m", like={"a": torch.ones(3), "b": {"i": torch.arange(2)}})


@pytest.mark.parametrize("stored", [["a"], ["b"], ["a", "b"]])
def test_like_of_a_model_that_ties(stored, tmp_path):
    """One name of a tied leaf is enough."""
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["b"].weight = module["a"].weight
    safetensors.torch.save_file({f"{name}.weight": torch.ones(2, 2) for name in stored}, tmp_path / "f.safetensors")
    loaded = load(tmp_path / "f.safetensors", like=tdfunc.from_module(module))
    loaded.to_module(module)

    assert loaded.paths() == [(name, "weight") for name in stored]
    assert module["b"].weight is module["a"].weight
    assert module["a"].weight.tolist() == [[1, 1], [1, 1]]


def test_like_of_a_model_that_ties_and_is_not_there(tmp_path):
    """A tied leaf under none of its names is an error."""
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["b"].weight = module["a"].weight
    safetensors.torch.save_file({"c": torch.ones(1)}, tmp_path / "f.safetensors")

    with pytest.raises(TreeStructureError, match=r"3 differences(.|\n)*missing: +a\.weight(.|\n)*missing: +b\.weight"):
        load(tmp_path / "f.safetensors", like=tdfunc.from_module(module))


OPTIONS_OF_SAVES = pytest.mark.parametrize("options", [{}, {"max_shard_size": 40}], ids=["file", "shards"])


def of_two(folder, options):
    """A file of a vector and a matrix."""
    return saved(TensorDict({"a": torch.ones(3), "b": {"c": torch.zeros(2, 2)}}), folder, **options)


@OPTIONS_OF_SAVES
def test_predicates_see_paths_and_shapes(options, tmp_path):
    """And choose by both."""
    path = of_two(tmp_path, options)

    assert load(path, where=lambda p, x: x.dim() == 2 and p[0] == "b").paths() == [("b", "c")]


@OPTIONS_OF_SAVES
@pytest.mark.parametrize(
    "ask",
    [lambda x: (x > 0).any(), lambda x: x.sum().item(), torch.Tensor.tolist, torch.Tensor.numpy, torch.nonzero],
    ids=["any", "item", "tolist", "numpy", "nonzero"],
)
def test_predicates_have_no_values(options, ask, tmp_path):
    """A predicate that reads values ends in torch's error about meta tensors."""
    path = of_two(tmp_path, options)
    with pytest.raises((RuntimeError, TypeError), match="meta"):
        load(path, where=lambda _, x: ask(x))


@OPTIONS_OF_SAVES
def test_errors_of_predicates_pass(options, tmp_path):
    """As they are."""
    path = of_two(tmp_path, options)

    def fail(*_):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="^mine$"):
        load(path, where=fail)
