"""Metrics, calibration, averages and distances in every dtype against their formulas in float64."""

import numpy as np
import pytest
import torch

import tdfunc as tdf
from tdfunc import TensorDict, metrics, weights
from tdfunc import calibration as cal
from tdfunc.averaging import SWA, SWAG

pytestmark = pytest.mark.sample(3)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def members(generator, kind):
    """Logits (E, N, C) of four members that are far apart, equal, opposite, or nearly equal."""
    y = torch.randn(4, 8, 3, generator=generator)
    return {
        "ordinary": y,
        "near zero": y * 1e-3,
        "equal": y[:1].expand(4, 8, 3) + 0.0,
        "opposite": torch.cat([y[:2], -y[:2]]),
        "huge": y * 1e3,
        "nearly equal": y[:1] + y * 1e-2,
    }[kind]


KINDS = ["ordinary", "near zero", "equal", "opposite", "huge", "nearly equal"]
each_kind = pytest.mark.parametrize("kind", KINDS)
# Functions of members' logits and labels.
SCORES = {
    "nll": lambda y: metrics.nll(y, LABELS),
    "brier": lambda y: metrics.brier(y, LABELS),
    "ece": lambda y: metrics.ece(y, LABELS),
    "adaptive_ece": lambda y: metrics.adaptive_ece(y, LABELS),
    "uncertainty": lambda y: metrics.uncertainty(y, "classification"),
    "regression": lambda y: metrics.uncertainty(y, "regression"),
    "temperature": lambda y: cal.fit_temperature(y, LABELS),
    "ensemble": cal.ensemble_logits,
    "conformal lac": lambda y: cal.conformal_scores(y.float().softmax(-1).to(y.dtype)[0], LABELS),
    "conformal aps": lambda y: cal.conformal_scores(y.float().softmax(-1).to(y.dtype)[0], LABELS, method="aps"),
    "regression scores": lambda y: cal.regression_scores(y[:, :, 0], y[0, :, 1], scale=y[0, :, 2].double().abs() + 1),
}


