"""Entries of the files beside the weights that name layers or tokens by number, or say what another model computes."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tdfunc.cli.output import listed, note, safe
from tdfunc.core.errors import UnsupportedError, brief
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.llm.folders.files import read_beside

# Any: JSON.
Document = dict[str, Any]
CONFIG = "config.json"
# Files with the numbers of tokens.
_NUMBERED = (CONFIG, "generation_config.json")
_TOKENS = re.compile(r"(token_(ids?|index|indices)|suppress_tokens|(bad|force)_words_ids)$")
# Numbers of tokens among other numbers.
_MIXED = re.compile(r"(forced_decoder_ids|sequence_bias)$")
# Entries that change no number of a model.
_IDLE = frozenset(["_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range"])
_DIGITS = re.compile(r"\[0-9\]")


def read_config(folder: str) -> Document:
    """Return the configuration of a model; an empty one if there is none that can be read."""
    try:
        with open(os.path.join(folder, CONFIG), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    if isinstance(found, dict):
        return found
    return {}


# -- layers ---------------------------------------------------------------------------------------------------------


def check_named_layers(folders: Sequence[str], where: Path) -> None:
    """Raise if an entry names a layer by its number, as the lists of layers that are not quantized do.

    Args:
        folders: The models whose layers get other numbers.
        where: The path of the layers.
    """
    key = re.escape(where[-1])
    named = re.compile(rf"(^|[^A-Za-z0-9_]){key}[^A-Za-z0-9]+\d")
    for file, document in _configurations(folders):
        for entry, text in _texts(document, ""):
            # A class of digits stands for all layers.
            if named.search(_DIGITS.sub("", text)):
                raise UnsupportedError(
                    f"merge: {safe(entry)} in {safe(file)} names a layer whose number changes.",
                    expected=f"entries without the numbers of {dotted(where)}",
                    got=brief(text),
                    hint="remove the entry in a copy of the model, and write it for the new numbers.",
                )


def _configurations(folders: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the contents of each configuration beside the weights of models."""
    for folder in folders:
        if not os.path.isdir(folder):
            continue
        for name, data in read_beside(folder).items():
            if name.endswith(CONFIG):
                yield os.path.join(folder, name), json.loads(data)


def _texts(value: Any, at: str) -> Iterator[tuple[str, str]]:
    """Yield each text and each key in JSON, with the dotted name of its entry."""
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, dict):
        for name, one in value.items():
            inner = f"{at}.{name}" if at else name
            yield inner, name
            yield from _texts(one, inner)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one, at)


# -- tokens ---------------------------------------------------------------------------------------------------------


def renumber_tokens(files: dict[str, bytes], numbers: Mapping[int, int]) -> None:
    """Give the tokens that entries name their numbers in another vocabulary.

    Args:
        files: The files of the first model, which are changed.
        numbers: The new number of each token by its old one.

    Raises:
        UnsupportedError: An entry names a token that the vocabulary does not have, or numbers that are not understood.
    """
    for name in _NUMBERED:
        if name in files:
            made = _renumbered(json.loads(files[name]), numbers, name)
            files[name] = json.dumps(made, indent=2).encode() + b"\n"


def _renumbered(document: Document, numbers: Mapping[int, int], file: str) -> Document:
    made: Document = {}
    for name, value in document.items():
        if isinstance(value, dict):
            made[name] = _renumbered(value, numbers, file)
        elif _TOKENS.search(name) is not None:
            made[name] = _renumbered_value(value, numbers, f"{name} in {file}")
        elif _MIXED.search(name) is not None and value:
            raise UnsupportedError(f"merge: {name} in {file} names tokens, whose numbers change.", got=brief(value))
        else:
            made[name] = value
    return made


def _renumbered_value(value: Any, numbers: Mapping[int, int], entry: str) -> Any:
    if isinstance(value, list):
        return [_renumbered_value(one, numbers, entry) for one in value]
    if type(value) is not int or value < 0:
        return value
    if value not in numbers:
        raise UnsupportedError(
            f"merge: {entry} names a token that the tokenizer of the result does not have.",
            got=value,
            hint="tokenizer: {source: union} keeps all tokens; or change the entry in a copy of the first model.",
        )
    return numbers[value]


# -- what models compute with ----------------------------------------------------------------------------------------


def note_differences(folders: Sequence[str], made: Document) -> None:
    """Note on stderr the entries of other models that differ from the configuration of the result."""
    lines: list[str] = []
    for folder in folders:
        where = os.path.join(folder, CONFIG)
        for name, value in read_config(folder).items():
            # An entry without a value is absent.
            is_other = name in made and value is not None and made[name] not in (None, value)
            if is_other and name not in _IDLE:
                lines.append(f"{where} has {name} {brief(value)}, and the result has {brief(made[name])}")
    for text in listed(lines):
        note(safe(text))
