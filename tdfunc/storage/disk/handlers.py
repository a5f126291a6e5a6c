"""Calls from a signal handler: the main thread runs it in the middle of other work, which must not be waited for.

A handler of SIGTERM that saves is the usual case. The interrupted frame may hold a lock of the standard library, or the
lock of a folder, and continues only after the handler has returned.
"""

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import CodeType

# The files in which `threading` and `concurrent.futures` take locks that a thread cannot take twice.
_LOCKING_FILES = frozenset(
    function.__code__.co_filename for function in (threading.Thread.start, Future.result, ThreadPoolExecutor.submit)
)


def is_in_handler(*ours: CodeType) -> bool:
    """Return True if this call was made inside a wait or start of a thread, or inside one of these functions.

    Only a signal handler does this in the main thread. The frame of the caller does not count.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    # A caller may be one of `ours` itself.
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename in _LOCKING_FILES or frame.f_code in ours:
            return True
        frame = frame.f_back
    return False
