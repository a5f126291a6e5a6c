"""Typed trees: what can be defined and what is refused, construction, immutability, conversions, operations."""

import abc
import copy
import inspect
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import ImmutableError, MissingKeyError, TensorDict, TreeStructureError
from tdfunc._tensorclass import TensorClass, tensorclass
from tests import annotated
from tests.helpers import assert_trees_equal

V = TypeVar("V")
SIZES = ["    batch_size=torch.Size([3]),", "    device=None,", "    is_shared=False)"]


class Inner(TensorClass):
    y: Tensor


class Foo(TensorClass):
    x: Tensor
    note: str = "plain"
    inner: Inner | None = None
    extra: Any = None


@tensorclass
class Decorated:
    x: Tensor
    note: str = "plain"
    inner: Inner | None = None
    extra: Any = None


def foo(cls=Foo, n=4):
    """An instance with a nested one, `n` rows."""
    return cls(torch.arange(2.0 * n).reshape(n, 2), inner=Inner(torch.arange(n), batch_size=[n]), batch_size=[n])


# -- construction -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Foo, Decorated])
def test_construction(cls):
    """A field would be lost, take another's value, or miss its default."""
    x = torch.zeros(3, 2)
    by_place, by_name = cls(x, "n", batch_size=[3]), cls(note="n", x=x, batch_size=3)

    assert_trees_equal(by_place, by_name)
    assert by_place.x is x
    assert (by_place.note, by_place.inner, cls(x).note) == ("n", None, "plain")
    assert list(by_place.keys()) == ["x", "note"]
    assert isinstance(by_place, TensorClass)
    assert cls(x, None).note is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Foo(), r"Foo\(\) missing 1 required positional argument: 'x'"),
        (lambda: Foo(1, colour=2), r"Foo\(\) got an unexpected keyword argument 'colour'"),
        (lambda: Foo(1, x=2), r"Foo\(\) got multiple values for argument 'x'"),
        (lambda: Foo(1, "a", None, None, [3]), r"Foo\(\) takes from 2 to 5 positional arguments but 6 were given"),
        (lambda: TensorClass(), "TensorClass is a base class"),
        (lambda: TensorClass["nocast"](x=1), r"TensorClass\['nocast'\] is a base class"),
    ],
)
def test_wrong_arguments(call, message):
    """A missing or misspelled field would be filled in or dropped."""
    with pytest.raises(TypeError, match=message):
        call()


def test_all_empty():
    """An instance all of whose fields are None would not keep its batch size or class."""

    class Empty(TensorClass):
        a: Tensor | None = None
        b: Any = None

    empty = Empty(batch_size=[3])

    assert (empty.a, empty.b, empty.batch_size) == (None, None, torch.Size([3]))
    assert type(torch.stack([empty, empty])) is Empty
    assert empty[0].batch_size == torch.Size([])
    assert torch.utils._pytree.tree_map(lambda x: x, empty).batch_size == torch.Size([3])
    assert repr(empty).splitlines() == ["Empty(", "    a=None,", "    b=None,", *SIZES]


def test_signature_and_doc():
    """Help in an editor or notebook would not show the fields."""
    parameters = inspect.signature(Foo).parameters

    assert list(parameters) == ["x", "note", "inner", "extra", "batch_size", "device", "names"]
    assert parameters["note"].default == "plain"
    assert Inner.__doc__.startswith("Inner(y: torch.Tensor, *, batch_size=None")
    assert Foo.__match_args__ == ("x", "note", "inner", "extra")


def test_match_statement():
    """A `match` on the class would not bind the fields."""
    match foo():
        case Foo(x, note=note):
            assert x.shape == (4, 2)
            assert note == "plain"
        case _:
            pytest.fail("no match")


# -- definitions ------------------------------------------------------------------------------------------------


def test_class_variables():
    """A class variable would become a field."""

    class Counted(TensorClass):
        x: Tensor
        unit: ClassVar[str] = "m"
        reshape_count: ClassVar[int]

    assert [f.name for f in Counted.fields()] == ["x"]
    assert Counted(torch.zeros(2)).unit == "m"
    with pytest.raises(TypeError, match="'unit'"):
        Counted(torch.zeros(2), unit="km")


def test_keyword_only():
    """`KW_ONLY` would be taken for a field, or not be obeyed."""

    class Late(TensorClass):
        x: Tensor
        _: KW_ONLY
        y: Tensor

    assert Late(1, y=2).y == 2
    with pytest.raises(TypeError, match="positional"):
        Late(1, 2)


