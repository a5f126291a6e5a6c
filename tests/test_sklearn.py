"""scikit-learn's own checks, and members against plain PyTorch."""

import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

import tdfunc as tdf
from tdfunc import calibration, sweep
from tdfunc.sklearn import EnsembleClassifier, EnsembleRegressor
from tests.helpers import assert_trees_equal

X, Y = load_iris(return_X_y=True)
SMALL = {"hidden_layer_sizes": (8,), "n_estimators": 3, "max_iter": 10, "random_state": 0}


def make_net(features, outputs):
    """A network with dropout and BatchNorm."""
    return nn.Sequential(
        nn.Linear(features, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, outputs)
    )


def seed_of(random_state):
    """The seed that an estimator draws."""
    return int(np.random.RandomState(random_state).randint(2**31 - 1))


def by_hand(seed, member, rate, steps, weights=None):
    """The weights of one member after full-batch steps of torch.optim.AdamW, on inputs standardised by all examples."""

    def make():
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()

    model = make()
    tdf.init_ensemble(make, member + 1, key=seed)[member].to_module(model)
    w = torch.ones(len(X), dtype=torch.float64) if weights is None else weights
    x, t = torch.tensor((X - X.mean(0)) / X.std(0)), torch.tensor(Y)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        ((F.cross_entropy(model(x), t, reduction="none") * w).sum() / w.sum()).backward()
        optimizer.step()
    return tdf.from_module(model).detach()


@pytest.mark.slow
@pytest.mark.parametrize("cls", [EnsembleClassifier, EnsembleRegressor])
def test_estimator_checks(cls):
    """Every check of scikit-learn for estimators of this kind."""
    check_estimator(cls(hidden_layer_sizes=(16,), n_estimators=3, max_iter=40), on_skip=None)


def test_members_are_trained_as_they_would_alone():
    """Each by torch.optim.AdamW at its own learning rate."""
    rates = [0.003, 0.01, 0.1]
    model = EnsembleClassifier(**SMALL, learning_rate=rates).fit(X, Y)

    alone = [by_hand(seed_of(0), i, rate, 10) for i, rate in enumerate(rates)]
    assert model.n_iter_ == 10
    assert model.params_.batch_size == (3,)
    tdf.assert_close(model.params_, tdf.stack(alone))


def test_predictions_are_those_of_the_mixture():
    """The mean of the members' probabilities, labels as they were given, and the measures of `uncertainty`."""
    names = np.array(["setosa", "versicolor", "virginica"])
    model = EnsembleClassifier(**{**SMALL, "max_iter": 60}).fit(X, names[Y])
    x = (torch.tensor(X) - model.center_) / model.scale_
    logits = model.ensemble_(model.params_, x, buffers=model.buffers_)
    expected = tdf.metrics.uncertainty(logits, "classification")

    assert model.classes_.tolist() == names.tolist()
    np.testing.assert_allclose(model.predict_proba(X), logits.softmax(-1).mean(0).numpy())
    assert (model.predict(X) == names[model.predict_proba(X).argmax(1)]).all()
    assert model.score(X, names[Y]) > 0.8
    found = model.predict_uncertainty(X)
    assert found.keys() == set(expected.keys())
    np.testing.assert_allclose(found["mutual_information"], expected["mutual_information"].numpy())


@pytest.mark.parametrize("cls", [EnsembleClassifier, EnsembleRegressor])
def test_weights_count_examples(cls):
    """A weight of 0 leaves an example out, 2 counts it twice; the standardisation too."""
    weights = np.arange(len(X)) % 3
    weighted = cls(**SMALL).fit(X, Y, sample_weight=weights)
    repeated = cls(**SMALL).fit(X.repeat(weights, 0), Y.repeat(weights))

    np.testing.assert_allclose(weighted.predict(X), repeated.predict(X))
    tdf.assert_close(weighted.params_, repeated.params_)


@pytest.mark.slow
def test_bootstrap_is_a_weight_for_each_example():
    """Member i trains on its own sample with replacement, as with the counts as weights."""
    model = EnsembleClassifier(**SMALL, bootstrap=True).fit(X, Y)
    seed = seed_of(0)
    key = tdf.random.fold_in(tdf.random.fold_in(tdf.random.key(seed), 1), 0)
    counts = sweep.weights_of(sweep.bootstrap(key, len(X), 3), len(X)).double()
    alone = [by_hand(seed, i, 0.01, 10, counts[i]) for i in range(3)]

    assert (counts.amax(1) > 1).tolist() == [True] * 3
    tdf.assert_close(model.params_, torch.stack(alone))


