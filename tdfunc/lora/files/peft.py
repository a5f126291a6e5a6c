"""PEFT's adapters as files: names and orientations, read into our trees; `writing` writes them.

PEFT stores A as (R, inputs) and B as (outputs, R) for every layer. An embedding has `lora_embedding_A` (R, V) and
`lora_embedding_B` (D, R). Experts are concatenated: A (E * R, inputs) by expert, B (outputs, R * E) with the experts
innermost. The number of `base_layer` in the name distinguishes two parameters of one module.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, UnsupportedError
from tdfunc.core.keys import Entry, dotted
from tdfunc.core.types import Kind, Path
from tdfunc.lora.files.config import Config
from tdfunc.lora.targets import Layout
from tdfunc.ops.base.reading import entries, get, has

PREFIX = "base_model.model."
# The name of a tensor: its module, and its part of the adapter.
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


@dataclass(frozen=True)
class _Context:
    """A configuration and the base that it is read for.

    Attributes:
        config: The configuration.
        params: The base.
        outer: The beginning that the names in the configuration have before the base's names.
    """

    config: Config
    params: TensorCollection
    outer: str

    def name_of(self, path: Path) -> str:
        """Return the name of a leaf or module in the configuration."""
        return self.outer + dotted(path)

    def is_target_parameter(self, path: Path) -> bool:
        """Return whether the configuration names a parameter itself."""
        return self.config.targets.has_parameter(self.name_of(path))

    def is_target(self, path: Path) -> bool:
        """Return whether the configuration names a weight, or the layer that it belongs to."""
        if self.is_target_parameter(path):
            return True
        return path[-1] == "weight" and self.config.targets.has_module(self.name_of(path).removesuffix(".weight"))


def read_adapters(
    tensors: Mapping[str, Tensor],
    config: Config,
    params: TensorCollection,
    layouts: Callable[[Path], Layout] | None,
    outer: str = "",
    tables: Collection[Path] = (),
) -> tuple[list[Adapter], dict[Path, Tensor]]:
    """Return the adapters of a file, and the leaves that it replaces whole.

    Args:
        tensors: The leaves of the file by their names, without the prefix.
        config: The configuration.
        params: The base.
        layouts: The layout of a weight by its path, if it is known.
        outer: The beginning that only the names in the configuration have.
        tables: The tables of which rows are trained.
    """
    context = _Context(config, params, outer)
    modules, others = _split(tensors)
    parts_by_path = _place(modules, context)
    whole = _without_tables(_whole_leaves(others), {*parts_by_path, *tables}, params)
    orientation = _Orientation(parts_by_path, config, params, layouts)
    found = {path: _adapter(path, parts, context, orientation) for path, parts in parts_by_path.items()}
    adapters, replaced = _untied(found, params, whole)
    _check_agreement(context, adapters, replaced)
    return adapters, replaced


def read_base(
    tensors: Mapping[str, Tensor], config: Config, params: TensorCollection, outer: str, tables: Collection[Path]
) -> dict[Path, Tensor]:
    """Return the tables of the base in a file that `read_adapters` compares with the base; arguments are as there.

    They are tables with an adapter or with trained rows, and tables of another number of rows.
    """
    modules, others = _split(tensors)
    changed = {*_place(modules, _Context(config, params, outer)), *tables}
    found: dict[Path, Tensor] = {}
    for path, given in _whole_leaves(others).items():
        leaf = _leaf(params, path, "")
        is_table = leaf.ndim == 2 and given.ndim == 2
        if is_table and leaf.shape[1] != given.shape[1]:
            raise _misfit(path, leaf, given)
        if path in changed or (is_table and len(leaf) != len(given)):
            found[path] = given
    return found


def _split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Return the parts of adapters by their module, and all other tensors."""
    modules: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _PART.fullmatch(name)
        if match is not None:
            modules.setdefault(match["module"], {})[match["part"]] = tensor
        else:
            others[name] = tensor
    return modules, others


