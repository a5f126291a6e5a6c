"""Uncertainty and scores against the formulas written out in numpy, and against scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, log_loss

from tdfunc import LeafMismatchError, TensorDict
from tdfunc._jit import jit
from tdfunc.metrics import brier, ece, nll, reliability_curve, uncertainty
from tests.helpers import assert_pure, assert_trees_equal


def softmax(y):
    """Return probabilities, in numpy."""
    e = np.exp(y - y.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def entropy(p):
    """Return the entropy of each row, in nats."""
    return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)


def by_hand(y, w):
    """Return the classification results by their definitions, one input at a time."""
    members, batch, classes = y.shape
    q = softmax(y)
    rows = []
    for b in range(batch):
        p = sum(w[e] * q[e, b] for e in range(members))
        votes = [int(y[e, b].argmax()) for e in range(members)]
        shares = [sum(w[e] for e in range(members) if votes[e] == c) for c in range(classes)]
        total, own = entropy(p), sum(w[e] * entropy(q[e, b]) for e in range(members))
        rows.append(
            {
                "mean": p,
                "variance": sum(w[e] * (q[e, b] - p) ** 2 for e in range(members)),
                "entropy": total,
                "expected_entropy": own,
                "mutual_information": total - own,
                "variation_ratio": 1 - max(shares),
                "disagreement": 0.0
                + sum(w[i] * w[j] for i in range(members) for j in range(members) if votes[i] != votes[j]),
            }
        )
    return {key: torch.as_tensor(np.stack([row[key] for row in rows])) for key in rows[0]}


logits = st.integers(0, 2**31).map(lambda seed: np.random.default_rng(seed))


@given(logits, st.integers(1, 5), st.integers(1, 4), st.integers(2, 6), st.floats(0.01, 30), st.booleans())
def test_classification_by_hand(rng, members, batch, classes, scale, weighted):
    """One of the measures would not be what its definition says."""
    y = rng.normal(size=(members, batch, classes)) * scale
    weights = rng.uniform(0.1, 5, size=members) if weighted else np.ones(members)

    found = uncertainty(
        torch.as_tensor(y), kind="classification", weights=torch.as_tensor(weights) if weighted else None
    )

    expected = by_hand(y, weights / weights.sum())
    assert set(found.keys()) == set(expected)
    assert found.batch_size == (batch,)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}")


@given(logits, st.integers(1, 5), st.floats(0.01, 200))
def test_classification_laws(rng, members, scale):
    """A measure would leave its range, or depend on the order of members or on a shift of the logits."""
    y = torch.as_tensor(rng.normal(size=(members, 3, 4)) * scale, dtype=torch.float32)
    u = uncertainty(y, kind="classification")

    torch.testing.assert_close(u["mean"].sum(-1), torch.ones(3))
    assert (u["mutual_information"] >= 0).all()
    assert (u["mutual_information"] <= np.log(members) + 1e-5).all()
    assert (u["entropy"] <= np.log(4) + 1e-5).all()
    assert (u["variation_ratio"] <= 1 - 1 / members + 1e-6).all()
    torch.testing.assert_close(u["entropy"], u["expected_entropy"] + u["mutual_information"], rtol=1e-4, atol=1e-5)
    assert_trees_equal(uncertainty(y.flip(0), kind="classification"), u, rtol=1e-4, atol=1e-6)
    assert_trees_equal(uncertainty(y + 50, kind="classification"), u, rtol=1e-2, atol=1e-3)


def test_large_logits_are_exact():
    """Probabilities would underflow to nan or to an infinite entropy."""
    y = torch.tensor([[[1000.0, -1000.0]], [[-1000.0, 1000.0]]])

    u = uncertainty(y, kind="classification")

    torch.testing.assert_close(u["mean"], torch.tensor([[0.5, 0.5]]))
    torch.testing.assert_close(u["mutual_information"], torch.tensor([np.log(2)], dtype=torch.float32))
    assert u["expected_entropy"].item() == 0


def test_small_mutual_information_survives():
    """`entropy - expected_entropy` would cancel to 0 in float32 where the members nearly agree."""
    y = torch.tensor([[[2.0, 0.0]], [[2.0001, 0.0]]])

    small = uncertainty(y, kind="classification")["mutual_information"].double()

    exact = uncertainty(y.double(), kind="classification")["mutual_information"]
    torch.testing.assert_close(small, exact, rtol=0.1, atol=0)


def test_identical_members_share_everything():
    """Rounding would show an ensemble of one opinion as uncertain."""
    y = torch.randn(1, 50, 10).expand(7, 50, 10)

    u = uncertainty(y, kind="classification")

    assert (u["mutual_information"] < 1e-12).all()
    assert (u["disagreement"] < 1e-6).all()


def test_masked_classes_are_probability_zero(generator):
    """A class ruled out by a logit of -inf would make entropies or their gradients nan."""
    y = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    masked = torch.cat([y, torch.full((3, 4, 1), -torch.inf, dtype=torch.float64)], -1)

    full, part = uncertainty(masked, kind="classification"), uncertainty(y, kind="classification")
    total = lambda x: sum(uncertainty(x, kind="classification")[key].sum() for key in ("entropy", "mutual_information"))  # noqa: E731
    grads = [torch.func.grad(total)(x)[..., :5] for x in (masked, y)]

    for key in ("entropy", "expected_entropy", "mutual_information", "disagreement"):
        torch.testing.assert_close(full[key], part[key])
    torch.testing.assert_close(*grads)


def test_weight_zero_leaves_the_member_out(generator):
    """A member without weight would make the result nan by its certainty of what the others hold impossible."""
    y = torch.randn(3, 4, 5, generator=generator)
    y[1] = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf, -torch.inf])
    y[[0, 2], 0, 0] = -torch.inf

    u = uncertainty(y, kind="classification", weights=torch.tensor([1.0, 0.0, 3.0]))

    rest = uncertainty(y[[0, 2]], kind="classification", weights=torch.tensor([1.0, 3.0]))
    assert_trees_equal(u, rest, rtol=1e-5, atol=1e-6)


def test_nan_spreads_to_its_input_only(generator):
    """A broken member would be counted as a vote, or spoil other inputs."""
    y = torch.randn(3, 4, 5, generator=generator)
    bad = y.clone()
    bad[1, 2, 0] = torch.nan

    u, expected = uncertainty(bad, kind="classification"), uncertainty(y, kind="classification")

    others = torch.tensor([0, 1, 3])
    assert all(leaf[2].isnan().all() for leaf in u.values())
    assert_trees_equal(u[others], expected[others])


@pytest.mark.parametrize("kind", ["classification", "regression", "gaussian"])
def test_nan_omit_leaves_the_member_out(kind, generator):
    """`nan="omit"` would keep the weight of a member that has no output."""
    y = torch.randn(3, 4, 2, generator=generator)
    bad = y.clone()
    bad[1, 2, 0] = torch.nan
    bad[:, 3] = torch.nan

    u = uncertainty(bad, kind=kind, weights=torch.tensor([1.0, 2.0, 5.0]), nan="omit")

    whole = uncertainty(y, kind=kind, weights=torch.tensor([1.0, 2.0, 5.0]))
    rest = uncertainty(y[[0, 2]], kind=kind, weights=torch.tensor([1.0, 5.0]))
    assert_trees_equal(u[:2], whole[:2], rtol=1e-6, atol=1e-6)
    assert_trees_equal(u[2], rest[2], rtol=1e-5, atol=1e-6)
    assert all(leaf[3].isnan().all() for leaf in u.values())


@given(logits, st.integers(1, 5), st.booleans())
def test_regression_by_hand(rng, members, weighted):
    """Mean or variance would weigh members wrongly."""
    y = rng.normal(size=(members, 4, 3)) * 10 + 1000
    weights = rng.uniform(0.1, 5, size=members) if weighted else np.ones(members)

    u = uncertainty(torch.as_tensor(y), kind="regression", weights=torch.as_tensor(weights))

    mean = np.average(y, axis=0, weights=weights)
    torch.testing.assert_close(u["mean"], torch.as_tensor(mean))
    torch.testing.assert_close(u["variance"], torch.as_tensor(np.average((y - mean) ** 2, axis=0, weights=weights)))
    assert u.batch_size == (4,)


def test_regression_of_scalars():
    """Outputs without a batch would need one."""
    u = uncertainty(torch.tensor([1.0, 3.0]), kind="regression")

    assert u.batch_size == ()
    assert (u["mean"].item(), u["variance"].item()) == (2.0, 1.0)


def test_gaussian_mixture_by_sampling(generator):
    """The variance of the mixture would miss one of its parts."""
    means, log_variances = torch.tensor([0.0, 4.0], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    u = uncertainty(torch.stack([means, log_variances], -1), kind="gaussian", weights=torch.tensor([3.0, 1.0]))

    member = torch.multinomial(torch.tensor([0.75, 0.25]), 400_000, replacement=True, generator=generator)
    noise = torch.randn(400_000, generator=generator, dtype=torch.float64)
    draws = means[member] + noise * (log_variances[member] / 2).exp()
    torch.testing.assert_close(u["mean"], draws.mean(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(u["variance"], draws.var(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(u["variance"], u["aleatoric"] + u["epistemic"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_widened(dtype, generator):
    """bfloat16 would give an entropy of two digits."""
    y = torch.randn(3, 4, 5, generator=generator).to(dtype)

    u = uncertainty(y, kind="classification")

    assert u["entropy"].dtype is torch.float32
    assert_trees_equal(u, uncertainty(y.float(), kind="classification"))


@pytest.mark.parametrize("wrap", [torch.vmap, jit], ids=["vmap", "jit"])
@pytest.mark.parametrize("kind", ["classification", "regression", "gaussian"])
def test_in_transforms(wrap, kind, generator):
    """The measures could not be taken inside vmap or a trace."""
    y = torch.randn(6, 3, 4, 2, generator=generator)
    one = lambda x: uncertainty(x, kind, weights=torch.arange(1, 4).to(x))  # noqa: E731

    found = wrap(one)(y) if wrap is torch.vmap else torch.stack([wrap(one)(x) for x in y])

    assert_trees_equal(found, torch.stack([assert_pure(one, x) for x in y]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("measure", ["mean", "entropy", "expected_entropy", "mutual_information", "variance"])
def test_gradients(measure, generator):
    """Training on a measure would follow a wrong gradient."""
    y = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda x: uncertainty(x, "classification")[measure], (y,))


# -- scores -----------------------------------------------------------------------------------------------------


def labelled(generator, members=3, batch=200, classes=5):
    """Return logits of all members, labels, and the probabilities of the mixture in numpy."""
    y = torch.randn(members, batch, classes, generator=generator, dtype=torch.float64) * 2
    t = torch.randint(classes, (batch,), generator=generator)
    return y, t, softmax(y.numpy()).mean(0)


def test_nll_and_brier_equal_sklearn(generator):
    """The scores of the mixture would be those of something else, such as of the mean logits."""
    y, t, p = labelled(generator)

    torch.testing.assert_close(nll(y, t).item(), log_loss(t, p, labels=range(5)))
    torch.testing.assert_close(brier(y, t).item(), brier_score_loss(t, p, labels=range(5), scale_by_half=False))


def ece_by_hand(p, t, bins):
    """Return the expected calibration error, bin by bin."""
    confidence, right = p.max(-1), p.argmax(-1) == t
    total = 0.0
    for b in range(bins):
        chosen = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if chosen.any():
            total += chosen.mean() * abs(right[chosen].mean() - confidence[chosen].mean())
    return total


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_by_hand(bins, generator):
    """Predictions would be put into wrong bins."""
    y, t, p = labelled(generator)

    torch.testing.assert_close(ece(y, t, bins=bins).item(), ece_by_hand(p, t.numpy(), bins))


def test_ece_is_zero_when_calibrated():
    """A calibrated predictor would look over- or underconfident."""
    y = torch.log(torch.tensor([[0.75, 0.25]])).expand(4, 2)

    assert ece(y, torch.tensor([0, 0, 0, 1])).item() < 1e-6
    torch.testing.assert_close(ece(y, torch.tensor([1, 1, 1, 1])), torch.tensor(0.75))


def test_reliability_curve_adds_up(generator):
    """The diagram would not show the error that `ece` returns."""
    y, t, p = labelled(generator)

    curve = reliability_curve(y, t, bins=10)

    used = curve[curve["count"] > 0]
    gaps = used["count"] / 200 * (used["accuracy"] - used["confidence"]).abs()
    torch.testing.assert_close(gaps.sum(), ece(y, t, bins=10))
    assert (curve["lower"][0], curve["upper"][-1]) == (0, 1)
    assert curve["count"].sum() == 200
    assert curve[curve["count"] == 0]["accuracy"].isnan().all()
    assert ((used["lower"] < used["confidence"]) & (used["confidence"] <= used["upper"])).all()


@pytest.mark.parametrize("make", [list, tuple, np.asarray])
def test_lists_are_tensors(make, generator):
    """Labels or weights in a list would end in words about attributes of lists."""
    y, t, _ = labelled(generator)
    weights = torch.tensor([1.0, 2.0, 0.5])

    for score in (nll, brier, ece):
        got = score(y.numpy(), make(t.tolist()), weights=make(weights.tolist()))
        torch.testing.assert_close(got, score(y, t, weights=weights))
    got = uncertainty(y.tolist(), "classification", weights=make(weights.tolist()))
    assert_trees_equal(got, uncertainty(y.to(got["mean"].dtype), "classification", weights=weights))
    whole = uncertainty(y, "classification", weights=make([1, 2, 4]))
    assert_trees_equal(whole, uncertainty(y, "classification", weights=torch.tensor([1.0, 2.0, 4.0])))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_narrow_integers(dtype, generator):
    """Labels of any integer dtype name the same classes, also where there are more classes than it can count."""
    y, t, _ = labelled(generator, classes=300)
    t = t.clamp(max=100)

    torch.testing.assert_close(nll(y, t.to(dtype)), nll(y, t))


@pytest.mark.parametrize("score", [nll, brier, ece])
def test_one_model_is_an_ensemble_of_one(score, generator):
    """A single model's logits would be read as members."""
    y, t, _ = labelled(generator)

    torch.testing.assert_close(score(y[0], t), score(y[:1], t))
    torch.testing.assert_close(score(y, t, weights=torch.tensor([1.0, 0.0, 0.0])), score(y[0], t))
    torch.testing.assert_close(score(y[0].reshape(4, 50, 5), t.reshape(4, 50)), score(y[0], t))


