"""PEFT's adapters as files: names, orientations and configuration, read into our trees and written from them.

PEFT stores A as (R, inputs) and B as (outputs, R) for every layer. An embedding has `lora_embedding_A` (R, V) and
`lora_embedding_B` (D, R). Experts are concatenated: A (E * R, inputs) by expert, B (outputs, R * E) with the experts
innermost. The number of `base_layer` in the name distinguishes two parameters of one module.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, UnsupportedError
from tdfunc.core.keys import dotted
from tdfunc.core.types import Path
from tdfunc.lora._patterns import names_end
from tdfunc.lora._targets import Layout, Target
from tdfunc.ops.base.reading import entries, get, has

# The version whose layout of experts is written.
VERSION = "0.21.2"
PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+?)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(?:(?<=vector)\.weight)?"
)
# Entries of the configuration that do not affect the numbers, or that are read below; others must be off.
_KNOWN = {
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_type", "peft_version",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "megatron_core",
    "qalora_group_size", "corda_config", "eva_config", "loftq_config", "lora_ga_config", "ensure_weight_tying",
    "target_parameters", "r", "lora_alpha", "lora_bias", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora",
    "use_dora", "fan_in_fan_out", "bias", "init_lora_weights",
}  # fmt: skip
# Starts that do not change the base.
_PLAIN = {"true", "false", "none", "gaussian", "eva", "orthogonal", "mica"}


class Adapter(NamedTuple):
    """An adapter in a file, in our orientation."""

    paths: tuple[Path, ...]
    parts: dict[str, Tensor]
    alpha: float

    @property
    def rank(self) -> int:
        """The rank of the factors."""
        return self.parts["B"].shape[-1]


def check_config(config: Mapping[str, Any]) -> None:
    """Raise unless a configuration describes the computation of LoRA.

    Raises:
        UnsupportedError: An entry describes another computation; the message names it.
    """
    if config.get("peft_type") != "LORA":
        raise UnsupportedError("lora.load: the adapter must be LoRA.", got=f"peft_type {config.get('peft_type')!r}")
    for name, value in config.items():
        if name not in _KNOWN and value:
            raise UnsupportedError(
                f"lora.load: the configuration must not have {name!r}.",
                expected="LoRA, rsLoRA or DoRA",
                got=f"{name}={value!r}"[:100],
            )
    start = str(config.get("init_lora_weights", True)).lower()
    if start not in _PLAIN:
        raise UnsupportedError(
            f"lora.load: the start {start!r} changes the base in a way that the file does not contain.",
            expected="a start that does not change the base",
            got=f"init_lora_weights={start!r}",
            hint="peft writes it as plain LoRA: save_pretrained(..., path_initial_model_for_weight_conversion=...).",
        )


def read_adapters(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    params: TensorCollection,
    layouts: Callable[[Path], Layout] | None,
) -> tuple[list[Adapter], dict[Path, Tensor]]:
    """Return the adapters of a file, and the leaves that it replaces whole.

    Args:
        tensors: The leaves of the file by their names, without the prefix.
        config: The configuration.
        params: The base.
        layouts: The layout of a weight by its path, if it is known.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    whole: dict[Path, Tensor] = {}
    for name, tensor in tensors.items():
        match = _PART.fullmatch(name)
        if match is not None:
            modules.setdefault(match["module"], {})[match["part"]] = tensor
        else:
            whole[tuple(name.replace(".base_layer.", ".").replace(".modules_to_save.", ".").split("."))] = tensor
    leaves = _place(modules, config, params)
    for path in list(whole):
        leaf = _leaf(params, path, "")
        if path in leaves:
            # The table of an embedding is saved beside its adapter.
            if not torch.equal(leaf, whole.pop(path).to(leaf.dtype)):
                raise UnsupportedError(
                    f"lora.load: the adapter of {dotted(path)!r} belongs to another table.",
                    expected=f"the base's values of shape {tuple(leaf.shape)}",
                    got="other values in the file: the vocabulary was resized, or the base is another one",
                )
        elif leaf.shape != whole[path].shape:
            raise _misfit(path, leaf, whole[path])
    transposed = _Orientation(leaves, config, params, layouts)
    found = {path: _adapter(path, module, config, params, transposed) for path, module in leaves.items()}
    return _untied(found, params, whole)


