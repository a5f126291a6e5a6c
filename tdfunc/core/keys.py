"""Nested keys (tuples of str) and `Filter`, the one language for choosing leaves by path, kind, dtype or predicate."""

import difflib
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from tdfunc.core.errors import FilterError, MissingKeyError, error, explain
from tdfunc.core.types import Kind, NestedKey, Path

V = TypeVar("V")
# The most paths in the text of a filter.
_SHOWN_PATHS = 3
# The most keys in the text of a missing one.
_SHOWN_NAMES = 20
# The characters that make a glob of a name.
_WILD = frozenset("*?[")


def unravel(key: NestedKey) -> Path:
    """Flatten a key of nested tuples into one tuple of non-empty str."""
    if type(key) is str and key:
        return (key,)
    # Any: a flat key is its path.
    flat: Any = key
    if type(flat) is tuple and flat and all([type(part) is str and part for part in flat]):
        return flat
    path: list[str] = []
    stack: list[Any] = [key]
    while stack:
        part = stack.pop()
        if isinstance(part, tuple) and part:
            stack.extend(reversed(part))  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(part, str) and part:
            # A member of a str enum is the text that it stands for: in JSON, in pickles, in attribute names.
            path.append(part if type(part) is str else str.__str__(part))
        else:
            raise _bad_key(key, part)
    return tuple(path)


# Any: a nested key of tuples, which type checkers cannot unravel.
def by_head(entries: Iterable[tuple[Any, V]]) -> tuple[dict[str, V], dict[str, dict[Path, V]]]:
    """Part entries into those under a str, and those under nested keys: by the first part, then by the rest."""
    flat: dict[str, V] = {}
    nested: dict[str, dict[Path, V]] = {}
    for key, value in entries:
        head, *rest = unravel(key)
        if rest:
            nested.setdefault(head, {})[tuple(rest)] = value
        else:
            flat[head] = value
    return flat, nested


def is_key(key: object) -> bool:
    """Return True if `key` is a str or a (nested) non-empty tuple of str, rather than an index."""
    if isinstance(key, str):
        return True
    return isinstance(key, tuple) and len(key) > 0 and all(map(is_key, key))


def dotted(path: Iterable[str]) -> str:
    """Return the path as messages and file names show it: `layers.0.weight`."""
    return ".".join(path)


def missing(path: Path, known: Iterable[str], call: str = "get", node: Any = None) -> MissingKeyError:
    """Build the error for a path of which the last part is not among the `known` keys of its parent, `node`."""
    return MissingKeyError(_Missing(path, known, call, node))


class _Missing:
    """The text of a missing key, made when it is read: most such errors are caught unread, and hints take a search."""

    __slots__ = ("_given", "_text")

    def __init__(self, path: Path, known: Iterable[str], call: str, node: Any) -> None:
        self._given = (path, known, call, node)
        self._text = ""

    def __str__(self) -> str:
        if self._text:
            return self._text
        path, known, call, node = self._given
        names = list(known)
        key = path[-1]
        parent = path[:-1]
        where = f" under {dotted(parent)!r}" if parent else ""
        shown = ", ".join(map(repr, names[:_SHOWN_NAMES])) or "(no keys)"
        if len(names) > _SHOWN_NAMES:
            shown += ", ..."
        self._text = explain(
            f"{call}: no key {key!r}{where}.",
            expected=f"one of {shown}",
            hint=_hint_for(key, parent, names, node),
        )
        return self._text

    def __repr__(self) -> str:
        return repr(str(self))

    def __reduce__(self) -> Any:
        return str, (str(self),)


