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


# The level of a tensor that no transform has wrapped.
NO_LEVEL: int = -1


def level_of(tensor: Tensor) -> int:
    """Return the level of the transform that wrapped a tensor last."""
    return _functorch.maybe_get_level(tensor)


def unwrap_gradient(tensor: Tensor) -> Tensor:
    """Return what `grad` has wrapped last, of a tensor whose gradient nobody wants."""
    while _functorch.is_gradtrackingtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def unwrap_batch(tensor: Tensor) -> tuple[Tensor, int]:
    """Return what `vmap` has wrapped last, and the dimension of its members."""
    return _functorch.get_unwrapped(tensor), _functorch.maybe_get_bdim(tensor)


def wrap_batch(tensor: Tensor, level: int) -> Tensor:
    """Return a tensor (E, ...) as one that differs by member at a level of vmap."""
    return _functorch._add_batch_dim(tensor, 0, level)


def _levels(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, and what each transform has wrapped."""
    yield tensor
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
        yield tensor
