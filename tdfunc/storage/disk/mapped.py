"""One file as one tensor, mapped and never read: copy-on-write, or for writing.

A file is opened once, checked and mapped by its descriptor, so that no other file can take its place in between. No
descriptor stays open.
"""

import errno
import os
import stat
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tdfunc.core.collection import PLAIN, TensorCollection
from tdfunc.core.errors import ConcurrencyError, damaged, error, explain
from tdfunc.core.memory import MapMode, MappedFile, mapped_file, mark_mapped, span_bytes
from tdfunc.core.system import platform
from tdfunc.storage.disk.commit import Descriptor, Folder
from tdfunc.storage.disk.raw import outside_transforms


def open_inside(root: Folder, name: str, what: str, *, writable: bool = False) -> Descriptor:
    """Open a regular file in a folder by its relative name. A link must lead to a file inside the folder."""
    flags = _flags(writable)
    try:
        file = root.open(name, flags, follow=False)
    except OSError as err:
        if err.errno == errno.ENAMETOOLONG:
            raise FileNotFoundError(errno.ENOENT, err.strerror, name) from err
        # A folder, and a socket.
        if err.errno in (errno.EISDIR, errno.ENXIO):
            raise damaged(f"{what} is not a regular file.", "a file", err.strerror) from err
        if err.errno != errno.ELOOP:
            raise
        file = _open_link(root, name, what, flags)
    if not stat.S_ISREG(os.fstat(file.fd).st_mode):
        raise damaged(f"{what} is not a regular file.", "a file", "a folder, pipe or device")
    return file


def _flags(writable: bool) -> int:
    if writable:
        return platform.READ | platform.READ_WRITE
    return platform.READ


def _open_link(root: Folder, name: str, what: str, flags: int) -> Descriptor:
    """Open the target of a link in a folder, which must be inside the folder."""
    try:
        file = root.open(name, flags, follow=True)
    except OSError as err:
        raise damaged(f"{what} is a link that leads to no file.", "a file", err.strerror) from err
    top = platform.path_of(root.fd)
    target = platform.path_of(file.fd)
    if top is None or target is None or not target.startswith(os.path.join(top, "")):
        raise damaged(
            f"{what} is a link out of the folder.",
            f"a file inside {top or root.path}",
            target or "a link, on a system that does not tell the path of an open file",
            hint="put the file there in place of the link.",
        ) from None
    return file


