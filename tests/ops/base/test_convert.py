"""Values into nodes: numbers, lists, arrays, dicts and other objects, in the constructor and in edits."""

import numpy as np
import pytest
import torch
from torch import Size, nn
from torch.nn import UninitializedParameter

from tdfunc import Kind, NonTensorData, NonTensorStack, TensorDict


@pytest.fixture
def td():
    """Two leaves, one nested, in a batch of three."""
    return TensorDict({"a": torch.arange(3.0), "n": {"b": torch.zeros(3, 2)}}, [3])


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (2, torch.int64, (3,)),
        (2.5, torch.float32, (3,)),
        (True, torch.bool, (3,)),
        (1j, torch.complex64, (3,)),
        (np.float32(1), torch.float32, (3,)),
        (np.uint64(2**64 - 1), torch.uint64, (3,)),
        (np.zeros((3, 2)), torch.float64, (3, 2)),
        ([1, 2, 3], torch.int64, (3,)),
        ((1.0, 2.0, 3.0), torch.float32, (3,)),
        ([[1], [2], [3]], torch.int64, (3, 1)),
        ([torch.zeros(2)] * 3, torch.float32, (3, 2)),
        (torch.zeros(3, 4, dtype=torch.bfloat16), torch.bfloat16, (3, 4)),
        (nn.Parameter(torch.zeros(3)), torch.float32, (3,)),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda td, value: td.set("new", value),
        lambda td, value: TensorDict({"new": value}, [3]),
        lambda td, value: td.update({"new": value}),
    ],
    ids=["set", "constructor", "update"],
)
def test_values_that_become_tensors(td, value, dtype, shape, make):
    """A number, list or array has one dtype and shape, in the constructor and in edits."""
    new = make(td, value)["new"]

    assert new.dtype is dtype
    assert new.shape == Size(shape)


THING = object()


@pytest.mark.parametrize(
    "value",
    ["x", THING, [["a"], ["b", "c"], "d"], [1, "x", None]],
    ids=["text", "object", "lists of each row", "values of each row"],
)
def test_values_that_stay_values(td, value):
    """A string or another object is one value for all rows, and a list of them has one for each."""
    assert td.update({"new": value})["new"] == value


def test_non_tensor_data_is_its_value(td):
    """`NonTensorData` reads as what it holds, an array of the size of the batch as that array."""
    times = np.array(["2020-01-01", "2020-01-02"], dtype="datetime64[D]")

    assert td.update({"new": NonTensorData(3)})["new"] == 3
    assert TensorDict({"t": NonTensorData(times)}, [2])["t"] is times


def test_arrays_of_text_are_values_of_rows(td):
    """An array of text has a value for each row."""
    new = td.update({"new": np.array(["p", "q", "r"])})

    assert isinstance(new._get("new"), NonTensorStack)
    assert new[1]["new"] == "q"


def test_values_that_become_trees(td):
    """A dict, or a tree with a shorter batch, grows to the batch of its parent; a longer batch stays."""
    inner = TensorDict({"x": torch.zeros(3, 2)}, [])
    new = td.set("d", {"x": torch.zeros(3)}).set("t", inner)

    assert new["d"].batch_size == new["t"].batch_size == Size([3])
    assert inner.batch_size == Size([])
    longer = TensorDict({"x": torch.zeros(3, 2)}, [3, 2])
    assert td.set("t", longer)["t"] is longer


def test_nested_keys(td):
    """Intermediate trees are made with the batch size, and several keys may lead into one."""
    new = td.set(("p", ("q", ("r",))), 1)

    assert new["p", "q", "r"].tolist() == [1, 1, 1]
    assert new["p", "q"].batch_size == Size([3])
    made = TensorDict({("p", "q"): torch.zeros(3), "p": {"r": torch.ones(3)}, ("p", "s", "t"): torch.ones(3)}, [3])
    assert set(made.keys(True, True)) == {("p", "q"), ("p", "r"), ("p", "s", "t")}


