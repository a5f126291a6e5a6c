"""Values and shapes of lazy stacks, against loops over the trees and the dense tree."""

import pytest
import torch
from torch import Size

from tdfunc import TensorDict
from tdfunc._lazystack import LazyStack, lazy_stack
from tdfunc.core.errors import BatchSizeError, LeafMismatchError, TreeStructureError
from tests.helpers import assert_pure, assert_trees_equal
from tests.incumbent import tensordict
from tests.lazystack.trees import (
    Message,
    assert_stacks_equal,
    ragged,
    settle,
    tensors_only,
    tree,
    uniform,
)

POINTWISE = [
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
]


@pytest.mark.parametrize("fn", POINTWISE)
def test_pointwise_is_a_loop_over_the_trees(fn):
    """An operation on every leaf would treat some tree otherwise."""
    trees = tensors_only(ragged())

    assert_stacks_equal(assert_pure(fn, lazy_stack(trees)), lazy_stack([fn(t) for t in trees]))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_tensor_operands_are_cut(dim):
    """A tensor over the batch would meet another tree than in the dense tree, on either side of an operator."""
    trees = tensors_only(uniform())
    lazy, dense = lazy_stack(trees, dim), torch.stack(trees, dim)
    shapes = [
        tuple(dense.batch_size),
        tuple(dense.batch_size[1:]),
        (dense.batch_size[0], 1, 1),
        (1, *dense.batch_size[1:]),
    ]
    for shape in shapes:
        operand = torch.arange(1.0, 1 + Size(shape).numel()).reshape(shape)

        for fn in (lambda t, y: t * y, lambda t, y: y - t, lambda t, y: torch.add(t, y), lambda t, y: t < y):
            assert_trees_equal(fn(lazy, operand).dense(), fn(dense, operand))


def test_operands_of_other_dtypes_promote_alike():
    """A part of an operand without dimensions would not promote a leaf as the whole operand does."""
    lazy = lazy_stack([TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.ones(3)})])
    uniform_ = torch.stack([TensorDict({"x": torch.ones(2)})] * 2)
    operand = torch.tensor([1.0, 2.0], dtype=torch.float64)

    assert (lazy * operand)["x"][0].dtype == (uniform_ * operand)["x"].dtype == torch.float64
    assert (lazy * torch.tensor(2.0, dtype=torch.float64))["x"][0].dtype == torch.float32


def test_operands_over_ragged_trees():
    """A weight for each tree would be refused, or one for each element of a ragged dimension be taken."""
    lazy = lazy_stack([t.exclude("s", "n") for t in ragged()])
    weights = torch.tensor([[1.0], [10.0], [100.0]])
    first, *rest = lazy.trees

    assert_stacks_equal(lazy * weights, lazy_stack([first, rest[0] * 10.0, rest[1] * 100.0]))
    assert_stacks_equal(torch.where(weights > 5, lazy, 0.0), lazy_stack([first * 0, *rest]))
    assert_stacks_equal(torch.where(weights > 5, lazy, -weights), lazy_stack([first * 0 - 1, *rest]))
    assert_stacks_equal(torch.where(weights > 5, lazy, lazy * 2), lazy_stack([first * 2, *rest]))
    with pytest.raises(BatchSizeError, match=r"broadcasts to \[3, -1\]\n.*shape \[3, 4\]"):
        lazy * torch.ones(3, 4)


def test_lazy_with_dense_and_other_dims():
    """A dense tree, or a stack along another dimension, would be combined with the wrong rows."""
    trees = tensors_only(uniform())
    lazy, dense = lazy_stack(trees, 1), torch.stack(trees, 1)
    other = lazy_stack(list(dense.unbind(0)), 0)

    assert_trees_equal((lazy + dense).dense(), dense + dense)
    assert_trees_equal((lazy + other).dense(), dense + dense)
    with pytest.raises(TreeStructureError, match="add: the second tree is a lazy stack.*\n.*TensorDict\n.*LazyStack"):
        dense + lazy
    assert_trees_equal(torch.where(torch.ones(dense.batch_size) > 0, lazy, other * 0).dense(), dense)


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "prod"])
@pytest.mark.parametrize("dim", [0, 1])
def test_reductions(name, dim):
    """A reduction would mix trees, or leave a dimension out."""
    trees = [t.exclude("s").to(torch.float64) for t in uniform()]
    lazy, dense = lazy_stack(trees, dim), torch.stack(trees, dim)

    for over in {0, 1, 2, (0, 1, 2)} - {dim, (0, 1, 2)}:
        for keepdim in (False, True):
            result, expected = getattr(lazy, name)(over, keepdim), getattr(dense, name)(over, keepdim)
            assert_trees_equal(settle(result), expected)
    assert_trees_equal(getattr(lazy, name)(), getattr(dense, name)())
    torch.testing.assert_close(getattr(lazy, name)(reduce=True), getattr(dense, name)(reduce=True))


