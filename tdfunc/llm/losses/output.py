"""`Loss`: the result of every loss function."""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict


class Loss(NamedTuple):
    """A loss and its diagnostics: the pair that `tdf.value_and_grad(fn, has_aux=True)` takes from `fn`.

    Attributes:
        loss: A number; the only part that has a gradient.
        metrics: A tree of numbers, under TRL's names where TRL has them; `tdf.scalars` gives them to a logger.
    """

    loss: Tensor
    metrics: "TensorDict"
