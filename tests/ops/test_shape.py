"""Shapes, indices, joins and cuts of the batch, against torch on every leaf."""

import numpy as np
import pytest
import torch
from torch import Size

from tdfunc import (
    BatchSizeError,
    Kind,
    LeafMismatchError,
    NonTensorStack,
    TensorDict,
    TreeStructureError,
    cat,
    stack,
)
from tests.helpers import assert_trees_equal


@pytest.fixture
def td():
    """A batch of two dimensions, a nested one of three, names and a string."""
    leaves = {"a": torch.arange(12).reshape(2, 3, 2), "n": TensorDict({"b": torch.randn(2, 3, 4, 5)}, [2, 3, 4])}
    return TensorDict(leaves | {"s": "x"}, [2, 3], names=["r", "c"])


def test_sizes(td):
    """The size of the batch would be told otherwise than torch tells it."""
    assert td.shape == td.size() == td.batch_size == Size([2, 3])
    assert (td.size(-1), td.dim(), td.ndim, td.batch_dims, td.numel(), len(td)) == (3, 2, 2, 2, 6, 2)
    assert TensorDict().numel() == 1


def test_views_and_copies(td):
    """An operation that torch does without copying would copy."""
    for view in (td.permute(1, 0), td.view(6), td.unsqueeze(0), td[1:], td.expand(2, 2, 3), td.split(1)[0]):
        assert view["a"].untyped_storage().data_ptr() == td["a"].untyped_storage().data_ptr()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        td.permute(1, 0).view(6)
    assert td.view(torch.int32)["a"].dtype is torch.int32


def test_0_and_empty():
    """A batch without dimensions or rows would be handled otherwise than a tensor."""
    td, none = TensorDict({"a": torch.tensor(1.0)}), TensorDict({"a": torch.zeros(0, 2)}, [0])

    assert td.flatten().batch_size == td.reshape(1).batch_size == Size([1])
    assert td.flatten().squeeze().batch_size == td.flatten().reshape(()).batch_size == Size([])
    assert td.unsqueeze(0).batch_size == Size([1])
    assert [part.batch_size for part in none.chunk(3)] == [x.shape[:1] for x in torch.zeros(0, 2).chunk(3)]
    assert none.unbind(0) == ()
    assert none.split(2)[0].batch_size == Size([0])
    assert torch.stack([td, td])["a"].shape == Size([2])


@pytest.mark.parametrize(("start", "end"), [(0, -1), (-1, 0), (0, 1), (1, 1), (-2, 0), (0, -2)])
def test_flatten_of_no_dimensions_is_that_of_torch(start, end):
    """A dimension that torch refuses for a number would be taken for a tree without batch dimensions."""
    leaf = torch.tensor(1.0)
    try:
        wanted = leaf.flatten(start, end).shape
    except IndexError:
        wanted = IndexError

    for tree in (TensorDict({"a": leaf}), TensorDict()):
        try:
            found = tree.flatten(start, end).batch_size
        except IndexError:
            found = IndexError
        assert found == wanted


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t.reshape(5), RuntimeError, r"reshape(.|\n)*6 elements(.|\n)*\(5,\)"),
        (lambda t: t.flatten(1, 0), RuntimeError, r"start <= end(.|\n)*1 > 0"),
        (lambda t: t.flatten(2), IndexError, "batch dimension 2 does not exist"),
        (lambda t: t.unflatten(0, (3, 2)), RuntimeError, r"unflatten(.|\n)*2 elements(.|\n)*\(3, 2\)"),
        (lambda t: t.permute(0, 0), ValueError, r"\[0, 1\](.|\n)*\[0, 0\]"),
        (lambda t: t.permute(0), ValueError, r"\[0, 1\](.|\n)*\[0\]"),
        (lambda t: t.transpose(0, 2), IndexError, r"transpose(.|\n)*-2 <= dim < 2"),
        (lambda t: t.unsqueeze(3), IndexError, "unsqueeze: batch dimension 3"),
        (lambda t: t.squeeze(2), IndexError, "squeeze: batch dimension 2"),
        (lambda t: t.expand(3), RuntimeError, r"at least 2 for batch size \[2, 3\](.|\n)*\[3\]"),
        (lambda t: t.expand(2, 4), RuntimeError, r"\[2, 3\](.|\n)*\[2, 4\]"),
        (lambda t: t.split(0), ValueError, "1 or more(.|\n)*0"),
        (lambda t: t.split([1, 2]), ValueError, r"2(.|\n)*\[1, 2\] \(sum 3\)"),
        (lambda t: t.split(1, 2), IndexError, "split: batch dimension 2"),
        (lambda t: t.chunk(0), ValueError, "1 or more(.|\n)*0"),
        (lambda t: t.unbind(2), IndexError, "unbind: batch dimension 2"),
        (lambda t: t.size(2), IndexError, "size: batch dimension 2"),
        (lambda t: t[2], IndexError, "2 is out of range"),
        (lambda t: t["a", 0], IndexError, r"'a' in \('a', 0\)(.|\n)*td\[key\]\[index\]"),
        (lambda t: t.gather(0, torch.tensor([0])), ValueError, r"2 dimensions(.|\n)*\[1\]"),
        (lambda t: t.gather(2, torch.zeros(2, 3, dtype=torch.long)), IndexError, "gather: batch dimension 2"),
        (lambda t: t.masked_select(torch.tensor([1, 0])), TypeError, r"bool(.|\n)*int64"),
        (lambda t: t.masked_select(torch.tensor([True])), IndexError, r"\[2\](.|\n)*\[1\]"),
        (lambda t: t.where(torch.tensor([True, False]), 0), ValueError, r"\[2, 3\](.|\n)*torch.bool of shape \[2\]"),
        (lambda t: t.where(torch.zeros(2, 3), 0), ValueError, r"bool(.|\n)*torch.float32"),
        (lambda t: t.where(torch.tensor([[True, False]]), 0), BatchSizeError, r"\[2, 3\](.|\n)*\[1, 2\]"),
        (
            lambda t: t.where(torch.tensor(True), t.exclude("s")),
            TreeStructureError,
            "where: the trees have different keys",
        ),
        (lambda t: bool(t), RuntimeError, "neither true nor false"),
        (lambda t: len(t[0, 0]), TypeError, r"batch size \[\] has no length"),
        (lambda t: iter(t[0, 0]), TypeError, r"batch size \[\] has no rows"),
    ],
)
def test_refused(td, call, error, message):
    """A shape, index or cut that does not fit would be accepted, or the message not name both."""
    with pytest.raises(error, match=message):
        call(td)


