"""Which files of a memmap folder are part of its tree: those that its `meta.json` names, and no others.

A folder is replaced as a whole, so whatever else somebody put into it would be deleted.
"""

import os
import re

from tdfunc.core.errors import CorruptCheckpointError
from tdfunc.storage.memmap.layout import META, Owned, owned_names
from tdfunc.storage.tree.decode import MALFORMED
from tdfunc.storage.tree.specs import parse_json

# What a write to a part of the folder left when it was killed.
_LEFT = re.compile(r"\.tdfunc-[0-9a-f]{16}-[0-9a-f]{16}\.tmp")
# Each takes about a millisecond; beside writers that never rest a reader may need some.
_RETRIES = 100


def find_foreign(folder: str) -> str | None:
    """Return a file in a folder that is no part of the tree in it; None if there is none.

    Raises:
        OSError: The folder cannot be read, or was replaced again and again meanwhile.
    """
    for _ in range(_RETRIES):
        before = _identity(folder)
        try:
            found = _search(folder)
        except FileNotFoundError:
            if before == _identity(folder):
                raise
            continue
        # Another writer may have replaced the folder, so that the old meta.json was held against the new files.
        if found is None or before == _identity(folder):
            return found
    raise OSError(f"{folder}: the folder was replaced again and again while it was read")


def _identity(folder: str) -> tuple[int, int] | None:
    try:
        found = os.stat(folder)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _search(folder: str) -> str | None:
    waiting: list[tuple[str, bool]] = [(folder, True)]
    while waiting:
        place, is_named = waiting.pop()
        try:
            owned = _owned(place) if is_named else Owned(set(), set())
        except CorruptCheckpointError:
            # Nobody can tell what belongs to it.
            return os.path.join(place, META)
        with os.scandir(place) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    if entry.name not in owned.files:
                        return entry.path
                elif entry.name in owned.folders or (owned.numbered and entry.name.isdigit()):
                    waiting.append((entry.path, True))
                elif not _LEFT.fullmatch(entry.name):
                    # Nothing is lost with a folder that has no files.
                    waiting.append((entry.path, False))
    return None


def _owned(folder: str) -> Owned:
    """Return the names that belong to a folder, by its meta.json."""
    try:
        with open(os.path.join(folder, META), "rb") as file:
            return owned_names(parse_json(file.read()))
    except (FileNotFoundError, IsADirectoryError):
        return Owned(set(), set())
    except MALFORMED as err:
        raise CorruptCheckpointError(f"{folder}: meta.json is malformed.", got=str(err)[:200]) from err
