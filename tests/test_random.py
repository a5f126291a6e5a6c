"""Random keys: each draw is a function of the key and the shape, whatever runs it; and the numbers are good."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from torch.fx.experimental.proxy_tensor import make_fx

import tdfunc as tdf
from tdfunc import random
from tests.helpers import quick

WORD = (1 << 64) - 1
SEEDS = st.integers(-(2**70), 2**70)
DRAWS = {
    "bits": lambda k: random.bits(k, (3, 5)),
    "half bits": lambda k: random.bits(k, (3, 5), dtype=torch.int32),
    "uniform": lambda k: random.uniform(k, (3, 5), minval=-1.0, maxval=3.0),
    "normal": lambda k: random.normal(k, (3, 5), dtype=torch.float64),
    "truncated_normal": lambda k: random.truncated_normal(k, -1.0, 2.0, (3, 5)),
    "bernoulli": lambda k: random.bernoulli(k, 0.3, (3, 5)),
    "bernoulli of a tensor": lambda k: random.bernoulli(k, torch.full((3, 1), 0.3), (3, 5)),
    "randint": lambda k: random.randint(k, (3, 5), -4, 9),
    "exponential": lambda k: random.exponential(k, (3, 5)),
    "gumbel": lambda k: random.gumbel(k, (3, 5), dtype=torch.bfloat16),
    "categorical": lambda k: random.categorical(k, torch.arange(12.0).reshape(3, 4)),
    "permutation": lambda k: random.permutation(k, torch.arange(15.0)),
    "choice": lambda k: random.choice(k, 9, (4,), replace=False, p=torch.arange(1.0, 10.0)),
    "choice of a choice": lambda k: random.choice(k, 9, (4,), p=torch.arange(1.0, 10.0)),
    "split": lambda k: random.split(k, (2, 3)),
    "fold_in": lambda k: random.fold_in(k, 7),
}
draws = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def mix(z, first, second, shifts):
    """One of the two hashes of SplitMix64, in Python's integers."""
    z = (z ^ (z >> shifts[0])) * first & WORD
    z = (z ^ (z >> shifts[1])) * second & WORD
    return z ^ (z >> shifts[2])


def stafford(z):
    """The hash of states and draws."""
    return mix(z & WORD, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, (30, 27, 31))


def murmur(z):
    """The hash of gammas."""
    return mix(z & WORD, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, (33, 33, 33))


def derive(state, gamma, number, salt):
    """The reference of `fold_in`, `split` and `key`."""
    new = stafford(stafford(number * 0x9E3779B97F4A7C15 + (gamma ^ salt)) ^ state)
    odd = murmur(stafford(number * 0xD1B54A32D192ED03 + (state ^ salt)) + gamma) | 1
    few = bin(odd ^ (odd >> 1)).count("1") < 24
    return new, odd ^ 0xAAAAAAAAAAAAAAAA if few else odd


def unsigned(x):
    """Words as Python's integers."""
    return [n & WORD for n in x.flatten().tolist()]


SALTS = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7


@given(seed=SEEDS, data=SEEDS, count=st.integers(0, 9))
def test_keys_are_splitmix(seed, data, count):
    """Seeds, folded and split keys equal the algorithm in Python's integers."""
    state, gamma = derive(SALTS[0], 1, seed, SALTS[0])
    key = random.key(seed)
    rows = [derive(state, gamma, i, SALTS[1]) for i in range(count)]

    assert tuple(unsigned(key)) == (state, gamma)
    assert tuple(unsigned(random.fold_in(key, data))) == derive(state, gamma, data, SALTS[2])
    assert [tuple(unsigned(row)) for row in random.split(key, count)] == rows


@given(seed=SEEDS, count=st.integers(0, 9))
def test_bits_are_splitmix(seed, count):
    """The draws of a key equal the algorithm in Python's integers; a draw of 32 bits is half of one."""
    state, gamma = derive(SALTS[0], 1, seed, SALTS[0])
    key = random.key(seed)
    whole = unsigned(random.bits(key, (count,)))
    words = [n & 0xFFFFFFFF for n in random.bits(key, (count,), dtype=torch.int32).tolist()]

    assert whole == [stafford(state + i * gamma) for i in range(1, count + 1)]
    assert words == [half for n in whole for half in (n & 0xFFFFFFFF, n >> 32)][:count]


