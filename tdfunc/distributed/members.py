"""Members of an ensemble over a device mesh: each rank computes on plain tensors between DTensors."""

import importlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from tdfunc.core.errors import LeafMismatchError
from tdfunc.storage.disk.ranks import is_sharded


def _tensor_module() -> Any:
    # At its first use: the import takes long.
    return importlib.import_module("torch.distributed.tensor")


def _over_members(mesh: DeviceMesh) -> list[Any]:
    """Return the placements of leaves whose first dimension is spread over the first dimension of a mesh."""
    module = _tensor_module()
    return [module.Shard(0), *[module.Replicate()] * (mesh.ndim - 1)]


# Any: a tree, a tensor, or a container of these.
def shard(tree: Any, mesh: DeviceMesh, placements: Sequence[Any] | None = None) -> Any:
    """Return a tree of DTensors, of which each rank keeps its part. Every rank calls it with the complete tree.

    Args:
        tree: A tree, tensor, or container of these, the same on all ranks. Nothing is sent.
        mesh: The mesh of the ranks. The parts are as in torch: of 5 members on 4 ranks, one rank has no member.
        placements: Torch's placements, one for each dimension of the mesh. By default the first dimension of each leaf,
            the members, is spread over the first dimension of the mesh.
    """
    given = _over_members(mesh) if placements is None else placements
    distribute = _tensor_module().distribute_tensor
    return pytree.tree_map_only(Tensor, lambda leaf: distribute(leaf, mesh, given, src_data_rank=None), tree)


def to_local(tree: Any) -> Any:
    """Return a tree of plain tensors: this rank's parts of DTensors, and other leaves unchanged."""
    return pytree.tree_map(lambda leaf: leaf.to_local() if is_sharded(leaf) else leaf, tree)


def from_local(tree: Any, mesh: DeviceMesh, placements: Sequence[Any] | None = None) -> Any:
    """Return a tree of DTensors around this rank's parts, which may differ in length along the members.

    Args:
        tree: This rank's tree, tensor, or container of these.
        mesh: The mesh of the ranks.
        placements: As for `shard`.
    """
    given = _over_members(mesh) if placements is None else list(placements)
    counts: dict[tuple[int, int], int] = {}

    def count(leaf: Tensor, axis: int, dim: int) -> int:
        # One sum for each length that occurs, not for each leaf.
        size = leaf.shape[dim]
        if (axis, size) not in counts:
            total = torch.tensor(size, device=mesh.device_type)
            dist.all_reduce(total, group=mesh.get_group(axis))
            counts[axis, size] = int(total)
        return counts[axis, size]

    def wrap(leaf: Tensor) -> Any:
        shape = list(leaf.shape)
        for axis, placement in enumerate(given):
            if placement.is_shard():
                if placement.dim >= leaf.dim():
                    raise LeafMismatchError(
                        "from_local: each leaf must have the dimension of the members.",
                        expected=f"{placement.dim + 1} dimensions or more",
                        got=f"shape {list(leaf.shape)}",
                    )
                shape[placement.dim] = count(leaf, axis, placement.dim)
        whole = torch.empty(shape, device="meta")
        make = _tensor_module().DTensor.from_local
        return make(leaf, mesh, given, shape=whole.shape, stride=whole.stride())

    return pytree.tree_map_only(Tensor, wrap, tree)


def on_members(fn: Callable[..., Any], mesh: DeviceMesh, placements: Sequence[Any] | None = None) -> Callable[..., Any]:
    """Return a function that runs `fn` on this rank's members and returns its results as DTensors.

    The members are computed as in one process, without DTensors and without messages: `vmap`, `jit`, convolutions and
    random keys work. `y.full_tensor()` gathers a result.

    Args:
        fn: A function of trees and tensors. It gets this rank's parts of DTensors; the members are the first dimension
            of its results.
        mesh: The mesh of the ranks.
        placements: The placements of the results, as for `shard`: `[Shard(0), Shard(1)]` if the second dimension of the
            mesh has parts of a batch.
    """

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = to_local((args, kwargs))
        return from_local(fn(*args, **kwargs), mesh, placements)

    return run
