"""Angles between models: interpolation along a great circle, whose unused branches have finite gradients."""

import torch
from torch import Tensor


def units(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x divided by its norms along the last dimension, and the norms; x below `eps` stays."""
    # The squares of large numbers overflow before their norm does.
    largest = x.detach().abs().amax(-1, keepdim=True)
    overflows = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True).isinf()
    scale = torch.where(overflows, largest, 1)
    scaled = x / scale
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    norms = length * scale
    return scaled / torch.where(norms > eps, length, 1), norms


def arc(t: Tensor, a: Tensor, b: Tensor, cos: Tensor, is_line: Tensor) -> Tensor:
    """Return the point at t between a and b on the circle of an angle, or on the line where `is_line`."""
    angle = torch.acos(torch.where(is_line, 0, cos))
    sin = torch.sin(angle)
    share_a = torch.where(is_line, 1 - t, torch.sin((1 - t) * angle) / sin)
    share_b = torch.where(is_line, t, torch.sin(t * angle) / sin)
    return share_a * a + share_b * b
