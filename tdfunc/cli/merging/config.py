"""A configuration file of mergekit as data: models, layers, a method and parameters."""

import ast
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tdfunc.cli.merging import schema
from tdfunc.cli.output import note, safe
from tdfunc.core.errors import UnsupportedError, brief, error
from tdfunc.weights.method import Method
from tdfunc.weights.methods import METHODS

# Any: numbers, bools, texts, lists of them, and lists of {filter, value}.
Settings = Mapping[str, Any]
# A mapping has at most so many entries after `<<` has copied others into it.
_MAX_KEYS = 1_000


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
        models = [self.base]
        for slices in self.modules.values():
            for one in slices:
                models += [one.base, *[each.model for each in one.inputs]]
        return list(dict.fromkeys(path for path in models if path is not None))

    def with_models(self, paths: Mapping[str, str]) -> "Config":
        """Return the configuration with other paths in place of some models."""

        def path_of(model: str | None) -> str | None:
            return None if model is None else paths.get(model, model)

        modules: dict[str, Sequence[Slice]] = {}
        for name, slices in self.modules.items():
            changed: list[Slice] = []
            for one in slices:
                inputs = [each._replace(model=paths.get(each.model, each.model)) for each in one.inputs]
                changed.append(replace(one, inputs=inputs, base=path_of(one.base)))
            modules[name] = changed
        tokenizer = self.tokenizer and paths.get(self.tokenizer, self.tokenizer)
        return replace(self, base=path_of(self.base), modules=modules, tokenizer=tokenizer)

    @property
    def filters(self) -> list[str]:
        """The filters of all conditions, each once."""
        every = [self.parameters, *self.module_parameters.values()]
        for slices in self.modules.values():
            for one in slices:
                every += [one.parameters, *[each.parameters for each in one.inputs]]
        found: dict[str, None] = {}
        for settings in every:
            for value in settings.values():
                conditions = value if isinstance(value, list) else [value]
                found |= {one["filter"]: None for one in conditions if isinstance(one, dict) and one.get("filter")}
        return list(found)


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

    # The mappings whose own keys were checked: an alias comes back with the keys of others in it.
    checked = set[int]()

    class Loader(yaml.SafeLoader):
        # Any: a node of YAML, which has no stubs.
        def flatten_mapping(self, node: Any) -> None:
            if id(node) not in checked:
                checked.add(id(node))
                _check_keys(node)
            super().flatten_mapping(node)
            if len(node.value) > _MAX_KEYS:
                raise error(ValueError, f"a mapping has more than {_MAX_KEYS} entries")

    try:
        found = yaml.load(text, Loader)
    # YAML's own classes are errors of Python's for dates, numbers and depths that do not exist.
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as err:
        raise error(ValueError, "merge: the configuration is not YAML.", got=str(err)) from err
    return make_config(found)


# Any: a node of YAML, which has no stubs.
def _check_keys(node: Any) -> None:
    """Raise if a mapping has a key twice: YAML's reader would drop the first value."""
    known = set[tuple[str, str]]()
    for key, _ in node.value:
        if not isinstance(key.value, str):
            continue
        # 1 and "1" are two keys.
        name = key.tag, key.value
        if name in known:
            line = key.start_mark.line + 1
            raise error(ValueError, f"line {line} has the entry {safe(key.value)[:80]!r} of its mapping a second time")
        known.add(name)


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
    if weights is None:
        factors = [1.0] * len(paths)
    else:
        factors = list(weights)
    if not paths or len(factors) != len(paths):
        what = "merge: there is not one --weight for each model."
        raise error(ValueError, what, expected=f"{len(paths)} numbers", got=len(factors))
    settings = dict([_option(text) for text in options])
    _check_parameters(method, [settings])
    weight = method.weight or "weight"
    if weight not in settings:
        inputs = [Input(path, None, {weight: factor}) for path, factor in zip(paths, factors, strict=True)]
    elif weights is None:
        # An option of all models, in place of 1.
        inputs = [Input(path, None, {}) for path in paths]
    else:
        what = f"merge: --weight and --option {weight} are the same number of {name}."
        raise error(ValueError, what, expected="one of them", got=brief(settings[weight]))
    return Config(method, base, {"": [Slice(inputs, base, {})]}, {}, settings)


