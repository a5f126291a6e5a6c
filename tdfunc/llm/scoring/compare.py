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
    given = [get_value(x, "full") if isinstance(x, TensorCollection) else x for x in (a, b)]
    first, second = [values.detach().double() for values in given]
    shapes = [tuple(each.shape) for each in (first, second, mask) if each is not None]
    if len(set(shapes)) > 1:
        raise LeafMismatchError(
            "compare: both log-probs, and the mask, must have one shape.",
            expected=str(shapes[0]),
            got=", ".join(map(str, shapes[1:])),
        )
    both = torch.ones_like(first, dtype=torch.bool) if mask is None else mask
    if mask is None:
        for x in (a, b):
            own = None
            if isinstance(x, TensorCollection):
                own = get_value(x, "mask", None)
            if own is not None:
                both = both & own
    if not both.any():
        raise error(ValueError, "compare: at least one token must have both log-probs.", got="an empty mask")
    gap = torch.where(both, second - first, 0)
    chosen = gap[both]
    weights = (chosen - chosen.max()).exp()
    order = gap.abs().flatten().argsort(descending=True)[: min(worst, int(both.sum()))]
    return TensorCollection._open(
        {
            "ratio": chosen.abs().exp().mean(),
            "k1": -chosen.mean(),
            "k3": (chosen.expm1() - chosen).mean(),
            "ess": weights.sum().square() / (weights.square().sum() * len(weights)),
            "largest": chosen.abs().max(),
            "worst": torch.stack(torch.unravel_index(order, gap.shape), -1),
            "cause": _find_cause(first, second, both),
        }
    )  # pyright: ignore[reportReturnType]


def _find_cause(a: Tensor, b: Tensor, mask: Tensor) -> str:
    """Return the first cause that explains the difference of all tokens."""
    gap = (b - a)[mask]
    if gap.abs().max() < _EXACT:
        return "none"
    for early, late in ((slice(None, -1), slice(1, None)), (slice(1, None), slice(None, -1))):
        both = mask[..., early] & mask[..., late]
        if both.any() and (a[..., early] - b[..., late])[both].abs().max() < _EXACT:
            return "shift by one"
    # Renormalized over fewer tokens, each kept token is likelier.
    if gap.min() > -_EXACT:
        return "truncation"
    # Rounding has both signs, whatever the log-prob.
    if gap.abs().max() < _ROUNDED and gap.mean().abs() < 3 * gap.std() / len(gap) ** 0.5:
        return "dtype"
    # A lower temperature makes likely tokens likelier and others less likely; a higher one does the opposite.
    among = torch.corrcoef(torch.stack([a[mask], b[mask], gap]))
    return "temperature" if among[0, 1] > 0.8 and among[0, 2].abs() > 0.4 else "unknown"
