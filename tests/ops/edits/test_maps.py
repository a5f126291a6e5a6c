"""`apply` and `named_apply`: the leaves that a function sees, and the tree of its results."""

import pytest
import torch

from tdfunc import TensorDict
from tests.helpers import assert_pure


def test_apply():
    """A function gets every leaf once, with those of other trees, and its results keep batch size and names."""
    tree = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.zeros(3, dtype=torch.long)}, "s": "x"}, [3], names=["t"])
    other = TensorDict({"a": torch.full((3, 2), 4.0)}, [3])

    assert assert_pure(lambda t: t.apply(lambda x: x + 1), tree)["a"].unique().tolist() == [2]
    plain, placed = tree.apply(lambda x: x), tree.apply(lambda x: x, device="cpu")
    assert plain["s"] == "x"
    assert plain.names == ["t"]
    assert placed.names == ["t"]
    assert str(placed.device) == "cpu"
    assert list(tree.apply(lambda x: x if x.is_floating_point() else None).keys(True)) == ["a", "n", "s"]
    assert "n" not in tree.apply(lambda x: x if x.is_floating_point() else None, filter_empty=True)
    assert tree.exclude("n", "s").apply(torch.add, other)["a"].unique().tolist() == [5]
    assert tree.apply(lambda x, y: x if y is None else y, other, default=None)["a"].unique().tolist() == [4]
    filled = tree.apply(torch.add, TensorDict({"n": {"b": 7}}, [3]), default=2)
    assert [leaf.unique().tolist() for leaf in filled.leaves()] == [[3], [7]]
    flat = tree.apply(lambda x: x.sum(), batch_size=[], names=None, device="cpu")
    assert flat.batch_size == ()
    assert flat["n"].batch_size == ()
    assert flat.device == torch.device("cpu")
    assert tree.apply(lambda x: x[:, None], batch_size=[3, 1], names=["t", "u"]).names == ["t", "u"]
    seen = []
    tree.named_apply(lambda name, x: seen.append(name))
    tree.named_apply(lambda name, x: seen.append(name), nested_keys=True)
    assert seen == ["a", "b", "a", ("n", "b")]
    assert tree.exclude("n", "s").named_apply(lambda name, x, y: x + y, other)["a"].unique().tolist() == [5]


def test_apply_says_where_it_failed():
    """An error of the function has a note with the leaf."""
    tree = TensorDict({"a": torch.ones(3), "n": {"b": torch.zeros(2, 2)}})
    with pytest.raises(RuntimeError) as caught:
        tree.apply(lambda x: x @ torch.ones(3))

    assert caught.value.__notes__ == ["apply: raised at the leaf 'n.b'."]
