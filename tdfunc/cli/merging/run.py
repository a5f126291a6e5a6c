"""`merge`: read, merge and write leaf by leaf; then the files beside the weights."""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdfunc import random
from tdfunc.cli.average import unequal_values
from tdfunc.cli.convert import Target, find_dtype, make_target, write
from tdfunc.cli.merging.config import Config
from tdfunc.cli.merging.recipe import Models, Recipe, Row, plan
from tdfunc.cli.merging.vocabulary import Vocabulary, make_vocabulary
from tdfunc.cli.numbers import cast, has_values
from tdfunc.cli.output import note, progress, safe, shown
from tdfunc.cli.scales import HINT, check_cast, check_equal_codes, kept_leaves
from tdfunc.cli.sources import Source, open_source, stored_leaves
from tdfunc.core.collection import LeafOp
from tdfunc.core.errors import LeafMismatchError, UnsupportedError
from tdfunc.core.keys import dotted
from tdfunc.llm.folders.files import read_beside, write_beside
from tdfunc.ops.display.text import count_text
from tdfunc.storage.disk.remote import is_remote
from tdfunc.storage.tree.build import without_values
from tdfunc.weights.method import leaf_key

# The ids of codes, and of the leaves that belong to them, in each model.
Codes: TypeAlias = Mapping[str, set[int]]
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def merge_files(config: Config, target: Target, *, seed: int = 0) -> None:
    """Write the merge of the models; memory holds one leaf of each at a time."""
    name = config.out_dtype or config.dtype
    out_dtype = None if name is None else find_dtype(name)
    _refuse_adapters(config.models)
    with ExitStack() as stack:
        sources = {path: stack.enter_context(open_source(path)) for path in config.models}
        origin = sources[config.models[0]]
        if target.format is None and origin.format != "memmap" and not os.path.splitext(target.path)[1]:
            target = target._replace(format="shards")
        target = make_target(target, origin)
        recipe = plan(config, Models(sources))
        vocabulary = make_vocabulary(config, config.models) if config.tokenizer is not None else None
        if out_dtype is not None:
            check_cast("merge", origin, origin.tree, out_dtype)
        codes = {model: kept_leaves(source) for model, source in sources.items()}
        _check_codes(sources, recipe, codes)
        recipe, resized = _form(recipe, vocabulary, out_dtype, codes)
        _check(recipe, resized)
        if lines := unequal_values(list(sources.values()), [source.tree for source in sources.values()]):
            what = "merge: non-tensor data must be equal in all models; these differ:"
            raise LeafMismatchError("\n    ".join([what, *lines]))
        # Other folders, such as a step of a run, have files that would make the result one of their kind.
        has_config = target.format == "shards" and os.path.isfile(os.path.join(origin.path, "config.json"))
        beside = _describe(origin, recipe, vocabulary, out_dtype) if has_config else {}
        if beside and is_remote(target.path):
            raise UnsupportedError(f"merge {target.path}: a folder with config.json must be on this machine.")
        key, lost = random.key(seed), Counter[int]()
        size = sum(part.stored.size_bytes for row in recipe.rows.values() for part in row.every)
        with progress("merge", size) as tick:

            def read(row: Row) -> dict[str, Tensor]:
                read: dict[str, Tensor] = {}
                for model, one in row.every:
                    read[model], at = torch.empty(one.leaf.shape, dtype=one.leaf.dtype), 0
                    for piece in sources[model].pieces(one.leaf, tick):
                        read[model].view(-1)[at : at + piece.numel()] = piece
                        at += piece.numel()
                return read

            def values(leaf: Tensor) -> Iterator[Tensor]:
                row = recipe.rows[id(leaf)]
                leaves = read(row)
                if _has_codes(row, codes):
                    yield next(iter(leaves.values()))
                    return
                if not leaf.is_floating_point() and not leaf.is_complex() or not has_values(leaf.dtype):
                    yield _same(row, leaves)
                    return
                if vocabulary is not None and id(leaf) in resized:
                    leaves = vocabulary.align(leaves)
                wide = {name: x if x.element_size() > 2 else x.float() for name, x in leaves.items()}
                base = None if row.base is None else wide[row.base.model]
                stacked = torch.stack([wide[part.model] for part in row.parts])
                options: dict[str, Any] = dict(row.options)
                if config.method.is_random:
                    options["key"] = leaf_key(key, dotted(row.path))
                with torch.no_grad():
                    w = torch.tensor(row.weights, dtype=torch.float64)
                    yield cast(config.method.on_leaf(base, stacked, w, **options), leaf, lost)

            write(target, recipe.tree, values, origin, lost)
        write_beside(target.path, beside)


def _refuse_adapters(models: list[str]) -> None:
    for path in models:
        if os.path.isfile(os.path.join(path, "adapter_config.json")):
            raise UnsupportedError(
                f"merge {path}: this must be a model and not an adapter, whose factors cannot be merged one by one.",
                hint="tdf.lora.load(folder, params) and lora.merge(params, adapters) make a model of it.",
            )


