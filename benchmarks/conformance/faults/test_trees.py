"""What tensordict 0.14.3 gets wrong in trees, pytrees and vmap, beside what tdfunc does.

Each test shows both, so that the claim is real; should tensordict mend one, its half fails and the row can go.
"""

import functools
import subprocess
import sys
from dataclasses import FrozenInstanceError

import optree
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
from tests.incumbent import Incumbent, tensordict

A, B = torch.arange(3.0), torch.arange(6.0).reshape(3, 2)


FRESH = """
import torch, torch._functorch.vmap as v
import {0}
print(v._create_batched_inputs.__module__, v._unwrap_batched.__module__, v._process_batched_inputs.__module__)
try:
    print(torch.vmap(lambda t: t + 1)({0}.TensorDict({{"a": torch.zeros(3)}}, [3]))["a"].tolist())
except RuntimeError as err:
    print(str(err).splitlines()[0])
"""


@functools.cache
def run_fresh(library):
    """Run code in an interpreter of its own, where tensordict may replace parts of torch; return its output."""
    command = [sys.executable, "-W", "ignore", "-c", FRESH.format(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# -- pytrees ----------------------------------------------------------------------------------------------------


def test_order_of_keys_is_no_structure():
    """Trees with the same keys in another order are mapped together."""
    ours = TensorDict({"a": A, "b": B}), TensorDict({"b": B, "a": A})

    assert torch.equal(pytree.tree_map(torch.add, *ours)["b"], 2 * B)
    with pytest.raises(ValueError, match="Node"):
        pytree.tree_map(torch.add, Incumbent({"a": A, "b": B}), Incumbent({"b": B, "a": A}))


def test_batch_size_is_no_structure():
    """Trees of one structure and other batch sizes are mapped together."""
    assert pytree.tree_map(lambda x, _: x, TensorDict({"a": A}, [3]), TensorDict({"a": A})).batch_size == Size([3])
    with pytest.raises(ValueError, match="Node"):
        pytree.tree_map(lambda x, _: x, Incumbent({"a": A}, [3]), Incumbent({"a": A}))


def test_batch_size_after_a_map():
    """A map that drops the batch leaves no batch size; theirs guesses one from the features."""
    both = [cls({"a": torch.zeros(3, 2, 2), "b": torch.zeros(3, 2)}, [3]) for cls in (TensorDict, Incumbent)]
    ours, theirs = (pytree.tree_map(lambda x: x[0], tree) for tree in both)

    assert ours.batch_size == Size([])
    assert theirs.batch_size == Size([2])


def test_names_after_a_map():
    """A map does not change the names that a later one gives."""
    spec = pytree.tree_structure(TensorDict({"a": A}, [3], names=["t"]))
    their_spec = pytree.tree_structure(Incumbent({"a": A}, [3], names=["t"]))
    for structure in (spec, their_spec):
        pytree.tree_unflatten([A[0]], structure)

    assert pytree.tree_unflatten([A], spec).names == ["t"]
    assert pytree.tree_unflatten([A], their_spec).names == [None]


def test_none_is_a_leaf():
    """A map to None keeps the tree."""
    assert pytree.tree_map(lambda _: None, TensorDict({"a": A}))["a"] is None
    assert pytree.tree_map(lambda _: None, Incumbent({"a": A})) is None


def test_leaves_that_are_no_tensors():
    """A tree of strings is printed."""
    assert "a: 'x'" in repr(pytree.tree_map(lambda _: "x", TensorDict({"a": A})))
    assert "x" not in repr(pytree.tree_map(lambda _: "x", Incumbent({"a": A})))


def test_optree():
    """Optree sees the leaves of a tree."""
    theirs = Incumbent({"a": A})

    assert optree.tree_leaves(TensorDict({"a": A}))[0] is A
    assert optree.tree_leaves(theirs)[0] is theirs


@pytest.mark.slow
def test_import_leaves_torch_alone():
    """The import of the library replaces no part of torch."""
    assert run_fresh("tdfunc")[0] == " ".join(["torch._functorch.vmap"] * 3)
    assert "tensordict" in run_fresh("tensordict")[0]


@pytest.mark.slow
def test_arithmetic_in_vmap():
    """`td + 1` works inside vmap."""
    assert run_fresh("tdfunc")[1] == "[1.0, 1.0, 1.0]"
    assert "Batching rule not implemented for aten::_foreach_add" in run_fresh("tensordict")[1]


def test_paths_of_a_lazy_stack():
    """A lazy stack is mapped with paths."""
    ours = lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in (1, 2)])
    theirs = tensordict.lazy_stack([Incumbent({"x": torch.zeros(n)}, []) for n in (1, 2)])

    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(ours)[0]]
    assert paths == ["['0']['x']", "['1']['x']"]
    assert pytree.tree_map_with_path(lambda _, x: x + 1, ours)["x"][1].tolist() == [1.0, 1.0]
    with pytest.raises(NotImplementedError):
        pytree.tree_flatten_with_path(theirs)


