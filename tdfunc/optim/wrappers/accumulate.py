"""`accumulate`: a step for every few gradients."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import as_count
from tdfunc.core.walk import list_leaves, rebuild
from tdfunc.optim.base import AbstractOptimizer, How
from tdfunc.optim.checks import list_trainable
from tdfunc.optim.execution import free_lists, grads_of, select_members
from tdfunc.optim.lists import restore, widen
from tdfunc.optim.wrappers.parts import begin_step, make_state, select, step_some

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)


@dataclass(frozen=True, eq=False)
class Accumulate(AbstractOptimizer):
    """An optimizer of means of gradients, whose sum and number are in the state; made by `accumulate`."""

    optimizer: AbstractOptimizer
    every: int

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first gradient."""
        zeros = [torch.zeros_like(leaf) for leaf in widen(list_trainable("accumulate", params))]
        return make_state("accumulate", self.optimizer, params, {"sum": rebuild(params, zeros)}, "count")

    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        _, given, how = begin_step("accumulate", params, grads, state, {"sum", "count"}, how)
        data = state._data
        active = how.active
        count = data["count"] + 1
        total = list_leaves(data["sum"])
        with grads_of(total, given):
            lists = free_lists([*given, *total])
            new_total = lists.run("add", total, widen(given), keep=True)
            # A state that was made with a larger `every` may hold more gradients.
            number = count.clamp(min=self.every)
            mean = restore(lists.run("div", new_total, number, keep=True), given)
            full = count >= self.every
            ready = full if active is None else full & active
            kept = select_members(~full, new_total, [torch.zeros_like(x) for x in total])
            if active is not None:
                kept = select_members(active, kept, total)
        new, inner = step_some(self.optimizer, params, rebuild(grads, mean), data["optimizer"], ready, how)
        count = select(active, torch.where(full, 0, count), data["count"])
        return new, state._replace({**data, "optimizer": inner, "sum": rebuild(data["sum"], kept), "count": count})

    def eval_params(self, params: T, state: "TensorDict") -> T:
        """Return the parameters that the optimizer evaluates."""
        return self.optimizer.eval_params(params, state._data["optimizer"])


def accumulate(optimizer: AbstractOptimizer, every: int) -> Accumulate:
    """Return an optimizer that does a step by the mean of every few gradients.

    Between these steps the parameters stay as they are; step counts, and schedules with them, count the steps that are
    done. Sums of 16-bit gradients are of float32. Members that are not `active` do not accumulate.

    Args:
        optimizer: The optimizer of the means.
        every: The number of gradients for each step.

    Raises:
        ValueError: `every` is below 1.

    Source:
        `optax.MultiSteps`.

    Examples:
        >>> opt = tdf.optim.accumulate(tdf.optim.sgd(lr=1.0), every=2)
        >>> params = TensorDict({"w": torch.zeros(1)})
        >>> state = opt.init(params)
        >>> for grad in (1.0, 3.0):
        ...     params, state = opt.update(params, TensorDict({"w": torch.tensor([grad])}), state)
        ...     print(params["w"])
        tensor([0.])
        tensor([-2.])
    """
    return Accumulate(optimizer, as_count("accumulate: every", every))
