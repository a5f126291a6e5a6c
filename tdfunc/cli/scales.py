"""Leaves of codes in a checkpoint, as the commands see them: which leaves are scaled by which, and their numbers."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tdfunc.cli.numbers import Difference, cast
from tdfunc.cli.output import note, safe
from tdfunc.cli.sources import Source, Stored, Tick
from tdfunc.core.collection import TensorCollection, iter_leaves
from tdfunc.core.errors import UnsupportedError
from tdfunc.core.keys import dotted
from tdfunc.ops.edits.structure import keep_leaves
from tdfunc.storage.scales import Dequantizing, Quantized, Scaled, dequantize, specs_of

# The factors of an adapter: their product is added to a weight.
_FACTORS = (
    # PEFT, Kohya's scripts, MLX, torchtune.
    re.compile(r"((?P<module>.+)\.)?lora_(embedding_)?(?P<side>A|B|a|b|down|up)(\..*)?"),
    # diffusers before it wrote PEFT's names, XLabs.
    re.compile(r"(?P<module>.*lora(\d*|_linear_layer))\.(?P<side>down|up)\.weight"),
    # LoHa and LoKr, as LyCORIS and PEFT write them.
    re.compile(r"((?P<module>.+)\.)?(hada|lokr)_(?P<side>(w1|w2)(_a|_b)?|t1|t2)(\..*)?"),
    # VeRA.
    re.compile(r"((?P<module>.+)\.)?vera_lambda_(?P<side>b|d)(\..*)?"),
)
HINT = "tdfunc cast MODEL --dtype bf16 --dequantize --out PLAIN makes numbers of FP8 codes."


def quantized(source: Source) -> Quantized:
    """Return the leaves of codes in a checkpoint, by the id of the leaf."""
    numbers = {dotted(path): id(leaf) for path, leaf in iter_leaves(source.tree)}
    return Quantized.of(specs_of(source.tree), numbers)


def kept_leaves(source: Source) -> set[int]:
    """Return the ids of codes and of all leaves that belong to them, whose values no command changes."""
    return set(quantized(source).kept)


def check_cast(call: str, source: Source, tree: TensorCollection, dtype: torch.dtype) -> None:
    """Raise if a part of a checkpoint has codes that a cast would take for numbers."""
    chosen = {id(leaf) for _, leaf in iter_leaves(tree)}
    quantized(source).check_cast(f"{call} {source.path}", chosen, dtype, hint=HINT)


def check_equal_codes(call: str, sources: Sequence[Source], rows: Iterable[Sequence[Stored]]) -> None:
    """Raise if codes or scales, which cannot be computed with, differ between checkpoints.

    Args:
        call: The command.
        sources: The checkpoints.
        rows: For each leaf, the leaf in each of the checkpoints.
    """
    quantized_of_each = [quantized(source) for source in sources]
    with_codes = [each for each in quantized_of_each if each.codes]
    if not with_codes:
        return
    for row in rows:
        has_codes = any(id(one.leaf) in each.kept for one, each in zip(row, quantized_of_each, strict=True))
        if not has_codes:
            continue
        first = row[0]
        for one, source in zip(row[1:], sources[1:], strict=True):
            has_one_form = (one.leaf.dtype, one.leaf.shape) == (first.leaf.dtype, first.leaf.shape)
            if not has_one_form or not is_equal(sources[0], first, source, one):
                raise unequal_codes(call, with_codes[0], first, source.path)


def is_equal(source: Source, one: Stored, other: Source, its: Stored) -> bool:
    """Return whether two leaves of one shape have equal values."""
    unequal = Difference()
    for x, y in zip(source.pieces(one.leaf), other.pieces(its.leaf), strict=True):
        unequal.add(x, y)
    return unequal.differing == 0


def unequal_codes(call: str, found: Quantized, one: Stored, path: str) -> UnsupportedError:
    """Return the error of a command for codes or scales that differ between checkpoints."""
    codes = next((each for each in found.codes.values() if one.name in (each.name, *each.companions)), None)
    layout = ""
    if codes is not None:
        layout = f" ({codes})"
    return UnsupportedError(
        f"{call}: codes or their scales differ between checkpoints, and the command computes with numbers only.",
        expected=f"equal values of {safe(one.name)}{safe(layout)}",
        got=f"other values in {safe(path)}",
        hint=HINT,
    )


def note_codes(source: Source, leaves: Iterable[Stored], what: str) -> None:
    """Note on stderr that codes and their scales are read as they are."""
    chosen = {id(one.leaf) for one in leaves}
    codes = [one for number, one in quantized(source).codes.items() if number in chosen]
    if codes:
        note(f"{safe(source.path)}: {what} codes as they are, without their scales: {shown_codes(codes)}")


def note_lost_scales(source: Source, tree: TensorCollection) -> None:
    """Note on stderr that a part of a checkpoint has codes without their scales."""
    chosen = {dotted(path) for path, _ in iter_leaves(tree)}
    codes = [one for one in quantized(source).codes.values() if one.name in chosen and one.scale not in chosen]
    if codes:
        note(f"{safe(source.path)}: the result has codes and not their scales: {shown_codes(codes)}")


def note_described_codes(path: str) -> None:
    """Note on stderr that a file beside the numbers that are written describes codes, which transformers looks for."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    name = os.path.join(folder, "config.json")
    try:
        with open(name, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return
    if isinstance(config, dict) and "quantization_config" in config:
        note(f"{safe(name)} has quantization_config, and the result has no codes: remove the entry for transformers")


def shown_codes(codes: Sequence[Scaled]) -> str:
    """Return the first leaf of codes with its scale, and the number of others."""
    more = ""
    if len(codes) > 1:
        more = f" and {len(codes) - 1} more"
    return f"{safe(codes[0].name)} ({safe(str(codes[0]))}){more}"


def without_scales(source: Source, tree: TensorCollection) -> tuple[TensorCollection, dict[int, Scaled]]:
    """Return a part of a checkpoint without scales, and its leaves of codes by their id."""
    change = Dequantizing(source.path, source.tree, None, None)
    paths = {path for path, _ in iter_leaves(tree) if dotted(path) in change.names}
    kept = keep_leaves(tree, paths, nontensors=True)
    codes: dict[int, Scaled] = {}
    for path, leaf in iter_leaves(kept):
        if dotted(path) in change.codes:
            codes[id(leaf)] = change.codes[dotted(path)]
    return kept, codes


def decoded(
    source: Source, codes: Tensor, one: Scaled, leaf: Tensor, lost: "Counter[int]", tick: Tick
) -> Iterator[Tensor]:
    """Yield the numbers of a leaf of codes in the dtype of `leaf`; memory holds all of them at a time."""
    assert one.blocks is not None
    scale = next(found for path, found in iter_leaves(source.tree) if dotted(path) == one.scale)
    wide = torch.promote_types(leaf.dtype, torch.float32)
    numbers = dequantize(read_all(source, codes, tick), read_all(source, scale, tick), one.blocks, wide)
    yield cast(numbers.flatten(), leaf, lost)


def read_all(source: Source, leaf: Tensor, tick: Tick) -> Tensor:
    """Return all values of a leaf."""
    made = torch.empty(leaf.shape, dtype=leaf.dtype)
    at = 0
    for piece in source.pieces(leaf, tick):
        made.view(-1)[at : at + piece.numel()] = piece
        at += piece.numel()
    return made


def _find_factor(name: str) -> re.Match[str] | None:
    """Return the module and the side of a factor of an adapter; None for another leaf."""
    for pattern in _FACTORS:
        found = pattern.fullmatch(name)
        if found is not None:
            return found
    return None


def refuse_adapters(call: str, path: str, tree: TensorCollection) -> None:
    """Raise if a part of a checkpoint has both factors of an adapter: a mean of each is not one of their products."""
    first: dict[str | None, re.Match[str]] = {}
    for leaf, _ in iter_leaves(tree):
        found = _find_factor(dotted(leaf))
        if found is None:
            continue
        other = first.setdefault(found["module"], found)
        if other["side"] != found["side"]:
            hint = "tdf.lora.load(folder, params) and lora.merge(params, adapters) make a model of LoRA's factors."
            what = "this is an adapter and not a model; its factors cannot be merged one by one."
            raise UnsupportedError(
                f"{call} {safe(path)}: {what}",
                expected="weights, or one of the two factors of each module",
                got=f"{safe(other.group())} and {safe(found.group())}",
                hint=hint,
            )
