"""Values for each row under vmap: they come back with in_dims=0 and out_dims=0, and raise when read otherwise."""

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import tdfunc as tdf
from tdfunc import BatchSizeError, TensorDict


def grid(*size):
    """A tree whose word for each element is the number that its leaf holds there."""
    numbers = torch.arange(torch.Size(size).numel(), dtype=torch.float64).reshape(size)
    words = np.array([str(int(number)) for number in numbers.flatten()], dtype=object).reshape(size).tolist()
    return TensorDict({"x": numbers, "n": {"s": words, "m": {"s": words}}, "s": words}, size)


def words_of(numbers):
    """The words that belong to numbers, as a nested list."""
    return np.vectorize(lambda number: str(int(number)), otypes=[object])(numbers.numpy()).tolist()


def assert_paired(tree):
    """Check that each word is beside its number, and that all sub-trees have the batch size."""
    assert tree["s"] == tree["n", "s"] == tree["n", "m", "s"] == words_of(tree["x"])
    assert tree.batch_size == tree["n"].batch_size == tree["n", "m"].batch_size == tree["x"].shape


@pytest.mark.parametrize("transform", [lambda fn: fn, tdf.jit, torch.func.functionalize])
@pytest.mark.parametrize("size", [(3,), (1,), (2, 3), (3, 2, 2)])
@pytest.mark.parametrize("chunk", [None, 1])
def test_values_come_back_to_their_rows(size, chunk, transform):
    """With in_dims=0 and out_dims=0 each value is beside its row again."""
    assert_paired(transform(lambda t: torch.vmap(lambda row: row * 1, chunk_size=chunk)(t))(grid(*size)))


RETURNS = {
    "two levels": lambda: torch.vmap(torch.vmap(lambda t: t * 1))(grid(3, 2)),
    "map": lambda: tdf.map(lambda row: row * 1, grid(3, 2)),
    "scan": lambda: tdf.scan(lambda carry, row: (carry, row * 1), torch.ones(()), grid(2, 3))[1],
    "first tree of a lazy stack": lambda: torch.vmap(lambda t: t * 1)(stack_of_grids()).trees[0],
    "second tree of a lazy stack": lambda: torch.vmap(lambda t: t * 1)(stack_of_grids()).trees[1],
}


def stack_of_grids():
    """A lazy stack of two trees."""
    return tdf.lazy_stack([grid(3, 2), grid(3, 2)], 2)


@pytest.mark.parametrize("way", RETURNS)
def test_values_come_back_in_other_ways(way):
    """Two levels of vmap, `map` and `scan`, and the trees of a lazy stack keep values at their rows."""
    assert_paired(RETURNS[way]())


WORDS = TensorDict({"a": torch.zeros(2, 3), "row": [["a", "b", "c"], ["d", "e", "f"]], "one": "x"}, [2, 3])


def test_values_inside_vmap():
    """One value for all rows reads inside, and values for each row pass through."""
    out = torch.vmap(lambda part: part.set("b", part["a"] + len(part["one"])))(WORDS)

    assert out["row"] == WORDS["row"]
    assert out["one"] == "x"
    assert out.batch_size == WORDS.batch_size


@pytest.mark.parametrize(
    "touch",
    [lambda p: p["row"] and p, lambda p: p[0], lambda p: p.reshape(3, 1), lambda p: torch.stack([p, p])],
    ids=["read", "index", "reshape", "stack"],
)
def test_values_of_rows_are_not_touched_inside_vmap(touch):
    """A value for each row raises when it is read, moved or stacked inside."""
    with pytest.raises(BatchSizeError, match=r"(.|\n)*\[2, 3\](.|\n)*in_dims=0 and out_dims=0 only: exclude"):
        torch.vmap(touch)(WORDS)


NAMES = ["p", "q", "r"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.vmap(lambda t: t * 1, in_dims=1)(grid(2, 3)),
        lambda: torch.vmap(lambda t: t * 1, out_dims=1)(grid(2, 3)),
        lambda: torch.vmap(lambda t: t * 1, in_dims=1, out_dims=1)(grid(2, 3)),
        # Equal sizes do not tell in_dims=0 and out_dims=0 from others.
        lambda: torch.vmap(lambda t: t * 1, in_dims=0, out_dims=1)(grid(3, 3)),
        lambda: torch.vmap(lambda t: t * 1, in_dims=1, out_dims=0)(grid(3, 3)),
        lambda: torch.vmap(lambda x: TensorDict({"x": x, "s": NAMES}, [3]))(torch.ones(2, 3)),
        lambda: tdf.scan(lambda c, row: (c, row.set("s", NAMES)), torch.ones(()), grid(2, 3).exclude("s", "n"))[1],
        lambda: pytree.tree_map(lambda x: x[:, 0], grid(2, 3)),
        lambda: pytree.tree_map(lambda x: x[None], grid(3)),
    ],
)
def test_other_values_raise_when_they_are_read(make):
    """Values whose place after the transform is not known are never read at a wrong one."""
    out = make()

    with pytest.raises(BatchSizeError, match="'s': the values are not laid out along the batch"):
        out["s"]
    assert out.exclude("s", "n")[0]["x"].shape == out["x"][0].shape


def test_values_come_back_after_half_of_the_way():
    """A `tree_map` that takes the first dimension away hides the values, and one that gives it back shows them."""
    tree = grid(3, 2)
    row = pytree.tree_map(lambda x: x[0], tree)

    with pytest.raises(BatchSizeError, match=r"'s': the values are not(.|\n)*\[2\](.|\n)*\[3, 2\]"):
        row["s"]
    assert pytree.tree_map(lambda x: x.expand(3, 2), row)["s"] == tree["s"]
    sparse = TensorDict({"x": torch.eye(2).to_sparse(), "s": ["a", "b"]}, [2])
    assert pytree.tree_map(lambda x: x * 2, sparse)["s"] == ["a", "b"]
