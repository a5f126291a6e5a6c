"""Rows of a batch, and the typed trees that wrappers make of them: the one place where outputs are laid out.

N rows, L tokens of a row, T positions of padded rows, P of their prompts and R of their responses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from tdfunc._lazystack import lazy_stack
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError
from tdfunc.core.types import Path
from tdfunc.llm.rows.records import LogProbs, Masks, Tokens
from tdfunc.ops.reading import get_value


@dataclass(frozen=True)
class Row:
    """A row of tokens without pads, and the numbers of its tokens.

    Attributes:
        ids: The tokens (L,).
        prompt: How many of them are the prompt; None where the parts are not known.
        log_probs: Their log-probs (L,), 0 where there is none.
        scored: True where there is one (L,).
        assistant: True where an assistant wrote the token (L,), or None.
        behaviour: Of the response, under the distribution that it was drawn from (R,), or None.
        support: Of the response, the ids that were left to draw from (R, K), or None.
        is_complete: Whether the response has its end (), or None.
        version: The version of the weights that drew it, or None.
    """

    ids: Tensor
    prompt: int | None = None
    log_probs: Tensor | None = None
    scored: Tensor | None = None
    assistant: Tensor | None = None
    behaviour: Tensor | None = None
    support: Tensor | None = None
    is_complete: Tensor | None = None
    version: str | int | None = None

    def to(self, device: torch.device) -> "Row":
        """Return the row with its tensors on a device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: x.to(device) for name, x in tensors.items() if isinstance(x, Tensor)})


