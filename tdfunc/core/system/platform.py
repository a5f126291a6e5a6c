"""The calls in which operating systems differ, each with the weaker way beside the strong one.

The strong ways are for Linux, and most of them for macOS. Each function says in one sentence which promise is weaker
where its call is missing. No other file asks the system what it has: `tests/test_layout.py` checks that. The promises
are a table in `docs/install.md`.
"""

import atexit
import ctypes
import errno
import importlib
import io
import mmap
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any

import xxhash


# Any: a module that other systems lack.
def _find_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_fcntl: Any = _find_module("fcntl")
_msvcrt: Any = None if _fcntl is not None else _find_module("msvcrt")
_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
# Without O_BINARY, Windows changes the ends of lines.
_BINARY = getattr(os, "O_BINARY", 0)
READ_WRITE = os.O_RDWR | _BINARY
NEW_FILE = READ_WRITE | os.O_CREAT | os.O_EXCL
LOCK_FILE = READ_WRITE | os.O_CREAT
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
# Without O_NONBLOCK opening a pipe waits for a writer, and a device may act.
READ = os.O_RDONLY | _BINARY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
# What `open_folder` returns where a folder cannot be opened; its path is used in its place.
NO_FD = -1
# A folder has a descriptor, which other calls take as the place of relative names.
_HAS_FOLDERS = hasattr(os, "O_DIRECTORY") and {os.open, os.stat} <= os.supports_dir_fd and os.listdir in os.supports_fd
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_HAS_PREADV = hasattr(os, "preadv")
_HAS_PREAD = hasattr(os, "pread")
_HAS_PWRITE = hasattr(os, "pwrite")
# macOS has none.
_advise: Any = getattr(os, "posix_fadvise", None)
# A file that is open or mapped keeps its name: it is closed before it is renamed or removed, and its lock goes first.
HOLDS_NAMES: bool = _fcntl is None
# The folder with the names of open files, on Linux or macOS.
_DESCRIPTORS = next(filter(os.path.isdir, ("/proc/self/fd", "/dev/fd")), None)
_AT_FDCWD = -100
_EXCHANGE = 2
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WILLNEED = 3
_DONTNEED = 4
_HUGEPAGE = 14
# The unit of `st_blocks`.
_STAT_BYTES = 512
# Behind the end of files of less than a TiB: on Windows no other process reads or writes locked bytes.
_LOCK_AT = 1 << 40
_LOOK_S = 0.02
# For so long a file that another program has open is tried again.
_PATIENCE_S = 2.0
_seeking = threading.Lock()


# -- locks ------------------------------------------------------------------------------------------------------


def lock_file(fd: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed; a `shared` lock excludes only locks that are not.

    Weaker: Windows has no shared locks, and some systems and file systems have none: two saves at once to one place
    are then the user's to avoid, and nothing removes what a killed save left.

    Raises:
        BlockingIOError: Another process, or another descriptor, has the lock.
        OSError: There are no locks.
    """
    if _fcntl is not None:
        operation = _fcntl.LOCK_SH if shared else _fcntl.LOCK_EX
        if not wait:
            operation |= _fcntl.LOCK_NB
        _fcntl.flock(fd, operation)
    elif _msvcrt is not None and not shared:
        _lock_byte(fd, wait)
    else:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def unlock_file(fd: int) -> None:
    """Give up the lock of an open file, if it has one."""
    if _fcntl is not None:
        with suppress(OSError):
            _fcntl.flock(fd, _fcntl.LOCK_UN)
    elif _msvcrt is not None:
        with suppress(OSError):
            _call_locking(fd, _msvcrt.LK_UNLCK)


def _lock_byte(fd: int, wait: bool) -> None:
    while True:
        try:
            _call_locking(fd, _msvcrt.LK_NBLCK)
            return
        except PermissionError as err:
            if not wait:
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK)) from err
        time.sleep(_LOOK_S)


def _call_locking(fd: int, mode: int) -> None:
    """Call Windows' function, which locks bytes from the position of the descriptor on."""
    at = os.lseek(fd, 0, os.SEEK_CUR)
    os.lseek(fd, _LOCK_AT, os.SEEK_SET)
    try:
        _msvcrt.locking(fd, mode, 1)
    finally:
        os.lseek(fd, at, os.SEEK_SET)


def lock_of_folder(path: str) -> str:
    """Return the name of a file to lock in place of a folder that cannot be opened.

    Weaker: only the saves of one user on one machine wait for each other.

    Raises:
        OSError: There are no locks.
    """
    if _msvcrt is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    name = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.normcase(os.path.realpath(path))))
    return os.path.join(tempfile.gettempdir(), f"tdfunc-{name}.lock")


