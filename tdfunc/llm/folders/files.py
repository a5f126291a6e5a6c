"""The files beside the weights in a folder of transformers: configurations, tokenizers, chat templates and code."""

import os
from collections.abc import Mapping

from tdfunc.storage.disk.commit import replace_file

# Also the words of other tokenizers than those of `tokenizers`, and the code that `auto_map` in config.json names.
_KEPT = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".spm", ".bpe", ".py")
# transformers writes the templates beside the first one into a folder.
_TEMPLATES = "additional_chat_templates"


def read_beside(folder: str) -> dict[str, bytes]:
    """Return the files that describe the model and its tokenizer, by name; the index of the weights is not one."""
    names = [name for name in os.listdir(folder) if name.endswith(_KEPT) and not name.endswith(".index.json")]
    templates = os.path.join(folder, _TEMPLATES)
    if os.path.isdir(templates):
        names += [os.path.join(_TEMPLATES, name) for name in os.listdir(templates) if name.endswith(".jinja")]
    found: dict[str, bytes] = {}
    for name in names:
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
