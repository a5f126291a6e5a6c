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


def described(value):
    """Type, dtype and content of any value."""
    return [type(value), getattr(value, "dtype", None), value.tolist() if hasattr(value, "tolist") else value]


@pytest.mark.parametrize(("cls", "name", "given", "expected"), OPTIONS)
def test_options(cls, name, given, expected):
    """The options of a class choose what a value becomes, in the constructor, `set`, `update` and `replace`."""
    made = cls(**{name: given}, batch_size=[3])
    ways = {
        "constructor": made,
        "set": made.set(name, given),
        "update": made.update({name: given}),
        "replace": made.replace(**{name: given}),
    }

    found = {way: described(getattr(each, name)) for way, each in ways.items()}
    assert found == dict.fromkeys(ways, described(expected))


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


DICT = {"a": 1, "b": torch.ones(2)}


@pytest.mark.parametrize(
    "edit",
    [
        lambda made: made,
        lambda made: made.set("anything", DICT),
        lambda made: made.replace(anything=DICT),
        lambda made: made.update({"anything": DICT}),
    ],
    ids=["constructor", "set", "replace", "update"],
)
def test_dicts(edit):
    """A dict stays a dict, except in a field that is annotated with a class of trees."""
    made = edit(Dicts(DICT, DICT, DICT, batch_size=[2]))

    assert made.meta is made.anything is made[0].meta is DICT
    assert type(made.tree) is TensorDict
    assert made[0].tree["b"] == 1


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
@pytest.mark.parametrize(
    "edit",
    [lambda made, _: made, lambda made, x: made.set("inner", x), lambda made, x: made.replace(inner=x)],
    ids=["constructor", "set", "replace"],
)
def test_annotated_classes(given, edit):
    """What is given for a field becomes an instance of the class that the field is annotated with."""
    inner = edit(Only(torch.zeros(2), given, batch_size=[2]), given).inner

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


@pytest.mark.parametrize(
    "given",
    [{"y": torch.ones(2)}, TensorDict({"y": torch.ones(2)}), PlainInner(torch.ones(2), "n")],
    ids=["dict", "tree", "dataclass"],
)
def test_unions_with_one_class(given):
    """A union with one class of typed trees makes that class of dicts, trees and dataclasses."""
    made = Deep(either=given, batch_size=[2])

    assert type(made.either) is Inner
    assert type(Deep.from_tensordict(made.to_tensordict()).either) is Inner
    assert type(Deep(batch_size=[2]).replace(either=given).either) is Inner


def test_tensors_in_unions_with_one_class():
    """A union with one class of typed trees and tensors leaves a tensor as it is."""
    assert type(Deep(either=torch.ones(2)).either) is Tensor


def test_lazy_stacks_in_unions_with_one_class():
    """A union with one class of typed trees makes a stack of that class of a lazy stack."""
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
def test_rows_of_jaxtyping_have_fewer_dimensions(cls):
    """An annotation that begins with the batch holds for a row."""
    assert cls(torch.zeros(4, 5, 3), batch_size=[4])[0].points.shape == (5, 3)


@pytest.mark.parametrize("cls", [Shaped, annotated.Shaped])
@pytest.mark.parametrize(
    "wrong", [torch.zeros(4, 5, 2), torch.zeros(4, 5, 3, dtype=torch.int64), torch.zeros(4), "text"], ids=str
)
@pytest.mark.parametrize(
    "make",
    [
        lambda cls, points: cls(points, batch_size=[4]),
        lambda cls, points: cls(torch.zeros(4, 5, 3), batch_size=[4]).replace(points=points),
    ],
    ids=["constructor", "replace"],
)
def test_jaxtyping(cls, wrong, make):
    """A value of another dtype, number of dimensions or size is refused, in the constructor and in edits."""
    with pytest.raises(LeafMismatchError, match=rf"(?s)'{cls.__name__}.points'.*'\*batch n 3'"):
        make(cls, wrong)


EDITS = {
    "constructor": lambda t, **values: Shaped(**{"points": t.points, "mask": t.mask, **values}, batch_size=[4]),
    "replace": lambda t, **values: t.replace(**values),
    "update": lambda t, **values: t.update(values),
    "of a stack": lambda t, **values: lazy_stack([t]).replace({k: (v,) for k, v in values.items()})[0],
}


