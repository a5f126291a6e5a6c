"""The rules for torch's recurrent functions: layers, with padded or packed inputs, and single cells."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tdfunc.core.context import in_functorch, in_vmap, is_recording
from tdfunc.modules.batching.fold import is_batched
from tdfunc.modules.batching.recurrent.calls import Call, parse, run_layers
from tdfunc.modules.batching.recurrent.cells import STEPS, State, Step, Weights, linear, run_steps
from tdfunc.modules.batching.recurrent.layer import run_layer
from tdfunc.modules.batching.rule import Rule

# Of the kernels.
_DTYPES = (torch.float32, torch.float64)


def _layers_rule(kind: str) -> Rule:
    """Return the rule for a function that runs layers of a kind."""

    def run(mode: Any, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        call = parse(args, kwargs)
        if not _is_served(call) or not _fits(call):
            return func(*args, **kwargs)
        kernel = _kernel_of(kind, call)

        def layer(data: Tensor, state: State, weights: list[tuple[Tensor, ...]]) -> tuple[Tensor, State]:
            outs: list[Tensor] = []
            lasts: list[State] = []
            for direction, group in enumerate(weights):
                first = tuple([tensor[direction] for tensor in state])
                reverse = direction == 1
                if kernel is None:
                    out, last = _by_steps(STEPS[kind], call, data, first, group, reverse=reverse)
                else:
                    out, last = run_layer(kernel, data, first, group, reverse=reverse)
                outs.append(out)
                lasts.append(last)
            out = outs[0] if len(outs) == 1 else torch.cat(outs, -1)
            return out, tuple([torch.stack(parts) for parts in zip(*lasts, strict=True)])

        return call.result(*run_layers(call, layer))

    return run


def _is_served(call: Call) -> bool:
    """Return whether torch's function cannot run a call here."""
    # It reads the sizes of packed inputs by address, which no tensor has inside of transforms and traces.
    if call.batch_sizes is not None and (in_functorch() or is_recording()):
        return True
    # A mask of dropout can be the first tensor that differs by member.
    return (call.drops and in_vmap()) or is_batched(*call.tensors())


def _fits(call: Call) -> bool:
    """Return whether the shapes are the ones that a rule expects; torch's function reports others."""
    if call.batch_sizes is not None:
        return call.data.dim() == 2 and call.data.numel() > 0
    if call.data.dim() != 3 or not call.data.shape[0]:
        return False
    return all([tensor.dim() == 3 and tensor.shape[1] == call.data.shape[1] for tensor in call.state])


def _kernel_of(kind: str, call: Call) -> str | None:
    """Return the name of the kernel that computes a call and its gradients, or None if only steps can."""
    # Also in forward mode, the operations of steps are differentiated.
    if call.batch_sizes is not None or call.has_projections or forward_ad._current_level >= 0:
        return None
    tensors = call.tensors()
    dtype = call.data.dtype
    if not all([x.device.type == "cpu" and x.dtype == dtype and x.layout == torch.strided for x in tensors]):
        return None
    if dtype not in _DTYPES or not call.data.numel() or torch.is_autocast_enabled("cpu"):
        return None
    if kind == "lstm" and dtype == torch.float32 and torch._C._get_mkldnn_enabled():
        return "lstm_onednn"
    return kind


def _by_steps(
    step: Step, call: Call, data: Tensor, state: State, group: tuple[Tensor, ...], *, reverse: bool
) -> tuple[Tensor, State]:
    """Return the outputs and the last state of one direction of one layer."""
    weights = Weights.of(group, has_biases=call.has_biases)
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


LAYERS: dict[Any, Rule] = {
    torch.lstm: _layers_rule("lstm"),
    torch.gru: _layers_rule("gru"),
    torch.rnn_tanh: _layers_rule("rnn_tanh"),
    torch.rnn_relu: _layers_rule("rnn_relu"),
}
RULES: dict[Any, Rule] = {
    **LAYERS,
    torch.lstm_cell: _cell_rule(STEPS["lstm"]),
    torch.gru_cell: _cell_rule(STEPS["gru"]),
    torch.rnn_tanh_cell: _cell_rule(STEPS["rnn_tanh"]),
    torch.rnn_relu_cell: _cell_rule(STEPS["rnn_relu"]),
}
