"""Typed trees are immutable; edits, paths into empty fields, conversions to other things and back."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import ImmutableError, Kind, MissingKeyError, TensorClass, TensorDict, TreeStructureError, lazy_stack
from tests.helpers import assert_trees_equal
from tests.tensorclass.classes import Foo, Inner, foo

# -- edits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: setattr(t, "x", 1), r"\.x = value.*\n.*new = old.replace\(x=value\)"),
        (lambda t: setattr(t, "colour", 1), r"no field 'colour'.\n.*\['x', 'note', 'inner', 'extra'\]"),
        (lambda t: setattr(t, "batch_size", [2]), r"with_batch_size\(value\)"),
        (lambda t: setattr(t, "names", ["a"]), r"with_names\(value\)"),
        (lambda t: delattr(t, "device"), r"del \.device"),
        (lambda t: t.__setitem__(0, t[1]), r"td.at\[index\].set\(value\)"),
        (lambda t: t.update({"x": 1}, inplace=True), r"td = td.update\(other\)"),
    ],
)
def test_immutable(change, message):
    """An assignment raises, leaves the instance as it is and names the call to write instead."""
    made = foo()
    before = made.clone()

    with pytest.raises(ImmutableError, match=message):
        change(made)
    assert_trees_equal(made, before)


@pytest.mark.parametrize(
    "edit",
    [
        lambda t: t.set("colour", 1),
        lambda t: t.set(("colour", "deep"), 1),
        lambda t: t.update({"colour": 1}),
        lambda t: t.replace(colour=None),
        lambda t: t.rename_key("x", "colour"),
        lambda t: TensorDict({"t": t}, [4]).set(("t", "colour"), 1),
        lambda t: TensorDict({"t": t}, [4]).rename_key(("t", "x"), ("t", "colour")),
        lambda t: TensorDict({"t": t}, [4]).update({"t": {"colour": 1}}),
    ],
)
def test_unknown_fields(edit):
    """No edit adds a key that is not a field."""
    with pytest.raises(MissingKeyError, match=r"(?s)Foo.*'colour'.*\['x', 'note', 'inner', 'extra'\]"):
        edit(foo())


@pytest.mark.parametrize(
    "empty",
    [
        lambda t: t.set("inner", None),
        lambda t: t.update({"inner": None}),
        lambda t: t.replace(inner=None),
        lambda t: t.replace({"inner": None}),
        lambda t: t.delete("inner"),
        lambda t: t.exclude("inner"),
    ],
)
def test_emptying_a_field(empty):
    """None empties a field, as deleting it does."""
    new = empty(foo())

    assert new.inner is None
    assert "inner" not in new
    assert new.get("inner") is None
    assert new.get("inner", 5) == 5


def test_ties_survive():
    """Ties of a tree in a field survive edits of the instance and conversions."""
    shared = nn.Linear(2, 2)
    tied = tdf.from_module(nn.Sequential(shared, shared))
    made = Foo(torch.zeros(2), extra=tied)

    assert made.ties() == [[f"extra.{i}.{name}" for i in "01"] for name in ("weight", "bias")]
    new = made.set(("extra", "0", "bias"), torch.zeros(2))
    assert new.extra["1", "bias"].sum() == 0
    assert made.replace(x=torch.ones(2)).ties() == made.ties()
    assert made.replace(extra=None).ties() == []
    assert Foo.from_tensordict(made.to_tensordict()).ties() == made.ties()


ROWS = torch.ones(4)


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data.set(("inner", "y"), ROWS),
        lambda data: data.set(("inner", "y"), ROWS, kind=Kind.BUFFER),
        lambda data: data.update({("inner", "y"): ROWS}),
        lambda data: TensorDict({"t": data}, [4]).set(("t", "inner", "y"), ROWS)["t"],
        lambda data: TensorDict({"t": data}, [4]).update({("t", "inner", "y"): ROWS})["t"],
        lambda data: lazy_stack([data, data]).set(("inner", "y"), torch.stack([ROWS, ROWS]))[0],
    ],
)
def test_a_path_into_an_empty_field(edit):
    """A path into an empty field makes an instance of the field's class."""
    made = edit(foo().replace(inner=None))

    assert type(made.inner) is Inner
    assert made.inner.batch_size == (4,)
    assert torch.equal(made.inner.y, ROWS)


RAW = type("Raw", (TensorClass["nocast"],), {"__annotations__": {"extra": Any}})


