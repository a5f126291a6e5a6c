"""How values become nodes: options, annotations as types and strings, jaxtyping, defaults."""

import enum
import pickle
from dataclasses import dataclass, field
from typing import Any, Generic, Optional, TypeVar

import numpy as np
import pytest
import torch
from jaxtyping import Bool, Float, jaxtyped
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import BatchSizeError, LeafMismatchError, NonTensorData, TensorDict, lazy_stack
from tdfunc._tensorclass import TensorClass
from tdfunc._tensorclass.fields import Field
from tests import annotated


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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (2, torch.tensor([2, 2, 2])),
        (True, torch.tensor([True] * 3)),
        (np.float32(1.5), torch.tensor([1.5] * 3)),
        ([1, 2, 3], torch.tensor([1, 2, 3])),
        (np.arange(3), torch.arange(3)),
    ],
)
def test_numbers_become_tensors(given, expected):
    """Without options a number would stay a Python value, or not be seen with the batch."""
    value = Default(given, batch_size=[3]).value

    assert torch.equal(value, expected)
    assert value.dtype == expected.dtype


def test_other_values_stay():
    """Strings, lists of strings and other objects would be lost or changed."""
    assert Default("a", batch_size=[3]).value == "a"
    assert Default(["a", "b", "c"], batch_size=[3]).value == ["a", "b", "c"]
    assert Default(Colour.RED).value is Colour.RED
    assert Default(["a", "b", "c"], batch_size=[3])[1].value == "b"


@pytest.mark.parametrize("given", [2, True, 1.5, [1, 2], (1, 2), {"a": 1}, "a"], ids=repr)
def test_nocast_keeps(given):
    """`nocast` would make a Python value a tensor or a tree, in the constructor, `set`, `update` or `replace`."""
    made = NoCast(given, batch_size=[3])
    others = [made.set("value", given), made.update({"value": given}), made.replace(value=given), made[0]]

    for other in [made, *others]:
        assert type(other.value) is type(given)
        assert other.value == given


def test_nocast_tensors():
    """`nocast` would wrap what is a tensor or a tree already."""
    x = torch.ones(3)
    inner = Inner(x, batch_size=[3])

    assert NoCast(x, batch_size=[3]).value is x
    assert NoCast(inner, batch_size=[3]).value is inner
    assert NoCast(NonTensorData(1), batch_size=[3]).value == 1


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("integer", torch.ones(()), 1),
        ("integer", 2.9, 2),
        ("integer", True, 1),
        ("integer", np.int16(3), 3),
        ("flag", torch.tensor([1]), True),
        ("real", 2, 2.0),
        ("either", "12", 12),
        ("text", 5, "5"),
        ("colour", "red", Colour.RED),
        ("entries", (1, 2), [1, 2]),
        ("anything", "kept", "kept"),
    ],
)
def test_autocast(name, given, expected):
    """A value would not be what its annotation says, in the constructor, `set`, `update` or `replace`."""
    made = Auto(**{name: given}, batch_size=[2])
    others = [made.set(name, given), made.update({name: given}), made.replace(**{name: given}), made[0]]

    for other in [made, *others]:
        assert getattr(other, name) == expected
        assert type(getattr(other, name)) is type(expected)


def test_autocast_to_tensors_and_arrays():
    """A list would not become the annotated tensor or array."""
    made = Auto(tensor=[1.0, 2.0], array=[1, 2], batch_size=[2])

    assert torch.equal(made.tensor, torch.tensor([1.0, 2.0]))
    assert isinstance(made.array, np.ndarray)
    assert made.array.tolist() == [1, 2]
    assert torch.equal(Auto(anything=3, several=3).several, torch.tensor(3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"integer": torch.ones(2)}, r"'Auto.integer'.*\n.*expected: int\n.*got: +shape \[2\]"),
        ({"integer": "x"}, r"'Auto.integer'.*\n.*expected: int\n.*got: +'x'"),
        ({"tensor": "x"}, r"'Auto.tensor'.*\n.*expected: Tensor\n.*got: +'x'"),
        ({"colour": "blue"}, r"'Auto.colour'.*\n.*expected: Colour\n.*got: +'blue'"),
    ],
)
def test_autocast_refuses(given, message):
    """A value that cannot be cast would be kept as something else."""
    with pytest.raises(LeafMismatchError, match=message):
        Auto(**given)


def test_tensor_only():
    """`tensor_only` would keep what is no tensor, in the constructor or in an edit."""
    made = Only([1, 2, 3], batch_size=[3])

    assert torch.equal(made.value, torch.tensor([1, 2, 3]))
    assert made.inner is None
    assert Only(NonTensorData(2), batch_size=[3]).value.tolist() == [2, 2, 2]
    assert Only(torch.zeros(3), {"y": torch.zeros(3)}, batch_size=[3]).inner.note == "inner"
    with pytest.raises(LeafMismatchError, match=r"'Only.value'.*\n.*expected: a tensor, .*\n.*got: +str"):
        Only("a")
    with pytest.raises(LeafMismatchError, match=r"'value'.*\n.*expected: a tensor, .*\n.*got: +str"):
        made.set("value", "a")


