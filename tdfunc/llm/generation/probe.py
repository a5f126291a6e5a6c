"""The test that a model's cache and left padding do not change results, run once for each model.

Attention can leave out pads; a state that runs over all positions, as in gated delta nets, reads them. No list of
families is needed: the model runs on random weights, and rows with pads and a cache are compared with each row alone.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tdfunc.llm.generation.decode import pad_left, read_prompts, read_tokens, select
from tdfunc.llm.scoring.model import CausalLM, own_logits
from tdfunc.lora import LoraApply
from tdfunc.modules.extract import split
from tdfunc.modules.functional import Apply

# The lengths of the rows, of which each begins with a prompt and is then read token by token.
_ROWS = (8, 15)
_STEPS = 3
# How many times the rounding a cached pass may be off.
_TIMES = 32


class Way(NamedTuple):
    """The way in which prompts are read.

    Attributes:
        padded: Prompts of different lengths are read together, with pads at the left; otherwise only prompts of one
            length are.
        cached: The model's cache contains the earlier tokens; otherwise all tokens are read at each step.
    """

    padded: bool
    cached: bool


# Of each precision: what rounding hides in bfloat16 shows in float32.
_FOUND: WeakKeyDictionary[Apply | LoraApply, dict[tuple[object, ...], Way]] = WeakKeyDictionary()


def find_way(lm: CausalLM, params: Any, buffers: Any, length: int) -> Way:
    """Return the fastest way in which each row, up to a length, has the results of the row alone."""
    ways = _FOUND.setdefault(lm.apply, {})
    precision = _precision(_first_floating(params))
    found = ways.get(precision)
    if found is None:
        found = ways[precision] = _measure(lm, params, buffers)
    if not lm.by_length:
        return found
    # Beyond these positions the frequencies of all earlier positions change, including those in the cache.
    return Way(padded=False, cached=found.cached and length <= lm.first_length)


def _precision(leaf: Tensor) -> tuple[object, ...]:
    """Return what decides how a model with such leaves rounds."""
    device = leaf.device
    autocast = None
    if torch.is_autocast_enabled(device.type):
        autocast = torch.get_autocast_dtype(device.type)
    return leaf.dtype, device, torch.get_float32_matmul_precision(), autocast


def _first_floating(params: Any) -> Tensor:
    return next(leaf for leaf in params.leaves() if leaf.is_floating_point())


def _measure(lm: CausalLM, params: Any, buffers: Any) -> Way:
    """Run the model on random weights, and return the fastest way that has the results of each row alone."""
    trial = _trial_of(lm, params, buffers)
    alone = [[row] for row in trial.rows]
    # Two full passes of one model differ by rounding, but not where both take the same kernels.
    rounding = max(trial.gap(alone, cached=False), torch.finfo(trial.leaf.dtype).eps, _product_error(trial.leaf))
    tolerance = max(_TIMES * rounding, 2e-5)
    cached = trial.is_exact(alone, tolerance)
    padded = cached and trial.is_exact([trial.rows], tolerance)
    return Way(padded, cached)


# Any: trees.
@dataclass(frozen=True)
class _Trial:
    """A model on random weights, and rows whose logits are known.

    Attributes:
        lm: The model.
        weights: The random parameters.
        buffers: The model's buffers.
        leaf: One of the parameters, for their dtype and device.
        rows: Rows of random tokens.
        own: The last logits of each row, by a full pass over the row alone.
    """

    lm: CausalLM
    weights: Any
    buffers: Any
    leaf: Tensor
    rows: list[Tensor]
    own: list[Tensor]

    def gap(self, parts: Sequence[Sequence[Tensor]], *, cached: bool) -> float:
        """Return the largest difference of a log-prob from `own`, in nats, where the rows are read in parts."""
        read = functools.partial(_read, cached=cached)
        found: list[Tensor] = []
        for part in parts:
            found += self.lm.run(self.weights, read, part, buffers=self.buffers)
        wide = torch.promote_types(self.leaf.dtype, torch.float32)
        gaps: list[float] = []
        for logits, own in zip(found, self.own, strict=True):
            difference = logits.to(wide).log_softmax(-1) - own.to(wide).log_softmax(-1)
            gaps.append(difference.abs().max().nan_to_num(math.inf).item())
        return max(gaps)

    def is_exact(self, parts: Sequence[Sequence[Tensor]], tolerance: float) -> bool:
        """Return True if the rows, read in parts with a cache, have the results of each row alone."""
        try:
            return self.gap(parts, cached=True) <= tolerance < math.inf
        # A family that has no such cache may raise anything.
        except Exception:
            return False


def _trial_of(lm: CausalLM, params: Any, buffers: Any) -> _Trial:
    weights, rest = split(params)
    weights = _random_weights(weights)
    if buffers is not None:
        rest = buffers
    leaf = _first_floating(weights)
    vocabulary = lm.apply.module.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportCallIssue]
    generator = torch.Generator().manual_seed(0)
    rows: list[Tensor] = []
    own: list[Tensor] = []
    for length in _ROWS:
        row = torch.randint(vocabulary, (length,), generator=generator).to(leaf.device)
        logits = lm.run(weights, own_logits, row.unsqueeze(0), None, None, buffers=rest)
        rows.append(row)
        own.append(logits[0, -_STEPS - 1 :])
    return _Trial(lm, weights, rest, leaf, rows, own)


def _product_error(leaf: Tensor) -> float:
    """Return the relative error of a product of matrices like a leaf, in the precision that is set for its device."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn((64, 256), generator=generator).to(leaf)
    b = torch.randn((256, 64), generator=generator).to(leaf)
    exact = a.cpu().double() @ b.cpu().double()
    error = (a @ b).cpu().double() - exact
    return (error.abs().max() / exact.abs().max()).item()


def _read(model: Any, rows: Sequence[Tensor], *, cached: bool) -> list[Tensor]:
    """Return the logits of the last positions of each row, as generation computes them."""
    ids, mask = pad_left([row[:-_STEPS] for row in rows])
    logits, context = read_prompts(model, ids, mask, cached=cached)
    # As several responses to one prompt, of which the last is compared.
    spread = torch.arange(len(rows), device=ids.device).repeat_interleave(2)
    found = [logits]
    context = select(context, spread)
    for step in range(_STEPS, 0, -1):
        new = torch.stack([row[-step] for row in rows])
        both = torch.stack([new.flip(0), new], 1).flatten()
        logits, context = read_tokens(context, both)
        found.append(logits[1::2])
    return list(torch.stack(found, 1))


def _random_weights(params: Any) -> Any:
    """Return parameters with random matrices, views of one row of numbers as long as the largest, and other vectors.

    Biases are zero at first, and then hide pads.
    """
    matrices = [leaf for leaf in params.leaves() if leaf.is_floating_point() and leaf.dim() > 1]
    largest = max(matrices, key=Tensor.numel)
    # Logits and attention scores of a few nats, whatever the width.
    scale = 1.7 / math.sqrt(largest.shape[-1])
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(largest.numel() + len(matrices), generator=generator) * scale
    noise = noise.to(largest)
    starts = iter(range(len(matrices)))

    def draw(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        if leaf.dim() < 2:
            spread = torch.randn(leaf.shape, generator=generator) * 0.3
            return leaf + spread.to(leaf)
        start = next(starts)
        return noise[start : start + leaf.numel()].view(leaf.shape)

    return params.apply(draw)
