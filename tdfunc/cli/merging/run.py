"""`merge`: read, merge and write leaf by leaf; then the files beside the weights."""

import functools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdfunc import random
from tdfunc.cli.average import unequal_values
from tdfunc.cli.convert import Part as Globs
from tdfunc.cli.convert import Target, check_left_out, find_dtype, make_target, write
from tdfunc.cli.merging.adapters import is_adapter, with_merged_adapters
from tdfunc.cli.merging.config import Config
from tdfunc.cli.merging.entries import note_differences, renumber_tokens
from tdfunc.cli.merging.layers import relayer
from tdfunc.cli.merging.recipe import Models, Recipe, Row, plan
from tdfunc.cli.merging.vocabulary import Vocabulary, make_vocabulary
from tdfunc.cli.numbers import FINITE, cast, has_values, not_finite
from tdfunc.cli.output import listed, note, progress, safe, shown
from tdfunc.cli.scales import HINT, check_cast, check_equal_codes, kept_leaves, read_all, refuse_adapters
from tdfunc.cli.sources import Source, Tick, open_source, stored_leaves
from tdfunc.cli.ties import share_ties
from tdfunc.core.collection import LeafOp
from tdfunc.core.errors import LeafMismatchError, UnsupportedError, brief, error
from tdfunc.core.keys import dotted
from tdfunc.llm.folders.files import read_beside, weights_beside, write_beside
from tdfunc.ops.display.text import count_text
from tdfunc.storage.disk.remote import is_remote
from tdfunc.storage.tree.build import without_values
from tdfunc.weights.method import compute_dtype, leaf_key, member_dims

# The ids of codes, and of the leaves that belong to them, in each model.
Codes: TypeAlias = Mapping[str, set[int]]


def merge_files(config: Config, target: Target, *, seed: int = 0, take_first: bool = False) -> None:
    """Write the merge of the models; memory holds one leaf of each at a time."""
    out_dtype = _dtype_of(config)
    _refuse_adapters(config.models)
    with ExitStack() as stack:
        config = with_merged_adapters(config, stack)
        sources = {path: stack.enter_context(open_source(path)) for path in config.models}
        origin = sources[config.models[0]]
        target = make_target(_in_shards(target, origin), origin)
        _prepare(list(sources.values()))
        recipe = plan(config, Models(sources))
        _note_filters(config, recipe)
        vocabulary = None
        if config.tokenizer is not None:
            vocabulary = make_vocabulary(config, config.models)
        if out_dtype is not None:
            check_cast("merge", origin, origin.tree, out_dtype)
        codes = {model: kept_leaves(source) for model, source in sources.items()}
        _check_codes(sources, recipe, codes)
        recipe, resized = _form(recipe, vocabulary, out_dtype, codes)
        _check_shapes(recipe, resized)
        _check_numbers(config, recipe, codes)
        if not take_first:
            _check_values(list(sources.values()))
        beside: dict[str, bytes] = {}
        if _is_model_folder(target, origin):
            beside = _describe(config, origin, recipe, vocabulary, out_dtype)
            if is_remote(target.path):
                raise UnsupportedError(f"merge {target.path}: a folder with config.json cannot be written to a URL.")
        lost = Counter[int]()
        with progress("merge", _size_bytes(recipe)) as tick:
            merger = _Merger(
                config,
                recipe,
                sources,
                vocabulary=vocabulary,
                resized=resized,
                codes=codes,
                seed=seed,
                take_first=take_first,
                tick=tick,
                lost=lost,
            )
            write(target, recipe.tree, merger.values, origin, lost)
        write_beside(target.path, beside)


def _note_filters(config: Config, recipe: Recipe) -> None:
    """Note the filters that choose no leaf: their values are not used. A name may be misspelled."""
    names = [dotted(row.path) for row in recipe.rows.values()]
    for wanted in config.filters:
        if wanted != "*" and not any(wanted in name for name in names):
            note(f"the filter {safe(wanted)[:80]!r} is in the name of no leaf, and its value is not used.")


def _dtype_of(config: Config) -> torch.dtype | None:
    """Return the dtype of the result; None if each leaf keeps its own."""
    name = config.out_dtype or config.dtype
    return None if name is None else find_dtype(name)


def _in_shards(target: Target, origin: Source) -> Target:
    """Return a target without a format or suffix as a folder of shards, unless the first model is a memmap folder."""
    has_suffix = bool(os.path.splitext(target.path)[1])
    if target.format is None and origin.format != "memmap" and not has_suffix:
        return target._replace(format="shards")
    return target


def _is_model_folder(target: Target, origin: Source) -> bool:
    """Return whether the result is a folder with the files that transformers reads beside the weights.

    Other folders, such as a step of a run, have files that would make the result one of their kind.
    """
    return target.format == "shards" and os.path.isfile(os.path.join(origin.path, "config.json"))


