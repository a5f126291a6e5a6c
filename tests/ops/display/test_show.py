"""How trees print, and the keys that a prompt completes."""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
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
    """`repr` has tensordict's form."""
    ours, theirs = both(make)

    assert repr(ours) == repr(theirs)


@given(trees())
def test_completions_are_keys(tree):
    """A prompt is offered every key once, nested ones too."""
    offered = tree._ipython_key_completions_()

    assert len(offered) == len(set(offered))
    assert set(offered) == set(tree.keys(include_nested=True))


def test_completions_are_bounded():
    """A prompt is offered the first 10,000 keys, those of the upper levels first."""
    tree = TensorDict({"many": {f"k{i}": 0 for i in range(20_000)}, "last": 1})

    offered = tree._ipython_key_completions_()

    assert len(offered) == 10_000
    assert offered[:3] == ["many", "last", ("many", "k0")]


def test_dir_lists_what_can_be_called():
    """`dir` lists fields, methods and names of the user's own, without tdfunc's helpers."""

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
    assert not {"_data", "_map", "_get", "_fields", "_show_heading"} & set(listed)
    assert set(public(TensorDict)) <= set(dir(TensorDict({})))
    assert set(public(tdfunc.LazyStack)) <= set(dir(lazy_stack([TensorDict({})])))


def public(cls):
    """Names of a class without an underscore."""
    return [name for name, _ in inspect.getmembers_static(cls) if not name.startswith("_") and hasattr(cls, name)]


class Broken:
    def __repr__(self):
        raise RuntimeError("no text")


class Loud:
    def __repr__(self):
        return "two\nlines\x1b[31m"


class Holder(TensorClass):
    value: Any


UNPRINTABLE = TensorDict({"a\nb": Broken(), "\ud800": Loud(), "größe": NonTensorStack(Broken()), "n": {"\0": 1}})


@pytest.mark.parametrize(
    "tree",
    [UNPRINTABLE, lazy_stack([UNPRINTABLE, UNPRINTABLE]), TensorDict({"h": Holder(Loud())})],
    ids=["tree", "lazy stack", "typed tree"],
)
def test_values_that_cannot_be_printed(tree):
    """Line breaks and control characters of a repr are escaped, and the text can be encoded."""
    text = repr(tree)

    assert r"two\nlines\x1b[31m" in text
    assert "\x1b" not in text
    text.encode()


def test_a_repr_that_raises_is_named():
    """A value whose repr raises is shown by its class and the error."""
    assert r"a\nb: <Broken: its repr raises RuntimeError>" in repr(UNPRINTABLE)


def test_keys_that_cannot_be_printed():
    """Line breaks, control characters and lone surrogates of keys are escaped."""
    text = repr(lazy_stack([UNPRINTABLE, UNPRINTABLE]))

    assert [key for key in (r"a\nb", r"\ud800", "größe", r"\x00") if f"{key}: " not in text] == []
