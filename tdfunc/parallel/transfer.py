"""Objects as messages between processes: tensors cross as bytes in one block, or by the name of their file.

A message never takes a descriptor for each leaf. A large block lies in anonymous shared memory, whose one descriptor is
passed on and closed: nothing has a name, so nothing is left behind by a process that was killed.
"""

import io
import os
import pickle
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Size, Tensor, nn

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import UnsupportedError, WorkerError
from tdfunc.core.keys import dotted
from tdfunc.core.memory import MappedFile, mapped_file
from tdfunc.storage.disk.mapped import READ, map_descriptor
from tdfunc.storage.disk.raw import is_wrapped, raw_bytes

# Smaller blocks are faster through the pipe (measured: 1 MB in 0.5 ms against 1.4, 40 MB in 113 against 72).
SHARED_BYTES = 4_000_000
_ALIGN = 64
# The kernel's limit for the buffers of one write.
_MAX_BUFFERS = 1024
_PADDING = bytes(_ALIGN)
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Message(NamedTuple):
    """A pickle, and the bytes of the tensors that it refers to, in order."""

    body: bytes
    buffers: list[memoryview]


class Parcel(NamedTuple):
    """A message in one piece, for executors that pickle what they are given."""

    body: bytes
    sizes: tuple[int, ...]
    block: bytearray
    # Whether Ray's cloudpickle made it, by which classes and functions that no module has go by value.
    by_value: bool = False


# -- packing ----------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """A tensor that cannot cross; `pack` knows its path."""

    def __init__(self, tensor: Tensor, why: str, got: str, hint: str) -> None:
        super().__init__(why)
        self.tensor, self.why, self.got, self.hint = tensor, why, got, hint


class _Pickler(pickle.Pickler):
    # Called for what pickle has no own code for: not for str, tuples or numbers.
    def reducer_override(self, obj: Any) -> Any:
        return _reduce(obj) if isinstance(obj, Tensor) else NotImplemented


