"""Values and shapes of lazy stacks, against loops over the trees and the dense tree."""

import pytest
import torch
from torch import Size

from tdfunc import TensorDict
from tdfunc._lazystack import LazyStack, lazy_stack
from tdfunc.core.errors import BatchSizeError, LeafMismatchError
from tests.helpers import assert_pure, assert_trees_equal
from tests.lazystack.trees import assert_stacks_equal, ragged, tensors_only, uniform

EACH_TREE = [
    lambda t: t + 1,
    lambda t: 1 - t,
    lambda t: t * t,
    lambda t: -t,
    lambda t: t.abs().sqrt(),
    lambda t: t / 2,
    lambda t: 2**t,
    lambda t: t.clone(),
    lambda t: t.detach(),
    lambda t: t.to(torch.float64),
    lambda t: t.apply(lambda x: x + 1),
    lambda t: torch.exp(t),
    lambda t: torch.zeros_like(t),
    lambda t: t.maximum(t * 2),
    lambda t: t == t,
    lambda t: t < 1,
    lambda t: t.named_apply(lambda name, x: x * len(name)),
    lambda t: t + torch.tensor(2.0),
    lambda t: t.sum(dim="feature"),
    lambda t: t.apply(lambda x, y: x + y, t),
    lambda t: t.update({"n": {"k": 1.0}, ("n", "j"): 2.0}, w=3.0),
    lambda t: t.update(t * 0 + 1),
    lambda t: t.delete(("n", "y")),
    lambda t: t.select(("n", "y")),
    lambda t: t.exclude("n", "nope"),
    lambda t: t.pop("x")[1],
    lambda t: t.rename_key("x", "z").rename_key(("n", "y"), "y"),
    lambda t: t.flatten_keys(),
    lambda t: t.flatten_keys().unflatten_keys(),
    lambda t: t.half().clamp(2, 2.5).lerp(t.half() * 3, 0.5),
]


@pytest.mark.parametrize("fn", EACH_TREE)
def test_operations_are_loops_over_the_trees(fn):
    """An operation on every leaf, or an edit, is a loop over the trees."""
    trees = tensors_only(ragged())

    assert_stacks_equal(assert_pure(fn, lazy_stack(trees)), lazy_stack([fn(t) for t in trees]))


OPERANDS = {
    "the batch": lambda size: size,
    "later dimensions": lambda size: size[1:],
    "the first dimension": lambda size: (size[0], 1, 1),
    "an expanded first dimension": lambda size: (1, *size[1:]),
}
CUT = {
    "mul": lambda t, y: t * y,
    "sub": lambda t, y: y - t,
    "torch.add": lambda t, y: torch.add(t, y),
    "lt": lambda t, y: t < y,
}


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shape_of", OPERANDS.values(), ids=OPERANDS)
@pytest.mark.parametrize("fn", CUT.values(), ids=CUT)
def test_tensor_operands_are_cut(dim, shape_of, fn):
    """A tensor over the batch meets the trees that it meets in the dense tree, on either side of an operator."""
    trees = tensors_only(uniform())
    lazy, dense = lazy_stack(trees, dim), torch.stack(trees, dim)
    shape = shape_of(tuple(dense.batch_size))
    operand = torch.arange(1.0, 1 + Size(shape).numel()).reshape(shape)

    assert_trees_equal(fn(lazy, operand).dense(), fn(dense, operand))


def test_operands_of_other_dtypes_promote_alike():
    """A part of an operand promotes a leaf as the whole operand does."""
    lazy = lazy_stack([TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.ones(3)})])
    uniform_ = torch.stack([TensorDict({"x": torch.ones(2)})] * 2)
    operand = torch.tensor([1.0, 2.0], dtype=torch.float64)

    assert (lazy * operand)["x"][0].dtype == (uniform_ * operand)["x"].dtype == torch.float64
    assert (lazy * torch.tensor(2.0, dtype=torch.float64))["x"][0].dtype == torch.float32


def test_operands_over_ragged_trees():
    """A weight for each tree is taken, one for each element of a ragged dimension refused."""
    lazy = lazy_stack([t.exclude("s", "n") for t in ragged()])
    weights = torch.tensor([[1.0], [10.0], [100.0]])
    first, *rest = lazy.trees

    assert_stacks_equal(lazy * weights, lazy_stack([first, rest[0] * 10.0, rest[1] * 100.0]))
    assert_stacks_equal(torch.where(weights > 5, lazy, 0.0), lazy_stack([first * 0, *rest]))
    assert_stacks_equal(torch.where(weights > 5, lazy, -weights), lazy_stack([first * 0 - 1, *rest]))
    assert_stacks_equal(torch.where(weights > 5, lazy, lazy * 2), lazy_stack([first * 2, *rest]))
    with pytest.raises(BatchSizeError, match=r"broadcasts to \[3, -1\]\n.*shape \[3, 2\]"):
        lazy * torch.ones(3, 2)


