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

from tdfunc import LeafMismatchError, NonTensorData, NonTensorStack, TensorDict, lazy_stack
from tdfunc.core import nontensor as _nontensor
from tests.random_index import random_index
from tests.strategies import SIZES


def numbered(size):
    """A stack whose values are the numbers of a tensor of that shape, and the tensor."""
    tensor = torch.arange(Size(size).numel()).reshape(size)
    return NonTensorStack(*range(tensor.numel())).reshape(size), tensor


def as_tuple(x):
    """One part or several as a tuple."""
    return x if isinstance(x, tuple) else (x,)


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
    "unbind": lambda x: (*x.unbind(-1), *x.unbind(), *torch.unbind(x)),
    "split": lambda x: x.split([1, x.shape[0] - 1], 0),
    "split evenly": lambda x: (*x.split(2), *torch.split(x, 2)),
    "split of nothing": lambda x: x[:0].split(1, 0),
    "index_select": lambda x: x.index_select(0, torch.tensor([0, 0])),
    "stack": lambda x: torch.stack([x, x], 1),
    "cat": lambda x: torch.cat([x, x], 0),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [(2, 3), (1, 2), (3,)])
def test_stack_moves_as_a_tensor(name, size):
    """Values of a stack move as the elements of a tensor."""
    found, expected = (as_tuple(CALLS[name](x)) for x in numbered(size))

    assert [part.tolist() for part in found] == [part.tolist() for part in expected]


@pytest.mark.parametrize("name", [name for name in CALLS if name != "stack"])
@pytest.mark.parametrize("size", [(2, 3), (1, 2), (3,), (2, 0)])
def test_data_has_the_shape_of_a_tensor(name, size):
    """One value stays, with the shape that a tensor has after the call."""
    found, expected = (as_tuple(CALLS[name](x)) for x in (NonTensorData("x", size), torch.empty(size)))

    assert [part.shape for part in found] == [part.shape for part in expected]
    assert all(isinstance(part, NonTensorData) and part.data == "x" for part in found)


@given(SIZES, st.integers(0, 2**32 - 1))
@example((0, 1, 0), 24109)
def test_index_equals_torch(size, seed):
    """An index takes the values at the places where it takes the elements of a tensor."""
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
    """A list, array or tuple is one value."""
    odd = [[1, 2], (3,), {"a": 1}, None, np.arange(3)]
    stack = NonTensorStack(*odd)

    assert stack.shape == stack.batch_size == Size([5])
    assert all(stack[i].data is value for i, value in enumerate(odd))
    assert stack.reshape(5, 1).tolist()[1] == [(3,)]
    assert NonTensorStack(NonTensorData(NonTensorData("a")), "b").tolist() == ["a", "b"]


def test_equality_of_rows():
    """Rows are equal where their values are, and all rows of another shape are unequal."""
    one, two = TensorDict({"s": "a", "l": ["x", "y"]}, [2]), TensorDict({"s": ["a", "b"], "l": ["x", "z"]}, [2])

    assert (one == one)["s"].tolist() == [True, True]
    assert (one == two)["l"].tolist() == (one == two)["s"].tolist() == [True, False]
    assert (one != two)["l"].tolist() == [False, True]
    assert not (one == two.set("l", NonTensorStack("x", "z").reshape(2, 1)))["l"].any()


@pytest.mark.parametrize("make", [np.arange, torch.zeros])
def test_equality_of_arrays(make):
    """Data that holds equal arrays is equal."""
    assert NonTensorData(make(3)) == NonTensorData(make(3))


@pytest.mark.parametrize("size", [1, 4])
def test_arrays_of_other_sizes_are_unequal(size):
    """Data that holds arrays of other sizes is unequal, also where they broadcast."""
    assert NonTensorData(np.zeros(3)) != NonTensorData(np.zeros(size))


@pytest.mark.parametrize("other", [NonTensorData("x", [3]), NonTensorStack("x", "x")], ids=["shape", "class"])
def test_data_of_other_shapes_and_classes_is_unequal(other):
    """Data is equal to data of its shape and class only."""
    assert NonTensorData("x", [2]) != other


def test_structure():
    """Values belong to the structure of a tree, which can be hashed, and are not leaves."""
    specs = [pytree.tree_structure(TensorDict({"s": value})) for value in ("a", "a", "b", [["u"]], [["u"]])]

    assert specs[0] == specs[1] != specs[2]
    assert specs[3] == specs[4]
    assert hash(specs[0]) == hash(specs[1])
    assert hash(specs[3].child(0).context) == hash(specs[4].child(0).context)
    assert pytree.tree_leaves(TensorDict({"s": "a"})) == []


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("data", [NonTensorData("x", [2, 0]), NonTensorStack("a", "b"), NonTensorData([1], [10**9])])
def test_copies(copier, data):
    """A copy keeps the value of an empty batch, and holds one value once."""
    assert {copier(data)} == {data}
    assert len(pickle.dumps(data)) < 1000


