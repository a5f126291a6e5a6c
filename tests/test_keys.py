"""Nested keys and filters."""

import copy
import enum
import pickle
import re

import pytest
import torch
from hypothesis import given
from torch import nn

from tdfunc import Filter, FilterError, Kind, MissingKeyError, TensorClass, TensorDict, lazy_stack, of_type
from tdfunc.core.keys import Entry, dotted, is_key, missing, unravel
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


TREE = TensorDict({"fc": {"weight": 1, "bias": 1}, "scale": 2.0, "a.b": 1})


@pytest.mark.parametrize(
    "call",
    [
        lambda t, k: t[k],
        lambda t, k: t.select(k),
        lambda t, k: t.delete(k),
        lambda t, k: t.pop(k),
        lambda t, k: t.at[k].get(),
        lambda t, k: t.at[k].add(1),
        lambda t, k: t.at[k].apply(torch.neg),
        lambda t, k: t.rename_key(k, "new"),
        lambda t, k: t.untie(k),
        lambda t, k: t.kind(k),
        lambda t, k: t.set_(k, 1),
        lambda t, k: t.set(k, 1, inplace=True),
        lambda t, k: lazy_stack([t, t])[k],
        lambda t, k: lazy_stack([t, t]).delete(k),
    ],
)
@pytest.mark.parametrize(
    ("key", "lacking", "hint"),
    [
        ("scael", "scael", "did you mean 'scale'?"),
        (("fc", "wieght"), "wieght", "did you mean 'weight'?"),
        ("fc.weight", "fc.weight", "a nested key is a tuple: ('fc', 'weight')."),
        ("bias", "bias", "did you mean ('fc', 'bias')?"),
        (("fcc", "weight"), "fcc", "did you mean 'fc'?"),
    ],
    ids=str,
)
def test_every_call_says_what_was_meant(call, key, lacking, hint):
    """One way to ask for a key would have a poorer error than the others."""
    with pytest.raises(MissingKeyError) as caught:
        call(TREE, key)

    assert f"no key {lacking!r}" in str(caught.value)
    assert f"hint:     {hint}" in str(caught.value)


def test_nothing_lies_under_a_leaf():
    """The message would say that there is one of no keys."""
    with pytest.raises(MissingKeyError, match=r"no key 'x' under 'scale'[\s\S]*'scale' is a leaf"):
        TREE["scale", "x"]


def test_fields_are_suggested():
    """A misspelled field of a typed tree would be refused without saying which one was meant."""

    class Sample(TensorClass):
        image: torch.Tensor

    with pytest.raises(MissingKeyError, match=r"no field 'imgae'[\s\S]*did you mean 'image'"):
        Sample(torch.zeros(1)).replace(imgae=torch.zeros(1))
    with pytest.raises(MissingKeyError, match=r"no field 'x'[\s\S]*to_tensordict\(\)"):
        Sample(torch.zeros(1)).set("x", 1)


def test_hints_among_many_keys():
    """A tree of many keys would give no hint, compare them all, or find nothing that is alike."""
    tree = TensorDict({f"block{i:06}": 0 for i in range(20_000)} | {"weight": 0})

    with pytest.raises(MissingKeyError, match="did you mean 'weight'"):
        tree["weigth"]
    assert str(missing(("k",), [f"name{i}" for i in range(10_000)])).count("\n") == 1
    assert str(missing(("q",), ["xy"], node=TensorDict({"xy": 1}))).count("\n") == 1


def test_hints_are_made_when_they_are_read():
    """`except KeyError` would pay for a text that nobody reads; a pickled error would lose it."""
    keys = {"a": 1}
    error = missing(("b",), keys)
    keys["bb"] = 2

    assert "did you mean 'bb'" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(copy.deepcopy(error)) == str(error)
    assert "no key 'b'" in repr(error)


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


class Field(str, enum.Enum):  # noqa: UP042 (its str() is not its value, unlike that of a StrEnum)
    """Keys as many programs name them."""

    IMAGE = "image"


def test_str_subclasses_are_plain_keys():
    """A member of a str enum would be read as an index, and be written to files and pickles as the enum."""
    td = TensorDict({Field.IMAGE: torch.ones(2), ("n", Field.IMAGE): torch.zeros(2)})
    td = td.set(Field.IMAGE, torch.full((2,), 3.0)).set(("m", Field.IMAGE), torch.ones(2))

    assert [type(part) for path in td.paths() for part in path] == [str] * 5
    assert td[Field.IMAGE] is td["image"]
    assert td["n", Field.IMAGE] is td["n", "image"]
    assert Field.IMAGE in td
    assert ("m", Field.IMAGE) in td
    assert td.at[Field.IMAGE].add(1)["image"].tolist() == [4.0, 4.0]
    assert type(unravel(Field.IMAGE)[0]) is str
    assert unravel(Field.IMAGE) == ("image",)
