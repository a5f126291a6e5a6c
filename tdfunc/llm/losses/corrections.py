"""Corrections for tokens that were drawn from another distribution than the one that a trainer scores them under.

An engine's log-probs differ from a trainer's by their kernels, by their precision, or by the age of their weights:
`tdfunc.llm.scoring.compare` measures it. The ratio is exp(trainer - engine): of each token, of a whole response
(`level="sequence"`, the product over its tokens), or the geometric mean over its tokens (`level="geometric"`). Weights
multiply the terms of tokens in a loss (`losses.grpo(..., weights=)`); a rejection is a smaller mask, so that a mean no
longer counts what it leaves out. Results are constants: no gradient flows through them.

*B any batch dimensions, T positions.
"""

import torch
from torch import Tensor

from tdfunc.llm.losses.streams import Level, clean, log_ratio


def truncated_is(
    log_probs: Tensor, behaviour: Tensor, mask: Tensor, *, level: Level = "token", low: float = 0.0, high: float = 2.0
) -> Tensor:
    """Return importance weights that are cut at limits (TIS).

    Args:
        log_probs: The log-probs of the tokens under the trainer, before its update.
        behaviour: Those under the engine that drew them.
        mask: True at the tokens of the responses.
        level: Of a token, a response, or the geometric mean of a response.
        low: The least weight.
        high: The greatest weight.

    Shapes:
        (*B, T) gives (*B, T), 0 where the mask is False; all tokens of a row have one weight unless `level` is "token".

    Raises:
        LeafMismatchError: The shapes differ.
        ValueError: `level` is unknown.

    Source:
        Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).

    Examples:
        >>> new, old, mask = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -3.0]]), torch.ones(1, 2)
        >>> truncated_is(new, old, mask)
        tensor([[1.6487, 2.0000]])
    """
    return _weights("truncated_is", log_probs, behaviour, mask, level).clamp(low, high) * mask.bool()


def masked_is(
    log_probs: Tensor, behaviour: Tensor, mask: Tensor, *, level: Level = "token", low: float = 0.5, high: float = 5.0
) -> Tensor:
    """Return importance weights that are 0 outside of limits (MIS, IcePop).

    What is left out still counts in the mean of a loss; with `reject` it does not.

    Args:
        log_probs: The log-probs of the tokens under the trainer, before its update.
        behaviour: Those under the engine that drew them.
        mask: True at the tokens of the responses.
        level: Of a token, a response, or the geometric mean of a response.
        low: The least weight that is kept.
        high: The greatest weight that is kept.

    Shapes:
        (*B, T) gives (*B, T), 0 where the mask is False.

    Raises:
        LeafMismatchError: The shapes differ.
        ValueError: `level` is unknown.

    Source:
        Liu et al., "When Speed Kills Stability" (2025); Zhao et al., "Small Leak Can Sink a Great Ship: IcePop" (2025).

    Examples:
        >>> new, old, mask = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -3.0]]), torch.ones(1, 2)
        >>> masked_is(new, old, mask)
        tensor([[1.6487, 0.0000]])
    """
    weights = _weights("masked_is", log_probs, behaviour, mask, level)
    return torch.where((weights >= low) & (weights <= high), weights, 0)


def reject(
    log_probs: Tensor, behaviour: Tensor, mask: Tensor, *, low: float, high: float, level: Level = "geometric"
) -> Tensor:
    """Return the mask without the responses, or tokens, whose ratio is outside of limits.

    The geometric mean does not grow with the length of a response, as the product does: limits such as 0.999 and 1.001
    serve for short and long ones.

    Args:
        log_probs: The log-probs of the tokens under the trainer, before its update.
        behaviour: Those under the engine that drew them.
        mask: True at the tokens of the responses.
        low: The least ratio that is kept.
        high: The greatest ratio that is kept.
        level: Of a token, a response, or the geometric mean of a response.

    Shapes:
        (*B, T) gives a mask (*B, T).

    Raises:
        LeafMismatchError: The shapes differ.
        ValueError: `level` is unknown.

    Source:
        Li et al., "Trust Region Masking for Long-Horizon LLM Reinforcement Learning" (2025).

    Examples:
        >>> new, old = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]), torch.tensor([[-1.1, -1.0], [-3.0, -1.0]])
        >>> reject(new, old, torch.ones(2, 2), low=0.5, high=2.0)
        tensor([[ True,  True],
                [False, False]])
    """
    weights = _weights("reject", log_probs, behaviour, mask, level)
    return mask.bool() & (weights >= low) & (weights <= high)


def _weights(call: str, log_probs: Tensor, behaviour: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return the ratios as a stream, 0 where the mask is False."""
    new = clean(f"{call}: log_probs", log_probs.detach(), mask)
    old = clean(f"{call}: behaviour", behaviour.detach(), mask)
    return torch.where(mask.bool(), log_ratio(new, old, mask, level).exp(), 0)
