"""Patterns of foreign files match as `re` does, and in a time that they cannot make exponential."""

import re
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc.lora._patterns import Pattern, PatternTable

ATOMS = ["a", "b", ".", r"\.", "[ab]", "[^a]", "[0-9a]", r"\d", r"\w", "(a|ab)", "(?:b|)", "^", "$", r"\b", "x"]
QUANTIFIERS = ["", "*", "+", "?", "*?", "{2}", "{1,3}", "{2,}"]
PARTS = st.tuples(st.sampled_from(ATOMS), st.sampled_from(QUANTIFIERS)).map("".join)
PATTERNS = st.lists(PARTS, min_size=1, max_size=4).map("".join)


@given(st.lists(PATTERNS, min_size=1, max_size=2).map("|".join), st.text("ab.1x", max_size=7))
def test_a_pattern_matches_as_re_does(pattern, text):
    """The oracle is `re.fullmatch`."""
    try:
        expected = re.fullmatch(pattern, text) is not None
    except re.error:
        assume(False)

    assert Pattern(pattern, "a test").matches(text) == expected


@pytest.mark.parametrize(
    "pattern", ["(a*)*b", "(a|a)*b", "(.*.*.*)*b", "((((a*)*)*)*)*b", "(a?){300}b", "(a*){99999}b"]
)
def test_no_pattern_takes_exponential_time(pattern):
    """Where `re` takes years."""
    start = time.perf_counter()

    Pattern(pattern, "a test").matches("a" * 300)

    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("pattern", ["(?i)a", r"(a)\1", "(?=a)b", "(?>a)", "(", "(" * 5000, "a{99999999999999999999}"])
def test_other_patterns_are_refused(pattern):
    """Look-arounds, references and flags, and what is not a pattern."""
    with pytest.raises(tdf.UnsupportedError, match="'target_modules' is not understood"):
        Pattern(pattern, "'target_modules'")


ENTRIES = [(r"^a\.b", 1), ("b", 2), (r"layers\.\d+\.c", 3), (".*c", 4), (r"^a\.b", 5), ("d.e", 6)]


@pytest.mark.parametrize(
    "name", ["a.b", "x.a.b", "b", "xb", "layers.3.c", "m.layers.3.c", "c", "xc", "dxe", "y.d.e", "q"]
)
def test_the_first_pattern_of_a_table_counts(name):
    """As PEFT's `get_pattern_key`."""
    expected = next((value for text, value in ENTRIES if re.match(rf"(.*\.)?({text})$", name)), 0)

    assert PatternTable(ENTRIES, "a test", 0)[name] == expected


def test_a_table_of_many_names_is_read_in_time():
    """Each of thousands of layers has its own entry, and is looked up once."""
    names = [f"model.layers.{i}.q" for i in range(5000)]
    start = time.perf_counter()
    table = PatternTable([("^" + re.escape(name), i) for i, name in enumerate(names)], "a test", 0)

    found = [table[name] for name in names]

    assert found == list(range(5000))
    assert time.perf_counter() - start < 2
