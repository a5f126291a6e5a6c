"""Patterns of foreign files match as `re` does, and in a time that they cannot make exponential."""

import re
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc.lora.files.patterns import Modules, Pattern, PatternTable

# As PEFT, Unsloth and ms-swift write them.
REAL = [
    r"(.*\.)?(q_proj)$",
    r"(.*\.)?(model\.layers\.(0|1[0-9])\..*)$",
    r"^(?!.*visual).*(?:q_proj|k_proj|down_proj)$",
    r"^(model(?=\.).*\.(q_proj|down_proj))$",
    r"(?:.*?(?:language|layers).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp)",
    r".*\.[^.]+_proj\Z",
    r".*(?<=self_attn\.)q_proj",
    r".*(?<!self_attn\.)q_proj",
    r"\w+\.\w*\.\d{2}\b.*",
    r"[\w\-]+",
    r"[^\W\d]+\s?$",
]
NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "lm_head",
    "visual.blocks.3.q_proj",
    "",
    "a\n",
]


@pytest.mark.parametrize("pattern", REAL)
@pytest.mark.parametrize("name", NAMES)
def test_real_patterns_match_as_re_does(pattern, name):
    """Look-arounds, boundaries, sets, lazy repeats and anchors."""
    assert Pattern(pattern, "a test").matches(name) == (re.fullmatch(pattern, name) is not None)


ATOMS = [
    "a",
    "b",
    ".",
    r"\.",
    "[ab]",
    "[^a]",
    "[0-9a]",
    r"\d",
    r"\w",
    "(a|ab)",
    "(?:b|)",
    "(?=a)",
    "(?!a.)",
    "(?<=b)",
    "(?<!ab)",
    "(?=(?!b).)",
    "^",
    "$",
    r"\b",
    "x",
]
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
    "pattern", ["(a*)*b", "(a|a)*b", "(.*.*.*)*b", "((((a*)*)*)*)*b", "(a?){300}b", "(a*){99999}b", "(?=(a+)+b)a"]
)
def test_no_pattern_takes_exponential_time(pattern):
    """Where `re` takes years."""
    start = time.process_time()

    Pattern(pattern, "a test").matches("a" * 300)

    assert time.process_time() - start < 2


def test_a_pattern_of_too_many_steps_is_refused():
    """Each of its look-aheads is read at each place of the text."""
    with pytest.raises(tdf.UnsupportedError, match="more than 300,000 steps"):
        Pattern("(?=.*.*.*)" * 900, "a test").matches("a" * 300)


@pytest.mark.parametrize(
    "pattern", ["(?i)a", "(?i:a)", r"(a)\1", "(?>a)", "(", "(" * 5000, "a{99999999999999999999}", "a" * 20_000]
)
def test_other_patterns_are_refused(pattern):
    """References, atomic groups and flags, and what is not a pattern."""
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


# The names of complete modules, as PEFT, diffusers and AdaLora write them.
WRITTEN = {
    "complete, escaped": lambda name: "^" + re.escape(name),
    "complete": lambda name: "^" + name,
    "the end": lambda name: name,
    "the end, escaped": re.escape,
}


@pytest.mark.parametrize("written", WRITTEN)
def test_a_table_of_many_names_is_read_in_time(written):
    """Each of thousands of layers has its own entry, and is looked up once."""
    names = [f"model.layers.{i}.q" for i in range(5000)]
    start = time.process_time()
    table = PatternTable([(WRITTEN[written](name), i) for i, name in enumerate(names)], "a test", 0)

    found = [table[name] for name in names]

    assert found == list(range(5000))
    assert time.process_time() - start < 4


CHARACTERS = st.text("ab.1", max_size=3)
ENTRY = st.one_of(
    CHARACTERS,
    CHARACTERS.map(lambda text: "^" + text),
    CHARACTERS.map(re.escape),
    CHARACTERS.map(lambda text: text + "|b"),
    CHARACTERS.map(lambda text: text + ".*"),
)


@given(st.lists(ENTRY, max_size=5), st.text("ab.1", max_size=6))
def test_a_table_finds_what_re_finds(texts, name):
    """Names that are written out, and other patterns, in any order."""
    expected = next((i for i, text in enumerate(texts) if re.match(rf"(.*\.)?({text})$", name)), -1)

    assert PatternTable([(text, i) for i, text in enumerate(texts)], "a test", -1)[name] == expected


@given(st.lists(ENTRY, max_size=5), st.text("ab.1", max_size=6))
def test_modules_are_those_that_re_finds(texts, name):
    """The modules of `modules_to_save`, and what is inside of them."""
    expected = any(re.fullmatch(rf"(?:(^|.*\.){text}($|\..*))", name) for text in texts)

    assert Modules(texts, "a test").has(name) == expected
