"""PEFT's folders as we write them: the names of tensors, and the configuration that selects exactly these layers.

The configuration is read again as PEFT reads it (`Targets`): what it selects besides the adapted layers, PEFT would
adapt, wrap or refuse.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from statistics import mode
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import UnsupportedError
from tdfunc.core.keys import Entry, dotted
from tdfunc.core.types import Kind, Path
from tdfunc.lora.choice import Choice
from tdfunc.lora.files.config import read_config
from tdfunc.lora.files.patterns import Ends
from tdfunc.lora.targets import Layout, Target
from tdfunc.ops.base.reading import entries

N = TypeVar("N", int, float)
# The version whose layout of experts is written.
VERSION = "0.21.2"


def no_peft(path: Path, what: str) -> UnsupportedError:
    """Return the error of adapters that PEFT does not have."""
    return UnsupportedError(
        f"lora.save: PEFT has no adapter of the kind at {dotted(path)!r}.",
        got=what,
        hint="tdf.save(adapters, path) keeps every tree; lora.merge(params, adapters) has it in the weights.",
    )


def check_target(target: Target, lora: Choice, module: nn.Module) -> None:
    """Raise unless PEFT has such an adapter for a weight.

    Raises:
        UnsupportedError: The message names the weight.
    """
    path = target.path
    if target.layout.is_experts and lora.dora:
        raise no_peft(path, "DoRA of fused experts")
    if len(path) < 2:
        raise no_peft(path, "a layer without a name")
    if lora.dora and lora.bias:
        raise no_peft(path, "DoRA with a bias")
    for each in target.paths:
        layer = module.get_submodule(dotted(each[:-1]))
        if getattr(layer, "groups", 1) != 1 and target.layout is Layout.CONV:
            raise no_peft(each, "the change of a grouped convolution")
        if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
            raise no_peft(each, "a table with max_norm, which PEFT applies to the factors")


def write_parts(target: Target, path: Path, parts: Mapping[str, Tensor], later: int) -> dict[str, Tensor]:
    """Return the leaves of PEFT for the layer at `path`, which is one of the layers of a target.

    Args:
        target: The weight.
        path: The path of the weight in this layer.
        parts: The leaves of its adapter, without a start.
        later: The number of later parameters of its module that have adapters.
    """
    a = parts["A"]
    b = parts["B"]
    layout = target.layout
    name = ".".join([*path[:-1], *["base_layer"] * later])
    if layout is Layout.EMBEDDING and path == target.path:
        written = {f"{name}.lora_embedding_A": b.mT, f"{name}.lora_embedding_B": a.mT}
    else:
        # Of a table that is tied to a linear layer, this layer has the orientation of the table.
        if layout.has_output_last and layout is not Layout.EMBEDDING:
            a, b = b.mT, a.mT
        if layout.is_experts:
            a = a.flatten(0, 1)
            b = b.permute(1, 2, 0).flatten(1)
        elif layout is Layout.CONV:
            b = b.reshape(*b.shape, *[1] * (target.leaf.ndim - 2))
        written = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    if "magnitude" in parts:
        magnitude = parts["magnitude"]
        if layout is Layout.CONV:
            magnitude = magnitude.transpose(0, 1)
        else:
            magnitude = magnitude.flatten()
        written[f"{name}.lora_magnitude_vector"] = magnitude
    if "bias" in parts:
        written[f"{name}.lora_B.bias"] = parts["bias"]
    return written


class Layers(NamedTuple):
    """The adapted layers of a folder.

    Attributes:
        modules: The names of modules with adapters.
        parameters: The names of parameters with adapters.
        ranks: The rank of each, by its name.
        alphas: The alpha of each, by its name.
    """

    modules: set[str]
    parameters: set[str]
    ranks: dict[str, int]
    alphas: dict[str, float]


def list_layers(lora: Choice, targets: Sequence[Target]) -> Layers:
    """Return the layers of all weights, with the rank and alpha of the adapters that are written."""
    layers = Layers(set(), set(), {}, {})
    for target in targets:
        rank = target.rank
        if lora.start != "kaiming":
            # The start is subtracted as additional ranks.
            rank = 2 * rank
        alpha = float(target.scale) * (math.sqrt(rank) if lora.rslora else rank)
        # Some servers take whole numbers only.
        if math.isclose(alpha, round(alpha)):
            alpha = round(alpha)
        for path in target.paths:
            if target.layout.is_experts:
                name = dotted(path)
                layers.parameters.add(name)
            else:
                name = dotted(path[:-1])
                layers.modules.add(name)
            layers.ranks[name] = rank
            layers.alphas[name] = alpha
    return layers


class Whole(NamedTuple):
    """The leaves of a folder that are trained whole.

    Attributes:
        names: The name of each, by its path.
        bias: PEFT's option for biases.
        modules: PEFT's modules to save.
    """

    names: dict[Path, str]
    bias: str
    modules: list[str]


def config_of(
    lora: Choice, targets: Sequence[Target], layers: Layers, module: nn.Module, whole: Whole
) -> dict[str, Any]:
    """Return the entries of the configuration.

    Raises:
        UnsupportedError: No configuration selects exactly these layers.
    """
    rank, rank_pattern = _most_frequent(layers.ranks, 1)
    alpha, alpha_pattern = _most_frequent(layers.alphas, 1.0)
    is_transposed = any(target.layout is Layout.TRANSPOSED for target in targets)
    is_tied = any(len(target.paths) > 1 for target in targets)
    model_config = getattr(module, "config", None)
    config = {
        "peft_type": "LORA",
        "peft_version": VERSION,
        "task_type": None,
        "inference_mode": True,
        "init_lora_weights": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "lora_dropout": lora.dropout,
        "lora_bias": lora.bias,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": whole.bias,
        "modules_to_save": whole.modules or None,
        "fan_in_fan_out": is_transposed,
        "ensure_weight_tying": is_tied,
        "base_model_name_or_path": getattr(model_config, "_name_or_path", None),
    }
    # Containers count: PEFT refuses a name that one of them has.
    modules = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    config["target_modules"] = _target_modules(layers.modules, modules, config)
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    config["target_parameters"] = _target_parameters(layers.parameters, parameters)
    return config


def _most_frequent(values: Mapping[str, N], default: N) -> tuple[N, dict[str, N]]:
    """Return the most frequent of some values by name, and the other values by a pattern for each name."""
    if not values:
        return default, {}
    most_frequent = mode(values.values())
    return most_frequent, {_pattern(name): value for name, value in values.items() if value != most_frequent}


def _pattern(name: str) -> str:
    """Return the pattern that matches only a name."""
    return "^" + re.escape(name)


def _target_modules(chosen: set[str], modules: Sequence[str], config: Mapping[str, Any]) -> list[str] | str:
    """Return names of which PEFT selects exactly these modules, or a pattern.

    Raises:
        UnsupportedError: There are none, because a name in `modules_to_save` is also part of an adapted layer's.
    """
    pattern = "|".join(map(re.escape, sorted(chosen)))
    targets = None
    for candidate in (short_names(chosen, modules), pattern):
        targets = read_config(dict(config, target_modules=candidate)).targets
        selected = {name for name in modules if targets.has_module(name)}
        if selected == chosen:
            return candidate
    assert targets is not None
    # The pattern, which was tried last, selects no other modules.
    lost = min(name for name in chosen if not targets.has_module(name))
    raise no_peft((*lost.split("."), "weight"), f"a layer that modules_to_save={config['modules_to_save']} excludes")


def _target_parameters(chosen: set[str], parameters: Sequence[str]) -> list[str] | None:
    """Return names of which PEFT selects exactly these parameters.

    Raises:
        UnsupportedError: There are none: the complete name of one is the end of another's.
    """
    names = short_names(chosen, parameters)
    ends = Ends(names)
    for name in parameters:
        if name not in chosen and ends.has(name):
            raise no_peft(tuple(name.split(".")), f"a parameter whose name has the same end as {names}")
    return names or None


def short_names(chosen: Iterable[str], everything: Sequence[str]) -> list[str]:
    """Return the last parts of names if they select exactly the chosen names, else the complete names."""
    chosen = sorted(chosen)
    every = sorted(everything)
    for count in (1, 2, 3):
        ends = Ends([".".join(name.split(".")[-count:]) for name in chosen])
        selected = [name for name in every if ends.has(name)]
        if selected == chosen:
            return sorted(ends.ends)
    return chosen


def whole_modules(whole: Sequence[Entry], adapted: set[str], base: TensorCollection, module: nn.Module) -> Whole:
    """Return the names of leaves that are replaced, and PEFT's options for them.

    Raises:
        UnsupportedError: The leaves are neither complete modules nor all biases, or PEFT saves more of a module.
    """
    for entry in whole:
        if len(entry.paths) > 1:
            raise no_peft(entry.paths[0], "a tied weight that is trained whole")
    paths = {entry.paths[0] for entry in whole}
    option, biases = _bias_option(paths, adapted, base)
    modules = _outermost({dotted(path[:-1]) for path in paths - biases})
    if modules:
        saved = _Saved(module, set(map(dotted, paths)), adapted)
        for name in modules:
            saved.check(name)
    names: dict[Path, str] = {}
    for path in paths:
        layer = dotted(path[:-1])
        if path in biases and layer in adapted:
            names[path] = f"{layer}.base_layer.bias"
        else:
            names[path] = dotted(path)
    return Whole(names, option, modules)


def _bias_option(paths: set[Path], adapted: set[str], base: TensorCollection) -> tuple[str, set[Path]]:
    """Return PEFT's option for biases, given the leaves that are trained whole, and the biases that it stands for."""
    biases: set[Path] = set()
    for entry in entries(base):
        path = entry.paths[0]
        if path[-1] == "bias" and entry.kind is Kind.PARAMETER:
            biases.add(path)
    if biases and biases <= paths:
        return "all", biases
    of_adapted = {path for path in biases if dotted(path[:-1]) in adapted}
    if of_adapted and of_adapted <= paths:
        return "lora_only", of_adapted
    return "none", set()


