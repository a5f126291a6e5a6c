"""The rules for torch's recurrent functions: layers, with padded or packed inputs, and single cells."""

from typing import Any

import torch
from torch import Tensor

from tdfunc.modules.batching.recurrent.calls import Call, parse, run_layers
from tdfunc.modules.batching.recurrent.cells import (
    State,
    Step,
    Weights,
    gru_step,
    linear,
    lstm_step,
    rnn_relu_step,
    rnn_tanh_step,
    run_steps,
)
from tdfunc.modules.batching.recurrent.levels import is_batched
from tdfunc.modules.batching.rule import Rule


def _layers_rule(step: Step) -> Rule:
    """Return the rule for a function that runs layers of a kind."""

    def run(mode: Any, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        call = parse(args, kwargs)
        # A mask of dropout can be the first tensor that differs by member.
        if not (call.drops or is_batched(*call.tensors())) or not _fits(call):
            return func(*args, **kwargs)

        def layer(data: Tensor, state: State, weights: list[tuple[Tensor, ...]]) -> tuple[Tensor, State]:
            outs: list[Tensor] = []
            lasts: list[State] = []
            for direction, group in enumerate(weights):
                first = tuple([tensor[direction] for tensor in state])
                own = Weights.of(group, has_biases=call.has_biases)
                out, last = _run_direction(step, call, data, first, own, reverse=direction == 1)
                outs.append(out)
                lasts.append(last)
            out = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
            return out, tuple([torch.stack(parts) for parts in zip(*lasts, strict=True)])

        return call.result(*run_layers(call, layer))

    return run


def _fits(call: Call) -> bool:
    """Return whether the shapes are the ones that a rule expects; torch's function reports others."""
    if call.batch_sizes is not None:
        return call.data.dim() == 2 and call.data.numel() > 0
    if call.data.dim() != 3 or not call.data.shape[0]:
        return False
    return all([tensor.dim() == 3 and tensor.shape[1] == call.data.shape[1] for tensor in call.state])


def _run_direction(
    step: Step, call: Call, data: Tensor, state: State, weights: Weights, *, reverse: bool
) -> tuple[Tensor, State]:
    """Return the outputs and the last state of one direction of one layer."""
    if call.batch_sizes is not None:
        return run_steps(step, data, call.batch_sizes.tolist(), state, weights, reverse=reverse)
    times, rows = data.shape[:2]
    out, last = run_steps(step, data.flatten(0, 1), [rows] * times, state, weights, reverse=reverse)
    return out.unflatten(0, (times, rows)), last


def _cell_rule(step: Step) -> Rule:
    """Return the rule for a function that runs one step."""

    def run(
        mode: Any, func: Any, /, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:  # fmt: skip
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        weights = Weights(w_ih, w_hh, b_ih, b_hh)
        if not is_batched(input, *state, *weights.given()):
            return func(input, hx, w_ih, w_hh, b_ih, b_hh)
        new = step(linear(input, w_ih, b_ih), state, weights)
        return new[0] if isinstance(hx, Tensor) else new

    return run


RULES: dict[Any, Rule] = {
    torch.lstm: _layers_rule(lstm_step),
    torch.gru: _layers_rule(gru_step),
    torch.rnn_tanh: _layers_rule(rnn_tanh_step),
    torch.rnn_relu: _layers_rule(rnn_relu_step),
    torch.lstm_cell: _cell_rule(lstm_step),
    torch.gru_cell: _cell_rule(gru_step),
    torch.rnn_tanh_cell: _cell_rule(rnn_tanh_step),
    torch.rnn_relu_cell: _cell_rule(rnn_relu_step),
}
