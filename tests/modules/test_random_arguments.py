"""Each draw that `apply(rng=)` serves takes the kinds of arguments that torch's takes, with the same meaning."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tdfunc as tdf
from tdfunc.modules.random import seeded

pytestmark = pytest.mark.sample(5)

X = torch.ones(4, 3)


def in_place(name, *before):
    """Return a draw into a copy of a tensor."""
    return lambda value: getattr(X.clone(), name)(*before, value)


def attend(value):
    """Return attention over one sequence."""
    return F.scaled_dot_product_attention(X[None], X[None], X[None], dropout_p=value)


# Of one number: a probability, a scale, a bound or a size.
DRAWS = {
    "dropout": lambda value: F.dropout(X, value),
    "dropout2d": lambda value: F.dropout2d(X[None, ..., None], value),
    "alpha_dropout": lambda value: F.alpha_dropout(X, value, True),
    "feature_alpha_dropout": lambda value: F.feature_alpha_dropout(X[..., None], value, True),
    "attention": attend,
    "rand": lambda value: torch.rand(value),
    "rand of two sizes": lambda value: torch.rand(2, value),
    "randn of a list": lambda value: torch.randn([2, value]),
    "rand of size=": lambda value: torch.rand(size=(value,)),
    "randint": lambda value: torch.randint(value, (2,)),
    "randint high": lambda value: torch.randint(0, value, (2,)),
    "randint low": lambda value: torch.randint(value, 9, (2,)),
    "randint size": lambda value: torch.randint(5, (value,)),
    "randint_like": lambda value: torch.randint_like(X, value),
    "randperm": lambda value: torch.randperm(value),
    "bernoulli": lambda value: torch.bernoulli(X, value),
    "bernoulli_": in_place("bernoulli_"),
    "multinomial": lambda value: torch.multinomial(X, value),
    "normal mean": lambda value: torch.normal(value, 1.0, (2,)),
    "normal std": lambda value: torch.normal(0.0, value, (2,)),
    "normal size": lambda value: torch.normal(0.0, 1.0, (2, value)),
    "normal of tensors": lambda value: torch.normal(X, value),
    "uniform_": in_place("uniform_", 0.0),
    "normal_": in_place("normal_", 0.0),
    "log_normal_": in_place("log_normal_", 0.0),
    "exponential_": in_place("exponential_"),
    "cauchy_": in_place("cauchy_", 0.0),
    "geometric_": in_place("geometric_"),
    "random_": in_place("random_"),
    "random_ of two": in_place("random_", 0),
    "init.uniform_": lambda value: nn.init.uniform_(X.clone(), 0.0, value),
    "init.normal_": lambda value: nn.init.normal_(X.clone(), 0.0, value),
}
KINDS = {
    "int": lambda number: int(number) or 1,
    "float": float,
    "bool": lambda number: True,
    "numpy float32": np.float32,
    "numpy float64": np.float64,
    "numpy int64": lambda number: np.int64(number or 1),
    "numpy int32": lambda number: np.int32(number or 1),
    "tensor": torch.tensor,
    "tensor of float64": lambda number: torch.tensor(number, dtype=torch.float64),
    "tensor of an integer": lambda number: torch.tensor(int(number) or 1),
    "tensor of shape [1]": lambda number: torch.tensor([number]),
    "tensor that requires grad": lambda number: torch.tensor(number, requires_grad=True),
    "string": str,
    "None": lambda number: None,
}


def accepts(draw, value):
    """Return whether a call works."""
    try:
        draw(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in DRAWS if name != "random_ of two"])
def test_a_served_draw_takes_what_torchs_takes(name, kind):
    """A value of each kind is accepted under a key if, and only if, torch accepts it."""
    draw, value = DRAWS[name], KINDS[kind](0.5)

    with seeded(tdf.random.key(0)):
        served = accepts(draw, value)

    assert served == accepts(draw, value)


def drawn(draw, value):
    """Return the numbers of a draw under one key."""
    with seeded(tdf.random.key(3)):
        return draw(value)


WHOLE = ["int", "numpy int64", "numpy int32", "tensor of an integer"]
SIZED = [name for name in DRAWS if "rand" in name or name in ("multinomial", "normal size")]
RATED = [name for name in DRAWS if name not in (*SIZED, "dropout", "dropout2d", "attention")]


@pytest.mark.parametrize("kind", WHOLE[1:])
@pytest.mark.parametrize("name", SIZED)
def test_a_size_or_bound_means_the_same_in_each_kind(name, kind):
    """Integers of numpy and of tensors draw the numbers of Python's."""
    assert torch.equal(drawn(DRAWS[name], KINDS[kind](3)), drawn(DRAWS[name], 3))


@pytest.mark.parametrize("kind", ["numpy float64", "tensor of float64", "tensor"])
@pytest.mark.parametrize("name", [*RATED, "dropout", "dropout2d", "attention"])
@pytest.mark.parametrize("number", [0.25, 0.75])
def test_a_number_means_the_same_in_each_kind(name, kind, number):
    """A number that float32 holds draws the same in each kind."""
    assert torch.equal(drawn(DRAWS[name], KINDS[kind](number)), drawn(DRAWS[name], number))


# Where rates are rounded to 16 and to 32 bits, and the ends.
RATES = [0.5, 0.1, 0.9, 0.0, 1.0, 0.001, 0.9995, 1e-7, 1 / 3]
TRAINED = {
    "dropout": lambda x, p: F.dropout(x, p),
    "dropout1d": lambda x, p: F.dropout1d(x, p),
    "dropout2d": lambda x, p: F.dropout2d(x[None, None], p),
    "alpha_dropout": lambda x, p: F.alpha_dropout(x, p, training=True),
    "feature_alpha_dropout": lambda x, p: F.feature_alpha_dropout(x, p, training=True),
    "attention": lambda x, p: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=p),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TRAINED)
