"""The files beside the weights in a folder of transformers: configurations, tokenizers, and the code of models."""

import os
from collections.abc import Mapping

from tdfunc.storage.disk.commit import replace_file

# Tokenizers have vocabularies of many names; a model of the hub may bring its own code.
_KEPT = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken", ".spm", ".vocab", ".bpe", ".codes", ".tsv")
# A tokenizer with several templates saves all but the first there.
_TEMPLATES = "additional_chat_templates"


def read_beside(folder: str) -> dict[str, bytes]:
    """Return the files that describe the model and its tokenizer, by name; the index of the weights is not one."""
    names = os.listdir(folder)
    inside = os.path.join(folder, _TEMPLATES)
    if os.path.isdir(inside):
        names += [f"{_TEMPLATES}/{name}" for name in os.listdir(inside)]
    found: dict[str, bytes] = {}
    for name in names:
        if name.endswith(_KEPT) and not name.endswith(".index.json"):
            with open(os.path.join(folder, name), "rb") as file:
                found[name] = file.read()
    return found


def write_beside(folder: str, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, each in one step."""
    for name, data in files.items():

        def fill(fd: int, data: bytes = data) -> None:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)

        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        replace_file(path, fill, size_bytes=len(data), fsync=True)
