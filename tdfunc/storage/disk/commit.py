"""Replace a file or a folder as a whole: the one protocol for everything that is stored.

New contents are written under a temporary name next to their place, `.tdfunc-<name>-<random>.tmp`, and the writer
holds its lock. They are made durable and take the place in one step. So a reader finds the complete old or the complete
new contents, also after an error, a kill or a full disk. A temporary name without a lock belonged to a writer that
died; the next write to the same place removes it.

Until the new contents have the place, an error is an error and no old contents are removed. After that it is a
warning: the save has succeeded, and the warning names the work that was left undone.
"""

import errno
import os
import re
import secrets
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from typing import TypeAlias, TypeVar

import xxhash

from tdfunc.core.errors import ConcurrencyError, error, explain
from tdfunc.core.system import platform

T = TypeVar("T")
_PREFIX = ".tdfunc-"
_NEW = ".tmp"
_OLD = ".old"
# The folder of a step of a CheckpointManager. With more digits a name is longer than a file system takes.
STEP_NAME = re.compile(r"step-([0-9]{10,250})")
LEFTOVER = re.compile(r"\.tdfunc-[0-9a-f]{16}-[0-9a-f]{16}\.(tmp|old)")
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY}
_WAIT_S = 600.0
_LOOK_S = 0.02
# One entry for each call of `locked` that has begun: the device and inode of the folder, and the thread.
_entered: list[tuple[int, int, int]] = []


class Descriptor:
    """An open file; its `with` block gives the number, closes it and gives up its lock.

    A process that is forked meanwhile closes its copy, whose lock would outlive this process. A process that was forked
    without Python still has its copy, so `close` gives up the lock before it closes the descriptor.
    """

    def __init__(
        self, path: str, flags: int, mode: int = 0o777, *, opener: Callable[[str, int, int], int] = platform.open_file
    ) -> None:
        self.path = path
        self.fd: int = -1
        _descriptors.add(self)
        self.fd = opener(path, flags, mode)

    def lock(self, *, shared: bool = False, wait: bool = False) -> None:
        """Lock the file; a `shared` lock excludes only locks that are not."""
        platform.lock_file(self.fd, shared=shared, wait=wait)

    def status(self) -> os.stat_result:
        """Return the status of the file, whatever its name is by now."""
        return os.fstat(self.fd)

    def close(self) -> None:
        """Give up the lock and close the descriptor; a second call does nothing."""
        fd = self.fd
        self.fd = -1
        if fd == -1:
            return
        # No call between: Ctrl-C comes between calls, and would leave the lock to the end of the process.
        try:
            platform.unlock_file(fd)
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


platform.call_in_forks(_close_copies)


class Folder:
    """An open folder; its `with` block closes it and gives up its lock.

    Where the system opens no folders, it is a path and the status of the folder that had it.
    """

    def __init__(self, path: str, *, follow: bool = True) -> None:
        self.path: str = path
        self._held = Descriptor(path, 0, opener=lambda path, *_: platform.open_folder(path, follow=follow))
        self._status: os.stat_result | None = None
        if self._held.fd == platform.NO_FD:
            self._status = os.stat(path, follow_symlinks=follow)
        self._lock: Descriptor | None = None

    @property
    def fd(self) -> int:
        """The descriptor, or `platform.NO_FD`."""
        return self._held.fd

    def lock(self, *, shared: bool = False, wait: bool = False) -> None:
        """Lock the folder; a `shared` lock excludes only locks that are not."""
        if self.fd != platform.NO_FD:
            self._held.lock(shared=shared, wait=wait)
            return
        held = Descriptor(platform.lock_of_folder(self.path), platform.LOCK_FILE, 0o666)
        try:
            held.lock(shared=shared, wait=wait)
        except BaseException:
            held.close()
            raise
        self._lock = held

    def status(self) -> os.stat_result:
        """Return the status of the folder, whatever its name is by now."""
        if self._status is not None:
            return self._status
        return self._held.status()

    def sync(self) -> None:
        """Wait until the disk has the names in the folder."""
        platform.sync_folder(self.fd)

    def open(self, name: str, flags: int, *, follow: bool) -> Descriptor:
        """Open a file in the folder; without `follow` a link is an error of the system."""
        root = self.fd

        def opener(_: str, flags: int, mode: int) -> int:
            return platform.open_in(root, self.path, name, flags, follow=follow)

        return Descriptor(f"{self.path}/{name}", flags, opener=opener)

    def names(self, name: str) -> list[str]:
        """Return the names in a folder inside this one."""
        return platform.names_in(self.fd, self.path, name)

    def mode(self, name: str) -> int:
        """Return the type and permissions of a file or link in the folder."""
        return platform.mode_in(self.fd, self.path, name)

    def close(self) -> None:
        """Give up the lock and close the folder; a second call does nothing."""
        try:
            if self._lock is not None:
                self._lock.close()
        finally:
            self._held.close()

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Held: TypeAlias = Descriptor | Folder
H = TypeVar("H", Descriptor, Folder)


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


