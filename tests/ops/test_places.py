"""Places of `at`: paths, filters and rows of some keys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdfunc import Filter, FilterError, LeafMismatchError, MissingKeyError, TensorDict, TreeStructureError
from tests.helpers import assert_trees_equal
from tests.strategies import KEYS, trees


@pytest.fixture
def td():
    """Two leaves, one nested, in a batch of three."""
    return TensorDict({"a": torch.arange(3.0), "n": {"b": torch.zeros(3, 2)}}, [3])


@pytest.mark.parametrize(
    ("place", "value", "error", "message"),
    [
        ("aa", 1, MissingKeyError, "no key 'aa'.*did you mean 'a'"),
        ("n.b", 1, MissingKeyError, r"a nested key is a tuple: \('n', 'b'\)"),
        (("n", "c"), 1, MissingKeyError, "no key 'c' under 'n'"),
        ("a", torch.ones(3, 1), LeafMismatchError, r"'a' must have the shape.*\[3\].*\[3, 1\].*td.set"),
        ("a", "text", TreeStructureError, "'a' is a leaf.*non-tensor data.*td.set"),
        ("n", torch.ones(3), TreeStructureError, "'n' is a tree.*a leaf"),
        ("n", {"b": torch.ones(3)}, LeafMismatchError, r"'n.b' must have.*\[3, 2\].*\[3\]"),
        ("n", {"c": 1}, TreeStructureError, "different keys under 'n'.*td.set"),
        (Filter("n.*"), {"a": 1}, MissingKeyError, "other keys than the tree"),
        (Filter("q.*"), 1, FilterError, "matches no leaf"),
    ],
)
def test_a_place_must_exist_and_keeps_its_shape(td, place, value, error, message):
    """`at[...].set` adds no key and changes no shape."""
    with pytest.raises(error, match=f"(?s){message}"):
        td.at[place].set(value)


@given(trees(size=(2,), dtypes=st.just(torch.float32)), KEYS)
def test_a_filter_changes_the_leaves_that_it_chooses(tree, key):
    """At a filter `at`, and `apply` with `where`, change the part that `partition` gives, and nothing else."""
    where = Filter(lambda path, leaf: path[-1] >= key)
    part, rest = tree.partition(where)

    assert_trees_equal(tree.at[where].get(), part)
    for new, fn in (
        (tree.apply(torch.neg, where=where), torch.neg),
        (tree.at[where].apply(torch.neg), torch.neg),
        (tree.at[where].add(1), lambda x: x + 1),
        (tree.at[where].mul(2), lambda x: x * 2),
        (tree.at[where].set(0), torch.zeros_like),
        (tree.at[where].set(part * 3), lambda x: x * 3),
    ):
        chosen, others = new.partition(where)
        assert_trees_equal(chosen, part.apply(fn))
        assert_trees_equal(others, rest)
        assert (list(new.keys()), new.ties()) == (list(tree.keys()), tree.ties())


def test_rows_of_some_keys():
    """A row of some keys is written as the update of a row."""
    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3, 2)}, [3])
    new = td.at[0].set(td[0].update({"b": torch.ones(2)}))

    assert new["b"].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert new["a"] is not td["a"]
    with pytest.raises(MissingKeyError, match=r"(?s)other keys.*td.at\[i\].set\(td\[i\].update\(rows\)\)"):
        td.at[0].set({"b": torch.ones(2)})
