"""Trees, pytrees and vmap without the faults of tensordict's.

`benchmarks/conformance/faults/` shows each fault by a test of the same name.
"""

import subprocess
import sys

import pytest
import torch
from torch import Size, Tensor, nn
from torch.utils import _pytree as pytree

import tdfunc
from tdfunc import (
    BatchSizeError,
    ImmutableError,
    LeafMismatchError,
    MissingKeyError,
    TensorClass,
    TensorDict,
    TreeStructureError,
    from_module,
    lazy_stack,
)

A, B = torch.arange(3.0), torch.arange(6.0).reshape(3, 2)


class Point(TensorClass, frozen=True):
    """A typed tree."""

    x: Tensor


# -- pytrees ----------------------------------------------------------------------------------------------------


def test_batch_size_is_no_structure():
    """Trees of other batch sizes map together, into the first one's."""
    assert pytree.tree_map(lambda x, _: x, TensorDict({"a": A}, [3]), TensorDict({"a": A})).batch_size == Size([3])


def test_names_after_a_map():
    """A structure gives the same names each time that a tree is built from it."""
    structure = pytree.tree_structure(TensorDict({"a": A}, [3], names=["t"]))
    pytree.tree_unflatten([A[0]], structure)

    assert pytree.tree_unflatten([A], structure).names == ["t"]


@pytest.mark.parametrize("value", [None, "x"])
def test_leaves_that_are_no_tensors(value):
    """A map to values that are not tensors keeps the tree, which can be printed."""
    tree = pytree.tree_map(lambda _: value, TensorDict({"a": A}))

    assert pytree.tree_map(lambda x: x, tree)["a"] == value
    assert f"a: {value!r}" in repr(tree)


def test_paths_of_a_lazy_stack():
    """A lazy stack maps with paths."""
    stack = lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in (1, 2)])

    assert [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(stack)[0]] == ["['0']['x']", "['1']['x']"]
    assert pytree.tree_map_with_path(lambda _, x: x + 1, stack)["x"][1].tolist() == [1.0, 1.0]


def test_data_that_are_no_tensors_in_a_map():
    """Non-tensor data are no leaves, and survive a map."""
    tree = TensorDict({"a": A, "s": "word"})

    assert len(pytree.tree_leaves(tree)) == 1
    assert pytree.tree_map(lambda x: x + 1, tree)["s"] == "word"


# -- vmap and other transformations -----------------------------------------------------------------------------

FRESH = """
import torch, torch._functorch.vmap as v, tdfunc
for name in ("_create_batched_inputs", "_unwrap_batched", "_process_batched_inputs"):
    assert getattr(v, name).__module__ == "torch._functorch.vmap", name
"""


@pytest.mark.slow
def test_import_leaves_torch_alone():
    """The import of tdfunc replaces no part of torch."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FRESH], check=True)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_arithmetic_in_vmap(chunk_size):
    """Arithmetic of trees works inside vmap, also in chunks."""
    assert torch.vmap(lambda t: t + 1, chunk_size=chunk_size)(TensorDict({"a": A}, [3]))["a"].tolist() == [1, 2, 3]


def test_vmap_of_a_tree_without_a_batch():
    """A tree of batch size [] maps over the first dimension of its leaves."""
    assert torch.vmap(lambda t: t["a"] + 1)(TensorDict({"a": A})).tolist() == [1, 2, 3]
    assert torch.vmap(lambda t: t.apply(lambda x: x * 2))(TensorDict({"a": A}))["a"].tolist() == [0, 2, 4]


def test_derivatives_with_respect_to_a_tree():
    """Derivatives with respect to a tree are trees, nested output by input."""
    tree = TensorDict({"a": A})

    assert torch.func.grad(lambda t: t["a"].square().sum())(tree)["a"].tolist() == [0, 2, 4]
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        assert torch.equal(transform(lambda t: t.apply(torch.square))(tree)["a", "a"], torch.diag(2 * A))


@pytest.mark.slow
def test_masks_under_the_compiler():
    """A mask as index is one graph, where it is one for a tensor."""
    mask = torch.tensor([True, False, True])
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        explained = torch._dynamo.explain(lambda t: t[mask]["a"] + 1)(TensorDict({"a": A}, [3]))
    torch._dynamo.reset()

    assert explained.graph_break_count == 0


# -- the container ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [0, ()])
def test_bad_keys(key):
    """A key that is not a str, or an empty path, raises as such."""
    with pytest.raises(TypeError, match="str"):
        TensorDict({key: A})


def test_keys_named_like_arguments():
    """Keys may have the names of arguments and methods."""
    tree = TensorDict({"batch_size": A, "keys": A}, [3]).set("names", A)

    assert set(tree.keys()) == {"batch_size", "keys", "names"}
    assert tree["batch_size"] is A


def test_flat_keys_that_collide():
    """Two paths that become one key raise, when they are joined and when they are split."""
    with pytest.raises(MissingKeyError, match=r"'a.b'"):
        TensorDict({"a.b": A, "a": {"b": A + 1}}).flatten_keys(".")
    with pytest.raises(MissingKeyError, match=r"'a.b'.*'a'"):
        TensorDict({"a": A, "a.b": A}).unflatten_keys(".")


def test_flat_keys_that_hold_the_separator():
    """Another separator brings back keys that hold a dot."""
    tree = TensorDict({("a.b", "c"): A, "d": {"e": A}})

    assert (tree.flatten_keys("/").unflatten_keys("/") == tree).all()


def test_set_in_place_keeps_values():
    """A value of another dtype or shape than the leaf's is not cast or broadcast into it."""
    tree = TensorDict({"a": torch.zeros(2).long()})

    with pytest.raises(LeafMismatchError, match=r"'a'(.|\n)*int64(.|\n)*float32"):
        tree.set_("a", torch.tensor([1.7, 2.5]))
    with pytest.raises(LeafMismatchError, match=r"shape \[2\](.|\n)*shape \[3\]"):
        tree.set_("a", torch.zeros(3).long())


