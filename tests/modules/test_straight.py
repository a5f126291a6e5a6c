"""Straight-line code does what the loop that it stands for does, whatever the keys are called."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tdfunc import TensorDict, functional
from tdfunc.modules.plan import Plan, Straight, make_filler, make_reader

KEYS = ["weight", "a.b", "'", '"', "\\", "\n", "]; raise SystemExit", "{x}", "é\udc80", "class", "_data", "0", "d0"]


class Shown(str):
    """A key that shows itself as code."""

    __slots__ = ()

    def __repr__(self):
        return "1 / 0"


@pytest.mark.parametrize("key", [*KEYS, Shown("name")])
def test_any_key(key):
    """A key would become code."""
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
    """A leaf would be read from another path, or a tree with other keys taken for one that fits."""
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
    """A value would go into another slot."""
    numbers = sorted({number for number, _ in slots})
    slots = [(numbers.index(number), name) for number, name in slots]
    tables = [{} for _ in numbers]
    expected = [{} for _ in numbers]
    make_filler(slots).run(tables, list(range(len(slots))))
    for value, (number, name) in enumerate(slots):
        expected[number][name] = value

    assert tables == expected


def test_another_number_of_values():
    """Leaves would be missing from their slots, or left over."""
    with pytest.raises(ValueError, match="unpack"):
        make_filler([(0, "a"), (0, "b")]).run([{}], [1])


def test_code_is_made_once_and_not_pickled():
    """Every call would compile, or a function could not go to another process."""
    made = make_filler([(0, "a")])
    first = made.run
    table = {}
    again: Straight = pickle.loads(pickle.dumps(made))
    again.run([table], [1])

    assert made.run is first
    assert table == {"a": 1}


def test_many_leaves():
    """Structures of thousands of leaves would not compile."""
    tree = TensorDict({f"n{i}": {"w": torch.zeros(()), "b": torch.zeros(())} for i in range(2000)})
    plan = Plan(tree)

    assert plan.read(tree) == [tree[path] for path in plan.paths]


def test_slots_in_another_order_than_the_leaves():
    """Tied weights and shared layers would come into each other's slots."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
            self.c.weight, self.d = self.a.weight, self.a

        def forward(self, x):
            return self.d(self.c(self.b(self.a(x))))

    model = Tied().eval()
    apply, params, buffers = functional(model)
    x = torch.randn(4, 3)
    for _ in range(4):
        assert torch.equal(apply(params, x, buffers=buffers), model(x))
