"""Advantages: how much better a response, or a token, was than expected.

Rewards of samples are (*B, G): G responses to each prompt, as generation with `num_samples` returns them. A mask leaves
out samples without a reward; their values may be NaN, and their advantages are 0.

*B any batch dimensions, G samples of a prompt, T positions.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from tdfunc.core.errors import LeafMismatchError, check_choice
from tdfunc.llm.losses.streams import clean
from tdfunc.mixture import widen
from tdfunc.ops.math.squares import root, square_scale


def group_normalized(
    rewards: Tensor,
    mask: Tensor | None = None,
    *,
    scale: Literal["group", "batch"] | None = "group",
    eps: float = 1e-4,
) -> Tensor:
    """Return rewards minus the mean of their group, divided by a standard deviation.

    The divisor is the sample standard deviation (n - 1). If all rewards of a group are equal, or if it has fewer than
    two, its advantages are 0.

    Args:
        rewards: A reward for each sample.
        mask: True for the samples that have one.
        scale: The divisor: the deviation in the group (GRPO) or in the batch, or None for no division (Dr. GRPO).
        eps: A number that is added to the deviation.

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
        return _divided(centred, _deviation(centred, mask, -1) + eps)
    return _divided(centred, _deviation(_centred(rewards, mask), mask) + eps)


def leave_one_out(rewards: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return rewards minus the mean of the other samples of their group: RLOO's unbiased baseline.

    The only sample of a group has the advantage 0.

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
    """Return values minus their mean, divided by their standard deviation.

    With the result of `mc_returns` it gives the advantages of REINFORCE++. With the result of
    `group_normalized(..., scale=None)` it gives the advantages of the variant with a baseline.

    Args:
        values: Rewards of samples, or returns of tokens.
        mask: True for the values that count; elsewhere the result is 0.
        eps: A number that is added to the deviation.

    Shapes:
        The result has the shape of `values`, which may be any shape.

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
    return _divided(centred, _deviation(centred, mask) + eps)


def penalized_rewards(rewards: Tensor, penalty: Tensor, mask: Tensor) -> Tensor:
    """Return a reward for each token: minus its penalty, plus the reward of the row at the row's last token.

    Args:
        rewards: A reward for each row.
        penalty: A penalty for each token, such as a coefficient times `divergences.k1` from a reference.
        mask: True at the tokens of the responses.

    Shapes:
        (*B), (*B, T) and (*B, T) give (*B, T). In a row without tokens the reward is not used.

    Raises:
        LeafMismatchError: The shapes do not fit.

    Source:
        Stiennon et al., "Learning to summarize from human feedback" (2020); Hu et al., "REINFORCE++" (2025).

    Examples:
        >>> penalty = torch.full((1, 4), 0.25)
        >>> penalized_rewards(torch.tensor([1.0]), penalty, torch.tensor([[False, True, True, False]]))
        tensor([[ 0.0000, -0.2500,  0.7500,  0.0000]])
    """
    if rewards.shape != mask.shape[:-1]:
        raise LeafMismatchError(
            "penalized_rewards: there is not one reward for each row.",
            expected=list(mask.shape[:-1]),
            got=list(rewards.shape),
        )
    mask = mask.bool()
    later = mask.flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask & (later == 1), widen(rewards).unsqueeze(-1), 0) - clean(
        "penalized_rewards: penalty", penalty, mask
    )


def mc_returns(rewards: Tensor, mask: Tensor, *, gamma: float | Tensor = 1.0) -> Tensor:
    """Return the Monte Carlo return of each token: the discounted sum of its reward and all later rewards.

    Only tokens where the mask is True are discounted. Tool output between two turns does not discount.

    Args:
        rewards: A reward for each token, for example from `penalized_rewards`.
        mask: True at the tokens of the responses; elsewhere rewards do not count, and the result is 0.
        gamma: The discount factor per token.

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
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    else:
        mask = mask.bool()
    if not values.is_floating_point() and values.shape == mask.shape and values.numel():
        values = _without_offset(values.long(), mask)
    return clean(f"{call}: the values", values, mask), mask


def _without_offset(counts: Tensor, mask: Tensor) -> Tensor:
    """Return counts minus the least of them if float32 would round them; advantages do not depend on it."""
    kept = torch.where(mask, counts, 0)
    is_large = kept.abs().amax() > int(2 / torch.finfo(torch.float32).eps)
    least = torch.where(mask, counts, kept.amax()).amin()
    return counts - torch.where(is_large, least, 0)


def _centred(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return values minus their mean, over all dimensions without `dim`; 0 where the mask is False."""
    count = mask.sum(dim, keepdim=True).clamp(min=1)
    # The second round removes the rounding of the first mean, so that equal values give 0.
    for _ in range(2):
        values = torch.where(mask, values - values.sum(dim, keepdim=True) / count, 0)
    return values


def _deviation(centred: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    count = (mask.sum(dim, keepdim=True) - 1).clamp(min=1)
    if not centred.numel():
        return centred.sum(dim, keepdim=True)
    largest = centred.abs().amax(() if dim is None else dim, keepdim=True)
    scale = square_scale(largest)
    return root((centred / scale).square().sum(dim, keepdim=True) / count) * scale


def _divided(centred: Tensor, divisor: Tensor) -> Tensor:
    """Return centred values over their divisor; without an `eps` the divisor of equal values is 0, as they are."""
    return centred / torch.where(divisor == 0, 1, divisor)
