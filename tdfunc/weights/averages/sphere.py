"""Angles between models: interpolation along a great circle, whose unused branches have finite gradients."""

import torch
from torch import Tensor


def units(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x divided by its norms along the last dimension, and the norms; x below `eps` stays."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(norms > eps, norms, 1), norms


def arc(t: Tensor, a: Tensor, b: Tensor, cos: Tensor, is_line: Tensor) -> Tensor:
    """Return the point at t between a and b on the circle of an angle, or on the line where `is_line`."""
    angle = torch.acos(torch.where(is_line, 0, cos))
    sin = torch.sin(angle)
    share_a = torch.where(is_line, 1 - t, torch.sin((1 - t) * angle) / sin)
    share_b = torch.where(is_line, t, torch.sin(t * angle) / sin)
    return share_a * a + share_b * b
