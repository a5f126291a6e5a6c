"""The plan of a merge: for each leaf of the result its leaves in the models, the weights and the options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tdfunc.cli.merging.config import Config, Settings, Slice, setting, spellings
from tdfunc.cli.merging.layers import Taken
from tdfunc.cli.merging.schema import typed
from tdfunc.cli.output import note, safe, shown
from tdfunc.cli.sources import Source, Stored, stored_leaves
from tdfunc.core.collection import LeafOp, TensorCollection
from tdfunc.core.errors import TieError, TreeStructureError, UnsupportedError, error
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.ops.base.reading import has
from tdfunc.ops.display.text import count_text
from tdfunc.storage.tree.build import without_values
from tdfunc.weights.swaps.stack_layers import find_layers, node_at, stack_layers, with_node


class Part(NamedTuple):
    """A leaf of a model."""

    model: str
    stored: Stored


@dataclass(frozen=True)
class Row:
    """A leaf of the result: the leaves of the models, the weights and the options for it."""

    path: Path
    base: Part | None
    parts: Sequence[Part]
    weights: Sequence[float]
    # Any: the options of a method.
    options: Mapping[str, Any]
    has_layer: bool

    @property
    def every(self) -> list[Part]:
        """All leaves that are read."""
        if self.base is None or self.base in self.parts:
            return [*self.parts]
        return [self.base, *self.parts]


class Place(NamedTuple):
    """The place of a leaf: its slice, the number of its layer there, its depth in [0, 1], the node of the layers."""

    slice: Slice
    offset: int | None
    depth: float
    where: Path


class Recipe(NamedTuple):
    """The result without values, its rows by the `id` of the leaf, and the layers that are taken, by their path."""

    tree: TensorCollection
    rows: dict[int, Row]
    layers: Mapping[Path, Sequence[Taken]]


class Models:
    """The open models, by path."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = sources
        self.leaves: dict[str, dict[Path, Stored]] = {
            name: {path: one for one in stored_leaves(source.tree) for path in one.paths}
            for name, source in sources.items()
        }

    def part(self, model: str, path: Path) -> Part:
        """Return a leaf of a model."""
        if path not in self.leaves[model]:
            raise TreeStructureError(
                f"merge: {safe(model)} must have the leaf {shown(path)}.", hint="merge models of one architecture."
            )
        return Part(model, self.leaves[model][path])


class Form(NamedTuple):
    """A module of the result: the tree with its layers, the path of the layers, and each layer's place."""

    tree: TensorCollection
    where: Path | None
    order: Sequence[Place]
    layers: Sequence[Taken]


def plan(config: Config, models: Models) -> Recipe:
    """Return the plan of the result."""
    origin = config.models[0]
    tree = models.sources[origin].tree
    placed: dict[Path, tuple[str, Place]] = {}
    layers: dict[Path, Sequence[Taken]] = {}
    for name, slices in config.modules.items():
        at = ()
        if name and name != "default":
            at = tuple(name.split("."))
        if at and not has(tree, at):
            what = f"merge: {safe(origin)} must have the module {safe(name)[:80]!r}."
            raise error(ValueError, what, got=", ".join(tree._data))
        own = [path for path in models.leaves[origin] if path[: len(at)] == at]
        form = _form_of(slices, tree, models, at, find_layers(own))
        tree = form.tree
        where = form.where
        if where is not None and form.layers:
            layers[where] = form.layers
        before = _before(slices, models.sources[origin], own, where)
        for path in (path for one in stored_leaves(tree) for path in one.paths if path[: len(at)] == at):
            if where is not None and path[: len(where)] == where:
                placed[path] = name, form.order[int(path[len(where)])]
            else:
                placed[path] = name, Place(slices[0] if path in before else slices[-1], None, 0.0, ())
    # Each place gets its own tensor, which identifies the row.
    tree = tree._map(LeafOp("merge", lambda leaf: without_values(leaf, leaf.dtype)))
    rows: dict[int, Row] = {}
    for one in stored_leaves(tree):
        path = next((path for path in one.paths if path in placed), None)
        if path is None:
            known = ", ".join(config.modules)
            raise UnsupportedError(f"merge: the leaf {shown(one.path)} must be in one of the modules.", expected=known)
        rows[id(one.leaf)] = _row(config, models, path, *placed[path])
    return Recipe(tree, rows, layers)


