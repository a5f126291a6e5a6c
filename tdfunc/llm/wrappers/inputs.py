"""`Reader`: the tokens, texts or conversations of a tree as rows of ids, for wrappers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, error
from tdfunc.core.keys import dotted, unravel
from tdfunc.llm.conversations.exact import TokenTemplate, grown_ids
from tdfunc.llm.conversations.history import History
from tdfunc.llm.encoding.chat import chat_rows
from tdfunc.llm.encoding.padding import EncodedRow, Layout, unmask_first
from tdfunc.llm.encoding.text import text_rows
from tdfunc.llm.encoding.trained import check_masks
from tdfunc.llm.messages.columns import Conversation, conversations_in
from tdfunc.llm.rows.batch import Row, TokenBatch, check_prompts, flat_list
from tdfunc.llm.rows.read import TokenKeys, check_batch, missing_field, ragged_values, read_tokens
from tdfunc.ops.base.reading import get_value


class Inputs(NamedTuple):
    """The inputs of a call.

    Attributes:
        rows: The tokens of each element of the batch.
        batch: The padded tokens, where tokens were read and were padded.
        texts: The texts, in text mode.
        chats: The conversations, in history mode.
    """

    rows: list[Row]
    batch: TokenBatch | None = None
    texts: list[str] | None = None
    # Any: History.
    chats: list[Any] | None = None


@dataclass(frozen=True)
class Reader:
    """The rules by which a wrapper reads its inputs.

    Attributes:
        mode: "history", "text" or "tokens".
        keys: The places of the input and of masks.
        call: The name of the wrapper's class, for messages.
        tokenizer: The tokenizer of texts, taken from a processor; None for tokens.
        template: The template of histories.
        layout: The truncation of rows of texts and histories.
        add_special_tokens: Add the tokens that the tokenizer puts around a text.
    """

    mode: str
    keys: TokenKeys
    call: str
    # Any: a tokenizer of transformers.
    tokenizer: Any
    template: TokenTemplate | None
    layout: Layout
    add_special_tokens: bool

    def read(self, td: TensorCollection, field: str) -> Inputs:
        """Return the rows of a field of the input.

        Raises:
            MissingKeyError: The tree has no input.
            LeafMismatchError: The shape of the input does not fit the batch, or a mask does not fit the tokens.
            ValueError: A prompt has no tokens.
        """
        if self.mode == "tokens":
            batch = read_tokens(td, self.keys, field, self.call)
            check_batch(batch, td, self.keys.source, self.call)
            inputs = Inputs(batch.rows(), batch if batch.lengths is None else None)
        elif self.mode == "text":
            texts = self._texts(td, field)
            inputs = Inputs(self._encode_texts(texts), texts=texts)
        else:
            chats, conversations = self._chats(td, field)
            inputs = Inputs(self._encode_chats(conversations, prompts=field == "prompt"), chats=chats)
        if field == "prompt":
            check_prompts(inputs.rows, td._batch_size)
        return inputs

    # Any: texts or histories.
    def _entry(self, td: TensorCollection, field: str) -> Any:
        """Return a field of the record at the source, or the entry itself if it is not a record."""
        value = get_value(td, self.keys.source, None)
        if isinstance(value, TensorCollection) and not isinstance(value, History):
            value = get_value(value, field, None)
        if value is None:
            raise missing_field(td, (*unravel(self.keys.source), field), self.call)
        return value

    def _texts(self, td: TensorCollection, field: str) -> list[str]:
        """Return the texts of the batch."""
        path = unravel(self.keys.source)
        value = self._entry(td, field)
        size = td._batch_size
        record = get_value(td, path)
        if isinstance(value, str):
            texts = [value] * size.numel()
        elif isinstance(record, TensorCollection) and record._is_lazy:
            # Its values follow the dimension of the stack, which need not be the first.
            texts = ragged_values(td, (*path, field)) or []
        elif td._is_lazy:
            texts = ragged_values(td, path) or []
        else:
            texts = flat_list(value, len(size))
        wrong = [text for text in texts if not isinstance(text, str)]
        if wrong:
            raise LeafMismatchError(
                f"{self.call}: {dotted((*path, field))!r} is not a text for each element of the batch.",
                expected=f"batch size {list(size)}",
                got=repr(wrong[0])[:200],
            )
        return texts

    def _encode_texts(self, texts: Sequence[str]) -> list[Row]:
        """Return the ids of texts, with the special tokens that the tokenizer adds, which truncation keeps."""
        rows = text_rows(self.tokenizer, texts, add_special_tokens=self.add_special_tokens, layout=self.layout)
        return [_row(row) for row in rows]

    # Any: histories.
    def _chats(self, td: TensorCollection, field: str) -> tuple[list[Any], list[Conversation]]:
        """Return the conversation of each element of the batch, as a history and as messages."""
        path = unravel(self.keys.source)
        value = self._entry(td, field)
        size = td._batch_size
        wrong = None
        if not isinstance(value, History):
            wrong = type(value).__name__
        elif len(value._batch_size) != len(size) + 1:
            wrong = f"batch size {list(value._batch_size)}"
        if wrong is not None:
            raise LeafMismatchError(
                f"{self.call}: {dotted((*path, field))!r} is not a History with a dimension of messages.",
                expected=f"batch size {[*size, -1]}",
                got=wrong,
            )
        chats = flat_list(value, len(size))
        return chats, conversations_in(chats)

    def _encode_chats(self, conversations: Sequence[Conversation], *, prompts: bool) -> list[Row]:
        """Return the ids of conversations, with generation prompts or with assistant masks.

        Conversations with replies that keep their ids are these ids; others are as the template renders them.
        """
        assert self.template is not None
        kept = [_has_ids(each) for each in conversations]
        plain = [each for each, is_kept in zip(conversations, kept, strict=True) if not is_kept]
        rendered = chat_rows(
            self.tokenizer, self.template.template, plain, generation_prompt=prompts, masks=not prompts
        )
        # Of complete rows: log-probs of truncated rows are right without a reply.
        if not prompts:
            check_masks(rendered, plain, call=self.call)
        rest = iter(rendered)
        rows: list[EncodedRow] = []
        for conversation, is_kept in zip(conversations, kept, strict=True):
            if is_kept:
                rows.append(self._kept_row(self.template, conversation, prompts=prompts))
            else:
                rows.append(next(rest))
        if prompts:
            self._check_headers(rows)
        return [_row(self.layout.cut(row)) for row in rows]

    def _kept_row(self, template: TokenTemplate, conversation: Conversation, *, prompts: bool) -> EncodedRow:
        """Return the ids of a conversation with the ids that its replies were sampled as."""
        ids, wrote = grown_ids(template, conversation, 0, prompts, False)
        row: EncodedRow = {"input_ids": torch.tensor(ids, dtype=torch.int64)}
        if not prompts:
            row["assistant_masks"] = torch.tensor(wrote, dtype=torch.bool)
        return row

    def _check_headers(self, rows: Sequence[EncodedRow]) -> None:
        """Raise if truncation removes the end of a prompt: without the header of a reply no reply would follow.

        Raises:
            ValueError: The message has the number of the conversation.
        """
        if self.layout.truncation_side != "right":
            return
        for i, row in enumerate(rows):
            if self.layout.cut(row) is row:
                continue
            raise error(
                ValueError,
                f"{self.call}: truncation would remove the end of the prompt of conversation {i}.",
                expected=f"at most {self.layout.max_length} tokens",
                got=f"{len(row['input_ids'])} tokens, and truncation_side='right'",
                hint='tokenizer_kwargs={"truncation_side": "left", ...} keeps the end.',
            )


def _has_ids(conversation: Conversation) -> bool:
    """Return True if a reply has the ids that it was sampled as."""
    return any([message.get("token_ids") for message in conversation.messages])


def _row(row: EncodedRow) -> Row:
    row = unmask_first(row)
    return Row(row["input_ids"], assistant=row.get("assistant_masks"))