@pytest.mark.parametrize("score", [nll, brier, ece])
def test_scores_in_transforms(score, generator):
    """A score could not be computed for each member by vmap, or in a trace."""
    y, t, _ = labelled(generator)

    each = torch.vmap(score, in_dims=(0, None))(y, t)

    torch.testing.assert_close(each, torch.stack([score(x, t) for x in y]))
    torch.testing.assert_close(jit(score)(y, t), score(y, t))


@pytest.mark.parametrize("score", [nll, brier, ece])
def test_scores_of_nan_are_nan(score, generator):
    """A diverged model would get a good score."""
    y, t, _ = labelled(generator)
    y[0, 3] = torch.nan

    assert score(y, t).isnan()


Y = torch.zeros(3, 4, 5)
T = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: uncertainty(Y, kind="poisson"), ValueError, ["kind", "'regression'", "'poisson'"]),
        (lambda: uncertainty(Y, kind="regression", nan="drop"), ValueError, ["nan", "'omit'", "'drop'"]),
        (lambda: uncertainty(Y.long(), kind="classification"), LeafMismatchError, ["floating", "int64"]),
        (lambda: uncertainty(Y[0, 0], kind="classification"), LeafMismatchError, ["2 or more", "[5]"]),
        (lambda: uncertainty(Y[:0], kind="classification"), LeafMismatchError, ["not empty", "[0, 4, 5]"]),
        (lambda: uncertainty(Y, kind="gaussian"), LeafMismatchError, ["(E, ..., 2)", "[3, 4, 5]"]),
        (lambda: uncertainty(Y, kind="regression", weights=torch.ones(4)), LeafMismatchError, ["[3]", "[4]"]),
        (
            lambda: uncertainty(Y, kind="regression", weights=torch.tensor([1.0, -1.0, 1.0])),
            ValueError,
            [">= 0", "-1.0"],
        ),
        (
            lambda: uncertainty(Y, kind="regression", weights=torch.zeros(3)),
            ValueError,
            ["not all 0", "[0.0, 0.0, 0.0]"],
        ),
        (
            lambda: uncertainty(Y, kind="regression", weights=torch.tensor([1.0, torch.nan, 1.0])),
            ValueError,
            ["finite", "nan"],
        ),
        (lambda: nll(Y, T[:3]), LeafMismatchError, ["[3, 4, 5]", "[3]"]),
        (lambda: brier(Y, T.float()), LeafMismatchError, ["integers", "float32"]),
        (lambda: nll(Y[0], T, weights=torch.ones(3)), LeafMismatchError, ["(E, *[4], C)", "[4, 5]"]),
        (lambda: ece(Y, T + 5), ValueError, ["0 <= t < 5", "5 to 5"]),
        (lambda: ece(Y[:, :0], T[:0]), ValueError, ["labels to average", "[0]"]),
        (lambda: reliability_curve(Y, T, bins=0), ValueError, ["bins >= 1", "0"]),
        (lambda: nll(Y, [0, 1, 2]), LeafMismatchError, ["nll: the labels", "[3, 4, 5]", "[3]"]),
        (lambda: uncertainty(Y, "regression", weights=[1, 2]), LeafMismatchError, ["weights", "[3]", "[2]"]),
    ],
)
def test_refused(call, error, words):
    """A mistake in the call would give a number."""
    with pytest.raises(error) as err:
        call()

    assert all(word in str(err.value) for word in words), str(err.value)


def test_result_is_a_tree(generator):
    """Results could not be indexed, stacked or saved like any other tree."""
    u = uncertainty(torch.randn(3, 4, 5, 6, generator=generator), kind="classification")

    assert isinstance(u, TensorDict)
    assert u.batch_size == (4, 5)
    assert u[1:3, 0]["mean"].shape == (2, 6)
