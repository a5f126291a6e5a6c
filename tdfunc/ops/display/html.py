"""The HTML of a tree in a notebook: nested `<details>` and tables, without scripts, bounded for trees of any size."""

from collections.abc import Iterator
from html import escape
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdfunc.core.collection import PLAIN, TensorCollection
from tdfunc.core.types import Kind, Path
from tdfunc.ops.display.text import (
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

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
# Rows in all, entries of one tree, levels, leaves counted for totals, elements of a leaf that are read.
ROWS = 400
ENTRIES = 100
DEPTH = 24
COUNTED = 300_000
VALUES = 1 << 14
# Characters of a key.
KEY = 80
# Sub-trees of a tree with more leaves start closed.
OPEN_LEAVES = 40

# Colours come from the page, so that they fit light and dark ones. "@" is the class three times over, which outweighs
# a notebook's own rules for tables.
STYLE = (
    "<style>"
    "@{font-size:12px;line-height:1.45;max-width:74em;overflow-x:auto}@ details{margin:0}"
    "@ .tdf-in{min-width:54em;margin-left:.45em;padding-left:.75em;border-left:1px solid rgba(128,128,128,.35)}"
    "@ .tdf-in .tdf-in{min-width:0}@ summary{cursor:pointer}@ summary:hover{background:rgba(128,128,128,.12)}"
    "@ table{border-collapse:collapse;border:0;margin:0;width:100%;table-layout:fixed;font-size:inherit}"
    "@ tr,@ td,@ th,@ code,@ b{background:none;border:0;color:inherit}@ tr:hover{background:rgba(128,128,128,.08)}"
    "@ td,@ th{padding:1px .8em 1px 0;text-align:left;vertical-align:top;white-space:normal;overflow-wrap:anywhere}"
    '@ td[colspan="6"]{padding-right:0}@ th{font-weight:normal;opacity:.6}@ .tdf-n{text-align:right}'
    "@ code,@ b{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:inherit;padding:0;white-space:pre-wrap}"
    "@ small{font-size:11px;opacity:.65}@ .tdf-bad{color:#e5484d;font-weight:600}"
    "</style>"
).replace("@", ".tdf.tdf.tdf")
_COLUMNS = (
    '<colgroup><col><col style="width:11em"><col style="width:6.5em"><col style="width:5em">'
    '<col style="width:6em"><col style="width:20em"></colgroup>'
)
_HEADINGS = (
    "<thead><tr><th>key</th><th>shape</th><th>dtype</th><th>device</th>"
    '<th class="tdf-n">size</th><th>values</th></tr></thead>'
)


def render_html(tree: TensorCollection) -> str:
    """Return the HTML of a tree."""
    # The sum of large numbers may overflow.
    with np.errstate(over="ignore"):
        body = "".join(_Page(tree).branch(tree, (), ROWS))
    return f'<div class="tdf">{STYLE}{body}</div>'


class _Page:
    """One page: the class of its root, the ties, the state of its sub-trees, the leaves that may still be counted."""

    def __init__(self, tree: TensorCollection) -> None:
        self._class = type(tree)
        self._tied = aliases(tree)
        self._is_open = totals(tree, OPEN_LEAVES)[2]
        self._countable = COUNTED

    def branch(self, tree: TensorCollection, path: Path, rows: int) -> Iterator[str]:
        """Yield the heading of a tree and the table of its entries; its sub-trees share the remaining rows."""
        shown = min(ENTRIES, rows) if len(path) < DEPTH else 0
        nodes = {key: tree._get(key) for key in islice(tree._keys(), shown)}
        trees = [node for node in nodes.values() if isinstance(node, TensorCollection)]
        share = (rows - len(nodes)) // max(1, len(trees))
        attribute = " open" if self._is_open or not path else ""
        headings = "" if path else _HEADINGS
        yield f"<details{attribute}><summary>{self._heading(tree, path)}</summary>"
        yield f'<div class="tdf-in"><table>{_COLUMNS}{headings}<tbody>'
        for key, node in nodes.items():
            if isinstance(node, TensorCollection):
                yield '<tr><td colspan="6">'
                yield from self.branch(node, (*path, key), share)
                yield "</td></tr>"
            else:
                yield self._leaf((*path, key), node, tree._kinds.get(key))
        left = sum(1 for _ in tree._keys()) - len(nodes)
        if left or not nodes:
            note = f"... {left:,} more" if left else "no entries"
            yield f'<tr><td colspan="6"><small>{note}</small></td></tr>'
        yield "</tbody></table></div></details>"

    # Any: `_show_heading` is a method of the classes of trees that show.
    def _heading(self, tree: Any, path: Path) -> str:
        parts = [f"batch [{', '.join(map(str, tree._batch_size))}]", *tree._show_heading()]
        if tree._names is not None:
            parts.append(f"names {printable(str(list(tree._names)))}")
        if tree._device is not None:
            parts.append(str(tree._device))
        if self._countable > 0:
            leaves, size_bytes, complete = totals(tree, self._countable)
            self._countable -= leaves
            least = "" if complete else "at least "
            parts.append(f"{least}{count_text(leaves, 'leaf')}, {bytes_text(size_bytes)}")
        names: list[str] = []
        if path:
            names.append(_key(path[-1]))
        if not path or type(tree) is not self._class:
            names.append(_text(type(tree).__name__))
        return f"{' '.join(names)} <small>{_text(' · '.join(parts), 1000)}</small>"

    def _leaf(self, path: Path, node: Any, kind: Kind | None) -> str:
        facts = facts_of(node)
        if not facts.dtype:
            name = f"{_key(path[-1])} <small>{_text(leaf_type(node))}</small>"
            return f'<tr><td>{name}</td><td colspan="5"><code>{_text(value_text(node), 400)}</code></td></tr>'
        labels = list(facts.notes)
        # A plain tensor is the common leaf, and has no label.
        if kind is not None or facts.type != "Tensor":
            labels.insert(0, kind_text(kind) or facts.type)
        tied = self._tied.get(path)
        if tied:
            others = [".".join(map(printable, other)) for other in tied[:3]]
            labels.append(f"tied to {', '.join(others)}")
        small = f" <small>{_text(', '.join(labels), 400)}</small>" if labels else ""
        size = "" if facts.size_bytes is None else bytes_text(facts.size_bytes)
        return (
            f"<tr><td>{_key(path[-1])}{small}</td><td><code>{_text(facts.shape, 200)}</code></td>"
            f"<td>{_text(facts.dtype)}</td><td>{_text(facts.device)}</td>"
            f'<td class="tdf-n">{size}</td><td>{_values(node)}</td></tr>'
        )


def _key(key: str) -> str:
    return f"<b>{_text(key, KEY)}</b>"


def _text(text: str, limit: int = 120) -> str:
    return escape(printable(text, limit), quote=True)


def _values(leaf: Any) -> str:
    """Return the range and mean of a leaf's first elements; "" for leaves that are not plain tensors of real values."""
    if type(leaf) not in PLAIN or leaf.is_nested or _functorch.is_functorch_wrapped_tensor(leaf):
        return ""
    # A leaf on the meta device or in a fake tensor mode has no values to copy.
    try:
        sample = _first(leaf.detach()).cpu()
        # numpy has neither bfloat16 nor the small floats.
        array: Any = sample.double().numpy() if sample.is_floating_point() else sample.numpy()
    except Exception:
        return ""
    finite = array[np.isfinite(array)]
    text = "" if len(array) else "empty"
    if len(finite) and not leaf.is_complex():
        text = _range_text(finite, leaf.numel())
    if len(finite) < len(array):
        text += f' <span class="tdf-bad">{len(array) - len(finite):,} NaN or inf</span>'
    if len(array) == leaf.numel():
        return text
    return f"{text} <small>(of the first {len(array):,})</small>"


def _range_text(finite: Any, count: int) -> str:
    """Return the range and mean of values of a leaf of `count` elements."""
    low = finite.min().item()
    high = finite.max().item()
    if low != high:
        return f"{_number(low)} .. {_number(high)}, mean {finite.mean(dtype=np.float64):.4g}"
    if count == 1:
        return _number(low)
    return f"all {_number(low)}"


def _first(leaf: Tensor) -> Tensor:
    """Return the first elements of a leaf, as a box of leading rows: none but these are read from memory or file."""
    for dim, size in enumerate(leaf.shape):
        if leaf.numel() > VALUES:
            leaf = leaf.narrow(dim, 0, max(1, VALUES * size // leaf.numel()))
    return leaf.reshape(-1)


def _number(value: Any) -> str:
    if value is True or value is False:
        return str(value)
    if isinstance(value, int) and abs(value) < 10**9:
        return f"{value:,}"
    return f"{value:.4g}"
