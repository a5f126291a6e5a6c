"""Uncertainty and scores against their definitions, written out in float64 numpy."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


@given(logits, st.integers(1, 5), st.integers(1, 4), st.integers(2, 6), st.floats(0.01, 2000), st.booleans())
def test_classification_by_hand(rng, members, batch, classes, scale, weighted):
    """Each measure is the one of its definition, also where probabilities underflow."""
    y = rng.normal(size=(members, batch, classes)) * scale
    weights = rng.uniform(0.1, 5, size=members) if weighted else np.ones(members)

    found = uncertainty(
        torch.as_tensor(y), kind="classification", weights=torch.as_tensor(weights) if weighted else None
    )

    assert found.batch_size == (batch,)
    torch.testing.assert_close(dict(found.items()), dict(by_hand(y, weights / weights.sum())), rtol=1e-9, atol=1e-10)


@given(logits, st.integers(1, 5), st.floats(0.01, 200))
def test_ranges_of_classification(rng, members, scale):
    """Measures are a tree of the batch, stay in their ranges and add up."""
    y = torch.as_tensor(rng.normal(size=(members, 3, 2, 4)) * scale, dtype=torch.float32)
    u = uncertainty(y, kind="classification")
    bounds = {"mutual_information": np.log(members) + 1e-5, "entropy": np.log(4) + 1e-5,
              "variation_ratio": 1 - 1 / members + 1e-6}  # fmt: skip

    assert type(u) is TensorDict
    assert u.batch_size == (3, 2)
    torch.testing.assert_close(u["mean"].sum(-1), torch.ones(3, 2))
    assert (u["mutual_information"] >= 0).all()
    assert [key for key, bound in bounds.items() if not (u[key] <= bound).all()] == []
    torch.testing.assert_close(u["entropy"], u["expected_entropy"] + u["mutual_information"], rtol=1e-4, atol=1e-5)


@given(logits, st.integers(1, 5), st.floats(0.01, 200))
def test_invariances_of_classification(rng, members, scale):
    """Measures do not depend on the order of members or on a shift of the logits."""
    y = torch.as_tensor(rng.normal(size=(members, 3, 2, 4)) * scale, dtype=torch.float32)
    u = uncertainty(y, kind="classification")

    assert_trees_equal(uncertainty(y.flip(0), kind="classification"), u, rtol=1e-4, atol=1e-6)
    assert_trees_equal(uncertainty(y + 50, kind="classification"), u, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("difference", "dtype", "rtol"), [(1e-4, torch.float32, 0.1), (0.06, torch.float64, 1e-12)], ids=str
)
def test_small_mutual_information_survives(difference, dtype, rtol):
    """Mutual information is right where `entropy - expected_entropy` cancels, to 0 in float32."""
    y = torch.tensor([[[2.0, 0.0]], [[2.0 + difference, 0.0]]], dtype=dtype)
    found = uncertainty(y, kind="classification")["mutual_information"]

    q = softmax(y.numpy().astype(np.longdouble))
    np.testing.assert_allclose(found.numpy(), (q * np.log(q / q.mean(0))).sum(-1).mean(0), rtol=rtol)


def test_identical_members_share_everything():
    """An ensemble of one opinion is certain, whatever the rounding."""
    y = torch.randn(1, 50, 10).expand(7, 50, 10)

    u = uncertainty(y, kind="classification")

    assert (u["mutual_information"] < 1e-12).all()
    assert (u["disagreement"] < 1e-6).all()


@pytest.fixture
def masked(generator):
    """Logits of five classes, and the same with a sixth of -inf."""
    y = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    return y, torch.cat([y, torch.full((3, 4, 1), -torch.inf, dtype=torch.float64)], -1)


def test_masked_classes_are_probability_zero(masked):
    """A class with a logit of -inf adds nothing to entropies."""
    part, full = [uncertainty(x, kind="classification") for x in masked]
    keys = ("entropy", "expected_entropy", "mutual_information", "disagreement")

    torch.testing.assert_close({key: full[key] for key in keys}, {key: part[key] for key in keys})


def test_masked_classes_have_no_gradient(masked):
    """A class with a logit of -inf adds nothing to the gradients of entropies."""
    total = lambda x: sum(uncertainty(x, kind="classification")[key].sum() for key in ("entropy", "mutual_information"))  # noqa: E731
    part, full = [torch.func.grad(total)(x)[..., :5] for x in masked]

    torch.testing.assert_close(full, part)


def test_weight_zero_leaves_the_member_out(generator):
    """A member without weight counts nothing, also where it is certain of a class that is impossible to the others."""
    y = torch.randn(3, 4, 5, generator=generator)
    y[1] = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf, -torch.inf])
    y[[0, 2], 0, 0] = -torch.inf

    u = uncertainty(y, kind="classification", weights=torch.tensor([1.0, 0.0, 3.0]))

    rest = uncertainty(y[[0, 2]], kind="classification", weights=torch.tensor([1.0, 3.0]))
    assert_trees_equal(u, rest, rtol=1e-5, atol=1e-6)


def test_nan_spreads_to_its_input_only(generator):
    """A broken output makes all measures of its input nan, and of no other."""
    y = torch.randn(3, 4, 5, generator=generator)
    bad = y.clone()
    bad[1, 2, 0] = torch.nan

    u, expected = uncertainty(bad, kind="classification"), uncertainty(y, kind="classification")

    others = torch.tensor([0, 1, 3])
    assert all(leaf[2].isnan().all() for leaf in u.values())
    assert_trees_equal(u[others], expected[others])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("place", ["largest", "smallest"])
@pytest.mark.parametrize("form", ["tensor", "list"])
def test_weights_at_the_ends_of_their_dtype(dtype, place, form, generator):
    """Weights are in any scale: their sum may lie beyond their dtype, and they beyond that of the outputs."""
    y = torch.randn(3, 4, 5, generator=generator)
    info = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype)
    end = {"largest": info.max, "smallest": getattr(info, "smallest_normal", 1)}[place]
    weights = {"tensor": torch.full((3,), end, dtype=dtype), "list": [end] * 3}[form]
    t = torch.zeros(4, dtype=torch.int64)

    assert_trees_equal(uncertainty(y, "classification", weights=weights), uncertainty(y, "classification"))
    assert nll(y, t, weights=weights) == nll(y, t)


@given(logits, st.integers(1, 5), st.lists(st.integers(1, 3), max_size=2), st.booleans())
def test_regression_and_gaussian_by_hand(rng, members, batch, weighted):
    """Mean and variance are those of the mixture of the members, by their weights."""
    y = rng.normal(size=(members, *batch, 2)) * 3 + 100
    y[..., 1] -= 100
    weights = rng.uniform(0.1, 5, size=members) if weighted else np.ones(members)
    regression = uncertainty(torch.as_tensor(y), "regression", weights=weights.tolist())
    gaussian = uncertainty(torch.as_tensor(y), "gaussian", weights=weights.tolist())

    average = lambda x: torch.as_tensor(np.average(x, axis=0, weights=weights))  # noqa: E731
    mean = average(y)
    variance = average((y - mean.numpy()) ** 2)
    aleatoric = average(np.exp(y[..., 1]))
    epistemic = variance[..., 0]
    parts = {"aleatoric": aleatoric, "epistemic": epistemic}
    mixture = {"mean": mean[..., 0], "variance": aleatoric + epistemic, **parts}
    assert regression.batch_size == torch.Size(batch[:1] or [2])
    assert gaussian.batch_size == torch.Size(batch)
    torch.testing.assert_close(dict(regression.items()), {"mean": mean, "variance": variance}, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dict(gaussian.items()), mixture, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_widened(dtype, generator):
    """Outputs of 16 bits give measures in float32."""
    y = torch.randn(3, 4, 5, generator=generator).to(dtype)

    u = uncertainty(y, kind="classification")

    assert u["entropy"].dtype is torch.float32
    assert_trees_equal(u, uncertainty(y.float(), kind="classification"))


@pytest.mark.parametrize("wrap", [torch.vmap, jit], ids=["vmap", "jit"])
@pytest.mark.parametrize("kind", ["classification", "regression", "gaussian"])
def test_in_transforms(wrap, kind, generator):
    """Measures inside vmap and in a trace are those outside."""
    y = torch.randn(6, 3, 4, 2, generator=generator)
    one = lambda x: uncertainty(x, kind, weights=torch.arange(1, 4).to(x))  # noqa: E731

    run = wrap(one)
    found = run(y) if wrap is torch.vmap else torch.stack([run(x) for x in y])

    assert_trees_equal(found, torch.stack([assert_pure(one, x) for x in y]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("measure", ["mean", "entropy", "expected_entropy", "mutual_information", "variance"])
def test_gradients(measure, generator):
    """The derivative of each measure is that of finite differences."""
    y = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda x: uncertainty(x, "classification")[measure], (y,))


# -- scores -----------------------------------------------------------------------------------------------------


def labelled(generator, members=3, batch=200, classes=5):
    """Return logits of all members, and labels."""
    y = torch.randn(members, batch, classes, generator=generator, dtype=torch.float64) * 2
    t = torch.randint(classes, (batch,), generator=generator)
    return y, t


def curve_by_hand(p, t, bins):
    """Of each bin its bounds, the number of examples, their mean confidence and accuracy; and the calibration error."""
    confidence, right = p.max(-1), p.argmax(-1) == t
    rows, error = [], 0.0
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        means = (confidence[inside].mean(), right[inside].mean()) if inside.any() else (np.nan, np.nan)
        error += inside.mean() * abs(means[0] - means[1]) if inside.any() else 0.0
        rows.append((b / bins, (b + 1) / bins, inside.sum(), *means))
    return np.array(rows, dtype=np.float64), error


@given(logits, st.integers(0, 4), st.lists(st.integers(1, 6), max_size=2), st.integers(1, 6), st.integers(1, 20))
def test_scores_by_hand(rng, members, batch, classes, bins):
    """Scores are those of the mixture of the members (of one model, without them), by their definitions."""
    y = rng.normal(size=(max(members, 1), *batch, classes)) * 2
    t = rng.integers(classes, size=batch)
    weights = rng.uniform(0.1, 5, size=members) if members else None
    given = (torch.as_tensor(y if members else y[0]), torch.as_tensor(t))

    p = np.average(softmax(y), axis=0, weights=weights).reshape(-1, classes)
    t = t.reshape(-1)
    rows, error = curve_by_hand(p, t, bins)
    scores = {"nll": nll, "brier": brier, "ece": partial(ece, bins=bins)}
    found = {name: score(*given, weights=weights).item() for name, score in scores.items()}
    expected = {
        "nll": -np.log(p[np.arange(t.size), t]).mean(),
        "brier": ((p - np.eye(classes)[t]) ** 2).sum(-1).mean(),
        "ece": error,
    }
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    curve = reliability_curve(*given, bins=bins, weights=weights)
    columns = np.stack([curve[key].numpy() for key in ("lower", "upper", "count", "confidence", "accuracy")], -1)
    np.testing.assert_allclose(columns, rows, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_narrow_integers(dtype, generator):
    """Labels of any integer dtype name the same classes, also where there are more classes than it can count."""
    y, t = labelled(generator, classes=300)
    t = t.clamp(max=100)

    torch.testing.assert_close(nll(y, t.to(dtype)), nll(y, t))


@pytest.mark.slow
def test_counts_are_whole_numbers():
    """More predictions than float32 counts one by one fall into a bin, each of them counted."""
    n = 2**24 + 3
    curve = reliability_curve(torch.zeros(1, 1).expand(n, 1), torch.zeros(1, dtype=torch.int8).expand(n), bins=1)

    assert curve["count"].dtype == torch.int64
    assert curve["count"].tolist() == [n]


@pytest.mark.parametrize("score", [nll, brier, ece])
def test_scores_in_transforms(score, generator):
    """A score by vmap or in a trace is that of each member."""
    y, t = labelled(generator)

    each = torch.vmap(score, in_dims=(0, None))(y, t)

    torch.testing.assert_close(each, torch.stack([score(x, t) for x in y]))
    torch.testing.assert_close(jit(score)(y, t), score(y, t))


@pytest.mark.parametrize("score", [nll, brier, ece])
def test_scores_of_nan_are_nan(score, generator):
    """The score of a diverged model is nan."""
    y, t = labelled(generator)
    y[0, 3] = torch.nan

    assert score(y, t).isnan()


Y = torch.zeros(3, 4, 5)
T = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: uncertainty(Y, kind="poisson"), ValueError, ["kind", "'regression'", "'poisson'"]),
        (lambda: uncertainty(Y.long(), kind="classification"), LeafMismatchError, ["floating", "int64"]),
        (lambda: uncertainty(Y[0, 0], kind="classification"), LeafMismatchError, ["2 or more", "[5]"]),
        (lambda: uncertainty(Y[0, 0, 0], kind="regression"), LeafMismatchError, ["1 or more", "[]"]),
        (lambda: uncertainty(Y[:0], kind="classification"), LeafMismatchError, ["not empty", "[0, 4, 5]"]),
        (lambda: nll(Y[:0], T), LeafMismatchError, ["nll: y is not", "not empty", "[0, 4, 5]"]),
        (lambda: uncertainty(Y, kind="gaussian"), LeafMismatchError, ["(E, ..., 2)", "[3, 4, 5]"]),
        (lambda: uncertainty(Y, kind="regression", weights=torch.ones(4)), LeafMismatchError, ["[3]", "[4]"]),
        (lambda: uncertainty(Y, kind="regression", weights=torch.tensor([1.0, -1.0, 1.0])),
         ValueError, [">= 0", "-1.0"]),
        (lambda: uncertainty(Y, kind="regression", weights=torch.zeros(3)),
         ValueError, ["not all 0", "[0.0, 0.0, 0.0]"]),
        (lambda: uncertainty(Y, kind="regression", weights=torch.tensor([1.0, torch.nan, 1.0])),
         ValueError, ["finite", "nan"]),
        (lambda: nll(Y, T[:3]), LeafMismatchError, ["[3, 4, 5]", "[3]"]),
        (lambda: brier(Y, T.float()), LeafMismatchError, ["integers", "float32"]),
        (lambda: nll(Y[0], T, weights=torch.ones(3)), LeafMismatchError, ["(E, *[4], C)", "[4, 5]"]),
        (lambda: ece(Y, T + 5), ValueError, ["0 <= t < 5", "5 to 5"]),
        (lambda: ece(Y[:, :0], T[:0]), ValueError, ["there are no labels", "[0]"]),
        (lambda: reliability_curve(Y, T, bins=0), ValueError, ["bins must be at least 1", "0"]),
        (lambda: nll(Y, [0, 1, 2]), LeafMismatchError, ["nll: the labels", "[3, 4, 5]", "[3]"]),
        (lambda: uncertainty(Y, "regression", weights=[1, 2]), LeafMismatchError, ["weights", "[3]", "[2]"]),
    ],
)  # fmt: skip
def test_refused(call, error, words):
    """Each mistake is the error of its class, with the values that do not fit."""
    with pytest.raises(error) as err:
        call()

    assert all(word in str(err.value) for word in words), str(err.value)


@pytest.mark.parametrize("kind", ["regression", "gaussian"])
@pytest.mark.parametrize(("center", "spread"), [(0.0, 1.0), (1e3, 1e-2), (1e6, 1.0), (-1e7, 4.0)])
def test_the_variance_of_values_far_from_0_is_that_of_float64(kind, center, spread, generator):
    """It is that of the same numbers: the rounding of the mean would be a part of it."""
    values = (center + spread * torch.randn(300, 20, dtype=torch.float64, generator=generator)).float()
    name = {"regression": "variance", "gaussian": "epistemic"}[kind]
    outputs = values if kind == "regression" else torch.stack([values, torch.zeros_like(values)], -1)
    found = uncertainty(outputs, kind)

    torch.testing.assert_close(found[name].double(), values.double().var(0, correction=0), rtol=1e-5, atol=0)
    torch.testing.assert_close(found["mean"], values.double().mean(0).float(), rtol=2e-7, atol=1e-7)


def test_the_mean_of_an_infinite_prediction_is_infinite():
    """As of its formula."""
    found = uncertainty(torch.tensor([[1.0, 2.0], [torch.inf, 4.0]]), "regression")

    assert found["mean"].tolist() == [torch.inf, 3.0]
    assert found["variance"][1] == 1.0
