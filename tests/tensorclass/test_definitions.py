"""What a class of typed trees can be: fields, inheritance, generics, mixins, `__post_init__`."""

import abc
import copy
import inspect
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from torch import Tensor

import tdfunc as tdf
from tdfunc import ImmutableError, TensorClass, TensorDict, TreeStructureError, tensorclass
from tests.helpers import assert_trees_equal
from tests.tensorclass.classes import Decorated, Foo, Inner, foo

V = TypeVar("V")

# -- construction -----------------------------------------------------------------------------------------------


class Empty(TensorClass):
    a: Tensor | None = None
    b: Any = None


def test_all_empty():
    """An instance all of whose fields are empty has its batch size, and shows the fields."""
    empty = Empty(batch_size=[3])

    assert empty.a is None
    assert empty.b is None
    assert empty.batch_size == torch.Size([3])
    assert repr(empty).splitlines()[:3] == ["Empty(", "    a=None,", "    b=None,"]


def test_operations_on_all_empty():
    """Operations on an instance all of whose fields are empty follow its class and batch size."""
    empty = Empty(batch_size=[3])

    assert type(torch.stack([empty, empty])) is Empty
    assert empty[0].batch_size == torch.Size([])
    assert torch.utils._pytree.tree_map(lambda x: x, empty).batch_size == torch.Size([3])


def test_signature_and_doc():
    """The signature and docstring of a class list its fields."""
    parameters = inspect.signature(Foo).parameters

    assert list(parameters) == ["x", "note", "inner", "extra", "batch_size", "device", "names"]
    assert parameters["note"].default == "plain"
    assert Inner.__doc__.startswith("Inner(y: torch.Tensor, *, batch_size=None")


def test_a_match_binds_fields():
    """A `match` binds fields by position and by name."""
    assert Foo.__match_args__ == ("x", "note", "inner", "extra")
    match foo():
        case Foo(x, note=note):
            assert x.shape == (4, 2)
            assert note == "plain"
        case _:
            pytest.fail("no match")


# -- inheritance ------------------------------------------------------------------------------------------------


class Uncast(TensorClass["nocast"], shadow=True):
    x: Any


def test_options_are_inherited():
    """A subclass has the options of its base or bases, beside its own."""

    class Sub(Uncast, frozen=True):
        numel: Any = 2

    assert type(Sub(1).x) is int
    assert Sub(1).numel == 2
    assert type(type(TensorClass)("Both", (Uncast, Inner), {})(y=torch.ones(2), x=1).x) is int


def test_an_inherited_option_is_turned_off():
    """A subclass can turn an option of its base off."""

    class Off(Uncast, nocast=False):
        pass

    assert isinstance(Off(1).x, Tensor)


def test_a_decorated_class_has_options():
    """The decorator gives a class its options, and returns a class of typed trees as it is."""

    @tensorclass(nocast=True)
    class Other:
        x: Any

    assert type(Other(1).x) is int
    assert tensorclass(nocast=True)(Other) is Other
    assert tensorclass(Uncast) is Uncast


class Base(TensorClass):
    a: Tensor
    b: Tensor | None = None

    def total(self):
        return self.a.sum()


class Sub(Base):
    c: Tensor | None = None
    b: Any = "sub"

    def total(self):
        return super().total() + 1


def test_fields_are_inherited():
    """Fields are inherited in order; one that is annotated again keeps its place."""
    assert [f.name for f in Sub.fields()] == ["a", "b", "c"]
    assert Sub(torch.ones(2)).b == "sub"


def test_methods_are_inherited():
    """An instance of a subclass is one of its base, whose methods it calls, and stays of its class."""
    made = Sub(torch.ones(2), batch_size=[2])

    assert made.total() == 3
    assert isinstance(made, Base)
    assert type(made[0]) is Sub


def test_a_field_that_is_annotated_again_loses_its_default():
    """A field is required if the subclass annotates it without a default."""

    class Required(Base):
        b: Tensor

    with pytest.raises(TypeError, match="'b'"):
        Required(torch.ones(2))


