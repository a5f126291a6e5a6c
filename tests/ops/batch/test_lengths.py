"""`pad_to`: a dimension padded to the next of a few sizes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tdfunc as tdf
from tdfunc import LeafMismatchError, TensorClass, TensorDict

SIZES = (4, 8, 16)


@pytest.mark.parametrize("length", [0, 1, 4, 5, 8, 15, 16])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_tensor_is_padded_as_by_torch(length, dim, side):
    """The result is that of `F.pad` to the smallest size that is not below the length."""
    shape = [2, 3, 5]
    shape[dim] = length
    x = torch.randn(shape)
    more = min(size for size in SIZES if size >= length) - length
    pads = [0] * 6
    pads[2 * (2 - dim % 3) + (side == "right")] = more

    padded, _ = tdf.pad_to(x, SIZES, dim=dim, value=7, side=side)

    assert torch.equal(padded, F.pad(x, pads, value=7))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("length", [1, 5, 8])
def test_the_mask_selects_the_data(length, side):
    """Indexing the padded tensor with the mask returns the tensor."""
    x = torch.randn(2, length, 3)

    padded, mask = tdf.pad_to(x, SIZES, dim=1, side=side)

    assert torch.equal(padded[:, mask], x)


@pytest.mark.parametrize(("length", "size"), [(0, 0), (1, 6), (6, 6), (7, 12), (70, 72)])
def test_the_next_multiple(length, size):
    """`multiple_of` gives the smallest multiple that is not below the length."""
    padded, mask = tdf.pad_to(torch.ones(length), multiple_of=6, dim=0)

    assert (len(padded), len(mask), int(mask.sum())) == (size, size, length)


@pytest.mark.parametrize("sizes", [8, np.int64(8), [8], (2, 4, 8), [16, 8], range(0, 20, 4), np.array([4, 8])])
def test_sizes_may_be_given_in_many_ways(sizes):
    """One size, or any sequence in any order."""
    padded, _ = tdf.pad_to(torch.ones(2, 5), sizes, dim=1)

    assert padded.shape == (2, 8)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_the_dtype_stays(dtype):
    """Integers, masks and narrow floats are padded in their dtype."""
    padded, _ = tdf.pad_to(torch.ones(3, dtype=dtype), 4, dim=0)

    assert padded.tolist() == [1, 1, 1, 0]
    assert padded.dtype == dtype


def test_containers_keep_tensors_without_the_dimension():
    """In a dict, what has the dimension is padded, and the rest is the same object."""
    batch = {"ids": torch.ones(2, 5), "more": [torch.ones(2, 5, 3)], "labels": torch.ones(2), "name": "a"}

    padded, _ = tdf.pad_to(batch, SIZES, dim=1)

    assert [padded["ids"].shape, padded["more"][0].shape] == [(2, 8), (2, 8, 3)]
    assert padded["labels"] is batch["labels"]
    assert padded["name"] == "a"


@pytest.mark.parametrize(("batch_size", "new"), [([], []), ([2], [2]), ([2, 5], [2, 8])])
def test_a_tree_has_the_new_batch_size(batch_size, new):
    """A dimension of the batch grows with the leaves; one behind it leaves the batch size."""
    tree = TensorDict({"x": torch.ones(2, 5, 3), "n": TensorDict({"y": torch.ones(2, 5)}, batch_size)}, batch_size)

    padded, _ = tdf.pad_to(tree, SIZES, dim=1)

    assert padded.batch_size == padded["n"].batch_size == torch.Size(new)
    assert padded["x"].shape == (2, 8, 3)
    assert padded["n", "y"].shape == (2, 8)


def test_nested_batch_sizes_grow_by_themselves():
    """A nested tree with more batch dimensions than its parent is padded in its own."""
    tree = TensorDict({"n": TensorDict({"y": torch.ones(2, 5)}, [2, 5]), "label": torch.ones(2)}, [2])

    padded, _ = tdf.pad_to(tree, SIZES, dim=1)

    assert padded["n"].batch_size == torch.Size([2, 8])
    assert padded["label"] is tree["label"]


def test_words_of_rows_are_padded_with_none():
    """Non-tensor data with a value for each row get None, as with `tdf.pad`."""
    tree = TensorDict({"x": torch.ones(3)}, [3]).set("word", ["a", "b", "c"])

    padded, _ = tdf.pad_to(tree, 4, dim=0)

    assert padded["word"] == ["a", "b", "c", None]


def test_a_batch_dimension_is_padded_as_by_pad():
    """For a dimension of the batch the result is that of `tdf.pad`."""
    tree = TensorDict({"x": torch.randn(3, 2), "n": {"y": torch.randn(3)}}, [3])

    padded, _ = tdf.pad_to(tree, 5, dim=0, value=2)

    tdf.assert_close(padded, tdf.pad(tree, [0, 2], 2))


class Rows(TensorClass):
    ids: torch.Tensor
    reward: torch.Tensor


def test_a_typed_tree_keeps_its_class():
    """A tensorclass is padded to one of its class."""
    padded, _ = tdf.pad_to(Rows(torch.ones(2, 5), torch.ones(2), batch_size=[2]), SIZES, dim=1)

    assert type(padded) is Rows
    assert padded.ids.shape == (2, 8)


def test_gradients_reach_the_data():
    """The gradient of a sum over the data is one at each of them."""
    x = torch.randn(2, 3)

    def total(x):
        padded, mask = tdf.pad_to(x, SIZES, dim=1, value=5)
        return (padded * mask).sum()

    assert torch.equal(torch.func.grad(total)(x), torch.ones(2, 3))


def test_the_same_under_vmap():
    """Under vmap, `dim` counts the dimensions of one row."""
    x = torch.randn(4, 5, 3)

    padded, mask = torch.vmap(lambda row: tdf.pad_to(row, SIZES, dim=0), out_dims=(0, None))(x)

    expected, expected_mask = tdf.pad_to(x, SIZES, dim=1)
    assert torch.equal(padded, expected)
    assert torch.equal(mask, expected_mask)


@pytest.mark.parametrize("cut", [lambda x, n: x[:, :n], lambda x, n: x[:, :n].clone()], ids=["views", "copies"])
def test_seventy_lengths_are_five_records(cut):
    """Calls of many lengths are recorded once for each size, also if the data are views of a longer tensor."""
    double = tdf.jit(lambda x: x * 2)
    data = torch.randn(3, 80)
    lengths = range(11, 81)

    results = [double(tdf.pad_to(cut(data, n), multiple_of=16, dim=1)[0])[:, :n] for n in lengths]

    assert double.cache_info().misses == 5
    assert [torch.equal(one, data[:, :n] * 2) for one, n in zip(results, lengths, strict=True)] == [True] * 70


MESSAGES = {
    "no sizes": (lambda: tdf.pad_to(torch.ones(3), dim=0), ValueError, "sizes.*neither"),
    "both": (lambda: tdf.pad_to(torch.ones(3), 4, dim=0, multiple_of=4), ValueError, "both"),
    "too long": (lambda: tdf.pad_to(torch.ones(30), SIZES, dim=0), ValueError, "length 30 .*at most 16"),
    "no dimension": (lambda: tdf.pad_to({"x": torch.ones(3)}, 4, dim=1), ValueError, "no tensor has dimension 1"),
    "negative for a tree": (lambda: tdf.pad_to({"x": torch.ones(3)}, 4, dim=-1), ValueError, "negative"),
    "out of range": (lambda: tdf.pad_to(torch.ones(3), 4, dim=-2), IndexError, "range"),
    "no multiple": (lambda: tdf.pad_to(torch.ones(3), dim=0, multiple_of=0), ValueError, "multiple_of"),
    "a side": (lambda: tdf.pad_to(torch.ones(3), 4, dim=0, side="both"), ValueError, "side"),
    "a value": (lambda: tdf.pad_to(torch.ones(3, dtype=torch.int64), 4, dim=0, value=0.5), LeafMismatchError, "0.5"),
    "lengths": (
        lambda: tdf.pad_to({"x": torch.ones(2, 3), "y": torch.ones(2, 4)}, 4, dim=1),
        LeafMismatchError,
        r"\['x'\]: 3, \['y'\]: 4",
    ),
    "trees of a lazy stack": (
        lambda: tdf.pad_to(tdf.lazy_stack([TensorDict({"x": torch.ones(2)}, [2]) for _ in "ab"]), 4, dim=0),
        LeafMismatchError,
        "pad",
    ),
    "a lazy stack": (
        lambda: tdf.pad_to(tdf.lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (2, 3)]), 4, dim=1),
        ValueError,
        r"lazy.pad\(\)",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(case):
    """A mistake is named."""
    call, kind, pattern = MESSAGES[case]

    with pytest.raises(kind, match=f"(?s){pattern}"):
        call()
