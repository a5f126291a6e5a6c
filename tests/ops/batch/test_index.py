"""Indexing: rows are those that torch takes from each leaf, and an index that torch refuses is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size

from tdfunc import Kind, TensorDict
from tdfunc.core.collection import iter_leaves
from tests.random_index import random_index
from tests.strategies import trees

SIZES = st.sampled_from([(), (2,), (0,), (2, 3), (0, 3), (2, 0), (1, 1), (3, 1, 2)])


@given(st.data(), SIZES, st.integers(0, 2**32))
def test_rows_are_those_of_torch(data, size, seed):
    """Leaves, batch size and values of each row follow torch's index of a tensor of the batch size."""
    index, places = random_index(np.random.default_rng(seed), size), torch.arange(Size(size).numel()).reshape(size)
    tree = data.draw(trees(size=size)).set("place", places)
    words = np.array([f"row {i}" for i in range(places.numel())], dtype=object)
    tree = tree.set("words", words.reshape(size).tolist()) if places.numel() and size else tree
    try:
        expected = places[index]
    except (IndexError, TypeError):
        with pytest.raises((IndexError, TypeError)):
            tree[index]
        with pytest.raises((IndexError, TypeError)):
            TensorDict({}, size)[index]
        return

    found = tree[index]

    assert found.batch_size == TensorDict({}, size)[index].batch_size == expected.shape
    leaves, given_leaves = dict(iter_leaves(found)), dict(iter_leaves(tree))
    rows = {
        path: leaf.reshape(places.numel(), *leaf.shape[len(size) :])[expected] for path, leaf in given_leaves.items()
    }
    torch.testing.assert_close(leaves, rows, rtol=0, atol=0)
    if "words" in tree:
        assert found["words"] == np.asarray(words[expected.numpy()], dtype=object).tolist()


@pytest.mark.parametrize("index", [2, -1, slice(1, 3), slice(None), slice(-2, None), slice(3, 1)], ids=repr)
def test_rows_of_a_flat_tree_keep_names_and_kinds(index):
    """The short way for one int or slice keeps names and kinds."""
    tree = TensorDict({"a": torch.randn(4, 3, 2), "b": torch.randn(3, 4, 2).transpose(0, 1)}, [4, 3], names=["r", "c"])
    tree = tree.set("w", torch.ones(4, 3), kind=Kind.BUFFER)

    done = tree[index]

    assert done.batch_size == torch.empty(4, 3)[index].shape
    assert done.names == (["c"] if isinstance(index, int) else ["r", "c"])
    assert done.kind("w") is Kind.BUFFER
    assert torch.equal(done["b"], tree["b"][index])


def test_positions_that_have_no_values_are_not_read():
    """An index on another device, or one that a transformation maps, is left to the leaves."""
    tree, seen = TensorDict({}, [2, 3]), []

    def fn(index):
        seen.append(tree[index].batch_size)
        return index

    torch.vmap(fn)(torch.tensor([[7, 8]]))
    torch.compile(fn, backend="eager", fullgraph=True)(torch.tensor([0, 1]))

    assert tree[torch.zeros(4, dtype=torch.long, device="meta")].batch_size == Size([4, 3])
    assert seen == [Size([2, 3])] * 2
