"""How trees look in a notebook: nested `<details>` and tables, without scripts, bounded for trees of any size."""

from collections.abc import Iterator
from html import escape
from itertools import islice
from typing import Any, NamedTuple

from tdfunc.core.collection import TensorCollection
from tdfunc.core.types import Kind, Path
from tdfunc.ops.display.facts import (
    Facts,
    aliases,
    bytes_text,
    count_text,
    facts_of,
    kind_text,
    leaf_type,
    printable,
    totals,
    value_text,
)
from tdfunc.ops.display.values import Values, number_text, values_of

# Rows in all, entries of one tree, levels, and leaves that are counted for totals.
ROWS, ENTRIES, DEPTH, COUNTED = 400, 100, 24, 300_000
# Characters of a key.
KEY = 80
# Above this many rows, sub-trees start closed.
OPEN_ROWS = 40

# Colours come from the page, so that they fit light and dark ones. "@" is the class three times over, which outweighs
# a notebook's own rules for tables.
STYLE = (
    "<style>"
    "@{font-size:12px;line-height:1.45;max-width:82em;color:inherit;overflow-x:auto}"
    "@ details{margin:0}@ .tdf-in{min-width:62em;margin:0 0 0 .45em;padding:0 0 0 .75em;"
    "border-left:1px solid rgba(128,128,128,.35)}@ .tdf-in .tdf-in{min-width:0}"
    "@ summary{cursor:pointer;padding:1px 0}@ summary:hover{background:rgba(128,128,128,.12)}"
    "@ table{border-collapse:collapse;border:0;margin:0;width:100%;table-layout:fixed;font-size:inherit}"
    "@ tr{background:none;border:0}@ tr:hover{background:rgba(128,128,128,.08)}"
    "@ td,@ th{border:0;padding:1px .8em 1px 0;text-align:left;vertical-align:top;max-width:none;"
    "white-space:normal;overflow-wrap:anywhere;background:none;color:inherit}"
    '@ td[colspan="6"]{padding-right:0}'
    "@ th{font-weight:normal;opacity:.6}@ .tdf-n{text-align:right}"
    "@ code,@ b{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:inherit;"
    "background:none;color:inherit;padding:0;white-space:pre-wrap}"
    "@ small{font-size:11px;opacity:.65}@ .tdf-bad{color:#e5484d;font-weight:600}"
    "@ svg{vertical-align:-2px;margin-right:.5em;opacity:.75}"
    "</style>"
).replace("@", ".tdf.tdf.tdf")
_COLUMNS = (
    '<colgroup><col><col style="width:11em"><col style="width:6.5em"><col style="width:5em">'
    '<col style="width:6em"><col style="width:26em"></colgroup>'
)
_HEADINGS = (
    "<thead><tr><th>key</th><th>shape</th><th>dtype</th><th>device</th>"
    '<th class="tdf-n">size</th><th>values</th></tr></thead>'
)


class Leaf(NamedTuple):
    """A row of a table."""

    path: Path
    node: Any
    kind: Kind | None


class More(NamedTuple):
    """Entries that are not shown, or a line about one that has no value."""

    text: str
    key: str | None = None


class Branch(NamedTuple):
    """A tree with the entries that are shown of it."""

    path: Path
    tree: TensorCollection
    entries: "list[Leaf | More | Branch]"


def render_html(tree: TensorCollection) -> str:
    """Return the HTML of a tree."""
    root = _plan(tree, (), ROWS)
    rows = list(_leaves(root))
    page = _Page(
        type(tree),
        {id(row): values for row, values in zip(rows, values_of([row.node for row in rows]), strict=True)},
        aliases(tree),
        len(rows) + sum(1 for _ in _branches(root)) <= OPEN_ROWS,
    )
    return f'<div class="tdf">{STYLE}{"".join(page.branch(root))}</div>'


# -- what is shown ----------------------------------------------------------------------------------------------


