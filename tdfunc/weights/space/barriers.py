"""The losses on the line between models, and the height of the barrier on it."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import BatchSizeError, as_count
from tdfunc.core.walk import list_leaves
from tdfunc.ops.edits.maps import apply
from tdfunc.storage.scales import check_unscaled

T = TypeVar("T", bound=TensorCollection)


def line_losses(loss: Callable[[T], Tensor], a: T, b: T, *, points: int = 11, chunk_size: int | None = None) -> Tensor:
    """Return the losses at points on the line from one model to another, in one vmapped forward.

    Integers and bools, such as the counters of BatchNorm, have no line: a point has the values of the nearer model.

    Args:
        loss: The function of one model's parameters, or parameters and buffers; a scalar.
        a: The first model.
        b: The last model, a tree like it.
        points: The number of points, including both ends.
        chunk_size: The number of points that are computed together, as in `torch.vmap`.

    Shapes:
        (points,).

    Source:
        Goodfellow et al., "Qualitatively characterizing neural network optimization problems" (2014).

    Examples:
        >>> a, b = TensorDict({"w": torch.tensor([-1.0])}), TensorDict({"w": torch.tensor([1.0])})
        >>> line_losses(lambda p: 1 - p["w"].square().sum(), a, b, points=3)
        tensor([0., 1., 0.])
    """
    check_unscaled("line_losses", a)
    check_unscaled("line_losses", b)
    leaves = list_leaves(a)
    dtypes = {leaf.dtype for leaf in leaves if leaf.is_floating_point()}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    device = None
    if leaves:
        device = leaves[0].device
    # One point is not a line: a barrier on it would be 0.
    points = as_count("points", points, least=2)
    t = torch.linspace(0, 1, points, dtype=wide, device=device)

    def loss_at(place: Tensor) -> Tensor:
        return loss(apply(a, partial(_between, place), (b,)))

    return torch.vmap(loss_at, chunk_size=chunk_size)(t)


def _between(t: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the point at t from x to y: computed in float32 at least, where 16 bits would round t."""
    if not (x.is_floating_point() or x.is_complex()):
        return torch.where(t < 0.5, x, y)
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.lerp(x.to(wide), y.to(wide), t.to(wide)).to(x.dtype)


def barrier(loss: Callable[[T], Tensor], a: T, b: T, *, points: int = 11, chunk_size: int | None = None) -> Tensor:
    """Return the height of the barrier between two models: 0 where they are linearly connected.

    It is the largest difference between the loss on the line and the linear interpolation of the losses at its ends.

    Args:
        loss: The function of one model's parameters, a scalar.
        a: The first model.
        b: The last model.
        points: The number of points, including both ends.
        chunk_size: The number of points that are computed together, as in `torch.vmap`.

    Shapes:
        ().

    Source:
        Frankle et al., "Linear mode connectivity and the lottery ticket hypothesis" (2020); Entezari et al., "The role
        of permutation invariance in linear mode connectivity of neural networks" (2022), definition 1.

    Examples:
        >>> a, b = TensorDict({"w": torch.tensor([-1.0])}), TensorDict({"w": torch.tensor([1.0])})
        >>> barrier(lambda p: 1 - p["w"].square().sum(), a, b)
        tensor(1.)
    """
    losses = line_losses(loss, a, b, points=points, chunk_size=chunk_size)
    t = torch.linspace(0, 1, losses.shape[0], dtype=losses.dtype, device=losses.device)
    return (losses - torch.lerp(losses[0], losses[-1], t)).amax()


def barriers(loss: Callable[[T], Tensor], stacked: T, *, points: int = 11, chunk_size: int | None = None) -> Tensor:
    """Return the barrier between each pair of members of a stack, all in one vmapped forward.

    Args:
        loss: The function of one model's parameters, a scalar.
        stacked: The members.
        points: The number of points, including both ends.
        chunk_size: The number of pairs that are computed together, as in `torch.vmap`.

    Shapes:
        (K, K) for K members, symmetric, 0 on the diagonal.

    Raises:
        BatchSizeError: `stacked` has no batch dimension.

    Source:
        The definition of `barrier`.
    """
    if not stacked._batch_size:
        raise BatchSizeError("barriers: the members are not stacked.", got="batch size []")
    count = stacked._batch_size[0]
    i, j = torch.triu_indices(count, count, 1)
    barrier_of = torch.vmap(lambda a, b: barrier(loss, a, b, points=points), chunk_size=chunk_size)
    heights = barrier_of(stacked._index(i), stacked._index(j))
    upper = heights.new_zeros(count, count).index_put((i, j), heights)
    return upper + upper.T
