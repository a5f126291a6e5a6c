"""Kernels for a layer of stacked members: one product for the inputs of all times, and one batched product a step.

M is the number of members, T of times, B of sequences; I is the size of an input, H of a state, G of all gates. Buffers
have the time first, so that a step reads and writes memory without gaps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_aten = torch.ops.aten


class Kernel(Protocol):
    """How one direction of a layer runs for stacked members.

    x is (M, T, B, I), a state (M, B, H), weights are (M, ...) in torch's order, with or without biases. The results of
    `forward` are the outputs (M, T, B, H), the last state, and, if `saves`, tensors that only `backward` reads.
    """

    def forward(
        self, x: Tensor, state: list[Tensor], weights: list[Tensor], reverse: bool, saves: bool
    ) -> list[Tensor]:
        """Run the layer."""
        ...

    def like(self, x: Tensor, state: list[Tensor], weights: list[Tensor], saves: bool) -> list[Tensor]:
        """Return tensors without values, laid out as the results of `forward`."""
        ...

    def backward(
        self, grads: list[Tensor], x: Tensor, state: list[Tensor], weights: list[Tensor], results: list[Tensor],
        reverse: bool, of_inputs: bool,
    ) -> list[Tensor]:  # fmt: skip
        """Return the gradients of x, the state and the weights; `grads` belong to the outputs and the last state."""
        ...

    def repeat(self, saved: Sequence[Tensor], inner: int, count: int) -> list[Tensor]:
        """Return what was saved of members (O * inner), for members (O, count, inner) that share it."""
        ...


@dataclass(frozen=True)
class Folded:
    """A kernel made of the loop over times of one kind of layer, in which gradients flow back by formulas.

    Attributes:
        run: Runs all times.
        run_back: Runs all times back.
        saved_sizes: The sizes of buffers that are saved, in multiples of H.
    """

    run: Callable[..., list[Tensor]]
    run_back: Callable[..., list[Tensor]]
    saved_sizes: tuple[int, ...]

    def forward(
        self, x: Tensor, state: list[Tensor], weights: list[Tensor], reverse: bool, saves: bool
    ) -> list[Tensor]:
        """Run the layer."""
        results = self.run(x, state, weights, _order(x.shape[1], reverse))
        if saves:
            return results
        return results[: 1 + len(state)]

    def like(self, x: Tensor, state: list[Tensor], weights: list[Tensor], saves: bool) -> list[Tensor]:
        """Return tensors without values, laid out as the results of `forward`."""
        members, times, rows = x.shape[:3]
        size = state[0].shape[-1]
        out = x.new_empty(times, members, rows, size).transpose(0, 1)
        last = [x.new_empty(members, rows, size) for _ in state]
        sizes = self.saved_sizes if saves else ()
        return [out, *last, *[x.new_empty(times, members, rows, n * size) for n in sizes]]

    def backward(
        self, grads: list[Tensor], x: Tensor, state: list[Tensor], weights: list[Tensor], results: list[Tensor],
        reverse: bool, of_inputs: bool,
    ) -> list[Tensor]:  # fmt: skip
        """Return the gradients of x, the state and the weights."""
        order = _order(x.shape[1], not reverse)
        of_gates, of_state_gates, *of_state = self.run_back(grads, state, weights, results, order)
        flat_x = x.flatten(1, 2)
        before = _before(results[0], state[0], reverse).flatten(1, 2)
        found = [*of_state, of_gates.mT @ flat_x, of_state_gates.mT @ before]
        if len(weights) > 2:
            found += [of_gates.sum(1), of_state_gates.sum(1)]
        if of_inputs:
            found.insert(0, (of_gates @ weights[0]).view(x.shape))
        return found

    def repeat(self, saved: Sequence[Tensor], inner: int, count: int) -> list[Tensor]:
        """Return what was saved of members that share it."""
        found: list[Tensor] = []
        for tensor in saved:
            blocks = tensor.unflatten(1, (-1, 1, inner))
            found.append(blocks.expand(-1, -1, count, *blocks.shape[3:]).flatten(1, 3))
        return found


def _order(times: int, reverse: bool) -> range:
    if reverse:
        return range(times - 1, -1, -1)
    return range(times)


def _before(out: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """Return the state (M, T, B, H) that each step began with."""
    first = first.unsqueeze(1)
    if reverse:
        return torch.cat([out[:, 1:], first], 1)
    return torch.cat([first, out[:, :-1]], 1)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the inputs' share of all gates, (M, T * B, G)."""
    flat = x.flatten(1, 2)
    if bias is None:
        return torch.bmm(flat, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), flat, weight.mT)


