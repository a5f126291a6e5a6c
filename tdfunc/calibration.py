"""Calibration after training: temperatures, conformal sets and prediction intervals.

B is the batch (any dimensions), C the classes, N the examples of a calibration set. Temperatures and thresholds are
fitted on examples that the models were not trained on. Everything is pure and works under `torch.vmap`, so a function
of one model serves each member of an ensemble. Lists and numpy arrays are accepted in place of tensors.
"""

import math
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from tdfunc.core.context import require_values
from tdfunc.core.errors import LeafMismatchError, brief, check_choice, error
from tdfunc.mixture import (
    Numbers,
    as_real,
    as_tensor,
    check_labels,
    check_outputs,
    log_mixture,
    member_weights,
    warn_probabilities,
    widen,
)

__all__ = [
    "conformal_scores",
    "conformal_sets",
    "conformal_threshold",
    "ensemble_logits",
    "fit_temperature",
    "regression_intervals",
    "regression_scores",
]

Method: TypeAlias = Literal["lac", "aps"]
# Of the inverse temperature; beyond it float32 rounds the probabilities to 0 and 1, or to 1 / C.
_LOG_RANGE = 12.0
_STEPS = 60
_ROUNDING = 0.01


def fit_temperature(y: Numbers, t: Numbers) -> Tensor:
    """Return the temperature whose division of the logits makes the labels most likely.

    The logits may come from one model, from each member (one temperature each), or from the ensemble, by
    `ensemble_logits(y)`. There each member may be divided by its own temperature first.

    Args:
        y: Logits.
        t: The right classes.

    Shapes:
        `y` is (*E, N, C), `t` is (N); the result is (*E), positive, from e^-12 to e^12, and nan where a logit is nan.

    Raises:
        LeafMismatchError: The shapes do not fit, or `y` is not floating point.

    Source:
        Guo et al., "On calibration of modern neural networks" (2017), section 4. The likelihood is concave in the
        inverse temperature; its maximum is where the expected logit is the mean logit of the labels, found by
        bisection.

    Examples:
        >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
        >>> fit_temperature(logits, torch.tensor([0, 0, 0, 1]))  # right in 3 of 4: odds of 3
        tensor(3.6410)
    """
    y = as_tensor(y)
    t = check_labels("fit_temperature", y, as_tensor(t, y.device), y.shape[-2:-1])
    warn_probabilities("fit_temperature", y)
    wide = widen(y.detach())
    # A class that cannot be has no part in the expectation; the labels' logits must be finite.
    wide = wide - wide.amax(-1, keepdim=True)
    labels = t.expand(wide.shape[:-1]).unsqueeze(-1)
    wanted = wide.gather(-1, labels).squeeze(-1).mean(-1)
    finite = torch.where(wide == -math.inf, 0, wide)
    low = torch.full_like(wanted, -_LOG_RANGE)
    high = torch.full_like(wanted, _LOG_RANGE)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        p = (wide * middle.exp()[..., None, None]).softmax(-1)
        below = (p * finite).sum(-1).mean(-1) < wanted
        low = torch.where(below, middle, low)
        high = torch.where(below, high, middle)
    temperature = (-(low + high) / 2).exp()
    return torch.where(wide.isnan().any(-1).any(-1), math.nan, temperature)


def ensemble_logits(y: Numbers, *, weights: Numbers | None = None) -> Tensor:
    """Return the log-probabilities of the mixture of the members: the logits of the ensemble as one model.

    Args:
        y: The members' logits.
        weights: The share of each member, in any scale.

    Shapes:
        (E, *B, C) gives (*B, C); `weights` is (E,).

    Raises:
        LeafMismatchError: `y` is not floating point, or `weights` is not of shape (E,).

    Source:
        Rahaman and Thiery, "Uncertainty quantification and deep ensembles" (2021): members are averaged first, and
        one temperature is fitted to the average.

    Examples:
        >>> logits = torch.tensor([[[0.0, 0.0]], [[9.0, -9.0]]])
        >>> ensemble_logits(logits).exp()
        tensor([[0.7500, 0.2500]])
    """
    y = as_tensor(y)
    check_outputs("ensemble_logits", y, 2)
    warn_probabilities("ensemble_logits", y)
    return log_mixture(widen(y).log_softmax(-1), member_weights(y, weights))


