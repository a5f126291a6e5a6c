"""Which files of a memmap folder are part of its tree: those that its `meta.json` names, and no others.

A folder is replaced as a whole, so whatever else somebody put into it would be deleted.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from tdfunc.core.errors import CorruptCheckpointError, error
from tdfunc.storage.disk import commit
from tdfunc.storage.memmap.layout import META, Owned, owned_names
from tdfunc.storage.tree.decode import MALFORMED
from tdfunc.storage.tree.specs import parse_json

T = TypeVar("T")
# What a write to a part of the folder left when it was killed.
_LEFT = re.compile(r"\.tdfunc-[0-9a-f]{16}-[0-9a-f]{16}\.tmp")
# Each takes about a millisecond; beside writers that never rest a reader may need some.
_RETRIES = 100


def replace_owned(path: str, write: Callable[[str], T], *, call: str, exist_ok: bool, sync: bool) -> T:
    """Give `path` the contents that `write` puts into an empty folder; return what it returns.

    Raises:
        FileExistsError: There is something of this name that is no memmap folder, or (not `exist_ok`) there is one;
            or the current folder is this one or inside of it.
        OSError: The file system refused; the old folder is whole.
    """
    # A link stays, and the folder that it leads to is replaced.
    path = os.path.realpath(path)
    check = partial(check_target, path, call, exist_ok=exist_ok)
    check()
    os.makedirs(os.path.dirname(path), exist_ok=True)

    def fill(folder: str) -> T:
        result = write(folder)
        if sync:
            commit.sync_files(folder)
        return result

    # Checked again: another process may have put something there since.
    return commit.replace_folder(path, fill, check=check, fsync=sync)


def check_target(path: str, call: str, *, exist_ok: bool) -> None:
    """Raise unless a folder may be written at a path: nothing is there, an empty folder, or a memmap folder alone."""
    here = _current()
    if here is not None and os.path.join(here, "").startswith(os.path.join(path, "")):
        raise error(
            FileExistsError,
            f"{call} {path}: a folder is replaced as a whole, and this process works inside of this one.",
            expected="a folder that does not hold the current one",
            got=f"the current folder {here}",
            hint="name a folder in it, as in './tree', or os.chdir() elsewhere first.",
        )
    try:
        if not os.listdir(path):
            return
    except FileNotFoundError:
        return
    except NotADirectoryError as err:
        raise error(
            FileExistsError, f"{call} {path}: this is a file.", expected="the name of a folder", got="a file"
        ) from err
    if not exist_ok:
        raise error(
            FileExistsError,
            f"{call} {path}: the folder exists.",
            expected="a new or empty one",
            hint="existsok=True replaces it, as a whole.",
        )
    foreign = find_foreign(path)
    if foreign is not None:
        raise error(
            FileExistsError,
            f"{call} {path}: the folder holds files that are no part of a memmapped tree; they would be deleted.",
            expected=f"a new or empty folder, or one that holds what its {META} names and nothing else",
            got=foreign,
            hint="choose another folder, or move what you want to keep and delete this one.",
        )


def _current() -> str | None:
    try:
        return os.path.realpath(os.getcwd())
    # It was deleted.
    except FileNotFoundError:
        return None


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
