"""The uncertainty of an ensemble's outputs, scores of predicted probabilities, and tests of a score that ranks errors.

E is the number of members, B the batch (any dimensions), C the classes; entropies and log-likelihoods are in nats.
Classification is computed from log-probabilities. Everything is in float32 at least, and works under `torch.vmap`,
`torch.func.grad` and `tdfunc.jit`. Lists and numpy arrays are accepted in place of tensors.
"""

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import require_values
from tdfunc.core.errors import LeafMismatchError, as_count, check_choice, error
from tdfunc.mixture import (
    Numbers,
    as_tensor,
    check_outputs,
    log_mixture,
    member_weights,
    predicted,
    warn_probabilities,
    widen,
)

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

__all__ = [
    "adaptive_ece",
    "aurc",
    "auroc",
    "brier",
    "ece",
    "nll",
    "reliability_curve",
    "risk_coverage",
    "uncertainty",
]

# The fewest dimensions that outputs of each kind have.
_KINDS = {"classification": 2, "regression": 1, "gaussian": 2}


def uncertainty(
    y: Numbers, kind: Literal["classification", "regression", "gaussian"], *, weights: Numbers | None = None
) -> "TensorDict":
    """Return the mean of an ensemble's outputs, its uncertainty, and the disagreement of its members.

    The ensemble is the mixture of its members, each with its weight.

    For `kind="classification"`, where p are the probabilities of the mixture and q the probabilities of one member:

    - `mean` (B, C): p, the mean of q over the members.
    - `variance` (B, C): the variance of q over the members.
    - `entropy` (B): the entropy of p; the complete uncertainty.
    - `expected_entropy` (B): the mean over the members of the entropy of q; the part that is left when the members
      agree (aleatoric).
    - `mutual_information` (B): the mutual information of the class and the member; the part that is the members'
      disagreement (epistemic). It equals entropy - expected_entropy, but is computed as the mean Kullback-Leibler
      divergence of q from p, a sum of terms that are never negative: it is exact, and at least 0, even if the members
      nearly agree.
    - `variation_ratio` (B): the weight of the members that do not vote for the class with the most votes.
    - `disagreement` (B): the probability that two members, sampled by their weights with replacement, vote for
      different classes.

    A member votes for its most probable class. A logit of -inf is a probability of 0.

    For `kind="regression"`, `mean` and `variance` over the members (the weights are probabilities: the variance of E
    equal members is divided by E, not E - 1).

    For `kind="gaussian"`, where the last dimension of y is a mean and a log-variance, `mean` and `variance` of the
    mixture, and the parts of the variance: `aleatoric`, the mean of the members' variances, and `epistemic`, the
    variance of their means.

    Args:
        y: The outputs of all members, as `Ensemble` returns them: logits, values, or means and log-variances.
        kind: The meaning of the outputs.
        weights: The share of each member, in any scale; a tensor or list.

    Shapes:
        `y` is (E, *B, C) for classification, (E, B, ...) for regression, (E, *B, 2) for gaussian; `weights` is (E,).
        The result has the batch size B.

    Raises:
        ValueError: `kind` is unknown, or weights are negative, not finite, or all 0.
        LeafMismatchError: `y` is not floating point or has too few dimensions, or `weights` is not of shape (E,).

    Source:
        Depeweg et al., "Decomposition of Uncertainty in Bayesian Deep Learning" (entropies); Gal, "Uncertainty in
        Deep Learning" (variation ratio); Lakshminarayanan et al., "Simple and Scalable Predictive Uncertainty
        Estimation using Deep Ensembles" (gaussian mixture).

    Examples:
        >>> agree = torch.tensor([[4.0, 0.0], [4.0, 0.0]])
        >>> differ = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
        >>> u = uncertainty(torch.stack([agree, differ], 1), kind="classification")
        >>> u.batch_size, u["disagreement"]
        (torch.Size([2]), tensor([0.0000, 0.5000]))
        >>> u["mutual_information"].round(decimals=2)
        tensor([0.0000, 0.6000])
    """
    check_choice("uncertainty: kind", kind, _KINDS)
    y = as_tensor(y)
    check_outputs("uncertainty", y, _KINDS[kind])
    if kind == "gaussian" and y.shape[-1] != 2:
        raise LeafMismatchError(
            "uncertainty: the outputs are not pairs of mean and log-variance.",
            expected="shape (E, ..., 2)",
            got=list(y.shape),
        )
    if kind == "classification":
        warn_probabilities("uncertainty", y)
    y = widen(y)
    w = member_weights(y, weights)
    if kind == "classification":
        return _of_classes(y, w)
    if kind == "regression":
        mean, variance = _moments(w, y)
        return _tree({"mean": mean, "variance": variance}, y.shape[1:2])
    means = y[..., 0]
    mean, epistemic = _moments(w, means)
    aleatoric = _average(w, y[..., 1].exp())
    parts = {"mean": mean, "variance": aleatoric + epistemic, "aleatoric": aleatoric, "epistemic": epistemic}
    return _tree(parts, means.shape[1:])


