"""A configuration file of mergekit as data: models, layers, a method and parameters."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tdfunc.cli.output import safe
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.weights.method import Method
from tdfunc.weights.methods import METHODS

# Any: numbers, bools, texts, lists of them, and lists of {filter, value}.
Settings = Mapping[str, Any]


class Input(NamedTuple):
    """A model of a slice: its path, the numbers of its layers (None for all), its own parameters."""

    model: str
    layers: range | None
    parameters: Settings


@dataclass(frozen=True)
class Slice:
    """Layers of the result, merged from the same number of layers of each input."""

    inputs: Sequence[Input]
    base: str | None
    parameters: Settings


@dataclass(frozen=True)
class Config:
    """A merge: one method, and for each module, a sub-tree of the model, the slices of its layers."""

    method: Method[...]
    base: str | None
    # By the dotted path of the module; "" for the whole model.
    modules: Mapping[str, Sequence[Slice]]
    module_parameters: Mapping[str, Settings]
    parameters: Settings
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer: str | None = None
    pad_to_multiple_of: int | None = None

    @property
    def models(self) -> list[str]:
        """The paths of all models; the first gives the result its form."""
        parts = [one for module in self.modules.values() for one in module]
        every = [self.base, *(path for one in parts for path in (one.base, *(each.model for each in one.inputs)))]
        return list(dict.fromkeys(path for path in every if path is not None))


def read_config(text: str) -> Config:
    """Read the YAML of a configuration.

    Raises:
        ValueError: The text is not a configuration, or names an unknown method.
        UnsupportedError: `merge` does not support an entry; the message names it.
    """
    try:
        import yaml
    except ImportError as err:
        raise error(ImportError, "merge --config needs pyyaml.", hint='pip install "tdfunc[cli]".') from err
    found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise error(ValueError, "merge: the configuration must be a mapping.", got=type(found).__name__)
    return make_config(found)


def from_options(
    name: str,
    paths: Sequence[str],
    base: str | None,
    weights: Sequence[float] | None,
    options: Sequence[str],
) -> Config:
    """Return the merge that the options of the command line describe.

    Raises:
        ValueError: The method is unknown, or there are not as many weights as models.
        UnsupportedError: The method does not have an option.
    """
    method = _method(name)
    factors = [1.0] * len(paths) if weights is None else list(weights)
    if not paths or len(factors) != len(paths):
        what = "merge: each model must have a --weight."
        raise error(ValueError, what, expected=f"{len(paths)} numbers", got=len(factors))
    settings: dict[str, Any] = {}
    for text in options:
        key, _, value = text.partition("=")
        try:
            settings[key] = json.loads(value)
        except ValueError as err:
            raise error(ValueError, "merge: --option must be NAME=VALUE.", expected="density=0.5", got=text) from err
    _check_parameters(method, [settings])
    inputs = [Input(path, None, {method.weight or "weight": w}) for path, w in zip(paths, factors, strict=True)]
    return Config(method, base, {"": [Slice(inputs, base, {})]}, {}, settings)


def _method(name: Any) -> Method[...]:
    if name not in METHODS:
        raise error(ValueError, "merge: the method must be known.", expected=", ".join(METHODS), got=repr(name))
    return METHODS[name]


def make_config(doc: Mapping[str, Any]) -> Config:
    """Return the merge that the entries of a configuration describe."""
    known = ("merge_method", "base_model", "models", "slices", "modules", "parameters", "dtype", "out_dtype")
    entries = _only("the configuration", doc, *known, "tokenizer", "tokenizer_source")
    kinds = [name for name in ("models", "slices", "modules") if entries.get(name)]
    if len(kinds) != 1:
        raise error(
            ValueError,
            "merge: one of models, slices and modules is required.",
            got=", ".join(kinds) or None,
        )
    method = _method(entries.get("merge_method"))
    base = _model(entries["base_model"]) if entries.get("base_model") is not None else None
    modules = entries["modules"] if kinds == ["modules"] else {"": {kinds[0]: entries[kinds[0]]}}
    if not isinstance(modules, dict):
        raise error(ValueError, "merge: modules must be a mapping of paths.", got=repr(modules))
    slices: dict[str, list[Slice]] = {}
    for path, module in modules.items():
        part = _only(f"modules.{path}", module, "models", "slices", "parameters")
        if part.get("models"):
            inputs = [_input(one, "models") for one in part["models"]]
            # As mergekit does: a base that the method does not treat apart is one of the models.
            if base is not None and method.base == "unused" and all(each.model != base for each in inputs):
                inputs.append(Input(base, None, {}))
            slices[path] = [Slice(inputs, base, {})]
        else:
            slices[path] = [_slice(one, base) for one in part.get("slices") or ()]
        if not slices[path]:
            raise error(ValueError, f"merge: the module {path!r} must have models or slices.", got=repr(module))
    tokens = entries.get("tokenizer") or {"source": entries.get("tokenizer_source")}
    tokens = _only("tokenizer", tokens, "source", "pad_to_multiple_of")
    own = {path: module.get("parameters") or {} for path, module in modules.items()}
    parts = [one for module in slices.values() for one in module]
    settings = [entries.get("parameters") or {}, *own.values(), *(one.parameters for one in parts)]
    _check_parameters(method, [*settings, *(each.parameters for one in parts for each in one.inputs)])
    dtypes, vocabulary = map(entries.get, ("dtype", "out_dtype")), map(tokens.get, ("source", "pad_to_multiple_of"))
    return Config(method, base, slices, own, settings[0], *dtypes, *vocabulary)


def spellings(method: Method[...], option: str) -> tuple[str, str]:
    """Return the names of an option in files: without the underscore of a keyword, or after the method's name."""
    return option.removesuffix("_"), f"{method.name}_{option}"


