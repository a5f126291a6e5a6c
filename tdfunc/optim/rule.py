"""A rule: one step of an optimizer, written in list arithmetic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdfunc._jit.recording.tracing import recorder
from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import in_functorch, is_compiling
from tdfunc.core.errors import BatchSizeError
from tdfunc.optim.checks import check_scheduled
from tdfunc.optim.lists import Coefficient, Leaves, Lists

Values: TypeAlias = dict[str, Coefficient]
Slots: TypeAlias = dict[str, Leaves]


@dataclass(slots=True)
class Work:
    """The lists of leaves that a rule reads and assigns, its scalars, and the number of this step, counted from 1."""

    params: Leaves
    grads: Leaves
    slots: Slots
    scalars: Values
    step: Coefficient
    # How many leading dimensions of the leaves are the batch.
    dims: int


@dataclass(frozen=True, eq=False)
class Rule:
    """One step, written in list arithmetic, and as a call of torch's fused kernel where there is one.

    Its functions are defined in a module, or are partials of such functions, so that optimizers can be pickled.

    Args:
        name: Its name in messages.
        slots: The trees that it keeps in the state, of zeros shaped like the parameters, in float32 at least.
        lists: A function that assigns the lists after the step to its `Work`.
        fused: A function that overwrites the tensors of its `Work`, or returns False. It is called only when all
            values are floats, all members have done as many steps, and the tensors are of float32 or float64, on one
            device and in one layout.
        scalars: The numbers of each member that it keeps in the state; they begin as 1.
        fill: A mapping from slots to the hyperparameters that fill them before the first step.
        shape: The shape of a slot for a parameter of some shape with so many batch dimensions, in rules whose elements
            depend on each other; there hyperparameters must have the batch size.
        layout: The layout of gradients, if it differs from the layout of the parameters.
        check: A function that raises if the rule does not take such parameters.
        decoupled: True if weight decay shrinks the parameters.
        only_real: True if the rule does not take complex parameters.
        upgrade: A function that returns the state of an older version as a state of this one.
    """

    name: str
    slots: tuple[str, ...]
    lists: Callable[[Lists, Work, Values], None]
    fused: Callable[[Work, Any], bool] | None = None
    scalars: tuple[str, ...] = ()
    fill: Mapping[str, str] = field(default_factory=dict[str, str])
    shape: Callable[[str, torch.Size, int], torch.Size] | None = None
    layout: torch.layout | None = None
    check: Callable[[TensorCollection, Leaves], None] | None = None
    decoupled: bool = False
    only_real: bool = False
    # Any: a state that is not checked yet.
    upgrade: Callable[[Any], Any] | None = None


def number_of_step(count: Coefficient) -> Coefficient:
    """Return the number of a step, counted from 1, after so many earlier steps."""
    return count + 1


def decay(
    ops: Lists, work: Work, values: Values, *, decoupled: bool = False, maximize: bool = False
) -> tuple[Leaves, Leaves]:
    """Return the parameters and gradients with weight decay, which shrinks parameters or is added to gradients."""
    factor = values["weight_decay"]
    params = work.params
    grads = work.grads
    if maximize:
        grads = ops.run("neg", grads, keep=True)
    if isinstance(factor, Tensor) or factor != 0.0:
        if decoupled:
            params = ops.run("mul", params, 1 - values["lr"] * factor)
        else:
            grads = ops.add(grads, params, factor, keep=not maximize)
    return params, grads


# Any: schedules and floats.
def read_values(
    rule: str, hyper: Mapping[str, Any], count: Tensor, tensors: dict[str, Tensor], size: torch.Size
) -> Values:
    """Return the hyperparameters at this step: floats, or float64 tensors."""
    values: Values = {}
    for name, value in hyper.items():
        if name in tensors:
            values[name] = tensors[name].double()
        else:
            if callable(value):
                values[name] = check_scheduled(rule, name, value(count), size)
            else:
                values[name] = float(value)
    return values


# Any: schedules, floats and tensors.
def read_value(rule: str, name: str, value: Any, count: Tensor) -> Coefficient:
    """Return one number of a wrapper at this step: a float, or a float64 tensor that is one number or like `count`.

    Where a trace cannot record the schedule, each replay calls it.
    """
    if isinstance(value, Tensor):
        if value.dim() and value.shape != count.shape:
            raise BatchSizeError(
                f"{rule}.update: {name} does not have one value for each member.",
                expected=f"a number or shape {list(count.shape)}, the batch size of params",
                got=f"shape {list(value.shape)}",
                hint="params.with_batch_size([members]), if the leaves are stacked and the tree has no batch size.",
            )
        schedule = partial(_constant, value)
    elif callable(value):
        schedule = value
    else:
        return float(value)
    trace = None
    if not is_compiling() and not in_functorch():
        trace = recorder()
    if trace is None:
        return check_scheduled(rule, name, schedule(count), count.shape)

    def record() -> Any:
        value = schedule(count)
        # A copy is refused of a tensor from outside of the trace, which the schedule may return as it is.
        return value.clone() if isinstance(value, Tensor) else None

    recorded = trace.attempt(record)
    if recorded is not None:
        return check_scheduled(rule, name, recorded, count.shape)

    def read(reads: Leaves) -> Leaves:
        found = check_scheduled(rule, name, schedule(reads[0]), reads[0].shape)
        return [torch.as_tensor(found, dtype=torch.float64, device=reads[0].device).expand(reads[0].shape)]

    return trace.make(read, lambda: torch.empty(count.shape, dtype=torch.float64, device=count.device), [count])


def _constant(value: Tensor, count: Tensor) -> Tensor:
    return value.to(count.device)
