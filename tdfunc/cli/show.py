"""`tdfunc show`: the leaves of a checkpoint."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tdfunc.cli.numbers import Stats, has_values
from tdfunc.cli.output import Table, listed, print_json, print_table, print_tree, progress, safe, short, shown
from tdfunc.cli.scales import note_codes, quantized
from tdfunc.cli.sources import Source, Stored, choose, make_filter, open_source, plain_values, stored_leaves
from tdfunc.cli.torch_files.files import LeftOut
from tdfunc.cli.values import plain
from tdfunc.core.errors import CorruptCheckpointError
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.types import Path
from tdfunc.ops.display.text import bytes_text, count_text, kind_text
from tdfunc.storage.disk.remote import local_path
from tdfunc.storage.manager.steps import read_about, step_name
from tdfunc.storage.scales import Scaled

_STATS = ("min", "max", "mean", "std", "nan", "inf", "zero")
Values = dict[Path, NonTensorBase]
# The leaves of codes, and the statistics of leaves, by the id of the leaf.
Codes = Mapping[int, Scaled]
AllStats = Mapping[int, Stats]


def show(
    path: str, include: Sequence[str], exclude: Sequence[str], *, as_tree: bool, with_stats: bool, as_json: bool
) -> None:
    """Print the leaves of a checkpoint with their totals."""
    with open_source(path) as source:
        where = make_filter(include, exclude)
        leaves = choose(stored_leaves(source.tree), where)
        values = {}
        if where is None:
            values = plain_values(source.tree)
        codes = quantized(source).codes
        stats: dict[int, Stats] = {}
        if with_stats:
            note_codes(source, leaves, "the statistics are of")
            stats = _read_stats(source, leaves)
        if as_json:
            print_json(_document(source, leaves, values, stats, codes))
            return
        _print_title(source)
        if as_tree:
            print_tree(safe(os.path.basename(path.rstrip("/"))), _tree_lines(leaves, values, stats, codes))
        elif stats:
            print_table(_stats_table(leaves, values, stats))
        else:
            print_table(_table(leaves, values, codes))
        _print_totals(source, leaves, values)


def _read_stats(source: Source, leaves: Sequence[Stored]) -> dict[int, Stats]:
    """Return the statistics of leaves, by id."""
    stats: dict[int, Stats] = {}
    with progress("show", sum(one.size_bytes for one in leaves)) as tick:
        for one in leaves:
            if has_values(one.leaf.dtype):
                found = Stats()
                for piece in source.pieces(one.leaf, tick):
                    found.add(piece)
                stats[id(one.leaf)] = found
    return stats


def _tree_lines(leaves: Sequence[Stored], values: Values, stats: AllStats, codes: Codes) -> list[tuple[Path, str]]:
    """Return the paths of leaves and values, each with the text behind it."""
    lines: list[tuple[Path, str]] = []
    for one in leaves:
        text = f"{one.spec} {bytes_text(one.size_bytes)}"
        if id(one.leaf) in codes:
            text += f" {safe(str(codes[id(one.leaf)]))}"
        if id(one.leaf) in stats:
            texts = _stats_texts(stats[id(one.leaf)])
            text += "".join(f" {name} {number}" for name, number in zip(_STATS, texts, strict=True))
        lines.append((one.path, text))
        lines += [(path, f"tied to {shown(one.path)}") for path in one.paths[1:]]
    lines += [(path, _value_text(value)) for path, value in values.items()]
    return lines


def _print_totals(source: Source, leaves: Sequence[Stored], values: Values) -> None:
    by_dtype: dict[str, int] = {}
    for one in leaves:
        by_dtype[one.dtype_name] = by_dtype.get(one.dtype_name, 0) + one.size_bytes
    size = bytes_text(sum(by_dtype.values()))
    if len(by_dtype) > 1:
        sizes = [f"{name} {bytes_text(size_bytes)}" for name, size_bytes in by_dtype.items()]
        size += f" ({', '.join(sizes)})"
    elements = sum(one.leaf.numel() for one in leaves)
    parts = [count_text(len(leaves), "leaf"), count_text(elements, "element"), size]
    if values:
        parts.append(count_text(len(values), "non-tensor value"))
    if source.left_out:
        parts.append(f"{len(source.left_out)} left out")
    print(", ".join(parts))
    for line in listed([f"left out: {shown(at)}: {short(one.text)}" for at, one in source.left_out.items()]):
        print(line)


def _print_title(source: Source) -> None:
    """Print a line about the files, the metadata, and a table of steps if there are several."""
    parts = [safe(source.path), source.format]
    if len(source.files) > 1:
        parts.append(count_text(len(source.files), "file"))
    parts.append(f"{bytes_text(source.size_bytes)} on disk")
    if source.checksums:
        parts.append(f"checksums {safe(source.checksums)}")
    else:
        parts.append("no checksums")
    if source.step is not None:
        parts.append(f"step {source.step}, the latest of {', '.join(map(str, source.steps))}")
    print(", ".join(parts))
    for key, value in source.metadata.items():
        print(f"{safe(key)}: {_value_text(value)}")
    if len(source.steps) > 1:
        print_table(_steps_table(source))


def _steps_table(source: Source) -> Table:
    """Return the metadata of all steps."""
    found: dict[int, dict[str, Any]] = {}
    keys: dict[str, None] = {}
    for step in source.steps:
        folder = os.path.join(local_path(source.path), step_name(step))
        # A run that continues may have removed it by now.
        with suppress(CorruptCheckpointError, FileNotFoundError):
            found[step] = read_about(folder, step).metadata
            keys |= dict.fromkeys(found[step])
    rows: list[tuple[str, ...]] = []
    for step, metadata in found.items():
        rows.append((str(step), *[_value_text(metadata.get(key, "")) for key in keys]))
    return Table(("step", *map(safe, keys)), rows)


def _kind(one: Stored, codes: Codes) -> str:
    if id(one.leaf) in codes:
        scaled = codes[id(one.leaf)]
        return safe(f"{scaled}{_scope(one, scaled)}")
    kind = kind_text(one.kind) or ("non-tensor" if one.is_value else "tensor")
    if one.leaf.requires_grad:
        return f"{kind}, requires grad"
    return kind


def _scope(one: Stored, scaled: Scaled) -> str:
    """Return the codes that share a scale, as text; nothing if it is not known."""
    if scaled.blocks is None:
        return ""
    if scaled.blocks == tuple([max(1, size) for size in one.leaf.shape]):
        return " for the tensor"
    return f" for blocks of {' x '.join(map(str, scaled.blocks))}"


def _value_text(value: Any) -> str:
    if isinstance(value, NonTensorBase):
        value = plain(value)
    return short(repr(value))


def _table(leaves: Sequence[Stored], values: Values, codes: Codes) -> Table:
    """Return the table of leaves with their sizes and kinds."""
    header = ("path", "dtype", "shape", "size", "kind")
    if any(len(one.paths) > 1 for one in leaves):
        header += ("tied to",)
    rows: list[tuple[str, ...]] = []
    for one in leaves:
        ties = ", ".join(map(shown, one.paths[1:]))
        rows.append((*_leaf_texts(one), bytes_text(one.size_bytes), _kind(one, codes), ties))
    for path, value in values.items():
        rows.append((*_value_texts(path, value), "", f"value {_value_text(value)}", ""))
    return Table(header, [row[: len(header)] for row in rows], frozenset([3]))


def _stats_table(leaves: Sequence[Stored], values: Values, stats: AllStats) -> Table:
    """Return the table of leaves with their statistics; a value has none."""
    header = ("path", "dtype", "shape", *_STATS)
    rows: list[tuple[str, ...]] = []
    for one in leaves:
        rows.append((*_leaf_texts(one), *_stats_texts(stats.get(id(one.leaf)))))
    for path, value in values.items():
        rows.append((*_value_texts(path, value), *_stats_texts(None)))
    return Table(header, rows, frozenset(range(3, len(header))))


def _leaf_texts(one: Stored) -> tuple[str, str, str]:
    return shown(one.path), one.dtype_name, str(list(one.leaf.shape))


def _value_texts(path: Path, value: NonTensorBase) -> tuple[str, str, str]:
    return shown(path), "", str(list(value.shape))


def _stats_texts(stats: Stats | None) -> tuple[str, ...]:
    if stats is None:
        return ("",) * len(_STATS)
    found = [stats.summary()[name] for name in _STATS]
    numbers = ["-" if value is None else f"{value:.5g}" for value in found[:4]]
    # So that a single NaN among billions is not shown as none.
    shares = [f"{100 * value:.3g}%" if value else "0" for value in found[4:]]
    return (*numbers, *shares)


def _document(
    source: Source, leaves: Sequence[Stored], values: Values, stats: AllStats, codes: Codes
) -> dict[str, Any]:
    document = _source_entries(source)
    document["leaves"] = [_leaf_entry(one, stats, codes) for one in leaves]
    document["values"] = [_value_entry(path, value) for path, value in values.items()]
    document["left_out"] = [_left_out_entry(path, one) for path, one in source.left_out.items()]
    document["elements"] = sum(one.leaf.numel() for one in leaves)
    document["bytes"] = sum(one.size_bytes for one in leaves)
    return document


def _source_entries(source: Source) -> dict[str, Any]:
    return {
        "path": source.path,
        "format": source.format,
        "files": source.files,
        "checksums": source.checksums,
        "step": source.step,
        "batch_size": source.tree._batch_size,
        "metadata": source.metadata,
    }


def _left_out_entry(path: Path, one: LeftOut) -> dict[str, Any]:
    return {"path": path, "name": dotted(path), "what": one.text}


def _leaf_entry(one: Stored, stats: AllStats, codes: Codes) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "path": one.path,
        "name": one.name,
        "dtype": one.dtype_name,
        "shape": one.leaf.shape,
        "bytes": one.size_bytes,
        "kind": one.kind.value if one.kind is not None else None,
        "requires_grad": one.leaf.requires_grad,
        "tied_to": one.paths[1:],
    }
    if id(one.leaf) in codes:
        entry["layout"] = codes[id(one.leaf)].layout
        entry["scaled_by"] = codes[id(one.leaf)].companions
        entry["scale_blocks"] = codes[id(one.leaf)].blocks
    if id(one.leaf) in stats:
        entry["stats"] = stats[id(one.leaf)].summary()
    return entry


def _value_entry(path: Path, value: NonTensorBase) -> dict[str, Any]:
    return {
        "path": path,
        "name": dotted(path),
        "shape": value.shape,
        # One value for each element of the shape, as nested lists; else one for all.
        "per_element": not isinstance(value, NonTensorData),
        "value": plain(value),
    }
