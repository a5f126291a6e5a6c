"""Modules into one stacked tree and back: `stack_modules`, `init_ensemble`, `unstack`.

Stacking checks that the modules differ in their weights alone, which a stacked tree cannot show.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import xxhash
from torch import Size, Tensor, nn

from tdfunc import random
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, TieError, TreeStructureError, UnsupportedError, as_count, error
from tdfunc.core.generators import default_generators, foreign_states
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorStack
from tdfunc.core.types import Path, Ties
from tdfunc.ensemble.alike import ExtraState, Outline, Pair
from tdfunc.ensemble.draws import watch
from tdfunc.modules.extract import unwrap, walk
from tdfunc.modules.random import Members
from tdfunc.ops.batch.index import unbind
from tdfunc.ops.edits.structure import restore_ties
from tdfunc.random.draws import KeyLike, key_of
from tdfunc.storage.disk.raw import memory_of

if TYPE_CHECKING:
    from tdfunc._tensordict import TensorDict

_DTYPE = attrgetter("dtype")
_GEOMETRY = attrgetter("shape", "dtype", "device")
T = TypeVar("T", bound=TensorCollection)


def stack_modules(modules: Sequence[nn.Module]) -> "TensorDict":
    """Stack the parameters, buffers and extra state of several modules into one tree.

    The leaves are copies without gradient history. Tied weights stay one leaf. `requires_grad` is neither compared nor
    kept.

    Args:
        modules: Modules of one architecture, with equal hyperparameters, hooks and modes.

    Returns:
        A `TensorDict` of batch size [E], E being the number of modules.

    Shapes:
        E leaves of shape (*S) become one of shape (E, *S).

    Raises:
        ValueError: `modules` is empty.
        TreeStructureError: Structures, hooks or hyperparameters differ; the message names the first difference.
        LeafMismatchError: A leaf differs in shape, dtype or device.
        TieError: The modules tie different weights.
        UnsupportedError: A module is lazy and has not run yet, or its weights cannot be replaced.

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
            "stack_modules: modules is not a list.",
            expected="a list of modules",
            got=type(modules).__name__,
            hint="init_ensemble(make, members) makes new ones.",
        )
    given = list(modules)
    if not given:
        raise error(ValueError, "stack_modules: `modules` is empty.", expected="at least one", got=modules)
    members = _Members(given[0], "stack_modules")
    columns = [members.first, *[members.read(module, i) for i, module in enumerate(given[1:], 1)]]
    try:
        # torch promotes other dtypes silently; other shapes and devices it refuses itself.
        dtypes = list(map(_DTYPE, members.first))
        if any([list(map(_DTYPE, column)) != dtypes for column in columns[1:]]):
            raise TypeError("dtypes differ")
        leaves: list[Any] = []
        with torch.no_grad():
            for place, values in zip(members.places, zip(*columns, strict=True), strict=True):
                if place < len(leaves):
                    leaves.append(leaves[place])
                elif isinstance(values[0], ExtraState):
                    leaves.append(NonTensorStack(*[state.value for state in values]))
                else:
                    leaves.append(torch.stack(values))
    except (RuntimeError, TypeError, ValueError):
        for i, column in enumerate(columns):
            members.check_leaves(given[i], column, i)
        raise
    return members.build(leaves, len(columns))


class _Members:
    """Reads the leaves of modules, each checked against the first, and builds the stacked tree."""

    def __init__(self, module: nn.Module, call: str) -> None:
        self._call = call
        self._module = unwrap(module, call)
        values: list[Any] = []
        self._outline = Outline(self._module, values, call, set())
        self._present = [value is not None for value in values]
        # Its leaves, and for each the first place of the same object: tied leaves share one.
        self.first = list(compress(values, self._present))
        self.places = _find_places(self.first)

    def read(self, module: nn.Module, member: int) -> list[Any]:
        """Return the leaves of a module, which must be like the first."""
        values: list[Any] = []
        name = f"member {member}"
        pair = Pair(self._module, unwrap(module, self._call), self._call, name)
        self._outline.read(module, values, pair)
        if [value is not None for value in values] != self._present:
            raise self._presence_error(module, pair)
        column = list(compress(values, self._present))
        places = _find_places(column)
        if places != self.places:
            raise TieError(
                f"{self._call}: {name} ties other weights than member 0.",
                expected=self._show_ties(self.places),
                got=self._show_ties(places),
                hint="tie the same weights in every member (self.out.weight = self.emb.weight), or in none.",
            )
        return column

    def _presence_error(self, module: nn.Module, pair: Pair) -> TreeStructureError:
        """Return the error for a slot that is None in one of the modules only."""
        mine = {slot.path for slot in walk(self._module, self._call)}
        theirs = {slot.path for slot in walk(module, self._call)}
        path = next(iter(mine ^ theirs))
        if path in mine:
            return pair.differ(path[:-1], path[-1], "a tensor", "None")
        return pair.differ(path[:-1], path[-1], "None", "a tensor")

    def build(self, leaves: list[Any], n: int) -> Any:
        """Return the tree of `n` members around stacked leaves."""
        tree = self._outline.build(iter(leaves), Size((n,)))
        ties = self._ties(self.places)
        if ties:
            return restore_ties(tree, ties)
        return tree

    def check_leaves(self, module: nn.Module, column: list[Any], member: int) -> None:
        """Raise unless the leaves of a module have the shapes, dtypes and devices of the first."""
        for slot, a, b in zip(walk(module, self._call), self.first, column, strict=True):
            if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
                raise LeafMismatchError(
                    f"{self._call}: leaf {dotted(slot.path)!r} of member {member} differs from member 0.",
                    expected=f"shape {tuple(a.shape)}, {a.dtype} on {a.device}",
                    got=f"shape {tuple(b.shape)}, {b.dtype} on {b.device}",
                    hint="members share one architecture, dtype and device; average the outputs of others.",
                )

    def _ties(self, places: Sequence[int]) -> Ties:
        if len(set(places)) == len(places):
            return ()
        groups: dict[int, list[Path]] = {}
        for slot, place in zip(walk(self._module, self._call), places, strict=True):
            groups.setdefault(place, []).append(slot.path)
        return tuple([tuple(group) for group in groups.values() if len(group) > 1])

    def _show_ties(self, places: Sequence[int]) -> str:
        groups = [repr(tuple(map(dotted, group))) for group in self._ties(places)]
        return " and ".join(groups) or "none"


