"""Parts of optimizers that hold another one: their state and checks, and leaves by member."""

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import in_functorch, is_known
from tdfunc.core.keys import dotted
from tdfunc.core.memory import repeats_itself
from tdfunc.core.walk import list_leaves, list_paths, rebuild
from tdfunc.ops.base.convert import join_nodes
from tdfunc.optim._base import AbstractOptimizer, How
from tdfunc.optim._checks import check_active, check_dense, check_state, list_matching, list_trainable
from tdfunc.optim._lists import Leaves
from tdfunc.optim._run import grads_of, lie_apart, takes_kernels

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)


# Any: entries of a state are trees and tensors.
def make_state(
    name: str, optimizer: AbstractOptimizer, params: TensorCollection, data: dict[str, Any], *counts: str
) -> "TensorDict":
    """Return a state with the inner optimizer's state, other entries, and counts of 0 for each member."""
    leaves, size = list_trainable(name, params), params._batch_size
    check_dense(f"{name}.init", params)
    zeros = torch.zeros(size, dtype=torch.int64, device=leaves[0].device if leaves else None)
    data = {"optimizer": optimizer.init(params), **data, **{count: zeros.clone() for count in counts}}
    return join_nodes(data, size, params._device, params._names)


def begin_step(
    name: str, params: TensorCollection, grads: TensorCollection, state: "TensorDict", wanted: set[str], how: How
) -> tuple[Leaves, Leaves, How]:
    """Return the leaves of params and gradients after all checks, and whether memory may be overwritten."""
    leaves = list_trainable(name, params)
    check_state(name, state, {"optimizer", *wanted})
    given = list_matching(name, "gradient", params, leaves, grads)
    check_active(name, how.active, params._batch_size)
    if not how.donate or not takes_kernels([*leaves, *given]):
        return leaves, given, replace(how, donate=False)
    kept = list_leaves(state)
    # A step count is expanded, and not overwritten.
    writes = [*leaves, *[x for x in kept if not repeats_itself(x)]]
    reads = [*given, *filter(repeats_itself, kept)]

    def names() -> list[str]:
        pairs = [zip(list_leaves(tree), list_paths(tree), strict=True) for tree in (state, params)]
        paths = {id(leaf): dotted(path) for leaf, path in chain.from_iterable(pairs)}
        return [*(paths[id(x)] for x in writes), *["a gradient"] * len(given), *["a count"] * len(kept)]

    return leaves, given, replace(how, donate=lie_apart(names, writes, reads))


def step_some(
    optimizer: AbstractOptimizer,
    params: T,
    grads: TensorCollection,
    state: "TensorDict",
    chosen: Tensor,
    how: How,
) -> "tuple[T, TensorDict]":
    """Do a step of the chosen members; where none is chosen, and this is known, nothing is computed."""
    if is_known(chosen):
        if not bool(chosen.any()):
            return params, state
        if bool(chosen.all()):
            return how.step(optimizer, params, grads, state)
    return replace(how, active=chosen).step(optimizer, params, grads, state)


def copy_start(leaves: Leaves) -> Leaves:
    """Return copies of the parameters before the first step; derivatives reach those that are results."""
    with grads_of(leaves):
        return [leaf.clone() for leaf in leaves]


def select(mask: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """Return a tensor of one value for each member, new where the mask is True."""
    return new if mask is None else torch.where(mask, new, old)


def rebuild_params(params: T, leaves: Leaves, before: Leaves) -> T:
    """Return the parameters after a step; one that requires grad is a leaf that does, unless the step is followed."""
    if not in_functorch():
        for leaf, old in zip(leaves, before, strict=True):
            if leaf is not old and old.requires_grad and not leaf.requires_grad:
                leaf.requires_grad_()
    return rebuild(params, leaves)
