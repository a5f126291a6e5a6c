"""Members of an ensemble over a device mesh: each rank computes on plain tensors between DTensors."""

import importlib
import json
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, PeerError, TreeStructureError, UnsupportedError
from tdfunc.core.pytree import flatten_with_paths
from tdfunc.storage.disk.ranks import Ranks, is_sharded

# The most places that a message lists.
_SHOWN = 10


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

    Raises:
        UnsupportedError: The members are the trees of a lazy stack, whose leaves do not have their dimension.
    """
    given = _over_members(mesh) if placements is None else placements
    _check_lazy_stacks("shard", tree, given)
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

    Raises:
        TreeStructureError: The ranks have leaves at different places; every rank raises, as for all errors here.
        LeafMismatchError: Leaves differ in their dtypes, or in other dimensions than those that are sharded.
        UnsupportedError: As for `shard`.
        ValueError: The placements of the ranks differ.
        PeerError: A rank did not take part in time, or died.
    """
    return _join(lambda: tree, mesh, placements)


def _join(make: Callable[[], Any], mesh: DeviceMesh, placements: Sequence[Any] | None) -> Any:
    """Return DTensors around the parts that `make` returns on each rank; an error of one rank is raised on all."""
    given = _over_members(mesh) if placements is None else list(placements)
    module = _tensor_module()
    if mesh.get_coordinate() is None:
        # This rank is not in the mesh: nobody waits for it.
        tree = make()
        shapes = [list(leaf.shape) for _, leaf in _tensors(tree)]
    else:
        tree, shapes = _sum_lengths(partial(_make_dense, make, given), mesh, given)
    places = iter(shapes)

    def wrap(leaf: Tensor) -> Any:
        whole = torch.empty(next(places), device="meta")
        return module.DTensor.from_local(leaf, mesh, given, shape=whole.shape, stride=whole.stride())

    return pytree.tree_map_only(Tensor, wrap, tree)


# Any: a tree, a tensor, or a container of these.
def _make_dense(make: Callable[[], Any], placements: Sequence[Any]) -> Any:
    """Return this rank's part; raise if torch would divide its leaves along another dimension than the tree."""
    tree = make()
    _check_lazy_stacks("from_local", tree, placements)
    return tree


# Any: a tree, a tensor, or a container of these.
def _check_lazy_stacks(call: str, tree: Any, placements: Sequence[Any]) -> None:
    """Raise if a sharded dimension is one that the leaves of a lazy stack do not have, or have at another place."""
    last = max([placement.dim for placement in placements if placement.is_shard()], default=-1)
    nodes: list[Any] = pytree.tree_leaves(tree, is_leaf=lambda node: isinstance(node, TensorCollection))
    while nodes:
        node = nodes.pop()
        if not isinstance(node, TensorCollection):
            continue
        if node._is_lazy and node._dim <= last:  # pyright: ignore[reportAttributeAccessIssue]
            raise UnsupportedError(
                f"{call}: the leaves of a lazy stack do not have the dimension of its trees.",
                expected=f"leaves with the dimension {last} of their tree",
                got=f"a lazy stack along dimension {node._dim}",  # pyright: ignore[reportAttributeAccessIssue]
                hint="stack.dense(), or stack.pad(), has one tensor for each leaf.",
            )
        nodes.extend(node._data.values())