def _whole_leaves(tensors: Mapping[str, Tensor]) -> dict[Path, Tensor]:
    """Return the leaves of the base in a file, by their paths.

    With `bias="all"` PEFT writes the biases of a module that it saves whole three times: under the name of the base,
    under `modules_to_save`, which are the same, and under `original_module`, which do not run.
    """
    whole: dict[Path, Tensor] = {}
    for name, tensor in tensors.items():
        if ".original_module." in name:
            continue
        for inner in (".token_adapter.", ".base_layer.", ".modules_to_save."):
            name = name.replace(inner, ".")
        path = tuple(name.split("."))
        if path in whole and not torch.equal(whole[path], tensor):
            raise LeafMismatchError(
                f"lora.load: the file has two values of {dotted(path)!r}.", got=f"the second one is {name!r}"
            )
        whole[path] = tensor
    return whole


def _without_tables(
    whole: Mapping[Path, Tensor], adapted: Collection[Path], params: TensorCollection
) -> dict[Path, Tensor]:
    """Return the leaves of a file that replace leaves of the base; raise if one of them does not fit.

    PEFT saves the table of an embedding beside its adapter. It is not among them, and must be the table of the base.
    """
    buffers = {entry.paths[0] for entry in entries(params) if entry.kind is Kind.BUFFER}
    replacing: dict[Path, Tensor] = {}
    for path, given in whole.items():
        leaf = _leaf(params, path, "")
        if path in buffers:
            raise _no_leaf(dotted(path), dotted(path), "a buffer")
        if path not in adapted:
            if leaf.shape != given.shape:
                raise _misfit(path, leaf, given)
            replacing[path] = given
        elif not torch.equal(leaf, given.to(leaf.dtype)):
            raise UnsupportedError(
                f"lora.load: the adapter of {dotted(path)!r} belongs to another table.",
                expected=f"the base's values of shape {tuple(leaf.shape)}",
                got="other values in the file: the vocabulary was resized, or the base is another one",
                hint="base = tdf.lora.load_base(folder, params) has the tables of the file.",
            )
    return replacing


# -- the configuration and the tensors agree --------------------------------------------------------------------


def _check_agreement(context: _Context, adapters: Sequence[Adapter], whole: Mapping[Path, Tensor]) -> None:
    """Raise if the configuration names tensors that the file lacks, or the file has tensors that it does not name.

    Raises:
        LeafMismatchError: The message names the tensors and the entry.
    """
    _check_part("use_dora", context.config.dora, adapters, "magnitude")
    _check_part("lora_bias", context.config.bias, adapters, "bias")
    _check_targets(context, adapters)
    _check_whole(context, adapters, whole)


def _check_part(entry: str, wanted: bool | None, adapters: Sequence[Adapter], part: str) -> None:
    """Raise unless all adapters have a part, or all lack it, as an entry says; None says nothing."""
    if wanted is None:
        return
    odd = [adapter.paths[0] for adapter in adapters if (part in adapter.parts) != wanted]
    if odd:
        raise _disagreement(entry, wanted, odd, part, has=not wanted)


def _check_targets(context: _Context, adapters: Sequence[Adapter]) -> None:
    """Raise unless the layers with adapters are those that the configuration names."""
    if context.config.targets.modules is not None:
        # Of a tied weight one layer may be named, as with `ensure_weight_tying`.
        odd = [adapter.paths[0] for adapter in adapters if not any(map(context.is_target, adapter.paths))]
        if odd:
            raise _disagreement("target_modules", "other layers", odd, "adapter", has=True)
    adapted = _adapted_paths(adapters)
    missing: list[Path] = []
    for entry in entries(context.params):
        if _could_have(entry):
            missing += [path for path in entry.paths if path not in adapted and context.is_target(path)]
    if missing:
        raise _disagreement("target_modules", "these layers", missing, "adapter", has=False)


