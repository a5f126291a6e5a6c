"""The head of a language model in chunks: log-probs of chosen tokens, entropies and likeliest tokens.

The logits of all positions are the largest tensor of scoring. Here only one chunk of them exists at a time, in the
forward pass and in the backward pass, which computes each chunk again.

N positions, D hidden size, V vocabulary, K candidates of a position, M likeliest tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tdfunc.core.context import is_compiling

# The entries of the logits of one chunk: 32 MB in float32.
_CHUNK = 1 << 23
# A loop over a number of chunks that depends on the shape would be compiled for one shape.
_COMPILED_CHUNKS = 8


class _Inputs(NamedTuple):
    """The tensors from which log-probs are computed.

    Attributes:
        hidden: The hidden states (N, D).
        weight: The weight of the head (V, D).
        bias: The bias of the head (V,), or None.
        ids: The candidates (N, K).
        heat: The temperature of each position (N, 1), or of all (1, 1); None for 1.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    ids: Tensor
    heat: Tensor | None

    def part(self, positions: slice) -> "_Inputs":
        """Return the tensors of some positions."""
        heat = self.heat
        if heat is not None and heat.shape[0] != 1:
            heat = heat[positions]
        return _Inputs(self.hidden[positions], self.weight, self.bias, self.ids[positions], heat)


class Wanted(NamedTuple):
    """The results at each position beside the log-probs of its candidates.

    Attributes:
        entropy: The entropy.
        topk: The number M of likeliest tokens.
    """

    entropy: bool = False
    topk: int = 0


_NOTHING = Wanted()


class HeadScores(NamedTuple):
    """The results of a head at each position.

    Attributes:
        log_probs: The log-probs of the candidates (N, K), in nats.
        entropy: The entropies (N,), in nats; None if they are not wanted.
        topk_log_probs: The log-probs of the likeliest tokens, the likeliest first (N, M); None if M is 0.
        topk_ids: The likeliest tokens (N, M); None if M is 0.
    """

    log_probs: Tensor
    entropy: Tensor | None
    topk_log_probs: Tensor | None
    topk_ids: Tensor | None

    def map(self, fn: Callable[[Tensor], Tensor]) -> "HeadScores":
        """Return `fn` of each result."""
        return HeadScores(fn(self.log_probs), *[None if each is None else fn(each) for each in self[1:]])


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


