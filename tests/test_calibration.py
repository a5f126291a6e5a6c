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
from tdfunc import metrics, random
from tests.helpers import examples


def outputs(seed, *shape):
    """Normal numbers in float64."""
    return random.normal(random.key(seed), shape, dtype=torch.float64)


@examples(0.4)
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([0.3, 1.0, 5.0]), classes=st.integers(2, 5))
def test_temperature_maximises_the_likelihood(seed, scale, classes):
    """No temperature nearby has a smaller negative log-likelihood; members are fitted each by itself."""
    y = outputs(seed, 2, 40, classes) * scale
    t = random.categorical(random.key(seed + 1), y[0] / scale)
    fitted = cal.fit_temperature(y, t)

    assert torch.allclose(fitted, torch.stack([cal.fit_temperature(member, t) for member in y]))
    assert torch.allclose(fitted, torch.vmap(lambda member: cal.fit_temperature(member, t))(y))
    # At the end of the range the likelihood of some logits still grows.
    room = torch.where(fitted < math.exp(11.9), 1e-12, 1e-6)
    best, *nearby = [
        torch.stack([tdf.metrics.nll(member / (own * factor), t) for member, own in zip(y, fitted, strict=True)])
        for factor in (1.0, 0.99, 1.01)
    ]
    assert (best <= torch.stack(nearby).amin(0) + room).all()


def test_temperature_recovers_a_known_one():
    """Labels drawn from logits / 2.5 give 2.5 back; impossible classes change nothing."""
    y = outputs(0, 20_000, 4) * 3
    t = random.categorical(random.key(1), y / 2.5)
    padded = torch.cat([y, torch.full((len(y), 1), -math.inf, dtype=y.dtype)], 1)

    assert cal.fit_temperature(y, t) == pytest.approx(2.5, rel=0.03)
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

    assert metrics.auroc(score, positive).item() == pytest.approx(roc_auc_score(positive.numpy(), score.numpy()))


@given(seed=st.integers(0, 2**32), size=st.integers(1, 20))
def test_aurc_is_the_mean_risk(seed, size):
    """The curve has the mean loss of the surest, and the area is its mean; ties do not depend on their order."""
    doubt = random.randint(random.key(seed), (size,), 0, 8).double()
    loss = random.uniform(random.key(seed + 1), (size,), dtype=torch.float64)
    order = random.permutation(random.key(seed + 2), size)
    distinct = doubt + torch.arange(size) / 100

    surest = loss[distinct.argsort()].numpy()
    risks = [surest[: k + 1].mean() for k in range(size)]
    np.testing.assert_allclose(metrics.risk_coverage(distinct, loss).numpy(), risks)
    assert metrics.aurc(distinct, loss).item() == pytest.approx(np.mean(risks))
    torch.testing.assert_close(metrics.aurc(doubt, loss), metrics.aurc(doubt[order], loss[order]))


@pytest.mark.parametrize("loss", [math.inf, -math.inf])
def test_a_risk_after_an_infinite_loss_is_infinite(loss):
    """As the mean of the losses is; the negative log-likelihood of an impossible class is infinite."""
    risk = metrics.risk_coverage(torch.tensor([0.1, 0.2, 0.3, 0.3, 0.4]), torch.tensor([1.0, 1.0, loss, 1.0, 1.0]))

    assert risk.tolist() == [1.0, 1.0, loss, loss, loss]


@pytest.mark.parametrize("measure", [metrics.auroc, metrics.aurc, metrics.risk_coverage])
@given(seed=st.integers(0, 2**32), members=st.integers(1, 4), size=st.integers(1, 20))
def test_members_are_measured_each_by_itself(measure, seed, members, size):
    """A result for each member, as in a loop; labels are shared or their own."""
    score = outputs(seed, members, size)
    truth = random.bernoulli(random.key(seed + 1), 0.4, (members, size))

    own = torch.stack([measure(s, t) for s, t in zip(score, truth, strict=True)])
    shared = torch.stack([measure(s, truth[0]) for s in score])
    torch.testing.assert_close(measure(score, truth), own, equal_nan=True)
    torch.testing.assert_close(measure(score, truth[0]), shared, equal_nan=True)


