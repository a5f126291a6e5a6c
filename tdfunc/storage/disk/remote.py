"""The places of checkpoints: on this machine, or through fsspec on another one (`s3://bucket/model.safetensors`).

A read takes byte ranges; a load of everything fetches the file first. A save writes a file here, uploads it under
another name and then moves it. So a reader finds a complete file if the other side moves (or copies) files as a whole.
"""

import errno
import os
import secrets
import shutil
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, NoReturn, Protocol, TypeAlias

from tdfunc.core.errors import ConcurrencyError, UnsupportedError, damaged, error
from tdfunc.core.system import platform
from tdfunc.storage.disk.commit import locate
from tdfunc.storage.disk.mapped import map_bytes

_LOCAL = "file://"


def is_remote(path: str) -> bool:
    """Return whether a path names another file system."""
    return "://" in path and not path.startswith(_LOCAL)


def local_path(path: str) -> str:
    """Return the path of a file of this machine."""
    if "\0" in path:
        raise error(ValueError, "the path has the character NUL.", got=repr(path))
    return path.removeprefix(_LOCAL)


def as_name(path: "str | bytes | os.PathLike[str]") -> str:
    """Return a path as text; the path of a file on this machine has no protocol."""
    return local_path(os.fsdecode(path))


def find(path: "str | bytes | os.PathLike[str]") -> str:
    """Return the path to read a checkpoint from, as text: a killed writer may have left its folder beside its name."""
    name = as_name(path)
    if is_remote(name):
        return name
    return locate(name)


def local_folder(
    path: "str | bytes | os.PathLike[str]",
    call: str,
    *,
    reason: str = "files are mapped or locked",
    hint: str = "tdfunc.save(tree, url) writes to other machines.",
) -> str:
    """Return the name of a folder of this machine. Without this, a URL is the name of a new folder here."""
    name = as_name(path)
    if is_remote(name):
        raise UnsupportedError(f"{call} {name}: {reason}.", expected="a folder of this machine", hint=hint)
    return name


def anchored(path: str) -> str:
    """Return a path that means the same file after the current folder has changed."""
    # Not abspath: it takes `link/..` for the folder of the link.
    if is_remote(path) or os.path.isabs(path):
        return path
    return os.path.join(os.getcwd(), path)


class Bytes(Protocol):
    """The bytes of a file, on this machine or another one."""

    size_bytes: int

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill a part of `view` with the bytes from `offset` on; return their number, 0 at the end of the file."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


# Of fewer bytes the system reads ahead enough.
_MIN_AHEAD_BYTES = 1 << 17
_MAX_AHEAD_BYTES = 1 << 25


def _folder_error(path: str) -> OSError:
    return error(IsADirectoryError, f"load {path}: this is a folder.", expected="one safetensors file")


class LocalBytes:
    """A file of this machine, by its descriptor."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd: int = -1
        try:
            self.fd = platform.open_file(path, platform.READ)
        except IsADirectoryError:
            raise _folder_error(path) from None
        found = os.fstat(self.fd)
        self.stat: os.stat_result = found
        self.size_bytes: int = found.st_size
        if not stat.S_ISREG(found.st_mode):
            self.close()
            if stat.S_ISDIR(found.st_mode):
                raise _folder_error(path)
            raise damaged(f"load {path}: this is not a regular file.", "a safetensors file")

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read once; the system may return fewer bytes."""
        try:
            if len(view) > _MIN_AHEAD_BYTES:
                # The disk gets one request for all, not one after the other in the steps of the system's read-ahead.
                platform.read_ahead(self.fd, offset, min(len(view), _MAX_AHEAD_BYTES))
            return platform.read_at(self.fd, view, offset)
        except OSError as err:
            raise OSError(err.errno, f"load: {err.strerror}", self.path) from err

    # Any: an array of bytes.
    def map(self) -> Any:
        """Map the file copy-on-write."""
        return map_bytes(self.fd, self.path, self.size_bytes, "c").numpy()

    def close(self) -> None:
        """Close the descriptor."""
        fd = self.fd
        self.fd = -1
        os.close(fd)

    def __reduce__(self) -> NoReturn:
        # A copy would close the file of the original, or another file that has its number by then.
        raise UnsupportedError(f"{self.path}: an open file cannot be copied or pickled.", hint="open it again.")

    def __del__(self) -> None:
        if self.fd != -1:
            self.close()
            warnings.warn(f"unclosed checkpoint {self.path}", ResourceWarning, source=self, stacklevel=1)


