"""Classes whose annotations are strings, as under `from __future__ import annotations`."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from tdfunc._tensorclass import TensorClass

if TYPE_CHECKING:
    from elsewhere import Absent


class Auto(TensorClass["autocast"]):
    count: int
    ratio: float | None = None
    later: Later | None = None
    absent: Absent = None
    unit: ClassVar[str] = "m"
    tags: list = field(default_factory=list)


class Unmade(TensorClass):
    later: Later | None = None


class Later(TensorClass):
    x: Tensor


class Shaped(TensorClass):
    points: Float[Tensor, "*batch n 3"]  # noqa: F722
    index: Int[Tensor, "*batch n"] | None = None  # noqa: F722


def make_local():
    """A class that names a class of the function it is defined in."""

    class Inner(TensorClass):
        x: Tensor

    class Outer(TensorClass):
        inner: Inner

    return Outer, Inner