# Any: torch.from_file is untyped.
def map_bytes(fd: int, path: str, size_bytes: int, mode: MapMode) -> Any:
    """Map bytes of an open file, by its descriptor if possible: another save may have replaced the path by now."""
    name = platform.name_of(fd) or path
    try:
        flat: Any = torch.from_file(name, shared=mode == "r+", size=size_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as err:
        if name == path and not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from err
        raise error(
            OSError,
            f"{path}: the file cannot be mapped: {err}",
            hint="a process may have about 65,000 mappings (sysctl vm.max_map_count): stack small leaves.",
        ) from err
    if name == path and not os.path.samestat(os.stat(path), os.fstat(fd)):
        raise OSError(errno.EBUSY, "the file was replaced while it was mapped", path)
    # In torch 2.13 the storage of a private mapping claims to be in shared memory and cannot be sent to a process;
    # through numpy it does not. A shared one must stay as it is: re-wrapped, multiprocessing would move it to a copy.
    if mode == "c":
        return torch.from_numpy(flat.numpy())
    return flat


def map_descriptor(
    fd: int,
    path: str | None,
    mode: MapMode,
    dtype: torch.dtype,
    shape: torch.Size,
    size_bytes: int,
    root: str | None = None,
    *,
    place: str | None = None,
) -> Tensor:
    """Map the first `size_bytes` bytes of an open file as one tensor; the caller has checked its size.

    The tensor remembers `path`; `place` is the path of the file now, if that is another one.
    """
    here = place or path
    assert here is not None
    found = os.fstat(fd)
    # Torch makes a shared file longer where it is too short, and refuses a private one.
    assert found.st_size >= size_bytes > 0
    with outside_transforms():
        leaf = map_bytes(fd, here, size_bytes, mode).view(dtype).view(shape).data
    mark_mapped(leaf, path, mode, (found.st_dev, found.st_ino), root)
    return leaf


def map_again(file: MappedFile, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Map a file again, as `mapped_file` described it, possibly in another process."""
    if file.path is None:
        raise FileNotFoundError(errno.ENOENT, explain("the memmap has no folder.", hint="td.memmap(prefix)."))
    with Descriptor(file.path, _flags(file.mode == "r+")) as fd:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != file.file_id:
            raise ConcurrencyError(
                f"{file.path} is another file by now: the folder was written again.",
                expected=f"device and inode {file.file_id}",
                got=f"{(found.st_dev, found.st_ino)}",
                hint="load_memmap opens what is there now.",
            )
        if found.st_size < file.size_bytes:
            raise damaged(f"{file.path} is cut short.", f"{file.size_bytes} bytes", f"{found.st_size} bytes")
        size = torch.Size((file.size_bytes,))
        whole = map_descriptor(fd, file.path, file.mode, torch.uint8, size, file.size_bytes, file.root)
    return whole.view(dtype).as_strided(tuple(shape), tuple(stride), file.offset // dtype.itemsize).data


def file_with_values(x: Tensor) -> MappedFile | None:
    """Return the file of a mapped tensor, in which another process finds its values; None if there is none."""
    found = mapped_file(x)
    if found is None or found.path is None or x.numel() == 0:
        return None
    # The file has the values before a conjugation or negation that torch has not carried out.
    if x.is_conj() or x.is_neg():
        return None
    try:
        now = os.stat(found.path)
    except OSError:
        return None
    if (now.st_dev, now.st_ino) != found.file_id or now.st_size < found.size_bytes:
        return None
    if found.mode == "c" and _is_changed(x):
        return None
    return found


def _is_changed(x: Tensor) -> bool:
    """Return whether pages of a copy-on-write mapping were written to; True on systems without page flags."""
    # A version counter would miss writes of fused optimizers. The kernel keeps 64 bits for each page: present (63),
    # swapped out (62), still a page of the file (61). A page that was written to no longer belongs to the file.
    begin = x.data_ptr() // platform.PAGE_BYTES
    end = (x.data_ptr() + span_bytes(x) - 1) // platform.PAGE_BYTES + 1
    raw = platform.read_page_flags(begin, end - begin)
    if raw is None:
        return True
    flags = np.frombuffer(raw, dtype=np.uint64) >> np.uint64(61)
    is_own_page = (flags & 0b101) == 0b100
    is_swapped_out = (flags & 0b010) != 0
    return bool((is_own_page | is_swapped_out).any())


class _Sent:
    """A leaf on a file, in a pickle; unpickled it is the leaf, mapped again."""

    def __init__(self, leaf: Tensor, file: MappedFile) -> None:
        geometry = leaf.dtype, tuple(leaf.shape), leaf.stride()
        self.args = (file, *geometry, type(leaf) is nn.Parameter, leaf.requires_grad)

    def __reduce__(self) -> Any:
        return _received, self.args


def _received(
    file: MappedFile, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], parameter: bool, grad: bool
) -> Tensor:
    leaf = map_again(file, dtype, shape, stride)
    if parameter:
        return nn.Parameter(leaf, grad)
    return leaf.requires_grad_(grad)


def _send(leaf: Any) -> Any:
    file = mapped_file(leaf)
    if file is None or file.path is None or type(leaf) not in PLAIN or not leaf.is_leaf:
        return leaf
    # Writes to a copy-on-write leaf are in this process only. A process that starts finds a leaf without writes in the
    # file; in any other pickle, which may outlive the file, it is a tensor with values.
    if file.mode != "r+" and (get_spawning_popen() is None or file_with_values(leaf) is None):
        return leaf
    # One for each tensor, so that tied leaves are one tensor again: a pickle keeps identities.
    sent = leaf.__dict__.get("_tdfunc_sent")
    if sent is None or sent.args[0] != file:
        sent = leaf._tdfunc_sent = _Sent(leaf, file)
    return sent


TensorCollection._send = _send
