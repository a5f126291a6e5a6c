"""Corrections for tokens that were sampled from another distribution than the one that a trainer scores them under.

The log-probs of an engine and a trainer differ because of kernels, precision or stale weights;
`tdfunc.llm.scoring.compare` measures the difference. The importance ratio is exp(trainer - engine). It belongs to a
token, to a complete response (`level="sequence"`, the product over its tokens), or it is the geometric mean over a
response (`level="geometric"`). Weights multiply the terms of tokens in a loss (`losses.grpo(..., weights=)`). A
rejection is a smaller mask, so that rejected tokens do not count in a mean. No gradient flows through the results.

*B any batch dimensions, T positions.
"""

import torch
from torch import Tensor

from tdfunc.core.errors import error
from tdfunc.llm.losses.streams import Level, clean, log_ratio


def truncated_is(
    log_probs: Tensor, behaviour: Tensor, mask: Tensor, *, level: Level = "token", low: float = 0.0, high: float = 2.0
) -> Tensor:
    """Return importance weights, clamped to `[low, high]` (truncated importance sampling, TIS).

    Args:
        log_probs: The log-probs of the tokens under the trainer, before its update.
        behaviour: The log-probs under the engine that sampled the tokens.
        mask: True at the tokens of the responses.
        level: The ratio of each token, the product over a response (`"sequence"`), or the geometric mean over it
            (`"geometric"`).
        low: The smallest weight.
        high: The largest weight.

    Shapes:
        (*B, T) gives (*B, T), 0 where the mask is False. Unless `level` is "token", all tokens of a row have the same
        weight.

    Raises:
        LeafMismatchError: The shapes differ.
        ValueError: `level` is unknown, or `low` is above `high`.

    Source:
        Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).

    Examples:
        >>> new, old, mask = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -3.0]]), torch.ones(1, 2)
        >>> truncated_is(new, old, mask)
        tensor([[1.6487, 2.0000]])
    """
    _check_limits("truncated_is", low, high)
    return _weights("truncated_is", log_probs, behaviour, mask, level).clamp(low, high) * mask.bool()


def masked_is(
    log_probs: Tensor, behaviour: Tensor, mask: Tensor, *, level: Level = "token", low: float = 0.5, high: float = 5.0
) -> Tensor:
    """Return importance weights that are 0 outside `[low, high]` (masked importance sampling, MIS, IcePop).

    Tokens with weight 0 still count in the mean of a loss. Use `reject` to remove them from the mean.

    Args:
        log_probs: The log-probs of the tokens under the trainer, before its update.
        behaviour: The log-probs under the engine that sampled the tokens.
        mask: True at the tokens of the responses.
        level: The ratio of each token, the product over a response (`"sequence"`), or the geometric mean over it
            (`"geometric"`).
        low: The smallest weight that is kept.
        high: The largest weight that is kept.

    Shapes:
        (*B, T) gives (*B, T), 0 where the mask is False.

    Raises:
        LeafMismatchError: The shapes differ.
        ValueError: `level` is unknown, or `low` is above `high`.

    Source:
        Liu et al., "When Speed Kills Stability" (2025); Zhao et al., "Small Leak Can Sink a Great Ship: IcePop" (2025).

    Examples:
        >>> new, old, mask = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -3.0]]), torch.ones(1, 2)
        >>> masked_is(new, old, mask)
        tensor([[1.6487, 0.0000]])
    """
    _check_limits("masked_is", low, high)
    weights = _weights("masked_is", log_probs, behaviour, mask, level)
    # What is not a number is in no range, and stays.
    return torch.where((weights < low) | (weights > high), 0, weights)


def reject(
    log_probs: Tensor, behaviour: Tensor, mask: Tensor, *, low: float, high: float, level: Level = "geometric"
) -> Tensor:
    """Remove responses or tokens from the mask if their importance ratio is outside `[low, high]`.

    Unlike the product, the geometric mean does not grow with the length of a response. The same limits, such as 0.999
    and 1.001, are suitable for short and long responses.

    Args:
        log_probs: The log-probs of the tokens under the trainer, before its update.
        behaviour: The log-probs under the engine that sampled the tokens.
        mask: True at the tokens of the responses.
        low: The smallest ratio that is kept.
        high: The largest ratio that is kept.
        level: The ratio of each token, the product over a response (`"sequence"`), or the geometric mean over it
            (`"geometric"`).

    Shapes:
        (*B, T) gives a mask (*B, T).

    Raises:
        LeafMismatchError: The shapes differ.
        ValueError: `level` is unknown, or `low` is above `high`.

    Source:
        Li et al., "Trust Region Masking for Long-Horizon LLM Reinforcement Learning" (2025).

    Examples:
        >>> new, old = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]), torch.tensor([[-1.1, -1.0], [-3.0, -1.0]])
        >>> reject(new, old, torch.ones(2, 2), low=0.5, high=2.0)
        tensor([[ True,  True],
                [False, False]])
    """
    _check_limits("reject", low, high)
    weights = _weights("reject", log_probs, behaviour, mask, level)
    return mask.bool() & (weights >= low) & (weights <= high)


def _check_limits(call: str, low: float, high: float) -> None:
    """Raise unless a ratio can be between the limits; between others there is none, and nothing would be trained."""
    if not low <= high:
        raise error(ValueError, f"{call}: low is above high.", got=f"low={low}, high={high}")


def _weights(call: str, log_probs: Tensor, behaviour: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return the ratios as a stream, 0 where the mask is False."""
    new = clean(f"{call}: log_probs", log_probs.detach(), mask)
    old = clean(f"{call}: behaviour", behaviour.detach(), mask)
    return torch.where(mask.bool(), log_ratio(new, old, mask, level).exp(), 0)