class MappedBytes:
    """A file of this machine that is mapped in place of kept open: a process may have few descriptors and many maps.

    Args:
        file: The open file, which is closed.
    """

    def __init__(self, file: LocalBytes) -> None:
        self.path: str = file.path
        self.stat: os.stat_result = file.stat
        self.size_bytes: int = file.size_bytes
        # Any: an array of bytes; None once it is closed.
        self._mapped: Any = file.map()
        file.close()

    def read_into(self, view: memoryview, offset: int) -> int:
        """Copy a part, and give its pages back: else they would count as memory of this process."""
        count = max(0, min(len(view), self.size_bytes - offset))
        part = self._mapped[offset : offset + count]
        view[:count] = part.data
        platform.release_pages(part.ctypes.data, count)
        return count

    # Any: an array of bytes.
    def map(self) -> Any:
        """Return the mapped bytes, which the caller may write to: nothing else may read them from then on."""
        return self._mapped

    def close(self) -> None:
        """Give the map up; views of it keep it."""
        self._mapped = None


class LocalFiles:
    """The files of this machine."""

    def is_folder(self, path: str) -> bool:
        """Return whether the path is a folder (or a link to one)."""
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        """Return whether the path exists."""
        return os.path.exists(path)

    def names(self, folder: str) -> list[str]:
        """List a folder."""
        return os.listdir(folder)

    def open(self, path: str) -> Bytes:
        """Open a file."""
        return LocalBytes(path)

    def remove(self, path: str) -> None:
        """Delete a file."""
        os.unlink(path)


# What file systems say of a file that differs when it is replaced; other entries, such as a signed URL, differ always.
_MARKS = {
    "size", "etag", "content-md5", "content_md5", "md5hash", "digest", "generation", "versionid", "version_id",
    "last-modified", "lastmodified", "last_modified", "mtime", "modified", "updated", "created", "blob_id",
}  # fmt: skip


# Any: fsspec has no annotations.
def _marks_of(info: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key.lower() in _MARKS}


