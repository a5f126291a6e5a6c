"""The order in which a module's leaves are read from trees, and the errors for trees that do not fit.

A plan is made once for a module. It holds structure, shapes and ties, never a weight. Reading a tree and filling
slots are loops over leaves, written out as straight-line code.
"""

from collections.abc import Mapping, Sequence, Set
from operator import attrgetter
from typing import Any

from torch import Size, Tensor

from tdfunc.core.collection import PLAIN, TensorCollection
from tdfunc.core.context import is_compiling
from tdfunc.core.errors import LeafMismatchError, TieError, TreeStructureError, error
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.shapes import EMPTY
from tdfunc.core.ties import group_of
from tdfunc.core.types import Kind, Path
from tdfunc.core.walk import replace
from tdfunc.modules.extract import EXTRA_STATE, is_one_tensor
from tdfunc.ops.base.reading import entries, iter_items

_SHAPE = attrgetter("shape")
FLAT = 'the tree has the keys of a state dict: tree.unflatten_keys(".") nests them.'


class Straight:
    """A function given by its source, `def run(...)`, which is made of keys and numbers alone."""

    __slots__ = ("_run", "_source")

    def __init__(self, source: str) -> None:
        self._source = source
        self._run: Any = None

    # Any: `make_reader` and `make_filler` give the signatures.
    @property
    def run(self) -> Any:
        """The function; compiled on first use, since many structures are read once or never."""
        if self._run is None:
            scope: dict[str, Any] = {}
            exec(self._source, scope)
            self._run = scope["run"]
        return self._run

    def __reduce__(self) -> Any:
        return Straight, (self._source,)


def make_reader(nodes: Sequence[tuple[int, str]], counts: Sequence[int], places: Sequence[tuple[int, str]]) -> Straight:
    """Return `run(data)`: the leaves in a tree's data, or None where a node has more entries than it should have.

    It raises KeyError or AttributeError where a key or a node is missing.

    Args:
        nodes: For each node but the root, parents first, the number of its parent and its key there.
        counts: The number of entries of each node, the root first.
        places: For each leaf the number of its node and its key there.
    """
    steps = [f" d{i} = d{parent}[{_literal(key)}]._data\n" for i, (parent, key) in enumerate(nodes, 1)]
    fits = " and ".join(f"len(d{i}) == {count}" for i, count in enumerate(counts))
    leaves = ", ".join(f"d{number}[{_literal(key)}]" for number, key in places)
    return Straight(f"def run(d0):\n{''.join(steps)} return [{leaves}] if {fits} else None\n")


def make_filler(slots: Sequence[tuple[int, str]]) -> Straight:
    """Return `run(tables, values)`, which writes each value to its slot.

    Args:
        slots: For each value the number of its table and its key there.
    """
    count = 1 + max([number for number, _ in slots], default=-1)
    tables = "".join(f"t{number}, " for number in range(count))
    written = "".join(f"t{number}[{_literal(name)}], " for number, name in slots)
    return Straight(f"def run(tables, values):\n ({tables}) = tables\n ({written}) = values\n")


def _literal(key: str) -> str:
    # The repr of str itself: a subclass of str may have another.
    return str.__repr__(key)


