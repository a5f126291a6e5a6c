"""Paths into empty fields of typed trees."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tdfunc as tdf
from tdfunc import TensorClass, TensorDict, TreeStructureError, lazy_stack


class Inner(TensorClass):
    y: Tensor


class Foo(TensorClass):
    x: Tensor
    inner: Inner | None = None
    extra: Any = None


def foo():
    """Four rows, with an instance inside."""
    return Foo(torch.ones(4, 3), Inner(torch.zeros(4), batch_size=[4]), batch_size=[4])


ROWS = torch.ones(4)


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data.set(("inner", "y"), ROWS),
        lambda data: data.set(("inner", "y"), ROWS, kind=tdf.Kind.BUFFER),
        lambda data: data.at["inner", "y"].set(ROWS),
        lambda data: data.update({("inner", "y"): ROWS}),
        lambda data: TensorDict({"t": data}, [4]).set(("t", "inner", "y"), ROWS)["t"],
        lambda data: TensorDict({"t": data}, [4]).update({("t", "inner", "y"): ROWS})["t"],
        lambda data: lazy_stack([data, data]).set(("inner", "y"), torch.stack([ROWS, ROWS]))[0],
    ],
)
def test_a_path_into_an_empty_field(edit):
    """The path would leave an open tree where the class says that there is an instance."""
    made = edit(foo().replace(inner=None))

    assert type(made.inner) is Inner
    assert made.inner.batch_size == (4,)
    assert torch.equal(made.inner.y, ROWS)


def test_a_path_into_an_empty_open_field():
    """A field that may hold any tree would be refused one, or `nocast` would keep it as a dict."""
    raw = type("Raw", (TensorClass["nocast"],), {"__annotations__": {"extra": Any}})

    for empty in (foo().replace(extra=None), raw(None, batch_size=[4])):
        assert type(empty.set(("extra", "a", "b"), ROWS).extra["a"]) is TensorDict
        assert type(empty.update({("extra", "a"): ROWS}).extra) is TensorDict


@pytest.mark.parametrize(
    "edit", [lambda data: data.set(("inner", "typo"), ROWS), lambda data: data.update({("inner", "typo"): ROWS})]
)
def test_a_path_that_fills_no_field(edit):
    """A misspelt path would make an instance without its fields."""
    with pytest.raises(TreeStructureError, match=r"'inner' is an empty field(.|\n)*'typo'(.|\n)*td.set\('inner', "):
        edit(foo().replace(inner=None))
