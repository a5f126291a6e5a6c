"""`convert`, `extract`, `cast` and `average`: checkpoints made of others, leaf by leaf."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from tdfunc.cli.leaves import Stored, choose, make_filter, plain, plain_values, same_values, stored_leaves
from tdfunc.cli.numbers import Difference, Lost, average, has_values, overflows, scaled
from tdfunc.cli.output import progress, safe, shown
from tdfunc.cli.sources import Source, open_source
from tdfunc.cli.streams import note
from tdfunc.cli.targets import Target, cast_tree, make_target, write
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, TreeStructureError, UnsupportedError, error
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.types import Path
from tdfunc.ops.display.text import bytes_text, count_text
from tdfunc.ops.structure import keep_leaves
from tdfunc.storage.tree.specs import DTYPES

_SHORT = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "f16": torch.float16, "half": torch.float16,
    "fp32": torch.float32, "f32": torch.float32, "float": torch.float32,
    "fp64": torch.float64, "f64": torch.float64, "double": torch.float64,
}  # fmt: skip


class OutOptions(NamedTuple):
    """How the result is written."""

    format: str | None = None
    max_shard_size: str | None = None
    force: bool = False


class EditOptions(NamedTuple):
    """Which leaves are taken, and as what."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    dtype: str | None = None


def rewrite(path: str, out: str, edit: EditOptions, options: OutOptions) -> None:
    """Write (a part of) a checkpoint in a format, cast on the way."""
    dtype = read_dtype(edit.dtype) if edit.dtype is not None else None
    with open_source(path) as source:
        target = _target(out, options, source)
        tree = source.tree
        if (where := make_filter(edit.include, edit.exclude)) is not None:
            # As in `partition`: a pattern chooses leaves, and all else belongs to the rest, also tensors that are
            # non-tensor data (extra state, say).
            leaves = [one for one in stored_leaves(tree) if not one.is_value]
            chosen = {at for one in choose(leaves, where) for at in one.paths}
            tree = keep_leaves(tree, chosen, nontensors=not edit.include)
        origins: dict[int, Tensor] = {}
        if dtype is not None:
            _check_castable(tree)
            tree, origins = cast_tree(tree, dtype)
        _note_metadata(source)
        leaves = stored_leaves(tree)
        names = {id(one.leaf): one.name for one in leaves}
        size = sum(
            origins.get(id(one.leaf), one.leaf).numel() * origins.get(id(one.leaf), one.leaf).element_size()
            for one in leaves
        )
        with progress("write", size) as tick:
            casts = _Casts(source, origins, names, tick)
            write(target, tree, casts)
    casts.warn()
    _done(target, leaves)


class _Casts:
    """The values of the leaves of a tree that was cast; it counts those that the new dtype cannot hold."""

    def __init__(
        self, source: Source, origins: dict[int, Tensor], names: dict[int, str], tick: Callable[[int], object]
    ) -> None:
        self._source, self._origins, self._names, self._tick = source, origins, names, tick
        self._lost: dict[str, Lost] = {}

    def __call__(self, leaf: Tensor) -> Iterator[Tensor]:
        origin = self._origins.get(id(leaf), leaf)
        if origin is leaf:
            yield from self._source.pieces(origin, self._tick)
            return
        lost = self._lost[self._names[id(leaf)]] = Lost(leaf.dtype)
        for piece in self._source.pieces(origin, self._tick):
            cast = piece.to(leaf.dtype)
            lost.add(piece, cast)
            yield cast

    def warn(self) -> None:
        """Say which leaves have values that the new dtype cannot hold."""
        for name, lost in self._lost.items():
            for line in lost.lines():
                note(f"{safe(name)}: {line}")


def read_dtype(name: str) -> torch.dtype:
    """Return the floating dtype of a name: torch's, that of the file format, or a short one such as bf16.

    Raises:
        ValueError: There is no such dtype.
    """
    known = {**_SHORT, **{str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}}
    known |= {code.lower(): dtype for code, dtype in DTYPES.items()}
    dtype = known.get(name.lower().removeprefix("torch."))
    if dtype is None or not dtype.is_floating_point or not has_values(dtype):
        names = sorted(text for text, found in known.items() if found.is_floating_point and has_values(found))
        raise error(
            ValueError, "--dtype: no such floating dtype.", expected=f"one of {', '.join(names)}", got=repr(name)
        )
    return dtype


def _check_castable(tree: TensorCollection) -> None:
    for one in stored_leaves(tree):
        if not has_values(one.leaf.dtype):
            raise UnsupportedError(f"leaf {one.name} cannot be cast.", got=str(one.leaf.dtype), hint="--exclude it.")


def _target(out: str, options: OutOptions, source: Source) -> Target:
    return make_target(out, options.format, options.max_shard_size, source.format, force=options.force)


def _note_metadata(source: Source) -> None:
    if source.metadata:
        note(f"the metadata of {safe(source.path)} are not kept: {', '.join(map(safe, source.metadata))}")


def _done(target: Target, leaves: Sequence[Stored]) -> None:
    size = bytes_text(sum(one.size_bytes for one in leaves))
    note(f"wrote {safe(target.path)} ({target.format}, {count_text(len(leaves), 'leaf')}, {size})")


# -- average ----------------------------------------------------------------------------------------------------


