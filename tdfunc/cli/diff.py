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
        # A file of torch.save or of another program has no kinds, batch sizes and so on.
        is_described = with_metadata and first.is_described and second.is_described
        # In a file of torch.save, names that share memory are tied.
        has_ties = with_metadata and all(one.is_described or one.format == "torch" for one in (first, second))
        leaves = [choose(stored_leaves(source.tree), where) for source in (first, second)]
        one, other = [_leaf_facts(found, is_described, has_ties) for found in leaves]
        if where is None:
            one |= _tree_facts(first, with_metadata, is_described)
            other |= _tree_facts(second, with_metadata, is_described)
        found = [
            entry for key in dict.fromkeys([*one, *other]) for entry in _compare(key, one.get(key), other.get(key))
        ]
        if tolerance is not None and any(tolerance):
            note_codes(first, leaves[0], "the tolerance is of")
        values, compared = _compare_values((first, second), leaves, tolerance)
    code = DIFFERENT if found or values else EQUAL
    if as_json:
        entries = [entry._asdict() for entry in found] + [{"what": "values", **entry._asdict()} for entry in values]
        named = [{**entry, "name": dotted(entry["path"])} for entry in entries]
        print_json({"code": code, "values_compared": compared, "differences": named})
        return code
    if found:
        # One row for all leaves that differ in the same way, such as Parameters and their mean.
        alike: dict[tuple[str, str, str], list[Path]] = {}
        for entry in found:
            a_text, b_text = texts_apart(str(entry.a), str(entry.b))
            alike.setdefault((entry.what, short(a_text), short(b_text)), []).append(entry.path)
        rows = [(what, _shown_all(paths), a, b) for (what, a, b), paths in alike.items()]
        print_table(Table(("difference", "path", "A", "B"), rows))
    if values:
        rows: list[tuple[str, ...]] = []
        for entry in values:
            numbers = ("the checksums differ", "", "")
            if entry.differing is not None:
                numbers = f"{entry.differing:,} of {entry.elements:,}", f"{entry.max_abs:.4g}", f"{entry.max_rel:.4g}"
            rows.append((shown(entry.path), *numbers))
        print_table(Table(("values", "differing", "max abs", "max rel"), rows, frozenset([1, 2, 3])))
    total = len(found) + len(values)
    print(f"{count_text(total, 'difference') if total else 'no differences'}; values compared: {compared}")
    return code


def _shown_all(paths: Sequence[Path]) -> str:
    more = ""
    if len(paths) > _MAX_PATHS:
        more = f" and {len(paths) - _MAX_PATHS} more"
    return ", ".join(map(shown, paths[:_MAX_PATHS])) + more


# Facts by name, of a "leaf", a non-tensor "value" or a "tree" at a path.
Facts = dict[tuple[str, Path], dict[str, Any]]


def _leaf_facts(leaves: Sequence[Stored], is_described: bool, has_ties: bool) -> Facts:
    """Return everything about leaves that is compared except values."""
    found: Facts = {}
    for one in leaves:
        facts: dict[str, Any] = {"shape": list(one.leaf.shape), "dtype": one.dtype_name}
        if is_described:
            facts["kind"] = one.kind.value if one.kind is not None else "none"
            facts["class"] = type(one.leaf).__name__ + (", requires grad" if one.leaf.requires_grad else "")
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
        found |= {("value", path): {"value": described(value)} for path, value in plain_values(source.tree).items()}
        found |= {("value", path): {"value": value.text} for path, value in source.left_out.items()}
        found["tree", ()] = {f"metadata {key}": value for key, value in source.metadata.items()}
    stack: list[tuple[Path, TensorCollection]] = [((), source.tree)] if is_described else []
    while stack:
        at, node = stack.pop()
        found["tree", at] = {
            "batch size": list(node._batch_size),
            "names": list(node._names) if node._names is not None else None,
            "class": type(node).__qualname__,
            "stack dimension": node._static.own if node._static is not None else None,
            "keys": list(node._data),
            **found.get(("tree", at), {}),
        }
        stack.extend(((*at, key), inner) for key, inner in node._data.items() if isinstance(inner, TensorCollection))
    return found


def _compare(key: tuple[str, Path], a: dict[str, Any] | None, b: dict[str, Any] | None) -> Iterator[Found]:
    """Compare the facts of two sides as strings, since True == 1 == 1.0."""
    what, path = key
    if a is None or b is None:
        if what == "leaf":
            specs = [f"{side['dtype']} {side['shape']}" if side is not None else _ABSENT for side in (a, b)]
            yield Found("missing" if b is None else "added", path, *specs)
        elif what == "value":
            yield Found("value", path, *[side["value"] if side is not None else _ABSENT for side in (a, b)])
        # The leaves of other trees are reported already.
        elif not (a or b or {})["keys"]:
            yield Found("empty tree", path, *["there" if side is not None else "-" for side in (a, b)])
        return
    for name in dict.fromkeys([*a, *b]):
        x = a.get(name)
        y = b.get(name)
        if what == "value":
            for place, own, other in differing(x, y):
                yield Found("value", (*path, *place), own, other)
            continue
        if name == "keys" and x != y and sorted(a["keys"]) == sorted(b["keys"]):
            yield Found("order of keys", path, x, y)
        elif name != "keys" and repr(x) != repr(y):
            yield Found(name, path, x, y)


def _compare_values(
    sources: tuple[Source, Source], leaves: Sequence[Sequence[Stored]], tolerance: Tolerance | None
) -> tuple[list[ValueDifference], str]:
    """Compare the values of common leaves of one shape; return the differences and the kind of comparison."""
    a, b = sources
    others = {path: one for one in leaves[1] for path in one.paths}
    common = [(one, others[one.path]) for one in leaves[0] if one.path in others]
    pairs = [(one, other) for one, other in common if one.leaf.shape == other.leaf.shape]
    found: list[ValueDifference] = []
    if tolerance is not None:
        with progress("diff", sum(one.size_bytes for one, _ in pairs)) as tick:
            for one, other in pairs:
                unequal = Difference(tolerance)
                for x, y in zip(a.pieces(one.leaf, tick), b.pieces(other.leaf), strict=True):
                    unequal.add(x, y)
                if unequal.differing:
                    numbers = unequal.differing, unequal.count, unequal.max_abs, unequal.max_rel
                    found.append(ValueDifference(one.path, *numbers))
        return found, "all"
    known = 0
    for one, other in pairs:
        digests = a.readers[id(one.leaf)].digest, b.readers[id(other.leaf)].digest
        if None not in digests and one.leaf.dtype == other.leaf.dtype:
            known += 1
            if digests[0] != digests[1]:
                found.append(ValueDifference(one.path, None, one.leaf.numel(), None, None))
    how = "by their recorded checksums"
    if known != len(pairs):
        how = f"{known} of {len(pairs)}, by recorded checksums"
    return found, f"{how if known or not pairs else 'no'} (--values reads them)"
