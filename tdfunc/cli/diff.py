"""`tdfunc diff`: what two checkpoints do not have in common."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tdfunc.cli.numbers import Difference, Tolerance
from tdfunc.cli.output import Table, print_json, print_table, progress, short, shown
from tdfunc.cli.sources import Source, Stored, open_source, plain, plain_values, same_values, stored_leaves
from tdfunc.core.collection import TensorCollection
from tdfunc.core.keys import dotted
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.types import Path
from tdfunc.ops.display.text import count_text

EQUAL, DIFFERENT = 0, 1


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


def diff(a: str, b: str, *, tolerance: Tolerance | None, with_metadata: bool, as_json: bool) -> int:
    """Compare two checkpoints, values where a tolerance is given; return the exit code."""
    with open_source(a) as one, open_source(b) as other:
        first, second = [
            _Side(source, {path: leaf for leaf in stored_leaves(source.tree) for path in leaf.paths})
            for source in (one, other)
        ]
        found = list(_structure(first.leaves, second.leaves))
        if with_metadata:
            found += _metadata(first, second)
        values, compared = _compare_values(first, second, tolerance)
    code = DIFFERENT if found or values else EQUAL
    if as_json:
        entries = [entry._asdict() for entry in found] + [{"what": "values", **entry._asdict()} for entry in values]
        named = [{**entry, "name": dotted(entry["path"])} for entry in entries]
        print_json({"code": code, "values_compared": compared, "differences": named})
        return code
    if found:
        rows = [(entry.what, shown(entry.path), short(str(entry.a)), short(str(entry.b))) for entry in found]
        print_table(Table(("difference", "path", "A", "B"), rows))
    if values:
        rows = [
            (shown(entry.path), "the checksums differ", "", "")
            if entry.differing is None
            else (
                shown(entry.path),
                f"{entry.differing:,} of {entry.elements:,}",
                f"{entry.max_abs:.4g}",
                f"{entry.max_rel:.4g}",
            )
            for entry in values
        ]
        print_table(Table(("values", "differing", "max abs", "max rel"), rows, frozenset([1, 2, 3])))
    total = len(found) + len(values)
    print(f"{count_text(total, 'difference') if total else 'no differences'}; values compared: {compared}")
    return code


def _structure(a: dict[Path, Stored], b: dict[Path, Stored]) -> Iterator[Found]:
    """Compare which leaves there are, and their shapes and dtypes."""
    for path in dict.fromkeys([*a, *b]):
        one, other = a.get(path), b.get(path)
        if other is None:
            yield Found("missing", path, a[path].spec, "-")
        elif one is None:
            yield Found("added", path, "-", other.spec)
        else:
            yield from _unequal(path, {"shape": (list(one.leaf.shape), list(other.leaf.shape))})
            yield from _unequal(path, {"dtype": (one.dtype_name, other.dtype_name)})


def _metadata(first: _Side, second: _Side) -> Iterator[Found]:
    """Compare everything except the leaves' shapes, dtypes and values, as far as both sides record it."""
    if first.source.is_described and second.source.is_described:
        yield from _tree_metadata(first, second)
    values, others = plain_values(first.source.tree), plain_values(second.source.tree)
    for path in dict.fromkeys([*values, *others]):
        a, b = values.get(path), others.get(path)
        if not same_values(a, b):
            yield Found("value", path, _value(a), _value(b))
    texts, more = first.source.metadata, second.source.metadata
    for key in dict.fromkeys([*texts, *more]):
        yield from _unequal((), {f"metadata {key}": (texts.get(key), more.get(key))})


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


def _compare_values(first: _Side, second: _Side, tolerance: Tolerance | None) -> tuple[list[ValueDifference], str]:
    """Compare the values of the leaves that both have in one shape; say how."""
    common = [(one, second.leaves[path]) for path, one in first.leaves.items() if path == one.path in second.leaves]
    pairs = [(one, other) for one, other in common if one.leaf.shape == other.leaf.shape]
    found: list[ValueDifference] = []
    if tolerance is not None:
        with progress("diff", sum(one.size_bytes for one, _ in pairs)) as tick:
            for one, other in pairs:
                unequal = Difference(tolerance)
                for x, y in zip(first.source.pieces(one.leaf, tick), second.source.pieces(other.leaf), strict=True):
                    unequal.add(x, y)
                if unequal.differing:
                    numbers = unequal.differing, unequal.count, unequal.max_abs, unequal.max_rel
                    found.append(ValueDifference(one.path, *numbers))
        return found, "all"
    known = 0
    for one, other in pairs:
        digests = first.source.reader(one.leaf).digest, second.source.reader(other.leaf).digest
        if None not in digests and one.leaf.dtype == other.leaf.dtype:
            known += 1
            if digests[0] != digests[1]:
                found.append(ValueDifference(one.path, None, one.leaf.numel(), None, None))
    how = "by their recorded checksums" if known == len(pairs) else f"{known} of {len(pairs)}, by recorded checksums"
    return found, f"{how if known or not pairs else 'no'} (--values reads them)"