def test_reductions_of_ragged_trees():
    """A reduction of a ragged dimension would need padding, or count it."""
    lazy = lazy_stack([t.exclude("s").to(torch.float64) for t in ragged()])

    assert torch.equal(lazy.mean(1)["x"][1], lazy[1]["x"].mean(0))
    torch.testing.assert_close(lazy.std()["x"], torch.cat(lazy["x"]).std())
    assert lazy.isfinite().all()
    assert not (lazy == lazy + 1).any()


@pytest.mark.parametrize("call", ["cat_tensors", "stack_tensors"])
@pytest.mark.parametrize("dim", [2, -1, -2])
@pytest.mark.parametrize("stack_dim", [0, 1])
def test_joined_entries_are_those_of_the_dense_tree(call, dim, stack_dim):
    """A dimension would be counted in each tree instead of in the stack."""
    trees = [TensorDict({"a": torch.rand(2, 3, 3), "b": torch.rand(2, 3, 3)}, [2]) for _ in range(4)]
    lazy = lazy_stack(trees, stack_dim)

    joined = getattr(lazy, call)("a", "b", out_key="out", dim=dim)

    assert_trees_equal(joined.dense(), getattr(lazy.dense(), call)("a", "b", out_key="out", dim=dim))


def test_joined_entries_of_stacks_of_stacks():
    """The dimensions of outer stacks would not be counted."""
    trees = [TensorDict({"a": torch.rand(2, 3), "n": {"b": torch.rand(2, 3)}}, [2]) for _ in range(4)]
    lazy = lazy_stack([lazy_stack(trees[:2]), lazy_stack(trees[2:])])

    joined = lazy.cat_tensors("a", ("n", "b"), out_key="out", dim=3)

    assert_trees_equal(joined.dense(), lazy.dense().cat_tensors("a", ("n", "b"), out_key="out", dim=3))


def test_joined_entries_have_the_same_number_of_dimensions():
    """`torch.cat` passes over empty tensors of one dimension, so a stack would join what the dense tree refuses."""
    row = TensorDict({"a": torch.rand(2, 3), "b": torch.zeros(0)})
    lazy = lazy_stack([lazy_stack([row, row]), lazy_stack([row, row])])

    for stack in (lazy[0], lazy):
        with pytest.raises(LeafMismatchError):
            stack.dense().cat_tensors("a", "b", out_key="out", dim=-1)
        with pytest.raises(
            LeafMismatchError, match=rf"numbers of dim.*\n.*{stack.ndim + 2} .*'a'\n.*'b': {stack.ndim + 1}"
        ):
            stack.cat_tensors("a", "b", out_key="out", dim=-1)


