"""Trees of all ranks of a group: a round in which the ranks agree on what goes, and one collective of torch."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.core.keys import dotted
from tdfunc.core.walk import list_leaves, list_paths, rebuild
from tdfunc.distributed.messages import classes_of
from tdfunc.parallel.block import Packed, Structure, pack, read_structure
from tdfunc.storage.disk.ranks import Ranks, as_bytes, as_tensor
from tdfunc.storage.safetensors.like import Found, check_ranks, mismatch
from tdfunc.storage.tree.build import Classes

T = TypeVar("T", bound=TensorCollection)


def _check_alike(
    ranks: Ranks, call: str, make: Callable[[], Structure | None], *, strict: bool = True
) -> list[tuple[int, int]]:
    """Return the lengths of each rank's block and description; every rank raises if their calls or trees differ."""
    made: list[Structure | None] = []

    def first() -> bytes:
        made.append(make())
        own = made[0]
        size = (0, 0) if own is None else (own.block.size_bytes, len(own.text))
        return json.dumps([call, own and own.digest.hex(), size]).encode()

    def compare(headers: list[bytes]) -> bytes:
        calls, digests, sizes = zip(*map(json.loads, headers), strict=True)
        for rank, other in enumerate(calls):
            if other != call:
                raise error(
                    ValueError,
                    f"{ranks.call}: all ranks of the group must make the same call.",
                    expected=f"{call}, as on rank {ranks.world_rank(0)}",
                    got=f"{other} on rank {ranks.world_rank(rank)}",
                )
        return json.dumps([strict and len({*digests} - {None}) > 1, sizes]).encode()

    differ, sizes = json.loads(ranks.agree(first, compare))
    if differ:
        own = made[0]
        check_ranks(ranks, None if own is None else own.found)
    return [(block, text) for block, text in sizes]


def _wire(ranks: Ranks, packed: Packed, size_bytes: int) -> Tensor:
    """Return block and description of a tree as one tensor of this length."""
    wire, (structure, leaves) = ranks.empty(size_bytes), packed
    structure.block.fill(leaves, wire)
    end = structure.block.size_bytes
    wire[end : end + len(structure.text)] = as_tensor(structure.text)
    return wire


def _unwire(wire: Tensor, sizes: Sequence[int], classes: Classes) -> TensorCollection:
    block, text = sizes
    structure = read_structure(as_bytes(wire[block : block + text]))
    return structure.build(structure.block.cut(wire[:block]), classes)


def _run(ranks: Ranks, collective: Callable[[], Any]) -> None:
    try:
        collective()
    except RuntimeError as err:
        raise ranks.lost("each rank of the group", err) from err


def broadcast(
    td: TensorCollection | None, src: int, *, group: Any = None, timeout_s: float | None = None, classes: Classes = ()
) -> Any:
    """Return the tree of one rank on all ranks; on that rank it is the tree itself.

    Args:
        td: The tree. Other ranks than `src` give one with the expected paths, shapes and dtypes, or None to take any.
        src: The global rank whose tree it is.
        group: A process group; without it the default one. All of its ranks call this.
        timeout_s: How many seconds to wait for the other ranks; without it the group's timeout.
        classes: As for `recv`.

    Raises:
        LeafMismatchError: Shapes or dtypes differ; every rank raises, before any values are sent.
        TreeStructureError: Keys differ; every rank raises.
        PeerError: A rank did not take part in time, or died.
    """
    ranks = Ranks("broadcast", group, timeout_s)
    is_source = dist.get_rank() == src
    packed: list[Packed] = []

    def make() -> Structure | None:
        if is_source and td is None:
            raise error(TypeError, "broadcast: the rank that sends must give a tree.", got="None")
        packed.extend([] if td is None else [pack(td, "broadcast")])
        return packed[0].structure if packed else None

    sizes = _check_alike(ranks, f"broadcast from rank {src}", make)[_group_rank(ranks, src)]
    wire = _wire(ranks, packed[0], sum(sizes)) if is_source else ranks.empty(sum(sizes))
    _run(ranks, lambda: dist.broadcast(wire, src, group=group))
    return td if is_source else _unwire(wire, sizes, classes if td is None else classes_of(td))


