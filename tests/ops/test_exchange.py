"""Trees from and to other objects, and trees made from trees."""

import dataclasses
import warnings
from collections import namedtuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Size

from tdfunc import (
    BatchSizeError,
    Kind,
    LeafMismatchError,
    MissingKeyError,
    TensorClass,
    TensorDict,
    TieError,
    UnsupportedError,
)
from tdfunc._lazystack.stack import lazy_stack
from tests.helpers import TiedLM, TinyMLP, assert_pure, assert_trees_equal
from tests.incumbent import Incumbent, tensordict


class Point(TensorClass):
    x: torch.Tensor
    note: str | None = None


@dataclasses.dataclass
class Plain:
    """A dataclass with a nested dict and an empty field."""

    a: torch.Tensor
    inner: dict
    absent: int | None = None


Pair = namedtuple("Pair", ["left", "right"])
A, B = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2])


@pytest.fixture
def td():
    """A batch of two with a nested tree, one string for each row, and names."""
    return TensorDict({"a": A, "n": {"b": B, "s": ["p", "qq"]}}, [2], names=["rows"])


# -- from -------------------------------------------------------------------------------------------------------


def test_from_any():
    """A kind of object would keep its class inside the tree, or lose a field."""
    expected = TensorDict({"a": A, "inner": {"left": A, "right": {"b": B}}}, [2])
    nested = Pair(A, {"b": B})

    assert_trees_equal(TensorDict.from_any(Plain(A, nested), batch_size=[2]), expected)
    assert_trees_equal(TensorDict.from_dataclass(Plain(A, nested), auto_batch_size=True, batch_dims=1), expected)
    assert_trees_equal(TensorDict.from_any({"a": A, "inner": nested}, batch_size=[2]), expected)
    assert_trees_equal(TensorDict.from_namedtuple(nested, batch_size=[2]), expected["inner"])
    assert_trees_equal(TensorDict.from_any(expected), expected)
    assert type(TensorDict.from_any({"p": Point(A, batch_size=[2])})["p"]) is Point


def test_from_dict():
    """Options would not reach the tree."""
    found = TensorDict.from_dict({("n", "b"): B}, batch_size=[2], device="cpu", names=["r"])

    assert (found.batch_size, found.device, found.names) == ((2,), torch.device("cpu"), ["r"])
    assert TensorDict.from_dict({"a": A}).batch_size == ()


def test_auto_batch_size():
    """A tree would get a batch size that an entry does not have, or a shorter one than it could."""
    source = {"a": torch.zeros(2, 3, 4), "n": {"b": torch.zeros(2, 3, 5), "s": "x", "e": {}}, "w": ["p", "q"]}
    found = TensorDict.from_dict(source, auto_batch_size=True)
    no_words = TensorDict.from_dict({"a": source["a"], "n": source["n"]}, auto_batch_size=True, names=["r", "c"])
    bare = TensorDict.from_dict({"s": "x", "e": {}}, auto_batch_size=True)

    assert (found.batch_size, found["n"].batch_size) == ((2,), (2, 3, 5))
    assert (no_words.batch_size, no_words.names) == ((2, 3), ["r", "c"])
    assert found["n", "e"].batch_size == found["n"]._get("s").shape == (2, 3, 5)
    assert (bare.batch_size, bare["e"].batch_size) == ((), ())
    assert TensorDict.from_dict({"a": A}, auto_batch_size=True, batch_dims=1).batch_size == (2,)
    # Alone it would be ignored in silence.
    assert TensorDict.from_dict({"a": A}, batch_dims=1).batch_size == (2,)
    assert TensorDict.from_dict({"a": A}, batch_dims=1, batch_size=[]).batch_size == ()


