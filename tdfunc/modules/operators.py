"""Operators of this package in torch's dispatcher: each is one node of a trace, for a kernel that no trace records."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import library

_library = library.Library("tdfunc", "FRAGMENT")


def define(schema: str, kernel: Callable[..., Any], like: Callable[..., Any], devices: Sequence[str] = ("CPU",)) -> Any:
    """Return a new operator.

    Args:
        schema: Its name, arguments and results.
        kernel: The function that computes the results on these devices.
        like: The function that makes tensors without values, laid out as the results.
        devices: The devices, by the names of torch's dispatcher.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in devices:
        _library.impl(name, kernel, device)
    _library.impl(name, like, "Meta")
    return getattr(torch.ops.tdfunc, name).default
