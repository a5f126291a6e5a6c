"""Texts and conversations of a tree as rows of ids, for wrappers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tdfunc._lazystack import lazy_stack
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, error
from tdfunc.core.keys import dotted, unravel
from tdfunc.core.types import NestedKey
from tdfunc.llm.conversations.exact import TokenTemplate, grown_ids
from tdfunc.llm.conversations.history import History
from tdfunc.llm.encoding.encode import text_tokenizer
from tdfunc.llm.messages.columns import messages_of
from tdfunc.llm.rows.batch import Row, flat_list, ragged_values
from tdfunc.llm.rows.read import read_field
from tdfunc.llm.templates.base import conversation_in
from tdfunc.ops.reading import get_value


def read_texts(td: TensorCollection, source: NestedKey, field: str, call: str) -> list[str]:
    """Return the texts of the batch.

    Raises:
        MissingKeyError: There are none.
        LeafMismatchError: There is not a text for each element of the batch.
    """
    value = read_field(td, source, field, call)
    size = td._batch_size
    record, path = get_value(td, source), unravel(source)
    if isinstance(value, str):
        texts = [value] * size.numel()
    elif isinstance(record, TensorCollection) and record._is_lazy:
        # Its values lie along the dimension of the stack, which need not be the first.
        texts = ragged_values(td, (*path, field)) or []
    else:
        texts = ragged_values(td, path) or [] if td._is_lazy else flat_list(value, len(size))
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
