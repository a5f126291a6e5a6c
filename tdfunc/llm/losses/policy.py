"""Policy gradients from tokens' log-probs: one core, and the losses of the literature as calls of it.

*B any batch dimensions, T positions.
"""

from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import check_choice, error
from tdfunc.llm.losses.divergences import k1, k2, k3
from tdfunc.llm.losses.output import Loss
from tdfunc.llm.losses.streams import MAX_LOG_RATIO, Level, Normalize, clean, effective_share, log_ratio, mean, spread
from tdfunc.mixture import widen

if TYPE_CHECKING:
    from typing_extensions import Unpack

ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


class PolicyOptions(TypedDict, total=False):
    """The options of `policy_gradient` that every policy loss accepts."""

    dual_clip: float | None
    weights: Tensor | None
    ref_log_probs: Tensor | None
    kl_coef: float | Tensor
    kl: Literal["k1", "k2", "k3"]
    kl_weighted: bool
    entropy: Tensor | None
    entropy_coef: float | Tensor


def policy_gradient(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    ratio: Level = "token",
    clip: tuple[float | Tensor, float | Tensor] | None = (0.2, 0.2),
    surrogate: Literal["clipped", "weighted"] = "clipped",
    normalize: Normalize = "token",
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float | Tensor = 0.0,
    kl: Literal["k1", "k2", "k3"] = "k3",
    kl_weighted: bool = False,
    entropy: Tensor | None = None,
    entropy_coef: float | Tensor = 0.0,
) -> Loss:
    """Return the loss of a policy on responses that were sampled from an older policy.

    With r the ratio exp(log_probs - old_log_probs) and A the advantage, the surrogate of a token is
    min(r A, clip(r) A), or clip(r) A log_probs with a constant clip(r). The loss is minus the mean surrogate, plus
    `kl_coef` times the mean divergence from the reference, minus `entropy_coef` times the mean entropy. Gradients flow
    only through `log_probs` and `entropy`. A row without tokens counts as 0.

    Args:
        log_probs: The log-prob of each token under the policy.
        advantages: The advantage of each row or of each token.
        mask: True at the tokens that count.
        old_log_probs: The log-probs under the policy that sampled the tokens. Without them the ratio is 1.
        ratio: The ratio of each token, of a complete row (the product over its tokens), or the geometric mean over a
            row.
        clip: The clip range of the ratio, as distances below and above 1; None for no clipping.
        surrogate: "clipped" as in PPO, or "weighted" as in CISPO, where clipped tokens still have a gradient.
        normalize: "token" for the mean over the tokens of the batch, "sequence" for the mean of the rows' means, or a
            number that divides the sum, such as the number of tokens in all micro-batches of a step.
        dual_clip: The largest ratio for negative advantages, above 1.
        weights: A factor for the surrogate of each token or row, for example from `corrections.truncated_is`.
        ref_log_probs: The log-probs under a reference model.
        kl_coef: The weight of the divergence from the reference.
        kl: The estimate of the divergence, from `tdfunc.llm.losses.divergences`.
        kl_weighted: Multiply the estimate by the ratio, which makes the gradient of k1 and k3 unbiased.
        entropy: The entropy of each token's distribution.
        entropy_coef: The weight of the entropy.

    Returns:
        The loss and its metrics: `policy_loss` (the term of the surrogate), `clip_ratio` (the share of tokens whose
        ratio is clipped: `low_mean`, `high_mean`, `region_mean`), `kl_approx` (from the older policy, by k3), `ess`
        (the effective sample size under the ratios, as a share of the tokens) and `tokens`. `kl` and `entropy` are
        there if `ref_log_probs` and `entropy` are given.

    Shapes:
        Log-probs, `mask` and `entropy` are (*B, T), `advantages` and `weights` (*B) or (*B, T); the loss is ().

    Raises:
        LeafMismatchError: Shapes differ.
        ValueError: An option is unknown, `dual_clip` is not above 1, or `kl_coef` or `entropy_coef` is given without
            `ref_log_probs` or `entropy`.

    Source:
        Schulman et al., "Proximal Policy Optimization" (2017); Ye et al., "Mastering Complex Control in MOBA Games"
        (2020) for `dual_clip`.

    Examples:
        >>> log_probs = torch.tensor([[-1.0, -2.0], [-1.0, 0.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> loss, metrics = policy_gradient(log_probs, torch.tensor([1.0, -1.0]), mask)
        >>> loss, metrics["ess"]
        (tensor(-0.3333), tensor(1.))
    """
    check_choice("policy_gradient: surrogate", surrogate, ("clipped", "weighted"))
    check_choice("policy_gradient: kl", kl, ESTIMATORS)
    if dual_clip is not None and (dual_clip <= 1 or surrogate != "clipped"):
        what = "policy_gradient: dual_clip must be a ratio above 1, such as 3, for the clipped surrogate."
        raise error(ValueError, what, got=f"dual_clip={dual_clip}, surrogate={surrogate!r}")
    _check_coefficient("kl_coef", kl_coef, ref_log_probs, "ref_log_probs")
    _check_coefficient("entropy_coef", entropy_coef, entropy, "entropy")
    new = clean("policy_gradient: log_probs", log_probs, mask)
    old = new
    if old_log_probs is not None:
        old = clean("policy_gradient: old_log_probs", old_log_probs, mask)
    gain = spread("policy_gradient: advantages", advantages, mask).detach()
    log_share = log_ratio(new, old.detach(), mask, ratio)
    share = log_share.exp()
    limited = share
    if clip is not None:
        # 1 plus a small distance of 16 bits is 1.
        clip = (_wide(clip[0]), _wide(clip[1]))
        limited = share.clamp(min=1 - clip[0]).clamp(max=1 + clip[1])
    if surrogate == "weighted":
        value = limited.detach() * gain * new
    else:
        value = torch.minimum(share * gain, limited * gain)
    if dual_clip is not None:
        value = torch.where(gain < 0, torch.maximum(value, dual_clip * gain), value)
    if weights is not None:
        value = value * spread("policy_gradient: weights", weights, mask).detach()
    policy_loss = mean(-value, mask, normalize)
    loss = policy_loss
    # Any: tensors and trees of these.
    metrics: dict[str, Any] = {"policy_loss": policy_loss.detach()}
    if ref_log_probs is not None:
        ref = clean("policy_gradient: ref_log_probs", ref_log_probs, mask).detach()
        divergence = ESTIMATORS[kl](new, ref)
        metrics["kl"] = mean(divergence.detach(), mask)
        if kl_weighted and kl == "k3" and ratio == "token":
            divergence = _weigh_k3(new, ref, log_share)
        elif kl_weighted:
            divergence = divergence * share
        loss = loss + kl_coef * mean(divergence, mask, normalize)
    if entropy is not None:
        disorder = clean("policy_gradient: entropy", entropy, mask)
        metrics["entropy"] = mean(disorder.detach(), mask)
        loss = loss - entropy_coef * mean(disorder, mask, normalize)
    metrics |= _describe(share.detach(), gain, mask.bool(), clip, either_sign=surrogate == "weighted")
    metrics["kl_approx"] = mean(k3(old.detach(), new.detach()), mask)
    return Loss(loss, TensorCollection._open(metrics))  # pyright: ignore[reportArgumentType]


