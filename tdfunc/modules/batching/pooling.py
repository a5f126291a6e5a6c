"""Pooling, unpooling and resampling of images: indices by torch's kernels, values by gathers and scatters.

A gather has every derivative, and a batching rule in torch.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tdfunc.modules.batching.fold import fold, is_batched, unfold, where_batched
from tdfunc.modules.batching.rule import Rule, by_body

_NN: Any = vars(torch._C)["_nn"]


# -- unpooling --------------------------------------------------------------------------------------------------------


def _unpool(input: Tensor, indices: Tensor, output_size: Any, *rest: Any) -> Any:
    """Put numbers at their places in images of zeros; `rest` has the stride and padding that gave the size."""
    n = len(output_size)
    if input.shape != indices.shape or input.dim() not in (n + 1, n + 2) or not input.numel():
        return NotImplemented
    zeros = input.new_zeros((*input.shape[:-n], math.prod(output_size)))
    filled = zeros.scatter(-1, indices.flatten(-n), input.flatten(-n))
    return filled.unflatten(-1, tuple(output_size))


# -- pooling of random regions ----------------------------------------------------------------------------------------


class _RandomRegions(torch.autograd.Function):
    """The places of the largest numbers of random regions: they have no derivative."""

    @staticmethod
    def forward(input: Tensor, samples: Tensor, pool: Any, sizes: Any) -> Tensor:
        return pool(input, *sizes, samples)[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        members = info.batch_size
        input, samples, pool, sizes = args
        input = fold(input, in_dims[0], members)
        samples = fold(samples, in_dims[1], members)
        return unfold(_RandomRegions.apply(input, samples, pool, sizes), members), 0


def _random_pool(pool: Any, n: int, input: Tensor, kernel_size: Any, output_size: Any, samples: Tensor) -> Any:
    if input.dim() not in (n + 1, n + 2):
        return NotImplemented
    images = input
    if input.dim() == n + 1:
        images = input.unsqueeze(0)
    indices = _RandomRegions.apply(images.detach(), samples.detach(), pool, (kernel_size, output_size))
    pooled = images.flatten(-n).gather(-1, indices.flatten(-n)).unflatten(-1, indices.shape[-n:])
    if input.dim() == n + 1:
        return pooled.squeeze(0), indices.squeeze(0)
    return pooled, indices


def _by_indices(with_indices: Any) -> Rule:
    """Return the rule (or the server of draws) of a pooling that returns its indices if it is asked to."""

    def run(mode: TorchFunctionMode, func: Any, /, *args: Any, return_indices: bool = False, **kwargs: Any) -> Any:
        with mode:
            pooled, indices = with_indices(*args, **kwargs)
        if return_indices:
            return pooled, indices
        return pooled

    return run


# The draws of these come to the mode of a key as well.
RANDOM_POOLS: dict[Any, Rule] = {
    F.fractional_max_pool2d: _by_indices(F.fractional_max_pool2d_with_indices),
    F.fractional_max_pool3d: _by_indices(F.fractional_max_pool3d_with_indices),
    F.fractional_max_pool2d_with_indices: by_body(F.fractional_max_pool2d_with_indices),
    F.fractional_max_pool3d_with_indices: by_body(F.fractional_max_pool3d_with_indices),
}


# -- averages of whole images -----------------------------------------------------------------------------------------


def _average(n: int) -> Rule:
    """Return the rule of an average of n dimensions: torch's own for an output of one number sets strides by a method.

    The method has no batching rule.
    """

    def run(mode: TorchFunctionMode, func: Any, /, input: Tensor, output_size: Any) -> Tensor:
        sizes = (output_size,) if isinstance(output_size, int) else tuple(output_size)
        if set(sizes) != {1} or input.dim() not in (n + 1, n + 2) or not is_batched(input):
            return func(input, output_size)
        return input.mean(tuple(range(-n, 0)), keepdim=True)

    return run


# -- resampling -------------------------------------------------------------------------------------------------------


def _interpolate(mode: TorchFunctionMode, func: Any, /, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # By place: size, scale_factor, mode.
    method = args[2] if len(args) > 2 else kwargs.get("mode")
    if method != "nearest-exact" or not is_batched(input):
        return func(input, *args, **kwargs)
    # The kernel copies numbers: an image of places shows which.
    space = input.shape[2:]
    places = torch.arange(math.prod(space), dtype=torch.float64, device=input.device).reshape(1, 1, *space)
    chosen = func(places, *args, **kwargs)[0, 0]
    return input.flatten(2).index_select(2, chosen.flatten().long()).unflatten(2, chosen.shape)


def _affine_grid(mode: TorchFunctionMode, func: Any, /, theta: Tensor, size: Any, *args: Any, **kwargs: Any) -> Tensor:
    n = len(size) - 2
    if not is_batched(theta) or theta.dim() != 3 or theta.shape != (size[0], n, n + 1) or n not in (2, 3):
        return func(theta, size, *args, **kwargs)
    unchanged = torch.eye(n, n + 1, dtype=theta.dtype, device=theta.device).unsqueeze(0)
    places = func(unchanged, [1, *size[1:]], *args, **kwargs)[0]
    places = F.pad(places, (0, 1), value=1.0)
    return (places.flatten(0, -2) @ theta.mT).unflatten(1, places.shape[:-1])


RULES: dict[Any, Rule] = {
    F.max_unpool1d: by_body(F.max_unpool1d),
    F.max_unpool2d: by_body(F.max_unpool2d),
    F.max_unpool3d: by_body(F.max_unpool3d),
    _NN.max_unpool2d: where_batched(_unpool),
    _NN.max_unpool3d: where_batched(_unpool),
    **RANDOM_POOLS,
    _NN.fractional_max_pool2d: where_batched(functools.partial(_random_pool, _NN.fractional_max_pool2d, 2)),
    _NN.fractional_max_pool3d: where_batched(functools.partial(_random_pool, _NN.fractional_max_pool3d, 3)),
    F.adaptive_avg_pool1d: _average(1),
    F.adaptive_avg_pool2d: _average(2),
    F.adaptive_avg_pool3d: _average(3),
    F.interpolate: _interpolate,
    F.affine_grid: _affine_grid,
}