@pytest.mark.parametrize("depth", [1, 2])
def test_operands_of_trees_without_dimensions(depth):
    """An operand that is cut down to a number would end in an error of torch's reshape."""
    lazy = lazy_stack([TensorDict({"x": torch.tensor(i)}) for i in range(3)])
    lazy = lazy_stack([lazy, lazy]) if depth == 2 else lazy
    mask = torch.tensor([True, False, True]).expand(lazy.batch_size)

    assert torch.equal(lazy.where(mask, 7).dense()["x"], lazy.dense()["x"].where(mask, 7))
    assert torch.equal(lazy.masked_fill(mask, 7).dense()["x"], lazy.dense()["x"].masked_fill(mask, 7))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: t.sum(0), r"sum: a lazy stack has no one shape.*\n.*\n.*\[3, -1\], stacked along dimension 0"),
        (lambda t: t.sum(keepdim=True), r"sum\(keepdim=True\)"),
        (lambda t: t.reshape(-1), "reshape: a lazy stack has no one shape"),
        (lambda t: t.flatten(), "reshape: "),
        (lambda t: t.view(9), "reshape: "),
        (lambda t: t.cumsum(0), "cumsum: a lazy stack has no one shape"),
        (lambda t: t.softmax(-2), "softmax: "),
        (lambda t: t.apply(lambda x: x.sum(0), batch_size=[3]), "apply: "),
        (lambda t: torch.stack([t, t]).reshape(3, 2, -1), "reshape: "),
    ],
)
def test_what_needs_one_shape(call, text):
    """An operation that needs one shape would give something for unequal trees."""
    with pytest.raises(LeafMismatchError, match=text):
        call(lazy_stack(tensors_only(ragged())))


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.split(2, 1),
        lambda t: t.chunk(2, 1),
        lambda t: t.unbind(1),
        lambda t: torch.split(t, 2, 1),
        lambda t: list(t.permute(1, 0)),
        lambda t: len(t.permute(1, 0)),
    ],
)
def test_ragged_dimensions_have_no_length(call):
    """A loop over a ragged dimension would run zero times."""
    with pytest.raises(BatchSizeError, match=r"is ragged, it has no one size.*\n.*one size\n.*-1"):
        call(lazy_stack(ragged()))


def test_lone_values_cannot_be_reduced():
    """Non-tensor values that differ would be dropped by a reduction over all trees, or equal ones lost."""
    with pytest.raises(LeafMismatchError, match="sum: 's' has other values.*\n.*one value for all\n.*several"):
        lazy_stack(ragged()).sum()
    assert lazy_stack([t.set("s", "same") for t in ragged()]).sum()["s"] == "same"


SHAPES = [
    lambda t: t.unsqueeze(0),
    lambda t: t.unsqueeze(1),
    lambda t: t.unsqueeze(-1),
    lambda t: t.unsqueeze(2).squeeze(2),
    lambda t: t.permute(2, 0, 1),
    lambda t: t.permute(1, 2, 0),
    lambda t: t.transpose(0, 1),
    lambda t: t.transpose(-1, 0),
    lambda t: t.expand(5, *t.batch_size),
    lambda t: t.unsqueeze(0).expand(4, -1, -1, -1),
    lambda t: t[:, :1].expand(-1, 5, -1),
    lambda t: t.split(2, 0)[0],
    lambda t: t.split([1, t.batch_size[1] - 1], 1)[1],
    lambda t: t.chunk(2, 2)[0],
    lambda t: t.unbind(1)[1],
    lambda t: t[:1].squeeze(),
    lambda t: t[:, :1].squeeze(1),
    lambda t: t[:1].expand(3, -1, -1),
    lambda t: torch.cat([t, t], 0),
    lambda t: torch.cat([t, t[:, :1]], 1),
    lambda t: torch.cat([t, t], 2),
    lambda t: torch.stack([t, t], 0),
    lambda t: torch.stack([t, t * 2], 2),
    lambda t: torch.stack([t, t], 3),
]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("fn", SHAPES)
def test_shapes_are_those_of_the_dense_tree(dim, fn):
    """A shape operation would put the trees along another dimension."""
    trees = tensors_only(uniform())
    lazy, dense = lazy_stack(trees, dim), torch.stack(trees, dim)

    assert_trees_equal(settle(fn(lazy)), fn(dense))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_reshape_that_regroups_trees(dim):
    """Regrouping whole trees would be refused, or mix them up."""
    trees = tensors_only(uniform(6))
    lazy, dense = lazy_stack(trees, dim), torch.stack(trees, dim)
    split = lazy.unflatten(dim, (2, 3))

    assert isinstance(split, LazyStack)
    assert_trees_equal(settle(split), dense.unflatten(dim, (2, 3)))
    assert_trees_equal(settle(split.flatten(dim, dim + 1)), dense)
    assert lazy.reshape(dense.batch_size) is lazy


