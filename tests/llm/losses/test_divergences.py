"""Estimates of a divergence from log-probs that are near, equal and far apart; `test_policy.py` has the formulas."""

import pytest
import torch

from tdfunc.llm import losses
from tdfunc.llm.losses.divergences import k1, k2, k3
from tests.llm.losses.test_transforms import ALL, EACH, gradient, streams

pytestmark = pytest.mark.sample(3)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# log q - log p, in nats.
GAPS = [0.0, 1e-6, 1e-4, 1e-2, 0.029, 0.031, 0.5, 5.0, 19.0]
each_gap = pytest.mark.parametrize("gap", [sign * gap for gap in GAPS for sign in (1, -1)])
FAR = [21.0, 30.0, 89.0, 100.0, 1e4, 6e4]


def in_float64(gap):
    """The three formulas of a gap, and their derivatives by log p."""
    value = torch.tensor(gap, dtype=torch.float64)
    # The differences of the third cancel in float64, too, where the gap is small.
    if abs(gap) < 1e-3:
        third = value.square() / 2 + value.pow(3) / 6
        slope = -(value + value.square() / 2)
    else:
        third = value.expm1() - value
        slope = -value.expm1()
    return {"k1": (-value, torch.ones_like(value)), "k2": (value.square() / 2, -value), "k3": (third, slope)}


@each_dtype
@each_gap
@pytest.mark.parametrize("estimate", [k1, k2, k3])
def test_estimates_follow_their_formulas(estimate, gap, dtype):
    """Values and derivatives keep their digits where p and q are equal, nearly equal and far apart."""
    log_p = torch.zeros((), dtype=dtype, requires_grad=True)
    log_q = torch.tensor(gap, dtype=dtype)

    value = estimate(log_p, log_q)
    (slope,) = torch.autograd.grad(value, log_p)

    expected, derivative = in_float64(log_q.item())[estimate.__name__]
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(slope, derivative.to(dtype), rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize("gap", FAR)
@each_dtype
def test_k3_stays_finite_and_draws_together(gap, dtype):
    """Past the limit of ratios it grows along a line: finite, with a derivative that raises p."""
    log_p = torch.tensor(-gap, dtype=dtype, requires_grad=True)
    value = k3(log_p, torch.zeros((), dtype=dtype))

    # In float32, as a loss of 16-bit log-probs is.
    (slope,) = torch.autograd.grad(value, log_p) if dtype in (torch.float32, torch.float64) else (-value,)

    assert value.isfinite()
    assert slope.isfinite()
    assert slope < -1e8


@pytest.mark.parametrize("gap", [-30.0, -5.0, -0.5, 0.0, 1e-3, 0.5, 0.99, 1.01, 5.0, 19.0, 30.0, 89.0, 1e4])
@pytest.mark.parametrize("ratio", [-3.0, 0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_weighted_penalty_has_its_derivative(gap, ratio, dtype):
    """The derivative of ratio times k3 by log p is minus the ratio times log(q / p), of which no digits are lost."""
    old = torch.tensor([[-7.0 - ratio]], dtype=dtype)
    log_probs = torch.tensor([[-7.0]], dtype=dtype, requires_grad=True)
    options = {"ref_log_probs": log_probs.detach() + gap, "kl_coef": 1.0, "kl_weighted": True, "clip": None}

    loss, _ = losses.policy_gradient(log_probs, torch.zeros(1, dtype=dtype), torch.ones(1, 1), old, **options)
    (slope,) = torch.autograd.grad(loss, log_probs)

    expected = -torch.tensor(ratio, dtype=dtype).exp() * gap
    torch.testing.assert_close(slope.squeeze(), expected, rtol=1e-4, atol=1e-6)
    assert loss.isfinite()


def test_the_weighted_penalty_is_the_product():
    """On both sides of the place where it is written in another way it is ratio times k3."""
    gap = torch.linspace(-4, 4, 201, dtype=torch.float64)
    log_probs = torch.zeros(201, 1, dtype=torch.float64)
    options = {"ref_log_probs": gap.unsqueeze(-1), "kl_coef": 1.0, "kl_weighted": True, "normalize": "token"}

    loss, metrics = losses.policy_gradient(
        log_probs, torch.zeros(201), torch.ones(201, 1), log_probs - 1.0, clip=None, **options
    )

    torch.testing.assert_close(loss, metrics["kl"] * torch.tensor(1.0).double().exp())


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ratio", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("gap", [-1e4, -100.0, -30.0, 0.0, 30.0, 100.0, 1e4])
def test_penalties_stay_finite(kl, weighted, ratio, gap):
    """Whatever the distance of a token from the reference or the older policy, all numbers are finite."""
    log_probs = torch.tensor([[-1.0, -1.0 - gap]], requires_grad=True)
    near = torch.full((1, 2), -1.0)
    options = {"ref_log_probs": near, "kl_coef": 0.04, "kl": kl, "kl_weighted": weighted, "ratio": ratio}

    loss, metrics = losses.policy_gradient(log_probs, torch.ones(1), torch.ones(1, 2), near, **options)
    (slope,) = torch.autograd.grad(loss, log_probs)

    numbers = torch.stack([loss.detach(), *metrics.select("kl", "kl_approx", "ess").leaves(), *slope[0]])
    assert numbers.isfinite().all()


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 30.0, 1e3])
def test_losses_of_float32_are_those_of_float64(name, scale):
    """Near zero and far from it, loss and gradient in float32 are those in float64."""
    log_probs, tree = streams(name, 9)
    narrow = tree.apply(lambda x: (x * scale).float() if x.is_floating_point() and x.dim() > 1 else x)
    small = (log_probs * scale).float()
    wide = narrow.apply(lambda x: x.double() if x.is_floating_point() else x)

    found = gradient(ALL[name], small, narrow)
    expected = gradient(ALL[name], small.double(), wide)

    torch.testing.assert_close(found["loss"].double(), expected["loss"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["grad"].double(), expected["grad"], rtol=1e-3, atol=1e-5)
