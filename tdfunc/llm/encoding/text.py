"""Texts as tokens and back: pure functions of a tokenizer of transformers, which is read and never changed."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import cached_property
from tdfunc.core.errors import brief, error
from tdfunc.llm.encoding.encode import encode_texts, known_text
from tdfunc.llm.encoding.padding import EncodedRow, Layout, arrange, pad_id_of
from tdfunc.llm.rows.packing import as_mask
from tdfunc.llm.templates.base import text_tokenizer


# Any: a text, or lists of texts nested as the batch.
def tokenize_text(
    tokenizer: Any,
    text: Any,
    *,
    add_special_tokens: bool = True,
    padding: bool | str = False,
    truncation: bool | str = False,
    max_length: int | None = None,
    padding_side: str = "left",
    truncation_side: str = "right",
) -> Any:
    """Return the ids of texts, with masks that are made from their lengths.

    Args:
        tokenizer: A tokenizer or processor of transformers.
        text: A text, or (nested) lists of texts.
        add_special_tokens: Add the tokens that the tokenizer puts around a text; truncation keeps them. A text that
            begins with the first of them, such as a rendered conversation, gets none.
        padding: True or "longest", "max_length", or False.
        truncation: Truncate rows to `max_length`.
        max_length: The maximum number of tokens in a row, including the added tokens.
        padding_side: "left" or "right".
        truncation_side: The side at which tokens are removed.

    Returns:
        A tree with `input_ids` and the bool `attention_mask`. For one text it has no batch; for lists it has their
        batch. Without padding it is a lazy stack.

    Raises:
        TypeError: An element is neither a text nor a list.
        ValueError: An option has an invalid value.

    Source:
        `torchrl.data.TensorDictTokenizer`.
    """
    layout = Layout(padding, truncation, max_length, padding_side, truncation_side)
    layout.check("tokenize_text")
    flat: list[str] = []
    nested = _number(text, flat)
    rows = text_rows(tokenizer, flat, add_special_tokens=add_special_tokens, layout=layout)
    return arrange(nested, rows, layout, pad_id_of(text_tokenizer(tokenizer)))


def _number(text: Any, flat: list[str]) -> Any:
    """Put the texts into a flat list; return their numbers, nested as they were."""
    if isinstance(text, str):
        flat.append(text)
        return len(flat) - 1
    if isinstance(text, (list, tuple)):
        items: Sequence[Any] = text
        return [_number(item, flat) for item in items]
    raise error(TypeError, "tokenize_text: an element is not a text or a list of texts.", got=brief(text))


def text_rows(
    tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool = True, layout: Layout | None = None
) -> list[EncodedRow]:
    """Return the row of each text: every call that takes texts encodes them here.

    A text that begins with the token that a tokenizer puts in front was rendered by a chat template. It gets no second
    one, and no token behind it.

    Args:
        tokenizer: A tokenizer or processor.
        texts: The texts.
        add_special_tokens: Add the tokens that the tokenizer puts around a text.
        layout: A truncation, which keeps the added tokens.
    """
    own = text_tokenizer(tokenizer)
    # For each text: the tokenizer adds its tokens.
    adds = [False] * len(texts)
    added = (0, 0)
    if add_special_tokens:
        around = Around(own)
        adds = [around.adds_to(text) for text in texts]
        added = around.counts
    rows: dict[int, EncodedRow] = {}
    for special in (False, True):
        places = [i for i, each in enumerate(adds) if each == special]
        made = encode_texts(own, [texts[i] for i in places], special=special)
        first, last = added if special else (0, 0)
        for i, encoded in zip(places, made, strict=True):
            row: EncodedRow = {"input_ids": torch.tensor(encoded.ids, dtype=torch.int64)}
            rows[i] = row if layout is None else layout.cut(row, first=first, last=last)
    return [rows[i] for i in range(len(texts))]


@dataclass(frozen=True)
class Around:
    """The tokens that a tokenizer puts around a text."""

    # Any: a tokenizer of transformers.
    tokenizer: Any

    @cached_property
    def counts(self) -> tuple[int, int]:
        """The numbers of tokens before and after a text."""
        plain, full = self._ids
        first = 0
        for i in range(len(full)):
            if full[i : i + len(plain)] == plain:
                first = i
                break
        return first, len(full) - len(plain) - first

    @cached_property
    def _ids(self) -> tuple[list[int], list[int]]:
        text = known_text(self.tokenizer)
        plain = encode_texts(self.tokenizer, [text], special=False)[0].ids
        full = encode_texts(self.tokenizer, [text], special=True)[0].ids
        return plain, full

    @cached_property
    def _leads(self) -> tuple[str, ...]:
        """The strings of which a text that a template rendered begins with one."""
        leads: list[str] = []
        if self.tokenizer.bos_token:
            leads.append(self.tokenizer.bos_token)
        if self.counts[0]:
            leads.append(self.tokenizer.convert_ids_to_tokens(self._ids[1][0]))
        return tuple(leads)

    def adds_to(self, text: str) -> bool:
        """Return whether the tokens are put around a text: not if it has the first of them already."""
        return not text.startswith(self._leads)


def with_eos(tokenizer: Any, ids: list[int], added: int = 0) -> list[int]:
    """Return the ids of a text with the end token of its tokenizer, unless they already end with it.

    Args:
        tokenizer: A tokenizer.
        ids: The ids.
        added: The number of tokens after the text that the tokenizer added; the end token precedes them.

    Raises:
        ValueError: The tokenizer has no end token.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise error(
            ValueError,
            "the tokenizer has no end token that add_eos_token=True could add.",
            expected="a tokenizer with an eos_token",
            got=f"a {type(tokenizer).__name__} without one",
            hint='tokenizer.eos_token = "..." names one of its tokens.',
        )
    end = len(ids) - added
    # Some tokenizers put the end token after a text themselves.
    if eos in ids[end:] or ids[end - 1 : end] == [eos]:
        return ids
    return [*ids[:end], eos, *ids[end:]]


