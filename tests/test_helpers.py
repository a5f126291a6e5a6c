"""The helpers that check can fail."""

import pytest
import torch

from tests.helpers import TiedLM, TinyMLP, assert_pure, assert_trees_equal


@pytest.mark.parametrize(
    "write",
    [lambda tree: tree["a"].data.add_(1), lambda tree: tree["a"].copy_(tree["a"].clone())],
    ids=["through .data", "of an equal value"],
)
def test_assert_pure_sees_a_write(write):
    """A function that writes to its argument would pass for pure."""
    with pytest.raises(AssertionError):
        assert_pure(write, {"a": torch.zeros(2)})


def test_assert_pure_returns_the_result():
    """A caller could not check what the pure function returned."""
    tree = {"a": torch.zeros(2)}

    assert torch.equal(assert_pure(lambda t: t["a"] + 1, tree), torch.ones(2))


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.ones(2), "b": 1},
        {"a": torch.zeros(2, dtype=torch.float64), "b": 1},
        {"a": torch.zeros(2), "b": 2},
        {"a": torch.zeros(2)},
        {"a": torch.zeros(2), "c": 1},
        [torch.zeros(2), 1],
    ],
    ids=["value", "dtype", "non-tensor", "missing", "renamed", "type"],
)
def test_assert_trees_equal_sees_a_difference(other):
    """Trees that differ would pass for equal."""
    tree = {"a": torch.zeros(2), "b": 1}
    assert_trees_equal(tree, {"a": torch.zeros(2), "b": 1})

    with pytest.raises(AssertionError):
        assert_trees_equal(tree, other)


def test_modules_run(generator):
    """Tests that use the modules would fail for another reason than the one they name."""
    x = torch.rand(5, 3, generator=generator)
    ids = torch.randint(7, (2, 5), generator=generator)
    model = TiedLM()

    assert TinyMLP()(x).shape == (5, 2)
    assert model(ids).shape == (2, 5, 7)
    assert model.out.weight is model.emb.weight
