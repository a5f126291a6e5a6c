"""Learning from preferences: pairs of a chosen and a rejected response, or single responses with a label.

Pairs have their own dimension of size 2: row 0 is the chosen response, row 1 the rejected response. `tdfunc.llm.score`
returns this layout for a tree of batch size (*B, 2). For two halves of one batch use
`x.view(2, B, T).transpose(0, 1)`.

*B any batch dimensions, T positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, error
from tdfunc.llm.losses.output import Loss
from tdfunc.llm.losses.sft import sft
from tdfunc.llm.losses.streams import clean, log1mexp, row_mean, row_sums


def dpo(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    *,
    beta: float | Tensor = 0.1,
    label_smoothing: float = 0.0,
    average: bool = False,
) -> Loss:
    """Return DPO's loss: -log sigmoid(beta (c - r)) for log-ratios c, r of a pair to the reference.

    Args:
        log_probs: The log-prob of each token.
        ref_log_probs: The log-probs under the reference.
        mask: True at the tokens of the responses.
        beta: The strength of the penalty for leaving the reference.
        label_smoothing: The probability that a label is wrong.
        average: Average the log-ratio over the tokens of a row; otherwise it is the sum.

    Returns:
        The loss, a mean over pairs, in which a pair with an empty row counts as 0. The metrics are `rewards` (`chosen`,
        `rejected`, `margins`, `accuracies`) and `logps` (`chosen`, `rejected`), means over pairs.

    Shapes:
        (*B, 2, T) gives ().

    Raises:
        LeafMismatchError: Shapes differ, or are not pairs.
        ValueError: `label_smoothing` is not a probability.

    Source:
        Rafailov et al., "Direct Preference Optimization" (2023); Mitchell, "A note on DPO with noisy preferences"
        (2023).

    Examples:
        >>> ref, mask = torch.full((1, 2, 3), -1.0), torch.ones(1, 2, 3)
        >>> better = ref + torch.tensor([[[1.0], [0.0]]])
        >>> dpo(ref, ref, mask).loss, dpo(better, ref, mask).loss
        (tensor(0.6931), tensor(0.5544))
    """
    if not 0 <= label_smoothing <= 1:
        raise error(ValueError, "dpo: label_smoothing must be a probability.", got=label_smoothing)
    new, ref, counted = _pairs("dpo", log_probs, mask, ref_log_probs)
    scores = row_sums(new - ref, mask, average=average)
    logits = beta * (scores[..., 0] - scores[..., 1])
    losses = -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)
    return _finish(losses, counted, beta * scores, row_sums(new, mask, average=average))


def ipo(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    *,
    beta: float | Tensor = 0.1,
    average: bool = True,
) -> Loss:
    """Return IPO's loss: (c - r - 1 / (2 beta))**2 for log-ratios c, r of a pair to the reference.

    Args:
        log_probs: The log-prob of each token.
        ref_log_probs: The log-probs under the reference.
        mask: True at the tokens of the responses.
        beta: The strength of the penalty for leaving the reference (tau in the paper).
        average: Average the log-ratio over the tokens of a row, as in the paper's experiments; otherwise it is the sum.

    Returns:
        The loss, a mean over pairs, in which a pair with an empty row counts as 0; and the metrics of `dpo`.

    Shapes:
        (*B, 2, T) gives ().

    Raises:
        LeafMismatchError: Shapes differ, or are not pairs.

    Source:
        Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences" (2023), eq. 17.

    Examples:
        >>> ref, mask = torch.full((1, 2, 3), -1.0), torch.ones(1, 2, 3)
        >>> ipo(ref, ref, mask).loss
        tensor(25.)
    """
    new, ref, counted = _pairs("ipo", log_probs, mask, ref_log_probs)
    scores = row_sums(new - ref, mask, average=average)
    losses = (scores[..., 0] - scores[..., 1] - 1 / (2 * beta)).square()
    return _finish(losses, counted, beta * scores, row_sums(new, mask, average=average))


def simpo(log_probs: Tensor, mask: Tensor, *, beta: float | Tensor = 2.0, gamma: float | Tensor = 1.0) -> Loss:
    """Return SimPO's loss: -log sigmoid(beta (c - r) - gamma) for mean log-probs c, r of a pair, without a reference.

    Args:
        log_probs: The log-prob of each token.
        mask: True at the tokens of the responses.
        beta: The scale of the reward.
        gamma: The target margin of the chosen reward.

    Returns:
        The loss, a mean over pairs, in which a pair with an empty row counts as 0; and the metrics of `dpo`.

    Shapes:
        (*B, 2, T) gives ().

    Raises:
        LeafMismatchError: Shapes differ, or are not pairs.

    Source:
        Meng et al., "SimPO" (2024).

    Examples:
        >>> simpo(torch.full((1, 2, 3), -1.0), torch.ones(1, 2, 3)).loss
        tensor(1.3133)
    """
    new, _, counted = _pairs("simpo", log_probs, mask)
    means = row_sums(new, mask, average=True)
    losses = -F.logsigmoid(beta * (means[..., 0] - means[..., 1]) - gamma)
    return _finish(losses, counted, beta * means, means)


def orpo(log_probs: Tensor, mask: Tensor, *, beta: float | Tensor = 0.1) -> Loss:
    """Return ORPO's loss: the negative log-likelihood of chosen tokens, minus beta log sigmoid of the log-odds ratio.

    The odds of a row are p / (1 - p), with p the exponential of its mean log-prob.

    Args:
        log_probs: The log-prob of each token.
        mask: True at the tokens of the responses.
        beta: The weight of the odds ratio (lambda in the paper).

    Returns:
        The loss, a mean over tokens plus a mean over pairs; a pair with an empty row counts as 0. The metrics are
        those from `dpo`, with `nll` and `log_odds`.

    Shapes:
        (*B, 2, T) gives ().

    Raises:
        LeafMismatchError: Shapes differ, or are not pairs.

    Source:
        Hong et al., "ORPO" (2024). The first term in TRL also counts the tokens of the prompt.

    Examples:
        >>> orpo(torch.full((1, 2, 3), -1.0), torch.ones(1, 2, 3)).loss
        tensor(1.0693)
    """
    new, _, counted = _pairs("orpo", log_probs, mask)
    means = row_sums(new, mask, average=True)
    # A row without tokens has the mean 0, whose odds are infinite.
    p = torch.where(counted.unsqueeze(-1), means, -1)
    odds = p - log1mexp(p)
    log_odds = odds[..., 0] - odds[..., 1]
    # Of all chosen rows, also of those whose rejected row is empty.
    part = sft(log_probs[..., 0, :], mask[..., 0, :])
    found = _finish(-beta * F.logsigmoid(log_odds), counted, beta * means, means)
    extra = {"nll": part.metrics["nll"], "log_odds": row_mean(log_odds.detach() * counted)}
    return Loss(part.loss + found.loss, found.metrics.update(extra))


def kto(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    desirable: Tensor,
    *,
    baseline: Tensor | float = 0.0,
    beta: float | Tensor = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Loss:
    """Return KTO's loss: 1 - sigmoid(beta (c - z)) for desirable responses, 1 - sigmoid(beta (z - c)) for the others.

    c is the log-ratio of a response to the reference, z the baseline.

    Args:
        log_probs: The log-prob of each token.
        ref_log_probs: The log-probs under the reference.
        mask: True at the tokens of the responses.
        desirable: True for desirable rows.
        baseline: The divergence z of the policy from the reference, from `kto_baseline`, a constant.
        beta: The strength of the penalty for leaving the reference.
        desirable_weight: The weight of desirable rows.
        undesirable_weight: The weight of the other rows. Weight times number of rows should be similar for both kinds.

    Returns:
        The loss, a mean over rows, in which a row without tokens counts as 0. The metrics are `rewards` and `logps`
        (`chosen`, `rejected`), means over the desirable and the other rows.

    Shapes:
        Log-probs and mask are (*B, T), `desirable` is (*B), `baseline` and the loss are ().

    Raises:
        LeafMismatchError: Shapes differ.

    Source:
        Ethayarajh et al., "KTO" (2024).

    Examples:
        >>> log_probs, mask = torch.full((2, 3), -1.0), torch.ones(2, 3)
        >>> kto(log_probs, log_probs, mask, torch.tensor([True, False])).loss
        tensor(0.5000)
    """
    new = clean("kto: log_probs", log_probs, mask)
    ref = clean("kto: ref_log_probs", ref_log_probs, mask).detach()
    if desirable.shape != mask.shape[:-1]:
        raise LeafMismatchError(
            "kto: desirable does not have a value for each row.",
            expected=list(mask.shape[:-1]),
            got=list(desirable.shape),
        )
    z = baseline.detach() if isinstance(baseline, Tensor) else baseline
    gaps = row_sums(new - ref, mask, average=False)
    counted = mask.bool().any(-1)
    desirable = desirable.bool()
    # 1 - sigmoid(x) is sigmoid(-x), which is exact where it is small.
    losses = torch.sigmoid(beta * torch.where(desirable, z - gaps, gaps - z))
    losses = torch.where(desirable, desirable_weight * losses, undesirable_weight * losses)
    kinds = {"chosen": counted & desirable, "rejected": counted & ~desirable}
    total = row_sums(new, mask, average=False).detach()
    values = {"rewards": beta * gaps.detach(), "logps": total}
    metrics: dict[str, dict[str, Tensor]] = {}
    for name, rows in values.items():
        metrics[name] = {}
        for kind, among in kinds.items():
            metrics[name][kind] = torch.where(among, rows, 0).sum() / among.sum().clamp(min=1)
    return Loss(row_mean(losses * counted), TensorCollection._open(metrics))  # pyright: ignore[reportArgumentType]


def kto_baseline(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return KTO's estimate of the divergence of a policy from its reference, in nats per response, at least 0.

    No gradient flows through the result.

    Args:
        log_probs: The log-probs of mismatched responses: pair each prompt of a batch with the response of the next.
        ref_log_probs: The log-probs under the reference.
        mask: True at the tokens of the responses.

    Shapes:
        (*B, T) gives ().

    Raises:
        LeafMismatchError: Shapes differ.

    Source:
        Ethayarajh et al., "KTO" (2024), section 4.1.

    Examples:
        >>> kto_baseline(torch.full((2, 3), -1.0), torch.full((2, 3), -1.5), torch.ones(2, 3))
        tensor(1.5000)
    """
    new = clean("kto_baseline: log_probs", log_probs, mask)
    gaps = new - clean("kto_baseline: ref_log_probs", ref_log_probs, mask)
    return row_mean(row_sums(gaps, mask, average=False)).clamp(min=0).detach()