def _check_parameters(method: Method[...], every: Sequence[Settings]) -> None:
    # int8_mask changes the memory that mergekit requires, and no result.
    known = {name for option in method.options for name in spellings(method, option)} | {method.weight, "int8_mask"}
    if unknown := [str(name) for settings in every for name in settings if name not in known]:
        raise UnsupportedError(
            f"merge: {method.name} must not have these parameters: {safe(', '.join(unknown))}.",
            expected=", ".join(sorted(name for name in known if name)),
        )


def _slice(doc: Any, base: str | None) -> Slice:
    entries = _only("a slice", doc, "sources", "base_model", "parameters")
    inputs = [_input(one, "sources") for one in entries.get("sources") or ()]
    lengths = {None if each.layers is None else len(each.layers) for each in inputs}
    if len(lengths) != 1 or None in lengths:
        got = [each.layers for each in inputs]
        raise error(ValueError, "merge: the sources of a slice must have equally many layers.", got=got)
    own = entries.get("base_model")
    return Slice(inputs, base if own is None else _model(own), entries.get("parameters") or {})


def _input(doc: Any, where: str) -> Input:
    entries = _only(where, doc, "model", "parameters", *(("layer_range",) if where == "sources" else ()))
    first, last = entries.get("layer_range") or (None, 0)
    layers = None if first is None else range(first, last)
    return Input(_model(entries.get("model")), layers, entries.get("parameters") or {})


def _model(doc: Any) -> str:
    """Return the path of a model."""
    if isinstance(doc, dict):
        doc = _only("a model", doc, "model", "path").get("model", doc.get("path"))
        return _model(doc)
    if not isinstance(doc, str) or not doc:
        raise error(ValueError, "merge: a model must be a path.", got=repr(doc))
    return doc


# Any: what YAML gives.
def _only(what: str, doc: Any, *known: str) -> dict[str, Any]:
    """Return the entries of a mapping, all of which must be known."""
    if not isinstance(doc, dict):
        raise error(ValueError, f"merge: {what} must be a mapping.", got=safe(repr(doc))[:80])
    if unknown := [str(name) for name, value in doc.items() if name not in known and value is not None]:
        raise UnsupportedError(
            f"merge: {what} must not have these entries: {safe(', '.join(unknown))}.", expected=", ".join(known)
        )
    return doc


def setting(value: Any, name: str, depth: float) -> Any:
    """Return the value of a parameter for a leaf of this name, at a depth in [0, 1]; None if no filter fits.

    Source:
        mergekit's `evaluate_setting`. A list of numbers is interpolated over the depth; one value of another list is
        chosen. The first condition counts whose `filter` is part of the name.
    """
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        return _number(value)
    if any(isinstance(one, dict) for one in value):
        for one in value:
            wanted = _only("a condition", one, "filter", "value").get("filter")
            if wanted in (None, "*") or wanted in name:
                return setting(one["value"], name, depth)
        return None
    values = list(map(_number, value))
    at = depth * (len(values) - 1)
    low = int(at)
    if any(isinstance(one, bool) for one in values):
        return values[low]
    return (1 - (at - low)) * values[low] + (at - low) * values[min(low + 1, len(values) - 1)]


def _number(value: Any) -> Any:
    # YAML reads 1e-5 as a text.
    return float(value) if isinstance(value, str) else value
