"""How values become nodes: options, annotations as types and strings, jaxtyping, defaults."""

import enum
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Optional, Protocol

import hypothesis
import numpy as np
import pytest
import torch
from jaxtyping import Bool, Float, jaxtyped
from torch import Tensor

from tdfunc import LeafMismatchError, NonTensorData, TensorClass, TensorDict, lazy_stack
from tdfunc._tensorclass.define import Field
from tests.strategies import SIZES
from tests.tensorclass import annotated


class Colour(enum.Enum):
    RED = "red"


class Inner(TensorClass):
    y: Tensor
    note: str = "inner"


class Default(TensorClass):
    value: Any


class NoCast(TensorClass["nocast"]):
    value: Any


class Only(TensorClass["tensor_only"]):
    value: Tensor
    inner: Inner | None = None


class Auto(TensorClass["autocast"]):
    integer: int = 0
    flag: bool = False
    real: float | None = None
    either: Optional[int] = None  # noqa: UP045
    text: str = ""
    colour: Colour = Colour.RED
    tensor: Tensor | None = None
    array: np.ndarray | None = None
    entries: list[int] | None = None
    several: int | str | None = None
    inner: Inner | None = None
    anything: Any = None


# -- options ----------------------------------------------------------------------------------------------------


KEPT = (2, True, 1.5, [1, 2], (1, 2), {"a": 1}, "a", torch.ones(3))
OPTIONS = [
    # Numbers, and lists and arrays of them, become tensors; other objects are non-tensor data.
    (Default, "value", 2, torch.tensor([2, 2, 2])),
    (Default, "value", True, torch.tensor([True] * 3)),
    (Default, "value", np.float32(1.5), torch.tensor([1.5] * 3)),
    (Default, "value", [1, 2, 3], torch.tensor([1, 2, 3])),
    (Default, "value", np.arange(3), torch.arange(3)),
    (Default, "value", "a", "a"),
    (Default, "value", ["a", "b", "c"], ["a", "b", "c"]),
    (Default, "value", Colour.RED, Colour.RED),
    # Every value stays as it is.
    *((NoCast, "value", value, value) for value in KEPT),
    (NoCast, "value", NonTensorData(1), 1),
    # Every value becomes a tensor, or the annotated class.
    (Only, "value", [1, 2, 3], torch.tensor([1, 2, 3])),
    (Only, "value", NonTensorData(2), torch.tensor([2, 2, 2])),
    # A value becomes what the annotation names.
    (Auto, "integer", torch.ones(()), 1),
    (Auto, "integer", 2.9, 2),
    (Auto, "integer", True, 1),
    (Auto, "integer", np.int16(3), 3),
    (Auto, "flag", torch.tensor([1]), True),
    (Auto, "real", 2, 2.0),
    (Auto, "either", "12", 12),
    (Auto, "text", 5, "5"),
    (Auto, "colour", "red", Colour.RED),
    (Auto, "entries", (1, 2), [1, 2]),
    (Auto, "anything", "kept", "kept"),
    (Auto, "tensor", [1.0, 2.0, 3.0], torch.tensor([1.0, 2.0, 3.0])),
    (Auto, "array", [1, 2], np.array([1, 2])),
    (Auto, "several", 3, torch.tensor([3, 3, 3])),
]


@pytest.mark.parametrize(("cls", "name", "given", "expected"), OPTIONS)
def test_options(cls, name, given, expected):
    """The options of a class choose what a value becomes, in the constructor, `set`, `update` and `replace`."""
    made = cls(**{name: given}, batch_size=[3])

    for each in (made, made.set(name, given), made.update({name: given}), made.replace(**{name: given})):
        value = getattr(each, name)
        assert type(value) is type(expected)
        if isinstance(expected, Tensor | np.ndarray):
            np.testing.assert_array_equal(value, expected)
            assert value.dtype == expected.dtype
        else:
            assert value == expected


def test_values_that_are_nodes():
    """`nocast` takes tensors and trees themselves; a row of non-tensor data is one value."""
    x, inner = torch.ones(3), Inner(torch.ones(3), batch_size=[3])

    assert NoCast(x, batch_size=[3]).value is x
    assert NoCast(inner, batch_size=[3]).value is inner
    assert Default(["a", "b", "c"], batch_size=[3])[1].value == "b"


