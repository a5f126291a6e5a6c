"""`tdfunc diff`: the differences of two checkpoints."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tdfunc.cli.numbers import Difference, Tolerance
from tdfunc.cli.output import Table, print_json, print_table, progress, short, shown
from tdfunc.cli.scales import note_codes
from tdfunc.cli.sources import Source, Stored, choose, open_source, plain_values, stored_leaves
from tdfunc.cli.values import described, differing, texts_apart
from tdfunc.core.collection import TensorCollection
from tdfunc.core.keys import FilterLike, dotted
from tdfunc.core.types import Path
from tdfunc.ops.display.text import count_text
from tdfunc.storage.tree.objects import PlainObject

EQUAL = 0
DIFFERENT = 1
_MAX_PATHS = 3
# In place of a leaf or value that one side does not have.
_ABSENT = "-"


class Found(NamedTuple):
    """One difference: the fact, the path, and the value on each side."""

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


def diff(
    a: str, b: str, where: "FilterLike | None", *, tolerance: Tolerance | None, with_metadata: bool, as_json: bool
) -> int:
    """Compare two checkpoints, or chosen leaves of them, values where a tolerance is given; return the exit code."""
    with open_source(a) as first, open_source(b) as second:
        sources = (first, second)
        leaves = [choose(stored_leaves(source.tree), where) for source in sources]
        found = _compare_facts(sources, leaves, with_metadata, with_trees=where is None)
        if tolerance is not None:
            if any(tolerance):
                note_codes(first, leaves[0], "the tolerance is of")
            values = _compare_values(sources, _common_leaves(leaves), tolerance)
            compared = "all"
        else:
            values, compared = _compare_checksums(sources, _common_leaves(leaves))
    code = DIFFERENT if found or values else EQUAL
    if as_json:
        _print_json(code, compared, found, values)
        return code
    if found:
        print_table(Table(("difference", "path", "A", "B"), _rows_of_facts(found)))
    if values:
        rows = [_row_of_values(entry) for entry in values]
        print_table(Table(("values", "differing", "max abs", "max rel"), rows, frozenset([1, 2, 3])))
    total = len(found) + len(values)
    print(f"{count_text(total, 'difference') if total else 'no differences'}; values compared: {compared}")
    return code


def _print_json(code: int, compared: str, found: Sequence[Found], values: Sequence[ValueDifference]) -> None:
    entries = [entry._asdict() for entry in found]
    entries += [{"what": "values", **entry._asdict()} for entry in values]
    named = [{**entry, "name": dotted(entry["path"])} for entry in entries]
    print_json({"code": code, "values_compared": compared, "differences": named})


def _rows_of_facts(found: Sequence[Found]) -> list[tuple[str, ...]]:
    """Return one row for all leaves that differ in the same way, such as Parameters and their mean."""
    alike: dict[tuple[str, str, str], list[Path]] = {}
    for entry in found:
        a, b = texts_apart(str(entry.a), str(entry.b))
        alike.setdefault((entry.what, short(a), short(b)), []).append(entry.path)
    return [(what, _first_paths(paths), a, b) for (what, a, b), paths in alike.items()]


def _row_of_values(entry: ValueDifference) -> tuple[str, ...]:
    if entry.differing is None:
        return shown(entry.path), "the checksums differ", "", ""
    count = f"{entry.differing:,} of {entry.elements:,}"
    return shown(entry.path), count, f"{entry.max_abs:.4g}", f"{entry.max_rel:.4g}"


def _first_paths(paths: Sequence[Path]) -> str:
    more = ""
    if len(paths) > _MAX_PATHS:
        more = f" and {len(paths) - _MAX_PATHS} more"
    return ", ".join(map(shown, paths[:_MAX_PATHS])) + more


def _compare_facts(
    sources: tuple[Source, Source], leaves: Sequence[Sequence[Stored]], with_metadata: bool, *, with_trees: bool
) -> list[Found]:
    """Compare everything except values: the chosen leaves, and with trees also sub-trees and non-tensor data."""
    # A file of torch.save or of another program has no kinds, batch sizes and so on.
    is_described = with_metadata and all(source.is_described for source in sources)
    # In a file of torch.save, names that share memory are tied.
    has_ties = with_metadata and all(source.is_described or source.format == "torch" for source in sources)
    a, b = [_leaf_facts(chosen, is_described, has_ties) for chosen in leaves]
    if with_trees:
        a |= _tree_facts(sources[0], with_metadata, is_described)
        b |= _tree_facts(sources[1], with_metadata, is_described)
    found: list[Found] = []
    for key in dict.fromkeys([*a, *b]):
        found += _compare(key, a.get(key), b.get(key))
    return found


# Facts by name, of a "leaf", a non-tensor "value" or a "tree" at a path.
Facts = dict[tuple[str, Path], dict[str, Any]]


def _leaf_facts(leaves: Sequence[Stored], is_described: bool, has_ties: bool) -> Facts:
    """Return everything about leaves that is compared except values."""
    found: Facts = {}
    for one in leaves:
        facts: dict[str, Any] = {"shape": list(one.leaf.shape), "dtype": one.dtype_name}
        if is_described:
            facts["kind"] = one.kind.value if one.kind is not None else "none"
            facts["class"] = type(one.leaf).__name__
            if one.leaf.requires_grad:
                facts["class"] += ", requires grad"
        if has_ties:
            if len(one.paths) > 1:
                facts["tied"] = ", ".join(sorted(map(dotted, one.paths)))
            else:
                facts["tied"] = "no"
        found |= {("leaf", path): facts for path in one.paths}
    return found


def _tree_facts(source: Source, with_metadata: bool, is_described: bool) -> Facts:
    """Return everything about non-tensor data, metadata and sub-trees that is compared."""
    found: Facts = {}
    if with_metadata:
        for path, value in plain_values(source.tree).items():
            found["value", path] = {"value": described(value)}
        for path, left_out in source.left_out.items():
            found["value", path] = {"value": left_out.text}
        found["tree", ()] = {f"metadata {key}": value for key, value in source.metadata.items()}
    if not is_described:
        return found
    stack: list[tuple[Path, TensorCollection]] = [((), source.tree)]
    while stack:
        at, node = stack.pop()
        # The root has the facts of the metadata already.
        found["tree", at] = {**_node_facts(node), **found.get(("tree", at), {})}
        for key, inner in node._data.items():
            if isinstance(inner, TensorCollection):
                stack.append(((*at, key), inner))
    return found


def _node_facts(node: TensorCollection) -> dict[str, Any]:
    names = None
    if node._names is not None:
        names = list(node._names)
    own = None
    if node._static is not None:
        own = node._static.own
    what = "description" if isinstance(node, PlainObject) else "stack dimension"
    return {
        "batch size": list(node._batch_size),
        "names": names,
        "class": type(node).__qualname__,
        what: own,
        "keys": list(node._data),
    }


def _compare(key: tuple[str, Path], a: dict[str, Any] | None, b: dict[str, Any] | None) -> Iterator[Found]:
    """Compare the facts of two sides as strings, since True == 1 == 1.0."""
    what, path = key
    if a is None or b is None:
        yield from _compare_absent(what, path, a, b)
    elif what == "value":
        for place, own, other in differing(a["value"], b["value"]):
            yield Found("value", (*path, *place), own, other)
    else:
        for name in dict.fromkeys([*a, *b]):
            x = a.get(name)
            y = b.get(name)
            if name == "keys":
                # Keys that one side does not have are separate differences.
                if x != y and sorted(a["keys"]) == sorted(b["keys"]):
                    yield Found("order of keys", path, x, y)
            elif repr(x) != repr(y):
                yield Found(name, path, x, y)


def _compare_absent(what: str, path: Path, a: dict[str, Any] | None, b: dict[str, Any] | None) -> Iterator[Found]:
    """Compare the facts of a leaf, value or tree that one side does not have."""
    only = a or b or {}
    if what == "leaf":
        yield Found("missing" if b is None else "added", path, _spec_text(a), _spec_text(b))
    elif what == "value":
        yield Found("value", path, *[side["value"] if side is not None else _ABSENT for side in (a, b)])
    # The leaves of other trees are reported already.
    elif not only["keys"]:
        yield Found("empty tree", path, *["there" if side is not None else _ABSENT for side in (a, b)])


def _spec_text(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return _ABSENT
    return f"{facts['dtype']} {facts['shape']}"


def _common_leaves(leaves: Sequence[Sequence[Stored]]) -> list[tuple[Stored, Stored]]:
    """Return the pairs of leaves at one path that have one shape."""
    others: dict[Path, Stored] = {}
    for one in leaves[1]:
        others |= dict.fromkeys(one.paths, one)
    common = [(one, others[one.path]) for one in leaves[0] if one.path in others]
    return [(one, other) for one, other in common if one.leaf.shape == other.leaf.shape]


def _compare_values(
    sources: tuple[Source, Source], pairs: Sequence[tuple[Stored, Stored]], tolerance: Tolerance
) -> list[ValueDifference]:
    """Read and compare the values of pairs of leaves."""
    a, b = sources
    found: list[ValueDifference] = []
    with progress("diff", sum(one.size_bytes for one, _ in pairs)) as tick:
        for one, other in pairs:
            unequal = Difference(tolerance)
            for x, y in zip(a.pieces(one.leaf, tick), b.pieces(other.leaf), strict=True):
                unequal.add(x, y)
            if unequal.differing:
                numbers = unequal.differing, unequal.count, unequal.max_abs, unequal.max_rel
                found.append(ValueDifference(one.path, *numbers))
    return found


def _compare_checksums(
    sources: tuple[Source, Source], pairs: Sequence[tuple[Stored, Stored]]
) -> tuple[list[ValueDifference], str]:
    """Compare the recorded checksums of pairs of leaves; return the differences, and how many could be compared."""
    a, b = sources
    found: list[ValueDifference] = []
    known = 0
    for one, other in pairs:
        digest = a.readers[id(one.leaf)].digest
        other_digest = b.readers[id(other.leaf)].digest
        if digest is None or other_digest is None or one.leaf.dtype != other.leaf.dtype:
            continue
        known += 1
        if digest != other_digest:
            found.append(ValueDifference(one.path, None, one.leaf.numel(), None, None))
    if known == len(pairs):
        how = "by their recorded checksums"
    elif known:
        how = f"{known} of {len(pairs)}, by recorded checksums"
    else:
        how = "no"
    return found, f"{how} (--values reads them)"