class Plan:
    """The leaves that a call takes from one tree: their paths, the shapes they must have, and how to read them fast."""

    def __init__(self, tree: TensorCollection) -> None:
        self.paths: list[Path] = []
        self.shapes: list[Size] = []
        self.first: list[Path] = []
        self.buffers: set[Path] = set()
        # The nodes, parents before children: (number of the parent, key); how many entries each has; and where the
        # leaves are: (number of the node, key).
        self._nodes: list[tuple[int, str]] = []
        self._counts: list[int] = []
        self._places: list[tuple[int, str]] = []
        self._stacked: tuple[Size, list[Size]] = (EMPTY, self.shapes)
        self._fill(tree, (), tree)
        self._reader = make_reader(self._nodes, self._counts, self._places)
        # (place, place of the first path) of every later path of a tied leaf.
        self.aliases: list[tuple[int, int]] = []
        place_of = {path: place for place, path in enumerate(self.paths)}
        for path, first in zip(self.paths, self.first, strict=True):
            if path != first:
                self.aliases.append((place_of[path], place_of[first]))

    def _fill(self, tree: TensorCollection, at: Path, root: TensorCollection) -> None:
        number = len(self._counts)
        self._counts.append(len(tree._data))
        for key, value in tree._data.items():
            if isinstance(value, Tensor):
                self._places.append((number, key))
                self.paths.append((*at, key))
                self.shapes.append(value.shape)
                self.first.append(group_of(root._ties, (*at, key))[0])
                if tree._kinds.get(key) in (Kind.BUFFER, Kind.NON_PERSISTENT):
                    self.buffers.add((*at, key))
        for key, value in tree._data.items():
            if isinstance(value, TensorCollection):
                self._nodes.append((number, key))
                self._fill(value, (*at, key), root)

    def shapes_after(self, lead: Size) -> list[Size]:
        """Return the shapes that leaves have when every one starts with `lead`."""
        if not lead:
            return self.shapes
        # The compiler guards on cached shapes, and compiles again when they change.
        if is_compiling():
            return [lead + shape for shape in self.shapes]
        # One tuple, read once: another thread may replace it.
        stacked = self._stacked
        if stacked[0] != lead:
            stacked = self._stacked = (lead, [lead + shape for shape in self.shapes])
        return stacked[1]

    def read(self, tree: TensorCollection) -> list[Any] | None:
        """Return the leaves in the order of `paths`, or None if the tree's keys are not exactly these."""
        try:
            if not is_compiling():
                return self._reader.run(tree._data)
            nodes = [tree._data]
            for parent, key in self._nodes:
                nodes.append(nodes[parent][key]._data)
            if list(map(len, nodes)) == self._counts:
                return [nodes[i][key] for i, key in self._places]
            return None
        except (KeyError, AttributeError):
            return None

    def checked(self, tree: Any, lead: Size) -> list[Any] | None:
        """Return the leaves if keys and ties are the plan's; shapes are checked once for each tree.

        Raises:
            LeafMismatchError: A leaf has another shape.
        """
        compiling = is_compiling()
        bound = None
        if not compiling:
            bound = getattr(tree, "_bound", None)
        if bound is not None and bound.plan is self and bound.lead == lead:
            return bound.leaves
        leaves = self.read(tree)
        if leaves is None or any([leaves[i] is not leaves[first] for i, first in self.aliases]):
            return None
        shapes = self.shapes_after(lead)
        # One comparison in C for plain tensors, for speed; dynamo traces the loop.
        if compiling or not PLAIN.issuperset(map(type, leaves)) or list(map(_SHAPE, leaves)) != shapes:
            for path, leaf, shape in zip(self.paths, leaves, shapes, strict=True):
                if not isinstance(leaf, Tensor) or leaf.shape != shape:
                    raise shape_error(path, leaf, shape, is_buffer=path in self.buffers)
        if not compiling:
            object.__setattr__(tree, "_bound", _Checked(self, lead, leaves))
        return leaves

    def rebuild(self, tree: Any, leaves: list[Any]) -> Any:
        """Return a tree that fits, around new leaves in the order of `paths`; None if its keys are others."""
        bound = None
        if not is_compiling():
            bound = getattr(tree, "_bound", None)
        was_checked = bound is not None and bound.plan is self
        if not was_checked and self.read(tree) is None:
            return None
        nodes = [tree]
        for parent, key in self._nodes:
            nodes.append(nodes[parent]._data[key])
        data = [dict(node._data) for node in nodes]
        for (number, key), leaf in zip(self._places, leaves, strict=True):
            data[number][key] = leaf
        # Children before parents, the root last.
        new = None
        for number in range(len(nodes) - 1, -1, -1):
            node = nodes[number]
            new = node._make(data[number], node._batch_size, node._device, node._names, node._static)
            if number > 0:
                # The root has no entry among the nodes.
                parent, key = self._nodes[number - 1]
                data[parent][key] = new
        return new


class _Checked:
    """Kept by a tree: the plan that it fits, and its leaves in the order of that plan."""

    __slots__ = ("lead", "leaves", "plan")

    def __init__(self, plan: Plan, lead: Size, leaves: list[Any]) -> None:
        self.plan = plan
        self.lead = lead
        self.leaves = leaves


