"""Beam search over the decoding loop: the responses whose log-prob, over their length to a power, is greatest.

B prompts, W beams of a prompt, C candidates for the next beams, T positions, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdfunc.llm.generation.decode import Stop, add_seen, read_repeated, read_tokens, select
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


class _Running(NamedTuple):
    """The beams that have not ended.

    Attributes:
        tokens: The ids (B, W, T).
        scores: The log-probs (B, W), in descending order.
    """

    tokens: Tensor
    scores: Tensor


class _Candidates(NamedTuple):
    """The most probable beams with one more token, more of them than there are beams.

    Attributes:
        tokens: The ids (B, C, T).
        scores: The log-probs (B, C), in descending order.
        parents: The number of the beam that each continues (B, C).
        ids: The last token of each (B, C).
        stopped: True where a token or a text ends the response (B, C).
        ended: True where it ends, also by its length (B, C).
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    ids: Tensor
    stopped: Tensor
    ended: Tensor


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
    logits, context, seen = read_repeated(model, ids_BT, mask_BT, options, cached=cached, repeats=width)
    wide = torch.promote_types(logits.dtype, torch.float32)
    running, finished = _start(ids_BT, width, limit, wide)
    # True for prompts whose running beams can still become better than the finished ones.
    open_B1 = torch.ones(count, 1, dtype=torch.bool, device=device)
    first_of_prompt = torch.arange(count, device=device).unsqueeze(1) * width
    steps = 0
    for step in range(limit):
        tick(1)
        steps += 1
        banned = stop.ids if step < options.min_new_tokens else None
        log_probs = penalize(logits.to(wide).log_softmax(-1), seen, options.repetition_penalty, banned)
        found = _extend(running, log_probs, step, stop, tails, is_last=step + 1 == limit)
        finished = _merge(finished, found, step + 1, options, open_B1)
        scores, chosen = (found.scores + found.ended * _NONE).topk(width)
        running = _Running(_gather(found.tokens, chosen), scores)
        open_B1 = open_B1 & _can_improve(running, finished, step + 1, options)
        is_full = options.early_stopping is True and bool(finished.real.all())
        if bool(found.ended.all()) or is_full or not bool(open_B1.any()):
            break
        ids = found.ids.gather(1, chosen).flatten()
        index = (found.parents.gather(1, chosen) + first_of_prompt).flatten()
        if seen is not None:
            seen = add_seen(seen[index], ids)
        logits, context = read_tokens(select(context, index), ids)
    tick(limit - steps)
    return _as_beams(finished)


def _start(ids_BT: Tensor, width: int, limit: int, dtype: torch.dtype) -> tuple[_Running, _Finished]:
    """Return the beams before the first token, and no finished responses."""
    shape = (ids_BT.shape[0], width)
    tokens = ids_BT.new_zeros(*shape, limit)
    scores = torch.full(shape, _NONE, dtype=dtype, device=ids_BT.device)
    nothing = torch.zeros(shape, dtype=torch.bool, device=ids_BT.device)
    lengths = torch.zeros_like(nothing, dtype=torch.int64)
    finished = _Finished(tokens, lengths, scores, stopped=nothing, real=nothing)
    # All beams are the prompt: the others would repeat the first.
    scores = scores.clone()
    scores[:, 0] = 0.0
    return _Running(tokens, scores), finished


def _extend(
    running: _Running, log_probs: Tensor, step: int, stop: Stop, tails: list[list[int]], *, is_last: bool
) -> _Candidates:
    """Return the most probable beams with one more token, from the log-probs of the next tokens (B * W, V)."""
    count, width = running.scores.shape
    size = log_probs.shape[-1]
    totals = log_probs.view(count, width, size) + running.scores.unsqueeze(-1)
    # So many that, if the best are all ends, enough are left to continue with.
    candidates = min(max(2, 1 + len(stop.ids)) * width, size * width)
    scores, places = totals.flatten(1).topk(candidates)
    parents = places // size
    ids = places % size
    tokens = _gather(running.tokens, parents)
    tokens[:, :, step] = ids
    stopped = torch.isin(ids, stop.ids) | stop.ended(tokens[:, :, : step + 1], tails)
    ended = torch.ones_like(stopped) if is_last else stopped
    return _Candidates(tokens, scores, parents, ids, stopped, ended)


def _can_improve(running: _Running, finished: _Finished, length: int, options: GenerationOptions) -> Tensor:
    """Return True for prompts whose best running beam may become better than the worst finished response (B, 1)."""
    if options.early_stopping == "never" and options.length_penalty > 0:
        # The score that the beam would have at most, if it were as long as allowed.
        length = options.max_new_tokens or 0
    best = running.scores[:, :1] / length**options.length_penalty
    worst = torch.where(finished.real, finished.scores.amin(1, keepdim=True), _NONE)
    return (best > worst).any(1, keepdim=True)


def _as_beams(finished: _Finished) -> Beams:
    """Return the responses up to their ends."""
    tokens: list[list[Tensor]] = []
    for rows, lengths in zip(finished.tokens, finished.lengths.tolist(), strict=True):
        tokens.append([row[:length].clone() for row, length in zip(rows, lengths, strict=True)])
    return Beams(tokens, finished.stopped.tolist())


def _merge(old: _Finished, found: _Candidates, length: int, options: GenerationOptions, open_B1: Tensor) -> _Finished:
    """Return the best of the responses that had ended and those that end now."""
    width = options.num_beams
    # The candidates beyond the beams are only there to continue with.
    is_beam = torch.arange(found.ended.shape[1], device=found.ended.device) < width
    ends = found.ended & is_beam
    is_full = old.real.all(1, keepdim=True) & (options.early_stopping is True)
    is_refused = ~ends | is_full | ~open_B1
    scores = found.scores / length**options.length_penalty + is_refused * _NONE
    best, places = torch.cat([old.scores, scores], 1).topk(width)
    tokens = torch.cat([old.tokens, found.tokens], 1)
    lengths = torch.cat([old.lengths, torch.full_like(ends, length, dtype=torch.int64)], 1)
    stopped = torch.cat([old.stopped, found.stopped], 1)
    real = torch.cat([old.real, ends], 1)
    return _Finished(
        _gather(tokens, places),
        lengths.gather(1, places),
        best,
        stopped.gather(1, places),
        real.gather(1, places),
    )


def _gather(rows: Tensor, places: Tensor) -> Tensor:
    """Return rows (B, C, T) at places (B, W)."""
    return rows.gather(1, places.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
