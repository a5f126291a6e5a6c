"""Functions of gradient trees for `chain`: clipping by norm, and weight decay."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.keys import Filter, FilterLike
from tdfunc.core.types import Path
from tdfunc.core.walk import list_leaves, list_paths, rebuild
from tdfunc.ops.base.reading import entries
from tdfunc.optim.checks import check_dense, check_hyper, check_tree, list_gradients
from tdfunc.optim.lists import Leaves

T = TypeVar("T", bound=TensorCollection)


@dataclass(frozen=True, eq=False)
class GradientMap:
    """A function from a tree of gradients to another, which `chain` puts before an optimizer."""

    name: str
    leaves: Callable[[TensorCollection, Leaves], Leaves] | None = None
    # Of the gradients and the parameters.
    pairs: Callable[[TensorCollection, Leaves, Leaves], Leaves] | None = None
    # Whether the new gradients of a member depend on other members.
    joins_members: bool = True

    def __repr__(self) -> str:
        return self.name

    def __call__(self, grads: T, params: TensorCollection | None = None) -> T:
        """Return the new gradients, given the parameters if the map reads them."""
        if self.leaves is not None:
            return rebuild(grads, self.leaves(grads, list_leaves(grads)))
        assert self.pairs is not None
        check_tree(self.name, "params", params)
        assert params is not None
        leaves = list_leaves(params)
        given = list_gradients(self.name, params, leaves, grads)
        return rebuild(grads, self.pairs(grads, given, leaves))


def clip_by_global_norm(max_norm: float) -> GradientMap:
    """Return a map that scales gradients so that the norm of all of them together is at most `max_norm`.

    In a stacked tree this couples the members; `clip_by_member_norm` does not. In a `chain`, members that are not
    `active` do not count.

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
        UnsupportedError: The map is called on gradients whose members are rows of a lazy stack.

    Source:
        `torch.nn.utils.clip_grad_norm_` for each member.

    Examples:
        >>> grads = TensorDict({"a": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}, [2])
        >>> tdf.optim.clip_by_member_norm(1.0)(grads)["a"]
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    return _make("clip_by_member_norm", max_norm, members=True)


def _make(name: str, max_norm: float, *, members: bool) -> GradientMap:
    if max_norm != math.inf:
        check_hyper(name, "max_norm", max_norm, 0.0)
    return GradientMap(name, partial(_clip, max_norm, members), joins_members=not members)


def _clip(max_norm: float, members: bool, grads: TensorCollection, leaves: Leaves) -> Leaves:
    # To an infinite norm an infinite gradient would have no ratio.
    if not leaves or max_norm == math.inf:
        return leaves
    size = grads._batch_size if members else ()
    if members:
        check_dense("clip_by_member_norm", grads)
    scale = (max_norm / (member_norm(leaves, len(size)) + 1e-6)).clamp(max=1.0)
    clipped: Leaves = []
    for leaf in leaves:
        factor = scale.reshape((*size, *[1] * (leaf.dim() - len(size)))).to(_wide(leaf))
        clipped.append((leaf.to(_wide(leaf)) * factor).to(leaf.dtype))
    return clipped