class Layout(NamedTuple):
    """The places of rows in a padded batch.

    Attributes:
        mask: True at tokens (N, T).
        prompt: How many of the positions are the prompts'; None where the parts are not known.
        ids: The tokens with their pads (N, T), where they were given; else pads are `pad`.
        pad: The id of pads.
    """

    mask: Tensor
    prompt: int | None
    ids: Tensor | None = None
    pad: int = 0

    def to(self, device: torch.device) -> "Layout":
        """Return the layout on a device."""
        return self._replace(mask=self.mask.to(device), ids=None if self.ids is None else self.ids.to(device))

    def place(self, rows: Sequence[Tensor], fill: Any = 0, *, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return values of the tokens (L,) at their places (N, T); of a type where there are no rows."""
        return _place(self.mask, rows or [torch.zeros(0, dtype=dtype, device=self.mask.device)], fill)

    def place_responses(self, rows: Sequence[Tensor], fill: Any = 0) -> Tensor:
        """Return values of the responses (R, *K) at their places; K is that of the widest row."""
        width = max([row.shape[1] for row in rows if row.dim() > 1], default=None)
        mask = self.mask[:, self.prompt :]
        if width is None:
            return _place(mask, rows, fill)
        wide = [torch.nn.functional.pad(row, (0, width - row.shape[1]), value=fill) for row in rows]
        return _place(mask, wide, fill)


def _place(mask: Tensor, rows: Sequence[Tensor], fill: Any) -> Tensor:
    flat = torch.cat(list(rows))
    shape = (*mask.shape, *flat.shape[1:])
    if not flat.shape[0]:
        return flat.new_full(shape, fill)
    # By a gather: unlike masked_scatter it runs inside all transforms.
    index = (mask.flatten().cumsum(0) - 1).clamp(min=0)
    valid = mask.reshape(*mask.shape, *[1] * (flat.dim() - 1))
    return torch.where(valid, flat[index].reshape(shape), flat.new_full((), fill))


def assembled(rows: Sequence[Row], *, pad: int, least: int | None = None) -> Layout:
    """Return the layout of prompts padded at the left and responses at the right; of whole rows at the left.

    Args:
        rows: The rows.
        pad: The id of pads.
        least: How many positions the prompts have at least; given where rows have prompts, also if there are no rows.
    """
    device = rows[0].ids.device if rows else None
    parts = [(len(row.ids) if row.prompt is None else row.prompt, len(row.ids)) for row in rows]
    before = max([least or 0, *[prompt for prompt, _ in parts]])
    after = max([total - prompt for prompt, total in parts], default=0)
    prompt = torch.tensor([prompt for prompt, _ in parts], device=device).reshape(-1, 1)
    total = torch.tensor([total for _, total in parts], device=device).reshape(-1, 1)
    at = torch.arange(before + after, device=device)
    is_known = (rows[0].prompt if rows else least) is not None
    return Layout((at >= before - prompt) & (at < before - prompt + total), before if is_known else None, pad=pad)


class Records(NamedTuple):
    """The outputs of a wrapper that are made of tokens."""

    tokens: Any
    masks: Any
    log_probs: Any


def padded_records(rows: Sequence[Row], layout: Layout, lead: Size) -> Records:
    """Return records in which all rows have one length, with the batch size `lead`."""

    def shaped(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.reshape((*lead, *value.shape[1:]))

    def cut(value: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if value is None or layout.prompt is None:
            return None, None
        return value[:, : layout.prompt], value[:, layout.prompt :]

    def placed(name: str, dtype: torch.dtype) -> Tensor | None:
        found = [getattr(row, name) for row in rows]
        return None if any([each is None for each in found]) else layout.place(found, dtype=dtype)

    full = layout.place([row.ids for row in rows], layout.pad) if layout.ids is None else layout.ids
    prompt, response = cut(full)
    mask, assistant = layout.mask, placed("assistant", torch.bool) if rows else None
    ended = [row.is_complete for row in rows if row.is_complete is not None]
    tokens = Tokens(
        prompt=shaped(prompt),
        response=shaped(response),
        full=shaped(full),
        padded=True,
        is_complete=shaped(torch.stack(ended)) if len(ended) == len(rows) > 0 else None,
        batch_size=lead,
    )
    masks = Masks(all_attention_mask=shaped(mask), all_assistant_mask=shaped(assistant), padded=True, batch_size=lead)
    values, scored = placed("log_probs", torch.float32), placed("scored", torch.bool)
    before, after = cut(values)
    log_probs = None
    if values is not None:
        drawn = [row.behaviour for row in rows if row.behaviour is not None]
        log_probs = LogProbs(
            prompt=shaped(before),
            response=shaped(after),
            full=shaped(values),
            mask=shaped(scored),
            behaviour=shaped(layout.place_responses(drawn)) if len(drawn) == len(rows) > 0 else None,
            support=shaped(_supports(rows, layout.place_responses)),
            version=_versions(rows, lead),
            padded=True,
            batch_size=lead,
        )
    return Records(tokens, masks, log_probs)


def _versions(rows: Sequence[Row], lead: Size) -> Any:
    found = [row.version for row in rows]
    return shaped_list(found, lead) if any([each is not None for each in found]) else None


def _supports(rows: Sequence[Row], place: Callable[..., Any]) -> Any:
    """Return the supports of the rows, without any where nothing was cut; None where nothing was cut in all."""
    if all([row.support is None for row in rows]):
        return None
    sizes = [len(row.ids) - (row.prompt or 0) for row in rows]
    empty = [row.ids.new_full((size, 1), -1) for row, size in zip(rows, sizes, strict=True)]
    return place([each if row.support is None else row.support for row, each in zip(rows, empty, strict=True)], -1)


def ragged_records(rows: Sequence[Row], lead: Size, layout: torch.layout | None) -> Records:
    """Return records in which each row has its own length: lazy stacks, or nested tensors in a layout of torch."""
    each = [_record_of(row) for row in rows]
    found = [nest(list(parts), lead) for parts in zip(*each, strict=True)]
    return Records(*found) if layout is None or not lead else Records(*[part.nested(layout) for part in found])


def _record_of(row: Row) -> tuple[Tokens, Masks, LogProbs]:
    size = Size(())
    n = row.prompt
    known = n is not None

    def parts(value: Tensor | None) -> dict[str, Any]:
        if value is None:
            return {}
        return {"full": value, **({"prompt": value[:n], "response": value[n:]} if known else {})}

    tokens = Tokens(**parts(row.ids), padded=False, is_complete=row.is_complete, batch_size=size)
    ones = torch.ones_like(row.ids, dtype=torch.bool)
    masks = Masks(all_attention_mask=ones, all_assistant_mask=row.assistant, padded=False, batch_size=size)
    log_probs = LogProbs(
        **parts(row.log_probs),
        mask=row.scored,
        behaviour=row.behaviour,
        support=row.support,
        version=row.version,
        padded=False,
        batch_size=size,
    )
    return tokens, masks, log_probs


def nest(items: Sequence[Any], lead: Size) -> Any:
    """Return trees as a lazy stack with the batch size `lead`, or the only one where there is no batch."""
    if not lead:
        return items[0]
    size = len(items) // lead[0]
    return lazy_stack([nest(items[i * size : (i + 1) * size], lead[1:]) for i in range(lead[0])])


def shaped_list(items: Sequence[Any], lead: Size) -> Any:
    """Return items in lists nested as the batch."""
    if not lead:
        return items[0]
    size = len(items) // max(lead[0], 1)
    return [shaped_list(items[i * size : (i + 1) * size], lead[1:]) for i in range(lead[0])]


def flat_list(values: Any, dims: int) -> list[Any]:
    """Return the elements of the batch of a tensor, a tree, or nested lists."""
    if not dims:
        return [values]
    rows = values.unbind(0) if hasattr(values, "unbind") else values
    return [item for row in rows for item in flat_list(row, dims - 1)]


def ragged_values(td: TensorCollection, path: Path) -> list[Any] | None:
    """Return an entry of each element of the batch, None where it lacks it; None where the entry is not ragged."""
    value = get_value(td, path, None)
    if value is None or (isinstance(value, Tensor) and not value.is_nested):
        return None
    *parents, name = path
    holder = get_value(td, tuple(parents)) if parents else td
    if not holder._is_lazy:
        return flat_list(value, len(holder._batch_size))
    # By the trees: a tuple of values lies along the dimension of the stack, which need not be the first.
    return [get_value(each, name, None) for each in flat_list(holder, len(holder._batch_size))]


def ragged_mask(td: TensorCollection, rows: Sequence[Tensor], paths: Sequence[Path], call: str) -> list[Any] | None:
    """Return the first ragged mask of a tree that has the lengths of rows; None if it has no ragged masks.

    Raises:
        LeafMismatchError: There are ragged masks, and none has the lengths.
    """
    lengths = [len(row) for row in rows]
    found = [
        [torch.ones_like(r, dtype=torch.bool) if m is None else m.bool() for r, m in zip(rows, each, strict=True)]
        for each in (ragged_values(td, path) for path in paths)
        if each is not None
    ]
    fits = [masks for masks in found if [len(mask) for mask in masks] == lengths]
    if found and not fits:
        raise LeafMismatchError(
            f"{call}: the masks must have the lengths of the tokens.",
            expected=str(lengths),
            got=", ".join([str([len(mask) for mask in masks]) for masks in found]),
        )
    return fits[0] if fits else None
