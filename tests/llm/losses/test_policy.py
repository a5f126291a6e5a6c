"""Policy losses against their formulas, token by token in Python's floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdfunc.llm.losses import cispo, dapo, dr_grpo, grpo, gspo, policy_gradient, reinforce_pp, rloo
from tests.llm.losses.data import average, combine, make, tokens

SEEDS = st.integers(0, 2**31)


def by_hand(s, *, ratio="token", clip=(0.2, 0.2), surrogate="clipped", normalize="token", **options):
    """The loss of streams and its metrics."""
    streams = s.log_probs, s.old, s.ref, options.get("weights", torch.ones_like(s.old)), s.entropy
    new, old, ref, weights, entropy = [x.tolist() for x in streams]
    gains = options.get("gains")
    places = tokens(s.mask)
    parts, divergences, kls, near, ratios, low, high = [], [], [], [], [], [], []
    for b, row in enumerate(places):
        gaps = {t: new[b][t] - old[b][t] for t in row}
        whole = sum(gaps.values()) / (max(len(row), 1) if ratio == "geometric" else 1)
        parts.append([])
        divergences.append([])
        for t in row:
            r = math.exp(gaps[t] if ratio == "token" else whole)
            gain = s.advantages[b].item() if gains is None else gains[b, t].item()
            bound = r if clip is None else min(max(r, 1 - clip[0]), 1 + clip[1])
            value = bound * gain * new[b][t] if surrogate == "weighted" else min(r * gain, bound * gain)
            if options.get("dual_clip") and gain < 0:
                value = max(value, options["dual_clip"] * gain)
            parts[-1].append(-value * weights[b][t])
            gap = ref[b][t] - new[b][t]
            divergence = {"k1": -gap, "k2": gap**2 / 2, "k3": math.exp(gap) - 1 - gap}[options.get("kl", "k3")]
            kls.append(divergence)
            near.append(math.exp(gaps[t]) - 1 - gaps[t])
            divergences[-1].append(divergence * (r if options.get("kl_weighted") else 1))
            ratios.append(r)
            if clip is not None:
                low.append(float(r < 1 - clip[0] and (gain < 0 or surrogate == "weighted")))
                high.append(float(r > 1 + clip[1] and (gain > 0 or surrogate == "weighted")))
    disorder = [[entropy[b][t] for t in row] for b, row in enumerate(places)]
    loss = combine(parts, normalize) + options.get("kl_coef", 0) * combine(divergences, normalize)
    metrics = {
        "policy_loss": combine(parts, normalize),
        "ess": sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios)),
        "tokens": len(ratios),
        "kl": average(kls),
        "kl_approx": average(near),
        "entropy": combine(disorder, "token"),
        "clip_ratio": {"low_mean": average(low), "high_mean": average(high), "region_mean": average(low + high) * 2},
    }
    return loss - options.get("entropy_coef", 0) * combine(disorder, normalize), metrics


def close(actual, expected):
    """Assert that a tensor is a number, to float64's precision."""
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@settings(max_examples=12)
@given(
    seed=SEEDS,
    ratio=st.sampled_from(["token", "sequence", "geometric"]),
    clip=st.sampled_from([None, (0.2, 0.2), (0.1, 0.3)]),
    surrogate=st.sampled_from(["clipped", "weighted"]),
    normalize=st.sampled_from(["token", "sequence", 7.5]),
    kl=st.sampled_from(["k1", "k2", "k3"]),
    data=st.data(),
)
def test_the_core_is_its_formula(seed, ratio, clip, surrogate, normalize, kl, data):
    """Every combination of options, with poison where the mask is False."""
    s = make(seed)
    options = {"ratio": ratio, "clip": clip, "surrogate": surrogate, "normalize": normalize}
    options |= {"kl": kl, "kl_coef": 0.3, "kl_weighted": data.draw(st.booleans()), "entropy_coef": 0.1}
    options |= {"weights": s.weights} if data.draw(st.booleans()) else {}
    options |= {"dual_clip": 1.1} if surrogate == "clipped" and data.draw(st.booleans()) else {}
    per_token = data.draw(st.booleans())
    expected, metrics = by_hand(s, **options, gains=s.gains if per_token else None)

    gains = s.gains if per_token else s.advantages
    found = policy_gradient(s.log_probs, gains, s.mask, s.old, ref_log_probs=s.ref, entropy=s.entropy, **options)

    close(found.loss, expected)
    for name in ("policy_loss", "ess", "kl", "kl_approx", "entropy"):
        close(found.metrics[name], metrics[name])
    assert found.metrics["tokens"] == metrics["tokens"]
    assert ("clip_ratio" in found.metrics) == (clip is not None)
    for name in () if clip is None else metrics["clip_ratio"]:
        close(found.metrics["clip_ratio", name], metrics["clip_ratio"][name])


