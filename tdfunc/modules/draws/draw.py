"""A draw: numbers of some distribution as a function of a key, and where keys come from."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from tdfunc.random.draws import standard_normal

Server: TypeAlias = Callable[..., Any]
# Returns the numbers of keys (*B, 2), as (*B, *shape): called with the keys, a shape and a dtype.
Standard: TypeAlias = Callable[[Tensor, tuple[int, ...], torch.dtype], Tensor]
Size: TypeAlias = tuple[int, ...]


class Draw(NamedTuple):
    """Numbers of some distribution, times a factor, plus a number."""

    standard: Standard
    shape: Size
    dtype: torch.dtype
    factor: float | Tensor = 1.0
    shift: float | Tensor = 0.0

    def numbers(self, keys: Tensor) -> Tensor:
        """Return the numbers of keys (*B, 2), as (*B, *shape)."""
        if self.dtype.is_complex:
            drawn = torch.view_as_complex(self.standard(keys, (*self.shape, 2), self.dtype.to_real()))
            # A normal variable has a variance of 1, half of it in each part.
            if self.standard is standard_normal:
                drawn = drawn * math.sqrt(0.5)
        else:
            drawn = self.standard(keys, self.shape, self.dtype)
        if isinstance(self.factor, Tensor) or isinstance(self.shift, Tensor):
            return (drawn * self.factor + self.shift).to(self.dtype)
        if (self.factor, self.shift) == (1.0, 0.0):
            return drawn
        return drawn.mul_(self.factor).add_(self.shift)


class Source(Protocol):
    """The mode of a forward, which counts its draws; each server of a random function gets it.

    Attributes:
        key: The key of the forward.
    """

    key: Tensor

    def draw(self, draw: Draw, device: torch.device) -> Tensor:
        """Return the numbers that the key of the next draw gives."""
        ...

    def draw_key(self, device: torch.device) -> Tensor:
        """Return the key of the next draw."""
        ...

    def draw_mask(self, shape: Size, p: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return 1 / p with probability p, and 0 elsewhere, from the key of the next draw."""
        ...
