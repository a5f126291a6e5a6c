"""Step folders: `step-0000000042`, made beside and renamed into place, read under a shared lock, removed as a whole.

Folders that are being written or removed are called `.tmp-*` and hold a lock; what has no lock was left by a process
that died.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Any

from tdfunc.core.errors import CorruptCheckpointError, error
from tdfunc.storage.disk.atomic import _fcntl, _lock

_NAME = re.compile(r"step-([0-9]{10,200})")
_MAX_DIGITS = 200
_TEMPORARY = ".tmp-"
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_renameat2: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
_EXCHANGE, _AT_FDCWD = 2, -100
_SHARED, _EXCLUSIVE = (_fcntl.LOCK_SH, _fcntl.LOCK_EX) if _fcntl is not None else (0, 0)
# Locks are held for as long as a load takes; one that is held longer belongs to a process that forked and died.
_READ_WAIT_S, _REPLACE_WAIT_S = 1.0, 30.0
_EXISTS = {errno.EEXIST, errno.ENOTEMPTY}


class StepRemovedError(FileNotFoundError):
    """The step was there when its folder was looked for, and is not any more."""


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:010d}"


def check_step(step: int, call: str) -> int:
    """Return a step as a plain int; raise for what is none."""
    try:
        number = step.__index__()
    except AttributeError:
        raise error(
            TypeError, f"{call}: the step is no int.", expected="an int of 0 or more", got=type(step).__name__
        ) from None
    if isinstance(step, bool) or number < 0 or number >= 10**_MAX_DIGITS:
        raise error(
            ValueError,
            f"{call}: this is no step.",
            expected=f"an int of 0 or more, of at most {_MAX_DIGITS} digits",
            got=repr(step) if abs(number) < 10**_MAX_DIGITS else f"an int of {number.bit_length()} bits",
        )
    return number


def list_steps(folder: str) -> list[int]:
    """Return the steps in a folder, in order; whatever else is there does not count."""
    found: list[int] = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is not None and step_name(int(match[1])) == entry.name and entry.is_dir(follow_symlinks=False):
                found.append(int(match[1]))
    return sorted(found)


def make_folder(folder: str, *, fsync: bool) -> None:
    """Make a folder and those that it is in, as far as they are missing."""
    missing: list[str] = []
    at = os.path.abspath(folder)
    while not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    if missing:
        os.makedirs(folder, exist_ok=True)
    for made in missing if fsync else ():
        _fsync_folder(os.path.dirname(made))


def make_step(folder: str, step: int, fill: Callable[[str], None], *, overwrite: bool, fsync: bool) -> str:
    """Fill a new folder and give it the name of the step in one move.

    Raises:
        FileExistsError: There is such a step, and it is not to be replaced.
        OSError: The file system refused; nothing is left behind.
    """
    target = os.path.join(folder, step_name(step))
    temporary, fd = _create(folder)
    try:
        fill(temporary)
        if fsync:
            os.fsync(fd)
        try:
            os.rename(temporary, target)
        except OSError as err:
            if err.errno not in _EXISTS:
                raise
            if not overwrite:
                raise exists_error(folder, step) from None
            _exchange(temporary, target)
        if fsync:
            _fsync_folder(folder)
        return target
    finally:
        # What was replaced, or what was not finished; its lock is given up last.
        shutil.rmtree(temporary, ignore_errors=True)
        _close(fd)


def exists_error(folder: str, step: int) -> FileExistsError:
    """Return the error for a step that is there already."""
    return error(
        FileExistsError,
        f"save {folder}: step {step} exists; nothing was saved.",
        expected="a new step",
        got=step_name(step),
        hint="save(..., overwrite=True) replaces it; delete(step) removes it.",
    )


class StepReplacedError(CorruptCheckpointError):
    """Another save of the step took its place while it was read: what was read is of two saves."""


@contextmanager
def reading(folder: str, step: int, call: str = "load") -> Generator[str, None, None]:
    """Hold a step so that nobody removes it, and give its path; errors name the call.

    Raises:
        StepRemovedError: It is not there.
        StepReplacedError: Another one was there before the end.
    """
    path = os.path.join(folder, step_name(step))
    while True:
        try:
            fd = os.open(path, _FOLDER)
        except FileNotFoundError as err:
            raise _removed(folder, step, call) from err
        # Without a lock (some network file systems have none) a reader may find that its step is gone.
        _lock_within(fd, _SHARED, _READ_WAIT_S)
        if _is_at(fd, path):
            break
        _close(fd)
    try:
        try:
            yield path
        except FileNotFoundError as err:
            if _is_at(fd, path):
                raise
            if os.path.isdir(path):
                raise StepReplacedError(str(err)) from err
            raise _removed(folder, step, call) from err
        except CorruptCheckpointError as err:
            if _is_at(fd, path):
                raise
            raise StepReplacedError(str(err)) from err
    finally:
        _close(fd)


def remove_step(folder: str, step: int) -> bool:
    """Remove a step as a whole; False if it is being read (or is not there)."""
    path = os.path.join(folder, step_name(step))
    try:
        fd = os.open(path, _FOLDER)
    except FileNotFoundError:
        return False
    try:
        if not _lock_within(fd, _EXCLUSIVE, 0) or not _is_at(fd, path):
            return False
        temporary = os.path.join(folder, _TEMPORARY + secrets.token_hex(8))
        os.rename(path, temporary)
        shutil.rmtree(temporary, ignore_errors=True)
        return True
    finally:
        _close(fd)


def remove_leftovers(folder: str) -> None:
    """Remove the temporary folders whose processes are gone."""
    if _fcntl is None:
        return
    with suppress(OSError), os.scandir(folder) as entries:
        left = [entry.path for entry in entries if entry.name.startswith(_TEMPORARY)]
        for path in left:
            # What cannot be opened or locked is not ours to remove.
            with suppress(OSError):
                fd = os.open(path, _FOLDER)
                try:
                    _fcntl.flock(fd, _EXCLUSIVE | _fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    _close(fd)


def _create(folder: str) -> tuple[str, int]:
    while True:
        path = os.path.join(folder, _TEMPORARY + secrets.token_hex(8))
        os.mkdir(path)
        # Another process may have taken it for a leftover before it was locked.
        with suppress(FileNotFoundError):
            fd = os.open(path, _FOLDER)
            _lock(fd)
            if _is_at(fd, path):
                return path, fd
            os.close(fd)


def _removed(folder: str, step: int, call: str) -> StepRemovedError:
    steps = list_steps(folder)
    shown = ", ".join(map(str, steps[-10:])) or "no steps"
    return error(
        StepRemovedError,
        f"{call} {folder}: step {step} is not there; it was removed, or never saved.",
        expected=step_name(step),
        got=f"... {shown}" if len(steps) > 10 else shown,
    )


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _lock_within(fd: int, how: int, wait_s: float) -> bool:
    """Lock a folder; False if somebody else holds it all that time. Where there are no locks, nobody does."""
    end = monotonic() + wait_s
    while _fcntl is not None:
        try:
            _fcntl.flock(fd, how | _fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() >= end:
                return False
            sleep(0.005)
        except OSError:
            break
        else:
            break
    return True


def _close(fd: int) -> None:
    # A process that was forked meanwhile has the descriptor too, and with it the lock, unless it is given up.
    if _fcntl is not None:
        with suppress(OSError):
            _fcntl.flock(fd, _fcntl.LOCK_UN)
    os.close(fd)


def _exchange(temporary: str, target: str) -> None:
    """Put a new folder in the place of an old one, which gets the temporary name."""
    with suppress(FileNotFoundError):
        old = os.open(target, _FOLDER)
        try:
            # Until those who read it are done; one that is not finds out that its step was replaced.
            _lock_within(old, _EXCLUSIVE, _REPLACE_WAIT_S)
            if _renameat2 is not None:
                names = os.fsencode(temporary), os.fsencode(target)
                if not _renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE):
                    return
            # In two moves: if the process dies between them, the step is gone.
            aside = f"{temporary}-old"
            os.rename(target, aside)
            os.rename(temporary, target)
            shutil.rmtree(aside, ignore_errors=True)
            return
        finally:
            _close(old)
    os.rename(temporary, target)


def _fsync_folder(folder: str) -> None:
    fd = os.open(folder, _FOLDER & ~getattr(os, "O_NOFOLLOW", 0))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
