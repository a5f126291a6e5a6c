"""Straight-line code for one structure: a loop over leaves written out, which takes a third of the loop's time.

The sources are made of keys and numbers alone, as `dataclasses` makes its methods, and compiled when they first run.
"""

from collections.abc import Sequence
from typing import Any


class Straight:
    """A function of one structure, given by its source: `def run(...)`. A pickle holds the source alone."""

    __slots__ = ("_run", "_source")

    def __init__(self, source: str) -> None:
        self._source = source
        self._run: Any = None

    # Any: what each takes and returns is said where the source is made.
    @property
    def run(self) -> Any:
        """The function; made at the first look, since many structures are read once or never."""
        if self._run is None:
            scope: dict[str, Any] = {}
            exec(self._source, scope)
            self._run = scope["run"]
        return self._run

    def __reduce__(self) -> Any:
        return Straight, (self._source,)


def make_reader(nodes: Sequence[tuple[int, str]], counts: Sequence[int], places: Sequence[tuple[int, str]]) -> Straight:
    """Return `run(data)`: the leaves in a tree's data, or None where a node has more entries than it should have.

    It raises KeyError or AttributeError where a key or a node is missing.

    Args:
        nodes: For each node but the root, parents first, the number of its parent and its key there.
        counts: How many entries each node has, the root first.
        places: For each leaf the number of its node and its key there.
    """
    steps = [f" d{i} = d{parent}[{_literal(key)}]._data\n" for i, (parent, key) in enumerate(nodes, 1)]
    fits = " and ".join(f"len(d{i}) == {count}" for i, count in enumerate(counts))
    leaves = ", ".join(f"d{number}[{_literal(key)}]" for number, key in places)
    return Straight(f"def run(d0):\n{''.join(steps)} return [{leaves}] if {fits} else None\n")


def make_filler(slots: Sequence[tuple[int, str]]) -> Straight:
    """Return `run(tables, values)`, which writes each value to its slot.

    Args:
        slots: For each value the number of its table and its key there.
    """
    tables = "".join(f"t{i}, " for i in range(1 + max([number for number, _ in slots], default=-1)))
    written = "".join(f"t{number}[{_literal(name)}], " for number, name in slots)
    return Straight(f"def run(tables, values):\n ({tables}) = tables\n ({written}) = values\n")


def _literal(key: str) -> str:
    # That of str itself: a subclass may show itself in another way.
    return str.__repr__(key)