def scatter(
    trees: Sequence[TensorCollection] | None,
    src: int,
    like: TensorCollection | None = None,
    *,
    group: Any = None,
    timeout_s: float | None = None,
    classes: Classes = (),
) -> Any:
    """Return this rank's tree of those that one rank has: the first goes to the first rank of the group, and so on.

    Args:
        trees: On `src` a tree for each rank of the group, of any structures; None elsewhere.
        src: The global rank that has the trees.
        like: A tree with the expected paths, shapes and dtypes; without it any tree is taken.
        group: As for `broadcast`, like the other arguments.
        timeout_s: How many seconds to wait for the other ranks.
        classes: As for `recv`.

    Raises:
        ValueError: There is not one tree for each rank; every rank raises.
        LeafMismatchError: A tree is not like `like` in shapes or dtypes; every rank raises.
        TreeStructureError: It is not in its keys; every rank raises.
        PeerError: A rank did not take part in time, or died.
    """
    ranks = Ranks("scatter", group, timeout_s)
    is_source, origin = dist.get_rank() == src, _group_rank(ranks, src)
    packed: list[Packed] = []

    def make() -> bytes:
        wanted = None if like is None else [*pack(like, "scatter").structure.found.items()]
        if is_source:
            packed.extend([pack(tree, "scatter") for tree in trees or ()])
            if len(packed) != ranks.size:
                got = f"{len(packed)} trees"
                raise error(ValueError, "scatter: each rank must get a tree.", expected=f"{ranks.size} trees", got=got)
        sizes = [(p.structure.block.size_bytes, len(p.structure.text)) for p in packed]
        found = [[*p.structure.found.items()] for p in packed]
        return json.dumps([wanted, sizes, found]).encode()

    def decide(made: list[bytes]) -> bytes:
        parsed = [json.loads(raw) for raw in made]
        for rank, ((wanted, *_), found) in enumerate(zip(parsed, parsed[origin][2], strict=True)):
            if wanted is not None and wanted != found:
                pairs = [
                    [(tuple(path), (tuple(shape), dtype)) for path, (shape, dtype) in of] for of in (wanted, found)
                ]
                expected, got = [Found(of) for of in pairs]
                raise mismatch("scatter", f"the tree of rank {rank} and the one for it", expected, got)
        return json.dumps(parsed[origin][1]).encode()

    sizes: list[tuple[int, int]] = json.loads(ranks.agree(make, decide))
    longest = max([block + text for block, text in sizes])
    wires = [_wire(ranks, one, longest) for one in packed] if is_source else None
    wire = ranks.empty(longest)
    _run(ranks, lambda: dist.scatter(wire, wires, src, group=group))
    known = classes if like is None else classes_of(like)
    return _unwire(wire, sizes[ranks.rank], known)


def all_gather(
    td: TensorCollection, *, group: Any = None, strict: bool = True, timeout_s: float | None = None
) -> list[Any]:
    """Return the trees of all ranks, in the order of the ranks, on all ranks.

    Args:
        td: This rank's tree.
        group: As for `broadcast`.
        strict: Require the same paths, shapes and dtypes on all ranks. Otherwise each rank gives any tree, such as
            conversations of any length.
        timeout_s: As for `broadcast`.

    Raises:
        LeafMismatchError: Shapes or dtypes differ; every rank raises.
        TreeStructureError: Keys differ; every rank raises.
        PeerError: A rank did not take part in time, or died.
    """
    ranks = Ranks("all_gather", group, timeout_s)
    trees = _gather(td, ranks, strict, None)
    assert trees is not None
    return trees


def gather(
    td: TensorCollection, dst: int, *, group: Any = None, strict: bool = True, timeout_s: float | None = None
) -> list[Any] | None:
    """Return the trees of all ranks, in the order of the ranks, on the global rank `dst`, and None elsewhere.

    The other arguments and the errors are the same as for `all_gather`.
    """
    return _gather(td, Ranks("gather", group, timeout_s), strict, dst)


