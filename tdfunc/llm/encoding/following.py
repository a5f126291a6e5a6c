"""The ids of a text that follows another text: a response after its prompt, a reply after its header.

Many tokenizers treat the start of a text in another way than its middle. SentencePiece puts a space there, WordPiece
begins a word, and some special tokens remove the spaces behind them. A text that follows another one is therefore never
encoded alone, except by tokenizers that treat both places alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tdfunc.core.context import cached_property
from tdfunc.llm.encoding.encode import decode, encode_marked, encode_texts, known_text
from tdfunc.llm.templates.base import Marked, join_marked

# Texts and their continuations, in which "a" stands for any text that has a token. By them a tokenizer that treats the
# start of a text in its own way is recognised.
_PROBES = (("a", "a"), ("a", " a"), ("a", "  a"), ("a\n", "a"), ("a ", "a"), ("a.", "A"))
# Texts that can be in front, if a token would belong to both texts. They seldom make a token with what follows.
_STAND_INS = ("\n", "\ue0d1", "a", "q", "0")


@dataclass(frozen=True)
class Following:
    """The ids of texts that follow other texts; no token belongs to both.

    Args:
        tokenizer: A tokenizer of texts.
        control: The control strings, which are ordinary text in the contents of a marked text.
    """

    # Any: a tokenizer of transformers.
    tokenizer: Any
    control: tuple[str, ...] = ()

    def ids(self, before: Marked, text: Marked) -> list[int]:
        """Return the ids of a text as they follow another text.

        They are the ids that remain of both texts together without the ids of the first one. If there is a token that
        belongs to both texts, they are ids with which both texts are decoded to the same text as together.
        """
        alone = self._encode(text)
        if not before.text or not text.text or self._treats_places_alike:
            return alone
        first = self._encode(before)
        together = self._encode(join_marked(before, text))
        if together[: len(first)] == first:
            return together[len(first) :]
        expected = decode(self.tokenizer, together)
        for ids in self._behind_stand_ins(before.text[-1], text):
            if decode(self.tokenizer, first + ids) == expected:
                return ids
        return alone

    def text_ids(self, before: Sequence[str], texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts, each as it follows another text."""
        if self._treats_places_alike:
            return [each.ids for each in encode_texts(self.tokenizer, texts)]
        pairs = zip(before, texts, strict=True)
        return [self.ids(Marked(first, [], []), Marked(text, [], [])) for first, text in pairs]

    def _encode(self, text: Marked) -> list[int]:
        return encode_marked(self.tokenizer, text, self.control).ids

    def _behind_stand_ins(self, last: str, text: Marked) -> Iterator[list[int]]:
        """Yield the ids of a text behind other texts, where these keep their own ids."""
        for each in (last, *_STAND_INS):
            stand_in = Marked(each, [], [])
            first = self._encode(stand_in)
            together = self._encode(join_marked(stand_in, text))
            if together[: len(first)] == first:
                yield together[len(first) :]

    @cached_property
    def _treats_places_alike(self) -> bool:
        """Whether the ids of a text are right at the start of a text and behind another text."""
        # Such a token removes spaces behind it, which are then part of no text.
        if any([token.rstrip for token in self.tokenizer.added_tokens_decoder.values()]):
            return False
        known = known_text(self.tokenizer)
        probes = [(before.replace("a", known), text.replace("a", known)) for before, text in _PROBES]
        return all([self._is_sum(before, text) for before, text in probes])

    def _is_sum(self, before: str, text: str) -> bool:
        """Return whether the ids of two texts decode to the same text as the ids of both together."""
        first, second, both = [each.ids for each in encode_texts(self.tokenizer, [before, text, before + text])]
        return decode(self.tokenizer, first + second) == decode(self.tokenizer, both)
