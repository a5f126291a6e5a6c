"""How pointwise operations run: foreach kernels where they are legal, leaf by leaf elsewhere; broadcasting rules."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Size, Tensor

from tdfunc.core.collection import PLAIN, LeafOp, TensorCollection, check_one_shape
from tdfunc.core.context import in_functorch, is_compiling
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, TieError, error
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.shapes import broadcast, fits_into, shape_of
from tdfunc.core.types import LeafFn, Path
from tdfunc.core.walk import Difference, gather, list_leaves, list_paths, refill, zip_trees
from tdfunc.ops.base.reading import get

T = TypeVar("T", bound=TensorCollection)
_NUMBERS = (bool, int, float, complex)
_requires_grad = operator.attrgetter("requires_grad")

# torch.maximum takes no number; the foreach kernel does, and computes this.
_WITH_NUMBER: dict[str, Callable[..., Any]] = {"maximum": torch.clamp_min, "minimum": torch.clamp_max}


def can_foreach() -> bool:
    """Return True if `torch._foreach_*` may be called: it has no vmap rule, and a grad inside a vmap hides the vmap."""
    return not is_compiling() and not in_functorch()


def foreach_leaves(tree: T, name: str, *args: Any) -> T | None:
    """Run one foreach kernel over all leaves, or return None if it does not apply."""
    if not can_foreach():
        return None
    columns = gather((tree,))
    if columns is None:
        return None
    return _run(tree, name, *columns, *args)


def _run(tree: T, name: str, leaves: list[Tensor], *args: Any) -> T | None:
    if torch.is_grad_enabled():
        flags = list(map(_requires_grad, leaves))
        if args and isinstance(args[0], list):
            flags = list(map(operator.or_, flags, map(_requires_grad, cast("list[Tensor]", args[0]))))
        # One kernel call for all would make every result require grad.
        if True in flags and False in flags:
            return None
    try:
        return refill(tree, iter(getattr(torch, name)(leaves, *args)))
    # A kernel that lacks a dtype, layout or class; the leaf-by-leaf path then raises torch's error.
    except (RuntimeError, TypeError):
        return None


def unary(tree: T, name: str, foreach: str | None, **kwargs: Any) -> T:
    """Apply `torch.<name>` to every leaf."""
    if foreach is not None and not kwargs:
        done = foreach_leaves(tree, foreach)
        if done is not None:
            return done
    elif name == "isfinite":
        columns = gather((tree,)) if can_foreach() else None
        if columns is not None and all(map(Tensor.is_floating_point, columns[0])):
            # x - x is NaN where x is not finite: faster than `torch.isfinite`.
            with torch.no_grad():
                zeros = _run(tree, "_foreach_sub", columns[0], columns[0])
            if zeros is not None:
                return zeros._map(LeafOp(name, lambda x: x == x))
    fn = getattr(torch, name)
    return tree._map(LeafOp(name, (lambda x: fn(x, **kwargs)) if kwargs else fn))


def binary(tree: T, other: Any, name: str, foreach: str | None, **kwargs: Any) -> T:
    """Apply `torch.<name>(leaf, other)`: other is a number, a tensor over the batch, or a tree with the same keys."""
    if kwargs:
        foreach = None
    fn = getattr(torch, name)
    if isinstance(other, TensorCollection):
        if foreach is not None:
            done = foreach_pairs(tree, other, foreach)
            if done is not None:
                return done
        check_same(tree, other, name)
        size = broadcast_size(tree, other, name)
        if name not in ("eq", "ne"):
            leaf = (lambda x, y: fn(x, y, **kwargs)) if kwargs else fn
            return tree._map(LeafOp(name, leaf, size), other)

        def compare(x: Any, y: Any) -> Any:
            # Non-tensor data by value, so that `(a == b).all()` sees them.
            if not isinstance(x, NonTensorBase):
                return fn(x, y)
            if name == "eq":
                return x.equal(y)
            return ~x.equal(y)

        return tree._shape(LeafOp(name, compare, size, batch=True, plain=lambda _: fn), other)
    number = _as_number(other)
    if number is None:
        return tree._map(over_batch_op(tree, name, lambda x, y: fn(x, y, **kwargs), _as_tensor(other, name)))
    if foreach is not None:
        done = foreach_leaves(tree, foreach, number)
        if done is not None:
            return done
    call: Callable[..., Any] = _WITH_NUMBER.get(name) or fn
    return tree._map(LeafOp(name, lambda x: call(x, number, **kwargs)))


def foreach_pairs(tree: T, other: TensorCollection, name: str, *args: Any) -> T | None:
    """Run one foreach kernel over the pairs of leaves of two trees, or return None if it does not apply."""
    columns = gather((tree, other)) if can_foreach() else None
    if columns is None or not _same_shapes(*columns):
        return None
    return _run(tree, name, *columns, *args)


def broadcast_size(tree: TensorCollection, other: TensorCollection, call: str) -> Callable[[Size], Size] | None:
    """Return the function of a batch size that leaf-by-leaf broadcasting is; None when it keeps the tree's.

    torch aligns shapes at the right, so leaves with the same number of features align at their batch dimensions;
    without a batch there is nothing to align.

    Raises:
        LeafMismatchError: Two leaves differ in their number of features; a batch dimension would meet a feature.
        BatchSizeError: The batch sizes do not broadcast.
    """
    mine = tree._batch_size
    theirs = other._batch_size
    if mine == theirs and _plain_twins(tree, other) and _same_shapes(tree._data.values(), other._data.values()):
        return None
    n = len(mine)
    m = len(theirs)
    differ = _check_features(tree, other, _Batches(n, m, n > 0 or m > 0), call, ())
    if not differ or mine == theirs:
        return None
    size = broadcast(mine, theirs)
    if size is None:
        raise BatchSizeError(
            f"{call}: the batch sizes do not broadcast.", expected=str(list(mine)), got=str(list(theirs))
        )
    if size == mine:
        return None
    return lambda old: size + old[n:]


def _plain_twins(tree: TensorCollection, other: TensorCollection) -> bool:
    """Return True if both hold nothing but plain tensors, under the same keys in one order, and no ties."""
    if is_compiling() or type(tree) is not type(other) or tree._ties or other._ties:
        return False
    mine = tree._data
    theirs = other._data
    return (
        PLAIN.issuperset(map(type, mine.values()))
        and PLAIN.issuperset(map(type, theirs.values()))
        and list(mine) == list(theirs)
    )


def _same_shapes(mine: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    try:
        return [x.shape for x in mine] == [y.shape for y in theirs]
    except RuntimeError:  # leaves to which torch gives no shape
        return False


class _Batches(NamedTuple):
    """The numbers of batch dimensions of two trees, and True if there are any to align."""

    mine: int
    theirs: int
    aligned: bool


def _check_features(tree: TensorCollection, other: TensorCollection, dims: _Batches, call: str, at: Path) -> bool:
    """Return True if any two leaves differ in shape; the shapes of a lazy stack's trees do not count."""
    if tree._is_lazy:
        tree._each(lambda inner, part: _check_tree(inner, part, dims, call, at), other)
        return False
    differ = False
    for key in tree._keys():
        node = tree._get(key)
        twin = other._get(key)
        if isinstance(node, TensorCollection):
            differ |= _check_features(node, twin, dims, call, (*at, key))
        elif isinstance(node, Tensor) and isinstance(twin, Tensor) and shape_of(node) != shape_of(twin):
            differ = True
            if dims.aligned and node.dim() - dims.mine != twin.dim() - dims.theirs:
                raise LeafMismatchError(
                    f"{call}: {dotted((*at, key))!r} has another number of features in the second tree.",
                    expected=f"shape {list(node.shape)} in a batch of {dims.mine} dimensions",
                    got=f"shape {list(twin.shape)} in a batch of {dims.theirs}",
                    hint="give both the same dimensions after the batch; dimensions of size 1 are expanded.",
                )
    return differ