@cache
def _pickler_by_value() -> Any:
    from ray import cloudpickle

    # Any: the class is made of what is installed.
    module: Any = cloudpickle

    class Pickler(module.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            reduced = _reduce(obj) if isinstance(obj, Tensor) else NotImplemented
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    return Pickler


def dumps_by_value(value: Any) -> bytes:
    """Return a pickle in which classes of a script are described, not named."""
    from ray import cloudpickle

    module: Any = cloudpickle
    return module.dumps(value)


@contextmanager
def sending(what: str, hint: str) -> Generator[None, None, None]:
    """Name what cannot be pickled inside the block.

    Raises:
        UnsupportedError: Something cannot.
    """
    try:
        yield
    except UnsupportedError:
        raise
    except (pickle.PicklingError, AttributeError, TypeError) as err:
        raise UnsupportedError(
            f"map: {what} cannot be sent to another process.",
            expected="what pickle can copy",
            got=f"{type(err).__name__}: {err}",
            hint=hint,
        ) from err


def sending_chunk() -> AbstractContextManager[None]:
    """Name a chunk, or what goes with it, that cannot be pickled."""
    return sending("the chunk", "non-tensor data are pickled; td.select(...) without them, or executor='threads'.")


def sending_result() -> AbstractContextManager[None]:
    """Name a result that cannot be pickled."""
    return sending("the result", "return a tree, tensors or plain values; or executor='threads'.")


def pack(value: Any, *, by_value: bool = False) -> Message:
    """Return any picklable value as a message; a tensor that occurs twice is sent once and is one tensor again.

    Raises:
        UnsupportedError: A tensor is not in the memory of this machine, or gradients would have to follow it.
    """
    file, buffers = io.BytesIO(), []
    kind = _pickler_by_value() if by_value else _Pickler
    pickler = kind(file, protocol=5, buffer_callback=buffers.append)
    try:
        pickler.dump(value)
    except _Refused as err:
        name = _name_of(err.tensor, value)
        raise UnsupportedError(f"map: {name} {err.why}", got=err.got, hint=err.hint) from None
    return Message(file.getvalue(), [buffer.raw() for buffer in buffers])


def _name_of(tensor: Tensor, value: Any) -> str:
    for part in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(part, TensorCollection):
            for path, leaf in iter_leaves(part):
                if leaf is tensor:
                    return f"leaf {dotted(path)!r}"
    return "a tensor"


def _reduce(x: Tensor) -> Any:
    if is_wrapped(x):
        hint = "call map outside of vmap and grad, or vmap inside the function."
        raise _Refused(x, "has no values of its own inside a torch.func transform.", type(x).__name__, hint)
    if x.grad_fn is not None:
        hint = "td.detach() first (in the function, for its result), torch.no_grad(), or executor='threads'."
        raise _Refused(x, "requires grad, and gradients do not cross processes.", x.grad_fn.name(), hint)
    if x.device.type not in ("cpu", "meta"):
        hint = "td.cpu() first, or executor='threads'; the function may move its chunk to a device."
        raise _Refused(x, "is not in the memory that processes share.", str(x.device), hint)
    kind = type(x) if type(x) is nn.Parameter else Tensor
    # Subclasses and other layouts (sparse, nested, quantized) know best how they are pickled.
    if type(x) is not kind or x.layout is not torch.strided or x.is_quantized or x.is_nested:
        return NotImplemented
    flags = (kind is nn.Parameter, x.requires_grad)
    if x.device.type == "meta":
        return _make_meta, (x.dtype, tuple(x.shape), x.stride(), flags)
    by_name = _by_name(x)
    if by_name is not None:
        return _open_view, (*by_name, x.dtype, tuple(x.shape), x.stride(), flags)
    return _from_buffer, (_bytes_of(x), x.dtype, _stored_shape(x), tuple(x.shape), flags)


def _stored_shape(x: Tensor) -> tuple[int, ...]:
    """Return the shape of what an expanded tensor holds in memory."""
    return tuple([1 if stride == 0 and size else size for size, stride in zip(x.shape, x.stride(), strict=True)])


def _bytes_of(x: Tensor) -> pickle.PickleBuffer | None:
    if x.numel() == 0:
        return None
    x = x.detach()
    if 0 in x.stride():
        x = x[tuple([slice(0, size) for size in _stored_shape(x)])]
    return pickle.PickleBuffer(raw_bytes(x))


def _by_name(x: Tensor) -> tuple[MappedFile, str] | None:
    """Return the file of a mapped tensor whose values are those of the file; None if bytes must be sent."""
    found = mapped_file(x)
    if found is None or found.path is None or x.numel() == 0 or x.is_conj() or x.is_neg():
        return None
    try:
        now = os.stat(found.path)
    except OSError:
        return None
    if (now.st_dev, now.st_ino) != found.file_id or now.st_size < found.size_bytes:
        return None
    if found.mode == "c" and is_changed(x):
        return None
    return found, found.path


def is_changed(x: Tensor) -> bool:
    """Whether pages of a copy-on-write mapping were written to; True where the system does not say."""
    # A version counter would miss writes of fused optimizers. The kernel keeps 64 bits for each page: present (63),
    # swapped out (62), still a page of the file (61). A page that was written to is no page of the file any more.
    span = sum([(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)]) + 1
    begin = x.data_ptr() // _PAGE
    end = (x.data_ptr() + span * x.element_size() - 1) // _PAGE + 1
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(8 * begin)
            raw = file.read(8 * (end - begin))
    except OSError:
        return True
    if len(raw) != 8 * (end - begin):
        return True
    flags = np.frombuffer(raw, dtype=np.uint64) >> np.uint64(61)
    return bool((((flags & 0b101) == 0b100) | ((flags & 0b010) != 0)).any())


def is_in_file(x: Any) -> bool:
    """Whether another process finds the tensor's values in its file."""
    return type(x) is Tensor and _by_name(x) is not None


def is_shared_file(x: Any) -> bool:
    """Whether what another process writes to the tensor's file is seen here."""
    found = mapped_file(x)
    return found is not None and found.mode == "r+" and _by_name(x) is not None


# -- unpacking --------------------------------------------------------------------------------------------------


def _flagged(x: Tensor, flags: tuple[bool, bool]) -> Tensor:
    is_parameter, requires_grad = flags
    if is_parameter:
        return nn.Parameter(x, requires_grad)
    return x.requires_grad_() if requires_grad else x


def _make_meta(dtype: torch.dtype, shape: Any, stride: Any, flags: tuple[bool, bool]) -> Tensor:
    return _flagged(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), flags)


def _from_buffer(buffer: Any, dtype: torch.dtype, stored: Any, shape: Any, flags: tuple[bool, bool]) -> Tensor:
    if buffer is None:
        return _flagged(torch.empty(shape, dtype=dtype, device="cpu"), flags)
    x = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(stored)
    return _flagged(x.expand(shape) if stored != shape else x, flags)


