"""`summary`: the leaves of a tree and their totals, as a table of the optional package rich."""

import io
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple, final

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import error
from tdfunc.core.keys import Filter, FilterLike
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.core.types import Kind, Path
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


class Amounts(NamedTuple):
    """Leaves, and the elements and bytes that they have together."""

    leaves: int = 0
    elements: int = 0
    size_bytes: int = 0


class Row(NamedTuple):
    """A line of the table: a leaf, or the leaves of a tree that `depth` folds into one."""

    path: Path
    shape: str
    dtype: str
    device: str
    kind: str
    # Zeros for a line that is not a separate leaf: a tied path, an empty tree, non-tensor data.
    amounts: Amounts = Amounts()


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
    """Return the sums by a field, as plain tuples: they are shown at a prompt."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.amounts.leaves:
            found.setdefault(getattr(row, field) or "other", []).append(row)
    sums: dict[str, tuple[int, int, int]] = {}
    for name, group in found.items():
        leaves, elements, size_bytes = _sum(group)
        sums[name] = (leaves, elements, size_bytes)
    return sums


def _sum(rows: list[Row]) -> Amounts:
    return Amounts(
        sum(row.amounts.leaves for row in rows),
        sum(row.amounts.elements for row in rows),
        sum(row.amounts.size_bytes for row in rows),
    )


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
        tree, _ = partition(tree, where)
        chosen = str(where) if isinstance(where, Filter) else repr(where)
        title += f", where {chosen}"
    rows = list(_rows(tree, (), aliases(tree), set()))
    shown = rows if depth is None else _fold_below(rows, depth)
    table = Table(title=printable(title), title_justify="left", show_footer=True)
    found = Summary(rows, table)
    table.add_column("path", Text(count_text(found.leaves, "leaf")), overflow="fold")
    for name in ("shape", "dtype", "device", "kind"):
        table.add_column(name, overflow="fold")
    table.add_column("elements", Text(f"{found.elements:,}"), justify="right", no_wrap=True)
    table.add_column("size", Text(bytes_text(found.size_bytes)), justify="right", no_wrap=True)
    for row in shown[:ROWS]:
        cells = [".".join(map(printable, row.path)), row.shape, row.dtype, row.device, row.kind, "", ""]
        if row.amounts.leaves:
            cells[-2:] = [f"{row.amounts.elements:,}", bytes_text(row.amounts.size_bytes)]
        # Text, because rich reads a str such as "[red]" as markup.
        table.add_row(*map(Text, cells))
    if len(shown) > ROWS:
        table.add_row(Text(f"... {len(shown) - ROWS:,} more; depth= folds them"))
    for groups in (found.by_dtype, found.by_kind):
        if len(groups) > 1:
            table.add_section()
            for name, (leaves, elements, size_bytes) in groups.items():
                numbers = [f"{elements:,}", bytes_text(size_bytes)]
                cells = [f"of it {name}", count_text(leaves, "leaf"), "", "", "", *numbers]
                table.add_row(*map(Text, cells), style="dim")
    return found


def _rows(tree: TensorCollection, at: Path, tied: dict[Path, list[Path]], seen: set[int]) -> Iterator[Row]:
    """Yield the line of each leaf and of each empty tree; tensors on earlier lines are in `seen`, by identity."""
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
            yield _leaf_row(path, node, tree._kinds.get(key), tied.get(path, []), seen)


def _leaf_row(path: Path, node: Any, kind: Kind | None, tied: list[Path], seen: set[int]) -> Row:
    parts = {id(part): part for part in flat(node)}
    new = [part for each, part in parts.items() if each not in seen]
    seen.update(parts)
    if not new:
        return Row(path, "", "", "", f"tied to {'.'.join(tied[0])}" if tied else "seen above")
    facts = facts_of(node)
    # Of a leaf with several tensors, those that earlier lines have not counted.
    counted = facts if new[0] is node else facts_of(tuple(new))
    amounts = Amounts(len(new), counted.elements or 0, counted.size_bytes or 0)
    plain = "tensor" if facts.type == "Tensor" else facts.type
    shape = ", ".join([facts.shape, *facts.notes])
    return Row(path, shape, facts.dtype, facts.device, kind_text(kind) or plain, amounts)


def _fold_below(rows: list[Row], depth: int) -> list[Row]:
    """Return the lines with those below a depth put on one for each tree."""
    below: dict[Path, list[Row]] = {}
    for row in rows:
        below.setdefault(row.path[:depth], []).append(row)
    return [group[0] if group[0].path == path else _fold(path, group) for path, group in below.items()]


def _fold(path: Path, rows: list[Row]) -> Row:
    """Put the leaves of a tree on one line."""

    def common(field: str) -> str:
        found = list(dict.fromkeys(getattr(row, field) for row in rows if row.amounts.leaves))
        if len(found) > 3:
            found = [*found[:3], "..."]
        return ", ".join(found)

    amounts = _sum(rows)
    count = count_text(amounts.leaves, "leaf")
    return Row((*path, "*"), count, common("dtype"), common("device"), common("kind"), amounts)
