"""Names of dimensions of lazy stacks, against those of the dense tree after the same operation."""

import random

import numpy as np
import pytest
import torch
from torch import Size

from tdfunc import LeafMismatchError, TensorDict, lazy_stack, partition
from tdfunc._lazystack import LazyStack
from tests.lazystack.rows import OPERATIONS, index
from tests.lazystack.trees import settle

NAMES = ("a", None, "b", "c")


def named_pair(rng):
    """A lazy stack with names, of equal trees, and the dense tree of it."""
    size = [rng.randint(1, 3) for _ in range(rng.randint(1, 2))]
    inner = TensorDict({"y": torch.ones(*size, 2)}, [*size, 2], names=[*["p", "q"][: len(size)], "a"])
    lazy = lazy_stack([TensorDict({"n": inner}, size)] * rng.randint(1, 3), rng.randint(0, len(size)))
    lazy = lazy.with_names(rng.sample(NAMES, lazy.batch_dims))
    return lazy, lazy.dense()


def run(operation, tree, seed):
    """The results of one operation, of the same choices for every tree."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    made = operation(rng, tree, np.empty(tuple(tree.batch_size), object), rng.randint(-tree.batch_dims, -1))
    return list(made.ours())


def compared(operation, seed, inside=False):
    """Check the names of the results for one seed; whether there were any."""
    lazy, dense = named_pair(random.Random(seed))
    try:
        found = run(operation, lazy, seed)
    except (LeafMismatchError, IndexError, RuntimeError):
        # What needs one shape, or leaves no tree, or an index that fits no batch.
        return False
    for mine, expected in zip(found, run(operation, dense, seed), strict=True):
        assert mine.names == expected.names
        assert not inside or mine["n"].names == expected["n"].names
        assert settle(mine).names == expected.names
    return True


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.__name__)
def test_operations_name_dimensions_as_on_the_dense_tree(operation):
    """A name would end up at another dimension, or stay where the dense tree has none."""
    assert sum(compared(operation, 100 * OPERATIONS.index(operation) + seed) for seed in range(12)) > 2


def test_indices_name_dimensions_as_on_the_dense_tree():
    """Rows of several dimensions, or of a mask, would have the name of one of them; also in the trees inside."""
    assert sum(compared(index, seed, inside=True) for seed in range(200)) > 100


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (torch.ones(2, 3, dtype=torch.bool), [None]),
        (([0, 1], [2, 0]), [None]),
        ([[0, 1], [1, 0]], [None, None, "b"]),
        ([1, 0], ["a", "b"]),
        ((True, [0, 1]), [None, "b"]),
        ((None, 1), [None, "b"]),
    ],
)
def test_names_after_rows(rows, names):
    """The dimension of rows would have the name of the stack's where two dimensions became one."""
    lazy = lazy_stack([TensorDict({"x": torch.ones(3, 2)}, [3])] * 2).with_names(["a", "b"])

    assert lazy[rows].names == lazy.dense()[rows].names == names


def test_names_of_trees_inside():
    """A tree inside would get the stack's name, which it may have already: then nothing of the stack could be read."""
    inner = TensorDict({"n": TensorDict({"x": torch.ones(2, 3)}, [2], names=["t"])}, [2])
    lazy = lazy_stack([inner, inner]).with_names(["t", "u"])

    assert "names=['t', 'u']" in repr(lazy)
    assert lazy["n"].names == lazy.dense()["n"].names == [None, "t"]
    assert [key for key, _ in lazy.items(True)] == ["n", ("n", "x")]
    assert lazy.set("n", lazy["n"]).names == ["t", "u"]
    assert lazy.clone()["n"].names == [None, "t"]


def test_no_names_clash_after_unflatten():
    """An operation would make a stack of stacks that gives its name to trees which have it."""
    lazy = lazy_stack([TensorDict({"n": TensorDict({"x": torch.ones(1, 3)}, [1])}, [1])]).with_names(["d0", "d1"])
    apart = lazy.unflatten(-1, (1, -1, 1))

    assert apart.names == lazy.dense().unflatten(-1, (1, -1, 1)).names == ["d0", None, None, None]
    assert apart["n"].batch_size == Size([1, 1, 1, 1])
    assert apart["n"].names == [None] * 4


def test_names_of_each_tree():
    """Names that the trees do not share would become those of the stack when it has one tree left."""
    lazy = lazy_stack([TensorDict({"x": torch.ones(1)}, [1], names=[name]) for name in "ab"])

    assert lazy[:1].names == [None, None]
    assert lazy[:1][0].names == ["a"]
    assert lazy[1].names == ["b"]


def test_names_given_to_a_whole():
    """A stack that was named after its trees were made would lose the names when leaves leave it."""
    lazy = lazy_stack([TensorDict({"x": torch.ones(2), "y": torch.ones(2)}, [2])] * 4).with_names(["a", "b"])
    flat = lazy_stack([lazy, lazy]).with_names([None, "a", "b"]).flatten(0, 1)

    assert isinstance(flat, LazyStack)
    assert flat.names == [None, "b"]
    assert (
        partition(flat, "*.x")[0].names == flat.exclude("y").names == flat.apply(lambda x: x + 1).names == [None, "b"]
    )


@pytest.mark.parametrize("call", [lambda t: t.permute(1, 0), lambda t: t.transpose(0, 1), lambda t: t.movedim(0, 1)])
def test_moved_dimensions_of_trees_with_more(call):
    """A tree inside with more dimensions would have fewer names than these."""
    inner = TensorDict({"x": torch.ones(2, 3, 4)}, [2, 3, 4], names=["a", "b", "c"])

    assert call(TensorDict({"n": inner}, [2, 3]))["n"].names == ["b", "a", "c"]
