"""Supervised fine-tuning on given responses.

*B any batch dimensions, T positions.
"""

import torch.nn.functional as F
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.llm.losses.output import Loss
from tdfunc.llm.losses.streams import Normalize, clean, mean, row_mean, row_sums, spread


def sft(log_probs: Tensor, mask: Tensor, *, weights: Tensor | None = None, normalize: Normalize = "token") -> Loss:
    """Return the negative log-likelihood of tokens, in nats.

    Use `weights=log_probs.detach().exp()` for dynamic fine-tuning (DFT).

    Args:
        log_probs: The log-prob of each token.
        mask: True at the tokens to learn, such as `Masks.all_assistant_mask` or `assistant_masks`. A row's first token
            has no log-prob: `LogProbs.mask` leaves it out of other masks.
        weights: A factor for each token or row, a constant.
        normalize: "token" for the mean over the tokens of the batch, "sequence" for the mean of the rows' means, or a
            number that divides the sum, such as the number of tokens in all micro-batches of a step.

    Returns:
        The loss and its metrics: `nll`, the mean over tokens without weights, and `tokens`.

    Shapes:
        (*B, T), with `weights` (*B) or (*B, T), give ().

    Raises:
        LeafMismatchError: Shapes differ.
        ValueError: `normalize` is unknown.

    Examples:
        >>> sft(torch.tensor([[-1.0, -3.0, 0.0]]), torch.tensor([[True, True, False]])).loss
        tensor(2.)
    """
    values = clean("sft: log_probs", log_probs, mask)
    metrics = {"nll": -mean(values.detach(), mask), "tokens": mask.bool().sum()}
    if weights is not None:
        values = values * spread("sft: weights", weights, mask).detach()
    return Loss(mean(-values, mask, normalize), TensorCollection._open(metrics))  # pyright: ignore[reportArgumentType]


def minor_sft(
    log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, beta: float | Tensor = 0.1, average: bool = True
) -> Loss:
    """Return -log sigmoid(beta (log_probs - ref_log_probs)) of rows; learning slows down far from the reference.

    Args:
        log_probs: The log-prob of each token.
        ref_log_probs: The log-probs under the model before fine-tuning.
        mask: True at the tokens to learn.
        beta: The rate at which learning slows down.
        average: Average the log-prob over the tokens of a row; otherwise it is the sum.

    Returns:
        The loss, a mean over rows, in which a row without tokens counts as 0. The metrics are `nll`, the mean over
        tokens, and `tokens`.

    Shapes:
        (*B, T) gives ().

    Raises:
        LeafMismatchError: Shapes differ.

    Source:
        Xie et al., "Minor SFT Loss for LLM Fine-Tune" (2024), as in `torchrl.objectives.llm.SFTLoss`.

    Examples:
        >>> log_probs, mask = torch.tensor([[-1.0, -3.0]]), torch.ones(1, 2)
        >>> minor_sft(log_probs, log_probs, mask).loss
        tensor(0.6931)
    """
    new = clean("minor_sft: log_probs", log_probs, mask)
    ref = clean("minor_sft: ref_log_probs", ref_log_probs, mask).detach()
    rows = -F.logsigmoid(beta * row_sums(new - ref, mask, average=average))
    metrics = {"nll": -mean(new.detach(), mask), "tokens": mask.bool().sum()}
    loss = row_mean(rows * mask.bool().any(-1))
    return Loss(loss, TensorCollection._open(metrics))  # pyright: ignore[reportArgumentType]