def _leaf(params: TensorCollection, path: Path, name: str) -> Tensor:
    leaf = get(params, path, None)
    if not isinstance(leaf, Tensor):
        raise LeafMismatchError(
            f"lora.load: the leaf {name or dotted(path)!r} of the file must belong to a leaf of the base.",
            expected=f"{dotted(path)!r} in the parameters",
            got="no such leaf",
            hint="the adapter is of another model, or prefix= cuts the beginning of its names.",
        )
    return leaf


def _misfit(path: Path, leaf: Tensor, given: Tensor, expected: str = "") -> LeafMismatchError:
    return LeafMismatchError(
        f"lora.load: the file's leaf for {dotted(path)!r} does not fit it.",
        expected=expected or f"shape {tuple(leaf.shape)}",
        got=f"shape {tuple(given.shape)}",
    )


def _place(
    modules: dict[str, dict[str, Tensor]], config: Mapping[str, Any], params: TensorCollection
) -> dict[Path, dict[str, Tensor]]:
    """Return the parts of each adapter by the path of its weight."""
    placed: dict[Path, dict[str, Tensor]] = {}
    nested: dict[Path, dict[int, dict[str, Tensor]]] = {}
    for name, parts in modules.items():
        keys = tuple(name.split("."))
        depth = next(i for i, key in enumerate([*reversed(keys), ""]) if key != "base_layer")
        module = keys[: len(keys) - depth]
        if depth == 0 and has(params, (*module, "weight")):
            placed[(*module, "weight")] = parts
        else:
            nested.setdefault(module, {})[depth] = parts
    for module, levels in nested.items():
        node = get(params, module, None)
        keys = list(node._keys()) if isinstance(node, TensorCollection) else []
        paths = [(*module, key) for key in keys]
        # Later parameters of a module are wrapped around the earlier ones.
        wanted = config.get("target_parameters") or []
        paths = [p for p in paths if any(dotted(p) == t or dotted(p).endswith(f".{t}") for t in wanted)]
        if sorted(levels) != list(range(len(paths))):
            _leaf(params, (*module, "weight"), f"{dotted(module)}.lora_A.weight")
            raise UnsupportedError(f"lora.load: the parameters of {dotted(module)!r} that are adapted must be named.")
        placed |= {path: levels[len(paths) - 1 - i] for i, path in enumerate(paths)}
    return placed


