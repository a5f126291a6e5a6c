"""Nested keys and filters."""

import copy
import enum
import pickle
import re

import pytest
import torch
from hypothesis import given
from torch import nn

from tdfunc import Filter, Kind, MissingKeyError, TensorDict, lazy_stack, of_type
from tdfunc.core.keys import Entry, dotted, is_key, missing, unravel
from tests.helpers import TinyMLP
from tests.strategies import PATHS


@given(PATHS)
def test_unravel_undoes_nesting(path):
    """A nested key is the path of its flat form."""
    nested = path[-1]
    for part in reversed(path[:-1]):
        nested = (part, (nested,))

    assert unravel(nested) == unravel(path) == path
    assert is_key(nested)


@pytest.mark.parametrize("key", [0, slice(None), None, (), ("a", 0), ("a", slice(None)), (None,)])
def test_index_is_no_key(key):
    """An index is not a key."""
    assert not is_key(key)


TREE = TensorDict({"fc": {"weight": 1, "bias": 1}, "scale": 2.0, "a.b": 1})


@pytest.mark.parametrize(
    "call",
    [
        lambda t, k: t[k],
        lambda t, k: t.select(k),
        lambda t, k: t.delete(k),
        lambda t, k: t.pop(k),
        lambda t, k: t.at[k].get(),
        lambda t, k: t.at[k].set(1),
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
        (
            "*.bias",
            "*.bias",
            "a pattern selects leaves in partition(tree, '*.bias') or tree.apply(fn, where='*.bias').",
        ),
        (("fc", "wieght"), "wieght", "did you mean 'weight'?"),
        ("fc.weight", "fc.weight", "a nested key is a tuple: ('fc', 'weight')."),
        (("fcc", "weight"), "fcc", "did you mean 'fc'?"),
    ],
    ids=str,
)
def test_every_call_says_what_was_meant(call, key, lacking, hint):
    """Each call that takes a key raises the same error for one that is missing, with the key that was meant."""
    with pytest.raises(MissingKeyError) as caught:
        call(TREE, key)

    assert f"no key {lacking!r}" in str(caught.value)
    assert f"hint:     {hint}" in str(caught.value)


def test_hints_among_many_keys():
    """A tree of many keys gets a hint for a misspelling; keys without a similar one get none."""
    tree = TensorDict({f"block{i:06}": 0 for i in range(20_000)} | {"weight": 0})

    with pytest.raises(MissingKeyError, match="did you mean 'weight'"):
        tree["weigth"]
    assert str(missing(("k",), [f"name{i}" for i in range(10_000)])).count("\n") == 1
    texts = [str(missing(("k",), ["name"] * count)) for count in (20, 21)]
    assert [(text.count("name"), "..." in text) for text in texts] == [(20, False), (20, True)]


def test_hints_are_made_when_they_are_read():
    """The text of an error is made when it is read, and survives a pickle and a copy."""
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
        (Kind.BUFFER, [False, True, False]),
    ],
)
def test_filter(spec, chosen):
    """A filter chooses the leaves that its glob, regex, dtype, kind, predicate or combination names."""
    found = entries(a_w=torch.zeros(()), a_b=torch.zeros(1, dtype=torch.int64), b_w=torch.zeros(()))
    found[1] = found[1]._replace(kind=Kind.BUFFER)

    assert Filter(spec).mask(found) == chosen


def test_filter_sees_every_tied_path():
    """A tied leaf matches by any of its paths."""
    found = [Entry((("emb", "w"), ("out", "w")), torch.zeros(1), None)]

    assert Filter("out.*").mask(found) == [True]
    assert Filter(lambda path, leaf: path[0] == "out").mask(found) == [True]


def test_of_type():
    """`of_type` chooses the leaves of a module and of submodules of a type, and no others."""
    model = nn.Sequential(nn.LayerNorm(3), TinyMLP())
    norms, rest = TensorDict.from_module(model).partition(of_type(model, nn.LayerNorm))

    assert [dotted(path) for path in norms.paths()] == ["0.weight", "0.bias"]
    assert len(rest.paths()) == 4
    assert len(TensorDict.from_module(model[0]).partition(of_type(model[0], nn.LayerNorm))[0].paths()) == 2


class Field(str, enum.Enum):  # noqa: UP042 (its str() is not its value, unlike that of a StrEnum)
    """Keys as many programs name them."""

    IMAGE = "image"


@pytest.fixture
def images():
    """A tree whose keys were given as members of a str enum."""
    td = TensorDict({Field.IMAGE: torch.ones(2), ("n", Field.IMAGE): torch.zeros(2)})
    return td.set(Field.IMAGE, torch.full((2,), 3.0)).set(("m", Field.IMAGE), torch.ones(2))


def test_str_subclasses_are_stored_as_plain_keys(images):
    """A member of a str enum is stored as a plain str."""
    assert [type(part) for path in images.paths() for part in path] == [str] * 5
    assert type(unravel(Field.IMAGE)[0]) is str
    assert unravel(Field.IMAGE) == ("image",)


def test_str_subclasses_are_plain_keys(images):
    """A member of a str enum is the key that it stands for."""
    assert images[Field.IMAGE] is images["image"]
    assert images["n", Field.IMAGE] is images["n", "image"]
    assert Field.IMAGE in images
    assert ("m", Field.IMAGE) in images
    assert images.at[Field.IMAGE].add(1)["image"].tolist() == [4.0, 4.0]
