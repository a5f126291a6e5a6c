"""Takes calls away that Windows lacks, before tdfunc is imported: no locks, no descriptors of folders, no exchange.

`take_away("bare")` leaves no locks at all. `take_away("windows")` also has the rules of Windows: its locks, made of
Linux's; an open or mapped file keeps its name; `os.rename` takes no name that is taken; files are opened as bytes only
with O_BINARY. Windows itself was never run.
"""

import builtins
import ctypes
import errno
import fcntl
import multiprocessing
import multiprocessing.context
import os
import shutil
import stat
import struct
import sys
import types

# It asks the name of the system, and then takes the calls for granted.
import torch  # noqa: F401

LEVELS = ("bare", "windows")
VARIABLE = "TDFUNC_TEST_LACKS"
_GONE = (
    "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "pread", "preadv", "pwrite", "pwritev",
    "posix_fallocate", "posix_fadvise", "register_at_fork", "fork", "forkpty", "sched_getaffinity",
    "fchown",
)  # fmt: skip
_HIDDEN = {"/proc/self/fd", "/dev/fd", "/proc/self/pagemap", "/proc/sys/kernel/random/boot_id"}
_O_BINARY = 0x8000
# Locks of an open file, not of a process, from the headers of Linux.
_F_OFD_SETLK = 37


def take_away(level, *, keep_fork=False):
    """Take the calls of a level away from this process, and from the processes that it starts."""
    assert level in LEVELS
    assert not any(name.startswith("tdfunc.") for name in sys.modules), "tdfunc has found the calls"
    os.environ[VARIABLE] = level
    site = os.path.join(os.path.dirname(__file__), "site")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    os.environ["PYTHONPATH"] = os.pathsep.join([site, root, os.environ.get("PYTHONPATH", "")])
    sys.modules["fcntl"] = None
    for name in _GONE:
        if hasattr(os, name) and not (keep_fork and name == "fork"):
            delattr(os, name)
    os.supports_dir_fd = set()
    os.supports_fd = set()
    shutil._use_fd_functions = False
    _close_folders()
    _hide()
    _refuse_exchange()
    _only_spawn()
    if level == "windows":
        os.O_BINARY = _O_BINARY
        sys.modules["msvcrt"] = _windows_locks()
        _hold_names()


def _close_folders():
    """Refuse descriptors of folders, and names relative to one."""
    real_open, real_stat, real_fsync = os.open, os.stat, os.fsync

    def open_(path, flags, mode=0o777, *, dir_fd=None):
        if dir_fd is not None:
            raise NotImplementedError("dir_fd unavailable on this platform")
        if not isinstance(path, int) and os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        if hasattr(os, "O_BINARY"):
            _check_binary(path, flags)
        return real_open(path, flags & ~_O_BINARY, mode)

    def stat_(path, *, dir_fd=None, follow_symlinks=True):
        if dir_fd is not None:
            raise NotImplementedError("dir_fd unavailable on this platform")
        return real_stat(path, follow_symlinks=follow_symlinks)

    def fsync(fd):
        assert not stat.S_ISDIR(os.fstat(fd).st_mode), "a folder is synced"
        real_fsync(fd)

    os.open, os.stat, os.fsync = open_, stat_, fsync


def _check_binary(path, flags):
    """Fail where tdfunc opens a file as text, which Windows would change."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    assert flags & _O_BINARY or not caller.startswith("tdfunc."), f"{path} is opened as text"


def _hide():
    """Hide what Linux tells of a process."""
    real_isdir = os.path.isdir
    real_open = builtins.open

    def isdir(path):
        return path not in _HIDDEN and real_isdir(path) if isinstance(path, str) else real_isdir(path)

    def open_(file, *args, **options):
        if isinstance(file, str) and file in _HIDDEN:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", file)
        return real_open(file, *args, **options)

    os.path.isdir, builtins.open = isdir, open_


def _only_spawn():
    """Start processes in one way, from nothing."""
    contexts = multiprocessing.context._concrete_contexts
    for name in ("fork", "forkserver"):
        del contexts[name]
    default = multiprocessing.context._default_context
    default._default_context = contexts["spawn"]
    default.get_all_start_methods = multiprocessing.get_all_start_methods = lambda: ["spawn"]


def _refuse_exchange():
    """Refuse the calls of Linux's C library."""
    real = ctypes.CDLL

    class CDLL(real):
        def __getattr__(self, name):
            if name in {"renameat2", "fallocate64", "syncfs", "mincore", "madvise"}:
                raise AttributeError(name)
            return super().__getattr__(name)

    ctypes.CDLL = CDLL


def _windows_locks():
    """Windows' locks of bytes, which belong to an open file, as Linux's do that are made here."""
    made = types.ModuleType("msvcrt")
    made.LK_UNLCK, made.LK_NBLCK = 0, 2

    def locking(fd, mode, size):
        at = os.lseek(fd, 0, os.SEEK_CUR)
        # Linux locks a file that is open to be read against writers alone; Windows needs no more for a lock.
        is_writable = fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_RDWR | os.O_WRONLY)
        kind = fcntl.F_WRLCK if is_writable else fcntl.F_RDLCK
        if mode == made.LK_UNLCK:
            kind = fcntl.F_UNLCK
        try:
            fcntl.fcntl(fd, _F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, at, size, 0))
        except OSError as err:
            raise PermissionError(errno.EACCES, "Permission denied") from err

    made.locking = locking
    return made


def _used():
    """The paths that this process has open or mapped."""
    opened, mapped = set(), set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            opened.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    with _open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            place = line.find("/")
            if place >= 0:
                mapped.add(line[place:].rstrip("\n"))
    return opened, mapped


_open = builtins.open


def _hold_names():
    """Refuse to rename or remove a file that this process has open or mapped, or a folder that has one."""
    real = {name: getattr(os, name) for name in ("rename", "replace", "unlink", "remove", "rmdir")}

    def is_used(path, kinds):
        path = os.path.realpath(os.fsdecode(path)) if not os.path.islink(path) else os.path.abspath(os.fsdecode(path))
        inside = os.path.join(path, "")
        return any(one == path or one.startswith(inside) for kind in kinds for one in kind)

    def refuse(path):
        raise PermissionError(errno.EACCES, "The process cannot access the file", path)

    def moved(name):
        def move(source, target):
            opened, mapped = _used()
            if is_used(source, [opened, mapped] if os.path.isdir(source) else [opened]):
                refuse(source)
            if os.path.lexists(target):
                if name == "rename":
                    raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", target)
                if os.path.isdir(target) or is_used(target, [opened, mapped]):
                    refuse(target)
            real[name](source, target)

        return move

    def gone(name):
        def remove(path, *, dir_fd=None):
            assert dir_fd is None
            if is_used(path, _used()):
                refuse(path)
            real[name](path)

        return remove

    os.rename, os.replace = moved("rename"), moved("replace")
    os.unlink, os.remove, os.rmdir = gone("unlink"), gone("remove"), gone("rmdir")