def _check_tree(inner: Any, part: Any, dims: _Batches, call: str, at: Path) -> Any:
    """Return a tree of a lazy stack; raise unless its part of the other operand fits it."""
    # The keys of a stack are those that its trees share; a tree may lack another.
    check_keys(inner, part, call, at)
    if not _check_features(inner, part, _Batches(dims.mine - 1, dims.theirs - 1, dims.aligned), call, at):
        return inner
    mine = inner._batch_size
    theirs = part._batch_size
    is_ragged = -1 in (*mine, *theirs)
    if mine != theirs and not is_ragged and not fits_into(theirs, mine):
        where = f" at {dotted(at)!r}" if at else ""
        raise BatchSizeError(
            f"{call}: the operand of a tree of the lazy stack{where} does not fit the batch of the tree.",
            expected=str(list(mine)),
            got=str(list(theirs)),
            hint="expand() the lazy stack to the batch size of the other first.",
        )
    return inner


def reversed_binary(tree: T, other: Any, name: str, method: str | None = None, **kwargs: Any) -> T:
    """Apply `torch.<name>(other, leaf)`, or to a number the operator's method, which rounds quotients differently."""
    fn = getattr(torch, name)
    number = _as_number(other)
    if number is not None:
        leaf = operator.methodcaller(method, number) if method is not None else lambda x: fn(number, x, **kwargs)
        return tree._map(LeafOp(name, leaf))
    return tree._map(over_batch_op(tree, name, lambda x, y: fn(y, x, **kwargs), _as_tensor(other, name)))