def _option(text: str) -> tuple[str, Any]:
    """Return the name and the value of NAME=VALUE, in JSON or as Python writes it: true, True, .5, [0, 1]."""
    name, _, written = text.partition("=")
    try:
        value: Any = json.loads(written)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(written)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as err:
            what = "merge: --option is not NAME=VALUE with a number, a bool or a list of them as the value."
            raise error(ValueError, what, expected="density=0.5", got=brief(text)) from err
    schema.setting(value, f"--option {safe(name)[:80]}")
    return name, value


def _method(name: str) -> Method[...]:
    if name not in METHODS:
        raise error(ValueError, "merge: the method is unknown.", expected=", ".join(METHODS), got=brief(name))
    return METHODS[name]


def make_config(doc: Any) -> Config:
    """Return the merge that the entries of a configuration describe."""
    entries = schema.check(doc)
    unused = [name for name in schema.UNUSED if entries.get(name) is not None]
    if unused:
        note(f"merge: not used, as by mergekit: {', '.join(unused)}")
    method, base, modules = _outline(entries)
    slices = {path: _slices(path, module, method, base) for path, module in modules.items()}
    of_modules: dict[str, Settings] = {path: module.get("parameters") or {} for path, module in modules.items()}
    shared: Settings = entries.get("parameters") or {}
    of_slices: list[Settings] = []
    of_inputs: list[Settings] = []
    for module in slices.values():
        for one in module:
            of_slices.append(one.parameters)
            of_inputs += [each.parameters for each in one.inputs]
    _check_parameters(method, [shared, *of_modules.values(), *of_slices, *of_inputs])
    _check_own(method, of_inputs)
    tokens: Mapping[str, Any] = entries.get("tokenizer") or {"source": entries.get("tokenizer_source")}
    return Config(
        method,
        base,
        slices,
        of_modules,
        shared,
        dtype=entries.get("dtype"),
        out_dtype=entries.get("out_dtype"),
        tokenizer=tokens.get("source"),
        pad_to_multiple_of=tokens.get("pad_to_multiple_of"),
    )


# Any: the entries of a file whose form was checked.
def _outline(entries: Mapping[str, Any]) -> tuple[Method[...], str | None, Mapping[str, Mapping[str, Any]]]:
    """Return the method, the base, and the entries of each module; models or slices are the whole model's."""
    kinds = [name for name in ("models", "slices", "modules") if entries.get(name)]
    if len(kinds) != 1:
        raise error(
            ValueError,
            "merge: one of models, slices and modules is required.",
            got=", ".join(kinds) or None,
        )
    if entries.get("merge_method") is None:
        raise error(ValueError, "merge: merge_method is required.", expected=", ".join(METHODS))
    method = _method(entries["merge_method"])
    base = None
    if entries.get("base_model") is not None:
        base = _model(entries["base_model"])
    (kind,) = kinds
    if kind == "modules":
        return method, base, entries["modules"]
    return method, base, {"": {kind: entries[kind]}}


# Any: the entries of a file whose form was checked.
def _slices(path: str, module: Mapping[str, Any], method: Method[...], base: str | None) -> list[Slice]:
    """Return the slices of a module; models are one slice of all layers."""
    if module.get("models"):
        inputs = [_input(one) for one in module["models"]]
        # As mergekit does: a base that the method does not treat apart is one of the models.
        if base is not None and method.base == "unused" and all(each.model != base for each in inputs):
            inputs.append(Input(base, None, {}))
        return [Slice(inputs, base, {})]
    if not module.get("slices"):
        what = f"merge: the module {safe(path)[:80]!r} has no models or slices."
        raise error(ValueError, what, got=brief(module))
    return [_slice(one, base) for one in module["slices"]]


