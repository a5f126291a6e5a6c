"""`masters`: 16-bit parameters that are trained in float32."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tdfunc.core.collection import TensorCollection
from tdfunc.core.walk import list_leaves, rebuild
from tdfunc.optim.base import AbstractOptimizer, How
from tdfunc.optim.checks import list_trainable
from tdfunc.optim.execution import grads_of
from tdfunc.optim.lists import widen
from tdfunc.optim.wrappers.parts import add_rest, begin_step, make_rest, make_state, rebuild_params, split_rest

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)


@dataclass(frozen=True, eq=False)
class Masters(AbstractOptimizer):
    """An optimizer of float32 parameters, of which the state keeps what 16 bits cut off; made by `masters`."""

    optimizer: AbstractOptimizer

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first step, with the optimizer's state in float32."""
        leaves = list_trainable("masters", params)
        rest = {"rest": make_rest(params)}
        return make_state("masters", self.optimizer, rebuild(params, widen(leaves)), rest)

    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        leaves, given, how = begin_step("masters", params, grads, state, {"rest"}, how)
        data = state._data
        with grads_of(leaves, given):
            wide = add_rest(params, leaves, data["rest"])
            wide_grads = rebuild(grads, widen(given))
        new, inner = how.step(self.optimizer, rebuild(params, wide), wide_grads, data["optimizer"])
        full = list_leaves(new)
        with grads_of(full):
            short, rest = split_rest(full, leaves, data["rest"], how.active)
        state = state._replace({**data, "optimizer": inner, "rest": rest})
        return rebuild_params(params, short, leaves), state

    def eval_params(self, params: T, state: "TensorDict") -> T:
        """Return the parameters that the optimizer evaluates, in float32."""
        leaves = list_leaves(params)
        with grads_of(leaves):
            wide = rebuild(params, add_rest(params, leaves, state._data["rest"]))
        return self.optimizer.eval_params(wide, state._data["optimizer"])


def masters(optimizer: AbstractOptimizer) -> Masters:
    """Return an optimizer that trains bfloat16 and float16 parameters in float32.

    Steps smaller than a rounding of the parameters add up. The state keeps the differences between the float32
    parameters and the 16-bit ones, from which each step begins: parameters that you change in between stay changed.
    `opt.eval_params(params, state)` returns the float32 ones. Leaves of other dtypes are trained as they are.
    A float16 parameter past the range of its dtype is infinite from then on.

    Args:
        optimizer: The optimizer of the float32 parameters; its state is also in float32.

    Source:
        Micikevicius et al., "Mixed Precision Training", section 3.1.

    Examples:
        >>> params = TensorDict({"w": torch.ones(1, dtype=torch.bfloat16)})
        >>> opt = tdf.optim.masters(tdf.optim.sgd(lr=0.001))
        >>> state = opt.init(params)
        >>> for _ in range(10):
        ...     params, state = opt.update(params, params.apply(torch.ones_like), state)
        >>> params["w"], opt.eval_params(params, state)["w"]
        (tensor([0.9883], dtype=torch.bfloat16), tensor([0.9900]))
    """
    return Masters(optimizer)
