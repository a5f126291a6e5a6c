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
from tdfunc.core.errors import TieError, TreeStructureError, UnsupportedError, brief, error
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.ops.base.reading import has
from tdfunc.ops.display.text import count_text
from tdfunc.storage.tree.build import without_values
from tdfunc.weights.method import Method
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
    """The open models, by path; the first gives the result its form."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = sources
        self.origin: str = next(iter(sources))
        self.leaves: dict[str, dict[Path, Stored]] = {name: _by_path(source) for name, source in sources.items()}

    def part(self, model: str, path: Path) -> Part:
        """Return a leaf of a model."""
        if path not in self.leaves[model]:
            raise TreeStructureError(
                f"merge: {safe(model)} does not have the leaf {shown(path)}.", hint="merge models of one architecture."
            )
        return Part(model, self.leaves[model][path])

    def paths_below(self, model: str, at: Path) -> list[Path]:
        """Return the paths of the leaves of a sub-tree of a model."""
        return [path for path in self.leaves[model] if _is_below(path, at)]


def _by_path(source: Source) -> dict[Path, Stored]:
    leaves: dict[Path, Stored] = {}
    for one in stored_leaves(source.tree):
        leaves |= dict.fromkeys(one.paths, one)
    return leaves


def _is_below(path: Path, at: Path) -> bool:
    return path[: len(at)] == at


class Form(NamedTuple):
    """A module of the result, and the place of each of its layers.

    Attributes:
        tree: The tree of the whole result, with the layers of the module.
        at: The path of the module.
        where: The path of its layers; None if it has none.
        order: The place of each layer.
        layers: The models and numbers of the layers, if the configuration chooses them.
    """

    tree: TensorCollection
    at: Path
    where: Path | None
    order: Sequence[Place]
    layers: Sequence[Taken]


def plan(config: Config, models: Models) -> Recipe:
    """Return the plan of the result."""
    tree = models.sources[models.origin].tree
    placed: dict[Path, tuple[str, Place]] = {}
    layers: dict[Path, Sequence[Taken]] = {}
    for name, slices in config.modules.items():
        form = _form_of(name, slices, tree, models)
        tree = form.tree
        if form.where is not None and form.layers:
            layers[form.where] = form.layers
        for path, place in _places(form, slices, models).items():
            placed[path] = name, place
    # Each place gets its own tensor, which identifies the row.
    tree = tree._map(LeafOp("merge", lambda leaf: without_values(leaf, leaf.dtype)))
    rows: dict[int, Row] = {}
    for one in stored_leaves(tree):
        path = next((path for path in one.paths if path in placed), None)
        if path is None:
            known = ", ".join(config.modules)
            raise UnsupportedError(f"merge: the leaf {shown(one.path)} is in none of the modules.", expected=known)
        rows[id(one.leaf)] = _row(config, models, path, *placed[path])
    return Recipe(tree, rows, layers)


def _form_of(name: str, slices: Sequence[Slice], tree: TensorCollection, models: Models) -> Form:
    """Return the form of a module: the layers of its slices, or its own layers if the slices choose none."""
    at = _module_path(name, tree, models.origin)
    where = find_layers(models.paths_below(models.origin, at))
    layers: list[Taken] = []
    if slices[0].inputs[0].layers is not None:
        if where is None:
            what = "merge: slices require one node of layers, with the keys 0, 1, 2, ..."
            raise error(ValueError, what, hint="modules: {path: {slices: ...}} names a part with one.")
        tree = _with_layers(tree, where, slices, models)
        for one in slices:
            layers += [Taken(one.inputs[0].model, number) for number in one.inputs[0].layers or ()]
            _check_layers(models, one, where)
    for model in _other_models(slices, models.origin):
        if not layers:
            _check_same(models, model, at, where)
        _check_heads(models, model, at, where)
    order: list[Place] = []
    if where is not None:
        own_layers = range(len(node_at(tree, where)._data))
        for one in slices:
            order += _places_of_layers(one, one.inputs[0].layers or own_layers, where)
    return Form(tree, at, where, order, layers)


def _module_path(name: str, tree: TensorCollection, origin: str) -> Path:
    """Return the path of a module; raise unless the first model has it."""
    if name in ("", "default"):
        return ()
    at = tuple(name.split("."))
    if not has(tree, at):
        what = f"merge: {safe(origin)} does not have the module {safe(name)[:80]!r}."
        raise error(ValueError, what, got=brief([*tree._data]))
    return at


def _with_layers(tree: TensorCollection, where: Path, slices: Sequence[Slice], models: Models) -> TensorCollection:
    """Return a tree with the layers of the slices in place of its layers, each with the form of its first model."""
    taken: list[tuple[TensorCollection, Sequence[int]]] = [(tree, ())]
    for one in slices:
        first = one.inputs[0]
        taken.append((models.sources[first.model].tree, first.layers or ()))
    stacked = stack_layers(taken, at=where)
    return with_node(tree, where, node_at(stacked, where))


def _other_models(slices: Sequence[Slice], origin: str) -> list[str]:
    """Return the models of slices except the first model of the merge, in order."""
    models: dict[str, None] = {}
    for one in slices:
        models |= {each.model: None for each in one.inputs if each.model != origin}
    return list(models)


def _places_of_layers(one: Slice, numbers: range, where: Path) -> list[Place]:
    """Return the places of the layers of a slice: the first has the depth 0, the last the depth 1."""
    last = len(numbers) - 1
    if last == 0:
        return [Place(one, 0, 1.0, where)]
    return [Place(one, i, i / last, where) for i in range(len(numbers))]


def _places(form: Form, slices: Sequence[Slice], models: Models) -> dict[Path, Place]:
    """Return the place of each leaf of a module."""
    source = models.sources[models.origin]
    before = _before(slices, source, models.paths_below(models.origin, form.at), form.where)
    places: dict[Path, Place] = {}
    for one in stored_leaves(form.tree):
        for path in one.paths:
            if not _is_below(path, form.at):
                continue
            if form.where is not None and _is_below(path, form.where):
                places[path] = form.order[int(path[len(form.where)])]
            else:
                chosen = slices[0] if path in before else slices[-1]
                places[path] = Place(chosen, None, 0.0, ())
    return places


def _check_same(models: Models, model: str, at: Path, where: Path | None) -> None:
    """Raise if a model has more layers than the first, or other ties; note its leaves that the first does not have."""
    origin = models.origin
    ours = models.leaves[origin]
    theirs = models.leaves[model]
    others = [path for path in models.paths_below(model, at) if path not in ours]
    layers: list[Path] = []
    if where is not None:
        layers = [path for path in others if _is_below(path, where)]
    if layers:
        what = f"merge: {safe(model)} has more layers than {safe(origin)}."
        raise TreeStructureError(what, got=f"{shown(layers[0])} and more", hint="slices choose layers.")
    untied = [path for path, one in ours.items() if theirs.get(path) is not theirs.get(one.path)]
    if untied:
        what = f"merge: {shown(untied[0])} is not tied in {safe(model)} as in {safe(origin)}."
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
            known = set(_leaves_of_layer(models, first.model, (*where, str(own))))
            added = [rest for rest in _leaves_of_layer(models, model, (*where, str(number))) if rest not in known]
            if added:
                raise TreeStructureError(
                    f"merge: layer {number} of {safe(model)} has leaves that layer {own} of {safe(first.model)} "
                    "does not have.",
                    got=f"{shown(added[0])}, which would be lost",
                    hint="merge models of one architecture.",
                )


def _leaves_of_layer(models: Models, model: str, at: Path) -> list[Path]:
    """Return the paths of the leaves of a layer, below it."""
    return [path[len(at) :] for path in models.paths_below(model, at)]


def _check_heads(models: Models, model: str, at: Path, where: Path | None) -> None:
    """Raise if a model has a leaf that the first model may tie, with values that would be lost.

    A tied output layer is in no file. In another model its leaf has the shape of the embedding.
    """
    source = models.sources[model]
    ours = models.leaves[models.origin]
    known: list[Stored] = []
    unknown: dict[Path, Stored] = {}
    for path in models.paths_below(model, at):
        one = models.leaves[model][path]
        is_in_layer = where is not None and _is_below(path, where)
        if is_in_layer or one.leaf.dim() < 2:
            continue
        if path in ours:
            known.append(one)
        else:
            unknown[path] = one
    for path, one in unknown.items():
        twins = [other for other in known if other.leaf.shape == one.leaf.shape]
        if twins and not any(_is_equal(source, one, twin) for twin in twins):
            origin = safe(models.origin)
            raise TieError(
                f"merge: {safe(model)} has {shown(path)}, which {origin} ties to another leaf or does not have.",
                expected=f"the values of {shown(twins[0].path)}, or the leaf in {origin}",
                got="other values, which would be lost",
                hint="write the first model with this leaf by itself; or leave it out: tdfunc extract --exclude.",
            )


def _is_equal(source: Source, a: Stored, b: Stored) -> bool:
    if a.leaf is b.leaf:
        return True
    if a.leaf.dtype != b.leaf.dtype:
        return False
    pairs = zip(source.pieces(a.leaf), source.pieces(b.leaf), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def _before(slices: Sequence[Slice], source: Source, paths: Sequence[Path], where: Path | None) -> set[Path]:
    """Return the leaves before the layers, which belong to the first slice; all others belong to the last."""
    if where is None or _without_layers(slices[0]) == _without_layers(slices[-1]):
        return set(paths)
    if source.is_described:
        order = list(paths)
    else:
        order = _module_order(source)
    missing = [path for path in paths if path not in order]
    if missing:
        raise UnsupportedError(
            f"merge: {safe(source.path)} does not have the order of {shown(missing[0])} and the layers.",
            hint="give the first and the last slice the same models.",
        )
    first_layer = next(i for i, path in enumerate(order) if _is_below(path, where))
    return set(order[:first_layer])


# Any: values of parameters.
def _without_layers(one: Slice) -> tuple[Any, ...]:
    """Return the parts of a slice that decide about leaves outside of layers."""
    return [(each.model, each.parameters) for each in one.inputs], one.base, one.parameters


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


@dataclass(frozen=True)
class _Parameters:
    """The parameters for a leaf of all models: of its slice, its module and the merge, of which the first counts."""

    shared: Sequence[Settings]
    depth: float

    # Any, here and below: a number, a bool, or whatever the default is.
    def find(self, names: Sequence[str], path: Path, default: Any, own: Settings | None = None) -> Any:
        """Return the value of a parameter for a leaf.

        Args:
            names: The spellings of the parameter.
            path: The path of the leaf, which filters read.
            default: The value if there is none.
            own: The parameters of one model, which come before the others.
        """
        for settings in (own or {}, *self.shared):
            for name in names:
                found = None
                if name in settings:
                    found = setting(settings[name], dotted(path), self.depth)
                if found is not None:
                    return found
        return default

    def find_each(self, names: Sequence[str], default: Any, inputs: Sequence[tuple[Settings, Part]]) -> list[Any]:
        """Return the value of a parameter for each model, whose own settings prevail."""
        return [self.find(names, part.stored.path, default, own) for own, part in inputs]


def _row(config: Config, models: Models, path: Path, module: str, place: Place) -> Row:
    """Return the row of a leaf of the result, at its first path in a module."""
    method = config.method
    chosen = place.slice
    inputs = [(each.parameters, _part_at(models, each.model, each.layers, path, place)) for each in chosen.inputs]
    base = None
    if chosen.base is not None:
        base = next((part for _, part in inputs if part.model == chosen.base), None)
        if base is None:
            base = _part_at(models, chosen.base, chosen.inputs[0].layers, path, place)
    if method.base != "unused":
        inputs = [(own, part) for own, part in inputs if part.model != chosen.base]
    method.check(base is not None, len(inputs))
    parameters = _Parameters(
        (chosen.parameters, config.module_parameters.get(module, {}), config.parameters), place.depth
    )
    default_weight = None if method.weight in ("weight", "t") else 1.0
    weights = parameters.find_each([method.weight or "weight"], default_weight, inputs)
    if None in weights:
        _, lacking = inputs[weights.index(None)]
        where = f"{safe(lacking.model)}, leaf {shown(path)}"
        raise error(ValueError, f"merge: {method.name} requires the parameter {method.weight} for {where}.")
    options = _options_of(method, parameters, path, inputs)
    return Row(path, base, [part for _, part in inputs], weights, options, place.offset is not None)


def _options_of(
    method: Method[...], parameters: _Parameters, path: Path, inputs: Sequence[tuple[Settings, Part]]
) -> dict[str, Any]:
    """Return the options of a method for a leaf, some of them a list with a value for each model."""
    options: dict[str, Any] = {}
    for option, default in method.options.items():
        names = spellings(method, option)
        described = f"the parameter {option}"
        if option in method.per_model:
            values = parameters.find_each(names, default, inputs)
            options[option] = [typed(value, default, described) for value in values]
        else:
            options[option] = typed(parameters.find(names, path, default), default, described)
    return options


def _part_at(models: Models, model: str, layers: range | None, path: Path, place: Place) -> Part:
    """Return the leaf of a model for a place: in a layer of a slice, the model's own layer there."""
    if place.offset is None or layers is None:
        return models.part(model, path)
    rest = path[len(place.where) + 1 :]
    return models.part(model, (*place.where, str(layers[place.offset]), *rest))
