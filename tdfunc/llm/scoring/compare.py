"""`compare`: the difference of two log-probs of the same tokens, as of an engine and a trainer, and its cause."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, error
from tdfunc.ops.base.reading import get_value

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

# Largest differences in nats: of one computation in float32, and of logits in 16 bits.
_EXACT = 1e-3
_ROUNDED = 0.5


def compare(a: Any, b: Any, mask: Tensor | None = None, *, worst: int = 5) -> "TensorDict":
    """Compare the log-probs `b` with the log-probs `a` under which the tokens were sampled, and name the likely cause.

    Args:
        a: `LogProbs`, of which `full` is read, or a tensor (*B, T).
        b: The other log-probs, in the same form.
        mask: True at the tokens to compare; by default where the masks of both are True.
        worst: The number of most different tokens to report.

    Returns:
        A tree with `ratio` (the mean of exp |b - a|), `k1` and `k3` (estimates of the divergence of `b` from `a`, in
        nats), `ess` (the effective sample size as a share of the tokens, in (0, 1]), `largest` (the largest |b - a|),
        `worst` (indices into `a`, the most different token first), and `cause`: "none", "shift by one", "dtype",
        "truncation", "temperature" or "unknown".

    Raises:
        LeafMismatchError: The shapes differ.
        ValueError: No token is compared.

    Source:
        Schulman, "Approximating KL divergence" (2020), for k1 and k3; Kish (1965) for the effective sample size.

    Examples:
        >>> a = torch.tensor([[0.0, -1.0, -2.0, -0.5]])
        >>> report = compare(a, a.roll(1, -1))
        >>> report["cause"], report["worst"][0].tolist()
        ('shift by one', [0, 3])
    """
    first = _values_of(a)
    second = _values_of(b)
    shapes = [tuple(each.shape) for each in (first, second, mask) if each is not None]
    if len(set(shapes)) > 1:
        raise LeafMismatchError(
            "compare: the log-probs and the mask differ in shape.",
            expected=str(shapes[0]),
            got=", ".join(map(str, shapes[1:])),
        )
    if mask is None:
        mask = _mask_of(a, first) & _mask_of(b, first)
    if not mask.any():
        raise error(ValueError, "compare: no token has both log-probs.", got="an empty mask")
    gap = torch.where(mask, second - first, 0)
    chosen = gap[mask]
    ratio = chosen.abs().exp().mean()
    k3 = (chosen.expm1() - chosen).mean()
    count = min(worst, int(mask.sum()))
    most_different = gap.abs().flatten().argsort(descending=True)[:count]
    places = torch.stack(torch.unravel_index(most_different, gap.shape), -1)
    return TensorCollection._open(
        {
            "ratio": ratio,
            "k1": -chosen.mean(),
            "k3": k3,
            "ess": _effective_share(chosen),
            "largest": chosen.abs().max(),
            "worst": places,
            "cause": _find_cause(first, second, mask),
        }
    )  # pyright: ignore[reportReturnType]


def _effective_share(gap: Tensor) -> Tensor:
    """Return the effective sample size of tokens weighted by exp(gap), as a share of their number."""
    weights = (gap - gap.max()).exp()
    effective_size = weights.sum().square() / weights.square().sum()
    return effective_size / len(weights)


# Any: `LogProbs`, or a tensor.
def _values_of(given: Any) -> Tensor:
    """Return the log-probs of all tokens."""
    values = get_value(given, "full") if isinstance(given, TensorCollection) else given
    return values.detach().double()


# Any: `LogProbs`, or a tensor.
def _mask_of(given: Any, values: Tensor) -> Tensor:
    """Return the mask that log-probs have beside them; without one all tokens count."""
    own = None
    if isinstance(given, TensorCollection):
        own = get_value(given, "mask", None)
    if own is None:
        return torch.ones_like(values, dtype=torch.bool)
    return own


def _find_cause(a: Tensor, b: Tensor, mask: Tensor) -> str:
    """Return the first cause that explains the difference of all tokens."""
    gap = (b - a)[mask]
    if gap.abs().max() < _EXACT:
        return "none"
    if _is_shifted(a, b, mask) or _is_shifted(b, a, mask):
        return "shift by one"
    # Renormalized over fewer tokens, each kept token is likelier.
    if gap.min() > -_EXACT:
        return "truncation"
    # Rounding has both signs, whatever the log-prob.
    is_small = gap.abs().max() < _ROUNDED
    is_balanced = gap.mean().abs() < 3 * gap.std() / len(gap) ** 0.5
    if is_small and is_balanced:
        return "dtype"
    # A lower temperature makes likely tokens likelier and others less likely; a higher one does the opposite.
    correlations = torch.corrcoef(torch.stack([a[mask], b[mask], gap]))
    of_both = correlations[0, 1]
    of_gap = correlations[0, 2]
    if of_both > 0.8 and of_gap.abs() > 0.4:
        return "temperature"
    return "unknown"


def _is_shifted(early: Tensor, late: Tensor, mask: Tensor) -> bool:
    """Return True if the second log-probs are the first, one position later."""
    both = mask[..., :-1] & mask[..., 1:]
    if not both.any():
        return False
    gap = early[..., :-1] - late[..., 1:]
    return bool(gap[both].abs().max() < _EXACT)
