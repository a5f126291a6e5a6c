"""Modules into one stacked tree and back: `stack_modules`, `init_ensemble`, `unstack`.

Stacking checks what a stacked tree cannot show: that the modules have the same structure and hyperparameters.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch import Size, Tensor, nn

from tdfunc._collection import Static, TensorCollection
from tdfunc._errors import LeafMismatchError, TieError, TreeStructureError, UnsupportedError, explain
from tdfunc._keys import dotted
from tdfunc._nontensor import NonTensorStack
from tdfunc._ties import by_identity
from tdfunc._types import Kind, Path, Ties
from tdfunc.modules.extract import tree_of
from tdfunc.modules.random import member_seed, seeded
from tdfunc.modules.slots import EXTRA_STATE, Slot, unwrap, walk
from tdfunc.ops.index import unbind
from tdfunc.ops.structure import restore_ties

T = TypeVar("T", bound=TensorCollection)
_SIMPLE = (int, float, bool, str, tuple, type(None))
_EXACT = frozenset(_SIMPLE)
# What nn.Module itself keeps in every `__dict__`; of these only the mode is a property of the architecture.
_BASE = frozenset(nn.Module().__dict__) - {"training"}


def stack_modules(modules: Sequence[nn.Module]) -> Any:
    """Stack the parameters, buffers and extra state of several modules into one tree.

    The leaves are copies without gradient history. Tied weights stay one leaf.

    Args:
        modules: Modules of one architecture, with equal hyperparameters and modes.

    Returns:
        A `TensorDict` of batch size [E], E being the number of modules; leaf shapes are (E, *shape).

    Raises:
        ValueError: There are no modules.
        TreeStructureError: Structures or hyperparameters differ; the message names the first difference.
        LeafMismatchError: A leaf differs in shape or dtype.
        TieError: The modules tie different weights.

    Source:
        The functional ensembling of `torch.func.stack_module_state`, with checks, ties and buffers in one tree.

    Examples:
        >>> stacked = tdf.stack_modules([nn.Linear(3, 2) for _ in range(4)])
        >>> stacked.batch_size, stacked["weight"].shape
        (torch.Size([4]), torch.Size([4, 2, 3]))
    """
    members = [unwrap(module, "stack_modules") for module in modules]
    if not members:
        raise ValueError(explain("stack_modules: no modules were given."))
    outline = Outline(members[0])
    columns: list[list[Any]] = []
    for i, module in enumerate(members):
        column: list[Any] = []
        if not outline.read(module, column):
            check_alike(members[0], module, f"member {i}")
            column = _values(walk(module, "stack_modules"))
        columns.append(column)
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

    __slots__ = ("_attributes", "_children", "_extra", "_hyper", "_static", "_tables", "_type")

    def __init__(self, module: nn.Module) -> None:
        module = unwrap(module, "stack_modules")
        own = module.__dict__
        self._type, self._attributes = type(module), len(own)
        self._hyper = [(name, value) for name, value in own.items() if type(value) in _EXACT and name not in _BASE]
        self._tables = [
            (table, {name: value is None for name, value in own[table].items()}) for table in ("_parameters", "_buffers") if own[table]
        ]
        self._extra = type(module).get_extra_state is not nn.Module.get_extra_state
        kinds = dict.fromkeys((name for name, value in own["_parameters"].items() if value is not None), Kind.PARAMETER)
        hidden = own["_non_persistent_buffers_set"]
        for name, value in own["_buffers"].items():
            if value is not None:
                kinds[name] = Kind.NON_PERSISTENT if name in hidden else Kind.BUFFER
        if self._extra:
            kinds[EXTRA_STATE] = Kind.EXTRA_STATE
        self._static = Static(kinds) if kinds else None
        self._children = [(name, Outline(child)) for name, child in own["_modules"].items() if child is not None]

    def read(self, module: Any, values: list[Any]) -> bool:
        """Append a module's leaves; False where only the slow comparison can tell whether it is like this one."""
        own = module.__dict__
        if type(module) is not self._type or len(own) != self._attributes:
            return False
        for name, value in self._hyper:
            other = own.get(name, self)
            if other is not value and (type(other) is not type(value) or other != value):
                return False
        tables = self._tables
        if (len(own["_parameters"]) + len(own["_buffers"])) != sum([len(names) for _, names in tables]):
            return False
        for key, names in tables:
            table = own[key]
            for name, absent in names.items():
                value = table.get(name, self)
                if value is self or (value is None) is not absent:
                    return False
                if not absent:
                    values.append(value)
        if self._extra:
            values.append(_State(module.get_extra_state()))
        children = own["_modules"]
        if len(children) < len(self._children):
            return False
        for name, child in self._children:
            if not child.read(children.get(name), values):
                return False
        return True

    def build(self, leaves: Iterator[Any], size: Size) -> Any:
        """Return the tree around leaves in the same order; submodules without leaves are left out."""
        static = self._static
        data: dict[str, Any] = {name: next(leaves) for name in static.kinds} if static is not None else {}
        for name, child in self._children:
            node = child.build(leaves, size)
            if node._data:
                data[name] = node
        return TensorCollection._open._make(data, size, None, None, static)


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
            got = by_identity(_named(slots, columns[i]))
            raise TieError(explain(f"stack_modules: member {i} ties other weights than member 0.", expected=str(ties), got=str(got)))
    return ties


