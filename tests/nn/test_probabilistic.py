"""Distributions in trees: values, log-probabilities, and what is chosen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions as D
from torch import nn

import tdfunc as tdf
import tdfunc.nn as ours
from tdfunc import TensorDict
from tdfunc.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from tests.helpers import assert_pure, assert_trees_equal
from tests.incumbent import Incumbent, tensordict

theirs = tensordict.nn


def independent(**parameters):
    """A normal distribution of vectors."""
    return D.Independent(D.Normal(**parameters), 1)


def squashed(**parameters):
    """A distribution without a mean."""
    return D.TransformedDistribution(D.Normal(**parameters), D.TanhTransform())


# (distribution, its parameters as functions of numbers above 0)
DISTRIBUTIONS = [
    (D.Normal, {"loc": torch.log, "scale": torch.abs}),
    (independent, {"loc": torch.log, "scale": torch.abs}),
    (D.Categorical, {"logits": torch.log}),
    (D.OneHotCategorical, {"probs": torch.abs}),
    (D.Bernoulli, {"logits": torch.log}),
    (D.Gamma, {"concentration": torch.abs, "rate": torch.abs}),
    (D.LogNormal, {"loc": torch.log, "scale": torch.abs}),
    (D.Poisson, {"rate": torch.abs}),
    (squashed, {"loc": torch.log, "scale": torch.abs}),
]
KINDS = list(InteractionType)


def tree_of(parameters, size=(4,)):
    """A tree of random parameters."""
    return {key: make(torch.rand(*size, 3, dtype=torch.float64) + 0.1) for key, make in parameters.items()}


# torch has NaN for the mean of categories, which has no probability.
@pytest.mark.parametrize(
    ("distribution", "parameters", "kind"),
    [(*each, kind) for each in DISTRIBUTIONS for kind in KINDS if (each[0], kind) != (D.Categorical, "mean")],
)
def test_values_are_those_of_tensordict(distribution, parameters, kind, seed):
    """Each interaction gives the incumbent's value and log-probability, or raises where there is none."""
    data = tree_of(parameters)
    options = {
        "distribution_class": distribution, "distribution_kwargs": {"validate_args": False},
        "return_log_prob": True, "default_interaction_type": kind.value,
    }  # fmt: skip
    mine = ProbabilisticTensorDictModule(list(parameters), ["a"], **options)
    other = theirs.ProbabilisticTensorDictModule(list(parameters), ["a"], **options)
    try:
        torch.manual_seed(seed)
        expected = other(Incumbent(data, [4]))
    except NotImplementedError:
        expected = None
    # tensordict draws a mean that there is not.
    if distribution is squashed and kind in ("mean", "deterministic"):
        expected = None

    if expected is None:
        with pytest.raises(tdf.UnsupportedError, match="InteractionType"):
            mine(TensorDict(data, [4]))
        return
    torch.manual_seed(seed)
    out = mine(TensorDict(data, [4]))
    assert mine.out_keys == other.out_keys == ["a", "a_log_prob"]
    for key in mine.out_keys:
        torch.testing.assert_close(out[key], expected[key], rtol=0, atol=0, equal_nan=True)


@given(st.sampled_from(["random", "mean", "mode", "deterministic"]), st.sampled_from([(), (1,), (0,), (2, 3)]))
def test_log_prob_is_that_of_the_distribution(kind, size):
    """The written log-probability, `log_prob` and torch's own agree."""
    head = ProbabilisticTensorDictModule(
        {"loc": ("p", "m"), "scale": ("p", "s")}, ("out", "a"), distribution_class=D.Normal, return_log_prob=True
    )
    data = tree_of({"m": torch.log, "s": torch.abs}, size)
    td = assert_pure(lambda td: head(td, interaction_type=kind), TensorDict({"p": data}, size))
    found = {
        "written": td["out", "a_log_prob"],
        "log_prob": head.log_prob(td),
        "log_prob of a distribution": head.log_prob(td, dist=head.get_dist(td)),
    }

    expected = D.Normal(data["m"], data["s"]).log_prob(td["out", "a"])
    assert head.out_keys == [("out", "a"), ("out", "a_log_prob")]
    torch.testing.assert_close(found, dict.fromkeys(found, expected), rtol=0, atol=0)


