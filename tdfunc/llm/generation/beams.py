"""Beam search over the decoding loop: the responses whose log-prob, over their length to a power, is greatest.

B prompts, W beams of a prompt, C candidates for the next beams, T positions, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdfunc.llm.generation.decode import Stop, read_prompts, read_tokens, seen_in, select
from tdfunc.llm.generation.options import GenerationOptions
from tdfunc.llm.generation.sampling import penalize

# The score of a missing beam, as in transformers.
_NONE = -1e9


class _Finished(NamedTuple):
    """The best responses that have ended.

    Attributes:
        tokens: The ids (B, W, T).
        lengths: The numbers of tokens (B, W).
        scores: The scores (B, W), in descending order.
        stopped: True for responses that a token or a text ended, and not the length (B, W).
        real: True where there is a response (B, W).
    """

    tokens: Tensor
    lengths: Tensor
    scores: Tensor
    stopped: Tensor
    real: Tensor


class Beams(NamedTuple):
    """The responses to each prompt, the best first, and True for each that a token or a text ended."""

    tokens: list[list[Tensor]]
    stopped: list[list[bool]]


def search(
    model: Any,
    ids_BT: Tensor,
    mask_BT: Tensor | None,
    options: GenerationOptions,
    stop: Stop,
    *,
    cached: bool,
    tick: Callable[[int], object] = lambda done: None,
) -> Beams:
    """Return the best responses to prompts that are padded at the left.

    `tick` is called with the number of steps that are done, `max_new_tokens` of them in all.

    Source:
        `transformers.GenerationMixin._beam_search`, which has the same results.
    """
    width = options.num_beams
    limit = options.max_new_tokens or 0
    count = ids_BT.shape[0]
    device = ids_BT.device
    tails = stop.tails(ids_BT, mask_BT)
    spread = torch.arange(count, device=device).repeat_interleave(width)
    logits, context = read_prompts(model, ids_BT, mask_BT, cached=cached)
    seen = None
    if options.repetition_penalty != 1.0:
        seen = seen_in(logits, ids_BT, mask_BT)
    logits = logits[spread]
    context = select(context, spread)
    seen = None if seen is None else seen[spread]
    size = logits.shape[-1]
    wide = torch.promote_types(logits.dtype, torch.float32)
    # So many that, if the best are all ends, enough are left to continue with.
    candidates = min(max(2, 1 + len(stop.ids)) * width, size * width)
    tokens = ids_BT.new_zeros(count, width, limit)
    # All beams are the prompt: the others would repeat the first.
    running = torch.full((count, width), _NONE, dtype=wide, device=device)
    running[:, 0] = 0.0
    none = torch.zeros(count, width, dtype=torch.bool, device=device)
    ended = _Finished(tokens, torch.zeros_like(none, dtype=torch.int64), torch.full_like(running, _NONE), none, none)
    open_B1 = torch.ones(count, 1, dtype=torch.bool, device=device)
    steps = 0
    for step in range(limit):
        tick(1)
        steps += 1
        banned = stop.ids if step < options.min_new_tokens else None
        found = penalize(logits.to(wide).log_softmax(-1), seen, options.repetition_penalty, banned)
        totals = (found.view(count, width, size) + running.unsqueeze(-1)).flatten(1)
        scores, places = totals.topk(candidates)
        parents = places // size
        ids = places % size
        drafts = _gather(tokens, parents)
        drafts[:, :, step] = ids
        stopped = torch.isin(ids, stop.ids) | stop.ended(drafts[:, :, : step + 1], tails)
        hits = torch.ones_like(stopped) if step + 1 == limit else stopped
        ended = _merge(ended, drafts, scores, hits, stopped, step + 1, options, open_B1)
        running, chosen = (scores + hits * _NONE).topk(width)
        tokens = _gather(drafts, chosen)
        parents = parents.gather(1, chosen)
        ids = ids.gather(1, chosen)
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = limit
        else:
            length = step + 1
        worst = torch.where(ended.real, ended.scores.amin(1, keepdim=True), _NONE)
        open_B1 = open_B1 & (running[:, :1] / length**options.length_penalty > worst).any(1, keepdim=True)
        is_full = options.early_stopping is True and bool(ended.real.all())
        if bool(hits.all()) or is_full or not bool(open_B1.any()):
            break
        index = (parents + torch.arange(count, device=device).unsqueeze(1) * width).flatten()
        if seen is None:
            seen = None
        else:
            seen = seen[index].scatter(1, ids.reshape(-1, 1), True)
        logits, context = read_tokens(select(context, index), ids.flatten())
    tick(limit - steps)
    return Beams(
        [
            [row[:length].clone() for row, length in zip(rows, lengths, strict=True)]
            for rows, lengths in zip(ended.tokens, ended.lengths.tolist(), strict=True)
        ],
        ended.stopped.tolist(),
    )


def _merge(
    old: _Finished,
    drafts: Tensor,
    scores: Tensor,
    hits: Tensor,
    stopped: Tensor,
    length: int,
    options: GenerationOptions,
    open_B1: Tensor,
) -> _Finished:
    """Return the best of the responses that had ended and those that end now."""
    width = options.num_beams
    # The candidates beyond the beams are only there to continue with.
    ends = hits & (torch.arange(hits.shape[1], device=hits.device) < width)
    is_full = old.real.all(1, keepdim=True) & (options.early_stopping is True)
    scores = scores / length**options.length_penalty + (~ends | is_full | ~open_B1) * _NONE
    best, places = torch.cat([old.scores, scores], 1).topk(width)
    lengths = torch.full_like(ends, length, dtype=torch.int64)
    return _Finished(
        _gather(torch.cat([old.tokens, drafts], 1), places),
        torch.cat([old.lengths, lengths], 1).gather(1, places),
        best,
        torch.cat([old.stopped, stopped], 1).gather(1, places),
        torch.cat([old.real, ends], 1).gather(1, places),
    )


def _gather(rows: Tensor, places: Tensor) -> Tensor:
    """Return rows (B, C, T) at places (B, W)."""
    return rows.gather(1, places.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
