"""The decoding loop: rows of one width, token by token, on the model that `CausalLM.run` binds.

B rows, T positions of the prompts, R of the responses, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdfunc.llm.generation.options import GenerationOptions
from tdfunc.llm.generation.sampling import Choice, choose, penalize
from tdfunc.llm.model import new_cache, next_logits

# How many uniform numbers of a row are drawn at a time.
BLOCK = 256


class Decoded(NamedTuple):
    """The responses to rows of prompts.

    Attributes:
        steps: The choices of each step, of which a row has as many as its length.
        lengths: The number of tokens of each row, the one that ended it included.
        stopped: For each row whether a token or a text ended it.
    """

    steps: list[Choice]
    lengths: list[int]
    stopped: list[bool]


class Stop(NamedTuple):
    """The ends of a response.

    Attributes:
        ids: The tokens that end it (S,), on the device of the rows.
        texts: The texts that end it.
        decode: Returns the text of tokens; None without texts.
    """

    ids: Tensor
    texts: tuple[str, ...]
    decode: Callable[[list[int]], str] | None


class Context(NamedTuple):
    """The rows that a model has read, and its cache of them.

    Attributes:
        model: The model, bound to its parameters.
        cache: Its cache, or None to read all tokens at each step.
        ids: All tokens (B, T); with a cache None.
        mask: True at tokens, False at the pads of the prompts (B, T); None without pads.
        last: The position of the last token of each row (B, 1); None without pads.
    """

    model: Any
    cache: Any
    ids: Tensor | None
    mask: Tensor | None
    last: Tensor | None


def read_prompts(model: Any, ids_BT: Tensor, mask_BT: Tensor | None, *, cached: bool) -> tuple[Tensor, Context]:
    """Return the logits (B, V) that follow prompts, and the context for the next tokens."""
    cache = new_cache(model) if cached else None
    positions = None if mask_BT is None else (mask_BT.to(torch.int64).cumsum(1) - 1).clamp(min=0)
    logits = next_logits(model, ids_BT, mask_BT, positions, cache)
    last = None if positions is None else positions[:, -1:]
    return logits, Context(model, cache, None if cached else ids_BT, mask_BT, last)


def read_tokens(context: Context, ids_B: Tensor) -> tuple[Tensor, Context]:
    """Return the logits (B, V) that follow one more token of each row, and the new context."""
    model, cache, ids, mask, last = context
    new = ids_B.unsqueeze(1)
    if mask is not None and last is not None:
        mask, last = torch.cat([mask, mask.new_ones(new.shape)], 1), last + 1
    if ids is None:
        return next_logits(model, new, mask, last, cache), Context(model, cache, None, mask, last)
    ids = torch.cat([ids, new], 1)
    return next_logits(model, ids, None, None, None), Context(model, None, ids, mask, last)


def decode(
    model: Any,
    ids_BT: Tensor,
    mask_BT: Tensor | None,
    options: GenerationOptions,
    stop: Stop,
    *,
    uniforms: Callable[[int], Tensor] | None,
    cached: bool,
) -> Decoded:
    """Return the responses to prompts, greedy or sampled.

    Args:
        model: The model, bound to its parameters.
        ids_BT: The prompts, padded at the left.
        mask_BT: True at tokens; None without pads.
        options: The options, of which `max_new_tokens` is above 0.
        stop: The ends of a response.
        uniforms: Returns the uniform numbers (B, BLOCK) of a block of steps; None for greedy.
        cached: Whether the model's cache is used.
    """
    logits, context = read_prompts(model, ids_BT, mask_BT, cached=cached)
    penalty = options.repetition_penalty
    seen = None
    if penalty != 1.0:
        valid = torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT.bool()
        seen = torch.zeros_like(logits, dtype=torch.int64).scatter_add_(1, ids_BT, valid.to(torch.int64)) > 0
    count, limit = ids_BT.shape[0], options.max_new_tokens or 0
    steps: list[Choice] = []
    texts = _Texts(stop, count)
    done = torch.zeros(count, dtype=torch.bool, device=ids_BT.device)
    lengths = torch.full((count,), limit, device=ids_BT.device)
    block = None
    for step in range(limit):
        raw = logits.to(torch.promote_types(logits.dtype, torch.float32))
        banned = stop.ids if step < options.min_new_tokens else None
        scores = penalize(raw, seen, penalty, banned)
        if uniforms is not None and step % BLOCK == 0:
            block = uniforms(step // BLOCK)
        at = step % BLOCK
        choice = choose(raw, scores, options, None if block is None else block[:, at : at + 1])
        steps.append(choice)
        ended = torch.isin(choice.ids, stop.ids)
        if stop.texts:
            ended = ended | texts.ended(choice.ids, done)
        lengths = torch.where(ended & ~done, step + 1, lengths)
        done = done | ended
        if step + 1 == limit or bool(done.all()):
            break
        if seen is not None:
            seen = seen.scatter(1, choice.ids.unsqueeze(1), True)
        logits, context = read_tokens(context, choice.ids)
    return Decoded(steps, lengths.tolist(), done.tolist())


class _Texts:
    """The tokens of each row so far, and the check of their text."""

    def __init__(self, stop: Stop, count: int) -> None:
        self._stop = stop
        self._rows: list[list[int]] = [[] for _ in range(count)]

    def ended(self, ids_B: Tensor, done_B: Tensor) -> Tensor:
        """Return for each row whether its text has a stop sequence, with these tokens after the earlier ones."""
        assert self._stop.decode is not None
        found = [False] * len(self._rows)
        for i, (token, over) in enumerate(zip(ids_B.tolist(), done_B.tolist(), strict=True)):
            if not over:
                self._rows[i].append(token)
                text = self._stop.decode(self._rows[i])
                found[i] = any([end in text for end in self._stop.texts])
        return torch.tensor(found, device=ids_B.device)


def pad_left(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return prompts as rows (B, T) with pads at the left, and the mask; None for rows of one length."""
    width = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in prompts])
    if all([len(row) == width for row in prompts]):
        return ids, None
    lengths = torch.tensor([len(row) for row in prompts], device=ids.device)
    return ids, (torch.arange(width, device=ids.device) >= width - lengths.unsqueeze(1)).to(torch.int64)
