"""Trees of all ranks of a group: a round in which the ranks agree on what goes, and one collective of torch."""

import json
from collections.abc import Callable, Sequence
from functools import partial
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


# Torch's reductions; `ReduceOp` has other names, which are not for callers.
_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")


def _check_alike(ranks: Ranks, make: Callable[[], Structure | None], *, strict: bool = True) -> list[tuple[int, int]]:
    """Return the lengths of each rank's block and description; every rank raises if their calls or trees differ."""
    made: list[Structure | None] = []

    def first() -> bytes:
        own = make()
        made.append(own)
        if own is None:
            return json.dumps([None, (0, 0)]).encode()
        return json.dumps([own.digest.hex(), (own.block.size_bytes, len(own.text))]).encode()

    def compare(described: list[bytes]) -> bytes:
        digests, sizes = zip(*map(json.loads, described), strict=True)
        differ = strict and len({*digests} - {None}) > 1
        return json.dumps([differ, sizes]).encode()

    differ, sizes = json.loads(ranks.agree(first, compare))
    if differ:
        own = made[0]
        check_ranks(ranks, None if own is None else own.found)
    return [(block, text) for block, text in sizes]


def _wire(ranks: Ranks, packed: Packed, size_bytes: int) -> Tensor:
    """Return block and description of a tree as one tensor of this length."""
    wire = ranks.empty(size_bytes)
    structure, leaves = packed
    structure.block.fill(leaves, wire)
    end = structure.block.size_bytes
    wire[end : end + len(structure.text)] = as_tensor(structure.text)
    return wire


def _unwire(wire: Tensor, sizes: Sequence[int], classes: Classes) -> TensorCollection:
    block, text = sizes
    structure = read_structure(as_bytes(wire[block : block + text]))
    return structure.build(structure.block.cut(wire[:block]), classes)


def _run(
    ranks: Ranks, collective: Callable[[], Any], refuse: Callable[[Exception], Exception] = lambda err: err
) -> None:
    """Run a collective of torch; raise what `refuse` makes of an error, or `PeerError` if a rank is lost."""
    try:
        collective()
    except (RuntimeError, ValueError) as err:
        # Torch's refusal and a lost rank raise alike. After a refusal all ranks are here, and take part in a round.
        try:
            ranks.agree(lambda: b"")
        except Exception:
            raise ranks.lost("each rank of the group", err) from err
        refusal = refuse(err)
        if refusal is err:
            raise
        raise refusal from err


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
    ranks.terms = f"broadcast from rank {src}"
    is_source = dist.get_rank() == src
    packed: list[Packed] = []

    def make() -> Structure | None:
        ranks.check_member("src", src)
        if is_source and td is None:
            raise error(TypeError, "broadcast: the rank that sends must give a tree.", got="None")
        packed.extend([] if td is None else [pack(td, "broadcast")])
        if packed:
            return packed[0].structure
        return None

    # To the end: the other ranks wait for the values.
    with ranks.entered():
        sizes = _check_alike(ranks, make)[ranks.check_member("src", src)]
        if is_source:
            wire = _wire(ranks, packed[0], sum(sizes))
        else:
            wire = ranks.empty(sum(sizes))
        _run(ranks, lambda: dist.broadcast(wire, src, group=group))
        if is_source:
            return td
        return _unwire(wire, sizes, classes if td is None else classes_of(td))


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
    ranks.terms = f"scatter from rank {src}"
    is_source = dist.get_rank() == src
    packed: list[Packed] = []

    def make() -> bytes:
        ranks.check_member("src", src)
        wanted = None
        if like is not None:
            wanted = [*pack(like, "scatter").structure.found.items()]
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
        origin = ranks.check_member("src", src)
        for rank, ((wanted, *_), found) in enumerate(zip(parsed, parsed[origin][2], strict=True)):
            if wanted is not None and wanted != found:
                who = f"the tree of rank {ranks.world_rank(rank)} and the one for it"
                raise mismatch("scatter", who, _as_found(wanted), _as_found(found))
        return json.dumps(parsed[origin][1]).encode()

    # To the end: the other ranks wait for the values.
    with ranks.entered():
        sizes: list[tuple[int, int]] = json.loads(ranks.agree(make, decide))
        longest = max([block + text for block, text in sizes])
        wires = None
        if is_source:
            wires = [_wire(ranks, one, longest) for one in packed]
        wire = ranks.empty(longest)
        _run(ranks, lambda: dist.scatter(wire, wires, src, group=group))
        known = classes if like is None else classes_of(like)
        return _unwire(wire, sizes[ranks.rank], known)