PRESETS = [
    (grpo, {}, {"normalize": "sequence"}),
    (dr_grpo, {"max_length": 11}, {"normalize": 4 * 11.0}),
    (dapo, {}, {"clip": (0.2, 0.28)}),
    (gspo, {}, {"ratio": "geometric", "clip": (3e-4, 4e-4), "normalize": "sequence"}),
    (cispo, {}, {"clip": (1.0, 4.0), "surrogate": "weighted"}),
    (cispo, {"max_ratio": 1.1}, {"clip": (1.0, 0.1), "surrogate": "weighted"}),
    (rloo, {}, {"ratio": "sequence", "normalize": "sequence"}),
    (reinforce_pp, {}, {}),
    (dapo, {"normalize": 100.0, "clip": (0.1, 0.1)}, {"clip": (0.1, 0.1), "normalize": 100.0}),
]


@pytest.mark.parametrize(("preset", "options", "core"), PRESETS)
@settings(max_examples=4)
@given(seed=SEEDS)
def test_presets_are_their_formulas(preset, options, core, seed):
    """Each name of the literature, with its defaults, a penalty and weights."""
    s = make(seed)
    both = {"weights": s.weights, "kl_coef": 0.2}
    expected, _ = by_hand(s, **core, **both)

    found = preset(s.log_probs, s.advantages, s.mask, s.old, ref_log_probs=s.ref, **options, **both)

    close(found.loss, expected)


def test_gradients_flow_through_the_policy_alone():
    """Advantages, older log-probs, references and weights are constants."""
    s = make(1)
    inputs = [x.requires_grad_() for x in (s.log_probs, s.advantages, s.old, s.ref, s.weights, s.entropy)]
    options = {"ref_log_probs": s.ref, "kl_coef": 0.1, "entropy": s.entropy, "entropy_coef": 0.1, "weights": s.weights}
    loss, metrics = policy_gradient(s.log_probs, s.advantages, s.mask, s.old, **options)
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)

    assert [grad is not None for grad in grads] == [True, False, False, False, False, True]
    assert not any(leaf.requires_grad for leaf in metrics.leaves())


def test_clipped_tokens_have_no_gradient_unless_weighted():
    """PPO drops them, CISPO keeps them."""
    old, mask = torch.tensor([[-2.0, -1.0]]), torch.ones(1, 2)
    new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    clipped = torch.autograd.grad(grpo(new, torch.ones(1), mask, old).loss, new)[0]
    kept = torch.autograd.grad(cispo(new, torch.ones(1), mask, old, max_ratio=1.2).loss, new)[0]

    torch.testing.assert_close(clipped, torch.tensor([[0.0, -0.5]]))
    torch.testing.assert_close(kept, torch.tensor([[-0.6, -0.5]]))


@pytest.mark.parametrize("shift", [0.0, 1000.0], ids=["much likelier", "much less likely"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("ratio", ["token", "sequence", "geometric"])
def test_distant_policies_have_finite_losses(ratio, sign, shift):
    """A ratio of exp(1000) is limited before it overflows, and so is its gradient; and so with exp(-1000)."""
    new = torch.full((2, 3), -1.0, requires_grad=True)
    far, near = new - shift, torch.full((2, 3), -1001.0 + shift)
    loss, metrics = policy_gradient(far, torch.tensor([sign, sign]), torch.ones(2, 3), near, ratio=ratio)
    grad = torch.autograd.grad(loss, new)[0]

    assert loss.isfinite()
    assert metrics["ess"].isfinite()
    assert grad.isfinite().all()


def test_the_weighted_divergence_has_the_gradient_of_the_divergence():
    """Over all tokens of a categorical, weighted by their probabilities: k1 and k3 times the ratio, and k2, give it."""
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(6, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    exact = torch.autograd.grad((log_p.exp() * (log_p - ref)).sum(), logits, retain_graph=True)[0]

    def gradient(**options):
        loss = policy_gradient(
            log_p.unsqueeze(1), torch.zeros(6), torch.ones(6, 1), ref_log_probs=ref.unsqueeze(1), kl_coef=1.0, **options
        )
        # The mean over tokens that come up as often as their probability says.
        shares = torch.autograd.grad(loss.loss, log_p, retain_graph=True)[0] * 6 * log_p.detach().exp()
        return torch.autograd.grad(log_p, logits, shares, retain_graph=True)[0]

    torch.testing.assert_close(gradient(kl="k1", kl_weighted=True), exact)
    torch.testing.assert_close(gradient(kl="k3", kl_weighted=True), exact)
    torch.testing.assert_close(gradient(kl="k2"), exact)
    assert (gradient(kl="k3") - exact).abs().max() > 1e-2
    torch.testing.assert_close(gradient(kl="k1"), torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_narrow_clip_range_of_16_bits_is_not_rounded_away(dtype):
    """One plus a distance of GSPO is one in 16 bits."""
    s = make(3)
    low, high = (torch.tensor(x, dtype=dtype) for x in (3e-4, 4e-4))

    found = gspo(s.log_probs, s.advantages, s.mask, s.old, clip=(low, high))

    expected = gspo(s.log_probs, s.advantages, s.mask, s.old, clip=(low.item(), high.item()))
    torch.testing.assert_close(found.loss, expected.loss)