def _define(body, bases=(TensorClass,), **options):
    return lambda: type(TensorClass)("Bad", bases, {"__module__": __name__, **body}, **options)


class WithInit:
    def __init__(self):
        pass


@pytest.mark.parametrize(
    ("define", "error", "message"),
    [
        (_define({"__annotations__": {"x": InitVar[int]}}), TypeError, "Bad: 'x' is an InitVar"),
        (_define({"__annotations__": {"a b": Tensor}}), TypeError, "Bad: 'a b' is no name of a field.*\n.*identifier"),
        (_define({"__annotations__": {"class": Tensor}}), TypeError, "Bad: 'class' is no name of a field"),
        (annotated.make_with_initvar, TypeError, "Bad: 'scale' is an InitVar"),
        (_define({"__init__": lambda self: None}), TypeError, r"Bad.__init__ would replace"),
        (_define({"__new__": lambda cls: None}), TypeError, r"Bad.__new__ would replace"),
        (_define({}, (WithInit, TensorClass)), TypeError, r"Bad inherits WithInit.__init__, which would replace"),
        (_define({"__slots__": ("a",)}), TypeError, r"instances hold fields only.\n.*__slots__ = \('a',\)"),
        (_define({"__annotations__": {"reshape": Tensor}}), AttributeError, "Bad: the field 'reshape'.*\n.*shadow"),
        (_define({"__annotations__": {"pad": Tensor}}), AttributeError, "Bad: the field 'pad'.*\n.*shadow"),
        (_define({"__annotations__": {"trees": Tensor}}), AttributeError, "Bad: the field 'trees'.*\n.*shadow"),
        (_define({"__annotations__": {"_data": Tensor}}), AttributeError, "the field '_data'.*\n.*rename it.$"),
        (_define({"__annotations__": {"_bound": Tensor}}, shadow=True), AttributeError, "the field '_bound'"),
        (_define({"__annotations__": {"_map": Tensor}}, shadow=True), AttributeError, "the field '_map'"),
        (_define({"__annotations__": {"__weakref__": Tensor}}, shadow=True), AttributeError, "field '__weakref__'"),
        (_define({"__annotations__": {"batch_size": Tensor}}, shadow=True), AttributeError, "field 'batch_size'"),
        (_define({"__annotations__": {"device": Tensor}}, shadow=True), AttributeError, "the field 'device'"),
        (_define({"__annotations__": {"names": Tensor}}, shadow=True), AttributeError, "the field 'names'"),
        (_define({"__annotations__": {"a": int, "b": int}, "a": 1}), TypeError, "'b' without a default follows 'a'"),
        (_define({"x": 1}, (Foo,)), AttributeError, r"Bad: 'x' is a field of a base class.*\n.*got: +1\n.*\(x: type"),
        (_define({}, autocats=True), TypeError, "Bad: there is no option 'autocats'.\n.*autocast, nocast"),
        (lambda: TensorClass["autocats"], TypeError, r"TensorClass\[...\]: 'autocats' is no option"),
        (lambda: Foo["nocast"], TypeError, r"Foo\[...\]: the class takes no arguments.\n.*'nocast'"),
        (lambda: TensorClass["nocast", "autocast"], TypeError, "exclude each other.\n.*autocast, nocast"),
        (_define({}, (TensorClass["nocast"],), tensor_only=True), TypeError, "nocast, tensor_only"),
        (_define({"__annotations__": {"a": list}, "a": []}), ValueError, "mutable default"),
        (lambda: tensorclass(dataclass(type("Data", (), {}))), TypeError, "Data is a dataclass"),
        (lambda: tensorclass(nocast=True)(Foo), TypeError, "Foo is a TensorClass already.\n.*nocast=True"),
    ],
)
def test_refused_definitions(define, error, message):
    """A class would be defined that cannot work as it reads."""
    with pytest.raises(error, match=message):
        define()


def test_options_are_inherited():
    """An option of a base would be lost, or could not be turned off."""

    class Base(TensorClass["nocast"], shadow=True):
        x: Any

    class Sub(Base, frozen=True):
        numel: Any = 2

    class Off(Base, nocast=False):
        pass

    @tensorclass(nocast=True)
    class Other:
        x: Any

    assert type(Sub(1).x) is int
    assert Sub(1).numel == 2
    assert isinstance(Off(1).x, Tensor)
    assert type(Other(1).x) is int
    assert tensorclass(nocast=True)(Other) is Other
    assert tensorclass(Base) is Base


