"""`at`: rows and entries changed in a new tree, against torch's assignment to a copy of each leaf."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tdfunc import Filter, NonTensorData, TensorDict
from tests.helpers import assert_pure, assert_trees_equal
from tests.random_index import random_index
from tests.strategies import KEYS, trees


@pytest.fixture
def td():
    """Two leaves, one nested, in a batch of three."""
    return TensorDict({"a": torch.arange(3.0), "n": {"b": torch.zeros(3, 2)}}, [3])


FLOATS = trees(size=(3, 2), nontensor=False, dtypes=st.just(torch.float32))


@given(FLOATS, st.integers(0, 2**32))
def test_rows(tree, seed):
    """Rows go where torch puts them, and `add` counts a row as often as the index names it."""
    index = random_index(np.random.default_rng(seed), (3, 2))
    try:
        taken = torch.arange(6).reshape(3, 2)[index].reshape(-1)
    except (IndexError, TypeError):
        assume(False)
    rows = tree[index]
    changes = {"add": (lambda t: t.at[index].add(5), lambda x: x.index_add(0, taken, torch.full_like(x[taken], 5)))}
    if len(taken.unique()) == len(taken):
        changes |= {
            "set rows": (lambda t: t.at[index].set(rows + 10), lambda x: x.index_copy(0, taken, x[taken] + 10)),
            "set": (lambda t: t.at[index].set(7), lambda x: x.index_fill(0, taken, 7)),
            "mul": (lambda t: t.at[index].mul(3), lambda x: x.index_copy(0, taken, x[taken] * 3)),
            "apply": (lambda t: t.at[index].apply(torch.neg), lambda x: x.index_copy(0, taken, -x[taken])),
        }
    found = {name: assert_pure(on_tree, tree) for name, (on_tree, _) in changes.items()}

    assert {name: new._ties for name, new in found.items()} == dict.fromkeys(found, tree._ties)
    ours = {(name, path): new[path].flatten(0, 1) for name, new in found.items() for path in tree.paths()}
    expected = {(name, path): changes[name][1](tree[path].flatten(0, 1)) for name, path in ours}
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert_trees_equal(tree.at[index].get(), rows)


PATHS = {
    "set": (lambda td: td.at["a"].set(1)["a"], [1, 1, 1]),
    "mul": (lambda td: td.at["a"].mul(2)["a"], [0, 2, 4]),
    "set a nested leaf": (lambda td: td.at["n", "b"].set(1)["n", "b"], [[1, 1]] * 3),
    "add to a nested leaf": (lambda td: td.at["n", "b"].add(1)["n", "b"], [[1, 1]] * 3),
    "apply to a tree": (lambda td: td.at["n"].apply(lambda t: t + 1)["n", "b"], [[1, 1]] * 3),
    "set a tree": (lambda td: td.at["n"].set({"b": torch.ones(3, 2)})["n", "b"], [[1, 1]] * 3),
    "fill a tree": (lambda td: td.at["n"].set(2)["n", "b"], [[2, 2]] * 3),
}


@pytest.mark.parametrize(("change", "expected"), PATHS.values(), ids=PATHS)
def test_paths(td, change, expected):
    """An entry is changed by its path, and a number fills it."""
    assert change(td).tolist() == expected


def test_paths_are_read_and_written(td):
    """`get` gives the entry at a path, and `set_` writes into it and returns the tree."""
    assert td.at["a"].get() is td["a"]
    assert td.at["a"].set_(torch.ones(3)) is td


def test_words(td):
    """Rows of non-tensor data are replaced by values."""
    td = td.update({"s": ["p", "q", "r"], "t": "all"})

    assert td.at[1].set(td[0].set("s", NonTensorData([2])))["s"] == ["p", [2], "r"]
    assert [td.at[1:].set(td[:2])[key] for key in "st"] == [["p", "p", "q"], "all"]


FILTERED = {
    "apply with where": (lambda tree, where: tree.apply(torch.neg, where=where), torch.neg),
    "apply": (lambda tree, where: tree.at[where].apply(torch.neg), torch.neg),
    "add": (lambda tree, where: tree.at[where].add(1), lambda x: x + 1),
    "mul": (lambda tree, where: tree.at[where].mul(2), lambda x: x * 2),
    "set": (lambda tree, where: tree.at[where].set(0), torch.zeros_like),
    "set a part": (lambda tree, where: tree.at[where].set(tree.partition(where)[0] * 3), lambda x: x * 3),
}


@given(trees(size=(2,), dtypes=st.just(torch.float32)), KEYS)
def test_a_filter_changes_the_leaves_that_it_chooses(tree, key):
    """At a filter `at`, and `apply` with `where`, change the part that `partition` gives, and nothing else."""
    where = Filter(lambda path, leaf: path[-1] >= key)
    part, rest = tree.partition(where)
    found = {name: change(tree, where) for name, (change, _) in FILTERED.items()}
    parts = {name: new.partition(where) for name, new in found.items()}

    assert_trees_equal(tree.at[where].get(), part)
    assert_trees_equal(
        {name: chosen for name, (chosen, _) in parts.items()},
        {name: part.apply(fn) for name, (_, fn) in FILTERED.items()},
    )
    assert_trees_equal({name: others for name, (_, others) in parts.items()}, dict.fromkeys(parts, rest))
    assert {name: list(new.keys()) for name, new in found.items()} == dict.fromkeys(found, list(tree.keys()))
    assert {name: new.ties() for name, new in found.items()} == dict.fromkeys(found, tree.ties())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64])
def test_numbers_that_keep_their_value(dtype):
    """Zero fits rows of every dtype, and a float leaf takes an integer that a float is near to."""
    td = TensorDict({"a": torch.ones(3).to(dtype)}, [3])
    double = TensorDict({"x": torch.zeros(2, dtype=torch.float64)}, [2])

    assert td.at[0].set(0)["a"].tolist() == [0, 1, 1]
    assert td.at[0].set(0)["a"].dtype is dtype
    assert double.at[0].set(2**80)["x"].tolist() == [2.0**80, 0.0]
    assert double.at["x"].set(2**80)["x"].tolist() == [2.0**80] * 2


def test_rows_in_transformations(td):
    """Rows are written under vmap and grad."""

    def loss(x):
        return td.at[1].set(td[0].apply(lambda v: v * 0 + x))["a"].sum()

    assert torch.func.grad(loss)(torch.tensor(2.0)) == 1
    stacked = torch.stack([td, td + 1])
    rows = torch.vmap(lambda t: t.at[0].set(t[2]))(stacked)
    assert rows["a"][:, 0].tolist() == [2, 3]


@pytest.mark.parametrize("mask", [[0, 0, 0], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("call", ["add", "mul", "set"])
def test_at_takes_masks_of_bytes(call, mask):
    """A mask of uint8 is a mask, as in reading."""
    td = TensorDict({"a": torch.arange(3.0), "b": torch.ones(3, 2)}, [3])
    mask = torch.tensor(mask, dtype=torch.uint8)

    assert_trees_equal(getattr(td.at[mask], call)(5), getattr(td.at[mask.bool()], call)(5))
