"""The ids of rendered conversations: a control string has its control id only where the template wrote it.

The user's tokenizer is read and never changed. A text whose contents have control strings is encoded by a private copy,
in which control tokens have other names than the strings in the contents. Tokenizers here encode texts; a processor has
one.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tdfunc.core.errors import UnsupportedError, error
from tdfunc.llm.templates.base import Marked, Span, controls_in

# Characters around the new names of control tokens, of which one is in no text.
_GUARDS = ("\ue0d1", "\uf0d3", "\U000f1c05")
# The number of tokens in front with which ids are decoded as they follow others.
CONTEXT = 4
# The tokens of bytes, by which a model with `byte_fallback` writes characters that have no token.
_BYTES = frozenset([f"<0x{byte:02X}>" for byte in range(256)])


class Encoded(NamedTuple):
    """The ids of a text, and the characters of each token if they are known."""

    ids: list[int]
    offsets: list[tuple[int, int]]


def encode_texts(
    tokenizer: Any, texts: Sequence[str], *, offsets: bool = False, special: bool = False
) -> list[Encoded]:
    """Return the ids of texts, without truncation and pads, even if earlier calls left such options in the tokenizer.

    Args:
        tokenizer: The tokenizer. It is not called, since a call would reset the truncation and padding of its backend.
        texts: Texts without control strings in their contents.
        offsets: Also return the characters of each token.
        special: Add the tokens that the tokenizer puts around a text.
    """
    if not texts:
        return []
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        # Written in Python: a call has no state to reset.
        made = tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False)
        return [Encoded(ids, []) for ids in made["input_ids"]]
    found = None
    if backend.encode_special_tokens == tokenizer.split_special_tokens:
        found = backend.encode_batch(list(texts), add_special_tokens=special)
    if found is None or any([each.overflowing for each in found]):
        found = _whole(tokenizer).encode_batch(list(texts), add_special_tokens=special)
    return [_without_pads(each, offsets) for each in found]


def texts_behind(
    tokenizer: Any,
    before: Sequence[Sequence[int]],
    rows: Sequence[Sequence[int]],
    *,
    skip_special_tokens: bool = False,
) -> list[str]:
    """Return the texts of rows of ids as they follow other ids: every call that reads a response decodes it here.

    Some tokenizers drop the space in front of the first token of a text, or write its first piece in another way.

    Args:
        tokenizer: A tokenizer of texts.
        before: The ids in front of each row, of which the last are read.
        rows: The ids.
        skip_special_tokens: Leave out control tokens.
    """

    def text(first: Sequence[int], ids: Sequence[int]) -> str:
        tail = list(first[-CONTEXT:])
        lead = decode(tokenizer, tail, skip_special_tokens=skip_special_tokens)
        whole = decode(tokenizer, [*tail, *ids], skip_special_tokens=skip_special_tokens)
        if whole.startswith(lead):
            return whole[len(lead) :]
        # A token in front may be part of a character.
        return decode(tokenizer, ids, skip_special_tokens=skip_special_tokens)

    return [text(*pair) for pair in zip(before, rows, strict=True)]


def known_text(tokenizer: Any) -> str:
    """Return a letter, or another short text, that has a token: some tokenizers drop characters that they do not know.

    A tokenizer of DNA knows four letters.
    """
    if encode_texts(tokenizer, ["a"])[0].ids:
        return "a"
    texts = {tokenizer.convert_tokens_to_string([token]).strip() for token in tokenizer.get_vocab()}
    special = set(tokenizer.all_special_tokens)
    candidates = [text for text in texts if text.isalnum() and text not in special]
    candidates.sort(key=lambda text: (len(text), text))
    for text in candidates:
        if encode_texts(tokenizer, [text])[0].ids:
            return text
    return "a"


def _whole(tokenizer: Any) -> Any:
    """Return a copy of the backend without truncation; pads are removed later."""
    from tokenizers import Tokenizer

    # Any: without stubs.
    copy: Any = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_truncation()
    copy.encode_special_tokens = tokenizer.split_special_tokens
    return copy


# Any: an Encoding of tokenizers, without stubs.
def _without_pads(made: Any, offsets: bool) -> Encoded:
    mask = made.attention_mask
    # The tokens between pads at either side.
    real = slice(None)
    if 0 in mask:
        start = mask.index(1) if 1 in mask else 0
        real = slice(start, start + sum(mask))
    return Encoded(made.ids[real], made.offsets[real] if offsets else [])


def encode_marked(tokenizer: Any, marked: Marked, control: tuple[str, ...]) -> Encoded:
    """Return the ids of a text; control strings in its contents are encoded as ordinary text.

    Raises:
        UnsupportedError: The tokenizer is not from the package tokenizers.
        ValueError: A control string in a content does not have its own id, so that it cannot be told from the
            template's.
    """
    text = marked.text
    written = _written(marked, control)
    # A control string anywhere in the text is forged unless the template wrote it.
    known = set(written)
    forged = [match[0] for match in controls_in(text, control) if match.span() not in known]
    if not forged:
        whole = encode_texts(tokenizer, [text], offsets=True)[0]
        if not has_hidden_control(tokenizer, text, whole.ids, control):
            return whole
    copy = _private_copy(tokenizer, control, text)
    for each in forged:
        if each not in copy.names:
            raise error(
                ValueError,
                f"a content has {each!r}, which is ordinary text to this tokenizer, and could forge a message.",
                expected="contents without control strings",
                hint="add it to the tokenizer as a special token.",
            )
    parts = _rename(text, written, copy.names)
    made = copy.tokenizer.encode("".join([part.text for part in parts]), add_special_tokens=False)
    found: list[int] = made.ids
    return Encoded([copy.ids.get(each, each) for each in found], _old_places(parts, made.offsets))


def _written(marked: Marked, control: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the characters of the control strings that the template wrote, between the contents."""
    text = marked.text
    end = Span(len(text), len(text))
    found: list[tuple[int, int]] = []
    at = 0
    for content in [*sorted(marked.contents), end]:
        for match in controls_in(text[at : content.start], control):
            found.append((at + match.start(), at + match.end()))
        at = max(at, content.stop)
    return found