class Named(Protocol):
    name: str


class Chat(TensorClass["nocast"]):
    role: str
    content: "str | Colour" = ""
    kind: Literal["a", "b"] = "a"
    calls: list[dict] | None = None
    parts: Sequence[str] | None = None
    named: Named | None = None


@pytest.mark.parametrize("name", ["role", "content", "kind"])
@hypothesis.given(SIZES.filter(lambda size: size and 0 not in size))
def test_lists_of_rows_with_nocast(name, size):
    """A list in a field whose annotation holds no lists is a value for each row."""
    values = np.arange(torch.Size(size).numel()).astype(str).astype(object).reshape(size)
    made = Chat(**{"role": "user", name: values.tolist()}, batch_size=size)

    assert getattr(made, name) == values.tolist()
    assert getattr(torch.cat([made, made]), name) == np.concatenate([values, values]).tolist()
    assert np.array_equal(np.array(getattr(made[0], name), dtype=object), values[0])


def test_lists_that_are_values():
    """A list in a field that may hold one stays a value, and so does any list of an instance without a batch."""
    calls, parts = [{"name": "f"}, {}], ["a", "b"]
    made = Chat("user", calls=calls, parts=parts, named=parts, batch_size=[2])

    assert made[1].calls == calls
    assert made[1].parts == parts
    assert made[1].named == parts
    assert Chat(["system", "user"]).role == ["system", "user"]
    assert NoCast([1, 2], batch_size=[2])[0].value == [1, 2]


class Dicts(TensorClass):
    meta: dict | None = None
    anything: Any = None
    tree: TensorDict | None = None


def test_dicts():
    """A dict stays a dict, except in a field that is annotated with a class of trees."""
    given = {"a": 1, "b": torch.ones(2)}
    made = Dicts(given, given, given, batch_size=[2])

    for each in (made, made.set("anything", given), made.replace(anything=given), made.update({"anything": given})):
        assert each.meta is each.anything is each[0].meta is given
        assert type(each.tree) is TensorDict
        assert each[0].tree["b"] == 1


@pytest.mark.parametrize("cls", [Default, NoCast])
def test_device_and_names(cls):
    """Values move to the device, and dimensions have the names that are given."""
    made = cls(torch.zeros(2, 3), batch_size=[2, 3], device="meta", names=["a", None])

    assert made.value.device == made.set("value", torch.ones(2, 3)).value.device == made.device == torch.device("meta")
    assert made.names == ["a", None]


# -- nested classes ---------------------------------------------------------------------------------------------


@dataclass
class PlainInner:
    y: Tensor
    note: str


@pytest.mark.parametrize(
    "given",
    [
        {"y": torch.ones(2)},
        TensorDict({"y": torch.ones(2), "note": "inner"}, [2]),
        TensorDict({"y": torch.ones(2), "note": "inner"}),
        PlainInner(torch.ones(2), "inner"),
        Inner(torch.ones(2), batch_size=[2]),
    ],
    ids=["dict", "tree", "tree without batch", "dataclass", "instance"],
)
def test_annotated_classes(given):
    """What is given for a field becomes an instance of the class that the field is annotated with."""
    made = Only(torch.zeros(2), given, batch_size=[2])

    for inner in (made.inner, made.set("inner", given).inner, made.replace(inner=given).inner):
        assert type(inner) is Inner
        assert inner.batch_size == torch.Size([2])
        assert torch.equal(inner.y, torch.ones(2))
        assert inner.note == "inner"


class Failing(TensorClass):
    y: Tensor

    def __post_init__(self):
        raise TypeError("of the class itself")


class Deep(TensorClass):
    either: Inner | Tensor | None = None
    open: Inner | TensorDict | None = None
    two: Inner | Only | None = None
    plain: Inner | PlainInner | None = None
    failing: Failing | None = None