@pytest.mark.parametrize("call", [lambda t: t.sum(), lambda t: t.amax(dim=0), lambda t: t.mean(dim=1)])
@pytest.mark.parametrize("of", [lambda t: t, lambda t: lazy_stack([t, t]).trees[0]], ids=["tree", "of a stack"])
def test_reductions_do_not_keep_merged_rows(call, of):
    """A reduction of a tree, or of a tree of a stack, refuses values of rows that are gone."""
    words = [["a", "b"], ["c", "d"]]
    tree = of(TensorDict({"x": torch.ones(2, 2), "s": words}, [2, 2]))

    with pytest.raises(LeafMismatchError, match="'s' has a value for each row"):
        call(tree)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t[[2, 0]],
        lambda t: t[[True, False, True]],
        lambda t: t[torch.tensor([[2], [0]])],
        lambda t: t.flip(0),
        lambda t: t.repeat(2),
        lambda t: t.repeat_interleave(2, 0),
        lambda t: t.gather(0, torch.tensor([2, 0])),
        lambda t: t.at[[0, 2]].set(t[:2]),
        lambda t: t.where(torch.tensor([True, False, True]), t.flip(0)),
    ],
)
def test_values_follow_rows_under_derivatives(call):
    """Inside `torch.func.grad` the values of rows go where they go outside of it."""
    tree, seen = TensorDict({"a": torch.ones(3, 2), "s": ["x", "y", "z"]}, [3]), []

    def loss(t):
        seen.append(call(t))
        return seen[0]["a"].sum()

    torch.func.grad(loss)(tree)
    assert seen[0]["s"] == call(tree)["s"]


@pytest.mark.parametrize("values", [["a", "b"], [["x", [1]], ["y", [2, 3]]], []])
def test_stacks_load_with_weights_only(values):
    """`torch.load(weights_only=True)` takes a stack with the documented allow-list."""
    stack = NonTensorStack(*values)
    file = io.BytesIO()
    torch.save(stack.reshape(1, *stack.shape), file)
    file.seek(0)

    with torch.serialization.safe_globals([_nontensor._stack_of]):
        loaded = torch.load(file, weights_only=True)
    assert loaded.tolist() == [stack.tolist()]
    assert loaded.shape == (1, *stack.shape)


@given(st.lists(st.one_of(st.text(), st.integers(), st.booleans()), min_size=1), SIZES)
def test_treespecs_are_dumped(values, size):
    """`treespec_dumps` keeps the values and the shape of data for the batch and for each row."""
    count = Size(size).numel()
    rows = NonTensorStack(*[values[i % len(values)] for i in range(count)]).reshape(size) if count else NonTensorData(0)
    nodes = [rows, NonTensorData(values, size)]
    specs = [pytree.tree_structure(node) for node in nodes]
    loaded = [pytree.treespec_loads(pytree.treespec_dumps(spec)) for spec in specs]
    found = [pytree.tree_unflatten([], spec) for spec in loaded]

    assert loaded == specs
    assert [type(node) for node in found] == [type(node) for node in nodes]
    assert [node.shape for node in found] == [node.shape for node in nodes]
    assert [node.tolist() for node in found] == [node.tolist() for node in nodes]


@pytest.mark.parametrize(
    ("values", "ndim"),
    [
        (["x" * 30 + str(i) for i in range(50_000)], 1),
        ([["x" * 30 + str(i) for i in range(200)]] * 200, 2),
        (["x" * 1_000_000, "y"], 1),
        ([{"a": list(range(100_000))}, {}], 1),
    ],
    ids=["many", "many rows", "a long text", "a large object"],
)
def test_the_repr_of_a_stack_is_short(values, ndim):
    """It shows the first values; a data set has more than a screen takes."""
    text = repr(NonTensorStack.from_nested(values, ndim))

    assert len(text) < 3000
    assert "..." in text


def test_the_repr_of_many_values_shows_the_first():
    """Ten along each dimension."""
    shown = repr(NonTensorStack(*range(101)))

    assert shown == "NonTensorStack([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...], batch_size=torch.Size([101]), device=None)"


def test_the_repr_of_a_long_value_is_short():
    """A value may be a whole document."""
    assert len(repr(NonTensorData("x" * 1_000_000))) < 3000


def test_the_repr_of_a_tree_is_short():
    """With a data set's names in it."""
    tree = TensorDict({"label": torch.zeros(50_000), "name": [f"{i}.png" for i in range(50_000)]}, [50_000])

    assert len(repr(tree)) < 4000
