"""Modules into one stacked tree and back: `stack_modules`, `init_ensemble`, `unstack`.

Stacking checks what a stacked tree cannot show: that the modules have the same structure and hyperparameters.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from operator import is_, itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch import Size, Tensor, nn

from tdfunc.core.collection import Static, TensorCollection
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, TieError, UnsupportedError, error
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorStack
from tdfunc.core.ties import by_identity
from tdfunc.core.types import Kind, Path, Ties
from tdfunc.ensemble._alike import alike, check_alike, has_hooks, hyperparameters
from tdfunc.ensemble._draws import default_generators, watch
from tdfunc.modules.extract import EXTRA_STATE, Slot, tree_of, unwrap, walk
from tdfunc.modules.random import member_seed, seeded
from tdfunc.ops.index import unbind
from tdfunc.ops.structure import restore_ties
from tdfunc.storage.disk.raw import raw_bytes

T = TypeVar("T", bound=TensorCollection)


# Any: the tree is a `TensorDict`, which stands in a higher layer than annotations may name at run time.
def stack_modules(modules: Sequence[nn.Module]) -> Any:
    """Stack the parameters, buffers and extra state of several modules into one tree.

    The leaves are copies without gradient history. Tied weights stay one leaf. Which parameters require gradients is
    not compared, and not kept.

    Args:
        modules: Modules of one architecture, with equal hyperparameters, hooks and modes.

    Returns:
        A `TensorDict` of batch size [E], E being the number of modules.

    Shapes:
        E leaves of shape (*S) become one of shape (E, *S).

    Raises:
        ValueError: There are no modules.
        TreeStructureError: Structures, hooks or hyperparameters differ; the message names the first difference.
        LeafMismatchError: A leaf differs in shape, dtype or device.
        TieError: The modules tie different weights.
        UnsupportedError: A module is lazy and has not run yet, or is no plain module.

    Source:
        The functional ensembling of `torch.func.stack_module_state`, with checks, ties and buffers in one tree.

    Examples:
        >>> stacked = tdf.stack_modules([nn.Linear(3, 2) for _ in range(4)])
        >>> stacked.batch_size, stacked["weight"].shape
        (torch.Size([4]), torch.Size([4, 2, 3]))
    """
    if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList):
        raise error(
            TypeError,
            "stack_modules: one module.",
            expected="a list of modules",
            got=type(modules).__name__,
            hint="init_ensemble(make, n) makes n members.",
        )
    members = [unwrap(module, "stack_modules") for module in modules]
    if not members:
        raise error(ValueError, "stack_modules: no modules were given.", expected="at least one", got=modules)
    columns: list[list[Any]] = [[]]
    outline = Outline(members[0], columns[0], set())
    # Slots that are None are found for all modules at once.
    present = [x is not None for x in columns[0]]
    columns[0] = list(compress(columns[0], present))
    for i, module in enumerate(members[1:], 1):
        column: list[Any] = []
        if outline.read(module, column) and [x is not None for x in column] == present:
            columns.append(list(compress(column, present)))
        else:
            check_alike(members[0], module, f"member {i}")
            columns.append(_values(walk(module, "stack_modules")))
    ties = _common_ties(members, columns)
    try:
        leaves = _stacked(columns, ties)
    except (RuntimeError, TypeError, ValueError):
        leaves = None
    if leaves is None:
        _explain_leaves(members, columns)
        leaves = _stacked(columns, ties)
    tree = outline.build(iter(leaves), Size((len(members),)))
    return restore_ties(tree, ties) if ties else tree


class Outline:
    """The structure of a module, made once: reads the leaves of modules like it, and builds the tree of them.

    Leaves come in the order of `state_dict`: parameters, buffers and extra state of a module, then its children.
    """

    __slots__ = (
        "_attributes", "_buffers", "_children", "_extra", "_get", "_hooked", "_names", "_others", "_parameters",
        "_static", "_type", "_types", "_values",
    )  # fmt: skip

    def __init__(self, module: nn.Module, values: list[Any], known: set[type]) -> None:
        # `known` has the classes of modules that are no wrapper.
        if type(module) not in known:
            inner = unwrap(module, "stack_modules")
            if inner is module:
                known.add(type(module))
            module = inner
        own = module.__dict__
        self._type, self._attributes, self._hooked = type(module), len(own), has_hooks(own)
        plain, self._others = hyperparameters(module)
        # Twice, since of one name itemgetter would not return a tuple.
        self._get: Callable[[dict[str, Any]], Any] = itemgetter(*plain, *plain[:1]) if plain else lambda _: ()
        self._values = self._get(own)
        self._types = list(map(type, self._values))
        self._parameters, self._buffers = list(own["_parameters"]), list(own["_buffers"])
        self._extra = type(module).get_extra_state is not nn.Module.get_extra_state
        self._static = _static(own, self._extra)
        values += own["_parameters"].values()
        values += own["_buffers"].values()
        if self._extra:
            values.append(_State(module.get_extra_state()))
        children = own["_modules"]
        self._names = list(children)
        self._children = [None if child is None else Outline(child, values, known) for child in children.values()]

    def read(self, module: Any, values: list[Any]) -> bool:
        """Append a module's slots; False where only the slow comparison can tell whether it is like this one."""
        own = module.__dict__
        # A few comparisons in C for each module: a large model has thousands of attributes.
        if type(module) is not self._type or len(own) != self._attributes or self._hooked or has_hooks(own):
            return False
        try:
            found = self._get(own)
        except KeyError:
            return False
        if found != self._values or list(map(type, found)) != self._types:
            return False
        if self._others and not all([name in own and alike(value, own[name]) for name, value in self._others]):
            return False
        parameters, buffers = own["_parameters"], own["_buffers"]
        if list(parameters) != self._parameters or list(buffers) != self._buffers:
            return False
        values += parameters.values()
        values += buffers.values()
        if self._extra:
            values.append(_State(module.get_extra_state()))
        children = own["_modules"]
        if not children and not self._names:
            return True
        if list(children) != self._names:
            return False
        for child, outline in zip(children.values(), self._children, strict=True):
            if (child is None) is not (outline is None) or (outline is not None and not outline.read(child, values)):
                return False
        return True

    def build(self, leaves: Iterator[Any], size: Size) -> Any:
        """Return the tree around leaves in the same order; submodules without leaves are left out."""
        static = self._static
        data: dict[str, Any] = {name: next(leaves) for name in static.kinds} if static is not None else {}
        for name, child in zip(self._names, self._children, strict=True):
            if child is not None:
                node = child.build(leaves, size)
                if node._data:
                    data[name] = node
        return TensorCollection._open._make(data, size, None, None, static)


