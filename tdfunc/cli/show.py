"""`tdfunc show`: the leaves of a checkpoint."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tdfunc.cli.numbers import Stats, has_values
from tdfunc.cli.output import Table, listed, print_json, print_table, print_tree, progress, safe, short, shown
from tdfunc.cli.scales import note_codes, quantized
from tdfunc.cli.sources import Source, Stored, choose, make_filter, open_source, plain_values, stored_leaves
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
# The leaves of codes, by id.
Codes = Mapping[int, Scaled]


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
        stats: dict[int, Stats] = {}
        codes = quantized(source).codes
        if with_stats:
            note_codes(source, leaves, "the statistics are of")
            with progress("show", sum(one.size_bytes for one in leaves)) as tick:
                for one in leaves:
                    if has_values(one.leaf.dtype):
                        found = stats[id(one.leaf)] = Stats()
                        for piece in source.pieces(one.leaf, tick):
                            found.add(piece)
        if as_json:
            print_json(_document(source, leaves, values, stats, codes))
            return
        _print_title(source)
        if as_tree:
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
            print_tree(safe(os.path.basename(path.rstrip("/"))), lines)
        else:
            print_table(_table(leaves, values, stats, codes))
        by_dtype: dict[str, int] = {}
        for one in leaves:
            by_dtype[one.dtype_name] = by_dtype.get(one.dtype_name, 0) + one.size_bytes
        size = bytes_text(sum(by_dtype.values()))
        if len(by_dtype) > 1:
            size += f" ({', '.join(f'{name} {bytes_text(n)}' for name, n in by_dtype.items())})"
        elements = count_text(sum(one.leaf.numel() for one in leaves), "element")
        more = []
        if values:
            more = [count_text(len(values), "non-tensor value")]
        if source.left_out:
            more.append(f"{len(source.left_out)} left out")
        print(", ".join([count_text(len(leaves), "leaf"), elements, size, *more]))
        for line in listed([f"left out: {shown(at)}: {short(one.text)}" for at, one in source.left_out.items()]):
            print(line)


def _print_title(source: Source) -> None:
    parts = [safe(source.path), source.format]
    parts += [count_text(len(source.files), "file")] if len(source.files) > 1 else []
    parts.append(f"{bytes_text(source.size_bytes)} on disk")
    parts.append(f"checksums {safe(source.checksums)}" if source.checksums else "no checksums")
    if source.step is not None:
        parts.append(f"step {source.step}, the latest of {', '.join(map(str, source.steps))}")
    print(", ".join(parts))
    for key, value in source.metadata.items():
        print(f"{safe(key)}: {_value_text(value)}")
    if len(source.steps) > 1:
        found: dict[int, dict[str, Any]] = {}
        for step in source.steps:
            # A run that continues may have removed it by now.
            with suppress(CorruptCheckpointError, FileNotFoundError):
                found[step] = read_about(os.path.join(local_path(source.path), step_name(step)), step).metadata
        keys = list(dict.fromkeys(key for metadata in found.values() for key in metadata))
        rows = [(str(step), *(_value_text(found[step].get(key, "")) for key in keys)) for step in found]
        print_table(Table(("step", *map(safe, keys)), rows))


def _kind(one: Stored, codes: Codes) -> str:
    if id(one.leaf) in codes:
        return safe(str(codes[id(one.leaf)]))
    kind = kind_text(one.kind) or ("non-tensor" if one.is_value else "tensor")
    if one.leaf.requires_grad:
        return f"{kind}, requires grad"
    return kind


def _value_text(value: Any) -> str:
    return short(repr(plain(value) if isinstance(value, NonTensorBase) else value))


def _table(leaves: Sequence[Stored], values: Values, stats: dict[int, Stats], codes: Codes) -> Table:
    header: tuple[str, ...] = ("path", "dtype", "shape")
    rows = [(shown(one.path), one.dtype_name, str(list(one.leaf.shape))) for one in leaves]
    rows += [(shown(path), "", str(list(value.shape))) for path, value in values.items()]
    if stats:
        header += _STATS
        # A value has no statistics.
        more = [_stats_texts(stats.get(id(one.leaf))) for one in leaves] + [("",) * len(_STATS)] * len(values)
        numbers = frozenset(range(3, len(header)))
    else:
        has_ties = any(len(one.paths) > 1 for one in leaves)
        header += ("size", "kind", "tied to") if has_ties else ("size", "kind")
        more = [(bytes_text(one.size_bytes), _kind(one, codes), ", ".join(map(shown, one.paths[1:]))) for one in leaves]
        more += [("", f"value {_value_text(value)}", "") for value in values.values()]
        numbers = frozenset([3])
    return Table(header, [(*row, *texts)[: len(header)] for row, texts in zip(rows, more, strict=True)], numbers)


def _stats_texts(stats: Stats | None) -> tuple[str, ...]:
    if stats is None:
        return ("",) * len(_STATS)
    found = [stats.summary()[name] for name in _STATS]
    numbers = ["-" if value is None else f"{value:.5g}" for value in found[:4]]
    # So that a single NaN among billions is not shown as none.
    return (*numbers, *(f"{100 * value:.3g}%" if value else "0" for value in found[4:]))


def _document(
    source: Source, leaves: Sequence[Stored], values: Values, stats: dict[int, Stats], codes: Codes
) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    for one in leaves:
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
        entries.append({**entry, **({"stats": stats[id(one.leaf)].summary()} if id(one.leaf) in stats else {})})
    return {
        "path": source.path,
        "format": source.format,
        "files": source.files,
        "checksums": source.checksums,
        "step": source.step,
        "batch_size": source.tree._batch_size,
        "metadata": source.metadata,
        "leaves": entries,
        # `per_element`: one value for each element of the shape, as nested lists; else one for all.
        "values": [
            {
                "path": path,
                "name": dotted(path),
                "shape": value.shape,
                "per_element": not isinstance(value, NonTensorData),
                "value": plain(value),
            }
            for path, value in values.items()
        ],
        "left_out": [{"path": path, "name": dotted(path), "what": one.text} for path, one in source.left_out.items()],
        "elements": sum(one.leaf.numel() for one in leaves),
        "bytes": sum(one.size_bytes for one in leaves),
    }