def _find_places(values: list[Any]) -> Sequence[int]:
    if len(set(map(id, values))) == len(values):
        return range(len(values))
    first: dict[int, int] = {}
    return [first.setdefault(id(value), i) for i, value in enumerate(values)]


def init_ensemble(make: Callable[[], nn.Module], members: int, *, key: KeyLike = 0) -> "TensorDict":
    """Return the stacked tree of freshly initialised members, without keeping more than two modules alive.

    Member i draws from `fold_in(key, i)`, so it does not depend on the number of members.

    Args:
        make: A function that returns a new module, initialised by `torch.nn.init` or other calls from Python.
        members: The number of members.
        key: A random key, a seed or a generator; torch's default generator is not used.

    Returns:
        A `TensorDict` of batch size [members].

    Raises:
        ValueError: `members` is below 1, or two members are equal.
        TreeStructureError, LeafMismatchError, TieError: As in `stack_modules`.
        UnsupportedError: `make` drew inside an operation that takes no key, or from Python's or numpy's generator.

    Examples:
        >>> tree = tdf.init_ensemble(lambda: nn.Linear(3, 2), 4, key=1)
        >>> tree["weight"].shape
        torch.Size([4, 2, 3])
    """
    members = as_count("init_ensemble: members", members)
    key = key_of(key)
    draws = Members(random.fold_in(key, torch.arange(members, device=key.device)))
    foreign = foreign_states()
    stack = _Members(_make(make, draws, 0, foreign), "init_ensemble")
    leaves: list[Any] = []
    for place, value in zip(stack.places, stack.first, strict=True):
        if place < len(leaves):
            leaves.append(leaves[place])
        elif isinstance(value, ExtraState):
            leaves.append([None] * members)
        else:
            leaves.append(torch.empty((members, *value.shape), dtype=value.dtype, device=value.device))
    prints: dict[bytes, int] = {}
    geometry = list(map(_GEOMETRY, stack.first))
    for i in range(members):
        values = stack.first
        if i:
            module = _make(make, draws, i, foreign)
            values = stack.read(module, i)
            if list(map(_GEOMETRY, values)) != geometry:
                stack.check_leaves(module, values, i)
        digest = _write_member(leaves, values, i)
        same = prints.setdefault(digest, i)
        # A module without numbers has the digest of nothing.
        if same != i and digest != xxhash.xxh3_128_digest(b""):
            raise error(
                ValueError,
                f"init_ensemble: members {same} and {i} are equal.",
                expected="members that differ",
                got="the same numbers in every parameter and buffer",
                hint="make() must build a new, randomly initialised module at each call.",
            )
    return stack.build([NonTensorStack(*leaf) if isinstance(leaf, list) else leaf for leaf in leaves], members)


# Any: tensors, and lists of extra states.
def _write_member(leaves: list[Any], values: list[Any], i: int) -> bytes:
    """Write the values of one member into stacked leaves; return a digest of them."""
    rows: list[tuple[Tensor, Tensor]] = []
    for leaf, value in zip(leaves, values, strict=True):
        if isinstance(value, ExtraState):
            leaf[i] = value.value
        else:
            rows.append((leaf[i], value))
    if rows:
        targets, sources = zip(*rows, strict=True)
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]
    digest = xxhash.xxh3_128()
    for row, _ in rows:
        if not row.is_meta:
            digest.update(memory_of(row.cpu()))
    return digest.digest()


# Any: the states of numpy's and Python's generators before the call, which are updated.
def _make(make: Callable[[], nn.Module], draws: Members, member: int, foreign: dict[str, Any]) -> nn.Module:
    def build() -> nn.Module:
        with draws.enter(member):
            return make()

    got = None
    module, drew = watch(default_generators([]), build)
    if drew:
        got = "a draw inside an operation that takes no key"
    if foreign_states() != foreign:
        # Another thread may have drawn meanwhile; it does not each time.
        foreign.update(foreign_states())
        module = build()
        if foreign_states() != foreign:
            got = "a draw from Python's or numpy's global generator"
    if got is not None:
        raise UnsupportedError(
            "init_ensemble: make() drew random numbers past the key of its member.",
            expected="initialisation by torch.nn.init, torch.rand, ... and tensor methods, called from Python",
            got=got,
            hint="build the modules yourself and use tdfunc.stack_modules(modules).",
        )
    return module


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