def test_names_are_checked_at_birth():
    """A constructor would take names that do not fit the batch."""
    with pytest.raises(ValueError, match=r"2 names(.|\n)*\('a',\)"):
        TensorDict({}, [1, 2], names=["a"])


def of_kind(tree, kind):
    """The tree with a kind for leaf a."""
    return tree.set("a", tree["a"], kind=kind)


JOIN_ERRORS = [
    (lambda t: [], ValueError, "no trees(.|\n)*one or more"),
    (lambda t: [t, torch.zeros(2, 3)], TypeError, "trees(.|\n)*Tensor"),
    (lambda t: t[0, 0], TypeError, r"one iterable(.|\n)*a list of trees(.|\n)*one TensorDict(.|\n)*\(\[a, b\]\)"),
    (lambda t: 3, TypeError, "one iterable(.|\n)*a list of trees(.|\n)*one int"),
    (lambda t: [t, t.exclude("a")], TreeStructureError, r"different keys\.(.|\n)*\['a', 'n', 's'\](.|\n)*\['n', 's'\]"),
    (lambda t: [t, t.exclude(("n", "b"))], TreeStructureError, r"keys under 'n'(.|\n)*\['b'\](.|\n)*\[\]"),
    (lambda t: [t, t.exclude("a"), t.set("n", torch.zeros(2, 3))], TreeStructureError, r"keys\.(.|\n)*\['n', 's'\]"),
    (lambda t: [t.set("e", {"x": 1.0}), t.set("e", {}), t.set("e", 1.0)], TreeStructureError, r"keys under 'e'"),
    (lambda t: [t, t.set("a", t["a"].float())], LeafMismatchError, r"'a' differs(.|\n)*int64(.|\n)*float32"),
    (lambda t: [t, t.set(("n", "b"), t["n", "b"][..., :2])], LeafMismatchError, r"'n.b'(.|\n)*4, 5\](.|\n)*4, 2\]"),
    (lambda t: [t, t.set("n", torch.zeros(2, 3))], TreeStructureError, r"'n' is a tree in(.|\n)*\['b'\](.|\n)*float32"),
    (lambda t: [t, t.set("s", torch.zeros(2, 3))], TreeStructureError, r"'s' is non-(.|\n)*data=x(.|\n)*float32"),
    (lambda t: [of_kind(t, Kind.BUFFER), of_kind(t, Kind.PARAMETER)], LeafMismatchError, "'a'(.|\n)*BUF(.|\n)*PARAM"),
]  # fmt: skip


@pytest.mark.parametrize("join", [stack, cat])
@pytest.mark.parametrize(
    "given", [iter, tuple, lambda trees: (tree for tree in trees), lambda trees: dict.fromkeys(trees)]
)
def test_joins_take_any_iterable(td, join, given):
    """An iterator, which is good for one look, would be counted as empty: a batch size of 0 around full leaves."""
    trees = [td, td.clone(), td.clone()]

    assert_trees_equal(join(given(trees)), join(trees))


