"""`accumulate`: a step for every few gradients."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import as_count
from tdfunc.core.walk import list_leaves, rebuild
from tdfunc.optim.base import AbstractOptimizer, How
from tdfunc.optim.checks import list_trainable
from tdfunc.optim.execution import free_lists, grads_of, select_members
from tdfunc.optim.lists import Leaves, restore, widen
from tdfunc.optim.optimizer import Schedule
from tdfunc.optim.rule import read_value
from tdfunc.optim.wrappers.parts import begin_step, make_state, select, step_some

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)


@dataclass(frozen=True, eq=False)
class Accumulate(AbstractOptimizer):
    """An optimizer of means of gradients, whose sum and number are in the state; made by `accumulate`."""

    optimizer: AbstractOptimizer
    every: int | Schedule

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first gradient."""
        zeros = [torch.zeros_like(leaf) for leaf in widen(list_trainable("accumulate", params))]
        return make_state("accumulate", self.optimizer, params, {"sum": rebuild(params, zeros)}, *self._counts())

    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        _, given, how = begin_step("accumulate", params, grads, state, {"sum", *self._counts()}, how)
        data = state._data
        total = list_leaves(data["sum"])
        with grads_of(total, given):
            new_total = free_lists([*given, *total]).run("add", total, widen(given), keep=True)
        every = self.every
        if callable(every):
            every = read_value("accumulate", "every", every, data["steps"])
        count = data["count"] + 1
        # A state that was made with a larger `every` may hold more gradients.
        return self._release(params, state, new_total, count, count >= every, how)

    def flush(self, params: T, state: "TensorDict", *, active: Tensor | None = None) -> "tuple[T, TensorDict]":
        """Return the parameters and the state after a step by the mean of the gradients so far.

        Members that hold no gradients stay as they are. Call it at the end of an epoch whose number of batches `every`
        does not divide. `active` is as in `update`, and so are the errors.

        Examples:
            >>> opt = tdf.optim.accumulate(tdf.optim.sgd(lr=1.0), every=4)
            >>> params = TensorDict({"w": torch.zeros(1)})
            >>> state = opt.init(params)
            >>> for grad in (1.0, 3.0):
            ...     params, state = opt.update(params, TensorDict({"w": torch.tensor([grad])}), state)
            >>> params, state = opt.flush(params, state)
            >>> params["w"]
            tensor([-2.])
        """
        how = How(active, donate=False)
        # The parameters are checked in the place of gradients.
        _, _, how = begin_step("accumulate", params, params, state, {"sum", *self._counts()}, how)
        count = state._data["count"]
        return self._release(params, state, list_leaves(state._data["sum"]), count, count > 0, how)

    def eval_params(self, params: T, state: "TensorDict") -> T:
        """Return the parameters that the optimizer evaluates."""
        return self.optimizer.eval_params(params, state._data["optimizer"])

    def _counts(self) -> tuple[str, ...]:
        """Return the counts of the state. A schedule reads the number of steps."""
        if callable(self.every):
            return ("count", "steps")
        return ("count",)

    def _release(
        self, params: T, state: "TensorDict", total: Leaves, count: Tensor, full: Tensor, how: How
    ) -> "tuple[T, TensorDict]":
        """Do the step of the members whose gradients are complete, and keep the sums of the others.

        Args:
            params: The tree to train.
            state: The state before.
            total: The sums of gradients.
            count: Their numbers, for each member.
            full: A bool for each member, if it does a step.
            how: The options of the step.
        """
        data = state._data
        active = how.active
        leaves = list_leaves(params)
        with grads_of(total):
            number = count.clamp(min=1)
            mean = restore(free_lists([*leaves, *total]).run("div", total, number, keep=True), leaves)
            left = select_members(~full, total, [torch.zeros_like(x) for x in total])
            if active is not None:
                left = select_members(active, left, list_leaves(data["sum"]))
        ready = full if active is None else full & active
        new, inner = step_some(self.optimizer, params, rebuild(params, mean), data["optimizer"], ready, how)
        entries: dict[str, Any] = {"optimizer": inner, "sum": rebuild(data["sum"], left)}
        entries["count"] = select(active, torch.where(full, 0, count), data["count"])
        if "steps" in data:
            entries["steps"] = data["steps"] + ready
        return new, state._replace({**data, **entries})


def accumulate(optimizer: AbstractOptimizer, every: int | Schedule) -> Accumulate:
    """Return an optimizer that does a step by the mean of every few gradients.

    Between these steps the parameters stay as they are; step counts, and schedules with them, count the steps that are
    done. Sums of 16-bit gradients are of float32. Members that are not `active` do not accumulate. `opt.flush(params,
    state)` does the step of an incomplete mean.

    Args:
        optimizer: The optimizer of the means.
        every: The number of gradients for each step, or a function of the number of steps done so far: it returns a
            number, also one for each member.

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
    if not callable(every):
        every = as_count("accumulate: every", every)
    return Accumulate(optimizer, every)
