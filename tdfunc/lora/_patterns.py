"""Regular expressions of a foreign file, matched without backtracking.

The engine of Python tries every way to match: for a pattern such as `(a+)+$` the time doubles with each character. Here
a part of a pattern maps the set of places where it may begin to the set of places where it may end. That decides
whether a text matches, as Python does, and the work is counted. Parts that depend on the way, which are references to
groups and atomic groups, are refused.
"""

import functools
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tdfunc.core.errors import UnsupportedError, brief

# Python's own parser of patterns, which has no public name.
_PARSER: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
# Of the pattern and the text in characters, and of steps for one text: more than any choice of modules needs.
_MAX_TEXT, _MAX_STEPS = 10_000, 200_000

# Characters for themselves, also escaped ones, and anchors.
_PLAIN = re.compile(r"(?:[^*+?{|()\[\\]|\\[^A-Za-z0-9])*")

# Any: an argument of a part, as the parser gives it.
Part: TypeAlias = tuple[Any, Any]
Places: TypeAlias = frozenset[int]


def is_match(pattern: str, text: str) -> bool:
    """Return whether a regular expression of a file matches at the beginning of a text, as `re.match`.

    Args:
        pattern: The regular expression.
        text: The text.

    Raises:
        UnsupportedError: The text is not a regular expression, has a part that is not supported, or is too complex.
    """
    if max(len(pattern), len(text)) > _MAX_TEXT:
        raise _refusal(pattern, f"at most {_MAX_TEXT:,} characters")
    try:
        return bool(_Search(pattern, text).ends(_parse(pattern), frozenset([0])))
    except RecursionError as err:
        raise _refusal(pattern, "a regular expression of Python", str(err)) from err


def names_end(pattern: str, name: str) -> bool:
    """Return whether a key of PEFT's `rank_pattern` matches a module: its name, or the last parts of its name.

    Raises:
        UnsupportedError: As for `is_match`.
    """
    whole = rf"(.*\.)?({pattern})$"
    # A key that is a name has one way to match. Files have hundreds of them.
    return bool(re.match(whole, name)) if _PLAIN.fullmatch(pattern) else is_match(whole, name)


@functools.lru_cache(maxsize=1_000)
def _parse(pattern: str) -> Sequence[Part]:
    try:
        parsed = _PARSER.parse(pattern)
    except (re.error, RecursionError, OverflowError) as err:
        raise _refusal(pattern, "a regular expression of Python", str(err)) from err
    if parsed.state.flags != re.UNICODE.value:
        raise _refusal(pattern, "no flags")
    return list(parsed)


def _refusal(pattern: str, expected: str, got: str | None = None) -> UnsupportedError:
    return UnsupportedError(
        f"The pattern {brief(pattern)} of the file cannot be used.",
        expected=expected,
        got=got,
        hint="write the names of the modules in the place of the pattern.",
    )


class _Search:
    """The search of one pattern in one text."""

    def __init__(self, pattern: str, text: str) -> None:
        self.pattern = pattern
        self.text = text
        self.steps = 0
        self.rules: dict[str, Callable[[Any, Places], Places]] = {
            "LITERAL": lambda code, at: self._one(at, lambda char: ord(char) == code),
            "NOT_LITERAL": lambda code, at: self._one(at, lambda char: ord(char) != code),
            "ANY": lambda _, at: self._one(at, lambda char: char != "\n"),
            "IN": lambda members, at: self._one(at, lambda char: _is_in(char, members)),
            "AT": lambda code, at: frozenset(i for i in at if self._is_at(str(code), i)),
            "BRANCH": lambda arg, at: frozenset().union(*[self.ends(branch, at) for branch in arg[1]]),
            "SUBPATTERN": self._group,
            "MAX_REPEAT": self._repeat,
            # A lazy repeat ends in the same places as a greedy one, in another order.
            "MIN_REPEAT": self._repeat,
            "ASSERT": lambda arg, at: frozenset(i for i in at if self._is_ahead(arg, i)),
            "ASSERT_NOT": lambda arg, at: frozenset(i for i in at if not self._is_ahead(arg, i)),
        }

    def ends(self, parts: Sequence[Part], at: Places) -> Places:
        """Return the places where a sequence of parts may end that begins at one of some places."""
        for code, argument in parts:
            if not at:
                break
            self.steps += len(at)
            if self.steps > _MAX_STEPS:
                raise _refusal(self.pattern, f"at most {_MAX_STEPS:,} steps for a name")
            rule = self.rules.get(str(code))
            if rule is None:
                raise _refusal(self.pattern, "no references and no atomic parts", str(code).lower())
            at = rule(argument, at)
        return at

    def _one(self, at: Places, is_wanted: Callable[[str], bool]) -> Places:
        return frozenset(i + 1 for i in at if i < len(self.text) and is_wanted(self.text[i]))

    def _group(self, argument: Any, at: Places) -> Places:
        _, added, removed, parts = argument
        if added or removed:
            raise _refusal(self.pattern, "no flags")
        return self.ends(parts, at)

    def _repeat(self, argument: Any, at: Places) -> Places:
        least, most, parts = argument
        for _ in range(int(least)):
            after = self.ends(parts, at)
            if after == at:
                break
            at = after
        found = at
        new = at
        count = int(least)
        while new and count < int(most):
            new = self.ends(parts, new) - found
            found |= new
            count += 1
        return found

    def _is_at(self, code: str, i: int) -> bool:
        text = self.text
        if code in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return i == 0
        if code == "AT_END":
            return i == len(text) or (i == len(text) - 1 and text[i] == "\n")
        if code == "AT_END_STRING":
            return i == len(text)
        is_edge = (i > 0 and _is_word(text[i - 1])) != (i < len(text) and _is_word(text[i]))
        return is_edge == (code == "AT_BOUNDARY")

    def _is_ahead(self, argument: Any, i: int) -> bool:
        direction, parts = argument
        if direction > 0:
            return bool(self.ends(parts, frozenset([i])))
        width, _ = parts.getwidth()
        return i >= width and i in self.ends(parts, frozenset([i - width]))


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": _is_word,
}


def _is_in(char: str, members: Sequence[Part]) -> bool:
    """Return whether a character is in a set such as [^a-z0-9]."""
    is_negated = str(members[0][0]) == "NEGATE"
    found = any(_is_member(char, str(code), argument) for code, argument in members[is_negated:])
    return found != is_negated


def _is_member(char: str, code: str, argument: Any) -> bool:
    if code == "LITERAL":
        return ord(char) == argument
    if code == "RANGE":
        return argument[0] <= ord(char) <= argument[1]
    name = str(argument).removeprefix("CATEGORY_")
    return _CATEGORIES[name.removeprefix("NOT_")](char) != name.startswith("NOT_")
