"""Trees of all ranks of a group: a round in which the ranks agree on what goes, and one collective of torch."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import outside
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


class _Sizes(NamedTuple):
    """The lengths in bytes of a tree's block and description; on the wire one follows the other."""

    block: int
    text: int

    @property
    def total(self) -> int:
        return self.block + self.text


class _Summary(NamedTuple):
    """A rank's tree in few bytes, as JSON."""

    # None for a rank that has no tree.
    digest: str | None
    sizes: _Sizes


def _sizes_of(structure: Structure) -> _Sizes:
    return _Sizes(structure.block.size_bytes, len(structure.text))


def _check_alike(ranks: Ranks, make: Callable[[], Structure | None], *, strict: bool = True) -> list[_Sizes]:
    """Return the sizes of each rank's tree; every rank raises if their calls or trees differ."""
    made: list[Structure | None] = []

    def summarize() -> bytes:
        own = make()
        made.append(own)
        if own is None:
            summary = _Summary(None, _Sizes(0, 0))
        else:
            summary = _Summary(own.digest.hex(), _sizes_of(own))
        return json.dumps(summary).encode()

    def compare(described: list[bytes]) -> bytes:
        summaries = [_Summary(*json.loads(raw)) for raw in described]
        digests = {summary.digest for summary in summaries if summary.digest is not None}
        differ = strict and len(digests) > 1
        return json.dumps([differ, [summary.sizes for summary in summaries]]).encode()

    differ, sizes = json.loads(ranks.agree(summarize, compare))
    if differ:
        own = made[0]
        check_ranks(ranks, None if own is None else own.found)
    return [_Sizes(block, text) for block, text in sizes]


def _wire(ranks: Ranks, packed: Packed, size_bytes: int) -> Tensor:
    """Return block and description of a tree as one tensor of this length."""
    wire = ranks.empty(size_bytes)
    structure, leaves = packed
    structure.block.fill(leaves, wire)
    end = structure.block.size_bytes
    wire[end : end + len(structure.text)] = as_tensor(structure.text)
    return wire


def _unwire(wire: Tensor, sizes: _Sizes, classes: Classes) -> TensorCollection:
    structure = read_structure(as_bytes(wire[sizes.block : sizes.total]))
    return structure.build(structure.block.cut(wire[: sizes.block]), classes)


def _run(ranks: Ranks, collective: Callable[[], Any], refuse: Callable[[Exception], Exception] | None = None) -> None:
    """Run a collective of torch; raise what `refuse` makes of an error, or `PeerError` if a rank is lost."""
    try:
        collective()
    except (RuntimeError, ValueError) as err:
        # Torch's refusal and a lost rank raise alike. After a refusal all ranks are here, and take part in a round.
        try:
            ranks.agree(lambda: b"")
        except Exception:
            raise ranks.lost("a rank of the group", err) from err
        if refuse is None:
            raise
        raise refuse(err) from err


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
            raise error(TypeError, "broadcast: the rank that sends gave no tree.", got="None")
        if td is None:
            return None
        packed.append(pack(td, "broadcast"))
        return packed[0].structure

    # To the end: the other ranks wait for the values.
    with ranks.entered():
        sizes = _check_alike(ranks, make)[ranks.check_member("src", src)]
        # As in the round: a rank may give no tree and be in a transform, or give one of constants.
        with outside():
            if is_source:
                wire = _wire(ranks, packed[0], sizes.total)
            else:
                wire = ranks.empty(sizes.total)
            _run(ranks, lambda: dist.broadcast(wire, src, group=group))
            if is_source:
                return td
            return _unwire(wire, sizes, classes if td is None else classes_of(td))


class _Offer(NamedTuple):
    """What a rank expects of a scatter, and on the source all trees in few bytes; as JSON."""

    # The leaves of `like`; None to take any tree.
    wanted: list[Any] | None
    # By rank, on the source.
    sizes: list[_Sizes]
    found: list[list[Any]]


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
            wanted = _leaves_in(pack(like, "scatter"))
        if is_source:
            packed.extend(_pack_each(trees or (), ranks))
        sizes = [_sizes_of(one.structure) for one in packed]
        found = [_leaves_in(one) for one in packed]
        return json.dumps(_Offer(wanted, sizes, found)).encode()

    def decide(made: list[bytes]) -> bytes:
        offers = [_Offer(*json.loads(raw)) for raw in made]
        source = offers[ranks.check_member("src", src)]
        _check_wanted(ranks, offers, source)
        return json.dumps(source.sizes).encode()

    # To the end: the other ranks wait for the values.
    with ranks.entered():
        sizes = [_Sizes(block, text) for block, text in json.loads(ranks.agree(make, decide))]
        longest = max([one.total for one in sizes])
        with outside():
            wires = None
            if is_source:
                wires = [_wire(ranks, one, longest) for one in packed]
            wire = ranks.empty(longest)
            _run(ranks, lambda: dist.scatter(wire, wires, src, group=group))
            known = classes if like is None else classes_of(like)
            return _unwire(wire, sizes[ranks.rank], known)


