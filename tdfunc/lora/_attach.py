"""A module with adapters as a pure function: the skeleton's layers get classes that have the factors."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor, nn

from tdfunc.core.errors import UnsupportedError, error
from tdfunc.core.keys import Entry, dotted
from tdfunc.core.shapes import EMPTY
from tdfunc.core.types import Path
from tdfunc.lora.choice import Choice
from tdfunc.lora.experts import experts_class
from tdfunc.lora.layers import Adapted, Setting, layer_class
from tdfunc.lora.targets import (
    Table,
    Target,
    check_leaves,
    find_tables,
    find_targets,
    layouts_of,
    make_tree,
    parts_of,
)
from tdfunc.modules.extract import from_module
from tdfunc.modules.functional import Apply, make_apply
from tdfunc.modules.plan import Plan
from tdfunc.modules.poison import Poison
from tdfunc.modules.random import seeded
from tdfunc.modules.skeletons.copies import duplicate
from tdfunc.ops.base.reading import entries
from tdfunc.random.draws import KeyLike, key_of


class _Replaced(NamedTuple):
    """The places of a leaf of the module, and the place of the leaf, or of the rows, that replace it."""

    places: list[int]
    by: int


class _Slots(NamedTuple):
    """The slots of adapters in a copy of a module.

    Attributes:
        leaves: The slots by the paths of the adapters' leaves.
        leaf_paths: The path of the adapter's leaf for each slot of a layer.
    """

    leaves: dict[Path, Tensor]
    leaf_paths: dict[Path, Path]


class LoraApply:
    """A module with adapters as a pure function: `run((params, adapters), *inputs, buffers=, rng=)`.

    `Lora.attach` returns it. The layers compute with the factors, so that under `vmap` over only the adapters no tensor
    has the size of all their weights. Otherwise it is called like `Apply`.
    """

    def __init__(self, lora: Choice, apply: Apply, rows: bool) -> None:
        self._lora = lora
        self._base = apply
        self._rows = rows
        template = duplicate(apply.module, {})
        targets, whole = find_targets(lora, entries(from_module(template)), layouts_of(template))
        slots = _adapt(template, targets, lora, rows)
        tables = find_tables(lora, entries(from_module(template)))
        if rows:
            _check_rows(whole, tables)
        whole_leaves = {entry.paths[0]: entry.leaf for entry in whole}
        row_slots = {table.key: _poison(table.shape, table.leaf.dtype, table.key) for table in tables}
        self._plan = Plan(make_tree(slots.leaves | whole_leaves | row_slots))
        # The places of all leaves: of the module, and then of the adapters.
        base_places = {path: place for place, path in enumerate(apply.paths)}
        places = dict(base_places)
        places |= {path: place for place, path in enumerate(self._plan.paths, len(base_places))}
        self._whole = [
            _Replaced([base_places[path] for path in entry.paths], by=places[entry.paths[0]]) for entry in whole
        ]
        self._tables = [
            (table, _Replaced([base_places[path] for path in table.paths], by=places[table.key])) for table in tables
        ]
        self._inner, _, _ = make_apply(template, from_module(template), originals=apply._originals)
        # The places of the inner function's leaves, in its order.
        self._order = [places[slots.leaf_paths.get(path, path)] for path in self._inner.paths]

    def __reduce__(self) -> Any:
        return LoraApply, (self._lora, self._base, self._rows)

    def __repr__(self) -> str:
        rows = ", rows" if self._rows else ""
        return f"LoraApply({self._base!r}, {len(self._plan.paths)} adapter leaves{rows})"

    @property
    def module(self) -> nn.Module:
        """The structure of the base, like `Apply.module`."""
        return self._base.module

    @property
    def training(self) -> bool:
        """The mode of the module's root."""
        return self._base.training

    def train(self, mode: bool = True) -> "LoraApply":
        """Return the function with every submodule in training mode (or in evaluation mode)."""
        return LoraApply(self._lora, self._base.train(mode), self._rows)

    def eval(self) -> "LoraApply":
        """Return the function with every submodule in evaluation mode."""
        return self.train(False)

    def __call__(
        self, trees: tuple[Any, Any], /, *args: Any, buffers: Any = None, rng: KeyLike | None = None, **kwargs: Any
    ) -> Any:
        """Run the module's forward with these parameters and adapters, and return its output.

        Args:
            trees: The parameters of the base, and the adapters.
            *args: Arguments of forward.
            buffers: The tree of buffers, unless the parameters contain them.
            rng: A random key, a seed or a generator, as for `Apply`.
            **kwargs: Keyword arguments of forward.

        Raises:
            TreeStructureError: A tree has missing or unknown leaves.
            LeafMismatchError: A leaf has the wrong shape, or with `rows` the input does not have the adapters' rows.
            LeakError: Forward reads a weight without its adapter.
        """
        if self._base._reserved:
            raise self._base._name_error(self._base._reserved)
        return self._run(trees, buffers, args, kwargs, rng, keep=False)[0]

    def call(
        self,
        trees: tuple[Any, Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        buffers: Any = None,
        rng: KeyLike | None = None,
    ) -> Any:
        """Run with forward's arguments as a tuple and a dict, like `Apply.call`."""
        return self._run(trees, buffers, tuple(args), dict(kwargs or {}), rng, keep=False)[0]

    def has_adapter(self, path: Path) -> bool:
        """Return whether the layer at a path has an adapter."""
        return isinstance(self._inner.module.get_submodule(dotted(path)), Adapted)

    def with_buffers(
        self, trees: tuple[Any, Any], buffers: Any, /, *args: Any, rng: KeyLike | None = None, **kwargs: Any
    ) -> Any:
        """Return forward's output and the new buffers, like `Apply.with_buffers`."""
        if "rng" in self._base._reserved:
            raise self._base._name_error(["rng"])
        out, new = self._run(trees, buffers, args, kwargs, rng, keep=True)
        return out, self._base.rebuild_buffers(trees[0], buffers, new)

    def _run(self, trees: Any, buffers: Any, args: Any, kwargs: Any, rng: KeyLike | None, *, keep: bool) -> Any:
        if not isinstance(trees, tuple) or len(trees) != 2:
            raise error(
                TypeError,
                "lora: the first argument is not a pair of the parameters and the adapters.",
                expected="run((params, adapters), x)",
                got=type(trees).__name__,
            )
        params, adapters = trees
        leaves = self._base.leaves(params, buffers) + self._adapter_leaves(adapters)
        for replaced in self._whole:
            for place in replaced.places:
                leaves[place] = leaves[replaced.by]
        for table, replaced in self._tables:
            changed = table.with_rows(leaves[replaced.places[0]], leaves[replaced.by])
            for place in replaced.places:
                leaves[place] = changed
        mode = None
        if rng is not None:
            mode = seeded(key_of(rng), strict=True)
        return self._inner.run_leaves([leaves[i] for i in self._order], args, kwargs, mode, keep=keep)

    def _adapter_leaves(self, adapters: Any) -> list[Any]:
        lead = EMPTY
        if self._rows:
            lead = next((Size(leaf.shape[:1]) for leaf in adapters.leaves()), EMPTY)
        leaves = self._plan.checked(adapters, lead)
        if leaves is None:
            check_leaves("lora", dict.fromkeys(self._plan.paths), adapters)
        assert leaves is not None
        return leaves


def _slot(shape: Size, target: Target, part: str) -> Poison:
    """Return the poison of a leaf of an adapter; its dtype is not checked."""
    return _poison(shape, target.leaf.dtype, (*target.path, part))


def _poison(shape: Size, dtype: torch.dtype, path: Path) -> Poison:
    empty = torch.empty(shape, dtype=dtype, device="meta")
    return Poison.of(nn.Parameter(empty, requires_grad=False), path)


def _adapt(template: nn.Module, targets: Sequence[Target], lora: Choice, rows: bool) -> _Slots:
    """Give the layers of our copy of a module the slots of their adapters."""
    found = _Slots({}, {})
    for target in targets:
        # Tied weights share an adapter: one object in the slots of all their layers.
        slots = {part: _slot(shape, target, part) for part, shape in parts_of(lora, target).items()}
        for part, slot in slots.items():
            found.leaves[(*target.path, part)] = slot
        for path in target.paths:
            setting = Setting(path, tuple(slots), target.scale, lora.dropout, rows)
            _adapt_layer(template.get_submodule(dotted(path[:-1])), target, setting, slots)
            for part in slots:
                found.leaf_paths[(*path[:-1], f"{path[-1]}:{part}")] = (*target.path, part)
    return found


def _check_rows(whole: Sequence[Entry], tables: Sequence[Table]) -> None:
    """Raise if an adapter for each row would need a leaf or a table for each row."""
    if whole:
        raise UnsupportedError(
            "attach: with rows=True no leaf can be trained whole.",
            got=f"{dotted(whole[0].paths[0])!r}, which is trained whole",
            hint="torch.vmap over rows runs a whole leaf for each.",
        )
    if tables:
        raise UnsupportedError(
            "attach: with rows=True no rows of a table can be trained.",
            got=f"rows of {dotted(tables[0].path)!r}",
            hint="torch.vmap over rows runs a table for each.",
        )


# Any: poison takes the place of a parameter.
def _adapt_layer(layer: nn.Module, target: Target, setting: Setting, slots: Mapping[str, Any]) -> None:
    """Give a layer of our copy of a module the slots of the adapter of one weight, and the class that uses them."""
    name = setting.path[-1]
    layer.__dict__.setdefault("_lora", {})[name] = setting
    for part, slot in slots.items():
        layer._parameters[f"{name}:{part}"] = slot
    # Experts have several weights.
    if isinstance(layer, Adapted):
        return
    make_class = experts_class if target.layout.is_experts else layer_class
    layer.__class__ = make_class(type(layer))