def test_data_that_are_no_tensors_in_a_map():
    """A string is not given to a function of tensors, and survives; in both."""
    for cls in (TensorDict, Incumbent):
        tree = cls({"a": A, "s": "word"})
        assert len(pytree.tree_leaves(tree)) == 1
        assert pytree.tree_map(lambda x: x + 1, tree)["s"] == "word"


def test_vmap_of_a_tree_without_a_batch():
    """A tree of batch size [] is mapped over the first dimension of its leaves; in both."""
    for cls in (TensorDict, Incumbent):
        assert torch.vmap(lambda t: t["a"] + 1)(cls({"a": A})).tolist() == [1, 2, 3]
    # The dimension that goes in front is one of the batch here; theirs guesses, and finds none.
    assert torch.vmap(lambda t: t.apply(lambda x: x * 2))(TensorDict({"a": A}))["a"].tolist() == [0, 2, 4]


def test_chunks_of_a_vmap():
    """A tree goes through vmap in chunks; in both, where the body does no arithmetic on the tree."""
    for cls in (TensorDict, Incumbent):
        out = torch.vmap(lambda t: t.apply(lambda x: x + 1), chunk_size=2)(cls({"a": A}, [3]))
        assert out["a"].tolist() == [1, 2, 3]
    assert torch.vmap(lambda t: t + 1, chunk_size=2)(TensorDict({"a": A}, [3]))["a"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd"])
def test_derivatives_with_respect_to_a_tree(transform):
    """A derivative is taken with respect to a tree, nested output by input; in both."""
    for cls in (TensorDict, Incumbent):
        tree = cls({"a": A})
        if transform == "grad":
            assert torch.func.grad(lambda t: t["a"].square().sum())(tree)["a"].tolist() == [0, 2, 4]
        else:
            jacobian = getattr(torch.func, transform)(lambda t: t.apply(torch.square))(tree)
            assert torch.equal(jacobian["a", "a"], torch.diag(2 * A))


def graph_breaks(fn, *args):
    """How often the compiler gave up inside a call."""
    torch._dynamo.reset()
    count = torch._dynamo.explain(fn)(*args).graph_break_count
    torch._dynamo.reset()
    return count


@pytest.mark.slow
def test_masks_under_the_compiler():
    """`td[mask]` is one graph where torch's is."""
    mask = torch.tensor([True, False, True])

    # Without this setting of torch's, a plain tensor's `x[mask]` breaks the graph, too.
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert graph_breaks(lambda x: x[mask] + 1, A) == 0
        assert graph_breaks(lambda t: t[mask]["a"] + 1, TensorDict({"a": A}, [3])) == 0
        assert graph_breaks(lambda t: t[mask]["a"] + 1, Incumbent({"a": A}, [3])) > 0


# -- the container ----------------------------------------------------------------------------------------------


def test_iterating_without_a_batch():
    """Iterating over a tree of batch size [] is an error that gives the reason."""
    with pytest.raises(TypeError, match=r"batch size \[\] has no rows"):
        list(TensorDict({"a": A}))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Incumbent({"a": A}))


