"""A layer of stacked members as two functions of autograd, with the members of all levels of vmap in one dimension.

Its derivative is a second function, since vmap of a gradient needs a rule for it. Second derivatives differentiate the
steps of `cells`. Both run as operators of torch, in a namespace of ours, so that a trace has one node for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from tdfunc.modules.batching.fold import takes_gradient, to_front
from tdfunc.modules.batching.recurrent.cells import STEPS, State, Weights, run_steps
from tdfunc.modules.batching.recurrent.fold import FOLDED, Kernel
from tdfunc.modules.batching.recurrent.levels import (
    NO_LEVEL,
    level_of,
    unwrap_batch,
    unwrap_gradient,
    wrap_batch,
)
from tdfunc.modules.batching.recurrent.onednn import OneDnnLstm
from tdfunc.modules.operators import define

_KERNELS: dict[str, Kernel] = {**FOLDED, "lstm_onednn": OneDnnLstm()}


def _run(
    kernel: str, x: Tensor, state: list[Tensor], weights: list[Tensor], reverse: bool, saves: bool
) -> list[Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return _KERNELS[kernel].forward(x, state, weights, reverse, saves)


def _like(
    kernel: str, x: Tensor, state: list[Tensor], weights: list[Tensor], reverse: bool, saves: bool
) -> list[Tensor]:
    return _KERNELS[kernel].like(x, state, weights, saves)


def _run_back(
    kernel: str, grads: list[Tensor], x: Tensor, state: list[Tensor], weights: list[Tensor], results: list[Tensor],
    reverse: bool, of_inputs: bool,
) -> list[Tensor]:  # fmt: skip
    with torch._C._AutoDispatchBelowAutograd():
        return _KERNELS[kernel].backward(grads, x, state, weights, results, reverse, of_inputs)


def _like_back(
    kernel: str, grads: list[Tensor], x: Tensor, state: list[Tensor], weights: list[Tensor], results: list[Tensor],
    reverse: bool, of_inputs: bool,
) -> list[Tensor]:  # fmt: skip
    given = [*([x] if of_inputs else []), *state, *weights]
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in given]


_TENSORS = "Tensor x, Tensor[] state, Tensor[] weights"
_layer = define(f"recurrent_layer(str kernel, {_TENSORS}, bool reverse, bool saves) -> Tensor[]", _run, _like)
_layer_backward = define(
    f"recurrent_layer_backward(str kernel, Tensor[] grads, {_TENSORS}, Tensor[] results, bool reverse, bool of_inputs)"
    " -> Tensor[]",
    _run_back,
    _like_back,
)


@dataclass(frozen=True)
class _Plan:
    """What a call has besides tensors: x (M, T, B, I), states (M, B, H) and weights (M, ...), in this order."""

    kernel: str
    states: int
    weights: int
    reverse: bool
    saves: bool
    # The gradient of x is wanted.
    of_inputs: bool = True

    @property
    def given(self) -> int:
        """The number of tensors that the layer gets."""
        return 1 + self.states + self.weights

    @property
    def made(self) -> int:
        """The number of results that gradients come from: the outputs and the last state."""
        return 1 + self.states

    def split(self, given: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return x, the state and the weights."""
        return given[0], list(given[1 : self.made]), list(given[self.made :])


