"""`rng=`: one seed, one result; torch's distributions; nothing from the default generator; members are the loop."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tdfunc import functional
from tdfunc.modules.random import member_generators, member_seed, seeded
from tests.models import make_mlp

ONES = torch.ones(6, 5)
IMAGE = torch.ones(3, 4, 2, 2)


DRAWS = {
    "F.dropout": lambda: F.dropout(ONES),
    "F.dropout inplace": lambda: F.dropout(ONES.clone(), inplace=True),
    "F.dropout1d": lambda: F.dropout1d(ONES),
    "F.dropout2d": lambda: F.dropout2d(IMAGE),
    "F.dropout3d": lambda: F.dropout3d(IMAGE),
    "F.alpha_dropout": lambda: F.alpha_dropout(ONES, training=True),
    "F.feature_alpha_dropout": lambda: F.feature_alpha_dropout(IMAGE, training=True),
    "nn.Dropout": lambda: nn.Dropout(0.5)(ONES),
    "torch.rand": lambda: torch.rand(3, 2),
    "torch.randn": lambda: torch.randn((4,), requires_grad=True),
    "torch.randint": lambda: torch.randint(3, 9, (20,)),
    "torch.randperm": lambda: torch.randperm(9),
    "torch.rand_like": lambda: torch.rand_like(ONES),
    "torch.randn_like": lambda: torch.randn_like(ONES, dtype=torch.float64),
    "torch.randint_like": lambda: torch.randint_like(ONES, 2, 90),
    "torch.bernoulli": lambda: torch.bernoulli(ONES / 2),
    "Tensor.bernoulli": lambda: ONES.bernoulli(0.5),
    "torch.multinomial": lambda: torch.multinomial(ONES, 5),
    "torch.multinomial again": lambda: torch.multinomial(ONES, 8, replacement=True),
    "torch.normal": lambda: torch.normal(ONES, 2.0),
    "torch.normal std": lambda: torch.normal(1.0, ONES),
    "torch.normal size": lambda: torch.normal(1.0, 2.0, (4,)),
    "uniform_": lambda: torch.empty(7).uniform_(2, 3),
    "normal_": lambda: torch.empty(7).normal_(),
    "bernoulli_": lambda: torch.empty(40).bernoulli_(0.5),
    "bernoulli_ tensor": lambda: torch.empty(6, 5).bernoulli_(ONES / 2),
    "exponential_": lambda: torch.empty(7).exponential_(2.0),
    "random_": lambda: torch.empty(7).random_(0, 99),
    "geometric_": lambda: torch.empty(40).geometric_(0.2),
    "init.kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(4, 5)),
    "init.orthogonal_": lambda: nn.init.orthogonal_(torch.empty(4, 5)),
    "init.sparse_": lambda: nn.init.sparse_(torch.empty(4, 5), 0.5),
    "nn.Linear": lambda: nn.Linear(3, 4).weight,
    "nn.LSTM": lambda: nn.LSTM(3, 4).weight_hh_l0,
    "distributions.Normal": lambda: torch.distributions.Normal(0.0, 1.0).rsample((3,)),
    "distributions.Categorical": lambda: torch.distributions.Categorical(torch.ones(9)).sample((9,)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_one_seed_one_draw(name):
    """A seed determines the numbers, which look like torch's, and the default generator does not move."""
    theirs, before, draws = DRAWS[name](), torch.get_rng_state(), []
    for seed in (0, 0, 1, 2):
        with seeded(seed) as mode:
            draws.append(DRAWS[name]())
        assert mode.draws > 0

    ours = draws[0]
    assert torch.equal(ours, draws[1])
    assert not (torch.equal(ours, draws[2]) and torch.equal(ours, draws[3]))
    assert torch.equal(torch.get_rng_state(), before)
    assert (ours.shape, ours.dtype, ours.requires_grad) == (theirs.shape, theirs.dtype, theirs.requires_grad)


