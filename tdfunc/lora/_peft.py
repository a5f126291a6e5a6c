"""PEFT's adapters as files: names and orientations, read into our trees; `_writing` writes them.

PEFT stores A as (R, inputs) and B as (outputs, R) for every layer. An embedding has `lora_embedding_A` (R, V) and
`lora_embedding_B` (D, R). Experts are concatenated: A (E * R, inputs) by expert, B (outputs, R * E) with the experts
innermost. The number of `base_layer` in the name distinguishes two parameters of one module.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, UnsupportedError
from tdfunc.core.keys import Entry, dotted
from tdfunc.core.types import Kind, Path
from tdfunc.lora._config import Config
from tdfunc.lora._targets import Layout
from tdfunc.ops.base.reading import entries, get, has

PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+?)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(?:(?<=vector)\.weight)?"
)


class Adapter(NamedTuple):
    """An adapter in a file, in our orientation."""

    paths: tuple[Path, ...]
    parts: dict[str, Tensor]
    alpha: float

    @property
    def rank(self) -> int:
        """The rank of the factors."""
        return self.parts["B"].shape[-1]


def read_adapters(
    tensors: Mapping[str, Tensor],
    config: Config,
    params: TensorCollection,
    layouts: Callable[[Path], Layout] | None,
    outer: str = "",
) -> tuple[list[Adapter], dict[Path, Tensor]]:
    """Return the adapters of a file, and the leaves that it replaces whole.

    Args:
        tensors: The leaves of the file by their names, without the prefix.
        config: The configuration.
        params: The base.
        layouts: The layout of a weight by its path, if it is known.
        outer: The beginning that only the names in the configuration have.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _PART.fullmatch(name)
        if match is not None:
            modules.setdefault(match["module"], {})[match["part"]] = tensor
        else:
            others[name] = tensor
    whole = _whole_leaves(others)
    leaves = _place(modules, config, params, outer)
    statistics = {entry.paths[0] for entry in entries(params) if entry.kind is Kind.BUFFER}
    for path in list(whole):
        leaf = _leaf(params, path, "")
        if path in statistics:
            raise _no_leaf(dotted(path), dotted(path), "a buffer")
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
    found = {path: _adapter(path, module, config, params, transposed, outer) for path, module in leaves.items()}
    adapters, replaced = _untied(found, params, whole)
    check_agreement(config, params, adapters, replaced, outer)
    return adapters, replaced


def _whole_leaves(tensors: Mapping[str, Tensor]) -> dict[Path, Tensor]:
    """Return the leaves of the base in a file, by their paths.

    With `bias="all"` PEFT writes the biases of a module that it saves whole three times: under the name of the base, as
    those of `modules_to_save`, which are the same, and as those of `original_module`, which do not run.
    """
    whole: dict[Path, Tensor] = {}
    for name, tensor in tensors.items():
        if ".original_module." in name:
            continue
        path = tuple(name.replace(".base_layer.", ".").replace(".modules_to_save.", ".").split("."))
        if path in whole and not torch.equal(whole[path], tensor):
            raise LeafMismatchError(
                f"lora.load: the file has two values of {dotted(path)!r}.", got=f"the second one is {name!r}"
            )
        whole[path] = tensor
    return whole


def check_agreement(
    config: Config,
    params: TensorCollection,
    adapters: Sequence[Adapter],
    whole: Mapping[Path, Tensor],
    outer: str,
) -> None:
    """Raise if the configuration names tensors that the file lacks, or the file has tensors that it does not name.

    Raises:
        LeafMismatchError: The message names the tensors and the entry.
    """
    for entry, part, wanted in (("use_dora", "magnitude", config.dora), ("lora_bias", "bias", config.bias)):
        odd = [adapter for adapter in adapters if wanted is not None and (part in adapter.parts) != wanted]
        if odd:
            raise _disagreement(entry, wanted, [adapter.paths[0] for adapter in odd], part, has=not wanted)
    adapted = {path for adapter in adapters for path in adapter.paths}
    targets = config.targets
    if targets.modules is not None:
        # Of a tied weight one layer may be named, as with `ensure_weight_tying`.
        odd = [a.paths[0] for a in adapters if not any(_is_target(config, path, outer) for path in a.paths)]
        if odd:
            raise _disagreement("target_modules", "other layers", odd, "adapter", has=True)
    missing = [
        path
        for entry in entries(params)
        for path in entry.paths
        if path not in adapted and _could_have(entry) and _is_target(config, path, outer)
    ]
    if missing:
        raise _disagreement("target_modules", "these layers", missing, "adapter", has=False)
    untrained = [path for path in _trained_whole(config, params, adapted, outer) if path not in whole]
    if untrained:
        entry = "bias" if untrained[0][-1] == "bias" and config.trained_biases != "none" else "modules_to_save"
        value = config.trained_biases if entry == "bias" else list(config.modules_to_save)
        raise _disagreement(entry, value, untrained, "values", has=False)


