"""Replace a file or a folder as a whole: the one protocol for everything that is stored.

New contents are written under a temporary name next to their place, `.tdfunc-<name>-<random>.tmp`, and the writer
holds its lock. They are made durable and take the place in one step. So a reader finds the complete old or the complete
new contents, also after an error, a kill or a full disk. A temporary name without a lock belonged to a writer that
died; the next write to the same place removes it.

Until the new contents have the place, an error is an error and no old contents are removed. After that it is a
warning: the save has succeeded, and the warning names the work that was left undone.
"""

import ctypes
import errno
import importlib
import os
import re
import secrets
import shutil
import stat
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import xxhash

from tdfunc.core.errors import ConcurrencyError, error, explain

T = TypeVar("T")
# Not a plain import: Windows lacks it, and `import tdfunc` should work there.
_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None
_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
# Without O_NONBLOCK opening a pipe waits for a writer, and a device may act.
READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_PREFIX = ".tdfunc-"
_NEW = ".tmp"
_OLD = ".old"
# The folder of a step of a CheckpointManager. With more digits a name is longer than a file system takes.
STEP_NAME = re.compile(r"step-([0-9]{10,250})")
LEFTOVER = re.compile(r"\.tdfunc-[0-9a-f]{16}-[0-9a-f]{16}\.(tmp|old)")
_AT_FDCWD = -100
_EXCHANGE = 2
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY}
_WAIT_S = 600.0
_LOOK_S = 0.02
# One entry for each call of `locked` that has begun: the device and inode of the folder, and the thread.
_entered: list[tuple[int, int, int]] = []


