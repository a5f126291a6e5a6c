"""`Optimizer`: a rule of list arithmetic and its hyperparameters, as two pure functions over trees.

The arithmetic of one step is in the rule's own file; `run` runs it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import in_functorch, is_compiling
from tdfunc.core.keys import dotted
from tdfunc.core.walk import list_paths, rebuild
from tdfunc.ops.base.convert import join_nodes
from tdfunc.optim.base import AbstractOptimizer, How
from tdfunc.optim.checks import (
    check_active,
    check_dense,
    check_hyper,
    check_members,
    check_real,
    check_state,
    check_step,
    list_gradients,
    list_matching,
    list_trainable,
    warn_narrow,
)
from tdfunc.optim.lists import Leaves, scalar_dtype, spread, wide_dtype, widen
from tdfunc.optim.rule import Rule, read_values
from tdfunc.optim.run import Run

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)
Schedule: TypeAlias = Callable[[Tensor], "Tensor | float"]
# Any: numbers of any dtype.
Hyper: TypeAlias = float | Tensor | Schedule | Sequence[float] | NDArray[Any]


@dataclass(frozen=True, eq=False)
class Optimizer(AbstractOptimizer):
    """A rule and its hyperparameters: made by `sgd`, `adam` and all others that train by one rule.

    A hyperparameter is one of these:

    - a float, which is fixed;
    - a tensor, list or array with a value for each member, which `init` puts into the state under its own name, where
      `state.set` changes it;
    - a function from the number of steps done so far (an integer tensor) to a float or tensor, of no dimensions or of
      the batch size of the parameters.

    A complex parameter is trained as its real and imaginary part, as in torch.optim.

    What the state keeps of 16-bit parameters is of float32. Their own rounding loses small steps, so that `init` warns;
    `masters` keeps them.

    Tensors are differentiated through `init` and `update` if they require grad, and inside `torch.func.grad`.

    Args:
        rule: The arithmetic of one step.
        hyper: The hyperparameters of the rule.
    """

    rule: Rule
    hyper: Mapping[str, float | Tensor | Schedule]

    def __repr__(self) -> str:
        return f"{self.rule.name}({', '.join(f'{name}={shown(value)}' for name, value in self.hyper.items())})"

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first step; see `AbstractOptimizer.init`."""
        rule = self.rule
        leaves = list_trainable(self.rule.name, params)
        size = params._batch_size
        check_dense(f"{rule.name}.init", params)
        warn_narrow(rule.name, leaves)
        if rule.only_real:
            check_real(rule.name, params)
        if rule.check is not None:
            rule.check(params, leaves)
        device = None
        if leaves:
            device = leaves[0].device
        # Expanded: the strides prove that all members have done as many steps.
        data: dict[str, Any] = {"step": torch.zeros((), dtype=torch.int64, device=device).expand(size)}
        for key, value in self._tensors().items():
            if value.dim():
                data[key] = value.clone()
            else:
                data[key] = value.clone().expand(size)
            check_members(rule.name, key, data[key], params, leaves, only_batch=rule.shape is not None)
        for name in rule.scalars:
            data[name] = torch.ones(size, dtype=scalar_dtype(), device=device)
        for slot in rule.slots:
            data[slot] = rebuild(params, self._start(slot, leaves, size, data))
        return join_nodes(data, size, params._device, params._names)

    def _start(self, slot: str, leaves: Leaves, size: torch.Size, data: dict[str, Any]) -> Leaves:
        """Return the leaves of a slot before the first step."""
        shape = self.rule.shape
        if shape is not None:
            return [leaf.new_zeros(shape(slot, leaf.shape, len(size)), dtype=wide_dtype(leaf)) for leaf in leaves]
        zeros = [torch.zeros_like(leaf, dtype=wide_dtype(leaf)) for leaf in leaves]
        fill = self.rule.fill.get(slot)
        if fill is None:
            return zeros
        tensors = {key: data[key] for key in self._tensors()}
        value = read_values(self.rule.name, {fill: self.hyper[fill]}, data["step"], tensors, size)[fill]
        # In the dtype of the slot: a rate is not rounded to the 16 bits of its parameter.
        if isinstance(value, Tensor):
            rows = spread(value, zeros)
        else:
            rows = [value] * len(leaves)
        filled: Leaves = []
        for zero, row in zip(zeros, rows, strict=True):
            # A complex number is two real ones.
            filled.append(zero + (row * (1 + 1j) if zero.is_complex() else row))
        return filled

    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        rule = self.rule
        name = self.rule.name
        leaves = list_trainable(name, params)
        size = params._batch_size
        tensors = self._tensors()
        if rule.upgrade is not None:
            state = rule.upgrade(state)
        check_state(name, state, {"step", *rule.slots, *rule.scalars, *tensors})
        step = state._data["step"]
        check_step(name, step, size)
        gradients = list_gradients(name, params, leaves, grads, layout=rule.layout)
        slots = {slot: self._list_slot(slot, params, leaves, state._data[slot]) for slot in rule.slots}
        for key in tensors:
            tensors[key] = state._data[key]
            check_members(name, key, tensors[key], params, leaves, only_batch=rule.shape is not None)
        check_active(name, how.active, size)
        scalars = {key: state._data[key] for key in rule.scalars}
        run = Run(rule, self.hyper, step, tensors, how, lambda: list(map(dotted, list_paths(params))))
        new, new_slots, scalars = run.step(leaves, gradients, slots, scalars)
        data = {key: rebuild(node, new_slots[key]) if key in new_slots else node for key, node in state._data.items()}
        data |= scalars
        if how.active is not None:
            data["step"] = step + how.active
        # Kept expanded, also under a compiler: a state of other strides would be compiled for again.
        elif step.dim() and 0 not in size and (is_compiling() or not in_functorch()) and not any(step.stride()):
            data["step"] = (step[(0,) * step.dim()] + 1).expand(step.shape)
        else:
            data["step"] = step + 1
        return rebuild(params, new), state._make(data, size, state._device, state._names, state._static)

    def _list_slot(self, slot: str, params: TensorCollection, leaves: Leaves, values: Any) -> Leaves:
        """Return the leaves of a slot, in float32 at least; leaves of 16 bits come from an older version."""
        shape = self.rule.shape
        dims = len(params._batch_size)
        shapes = None
        if shape is not None:
            shapes = [shape(slot, leaf.shape, dims) for leaf in leaves]
        return widen(list_matching(self.rule.name, slot, params, leaves, values, shapes=shapes, is_wide=True))

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.hyper.items() if isinstance(value, Tensor)}


def make_optimizer(rule: Rule, hyper: Mapping[str, Hyper], **limits: tuple[float, float]) -> Optimizer:
    """Return an optimizer whose hyperparameters are in [0, inf), betas in [0, 1), others in their own `limits`."""
    checked: dict[str, Any] = {}
    for name, value in hyper.items():
        low, high = limits.get(name, (0.0, 1.0 if name.startswith("beta") else torch.inf))
        checked[name] = check_hyper(rule.name, name, value, low, high)
    return Optimizer(rule, checked)


def shown(value: float | Tensor | Schedule) -> str:
    """Return a hyperparameter for a repr."""
    if isinstance(value, Tensor):
        if value.dim():
            return f"tensor of shape {list(value.shape)}"
        return f"{value.item():g}"
    if callable(value):
        return "<a function>"
    return f"{value:g}"
