"""Kernels for a layer of stacked members: one product for the inputs of all times, and one batched product a step.

M is the number of members, T of times, B of sequences; I is the size of an input, H of a state, G of all gates. Members
run in blocks, whose buffers stay in the cache and are memory that the process has already.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_aten = torch.ops.aten
# Of one block's gates at all times.
_BLOCK_BYTES = 8 << 20


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
        run: Runs a block of members: writes its outputs, and returns its last state and what is saved.
        run_back: Returns a block's gradients of the gates, as the inputs and the state made them, and of the state.
        saved_sizes: The sizes of what is saved, (members, T, B, n * H) each, as multiples n.
    """

    run: Callable[[Tensor, list[Tensor], list[Tensor], Tensor, range], list[Tensor]]
    run_back: Callable[[list[Tensor], list[Tensor], list[Tensor], list[Tensor], range], list[Tensor]]
    saved_sizes: tuple[int, ...]

    def forward(
        self, x: Tensor, state: list[Tensor], weights: list[Tensor], reverse: bool, saves: bool
    ) -> list[Tensor]:
        """Run the layer."""
        members, times, rows = x.shape[:3]
        order = _order(times, reverse)
        out = x.new_empty(members, times, rows, state[0].shape[-1])
        found: list[list[Tensor]] = []
        for block in _blocks(out):
            part = self.run(x[block], _rows(state, block), _rows(weights, block), out[block], order)
            found.append(part if saves else part[: len(state)])
        columns = list(zip(*found, strict=True))
        last = [torch.cat(parts) for parts in columns[: len(state)]]
        # Joined, what is saved would be copied.
        saved = [tensor for parts in columns[len(state) :] for tensor in parts]
        return [out, *last, *saved]

    def like(self, x: Tensor, state: list[Tensor], weights: list[Tensor], saves: bool) -> list[Tensor]:
        """Return tensors without values, laid out as the results of `forward`."""
        members, times, rows = x.shape[:3]
        size = state[0].shape[-1]
        out = x.new_empty(members, times, rows, size)
        last = [x.new_empty(members, rows, size) for _ in state]
        sizes = self.saved_sizes if saves else ()
        saved = [out[block].new_empty(len(out[block]), times, rows, n * size) for n in sizes for block in _blocks(out)]
        return [out, *last, *saved]

    def backward(
        self, grads: list[Tensor], x: Tensor, state: list[Tensor], weights: list[Tensor], results: list[Tensor],
        reverse: bool, of_inputs: bool,
    ) -> list[Tensor]:  # fmt: skip
        """Return the gradients of x, the state and the weights."""
        made = 1 + len(state)
        blocks = _blocks(results[0])
        found: list[list[Tensor]] = []
        for i, block in enumerate(blocks):
            given = (x[block], _rows(state, block), _rows(weights, block))
            saved = results[made + i :: len(blocks)]
            found.append(self._block_back(_rows(grads, block), *given, [results[0][block], *saved], reverse, of_inputs))
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def _block_back(
        self, grads: list[Tensor], x: Tensor, state: list[Tensor], weights: list[Tensor], results: list[Tensor],
        reverse: bool, of_inputs: bool,
    ) -> list[Tensor]:  # fmt: skip
        """Return a block's gradients."""
        order = _order(x.shape[1], not reverse)
        of_gates, of_state_gates, *of_state = self.run_back(grads, state, weights, results, order)
        before = _before(results[0], state[0], reverse).flatten(1, 2)
        found = [*of_state, of_gates.mT @ x.flatten(1, 2), of_state_gates.mT @ before]
        if len(weights) > 2:
            found += [of_gates.sum(1), of_state_gates.sum(1)]
        if of_inputs:
            found.insert(0, (of_gates @ weights[0]).view(x.shape))
        return found

    def repeat(self, saved: Sequence[Tensor], inner: int, count: int) -> list[Tensor]:
        """Return what was saved of members that share it."""
        found: list[Tensor] = []
        blocks = len(saved) // max(len(self.saved_sizes), 1)
        for i in range(len(self.saved_sizes)):
            joined = torch.cat(list(saved[i * blocks : (i + 1) * blocks]))
            shared = joined.unflatten(0, (-1, 1, inner)).expand(-1, count, -1, *joined.shape[1:])
            whole = shared.flatten(0, 2)
            found += [whole[block] for block in _blocks(whole[..., : whole.shape[-1] // self.saved_sizes[i]])]
        return found


def _blocks(out: Tensor) -> list[slice]:
    """Return the blocks of members of a layer with outputs (M, T, B, H)."""
    members = len(out)
    size_bytes = 4 * out.element_size() * out[0].numel()
    count = max(1, _BLOCK_BYTES // max(size_bytes, 1))
    return [slice(start, min(start + count, members)) for start in range(0, members, count)]


def _rows(tensors: list[Tensor], block: slice) -> list[Tensor]:
    return [tensor[block] for tensor in tensors]


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


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write x (M, N, I) times weights (M, G, I), plus a bias (M, G); on memory without gaps it is fastest."""
    if bias is None:
        return torch.bmm(x, weight.mT, out=out)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT, out=out)


def _sum_biases(weights: Sequence[Tensor]) -> Tensor | None:
    return weights[2] + weights[3] if len(weights) > 2 else None


def _derive_tanh(grad: Tensor, y: Tensor, out: Tensor) -> None:
    _aten.tanh_backward.grad_input(grad, y, grad_input=out)


def _derive_sigmoid(grad: Tensor, y: Tensor, out: Tensor) -> None:
    _aten.sigmoid_backward.grad_input(grad, y, grad_input=out)


def _derive_relu(grad: Tensor, y: Tensor, out: Tensor) -> None:
    _aten.threshold_backward.grad_input(grad, y, 0, grad_input=out)


# -- RNN ------------------------------------------------------------------------------------------------------------


def _rnn(activate: Callable[[Tensor], Any]) -> Any:
    def run(x: Tensor, state: list[Tensor], weights: list[Tensor], out: Tensor, order: range) -> list[Tensor]:
        _product(x.flatten(1, 2), weights[0], _sum_biases(weights), out.flatten(1, 2))
        steps = out.unbind(1)
        h = state[0]
        share = torch.empty_like(h, memory_format=torch.contiguous_format)
        for time in order:
            h = steps[time].add_(_product(h, weights[1], None, share))
            activate(h)
        return [h.clone()]

    return run


def _rnn_back(derive: Callable[[Tensor, Tensor, Tensor], Any]) -> Any:
    def run(
        grads: list[Tensor], state: list[Tensor], weights: list[Tensor], results: list[Tensor], order: range
    ) -> list[Tensor]:
        (out,) = results
        of_gates = torch.empty_like(out)
        of_steps = of_gates.unbind(1)
        of_outputs = grads[0].unbind(1)
        of_h = grads[1].clone(memory_format=torch.contiguous_format)
        for time in order:
            of_h += of_outputs[time]
            derive(of_h, out[:, time], of_steps[time])
            torch.bmm(of_steps[time], weights[1], out=of_h)
        gates = of_gates.flatten(1, 2)
        return [gates, gates, of_h]

    return run


# -- LSTM -----------------------------------------------------------------------------------------------------------


def _lstm(x: Tensor, state: list[Tensor], weights: list[Tensor], out: Tensor, order: range) -> list[Tensor]:
    h, c = state
    size = h.shape[-1]
    gates = x.new_empty(*out.shape[:-1], 4 * size)
    cs = torch.empty_like(out)
    bounded = torch.empty_like(out)
    _product(x.flatten(1, 2), weights[0], _sum_biases(weights), gates.flatten(1, 2))
    share = x.new_empty(*h.shape[:-1], 4 * size)
    for time in order:
        step = gates[:, time].add_(_product(h, weights[1], None, share))
        step[..., : 2 * size].sigmoid_()
        step[..., 2 * size : 3 * size].tanh_()
        step[..., 3 * size :].sigmoid_()
        enter, forget, new, leave = step.split(size, -1)
        c = torch.mul(forget, c, out=cs[:, time]).addcmul_(enter, new)
        torch.tanh(c, out=bounded[:, time])
        h = torch.mul(leave, bounded[:, time], out=out[:, time])
    return [h.clone(), c.clone(), gates, cs, bounded]


def _lstm_back(
    grads: list[Tensor], state: list[Tensor], weights: list[Tensor], results: list[Tensor], order: range
) -> list[Tensor]:
    _, gates, cs, bounded = results
    size = state[0].shape[-1]
    of_gates = torch.empty_like(gates)
    of_outputs = grads[0].unbind(1)
    of_h, of_c = [grad.clone(memory_format=torch.contiguous_format) for grad in grads[1:]]
    part = torch.empty_like(of_h)
    for i, time in enumerate(order):
        of_h += of_outputs[time]
        of_step = of_gates[:, time]
        enter, forget, new, leave = gates[:, time].split(size, -1)
        of_enter, of_forget, of_new, of_leave = of_step.split(size, -1)
        c_before = state[1] if i + 1 == len(order) else cs[:, order[i + 1]]
        _derive_sigmoid(torch.mul(of_h, bounded[:, time], out=part), leave, of_leave)
        _derive_tanh(torch.mul(of_h, leave, out=part), bounded[:, time], part)
        of_c += part
        _derive_sigmoid(torch.mul(of_c, new, out=part), enter, of_enter)
        _derive_sigmoid(torch.mul(of_c, c_before, out=part), forget, of_forget)
        _derive_tanh(torch.mul(of_c, enter, out=part), new, of_new)
        of_c *= forget
        torch.bmm(of_step, weights[1], out=of_h)
    of_all = of_gates.flatten(1, 2)
    return [of_all, of_all, of_h, of_c]


# -- GRU ------------------------------------------------------------------------------------------------------------


def _gru(x: Tensor, state: list[Tensor], weights: list[Tensor], out: Tensor, order: range) -> list[Tensor]:
    (h,) = state
    size = h.shape[-1]
    bias, state_bias = weights[2:] or (None, None)
    gates = x.new_empty(*out.shape[:-1], 3 * size)
    _product(x.flatten(1, 2), weights[0], bias, gates.flatten(1, 2))
    # The state's share of new, which the gate `reset` multiplies.
    of_states = torch.empty_like(out)
    share = x.new_empty(*h.shape[:-1], 3 * size)
    for time in order:
        step = gates[:, time]
        _product(h, weights[1], state_bias, share)
        step[..., : 2 * size].add_(share[..., : 2 * size]).sigmoid_()
        of_state = of_states[:, time].copy_(share[..., 2 * size :])
        reset, update, new = step.split(size, -1)
        new.addcmul_(reset, of_state).tanh_()
        h = torch.lerp(new, h, update, out=out[:, time])
    return [h.clone(), gates, of_states]


def _gru_back(
    grads: list[Tensor], state: list[Tensor], weights: list[Tensor], results: list[Tensor], order: range
) -> list[Tensor]:
    out, gates, of_states = results
    size = state[0].shape[-1]
    # Four parts: new of the inputs, reset, update, new of the state. The inputs' gradient is the first three, the
    # state's the last three, each without a gap.
    of_gates = out.new_empty(*out.shape[:-1], 4 * size)
    of_outputs = grads[0].unbind(1)
    of_h = grads[1].clone(memory_format=torch.contiguous_format)
    part = torch.empty_like(of_h)
    for i, time in enumerate(order):
        of_h += of_outputs[time]
        of_step = of_gates[:, time]
        reset, update, new = gates[:, time].split(size, -1)
        of_new, of_reset, of_update, of_new_of_state = of_step.split(size, -1)
        before = state[0] if i + 1 == len(order) else out[:, order[i + 1]]
        _derive_sigmoid(torch.sub(before, new, out=part).mul_(of_h), update, of_update)
        torch.mul(of_h, update, out=part)
        of_h -= part
        _derive_tanh(of_h, new, of_new)
        torch.mul(of_new, reset, out=of_new_of_state)
        _derive_sigmoid(torch.mul(of_new, of_states[:, time], out=of_h), reset, of_reset)
        torch.baddbmm(part, of_step[..., size:], weights[1], out=of_h)
    of_all = of_gates.flatten(1, 2)
    # In torch's order, reset and update come first.
    of_inputs = of_all[..., : 3 * size].roll(-size, -1)
    return [of_inputs, of_all[..., size:], of_h]


FOLDED: dict[str, Kernel] = {
    "lstm": Folded(_lstm, _lstm_back, (4, 1, 1)),
    "gru": Folded(_gru, _gru_back, (3, 1)),
    "rnn_tanh": Folded(_rnn(Tensor.tanh_), _rnn_back(_derive_tanh), ()),
    "rnn_relu": Folded(_rnn(Tensor.relu_), _rnn_back(_derive_relu), ()),
}
