"""How trees print, and what a prompt completes."""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from IPython.core.completer import IPCompleter, provisionalcompleter
from torch import Tensor, nn

import tdfunc
from tdfunc import NonTensorStack, TensorClass, TensorDict, lazy_stack
from tests.incumbent import Incumbent, tensordict
from tests.strategies import trees


def both(make):
    """The same tree of either library."""
    return make(TensorDict, TensorClass), make(Incumbent, tensordict.TensorClass)


def nested_class(tree, base):
    """A typed tree in a typed tree in an open one."""

    class Foo(base):
        tensor: Tensor
        non_tensor: Any
        nested: Any = None

    inner = Foo(torch.zeros(3), "x", batch_size=[3])
    return tree({"z": torch.zeros(3), "foo": Foo(torch.zeros(3, 2), "a string!", inner, batch_size=[3])}, [3])


@pytest.mark.parametrize(
    "make",
    [
        nested_class,
        lambda tree, _: tree({"b": {"c": torch.zeros(2)}, "a": torch.zeros(2, dtype=torch.int64)}, [2]),
        lambda tree, _: tree({}, [3]),
        lambda tree, _: tree({"a": {}, "b": {"c": {}}}),
        lambda tree, _: tree({"a": torch.zeros(3, device="meta")}, [3], device="meta"),
        lambda tree, _: tree({"p": nn.Parameter(torch.zeros(3)), "b": nn.Buffer(torch.zeros(3))}),
        lambda tree, _: tree({"a": torch.zeros(3, requires_grad=True) * 2}),
    ],
)
def test_trees_print_as_theirs(make):
    """A reader of tensordict's output, or a doctest of it, would find another form."""
    ours, theirs = both(make)

    assert repr(ours) == repr(theirs)


def test_where_repr_differs():
    """docs/differences.md would say something of `repr` that is not so."""
    shared = {"a": torch.zeros(3).share_memory_()}
    assert "is_shared=True)" in repr(TensorDict(shared)).splitlines()[-1]
    assert "is_shared=False)" in repr(Incumbent(shared)).splitlines()[-1]
    assert "names=['t'])" in repr(TensorDict({}, [3], names=["t"]))
    assert "names" not in repr(Incumbent({}, [3], names=["t"]))
    words = {"l": ["a", "b"]}
    assert "l: NonTensorStack(['a', 'b'], batch_size=torch.Size([2]), device=None)" in repr(TensorDict(words, [2]))
    assert "NonTensorStack(\n" in repr(Incumbent(words, [2]))
    assert "data=word, batch_size=torch.Size([]), device=None)" in repr(TensorDict({"s": "word"}, device="cpu"))
    assert "data=word, batch_size=torch.Size([]), device=cpu)" in repr(Incumbent({"s": "word"}, device="cpu"))


@given(trees())
def test_completions_are_keys(tree):
    """A prompt would offer a key that is not there, or leave one out."""
    offered = tree._ipython_key_completions_()

    assert len(offered) == len(set(offered))
    assert set(offered) == set(tree.keys(include_nested=True))


def test_completions_are_bounded():
    """A tab in a prompt would wait for a tree of any size; sub-trees would hide the keys beside them."""
    tree = TensorDict({"many": {f"k{i}": 0 for i in range(20_000)}, "last": 1})

    offered = tree._ipython_key_completions_()

    assert len(offered) == 10_000
    assert offered[:2] == ["many", "last"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('td["', {"fc", "scale"}),
        ('td["sc', {"scale"}),
        ('td["fc", "', {"weight", "bias"}),
        ('td["fc", "w', {"weight"}),
        ('data["', {"image", "label"}),
        ('ragged["', {"x"}),
    ],
)
def test_ipython_completes(text, found):
    """IPython would not take the completions as they are given."""

    class Sample(TensorClass):
        image: Tensor
        label: Tensor

    names = {
        "td": TensorDict({"fc": {"weight": 1, "bias": 1}, "scale": 2}),
        "data": Sample(torch.zeros(2), torch.zeros(2)),
        "ragged": lazy_stack([TensorDict({"x": torch.zeros(n)}, [n]) for n in (1, 2)]),
    }

    with provisionalcompleter():
        offered = {c.text.strip("\"'],") for c in IPCompleter(namespace=names).completions(text, len(text))}

    assert offered == found


def test_dir_lists_what_can_be_called():
    """`dir` and tab would show tdfunc's helpers, or hide a field, a method or a name of the user's own."""

    class Sample(TensorClass):
        image: Tensor
        box: Tensor | None = None

        def _mine(self):
            return self

        @property
        def flat(self):
            return self.reshape(-1)

    listed = dir(Sample(torch.zeros(2)))

    assert {"image", "box", "_mine", "flat", "batch_size", "summary", "__getitem__"} <= set(listed)
    assert not {"_data", "_map", "_get", "_fields", "_show_absent"} & set(listed)
    assert set(public(TensorDict)) <= set(dir(TensorDict({})))
    assert set(public(tdfunc.LazyStack)) <= set(dir(lazy_stack([TensorDict({})])))


def public(cls):
    """Names of a class without an underscore."""
    return [name for name, _ in inspect.getmembers_static(cls) if not name.startswith("_")]


def test_keys_that_cannot_be_printed():
    """A line break in a key would look like another entry, and a lone surrogate makes print fail."""
    td = TensorDict({"a\nb": torch.ones(1), "\ud800": torch.ones(1), "größe": torch.ones(1), "n": {"\0": 1}})

    for text in (repr(td), repr(lazy_stack([td, td]))):
        assert "a\\nb: " in text
        assert "\\ud800: " in text
        assert "größe: " in text
        assert "\\x00: " in text
        text.encode()


class Broken:
    def __repr__(self):
        raise RuntimeError("no text")


class Loud:
    def __repr__(self):
        return "two\nlines\x1b[31m"


def test_values_that_cannot_be_printed():
    """A value's own text would end the printing of its tree, break its line or send codes to the terminal."""
    tree = TensorDict({"a": Broken(), "b": Loud(), "c": NonTensorStack(Broken())})
    typed = from_value(Loud())

    for text in map(repr, (tree, lazy_stack([tree, tree]), typed)):
        assert r"two\nlines\x1b[31m" in text
        assert "\x1b" not in text
    assert "a: <Broken: its repr raises RuntimeError>" in repr(tree)
    assert "its repr raises RuntimeError>" in repr(lazy_stack([tree, tree]))


def from_value(value):
    """A typed tree that holds it."""

    class Holder(TensorClass):
        value: Any

    return Holder(value)
