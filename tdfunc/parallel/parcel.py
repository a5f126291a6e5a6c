"""Parcels: objects as messages between processes, the bytes of all tensors in one block, or the names of their files.

A parcel never takes a descriptor for each leaf.
"""

import io
import os
import pickle
import sys
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Size, Tensor, nn

from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import UnsupportedError, WorkerError
from tdfunc.core.keys import dotted
from tdfunc.core.memory import MappedFile, mapped_file
from tdfunc.core.system import platform
from tdfunc.parallel.block import Block, make_block
from tdfunc.storage.disk.mapped import file_with_values, map_descriptor
from tdfunc.storage.disk.ranks import as_tensor
from tdfunc.storage.disk.raw import is_wrapped
from tdfunc.storage.tree.specs import FOLDER_CODES, spec_for

# Stands for the next leaf of the block.
_LEAF = pickle.PickleBuffer(bytearray())
_HINTS = {
    "function": "define it at the top of a module; or mp_start_method='fork', where the system has it, "
    "or executor='threads'.",
    "chunk": "non-tensor data are pickled; td.select(...) without them, or executor='threads'.",
    "result": "return a tree, tensors or plain values; or executor='threads'.",
}


Specs: TypeAlias = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class Parcel(NamedTuple):
    """A pickle, and the tensors that it refers to: their dtypes and shapes, and their bytes in one block."""

    body: bytes
    specs: Specs
    block: bytes
    # The module of the function in it, and that module's file, for a process whose path does not lead there.
    origin: tuple[str, str | None] = ("", None)
    # True if Ray's cloudpickle made it, which copies classes and functions that no module has.
    by_value: bool = False


class _Refused(Exception):
    """A tensor that cannot cross; `to_parcel` adds its path."""

    def __init__(self, tensor: Tensor, why: str, got: str, hint: str) -> None:
        super().__init__(why)
        self.tensor = tensor
        self.why = why
        self.got = got
        self.hint = hint


@cache
def _pickler(by_value: bool) -> Any:
    """Return the class that lists tensors in `leaves`, and pickles all else as its base does."""
    # Any: cloudpickle has no types.
    base: Any = pickle.Pickler
    if by_value:
        from ray import cloudpickle

        module: Any = cloudpickle
        base = module.CloudPickler

    class Pickler(base):
        leaves: list[Tensor]

        # Called for objects that pickle has no own code for: not for str, tuples or numbers.
        def reducer_override(self, obj: Any) -> Any:
            reduced = NotImplemented
            if isinstance(obj, Tensor):
                reduced = _reduce(obj, self.leaves)
            if by_value and reduced is NotImplemented:
                return super().reducer_override(obj)
            return reduced

    return Pickler


def to_parcel(
    value: Any, what: Literal["function", "chunk", "result"] = "chunk", *, fn: Any = None, by_value: bool = False
) -> Parcel:
    """Return a value (with a function `fn` in it) as a parcel; a tensor that occurs twice stays one tensor."""
    file = io.BytesIO()
    leaves = list[Tensor]()
    pickler = _pickler(by_value)(file, protocol=5, buffer_callback=lambda buffer: buffer is not _LEAF)
    pickler.leaves = leaves
    try:
        pickler.dump(value)
    except _Refused as err:
        name = _name_of(err.tensor, value)
        raise UnsupportedError(f"map: {name} {err.why}", got=err.got, hint=err.hint) from None
    except (pickle.PicklingError, AttributeError, TypeError) as err:
        raise UnsupportedError(
            f"map: the {what} cannot be sent to another process.",
            expected="values that pickle can copy",
            got=f"{type(err).__name__}: {err}",
            hint=_HINTS[what],
        ) from err
    specs = tuple([(leaf.dtype, tuple(leaf.shape)) for leaf in leaves])
    block = b"".join([piece.numpy().data for piece in _lay_out(specs).pieces(leaves)])
    return Parcel(file.getvalue(), specs, block, _origin_of(fn), by_value)


# Any: a function, a `functools.partial`, or None.
def _origin_of(fn: Any) -> tuple[str, str | None]:
    """Return the module of a function, and the module's file."""
    while hasattr(fn, "func"):
        fn = fn.func
    module = getattr(fn, "__module__", None) or ""
    return module, getattr(sys.modules.get(module), "__file__", None)


