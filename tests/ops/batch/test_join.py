"""`stack` and `cat`: any iterable of trees, non-tensor data, gradients."""

import pytest
import torch

from tdfunc import LeafMismatchError, NonTensorStack, TensorDict, TreeStructureError, cat, stack
from tests.helpers import assert_trees_equal


@pytest.fixture
def td():
    """A batch of two dimensions, a nested one of three, names and a string."""
    leaves = {"a": torch.arange(12).reshape(2, 3, 2), "n": TensorDict({"b": torch.randn(2, 3, 4, 5)}, [2, 3, 4])}
    return TensorDict(leaves | {"s": "x"}, [2, 3], names=["r", "c"])


@pytest.mark.parametrize("join", [stack, cat])
@pytest.mark.parametrize(
    "given", [iter, tuple, lambda trees: (tree for tree in trees), lambda trees: dict.fromkeys(trees)]
)
def test_joins_take_any_iterable(td, join, given):
    """An iterator, which can be read once, gives all of its trees."""
    trees = [td, td.clone(), td.clone()]

    assert_trees_equal(join(given(trees)), join(trees))


@pytest.mark.parametrize("join", [stack, cat])
def test_a_tree_is_an_iterable_of_its_rows(td, join):
    """`DataLoader(tree, collate_fn=torch.stack)` gives a tree for a batch."""
    assert_trees_equal(join(td), join(list(td)))


def test_joins_of_words(td):
    """Stacked values are one for each tree; equal values of one longer batch stay one."""
    assert isinstance(stack([td, td])._get("s"), NonTensorStack)
    assert cat([td, td])["s"] == "x"
    assert cat([td, td.set("s", "y")])["s"] == [["x"] * 3] * 2 + [["y"] * 3] * 2


def test_gradients_flow():
    """A join or cut is part of the graph."""
    leaf = torch.ones(3, requires_grad=True)
    tree = TensorDict({"a": leaf}, [3])
    torch.stack([tree, tree[[0, 0, 1]]]).reshape(-1).unbind(0)[3]["a"].backward()

    assert leaf.grad.tolist() == [1, 0, 0]


def part(make):
    """A tree of two nodes, with a leaf of `make`."""
    return TensorDict({"a": torch.ones(2, 3), "n": {"b": make(2, 3)}}, [2])


OTHERS = {
    "dtype": part(lambda *size: torch.ones(*size, dtype=torch.float64)),
    "shape": part(lambda *size: torch.ones(*size, 1)),
    "key": part(torch.ones).rename_key(("n", "b"), ("n", "c")),
    "node": part(torch.ones).set("n", torch.ones(2)),
}


@pytest.mark.parametrize("join", [stack, cat])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("place", range(4))
def test_one_of_four_that_differs(join, other, place):
    """A single tree that does not fit is refused, wherever it is among the others."""
    trees = [part(torch.ones) for _ in range(4)]
    trees[place] = other

    with pytest.raises((LeafMismatchError, TreeStructureError)):
        join(trees)
