"""The levels of transforms that have wrapped a tensor, one by one."""

from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

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
