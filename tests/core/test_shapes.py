"""Batch-size arithmetic, against torch and numpy."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Size

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.core.shapes import broadcast, fill_size, fits_into, index_names, index_size, normalize_index, shape_of
from tests.random_index import random_index
from tests.strategies import SIZES


@given(st.permutations([2, 3, 4]).map(lambda sizes: tuple(sizes[:2])), st.integers(0, 2**32 - 1))
def test_names_stay_with_their_dimension(size, seed):
    """A name stays with its dimension."""
    index = random_index(np.random.default_rng(seed), size)
    try:
        parts = normalize_index(index, Size(size))
        result = index_size(parts, Size(size))
    except (IndexError, ValueError):
        assume(False)
    names = index_names(parts, tuple(f"n{s}" for s in size)) or (None,) * len(result)

    assert len(names) == len(result)
    assert len({name for name in names if name}) == sum(name is not None for name in names)
    if all(part is None or isinstance(part, int) or part == slice(None) for part in parts if not torch.is_tensor(part)):
        assume(not any(torch.is_tensor(part) or isinstance(part, bool) for part in parts))
        assert list(names) == [None if s == 1 else f"n{s}" for s in result]


KINDS = [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64]
INDICES = {
    "a number": lambda kind: kind(1),
    "two numbers": lambda kind: (kind(0), kind(2)),
    "after an ellipsis": lambda kind: (Ellipsis, kind(2)),
    "before None": lambda kind: (kind(1), None),
    "in a slice": lambda kind: (slice(kind(1)), kind(0)),
}
X = torch.arange(6).view(2, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index_of", INDICES.values(), ids=INDICES)
def test_numbers_of_numpy(kind, index_of):
    """A number of any of numpy's integer types is an index."""
    found, index = TensorDict({"a": X}, [2, 3])[index_of(kind)], index_of(kind)

    assert torch.equal(found["a"], X[index])
    assert found.batch_size == X[index].shape


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_numpy_in_edits(kind):
    """A number of any of numpy's integer types is an index of `at`."""
    td = TensorDict({"a": X}, [2, 3])

    assert torch.equal(td.at[kind(1)].set(0)["a"], torch.tensor([[0, 1, 2], [0, 0, 0]]))


# An array of eight bits is a mask.
@pytest.mark.parametrize("kind", KINDS[1:])
def test_arrays_of_numpy(kind):
    """An array of numpy's integers is an index of rows."""
    assert torch.equal(TensorDict({"a": X}, [2, 3])[np.array([1, 0, 1], dtype=kind)]["a"], X[[1, 0, 1]])


def test_bools_of_numpy():
    """A bool of numpy is the index that torch's is."""
    td = TensorDict({"a": X}, [2, 3])

    assert td[np.bool_(True)].batch_size == td[torch.tensor(True)].batch_size == Size((1, 2, 3))


def test_floats_of_numpy_are_refused():
    """A float of numpy is no index."""
    with pytest.raises(IndexError, match=r"is not an index(.|\n)*float32"):
        TensorDict({"a": X}, [2, 3])[np.float32(1)]


@given(SIZES, st.lists(st.integers(-1, 4), max_size=3))
def test_fill_size_equals_torch(size, shape):
    """A requested shape is filled in as by torch."""
    x = torch.empty(size)
    try:
        expected = x.reshape(shape).shape
    except RuntimeError:
        with pytest.raises(RuntimeError, match=f"{x.numel()} elements"):
            fill_size(shape, x.numel(), "reshape")
        return

    assert fill_size(shape, x.numel(), "reshape") == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_shape_of_leaves_that_torch_gives_no_shape():
    """A strided nested tensor has a shape with -1 for ragged sizes; a parameter that is not initialised has none."""
    ragged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])

    assert shape_of(ragged) == Size([2, -1, 4])
    assert shape_of(torch.nested.nested_tensor([])) == Size([0])
    assert shape_of(torch.nn.UninitializedParameter()) is None
    assert shape_of(torch.ones(2, 3)) == Size([2, 3])
    with pytest.raises(tdf.BatchSizeError):
        TensorDict({}, [3]).set("x", ragged)


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=3))
def test_shapes_broadcast_as_in_torch(shapes):
    """Shapes broadcast as in torch, and a shape fits into the sizes that it broadcasts to."""
    shapes = list(map(Size, shapes))
    try:
        expected = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        expected = None

    assert broadcast(*shapes) == expected
    assert all(fits_into(a, b) == (broadcast(a, b) == b) for a in shapes for b in shapes)


TD = TensorDict({"a": torch.arange(8.0).reshape(4, 2)}, [4])


@pytest.mark.parametrize("number", [np.int64, torch.tensor])
def test_dimensions_of_other_libraries(number):
    """An int of numpy or torch is a dimension."""
    zero = number(0)

    assert len(TD.unbind(zero)) == 4
    assert torch.equal(TD.flip(zero)["a"], TD["a"].flip(0))
    assert TD.sum(zero).batch_size == ()
    assert TD.unsqueeze(zero).squeeze(zero).batch_size == (4,)


@pytest.mark.parametrize("number", [np.int64, torch.tensor])
def test_numbers_of_parts_of_other_libraries(number):
    """An int of numpy or torch is a number of parts or a size of them."""
    zero, two = number(0), number(2)

    assert [len(part) for part in TD.chunk(two)] == [2, 2]
    assert [len(part) for part in TD.split(two, zero)] == [2, 2]
    assert TD[:2].reshape(two).batch_size == (2,)


def test_sizes_of_other_libraries():
    """Sizes and padding may be numbers or arrays of numpy and torch."""
    assert TensorDict({}, np.int64(2)).batch_size == (2,)
    assert [len(part) for part in torch.chunk(TD, np.int64(2))] == [2, 2]
    assert [len(part) for part in TD.split(torch.tensor([1, 3]))] == [1, 3]
    assert TD.expand(np.array([3, 4])).batch_size == (3, 4)
    assert tdf.pad(TD, np.array([1, 2])).batch_size == (7,)