def grpo(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip: tuple[float | Tensor, float | Tensor] | None = (0.2, 0.2),
    **options: "Unpack[PolicyOptions]",
) -> Loss:
    """Return GRPO's loss: token-level ratios, averaged over each row and then over the rows.

    A token of a long response counts less than a token of a short response. `dr_grpo` and `dapo` weigh all tokens
    equally.

    Args:
        log_probs: The log-prob of each token under the policy.
        advantages: The flat advantages, for example from `advantages.group_normalized`.
        mask: True at the tokens that count.
        old_log_probs: The log-probs when the tokens were sampled.
        clip: The clip range of the ratio, as distances below and above 1.
        options: As for `policy_gradient`.

    Source:
        Shao et al., "DeepSeekMath" (2024).

    Examples:
        >>> log_probs, mask = torch.full((4, 3), -1.0), torch.ones(4, 3)
        >>> grpo(log_probs, torch.tensor([1.0, -1.0, 0.5, -0.5]), mask).loss
        tensor(0.)
    """
    return policy_gradient(log_probs, advantages, mask, old_log_probs, clip=clip, normalize="sequence", **options)


def dr_grpo(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    max_length: float,
    clip: tuple[float | Tensor, float | Tensor] | None = (0.2, 0.2),
    **options: "Unpack[PolicyOptions]",
) -> Loss:
    """Return Dr. GRPO's loss: token-level ratios, summed and divided by the number of rows times a constant length.

    Args:
        log_probs: The log-prob of each token under the policy.
        advantages: The flat advantages, for example from `advantages.group_normalized(..., scale=None)`.
        mask: True at the tokens that count.
        old_log_probs: The log-probs when the tokens were sampled.
        max_length: The maximum number of tokens of a response, the same for every batch, whatever its padding.
        clip: The clip range of the ratio, as distances below and above 1.
        options: As for `policy_gradient`.

    Source:
        Liu et al., "Understanding R1-Zero-Like Training" (2025).
    """
    # A batch without rows has the sum 0.
    divisor = max(mask.shape[:-1].numel(), 1) * max_length
    return policy_gradient(log_probs, advantages, mask, old_log_probs, clip=clip, normalize=divisor, **options)


