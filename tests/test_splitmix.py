"""All ways to derive keys and draw words and masks give the same bits."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc import random
from tdfunc.random import splitmix

SEEDS = st.integers(-(2**63), 2**63 - 1)
# Around the counts at which another way is chosen.
SIZES = st.sampled_from([0, 1, 3, 8, 9, 31, 16_384, 16_385, 40_001])
SALTS = st.sampled_from([splitmix.SEED, splitmix.SPLIT, splitmix.FOLD])
# The tensor operations of a derivation.
plain = splitmix._derive_plain


@given(seed=SEEDS, numbers=st.lists(SEEDS, max_size=12), salt=SALTS)
def test_derivations_agree(seed, numbers, salt):
    """One number, many numbers, many keys, eager and recorded, are the tensor operations' keys."""
    key, many = random.key(seed), torch.tensor(numbers, dtype=torch.int64)
    expected = plain(key, many, salt)

    assert torch.equal(splitmix.derive(key, many, salt), expected)
    assert all(torch.equal(splitmix.derive(key, n, salt), row) for n, row in zip(numbers, expected, strict=True))


@pytest.mark.parametrize("members", [1, 32, 33])
@pytest.mark.parametrize("number", [torch.tensor([3, -1, 2**40]), torch.tensor(5), 7], ids=["many", "one", "int"])
@pytest.mark.parametrize("seed", [1, 2])
def test_recorded_derivations_agree(members, number, seed):
    """A trace holds one operation, also inside nested maps, and its replay gives the keys of any keys."""
    traced = tdf.jit(torch.vmap(torch.vmap(lambda k: splitmix.derive(k, number * 1, splitmix.FOLD))))

    keys = random.split(random.key(seed), (members, 2))
    expected = torch.stack([torch.stack([plain(k, number, splitmix.FOLD) for k in row]) for row in keys])
    assert torch.equal(traced(keys) if isinstance(number, int) else _with_number(keys, number), expected)


def _with_number(keys, number):
    derive = torch.vmap(torch.vmap(lambda k, n: splitmix.derive(k, n, splitmix.FOLD), (0, None)), (0, None))
    return tdf.jit(derive)(keys, number)


def test_numbers_are_mapped_as_keys_are():
    """Keys and numbers are mapped along any dimensions, together or alone."""
    keys, numbers = random.split(random.key(0), 4), torch.arange(12).reshape(3, 4)
    both = torch.vmap(lambda k, n: splitmix.derive(k, n, splitmix.FOLD), (0, 1))
    alone = torch.vmap(lambda n: splitmix.derive(keys[0], n, splitmix.FOLD), 1)
    expected = torch.stack([plain(k, n, splitmix.FOLD) for k, n in zip(keys, numbers.T, strict=True)])
    recorded = tdf.jit(lambda k, n: torch.vmap(lambda n: splitmix.derive(k, n, splitmix.FOLD), 1)(n))

    assert all(torch.equal(run(keys, numbers), expected) for run in (both, tdf.jit(both)))
    assert torch.equal(recorded(keys[0], numbers), alone(numbers))


@given(seed=SEEDS, size=SIZES, members=st.sampled_from([1, 3]))
def test_words_agree(seed, size, members):
    """Words of one key and of mapped keys, eager and recorded, are the tensor operations' words."""
    keys = random.split(random.key(seed), members)
    mapped = torch.vmap(lambda k: splitmix.words(k, size))
    expected = splitmix._words_plain(keys, size)

    assert torch.equal(torch.stack([splitmix.words(k, size) for k in keys]), expected)
    assert torch.equal(mapped(keys), expected)
    assert torch.equal(tdf.jit(mapped)(keys), expected)


@example(seed=0, size=9, p=1e-6, dtype=torch.float16, number=0)
@given(
    seed=SEEDS,
    size=SIZES,
    p=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    number=st.sampled_from([0, 5]),
)
def test_masks_agree(seed, size, p, dtype, number):
    """Masks hold 1 / p or 0; one key, mapped keys and a trace give the same."""
    keys = random.split(random.key(seed), 3)
    draw = torch.vmap(lambda k: splitmix.mask(k, (size, 1), p, dtype, number=number))
    expected = torch.stack([splitmix.mask(k, (size, 1), p, dtype, number=number) for k in keys])

    assert expected.dtype is dtype
    assert set(expected.unique().tolist()) <= {0.0, expected.max().item() if size else 0.0}
    assert torch.equal(draw(keys), expected)
    assert torch.equal(tdf.jit(draw)(keys), expected)


@given(seed=SEEDS, number=st.integers(0, 1000))
def test_masks_of_a_key_read_its_words_from_other_places_on(seed, number):
    """Mask n begins where n + 1 times the golden ratio of 2^64 leads."""
    state, gamma = random.key(seed).tolist()
    moved = torch.tensor([splitmix.signed(state + gamma * splitmix.SEED * (number + 1)), gamma])

    drawn = splitmix.mask(random.key(seed), (9,), 0.5, torch.float32, number=number)

    assert torch.equal(drawn > 0, splitmix.words(moved, 3).view(torch.int16)[:9] < 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("sizes", "members", "calls"),
    [
        ([(5,)] * 3, 1, 1),
        ([(5,)] * 3, 2, 1),
        ([(5,)] * 3, 40, 1),
        ([(7,), (2, 9), (7,), (0,)], 1, 1),
        ([(7,), (2, 9), (7,), (0,)], 2, 1),
        ([(7,), (2, 9), (7,), (0,)], 40, 1),
        ([(700,), (90_000,), (3,), (300_000,)], 1, 3),
        ([(700,), (90_000,), (3,), (300_000,)], 2, 3),
    ],
)
def test_masks_of_one_key_are_filled_together(sizes, members, calls, dtype):
    """A trace makes small ones in one call, with the bits that each has alone."""
    keys = random.split(random.key(3), members)

    def draw(key):
        return [splitmix.mask(key, size, 0.8, dtype, number=i) for i, size in enumerate(sizes)]

    traced = tdf.jit(torch.vmap(draw))
    alone = [torch.stack(rows) for rows in zip(*map(draw, keys), strict=True)]
    graph = traced.graph(keys)

    assert len([node for node in graph.graph.nodes if "deferred" in node.name]) == calls
    torch.testing.assert_close(list(traced(keys)), alone, rtol=0, atol=0)
    torch.testing.assert_close(list(graph(keys)), alone, rtol=0, atol=0)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.9995])
def test_masks_have_their_probability(p):
    """The share of kept numbers is p, and the mean of the mask is 1, within five standard deviations."""
    drawn = splitmix.mask(random.key(torch.seed()), (400_000,), p, torch.float64)
    deviation = (p * (1 - p) / 400_000) ** 0.5

    assert abs(float((drawn > 0).double().mean()) - p) < 5 * deviation + 2**-17
    assert abs(float(drawn.mean()) - 1) < 5 * deviation / p
