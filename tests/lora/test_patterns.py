"""Patterns of a foreign adapter: Python's answer, in bounded time."""

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdfunc import UnsupportedError
from tdfunc.lora._patterns import is_match, names_end
from tests.helpers import examples

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "lm_head",
    "visual.blocks.3.q_proj",
    "",
    "a\n",
]
# As PEFT, Unsloth and ms-swift write them.
REAL = [
    r"(.*\.)?(q_proj)$",
    r"(.*\.)?(^model\.layers\.0\.self_attn\.q_proj)$",
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


@pytest.mark.parametrize("pattern", REAL)
@pytest.mark.parametrize("name", NAMES)
def test_real_patterns_match_as_in_python(pattern, name):
    """Lookahead, lookbehind, boundaries, sets, lazy repeats and anchors give the answer of `re`."""
    assert is_match(pattern, name) == bool(re.match(pattern, name))


@pytest.mark.parametrize(
    "key", ["q_proj", r"^model\.layers\.0\.self_attn\.q_proj", "layers.0.*", ".*mlp", "^lm_head$", r"down_\w+"]
)
@pytest.mark.parametrize("name", NAMES)
def test_keys_match_the_end_of_names_as_in_peft(key, name):
    """A key of `rank_pattern` matches a name or its last parts."""
    assert names_end(key, name) == bool(re.match(rf"(.*\.)?({key})$", name))


ATOMS = st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^a]", r"\w", r"\d", r"\b", "^", "$", ""])
WRAPPED = ["({})", "(?:{})", "({})?", "(?:{})*", "(?:{})+?", "({}){{1,2}}", "(?:{}){{2}}", "(?={})", "(?!{})"]
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(inner, st.sampled_from(WRAPPED)).map(lambda pair: pair[1].format(pair[0])),
    ),
    max_leaves=6,
)


@examples(4)
@given(PATTERNS, st.text(alphabet="ab.1\n", max_size=6))
def test_random_patterns_match_as_in_python(pattern, text):
    """Any nesting of groups, repeats, branches and assertions gives the answer of `re`."""
    assert is_match(pattern, text) == bool(re.match(pattern, text))


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$",
        r"(a|a)*b",
        r"(a|aa)+$",
        ".*" * 30 + "b",
        r"((((a*)*)*)*)*b",
        r"(a{0,1000}){0,1000}b",
        r"(?=(a+)+b)a",
        r"(.*\.)?((x+x+)+y)$",
    ],
)
def test_no_pattern_takes_long(pattern):
    """Patterns for which backtracking takes for ever are answered, or refused, at once."""
    begin = time.perf_counter()

    with suppress(UnsupportedError):
        is_match(pattern, "a" * 60 + "x" * 30)

    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"(a)\1", "no references"),
        (r"(?i)a", "no flags"),
        (r"(?i:a)", "no flags"),
        (r"(a", "a regular expression"),
        ("(" * 2_000 + ")" * 2_000, "a regular expression"),
        ("a" * 20_000, "at most 10,000 characters"),
        ("(?:" * 4 + "a*" + "b?)*" * 4 + "(?=.*.*.*)" * 4_000, "characters"),
    ],
)
def test_what_is_not_matched_is_refused_by_name(pattern, expected):
    """A part whose answer depends on the way through the pattern is an error, not another answer."""
    with pytest.raises(UnsupportedError, match=expected):
        is_match(pattern, "a" * 50)
