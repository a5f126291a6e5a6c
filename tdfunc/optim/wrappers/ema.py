"""`ema`: a running average of the parameters."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tdfunc.core.collection import TensorCollection
from tdfunc.core.walk import list_leaves, rebuild
from tdfunc.ops.base.foreach import leaves_like
from tdfunc.optim.base import AbstractOptimizer, How
from tdfunc.optim.checks import check_hyper, list_trainable
from tdfunc.optim.execution import free_lists, grads_of, select_members
from tdfunc.optim.lists import Lists, restore, widen
from tdfunc.optim.optimizer import Hyper
from tdfunc.optim.rule import read_value
from tdfunc.optim.wrappers.parts import begin_step, copy_start, make_state, select

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)


@dataclass(frozen=True, eq=False)
class Ema(AbstractOptimizer):
    """An optimizer that averages the parameters that it trains; made by `ema`."""

    optimizer: AbstractOptimizer
    # Any: a number, a tensor or a schedule, as `check_hyper` returns it.
    decay: Any
    debias: bool

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first step."""
        leaves = widen(list_trainable("ema", params))
        if not self.debias:
            return make_state("ema", self.optimizer, params, {"average": rebuild(params, copy_start(leaves))}, "count")
        average = rebuild(params, [torch.zeros_like(leaf) for leaf in leaves])
        device = None
        if leaves:
            device = leaves[0].device
        weight = torch.zeros(params._batch_size, dtype=torch.float64, device=device)
        return make_state("ema", self.optimizer, params, {"average": average, "weight": weight}, "count")

    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        active = how.active
        wanted = {"average", "count"}
        if self.debias:
            wanted.add("weight")
            state = self._upgrade(state)
        _, _, how = begin_step("ema", params, grads, state, wanted, how)
        data = state._data
        old = list_leaves(data["average"])
        new, inner = how.step(self.optimizer, params, grads, data["optimizer"])
        leaves = list_leaves(new)
        share = 1 - read_value("ema", "decay", self.decay, data["count"])
        with grads_of([*leaves, *old]):
            average = free_lists([*leaves, *old]).run("lerp", old, widen(leaves), share, keep=True)
            if active is not None:
                average = select_members(active, average, old)
        entries: dict[str, Any] = {"optimizer": inner, "average": rebuild(data["average"], average)}
        entries["count"] = data["count"] + (1 if active is None else active)
        if self.debias:
            weight = data["weight"]
            entries["weight"] = select(active, weight + (1 - weight) * share, weight)
        return new, state._replace({**data, **entries})

    def eval_params(self, params: T, state: "TensorDict") -> T:
        """Return the average; before the first step the parameters themselves."""
        leaves = list_leaves(params)
        average = leaves_like(params, state._data["average"], "ema.eval_params")
        if self.debias:
            weight = self._upgrade(state)._data["weight"]
            # Without a weight so far the average is not used.
            divisor = torch.where(weight > 0, weight, 1.0)
            average = Lists(inplace=False).run("div", average, divisor)
            with grads_of(leaves):
                average = select_members(weight > 0, average, widen(leaves))
        return rebuild(params, restore(average, leaves))

    # Any: a state is checked afterwards.
    def _upgrade(self, state: Any) -> Any:
        """Return the state of an older version, which had one decay and kept no weight, as one of this version."""
        if not isinstance(state, TensorCollection) or "weight" in state._data or "count" not in state._data:
            return state
        if callable(self.decay):
            return state
        data: dict[str, Any] = state._data
        weight = 1 - self.decay ** data["count"].double()
        return state._replace({**data, "weight": weight})


def ema(optimizer: AbstractOptimizer, decay: Hyper, *, debias: bool = True) -> Ema:
    """Return an optimizer that keeps a running average of the parameters after each step.

    `opt.eval_params(params, state)` returns the average, in the dtypes of the parameters, to evaluate and to save in
    their place; training continues from `params`. The average is kept in float32 if the parameters have 16 bits.
    `tdfunc.averaging.EMA` averages any tree, such as the buffers of BatchNorm.

    Args:
        optimizer: The optimizer of the parameters.
        decay: The weight of the average so far: a number, a tensor with a value for each member of a stack, or a
            function of the number of averaged steps so far. A run may continue with another one.
        debias: Begin with an empty average, as Adam does, and divide by the sum of the weights so far; otherwise begin
            with the parameters before the first step.

    Raises:
        ValueError: `decay` is not in [0, 1).

    Source:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging"; `optax.ema`;
        `torch.optim.swa_utils.get_ema_multi_avg_fn`, without `debias`.

    Examples:
        >>> opt = tdf.optim.ema(tdf.optim.sgd(lr=1.0), decay=0.5)
        >>> params = TensorDict({"w": torch.tensor([1.0])})
        >>> state = opt.init(params)
        >>> for _ in range(2):
        ...     params, state = opt.update(params, TensorDict({"w": torch.tensor([1.0])}), state)
        >>> params["w"], opt.eval_params(params, state)["w"]
        (tensor([-1.]), tensor([-0.6667]))
    """
    return Ema(optimizer, check_hyper("ema", "decay", decay, 0.0, 1.0), debias)
