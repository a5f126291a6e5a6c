"""Optimizers made of others: `chain` and `masked`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import error
from tdfunc.core.keys import FilterLike
from tdfunc.core.walk import list_leaves, list_paths, rebuild
from tdfunc.ops import structure
from tdfunc.ops.reading import entries
from tdfunc.optim._base import AbstractOptimizer
from tdfunc.optim._checks import check_tree
from tdfunc.optim._clip import GradientMap

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

T = TypeVar("T", bound=TensorCollection)


@dataclass(frozen=True, eq=False)
class Chain:
    """An optimizer that sees gradients through maps; its state is that of the optimizer."""

    maps: tuple[GradientMap, ...]
    last: AbstractOptimizer

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state before the first step."""
        return self.last.init(params)

    def update(
        self,
        params: T,
        grads: TensorCollection,
        state: "TensorDict",
        *,
        active: Tensor | None = None,
        donate: bool = False,
    ) -> "tuple[T, TensorDict]":
        """Map the gradients, then do the step of the last member; see `Optimizer.update`."""
        for item in self.maps:
            grads = item(grads)
        return self.last.update(params, grads, state, active=active, donate=donate)


@dataclass(frozen=True, eq=False)
class Masked:
    """An optimizer of a part of the tree; the other leaves stay as they are."""

    optimizer: AbstractOptimizer
    where: FilterLike

    def init(self, params: TensorCollection) -> "TensorDict":
        """Return the state for the chosen leaves; raises FilterError if there are none."""
        check_tree("masked", "params", params)
        return self.optimizer.init(structure.partition(params, self.where)[0])

    def update(
        self,
        params: T,
        grads: TensorCollection,
        state: "TensorDict",
        *,
        active: Tensor | None = None,
        donate: bool = False,
    ) -> "tuple[T, TensorDict]":
        """Do a step of the chosen leaves; gradients of others may be missing. See `Optimizer.update`."""
        check_tree("masked", "params", params)
        part = structure.partition(params, self.where)[0]
        # A tied leaf under all of its names, so that the gradients keep the tie.
        chosen = {path for entry in entries(part) for path in entry.paths}
        given = structure.keep_leaves(grads, chosen) if isinstance(grads, TensorCollection) else grads
        new, state = self.optimizer.update(part, given, state, active=active, donate=donate)
        changed = dict(zip(list_paths(part), list_leaves(new), strict=True))
        leaves = [changed.get(path, leaf) for path, leaf in zip(list_paths(params), list_leaves(params), strict=True)]
        return rebuild(params, leaves), state


def chain(*members: GradientMap | AbstractOptimizer) -> Chain:
    """Return an optimizer whose gradients pass through maps first.

    Args:
        *members: Any number of maps (`clip_by_global_norm`, ...), then one optimizer.

    Raises:
        TypeError: The last member is not an optimizer, or one before it is not a map.

    Examples:
        >>> opt = tdf.optim.chain(tdf.optim.clip_by_member_norm(1.0), tdf.optim.adamw(lr=1e-3))
        >>> params = TensorDict({"w": torch.ones(4, 3)}, [4])
        >>> params, state = opt.update(params, params, opt.init(params))
        >>> state["step"]
        tensor([1, 1, 1, 1])
    """
    if not members or isinstance(members[-1], GradientMap):
        raise error(
            TypeError, "chain: the last member must be an optimizer.", got=_names(members), hint="chain(clip, adam())"
        )
    maps = [item for item in members[:-1] if isinstance(item, GradientMap)]
    if len(maps) < len(members) - 1:
        raise error(
            TypeError,
            "chain: members before the last must be maps of gradients.",
            expected="clip_by_global_norm(...), ..., then one optimizer",
            got=_names(members),
            hint="give each optimizer its part of the tree with masked().",
        )
    return Chain(tuple(maps), members[-1])


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
    return Masked(optimizer, where)


def _names(members: tuple[object, ...]) -> str:
    return ", ".join(type(item).__name__ for item in members) or "nothing"
