"""Reading, construction and indices of lazy stacks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size

from tdfunc import TensorDict, TreeStructureError
from tdfunc._lazystack import LazyStack, lazy_stack
from tests.lazystack.trees import ragged, tree, uniform


@pytest.fixture(params=[(2, 4, 3), (3, 3, 3)], ids=["ragged", "equal"])
def lazy(request):
    """A stack of trees whose lengths differ, or happen to agree."""
    return lazy_stack(ragged(request.param))


def test_leaves_are_read_as_tuples(lazy):
    """The key of a leaf reads as the tuple of the trees' tensors, whatever the lengths."""
    assert type(lazy["x"]) is tuple
    assert [x.shape[0] for x in lazy["x"]] == [len(t) for t in lazy.trees]
    assert lazy["x"][1] is lazy.trees[1]["x"]
    assert lazy.get("x") == lazy["x"]
    assert lazy.get("missing") is None


def test_values_are_read_as_lists(lazy):
    """The key of non-tensor data reads as the list of the trees' values, whatever the lengths."""
    assert lazy["s"] == [t["s"] for t in lazy.trees]
    assert lazy._get("s").shape == Size([3])


def test_trees_are_read_as_lazy_stacks(lazy):
    """The key of a tree reads as a lazy stack, whatever the lengths."""
    assert isinstance(lazy["n"], LazyStack)
    assert lazy["n", "y"][2] is lazy.trees[2]["n", "y"]


def test_keys(lazy):
    """Keys are those of the trees, nested ones by path."""
    assert list(lazy.keys()) == ["x", "n", "s"]
    assert list(lazy.keys(True, True)) == ["x", ("n", "y"), "s"]


@pytest.mark.parametrize(("dim", "size"), [(0, [3, -1]), (1, [-1, 3]), (-1, [-1, 3]), (-2, [3, -1])])
def test_batch_size(dim, size):
    """Unequal lengths show as -1, and the number of trees stands at the stack dimension."""
    lazy = lazy_stack(ragged(), dim)

    assert lazy.batch_size == lazy.shape == Size(size)
    assert lazy.stack_dim == size.index(3)
    assert lazy.numel() == 9
    assert lazy.ndim == 2
    assert lazy.batch_dims == 2


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_law_rows_are_the_trees(lengths):
    """`lazy_stack(trees)[i]` is `trees[i]`, and a loop sees each."""
    trees = ragged(lengths)
    lazy = lazy_stack(trees)
    ways = {
        "loop": list(lazy),
        "unbind": lazy.unbind(0),
        "index": [lazy[i] for i in range(len(trees))],
        "negative index": [lazy[i - len(trees)] for i in range(len(trees))],
    }

    assert len(lazy) == len(trees)
    assert {way: list(map(id, found)) for way, found in ways.items()} == dict.fromkeys(ways, list(map(id, trees)))


@pytest.fixture
def uneven():
    """A stack of two trees of which only the first has a key."""
    return lazy_stack(
        [TensorDict({"a": torch.zeros(2), "b": torch.ones(2)}, [2]), TensorDict({"a": torch.zeros(3)}, [3])]
    )


def test_keys_of_some_trees_are_listed_apart(uneven):
    """A key that only some trees have is none of the stack's keys, and is shown with its trees."""
    assert list(uneven.keys()) == ["a"]
    assert "b" not in uneven
    assert "b: in trees [0]" in repr(uneven)


def test_keys_of_some_trees_follow_operations(uneven):
    """A key that only some trees have follows every operation there."""
    assert (uneven * 2).trees[0]["b"].tolist() == [2, 2]
    assert list(uneven.update({"b": 0.0}).keys()) == ["a", "b"]
    assert list(uneven.select("a").trees[0].keys()) == ["a"]


@pytest.mark.parametrize(
    "around",
    [
        lambda lazy: lazy,
        lambda lazy: TensorDict({"n": lazy}),
        lambda lazy: lazy_stack([TensorDict({"m": part}) for part in lazy.trees]),
    ],
    ids=["alone", "in a tree", "of trees in trees"],
)
@pytest.mark.parametrize("call", ["to_dict", "state_dict", "numpy", "to_namedtuple"])
def test_keys_of_some_trees_are_not_converted(uneven, around, call):
    """Conversions refuse a key that only some trees have."""
    with pytest.raises(TreeStructureError, match=rf"{call}: the key 'b' is not in all trees(.|\n)*trees \[0\]"):
        getattr(around(uneven), call)()


def test_keys_of_all_trees_are_converted(uneven):
    """Conversions take what is left when such a key was left out."""
    assert [x.tolist() for x in uneven.select("a").to_dict()["a"]] == [[0, 0], [0, 0, 0]]


def test_repr():
    """The text shows sizes that differ as -1."""
    text = repr(lazy_stack(ragged((2, 4)), 0).with_names([None, "t"]))

    assert "x: Tensor(2 x [-1, 2], float32, cpu)" in text
    assert "s: [['0.0', '0.1'], ['1.0', '1.1', '1.2', '1.3']]" in text
    assert "batch_size=torch.Size([2, -1])" in text
    assert "names=[None, 't'],\n    stack_dim=0)" in text
    apart = lazy_stack([TensorDict({"x": torch.zeros(2)}), TensorDict({"x": torch.zeros(2, dtype=torch.int64)})])
    assert "x: Tensor(2 x [2], differ, cpu)" in repr(apart)
    assert "x: Tensor(2 x shapes differ, float32, cpu)" in repr(lazy_stack([apart[0], apart[0].set("x", torch.eye(2))]))


def test_device():
    """A stack has the device that its trees share."""
    there, anywhere = tree(2).to("cpu"), tree(3)

    assert lazy_stack([there, there]).device == torch.device("cpu")
    assert lazy_stack([there, anywhere]).device is lazy_stack([anywhere, there]).device is None


@pytest.fixture
def named():
    """A stack whose trees have a name for their dimension."""
    return lazy_stack([t.with_names(["time"]) for t in ragged()])


def test_names(named):
    """A stack has the names that its trees share, and no name for its own dimension."""
    assert named.names == [None, "time"]
    assert (named.permute(1, 0) * 2)[:, :2].names == ["time", None]
    assert named.pad().names == [None, "time"]
    assert lazy_stack(ragged()).with_names([None, "t"])[0].names == ["t"]


def test_names_that_are_not_shared(named):
    """Of sub-trees, of trees without names, and of trees whose names differ a stack has none."""
    assert named["n"].names == [None, None]
    assert named.with_names(None).names == [None, None]
    assert lazy_stack([named[0], tree(2)]).names == [None, None]


def test_the_stack_dimension_has_no_name(named):
    """A name for the stack dimension is refused."""
    with pytest.raises(ValueError, match="the stack dimension 0 cannot have a name"):
        named.with_names(["batch", "time"])


def test_with_batch_size():
    """The trees get the other dimensions of a new batch size."""
    lazy = lazy_stack(uniform())

    assert lazy.with_batch_size([3, 4])[0].batch_size == Size([4])
    assert lazy.with_batch_size([3]).exclude("s").with_batch_size([3, 4, 2]).batch_size == Size([3, 4, 2])
    assert lazy_stack(ragged()).with_batch_size([3]).batch_size == Size([3])
