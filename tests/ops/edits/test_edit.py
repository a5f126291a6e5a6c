"""`set`, `update`, `delete`, `pop`: a new tree that shares what stays."""

import pytest
import torch

from tdfunc import Kind, TensorDict
from tests.helpers import assert_pure


@pytest.fixture
def td():
    """Two leaves, one nested, in a batch of three."""
    return TensorDict({"a": torch.arange(3.0), "n": {"b": torch.zeros(3, 2)}}, [3])


def test_set_is_pure_and_shares(td):
    """`set` leaves the tree as it is, copies nothing else and keeps the place of an entry."""
    new = assert_pure(lambda t: t.set(("n", "b"), torch.ones(3)), td)

    assert (td["n", "b"] == 0).all()
    assert new["a"] is td["a"]
    assert list(new.keys(True, True)) == ["a", ("n", "b")]
    assert td.set("a", new["a"])["n"] is td["n"]


def test_update_merges(td):
    """`update` merges sub-trees and takes over kinds."""
    other = TensorDict({"c": torch.ones(3)}, [3]).set("c", torch.ones(3), kind=Kind.BUFFER)
    new = assert_pure(lambda t: t.update({"n": other, ("n", "d"): 1}, e=2), td)

    assert set(new.keys(True, True)) == {"a", ("n", "b"), ("n", "c"), ("n", "d"), "e"}
    assert new.kind(("n", "c")) is Kind.BUFFER
    assert td.update() is td
    assert "e" not in td


def test_delete(td):
    """An entry goes, a nested one from its tree."""
    assert list(td.delete("a").keys()) == ["n"]
    assert td.delete(("n", "b"))["n"].is_empty()


def test_pop(td):
    """`pop` returns the entry and the tree without it."""
    value, rest = td.pop("a")

    assert value is td["a"]
    assert "a" not in rest


def test_pop_of_what_is_not_there(td):
    """`pop` returns the default and the tree itself."""
    value, rest = td.pop("z", 7)

    assert value == 7
    assert rest is td


def test_kinds_follow_edits(td):
    """A replaced leaf keeps its kind, and a new one has none."""
    new = td.set("a", td["a"], kind=Kind.PARAMETER)

    assert new.set("a", 0.0).kind("a") is Kind.PARAMETER
    assert new.delete("a").set("a", 0.0).kind("a") is None
    assert new.set("a", {"x": 1}).kind("a") is None
