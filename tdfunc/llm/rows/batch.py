"""`TokenBatch`: the tokens of a tree as padded rows; and the trees of tokens, masks and log-probs made from rows.

N rows, L tokens of a row, T positions of padded rows, P of their prompts and R of their responses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from tdfunc._lazystack import lazy_stack
from tdfunc.core.errors import error
from tdfunc.llm.rows.records import LogProbs, Masks, Tokens


@dataclass(frozen=True)
class Row:
    """A row of tokens without pads, and the numbers of its tokens.

    Attributes:
        ids: The tokens (L,).
        prompt: How many of them are the prompt; None where the parts are not known.
        log_probs: Their log-probs (L,), 0 where there is none.
        scored: True where there is a log-prob (L,).
        assistant: True where an assistant wrote the token (L,), or None.
        behaviour: The log-probs of the response under the sampler (R,), or None.
        support: The ids that truncation kept for each token of the response (R, K), or None.
        adjusted: True if more than `support` changed the distribution of the response (), else None.
        is_complete: True if the response has its end (), or None.
        version: The version of the weights that sampled the response, or None.
        others: Further values of the tokens (L, ...), by the fields of `LogProbs`.
    """

    ids: Tensor
    prompt: int | None = None
    log_probs: Tensor | None = None
    scored: Tensor | None = None
    assistant: Tensor | None = None
    behaviour: Tensor | None = None
    support: Tensor | None = None
    adjusted: Tensor | None = None
    is_complete: Tensor | None = None
    version: str | int | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def parts(self, values: Tensor | None) -> dict[str, Any]:
        """Return values of the tokens (L, *K) as `full`, and as `prompt` and `response` where these are known."""
        if values is None:
            return {}
        n = self.prompt
        if n is None:
            return {"full": values}
        return {"full": values, "prompt": values[:n], "response": values[n:]}


def rows_on(device: torch.device, rows: Sequence[Row]) -> list[Row]:
    """Return rows with their tensors on a device."""
    return [_moved(row, device) for row in rows]


def scored_rows(rows: Sequence[Row], log_probs: Sequence[Tensor], device: torch.device) -> list[Row]:
    """Return rows with the log-probs of their tokens, on a device; a row's first token has none."""
    found: list[Row] = []
    for row, values in zip(rows, log_probs, strict=True):
        scored = torch.arange(len(row.ids)) > 0
        found.append(replace(row, log_probs=values, scored=scored))
    return rows_on(device, found)


def check_prompts(rows: Sequence[Row], size: Size) -> None:
    """Raise if a prompt has no tokens.

    Raises:
        ValueError: The message has the place of the row.
    """
    empty = next((i for i, row in enumerate(rows) if not len(row.ids)), None)
    if empty is None:
        return
    place = "0"
    if size:
        index = torch.unravel_index(torch.tensor(empty), size)
        place = ", ".join([str(int(at)) for at in index])
    raise error(ValueError, f"generate: the prompt of row {place} has no tokens.", got="no tokens")