def _tensors(tree: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in a container, in the order of a map, each with its place."""
    found = flatten_with_paths(tree)[0]
    return [(pytree.keystr(path), leaf) for path, leaf in found if isinstance(leaf, Tensor)]


def _sum_lengths(make: Callable[[], Any], mesh: DeviceMesh, placements: Sequence[Any]) -> tuple[Any, list[list[int]]]:
    """Return this rank's tree, and the shapes of its leaves over all ranks: sums along each sharded dimension."""
    made: list[Any] = []
    leaves: list[tuple[str, Tensor]] = []
    shapes: list[list[int]] = []
    failures: list[Exception] = []

    def describe(axis: int) -> bytes:
        dim = _sharded_dim(placements, axis)
        if failures:
            raise failures[0]
        if not made:
            made.append(make())
            leaves.extend(_tensors(made[0]))
            shapes.extend([list(leaf.shape) for _, leaf in leaves])
        return _describe(leaves, shapes, dim)

    # One round along each dimension of the mesh, also where nothing is sharded here: it may be on another rank. In the
    # first one the parts are made. After an error the others follow, so that ranks hear of it that are in none of the
    # rounds of its rank.
    for axis in range(mesh.ndim):
        ranks = Ranks("from_local", mesh.get_group(axis))
        ranks.terms = f"from_local with the placements {tuple(placements)}"
        try:
            totals: dict[str, int] = json.loads(ranks.agree(partial(describe, axis), partial(_add_lengths, ranks)))
        except PeerError:
            raise
        except Exception as err:
            failures.append(err)
            continue
        dim = _sharded_dim(placements, axis)
        if dim is not None:
            for (name, _), shape in zip(leaves, shapes, strict=True):
                shape[dim] = totals[name]
    if failures:
        raise failures[0]
    return made[0], shapes


def _sharded_dim(placements: Sequence[Any], axis: int) -> int | None:
    """Return the dimension of leaves that is spread over a dimension of the mesh, or None."""
    if axis >= len(placements) or not placements[axis].is_shard():
        return None
    return placements[axis].dim


class _Part(NamedTuple):
    """A rank's part of a leaf, as JSON."""

    dtype: str
    # Along the dimension that is sharded; 0 without one.
    length: int
    # The other sizes.
    rest: list[int]


def _describe(leaves: Sequence[tuple[str, Tensor]], shapes: Sequence[list[int]], dim: int | None) -> bytes:
    """Return this rank's part of each leaf by its place."""
    found: dict[str, _Part] = {}
    for (name, leaf), shape in zip(leaves, shapes, strict=True):
        if dim is None:
            found[name] = _Part(str(leaf.dtype), 0, shape)
            continue
        if dim >= len(shape):
            raise LeafMismatchError(
                "from_local: a leaf does not have the dimension of the members.",
                expected=f"{dim + 1} dimensions or more",
                got=f"shape {shape}",
            )
        rest = [*shape[:dim], *shape[dim + 1 :]]
        found[name] = _Part(str(leaf.dtype), shape[dim], rest)
    return json.dumps(found).encode()


def _add_lengths(ranks: Ranks, described: list[bytes]) -> bytes:
    """Return the sum of the lengths of each leaf; raise unless the ranks have the same leaves otherwise."""
    parts_by_rank = [_read_parts(raw) for raw in described]
    first = parts_by_rank[0]
    totals = dict.fromkeys(first, 0)
    for rank, own in enumerate(parts_by_rank):
        who = f"rank {ranks.world_rank(0)} (expected) and rank {ranks.world_rank(rank)}"
        if own.keys() != totals.keys():
            lacking = sorted(totals.keys() - own.keys())
            others = sorted(own.keys() - totals.keys())
            raise TreeStructureError(
                f"from_local: {who} do not have the same leaves.",
                expected=f"the leaves {list(totals)[:_SHOWN]}",
                got=f"missing {lacking[:_SHOWN]}, unexpected {others[:_SHOWN]}",
            )
        for name, part in own.items():
            expected = first[name]
            if part.dtype != expected.dtype or part.rest != expected.rest:
                raise LeafMismatchError(
                    f"from_local: {who} have leaves that differ in more than the number of members.",
                    expected=f"{name}: {expected.dtype}, {expected.rest} without the members",
                    got=f"{part.dtype}, {part.rest}",
                )
            totals[name] += part.length
    return json.dumps(totals).encode()


def _read_parts(raw: bytes) -> dict[str, _Part]:
    parts: dict[str, list[Any]] = json.loads(raw)
    return {name: _Part(*part) for name, part in parts.items()}


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

    Raises:
        Exception: The error of `fn` on any rank; every rank raises it.
    """

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _join(partial(_call_local, fn, args, kwargs), mesh, placements)

    return run


# Any: of the function of a user.
def _call_local(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with this rank's parts."""
    args, kwargs = to_local((args, kwargs))
    return fn(*args, **kwargs)