def conformal_scores(p: Numbers, t: Numbers, *, method: Method = "lac") -> Tensor:
    """Return the distance of probabilities from labels, for `conformal_threshold`.

    Args:
        p: Probabilities, such as `mean` in `tdf.metrics.uncertainty(y, "classification")`.
        t: The right classes.
        method: The score. `lac` is one minus the probability of the label, and gives the smallest sets. `aps` is the
            probability of the label and all more probable classes, and gives larger sets for harder inputs.

    Shapes:
        `p` is (*B, C), `t` and the result are (*B).

    Raises:
        LeafMismatchError: The shapes do not fit.
        ValueError: A number of `p` is not between 0 and 1, such as a logit.

    Source:
        Sadinle et al., "Least ambiguous set-valued classifiers with bounded error levels" (2019); Romano et al.,
        "Classification with valid and adaptive coverage" (2020), without randomisation.
    """
    p = as_tensor(p)
    t = check_labels("conformal_scores", p, as_tensor(t, p.device), p.shape[:-1])
    return _class_scores(p, method).gather(-1, t.unsqueeze(-1)).squeeze(-1)


def conformal_threshold(scores: Numbers, alpha: float) -> Tensor:
    """Return the threshold under which sets hold the right answer with a probability of at least 1 - alpha.

    It is the ceil((N + 1) (1 - alpha))-th smallest score, and infinite if N is too small for `alpha`.

    Args:
        scores: The result of `conformal_scores` or `regression_scores`, for examples that are exchangeable with the
            examples to predict. NaN counts as the worst score.
        alpha: The share of answers that may be missed, in (0, 1).

    Raises:
        ValueError: `alpha` is not between 0 and 1.

    Shapes:
        (N) gives (), (*E, N) gives (*E).

    Source:
        Vovk et al., "Algorithmic learning in a random world" (2005); Lei et al., "Distribution-free predictive
        inference for regression" (2018).

    Examples:
        >>> conformal_threshold(torch.arange(1.0, 11.0), 0.2)  # the 9th of 10
        tensor(9.)
    """
    # Any: a number of a configuration may be a text.
    given: Any = alpha
    if isinstance(given, str) or given is None:
        raise error(TypeError, "conformal_threshold: alpha is not a number.", got=brief(given))
    alpha = float(given)
    if not 0.0 < alpha < 1.0:
        raise error(ValueError, "conformal_threshold: alpha must be between 0 and 1.", got=alpha)
    # An infinite threshold is not an integer.
    scores = as_real(as_tensor(scores))
    count = scores.shape[-1]
    # Rounded, since (10 + 1) * (1 - 0.2) is a little more than 8.8, and so may be what should be whole.
    place = max(math.ceil(round((count + 1) * (1 - alpha), 9)), 1)
    if place > count:
        return scores.new_full(scores.shape[:-1], math.inf)
    # Sorted last; every comparison with a threshold of nan would be False, and every set empty.
    return scores.nan_to_num(math.inf, math.inf, -math.inf).sort(-1).values[..., place - 1]


def conformal_sets(p: Numbers, threshold: Numbers | float, *, method: Method = "lac") -> Tensor:
    """Return for each input the classes whose score is at most a threshold; `p` and `method` as in `conformal_scores`.

    Shapes:
        `p` and the result, of bools, are (*E, N, C); a threshold of shape (*E) is one for each member.

    Examples:
        >>> p = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]])
        >>> conformal_sets(p, 0.7)
        tensor([[ True, False, False],
                [ True,  True, False]])
    """
    p = as_tensor(p)
    if not isinstance(threshold, float | int):
        threshold = as_tensor(threshold, p.device)
        threshold = threshold.reshape(*threshold.shape, *[1] * (p.dim() - threshold.dim()))
    return _class_scores(p, method) <= threshold