def _by_time(gates: Tensor, times: int) -> Tensor:
    """Return gates (M, T * B, G) as (T, M, B, G)."""
    return gates.unflatten(1, (times, -1)).transpose(0, 1).contiguous()


def _by_member(gates: Tensor) -> Tensor:
    """Return gates (T, M, B, G) as (M, T * B, G)."""
    return gates.transpose(0, 1).flatten(1, 2)


def _sum_biases(weights: Sequence[Tensor]) -> Tensor | None:
    return weights[2] + weights[3] if len(weights) > 2 else None


# -- RNN ------------------------------------------------------------------------------------------------------------


def _rnn(activate: Callable[[Tensor], Any]) -> Callable[..., list[Tensor]]:
    def run(x: Tensor, state: list[Tensor], weights: list[Tensor], order: range) -> list[Tensor]:
        steps = _by_time(_project(x, weights[0], _sum_biases(weights)), len(order))
        recurrent = weights[1].mT
        h = state[0]
        for time in order:
            h = steps[time].baddbmm_(h, recurrent)
            activate(h)
        return [steps.transpose(0, 1), h.clone()]

    return run


def _rnn_back(derive: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[..., list[Tensor]]:
    def run(
        grads: list[Tensor], state: list[Tensor], weights: list[Tensor], results: list[Tensor], order: range
    ) -> list[Tensor]:
        steps = results[0].transpose(0, 1)
        of_steps = torch.empty_like(steps, memory_format=torch.contiguous_format)
        of_outputs = grads[0].unbind(1)
        of_h = grads[1].clone()
        for time in order:
            of_h += of_outputs[time]
            derive(of_h, steps[time], of_steps[time])
            torch.bmm(of_steps[time], weights[1], out=of_h)
        gates = _by_member(of_steps)
        return [gates, gates, of_h]

    return run


def _derive_tanh(grad: Tensor, y: Tensor, out: Tensor) -> None:
    _aten.tanh_backward.grad_input(grad, y, grad_input=out)


def _derive_sigmoid(grad: Tensor, y: Tensor, out: Tensor) -> None:
    _aten.sigmoid_backward.grad_input(grad, y, grad_input=out)


def _derive_relu(grad: Tensor, y: Tensor, out: Tensor) -> None:
    _aten.threshold_backward.grad_input(grad, y, 0, grad_input=out)


# -- LSTM -----------------------------------------------------------------------------------------------------------


def _lstm(x: Tensor, state: list[Tensor], weights: list[Tensor], order: range) -> list[Tensor]:
    gates = _by_time(_project(x, weights[0], _sum_biases(weights)), len(order))
    recurrent = weights[1].mT
    h, c = state
    size = h.shape[-1]
    hs, cs, bounded = [x.new_empty(len(order), *h.shape) for _ in range(3)]
    for time in order:
        gates[time].baddbmm_(h, recurrent)
        enter, forget, new, leave = gates[time].split(size, -1)
        gates[time][..., : 2 * size].sigmoid_()
        new.tanh_()
        leave.sigmoid_()
        c = torch.mul(forget, c, out=cs[time]).addcmul_(enter, new)
        torch.tanh(c, out=bounded[time])
        h = torch.mul(leave, bounded[time], out=hs[time])
    return [hs.transpose(0, 1), h.clone(), c.clone(), gates, cs, bounded]


def _lstm_back(
    grads: list[Tensor], state: list[Tensor], weights: list[Tensor], results: list[Tensor], order: range
) -> list[Tensor]:
    gates, cs, bounded = results[3:]
    size = state[0].shape[-1]
    of_gates = torch.empty_like(gates)
    of_outputs = grads[0].unbind(1)
    of_h = grads[1].clone()
    of_c = grads[2].clone()
    part = torch.empty_like(of_h)
    for i, time in enumerate(order):
        of_h += of_outputs[time]
        enter, forget, new, leave = gates[time].split(size, -1)
        of_enter, of_forget, of_new, of_leave = of_gates[time].split(size, -1)
        c_before = state[1] if i + 1 == len(order) else cs[order[i + 1]]
        _derive_sigmoid(torch.mul(of_h, bounded[time], out=part), leave, of_leave)
        _derive_tanh(torch.mul(of_h, leave, out=part), bounded[time], part)
        of_c += part
        _derive_sigmoid(torch.mul(of_c, new, out=part), enter, of_enter)
        _derive_sigmoid(torch.mul(of_c, c_before, out=part), forget, of_forget)
        _derive_tanh(torch.mul(of_c, enter, out=part), new, of_new)
        of_c *= forget
        torch.bmm(of_gates[time], weights[1], out=of_h)
    of_all = _by_member(of_gates)
    return [of_all, of_all, of_h, of_c]


# -- GRU ------------------------------------------------------------------------------------------------------------


def _gru(x: Tensor, state: list[Tensor], weights: list[Tensor], order: range) -> list[Tensor]:
    (h,) = state
    size = h.shape[-1]
    # A block of four: new of the inputs, reset, update, new of the state. The inputs' share is the first three, the
    # state's the last three, each without a gap.
    block = x.new_empty(len(order), *h.shape[:-1], 4 * size)
    bias = None
    if len(weights) > 2:
        # The biases of reset and update are added to the inputs' share.
        bias = weights[2].clone()
        bias[:, : 2 * size] += weights[3][:, : 2 * size]
        bias = bias.roll(size, -1)
        block[..., 3 * size :] = weights[3][:, None, 2 * size :]
    else:
        block[..., 3 * size :] = 0
    inputs = _project(x, weights[0].roll(size, 1), bias)
    block[..., : 3 * size] = inputs.unflatten(1, (len(order), -1)).transpose(0, 1)
    recurrent = weights[1].mT
    hs = x.new_empty(len(order), *h.shape)
    for time in order:
        new, reset, update, new_of_state = block[time].split(size, -1)
        block[time][..., size:].baddbmm_(h, recurrent)
        block[time][..., size : 3 * size].sigmoid_()
        new.addcmul_(reset, new_of_state).tanh_()
        h = torch.lerp(new, h, update, out=hs[time])
    return [hs.transpose(0, 1), h.clone(), block]


def _gru_back(
    grads: list[Tensor], state: list[Tensor], weights: list[Tensor], results: list[Tensor], order: range
) -> list[Tensor]:
    hs = results[0].transpose(0, 1)
    block = results[2]
    size = state[0].shape[-1]
    of_block = torch.empty_like(block)
    of_outputs = grads[0].unbind(1)
    of_h = grads[1].clone()
    part = torch.empty_like(of_h)
    for i, time in enumerate(order):
        of_h += of_outputs[time]
        new, reset, update, new_of_state = block[time].split(size, -1)
        of_new, of_reset, of_update, of_new_of_state = of_block[time].split(size, -1)
        before = state[0] if i + 1 == len(order) else hs[order[i + 1]]
        _derive_sigmoid(torch.sub(before, new, out=part).mul_(of_h), update, of_update)
        torch.mul(of_h, update, out=part)
        of_h -= part
        _derive_tanh(of_h, new, of_new)
        torch.mul(of_new, reset, out=of_new_of_state)
        _derive_sigmoid(torch.mul(of_new, new_of_state, out=of_h), reset, of_reset)
        torch.baddbmm(part, of_block[time][..., size:], weights[1], out=of_h)
    of_all = _by_member(of_block)
    # In torch's order, reset and update come first.
    of_inputs = of_all[..., : 3 * size].roll(-size, -1)
    return [of_inputs, of_all[..., size:], of_h]


FOLDED: dict[str, Kernel] = {
    "lstm": Folded(_lstm, _lstm_back, (4, 1, 1)),
    "gru": Folded(_gru, _gru_back, (4,)),
    "rnn_tanh": Folded(_rnn(Tensor.tanh_), _rnn_back(_derive_tanh), ()),
    "rnn_relu": Folded(_rnn(Tensor.relu_), _rnn_back(_derive_relu), ()),
}
