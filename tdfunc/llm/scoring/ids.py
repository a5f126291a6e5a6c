"""Log-probs of given tokens, as pure functions of a model's tree and of the tokens.

All layouts are scored in one form: rows compacted to the left without a mask, since a causal model never reads later
positions. The results are put back in the places of the tokens. `log_probs[i]` is log p(token i | tokens before it), so
that a row's first token has no log-prob.

B rows, T positions, L positions of the longest row, D hidden size, V vocabulary, K candidates.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tdfunc.core.context import has_values, is_known
from tdfunc.core.errors import LeafMismatchError, UnsupportedError, error
from tdfunc.llm.rows.packing import Rows, as_mask, compact, equal_lengths, pack, pad_rows
from tdfunc.llm.scoring.head import chosen_log_probs, log_probs_of
from tdfunc.llm.scoring.model import CausalLM, check_lm, hidden_states, own_logits


class Scores(NamedTuple):
    """Log-probs in nats, 0 where `mask` is False, in the shape of the tokens (and candidates)."""

    log_probs: Tensor
    mask: Tensor


def score_ids(
    lm: CausalLM,
    params: Any,
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    buffers: Any = None,
    at: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    rng: Any = None,
) -> Scores:
    """Return the log-prob of each token given the tokens before it in its row.

    Args:
        lm: The model, from `causal_lm`; `lm.with_options` selects a way to run it.
        params: The parameters, or the complete tree.
        ids: Rows of tokens.
        mask: True at tokens, False at pads on any side or in between. Without it all positions are tokens.
        buffers: The buffers of the model, unless `params` has them.
        at: Other tokens to score at each position, such as a teacher's candidates.
        temperature: A divisor of the logits, one number or (B,) for each row.
        rng: A key for the dropout of `lm.train()`.

    Shapes:
        `ids` and `mask` are (B, T), and so are the log-probs; with `at` (B, T, K) the log-probs are (B, T, K).

    Raises:
        LeafMismatchError: The tokens are not integers (B, T), or the mask or `at` does not fit them.
        ValueError: A row is longer than the model's positions, or the temperature is not above 0.
        UnsupportedError: A transform hides the values of the mask, but the rows are packed or scored by length.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from tdfunc.llm import causal_lm
        >>> config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20)
        >>> lm, params, buffers = causal_lm(GPT2LMHeadModel(config))
        >>> ids, mask = torch.tensor([[3, 4, 5], [0, 6, 7]]), torch.tensor([[1, 1, 1], [0, 1, 1]]).bool()
        >>> score_ids(lm, params, ids, mask, buffers=buffers).mask
        tensor([[False,  True,  True],
                [False, False,  True]])
    """
    check_lm("score", lm)
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise error(ValueError, "score: temperature must be above 0.", got=temperature)
    rows = _rows_of(lm, ids, mask, at)
    states, weight, bias = _states(lm, params, rows, buffers=buffers, rng=rng)
    # Pads may hold any number.
    chosen = torch.where(rows.mask.unsqueeze(-1), rows.gather(ids.unsqueeze(-1) if at is None else at), 0)
    scored = rows.mask & (torch.arange(rows.mask.shape[1], device=rows.mask.device) > 0)
    # Where values can be read, the head runs for tokens alone; elsewhere for pads too, whose results are dropped.
    before = states[:, :-1].flatten(0, 1)
    wanted = chosen[:, 1:].flatten(0, 1)
    places = None
    heat = temperature
    if isinstance(temperature, Tensor):
        heat = temperature.reshape(-1, 1).expand(scored.shape[0], scored.shape[1] - 1).flatten()
    if has_values() and not scored[:, 1:].all():
        places = scored[:, 1:].flatten().nonzero().squeeze(-1)
        before = before[places]
        wanted = wanted[places]
        if isinstance(heat, Tensor):
            heat = heat[places]
    if lm.head is None:
        found = log_probs_of(before, wanted, heat)
    else:
        found = chosen_log_probs(lm.head, before, (weight, bias), wanted, temperature=heat, chunk_size=lm.chunk_size)
    if places is not None:
        found = found.new_zeros((scored[:, 1:].numel(), found.shape[-1])).index_copy(0, places, found)
    found = found.reshape(*scored[:, 1:].shape, found.shape[-1])
    found = torch.where(scored.unsqueeze(-1), F.pad(found, (0, 0, 1, 0)), 0)
    values = rows.scatter(found)
    valid = rows.scatter(scored.unsqueeze(-1)).squeeze(-1)
    return Scores(values.squeeze(-1) if at is None else values, valid)


def score_rows(
    lm: CausalLM, params: Any, rows: Sequence[Tensor], *, buffers: Any = None, rng: Any = None
) -> list[Tensor]:
    """Return the log-probs of rows of any lengths without pads; arguments as for `score_ids`."""
    ids, mask = pad_rows(rows, side="right")
    found = score_ids(lm, params, ids, mask, buffers=buffers, rng=rng).log_probs
    return [values[: len(row)].clone() for values, row in zip(found, rows, strict=True)]


def logits_of_ids(
    lm: CausalLM, params: Any, ids: Tensor, mask: Tensor | None = None, *, buffers: Any = None, rng: Any = None
) -> Scores:
    """Return the logits from which each token is sampled, as one tensor; arguments as for `score_ids`.

    Shapes:
        (B, T, V), with the logits of token i at position i; 0, which is uniform, where the mask is False.
    """
    check_lm("logits", lm)
    rows = _rows_of(lm, ids, mask, None)
    states, weight, bias = _states(lm, params, rows, buffers=buffers, rng=rng)
    logits = states if lm.head is None else lm.head.logits(states, weight, bias)
    scored = rows.mask & (torch.arange(rows.mask.shape[1], device=rows.mask.device) > 0)
    shifted = torch.where(scored.unsqueeze(-1), F.pad(logits[:, :-1], (0, 0, 1, 0)), 0)
    return Scores(rows.scatter(shifted), rows.scatter(scored.unsqueeze(-1)).squeeze(-1))


def explain_scoring(lm: CausalLM) -> str:
    """Explain the way in which rows of different lengths are scored.

    Args:
        lm: The model, with its options.
    """
    if lm.by_length:
        way = "rows of one length at a time, because the positions of this family depend on the longest row."
    elif not lm.packed:
        way = "rows compacted to the left, with pads at the right, which no token reads."
    elif lm.packing is None:
        way = f"rows of one length at a time, because packed rows of {lm.family} are not known to be exact."
    else:
        way = f"rows packed into bins no longer than the longest row, separated by {_APART[lm.packing]}."
    head = "logits of all positions at once, because its head is unknown" if lm.head is None else "logits in chunks"
    return f"{lm.family}: {way} Head: {head}."


_APART = {"positions": "positions that begin anew", "mask": "a mask of pairs"}


def _states(lm: CausalLM, params: Any, rows: Rows, *, buffers: Any, rng: Any) -> tuple[Tensor, Any, Any]:
    """Return the last hidden states of compacted rows, or the logits if the head is unknown; and the head."""

    def run(ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Any, Any]:
        if not ids.numel():
            # No family runs on no tokens: the sizes are those of one.
            states, weight, bias = run(ids.new_zeros(1, 1))
            return states.new_zeros(*ids.shape, states.shape[-1]), weight, bias
        if lm.head is None:
            return lm.run(params, own_logits, ids, positions, mask, buffers=buffers, rng=rng), None, None
        return lm.run(params, hidden_states, ids, positions, mask, buffers=buffers, rng=rng)

    apart = lm.by_length or (lm.packed and lm.packing is None)
    if not (apart or lm.packed) or rows.ids.shape[0] < 2:
        return run(rows.ids)
    if not (is_known(rows.mask) and (apart or is_known(rows.ids))):
        raise UnsupportedError(
            "score: rows cannot be packed or sorted by length where a transform maps or traces the tokens.",
            expected="tokens with values" if lm.packed else f"rows of one length for {lm.family}",
            hint="lm.with_options(packed=False)" if lm.packed else "map over rows of one length, each without a mask.",
        )
    if not apart:
        bins = pack(rows)
        own = lm.base_of(params)[1]
        dtype = next(leaf.dtype for leaf in own.leaves() if leaf.is_floating_point())
        states, weight, bias = run(bins.ids, bins.positions, bins.mask(dtype) if lm.packing == "mask" else None)
        return states.flatten(0, 1)[bins.place], weight, bias
    lengths = rows.mask.sum(1).tolist()
    groups = equal_lengths(lengths)
    if not groups:
        return run(rows.ids)
    results = [run(rows.ids[members, : lengths[members[0]]]) for members in groups]
    size = rows.ids.shape[1]
    joined = torch.cat([F.pad(states, (0, 0, 0, size - states.shape[1])) for states, _, _ in results])
    whole = joined.new_zeros((rows.ids.shape[0], *joined.shape[1:]))
    places = torch.tensor([row for members in groups for row in members], device=joined.device)
    return whole.index_copy(0, places, joined), *results[0][1:]


def _rows_of(lm: CausalLM, ids: Tensor, mask: Tensor | None, at: Tensor | None) -> Rows:
    """Return tokens compacted to the left, after checks of their shapes and of the model's positions."""
    others = [each for each in (mask, at) if each is not None]
    is_ids = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dtype is not torch.bool
    if not is_ids or any(not isinstance(each, Tensor) or each.shape[:2] != ids.shape for each in others):
        raise LeafMismatchError(
            "score: tokens must be integers (B, T); the mask is (B, T), and at is (B, T, K).",
            expected="score_ids(lm, params, ids, mask, buffers=buffers)",
            got=", ".join([_describe(each) for each in (ids, *others)]),
        )
    rows = compact(ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else as_mask(mask, "score"))
    limit = lm.max_length
    width = rows.ids.shape[1]
    if limit is None or width <= limit or (lm.allow_long and lm.extendable):
        return rows
    if is_known(rows.mask):
        lengths = rows.mask.sum(1).tolist()
    else:
        lengths = [width]
    raise error(
        ValueError,
        f"score: row {lengths.index(width)} must not be longer than the positions of {lm.family}.",
        expected=f"at most {limit} tokens",
        got=f"{width} tokens" if is_known(rows.mask) else f"{width} positions, with a mask that a transform hides",
        hint="truncate it" + (", or use lm.with_options(allow_long=True)." if lm.extendable else "."),
    )


# Any: an argument out of its place.
def _describe(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"{given.dtype} of shape {tuple(given.shape)}"
    return type(given).__name__