def _open_view(file: MappedFile, path: str, dtype: torch.dtype, *rest: Any) -> Tensor:
    shape, stride, flags = rest
    size_bytes = file.size_bytes
    try:
        fd = os.open(path, READ | os.O_RDWR if file.mode == "r+" else READ)
    except OSError as err:
        raise WorkerError(
            f"map: {path} cannot be opened by a worker.",
            got=str(err),
            hint="workers on other machines need the folder under the same path; td.clone() sends the values.",
        ) from err
    try:
        found = os.fstat(fd)
        # Another machine that mounts the folder knows the inode, and the device by another number.
        if found.st_ino != file.file_id[1] or found.st_size < size_bytes:
            raise WorkerError(
                f"map: {path} is not the file that the tree is mapped from.",
                expected=f"inode {file.file_id[1]}, {size_bytes} bytes",
                got=f"inode {found.st_ino}, {found.st_size} bytes",
                hint="load the tree again.",
            )
        flat = map_descriptor(fd, path, file.mode, torch.uint8, Size([size_bytes]), size_bytes, file.root)
    finally:
        os.close(fd)
    x = torch.empty(0, dtype=dtype, device="cpu")
    return _flagged(x.set_(flat.untyped_storage(), file.offset // dtype.itemsize, shape, stride), flags)


def _begins(sizes: Sequence[int]) -> tuple[list[int], int]:
    begins, end = [], 0
    for size in sizes:
        begins.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return begins, end


def _unpack(body: bytes, sizes: Sequence[int], block: memoryview) -> Any:
    begins, _ = _begins(sizes)
    return pickle.loads(body, buffers=[block[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)])


def _pieces(buffers: Iterable[memoryview]) -> Iterable[memoryview | bytes]:
    """Yield the buffers, each padded to where the next one begins."""
    for buffer in buffers:
        yield buffer
        if buffer.nbytes % _ALIGN:
            yield _PADDING[buffer.nbytes % _ALIGN :]


def to_parcel(value: Any, *, by_value: bool = False) -> Parcel:
    """Return a value as something that pickle and cloudpickle carry, the tensors in one block."""
    message = pack(value, by_value=by_value)
    sizes = tuple([buffer.nbytes for buffer in message.buffers])
    return Parcel(message.body, sizes, bytearray().join(_pieces(message.buffers)), by_value)


def from_parcel(parcel: Parcel) -> Any:
    """Return the value of a parcel."""
    return _unpack(parcel.body, parcel.sizes, memoryview(bytearray(parcel.block)))


# -- over a pipe ------------------------------------------------------------------------------------------------


def send(connection: Any, message: Message) -> None:
    """Send a message over a pipe of `multiprocessing`."""
    sizes = [buffer.nbytes for buffer in message.buffers]
    shared = _share(message.buffers) if sum(sizes) >= SHARED_BYTES else None
    block = bytearray().join(_pieces(message.buffers)) if shared is None else None
    try:
        connection.send_bytes(pickle.dumps((message.body, sizes, block), protocol=5))
        if shared is not None:
            reduction.send_handle(connection, shared, None)
    finally:
        if shared is not None:
            os.close(shared)


def receive(connection: Any) -> tuple[bytes, Sequence[int], memoryview]:
    """Receive a message; `unpack` makes it a value, apart from what a broken pipe raises."""
    body, sizes, block = pickle.loads(connection.recv_bytes())
    if block is None:
        fd = reduction.recv_handle(connection)
        try:
            # Python's mmap would keep a descriptor for as long as the result lives.
            size_bytes = os.fstat(fd).st_size
            flat: Any = torch.from_file(f"/proc/self/fd/{fd}", shared=False, size=size_bytes, dtype=torch.uint8)
        finally:
            os.close(fd)
        block = flat.numpy()
    return body, sizes, memoryview(block)


def unpack(received: tuple[bytes, Sequence[int], memoryview]) -> Any:
    """Return the value of a message."""
    return _unpack(*received)


def _share(buffers: Sequence[memoryview]) -> int | None:
    """Copy buffers to anonymous shared memory and return its descriptor; None where there is none."""
    if not hasattr(os, "memfd_create"):
        return None
    pieces = list(_pieces(buffers))
    try:
        fd = os.memfd_create("tdfunc", os.MFD_CLOEXEC)
    except OSError:
        return None
    try:
        for i in range(0, len(pieces), _MAX_BUFFERS):
            _write_all(fd, pieces[i : i + _MAX_BUFFERS])
    # No memory, or a limit on the size of files: the pipe needs neither.
    except OSError:
        os.close(fd)
        return None
    return fd


def _write_all(fd: int, pieces: list[memoryview | bytes]) -> None:
    pending = [memoryview(piece).cast("B") for piece in pieces]
    while pending:
        written = os.writev(fd, pending)
        while pending and written >= len(pending[0]):
            written -= len(pending.pop(0))
        if pending:
            pending[0] = pending[0][written:]
