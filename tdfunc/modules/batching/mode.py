"""`Batching`: under vmap, the functions of a forward that torch cannot batch run by rules of our own.

A `TorchFunctionMode` is active for the call of one forward, so nothing changes for the process. A rule gets the tensors
as forward has them, wrapped by vmap; it computes with functions that have a rule in torch, or calls a
`torch.autograd.Function` whose static method `vmap` folds the members into a dimension that the kernel takes anyway.
"""

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tdfunc.core.context import is_compiling
from tdfunc.core.errors import explain, user_line
from tdfunc.modules.batching.fold import is_batched
from tdfunc.modules.batching.rule import Rule, by_code, called_by_torch
from tdfunc.modules.batching.table import RULES

_BODIES = by_code(RULES)
# Of torch, where members write into a tensor that they share.
_NO_ROOM = "(self, *extra_args) is not possible"
_OTHER_SHAPE = "doesn't match the broadcast shape"
_REMEDY = "use the method that returns a new tensor"


class Batching(TorchFunctionMode):
    """Serve the functions called inside from the table of rules."""

    def __init__(self, rules: Mapping[Any, Rule] = RULES) -> None:
        super().__init__()
        self._rules = rules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) is FunctionType and func not in self._rules and not is_compiling():
            func = called_by_torch(func, _BODIES)
        try:
            return self._serve(func, args, kwargs)
        except RuntimeError as err:
            if _has_no_room(str(err), args):
                # The same error, whose traceback and tensors the caller lets go of.
                err.args = (_explain_room(func, str(err)),)
            raise

    def _serve(self, func: Any, args: Any, kwargs: Any) -> Any:
        rule = self._rules.get(func)
        if rule is not None:
            return rule(self, func, *args, **(kwargs or {}))
        # Dynamo of torch 2.13 cannot call the method for a mode, since it uses `super()`.
        func = torch.unflatten if func is Tensor.unflatten else func
        if kwargs:
            return func(*args, **kwargs)
        return func(*args)


# Any: the arguments of torch's function.
def _has_no_room(text: str, args: Any) -> bool:
    """Return whether torch raised because a tensor that members share cannot hold what they write."""
    if _REMEDY in text:
        return False
    return _NO_ROOM in text or (_OTHER_SHAPE in text and not is_batched(args[:1]) and is_batched(args[1:]))


# Any: the function of torch that was called.
def _explain_room(func: Any, text: str) -> str:
    """Return torch's message with the line of the forward, and what to write there."""
    name = getattr(func, "__name__", "").strip("_")
    name = {"setitem": "index_put", "iadd": "add", "isub": "sub", "imul": "mul"}.get(name, name)
    example = f", as in `x = x.{name}(...)`" if hasattr(Tensor, name) else ""
    hint = f"{_REMEDY}{example}; or write into a tensor made from a member's, as in `h.new_zeros(n, d)`."
    return explain(text.strip(), got=user_line(), hint=hint)