def _of_classes(y: Tensor, w: Tensor) -> "TensorDict":
    log_q = y.log_softmax(-1)
    log_p = log_mixture(log_q, w)
    q = log_q.exp()
    p = log_p.exp()
    is_vote = y.argmax(-1, keepdim=True) == torch.arange(y.shape[-1], device=y.device)
    votes = _average(w, is_vote.to(y.dtype))
    # Sums of weights: 1 - votes would lose the digits of small weights.
    others = _average(w, (~is_vote).to(y.dtype))
    # 0, or nan where an output is nan: a vote cannot be nan.
    nan_of_outputs = 0 * p.sum(-1)
    measures = {
        "mean": p,
        "variance": _average(w, (q - p).square()),
        "entropy": -_expected(p, log_p),
        "expected_entropy": -_average(w, _expected(q, log_q)),
        "mutual_information": _average(w, _divergence(log_q, log_p, w)) + nan_of_outputs,
        "variation_ratio": others.amin(-1) + nan_of_outputs,
        "disagreement": (votes * others).sum(-1) + nan_of_outputs,
    }
    return _tree(measures, y.shape[1:-1])


# -- scores -----------------------------------------------------------------------------------------------------


def nll(y: Numbers, t: Numbers, *, weights: Numbers | None = None) -> Tensor:
    """Return the mean negative log-likelihood of the labels, in nats.

    Args:
        y: Logits of one model, or of all members: then the likelihood is their mixture's.
        t: The right classes, a tensor or list.
        weights: The share of each member, in any scale; a tensor or list.

    Shapes:
        `y` is (*B, C) or (E, *B, C), `t` is (*B), `weights` is (E,); the result has no dimensions.

    Raises:
        LeafMismatchError: The shapes do not fit, `y` is not floating point, or `t` is not of integers.
        ValueError: `t` is empty or holds numbers of no class, or weights are negative, not finite, or all 0.

    Examples:
        >>> nll(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
        tensor(0.6931)
    """
    log_p, t = predicted("nll", y, t, weights)
    return -log_p.gather(-1, t.unsqueeze(-1)).mean()


def brier(y: Numbers, t: Numbers, *, weights: Numbers | None = None) -> Tensor:
    """Return the mean Brier score: the squared distance of the probabilities from the right answer, from 0 to 2.

    Arguments, shapes and errors are as in `nll`; the probabilities are the probabilities of the members' mixture.

    Source:
        Brier, "Verification of Forecasts Expressed in Terms of Probability": the sum over all classes.

    Examples:
        >>> brier(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
        tensor(0.5000)
    """
    log_p, t = predicted("brier", y, t, weights)
    right = (t.unsqueeze(-1) == torch.arange(log_p.shape[-1], device=log_p.device)).to(log_p.dtype)
    return (log_p.exp() - right).square().sum(-1).mean()