def added_counts(tokenizer: Any, texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return how many tokens `text_rows` adds before and after each text."""
    around = Around(text_tokenizer(tokenizer))
    return [around.counts if around.adds_to(text) else (0, 0) for text in texts]


# Any: texts, nested as the batch.
def detokenize(tokenizer: Any, tokens: Any, mask: Tensor | None = None, *, skip_special_tokens: bool = True) -> Any:
    """Return the texts of ids.

    Args:
        tokenizer: A tokenizer or processor of transformers.
        tokens: Ids as a tensor (*B, T) or (nested) lists of ids; or a tree with `input_ids` and `attention_mask`.
        mask: False or 0 at pads, for a tensor (*B, T).
        skip_special_tokens: Leave out control tokens.

    Returns:
        A text, or lists of texts nested as the batch.

    Raises:
        LeafMismatchError: The mask has numbers to add to attention scores.
    """
    own = text_tokenizer(tokenizer)

    def texts(ids: Any, real: Any = None) -> Any:
        if isinstance(ids, TensorCollection):
            tree: Any = ids
            if tree._is_lazy:
                return [texts(row) for row in tree.unbind(0)]
            return texts(tree["input_ids"], tree.get("attention_mask", None))
        if isinstance(ids, Tensor) and ids.ndim == 1:
            # Masks of transformers are integers, which would choose places.
            row = ids if real is None else ids[as_mask(real, "detokenize")]
            ids = row.tolist()
        if isinstance(ids, (list, tuple)) and all([isinstance(item, int) for item in ids]):
            return own.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        if real is None:
            return [texts(row) for row in ids]
        return [texts(*pair) for pair in zip(ids, real, strict=True)]

    return texts(tokens, mask)


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of a tokenizer: of everything that affects ids and chat templates.

    It does not cover padding and truncation, which earlier calls may have left in the backend.
    """
    own = text_tokenizer(tokenizer)
    state = xxhash.xxh3_128(type(own).__qualname__.encode())
    shown = {"template": tokenizer.chat_template, "special": own.special_tokens_map}
    backend = getattr(own, "backend_tokenizer", None)
    if backend is not None:
        shown["backend"] = {**json.loads(backend.to_str()), "padding": None, "truncation": None}
        shown["split"] = own.split_special_tokens
    else:
        with tempfile.TemporaryDirectory() as folder:
            own.save_pretrained(folder)
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    state.update(path.name.encode() + path.read_bytes())
    state.update(json.dumps(shown, sort_keys=True, default=str).encode())
    return state.hexdigest()
