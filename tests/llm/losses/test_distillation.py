"""Distillation against sums over candidates and torch's divergences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdfunc.llm.losses import distill, distill_on_policy
from tests.llm.losses.data import combine, make, tokens
from tests.llm.losses.test_policy import SEEDS, close

VOCAB = 7


def distributions(seed, mask):
    """Log-probs (*mask, V) of two models, with poison where the mask is False."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, *mask.shape, VOCAB, generator=generator, dtype=torch.float64)
    return torch.where(mask.unsqueeze(-1), logits.log_softmax(-1), torch.nan).unbind(0)


def divergence(p, q):
    """KL(p || q) of lists of probabilities."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def jensen_shannon(student, teacher, beta):
    """The generalized divergence of lists of probabilities."""
    if beta in (0, 1):
        return divergence(student, teacher) if beta else divergence(teacher, student)
    middle = [beta * t + (1 - beta) * s for s, t in zip(student, teacher, strict=True)]
    return beta * divergence(teacher, middle) + (1 - beta) * divergence(student, middle)


def over(probabilities, candidates, tail):
    """The probabilities of candidates, with what becomes of the others."""
    kept = [probabilities[k] for k in candidates]
    if tail == "bucket":
        return [*kept, 1 - sum(kept)]
    return [p / sum(kept) for p in kept] if tail == "renormalize" else kept


@settings(max_examples=12)
@given(
    seed=SEEDS,
    beta=st.sampled_from([0, 0.0, 0.3, 0.5, 1.0]),
    tail=st.sampled_from([None, "bucket", "renormalize"]),
    normalize=st.sampled_from(["token", "sequence", 7.5]),
)
def test_distill_is_its_formula(seed, beta, tail, normalize):
    """Of the teacher's likeliest tokens, or of all; with weights."""
    s = make(seed, rows=3)
    student, teacher = distributions(seed, s.mask)
    top = VOCAB if tail is None else 3
    ids = teacher.nan_to_num(0).topk(top, -1).indices
    parts = []
    for b, row in enumerate(tokens(s.mask)):
        parts.append([])
        for t in row:
            kept = ids[b, t].tolist()
            p, q = (over(x[b, t].exp().tolist(), kept, tail) for x in (student, teacher))
            parts[-1].append(s.weights[b, t].item() * jensen_shannon(p, q, beta))

    streams, options = (student.gather(-1, ids), teacher.gather(-1, ids), s.mask), {"beta": beta, "tail": tail}
    found = distill(*streams, **options, normalize=normalize, weights=s.weights)
    close(found.loss, float(combine(parts, normalize)))
    close(found.metrics["divergence"], distill(*streams, **options).loss.item())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tail", [None, "renormalize"])
def test_candidates_of_probability_zero_add_nothing(beta, tail):
    """Padding of the candidates with -inf in both models changes neither the loss nor its gradient."""
    mask = torch.ones(2, 3)
    student, teacher = distributions(2, mask.bool())
    none = torch.full((2, 3, 2), -torch.inf, dtype=torch.float64)
    losses = []
    for extra in (none[..., :0], none):
        own = student.clone().requires_grad_()
        loss = distill(torch.cat([own, extra], -1), torch.cat([teacher, extra], -1), mask, beta=beta, tail=tail).loss
        losses.append((loss, torch.autograd.grad(loss, own)[0]))

    torch.testing.assert_close(losses[0], losses[1])


# A student, and a teacher that gives the last token no probability.
CUTTING = torch.tensor([[[0.5, 0.25, 0.25]]]).log(), torch.tensor([[[0.5, 0.5, 0.0]]]).log()


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_teacher_that_cuts_tokens_has_a_finite_divergence(beta):
    """The forward one and that of Jensen and Shannon, with their gradients."""
    student, teacher = CUTTING[0].clone().requires_grad_(), CUTTING[1]
    loss = distill(student, teacher, torch.ones(1, 1), beta=beta).loss

    assert loss.isfinite()
    assert torch.autograd.grad(loss, student)[0].isfinite().all()


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 0.5 * math.log(2)), ({"beta": 1.0}, math.inf)], ids=["forward", "reverse"]
)
def test_divergences_of_a_teacher_that_cuts_tokens(options, expected):
    """The reverse one is infinite where the student does not cut."""
    loss = distill(*CUTTING, torch.ones(1, 1), **options).loss

    torch.testing.assert_close(loss, torch.tensor(expected))


@pytest.mark.parametrize("is_older", [False, True], ids=["now", "older"])
def test_on_policy_the_gradient_is_that_of_the_reverse_divergence(is_older):
    """Weighted by the probabilities of all tokens that may be drawn, now or from an older student."""
    logits = torch.randn(VOCAB, dtype=torch.float64, requires_grad=True)
    teacher, older = torch.randn(2, VOCAB, dtype=torch.float64).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    exact = torch.autograd.grad((log_p.exp() * (log_p - teacher)).sum(), logits, retain_graph=True)[0]
    drawn_from, old = (older, older.unsqueeze(1)) if is_older else (log_p.detach(), None)

    streams = log_p.unsqueeze(1), teacher.unsqueeze(1), torch.ones(VOCAB, 1)
    loss = distill_on_policy(*streams, old, weights=drawn_from.exp(), normalize=1.0).loss
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], exact)


@pytest.mark.parametrize("beta", [1e-3, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("size", [1e-2, 1.0])
def test_a_student_near_its_teacher_has_the_gradient_of_float64(beta, size, generator):
    """The distance from the mixture is not a difference of two log-probs that are nearly equal."""
    student = (torch.randn(2, 3, 8, generator=generator, dtype=torch.float64) * 10).log_softmax(-1)
    teacher = (student + size * torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)).log_softmax(-1)
    narrow, wide = student.float().requires_grad_(), student.float().double().requires_grad_()
    mask = torch.ones(2, 3)

    (found,) = torch.autograd.grad(distill(narrow, teacher.float(), mask, beta=beta).loss, narrow)

    (expected,) = torch.autograd.grad(distill(wide, teacher.float().double(), mask, beta=beta).loss, wide)
    assert (found.double() - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("beta", [1e-3, 0.5, 0.999])
@pytest.mark.parametrize("size", [1e-3, 1e-1])
def test_the_divergence_of_a_near_mixture_is_that_of_float64(beta, size, generator):
    """It is of second order in the distance, and above 0."""
    student = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64).log_softmax(-1)
    teacher = (student + size * torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)).log_softmax(-1)
    given = [each.float() for each in (student, teacher)]

    found = distill(*given, torch.ones(2, 3), beta=beta).loss

    expected = distill(*[each.double() for each in given], torch.ones(2, 3), beta=beta).loss
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=0.0)
