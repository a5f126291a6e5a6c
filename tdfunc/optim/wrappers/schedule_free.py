"""`schedule_free`: averaging in place of a schedule."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import error
from tdfunc.core.walk import list_leaves, rebuild
from tdfunc.ops.base.foreach import leaves_like
from tdfunc.ops.edits import maps
from tdfunc.optim.base import AbstractOptimizer, How
from tdfunc.optim.checks import list_trainable
from tdfunc.optim.execution import grads_of, select_members
from tdfunc.optim.lists import LOW_PRECISION, Leaves, Lists, restore, widen
from tdfunc.optim.optimizer import Optimizer
from tdfunc.optim.rule import read_values
from tdfunc.optim.wrappers.parts import (
    add_rest,
    begin_step,
    copy_start,
    make_rest,
    make_state,
    rebuild_params,
    select,
    split_rest,
)

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)


@dataclass(frozen=True, eq=False)
class ScheduleFree(AbstractOptimizer):
    """An optimizer that trains points between an average and the steps of a rule; made by `schedule_free`."""

    optimizer: Optimizer
    beta: float
    lr_power: float

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first step."""
        leaves = list_trainable("schedule_free", params)
        with grads_of(leaves):
            wide = widen(leaves)
        z = rebuild(params, copy_start(wide))
        device = None
        if leaves:
            device = leaves[0].device
        zeros = torch.zeros(params._batch_size, dtype=torch.float64, device=device)
        data: dict[str, Any] = {"z": z, "lr_max": zeros, "weight_sum": zeros.clone()}
        if _has_low(leaves):
            # The average is computed from the points: where they are rounded, it would be lost.
            data["rest"] = make_rest(params)
        return make_state("schedule_free", self.optimizer, rebuild(params, wide), data)

    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        leaves = list_trainable("schedule_free", params)
        wanted = {"z", "lr_max", "weight_sum"}
        is_low = _has_low(leaves)
        if is_low:
            wanted.add("rest")
            state = _upgrade(params, state)
        _, given, how = begin_step("schedule_free", params, grads, state, wanted, how)
        data = state._data
        active = how.active
        largest = torch.maximum(data["lr_max"], self._rate(data["optimizer"]))
        weight = largest**self.lr_power
        total = data["weight_sum"] + weight
        # The share of this step in the average; without a learning rate so far there is none.
        share = torch.where(total > 0, weight / torch.where(total > 0, total, 1.0), 0.0)
        # The step of the rule is taken at the parameters, and added to z.
        start: Any = params
        slopes: Any = grads
        if is_low:
            with grads_of(leaves, given):
                start = rebuild(params, add_rest(params, leaves, data["rest"]))
                slopes = rebuild(grads, widen(given))
        moved, inner = replace(how, donate=False).step(self.optimizer, start, slopes, data["optimizer"])
        points = list_leaves(start)
        old = list_leaves(data["z"])
        after = list_leaves(moved)
        lists = Lists(inplace=False)
        entries: dict[str, Any] = {"lr_max": select(active, largest, data["lr_max"])}
        entries["weight_sum"] = select(active, total, data["weight_sum"])
        with grads_of([*after, share]):
            steps = lists.run("sub", after, points)
            new = lists.add(lists.run("lerp", points, old, share), steps, 1 - self.beta * (1 - share))
            z = lists.run("add", old, steps)
            if active is not None:
                new = select_members(active, new, points)
                z = select_members(active, z, old)
            if is_low:
                new, entries["rest"] = split_rest(new, leaves, data["rest"], active)
        state = state._replace({**data, **entries, "optimizer": inner, "z": rebuild(data["z"], z)})
        return rebuild_params(params, new, leaves), state

    def eval_params(self, params: T, state: "TensorDict") -> T:
        """Return the average, in the dtypes of the parameters."""
        leaves = list_leaves(params)
        with grads_of(leaves):
            points = leaves
            if _has_low(leaves):
                state = _upgrade(params, state)
                points = add_rest(params, leaves, state._data["rest"])
            rows = zip(points, leaves_like(params, state._data["z"], "schedule_free.eval_params"), strict=True)
            average = [point.lerp(z, 1 - 1 / self.beta) for point, z in rows]
            return rebuild(params, restore(average, leaves))

    # Any: the state of a rule.
    def _rate(self, state: Any) -> Tensor:
        """Return the learning rate of this step."""
        count = state._data["step"]
        lr = self.optimizer.hyper["lr"]
        tensors = {}
        if isinstance(lr, Tensor):
            tensors = {"lr": state._data["lr"]}
        value = read_values(self.optimizer.rule.name, {"lr": lr}, count, tensors, count.shape)["lr"]
        return torch.as_tensor(value, dtype=torch.float64, device=count.device).expand(count.shape)


def _has_low(leaves: Leaves) -> bool:
    return any([leaf.dtype in LOW_PRECISION for leaf in leaves])


# Any: a state is checked afterwards.
def _upgrade(params: TensorCollection, state: Any) -> Any:
    """Return the state of an older version, which kept all in the 16 bits of the parameters, as one of this version."""
    if not isinstance(state, TensorCollection) or "rest" in state._data or "optimizer" not in state._data:
        return state
    wide = maps.apply(state, lambda x: x.float() if x.dtype in LOW_PRECISION else x, ())
    return wide._replace({**wide._data, "rest": make_rest(params)})


def schedule_free(optimizer: Optimizer, beta: float = 0.9, *, lr_power: float = 2.0) -> ScheduleFree:
    """Return an optimizer that needs no schedule: it trains points between the steps of a rule and their average.

    `params` are the points at which gradients are taken; `opt.eval_params(params, state)` returns the average, to
    evaluate and to save. If the parameters have 16 bits, the state keeps what their rounding cuts off. The first form
    of the paper is `schedule_free(sgd(lr))`, and the other is `schedule_free(adamw(lr, betas=(0.0, 0.999)))`: `beta`
    stands for the momentum. A warm-up is a schedule of `lr`.

    Args:
        optimizer: The rule, without momentum.
        beta: The weight of the average in the points.
        lr_power: The power of the largest learning rate so far that is the weight of a step in the average.

    Raises:
        TypeError: `optimizer` is not a single rule.
        ValueError: `beta` is not in (0, 1).

    Source:
        Defazio et al., "The Road Less Scheduled", algorithm 1; `optax.contrib.schedule_free`.

    Examples:
        >>> opt = tdf.optim.schedule_free(tdf.optim.sgd(lr=1.0), beta=0.5)
        >>> params = TensorDict({"w": torch.tensor([0.0])})
        >>> state = opt.init(params)
        >>> for _ in range(2):
        ...     params, state = opt.update(params, TensorDict({"w": torch.tensor([-1.0])}), state)
        >>> opt.eval_params(params, state)["w"]
        tensor([1.5000])
    """
    if not isinstance(optimizer, Optimizer):
        raise error(
            TypeError,
            "schedule_free: the optimizer is not a single rule.",
            expected="sgd(...), adamw(...), ...",
            got=type(optimizer).__name__,
            hint="the others go around it: chain(clip_by_global_norm(1.0), schedule_free(sgd())).",
        )
    if not 0.0 < beta < 1.0:
        raise error(ValueError, "schedule_free: beta must be between 0 and 1.", got=beta)
    return ScheduleFree(optimizer, beta, lr_power)
