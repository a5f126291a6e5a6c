"""Calls of torch's recurrent functions: their arguments, and the layers that they run one after the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdfunc.modules.batching.recurrent.cells import State

_OPTIONS = ("has_biases", "num_layers", "dropout", "train", "bidirectional")
_PADDED = ("input", "hx", "params", *_OPTIONS, "batch_first")
_PACKED = ("data", "batch_sizes", "hx", "params", *_OPTIONS)


@dataclass(frozen=True)
class Call:
    """The arguments of one call.

    Attributes:
        data: The inputs: (T, B, I), or (S, I) if they are packed.
        batch_sizes: The number of sequences that have an input at each time, if the inputs are packed.
        state: The first state of all layers and directions, (L * D, B, H): h, and c of an LSTM.
        weights: The weights of each layer and direction, in torch's order.
        has_biases: Biases are among the weights.
        layers: The number of layers, L.
        directions: 1, or 2 if each layer also runs from the last time to the first; D.
        dropout: The probability of dropping an output of a layer before the next one gets it.
        train: As a module has it; nothing is dropped in evaluation mode.
        batch_first: torch's function got (B, T, I), and returns outputs in that order.
    """

    data: Tensor
    batch_sizes: Tensor | None
    state: State
    weights: list[tuple[Tensor, ...]]
    has_biases: bool
    layers: int
    directions: int
    dropout: float
    train: bool
    batch_first: bool

    @property
    def drops(self) -> bool:
        """Whether the call draws random numbers."""
        return self.train and self.dropout != 0 and self.layers > 1

    @property
    def has_projections(self) -> bool:
        """Whether h of an LSTM has its own size."""
        return len(self.weights[0]) > (4 if self.has_biases else 2)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the call that gradients flow to."""
        return [self.data, *self.state, *[weight for group in self.weights for weight in group]]

    def result(self, out: Tensor, state: State) -> tuple[Tensor, ...]:
        """Return what torch's function returns."""
        if self.batch_first:
            out = out.transpose(0, 1)
        return out, *state


def parse(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Return the arguments of a call of `torch.lstm` or its kin, with packed inputs or others."""
    is_packed = "batch_sizes" in kwargs or isinstance(args[3:] and args[3], (list, tuple))
    names = _PACKED if is_packed else _PADDED
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    state = given["hx"]
    state = (state,) if isinstance(state, Tensor) else tuple(state)
    directions = 2 if given["bidirectional"] else 1
    groups = given["num_layers"] * directions
    params = tuple(given["params"])
    size = len(params) // groups
    batch_first = given.get("batch_first", False)
    data = given["data" if is_packed else "input"]
    return Call(
        data=data.transpose(0, 1) if batch_first else data,
        batch_sizes=given.get("batch_sizes"),
        state=state,
        weights=[params[i * size : (i + 1) * size] for i in range(groups)],
        has_biases=given["has_biases"],
        layers=given["num_layers"],
        directions=directions,
        dropout=given["dropout"],
        train=given["train"],
        batch_first=batch_first,
    )


# Called with the inputs, the first state (D, B, H) and the weights of each direction of one layer; returns its outputs
# and its last state.
Layer = Callable[[Tensor, State, list[tuple[Tensor, ...]]], tuple[Tensor, State]]


def run_layers(call: Call, layer: Layer) -> tuple[Tensor, State]:
    """Return the outputs of the last layer, and the last state of all layers; `F.dropout` drops between them."""
    data = call.data
    states: list[State] = []
    for i in range(call.layers):
        if i and call.drops:
            data = F.dropout(data, call.dropout, training=True)
        rows = slice(i * call.directions, (i + 1) * call.directions)
        data, state = layer(data, tuple([tensor[rows] for tensor in call.state]), call.weights[rows])
        states.append(state)
    return data, tuple([torch.cat(parts) for parts in zip(*states, strict=True)])
