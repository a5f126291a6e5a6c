"""`TensorClassModuleBase`: typed modules, alone and among modules of trees."""

from typing import AnyStr, Generic

import pytest
import torch
from torch import Tensor, nn

import tdfunc as tdf
from tdfunc import TensorClass, TensorDict
from tdfunc.nn import TensorClassModuleBase, TensorDictModule, TensorDictSequential
from tests.helpers import assert_trees_equal


class Inner(TensorClass):
    """A nested field."""

    a: Tensor


class Question(TensorClass):
    """What the module takes."""

    x: Tensor
    inner: Inner
    weight: Tensor | None = None


class Answer(TensorClass):
    """What the module returns."""

    y: Tensor
    inner: Inner


class Layer(TensorClassModuleBase[Question, Answer], Generic[AnyStr]):
    """A layer of typed trees, which is generic itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, question):
        y = self.linear(question.x)
        return Answer(y, Inner(question.inner.a + 1, batch_size=y.shape[:1]), batch_size=y.shape[:1])


class Deeper(Layer):
    """It takes and returns what its base does."""


@pytest.mark.parametrize("cls", [Layer, Deeper])
def test_a_typed_module_has_the_classes_that_it_names(cls):
    """The classes of the annotation are attributes, also of a class that is derived."""
    assert cls.input_type is Question
    assert cls.output_type is Answer


def test_a_typed_module():
    """It is a module of torch."""
    layer = Layer()
    question = Question(torch.randn(4, 3), Inner(torch.zeros(4), batch_size=[4]), batch_size=[4])

    assert torch.equal(layer(question).y, layer.linear(question.x))
    apply, params, _ = tdf.functional(layer)
    assert_trees_equal(apply(params, question), layer(question))


def test_keys_of_a_typed_module():
    """Its fields are the keys that it reads and adds, and its weights those of the layer."""
    module = Layer().as_td_module()

    assert module.in_keys == ["x", ("inner", "a"), "weight"]
    assert module.out_keys == ["y", ("inner", "a")]
    assert list(module.state_dict()) == ["tc_module.linear.weight", "tc_module.linear.bias"]


def test_a_typed_module_on_open_trees():
    """Its fields are read from the tree, and those of the result are added."""
    layer = Layer()
    module = layer.as_td_module()
    td = TensorDict({"x": torch.randn(4, 3), "inner": {"a": torch.zeros(4)}, "other": torch.ones(4)}, [4])
    out = TensorDictSequential(module, TensorDictModule(torch.neg, ["y"], ["z"]))(td)

    assert {*out.keys()} == {"x", "inner", "other", "y", "z"}
    assert torch.equal(out["z"], -layer.linear(td["x"]))
    assert out["inner", "a"].sum() == 4
    assert td["inner", "a"].sum() == 0
    assert module.select_out_keys("y")(td)["inner", "a"].sum() == 0


def test_a_typed_module_on_a_lazy_stack():
    """It runs for each tree."""
    module = Layer().as_td_module()
    rows = [TensorDict({"x": torch.randn(n, 3), "inner": {"a": torch.zeros(n)}}, [n]) for n in (1, 3)]

    assert_trees_equal(list(module(tdf.lazy_stack(rows)).trees), [module(row) for row in rows])


def test_tensors_in_place_of_a_class():
    """A module may go from or to tensors."""

    class Sum(TensorClassModuleBase[Question, Tensor]):
        def forward(self, question):
            return question.x.sum()

    assert Sum()(Question(torch.ones(2), Inner(torch.ones(2)))) == 2
