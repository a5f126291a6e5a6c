"""Replace a file as a whole: it is written without a name, made durable, and takes the name in one step.

Nothing that happens meanwhile (an error, a kill, a full disk) changes the old file, and readers see either whole
file. Where the system cannot write a file without a name, it gets a temporary one; what a killed process left
under such a name goes with the next save to the same path.
"""

import ctypes
import errno
import importlib
import os
import secrets
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import xxhash

from tdfunc.storage.disk.descriptor import Descriptor

# Not a plain import: Windows lacks it, and `import tdfunc` should work there.
_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None
_fallocate: Any = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None) if sys.platform == "linux" else None
_PREFIX = ".tdfunc-"
_UNNAMED = getattr(os, "O_TMPFILE", 0)
# What a kernel or file system without unnamed files answers.
_NO_UNNAMED = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
_NO_LINK = {errno.EXDEV, errno.ENOENT, errno.EPERM, errno.EOPNOTSUPP, errno.EACCES, errno.EMLINK}


def replace_file(path: str, write: Callable[[int], None], *, size_bytes: int, fsync: bool) -> None:
    """Give `path` the contents that `write` puts into a descriptor; `size_bytes` of them.

    Raises:
        OSError: The file system refused; the old file is whole.
    """

    def prepared(fd: int) -> None:
        _reserve(fd, size_bytes)
        write(fd)

    folder_name, name = os.path.split(path)
    try:
        opened = Descriptor(folder_name or ".", os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError as err:
        raise OSError(err.errno, f"save: {err.strerror}; the folder must exist", folder_name) from err
    with opened as folder:
        try:
            remove_leftovers(folder, name)
            if not (_UNNAMED and _replace(folder, name, prepared, fsync, named=False)):
                _replace(folder, name, prepared, fsync, named=True)
        except OSError as err:
            raise OSError(err.errno, f"save: {err.strerror}; the file was not replaced", path) from err
        if fsync:
            os.fsync(folder)


def remove_leftovers(folder: int, name: str | None) -> None:
    """Delete the temporary files of this name (of any name, if it is None) whose writers are gone."""
    start = _PREFIX if name is None else _temporary(name)
    for entry in os.listdir(folder):
        if entry.startswith(start) and _fcntl is not None:
            # Two saves may clean at once; what cannot be opened or locked is not ours to delete.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
            with suppress(OSError), Descriptor(entry, flags, dir_fd=folder) as fd:
                _fcntl.flock(fd, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
                os.unlink(entry, dir_fd=folder)


def _temporary(name: str) -> str:
    # A digest, so that a name of the greatest length has room.
    return f"{_PREFIX}{xxhash.xxh3_64_hexdigest(os.fsencode(name))}-"


def _replace(folder: int, name: str, write: Callable[[int], None], fsync: bool, *, named: bool) -> bool:
    """Write and rename; False if the system has no files without a name (nothing is left then)."""
    temporary = f"{_temporary(name)}{secrets.token_hex(8)}.tmp"
    file = _create(folder, temporary) if named else _create_unnamed(folder)
    if file is None:
        return False
    # Closed last: the lock keeps others from taking the file for a leftover.
    with file as fd:
        try:
            write(fd)
            _copy_mode(folder, name, fd)
            if fsync:
                os.fsync(fd)
            if not named and not _link(folder, temporary, fd):
                return False
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            return True
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)


def _create_unnamed(folder: int) -> Descriptor | None:
    try:
        file = Descriptor(".", _UNNAMED | os.O_RDWR, 0o666, dir_fd=folder)
    except OSError as err:
        if err.errno in _NO_UNNAMED:
            return None
        raise
    _lock(file.fd)
    return file


def _create(folder: int, temporary: str) -> Descriptor:
    while True:
        file = Descriptor(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
        _lock(file.fd)
        # Another save may have deleted it before it was locked.
        if os.fstat(file.fd).st_nlink:
            return file
        file.close()


def _lock(fd: int) -> None:
    # Some network file systems have no locks; there leftovers stay.
    if _fcntl is not None:
        with suppress(OSError):
            _fcntl.flock(fd, _fcntl.LOCK_EX)


def _reserve(fd: int, size_bytes: int) -> None:
    """Take the space before the first byte is written, so that a full disk shows at once.

    It also halves the time of a save without fsync: ext4 writes delayed blocks out when a file is renamed over
    another one (its mount option `auto_da_alloc`), and these are not delayed.
    """
    if _fallocate is None or not size_bytes:
        return
    # Not os.posix_fallocate: where a file system cannot do this, it writes zeros instead.
    if _fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)):
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))


def _copy_mode(folder: int, name: str, fd: int) -> None:
    """Keep the permissions of the file that is replaced."""
    with suppress(OSError):
        old = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(old.st_mode):
            os.fchmod(fd, stat.S_IMODE(old.st_mode))


def _link(folder: int, temporary: str, fd: int) -> bool:
    try:
        # With a source folder Python calls linkat, which follows the link to the file; link() would not.
        os.link(f"/proc/self/fd/{fd}", temporary, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    except OSError as err:
        if err.errno in _NO_LINK:
            return False
        raise
    return True