def average_files(
    paths: Sequence[str], out: str, weights: Sequence[float] | None, options: OutOptions, *, take_first: bool
) -> None:
    """Write the weighted mean of checkpoints with the same leaves; all else is that of the first."""
    factors = _check_weights(weights, paths)
    with ExitStack() as stack:
        sources = [stack.enter_context(open_source(path)) for path in paths]
        target = _target(out, options, sources[0])
        rows = [{one.paths: one for one in stored_leaves(source.tree)} for source in sources]
        _check_same(paths, rows)
        leaves = list(rows[0].values())
        if not take_first:
            _check_unaveraged(sources, rows)
        _note_metadata(sources[0])
        lost: dict[int, int] = {}
        others = {id(one.leaf): [row[one.paths].leaf for row in rows] for one in leaves}
        is_value = {id(one.leaf) for one in leaves if one.is_value}
        with progress("average", len(paths) * sum(one.size_bytes for one in leaves)) as tick:

            def values(leaf: Tensor) -> Iterator[Tensor]:
                if not _is_averaged(leaf) or id(leaf) in is_value:
                    yield from sources[0].pieces(leaf, tick)
                    return
                pieces = [source.pieces(own, tick) for source, own in zip(sources, others[id(leaf)], strict=True)]
                for row in zip(*pieces, strict=True):
                    mean = average(row, factors)
                    if count := overflows(row, mean, factors):
                        lost[id(leaf)] = lost.get(id(leaf), 0) + count
                    yield mean

            write(target, sources[0].tree, values)
    for one in leaves:
        if count := lost.get(id(one.leaf)):
            note(f"{safe(one.name)}: {count_text(count, 'mean')} too large for the dtype became infinite or NaN")
    _done(target, leaves)


def _is_averaged(leaf: Tensor) -> bool:
    return (leaf.is_floating_point() or leaf.is_complex()) and has_values(leaf.dtype)


def _check_weights(weights: Sequence[float] | None, paths: Sequence[str]) -> list[float]:
    if weights is None:
        return scaled([1.0] * len(paths))
    if len(weights) != len(paths):
        raise error(
            ValueError,
            "--weights: not a number for each.",
            expected=f"{len(paths)} numbers, one for each checkpoint",
            got=f"{len(weights)}",
        )
    if not all(map(math.isfinite, weights)) or sum(factors := scaled(weights)) == 0:
        raise error(
            ValueError,
            "--weights cannot be normalized.",
            expected="finite numbers with a sum other than 0",
            got=",".join(map(str, weights)),
        )
    return factors


def _check_same(paths: Sequence[str], rows: Sequence[dict[tuple[Path, ...], Stored]]) -> None:
    """Raise unless all checkpoints have the same leaves; the message lists all differences."""
    lines: list[str] = []
    kind: type[Exception] = LeafMismatchError
    for path, row in zip(paths[1:], rows[1:], strict=True):
        for key in [*rows[0], *(key for key in row if key not in rows[0])]:
            one, other = rows[0].get(key), row.get(key)
            if one is None or other is None:
                kind = TreeStructureError
                lines.append(
                    f"{'missing' if other is None else 'unexpected'}: {shown(key[0])} in {safe(path)}{_tied(key)}"
                )
            elif (one.leaf.shape, one.leaf.dtype) != (other.leaf.shape, other.leaf.dtype):
                lines.append(f"{shown(key[0])} in {safe(path)}: expected {_spec(one)}, got {_spec(other)}")
    if lines:
        raise kind(
            "\n    ".join(
                [f"average: not the leaves of {safe(paths[0])}; {count_text(len(lines), 'difference')}:", *lines]
            ),
            hint="extract --filter takes the leaves that all have, cast --dtype makes one dtype.",
        )


def _tied(key: tuple[Path, ...]) -> str:
    return f" (tied to {', '.join(map(shown, key[1:]))})" if len(key) > 1 else ""


def _spec(one: Stored) -> str:
    return f"{str(one.leaf.dtype).removeprefix('torch.')} {list(one.leaf.shape)}"


def _check_unaveraged(sources: Sequence[Source], rows: Sequence[dict[tuple[Path, ...], Stored]]) -> None:
    """Raise unless what has no mean (integers, bools, non-tensor data) is the same in all checkpoints."""
    lines: list[str] = []
    for source, row in zip(sources[1:], rows[1:], strict=True):
        for key, one in rows[0].items():
            if (not _is_averaged(one.leaf) or one.is_value) and not _is_equal(sources[0], one, source, row[key]):
                lines.append(f"{shown(key[0])} ({_spec(one)}) in {safe(source.path)}")
        first, other = plain_values(sources[0].tree), plain_values(source.tree)
        for path in [*first, *(path for path in other if path not in first)]:
            a, b = first.get(path), other.get(path)
            if not same_values(a, b):
                lines.append(f"{shown(path)} in {safe(source.path)}: {_value(b)} instead of {_value(a)}")
    if lines:
        raise LeafMismatchError(
            "\n    ".join(["average: what is no floating number has no mean, and these differ:", *lines]),
            expected="equal integers, bools and non-tensor data",
            hint=f"--unequal first takes them from {safe(sources[0].path)}; extract --exclude leaves them out.",
        )


def _value(value: NonTensorBase | None) -> str:
    return "nothing" if value is None else safe(repr(plain(value))[:80])


def _is_equal(a: Source, one: Stored, b: Source, other: Stored) -> bool:
    unequal = Difference()
    for x, y in zip(a.pieces(one.leaf), b.pieces(other.leaf), strict=True):
        unequal.add(x, y)
    return not unequal.differing