def test_ragged_stacks_of_stacks():
    """A stack of ragged stacks would lose a level, or need equal numbers of trees."""
    a, b = lazy_stack(ragged((2, 4))), lazy_stack(ragged((1, 3, 2)))
    both = lazy_stack([a, b])

    assert both.batch_size == Size([2, -1, -1])
    assert both[1, 2].batch_size == Size([2])
    assert [len(x) for x in both["x"][1]] == [1, 3, 2]
    assert both.flatten(0, 1).batch_size == Size([5, -1])
    assert [len(x) for x in torch.cat([a, b])["x"]] == [2, 4, 1, 3, 2]
    assert torch.stack([a, a * 2]).batch_size == Size([2, 2, -1])
    assert both.numel() == 12
    assert repr(both).count("LazyStack(") == 2


def test_cat_of_agreeing_and_ragged_lengths():
    """Whether lengths agree in one of the parts would decide whether they can be joined."""
    equal, unequal = lazy_stack(ragged((3, 3))), lazy_stack(ragged((2, 4)))

    assert torch.cat([equal, unequal]).batch_size == Size([4, -1])
    assert torch.stack([equal, unequal]).batch_size == Size([2, 2, -1])
    assert torch.cat([equal, unequal], 1)[1].batch_size == Size([7])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda t: torch.cat([t, t[:2]], 1), LeafMismatchError, r"\[3, -1\]\n.*\[2, -1\]"),
        (lambda t: torch.stack([t, t.permute(1, 0)]), TreeStructureError, "along dimension 0\n.*along dimension 1"),
        (lambda t: torch.stack([t, t.pad()]), TreeStructureError, "LazyStack\n.*TensorDict\n.*dense"),
        (
            lambda t: torch.stack([TensorDict({"a": {"b": t.pad()}}), TensorDict({"a": {"b": t}})]),
            TreeStructureError,
            "under 'a.b'.*\n.*TensorDict\n.*LazyStack\n.*lazy_stack",
        ),
        (lambda t: lazy_stack([t, tree(2)]), TreeStructureError, "LazyStack\n.*TensorDict"),
        (
            lambda t: torch.cat([t, t.set("x", {"a": 1.0})]),
            TreeStructureError,
            "'x' is not the same.*\n.*a tensor\n.*a tree",
        ),
    ],
)
def test_bad_joins(call, error, text):
    """Stacks that cannot be joined would be."""
    with pytest.raises(error, match=text):
        call(lazy_stack(ragged()))


def test_stack_of_unequal_trees_names_the_leaf():
    """torch.stack of unequal trees would not say which leaf, which shapes, or what to write instead."""
    trees = [TensorDict({"a": {"b": torch.zeros(n)}, "c": torch.zeros(1)}) for n in (2, 3)]

    with pytest.raises(LeafMismatchError, match=r"'a.b' differs.*\n.*shape \[2\]\n.*shape \[3\]\n.*lazy_stack"):
        torch.stack(trees)


def theirs(trees, dim):
    """The same stack in tensordict."""
    return tensordict.lazy_stack(
        [tensordict.TensorDict({"x": t["x"], "n": {"y": t["n", "y"]}}, t.batch_size) for t in trees], dim
    )


SAME = [
    lambda t: t,
    lambda t: t + 1,
    lambda t: t[0],
    lambda t: t[-1],
    lambda t: t[1:],
    lambda t: t.apply(lambda x: x * 2),
    lambda t: t.select("x"),
    lambda t: t.unsqueeze(0),
    lambda t: t.unsqueeze(-1),
    lambda t: t.transpose(0, 1),
    lambda t: t.exclude("n"),
    lambda t: t.clone(),
    lambda t: t[torch.tensor([2, 0])],
    lambda t: t.unbind(0)[1],
    lambda t: t.split(2, 0)[0],
]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("fn", SAME)
def test_as_tensordict(dim, fn):
    """A call that tensordict has would give another batch size or other values here, without being listed."""
    trees = [
        TensorDict({"x": torch.arange(12.0).reshape(4, 3) + i, "n": {"y": torch.arange(4) + i}}, [4]) for i in range(3)
    ]
    mine, other = fn(lazy_stack(trees, dim)), fn(theirs(trees, dim))

    assert mine.batch_size == other.batch_size
    dense = settle(mine)
    for key in other.keys(True, True):
        assert torch.equal(dense[key], other.get(key))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "fn", [lambda t: t, lambda t: t[0], lambda t: t[:, 1], lambda t: t[1:], lambda t: t + 1, lambda t: t.unsqueeze(0)]
)
def test_ragged_as_tensordict(dim, fn):
    """Ragged stacks would show other sizes than tensordict's, or hold other trees."""
    try:
        other = fn(theirs(ragged(), dim))
    except (RuntimeError, IndexError, ValueError):
        pytest.skip("tensordict refuses it")
    mine = fn(lazy_stack(ragged(), dim))

    assert mine.batch_size == other.batch_size
    assert [t.batch_size for t in _rows(mine)] == [t.batch_size for t in _rows(other)]


