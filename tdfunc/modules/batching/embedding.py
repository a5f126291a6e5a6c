"""Embeddings that normalize the rows they read, and sums, means and maxima of bags of rows.

N is the number of indices, B the number of bags, L the length of bags that are rows of a matrix, D the number of
features.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tdfunc.modules.batching.fold import is_batched, where_batched
from tdfunc.modules.batching.rule import Rule

# torch divides by the norm plus this number.
_EPSILON = 1e-7


def _embedding(
    mode: TorchFunctionMode, func: Any, /, input: Tensor, weight: Tensor, padding_idx: int | None = None,
    max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    if max_norm is not None and is_batched(input, weight):
        _normalize_rows(weight, input, max_norm, norm_type)
        max_norm = None
    return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


@torch.no_grad()
def _normalize_rows(weight: Tensor, ids: Tensor, max_norm: float, norm_type: float) -> None:
    """Scale the rows with these numbers to the largest norm, in place, as torch does."""
    rows = weight.detach()
    norms = torch.linalg.vector_norm(rows, norm_type, 1, keepdim=True)
    numbers = ids.flatten().long()
    reads = torch.zeros(len(rows), dtype=torch.long, device=ids.device).scatter(0, numbers, torch.ones_like(numbers))
    too_long = (reads > 0)[:, None] & (norms > max_norm)
    rows.mul_(torch.where(too_long, max_norm / (norms + _EPSILON), 1.0))


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Any:  # fmt: skip
    if sparse or _is_refused(input, weight, offsets, mode, per_sample_weights, scale_grad_by_freq):
        return NotImplemented
    if max_norm is not None:
        _normalize_rows(weight, input, max_norm, norm_type)
    rows = F.embedding(input, weight, scale_grad_by_freq=scale_grad_by_freq)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    counts = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        counts = input != padding_idx % len(weight)
    if offsets is None:
        return _OF_ROWS[mode](rows, counts)
    if include_last_offset:
        counts = counts & (torch.arange(len(input), device=input.device) < offsets[-1])
        offsets = offsets[:-1]
    return _of_segments(rows, counts, offsets, mode)


def _is_refused(
    input: Tensor, weight: Tensor, offsets: Tensor | None, mode: str, weights: Tensor | None, scaled: bool
) -> bool:
    """Return True for arguments that torch refuses, by its own errors."""
    if weight.dim() != 2 or input.is_floating_point() or mode not in _OF_ROWS or (mode == "max" and scaled):
        return True
    if weights is not None and (mode != "sum" or weights.shape != input.shape):
        return True
    if offsets is None:
        return input.dim() != 2
    return input.dim() != 1 or offsets.dim() != 1


# -- bags that are rows of a matrix: (B, L, D) to (B, D) --------------------------------------------------------------


def _sum_of_rows(rows: Tensor, counts: Tensor) -> Tensor:
    return rows.masked_fill(~counts[..., None], 0.0).sum(1)


def _mean_of_rows(rows: Tensor, counts: Tensor) -> Tensor:
    return _sum_of_rows(rows, counts) / counts.sum(1, keepdim=True).clamp(min=1)


def _max_of_rows(rows: Tensor, counts: Tensor) -> Tensor:
    if not rows.shape[1]:
        return rows.sum(1)
    largest = rows.masked_fill(~counts[..., None], -math.inf).max(1).values
    return largest.masked_fill(~counts.any(1, keepdim=True), 0.0)


_OF_ROWS = {"sum": _sum_of_rows, "mean": _mean_of_rows, "max": _max_of_rows}


# -- bags that are segments of a list: (N, D) to (B, D) ---------------------------------------------------------------


def _of_segments(rows: Tensor, counts: Tensor, offsets: Tensor, mode: str) -> Tensor:
    """Reduce the rows from each offset to the next one."""
    places = torch.arange(len(rows), device=rows.device)
    bags = torch.searchsorted(offsets.long().contiguous(), places, right=True) - 1
    if mode == "max":
        return _max_of_segments(rows, counts, bags, len(offsets))
    sums = torch.zeros(len(offsets), rows.shape[1], dtype=rows.dtype, device=rows.device)
    sums = sums.index_add(0, bags, rows.masked_fill(~counts[:, None], 0.0))
    if mode == "sum":
        return sums
    sizes = torch.zeros(len(offsets), dtype=rows.dtype, device=rows.device)
    sizes = sizes.index_add(0, bags, counts.to(rows.dtype))
    return sums / sizes.clamp(min=1.0)[:, None]


def _max_of_segments(rows: Tensor, counts: Tensor, bags: Tensor, n_bags: int) -> Tensor:
    """Return the largest number of each feature, whose gradient goes to the first row that has it."""
    n_rows, features = rows.shape
    last = rows.new_full((n_bags, features), -math.inf)
    if not n_rows:
        # The sum of no rows keeps the graph.
        return torch.zeros_like(last) + rows.sum(0)
    bags = bags[:, None].expand(n_rows, features)
    values = rows.detach().masked_fill(~counts[:, None], -math.inf)
    largest = last.scatter_reduce(0, bags, values, "amax")
    is_largest = counts[:, None] & ((values == largest.gather(0, bags)) | values.isnan())
    places = torch.arange(n_rows, device=rows.device)[:, None].expand(n_rows, features)
    none = torch.full((n_bags, features), n_rows, device=rows.device)
    first = none.scatter_reduce(0, bags, torch.where(is_largest, places, n_rows), "amin")
    return rows.gather(0, first.clamp(max=n_rows - 1)).masked_fill(first == n_rows, 0.0)


RULES: dict[Any, Rule] = {
    F.embedding: _embedding,
    F.embedding_bag: where_batched(_embedding_bag),
}
