"""`ema`: a running average of the parameters."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from tdfunc.core.collection import TensorCollection
from tdfunc.core.walk import list_leaves, rebuild
from tdfunc.ops.base.foreach import leaves_like
from tdfunc.optim.base import AbstractOptimizer, How
from tdfunc.optim.checks import check_hyper, list_trainable
from tdfunc.optim.execution import free_lists, grads_of, select_members
from tdfunc.optim.lists import Lists, restore, widen
from tdfunc.optim.wrappers.parts import begin_step, copy_start, make_state

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)


@dataclass(frozen=True, eq=False)
class Ema(AbstractOptimizer):
    """An optimizer that averages the parameters that it trains; made by `ema`."""

    optimizer: AbstractOptimizer
    decay: float
    debias: bool

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first step."""
        leaves = widen(list_trainable("ema", params))
        if self.debias:
            start = [torch.zeros_like(leaf) for leaf in leaves]
        else:
            start = copy_start(leaves)
        return make_state("ema", self.optimizer, params, {"average": rebuild(params, start)}, "count")

    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        data = state._data
        active = how.active
        _, _, how = begin_step("ema", params, grads, state, {"average", "count"}, how)
        old = list_leaves(data["average"])
        new, inner = how.step(self.optimizer, params, grads, data["optimizer"])
        leaves = list_leaves(new)
        with grads_of([*leaves, *old]):
            average = free_lists([*leaves, *old]).run("lerp", old, widen(leaves), 1 - self.decay, keep=True)
            if active is not None:
                average = select_members(active, average, old)
        count = data["count"] + (1 if active is None else active)
        average = rebuild(data["average"], average)
        return new, state._replace({**data, "optimizer": inner, "average": average, "count": count})

    def eval_params(self, params: T, state: "TensorDict") -> T:
        """Return the average; before the first step the parameters themselves."""
        leaves = list_leaves(params)
        average = leaves_like(params, state._data["average"], "ema.eval_params")
        if self.debias:
            count = state._data["count"].double()
            # Before the first step the average is not used.
            average = Lists(inplace=False).run("div", average, 1 - self.decay ** count.clamp(min=1))
            with grads_of(leaves):
                average = select_members(count > 0, average, widen(leaves))
        return rebuild(params, restore(average, leaves))


def ema(optimizer: AbstractOptimizer, decay: float, *, debias: bool = True) -> Ema:
    """Return an optimizer that keeps a running average of the parameters after each step.

    `opt.eval_params(params, state)` returns the average, in the dtypes of the parameters, to evaluate and to save in
    their place; training continues from `params`. The average is kept in float32 if the parameters have 16 bits.

    Args:
        optimizer: The optimizer of the parameters.
        decay: The weight of the average so far.
        debias: Begin with an empty average, as Adam does; otherwise with the parameters before the first step.

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
    check_hyper("ema", "decay", decay, 0.0, 1.0)
    return Ema(optimizer, decay, debias)
