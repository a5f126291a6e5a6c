"""`Optimizer`: a rule of list arithmetic and its hyperparameters, as two pure functions over trees.

The arithmetic of one step is in the rule's own file; `_run` runs it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import in_functorch, is_compiling
from tdfunc.core.errors import BatchSizeError
from tdfunc.core.keys import dotted
from tdfunc.core.walk import list_paths, rebuild
from tdfunc.optim._checks import check_dense, check_members, check_state, check_step, list_matching, list_trainable
from tdfunc.optim._run import Rule, Run

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)
Schedule: TypeAlias = Callable[[Tensor], "Tensor | float"]
Hyper: TypeAlias = float | Tensor | Schedule


class AbstractOptimizer(Protocol):
    """The interface of every optimizer, those made of others included."""

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first step."""
        ...

    def update(
        self,
        params: T,
        grads: TensorCollection,
        state: "TensorDict",
        *,
        active: Tensor | None = None,
        donate: bool = False,
    ) -> "tuple[T, TensorDict]":
        """Return the parameters and the state after one step."""
        ...


@dataclass(frozen=True, eq=False)
class Optimizer:
    """Two pure functions: `init` makes the state, `update` a step.

    Made by `sgd`, `adam` and `adamw`. A hyperparameter is a float, which is fixed; a tensor with a value for each
    member, which `init` puts into the state under its own name, where `state.set` changes it; or a function from
    the number of steps done so far (an integer tensor) to a float or tensor, of no dimensions or of the batch size of
    the parameters. Tensors are differentiated where they require grad, and inside `torch.func.grad`, through `init` and
    `update`.

    Args:
        rule: The arithmetic of one step.
        hyper: The hyperparameters of the rule.
    """

    rule: Rule
    hyper: Mapping[str, Hyper]

    def __repr__(self) -> str:
        return f"{self.rule.name}({', '.join(f'{name}={_shown(value)}' for name, value in self.hyper.items())})"

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first step.

        It has the batch size of `params`: row i is the state of member i, and members' states stack.

        Raises:
            LeafMismatchError: A leaf is not floating point, or a hyperparameter has more or fewer values than it has
                members; the message names it.
            BatchSizeError: A hyperparameter does not have the batch size of `params`.
            UnsupportedError: Members are rows of a lazy stack.
        """
        name = self.rule.name
        leaves, size = list_trainable(name, params), params._batch_size
        check_dense(f"{name}.init", params)
        device = leaves[0].device if leaves else None
        # Expanded: the strides prove that all members have done as many steps.
        data: dict[str, Any] = {"step": torch.zeros((), dtype=torch.int64, device=device).expand(size)}
        for key, value in self._tensors().items():
            data[key] = value.clone() if value.dim() else value.clone().expand(size)
            check_members(name, key, data[key], params, leaves)
        for slot in self.rule.slots:
            data[slot] = rebuild(params, [torch.zeros_like(leaf) for leaf in leaves])
        return TensorCollection._open._make(data, size, params._device, params._names)

    def update(
        self,
        params: T,
        grads: TensorCollection,
        state: "TensorDict",
        *,
        active: Tensor | None = None,
        donate: bool = False,
    ) -> "tuple[T, TensorDict]":
        """Return the parameters and the state after one step.

        It works under `torch.vmap`, `torch.func.grad`, `tdfunc.jit` and `torch.compile`. Outside of transforms a step
        is differentiated only if a hyperparameter in the state requires grad; else a leaf that requires grad becomes
        one that does.

        Args:
            params: The tree to train.
            grads: A tree with the same leaves. Given before `params`, it is trained in silence, unless `params` holds
                Parameters, which gradients never are.
            state: The result of `init`, or of the last `update`.
            active: A bool for each member: where it is False, parameters and state stay as they are.
            donate: Overwrite the leaves of `params` and `state`, which saves copies. From then on use the returned
                trees only, and mind that other trees may share the leaves. All are copied if some share memory, with
                each other or with a gradient, or are expanded.

        Shapes:
            `active` has the batch size of `params`.

        Raises:
            TreeStructureError: The trees have different leaves, or the state is another optimizer's.
            LeafMismatchError: A leaf is not floating point, a gradient or state differs from it in shape or dtype,
                or a hyperparameter does not fit it; the message names the leaf.
            BatchSizeError: `active`, the step count in the state, or the value of a schedule does not have the batch
                size of `params`.
            UnsupportedError: In a replay of `tdfunc.jit`, donated leaves share memory that did not in its trace.
        """
        name = self.rule.name
        leaves, size = list_trainable(name, params), params._batch_size
        tensors = self._tensors()
        check_state(name, state, {"step", *self.rule.slots, *tensors})
        step = state._data["step"]
        check_step(name, step, size)
        gradients = list_matching(name, "gradient", params, leaves, grads)
        slots = {slot: list_matching(name, slot, params, leaves, state._data[slot]) for slot in self.rule.slots}
        for key in tensors:
            tensors[key] = state._data[key]
            check_members(name, key, tensors[key], params, leaves)
        if active is not None and active.shape != size:
            raise BatchSizeError(
                f"{name}.update: active must have the batch size of params.",
                expected=f"shape {list(size)}",
                got=f"shape {list(active.shape)}",
                hint="params.with_batch_size([members]), if the leaves are stacked and the tree has no batch size.",
            )
        run = Run(self.rule, self.hyper, step, tensors, active, donate, lambda: list(map(dotted, list_paths(params))))
        new, new_slots = run.step(leaves, gradients, slots)
        data = {key: rebuild(node, new_slots[key]) if key in new_slots else node for key, node in state._data.items()}
        if active is not None:
            data["step"] = step + active
        # Kept expanded, under a compiler too: a state of other strides would be compiled for again.
        elif step.dim() and 0 not in size and (is_compiling() or not in_functorch()) and not any(step.stride()):
            data["step"] = (step[(0,) * step.dim()] + 1).expand(step.shape)
        else:
            data["step"] = step + 1
        return rebuild(params, new), state._make(data, size, state._device, state._names, state._static)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.hyper.items() if isinstance(value, Tensor)}


def _shown(value: Hyper) -> str:
    if isinstance(value, Tensor):
        return f"tensor of shape {list(value.shape)}" if value.dim() else f"{value.item():g}"
    return "<a function>" if callable(value) else f"{value:g}"
