"""Typed trees that the tests of this folder share."""

from typing import Any

import torch
from torch import Tensor

from tdfunc import TensorClass, tensorclass


class Inner(TensorClass):
    y: Tensor


class Foo(TensorClass):
    x: Tensor
    note: str | None = "plain"
    inner: Inner | None = None
    extra: Any = None


@tensorclass
class Decorated:
    x: Tensor
    note: str | None = "plain"
    inner: Inner | None = None
    extra: Any = None


def foo(n=4, note="plain", cls=Foo):
    """An instance of `n` rows, with a nested one."""
    inner = Inner(torch.arange(float(n)), batch_size=[n])
    return cls(torch.arange(2.0 * n).reshape(n, 2), note, inner, batch_size=[n])
