"""Trees made from a tree: empty ones, new leaves, replaced and split entries."""

import pytest
import torch

from tdfunc import TensorClass, TensorDict
from tests.helpers import assert_pure, assert_trees_equal

A, B = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2])


class Point(TensorClass):
    x: torch.Tensor


@pytest.fixture
def td():
    """A batch of two with a nested tree, one string for each row, and names."""
    return TensorDict({"a": A, "n": {"b": B, "s": ["p", "qq"]}}, [2], names=["rows"])


def test_empty(td):
    """An empty tree keeps the batch size, device and names."""
    assert_trees_equal(td.empty(), TensorDict({}, [2], names=["rows"]))
    assert_trees_equal(td.empty(recurse=True), TensorDict({"n": {}}, [2], names=["rows"]))
    other = td.set(("n", "m", "x"), A).to("cpu").empty(True, batch_size=[5, 2], device=None, names=["u", "v"])
    assert_trees_equal(other, TensorDict({"n": {"m": {}}}, [5, 2], names=["u", "v"]))
    assert td.to("cpu").empty().device == torch.device("cpu")
    assert type(Point(A, batch_size=[2]).empty()) is TensorDict


@pytest.fixture
def source():
    """A leaf, a sub-tree with a further batch dimension, and a value."""
    return TensorDict({"a": A, "n": TensorDict({"b": A.long()}, [2, 3]), "s": "x"}, [2])


@pytest.mark.parametrize("name", ["new_zeros", "new_ones", "new_empty"])
def test_sizes_of_new(name, source):
    """New leaves keep their features, and sub-trees their further batch dimensions."""
    found = getattr(source, name)(4, 1)

    assert found.batch_size == (4, 1)
    assert found["n"].batch_size == (4, 1, 3)
    assert found["a"].shape == (4, 1, 3)
    assert getattr(source, name)()["a"].shape == getattr(source, name)([])["a"].shape == (3,)


@pytest.mark.parametrize("name", ["new_zeros", "new_ones", "new_empty"])
def test_options_of_new(name, source):
    """Leaves have the dtype and device that are given; values stay."""
    found = getattr(source, name)(4, 1, dtype=torch.float64, device="cpu")

    assert found["n", "b"].dtype == torch.float64
    assert found["s"] == "x"
    assert found.device == found["n"].device == getattr(found, name)(3).device == torch.device("cpu")


@pytest.mark.parametrize("name", ["new_zeros", "new_ones"])
def test_values_of_new(name, source):
    """New leaves have torch's values."""
    found = getattr(source, name)(4, 1, dtype=torch.float64)

    assert torch.equal(found["a"], getattr(A, name)(4, 1, 3, dtype=torch.float64))


def test_new_full():
    """Every leaf is filled with the value in its own dtype."""
    found = TensorDict({"a": A, "b": B}, [2]).new_full((3,), 7)

    assert found["a"].unique().tolist() == found["b"].unique().tolist() == [7]
    assert found["b"].dtype is torch.int64
    assert TensorDict({"a": A}, [2]).new_full(3, 7).batch_size == (3,)


def test_replace(td):
    """A replaced sub-tree is not merged with the old one, and the tree stays as it was."""
    found = assert_pure(lambda t: t.replace({"n": {"c": B}}, a=B, new=1.0), td)

    assert list(found.keys(True, True)) == ["a", ("n", "c"), "new"]
    assert found["a"] is B
    assert list(td.keys()) == ["a", "n"]
    assert_trees_equal(td.replace(TensorDict({"n": {"c": B}, "a": B}, [2]), new=1.0), found)


def test_split_keys(td):
    """Each part has its keys under their new names, and the rest has the others."""
    first, second, rest = td.split_keys([("n", "b")], {"a": "x", ("n", "s"): "words"})
    loose = td.split_keys(["gone"], strict=False)

    assert [list(part.keys(True)) for part in (first, second, rest)] == [["n", ("n", "b")], ["x", "words"], []]
    assert [part.batch_size for part in (first, second, rest)] == [(2,)] * 3
    assert list(loose[0].keys()) == []
    assert_trees_equal(loose[1], td)
