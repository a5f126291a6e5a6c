"""`TensorDictModule`: reading, calling, writing, for every kind of input and output."""

import copy
import pickle
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc import NonTensorData, TensorClass, TensorDict
from tdfunc.nn import TensorDictModule, TensorDictSequential, as_tensordict_module
from tests.helpers import assert_pure


class Batch(TensorClass):
    """Fields for an input and for an output."""

    x: torch.Tensor
    y: torch.Tensor | None = None
    note: str = "plain"


Pair = namedtuple("Pair", "first second")


@pytest.fixture
def entries():
    """Entries of several kinds, with a name."""
    td = TensorDict({"x": torch.randn(4, 3), "n": {"z": torch.randn(4)}, "t": "text"}, [4], names=["rows"])
    return td.set("w", td["x"], kind=tdf.Kind.BUFFER)


def test_the_result_shares_the_entries(entries):
    """The input is not written, and its entries are shared with the result."""
    out = assert_pure(TensorDictModule(nn.Linear(3, 2), ["x"], [("n", "y")]), entries)

    assert out.paths() == [("x",), ("n", "z"), ("n", "y"), ("w",)]
    assert out["x"] is entries["x"]
    assert out["n", "z"] is entries["n", "z"]
    assert ("n", "y") not in entries


def test_the_result_keeps_metadata(entries):
    """Batch size, names, values and kinds stay."""
    out = TensorDictModule(nn.Linear(3, 2), ["x"], [("n", "y")])(entries)

    assert out.batch_size == entries.batch_size
    assert out.names == ["rows"]
    assert out["t"] == "text"
    assert out.kind("w") is tdf.Kind.BUFFER


def test_an_output_replaces_an_entry():
    """An out key that exists gets the new value, in the result alone; so does every path of a tie."""
    x = torch.zeros(2)
    td = tdf.from_module(tied()).set("x", x)
    out = TensorDictModule(lambda x, w: (x + 1, w + 1), ["x", ("a", "weight")], ["x", ("a", "weight")])(td)

    assert out["x"].tolist() == [1.0, 1.0]
    assert td["x"] is x
    assert out["b", "weight"] is out["a", "weight"]
    assert out.ties() == td.ties() != []