N = 40_000
BIG = torch.ones(N)
SAMPLES = {
    "dropout": lambda: F.dropout(BIG, 0.3),
    "alpha_dropout": lambda: F.alpha_dropout(BIG, 0.3, training=True),
    "dropout2d": lambda: F.dropout2d(torch.ones(200, 200, 2, 2), 0.3)[:, :, 0, 1].flatten(),
    "bernoulli": lambda: torch.bernoulli(BIG * 0.3),
    "bernoulli_": lambda: torch.empty(N).bernoulli_(0.3),
    "multinomial": lambda: torch.multinomial(torch.tensor([0.1, 0.2, 0.0, 0.7]), N, True).float(),
    "multinomial without": lambda: torch.multinomial(torch.tensor([[1.0, 2.0, 7.0]]).expand(N, 3), 2)[:, 1].float(),
    "normal": lambda: torch.normal(BIG, 2.0),
    "rand_like": lambda: torch.rand_like(BIG),
    "randint_like": lambda: torch.randint_like(BIG, 2, 7),
    "exponential_": lambda: torch.empty(N).exponential_(3.0),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_distributions_are_torchs(name):
    """A served function draws from torch's distribution."""
    torch.manual_seed(0)
    theirs = SAMPLES[name]()
    with seeded(1):
        ours = SAMPLES[name]()

    # Rounded, since equal values may differ in their last bit.
    ours, theirs = ours.round(decimals=3), theirs.round(decimals=3)
    # Two-sample Kolmogorov-Smirnov at a level of 1e-6, on the values that both took.
    grid = torch.cat([ours, theirs]).unique()
    grid = grid[torch.linspace(0, len(grid) - 1, min(len(grid), 500)).long()]
    gap = max(abs((ours <= v).float().mean() - (theirs <= v).float().mean()) for v in grid)
    assert gap < math.sqrt(-math.log(1e-6 / 2) / 2) * math.sqrt(2 / N)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("drop", [F.dropout, F.dropout1d, F.alpha_dropout])
def test_dropout_at_its_ends(drop, p):
    """Dropping nothing or everything gives finite numbers; evaluation mode drops nothing."""
    with seeded(0):
        out = drop(ONES, p, training=True)
        assert torch.equal(drop(ONES, p, training=False), ONES)

    assert out.isfinite().all()
    assert p != 0.0 or torch.equal(out, ONES)
    assert p != 1.0 or not out.any()


@pytest.mark.parametrize(
    ("drop", "shape"),
    [
        (F.dropout1d, (6, 5)), (F.dropout1d, (3, 6, 5)), (F.dropout2d, (3, 6, 5, 2)), (F.dropout3d, (6, 5, 2, 2)),
        (F.dropout3d, (3, 6, 5, 2, 2)), (F.feature_alpha_dropout, (3, 6, 5)),
    ],
)  # fmt: skip
def test_whole_channels_are_dropped(drop, shape):
    """Channels are dropped whole, along the dimension that torch takes."""

    def per_channel(out):
        flat = out.flatten(1) if out.dim() == len(shape) and shape[0] == 6 else out.flatten(0, 1).flatten(1)
        return all(len(row.unique()) == 1 for row in flat), len(flat)

    with seeded(0):
        ours = drop(torch.ones(shape), 0.5, training=True)
    theirs = drop(torch.ones(shape), 0.5, training=True)

    assert per_channel(ours) == per_channel(theirs) == (True, 6 if shape[0] == 6 else 18)
    assert len(ours.unique()) == 2


def test_a_generator_of_ones_own_is_kept():
    """A call that names its generator draws from it."""
    with seeded(0) as mode:
        drawn = torch.rand(3, generator=torch.Generator().manual_seed(7))

    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert mode.draws == 0


def test_a_default_device_is_followed():
    """Numbers are made on the default device."""
    with torch.device("meta"), seeded(0):
        assert torch.rand(3).is_meta


# -- apply --------------------------------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 15).reshape(5, 3)


def test_rng_of_apply():
    """`rng=` determines the result and a generator moves on; without it a call is the module's."""
    apply, params, _ = functional(make_mlp(dropout=0.5))
    before = torch.get_rng_state()
    first, again, other = (apply(params, X, rng=seed) for seed in (0, 0, 1))
    by_generator = apply(params, X, rng=torch.Generator().manual_seed(0))

    assert torch.equal(first, again)
    assert torch.equal(first, by_generator)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(apply(params, X), apply(params, X))
    generator = torch.Generator().manual_seed(0)
    assert not torch.equal(apply(params, X, rng=generator), apply(params, X, rng=generator))


def test_rng_in_transforms_is_the_loop():
    """Vmap and grad draw the masks of the plain call."""
    apply, params, _ = functional(make_mlp(dropout=0.5))
    members = [params, params * 2.0]
    ours = torch.vmap(lambda p: apply(p, X, rng=3))(torch.stack(members))
    torch.testing.assert_close(ours, torch.stack([apply(p, X, rng=3) for p in members]))

    grads = torch.func.grad(lambda p: apply(p, X, rng=3).sum())(params)
    live = params.apply(lambda p: p.requires_grad_())
    apply(live, X, rng=3).sum().backward()
    assert torch.equal(grads["0", "weight"], live["0", "weight"].grad)


# -- members ------------------------------------------------------------------------------------------------------

FORWARDS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout1d": lambda x: F.dropout1d(x, 0.5),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rand": lambda x: x + torch.rand(5, 1),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randint": lambda x: x * torch.randint(1, 9, (5, 4)),
    "randperm": lambda x: x[torch.randperm(5)],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) * x,
    "multinomial": lambda x: x.gather(1, torch.multinomial(x.softmax(-1), 2)),
    "multinomial again": lambda x: x.gather(1, torch.multinomial(x.softmax(-1), 6, True)),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal std": lambda x: torch.normal(x, x.exp()),
    "uniform_": lambda x: torch.zeros_like(x).uniform_() * x,
}