def _plan(tree: TensorCollection, path: Path, rows: int) -> Branch:
    """Choose what is shown of a tree in this many rows: sub-trees share what their siblings leave over."""
    keys = tree._keys()
    count = len(list(keys)) if not isinstance(keys, dict) else len(keys)  # pyright: ignore[reportUnknownArgumentType]
    shown = min(count, ENTRIES, rows) if len(path) < DEPTH else 0
    entries: list[Leaf | More | Branch] = []
    left = rows - shown
    for i, key in enumerate(islice(keys, shown)):
        node = tree._get(key)
        if isinstance(node, TensorCollection):
            branch = _plan(node, (*path, key), left // (shown - i))
            left -= sum(1 for _ in _leaves(branch)) + sum(1 for _ in _branches(branch)) - 1
            entries.append(branch)
        else:
            entries.append(Leaf((*path, key), node, tree._kinds.get(key)))
    if shown < count:
        entries.append(More(f"... {count - shown:,} more"))
    absent: Any = tree
    entries += [More(text, key) for key, text in islice(absent._show_absent().items(), ENTRIES)]
    return Branch(path, tree, entries)


def _leaves(branch: Branch) -> Iterator[Leaf]:
    for entry in branch.entries:
        if isinstance(entry, Branch):
            yield from _leaves(entry)
        elif isinstance(entry, Leaf):
            yield entry


def _branches(branch: Branch) -> Iterator[Branch]:
    yield branch
    for entry in branch.entries:
        if isinstance(entry, Branch):
            yield from _branches(entry)


# -- how it is written ------------------------------------------------------------------------------------------


class _Page:
    """The pieces of one page: the class of its root, what is known of its leaves, and whether sub-trees are open."""

    def __init__(
        self, cls: type, values: dict[int, Values | None], tied: dict[Path, list[Path]], is_open: bool
    ) -> None:
        self._class, self._values, self._tied, self._is_open = cls, values, tied, is_open
        self._countable = COUNTED

    def branch(self, branch: Branch) -> Iterator[str]:
        """Yield the HTML of a tree: a line that sums it up, and the table of its entries."""
        attribute = " open" if self._is_open or not branch.path else ""
        yield f"<details{attribute}><summary>{self._heading(branch)}</summary>"
        yield f'<div class="tdf-in"><table>{_COLUMNS}{"" if branch.path else _HEADINGS}<tbody>'
        for entry in branch.entries:
            if isinstance(entry, Branch):
                yield '<tr><td colspan="6">'
                yield from self.branch(entry)
                yield "</td></tr>"
            elif isinstance(entry, Leaf):
                yield self._leaf(entry)
            else:
                yield _more(entry)
        if not branch.entries:
            yield '<tr><td colspan="6"><small>no entries</small></td></tr>'
        yield "</tbody></table></div></details>"

    def _heading(self, branch: Branch) -> str:
        tree: Any = branch.tree
        parts = [f"batch {_sizes(tree._batch_size)}"]
        parts += tree._show_heading()
        if tree._names is not None:
            parts.append(f"names {printable(str(list(tree._names)))}")
        if tree._device is not None:
            parts.append(str(tree._device))
        if self._countable > 0:
            found = totals(tree, self._countable)
            self._countable -= found.leaves
            least = "" if found.complete else "at least "
            parts.append(f"{least}{count_text(found.leaves, 'leaf')}, {bytes_text(found.size_bytes)}")
        names = [_key(branch.path[-1])] if branch.path else []
        # What all sub-trees are is not worth saying of each.
        if not branch.path or type(tree) is not self._class:
            names.append(_text(type(tree).__name__))
        return f"{' '.join(names)} <small>{_text(' · '.join(parts), 1000)}</small>"

    def _leaf(self, row: Leaf) -> str:
        key, node = row.path[-1], row.node
        facts = facts_of(node)
        if not facts.dtype:
            kind = f" <small>{_text(leaf_type(node))}</small>"
            return (
                f'<tr><td>{_key(key)}{kind}</td><td colspan="5"><code>{_text(value_text(node), 400)}</code></td></tr>'
            )
        labels = [*_labels(row, facts), *self._ties(row.path)]
        small = f" <small>{_text(', '.join(labels), 400)}</small>" if labels else ""
        size = "" if facts.size_bytes is None else bytes_text(facts.size_bytes)
        return (
            f"<tr><td>{_key(key)}{small}</td><td><code>{_text(facts.shape, 200)}</code></td>"
            f"<td>{_text(facts.dtype)}</td><td>{_text(facts.device)}</td>"
            f'<td class="tdf-n">{size}</td><td>{_values(self._values.get(id(row)))}</td></tr>'
        )

    def _ties(self, path: Path) -> list[str]:
        others = self._tied.get(path, [])
        return [f"tied to {', '.join('.'.join(map(printable, other)) for other in others[:3])}"] if others else []


def _labels(row: Leaf, facts: Facts) -> Iterator[str]:
    if facts.type not in ("Tensor", "Parameter") or (row.kind is None and facts.type != "Tensor"):
        yield facts.type
    if row.kind is not None:
        yield kind_text(row.kind)
    yield from facts.notes


def _more(entry: More) -> str:
    if entry.key is None:
        return f'<tr><td colspan="6"><small>{_text(entry.text)}</small></td></tr>'
    return f'<tr><td>{_key(entry.key)}</td><td colspan="5"><small>{_text(entry.text)}</small></td></tr>'


def _key(key: str) -> str:
    return f"<b>{_text(key, KEY)}</b>"


def _text(text: str, limit: int = 120) -> str:
    return escape(printable(text, limit), quote=True)


def _sizes(size: Any) -> str:
    return f"[{', '.join(map(str, size))}]"


def _values(values: Values | None) -> str:
    """Return the histogram and the range of a leaf's values."""
    if values is None:
        return ""
    parts: list[str] = []
    if values.text is not None:
        parts.append(_text(values.text))
    elif values.low is False:
        parts.append(f"{100 * (values.mean or 0):.3g} % True")
    elif values.low is not None:
        parts.append(_range(values))
    bad = [f"{100 * n:.3g} % {word}" for n, word in ((values.share_nan, "NaN"), (values.share_inf, "inf")) if n]
    if bad:
        parts.append(f'<span class="tdf-bad">{", ".join(bad)}</span>')
    if values.of:
        parts.append(f"<small>({_text(', '.join(values.of))})</small>")
    return _sparkline(values.counts) + " ".join(parts)


def _range(values: Values) -> str:
    if values.low == values.high:
        return f"all {number_text(values.low)}"
    return f"{number_text(values.low)} .. {number_text(values.high)}, mean {values.mean:.4g}"


def _sparkline(counts: tuple[int, ...]) -> str:
    """Return a histogram as one path of bars in the colour of the text."""
    if not counts:
        return ""
    width, height, top = 48, 12, max(counts)
    step = width / len(counts)
    bars = "".join(
        # What is there at all is seen.
        f"M{i * step:.3g} {height}v-{max(height * n / top, 0.8):.3g}h{step * 0.85:.3g}V{height}z"
        for i, n in enumerate(counts)
        if n
    )
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="histogram">'
        f'<path d="{bars}" fill="currentColor"/></svg>'
    )