def _hint_for(key: str, parent: Path, names: Sequence[str], node: Any) -> str | None:
    """Return the hint for a key that is missing under a parent path, of which the node and its keys are given."""
    parts = tuple(key.split("."))
    # A file has no node to look into, only the names of one level.
    if node is None:
        is_nested = parts[0] in names
    elif not hasattr(node, "_keys"):
        return f"{dotted(parent)!r} is a leaf, and a leaf has no children."
    else:
        is_nested = _leads(node, parts)
    if is_nested:
        return f"a nested key is a tuple: {(*parent, *parts)!r}."
    if "*" in key:
        return f"a pattern selects leaves in partition(tree, {key!r}) or tree.apply(fn, where={key!r})."
    return did_you_mean(key, names)


def did_you_mean(key: str, names: Sequence[str]) -> str | None:
    """Return a hint with up to three names that a key may be a misspelling of, or None."""
    close = difflib.get_close_matches(key, names, n=3)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return None


def _leads(node: Any, path: Path) -> bool:
    for part in path:
        if not hasattr(node, "_keys") or part not in node._keys():
            return False
        node = node._get(part)
    return True


def _bad_key(key: object, part: object) -> TypeError:
    return error(
        TypeError,
        "A key must be a str or a nested tuple of str, and not empty.",
        got=f"{part!r} in {key!r}",
        hint="index batch dimensions with td[...], name entries with a str.",
    )


class Entry(NamedTuple):
    """One leaf as a filter sees it: all its tied paths, the leaf, and its kind."""

    paths: tuple[Path, ...]
    leaf: Any
    kind: Kind | None


Predicate: TypeAlias = Callable[[Path, Any], bool]
FilterSpec: TypeAlias = "str | re.Pattern[str] | Kind | torch.dtype | Predicate | Filter"
# Every `where=` makes a `Filter` of its argument.
FilterLike: TypeAlias = FilterSpec


class Filter:
    """A choice of leaves, combined with `|`, `&` and `~`.

    A str is a glob on the dotted path, in which `*` crosses dots; a compiled regex must match the complete path. A
    `Kind` and a `torch.dtype` match the leaves that have it. A function takes `(path, leaf)`; in `load(where=)`, which
    chooses before it reads, the leaf has no values. A tied leaf matches by any of its paths. Using a filter raises an
    error if its glob or regex matches no leaf of the tree.

    Args:
        spec: A glob, regex, kind, dtype, predicate or another filter.

    Examples:
        >>> params = TensorDict({"fc": {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, "scale": torch.ones(())})
        >>> no_decay, rest = params.partition(Filter("*.bias") | "scale")
        >>> no_decay.paths(), rest.paths()
        ([('fc', 'bias'), ('scale',)], [('fc', 'weight')])
    """

    __slots__ = ("_mask", "_text")

    def __init__(self, spec: "FilterSpec") -> None:
        self._mask: Callable[[Sequence[Entry]], list[bool]]
        if isinstance(spec, Filter):
            self._mask = spec._mask
            self._text = spec._text
        elif isinstance(spec, str) and _WILD.isdisjoint(spec):
            self._mask = partial(_named, str.__str__(spec))
            self._text = repr(spec)
        elif isinstance(spec, str):
            self._mask = partial(_matching, re.compile(fnmatch.translate(spec)), repr(spec))
            self._text = repr(spec)
        elif isinstance(spec, re.Pattern):
            self._mask = partial(_matching, spec, repr(spec.pattern))
            self._text = repr(spec)
        elif isinstance(spec, Kind):
            self._mask = partial(_having, "kind", spec)
            self._text = str(spec)
        elif isinstance(spec, torch.dtype):
            self._mask = partial(_having, "dtype", spec)
            self._text = str(spec)
        elif isinstance(spec, type):
            # A call of a class makes an instance, which is true.
            raise FilterError(
                "Filter: a class does not choose leaves.",
                expected="a glob (str), compiled regex, Kind, torch.dtype, predicate(path, leaf) or Filter",
                got=spec.__name__,
                hint="tdfunc.of_type(module, kind) chooses the leaves of the layers of a class.",
            )
        elif callable(spec):
            self._mask = partial(_wanted, spec)
            self._text = getattr(spec, "__name__", "fn")
        else:
            raise FilterError(
                "Filter: the choice must be of a kind that filters are made from.",
                expected="a glob (str), compiled regex, Kind, torch.dtype, predicate(path, leaf) or Filter",
                got=f"{spec!r} ({type(spec).__name__})",
                hint='Filter("*.q_proj.weight") | "*.v_proj.weight" chooses what one of them chooses.',
            )

    def mask(self, entries: Sequence[Entry]) -> list[bool]:
        """Return a bool for each entry, True if the filter chooses it.

        Raises:
            FilterError: A glob or regex inside the filter matches none of the entries.
        """
        return self._mask(entries)

    def __or__(self, other: "FilterSpec") -> "Filter":
        return _joined(self, Filter(other), _of_any, "|")

    def __and__(self, other: "FilterSpec") -> "Filter":
        return _joined(self, Filter(other), _of_all, "&")

    def __ror__(self, other: "FilterSpec") -> "Filter":
        return Filter(other) | self

    def __rand__(self, other: "FilterSpec") -> "Filter":
        return Filter(other) & self

    def __invert__(self) -> "Filter":
        return _combined(partial(_others, self), f"~{self._text}")

    def __repr__(self) -> str:
        return f"Filter({self._text})"