def tied():
    """Two layers of one weight."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    return model


@pytest.mark.parametrize(
    "output",
    [
        lambda x: (x, x + 1),
        lambda x: Pair(x, x + 1),
        lambda x: {"y": x, ("n", "z"): x + 1, "more": 0},
        lambda x: {"y": x, (("n",), "z"): x + 1},
        lambda x: OrderedDict(y=x) | {("n", "z"): x + 1},
        lambda x: TensorDict({"y": x, "n": {"z": x + 1, "w": x}}),
    ],
)
def test_outputs_by_order_and_by_key(output):
    """A tuple goes to the out keys in order, dicts and trees with all out keys by key."""
    out = TensorDictModule(output, ["x"], ["y", ("n", "z")])(TensorDict({"x": torch.zeros(2)}))

    assert out.paths() == [("x",), ("y",), ("n", "z")]
    assert out["n", "z"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (lambda: {"p": 1.0}, {"p": torch.tensor(1.0)}),
        (lambda: TensorDict({"p": torch.zeros(2)}), {"p": torch.zeros(2)}),
        (lambda: Batch(torch.zeros(2)), {"x": torch.zeros(2), "note": "plain"}),
    ],
)
def test_a_tree_as_one_output(output, expected):
    """A dict or tree without the out keys is one value."""
    out = TensorDictModule(output, [], ["y"])(TensorDict())

    assert dict(out["y"].items()).keys() == expected.keys()
    assert type(out["y"]) in (TensorDict, Batch)


@pytest.mark.parametrize("value", ["text", b"bytes", {1, 2}, NonTensorData(3), 2.5, [1, 2], ["a", "b"]])
def test_values_that_are_no_tensors(value):
    """Non-tensor data reach the function as td[key] gives them, and an output is set as any value."""
    td = TensorDict({"x": value})
    seen = []
    out = TensorDictModule(lambda x: (seen.append(x), x)[1], ["x"], ["y"])(td)

    assert repr(seen) == repr([td["x"]])
    assert repr(out["y"]) == repr(TensorDict({"y": td["x"]})["y"])


def test_an_output_of_rows_stays_rows():
    """Non-tensor data that come in a tree are not read as numbers."""
    rows = tdf.NonTensorStack.from_nested([1, 2], 1)
    out = TensorDictModule(lambda: TensorDict({"y": rows}, [2]), [], ["y"])(TensorDict({}, [2]))

    assert isinstance(out.select("y").to_dict()["y"], list)
    assert out["y"] == [1, 2]


def test_no_inputs_and_no_outputs():
    """A function may read nothing, write nothing, or return None."""
    td = TensorDict({"x": torch.zeros(2)}, [2])

    assert TensorDictModule(lambda: torch.ones(2), [], ["y"])(td)["y"].sum() == 2
    assert TensorDictModule(lambda: torch.ones(()), [], ["y"])() == 1
    assert TensorDictModule(lambda x: None, ["x"], [])(td) is td
    assert TensorDictModule(lambda x: (x, None, x), ["x"], ["_", "_", "_"])(td) is td


def test_keys_in_short_and_long_forms():
    """A str or tuple is one key; tuples are unravelled."""
    assert TensorDictModule(torch.exp, ("a", "b"), "c").in_keys == [("a", "b")]
    module = TensorDictModule(torch.exp, [("a", ("b",)), ("c",)], iter([(("d",),)]))

    assert module.in_keys == [("a", "b"), "c"]
    assert module.out_keys == ["d"]


def test_typed_trees():
    """An instance comes back as one, with the output in its field, cast as the field says."""
    batch = Batch(torch.randn(4, 3), batch_size=[4])
    out = TensorDictModule(nn.Linear(3, 2), ["x"], ["y"])(batch)
    nested = TensorDictModule(torch.neg, [("b", "x")], [("b", "y")])(TensorDict({"b": batch}, [4]))

    assert type(out) is type(nested["b"]) is Batch
    assert out.y.shape == (4, 2)
    assert batch.y is None
    assert torch.equal(nested["b"].y, -batch.x)


def test_a_lazy_stack_of_typed_trees():
    """Each tree of a lazy stack is run alone."""
    rows = [Batch(torch.ones(n), batch_size=[n]) for n in (1, 2)]
    out = TensorDictModule(torch.neg, ["x"], ["y"])(tdf.lazy_stack(rows))

    assert isinstance(out, Batch)
    assert [y.shape for y in out.y] == [(1,), (2,)]


def test_the_text_names_function_and_keys():
    """The repr shows the keys, and a function by its own repr."""
    assert "in_keys=['x'], out_keys=[('n', 'y')]" in repr(TensorDictModule(nn.Linear(1, 1), ["x"], [("n", "y")]))
    assert "Linear(in_features=1" in repr(TensorDictModule(nn.Linear(1, 1), ["x"], ["y"]))
    assert "module=<built-in method exp" in repr(TensorDictModule(torch.exp, ["x"], ["y"]))
    assert repr(increment).startswith("TensorDictModule(module=<function increment")


def test_a_training_loop_of_trees():
    """The model and the loss read trees and return trees; torch's optimizer learns."""
    inputs = torch.randn(20, 8, 3)
    dataset = TensorDict({"x": inputs, "y": inputs @ torch.tensor([[1.0], [-2.0], [0.5]])}, [20, 8])
    model = TensorDictModule(nn.Linear(3, 1), in_keys=["x"], out_keys=["prediction"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def loss_module(data):
        return nn.functional.mse_loss(data["prediction"], data["y"])

    losses = []
    for data in dataset:
        data = model(data)
        loss = loss_module(data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    assert losses[-1] < 0.05 * losses[0]


# -- decorated functions ----------------------------------------------------------------------------------------


@as_tensordict_module(in_keys="c", out_keys=["d"])
def increment(c):
    """Return c + 1."""
    return c + 1


class Counter:
    """A method on trees."""

    def __init__(self, step):
        self.step = step

    @as_tensordict_module(in_keys={"c": "x"}, out_keys="d")
    def add(self, c):
        return c + self.step


def test_decorated_functions():
    """A decorated function is a module, documented and pickled as a function is."""
    td = TensorDict({"c": torch.zeros(())})

    assert increment(td)["d"] == 1
    assert increment(torch.ones(())) == 2
    assert TensorDictSequential(increment)(td)["d"] == 1
    assert increment.__doc__ == "Return c + 1."
    assert pickle.loads(pickle.dumps(increment)) is increment
    assert copy.deepcopy(TensorDictSequential(increment))[0] is increment


def test_a_selection_of_a_decorated_function():
    """The function itself writes everything, also where a selection of it was copied."""
    td = TensorDict({"c": torch.zeros(())})
    selected = increment.select_out_keys()

    assert selected(td) is copy.deepcopy(selected)(td) is td
    assert "d" in increment(td)
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(selected)


def test_decorated_methods():
    """A decorated method is that of each instance."""
    td = TensorDict({"x": torch.zeros(())})
    one, five = Counter(1), Counter(5)

    assert [counter.add(td)["d"] for counter in (one, five, one)] == [1, 5, 1]
    assert Counter.add.in_keys == ["x"]
