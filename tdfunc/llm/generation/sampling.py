"""One step of a generation as a function of logits and of a uniform number for each row.

Top-k, top-p and min-p are one threshold for each row: the tokens at or above it are kept. A token is sampled by the
inverse of the distribution function in the order of the ids. The order in which equal logits are sorted therefore has
no effect.

B rows, V vocabulary, K tokens that are left in a row.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tdfunc.llm.generation.options import GenerationOptions


class Choice(NamedTuple):
    """The tokens of one step.

    Attributes:
        ids: The tokens (B,).
        log_probs: The raw log-probs (B,), or None.
        behaviour: The log-probs under the distribution that was sampled from (B,), or None without sampling.
        support: The ids that truncation kept, padded with -1 (B, K); None without truncation.
    """

    ids: Tensor
    log_probs: Tensor | None
    behaviour: Tensor | None
    support: Tensor | None


def choose(raw_BV: Tensor, scores_BV: Tensor, options: GenerationOptions, uniform_B1: Tensor | None) -> Choice:
    """Return the next token of each row.

    Args:
        raw_BV: The model's logits, in float32 or wider.
        scores_BV: The logits to choose from, with or without penalties.
        options: The options.
        uniform_B1: A number in [0, 1) for each row, in float64; None for the most probable token.
    """
    if uniform_B1 is None:
        ids = scores_BV.argmax(-1)
        return Choice(ids, _raw_log_probs(raw_BV, ids, options), None, None)
    heated = scores_BV
    if options.temperature != 1.0:
        heated = scores_BV / options.temperature
    if options.cuts:
        return _choose_kept(raw_BV, heated, options, uniform_B1)
    log_probs = heated.log_softmax(-1)
    ids_B1 = _draw(log_probs, uniform_B1)
    ids = ids_B1.squeeze(-1)
    behaviour = log_probs.gather(-1, ids_B1).squeeze(-1)
    # Nothing changed the logits: both distributions are one.
    if heated is raw_BV and options.logprobs:
        return Choice(ids, behaviour, behaviour, None)
    return Choice(ids, _raw_log_probs(raw_BV, ids, options), behaviour, None)


def _choose_kept(raw_BV: Tensor, heated_BV: Tensor, options: GenerationOptions, uniform_B1: Tensor) -> Choice:
    """Return the next token of each row, among the tokens that truncation keeps."""
    support = _left(heated_BV, threshold(heated_BV, options))
    logits_BK = torch.where(support < 0, -math.inf, heated_BV.gather(-1, support.clamp(min=0)))
    log_probs = logits_BK.log_softmax(-1)
    place = _draw(log_probs, uniform_B1)
    ids = support.gather(-1, place).squeeze(-1)
    behaviour = log_probs.gather(-1, place).squeeze(-1)
    # A row without truncation has no entries.
    is_whole = (support[:, -1:] >= 0) & (support.shape[1] == raw_BV.shape[1])
    support = torch.where(is_whole, -1, support)
    return Choice(ids, _raw_log_probs(raw_BV, ids, options), behaviour, support)


def threshold(heated_BV: Tensor, options: GenerationOptions) -> Tensor:
    """Return the smallest logit (B, 1) that top-k, then top-p, then min-p keep; equal logits are kept together."""
    ordered = heated_BV
    size = heated_BV.shape[-1]
    least = heated_BV.new_full((heated_BV.shape[0], 1), -math.inf)
    if options.top_k is not None:
        ordered = heated_BV.topk(min(options.top_k, size)).values
        if options.top_k < size:
            least = ordered[:, -1:]
    elif options.top_p is not None:
        ordered = heated_BV.sort(-1, descending=True).values
    if options.top_p is not None:
        probs = ordered.softmax(-1)
        # A token stays if those before it hold less than top_p.
        count = (probs.cumsum(-1) - probs < options.top_p).sum(-1, keepdim=True)
        last_kept = ordered.gather(-1, (count - 1).clamp(min=0))
        least = torch.where(count < size, last_kept, least)
    if options.min_p is not None:
        largest = heated_BV.amax(-1, keepdim=True)
        least = torch.maximum(least, largest + math.log(options.min_p))
    return least


def penalize(scores_BV: Tensor, seen_BV: Tensor | None, penalty: float, banned: Tensor | None) -> Tensor:
    """Return the logits with the tokens of the rows made less probable, and the banned ids impossible.

    Source:
        Keskar et al., "CTRL: a conditional transformer language model for controllable generation" (2019), section 4.1,
        as in transformers.
    """
    if seen_BV is not None:
        lower = torch.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty)
        scores_BV = torch.where(seen_BV, lower, scores_BV)
    if banned is None:
        return scores_BV
    # Ends may be outside of the vocabulary.
    ids = torch.arange(scores_BV.shape[-1], device=banned.device)
    return scores_BV.masked_fill(torch.isin(ids, banned), -math.inf)


def _raw_log_probs(raw_BV: Tensor, ids_B: Tensor, options: GenerationOptions) -> Tensor | None:
    """Return the log-probs of tokens under the model itself (B,), if the options ask for log-probs."""
    if not options.logprobs:
        return None
    return raw_BV.gather(-1, ids_B.unsqueeze(-1)).squeeze(-1) - raw_BV.logsumexp(-1)


def _draw(log_probs_BK: Tensor, uniform_B1: Tensor) -> Tensor:
    """Return a place (B, 1) in each row, with the probability that the row gives it."""
    sums = log_probs_BK.exp().cumsum(-1, dtype=torch.float64)
    places = torch.searchsorted(sums, uniform_B1 * sums[:, -1:], right=True)
    # Beyond the last place only where a probability is NaN.
    return places.clamp(max=sums.shape[-1] - 1)


def _left(heated_BV: Tensor, least_B1: Tensor) -> Tensor:
    """Return the ids at or above the threshold of each row in ascending order, then -1 (B, K)."""
    # NaN is kept, so that the log-probs show it. Banned ids are left out, even without truncation.
    kept = ~((heated_BV < least_B1) | (heated_BV == -math.inf))
    counts = kept.sum(-1)
    rows, ids = kept.nonzero(as_tuple=True)
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(ids), device=ids.device) - starts[rows]
    table = ids.new_full((kept.shape[0], int(counts.max())), -1)
    table[rows, place] = ids
    return table
