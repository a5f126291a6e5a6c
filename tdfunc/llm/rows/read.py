"""The tokens of a tree, read with their masks as one `TokenBatch`.

N rows, T positions of padded rows.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import is_known
from tdfunc.core.errors import LeafMismatchError, MissingKeyError, brief
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
    paths = list(td.keys(True, True))  # pyright: ignore[reportAttributeAccessIssue]
    keys = ", ".join(map(repr, paths[:10]))
    got = f"a {type(td).__name__} with {keys or 'no keys'}"
    return MissingKeyError(f"{call}: the tree does not have {dotted(path)!r}.", got=got, hint=hint)


@dataclass(frozen=True)
class _Fields:
    """The tokens of a record, or of an entry that is not a record.

    Attributes:
        field: The field to read.
        places: The place of each field that the tree has.
        values: The tokens of each of these fields.
        is_record: True for the fields of a record.
    """

    field: str
    places: dict[str, Path]
    # Any: tensors, nested tensors, or what a lazy stack has in their place.
    values: dict[str, Any]
    is_record: bool

    @property
    def has_parts(self) -> bool:
        """True if `full` is read, and the prompts and the responses of its rows are known."""
        return self.field == "full" and "prompt" in self.values and "response" in self.values

    @property
    def is_ragged(self) -> bool:
        """True if each row has its own length."""
        # `full` may be missing beside its two parts.
        first = self.values[self.field if self.field in self.values else "prompt"]
        return not isinstance(first, Tensor) or first.is_nested


def read_tokens(td: TensorCollection, keys: TokenKeys, field: str, call: str) -> TokenBatch:
    """Return the tokens in a field of the record at a key, or of the entry itself.

    For `full` of a record with prompts and responses, the parts of the rows are known.

    Raises:
        MissingKeyError: The tree has no such tokens.
        LeafMismatchError: No mask has the shape of the tokens, or more than the lengths of rows is ragged.
    """
    source = unravel(keys.source)
    record = get_value(td, source, None)
    fields = _find_fields(td, record, source, field)
    if field not in fields.values and not fields.has_parts:
        hint = (
            "Tokens(full=ids, batch_size=ids.shape[:-1]) has ids, and tokens_key= names another place; "
            "history.apply_chat_template(tokenizer=tokenizer, return_dict=True) gives the ids of a history."
        )
        raise missing_field(td, (*source, field), call, hint)
    if fields.is_ragged:
        batch = _read_ragged(td, keys, fields, call)
    else:
        batch = _read_padded(td, keys, fields, call)
    if not fields.is_record or field != "full":
        return batch
    return replace(batch, is_complete=get_value(record, "is_complete", None))


# Any: the entry at the source.
def _find_fields(td: TensorCollection, record: Any, source: Path, field: str) -> _Fields:
    """Return the tokens at a source, which is a record or the field itself."""
    is_record = isinstance(record, TensorCollection)
    if is_record:
        candidates = {name: (*source, name) for name in ("prompt", "response", "full")}
    else:
        candidates = {field: source}
    places: dict[str, Path] = {}
    values: dict[str, Any] = {}
    for name, place in candidates.items():
        value = get_value(td, place, None)
        if value is not None:
            places[name] = place
            values[name] = value
    return _Fields(field, places, values, is_record)


def _read_padded(td: TensorCollection, keys: TokenKeys, fields: _Fields, call: str) -> TokenBatch:
    """Return tokens of one length."""
    values = fields.values
    _check_joined(td, fields, keys, call)
    if fields.field in values:
        ids = values[fields.field]
    else:
        ids = torch.cat([values["prompt"], values["response"]], -1)
    mask = _padded_mask(td, keys, ids, values.get("full"), call)
    lead = ids.shape[:-1]
    rows = Size((lead.numel(), ids.shape[-1]))
    prompt = None
    if fields.has_parts:
        prompt = values["prompt"].shape[-1]
    assistant = get_value(td, (*unravel(keys.masks), "all_assistant_mask"), None)
    if isinstance(assistant, Tensor) and assistant.shape == ids.shape:
        assistant = assistant.reshape(rows)
    else:
        # A mask of other tokens, as of a conversation before its reply.
        assistant = None
    return TokenBatch(ids.reshape(rows), mask.reshape(rows), lead, prompt, assistant=assistant)


def _check_joined(td: TensorCollection, fields: _Fields, keys: TokenKeys, call: str) -> None:
    """Raise unless `full` has the prompts followed by the responses: rows that were padded field by field have not.

    The ids of pads may differ.

    Raises:
        LeafMismatchError: The message has both shapes.
    """
    if len(fields.places) < 3:
        return
    full = fields.values["full"]
    prompt = fields.values["prompt"]
    if fields.field == "prompt" and _is_mask_of(get_value(td, keys.mask, None), prompt):
        # Prompts that have their own mask are read without `full`.
        return
    joined = torch.cat([prompt, fields.values["response"]], -1)
    if full.shape == joined.shape:
        differs = full != joined
        if not is_known(differs):
            return
        for mask in _wide_masks(td, keys, full):
            differs = differs & as_mask(mask, call)
        if not differs.any():
            return
    raise LeafMismatchError(
        f"{call}: `full` does not have the prompts followed by the responses, so that responses have no common "
        "beginning: ragged tokens were padded field by field, or one field was edited.",
        expected=f"`full` as the prompts followed by the responses, shape {tuple(joined.shape)}",
        got=f"shape {tuple(full.shape)}, with other tokens",
        hint="use the ragged stack and pad the result, or give `full` alone. A wrapper with generate=False and "
        "pad_output=True pads ragged rows at their prompts.",
    )


# Any: an entry of the tree, and tokens.
def _is_mask_of(value: Any, tokens: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == tokens.shape


def _wide_masks(td: TensorCollection, keys: TokenKeys, full: Tensor) -> list[Tensor]:
    """Return the mask of prompts and responses that is read, or no mask."""
    places: list[NestedKey] = [keys.mask, (*unravel(keys.masks), "all_attention_mask")]
    found = [get_value(td, place, None) for place in places]
    return [mask for mask in found if _is_mask_of(mask, full)][:1]


# Any: the field `full`, if the tree has it.
def _padded_mask(td: TensorCollection, keys: TokenKeys, ids: Tensor, full: Any, call: str) -> Tensor:
    """Return the first mask that has the shape of the tokens; without masks all are tokens.

    After a generation there are two: the mask of the prompts, and the mask of prompts and responses.
    """
    own = get_value(td, keys.mask, None)
    wide = get_value(td, (*unravel(keys.masks), "all_attention_mask"), None)
    is_wide = isinstance(wide, Tensor) and isinstance(full, Tensor) and wide.shape == full.shape
    if own is None and is_wide:
        # A prompt comes first.
        wide = wide[..., : ids.shape[-1]]
    found = [mask for mask in (own, wide) if isinstance(mask, Tensor)]
    if not found:
        return torch.ones_like(ids, dtype=torch.bool)
    for mask in found:
        if mask.shape == ids.shape:
            return as_mask(mask, call)
    raise LeafMismatchError(
        f"{call}: the mask and the tokens differ in shape.",
        expected=f"shape {tuple(ids.shape)}",
        got=", ".join([f"shape {tuple(mask.shape)}" for mask in found]),
    )


def _read_ragged(td: TensorCollection, keys: TokenKeys, fields: _Fields, call: str) -> TokenBatch:
    """Return ragged tokens, padded at the right."""
    lead = _ragged_size(td, fields, call)
    parts = {name: ragged_values(td, place) or [] for name, place in fields.places.items()}
    if fields.field in parts:
        rows = parts[fields.field]
    else:
        rows = [torch.cat(pair) for pair in zip(parts["prompt"], parts["response"], strict=True)]
    # A prompt comes first in the mask of `full`.
    is_front = fields.field == "prompt" and "full" in parts
    masks = _ragged_masks(td, keys, rows, call, is_front=is_front)
    ids, mask = pad_rows(rows, side="right")
    if masks is not None:
        mask, _ = pad_rows(masks, side="right")
    prompts = None
    if fields.has_parts:
        prompts = [len(row) for row in parts["prompt"]]
    lengths = [len(row) for row in rows]
    return TokenBatch(ids, mask, lead, prompts, lengths, _ragged_assistant(td, keys, lengths))


def _ragged_size(td: TensorCollection, fields: _Fields, call: str) -> Size:
    """Return the batch size of ragged tokens.

    Raises:
        LeafMismatchError: The batch size itself is ragged.
    """
    holder = td
    if len(fields.places) > 1:
        record = next(iter(fields.places.values()))[:-1]
        holder = get_value(td, record)
    lead = holder._batch_size
    if -1 in lead:
        raise LeafMismatchError(
            f"{call}: the rows are ragged in more than their length.",
            expected="a batch size",
            got=f"batch size {list(lead)}",
            hint="td.reshape(-1)",
        )
    return lead


def _ragged_masks(
    td: TensorCollection, keys: TokenKeys, rows: list[Tensor], call: str, *, is_front: bool
) -> list[Tensor] | None:
    """Return the first ragged masks that have the lengths of the rows; None if the tree has no ragged masks.

    With `is_front` the rows are the beginning of the rows of the wide mask.
    """
    lengths = [len(row) for row in rows]
    own = ragged_values(td, unravel(keys.mask))
    wide = ragged_values(td, (*unravel(keys.masks), "all_attention_mask"))
    if own is None and wide is not None and is_front:
        wide = [mask[:length] for mask, length in zip(wide, lengths, strict=True)]
    found = [_as_masks(values, rows, call) for values in (own, wide) if values is not None]
    if not found:
        return None
    sizes: list[list[int]] = []
    for masks in found:
        sizes.append([len(mask) for mask in masks])
        if sizes[-1] == lengths:
            return masks
    raise LeafMismatchError(
        f"{call}: the masks do not have the lengths of the tokens.",
        expected=brief(lengths),
        got=", ".join(map(brief, sizes)),
    )


def _as_masks(values: list[Any], rows: list[Tensor], call: str) -> list[Tensor]:
    """Return the masks of rows as bools; without a mask all of a row are tokens."""
    masks: list[Tensor] = []
    for row, mask in zip(rows, values, strict=True):
        if mask is None:
            masks.append(torch.ones_like(row, dtype=torch.bool))
        else:
            masks.append(as_mask(mask, call))
    return masks


def _ragged_assistant(td: TensorCollection, keys: TokenKeys, lengths: list[int]) -> Tensor | None:
    """Return the assistant's masks, padded at the right; None if they are missing, or of other tokens."""
    wrote = ragged_values(td, (*unravel(keys.masks), "all_assistant_mask"))
    if wrote is None or any([mask is None for mask in wrote]):
        return None
    if [len(mask) for mask in wrote] != lengths:
        return None
    return pad_rows(wrote, side="right")[0]


def ragged_values(td: TensorCollection, path: Path) -> list[Any] | None:
    """Return an entry for each element of the batch, None where it is missing; None if the entry is not ragged."""
    size = len(td._batch_size)
    if td._is_lazy:
        # By the trees: one may lack the entry, and a tuple of values follows the dimension of the stack.
        found = [get_value(each, path, None) for each in flat_list(td, size)]
        if all([each is None for each in found]):
            return None
        return found
    value = get_value(td, path[:1], None)
    if isinstance(value, TensorCollection) and len(path) > 1:
        return ragged_values(value, path[1:])
    if value is None:
        return None
    if isinstance(value, Tensor) and not value.is_nested:
        return None
    return flat_list(value, size)


def check_batch(batch: TokenBatch, td: TensorCollection, source: NestedKey, call: str) -> None:
    """Raise unless there is a row of tokens for each element of the tree's batch.

    Raises:
        LeafMismatchError: The message has both sizes.
    """
    if batch.lead != td._batch_size:
        raise LeafMismatchError(
            f"{call}: the tokens {dotted(unravel(source))!r} are not rows of the batch.",
            expected=f"shape {(*td._batch_size, 'T')}",
            got=f"shape {(*batch.lead, batch.ids.shape[1])}",
        )