def _size_bytes(recipe: Recipe) -> int:
    """Return the bytes of all leaves that are read."""
    size_bytes = 0
    for row in recipe.rows.values():
        size_bytes += sum(part.stored.size_bytes for part in row.every)
    return size_bytes


def _prepare(sources: Sequence[Source]) -> None:
    """Give all models the ties that they share; raise if a model has a tensor that cannot be read, or is an adapter."""
    for source in sources:
        check_left_out(source, Globs())
    trees = share_ties(sources, [source.tree for source in sources])
    for source, tree in zip(sources, trees, strict=True):
        source.tree = tree
        refuse_adapters("merge", source.path, tree)


@dataclass(frozen=True)
class _Merger:
    """The values of the leaves of a merge, each computed when it is written."""

    config: Config
    recipe: Recipe
    sources: Mapping[str, Source]
    vocabulary: Vocabulary | None
    # The leaves whose first dimension is the vocabulary.
    resized: set[int]
    codes: Codes
    seed: int
    # Integers and bools that differ come from the first model.
    take_first: bool
    tick: Tick
    lost: Counter[int]

    def values(self, leaf: Tensor) -> Iterator[Tensor]:
        """Yield the merged leaf."""
        row = self.recipe.rows[id(leaf)]
        leaves: dict[str, Tensor] = {}
        for part in row.every:
            leaves[part.model] = read_all(self.sources[part.model], part.stored.leaf, self.tick)
        if _has_codes(row, self.codes):
            # They are equal in all models.
            yield next(iter(leaves.values()))
            return
        if not is_merged(leaf):
            yield _same(row, leaves, self.take_first)
            return
        wide: dict[str, Tensor] = {}
        for name, own in leaves.items():
            wide[name] = own if own.element_size() > 2 else own.float()
        if self.vocabulary is not None and id(leaf) in self.resized:
            wide = self.vocabulary.align(wide)
        merged = self._merge(row, wide)
        found = not_finite(merged)
        if found != FINITE and all(not_finite(own) == FINITE for own in leaves.values()):
            raise error(
                ValueError,
                f"merge: {shown(row.path)} has {found} of {merged.numel():,} numbers, though the models' are finite.",
                got=f"the weights {brief(list(row.weights))}",
                hint="nothing was written: a sum overflows, or the method is not defined for these weights.",
            )
        yield cast(merged, leaf, self.lost)

    def _merge(self, row: Row, leaves: Mapping[str, Tensor]) -> Tensor:
        method = self.config.method
        base = None
        if row.base is not None:
            base = leaves[row.base.model]
        stacked = torch.stack([leaves[part.model] for part in row.parts])
        options: dict[str, Any] = dict(row.options)
        if method.is_random:
            options["key"] = leaf_key(random.key(self.seed), dotted(row.path))
        weights = torch.tensor(row.weights, dtype=torch.float64)
        with torch.no_grad():
            return method.on_members(base, stacked, weights, member_dims(self.recipe.tree, row.path), **options)


def is_merged(leaf: Tensor) -> bool:
    """Return whether a leaf has numbers that can be merged: no integers, bools or pairs of 4-bit numbers."""
    return (leaf.is_floating_point() or leaf.is_complex()) and has_values(leaf.dtype)


def _check_values(sources: Sequence[Source]) -> None:
    lines = unequal_values(sources, [source.tree for source in sources])
    if lines:
        what = "merge: non-tensor data differ between the models:"
        first = safe(sources[0].path)
        hint = f"--unequal first takes them from {first}; tdfunc extract --filter writes a part without them."
        raise LeafMismatchError("\n    ".join([what, *listed(lines)]), hint=hint)


def _refuse_adapters(models: list[str]) -> None:
    for path in models:
        if is_adapter(path):
            raise UnsupportedError(
                f"merge {path}: this is an adapter and not a model; its factors cannot be merged one by one.",
                hint=f"BASE+{path} is the model BASE with this adapter in its weights.",
            )


def _has_codes(row: Row, codes: Codes) -> bool:
    """Return whether a leaf has codes in one of the models, or belongs to codes."""
    return any(id(part.stored.leaf) in codes[part.model] for part in row.every)


def _check_codes(sources: Mapping[str, Source], recipe: Recipe, codes: Codes) -> None:
    """Raise if codes or scales differ between the models."""
    for row in recipe.rows.values():
        if _has_codes(row, codes):
            parts = row.every
            check_equal_codes("merge", [sources[part.model] for part in parts], [[part.stored for part in parts]])