@pytest.mark.slow
def test_early_stopping_keeps_the_best():
    """Members stop apart, at their best on examples that none of them trained on; the losses are of the last fit."""
    options = {**SMALL, "max_iter": 200, "n_iter_no_change": 3, "learning_rate": [0.0, 0.03, 0.1]}
    model = EnsembleClassifier(**options, early_stopping=True, validation_fraction=0.3).fit(X, Y)
    fresh = EnsembleClassifier(**{**options, "max_iter": 1}).fit(X, Y)

    assert 4 <= model.n_iter_ < 200
    assert model.validation_loss_.shape == (3,)
    assert model.validation_loss_[1:].max() < model.validation_loss_[0]
    tdf.assert_close(model.params_[0], fresh.params_[0])
    held = tdf.random.permutation(tdf.random.fold_in(tdf.random.key(seed_of(0)), 0), len(X))[:45]
    logits = model._outputs(X[held.numpy()])
    losses = [F.cross_entropy(member, torch.tensor(Y)[held]).item() for member in logits]
    np.testing.assert_allclose(losses, model.validation_loss_)
    assert model.set_params(early_stopping=False, max_iter=1).fit(X, Y).validation_loss_ is None


OWN_NET = {"make": make_net, "bootstrap": True, "max_iter": 60}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"batch_size": 32, "max_iter": 30}, {"n_estimators": 1, "max_iter": 60}, OWN_NET])
def test_options_train(options):
    """In batches, with one member, with a network of one's own; the same numbers for the same seed."""
    options = {**SMALL, **options}
    model, again = (EnsembleClassifier(**options).fit(X, Y) for _ in range(2))

    assert model.score(X, Y) > 0.9
    assert_trees_equal(model.params_, again.params_)
    assert not np.allclose(model.predict_proba(X), model.set_params(random_state=1).fit(X, Y).predict_proba(X))


def test_both_estimators_have_the_same_options():
    """With the same defaults, except for the loss."""
    assert EnsembleRegressor().get_params() == {"loss": "squared_error", **EnsembleClassifier().get_params()}


def test_fit_draws_from_its_own_seed_alone():
    """The default generator of torch is where it was, whatever the network draws when it is made."""
    before = torch.get_rng_state()
    EnsembleClassifier(**{**SMALL, "max_iter": 1}).fit(X, Y)
    EnsembleRegressor(make=make_net, n_estimators=2, max_iter=1, random_state=0).fit(X, X[:, 0])

    assert torch.equal(before, torch.get_rng_state())


class Constant(nn.Module):
    """The same value for all inputs."""

    def __init__(self, *_):
        super().__init__()
        self.value = nn.Parameter(torch.randn(1))

    def forward(self, x):
        return self.value.expand(len(x), 1)


def test_uneven_batches_count_each_example_once():
    """An epoch of 7 examples is three steps, of 3, 3 and 1, in each member's own order."""
    y = np.arange(7.0) ** 2
    model = EnsembleRegressor(make=Constant, n_estimators=2, random_state=0, batch_size=3, max_iter=1)
    values = model.fit(y[:, None], y).params_["value"]
    key = tdf.random.fold_in(tdf.random.fold_in(tdf.random.fold_in(tdf.random.key(seed_of(0)), 1), 1), 0)
    start = tdf.init_ensemble(lambda: Constant().double(), 2, key=seed_of(0))["value"]
    t = torch.tensor((y - y.mean()) / y.std())

    def train_alone(i):
        value = nn.Parameter(start[i].clone())
        optimizer = torch.optim.AdamW([value], lr=0.01, weight_decay=0.0)
        for rows in tdf.random.permutation(tdf.random.fold_in(key, i), 7).split(3):
            optimizer.zero_grad()
            (value - t[rows]).square().mean().backward()
            optimizer.step()
        return value.detach()

    torch.testing.assert_close(values, torch.stack([train_alone(i) for i in range(2)]))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["squared_error", "gaussian"])
def test_regression_in_the_units_of_the_target(loss):
    """For one target and for several; a target in other units gives the prediction in those."""
    data, y = load_diabetes(return_X_y=True)
    model = EnsembleRegressor(**SMALL, loss=loss).fit(data, y)
    other = EnsembleRegressor(**SMALL, loss=loss).fit(data, 5 - 100 * y[:, None].repeat(2, 1))
    first, second = model.predict_uncertainty(data), other.predict_uncertainty(data)

    assert model.predict(data).shape == (442,)
    assert other.predict(data).shape == (442, 2)
    assert model.score(data, y) > 0.3
    assert first.keys() == second.keys()
    out = model._outputs(data).unflatten(-1, (-1, 2 if loss == "gaussian" else 1))[..., 0]
    np.testing.assert_allclose(first["mean"], (out.mean(0)[:, 0] * y.std() + y.mean()).numpy())
    spread = out.var(0, correction=0)[:, 0] * y.std() ** 2
    np.testing.assert_allclose(first["epistemic" if loss == "gaussian" else "variance"], spread.numpy())
    if loss == "gaussian":
        np.testing.assert_allclose(first["variance"], first["aleatoric"] + first["epistemic"])
    # The columns of the second target are minus the first: the networks are others, the scale is the same.
    assert 0.2 < second["variance"].mean() / (1e4 * first["variance"].mean()) < 5