class _Layer(Function):
    @staticmethod
    def forward(plan: _Plan, *given: Tensor) -> tuple[Tensor, ...]:
        return tuple(_layer(plan.kernel, *plan.split(given), plan.reverse, plan.saves))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        plan, *given = inputs
        ctx.plan = plan
        ctx.save_for_backward(*given, *output)
        ctx.mark_non_differentiable(*output[plan.made :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan = replace(ctx.plan, of_inputs=ctx.needs_input_grad[1])
        given = ctx.saved_tensors[: plan.given]
        results = ctx.saved_tensors[plan.given :]
        known = [torch.zeros_like(y) if g is None else g for g, y in zip(grads, results[: plan.made], strict=False)]
        found = _Backward.apply(plan, *known, *given, *results)
        if plan.of_inputs:
            return None, *found
        return None, None, *found

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        plan, *given = args
        folded = _fold_all(given, in_dims[1:], info.batch_size)
        results = _Layer.apply(plan, *folded)
        made = [_unfold(y, info.batch_size) for y in results[: plan.made]]
        # What is saved has the members of all levels, and is the same for each of them.
        saved = results[plan.made :]
        return (*made, *saved), (*[0] * len(made), *[None] * len(saved))


class _Backward(Function):
    @staticmethod
    def forward(plan: _Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        grads = list(tensors[: plan.made])
        given = tensors[plan.made : plan.made + plan.given]
        results = list(tensors[plan.made + plan.given :])
        return tuple(_layer_backward(plan.kernel, grads, *plan.split(given), results, plan.reverse, plan.of_inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        plan, *tensors = inputs
        ctx.plan = plan
        ctx.results = len(tensors) - plan.made - plan.given
        ctx.save_for_backward(*tensors[: plan.made + plan.given])

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.plan

        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            pull = torch.func.vjp(lambda *given: _by_steps(plan, *given), *tensors[plan.made :])[1]
            found = pull(tensors[: plan.made])
            return found if plan.of_inputs else found[1:]

        pull = torch.func.vjp(gradients, *ctx.saved_tensors)[1]
        return None, *pull(outer), *[None] * ctx.results

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        plan, *tensors = args
        saved = tensors[2 * plan.made + plan.given :]
        # The number of members of the levels inside this one.
        inner = to_front(tensors[0], in_dims[1], info.batch_size).shape[1]
        if in_dims[1 + plan.made + plan.given] is None:
            # The layer ran outside of this level, as for the rows of a Jacobian.
            saved = _KERNELS[plan.kernel].repeat(saved, inner, info.batch_size)
        folded = _fold_all(tensors[: 2 * plan.made + plan.given], in_dims[1:], info.batch_size)
        found = _Backward.apply(plan, *folded, *saved)
        return tuple([_unfold(y, info.batch_size) for y in found]), (0,) * len(found)


def _fold_all(tensors: Sequence[Tensor], dims: tuple[int | None, ...], members: int) -> list[Tensor]:
    """Return tensors with the members of this level in front of the members of inner levels."""
    return [to_front(x, dim, members).flatten(0, 1) for x, dim in zip(tensors, dims, strict=False)]


def _unfold(tensor: Tensor, members: int) -> Tensor:
    return tensor.unflatten(0, (members, -1))


def _by_steps(plan: _Plan, *given: Tensor) -> tuple[Tensor, ...]:
    """Run a layer by operations that can be differentiated any number of times."""
    x, state, weights = plan.split(given)
    times, rows = x.shape[1:3]
    sizes = [rows] * times
    step = STEPS[plan.kernel.removesuffix("_onednn")]
    out, last = run_steps(step, x.flatten(1, 2), sizes, tuple(state), Weights(*weights), reverse=plan.reverse)
    return out.unflatten(1, (times, rows)), *last


def _run_plain(plan: _Plan, given: Sequence[Tensor]) -> list[Tensor]:
    """Run a layer whose gradient nobody wants, level by level of vmap; to call a function of autograd takes longer."""
    bare = [unwrap_gradient(tensor) for tensor in given]
    levels = [level_of(tensor) for tensor in bare]
    top = max(levels)
    if top == NO_LEVEL:
        return list(_layer(plan.kernel, *plan.split(tuple(bare)), plan.reverse, plan.saves))
    inner: list[Tensor] = []
    dims: list[int | None] = []
    for tensor, level in zip(bare, levels, strict=True):
        whole, dim = unwrap_batch(tensor) if level == top else (tensor, None)
        inner.append(whole)
        dims.append(dim)
    members = next(x.shape[dim] for x, dim in zip(inner, dims, strict=True) if dim is not None)
    results = _run_plain(plan, _fold_all(inner, tuple(dims), members))
    # A level of `grad` wraps the result of any operation.
    return [wrap_batch(unwrap_gradient(_unfold(y, members)), top) for y in results]


def run_layer(
    kernel: str, x: Tensor, state: State, weights: tuple[Tensor, ...], *, reverse: bool
) -> tuple[Tensor, State]:
    """Return the outputs (T, B, H) and the last state of one direction of a layer, for a member.

    Args:
        kernel: The name of a kernel.
        x: The inputs (T, B, I).
        state: The first state, each (B, H).
        weights: Two or four weights, in torch's order.
        reverse: Begin with the last time.
    """
    # A shared input is made contiguous once for all members.
    given = (x.contiguous(), *state, *weights)
    saves = torch.is_grad_enabled() and any(map(takes_gradient, given))
    plan = _Plan(kernel, len(state), len(weights), reverse, saves)
    stacked = [tensor.unsqueeze(0) for tensor in given]
    results = _Layer.apply(plan, *stacked) if saves else _run_plain(plan, stacked)
    out, *last = [y.squeeze(0) for y in results[: plan.made]]
    return out, tuple(last)