# -- folders ----------------------------------------------------------------------------------------------------


def open_folder(path: str, *, follow: bool = True) -> int:
    """Open a folder; return NO_FD where the system opens none, after the same checks.

    Weaker: the folder is known by its path alone, so that another one can take its place unnoticed between two calls.
    """
    if _HAS_FOLDERS:
        return os.open(path, _FOLDER if follow else _FOLDER | NO_LINK)
    found = os.stat(path, follow_symlinks=follow)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    return NO_FD


def open_file(path: str, flags: int, mode: int = 0o777) -> int:
    """Open a file; a folder is an IsADirectoryError where the system does not open it."""
    try:
        return os.open(path, flags, mode)
    except PermissionError as err:
        if _HAS_FOLDERS or not os.path.isdir(path):
            raise
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path) from err


def open_in(folder: int, path: str, name: str, flags: int, *, follow: bool) -> int:
    """Open a file by its name in an open folder, whose path is `path`; without `follow` a link is an ELOOP.

    Weaker: the name is looked up twice, once to check that it is not a link.
    """
    if folder != NO_FD:
        return os.open(name, flags if follow else flags | NO_LINK, dir_fd=folder)
    place = os.path.join(path, name)
    if not follow and stat.S_ISLNK(os.lstat(place).st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), place)
    return open_file(place, flags)


def mode_in(folder: int, path: str, name: str) -> int:
    """Return the type and permissions of a name in an open folder; a link is not followed."""
    if folder != NO_FD:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    return os.lstat(os.path.join(path, name)).st_mode


def names_in(folder: int, path: str, name: str) -> list[str]:
    """Return the names in a folder inside an open one."""
    if folder == NO_FD:
        return os.listdir(os.path.join(path, name))
    fd = os.open(name or ".", _FOLDER, dir_fd=folder)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def path_of(fd: int) -> str | None:
    """Return the path of an open file or folder, without links; None where the system cannot tell it.

    Weaker: a link in a memmap folder, also one to a file beside it, is then refused.
    """
    if sys.platform == "linux" and _DESCRIPTORS is not None and fd != NO_FD:
        return os.path.realpath(f"{_DESCRIPTORS}/{fd}")
    return None


def name_of(fd: int) -> str | None:
    """Return a name by which an open file can be opened again, whatever its path is by now.

    Weaker: None on Windows, where the path is used and then compared with the open file.
    """
    if _DESCRIPTORS is not None:
        return f"{_DESCRIPTORS}/{fd}"
    return None


# -- the disk ---------------------------------------------------------------------------------------------------


def sync_file(fd: int) -> None:
    """Wait until the disk has the contents of a file.

    On macOS, `fsync` leaves them in the memory of the drive, and another call writes that out.
    """
    full = getattr(_fcntl, "F_FULLFSYNC", None)
    if full is not None:
        # A file system that lacks the call says so.
        with suppress(OSError):
            _fcntl.fcntl(fd, full)
            return
    os.fsync(fd)


def sync_folder(folder: int) -> None:
    """Wait until the disk has the names in an open folder.

    Weaker: without a descriptor nothing waits, and a power failure can undo a save that has returned.
    """
    if folder != NO_FD:
        os.fsync(folder)


