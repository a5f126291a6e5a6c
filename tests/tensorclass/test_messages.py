"""The messages of mistakes: wrong definitions, arguments and values. Each row is a call, its error and its message."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tdfunc import BatchSizeError, LeafMismatchError, TensorClass, TensorDict, TreeStructureError, tensorclass
from tests.tensorclass.classes import Foo
from tests.tensorclass.test_fields import Auto, Chat, Deep, Default, Defaults, NoCast, Only


def _define(body, bases=(TensorClass,), **options):
    return lambda: type(TensorClass)("Bad", bases, {"__module__": __name__, **body}, **options)


def fields(name, kind=Tensor, bases=(TensorClass,), **options):
    """Define a class with one field."""
    return _define({"__annotations__": {name: kind}}, bases, **options)


DEFINITIONS = [
    (_define({"__init__": lambda self: None}), TypeError, "Bad.__init__"),
    (_define({"__new__": lambda cls: None}), TypeError, "Bad.__new__"),
    (fields("reshape"), AttributeError, r"Bad.*'reshape'.*Bad\(TensorClass\[.shadow.\].*TensorClass.reshape\("),
    (fields("pad"), AttributeError, "Bad.*'pad'.*shadow"),
    (fields("trees"), AttributeError, "Bad.*'trees'.*shadow"),
    (fields("_data"), AttributeError, "'_data'.*rename it.$"),
    *[
        (fields(name, shadow=True), AttributeError, f"'{name}'")
        for name in ("_bound", "_map", "__weakref__", "batch_size", "device", "names")
    ],
    (_define({"__annotations__": {"a": int, "b": int}, "a": 1}), SyntaxError, "default.* follows"),
    (_define({"__annotations__": {"a": list}, "a": []}), ValueError, "mutable default"),
    (_define({"x": 1}, (Foo,)), AttributeError, r"Bad.*'x'.*base class.*got: +1.*\(x: type"),
    (_define({}, autocats=True), TypeError, r"Bad.__init_subclass__\(\) takes no keyword"),
    (lambda: TensorClass["autocats"], TypeError, "TensorClass.*'autocats'"),
    (lambda: Foo["nocast"], TypeError, "Foo.*'nocast'"),
    (lambda: TensorClass["nocast", "autocast"], TypeError, "autocast, nocast"),
    (_define({}, (TensorClass["nocast"],), tensor_only=True), TypeError, "nocast, tensor_only"),
    (lambda: tensorclass(dataclass(type("Data", (), {}))), TypeError, "Data is a dataclass"),
    (lambda: tensorclass(nocast=True)(Foo), TypeError, "Foo.*nocast=True"),
]
ARGUMENTS = [
    (lambda: Foo(), TypeError, r"Foo\(\) missing 1 required positional argument: 'x'"),
    (lambda: Foo(1, colour=2), TypeError, r"Foo\(\) got an unexpected keyword argument 'colour'"),
    (lambda: Foo(1, x=2), TypeError, r"Foo\(\) got multiple values for argument 'x'"),
    (lambda: Foo(1, "a", None, None, [3]), TypeError, r"Foo\(\) takes from 2 to 5 positional arguments but 6"),
    (lambda: TensorClass(), TypeError, "TensorClass is a base class"),
    (lambda: TensorClass["nocast"](x=1), TypeError, r"TensorClass\['nocast'\] is a base class"),
    (lambda: TensorClass["shadow"](batch_size=[2]), TypeError, "base class"),
    (lambda: fields("reshape", shadow=True)()(batch_size=[2]), TypeError, "'reshape'"),
]
X = torch.zeros(2)
VALUES = [
    (lambda: Auto(integer=torch.ones(2)), LeafMismatchError, r"'Auto.integer'.*expected: int.*got: .*shape \[2\]"),
    (lambda: Auto(integer="x"), LeafMismatchError, "'Auto.integer'.*expected: int.*got: +'x'"),
    (lambda: Auto(tensor="x"), LeafMismatchError, "'Auto.tensor'.*expected: Tensor.*got: +'x'"),
    (lambda: Auto(colour="blue"), LeafMismatchError, "'Auto.colour'.*expected: Colour.*got: +'blue'"),
    (lambda: Only("a"), LeafMismatchError, "'Only.value'.*a tensor.*got: +str"),
    (lambda: Only(X).set("value", "a"), LeafMismatchError, "'value'.*a tensor.*got: +str"),
    (lambda: Default(torch.zeros(4), batch_size=[3]), BatchSizeError, r"'Default.value'.*\[3\].*shape \[4\]"),
    (lambda: Default(torch.zeros(()), batch_size=[3]), BatchSizeError, r"'Default.value'.*\[3\].*shape \[\]"),
    (
        lambda: Defaults(torch.ones(3), entries=["a", "b", "c"], batch_size=[3]),
        BatchSizeError,
        r"'Defaults.made'.*\[3\].*shape \[2\]",
    ),
    (lambda: Chat(["a", "b", "c"], batch_size=[2]), BatchSizeError, r"'Chat.role'.*\[2\].*shape \[3\]"),
    (lambda: Chat([["a"], ["b", "c"]], batch_size=[2, 1]), BatchSizeError, "'Chat.role': the list is ragged"),
    (lambda: NoCast(X, batch_size=[2], names=["a", "b"]), ValueError, r"1 name.*got: +\('a', 'b'\)"),
    (lambda: Only(X, {"z": 1}), TypeError, r"Inner\(\) got an unexpected keyword argument 'z'"),
    (lambda: Only(X, TensorDict({"z": 1})), ValueError, r"Inner.*\['y', 'note'\].*unknown \['z'\]"),
    (lambda: Deep(failing={"y": X}), TypeError, "of the class itself"),
    (
        lambda: Foo.from_tensordict(TensorDict({"note": "a"})),
        TreeStructureError,
        r"Foo.from_tensordict.*missing \['x'\]",
    ),
    (lambda: Foo(X, batch_size=[2]).replace(z=torch.ones(3)), KeyError, "Foo has no field 'z'"),
    (lambda: Foo.from_tensordict(TensorDict({"z": X}), safe=False), TreeStructureError, r"unknown \['z'\].*select"),
]


@pytest.mark.parametrize(("call", "error", "message"), DEFINITIONS + ARGUMENTS + VALUES)
def test_mistakes(call, error, message):
    """A mistake raises an error that names the class and the field, what was expected and what came."""
    with pytest.raises(error, match=f"(?s){message}"):
        call()
