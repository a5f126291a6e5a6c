"""Kohya's files of adapters: `lora_unet_a_b.lora_down.weight`, `.lora_up.weight`, `.alpha` and `.dora_scale`.

The name of a module has underscores for its dots, so modules are found by the paths of the base.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, UnsupportedError
from tdfunc.lora.files.config import Config
from tdfunc.ops.base.reading import entries

_PARTS = {
    "lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight", "dora_scale": "lora_magnitude_vector",
    "alpha": "alpha",
}  # fmt: skip


def is_kohya(names: Mapping[str, Any]) -> bool:
    """Return whether the names are Kohya's."""
    return any(name.endswith(".lora_down.weight") for name in names)


class _Module(NamedTuple):
    """A module of the base that a name of the file can mean."""

    name: str
    outputs: int


def as_peft(tensors: Mapping[str, Tensor], params: TensorCollection) -> tuple[dict[str, Tensor], Config]:
    """Return the leaves under PEFT's names, and their configuration.

    Raises:
        UnsupportedError: A name does not belong to LoRA, or two modules of the base have it.
    """
    modules = _modules_of(params)
    renamed: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, tensor in tensors.items():
        module, part = _find_module(name, modules)
        peft_name = f"{module.name}.{part}"
        is_second = module.name in alphas if part == "alpha" else peft_name in renamed
        if is_second:
            raise UnsupportedError(
                f"lora.load: two adapters of the file belong to the module {module.name!r}.",
                got=f"{name!r} is the second",
                hint="prefix= takes the leaves of one model out of a file of several: prefix='lora_unet_'.",
            )
        if part == "alpha":
            alphas[module.name] = _alpha(name, tensor)
            continue
        if part == "lora_magnitude_vector":
            _check_scales(name, tensor, module)
        if part == "lora_A.weight":
            ranks[module.name] = tensor.shape[0]
        renamed[peft_name] = tensor
    for name in alphas:
        if name not in ranks:
            raise LeafMismatchError(
                f"lora.load: the module {name!r} has an alpha, and no factors.",
                expected="lora_down.weight and lora_up.weight beside each alpha",
            )
    # Without an alpha the scale is 1.
    return renamed, Config(ranks=ranks, alphas=ranks | alphas)


def _find_module(name: str, modules: Mapping[str, list[_Module]]) -> tuple[_Module, str]:
    """Return the module that a leaf of the file belongs to, and PEFT's name of its part."""
    words, _, last = name.partition(".")
    # The first words name the model: lora_unet, lora_te1.
    found = modules.get(re.sub(r"^lora_[a-z0-9]+_", "", words), [])
    if last not in _PARTS or len(found) != 1:
        raise UnsupportedError(
            f"lora.load: the leaf {name!r} does not belong to exactly one module of the base.",
            expected="<model>_<module with underscores>.lora_down.weight, .lora_up.weight, .alpha or .dora_scale",
            got=f"{len(found)} modules of that name, and the part {last!r}",
            hint="prefix= takes the leaves of one model out of a file of several: prefix='lora_unet_'.",
        )
    return found[0], _PARTS[last]


def _modules_of(params: TensorCollection) -> dict[str, list[_Module]]:
    """Return the modules of the base by their names with underscores."""
    modules: dict[str, list[_Module]] = {}
    for entry in entries(params):
        for path in entry.paths:
            if path[-1] == "weight":
                outputs = entry.leaf.shape[0] if entry.leaf.ndim else 0
                module = _Module(".".join(path[:-1]), outputs)
                modules.setdefault("_".join(path[:-1]), []).append(module)
    return modules


def _alpha(name: str, tensor: Tensor) -> float:
    """Return the alpha of a leaf of one number."""
    if tensor.numel() != 1:
        raise LeafMismatchError(
            f"lora.load: the leaf {name!r} is not an alpha.", expected="one number", got=f"shape {tuple(tensor.shape)}"
        )
    return float(tensor)


def _check_scales(name: str, tensor: Tensor, module: _Module) -> None:
    """Raise unless the magnitudes belong to the outputs."""
    if tensor.ndim == 0 or tensor.shape[0] != module.outputs:
        raise UnsupportedError(
            f"lora.load: the scales {name!r} do not belong to the outputs.",
            expected=f"{module.outputs} scales, in the first dimension",
            got=f"shape {tuple(tensor.shape)}, which scales the inputs",
        )