def _stacked(columns: list[list[Any]], ties: Ties) -> list[Any]:
    # torch would promote other dtypes in silence; other shapes it refuses itself.
    dtypes = [getattr(value, "dtype", None) for value in columns[0]]
    if any([getattr(value, "dtype", None) for value in column] != dtypes for column in columns[1:]):
        raise TypeError("dtypes differ")
    with torch.no_grad():
        if not ties and None not in dtypes:
            return [torch.stack(values) for values in zip(*columns, strict=True)]
        made: dict[int, Any] = {}
        leaves: list[Any] = []
        for values in zip(*columns, strict=True):
            if id(values[0]) not in made:
                made[id(values[0])] = torch.stack(values) if not isinstance(values[0], _State) else NonTensorStack(*[v.value for v in values])
            leaves.append(made[id(values[0])])
        return leaves


def _explain_leaves(members: list[nn.Module], columns: list[list[Any]]) -> None:
    """Raise the error that names the leaf which cannot be stacked."""
    for module in members:
        walk(module, "stack_modules")
    slots = walk(members[0], "stack_modules")
    for i, column in enumerate(columns[1:], 1):
        _check_leaves(slots, columns[0], column, i)


def _tree(slots: list[Slot], leaves: list[Any], ties: Ties, members: int) -> Any:
    return tree_of(list(zip(slots, leaves, strict=True)), ties, Size((members,)))


def _check_leaves(slots: list[Slot], first: list[Any], other: list[Any], member: int) -> None:
    for slot, a, b in zip(slots, first, other, strict=True):
        if slot.store is not None and (a.shape != b.shape or a.dtype is not b.dtype):
            raise LeafMismatchError(
                explain(
                    f"stack_modules: leaf {dotted(slot.path)!r} of member {member} differs from member 0.",
                    expected=f"shape {tuple(a.shape)}, {a.dtype}",
                    got=f"shape {tuple(b.shape)}, {b.dtype}",
                    hint="members of an ensemble share one architecture; keep others apart and average their outputs.",
                )
            )


def check_alike(first: nn.Module, other: nn.Module, who: str, at: Path = ()) -> None:
    """Raise unless two modules have the same classes, children, slots and hyperparameters; names the first difference.

    Hyperparameters are the numbers, bools, strings and tuples in a module's `__dict__`, its mode among them.
    """
    if other is first:
        return
    where = dotted(at) or "the root"
    # By name: every parametrized module has a class of its own.
    if type(first) is not type(other) and type(first).__qualname__ != type(other).__qualname__:
        raise _unlike(who, where, "class", type(first).__qualname__, type(other).__qualname__)
    mine, theirs = first.__dict__, other.__dict__
    for table in ("_parameters", "_buffers", "_modules"):
        a, b = mine[table], theirs[table]
        if a.keys() != b.keys():
            raise _unlike(who, where, table[1:], list(a), list(b))
        for name, value in a.items():
            if (value is None) is not (b[name] is None):
                raise _unlike(who, where, f"{table[1:]}.{name}", "None" if value is None else "set", "None" if b[name] is None else "set")
    for name, value in mine.items():
        if isinstance(value, _SIMPLE) and not _same(value, theirs.get(name, ...)):
            raise _unlike(who, where, name, value, theirs.get(name, "(no such attribute)"))
    for name, child in mine["_modules"].items():
        if child is not None:
            check_alike(unwrap(child, "stack_modules"), unwrap(theirs["_modules"][name], "stack_modules"), who, (*at, name))


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    # A tuple may hold tensors or arrays, which have no single truth value.
    except (RuntimeError, ValueError, TypeError):
        return False


