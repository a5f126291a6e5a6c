"""What a rule is, and the kinds of rules that several families share."""

import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

# Called with the mode that found it, torch's function and the arguments of the call. torch calls no mode for what a
# rule calls in turn; `with mode:` has its calls come to rules again.
Rule: TypeAlias = Callable[..., Any]
_HANDLE = torch.overrides.handle_torch_function.__code__


def by_code(functions: Iterable[Any]) -> dict[types.CodeType, Any]:
    """Return the Python functions among functions of torch by their code, for `called_by_torch`."""
    return {func.__code__: func for func in functions if isinstance(func, types.FunctionType)}


def called_by_torch(func: Any, bodies: Mapping[types.CodeType, Any]) -> Any:
    """Return the function of torch whose body called a mode; the method of the mode calls this.

    A Python function of torch looks up its own name in its module and hands the result to modes. A library may have
    bound the name to a wrapper, as transformers does while it initialises a model; the frame has the function itself.

    Args:
        func: The function that the mode was given.
        bodies: The functions to recognise, as `by_code` returns them.

    Returns:
        `func`, if the body is not one of these.
    """
    handle = sys._getframe(2)
    if handle.f_code is not _HANDLE or handle.f_back is None:
        return func
    return bodies.get(handle.f_back.f_code, func)


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