def _outermost(names: set[str]) -> list[str]:
    """Return the names of modules that are not inside another one of them."""
    outermost: list[str] = []
    for name in sorted(names):
        # "a.b.c" is inside "a" and "a.b".
        parents = accumulate(name.split(".")[:-1], "{}.{}".format)
        if names.isdisjoint(parents):
            outermost.append(name)
    return outermost


class _Saved:
    """The names that decide which modules PEFT saves: in order, so that each module looks at its neighbours only."""

    def __init__(self, module: nn.Module, leaves: set[str], adapted: set[str]) -> None:
        self._module = module
        self._leaves = leaves
        self._backwards = sorted([name[::-1] for name, _ in module.named_modules(remove_duplicate=False)])
        self._adapted = sorted([f"{layer}." for layer in adapted])

    def check(self, name: str) -> None:
        """Raise unless PEFT saves and loads exactly the leaves of a module that are trained whole."""
        key = (*name.split("."), "weight")
        # A name ends another name also within a word.
        alike = [other[::-1] for other in _beginning(self._backwards, name[::-1])]
        if not name or alike != [name]:
            other = next((each for each in alike if each != name), "the model itself")
            raise no_peft(key, f"a module whose name is also the end of {other!r}")
        own = self._module.get_submodule(name)
        parameters = {f"{name}.{leaf}" for leaf, _ in own.named_parameters()}
        if not parameters <= self._leaves:
            raise no_peft(key, "a module of which some leaves are trained whole")
        if any(_beginning(self._adapted, f"{name}.")):
            raise no_peft(key, "a module of which some leaves are trained whole, and others have adapters")
        buffers = [leaf for leaf, _ in own.named_buffers()]
        if not own.state_dict().keys().isdisjoint(buffers):
            raise no_peft(key, "a module with buffers, which PEFT saves with it")


def _beginning(names: Sequence[str], start: str) -> Iterator[str]:
    """Yield the names that begin with a text, of some names in order."""
    places = range(bisect_left(names, start), len(names))
    return takewhile(lambda name: name.startswith(start), map(names.__getitem__, places))