@draws
def test_a_draw_is_the_same_however_it_runs(draw):
    """A loop, vmap, nested vmap and chunks give the same bits."""
    keys = random.split(random.key(3), 6)
    loop = torch.stack([draw(k) for k in keys])

    assert torch.equal(torch.vmap(draw)(keys), loop)
    assert torch.equal(torch.vmap(draw, chunk_size=4)(keys), loop)
    assert torch.equal(torch.vmap(torch.vmap(draw))(keys.reshape(2, 3, 2)).flatten(0, 1), loop)


@pytest.mark.parametrize("draw", quick(DRAWS, "normal", "choice", "fold_in"))
def test_a_trace_draws_by_the_keys_of_each_call(draw):
    """A graph of `make_fx` and a trace of `jit` give the bits of the function, by any keys."""
    drawn = torch.vmap(DRAWS[draw])
    keys = [random.split(random.key(seed), 6) for seed in (3, 4)]
    graph, traced = make_fx(drawn, tracing_mode="fake")(keys[0]), tdf.jit(drawn)
    expected = [drawn(each) for each in keys]

    torch.testing.assert_close([graph(each) for each in keys], expected, rtol=0, atol=0)
    torch.testing.assert_close([traced(each) for each in keys], expected, rtol=0, atol=0)


@pytest.mark.slow
@draws
def test_a_compiled_draw_is_the_same(draw):
    """`torch.compile(fullgraph=True)` of a mapped draw gives the same integers, and floats to rounding."""
    keys = random.split(random.key(3), 4)
    expected = torch.vmap(draw)(keys)
    torch.compiler.reset()

    torch.testing.assert_close(torch.compile(torch.vmap(draw), fullgraph=True)(keys), expected)


@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(0, 4), max_size=3), extra=st.integers(0, 5))
def test_a_longer_draw_begins_with_the_shorter_one(seed, sizes, extra):
    """Shapes are only read in row-major order: more numbers change none."""
    key, count = random.key(seed), math.prod(sizes)

    drawn = random.uniform(key, sizes, dtype=torch.float64)
    assert drawn.shape == torch.Size(sizes)
    assert torch.equal(drawn.flatten(), random.uniform(key, count + extra, dtype=torch.float64)[:count])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["normal", "exponential", "gumbel"])
def test_uniform_stays_in_its_interval(dtype, name):
    """No number is rounded up to 1, and functions of uniform numbers are finite."""
    key, n = random.key(1), 200_000
    drawn = random.uniform(key, n, dtype=dtype)

    assert drawn.dtype == dtype
    assert drawn.min() >= 0
    assert drawn.max() < 1
    values = getattr(random, name)(key, n, dtype=dtype)
    assert values.dtype == dtype, name
    assert values.isfinite().all(), name


class Far:
    """The normal distribution below -bound, by the logarithm of its function."""

    def __init__(self, bound):
        self.bound = -bound

    def cdf(self, x):
        """How probable smaller numbers are."""
        # The difference of two logarithms, of which a rounded bound would lose the last digits.
        return np.exp(
            (self.bound - x) * (self.bound + x) / 2
            + np.log(special.erfcx(-x / 2**0.5) / special.erfcx(-self.bound / 2**0.5))
        )