def test_a_tree_is_an_iterable_of_its_rows(td):
    """`DataLoader(tree, collate_fn=torch.stack)`, which hands over a tree for a batch, would raise."""
    assert_trees_equal(stack(td), stack(list(td)))
    assert_trees_equal(cat(td), cat(list(td)))


@pytest.mark.parametrize("join", [stack, cat])
@pytest.mark.parametrize(("trees", "error", "message"), JOIN_ERRORS)
def test_joins_that_are_refused(td, join, trees, error, message):
    """Trees that do not fit would be joined, promoted or untied, or the message not name the leaf and both."""
    with pytest.raises(error, match=f"{join.__name__}: (.|\n)*{message}"):
        join(trees(td))


def test_batches_that_do_not_join(td):
    """Trees of other batch sizes would be joined."""
    with pytest.raises(LeafMismatchError, match=r"stack(.|\n)*\[2, 3\](.|\n)*\[2, 2\]"):
        stack([td, td[:, :2]])
    with pytest.raises(LeafMismatchError, match=r"cat(.|\n)*dimension 0(.|\n)*\[2, 3\](.|\n)*\[2, 2\]"):
        cat([td, td[:, :2]])
    with pytest.raises(IndexError, match="stack: batch dimension 3"):
        stack([td, td], 3)
    with pytest.raises(IndexError, match="cat: batch dimension 2"):
        cat([td, td], 2)


def test_joins_of_words(td):
    """Stacked values would become one, or equal values of a longer batch many."""
    assert isinstance(stack([td, td])._get("s"), NonTensorStack)
    assert cat([td, td])["s"] == "x"
    assert cat([td, td.set("s", "y")])["s"] == [["x"] * 3] * 2 + [["y"] * 3] * 2


def test_gradients_flow(td):
    """A join or cut would cut the graph."""
    leaf = torch.ones(3, requires_grad=True)
    tree = TensorDict({"a": leaf}, [3])
    torch.stack([tree, tree[[0, 0, 1]]]).reshape(-1).unbind(0)[3]["a"].backward()

    assert leaf.grad.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    "tree",
    [TensorDict({}, [2, 3]), TensorDict({"n": {"e": {}}}, [2, 3]), TensorDict({"s": "red"}, [2, 3])],
    ids=["empty", "nested", "data"],
)
def test_positions_are_checked_without_tensors(tree):
    """An index that torch refuses would pass where no tensor is there to refuse it."""
    for bad in (torch.tensor([2]), [0, -3], np.array([5]), torch.tensor(2), (slice(None), [3])):
        with pytest.raises(IndexError, match=r"(2|-3|5|3) is out of range for batch dimension (0|1)(.|\n)*-[23] <= "):
            tree[bad]
    assert tree[[1, -2, 0]].batch_size == Size([3, 3])
    assert tree[:, torch.tensor([[2], [-3]])].batch_size == Size([2, 2, 1])
    assert tree[torch.zeros(0, dtype=torch.long)].batch_size == Size([0, 3])


@pytest.mark.parametrize("size", [(2, 3), (0, 3), (2, 0), (0, 0), (1, 1)])
def test_positions_without_tensors_are_those_of_torch(size):
    """A tree without tensors would refuse what torch takes for a tensor of its batch size, or the other way round."""
    tree, plain = TensorDict({}, size), torch.zeros(size)
    rows = [torch.tensor(0), torch.tensor(5), torch.tensor([0, -1]), torch.tensor([[7]]), torch.zeros(0).long()]

    for index in [
        *rows,
        *[(row, slice(9, None)) for row in rows],
        *[(slice(None), row) for row in rows],
        (rows[2], rows[3]),
    ]:
        try:
            expected = plain[index].shape
        except IndexError:
            with pytest.raises(IndexError, match="index: .*batch dimension"):
                tree[index]
        else:
            assert tree[index].batch_size == expected


def test_positions_that_have_no_values_are_not_read():
    """An index on another device, or one that a transformation maps, would be read or make the call fail."""
    tree, seen = TensorDict({}, [2, 3]), []

    def fn(index):
        seen.append(tree[index].batch_size)
        return index

    torch.vmap(fn)(torch.tensor([[7, 8]]))
    torch.compile(fn, backend="eager", fullgraph=True)(torch.tensor([0, 1]))

    assert tree[torch.zeros(4, dtype=torch.long, device="meta")].batch_size == Size([4, 3])
    assert seen == [Size([2, 3])] * 2