def member_norm(leaves: Leaves, dims: int) -> Tensor:
    """Return the norm of all leaves together for each entry of their leading dimensions."""
    norms: Leaves = []
    for leaf in leaves:
        rows, inner = with_inner(leaf, dims)
        # In half precision the norm of ordinary gradients overflows, and they would come out as zeros.
        norms.append(torch.linalg.vector_norm(rows, dim=inner, dtype=_wide(leaf)))
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def with_inner(leaf: Tensor, dims: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return a leaf with the dimensions of the elements of a member, at least one, which come after the leading ones.

    They are not made one dimension, because torch does not flatten a DTensor whose ranks have parts of other lengths.
    """
    if leaf.dim() == dims:
        leaf = leaf.unsqueeze(-1)
    return leaf, tuple(range(dims, leaf.dim()))


def _wide(leaf: Tensor) -> torch.dtype:
    return torch.promote_types(leaf.dtype, torch.float32)


def adaptive_grad_clip(clipping: float, *, eps: float = 1e-3) -> GradientMap:
    """Return a map that scales gradients so that their norm is at most a part of the norm of their parameters.

    A norm is taken over a unit: the weights into one output (a row of a matrix, a filter of a convolution), or the
    complete leaf if it is a vector or a number. Each member is clipped by itself.

    Args:
        clipping: The largest norm of a gradient, as a part of the norm of its parameters.
        eps: The least norm of parameters that is counted with, so that zeros can be trained.

    Raises:
        ValueError: `clipping` or `eps` is negative or nan.
        UnsupportedError: Members are rows of a lazy stack.

    Source:
        Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization" (2021), equation 3;
        `optax.adaptive_grad_clip`, in which outputs are the last dimension.

    Examples:
        >>> params = TensorDict({"w": torch.ones(2, 1)})
        >>> grads = TensorDict({"w": torch.tensor([[1.0], [0.01]])})
        >>> tdf.optim.adaptive_grad_clip(0.1)(grads, params)["w"].flatten()
        tensor([0.1000, 0.0100])
    """
    check_hyper("adaptive_grad_clip", "clipping", clipping, 0.0)
    check_hyper("adaptive_grad_clip", "eps", eps, 0.0)
    return GradientMap("adaptive_grad_clip", pairs=partial(_clip_units, clipping, eps), joins_members=False)


def _clip_units(clipping: float, eps: float, grads: TensorCollection, leaves: Leaves, params: Leaves) -> Leaves:
    check_dense("adaptive_grad_clip", grads)
    size = len(grads._batch_size)
    clipped = list[Tensor]()
    for grad, param in zip(leaves, params, strict=True):
        largest = clipping * _unit_norm(param, size).clamp(min=eps)
        norm = _unit_norm(grad, size)
        # An empty unit, or one of zeros, is not divided by.
        scaled = grad.to(_wide(grad)) * (largest / norm.clamp(min=1e-6))
        clipped.append(torch.where(norm > largest, scaled.to(grad.dtype), grad))
    return clipped


def _unit_norm(leaf: Tensor, size: int) -> Tensor:
    inner = leaf.dim() - size
    dims = list(range(size if inner < 2 else size + 1, leaf.dim()))
    # A list of no dimensions would mean all of them.
    if not dims:
        return leaf.to(_wide(leaf)).abs()
    return torch.linalg.vector_norm(leaf, dim=dims, keepdim=True, dtype=_wide(leaf))


def add_decayed_weights(weight_decay: float, where: "FilterLike | None" = None) -> GradientMap:
    """Return a map that adds a multiple of the parameters to their gradients.

    In `chain(add_decayed_weights(0.1), sgd())` it is the `weight_decay` of `sgd`, for the leaves of a filter. After a
    clip in a chain, the decay is not clipped.

    Args:
        weight_decay: The multiple.
        where: The leaves that decay: a glob on the dotted path, or a `Filter`. By default all leaves.

    Raises:
        ValueError: `weight_decay` is negative or nan.
        FilterError: A pattern matches no leaf of the gradients.

    Source:
        `optax.add_decayed_weights`.

    Examples:
        >>> params = TensorDict({"weight": torch.ones(2), "bias": torch.ones(2)})
        >>> grads = tdf.optim.add_decayed_weights(0.1, "*weight")(params, params)
        >>> grads["weight"], grads["bias"]
        (tensor([1.1000, 1.1000]), tensor([1., 1.]))
    """
    check_hyper("add_decayed_weights", "weight_decay", weight_decay, 0.0)
    chosen = None
    if where is not None:
        chosen = Filter(where)
    return GradientMap("add_decayed_weights", pairs=partial(_add_decay, weight_decay, chosen), joins_members=False)


def _add_decay(factor: float, where: Filter | None, grads: TensorCollection, leaves: Leaves, params: Leaves) -> Leaves:
    chosen: set[Path] | None = None
    if where is not None:
        found = entries(grads)
        chosen = {path for entry, kept in zip(found, where.mask(found), strict=True) if kept for path in entry.paths}
    rows = zip(list_paths(grads), leaves, params, strict=True)
    return [grad.add(param, alpha=factor) if chosen is None or path in chosen else grad for path, grad, param in rows]
