"""What a rule is, and the kinds of rules that several families share."""

import types
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

# Called with the mode that found it, torch's function and the arguments of the call. torch calls no mode for what a
# rule calls in turn; `with mode:` has its calls come to rules again.
Rule: TypeAlias = Callable[..., Any]


def body_of(func: types.FunctionType) -> types.FunctionType:
    """Return a Python function of torch as one that does not hand itself to modes: they see the calls that it makes."""
    names = [name for name in (*vars(torch.overrides), *func.__globals__) if name.startswith("has_torch_function")]
    no_checks = dict.fromkeys(names, lambda *_: False)
    overrides = types.SimpleNamespace(**{**vars(torch.overrides), **no_checks})
    # Without the module's name, by which dynamo would look these up in the module.
    own = {name: value for name, value in func.__globals__.items() if name != "__name__"}
    own |= {"torch": types.SimpleNamespace(**{**vars(torch), "overrides": overrides}), **no_checks}
    body = types.FunctionType(func.__code__, own, func.__name__, func.__defaults__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def by_body(func: types.FunctionType) -> Rule:
    """Return the rule (or the server of draws) that runs a Python function of torch under the mode that it came to."""
    body = body_of(func)

    def run(mode: TorchFunctionMode, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return body(*args, **kwargs)

    return run
