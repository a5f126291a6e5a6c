"""The tokens of a tree, read with their masks as one `TokenBatch`.

N rows, T positions of padded rows.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, MissingKeyError
from tdfunc.core.keys import dotted, unravel
from tdfunc.core.types import NestedKey, Path
from tdfunc.llm.rows.batch import TokenBatch, flat_list
from tdfunc.llm.rows.packing import as_mask, pad_rows
from tdfunc.ops.base.reading import get_value


class TokenKeys(NamedTuple):
    """The places of tokens and their masks."""

    source: NestedKey
    mask: NestedKey
    masks: NestedKey


def missing_field(td: TensorCollection, path: Path, call: str, hint: str | None = None) -> MissingKeyError:
    """Return the error of a tree that lacks an entry."""
    keys = ", ".join([repr(path) for path in td.keys(True, True)][:20])  # pyright: ignore[reportAttributeAccessIssue]
    got = f"a {type(td).__name__} with {keys or 'no keys'}"
    return MissingKeyError(f"{call}: the tree must have {dotted(path)!r}.", got=got, hint=hint)


def read_tokens(td: TensorCollection, keys: TokenKeys, field: str, call: str) -> TokenBatch:
    """Return the tokens in a field of the record at a key, or of the entry itself.

    For `full` of a record with prompts and responses, the parts of the rows are known.

    Raises:
        MissingKeyError: The tree has no such tokens.
        LeafMismatchError: No mask has the shape of the tokens, or more than the lengths of rows is ragged.
    """
    source = unravel(keys.source)
    record = get_value(td, source, None)
    is_record = isinstance(record, TensorCollection)
    if is_record:
        places = {name: (*source, name) for name in ("prompt", "response", "full")}
    else:
        places = {field: source}
    parts = {name: value for name, place in places.items() if (value := get_value(td, place, None)) is not None}
    known = field == "full" and "prompt" in parts and "response" in parts
    if field not in parts and not known:
        hint = (
            "Tokens(full=ids, batch_size=ids.shape[:-1]) has ids, and tokens_key= names another place; "
            "history.apply_chat_template(tokenizer=tokenizer, return_dict=True) gives the ids of a history."
        )
        raise missing_field(td, (*source, field), call, hint)
    first = parts[field if field in parts else "prompt"]
    if not isinstance(first, Tensor) or first.is_nested:
        batch = _read_ragged(td, keys, {name: places[name] for name in parts}, field, known, call)
    else:
        if field in parts:
            ids = first
        else:
            ids = torch.cat([first, parts["response"]], -1)
        batch = _read_padded(td, keys, ids, parts, known, call)
    ends = None
    if is_record and field == "full":
        ends = get_value(record, "is_complete", None)
    if ends is None:
        return batch
    return replace(batch, is_complete=ends)


def _read_padded(
    td: TensorCollection, keys: TokenKeys, ids: Tensor, parts: dict[str, Any], known: bool, call: str
) -> TokenBatch:
    """Return tokens of one length, with the first mask that has their shape; without masks all are tokens.

    After a generation there are two: the mask of the prompts, and the mask of prompts and responses.
    """
    masks = unravel(keys.masks)
    full = parts.get("full")
    own, wide = (get_value(td, path, None) for path in (keys.mask, (*masks, "all_attention_mask")))
    if own is None and isinstance(wide, Tensor) and isinstance(full, Tensor) and wide.shape == full.shape:
        # A prompt comes first.
        wide = wide[..., : ids.shape[-1]]
    found = [mask for mask in (own, wide) if isinstance(mask, Tensor)]
    mask = next((mask for mask in found if mask.shape == ids.shape), None)
    if found and mask is None:
        raise LeafMismatchError(
            f"{call}: the mask must have the shape of the tokens.",
            expected=f"shape {tuple(ids.shape)}",
            got=", ".join([f"shape {tuple(mask.shape)}" for mask in found]),
        )
    if mask is None:
        mask = torch.ones_like(ids, dtype=torch.bool)
    else:
        mask = as_mask(mask, call)
    wrote = get_value(td, (*masks, "all_assistant_mask"), None)
    rows = Size((ids.shape[:-1].numel(), ids.shape[-1]))
    return TokenBatch(
        ids.reshape(rows),
        mask.reshape(rows),
        ids.shape[:-1],
        parts["prompt"].shape[-1] if known else None,
        assistant=wrote.reshape(rows) if isinstance(wrote, Tensor) and wrote.shape == ids.shape else None,
    )


def _read_ragged(
    td: TensorCollection, keys: TokenKeys, places: dict[str, Path], field: str, known: bool, call: str
) -> TokenBatch:
    """Return ragged tokens, padded at the right, with the first ragged masks that have their lengths."""
    if len(places) > 1:
        holder = get_value(td, next(iter(places.values()))[:-1])
    else:
        holder = td
    lead = holder._batch_size
    if -1 in lead:
        raise LeafMismatchError(
            f"{call}: only the length of the rows may be ragged.",
            expected="a batch size",
            got=f"batch size {list(lead)}",
            hint="td.reshape(-1)",
        )
    parts = {name: ragged_values(td, place) or [] for name, place in places.items()}
    rows = parts.get(field) or [torch.cat(pair) for pair in zip(parts["prompt"], parts["response"], strict=True)]
    lengths = [len(row) for row in rows]
    masks = unravel(keys.masks)
    own, wide = (ragged_values(td, path) for path in (unravel(keys.mask), (*masks, "all_attention_mask")))
    if own is None and wide is not None and field == "prompt" and "full" in parts:
        # A prompt comes first.
        wide = [mask[:length] for mask, length in zip(wide, lengths, strict=True)]
    found = [
        [torch.ones_like(row, dtype=torch.bool) if m is None else as_mask(m, call) for row, m in pairs]
        for pairs in (list(zip(rows, each, strict=True)) for each in (own, wide) if each is not None)
    ]
    valid = next((each for each in found if [len(mask) for mask in each] == lengths), None)
    if found and valid is None:
        raise LeafMismatchError(
            f"{call}: the masks must have the lengths of the tokens.",
            expected=str(lengths),
            got=", ".join([str([len(mask) for mask in each]) for each in found]),
        )
    ids, mask = pad_rows(rows, side="right")
    if valid is not None:
        mask = pad_rows(valid, side="right")[0]
    wrote = ragged_values(td, (*masks, "all_assistant_mask"))
    if wrote is not None and [None if each is None else len(each) for each in wrote] != lengths:
        wrote = None
    prompts = None
    if known:
        prompts = [len(row) for row in parts["prompt"]]
    return TokenBatch(ids, mask, lead, prompts, lengths, None if wrote is None else pad_rows(wrote, side="right")[0])


def ragged_values(td: TensorCollection, path: Path) -> list[Any] | None:
    """Return an entry for each element of the batch, None where it is missing; None if the entry is not ragged."""
    size = len(td._batch_size)
    if td._is_lazy:
        # By the trees: one may lack the entry, and a tuple of values follows the dimension of the stack.
        found = [get_value(each, path, None) for each in flat_list(td, size)]
        return found if any([each is not None for each in found]) else None
    value = get_value(td, path[:1], None)
    if isinstance(value, TensorCollection) and len(path) > 1:
        return ragged_values(value, path[1:])
    if value is None or (isinstance(value, Tensor) and not value.is_nested):
        return None
    return flat_list(value, size)


def check_batch(batch: TokenBatch, td: TensorCollection, source: NestedKey, call: str) -> None:
    """Raise unless there is a row of tokens for each element of the tree's batch.

    Raises:
        LeafMismatchError: The message has both sizes.
    """
    if batch.lead != td._batch_size:
        raise LeafMismatchError(
            f"{call}: the tokens {dotted(unravel(source))!r} must be rows of the batch.",
            expected=f"shape {(*td._batch_size, 'T')}",
            got=f"shape {(*batch.lead, batch.ids.shape[1])}",
        )
