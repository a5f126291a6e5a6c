"""Checkpoints on other machines, through fsspec: `s3://bucket/model.safetensors`, `memory://x.safetensors`.

A read takes byte ranges; a whole load fetches the file first. A save writes a file here, uploads it under another
name and then moves it, so a reader sees a whole file if the other side moves (or copies) files as a whole.
"""

import errno
import os
import secrets
import tempfile
from collections.abc import Callable
from typing import Any

from tdfunc.core.errors import UnsupportedError, error
from tdfunc.storage.safetensors.read import Bytes, LocalBytes

_LOCAL = "file://"


def is_remote(path: str) -> bool:
    """Whether a path names a file system of its own."""
    return "://" in path and not path.startswith(_LOCAL)


def local_path(path: str) -> str:
    """Return the path of a file of this machine."""
    return path.removeprefix(_LOCAL) if path.startswith(_LOCAL) else path


_CURRENT = "the current folder is '.'."


def local_folder(path: Any, call: str, hint: str = _CURRENT) -> str:
    """Return the name of a folder of this machine.

    Raises:
        TypeError: It is no path.
        ValueError: It is empty.
        UnsupportedError: It is on another machine.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise error(TypeError, f"{call}: not a path.", expected="the name of a folder", got=type(path).__name__)
    name = local_path(os.fsdecode(path))
    if is_remote(name):
        raise UnsupportedError(
            f"{call} {name}: files are mapped or locked.",
            expected="a folder of this machine",
            hint="tdfunc.save(tree, url) writes to other machines.",
        )
    return not_empty(name, call, hint)


def not_empty(folder: str, call: str, hint: str = _CURRENT) -> str:
    """Return the name of a folder; raise if it is empty, which may be a variable that was never set."""
    if not folder:
        raise error(
            ValueError,
            f"{call}: the name of the folder is empty.",
            expected="the name of a folder",
            got="''",
            hint=hint,
        )
    return folder


def anchored(path: str) -> str:
    """Return a path that means the same file after the current folder has changed."""
    # Not abspath: it takes `link/..` for the folder of the link.
    return path if is_remote(path) or os.path.isabs(path) else os.path.join(os.getcwd(), path)


# Any: fsspec has no annotations.
def _file_system(path: str) -> Any:
    try:
        import fsspec  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as err:
        raise UnsupportedError(
            f"{path}: paths on other machines need fsspec, which is not installed.",
            hint='pip install "tdfunc[remote]".',
        ) from err
    try:
        # Without a cache of listings, which would show folders as they were.
        return fsspec.core.url_to_fs(path, use_listings_cache=False)[0]
    except (ImportError, ValueError) as err:
        raise UnsupportedError(
            f"{path}: fsspec knows no such file system.",
            got=f"{type(err).__name__}: {err}",
            hint="install the package that it names.",
        ) from err


class RemoteBytes:
    """A file on another machine, read in ranges."""

    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        self.size_bytes: int = system.size(path)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fetch a range."""
        end = min(offset + len(view), self.size_bytes)
        data: bytes = self._system.cat_file(self._path, start=offset, end=end) if end > offset else b""
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Nothing is held open."""


class RemoteFiles:
    """The files of another machine; with `fetch` whole ones are copied here when they are opened."""

    def __init__(self, path: str, *, fetch: bool) -> None:
        self._system, self._fetch = _file_system(path), fetch

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder, or anything whose name starts so."""
        return self._system.isdir(path)

    def exists(self, path: str) -> bool:
        """Whether there is anything."""
        return self._system.exists(path)

    def names(self, folder: str) -> list[str]:
        """List a folder."""
        return [name.rstrip("/").rpartition("/")[2] for name in self._system.ls(folder, detail=False)]

    def open(self, path: str) -> Bytes:
        """Open a file."""
        try:
            return self._open(path)
        except FileNotFoundError as err:
            # fsspec names it as the other side does, without the protocol.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from err

    def _open(self, path: str) -> Bytes:
        if not self._fetch:
            return RemoteBytes(self._system, path)
        with tempfile.TemporaryDirectory(prefix="tdfunc-") as folder:
            here = os.path.join(folder, "fetched")
            self._system.get_file(path, here)
            # It has no name any more once the folder is gone, and is gone itself once nobody maps it.
            return LocalBytes(here)

    def remove(self, path: str) -> None:
        """Delete a file."""
        self._system.rm_file(path)

    def replace(self, path: str, write: Callable[[int], None]) -> None:
        """Give `path` the contents that `write` puts into a descriptor."""
        parent, _, name = path.rpartition("/")
        temporary = f"{parent}/.tdfunc-{secrets.token_hex(8)}-{name}.tmp"
        with tempfile.TemporaryFile(prefix="tdfunc-") as file:
            write(file.fileno())
            try:
                self._upload(file, temporary)
                self._system.mv(temporary, path)
            except BaseException:
                if self._system.exists(temporary):
                    self._system.rm_file(temporary)
                raise

    def _upload(self, file: Any, path: str) -> None:
        file.seek(0)
        with self._system.open(path, "wb") as target:
            while piece := file.read(1 << 24):
                target.write(piece)
