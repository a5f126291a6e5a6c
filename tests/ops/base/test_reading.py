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


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, ["b", "a", "e", "s"]),
        ({"sort": True}, ["a", "b", "e", "s"]),
        ({"include_nested": True}, ["b", "a", ("a", "y"), ("a", "x"), "e", "s"]),
        ({"include_nested": True, "leaves_only": True}, ["b", ("a", "y"), ("a", "x"), "s"]),
        ({"include_nested": True, "leaves_only": True, "sort": True}, [("a", "x"), ("a", "y"), "b", "s"]),
        ({"leaves_only": True}, ["b", "s"]),
    ],
    ids=str,
)
def test_keys(td, options, keys):
    """Keys come in insertion order or sorted, nested, empty and non-tensor ones among them."""
    assert list(td.keys(**options)) == keys


def test_options_of_keys_by_position(td):
    """The first two options of `keys` are taken by position."""
    assert list(td.keys(True)) == list(td.keys(include_nested=True))
    assert list(td.keys(True, True)) == list(td.keys(include_nested=True, leaves_only=True))


def test_paths_and_leaves(td):
    """Paths and leaves are those of tensors, in insertion order."""
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


def test_a_value_is_read_by_its_path(td):
    """A path may have parts that are tuples."""
    assert td["a", ("x",)] is td["a"]["x"]


def test_get(td):
    """`get` reads an entry, or gives the default, None unless it is given."""
    assert td.get("b") is td["b"]
    assert td.get("z") is None
    assert td.get(("b", "z"), 5) == 5


def test_items(td):
    """Items are the pairs of keys and values, with the options of `keys`."""
    assert dict(zip(td.keys(), td.values(), strict=True)) == dict(td.items())
    assert td.items(True, True)[::3] == [("b", td["b"]), ("s", "word")]
    assert [key for key, _ in td.items(sort=True)] == ["a", "b", "e", "s"]


def test_is_empty(td):
    """A tree without a leaf or value at any depth is empty."""
    assert not td.is_empty()
    assert TensorDict({"a": {}}).is_empty()