def of_type(module: nn.Module, *types: type[nn.Module]) -> Filter:
    """Return a filter for the leaves that belong to submodules of the given types.

    Args:
        module: The module that the trees come from.
        *types: Module classes, such as `nn.LayerNorm`.

    Raises:
        FilterError: The module has no submodule of these types.
    """
    found = [name for name, sub in module.named_modules(remove_duplicate=False) if isinstance(sub, types)]
    # The module itself has the name "", and the path of no parts.
    owners = {tuple(name.split(".")) if name else () for name in found}
    names = ", ".join([kind.__name__ for kind in types])
    text = f"of_type({names})"
    if not owners:
        kinds = sorted({type(sub).__name__ for sub in module.modules()})
        raise FilterError(
            f"{text}: {type(module).__name__} has no submodule of these types.", got=f"{', '.join(kinds)}"
        )
    return _combined(partial(_owned, owners), text)


def at_paths(paths: Iterable[Path]) -> Filter:
    """Return a filter for the leaves at these paths, of which there may be thousands.

    Args:
        paths: The paths. A filter that matches none of a tree's leaves raises an error, as a pattern does.
    """
    names = frozenset(map(dotted, paths))
    shown = ", ".join(map(repr, sorted(names)[:_SHOWN_PATHS]))
    more = ""
    if len(names) > _SHOWN_PATHS:
        more = f" and {len(names) - _SHOWN_PATHS} more"
    text = f"at_paths({shown}{more})"
    return _combined(partial(_listed, names, text), text)


# The masks are partials of these, so that filters (and optimizers with them) can be pickled.


def _others(chosen: Filter, entries: Sequence[Entry]) -> list[bool]:
    return [not a for a in chosen.mask(entries)]


def _of_all(parts: Sequence[Filter], entries: Sequence[Entry]) -> list[bool]:
    found = parts[0].mask(entries)
    for part in parts[1:]:
        found = list(map(operator.and_, found, part.mask(entries)))
    return found


def _of_any(parts: Sequence[Filter], entries: Sequence[Entry]) -> list[bool]:
    found = [False] * len(entries)
    for places in _places_of(parts, entries):
        for place in places:
            found[place] = True
    return found


def _places_of(parts: Sequence[Filter], entries: Sequence[Entry]) -> Iterator[Sequence[int]]:
    """Yield the numbers of the entries that each filter chooses; names are looked up, and not compared with each."""
    table: dict[str, list[int]] = {}
    for part in parts:
        mask = part._mask
        if not isinstance(mask, partial) or mask.func is not _named or len(parts) == 1:
            yield [place for place, chosen in enumerate(part.mask(entries)) if chosen]
            continue
        if not table:
            for place, entry in enumerate(entries):
                for path in entry.paths:
                    table.setdefault(dotted(path), []).append(place)
        (name,) = mask.args
        if name not in table:
            raise _no_match(repr(name), entries)
        yield table[name]


