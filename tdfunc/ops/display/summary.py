"""`summary`: the leaves of a tree and their totals, as a table of the optional package rich."""

import io
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple, final

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import error
from tdfunc.core.keys import Filter, FilterLike
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.types import Path
from tdfunc.ops.display.text import (
    aliases,
    bytes_text,
    count_text,
    facts_of,
    flat,
    kind_text,
    leaf_type,
    printable,
)
from tdfunc.ops.edits.structure import partition

ROWS = 1000


class Row(NamedTuple):
    """A line of the table: a leaf, or the leaves of a tree that `depth` folds into one."""

    path: Path
    shape: str
    dtype: str
    device: str
    kind: str
    # Leaves, elements and bytes.
    amounts: tuple[int, int, int] = (0, 0, 0)


@final
class Summary:
    """The result of `td.summary()`: it prints as text, shows as a table in a notebook, and keeps the totals.

    Examples:
        >>> found = TensorDict({"w": torch.zeros(3, 4), "b": torch.zeros(4)}).summary()
        >>> found.leaves, found.elements, found.size_bytes
        (2, 16, 64)
    """

    # Sums over all leaves, and (leaves, elements, bytes) by dtype and by kind.
    __slots__ = ("by_dtype", "by_kind", "elements", "leaves", "size_bytes", "table")
    leaves: int
    elements: int
    size_bytes: int

    def __init__(self, rows: list[Row], table: Any) -> None:
        self.leaves, self.elements, self.size_bytes = _sum(rows)
        self.by_dtype: dict[str, tuple[int, int, int]] = _group(rows, "dtype")
        self.by_kind: dict[str, tuple[int, int, int]] = _group(rows, "kind")
        # Any: of rich, which is optional.
        self.table: Any = table

    def __repr__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        width = max(shutil.get_terminal_size((100, 24)).columns, 60)
        Console(file=out, width=width, force_terminal=False, force_jupyter=False, color_system=None).print(self.table)
        return out.getvalue().rstrip()

    def __rich__(self) -> Any:
        return self.table

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return self.table._repr_mimebundle_(include, exclude)


def _group(rows: list[Row], field: str) -> dict[str, tuple[int, int, int]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.amounts[0]:
            found.setdefault(getattr(row, field) or "other", []).append(row)
    return {name: _sum(group) for name, group in found.items()}


def _sum(rows: list[Row]) -> tuple[int, int, int]:
    leaves, elements, size_bytes = (sum(row.amounts[i] for row in rows) for i in range(3))
    return leaves, elements, size_bytes


def summary(tree: TensorCollection, depth: int | None, where: "FilterLike | None") -> Summary:
    """Describe the leaves of a tree that a filter chooses, those below a depth as one."""
    try:
        from rich.table import Table
        from rich.text import Text
    except ImportError as err:
        raise error(
            ImportError,
            "summary: the package rich is not installed.",
            hint="pip install rich, or display the tree itself: it needs no other package.",
        ) from err
    title = f"{type(tree).__name__}, batch {list(tree._batch_size)}"
    if where is not None:
        tree = partition(tree, where)[0]
        title += f", where {where if isinstance(where, Filter) else repr(where)}"
    rows = shown = list(_rows(tree, (), aliases(tree), set()))
    if depth is not None:
        below: dict[Path, list[Row]] = {}
        for row in rows:
            below.setdefault(row.path[:depth], []).append(row)
        shown = [group[0] if group[0].path == path else _fold(path, group) for path, group in below.items()]
    table = Table(title=printable(title), title_justify="left", show_footer=True)
    found = Summary(rows, table)
    table.add_column("path", Text(count_text(found.leaves, "leaf")), overflow="fold")
    for name in ("shape", "dtype", "device", "kind"):
        table.add_column(name, overflow="fold")
    for name, total in (("elements", f"{found.elements:,}"), ("size", bytes_text(found.size_bytes))):
        table.add_column(name, Text(total), justify="right", no_wrap=True)
    for row in shown[:ROWS]:
        # Text, because rich reads a str such as "[red]" as markup.
        cells = [".".join(map(printable, row.path)), row.shape, row.dtype, row.device, row.kind]
        leaves, elements, size = row.amounts
        if leaves:
            numbers = [f"{elements:,}", bytes_text(size)]
        else:
            numbers = ["", ""]
        table.add_row(*map(Text, [*cells, *numbers]))
    if len(shown) > ROWS:
        table.add_row(Text(f"... {len(shown) - ROWS:,} more; depth= folds them"))
    for groups in (found.by_dtype, found.by_kind):
        if len(groups) > 1:
            table.add_section()
            for name, (leaves, elements, size) in groups.items():
                cells = [f"of it {name}", count_text(leaves, "leaf"), "", "", "", f"{elements:,}", bytes_text(size)]
                table.add_row(*map(Text, cells), style="dim")
    return found


def _rows(tree: TensorCollection, at: Path, tied: dict[Path, list[Path]], seen: set[int]) -> Iterator[Row]:
    for key in tree._keys():
        path = (*at, key)
        node = tree._get(key)
        if isinstance(node, TensorCollection):
            if next(iter(node._keys()), None) is None:
                yield Row(path, "", "", "", "empty tree")
            yield from _rows(node, path, tied, seen)
        elif isinstance(node, NonTensorBase):
            yield Row(path, f"{list(node.shape)}", leaf_type(node), "", "non-tensor")
        else:
            parts = {id(part): part for part in flat(node)}
            new = [part for each, part in parts.items() if each not in seen]
            seen.update(parts)
            if not new:
                others = [".".join(other) for other in tied.get(path, [])[:1]]
                yield Row(path, "", "", "", f"tied to {others[0]}" if others else "seen above")
                continue
            facts = facts_of(node)
            amounts = facts if new[0] is node else facts_of(tuple(new))
            kind = kind_text(tree._kinds.get(key)) or ("tensor" if facts.type == "Tensor" else facts.type)
            shape = ", ".join([facts.shape, *facts.notes])
            totals = (len(new), amounts.elements or 0, amounts.size_bytes or 0)
            yield Row(path, shape, facts.dtype, facts.device, kind, totals)


def _fold(path: Path, rows: list[Row]) -> Row:
    """Put the leaves of a tree on one line."""

    def common(field: str) -> str:
        found = list(dict.fromkeys(getattr(row, field) for row in rows if row.amounts[0]))
        return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")

    amounts = _sum(rows)
    return Row((*path, "*"), count_text(amounts[0], "leaf"), common("dtype"), common("device"), common("kind"), amounts)
