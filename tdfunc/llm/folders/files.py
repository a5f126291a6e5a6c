"""The files beside the weights in a folder of transformers: configurations and tokenizers."""

import os
from collections.abc import Mapping

from tdfunc.storage.disk.commit import replace_file

_KEPT = (".json", ".jinja", ".model", ".txt")


def read_beside(folder: str) -> dict[str, bytes]:
    """Return the files that describe the model and its tokenizer, by name; the index of the weights is not one."""
    found: dict[str, bytes] = {}
    for name in os.listdir(folder):
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

        replace_file(os.path.join(folder, name), fill, size_bytes=len(data), fsync=True)