def dapo(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip: tuple[float | Tensor, float | Tensor] | None = (0.2, 0.28),
    normalize: Normalize = "token",
    **options: "Unpack[PolicyOptions]",
) -> Loss:
    """Return DAPO's loss: token-level ratios with a wider clip range above 1 than below, averaged over all tokens.

    Args:
        log_probs: The log-prob of each token under the policy.
        advantages: The flat advantages, for example from `advantages.group_normalized`.
        mask: True at the tokens that count; DAPO leaves out responses that reached the maximum length.
        old_log_probs: The log-probs when the tokens were sampled.
        clip: The clip range of the ratio, as distances below and above 1.
        normalize: As for `policy_gradient`; for micro-batches pass the number of tokens in all of them.
        options: As for `policy_gradient`.

    Source:
        Yu et al., "DAPO" (2025).
    """
    return policy_gradient(log_probs, advantages, mask, old_log_probs, clip=clip, normalize=normalize, **options)


def gspo(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip: tuple[float | Tensor, float | Tensor] | None = (3e-4, 4e-4),
    **options: "Unpack[PolicyOptions]",
) -> Loss:
    """Return GSPO's loss: the geometric mean of each row's ratios, averaged over the rows.

    Args:
        log_probs: The log-prob of each token under the policy.
        advantages: The flat advantages, for example from `advantages.group_normalized`.
        mask: True at the tokens that count.
        old_log_probs: The log-probs when the tokens were sampled.
        clip: The clip range of the ratio, as distances below and above 1.
        options: As for `policy_gradient`.

    Source:
        Zheng et al., "Group Sequence Policy Optimization" (2025).
    """
    return policy_gradient(
        log_probs, advantages, mask, old_log_probs, ratio="geometric", clip=clip, normalize="sequence", **options
    )


def cispo(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    max_ratio: float | Tensor = 5.0,
    normalize: Normalize = "token",
    **options: "Unpack[PolicyOptions]",
) -> Loss:
    """Return CISPO's loss: REINFORCE weighted by each token's clipped ratio, a constant.

    Args:
        log_probs: The log-prob of each token under the policy.
        advantages: The flat advantages, for example from `advantages.group_normalized`.
        mask: True at the tokens that count.
        old_log_probs: The log-probs when the tokens were sampled.
        max_ratio: The largest weight of a token (`epsilon_high` of this loss in TRL).
        normalize: As for `policy_gradient`; for micro-batches pass the number of tokens in all of them.
        options: As for `policy_gradient`.

    Source:
        MiniMax, "MiniMax-M1" (2025); Khatri et al., "The Art of Scaling Reinforcement Learning Compute for LLMs"
        (2025).
    """
    return policy_gradient(
        log_probs,
        advantages,
        mask,
        old_log_probs,
        clip=(1.0, max_ratio - 1),
        surrogate="weighted",
        normalize=normalize,
        **options,
    )


