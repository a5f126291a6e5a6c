"""Angles between models: interpolation along a great circle, whose unused branches have finite gradients."""

import math

import torch
from torch import Tensor

# Below this cosine an angle is computed by the sum of its directions.
_FAR = -0.9


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


def long_arc(t: Tensor, a: Tensor, b: Tensor, gap: Tensor) -> Tensor:
    """Return the point at t between a and b, whose directions are a small angle short of opposite.

    Args:
        t: The place.
        a: The start.
        b: The end.
        gap: The length of the sum of their directions, which is above 0 where their cosine already rounds to -1.
    """
    is_line = gap <= 2 * torch.finfo(gap.dtype).eps
    # In float64, as the digits of the angle itself would be lost beside pi.
    missing = 2 * torch.asin(torch.where(is_line, 1, gap).double() / 2)
    angle = math.pi - missing
    sin = torch.sin(angle)
    place = t.double()
    share_a = torch.where(is_line, 1 - place, torch.sin((1 - place) * angle) / sin)
    share_b = torch.where(is_line, place, torch.sin(place * angle) / sin)
    return share_a.to(a.dtype) * a + share_b.to(a.dtype) * b


def is_far(cos: Tensor) -> Tensor:
    """Return where directions are so far apart that their angle is computed by their sum."""
    return cos < _FAR
