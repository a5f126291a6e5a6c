"""config.json after its layers were rearranged: entries about layers follow them, and others are understood or refused.

A layer's kind may be in a list with an entry for each layer, or in a rule of its number (each sixth layer is of another
kind, the first ones are dense). Rules are checked on the model that transformers makes of the configuration.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tdfunc.cli.merging.entries import Document, check_named_layers, read_config
from tdfunc.cli.output import safe
from tdfunc.core.errors import UnsupportedError, brief
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Words of entries that give the kind of a layer by its number, such as sliding_window_pattern and max_window_layers.
_RULES = re.compile(
    r"(^|_)(layers|pattern|interval|period|offset|every|step|freq|frequency|stride|first|last|idx|index|window)(_|$)"
)


class Taken(NamedTuple):
    """A layer of the result: its model, and its number there."""

    model: str
    number: int


def relayer(config: Document, taken: Sequence[Taken], where: Path) -> None:
    """Change the number of layers in a configuration, and its entries about layers.

    Args:
        config: The configuration of the first model, which is changed.
        taken: The layers of the result, in order.
        where: The path of the layers.

    Raises:
        UnsupportedError: An entry gives the kind of layers in a way that is not understood, and the layers change.
    """
    first = dict(config)
    counts = _counts_in(first)
    before = first[counts[0]]
    sources = {one.model: read_config(one.model) for one in taken}
    for name, value in first.items():
        if "layer" in name and isinstance(value, list) and len(value) == before:
            config[name] = [_entry(sources, one, name) for one in taken]
    config |= dict.fromkeys(counts, len(taken))
    is_moved = [one.number for one in taken] != list(range(before))
    if is_moved or any(source != first for source in sources.values()):
        renumbered = [one.model for i, one in enumerate(taken) if one != Taken(taken[0].model, i)]
        check_named_layers(list(dict.fromkeys(renumbered)), where)
        _check_kinds(config, first, sources, taken, where)


def _counts_in(config: Document) -> list[str]:
    """Return the entries that are the number of layers; raise if there is none."""
    counts = [name for name in _COUNTS if name in config]
    if not counts:
        what = "merge: config.json does not have the number of layers, which changes."
        raise UnsupportedError(what, expected=" or ".join(_COUNTS))
    return counts


def _check_kinds(
    config: Document, first: Document, sources: Mapping[str, Document], taken: Sequence[Taken], where: Path
) -> None:
    """Raise unless each layer keeps its kind; without the layers themselves, unless no entry may change it.

    Args:
        config: The configuration of the result.
        first: The configuration of the first model.
        sources: The configurations of all models.
        taken: The layers of the result, in order.
        where: The path of the layers.
    """
    difference = _difference(config, sources, taken, where)
    if difference:
        raise UnsupportedError(
            f"merge: config.json cannot describe the rearranged layers: {difference}.",
            hint="take layers so that each keeps its kind under the rule of the configuration.",
        )
    before = first[_counts_in(first)[0]]
    rules = [name for name, value in first.items() if _is_by_number(name, value, before)]
    if difference is None:
        # The names of entries have to do.
        rules += _rules_by_name(first, sources, before)
    if rules:
        shown = safe(", ".join(rules[:10]))
        raise UnsupportedError(
            f"merge: config.json may give the kind of layers by their number, and numbers change: {shown}.",
            expected="entries that describe all layers alike, or a list such as layer_types",
            got=brief({name: first[name] for name in rules}),
            hint="with transformers installed, and a model that it knows, the layers themselves are compared.",
        )


def _rules_by_name(first: Document, sources: Mapping[str, Document], before: int) -> list[str]:
    """Return the entries of the first model that may make layers differ by their number, or by their model."""
    rules = [name for name, value in first.items() if name not in _COUNTS and _is_rule(name, value, before)]
    for name, value in first.items():
        if _is_shared(name) and any(source.get(name) != value for source in sources.values()):
            rules.append(name)
    return rules


def _entry(sources: Mapping[str, Document], one: Taken, name: str) -> Any:
    """Return the entry of a layer in a list of its model."""
    found = sources[one.model].get(name)
    if not isinstance(found, list) or one.number >= len(found):
        what = f"merge: config.json of {safe(one.model)} has no entry for layer {one.number} in {safe(name)}."
        raise UnsupportedError(what, got=brief(found), hint="the first model has such a list.")
    return found[one.number]


def _is_by_number(name: str, value: Any, before: int) -> bool:
    """Return whether an entry is a list with an entry for each layer under another name, or scales by the number."""
    if "layer_idx" in name and value:
        return True
    # Lists of layers are taken from the models; the others are about something else.
    is_known = "layer" in name or "token" in name or name == "architectures"
    return isinstance(value, list) and not is_known and len(value) == before > 1


def _is_rule(name: str, value: Any, before: int) -> bool:
    """Return whether an entry may give the kind of layers by a rule, or by a list of their numbers."""
    if isinstance(value, dict):
        return any(_is_rule(key, inner, before) for key, inner in value.items())
    if isinstance(value, list):
        return bool(value) and "layer" in name and len(value) != before
    # A step of 1 takes each layer.
    is_neutral = not value or (value == 1 and not isinstance(value, bool))
    return _RULES.search(name) is not None and not is_neutral


def _is_shared(name: str) -> bool:
    """Return whether an entry says how all layers compute, outside of their modules: positions, codes."""
    return "rope" in name or name == "quantization_config"


# -- the layers as transformers makes them --------------------------------------------------------------------------

# By the path of a module in a layer and the name of a fact: the value.
Facts = dict[tuple[str, str], Any]


def _difference(config: Document, sources: Mapping[str, Document], taken: Sequence[Taken], where: Path) -> str | None:
    """Return the first difference between layers of the result and of their models; "" if there is none.

    None if transformers is not installed, or does not know the model.
    """
    made = _layers_of(config, where)
    models = {name: _layers_of(source, where) for name, source in sources.items()}
    if made is None or len(made) != len(taken):
        return None
    for i, one in enumerate(taken):
        layers = models[one.model]
        if layers is None or one.number >= len(layers):
            return None
        key = _differing_fact(layers[one.number], made[i], one.number, i)
        if key is not None:
            name = ".".join(filter(None, key))
            origin = f"the layer {one.number} of {safe(one.model)}"
            before = brief(layers[one.number].get(key))
            after = brief(made[i].get(key))
            return f"layer {i}, {origin}, would have {name} {after} instead of {before}"
    return ""


def _differing_fact(old: Facts, new: Facts, old_number: int, new_number: int) -> tuple[str, str] | None:
    """Return the first fact that differs between a layer and its place in the result; None if there is none."""
    for key in dict.fromkeys([*old, *new]):
        a = old.get(key)
        b = new.get(key)
        # A layer may hold its own number, which changes.
        holds_number = type(a) is int and (a, b) == (old_number, new_number)
        if a != b and not holds_number:
            return key
    return None


def _layers_of(config: Document, where: Path) -> list[Facts] | None:
    """Return facts about the layers of the model that a configuration describes; None without such a model."""
    try:
        known, model = _make_model(config)
        layers = list(model.get_submodule(dotted(where)).children())
        entries = vars(known)
        shared: Facts = {("config", name): value for name, value in entries.items() if _is_shared(name)}
        lists: dict[str, Sequence[Any]] = {}
        for name, value in entries.items():
            if "layer" in name and isinstance(value, list) and len(value) == len(layers):
                lists[name] = value
        return [shared | _facts(layer, i, lists) for i, layer in enumerate(layers)]
    # Any error: without the model the entries are judged by their names.
    except Exception:
        return None


# Any: a configuration of transformers.
def _make_model(config: Document) -> tuple[Any, nn.Module]:
    """Return the configuration as transformers reads it, and its model without values."""
    import transformers

    # Any: without stubs.
    library: Any = transformers
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        known = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        return known, getattr(library, known.architectures[0])(known)


def _facts(layer: nn.Module, number: int, lists: Mapping[str, Sequence[Any]]) -> Facts:
    found: Facts = {("config", name): value[number] for name, value in lists.items()}
    for path, module in layer.named_modules():
        found[path, "class"] = type(module).__qualname__
        for name, leaf in module.named_parameters(recurse=False):
            found[path, name] = tuple(leaf.shape)
        for name, value in vars(module).items():
            # Training is not part of the result.
            if isinstance(value, bool | int | float | str | None) and "dropout" not in name:
                found[path, name] = value
    return found