CONTINUOUS = {
    "uniform": (lambda k, n: random.uniform(k, n), stats.uniform()),
    "normal": (lambda k, n: random.normal(k, n), stats.norm()),
    "normal of float64": (lambda k, n: random.normal(k, n, dtype=torch.float64), stats.norm()),
    "truncated_normal": (lambda k, n: random.truncated_normal(k, -0.5, 2.0, n), stats.truncnorm(-0.5, 2.0)),
    "one-sided": (lambda k, n: random.truncated_normal(k, 1.0, math.inf, n), stats.truncnorm(1.0, math.inf)),
    "upper tail": (lambda k, n: random.truncated_normal(k, 8.0, 9.0, n), stats.truncnorm(8.0, 9.0)),
    "lower tail": (lambda k, n: random.truncated_normal(k, -math.inf, -12.0, n), stats.truncnorm(-math.inf, -12.0)),
    "far tail": (lambda k, n: random.truncated_normal(k, -60.0, -40.0, n, dtype=torch.float64), Far(40.0)),
    "limit": (lambda k, n: -random.truncated_normal(k, torch.tensor(1e6), math.inf, n, dtype=torch.float64), Far(1e6)),
    "exponential": (lambda k, n: random.exponential(k, n), stats.expon()),
    "gumbel": (lambda k, n: random.gumbel(k, n), stats.gumbel_r()),
}


def draws_of_one_key(draw):
    """200,000 draws."""
    return draw(random.key(11), 200_000)


def draws_of_split_keys(draw):
    """One draw of each of 20,000 keys."""
    return torch.vmap(lambda k: draw(k, 1))(random.split(random.key(12), 20_000)).flatten()


def draws_of_folded_keys(draw):
    """One draw of each of 20,000 keys."""
    return torch.vmap(lambda k: draw(k, 1))(random.fold_in(random.key(13), torch.arange(20_000))).flatten()


@pytest.mark.parametrize("many", [draws_of_one_key, draws_of_split_keys, draws_of_folded_keys])
@pytest.mark.parametrize(("draw", "law"), CONTINUOUS.values(), ids=CONTINUOUS)
def test_continuous_draws_have_their_distribution(draw, law, many):
    """Kolmogorov and Smirnov find no difference."""
    assert stats.kstest(many(draw).double().numpy(), law.cdf).pvalue > 1e-4


