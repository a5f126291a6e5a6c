"""Inputs of wrappers as rows of ids: of tokens with their masks, of texts, and of conversations.

N rows, L tokens of a row, T positions of padded rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from tdfunc._lazystack import lazy_stack
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, MissingKeyError, error
from tdfunc.core.keys import dotted, unravel
from tdfunc.core.types import NestedKey
from tdfunc.llm.encode import text_tokenizer
from tdfunc.llm.functions import read_mask
from tdfunc.llm.history import History
from tdfunc.llm.rows import messages_of
from tdfunc.llm.templates.base import conversation_in
from tdfunc.llm.tokens import TokenTemplate, grown_ids
from tdfunc.llm.trees.rows import Layout, Row, flat_list, ragged_mask, ragged_values
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


def read_texts(td: TensorCollection, source: NestedKey, field: str, call: str) -> list[str]:
    """Return the texts of the batch.

    Raises:
        MissingKeyError: There are none.
        LeafMismatchError: There is not a text for each element of the batch.
    """
    value = read_field(td, source, field, call)
    size = td._batch_size
    texts = [value] * size.numel() if isinstance(value, str) else flat_list(value, len(size))
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong:
        raise LeafMismatchError(
            f"{call}: {dotted((*unravel(source), field))!r} must be a text for each element of the batch.",
            expected=f"batch size {list(size)}",
            got=repr(wrong[0])[:200],
        )
    return texts


def encode_plain(tokenizer: Any, texts: Sequence[str], options: Mapping[str, Any]) -> list[Row]:
    """Return the ids of texts, with the special tokens that the tokenizer adds.

    A text that begins with the tokenizer's `bos_token` was rendered by a template: it gets no second one.
    """
    own = text_tokenizer(tokenizer)
    adds = options.get("add_special_tokens", True)
    bos = own.bos_token or ""
    found: dict[int, list[int]] = {}
    for special in (True, False):
        places = [i for i, text in enumerate(texts) if (adds and not (bos and text.startswith(bos))) == special]
        if places:
            made = own([texts[i] for i in places], add_special_tokens=special, return_attention_mask=False)
            found.update(zip(places, made["input_ids"], strict=True))
    return [Row(torch.tensor(found[i], dtype=torch.int64)) for i in range(len(texts))]


# Any: histories.
def read_chats(td: TensorCollection, source: NestedKey, field: str, call: str) -> list[Any]:
    """Return the conversation of each element of the batch.

    Raises:
        MissingKeyError: There are none.
        LeafMismatchError: They have no dimension of messages behind the batch.
    """
    value = read_field(td, source, field, call)
    size = td._batch_size
    if not isinstance(value, History) or len(value._batch_size) != len(size) + 1:
        raise LeafMismatchError(
            f"{call}: {dotted((*unravel(source), field))!r} must be a History with a dimension of messages.",
            expected=f"batch size {[*size, -1]}",
            got=f"batch size {list(value._batch_size)}" if isinstance(value, History) else type(value).__name__,
        )
    return flat_list(value, len(size))


def encode_chats(template: TokenTemplate, chats: Sequence[Any], *, prompts: bool) -> list[Row]:
    """Return the ids of conversations, with generation prompts or with assistant masks.

    Conversations with replies that keep their ids are these ids; others are as the template renders them.
    """
    rows: dict[int, Row] = {}
    plain: list[int] = []
    for i, chat in enumerate(chats):
        if not any([message.get("token_ids") for message in messages_of(chat)]):
            plain.append(i)
            continue
        ids, wrote = grown_ids(template, conversation_in(chat), 0, prompts, False)
        rows[i] = Row(_tensor(ids), assistant=None if prompts else torch.tensor(wrote, dtype=torch.bool))
    if plain:
        tree = lazy_stack([chats[i] for i in plain]).apply_chat_template(
            tokenizer=template.tokenizer,
            chat_template=template.template,
            add_generation_prompt=prompts,
            return_dict=True,
            tokenize=True,
            return_assistant_tokens_mask=not prompts,
        )
        for i, row in zip(plain, tree, strict=True):
            rows[i] = Row(row["input_ids"], assistant=None if prompts else row["assistant_masks"])
    return [rows[i] for i in range(len(chats))]


def _tensor(ids: Sequence[int]) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64)


def cut(rows: list[Row], options: Mapping[str, Any], side: str) -> list[Row]:
    """Return rows of at most `max_length` tokens, if `truncation` is on.

    Raises:
        ValueError: The side is not left or right.
    """
    if not options.get("truncation"):
        return rows
    side = options.get("truncation_side", side)
    if side not in ("left", "right"):
        raise error(ValueError, "LLMWrapper: truncation_side must be 'left' or 'right'.", got=repr(side))
    length = options["max_length"]

    def short(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return values[:length] if side == "right" else values[max(len(values) - length, 0) :]

    return [replace(row, ids=short(row.ids), assistant=short(row.assistant)) for row in rows]


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