def test_records_there_and_back():
    """A column of records would change its dtype, shape or place."""
    dtype = [("name", "U4"), ("flag", "?"), ("xy", "f4", 2), ("inner", [("age", "i8")])]
    records = np.array([("Rex", True, (1, 2), (9,)), ("Fido", False, (3, 4), (3,))], dtype)
    found = TensorDict.from_struct_array(records)
    back = found.to_struct_array()

    assert found.batch_size == (2,)
    assert found["name"] == ["Rex", "Fido"]
    assert found["inner", "age"].tolist() == [9, 3]
    assert back.dtype == records.dtype
    assert (back == records).all()
    assert TensorDict.from_struct_array(records, auto_batch_size=True)["xy"].tolist() == [[1, 2], [3, 4]]
    assert TensorDict({"s": [{1}, {2}]}, [2]).to_struct_array()["s"].tolist() == [{1}, {2}]
    assert found[0].to_struct_array()["xy"].tolist() == [1, 2]


def test_a_record_without_a_batch():
    """A number would come back from a record as a leaf of one element."""
    td = TensorDict({"a": 1.5, "nested": {"b": torch.arange(3), "c": torch.tensor(True)}})

    assert_trees_equal(TensorDict.from_struct_array(td.to_struct_array()), td)


# -- to ---------------------------------------------------------------------------------------------------------


def test_to_numpy(td):
    """A leaf would not become an array, or one that requires a gradient raise."""
    found = assert_pure(lambda t: t.apply(lambda x: x.double().requires_grad_()).numpy(), td)

    assert found["a"].tolist() == A.tolist()
    assert isinstance(found["n"]["b"], np.ndarray)
    assert found["n"]["s"] == ["p", "qq"]
    assert np.shares_memory(td.numpy()["a"], td["a"].numpy())


def test_to_lists(td):
    """A row would have the values of another, or a tensor stay where numbers were asked for."""
    found = td.tolist(convert_tensors=True)

    assert found == [{"a": [0, 1, 2], "n": {"b": 1, "s": "p"}}, {"a": [3, 4, 5], "n": {"b": 2, "s": "qq"}}]
    assert torch.equal(td.tolist()[1]["a"], A[1])
    ragged = lazy_stack([TensorDict({"x": torch.arange(n)}, [n]) for n in (1, 2)])
    assert TensorDict({"r": ragged}, [2]).tolist(convert_tensors=True) == [
        {"r": [{"x": 0}]}, {"r": [{"x": 0}, {"x": 1}]},
    ]  # fmt: skip


def test_own_form_as_list():
    """A class of trees with a form of its own would lose it inside another tree."""

    class Coded(TensorClass):
        x: torch.Tensor

        def tolist(self, *, convert_tensors=False):
            return f"code {self.x.item() if convert_tensors else self.x}"

    tree = TensorDict({"c": Coded(torch.tensor(3)), "p": Point(torch.tensor(2))})

    assert tree.tolist(convert_tensors=True) == {"c": "code 3", "p": {"x": 2}}


def test_to_namedtuple(td):
    """A nested tree would stay a dict, or the class that was asked for not be used."""
    found = td.to_namedtuple()

    assert found.n.b is td["n", "b"]
    assert found.n.s == ["p", "qq"]
    assert isinstance(td.select("a").rename_key("a", "left").set("right", B).to_namedtuple(Pair), Pair)


def test_to_tensordict(td):
    """A typed tree inside would keep its class, or leaves, ties or kinds be shared or lost."""
    leaf = torch.ones(2)
    tree = TensorDict({"p": Point(A, batch_size=[2]), "a": leaf, "n": {"b": leaf}}, [2], names=["r"])
    tree = tree.set("k", B, kind=Kind.BUFFER)
    found = tree.to_tensordict()

    assert type(found["p"]) is TensorDict
    assert found["p", "x"].data_ptr() != A.data_ptr()
    assert found.names == ["r"]
    assert found.kind("k") is Kind.BUFFER
    assert_trees_equal(td.to_tensordict(), td)
    lazy = lazy_stack([Point(A, batch_size=[2]), Point(A[:1], batch_size=[1])])
    assert [type(tree) for tree in TensorDict({"l": lazy}, [2]).to_tensordict()["l"].trees] == [TensorDict] * 2


# -- trees made from a tree -------------------------------------------------------------------------------------


