"""`apply_if_finite`: steps by gradients of nan or infinity are skipped."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import as_count
from tdfunc.optim.base import AbstractOptimizer, How
from tdfunc.optim.gradient_maps import with_inner
from tdfunc.optim.lists import Leaves
from tdfunc.optim.wrappers.parts import begin_step, make_state, select, step_some

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)


@dataclass(frozen=True, eq=False)
class ApplyIfFinite(AbstractOptimizer):
    """An optimizer that skips steps of members; the state counts them. Made by `apply_if_finite`."""

    optimizer: AbstractOptimizer
    max_consecutive: int

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first step."""
        return make_state("apply_if_finite", self.optimizer, params, {}, "consecutive", "total")

    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        name = "apply_if_finite"
        data = state._data
        active = how.active
        _, given, how = begin_step(name, params, grads, state, {"consecutive", "total"}, how)
        finite = _is_finite(given, data["total"])
        in_a_row = torch.where(finite, 0, data["consecutive"] + 1)
        chosen = finite | (in_a_row > self.max_consecutive)
        if active is not None:
            chosen = chosen & active
        new, inner = step_some(self.optimizer, params, grads, data["optimizer"], chosen, how)
        counts = {
            "consecutive": select(active, in_a_row, data["consecutive"]),
            "total": select(active, data["total"] + ~finite, data["total"]),
        }
        return new, state._replace({**data, "optimizer": inner, **counts})

    def eval_params(self, params: T, state: "TensorDict") -> T:
        """Return the parameters that the optimizer evaluates."""
        return self.optimizer.eval_params(params, state._data["optimizer"])


def _is_finite(leaves: Leaves, count: Tensor) -> Tensor:
    finite = torch.ones_like(count, dtype=torch.bool)
    dims = count.dim()
    for leaf in leaves:
        rows, inner = with_inner(leaf, dims)
        finite = finite & rows.isfinite().all(inner).to(finite.device)
    return finite


def apply_if_finite(optimizer: AbstractOptimizer, max_consecutive: int) -> ApplyIfFinite:
    """Return an optimizer that skips the step of each member whose gradient holds nan or an infinity.

    `state["total"]` counts such gradients, `state["consecutive"]` the last ones in a row.

    Args:
        optimizer: The optimizer of the other steps.
        max_consecutive: The number of steps that are skipped in a row; the next is applied, so that the run fails
            visibly.

    Raises:
        ValueError: `max_consecutive` is below 0.

    Source:
        `optax.apply_if_finite`.

    Examples:
        >>> opt = tdf.optim.apply_if_finite(tdf.optim.sgd(lr=1.0), max_consecutive=5)
        >>> params = TensorDict({"w": torch.ones(2)}, [2])
        >>> grads = TensorDict({"w": torch.tensor([1.0, float("nan")])}, [2])
        >>> params, state = opt.update(params, grads, opt.init(params))
        >>> params["w"], state["total"]
        (tensor([0., 1.]), tensor([0, 1]))
    """
    max_consecutive = as_count("apply_if_finite: max_consecutive", max_consecutive, 0)
    return ApplyIfFinite(optimizer, max_consecutive)
