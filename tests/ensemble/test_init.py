"""`init_ensemble`: freshly initialised members, each from its own seed."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.models.architectures import FURTHER, NAMED
from tdfunc import init_ensemble, random, stack_modules
from tdfunc.modules.batching.rule import by_body
from tdfunc.modules.random import seeded
from tests.ensemble.models import make_mlp, make_resnet, make_transformer
from tests.helpers import TiedLM, assert_trees_equal
from tests.models import WithState


def initialised(fill):
    """A maker of linear layers whose weight is filled by `fill`."""

    def make():
        layer = nn.Linear(4, 4)
        with torch.no_grad():
            fill(layer.weight)
        return layer

    return make


MAKERS = {
    "mlp": make_mlp,
    "resnet": make_resnet,
    "transformer": make_transformer,
    "tied": TiedLM,
    "embedding": lambda: nn.Embedding(5, 3),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "lstm": lambda: nn.LSTM(3, 4),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "trunc_normal_": initialised(lambda w: nn.init.trunc_normal_(w, std=0.5)),
    "orthogonal_": initialised(nn.init.orthogonal_),
    "sparse_": initialised(lambda w: nn.init.sparse_(w, 0.5)),
    "kaiming_normal_": initialised(nn.init.kaiming_normal_),
    "randn": lambda: Drawn(torch.randn(3)),
    "normal_": lambda: Drawn(torch.empty(3).normal_(1, 2)),
    "randint": lambda: Drawn(torch.randint(0, 1000, (8,)).float()),
    "rand_like": lambda: Drawn(torch.rand_like(torch.ones(3))),
    "double": lambda: nn.Linear(3, 2, dtype=torch.float64),
    "bfloat16": lambda: nn.Linear(3, 2, dtype=torch.bfloat16),
    "buffer": lambda: nn.Sequential(nn.ReLU(), Noise()),
    "state": WithState,
    # Members without numbers are equal.
    "nothing": nn.ReLU,
    "empty": lambda: Drawn(torch.rand(0)),
    "meta": lambda: nn.Linear(3, 2, device="meta"),
}


class Drawn(nn.Module):
    """Holds one parameter."""

    def __init__(self, value):
        super().__init__()
        self.w = nn.Parameter(value)


class Noise(nn.Module):
    """Has a random buffer and no parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("noise", torch.randn(3))


@pytest.mark.parametrize("name", MAKERS)
def test_member_i_depends_on_its_seed_alone(name):
    """Member i is the same for any number of members, and torch's default generator is not drawn from."""
    make = MAKERS[name]
    before = torch.get_rng_state()
    few, many = init_ensemble(make, 2, key=3), init_ensemble(make, 4, key=3)
    assert torch.equal(before, torch.get_rng_state())

    assert_trees_equal(many[:2], few)
    with seeded(random.fold_in(random.key(3), 1)):
        alone = make()
    assert_trees_equal(stack_modules([alone]), many[1:2])


@pytest.mark.parametrize(
    "options", [{}, {"a": 5**0.5}, {"mode": "fan_out", "nonlinearity": "relu"}, {"nonlinearity": "tanh", "a": 3}]
)
def test_oracle_kaiming_uniform(options):
    """The bounds of the draws are those of torch's own function."""
    with seeded(random.key(0)):
        drawn = nn.init.kaiming_uniform_(torch.empty(5, 3, 2), **options)
    with seeded(random.key(0)) as mode:
        expected = by_body(nn.init.kaiming_uniform_)(mode, None, torch.empty(5, 3, 2), **options)

    assert torch.equal(drawn, expected)


def test_members_that_draw_otherwise():
    """A draw that differs from that of member 0 in shape, bounds or number is made for itself."""
    built = []

    def make():
        built.append(None)
        i = len(built) - 1
        weight = torch.empty(3).uniform_(0, 1 + i % 3) if i % 2 else torch.rand(2, 2).flatten()[:3]
        return Drawn(torch.cat([weight, torch.randn(3 + i)[:3], torch.rand(2)]))

    def make_alone(i):
        with seeded(random.fold_in(random.key(0), i)):
            return make().w

    tree = init_ensemble(make, 8)
    built.clear()

    assert [i for i in range(8) if not torch.equal(make_alone(i), tree["w"][i])] == []


@given(seed=st.integers(-(2**62), 2**62), other=st.integers(-(2**62), 2**62))
def test_law_seeds(seed, other):
    """A seed repeats its members, and two seeds share none."""
    trees = [init_ensemble(lambda: nn.Linear(3, 2), 2, key=s)["weight"] for s in (seed, seed, other)]

    assert torch.equal(trees[0], trees[1])
    assert seed == other or not any(torch.equal(a, b) for a in trees[0] for b in trees[2])


def families():
    """The architectures of docs/models.md; the first stands for all in a fast run."""
    first, *others = [*NAMED, *FURTHER]
    return [
        pytest.param(first, id=first.name),
        *[pytest.param(one, id=one.name, marks=pytest.mark.slow) for one in others],
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", families())
def test_members_of_transformers(architecture):
    """Member i depends on its key alone, though the library wraps the functions of `torch.nn.init` meanwhile."""
    pytest.importorskip("transformers")
    few = init_ensemble(architecture.make, 2, key=3)
    many = init_ensemble(architecture.make, 4, key=3)
    with seeded(random.fold_in(random.key(3), 1)):
        alone = architecture.make()

    assert_trees_equal(many[:2], few)
    assert_trees_equal(stack_modules([alone]), many[1:2])


def test_another_threads_draws():
    """Draws in another thread, as of a data loader, are not the member's; numpy's if they come once."""
    once = iter([np.random.rand])

    def make():
        thread = threading.Thread(target=lambda: (torch.rand(1), next(once, float)()))
        thread.start()
        thread.join()
        return nn.Linear(3, 2)

    assert init_ensemble(make, 2).batch_size == (2,)
