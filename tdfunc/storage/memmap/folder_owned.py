"""Which files of a memmap folder are part of its tree: those that its `meta.json` names, and no others.

A folder is replaced as a whole, so whatever else somebody put into it would be deleted.
"""

import os
import re
from typing import Any, NamedTuple

from tdfunc.core.errors import CorruptCheckpointError
from tdfunc.storage.memmap.folder_meta import parse_meta
from tdfunc.storage.memmap.folder_plan import LAZY_TYPE, VALUES_TYPE
from tdfunc.storage.memmap.names import LEAF_SUFFIX, META, PICKLES, RESERVED, encoded, is_raw_name, special_name

# What a write to a part of the folder left when it was killed.
_LEFT = re.compile(r"\.tdfunc-[0-9a-f]{16}-[0-9a-f]{16}\.tmp")
# Each takes about a millisecond; beside writers that never rest a reader may need some.
_RETRIES = 100


class _Owned(NamedTuple):
    """The names that belong to a node's folder."""

    files: set[str]
    folders: set[str]
    # Whether folders whose name is a number are its trees.
    numbered: bool = False


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
            owned = _owned(place) if is_named else _Owned(set(), set())
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


def _owned(folder: str) -> _Owned:
    """Return the names that a folder's meta.json speaks of."""
    try:
        with open(os.path.join(folder, META), "rb") as file:
            meta = parse_meta(file.read(), META)
    except (FileNotFoundError, IsADirectoryError):
        return _Owned(set(), set())
    own = meta.get("")
    kind = meta.get("_type")
    if type(own) is not dict:
        # Of tensordict, which also writes pickles, and stores a tensorclass as a folder in a folder.
        names = _named({key: entry for key, entry in meta.items() if key not in RESERVED}, raw=True)
        names.files.update((META, *PICKLES))
        if "shape" not in meta:
            names.folders.add("_tensordict")
        return names._replace(numbered=kind in (LAZY_TYPE, VALUES_TYPE))
    names = _named({key: entry for key, entry in meta.items() if key not in RESERVED}, raw=False)
    fields: dict[str, Any] = own
    special = fields.get("special")
    for key, entry in special.items() if type(special) is dict else ():
        if type(entry) is dict and "type" in entry:
            names.folders.add(special_name(key))
        else:
            names.files.add(special_name(key) + LEAF_SUFFIX)
    names.files.add(META)
    return names._replace(numbered=kind == LAZY_TYPE)


def _named(entries: dict[str, Any], *, raw: bool) -> _Owned:
    """Return the files and folders of entries; `raw`: also under the names that older folders have."""
    owned = _Owned(set(), set())
    for key, entry in entries.items():
        if type(entry) is not dict:
            continue
        for name in {encoded(key), key if raw and is_raw_name(key) else encoded(key)}:
            if "type" in entry:
                owned.folders.add(name)
                continue
            owned.files.add(name + LEAF_SUFFIX)
            if entry.get("is_nested"):
                owned.files.add(f"{name}.shape{LEAF_SUFFIX}")
    return owned