class Spec:
    """The leaves of a module: the plans of its parameters, of the rest and of both in one tree, and their common order.

    The order has the parameters first, then the buffers.
    """

    def __init__(
        self,
        name: str,
        params: TensorCollection,
        rest: TensorCollection,
        whole: TensorCollection,
        frozen: Set[Path] = frozenset(),
    ) -> None:
        self.name = name
        # The paths of parameters that the module does not train.
        self.frozen: Set[Path] = frozen
        self.params: Plan = Plan(params)
        self.buffers: Plan = Plan(rest)
        self.whole: Plan = Plan(whole)
        self.first: dict[Path, Path] = dict(zip(self.whole.paths, self.whole.first, strict=True))
        self.order: dict[Path, int] = {path: i for i, path in enumerate([*self.params.paths, *self.buffers.paths])}
        self.n_params: int = len(self.params.paths)
        place_in_whole = {path: i for i, path in enumerate(self.whole.paths)}
        self._from_whole = [place_in_whole[path] for path in self.order]
        # For each buffer, where the leaf of its first path is.
        self.buffer_places: list[int] = [self.order[self.first[path]] for path in self.buffers.paths]

    def leaves(self, params: Any, buffers: Any, lead: Size = EMPTY, shared: Set[Path] = frozenset()) -> list[Any]:
        """Return the leaves in order; stacked trees have `lead` before each shape, except at the `shared` paths.

        Raises:
            TypeError: `params` or `buffers` is another object than a tree.
            TreeStructureError: A leaf is missing, unknown, or in both trees.
            LeafMismatchError: A leaf has another shape.
            TieError: Two paths of one tensor of the module have different leaves.
        """
        if not isinstance(params, TensorCollection) or not (buffers is None or isinstance(buffers, TensorCollection)):
            raise _not_trees_error(params, buffers)
        if shared:
            return self._by_path(params, buffers, lead, shared)
        first = self.params.checked(params, lead)
        if first is not None and (buffers is not None or not self.buffers.paths):
            second = []
            if buffers is not None:
                second = self.buffers.checked(buffers, lead)
            if second is not None:
                return first + second
        elif first is None and buffers is None:
            both = self.whole.checked(params, lead)
            if both is not None:
                return [both[i] for i in self._from_whole]
        return self._by_path(params, buffers, lead, shared)

    def _by_path(self, params: Any, buffers: Any, lead: Size, shared: Set[Path]) -> list[Any]:
        """Read trees in another arrangement, or raise the error that names the leaf which does not fit."""
        found = self._collect(params, buffers)
        self._fill_ties(found)
        missing = [path for path in self.order if path not in found]
        unknown = [path for path in found if path not in self.order]
        if missing or unknown:
            raise self._structure_error(missing, unknown, buffers)
        self._check_shapes(found, lead, shared)
        self._check_ties(found)
        return [found[path] for path in self.order]

    def _collect(self, params: TensorCollection, buffers: TensorCollection | None) -> dict[Path, Any]:
        """Return the leaves of both trees by their paths."""
        found: dict[Path, Any] = {}
        for entry in entries(params):
            for path in entry.paths:
                found[path] = entry.leaf
        if buffers is None:
            return found
        for entry in entries(buffers):
            for path in entry.paths:
                if found.setdefault(path, entry.leaf) is not entry.leaf:
                    raise TreeStructureError(
                        f"apply: {dotted(path)!r} is in params and in buffers.",
                        expected="every leaf in one of the trees",
                        got="two different leaves",
                        hint="split(tree) gives parameters and buffers without an overlap.",
                    )
                is_parameter = path in self.order and self.order[path] < self.n_params
                if is_parameter:
                    raise TreeStructureError(
                        f"apply: the parameter {dotted(path)!r} is in buffers.",
                        expected="parameters in the first tree, which may also hold the buffers",
                        hint="are the two trees swapped? apply(params, x, buffers=buffers).",
                    )
        return found

    def _fill_ties(self, found: dict[Path, Any]) -> None:
        """Give the leaf of a tied weight to all its paths: files often keep one name of it."""
        leaf_of_first = {self.first[path]: leaf for path, leaf in found.items() if path in self.first}
        for path, first in self.first.items():
            if path not in found and first in leaf_of_first:
                found[path] = leaf_of_first[first]

    def _structure_error(self, missing: list[Path], unknown: list[Path], buffers: Any) -> TreeStructureError:
        """Return the error for trees without some leaves of the module, or with others."""
        n_leaves = len(self.order)
        expected = f"{n_leaves} leaves"
        if missing:
            fault = f"{dotted(missing[0])!r} is missing"
            expected += f", also {_names(missing)}"
        else:
            fault = f"{dotted(unknown[0])!r} is not one of its leaves"
        got = f"{n_leaves - len(missing)} of them"
        if unknown:
            got = f"unknown leaves {_names(unknown)}"
        hint = None
        if set(map(dotted, missing)) & set(map(dotted, unknown)):
            hint = FLAT
        elif missing and buffers is None and set(missing) <= set(self.buffers.paths):
            hint = "pass buffers=buffers; buffers are never taken from the module silently."
        elif missing and unknown:
            hint = "does the tree belong to another module, or is it a sub-tree?"
        return TreeStructureError(
            f"apply: the trees do not fit {self.name}: {fault}.", expected=expected, got=got, hint=hint
        )

    def _check_shapes(self, found: dict[Path, Any], lead: Size, shared: Set[Path]) -> None:
        stacked_shapes = self.whole.shapes_after(lead)
        for path, plain, stacked in zip(self.whole.paths, self.whole.shapes, stacked_shapes, strict=True):
            leaf = found[path]
            shape = plain if path in shared else stacked
            if not isinstance(leaf, Tensor) or leaf.shape != shape:
                raise shape_error(path, leaf, shape, is_buffer=path in self.whole.buffers)

    def _check_ties(self, found: dict[Path, Any]) -> None:
        for path, first in self.first.items():
            if path != first and not is_one_tensor(found[path], found[first]):
                raise tie_error("apply", first, path)

    def rebuild_buffers(self, params: Any, buffers: Any, leaves: list[Any]) -> Any:
        """Return the tree that held the buffers, around new ones in plan order."""
        if buffers is not None:
            new = self.buffers.rebuild(buffers, leaves)
            if new is not None:
                return new
        tree = params if buffers is None else buffers
        given = {path for path, _ in iter_items(tree, True, True)}
        named = zip(self.buffers.paths, leaves, strict=True)
        return replace(tree, {path: leaf for path, leaf in named if path in given})


