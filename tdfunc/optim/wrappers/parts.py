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
from tdfunc.ops.base.reading import entries
from tdfunc.ops.edits.structure import keep_leaves
from tdfunc.optim.apart import lie_apart
from tdfunc.optim.base import AbstractOptimizer, How
from tdfunc.optim.checks import check_active, check_dense, check_keys, check_state, list_gradients, list_trainable
from tdfunc.optim.execution import grads_of, select_members, takes_kernels
from tdfunc.optim.lists import LOW_PRECISION, Leaves, restore, widen

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)


# Any: entries of a state are trees and tensors.
def make_state(
    name: str, optimizer: AbstractOptimizer, params: TensorCollection, data: dict[str, Any], *counts: str
) -> "TensorDict":
    """Return a state with the inner optimizer's state, other entries, and counts of 0 for each member."""
    leaves = list_trainable(name, params)
    size = params._batch_size
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
    for what in wanted:
        # The rest of `masters` has the 16-bit leaves alone, and is read by path.
        if what != "rest" and isinstance(state._data[what], TensorCollection):
            check_keys(name, what, params, state._data[what])
    given = list_gradients(name, params, leaves, grads)
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
    if mask is None:
        return new
    return torch.where(mask, new, old)


def make_rest(params: TensorCollection) -> TensorCollection:
    """Return zeros for the 16-bit leaves: what their rounding cuts off, in float32."""
    low = [entry for entry in entries(params) if entry.leaf.dtype in LOW_PRECISION]
    # A tied leaf, under all of its names.
    rest = keep_leaves(params, {path for entry in low for path in entry.paths})
    return rebuild(rest, [torch.zeros_like(leaf) for leaf in widen(list_leaves(rest))])


def add_rest(params: TensorCollection, leaves: Leaves, rest: TensorCollection) -> Leaves:
    """Return the 16-bit leaves in float32, with what rounding has cut off, and the other leaves as they are."""
    cut = dict(zip(list_paths(rest), list_leaves(rest), strict=True))
    rows = zip(list_paths(params), leaves, strict=True)
    return [leaf.float() + cut[path] if path in cut else leaf for path, leaf in rows]


def split_rest(
    full: Leaves, before: Leaves, rest: TensorCollection, active: Tensor | None
) -> tuple[Leaves, TensorCollection]:
    """Return new leaves in the dtypes of the parameters before the step, and what this rounding cuts off."""
    short = restore(full, before)
    # A number and its 16-bit rounding are so near that float32 holds their difference exactly.
    cut = [x - y.float() for x, y in zip(full, short, strict=True) if y.dtype in LOW_PRECISION]
    if active is not None:
        # An inactive member's sums may be rounded.
        cut = select_members(active, cut, list_leaves(rest))
        short = select_members(active, short, before)
    return short, rebuild(rest, cut)


def rebuild_params(params: T, leaves: Leaves, before: Leaves) -> T:
    """Return the parameters after a step; one that requires grad is a leaf that does, unless the step is followed."""
    if not in_functorch():
        for leaf, old in zip(leaves, before, strict=True):
            if leaf is not old and old.requires_grad and not leaf.requires_grad:
                leaf.requires_grad_()
    return rebuild(params, leaves)