def test_inheritance():
    """Fields would not be inherited in order, or one annotated again would get a method as its default."""

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

    class Required(Base):
        b: Tensor

    assert [f.name for f in Sub.fields()] == ["a", "b", "c"]
    assert (Sub(torch.ones(2)).b, Sub(torch.ones(2)).total()) == ("sub", 3)
    assert isinstance(Sub(torch.ones(2)), Base)
    assert type(Sub(torch.ones(2), batch_size=[2])[0]) is Sub
    with pytest.raises(TypeError, match="'b'"):
        Required(torch.ones(2))


def test_inherited_decorator():
    """`@tensorclass` on a subclass of a decorated class would fail."""

    @tensorclass
    class Sub(Decorated):
        more: Any = None

    assert Sub(torch.ones(2), more=3).more == 3


@pytest.mark.parametrize("first", [True, False])
def test_generics(first):
    """A generic class could not be subscripted, called through an alias, or derived from."""
    bases = (Generic[V], TensorClass) if first else (TensorClass, Generic[V])
    namespace = {"__annotations__": {"x": V}, "__orig_bases__": bases, "__module__": __name__}
    box = type(TensorClass)("Box", tuple(getattr(b, "__origin__", b) for b in bases), namespace)

    class Named(box[int]):
        name: str = "n"

    assert type(box[int](torch.zeros(3), batch_size=[3])[0]) is box
    assert Named(torch.zeros(3)).name == "n"
    assert box["str"].__origin__ is box


@tensorclass
class Boxed(Generic[V]):
    x: V


def test_generic_decorator():
    """A decorated generic class could not be subscripted."""
    assert type(Boxed[int](torch.zeros(3), batch_size=[3])[0]) is Boxed


class Mixin:
    """A plain base: its instances have a dict."""

    factor = 2

    def scaled(self):
        return self * self.factor

    @property
    def first(self):
        return self[0]


class Mixed(Mixin, TensorClass):
    x: Tensor


@tensorclass
class MixedDecorated(Mixin):
    x: Tensor


@pytest.mark.parametrize("cls", [Mixed, MixedDecorated])
def test_mixins(cls):
    """A base without `__slots__` would break construction or operations, or make instances writable."""
    made = cls(torch.ones(3), batch_size=[3])

    assert type(made.scaled()) is cls
    assert made.scaled().first.x == 2
    assert type(torch.utils._pytree.tree_map(lambda x: x, made)) is cls
    with pytest.raises(ImmutableError, match="no field 'factor'"):
        made.factor = 3


def test_abstract_classes():
    """An abstract class could be instantiated, or its subclass could not."""

    class Shape(TensorClass, abc.ABC):
        x: Tensor

        @abc.abstractmethod
        def area(self): ...

    class Square(Shape):
        def area(self):
            return self.x**2

    assert Square(torch.tensor(3.0)).area() == 9
    with pytest.raises(TypeError, match="Shape is abstract.\n.*defines area"):
        Shape(torch.ones(1))


def test_subclass_hooks():
    """Keywords of a base's `__init_subclass__` would be taken for options."""
    seen = []

    class Base(TensorClass):
        def __init_subclass__(cls, tag="", **rest):
            seen.append(tag)
            super().__init_subclass__(**rest)

    class Sub(Base, tag="here", nocast=True):
        x: Any

    assert seen == ["here"]
    assert type(Sub(1).x) is int


@tensorclass
class WithSuper:
    x: Tensor

    def __post_init__(self):
        return super().__post_init__().replace(x=self.x + 1)

    @property
    def shown(self):
        return super().__repr__()

    @classmethod
    def make(cls):
        return super().from_tensordict(TensorDict({"x": torch.zeros(2)}))

    @staticmethod
    def name():
        return __class__.__name__


def test_zero_argument_super():
    """Zero-argument `super()` in a decorated class would mean the class before decoration."""
    assert WithSuper(torch.zeros(2)).x.tolist() == [1, 1]
    assert WithSuper(torch.zeros(2)).shown.startswith("WithSuper(")
    assert type(WithSuper.make()) is WithSuper
    assert WithSuper.name() == "WithSuper"


def test_qualified_names():
    """A decorated class inside another would not be found when it is unpickled."""

    class Outer:
        @tensorclass
        class Within:
            x: Tensor

    assert Outer.Within.__qualname__ == "test_qualified_names.<locals>.Outer.Within"
    assert Decorated.__module__ == __name__