def test_decorated_classes_inherit_fields():
    """A decorated class has the fields of its decorated base."""

    @tensorclass
    class More(Decorated):
        more: Any = None

    assert More(torch.ones(2), more=3).more == 3


@pytest.mark.parametrize("first", [True, False])
def test_generics(first):
    """A generic class can be subscripted, called through an alias and derived from."""
    bases = (Generic[V], TensorClass) if first else (TensorClass, Generic[V])
    namespace = {"__annotations__": {"x": V}, "__orig_bases__": bases, "__module__": __name__}
    box = type(TensorClass)("Box", tuple(getattr(b, "__origin__", b) for b in bases), namespace)

    class Named(box[int]):
        name: str = "n"

    assert type(box[int](torch.zeros(3), batch_size=[3])[0]) is box
    assert Named(torch.zeros(3)).name == "n"
    assert box["str"].__origin__ is box
    assert type(Boxed[int](torch.zeros(3), batch_size=[3])[0]) is Boxed


@tensorclass
class Boxed(Generic[V]):
    x: V


class Mixin:
    """A plain base, whose instances have a dict."""

    factor = 2

    def scaled(self):
        return self * self.factor

    @property
    def flat(self):
        return self.reshape(-1)

    def positive(self):
        return self[self.x > 0]


class Mixed(Mixin, TensorClass):
    x: Tensor


@tensorclass
class MixedDecorated(Mixin):
    x: Tensor


@pytest.mark.parametrize("cls", [Mixed, MixedDecorated])
def test_mixins(cls):
    """Methods and properties of a base without `__slots__` use operations of trees; instances stay immutable."""
    made = cls(torch.tensor([[1.0, -1.0]]), batch_size=[1, 2])

    assert type(made.scaled()) is cls
    assert made.scaled().flat.positive().x.tolist() == [2]
    assert type(torch.utils._pytree.tree_map(lambda x: x, made)) is cls
    with pytest.raises(ImmutableError, match="no field 'factor'"):
        made.factor = 3


def test_abstract_classes():
    """An abstract class cannot be instantiated; its subclass can."""

    class Shape(TensorClass, abc.ABC):
        x: Tensor

        @abc.abstractmethod
        def area(self): ...

    class Square(Shape):
        def area(self):
            return self.x**2

    assert Square(torch.tensor(3.0)).area() == 9
    with pytest.raises(TypeError, match="abstract class Shape .*area"):
        Shape(torch.ones(1))


def define():
    """A class that is another one each time, and always of one name."""

    class Cell(TensorClass):
        x: Tensor

    return Cell


@pytest.fixture
def cells():
    """An instance of a class, and one of the class that was defined anew."""
    return define()(torch.zeros(2), batch_size=[2]), define()(torch.ones(2), batch_size=[2])


def test_instances_of_a_redefined_class_work(cells):
    """Instances of a class that is defined twice keep their own."""
    old, new = cells

    assert type(torch.utils._pytree.tree_map(lambda x: x, old)) is type(old)
    assert type(torch.utils._pytree.tree_map(lambda x: x, new)) is type(new)
    assert type(type(new).from_tensordict(old.to_tensordict())) is type(new)


@pytest.mark.parametrize(
    ("join", "inside"),
    [
        (torch.stack, lambda each: each),
        (tdf.lazy_stack, lambda each: each),
        (torch.cat, lambda each: tdf.lazy_stack([each])),
        (torch.stack, lambda each: TensorDict({"cell": each})),
        (tdf.lazy_stack, lambda each: TensorDict({"cell": each})),
    ],
    ids=["stack", "lazy_stack", "cat of lazy stacks", "stack of trees", "lazy_stack of trees"],
)
def test_instances_of_a_redefined_class_do_not_join(cells, join, inside):
    """Instances of a class that is defined twice do not join; the message says so."""
    with pytest.raises(
        TreeStructureError, match=r"Cell\b.*\n.*Cell\b.*\n.*Cell was defined twice.*Cell.from_tensordict"
    ):
        join([inside(each) for each in cells])


