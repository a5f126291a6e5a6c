"""Non-tensor data, against tensors of the same shape."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Size
from torch.utils import _pytree as pytree

from tdfunc import (
    BatchSizeError,
    ImmutableError,
    LeafMismatchError,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    lazy_stack,
)
from tdfunc.core import nontensor as _nontensor
from tests.random_index import random_index
from tests.strategies import SIZES


def numbered(size):
    """A stack whose values are the numbers of a tensor of that shape, and the tensor."""
    tensor = torch.arange(Size(size).numel()).reshape(size)
    return NonTensorStack(*range(tensor.numel())).reshape(size), tensor


CALLS = {
    "reshape": lambda x: x.reshape(-1),
    "view": lambda x: x.view(x.shape[::-1]),
    "permute": lambda x: x.permute(*reversed(range(x.dim()))),
    "transpose": lambda x: x.transpose(0, -1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.squeeze(),
    "squeeze a dimension": lambda x: x.squeeze(0),
    "expand": lambda x: x.expand(2, *x.shape),
    "expand and keep": lambda x: x.expand(2, *[-1] * x.dim()),
    "unbind": lambda x: x.unbind(-1),
    "split": lambda x: x.split([1, x.shape[0] - 1], 0),
    "split evenly": lambda x: x.split(2, 0),
    "split of nothing": lambda x: x[:0].split(2, 0),
    "index_select": lambda x: x.index_select(0, torch.tensor([0, 0])),
    "stack": lambda x: torch.stack([x, x], 1),
    "cat": lambda x: torch.cat([x, x], 0),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [(2, 3), (1, 2), (3,)])
def test_stack_moves_as_a_tensor(name, size):
    """Values would end up at other places than the elements of a tensor."""
    values, tensor = numbered(size)
    found, expected = CALLS[name](values), CALLS[name](tensor)
    if not isinstance(found, tuple):
        found, expected = (found,), (expected,)

    assert [part.tolist() for part in found] == [part.tolist() for part in expected]


@pytest.mark.parametrize("name", [name for name in CALLS if name != "stack"])
@pytest.mark.parametrize("size", [(2, 3), (1, 2), (3,), (2, 0)])
def test_data_has_the_shape_of_a_tensor(name, size):
    """One value would be seen with another shape than a tensor, or be lost."""
    found, expected = CALLS[name](NonTensorData("x", size)), CALLS[name](torch.empty(size))
    if not isinstance(found, tuple):
        found, expected = (found,), (expected,)

    assert [part.shape for part in found] == [part.shape for part in expected]
    assert all(isinstance(part, NonTensorData) and part.data == "x" for part in found)


@given(SIZES, st.integers(0, 2**32 - 1))
@example((0, 1, 0), 24109)
def test_index_equals_torch(size, seed):
    """A value would be taken from another place than the element of a tensor."""
    assume(len(size) > 0)
    values, tensor = numbered(size)
    index = random_index(np.random.default_rng(seed), size)
    try:
        expected = tensor[index if isinstance(index, tuple) else (index,)]
    except (IndexError, TypeError):
        with pytest.raises(IndexError):
            values[index]
        return

    assert values[index].tolist() == expected.tolist()
    assert NonTensorData(0, size)[index].shape == expected.shape


def test_values_of_any_kind():
    """A list, array or tuple as a value would be taken apart."""
    odd = [[1, 2], (3,), {"a": 1}, None, np.arange(3)]
    stack = NonTensorStack(*odd)

    assert stack.shape == Size([5])
    assert all(stack[i].data is value for i, value in enumerate(odd))
    assert stack.reshape(5, 1).tolist()[1] == [(3,)]


@pytest.mark.parametrize("values", [[["a"], ["b", "c"]], [["a", "b"], ["c"]], [["a"], "b"]])
def test_ragged_lists(values):
    """Values of the longer lists would be dropped in silence."""
    with pytest.raises(ValueError, match="ragged(.|\n)*lists of"):
        NonTensorStack.from_nested(values, 2)
    with pytest.raises(BatchSizeError, match=r"'s': the list must not be ragged(.|\n)*\[2, 1\]"):
        TensorDict({"s": values}, [2, 1])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: x.unbind(1), IndexError, "unbind: .*dimension 1 does not.*\n.*-1 <= dim < 1"),
        (lambda x: x[0].unbind(), IndexError, "unbind: .*dimension 0 does not.*\n.*this one has none"),
        (lambda x: x.split(1, -2), IndexError, "split: .*dimension -2 does not.*\n.*-1 <= dim < 1"),
        (lambda x: x.index_select(1, torch.tensor([0])), IndexError, "index_select: .*dimension 1 does not"),
        (lambda x: x.expand(-1, 2), RuntimeError, "leading, non-existing dimension"),
        (lambda x: torch.stack([x, x[:1]]), RuntimeError, r"stack: .*different shapes.*\n.*\[2\]\n.*\[1\]"),
        (lambda x: torch.cat([x, x[None]]), RuntimeError, r"cat: .*different shapes.*\n.*\[2\]\n.*\[1, 2\]"),
        (lambda x: torch.cat([x, x], 1), IndexError, "cat: .*dimension 1 does not"),
    ],
)
def test_bad_calls(call, error, text):
    """A dimension that is not there would be another one, or numpy speak of arrays that nobody made."""
    with pytest.raises(error, match=text):
        call(NonTensorStack("a", "b"))


def test_joining_trees_names_the_data():
    """The error of data that do not fit would not say under which key they lie."""
    a, b = (
        TensorDict({"n": {"s": NonTensorStack("a", "b", "c", "d").reshape(shape)}}, [2])
        for shape in [(2, 2), (2, 2, 1)]
    )

    with pytest.raises(LeafMismatchError, match=r"stack: leaf 'n.s' differs.*\n.*\[2, 2\]\n.*\[2, 2, 1\]"):
        torch.stack([a, b])


def test_reading():
    """`td[key]` would give the wrapper, or a list where there is one value."""
    td = TensorDict({"one": "x", "each": ["a", "b"], "n": {"deep": "y"}, "number": NonTensorData(3)}, [2])

    assert (td["one"], td["each"], td["n", "deep"], td["number"]) == ("x", ["a", "b"], "y", 3)
    assert td[0]["each"] == "a"
    assert td.get("one") == "x"
    assert dict(td.items())["each"] == ["a", "b"]
    assert isinstance(torch.stack([td, td])._get("one"), NonTensorStack)
    assert torch.stack([td, td])["one"] == [["x", "x"]] * 2


def test_equality():
    """Trees that differ in a string would be equal."""
    one, two = TensorDict({"s": "a", "l": ["x", "y"]}, [2]), TensorDict({"s": "a", "l": ["x", "z"]}, [2])

    assert (one == one).all()
    assert (one == two)["l"].tolist() == [True, False]
    assert (one != two)["l"].tolist() == [False, True]
    assert not (one == two).all()
    assert NonTensorData(np.arange(3)) == NonTensorData(np.arange(3))
    assert NonTensorData(np.arange(3)) != NonTensorData(np.arange(4))
    assert NonTensorData(torch.zeros(2)) == NonTensorData(torch.zeros(2))
    assert NonTensorData("x", [2]) != NonTensorData("x", [3])


def test_structure():
    """Values would be leaves, or two structures with other values be one; or a cache could not hold them."""
    specs = [pytree.tree_structure(TensorDict({"s": value})) for value in ("a", "a", "b", [["u"]], [["u"]])]

    assert specs[0] == specs[1] != specs[2]
    assert specs[3] == specs[4]
    assert [hash(spec) for spec in specs[:1]] == [hash(spec) for spec in specs[1:2]]
    assert hash(specs[3]) == hash(specs[4])
    assert pytree.tree_leaves(TensorDict({"s": "a"})) == []


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("data", [NonTensorData("x", [2, 0]), NonTensorStack("a", "b"), NonTensorData([1], [10**9])])
def test_copies(copier, data):
    """A copy would lose the value of an empty batch, or write out one value for each element."""
    assert copier(data) == data
    assert len(pickle.dumps(data)) < 1000


def test_immutable():
    """A value could be replaced in place."""
    for data in (NonTensorData(1), NonTensorStack(1)):
        with pytest.raises(ImmutableError, match=r"\._array = value"):
            data._array = 2


def test_reductions_refuse_to_merge():
    """Values of rows that are added up would stay as they are, for rows that are gone."""
    td = TensorDict({"a": torch.zeros(2, 3), "row": [["a", "b", "c"], ["d", "e", "f"]], "one": "x"}, [2, 3])

    assert td.exclude("row").sum(0)["one"] == "x"
    with pytest.raises(LeafMismatchError, match=r"'row'(.|\n)*\[3\](.|\n)*\[2, 3\]"):
        td.sum(0)


def test_where_and_rows():
    """Values would not follow the condition, or the rows, as tensors do."""
    td = TensorDict({"a": torch.zeros(2), "s": ["a", "b"]}, [2])
    other = TensorDict({"a": torch.ones(2), "s": ["c", "d"]}, [2])

    assert td.where(torch.tensor([True, False]), other)["s"] == ["a", "d"]
    assert td.at[0].set(other[1])["s"] == ["d", "b"]
    assert td.gather(0, torch.tensor([1, 1, 0]))["s"] == ["b", "b", "a"]


@pytest.mark.parametrize("call", [lambda t: t.sum(), lambda t: t.amax(dim=0), lambda t: t.mean(dim=1)])
@pytest.mark.parametrize("of", [lambda t: t, lambda t: lazy_stack([t, t]).trees[0]], ids=["tree", "of a stack"])
def test_reductions_do_not_keep_merged_rows(call, of):
    """A tree without rows would hold a list of values, one for each row that it no longer has."""
    words = [["a", "b"], ["c", "d"]]
    tree = of(TensorDict({"x": torch.ones(2, 2), "s": words}, [2, 2]))

    with pytest.raises(LeafMismatchError, match="'s' has a value for each row"):
        call(tree)


@pytest.mark.parametrize("values", [["a", "b"], [["x", [1]], ["y", [2, 3]]], []])
def test_stacks_load_with_weights_only(values):
    """An array of objects in a pickle would be refused by torch.load."""
    stack = NonTensorStack(*values)
    file = io.BytesIO()
    torch.save(stack.reshape(1, *stack.shape), file)
    file.seek(0)

    with torch.serialization.safe_globals([_nontensor._stack_of]):
        loaded = torch.load(file, weights_only=True)
    assert loaded.tolist() == [stack.tolist()]
    assert loaded.shape == (1, *stack.shape)
