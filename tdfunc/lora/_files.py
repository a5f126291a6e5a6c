"""`load` and `save`: adapters in PEFT's folders, and in the files of Kohya's scripts."""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from statistics import mode
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tdfunc._tensordict import TensorDict
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, UnsupportedError, error
from tdfunc.core.keys import Filter, FilterLike, dotted
from tdfunc.core.types import Kind, Path
from tdfunc.lora._attach import LoraApply
from tdfunc.lora._kohya import as_peft, is_kohya
from tdfunc.lora._lora import Lora
from tdfunc.lora._math import factors
from tdfunc.lora._peft import PREFIX, VERSION, Adapter, check_config, read_adapters, short_names, write_parts
from tdfunc.lora._targets import (
    Layout,
    check_leaves,
    find_targets,
    layouts_of,
    make_tree,
    module_of,
    parts_of,
    read_parts,
)
from tdfunc.modules.extract import from_module
from tdfunc.modules.functional import Apply
from tdfunc.ops.base.reading import entries, get, iter_items
from tdfunc.storage.api import load as load_tree
from tdfunc.storage.api import save as save_tree
from tdfunc.storage.disk.commit import replace_folder

if TYPE_CHECKING:
    from tdfunc.core.keys import Entry

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"


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
    config: dict[str, Any] = {}
    if os.path.isdir(name):
        config, name = _read_config(name), os.path.join(name, _TENSORS)
        check_config(config)
    loaded = load_tree(name)
    tensors = {dotted(at): leaf for at, leaf in iter_items(loaded, True, True)}
    begin = prefix if prefix is not None else PREFIX
    if prefix is not None:
        tensors = {key: leaf for key, leaf in tensors.items() if key.startswith(prefix)}
    if is_kohya(tensors):
        tensors, config = as_peft(tensors, params)
    elif not config:
        raise UnsupportedError(
            f"lora.load: {name!r} must be a folder of PEFT or a file of Kohya.",
            got=f"a file with leaves like {next(iter(tensors), None)!r}",
        )
    tensors = {key.removeprefix(begin): leaf for key, leaf in tensors.items()}
    layouts = layouts_of(module_of(apply)) if apply is not None else None
    adapters, whole = read_adapters(tensors, config, params, layouts)
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


def _read_config(folder: str) -> dict[str, Any]:
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
    with open(os.path.join(folder, _CONFIG), encoding="utf-8") as file:
        return json.load(file)


def _is_nothing(adapter: Adapter) -> bool:
    parts = adapter.parts
    if "magnitude" in parts or ("bias" in parts and parts["bias"].any()):
        return False
    return not (parts["A"].any() and parts["B"].any())


