"""`EnsembleModule`: an `nn.Module` that owns the stacked tree of an ensemble."""

from collections.abc import Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils._pytree import tree_leaves

from tdfunc import random
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import UnsupportedError
from tdfunc.core.keys import FilterLike, dotted
from tdfunc.core.types import Kind, Path
from tdfunc.ensemble.call import find_shared, members_of
from tdfunc.ensemble.ensemble import Ensemble, How
from tdfunc.modules.extract import from_module, split
from tdfunc.modules.functional import Apply
from tdfunc.nn.base import as_node
from tdfunc.ops.base.reading import entries, iter_items

if TYPE_CHECKING:
    from typing_extensions import Self


class EnsembleModule(nn.Module):
    """All members of an ensemble as one module, for code that needs an `nn.Module`.

    The leaves of the stacked tree are its parameters and buffers, under `members` and their own names: `.to`,
    `state_dict`, torch's optimizers, DistributedDataParallel and Lightning find them there. Parameters that did not
    require grad in the module of `apply` do not require grad here either; `requires_grad_` changes it. Layers have the
    modes of `apply` until `train()` or `eval()` sets all of them.

    Args:
        apply: The pure function of one member, from `functional`.
        tree: The stacked tree, which is copied.
        how: How to run the members, as in `Ensemble`.
        chunk_size: The largest number of members that vmap runs together, as in `Ensemble`.
        shared: A filter for leaves without a member dimension, as in `Ensemble`. Do not share buffers that change in
            training.

    Raises:
        BatchSizeError: The tree is not stacked.
        UnsupportedError: The tree has extra state, or non-tensor data.

    Shapes:
        A forward that gives (B, *F) for one member gives (E, B, *F).

    Examples:
        >>> make = lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> apply, _, _ = tdf.functional(make())
        >>> model = EnsembleModule(apply, tdf.init_ensemble(make, 4))
        >>> model(torch.zeros(5, 3)).shape, [*dict(model.named_parameters())][:2]
        (torch.Size([4, 5, 2]), ['members.0.weight', 'members.0.bias'])
    """

    def __init__(
        self,
        apply: Apply,
        tree: TensorCollection,
        *,
        how: How = "auto",
        chunk_size: int | None = None,
        shared: "FilterLike | None" = None,
    ) -> None:
        super().__init__()
        self._ensemble = Ensemble(apply, how, chunk_size=chunk_size, shared=shared)
        if self._ensemble.shared is None:
            members_of(tree)
        else:
            find_shared(self._ensemble.shared, tree, None)
        self.members: nn.Module = _module_of(tree, apply.frozen)
        self.training: bool = apply.module.training

    def train(self, mode: bool = True) -> "Self":
        """Set the mode of all layers, and return this module."""
        old = self._ensemble
        self._ensemble = Ensemble(old.apply.train(mode), old.how, chunk_size=old.chunk_size, shared=old.shared)
        return super().train(mode)

    @property
    def tree(self) -> Any:
        """The live parameters and buffers as a stacked tree; without a batch size, if members share some."""
        tree = from_module(self.members)
        if self._ensemble.shared is not None:
            return tree
        return tree.with_batch_size(next(iter(tree_leaves(tree))).shape[:1])

    # Any: arguments and results of forward.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and its hooks; in a graph of torch.fx the module is one node."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Proxy):
                return as_node(self, value, args, kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, in_dims: Any = None, rng: Any = None, **kwargs: Any) -> Any:
        """Return the members' outputs, stacked along a new first dimension.

        In training mode new buffers are kept, and draws without `rng` take a seed from torch's default generator.

        Args:
            *args: Arguments of a member's forward, shared by the members unless `in_dims` maps them.
            in_dims: The member dimension of each argument, as in `Ensemble`.
            rng: A random key, a seed or a generator, as in `Ensemble`.
            **kwargs: Keyword arguments of forward, shared by the members.
        """
        if not self.training:
            return self._ensemble(self.tree, *args, in_dims=in_dims, rng=rng, **kwargs)
        if rng is None:
            # A tensor: in a trace or a map it has no value here.
            rng = random.key(torch.randint(1 << 62, ()))
        params, buffers = split(self.tree)
        out, new = self._ensemble.with_buffers(params, buffers, *args, in_dims=in_dims, rng=rng, **kwargs)
        with torch.no_grad():
            buffers.update_(new)
        return out


def _module_of(tree: TensorCollection, frozen: Set[Path]) -> nn.Module:
    """Return modules in modules whose slots hold copies of the leaves; tied leaves are one parameter.

    Parameters at the paths in `frozen` do not require grad.
    """
    for path, node in iter_items(tree, nested=True, leaves_only=True):
        if not isinstance(node, Tensor):
            raise UnsupportedError(
                f"EnsembleModule: leaf {dotted(path)!r} is not a tensor.",
                expected="parameters and buffers",
                got=type(node).__name__,
            )
    root = nn.Module()
    for entry in entries(tree):
        copied = entry.leaf.detach().clone()
        learned = entry.kind in (None, Kind.PARAMETER) and (copied.is_floating_point() or copied.is_complex())
        slot = copied
        if learned:
            slot = nn.Parameter(copied, requires_grad=frozen.isdisjoint(entry.paths))
        for path in entry.paths:
            owner = _submodule_at(root, path[:-1])
            if isinstance(slot, nn.Parameter):
                owner.register_parameter(path[-1], slot)
            else:
                owner.register_buffer(path[-1], slot, persistent=entry.kind is not Kind.NON_PERSISTENT)
    return root


def _submodule_at(root: nn.Module, path: Path) -> nn.Module:
    """Return the submodule at a path; it and those on the way are made where they are missing."""
    module = root
    for name in path:
        child = module._modules.get(name)
        if child is None:
            child = nn.Module()
            module.add_module(name, child)
        module = child
    return module