@pytest.mark.parametrize("make", [foo, lambda: RAW(None, batch_size=[4])], ids=["cast", "nocast"])
def test_a_path_into_an_empty_open_field(make):
    """A path into an empty field that may hold any tree makes an open one, also with `nocast`."""
    assert type(make().set(("extra", "a", "b"), ROWS).extra["a"]) is TensorDict
    assert type(make().update({("extra", "a"): ROWS}).extra) is TensorDict


@pytest.mark.parametrize(
    "edit", [lambda data: data.set(("inner", "typo"), ROWS), lambda data: data.update({("inner", "typo"): ROWS})]
)
def test_a_path_that_fills_no_field(edit):
    """A path that leaves fields of the class without a value raises."""
    with pytest.raises(TreeStructureError, match=r"(?s)'inner'.*'typo'.*td.set\('inner', "):
        edit(foo().replace(inner=None))


# -- conversions ------------------------------------------------------------------------------------------------


def test_round_trip():
    """`from_tensordict` undoes `to_tensordict`: classes, empty fields, names and device."""
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


def test_from_a_lazy_stack():
    """Of a lazy stack, each tree gets its own of the further values, and the result is a stack of instances."""
    lazy = lazy_stack([TensorDict({"x": torch.zeros(n)}, [n]) for n in (2, 3)])
    made = Foo.from_tensordict(lazy, {"note": ["a", "b"], "extra": (torch.ones(2), torch.ones(3))})

    assert isinstance(made, Foo)
    assert made.note == ["a", "b"]
    assert [x.shape for x in made.extra] == [(2,), (3,)]
    assert type(type(made).from_tensordict(lazy)) is type(made)
    assert type(type(made).from_tensordict(lazy[0])) is Foo
    assert type(type(made).from_dataclass(Plain(torch.zeros(3), None), batch_size=[3])) is Foo


@pytest.fixture
def nested():
    """A nested tensor of rows of two lengths."""
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: Foo(x, batch_size=[2]),
        lambda x: Foo(x, batch_size=[2]).set("x", x),
        lambda x: Foo(x, batch_size=[2]).replace(x=x),
        lambda x: Foo.from_tensordict(TensorDict({"x": x}, [2])),
    ],
    ids=["constructor", "set", "replace", "from_tensordict"],
)
def test_nested_tensors(make, nested):
    """A nested tensor, whose shape cannot be asked for, is taken as a value."""
    assert make(nested).x is nested


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_operations_on_nested_tensors(nested):
    """An operation of instances is torch's on their nested tensors."""
    made = Foo(nested, batch_size=[2])

    assert [x.tolist() for x in (made + made).x.unbind()] == [[2, 2], [2, 2, 2]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_of_another_length_is_refused(nested):
    """The rows of a nested tensor are those of the batch."""
    with pytest.raises(tdf.BatchSizeError, match=r"(?s)'Foo.x'.*\[3\].*\[2, -1\]"):
        Foo(nested, batch_size=[3])


class Middle(TensorClass):
    inner: Inner
    z: Tensor


class Nested(TensorClass):
    middle: Middle
    note: str


def test_from_incomplete_trees():
    """`safe=False` leaves fields without a value empty; otherwise the missing ones are named, in nested trees too."""
    source = TensorDict({"middle": {"inner": TensorDict({})}})

    assert Middle.from_tensordict(TensorDict({}), safe=False).z is None
    with pytest.raises(TreeStructureError, match=r"(?s)Middle.from_tensordict.*missing \['z'\]"):
        Nested.from_tensordict(source, {"note": "n"})
    with pytest.raises(TreeStructureError, match=r"(?s)Middle.from_tensordict.*unknown \['q'\]"):
        Nested.from_tensordict(TensorDict({"middle": {"q": 1}}), safe=False)


@dataclass
class Plain:
    x: Tensor
    inner: Any


def test_a_dataclass_becomes_an_instance():
    """`from_dataclass` takes the values of the fields."""
    assert Foo.from_dataclass(Plain(torch.zeros(3), None), batch_size=[3]).x.shape == (3,)


def test_dataclasses_read_instances():
    """`fields` and `asdict` of `dataclasses` work on instances."""
    assert [f.name for f in dataclasses.fields(foo())] == ["x", "note", "inner", "extra"]
    assert dataclasses.asdict(foo())["inner"].keys() == {"y"}


def test_dataclasses_replace_values():
    """`dataclasses.replace` changes a value and keeps batch size and names."""
    made = foo().with_names(["row"])
    replaced = dataclasses.replace(made, note="new")

    assert replaced.note == "new"
    assert replaced.batch_size == made.batch_size
    assert replaced.names == ["row"]
    assert made.__replace__(note="new").note == "new"


def test_a_copy_is_the_instance():
    """An instance, which no one can change, is its own copy."""
    made = foo()

    assert copy.copy(made) is made