def test_empty(td):
    """A batch size, device or name would be lost, or entries stay."""
    assert_trees_equal(td.empty(), TensorDict({}, [2], names=["rows"]))
    assert_trees_equal(td.empty(recurse=True), TensorDict({"n": {}}, [2], names=["rows"]))
    other = td.to("cpu").empty(True, batch_size=[5, 2], device=None, names=["u", "v"])
    assert_trees_equal(other, TensorDict({"n": {}}, [5, 2], names=["u", "v"]))
    assert td.to("cpu").empty().device == torch.device("cpu")
    assert type(Point(A, batch_size=[2]).empty()) is TensorDict


@pytest.mark.parametrize("name", ["new_zeros", "new_ones", "new_empty"])
def test_new(name):
    """Features or a nested batch would be lost, or the values be others than torch's."""
    tree = TensorDict({"a": A, "n": TensorDict({"b": A.long()}, [2, 3]), "s": "x"}, [2])
    found = getattr(tree, name)(4, 1, dtype=torch.float64, device="cpu")

    assert (found.batch_size, found["n"].batch_size, found["s"]) == ((4, 1), (4, 1, 3), "x")
    assert (found["a"].shape, found["n", "b"].dtype) == ((4, 1, 3), torch.float64)
    assert found.device == found["n"].device == torch.device("cpu")
    assert getattr(tree, name)()["a"].shape == getattr(tree, name)([])["a"].shape == (3,)
    assert name == "new_empty" or torch.equal(found["a"], getattr(A, name)(4, 1, 3, dtype=torch.float64))


def test_new_full():
    """The value would not be everywhere."""
    found = TensorDict({"a": A, "b": B}, [2]).new_full((3,), 7)

    assert found["a"].unique().tolist() == found["b"].unique().tolist() == [7]
    assert found["b"].dtype is torch.int64
    assert TensorDict({"a": A}, [2]).new_full(3, 7).batch_size == (3,)


def test_replace(td):
    """A nested tree would be merged, or the tree written to."""
    found = assert_pure(lambda t: t.replace({"n": {"c": B}}, a=B, new=1.0), td)

    assert list(found.keys(True, True)) == ["a", ("n", "c"), "new"]
    assert found["a"] is B
    assert list(td.keys()) == ["a", "n"]
    assert_trees_equal(td.replace(TensorDict({"n": {"c": B}, "a": B}, [2]), new=1.0), found)


def test_split_keys(td):
    """A part would lack an entry, keep an old name, or the rest keep what was taken."""
    first, second, rest = td.split_keys([("n", "b")], {"a": "x", ("n", "s"): "words"})
    loose = td.split_keys(["gone"], strict=False)

    assert list(first.keys(True, True)) == [("n", "b")]
    assert list(second.keys(True, True)) == ["x", "words"]
    assert list(rest.keys(True)) == []
    assert [part.batch_size for part in (first, second, rest)] == [(2,)] * 3
    assert list(loose[0].keys()) == []
    assert_trees_equal(loose[1], td)
    with pytest.raises(MissingKeyError, match="no key 'a'"):
        td.split_keys(["a"], ["a"])


@pytest.mark.parametrize("keep", [True, False])
def test_entries_are_joined(keep):
    """The entries would be joined along another dimension, or stay when they should not."""
    tree = TensorDict({"a": A, "n": {"b": A + 1}}, [2])
    found = assert_pure(lambda t: t.cat_tensors("a", ("n", "b"), out_key=("n", "c"), dim=1, keep_entries=keep), tree)
    stacked = tree.stack_tensors("a", ("n", "b"), out_key="c", dim=-1, keep_entries=keep)

    assert torch.equal(found["n", "c"], torch.cat([A, A + 1], 1))
    assert torch.equal(stacked["c"], torch.stack([A, A + 1], -1))
    assert ("a" in found, ("n", "b") in found, "a" in stacked) == (keep, keep, keep)


def test_sub_trees_are_joined():
    """Sub-trees would be refused."""
    tree = TensorDict({"m": {"a": A}, "n": {"a": A + 1}}, [2])

    assert torch.equal(tree.stack_tensors("m", "n", out_key="o", dim=1)["o", "a"], torch.stack([A, A + 1], 1))