@pytest.mark.slow
def test_gaussian_finds_the_noise():
    """Where the targets are noisier the predicted noise is larger."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(400, 1))
    y = np.sin(2 * x[:, 0]) + rng.normal(size=400) * np.where(x[:, 0] > 0, 0.5, 0.05)
    model = EnsembleRegressor(loss="gaussian", n_estimators=4, hidden_layer_sizes=(32,), max_iter=150, random_state=0)
    noise = model.fit(x, y).predict_uncertainty(np.array([[-0.5], [0.5]]))["aleatoric"] ** 0.5

    assert noise == pytest.approx([0.05, 0.5], rel=0.4)


@pytest.mark.slow
def test_it_is_an_estimator_among_others():
    """In a pipeline, a grid search, a cross-validation; cloned and pickled."""
    model = EnsembleClassifier(**{**SMALL, "max_iter": 40})
    pipeline = make_pipeline(StandardScaler(), model)
    search = GridSearchCV(pipeline, {"ensembleclassifier__learning_rate": [1e-5, 0.03]}, cv=3).fit(X, Y)

    assert search.best_params_ == {"ensembleclassifier__learning_rate": 0.03}
    assert cross_val_score(pipeline, X, Y, cv=3).mean() > 0.85
    assert cross_val_score(EnsembleRegressor(**SMALL), *load_diabetes(return_X_y=True), cv=3).mean() > 0.2
    fitted = search.best_estimator_
    assert (pickle.loads(pickle.dumps(fitted)).predict_proba(X) == fitted.predict_proba(X)).all()
    assert clone(model).get_params() == model.get_params()
    assert not hasattr(clone(fitted[-1]), "params_")


@pytest.mark.slow
def test_data_keep_their_dtype_and_names():
    """float32 trains in float32; columns of a frame are remembered."""
    import pandas as pd

    frame = pd.DataFrame(X, columns=list("abcd"))
    model = EnsembleClassifier(**SMALL).fit(frame, Y)
    small = EnsembleClassifier(**SMALL).fit(X.astype(np.float32), Y)

    assert model.n_features_in_ == 4
    assert model.feature_names_in_.tolist() == list("abcd")
    assert {leaf.dtype for leaf in small.params_.leaves()} == {torch.float32}
    np.testing.assert_allclose(small.predict_proba(X), model.predict_proba(frame), atol=1e-3)


@pytest.mark.slow
def test_targets_far_from_0_keep_their_digits():
    """With inputs of float32 too: an offset of the targets is one of the predictions."""
    data = X[:, 1:].astype(np.float32)
    near, far = (EnsembleRegressor(**SMALL).fit(data, X[:, 0] + offset).predict(data) for offset in (0, 1e9))

    assert np.ptp(near) > 0.5
    np.testing.assert_allclose(far - 1e9, near, atol=1e-4)


@pytest.mark.parametrize(("scale", "offset"), [(1e25, 0.0), (1e-25, 0.0), (1500.0, 1.7e9), (0.0, 0.1)])
def test_features_of_any_size_are_standardised(scale, offset):
    """Of float32 as by scikit-learn, in float64: large, small, timestamps, and a constant."""
    data = (X * scale + offset).astype(np.float32)
    model = EnsembleClassifier(**{**SMALL, "max_iter": 1}).fit(data, Y)
    theirs = StandardScaler().fit(data.astype(np.float64))

    np.testing.assert_allclose(model.center_.numpy(), theirs.mean_)
    np.testing.assert_allclose(model.scale_.numpy(), theirs.scale_)
    scaled = torch.tensor(theirs.transform(data.astype(np.float64)), dtype=torch.float32)
    expected = model.ensemble_(model.params_, scaled, buffers=model.buffers_)
    torch.testing.assert_close(model._outputs(data), expected)


@pytest.mark.slow
def test_intervals_of_predictions_cover():
    """The standard deviation is a scale of conformal intervals, by arrays alone."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(900, 1))
    y = np.sin(3 * x[:, 0]) + 0.2 * rng.normal(size=900)
    model = EnsembleRegressor(**SMALL, loss="gaussian").fit(x[:300], y[:300])
    (held, held_std), (mean, std) = (model.predict(part, return_std=True) for part in (x[300:600], x[600:]))
    threshold = calibration.conformal_threshold(calibration.regression_scores(held, y[300:600], scale=held_std), 0.1)
    low, high = calibration.regression_intervals(mean, threshold, scale=std)

    np.testing.assert_allclose(std**2, model.predict_uncertainty(x[600:])["variance"])
    assert 0.84 < ((low.numpy() <= y[600:]) & (y[600:] <= high.numpy())).mean() < 0.96


