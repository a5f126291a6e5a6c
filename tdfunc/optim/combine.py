"""Optimizers made of others: `chain`, `masked` and `multi`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import FilterError, brief, error
from tdfunc.core.keys import Entry, Filter, FilterLike, assign, dotted
from tdfunc.core.types import Path
from tdfunc.core.walk import list_leaves, list_paths, rebuild
from tdfunc.ops.base.convert import join_nodes
from tdfunc.ops.base.reading import entries
from tdfunc.ops.edits.structure import keep_leaves, part_leaves
from tdfunc.optim.apart import lie_apart
from tdfunc.optim.base import AbstractOptimizer, How
from tdfunc.optim.checks import check_active, check_keys, check_state, check_tree
from tdfunc.optim.execution import carry_graph, grads_of, order, select_members, takes_kernels
from tdfunc.optim.gradient_maps import GradientMap
from tdfunc.optim.lists import Leaves

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)


@dataclass(frozen=True, eq=False)
class Chain(AbstractOptimizer):
    """An optimizer whose gradients pass through maps first; its state is the state of the last member."""

    maps: tuple[GradientMap, ...]
    last: AbstractOptimizer

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first step."""
        return self.last.init(params)

    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        leaves = []
        if isinstance(params, TensorCollection):
            leaves = list_leaves(params)
        given = []
        if isinstance(grads, TensorCollection):
            given = list_leaves(grads)
        # Maps read parameters, which may require grad for the loss alone.
        with grads_of(leaves, given):
            if self.maps and len(given) == len(leaves) and takes_kernels([*leaves, *given]):
                given = order(given, leaves)
                grads = rebuild(grads, given)
            if self.maps and how.active is not None and given:
                check_active("chain", how.active, params._batch_size)
                # Any function may be a map.
                if any([getattr(item, "joins_members", True) for item in self.maps]):
                    grads = _without_inactive(grads, given, how.active)
            for item in self.maps:
                grads = item(grads, params)
        return how.step(self.last, params, grads, state)

    def eval_params(self, params: T, state: "TensorDict") -> T:
        """Return the parameters that the last member evaluates."""
        return self.last.eval_params(params, state)


def _without_inactive(grads: TensorCollection, leaves: Leaves, active: Tensor) -> TensorCollection:
    """Return gradients that are 0 where a member is not active, whose NaN would reach others by a common norm."""
    if any([leaf.layout is not torch.strided for leaf in leaves]):
        return grads
    return rebuild(grads, select_members(active, leaves, [torch.zeros_like(leaf) for leaf in leaves]))


@dataclass(frozen=True, eq=False)
class Masked(AbstractOptimizer):
    """An optimizer of a part of the tree; the other leaves stay as they are."""

    optimizer: AbstractOptimizer
    where: Filter

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state for the chosen leaves; raises FilterError if there are none."""
        return self.optimizer.init(keep_leaves(params, self._choose(params)))

    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        steps = [(self.optimizer, self._choose(params), state)]
        check_tree("masked.update", "the gradient", grads)
        new, (state,) = _step_parts(params, grads, steps, how)
        return new, state

    def eval_params(self, params: T, state: "TensorDict") -> T:
        """Return the parameters that the optimizer evaluates, and the other leaves as they are."""
        return _eval_parts(params, [(self.optimizer, self._choose(params), state)])

    def _choose(self, params: TensorCollection) -> set[Path]:
        """Return the paths of the chosen leaves."""
        check_tree("masked", "params", params)
        found = entries(params)
        return _paths_where(found, self.where.mask(found))


@dataclass(frozen=True, eq=False)
class Multi(AbstractOptimizer):
    """An optimizer for each group of leaves; the state has an entry for each, "0" for the first."""

    groups: Mapping[Filter, AbstractOptimizer]

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first step; raises FilterError if a filter or a leaf has no match."""
        parts = part_leaves(params, self._choose(params))
        data: dict[str, Any] = {}
        for i, (optimizer, part) in enumerate(zip(self.groups.values(), parts, strict=True)):
            data[str(i)] = optimizer.init(part)
        return join_nodes(data, params._batch_size, params._device, params._names)

    def _step(self, params: T, grads: TensorCollection, state: "TensorDict", how: How) -> "tuple[T, TensorDict]":
        chosen = self._choose(params)
        check_keys("multi", "gradient", params, grads)
        names = [str(i) for i in range(len(chosen))]
        check_state("multi", state, set(names))
        steps = list(zip(self.groups.values(), chosen, [state._data[name] for name in names], strict=True))
        new, states = _step_parts(params, grads, steps, how)
        return new, state._replace(dict(zip(names, states, strict=True)))

    def eval_params(self, params: T, state: "TensorDict") -> T:
        """Return the parameters that the optimizer of each group evaluates."""
        states = [state._data[str(i)] for i in range(len(self.groups))]
        return _eval_parts(params, list(zip(self.groups.values(), self._choose(params), states, strict=True)))

    def _choose(self, params: TensorCollection) -> list[set[Path]]:
        """Return the paths of the leaves of each group."""
        check_tree("multi", "params", params)
        found = entries(params)
        numbers = assign(found, {where: i for i, where in enumerate(self.groups)}, "multi")
        used = set(numbers)
        for i, where in enumerate(self.groups):
            matches = 0
            if found and i not in used:
                matches = sum(where.mask(found))
            # A filter for all leaves that are left may find none; one for some leaves comes too late.
            if 0 < matches < len(found):
                raise FilterError(
                    f"multi: no leaf is left for the group {where}.",
                    expected="a leaf that no group before it has",
                    got=f"{matches} matches, all in groups before it",
                    hint="put this group first: a leaf goes to the first filter that matches it.",
                )
        chosen: list[set[Path]] = [set() for _ in self.groups]
        for entry, number in zip(found, numbers, strict=True):
            # A tied leaf goes there under all of its names.
            chosen[number].update(entry.paths)
        return chosen