def _check_whole(context: _Context, adapters: Sequence[Adapter], whole: Mapping[Path, Tensor]) -> None:
    """Raise unless the file has the leaves that the configuration trains whole."""
    config = context.config
    missing = [path for path in _trained_whole(context, _adapted_paths(adapters)) if path not in whole]
    if not missing:
        return
    if missing[0][-1] == "bias" and config.trained_biases != "none":
        raise _disagreement("bias", config.trained_biases, missing, "values", has=False)
    raise _disagreement("modules_to_save", list(config.modules_to_save), missing, "values", has=False)


def _adapted_paths(adapters: Sequence[Adapter]) -> set[Path]:
    return {path for adapter in adapters for path in adapter.paths}


def _could_have(entry: Entry) -> bool:
    """Return whether a leaf can have an adapter."""
    leaf = entry.leaf
    return isinstance(leaf, Tensor) and leaf.ndim >= 2 and leaf.is_floating_point()


def _trained_whole(context: _Context, adapted: set[Path]) -> list[Path]:
    """Return the paths, each the first of its leaf, of the leaves that the configuration trains whole."""
    layers = {path[:-1] for path in adapted}
    found: list[Path] = []
    for entry in entries(context.params):
        path = entry.paths[0]
        if entry.kind not in (None, Kind.PARAMETER) or path in adapted:
            continue
        if not isinstance(entry.leaf, Tensor) or not entry.leaf.is_floating_point():
            continue
        if _is_trained_bias(path, context.config, layers) or _is_in_saved_module(path, context):
            found.append(path)
    return found


def _is_trained_bias(path: Path, config: Config, layers: set[Path]) -> bool:
    """Return whether a leaf is a bias that is trained; `layers` have adapters."""
    if path[-1] != "bias":
        return False
    if config.trained_biases == "lora_only":
        return path[:-1] in layers
    return config.trained_biases == "all"


def _is_in_saved_module(path: Path, context: _Context) -> bool:
    """Return whether a leaf belongs to a module that is trained whole."""
    modules = [context.name_of(path[:length]) for length in range(1, len(path))]
    return any(module.endswith(context.config.modules_to_save) for module in modules)


# Any: the value of an entry.
def _disagreement(entry: str, value: Any, paths: Sequence[Path], part: str, *, has: bool) -> LeafMismatchError:
    names = ", ".join([repr(dotted(path)) for path in paths[:5]])
    if len(paths) > 5:
        names += f" and {len(paths) - 5} more"
    wanted = f"no {part}" if has else part
    return LeafMismatchError(
        f"lora.load: the configuration's {entry!r} and the tensors of the file disagree.",
        expected=f"{wanted} of {names}, because {entry} is {value!r}"[:300],
        got="such tensors in the file" if has else "no such tensors in the file",
        hint=f"the file or its configuration is not the saved one; {entry!r} in adapter_config.json decides.",
    )


# -- the parts of each adapter ----------------------------------------------------------------------------------


def _leaf(params: TensorCollection, path: Path, name: str) -> Tensor:
    leaf = get(params, path, None)
    if not isinstance(leaf, Tensor):
        raise _no_leaf(name or dotted(path), dotted(path), "no such leaf")
    return leaf


def _no_leaf(name: str, wanted: str, got: str) -> LeafMismatchError:
    return LeafMismatchError(
        f"lora.load: the leaf {name!r} of the file does not belong to a leaf of the base.",
        expected=f"{wanted!r} in the parameters",
        got=got,
        hint="the adapter is of another model, or prefix= cuts the beginning of its names. Adapters have no buffers, "
        "such as a running mean.",
    )


def _misfit(path: Path, leaf: Tensor, given: Tensor, expected: str = "") -> LeafMismatchError:
    hint = None
    if leaf.ndim == given.ndim == 2 and leaf.shape[1:] == given.shape[1:]:
        hint = f"for a vocabulary that was resized: model.resize_token_embeddings({len(given)}) before functional."
    return LeafMismatchError(
        f"lora.load: the file's leaf for {dotted(path)!r} does not fit it.",
        expected=expected or f"shape {tuple(leaf.shape)}",
        got=f"shape {tuple(given.shape)}",
        hint=hint,
    )