def _pairs(
    call: str, log_probs: Tensor, mask: Tensor, ref_log_probs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return clean log-probs, those under the reference (else 0), and True for pairs whose rows both have tokens."""
    if mask.dim() < 2 or mask.shape[-2] != 2:
        raise LeafMismatchError(
            f"{call}: the mask does not hold pairs, (*B, 2, T): a chosen row and a rejected row.",
            got=list(mask.shape),
            hint="torch.stack([chosen, rejected], -2).",
        )
    counted = mask.bool().any(-1).all(-1)
    # Of a pair with an empty row the other row is not read either: 0 times its infinities would be NaN.
    kept = mask.bool() & counted[..., None, None]
    new = clean(f"{call}: log_probs", log_probs, kept)
    ref = torch.zeros_like(new)
    if ref_log_probs is not None:
        ref = clean(f"{call}: ref_log_probs", ref_log_probs, kept).detach()
    return new, ref, counted


def _finish(losses: Tensor, counted: Tensor, rewards: Tensor, log_probs: Tensor) -> Loss:
    """Return the mean of the losses of pairs, and metrics from the rewards and log-probs (*B, 2) of their rows."""
    rewards = rewards.detach()
    log_probs = log_probs.detach()
    margins = rewards[..., 0] - rewards[..., 1]

    def average(values: Tensor) -> Tensor:
        return (values * counted).sum() / counted.sum().clamp(min=1)

    metrics = {
        "rewards": {
            "chosen": average(rewards[..., 0]),
            "rejected": average(rewards[..., 1]),
            "margins": average(margins),
            "accuracies": average((margins > 0).to(margins.dtype)),
        },
        "logps": {"chosen": average(log_probs[..., 0]), "rejected": average(log_probs[..., 1])},
    }
    return Loss(row_mean(losses * counted), TensorCollection._open(metrics))  # pyright: ignore[reportArgumentType]
