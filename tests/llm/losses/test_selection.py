"""The selection of the best responses, and KL controllers."""

import statistics

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc.llm import AdaptiveKLController, topk_rewards
from tests.helpers import assert_pure

ROWS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5)), max_size=20)


def split(rows):
    """Prompts and rewards of rows."""
    return [prompt for prompt, _ in rows], torch.tensor([float(reward) for _, reward in rows])


@given(ROWS, st.integers(1, 5), st.integers(1, 5))
@example([("a", i % 3) for i in range(40)], 40, 30)
def test_topk_rewards_is_a_sort_of_each_group(rows, group_size, k):
    """Oracle: lists and `statistics.median_low`. Groups have no row in common."""
    k = min(k, group_size)
    groups = {prompt: [i for i, row in enumerate(rows) if row[0] == prompt] for prompt in "ab"}
    expected, pending = [], []
    for members in groups.values():
        full = len(members) // group_size * group_size
        pending += members[full:]
        for start in range(0, full, group_size):
            group = members[start : start + group_size]
            median = statistics.median_low([rows[i][1] for i in group])
            best = sorted((i for i in group if rows[i][1] > median), key=lambda i: -rows[i][1])
            expected.append((group[-1], best[:k]))

    found = topk_rewards(*split(rows), group_size=group_size, k=k)

    assert found.chosen.tolist() == [i for _, best in sorted(expected) for i in best]
    assert found.pending.tolist() == sorted(pending)


@given(ROWS, st.integers(0, 20), st.integers(1, 4))
def test_topk_rewards_of_parts_are_those_of_the_whole(rows, cut, group_size):
    """Pending rows, with the later ones behind them, go on where the first call stopped."""
    first = topk_rewards(*split(rows[:cut]), group_size=group_size, k=1)
    rest = [rows[i] for i in first.pending.tolist()] + rows[cut:]
    then = topk_rewards(*split(rest), group_size=group_size, k=1)

    whole = topk_rewards(*split(rows), group_size=group_size, k=1)

    parts = [rows[i] for i in first.chosen.tolist()] + [rest[i] for i in then.chosen.tolist()]
    assert parts == [rows[i] for i in whole.chosen.tolist()]
    assert [rest[i] for i in then.pending.tolist()] == [rows[i] for i in whole.pending.tolist()]


def test_several_rewards_of_a_row_count_by_their_mean():
    """Also integers; chosen rows are indices of any tree, and so are pending ones, in ascending order."""
    rewards = torch.tensor([[0, 9], [0, 0], [5, 5], [0, 0], [0, 0], [1, 1]]).unsqueeze(-1)
    td = tdf.TensorDict({"prompt": list("pqprqp"), "reward": rewards}, [6])

    found = topk_rewards(td["prompt"], td["reward"], group_size=3, k=2)

    assert td[found.chosen]["reward"].squeeze(-1).tolist() == [[5, 5]]
    assert found.pending.tolist() == [1, 3, 4]


@given(st.lists(st.floats(0, 50), max_size=5), st.integers(1, 64), st.integers(50, 5000))
def test_adaptive_controller_is_the_published_formula(values, n_steps, horizon):
    """Oracle: numpy, in float64, as in OpenAI's lm-human-preferences; the state is never written to."""
    controller = AdaptiveKLController(torch.tensor(0.2, dtype=torch.float64), 6.0, horizon)
    state, expected = controller.init(), 0.2

    for kl in values:
        given_kl = torch.tensor(kl, dtype=torch.float64)
        state = assert_pure(lambda tree, kl=given_kl: controller.update(tree, kl, n_steps=n_steps), state)
        expected *= 1 + np.clip(kl / 6.0 - 1, -0.2, 0.2) * n_steps / horizon

    np.testing.assert_allclose(state["kl_coef"].item(), expected, rtol=1e-12)


@pytest.mark.parametrize("number", [0, -1, -0.5, torch.tensor([1.0, -1.0]), torch.tensor(float("nan"))], ids=repr)
@pytest.mark.parametrize("name", ["target", "horizon"])
def test_a_target_and_a_horizon_are_above_zero(name, number):
    """With a negative one, the coefficient would fall where it has to rise."""
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        AdaptiveKLController(0.1, **({"target": 6.0, "horizon": 10} | {name: number}))


@pytest.mark.parametrize("n_steps", [50, 51, 500])
def test_a_coefficient_does_not_change_its_sign(n_steps):
    """The formula of the paper gives 1 - 0.2 * 500 / 10 as a factor."""
    controller = AdaptiveKLController(0.1, 6.0, horizon=10)

    with pytest.raises(ValueError, match=r"by a fifth(?s:.)*n_steps < 50"):
        controller.update(controller.init(), torch.tensor(0.0), n_steps=n_steps)


def test_members_have_their_own_coefficients_under_vmap_and_jit():
    """A loop over members is the oracle; no gradient flows into the coefficient."""
    coefs, kls = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 6.0, 30.0], requires_grad=True)
    controller = AdaptiveKLController(coefs, target=6.0, horizon=10)
    alone = [AdaptiveKLController(coef, 6.0, 10) for coef in coefs]

    out = controller.update(controller.init(), kls, n_steps=4)

    expected = torch.stack([one.update(one.init(), kl, n_steps=4) for one, kl in zip(alone, kls, strict=True)])
    assert torch.equal(out["kl_coef"], expected["kl_coef"])
    assert not out["kl_coef"].requires_grad
    mapped = torch.vmap(lambda state, kl: controller.update(state, kl, n_steps=4)["kl_coef"])
    assert torch.equal(mapped(controller.init(), kls), expected["kl_coef"])
    jitted = tdf.jit(lambda state, kl: controller.update(state, kl, n_steps=4))
    assert torch.equal(jitted(controller.init(), kls.detach())["kl_coef"], expected["kl_coef"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_coefficient_moves_by_a_divergence_of_16_bits(dtype):
    """A step of 2e-5 is not lost in the dtype of the divergence."""
    controller = AdaptiveKLController(0.1, target=6.0, horizon=10_000)

    found = controller.update(controller.init(), torch.tensor(60.0, dtype=dtype), n_steps=1)

    torch.testing.assert_close(found["kl_coef"] / 0.1 - 1, torch.tensor(2e-5), rtol=0.01, atol=0.0)