# Any: as JSON returns it.
def _as_found(items: list[Any]) -> Found:
    return {tuple(path): (tuple(shape), dtype) for path, (shape, dtype) in items}


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

    is_to_all = ranks.call == "all_gather"
    ranks.terms = ranks.call if is_to_all else f"{ranks.call} to rank {dst}"
    if not strict:
        ranks.terms += ", strict=False"

    def make() -> Structure:
        if not is_to_all:
            ranks.check_member("dst", dst)
        packed.append(pack(td, ranks.call))
        return packed[0].structure

    # To the end: the other ranks wait for the values.
    with ranks.entered():
        sizes = _check_alike(ranks, make, strict=strict)
        longest = max(map(sum, sizes))
        wire = _wire(ranks, packed[0], longest)
        takes = is_to_all or dst == dist.get_rank()
        wires = None
        if takes:
            wires = [ranks.empty(longest) for _ in sizes]
        if is_to_all:
            _run(ranks, lambda: dist.all_gather(wires, wire, group=ranks.group))
        else:
            _run(ranks, lambda: dist.gather(wire, wires, dst, group=ranks.group))
        known = classes_of(td)
        if wires is None:
            return None
        return [_unwire(one, size, known) for one, size in zip(wires, sizes, strict=True)]


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
    # To the end: the other ranks wait for the values.
    with ranks.entered():
        return _reduce_alike(td, ranks, op, dst)


def _reduce_alike(td: T, ranks: Ranks, op: str, dst: int | None) -> T:
    """Reduce the trees of all ranks, once they are alike."""
    if isinstance(op, str):
        name = op.lower()
    else:
        name = repr(op)
    is_to_all = ranks.call == "all_reduce"
    if is_to_all:
        ranks.terms = f"{ranks.call} {name!r}"
    else:
        ranks.terms = f"{ranks.call} {name!r} to rank {dst}"

    def make() -> Structure:
        if name not in _OPS:
            # AttributeError: it is the name of an attribute of ReduceOp.
            raise error(
                AttributeError,
                f"{ranks.call}: {op!r} is not a reduction of torch; it has no ReduceOp.{name.upper()}.",
                expected=f"one of {', '.join(map(repr, _OPS))}",
                hint="the mean is 'avg'.",
            )
        if not is_to_all:
            ranks.check_member("dst", dst)
        return pack(td, ranks.call).structure

    _check_alike(ranks, make)
    kind = getattr(dist.ReduceOp, name.upper())
    leaves: list[Tensor] = [leaf.detach() for leaf in list_leaves(td)]
    runs: dict[torch.dtype, list[int]] = {}
    for i, leaf in enumerate(leaves):
        runs.setdefault(leaf.dtype, []).append(i)

    def refuse(err: Exception, first: int) -> UnsupportedError:
        return UnsupportedError(
            f"{ranks.call}: leaf {dotted(list_paths(td)[first])!r} cannot be reduced by this backend.",
            expected=f"a dtype that {dist.get_backend(ranks.group)} reduces by {op!r}",
            got=f"{leaves[first].dtype}: {err}",
            hint="cast it first: td.to(torch.int32), say; or all_gather and reduce here.",
        )

    for run in runs.values():
        parts = [leaves[i] for i in run]
        # One tensor comes back as it is, and the collective writes to it.
        if len(parts) > 1:
            flat = _flatten_dense_tensors(parts)
        else:
            flat = parts[0].flatten().clone()
        flat = flat.to(ranks.device)
        if is_to_all:
            collective = partial(dist.all_reduce, flat, kind, group=ranks.group)
        else:
            collective = partial(dist.reduce, flat, dst, kind, group=ranks.group)
        _run(ranks, collective, partial(refuse, first=run[0]))
        for i, part in zip(run, _unflatten_dense_tensors(flat, parts), strict=True):
            # Not a view of the others to autograd, so that each may be written to.
            leaves[i] = part.data.to(leaves[i].device)
    return rebuild(td, leaves)
