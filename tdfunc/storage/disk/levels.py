"""Reads and writes inside of `torch.func` transforms, for which what is in a file is a constant."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from tdfunc.core.context import in_functorch

# torch has no public name for it.
is_wrapped: Callable[[Any], bool] = _functorch.is_functorch_wrapped_tensor
_NOTHING = nullcontext()


def outside_transforms() -> AbstractContextManager[Any]:
    """Leave all transforms for a block: in `grad` and `jvp` torch wraps new tensors, which have no memory then."""
    return temporarily_clear_interpreter_stack() if in_functorch() else _NOTHING