def test_device():
    """A value is moved to the device of the tree, at any depth."""
    td = TensorDict({"a": torch.zeros(3)}, [3], device="meta")

    assert [x.device.type for x in td.set("b", torch.zeros(3)).leaves()] == ["meta", "meta"]
    assert td.set(("n", "b"), 1.0)["n"].device.type == "meta"
    assert td.update(TensorDict({"c": torch.zeros(3)}, [3]))["c"].device.type == "meta"
    assert TensorDict({"d": TensorDict({"e": torch.zeros(3)})}, [3], device="meta")["d", "e"].device.type == "meta"


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6)[::-2],
        np.arange(3, dtype=">i4"),
        np.arange(6.0).reshape(3, 2).astype(">f8")[:, ::-1],
        np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i1"), ("b", "f8")])["b"],
        np.array([(1, 2.5)], dtype=[("a", "i1"), ("b", "f8")])["b"][:0],
    ],
)
def test_arrays_of_another_layout_are_copied(array):
    """Strides and byte orders that torch lacks are copied; any other array shares its memory."""
    leaf = TensorDict({"x": array})["x"]
    plain = np.arange(6.0)

    assert leaf.tolist() == array.tolist()
    assert leaf.dtype is getattr(torch, array.dtype.name)
    assert TensorDict({"a": plain[::2]})["a"].data_ptr() == plain.ctypes.data


def test_a_tree_of_a_tree():
    """A tree made from a tree keeps batch, names and kinds; names follow another batch size."""
    tree = TensorDict({"a": torch.zeros(3, 2)}, [3], names=["t"]).set("a", torch.ones(3, 2), kind=Kind.PARAMETER)
    same = TensorDict(tree)

    assert same.batch_size == (3,)
    assert same.names == ["t"]
    assert same.kind("a") == Kind.PARAMETER
    assert TensorDict(tree, [3, 2]).names == ["t", None]
    assert TensorDict(tree, []).names == []


def test_a_tree_of_keywords():
    """Keywords are entries, alone or after those of a tree or dict."""
    tree = TensorDict({"a": torch.zeros(3, 2)}, [3])

    assert list(TensorDict(tree, b=torch.zeros(3)).keys()) == ["a", "b"]
    assert list(TensorDict(a=1, b=2).keys()) == ["a", "b"]
    assert list(TensorDict({"a": tree["a"]}, b=2).keys()) == ["a", "b"]


@pytest.mark.parametrize(("given", "value"), [((), 0), ((2,), 2)])
def test_fromkeys(given, value):
    """Each key has the one value, which is 0 unless it is given."""
    assert TensorDict.fromkeys(["a", ("n", "b")], *given)["n", "b"] == value


def test_a_batch_size_may_be_a_number():
    """A number is the size of the one batch dimension."""
    assert TensorDict({}, 3).batch_size == Size([3])


@pytest.fixture
def odd():
    """An uninitialised parameter, a meta tensor and a Parameter."""
    return TensorDict(
        {"lazy": UninitializedParameter(), "meta": torch.empty(3, device="meta"), "p": nn.Parameter(torch.ones(3))}, []
    )


def test_odd_leaves(odd):
    """Operations that do not need values take uninitialised parameters."""
    lazy = odd["lazy"]

    assert odd.select("lazy")["lazy"] is lazy
    assert odd.with_names([])["lazy"] is lazy
    assert torch.utils._pytree.tree_map(lambda x: x, odd)["lazy"] is lazy


def test_repr_of_odd_leaves(odd):
    """A leaf is shown by its class."""
    assert "lazy: UninitializedParameter(uninitialized" in repr(odd)
    assert "p: Parameter(shape=torch.Size([3])" in repr(odd)


def test_inference_tensors():
    """Operations and edits take inference tensors."""
    with torch.inference_mode():
        made = TensorDict({"a": torch.ones(2)}, [2])

        assert (made + 1)["a"].tolist() == [2, 2]
        assert made.at[0].set(5)["a"].tolist() == [5, 1]