def _has_codes(row: Row, codes: Codes) -> bool:
    """Return whether a leaf has codes in one of the models, or belongs to codes."""
    return any([id(part.stored.leaf) in codes[part.model] for part in row.every])


def _check_codes(sources: Mapping[str, Source], recipe: Recipe, codes: Codes) -> None:
    """Raise if codes or scales differ between the models."""
    for row in recipe.rows.values():
        if _has_codes(row, codes):
            parts = row.every
            check_equal_codes("merge", [sources[part.model] for part in parts], [[part.stored for part in parts]])


def _form(
    recipe: Recipe, vocabulary: Vocabulary | None, dtype: torch.dtype | None, codes: Codes
) -> tuple[Recipe, set[int]]:
    """Return the result in its dtype and with its vocabulary, and the leaves with the vocabulary."""
    made: dict[int, Tensor] = {}
    found: dict[int, Row] = {}
    resized: set[int] = set()
    for one in stored_leaves(recipe.tree):
        row, leaf = recipe.rows[id(one.leaf)], one.leaf
        is_number = leaf.is_floating_point() and has_values(leaf.dtype) and not _has_codes(row, codes)
        wanted = dtype if dtype is not None and is_number else leaf.dtype
        new = without_values(leaf, wanted)
        if vocabulary is not None and vocabulary.has(row):
            if _has_codes(row, codes):
                what = f"merge: {shown(row.path)} has codes, and its rows are those of a vocabulary that changes."
                raise UnsupportedError(what, expected="numbers", got=one.spec, hint=HINT)
            new = new.new_empty((vocabulary.size, *leaf.shape[1:]))
            resized.add(id(new))
            if vocabulary.size != leaf.shape[0]:
                note(f"{shown(row.path)}: {leaf.shape[0]} rows of the vocabulary become {vocabulary.size}")
        made[id(leaf)], found[id(new)] = new, row
    if vocabulary is not None and not resized:
        raise UnsupportedError(
            "merge: a leaf must have the vocabulary as its first dimension.", hint="leave tokenizer out."
        )
    return Recipe(recipe.tree._map(LeafOp("merge", lambda leaf: made[id(leaf)])), found, recipe.layers), resized


def _check(recipe: Recipe, resized: set[int]) -> None:
    """Raise unless the leaves of each row have one shape, except for a vocabulary that becomes one."""
    lines: list[str] = []
    for key, row in recipe.rows.items():
        shapes = [list(part.stored.leaf.shape)[key in resized :] for part in row.every]
        if any(shape != shapes[0] for shape in shapes):
            specs = ", ".join(f"{part.stored.spec} in {safe(part.model)}" for part in row.every)
            lines.append(f"{shown(row.path)}: {specs}")
    if lines:
        raise LeafMismatchError(
            "\n    ".join([f"merge: leaves must have one shape; {count_text(len(lines), 'difference')}:", *lines]),
            hint="where vocabularies differ, tokenizer: {source: union} makes them one; nothing is cut.",
        )


def _same(row: Row, leaves: dict[str, Tensor]) -> Tensor:
    """Return integers or bools, which must be equal in all models."""
    first = next(iter(leaves.values()))
    if not all(torch.equal(x, first) for x in leaves.values()):
        raise LeafMismatchError(f"merge: {shown(row.path)} ({first.dtype}) must be equal in all models.")
    return first


def _describe(
    origin: Source, recipe: Recipe, vocabulary: Vocabulary | None, dtype: torch.dtype | None
) -> dict[str, bytes]:
    """Return the files of the first model that transformers reads beside the weights, with the new entries."""
    files = read_beside(origin.path)
    config = json.loads(files["config.json"])
    if recipe.layers:
        _relayer(config, recipe)
    if vocabulary is not None:
        config["vocab_size"] = vocabulary.size
    for name in ("dtype", "torch_dtype"):
        if dtype is not None and name in config:
            config[name] = str(dtype).removeprefix("torch.")
    files["config.json"] = json.dumps(config, indent=2).encode() + b"\n"
    if vocabulary is not None:
        with tempfile.TemporaryDirectory() as made:
            vocabulary.tokenizer.save_pretrained(made)
            files |= read_beside(made)
    return files


# Any: JSON.
def _relayer(config: dict[str, Any], recipe: Recipe) -> None:
    """Change the number of layers in a configuration, and its lists with one entry for each layer."""
    names = [name for name in _LAYER_COUNTS if name in config]
    if not names:
        what = "merge: config.json must have the number of layers, which changes."
        raise UnsupportedError(what, expected=" or ".join(_LAYER_COUNTS))
    before = config[names[0]]
    for name, value in config.items():
        if isinstance(value, list) and len(value) == before and "layer" in name:
            config[name] = [value[i] for i in recipe.layers]
    config.update(dict.fromkeys(names, len(recipe.layers)))
