"""Flat trees of plain tensors are mapped by calls from C: the same numbers, layouts and flags as torch on each leaf."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tdfunc import Kind, TensorDict

ROWS, COLUMNS = 4, 3


def one_shape() -> dict[str, Tensor]:
    """Return leaves of one shape, one of them strided."""
    strided = torch.randn(COLUMNS, ROWS, 2).transpose(0, 1)
    return {"a": torch.randn(ROWS, COLUMNS, 2), "b": torch.randn(ROWS, COLUMNS, 2), "c": strided}


def many_shapes() -> dict[str, Tensor]:
    """Return leaves of several dtypes, numbers of dimensions and layouts."""
    return {
        "float": torch.randn(ROWS, COLUMNS, 2),
        "bfloat16": torch.randn(ROWS, COLUMNS, 2).bfloat16(),
        "int": torch.randint(-5, 5, (ROWS, COLUMNS)),
        "bool": torch.rand(ROWS, COLUMNS, 2, 2) > 0.5,
        "parameter": nn.Parameter(torch.randn(ROWS, COLUMNS)),
        "expanded": torch.tensor(2.5).expand(ROWS, COLUMNS),
        "channels_last": torch.randn(ROWS, COLUMNS, 2, 2).to(memory_format=torch.channels_last),
    }


TREES = {"one shape": one_shape, "many shapes": many_shapes, "no elements": lambda: {"a": torch.zeros(4, 3, 0)}}
POSITIONS = torch.tensor([[3, 0, 1], [2, 2, 0]])
MASK = torch.tensor([[True, False, True]]).expand(ROWS, COLUMNS)


def _ones(x: Tensor) -> tuple[int, ...]:
    return (1,) * (x.dim() - 2)


def _gathered(x: Tensor) -> Tensor:
    return torch.gather(x, 0, POSITIONS.reshape(2, 3, *_ones(x)).expand(2, 3, *x.shape[2:]))


# What is done to the tree, and to each leaf.
SAME: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Any]]] = {
    "flatten": (lambda t: t.flatten(0, 1), lambda x: x.flatten(0, 1)),
    "reshape": (lambda t: t.reshape(2, 6), lambda x: x.reshape(2, 6, *x.shape[2:])),
    "transpose": (lambda t: t.transpose(0, 1), lambda x: x.transpose(0, 1)),
    "permute": (lambda t: t.permute(1, 0), lambda x: x.transpose(0, 1)),
    "unsqueeze": (lambda t: t.unsqueeze(-1), lambda x: x.unsqueeze(2)),
    "squeeze": (lambda t: t[:1].squeeze(0), lambda x: x[0]),
    "expand": (lambda t: t.expand(2, ROWS, COLUMNS), lambda x: x.expand(2, *x.shape)),
    "repeat": (lambda t: t.repeat(2, 3), lambda x: x.repeat(2, 3, *_ones(x))),
    "repeat never": (lambda t: t.repeat(0, 3), lambda x: x.repeat(0, 3, *_ones(x))),
    "repeat often": (lambda t: t.repeat(40, 1), lambda x: x.repeat(40, 1, *_ones(x))),
    "repeat_interleave": (lambda t: t.repeat_interleave(2, dim=1), lambda x: x.repeat_interleave(2, 1)),
    "gather": (lambda t: t.gather(0, POSITIONS), _gathered),
    "where": (lambda t: t.where(MASK, t * 2), lambda x: torch.where(MASK.reshape(ROWS, COLUMNS, *_ones(x)), x, x * 2)),
    "rows": (lambda t: t[torch.tensor([2, 0])], lambda x: x.index_select(0, torch.tensor([2, 0]))),
    "rows from the end": (lambda t: t[torch.tensor([-1, 0])], lambda x: x[torch.tensor([-1, 0])]),
    "two lists": (lambda t: t[[0, 1], [2, -1]], lambda x: x[[0, 1], [2, -1]]),
    "isfinite": (lambda t: (t / 0).isfinite(), lambda x: torch.isfinite(x / 0)),
    "to": (lambda t: t.to(torch.float16), lambda x: x.to(torch.float16)),
    "sum": (lambda t: t.sum(), lambda x: x.sum()),
    "sum over rows": (lambda t: t.sum(0), lambda x: x.sum(0)),
    "sum over both": (lambda t: t.sum((0, 1), keepdim=True), lambda x: x.sum((0, 1), keepdim=True)),
    "sum kept": (lambda t: t.sum(keepdim=True), lambda x: x.sum(tuple(range(x.dim())), keepdim=True)),
    "zeros_like": (torch.zeros_like, torch.zeros_like),
    "new_zeros": (lambda t: t.new_zeros(5), lambda x: x.new_zeros((5, *x.shape[2:]))),
    "new_full": (
        lambda t: t.new_full([5], 1, dtype=torch.int8),
        lambda x: x.new_full((5, *x.shape[2:]), 1, dtype=torch.int8),
    ),
    "contiguous": (lambda t: t.contiguous(), lambda x: x.contiguous()),
    "equal": (lambda t: t == t.clone(), lambda x: x == x),
    "clamp": (lambda t: t.clamp(-1, 1), lambda x: x.clamp(-1, 1)),
    "split": (lambda t: t.split([1, 3])[1], lambda x: x.split([1, 3])[1]),
    "chunk": (lambda t: t.chunk(3)[-1], lambda x: x.chunk(3)[-1]),
    "unbind": (lambda t: t.unbind(1)[2], lambda x: x.unbind(1)[2]),
}


@pytest.mark.parametrize("leaves", TREES.values(), ids=TREES)
@pytest.mark.parametrize(("of_tree", "of_leaf"), SAME.values(), ids=SAME)
def test_a_flat_tree_is_what_torch_makes_of_each_leaf(of_tree, of_leaf, leaves):
    """A call that is made once for all leaves would fit some of them and not others."""
    given = leaves()

    done = of_tree(TensorDict(given, [ROWS, COLUMNS]))

    for key, x in given.items():
        want, got = of_leaf(x), done[key]
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert got.requires_grad == want.requires_grad
        assert got.stride() == want.stride() or not want.numel()
        assert got.shape[: len(done.batch_size)] == done.batch_size


@pytest.mark.parametrize("dim", [None, 0, 1, -1, (0, 1)])
@pytest.mark.parametrize("name", ["mean", "std", "var", "amax", "amin", "nansum", "nanmean"])
def test_reductions_of_a_flat_tree(name, dim):
    """A reduction by the tensor's own method would differ from torch's function in its dimensions."""
    given = one_shape()

    done = getattr(TensorDict(given, [ROWS, COLUMNS]), name)(dim)

    # The last batch dimension is not the last of a leaf.
    dims = {None: (0, 1, 2), -1: 1}.get(dim, dim)
    for key, x in given.items():
        assert torch.equal(done[key], getattr(torch, name)(x, dims))


def test_names_of_nested_trees_follow_their_own_batch():
    """A nested tree with a longer batch would get the names of its parent."""
    inner = TensorDict({"b": torch.zeros(4, 3, 5)}, [4, 3, 5], names=["p", "q", "r"])
    tree = TensorDict({"a": torch.zeros(4, 3), "s": inner}, [4, 3], names=["p", "q"])

    assert tree.unbind(0)[0]["s"].names == ["q", "r"]
    assert tree.split(2)[0]["s"].names == ["p", "q", "r"]
    assert tree.sum(0)["s"].names == ["q", "r"]
    assert torch.stack([tree, tree], 1)["s"].names == ["p", None, "q", "r"]


def test_positions_that_do_not_exist_raise_as_in_torch():
    """The second try, which counts rows from the end, would hide the error of the first."""
    tree = TensorDict({"a": torch.zeros(4, 3)}, [4, 3])

    with pytest.raises(IndexError, match="index 9 is out of bounds for dimension 0 with size 4"):
        tree[torch.tensor([9])]


def test_is_finite_records_nothing_and_leaves_integers_alone():
    """The subtraction behind it would be recorded by autograd, or done to integers in vain."""
    weight = nn.Parameter(torch.tensor([1.0, torch.inf, torch.nan]))
    done = TensorDict({"w": weight, "n": torch.tensor([1, 2, 3])}, [3]).isfinite()

    assert done["w"].tolist() == [True, False, False]
    assert not done["w"].requires_grad
    assert done["n"].tolist() == [True, True, True]


def test_small_masks_are_reduced_together():
    """One mask of many that is not all true would be lost."""
    masks = {f"k{i}": torch.ones(5, dtype=torch.bool) for i in range(20)}
    one_false = TensorDict(masks | {"k7": torch.tensor([True, True, False, True, True])}, [5])
    large = TensorDict({key: mask.repeat(1000) for key, mask in masks.items()})

    assert TensorDict(masks, [5]).all() is True
    assert one_false.all() is False
    assert (~one_false).any() is True
    assert (~TensorDict(masks, [5])).any() is False
    assert large.all() is True


def test_lerp_of_two_trees_is_torchs():
    """The kernel for all leaves would round otherwise, or make every result require a gradient."""
    start = TensorDict({"p": nn.Parameter(torch.randn(5)), "q": torch.randn(5)}, [5])
    end = TensorDict({"p": torch.randn(5), "q": torch.randn(5)}, [5])

    done = start.lerp(end, 0.3)

    assert torch.equal(done["p"], torch.lerp(start["p"], end["p"], 0.3))
    assert torch.equal(done["q"], torch.lerp(start["q"], end["q"], 0.3))
    assert (done["p"].requires_grad, done["q"].requires_grad) == (True, False)


def test_select_and_exclude_keep_the_order_of_the_tree():
    """Looking keys up one by one would give the order in which they are asked for."""
    tree = TensorDict({key: torch.zeros(2) for key in "abcd"}, [2])

    assert list(tree.select("d", "b", "b").keys()) == ["b", "d"]
    assert list(tree.select("d", "x", "a", strict=False).keys()) == ["a", "d"]
    assert tree.select("b", "a", "d", "c") is tree
    assert list(tree.exclude("c", "a", "x").keys()) == ["b", "d"]
    assert tree.exclude("x") is tree


@pytest.mark.parametrize("index", [2, -1, slice(1, 3), slice(None), slice(-2, None), slice(3, 1)], ids=repr)
def test_rows_of_a_flat_tree_keep_names_and_kinds(index):
    """The short way for one int or slice would lose what a tree knows besides its leaves."""
    tree = TensorDict(one_shape(), [ROWS, COLUMNS], names=["rows", "columns"])
    tree = tree.set("w", torch.ones(ROWS, COLUMNS), kind=Kind.BUFFER)

    done = tree[index]

    lead = torch.empty(ROWS, COLUMNS)[index].shape
    assert done.batch_size == lead
    assert done.names == (["columns"] if isinstance(index, int) else ["rows", "columns"])
    assert done.kind("w") is Kind.BUFFER
    assert torch.equal(done["a"], tree["a"][index])


def test_an_int_past_the_batch_raises():
    """The short way would leave the error to the leaf, which may have none."""
    with pytest.raises(
        IndexError, match=r"index: 4 is out of range for batch dimension 0\.\n  expected: -4 <= index < 4"
    ):
        TensorDict(one_shape(), [ROWS, COLUMNS])[4]