def test_redefinition():
    """A class defined again, as in a notebook cell, would break its own instances or those of the first."""

    def define():
        class Cell(TensorClass):
            x: Tensor

        return Cell

    first, second = define(), define()
    old, new = first(torch.zeros(2), batch_size=[2]), second(torch.ones(2), batch_size=[2])

    assert type(torch.utils._pytree.tree_map(lambda x: x, old)) is first
    assert type(torch.utils._pytree.tree_map(lambda x: x, new)) is second
    assert type(second.from_tensordict(old.to_tensordict())) is second
    lazy = [tdf.lazy_stack([each]) for each in (old, new)]
    inside = [TensorDict({"cell": each}) for each in (old, new)]
    for join, trees in (
        (torch.stack, [old, new]),
        (tdf.lazy_stack, [old, new]),
        (torch.cat, lazy),
        (torch.stack, inside),
        (tdf.lazy_stack, inside),
    ):
        with pytest.raises(
            TreeStructureError, match=r"Cell\b.*\n.*Cell\b.*\n.*Cell was defined twice.*Cell.from_tensordict"
        ):
            join(trees)
    second.__module__ = "elsewhere"
    with pytest.raises(
        TreeStructureError, match=r"two classes are called Cell, one of .*test_tensorclass and one of else"
    ):
        torch.stack([old, new])


