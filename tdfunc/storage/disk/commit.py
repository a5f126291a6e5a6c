"""Replace a file or a folder as a whole: the one protocol that everything stored goes through.

New contents are written under a temporary name next to their place, `.tdfunc-<name>-<random>.tmp`, whose lock the
writer holds. They are made durable and take the place in one step, so a reader finds the whole old or the whole new
contents, also after an error, a kill or a full disk. A temporary name without a lock was left by a writer that died;
the next write to the same place removes it.
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

T = TypeVar("T")
# Not a plain import: Windows lacks it, and `import tdfunc` should work there.
_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None
_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
# Without O_NONBLOCK opening a pipe waits for a writer.
_ANY = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | NO_LINK
_PREFIX, _NEW, _OLD = ".tdfunc-", ".tmp", ".old"
_AT_FDCWD, _EXCHANGE = -100, 2
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY}


class Descriptor:
    """An open file or folder; its `with` block gives the number, closes it and gives up its lock.

    Processes that were forked meanwhile have the descriptor too: closing it here alone would leave them the lock.
    """

    def __init__(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self.fd = -1
        self.fd = os.open(path, flags, mode, dir_fd=dir_fd)

    def close(self) -> None:
        """Give it back; a second time nothing happens."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            if _fcntl is not None:
                with suppress(OSError):
                    _fcntl.flock(fd, _fcntl.LOCK_UN)
            os.close(fd)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def lock(fd: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file or folder; `shared` with others that do so."""
    if _fcntl is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    _fcntl.flock(fd, (_fcntl.LOCK_SH if shared else _fcntl.LOCK_EX) | (0 if wait else _fcntl.LOCK_NB))


@contextmanager
def locked(folder: str) -> Generator[int, None, None]:
    """Wait until no other save writes to a folder; a lock of a killed process is gone with it."""
    with _open_folder(folder) as fd:
        # Without locks two saves at once are the user's to avoid.
        with suppress(OSError):
            lock(fd, wait=True)
        yield fd


def _open_folder(folder: str) -> Descriptor:
    try:
        return Descriptor(folder or ".", FOLDER)
    except OSError as err:
        raise OSError(err.errno, f"save: {err.strerror}; the folder must exist", folder) from err


def replace_file(path: str, write: Callable[[int], None], *, size_bytes: int, fsync: bool) -> None:
    """Give `path` the contents that `write` puts into a descriptor; `size_bytes` of them."""
    replace_named(path, lambda fd, _: write(fd), size_bytes=size_bytes, fsync=fsync)


def replace_named(path: str, write: Callable[[int, str], None], *, size_bytes: int, fsync: bool) -> None:
    """Give `path` the contents that `write`, given a descriptor and its name, and others put into the file."""
    with _open_folder(os.path.dirname(path)) as parent:
        try:
            sweep(os.path.dirname(path), _start(path))
            new = os.O_RDWR | os.O_CREAT | os.O_EXCL
            with _staged(path, lambda name: Descriptor(name, new, 0o666)) as (temporary, fd):
                # Take the space before the first byte is written, so that a full disk shows at once. It also speeds up
                # a save without fsync: ext4 writes delayed blocks out when a file is renamed over another one (its
                # mount option `auto_da_alloc`), and these are not delayed.
                # Not os.posix_fallocate: where a file system cannot do this, it writes zeros instead.
                fallocate, size = getattr(_libc, "fallocate64", None), ctypes.c_int64(size_bytes)
                if fallocate is not None and size_bytes and fallocate(fd, 0, ctypes.c_int64(0), size):
                    code = ctypes.get_errno()
                    if code in _NO_SPACE:
                        raise OSError(code, os.strerror(code))
                write(fd, temporary)
                _copy_mode(path, fd)
                if fsync:
                    os.fsync(fd)
                os.replace(temporary, path)
        except OSError as err:
            raise OSError(err.errno, f"save: {err.strerror}; the file was not replaced", path) from err
        if fsync:
            os.fsync(parent)


def _copy_mode(path: str, fd: int) -> None:
    """Keep the permissions of the old file or folder; a link is not followed."""
    with suppress(OSError):
        old = os.stat(path, follow_symlinks=False)
        if not stat.S_ISLNK(old.st_mode):
            os.fchmod(fd, stat.S_IMODE(old.st_mode))


def replace_folder(
    path: str,
    write: Callable[[str], T],
    *,
    check: Callable[[], None] | None = None,
    overwrite: bool = True,
    fsync: bool,
) -> T:
    """Give `path` the contents that `write` puts into an empty folder, and makes durable; return its result.

    `check` is called before the folder takes its place, and may raise.
    """
    parent, start = os.path.dirname(path), _start(path)
    sweep(parent, start)
    with _staged(path, _create_folder) as (temporary, fd):
        result = write(temporary)
        _copy_mode(path, fd)
        if fsync:
            os.fsync(fd)
        if check is not None:
            check()
        _take_place(temporary, path, overwrite)
        if fsync:
            sync_folder(parent)
    sweep(parent, start, _OLD)
    return result


def _create_folder(path: str) -> Descriptor:
    os.mkdir(path)
    return Descriptor(path, FOLDER)


def _take_place(temporary: str, path: str, overwrite: bool) -> None:
    """Give a folder its name; one that has it gets the temporary name."""
    try:
        # Over an empty folder this works.
        os.rename(temporary, path)
        return
    except OSError as err:
        if err.errno not in _TAKEN:
            raise
        if not overwrite:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from err
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is not None:
        places = _AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path)
        if not renameat2(*places, ctypes.c_uint(_EXCHANGE)):
            return
        code = ctypes.get_errno()
        # Another process removed the old folder since the first attempt; without the new one this raises there.
        if code == errno.ENOENT:
            _take_place(temporary, path, overwrite)
            return
        if code not in _NO_EXCHANGE:
            raise OSError(code, os.strerror(code), path)
    # In two steps, between which `recover` finds the old folder.
    old = temporary.removesuffix(_NEW) + _OLD
    os.rename(path, old)
    try:
        os.rename(temporary, path)
    except BaseException:
        os.rename(old, path)
        raise


def recover(path: str) -> str | None:
    """Return the old folder of a writer that was killed between the two steps with which it replaced `path`."""
    path = os.path.realpath(path)
    parent, start = os.path.dirname(path), _start(path)
    with suppress(OSError):
        for entry in sorted(os.listdir(parent)):
            if entry.startswith(start) and entry.endswith(_OLD):
                return os.path.join(parent, entry)
    return None


def remove_folder(path: str) -> bool:
    """Remove a folder as a whole; False if another reader or writer holds its lock (or it is not there)."""
    with suppress(FileNotFoundError), Descriptor(path, FOLDER | NO_LINK) as fd:
        try:
            lock(fd)
        except BlockingIOError:
            return False
        except OSError:
            pass
        if is_at(fd, path):
            temporary = _temporary(path)
            os.rename(path, temporary)
            shutil.rmtree(temporary, ignore_errors=True)
            return True
    return False


def make_folder(path: str, *, fsync: bool) -> None:
    """Make a folder and those that it is in, as far as they are missing."""
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        make_folder(os.path.dirname(path), fsync=fsync)
        with suppress(FileExistsError):
            os.mkdir(path)
        if fsync:
            sync_folder(os.path.dirname(path))


def sweep(folder: str, start: str = _PREFIX, suffix: str = _NEW) -> None:
    """Remove the temporary files and folders of writers that are gone; `start` selects those of one place."""
    entries: list[str] = []
    with suppress(OSError):
        entries = os.listdir(folder or ".")
    for entry in entries:
        if entry.startswith(start) and entry.endswith(suffix):
            path = os.path.join(folder, entry)
            # Two writers may sweep at once; an entry that cannot be opened or locked belongs to another one.
            with suppress(OSError), Descriptor(path, _ANY) as fd:
                lock(fd)
                _remove(path)


@contextmanager
def _staged(path: str, create: Callable[[str], Descriptor]) -> Generator[tuple[str, int], None, None]:
    """Make a temporary file or folder and lock it; at the end its name is removed, with half of a write or the old."""
    while True:
        temporary = _temporary(path)
        try:
            held = create(temporary)
        except FileNotFoundError:
            if os.path.isdir(os.path.dirname(path) or "."):
                continue
            raise
        with suppress(OSError):
            lock(held.fd, wait=True)
        # Another writer may have removed it as a leftover before it was locked.
        if is_at(held.fd, temporary):
            break
        held.close()
    # The lock is given up last.
    with held as fd:
        try:
            yield temporary, fd
        finally:
            _remove(temporary)


def _temporary(path: str) -> str:
    return os.path.join(os.path.dirname(path), f"{_start(path)}{secrets.token_hex(8)}{_NEW}")


def _start(path: str) -> str:
    # A digest, so that a name of the greatest length has room.
    return f"{_PREFIX}{xxhash.xxh3_64_hexdigest(os.fsencode(os.path.basename(path)))}-"


def is_at(fd: int, path: str) -> bool:
    """Return whether a descriptor and a name are of one file or folder."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _remove(path: str) -> None:
    with suppress(OSError):
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)


def sync_folder(folder: str) -> None:
    """Wait until the disk has the names in a folder."""
    with Descriptor(folder or ".", FOLDER) as fd:
        os.fsync(fd)


def sync_files(folder: str) -> None:
    """Wait until the disk has all files in a folder, in one call where the system has one."""
    if hasattr(_libc, "syncfs"):
        with Descriptor(folder, FOLDER) as fd:
            if _libc.syncfs(fd):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), folder)
        return
    for place, _, names in os.walk(folder):
        for name in names:
            with Descriptor(os.path.join(place, name), os.O_RDONLY) as fd:
                os.fsync(fd)
        sync_folder(place)
