"""`lookahead`: slow parameters that follow fast ones."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import as_count
from tdfunc.core.walk import list_leaves, rebuild
from tdfunc.ops.base.foreach import leaves_like
from tdfunc.optim.base import AbstractOptimizer, How
from tdfunc.optim.checks import check_hyper, list_trainable
from tdfunc.optim.execution import free_lists, grads_of, select_members
from tdfunc.optim.lists import restore, widen
from tdfunc.optim.wrappers.parts import begin_step, copy_start, make_state, rebuild_params, select

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)


@dataclass(frozen=True, eq=False)
class Lookahead(AbstractOptimizer):
    """An optimizer that goes back a part of the way every few steps; made by `lookahead`."""

    optimizer: AbstractOptimizer
    every: int
    slow_step_size: float

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first step."""
        slow = copy_start(widen(list_trainable("lookahead", params)))
        return make_state("lookahead", self.optimizer, params, {"slow": rebuild(params, slow)}, "count")

    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        data = state._data
        active = how.active
        before, _, how = begin_step("lookahead", params, grads, state, {"slow", "count"}, how)
        old = list_leaves(data["slow"])
        count = data["count"] + 1
        # A state that was made with a larger `every` may have counted further.
        full = count >= self.every
        ready = full if active is None else full & active
        new, inner = how.step(self.optimizer, params, grads, data["optimizer"])
        fast = list_leaves(new)
        with grads_of([*fast, *old]):
            slow = free_lists([*fast, *old]).run("lerp", old, widen(fast), self.slow_step_size, keep=True)
            slow = select_members(ready, slow, old)
            fast = select_members(ready, restore(slow, fast), fast)
        count = select(active, torch.where(full, 0, count), data["count"])
        data = {**data, "optimizer": inner, "slow": rebuild(data["slow"], slow), "count": count}
        return rebuild_params(params, fast, before), state._replace(data)

    def eval_params(self, params: T, state: "TensorDict") -> T:
        """Return the slow parameters."""
        slow = leaves_like(params, state._data["slow"], "lookahead.eval_params")
        return rebuild(params, restore(slow, list_leaves(params)))


def lookahead(optimizer: AbstractOptimizer, every: int = 6, slow_step_size: float = 0.5) -> Lookahead:
    """Return an optimizer whose slow parameters go a part of the way to the fast ones every few steps.

    The fast ones then continue from there. `opt.eval_params(params, state)` returns the slow ones, which are kept in
    float32 if the parameters have 16 bits.

    Args:
        optimizer: The optimizer of the fast parameters.
        every: The number of its steps for each step of the slow parameters.
        slow_step_size: The part of the way that they go.

    Raises:
        ValueError: `every` is below 1, or `slow_step_size` is negative or nan.

    Source:
        Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back"; `optax.lookahead`.

    Examples:
        >>> opt = tdf.optim.lookahead(tdf.optim.sgd(lr=1.0), every=2)
        >>> params = TensorDict({"w": torch.tensor([0.0])})
        >>> state = opt.init(params)
        >>> for _ in range(2):
        ...     params, state = opt.update(params, TensorDict({"w": torch.tensor([-1.0])}), state)
        >>> params["w"]
        tensor([1.])
    """
    every = as_count("lookahead: every", every)
    check_hyper("lookahead", "slow_step_size", slow_step_size, 0.0)
    return Lookahead(optimizer, every, slow_step_size)