def _is_target(config: Config, path: Path, outer: str) -> bool:
    """Return whether the configuration names a weight."""
    name = outer + dotted(path)
    if config.targets.has_parameter(name):
        return True
    return path[-1] == "weight" and config.targets.has_module(name.removesuffix(".weight"))


def _could_have(entry: Entry) -> bool:
    """Return whether a leaf can have an adapter."""
    leaf = entry.leaf
    return isinstance(leaf, Tensor) and leaf.ndim >= 2 and leaf.is_floating_point()


def _trained_whole(config: Config, params: TensorCollection, adapted: set[Path], outer: str) -> list[Path]:
    """Return the paths, each the first of its leaf, of the leaves that the configuration trains whole."""
    layers = {path[:-1] for path in adapted}
    found: list[Path] = []
    for entry in entries(params):
        path = entry.paths[0]
        is_trained = isinstance(entry.leaf, Tensor) and entry.leaf.is_floating_point()
        if not is_trained or entry.kind not in (None, Kind.PARAMETER) or path in adapted:
            continue
        modules = [outer + dotted(path[:n]) for n in range(1, len(path))]
        is_bias = path[-1] == "bias"
        if (
            (is_bias and config.trained_biases == "all")
            or (is_bias and config.trained_biases == "lora_only" and path[:-1] in layers)
            or any(module.endswith(config.modules_to_save) for module in modules)
        ):
            found.append(path)
    return found


# Any: the value of an entry.
def _disagreement(entry: str, value: Any, paths: Sequence[Path], part: str, *, has: bool) -> LeafMismatchError:
    names = ", ".join([repr(dotted(path)) for path in paths[:5]])
    more = ""
    if len(paths) > 5:
        more = f" and {len(paths) - 5} more"
    return LeafMismatchError(
        f"lora.load: the configuration's {entry!r} and the tensors of the file disagree.",
        expected=f"{'no ' if has else ''}{part} of {names}{more}, because {entry} is {value!r}"[:300],
        got=f"{'such' if has else 'no such'} tensors in the file",
        hint=f"the file or its configuration is not the saved one; {entry!r} in adapter_config.json decides.",
    )


def _leaf(params: TensorCollection, path: Path, name: str) -> Tensor:
    leaf = get(params, path, None)
    if not isinstance(leaf, Tensor):
        raise _no_leaf(name or dotted(path), dotted(path), "no such leaf")
    return leaf


def _no_leaf(name: str, wanted: str, got: str) -> LeafMismatchError:
    return LeafMismatchError(
        f"lora.load: the leaf {name!r} of the file must belong to a leaf of the base.",
        expected=f"{wanted!r} in the parameters",
        got=got,
        hint="the adapter is of another model, or prefix= cuts the beginning of its names. Adapters have no buffers, "
        "such as a running mean.",
    )


def _misfit(path: Path, leaf: Tensor, given: Tensor, expected: str = "") -> LeafMismatchError:
    return LeafMismatchError(
        f"lora.load: the file's leaf for {dotted(path)!r} does not fit it.",
        expected=expected or f"shape {tuple(leaf.shape)}",
        got=f"shape {tuple(given.shape)}",
    )


