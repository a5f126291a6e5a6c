"""Preference losses against their formulas, pair by pair in Python's floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdfunc.llm.losses import dpo, ipo, kto, kto_baseline, orpo, simpo
from tests.llm.losses.data import average, make, tokens
from tests.llm.losses.test_policy import SEEDS, close

BETAS = st.fixed_dictionaries({}, optional={"beta": st.floats(0.05, 2)})
OPTIONS = st.fixed_dictionaries({}, optional={"beta": st.floats(0.05, 2), "average": st.booleans()})


def log_sigmoid(x):
    """The log of 1 / (1 + exp(-x))."""
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def row_values(values, mask, *, mean):
    """The sum or the mean over the tokens of each row of (rows, T)."""
    lists = [[values[b, t].item() for t in row] for b, row in enumerate(tokens(mask))]
    return [average(row) if mean else sum(row) for row in lists]


def by_hand(s, pair_loss, *, reference, mean, scale):
    """The loss of pairs (B, 2, T), an empty row makes its pair 0; and its metrics."""
    losses, counted = [], []
    for b in range(s.mask.shape[0]):
        own = row_values(s.log_probs[b], s.mask[b], mean=mean)
        ref = row_values(s.ref[b], s.mask[b], mean=mean) if reference else [0.0, 0.0]
        scores = [x - y for x, y in zip(own, ref, strict=True)]
        full = bool(s.mask[b].any(-1).all())
        losses.append(pair_loss(*scores) if full else 0.0)
        counted += [(scale * scores[0], scale * scores[1], *own)] if full else []
    rewards = {
        "chosen": average([row[0] for row in counted]),
        "rejected": average([row[1] for row in counted]),
        "margins": average([row[0] - row[1] for row in counted]),
        "accuracies": average([float(row[0] > row[1]) for row in counted]),
    }
    logps = {"chosen": average([row[2] for row in counted]), "rejected": average([row[3] for row in counted])}
    return average(losses), {"rewards": rewards, "logps": logps}


def check(found, expected, metrics):
    """Assert that a loss and its metrics are these numbers."""
    close(found.loss, expected)
    for group, numbers in metrics.items():
        for name, number in numbers.items():
            close(found.metrics[group, name], number)


def pairs(seed):
    """Five pairs, of which one has an empty row and one has two."""
    s = make(seed, rows=2, width=5, lead=(5,))
    s.mask[:3, 1, 2] = True
    s.mask[4] = False
    clean = make(seed + 1, rows=2, width=5, lead=(5,))
    for name in ("log_probs", "ref"):
        values = getattr(s, name)
        values[:3, 1, 2] = -0.1 - clean.advantages[:3, 1].abs()
    return s


@settings(max_examples=8)
@given(seed=SEEDS, options=OPTIONS, smooth=st.sampled_from([{}, {"label_smoothing": 0.1}]))
def test_dpo_and_ipo_are_their_formulas(seed, options, smooth):
    """With and without label smoothing and lengths."""
    s, beta, smoothing = pairs(seed), options.get("beta", 0.1), smooth.get("label_smoothing", 0.0)

    def sigmoid(chosen, rejected):
        gap = beta * (chosen - rejected)
        return -(1 - smoothing) * log_sigmoid(gap) - smoothing * log_sigmoid(-gap)

    expected = by_hand(s, sigmoid, reference=True, mean=options.get("average", False), scale=beta)
    check(dpo(s.log_probs, s.ref, s.mask, **options, **smooth), *expected)
    mean = options.get("average", True)
    expected = by_hand(s, lambda c, r: (c - r - 1 / (2 * beta)) ** 2, reference=True, mean=mean, scale=beta)
    check(ipo(s.log_probs, s.ref, s.mask, **options), *expected)


@settings(max_examples=8)
@given(seed=SEEDS, betas=BETAS, gammas=st.sampled_from([{}, {"gamma": 0.3}]))
def test_simpo_and_orpo_are_their_formulas(seed, betas, gammas):
    """Losses without a reference, of mean log-probs."""
    s, beta, gamma = pairs(seed), betas.get("beta", 2.0), gammas.get("gamma", 1.0)
    expected = by_hand(s, lambda c, r: -log_sigmoid(beta * (c - r) - gamma), reference=False, mean=True, scale=beta)
    check(simpo(s.log_probs, s.mask, **betas, **gammas), *expected)
    beta = betas.get("beta", 0.1)

    def odds(mean):
        return math.log(math.exp(mean) / (1 - math.exp(mean)))

    options = {"reference": False, "mean": True, "scale": beta}
    loss, metrics = by_hand(s, lambda c, r: -beta * log_sigmoid(odds(c) - odds(r)), **options)
    chosen = [s.log_probs[b, 0, t].item() for b, row in enumerate(tokens(s.mask[:, 0])) for t in row]
    found = orpo(s.log_probs, s.mask, **betas)
    check(found, loss - average(chosen), metrics)
    close(found.metrics["nll"], -average(chosen))
    ratios, _ = by_hand(s, lambda c, r: odds(c) - odds(r), **options)
    close(found.metrics["log_odds"], ratios)


@settings(max_examples=8)
@given(seed=SEEDS, betas=BETAS, weights=st.sampled_from([{}, {"desirable_weight": 2.0, "undesirable_weight": 0.5}]))
def test_kto_is_its_formula(seed, betas, weights):
    """Rows with labels, weights, and a baseline from other rows."""
    s, others, beta = make(seed), make(seed + 1), betas.get("beta", 0.1)
    factors = weights.get("undesirable_weight", 1.0), weights.get("desirable_weight", 1.0)
    above, below = (row_values(x, others.mask, mean=False) for x in (others.log_probs, others.ref))
    gaps = [x - y for x, y in zip(above, below, strict=True)]
    baseline = kto_baseline(others.log_probs, others.ref, others.mask)
    z = max(average(gaps), 0.0)
    close(baseline, z)
    losses = []
    own, ref = (row_values(x, s.mask, mean=False) for x in (s.log_probs, s.ref))
    for b, wanted in enumerate(s.desirable.tolist()):
        gap = own[b] - ref[b]
        x = beta * (gap - z if wanted else z - gap)
        losses.append(factors[wanted] * (1 - 1 / (1 + math.exp(-x))) if s.mask[b].any() else 0.0)

    found = kto(s.log_probs, s.ref, s.mask, s.desirable, baseline=baseline, **betas, **weights)

    close(found.loss, average(losses))
    for kind, wanted in (("chosen", True), ("rejected", False)):
        rows = [b for b, label in enumerate(s.desirable.tolist()) if label is wanted and s.mask[b].any()]
        close(found.metrics["rewards", kind], average([beta * (own[b] - ref[b]) for b in rows]))
        close(found.metrics["logps", kind], average([own[b] for b in rows]))


def test_a_baseline_is_constant_and_never_negative():
    """No gradient flows through it, into it or through a loss."""
    low = torch.full((2, 3), -3.0, requires_grad=True)
    high, mask = torch.full((2, 3), -1.0), torch.ones(2, 3)

    assert kto_baseline(low, high, mask) == 0
    assert not kto_baseline(low, high, mask).requires_grad
    grad = torch.autograd.grad(kto(low, high, mask, torch.ones(2), baseline=low.sum()).loss, low)[0]
    expected = torch.autograd.grad(kto(low, high, mask, torch.ones(2), baseline=-18.0).loss, low)[0]
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("part", [..., 0], ids=["pairs", "one pair"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_responses_have_finite_odds(dtype, part):
    """A response of probability 1, as overfitted models have it, and one of probability 0; in pairs, and in one."""
    log_probs = torch.tensor([[[0.0, 0.0], [-200.0, -200.0]], [[-200.0, -200.0], [0.0, 0.0]]], dtype=dtype)[part]
    log_probs.requires_grad_()
    loss = orpo(log_probs, torch.ones_like(log_probs)).loss

    assert loss.isfinite()
    assert torch.autograd.grad(loss, log_probs)[0].isfinite().all()


PAIRED = {
    "dpo": lambda x, mask: dpo(x, torch.zeros_like(x), mask),
    "ipo": lambda x, mask: ipo(x, torch.zeros_like(x), mask),
    "simpo": simpo,
    "orpo": orpo,
}


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_pair_with_an_empty_row_is_not_read(name, value):
    """Whatever its other row has: neither loss nor gradient is 0 times an infinity."""
    x = torch.tensor([[[-1.0, -2.0], [value, -1.0]], [[-1.0, -2.0], [-3.0, -1.0]]], requires_grad=True)
    mask = torch.tensor([[[False, False], [True, True]], [[True, True], [True, True]]])
    found = PAIRED[name](x, mask)

    (slope,) = torch.autograd.grad(found.loss, x)

    finite = x.detach().nan_to_num(-5.0, neginf=-5.0).requires_grad_()
    expected = PAIRED[name](finite, mask)
    (wanted,) = torch.autograd.grad(expected.loss, finite)
    torch.testing.assert_close((found.loss, slope), (expected.loss, wanted))


@pytest.mark.parametrize("kind", ["chosen", "rejected"])
def test_metrics_of_kto_are_of_their_own_rows(kind):
    """An infinity among the rows of the other kind does not reach them."""
    is_chosen = kind == "chosen"
    x = torch.tensor([[-math.inf, -1.0], [-1.0, -2.0]])

    found = kto(x, torch.zeros_like(x), torch.ones(2, 2), torch.tensor([not is_chosen, is_chosen]))

    assert found.metrics["logps", kind].item() == -3.0
