"""Batch-size arithmetic, against torch and numpy."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Size

import tdfunc as tdf
from tdfunc import BatchSizeError, TensorDict
from tdfunc.core.shapes import (
    as_names,
    as_size,
    broadcast,
    check_lead,
    common_prefix,
    dim_index,
    fill_size,
    fits_into,
    index_names,
    index_size,
    normalize_index,
    shape_of,
)
from tests.random_index import random_index
from tests.strategies import SIZES


def _take(x, index):
    parts = normalize_index(index, x.shape)
    index_size(parts, x.shape)
    return x[parts]


@given(SIZES, st.integers(0, 2**32 - 1))
def test_index_equals_torch(size, seed):
    """A normalized index would reach other elements than torch's, or give another size."""
    index = random_index(np.random.default_rng(seed), size)
    x = torch.arange(Size(size).numel()).reshape(size)
    try:
        expected = x[index if isinstance(index, tuple) else (index,)]
    except (IndexError, TypeError):
        with pytest.raises(IndexError):
            _take(x, index)
        return
    parts = normalize_index(index, Size(size))

    assert torch.equal(x[parts], expected)
    assert index_size(parts, Size(size)) == expected.shape


@given(st.permutations([2, 3, 4]).map(lambda sizes: tuple(sizes[:2])), st.integers(0, 2**32 - 1))
def test_names_stay_with_their_dimension(size, seed):
    """A name would move to another dimension."""
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


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((Ellipsis, Ellipsis), "one Ellipsis at most"),
        ((0, 0, 0), r"at most 2 for batch size \[2, 3\](.|\n)*3 in \(0, 0, 0\)"),
        ("a", "must be an index(.|\n)*'a' in 'a'"),
        (("a", 0), r"'a' in \('a', 0\)(.|\n)*do not mix(.|\n)*Keys are text: td\['a', '0'\]"),
        (("a", slice(2)), r"'a' in \('a', slice(.|\n)*td\[key\]\[index\], or td\[index\]\[key\]\.$"),
        (["a", "b"], r"\['a', 'b'\](.|\n)*td\.select\('a', 'b'\)"),
        (1.5, "1.5"),
        (torch.tensor([0.5]), "int64, int32 or bool(.|\n)*torch.float32"),
        ([0.5], "int64, int32 or bool(.|\n)*torch.float32"),
        ([[0, 1], [1]], r"\[\[0, 1\], \[1\]\]"),
        (torch.ones(3, dtype=torch.bool), r"\[2\](.|\n)*\[3\]"),
        ((Ellipsis, torch.ones(2, dtype=torch.bool)), r"\[3\](.|\n)*\[2\]"),
        (2, "2 is out of range for batch dimension 0(.|\n)*-2 <= index < 2"),
        ((0, -4), "-4 is out of range for batch dimension 1"),
    ],
)
def test_bad_index(index, message):
    """An index that is none would be accepted, or the message not name it and the batch."""
    size = Size((2, 3))
    with pytest.raises(IndexError, match=message):
        index_size(normalize_index(index, size), size)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64])
def test_numbers_of_numpy(kind):
    """A number of eight bits would be a mask of all rows or none, as an array of such numbers is."""
    x = torch.arange(6).view(2, 3)
    td = TensorDict({"a": x}, [2, 3])
    for index in (kind(1), (kind(0), kind(2)), (Ellipsis, kind(2)), (kind(1), None), (slice(kind(1)), kind(0))):
        assert torch.equal(td[index]["a"], x[index])
        assert td[index].batch_size == x[index].shape
    if kind is not np.uint8:
        assert torch.equal(td[np.array([1, 0, 1], dtype=kind)]["a"], x[[1, 0, 1]])

    assert torch.equal(td.at[kind(1)].set(0)["a"], torch.tensor([[0, 1, 2], [0, 0, 0]]))
    assert td[np.bool_(True)].batch_size == Size((1, 2, 3))
    with pytest.raises(IndexError, match=r"must be an index(.|\n)*float32"):
        td[np.float32(1)]


@pytest.mark.parametrize("index", [[0], (slice(None), [2]), (Ellipsis, torch.tensor([[-1], [0]]))])
def test_positions_in_an_empty_dimension(index):
    """An empty tree, or values beside empty tensors, would take positions that torch refuses."""
    size = Size((0, 0))
    with pytest.raises(IndexError, match="out of bounds"):
        torch.empty(size)[index]
    with pytest.raises(IndexError, match=r"is empty(.|\n)*positions of shape \[.*batch size \[0, 0\]"):
        TensorDict({}, size)[index]


def test_bad_step():
    """A negative step would be passed on to leaves, or not be noticed in a tree without any."""
    with pytest.raises(ValueError, match=r"positive(.|\n)*slice\(None, None, -1\)"):
        normalize_index(slice(None, None, -1), Size((2,)))