def _by_path(test: Callable[[Path], object], entries: Sequence[Entry]) -> list[bool]:
    """Return for each leaf True if one of its paths passes a test."""
    return [any(map(test, entry.paths)) for entry in entries]


def _owned(owners: set[Path], entries: Sequence[Entry]) -> list[bool]:
    return _by_path(lambda path: path[:-1] in owners, entries)


def _listed(names: frozenset[str], text: str, entries: Sequence[Entry]) -> list[bool]:
    found = _by_path(lambda path: dotted(path) in names, entries)
    if not any(found):
        raise FilterError(f"Filter: {text} matches no leaf.", got=f"{len(entries)} leaves")
    return found


def _having(field: str, value: object, entries: Sequence[Entry]) -> list[bool]:
    if field == "kind":
        return [entry.kind is value for entry in entries]
    return [getattr(entry.leaf, field, None) is value for entry in entries]


def _wanted(predicate: Callable[..., object], entries: Sequence[Entry]) -> list[bool]:
    found: list[bool] = []
    for paths, leaf, _ in entries:
        found.append(any(bool(predicate(path, leaf)) for path in paths))
    return found


def _joined(left: Filter, right: Filter, rule: Callable[..., list[bool]], symbol: str) -> Filter:
    # Side by side: a filter of a thousand names would call itself a thousand times.
    parts = (*_parts_of(left, rule), *_parts_of(right, rule))
    return _combined(partial(rule, parts), f"({left._text} {symbol} {right._text})")


def _parts_of(chosen: Filter, rule: Callable[..., list[bool]]) -> Sequence[Filter]:
    mask = chosen._mask
    if isinstance(mask, partial) and mask.func is rule:
        return mask.args[0]
    return (chosen,)


def _combined(mask: Callable[[Sequence[Entry]], list[bool]], text: str) -> Filter:
    new = object.__new__(Filter)
    new._mask = mask
    new._text = text
    return new


def _matching(regex: re.Pattern[str], text: str, entries: Sequence[Entry]) -> list[bool]:
    found = _by_path(lambda path: regex.fullmatch(dotted(path)), entries)
    if not any(found):
        raise _no_match(text, entries)
    return found


def _named(name: str, entries: Sequence[Entry]) -> list[bool]:
    found = _by_path(lambda path: dotted(path) == name, entries)
    if not any(found):
        raise _no_match(repr(name), entries)
    return found


def _no_match(text: str, entries: Sequence[Entry]) -> FilterError:
    paths = [dotted(e.paths[0]) for e in entries]
    close = difflib.get_close_matches(text.strip("'*"), paths, n=3)
    shown = ", ".join(map(repr, close or paths[:5])) or "(the tree has no leaves)"
    return FilterError(
        f"Filter: the pattern {text} matches no leaf.",
        got=f"{len(paths)} leaves",
        hint=f"paths here are like {shown}.",
    )


def assign(found: Sequence[Entry], where: dict[Any, Any], call: str) -> list[Any]:
    """Return for each leaf the value of the first filter that matches it."""
    filters = []
    if found:
        filters = [Filter(spec) for spec in where]
    values: dict[int, Any] = {}
    for places, value in zip(_places_of(filters, found), where.values(), strict=False):
        for place in places:
            values.setdefault(place, value)
    for i, entry in enumerate(found):
        if i not in values:
            name = dotted(entry.paths[0])
            raise FilterError(
                f"{call}: no filter matches the leaf {name!r}.",
                got=f"{list(where)}",
                hint='end the dict with "*": value.',
            )
    return [values[i] for i in range(len(found))]