class Ends(nn.Module):
    """A linear layer, and a function after it."""

    def __init__(self, fn):
        super().__init__()
        self.linear, self.fn = nn.Linear(3, 4), fn

    def forward(self, x):
        return self.fn(self.linear(x))


@pytest.mark.parametrize("name", FORWARDS)
def test_members_under_vmap_are_the_loop(name):
    """Member i draws the same numbers under vmap and grad, alone, and among more members."""
    apply, params, _ = functional(Ends(FORWARDS[name]))
    stacked = torch.stack([params, params, params * 2.0])

    def run(p, call):
        def loss(p):
            out = call(p)
            return out.square().sum(), out

        return torch.func.grad(loss, has_aux=True)(p)

    def member(p):
        level = torch._C._functorch.maybe_current_level()

        def call(p):
            with seeded(generators, level):
                return apply(p, X)

        return run(p, call)

    loop = [run(stacked[i], lambda p, i=i: apply(p, X, rng=member_generators(5, i + 1, i))) for i in range(3)]
    for n in (3, 2):
        generators = member_generators(5, n)
        grads, out = torch.vmap(member)(stacked[:n])
        torch.testing.assert_close(out, torch.stack([out for _, out in loop[:n]]))
        expected = torch.stack([grads["linear", "weight"] for grads, _ in loop[:n]])
        torch.testing.assert_close(grads["linear", "weight"], expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(loop[0][1], loop[1][1])


def test_member_seeds():
    """Members and neighbouring seeds share no numbers."""
    seeds = {member_seed(seed, i) for seed in range(-3, 60) for i in range(60)}

    assert len(seeds) == 63 * 60
    assert all(0 <= s < 1 << 63 for s in seeds)
    first, second = (torch.rand(4, generator=g) for g in member_generators(0, 2))
    assert not torch.equal(first, second)
    assert torch.equal(torch.rand(4, generator=member_generators(0, 9, 1)[0]), second)