def _rows(stack):
    if isinstance(stack, LazyStack):
        return [row for t in stack.trees for row in _rows(t)]
    if isinstance(stack, tensordict.LazyStackedTensorDict):
        return [row for t in stack.tensordicts for row in _rows(t)]
    return [stack]


def test_padding_as_tensordict():
    """Padding would differ from tensordict's pad_sequence, or lists from its tolist."""
    trees = tensors_only(ragged())
    padded = tensordict.pad_sequence(
        [tensordict.TensorDict(t.to_dict(), t.batch_size) for t in trees], return_mask=True
    )
    mine, masks = lazy_stack(trees).pad(return_mask=True)

    assert torch.equal(mine["x"], padded["x"])
    assert torch.equal(mine["n", "y"], padded["n", "y"])
    assert torch.equal(masks["x"], padded["masks", "x"])
    assert repr(lazy_stack(trees).tolist()) == repr(theirs(trees, 0).tolist())


@pytest.mark.parametrize("name", ["sum", "norm", "logsumexp", "nansum", "nanmean", "std"])
def test_reductions_of_everything(name, generator):
    """Trees of unequal lengths would be reduced one by one, or each counted alike."""
    parts = [torch.randn(n, 2, generator=generator) for n in (2, 4)]
    stack = lazy_stack([TensorDict({"x": part}, [len(part)]) for part in parts])

    torch.testing.assert_close(getattr(stack, name)()["x"], getattr(TensorDict({"x": torch.cat(parts)}), name)()["x"])


@pytest.mark.parametrize("name", ["sum", "prod", "std"])
def test_reductions_of_everything_in_stacks_of_stacks(name, generator):
    """A stack of stacks has a tuple for each key, which is no tensor."""
    trees = [TensorDict({"x": torch.rand(3, 2, generator=generator), "n": {"s": "red"}}, [3]) for _ in range(4)]
    stack = lazy_stack([lazy_stack(trees[:2]), lazy_stack(trees[2:])])
    dense = stack.dense().exclude("n")

    torch.testing.assert_close(getattr(stack, name)()["x"], getattr(dense, name)()["x"])
    assert stack.sum()["n", "s"] == "red"


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
    """The batch of a leaf in one tree of a stack would be aligned with the features of another: wrong numbers."""
    square = TensorDict({"x": torch.zeros(3, 3)}, [3])
    row = TensorDict({"x": torch.arange(3.0)}, [3])

    with pytest.raises(LeafMismatchError, match=r"x' has another number of features.*\n.*\[3, 3\].*\n.*\[3\]"):
        fn(lazy_stack([square, square]), lazy_stack([row, row]))


def test_trees_of_a_stack_do_not_grow():
    """A tree of batch size 1 would hold leaves of three rows."""
    one, three = (lazy_stack([TensorDict({"x": torch.ones(n, 2)}, [n])] * 2) for n in (1, 3))

    assert [x.shape for x in (three + one)["x"]] == [(3, 2), (3, 2)]
    with pytest.raises(BatchSizeError, match=r"add: .*\n.*expected: \[1\]\n.*got: +\[3\]\n.*expand"):
        one + three
    assert (one.expand(2, 3) + three).batch_size == Size([2, 3])


def test_reductions_of_everything_keep_the_class():
    """What one typed tree gives as an instance, a stack of them would give as an open tree."""
    stack = lazy_stack([Message("a", torch.ones(n), batch_size=[n]) for n in (2, 3)])

    for made in (stack.sum(), lazy_stack([stack, stack]).sum(), TensorDict({"m": stack}).sum()["m"]):
        assert type(made) is Message
        assert made.role == "a"
    assert stack.sum().ids == 5