def ece(y: Numbers, t: Numbers, *, bins: int = 15, weights: Numbers | None = None) -> Tensor:
    """Return the expected calibration error: the gap between confidence and accuracy, averaged over bins.

    The other arguments, shapes and errors are as in `nll`; the probabilities are the probabilities of the members'
    mixture.

    Args:
        bins: The number of bins of equal width into which confidences from 0 to 1 are sorted; at least 1.

    Source:
        Guo et al., "On Calibration of Modern Neural Networks", with bins (lower, upper].

    Examples:
        >>> ece(torch.tensor([[0.0, 9.0], [0.0, 9.0]]), torch.tensor([1, 0]))
        tensor(0.4999)
    """
    bins = as_count("ece: bins", bins)
    confidence, right, inside = _binned("ece", y, t, bins, weights)
    # count / N * |accuracy - confidence| is the difference of two sums over N: an empty bin adds 0.
    gaps = ((right - confidence).unsqueeze(-1) * inside).sum(0).abs()
    # A confidence of nan is in no bin, and makes the result nan.
    nan_of_outputs = 0 * confidence.sum()
    return gaps.sum() / len(right) + nan_of_outputs


def adaptive_ece(y: Numbers, t: Numbers, *, bins: int = 15, weights: Numbers | None = None) -> Tensor:
    """Return the expected calibration error over bins that hold equally many predictions.

    Args:
        y: Logits of one model or of members, whose mixture predicts.
        t: The right classes.
        bins: The number of bins. The first ones hold one prediction more if the predictions do not divide evenly.
        weights: The share of each member, in any scale.

    Shapes:
        `y` is (*B, C) or (E, *B, C), `t` is (*B); the result has no dimensions.

    Raises:
        LeafMismatchError: The shapes do not fit, `y` is not floating point, or `t` is not of integers.
        ValueError: `t` is empty or holds numbers of no class.

    Source:
        Nguyen and O'Connor, "Posterior calibration and exploratory analysis for natural language processing models"
        (2015).
    """
    bins = as_count("adaptive_ece: bins", bins)
    log_p, t = predicted("adaptive_ece", y, t, weights)
    top, voted = log_p.exp().max(-1)
    order = top.flatten().argsort(stable=True)
    gap = ((voted == t).to(top.dtype) - top).flatten()[order]
    parts = gap.tensor_split(min(bins, len(gap)))
    return torch.stack([part.sum().abs() for part in parts]).sum() / len(gap)


def reliability_curve(y: Numbers, t: Numbers, *, bins: int = 15, weights: Numbers | None = None) -> "TensorDict":
    """Return accuracy against confidence, the data of a reliability diagram.

    Arguments and errors are as in `ece`.

    Returns:
        For each bin its borders `lower` and `upper`, the `count` of predictions in (lower, upper], their mean
        `confidence` and their `accuracy` (nan in an empty bin).

    Shapes:
        The result has the batch size (bins,).

    Examples:
        >>> curve = reliability_curve(torch.tensor([[0.0, 9.0], [0.0, 9.0]]), torch.tensor([1, 0]), bins=2)
        >>> curve["count"], curve["accuracy"]
        (tensor([0, 2]), tensor([   nan, 0.5000]))
    """
    bins = as_count("reliability_curve: bins", bins)
    confidence, right, inside = _binned("reliability_curve", y, t, bins, weights)
    count = inside.sum(0)
    borders = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device=confidence.device)
    curve = {
        "lower": borders[:-1],
        "upper": borders[1:],
        "count": count,
        "confidence": (confidence.unsqueeze(-1) * inside).sum(0) / count,
        "accuracy": (right.unsqueeze(-1) * inside).sum(0) / count,
    }
    return _tree(curve, torch.Size([bins]))


