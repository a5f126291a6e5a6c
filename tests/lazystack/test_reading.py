"""Reading, construction and indices of lazy stacks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size

from tdfunc import TensorDict, TreeStructureError
from tdfunc._lazystack import LazyStack, lazy_stack
from tests.lazystack.trees import ragged, tree, uniform


@pytest.mark.parametrize("lengths", [(2, 4, 3), (3, 3, 3)], ids=["ragged", "equal"])
def test_reading_does_not_depend_on_lengths(lengths):
    """A key reads as a tuple, list or lazy stack, also when lengths happen to agree."""
    lazy = lazy_stack(ragged(lengths))

    assert type(lazy["x"]) is tuple
    assert [x.shape[0] for x in lazy["x"]] == list(lengths)
    assert lazy["x"][1] is lazy.trees[1]["x"]
    assert lazy["s"] == [t["s"] for t in lazy.trees]
    assert lazy._get("s").shape == Size([3])
    assert isinstance(lazy["n"], LazyStack)
    assert lazy["n", "y"][2] is lazy.trees[2]["n", "y"]
    assert lazy.get("x") == lazy["x"]
    assert lazy.get("missing") is None
    assert list(lazy.keys()) == ["x", "n", "s"]
    assert list(lazy.keys(True, True)) == ["x", ("n", "y"), "s"]


@pytest.mark.parametrize(("dim", "size"), [(0, [3, -1]), (1, [-1, 3]), (-1, [-1, 3]), (-2, [3, -1])])
def test_batch_size(dim, size):
    """Unequal lengths show as -1, and the number of trees stands at the stack dimension."""
    lazy = lazy_stack(ragged(), dim)

    assert lazy.batch_size == lazy.shape == Size(size)
    assert lazy.stack_dim == size.index(3)
    assert lazy.numel() == 9
    assert lazy.ndim == 2
    assert lazy.batch_dims == 2


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_law_rows_are_the_trees(lengths):
    """`lazy_stack(trees)[i]` is `trees[i]`, and a loop sees each."""
    trees = ragged(lengths)
    lazy = lazy_stack(trees)

    assert len(lazy) == len(trees)
    for i, (row, mine, slow) in enumerate(zip(lazy, trees, lazy.unbind(0), strict=True)):
        assert row is mine
        assert slow is mine
        assert lazy[i] is mine
        assert lazy[i - len(trees)] is mine


def test_keys_of_some_trees():
    """Keys that only some trees have stay in their trees and follow every operation there; conversions refuse them."""
    lazy = lazy_stack(
        [TensorDict({"a": torch.zeros(2), "b": torch.ones(2)}, [2]), TensorDict({"a": torch.zeros(3)}, [3])]
    )

    assert list(lazy.keys()) == ["a"]
    assert "b" not in lazy
    assert (lazy * 2).trees[0]["b"].tolist() == [2, 2]
    assert "b: in trees [0]" in repr(lazy)
    assert list(lazy.update({"b": 0.0}).keys()) == ["a", "b"]
    assert list(lazy.select("a").trees[0].keys()) == ["a"]
    for each in (lazy, TensorDict({"n": lazy}), lazy_stack([TensorDict({"m": part}) for part in lazy.trees])):
        for call in ("to_dict", "state_dict", "numpy", "to_namedtuple"):
            with pytest.raises(TreeStructureError, match=rf"{call}: the key 'b' is not in all trees(.|\n)*trees \[0\]"):
                getattr(each, call)()
    assert [x.tolist() for x in lazy.select("a").to_dict()["a"]] == [[0, 0], [0, 0, 0]]


def test_repr():
    """The text shows sizes that differ as -1."""
    text = repr(lazy_stack(ragged((2, 4)), 0).with_names([None, "t"]))

    assert "x: Tensor(2 x [-1, 2], float32, cpu)" in text
    assert "s: [['0.0', '0.1'], ['1.0', '1.1', '1.2', '1.3']]" in text
    assert "batch_size=torch.Size([2, -1])" in text
    assert "names=[None, 't'],\n    stack_dim=0)" in text
    apart = lazy_stack([TensorDict({"x": torch.zeros(2)}), TensorDict({"x": torch.zeros(2, dtype=torch.int64)})])
    assert "x: Tensor(2 x [2], differ, cpu)" in repr(apart)
    assert "x: Tensor(2 x shapes differ, float32, cpu)" in repr(lazy_stack([apart[0], apart[0].set("x", torch.eye(2))]))


def test_names_and_device():
    """A stack has the names and the device that its trees share, and no name for its own dimension."""
    lazy, there, anywhere = lazy_stack([t.with_names(["time"]) for t in ragged()]), tree(2).to("cpu"), tree(3)

    assert lazy_stack([there, there]).device == torch.device("cpu")
    assert lazy_stack([there, anywhere]).device is lazy_stack([anywhere, there]).device is None
    assert lazy.names == [None, "time"]
    assert lazy_stack(ragged()).with_names([None, "t"])[0].names == ["t"]
    assert (lazy.permute(1, 0) * 2)[:, :2].names == ["time", None]
    assert lazy.pad().names == [None, "time"]
    assert lazy["n"].names == lazy.with_names(None).names == lazy_stack([lazy[0], tree(2)]).names == [None, None]
    with pytest.raises(ValueError, match="the stack dimension 0 must have no name"):
        lazy.with_names(["batch", "time"])


def test_with_batch_size():
    """The trees get the other dimensions of a new batch size."""
    lazy = lazy_stack(uniform())

    assert lazy.with_batch_size([3, 4])[0].batch_size == Size([4])
    assert lazy.with_batch_size([3]).exclude("s").with_batch_size([3, 4, 2]).batch_size == Size([3, 4, 2])
    assert lazy_stack(ragged()).with_batch_size([3]).batch_size == Size([3])