def _unlike(who: str, where: str, what: str, expected: Any, got: Any) -> TreeStructureError:
    return TreeStructureError(
        explain(
            f"stack_modules: {who} differs from member 0 in {what!r} of {where!r}.",
            expected=repr(expected),
            got=repr(got),
            hint="one forward runs all members, so structures and hyperparameters must agree (modes too: call train() or eval() on all).",
        )
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
        UnsupportedError: `make` drew from torch's default generator in a way that cannot be seeded.

    Examples:
        >>> tree = tdf.init_ensemble(lambda: nn.Linear(3, 2), 4, seed=1)
        >>> tree["weight"].shape
        torch.Size([4, 2, 3])
    """
    if n < 1:
        raise ValueError(explain("init_ensemble: the number of members must be positive.", got=str(n)))
    first = slots = leaves = ties = None
    prints: dict[int, int] = {}
    for i in range(n):
        module = unwrap(_made(make, seed, i), "init_ensemble")
        own = walk(module, "init_ensemble")
        values = _values(own)
        if first is None or slots is None or leaves is None:
            first, slots, ties = module, own, by_identity(_named(own, values))
            leaves = _allocated(own, values, n)
        else:
            check_alike(first, module, f"member {i}")
            _check_leaves(slots, _values(slots), values, i)
        _fill(leaves, slots, values, i)
        same = prints.setdefault(_fingerprint(own, values), i)
        if same != i:
            raise ValueError(
                explain(
                    f"init_ensemble: members {same} and {i} are equal.",
                    expected="members that differ",
                    hint="make() must build a new, randomly initialised module at each call.",
                )
            )
    assert slots is not None
    assert leaves is not None
    return _tree(slots, [NonTensorStack(*leaf) if isinstance(leaf, list) else leaf for leaf in leaves], ties, n)


def _made(make: Callable[[], nn.Module], seed: int, member: int) -> nn.Module:
    before = torch.get_rng_state()
    with seeded(member_seed(seed, member)):
        module = make()
    if not torch.equal(before, torch.get_rng_state()):
        raise UnsupportedError(
            explain(
                "init_ensemble: make() drew from torch's default generator, past the seed of its member.",
                hint="initialise with torch.nn.init or tensor methods called from Python, or build the modules yourself and use stack_modules.",
            )
        )
    return module


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


def _fingerprint(slots: list[Slot], values: list[Any]) -> int:
    """Hash the parameters of one member; a module without any has its member's own fingerprint."""
    digest = xxhash.xxh3_64()
    found = False
    for slot, value in zip(slots, values, strict=True):
        if slot.kind is Kind.PARAMETER and isinstance(value, Tensor) and value.numel() and not value.is_meta:
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            found = True
    return digest.intdigest() if found else id(values)


def unstack(tree: T) -> tuple[T, ...]:
    """Return the members of a stacked tree, as views.

    Args:
        tree: A tree whose first batch dimension counts members.

    Returns:
        One tree for each member; `member.to_module(m)` makes it a plain module again.

    Raises:
        IndexError: The tree has no batch dimension.

    Examples:
        >>> members = tdf.unstack(tdf.stack_modules([nn.Linear(3, 2) for _ in range(4)]))
        >>> len(members), members[0]["weight"].shape
        (4, torch.Size([2, 3]))
    """
    return unbind(tree, 0)
