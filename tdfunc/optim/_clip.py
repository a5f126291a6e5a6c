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
    return _make("clip_by_global_norm", max_norm, members=False)


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
    return _make("clip_by_member_norm", max_norm, members=True)


def _make(name: str, max_norm: float | Tensor, *, members: bool) -> GradientMap:
    if isinstance(max_norm, Tensor) or max_norm != math.inf:
        check_hyper(name, "max_norm", max_norm, 0.0)
    return GradientMap(name, partial(_clip, max_norm, members))


def _clip(max_norm: float | Tensor, members: bool, grads: TensorCollection, leaves: Leaves) -> Leaves:
    # To an infinite norm an infinite gradient would have no ratio.
    if not leaves or (not isinstance(max_norm, Tensor) and max_norm == math.inf):
        return leaves
    size = grads._batch_size if members else ()
    if members:
        check_dense("clip_by_member_norm", grads)
    norms: Leaves = []
    for leaf in leaves:
        # One dimension for the elements of a member. Not reshape(*size, -1): an empty leaf has no last size.
        rows = leaf.flatten(len(size)) if leaf.dim() > len(size) else leaf.unsqueeze(-1)
        # In half precision the norm of ordinary gradients overflows, and they would come out as zeros.
        norms.append(torch.linalg.vector_norm(rows, dim=-1, dtype=_wide(leaf)))
    scale = (max_norm / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1.0)
    clipped: Leaves = []
    for leaf in leaves:
        factor = scale.reshape((*size, *[1] * (leaf.dim() - len(size)))).to(_wide(leaf))
        clipped.append((leaf.to(_wide(leaf)) * factor).to(leaf.dtype))
    return clipped


def _wide(leaf: Tensor) -> torch.dtype:
    return torch.promote_types(leaf.dtype, torch.float32)


def check_finite() -> GradientMap:
    """Return a map that leaves gradients as they are and raises when one holds nan or an infinity.

    It reads the values, which waits for a GPU and which no trace or transform can do.

    Raises:
        UnsupportedError: Called inside a transform or a trace.

    Examples:
        >>> opt = tdf.optim.chain(tdf.optim.check_finite(), tdf.optim.sgd(lr=0.1))
    """
    return GradientMap("check_finite", _check_values)


def _check_values(grads: TensorCollection, leaves: Leaves) -> Leaves:
    if not has_values():
        raise UnsupportedError(
            "check_finite: the values must be there to read.",
            got="a transform or trace",
            hint="call it on the gradients outside.",
        )
    for path, leaf in zip(list_paths(grads), leaves, strict=True):
        if not bool(torch.isfinite(leaf).all()):
            raise error(
                FloatingPointError,
                f"check_finite: the gradient of {dotted(path)!r} must be finite.",
                got=f"{int(leaf.isnan().sum())} nan, {int(leaf.isinf().sum())} inf of {leaf.numel()}",
            )
    return leaves
