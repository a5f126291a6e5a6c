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
        shapes = [(part.stored.leaf.shape, self.sizes[part.model]) for part in row.every]
        is_vocabulary = not row.has_layer and all(shape[:1] == (size,) for shape, size in shapes)
        # If the sizes differ between models, no other dimension is possible.
        if is_vocabulary and len({size for _, size in shapes}) == 1 and shapes[0][1] in shapes[0][0][1:]:
            what = f"merge: only one dimension of {shown(row.path)} must have the size of the vocabulary."
            raise UnsupportedError(what, got=list(shapes[0][0]), hint="leave tokenizer out, and keep one vocabulary.")
        return is_vocabulary

    def numbers(self, model: str) -> dict[int, int]:
        """Return the number in the result of each token of a model, by its number there."""
        return {row: number for number, row in enumerate(self.rows[model].tolist()) if row >= 0}

    def align(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return embeddings of 32 bits or more with one row for each token.

        A token that a model does not have gets the row of the base, else the mean of the models that have it.

        Source:
            mergekit's `PermutedVocabulary`.
        """
        present = {name: (self.rows[name] >= 0).reshape(-1, *[1] * (x.dim() - 1)) for name, x in leaves.items()}
        taken = {name: torch.where(present[name], x[self.rows[name].clamp(min=0)], 0) for name, x in leaves.items()}
        mean = sum(taken.values()) / sum(present.values(), torch.zeros(())).clamp(min=1)
        if self.base in taken:
            mean = torch.where(present[self.base], taken[self.base], mean)
        made = {name: torch.where(present[name], x, mean) for name, x in taken.items()}
        pad = self.size - self.count
        return {
            name: torch.cat([x, x.mean(0, keepdim=True).expand(pad, *x.shape[1:])]).to(leaves[name].dtype)
            for name, x in made.items()
        }


def make_vocabulary(config: Config, models: Sequence[str]) -> Vocabulary:
    """Return the vocabulary that a configuration describes.

    Raises:
        UnsupportedError: A model has no tokenizer, or its configuration no `vocab_size`.
    """
    base = models[0]
    source = config.tokenizer
    tokenizers = {name: _tokenizer(name) for name in models}
    sizes = {name: _vocab_size(name) for name in models}
    words = {
        name: {word: i for word, i in each.get_vocab().items() if i < sizes[name]} for name, each in tokenizers.items()
    }
    made = _tokenizer(base if source in ("base", "union") else str(source))
    if source == "union":
        # The words of the models in the order of their numbers; added tokens keep their settings.
        known = set(words[base])
        new = {}
        for name in models[1:]:
            added = {str(each): each for each in tokenizers[name].added_tokens_decoder.values()}
            own = sorted(words[name], key=words[name].__getitem__)
            new |= {word: added.get(word, word) for word in own if word not in known and word not in new}
        made.add_tokens(list(new.values()))
    out = sorted(made.get_vocab().items(), key=lambda item: item[1])
    count = out[-1][1] + 1
    if count != len(out):
        raise UnsupportedError("merge: the tokens of the result must be numbered without gaps.", got=f"{count} numbers")
    known = {word for word, _ in out}
    for name in models:
        if lost := len(words[name].keys() - known):
            note(f"{safe(name)}: {count_text(lost, 'token')} {'is' if lost == 1 else 'are'} not in the result")
    step = config.pad_to_multiple_of or 1
    rows = {name: torch.tensor([words[name].get(word, -1) for word, _ in out]) for name in models}
    return Vocabulary(made, base, -(-count // step) * step, count, sizes, rows)


def _tokenizer(folder: str) -> Any:
    try:
        return load_tokenizer(folder, "merge: tokenizer")
    except (OSError, ValueError) as err:
        raise UnsupportedError(f"merge: {safe(folder)} must have a tokenizer.", got=safe(str(err))[:200]) from err


def _vocab_size(folder: str) -> int:
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as file:
        found = json.load(file).get("vocab_size")
    if not isinstance(found, int):
        raise UnsupportedError(f"merge: {safe(path)} must have a vocab_size.", hint="leave tokenizer out.")
    return found