def _form_of(slices: Sequence[Slice], tree: TensorCollection, models: Models, at: Path, where: Path | None) -> Form:
    """Return the form of the module at a path, whose layers are at `where`."""
    origin = next(iter(models.sources))
    layers: list[Taken] = []
    if slices[0].inputs[0].layers is not None:
        if where is None:
            what = "merge: slices require one node of layers, with the keys 0, 1, 2, ..."
            raise error(ValueError, what, hint="modules: {path: {slices: ...}} names a part with one.")
        ranges = [one.inputs[0].layers or range(0) for one in slices]
        firsts = [one.inputs[0].model for one in slices]
        taken = [(models.sources[model].tree, numbers) for model, numbers in zip(firsts, ranges, strict=True)]
        tree = with_node(tree, where, node_at(stack_layers([(tree, ()), *taken], at=where), where))
        for model, numbers in zip(firsts, ranges, strict=True):
            layers += [Taken(model, number) for number in numbers]
    else:
        ranges = [range(len(node_at(tree, where)._data) if where is not None else 0)]
    if layers and where is not None:
        for one in slices:
            _check_layers(models, one, where)
    for model in dict.fromkeys(each.model for one in slices for each in one.inputs):
        if model != origin and not layers:
            _check_same(models, origin, model, at, where)
        if model != origin:
            _check_heads(models, origin, model, at, where)
    order = [
        Place(one, i, i / (len(numbers) - 1) if len(numbers) > 1 else 1.0, where or ())
        for one, numbers in zip(slices, ranges, strict=True)
        for i in range(len(numbers))
    ]
    return Form(tree, where, order, layers)


def _check_same(models: Models, origin: str, model: str, at: Path, where: Path | None) -> None:
    """Raise if a model has more layers than the first, or other ties; note its leaves that the first does not have."""
    ours = models.leaves[origin]
    theirs = models.leaves[model]
    others = [path for path in theirs if path[: len(at)] == at and path not in ours]
    if where is not None and (layers := [path for path in others if path[: len(where)] == where]):
        what = f"merge: {safe(model)} must have the layers of {safe(origin)}."
        raise TreeStructureError(what, got=f"{shown(layers[0])} and more", hint="slices choose layers.")
    untied = [path for path, one in ours.items() if theirs.get(path) is not theirs.get(one.path)]
    if untied:
        what = f"merge: {shown(untied[0])} must be tied in {safe(model)} as in {safe(origin)}."
        raise TieError(what, hint="its values would be lost: take a base that does not tie them.")
    if others:
        note(f"{safe(model)}: {count_text(len(others), 'leaf')} not in {safe(origin)} left out: {shown(others[0])}")


def _check_layers(models: Models, chosen: Slice, where: Path) -> None:
    """Raise if a layer of a slice has a leaf that the layer of its first model, which gives the form, does not have."""
    first = chosen.inputs[0]
    others = [(each.model, each.layers) for each in chosen.inputs[1:]]
    if chosen.base is not None:
        others.append((chosen.base, first.layers))
    for model, numbers in others:
        for number, own in zip(numbers or (), first.layers or (), strict=True):
            known = _leaves_of_layer(models, first.model, (*where, str(own)))
            added = [rest for rest in _leaves_of_layer(models, model, (*where, str(number))) if rest not in known]
            if added:
                raise TreeStructureError(
                    f"merge: the layer {number} of {safe(model)} must have the leaves of the layer {own} of "
                    f"{safe(first.model)}.",
                    got=f"{shown(added[0])}, which would be lost",
                    hint="merge models of one architecture.",
                )


def _leaves_of_layer(models: Models, model: str, at: Path) -> dict[Path, None]:
    """Return the paths of the leaves of a layer, below it."""
    return {path[len(at) :]: None for path in models.leaves[model] if path[: len(at)] == at}