def _place(modules: Mapping[str, dict[str, Tensor]], context: _Context) -> dict[Path, dict[str, Tensor]]:
    """Return the parts of each adapter by the path of its weight."""
    placed: dict[Path, dict[str, Tensor]] = {}
    nested: dict[Path, dict[int, dict[str, Tensor]]] = {}
    for name, parts in modules.items():
        keys = tuple(name.split("."))
        module = keys
        while module and module[-1] == "base_layer":
            module = module[:-1]
        depth = len(keys) - len(module)
        if depth == 0 and has(context.params, (*module, "weight")):
            placed[(*module, "weight")] = parts
        else:
            nested.setdefault(module, {})[depth] = parts
    for module, parts_by_depth in nested.items():
        placed |= _place_nested(module, parts_by_depth, context)
    for path in placed:
        leaf = _leaf(context.params, path, "")
        if leaf.ndim < 2:
            raise LeafMismatchError(
                f"lora.load: the leaf {dotted(path)!r} cannot have an adapter.",
                expected="2 or more dimensions",
                got=f"shape {tuple(leaf.shape)}",
                hint="the adapter is of another model.",
            )
    return placed


def _place_nested(
    module: Path, parts_by_depth: Mapping[int, dict[str, Tensor]], context: _Context
) -> dict[Path, dict[str, Tensor]]:
    """Return the parts of the adapters of a module's parameters, given those by the number of `base_layer`."""
    node = get(context.params, module, None)
    paths: list[Path] = []
    if isinstance(node, TensorCollection):
        paths = [(*module, key) for key in node._keys() if context.is_target_parameter((*module, key))]
    if sorted(parts_by_depth) != list(range(len(paths))):
        _leaf(context.params, (*module, "weight"), f"{dotted(module)}.lora_A.weight")
        raise UnsupportedError(
            f"lora.load: the configuration does not name the adapted parameters of {dotted(module)!r}."
        )
    # Later parameters of a module are wrapped around the earlier ones.
    depths = reversed(range(len(paths)))
    return {path: parts_by_depth[depth] for path, depth in zip(paths, depths, strict=True)}


class _Orientation:
    """The orientation of weights, found from the layer, the shapes or the version of PEFT."""

    def __init__(
        self,
        parts_by_path: Mapping[Path, dict[str, Tensor]],
        config: Config,
        params: TensorCollection,
        layouts: Callable[[Path], Layout] | None,
    ) -> None:
        self._layouts = layouts
        self._config = config
        # The orientations of the matrices, and of the stacks of experts, that are not square: their shapes decide.
        self._matrices: set[bool] = set()
        self._stacks: set[bool] = set()
        for path, parts in parts_by_path.items():
            if "lora_A.weight" not in parts:
                continue
            a = parts["lora_A.weight"]
            shape = get(params, path).shape
            if shape[-1] != shape[-2] and a.ndim == 2:
                seen = self._stacks if len(shape) == 3 else self._matrices
                seen.add(a.shape[1] == shape[-2])
        self._has_transposed = any(_is_transposed(entry, params) for entry in entries(params))

    def is_transposed(self, path: Path, shape: torch.Size, inputs: int) -> bool:
        """Return whether the inputs of A are the first dimension of the weight's matrices.

        Args:
            path: The path of the weight.
            shape: Its shape.
            inputs: The number of inputs of A.
        """
        if shape[-1] != shape[-2]:
            return inputs == shape[-2]
        if len(shape) == 3:
            return self._is_square_stack_transposed(path)
        return self._is_square_matrix_transposed(path)

    def _is_square_stack_transposed(self, path: Path) -> bool:
        version = self._config.version
        if len(self._stacks) == 1:
            return next(iter(self._stacks))
        if version is None:
            raise _ambiguous(path, "peft_version in the configuration")
        if version < (0, 19):
            # They took the first dimension for the inputs, in every module.
            return True
        if self._layouts is None:
            raise _ambiguous(path, "apply=, which has the layer")
        return self._layouts(path) is Layout.EXPERTS_TRANSPOSED

    def _is_square_matrix_transposed(self, path: Path) -> bool:
        if self._layouts is not None:
            return self._layouts(path) is Layout.TRANSPOSED
        if not self._has_transposed:
            return False
        if self._config.fan_in_fan_out and False not in self._matrices:
            return True
        raise _ambiguous(path, "apply=, which has the layer")