class _Binned(NamedTuple):
    """Predictions (N) in bins: the confidence, 1 if right, and (N, bins) True for the bin of the confidence."""

    confidence: Tensor
    right: Tensor
    inside: Tensor


def _binned(call: str, y: Any, t: Any, bins: int, weights: Any) -> _Binned:
    """Sort all predictions into bins (lower, upper] of equal width."""
    log_p, t = predicted(call, y, t, weights)
    top, voted = log_p.max(-1)
    confidence = top.exp().reshape(-1)
    right = (voted == t).to(confidence.dtype).reshape(-1)
    place = ((confidence * bins).ceil() - 1).clamp(0, bins - 1).unsqueeze(-1)
    inside = place == torch.arange(bins, device=confidence.device)
    return _Binned(confidence, right, inside)


# -- how well an uncertainty ranks the errors -----------------------------------------------------------------


def auroc(score: Numbers, positive: Numbers) -> Tensor:
    """Return the probability that a positive example has a higher score than a negative one; ties count half.

    With the entropy of the mean as score, it measures how well an ensemble finds its errors or inputs from elsewhere.

    Args:
        score: A number for each example.
        positive: True for each positive example.

    Shapes:
        `score` is (*E, N), `positive` is (N) or (*E, N); the result is (*E), and nan if all are positive, or none.

    Raises:
        LeafMismatchError: The shapes do not fit, or `positive` is not of bools or integers.
        ValueError: An integer of `positive` is neither 0 nor 1.

    Source:
        Mann and Whitney (1947).

    Examples:
        >>> auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
        tensor(0.7500)
    """
    score, positive = _pairs("auroc", score, positive, bools=True)
    require_values((positive == 0) | (positive == 1), _other_labels)
    ordered = score.sort(-1).values.contiguous()
    below = torch.searchsorted(ordered, score.contiguous(), right=False)
    upto = torch.searchsorted(ordered, score.contiguous(), right=True)
    # The mean rank of equal scores.
    rank = (below + upto + 1).to(torch.float64) / 2
    hits = (positive != 0).to(torch.float64)
    count = hits.sum(-1)
    others = (1 - hits).sum(-1)
    area = ((rank * hits).sum(-1) - count * (count + 1) / 2) / (count * others)
    return torch.where(score.isnan().any(-1), math.nan, area).to(torch.promote_types(score.dtype, torch.float32))


def aurc(doubt: Numbers, loss: Numbers) -> Tensor:
    """Return the area under the risk-coverage curve: the mean loss of the surest k examples, averaged over k.

    Args:
        doubt: The uncertainty of the model for each example.
        loss: The loss of each example, such as 0 for a right prediction and 1 for a wrong one.

    Shapes:
        `doubt` is (*E, N), `loss` is (N) or (*E, N); the result is (*E).

    Raises:
        LeafMismatchError: The shapes do not fit.

    Source:
        Geifman and El-Yaniv, "Selective classification for deep neural networks" (2017).

    Examples:
        >>> aurc(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0.0, 0.0, 1.0]))
        tensor(0.1111)
    """
    return risk_coverage(doubt, loss).mean(-1)