def spellings(method: Method[...], option: str) -> tuple[str, ...]:
    """Return the names of an option in files: without the underscore of a keyword, after the method's name, as here."""
    return option.removesuffix("_"), f"{method.name}_{option}", option


def _all_spellings(method: Method[...], options: Iterable[str]) -> set[str]:
    names = set[str]()
    for option in options:
        names.update(spellings(method, option))
    return names


def _check_parameters(method: Method[...], every: Sequence[Settings]) -> None:
    """Raise if a parameter is not one of the method."""
    # int8_mask changes the memory that mergekit requires, and no result.
    known = _all_spellings(method, method.options) | {"int8_mask"}
    if method.weight:
        known.add(method.weight)
    unknown = _names(every, lambda name: name not in known)
    if unknown:
        names = safe(", ".join(unknown[:10]))
        hint = None
        if "key" in unknown and method.is_random:
            hint = "--seed gives the random numbers."
        raise UnsupportedError(
            f"merge: {method.name} does not have these parameters: {names[:400]}.",
            expected=", ".join(sorted(known)),
            hint=hint,
        )


def _check_own(method: Method[...], of_inputs: Sequence[Settings]) -> None:
    """Raise if one model has a parameter of the whole merge, which would not be used."""
    shared = _all_spellings(method, [option for option in method.options if option not in method.per_model])
    found = _names(of_inputs, lambda name: name in shared and name != method.weight)
    if found:
        own = _all_spellings(method, method.per_model)
        names = safe(", ".join(dict.fromkeys(found)))
        raise UnsupportedError(
            f"merge: these parameters of {method.name} are given for one model: {names}.",
            expected=", ".join(sorted({method.weight or "weight", *own})),
            hint="give them once for all models, in the `parameters` of the configuration, a module or a slice.",
        )


def _names(every: Sequence[Settings], is_wanted: Callable[[str], bool]) -> list[str]:
    """Return the names of parameters, each as often as it occurs."""
    found: list[str] = []
    for settings in every:
        found += [str(name) for name in settings if is_wanted(name)]
    return found


def _slice(doc: Mapping[str, Any], base: str | None) -> Slice:
    inputs = [_input(one) for one in doc["sources"]]
    lengths = {len(each.layers) if each.layers is not None else None for each in inputs}
    if len(lengths) != 1 or None in lengths:
        got = brief([each.layers for each in inputs])
        raise error(ValueError, "merge: the sources of a slice do not have equally many layers.", got=got)
    if doc.get("base_model") is not None:
        base = _model(doc["base_model"])
    return Slice(inputs, base, doc.get("parameters") or {})


def _input(doc: Mapping[str, Any]) -> Input:
    layers = None
    if doc.get("layer_range") is not None:
        layers = range(*doc["layer_range"])
    return Input(_model(doc["model"]), layers, doc.get("parameters") or {})


def _model(doc: Any) -> str:
    """Return the path of a model; with an adapter it is `base+adapter`."""
    if not isinstance(doc, dict):
        return doc
    inner = doc.get("path") if doc.get("model") is None else doc["model"]
    base = _model(inner)
    if doc.get("lora") is None:
        return base
    return f"{base}+{_model(doc['lora'])}"


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
            wanted = one.get("filter")
            if wanted in (None, "*") or wanted in name:
                return setting(one["value"], name, depth)
        return None
    values = list(map(_number, value))
    at = depth * (len(values) - 1)
    low = int(at)
    if any(isinstance(one, bool) for one in values):
        return values[low]
    high = min(low + 1, len(values) - 1)
    share = at - low
    return (1 - share) * values[low] + share * values[high]


def _number(value: Any) -> Any:
    # PyYAML 6.0 reads 1e-5 as a text: a number of YAML 1.1 has a point.
    if isinstance(value, str):
        return float(value)
    return value
