"""What a tensor is under the transforms that run the caller: batched by a vmap, or one that takes a gradient."""

from collections.abc import Iterator

from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]


def is_batched(*tensors: Tensor) -> bool:
    """Return True if a tensor differs by member, at any level of `vmap`."""
    return any([any(map(_functorch.is_batchedtensor, _levels(tensor))) for tensor in tensors])


def takes_gradient(*tensors: Tensor) -> bool:
    """Return True if a tensor requires a gradient, at any level of `grad`."""
    return any([any([level.requires_grad for level in _levels(tensor)]) for tensor in tensors])


def _levels(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, and what each transform has wrapped."""
    yield tensor
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
        yield tensor
