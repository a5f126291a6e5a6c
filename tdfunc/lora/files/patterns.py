"""Regular expressions of foreign files, matched in a time that no pattern can make exponential.

Python's `re` tries the ways to match one after the other, and a pattern of 20 characters can have more ways than can be
tried. Here all of them are followed at once, as the set of places in the text that can be reached.
"""

import functools
import importlib
import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tdfunc.core.errors import UnsupportedError

# Python 3.11 moved the parser. Any: it has no types.
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
# A part of a parsed pattern: an operation and its argument. Any: the parser has no types.
_Part = tuple[Any, Any]
_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d", "CATEGORY_NOT_DIGIT": r"\D", "CATEGORY_SPACE": r"\s", "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w", "CATEGORY_NOT_WORD": r"\W",
}  # fmt: skip
_PLACES = {
    "AT_BEGINNING": "^", "AT_BEGINNING_STRING": r"\A", "AT_END": "$", "AT_END_STRING": r"\Z", "AT_BOUNDARY": r"\b",
    "AT_NON_BOUNDARY": r"\B",
}  # fmt: skip
# Patterns with one way to match, which `re` runs.
_PLAIN = re.compile(r"(?:[\w./^ -]|\\[^\w])*")
# Of a pattern, in characters, and of the steps for one text: more than any choice of modules needs.
_MAX_CHARACTERS = 10_000
_MAX_STEPS = 300_000
# The only flag of a pattern without flags.
_NO_FLAGS = re.UNICODE.value


class Pattern:
    """A regular expression of a foreign file.

    Args:
        text: The expression.
        where: The place in the file, for messages.

    Raises:
        UnsupportedError: It is not an expression, is too long, or has references, atomic groups or flags.
    """

    def __init__(self, text: str, where: str) -> None:
        self._parts: Sequence[_Part] = ()
        self._plain: re.Pattern[str] | None = None
        self._text = text
        self._where = where
        if len(text) > _MAX_CHARACTERS:
            raise _refusal(where, text, f"{len(text):,} characters")
        try:
            if _PLAIN.fullmatch(text):
                self._plain = re.compile(text)
                return
            # Any: the parser has no types.
            parsed: Any = _parser.parse(text)
            if parsed.state.flags != _NO_FLAGS:
                raise _refusal(where, text, "a flag")
            self._parts = list(parsed)
            self._check(self._parts, text)
        except (re.error, RecursionError, OverflowError) as err:
            raise _refusal(where, text, str(err)) from err

    def matches(self, text: str) -> bool:
        """Return whether the complete text matches.

        Raises:
            UnsupportedError: The pattern takes too many steps.
        """
        if self._plain is not None:
            return self._plain.fullmatch(text) is not None
        try:
            return bool(_Match(text).ends(self._parts, 1) >> len(text))
        except _TooManySteps as err:
            raise _refusal(self._where, self._text, f"more than {_MAX_STEPS:,} steps for {text[:80]!r}") from err

    def _check(self, parts: Iterable[_Part], text: str) -> None:
        """Raise unless all parts of a pattern are among those that `_Match` knows."""
        for op, arg in parts:
            name = str(op)
            if name == "SUBPATTERN" and not (arg[1] or arg[2]):
                self._check(arg[3], text)
            elif name == "BRANCH":
                for branch in arg[1]:
                    self._check(branch, text)
            elif name in ("MAX_REPEAT", "MIN_REPEAT"):
                self._check(arg[2], text)
            elif name in ("ASSERT", "ASSERT_NOT"):
                self._check(arg[1], text)
            elif name not in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
                raise _refusal(self._where, text, name.lower().replace("_", " "))


def _refusal(where: str, text: str, got: str) -> UnsupportedError:
    return UnsupportedError(
        f"lora.load: the pattern {text[:80]!r} of {where} is not understood.",
        expected="a regular expression without references, atomic groups and flags",
        got=got,
        hint="write the names of the modules in the place of the pattern.",
    )


class _TooManySteps(Exception):
    """A match takes longer than any choice of modules needs."""