def is_operand(other: Any) -> bool:
    """Return True if `==` compares leaf by leaf; with a dict it raises, where Python would return False."""
    return isinstance(other, (TensorCollection, Tensor, np.ndarray, np.generic, Mapping, *_NUMBERS))


def _as_number(other: Any) -> Any:
    if isinstance(other, np.generic):
        return other.item()
    return other if isinstance(other, _NUMBERS) else None


def _as_tensor(other: Any, name: str) -> Tensor:
    if isinstance(other, Tensor):
        return other
    if isinstance(other, np.ndarray):
        return torch.as_tensor(other)
    hint = None
    if isinstance(other, Mapping):
        hint = "td.update(d) puts its entries into the tree; TensorDict(d) is a tree."
    raise error(TypeError, f"{name}: an operand is not a tree, number or tensor.", got=type(other).__name__, hint=hint)


def over_batch_op(tree: TensorCollection, name: str, fn: LeafFn, *others: Tensor) -> LeafOp:
    """Describe `fn(leaf, *operands)` for operands over the batch."""
    size = tree._batch_size
    n = len(tree._batch_size)
    for other in others:
        # Along a ragged dimension, which is -1, an operand can only be constant.
        if other.dim() and not fits_into(other.shape, size):
            raise BatchSizeError(
                f"{name}: a tensor operand is broadcast against the batch, not against the dimensions of the leaves.",
                expected=f"a shape that broadcasts to {list(size)}",
                got=f"shape {list(other.shape)}",
                hint="for each leaf's own dimensions use td.apply(lambda x: ...).",
            )
    # With all batch dimensions of the tree; an operand without any stays as it is.
    leads: list[Tensor] = []
    for other in others:
        if 0 < other.dim() < n:
            other = other.reshape((1,) * (n - other.dim()) + other.shape)
        leads.append(other)

    def bind(*leads: Tensor) -> LeafFn:
        # A 0-d operand stays one (it does not promote); a part without batch dimensions of one that has them does not.
        operands = [broadcaster(lead, at_least=other.dim() > 0) for lead, other in zip(leads, others, strict=True)]
        return lambda x, *rest: fn(x, *[operand(x.dim()) for operand in operands], *rest)

    return LeafOp(name, bind(*leads), args=tuple(leads), bind=bind)


def broadcaster(lead: Tensor, at_least: bool = False) -> Callable[[int], Tensor]:
    """Return the function that gives an operand over the batch the number of dimensions of a leaf."""
    n = lead.dim()
    if n == 0 and not at_least:
        return lambda _: lead
    # Leaves share their number of dimensions, and one view serves all of them.
    views: dict[int, Tensor] = {}

    def operand(ndim: int) -> Tensor:
        if ndim not in views:
            views[ndim] = lead.reshape(lead.shape + (1,) * (ndim - n))
        return views[ndim]

    return operand


def check_same(tree: TensorCollection, other: TensorCollection, call: str) -> None:
    """Raise unless two trees have the same paths and ties; the message lists the difference."""
    if _plain_twins(tree, other):
        return
    if not tree._is_lazy:
        check_one_shape(other, call)
    check_keys(tree, other, call)
    if tree._ties:
        check_ties(tree, other, call)


def check_ties(tree: TensorCollection, other: TensorCollection, call: str) -> None:
    """Raise unless two trees tie the same paths, in any order."""
    if other._ties != tree._ties and _groups(other) != _groups(tree):
        raise TieError(
            f"{call}: the trees tie different paths.",
            expected=[list(map(dotted, group)) for group in tree._ties],
            got=[list(map(dotted, group)) for group in other._ties],
            hint="untie() the paths that are tied in only one of them, or make the second by mapping the first.",
        )


def _groups(tree: TensorCollection) -> set[frozenset[Path]]:
    return set(map(frozenset, tree._ties))


# Any: inside tree transformations a leaf may be anything.
def leaves_like(tree: TensorCollection, other: TensorCollection, call: str) -> list[Any]:
    """Return the leaves of another tree in the order of `list_leaves(tree)`.

    Raises:
        TreeStructureError: The trees have different paths.
        TieError: They tie different paths, so that their lists of leaves do not belong together.
    """
    check_keys(tree, other, call)
    if other._ties == tree._ties:
        return list_leaves(other)
    check_ties(tree, other, call)
    # A tied leaf is at the place of its first path, which is another one here.
    return [get(other, path) for path in list_paths(tree)]


def check_keys(tree: TensorCollection, other: TensorCollection, call: str, at: Path = ()) -> None:
    """Raise unless two trees have the same paths, with nodes of one kind; the message has the first difference."""
    found = zip_trees(tree, other, at=at)
    if isinstance(found, Difference):
        raise found.error(call)