def sync_tree(folder: int) -> bool:
    """Wait until the disk has all files on the file system of a folder, in one call; return False if there is none."""
    if folder == NO_FD or not hasattr(_libc, "syncfs"):
        return False
    if _libc.syncfs(folder):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return True


# Windows syncs only files that are open to be written to.
TO_SYNC: int = os.O_RDONLY | _BINARY if _HAS_FOLDERS else READ_WRITE


def take_space(fd: int, size_bytes: int) -> None:
    """Take the space of a file before the first byte is written, so that a full disk shows at once.

    It also speeds up a save without fsync: ext4 writes delayed blocks out when a file is renamed over another one (its
    mount option `auto_da_alloc`), and these are not delayed. Weaker: elsewhere a full disk shows during the write.
    """
    # Not os.posix_fallocate: where a file system cannot do this, it writes zeros instead.
    fallocate = getattr(_libc, "fallocate64", None)
    if fallocate is None or not size_bytes:
        return
    has_failed = fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes))
    if has_failed:
        code = ctypes.get_errno()
        if code in _NO_SPACE:
            raise OSError(code, os.strerror(code))


def has_space(info: os.stat_result) -> bool:
    """Return whether a file has the space of its size; False where the system does not say.

    Weaker: rows of a distributed save are then written one by one, not through a map.
    """
    blocks = getattr(info, "st_blocks", None)
    return blocks is not None and blocks * _STAT_BYTES >= info.st_size


def copy_mode(old: str, new: str, fd: int = NO_FD) -> None:
    """Keep the permissions of the old file or folder, by the descriptor of the new one; a link is not followed.

    Weaker: by its name.
    """
    with suppress(OSError):
        found = os.stat(old, follow_symlinks=False)
        if not stat.S_ISLNK(found.st_mode):
            by_fd = fd != NO_FD and os.chmod in os.supports_fd
            os.chmod(fd if by_fd else new, stat.S_IMODE(found.st_mode))


# -- names ------------------------------------------------------------------------------------------------------


def replace(source: str, target: str, *, insist: bool = True) -> None:
    """Give a file another name in one step, also a name that another file has.

    Weaker: Windows refuses that while a program has the target open or mapped; then this tries for two seconds, and
    raises. Without `insist` it raises at once.
    """
    if insist:
        _insist(os.replace, source, target)
    else:
        os.replace(source, target)


def rename(source: str, target: str) -> None:
    """Give a file or folder a free name.

    Weaker: Windows refuses that while a program has it, or a file in the folder, open; as for `replace`.
    """
    _insist(os.rename, source, target)


def remove(path: str) -> None:
    """Remove a file that other programs open for a moment at most; as for `replace`."""
    _insist(os.unlink, path)


def _insist(call: Callable[..., None], *paths: str) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            call(*paths)
            return
        except PermissionError:
            if not HOLDS_NAMES or time.monotonic() > end_s:
                raise
        time.sleep(_LOOK_S)


def exchange(first: str, second: str) -> bool:
    """Exchange two names in one step; return False if the system or the file system cannot.

    Weaker: the folder is replaced in two steps, and a save that is killed between them leaves the old folder beside its
    name, where readers find it.
    """
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is None:
        return False
    places = _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second)
    if renameat2(*places, ctypes.c_uint(_EXCHANGE)):
        code = ctypes.get_errno()
        if code in _NO_EXCHANGE:
            return False
        raise OSError(code, os.strerror(code), second)
    return True


@contextmanager
def passing_folder(prefix: str) -> Generator[str, None, None]:
    """Make a temporary folder whose files may be in use after the block, by an open descriptor or a map.

    Weaker: where a file in use keeps its name, the folder goes at the end of the process, or stays if it is killed.
    """
    if not HOLDS_NAMES:
        with tempfile.TemporaryDirectory(prefix=prefix) as made:
            yield made
        return
    made = tempfile.mkdtemp(prefix=prefix)
    # Also a map that is made later needs the name.
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    yield made


# -- bytes ------------------------------------------------------------------------------------------------------