@pytest.mark.parametrize("key", [0, ()])
def test_bad_keys(key):
    """A key that is not a str is named."""
    with pytest.raises(TypeError, match="A key must be a str"):
        TensorDict({key: A})
    with pytest.raises((IndexError, TypeError, KeyError)) as caught:
        Incumbent({key: A})
    assert "key must be" not in str(caught.value).lower()


def test_keys_named_like_arguments():
    """A key can be called as an argument of the constructor in a dict; by keyword in neither."""
    theirs = Incumbent(a=A, batch_size=[3])
    assert list(theirs.keys()) == ["a"]
    assert set(Incumbent({"batch_size": A, "keys": A}, [3]).keys()) == {"batch_size", "keys"}

    tree = TensorDict({"batch_size": A, "keys": A}, [3]).set("names", A)

    assert set(tree.keys()) == {"batch_size", "keys", "names"}
    assert tree["batch_size"] is A


@pytest.mark.parametrize("tree", [{"a.b": {"c": A}}, {("a.b", "c"): A, "d": {"e": A}}])
def test_flat_keys_that_hold_the_separator(tree):
    """Both cut a key that held the separator before: it comes back as two; another separator brings it back."""
    ours, theirs = TensorDict(tree), Incumbent(tree)

    assert ("a", "b", "c") in theirs.flatten_keys(".").unflatten_keys(".").keys(True, True)
    assert ("a", "b", "c") in ours.flatten_keys(".").unflatten_keys(".").keys(True, True)
    assert (ours.flatten_keys("/").unflatten_keys("/") == ours).all()


def test_flat_keys_that_collide():
    """Two paths that become one key raise; in both."""
    tree = {"a.b": A, "a": {"b": A + 1}}

    with pytest.raises(MissingKeyError, match=r"two paths become the key 'a.b'(.|\n)*'a.b'(.|\n)*'a', 'b'"):
        TensorDict(tree).flatten_keys(".")
    with pytest.raises(KeyError, match="collide"):
        Incumbent(tree).flatten_keys(".")
    with pytest.raises(MissingKeyError, match="two keys become the entry 'a'"):
        TensorDict({"a": A, "a.b": A}).unflatten_keys(".")
    with pytest.raises(KeyError, match="collide|exist"):
        Incumbent({"a": A, "a.b": A}).unflatten_keys(".")


@pytest.mark.parametrize("key", ["a..b", ".a", "a."])
def test_unflatten_makes_no_empty_keys(key):
    """Splitting at a separator makes no empty keys."""
    assert list(TensorDict({key: A}).unflatten_keys(".").keys()) == [key]
    assert any("" in path for path in Incumbent({key: A}).unflatten_keys(".").keys(True, True))


def test_set_in_place_keeps_values():
    """A value that the dtype of the leaf cannot hold is refused."""
    theirs, ours = Incumbent({"a": torch.zeros(2).long()}), TensorDict({"a": torch.zeros(2).long()})

    assert theirs.set_("a", torch.tensor([1.7, 2.5]))["a"].tolist() == [1, 2]
    with pytest.raises(LeafMismatchError, match=r"'a'(.|\n)*altered(.|\n)*int64(.|\n)*float32"):
        ours.set_("a", torch.tensor([1.7, 2.5]))
    with pytest.raises(LeafMismatchError, match=r"shape \[2\](.|\n)*shape \[3\]"):
        ours.set_("a", torch.zeros(3).long())


def test_index_assignment_is_refused():
    """An assignment to rows is refused, and the caller's tensor keeps its values."""
    mine, theirs = A.clone(), A.clone()
    with pytest.raises(ImmutableError, match=r"td.at\[index\].set"):
        TensorDict({"a": mine}, [3])[0] = TensorDict({"a": torch.tensor(9.0)})
    Incumbent({"a": theirs}, [3])[0] = Incumbent({"a": torch.tensor(9.0)})

    assert mine[0] == 0
    assert theirs[0] == 9