# -- checks of the batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.zeros(4), nn.Parameter(torch.zeros(2, 3)), torch.zeros(())])
def test_batch_size_is_checked(value):
    """A value that does not start with the batch size would be stored."""
    shape = str(list(value.shape)).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(BatchSizeError, match=rf"'Default.value'.*\n.*expected: shape \[3\].*\n.*got: +shape {shape}"):
        Default(value, batch_size=[3])


@pytest.mark.parametrize("cls", [Default, NoCast])
def test_device_and_names(cls):
    """A value would not be put on the device, or names would be lost."""
    made = cls(torch.zeros(2, 3), batch_size=[2, 3], device="meta", names=["a", None])

    assert made.value.device == made.device == torch.device("meta")
    assert made.names == ["a", None]
    with pytest.raises(ValueError, match=r"expected: 2 names\n.*got: +\('a',\)"):
        cls(torch.zeros(2, 3), batch_size=[2, 3], names=["a"])


# -- nested classes ---------------------------------------------------------------------------------------------


@dataclass
class PlainInner:
    y: Tensor
    note: str


@dataclass
class PlainOther:
    value: int
    other: int


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
    """What is given for a field would not become the class that the field is annotated with."""
    made = Only(torch.zeros(2), given, batch_size=[2])

    for inner in (made.inner, made.set("inner", given).inner, made.replace(inner=given).inner):
        assert type(inner) is Inner
        assert inner.batch_size == torch.Size([2])
        assert torch.equal(inner.y, torch.ones(2))
        assert inner.note == "inner"


def test_annotated_classes_refuse():
    """A dict or tree with other keys would be stored where a class with fields is annotated."""
    with pytest.raises(LeafMismatchError, match=r"'Only.inner'.*\n.*\['y', 'note'\] of Inner\n.*got: +\['z'\]"):
        Only(torch.zeros(2), {"z": 1})
    with pytest.raises(LeafMismatchError, match=r"\['y', 'note'\] of Inner\n.*got: +\['value', 'other'\]"):
        Only(torch.zeros(2), PlainOther(1, 2))
    with pytest.raises(ValueError, match=r"Inner.from_tensordict.*\n.*\['y', 'note'\]\n.*unknown \['z'\]"):
        Only(torch.zeros(2), TensorDict({"z": 1}))


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
    """A union would lose its class: a dict, or what `to_tensordict` gives, would stay an open tree."""
    for given in ({"y": torch.ones(2)}, TensorDict({"y": torch.ones(2)}), PlainInner(torch.ones(2), "n")):
        made = Deep(either=given, batch_size=[2])

        assert type(made.either) is Inner
        assert type(Deep.from_tensordict(made.to_tensordict()).either) is Inner
        assert type(Deep(batch_size=[2]).replace(either=given).either) is Inner
    assert type(Deep(either=torch.ones(2)).either) is Tensor
    rows = tdf.lazy_stack([TensorDict({"y": torch.ones(n)}) for n in (1, 2)])
    assert isinstance(Deep(either=rows, batch_size=[2]).either, Inner)
    with pytest.raises(
        LeafMismatchError, match=r"'Deep.either'.*\n.*of Inner\n.*\['z'\]: unknown \['z'\], missing \['y'\]"
    ):
        Deep(either={"z": 1})


def test_unions_that_say_nothing():
    """A value would become one class of a union where another member takes it, or where there are two."""
    tree = TensorDict({"y": torch.ones(2)})

    assert type(Deep(open=tree).open) is TensorDict
    assert type(Deep(open={"y": 1}).open) is TensorDict
    assert type(Deep(two=tree).two) is TensorDict
    assert type(Deep(plain=PlainInner(torch.ones(2), "n")).plain) is PlainInner
    assert type(Deep(plain=tree).plain) is Inner


def test_errors_of_nested_classes():
    """A TypeError of a nested class would be taken for keys that do not fit, or such keys for anything else."""
    with pytest.raises(TypeError, match="of the class itself"):
        Deep(failing={"y": torch.ones(2)})
    for key in ("batch_size", ("y", "z")):
        with pytest.raises(
            LeafMismatchError, match=r"'Deep.failing'.*\n.*\['y'\] of Failing\n.*: unknown \[.*\], missing \[\]"
        ):
            Deep(failing={"y": torch.ones(2), key: 1})


V = TypeVar("V")
W = TypeVar("W")


class Generics(TensorClass["autocast"], Generic[V, W]):
    first: V
    second: W | None = None
    several: Optional[list[V]] = None  # noqa: UP045


