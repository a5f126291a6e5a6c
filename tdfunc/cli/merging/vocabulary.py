"""One vocabulary for models with several: the tokenizer of the result, and the row of each token in each model."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tdfunc.cli.merging.config import Config
from tdfunc.cli.merging.recipe import Row
from tdfunc.cli.output import note, safe, shown
from tdfunc.cli.template import load_tokenizer
from tdfunc.core.errors import UnsupportedError
from tdfunc.ops.display.text import count_text

# Numbers of tokens by their text.
Words = Mapping[str, int]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of the result."""

    # Any: a tokenizer of transformers.
    tokenizer: Any
    base: str
    # With and without the padding.
    size: int
    count: int
    # The rows of an embedding of each model.
    sizes: Mapping[str, int]
    # By model, the row of each token; -1 if the model does not have it.
    rows: Mapping[str, Tensor]

    def has(self, row: Row) -> bool:
        """Return whether the tokens are the first dimension of a leaf, in every model."""
        if row.has_layer:
            return False
        parts = row.every
        sizes = [self.sizes[part.model] for part in parts]
        if any(part.stored.leaf.shape[:1] != (size,) for part, size in zip(parts, sizes, strict=True)):
            return False
        # If the sizes differ between models, no other dimension is possible.
        shape = parts[0].stored.leaf.shape
        if len(set(sizes)) == 1 and sizes[0] in shape[1:]:
            what = f"merge: several dimensions of {shown(row.path)} have the size of the vocabulary."
            raise UnsupportedError(what, got=list(shape), hint="leave tokenizer out, and keep one vocabulary.")
        return True

    def numbers(self, model: str) -> dict[int, int]:
        """Return the number in the result of each token of a model, by its number there."""
        return {row: number for number, row in enumerate(self.rows[model].tolist()) if row >= 0}

    def align(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return embeddings of 32 bits or more with one row for each token.

        A token that a model does not have gets the row of the base, else the mean of the models that have it.

        Source:
            mergekit's `PermutedVocabulary`.
        """
        present: dict[str, Tensor] = {}
        taken: dict[str, Tensor] = {}
        for name, leaf in leaves.items():
            rows = self.rows[name]
            present[name] = (rows >= 0).reshape(-1, *[1] * (leaf.dim() - 1))
            taken[name] = torch.where(present[name], leaf[rows.clamp(min=0)], 0)
        count = sum(present.values(), torch.zeros(()))
        fallback = sum(taken.values()) / count.clamp(min=1)
        if self.base in taken:
            fallback = torch.where(present[self.base], taken[self.base], fallback)
        padding = self.size - self.count
        aligned: dict[str, Tensor] = {}
        for name, own in taken.items():
            rows = torch.where(present[name], own, fallback)
            mean = rows.mean(0, keepdim=True)
            padded = torch.cat([rows, mean.expand(padding, *rows.shape[1:])])
            aligned[name] = padded.to(leaves[name].dtype)
        return aligned


def make_vocabulary(config: Config, models: Sequence[str]) -> Vocabulary:
    """Return the vocabulary that a configuration describes.

    Raises:
        UnsupportedError: A model has no tokenizer, or its configuration no `vocab_size`.
    """
    base = models[0]
    tokenizers = {name: _tokenizer(name) for name in models}
    sizes = {name: _vocab_size(name) for name in models}
    words = {name: _words(tokenizers[name], sizes[name]) for name in models}
    if config.tokenizer == "union":
        made = _tokenizer(base)
        made.add_tokens(_other_tokens(models, tokenizers, words))
    elif config.tokenizer == "base":
        made = _tokenizer(base)
    else:
        made = _tokenizer(str(config.tokenizer))
    in_order = sorted(made.get_vocab().items(), key=lambda item: item[1])
    tokens = [word for word, _ in in_order]
    _, last = in_order[-1]
    count = last + 1
    if count != len(tokens):
        raise UnsupportedError(
            "merge: the numbers of the result's tokens have gaps.", got=f"{len(tokens)} tokens, {count} numbers"
        )
    known = set(tokens)
    for name in models:
        lost = len(words[name].keys() - known)
        if lost:
            note(f"{safe(name)}: {count_text(lost, 'token')} {'is' if lost == 1 else 'are'} not in the result")
    step = config.pad_to_multiple_of or 1
    size = -(-count // step) * step
    rows: dict[str, Tensor] = {}
    for name in models:
        numbers = words[name]
        rows[name] = torch.tensor([numbers.get(word, -1) for word in tokens])
    return Vocabulary(made, base, size, count, sizes, rows)


# Any: a tokenizer of transformers.
def _words(tokenizer: Any, size: int) -> Words:
    """Return the tokens that have a row in an embedding."""
    return {word: number for word, number in tokenizer.get_vocab().items() if number < size}


# Any: tokenizers, and texts or added tokens of transformers.
def _other_tokens(models: Sequence[str], tokenizers: Mapping[str, Any], words: Mapping[str, Words]) -> list[Any]:
    """Return the tokens that the first model does not have, in the order of their numbers in each other model."""
    base, *others = models
    new: dict[str, Any] = {}
    for name in others:
        # Added tokens keep their settings.
        added = {str(token): token for token in tokenizers[name].added_tokens_decoder.values()}
        for word in sorted(words[name], key=words[name].__getitem__):
            if word not in words[base] and word not in new:
                new[word] = added.get(word, word)
    return list(new.values())


def _tokenizer(folder: str) -> Any:
    try:
        return load_tokenizer(folder, "merge: tokenizer")
    except (OSError, ValueError) as err:
        raise UnsupportedError(
            f"merge: {safe(folder)} has no tokenizer that can be loaded.", got=safe(str(err))[:200]
        ) from err


def _vocab_size(folder: str) -> int:
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as file:
        found = json.load(file).get("vocab_size")
    if not isinstance(found, int):
        raise UnsupportedError(f"merge: {safe(path)} has no vocab_size.", hint="leave tokenizer out.")
    return found