def test_members_have_their_own_rates(name, dtype, generator):
    """A rate for each member under vmap, in a trace, and in a trace of a vmap drops what the member's number drops."""
    drop, x = TRAINED[name], torch.randn(6, 5, generator=generator).to(dtype)
    rates = torch.tensor(RATES, dtype=torch.float64)

    def one(p, key):
        with seeded(key):
            return drop(x, p)

    keys = tdf.random.split(tdf.random.key(1), len(RATES))
    expected = torch.stack([one(torch.tensor(p, dtype=torch.float64), key) for p, key in zip(RATES, keys, strict=True)])

    every = torch.vmap(one)
    jitted = tdf.jit(one, captures="constants")
    torch.testing.assert_close(every(rates, keys), expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(tdf.jit(every, captures="constants")(rates, keys), expected, rtol=1e-3, atol=1e-5)
    replayed = torch.stack([jitted(p, key) for p, key in zip(rates, keys, strict=True)])
    torch.testing.assert_close(replayed, expected, rtol=1e-3, atol=1e-5)
    assert jitted.cache_info().misses == 1


@pytest.mark.parametrize("p", [0.25, 0.5, 0.999, 0.0005, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_rate_without_a_value_drops_as_its_number(p, dtype):
    """The mask of a traced rate is the mask of the number, to the last bit."""
    x = torch.ones(2000, dtype=dtype)

    def one(rate, key):
        with seeded(key):
            return F.dropout(x, rate)

    key = tdf.random.key(5)
    assert torch.equal(tdf.jit(one, captures="constants")(torch.tensor(p, dtype=torch.float64), key), one(p, key))


class Sweep(nn.Module):
    """A layer whose rate is an argument."""

    def forward(self, x, rate):
        return F.dropout(F.dropout(x, rate), 0.5)


@pytest.mark.parametrize("how", ["auto", "loop", "vmap", "traced"])
def test_a_sweep_of_rates_drops_each_members_share(how):
    """Each way of an ensemble drops a member's share, and draws the numbers of the loop."""
    apply, _, _ = tdf.functional(Sweep())
    rates, x = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0]), torch.ones(20_000)
    ensemble = tdf.Ensemble(apply, how)

    out = ensemble(tdf.TensorDict({}, [5]), x, rates, in_dims=(None, 0), rng=0)

    loop = tdf.Ensemble(apply, "loop")(tdf.TensorDict({}, [5]), x, rates, in_dims=(None, 0), rng=0)
    torch.testing.assert_close(out, loop)
    torch.testing.assert_close((out == 0).float().mean(1), 1 - (1 - rates) / 2, rtol=0, atol=0.02)


UNKNOWN = {
    "uniform_": (lambda x, v: x.uniform_(-1.0, v), 2.0, -3.0),
    "normal_": (lambda x, v: x.normal_(0.0, v), 2.0, -1.0),
    "log_normal_": (lambda x, v: x.log_normal_(0.0, v), 0.5, 0.0),
    "exponential_": (lambda x, v: x.exponential_(v), 2.0, -1.0),
    "cauchy_": (lambda x, v: x.cauchy_(0.0, v), 2.0, 0.0),
    "geometric_": (lambda x, v: x.geometric_(v), 0.3, 1.5),
    "bernoulli_": (lambda x, v: x.bernoulli_(v), 0.3, 1.5),
    "dropout": (F.dropout, 0.3, 1.5),
    "randint": (lambda x, v: torch.randint(0, (v * 10).long(), x.shape), 2.0, -1.0),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_replay_draws_by_the_number_of_the_call(name):
    """In a trace the number is an argument: another one draws as without the trace, and a wrong one raises."""
    draw, good, bad = UNKNOWN[name]

    def one(v, key):
        with seeded(key):
            return draw(torch.ones(50, dtype=torch.float64), v)

    jitted, key = tdf.jit(one), tdf.random.key(7)
    jitted(torch.tensor(good / 2, dtype=torch.float64), key)

    number = torch.tensor(good, dtype=torch.float64)
    torch.testing.assert_close(jitted(number, key), one(number, key))
    with pytest.raises((RuntimeError, ValueError)):
        jitted(torch.tensor(bad, dtype=torch.float64), key)
    with pytest.raises((RuntimeError, ValueError)):
        one(torch.tensor(bad, dtype=torch.float64), key)


@pytest.mark.parametrize("shape", [3, np.int64(3), torch.tensor(3), (3,), [np.int32(3)], torch.Size([3])])
@pytest.mark.parametrize("draw", [tdf.random.normal, tdf.random.uniform, tdf.random.bits, tdf.random.split])
def test_shapes_of_random_functions_are_integers_of_any_kind(draw, shape):
    """The functions of `tdfunc.random` take sizes of numpy and of tensors."""
    assert torch.equal(draw(tdf.random.key(0), shape), draw(tdf.random.key(0), 3))


@pytest.mark.parametrize("count", [np.int64(5), torch.tensor(5)])
def test_an_order_of_a_count_of_any_kind(count):
    """`permutation` of a count of numpy is that of Python's; of a tensor it is an order of its rows."""
    assert (
        tdf.random.permutation(tdf.random.key(0), np.int64(5)).tolist()
        == tdf.random.permutation(tdf.random.key(0), 5).tolist()
    )