# -- state dicts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flatten", [True, False])
def test_state_dict_there_and_back(flatten):
    """A value would go to another leaf, or the tree be written to."""
    module, other = TinyMLP(), TinyMLP()
    tree = TensorDict.from_module(module)
    state = TensorDict.from_module(other).state_dict(flatten=flatten)
    found = assert_pure(lambda t: t.load_state_dict(state), tree)

    for name, value in other.state_dict().items():
        assert torch.equal(found[tuple(name.split("."))], value)
    assert found.kind(("hidden", "weight")) is Kind.PARAMETER


def test_tied_leaves_are_loaded_once():
    """The paths of a tied leaf would be separated, or one of two values win in silence."""
    tree, state = TensorDict.from_module(TiedLM()), TiedLM().state_dict()
    found = tree.load_state_dict({key: value.clone() for key, value in state.items()})

    assert found["emb", "weight"] is found["out", "weight"]
    assert torch.equal(found["emb", "weight"], state["emb.weight"])
    with pytest.raises(TieError, match=r"'emb.weight' and 'out.weight' are one tensor"):
        tree.load_state_dict(state | {"out.weight": state["emb.weight"] + 1})


def test_values_are_cast_or_assigned():
    """`assign` would cast, or its absence not, or non-tensor data count as missing."""
    tree = TensorDict({"a": A, "s": "x"}, [2])

    assert tree.load_state_dict({"a": A.double()})["a"].dtype is torch.float32
    assert tree.load_state_dict({"a": A.double()}, assign=True)["a"].dtype is torch.float64
    assert tree.load_state_dict({"other": B}, strict=False)["a"] is tree["a"]
    assert tree.load_state_dict({"a": A}, from_flatten=True)["s"] == "x"


ONE = TensorDict({"a": A, "b": B, "s": "x"}, [2])
ERRORS = [
    (lambda: TensorDict.from_any(3), TypeError, r"from_any: .*\n.*a dict.*\n.*int"),
    (
        lambda: TensorDict.from_dict({"a": A}, auto_batch_size=True, batch_size=[2]),
        TypeError, r"from_dict: .*\n.*auto_batch_size\n.*\[2\]",
    ),
    (lambda: TensorDict.from_dict({"a": A}, batch_size=[3]), BatchSizeError, r"'a'.*\n.*\[3\].*\n.*\[2, 3\]"),
    (lambda: ONE.cat_tensors("a", "b", out_key="c"), LeafMismatchError, r"cat_tensors: 'b' .*\n.*float32\n.*int64"),
    (lambda: ONE.cat_tensors("s", "b", out_key="c"), LeafMismatchError, r"cat_tensors: 's' .*\n.*\n.*NonTensorData"),
    (lambda: ONE.stack_tensors(out_key="c"), ValueError, r"stack_tensors: no keys.*\n.*one or more\n.*none"),
    (
        lambda: ONE.set("c", A[:, :2]).stack_tensors("a", "c", out_key="d"),
        LeafMismatchError, r"stack_tensors: .*\n.*equal shapes\n.*'a': \[2, 3\], 'c': \[2, 2\]",
    ),
    (lambda: ONE.cat_tensors("a", out_key="c", dim=0).cat_tensors("b", "b", out_key="d"), BatchSizeError, r"'d'"),
    (
        lambda: ONE.load_state_dict({"a": A, "c": B}), MissingKeyError,
        r"load_state_dict: .*\n.*\['a', 'b'\]\n.*missing \['b'\], unexpected \['c'\]",
    ),
    (lambda: ONE.load_state_dict({"a": B, "b": B}), LeafMismatchError, r"'a' does not fit.*\n.*\[2, 3\]\n.*\[2\]"),
    (lambda: ONE.load_state_dict({"a": 3, "b": B}), LeafMismatchError, r"'a' does not fit.*\n.*\[2, 3\]\n.*int"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_errors_name_both_values(call, error, message):
    """A wrong call would return something, or not say what it was given."""
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        (torch.ones(2, dtype=torch.bfloat16), "torch.bfloat16, torch.strided, on cpu\n.*float32"),
        (torch.ones(2, device="meta"), "torch.float32, torch.strided, on meta$"),
        (torch.eye(2).to_sparse(), "torch.float32, torch.sparse_coo, on cpu"),
    ],
)
@pytest.mark.parametrize("call", ["numpy", "to_struct_array"])
def test_leaves_that_numpy_cannot_hold(leaf, got, call):
    """A user could not see which leaf is the reason."""
    with pytest.raises(UnsupportedError, match=rf"{call}: 'n.x' is no array of numpy.\n.*values.*\n.*{got}"):
        getattr(TensorDict({"n": {"x": leaf}}, [2]), call)()