class Records(NamedTuple):
    """The outputs that are made of tokens."""

    tokens: Any
    masks: Any
    log_probs: Any


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of a tree as padded rows, one for each element of its batch.

    Attributes:
        ids: The tokens and the pads (N, T).
        mask: True at tokens (N, T).
        lead: The batch size of the tree.
        prompt: The number of positions of the prompts, for ragged rows a list; None if the parts are not known.
        lengths: The number of positions of each row in a ragged stack; None for padded rows.
        assistant: True where an assistant wrote the token (N, T), or None.
        is_complete: True for responses that have their end, in the layout of the tree; or None.
    """

    ids: Tensor
    mask: Tensor
    lead: Size
    prompt: int | list[int] | None = None
    lengths: list[int] | None = None
    assistant: Tensor | None = None
    # Any: a tensor, or nested tuples of tensors.
    is_complete: Any = None

    def to(self, device: torch.device) -> "TokenBatch":
        """Return the batch with its tensors on a device."""
        return _moved(self, device)

    def rows(self) -> list[Row]:
        """Return the tokens of each row, without pads."""
        count = len(self.ids)
        ends = [None] * count
        if self.is_complete is not None:
            ends = flat_list(self.is_complete, len(self.lead))
        wrote = [None] * count if self.assistant is None else self.assistant
        rows: list[Row] = []
        for ids, valid, n, end, own in zip(self.ids, self.mask, self._prompts(), ends, wrote, strict=True):
            prompt = None if n is None else int(valid[:n].sum())
            assistant = None if own is None else own[valid]
            rows.append(Row(ids[valid], prompt, assistant=assistant, is_complete=end))
        return rows

    def _prompts(self) -> Sequence[int | None]:
        """Return the number of positions of each row's prompt, or None for each."""
        if isinstance(self.prompt, list):
            return self.prompt
        return [self.prompt] * len(self.ids)

    def shaped(self, values: Tensor) -> Tensor:
        """Return values of the rows (N, ...) with the batch size of the tree."""
        return values.reshape((*self.lead, *values.shape[1:]))

    def parts(self, values: Tensor) -> dict[str, Any]:
        """Return values of the positions (N, T, *K) as `full`, and as `prompt` and `response` where these are known."""
        full = self.shaped(values)
        at = len(self.lead)
        n = self.prompt
        assert not isinstance(n, list)
        if n is None:
            return {"full": full}
        return {"full": full, "prompt": full.narrow(at, 0, n), "response": full.narrow(at, n, full.shape[at] - n)}

    def log_probs(
        self,
        values: Tensor,
        scored: Tensor,
        behaviour: Tensor | None = None,
        others: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Return log-probs of the positions, laid out as the tokens are.

        Args:
            values: The log-probs (N, T, *K).
            scored: True where there is one (N, T).
            behaviour: The log-probs under the sampler (N, T, *K), or None.
            others: Further values of the positions (N, T, ...), by the fields of `LogProbs`.
        """
        others = others or {}
        if self.lengths is not None:
            return self._ragged_log_probs(values, scored, behaviour, others)
        drawn = None
        if behaviour is not None:
            drawn = self.parts(behaviour)["response"]
        # Any: the fields of log-probs.
        made: dict[str, Any] = self.parts(values)
        for name, each in others.items():
            made[name] = self.shaped(each)
        return LogProbs(**made, mask=self.shaped(scored), behaviour=drawn, padded=True, batch_size=self.lead)

    def _ragged_log_probs(
        self, values: Tensor, scored: Tensor, behaviour: Tensor | None, others: Mapping[str, Tensor]
    ) -> Any:
        """Return log-probs of the positions as a ragged stack; arguments as for `log_probs`."""
        assert self.lengths is not None
        rows: list[Row] = []
        for i, (length, prompt) in enumerate(zip(self.lengths, self._prompts(), strict=True)):
            of_response = None if behaviour is None else behaviour[i, prompt:length]
            row = Row(
                self.ids[i, :length],
                prompt,
                log_probs=values[i, :length],
                scored=scored[i, :length],
                behaviour=of_response,
                others={name: each[i, :length] for name, each in others.items()},
            )
            rows.append(row)
        return ragged_records(rows, self.lead, None).log_probs

    def place(self, rows: Sequence[Tensor], fill: Any = 0, *, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return values of the tokens of each row (L, *K) at their places (N, T, *K); `dtype` counts without rows."""
        return _place(self.mask, rows, fill, dtype)

    def records(self, rows: Sequence[Row]) -> Records:
        """Return the trees of rows that have the tokens of the batch, with all values of the rows."""
        masks = Masks(
            all_attention_mask=self.shaped(self.mask),
            all_assistant_mask=self._joined(rows, "assistant", self.place),
            padded=True,
            batch_size=self.lead,
        )
        ends = self._joined(rows, "is_complete", torch.stack)
        tokens = Tokens(**self.parts(self.ids), padded=True, is_complete=ends, batch_size=self.lead)
        return Records(tokens, masks, self._row_log_probs(rows))

    # Any: `LogProbs`.
    def _row_log_probs(self, rows: Sequence[Row]) -> Any:
        """Return the log-probs of rows, with the record of their sampling; None if a row has no log-probs."""
        values = [row.log_probs for row in rows if row.log_probs is not None]
        scored = [row.scored for row in rows if row.scored is not None]
        if len(values) < len(rows):
            return None
        log_probs = self.log_probs(self.place(values, dtype=torch.float32), self.place(scored, dtype=torch.bool))
        version = None
        versions = [row.version for row in rows]
        if any([each is not None for each in versions]):
            version = nest(versions, self.lead, list)
        return log_probs.replace(
            behaviour=self._joined(rows, "behaviour", self._place_responses),
            support=self._joined(_with_supports(rows), "support", lambda found: self._place_responses(found, -1)),
            adjusted=self._joined(rows, "adjusted", torch.stack),
            version=version,
        )

    def _joined(self, rows: Sequence[Row], name: str, join: Callable[[list[Tensor]], Tensor]) -> Tensor | None:
        """Return the values of all rows as one tensor; None if a row has none, and without rows."""
        values = [getattr(row, name) for row in rows]
        if not values or any([each is None for each in values]):
            return None
        return self.shaped(join(values))

    def _place_responses(self, values: list[Tensor], fill: Any = 0) -> Tensor:
        """Return values of the tokens of each response at their places after the prompts."""
        assert not isinstance(self.prompt, list)
        return _place(self.mask[:, self.prompt :], values, fill, torch.int64)


def _moved(holder: Any, device: torch.device) -> Any:
    """Return a dataclass with its tensors on a device."""
    moved: dict[str, Tensor] = {}
    for each in fields(holder):
        value = getattr(holder, each.name)
        if isinstance(value, Tensor):
            moved[each.name] = value.to(device)
    return replace(holder, **moved)


def _place(mask: Tensor, rows: Sequence[Tensor], fill: Any, dtype: torch.dtype) -> Tensor:
    """Return values at the places of a mask; values with fewer numbers than the widest row's are filled up."""
    if not rows:
        return torch.full(mask.shape, fill, dtype=dtype, device=mask.device)
    if rows[0].dim() > 1:
        width = max([row.shape[-1] for row in rows])
        rows = [torch.nn.functional.pad(row, (0, width - row.shape[-1]), value=fill) for row in rows]
    flat = torch.cat(list(rows))
    shape = (*mask.shape, *flat.shape[1:])
    if not flat.shape[0]:
        return flat.new_full(shape, fill)
    # By a gather: unlike masked_scatter it runs inside all transforms.
    index = (mask.flatten().cumsum(0) - 1).clamp(min=0)
    valid = mask.reshape(*mask.shape, *[1] * (flat.dim() - 1))
    return torch.where(valid, flat[index].reshape(shape), flat.new_full((), fill))


def _with_supports(rows: Sequence[Row]) -> Sequence[Row]:
    """Return rows that all have a support, an empty one without truncation, if any row has a support."""
    if all([row.support is None for row in rows]):
        return rows
    found: list[Row] = []
    for row in rows:
        if row.support is None:
            response = len(row.ids) - (row.prompt or 0)
            row = replace(row, support=row.ids.new_full((response, 1), -1))
        found.append(row)
    return found


def padded_batch(
    rows: Sequence[Row], lead: Size, *, pad: int, least: int | None = None, side: str = "left"
) -> TokenBatch:
    """Return the batch of rows, prompts padded at the left and responses at the right; whole rows at a side.

    Args:
        rows: The rows, all with known parts or all without.
        lead: The batch size of the tree.
        pad: The id of pads.
        least: The smallest number of positions of the prompts; given if rows have prompts, even for an empty list.
        side: The side of the padding of rows without parts.
    """
    device = None
    first_prompt = least
    if rows:
        device = rows[0].ids.device
        first_prompt = rows[0].prompt
    known = first_prompt is not None
    totals = [len(row.ids) for row in rows]
    # Each row has a number of tokens in front of a column, which is the same one for all, and the others behind it.
    if known:
        fronts = [row.prompt or 0 for row in rows]
    elif side == "right":
        fronts = [0] * len(rows)
    else:
        fronts = totals
    column = max([least or 0, *fronts])
    behind = max([total - front for front, total in zip(fronts, totals, strict=True)], default=0)
    front_N1, total_N1 = torch.tensor([fronts, totals], dtype=torch.int64, device=device).unsqueeze(-1).unbind(0)
    at = torch.arange(column + behind, device=device)
    start_N1 = column - front_N1
    mask = (at >= start_N1) & (at < start_N1 + total_N1)
    ids = _place(mask, [row.ids for row in rows], pad, torch.int64)
    return TokenBatch(ids, mask, lead, column if known else None)


def padded_records(rows: Sequence[Row], lead: Size, *, pad: int, least: int | None = None) -> Records:
    """Return records in which all rows have one length; arguments as for `padded_batch`."""
    return padded_batch(rows, lead, pad=pad, least=least).records(rows)


def ragged_records(rows: Sequence[Row], lead: Size, layout: torch.layout | None) -> Records:
    """Return records in which each row has its own length: lazy stacks, or nested tensors in a layout of torch."""
    of_rows = [_record_of(row) for row in rows]
    records = Records(*[nest(list(parts), lead) for parts in zip(*of_rows, strict=True)])
    if layout is not None and lead:
        records = Records(*[part.nested(layout) for part in records])
    if any([row.log_probs is None for row in rows]):
        return records._replace(log_probs=None)
    return records


def _record_of(row: Row) -> Records:
    """Return the trees of one row, without a batch size."""
    no_size = Size(())
    tokens = Tokens(**row.parts(row.ids), padded=False, is_complete=row.is_complete, batch_size=no_size)
    ones = torch.ones_like(row.ids, dtype=torch.bool)
    masks = Masks(all_attention_mask=ones, all_assistant_mask=row.assistant, padded=False, batch_size=no_size)
    # Any: the fields of log-probs.
    values: dict[str, Any] = {**row.parts(row.log_probs), **row.others}
    log_probs = LogProbs(
        **values,
        mask=row.scored,
        behaviour=row.behaviour,
        support=row.support,
        adjusted=row.adjusted,
        version=row.version,
        padded=False,
        batch_size=no_size,
    )
    return Records(tokens, masks, log_probs)


def nest(items: Sequence[Any], lead: Size, join: Callable[[list[Any]], Any] = lazy_stack) -> Any:
    """Return the items of a batch, joined along each dimension of the batch size `lead`; without one the only item."""
    if not lead:
        return items[0]
    size = len(items) // max(lead[0], 1)
    parts = [items[i * size : (i + 1) * size] for i in range(lead[0])]
    return join([nest(part, lead[1:], join) for part in parts])


def nest_all(lead: Size, join: Callable[[list[Any]], Any] = lazy_stack, **items: Sequence[Any]) -> dict[str, Any]:
    """Return the items of a batch by name, each joined as by `nest`."""
    return {name: nest(each, lead, join) for name, each in items.items()}


def flat_list(values: Any, dims: int) -> list[Any]:
    """Return the elements of the batch of a tensor, a tree, or nested lists."""
    if not dims:
        return [values]
    if hasattr(values, "unbind"):
        values = values.unbind(0)
    found: list[Any] = []
    for row in values:
        found += flat_list(row, dims - 1)
    return found