POINTS, MASK = torch.zeros(4, 6, 3), torch.ones(4, 6).bool()


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_jaxtyping_axes_change_together(edit):
    """An edit of all fields that have an axis, or of the only one with a value, may give it another size."""
    made = Shaped(torch.zeros(4, 5, 3), torch.ones(4, 5).bool(), batch_size=[4])

    assert edit(made, points=POINTS, mask=MASK).mask.shape == (4, 6)
    assert edit(made.replace(mask=None), points=POINTS).points.shape == (4, 6, 3)


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize(
    "values",
    [{"points": POINTS}, {"mask": MASK}, {"points": POINTS, "mask": torch.ones(4, 7).bool()}],
    ids=["points", "mask", "both"],
)
def test_jaxtyping_axes_agree(edit, values):
    """An axis has one size in all fields of an instance, also after an edit of some of them."""
    made = Shaped(torch.zeros(4, 5, 3), torch.ones(4, 5).bool(), batch_size=[4])

    with pytest.raises(LeafMismatchError, match=r"'Shaped.(points|mask)'(.|\n)*of shape \[4, "):
        edit(made, **values)


class Symbolic(TensorClass):
    edges: Float[Tensor, "n+1"]  # noqa: F821
    nodes: Float[Tensor, "n"] | None = None  # noqa: F821


def symbolic():
    """An instance whose fields agree."""
    return Symbolic(torch.zeros(4), torch.zeros(3))


def test_jaxtyping_expressions():
    """An axis that is an expression may have any size that agrees with its variable, or without it."""
    assert symbolic().replace(edges=torch.ones(4)).edges.sum() == 4
    assert symbolic().replace(edges=torch.ones(6), nodes=torch.ones(5)).nodes.sum() == 5
    assert Symbolic(torch.zeros(9)).nodes is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Symbolic(torch.zeros(5), torch.zeros(3)),
        lambda: symbolic().replace(edges=torch.zeros(5)),
        lambda: symbolic().set("edges", torch.zeros(5)),
        lambda: symbolic().replace(nodes=torch.zeros(5)),
    ],
    ids=["constructor", "replace edges", "set edges", "replace nodes"],
)
def test_jaxtyping_expressions_are_checked(wrong):
    """An axis that is an expression is checked where another field gives its variable."""
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
    """A field without a value has its default."""
    made = Defaults(torch.ones(2), batch_size=[2])

    found = {name: getattr(made, name) for name in ("note", "entries", "fixed", "late", "stamp", "blank")}
    assert found == {
        "note": "plain",
        "entries": ["a", "b"],
        "fixed": "fixed",
        "late": "late",
        "stamp": "now",
        "blank": None,
    }


def test_defaults_are_made_for_each_instance():
    """A `default_factory` is called for each instance."""
    one, two = (Defaults(torch.ones(2), batch_size=[2]) for _ in range(2))

    assert one.made is not two.made


def test_some_fields_are_given_by_name_only():
    """A field with `kw_only` is taken by name and not by position."""
    assert Defaults(torch.ones(2), "given", late="l").late == "l"
    with pytest.raises(TypeError, match="positional"):
        Defaults(torch.ones(2), "a", [], torch.zeros(2), "late")


def test_some_fields_are_not_given():
    """A field with `init=False` is no argument."""
    with pytest.raises(TypeError, match="'fixed'"):
        Defaults(torch.ones(2), fixed="other")


@pytest.mark.parametrize("read", [Inner.__dict__["note"], Only.__dict__["value"]], ids=["note", "value"])
def test_cloudpickle_copies_fields(read):
    """A field of a class that a script defines is copied as a field that reads the same."""
    copy = pickle.loads(pickle.dumps(read))

    assert type(copy) is type(read) is Field
    assert copy._made_from == read._made_from
    assert copy.fget.__name__ == read.fget.__name__


def test_what_cloudpickle_copies_of_a_class():
    """What cloudpickle copies of a class that a script defines works, and finds the class that is here."""
    inner = Inner(torch.ones(2), batch_size=[2])
    stack = lazy_stack([inner, inner])

    assert pickle.loads(pickle.dumps(Inner.__dict__["y"])).fget(inner) is inner.y
    # The one copy of the class that is here keeps its class of stacks.
    assert pickle.loads(pickle.dumps(Inner.__dict__["_stack_class"])).made is type(stack)
