"""`apply` and `named_apply`: the leaves that a function sees, and the tree of its results."""

import pytest
import torch

from tdfunc import TensorDict
from tests.helpers import assert_pure


@pytest.fixture
def tree():
    """Leaves of two dtypes, one of them nested, a value and a name."""
    return TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.zeros(3, dtype=torch.long)}, "s": "x"}, [3], names=["t"])


OTHER = TensorDict({"a": torch.full((3, 2), 4.0)}, [3])


def test_apply(tree):
    """A function gets every leaf, and its results keep values and names, also on another device."""
    plain, placed = tree.apply(lambda x: x), tree.apply(lambda x: x, device="cpu")

    assert assert_pure(lambda t: t.apply(lambda x: x + 1), tree)["a"].unique().tolist() == [2]
    assert plain["s"] == "x"
    assert plain.names == ["t"]
    assert placed.names == ["t"]
    assert str(placed.device) == "cpu"


def test_apply_drops_leaves(tree):
    """A leaf for which the function returns None goes; a tree without leaves stays, unless it is filtered."""
    floating = lambda x: x if x.is_floating_point() else None  # noqa: E731

    assert list(tree.apply(floating).keys(True)) == ["a", "n", "s"]
    assert "n" not in tree.apply(floating, filter_empty=True)


def test_apply_to_several_trees(tree):
    """The function gets the leaves of other trees, or the default where they have none."""
    filled = tree.apply(torch.add, TensorDict({"n": {"b": 7}}, [3]), default=2)

    assert tree.exclude("n", "s").apply(torch.add, OTHER)["a"].unique().tolist() == [5]
    assert tree.apply(lambda x, y: x if y is None else y, OTHER, default=None)["a"].unique().tolist() == [4]
    assert [leaf.unique().tolist() for leaf in filled.leaves()] == [[3], [7]]


def test_apply_gives_another_batch(tree):
    """Results have the batch size, names and device that are given."""
    flat = tree.apply(lambda x: x.sum(), batch_size=[], names=None, device="cpu")

    assert flat.batch_size == ()
    assert flat["n"].batch_size == ()
    assert flat.device == torch.device("cpu")
    assert tree.apply(lambda x: x[:, None], batch_size=[3, 1], names=["t", "u"]).names == ["t", "u"]


@pytest.mark.parametrize(("options", "names"), [({}, ["a", "b"]), ({"nested_keys": True}, ["a", ("n", "b")])])
def test_named_apply(tree, options, names):
    """A function gets each leaf once, with its key or path."""
    seen = []
    tree.named_apply(lambda name, x: seen.append(name), **options)

    assert seen == names


def test_named_apply_to_several_trees(tree):
    """A function gets a leaf's key, and the leaves of all trees."""
    found = tree.exclude("n", "s").named_apply(lambda name, x, y: x + y, OTHER)

    assert found["a"].unique().tolist() == [5]


def test_apply_says_where_it_failed():
    """An error of the function has a note with the leaf."""
    tree = TensorDict({"a": torch.ones(3), "n": {"b": torch.zeros(2, 2)}})
    with pytest.raises(RuntimeError) as caught:
        tree.apply(lambda x: x @ torch.ones(3))

    assert caught.value.__notes__ == ["apply: raised at the leaf 'n.b'."]
