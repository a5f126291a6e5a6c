"""`Loss`: the result of every loss function."""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict


class Loss(NamedTuple):
    """A loss and its diagnostics: the pair that `tdf.value_and_grad(fn, has_aux=True)` expects from `fn`.

    Attributes:
        loss: A scalar, the only part that has a gradient.
        metrics: A tree of scalars, with TRL's names where TRL has the metric. Log them with `tdf.scalars`.
    """

    loss: Tensor
    metrics: "TensorDict"
