"""The files beside the weights in a folder of transformers: configurations, tokenizers, and the code of models."""

import json
import os
from collections.abc import Mapping
from typing import Any

from tdfunc.storage.disk.commit import replace_file

# Tokenizers have vocabularies of many names; a model of the hub may bring its own code.
_KEPT = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken", ".spm", ".vocab", ".bpe", ".codes", ".tsv")
# A tokenizer with several templates saves all but the first there.
_TEMPLATES = "additional_chat_templates"
# The list of the parts of a model of sentence-transformers. Parts behind the model have their own folders, some with
# weights.
_MODULES = "modules.json"
_WEIGHTS = (".safetensors", ".bin")


def read_beside(folder: str) -> dict[str, bytes]:
    """Return the files that describe the model and its tokenizer, by name; the index of the weights is not one.

    The parts of sentence-transformers behind the model, such as `1_Pooling`, are among them with their weights.
    """
    names = [name for name in os.listdir(folder) if name.endswith(_KEPT)]
    inside = os.path.join(folder, _TEMPLATES)
    if os.path.isdir(inside):
        names += [f"{_TEMPLATES}/{name}" for name in os.listdir(inside) if name.endswith(_KEPT)]
    for part in _parts_of(folder):
        files = os.listdir(os.path.join(folder, part))
        names += [f"{part}/{name}" for name in files if name.endswith((*_KEPT, *_WEIGHTS))]
    found: dict[str, bytes] = {}
    for name in names:
        if not name.endswith(".index.json"):
            with open(os.path.join(folder, name), "rb") as file:
                found[name] = file.read()
    return found


def weights_beside(files: Mapping[str, bytes]) -> list[str]:
    """Return the names of the files that have weights: the files of the parts behind a model."""
    return sorted([name for name in files if name.endswith(_WEIGHTS)])


def _parts_of(folder: str) -> list[str]:
    """Return the folders inside a folder in which sentence-transformers keeps parts of the model."""
    path = os.path.join(folder, _MODULES)
    if not os.path.isfile(path):
        return []
    with open(path, "rb") as file:
        try:
            # Any: a file of another program.
            parts: Any = json.load(file)
        except ValueError:
            return []
    if not isinstance(parts, list):
        return []
    named = [part.get("path") for part in parts if isinstance(part, dict)]
    # A part that has no folder is in the folder of the model.
    plain = [name for name in named if isinstance(name, str) and name == os.path.basename(name) not in ("", ".", "..")]
    return [name for name in plain if os.path.isdir(os.path.join(folder, name))]


def write_beside(folder: str, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, each in one step."""
    for name, data in files.items():

        def fill(fd: int, data: bytes = data) -> None:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)

        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        replace_file(path, fill, size_bytes=len(data), fsync=True)
