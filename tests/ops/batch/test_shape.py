"""Shapes, cuts, joins and rearrangements of the batch: each leaf is as torch makes it, whatever else the tree holds."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size
from torch.nn.functional import pad as pad_leaf

from tdfunc import NonTensorStack, TensorDict, cat, stack
from tdfunc.core.collection import iter_leaves
from tdfunc.core.ties import by_identity
from tdfunc.ops.batch.rearrange import pad
from tests.helpers import assert_pure, examples
from tests.strategies import DTYPES, trees

COUNTS = torch.tensor([1, 0, 2])
PAIRS = torch.tensor([[0, 2]] * 2)
MASK = torch.tensor([[True, True, False]] * 2)


def ones(x):
    """Sizes of 1 for the feature dimensions of a leaf."""
    return (1,) * (x.dim() - 2)


def gathered(x):
    """`torch.gather` of whole rows along the second dimension."""
    return torch.gather(x, 1, PAIRS.reshape(2, 2, *ones(x)).expand(2, 2, *x.shape[2:]))


# name -> (on a tree of batch [2, 3] with the names r and c, on a leaf, the names of the result)
CASES = {
    "reshape": (lambda t: t.reshape(-1), lambda x: x.reshape(6, *x.shape[2:]), [None]),
    "reshape a tuple": (lambda t: t.reshape((3, 2)), lambda x: x.reshape(3, 2, *x.shape[2:]), [None, None]),
    "flatten": (lambda t: t.flatten(), lambda x: x.flatten(0, 1), [None]),
    "flatten one": (lambda t: t.flatten(1, 1), lambda x: x, ["r", "c"]),
    "unflatten": (lambda t: t.unflatten(1, (3, -1)), lambda x: x.unflatten(1, (3, 1)), ["r", None, None]),
    "permute": (lambda t: t.permute((-1, -2)), lambda x: x.transpose(0, 1), ["c", "r"]),
    "transpose": (lambda t: t.transpose(0, -1), lambda x: x.transpose(0, 1), ["c", "r"]),
    "unsqueeze": (lambda t: t.unsqueeze(-1), lambda x: x.unsqueeze(2), ["r", "c", None]),
    "unsqueeze first": (lambda t: t.unsqueeze(0), lambda x: x.unsqueeze(0), [None, "r", "c"]),
    "squeeze nothing": (lambda t: t.squeeze(), lambda x: x, ["r", "c"]),
    "squeeze": (lambda t: t[:1, :1].squeeze((0, 1)), lambda x: x[0, 0], []),
    "expand": (lambda t: t.expand(4, 2, -1), lambda x: x.expand(4, *x.shape), [None, "r", "c"]),
    "expand none": (lambda t: t[:, :1].expand(-1, 0), lambda x: x[:, :0], ["r", "c"]),
    "expand_as": (lambda t: t.expand_as(torch.zeros(4, 2, 3)), lambda x: x.expand(4, *x.shape), [None, "r", "c"]),
    "split": (lambda t: t.split(2, 1)[1], lambda x: x[:, 2:], ["r", "c"]),
    "split sizes": (lambda t: t.split([0, 3], -1)[0], lambda x: x[:, :0], ["r", "c"]),
    "chunk": (lambda t: t.chunk(2, 1)[0], lambda x: x[:, :2], ["r", "c"]),
    "unbind": (lambda t: t.unbind(1)[2], lambda x: x[:, 2], ["r"]),
    "rows": (lambda t: list(t)[1], lambda x: x[1], ["c"]),
    "slice": (lambda t: t[..., 1:], lambda x: x[:, 1:], ["r", "c"]),
    "mask": (lambda t: t[MASK], lambda x: x[MASK], [None]),
    "masked_select": (lambda t: t.masked_select(torch.tensor([False, True])), lambda x: x[1:], ["r", "c"]),
    "masked_select an array": (lambda t: t.masked_select(np.array([True, False])[::-1]), lambda x: x[1:], ["r", "c"]),
    "masked_select a list": (lambda t: t.masked_select([False, True]), lambda x: x[1:], ["r", "c"]),
    "rows from the end": (lambda t: t[torch.tensor([-1, 0])], lambda x: x[[1, 0]], ["r", "c"]),
    "tensors": (lambda t: t[torch.tensor([[0, 1]]), 2], lambda x: x[torch.tensor([[0, 1]]), 2], [None, None]),
    "tensors apart": (lambda t: t[None, [1, 0], None, [1, 0]], lambda x: x[None, [1, 0], None, [1, 0]], [None] * 3),
    "None": (lambda t: t[None, :, None], lambda x: x[None, :, None], [None, "r", None, "c"]),
    "stack": (lambda t: stack([t, t], 1), lambda x: torch.stack([x, x], 1), ["r", None, "c"]),
    "torch.stack": (lambda t: torch.stack([t, t], -1), lambda x: torch.stack([x, x], 2), ["r", "c", None]),
    "cat": (lambda t: cat([t, t], -1), lambda x: torch.cat([x, x], 1), ["r", "c"]),
    "gather": (lambda t: t.gather(1, PAIRS), gathered, ["r", "c"]),
    "where": (lambda t: t.where(MASK, t[:, [2, 1, 0]]), lambda x: x.where(MASK.reshape(2, 3, *ones(x)), x.flip(1)),
              ["r", "c"]),
    "flip": (lambda t: t.flip(-1), lambda x: x.flip(1), ["r", "c"]),
    "torch.flip": (lambda t: torch.flip(t, (1, 0)), lambda x: x.flip((0, 1)), ["r", "c"]),
    "repeat": (lambda t: t.repeat(2, 3), lambda x: x.repeat(2, 3, *ones(x)), ["r", "c"]),
    "repeat often": (lambda t: t.repeat(20, 1), lambda x: x.repeat(20, 1, *ones(x)), ["r", "c"]),
    "repeat never": (lambda t: t.repeat([0, 1]), lambda x: x[:0], ["r", "c"]),
    "repeat_interleave": (lambda t: t.repeat_interleave(2, -1), lambda x: x.repeat_interleave(2, 1), ["r", "c"]),
    "repeat_interleave to a size": (
        lambda t: t.repeat_interleave(2, 1, output_size=6), lambda x: x.repeat_interleave(2, 1), ["r", "c"],
    ),
    "repeat_interleave flat": (
        lambda t: t.repeat_interleave(2), lambda x: x.flatten(0, 1).repeat_interleave(2, 0), [None],
    ),
    "repeat_interleave counts": (
        lambda t: torch.repeat_interleave(t, COUNTS, 1, output_size=3), lambda x: x.repeat_interleave(COUNTS, 1),
        ["r", "c"],
    ),
    "pad": (lambda t: pad(t, [1, 0, 0, 2]), lambda x: pad_leaf(x, [*[0, 0] * (x.dim() - 2), 0, 2, 1, 0]), ["r", "c"]),
    "contiguous": (lambda t: t.contiguous(), lambda x: x.contiguous(), ["r", "c"]),
    "clone": (lambda t: t.clone(), lambda x: x.clone(), ["r", "c"]),
    "zeros_like": (torch.zeros_like, torch.zeros_like, ["r", "c"]),
    "sum": (lambda t: t.sum(0), lambda x: x.sum(0), ["c"]),
    "sum kept": (lambda t: t.sum((0, 1), keepdim=True), lambda x: x.sum((0, 1), keepdim=True), ["r", "c"]),
}  # fmt: skip


WORDS = NonTensorStack.from_nested([["p", "q", "r"], ["u", "v", "w"]], 2)
# These do not move rows, so rows of values stay as they are or go.
FIXED = {"contiguous", "clone", "zeros_like", "sum", "sum kept"}


@pytest.mark.parametrize("name", CASES)
@examples(0.3)
@given(tree=trees(size=(2, 3), dtypes=DTYPES.filter(lambda dtype: not dtype.is_complex)), flat=st.booleans())
def test_each_leaf_is_what_torch_makes_of_it(name, tree, flat):
    """Values, dtypes, batch sizes, names, nested batches and ties follow torch on a leaf."""
    on_tree, on_leaf, names = CASES[name]
    if flat:
        tree = TensorDict({key: x for key, x in tree._data.items() if isinstance(x, torch.Tensor)}, [2, 3])
    tree = (tree if name in FIXED else tree.set("words", WORDS)).with_names(["r", "c"])

    found = assert_pure(on_tree, tree)
    size = on_leaf(torch.arange(1, 7).reshape(2, 3)).shape

    assert found.batch_size == size
    assert found.names == names
    got, expected = dict(iter_leaves(found)), {path: on_leaf(leaf) for path, leaf in iter_leaves(tree)}
    torch.testing.assert_close({path: got[path] for path in expected}, expected, rtol=0, atol=0)
    nested = {key: node.batch_size for key, node in tree._data.items() if isinstance(node, TensorDict)}
    assert {key: found._data[key].batch_size for key in nested} == {k: (*size, *own[2:]) for k, own in nested.items()}
    assert found._ties == tree._ties
    assert by_identity(iter_leaves(found))[: len(tree._ties)] == tree._ties or not tree._ties


BESIDE = {
    "alone": {},
    "beside a leaf": {"x": torch.ones(2, 3, 2)},
    "beside trees": {"x": torch.ones(2, 3), "n": {"s": "text", "y": torch.zeros(2, 3, 1)}, "e": {}},
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("name", [name for name in CASES if name not in FIXED])
def test_each_value_is_where_torch_places_its_row(name, beside):
    """A value of each row goes where torch puts the number of the row; an added row has None."""
    on_tree, on_leaf, _ = CASES[name]
    positions = on_leaf(torch.arange(1, 7).reshape(2, 3))
    texts = np.array([None, "p", "q", "r", "u", "v", "w"], dtype=object)

    found = on_tree(TensorDict({**beside, "words": WORDS}, [2, 3]).with_names(["r", "c"]))

    assert found["words"] == np.asarray(texts[positions], dtype=object).tolist()


@pytest.mark.parametrize("name", ["flip", "repeat", "split", "stack", "where", "sum"])
@examples(0.3)
@given(tree=trees(size=(4, 2, 3), nontensor=False, ties=False, dtypes=st.just(torch.float32)))
def test_each_leaf_is_the_same_under_vmap(name, tree):
    """Batch dimensions inside vmap are those that it leaves."""
    on_tree = CASES[name][0]
    tree = tree.with_names(None).set("x", torch.arange(24.0).reshape(4, 2, 3))

    mapped = torch.vmap(on_tree)(tree)

    rows = [dict(iter_leaves(on_tree(row))) for row in tree.unbind(0)]
    found = [{path: leaf[i] for path, leaf in iter_leaves(mapped)} for i in range(len(rows))]
    torch.testing.assert_close(found, rows, rtol=0, atol=0)


# -- batches without dimensions or rows, views --------------------------------------------------------------------


@pytest.fixture
def td():
    """A batch of two dimensions, a nested one of three, names and a string."""
    leaves = {"a": torch.arange(12).reshape(2, 3, 2), "n": TensorDict({"b": torch.randn(2, 3, 4, 5)}, [2, 3, 4])}
    return TensorDict(leaves | {"s": "x"}, [2, 3], names=["r", "c"])


def test_sizes(td):
    """Sizes are those of a tensor of the batch size."""
    assert td.shape == td.size() == td.batch_size == Size([2, 3])
    assert td.size(-1) == 3


def test_numbers_of_dimensions(td):
    """All three names of the number of batch dimensions give it."""
    assert td.dim() == 2
    assert td.ndim == 2
    assert td.batch_dims == 2


def test_numbers_of_rows(td):
    """The length is that of the first dimension, and the number of rows that of all; without a batch it is 1."""
    assert td.numel() == 6
    assert len(td) == 2
    assert TensorDict().numel() == 1


VIEWS = {
    "permute": lambda td: td.permute(1, 0),
    "view": lambda td: td.view(6),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "slice": lambda td: td[1:],
    "expand": lambda td: td.expand(2, 2, 3),
    "split": lambda td: td.split(1)[0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views(td, view):
    """An operation that torch does without copying shares memory."""
    assert view(td)["a"].untyped_storage().data_ptr() == td["a"].untyped_storage().data_ptr()


def test_a_view_of_another_dtype(td):
    """Leaves are viewed in another dtype."""
    assert td.view(torch.int32)["a"].dtype is torch.int32


def test_batches_without_dimensions():
    """A batch without dimensions is reshaped as a tensor of no dimensions."""
    td = TensorDict({"a": torch.tensor(1.0)})

    assert td.flatten().batch_size == td.reshape(1).batch_size == Size([1])
    assert td.flatten().squeeze().batch_size == td.flatten().reshape(()).batch_size == Size([])
    assert td.unsqueeze(0).batch_size == Size([1])
    assert torch.stack([td, td])["a"].shape == Size([2])


def test_batches_without_rows():
    """A batch without rows is cut as a tensor without elements."""
    none = TensorDict({"a": torch.zeros(0, 2)}, [0])

    assert [part.batch_size for part in none.chunk(3)] == [x.shape[:1] for x in torch.zeros(0, 2).chunk(3)]
    assert none.unbind(0) == ()
    assert none.split(2)[0].batch_size == Size([0])


def test_names_of_nested_trees_follow_their_own_batch():
    """A nested tree with a longer batch keeps its own names."""
    inner = TensorDict({"b": torch.zeros(4, 3, 5)}, [4, 3, 5], names=["p", "q", "r"])
    tree = TensorDict({"a": torch.zeros(4, 3), "s": inner}, [4, 3], names=["p", "q"])

    assert tree.unbind(0)[0]["s"].names == ["q", "r"]
    assert tree.split(2)[0]["s"].names == ["p", "q", "r"]
    assert tree.sum(0)["s"].names == ["q", "r"]
    assert torch.stack([tree, tree], 1)["s"].names == ["p", None, "q", "r"]
