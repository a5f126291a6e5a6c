"""Straight-line code of plans does what the loop that it stands for does, whatever the keys are called."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdfunc import TensorDict
from tdfunc.modules.plan import Plan, make_filler, make_reader

KEYS = ["weight", "a.b", "'", '"', "\\", "\n", "]; raise SystemExit", "{x}", "é\udc80", "class", "_data", "0", "d0"]


class Shown(str):
    """A key that shows itself as code."""

    __slots__ = ()

    def __repr__(self):
        return "1 / 0"


@pytest.mark.parametrize("key", [*KEYS, Shown("name")])
def test_any_key(key):
    """No key becomes code."""
    tables = ({}, {})
    make_filler([(0, key), (1, key)]).run(tables, [1, 2])
    leaf = torch.zeros(2)
    tree = TensorDict({key: {key: leaf}})

    assert tables == ({key: 1}, {key: 2})
    assert make_reader([(0, key)], [1, 1], [(1, key)]).run(tree._data)[0] is leaf


TREES = st.recursive(
    st.just(None), lambda inner: st.dictionaries(st.sampled_from(KEYS), inner, min_size=1, max_size=4), max_leaves=20
).filter(lambda tree: tree is not None)


def tree_of(nested):
    """A tree with a new tensor for each None."""
    return TensorDict({k: torch.zeros(()) if v is None else tree_of(v) for k, v in nested.items()})


@given(TREES)
def test_reading_is_by_path(nested):
    """Leaves are read by path, and a tree with other keys does not fit."""
    tree = tree_of(nested)
    plan = Plan(tree)
    found = plan.read(tree)
    first = plan.paths[0]

    assert found is not None
    assert all(leaf is tree.get(path) for path, leaf in zip(plan.paths, found, strict=True))
    assert plan.read(tree.set((*first[:-1], "one more"), torch.zeros(()))) is None
    assert plan.read(tree.delete(first)) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(KEYS)), unique=True, max_size=20))
def test_filling_is_a_loop(slots):
    """Each value goes into its slot."""
    numbers = sorted({number for number, _ in slots})
    slots = [(numbers.index(number), name) for number, name in slots]
    tables = [{} for _ in numbers]
    expected = [{} for _ in numbers]
    make_filler(slots).run(tables, list(range(len(slots))))
    for value, (number, name) in enumerate(slots):
        expected[number][name] = value

    assert tables == expected
