"""Flat trees of plain tensors are mapped by calls from C: the same numbers, layouts and flags as torch on each leaf."""

import pytest
import torch
from torch import Tensor, nn

from tdfunc import Kind, TensorDict

ROWS, COLUMNS = 4, 3


def one_shape() -> dict[str, Tensor]:
    """Return leaves of one shape, one of them strided."""
    strided = torch.randn(COLUMNS, ROWS, 2).transpose(0, 1)
    return {"a": torch.randn(ROWS, COLUMNS, 2), "b": torch.randn(ROWS, COLUMNS, 2), "c": strided}


@pytest.mark.parametrize("dim", [None, 0, 1, -1, (0, 1)])
@pytest.mark.parametrize("name", ["mean", "std", "var", "amax", "amin", "nansum", "nanmean"])
def test_reductions_of_a_flat_tree(name, dim):
    """A reduction by the tensor's own method would differ from torch's function in its dimensions."""
    given = one_shape()

    done = getattr(TensorDict(given, [ROWS, COLUMNS]), name)(dim)

    # The last batch dimension is not the last of a leaf.
    dims = {None: (0, 1, 2), -1: 1}.get(dim, dim)
    for key, x in given.items():
        assert torch.equal(done[key], getattr(torch, name)(x, dims))


def test_names_of_nested_trees_follow_their_own_batch():
    """A nested tree with a longer batch would get the names of its parent."""
    inner = TensorDict({"b": torch.zeros(4, 3, 5)}, [4, 3, 5], names=["p", "q", "r"])
    tree = TensorDict({"a": torch.zeros(4, 3), "s": inner}, [4, 3], names=["p", "q"])

    assert tree.unbind(0)[0]["s"].names == ["q", "r"]
    assert tree.split(2)[0]["s"].names == ["p", "q", "r"]
    assert tree.sum(0)["s"].names == ["q", "r"]
    assert torch.stack([tree, tree], 1)["s"].names == ["p", None, "q", "r"]


def test_positions_that_do_not_exist_raise_as_in_torch():
    """The second try, which counts rows from the end, would hide the error of the first."""
    tree = TensorDict({"a": torch.zeros(4, 3)}, [4, 3])

    with pytest.raises(IndexError, match="index 9 is out of bounds for dimension 0 with size 4"):
        tree[torch.tensor([9])]


def test_is_finite_records_nothing_and_leaves_integers_alone():
    """The subtraction behind it would be recorded by autograd, or done to integers in vain."""
    weight = nn.Parameter(torch.tensor([1.0, torch.inf, torch.nan]))
    done = TensorDict({"w": weight, "n": torch.tensor([1, 2, 3])}, [3]).isfinite()

    assert done["w"].tolist() == [True, False, False]
    assert not done["w"].requires_grad
    assert done["n"].tolist() == [True, True, True]


def test_small_masks_are_reduced_together():
    """One mask of many that is not all true would be lost."""
    masks = {f"k{i}": torch.ones(5, dtype=torch.bool) for i in range(20)}
    one_false = TensorDict(masks | {"k7": torch.tensor([True, True, False, True, True])}, [5])
    large = TensorDict({key: mask.repeat(1000) for key, mask in masks.items()})

    assert TensorDict(masks, [5]).all() is True
    assert one_false.all() is False
    assert (~one_false).any() is True
    assert (~TensorDict(masks, [5])).any() is False
    assert large.all() is True


def test_lerp_of_two_trees_is_torchs():
    """The kernel for all leaves would round otherwise, or make every result require a gradient."""
    start = TensorDict({"p": nn.Parameter(torch.randn(5)), "q": torch.randn(5)}, [5])
    end = TensorDict({"p": torch.randn(5), "q": torch.randn(5)}, [5])

    done = start.lerp(end, 0.3)

    assert torch.equal(done["p"], torch.lerp(start["p"], end["p"], 0.3))
    assert torch.equal(done["q"], torch.lerp(start["q"], end["q"], 0.3))
    assert (done["p"].requires_grad, done["q"].requires_grad) == (True, False)


def test_select_and_exclude_keep_the_order_of_the_tree():
    """Looking keys up one by one would give the order in which they are asked for."""
    tree = TensorDict({key: torch.zeros(2) for key in "abcd"}, [2])

    assert list(tree.select("d", "b", "b").keys()) == ["b", "d"]
    assert list(tree.select("d", "x", "a", strict=False).keys()) == ["a", "d"]
    assert tree.select("b", "a", "d", "c") is tree
    assert list(tree.exclude("c", "a", "x").keys()) == ["b", "d"]
    assert tree.exclude("x") is tree


@pytest.mark.parametrize("index", [2, -1, slice(1, 3), slice(None), slice(-2, None), slice(3, 1)], ids=repr)
def test_rows_of_a_flat_tree_keep_names_and_kinds(index):
    """The short way for one int or slice would lose what a tree knows besides its leaves."""
    tree = TensorDict(one_shape(), [ROWS, COLUMNS], names=["rows", "columns"])
    tree = tree.set("w", torch.ones(ROWS, COLUMNS), kind=Kind.BUFFER)

    done = tree[index]

    lead = torch.empty(ROWS, COLUMNS)[index].shape
    assert done.batch_size == lead
    assert done.names == (["columns"] if isinstance(index, int) else ["rows", "columns"])
    assert done.kind("w") is Kind.BUFFER
    assert torch.equal(done["a"], tree["a"][index])
