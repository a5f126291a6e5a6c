"""Typed trees as other things and back: trees, dataclasses, state dicts."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tdfunc as tdf
from tdfunc import BatchSizeError, TensorDict, TreeStructureError, lazy_stack
from tdfunc._tensorclass import TensorClass
from tests.helpers import assert_trees_equal
from tests.test_tensorclass import Foo, Inner, foo


def test_round_trip():
    """`from_tensordict` would not undo `to_tensordict`: classes, empty fields, names or devices."""
    made = Foo(
        torch.zeros(2, 3), inner=Inner(torch.zeros(2), batch_size=[2]), batch_size=[2], names=["b"], device="cpu"
    )
    td = made.to_tensordict()

    assert type(td) is type(td["inner"]) is TensorDict
    assert td["extra"] is None
    assert list(made.to_tensordict(retain_none=False).keys()) == ["x", "note", "inner"]
    assert td["x"] is not made.x
    assert_trees_equal(Foo.from_tensordict(td), made)
    assert type(Foo.from_tensordict(td).inner) is Inner


def test_from_tensordict():
    """Keys that are no fields would be kept, or missing ones be invented."""
    td = TensorDict({"x": torch.zeros(2)}, [2])
    made = Foo.from_tensordict(td, {"extra": "e", "x": torch.ones(2)})

    assert (made.extra, made.x.tolist(), made.note) == ("e", [1, 1], None)
    assert Foo.from_tensordict(td.delete("x"), safe=False).x is None
    with pytest.raises(TreeStructureError, match=r"Foo.from_tensordict.*\n.*'extra'\]\n.*\['note'\].*missing \['x'\]"):
        Foo.from_tensordict(TensorDict({"note": "a"}))
    with pytest.raises(TreeStructureError, match=r"unknown \['z'\], missing \[\]\n.*select"):
        Foo.from_tensordict(td.set("z", 1), safe=False)
    with pytest.raises(TypeError, match=r"this is no tree.\n.*a tree\n.*dict\n.*Foo\("):
        Foo.from_tensordict({"x": torch.zeros(2)})


def test_from_a_lazy_stack():
    """Values of further fields would be given whole to each tree, or the class of a lazy stack hold no fields."""
    lazy = lazy_stack([TensorDict({"x": torch.zeros(n)}, [n]) for n in (2, 3)])
    made = Foo.from_tensordict(lazy, {"note": ["a", "b"], "extra": (torch.ones(2), torch.ones(3))})

    assert isinstance(made, Foo)
    assert made.note == ["a", "b"]
    assert [x.shape for x in made.extra] == [(2,), (3,)]
    assert type(type(made).from_tensordict(lazy)) is type(made)
    assert type(type(made).from_tensordict(lazy[0])) is Foo
    assert type(type(made).from_dataclass(Plain(torch.zeros(3), None), batch_size=[3])) is Foo


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors():
    """A nested tensor, whose shape cannot be asked for, would be refused by every way in."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    made = Foo(nested, batch_size=[2])

    for each in (
        made,
        made.set("x", nested),
        made.replace(x=nested),
        Foo.from_tensordict(TensorDict({"x": nested}, [2])),
    ):
        assert each.x is nested
    with pytest.raises(BatchSizeError, match=r"'Foo.x'.*\n.*\[3\] .*\n.*\[2, -1\]"):
        Foo(nested, batch_size=[3])


class Middle(TensorClass):
    inner: Inner
    z: Tensor


class Nested(TensorClass):
    middle: Middle
    note: str


def test_from_incomplete_trees():
    """`safe=False` would stop at the outer class, and refuse what is missing in a nested one."""
    source = TensorDict({"middle": {"inner": TensorDict({})}})
    made = Nested.from_tensordict(source, safe=False)

    assert type(made.middle) is Middle
    assert type(made.middle.inner) is Inner
    assert made.note is made.middle.z is made.middle.inner.y is None
    rows = TensorDict({"middle": tdf.lazy_stack([source["middle"]])}, [1])
    assert isinstance(Nested.from_tensordict(rows, safe=False).middle[0].inner, Inner)
    with pytest.raises(TreeStructureError, match=r"Middle.from_tensordict.*\n.*\n.*missing \['z'\]"):
        Nested.from_tensordict(source, {"note": "n"})
    with pytest.raises(TreeStructureError, match=r"Inner.from_tensordict.*\n.*\n.*unknown \['q'\]"):
        Nested.from_tensordict(TensorDict({"middle": {"inner": {"q": 1}}}), safe=False)


@dataclass
class Plain:
    x: Tensor
    inner: Any


def test_from_dataclass():
    """A field of a dataclass would be lost, or a wrong source taken."""
    made = Foo.from_dataclass(Plain(torch.zeros(3), None), batch_size=[3])

    assert made.x.shape == (3,)
    assert made.note == "plain"
    with pytest.raises(TypeError, match=r"no dataclass instance.\n.*\n.*got: +3"):
        Foo.from_dataclass(3)
    with pytest.raises(TypeError, match=r"no dataclass instance.\n.*\n.*got: .*Plain"):
        Foo.from_dataclass(Plain)


def test_dataclass_protocol():
    """The functions of `dataclasses` and `copy` would not see fields, or lose the batch size."""
    made = foo().with_names(["row"])
    replaced = dataclasses.replace(made, note="new")

    assert [f.name for f in dataclasses.fields(made)] == ["x", "note", "inner", "extra"]
    assert dataclasses.asdict(made)["inner"].keys() == {"y"}
    assert (replaced.note, replaced.batch_size, replaced.names) == ("new", made.batch_size, ["row"])
    assert made.__replace__(note="new").note == "new"
    assert copy.copy(made) is made


def test_dataclass_replace_of_a_lazy_stack():
    """`dataclasses.replace` of a stack, which has no constructor of fields, would fail with a message about another."""
    stack = tdf.lazy_stack([foo(), foo()])

    assert type(type(stack)([foo()], dim=0)) is type(stack)
    assert stack.__replace__(note="new").note == ["new", "new"]
    with pytest.raises(TypeError, match=r"LazyStack\[Foo\].*made of trees.\n.*\n.*'note'.*\n.*stack.replace"):
        dataclasses.replace(stack, note="new")


def test_state_dict():
    """The state dict would have other keys than the tree."""
    made = foo()

    assert list(made.state_dict()) == ["x", "inner.y"]
    assert torch.equal(made.state_dict()["x"], made.x)
    assert made.to_dict()["inner"].keys() == {"y"}


def test_flat_keys_are_open():
    """`flatten_keys` would give an instance with keys that are no fields."""
    flat = foo().flatten_keys(".")

    assert type(flat) is TensorDict
    assert list(flat.keys()) == ["x", "note", "inner.y"]