def _check_heads(models: Models, origin: str, model: str, at: Path, where: Path | None) -> None:
    """Raise if a model has a leaf that the first model may tie, with values that would be lost.

    A tied output layer is in no file. In another model its leaf has the shape of the embedding.
    """

    def is_beside(path: Path) -> bool:
        return path[: len(at)] == at and (where is None or path[: len(where)] != where)

    ours = models.leaves[origin]
    theirs = {path: one for path, one in models.leaves[model].items() if is_beside(path) and one.leaf.dim() > 1}
    known = [one for path, one in theirs.items() if path in ours]
    for path, one in theirs.items():
        twins = [other for other in known if other.leaf.shape == one.leaf.shape]
        is_lost = path not in ours and not any(_is_equal(models.sources[model], one, other) for other in twins)
        if twins and is_lost:
            raise TieError(
                f"merge: {safe(model)} has {shown(path)}, which {safe(origin)} ties to another leaf or does not have.",
                expected=f"the values of {shown(twins[0].path)}, or the leaf in {safe(origin)}",
                got="other values, which would be lost",
                hint="write the first model with this leaf by itself; or leave it out: tdfunc extract --exclude.",
            )


def _is_equal(source: Source, a: Stored, b: Stored) -> bool:
    if a.leaf is b.leaf:
        return True
    pairs = zip(source.pieces(a.leaf), source.pieces(b.leaf), strict=True)
    return a.leaf.dtype == b.leaf.dtype and all(torch.equal(x, y) for x, y in pairs)


def _before(slices: Sequence[Slice], source: Source, paths: Sequence[Path], where: Path | None) -> set[Path]:
    """Return the leaves before the layers, which belong to the first slice; all others belong to the last."""
    first, last = (
        ([(each.model, each.parameters) for each in one.inputs], one.base, one.parameters)
        for one in (slices[0], slices[-1])
    )
    if where is None or first == last:
        return set(paths)
    if source.is_described:
        names = list(paths)
    else:
        names = _module_order(source)
    if missing := [path for path in paths if path not in names]:
        raise UnsupportedError(
            f"merge: {safe(source.path)} does not have the order of {shown(missing[0])} and the layers.",
            hint="give the first and the last slice the same models.",
        )
    return set(names[: next(i for i, path in enumerate(names) if path[: len(where)] == where)])


def _module_order(source: Source) -> list[Path]:
    """Return the parameters of a model of transformers in the order of its modules; an empty list without one."""
    try:
        import transformers

        # Any: without stubs.
        found: Any = transformers
        config = found.AutoConfig.from_pretrained(source.path, local_files_only=True)
        with torch.device("meta"):
            model = getattr(found, config.architectures[0])(config)
        return [tuple(name.split(".")) for name, _ in model.named_parameters(remove_duplicate=False)]
    # Any error: without the order the caller raises.
    except Exception:
        return []


def _row(config: Config, models: Models, path: Path, module: str, place: Place) -> Row:
    method = config.method
    chosen = place.slice
    shared = (chosen.parameters, config.module_parameters.get(module, {}), config.parameters)

    def leaf(model: str, layers: range | None) -> Part:
        if place.offset is None or layers is None:
            return models.part(model, path)
        rest = path[len(place.where) + 1 :]
        return models.part(model, (*place.where, str(layers[place.offset]), *rest))

    pairs = [(each.parameters, leaf(each.model, each.layers)) for each in chosen.inputs]
    base = next((part for _, part in pairs if part.model == chosen.base), None)
    if chosen.base is not None and base is None:
        base = leaf(chosen.base, chosen.inputs[0].layers)
    if method.base != "unused":
        pairs = [(own, part) for own, part in pairs if part.model != chosen.base]
    method.check(base is not None, len(pairs))

    def value(names: Sequence[str], at: str, sources: Sequence[Settings], default: Any) -> Any:
        for settings in sources:
            for name in names:
                found = None
                if name in settings:
                    found = setting(settings[name], at, place.depth)
                if found is not None:
                    return found
        return default

    def for_each(names: Sequence[str], default: Any) -> list[Any]:
        return [value(names, dotted(part.stored.path), (own, *shared), default) for own, part in pairs]

    weights = for_each([method.weight or "weight"], None if method.weight in ("weight", "t") else 1.0)
    if None in weights:
        where = f"{safe(pairs[weights.index(None)][1].model)}, leaf {shown(path)}"
        raise error(ValueError, f"merge: {method.name} requires the parameter {method.weight} for {where}.")
    options: dict[str, Any] = {}
    for option, default in method.options.items():
        names = spellings(method, option)
        named = f"the parameter {option}"
        if option in method.per_model:
            options[option] = [typed(one, default, named) for one in for_each(names, default)]
        else:
            options[option] = typed(value(names, dotted(path), shared, default), default, named)
    return Row(path, base, [part for _, part in pairs], weights, options, place.offset is not None)
