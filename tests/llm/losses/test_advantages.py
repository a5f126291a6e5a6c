"""Advantages against loops over groups and tokens."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdfunc.llm.losses.advantages import (
    batch_normalized,
    group_normalized,
    leave_one_out,
    mc_returns,
    penalized_rewards,
)

SEEDS = st.integers(0, 2**31)
FUNCTIONS = [
    group_normalized,
    lambda r, m=None: group_normalized(r, m, scale="batch"),
    lambda r, m=None: group_normalized(r, m, scale=None),
    leave_one_out,
    batch_normalized,
]


def rewards(seed, *, groups=5, samples=4, lead=()):
    """Rewards, some of them missing and NaN; a group without rewards, one with a single one, and one of equal ones."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((*lead, groups, samples), generator=generator, dtype=torch.float64)
    mask = torch.rand(values.shape, generator=generator) < 0.8
    values[..., 2, :], mask[..., 2, :] = 0.1, True
    mask[..., 3, :], mask[..., 4, :] = False, False
    mask[..., 4, 1] = True
    return values.where(mask, torch.nan), mask


def deviation(values):
    """The sample deviation of a list; 0 of fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def lists(values, mask):
    """The rewards of each group."""
    return [[v for v, m in zip(*row, strict=True) if m] for row in zip(values.tolist(), mask.tolist(), strict=True)]


def check(found, mask, expected):
    """Assert that a function gave these lists, one a group, and 0 elsewhere."""
    want = torch.zeros(mask.shape, dtype=torch.float64)
    want[mask] = torch.tensor([v for group in expected for v in group], dtype=torch.float64)
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-11)


@settings(max_examples=10)
@given(seed=SEEDS, eps=st.sampled_from([1e-4, 0.5]))
def test_normalized_rewards_are_their_formulas(seed, eps):
    """By the group's deviation, the batch's, or none; over the batch."""
    values, mask = rewards(seed)
    groups = lists(values, mask)
    flat = sum(groups, [])
    centred = [[v - statistics.fmean(group) for v in group] for group in groups]

    scales = {"batch": [deviation(flat) + eps] * 5, None: [1] * 5}
    scales["group"] = [deviation(group) + eps for group in groups]
    for scale, divisors in scales.items():
        expected = [[v / d for v in group] for group, d in zip(centred, divisors, strict=True)]
        check(group_normalized(values, mask, scale=scale, eps=eps), mask, expected)
    whole = [[(v - statistics.fmean(flat)) / (deviation(flat) + eps) for v in group] for group in groups]
    check(batch_normalized(values, mask, eps=eps), mask, whole)


@settings(max_examples=10)
@given(seed=SEEDS)
def test_leave_one_out_is_its_formula(seed):
    """A baseline of the others alone, which no reward of its own can move."""
    values, mask = rewards(seed)
    expected = []
    for group in lists(values, mask):
        others = [group[:i] + group[i + 1 :] for i in range(len(group))]
        expected.append([v - statistics.fmean(rest) if rest else 0.0 for v, rest in zip(group, others, strict=True)])

    check(leave_one_out(values, mask), mask, expected)


@settings(max_examples=10)
@given(seed=SEEDS, gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]), width=st.sampled_from([0, 1, 2, 7, 8]))
def test_returns_are_a_loop_from_the_end(seed, gamma, width):
    """Masked positions neither reward nor discount; each member may have its own discount."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, width, generator=generator) < 0.6
    values = torch.randn(3, width, generator=generator, dtype=torch.float64).where(mask, torch.nan)
    expected = torch.zeros(3, width, dtype=torch.float64)
    for b in range(3):
        after = 0.0
        for t in reversed(range(width)):
            if mask[b, t]:
                expected[b, t] = after = values[b, t].item() + gamma * after

    torch.testing.assert_close(mc_returns(values, mask, gamma=gamma), expected)
    both = torch.tensor([gamma, 1.0], dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(lambda g: mc_returns(values, mask, gamma=g))(both)[0], expected)


