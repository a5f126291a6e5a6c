"""The answer to libraries that ask, while a function is recorded, whether their tensors are traced.

They ask `torch.compiler.is_compiling()` before they read a value or fill a cache, and take another way where the answer
is yes. A `FakeTensor` would answer by its class, but inside `torch.func.grad` a wrapper of torch is around it.
"""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from tdfunc.core.context import make_lock

_compiler = torch.compiler
# They ask to choose between ways that a record can all take, so their answer stays the one outside of a record.
_NOT_ANSWERED = ("torch", "tdfunc")
_local = threading.local()


class _Mark:
    """Replaces torch's mark of compilation: true for libraries in a thread that records.

    It has the operators of a bool that code joins such answers by.
    """

    def __bool__(self) -> bool:
        return _is_asked_by(sys._getframe(1))

    def __or__(self, other: Any) -> Any:
        return _is_asked_by(sys._getframe(1)) | other

    def __and__(self, other: Any) -> Any:
        return _is_asked_by(sys._getframe(1)) & other

    def __eq__(self, other: object) -> bool:
        return _is_asked_by(sys._getframe(1)) == other

    def __hash__(self) -> int:
        return hash(_is_asked_by(sys._getframe(1)))

    def __repr__(self) -> str:
        return repr(_is_asked_by(sys._getframe(1)))

    __ror__ = __or__
    __rand__ = __and__


def _is_asked_by(frame: FrameType) -> bool:
    """Return the answer to the code of a frame."""
    if not getattr(_local, "depth", 0):
        return False
    asker = str(frame.f_globals.get("__name__", ""))
    return asker.partition(".")[0] not in _NOT_ANSWERED


_MARK = _Mark()
_lock = make_lock()
_recordings = 0


@contextmanager
def answer_traced() -> Generator[None]:
    """Answer yes to libraries in this thread that ask whether a compiler reads their code."""
    global _recordings
    _local.depth = getattr(_local, "depth", 0) + 1
    with _lock:
        _recordings += 1
        # It is True while another thread compiles, and is that thread's to set back.
        if _compiler._is_compiling_flag is False:
            _compiler._is_compiling_flag = _MARK  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        _local.depth -= 1
        with _lock:
            _recordings -= 1
            if not _recordings and _compiler._is_compiling_flag is _MARK:
                _compiler._is_compiling_flag = False
