"""`Batching`: under vmap, the functions of a forward that torch cannot batch run by rules of our own.

A `TorchFunctionMode` is active for the call of one forward, so nothing changes for the process. A rule gets the tensors
as forward has them, wrapped by vmap; it computes with functions that have a rule in torch, or calls a
`torch.autograd.Function` whose static method `vmap` folds the members into a dimension that the kernel takes anyway.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tdfunc.modules.batching.rule import Rule
from tdfunc.modules.batching.table import RULES


class Batching(TorchFunctionMode):
    """Serve the functions called inside from the table of rules."""

    def __init__(self, rules: Mapping[Any, Rule] = RULES) -> None:
        super().__init__()
        self._rules = rules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = self._rules.get(func)
        if rule is not None:
            return rule(self, func, *args, **(kwargs or {}))
        # Dynamo of torch 2.13 cannot call the method for a mode, since it uses `super()`.
        func = torch.unflatten if func is Tensor.unflatten else func
        if kwargs:
            return func(*args, **kwargs)
        return func(*args)
