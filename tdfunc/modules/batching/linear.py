"""Products, norms, factorizations and Fourier transforms: formulas of operations that torch can batch."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tdfunc.core.context import require_values
from tdfunc.modules.batching.fold import by_decomposition, is_batched, where_batched
from tdfunc.modules.batching.rule import Rule, by_body

_ATEN: Any = torch.ops.aten
_LINALG: Any = torch.linalg
_FUNCTIONS: Any = vars(torch._C)["_VariableFunctions"]
_weight_norm_function: Any = vars(torch)["_weight_norm"]
# torch divides by the norm plus this number.
_EPSILON = 1e-7


def _linear(mode: TorchFunctionMode, func: Any, /, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One product for each member, also of inputs that are turned; torch copies the weights for each leading index."""
    if _has_turned_rows(input, weight):
        rows = input.flatten(0, -2)
        return func(rows, weight, bias).reshape(*input.shape[:-1], weight.shape[0])
    return func(input, weight, bias)


def _matmul(mode: TorchFunctionMode, func: Any, /, input: Tensor, other: Any, *, out: Tensor | None = None) -> Any:
    if out is None and isinstance(other, Tensor) and _has_turned_rows(input, other):
        return func(input.flatten(0, -2), other).reshape(*input.shape[:-1], other.shape[1])
    return func(input, other) if out is None else func(input, other, out=out)


def _has_turned_rows(input: Tensor, weight: Tensor) -> bool:
    """Return whether inputs of more than one leading dimension are not contiguous, and members differ in weights."""
    return input.dim() > 2 and weight.dim() == 2 and not input.is_contiguous() and is_batched(weight)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """`sum_ij input1[i] weight[o, i, j] input2[j]` for each output o."""
    if weight.dim() != 3 or input1.shape[-1:] != weight.shape[1:2] or input1.dim() != input2.dim():
        return NotImplemented
    outputs, first, second = weight.shape
    products = input1 @ weight.transpose(0, 1).reshape(first, outputs * second)
    out = (products.unflatten(-1, (outputs, second)) * input2.unsqueeze(-2)).sum(-1)
    if bias is None:
        return out
    return out + bias


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    if dim == -1:
        return v * (g / torch.linalg.vector_norm(v))
    return v * (g / _norms(v, 2.0, dim))


