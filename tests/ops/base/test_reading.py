"""Keys, values, leaves and membership."""

import pytest
import torch
from torch import Size

from tdfunc import TensorDict, in_dims


@pytest.fixture
def td():
    """Two levels, an empty sub-tree and a string."""
    return TensorDict(
        {"b": torch.zeros(3), "a": {"y": torch.ones(3, 2), "x": torch.ones(3)}, "e": {}, "s": "word"}, [3]
    )


def test_keys(td):
    """Keys come in insertion order or sorted, nested, empty and non-tensor ones among them."""
    assert list(td.keys()) == ["b", "a", "e", "s"]
    assert list(td.keys(sort=True)) == ["a", "b", "e", "s"]
    assert list(td.keys(True)) == ["b", "a", ("a", "y"), ("a", "x"), "e", "s"]
    assert list(td.keys(True, True)) == ["b", ("a", "y"), ("a", "x"), "s"]
    assert list(td.keys(True, True, sort=True)) == [("a", "x"), ("a", "y"), "b", "s"]
    assert list(td.keys(leaves_only=True)) == ["b", "s"]
    assert td.paths() == [("b",), ("a", "y"), ("a", "x")]
    assert [leaf.shape for leaf in td.leaves()] == [Size([3]), Size([3, 2]), Size([3])]


def test_keys_are_a_set(td):
    """Keys of two trees compare and combine as sets."""
    assert td.keys() == {"a", "b", "e", "s"}
    assert td.keys() & {"a", "z"} == {"a"}
    assert td.keys() - td.exclude("s").keys() == {"s"}
    assert len(td.keys(True, True)) == 4
    assert repr(td.keys()) == "keys(['b', 'a', 'e', 's'])"


def test_membership(td):
    """A tree has its paths, and a view of keys those that it yields; a value of None is there."""
    assert all(key in td for key in ("a", ("a", ("x",))))
    assert not any(key in td for key in (("a", "z"), ("b", "z"), 0))
    assert ("a", "x") in td.keys(include_nested=True)
    assert "a" not in td.keys(True, True)
    keys = td.keys()
    assert 0 not in keys
    assert "a" in in_dims(TensorDict({"a": torch.zeros(1)}), None)


def test_reading(td):
    """A value is read by key, path or pair, with a default."""
    assert td.get("b") is td["b"]
    assert dict(zip(td.keys(), td.values(), strict=True)) == dict(td.items())
    assert td.get("z") is None
    assert td.get(("b", "z"), 5) == 5
    assert td["a", ("x",)] is td["a"]["x"]
    assert td.items(True, True)[::3] == [("b", td["b"]), ("s", "word")]
    assert [key for key, _ in td.items(sort=True)] == ["a", "b", "e", "s"]
    assert [tree.is_empty() for tree in (td, TensorDict({"a": {}}))] == [False, True]