DISCRETE = {
    "randint": (lambda k, n: random.randint(k, n, 0, 7), np.ones(7)),
    "bernoulli": (lambda k, n: random.bernoulli(k, 0.3, n), np.array([0.7, 0.3])),
    "categorical": (lambda k, n: random.categorical(k, torch.tensor([1.0, 2.0, 5.0]).log(), shape=n), [1, 2, 5]),
    "categorical of 16 bits": (
        lambda k, n: random.categorical(k, torch.linspace(0, 6, 8).bfloat16(), shape=n),
        torch.linspace(0, 6, 8).bfloat16().double().exp(),
    ),
    "randint between tensors": (
        lambda k, n: random.randint(k, n, torch.tensor(-100, dtype=torch.int8), torch.tensor(100)) + 100, np.ones(200),
    ),
    "choice": (lambda k, n: random.choice(k, 3, n, p=torch.tensor([1.0, 2.0, 5.0])), [1, 2, 5]),
    "first of a permutation": (
        lambda k, n: torch.vmap(lambda k: random.permutation(k, 5)[0])(random.split(k, n)), np.ones(5),
    ),
    "without replacement": (
        lambda k, n: torch.vmap(lambda k: random.choice(k, 3, (1,), replace=False, p=torch.tensor([1.0, 2.0, 5.0])))(
            random.split(k, n)
        ).flatten(), [1, 2, 5],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("draw", "weights"), DISCRETE.values(), ids=DISCRETE)
def test_discrete_draws_have_their_distribution(draw, weights):
    """The chi-squared test finds no difference in 100,000 draws."""
    counts = torch.bincount(draw(random.key(5), 100_000).long(), minlength=len(weights)).numpy()
    weights = np.asarray(weights, dtype=float)

    assert len(counts) == len(weights)
    assert stats.chisquare(counts, weights / weights.sum() * counts.sum()).pvalue > 1e-4


@pytest.mark.parametrize("p", [0.0, 2.0**-24, 0.25, 0.5, 1 - 2.0**-24, 1.0])
def test_bernoulli_of_a_number_and_of_a_tensor_agree(p):
    """Both compare the same word with the same bound, at the ends too."""
    key = random.key(2)

    assert torch.equal(random.bernoulli(key, p, 4001), random.bernoulli(key, torch.full((4001,), p)))


def test_bernoulli_at_the_ends():
    """What is certain happens, and what is impossible does not."""
    key = random.key(2)

    assert random.bernoulli(key, 1.0).tolist() is True
    assert random.bernoulli(key, torch.tensor(1.0)).tolist() is True
    assert random.bernoulli(key, 1.0, 100_000).all()
    assert not random.bernoulli(key, 0.0, 100_000).any()


@pytest.mark.parametrize("form", [int, torch.tensor], ids=["number", "tensor"])
@given(low=st.integers(-(2**63), 2**63 - 2), span=st.integers(1, 2**64 - 1), seed=st.integers(0, 2**32))
def test_randint_is_the_upper_half_of_a_product(form, low, span, seed):
    """Each integer is low + floor(word * span / 2^64), for every interval of int64."""
    high = min(low + span, 2**63 - 1)
    key = random.key(seed)

    expected = [low + (word * (high - low) >> 64) for word in unsigned(random.bits(key, 5))]
    assert random.randint(key, 5, form(low), high).tolist() == expected


@pytest.mark.parametrize("least", [-(2**63), torch.tensor(-(2**63))], ids=["number", "tensor"])
def test_randint_of_all_integers(least):
    """The span of the whole range of int64 does not fit a word."""
    key = random.key(0)

    assert torch.equal(random.randint(key, 9, least, 2**63), random.bits(key, 9) - 2**63)


def test_randint_between_tensors_of_any_dtype():
    """The limits mean the numbers in them."""
    key = random.key(0)
    drawn = random.randint(key, 9, torch.tensor(-(2**31)).int(), torch.tensor(2**31 - 1), dtype=torch.int32)

    assert torch.equal(drawn, random.randint(key, 9, -(2**31), 2**31 - 1, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_randint_of_narrow_dtypes(dtype):
    """The whole range is drawn, both ends too."""
    limits = torch.iinfo(dtype)
    drawn = random.randint(random.key(0), 20_000, limits.min, limits.max + 1, dtype=dtype)

    assert drawn.min() == limits.min
    assert drawn.max() == limits.max


def test_a_seed_may_be_numpys():
    """Its integer is the seed."""
    assert torch.equal(random.key(np.int64(3)), random.key(3))


@given(seed=st.integers(0, 2**32), shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_permutation_and_choice_keep_the_rows(seed, shape, data):
    """A permutation holds each row once, along any dimension; choice without replacement holds none twice."""
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = torch.arange(math.prod(shape)).reshape(shape)
    key = random.key(seed)
    order = random.permutation(key, x.shape[dim])

    assert sorted(order.tolist()) == list(range(x.shape[dim]))
    assert torch.equal(random.permutation(key, x, dim=dim), x.index_select(dim, order))
    rows = random.choice(key, x, (x.shape[0],), replace=False)
    assert torch.equal(rows.reshape(len(x), -1).sort(0).values, x.reshape(len(x), -1))


WEIGHTS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1e-9, 3e4]), min_size=1, max_size=6).filter(any)


@given(seed=st.integers(0, 2**32), weights=WEIGHTS)
def test_weighted_choice_inverts_the_sums(seed, weights):
    """A choice is where a uniform number falls among numpy's sums of the weights; one without weight is never drawn."""
    key, p = random.key(seed), torch.tensor(weights, dtype=torch.float64)
    drawn = random.choice(key, len(weights), (50,), p=p)

    numbers = random.uniform(key, 50, dtype=torch.float64).numpy() * np.cumsum(weights)[-1]
    assert drawn.tolist() == np.searchsorted(np.cumsum(weights), numbers, side="right").tolist()
    assert (p[drawn] > 0).all()


def test_weighted_choice_takes_memory_of_its_arguments():
    """Very many of as many choices; and under vmap over weights, members equal the loop."""
    count, key = 10**5, random.key(0)
    drawn = random.choice(key, count, (count,), p=torch.arange(count))
    assert stats.kstest((drawn.double() / count).numpy(), stats.beta(2, 1).cdf).pvalue > 1e-4

    p = torch.rand(5, 6)
    many = torch.vmap(lambda p: random.choice(key, 6, (7,), p=p))(p)
    assert torch.equal(many, torch.stack([random.choice(key, 6, (7,), p=row) for row in p]))


def test_categorical_broadcasts_and_skips_impossible_classes():
    """Classes may lie in any dimension; a class of logit -inf is never drawn."""
    logits = torch.randn(4, 3)
    logits[:, 1] = -math.inf
    key = random.key(0)

    assert torch.equal(random.categorical(key, logits), random.categorical(key, logits.T, dim=0))
    assert (random.categorical(key, logits, shape=(500, 4)) != 1).all()


def test_gradients_flow_to_parameters_of_a_draw():
    """Reparametrised: bounds are differentiable, and grad under vmap is a loop of grads; a tail has them, too."""
    keys = random.split(random.key(0), 3)
    low = torch.tensor([0.0, 1.0, 2.0])
    fn = torch.func.grad(lambda low, key: random.uniform(key, 4, minval=low, maxval=5.0).sum())

    assert torch.equal(torch.vmap(fn)(low, keys), torch.stack([fn(a, k) for a, k in zip(low, keys, strict=True)]))
    assert random.uniform(keys[0], 3, dtype=torch.float32, minval=low.double(), maxval=5.0).dtype == torch.float32
    far = torch.func.grad(lambda bound: random.truncated_normal(keys[0], -1.0, bound, (), dtype=torch.float64))
    assert far(torch.tensor(2.0)).isfinite()


def test_keys_are_leaves():
    """A key is stacked, saved and loaded in a tree, and made on the device of its seed."""
    tree = tdf.TensorDict({"rng": random.key(0)})

    assert torch.equal(tree["rng"], random.key(torch.tensor(0)))
    assert tdf.stack([tree, tree])["rng"].shape == (2, 2)
    assert random.key(0, device="meta").is_meta
    assert random.normal(random.key(0, device="meta"), (2,)).is_meta


def test_ten_million_keys_are_distinct():
    """Keys of one parent have different states; those of split and of fold_in are no keys of one another."""
    key = random.key(0)
    keys = torch.cat([random.split(key, 1 << 20), random.fold_in(key, torch.arange(1 << 20))])

    assert keys[:, 0].unique().numel() == len(keys)
    assert (keys[:, 1] & 1 == 1).all()


ONE_KEY = (random.uniform, random.normal, random.exponential, random.gumbel, random.bits, random.split)
MESSAGES = [
    (lambda: random.normal(torch.zeros(2)), "normal: the key is not one random key.*float32 of shape.*key\\(seed\\)"),
    *[(lambda f=f: f(random.split(random.key(0))), rf"{f.__name__}: .*of shape \(2, 2\).*torch.vmap") for f in ONE_KEY],
    (lambda: random.fold_in(random.key(0), 1.5), "fold_in: data must be an integer.*1.5"),
    (lambda: random.key("a"), "key: seed must be an integer"),
    (lambda: random.bits(random.key(0), dtype=torch.int16), "bits: dtype must be int64 or int32"),
    (lambda: random.normal(random.key(0), dtype=torch.int32), "normal: dtype must be a floating-point one"),
    (lambda: random.randint(random.key(0), (), 3, 3), "randint: maxval must be above minval.*above 3"),
    (lambda: random.choice(random.key(0), 3, 4, replace=False), "choice: 4 draws without replacement.*at most 3.*4"),
    (lambda: random.choice(random.key(0), 4, 3, p=torch.ones(5)), r"a weight for each choice.*4.*\[5\]"),
    (lambda: random.choice(random.key(0), 3, 2, replace=False, p=torch.eye(3)[0]), "as many choices.*2 or more"),
    (lambda: random.choice(random.key(0), 2, 3, p=torch.tensor([-1.0, 1.0])), "finite and at least 0.*or more above 0"),
    (lambda: random.randint(random.key(0), (), 0, 300, dtype=torch.uint8), "numbers in the dtype.*0 to 255.*300"),
    (lambda: random.randint(random.key(0), (), 0, 2**64), "numbers in the dtype"),
    (lambda: random.randint(random.key(0), (), 0.5, 3), "randint: a bound must be an integer.*0.5"),
    (lambda: random.randint(random.key(0), (), torch.tensor(3), torch.tensor(1)), "maxval must be above minval"),
    (lambda: random.randint(random.key(0), 8, torch.tensor(0), 1000, dtype=torch.int8), "numbers in the dtype.*int8"),
    (lambda: random.randint(random.key(0), 8, 0, torch.tensor(-(2**63))), "maxval must be above minval"),
    (lambda: random.randint(random.key(0), 3, torch.zeros(2, 3).long(), 5), r"randint: .* broadcast.*\[2, 3\].*\[3\]"),
    (lambda: random.uniform(random.key(0), 4, minval=torch.zeros(3, 4)), "uniform: the parameters do not broadcast"),
    (lambda: random.uniform(random.key(0), maxval=torch.tensor(-1.0)), "uniform: maxval must not be below"),
    (lambda: random.uniform(random.key(0), minval=-3e38, maxval=3e38), "uniform: maxval.*a distance"),
    (lambda: random.truncated_normal(random.key(0), torch.zeros(3), 1.0, 4), "broadcast"),
    (lambda: random.bernoulli(random.key(0), torch.full((3, 4), 0.5), 4), "bernoulli: the parameters do not broadcast"),
    (lambda: random.bernoulli(random.key(0), torch.tensor(1.5)), "p must be a probability"),
    (lambda: random.categorical(random.key(0), torch.zeros(4, 9), shape=(5, 1)), r"categorical: .*\[4\].*\[5, 1\]"),
    (lambda: random.categorical(random.key(0), torch.tensor([0.0, math.nan])), "categorical: logits must be numbers"),
    (lambda: random.normal(random.key(0), (2, -1)), r"a dimension is negative.*\[2, -1\]"),
    (lambda: torch.vmap(lambda p: random.bernoulli(random.key(0), p))(torch.tensor([0.5, 2.0])), "a probability"),
    (lambda: torch.vmap(lambda p: random.choice(random.key(0), 2, 3, p=p))(torch.eye(2) - 1), "as many choices"),
    (lambda: random.bernoulli(random.key(0), math.nan), "p must be a probability.*nan"),
    (lambda: random.uniform(random.key(0), minval=1.0, maxval=0.5), "uniform: maxval must not be below"),
    (lambda: random.truncated_normal(random.key(0), 1.0, -1.0), "truncated_normal: upper must not be below"),
]


@pytest.mark.parametrize(("call", "pattern"), MESSAGES)
def test_messages(call, pattern):
    """Each refusal names the call, what it takes and what it got."""
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"(?s){pattern}"):
        call()


@pytest.mark.parametrize("mode", [torch.autograd.forward_ad.dual_level, torch._subclasses.FakeTensorMode])
def test_a_generator_is_not_drawn_from_where_values_are_hidden(mode):
    """A dual level and a mode of fake tensors refuse a generator, as transforms do."""
    with mode(), pytest.raises(tdf.UnsupportedError, match="cannot be drawn from inside"):
        random.key_of(torch.Generator())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32], ids=str)
def test_a_choice_without_replacement_does_not_round_its_weights(dtype):
    """The draws are those of the same weights in float32: no logarithm is rounded to 16 bits."""
    p = torch.tensor([1024, 1032, 1040, 1048, 1056, 1064]).to(dtype)
    keys = random.split(random.key(0), 2000)

    def drawn(p):
        return torch.vmap(lambda key: random.choice(key, 6, (6,), replace=False, p=p))(keys)

    assert torch.equal(drawn(p), drawn(p.float()))