def _pack_each(trees: Sequence[TensorCollection], ranks: Ranks) -> list[Packed]:
    """Pack a tree for each rank; raise if there are more or fewer."""
    packed = [pack(tree, "scatter") for tree in trees]
    if len(packed) != ranks.size:
        raise error(
            ValueError,
            "scatter: there is not one tree for each rank.",
            expected=f"{ranks.size} trees",
            got=f"{len(packed)} trees",
        )
    return packed


def _check_wanted(ranks: Ranks, offers: Sequence[_Offer], source: _Offer) -> None:
    """Raise if the source has another tree for a rank than the rank expects."""
    for rank, (offer, found) in enumerate(zip(offers, source.found, strict=True)):
        if offer.wanted is not None and offer.wanted != found:
            who = f"the tree of rank {ranks.world_rank(rank)} and the one for it"
            raise mismatch("scatter", who, _as_found(offer.wanted), _as_found(found))


# Any: paths, shapes and dtypes, for JSON.
def _leaves_in(packed: Packed) -> list[Any]:
    return list(packed.structure.found.items())


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
        longest = max([one.total for one in sizes])
        with outside():
            wire = _wire(ranks, packed[0], longest)
            is_receiver = is_to_all or dst == dist.get_rank()
            wires = None
            if is_receiver:
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
    # An `op` that is not a text is refused in the round.
    name = op.lower() if isinstance(op, str) else repr(op)
    is_to_all = ranks.call == "all_reduce"
    ranks.terms = f"{ranks.call} {name!r}"
    if not is_to_all:
        ranks.terms += f" to rank {dst}"

    def make() -> Structure:
        _check_op(ranks.call, op, name)
        if not is_to_all:
            ranks.check_member("dst", dst)
        return pack(td, ranks.call).structure

    _check_alike(ranks, make)
    with outside():
        return _reduce_leaves(td, ranks, op, dst)


def _reduce_leaves(td: T, ranks: Ranks, op: str, dst: int | None) -> T:
    """Reduce the leaves of each dtype together."""
    is_to_all = ranks.call == "all_reduce"
    kind = getattr(dist.ReduceOp, op.upper())
    leaves: list[Tensor] = [leaf.detach() for leaf in list_leaves(td)]
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, leaf in enumerate(leaves):
        by_dtype.setdefault(leaf.dtype, []).append(number)

    def refuse(err: Exception, number: int) -> UnsupportedError:
        path = list_paths(td)[number]
        return UnsupportedError(
            f"{ranks.call}: leaf {dotted(path)!r} cannot be reduced by this backend.",
            expected=f"a dtype that {dist.get_backend(ranks.group)} reduces by {op!r}",
            got=f"{leaves[number].dtype}: {err}",
            hint="cast it first: td.to(torch.int32), say; or all_gather and reduce here.",
        )

    for numbers in by_dtype.values():
        parts = [leaves[number] for number in numbers]
        flat = _flatten(parts).to(ranks.device)
        if is_to_all:
            collective = partial(dist.all_reduce, flat, kind, group=ranks.group)
        else:
            collective = partial(dist.reduce, flat, dst, kind, group=ranks.group)
        _run(ranks, collective, partial(refuse, number=numbers[0]))
        for number, part in zip(numbers, _unflatten_dense_tensors(flat, parts), strict=True):
            # Not a view of the others to autograd, so that each may be written to.
            leaves[number] = part.data.to(leaves[number].device)
    return rebuild(td, leaves)


def _flatten(parts: list[Tensor]) -> Tensor:
    """Return the elements of all parts as one new tensor."""
    if len(parts) > 1:
        return _flatten_dense_tensors(parts)
    # Torch returns one tensor as it is, and the collective would write to it.
    return parts[0].flatten().clone()


def _check_op(call: str, op: object, name: str) -> None:
    if name not in _OPS:
        # AttributeError: it is the name of an attribute of ReduceOp.
        raise error(
            AttributeError,
            f"{call}: {op!r} is not a reduction of torch; it has no ReduceOp.{name.upper()}.",
            expected=f"one of {', '.join(map(repr, _OPS))}",
            hint="the mean is 'avg'.",
        )
