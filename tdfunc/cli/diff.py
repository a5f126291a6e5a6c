"""`tdfunc diff`: what two checkpoints do not have in common."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tdfunc.cli.leaves import Stored, plain, plain_values, same_values, stored_leaves
from tdfunc.cli.numbers import Difference, Tolerance
from tdfunc.cli.output import Table, as_json, progress, render, short, shown
from tdfunc.cli.sources import Source, open_source
from tdfunc.cli.streams import emit
from tdfunc.core.collection import TensorCollection
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.types import Path
from tdfunc.ops.display.text import count_text

EQUAL, DIFFERENT = 0, 1


class DiffOptions(NamedTuple):
    """What is compared, and how."""

    values: bool = False
    tolerance: Tolerance = Tolerance()
    metadata: bool = True
    json: bool = False


class Found(NamedTuple):
    """One difference: in what, where, and what each side has."""

    what: str
    path: Path
    a: Any
    b: Any


class ValueDifference(NamedTuple):
    """Different values of one leaf; the numbers are None where only checksums were compared."""

    path: Path
    differing: int | None
    elements: int
    max_abs: float | None
    max_rel: float | None


class _Side(NamedTuple):
    """One of two checkpoints, and its leaves by each of their paths."""

    source: Source
    leaves: dict[Path, Stored]


def diff(a: str, b: str, options: DiffOptions) -> int:
    """Compare two checkpoints; return the exit code."""
    with open_source(a) as one, open_source(b) as other:
        first, second = _Side(one, _by_path(one)), _Side(other, _by_path(other))
        found = list(_structure(first.leaves, second.leaves))
        if options.metadata:
            found += _metadata(first, second)
        values, compared = _values(first, second, options)
    code = DIFFERENT if found or values else EQUAL
    if options.json:
        emit(as_json({"code": code, "values_compared": compared, "differences": _entries(found, values)}))
        return code
    if found:
        rows = [(one.what, shown(one.path), short(str(one.a)), short(str(one.b))) for one in found]
        emit(render(Table(("difference", "path", "A", "B"), rows)))
    if values:
        emit(render(_value_table(values)))
    total = len(found) + len(values)
    emit(f"{count_text(total, 'difference') if total else 'no differences'}; values compared: {compared}")
    return code


def _entries(found: list[Found], values: list[ValueDifference]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [
        {**one._asdict(), "path": list(one.path), "name": dotted(one.path)} for one in found
    ]
    for one in values:
        entries.append({"what": "values", **one._asdict(), "path": list(one.path), "name": dotted(one.path)})
    return entries


def _value_table(values: list[ValueDifference]) -> Table:
    rows: list[tuple[str, ...]] = []
    for one in values:
        numbers = ("the checksums differ", "", "")
        if one.differing is not None:
            numbers = (f"{one.differing:,} of {one.elements:,}", f"{one.max_abs:.4g}", f"{one.max_rel:.4g}")
        rows.append((shown(one.path), *numbers))
    return Table(("values", "differing", "max abs", "max rel"), rows, frozenset([1, 2, 3]))


def _by_path(source: Source) -> dict[Path, Stored]:
    return {path: one for one in stored_leaves(source.tree) for path in one.paths}


def _structure(a: dict[Path, Stored], b: dict[Path, Stored]) -> Iterator[Found]:
    """Compare which leaves there are, and their shapes and dtypes."""
    for path in [*a, *(path for path in b if path not in a)]:
        one, other = a.get(path), b.get(path)
        if one is None or other is None:
            yield Found("missing" if other is None else "added", path, _spec(one), _spec(other))
            continue
        if one.leaf.shape != other.leaf.shape:
            yield Found("shape", path, list(one.leaf.shape), list(other.leaf.shape))
        if one.leaf.dtype != other.leaf.dtype:
            yield Found("dtype", path, _dtype(one), _dtype(other))


def _dtype(one: Stored) -> str:
    return str(one.leaf.dtype).removeprefix("torch.")


def _spec(one: Stored | None) -> str:
    return "-" if one is None else f"{_dtype(one)} {list(one.leaf.shape)}"


def _metadata(first: _Side, second: _Side) -> Iterator[Found]:
    """Compare what is neither a leaf's shape and dtype nor a value, as far as both sides record it."""
    if first.source.is_described and second.source.is_described:
        yield from _tree_metadata(first, second)
    values, more = plain_values(first.source.tree), plain_values(second.source.tree)
    for path in [*values, *(path for path in more if path not in values)]:
        a, b = values.get(path), more.get(path)
        if not same_values(a, b):
            yield Found("value", path, _value(a), _value(b))
    texts, others = first.source.metadata, second.source.metadata
    for key in [*texts, *(key for key in others if key not in texts)]:
        yield from _unequal((), {f"metadata {key}": (texts.get(key), others.get(key))})