def test_returns_of_long_rows_keep_their_digits():
    """Thousands of tokens with a discount whose inverse would overflow."""
    values = torch.ones(1, 3000, dtype=torch.float64)

    found = mc_returns(values, values, gamma=0.5)
    torch.testing.assert_close(found[0, :10], torch.full((10,), 2.0, dtype=torch.float64))


def test_penalized_rewards_add_up_to_the_reward_and_the_penalties():
    """The reward of a row stands at its last token, wherever that is; a row without tokens has none."""
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    penalty = torch.rand(3, 6).where(mask.bool(), torch.nan)
    found = penalized_rewards(torch.tensor([3.0, -2.0, 7.0]), penalty, mask)

    kept = torch.where(mask.bool(), penalty, 0)
    expected = -kept
    expected[0, 4] += 3
    expected[1, 1] -= 2
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("value", [0.1, -1000.1, 1e8 / 3])
@pytest.mark.parametrize("samples", [0, 1, 5, 7, 12])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_groups_without_spread_have_no_advantage(function, samples, value):
    """Equal rewards, a single one, none: 0, also where their mean is rounded."""
    given = torch.full((3, samples), value)

    assert torch.equal(function(given), torch.zeros_like(given))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_groups_have_no_advantages(function):
    """The result has the shape of the rewards."""
    assert function(torch.zeros(0, 4)).shape == torch.Size([0, 4])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_members_are_as_each_alone(function):
    """Vmap is a loop."""
    values, mask = rewards(0, lead=(3,))
    expected = [function(each, valid) for each, valid in zip(values, mask, strict=True)]

    torch.testing.assert_close(torch.vmap(function)(values, mask), torch.stack(expected))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rewards_of_16_bits_are_computed_in_float32(function):
    """With the same result, exactly."""
    narrow = rewards(0, lead=(3,))[0].nan_to_num(0).bfloat16()

    assert torch.equal(function(narrow), function(narrow.float()))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rewards_may_be_counts(function):
    """They are as the same numbers in float32."""
    counts = torch.tensor([[0, 1, 1], [2, 0, 0]])

    assert torch.equal(function(counts), function(counts.float()))


DIVIDED = [
    group_normalized,
    lambda r, **options: group_normalized(r, scale="batch", **options),
    batch_normalized,
]


@pytest.mark.parametrize("function", DIVIDED)
@pytest.mark.parametrize("shape", [(3, 1), (3, 5), (1, 2)])
def test_equal_rewards_have_no_advantage_without_eps(function, shape):
    """Nothing is added to a deviation of 0, and nothing is divided by it."""
    given = torch.full(shape, 0.1)

    assert torch.equal(function(given, eps=0.0), torch.zeros_like(given))


@pytest.mark.parametrize("function", DIVIDED)
def test_the_gradient_of_equal_rewards_is_finite(function):
    """The deviation has a corner at 0."""
    grads = torch.func.grad(lambda rewards: function(rewards)[0, 0])(torch.ones(2, 3))

    assert bool(grads.isfinite().all())


@pytest.mark.parametrize("function", DIVIDED)
@pytest.mark.parametrize("size", [1e-35, 1e-25, 1e-12, 1.0, 1e12, 1e20, 1e30])
def test_rewards_of_any_size_have_the_advantages_of_float64(function, size, generator):
    """Squares leave the range of float32 long before the rewards do."""
    given = torch.randn(4, 6, generator=generator) * size

    found = function(given, eps=0.0)

    torch.testing.assert_close(found.double(), function(given.double(), eps=0.0), rtol=1e-5, atol=1e-6)


def test_a_group_of_large_rewards_does_not_change_the_others(generator):
    """Each group has its own scale."""
    small = torch.randn(1, 6, generator=generator)

    found = group_normalized(torch.cat([small * 1e30, small, small * 1e-3]))

    torch.testing.assert_close(found[1:], group_normalized(torch.cat([small, small * 1e-3])))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_counts_are_not_rounded(function):
    """float32 has no number for 2^24 + 1."""
    counts = torch.tensor([[0, 1, 3], [7, 2, 2]])
    mask = torch.tensor([[True, True, True], [True, False, True]])

    found = function(counts + 2**40, mask)

    torch.testing.assert_close(found, function(counts, mask))