def rloo(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip: tuple[float | Tensor, float | Tensor] | None = (0.2, 0.2),
    **options: "Unpack[PolicyOptions]",
) -> Loss:
    """Return RLOO's loss: the ratio of each complete row, averaged over the rows.

    Args:
        log_probs: The log-prob of each token under the policy.
        advantages: The flat advantages, for example from `advantages.leave_one_out`.
        mask: True at the tokens that count.
        old_log_probs: The log-probs when the tokens were sampled.
        clip: The clip range of the ratio, as distances below and above 1.
        options: As for `policy_gradient`.

    Source:
        Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization" (2024).
    """
    return policy_gradient(
        log_probs, advantages, mask, old_log_probs, ratio="sequence", clip=clip, normalize="sequence", **options
    )


def reinforce_pp(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_log_probs: Tensor | None = None,
    *,
    clip: tuple[float | Tensor, float | Tensor] | None = (0.2, 0.2),
    normalize: Normalize = "token",
    **options: "Unpack[PolicyOptions]",
) -> Loss:
    """Return REINFORCE++'s loss: token-level ratios and advantages, averaged over all tokens.

    Args:
        log_probs: The log-prob of each token under the policy.
        advantages: `batch_normalized(mc_returns(penalized_rewards(...)))`, from `tdfunc.llm.losses.advantages`.
        mask: True at the tokens that count.
        old_log_probs: The log-probs when the tokens were sampled.
        clip: The clip range of the ratio, as distances below and above 1.
        normalize: As for `policy_gradient`; for micro-batches pass the number of tokens in all of them.
        options: As for `policy_gradient`.

    Source:
        Hu et al., "REINFORCE++" (2025).
    """
    return policy_gradient(log_probs, advantages, mask, old_log_probs, clip=clip, normalize=normalize, **options)


def _weigh_k3(log_p: Tensor, log_q: Tensor, log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio) k3(log_p, log_q), for the ratio of p to a constant.

    Its derivative by log p is -exp(log_ratio) log(q / p). The derivative of the product is the same as a difference of
    two numbers of the size of q / p, in which nothing is left of it where q / p is large. There the product is written
    as q over the constant, which does not depend on p, minus exp(log_ratio) (1 + log(q / p)).
    """
    gap = widen(log_q) - widen(log_p)
    ratio = log_ratio.exp()
    constant = (log_ratio + gap).detach().clamp(max=2 * MAX_LOG_RATIO).exp()
    is_far = (gap > 1) & (log_ratio < MAX_LOG_RATIO)
    return torch.where(is_far, constant - ratio * (1 + gap), ratio * k3(log_p, log_q))


def _describe(
    share: Tensor,
    gain: Tensor,
    mask: Tensor,
    clip: tuple[float | Tensor, float | Tensor] | None,
    *,
    either_sign: bool,
) -> dict[str, Any]:
    """Return the metrics of ratios; a ratio is clipped if the clip range changes its surrogate."""
    share = torch.where(mask, share, 0)
    found: dict[str, Any] = {"ess": effective_share(share, mask), "tokens": mask.sum()}
    if clip is not None:
        low = mask & (share < 1 - clip[0]) & (either_sign | (gain < 0))
        high = mask & (share > 1 + clip[1]) & (either_sign | (gain > 0))
        parts = {"low_mean": low, "high_mean": high, "region_mean": low | high}
        found["clip_ratio"] = {name: mean(part.to(share.dtype), mask) for name, part in parts.items()}
    return found


def _wide(value: float | Tensor) -> float | Tensor:
    if isinstance(value, Tensor):
        return widen(value)
    return value


def _check_coefficient(name: str, value: float | Tensor, measured: Tensor | None, other: str) -> None:
    """Raise if a coefficient would have no effect."""
    if measured is None and (isinstance(value, Tensor) or value != 0):
        raise error(
            ValueError, f"policy_gradient: {name} has no effect without {other}.", got=f"{name} without {other}"
        )