def lock(held: Held, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file or folder; a `shared` lock excludes only locks that are not."""
    held.lock(shared=shared, wait=wait)


@contextmanager
def locked(folder: str) -> Generator[Folder, None, None]:
    """Wait until no other save writes to a folder; the lock of a killed process ends with the process.

    Raises:
        TimeoutError: Another save, or a process that was forked during one, kept the lock.
        ConcurrencyError: This thread has the lock: a signal handler has interrupted its save.
    """
    held = _open_folder(folder)
    status = held.status()
    entry = (status.st_dev, status.st_ino, threading.get_ident())
    # Before the lock is taken until after it is given up: a signal may arrive between any two lines.
    _entered.append(entry)
    try:
        with held:
            _wait_for_lock(held, folder, is_nested=_entered.count(entry) > 1)
            yield held
    finally:
        if entry in _entered:
            _entered.remove(entry)


def _wait_for_lock(held: Folder, folder: str, *, is_nested: bool) -> None:
    """Wait for the lock of a folder, on which another save may have it."""
    end_s = time.monotonic() + _WAIT_S
    while True:
        try:
            lock(held)
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


def _open_folder(folder: str) -> Folder:
    with naming("save", folder, "the folder must exist"):
        return Folder(folder or ".")


def replace_file(path: str, write: Callable[[int], None], *, size_bytes: int, fsync: bool) -> None:
    """Give `path` the contents, `size_bytes` of them, that `write` puts into a descriptor."""
    replace_named(path, lambda fd, _: write(fd), size_bytes=size_bytes, fsync=fsync)


def replace_named(path: str, write: Callable[[int, str], None], *, size_bytes: int, fsync: bool) -> None:
    """Give `path` the contents of a file that `write` fills; it gets a descriptor and the name for other writers."""
    with _open_folder(os.path.dirname(path)) as parent:
        put_file(path, write, size_bytes=size_bytes, fsync=fsync)
        if fsync:
            settle(path, "a power failure may undo it", parent.sync)


def put_file(path: str, write: Callable[[int, str], None], *, size_bytes: int, fsync: bool) -> None:
    """Do the same as `replace_named` in a folder whose names the caller makes durable."""
    with naming("save", path, "the file was not replaced"):
        sweep(os.path.dirname(path), path)
        with _staged(path, lambda name: Descriptor(name, platform.NEW_FILE, 0o666)) as (temporary, held):
            platform.take_space(held.fd, size_bytes)
            write(held.fd, temporary)
            platform.copy_mode(path, temporary, held.fd)
            if fsync:
                platform.sync_file(held.fd)
            _let_go(held)
            _replace_file(temporary, path)


def _replace_file(temporary: str, path: str) -> None:
    """Give a file the name of another one, in one step where the system can."""
    try:
        platform.replace(temporary, path, insist=False)
    except PermissionError:
        # A file that is mapped cannot be removed, and it can get another name. It goes with a later save.
        if not (platform.HOLDS_NAMES and _replace_in_steps(temporary, path)):
            raise
        _remove(_twin(temporary))


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
        with _staged(path, _create_folder) as (temporary, held):
            result = write(temporary)
            platform.copy_mode(path, temporary, held.fd)
            if fsync:
                held.sync()
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


def _create_folder(path: str) -> Folder:
    os.mkdir(path)
    return Folder(path)


def _take_place(temporary: str, path: str, overwrite: bool) -> None:
    """Give a folder its name; a folder that has it gets the temporary name, or the name of a leftover."""
    while True:
        try:
            # Over an empty folder this works.
            platform.rename(temporary, path)
            return
        except OSError as err:
            if err.errno not in _TAKEN:
                raise
            if not overwrite:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from err
        # Another process removed the old folder since the first attempt; without the new one that raises.
        with suppress(FileNotFoundError):
            if platform.exchange(temporary, path) or _replace_in_steps(temporary, path):
                return


def _replace_in_steps(temporary: str, path: str) -> bool:
    """Replace a folder or file in two steps, between which `locate` finds the old one; return False to try again.

    That is if another process removed the old one before, or took its place in between.
    """
    old = _twin(temporary)
    try:
        platform.rename(path, old)
    except FileNotFoundError:
        return False
    try:
        platform.rename(temporary, path)
        return True
    except BaseException as err:
        is_taken = isinstance(err, OSError) and err.errno in _TAKEN
        if not is_taken:
            platform.rename(old, path)
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
            platform.rename(aside, path)


def remove_folder(path: str, check: Callable[[], None]) -> bool:
    """Remove a folder as a whole; return False if it does not exist or another reader or writer holds its lock.

    `check` raises if the folder must not be removed.
    """
    with suppress(FileNotFoundError), Folder(path, follow=False) as held:
        try:
            lock(held)
        except BlockingIOError:
            return False
        except OSError:
            pass
        if is_at(held, path):
            check()
            temporary = _temporary(path)
            platform.rename(path, temporary)
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
        with suppress(OSError), _open_leftover(path) as held:
            lock(held)
            # The old folder of a writer that was killed between two steps is what readers find.
            is_unneeded = is_taken and entry.endswith(_NEW)
            if is_unneeded or is_absent(_twin(path)):
                _let_go(held)
                _remove(path)


@contextmanager
def _open_leftover(path: str) -> Generator[Held, None, None]:
    held: Held
    if os.path.isdir(path):
        held = Folder(path, follow=False)
    else:
        held = Descriptor(path, platform.READ | platform.NO_LINK)
    with closing(held):
        yield held


def _let_go(held: Held) -> None:
    """Close a file that is about to be renamed or removed, if the system requires that."""
    if platform.HOLDS_NAMES:
        held.close()


def _twin(path: str) -> str:
    """Return the name of the old folder beside a new one, and the other way round."""
    stem, suffix = os.path.splitext(path)
    other = _OLD if suffix == _NEW else _NEW
    return stem + other


@contextmanager
def _staged(path: str, create: Callable[[str], H]) -> Generator[tuple[str, H], None, None]:
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
        with closing(held):
            try:
                with suppress(OSError):
                    lock(held, wait=True)
                # Another writer may have removed it as a leftover before it was locked.
                if is_at(held, temporary):
                    yield temporary, held
                    return
            except BaseException:
                _let_go(held)
                # If the old folder could not get its name back, the new one is the sign by which `locate` finds it.
                if is_absent(_twin(temporary)):
                    _remove(temporary)
                raise


def _temporary(path: str) -> str:
    return os.path.join(os.path.dirname(path), f"{_start(path)}{secrets.token_hex(8)}{_NEW}")


def _start(path: str) -> str:
    # A digest, so that a name of the greatest length has room.
    return f"{_PREFIX}{xxhash.xxh3_64_hexdigest(os.fsencode(os.path.basename(path)))}-"


def is_at(held: Held, path: str, *, follow: bool = False) -> bool:
    """Return whether a name belongs to an open file or folder; with `follow` the name may be a link."""
    try:
        return os.path.samestat(held.status(), os.stat(path, follow_symlinks=follow))
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
    with Folder(folder or ".") as held:
        held.sync()


def sync_files(folder: str) -> None:
    """Wait until the disk has all files in a folder, in one call where the system has one."""
    with Folder(folder) as held:
        if platform.sync_tree(held.fd):
            return
    for place, _, names in os.walk(folder):
        for name in names:
            with Descriptor(os.path.join(place, name), platform.TO_SYNC) as fd:
                platform.sync_file(fd)
        sync_folder(place)
