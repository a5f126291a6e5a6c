"""`rng=`: one key, one result, however it runs; torch's distributions; nothing from the default generator."""

import itertools
import math
import secrets

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

import tdfunc as tdf
from tdfunc import functional, random
from tdfunc.modules.random import seeded
from tests.helpers import assert_trees_equal, quick
from tests.models import make_mlp

ONES = torch.ones(6, 5)
IMAGE = torch.ones(3, 4, 2, 2)
MHA = nn.MultiheadAttention(5, 5, dropout=0.5)


DRAWS = {
    "F.dropout": lambda: F.dropout(ONES),
    "F.dropout1d": lambda: F.dropout1d(ONES),
    "F.dropout2d": lambda: F.dropout2d(IMAGE),
    "F.dropout3d": lambda: F.dropout3d(IMAGE),
    "F.alpha_dropout": lambda: F.alpha_dropout(ONES, training=True),
    "F.feature_alpha_dropout": lambda: F.feature_alpha_dropout(IMAGE, training=True),
    "torch.rand": lambda: torch.rand(3, 2),
    "torch.randn": lambda: torch.randn((4,), requires_grad=True),
    "torch.randint": lambda: torch.randint(3, 9, (20,)),
    "torch.rand sizes": lambda: torch.rand(size=(3, 2), dtype=torch.float64),
    "torch.randn complex": lambda: torch.randn(3, dtype=torch.complex64),
    "torch.rand half": lambda: torch.rand(30, dtype=torch.bfloat16),
    "torch.randint high": lambda: torch.randint(9, size=(20,), dtype=torch.float32),
    "torch.randint named": lambda: torch.randint(low=-5, high=9, size=(20,)),
    "torch.randperm": lambda: torch.randperm(9, dtype=torch.int32),
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
    "uniform_ named": lambda: torch.empty(7, dtype=torch.float16).uniform_(to=3),
    "log_normal_": lambda: torch.empty(7).log_normal_(0.5, 0.1),
    "cauchy_": lambda: torch.empty(7).cauchy_(sigma=2.0),
    "random_": lambda: torch.empty(7).random_(0, 99),
    "random_ of all": lambda: torch.empty(7, dtype=torch.int32).random_(),
    "random_ of floats": lambda: torch.empty(7, dtype=torch.float64).random_(to=2**40),
    "geometric_": lambda: torch.empty(40).geometric_(0.2),
    "init.kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(4, 5)),
    "init.orthogonal_": lambda: nn.init.orthogonal_(torch.empty(4, 5)),
    "init.sparse_": lambda: nn.init.sparse_(torch.empty(4, 5), 0.5),
    "init.uniform_": lambda: nn.init.uniform_(torch.empty(4, 5), b=2.0),
    "init.normal_": lambda: nn.init.normal_(tensor=torch.empty(4, 5)),
    "init.trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(4, 5)),
    "F.gumbel_softmax": lambda: F.gumbel_softmax(ONES),
    "attention": lambda: F.scaled_dot_product_attention(*torch.ones(3, 6, 5), dropout_p=0.5),
    "nn.MultiheadAttention": lambda: MHA(ONES, ONES, ONES)[0].detach(),
    "nn.Linear": lambda: nn.Linear(3, 4).weight,
    "nn.LSTM": lambda: nn.LSTM(3, 4).weight_hh_l0,
    "distributions.Normal": lambda: torch.distributions.Normal(0.0, 1.0).rsample((3,)),
    "distributions.Categorical": lambda: torch.distributions.Categorical(torch.ones(9)).sample((9,)),
}


def drawn(name, seed):
    """What a draw gives with the key of a seed."""
    with seeded(random.key(seed)):
        return DRAWS[name]()


@pytest.mark.parametrize("name", DRAWS)
def test_one_key_one_draw(name):
    """A key determines the numbers."""
    assert torch.equal(drawn(name, 0), drawn(name, 0))


