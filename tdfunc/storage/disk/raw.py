"""The bytes of elements: of a tensor in memory, row by row, and into a file.

Inside of `torch.func` transforms new tensors are wrapped and have no memory; the contents of files are constants there.
"""

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from tdfunc.core.context import in_functorch

# torch has no public names for these.
is_wrapped: Callable[[Any], bool] = _functorch.is_functorch_wrapped_tensor
_NOTHING = nullcontext()
_READ = 0x100
# Any: the function of CPython, called through ctypes.
_from_memory: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


def outside_transforms() -> AbstractContextManager[Any]:
    """Leave all transforms for a block."""
    if in_functorch():
        return temporarily_clear_interpreter_stack()
    return _NOTHING


# Any: numpy's arrays offer their bytes, which type checkers learn with Python 3.12.
def raw_view(leaf: Tensor) -> Any:
    """Return the memory of a contiguous tensor on the CPU; a write to it changes the tensor."""
    # `is_contiguous` ignores the stride of a dimension of one element, and `view` to bytes does not; with
    # `as_strided` that stride becomes 1.
    return leaf.detach().as_strided((leaf.numel(),), (1,)).view(torch.uint8).numpy()


def memory_of(leaf: Tensor) -> memoryview:
    """Return the memory of a contiguous leaf on the CPU, to be read while the leaf is kept.

    Unlike an array of numpy, it leaves no mark on the storage, which would look shared from then on.
    """
    if leaf.nbytes:
        return _from_memory(leaf.data_ptr(), leaf.nbytes, _READ)
    return memoryview(b"")


def raw_bytes(leaf: Tensor) -> Any:
    """Return the bytes of any dense tensor with values: its memory if it is contiguous on the CPU, else a copy."""
    return raw_view(leaf.detach().cpu().resolve_conj().resolve_neg().contiguous())


def write_all(fd: int, data: memoryview) -> None:
    """Write all bytes; the system may take fewer at a time."""
    while len(data):
        data = data[os.write(fd, data) :]