def test_classes_of_one_name_in_two_modules(cells):
    """Two classes of one name are told apart by their modules."""
    type(cells[1]).__module__ = "elsewhere"

    with pytest.raises(
        TreeStructureError, match=r"two classes are called Cell, one of .*test_definitions and one of else"
    ):
        torch.stack(cells)


def test_main_module(capfd):
    """Classes of a script name each other in string annotations."""
    code = """
from __future__ import annotations
import torch
from tdfunc import TensorClass
class A(TensorClass["autocast"]):
    n: int
    b: B | None = None
class B(TensorClass):
    x: torch.Tensor
a = A(2.0, {"x": 1.0}, batch_size=[3])
print(type(a.n).__name__, type(a.b).__name__, a[0].b.x.item())
"""
    namespace = {"__name__": "__main__"}
    exec(code, namespace)

    assert capfd.readouterr().out == "int B 1.0\n"


# -- __post_init__ ----------------------------------------------------------------------------------------------


class Counting(TensorClass):
    x: Tensor
    total: Tensor | None = None
    calls: ClassVar[list] = []

    def __post_init__(self):
        self.calls.append(self)
        return super().__post_init__().replace(total=self.x.sum(-1))


@pytest.mark.parametrize(
    "operation",
    [
        lambda made: made[0],
        lambda made: torch.stack([made, made]),
        lambda made: made.set("x", torch.zeros(3)),
        lambda made: made.replace(x=torch.zeros(3, 2)),
        lambda made: Counting.from_tensordict(made.to_tensordict()),
        lambda made: torch.utils._pytree.tree_map(lambda x: x, made),
        copy.deepcopy,
    ],
    ids=["index", "stack", "set", "replace", "from_tensordict", "pytree", "deepcopy"],
)
def test_post_init_runs_in_the_constructor_only(operation):
    """No operation, copy or conversion runs `__post_init__` again."""
    Counting.calls.clear()
    operation(Counting(torch.ones(3, 2), batch_size=[3]))

    assert len(Counting.calls) == 1


def test_what_post_init_made_stays():
    """A value that `__post_init__` made stays when another field is replaced, and in copies."""
    made = Counting(torch.ones(3, 2), batch_size=[3])

    assert made.total.tolist() == [2, 2, 2]
    assert made.replace(x=torch.zeros(3, 2)).total.tolist() == [2, 2, 2]
    assert_trees_equal(Counting.from_tensordict(made.to_tensordict()), made)
    assert_trees_equal(torch.utils._pytree.tree_map(lambda x: x, made), made)
    assert_trees_equal(copy.deepcopy(made), made)


def test_post_init_may_return_nothing():
    """`__post_init__` may check only; one that assigns or returns no instance raises."""

    class Checked(TensorClass):
        x: Tensor
        does: ClassVar[str] = "check"

        def __post_init__(self):
            if self.does == "assign":
                self.x = self.x + 1
            return self.x if self.does == "return" else None

    class Assigning(Checked):
        does = "assign"

    class Wrong(Checked):
        does = "return"

    assert Checked(torch.ones(2)).x.sum() == 2
    with pytest.raises(ImmutableError, match=r"(?s)Assigning.*return self.replace\(x=value\)"):
        Assigning(torch.ones(2))
    with pytest.raises(TypeError, match=r"(?s)Wrong.__post_init__.*expected: a Wrong, .*got: +Tensor"):
        Wrong(torch.ones(2))


# -- display and methods ----------------------------------------------------------------------------------------


def test_repr():
    """The fields of an instance print, nested and empty ones too."""
    inner = "Inner(\n        y=Tensor(shape=torch.Size([4]), device=cpu, dtype=torch.float32, is_shared=False),\n        batch_size=torch.Size([4]),\n        device=None,\n        is_shared=False)"  # noqa: E501

    assert repr(foo().with_names(["n"])) == (
        f"Foo(\n    inner={inner},\n    note=NonTensorData(data=plain, batch_size=torch.Size([4]), device=None),\n"
        "    x=Tensor(shape=torch.Size([4, 2]), device=cpu, dtype=torch.float32, is_shared=False),\n    extra=None,\n"
        "    batch_size=torch.Size([4]),\n    device=None,\n    is_shared=False,\n    names=['n'])"
    )