def test_no_state_dict():
    """What is no dict would be an AttributeError from inside."""
    with pytest.raises(TypeError, match=r"load_state_dict: this is no state dict.\n.*a dict.*\n.*NoneType"):
        TensorDict({"a": A}).load_state_dict(None)


@pytest.mark.parametrize("call", ["bytes", "param_count"])
def test_sizes_of_uninitialised_parameters(call):
    """A user could not see which parameter has no size yet."""
    tree = TensorDict({"n": {"x": torch.nn.UninitializedParameter()}})

    with pytest.raises(LeafMismatchError, match=rf"{call}: 'n.x' is not init.*\n.*shape\n.*Uninit.*\n.*call the lazy"):
        getattr(tree, call)()


def test_bytes_of_sparse_leaves():
    """Zeros that are not stored would be counted, indices not, and `summary` say another number."""
    eye = torch.eye(100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        leaves = {"coo": eye.to_sparse(), "csr": eye.to_sparse_csr(), "csc": eye.to_sparse_csc(), "dense": eye}
    stored = {"coo": 100 * (4 + 2 * 8), "csr": 100 * 12 + 101 * 8, "csc": 100 * 12 + 101 * 8, "dense": 40_000}
    tree = TensorDict(leaves)

    assert {key: TensorDict({key: leaf}).bytes() for key, leaf in leaves.items()} == stored
    assert tree.bytes() == tree.summary().size_bytes == sum(stored.values())


def test_from_any_of_tuples():
    """A tuple would be refused, or one inside be a value where tensordict makes a tree."""
    mixed = (A, {"x": (1, {"y": 2}), "size": Size([3, 4]), "l": [1, 2]}, "text")
    tree = TensorDict.from_any(mixed)
    theirs = Incumbent.from_any((A, {"x": (1, {"y": 2})}, "text"))

    assert set(tree.keys(True, True)) == {
        *theirs.keys(True, True, is_leaf=tensordict.is_leaf_nontensor),
        ("1", "size"),
        ("1", "l"),
    }
    assert tree["0"] is A
    assert tree["1", "x", "1", "y"] == 2
    assert tree["2"] == "text"
    assert tree["1", "size"].tolist() == [3, 4]
    assert TensorDict.from_dataclass(Plain(A, (A, A)))["inner", "1"] is A
    assert TensorDict.from_any((), batch_size=[2]).batch_size == Size([2])
    with pytest.raises(BatchSizeError, match="'1': the leading"):
        TensorDict.from_any((A, torch.ones(5)), batch_size=[2])


def test_from_any_of_data_frames():
    """A frame would be refused, or one inside be a value."""
    frame = pd.DataFrame({"i": [1, 2], "s": ["a", "b"]})

    assert_trees_equal(TensorDict.from_any(frame), TensorDict.from_pandas(frame))
    assert_trees_equal(TensorDict.from_any({"f": (frame,)})["f", "0"], TensorDict.from_pandas(frame))
    assert TensorDict.from_any(frame, batch_size=[]).batch_size == Size([])
    assert TensorDict.from_any({"f": frame}, auto_batch_size=True).batch_size == Size([2])
    with pytest.raises(BatchSizeError, match=r"'f.*\n.*\[3\]"):
        TensorDict.from_any({"f": frame}, batch_size=[3])
