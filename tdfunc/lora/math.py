"""The arithmetic of adapters: changes of weights, the gain of DoRA, merged weights, and starting values."""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tdfunc import random
from tdfunc.lora.targets import Layout, Target

# The fewest blocks in which the norms of a changed weight are taken, and the most entries of a block.
_BLOCKS = 4
_BLOCK_SIZE = 1 << 21


def factors(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return A and B of the complete change: a start that the base contains is subtracted as additional ranks."""
    a = parts["A"]
    b = parts["B"]
    if "A0" not in parts:
        return a, b
    # The ranks of A are the first dimension in a convolution, else the dimension before the last.
    dim = 0 if b.ndim == 2 else -2
    return torch.cat([a, parts["A0"].detach()], dim), torch.cat([b, -parts["B0"].detach()], -1)


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype that changes of weights are computed in: the widest of these, and at least float32."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def change(weight: Tensor, parts: dict[str, Tensor], scale: float) -> Tensor:
    """Return the change of a weight, in full, in a wide dtype."""
    a, b = factors(parts)
    wide = wide_dtype(weight.dtype, a.dtype)
    product = b.to(wide) @ as_matrix(a, b).to(wide)
    return product.reshape(weight.shape) * scale


def as_matrix(a: Tensor, b: Tensor) -> Tensor:
    """Return A as a matrix, or as one for each expert."""
    if b.ndim == 2:
        return a.flatten(1)
    return a


def gain(weight: Tensor, parts: dict[str, Tensor], scale: float) -> Tensor:
    """Return DoRA's factor of each output, (*, M) or (*, N): the magnitude over the norm of the changed weight.

    The norm takes no gradient. The changed weight exists only in blocks of rows, so that under `vmap` over adapters no
    tensor has the size of all changed weights.

    Source:
        Liu et al., "DoRA: weight-decomposed low-rank adaptation" (2024), equation 5 and section 4.3.
    """
    magnitude = parts["magnitude"]
    a, b = factors(parts)
    # The rows of `left @ right` are the outputs.
    left = b.detach()
    right = as_matrix(a, b).detach()
    weight = weight.detach()
    if b.ndim == 2:
        weight = weight.flatten(1)
    if is_output_last(magnitude, b):
        weight = weight.mT
        left, right = right.mT, left.mT
    wide = wide_dtype(weight.dtype, a.dtype)
    left = left.to(wide) * scale
    right = right.to(wide)
    if weight.ndim == 2:
        norm = _row_norms(weight, left, right)
    else:
        experts = zip(weight.unbind(-3), left.unbind(-3), right.unbind(-3), strict=True)
        norm = torch.stack([_row_norms(*expert) for expert in experts], -2)
    return _ratio(magnitude.reshape(norm.shape), norm)


def _row_norms(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the norms of the rows of `weight + left @ right`.

    The sum is made before it is squared: where an adapter nearly cancels its weight, the norm of a sum is not the norm
    of the expanded square.
    """
    rows, columns = weight.shape
    # The rows of a block if there are as few as possible, rounded up.
    share = -(-rows // _BLOCKS)
    most_rows = _BLOCK_SIZE // max(1, columns)
    size = max(1, min(share, most_rows))
    norms: list[Tensor] = []
    for weight_rows, left_rows in zip(weight.split(size), left.split(size), strict=True):
        changed = weight_rows.to(left_rows.dtype) + left_rows @ right
        norms.append(torch.linalg.vector_norm(changed, dim=-1))
    return torch.cat(norms)


def _ratio(magnitude: Tensor, norm: Tensor) -> Tensor:
    """Return the magnitude over the norm; 1 for an output without weights, which no factor changes."""
    is_zero = norm == 0
    return torch.where(is_zero, 1.0, magnitude / torch.where(is_zero, 1.0, norm))


def is_output_last(magnitude: Tensor, b: Tensor) -> bool:
    """Return whether a magnitude scales the last dimension of its weight, by its shape."""
    if magnitude.ndim != b.ndim:
        return False
    return magnitude.shape[-1] != 1 or magnitude.shape[-2] != b.shape[-2]


def norm_of(weight: Tensor, shape: torch.Size) -> Tensor:
    """Return the norms of the outputs of a weight, in the shape of a magnitude and in a wide dtype."""
    weight = weight.to(wide_dtype(weight.dtype))
    dims = [dim for dim in range(weight.ndim) if shape[dim] == 1 and weight.shape[dim] != 1]
    if dims:
        return torch.linalg.vector_norm(weight, dim=dims, keepdim=True)
    return weight.abs()


class Merged(NamedTuple):
    """A weight with its adapter in it, and the change of the bias of its layer."""

    weight: Tensor
    bias: Tensor | None


def merged(weight: Tensor, parts: dict[str, Tensor], scale: float) -> Merged:
    """Return the weight with its adapter in it, in the dtype of the weight."""
    delta = change(weight, parts, scale)
    new = weight.to(delta.dtype) + delta
    bias = parts.get("bias")
    if bias is not None:
        bias = bias.to(delta.dtype) * scale
    if "magnitude" in parts:
        magnitude = parts["magnitude"]
        factor = _ratio(magnitude, norm_of(new.detach(), magnitude.shape))
        new = new * factor
        if bias is not None:
            bias = bias * factor.flatten()
    return Merged(new.to(weight.dtype), bias)


def extracted(old: Tensor, new: Tensor, shapes: Mapping[str, torch.Size], target: Target) -> dict[str, Tensor]:
    """Return the leaves, without a bias, of the adapter that brings one weight close to another."""
    wide = wide_dtype(old.dtype, new.dtype)
    delta = (new.to(wide) - old.to(wide)) / target.scale
    if len(shapes["B"]) < old.ndim:
        delta = delta.flatten(1)
    a, b = split_matrix(delta, target.rank)
    parts = {"A": a.reshape(shapes["A"]), "B": b}
    if "magnitude" in shapes:
        parts["magnitude"] = norm_of(new, shapes["magnitude"]).to(wide)
    return parts


def extracted_bias(old: Tensor, delta: Tensor, parts: dict[str, Tensor], scale: float) -> Tensor:
    """Return the bias of an adapter that changes the bias of its layer by `delta`."""
    bias = delta / scale
    if "magnitude" in parts:
        factor = gain(old, parts, scale)
        # An output whose magnitude is 0 has nothing of the adapter, its bias included.
        is_zero = factor == 0
        bias = torch.where(is_zero, 0.0, bias / torch.where(is_zero, 1.0, factor))
    return bias


def split_matrix(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A and B of the closest product of a rank, each with the roots of the singular values."""
    u, s, vh = torch.linalg.svd(matrix.to(wide_dtype(matrix.dtype)), full_matrices=False)
    root = s[..., :rank].sqrt()
    a = root[..., None] * vh[..., :rank, :]
    b = u[..., :, :rank] * root[..., None, :]
    return padded(a, b, rank)


def padded(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors of a rank; a matrix has no more singular values than its smaller side."""
    short = max(0, rank - a.shape[-2])
    return F.pad(a, (0, 0, 0, short)), F.pad(b, (0, short))


def start(
    target: Target, shapes: dict[str, torch.Size], kind: str, key: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the leaves of a new adapter.

    Source:
        Hu et al., "LoRA" (2021); Meng et al., "PiSSA" (2024); Büyükakyüz, "OLoRA" (2024).
    """
    weight = target.leaf.detach()
    wide = weight.to(wide_dtype(weight.dtype, dtype))
    parts = {name: torch.zeros(shape, dtype=dtype, device=weight.device) for name, shape in shapes.items()}
    if kind == "kaiming":
        name, drawn = _random_factor(target, shapes, key)
        parts[name] = drawn.to(weight.device, dtype)
    else:
        a, b = _start_of(target, wide, kind)
        for name, value in (("A", a), ("B", b)):
            parts[name] = value.reshape(shapes[name]).to(dtype).contiguous()
            parts[f"{name}0"] = parts[name].clone()
    if "magnitude" in parts:
        parts["magnitude"] = norm_of(wide, shapes["magnitude"]).to(dtype)
    return parts


def _random_factor(target: Target, shapes: dict[str, torch.Size], key: Tensor) -> tuple[str, Tensor]:
    """Return the name of the factor that starts random, and its values.

    The factor at the inputs is random, and the factor at the outputs is zero. The rows of an embedding are its outputs
    for single inputs, so there the factor without the vocabulary is random.
    """
    layout = target.layout
    if layout is Layout.EMBEDDING:
        return "A", random.normal(key, tuple(shapes["A"]))
    name = "B" if layout.has_output_last else "A"
    shape = shapes[name]
    if name == "B":
        inputs = shape[-2]
    elif layout is Layout.CONV:
        inputs = math.prod(shape[1:])
    else:
        inputs = shape[-1]
    bound = inputs**-0.5
    return name, random.uniform(key, tuple(shape), minval=-bound, maxval=bound)


def _start_of(target: Target, weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return A and B of the start `"pissa"` or `"olora"` of a weight."""
    matrix = weight.flatten(1) if target.layout is Layout.CONV else weight
    rank = target.rank
    if kind == "pissa":
        return split_matrix(matrix / target.scale, rank)
    # The columns of q are the outputs.
    is_output_last = target.layout.has_output_last
    if is_output_last:
        matrix = matrix.mT
    q, r = torch.linalg.qr(matrix)
    q = q[..., :, :rank]
    r = r[..., :rank, :]
    if is_output_last:
        return padded(q.mT, r.mT, rank)
    return padded(r, q, rank)