class Half(Generics[int, W], Generic[W]):
    third: W | None = None


class Whole(Half[str]):
    pass


class Box(TensorClass, Generic[V]):
    inner: V


class InnerBox(Box[Inner]):
    pass


def test_type_arguments():
    """A class would not know what the type variables of its bases are, and cast nothing."""
    made = Whole("3", 2, (1, 2), 5)

    assert [made.first, made.second, made.several, made.third] == [3, "2", [1, 2], "5"]
    assert [type(x) for x in (Half("3", 2.5).first, Half("3", "2").second)] == [int, str]
    assert Generics("3").first == "3"
    assert type(InnerBox({"y": torch.ones(2)}).inner) is Inner
    assert type(Box({"y": torch.ones(2)}).inner) is TensorDict


# -- strings as annotations -------------------------------------------------------------------------------------


def test_strings_resolve():
    """Under `from __future__ import annotations` options and nested classes would do nothing."""
    made = annotated.Auto(torch.ones(()), ratio=2, later={"x": 1.0}, absent="as it is")

    assert type(made.count) is int
    assert type(made.ratio) is float
    assert type(made.later) is annotated.Later
    assert made.absent == "as it is"
    assert annotated.Auto.unit == "m"
    assert made.tags == []


def test_strings_resolve_in_functions():
    """Classes of one function would not see each other."""
    outer, inner = annotated.make_local()

    assert type(outer({"x": torch.zeros(2)}, batch_size=[2]).inner) is inner


# -- jaxtyping --------------------------------------------------------------------------------------------------


class Shaped(TensorClass):
    points: Float[Tensor, "*batch n 3"]  # noqa: F722
    mask: Bool[Tensor, "*batch n"] | None = None  # noqa: F722
    name: str = ""


@pytest.mark.parametrize("cls", [Shaped, annotated.Shaped])
def test_jaxtyping(cls):
    """A value of another dtype, number of dimensions or size would pass its jaxtyping annotation."""
    made = cls(torch.zeros(4, 5, 3), batch_size=[4])

    assert made[0].points.shape == (5, 3)
    for wrong in (torch.zeros(4, 5, 2), torch.zeros(4, 5, 3, dtype=torch.int64), torch.zeros(4)):
        got = rf"got: +{wrong.dtype} of shape \[{', '.join(map(str, wrong.shape))}\]"
        with pytest.raises(LeafMismatchError, match=rf"'{cls.__name__}.points'.*\n.*'\*batch n 3'\]\n.*{got}"):
            cls(wrong, batch_size=[4])
        with pytest.raises(LeafMismatchError, match=got):
            made.replace(points=wrong)
    with pytest.raises(LeafMismatchError, match=r"'Shaped.points'.*\n.*n 3'\]\n.*got: +NonTensorData"):
        cls("text", batch_size=[4])


def test_jaxtyping_axes_agree():
    """An axis of one name could have two sizes in one instance."""
    assert Shaped(torch.zeros(4, 5, 3), torch.ones(4, 5).bool(), batch_size=[4]).mask.all()
    with pytest.raises(
        LeafMismatchError, match=r"'Shaped.mask'.*\n.*\n.*shape \[4, 6\]\n.*'points' has shape \[4, 5, 3\]"
    ):
        Shaped(torch.zeros(4, 5, 3), torch.ones(4, 6).bool(), batch_size=[4])