def test_unions_with_one_class():
    """A union with one class of typed trees makes that class of dicts, trees and dataclasses."""
    for given in ({"y": torch.ones(2)}, TensorDict({"y": torch.ones(2)}), PlainInner(torch.ones(2), "n")):
        made = Deep(either=given, batch_size=[2])

        assert type(made.either) is Inner
        assert type(Deep.from_tensordict(made.to_tensordict()).either) is Inner
        assert type(Deep(batch_size=[2]).replace(either=given).either) is Inner
    assert type(Deep(either=torch.ones(2)).either) is Tensor
    rows = lazy_stack([TensorDict({"y": torch.ones(n)}) for n in (1, 2)])
    assert isinstance(Deep(either=rows, batch_size=[2]).either, Inner)


def test_unions_with_several_classes():
    """A value keeps its class where another member of the union takes it, or where two could."""
    tree = TensorDict({"y": torch.ones(2)})

    assert type(Deep(open=tree).open) is TensorDict
    assert type(Deep(open={"y": 1}).open) is TensorDict
    assert type(Deep(two=tree).two) is TensorDict
    assert type(Deep(plain=PlainInner(torch.ones(2), "n")).plain) is PlainInner
    assert type(Deep(plain=tree).plain) is Inner


def test_strings_resolve():
    """Annotations that are strings name classes of their module or function; others cast nothing."""
    made = annotated.Auto(torch.ones(()), ratio=2, later={"x": 1.0}, absent="as it is")
    outer, inner = annotated.make_local()
    # As a file gives one, without the constructor.
    read = annotated.Unmade._make({}, torch.Size([])).replace(later={"x": 1.0})

    kinds = [type(x) for x in (made.count, made.ratio, made.later, read.later)]
    assert kinds == [int, float, annotated.Later, annotated.Later]
    assert made.absent == "as it is"
    assert made.tags == []
    assert annotated.Auto.unit == "m"
    assert type(outer({"x": torch.zeros(2)}, batch_size=[2]).inner) is inner


# -- jaxtyping --------------------------------------------------------------------------------------------------


class Shaped(TensorClass):
    points: Float[Tensor, "*batch n 3"]  # noqa: F722
    mask: Bool[Tensor, "*batch n"] | None = None  # noqa: F722
    name: str = ""


@pytest.mark.parametrize("cls", [Shaped, annotated.Shaped])
@pytest.mark.parametrize(
    "wrong", [torch.zeros(4, 5, 2), torch.zeros(4, 5, 3, dtype=torch.int64), torch.zeros(4), "text"], ids=str
)
def test_jaxtyping(cls, wrong):
    """A value of another dtype, number of dimensions or size is refused, in the constructor and in edits."""
    made = cls(torch.zeros(4, 5, 3), batch_size=[4])

    assert made[0].points.shape == (5, 3)
    for call in (lambda: cls(wrong, batch_size=[4]), lambda: made.replace(points=wrong)):
        with pytest.raises(LeafMismatchError, match=rf"(?s)'{cls.__name__}.points'.*'\*batch n 3'"):
            call()