def test_keys_keywords_and_arguments():
    """Keywords are the last parts of keys, or given; further arguments reach the distribution; keys may be chosen."""
    head = ProbabilisticTensorDictModule(
        [("n", "loc"), ("n", "scale")], "a", distribution_class=D.Normal, distribution_kwargs={"validate_args": False},
        return_log_prob=True, log_prob_key=("lp", "a"),
    )  # fmt: skip
    out = head(TensorDict({"n": {"loc": torch.zeros(2), "scale": torch.ones(2)}}))

    assert out.paths() == [("n", "loc"), ("n", "scale"), ("a",), ("lp", "a")]
    assert not head.get_dist(out)._validate_args
    assert head(torch.zeros(2), n_scale=torch.ones(2))[0].shape == (2,)
    assert head.select_out_keys("a")(torch.zeros(2), torch.ones(2)).shape == (2,)


def test_gradients_flow_through_samples():
    """RANDOM takes `rsample` where there is one."""
    loc = torch.zeros(3, requires_grad=True)
    head = ProbabilisticTensorDictModule(["loc", "scale"], "a", distribution_class=D.Normal)
    head(TensorDict({"loc": loc, "scale": torch.ones(3)}), interaction_type="random")["a"].sum().backward()

    assert loc.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_deterministic_sample_of_the_distribution():
    """DETERMINISTIC is the distribution's own, if it has one."""

    class Delta(D.Normal):
        deterministic_sample = property(lambda self: self.loc + 100)

    head = ProbabilisticTensorDictModule(["loc", "scale"], "a", distribution_class=Delta)

    assert head(torch.zeros(()), torch.ones(())) == 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [D.Bernoulli, lambda logits: D.Independent(D.Bernoulli(logits=logits), 1)], ids=["plain", "independent"]
)
def test_a_deterministic_sample_of_equal_values(make, dtype):
    """Where 0 and 1 of a Bernoulli are equally likely, its value is 0, as the mode of `Categorical` is the first."""
    head = ProbabilisticTensorDictModule(["logits"], ["a"], distribution_class=make, return_log_prob=True)

    out = head(TensorDict({"logits": torch.tensor([0.0, 1.0, -1.0], dtype=dtype)}))

    assert out["a"].tolist() == [0, 1, 0]
    assert out["a"].dtype == dtype
    assert out["a_log_prob"].isfinite().all()


def make_policy(nn_of, layers, **options):
    """A network, a sampled hidden value, and a categorical action."""
    return nn_of.ProbabilisticTensorDictSequential(
        nn_of.TensorDictModule(layers[0], ["x"], ["loc"]),
        nn_of.TensorDictModule(torch.exp, ["loc"], ["scale"]),
        nn_of.ProbabilisticTensorDictModule(["loc", "scale"], ["hidden"], distribution_class=D.Normal),
        nn_of.TensorDictModule(layers[1], ["hidden"], ["logits"]),
        nn_of.ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=D.Categorical, return_log_prob=True, **options
        ),
    )


@pytest.mark.parametrize("kind", ["random", "deterministic", "mode"])
def test_a_sequence(kind, seed):
    """A sequence chooses as tensordict's does under its global switch, and scores what it chose."""
    layers, x = [nn.Linear(3, 4), nn.Linear(4, 5)], torch.randn(6, 3)
    mine, other = make_policy(ours, layers), make_policy(theirs, layers)
    with theirs.set_interaction_type(kind):
        torch.manual_seed(seed)
        expected = other(Incumbent({"x": x}, [6]))
    torch.manual_seed(seed)
    out = mine(TensorDict({"x": x}, [6]), interaction_type=kind)

    torch.testing.assert_close(dict(out.items()), dict(expected.items()), rtol=0, atol=0)
    scores = [mine.log_prob(out), mine.log_prob(out, dist=mine[-1].get_dist(out)), mine[:].log_prob(out)]
    torch.testing.assert_close(scores, [expected["action_log_prob"]] * 3, rtol=0, atol=0)


def test_a_sequence_is_described():
    """Keys and state dict of a sequence are tensordict's."""
    layers = [nn.Linear(3, 4), nn.Linear(4, 5)]
    mine, other = make_policy(ours, layers), make_policy(theirs, layers)

    assert mine.in_keys == other.in_keys
    assert mine.out_keys == other.out_keys
    assert list(mine.state_dict()) == list(other.state_dict())