def _gather(td: TensorCollection, ranks: Ranks, strict: bool, dst: int | None) -> list[Any] | None:
    packed: list[Packed] = []

    def make() -> Structure:
        packed.append(pack(td, ranks.call))
        return packed[0].structure

    where = "" if dst is None else f" to rank {dst}"
    sizes = _check_alike(ranks, f"{ranks.call}{where}", make, strict=strict)
    longest = max(map(sum, sizes))
    wire, takes = _wire(ranks, packed[0], longest), dst is None or dst == dist.get_rank()
    wires = [ranks.empty(longest) for _ in sizes] if takes else None
    if dst is None:
        _run(ranks, lambda: dist.all_gather(wires, wire, group=ranks.group))
    else:
        _run(ranks, lambda: dist.gather(wire, wires, dst, group=ranks.group))
    known = classes_of(td)
    return None if wires is None else [_unwire(one, size, known) for one, size in zip(wires, sizes, strict=True)]


def all_reduce(td: T, op: str = "sum", *, group: Any = None, timeout_s: float | None = None) -> T:
    """Return a tree of the sums (or means, ...) of each leaf over all ranks; one collective runs for each dtype.

    Non-tensor data are this rank's own. Gradients do not flow through it.

    Args:
        td: This rank's tree.
        op: The name of one of torch's reductions: "sum", "avg", "min", "max", "product", "band", "bor" or "bxor".
        group: As for `broadcast`.
        timeout_s: As for `broadcast`.

    Raises:
        LeafMismatchError: Shapes or dtypes differ; every rank raises.
        TreeStructureError: Keys differ; every rank raises.
        UnsupportedError: The backend cannot reduce a dtype; the message names a leaf. Every rank raises.
        PeerError: A rank did not take part in time, or died.
    """
    return _reduce(td, Ranks("all_reduce", group, timeout_s), op, None)


def reduce(td: T, dst: int, op: str = "sum", *, group: Any = None, timeout_s: float | None = None) -> T | None:
    """Return what `all_reduce` returns on the global rank `dst`, and None elsewhere; the arguments are the same."""
    reduced = _reduce(td, Ranks("reduce", group, timeout_s), op, dst)
    return reduced if dist.get_rank() == dst else None


def _reduce(td: T, ranks: Ranks, op: str, dst: int | None) -> T:
    kind = getattr(dist.ReduceOp, op.upper())
    where = "" if dst is None else f" to rank {dst}"
    _check_alike(ranks, f"{ranks.call} {op!r}{where}", lambda: pack(td, ranks.call).structure)
    leaves: list[Tensor] = [leaf.detach() for leaf in list_leaves(td)]
    runs: dict[torch.dtype, list[int]] = {}
    for i, leaf in enumerate(leaves):
        runs.setdefault(leaf.dtype, []).append(i)
    for dtype, run in runs.items():
        parts = [leaves[i] for i in run]
        # One tensor comes back as it is, and the collective writes to it.
        flat = _flatten_dense_tensors(parts) if len(parts) > 1 else parts[0].flatten().clone()
        flat = flat.to(ranks.device)
        try:
            if dst is None:
                dist.all_reduce(flat, kind, group=ranks.group)
            else:
                dist.reduce(flat, dst, kind, group=ranks.group)
        except (RuntimeError, ValueError) as err:
            # "Invalid scalar type" of gloo, and those of the kernels that compute a mean.
            if re.search(r"\btype\b", str(err)) is None:
                raise ranks.lost("each rank of the group", err) from err
            raise UnsupportedError(
                f"{ranks.call}: leaf {dotted(list_paths(td)[run[0]])!r} cannot be reduced by this backend.",
                expected=f"a dtype that {dist.get_backend(ranks.group)} reduces by {op!r}",
                got=str(dtype),
                hint="cast it first: td.to(torch.int32), say; or all_gather and reduce here.",
            ) from err
        for i, part in zip(run, _unflatten_dense_tensors(flat, parts), strict=True):
            # Not a view of the others to autograd, so that each may be written to.
            leaves[i] = part.data.to(leaves[i].device)
    return rebuild(td, leaves)


def _group_rank(ranks: Ranks, rank: int) -> int:
    return rank if ranks.group is None else dist.get_group_rank(ranks.group, rank)