def _as_lora(
    adapters: Sequence[Adapter], whole: Mapping[Path, Tensor], config: Mapping[str, Any], params: TensorCollection
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
        rslora=bool(config.get("use_rslora")),
        dora="magnitude" in names,
        bias="bias" in names,
        dropout=config.get("lora_dropout", 0.0),
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
    """Return a filter for the leaves at these paths: globs by their last keys where these choose no others."""
    wanted = set(paths)
    first, *others = [f"*{end}" for end in sorted({".".join(path[-2:]) for path in wanted})]
    globs: FilterLike = first
    for other in others:
        globs = Filter(globs) | other
    chosen = Filter(globs).mask(found)
    if {entry.paths[0] for entry, is_in in zip(found, chosen, strict=True) if is_in} == wanted:
        return globs
    return Filter(re.compile("|".join(re.escape(dotted(path)) for path in sorted(wanted))))


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
    base = from_module(apply.module)
    targets, whole = find_targets(lora, entries(base), layouts_of(apply.module))
    shapes = {(*t.path, name): size for t in targets for name, size in parts_of(lora, t).items()}
    given = check_leaves("lora.save", shapes | {entry.paths[0]: entry.leaf.shape for entry in whole}, adapters)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    chosen: dict[bool, set[str]] = {False: set(), True: set()}
    for target in targets:
        layout, paths = target.layout, target.paths
        if layout.is_experts and lora.dora:
            raise _no_peft(target.path, "DoRA of fused experts")
        if layout is Layout.CONV and getattr(apply.module.get_submodule(dotted(target.path[:-1])), "groups", 1) > 1:
            raise _no_peft(target.path, "the change of a grouped convolution")
        if len(target.path) < 2:
            raise _no_peft(target.path, "a layer without a name")
        parts = {name: given[(*target.path, name)] for name in parts_of(lora, target)}
        parts["A"], parts["B"] = (part.detach() for part in factors(parts))
        rank = parts["B"].shape[-1]
        for path in paths:
            later = [t.path for t in targets if layout.is_experts and t.path[:-1] == path[:-1]]
            named = dotted(path if layout.is_experts else path[:-1])
            plain = {name: part.detach() for name, part in parts.items() if name not in ("A0", "B0")}
            tensors |= write_parts(target, path, plain, len(later) - 1 - later.index(path) if later else 0)
            ranks["^" + re.escape(named)] = rank
            alpha = target.scale * (math.sqrt(rank) if lora.rslora else rank)
            # Some servers take whole numbers only.
            alphas["^" + re.escape(named)] = round(alpha) if math.isclose(alpha, round(alpha)) else alpha
            chosen[layout.is_experts].add(named)
    everything = [dotted(path[:-1]) for entry in entries(base) for path in entry.paths]
    leaves = [dotted(path) for entry in entries(base) for path in entry.paths]
    ready = _config_of(ranks, alphas, lora)
    ready |= {
        "target_modules": short_names(chosen[False], sorted(set(everything))),
        "target_parameters": short_names(chosen[True], leaves) or None,
        "fan_in_fan_out": any(target.layout is Layout.TRANSPOSED for target in targets),
        "ensure_weight_tying": any(len(target.paths) > 1 for target in targets),
        "base_model_name_or_path": getattr(getattr(apply.module, "config", None), "_name_or_path", None),
    }
    names, ready["bias"], ready["modules_to_save"] = _whole_modules(whole, chosen[False], base)
    tensors |= {name: given[path].detach() for path, name in names.items()}
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


def _no_peft(path: Path, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"lora.save: PEFT has no adapter like that of {dotted(path)!r}.",
        got=what,
        hint="tdf.save(adapters, path) keeps every tree; lora.merge(params, adapters) has it in the weights.",
    )


def _config_of(ranks: Mapping[str, int], alphas: Mapping[str, float], lora: Lora) -> dict[str, Any]:
    rank = mode(ranks.values()) if ranks else 1
    alpha = mode(alphas.values()) if alphas else 1.0
    return {
        "peft_type": "LORA",
        "peft_version": VERSION,
        "task_type": None,
        "inference_mode": True,
        "init_lora_weights": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "lora_dropout": lora.dropout,
        "lora_bias": lora.bias,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
    }


def _whole_modules(
    whole: "Sequence[Entry]", adapted: set[str], base: TensorCollection
) -> tuple[dict[Path, str], str, list[str] | None]:
    """Return the names of leaves that are replaced, and PEFT's options `bias` and `modules_to_save` for them."""
    paths = {entry.paths[0] for entry in whole}
    for entry in whole:
        if len(entry.paths) > 1:
            raise _no_peft(entry.paths[0], "a tied weight that is trained whole")
    biases = {e.paths[0] for e in entries(base) if e.paths[0][-1] == "bias" and e.kind is Kind.PARAMETER}
    of_adapted = {path for path in biases if dotted(path[:-1]) in adapted}
    bias, taken = "none", set[Path]()
    for option, group in (("all", biases), ("lora_only", of_adapted)):
        if group and group <= paths and bias == "none":
            bias, taken = option, group
    modules = sorted({dotted(path[:-1]) for path in paths - taken})
    for name in modules:
        own = {e.paths[0] for e in entries(base) if dotted(e.paths[0][:-1]) == name and e.kind is Kind.PARAMETER}
        if not own <= paths or name in adapted:
            raise _no_peft(min(own), "a module of which some leaves are trained whole")
    names = {
        path: f"{dotted(path[:-1])}.base_layer.bias" if path in taken and dotted(path[:-1]) in adapted else dotted(path)
        for path in paths
    }
    return names, bias, modules or None
