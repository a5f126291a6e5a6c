"""`average`: the weighted mean of checkpoints, leaf by leaf."""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from tdfunc.cli.convert import Part, Target, chosen_part, make_target, write
from tdfunc.cli.numbers import FINITE, Difference, average, cast, has_values, not_finite
from tdfunc.cli.output import listed, progress, safe, shown
from tdfunc.cli.scales import check_equal_codes, kept_leaves, note_lost_scales, refuse_adapters
from tdfunc.cli.sources import Source, Stored, open_source, plain_values, stored_leaves
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
    if weights is None:
        factors = [1.0] * len(paths)
    else:
        factors = list(weights)
    numbers = torch.tensor(factors, dtype=torch.float64)
    if len(factors) != len(paths) or not numbers.isfinite().all() or is_cancelled(numbers, numbers.sum()):
        raise error(
            ValueError,
            "--weights must have a finite number for each checkpoint, and a sum other than 0, also after rounding.",
            expected=f"{len(paths)} numbers",
            got=",".join(map(str, factors)),
        )
    with ExitStack() as stack:
        sources = [stack.enter_context(open_source(path)) for path in paths]
        target = make_target(target, sources[0])
        trees = share_ties(sources, [chosen_part(source, part) for source in sources])
        for source, tree in zip(sources, trees, strict=True):
            refuse_adapters("average", source.path, tree)
        rows = [{one.paths: one for one in stored_leaves(tree)} for tree in trees]
        _check_same(paths, rows)
        leaves = list(rows[0].values())
        kept = kept_leaves(sources[0])

        def is_averaged(one: Stored) -> bool:
            return id(one.leaf) not in kept and _has_mean(one)

        note_lost_scales(sources[0], trees[0])
        check_equal_codes("average", sources, [[row[one.paths] for row in rows] for one in leaves])
        if not take_first:
            _check_unaveraged(sources, trees, rows)
        others = {id(one.leaf): [row[one.paths].leaf for row in rows] for one in leaves if is_averaged(one)}
        names = {id(one.leaf): shown(one.path) for one in leaves}
        lost = Counter[int]()
        with progress("average", len(paths) * sum(one.size_bytes for one in leaves)) as tick:

            def values(leaf: Tensor) -> Iterator[Tensor]:
                if id(leaf) not in others:
                    yield from sources[0].pieces(leaf, tick)
                    return
                pieces = [source.pieces(own, tick) for source, own in zip(sources, others[id(leaf)], strict=True)]
                for row in zip(*pieces, strict=True):
                    yield cast(_mean(row, factors, names[id(leaf)]), leaf, lost)

            write(target, trees[0], values, sources[0], lost)


def _mean(row: Sequence[Tensor], factors: Sequence[float], name: str) -> Tensor:
    """Return the mean of pieces; raise if finite numbers give one that is not."""
    mean = average(row, factors)
    made = not_finite(mean)
    if made != FINITE:
        used = torch.stack([piece.isfinite() for piece, factor in zip(row, factors, strict=True) if factor])
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
            if one is None or other is None:
                name = " tied to ".join(map(shown, key))
                lines.append(f"{'missing' if other is None else 'unexpected'}: {name} in {safe(path)}")
            elif (one.leaf.shape, one.leaf.dtype) != (other.leaf.shape, other.leaf.dtype):
                lines.append(f"{shown(key[0])} in {safe(path)}: expected {one.spec}, got {other.spec}")
    if lines:
        what = f"average: the leaves must be as in {safe(paths[0])}; {count_text(len(lines), 'difference')}:"
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
            if not _has_mean(one):
                unequal = Difference()
                for x, y in zip(sources[0].pieces(one.leaf), source.pieces(row[key].leaf), strict=True):
                    unequal.add(x, y)
                if unequal.differing:
                    found.append((key[0], f"{shown(key[0])} ({one.spec}) in {safe(source.path)}"))
    found += _unequal_places(sources, trees)
    if found:
        what = f"average: integers, bools and non-tensor data must be equal; {count_text(len(found), 'difference')}:"
        lines = listed([line for _, line in found])
        hint = f"--unequal first takes them from {safe(sources[0].path)}."
        if parts := _averaged_parts(rows[0], {path[0] for path, _ in found}):
            hint = f"{parts} averages that part; {hint}"
        raise LeafMismatchError("\n    ".join([what, *lines]), hint=hint)


def _averaged_parts(row: dict[tuple[Path, ...], Stored], others: set[str]) -> str | None:
    """Return the options that choose the top-level parts with a mean and without differences; None without such."""
    # A glob would read these characters as something else.
    keys = dict.fromkeys([one.path[0] for one in row.values() if _has_mean(one)])
    names = [key for key in keys if key not in others and not set(key) & set("*?[]'")]
    options: list[str] = []
    for name in names:
        is_leaf = any([one.path == (name,) for one in row.values()])
        options.append(f"--filter {shlex.quote(name if is_leaf else f'{name}.*')}")
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