def test_writing_to_a_row():
    """A write to a row that is lost there is refused here, and `at[0].set_` reaches the tree."""
    theirs = Incumbent({"a": A.clone()}, [3])
    theirs[0]["a"] = torch.tensor(9.0)
    assert theirs["a"][0] == 0
    theirs[0].set_("a", torch.tensor(9.0))
    assert theirs["a"][0] == 9

    ours = TensorDict({"a": A.clone()}, [3])
    with pytest.raises(ImmutableError, match=r"td.set\('a', value\)"):
        ours[0]["a"] = torch.tensor(9.0)
    assert ours.at[0].set_({"a": 9.0})["a"][0] == 9


class TheirPoint(tensordict.TensorClass, frozen=True):
    """A class that is declared frozen."""

    x: Tensor


class OurPoint(TensorClass, frozen=True):
    """The same here."""

    x: Tensor


def test_frozen_is_not_immutable():
    """A value of a frozen class of theirs changes under an index, in place, and after one call."""
    theirs = TheirPoint(x=A.clone(), batch_size=[3])
    with pytest.raises(FrozenInstanceError):
        theirs.x = A
    theirs[0] = TheirPoint(x=torch.tensor(9.0), batch_size=[])
    assert theirs.x.tolist() == [9, 1, 2]
    assert theirs.zero_().x.sum() == 0
    theirs.unlock_()
    assert theirs.set("x", A + 5).x is theirs.x
    assert theirs.x.tolist() == [5, 6, 7]

    ours = OurPoint(A.clone(), batch_size=[3])
    for write in (
        lambda: setattr(ours, "x", A),
        lambda: delattr(ours, "x"),
        lambda: ours.__setitem__(0, ours[1]),
        lambda: ours.__setitem__("x", A),
    ):
        with pytest.raises(ImmutableError):
            write()
    assert ours.set("x", A + 5) is not ours
    assert not hasattr(ours, "zero_")
    assert not hasattr(ours, "unlock_")
    assert ours.x.tolist() == [0, 1, 2]


def test_locked_is_not_immutable():
    """A locked tree of theirs changes."""
    theirs = Incumbent({"a": A.clone()}, [3]).lock_()
    theirs.batch_size = []
    theirs.zero_()

    assert theirs["a"].sum() == 0
    with pytest.raises(ImmutableError, match="with_batch_size"):
        TensorDict({"a": A}, [3]).batch_size = []


def test_tensor_operands_meet_the_batch():
    """A tensor operand meets the batch dimensions here, and the features there."""
    ours, theirs = (cls({"b": B}, [3]) + A for cls in (TensorDict, Incumbent))

    assert torch.equal(ours["b"], B + A[:, None])
    assert torch.equal(theirs["b"], ours["b"])
    with pytest.raises(BatchSizeError, match=r"broadcasts to \[3\](.|\n)*shape \[2\]"):
        TensorDict({"b": B}, [3]) + torch.zeros(2)