def test_get_dist_is_that_after_the_earlier_modules():
    """The distribution is that of the values that the earlier modules give."""
    layers, td = [nn.Linear(3, 4), nn.Linear(4, 5)], TensorDict({"x": torch.randn(6, 3)}, [6])
    policy = make_policy(ours, layers)

    torch.testing.assert_close(policy.get_dist(td).logits, D.Categorical(logits=layers[1](layers[0](td["x"]))).logits)


@pytest.mark.parametrize("wrap", [lambda policy: policy, ProbabilisticTensorDictSequential], ids=["alone", "inside"])
def test_get_dist_chooses_values_before_the_last(wrap):
    """Values of the earlier modules are chosen anew."""
    layers, td = [nn.Linear(3, 4), nn.Linear(4, 5)], TensorDict({"x": torch.randn(6, 3)}, [6])
    policy = make_policy(ours, layers)
    known = policy(td.set("hidden", torch.zeros(6, 4)), interaction_type="random")

    found = wrap(policy).get_dist(known, interaction_type="random")

    assert not torch.equal(found.logits, policy[-1].get_dist(known).logits)
    assert not torch.equal(found.logits, policy.get_dist(known).logits)


def test_each_module_has_its_own_default():
    """Without an argument each module chooses by its own default; with one, all do, however deep."""
    draw = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["a"], distribution_class=D.Normal, default_interaction_type="random"
    )
    mean = ProbabilisticTensorDictModule({"loc": "a", "scale": "scale"}, ["b"], distribution_class=D.Normal)
    seq = TensorDictSequential(TensorDictSequential(draw), {"mean": mean}["mean"])
    td = TensorDict({"loc": torch.zeros(50), "scale": torch.ones(50)})
    out, fixed = seq(td), seq(td, interaction_type=InteractionType.MEAN)

    assert out["a"].std() > 0.1
    assert torch.equal(out["b"], out["a"])
    assert fixed["a"].sum() == 0
    assert torch.equal(seq.select_out_keys("b")(td, interaction_type="mean")["b"], fixed["b"])


def test_nested_sequences_and_parts():
    """The last module may be such a sequence; a part without a distribution at its end is a plain sequence."""
    policy = make_policy(ours, [nn.Linear(3, 4), nn.Linear(4, 5)])
    outer = ProbabilisticTensorDictSequential(TensorDictModule(torch.neg, ["y"], ["x"]), policy, partial_tolerant=True)
    td = TensorDict({"y": torch.randn(6, 3)}, [6])

    torch.testing.assert_close(outer.get_dist(td).probs, policy.get_dist(outer[0](td)).probs)
    torch.testing.assert_close(outer.log_prob(outer(td).exclude("hidden")), outer(td)["action_log_prob"])
    assert type(policy[:-1]) is type(policy.select_subsequence(out_keys=["loc"])) is TensorDictSequential
    assert type(policy[2:]) is type(policy.select_subsequence(in_keys=["logits"])) is ProbabilisticTensorDictSequential
    assert outer[1:].partial_tolerant
    assert "Categorical, deterministic" in repr(policy)


def test_draws_of_a_pure_function():
    """`rng` makes a sample a function: the same for one seed, another for each member."""
    apply, params, _ = tdf.functional(make_policy(ours, [nn.Linear(3, 4), nn.Linear(4, 5)]))
    td = TensorDict({"x": torch.zeros(64, 3)}, [64])
    one, same, other = (apply(params, td, rng=seed, interaction_type="random") for seed in (0, 0, 1))
    both = tdf.Ensemble(apply)(torch.stack([params, params]), td, rng=0, interaction_type="random")

    assert_trees_equal(one, same)
    assert not torch.equal(one["hidden"], other["hidden"])
    assert both.batch_size == (2, 64)
    assert not torch.equal(both["hidden"][0], both["hidden"][1])


@pytest.mark.parametrize("cls", [D.Bernoulli, D.Categorical])
def test_a_value_of_dimensions_that_are_independent_twice_can_be_drawn(cls):
    """The mean of a Bernoulli is none of its values, and that of a Categorical is NaN."""
    module = ProbabilisticTensorDictModule(
        ["logits"],
        ["action"],
        distribution_class=lambda logits: D.Independent(D.Independent(cls(logits=logits), 1), 1),
    )
    action = module(TensorDict({"logits": torch.ones(4, 2, 3)}, [4]))["action"]

    assert set(action.flatten().tolist()) <= {0, 1}