@pytest.mark.parametrize("outputs", [1, 2, 5])
def test_a_network_has_the_outputs_that_it_is_made_for(outputs):
    """Another number of classes or targets is refused, also where torch would broadcast or index it."""
    options = {**SMALL, "make": lambda features, _: nn.Linear(features, outputs)}
    pattern = rf"(?s)make: the network does not have the outputs.*\[N, {{}}\].*\[1, {outputs}\]"

    with pytest.raises(tdf.LeafMismatchError, match=pattern.format(3)):
        EnsembleClassifier(**options).fit(X, Y)
    with pytest.raises(tdf.LeafMismatchError, match=pattern.format(4)):
        EnsembleRegressor(**options).fit(X, X)
    with pytest.raises(tdf.LeafMismatchError, match=pattern.format(8)):
        EnsembleRegressor(**options, loss="gaussian").fit(X, X)


MESSAGES = [
    (EnsembleClassifier, {"learning_rate": [0.1, 0.2]},
     r"lr does not have one value for each member.*\[3\].*\[2\]"),
    (EnsembleClassifier, {"n_estimators": 0}, "n_estimators must be at least 1.*0"),
    (EnsembleClassifier, {"batch_size": 0}, "batch_size must be at least 1.*0"),
    *[(EnsembleClassifier, {"early_stopping": True, "validation_fraction": share},
       "one of the two parts has no example; .*n_samples = 150") for share in (0.0, 0.999, 1.0)],
    *[(EnsembleClassifier, {"early_stopping": True, "validation_fraction": share},
       "one of the two parts has no weight") for share in (0.01, 0.99)],
    (EnsembleRegressor, {"loss": "x"}, "loss must be one of 'squared_error', 'gaussian'.*'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "options", "pattern"), MESSAGES)
def test_messages(cls, options, pattern):
    """Each refusal names the option; without an example of a weight above 0 held out no member could improve."""
    with pytest.raises(ValueError, match=f"(?s){pattern}"):
        cls(**{**SMALL, **options}).fit(X, Y, sample_weight=np.arange(150) == 3)


def test_progress_is_shown(terminal):
    """`progress=True` counts epochs."""
    EnsembleClassifier(**SMALL, progress=True).fit(X, Y)

    assert "10/10" in terminal.readouterr().err


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (EnsembleClassifier, {"learning_rate": [0.01, 1e12, 0.01], "hidden_layer_sizes": (8, 8, 8)}),
        (
            EnsembleClassifier,
            {"learning_rate": [0.01, 1e12, 0.01], "early_stopping": True, "hidden_layer_sizes": (8, 8, 8)},
        ),
        (EnsembleRegressor, {"learning_rate": [0.01, 30.0, 0.01], "loss": "gaussian", "max_iter": 60}),
    ],
)
def test_a_member_that_diverges_is_named(cls, options):
    """Its NaN would be each prediction of the ensemble, and the most probable class the first."""
    x = X.astype(np.float32)
    model = cls(**{**SMALL, **options})
    with pytest.raises(ValueError, match=r"have diverged: \[1\] of 3"):
        model.fit(x, Y)


def test_a_buffer_with_infinities_has_not_diverged():
    """Such as the mask of an attention."""

    def make(features, outputs):
        net = nn.Linear(features, outputs)
        net.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        return net

    model = EnsembleClassifier(**{**SMALL, "make": make}).fit(X, Y)
    assert np.isfinite(model.predict_proba(X)).all()


@pytest.mark.parametrize("options", [{}, {"early_stopping": True}, {"bootstrap": True}, {"learning_rate": [0.1, 0.01]}])
def test_frozen_layers_are_not_trained(options):
    """A layer of `make=` that does not require grad keeps its numbers, weight decay included."""
    trunk = nn.Linear(4, 8).double().requires_grad_(False)

    def make(_, outputs):
        return nn.Sequential(trunk, nn.Tanh(), nn.Linear(8, outputs))

    before = trunk.weight.clone()
    model = EnsembleClassifier(make=make, n_estimators=2, max_iter=3, random_state=0, weight_decay=0.1, **options)
    assert torch.equal(model.fit(X, Y).params_["0", "weight"], before.expand(2, -1, -1))