class _Part(NamedTuple):
    """A part of a text in which control strings got other names: such a name, or the text between two of them.

    Attributes:
        text: The part.
        start: Its place in the new text.
        old: The characters in the old text.
        is_name: It is a name, whose characters are not in the old text.
    """

    text: str
    start: int
    old: tuple[int, int]
    is_name: bool


def _rename(text: str, written: Sequence[tuple[int, int]], names: dict[str, str]) -> list[_Part]:
    """Return the parts of a text whose control strings in some places have other names."""
    parts: list[_Part] = []
    # The places behind the parts, in the new text and in the old one.
    new = 0
    old = 0
    for start, stop in [*written, (len(text), len(text))]:
        name = names.get(text[start:stop])
        is_end = start == len(text)
        if name is None and not is_end:
            continue
        parts.append(_Part(text[old:start], new, (old, start), is_name=False))
        new += start - old
        if name is not None:
            parts.append(_Part(name, new, (start, stop), is_name=True))
            new += len(name)
        old = stop
    return parts


def _old_places(parts: Sequence[_Part], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the characters in the old text of tokens of the new one; a token is inside a part."""
    starts = [part.start for part in parts]
    found: list[tuple[int, int]] = []
    for start, stop in offsets:
        # The last one of several that start there: the others are empty.
        part = parts[bisect_right(starts, start) - 1]
        if part.is_name:
            found.append(part.old)
        else:
            moved = part.old[0] - part.start
            found.append((start + moved, stop + moved))
    return found


def has_hidden_control(tokenizer: Any, text: str, ids: Sequence[int], control: tuple[str, ...]) -> bool:
    """Return whether a text has other strings than control strings that become control ids.

    A normalizer can make such strings: one of lower case of `</S>`, and NFKC of characters in full width. The control
    ids of bytes stand for characters that have no token.

    Args:
        tokenizer: The tokenizer.
        text: A text, whose control strings are the template's.
        ids: The ids of the text.
        control: The control strings.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.normalizer is None:
        return False
    # Unknown characters become the unknown token, which marks nothing.
    tokens = {each for each in control if each != tokenizer.unk_token} - _byte_tokens(control)
    names = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.content in tokens}
    tokens &= set(names.values())
    written = sum([match[0] in tokens for match in controls_in(text, control)])
    return sum([each in names for each in ids]) > written


