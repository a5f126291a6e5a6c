"""`load` and `save`: adapters in PEFT's folders, and in the files of Kohya's scripts."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdfunc._tensordict import TensorDict
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, UnsupportedError, error
from tdfunc.core.keys import Entry, Filter, FilterLike, dotted
from tdfunc.core.system import platform
from tdfunc.core.types import Path
from tdfunc.lora._attach import LoraApply
from tdfunc.lora.files.config import Config, load_config, read_config
from tdfunc.lora.files.kohya import as_peft, is_kohya
from tdfunc.lora.files.peft import PREFIX, Adapter, check_table, read_adapters, read_base
from tdfunc.lora.files.tokens import read_tables, take_rows, write_embeddings, write_rows
from tdfunc.lora.files.writing import check_target, config_of, list_layers, whole_modules, write_parts
from tdfunc.lora.lora import Lora
from tdfunc.lora.math import factors
from tdfunc.lora.selection import by_value, filter_of
from tdfunc.lora.targets import (
    FROZEN,
    Table,
    Target,
    check_leaves,
    find_tables,
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
from tdfunc.ops.edits.edit import set_
from tdfunc.storage.api import load as load_tree
from tdfunc.storage.api import save as save_tree
from tdfunc.storage.disk import commit
from tdfunc.storage.disk.remote import as_name, local_folder

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
    contents = _read_file(as_name(path), params, prefix)
    layouts = None
    if apply is not None:
        layouts = layouts_of(module_of(apply))
    rows = take_rows(contents.tensors)
    tables = read_tables(rows, contents.config.tokens, params, contents.outer)
    paths = _table_paths(rows, params)
    adapters, whole = read_adapters(contents.tensors, contents.config, params, layouts, contents.outer, paths)
    if apply is not None:
        for adapter in adapters:
            check_table(adapter, module_of(apply))
    has_rows = any([not torch.equal(table.rows_in(table.leaf), own.to(table.leaf.dtype)) for table, own in tables])
    if not has_rows and _change_nothing(adapters, whole, params):
        raise error(
            ValueError,
            f"lora.load: the adapters in {contents.file!r} change nothing.",
            expected="a factor B, or a leaf, that is not as before the training",
            got=f"{len(adapters)} adapters, all of which are zero",
            hint="save the adapters after the training; lora.init makes fresh ones.",
        )
    lora = _as_lora(adapters, whole, contents.config, params)
    if tables:
        found = entries(params)
        lora = replace(
            lora, trainable_token_indices={filter_of([table.path], found): table.indices for table, _ in tables}
        )
    leaves: dict[Path, Tensor] = {}
    for adapter in adapters:
        for part, leaf in adapter.parts.items():
            leaves[(*adapter.paths[0], part)] = leaf
    leaves |= {table.key: own for table, own in tables}
    tree = make_tree(leaves | whole)
    read_parts(lora, params, tree, "lora.load")
    return lora, tree


def load_base(
    path: str | os.PathLike[str],
    params: TensorCollection,
    *,
    prefix: str | None = None,
) -> TensorCollection:
    """Return a base with the embeddings that a folder of PEFT has, for adapters of a vocabulary that was resized.

    With `save_embedding_layers`, PEFT saves embeddings beside adapters, and writes them into the model that it loads
    the adapters for. It does so if the vocabulary was resized, or an embedding has an adapter. `load` returns those
    without an adapter among the leaves that are trained whole. This function returns a base with all others, and with
    those that have another number of rows.

    Args:
        path: A folder of PEFT.
        params: The base of the adapters.
        prefix: The beginning of the names of this base, as for `load`.

    Returns:
        The base for `load(path, base)`, with the leaves of `params` in place of those that the file does not have.

    Raises:
        LeafMismatchError: A table of the file does not fit the base.

    Examples:
        >>> import tempfile
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20))
        >>> apply, params, _ = tdf.functional(model)
        >>> lora = tdf.lora.Lora("transformer.wte.weight", rank=1)
        >>> adapters = lora.init(params, key=0, apply=apply).apply(torch.ones_like)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tdf.lora.save(f"{folder}/a", lora, adapters, apply, base=params)
        ...     base = tdf.lora.load_base(f"{folder}/a", params * 2)
        >>> torch.equal(base["transformer", "wte", "weight"], params["transformer", "wte", "weight"])
        True
    """
    contents = _read_file(as_name(path), params, prefix)
    rows = take_rows(contents.tensors)
    found = read_base(contents.tensors, contents.config, params, contents.outer, _table_paths(rows, params))
    base = params
    for entry in entries(params):
        given = [found[path] for path in entry.paths if path in found]
        if given:
            base = set_(base, entry.paths[0], given[0].to(entry.leaf.dtype))
    return base


def _table_paths(rows: Mapping[str, Tensor], params: TensorCollection) -> list[Path]:
    """Return all paths of the tables of which a file has rows."""
    names = {(*name.split("."), "weight") for name in rows}
    paths: list[Path] = []
    for entry in entries(params):
        if not names.isdisjoint(entry.paths):
            paths += entry.paths
    return paths


class _Contents(NamedTuple):
    """An adapter on disk, in PEFT's form.

    Attributes:
        file: The path of the tensors.
        tensors: The leaves by their names, without the beginning that is removed.
        config: The configuration.
        outer: The beginning that only the names in the configuration have.
    """

    file: str
    tensors: dict[str, Tensor]
    config: Config
    outer: str


def _read_file(name: str, params: TensorCollection, prefix: str | None) -> _Contents:
    """Return the contents of a folder of PEFT, or of a file of Kohya."""
    config: Config | None = None
    if os.path.isdir(name):
        config = read_config(load_config(_find_config(name)))
        name = os.path.join(name, _TENSORS)
    loaded = load_tree(name)
    tensors = {dotted(path): leaf for path, leaf in iter_items(loaded, True, True)}
    begin = PREFIX
    if prefix is not None:
        begin = prefix
        tensors = {key: leaf for key, leaf in tensors.items() if key.startswith(prefix)}
    if is_kohya(tensors):
        tensors, config = as_peft(tensors, params)
        return _Contents(name, tensors, config, outer="")
    if config is None:
        raise UnsupportedError(
            f"lora.load: {name!r} is neither a folder of PEFT nor a file of Kohya.",
            got=f"a file with leaves like {next(iter(tensors), None)!r}",
        )
    tensors = {key.removeprefix(begin): leaf for key, leaf in tensors.items()}
    return _Contents(name, tensors, config, outer=begin.removeprefix(PREFIX))


def _find_config(folder: str) -> str:
    """Return the path of the configuration in a folder that also has the tensors."""
    names = sorted(os.listdir(folder))
    if _CONFIG not in names or _TENSORS not in names:
        hint = None
        if "adapter_model.bin" in names:
            hint = "adapter_model.bin is a pickle, which is never read: load it with peft and save it again."
        raise error(
            FileNotFoundError,
            f"lora.load: {folder!r} does not hold an adapter.",
            expected=f"{_CONFIG} and {_TENSORS}",
            got=", ".join(names[:10]) or "nothing",
            hint=hint,
        )
    return os.path.join(folder, _CONFIG)


def _change_nothing(adapters: Sequence[Adapter], whole: Mapping[Path, Tensor], params: TensorCollection) -> bool:
    """Return whether the base with these adapters, and leaves that are trained whole, is the base."""
    if not all(map(_is_nothing, adapters)):
        return False
    return all(torch.equal(leaf, get(params, path).to(leaf.dtype)) for path, leaf in whole.items())


def _is_nothing(adapter: Adapter) -> bool:
    parts = adapter.parts
    if "magnitude" in parts:
        return False
    if "bias" in parts and parts["bias"].any():
        return False
    return not (parts["A"].any() and parts["B"].any())


def _as_lora(
    adapters: Sequence[Adapter], whole: Mapping[Path, Tensor], config: Config, params: TensorCollection
) -> Lora:
    """Return the choice that has the adapters, and the leaves trained whole, of a file."""
    part_names = {tuple(sorted(adapter.parts)) for adapter in adapters}
    if len(part_names) > 1:
        raise LeafMismatchError("lora.load: the adapters have different parts.", got=sorted(part_names))
    names = next(iter(part_names), ())
    found = entries(params)
    ranks = {adapter.paths[0]: adapter.rank for adapter in adapters}
    alphas = {adapter.paths[0]: adapter.alpha for adapter in adapters}
    where: FilterLike = Filter(lambda path, leaf: False)
    if adapters:
        where = filter_of(ranks, found)
    trained = None
    if whole:
        trained = filter_of(whole, found)
    return Lora(
        where,
        rank=by_value(ranks, found),
        alpha=by_value(alphas, found),
        rslora=config.rslora,
        dora="magnitude" in names,
        bias="bias" in names,
        dropout=config.dropout,
        whole=trained,
    )


def save(
    folder: str | os.PathLike[str],
    lora: Lora,
    adapters: TensorCollection,
    apply: "Apply | LoraApply",
    *,
    config: Mapping[str, Any] | None = None,
    base: TensorCollection | None = None,
    fsync: bool = True,
) -> None:
    """Save adapters as a folder that PEFT loads.

    A new folder, and one with an adapter alone, contains either the old adapter or the new one at every moment. In a
    folder with other files, which stay, the old configuration is removed first: for a moment there is no adapter.

    A start of `"pissa"` or `"olora"` is written as plain LoRA of twice the rank, relative to the base itself.

    Args:
        folder: The folder.
        lora: The choice.
        adapters: The adapters of one model, not stacked.
        apply: The function of the base, which contains the layers of the weights.
        config: Further entries of `adapter_config.json`, such as `{"task_type": "CAUSAL_LM"}`.
        base: The base, if its embeddings and its head are written beside the adapters, as PEFT does for a vocabulary
            that was resized (`model.resize_token_embeddings`): a fresh model has other rows for the new tokens.
        fsync: Wait until the data is on the disk.

    Raises:
        TreeStructureError: The adapters and `lora` have different leaves.
        LeafMismatchError: A leaf has another shape. Save stacked adapters one by one.
        UnsupportedError: PEFT does not have such adapters: DoRA of experts, changes of grouped convolutions, or modules
            that are partly trained whole.
    """
    place = local_folder(
        folder, "lora.save", reason="files are locked and renamed", hint="save to a local folder, and upload it."
    )
    module = module_of(apply)
    skeleton = from_module(module)
    targets, whole = find_targets(lora, entries(skeleton), layouts_of(module))
    tables = find_tables(lora, entries(skeleton))
    given = _given_leaves(lora, targets, whole, tables, adapters)
    for target in targets:
        check_target(target, lora, module)
    layers = list_layers(lora, targets)
    replaced = whole_modules(whole, layers.modules, skeleton, module)
    entries_of_config = config_of(lora, targets, layers, module, replaced) | dict(config or {})
    tensors = _adapter_tensors(lora, targets, given)
    if tables:
        rows, indices = write_rows(tables, given, module)
        tensors |= rows
        entries_of_config.setdefault("trainable_token_indices", indices)
    if base is not None:
        tensors |= write_embeddings(base, module, layers.modules, tables)
    for path, name in replaced.names.items():
        tensors[name] = given[path].detach()
    tree = TensorDict({PREFIX + name: leaf.contiguous() for name, leaf in tensors.items()}).unflatten_keys(".")
    text = json.dumps(entries_of_config, indent=2, sort_keys=True)
    # A link stays, and the folder that it leads to is replaced.
    _write_folder(os.path.realpath(place), tree, text, fsync=fsync)


def _given_leaves(
    lora: Lora,
    targets: Sequence[Target],
    whole: Sequence[Entry],
    tables: Sequence[Table],
    adapters: TensorCollection,
) -> dict[Path, Tensor]:
    """Return the leaves of adapters by their paths; raise unless they are the leaves of the choice."""
    shapes: dict[Path, torch.Size | None] = {}
    for target in targets:
        for name, shape in parts_of(lora, target).items():
            shapes[(*target.path, name)] = shape
    for entry in whole:
        shapes[entry.paths[0]] = entry.leaf.shape
    for table in tables:
        shapes[table.key] = table.shape
    return check_leaves("lora.save", shapes, adapters)


def _adapter_tensors(lora: Lora, targets: Sequence[Target], given: Mapping[Path, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all adapters by PEFT's names, for each layer of each weight."""
    # The adapted parameters of a module of experts, which PEFT nests in the order of the targets.
    experts: dict[Path, list[Path]] = {}
    for target in targets:
        if target.layout.is_experts:
            for path in target.paths:
                experts.setdefault(path[:-1], []).append(path)
    tensors: dict[str, Tensor] = {}
    for target in targets:
        parts = {name: given[(*target.path, name)].detach() for name in parts_of(lora, target)}
        parts["A"], parts["B"] = factors(parts)
        plain = {name: part for name, part in parts.items() if name not in FROZEN}
        for path in target.paths:
            later = 0
            if target.layout.is_experts:
                siblings = experts[path[:-1]]
                later = len(siblings) - 1 - siblings.index(path)
            tensors |= write_parts(target, path, plain, later)
    return tensors