def _tree_metadata(first: _Side, second: _Side) -> Iterator[Found]:
    """Compare nodes, kinds and ties."""
    a, b = first.leaves, second.leaves
    for path in [path for path in a if path in b]:
        pairs = {"kind": (_kind(a[path]), _kind(b[path])), "tied": (_ties(a[path]), _ties(b[path]))}
        yield from _unequal(path, pairs)
    nodes, others = _nodes(first.source.tree), _nodes(second.source.tree)
    for path in [path for path in nodes if path in others]:
        yield from _unequal(path, {name: (value, others[path][name]) for name, value in nodes[path].items()})
    # Of a tree with leaves they are said already.
    for path in sorted(nodes.keys() ^ others.keys()):
        if not (nodes.get(path) or others[path])["keys"]:
            yield Found("empty tree", path, "-" if path in others else "there", "there" if path in others else "-")


def _unequal(path: Path, pairs: dict[str, tuple[Any, Any]]) -> Iterator[Found]:
    for what, (a, b) in pairs.items():
        # As texts too: True is 1, and 1 is 1.0.
        if a != b or repr(a) != repr(b):
            if what != "keys":
                yield Found(what, path, a, b)
            elif sorted(a) == sorted(b):
                yield Found("order of keys", path, a, b)


def _kind(one: Stored) -> str:
    parts = [one.kind.value if one.kind is not None else "none", type(one.leaf).__name__]
    return ", ".join([*parts, *(["requires grad"] if one.leaf.requires_grad else [])])


def _ties(one: Stored) -> str:
    return ", ".join(sorted(map(dotted, one.paths))) if len(one.paths) > 1 else "no"


def _nodes(tree: TensorCollection) -> dict[Path, dict[str, Any]]:
    found: dict[Path, dict[str, Any]] = {}
    stack: list[tuple[Path, TensorCollection]] = [((), tree)]
    while stack:
        at, node = stack.pop()
        own = node._static.own if node._static is not None else None
        found[at] = {
            "batch size": list(node._batch_size),
            "names": list(node._names) if node._names is not None else None,
            "class": type(node).__qualname__,
            "stack dimension": own,
            "keys": list(node._data),
        }
        stack.extend(((*at, key), inner) for key, inner in node._data.items() if isinstance(inner, TensorCollection))
    return found


def _value(value: NonTensorBase | None) -> Any:
    if value is None:
        return "-"
    # What it is one of, where two sides may differ in no more than that.
    return {"shape": list(value.shape), "value": plain(value)} if value.shape else plain(value)


# -- values -----------------------------------------------------------------------------------------------------


def _values(first: _Side, second: _Side, options: DiffOptions) -> tuple[list[ValueDifference], str]:
    """Compare the values of the leaves that both have in one shape; say how."""
    a, b = first.leaves, second.leaves
    common = [one for path, one in a.items() if path == one.path and path in b]
    pairs = [(one, b[one.path]) for one in common if one.leaf.shape == b[one.path].leaf.shape]
    if options.values:
        return _read_values(first.source, second.source, pairs, options), "all"
    found: list[ValueDifference] = []
    known = 0
    for one, other in pairs:
        digests = first.source.reader(one.leaf).digest, second.source.reader(other.leaf).digest
        if None not in digests and one.leaf.dtype == other.leaf.dtype:
            known += 1
            if digests[0] != digests[1]:
                found.append(ValueDifference(one.path, None, one.leaf.numel(), None, None))
    if known == len(pairs):
        return found, "by their recorded checksums (--values reads them)"
    how = f"{known} of {len(pairs)}, by recorded checksums" if known else "no"
    return found, f"{how} (--values reads them)"


def _read_values(
    first: Source, second: Source, pairs: list[tuple[Stored, Stored]], options: DiffOptions
) -> list[ValueDifference]:
    found: list[ValueDifference] = []
    with progress("diff", sum(one.size_bytes for one, _ in pairs)) as tick:
        for one, other in pairs:
            unequal = Difference(options.tolerance)
            for x, y in zip(first.pieces(one.leaf, tick), second.pieces(other.leaf), strict=True):
                unequal.add(x, y)
            if unequal.differing:
                numbers = unequal.differing, unequal.count, unequal.max_abs, unequal.max_rel
                found.append(ValueDifference(one.path, *numbers))
    return found
