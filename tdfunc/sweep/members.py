"""Trees with a row for each member: how they are made, and checks of those that a function of the user returns."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import BatchSizeError

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict


def tree_of_members(data: dict[str, Any]) -> "TensorDict":
    """Return a tree of tensors, whose batch size is their first dimension."""
    if data:
        size = next(iter(data.values())).shape[:1]
    else:
        size = torch.Size()
    return TensorCollection._open._make(data, size, None, None)


def check_members(call: str, name: str, given: Tensor, shape: torch.Size) -> None:
    """Raise unless a tensor has an entry for each member."""
    if given.shape != shape:
        raise BatchSizeError(
            f"{call}: {name} does not have an entry for each member.",
            expected=f"shape {list(shape)}",
            got=f"shape {list(given.shape)}",
        )


# Any: the result of a function of the user.
def check_run(call: str, run: Any, members: int) -> None:
    """Raise unless `train` has returned all members; without some, the scores would belong to others."""
    got = type(run).__name__
    if isinstance(run, TensorCollection):
        if run._batch_size[:1] == (members,):
            return
        got = f"batch size {list(run._batch_size)}"
    raise BatchSizeError(
        f"{call}: train returned another number of members.",
        expected=f"a tree with the batch size [{members}, ...]",
        got=got,
        hint="select members between rungs, with `elites`.",
    )