@given(seed=st.integers(0, 2**32), members=st.integers(1, 4), size=st.integers(1, 20))
def test_members_are_measured_under_vmap(seed, members, size):
    """A result under vmap is that outside."""
    score = outputs(seed, members, size)
    truth = random.bernoulli(random.key(seed + 1), 0.4, (members, size))

    torch.testing.assert_close(torch.vmap(metrics.aurc)(score, truth), metrics.aurc(score, truth))


@given(seed=st.integers(0, 2**32), scale=st.floats(0.1, 20), weighted=st.booleans())
def test_ensemble_is_one_model(seed, scale, weighted):
    """Its probabilities are the mean of the members', and measures of it are those of the members together."""
    y, t = outputs(seed, 3, 20, 4) * scale, random.randint(random.key(seed + 1), (20,), 0, 4)
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64) if weighted else None
    together = cal.ensemble_logits(y, weights=weights)
    share = (torch.ones(3, dtype=torch.float64) if weights is None else weights).reshape(3, 1, 1)

    torch.testing.assert_close(together.exp(), (share * y.softmax(-1)).sum(0) / share.sum())
    torch.testing.assert_close(metrics.adaptive_ece(y, t, weights=weights), metrics.adaptive_ece(together, t))
    torch.testing.assert_close(tdf.metrics.nll(y, t, weights=weights), tdf.metrics.nll(together, t))


@pytest.mark.parametrize("scaled", [False, True])
def test_regression_intervals_cover(scaled):
    """Over many calibration sets the share of covered values is 1 - alpha; scaled ones are narrow where noise is."""
    n, repeats = 99, 400
    spread = random.uniform(random.key(1), (repeats, n + 50), minval=0.1, maxval=3.0, dtype=torch.float64)
    t = outputs(2, repeats, n + 50) * spread
    y, scale = torch.zeros_like(t), spread if scaled else None
    parts = (scale[:, :n], scale[:, n:]) if scaled else (None, None)
    scores = torch.vmap(lambda y, t, scale: cal.regression_scores(y, t, scale=scale), (0, 0, 0 if scaled else None))(
        y[:, :n], t[:, :n], parts[0]
    )
    low, high = cal.regression_intervals(y[:, n:], cal.conformal_threshold(scores, 0.2), scale=parts[1])
    inside = (low <= t[:, n:]) & (t[:, n:] <= high)

    assert inside.double().mean().item() == pytest.approx(0.8, abs=0.012)
    assert (high - low).std(1).gt(0.1).all().item() is scaled


@pytest.mark.parametrize("member", range(3))
def test_members_have_intervals_of_their_own(member):
    """A threshold for each member; a scale that all share."""
    y, t, scale = outputs(0, 3, 50), outputs(1, 50), outputs(2, 50).abs()
    scores = cal.regression_scores(y, t, scale=scale)
    low, high = cal.regression_intervals(y, cal.conformal_threshold(scores, 0.1), scale=scale)

    own = cal.conformal_threshold(cal.regression_scores(y[member], t, scale=scale), 0.1)
    by_tensor = cal.regression_intervals(y[member], own, scale=scale)
    by_number = cal.regression_intervals(y[member], own.item(), scale=scale)

    torch.testing.assert_close((low[member], high[member]), by_tensor, rtol=0, atol=0)
    torch.testing.assert_close((low[member], high[member]), by_number, rtol=0, atol=0)
    covered = (low[member] <= t + 1e-12) & (t - 1e-12 <= high[member])
    assert covered.sum() == 46


@pytest.mark.parametrize("method", ["lac", "aps"])
def test_members_have_sets_of_their_own(method):
    """A threshold for each member, as many as there are classes or not: the sets are those of each by itself."""
    y = outputs(0, 3, 50, 3) * 2
    p, t = y.softmax(-1), random.categorical(random.key(1), y)
    scores = cal.conformal_scores(p, t, method=method)
    thresholds = cal.conformal_threshold(scores, 0.2)
    sets = cal.conformal_sets(p, thresholds, method=method)
    members = list(zip(p, thresholds, strict=True))

    assert len(set(thresholds.tolist())) == 3
    by_tensor = [cal.conformal_sets(member, own, method=method) for member, own in members]
    by_number = [cal.conformal_sets(member, own.item(), method=method) for member, own in members]
    assert torch.equal(sets, torch.stack(by_tensor))
    assert torch.equal(sets, torch.stack(by_number))
    assert sets.gather(-1, t[..., None]).sum(1).tolist() == [[41]] * 3


