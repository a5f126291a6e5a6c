"""`average`: the weighted mean of checkpoints, leaf by leaf."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from tdfunc.cli.convert import Part, Target, chosen_part, make_target, write
from tdfunc.cli.numbers import FINITE, average, cast, has_values, not_finite, wide
from tdfunc.cli.output import listed, progress, safe, shown
from tdfunc.cli.scales import check_equal_codes, is_equal, kept_leaves, note_lost_scales, refuse_adapters
from tdfunc.cli.sources import Source, Stored, Tick, open_source, plain_values, stored_leaves
from tdfunc.cli.ties import share_ties
from tdfunc.cli.values import differing_values, texts_apart
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, error
from tdfunc.core.types import Path
from tdfunc.ops.display.text import count_text
from tdfunc.weights.method import is_cancelled

Rows = Sequence[dict[tuple[Path, ...], Stored]]


def average_files(
    paths: Sequence[str], target: Target, part: Part, *, weights: Sequence[float] | None, take_first: bool
) -> None:
    """Write the weighted mean of checkpoints with the same leaves; everything else comes from the first."""
    factors = _factors(weights, len(paths))
    with ExitStack() as stack:
        sources = [stack.enter_context(open_source(path)) for path in paths]
        first = sources[0]
        target = make_target(target, first)
        trees = share_ties(sources, [chosen_part(source, part) for source in sources])
        for source, tree in zip(sources, trees, strict=True):
            refuse_adapters("average", source.path, tree)
        rows = list(map(_by_paths, trees))
        _check_same(paths, rows)
        leaves = list(rows[0].values())
        kept = kept_leaves(first)
        note_lost_scales(first, trees[0])
        check_equal_codes("average", sources, [_in_each(one, rows) for one in leaves])
        if not take_first:
            _check_unaveraged(sources, trees, rows)
        averaged = {id(one.leaf): one for one in leaves if id(one.leaf) not in kept and _has_mean(one)}
        size_bytes = sum(one.size_bytes for one in leaves)
        lost = Counter[int]()
        with progress("average", len(paths) * size_bytes) as tick:
            averager = _Averager(sources, rows, factors, averaged, tick, lost)
            write(target, trees[0], averager.values, first, lost)


@dataclass(frozen=True)
class _Averager:
    """The values of the leaves of a mean, each computed when it is written."""

    sources: Sequence[Source]
    rows: Rows
    factors: Sequence[float]
    # By id, the leaves of the first checkpoint that have a mean; the others are written as they are.
    averaged: Mapping[int, Stored]
    tick: Tick
    lost: Counter[int]

    def values(self, leaf: Tensor) -> Iterator[Tensor]:
        """Yield the pieces of the mean of a leaf."""
        if id(leaf) not in self.averaged:
            yield from self.sources[0].pieces(leaf, self.tick)
            return
        one = self.averaged[id(leaf)]
        name = shown(one.path)
        leaf_of_each = _in_each(one, self.rows)
        pieces = [source.pieces(own.leaf, self.tick) for source, own in zip(self.sources, leaf_of_each, strict=True)]
        for piece_of_each in zip(*pieces, strict=True):
            yield cast(_mean(piece_of_each, self.factors, name), leaf, self.lost)


def _factors(weights: Sequence[float] | None, count: int) -> list[float]:
    """Return a weight for each checkpoint; raise unless their sum is a number to divide by."""
    if weights is None:
        factors = [1.0] * count
    else:
        factors = list(weights)
    got = ",".join(map(str, factors[:10]))
    if len(factors) != count:
        what = f"--weights has {count_text(len(factors), 'number')} for {count_text(count, 'checkpoint')}."
        raise error(ValueError, what, expected="a number for each checkpoint", got=got)
    numbers = torch.tensor(factors, dtype=torch.float64)
    if not numbers.isfinite().all():
        raise error(ValueError, "--weights has a number that is not finite.", got=got)
    if is_cancelled(numbers, numbers.sum()):
        what = "--weights has a sum of 0 or infinity, or one that is lost in rounding; the mean divides by it."
        raise error(ValueError, what, got=got)
    return factors


def _by_paths(tree: TensorCollection) -> dict[tuple[Path, ...], Stored]:
    """Return the stored leaves of a file by their paths."""
    return {one.paths: one for one in stored_leaves(tree)}


def _in_each(one: Stored, rows: Rows) -> list[Stored]:
    """Return a leaf of the first checkpoint in each of them."""
    return [row[one.paths] for row in rows]


def _mean(row: Sequence[Tensor], factors: Sequence[float], name: str) -> Tensor:
    """Return the mean of pieces; raise if finite numbers give one that is not."""
    mean = average(row, factors)
    made = not_finite(mean)
    if made != FINITE:
        # torch 2.13 has no isfinite for float8.
        used = torch.stack([wide(piece).isfinite() for piece, factor in zip(row, factors, strict=True) if factor])
        count = int((~mean.isfinite() & used.all(0)).sum())
        if count:
            what = f"average: {count_text(count, 'mean')} of {name} overflow in float64."
            raise error(ValueError, what, got=f"{made}, of finite values", hint="nothing was written.")
    return mean


def _has_mean(one: Stored) -> bool:
    is_number = one.leaf.is_floating_point() or one.leaf.is_complex()
    return is_number and has_values(one.leaf.dtype) and not one.is_value


def _check_same(paths: Sequence[str], rows: Rows) -> None:
    """Raise unless all checkpoints have the same leaves; the message lists all differences."""
    lines: list[str] = []
    for path, row in zip(paths[1:], rows[1:], strict=True):
        for key in dict.fromkeys([*rows[0], *row]):
            one = rows[0].get(key)
            other = row.get(key)
            if other is None:
                lines.append(f"missing: {' tied to '.join(map(shown, key))} in {safe(path)}")
            elif one is None:
                lines.append(f"unexpected: {' tied to '.join(map(shown, key))} in {safe(path)}")
            elif (one.leaf.shape, one.leaf.dtype) != (other.leaf.shape, other.leaf.dtype):
                lines.append(f"{shown(key[0])} in {safe(path)}: expected {one.spec}, got {other.spec}")
    if lines:
        what = f"average: the leaves are not as in {safe(paths[0])}; {count_text(len(lines), 'difference')}:"
        hint = "--filter and --exclude choose common leaves; cast --dtype makes one dtype."
        if any(" tied to " in line for line in lines):
            hint += (
                " In Python, tree.untie(path) of the tied checkpoint, saved anew, makes its leaves those of the others."
            )
        raise LeafMismatchError("\n    ".join([what, *listed(lines)]), hint=hint)


def _check_unaveraged(sources: Sequence[Source], trees: Sequence[TensorCollection], rows: Rows) -> None:
    """Raise unless values without a mean (integers, bools, non-tensor data) are the same in all checkpoints."""
    found: list[tuple[Path, str]] = []
    for source, row in zip(sources[1:], rows[1:], strict=True):
        for key, one in rows[0].items():
            if not _has_mean(one) and not is_equal(sources[0], one, source, row[key]):
                found.append((key[0], f"{shown(key[0])} ({one.spec}) in {safe(source.path)}"))
    found += _unequal_places(sources, trees)
    if found:
        what = f"average: integers, bools or non-tensor data differ; {count_text(len(found), 'difference')}:"
        lines = listed([line for _, line in found])
        hint = f"--unequal first takes them from {safe(sources[0].path)}."
        parts = _averaged_parts(rows[0], {path[0] for path, _ in found})
        if parts is not None:
            hint = f"{parts} averages that part; {hint}"
        raise LeafMismatchError("\n    ".join([what, *lines]), hint=hint)


def _averaged_parts(row: dict[tuple[Path, ...], Stored], others: set[str]) -> str | None:
    """Return the options that choose the top-level parts with a mean and without differences; None without such."""
    options: list[str] = []
    for name in dict.fromkeys([one.path[0] for one in row.values() if _has_mean(one)]):
        # A glob would read these characters as something else.
        if name in others or set(name) & set("*?[]'"):
            continue
        is_leaf = any(one.path == (name,) for one in row.values())
        glob = name if is_leaf else f"{name}.*"
        options.append(f"--filter {shlex.quote(glob)}")
    return " ".join(options) or None


def unequal_values(sources: Sequence[Source], trees: Sequence[TensorCollection]) -> list[str]:
    """Return a line for each place in non-tensor data that differs from the first checkpoint."""
    return [line for _, line in _unequal_places(sources, trees)]


def _unequal_places(sources: Sequence[Source], trees: Sequence[TensorCollection]) -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    first = plain_values(trees[0])
    for source, tree in zip(sources[1:], trees[1:], strict=True):
        other = plain_values(tree)
        for path in dict.fromkeys([*first, *other]):
            for place, a, b in differing_values(first.get(path), other.get(path)):
                before, after = texts_apart(safe(repr(a)), safe(repr(b)))
                where = f"{shown((*path, *place))} in {safe(source.path)}"
                found.append((path, f"{where}: {after[:80]} instead of {before[:80]}"))
    return found