EDITS = {
    "replace": lambda t, **values: t.replace(**values),
    "update": lambda t, **values: t.update(values),
    "of a stack": lambda t, **values: tdf.lazy_stack([t]).replace({k: (v,) for k, v in values.items()})[0],
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_jaxtyping_axes_agree_after_edits(edit):
    """An edit could give an axis two sizes: among its values, or beside the fields that stay."""
    made = Shaped(torch.zeros(4, 5, 3), torch.ones(4, 5).bool(), batch_size=[4])
    points, mask = torch.zeros(4, 6, 3), torch.ones(4, 6).bool()

    assert edit(made, points=points, mask=mask).mask.shape == (4, 6)
    assert edit(edit(made, mask=None), points=points).points is points
    with pytest.raises(
        LeafMismatchError, match=r"'Shaped.points'.*\n.*n 3'\]\n.*\[4, 6, 3\]\n.*'mask' has shape \[4, 5\]"
    ):
        edit(made, points=points)
    with pytest.raises(
        LeafMismatchError, match=r"'Shaped.mask'.*\n.*n'\]\n.*\[4, 7\]\n.*'points' has shape \[4, 6, 3\]"
    ):
        edit(made, points=points, mask=torch.ones(4, 7).bool())
    with pytest.raises(LeafMismatchError, match=r"'Shaped.mask'.*\n.*\n.*\[4, 6\]\n.*'points' has shape \[4, 5, 3\]"):
        made.set("mask", mask)


class Tied(TensorClass):
    w: Float[Tensor, "n"]  # noqa: F821
    again: Float[Tensor, "n"]  # noqa: F821
    other: Float[Tensor, "n"] | None = None  # noqa: F821


def test_jaxtyping_with_ties():
    """A tied leaf could not get another size, since its other paths get it a step later."""
    w = nn.Parameter(torch.zeros(3))
    module = nn.Module()
    module.w = module.again = w
    tied = Tied.from_tensordict(tdf.from_module(module))

    assert tied.ties() == [["w", "again"]]
    for new in (tied.set("w", torch.ones(4)), tied.replace(again=torch.ones(4)), tied.update({"w": torch.ones(4)})):
        assert new.w is new.again
        assert new.w.shape == (4,)
    both = tied.replace(other=torch.ones(3)).replace(w=torch.ones(4), other=torch.zeros(4))
    assert both.again.shape == both.other.shape == (4,)
    with pytest.raises(LeafMismatchError, match=r"'Tied.w'.*\n.*\n.*\[4\]\n.*'other' has shape \[3\]"):
        tied.replace(other=torch.ones(3)).set("w", torch.ones(4))
    with pytest.raises(tdf.TieError, match=r"'w' and 'again' different tensors"):
        tied.replace(w=torch.ones(4), again=torch.zeros(4))


class Symbolic(TensorClass):
    edges: Float[Tensor, "n+1"]  # noqa: F821
    nodes: Float[Tensor, "n"] | None = None  # noqa: F821


def test_jaxtyping_expressions():
    """An axis that is an expression could not be checked, or would raise an error of jaxtyping."""
    made = Symbolic(torch.zeros(4), torch.zeros(3))

    assert made.replace(edges=torch.ones(4)).edges.sum() == 4
    assert made.replace(edges=torch.ones(6), nodes=torch.ones(5)).nodes.sum() == 5
    # No field says what n is.
    assert Symbolic(torch.zeros(9)).nodes is None
    for wrong in (
        lambda: Symbolic(torch.zeros(5), torch.zeros(3)),
        lambda: made.replace(edges=torch.zeros(5)),
        lambda: made.set("edges", torch.zeros(5)),
    ):
        with pytest.raises(
            LeafMismatchError, match=r"'Symbolic.edges'.*\n.*'n\+1'\]\n.*\[5\]\n.*'nodes' has shape \[3\]"
        ):
            wrong()
    with pytest.raises(LeafMismatchError, match=r"'Symbolic.edges'.*\n.*'n\+1'\]\n.*\[4\]\n.*'nodes' has shape \[5\]"):
        made.replace(nodes=torch.zeros(5))


def test_jaxtyping_inside_checked_functions():
    """The axes of an instance would be those of the function that makes it, or become those."""

    @jaxtyped(typechecker=None)
    def make(n: int):
        made = Shaped(torch.zeros(4, n, 3))
        with pytest.raises(LeafMismatchError, match="Shaped.mask"):
            made.replace(mask=torch.ones(4, n + 1).bool())
        # Binds n, which nothing has bound.
        return isinstance(torch.zeros(n + 7), Float[Tensor, "n"])  # noqa: F821

    assert make(5)


def test_jaxtyping_elsewhere():
    """Operations would be held to annotations, which speak of the constructor."""
    made = Shaped(torch.zeros(4, 5, 3), batch_size=[4])

    assert (made == made).points.dtype is torch.bool
    assert torch.vmap(lambda row: row.set("points", row.points + 1))(made).points.sum() == 60
    masked = made.replace(mask=torch.ones(4, 5).bool())
    # A field whose dtype an operation has changed is no matter of an edit of others.
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


def test_defaults():
    """A default would be missing, shared between instances, or given where it cannot be."""
    one, two = (Defaults(torch.ones(2), batch_size=[2]) for _ in range(2))

    assert (one.note, one.entries, one.fixed, one.late) == ("plain", ["a", "b"], "fixed", "late")
    assert one.made is not two.made
    assert Defaults(torch.ones(2), "given", late="l").late == "l"
    with pytest.raises(TypeError, match="'fixed'"):
        Defaults(torch.ones(2), fixed="other")
    with pytest.raises(TypeError, match="positional"):
        Defaults(torch.ones(2), "a", [], torch.zeros(2), "late")


def test_default_that_does_not_fit():
    """A default would escape the check of the batch size."""
    with pytest.raises(BatchSizeError, match=r"'Defaults.made'.*\n.*\[3\].*\n.*shape \[2\]"):
        Defaults(torch.ones(3), entries=["a", "b", "c"], batch_size=[3])


def test_what_cloudpickle_copies_of_a_class():
    """A class that a script defines could not be sent to Ray, or would come back with other stacks than it had."""
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
