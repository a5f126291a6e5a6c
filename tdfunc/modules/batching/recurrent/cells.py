"""One step of an LSTM, GRU or RNN, by operations that torch can batch and differentiate any number of times.

A step gets the share of the inputs, which is computed for many steps at once, and adds the share of the state. G is the
size of all gates: 4 H for an LSTM, 3 H for a GRU, H for an RNN. Tensors may have further dimensions in front, for
members.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class Weights(NamedTuple):
    """The weights of one direction of one layer, as torch names them."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    # The projection of an LSTM's output.
    hr: Tensor | None = None

    @classmethod
    def of(cls, flat: tuple[Tensor, ...], *, has_biases: bool) -> "Weights":
        """Return the weights of torch's list for one direction of one layer."""
        if not has_biases:
            return cls(flat[0], flat[1], hr=flat[2] if len(flat) > 2 else None)
        return cls(flat[0], flat[1], flat[2], flat[3], flat[4] if len(flat) > 4 else None)

    def given(self) -> tuple[Tensor, ...]:
        """Return the weights that there are, in torch's order."""
        return tuple([weight for weight in self if weight is not None])


# The state of a layer: h, and c of an LSTM.
State: TypeAlias = tuple[Tensor, ...]
Step: TypeAlias = Callable[[Tensor, State, Weights], State]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x (..., N, I) times weights (..., G, I), plus a bias (..., G)."""
    product = x @ weight.mT
    if bias is None:
        return product
    return product + bias.unsqueeze(-2)


def lstm_step(inputs: Tensor, state: State, weights: Weights) -> State:
    """Return h and c of an LSTM after a step."""
    gates = inputs + linear(state[0], weights.hh, weights.bias_hh)
    enter, forget, new, leave = gates.chunk(4, -1)
    c = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
    h = leave.sigmoid() * c.tanh()
    if weights.hr is not None:
        h = linear(h, weights.hr, None)
    return h, c


def gru_step(inputs: Tensor, state: State, weights: Weights) -> State:
    """Return h of a GRU after a step."""
    of_inputs = inputs.chunk(3, -1)
    of_state = linear(state[0], weights.hh, weights.bias_hh).chunk(3, -1)
    reset = (of_inputs[0] + of_state[0]).sigmoid()
    update = (of_inputs[1] + of_state[1]).sigmoid()
    new = (of_inputs[2] + reset * of_state[2]).tanh()
    return (new + update * (state[0] - new),)


def rnn_tanh_step(inputs: Tensor, state: State, weights: Weights) -> State:
    """Return h of an RNN with tanh after a step."""
    return ((inputs + linear(state[0], weights.hh, weights.bias_hh)).tanh(),)


def rnn_relu_step(inputs: Tensor, state: State, weights: Weights) -> State:
    """Return h of an RNN with ReLU after a step."""
    return (torch.relu(inputs + linear(state[0], weights.hh, weights.bias_hh)),)


STEPS: dict[str, Step] = {
    "lstm": lstm_step,
    "gru": gru_step,
    "rnn_tanh": rnn_tanh_step,
    "rnn_relu": rnn_relu_step,
}


def run_steps(
    step: Step, data: Tensor, sizes: list[int], state: State, weights: Weights, *, reverse: bool
) -> tuple[Tensor, State]:
    """Return a layer's outputs in one direction, and its last state.

    Args:
        step: The step of the kind of layer.
        data: The inputs of all times, one after the other: (..., S, I).
        sizes: The number of sequences that have an input at each time, never growing; they sum to S.
        state: The first state (..., B, H) of every sequence.
        weights: The weights.
        reverse: Begin with the last time.
    """
    parts = linear(data, weights.ih, weights.bias_ih).split(sizes, -2)
    order = range(len(sizes))
    if reverse:
        order = order[::-1]
    first = state
    size = sizes[order[0]]
    state = tuple([tensor.narrow(-2, 0, size) for tensor in first])
    outputs = list(parts)
    # The last states of sequences that end before others.
    ended: list[State] = []
    for time in order:
        if sizes[time] < size:
            ended.append(tuple([tensor.narrow(-2, sizes[time], size - sizes[time]) for tensor in state]))
            state = tuple([tensor.narrow(-2, 0, sizes[time]) for tensor in state])
        elif sizes[time] > size:
            begun = [tensor.narrow(-2, size, sizes[time] - size) for tensor in first]
            state = tuple([torch.cat(pair, -2) for pair in zip(state, begun, strict=True)])
        size = sizes[time]
        state = step(parts[time], state, weights)
        outputs[time] = state[0]
    if ended:
        state = tuple([torch.cat(rows, -2) for rows in zip(state, *ended[::-1], strict=True)])
    return torch.cat(outputs, -2), state
