"""Nested keys and filters."""

import re

import pytest
import torch
from hypothesis import given
from torch import nn

from tdfunc import Filter, FilterError, Kind, MissingKeyError, TensorDict, of_type
from tdfunc._keys import Entry, dotted, is_key, missing, unravel
from tests.helpers import TinyMLP
from tests.strategies import PATHS


@given(PATHS)
def test_unravel_undoes_nesting(path):
    """A nested key would name another path than its flat form."""
    nested = path[-1]
    for part in reversed(path[:-1]):
        nested = (part, (nested,))

    assert unravel(nested) == unravel(path) == path
    assert is_key(nested)


@pytest.mark.parametrize("key", ["", (), ("a", ""), ("a", 0), 3, ("a", ()), None])
def test_bad_key(key):
    """A key that names nothing would be accepted."""
    with pytest.raises(TypeError, match=re.escape(f"in {key!r}")):
        unravel(key)


@pytest.mark.parametrize("key", [0, slice(None), None, (), ("a", 0), ("a", slice(None)), (None,)])
def test_index_is_no_key(key):
    """An index would be looked up as a key."""
    assert not is_key(key)


def test_missing_says_what_is_there():
    """The error for a typo would not name the key, its parent, or what was meant."""
    message = r"no key 'wieght' under 'layer'(.|\n)*'weight', 'bias'(.|\n)*did you mean 'weight'"
    with pytest.raises(MissingKeyError, match=message):
        TensorDict({"layer": {"weight": 1, "bias": 1}})["layer", "wieght"]
    assert str(missing(("k",), [f"k{i}" for i in range(10_000)])).count("\n") == 1


def entries(**leaves):
    """What a filter sees of leaves by name."""
    return [Entry((tuple(name.split("_")),), leaf, None) for name, leaf in leaves.items()]


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        ("a.*", [True, True, False]),
        ("*.w", [True, False, True]),
        (re.compile(r"a\.w"), [True, False, False]),
        (torch.int64, [False, True, False]),
        (lambda path, leaf: leaf.dim() == 1, [False, True, False]),
        (Filter("a.*") & "*.w", [True, False, False]),
        ("a.w" | Filter("b.w"), [True, False, True]),
        ("*.w" & ~Filter("a.*"), [False, False, True]),
        (Filter(Filter("a.w")), [True, False, False]),
    ],
)
def test_filter(spec, chosen):
    """A filter would choose another leaf than the glob, regex, dtype or predicate says."""
    found = entries(a_w=torch.zeros(()), a_b=torch.zeros(1, dtype=torch.int64), b_w=torch.zeros(()))

    assert Filter(spec).mask(found) == chosen


def test_filter_by_kind():
    """A kind would not be matched."""
    found = [Entry((("a",),), 0, Kind.BUFFER), Entry((("b",),), 0, None)]

    assert Filter(Kind.BUFFER).mask(found) == [True, False]


def test_filter_sees_every_tied_path():
    """A tied leaf would be found under its first path only."""
    found = [Entry((("emb", "w"), ("out", "w")), torch.zeros(1), None)]

    assert Filter("out.*").mask(found) == [True]
    assert Filter(lambda path, leaf: path[0] == "out").mask(found) == [True]


@pytest.mark.parametrize("spec", ["nothing.*", re.compile("nothing")])
def test_pattern_that_matches_nothing(spec):
    """A typo in a pattern would silently choose no leaf."""
    with pytest.raises(FilterError, match="'nothing(.|\n)*1 leaves(.|\n)*'a.w'"):
        Filter(spec).mask(entries(a_w=torch.zeros(1)))
    with pytest.raises(FilterError, match="no leaves"):
        Filter(spec).mask([])


def test_filter_of_nonsense():
    """Anything would be taken for a filter."""
    with pytest.raises(FilterError, match=r"glob \(str\)(.|\n)*3 \(int\)"):
        Filter(3)


def test_of_type():
    """The leaves of submodules of a type would be missed, or others be chosen."""
    params = TensorDict.from_module(nn.Sequential(nn.LayerNorm(3), TinyMLP()))
    norms, rest = params.partition(of_type(nn.Sequential(nn.LayerNorm(3), TinyMLP()), nn.LayerNorm))

    assert [dotted(path) for path in norms.paths()] == ["0.weight", "0.bias"]
    assert len(rest.paths()) == 4
    with pytest.raises(FilterError, match=r"of_type\(LSTM\)(.|\n)*Linear, TinyMLP"):
        of_type(TinyMLP(), nn.LSTM)
