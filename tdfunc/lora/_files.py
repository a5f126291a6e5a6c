"""`load` and `save`: adapters in PEFT's folders, and in the files of Kohya's scripts."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdfunc._tensordict import TensorDict
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, UnsupportedError, error
from tdfunc.core.keys import Filter, FilterLike, at_paths, dotted
from tdfunc.core.types import Path
from tdfunc.lora._attach import LoraApply
from tdfunc.lora._config import Config, load_config, read_config
from tdfunc.lora._kohya import as_peft, is_kohya
from tdfunc.lora._lora import Lora
from tdfunc.lora._math import factors
from tdfunc.lora._peft import PREFIX, Adapter, check_table, read_adapters
from tdfunc.lora._targets import (
    FROZEN,
    Target,
    check_leaves,
    find_targets,
    layouts_of,
    make_tree,
    module_of,
    parts_of,
    read_parts,
)
from tdfunc.lora._writing import Written, add_names, check_target, config_of, whole_modules, write_parts
from tdfunc.modules.extract import from_module
from tdfunc.modules.functional import Apply
from tdfunc.ops.base.reading import entries, get, iter_items
from tdfunc.storage.api import load as load_tree
from tdfunc.storage.api import save as save_tree
from tdfunc.storage.disk.commit import replace_folder

if TYPE_CHECKING:
    from tdfunc.core.keys import Entry

# More are a filter by complete paths: each glob is matched against each leaf, and combined filters are nested.
_MAX_GLOBS = 32
_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"


def load(
    path: str | os.PathLike[str],
    params: TensorCollection,
    *,
    apply: "Apply | LoraApply | None" = None,
    prefix: str | None = None,
) -> tuple[Lora, TensorDict]:
    """Load adapters that PEFT or Kohya's scripts saved, as a choice and a tree of adapters.

    Every entry of the file must be supported. Adapters for which PEFT changes the base, such as with PiSSA and OLoRA,
    are an error.

    Args:
        path: A folder of PEFT, or a file of Kohya.
        params: The base of the adapters.
        apply: The function of the base. For a square weight, the orientation of its adapter can depend on it.
        prefix: The beginning of the names of this base, which is removed. Leaves under other names belong to other
            models and are ignored. By default PEFT's `base_model.model.` is removed, and no leaf is ignored.

    Returns:
        The pair (lora, adapters), for `lora.attach(apply)` and `lora.merge(params, adapters)`.

    Raises:
        FileNotFoundError: The folder does not contain an adapter in safetensors.
        LeafMismatchError: A leaf of the file does not belong to the base, or does not fit it.
        UnsupportedError: The configuration contains more than LoRA, an orientation is ambiguous, or the file changes
            one of two tied weights.
        ValueError: The adapters change nothing.

    Source:
        The files of PEFT 0.17 to 0.21. Before 0.19, PEFT used the first dimension of fused experts as their inputs.
    """
    name = os.fspath(path)
    config: Config | None = None
    if os.path.isdir(name):
        config = read_config(load_config(_find_config(name)))
        name = os.path.join(name, _TENSORS)
    loaded = load_tree(name)
    tensors = {dotted(at): leaf for at, leaf in iter_items(loaded, True, True)}
    begin = prefix if prefix is not None else PREFIX
    if prefix is not None:
        tensors = {key: leaf for key, leaf in tensors.items() if key.startswith(prefix)}
    # The beginning that only the names in the configuration have.
    outer = begin.removeprefix(PREFIX)
    if is_kohya(tensors):
        tensors, config = as_peft(tensors, params)
        outer = ""
    elif config is None:
        raise UnsupportedError(
            f"lora.load: {name!r} must be a folder of PEFT or a file of Kohya.",
            got=f"a file with leaves like {next(iter(tensors), None)!r}",
        )
    tensors = {key.removeprefix(begin): leaf for key, leaf in tensors.items()}
    layouts = None
    if apply is not None:
        layouts = layouts_of(module_of(apply))
    adapters, whole = read_adapters(tensors, config, params, layouts, outer)
    if apply is not None:
        for adapter in adapters:
            check_table(adapter, module_of(apply))
    if all(map(_is_nothing, adapters)) and all(
        torch.equal(leaf, get(params, at).to(leaf.dtype)) for at, leaf in whole.items()
    ):
        raise error(
            ValueError,
            f"lora.load: the adapters in {name!r} must change something.",
            expected="a factor B, or a leaf, that is not as before the training",
            got=f"{len(adapters)} adapters, all of which are zero",
            hint="save the adapters after the training; lora.init makes fresh ones.",
        )
    lora = _as_lora(adapters, whole, config, params)
    tree = make_tree(
        {(*adapter.paths[0], part): leaf for adapter in adapters for part, leaf in adapter.parts.items()} | whole
    )
    read_parts(lora, params, tree, "lora.load")
    return lora, tree


def _find_config(folder: str) -> str:
    """Return the path of the configuration in a folder that also has the tensors."""
    names = sorted(os.listdir(folder))
    if _CONFIG not in names or _TENSORS not in names:
        raise error(
            FileNotFoundError,
            f"lora.load: {folder!r} must hold an adapter.",
            expected=f"{_CONFIG} and {_TENSORS}",
            got=", ".join(names[:10]) or "nothing",
            hint="adapter_model.bin is a pickle, which is never read: load it with peft and save it again."
            if "adapter_model.bin" in names
            else None,
        )
    return os.path.join(folder, _CONFIG)


def _is_nothing(adapter: Adapter) -> bool:
    parts = adapter.parts
    if "magnitude" in parts or ("bias" in parts and parts["bias"].any()):
        return False
    return not (parts["A"].any() and parts["B"].any())


def _as_lora(
    adapters: Sequence[Adapter], whole: Mapping[Path, Tensor], config: Config, params: TensorCollection
) -> Lora:
    found = entries(params)
    ranks = {adapter.paths[0]: adapter.rank for adapter in adapters}
    alphas = {adapter.paths[0]: adapter.alpha for adapter in adapters}
    parts = {tuple(sorted(adapter.parts)) for adapter in adapters}
    if len(parts) > 1:
        raise LeafMismatchError("lora.load: all adapters must have the same parts.", got=sorted(parts))
    names = next(iter(parts), ())
    return Lora(
        _filter(ranks, found) if ranks else Filter(lambda path, leaf: False),
        rank=_by_value(ranks, found),
        alpha=_by_value(alphas, found),
        rslora=config.rslora,
        dora="magnitude" in names,
        bias="bias" in names,
        dropout=config.dropout,
        whole=_filter(whole, found) if whole else None,
    )


def _by_value(values: Mapping[Path, Any], found: "Sequence[Entry]") -> Any:
    """Return one value for all paths, or a dict of filters."""
    groups: dict[Any, list[Path]] = {}
    for path, value in values.items():
        groups.setdefault(value, []).append(path)
    if len(groups) < 2:
        return next(iter(groups), 1)
    chosen = [entry for entry in found if entry.paths[0] in values]
    most = max(groups, key=lambda value: len(groups[value]))
    return {_filter(paths, chosen): value for value, paths in groups.items() if value != most} | {"*": most}


def _filter(paths: "Mapping[Path, Any] | Sequence[Path]", found: "Sequence[Entry]") -> FilterLike:
    """Return a filter for the leaves at these paths: globs by their last keys where a few of these choose no others."""
    wanted = set(paths)
    ends = {".".join(path[-2:]) for path in wanted}
    if len(ends) > _MAX_GLOBS:
        return at_paths(wanted)
    first, *others = [f"*{end}" for end in sorted(ends)]
    globs: FilterLike = first
    for other in others:
        globs = Filter(globs) | other
    chosen = Filter(globs).mask(found)
    if {entry.paths[0] for entry, is_in in zip(found, chosen, strict=True) if is_in} == wanted:
        return globs
    return at_paths(wanted)


def save(
    folder: str | os.PathLike[str],
    lora: Lora,
    adapters: TensorCollection,
    apply: "Apply | LoraApply",
    *,
    config: Mapping[str, Any] | None = None,
    fsync: bool = True,
) -> None:
    """Save adapters as a folder that PEFT loads; at every moment it contains either the old adapter or the new one.

    A start of `"pissa"` or `"olora"` is written as plain LoRA of twice the rank, relative to the base itself.

    Args:
        folder: The folder; other files in it stay.
        lora: The choice.
        adapters: The adapters of one model, not stacked.
        apply: The function of the base, which contains the layers of the weights.
        config: Further entries of `adapter_config.json`, such as `{"task_type": "CAUSAL_LM"}`.
        fsync: Wait until the data is on the disk.

    Raises:
        TreeStructureError: The adapters and `lora` have different leaves.
        LeafMismatchError: A leaf has another shape. Save stacked adapters one by one.
        UnsupportedError: PEFT does not have such adapters: DoRA of experts, changes of grouped convolutions, or modules
            that are partly trained whole.
    """
    module = module_of(apply)
    base = from_module(module)
    targets, whole = find_targets(lora, entries(base), layouts_of(module))
    shapes = {(*t.path, name): size for t in targets for name, size in parts_of(lora, t).items()}
    given = check_leaves("lora.save", shapes | {entry.paths[0]: entry.leaf.shape for entry in whole}, adapters)
    tensors: dict[str, Tensor] = {}
    written = Written(set(), set(), {}, {})
    experts: dict[Path, list[Path]] = {}
    for target in targets:
        if target.layout.is_experts:
            experts.setdefault(target.path[:-1], []).append(target.path)
    for target in targets:
        check_target(target, lora, module)
        tensors |= _tensors_of(lora, target, experts, given)
        rank = target.rank * (1 if lora.start == "kaiming" else 2)
        add_names(written, target, rank, rslora=lora.rslora)
    replaced = whole_modules(whole, written.modules, base, module)
    ready = config_of(lora, targets, written, module, replaced.bias, replaced.modules)
    tensors |= {name: given[path].detach() for path, name in replaced.names.items()}
    tree = TensorDict({PREFIX + name: leaf.contiguous() for name, leaf in tensors.items()}).unflatten_keys(".")
    text = json.dumps(ready | dict(config or {}), indent=2, sort_keys=True)
    target = os.path.abspath(os.fspath(folder))

    def write(new: str) -> None:
        if os.path.isdir(target):
            shutil.copytree(target, new, symlinks=True, dirs_exist_ok=True)
        save_tree(tree, os.path.join(new, _TENSORS), fsync=fsync)
        with open(os.path.join(new, _CONFIG), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if fsync:
                os.fsync(file.fileno())

    replace_folder(target, write, fsync=fsync)


def _tensors_of(
    lora: Lora, target: Target, experts: Mapping[Path, Sequence[Path]], given: Mapping[Path, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of one weight's adapter, for each of its layers; `experts` are the parameters by module."""
    parts = {name: given[(*target.path, name)].detach() for name in parts_of(lora, target)}
    parts["A"], parts["B"] = factors(parts)
    plain = {name: part for name, part in parts.items() if name not in FROZEN}
    tensors: dict[str, Tensor] = {}
    for path in target.paths:
        # Parameters of one module are nested, in the order of the targets.
        same = []
        if target.layout.is_experts:
            same = experts.get(path[:-1], [])
        outer = 0
        if same:
            outer = len(same) - 1 - same.index(path)
        tensors |= write_parts(target, path, plain, outer)
    return tensors
