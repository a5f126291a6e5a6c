"""The file of a run that names its discarded steps: they count as removed, also while their folders are still there."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress

from tdfunc.core.errors import damaged
from tdfunc.core.system import platform
from tdfunc.storage.disk import commit
from tdfunc.storage.disk.raw import write_all
from tdfunc.storage.tree.specs import parse_json

MARK_FILE = "discarded.json"


def read_marks(folder: str) -> dict[int, str]:
    """Return the discarded steps whose folders may still be there, each with the digest of its description.

    Raises:
        CorruptCheckpointError: The file is malformed.
    """
    path = os.path.join(folder, MARK_FILE)
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    try:
        return {int(step): str(digest) for step, digest in parse_json(raw)["steps"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        got = f"{type(err).__name__}: {err}"[:300]
        hint = "remove this file: the steps that discard_after had begun to remove are then there again."
        raise damaged(f"{path} is malformed.", "the numbers of discarded steps", got, hint=hint) from err


def write_marks(folder: str, marks: Mapping[int, str], *, fsync: bool) -> None:
    """Mark steps as discarded, all in one moment."""
    text = json.dumps({"format": "tdfunc discarded steps", "steps": {str(step): marks[step] for step in marks}})
    raw = memoryview(text.encode())
    path = os.path.join(folder, MARK_FILE)
    commit.replace_file(path, lambda fd: write_all(fd, raw), size_bytes=len(raw), fsync=fsync)


def remove_marks(folder: str) -> None:
    """Remove the marks, after the folders of all marked steps are removed."""
    with suppress(FileNotFoundError):
        platform.remove(os.path.join(folder, MARK_FILE))
