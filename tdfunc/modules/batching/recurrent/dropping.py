"""Dropout between recurrent layers outside of vmap: each layer is a call of torch's function, and `F.dropout` draws."""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from tdfunc.modules.batching.recurrent.calls import parse, run_layers
from tdfunc.modules.batching.recurrent.cells import State


def by_layers(mode: TorchFunctionMode, func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Serve a recurrent function of torch whose dropout would draw from torch's default generator."""
    call = parse(args, kwargs)
    if not call.drops:
        return func(*args, **kwargs)

    def layer(data: Tensor, state: State, weights: list[tuple[Tensor, ...]]) -> tuple[Tensor, State]:
        # torch's LSTM takes its state as a list, the others as a tensor.
        hx = state[0] if len(state) == 1 else list(state)
        options = (call.has_biases, 1, 0.0, call.train, call.directions > 1)
        flat = [weight for group in weights for weight in group]
        if call.batch_sizes is None:
            out, *last = func(data, hx, flat, *options, False)
        else:
            out, *last = func(data, call.batch_sizes, hx, flat, *options)
        return out, tuple(last)

    # The draws come to the mode.
    with mode:
        return call.result(*run_layers(call, layer))