def _place(
    modules: dict[str, dict[str, Tensor]], config: Config, params: TensorCollection, outer: str
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
        keys = []
        if isinstance(node, TensorCollection):
            keys = list(node._keys())
        paths = [(*module, key) for key in keys]
        # Later parameters of a module are wrapped around the earlier ones.
        paths = [path for path in paths if config.targets.has_parameter(outer + dotted(path))]
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
        config: Config,
        params: TensorCollection,
        layouts: Callable[[Path], Layout] | None,
    ) -> None:
        self._layouts = layouts
        self._config = config
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
            version = self._config.version
            if self._seen[True] and len(self._seen[True]) == 1:
                return next(iter(self._seen[True]))
            if version is not None and version < (0, 19):
                # They took the first dimension for the inputs, in every module.
                return True
            if version is not None and self._layouts is not None:
                return self._layouts(path) is Layout.EXPERTS_TRANSPOSED
            needed = "peft_version in the configuration" if version is None else "apply=, which has the layer"
        elif self._layouts is not None:
            return self._layouts(path) is Layout.TRANSPOSED
        elif not self._has_transposed:
            return False
        elif self._config.fan_in_fan_out and self._seen[False] <= {True}:
            return True
        else:
            needed = "apply=, which has the layer"
        raise UnsupportedError(
            f"lora.load: the orientation of the adapter of {dotted(path)!r} must be given: its weight is square.",
            expected=needed,
            hint="lora.load(folder, params, apply=apply).",
        )


def _adapter(
    path: Path,
    parts: dict[str, Tensor],
    config: Config,
    params: TensorCollection,
    orient: _Orientation,
    outer: str,
) -> Adapter:
    weight = get(params, path)
    lacking = []
    if "lora_embedding_A" not in parts:
        lacking = [n for n in ("lora_A.weight", "lora_B.weight") if n not in parts]
    if lacking or (("lora_embedding_A" in parts) != ("lora_embedding_B" in parts)):
        raise LeafMismatchError(f"lora.load: the adapter of {dotted(path)!r} must have A and B.", got=sorted(parts))
    magnitude = parts.get("lora_magnitude_vector")
    last = False
    if "lora_embedding_A" in parts:
        a = parts["lora_embedding_B"].mT
        b = parts["lora_embedding_A"].mT
        last = True
    elif weight.ndim == 3 and parts["lora_A.weight"].ndim == 2:
        experts = len(weight)
        a = parts["lora_A.weight"]
        b = parts["lora_B.weight"]
        last = orient.of(path, weight.shape, a.shape[1])
        a = a.unflatten(0, (experts, -1))
        b = b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    elif weight.ndim > 2:
        a = parts["lora_A.weight"]
        b = parts["lora_B.weight"].flatten(1)
        if b.shape[1] == len(a) and a.shape[1] != weight.shape[1]:
            raise UnsupportedError(
                f"lora.load: the adapter of the grouped convolution {dotted(path)!r} has no change of its weight.",
                expected=f"A of shape {(len(a), *weight.shape[1:])}",
                got=f"shape {tuple(a.shape)}, over the channels of all groups",
            )
    else:
        a = parts["lora_A.weight"]
        b = parts["lora_B.weight"]
        last = orient.of(path, weight.shape, a.shape[1])
    if last and "lora_embedding_A" not in parts:
        a, b = b.mT, a.mT
    product = (*b.shape[:-1], *(a.shape[1:] if b.ndim == 2 else a.shape[-1:]))
    if product != tuple(weight.shape) or a.shape[0 if b.ndim == 2 else -2] != b.shape[-1]:
        raise _misfit(
            path, weight, parts.get("lora_A.weight", a), f"A and B of a weight of shape {tuple(weight.shape)}"
        )
    name = outer + dotted(path)
    if not config.targets.has_parameter(name):
        name = outer + dotted(path[:-1])
    rank = config.ranks[name]
    alpha = config.alphas[name]
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


def check_table(adapter: Adapter, module: nn.Module) -> None:
    """Raise if an adapter of PEFT belongs to a table whose rows are bounded.

    Raises:
        UnsupportedError: PEFT bounds the rows of the base and of a factor.
    """
    for path in adapter.paths:
        layer = module.get_submodule(dotted(path[:-1]))
        if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
            raise UnsupportedError(
                f"lora.load: the table {dotted(path)!r} bounds the norm of its rows.",
                expected="a table without max_norm",
                got=f"max_norm={layer.max_norm}, which PEFT applies to the factors",
            )


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
        same = same and len({adapter.alpha for adapter in mine}) < 2
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
