"""`tdfunc show`: what is in a checkpoint."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from tdfunc.cli.leaves import Stored, choose, make_filter, plain, plain_values, stored_leaves
from tdfunc.cli.numbers import Stats, has_values
from tdfunc.cli.output import Table, as_json, progress, render, render_tree, safe, short, shown
from tdfunc.cli.sources import Source, open_source
from tdfunc.cli.streams import emit
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase, NonTensorData
from tdfunc.core.types import Path
from tdfunc.ops.display.text import bytes_text, count_text, kind_text

_STATS = ("min", "max", "mean", "std", "nan", "inf", "zero")


class ShowOptions(NamedTuple):
    """What is shown, and how."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    tree: bool = False
    stats: bool = False
    json: bool = False


def show(path: str, options: ShowOptions) -> None:
    """Print the leaves of a checkpoint with their totals."""
    with open_source(path) as source:
        where = make_filter(options.include, options.exclude)
        leaves = choose(stored_leaves(source.tree), where)
        values = plain_values(source.tree) if where is None else {}
        stats = _compute_stats(source, leaves) if options.stats else {}
        if options.json:
            emit(as_json(_document(source, leaves, values, stats)))
            return
        emit(_title(source))
        if options.tree:
            emit(render_tree(safe(os.path.basename(path.rstrip("/"))), _tree_lines(leaves, values, stats)))
        else:
            emit(render(_table(leaves, values, stats)))
        emit(_totals(leaves, values))


def _compute_stats(source: Source, leaves: Sequence[Stored]) -> dict[int, Stats]:
    found: dict[int, Stats] = {}
    with progress("show", sum(one.size_bytes for one in leaves)) as tick:
        for one in leaves:
            if has_values(one.leaf.dtype):
                stats = found[id(one.leaf)] = Stats()
                for piece in source.pieces(one.leaf, tick):
                    stats.add(piece)
    return found


def _title(source: Source) -> str:
    size = bytes_text(source.size_bytes)
    parts = [safe(source.path), source.format]
    if len(source.files) > 1:
        parts.append(count_text(len(source.files), "file"))
    parts.append(f"{size} on disk")
    parts.append(f"checksums {safe(source.checksums)}" if source.checksums else "no checksums")
    if source.step is not None:
        parts.append(f"step {source.step}, the latest of {', '.join(map(str, source.steps))}")
    lines = [", ".join(parts)]
    lines += [f"{safe(key)}: {_value_text(value)}" for key, value in source.metadata.items()]
    return "\n".join(lines)


def _type_text(one: Stored) -> str:
    return str(one.leaf.dtype).removeprefix("torch.")


def _kind(one: Stored) -> str:
    parts = [kind_text(one.kind) or ("non-tensor" if one.is_value else "tensor")]
    if type(one.leaf).__name__ == "Parameter":
        parts = [one.kind.value if one.kind else "Parameter"]
    if one.leaf.requires_grad:
        parts.append("requires grad")
    return ", ".join(parts)


def _ties_text(one: Stored) -> str:
    return ", ".join(shown(path) for path in one.paths[1:])


def _value_text(value: Any) -> str:
    return short(repr(plain(value) if isinstance(value, NonTensorBase) else value))


def _table(leaves: Sequence[Stored], values: dict[Path, NonTensorBase], stats: dict[int, Stats]) -> Table:
    header = ("path", "dtype", "shape", "size", "kind", "tied to")
    rows = [
        (
            shown(one.path),
            _type_text(one),
            str(list(one.leaf.shape)),
            bytes_text(one.size_bytes),
            _kind(one),
            _ties_text(one),
        )
        for one in leaves
    ]
    rows += [
        (shown(path), "", str(list(value.shape)), "", f"value {_value_text(value)}", "")
        for path, value in values.items()
    ]
    if stats:
        # Of a value there is nothing to compute.
        extra = [_stats_texts(stats.get(id(one.leaf))) for one in leaves] + [("",) * len(_STATS)] * len(values)
        rows = [(*row[:3], *more) for row, more in zip(rows, extra, strict=True)]
        return Table((*header[:3], *_STATS), rows, frozenset(range(3, 3 + len(_STATS))))
    if not any(row[5] for row in rows):
        return Table(header[:5], [row[:5] for row in rows], frozenset([3]))
    return Table(header, rows, frozenset([3]))


