"""Gradients of functions of trees by the leaves that a filter chooses: `grad` and `value_and_grad`."""

import functools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tdfunc.core.collection import TensorCollection
from tdfunc.core.context import is_compiling
from tdfunc.core.errors import LeafMismatchError, brief, error
from tdfunc.core.keys import Entry, Filter, FilterLike, dotted
from tdfunc.core.types import Kind, Path
from tdfunc.core.walk import replace
from tdfunc.modules.checkpoint import recomputing_by_name
from tdfunc.ops.base.reading import check_dense, entries
from tdfunc.ops.edits.structure import keep_leaves

# A filter for the tree, or one for each of several trees; None is all leaves with a gradient.
Wrt: TypeAlias = "FilterLike | Sequence[FilterLike | None] | None"


P = ParamSpec("P")
R = TypeVar("R")


# Any: a tree, a tuple of trees or a pair, as `argnums` and `has_aux` are.
def grad(
    fn: Callable[P, Any], wrt: "Wrt" = None, *, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[P, Any]:
    """Return a function for the gradients of a scalar by leaves of a tree.

    Args:
        fn: A function that returns a tensor of no dimensions, or with `has_aux` a pair of it and anything.
        wrt: A filter for the leaves; a sequence has one for each of `argnums`. By default all leaves of floating-point
            and complex dtypes, except the buffers of a module.
        argnums: The position of the tree among the arguments; a tuple for several trees.
        has_aux: Declare that `fn` returns a pair.

    Returns:
        A function with the arguments of `fn`. It returns a tree of gradients for only the chosen leaves, as
        `partition(tree, wrt)[0]`, and a tuple of trees for a tuple of `argnums`. With `has_aux` it returns a pair: the
        gradients and the second value of `fn`.

    Raises:
        TypeError: An argument is not a tree.
        FilterError: A pattern matches no leaf.
        LeafMismatchError: A chosen leaf has no gradient, because its dtype is an integer or bool; or a tree is or
            contains a lazy stack (use `torch.func.grad`).

    Source:
        `jax.grad`, `equinox.filter_grad`.

    Examples:
        >>> params = TensorDict({"trunk": {"w": torch.ones(2)}, "head": {"w": torch.ones(2)}})
        >>> loss = lambda p, x: (p["head", "w"] * p["trunk", "w"] * x).sum()
        >>> grads = tdf.grad(loss, "head.*")(params, torch.arange(2.0))
        >>> grads.paths(), grads["head", "w"]
        ([('head', 'w')], tensor([0., 1.]))
    """
    both = value_and_grad(fn, wrt, argnums=argnums, has_aux=has_aux)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        if has_aux:
            return grads, value[1]
        return grads

    return run


def value_and_grad(
    fn: Callable[P, R], wrt: "Wrt" = None, *, argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[P, tuple[R, Any]]:
    """Return a function for the value of a scalar and its gradients by leaves of a tree; arguments as for `grad`.

    Returns:
        A function with the arguments of `fn`, which returns a pair of its result and the gradients.

    Examples:
        >>> params = TensorDict({"w": torch.ones(3), "steps": torch.tensor(2)})
        >>> value, grads = tdf.value_and_grad(lambda p: (p["w"] ** 2).sum() * p["steps"])(params)
        >>> value, grads["w"]
        (tensor(6.), tensor([4., 4., 4.]))
    """
    places = (argnums,) if isinstance(argnums, int) else argnums
    filters = _filters_of(wrt, len(places))

    # Any: trees in place of some arguments.
    call: Callable[..., Any] = fn

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        distinct = {place % max(len(args), 1) for place in places}
        if len(distinct) < len(places):
            raise error(ValueError, "grad: argnums names an argument twice.", got=brief(argnums))
        chosen = [_choose(_tree(args, place), where) for place, where in zip(places, filters, strict=True)]
        aux = _Aux()

        def inner(columns: list[list[Tensor]]) -> Any:
            given = list(args)
            for place, choice, leaves in zip(places, chosen, columns, strict=True):
                given[place] = _put(choice, leaves)
            out = call(*given, **kwargs)
            if not has_aux:
                return _check_value(out)
            _check_pair(out)
            return _check_value(out[0]), aux.split(out[1])

        # torch.func returns the gradients first.
        both = torch.func.grad_and_value(inner, has_aux=has_aux)
        leaves = [[entry.leaf for entry in choice.entries] for choice in chosen]
        if is_compiling():
            columns, value = both(leaves)
        else:
            with recomputing_by_name():
                columns, value = both(leaves)
        if has_aux:
            number, tensors = value
            value = (number, aux.join(tensors))
        grads = tuple([_gradient(choice, column) for choice, column in zip(chosen, columns, strict=True)])
        if isinstance(argnums, int):
            return value, grads[0]
        return value, grads

    return run


# Any: what a Filter is made from.
def _filters_of(wrt: Any, count: int) -> tuple[Any, ...]:
    """Return a filter for each of `count` arguments."""
    if not isinstance(wrt, (list, tuple)):
        return (wrt,) * count
    # Any: as above.
    filters: tuple[Any, ...] = tuple(wrt)
    if len(filters) != count:
        raise error(
            ValueError,
            f"grad: wrt has {len(filters)} filters for {count} arguments.",
            expected="a filter for each of argnums",
            got=f"{len(filters)} filters",
        )
    return filters


class _Aux:
    """The second value of a function: torch.func passes on its tensors alone, and this keeps the rest."""

    def __init__(self) -> None:
        # Any: a structure of torch's pytrees, and its leaves.
        self._structure: Any = None
        self._parts: list[Any] = []

    def split(self, value: Any) -> list[Tensor]:
        """Keep a value; return its tensors."""
        self._parts, self._structure = tree_flatten(value)
        return [part for part in self._parts if isinstance(part, Tensor)]

    def join(self, tensors: list[Tensor]) -> Any:
        """Return the value with other tensors in place of the given ones."""
        others = iter(tensors)
        parts = [next(others) if isinstance(part, Tensor) else part for part in self._parts]
        return tree_unflatten(parts, self._structure)


def _check_pair(out: Any) -> None:
    if isinstance(out, tuple) and len(out) == 2:
        return
    raise error(
        TypeError,
        "grad: the function returned no pair, which has_aux=True reads.",
        expected="(value, anything)",
        got=f"a tuple of {len(out)}" if isinstance(out, tuple) else type(out).__name__,
        hint="return value, (a, b): more than one thing is a tuple in second place.",
    )


def _check_value(value: Any) -> Any:
    """Return the value of a function; torch.func reports the other mistakes in it."""
    if isinstance(value, Tensor) and not _has_gradient(value):
        raise error(TypeError, "grad: the function did not return a floating-point number.", got=value.dtype)
    return value


def _tree(args: tuple[Any, ...], place: int) -> TensorCollection:
    given = None
    if -len(args) <= place < len(args):
        given = args[place]
    if isinstance(given, TensorCollection):
        check_dense(given, "grad")
        return given
    got = f"{len(args)} positional arguments"
    if given is not None:
        got = type(given).__name__
    raise error(
        TypeError,
        f"grad: positional argument {place} is not a tree.",
        got=got,
        hint="argnums= gives the positions of the trees; torch.func.grad takes tensors and dicts.",
    )


class _Choice(NamedTuple):
    """A tree, and the entries of its leaves that get a gradient."""

    tree: TensorCollection
    entries: list[Entry]


def _choose(tree: TensorCollection, where: Any) -> _Choice:
    found = entries(tree)
    if where is None:
        followed = [entry for entry in found if entry.kind in (None, Kind.PARAMETER) and _has_gradient(entry.leaf)]
        return _Choice(tree, followed)
    chosen = list(compress(found, Filter(where).mask(found)))
    for entry in chosen:
        if not _has_gradient(entry.leaf):
            raise LeafMismatchError(
                f"grad: leaf {dotted(entry.paths[0])!r} has no gradient.",
                expected="a floating-point or complex dtype",
                got=str(entry.leaf.dtype).removeprefix("torch."),
                hint="leave it out of wrt=.",
            )
    return _Choice(tree, chosen)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _put(choice: _Choice, leaves: list[Tensor]) -> TensorCollection:
    """Return the tree with other leaves in place of the chosen ones, under all their paths."""
    return replace(choice.tree, _by_path(choice, leaves))


def _gradient(choice: _Choice, leaves: list[Tensor]) -> TensorCollection:
    """Return a tree of only the chosen leaves, with their gradients."""
    new = _by_path(choice, leaves)
    return replace(keep_leaves(choice.tree, set(new)), new)


def _by_path(choice: _Choice, leaves: list[Tensor]) -> dict[Path, Tensor]:
    new: dict[Path, Tensor] = {}
    for entry, leaf in zip(choice.entries, leaves, strict=True):
        for path in entry.paths:
            new[path] = leaf
    return new
