"""The answer to a call of `torch.utils.checkpoint.checkpoint` by its name, also inside `checkpoint_sequential`.

torch's function is one object for everybody who has imported it. It reads the code to run, at each call, from an
attribute that torch fills. While a thread is in `answered_by`, a `_Choice` is in that attribute: its calls go
to a function of ours, and calls of all other threads go to torch's code. Then the attribute is as before.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from tdfunc.core.context import make_lock

# torch._disable_dynamo (torch 2.13) wraps the function, and keeps what it runs in this attribute.
_FUNCTION: Any = torch_checkpoint.checkpoint.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
_ATTRIBUTE = "__dynamo_disable"
_local = threading.local()
_lock = make_lock()
_entered = 0


# Any: the arguments and results of torch's function.
class _Choice:
    """In the attribute: the function that answers this thread, or torch's code."""

    def __init__(self, torchs: Callable[..., Any] | None) -> None:
        # None before the first call of torch's function.
        self.torchs = torchs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(_local, "answer", None)
        if answer is not None:
            return answer(*args, **kwargs)
        if self.torchs is None:
            # As torch does at that call.
            self.torchs = torch._dynamo.disable(_FUNCTION, wrapping=False)
        return self.torchs(*args, **kwargs)


@contextmanager
def answered_by(function: Callable[..., Any] | None) -> Generator[None]:
    """Let a function answer this thread's calls of `torch.utils.checkpoint.checkpoint`; None is torch's own code."""
    before = getattr(_local, "answer", None)
    _enter()
    _local.answer = function
    try:
        yield
    finally:
        _local.answer = before
        _leave()


def _enter() -> None:
    global _entered
    with _lock:
        _entered += 1
        current = getattr(_FUNCTION, _ATTRIBUTE, None)
        if not isinstance(current, _Choice):
            setattr(_FUNCTION, _ATTRIBUTE, _Choice(current))


def _leave() -> None:
    global _entered
    with _lock:
        _entered -= 1
        current = getattr(_FUNCTION, _ATTRIBUTE, None)
        if not _entered and isinstance(current, _Choice):
            setattr(_FUNCTION, _ATTRIBUTE, current.torchs)