def _is_transposed(entry: Entry, params: TensorCollection) -> bool:
    """Return whether a leaf is a matrix (inputs, outputs), as far as shapes show it: a bias has the outputs."""
    leaf = entry.leaf
    bias = get(params, (*entry.paths[0][:-1], "bias"), None)
    if not isinstance(bias, Tensor) or leaf.ndim != 2:
        return False
    first, second = leaf.shape
    return first != second and second == len(bias)


def _ambiguous(path: Path, needed: str) -> UnsupportedError:
    return UnsupportedError(
        f"lora.load: the orientation of the adapter of {dotted(path)!r} is not known: its weight is square.",
        expected=needed,
        hint="lora.load(folder, params, apply=apply).",
    )


class _Factors(NamedTuple):
    """A and B in our orientation, and whether the outputs are the last dimension of the weight."""

    a: Tensor
    b: Tensor
    is_output_last: bool


def _adapter(path: Path, parts: Mapping[str, Tensor], context: _Context, orientation: _Orientation) -> Adapter:
    """Return the adapter of a weight, given its parts by their names in PEFT."""
    weight = get(context.params, path)
    is_table = "lora_embedding_A" in parts
    names = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
    # A part of the other kind of layer beside them is an error as well.
    has_both = all(name in parts for name in names)
    if not has_both or (not is_table and "lora_embedding_B" in parts):
        raise LeafMismatchError(
            f"lora.load: the adapter of {dotted(path)!r} does not have both A and B.", got=sorted(parts)
        )
    a, b = (parts[name] for name in names)
    if is_table:
        factors = _Factors(b.mT, a.mT, is_output_last=True)
    elif weight.ndim == 3 and a.ndim == 2:
        factors = _read_experts(path, weight, a, b, orientation)
    elif weight.ndim > 2:
        factors = _read_convolution(path, weight, a, b)
    else:
        factors = _read_linear(path, weight, a, b, orientation)
    _check_product(path, weight, parts, factors)
    ours = {"A": factors.a.contiguous(), "B": factors.b.contiguous()}
    alpha = _alpha_of(path, factors, context)
    if "lora_magnitude_vector" in parts:
        ours["magnitude"] = _read_magnitude(path, weight, parts["lora_magnitude_vector"], factors)
    if "lora_B.bias" in parts:
        ours["bias"] = parts["lora_B.bias"]
    return Adapter((path,), ours, alpha)


def _read_linear(path: Path, weight: Tensor, a: Tensor, b: Tensor, orientation: _Orientation) -> _Factors:
    if orientation.is_transposed(path, weight.shape, a.shape[1]):
        return _Factors(b.mT, a.mT, is_output_last=True)
    return _Factors(a, b, is_output_last=False)


def _read_experts(path: Path, weight: Tensor, a: Tensor, b: Tensor, orientation: _Orientation) -> _Factors:
    experts = len(weight)
    is_transposed = orientation.is_transposed(path, weight.shape, a.shape[1])
    # (E * R, inputs), and (outputs, R * E) with the experts innermost.
    a = a.unflatten(0, (experts, -1))
    b = b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if is_transposed:
        return _Factors(b.mT, a.mT, is_output_last=True)
    return _Factors(a, b, is_output_last=False)