class RemoteBytes:
    """A file on another machine, read in ranges."""

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path
        info = system.info(path)
        size = info.get("size")
        if not isinstance(size, int):
            raise UnsupportedError(
                f"load {path}: the server does not tell the size of the file.",
                expected="a Content-Length",
                hint="tdfunc.load(url) fetches the complete file.",
            )
        self.size_bytes: int = size
        self._marks = _marks_of(info)
        # The threads that have read since they checked.
        self._readers: set[int] = set()

    def check_same(self) -> None:
        """Raise if the file was replaced since it was opened: the ranges of this thread may be of both files.

        Raises:
            ConcurrencyError: The file was replaced.
        """
        here = threading.get_ident()
        if here not in self._readers:
            return
        now = _marks_of(self._system.info(self._path))
        if now != self._marks:
            changed = [f"{key} {old}, then {now.get(key)}" for key, old in self._marks.items() if now.get(key) != old]
            raise ConcurrencyError(
                f"load {self._path}: the file was replaced while it was read in ranges.",
                expected="the same file from its header to its last leaf",
                got="; ".join(changed),
                hint="open it again; tdfunc.load(url) fetches the complete file at once.",
            )
        self._readers.discard(here)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fetch a range."""
        end = min(offset + len(view), self.size_bytes)
        if end <= offset:
            return 0
        data: bytes = self._system.cat_file(self._path, start=offset, end=end)
        if len(data) > end - offset:
            raise UnsupportedError(
                f"load {self._path}: the server ignores ranges, and sends more than was asked for.",
                expected=f"{end - offset} bytes from byte {offset} on",
                got=f"{len(data)} bytes",
                hint="tdfunc.load(url) fetches the complete file.",
            )
        view[: len(data)] = data
        self._readers.add(threading.get_ident())
        return len(data)

    def close(self) -> None:
        """Nothing is held open."""


class RemoteFiles:
    """The files of another machine; with `fetch`, a file is copied here when it is opened."""

    def __init__(self, path: str, *, fetch: bool) -> None:
        try:
            import fsspec  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as err:
            raise UnsupportedError(
                f"{path}: other machines need fsspec.", hint='pip install "tdfunc[remote]".'
            ) from err
        # Without a cache of listings, which would show folders as they were. Any: fsspec has no annotations.
        self._system: Any = fsspec.core.url_to_fs(path, use_listings_cache=False)[0]
        self._fetch = fetch

    def is_folder(self, path: str) -> bool:
        """Return whether the path is a folder, or the beginning of other names."""
        return self._system.isdir(path)

    def exists(self, path: str) -> bool:
        """Return whether the path exists."""
        return self._system.exists(path)

    def names(self, folder: str) -> list[str]:
        """List a folder."""
        return [name.rstrip("/").rpartition("/")[2] for name in self._system.ls(folder, detail=False)]

    def open(self, path: str) -> Bytes:
        """Open a file."""
        try:
            if not self._fetch:
                return RemoteBytes(self._system, path)
            with platform.passing_folder("tdfunc-") as folder:
                here = os.path.join(folder, "fetched")
                self._system.get_file(path, here)
                # With the folder its name goes, and with the last mapping the file itself.
                return LocalBytes(here)
        except FileNotFoundError as err:
            # fsspec names it as the other side does, without the protocol.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from err

    def marks(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        """Return what differs when a file is replaced, for files that are fetched whole; reads of ranges check theirs.

        Files that are fetched one after the other are of one save only if all of them are still there after the last.
        """
        if not self._fetch:
            return []
        return [_marks_of(self._system.info(path)) for path in paths]

    def remove(self, path: str) -> None:
        """Delete a file."""
        with _writing(path):
            self._system.rm_file(path)

    def replace(self, path: str, write: Callable[[int], None]) -> None:
        """Give `path` the contents that `write` puts into a descriptor."""
        parent, _, name = path.rpartition("/")
        temporary = f"{parent}/.tdfunc-{secrets.token_hex(8)}-{name}.tmp"
        with tempfile.TemporaryFile(prefix="tdfunc-") as file:
            write(file.fileno())
            file.seek(0)
            with _writing(path):
                self._upload(file, temporary, path)

    def _upload(self, file: IO[bytes], temporary: str, path: str) -> None:
        try:
            with self._system.open(temporary, "wb") as target:
                shutil.copyfileobj(file, target, 1 << 24)
            self._system.mv(temporary, path)
        except BaseException:
            # A system that cannot be written to has nothing to remove.
            with suppress(NotImplementedError):
                if self._system.exists(temporary):
                    self._system.rm_file(temporary)
            raise


@contextmanager
def _writing(path: str) -> Generator[None, None, None]:
    """Name the path if its file system cannot be written to, which some say without a word."""
    try:
        yield
    except NotImplementedError as err:
        raise UnsupportedError(
            f"save {path}: this file system cannot be written to.",
            expected="a file system of fsspec that writes and moves files, such as s3://",
            got=f"{path.partition('://')[0]}: {err or 'NotImplementedError'}",
            hint="save to a local path, and upload the file.",
        ) from err


Files: TypeAlias = LocalFiles | RemoteFiles