class _Orientation:
    """The orientation of weights, found from the layer, the shapes or the version of PEFT."""

    def __init__(
        self,
        leaves: Mapping[Path, dict[str, Tensor]],
        config: Mapping[str, Any],
        params: TensorCollection,
        layouts: Callable[[Path], Layout] | None,
    ) -> None:
        self._layouts, self._config = layouts, config
        shapes = {path: (get(params, path).shape, parts) for path, parts in leaves.items() if "lora_A.weight" in parts}
        # The shape decides for weights that are not square: {is a stack of experts: the decisions}.
        self._seen: dict[bool, set[bool]] = {False: set(), True: set()}
        for shape, parts in shapes.values():
            if shape[-1] != shape[-2] and parts["lora_A.weight"].ndim == 2:
                self._seen[len(shape) == 3].add(parts["lora_A.weight"].shape[1] == shape[-2])
        # A bias has the outputs of its layer.
        found = [(entry.leaf, get(params, (*entry.paths[0][:-1], "bias"), None)) for entry in entries(params)]
        self._has_transposed = any(
            isinstance(bias, Tensor) and leaf.ndim == 2 and leaf.shape[0] != leaf.shape[1] == len(bias)
            for leaf, bias in found
        )

    def of(self, path: Path, shape: torch.Size, inputs: int) -> bool:
        """Return whether the inputs of A are the first dimension of the weight's matrices."""
        is_stack = len(shape) == 3
        if shape[-1] != shape[-2]:
            return inputs == shape[-2]
        if is_stack:
            version = re.match(r"(\d+)\.(\d+)", str(self._config.get("peft_version") or ""))
            if self._seen[True] and len(self._seen[True]) == 1:
                return next(iter(self._seen[True]))
            if version is not None and (int(version[1]), int(version[2])) < (0, 19):
                # They took the first dimension for the inputs, in every module.
                return True
            if version is not None and self._layouts is not None:
                return self._layouts(path) is Layout.EXPERTS_TRANSPOSED
            needed = "peft_version in the configuration" if version is None else "apply=, which has the layer"
        elif self._layouts is not None:
            return self._layouts(path) is Layout.TRANSPOSED
        elif not self._has_transposed:
            return False
        elif self._config.get("fan_in_fan_out") and self._seen[False] <= {True}:
            return True
        else:
            needed = "apply=, which has the layer"
        raise UnsupportedError(
            f"lora.load: the orientation of the adapter of {dotted(path)!r} must be given: its weight is square.",
            expected=needed,
            hint="lora.load(folder, params, apply=apply).",
        )


def _adapter(
    path: Path, parts: dict[str, Tensor], config: Mapping[str, Any], params: TensorCollection, orient: _Orientation
) -> Adapter:
    weight = get(params, path)
    lacking = [] if "lora_embedding_A" in parts else [n for n in ("lora_A.weight", "lora_B.weight") if n not in parts]
    if lacking or (("lora_embedding_A" in parts) != ("lora_embedding_B" in parts)):
        raise LeafMismatchError(f"lora.load: the adapter of {dotted(path)!r} must have A and B.", got=sorted(parts))
    magnitude = parts.get("lora_magnitude_vector")
    last = False
    if "lora_embedding_A" in parts:
        a, b, last = parts["lora_embedding_B"].mT, parts["lora_embedding_A"].mT, True
    elif weight.ndim == 3 and parts["lora_A.weight"].ndim == 2:
        experts = len(weight)
        a, b = parts["lora_A.weight"], parts["lora_B.weight"]
        last = orient.of(path, weight.shape, a.shape[1])
        a, b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    elif weight.ndim > 2:
        a, b = parts["lora_A.weight"], parts["lora_B.weight"].flatten(1)
        if b.shape[1] == len(a) and a.shape[1] != weight.shape[1]:
            raise UnsupportedError(
                f"lora.load: the adapter of the grouped convolution {dotted(path)!r} has no change of its weight.",
                expected=f"A of shape {(len(a), *weight.shape[1:])}",
                got=f"shape {tuple(a.shape)}, over the channels of all groups",
            )
    else:
        a, b = parts["lora_A.weight"], parts["lora_B.weight"]
        last = orient.of(path, weight.shape, a.shape[1])
    if last and "lora_embedding_A" not in parts:
        a, b = b.mT, a.mT
    product = (*b.shape[:-1], *(a.shape[1:] if b.ndim == 2 else a.shape[-1:]))
    if product != tuple(weight.shape) or a.shape[0 if b.ndim == 2 else -2] != b.shape[-1]:
        raise _misfit(
            path, weight, parts.get("lora_A.weight", a), f"A and B of a weight of shape {tuple(weight.shape)}"
        )
    name = dotted(path if weight.ndim == 3 and b.ndim == 3 else path[:-1])
    rank = _pattern(config.get("rank_pattern"), name, config.get("r", 8))
    alpha = _pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    if rank != b.shape[-1]:
        raise LeafMismatchError(
            f"lora.load: the rank of {dotted(path)!r} must be the one in the configuration.",
            expected=rank,
            got=f"{b.shape[-1]}, in the file",
        )
    ours = {"A": a.contiguous(), "B": b.contiguous()}
    if magnitude is not None:
        outputs = weight.shape[-1 if last else 0]
        if b.ndim == 3 or magnitude.numel() != outputs:
            raise _misfit(path, weight, magnitude, f"{outputs} magnitudes, and no experts")
        ours["magnitude"] = magnitude.reshape((1, -1) if last else (-1, *[1] * (weight.ndim - 1)))
    if "lora_B.bias" in parts:
        ours["bias"] = parts["lora_B.bias"]
    return Adapter((path,), ours, alpha)