def _write_folder(folder: str, tree: TensorDict, config: str, *, fsync: bool) -> None:
    """Replace the adapter in a folder; other files in it stay."""

    def write(new: str) -> None:
        save_tree(tree, os.path.join(new, _TENSORS), fsync=fsync)
        with open(os.path.join(new, _CONFIG), "w", encoding="utf-8") as file:
            file.write(config)
            file.flush()
            if fsync:
                platform.sync_file(file.fileno())

    def check() -> None:
        if os.path.isdir(folder) and not _is_adapter_alone(folder):
            raise FileExistsError(f"lora.save {folder}: another program uses the folder.")

    # An empty folder may be one that another program has just made for its own files.
    is_new = not os.path.isdir(folder)
    if is_new or _is_adapter_alone(folder):
        try:
            commit.replace_folder(folder, write, call="lora.save", check=check, overwrite=not is_new, fsync=fsync)
            return
        except FileExistsError:
            # A program has put files into it since the first look.
            if not os.path.isdir(folder):
                raise
    _replace_inside(folder, write, fsync=fsync)


def _is_adapter_alone(folder: str) -> bool:
    """Return whether a folder has an adapter and nothing else, and is not the current folder."""
    names = set(os.listdir(folder))
    if not names or names - {_TENSORS, _CONFIG}:
        return False
    try:
        return not os.path.samefile(folder, os.getcwd())
    except FileNotFoundError:
        # The current folder was deleted.
        return True


def _replace_inside(folder: str, write: Callable[[str], None], *, fsync: bool) -> None:
    """Move new files into a folder that stays itself, so that the open log of a program remains in it."""
    tensors = os.path.join(folder, _TENSORS)
    config = os.path.join(folder, _CONFIG)
    with commit.naming("lora.save", folder, "the adapter was not replaced"), commit.locked(folder):
        commit.sweep(folder, tensors)
        with commit.staged_folder(tensors) as new:
            write(new)
            # First, so that no reader meets the configuration of one adapter with the factors of another one.
            with suppress(FileNotFoundError):
                platform.remove(config)
            platform.replace(os.path.join(new, _TENSORS), tensors)
            platform.replace(os.path.join(new, _CONFIG), config)
        if fsync:
            commit.sync_folder(folder)
