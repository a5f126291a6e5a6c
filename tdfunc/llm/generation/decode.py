"""The decoding loop: rows of one width, token by token, on the model that `CausalLM.run` binds.

B rows, T positions of the prompts, R of the responses, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdfunc.llm.encoding.encode import CONTEXT
from tdfunc.llm.generation.options import GenerationOptions
from tdfunc.llm.generation.sampling import Choice, choose, penalize
from tdfunc.llm.rows.packing import pad_rows
from tdfunc.llm.scoring.model import new_cache, next_logits

# The number of uniform numbers of a row that are drawn at a time.
BLOCK = 256


class Decoded(NamedTuple):
    """The responses to rows of prompts.

    Attributes:
        steps: The choices of each step; a row uses as many as its length.
        lengths: The number of tokens of each row, the one that ended it included.
        stopped: True for rows that a token or a text ended.
    """

    steps: list[Choice]
    lengths: list[int]
    stopped: list[bool]


class Stop(NamedTuple):
    """The ends of a response.

    Attributes:
        ids: The tokens that end it (S,), on the device of the rows.
        texts: The texts that end it.
        decode: The function from tokens, and those in front of them, to texts; None without texts.
    """

    ids: Tensor
    texts: tuple[str, ...]
    decode: Callable[[list[list[int]], list[list[int]]], list[str]] | None

    def tails(self, ids_BT: Tensor, mask_BT: Tensor | None) -> list[list[int]]:
        """Return the last tokens of prompts that are padded at the left, as `ended` takes them."""
        if self.decode is None:
            return []
        valid = torch.ones_like(ids_BT) if mask_BT is None else mask_BT
        last_ids = ids_BT[:, -CONTEXT:]
        is_token = valid[:, -CONTEXT:].bool()
        return [ids[real].tolist() for ids, real in zip(last_ids, is_token, strict=True)]

    def ended(self, tokens: Tensor, tails: list[list[int]]) -> Tensor:
        """Return True for rows of tokens (*B, T) whose text has an end.

        Args:
            tokens: The responses; those to one prompt are next to each other.
            tails: The last tokens of each prompt.
        """
        if self.decode is None:
            return torch.zeros(tokens.shape[:-1], dtype=torch.bool, device=tokens.device)
        rows = tokens.flatten(0, -2).tolist()
        repeats = len(rows) // len(tails)
        texts = self.decode([tail for tail in tails for _ in range(repeats)], rows)
        found = [self._has_end(text) for text in texts]
        return torch.tensor(found, device=tokens.device).reshape(tokens.shape[:-1])

    def _has_end(self, text: str) -> bool:
        return any([end in text for end in self.texts])


class Context(NamedTuple):
    """The rows that a model has read, and its cache of them.

    Attributes:
        model: The model, bound to its parameters.
        cache: Its cache, or None to read all tokens at each step.
        ids: All tokens (B, T); with a cache None.
        mask: True at tokens, False at the pads of the prompts (B, T); None without pads.
        last: The position of the last token of each row (B, 1).
    """

    model: Any
    cache: Any
    ids: Tensor | None
    mask: Tensor | None
    last: Tensor


def read_prompts(model: Any, ids_BT: Tensor, mask_BT: Tensor | None, *, cached: bool) -> tuple[Tensor, Context]:
    """Return the logits (B, V) that follow prompts, and the context for the next tokens."""
    cache = None
    if cached:
        cache = new_cache(model)
    if mask_BT is None:
        valid = torch.ones_like(ids_BT)
    else:
        valid = mask_BT.to(torch.int64)
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    # Not every family counts from 0 (RoBERTa): without pads and a cache its own positions are right.
    is_plain = cache is None and mask_BT is None
    logits = next_logits(model, ids_BT, mask_BT, None if is_plain else positions, cache)
    ids = None if cached else ids_BT
    return logits, Context(model, cache, ids, mask_BT, positions[:, -1:])


def read_repeated(
    model: Any, ids_BT: Tensor, mask_BT: Tensor | None, options: GenerationOptions, *, cached: bool, repeats: int
) -> tuple[Tensor, Context, Tensor | None]:
    """Return the logits (B * N, V) that follow prompts, each of which comes N times, and their context.

    The third is True for the ids that each row has (B * N, V), which a repetition penalty reads; None without one.
    """
    logits, context = read_prompts(model, ids_BT, mask_BT, cached=cached)
    seen = None
    if options.repetition_penalty != 1.0:
        seen = seen_in(logits, ids_BT, mask_BT)
    if repeats == 1:
        return logits, context, seen
    index = torch.arange(len(ids_BT), device=ids_BT.device).repeat_interleave(repeats)
    if seen is not None:
        seen = seen[index]
    return logits[index], select(context, index), seen


def read_tokens(context: Context, ids_B: Tensor) -> tuple[Tensor, Context]:
    """Return the logits (B, V) that follow one more token of each row, and the new context."""
    model, cache, ids, mask, last = context
    new = ids_B.unsqueeze(1)
    last = last + 1
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(new.shape)], 1)
    if ids is None:
        logits = next_logits(model, new, mask, last, cache)
    else:
        ids = torch.cat([ids, new], 1)
        logits = next_logits(model, ids, None, None, None)
    return logits, Context(model, cache, ids, mask, last)


def select(context: Context, index: Tensor) -> Context:
    """Return the context of some rows, each of which may come several times."""
    model, cache, ids, mask, last = context
    if cache is not None:
        cache.reorder_cache(index)
    if ids is not None:
        ids = ids[index]
    if mask is not None:
        mask = mask[index]
    return Context(model, cache, ids, mask, last[index])


def decode(
    model: Any,
    ids_BT: Tensor,
    mask_BT: Tensor | None,
    options: GenerationOptions,
    stop: Stop,
    *,
    uniforms: Callable[[int], Tensor] | None,
    cached: bool,
    repeats: int = 1,
    tick: Callable[[int], object] = lambda done: None,
) -> Decoded:
    """Return the responses to prompts, greedy or sampled.

    Args:
        model: The model, bound to its parameters.
        ids_BT: The prompts, padded at the left.
        mask_BT: True at tokens; None without pads.
        options: The options, of which `max_new_tokens` is above 0.
        stop: The ends of a response.
        uniforms: The function of the uniform numbers (B * N, BLOCK) of a block of steps; None for greedy search.
        cached: Use the model's cache.
        repeats: The number N of responses to each prompt.
        tick: Called with the number of steps that are done, `max_new_tokens` of them in all.
    """
    logits, context, seen = read_repeated(model, ids_BT, mask_BT, options, cached=cached, repeats=repeats)
    count = logits.shape[0]
    limit = options.max_new_tokens or 0
    tails = stop.tails(ids_BT, mask_BT)
    steps: list[Choice] = []
    done = torch.zeros(count, dtype=torch.bool, device=ids_BT.device)
    lengths = torch.full((count,), limit, device=ids_BT.device)
    for step, uniform_B1 in enumerate(_columns(uniforms, limit)):
        tick(1)
        raw = logits.to(torch.promote_types(logits.dtype, torch.float32))
        banned = stop.ids if step < options.min_new_tokens else None
        scores = penalize(raw, seen, options.repetition_penalty, banned)
        choice = choose(raw, scores, options, uniform_B1)
        steps.append(choice)
        ended = torch.isin(choice.ids, stop.ids)
        if stop.texts:
            tokens = torch.stack([each.ids for each in steps], 1)
            ended = ended | stop.ended(tokens, tails)
        lengths = torch.where(ended & ~done, step + 1, lengths)
        done = done | ended
        if step + 1 == limit or bool(done.all()):
            break
        if seen is not None:
            seen = add_seen(seen, choice.ids)
        logits, context = read_tokens(context, choice.ids)
    tick(limit - len(steps))
    return Decoded(steps, lengths.tolist(), done.tolist())


def _columns(uniforms: Callable[[int], Tensor] | None, limit: int) -> Iterator[Tensor | None]:
    """Yield the uniform numbers (B, 1) of each step, drawn in blocks; None for greedy search."""
    block = None
    for step in range(limit):
        if uniforms is None:
            yield None
            continue
        column = step % BLOCK
        if block is None or column == 0:
            block = uniforms(step // BLOCK)
        yield block[:, column : column + 1]


def seen_in(logits_BV: Tensor, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Return True for the ids that each row has (B, V)."""
    valid = torch.ones_like(ids_BT) if mask_BT is None else mask_BT
    counts = torch.zeros_like(logits_BV, dtype=torch.int64)
    return counts.scatter_add_(1, ids_BT, valid) > 0


def add_seen(seen_BV: Tensor, ids_B: Tensor) -> Tensor:
    """Return the ids that each row has, with one more for each."""
    return seen_BV.scatter(1, ids_B.unsqueeze(1), True)


def pad_left(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return prompts as rows (B, T) with pads at the left, and the mask; None for rows of one length."""
    ids, mask = pad_rows(prompts, side="left")
    if bool(mask.all()):
        return ids, None
    return ids, mask.to(torch.int64)
