"""Reductions of leaves, batch dimensions, features and whole trees, against torch on every leaf."""

import pytest
import torch
from torch import Size

from tdfunc import TensorDict
from tests.helpers import assert_pure

A = torch.tensor([[[1.0, -2.0], [3.0, 0.5], [-4.0, 2.0]], [[0.0, 5.0], [1.0, 1.0], [2.5, -1.0]]])
NAN = A.masked_fill(A == 1, torch.nan)
# A leaf in a tree, and in a nested one with a longer batch.
TREE = TensorDict({"a": A, "n": TensorDict({"b": A}, [2, 3, 2])}, [2, 3], names=["r", "c"])
# torch's function of (leaf, dims); those that torch has for one dimension only are applied to a flattened leaf.
MANY = ("sum", "mean", "amax", "amin", "std", "var", "nansum", "nanmean", "logsumexp", "norm")
ONE = ("prod", "all", "any", "quantile", "max", "min", "argmax", "argmin")
BOTH = (*MANY, *ONE)


# Torch reduces these over one dimension at a time.
ONE_DIM = ("max", "min", "argmax", "argmin")


def on_leaf(name, x, dims, keepdim=False):
    """Reduce a leaf over adjacent dimensions, whose positions count through all of them."""
    fn = torch.linalg.vector_norm if name == "norm" else getattr(torch, name)
    if name in MANY:
        return fn(x, dim=dims, keepdim=keepdim)
    flat = x.flatten(dims[0], dims[-1])
    out = fn(flat, 0.3, dims[0]) if name == "quantile" else fn(flat, dims[0])
    sizes = [1 if i in dims else n for i, n in enumerate(x.shape) if keepdim or i not in dims]
    return tuple(part.reshape(sizes) for part in out) if isinstance(out, tuple) else out.reshape(sizes)


def on_tree(name, tree, dim=None, **options):
    """Call the method of a tree."""
    return getattr(tree, name)(*[0.3] * (name == "quantile"), dim=dim, **options)


def assert_leaf(found, path, expected):
    """Check a leaf, of `max` and `min` the values and the positions."""
    if isinstance(expected, tuple):
        torch.testing.assert_close((found.values[path], found.indices[path]), expected)
    else:
        torch.testing.assert_close(found[path], expected, equal_nan=True)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    ("name", "dim"),
    [(name, dim) for name in BOTH for dim in (0, -1, (0, 1)) if isinstance(dim, int) or name not in ONE_DIM],
    ids=str,
)
def test_batch_dimensions(name, dim, keepdim):
    """Leaves, batch sizes and names are those that torch gives each leaf, in nested batches and in a flat tree."""
    dims = {0: (0,), -1: (1,)}.get(dim, dim)
    found = assert_pure(lambda t: on_tree(name, t, dim, keepdim=keepdim), TREE)
    flat = on_tree(name, TREE.exclude("n"), dim, keepdim=keepdim)

    expected = on_leaf(name, A, dims, keepdim)
    assert_leaf(found, "a", expected)
    assert_leaf(found, ("n", "b"), expected)
    assert_leaf(flat, "a", expected)
    tree = found.values if name in ("max", "min") else found
    size = torch.empty(2, 3).sum(dims, keepdim=keepdim).shape
    assert tree.batch_size == size
    assert tree["n"].batch_size == (*size, 2)
    assert tree.names == [n for i, n in enumerate("rc") if keepdim or i not in dims]


def features_of(name):
    """A leaf for the reduction of a name, and a tree of it and of it in a nested batch."""
    leaf = NAN if name.startswith("nan") else A
    return leaf, TensorDict({"a": leaf, "n": TensorDict({"b": leaf}, [2, 3])}, [2])


@pytest.mark.parametrize("name", BOTH)
def test_features(name):
    """`dim="feature"` reduces what follows the batch of each node."""
    leaf, tree = features_of(name)
    features = on_tree(name, tree, "feature")
    kept = on_tree(name, tree, "feature", keepdim=True)

    assert_leaf(features, "a", on_leaf(name, leaf, (1, 2)))
    assert_leaf(features, ("n", "b"), on_leaf(name, leaf, (2,)))
    assert_leaf(kept, "a", on_leaf(name, leaf, (1, 2), keepdim=True))