@pytest.mark.parametrize(("method", "is_lac"), [("lac", True), ("aps", False)])
def test_lac_alone_scores_by_the_probability_of_the_label(method, is_lac):
    """The other method adds the probabilities of the classes before the label."""
    y = outputs(0, 3, 50, 3) * 2
    p, t = y.softmax(-1), random.categorical(random.key(1), y)

    scores = cal.conformal_scores(p, t, method=method)

    assert torch.equal(scores, 1 - p.gather(-1, t[..., None])[..., 0]) is is_lac


@given(seed=st.integers(0, 2**32), size=st.integers(1, 50), bins=st.integers(1, 20))
def test_adaptive_ece_is_its_definition(seed, size, bins):
    """Equal-mass bins of sorted confidences, weighted by their sizes."""
    y, t = outputs(seed, size, 3), random.randint(random.key(seed + 1), (size,), 0, 3)
    p = y.softmax(-1).numpy()
    confidence, right = p.max(1), (p.argmax(1) == t.numpy()).astype(float)
    parts = np.array_split(np.argsort(confidence, kind="stable"), min(bins, size))
    expected = sum(len(i) / size * abs(right[i].mean() - confidence[i].mean()) for i in parts)

    assert metrics.adaptive_ece(y, t, bins=bins).item() == pytest.approx(expected)
    assert all(measure(y, t) == measure(y, t, bins=15) for measure in (metrics.ece, metrics.adaptive_ece))
    assert metrics.reliability_curve(y, t).batch_size == (15,)


def test_nan_is_not_hidden():
    """A nan among logits or scores is one in the result."""
    y = torch.tensor([[math.nan, 0.0], [1.0, 0.0]])

    assert cal.fit_temperature(y, torch.tensor([0, 1])).isnan()
    assert metrics.auroc(y[:, 0], torch.tensor([True, False])).isnan()
    assert metrics.aurc(y[:, 0], torch.tensor([0.0, 1.0])).isnan()


@pytest.mark.parametrize("alpha", [0.2, 0.4, 0.6])
def test_a_score_of_nan_is_the_worst(alpha):
    """The threshold is that of the same scores with infinity in its place, under which sets hold all classes."""
    scores = torch.tensor([[2.0, math.nan, 1.0, math.nan], [math.nan, 3.0, -math.inf, 4.0]])
    threshold = cal.conformal_threshold(scores, alpha)

    assert torch.equal(threshold, cal.conformal_threshold(scores.nan_to_num(math.inf, math.inf, -math.inf), alpha))
    assert cal.conformal_sets(torch.tensor([0.7, 0.3]), cal.conformal_threshold(scores[0], 0.2)).all()


P = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25], [0.1, 0.1, 0.8]], dtype=torch.float64)
Y = P.log()
T, V = torch.tensor([0, 1, 2]), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
SCORES = metrics.nll, metrics.brier, metrics.ece, metrics.adaptive_ece
CALLS = {
    "fit_temperature": (cal.fit_temperature, (Y, T)),
    "ensemble_logits": (lambda y, w: cal.ensemble_logits(y, weights=w), (Y, V)),
    "conformal_scores": (cal.conformal_scores, (P, T)),
    "conformal_threshold": (lambda scores: cal.conformal_threshold(scores, 0.5), (V,)),
    "conformal_sets": (cal.conformal_sets, (P[:, None], V)),
    "regression_scores": (lambda y, t, scale: cal.regression_scores(y, t, scale=scale), (P, V, V)),
    "regression_intervals": (lambda y, w, s: torch.stack(cal.regression_intervals(y, w, scale=s)), (P, V, V)),
    "auroc": (metrics.auroc, (V, T > 0)),
    "risk_coverage": (metrics.risk_coverage, (P, V)),
    "scores": (lambda y, t, w: torch.stack([f(y, t, weights=w) for f in SCORES]), (Y.expand(3, 3, 3), T, V)),
    "uncertainty": (lambda y, w: metrics.uncertainty(y, "classification", weights=w)["entropy"], (Y, V.ceil().long())),
}


