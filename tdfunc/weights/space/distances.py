"""Distances and angles between models."""

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.walk import list_leaves
from tdfunc.ops.base.foreach import leaves_like
from tdfunc.ops.math.squares import root, square_scale
from tdfunc.storage.scales import check_unscaled


def distance(a: TensorCollection, b: TensorCollection) -> Tensor:
    """Return the Euclidean distance between two models, whose floating and complex leaves form one vector.

    Its gradient is 0 between equal models, so that a penalty for leaving a model can be trained from there.

    Args:
        a: A model, or a stack of them.
        b: Another one, or a stack.

    Shapes:
        () for two models, (K,) if one or both are stacks of K.

    Raises:
        TreeStructureError: The trees have different paths.
        TieError: The trees tie different paths.

    Examples:
        >>> a, b = TensorDict({"w": torch.zeros(3)}), TensorDict({"w": torch.ones(3)})
        >>> distance(a, b)
        tensor(1.7321)
    """
    delta = [x - y for x, y in _pairs("distance", a, b)]
    dims = max(len(a._batch_size), len(b._batch_size))
    scale = _scale(delta, dims)
    return root(_dot(delta, delta, dims, scale, scale)) * scale


def cosine(a: TensorCollection, b: TensorCollection, *, base: TensorCollection | None = None) -> Tensor:
    """Return the cosine of the angle between two models; with a base, between their task vectors.

    Args:
        a: A model, or a stack of them.
        b: Another one, or a stack.
        base: The origin, by default zeros.

    Shapes:
        () for two models, (K,) if one or both are stacks of K.

    Raises:
        TreeStructureError: The trees have different paths.
        TieError: The trees tie different paths.

    Examples:
        >>> a, b = TensorDict({"w": torch.tensor([1.0, 0.0])}), TensorDict({"w": torch.tensor([1.0, 1.0])})
        >>> cosine(a, b)
        tensor(0.7071)
    """
    pairs = _pairs("cosine", a, b)
    xs = [x for x, _ in pairs]
    ys = [y for _, y in pairs]
    if base is not None:
        zeros = [zero for _, zero in _pairs("cosine", a, base)]
        xs = [x - zero for x, zero in zip(xs, zeros, strict=True)]
        ys = [y - zero for y, zero in zip(ys, zeros, strict=True)]
    dims_x = len(a._batch_size)
    dims_y = len(b._batch_size)
    scale_x = _scale(xs, dims_x)
    scale_y = _scale(ys, dims_y)
    both = _dot(xs, ys, max(dims_x, dims_y), scale_x, scale_y)
    of_x = _dot(xs, xs, dims_x, scale_x, scale_x)
    of_y = _dot(ys, ys, dims_y, scale_y, scale_y)
    # The product of two squared norms leaves the range of float32 before they do.
    norms = (of_x.double() * of_y.double()).sqrt()
    return (both / norms).to(both.dtype)


def _pairs(call: str, a: TensorCollection, b: TensorCollection) -> list[tuple[Tensor, Tensor]]:
    others = leaves_like(a, b, call)
    check_unscaled(call, a)
    check_unscaled(call, b)
    pairs = zip(list_leaves(a), others, strict=True)
    numbers: list[tuple[Tensor, Tensor]] = []
    for x, y in pairs:
        if x.is_complex() or y.is_complex():
            numbers.append((_parts(x), _parts(y)))
        # Counters have no distance.
        elif x.is_floating_point():
            numbers.append((x.to(_wide(x)), y.to(_wide(y))))
    return numbers


def _parts(x: Tensor) -> Tensor:
    """Return the real and imaginary parts, along a new last dimension."""
    return torch.view_as_real(x.to(torch.promote_types(x.dtype, torch.complex64)).resolve_conj())


def _wide(x: Tensor) -> torch.dtype:
    # Sums of squares would overflow in 16 bits.
    return torch.promote_types(x.dtype, torch.float32)


def _scale(xs: list[Tensor], dims: int) -> Tensor:
    """Return the power of two that brings the squares of each model into range."""
    sizes: list[Tensor] = []
    for x in xs:
        if x.numel():
            sizes.append(_rows(x, dims).abs().amax(-1))
        else:
            sizes.append(x.new_zeros(x.shape[:dims]))
    return square_scale(torch.stack(sizes).amax(0))


def _dot(xs: list[Tensor], ys: list[Tensor], dims: int, scale_x: Tensor, scale_y: Tensor) -> Tensor:
    """Return the sum of products, each number over the scale of its model, over all but the first dimensions."""
    parts: list[Tensor] = []
    for x, y in zip(xs, ys, strict=True):
        product = _over(x, scale_x) * _over(y, scale_y)
        parts.append(_rows(product, dims).sum(-1))
    return torch.stack(parts).sum(0)


def _rows(x: Tensor, dims: int) -> Tensor:
    """Return a leaf with one dimension for the numbers of a model."""
    return x[..., None].flatten(dims)


def _over(x: Tensor, scale: Tensor) -> Tensor:
    """Return a leaf over the scales of its models."""
    ones = [1] * (x.dim() - scale.dim())
    return x / scale.reshape((*scale.shape, *ones)).to(x.dtype)