def regression_scores(y: Numbers, t: Numbers, *, scale: Numbers | None = None) -> Tensor:
    """Return the distance of predictions from the truth, for `conformal_threshold`.

    Args:
        y: Predictions of a model, of each member, or of the ensemble: the `mean` of `tdf.metrics.uncertainty`.
        t: The true values.
        scale: The expected error of each prediction, such as the root of `variance` there; intervals are then wide
            where it is large. By default all intervals have one width.

    Shapes:
        `y` is (*E, N), `t` is (N), `scale` is (*E, N) or (N); the result is (*E, N).

    Raises:
        LeafMismatchError: The shapes do not fit.

    Source:
        Lei et al., "Distribution-free predictive inference for regression" (2018), sections 2.2 and 5.2.
    """
    y = as_tensor(y)
    t = as_tensor(t, y.device)
    got = f"values of shape {list(t.shape)}"
    fits = y.shape[-1:] == t.shape
    if scale is not None:
        scale = as_tensor(scale, y.device)
        got += f", scales of shape {list(scale.shape)}"
        fits = fits and scale.shape in (y.shape, t.shape)
    if not fits:
        raise LeafMismatchError(
            "regression_scores: the true values, or the scales, do not fit the predictions.",
            expected=f"values of shape {list(y.shape[-1:])}, for {list(y.shape)}",
            got=got,
        )
    distance = (as_real(y) - as_real(t)).abs()
    if scale is None:
        return distance
    return distance / as_real(scale)


def regression_intervals(
    y: Numbers, threshold: Numbers | float, *, scale: Numbers | None = None
) -> tuple[Tensor, Tensor]:
    """Return bounds that contain each true value with a probability of at least 1 - alpha.

    Args:
        y: Predictions, as in `regression_scores`.
        threshold: The result of `conformal_threshold`.
        scale: The scale of `regression_scores`, if it was given there.

    Shapes:
        `y`, the lower and the upper bounds are (*E, N); a threshold of shape (*E) is one for each member. The bounds
        of integers are float64.

    Examples:
        >>> threshold = conformal_threshold(regression_scores(torch.zeros(9), torch.arange(9.0)), 0.2)
        >>> regression_intervals(torch.tensor([3.0, 5.0]), threshold)
        (tensor([-4., -2.]), tensor([10., 12.]))
    """
    y = as_real(as_tensor(y))
    if isinstance(threshold, float | int):
        width = torch.tensor(threshold, dtype=y.dtype)
    else:
        width = as_real(as_tensor(threshold))
    width = width.to(y.device).unsqueeze(-1)
    if scale is not None:
        width = width * as_real(as_tensor(scale, y.device))
    return y - width, y + width


def _not_probabilities() -> ValueError:
    return error(
        ValueError,
        "conformal: p is not made of probabilities.",
        expected="numbers from 0 to 1",
        hint="logits.softmax(-1), or the mean of tdf.metrics.uncertainty.",
    )


def _class_scores(p: Tensor, method: Method) -> Tensor:
    check_choice("conformal: method", method, get_args(Method))
    # Of 16 bits the sum over classes may round to a little more than 1, and so may one probability.
    is_share = ~((p < 0) | (p > 1 + _ROUNDING))
    require_values(is_share, _not_probabilities)
    # In 16 bits 1 - p has a few values near 0, and sums lose small probabilities.
    p = widen(p)
    if method == "lac":
        return 1 - p
    ordered, order = torch.sort(p, dim=-1, descending=True, stable=True)
    return torch.zeros_like(p).scatter(-1, order, ordered.cumsum(-1))


def __dir__() -> list[str]:
    return list(__all__)