@pytest.mark.parametrize("name", ["all", "any"])
def test_truth_of_a_whole_tree(name):
    """Without `dim`, `all` and `any` give one bool."""
    leaf, tree = features_of(name)

    assert on_tree(name, tree) is bool(getattr(torch, name)(leaf))


@pytest.mark.parametrize("name", [name for name in BOTH if name not in ("all", "any")])
def test_whole_leaves(name):
    """Without `dim` a whole leaf is reduced."""
    leaf, tree = features_of(name)
    whole = on_leaf(name, leaf.flatten(), (0,))
    whole, kept = whole[0] if isinstance(whole, tuple) else whole, on_tree(name, tree, keepdim=True)

    assert_leaf(on_tree(name, tree), "a", whole)
    assert_leaf(kept, "a", whole.reshape(1, 1, 1))
    assert kept.batch_size == (1,)
    assert kept["n"].batch_size == (1, 1)


@pytest.mark.parametrize("name", [name for name in BOTH if name not in ("all", "any", "argmax", "argmin")])
def test_all_leaves_together(name):
    """`reduce=True` counts each leaf once."""
    tree = TensorDict({"a": A, "n": {"b": A.flatten()[:3] + 7}})
    expected = on_leaf(name, torch.cat([x.flatten() for x in tree.leaves()]), (0,))

    found = on_tree(name, tree, reduce=True)

    torch.testing.assert_close(found, expected[0] if isinstance(expected, tuple) else expected, rtol=1e-6, atol=0)


# torch has no vmap rule of quantile.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", [name for name in BOTH if name not in ("all", "any", "argmax", "argmin")])
def test_all_features_together(name):
    """`dim="feature", reduce=True` gives one value for each element of the batch, a nested batch being features."""
    tree = TensorDict({"a": A, "b": A[:, 0, 0], "n": TensorDict({"c": A[..., None] + 1}, [2, 3])}, [2])
    expected = on_leaf(name, torch.cat([x.reshape(2, -1) for x in tree.leaves()], 1), (1,))

    found = on_tree(name, tree, "feature", reduce=True)
    mapped = torch.vmap(lambda t: on_tree(name, t, "feature", reduce=True))(tree)

    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close((found, mapped), (expected, expected))
    assert tree[:0].sum(dim="feature", reduce=True).shape == (0,)


@pytest.mark.parametrize("name", ["sum", "mean", "amax"])
def test_a_leaf_without_features(name):
    """A leaf without features is its own reduction over them, not one over rows."""
    found = on_tree(name, TREE, "feature")

    assert torch.equal(found["n", "b"], A)
    assert found["n"].batch_size == Size([2, 3, 2])


def test_small_masks_are_reduced_together():
    """One mask of many that is not all true is found."""
    masks = {f"k{i}": torch.ones(5, dtype=torch.bool) for i in range(20)}
    one_false = TensorDict(masks | {"k7": torch.tensor([True, True, False, True, True])}, [5])
    large = TensorDict({key: mask.repeat(1000) for key, mask in masks.items()})

    assert TensorDict(masks, [5]).all() is True
    assert one_false.all() is False
    assert (~one_false).any() is True
    assert (~TensorDict(masks, [5])).any() is False
    assert large.all() is True


COUNTED = TensorDict({"w": torch.ones(2, 3), "norm": {"count": torch.ones(2, dtype=torch.int64)}}, [2])


@pytest.mark.parametrize(("name", "text_of_torch"), [("mean", "infer output dtype"), ("std", "floating")])
def test_a_reduction_names_the_leaf_that_has_no_mean(name, text_of_torch):
    """The counters of BatchNorm make the mean of an ensemble fail, and the error has their path."""
    with pytest.raises(RuntimeError, match=text_of_torch) as caught:
        getattr(COUNTED, name)(0)
    assert caught.value.__notes__ == [f"{name}: raised at the leaf 'norm.count'."]


def test_counters_have_a_mean_as_floats():
    """A tree that is cast to floats has a mean of every leaf."""
    assert COUNTED.float().mean(0)["norm", "count"] == 1
