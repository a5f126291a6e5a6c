"""Replace a folder as a whole: it is written beside its place and takes it in one step.

A kill at any moment leaves the old folder or the new one. What is mapped from the old one stays as it is: its files
exist until nobody has them open. What a killed process left goes with the next write to the same place.
"""

import ctypes
import errno
import importlib
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import xxhash

from tdfunc.core.errors import error
from tdfunc.storage.disk.descriptor import Descriptor
from tdfunc.storage.memmap.folder_owned import find_foreign
from tdfunc.storage.memmap.layout import META

T = TypeVar("T")
# Not a plain import: Windows lacks it, and `import tdfunc` should work there.
_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None
_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_EXCHANGE = 2
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY}
_MARK = ".tdfunc-"


def replace_folder(path: str, write: Callable[[str], T], *, call: str, exist_ok: bool, sync: bool) -> T:
    """Give `path` the contents that `write` puts into an empty folder; return what it returns.

    Raises:
        FileExistsError: There is something of this name that is no memmap folder, or (not `exist_ok`) there is one;
            or the current folder is this one or inside of it.
        OSError: The file system refused; the old folder is whole.
    """
    # A link stays, and the folder that it leads to is replaced.
    path = os.path.realpath(path)
    check_target(path, call, exist_ok=exist_ok)
    parent, name = os.path.split(path)
    os.makedirs(parent, exist_ok=True)
    remove_leftovers(parent, name, ".tmp")
    with _temporary(parent, name) as temporary:
        result = write(temporary)
        if sync:
            _sync(temporary)
        with suppress(OSError):
            os.chmod(temporary, stat.S_IMODE(os.stat(path).st_mode))
        # Another process may have put something there since.
        check_target(path, call, exist_ok=exist_ok)
        _take_place(temporary, path)
        if sync:
            _sync_folder(parent)
    remove_leftovers(parent, name, ".old")
    return result


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


def recover(path: str) -> str | None:
    """Return the folder that a writer moved away from this path and was killed before it put the new one there."""
    parent, name = os.path.split(os.path.realpath(path))
    with suppress(OSError):
        for entry in sorted(os.listdir(parent)):
            if entry.startswith(_start(name)) and entry.endswith(".old"):
                return os.path.join(parent, entry)
    return None


def remove_leftovers(parent: str, name: str, suffix: str) -> None:
    """Delete what writers of this folder left who are gone."""
    for entry in os.listdir(parent):
        if entry.startswith(_start(name)) and entry.endswith(suffix):
            # Two writers may clean at once; what cannot be opened or locked is not ours to delete.
            with suppress(OSError), _locked(os.path.join(parent, entry)):
                shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)


def _start(name: str) -> str:
    # A digest, so that a name of the greatest length has room.
    return f"{_MARK}{xxhash.xxh3_64_hexdigest(os.fsencode(name))}-"


@contextmanager
def _locked(folder: str) -> Generator[None, None, None]:
    """Hold the lock that tells others that this folder is in use; raises where another process has it."""
    with Descriptor(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)) as fd:
        if _fcntl is not None:
            _fcntl.flock(fd, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
        yield


@contextmanager
def _temporary(parent: str, name: str) -> Generator[str, None, None]:
    """Make a folder beside the place; after the block what has its name (the old folder, or a failed write) goes."""
    while True:
        temporary = os.path.join(parent, f"{_start(name)}{secrets.token_hex(8)}.tmp")
        os.mkdir(temporary)
        try:
            held = Descriptor(temporary, os.O_RDONLY)
        except FileNotFoundError:
            # Another writer took it for a leftover before it was locked.
            continue
        # Some network file systems have no locks; there leftovers stay.
        if _fcntl is not None:
            with suppress(OSError):
                _fcntl.flock(held.fd, _fcntl.LOCK_EX)
        # Another writer may have deleted it before it was locked.
        if os.path.isdir(temporary):
            break
        held.close()
    with held:
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _take_place(temporary: str, path: str) -> None:
    try:
        # Over an empty folder this works, over another one not.
        os.rename(temporary, path)
        return
    except OSError as err:
        if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if not _exchange(temporary, path):
        _move_twice(temporary, path)


def _exchange(a: str, b: str) -> bool:
    """Swap two folders in one step; False where the system cannot."""
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is None:
        return False
    here = -100
    if not renameat2(here, os.fsencode(a), here, os.fsencode(b), ctypes.c_uint(_EXCHANGE)):
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), b)


def _move_twice(temporary: str, path: str) -> None:
    """Move the old folder away and the new one in; between the two steps a load finds the old one by its name."""
    old = f"{temporary.removesuffix('.tmp')}.old"
    os.rename(path, old)
    try:
        os.rename(temporary, path)
    except BaseException:
        os.rename(old, path)
        raise


def _sync(folder: str) -> None:
    """Wait until the disk has everything that was written to this file system, in one call where there is one."""
    syncfs = getattr(_libc, "syncfs", None)
    if syncfs is not None:
        _sync_folder(folder, syncfs)
        return
    for place, _, names in os.walk(folder):
        for name in names:
            with Descriptor(os.path.join(place, name), os.O_RDONLY) as fd:
                os.fsync(fd)
        _sync_folder(place)


def _sync_folder(folder: str, call: Callable[[int], Any] = os.fsync) -> None:
    with Descriptor(folder, os.O_RDONLY) as fd:
        if call(fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), folder)
