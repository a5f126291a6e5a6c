"""Remove the later steps of a run as one: all of them are marked in one moment, and then their folders are removed.

A process that is killed before that moment leaves all steps, and after it none of them. The next manager or save
removes the folders that are left.
"""

import os
import time
import warnings
from contextlib import ExitStack, suppress

import xxhash

from tdfunc.core.errors import error, explain
from tdfunc.storage.disk import commit
from tdfunc.storage.manager.marks import read_marks, remove_marks, write_marks
from tdfunc.storage.manager.steps import ABOUT_FILE, check_own, list_steps, no_such_step, remove_step, step_name

# A reader that came before the mark gives up its lock when it finds the mark.
_ATTEMPTS = 100
_PAUSE_S = 0.01


def discard_steps(folder: str, step: int, *, fsync: bool) -> list[int]:
    """Remove all steps above a step, or none of them; return their numbers in order.

    Raises:
        FileNotFoundError: The step does not exist.
        BlockingIOError: One of the others is being loaded.
        FileExistsError: One of the others may belong to another program, or is a link.
    """
    # Without the step a wrong number would remove the whole run.
    if step not in list_steps(folder):
        raise no_such_step(folder, step, "discard_after")
    with commit.locked(folder):
        with suppress(OSError):
            _remove_marked(folder)
        marks = _mark([other for other in list_steps(folder) if other > step], folder, fsync=fsync)
        try:
            _remove_marked(folder)
        except OSError as err:
            what = f"discard_after {folder}: the steps are discarded, but their folders are still there."
            warnings.warn(explain(what, got=str(err), hint="the next save removes them."), RuntimeWarning, stacklevel=3)
    return sorted(marks)


def finish_discard(folder: str) -> None:
    """Remove the folders that a killed process left of discarded steps; leave them to the next call if that fails."""
    if not read_marks(folder):
        return
    # Another process may be about to remove them, and its marks are not this one's to remove.
    with suppress(OSError), commit.Folder(folder) as held:
        try:
            commit.lock(held)
        except BlockingIOError:
            return
        except OSError:
            # A file system without locks.
            pass
        _remove_marked(folder)


def _mark(later: list[int], folder: str, *, fsync: bool) -> dict[int, str]:
    """Mark steps as discarded, and return the marks; raise if one of the steps must not be removed."""
    marks: dict[int, str] = {}
    with ExitStack() as held:
        for step in later:
            path = os.path.join(folder, step_name(step))
            # Another process may remove the step meanwhile.
            with suppress(FileNotFoundError):
                held.enter_context(_hold(folder, step, path))
                marks[step] = _identity(path)
        if marks:
            # Also those whose folders could not be removed before.
            write_marks(folder, {**read_marks(folder), **marks}, fsync=fsync)
    return marks


def _hold(folder: str, step: int, path: str) -> commit.Folder:
    """Open and lock the folder of a step, so that nothing loads it."""
    commit.restore(path)
    while True:
        check_own(path, "discard_after")
        held = commit.Folder(path, follow=False)
        try:
            commit.lock(held)
        except BlockingIOError as err:
            held.close()
            what = f"discard_after {folder}: step {step} is being loaded; nothing was removed."
            raise error(BlockingIOError, what, hint="try again later.") from err
        except OSError:
            # A file system without locks.
            return held
        # Another process may have replaced the step before the lock.
        if commit.is_at(held, path):
            return held
        held.close()


def _remove_marked(folder: str) -> None:
    """Remove the folders of discarded steps, and then the marks."""
    marks = read_marks(folder)
    if not marks:
        return
    for step, identity in marks.items():
        path = os.path.join(folder, step_name(step))
        # A step that another process has saved under this number since then is a new one.
        if os.path.isdir(path) and _identity(path) == identity:
            _remove(folder, step)
    # After a power failure the marks must not be gone before the folders.
    commit.sync_folder(folder)
    remove_marks(folder)


def _remove(folder: str, step: int) -> None:
    path = os.path.join(folder, step_name(step))
    for _ in range(_ATTEMPTS):
        if remove_step(folder, step, even_damaged=True) or not os.path.isdir(path):
            return
        time.sleep(_PAUSE_S)
    raise BlockingIOError(f"{path} is in use")


def _identity(path: str) -> str:
    """Return the digest of the description in the folder of a step; a step without one has the digest of no bytes."""
    raw = b""
    with suppress(OSError), open(os.path.join(path, ABOUT_FILE), "rb") as file:
        raw = file.read()
    return xxhash.xxh3_64_hexdigest(raw)