def test_dense_trees_on_the_right():
    """A dense tree on the right is cut for the trees."""
    trees = tensors_only(uniform())
    lazy, dense = lazy_stack(trees, 1), torch.stack(trees, 1)

    assert_trees_equal((lazy + dense).dense(), dense + dense)


@pytest.mark.parametrize(
    "call",
    [lambda lazy, dense: dense + lazy, lambda lazy, dense: lazy + lazy_stack(list(dense.unbind(0)), 0)],
    ids=["on the right of a dense tree", "along another dimension"],
)
def test_lazy_stacks_that_are_no_operands(call):
    """A stack on the right of a dense tree, or along another dimension, needs `dense()`."""
    trees = tensors_only(uniform())

    with pytest.raises(LeafMismatchError, match=r"a lazy stack has no one tensor(.|\n)*pad\(\)"):
        call(lazy_stack(trees, 1), torch.stack(trees, 1))


@pytest.mark.parametrize(("first", "second"), [((3,), (4,)), ((3, 3), (4,)), ((3, 3), (4, 4)), ((3, 5), (4,))])
def test_joins_do_not_depend_on_equal_lengths(first, second):
    """Trees of a stack may have any lengths, also where those of one stack agree."""
    a, b = lazy_stack(ragged(first)), lazy_stack(ragged(second))

    joined = torch.cat([a, b])
    assert [len(x) for x in joined["x"]] == [*first, *second]
    assert joined.batch_size == Size([len(first) + len(second), -1])
    if len(first) == len(second):
        assert torch.stack([a, b]).batch_size == Size([2, len(first), -1])
        assert [len(x) for x in torch.cat([a, b], 1)["x"]] == [n + m for n, m in zip(first, second, strict=True)]
    else:
        with pytest.raises(LeafMismatchError, match="more than dimension 1"):
            torch.cat([a, b], 1)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: a + b,
        lambda a, b: a + b.dense(),
        lambda a, b: a.lerp(b, 0.5),
        lambda a, b: a.where(torch.ones(2, 3, dtype=torch.bool), b),
        lambda a, b: TensorDict({"n": a}, [2]) * TensorDict({"n": b}, [2]),
        lambda a, b: lazy_stack([a, a]) == lazy_stack([b, b]),
    ],
)
def test_features_do_not_meet_the_batch(fn):
    """The batch of a leaf in one tree is not aligned with the features of another."""
    square = TensorDict({"x": torch.zeros(3, 3)}, [3])
    row = TensorDict({"x": torch.arange(3.0)}, [3])

    with pytest.raises(LeafMismatchError, match=r"x' has another number of features.*\n.*\[3, 3\].*\n.*\[3\]"):
        fn(lazy_stack([square, square]), lazy_stack([row, row]))


@pytest.fixture
def small_and_large():
    """Two stacks, of trees of one row and of trees of three."""
    return [lazy_stack([TensorDict({"x": torch.ones(n, 2)}, [n])] * 2) for n in (1, 3)]


def test_operands_of_one_row_grow(small_and_large):
    """An operand of one row meets each row, and a tree of the stack does if it was expanded."""
    one, three = small_and_large

    assert [x.shape for x in (three + one)["x"]] == [(3, 2), (3, 2)]
    assert (one.expand(2, 3) + three).batch_size == Size([2, 3])


@pytest.mark.parametrize(
    ("inside", "where"),
    [(lambda lazy: lazy, ""), (lambda lazy: TensorDict({"l": lazy}), " at 'l'")],
    ids=["alone", "in a tree"],
)
def test_trees_of_a_stack_do_not_grow(small_and_large, inside, where):
    """An operand does not make a tree of the stack larger."""
    one, three = map(inside, small_and_large)
    message = rf"add: .*lazy stack{where} does not.*\n.*expected: \[1\]\n.*got: +\[3\]\n.*expand"

    with pytest.raises(BatchSizeError, match=message):
        one + three


def test_empty_ragged_stacks():
    """A stack without entries keeps its size, and the sizes of its trees."""
    lazy = lazy_stack(ragged())

    assert lazy.empty().batch_size == lazy.batch_size
    assert [tree.batch_size for tree in lazy.empty().trees] == [tree.batch_size for tree in lazy.trees]


def test_options_of_empty_ragged_stacks():
    """Sub-trees are kept, and names and sizes changed, if that is asked for."""
    lazy = lazy_stack(ragged())

    assert list(lazy.empty(recurse=True).keys()) == ["n"]
    assert lazy.empty(names=[None, "b"]).names == [None, "b"]
    assert lazy.empty(batch_size=[4]).batch_size == Size([4])


def test_empty_trees_around_ragged_stacks():
    """A tree without leaves keeps a lazy stack in it, of the same size."""
    lazy = lazy_stack(ragged())
    around = TensorDict({"lazy": lazy}).empty(recurse=True)

    assert around["lazy"].batch_size == lazy.batch_size
    assert isinstance(around["lazy"], LazyStack)