def _static(own: dict[str, Any], extra: bool) -> Static | None:
    if not own["_parameters"] and not own["_buffers"] and not extra:
        return None
    kinds = dict.fromkeys([name for name, value in own["_parameters"].items() if value is not None], Kind.PARAMETER)
    if own["_buffers"]:
        hidden = own["_non_persistent_buffers_set"]
        for name, value in own["_buffers"].items():
            if value is not None:
                kinds[name] = Kind.NON_PERSISTENT if name in hidden else Kind.BUFFER
    if extra:
        kinds[EXTRA_STATE] = Kind.EXTRA_STATE
    return Static(kinds) if kinds else None


class _State(NamedTuple):
    """A module's extra state among its leaves."""

    value: Any


def _values(slots: list[Slot]) -> list[Any]:
    return [slot.store[slot.path[-1]] if slot.store is not None else _State(slot.value) for slot in slots]


def _named(slots: list[Slot], values: list[Any]) -> list[tuple[Path, Any]]:
    return [(slot.path, value) for slot, value in zip(slots, values, strict=True) if slot.store is not None]


def _tie_pattern(values: list[Any]) -> list[int] | None:
    """Return for each value the place of its first appearance; None when all are different."""
    if len({id(value) for value in values}) == len(values):
        return None
    places: dict[int, int] = {}
    for i, value in enumerate(values):
        places.setdefault(id(value), i)
    return [places[id(value)] for value in values]