def _paths_where(found: list[Entry], mask: list[bool]) -> set[Path]:
    """Return the paths of the chosen leaves: a tied leaf under all of its names, so that gradients keep the tie."""
    return {path for entry, chosen in zip(found, mask, strict=True) if chosen for path in entry.paths}


# Any: the states.
def _step_parts(params: T, grads: TensorCollection, steps: list[Any], how: How) -> tuple[T, list[Any]]:
    """Return the parameters and states after a step (optimizer, paths, state) of each part."""
    leaves = dict(zip(list_paths(params), list_leaves(params), strict=True))
    writes = list(leaves.values())
    reads = list_leaves(grads)

    def names() -> list[str]:
        return [*map(dotted, leaves), *(f"gradient of {dotted(path)}" for path in list_paths(grads))]

    # The optimizers look for shared memory in their own parts only.
    apart = how.donate and takes_kernels([*writes, *reads]) and lie_apart(names, writes, reads)
    states: list[Any] = []
    if torch.is_grad_enabled() and carry_graph(writes, reads):
        # Each part decides by its own leaves. As results, they are followed where others are.
        params = rebuild(params, [leaf.view_as(leaf) if leaf.requires_grad else leaf for leaf in writes])
    chosen = [paths for _, paths, _ in steps]
    parts = zip(steps, part_leaves(params, chosen), part_leaves(grads, chosen), strict=True)
    for (optimizer, _, state), part, given in parts:
        new, state = optimizer.update(part, given, state, active=how.active, donate=apart)
        leaves.update(zip(list_paths(part), list_leaves(new), strict=True))
        states.append(state)
    return rebuild(params, list(leaves.values())), states


# Any: the states.
def _eval_parts(params: T, steps: list[Any]) -> T:
    leaves = dict(zip(list_paths(params), list_leaves(params), strict=True))
    parts = part_leaves(params, [paths for _, paths, _ in steps])
    for (optimizer, _, state), part in zip(steps, parts, strict=True):
        leaves.update(zip(list_paths(part), list_leaves(optimizer.eval_params(part, state)), strict=True))
    return rebuild(params, list(leaves.values()))


def chain(*members: GradientMap | AbstractOptimizer) -> Chain:
    """Return an optimizer whose gradients pass through maps first.

    Args:
        *members: Any number of maps (`clip_by_global_norm`, ...), then one optimizer.

    Raises:
        TypeError: The last argument is not an optimizer, or another one is.

    Examples:
        >>> opt = tdf.optim.chain(tdf.optim.clip_by_member_norm(1.0), tdf.optim.adamw(lr=1e-3))
        >>> params = TensorDict({"w": torch.ones(4, 3)}, [4])
        >>> params, state = opt.update(params, params, opt.init(params))
        >>> state["step"]
        tensor([1, 1, 1, 1])
    """
    # Any: maps, and an optimizer.
    given: Any = members
    are_maps = [callable(each) and not hasattr(each, "update") for each in members]
    if not members or not hasattr(given[-1], "update") or not all(are_maps[:-1]):
        raise error(
            TypeError,
            "chain: the arguments are not maps of gradients and then one optimizer.",
            expected="chain(clip_by_global_norm(1.0), adamw())",
            got=brief(members),
        )
    *maps, last = given
    return Chain(tuple(maps), last)


def masked(optimizer: AbstractOptimizer, where: FilterLike) -> Masked:
    """Return an optimizer of the leaves that a filter chooses; the others stay as they are.

    Args:
        optimizer: The optimizer of the chosen leaves.
        where: A glob on the dotted path, or a `Filter`.

    Examples:
        >>> params = TensorDict({"head": {"w": torch.ones(2)}, "trunk": {"w": torch.ones(2)}})
        >>> opt = tdf.optim.masked(tdf.optim.sgd(lr=0.5), "head.*")
        >>> params, state = opt.update(params, params, opt.init(params))
        >>> params["head", "w"], params["trunk", "w"]
        (tensor([0.5000, 0.5000]), tensor([1., 1.]))
    """
    return Masked(optimizer, Filter(where))


def multi(groups: Mapping[FilterLike, AbstractOptimizer]) -> Multi:
    """Return an optimizer that gives each leaf to the optimizer of the first filter that matches it.

    Args:
        groups: Optimizers by glob on the dotted path, or by `Filter`; a function in a filter is given leaves with their
            batch dimensions.

    Source:
        The parameter groups of `torch.optim`.

    Examples:
        >>> optim, is_vector = tdf.optim, tdf.Filter(lambda path, leaf: leaf.dim() < 2)
        >>> groups = optim.multi({is_vector: optim.adamw(1e-3, weight_decay=0.0), "*": optim.adamw(1e-3)})
        >>> opt = optim.chain(optim.clip_by_global_norm(1.0), groups)
        >>> params = TensorDict({"weight": torch.ones(2, 3), "bias": torch.ones(3)})
        >>> opt.init(params)["0", "exp_avg"].paths()
        [('bias',)]
    """
    return Multi({Filter(where): optimizer for where, optimizer in groups.items()})
