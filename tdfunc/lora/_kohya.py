"""Kohya's files of adapters: `lora_unet_a_b.lora_down.weight`, `.lora_up.weight`, `.alpha` and `.dora_scale`.

The name of a module has underscores for its dots, so modules are found by the paths of the base.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import UnsupportedError
from tdfunc.core.types import Path
from tdfunc.ops.base.reading import entries

_PARTS = {
    "lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight", "dora_scale": "lora_magnitude_vector",
    "alpha": "alpha",
}  # fmt: skip


def is_kohya(names: Mapping[str, Any]) -> bool:
    """Return whether the names are Kohya's."""
    return any(name.endswith(".lora_down.weight") for name in names)


def as_peft(tensors: Mapping[str, Tensor], params: TensorCollection) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the leaves under PEFT's names, and their configuration.

    Raises:
        UnsupportedError: A name does not belong to LoRA, or two modules of the base have it.
    """
    modules: dict[str, list[Path]] = {}
    outputs: dict[str, int] = {}
    for entry in entries(params):
        for path in entry.paths:
            if path[-1] == "weight":
                modules.setdefault("_".join(path[:-1]), []).append(path[:-1])
                outputs["_".join(path[:-1])] = entry.leaf.shape[0]
    renamed: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, tensor in tensors.items():
        words, _, last = name.partition(".")
        # The first words name the model: lora_unet, lora_te1.
        found = modules.get(re.sub(r"^lora_[a-z0-9]+_", "", words), [])
        if last not in _PARTS or len(found) != 1:
            raise UnsupportedError(
                f"lora.load: the leaf {name!r} must belong to one module of the base.",
                expected="<model>_<module with underscores>.lora_down.weight, .lora_up.weight, .alpha or .dora_scale",
                got=f"{len(found)} modules of that name, and the part {last!r}",
                hint="prefix= takes the leaves of one model out of a file of several: prefix='lora_unet_'.",
            )
        module, part = ".".join(found[0]), _PARTS[last]
        if part == "lora_magnitude_vector" and tensor.shape[0] != outputs["_".join(found[0])]:
            raise UnsupportedError(
                f"lora.load: the scales {name!r} must belong to the outputs.",
                expected=f"{outputs['_'.join(found[0])]} scales, in the first dimension",
                got=f"shape {tuple(tensor.shape)}, which scales the inputs",
            )
        if part == "alpha":
            alphas[re.escape(module)] = float(tensor)
        else:
            renamed[f"{module}.{part}"] = tensor
            if part == "lora_A.weight":
                ranks[re.escape(module)] = tensor.shape[0]
    config = {"peft_type": "LORA", "rank_pattern": ranks, "alpha_pattern": ranks | alphas}
    return renamed, config | {"use_dora": any("magnitude" in name for name in renamed)}