def _common_ties(members: list[nn.Module], columns: list[list[Any]]) -> Ties:
    """Return the groups of tied paths, which all members must share."""
    patterns = [_tie_pattern(column) for column in columns]
    if not any(patterns):
        return ()
    slots = walk(members[0], "stack_modules")
    ties = by_identity(_named(slots, columns[0]))
    for i, pattern in enumerate(patterns):
        if pattern != patterns[0]:
            raise _other_ties(i, ties, by_identity(_named(slots, columns[i])))
    return ties


def _other_ties(member: int, expected: Ties, got: Ties) -> TieError:
    texts = [" and ".join(repr(tuple(map(dotted, group))) for group in ties) or "none" for ties in (expected, got)]
    return TieError(
        f"stack_modules: member {member} ties other weights than member 0.",
        expected=texts[0],
        got=texts[1],
        hint="tie the same weights in every member (self.out.weight = self.emb.weight), or in none.",
    )


def _stacked(columns: list[list[Any]], ties: Ties) -> list[Any]:
    # torch would promote other dtypes in silence; other shapes it refuses itself.
    dtypes = [getattr(value, "dtype", None) for value in columns[0]]
    if not all([all(map(is_, [getattr(value, "dtype", None) for value in column], dtypes)) for column in columns[1:]]):
        raise TypeError("dtypes differ")
    with torch.no_grad():
        if not ties and None not in dtypes:
            return [torch.stack(values) for values in zip(*columns, strict=True)]
        made: dict[int, Any] = {}
        leaves: list[Any] = []
        for values in zip(*columns, strict=True):
            if isinstance(values[0], _State):
                leaves.append(NonTensorStack(*[state.value for state in values]))
                continue
            if id(values[0]) not in made:
                made[id(values[0])] = torch.stack(values)
            leaves.append(made[id(values[0])])
        return leaves


def _explain_leaves(members: list[nn.Module], columns: list[list[Any]]) -> None:
    """Raise the error that names the leaf which cannot be stacked."""
    for module in members:
        walk(module, "stack_modules")
    slots = walk(members[0], "stack_modules")
    for i, column in enumerate(columns[1:], 1):
        _check_leaves(slots, columns[0], column, i)


def _check_leaves(slots: list[Slot], first: list[Any], other: list[Any], member: int) -> None:
    for slot, a, b in zip(slots, first, other, strict=True):
        if slot.store is not None and (a.shape != b.shape or a.dtype is not b.dtype or a.device != b.device):
            raise LeafMismatchError(
                f"stack_modules: leaf {dotted(slot.path)!r} of member {member} differs from member 0.",
                expected=f"shape {tuple(a.shape)}, {a.dtype} on {a.device}",
                got=f"shape {tuple(b.shape)}, {b.dtype} on {b.device}",
                hint="members share one architecture, dtype and device; average the outputs of models that differ.",
            )


def init_ensemble(make: Callable[[], nn.Module], n: int, seed: int = 0) -> Any:
    """Return the stacked tree of `n` freshly initialised members, without keeping n modules alive.

    Member i is what `make` draws from a generator seeded by (seed, i), so it does not change with n.

    Args:
        make: Returns a new module, initialised by the functions of `torch.nn.init` or other calls from Python.
        n: The number of members.
        seed: Seeds all members; torch's default generator is not used.

    Returns:
        A `TensorDict` of batch size [n].

    Raises:
        ValueError: n is not positive, or two members came out equal.
        TreeStructureError: `make` returned different architectures.
        LeafMismatchError: A leaf differs in shape, dtype or device.
        TieError: The members tie different weights.
        UnsupportedError: `make` drew from torch's default generator in a way that cannot be seeded.

    Examples:
        >>> tree = tdf.init_ensemble(lambda: nn.Linear(3, 2), 4, seed=1)
        >>> tree["weight"].shape
        torch.Size([4, 2, 3])
    """
    if not isinstance(n, int) or isinstance(n, bool):
        raise error(
            TypeError,
            "init_ensemble: n is a number.",
            expected="int",
            got=type(n).__name__,
            hint="init_ensemble(make, n).",
        )
    if n < 1:
        raise error(ValueError, "init_ensemble: there would be no members.", expected="n >= 1", got=n)
    if isinstance(make, nn.Module):
        raise error(
            TypeError,
            "init_ensemble: make must build a module at each call.",
            expected="a function",
            got=f"a module ({type(make).__name__})",
            hint="init_ensemble(lambda: Net(...), n).",
        )
    first = _made(make, seed, 0)
    slots = walk(first, "init_ensemble")
    start = _values(slots)
    ties = by_identity(_named(slots, start))
    leaves = _allocated(slots, start, n)
    prints: dict[int, int] = {}
    for i in range(n):
        values = start if i == 0 else _values_like(first, slots, start, ties, _made(make, seed, i), i)
        _fill(leaves, slots, values, i)
        _refuse_equal(prints, values, i)
    made = [NonTensorStack(*leaf) if isinstance(leaf, list) else leaf for leaf in leaves]
    return tree_of(list(zip(slots, made, strict=True)), ties, Size((n,)))


