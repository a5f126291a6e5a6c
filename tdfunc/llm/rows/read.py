"""Inputs of wrappers as rows of ids: of tokens with their masks, of texts, and of conversations.

N rows, L tokens of a row, T positions of padded rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, MissingKeyError, error
from tdfunc.core.keys import dotted, unravel
from tdfunc.core.types import NestedKey
from tdfunc.llm.conversations.history import History
from tdfunc.llm.rows.batch import Layout, Row, flat_list, ragged_mask, ragged_values
from tdfunc.ops.reading import get_value


class Inputs(NamedTuple):
    """The inputs of a call.

    Attributes:
        rows: The tokens of each element of the batch.
        layout: Where these were in padded rows, if they were.
        texts: Their texts, in text mode.
        chats: Their conversations, in history mode.
    """

    rows: list[Row]
    layout: Layout | None = None
    texts: list[str] | None = None
    # Any: History.
    chats: list[Any] | None = None


def read_field(td: TensorCollection, source: NestedKey, field: str, call: str) -> Any:
    """Return a field of the record at a key, or the entry itself where it is no record.

    Raises:
        MissingKeyError: There is none.
    """
    value = get_value(td, source, None)
    if isinstance(value, TensorCollection) and not isinstance(value, History):
        value = get_value(value, field, None)
    if value is None:
        raise MissingKeyError(
            f"{call}: the tree must have {dotted((*unravel(source), field))!r}, which the module reads.",
            got=", ".join([repr(path) for path in td.keys(True, True)][:20]) or "(no keys)",  # pyright: ignore
        )
    return value


class TokenKeys(NamedTuple):
    """The places of tokens and their masks."""

    source: NestedKey
    mask: NestedKey
    masks: NestedKey


def read_tokens(td: TensorCollection, keys: TokenKeys, field: str, call: str) -> Inputs:
    """Return the rows of the tokens in a field; padded ones with their layout.

    Of a record with prompts and responses `full` is both, and its rows have known parts.

    Raises:
        MissingKeyError: There are no such tokens.
        LeafMismatchError: No mask has the shape of the tokens, or the tokens do not have that of the batch.
    """
    record = get_value(td, keys.source, None)
    parts: dict[str, Any] = {}
    if isinstance(record, TensorCollection):
        parts = {name: get_value(record, name, None) for name in ("prompt", "response", "full", "is_complete")}
    full = parts.get("full")
    known = field == "full" and parts.get("prompt") is not None and parts.get("response") is not None
    ends = parts.get("is_complete") if field == "full" else None
    if known and full is None:
        first = parts["prompt"]
        ids = torch.cat([first, parts["response"]], -1) if isinstance(first, Tensor) else first
    else:
        ids = read_field(td, keys.source, field, call)
    lead = td._batch_size
    if not isinstance(ids, Tensor) or ids.is_nested:
        return Inputs(_with_ends(_ragged_rows(td, keys, field, known, call), ends, len(lead)))
    if ids.dim() != len(lead) + 1:
        raise LeafMismatchError(
            f"{call}: the tokens {dotted(unravel(keys.source))!r} must be rows of the batch.",
            expected=f"shape {(*lead, 'T')}",
            got=f"shape {tuple(ids.shape)}",
        )
    mask = _read_mask(td, keys, ids, full if isinstance(full, Tensor) else None, call)
    assistant = get_value(td, (*unravel(keys.masks), "all_assistant_mask"), None)
    ids_NT, mask_NT = ids.reshape(-1, ids.shape[-1]), mask.reshape(-1, ids.shape[-1])
    prompt = parts["prompt"].shape[-1] if known else None
    rows: list[Row] = []
    for i, (row, valid) in enumerate(zip(ids_NT, mask_NT, strict=True)):
        n = None if prompt is None else int(valid[:prompt].sum())
        wrote = None
        if isinstance(assistant, Tensor) and assistant.shape == ids.shape:
            wrote = assistant.reshape(ids_NT.shape)[i][valid]
        rows.append(Row(row[valid], n, assistant=wrote))
    return Inputs(_with_ends(rows, ends, len(lead)), Layout(mask_NT, prompt, ids_NT))


def _ragged_rows(td: TensorCollection, keys: TokenKeys, field: str, known: bool, call: str) -> list[Row]:
    """Return the rows of ragged tokens, without the pads of their masks.

    Raises:
        LeafMismatchError: There are ragged masks, and none has the lengths of the tokens.
    """
    source, masks = unravel(keys.source), unravel(keys.masks)
    parts: dict[str, list[Any] | None] = {field: ragged_values(td, source)}
    if isinstance(get_value(td, source), TensorCollection):
        parts = {name: ragged_values(td, (*source, name)) for name in ("prompt", "response", "full")}
    ids, full, prompts = parts[field], parts.get("full"), parts.get("prompt") if known else None
    if ids is None:
        ids = [torch.cat(pair) for pair in zip(prompts or [], parts["response"] or [], strict=True)]
    of_mask, of_full = unravel(keys.mask), (*masks, "all_attention_mask")
    wide = ragged_values(td, of_full)
    if field == "prompt" and full and wide and ragged_values(td, of_mask) is None:
        # The prompt comes first.
        valid = [mask[: len(row)].bool() for mask, row in zip(wide, ids, strict=True)]
    else:
        valid = ragged_mask(td, ids, (of_mask, of_full), call)
    assistant = ragged_values(td, (*masks, "all_assistant_mask"))
    if assistant is None or [len(each) for each in assistant if each is not None] != [len(row) for row in ids]:
        assistant = [None] * len(ids)
    rows: list[Row] = []
    for i, row in enumerate(ids):
        mask = torch.ones_like(row, dtype=torch.bool) if valid is None else valid[i]
        n = None if prompts is None else int(mask[: len(prompts[i])].sum())
        wrote = assistant[i]
        rows.append(Row(row[mask], n, assistant=None if wrote is None else wrote[mask]))
    return rows


# Any: a tensor, or nested tuples of tensors.
def _with_ends(rows: list[Row], ends: Any, dims: int) -> list[Row]:
    if ends is None:
        return rows
    return [replace(row, is_complete=end) for row, end in zip(rows, flat_list(ends, dims), strict=True)]


def _read_mask(td: TensorCollection, keys: TokenKeys, ids: Tensor, full: Tensor | None, call: str) -> Tensor:
    """Return the mask of tokens: at its own key, else among the masks of `full`; without any all are tokens.

    Raises:
        LeafMismatchError: There are masks, and none has the shape of the tokens.
    """
    of_full = (*unravel(keys.masks), "all_attention_mask")
    wide, n = get_value(td, of_full, None), ids.shape[-1]
    alone = get_value(td, keys.mask, None) is None
    if alone and full is not None and isinstance(wide, Tensor) and wide.shape == full.shape and n < full.shape[-1]:
        # The prompt comes first.
        return wide[..., :n].bool()
    found = read_mask(td, ids, (keys.mask, of_full), call)
    return torch.ones_like(ids, dtype=torch.bool) if found is None else found.bool()


def read_mask(td: TensorCollection, ids: Tensor, paths: Sequence[NestedKey], call: str) -> Tensor | None:
    """Return the first mask of a tree that has the shape of tokens; None if the tree has no masks.

    After a generation there are two: that of the prompts, and that of prompts and responses.

    Raises:
        LeafMismatchError: There are masks, and none has the shape.
    """
    found = [mask for mask in (get_value(td, path, None) for path in paths) if isinstance(mask, Tensor)]
    fits = [mask for mask in found if mask.shape == ids.shape]
    if found and not fits:
        raise LeafMismatchError(
            f"{call}: the mask must have the shape of the tokens.",
            expected=f"shape {tuple(ids.shape)}",
            got=", ".join([f"shape {tuple(mask.shape)}" for mask in found]),
        )
    return fits[0] if fits else None


def check_prompts(rows: Sequence[Row], size: Size) -> None:
    """Raise if a prompt has no tokens.

    Raises:
        ValueError: The message has the place of the row.
    """
    for i, row in enumerate(rows):
        if not len(row.ids):
            place = torch.unravel_index(torch.tensor(i), size) if size else ()
            raise error(
                ValueError,
                f"generate: the prompt of row {', '.join(str(int(at)) for at in place) or '0'} must have tokens.",
                got="no tokens",
            )