def test_main_module(tmp_path, capfd):
    """Classes of a script (`__main__`) could not name each other in string annotations."""
    code = """
from __future__ import annotations
import torch
from tdfunc._tensorclass import TensorClass
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
        return self.replace(total=self.x.sum(-1))


def test_post_init_runs_in_the_constructor_only():
    """An operation would run `__post_init__` again, and what it does would compound."""
    Counting.calls.clear()
    made = Counting(torch.ones(3, 2), batch_size=[3])
    others = (made[0], made.replace(x=torch.zeros(3, 2)), torch.stack([made, made]), made.set("x", torch.zeros(3)))
    again = Counting.from_tensordict(made.to_tensordict())
    mapped = torch.utils._pytree.tree_map(lambda x: x, made)
    copied = copy.deepcopy(made)

    assert len(Counting.calls) == 1
    assert made.total.tolist() == [2, 2, 2]
    assert others[1].total.tolist() == [2, 2, 2]
    for other in (again, mapped, copied):
        assert_trees_equal(other, made)


def test_post_init_may_return_nothing():
    """A `__post_init__` that only checks would lose the instance."""

    class Checked(TensorClass):
        x: Tensor

        def __post_init__(self):
            if (self.x < 0).any():
                raise ValueError("negative")

    assert Checked(torch.ones(2)).x.sum() == 2
    with pytest.raises(ValueError, match="negative"):
        Checked(-torch.ones(2))


def test_post_init_that_assigns():
    """Someone used to mutable dataclasses would not be told what to write."""

    class Assigning(TensorClass):
        x: Tensor

        def __post_init__(self):
            self.x = self.x + 1

    with pytest.raises(ImmutableError, match=r"Assigning is immutable: \.x = .*\n.*return self.replace\(x=value\)"):
        Assigning(torch.ones(2))


def test_post_init_that_returns_something_else():
    """What the constructor returns would not be an instance."""

    class Wrong(TensorClass):
        x: Tensor

        def __post_init__(self):
            return self.x

    with pytest.raises(TypeError, match=r"Wrong.__post_init__.*\n.*expected: a Wrong, .*\n.*got: +Tensor"):
        Wrong(torch.ones(2))


# -- immutability and edits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: setattr(t, "x", 1), r"\.x = value.*\n.*new = old.replace\(x=value\)"),
        (lambda t: setattr(t, "colour", 1), r"no field 'colour'.\n.*\['x', 'note', 'inner', 'extra'\]"),
        (lambda t: setattr(t, "batch_size", [2]), r"with_batch_size\(value\)"),
        (lambda t: setattr(t, "names", ["a"]), r"with_names\(value\)"),
        (lambda t: delattr(t, "x"), r"new = old.replace\(x=None\)"),
        (lambda t: delattr(t, "device"), r"del \.device"),
        (lambda t: t.__setitem__(0, t[1]), r"td.at\[index\].set\(value\)"),
        (lambda t: t.update({"x": 1}, inplace=True), r"td = td.update\(other\)"),
    ],
)
def test_immutable(change, message):
    """An instance would change, or the error would not say what to write instead."""
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
        lambda t: t.replace(colour=1),
        lambda t: t.rename_key("x", "colour"),
        lambda t: t.at["colour"].set(1),
        lambda t: TensorDict({"t": t}, [4]).set(("t", "colour"), 1),
        lambda t: TensorDict({"t": t}, [4]).rename_key(("t", "x"), ("t", "colour")),
        lambda t: TensorDict({"t": t}, [4]).update({"t": {"colour": 1}}),
    ],
)
def test_unknown_fields(edit):
    """An edit would add a key that is no field."""
    with pytest.raises(MissingKeyError, match=r"Foo has no field 'colour'.\n.*\['x', 'note', 'inner', 'extra'\]"):
        edit(foo())


def test_edits():
    """An edit would lose the class or another field, or write to the instance."""
    made = foo()
    new = made.set("note", "new").set(("inner", "y"), torch.ones(4)).update({"extra": 2.0}).delete("x")

    assert type(new) is Foo
    assert type(new.inner) is Inner
    assert (new.note, new.x, new.inner.y.sum(), new.extra.tolist()) == ("new", None, 4, [2.0] * 4)
    assert (made.note, made.extra) == ("plain", None)
    assert new.rename_key("extra", "x").x.tolist() == [2.0] * 4
    assert made.at["x"].add(1).x.sum() == made.x.sum() + 8
    assert made.at[0].set(made[1]).x[0].tolist() == [2, 3]


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
    """None would be stored as a value, or refused where it means an empty field."""
    new = empty(foo())

    assert new.inner is None
    assert "inner" not in new
    assert new.get("inner") is None
    assert new.get("inner", 5) == 5


def test_set_in_place():
    """`set(..., inplace=True)` would not write into the storage, or write structure."""
    made = foo()
    x = made.x

    assert made.set("x", torch.zeros(4, 2), inplace=True) is made
    assert x.sum() == 0


def test_ties_survive():
    """A tree with tied leaves would lose its ties in a field, or an edit would separate them in silence."""
    shared = nn.Linear(2, 2)
    tied = tdf.from_module(nn.Sequential(shared, shared))
    made = Foo(torch.zeros(2), extra=tied)

    assert made.ties() == [[f"extra.{i}.{name}" for i in "01"] for name in ("weight", "bias")]
    new = made.set(("extra", "0", "bias"), torch.zeros(2))
    assert new.extra["1", "bias"].sum() == 0
    assert made.replace(x=torch.ones(2)).ties() == made.ties()
    assert made.replace(extra=None).ties() == []
    assert Foo.from_tensordict(made.to_tensordict()).ties() == made.ties()


# -- display and methods ----------------------------------------------------------------------------------------


def test_repr():
    """The fields of an instance, nested ones and absent ones, would not print."""
    inner = "Inner(\n        y=Tensor(shape=torch.Size([4]), device=cpu, dtype=torch.int64, is_shared=False),\n        batch_size=torch.Size([4]),\n        device=None,\n        is_shared=False)"  # noqa: E501

    assert repr(foo().with_names(["n"])) == (
        f"Foo(\n    inner={inner},\n    note=NonTensorData(data=plain, batch_size=torch.Size([4]), device=None),\n"
        "    x=Tensor(shape=torch.Size([4, 2]), device=cpu, dtype=torch.float32, is_shared=False),\n    extra=None,\n"
        "    batch_size=torch.Size([4]),\n    device=None,\n    is_shared=False,\n    names=['n'])"
    )


def test_unknown_attribute():
    """A misspelled field would read as None; an AttributeError of a property would be hidden."""

    class Broken(TensorClass):
        x: Tensor

        @property
        def bad(self):
            return self.x.no_such_thing

    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = Broken(torch.zeros(1)).bad
    with pytest.raises(AttributeError, match="colour"):
        _ = foo().colour


def test_methods_call_operations():
    """Methods and properties that use tree operations would not get instances."""

    class Data(TensorClass):
        image: Tensor
        mask: Tensor
        label: Tensor

        def select_label(self, label):
            return self[self.label == label]

        @property
        def flat(self):
            return self.reshape(-1)

        def masked(self):
            return self.image[self.mask.expand_as(self.image)].view(*self.batch_size, -1)

    mask = torch.tensor([True, False]).expand(6, 2)
    data = Data(torch.randn(6, 2), mask, torch.arange(6) % 3, batch_size=[6]).reshape(2, 3)

    assert type(data.flat) is Data
    assert data.flat.select_label(1).batch_size == torch.Size([2])
    assert torch.equal(data.masked(), data.image[..., :1])


def test_decorator_refuses_what_is_no_class():
    """Options in the decorator's parentheses, as TensorClass["nocast"] takes them, would fail deep inside."""
    with pytest.raises(TypeError, match=r"tensorclass: not a class(.|\n)*a class(.|\n)*'nocast'"):
        tensorclass("nocast")
