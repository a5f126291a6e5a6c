"""Filters and tables of a `Lora` that choose known leaves, as short as a reader would write them."""

from collections.abc import Mapping, Sequence
from typing import Any

from tdfunc.core.keys import Entry, Filter, FilterLike, at_paths
from tdfunc.core.types import Path

# More are a filter by complete paths: each glob is matched against each leaf, and combined filters are nested.
_MAX_GLOBS = 32


def by_value(values: Mapping[Path, Any], found: Sequence[Entry]) -> Any:
    """Return one value for all paths, or a dict of filters."""
    groups: dict[Any, list[Path]] = {}
    for path, value in values.items():
        groups.setdefault(value, []).append(path)
    if len(groups) < 2:
        return next(iter(groups), 1)
    chosen = [entry for entry in found if entry.paths[0] in values]
    most_frequent = max(groups, key=lambda value: len(groups[value]))
    by_filter: dict[FilterLike, Any] = {}
    for value, paths in groups.items():
        if value != most_frequent:
            by_filter[filter_of(paths, chosen)] = value
    # The first filter that matches a leaf counts, so the rest comes last.
    by_filter["*"] = most_frequent
    return by_filter


def filter_of(paths: Mapping[Path, Any] | Sequence[Path], found: Sequence[Entry]) -> FilterLike:
    """Return a filter for the leaves at these paths: globs by their last keys where a few of these choose no others."""
    wanted = set(paths)
    ends = {".".join(path[-2:]) for path in wanted}
    if len(ends) > _MAX_GLOBS:
        return at_paths(wanted)
    first, *others = [f"*{end}" for end in sorted(ends)]
    globs: FilterLike = first
    for other in others:
        globs = Filter(globs) | other
    mask = Filter(globs).mask(found)
    chosen = {entry.paths[0] for entry, is_chosen in zip(found, mask, strict=True) if is_chosen}
    if chosen == wanted:
        return globs
    return at_paths(wanted)