@pytest.mark.parametrize("name", SCORES)
@each_float
@each_kind
def test_scores_follow_the_formula(name, dtype, kind, generator):
    """A score of numbers in any dtype is that of the same numbers in float64, within float32's rounding."""
    y = members(generator, kind).to(dtype)
    # Rounded as the argument is, so that the formula is given the same numbers.
    given = y.double()

    found = SCORES[name](y)

    if name.startswith("conformal"):
        p = y.float().softmax(-1).to(dtype)[0].double()
        expected = cal.conformal_scores(p, LABELS, method=name.removeprefix("conformal "))
    else:
        expected = SCORES[name](given)
    tree = found if isinstance(found, TensorDict) else TensorDict({"value": found})
    wide = expected if isinstance(expected, TensorDict) else TensorDict({"value": expected})
    assert min(torch.finfo(leaf.dtype).bits for leaf in tree.leaves()) >= 32
    tdf.assert_close(tree.double(), wide, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("share", [0.5, 1e-3, 1e-9, 1e-20])
def test_a_small_vote_is_counted(share):
    """The weight of members that vote otherwise is a sum, and not what is left of 1."""
    y = torch.tensor([[[9.0, 0.0]], [[0.0, 9.0]]])
    w = torch.tensor([1.0, share], dtype=torch.float64)

    u = metrics.uncertainty(y, "classification", weights=w)

    small = (w / w.sum()).amin()
    assert u["variation_ratio"].item() == pytest.approx(small.item(), rel=1e-6)
    assert u["disagreement"].item() == pytest.approx((2 * small * (1 - small)).item(), rel=1e-6)


def test_ties_after_large_losses_keep_their_digits():
    """The mean loss of ties is no difference of sums that a large loss before them has rounded."""
    loss = torch.tensor([1e9, 0.3, 0.3, -1e9])
    doubt = torch.tensor([0.1, 0.5, 0.5, 0.9])

    risk = metrics.risk_coverage(doubt, loss)

    assert risk[-1].item() == pytest.approx(0.15, rel=1e-5)


# -- integers where a float is meant ----------------------------------------------------------------------------


def counts(dtype):
    """Predictions and true values that are counts, some predictions below the truth."""
    return torch.tensor([3, 5, 0, 9, 7]).to(dtype), torch.tensor([5, 4, 2, 9, 1]).to(dtype)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("threshold", [1.5, float("inf"), torch.tensor(1.5), np.float32(1.5), np.float64(0.25)])
@pytest.mark.parametrize("scale", [None, 2])
def test_intervals_of_integers_are_those_of_floats(dtype, threshold, scale):
    """A threshold is not cut to an integer, and an infinite one stays infinite."""
    y, _ = counts(dtype)
    scales = None if scale is None else torch.full((5,), scale).to(dtype)

    low, high = cal.regression_intervals(y, threshold, scale=scales)

    width = float(threshold) * (scale or 1)
    torch.testing.assert_close(low, y.double() - width, check_dtype=False)
    torch.testing.assert_close(high, y.double() + width, check_dtype=False)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_scores_of_integers_are_those_of_floats(dtype, alpha):
    """Differences below zero do not wrap, and a set too small for `alpha` has an infinite threshold."""
    y, t = counts(dtype)

    scores = cal.regression_scores(y, t)
    threshold = cal.conformal_threshold(scores, alpha)

    wide = cal.regression_scores(y.double(), t.double())
    torch.testing.assert_close(scores, wide)
    torch.testing.assert_close(threshold, cal.conformal_threshold(wide, alpha))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_ranks_of_integers_are_those_of_floats(dtype):
    """A score, a doubt and a loss may be counts."""
    y, t = counts(dtype)
    wide = y.double()

    torch.testing.assert_close(metrics.auroc(y, t > 3), metrics.auroc(wide, t > 3), check_dtype=False)
    torch.testing.assert_close(metrics.risk_coverage(y, t), metrics.risk_coverage(wide, t.double()), check_dtype=False)


def test_large_counts_are_not_rounded():
    """float32 has no number for 2^24 + 1."""
    y = torch.tensor([2**24 + 1])

    low, high = cal.regression_intervals(y, 0.5)

    assert low.item() == 2**24 + 0.5
    assert high.item() == 2**24 + 1.5


@each_float
def test_intervals_hold_what_their_threshold_holds(dtype, generator):
    """Bounds of 16-bit predictions are not rounded to 16 bits, which would leave out true values."""
    y, t = torch.randn(2, 200, generator=generator).to(dtype)
    threshold = cal.conformal_threshold(cal.regression_scores(y, t), 0.1)

    low, high = cal.regression_intervals(y, threshold)

    inside = (low <= t.to(low.dtype) + 1e-6) & (t.to(low.dtype) <= high + 1e-6)
    assert inside.double().mean().item() >= 0.9


# -- probabilities where logits are meant -----------------------------------------------------------------------

TAKE_LOGITS = {
    "nll": lambda y: metrics.nll(y[0], LABELS),
    "brier": lambda y: metrics.brier(y, LABELS),
    "ece": lambda y: metrics.ece(y[0], LABELS),
    "adaptive_ece": lambda y: metrics.adaptive_ece(y, LABELS),
    "reliability_curve": lambda y: metrics.reliability_curve(y, LABELS),
    "uncertainty": lambda y: metrics.uncertainty(y, "classification"),
    "fit_temperature": lambda y: cal.fit_temperature(y, LABELS),
    "ensemble_logits": cal.ensemble_logits,
}


@pytest.mark.parametrize("name", TAKE_LOGITS)
@each_float
def test_probabilities_are_not_taken_as_logits_in_silence(name, dtype, generator):
    """Values from 0 to 1 that sum to 1 are warned about, whatever their rounding."""
    p = torch.randn(4, 8, 3, generator=generator).softmax(-1).to(dtype)

    with pytest.warns(UserWarning, match=rf"{name}: y looks like probabilities"):
        TAKE_LOGITS[name](p)


@pytest.mark.parametrize("name", TAKE_LOGITS)
@each_kind
def test_logits_are_not_warned_about(name, kind, generator):
    """Warnings are errors here: no logits are taken for probabilities, nor are log-probabilities."""
    y = members(generator, kind)

    torch.testing.assert_close(TAKE_LOGITS["nll"](y.log_softmax(-1)), TAKE_LOGITS["nll"](y), rtol=1e-5, atol=1e-5)
    TAKE_LOGITS[name](y)


def test_regression_may_be_between_0_and_1():
    """Only classification has logits."""
    y = torch.full((3, 4, 2), 0.5)

    assert metrics.uncertainty(y, "regression")["variance"].count_nonzero() == 0


# -- averages and distances -------------------------------------------------------------------------------------


def runs(generator, dtype, *, offset, spread, steps=300):
    """Models along a run, as trees, and as one float64 tensor."""
    values = (offset + spread * torch.randn(steps, 5, generator=generator, dtype=torch.float64)).to(dtype)
    return [TensorDict({"w": row}) for row in values], values.double()


@each_float
@pytest.mark.parametrize(("offset", "spread"), [(0.0, 1e-3), (1.0, 0.1), (100.0, 1.0), (0.0, 1e3)])
def test_averages_of_runs_follow_the_formula(dtype, offset, spread, generator):
    """Mean and variance of a run are those of float64, where the mean is large beside the variance as well."""
    models, values = runs(generator, dtype, offset=offset, spread=spread)
    swa, swag = SWA(), SWAG(rank=0)
    mean, gauss = swa.init(models[0]), swag.init(models[0])
    for model in models:
        mean = swa.update(model, mean)
        gauss = swag.update(model, gauss)

    size = max(abs(offset), spread)
    torch.testing.assert_close(mean["mean", "w"].double(), values.mean(0), rtol=1e-5, atol=1e-5 * size)
    torch.testing.assert_close(gauss["variance", "w"].double(), values.var(0, correction=0), rtol=1e-3, atol=1e-12)


@each_float
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("kind", ["ordinary", "equal", "opposite", "nearly equal"])
def test_distances_and_angles_follow_the_formula(dtype, size, kind, generator):
    """They are those of the same weights in float64, also where weights are near or cancel."""
    x = (torch.randn(50, generator=generator) * size).to(dtype)
    other = torch.randn(50, generator=generator) * size
    y = {"ordinary": other, "equal": x, "opposite": -x, "nearly equal": x + other * 2**-6}[kind].to(dtype)
    a, b = TensorDict({"w": x}), TensorDict({"w": y})

    distance, cosine = weights.distance(a, b), weights.cosine(a, b)

    expected = (x.double() - y.double()).norm()
    angle = torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=0)
    torch.testing.assert_close(distance.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(cosine.double(), angle, rtol=1e-5, atol=1e-6)


SIZES = [1e-37, 1e-30, 1e-23, 1e-12, 1e-9, 1.0, 1e10, 1e15, 1e20, 1e30, 1e37]


def stacks(generator, size):
    """Two stacks of three models of two leaves, whose last member is of ordinary size."""
    sizes = torch.tensor([size, size, 1.0])
    shapes = {"w": (3, 4, 5), "b": (3,)}
    return [
        TensorDict(
            {
                name: torch.randn(shape, generator=generator) * sizes.reshape(3, *[1] * (len(shape) - 1))
                for name, shape in shapes.items()
            },
            [3],
        )
        for _ in range(2)
    ]


@pytest.mark.parametrize("size", SIZES)
def test_distances_of_any_size_are_those_of_float64(size, generator):
    """Squares leave float32's range long before the weights do; each member has its own size."""
    a, b = stacks(generator, size)

    found = weights.distance(a, b)

    torch.testing.assert_close(found.double(), weights.distance(a.double(), b.double()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", SIZES)
def test_angles_of_members_of_any_size_are_those_of_float64(size, generator):
    """A stack against a stack, and against one model."""
    a, b = stacks(generator, size)

    found = torch.stack([weights.cosine(a, b), weights.cosine(a, b[0])])

    wide = torch.stack([weights.cosine(a.double(), b.double()), weights.cosine(a.double(), b[0].double())])
    torch.testing.assert_close(found.double(), wide, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_angles_of_small_and_large_differences(size, generator):
    """A product of squared norms leaves float32's range long before the norms do."""
    base = TensorDict({"w": torch.zeros(20)})
    a, b = [TensorDict({"w": torch.randn(20, generator=generator) * size}) for _ in range(2)]

    found = weights.cosine(a, b, base=base)

    x, y = a["w"].double(), b["w"].double()
    torch.testing.assert_close(found.double(), x @ y / (x.norm() * y.norm()), rtol=1e-4, atol=1e-5)


@each_float
def test_points_on_a_line_are_not_rounded_to_its_dtype(dtype):
    """A point at 0.1 of the way is that in any dtype, and float64 is not rounded to float32."""
    a, b = TensorDict({"w": torch.zeros(1, dtype=dtype)}), TensorDict({"w": torch.ones(1, dtype=dtype)})

    losses = weights.line_losses(lambda p: p["w"].sum(), a, b)
    height = weights.barrier(lambda p: p["w"].sum(), a, b)

    exact = torch.linspace(0, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(losses, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-12)
    assert height.double().abs().item() <= torch.finfo(dtype).eps