def head_scores(
    head: Head,
    hidden_ND: Tensor,
    output: tuple[Tensor, Tensor | None],
    ids_NK: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    chunk_size: int | None = None,
    wanted: Wanted = _NOTHING,
) -> HeadScores:
    """Return the log-probs of K candidates at each position, in float32 or the wider dtype of the logits.

    Args:
        head: The steps of the family.
        hidden_ND: The hidden states from which the candidates are predicted.
        output: The weight (V, D) and the bias (V,) of the head.
        ids_NK: The candidates.
        temperature: A divisor of the logits, one number or (N,).
        chunk_size: The number of positions whose logits exist at the same time.
        wanted: The other results.

    Shapes:
        (N, K), in nats.
    """
    weight, bias = output
    inputs = _Inputs(hidden_ND, weight, bias, ids_NK, _heat(temperature, hidden_ND))
    if is_compiling():
        found = _compiled_scores(head, inputs, wanted, is_heat_by_row=isinstance(temperature, Tensor))
    else:
        size = chunk_size or max(1, _CHUNK // weight.shape[-2])
        # Any: the outputs of a function of torch.
        outputs: Any = _Chosen.apply(*inputs, head, wanted, size)
        found = _Part(*outputs)
    return _split(found, ids_NK.shape[-1], wanted)


class _Part(NamedTuple):
    """The results of some positions.

    Attributes:
        log_probs: The log-probs of the candidates and of the likeliest tokens (N, K + M).
        entropy: The entropies (N,); 0 if they are not wanted.
        ids: The candidates and the likeliest tokens (N, K + M).
    """

    log_probs: Tensor
    entropy: Tensor
    ids: Tensor


def _split(part: _Part, count: int, wanted: Wanted) -> HeadScores:
    """Return results whose first `count` tokens are the candidates."""
    entropy = part.entropy if wanted.entropy else None
    if not wanted.topk:
        return HeadScores(part.log_probs, entropy, None, None)
    return HeadScores(part.log_probs[:, :count], entropy, part.log_probs[:, count:], part.ids[:, count:])


def _joined(parts: Sequence[_Part]) -> _Part:
    columns = zip(*parts, strict=True)
    return _Part(*[torch.cat(column) for column in columns])


def _heat(temperature: float | Tensor, hidden_ND: Tensor) -> Tensor | None:
    """Return the temperature of each position (N, 1), or of all (1, 1); None for 1."""
    if isinstance(temperature, Tensor):
        return temperature.unsqueeze(-1)
    if temperature == 1.0:
        return None
    # 16 bits would round it.
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    return hidden_ND.new_full((1, 1), temperature, dtype=wide)


def _compiled_scores(head: Head, inputs: _Inputs, wanted: Wanted, *, is_heat_by_row: bool) -> _Part:
    """Return the results in a fixed number of chunks, for any number of positions."""
    # Slices that end with the last position would be compiled for totals that divide like this one.
    total = inputs.hidden.shape[0]
    size = -(-total // _COMPILED_CHUNKS)
    end = (0, 0, 0, _COMPILED_CHUNKS * size - total)
    heat = inputs.heat
    if is_heat_by_row:
        assert heat is not None
        heat = F.pad(heat, end, value=1.0)
    padded = inputs._replace(hidden=F.pad(inputs.hidden, end), ids=F.pad(inputs.ids, end), heat=heat)
    found: list[_Part] = []
    for i in range(_COMPILED_CHUNKS):
        positions = slice(i * size, (i + 1) * size)
        chunk = padded.part(positions)
        logits = head.logits(chunk.hidden, chunk.weight, chunk.bias)
        # Compiled gradients take no writes into logits; a compiler fuses the operations.
        found.append(_whole_scores(_wide(logits, chunk.heat), chunk.ids, wanted))
    return _Part(*[each[:total] for each in _joined(found)])


def scores_of(
    logits_NV: Tensor, ids_NK: Tensor, temperature: float | Tensor = 1.0, wanted: Wanted = _NOTHING
) -> HeadScores:
    """Return the results of `head_scores` from complete logits."""
    if isinstance(temperature, Tensor):
        temperature = temperature.unsqueeze(-1)
    wide = _wide(logits_NV, None) / temperature
    return _split(_whole_scores(wide, ids_NK, wanted), ids_NK.shape[-1], wanted)


def _whole_scores(wide: Tensor, ids: Tensor, wanted: Wanted) -> _Part:
    """Return the results of logits in the dtype of their softmax, which are not written to."""
    ids = _with_likeliest(wide, ids, wanted)
    log_sum = wide.logsumexp(-1, keepdim=True)
    entropy = log_sum.new_zeros(log_sum.shape[:-1])
    if wanted.entropy:
        entropy = _entropy(wide - log_sum)
    return _Part(wide.gather(-1, ids) - log_sum, entropy, ids)


def _with_likeliest(logits: Tensor, ids: Tensor, wanted: Wanted) -> Tensor:
    """Return the candidates (N, K) followed by the likeliest tokens (N, M)."""
    if not wanted.topk:
        return ids
    return torch.cat([ids, logits.detach().topk(wanted.topk, -1).indices], -1)


def _entropy(log_probs_NV: Tensor) -> Tensor:
    """Return the entropies (N,) of distributions; a token of probability 0 adds nothing."""
    # A finite number, which 0 multiplies.
    finite = log_probs_NV.clamp(min=torch.finfo(log_probs_NV.dtype).min)
    return -(log_probs_NV.exp() * finite).sum(-1)


def _scores(head: Head, chunk: _Inputs, wanted: Wanted) -> _Part:
    """Return the results of one chunk."""
    logits = _wide(head.logits(chunk.hidden, chunk.weight, chunk.bias), chunk.heat)
    ids = _with_likeliest(logits, chunk.ids, wanted)
    chosen = logits.gather(-1, ids)
    # As torch.logsumexp, which makes a second tensor of the size of the logits.
    largest = logits.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest.isinf(), 0)
    shifted = logits.sub_(largest)
    if wanted.entropy:
        exps = shifted.exp()
        total = exps.sum(-1, keepdim=True)
        log_sum = total.log()
        # 0 times a logit of -inf is 0 here. Only two tensors of the size of the logits exist.
        products = exps.mul_(shifted.masked_fill_(exps == 0, 0))
        entropy = (log_sum - products.sum(-1, keepdim=True) / total).squeeze(-1)
    else:
        log_sum = shifted.exp_().sum(-1, keepdim=True).log()
        entropy = log_sum.new_zeros(log_sum.shape[:-1])
    return _Part(chosen - largest - log_sum, entropy, ids)


def _wide(logits: Tensor, heat: Tensor | None) -> Tensor:
    """Return logits in the dtype of their softmax, divided by the temperature."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if heat is None:
        return wide
    return wide / heat


class _Chosen(torch.autograd.Function):
    """`_scores` over chunks, whose backward pass computes the logits of a chunk again.

    vmap, and derivatives of the backward pass, run the same operations.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Any, ids: Tensor, heat: Any, head: Head, wanted: Wanted, size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = _Inputs(hidden, weight, bias, ids, heat)
        parts = [_scores(head, inputs.part(each), wanted) for each in _chunks(hidden.shape[0], size)]
        # Only plain tuples are outputs of functions of torch.
        return tuple(_joined(parts))  # pyright: ignore[reportReturnType]

    @staticmethod
    # Any: torch's context, and the inputs of `forward`.
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, weight, bias, _, heat, ctx.head, ctx.wanted, ctx.size = inputs
        # The likeliest tokens are among these ids.
        ids = output[2]
        ctx.save_for_backward(hidden, weight, bias, ids, heat)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        grad_NK, grad_entropy_N, _ = grad_outputs
        inputs = _Inputs(*ctx.saved_tensors)
        needs_hidden, needs_weight, needs_bias, _, needs_heat, *_ = ctx.needs_input_grad
        of_hidden: list[Tensor] = []
        of_heat: list[Tensor] = []
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        for positions in _chunks(grad_NK.shape[0], ctx.size):
            chunk = inputs.part(positions)
            logits = ctx.head.logits(chunk.hidden, chunk.weight, chunk.bias)
            wide = _wide(logits, chunk.heat)
            grad = grad_NK[positions]
            # The gradient of a log-prob is 1 at the chosen token, minus the probabilities.
            slope = (-wide.softmax(-1) * grad.sum(-1, keepdim=True)).scatter_add(-1, chunk.ids, grad)
            if ctx.wanted.entropy:
                slope = slope + _entropy_slope(wide, grad_entropy_N[positions])
            if chunk.heat is not None:
                of_heat.append((slope * wide).sum(-1, keepdim=True) / -chunk.heat)
                slope = slope / chunk.heat
            slope = _before_head(ctx.head, slope, logits)
            if needs_hidden:
                of_hidden.append(slope @ chunk.weight)
            if needs_weight:
                of_weight = _added(of_weight, slope.transpose(-2, -1) @ chunk.hidden)
            if needs_bias:
                of_bias = _added(of_bias, slope.sum(0))
        dtype = inputs.weight.dtype
        hidden = torch.cat(of_hidden) if needs_hidden else None
        weight = None if of_weight is None else of_weight.to(dtype)
        bias = None if of_bias is None else of_bias.to(dtype)
        heat = None
        if needs_heat:
            assert inputs.heat is not None
            heat = torch.cat(of_heat).sum_to_size(inputs.heat.shape)
        # In the order of the arguments of `forward`.
        return hidden, weight, bias, None, heat, None, None, None


def _entropy_slope(logits: Tensor, grad_N: Tensor) -> Tensor:
    """Return the gradient of logits, from the gradients of their entropies: -p (log p + entropy)."""
    log_probs = logits.log_softmax(-1)
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
    entropy = _entropy(log_probs).unsqueeze(-1)
    return -log_probs.exp() * (finite + entropy) * grad_N.unsqueeze(-1)


def _before_head(head: Head, slope: Tensor, logits: Tensor) -> Tensor:
    """Return the gradient of `linear(hidden)`, from the gradient of the logits."""
    if head.softcap is not None:
        slope = slope * (1 - (logits.to(slope.dtype) / head.softcap).square())
    return (slope * head.scale).to(logits.dtype)


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """Return the sum over chunks with one more; a sum of 16 bits would lose chunks that are small beside it."""
    if total is None:
        return part
    return total.to(torch.promote_types(part.dtype, torch.float32)).add_(part)


def _chunks(total: int, size: int) -> Iterator[slice]:
    """Yield the slices of chunks; one for no positions at all."""
    for start in range(0, max(total, 1), size):
        yield slice(start, start + size)