def risk_coverage(doubt: Numbers, loss: Numbers) -> Tensor:
    """Return the mean loss of the surest k examples, for k from 1 to N: the risk at the coverages k / N.

    Arguments and errors are as in `aurc`. Examples of equal `doubt` share their mean loss.

    Shapes:
        `doubt` is (*E, N), `loss` is (N) or (*E, N); the result is (*E, N).

    Examples:
        >>> risk_coverage(torch.tensor([0.9, 0.1, 0.2, 0.3]), torch.tensor([1.0, 0.0, 0.0, 1.0]))
        tensor([0.0000, 0.0000, 0.3333, 0.5000])
    """
    doubt, loss = _pairs("risk_coverage", doubt, loss, bools=False)
    order = doubt.argsort(dim=-1, stable=True)
    ordered = doubt.gather(-1, order).contiguous()
    loss = widen(loss)
    # Ties are differences of sums, which lose in float32 what is small beside the sum before it.
    risk = loss.expand(order.shape).gather(-1, order).to(torch.float64)
    # The mean over ties makes the curve independent of the order in which they came.
    first = torch.searchsorted(ordered, ordered, right=False)
    last = torch.searchsorted(ordered, ordered, right=True)
    sums = torch.nn.functional.pad(risk.cumsum(-1), (1, 0))
    ends = sums.gather(-1, last)
    # After an infinite loss the sums are infinite, and have no differences.
    shared = torch.where(ends.isfinite(), (ends - sums.gather(-1, first)) / (last - first), ends)
    counts = torch.arange(1, risk.shape[-1] + 1, device=risk.device)
    return (shared.cumsum(-1) / counts).to(loss.dtype)


# -- arithmetic -------------------------------------------------------------------------------------------------


def _average(w: Tensor, x: Tensor) -> Tensor:
    """Average over members; w has the dimensions of the outputs, x those or some of the first."""
    return (w.reshape(w.shape[: x.dim()]) * x).sum(0)


def _moments(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance over members.

    Both are of distances from a number near the mean, which are exact where values are large and near one another: the
    rounding of the weights and of the mean itself is of the size of the values.
    """
    near = _average(w, x).detach()
    # From an infinite number there are no distances.
    near = torch.where(near.isfinite(), near, 0)
    apart = x - near
    rest = _average(w, apart)
    return near + rest, _average(w, (apart - rest).square())


def _divergence(log_q: Tensor, log_p: Tensor, w: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of each member's q from p, as a sum of terms that are never negative.

    With d = log q - log p a term is q d - q + p = p (exp(d) (d - 1) + 1). Members that nearly agree have small d, where
    that cancels; there it is its Taylor series.
    """
    q = log_q.exp()
    p = log_p.exp()
    # A member without weight may give all of its probability to what the mixture holds impossible.
    d = torch.where((q == 0) | (w == 0), 0, log_q - log_p)
    small = d.abs() < 0.03
    near = torch.where(small, d, 0)
    series = 1 / 2 + near * (1 / 3 + near * (1 / 8 + near * (1 / 30 + near * (1 / 144 + near / 840))))
    # Where q is 0, d stands for -inf, and the term is p.
    terms = torch.where(small & (q > 0), p * near.square() * series, q * d - q + p)
    return terms.sum(-1)


def _expected(p: Tensor, x: Tensor) -> Tensor:
    """Sum p * x over the classes, where p = 0 counts nothing whatever x is."""
    # The inner where also keeps the infinities out of the gradient.
    return (p * torch.where(p == 0, torch.zeros_like(x), x)).sum(-1)


def _tree(data: dict[str, Tensor], size: torch.Size) -> Any:
    return TensorCollection._open._make(data, torch.Size(size))


def _other_labels() -> ValueError:
    hint = "positive=labels == 1, with the label of the positive examples."
    return error(ValueError, "auroc: integers in positive must be 0 or 1.", hint=hint)


def _pairs(call: str, score: Numbers, other: Numbers, *, bools: bool) -> tuple[Tensor, Tensor]:
    score = as_tensor(score)
    other = as_tensor(other, score.device)
    fits = any(score.shape[-1:]) and other.shape in (score.shape, score.shape[-1:])
    if not fits or (bools and other.is_floating_point()):
        raise LeafMismatchError(
            f"{call}: an argument does not have an entry for each example.",
            expected=f"numbers of shape (*E, N), and {'bools' if bools else 'numbers'} of shape (N) or (*E, N)",
            got=f"shape {list(score.shape)}, and {other.dtype} of shape {list(other.shape)}",
        )
    return score, other


def __dir__() -> list[str]:
    return list(__all__)
