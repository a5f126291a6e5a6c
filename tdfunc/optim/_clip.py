"""Functions of gradient trees for `chain`: clipping by norm, and a check for nan."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import has_values
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.core.keys import dotted
from tdfunc.core.walk import list_leaves, list_paths, rebuild
from tdfunc.optim._checks import check_dense, check_hyper
from tdfunc.optim._lists import Leaves

T = TypeVar("T", bound=TensorCollection)


@dataclass(frozen=True, eq=False)
class GradientMap:
    """A function from a tree of gradients to another, which `chain` puts before an optimizer."""

    name: str
    leaves: Callable[[TensorCollection, Leaves], Leaves]

    def __repr__(self) -> str:
        return self.name

    def __call__(self, grads: T) -> T:
        """Return the new gradients."""
        return rebuild(grads, self.leaves(grads, list_leaves(grads)))


def clip_by_global_norm(max_norm: float) -> GradientMap:
    """Return a map that scales gradients so that the norm of all of them together is at most `max_norm`.

    In a stacked tree this couples the members; `clip_by_member_norm` does not.

    Args:
        max_norm: The largest Euclidean norm over all elements of all leaves; infinity clips nothing.

    Raises:
        ValueError: `max_norm` is negative or nan.

    Source:
        `torch.nn.utils.clip_grad_norm_`, whose numbers it gives.

    Examples:
        >>> grads = TensorDict({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
        >>> tdf.optim.clip_by_global_norm(1.0)(grads)["b"]
        tensor([0.8000])
    """
    return _clipper("clip_by_global_norm", _clip_all, max_norm)


def _clip_all(max_norm: float | Tensor, _: TensorCollection, leaves: Leaves) -> Leaves:
    if not leaves:
        return []
    norm = torch.linalg.vector_norm(torch.stack([_norm(leaf) for leaf in leaves]))
    scale = _scale(norm, max_norm)
    return [_times(leaf, scale) for leaf in leaves]


def clip_by_member_norm(max_norm: float) -> GradientMap:
    """Return a map that scales each member's gradients so that their norm is at most `max_norm`.

    A member is an entry of the batch; its result is what `clip_by_global_norm` would give it alone.

    Args:
        max_norm: The largest Euclidean norm over all elements of one member; infinity clips nothing.

    Raises:
        ValueError: `max_norm` is negative or nan.
        UnsupportedError: Called on gradients whose members are rows of a lazy stack.

    Source:
        `torch.nn.utils.clip_grad_norm_` for each member.

    Examples:
        >>> grads = TensorDict({"a": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}, [2])
        >>> tdf.optim.clip_by_member_norm(1.0)(grads)["a"]
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    return _clipper("clip_by_member_norm", _clip_members, max_norm)


def _clip_members(max_norm: float | Tensor, grads: TensorCollection, leaves: Leaves) -> Leaves:
    if not leaves:
        return []
    check_dense("clip_by_member_norm", "each member has a norm", grads)
    size = grads._batch_size
    # Not reshape(*size, -1): of an empty leaf the last size would be anybody's guess.
    norms = [_norm(leaf.flatten(len(size)) if leaf.dim() > len(size) else leaf.unsqueeze(-1), -1) for leaf in leaves]
    scale = _scale(torch.linalg.vector_norm(torch.stack(norms), dim=0), max_norm)
    return [_times(leaf, scale.reshape(*size, *[1] * (leaf.dim() - len(size)))) for leaf in leaves]


def _clipper(
    name: str, clip: Callable[[float | Tensor, TensorCollection, Leaves], Leaves], max_norm: float | Tensor
) -> GradientMap:
    if not isinstance(max_norm, Tensor) and max_norm == math.inf:
        # A norm that is infinite too would have no ratio to it.
        return GradientMap(name, _unclipped)
    if callable(max_norm):
        raise error(TypeError, f"{name}: max_norm is no number.", expected="a number", got=repr(max_norm))
    check_hyper(name, "max_norm", max_norm, 0.0)
    return GradientMap(name, partial(clip, max_norm))


def _unclipped(_: TensorCollection, leaves: Leaves) -> Leaves:
    return leaves


# In half precision the norm of ordinary gradients overflows, and they would come out as zeros.
def _norm(leaf: Tensor, dim: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(leaf, dim=dim, dtype=torch.promote_types(leaf.dtype, torch.float32))


def _times(leaf: Tensor, scale: Tensor) -> Tensor:
    wide = torch.promote_types(leaf.dtype, torch.float32)
    return (leaf.to(wide) * scale.to(wide)).to(leaf.dtype)


def _scale(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def check_finite() -> GradientMap:
    """Return a map that leaves gradients as they are and raises when one holds nan or an infinity.

    It reads the values, which waits for a GPU and which no trace or transform can do.

    Raises:
        UnsupportedError: Called inside a transform or a trace.

    Examples:
        >>> opt = tdf.optim.chain(tdf.optim.check_finite(), tdf.optim.sgd(lr=0.1))
    """
    return GradientMap("check_finite", _checked)


def _checked(grads: TensorCollection, leaves: Leaves) -> Leaves:
    if not has_values():
        raise UnsupportedError(
            "check_finite: a transform or trace has no values to check.",
            hint="call it on the gradients outside.",
        )
    for path, leaf in zip(list_paths(grads), leaves, strict=True):
        if not bool(torch.isfinite(leaf).all()):
            raise error(
                FloatingPointError,
                f"check_finite: the gradient of {dotted(path)!r} is not finite.",
                expected="numbers",
                got=f"{int(leaf.isnan().sum())} nan, {int(leaf.isinf().sum())} inf of {leaf.numel()}",
            )
    return leaves