TREE, POINT = TensorDict({"x": A.clone()}, [3]), Point(A.clone(), batch_size=[3])


@pytest.mark.parametrize(
    "write",
    [
        lambda tree: tree.__setitem__(0, tree[1]),
        lambda tree: tree.__setitem__("x", A),
        lambda tree: tree[0].__setitem__("x", torch.tensor(9.0)),
        lambda tree: setattr(tree, "batch_size", []),
        lambda tree: setattr(tree, "x", A),
        lambda tree: delattr(tree, "x"),
    ],
    ids=["rows", "a key", "a key of a row", "batch size", "a field", "no field"],
)
@pytest.mark.parametrize("tree", [TREE, POINT], ids=["open", "typed"])
def test_locked_is_not_immutable(tree, write):
    """Every assignment to a tree raises, and the tree stays as it is."""
    with pytest.raises((ImmutableError, AttributeError)):
        write(tree)

    assert tree["x"].tolist() == [0, 1, 2]
    assert not hasattr(tree, "zero_")
    assert not hasattr(tree, "unlock_")
    assert tree.set("x", A + 5) is not tree


def test_tensor_operands_meet_the_batch():
    """A tensor operand broadcasts to the batch size, never to the features."""
    assert torch.equal((TensorDict({"b": B}, [3]) + A)["b"], B + A[:, None])
    with pytest.raises(BatchSizeError, match=r"\[3\](.|\n)*\[2\]"):
        TensorDict({"b": B}, [3]) + torch.zeros(2)


def test_silent_broadcast():
    """Leaves of two trees are not broadcast, batch against features."""
    with pytest.raises(LeafMismatchError, match=r"'a'(.|\n)*\[3, 3\](.|\n)*\[3\]"):
        TensorDict({"a": torch.zeros(3, 3)}, [3]) + TensorDict({"a": torch.zeros(3)}, [3])


def test_comparing_trees_with_other_keys():
    """A comparison of trees with other keys names them; a tree can be in a set."""
    with pytest.raises(TreeStructureError, match=r"\['a'\](.|\n)*\['b'\]"):
        assert TensorDict({"a": A}) == TensorDict({"b": A})
    assert len({TensorDict({"a": A}), TensorDict({"a": A})}) == 2


def test_preallocation_has_no_silent_zeros():
    """Rows with a key that the tree does not have raise."""
    with pytest.raises(MissingKeyError, match=r"\['a'\](.|\n)*\['a', 'new'\]"):
        TensorDict({"a": A}, [3]).at[1].set_({"a": 1.0, "new": 1.0})


def test_missing_dimensions_of_reductions():
    """A reduction over a name that is not a dimension's raises, as does a loop over a tree without rows."""
    with pytest.raises(ValueError, match="'x'"):
        TensorDict({"a": B}, [3]).sum(dim="x")
    with pytest.raises(TypeError, match=r"\[\]"):
        list(TensorDict({"a": A}))


def test_the_class_of_an_old_document():
    """`tensorclass`, which published code imports, is here."""
    assert callable(tdfunc.tensorclass)


def test_lost_entry():
    """An entry can be moved under itself."""
    assert TensorDict({"a": {"b": A}}).rename_key("a", ("a", "in"))["a", "in", "b"] is A


def test_a_part_of_a_state_dict():
    """`strict=False` loads the given entries and keeps the rest."""
    model = nn.ModuleDict({"p": nn.Linear(2, 2)})

    tree = from_module(model).load_state_dict({"p.bias": torch.ones(2)}, strict=False)

    assert tree["p", "bias"].tolist() == [1, 1]
    assert torch.equal(tree["p", "weight"], model.p.weight)


@pytest.mark.parametrize("lengths", [(2, 2), (2, 3)])
def test_a_ragged_field_reads_alike_whatever_the_lengths(lengths):
    """A field of a lazy stack is a tuple of its trees' leaves, also where the lengths agree."""
    stack = lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in lengths])

    assert type(stack["x"]) is tuple
    assert tuple(map(len, stack["x"])) == lengths
