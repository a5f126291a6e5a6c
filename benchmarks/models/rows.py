"""A row of the page: a tiny model and an example of what its forward gets."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Example(NamedTuple):
    """Arguments of one forward."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}

    def to(self, dtype: torch.dtype) -> "Example":
        """Return the same numbers, the floating ones in another dtype."""

        def cast(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return value.to(dtype)
            return value

        return Example(tuple(map(cast, self.args)), {name: cast(value) for name, value in self.kwargs.items()})


class Row(NamedTuple):
    """A model: `make` returns one with new weights, `example` new arguments; `draws` if evaluation draws numbers.

    `dtype` is float32 for a forward that float64 breaks.
    """

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], Example]
    draws: bool = False
    dtype: torch.dtype = torch.float64