def _made(make: Callable[[], nn.Module], seed: int, member: int) -> nn.Module:
    def build() -> nn.Module:
        with seeded(member_seed(seed, member)):
            return make()

    module, drew = watch(default_generators([]), build)
    if drew:
        raise UnsupportedError(
            "init_ensemble: make() drew from torch's default generator, past the seed of its member.",
            expected="initialisation by torch.nn.init, torch.rand, ... and tensor methods, called from Python",
            got="a draw inside an operation that takes no generator",
            hint="build the modules yourself and use tdfunc.stack_modules(modules).",
        )
    return unwrap(module, "init_ensemble")


def _values_like(
    first: nn.Module, slots: list[Slot], start: list[Any], ties: Ties, module: nn.Module, member: int
) -> list[Any]:
    """Return a module's leaves, checked against those of the first member."""
    check_alike(first, module, f"member {member}")
    values = _values(walk(module, "init_ensemble"))
    _check_leaves(slots, start, values, member)
    own = by_identity(_named(slots, values))
    if own != ties:
        raise _other_ties(member, ties, own)
    return values


def _allocated(slots: list[Slot], values: list[Any], n: int) -> list[Any]:
    made: dict[int, Any] = {}
    leaves: list[Any] = []
    for slot, value in zip(slots, values, strict=True):
        if slot.store is None:
            leaves.append([None] * n)
            continue
        if id(value) not in made:
            made[id(value)] = torch.empty((n, *value.shape), dtype=value.dtype, device=value.device)
        leaves.append(made[id(value)])
    return leaves


def _fill(leaves: list[Any], slots: list[Slot], values: list[Any], member: int) -> None:
    with torch.no_grad():
        for leaf, slot, value in zip(leaves, slots, values, strict=True):
            leaf[member] = value.value if slot.store is None else value.detach()


def _refuse_equal(prints: dict[int, int], values: list[Any], member: int) -> None:
    """Raise if an earlier member has the same numbers; a module without numbers is no member to compare."""
    digest = xxhash.xxh3_128()
    numbers = [v for v in values if isinstance(v, Tensor) and v.numel() and not v.is_meta]
    for value in numbers:
        digest.update(raw_bytes(value).data)
    same = prints.setdefault(digest.intdigest(), member)
    if numbers and same != member:
        raise error(
            ValueError,
            f"init_ensemble: members {same} and {member} are equal.",
            expected="members that differ",
            got="the same numbers in every parameter and buffer",
            hint="make() must build a new, randomly initialised module at each call.",
        )


def unstack(tree: T) -> tuple[T, ...]:
    """Return the members of a stacked tree, as views.

    Args:
        tree: A tree whose first batch dimension counts members.

    Returns:
        One tree for each member; `member.to_module(m)` makes it a plain module again.

    Raises:
        BatchSizeError: The tree has no batch dimension.

    Examples:
        >>> members = tdf.unstack(tdf.stack_modules([nn.Linear(3, 2) for _ in range(4)]))
        >>> len(members), members[0]["weight"].shape
        (4, torch.Size([2, 3]))
    """
    if not tree._batch_size:
        raise BatchSizeError(
            "unstack: the tree has no members.",
            expected="batch size [E, ...]",
            got="[]",
            hint="tdfunc.stack_modules(modules) or torch.stack(trees) make a stacked tree.",
        )
    return unbind(tree, 0)
