"""`init_ensemble`: freshly initialised members, each from its own seed."""

import json
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tdfunc import LeafMismatchError, TieError, TreeStructureError, UnsupportedError, init_ensemble, stack_modules
from tdfunc.modules.random import member_seed, seeded
from tests.ensemble.models import make_mlp, make_resnet, make_transformer
from tests.helpers import TiedLM, assert_trees_equal


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
    "xavier_uniform_": initialised(nn.init.xavier_uniform_),
    "randn": lambda: Drawn(torch.randn(3)),
    "normal_": lambda: Drawn(torch.empty(3).normal_(1, 2)),
    "randint": lambda: Drawn(torch.randint(0, 1000, (8,)).float()),
    "rand_like": lambda: Drawn(torch.rand_like(torch.ones(3))),
    "double": lambda: nn.Linear(3, 2, dtype=torch.float64),
    "bfloat16": lambda: nn.Linear(3, 2, dtype=torch.bfloat16),
    "buffer": lambda: nn.Sequential(nn.ReLU(), Noise()),
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
    """Adding a member would change the others, or torch's default generator would be drawn from."""
    make = MAKERS[name]
    before = torch.get_rng_state()
    few, many = init_ensemble(make, 2, seed=3), init_ensemble(make, 4, seed=3)
    assert torch.equal(before, torch.get_rng_state())

    assert_trees_equal(many[:2], few)
    with seeded(member_seed(3, 1)):
        alone = make()
    assert_trees_equal(stack_modules([alone]), many[1:2])


@given(seed=st.integers(-(2**62), 2**62), other=st.integers(-(2**62), 2**62))
def test_law_seeds(seed, other):
    """A seed would not repeat its members, or two seeds would share one."""
    trees = [init_ensemble(lambda: nn.Linear(3, 2), 2, seed=s)["weight"] for s in (seed, seed, other)]

    assert torch.equal(trees[0], trees[1])
    assert seed == other or not any(torch.equal(a, b) for a in trees[0] for b in trees[2])


@pytest.mark.slow
def test_equal_across_processes():
    """A run could not be repeated on another day."""
    code = (
        "import json, torch, tdfunc as tdf\n"
        "tree = tdf.init_ensemble(lambda: torch.nn.Linear(3, 2), 2, seed=7)\n"
        "print(json.dumps(tree['weight'].flatten().tolist()))"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    here = init_ensemble(lambda: nn.Linear(3, 2), 2, seed=7)["weight"].flatten().tolist()

    assert json.loads(printed) == here


def test_initialisation_has_the_distribution_of_torch():
    """Members would start outside the range that torch's initialisation promises."""
    tree = init_ensemble(lambda: nn.Linear(100, 50), 8)
    weight = tree["weight"]

    assert weight.abs().max() <= 0.1
    assert abs(float(weight.std()) - 0.2 / 12**0.5) < 1e-3


def test_ties_and_kinds():
    """Tied weights would be two leaves, or buffers would be trained."""
    tree = init_ensemble(TiedLM, 3)

    assert tree["emb", "weight"] is tree["out", "weight"]
    assert_trees_equal(init_ensemble(make_resnet, 2), stack_modules(members(make_resnet, 2)))


def members(make, n):
    """The modules that init_ensemble builds with seed 0."""
    built = []
    for i in range(n):
        with seeded(member_seed(0, i)):
            built.append(make())
    return built


def test_a_module_without_numbers():
    """An ensemble of modules without weights would be refused because its members are equal."""
    assert init_ensemble(nn.ReLU, 5).batch_size == (5,)


def test_equal_members():
    """An ensemble of copies would report no uncertainty at all."""
    model = nn.Linear(3, 2)

    with pytest.raises(ValueError, match=r"(?s)members 0 and 1 are equal.*differ.*make\(\) must build"):
        init_ensemble(lambda: model, 3)
    with pytest.raises(ValueError, match="members 0 and 1 are equal"):
        init_ensemble(lambda: nn.LayerNorm(3), 3)


@pytest.mark.parametrize("n", [0, -1])
def test_no_members(n):
    """There would be no structure to return."""
    with pytest.raises(ValueError, match=rf"(?s)n >= 1.*{n}"):
        init_ensemble(nn.ReLU, n)


def test_architectures_that_differ():
    """Member 1 would be written into leaves of another architecture."""
    widths = iter([2, 3])

    with pytest.raises(TreeStructureError, match=r"(?s)member 1 .*'out_features'.*2.*3"):
        init_ensemble(lambda: nn.Linear(3, next(widths)), 2)


def test_leaves_that_differ():
    """A leaf of another dtype would be cast in silence."""
    dtypes = iter([torch.float32, torch.float64])

    with pytest.raises(LeafMismatchError, match=r"(?s)'w' of member 1.*float32.*float64"):
        init_ensemble(lambda: Drawn(torch.randn(3, dtype=next(dtypes))), 2)


def test_ties_that_differ():
    """Only one of two weights that a member does not tie would be kept."""
    ties = iter([True, False])

    def make():
        model = TiedLM()
        if not next(ties):
            model.out.weight = nn.Parameter(torch.randn(7, 4))
        return model

    with pytest.raises(TieError, match=r"(?s)member 1.*emb\.weight.*out\.weight.*none"):
        init_ensemble(make, 2)


def test_draws_past_the_seed():
    """Members would not be reproducible, and torch's default generator would have moved."""

    def make():
        layer = nn.Linear(3, 2)
        with torch.no_grad():
            layer.bias.copy_(F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 2), dropout_p=0.5)[0, 0])
        return layer

    with pytest.raises(UnsupportedError, match=r"(?s)default generator.*torch\.nn\.init.*stack_modules"):
        init_ensemble(make, 2)


def test_another_threads_draws():
    """A data loader that draws in another thread would make initialisation fail."""

    def make():
        thread = threading.Thread(target=torch.rand, args=(1,))
        thread.start()
        thread.join()
        return nn.Linear(3, 2)

    assert init_ensemble(make, 2).batch_size == (2,)
