"""The arithmetic of adapters: changes of weights, the gain of DoRA, merged weights, and starting values."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tdfunc import random
from tdfunc.lora._targets import Layout, Target


def factors(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return A and B of the complete change: a start that the base contains is subtracted as additional ranks."""
    a, b = parts["A"], parts["B"]
    if "A0" not in parts:
        return a, b
    # The ranks of A are the first dimension in a convolution, else the dimension before the last.
    dim = 0 if b.ndim == 2 else -2
    return torch.cat([a, parts["A0"].detach()], dim), torch.cat([b, -parts["B0"].detach()], -1)


def change(weight: Tensor, parts: dict[str, Tensor], scale: float) -> Tensor:
    """Return the change of a weight, in full."""
    a, b = factors(parts)
    return (b @ as_matrix(a, b)).reshape(weight.shape) * scale


def as_matrix(a: Tensor, b: Tensor) -> Tensor:
    """Return A as a matrix, or as one for each expert."""
    return a.flatten(1) if b.ndim == 2 else a


def gain(weight: Tensor, parts: dict[str, Tensor], scale: float) -> Tensor:
    """Return DoRA's factor of each output, (*, M) or (*, N): the magnitude over the norm of the changed weight.

    The norm is computed from the factors, so that no changed weight is made, and takes no gradient.

    Source:
        Liu et al., "DoRA: weight-decomposed low-rank adaptation" (2024), equation 5 and section 4.3.
    """
    magnitude = parts["magnitude"]
    a, b = [x.detach() for x in factors(parts)]
    a, weight = as_matrix(a, b), weight.detach().to(a.dtype)
    weight = weight.flatten(1) if b.ndim == 2 else weight
    if is_output_last(magnitude, b):
        weight, a, b = weight.mT, b.mT, a.mT
    # With F.linear, which under vmap over adapters does not copy the weight for each; so expert by expert.
    if weight.ndim == 2:
        inner = F.linear(a, weight).mT
    else:
        inner = torch.stack([F.linear(x, w) for x, w in zip(a.unbind(-3), weight.unbind(-3), strict=True)], -3).mT
    square = torch.linalg.vector_norm(weight, dim=-1).square() + 2 * scale * (b * inner).sum(-1)
    square = square + scale**2 * (b * (b @ (a @ a.mT))).sum(-1)
    return magnitude.reshape(square.shape) / square.clamp_min(0).sqrt()


def is_output_last(magnitude: Tensor, b: Tensor) -> bool:
    """Return whether a magnitude scales the last dimension of its weight, by its shape."""
    return magnitude.ndim == b.ndim and (magnitude.shape[-1] != 1 or magnitude.shape[-2] != b.shape[-2])


def norm_of(weight: Tensor, magnitude: Tensor) -> Tensor:
    """Return the norms of the outputs of a weight, in the shape of a magnitude."""
    dims = [dim for dim in range(weight.ndim) if magnitude.shape[dim] == 1 and weight.shape[dim] != 1]
    return torch.linalg.vector_norm(weight, dim=dims, keepdim=True) if dims else weight.abs()


def merged(weight: Tensor, parts: dict[str, Tensor], scale: float) -> Tensor:
    """Return the weight with its adapter in it."""
    wide = weight.to(torch.promote_types(weight.dtype, parts["A"].dtype))
    new = wide + change(weight, parts, scale)
    if "magnitude" in parts:
        new = new * (parts["magnitude"] / norm_of(new, parts["magnitude"]))
    return new.to(weight.dtype)


def split_matrix(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A and B of the closest product of a rank, each with the roots of the singular values."""
    u, s, vh = torch.linalg.svd(matrix.float(), full_matrices=False)
    root = s[..., :rank].sqrt()
    a, b = root[..., None] * vh[..., :rank, :], u[..., :, :rank] * root[..., None, :]
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
    weight, last = target.leaf.detach(), target.layout.has_output_last
    parts = {name: torch.zeros(shape, dtype=dtype, device=weight.device) for name, shape in shapes.items()}
    if kind == "kaiming":
        # The factor at the inputs is random, and the factor at the outputs is zero. The rows of an embedding are its
        # outputs for single inputs, so there the factor without the vocabulary is random.
        name = "B" if last and target.layout is not Layout.EMBEDDING else "A"
        shape = shapes[name]
        inputs = shape[-2] if name == "B" else math.prod(shape[1:]) if target.layout is Layout.CONV else shape[-1]
        if target.layout is Layout.EMBEDDING:
            drawn = random.normal(key, tuple(shape))
        else:
            drawn = random.uniform(key, tuple(shape), minval=-(inputs**-0.5), maxval=inputs**-0.5)
        parts[name] = drawn.to(weight.device, dtype)
    else:
        matrix = weight.flatten(1) if target.layout is Layout.CONV else weight
        if kind == "pissa":
            a, b = split_matrix(matrix.float() / target.scale, target.rank)
        else:
            q, r = torch.linalg.qr(matrix.float().mT if last else matrix.float())
            q, r = q[..., :, : target.rank], r[..., : target.rank, :]
            a, b = padded(*((q.mT, r.mT) if last else (r, q)), target.rank)
        for name, value in (("A", a), ("B", b)):
            parts[name] = value.reshape(shapes[name]).to(dtype).contiguous()
            parts[f"{name}0"] = parts[name].clone()
    if "magnitude" in parts:
        parts["magnitude"] = norm_of(weight.to(dtype), parts["magnitude"])
    return parts