@pytest.mark.parametrize(
    ("value", "size"), [(None, ()), (3, (3,)), ([2, 3], (2, 3)), (torch.Size([2]), (2,)), (np.array([1, 2]), (1, 2))]
)
def test_as_size(value, size):
    """A way of writing a batch size would be misread."""
    assert as_size(value) == Size(size)


def test_bad_size():
    """A batch size of floats or of negative numbers would be accepted."""
    with pytest.raises(TypeError, match=r"ints(.|\n)*\[1.5\]"):
        as_size([1.5])
    with pytest.raises(ValueError, match=r"0 or more(.|\n)*\[2, -1\]"):
        as_size([2, -1])


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "b", "c"]])
def test_bad_names(names):
    """Names would be missing or doubled."""
    with pytest.raises(ValueError, match=f"2 names(.|\n)*{names[0]}"):
        as_names(names, 2)


def test_names():
    """Names that are all None would count as names."""
    assert as_names(["a", None], 2) == ("a", None)
    assert as_names([None, None], 2) is None


@given(SIZES, st.lists(st.integers(-1, 4), max_size=3))
def test_fill_size_equals_torch(size, shape):
    """A requested shape would be filled in otherwise than by torch."""
    x = torch.empty(size)
    try:
        expected = x.reshape(shape).shape
    except RuntimeError:
        with pytest.raises(RuntimeError, match=f"{x.numel()} elements"):
            fill_size(shape, x.numel(), "reshape")
        return

    assert fill_size(shape, x.numel(), "reshape") == expected


def test_small_rules():
    """A dimension from the end, a common prefix or a leading size would be misjudged."""
    assert [dim_index(d, 3, "x") for d in (-3, -1, 0, 2)] == [0, 2, 0, 2]
    assert common_prefix(Size((2, 3)), Size((2, 4))) == Size((2,))
    assert common_prefix(Size((2, 3)), Size((2,))) == Size((2,))
    with pytest.raises(IndexError, match="squeeze: batch dimension 3(.|\n)*-3 <= dim < 3"):
        dim_index(3, 3, "squeeze")
    with pytest.raises(IndexError, match="this one has none"):
        dim_index(0, 0, "squeeze")
    with pytest.raises(BatchSizeError, match=r"'a.b'(.|\n)*\[3\] \+(.|\n)*\[4, 2\]"):
        check_lead(Size((4, 2)), Size((3,)), "a.b")


def test_names_are_str():
    """A number as a name would be taken for a dimension, and be no name in a file."""
    with pytest.raises(TypeError, match=r"names: a name is a str(.|\n)*\(1, 'y'\)"):
        as_names([1, "y"], 2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_shape_of_leaves_that_torch_gives_no_shape():
    """A strided nested tensor would pass for a parameter that is not initialised, whatever its batch."""
    ragged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])

    assert shape_of(ragged) == Size([2, -1, 4])
    assert shape_of(torch.nested.nested_tensor([])) == Size([0])
    assert shape_of(torch.nn.UninitializedParameter()) is None
    assert shape_of(torch.ones(2, 3)) == Size([2, 3])


@given(
    st.lists(st.integers(0, 3), max_size=4),
    st.lists(st.integers(0, 3), max_size=4),
)
def test_what_fits_into_a_size_is_what_torch_broadcasts_to_it(shape, size):
    """An operand that would make the batch larger would be let in, or one that fits refused."""
    try:
        expected = torch.broadcast_shapes(shape, size) == Size(size)
    except RuntimeError:
        expected = False

    assert fits_into(Size(shape), Size(size)) == expected


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=3))
def test_shapes_broadcast_as_in_torch(shapes):
    """Batch sizes of two trees, or index tensors, would give a shape that the leaves do not have."""
    try:
        expected = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        expected = None

    assert broadcast(*map(Size, shapes)) == expected


TD = TensorDict({"a": torch.arange(8.0).reshape(4, 2)}, [4])


@pytest.mark.parametrize("number", [np.int64, torch.tensor])
def test_ints_of_other_libraries(number):
    """An int of numpy or torch, which torch takes, would be refused."""
    zero, two = number(0), number(2)

    assert [len(part) for part in TD.chunk(two)] == [2, 2]
    assert [len(part) for part in TD.split(two, zero)] == [2, 2]
    assert len(TD.unbind(zero)) == 4
    assert torch.equal(TD.flip(zero)["a"], TD["a"].flip(0))
    assert TD.sum(zero).batch_size == ()
    assert TD.unsqueeze(zero).squeeze(zero).batch_size == (4,)
    assert TD[:2].reshape(two).batch_size == (2,)


def test_sizes_of_other_libraries():
    """A batch size, split sizes or padding of numpy or torch would be refused."""
    assert TensorDict({}, np.int64(2)).batch_size == (2,)
    assert [len(part) for part in torch.chunk(TD, np.int64(2))] == [2, 2]
    assert [len(part) for part in TD.split(torch.tensor([1, 3]))] == [1, 3]
    assert TD.expand(np.array([3, 4])).batch_size == (3, 4)
    assert tdf.pad(TD, np.array([1, 2])).batch_size == (7,)