class _Match:
    """The matches of the parts of one pattern in a text; bit i of a set of places is the place before character i."""

    def __init__(self, text: str) -> None:
        self._text = text
        # The places before characters that fit a part, which is identified by its object.
        self._fitting: dict[int, int] = {}
        self._steps = 0

    def ends(self, parts: Sequence[_Part], places: int) -> int:
        """Return the places at which a match of parts in sequence can end that starts at one of these places."""
        for part in parts:
            if not places:
                break
            self._steps += 1
            if self._steps > _MAX_STEPS:
                raise _TooManySteps
            places = self._step(part, places)
        return places

    def _step(self, part: _Part, places: int) -> int:
        op, arg = part
        name = str(op)
        if name == "SUBPATTERN":
            return self.ends(arg[3], places)
        if name == "BRANCH":
            return functools.reduce(operator.or_, [self.ends(branch, places) for branch in arg[1]])
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(arg[0], arg[1], arg[2], places)
        if name == "ASSERT":
            return places & self._where(part, lambda place: self._is_beside(arg, place))
        if name == "ASSERT_NOT":
            return places & ~self._where(part, lambda place: self._is_beside(arg, place))
        if name == "AT":
            return places & self._where(part, lambda place: _is_at(arg, self._text, place))
        # What is left takes one character.
        fitting = self._where(part, lambda place: _fits(name, arg, self._text[place : place + 1]))
        return (places & fitting) << 1

    # Any: the parser has no types.
    def _is_beside(self, arg: tuple[int, Any], place: int) -> bool:
        """Return whether a look-around matches: parts that begin at a place, or that end there."""
        direction, parts = arg
        if direction > 0:
            return bool(self.ends(parts, 1 << place))
        # Its width is fixed.
        width: int = parts.getwidth()[0]
        if place < width:
            return False
        ends = self.ends(parts, 1 << (place - width))
        return bool(ends >> place & 1)

    def _where(self, part: _Part, test: Callable[[int], bool]) -> int:
        """Return the places that pass the test of a part."""
        if id(part) not in self._fitting:
            places = [place for place in range(len(self._text) + 1) if test(place)]
            self._fitting[id(part)] = sum(1 << place for place in places)
        return self._fitting[id(part)]

    def _repeat(self, least: int, most: int, parts: Sequence[_Part], places: int) -> int:
        """Return the places after at least `least` and at most `most` matches."""
        reached = places if least == 0 else 0
        # A part that can match nothing reaches all that it can in as many rounds as the text has places, and one that
        # cannot has ended then.
        rounds = len(self._text) + 1
        least = min(least, rounds)
        for count in range(1, min(most, least + rounds) + 1):
            places = self.ends(parts, places)
            if count >= least:
                places &= ~reached
                reached |= places
            if not places:
                break
        return reached


def _is_at(place_name: Any, text: str, place: int) -> bool:
    """Return whether a place is a beginning, an end, or the boundary of a word."""
    return re.compile(_PLACES[str(place_name)]).match(text, place) is not None


def _fits(name: str, arg: Any, char: str) -> bool:
    """Return whether one character, or the end of the text, matches a part that takes one character."""
    if not char:
        return False
    if name == "LITERAL":
        return ord(char) == arg
    if name == "NOT_LITERAL":
        return ord(char) != arg
    if name == "ANY":
        return char != "\n"
    elements = [(str(op), value) for op, value in arg]
    is_negated = bool(elements) and elements[0][0] == "NEGATE"
    if is_negated:
        elements = elements[1:]
    is_in = any(_in_class(op, value, char) for op, value in elements)
    return is_in != is_negated


def _in_class(name: str, arg: Any, char: str) -> bool:
    """Return whether a character is in one element of a class, such as `a-z`."""
    if name == "LITERAL":
        return ord(char) == arg
    if name == "RANGE":
        return arg[0] <= ord(char) <= arg[1]
    return re.fullmatch(_CATEGORIES[str(arg)], char) is not None