def _byte_tokens(control: tuple[str, ...]) -> frozenset[str]:
    """Return the control tokens by which the model writes bytes: a trainer gets all of them as special tokens."""
    if _BYTES.issubset(control):
        return _BYTES
    return frozenset()


class _PrivateCopy(NamedTuple):
    """A copy of the backend of a tokenizer, in which control tokens have other names.

    Attributes:
        tokenizer: The copy.
        names: The other name of each control token.
        ids: The id in the tokenizer of each id of such a name in the copy.
    """

    # Any: tokenizers is optional, without stubs.
    tokenizer: Any
    names: dict[str, str]
    ids: dict[int, int]


def _private_copy(tokenizer: Any, control: tuple[str, ...], text: str) -> _PrivateCopy:
    """Return a copy whose names of control tokens are not in a text."""
    from tokenizers import Tokenizer

    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UnsupportedError(
            "a content has a control string, which this tokenizer cannot encode as ordinary text.",
            expected="a tokenizer of the package tokenizers (PreTrainedTokenizerFast)",
            got=type(tokenizer).__name__,
        )
    guard = next((each for each in _GUARDS if each not in text), None)
    if guard is None:
        raise error(ValueError, "a content has every character by which control tokens are renamed.", got=str(_GUARDS))
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    byte_tokens = _byte_tokens(control)
    names: dict[str, str] = {}
    ids: dict[str, int] = {}
    for i, token in enumerate(data["added_tokens"]):
        if token["content"] in control:
            name = f"{guard}{i}{guard}"
            names[token["content"]] = name
            ids[name] = token["id"]
            token["content"] = name
            # A normalizer may change or remove the guards.
            token["normalized"] = False
    # The model still finds its bytes by their names; the new name of such a token has its own id.
    _rename_in_model(data["model"], {old: new for old, new in names.items() if old not in byte_tokens})
    # Offsets are of whole tokens, spaces included; nothing is added, cut or padded.
    data.update(post_processor=None, truncation=None, padding=None)
    # Any: without stubs.
    copy: Any = Tokenizer.from_str(json.dumps(data))
    return _PrivateCopy(copy, names, {copy.token_to_id(name): number for name, number in ids.items()})


# Any: the JSON of a model of tokenizers.
def _rename_in_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """Give tokens other names in the vocabulary of a model, which is changed."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(key, key): number for key, number in vocabulary.items()}
    else:
        # Of a unigram model: tokens with their scores.
        model["vocab"] = [[names.get(key, key), score] for key, score in vocabulary]
    if model.get("merges"):
        # A word that was made a control token keeps no way to be made of its pieces.
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint([*pair, "".join(pair)])]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]


def mask_of(encoded: Encoded, spans: Sequence[Span]) -> list[bool]:
    """Return whether the last character of each token is in a span.

    Raises:
        UnsupportedError: The characters of tokens are unknown.
    """
    if not spans or not encoded.ids:
        return [False] * len(encoded.ids)
    if not encoded.offsets:
        raise UnsupportedError(
            "apply_chat_template: masks need the characters of each token, which this tokenizer does not return.",
            expected="a tokenizer of the package tokenizers (PreTrainedTokenizerFast)",
        )
    places = np.array(encoded.offsets)
    last = np.maximum(places[:, 1] - 1, places[:, 0])
    starts, stops = np.array([(span.start, span.stop) for span in spans]).T
    n = np.searchsorted(starts, last, side="right") - 1
    inside: list[bool] = ((n >= 0) & (last < stops[n])).tolist()
    return inside


def decode(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """Return the text of ids, with control tokens or without them."""
    return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
