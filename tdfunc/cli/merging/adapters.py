"""Models that a configuration names with an adapter, `base+adapter`: each is merged into a folder first."""

import os
import tempfile
from contextlib import ExitStack
from typing import NamedTuple

from tdfunc.cli.merging.config import Config
from tdfunc.cli.output import note, safe
from tdfunc.core.errors import error
from tdfunc.llm.folders.files import read_beside, write_beside
from tdfunc.lora import load as load_adapter
from tdfunc.storage.api import load, save

_ADAPTER = "adapter_config.json"


class Adapted(NamedTuple):
    """The path of a base, and the folder of its adapter."""

    base: str
    adapter: str


def is_adapter(path: str) -> bool:
    """Return whether a path is a folder with an adapter of PEFT."""
    return os.path.isfile(os.path.join(path, _ADAPTER))


def find_adapted(path: str) -> Adapted | None:
    """Return the parts of `base+adapter`; None for another path, also if it has a plus.

    Raises:
        FileNotFoundError: The base exists, and the adapter does not.
    """
    base, plus, adapter = path.rpartition("+")
    if not plus or os.path.exists(path) or not os.path.exists(base):
        return None
    if not is_adapter(adapter):
        raise error(
            FileNotFoundError,
            f"merge {path}: {adapter} is not a folder with an adapter.",
            expected=f"BASE+ADAPTER, with {_ADAPTER} in the folder of the adapter",
            got=f"the base {base}, which exists",
            hint="tdf.lora.save and save_pretrained of peft write such folders.",
        )
    return Adapted(base, adapter)


def with_merged_adapters(config: Config, stack: ExitStack) -> Config:
    """Return a configuration in which a model with an adapter is a folder with the adapter in its weights.

    The folders are temporary. Each has the size of its base, which memory holds while its adapter is merged.

    Args:
        config: The configuration.
        stack: The folders are removed when it is closed.

    Raises:
        LeafMismatchError: A leaf of an adapter does not belong to its base.
        UnsupportedError: An adapter is more than LoRA.
    """
    found = {path: find_adapted(path) for path in config.models}
    merged: dict[str, str] = {}
    for path, adapted in found.items():
        if adapted is not None:
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="tdfunc-merge-"))
            merged[path] = os.path.join(place, os.path.basename(path) or "model")
            note(f"merge: {safe(adapted.adapter)} is merged into {safe(adapted.base)} first.")
            _merge(adapted, merged[path])
    return config.with_models(merged)


def _merge(adapted: Adapted, folder: str) -> None:
    """Write a base with the adapter in its weights, and the files beside the base."""
    params = load(adapted.base)
    lora, adapters = load_adapter(adapted.adapter, params)
    os.makedirs(folder)
    save(lora.merge(params, adapters), os.path.join(folder, "model.safetensors"), fsync=False)
    if os.path.isdir(adapted.base):
        write_beside(folder, read_beside(adapted.base))