def test_empty_ragged_stacks():
    """A tree without entries would have -1 in its batch size."""
    lazy = lazy_stack(ragged())
    around = TensorDict({"lazy": lazy}).empty(recurse=True)

    assert lazy.empty().batch_size == lazy.batch_size
    assert [tree.batch_size for tree in lazy.empty().trees] == [tree.batch_size for tree in lazy.trees]
    assert list(lazy.empty(recurse=True).keys()) == ["n"]
    assert lazy.empty(names=["a", "b"]).names == ["a", "b"]
    assert lazy.empty(batch_size=[4]).batch_size == Size([4])
    assert around["lazy"].batch_size == lazy.batch_size
    assert isinstance(around["lazy"], LazyStack)


def test_reshape_of_stacks_of_stacks_to_fewer_dimensions():
    """A shape shorter than where the trees lie would end in an error of a tuple."""
    inner = lazy_stack([TensorDict({"x": torch.ones(1)}, [1], names=["row"])], 1)
    lazy = lazy_stack([inner], 1)

    assert lazy.reshape(1).batch_size == Size([1])
    assert lazy.reshape(1).names == [None]
    assert torch.equal(lazy.reshape(1)[0]["x"], torch.tensor(1.0))
    with pytest.raises(LeafMismatchError, match=r"reshape: a lazy stack has no one shape.*\n.*\n.*\[1, 1, 1\]"):
        lazy.reshape(())


def test_gather_in_ragged_trees():
    """A row would come from another tree, or a position outside of the batch count from its end."""
    lazy = lazy_stack(tensors_only(ragged((2, 4, 3))))
    trees = lazy.trees
    found = lazy.gather(1, torch.tensor([[1, 0, 1], [3, 2, 0]]))

    assert found.batch_size == Size([2, 3])
    assert torch.equal(found[1]["x"], trees[1]["x"][[3, 2, 0]])
    assert torch.equal(lazy.gather(0, torch.tensor([[2, 1]]))[0, 1]["x"], trees[1]["x"][1])
    for number in (3, -1):
        what = rf"gather: {number} is out of range for batch dimension 0, along which the trees lie.\n.*0 <= index < 3"
        with pytest.raises(IndexError, match=what):
            lazy.gather(0, torch.tensor([[number]]))
    what = r"gather: the index reaches further than the batch.\n.*at most \[3, -1\], but along dimension 1\n.*\[4, 1\]"
    with pytest.raises(IndexError, match=what):
        lazy.gather(1, torch.zeros(4, 1, dtype=torch.int64))


@pytest.mark.parametrize("dim", [0, 1, 3])
@pytest.mark.parametrize(
    "fn",
    [
        lambda t: t.reshape(-1),
        lambda t: t.cumsum(t.batch_dims - 1),
        lambda t: t.gather(1, torch.tensor([[1, 0, 1]])),
        lambda t: t.gather(0, torch.tensor([[1, 0]])),
    ],
)
def test_shapes_of_a_stack_inside_a_tree(fn, dim):
    """An operation on the tree around a lazy stack would take the stack's own dimensions for its batch."""
    inner = lazy_stack([TensorDict({"x": torch.randn(2, 2, 4)}, [2, 2, 4]) for _ in range(2)], dim)
    around = TensorDict({"l": inner}, [2, 2])

    if dim == 1 and "cumsum" in fn.__code__.co_names:
        with pytest.raises(LeafMismatchError, match="cumsum: a lazy stack has no one shape"):
            fn(around)
        return
    assert_trees_equal(settle(fn(around).get("l")), fn(around.set("l", inner.dense())).get("l"))


@pytest.mark.parametrize("call", [torch.add, torch.maximum, lambda a, b: torch.where(torch.zeros(2, 2) > 0, a, b)])
def test_keys_that_only_some_trees_of_stacks_of_stacks_have(call):
    """Trees in which another key is missing would end in an error of reading one."""
    full, empty = TensorDict({"a": torch.tensor(1.0)}), TensorDict({})
    first = lazy_stack([lazy_stack([full, full]), lazy_stack([full, empty])], 1)
    second = lazy_stack([lazy_stack([full, empty]), lazy_stack([full, empty])], 1)

    with pytest.raises(TreeStructureError, match=r"the trees have different keys\.\n.*\['a'\]\n.*\[\]"):
        call(first, second)
    assert call(first, first).batch_size == Size([2, 2])
