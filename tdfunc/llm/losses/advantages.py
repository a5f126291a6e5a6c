"""Advantages: how much better a response, or a token, was than expected.

Rewards of samples are (*B, G): G responses to each prompt, as `num_samples` of generation gives them. A mask leaves out
samples without a reward, whose values may be NaN and whose advantages are 0.

*B any batch dimensions, G samples of a prompt, T positions.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from tdfunc._mixture import widen
from tdfunc.core.errors import LeafMismatchError, check_choice
from tdfunc.llm.losses.streams import clean


def group_normalized(
    rewards: Tensor,
    mask: Tensor | None = None,
    *,
    scale: Literal["group", "batch"] | None = "group",
    eps: float = 1e-4,
) -> Tensor:
    """Return rewards less the mean of their group, divided by a standard deviation.

    Standard deviations are those of a sample (n - 1). A group of equal rewards, or of fewer than two, has advantages
    of 0.

    Args:
        rewards: A reward for each sample.
        mask: True for the samples that have one.
        scale: Divide by the deviation in the group (GRPO) or in the batch, or by none (Dr. GRPO).
        eps: Is added to the deviation.

    Shapes:
        (*B, G) gives (*B, G).

    Raises:
        ValueError: `scale` is unknown.
        LeafMismatchError: The mask has another shape.

    Source:
        Shao et al., "DeepSeekMath" (2024); Liu et al., "Understanding R1-Zero-Like Training" (2025) for no scale.

    Examples:
        >>> group_normalized(torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, 5.0]]))
        tensor([[-0.9999,  0.0000,  0.9999],
                [ 0.0000,  0.0000,  0.0000]])
    """
    check_choice("group_normalized: scale", scale, ("group", "batch", None))
    rewards, mask = _read("group_normalized", rewards, mask)
    centred = _centred(rewards, mask, -1)
    if scale is None:
        return centred
    if scale == "group":
        return centred / (_deviation(centred, mask, -1) + eps)
    return centred / (_deviation(_centred(rewards, mask), mask) + eps)


def leave_one_out(rewards: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return rewards less the mean of the other samples of their group: RLOO's baseline, without bias.

    A sample without others has the advantage 0.

    Args:
        rewards: A reward for each sample.
        mask: True for the samples that have one.

    Shapes:
        (*B, G) gives (*B, G).

    Raises:
        LeafMismatchError: The mask has another shape.

    Source:
        Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization" (2024).

    Examples:
        >>> leave_one_out(torch.tensor([[0.0, 1.0, 5.0]]))
        tensor([[-3.0000, -1.5000,  4.5000]])
    """
    rewards, mask = _read("leave_one_out", rewards, mask)
    others = mask.sum(-1, keepdim=True) - 1
    centred = _centred(rewards, mask, -1)
    baseline = (centred.sum(-1, keepdim=True) - centred) / others.clamp(min=1)
    return torch.where(mask & (others > 0), centred - baseline, 0)


def batch_normalized(values: Tensor, mask: Tensor | None = None, *, eps: float = 1e-4) -> Tensor:
    """Return values less the mean of all of them, divided by their standard deviation.

    Applied to `mc_returns` these are the advantages of REINFORCE++; applied to `group_normalized(..., scale=None)`
    those of its variant with a baseline.

    Args:
        values: Rewards of samples, or returns of tokens.
        mask: True for those that count; elsewhere the result is 0.
        eps: Is added to the deviation.

    Shapes:
        Any shape, which is that of the result.

    Raises:
        LeafMismatchError: The mask has another shape.

    Source:
        Hu et al., "REINFORCE++" (2025).

    Examples:
        >>> batch_normalized(torch.tensor([1.0, 2.0, 3.0]))
        tensor([-0.9999,  0.0000,  0.9999])
    """
    values, mask = _read("batch_normalized", values, mask)
    centred = _centred(values, mask)
    return centred / (_deviation(centred, mask) + eps)


def penalized_rewards(rewards: Tensor, penalty: Tensor, mask: Tensor) -> Tensor:
    """Return a reward for each token: minus its penalty, and at the last token of a row the reward of the row.

    Args:
        rewards: A reward for each row.
        penalty: Such as a coefficient times `divergences.k1` of the policy from its reference.
        mask: True at the tokens of the responses.

    Shapes:
        (*B), (*B, T) and (*B, T) give (*B, T); a row without tokens has no reward.

    Raises:
        LeafMismatchError: The shapes are not these.

    Source:
        Stiennon et al., "Learning to summarize from human feedback" (2020); Hu et al., "REINFORCE++" (2025).

    Examples:
        >>> penalty = torch.full((1, 4), 0.25)
        >>> penalized_rewards(torch.tensor([1.0]), penalty, torch.tensor([[False, True, True, False]]))
        tensor([[ 0.0000, -0.2500,  0.7500,  0.0000]])
    """
    if rewards.shape != mask.shape[:-1]:
        raise LeafMismatchError(
            "penalized_rewards: there must be a reward for each row.",
            expected=list(mask.shape[:-1]),
            got=list(rewards.shape),
        )
    mask = mask.bool()
    later = mask.flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask & (later == 1), widen(rewards).unsqueeze(-1), 0) - clean(
        "penalized_rewards: penalty", penalty, mask
    )


def mc_returns(rewards: Tensor, mask: Tensor, *, gamma: float | Tensor = 1.0) -> Tensor:
    """Return the Monte Carlo return of each token: the discounted sum of its reward and of those after it.

    Only tokens under the mask discount: the tokens of a tool between two turns do not.

    Args:
        rewards: A reward for each token, such as from `penalized_rewards`.
        mask: True at the tokens of the responses; elsewhere rewards do not count, and the result is 0.
        gamma: The discount of a token.

    Shapes:
        (*B, T) gives (*B, T).

    Raises:
        LeafMismatchError: The mask has another shape.

    Examples:
        >>> rewards, mask = torch.tensor([[0.0, 0.0, 9.0, 1.0]]), torch.tensor([[True, True, False, True]])
        >>> mc_returns(rewards, mask, gamma=0.5)
        tensor([[0.2500, 0.5000, 0.0000, 1.0000]])
    """
    total = clean("mc_returns: rewards", rewards, mask)
    mask = mask.bool()
    factor = torch.where(mask, gamma, torch.ones_like(total))
    # After each round `total` covers twice as many positions, and `factor` is their discount.
    shift = 1
    while shift < total.shape[-1]:
        total = total + factor * pad(total[..., shift:], (0, shift))
        factor = factor * pad(factor[..., shift:], (0, shift))
        shift *= 2
    return torch.where(mask, total, 0)


def _read(call: str, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()
    return clean(f"{call}: the values", values, mask), mask


def _count(mask: Tensor, dim: int | None = None, *, less: int = 0) -> Tensor:
    """Return the number of True, at least 1, after `less` are taken off."""
    number = mask.sum() if dim is None else mask.sum(dim, keepdim=True)
    return (number - less).clamp(min=1)


def _centred(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return values less their mean; 0 where the mask is False."""
    # The second round takes away the rounding of the first mean, so that equal values give 0.
    for _ in range(2):
        total = values.sum() if dim is None else values.sum(dim, keepdim=True)
        values = torch.where(mask, values - total / _count(mask, dim), 0)
    return values


def _deviation(centred: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    squares = centred.square()
    total = squares.sum() if dim is None else squares.sum(dim, keepdim=True)
    return (total / _count(mask, dim, less=1)).sqrt()
