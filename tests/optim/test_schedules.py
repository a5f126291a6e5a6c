"""Schedules against optax 0.2.8 and torch.optim.lr_scheduler, member by member and under transforms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

import tdfunc as tdf
from tdfunc.optim import schedules

PEAKS = torch.logspace(-3, -1, 3)

SCHEDULES = {
    "constant": schedules.constant(0.3),
    "linear": schedules.linear(0.1, 1.0, 7, transition_begin=3),
    "polynomial": schedules.polynomial(1.0, 0.2, 9, power=2.5, transition_begin=2),
    "cosine_decay": schedules.cosine_decay(0.5, 10, alpha=0.1, exponent=1.5),
    "warmup_cosine_decay": schedules.warmup_cosine_decay(0.0, 1.0, 4, 14, end_value=0.1),
    "no warmup": schedules.warmup_cosine_decay(0.0, 1.0, 0, 14, end_value=0.1, exponent=2.0),
    "exponential_decay": schedules.exponential_decay(1.0, 5, 0.5, transition_begin=2, end_value=0.2),
    "staircase": schedules.exponential_decay(1.0, 3, 0.5, transition_begin=1, staircase=True),
    "no growth": schedules.exponential_decay(1.0, 3, 1.0, end_value=0.2),
    "growth": schedules.exponential_decay(1.0, 3, 2.0, end_value=4.0),
    "piecewise_constant": schedules.piecewise_constant(2.0, {4: 0.5, 9: 0.1}),
    "join_schedules": schedules.join_schedules(
        [schedules.linear(0.0, 1.0, 5), schedules.cosine_decay(1.0, 6), schedules.constant(0.05)], [5, 11]
    ),
}
# At steps 0, 3, 6, 9, 12, 15, by optax 0.2.8.
OPTAX = {
    "constant": [0.3, 0.3, 0.3, 0.3, 0.3, 0.3],
    "linear": [0.1, 0.1, 0.485714, 0.871429, 1.0, 1.0],
    "polynomial": [1.0, 0.795948, 0.384039, 0.218623, 0.2, 0.2],
    "cosine_decay": [0.5, 0.368314, 0.141384, 0.051723, 0.05, 0.05],
    "warmup_cosine_decay": [0.0, 0.75, 0.914058, 0.55, 0.185942, 0.1],
    "no warmup": [1.0, 0.814358, 0.436275, 0.17211, 0.102207, 0.1],
    "exponential_decay": [1.0, 0.870551, 0.574349, 0.378929, 0.25, 0.2],
    "staircase": [1.0, 1.0, 0.5, 0.25, 0.125, 0.0625],
    "no growth": [0.2, 0.2, 0.2, 0.2, 0.2, 0.2],
    "growth": [1.0, 2.0, 4.0, 4.0, 4.0, 4.0],
    "piecewise_constant": [2.0, 2.0, 1.0, 0.1, 0.1, 0.1],
    "join_schedules": [0.0, 0.6, 0.933013, 0.25, 0.05, 0.05],
}
TORCH = {
    "linear": (lambda opt: lr_scheduler.LinearLR(opt, 0.25, total_iters=6), schedules.linear(0.25, 1.0, 6)),
    "polynomial": (lambda opt: lr_scheduler.PolynomialLR(opt, 8, 2.0), schedules.polynomial(1.0, 0.0, 8, power=2.0)),
    "cosine": (lambda opt: lr_scheduler.CosineAnnealingLR(opt, 20, 0.1), schedules.cosine_decay(1.0, 20, alpha=0.1)),
    "exponential": (lambda opt: lr_scheduler.ExponentialLR(opt, 0.9), schedules.exponential_decay(1.0, 1, 0.9)),
    "steps": (lambda opt: lr_scheduler.StepLR(opt, 5, 0.3), schedules.exponential_decay(1.0, 5, 0.3, staircase=True)),
    "milestones": (
        lambda opt: lr_scheduler.MultiStepLR(opt, [3, 11], 0.2),
        schedules.piecewise_constant(1.0, {3: 0.2, 11: 0.2}),
    ),
    "sequence": (
        lambda opt: lr_scheduler.SequentialLR(
            opt, [lr_scheduler.ConstantLR(opt, 0.1, 4), lr_scheduler.ExponentialLR(opt, 0.8)], [4]
        ),
        schedules.join_schedules([schedules.constant(0.1), schedules.exponential_decay(1.0, 1, 0.8)], [4]),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_values_are_those_of_optax(name):
    """One step at a time, all at once, under vmap and jit."""
    schedule, steps = SCHEDULES[name], torch.arange(0, 16, 3)
    found = {
        "one step at a time": torch.stack([schedule(step) for step in steps]),
        "at once": schedule(steps),
        "vmap": torch.vmap(schedule)(steps),
        "jit": tdf.jit(schedule)(steps),
    }

    expected = torch.tensor(OPTAX[name], dtype=torch.float64)
    torch.testing.assert_close(found, dict.fromkeys(found, expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("scheduler", "schedule"), TORCH.values(), ids=TORCH)
def test_values_are_those_of_torch(scheduler, schedule):
    """A step of the scheduler is a step of the count, in the numbers of Python's floats."""
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    other, expected = scheduler(opt), []
    for _ in range(16):
        expected.append(opt.param_groups[0]["lr"])
        opt.step()
        other.step()

    assert [schedule(torch.tensor(step)).item() for step in range(16)] == pytest.approx(expected, rel=1e-12)


