"""Distillation: a student learns the distributions of a teacher, over the vocabulary or over a few candidate tokens.

`tdfunc.llm.score(..., at=ids)` returns the log-probs of candidates; use the same ids for both models. *B any batch
dimensions, T positions, K candidates.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, check_choice, error
from tdfunc.llm.losses.output import Loss
from tdfunc.llm.losses.policy import policy_gradient
from tdfunc.llm.losses.streams import Normalize, clean, log1mexp, mean, spread
from tdfunc.mixture import widen

# A log-prob whose exponential is 0.
_NONE = -1e4


def distill(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.0,
    tail: Literal["bucket", "renormalize"] | None = None,
    weights: Tensor | None = None,
    normalize: Normalize = "token",
) -> Loss:
    """Return the divergence of a student's distributions from a teacher's, in nats a token.

    With the forward divergence, KL(teacher || student), the student covers all tokens that the teacher may write. The
    reverse divergence concentrates it on some of them.

    Args:
        student: The log-probs of the candidates under the student.
        teacher: The log-probs under the teacher, a constant. -inf is a probability of 0.
        mask: True at the tokens that count.
        beta: 0 for the forward divergence and 1 for the reverse divergence. A number between them selects the
            generalized Jensen-Shannon divergence, beta KL(teacher || m) + (1 - beta) KL(student || m) with
            m = beta teacher + (1 - beta) student.
        tail: The treatment of tokens outside the candidates. "bucket" adds one candidate for all of them, which gives
            a lower bound of the complete divergence. "renormalize" normalizes over the candidates. None if the
            candidates are the complete vocabulary.
        weights: A factor for each token or row, a constant.
        normalize: "token" for the mean over the tokens of the batch, "sequence" for the mean of the rows' means, or a
            number that divides the sum.

    Returns:
        The loss and its metrics: `divergence`, the mean over tokens without weights, and `tokens`.

    Shapes:
        Log-probs (*B, T, K), a mask (*B, T) and weights (*B) or (*B, T) give ().

    Raises:
        LeafMismatchError: Shapes differ.
        ValueError: `beta` is not in [0, 1], or `tail` or `normalize` is unknown.

    Source:
        Hinton et al., "Distilling the Knowledge in a Neural Network" (2015); Agarwal et al., "On-Policy Distillation of
        Language Models" (2023) for `beta`.

    Examples:
        >>> student = torch.tensor([[[0.5, 0.5]]]).log()
        >>> teacher = torch.tensor([[[0.75, 0.25]]]).log()
        >>> distill(student, teacher, torch.ones(1, 1)).loss
        tensor(0.1308)
    """
    if not 0 <= beta <= 1:
        raise error(ValueError, "distill: beta must be in [0, 1].", got=beta)
    check_choice("distill: tail", tail, ("bucket", "renormalize", None))
    for name, log_probs in (("student", student), ("teacher", teacher)):
        if log_probs.shape[:-1] != mask.shape or log_probs.shape != student.shape:
            raise LeafMismatchError(
                f"distill: {name} does not have the candidates at each position of the mask.",
                expected=[*mask.shape, student.shape[-1]],
                got=list(log_probs.shape),
            )
    p = widen(student)
    q = widen(teacher).detach()
    # A candidate that neither model has adds nothing to the loss or its gradients.
    absent = (p == -torch.inf) & (q == -torch.inf)
    p = _with_tail(_finite(p, absent, mask), tail)
    q = _with_tail(_finite(q, absent, mask), tail)
    if beta == 0:
        values = _expected(q, q - p)
    elif beta == 1:
        values = _expected(p, p - q)
    else:
        of_student, of_teacher = _above_mixture(p, q, beta)
        values = beta * _expected(q, of_teacher) + (1 - beta) * _expected(p, of_student)
    values = torch.where(mask.bool(), values, 0)
    metrics = {"divergence": mean(values.detach(), mask), "tokens": mask.bool().sum()}
    if weights is not None:
        values = values * spread("distill: weights", weights, mask).detach()
    return Loss(mean(values, mask, normalize), TensorCollection._open(metrics))  # pyright: ignore[reportArgumentType]


def _finite(log_probs: Tensor, absent: Tensor, mask: Tensor) -> Tensor:
    """Return log-probs without the infinities of absent candidates.

    Where the mask is False the distribution is uniform over the candidates and the rest.
    """
    uniform = -math.log(log_probs.shape[-1] + 1)
    present = torch.where(absent, _NONE, log_probs)
    return torch.where(mask.bool().unsqueeze(-1), present, uniform)


def _with_tail(log_probs: Tensor, tail: Literal["bucket", "renormalize"] | None) -> Tensor:
    """Return the log-probs of a distribution over the candidates, and over one more for all others with "bucket"."""
    if tail == "bucket":
        rest = log1mexp(log_probs.logsumexp(-1, keepdim=True))
        return torch.cat([log_probs, rest], -1)
    if tail == "renormalize":
        return log_probs.log_softmax(-1)
    return log_probs


def distill_on_policy(
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip: tuple[float, float] | None = None,
    weights: Tensor | None = None,
    normalize: Normalize = "token",
) -> Loss:
    """Return a policy gradient in which a token's advantage is its log-prob under the teacher minus under the student.

    If the student sampled the tokens, its expected gradient is the gradient of the reverse divergence at each token. It
    needs only the teacher's log-probs of the sampled tokens.

    Args:
        log_probs: The student's log-prob of each token.
        teacher_log_probs: The teacher's log-prob of each token.
        mask: True at the tokens that count.
        old_log_probs: The student's log-probs when the tokens were sampled.
        clip: The clip range of the ratio, as distances below and above 1; None for no clipping.
        weights: A factor for each token or row.
        normalize: As for `policy_gradient`.

    Returns:
        The loss, and the metrics of `policy_gradient` with `divergence`, the mean of student minus teacher.

    Shapes:
        (*B, T) gives ().

    Raises:
        LeafMismatchError: Shapes differ.

    Source:
        Lu et al., "On-Policy Distillation" (Thinking Machines, 2025); Gu et al., "MiniLLM" (2023).

    Examples:
        >>> log_probs = torch.tensor([[-1.0, -2.0]])
        >>> distill_on_policy(log_probs, log_probs - 0.5, torch.ones(1, 2)).metrics["divergence"]
        tensor(0.5000)
    """
    student = clean("distill_on_policy: log_probs", log_probs, mask).detach()
    gain = clean("distill_on_policy: teacher_log_probs", teacher_log_probs, mask) - student
    found = policy_gradient(log_probs, gain, mask, old_log_probs, clip=clip, weights=weights, normalize=normalize)
    return Loss(found.loss, found.metrics.update({"divergence": -mean(gain.detach(), mask)}))


def _above_mixture(p: Tensor, q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return log p - log m and log q - log m, for the mixture m = (1 - beta) p + beta q, of log-probs."""
    middle = torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))
    # Where p and q are near, little is left of a difference from the mixture.
    gap = q - p
    is_near = gap.abs() < 1
    d = torch.where(is_near, gap, 0)
    of_p = torch.where(is_near, -(beta * d.expm1()).log1p(), p - middle)
    of_q = torch.where(is_near, -((1 - beta) * (-d).expm1()).log1p(), q - middle)
    return of_p, of_q


def _expected(p: Tensor, gap: Tensor) -> Tensor:
    """Return the sum of gaps weighed by log-probs, along the last dimension; a p of 0 adds nothing."""
    gap = torch.where(p == -torch.inf, 0, gap)
    return (p.exp() * gap).sum(-1)