def _stats_texts(stats: Stats | None) -> tuple[str, ...]:
    if stats is None:
        return ("",) * len(_STATS)
    found = stats.summary()
    numbers = [_number(found[name]) for name in _STATS[:4]]
    return (*numbers, *(_share(found[name]) for name in _STATS[4:]))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _share(value: float | None) -> str:
    if not value:
        return "0"
    # So that a single NaN among billions is not shown as none.
    return f"{100 * value:.3g}%"


def _tree_lines(
    leaves: Sequence[Stored], values: dict[Path, NonTensorBase], stats: dict[int, Stats]
) -> list[tuple[Path, str]]:
    lines: list[tuple[Path, str]] = []
    for one in leaves:
        text = f"{_type_text(one)} {list(one.leaf.shape)} {bytes_text(one.size_bytes)}"
        if id(one.leaf) in stats:
            text += " ".join(
                ["", *(f"{n} {t}" for n, t in zip(_STATS, _stats_texts(stats[id(one.leaf)]), strict=True))]
            )
        lines.append((one.path, text))
        lines += [(path, f"tied to {shown(one.path)}") for path in one.paths[1:]]
    return [*lines, *((path, _value_text(value)) for path, value in values.items())]


def _totals(leaves: Sequence[Stored], values: dict[Path, NonTensorBase]) -> str:
    elements = sum(one.leaf.numel() for one in leaves)
    size = bytes_text(sum(one.size_bytes for one in leaves))
    by_dtype: dict[str, int] = {}
    for one in leaves:
        by_dtype[_type_text(one)] = by_dtype.get(_type_text(one), 0) + one.size_bytes
    text = f"{count_text(len(leaves), 'leaf')}, {count_text(elements, 'element')}, {size}"
    if len(by_dtype) > 1:
        text += f" ({', '.join(f'{name} {bytes_text(n)}' for name, n in by_dtype.items())})"
    return text + (f", {count_text(len(values), 'non-tensor value')}" if values else "")


def _document(
    source: Source, leaves: Sequence[Stored], values: dict[Path, NonTensorBase], stats: dict[int, Stats]
) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    for one in leaves:
        entry: dict[str, Any] = {
            "path": list(one.path),
            "name": one.name,
            "dtype": _type_text(one),
            "shape": list(one.leaf.shape),
            "bytes": one.size_bytes,
            "kind": one.kind.value if one.kind is not None else None,
            "requires_grad": one.leaf.requires_grad,
            "tied_to": [list(path) for path in one.paths[1:]],
        }
        if id(one.leaf) in stats:
            entry["stats"] = stats[id(one.leaf)].summary()
        entries.append(entry)
    return {
        "path": source.path,
        "format": source.format,
        "files": source.files,
        "checksums": source.checksums,
        "step": source.step,
        "batch_size": list(source.tree._batch_size),
        "metadata": source.metadata,
        "leaves": entries,
        "values": [_entry_of(path, value) for path, value in values.items()],
        "elements": sum(one.leaf.numel() for one in leaves),
        "bytes": sum(one.size_bytes for one in leaves),
    }


def _entry_of(path: Path, value: NonTensorBase) -> dict[str, Any]:
    return {
        "path": list(path),
        "name": dotted(path),
        "shape": list(value.shape),
        # Whether there is one for each element of the shape, as nested lists; else it is one for all.
        "per_element": not isinstance(value, NonTensorData),
        "value": plain(value),
    }