def _read_convolution(path: Path, weight: Tensor, a: Tensor, b: Tensor) -> _Factors:
    b = b.flatten(1)
    if b.shape[1] == len(a) and a.shape[1] != weight.shape[1]:
        raise UnsupportedError(
            f"lora.load: the adapter of the grouped convolution {dotted(path)!r} has no change of its weight.",
            expected=f"A of shape {(len(a), *weight.shape[1:])}",
            got=f"shape {tuple(a.shape)}, over the channels of all groups",
        )
    return _Factors(a, b, is_output_last=False)


def _check_product(path: Path, weight: Tensor, parts: Mapping[str, Tensor], factors: _Factors) -> None:
    """Raise unless the product of A and B has the shape of the weight."""
    a = factors.a
    b = factors.b
    if b.ndim == 2:
        rank = a.shape[0]
        product = (*b.shape[:-1], *a.shape[1:])
    else:
        rank = a.shape[-2]
        product = (*b.shape[:-1], *a.shape[-1:])
    if product != tuple(weight.shape) or rank != b.shape[-1]:
        given = parts.get("lora_A.weight", a)
        raise _misfit(path, weight, given, f"A and B of a weight of shape {tuple(weight.shape)}")


def _alpha_of(path: Path, factors: _Factors, context: _Context) -> float:
    """Return the alpha of a weight in the configuration, whose rank must be the factors' rank."""
    if context.is_target_parameter(path):
        name = context.name_of(path)
    else:
        name = context.name_of(path[:-1])
    rank = context.config.ranks[name]
    if rank != factors.b.shape[-1]:
        raise LeafMismatchError(
            f"lora.load: the rank of {dotted(path)!r} is not the rank in the configuration.",
            expected=rank,
            got=f"{factors.b.shape[-1]}, in the file",
        )
    return context.config.alphas[name]


def _read_magnitude(path: Path, weight: Tensor, magnitude: Tensor, factors: _Factors) -> Tensor:
    outputs = weight.shape[-1 if factors.is_output_last else 0]
    if factors.b.ndim == 3 or magnitude.numel() != outputs:
        raise _misfit(path, weight, magnitude, f"{outputs} magnitudes, and no experts")
    if factors.is_output_last:
        return magnitude.reshape(1, -1)
    return magnitude.reshape(-1, *[1] * (weight.ndim - 1))


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
    found: Mapping[Path, Adapter], params: TensorCollection, whole: Mapping[Path, Tensor]
) -> tuple[list[Adapter], dict[Path, Tensor]]:
    """Return one adapter, and one whole leaf, for each tied weight."""
    adapters: list[Adapter] = []
    replaced: dict[Path, Tensor] = {}
    for entry in entries(params):
        own_adapters = [found[path] for path in entry.paths if path in found]
        own_values = [whole[path] for path in entry.paths if path in whole]
        if own_adapters:
            alphas = {adapter.alpha for adapter in own_adapters}
            _check_one_change(entry, [adapter.parts for adapter in own_adapters], is_one_scale=len(alphas) == 1)
            adapters.append(own_adapters[0]._replace(paths=entry.paths))
        elif own_values:
            _check_one_change(entry, [{"value": value} for value in own_values])
        if own_values:
            replaced[entry.paths[0]] = own_values[0]
    return adapters, replaced


def _check_one_change(entry: Entry, changes: Sequence[Mapping[str, Tensor]], is_one_scale: bool = True) -> None:
    """Raise unless all layers of a weight have a change, and the same one."""
    is_same = is_one_scale and all(_are_equal(changes[0], other) for other in changes)
    if len(changes) == len(entry.paths) and is_same:
        return
    got = f"{len(changes)} adapters"
    if not is_same:
        got += " that differ"
    raise UnsupportedError(
        f"lora.load: {' and '.join(map(dotted, entry.paths))} are one weight, and the file has other changes.",
        expected="one change for all, as PEFT's ensure_weight_tying=True gives",
        got=got,
        hint="take the parameters of a model that does not tie them.",
    )


def _are_equal(parts: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    if parts.keys() != others.keys():
        return False
    return all(torch.equal(part, others[name]) for name, part in parts.items())