def test_each_member_has_its_own():
    """Peaks of shape (E,) with a state of E members train each as it would train alone."""
    params = tdf.TensorDict({"w": torch.ones(3, 2)}, [3])
    opt = tdf.optim.adam(lr=schedules.warmup_cosine_decay(0.0, PEAKS, 2, 6))
    state = opt.init(params)
    alone = [tdf.optim.adam(lr=schedules.warmup_cosine_decay(0.0, float(peak), 2, 6)) for peak in PEAKS]
    rows = [(params[i], one.init(params[i])) for i, one in enumerate(alone)]
    for _ in range(5):
        params, state = opt.update(params, params, state)
        rows = [one.update(row, row, own) for one, (row, own) in zip(alone, rows, strict=True)]

    torch.testing.assert_close(params["w"], torch.stack([row["w"] for row, _ in rows]))


@pytest.mark.parametrize("schedule", [schedules.warmup_cosine_decay(0.0, PEAKS, 2, 6), lambda step: PEAKS * 0.5**step])
def test_jit_takes_a_schedule_with_tensors_of_its_own(schedule):
    """A replayed step has the rate of its own step for each member, as a step without a trace has."""
    opt = tdf.optim.adam(lr=schedule)
    step = tdf.jit(lambda params, grads, state: opt.update(params, grads, state))
    params = tdf.TensorDict({"w": torch.randn(3, 2)}, [3])
    found = expected = (params, opt.init(params))
    for _ in range(5):
        grads = torch.randn_like(params)
        found, expected = step(found[0], grads, found[1]), opt.update(expected[0], grads, expected[1])

    assert torch.equal(found[0]["w"], expected[0]["w"])


@pytest.mark.parametrize(("schedule", "step", "expected"), [
    (schedules.exponential_decay(1.0, 1, 0.99999), 10**6, 0.99999**10**6),
    (schedules.linear(0.0, 1.0, 2**25), 2**24 + 1, 0.5 + 2.0**-25),
    (schedules.join_schedules([schedules.constant(0.1), schedules.constant(0.3)], [5]), 7, 0.3),
])  # fmt: skip
def test_values_are_those_of_long_runs(schedule, step, expected):
    """Counts and rates are exact after more steps than float32 can tell apart."""
    assert schedule(torch.tensor(step)).item() == pytest.approx(expected, rel=1e-9)


@given(
    metrics=st.lists(st.floats(0.125, 4, width=16) | st.just(math.nan), max_size=25),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 2),
    threshold=st.sampled_from([0.0, 0.01]),
    mode=st.sampled_from(["min", "max"]),
)
def test_reduce_on_plateau_is_that_of_torch(metrics, patience, cooldown, threshold, mode):
    """The scale follows the learning rate of `ReduceLROnPlateau`, for each member."""
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    other = lr_scheduler.ReduceLROnPlateau(
        opt, mode, factor=0.5, patience=patience, cooldown=cooldown, min_lr=0.1, threshold=threshold, eps=0.0
    )
    plateau = schedules.ReduceOnPlateau(0.5, patience, cooldown=cooldown, min_scale=0.1, threshold=threshold, mode=mode)
    state, found, expected = plateau.init((2,)), [], []
    for metric in metrics:
        other.step(metric)
        state = plateau.update(torch.tensor([metric, 1.0]), state)
        found.append(state["scale"][0].item())
        expected.append(opt.param_groups[0]["lr"])

    assert found == pytest.approx(expected)


def test_reduce_on_plateau_has_torchs_defaults():
    """An option that has the name of one of `ReduceLROnPlateau` has its default."""
    usual = vars(lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)))
    ours = vars(schedules.ReduceOnPlateau())

    assert ours == {name: usual.get(name, value) for name, value in ours.items()}


def plateau_by_hand(metrics, *, patience, threshold, mode):
    """Return the scale after metrics: an improvement is better than the best by a share of the size of the best."""
    best, waited, scale = None, 0, 1.0
    for metric in metrics:
        gain = None if best is None else (best - metric) * (1 if mode == "min" else -1)
        if gain is None or gain > threshold * abs(best):
            best, waited = metric, 0
        else:
            waited += 1
        if waited > patience:
            scale, waited = scale / 2, 0
    return scale


@given(
    # Apart by far more than a rounding.
    metrics=st.lists(st.integers(-64, 64).map(lambda n: n / 8), min_size=1, max_size=25),
    patience=st.integers(0, 3),
    threshold=st.sampled_from([0.0, 1e-4, 0.01, 1.0, 1.5]),
    mode=st.sampled_from(["min", "max"]),
)
def test_a_plateau_is_found_whatever_the_sign(metrics, patience, threshold, mode):
    """A margin relative to the best metric has its size, also below zero, at zero, and where it is all of the best."""
    plateau = schedules.ReduceOnPlateau(0.5, patience, threshold=threshold, mode=mode)
    state = plateau.init()

    for metric in metrics:
        state = plateau.update(torch.tensor(metric), state)

    expected = plateau_by_hand(metrics, patience=patience, threshold=threshold, mode=mode)
    assert state["scale"].item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, np.array, torch.tensor])
def test_a_plateau_takes_any_number(kind):
    """A metric is a float, a scalar or array of numpy, or a tensor."""
    plateau = schedules.ReduceOnPlateau(0.5, 0)
    state = plateau.init()

    for metric in (1.0, 0.5, 0.75):
        state = plateau.update(kind(metric), state)

    assert state["best"].item() == 0.5
    assert state["scale"].item() == 0.5