def test_comparing_trees_with_other_keys():
    """A comparison names the keys that differ, and a tree can be put in a set."""
    with pytest.raises(TreeStructureError, match=r"\['a'\](.|\n)*\['b'\]"):
        assert TensorDict({"a": A}) == TensorDict({"b": A})
    with pytest.raises(KeyError):
        assert Incumbent({"a": A}) == Incumbent({"b": A})

    assert len({TensorDict({"a": A}), TensorDict({"a": A})}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(Incumbent({"a": A}))


def test_preallocation_has_no_silent_zeros():
    """A key that first comes with a later row is refused."""
    ours, theirs = TensorDict({}, [2]), Incumbent({}, [2])
    ours = ours.at[0].set_({"a": 1.0})
    theirs[0] = Incumbent({"a": torch.tensor(1.0)})
    theirs[1] = Incumbent({"a": torch.tensor(1.0), "new": torch.tensor(1.0)})

    assert theirs["new"].tolist() == [0, 1]
    with pytest.raises(MissingKeyError, match=r"\['a'\](.|\n)*\['a', 'new'\]"):
        ours.at[1].set_({"a": 1.0, "new": 1.0})


def test_missing_dimensions_of_reductions():
    """A reduction over a dimension that is not there is named."""
    with pytest.raises(TypeError, match="'<' not supported"):
        Incumbent({"a": B}, [3]).sum(dim="x")
    with pytest.raises(ValueError, match="'feature'(.|\n)*'x'"):
        TensorDict({"a": B}, [3]).sum(dim="x")


def test_lost_entry():
    """Moving an entry under itself is refused."""
    tree = {"a": {"b": A}}

    assert TensorDict(tree).rename_key("a", ("a", "in"))["a", "in", "b"] is A
    assert Incumbent(tree).rename_key_("a", ("a", "in")).is_empty()


def test_silent_broadcast():
    """Leaves of two trees that align batch against features are refused."""
    square, row = torch.arange(9.0).reshape(3, 3), torch.arange(3.0)

    assert torch.equal((Incumbent({"a": square}, [3]) + Incumbent({"a": row}, [3]))["a"], square + row)
    with pytest.raises(LeafMismatchError, match=r"'a'(.|\n)*\[3, 3\](.|\n)*\[3\]"):
        TensorDict({"a": square}, [3]) + TensorDict({"a": row}, [3])


# -- state dicts ------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A module that owns parameters as a tree of theirs."""

    def __init__(self):
        super().__init__()
        self.p = tensordict.nn.TensorDictParams(Incumbent({"a": torch.zeros(2), "b": torch.zeros(2)}))


def test_a_part_of_a_state_dict():
    """A module that owns a tree of parameters takes `strict=False`."""
    with pytest.raises(RuntimeError, match="key sets don't match"):
        Holder().load_state_dict({"p.a": torch.ones(2)}, strict=False)

    model = nn.ModuleDict({"p": nn.Linear(2, 2)})
    found = model.load_state_dict({"p.bias": torch.ones(2)}, strict=False)
    assert found.missing_keys == ["p.weight"]
    tree = from_module(model).load_state_dict({"p.bias": torch.ones(2)}, strict=False)
    assert tree["p", "bias"].tolist() == [1, 1]
    assert torch.equal(tree["p", "weight"], model.p.weight)


def test_a_state_dict_that_does_not_fit():
    """A wrong shape is reported with both shapes."""
    theirs = Incumbent({"a": torch.zeros(2)})
    with pytest.raises(ValueError, match="Failed to update 'a'") as caught:
        theirs.load_state_dict({**theirs.state_dict(), "a": torch.zeros(3)})
    assert "[3]" not in str(caught.value)

    ours = TensorDict({"a": torch.zeros(2)})
    with pytest.raises(LeafMismatchError, match=r"'a'(.|\n)*shape \[2\](.|\n)*shape \[3\]"):
        ours.load_state_dict({"a": torch.zeros(3)})
    with pytest.raises(MissingKeyError, match=r"\['a'\](.|\n)*missing \['a'\], unexpected \['b'\]"):
        ours.load_state_dict({"b": torch.zeros(2)})


def test_the_snippet_of_an_old_document():
    """The import of an older published snippet is gone there."""
    with pytest.raises(ImportError, match="cannot import name 'tensorclass'"):
        exec("from tensordict.prototype import tensorclass")
    assert callable(tdfunc.tensorclass)


# -- ragged data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(2, 2), (2, 3)])
def test_a_ragged_field_reads_alike_whatever_the_lengths(lengths):
    """A ragged field is read alike for all lengths; there it is a tensor or an error."""
    ours = lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in lengths])
    theirs = tensordict.lazy_stack([Incumbent({"x": torch.zeros(n)}, []) for n in lengths])

    assert [len(x) for x in ours["x"]] == list(lengths)
    assert type(ours["x"]) is tuple
    assert reads(theirs, "x") == (len(set(lengths)) == 1)


def reads(tree, key):
    """Whether a key can be read."""
    try:
        tree[key]
    except RuntimeError:
        return False
    return True
