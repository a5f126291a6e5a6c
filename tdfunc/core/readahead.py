"""Tell the system which rows of a mapped file will be read next, so that a cold gather waits for the disk once.

Without it each row is a page fault that reads its surroundings too: 256 rows of a 1 GB file took 1.3 s, with it 8 ms.
"""

import ctypes
import os
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from tdfunc.core.memory import mapped_file

# Smaller leaves are read whole by the system's own read-ahead.
MIN_BYTES = 16 << 20
_MAX_BYTES = 1 << 30
_SAMPLES = 4
_WILLNEED = 3
_PROCESS_MADVISE = 440
_MAX_RANGES = 1024
_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_mincore: Any = getattr(_libc, "mincore", None)
if _mincore is not None:
    # With types given, ints are taken as they are, in a fifth of the time.
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_PAGE = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096


def read_rows_ahead(leaf: Tensor, rows: Tensor) -> None:
    """Have the system read the rows (indices of the first dimension) of a leaf that is on a file and not in memory."""
    count = rows.numel()
    if _mincore is None or not count or mapped_file(leaf) is None:
        return
    start, step = leaf.data_ptr(), leaf.stride(0) * leaf.element_size()
    if _is_resident(start, step, rows[:: -(-count // _SAMPLES)].tolist(), leaf.shape[0]):
        return
    index = rows.numpy()
    inner = zip(leaf.shape[1:], leaf.stride()[1:], strict=True)
    span = leaf.element_size() * (1 + sum((size - 1) * stride for size, stride in inner))
    if span * count <= _MAX_BYTES and index.min() >= 0 and index.max() < leaf.shape[0]:
        begins = start + index * step
        _advise(begins - begins % _PAGE, begins + span)


def _is_resident(start: int, step: int, rows: list[int], count: int) -> bool:
    """Whether a sample of the rows is in memory: asking for each would take longer than a warm gather."""
    found = ctypes.c_ubyte()
    for row in rows:
        # A row that does not exist is refused by what follows.
        if 0 <= row < count:
            page = (start + row * step) // _PAGE * _PAGE
            if not _mincore(page, 1, ctypes.addressof(found)) and not found.value & 1:
                return False
    return True


def _advise(begins: Any, ends: Any) -> None:
    ranges = np.stack([begins, ends - begins], axis=1).astype(np.uintp)
    # One call for a thousand rows, where the system allows it. An advice that is refused costs time and nothing else.
    with suppress(OSError, AttributeError):
        me = os.pidfd_open(os.getpid())
        try:
            while len(ranges) and _advise_many(me, ranges[:_MAX_RANGES]):
                ranges = ranges[_MAX_RANGES:]
        finally:
            os.close(me)
    for begin, length in ranges.tolist():
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(_WILLNEED))


def _advise_many(me: int, ranges: Any) -> bool:
    where, count, advice = ctypes.c_void_p(ranges.ctypes.data), ctypes.c_size_t(len(ranges)), ctypes.c_int(_WILLNEED)
    return _libc.syscall(ctypes.c_long(_PROCESS_MADVISE), ctypes.c_int(me), where, count, advice, ctypes.c_uint(0)) > 0