def read_at(fd: int, view: memoryview, offset: int) -> int:
    """Read once into memory, from an offset on; return the number of bytes, which may be lower.

    Weaker: without a call for it, the threads of the process read one after the other.
    """
    if _HAS_PREADV:
        return os.preadv(fd, [view], offset)
    if _HAS_PREAD:
        data = os.pread(fd, len(view), offset)
        view[: len(data)] = data
        return len(data)
    with _seeking, io.FileIO(fd, closefd=False) as file:
        file.seek(offset)
        return file.readinto(view) or 0


def write_at(fd: int, data: memoryview, offset: int) -> int:
    """Write once to an offset; return the number of bytes, which may be lower. Weaker: as for `read_at`."""
    if _HAS_PWRITE:
        return os.pwrite(fd, data, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def read_ahead(fd: int, offset: int, size_bytes: int) -> None:
    """Have the system read a part of a file, in one request to the disk. Weaker: it does so in small steps."""
    if _advise is not None:
        _advise(fd, offset, size_bytes, os.POSIX_FADV_WILLNEED)


# -- memory -----------------------------------------------------------------------------------------------------

PAGE_BYTES: int = mmap.PAGESIZE
_madvise: Any = getattr(_libc, "madvise", None)
_mincore: Any = getattr(_libc, "mincore", None)
if _mincore is not None:
    # With types given, ints are taken as they are, which is faster.
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
# False where the two calls below tell and do nothing: rows of a mapped file are then read page by page.
KNOWS_PAGES: bool = _mincore is not None


def are_resident(pages: Iterable[int]) -> bool:
    """Return whether the pages at some addresses are in memory."""
    found = ctypes.c_ubyte()
    place = ctypes.addressof(found)
    for page in pages:
        has_failed = _mincore(page, 1, place)
        if not has_failed and not found.value & 1:
            return False
    return True


def want_memory(begins: Iterable[int], ends: Iterable[int]) -> None:
    """Have the system read parts of mapped files; each begins at a page."""
    # An advice that is refused costs time and nothing else.
    for begin, end in zip(begins, ends, strict=True):
        _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(_WILLNEED))


def release_pages(begin: int, size_bytes: int) -> None:
    """Have the system forget the pages of a part of a private mapping that nobody has written to; a read maps them.

    Weaker: they count as memory of the process until the system needs it.
    """
    if _madvise is not None and size_bytes:
        first = begin - begin % PAGE_BYTES
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(begin + size_bytes - first), ctypes.c_int(_DONTNEED))


def want_large_pages(begin: int, size_bytes: int) -> None:
    """Have the system map new memory by pages of 2 MB, whose addresses a processor finds sooner. Weaker: of 4 kB."""
    if _madvise is not None:
        first = begin + -begin % PAGE_BYTES
        last = begin + size_bytes - (begin + size_bytes) % PAGE_BYTES
        # An advice that is refused changes nothing.
        _madvise(ctypes.c_void_p(first), ctypes.c_size_t(max(last - first, 0)), ctypes.c_int(_HUGEPAGE))


def read_page_flags(first: int, count: int) -> bytes | None:
    """Return 64 bits for each of some pages of this process, from Linux; None from other systems.

    Weaker: a copy-on-write leaf then counts as written to, so that its values are sent to processes, not its file name.
    """
    size_bytes = 8 * count
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(8 * first)
            raw = file.read(size_bytes)
    except OSError:
        return None
    if len(raw) != size_bytes:
        return None
    return raw


# -- the process ------------------------------------------------------------------------------------------------


def call_in_forks(function: Callable[[], None]) -> None:
    """Have each process that is forked call a function first. A system without forks needs none."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def count_cpus() -> int:
    """Return the number of processors that this process may use. Weaker: of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def kernel_id() -> str | None:
    """Return a text that each start of a kernel makes anew. Weaker: None, as if each rank were another machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def end_with_reader() -> None:
    """Have the process end when the reader of its output goes, as in `tdfunc show x | head -1`.

    Weaker: elsewhere that is an error of the write.
    """
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