class Names:
    """Values for names that are written out, of which a file can have thousands; a dot stands for any character.

    A name is found by its own text, and not by a comparison with each of them.
    """

    def __init__(self) -> None:
        # By the length and the places of the dots: the values, by the text with dots there.
        self._shapes: dict[int, dict[tuple[int, ...], dict[str, tuple[int, Any]]]] = {}

    def add(self, parts: Iterable[_Part], place: int, value: Any) -> bool:
        """Enter a parsed pattern and its value; return False if it has more than characters and dots.

        Args:
            parts: The parts of the pattern.
            place: Its place among all patterns: the first counts.
            value: The value.
        """
        text = ""
        dots: list[int] = []
        for op, arg in parts:
            name = str(op)
            if name == "LITERAL":
                text += chr(arg)
            elif name == "ANY":
                dots.append(len(text))
                text += "."
            else:
                return False
        shapes = self._shapes.setdefault(len(text), {})
        shapes.setdefault(tuple(dots), {}).setdefault(text, (place, value))
        return True

    def find(self, text: str) -> "tuple[int, Any] | None":
        """Return the place and value of the first pattern that matches a complete text, or None."""
        found: list[tuple[int, Any]] = []
        for dots, values in self._shapes.get(len(text), {}).items():
            masked = text
            for dot in dots:
                masked = f"{masked[:dot]}.{masked[dot + 1 :]}"
            if masked in values:
                found.append(values[masked])
        return min(found, key=operator.itemgetter(0), default=None)


def ends_of(name: str) -> list[str]:
    """Return a name and its ends behind each of its dots."""
    keys = name.split(".")
    return [".".join(keys[start:]) for start in range(len(keys))]


class Ends:
    """Ends of names, each of complete keys, of which a file can have thousands."""

    def __init__(self, ends: Iterable[str] = ()) -> None:
        self.ends: frozenset[str] = frozenset(ends)

    def __bool__(self) -> bool:
        return bool(self.ends)

    def has(self, name: str) -> bool:
        """Return whether one of them is the end of a name."""
        return not self.ends.isdisjoint(ends_of(name))


class Modules:
    """Names of modules, of which each also stands for the modules inside, by patterns as in PEFT's `modules_to_save`.

    Args:
        texts: The patterns.
        where: The place in the file, for messages.
    """

    def __init__(self, texts: Iterable[str], where: str) -> None:
        self._names = Names()
        self._others: list[Pattern] = []
        for text in texts:
            pattern = Pattern(rf"(^|.*\.){text}($|\..*)", where)
            parts = _parts_of(text)
            if parts is None or not self._names.add(parts, 0, True):
                self._others.append(pattern)

    def has(self, name: str) -> bool:
        """Return whether a module is one of them, or inside one."""
        keys = name.split(".")
        for start in range(len(keys)):
            for end in range(start + 1, len(keys) + 1):
                if self._names.find(".".join(keys[start:end])) is not None:
                    return True
        return any(pattern.matches(name) for pattern in self._others)


def _parts_of(text: str) -> "Sequence[_Part] | None":
    """Return the parts of a pattern, or None if it is one only together with its surroundings."""
    try:
        return list(_parser.parse(text))
    except re.error:
        return None


class PatternTable:
    """Values for names, by patterns of which the first that matches the end of a name counts, as in PEFT.

    Args:
        entries: The patterns and their values.
        where: The place in the file, for messages.
        default: The value of other names.
    """

    def __init__(self, entries: Iterable[tuple[str, Any]], where: str, default: Any) -> None:
        self._default = default
        # Patterns without a choice, of complete names (`^model\.fc`) and of ends of names.
        self._complete = Names()
        self._ends = Names()
        self._others: list[tuple[int, Pattern, Any]] = []
        for place, (text, value) in enumerate(entries):
            pattern = Pattern(rf"(.*\.)?({text})$", where)
            if not self._add(_parts_of(text), place, value):
                self._others.append((place, pattern, value))

    def _add(self, parts: "Sequence[_Part] | None", place: int, value: Any) -> bool:
        """Enter a pattern that is a name; return False if it is another one."""
        if parts is None:
            return False
        if parts and str(parts[0][0]) == "AT" and str(parts[0][1]) == "AT_BEGINNING":
            return self._complete.add(parts[1:], place, value)
        return self._ends.add(parts, place, value)

    def __getitem__(self, name: str) -> Any:
        found = [self._complete.find(name)]
        found += [self._ends.find(end) for end in ends_of(name)]
        written_out = [each for each in found if each is not None]
        place, value = min(written_out, key=operator.itemgetter(0), default=(sys.maxsize, self._default))
        for pattern_place, pattern, pattern_value in self._others:
            if pattern_place > place:
                break
            if pattern.matches(name):
                return pattern_value
        return value