def _form(
    recipe: Recipe, vocabulary: Vocabulary | None, dtype: torch.dtype | None, codes: Codes
) -> tuple[Recipe, set[int]]:
    """Return the result in its dtype and with its vocabulary, and the ids of the leaves with the vocabulary."""
    made: dict[int, Tensor] = {}
    rows: dict[int, Row] = {}
    resized: set[int] = set()
    for one in stored_leaves(recipe.tree):
        row = recipe.rows[id(one.leaf)]
        has_codes = _has_codes(row, codes)
        is_number = one.leaf.is_floating_point() and has_values(one.leaf.dtype) and not has_codes
        wanted = one.leaf.dtype
        if dtype is not None and is_number:
            wanted = dtype
        new = without_values(one.leaf, wanted)
        if vocabulary is not None and vocabulary.has(row):
            if has_codes:
                what = f"merge: {shown(row.path)} has codes, and its rows are those of a vocabulary that changes."
                raise UnsupportedError(what, expected="numbers", got=one.spec, hint=HINT)
            count, *rest = one.leaf.shape
            new = new.new_empty((vocabulary.size, *rest))
            resized.add(id(new))
            if vocabulary.size != count:
                note(f"{shown(row.path)}: {count} rows of the vocabulary become {vocabulary.size}")
        made[id(one.leaf)] = new
        rows[id(new)] = row
    if vocabulary is not None and not resized:
        raise UnsupportedError("merge: no leaf has the vocabulary as its first dimension.", hint="leave tokenizer out.")
    tree = recipe.tree._map(LeafOp("merge", lambda leaf: made[id(leaf)]))
    return Recipe(tree, rows, recipe.layers), resized


def _check_shapes(recipe: Recipe, resized: set[int]) -> None:
    """Raise unless the leaves of each row have one shape, except for a vocabulary that becomes one."""
    lines: list[str] = []
    for key, row in recipe.rows.items():
        shapes = [list(part.stored.leaf.shape) for part in row.every]
        if key in resized:
            shapes = [shape[1:] for shape in shapes]
        if any(shape != shapes[0] for shape in shapes):
            specs = ", ".join(f"{part.stored.spec} in {safe(part.model)}" for part in row.every)
            lines.append(f"{shown(row.path)}: {specs}")
    if lines:
        what = f"merge: leaves have different shapes; {count_text(len(lines), 'difference')}:"
        raise LeafMismatchError(
            "\n    ".join([what, *listed(lines)]),
            hint="where vocabularies differ, tokenizer: {source: union} makes them one; nothing is cut.",
        )


def _check_numbers(config: Config, recipe: Recipe, codes: Codes) -> None:
    """Raise unless the weights and options of each merged row are numbers that the method is defined for."""
    for row in recipe.rows.values():
        leaves = [part.stored.leaf for part in row.parts]
        if _has_codes(row, codes) or not all(map(is_merged, leaves)):
            continue
        dtype = functools.reduce(torch.promote_types, [compute_dtype(leaf.dtype) for leaf in leaves])
        weights = torch.tensor(row.weights, dtype=torch.float64)
        config.method.check_numbers(weights, dtype, row.options, f" of {shown(row.path)}")


def _same(row: Row, leaves: dict[str, Tensor], take_first: bool) -> Tensor:
    """Return integers or bools, which must be equal in all models; or the first model's."""
    first = next(iter(leaves.values()))
    if not take_first and not all(torch.equal(x, first) for x in leaves.values()):
        raise LeafMismatchError(
            f"merge: {shown(row.path)} ({first.dtype}) differs between the models.",
            hint="--unequal first takes it from the first model.",
        )
    return first


def _describe(
    merge: Config, origin: Source, recipe: Recipe, vocabulary: Vocabulary | None, dtype: torch.dtype | None
) -> dict[str, bytes]:
    """Return the files of the first model that transformers reads beside the weights, with the new entries."""
    files = read_beside(origin.path)
    for name in weights_beside(files):
        note(f"{safe(name)} is the first model's: parts of sentence-transformers behind the model are not merged.")
    if vocabulary is not None and merge.tokenizer not in ("base", "union"):
        renumber_tokens(files, vocabulary.numbers(origin.path))
    config = json.loads(files["config.json"])
    if len(recipe.layers) > 1:
        what = "merge: config.json describes one stack of layers, and several change."
        raise UnsupportedError(what, got=", ".join(map(shown, recipe.layers)))
    for where, taken in recipe.layers.items():
        relayer(config, taken, where)
    if vocabulary is not None:
        config["vocab_size"] = vocabulary.size
    if dtype is not None:
        for name in ("dtype", "torch_dtype"):
            if name in config:
                config[name] = str(dtype).removeprefix("torch.")
    note_differences(merge.models[1:], config)
    files["config.json"] = json.dumps(config, indent=2).encode() + b"\n"
    if vocabulary is not None:
        with tempfile.TemporaryDirectory() as made:
            vocabulary.tokenizer.save_pretrained(made)
            files |= read_beside(made)
    return files