@pytest.mark.parametrize("name", DRAWS)
def test_another_key_another_draw(name):
    """Of two other keys, at least one gives other numbers: few values may agree by chance."""
    ours = drawn(name, 0)

    assert not (torch.equal(ours, drawn(name, 1)) and torch.equal(ours, drawn(name, 2)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_served(name, seed):
    """Each draw is counted, and the default generator does not move."""
    before = torch.get_rng_state()
    with seeded(random.key(seed)) as mode:
        DRAWS[name]()

    assert mode.count > 0
    assert torch.equal(torch.get_rng_state(), before)


def drawn_into_an_object():
    """A tensor that is filled where a name has it, and through a view."""
    noise = torch.empty(6)
    noise[:4].normal_()
    noise[4:].uniform_(2, 3)
    return noise


# Of integers, with a tensor from outside, and with a loop until all numbers fit.
SHARED = ("random_ of all", "bernoulli_ tensor", "init.trunc_normal_")
IN_PLACE = {
    **{name: DRAWS[name] for name in DRAWS if name.split()[0].endswith("_") and name not in SHARED},
    "distributions.Normal": DRAWS["distributions.Normal"],
    "distributions.Laplace": lambda: torch.distributions.Laplace(
        torch.ones(3), torch.ones(3), validate_args=False
    ).rsample(),
    "distributions.Exponential": lambda: torch.distributions.Exponential(torch.ones(3), validate_args=False).rsample(),
    "empty_like": lambda: torch.empty_like(torch.ones(6, 5)).normal_(),
    "new_empty": lambda: torch.ones(6, 5).new_empty(3, 2).normal_(),
    "new": lambda: torch.ones(6, 5).new(3, 2).normal_(),
    "an object": drawn_into_an_object,
}


class Drawing(nn.Module):
    """A layer, and a draw that no input of a member enters."""

    def __init__(self, draw):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.draw = draw

    def forward(self):
        return self.scale * self.draw()


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("how", ["vmap", "traced"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_memory_of_a_member_is_filled_by_its_key(name, how):
    """Draws in place under `vmap` are those of each member alone."""
    apply, members = make_drawing(IN_PLACE[name])
    got = tdf.Ensemble(apply, how=how)(members, rng=0)

    keys = random.fold_in(random.key(0), torch.arange(3))
    want = [apply(members[i], rng=keys[i]) for i in range(3)]
    torch.testing.assert_close(got, torch.stack(want))


@pytest.mark.parametrize("name", ["normal_", "distributions.Laplace", "an object"])
def test_gradients_through_memory_of_a_member(name):
    """`vmap` of `grad`, with a key for each member."""
    apply, members = make_drawing(IN_PLACE[name])
    keys = random.fold_in(random.key(0), torch.arange(3))
    got = torch.vmap(torch.func.grad(lambda p, key: apply(p, rng=key).sum()))(members, keys)

    want = [(apply(members[i], rng=keys[i]) / members[i]["scale"]).sum() for i in range(3)]
    torch.testing.assert_close(got["scale"], torch.stack(want))


def make_drawing(draw):
    """The function and the weights of three members that draw."""
    apply, _, _ = functional(Drawing(draw))
    return apply, tdf.stack_modules([Drawing(draw) for _ in range(3)]).detach()


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_hard_choices_of_members():
    """`F.gumbel_softmax` writes the choices in place, without a warning of torch."""
    keys = random.fold_in(random.key(0), torch.arange(3))
    logits = torch.randn(3, 4, 5)
    apply, params, _ = functional(Choice())
    got = torch.vmap(lambda x, key: apply(params, x, rng=key))(logits, keys)

    want = [apply(params, logits[i], rng=keys[i]) for i in range(3)]
    torch.testing.assert_close(got, torch.stack(want))


class Choice(nn.Module):
    """A choice of one of several."""

    def forward(self, logits):
        return F.gumbel_softmax(logits, hard=True)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_look_like_torchs(name):
    """Shape, dtype and whether a draw takes gradients are torch's."""
    theirs, ours = DRAWS[name](), drawn(name, 0)

    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert ours.requires_grad == theirs.requires_grad


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
    "randint": lambda: torch.randint(5, (N,)).float(),
    "randint_like": lambda: torch.randint_like(BIG, 2, 7),
    "geometric_": lambda: torch.empty(N).geometric_(0.2),
    "random_": lambda: torch.empty(N).random_(3, 9),
    "random_ of all": lambda: torch.empty(N, dtype=torch.int32).random_() / 2**20,
    "random_ of floats": lambda: torch.empty(N).random_() / 2**13,
    "randn complex": lambda: torch.randn(N, dtype=torch.complex64).abs(),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.tensor([0.0, 1.0]).expand(N, 2))[:, 0],
    "attention": lambda: F.scaled_dot_product_attention(BIG[:, None, None], *torch.ones(2, N, 4, 1), dropout_p=0.3)[
        :, 0, 0
    ],
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(200, 200)).flatten() * 14,
}


@pytest.mark.parametrize("name", SAMPLES)
def test_distributions_are_torchs(name):
    """A served function draws from torch's distribution."""
    torch.manual_seed(0)
    theirs = SAMPLES[name]()
    with seeded(random.key(1)):
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
    """Dropping nothing or everything, also in place, gives finite numbers; evaluation mode drops nothing."""
    with seeded(random.key(0)):
        out = drop(ONES, p, training=True)
        assert torch.equal(drop(ONES, p, training=False), ONES)
    with seeded(random.key(0)):
        assert drop(given := ONES.clone(), p, True, True) is given

    assert torch.equal(given, out)
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

    with seeded(random.key(0)):
        ours = drop(torch.ones(shape), 0.5, training=True)
    theirs = drop(torch.ones(shape), 0.5, training=True)

    assert per_channel(ours) == per_channel(theirs) == (True, 6 if shape[0] == 6 else 18)
    assert len(ours.unique()) == 2


WRAPPED = {
    "init.normal_": (nn.init, "normal_", lambda: nn.init.normal_(torch.empty(3), 1.0, 2.0)),
    "init.uniform_": (nn.init, "uniform_", lambda: nn.init.uniform_(torch.empty(3), 1.0, 2.0)),
    "init.kaiming_uniform_": (nn.init, "kaiming_uniform_", lambda: nn.init.kaiming_uniform_(torch.empty(3, 2))),
    "uniform_ in kaiming_uniform_": (nn.init, "uniform_", lambda: nn.init.kaiming_uniform_(torch.empty(3, 2))),
    "F.dropout": (F, "dropout", lambda: F.dropout(ONES)),
    "F.dropout2d": (F, "dropout2d", lambda: F.dropout2d(IMAGE)),
    "F.gumbel_softmax": (F, "gumbel_softmax", lambda: F.gumbel_softmax(ONES)),
    "torch.randn": (torch, "randn", lambda: torch.randn(3)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_function_that_a_library_wraps_is_served(name, monkeypatch):
    """A library may put a wrapper in the place of a function of torch: the draw is the function's."""
    module, attribute, draw = WRAPPED[name]
    original = getattr(module, attribute)
    with seeded(random.key(0)):
        expected = draw()

    def wrapper(*args, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(module, attribute, wrapper)
    with seeded(random.key(0)):
        drawn = draw()

    assert torch.equal(drawn, expected)


def test_a_generator_of_ones_own_is_kept():
    """A call that names its generator draws from it."""
    with seeded(random.key(0)) as mode:
        drawn = torch.rand(3, generator=torch.Generator().manual_seed(7))

    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert mode.count == 0


def test_the_default_device_is_followed():
    """Numbers are made on the default device, also with a key on another."""
    with torch.device("meta"), seeded(random.key(0, device="cpu")):
        assert torch.rand(3).is_meta


DRAWS_ON_META = {
    "rand": lambda: torch.rand(3, device="meta"),
    "randn": lambda: torch.randn(3, device="meta"),
    "randint": lambda: torch.randint(9, (3,), device="meta"),
    "randperm": lambda: torch.randperm(3, device="meta"),
    "rand_like": lambda: torch.rand_like(ONES, device="meta"),
    "randn_like": lambda: torch.randn_like(ONES, device="meta"),
    "randint_like": lambda: torch.randint_like(ONES, 9, device="meta"),
}


@pytest.mark.parametrize("draw", DRAWS_ON_META.values(), ids=DRAWS_ON_META)
def test_a_device_that_is_asked_for_is_followed(draw):
    """Numbers are made on the device of the argument."""
    with seeded(random.key(0)):
        assert draw().is_meta


def test_devices_are_followed_in_an_ensemble():
    """A member's numbers are made on the device that its forward asks for."""
    apply, params, _ = functional(ends(lambda x: torch.rand(3, device="meta")))

    assert tdf.Ensemble(apply, "loop")(torch.stack([params] * 3), X, rng=0).is_meta


NAN, INF = math.nan, math.inf
BOUNDS = [(0, 1), (5, 5), (5, 2), (0, 256), (0, 257), (-129, 0), (0, 2049), (0, 2**17), (0, 2**63 - 1), (-(2**63), 0)]
SPREADS = [(0, 1), (0, 0), (0, -1), (0, NAN), (NAN, 1), (0, INF)]
CHANCES = [(p,) for p in (0.5, 0, 1, -0.1, 1.1, NAN, 1e-30)]
FLOATS = [torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.uint8, torch.int8, torch.bool, torch.complex64]
SIZES = [((-1,),), ((-1, -1),), ((2, -1),), ((-1, 0),), ((0,),)]
ROWS = [[NAN, 1.0], [-1.0, 2.0], [0.0, 0.0], [INF, 1.0], [1.0, 0.0], [], [[0.0], [1.0]]]
WEIGHTS = [(torch.tensor(row), k, r) for row in ROWS for k in (0, 1, 2) for r in (False, True)]
OUT = [(None,), *[(dtype,) for dtype in DTYPES]]
# By name a function of a dtype and further arguments, these, and the dtypes if not all.
REFUSALS = {
    "uniform_": (lambda d, *a: torch.ones(5, dtype=d).uniform_(*a),
                 [*BOUNDS[:3], (NAN, 1), (0, INF), (-INF, 0), (-6e4, 6e4), (-3e38, 3e38)]),
    "normal_": (lambda d, *a: torch.ones(5, dtype=d).normal_(*a), SPREADS),
    "log_normal_": (lambda d, *a: torch.ones(5, dtype=d).log_normal_(*a), SPREADS),
    "cauchy_": (lambda d, *a: torch.ones(5, dtype=d).cauchy_(*a), SPREADS),
    "exponential_": (lambda d, *a: torch.ones(5, dtype=d).exponential_(*a), [(1,), (0,), (-1,), (NAN,), (INF,)]),
    "geometric_": (lambda d, *a: torch.ones(5, dtype=d).geometric_(*a), CHANCES),
    "bernoulli_": (lambda d, *a: torch.ones(5, dtype=d).bernoulli_(*a), CHANCES),
    "bernoulli_ tensor": (lambda d, p: torch.ones(5).bernoulli_(torch.full((5,), p).to(d)), CHANCES),
    "bernoulli": (lambda d, *a: torch.bernoulli(torch.ones(5, dtype=d), *a), [(), *CHANCES]),
    "bernoulli tensor": (lambda d, p: torch.bernoulli(torch.full((5,), p).to(d)), CHANCES),
    "random_": (lambda d, *a: torch.ones(5, dtype=d).random_(*a), [(), (0,), *BOUNDS]),
    "randint": (lambda d, *a: torch.randint(*a, (5,), dtype=d), BOUNDS),
    "randint_like": (lambda d, *a: torch.randint_like(torch.ones(5, dtype=d), *a), BOUNDS),
    "randperm": (lambda d, n: torch.randperm(n, dtype=d), [(n,) for n in (-1, 0, 1, 2, 129, 256, 257, 2050, 5000)]),
    "normal": (lambda d, m, s: torch.normal(m, s, (3,), dtype=d), SPREADS),
    "normal mean": (lambda d, m, s: torch.normal(torch.ones(3, dtype=d), s), SPREADS),
    "normal std": (lambda d, m, s: torch.normal(m, torch.full((3,), s).to(d)), SPREADS),
    "normal shapes": (lambda d, a, b: torch.normal(torch.ones(a, dtype=d), torch.ones(b)), [((2, 3), 4), ((2, 1), 3)]),
    "multinomial": (lambda d, w, *a: torch.multinomial(w.to(d), *a), WEIGHTS),
    "multinomial dims": (lambda d, *a: torch.multinomial(torch.ones(a, dtype=d), 1), [(), (2, 2, 2), (0, 3)]),
    "rand": (lambda d, *a: torch.rand(*a, dtype=d), SIZES),
    "randn": (lambda d, *a: torch.randn(*a, dtype=d), SIZES[:-1]),
    "randint size": (lambda d, *a: torch.randint(1, *a, dtype=d), SIZES),
    "rand_like": (lambda d: torch.rand_like(torch.ones(3, dtype=d)), [()]),
    "randn_like": (lambda d: torch.randn_like(torch.ones(3, dtype=d)), [()]),
    "dropout": (lambda d, p: F.dropout(torch.ones(3, dtype=d), p), CHANCES, FLOATS),
    "dropout2d": (lambda d, p: F.dropout2d(torch.ones(2, 3, 4, 5, dtype=d), p), CHANCES, FLOATS),
    "alpha_dropout": (lambda d, p: F.alpha_dropout(torch.ones(3, dtype=d), p, True), CHANCES, FLOATS),
    "attention": (lambda d, p: F.scaled_dot_product_attention(*torch.ones(3, 6, 5), dropout_p=p), CHANCES[:3]),
    "rand, out": (lambda d, dtype: torch.rand(3, dtype=dtype, out=torch.ones(0, dtype=d)), OUT),
    "rand, full": (lambda d: torch.no_grad()(torch.rand)(3, out=nn.Parameter(torch.ones(3, dtype=d))), [()], FLOATS),
    "kaiming_": (lambda d, *a: nn.init.kaiming_uniform_(torch.ones(a, dtype=d)), [(0, 2), (2, 0), (3,)], FLOATS),
    "randint, out": (lambda d, dtype: torch.randint(1, (3,), dtype=dtype, out=torch.ones(0, dtype=d)), OUT),
    "randperm, out": (lambda d, dtype: torch.randperm(2, dtype=dtype, out=torch.ones(5, dtype=d)[:0]), OUT),
    "bernoulli, out": (lambda d: torch.bernoulli(ONES, out=torch.ones(0, dtype=d)), [()], DTYPES[:-1]),
    "multinomial, out": (lambda d: torch.multinomial(ONES, 2, out=torch.ones(0, dtype=d)), [()]),
}  # fmt: skip


# Torch's own, of integers that a float does not hold, of outputs that it resizes, and of dropped real parts.
@pytest.mark.filterwarnings("ignore:.* out of bounds", "ignore:An output with one", "ignore:Casting|Initializing")
@pytest.mark.parametrize("name", REFUSALS)
def test_a_served_draw_refuses_what_torchs_own_refuses(name):
    """On extreme and invalid arguments a served function raises if torch's does, else gives its shape and dtype."""
    draw, arguments, *kinds = REFUSALS[name]
    differ = []

    def outcome(*given):
        try:
            made = draw(*given)
        except (RuntimeError, ValueError, TypeError):
            return "raises"
        return made.dtype, made.shape

    for dtype, given in itertools.product(*kinds or [DTYPES], arguments):
        theirs = outcome(dtype, *given)
        with seeded(random.key(0)):
            ours = outcome(dtype, *given)
        if ours != theirs:
            differ.append((dtype, given, ours, theirs))

    assert differ == []


BAD = {
    "multinomial": (lambda w: torch.multinomial(w, 1), [[1.0, 1.0], [NAN, 1.0]]),
    "multinomial of nothing": (lambda w: torch.multinomial(w, 1), [[1.0, 1.0], [0.0, 0.0]]),
    "bernoulli": (torch.bernoulli, [[0.5, 1.0], [0.5, 1.5]]),
    "normal": (lambda std: torch.normal(0.0, std), [[1.0, 1.0], [1.0, -1.0]]),
}


WAYS_OF_DRAWING = {
    "vmap": lambda run, x: torch.vmap(run)(x),
    "alone": lambda run, x: run(x[1]),
    "gradient": lambda run, x: torch.func.grad(lambda x: (run(x) * x.sum()).sum())(x[1]),
}


@pytest.mark.parametrize("way", WAYS_OF_DRAWING)
@pytest.mark.parametrize("name", BAD)
def test_a_members_bad_values_are_refused(name, way):
    """Inside vmap and under grad as outside."""
    draw, values = BAD[name]
    apply, params, _ = functional(Calls(draw))

    with pytest.raises((RuntimeError, ValueError), match="must be|weights"):
        WAYS_OF_DRAWING[way](lambda x: apply(params, x, rng=random.key(0)), torch.tensor(values))


@pytest.mark.parametrize("name", BAD)
def test_a_members_bad_values_are_refused_in_a_replay(name):
    """A replay that was recorded with good values of a member refuses bad ones."""
    (draw, values), key = BAD[name], random.key(0)
    apply, params, _ = functional(Calls(draw))
    mapped = lambda x, key: torch.vmap(lambda x: apply(params, x, rng=key))(x)  # noqa: E731
    good, bad = torch.tensor(values)[:1], torch.tensor(values)[1:]
    replay = tdf.jit(mapped)

    assert replay(good, key).shape == mapped(good, key).shape
    with pytest.raises((RuntimeError, ValueError), match="must be|weights"):
        replay(bad, key)


def new_key():
    """A key that no run has had before."""
    return random.key(secrets.randbits(64))


LAWS = {
    "normal_": (lambda x: x.normal_(1, 3), stats.norm(1, 3)),
    "exponential_": (lambda x: x.exponential_(0.3), stats.expon(scale=1 / 0.3)),
    "cauchy_": (lambda x: x.cauchy_(1, 2), stats.cauchy(1, 2)),
    "log_normal_": (lambda x: x.log_normal_(0.5, 3.0), stats.lognorm(3.0, scale=math.exp(0.5))),
    "randn_like": (torch.randn_like, stats.norm()),
    "uniform_()": (torch.Tensor.uniform_, stats.uniform()),
    "normal_()": (torch.Tensor.normal_, stats.norm()),
    "exponential_()": (torch.Tensor.exponential_, stats.expon()),
    "cauchy_()": (torch.Tensor.cauchy_, stats.cauchy()),
    "log_normal_()": (torch.Tensor.log_normal_, stats.lognorm(2.0, scale=math.e)),
    "gumbel": (lambda x: random.gumbel(new_key(), x.shape, dtype=x.dtype), stats.gumbel_r()),
}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_draws_fit_their_law_in_every_dtype(name, dtype):
    """With a new seed each time: numbers that round to the same one, spread again, fit scipy's distribution."""
    (draw, law), key = LAWS[name], new_key()
    with seeded(key):
        drawn = draw(torch.empty(10**5, dtype=dtype))
    ends = [(drawn.double() + drawn.nextafter(drawn.new_tensor(end)).double()) / 2 for end in (-INF, INF)]
    low, high = (law.cdf(end.numpy()) for end in ends)
    share = np.random.default_rng(key.tolist()[0] & 0xFFFF).uniform(size=low.shape)

    assert stats.kstest(low + share * (high - low), "uniform").pvalue > 1e-7, key


# -- apply --------------------------------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 15).reshape(5, 3)


def test_rng_of_apply(generator):
    """`rng=` determines the result and a generator moves on; without it a call is the module's."""
    apply, params, _ = functional(make_mlp(dropout=0.5))
    before = torch.get_rng_state()
    first, by_key, other = (apply(params, X, rng=rng) for rng in (0, random.key(0), 1))
    state = generator.get_state()
    drawn = [apply(params, X, rng=generator) for _ in range(2)]
    generator.set_state(state)

    assert torch.equal(first, by_key)
    assert not torch.equal(first, other)
    assert not torch.equal(*drawn)
    assert torch.equal(drawn[0], apply(params, X, rng=generator))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(apply(params, X), apply(params, X))


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


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args):
        return self.fn(*args)


def ends(fn):
    """A linear layer, and a function after it."""
    return nn.Sequential(nn.Linear(3, 4), Calls(fn))


def make_member(name):
    """The output of one member by parameters, data and a key; and the parameters of three."""
    apply, params, _ = functional(ends(FORWARDS[name]).double())
    return lambda params, x, key: apply(params, x, rng=key), torch.stack([params, params, params * 2.0])


def gradient_of(member):
    """Gradients and output of a member."""

    def loss(params, x, key):
        out = member(params, x, key)
        return out.square().sum(), out

    return torch.func.grad(loss, has_aux=True)


@pytest.mark.parametrize("wrap", [lambda fn: fn, tdf.jit, torch.vmap], ids=["eager", "jit", "vmap"])
def test_draw_n_is_that_of_the_key_and_n(wrap):
    """However many draws there are, the n-th is made from the key folded with n, and no two are alike."""
    keys = random.split(random.key(5), 2)

    def draws(key):
        with seeded(key):
            return torch.stack([torch.rand(3) for _ in range(40)])

    drawn = wrap(draws)(keys) if wrap is torch.vmap else torch.stack([wrap(draws)(key) for key in keys])

    expected = [[random.uniform(random.fold_in(key, n), (3,)) for n in range(40)] for key in keys]
    assert torch.equal(drawn, torch.stack([torch.stack(rows) for rows in expected]))


@pytest.mark.parametrize("name", FORWARDS)
def test_a_draw_is_the_same_however_it_runs(name):
    """A loop, vmap, vmap in vmap, and fewer members give a member the same numbers."""
    member, params = make_member(name)
    step = gradient_of(member)
    keys, x = random.split(random.key(5), 3), X.double()
    loop = [step(params[i], x, keys[i]) for i in range(3)]
    grads, out = torch.stack([grads for grads, _ in loop]), torch.stack([out for _, out in loop])
    mapped = torch.vmap(step, in_dims=(0, None, 0))
    once = mapped(params, x, keys)
    twice = [y[0] for y in torch.vmap(mapped, in_dims=(0, None, 0))(params[None], x, keys[None])]

    torch.testing.assert_close([once[1], twice[1]], [out, out])
    assert_trees_equal([once[0], twice[0]], [grads, grads], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mapped(params[:2], x, keys[:2])[1], out[:2])
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize("name", quick(FORWARDS, "dropout", "multinomial"))
def test_a_trace_draws_by_the_keys_of_each_call(name):
    """A trace gives a member the numbers of the function, by any keys."""
    member, params = make_member(name)
    mapped = torch.vmap(gradient_of(member), in_dims=(0, None, 0))
    traced, keys = tdf.jit(mapped), [random.split(random.key(seed), 3) for seed in (5, 6)]
    found, expected = [[run(params, X.double(), k) for k in keys] for run in (traced, mapped)]

    torch.testing.assert_close([out for _, out in found], [out for _, out in expected])
    assert_trees_equal([grads for grads, _ in found], [grads for grads, _ in expected], rtol=1e-10, atol=1e-10)


# Dynamo of torch 2.13 shows a mode no torch.normal and no torch.rand*_like.
UNSEEN = {"randn_like", "normal", "normal std"}


SEEN = [name for name in FORWARDS if name not in UNSEEN]


# The default compiler takes three times as long: it compiles one of them.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [(SEEN[0], "inductor"), *[(name, "aot_eager") for name in SEEN]])
def test_a_compiled_or_exported_draw_is_the_same(name, backend):
    """`torch.compile(fullgraph=True)` of mapped gradients, and a program of torch.export, take any key."""
    member, params = make_member(name)
    mapped = torch.vmap(gradient_of(member), in_dims=(0, None, 0))
    # torch.export cannot take a gradient.
    forward = Calls(torch.vmap(member, in_dims=(0, None, 0)))
    keys = [random.split(random.key(seed), 3) for seed in range(2)]
    torch.compiler.reset()
    compiled = torch.compile(mapped, fullgraph=True, backend=backend)
    program = torch.export.export(forward, (params, X.double(), keys[0]), strict=False).module()
    found, expected = [[run(params, X.double(), k) for k in keys] for run in (compiled, mapped)]
    outs = [out for _, out in expected]

    torch.testing.assert_close([out for _, out in found], outs)
    torch.testing.assert_close([program(params, X.double(), k) for k in keys], outs)
    assert_trees_equal([grads for grads, _ in found], [grads for grads, _ in expected], rtol=1e-10, atol=1e-10)


def test_a_transform_inside_forward():
    """Draws inside a gradient that forward takes, and after it."""
    forward = ends(lambda y: F.dropout(torch.func.grad(lambda z: (F.dropout(z) ** 2).sum())(y)) + torch.rand(4))
    apply, params, _ = functional(forward)
    with seeded(random.key(0)):
        expected = forward[0](X)
        masks = [F.dropout(torch.ones_like(expected)) for _ in range(2)]
        expected = 2 * expected * masks[0] ** 2 * masks[1] + torch.rand(4)

    torch.testing.assert_close(apply(params, X, rng=0), expected)


# -- attention ----------------------------------------------------------------------------------------------------


ATTENTION = {
    "plain": ((2, 4, 5, 8), (2, 4, 7, 8), {}),
    "bool mask": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": torch.rand(5, 7) > 0.3}),
    "float mask": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": torch.randn(2, 1, 5, 7, dtype=torch.float64)}),
    "causal": ((2, 4, 5, 8), (2, 4, 5, 8), {"is_causal": True}),
    "scale": ((5, 8), (7, 8), {"scale": 0.3}),
    "groups": ((2, 4, 5, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    "no rows left": ((5, 8), (7, 8), {"attn_mask": torch.zeros(5, 7, dtype=torch.bool)}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_drops_its_weights(name):
    """Attention with dropout is softmax(q k^T) with dropped weights, times v; without, it is torch's."""
    query_shape, key_shape, options = ATTENTION[name]
    q, (k, v) = torch.randn(query_shape).double(), torch.randn(2, *key_shape).double()
    # Values that pick out the weights: the product is then the matrix of weights itself.
    weights = F.scaled_dot_product_attention(q, k, torch.eye(k.shape[-2]).double().expand(*k.shape[:-1], -1), **options)
    with seeded(random.key(0)):
        mask = F.dropout(torch.ones_like(weights), 0.3)
    values = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3) if v.dim() > 2 else v
    with seeded(random.key(0), strict=True):
        ours = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, **options)
        plain = F.scaled_dot_product_attention(q, k, v, **options)

    torch.testing.assert_close(ours, (weights * mask) @ values)
    assert torch.equal(plain, F.scaled_dot_product_attention(q, k, v, **options))


@pytest.mark.parametrize("need_weights", [True, False])
def test_heads_of_members_are_the_loop(need_weights):
    """Multi-head attention in training mode draws the same under vmap, in a loop and in a trace, and gradients flow."""
    model = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True).double()
    apply, params, _ = functional(model)
    stacked, x = torch.stack([params, params * 2.0]), torch.randn(3, 5, 8).double()
    ways = [tdf.Ensemble(apply, how) for how in ("loop", "vmap", "traced")]
    outs = [way(stacked, x, x, x, need_weights=need_weights, rng=2)[0] for way in ways]

    def grads(way):
        total = lambda p: way(p, x, x, x, need_weights=need_weights, rng=2)[0].square().sum()  # noqa: E731
        return torch.func.grad(total)(stacked)

    torch.testing.assert_close(outs[1:], outs[:1] * 2)
    assert not torch.allclose(outs[0][0], apply.eval()(params, x, x, x)[0])
    assert_trees_equal(grads(ways[1]), grads(ways[0]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dropout_in_low_precision(dtype):
    """Kept units are scaled in the dtype of the input, by masks that do not depend on it."""
    x = torch.ones(500, dtype=dtype, requires_grad=True)
    with seeded(random.key(0)):
        out = F.dropout(x, 0.2)
    with seeded(random.key(0)):
        expected = F.dropout(torch.ones(500), 0.2)
    out.sum().backward()

    assert out.dtype == x.grad.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=0)
    assert torch.equal(out.detach(), x.grad)


class Counts(nn.Module):
    """A layer that adds draws of a Poisson distribution."""

    def forward(self, x):
        return x + torch.poisson(x.detach().exp())


@pytest.mark.parametrize("how", ["apply", "loop"])
def test_a_recorded_gradient_draws_by_keys_or_not_at_all(how):
    """Draws that take no key are refused in a recorded gradient too: a replay would draw other numbers each time."""
    apply, params, _ = functional(nn.Sequential(nn.Linear(3, 3), Counts()))
    x, keys = torch.randn(5, 3), random.split(random.key(0), 2)
    if how == "loop":
        ensemble, params = tdf.Ensemble(apply, "loop"), torch.stack([params, params])
        run = lambda p: ensemble(p, x, rng=keys)  # noqa: E731
    else:
        run = lambda p: apply(p, x, rng=keys[0])  # noqa: E731
    total = lambda p: run(p).sum()  # noqa: E731

    with pytest.raises(tdf.UnsupportedError, match="past rng="):
        tdf.jit(torch.func.grad(total), captures="constants")(params)
