"""`variant`: a pure function like another, of a module with other modes or hyperparameters."""

from collections.abc import Callable

from torch import nn

from tdfunc.modules.functional import Apply
from tdfunc.modules.skeleton import duplicate


def variant(apply: Apply, change: Callable[[nn.Module], None]) -> Apply:
    """Return an apply whose module was changed; its parameters and buffers must stay as they are.

    Args:
        apply: The pure function, which stays as it is.
        change: Writes modes or hyperparameters of the copy that it is given, whose weights hold no numbers.
    """
    module = duplicate(apply._template, {})
    change(module)
    return Apply(module, apply._spec, apply._reserved, apply._originals)
