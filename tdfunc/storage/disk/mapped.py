"""One file as one tensor, mapped and never read: copy-on-write, or for writing.

A file is opened once; that it is a regular file of the right size is asked of what was opened, and it is mapped by
its descriptor, so that nothing can be put in its place in between. No descriptor stays open.
"""

import errno
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from tdfunc.core.collection import PLAIN, TensorCollection
from tdfunc.core.errors import ConcurrencyError, CorruptCheckpointError, error, explain
from tdfunc.core.memory import MapMode, MappedFile, mapped_file, mark_mapped
from tdfunc.storage.disk.commit import Descriptor
from tdfunc.storage.disk.raw import outside_transforms

_LIMIT, _MAPS = "/proc/sys/vm/max_map_count", "/proc/self/maps"
# For fewer files it is not worth the time to count what is mapped already.
_MANY = 1000
_DESCRIPTORS = {"linux": "/proc/self/fd", "darwin": "/dev/fd"}.get(sys.platform)
# Without O_NONBLOCK opening a pipe waits for a writer, and a device may act.
READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOCTTY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def open_inside(root: int, name: str, what: str, *, writable: bool = False) -> Descriptor:
    """Open a regular file in a folder by its relative name; links must lead to a file inside the folder.

    Raises:
        FileNotFoundError: There is none.
        CorruptCheckpointError: It is something else, or a link out of the folder.
    """
    flags = READ if not writable else READ | os.O_RDWR
    try:
        file = Descriptor(name, flags | _NO_LINK, dir_fd=root)
    except OSError as err:
        if err.errno == errno.EISDIR:
            raise _not_regular(what, stat.S_IFDIR) from err
        if err.errno == errno.ENXIO:
            raise _not_regular(what, stat.S_IFSOCK) from err
        if err.errno == errno.ENAMETOOLONG:
            raise FileNotFoundError(errno.ENOENT, err.strerror, name) from err
        if err.errno != errno.ELOOP:
            raise
        file = _open_link(root, name, flags, what)
    kind = os.fstat(file.fd).st_mode
    if not stat.S_ISREG(kind):
        file.close()
        raise _not_regular(what, kind)
    return file


def _open_link(root: int, name: str, flags: int, what: str) -> Descriptor:
    try:
        file = Descriptor(name, flags, dir_fd=root)
    except OSError as err:
        raise CorruptCheckpointError(
            f"{what} is a link that leads to no file.", expected="a file", got=err.strerror
        ) from err
    top, target = _where(root), _where(file.fd)
    if top is None or target is None or not target.startswith(os.path.join(top, "")):
        file.close()
        raise CorruptCheckpointError(
            f"{what} is a link out of the folder.",
            expected=f"a file inside {top}",
            got=str(target),
            hint="put the file there in place of the link.",
        )
    return file


def _where(fd: int) -> str | None:
    """Return the path of what is open, as the system knows it."""
    if sys.platform == "linux":
        with suppress(OSError):
            return os.readlink(f"/proc/self/fd/{fd}")
    return None


def _not_regular(what: str, kind: int) -> CorruptCheckpointError:
    names = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket or pipe",
    }
    return CorruptCheckpointError(
        f"{what} is no regular file.", expected="a file", got=names.get(stat.S_IFMT(kind), "something else")
    )


def check_maps(count: int, call: str) -> None:
    """Raise if the system would not let this process map so many files more; where it does not say, it may.

    Raises:
        OSError: There would be too many mappings.
    """
    if count < _MANY:
        return
    try:
        with open(_LIMIT, "rb") as file:
            limit = int(file.read())
        with open(_MAPS, "rb") as file:
            used = sum(1 for _ in file)
    except (OSError, ValueError):
        return
    if used + count > limit:
        what = f"{call}: each leaf is a mapping, and a process may not have so many."
        expected = f"at most {max(limit - used, 0)} leaves (vm.max_map_count is {limit}, and {used} mappings are there)"
        hint = "stack small leaves; load a sub-folder; or raise the limit: sysctl vm.max_map_count=262144."
        raise OSError(errno.ENOMEM, explain(what, expected=expected, got=f"{count} leaves", hint=hint))