def extra_values(*trees: Any) -> dict[Path, list[Any]]:
    """Return, for each extra state in the trees, its values: one, or one for each member of a stacked tree."""
    values: dict[Path, list[Any]] = {}
    for tree in trees:
        if not isinstance(tree, TensorCollection):
            continue
        for path, node in iter_items(tree, True, True):
            if path[-1] == EXTRA_STATE and isinstance(node, NonTensorBase):
                values[path] = list(node._array.flat)
    return values


def _names(paths: list[Path]) -> str:
    names = str([dotted(path) for path in paths[:10]])
    if len(paths) > 10:
        return f"{names} and {len(paths) - 10} more"
    return names


def _not_trees_error(params: Any, buffers: Any) -> TypeError:
    name = "params"
    wrong = params
    if isinstance(params, TensorCollection):
        name = "buffers"
        wrong = buffers
    hint = "apply(params, x, ..., buffers=buffers)."
    if isinstance(wrong, Mapping):
        hint = 'TensorDict(d) makes a tree of a nested dict, TensorDict(d).unflatten_keys(".") of a state dict.'
    return error(
        TypeError,
        f"apply: {name} is not a tree.",
        expected="TensorDict",
        got=type(wrong).__name__,
        hint=hint,
    )


def tie_error(call: str, first: Path, path: Path) -> TieError:
    """Return the error for two leaves at paths that are one tensor in the module."""
    return TieError(
        f"{call}: {dotted(first)!r} and {dotted(path)!r} are one tensor in the module.",
        expected="one leaf for both",
        got="two tensors that differ, or whose gradients would be split",
        hint="edit a tree that records the tie, as from_module returns it: set() there writes both paths.",
    )


def shape_error(path: Path, leaf: Any, shape: Size, *, is_buffer: bool) -> LeafMismatchError:
    """Return the error for a leaf that does not fit the module."""
    got = type(leaf).__name__
    hint = "the tree belongs to another architecture."
    if isinstance(leaf, Tensor):
        got = f"shape {tuple(leaf.shape)}"
        if leaf.shape[1:] == shape:
            hint = "the tree is stacked: use tdfunc.Ensemble(apply)(tree, x), torch.vmap, or one member, tree[i]."
        elif leaf.shape == shape[1:]:
            hint = "the tree has one member: an Ensemble of E members takes tree.expand(E), buffers as well."
        elif is_buffer and leaf.dim() == len(shape):
            hint = (
                "a buffer keeps its shape from call to call. If forward makes it larger, register it in its full size "
                "and write into a part; otherwise the tree belongs to another architecture."
            )
    return LeafMismatchError(
        f"apply: leaf {dotted(path)!r} does not fit the module.",
        expected=f"shape {tuple(shape)}",
        got=got,
        hint=hint,
    )
