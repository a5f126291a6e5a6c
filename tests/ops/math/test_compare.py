"""`assert_close`, `torch.equal` and `torch.allclose` of trees: equal pairs pass, and the first difference is named."""

import pytest
import torch
from hypothesis import given

import tdfunc as tdf
from tdfunc import TensorDict, assert_close, lazy_stack, tree_equal
from tests.helpers import TiedLM
from tests.strategies import pairs

ONE = TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.tensor([1.0, torch.nan])}, "s": ["p", "q"]}, [2])


def ragged(value):
    """Rows of different lengths."""
    return lazy_stack([TensorDict({"x": torch.full((n,), value), "s": "t"}, [n]) for n in (1, 2)])


@given(pairs())
def test_a_copy_is_equal(found):
    """A tree equals its copy."""
    tree, _, _ = found

    assert_close(tree, tree.clone(), rtol=0, atol=0)
    assert torch.equal(tree, tree.clone())


@given(pairs())
def test_one_leaf_that_differs_is_found(found):
    """A tree differs from one with another value in one leaf, which is named."""
    tree, other, path = found

    assert not torch.equal(tree, other)
    assert not torch.allclose(tree, other, 0, 0)
    with pytest.raises(AssertionError, match="differs") as caught:
        assert_close(tree, other)
    tied = [group for group in tree._ties if path in group]
    assert any(repr(".".join(each)) in str(caught.value) for each in [path, *sum(tied, ())])


def test_close_trees_pass():
    """Rounding, NaN at the same place and another order of keys are no difference."""
    near = ONE.set("a", ONE["a"] + 1e-7)

    assert_close(ONE, near)
    assert_close(ONE, near.select("s", "n", "a"))
    assert_close(ONE, ONE.set("a", ONE["a"] + 0.1), rtol=0, atol=0.2)
    assert_close(ragged(1.0), ragged(1.0))
    assert torch.allclose(ONE, near, equal_nan=True)
    assert torch.equal(ragged(1.0), ragged(1.0).clone())


WORSE = [
    (ONE.set("a", ONE["a"] + 1), r"'a' differs.\n(.*\n)*.*Greatest absolute difference: 1"),
    (ONE.set(("n", "b"), torch.tensor([1.0, 2.0])), r"'n.b' differs"),
    (ONE.set("a", ONE["a"].double()), r"'a' differs.\n.*dtype"),
    (ONE.set("a", torch.ones(2, 2)), r"'a' differs.\n.*shape"),
    (ONE.set("s", ["p", "r"]), r"values of 's' differ.\n.*\['p', 'r'\]\n.*\['p', 'q'\]"),
    (ONE.with_batch_size([]), r"batch size of the tree differ.\n.*\[\]\n.*\[2\]"),
]


@pytest.mark.parametrize(("other", "message"), WORSE)
def test_a_difference_is_named(other, message):
    """A difference in values, dtype, shape, data or batch size is named, and makes trees unequal."""
    with pytest.raises(AssertionError, match=message):
        assert_close(ONE, other)
    assert not torch.equal(ONE, other)
    assert not tree_equal(ONE, other, equal_nan=True)


def test_a_ragged_leaf_that_differs():
    """A difference in a lazy stack is found, named by the key and the number of the tree."""
    assert not torch.allclose(ragged(1.0), ragged(2.0))
    with pytest.raises(AssertionError, match="'x' differs") as caught:
        assert_close(ragged(1.0), ragged(2.0))
    assert caught.value.__notes__ == ["In tree 0 of the lazy stack."]


def test_batch_sizes_that_differ():
    """Trees of other batch sizes differ, and so do lazy stacks of another number of trees."""
    with pytest.raises(AssertionError, match="batch size of the tree differ"):
        assert_close(ragged(1.0), ragged(1.0)[:1])
    assert not torch.equal(TensorDict({"x": torch.ones(2, 3)}, [2]), TensorDict({"x": torch.ones(2, 3)}, [2, 3]))


def test_nan_differs():
    """NaN where it must not be is a difference."""
    with pytest.raises(AssertionError, match="'n.b' differs"):
        assert_close(ONE, ONE, equal_nan=False)
    assert not torch.equal(ONE, ONE)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: ONE.exclude("n"), lambda: ONE.exclude("n", "s")),
        (lambda: ONE.exclude("n"), lambda: ONE.exclude("n").set("s", ["p", "r"])),
        (lambda: ragged(1.0), lambda: lazy_stack([ragged(1.0)[0].set("k", 1.0), ragged(1.0)[1]])),
    ],
    ids=["a value that one has not", "another value", "a key of one tree"],
)
def test_keys_and_values_that_differ(one, other):
    """Trees with other keys or values are not equal."""
    assert not torch.equal(one(), other())


@given(pairs())
def test_tree_equal(found):
    """A tree equals its copy and its other order, and no tree with another value in one leaf; so do tuples of trees."""
    tree, other, _ = found

    assert tree_equal(tree, tree.clone(), equal_nan=True)
    assert tree_equal((tree, [1, None]), (tree.clone(), [1, None]), equal_nan=True)
    assert not tree_equal(tree, other, equal_nan=True)
    assert not tree_equal((tree, 1), (tree, 1.0), equal_nan=True)
    assert not tree_equal((tree, 1), [tree, 1], equal_nan=True)
    assert not tree_equal((tree, torch.tensor(1)), (tree, 1), equal_nan=True)


def test_tolerances():
    """NaN and rounding count unless they are named; whole numbers have no rounding."""
    near = ONE.set("a", ONE["a"] + 1e-4)
    counts = TensorDict({"n": torch.tensor([10**6])})

    assert not tree_equal(ONE, ONE)
    assert not tree_equal(ONE, near, equal_nan=True)
    assert tree_equal(ONE, near.select("s", "n", "a"), atol=1e-3, equal_nan=True)
    assert tree_equal(ONE, near, rtol=1e-3, equal_nan=True)
    assert not tree_equal(counts, counts + 1, rtol=0.1, atol=10)


def test_batch_sizes_inside():
    """A nested batch size, a tie, a class and a row of a ragged stack are part of the structure."""
    inner = TensorDict({"x": torch.ones(2, 3)}, [2])
    tied = tdf.from_module(TiedLM())

    assert not tree_equal(TensorDict({"n": inner}), TensorDict({"n": inner.with_batch_size([2, 3])}))
    assert not tree_equal(tied, tied.untie(("out", "weight")))
    assert tree_equal(ragged(1.0), ragged(1.0))
    assert not tree_equal(ragged(1.0), ragged(2.0))
    assert not tree_equal(inner, {"x": inner["x"]})
    assert not tree_equal(inner, inner.to("meta"))