def _renorm(input: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    norms = _norms(input, p, dim)
    return input * torch.where(norms > maxnorm, maxnorm / (norms + _EPSILON), 1.0)


def _norms(tensor: Tensor, p: float, dim: int) -> Tensor:
    """Return the norm of each slice along a dimension."""
    others = [i for i in range(tensor.dim()) if i != dim % tensor.dim()]
    return torch.linalg.vector_norm(tensor, p, others, keepdim=True)


def _normalize(
    mode: TorchFunctionMode, func: Any, /, input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if out is None or not is_batched(input, out):
        return func(input, p, dim, eps, out)
    return out.copy_(func(input, p, dim, eps))


def _pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """The distances above the diagonal, by the kernel of distances between two sets."""
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    distances = torch.cdist(input, input, p, "donot_use_mm_for_euclid_dist")
    return distances[first, second]


def _lu(A: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    factors, pivots = _LINALG.lu_factor(A, pivot=pivot)
    return torch.lu_unpack(factors, pivots)


def _householder_product(input: Tensor, tau: Tensor) -> Tensor:
    """The product of the reflections `1 - tau v v^H` as `1 - V T V^H`, with T upper triangular.

    Source:
        Schreiber and Van Loan, A storage-efficient WY representation for products of Householder transformations.
    """
    rows, columns = input.shape[-2:]
    count = tau.shape[-1]
    unit = torch.eye(rows, columns, dtype=input.dtype, device=input.device)
    vectors = input[..., :count].tril(-1) + unit[:, :count]
    above = torch.eye(count, dtype=input.dtype, device=input.device) + tau[..., None] * (vectors.mH @ vectors).triu(1)
    factor = torch.linalg.solve_triangular(above, torch.diag_embed(tau), upper=True)
    return unit - vectors @ factor @ vectors[..., :columns, :].mH


# -- Fourier transforms of short windows ------------------------------------------------------------------------------


def _stft(
    input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Tensor | None = None, normalized: bool = False, onesided: bool | None = None,
    return_complex: bool | None = None, align_to_window: bool | None = None,
) -> Any:  # fmt: skip
    """The arguments of the operator, whose padding torch's Python function has done."""
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    window = _padded_window(window, width, n_fft, input)
    fits = input.dim() in (1, 2) and input.is_floating_point() and input.shape[-1] >= n_fft
    if window is None or not fits or hop < 1 or return_complex is None or align_to_window or window.is_complex():
        return NotImplemented
    frames = input.index_select(-1, _places((input.shape[-1] - n_fft) // hop + 1, n_fft, hop, input).flatten())
    frames = frames.unflatten(-1, (-1, n_fft)) * window
    transform = torch.fft.fft if onesided is False else torch.fft.rfft
    spectra = transform(frames, norm="ortho" if normalized else "backward").mT
    return spectra if return_complex else torch.view_as_real(spectra)


def _padded_window(window: Tensor | None, width: int, n_fft: int, like: Tensor) -> Tensor | None:
    """Return the window with zeros on both sides, or None for one that torch refuses."""
    if window is None:
        window = torch.ones(width, dtype=like.real.dtype, device=like.device)
    if not 0 < width <= n_fft or window.shape != (width,):
        return None
    left = (n_fft - width) // 2
    return F.pad(window, (left, n_fft - width - left))


def _places(count: int, size: int, hop: int, like: Tensor) -> Tensor:
    """Return the places (count, size) of frames in a signal."""
    starts = torch.arange(count, device=like.device) * hop
    return starts[:, None] + torch.arange(size, device=like.device)


def _istft(
    input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Tensor | None = None, center: bool = True, normalized: bool = False, onesided: bool | None = None,
    length: int | None = None, return_complex: bool = False,
) -> Any:  # fmt: skip
    """Overlapping frames, added and divided by the sum of the squares of their windows."""
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    if onesided is None:
        onesided = input.shape[-2] != n_fft
    bins = n_fft // 2 + 1 if onesided else n_fft
    fits = input.dim() in (2, 3) and input.is_complex() and input.shape[-2] == bins
    window = _padded_window(window, width, n_fft, input)
    if window is None or not fits or not 0 < hop <= width or return_complex or window.is_complex():
        return NotImplemented
    spectra = input.mT[..., : n_fft // 2 + 1]
    frames = torch.fft.irfft(spectra, n_fft, norm="ortho" if normalized else "backward") * window
    sums = _add_frames(frames, hop)
    envelope = _add_frames((window * window).expand(frames.shape[-2], n_fft), hop)
    start = n_fft // 2 if center else 0
    end = len(envelope) - start
    if length is not None:
        end = min(start + length, len(envelope))
    envelope = envelope[start:end]
    require_values(envelope.abs().min() > 1e-11, lambda: RuntimeError("istft: window overlap add min: 1"))
    signal = sums[..., start:end] / envelope
    if length is not None and length > end - start:
        signal = F.pad(signal, (0, length - (end - start)))
    return signal


def _add_frames(frames: Tensor, hop: int) -> Tensor:
    """Add frames (*S, frames, samples), each `hop` samples after the last one: (*S, samples)."""
    count, samples = frames.shape[-2:]
    flat = frames.reshape(math.prod(frames.shape[:-2]), count * samples)
    sums = torch.zeros(len(flat), samples + hop * (count - 1), dtype=frames.dtype, device=frames.device)
    return sums.index_add(1, _places(count, samples, hop, frames).flatten(), flat).reshape(*frames.shape[:-2], -1)


RULES: dict[Any, Rule] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.bilinear: where_batched(_bilinear),
    _weight_norm_function: where_batched(_weight_norm),
    torch.renorm: where_batched(_renorm),
    Tensor.renorm: where_batched(_renorm),
    F.normalize: _normalize,
    torch.pdist: where_batched(_pdist),
    _LINALG.lu: where_batched(_lu),
    _LINALG.householder_product: where_batched(_householder_product),
    torch.chain_matmul: by_body(torch.chain_matmul),
    _FUNCTIONS.chain_matmul: by_decomposition(_ATEN.chain_matmul.default),
    torch.stft: by_body(torch.stft),
    Tensor.stft: by_body(Tensor.stft),
    _FUNCTIONS.stft: where_batched(_stft),
    torch.istft: where_batched(_istft),
    Tensor.istft: where_batched(_istft),
}