class Descriptor:
    """An open file or folder; its `with` block gives the number, closes it and gives up its lock.

    A process that is forked meanwhile closes its copy, whose lock would outlive this process. A process that was forked
    without Python still has its copy, so `close` gives up the lock before it closes the descriptor.
    """

    def __init__(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self.fd: int = -1
        _descriptors.add(self)
        self.fd = os.open(path, flags, mode, dir_fd=dir_fd)

    def close(self) -> None:
        """Give up the lock and close the descriptor; a second call does nothing."""
        fd = self.fd
        self.fd = -1
        if fd == -1:
            return
        # No call between: Ctrl-C comes between calls, and would leave the lock to the end of the process.
        try:
            if _fcntl is not None:
                with suppress(OSError):
                    _fcntl.flock(fd, _fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


_descriptors: "weakref.WeakSet[Descriptor]" = weakref.WeakSet()


def _close_copies() -> None:
    _entered.clear()
    for held in list(_descriptors):
        fd = held.fd
        held.fd = -1
        if fd != -1:
            # Not `close`, which would take the lock from the parent.
            os.close(fd)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)


@contextmanager
def naming(call: str, path: str, state: str) -> Generator[None, None, None]:
    """Add the call, the path and its state to errors of the system."""
    try:
        yield
    except OSError as err:
        # Those without a number are the package's own.
        if err.errno is None:
            raise
        raise OSError(err.errno, f"{call}: {os.strerror(err.errno)}; {state}", path) from err


def settle(path: str, undone: str, work: Callable[[], object]) -> bool:
    """Do work that follows a commit, whose errors are warnings; return True if it is done."""
    try:
        work()
    # Other machines have errors of all kinds.
    except Exception as err:
        what = explain(f"save {path}: the save is in place, but {undone}.", got=str(err))
        warnings.warn(what, RuntimeWarning, stacklevel=3)
        return False
    return True


def lock(fd: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file or folder; a `shared` lock excludes only locks that are not."""
    if _fcntl is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    operation = _fcntl.LOCK_SH if shared else _fcntl.LOCK_EX
    if not wait:
        operation |= _fcntl.LOCK_NB
    _fcntl.flock(fd, operation)


@contextmanager
def locked(folder: str) -> Generator[int, None, None]:
    """Wait until no other save writes to a folder; the lock of a killed process ends with the process.

    Raises:
        TimeoutError: Another save, or a process that was forked during one, kept the lock.
        ConcurrencyError: This thread has the lock: a signal handler has interrupted its save.
    """
    held = _open_folder(folder)
    status = os.fstat(held.fd)
    entry = (status.st_dev, status.st_ino, threading.get_ident())
    # Before the lock is taken until after it is given up: a signal may arrive between any two lines.
    _entered.append(entry)
    try:
        with held as fd:
            _wait_for_lock(fd, folder, is_nested=_entered.count(entry) > 1)
            yield fd
    finally:
        if entry in _entered:
            _entered.remove(entry)


def _wait_for_lock(fd: int, folder: str, *, is_nested: bool) -> None:
    """Wait for the lock of a folder, on which another save may have it."""
    end_s = time.monotonic() + _WAIT_S
    while True:
        try:
            lock(fd)
            return
        except BlockingIOError:
            if is_nested:
                raise ConcurrencyError(
                    f"save {folder}: this thread is saving to the folder already; nothing was written.",
                    got="a call from a signal handler, in the middle of that save",
                    hint="save to another folder, or after the handler has returned.",
                ) from None
            if time.monotonic() > end_s:
                raise error(
                    TimeoutError,
                    f"save {folder}: another process is saving to this folder; nothing was written.",
                    expected=f"the lock of the folder within {_WAIT_S:.0f} s",
                    hint="`fuser FOLDER` shows the processes; the lock of one goes with it.",
                ) from None
            time.sleep(_LOOK_S)
        except OSError:
            # Without locks two saves at once are the user's to avoid.
            return


def _open_folder(folder: str) -> Descriptor:
    with naming("save", folder, "the folder must exist"):
        return Descriptor(folder or ".", FOLDER)


def replace_file(path: str, write: Callable[[int], None], *, size_bytes: int, fsync: bool) -> None:
    """Give `path` the contents, `size_bytes` of them, that `write` puts into a descriptor."""
    replace_named(path, lambda fd, _: write(fd), size_bytes=size_bytes, fsync=fsync)


def replace_named(path: str, write: Callable[[int, str], None], *, size_bytes: int, fsync: bool) -> None:
    """Give `path` the contents of a file that `write` fills; it gets a descriptor and the name for other writers."""
    with _open_folder(os.path.dirname(path)) as parent:
        put_file(path, write, size_bytes=size_bytes, fsync=fsync)
        if fsync:
            settle(path, "a power failure may undo it", lambda: os.fsync(parent))


def put_file(path: str, write: Callable[[int, str], None], *, size_bytes: int, fsync: bool) -> None:
    """Do the same as `replace_named` in a folder whose names the caller makes durable."""
    with naming("save", path, "the file was not replaced"):
        sweep(os.path.dirname(path), path)
        new = os.O_RDWR | os.O_CREAT | os.O_EXCL
        with _staged(path, lambda name: Descriptor(name, new, 0o666)) as (temporary, fd):
            _take_space(fd, size_bytes)
            write(fd, temporary)
            copy_mode(path, fd)
            if fsync:
                os.fsync(fd)
            os.replace(temporary, path)


def _take_space(fd: int, size_bytes: int) -> None:
    """Take the space of a file before the first byte is written, so that a full disk shows at once.

    It also speeds up a save without fsync: ext4 writes delayed blocks out when a file is renamed over another one (its
    mount option `auto_da_alloc`), and these are not delayed.
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


def copy_mode(path: str, new: int | str) -> None:
    """Keep the permissions of the old file or folder; a link is not followed."""
    with suppress(OSError):
        old = os.stat(path, follow_symlinks=False)
        if not stat.S_ISLNK(old.st_mode):
            os.chmod(new, stat.S_IMODE(old.st_mode))


def replace_folder(
    path: str,
    write: Callable[[str], T],
    *,
    call: str = "save",
    check: Callable[[], None] | None = None,
    overwrite: bool = True,
    fsync: bool,
) -> T:
    """Give `path` the contents that `write` puts into an empty folder and makes durable; return the result of `write`.

    `check` is called before the folder takes its place, and raises if the old folder must not be removed.
    """
    parent = os.path.dirname(path)
    with naming(call, path, "the folder was not replaced"):
        restore(path)
        sweep(parent, path)
        with _staged(path, _create_folder) as (temporary, fd):
            result = write(temporary)
            copy_mode(path, fd)
            if fsync:
                os.fsync(fd)
            if check is not None:
                check()
            _take_place(temporary, path, overwrite)
    if not fsync or settle(path, "a power failure may undo it", lambda: sync_folder(parent)):
        # The old folder, under the one name or the other, also where nothing can be locked.
        _remove(temporary)
        _remove(_twin(temporary))
        sweep(parent, path)
    return result


@contextmanager
def staged_folder(path: str) -> Generator[str, None, None]:
    """Make a temporary folder beside `path` for files that are moved out of it; the rest is removed at the end."""
    with _staged(path, _create_folder) as (temporary, _):
        yield temporary
        _remove(temporary)


def _create_folder(path: str) -> Descriptor:
    os.mkdir(path)
    return Descriptor(path, FOLDER)


def _take_place(temporary: str, path: str, overwrite: bool) -> None:
    """Give a folder its name; a folder that has it gets the temporary name, or the name of a leftover."""
    while True:
        try:
            # Over an empty folder this works.
            os.rename(temporary, path)
            return
        except OSError as err:
            if err.errno not in _TAKEN:
                raise
            if not overwrite:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from err
        code = _exchange(temporary, path)
        if code is None:
            return
        # Another process removed the old folder since the first attempt; without the new one that raises.
        if code == errno.ENOENT:
            continue
        if code not in _NO_EXCHANGE:
            raise OSError(code, os.strerror(code), path)
        if _replace_in_steps(temporary, path):
            return


def _exchange(temporary: str, path: str) -> int | None:
    """Exchange two names in one step; return None, or the number of the system's error."""
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is None:
        return errno.ENOSYS
    places = _AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path)
    if renameat2(*places, ctypes.c_uint(_EXCHANGE)):
        return ctypes.get_errno()
    return None


def _replace_in_steps(temporary: str, path: str) -> bool:
    """Replace a folder in two steps, between which `locate` finds the old one; return False if it must be tried again.

    That is if another process removed the old folder before, or took its place in between.
    """
    old = _twin(temporary)
    try:
        os.rename(path, old)
    except FileNotFoundError:
        return False
    try:
        os.rename(temporary, path)
        return True
    except BaseException as err:
        is_taken = isinstance(err, OSError) and err.errno in _TAKEN
        if not is_taken:
            os.rename(old, path)
            raise
        # The other one is newer.
        _remove(old)
        return False


def locate(path: str) -> str:
    """Return the place of a file or folder: its path, or the old folder of a writer that was killed between two steps.

    The sign of such a folder is the new one beside it, which the second step would have given the place. A leftover
    without a new folder was replaced.
    """
    real = os.path.realpath(path)
    parent, name = os.path.split(real)
    is_root = parent == real
    if is_root or os.path.lexists(real):
        return path
    above = locate(parent)
    if above != parent:
        return os.path.join(above, name)
    found: list[str] = []
    with suppress(OSError):
        entries = [os.path.join(parent, entry) for entry in os.listdir(parent) if entry.startswith(_start(real))]
        found = [entry for entry in entries if entry.endswith(_OLD) and os.path.lexists(_twin(entry))]
    return max(found, key=os.path.getmtime, default=path)


def restore(path: str) -> None:
    """Give the old folder of a writer that was killed between two steps its name back."""
    aside = locate(path)
    if aside != path:
        with suppress(OSError):
            os.rename(aside, path)


def remove_folder(path: str, check: Callable[[], None]) -> bool:
    """Remove a folder as a whole; return False if it does not exist or another reader or writer holds its lock.

    `check` raises if the folder must not be removed.
    """
    with suppress(FileNotFoundError), Descriptor(path, FOLDER | NO_LINK) as fd:
        try:
            lock(fd)
        except BlockingIOError:
            return False
        except OSError:
            pass
        if is_at(fd, path):
            check()
            temporary = _temporary(path)
            os.rename(path, temporary)
            shutil.rmtree(temporary, ignore_errors=True)
            return True
    return False


def make_folder(path: str, *, fsync: bool) -> None:
    """Make a folder and its missing parents."""
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        parent = os.path.dirname(path)
        # The root has no parent; a file system that fails says that nothing is a folder.
        if parent != path:
            make_folder(parent, fsync=fsync)
        with suppress(FileExistsError):
            os.mkdir(path)
        if fsync:
            sync_folder(os.path.dirname(path))


def sweep(folder: str, place: str | None = None) -> None:
    """Remove the temporary files and folders of writers that are gone; with `place`, only those beside that path."""
    entries: list[str] = []
    with suppress(OSError):
        entries = os.listdir(folder or ".")
    beginning = _PREFIX if place is None else _start(place)
    is_taken = place is not None and os.path.lexists(place)
    # A new folder before the old one beside it, which would count as superseded without that.
    for entry in sorted(entries, reverse=True):
        if not entry.startswith(beginning) or not LEFTOVER.fullmatch(entry):
            continue
        path = os.path.join(folder, entry)
        # Two writers may sweep at once; an entry that cannot be opened or locked belongs to another one.
        with suppress(OSError), Descriptor(path, READ | NO_LINK) as fd:
            lock(fd)
            # The old folder of a writer that was killed between two steps is what readers find.
            is_unneeded = is_taken and entry.endswith(_NEW)
            if is_unneeded or is_absent(_twin(path)):
                _remove(path)


def _twin(path: str) -> str:
    """Return the name of the old folder beside a new one, and the other way round."""
    stem, suffix = os.path.splitext(path)
    other = _OLD if suffix == _NEW else _NEW
    return stem + other


@contextmanager
def _staged(path: str, create: Callable[[str], Descriptor]) -> Generator[tuple[str, int], None, None]:
    """Make a temporary file or folder and lock it; after an error it is removed."""
    while True:
        temporary = _temporary(path)
        try:
            held = create(temporary)
        except FileNotFoundError:
            if os.path.isdir(os.path.dirname(os.path.abspath(path))):
                continue
            raise
        # The lock is given up last.
        with held as fd:
            try:
                with suppress(OSError):
                    lock(fd, wait=True)
                # Another writer may have removed it as a leftover before it was locked.
                if is_at(fd, temporary):
                    yield temporary, fd
                    return
            except BaseException:
                # If the old folder could not get its name back, the new one is the sign by which `locate` finds it.
                if is_absent(_twin(temporary)):
                    _remove(temporary)
                raise


def _temporary(path: str) -> str:
    return os.path.join(os.path.dirname(path), f"{_start(path)}{secrets.token_hex(8)}{_NEW}")


def _start(path: str) -> str:
    # A digest, so that a name of the greatest length has room.
    return f"{_PREFIX}{xxhash.xxh3_64_hexdigest(os.fsencode(os.path.basename(path)))}-"


def is_at(fd: int, path: str, *, follow: bool = False) -> bool:
    """Return whether a descriptor and a name belong to one file or folder; the name may be a link with `follow`."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=follow))
    except FileNotFoundError:
        return False


def is_absent(path: str) -> bool:
    """Return True if nothing has this name; False also if the system reports another error."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
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
