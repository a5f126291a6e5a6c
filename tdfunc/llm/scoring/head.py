"""The head of a language model in chunks: log-probs of chosen tokens from hidden states.

The logits of all positions are the largest tensor of scoring. Here only one chunk of them exists at a time, in the
forward pass and in the backward pass, which computes each chunk again.

N positions, D hidden size, V vocabulary, K candidates of a position.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tdfunc.core.context import is_compiling

# The entries of the logits of one chunk: 32 MB in float32.
_CHUNK = 1 << 23
# A loop over a number of chunks that depends on the shape would be compiled for one shape.
_COMPILED_CHUNKS = 8


class Head(NamedTuple):
    """The steps between a family's hidden states and its logits.

    The logits are `linear(hidden)`, times `scale`, then `softcap * tanh(logits / softcap)`.
    """

    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of hidden states.

        Shapes:
            `hidden` (..., D), `weight` (V, D), `bias` (V,); the logits are (..., V).
        """
        found = F.linear(hidden, weight, bias)
        if self.scale != 1.0:
            found = found * self.scale
        if self.softcap is None:
            return found
        return torch.tanh(found / self.softcap) * self.softcap


def chosen_log_probs(
    head: Head,
    hidden_ND: Tensor,
    output: tuple[Tensor, Tensor | None],
    ids_NK: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    """Return the log-probs of K candidates at each position, in float32 or the wider dtype of the logits.

    Args:
        head: The steps of the family.
        hidden_ND: The hidden states from which the candidates are predicted.
        output: The weight (V, D) and the bias (V,) of the head.
        ids_NK: The candidates.
        temperature: A divisor of the logits, one number or (N,).
        chunk_size: The number of positions whose logits exist at the same time.

    Shapes:
        (N, K), in nats.
    """
    if isinstance(temperature, Tensor):
        heat = temperature.unsqueeze(-1)
    else:
        # 16 bits would round it.
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        heat = None
        if temperature != 1.0:
            heat = hidden_ND.new_full((1, 1), temperature, dtype=wide)
    weight, bias = output
    flat = hidden_ND, weight, bias, ids_NK, heat
    if is_compiling():
        # Slices that end with the last position would be compiled for totals that divide like this one.
        total = hidden_ND.shape[0]
        size = -(-total // _COMPILED_CHUNKS)
        end = (0, 0, 0, _COMPILED_CHUNKS * size - total)
        if isinstance(temperature, Tensor):
            heat = F.pad(temperature.unsqueeze(-1), end, value=1.0)
        flat = F.pad(hidden_ND, end), weight, bias, F.pad(ids_NK, end), heat
        rows = [slice(i * size, (i + 1) * size) for i in range(_COMPILED_CHUNKS)]
        return torch.cat([_log_probs(head, *_cut(flat, part)) for part in rows])[:total]
    size = chunk_size or max(1, _CHUNK // weight.shape[-2])
    return _Chosen.apply(*flat, head, size)  # pyright: ignore[reportReturnType]


def log_probs_of(logits_NV: Tensor, ids_NK: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Return the log-probs (N, K) of candidates from complete logits; arguments as for `chosen_log_probs`."""
    wide = _wide(logits_NV, None) / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    return wide.gather(-1, ids_NK) - wide.logsumexp(-1, keepdim=True)


# Any: the flat arguments of `_Chosen`, of which some are None.
def _cut(flat: tuple[Any, ...], part: slice) -> tuple[Any, ...]:
    """Return the arguments of some positions."""
    hidden, weight, bias, ids, heat = flat
    return hidden[part], weight, bias, ids[part], heat if heat is None or heat.shape[0] == 1 else heat[part]


def _log_probs(
    head: Head, hidden_ND: Tensor, weight: Tensor, bias: Tensor | None, ids_NK: Tensor, heat: Tensor | None
) -> Tensor:
    """Return the log-probs (N, K) of one chunk."""
    logits = _wide(head.logits(hidden_ND, weight, bias), heat)
    chosen = logits.gather(-1, ids_NK)
    # As torch.logsumexp, which makes a second tensor of the size of the logits.
    largest = logits.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest.isinf(), 0)
    return chosen - largest - logits.sub_(largest).exp_().sum(-1, keepdim=True).log()


def _wide(logits: Tensor, heat: Tensor | None) -> Tensor:
    """Return logits in the dtype of their softmax, divided by the temperature."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if heat is None:
        return wide
    return wide / heat


class _Chosen(torch.autograd.Function):
    """`_log_probs` over chunks, whose backward pass computes the logits of a chunk again.

    vmap, and derivatives of the backward pass, run the same operations.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, bias: Any, ids: Tensor, heat: Any, head: Head, size: int) -> Tensor:
        flat = hidden, weight, bias, ids, heat
        return torch.cat([_log_probs(head, *_cut(flat, part)) for part in _chunks(hidden.shape[0], size)])

    @staticmethod
    # Any: torch's context, and the inputs of `forward`.
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *flat, ctx.head, ctx.size = inputs
        ctx.save_for_backward(*flat)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        (grad_NK,) = grad_outputs
        hidden, weight, bias, ids, heat = ctx.saved_tensors
        head = ctx.head
        needs = ctx.needs_input_grad
        of_hidden: list[Tensor] = []
        of_heat: list[Tensor] = []
        of_weight: Any = None
        of_bias: Any = None
        for part in _chunks(grad_NK.shape[0], ctx.size):
            x, _, _, chosen, warm = _cut((hidden, weight, bias, ids, heat), part)
            logits = head.logits(x, weight, bias)
            wide = _wide(logits, warm)
            grad = grad_NK[part]
            slope = (-wide.softmax(-1) * grad.sum(-1, keepdim=True)).scatter_add(-1, chosen, grad)
            if warm is not None:
                of_heat.append((slope * wide).sum(-1, keepdim=True) / -warm)
                slope = slope / warm
            if head.softcap is not None:
                slope = slope * (1 - (logits.to(slope.dtype) / head.softcap).square())
            slope = (slope * head.scale).to(logits.dtype)
            if needs[0]:
                of_hidden.append(slope @ weight)
            if needs[1]:
                one = slope.transpose(-2, -1) @ x
                of_weight = _added(of_weight, one)
            if needs[2]:
                of_bias = _added(of_bias, slope.sum(0))
        of_weight = of_weight.to(weight.dtype) if needs[1] else None
        of_bias = of_bias.to(weight.dtype) if needs[2] else None
        spread = None
        if needs[4]:
            spread = torch.cat(of_heat).sum_to_size(heat.shape)
        return torch.cat(of_hidden) if needs[0] else None, of_weight, of_bias, None, spread, None, None


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """Return the sum over chunks with one more; a sum of 16 bits would lose chunks that are small beside it."""
    if total is None:
        return part
    return total.to(torch.promote_types(part.dtype, torch.float32)).add_(part)


def _chunks(total: int, size: int) -> Iterator[slice]:
    """Yield the slices of chunks; one for no positions at all."""
    for start in range(0, max(total, 1), size):
        yield slice(start, start + size)