def from_parcel(parcel: Parcel) -> Any:
    """Return the value of a parcel."""
    # A copy, which the tensors may write to.
    leaves = _lay_out(parcel.specs).cut(as_tensor(parcel.block))
    return pickle.loads(parcel.body, buffers=leaves)  # pyright: ignore[reportArgumentType]


@lru_cache(32)
def _lay_out(specs: Specs) -> Block:
    found = [spec_for(dtype, shape, FOLDER_CODES) for dtype, shape in specs]
    return make_block([spec for spec in found if spec is not None])


def _name_of(tensor: Tensor, value: Any) -> str:
    """Return the name of a tensor in messages: its path, if it is a leaf of a tree in `value`."""
    parts: Any = value
    if not isinstance(value, (tuple, list)):
        parts = (value,)
    for part in parts:
        if isinstance(part, TensorCollection):
            for path, leaf in iter_leaves(part):
                if leaf is tensor:
                    return f"leaf {dotted(path)!r}"
    return "a tensor"


# What a pickle records of a tensor: the function that makes it again, and its arguments. NotImplemented leaves it to
# torch. Any: pickle's own type.
def _reduce(x: Tensor, leaves: list[Tensor]) -> Any:
    """Reduce a tensor for pickle; one whose values go in the block is added to `leaves`."""
    _check_sendable(x)
    is_parameter = type(x) is nn.Parameter
    if not is_parameter and type(x) is not Tensor:
        return NotImplemented
    # Other layouts (sparse, nested, quantized) have their own pickling, like subclasses.
    if x.layout is not torch.strided or x.is_nested or x.dtype not in FOLDER_CODES:
        return NotImplemented
    shape = tuple(x.shape)
    flags = (is_parameter, x.requires_grad)
    if x.device.type == "meta":
        return _make_meta, (x.dtype, shape, x.stride(), flags)
    file = file_with_values(x)
    if file is not None:
        return _open_view, (file, x.dtype, shape, x.stride(), flags)
    # Of an expanded tensor the memory under it.
    stored = tuple([slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()])
    leaves.append(x.detach()[stored])
    return _from_leaf, (_LEAF, shape, flags)


def _check_sendable(x: Tensor) -> None:
    """Raise `_Refused` for a tensor that another process cannot get."""
    if is_wrapped(x):
        hint = "call map outside of vmap and grad, or vmap inside the function."
        raise _Refused(x, "has no values inside a torch.func transform.", type(x).__name__, hint)
    if x.grad_fn is not None:
        hint = "td.detach() first (in the function, for its result), torch.no_grad(), or executor='threads'."
        raise _Refused(x, "requires grad, and gradients do not cross processes.", x.grad_fn.name(), hint)
    if x.device.type not in ("cpu", "meta"):
        hint = "td.cpu() first, or executor='threads'; the function may move its chunk to a device."
        raise _Refused(x, "is not in the memory that processes share.", str(x.device), hint)


def is_in_file(x: Any) -> bool:
    """Return whether another process finds the tensor's values in its file."""
    return type(x) is Tensor and file_with_values(x) is not None


def is_shared_file(x: Any) -> bool:
    """Return whether writes of another process to the tensor's file are seen here."""
    found = mapped_file(x)
    return found is not None and found.mode == "r+" and file_with_values(x) is not None


def _flagged(x: Tensor, flags: tuple[bool, bool]) -> Tensor:
    is_parameter, requires_grad = flags
    if is_parameter:
        return nn.Parameter(x, requires_grad)
    if requires_grad:
        return x.requires_grad_()
    return x


def _make_meta(dtype: torch.dtype, shape: Any, stride: Any, flags: tuple[bool, bool]) -> Tensor:
    return _flagged(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), flags)


def _from_leaf(leaf: Tensor, shape: tuple[int, ...], flags: tuple[bool, bool]) -> Tensor:
    if leaf.shape != shape:
        leaf = leaf.expand(shape)
    return _flagged(leaf, flags)


def _open_view(
    file: MappedFile, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], flags: tuple[bool, bool]
) -> Tensor:
    path = file.path
    size_bytes = file.size_bytes
    assert path is not None
    access = platform.READ
    if file.mode == "r+":
        access |= platform.READ_WRITE
    try:
        fd = platform.open_file(path, access)
    except OSError as err:
        raise WorkerError(
            f"map: a worker cannot open {path}.",
            got=str(err),
            hint="workers on other machines need the folder under the same path; td.clone() sends the values.",
        ) from err
    try:
        found = os.fstat(fd)
        # On another machine that mounts the folder, the inode is the same and the device has another number.
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
