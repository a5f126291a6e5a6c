"""Log-probs of given tokens, as pure functions of a model's tree and of the tokens.

All layouts are scored in one form: rows compacted to the left without a mask, since a causal model never reads later
positions. The results are put back in the places of the tokens. `log_probs[i]` is log p(token i | tokens before it), so
that a row's first token has no log-prob.

B rows, T positions, L positions of the longest row, D hidden size, V vocabulary, K candidates.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tdfunc.core.context import has_values, is_known
from tdfunc.core.errors import LeafMismatchError, UnsupportedError, error
from tdfunc.llm.rows.packing import Rows, as_mask, compact, equal_lengths, pack, pad_rows
from tdfunc.llm.scoring.head import HeadScores, Wanted, head_scores, scores_of
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
    found, valid = score_all(
        lm, params, ids, mask, buffers=buffers, at=at, temperature=temperature, rng=rng, wanted=Wanted()
    )
    values = found.log_probs
    if at is None:
        values = values.squeeze(-1)
    return Scores(values, valid)


def score_all(
    lm: CausalLM,
    params: Any,
    ids: Tensor,
    mask: Tensor | None,
    *,
    buffers: Any,
    at: Tensor | None,
    temperature: float | Tensor,
    rng: Any,
    wanted: Wanted,
) -> tuple[HeadScores, Tensor]:
    """Return all results of the head at each token, 0 without a log-prob, and the mask of tokens with one.

    Arguments are as for `score_ids`; `wanted` selects the results beside the log-probs of `at`.
    """
    check_lm("score", lm)
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise error(ValueError, "score: temperature must be above 0.", got=temperature)
    rows = _rows_of(lm, ids, mask, at)
    outputs = _run_rows(lm, params, rows, buffers=buffers, rng=rng)
    candidates = ids.unsqueeze(-1) if at is None else at
    # Pads may hold any number.
    chosen = torch.where(rows.mask.unsqueeze(-1), rows.gather(candidates), 0)
    scored = _scored(rows)
    found = _head_scores(lm, outputs, chosen[:, 1:], scored[:, 1:], temperature, wanted)

    def place(values: Tensor) -> Tensor:
        """Return values (B, L - 1, ...) of the tokens behind the first at the places of the tokens (B, T, ...)."""
        wide = values.unsqueeze(-1) if values.dim() == 2 else values
        # The first token of a row has no log-prob.
        behind_first = F.pad(wide, (0, 0, 1, 0))
        placed = rows.scatter(torch.where(scored.unsqueeze(-1), behind_first, 0))
        return placed.reshape(*placed.shape[:2], *values.shape[2:])

    return found.map(place), rows.scatter(scored.unsqueeze(-1)).squeeze(-1)


def _scored(rows: Rows) -> Tensor:
    """Return True at the tokens of compacted rows that follow another token (B, L)."""
    return rows.mask & (torch.arange(rows.mask.shape[1], device=rows.mask.device) > 0)


def _head_scores(
    lm: CausalLM,
    outputs: "_Outputs",
    chosen_BLK: Tensor,
    scored_BL: Tensor,
    temperature: float | Tensor,
    wanted: Wanted,
) -> HeadScores:
    """Return the results of the head at all positions of rows but the first, from the outputs before them.

    Where values can be read, the head runs for tokens alone; elsewhere also for pads, whose results are dropped.
    """
    before = outputs.states[:, :-1].flatten(0, 1)
    chosen = chosen_BLK.flatten(0, 1)
    heat = temperature
    if isinstance(temperature, Tensor):
        heat = temperature.reshape(-1, 1).expand(scored_BL.shape).flatten()
    places = None
    if has_values() and not scored_BL.all():
        places = scored_BL.flatten().nonzero().squeeze(-1)
        before = before[places]
        chosen = chosen[places]
        if isinstance(heat, Tensor):
            heat = heat[places]
    if lm.head is None:
        found = scores_of(before, chosen, heat, wanted)
    else:
        output = (outputs.weight, outputs.bias)
        found = head_scores(lm.head, before, output, chosen, temperature=heat, chunk_size=lm.chunk_size, wanted=wanted)

    def at_positions(values: Tensor) -> Tensor:
        """Return values of the scored positions, or of all, as (B, L, ...); 0 elsewhere."""
        if places is not None:
            values = values.new_zeros((scored_BL.numel(), *values.shape[1:])).index_copy(0, places, values)
        return values.reshape(*scored_BL.shape, *values.shape[1:])

    return found.map(at_positions)


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
    states, weight, bias = _run_rows(lm, params, rows, buffers=buffers, rng=rng)
    logits = states if lm.head is None else lm.head.logits(states, weight, bias)
    scored = _scored(rows)
    shifted = F.pad(logits[:, :-1], (0, 0, 1, 0))
    values = torch.where(scored.unsqueeze(-1), shifted, 0)
    return Scores(rows.scatter(values), rows.scatter(scored.unsqueeze(-1)).squeeze(-1))


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


class _Outputs(NamedTuple):
    """The outputs of a model for rows.

    Attributes:
        states: The last hidden states (B, L, D), or the logits (B, L, V) if the head is unknown.
        weight: The weight of the head (V, D), if it is known.
        bias: The bias of the head (V,), or None.
    """

    states: Tensor
    # Any: a tensor; with an unknown head both are None.
    weight: Any
    bias: Any


def _run_rows(lm: CausalLM, params: Any, rows: Rows, *, buffers: Any, rng: Any) -> _Outputs:
    """Run the model on compacted rows: at once, packed, or one length at a time."""

    def run(ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> _Outputs:
        if not ids.numel():
            # No family runs on no tokens: the sizes are as for one.
            one = run(ids.new_zeros(1, 1))
            return one._replace(states=one.states.new_zeros(*ids.shape, one.states.shape[-1]))
        if lm.head is None:
            return _Outputs(lm.run(params, own_logits, ids, positions, mask, buffers=buffers, rng=rng), None, None)
        return _Outputs(*lm.run(params, hidden_states, ids, positions, mask, buffers=buffers, rng=rng))

    by_length = lm.by_length or (lm.packed and lm.packing is None)
    if not (by_length or lm.packed) or rows.ids.shape[0] < 2:
        return run(rows.ids)
    # Packing copies the tokens, sorting by length reads only the mask.
    if not is_known(rows.mask) or not (by_length or is_known(rows.ids)):
        raise _hidden_values(lm)
    if by_length:
        return _run_by_length(rows, run)
    packed = pack(rows)
    mask = None
    if lm.packing == "mask":
        own = lm.base_of(params)[1]
        dtype = next(leaf.dtype for leaf in own.leaves() if leaf.is_floating_point())
        mask = packed.mask(dtype)
    found = run(packed.ids, packed.positions, mask)
    return found._replace(states=found.states.flatten(0, 1)[packed.place])


def _run_by_length(rows: Rows, run: Callable[[Tensor], _Outputs]) -> _Outputs:
    """Run the rows of each length together, and return the outputs of all, 0 after their ends."""
    lengths = rows.mask.sum(1).tolist()
    groups = equal_lengths(lengths)
    if not groups:
        return run(rows.ids)
    size = rows.ids.shape[1]
    results: list[_Outputs] = []
    parts: list[Tensor] = []
    order: list[int] = []
    for members in groups:
        length = lengths[members[0]]
        found = run(rows.ids[members, :length])
        results.append(found)
        parts.append(F.pad(found.states, (0, 0, 0, size - found.states.shape[1])))
        order += members
    joined = torch.cat(parts)
    # Rows without tokens are in no group.
    whole = joined.new_zeros((rows.ids.shape[0], *joined.shape[1:]))
    places = torch.tensor(order, device=joined.device)
    return results[0]._replace(states=whole.index_copy(0, places, joined))


def _hidden_values(lm: CausalLM) -> UnsupportedError:
    """Return the error of rows whose values a transform hides."""
    if lm.packed:
        expected = "tokens with values"
        hint = "lm.with_options(packed=False)"
    else:
        expected = f"rows of one length for {lm.family}"
        hint = "map over rows of one length, each without a mask."
    return UnsupportedError(
        "score: rows cannot be packed or sorted by length where a transform maps or traces the tokens.",
        expected=expected,
        hint=hint,
    )


def _rows_of(lm: CausalLM, ids: Tensor, mask: Tensor | None, at: Tensor | None) -> Rows:
    """Return tokens compacted to the left, after checks of their shapes and of the model's positions."""
    others = [each for each in (mask, at) if each is not None]
    if not _is_ids(ids) or any([not _fits(each, ids) for each in others]):
        raise LeafMismatchError(
            "score: the tokens are not integers (B, T), or the mask is not (B, T), or at is not (B, T, K).",
            expected="score_ids(lm, params, ids, mask, buffers=buffers)",
            got=", ".join([_describe(each) for each in (ids, *others)]),
        )
    if mask is None:
        tokens = torch.ones_like(ids, dtype=torch.bool)
    else:
        tokens = as_mask(mask, "score")
    rows = compact(ids, tokens)
    _check_length(lm, rows)
    return rows


def _check_length(lm: CausalLM, rows: Rows) -> None:
    """Raise if a row is longer than the model's positions."""
    limit = lm.max_length
    width = rows.ids.shape[1]
    if limit is None or width <= limit or (lm.allow_long and lm.extendable):
        return
    row = 0
    got = f"{width} positions, with a mask that a transform hides"
    if is_known(rows.mask):
        row = rows.mask.sum(1).tolist().index(width)
        got = f"{width} tokens"
    hint = "truncate it."
    if lm.extendable:
        hint = "truncate it, or use lm.with_options(allow_long=True)."
    raise error(
        ValueError,
        f"score: row {row} is longer than the positions of {lm.family}.",
        expected=f"at most {limit} tokens",
        got=got,
        hint=hint,
    )


# Any: an argument out of its place.
def _is_ids(given: Any) -> bool:
    return isinstance(given, Tensor) and not given.is_floating_point() and given.dtype is not torch.bool


# Any: an argument out of its place.
def _fits(given: Any, ids: Tensor) -> bool:
    return isinstance(given, Tensor) and given.shape[:2] == ids.shape


# Any: an argument out of its place.
def _describe(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"{given.dtype} of shape {tuple(given.shape)}"
    return type(given).__name__