def map_descriptor(
    fd: int,
    path: str | None,
    mode: MapMode,
    dtype: torch.dtype,
    shape: torch.Size,
    size_bytes: int,
    root: str | None = None,
) -> Tensor:
    """Map the first `size_bytes` bytes of an open file as one tensor; the caller has checked that it has them."""
    found = os.fstat(fd)
    # Torch makes a shared file longer where it is too short, and refuses a private one.
    assert found.st_size >= size_bytes > 0
    name = f"{_DESCRIPTORS}/{fd}" if _DESCRIPTORS is not None else path
    assert name is not None
    with outside_transforms():
        # Any: torch.from_file is untyped.
        flat: Any = _map(name, mode, size_bytes, str(path))
        leaf = flat.view(dtype).view(shape).data
    mark_mapped(leaf, path, mode, (found.st_dev, found.st_ino), root)
    return leaf


def _map(name: str, mode: MapMode, size_bytes: int, path: str) -> Any:
    try:
        flat = torch.from_file(name, shared=mode == "r+", size=size_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as err:
        hint = None
        if "Cannot allocate memory" in str(err) or "memory" in str(err):
            hint = "a process has about 65,000 mappings (sysctl vm.max_map_count); load a part, or stack small leaves."
        raise error(OSError, f"{path}: the file cannot be mapped: {err}", hint=hint) from err
    # The storage of a private mapping claims to be in shared memory and cannot be sent to a process; through numpy
    # it does not. A shared one must stay as it is: re-wrapped, multiprocessing would move it to a copy.
    return torch.from_numpy(flat.numpy()) if mode == "c" else flat


def map_again(file: MappedFile, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Map what `mapped_file` described, maybe in another process: the same file, geometry and mode.

    Raises:
        FileNotFoundError: The file has no name, or has gone.
        ConcurrencyError: Another file has its name by now: the folder was written again.
        CorruptCheckpointError: The file is shorter than it was.
    """
    if file.path is None:
        raise FileNotFoundError(errno.ENOENT, explain("The memmap has no folder.", hint="td.memmap(prefix)."))
    with Descriptor(file.path, READ if file.mode == "c" else READ | os.O_RDWR) as fd:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != file.file_id:
            raise ConcurrencyError(
                f"{file.path} is another file by now: the folder was written again.",
                expected=f"device and inode {file.file_id}",
                got=f"{(found.st_dev, found.st_ino)}",
                hint="load_memmap opens what is there now.",
            )
        if found.st_size < file.size_bytes:
            raise CorruptCheckpointError(
                f"{file.path} is cut short.", expected=f"{file.size_bytes} bytes", got=f"{found.st_size} bytes"
            )
        size = torch.Size((file.size_bytes,))
        whole = map_descriptor(fd, file.path, file.mode, torch.uint8, size, file.size_bytes, file.root)
    if file.offset % dtype.itemsize:
        raise error(
            ValueError,
            f"The offset does not fit {dtype}.",
            expected=f"a multiple of {dtype.itemsize}",
            got=str(file.offset),
        )
    return whole.view(dtype).as_strided(tuple(shape), tuple(stride), file.offset // dtype.itemsize).data


class _Sent:
    """Stands for a mapped leaf in a pickle; unpickled it is the leaf, mapped again."""

    def __init__(self, leaf: Tensor, file: MappedFile) -> None:
        geometry = leaf.dtype, tuple(leaf.shape), leaf.stride()
        self.args = (file, *geometry, type(leaf) is nn.Parameter, leaf.requires_grad)

    def __reduce__(self) -> Any:
        return _received, self.args


def _received(
    file: MappedFile, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], parameter: bool, grad: bool
) -> Tensor:
    leaf = map_again(file, dtype, shape, stride)
    return nn.Parameter(leaf, grad) if parameter else leaf.requires_grad_(grad)


def _send(leaf: Any) -> Any:
    file = mapped_file(leaf)
    # What was written to a copy-on-write leaf is in this process only: it goes as torch sends any tensor.
    if file is None or file.path is None or file.mode != "r+" or type(leaf) not in PLAIN or not leaf.is_leaf:
        return leaf
    # One for each tensor, so that tied leaves are one tensor again: a pickle keeps identities.
    sent = leaf.__dict__.get("_tdfunc_sent")
    if sent is None or sent.args[0] != file:
        sent = leaf._tdfunc_sent = _Sent(leaf, file)
    return sent


TensorCollection._send = _send