def _pattern(given: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a name, as in PEFT."""
    return next((value for key, value in (given or {}).items() if names_end(key, name)), default)


def _untied(
    found: dict[Path, Adapter], params: TensorCollection, whole: dict[Path, Tensor]
) -> tuple[list[Adapter], dict[Path, Tensor]]:
    """Return one adapter, and one whole leaf, for each tied weight."""
    adapters: list[Adapter] = []
    replaced: dict[Path, Tensor] = {}
    for entry in entries(params):
        mine = [found[path] for path in entry.paths if path in found]
        own = [whole[path] for path in entry.paths if path in whole]
        values = [tuple(adapter.parts.values()) for adapter in mine] or [(value,) for value in own]
        if not values:
            continue
        same = all(all(map(torch.equal, values[0], other)) for other in values)
        if len(values) < len(entry.paths) or not same:
            raise UnsupportedError(
                f"lora.load: {' and '.join(map(dotted, entry.paths))} are one weight, and the file has other changes.",
                expected="one change for all, as PEFT's ensure_weight_tying=True gives",
                got=f"{len(values)} adapters" + ("" if same else " that differ"),
                hint="take the parameters of a model that does not tie them.",
            )
        adapters += [mine[0]._replace(paths=entry.paths)] if mine else []
        replaced |= {entry.paths[0]: own[0]} if own else {}
    return adapters, replaced


# -- writing ------------------------------------------------------------------------------------------------------


def write_parts(target: Target, path: Path, parts: Mapping[str, Tensor], outer: int) -> dict[str, Tensor]:
    """Return the leaves of PEFT for the layer at `path`, which is one of the layers of a target.

    Args:
        target: The weight.
        path: The path of the weight in this layer.
        parts: The leaves of its adapter, without a start.
        outer: The number of later parameters of its module that have adapters.
    """
    a, b, layout = parts["A"], parts["B"], target.layout
    is_table = layout is Layout.EMBEDDING and path == target.path
    if layout.has_output_last and layout is not Layout.EMBEDDING:
        a, b = b.mT, a.mT
    if layout.is_experts:
        name = ".".join([*path[:-1], *["base_layer"] * outer])
        a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
    else:
        name = dotted(path[:-1])
        b = b.reshape(*b.shape, *[1] * (target.leaf.ndim - 2)) if layout is Layout.CONV else b
    own = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    if is_table:
        own = {f"{name}.lora_embedding_A": b.mT, f"{name}.lora_embedding_B": a.mT}
    if "magnitude" in parts:
        magnitude = parts["magnitude"]
        shaped = magnitude.transpose(0, 1) if layout is Layout.CONV else magnitude.flatten()
        own[f"{name}.lora_magnitude_vector"] = shaped
    if "bias" in parts:
        own[f"{name}.lora_B.bias"] = parts["bias"]
    return own


def short_names(chosen: Iterable[str], everything: Sequence[str]) -> list[str]:
    """Return the last parts of names if they select exactly the chosen names, else the complete names."""
    chosen = sorted(chosen)
    for count in (1, 2, 3):
        ends = {".".join(name.split(".")[-count:]) for name in chosen}
        if [name for name in sorted(everything) if any(f".{name}".endswith(f".{end}") for end in ends)] == chosen:
            return sorted(ends)
    return chosen
