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
    names = [name for name in _COUNTS if name in config]
    if not names:
        what = "merge: config.json must have the number of layers, which changes."
        raise UnsupportedError(what, expected=" or ".join(_COUNTS))
    before = config[names[0]]
    sources = {one.model: read_config(one.model) for one in taken}
    first = dict(config)
    config |= {
        name: [_entry(sources, one, name) for one in taken]
        for name, value in config.items()
        if "layer" in name and isinstance(value, list) and len(value) == before
    }
    config |= dict.fromkeys(names, len(taken))
    is_moved = [one.number for one in taken] != list(range(before))
    if not is_moved and all(source == first for source in sources.values()):
        return
    renumbered = [one.model for i, one in enumerate(taken) if one != Taken(taken[0].model, i)]
    check_named_layers(list(dict.fromkeys(renumbered)), where)
    difference = _difference(config, sources, taken, where)
    if difference:
        raise UnsupportedError(
            f"merge: config.json cannot describe the rearranged layers: {difference}.",
            hint="take layers so that each keeps its kind under the rule of the configuration.",
        )
    rules = [name for name, value in first.items() if _is_by_number(name, value, before)]
    if difference is None:
        rules += [name for name, value in first.items() if name not in names and _is_rule(name, value, before)]
        rules += [
            name for name in first if _is_shared(name) and any(one.get(name) != first[name] for one in sources.values())
        ]
    if rules:
        shown = safe(", ".join(rules[:10]))
        raise UnsupportedError(
            f"merge: config.json may give the kind of layers by their number, and numbers change: {shown}.",
            expected="entries that describe all layers alike, or a list such as layer_types",
            got=brief({name: first[name] for name in rules}),
            hint="with transformers installed, and a model that it knows, the layers themselves are compared.",
        )


def _entry(sources: Mapping[str, Document], one: Taken, name: str) -> Any:
    """Return the entry of a layer in a list of its own model."""
    found = sources[one.model].get(name)
    if not isinstance(found, list) or one.number >= len(found):
        what = f"merge: config.json of {safe(one.model)} must have an entry for each layer in {safe(name)}."
        raise UnsupportedError(what, got=brief(found), hint="the first model has such a list.")
    return found[one.number]


def _is_by_number(name: str, value: Any, before: int) -> bool:
    """Return whether an entry is a list with an entry for each layer under another name, or scales by the number."""
    is_other = "layer" in name or "token" in name or name == "architectures"
    is_list = isinstance(value, list) and not is_other and len(value) == before > 1
    return is_list or ("layer_idx" in name and bool(value))


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
        old = layers[one.number]
        for key in dict.fromkeys([*old, *made[i]]):
            a = old.get(key)
            b = made[i].get(key)
            holds_number = type(a) is int and (a, b) == (one.number, i)
            if a != b and not holds_number:
                name = ".".join(filter(None, key))
                origin = f"the layer {one.number} of {safe(one.model)}"
                return f"layer {i}, {origin}, would have {name} {brief(b)} instead of {brief(a)}"
    return ""


def _layers_of(config: Document, where: Path) -> list[Facts] | None:
    """Return facts about the layers of the model that a configuration describes; None without such a model."""
    try:
        import transformers

        # Any: without stubs.
        found: Any = transformers
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
                json.dump(config, file)
            known = found.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: nn.Module = getattr(found, known.architectures[0])(known)
        layers = list(model.get_submodule(dotted(where)).children())
        lists = {name: value for name, value in vars(known).items() if isinstance(value, list) and "layer" in name}
        lists = {name: value for name, value in lists.items() if len(value) == len(layers)}
        shared = {("config", name): value for name, value in vars(known).items() if _is_shared(name)}
        return [shared | _facts(layer, i, lists) for i, layer in enumerate(layers)]
    # Any error: without the model the entries are judged by their names.
    except Exception:
        return None


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
