"""`masters`: 16-bit parameters that are trained in float32."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from tdfunc.core.collection import TensorCollection
from tdfunc.core.walk import list_leaves, list_paths, rebuild
from tdfunc.ops.base.reading import entries
from tdfunc.ops.edits.structure import keep_leaves
from tdfunc.optim._base import AbstractOptimizer, How
from tdfunc.optim._checks import list_trainable
from tdfunc.optim._lists import Leaves
from tdfunc.optim._run import LOW_PRECISION, grads_of, restore, select_members, widen
from tdfunc.optim._wrappers.parts import begin_step, make_state, rebuild_params

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
        low = [entry for entry in entries(params) if entry.leaf.dtype in LOW_PRECISION]
        # A tied leaf, under all of its names.
        rest = keep_leaves(params, {path for entry in low for path in entry.paths})
        zeros = rebuild(rest, [torch.zeros_like(leaf) for leaf in widen(list_leaves(rest))])
        return make_state("masters", self.optimizer, rebuild(params, widen(leaves)), {"rest": zeros})

    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        leaves, given, how = begin_step("masters", params, grads, state, {"rest"}, how)
        data = state._data
        with grads_of(leaves, given):
            wide = _add_rest(params, leaves, data["rest"])
            wide_grads = rebuild(grads, widen(given))
        new, inner = how.step(self.optimizer, rebuild(params, wide), wide_grads, data["optimizer"])
        full = list_leaves(new)
        with grads_of(full):
            short = restore(full, leaves)
            # A number and its 16-bit rounding are so near that float32 holds their difference exactly.
            rest = [x - y.float() for x, y in zip(full, short, strict=True) if y.dtype in LOW_PRECISION]
            if how.active is not None:
                # An inactive member's sums may be rounded.
                rest = select_members(how.active, rest, list_leaves(data["rest"]))
                short = select_members(how.active, short, leaves)
        state = state._replace({**data, "optimizer": inner, "rest": rebuild(data["rest"], rest)})
        return rebuild_params(params, short, leaves), state

    def eval_params(self, params: T, state: "TensorDict") -> T:
        """Return the parameters that the optimizer evaluates, in float32."""
        leaves = list_leaves(params)
        with grads_of(leaves):
            wide = rebuild(params, _add_rest(params, leaves, state._data["rest"]))
        return self.optimizer.eval_params(wide, state._data["optimizer"])


def _add_rest(params: TensorCollection, leaves: Leaves, rest: TensorCollection) -> Leaves:
    cut = dict(zip(list_paths(rest), list_leaves(rest), strict=True))
    rows = zip(list_paths(params), leaves, strict=True)
    return [leaf.float() + cut[path] if path in cut else leaf for path, leaf in rows]


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