EDITS = {
    "constructor": lambda t, **values: Shaped(**{"points": t.points, "mask": t.mask, **values}, batch_size=[4]),
    "replace": lambda t, **values: t.replace(**values),
    "update": lambda t, **values: t.update(values),
    "of a stack": lambda t, **values: lazy_stack([t]).replace({k: (v,) for k, v in values.items()})[0],
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_jaxtyping_axes_agree(edit):
    """An axis has one size in all fields of an instance, also after an edit of some of them."""
    made = Shaped(torch.zeros(4, 5, 3), torch.ones(4, 5).bool(), batch_size=[4])
    points, mask = torch.zeros(4, 6, 3), torch.ones(4, 6).bool()

    assert edit(made, points=points, mask=mask).mask.shape == (4, 6)
    assert edit(made.replace(mask=None), points=points).points.shape == (4, 6, 3)
    for values in ({"points": points}, {"mask": mask}, {"points": points, "mask": torch.ones(4, 7).bool()}):
        with pytest.raises(LeafMismatchError, match=r"'Shaped.(points|mask)'(.|\n)*of shape \[4, "):
            edit(made, **values)


class Symbolic(TensorClass):
    edges: Float[Tensor, "n+1"]  # noqa: F821
    nodes: Float[Tensor, "n"] | None = None  # noqa: F821


def test_jaxtyping_expressions():
    """An axis that is an expression is checked where another field gives its variable."""
    made = Symbolic(torch.zeros(4), torch.zeros(3))

    assert made.replace(edges=torch.ones(4)).edges.sum() == 4
    assert made.replace(edges=torch.ones(6), nodes=torch.ones(5)).nodes.sum() == 5
    assert Symbolic(torch.zeros(9)).nodes is None
    for wrong in (
        lambda: Symbolic(torch.zeros(5), torch.zeros(3)),
        lambda: made.replace(edges=torch.zeros(5)),
        lambda: made.set("edges", torch.zeros(5)),
        lambda: made.replace(nodes=torch.zeros(5)),
    ):
        with pytest.raises(LeafMismatchError, match=r"(?s)'Symbolic.edges'.*'n\+1'"):
            wrong()


def test_jaxtyping_inside_checked_functions():
    """The axes of an instance are neither bound by the function that makes it nor bind those of the function."""

    @jaxtyped(typechecker=None)
    def make(n: int):
        made = Shaped(torch.zeros(4, n, 3))
        with pytest.raises(LeafMismatchError, match="Shaped.mask"):
            made.replace(mask=torch.ones(4, n + 1).bool())
        # Binds n, which nothing has bound.
        return isinstance(torch.zeros(n + 7), Float[Tensor, "n"])  # noqa: F821

    assert make(5)


def test_jaxtyping_elsewhere():
    """Annotations concern the constructor and edits of the field, and no other operation."""
    made = Shaped(torch.zeros(4, 5, 3), batch_size=[4])

    assert (made == made).points.dtype is torch.bool
    assert torch.vmap(lambda row: row.set("points", row.points + 1))(made).points.sum() == 60
    masked = made.replace(mask=torch.ones(4, 5).bool())
    assert masked.float().set("points", made.points + 1).mask.dtype is torch.float32
    assert torch.vmap(lambda row: row.set("points", row.points + 1))(masked).points.sum() == 60


# -- defaults ---------------------------------------------------------------------------------------------------


class Defaults(TensorClass):
    x: Tensor
    note: str = "plain"
    entries: list = field(default_factory=lambda: ["a", "b"])
    made: Tensor = field(default_factory=lambda: torch.zeros(2))
    fixed: str = field(default="fixed", init=False)
    late: str = field(default="late", kw_only=True)
    stamp: str = field(default_factory=lambda: "now", init=False)
    blank: Tensor | None = field(init=False)


def test_defaults():
    """Defaults are made for each instance; some fields are given by name only, or not at all."""
    one, two = (Defaults(torch.ones(2), batch_size=[2]) for _ in range(2))

    assert one.note == "plain"
    assert one.entries == ["a", "b"]
    assert one.fixed == "fixed"
    assert one.late == "late"
    assert one.stamp == "now"
    assert one.blank is None
    assert one.made is not two.made
    assert Defaults(torch.ones(2), "given", late="l").late == "l"
    with pytest.raises(TypeError, match="'fixed'"):
        Defaults(torch.ones(2), fixed="other")
    with pytest.raises(TypeError, match="positional"):
        Defaults(torch.ones(2), "a", [], torch.zeros(2), "late")


def test_what_cloudpickle_copies_of_a_class():
    """What cloudpickle copies of a class that a script defines works, and finds the class that is here."""
    inner = Inner(torch.ones(2), batch_size=[2])
    stack = lazy_stack([inner, inner])
    for read in (Inner.__dict__["note"], Only.__dict__["value"]):
        copy = pickle.loads(pickle.dumps(read))

        assert type(copy) is type(read) is Field
        assert copy._made_from == read._made_from
        assert copy.fget.__name__ == read.fget.__name__
    assert pickle.loads(pickle.dumps(Inner.__dict__["y"])).fget(inner) is inner.y
    # The one copy of the class that is here keeps its class of stacks.
    assert pickle.loads(pickle.dumps(Inner.__dict__["_stack_class"])).made is type(stack)