def read_only(x):
    """An array with negative strides that cannot be written."""
    array = x.numpy()[::-1].copy()[::-1]
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "given_as",
    [read_only, lambda x: x.numpy(), lambda x: x.tolist(), lambda x: tuple(x.tolist())],
    ids=["read-only", "array", "list", "tuple"],
)
def test_arrays_are_tensors(name, given_as):
    """Arrays, those that cannot be written and those with negative strides among them, and lists."""
    call, given = CALLS[name]

    torch.testing.assert_close(call(*map(given_as, given)), call(*given), check_dtype=False)


MESSAGES = [
    (lambda: cal.fit_temperature(torch.zeros(3, 2), torch.zeros(3)), tdf.LeafMismatchError, "fit_temperature.*float32"),
    (lambda: cal.conformal_scores(torch.zeros(3, 2), torch.zeros(2).long()), tdf.LeafMismatchError, r"\[3\].*\[2\]"),
    (lambda: metrics.auroc(torch.zeros(3), torch.ones(2).bool()), tdf.LeafMismatchError, r"auroc.*\[3\].*\[2\]"),
    (lambda: metrics.adaptive_ece(torch.zeros(3, 2), torch.full((3,), 9)), ValueError,
     "a label is not the number of a class.*0 <= t < 2"),
    (lambda: metrics.aurc(0.5, 1.0), tdf.LeafMismatchError, r"risk_coverage.*\[\].*\[\]"),
    (lambda: metrics.aurc(torch.zeros(2, 0), torch.ones(0)), tdf.LeafMismatchError, r"risk_coverage.*\[2, 0\].*\[0\]"),
    (lambda: metrics.auroc(torch.zeros(3), torch.ones(3)), tdf.LeafMismatchError, "auroc.*bools.*float32"),
    (lambda: metrics.auroc(torch.zeros(3), torch.tensor([-1, 1, 1])), ValueError, "auroc.*must be 0 or 1"),
    (lambda: metrics.auroc(torch.zeros(3), [1, 2, 1]), ValueError, "auroc.*must be 0 or 1"),
    (lambda: cal.regression_scores(torch.zeros(2, 3), torch.zeros(2)), tdf.LeafMismatchError,
     r"regression_scores.*\[3\], for \[2, 3\].*\[2\]"),
    (lambda: cal.ensemble_logits(torch.zeros(3).long()), tdf.LeafMismatchError, "ensemble_logits.*int64"),
    (lambda: cal.fit_temperature(torch.zeros(0, 2), torch.zeros(0).long()), ValueError, "there are no labels"),
    (lambda: cal.conformal_threshold(torch.zeros(3), 1.0), ValueError, "alpha must be between 0 and 1.*1.0"),
    (lambda: cal.conformal_scores(torch.tensor([[2.0, -1.0]]), [0]), ValueError, "p is not made of probabilities"),
    (lambda: cal.conformal_sets([[2.0, 0.5]], 0.5, method="aps"), ValueError, "not made of probabilities.*softmax"),
    (lambda: cal.conformal_sets(torch.zeros(3, 2), 0.5, method="x"), ValueError, "must be one of .lac., .aps..*.x."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "pattern"), MESSAGES)
def test_messages(call, error, pattern):
    """Each refusal names the call and both values."""
    with pytest.raises(error, match=f"(?s){pattern}"):
        call()


@pytest.mark.parametrize("alpha", [0.95, 1 - 1e-9, 1 - 1e-12, 1 - 2**-53])
def test_the_smallest_threshold_is_the_smallest_score(alpha):
    """However near to 1 the share is that may be missed."""
    assert cal.conformal_threshold(torch.arange(1.0, 11.0), alpha).item() == 1.0
