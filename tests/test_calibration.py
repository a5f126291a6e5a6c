"""Calibration against scikit-learn, definitions in float64, and the coverage that conformal sets promise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

import tdfunc as tdf
from tdfunc import calibration as cal
from tdfunc import random


def outputs(seed, *shape):
    """Normal numbers in float64."""
    return random.normal(random.key(seed), shape, dtype=torch.float64)


@given(seed=st.integers(0, 2**32), scale=st.sampled_from([0.3, 1.0, 5.0]), classes=st.integers(2, 5))
def test_temperature_maximises_the_likelihood(seed, scale, classes):
    """No temperature nearby has a smaller negative log-likelihood; members are fitted each by itself."""
    y = outputs(seed, 2, 40, classes) * scale
    t = random.categorical(random.key(seed + 1), y[0] / scale)
    fitted = cal.fit_temperature(y, t)

    assert torch.allclose(fitted, torch.stack([cal.fit_temperature(member, t) for member in y]))
    assert torch.allclose(fitted, torch.vmap(lambda member: cal.fit_temperature(member, t))(y))
    for member, best in zip(y, fitted, strict=True):
        at = [tdf.nll(member / (best * factor), t).item() for factor in (1.0, 0.99, 1.01)]
        # At the end of the range the likelihood of some logits still grows.
        assert at[0] <= min(at[1:]) + (1e-12 if best < math.exp(11.9) else 1e-6)


def test_temperature_recovers_a_known_one():
    """Labels drawn from logits / 2.5 give 2.5 back; impossible classes change nothing."""
    y = outputs(0, 100_000, 4) * 3
    t = random.categorical(random.key(1), y / 2.5)
    padded = torch.cat([y, torch.full((len(y), 1), -math.inf, dtype=y.dtype)], 1)

    assert cal.fit_temperature(y, t) == pytest.approx(2.5, rel=0.02)
    assert torch.allclose(cal.fit_temperature(padded, t), cal.fit_temperature(y, t))


@pytest.mark.parametrize("method", ["lac", "aps"])
@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_conformal_sets_cover(method, alpha):
    """Over many calibration sets the share of covered answers is 1 - alpha, and at most 1 / (N + 1) more for lac."""
    n, repeats = 99, 400
    y = outputs(3, repeats, n + 50, 4) * 2
    t = random.categorical(random.key(4), y)
    p = (y * 1.7).softmax(-1)  # an overconfident model
    scores = cal.conformal_scores(p, t, method=method)
    threshold = cal.conformal_threshold(scores[:, :n], alpha)
    sets = cal.conformal_sets(p[:, n:], threshold[:, None, None], method=method)
    covered = sets.gather(-1, t[:, n:, None]).double().mean().item()

    assert covered == pytest.approx(1 - alpha, abs=0.012)
    assert torch.equal(sets.gather(-1, t[:, n:, None])[..., 0], scores[:, n:] <= threshold[:, None])


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=30), st.integers(1, 99))
def test_threshold_is_the_finite_sample_quantile(scores, percent):
    """At least ceil((N + 1) (1 - alpha)) of the scores are at most it, and fewer are below it."""
    threshold = cal.conformal_threshold(torch.tensor(scores, dtype=torch.float64), percent / 100).item()
    place = -(-(len(scores) + 1) * (100 - percent) // 100)

    assert threshold == (sorted(scores)[place - 1] if place <= len(scores) else math.inf)


@given(seed=st.integers(0, 2**32), levels=st.integers(1, 12), size=st.integers(2, 40))
def test_auroc_is_that_of_sklearn(seed, levels, size):
    """With ties as well."""
    score = random.randint(random.key(seed), (size,), 0, levels).double()
    positive = random.bernoulli(random.key(seed + 1), 0.4, (size,))
    assume(positive.any() and not positive.all())

    assert cal.auroc(score, positive).item() == pytest.approx(roc_auc_score(positive.numpy(), score.numpy()))


@given(seed=st.integers(0, 2**32), size=st.integers(1, 20))
def test_aurc_is_the_mean_risk(seed, size):
    """The mean over coverages of the loss of the surest; ties do not depend on their order."""
    doubt = random.randint(random.key(seed), (size,), 0, 8).double()
    loss = random.uniform(random.key(seed + 1), (size,), dtype=torch.float64)
    order = random.permutation(random.key(seed + 2), size)
    distinct = doubt + torch.arange(size) / 100

    surest = loss[distinct.argsort()].numpy()
    assert cal.aurc(distinct, loss).item() == pytest.approx(np.mean([surest[: k + 1].mean() for k in range(size)]))
    torch.testing.assert_close(cal.aurc(doubt, loss), cal.aurc(doubt[order], loss[order]))


@given(seed=st.integers(0, 2**32), size=st.integers(1, 50), bins=st.integers(1, 20))
def test_adaptive_ece_is_its_definition(seed, size, bins):
    """Equal-mass bins of sorted confidences, weighted by their sizes."""
    y, t = outputs(seed, size, 3), random.randint(random.key(seed + 1), (size,), 0, 3)
    p = y.softmax(-1).numpy()
    confidence, right = p.max(1), (p.argmax(1) == t.numpy()).astype(float)
    parts = np.array_split(np.argsort(confidence, kind="stable"), min(bins, size))
    expected = sum(len(i) / size * abs(right[i].mean() - confidence[i].mean()) for i in parts)

    assert cal.adaptive_ece(y, t, bins=bins).item() == pytest.approx(expected)


def test_nan_is_not_hidden():
    """A nan among logits or scores is one in the result."""
    y = torch.tensor([[math.nan, 0.0], [1.0, 0.0]])

    assert cal.fit_temperature(y, torch.tensor([0, 1])).isnan()
    assert cal.auroc(y[:, 0], torch.tensor([True, False])).isnan()


MESSAGES = [
    (lambda: cal.fit_temperature(torch.zeros(3, 2), torch.zeros(3)), tdf.LeafMismatchError, "fit_temperature.*float32"),
    (lambda: cal.conformal_scores(torch.zeros(3, 2), torch.zeros(2).long()), tdf.LeafMismatchError, r"\[3\].*\[2\]"),
    (lambda: cal.auroc(torch.zeros(3), torch.ones(2).bool()), tdf.LeafMismatchError, r"auroc.*\[3\].*\[2\]"),
    (
        lambda: cal.adaptive_ece(torch.zeros(3, 2), torch.full((3,), 9)),
        ValueError,
        "labels must name classes.*0 <= t < 2",
    ),
    (lambda: cal.fit_temperature(torch.zeros(0, 2), torch.zeros(0).long()), ValueError, "there must be examples"),
    (lambda: cal.conformal_threshold(torch.zeros(3), 1.0), ValueError, "alpha must lie between 0 and 1.*1.0"),
    (lambda: cal.conformal_sets(torch.zeros(3, 2), 0.5, method="x"), ValueError, "method must be lac or aps.*'x'"),
]


@pytest.mark.parametrize(("call", "error", "pattern"), MESSAGES)
def test_messages(call, error, pattern):
    """Each refusal names the call and both values."""
    with pytest.raises(error, match=f"(?s){pattern}"):
        call()
