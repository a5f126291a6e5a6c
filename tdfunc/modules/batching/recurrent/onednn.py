"""The kernel that torch itself uses for an LSTM in float32 on a CPU, oneDNN's, called for one member after the other.

The numbers are the ones of `nn.LSTM`, to the last bit. A loop over modules also pays for modules and autograd.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Without the frame of OpOverload.__call__.
_forward = torch.ops.aten.mkldnn_rnn_layer.default._op
_backward = torch.ops.aten.mkldnn_rnn_layer_backward.default._op
# oneDNN's number for an LSTM.
_LSTM = 2


class OneDnnLstm:
    """One direction of one layer; see `Kernel`."""

    def forward(
        self, x: Tensor, state: list[Tensor], weights: list[Tensor], reverse: bool, saves: bool
    ) -> list[Tensor]:
        """Run the layer."""
        size = state[0].shape[-1]
        has_biases = len(weights) > 2
        results: list[Sequence[Tensor]] = []
        # The kernel makes a workspace only if gradients are enabled.
        with torch.set_grad_enabled(saves):
            for member in _members(x, *_with_biases(weights), *state):
                results.append(_forward(*member, reverse, [], _LSTM, size, 1, has_biases, False, False, saves))
        out, h, c, workspaces = zip(*results, strict=True)
        # Joined, workspaces would be copied.
        return [torch.stack(out), torch.stack(h), torch.stack(c), *(workspaces if saves else ())]

    def like(self, x: Tensor, state: list[Tensor], weights: list[Tensor], saves: bool) -> list[Tensor]:
        """Return tensors without values, laid out as the results of `forward`; a workspace has any size."""
        members = x.shape[0] if saves else 0
        out = x.new_empty(*x.shape[:-1], state[0].shape[-1])
        last = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in state]
        return [out, *last, *[x.new_empty(1, dtype=torch.uint8) for _ in range(members)]]

    def backward(
        self, grads: list[Tensor], x: Tensor, state: list[Tensor], weights: list[Tensor], results: list[Tensor],
        reverse: bool, of_inputs: bool,
    ) -> list[Tensor]:  # fmt: skip
        """Return the gradients of x, the state and the weights."""
        size = state[0].shape[-1]
        has_biases = len(weights) > 2
        found: list[Sequence[Tensor]] = []
        members = _members(x, *_with_biases(weights), *state, *results[:3], *grads)
        for member, workspace in zip(members, results[3:], strict=True):
            options = (reverse, _LSTM, size, 1, has_biases, True, False, [], False)
            found.append(_backward(*member, *options, workspace))
        of_x, of_ih, of_hh, *of_biases, of_h, of_c = [torch.stack(parts) for parts in zip(*found, strict=True)]
        joined = [of_h.view_as(state[0]), of_c.view_as(state[1]), of_ih, of_hh]
        if has_biases:
            joined += of_biases
        if of_inputs:
            joined.insert(0, of_x)
        return joined

    def repeat(self, saved: Sequence[Tensor], inner: int, count: int) -> list[Tensor]:
        """Return the workspaces of members that share them."""
        found: list[Tensor] = []
        for start in range(0, len(saved), inner):
            found += [*saved[start : start + inner]] * count
        return found


def _members(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield each member's tensors. The kernel reads tensors as if they had no gaps, whatever their strides are."""
    for member in zip(*[tensor.unbind(0) for tensor in tensors], strict=True):
        yield tuple([tensor.contiguous() for tensor in member])


def _with_biases(weights: list[Tensor]) -> list[Tensor]:
    if len(weights) > 2:
        return weights
    zeros = weights[0].new_zeros(weights[0].shape[1]).expand(weights[0].shape[:2])
    return [*weights, zeros, zeros]
