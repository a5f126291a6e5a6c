"""Functions of several operands, along dimensions, extremes and casts, against torch on every leaf."""

import warnings

import pytest
import torch

from tdfunc import BatchSizeError, TensorDict, TreeStructureError
from tdfunc._lazystack.stack import lazy_stack
from tdfunc.ops import _generate
from tests.helpers import assert_pure, assert_trees_equal

A = torch.tensor([[[1.0, -2.0], [3.0, 0.5], [-4.0, 2.0]], [[0.0, 5.0], [1.0, 1.0], [2.5, -1.0]]])
B = A.flip(2) * 2 + 1
ROWS = torch.tensor([[0.5, 1.0, 2.0], [1.5, -1.0, 0.25]])
MASK = ROWS > 0.5
NAN = A.masked_fill(A == 1, torch.nan).masked_fill(A == 5, torch.inf)


def tree_of(leaf):
    """The leaf, a string, and a part of it in a nested tree with a batch dimension of its own."""
    nested = TensorDict({"b": leaf[..., None]}, [2, 3, 2])
    return TensorDict({"a": leaf, "n": nested, "s": "x"}, [2, 3], names=["r", "c"])


def assert_leaves(found, expected):
    """Check both leaves against what torch gives for the first."""
    assert torch.equal(found["a"], expected)
    assert torch.equal(found["n", "b"][..., 0], expected)
    assert found["s"] == "x"


td, other = tree_of(A), tree_of(B)
WIDE = ROWS[..., None]

OPERANDS = {
    "clamp": (lambda: td.clamp(-1, 2.5), A.clamp(-1, 2.5)),
    "clamp min": (lambda: td.clamp(0.5), A.clamp(0.5)),
    "clamp max": (lambda: torch.clamp(td, max=0.5), A.clamp(max=0.5)),
    "clamp between trees": (lambda: td.clamp(other, other + 1), A.clamp(B, B + 1)),
    "clamp between rows": (lambda: td.clamp(ROWS, ROWS + 1), A.clamp(WIDE, WIDE + 1)),
    "clamp rows and tree": (lambda: td.clamp(ROWS, other), A.clamp(WIDE, B)),
    "clamp number and tree": (lambda: td.clamp(-1, other), A.clamp(min=-1).clamp(max=B)),
    "lerp": (lambda: td.lerp(other, 0.25), A.lerp(B, 0.25)),
    "addcmul": (lambda: td.addcmul(other, ROWS, value=2), A.addcmul(B, WIDE, value=2)),
    "torch.addcdiv": (lambda: torch.addcdiv(td, other, ROWS, value=2), A.addcdiv(B, WIDE, value=2)),
    "lerp by rows": (lambda: torch.lerp(td, other, ROWS), A.lerp(B, WIDE)),
    "lerp by a tree to rows": (lambda: td.lerp(ROWS, other), A.lerp(WIDE.expand_as(A), B)),
    "fmod": (lambda: td.fmod(other), A.fmod(B)),
    "atan2": (lambda: td.atan2(ROWS), A.atan2(WIDE)),
    "masked_fill": (lambda: td.masked_fill(MASK, 7), A.masked_fill(MASK[..., None], 7)),
    "torch.masked_fill": (
        lambda: torch.masked_fill(td, MASK[:, :1], 7), A.masked_fill(MASK[:, :1, None], 7),
    ),
    "nan_to_num": (lambda: tree_of(NAN).nan_to_num(9, posinf=8), NAN.nan_to_num(9, 8)),
    "softmax": (lambda: td.softmax(-1), A.softmax(1)),
    "torch.softmax": (lambda: torch.softmax(td, 0, dtype=torch.float64), A.softmax(0, torch.float64)),
    "cumsum": (lambda: td.cumsum(-1), A.cumsum(1)),
    "cumprod": (lambda: torch.cumprod(td, 0), A.cumprod(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_equal_torch(name):
    """An operand would meet the wrong dimension or the wrong leaf, or a batch size or name be lost."""
    call, expected = OPERANDS[name]
    found = assert_pure(lambda *_: call(), td, other)

    assert_leaves(found, expected)
    assert (found.names, found["n"].batch_size) == (["r", "c"], (2, 3, 2))


REDUCED = {
    "max": (lambda t: t.max(1).values, lambda x: x.max(1).values),
    "where the max is": (lambda t: torch.max(t, -1).indices, lambda x: x.max(1).indices),
    "min kept": (lambda t: t.min(0, keepdim=True).values, lambda x: x.min(0, keepdim=True).values),
    "where the min is": (lambda t: torch.min(t, 0, True).indices, lambda x: x.min(0, keepdim=True).indices),
    "argmax": (lambda t: t.argmax(-1), lambda x: x.argmax(1)),
    "argmin": (lambda t: torch.argmin(t, 0), lambda x: x.argmin(0)),
    "nansum": (lambda t: torch.nansum(t, 0), lambda x: x.nansum(0)),
    "nanmean": (lambda t: t.nanmean((0, 1)), lambda x: x.nanmean((0, 1))),
    "logsumexp": (lambda t: torch.logsumexp(t, (0, 1)), lambda x: x.logsumexp((0, 1))),
    "norm": (lambda t: t.norm(1, -1), lambda x: x.norm(1, 1)),
    "quantile": (lambda t: t.quantile(0.3, 1), lambda x: x.quantile(0.3, 1)),
    "quantile kept": (
        lambda t: t.quantile(torch.tensor(0.5), (0, 1), True, interpolation="lower"),
        lambda x: x.flatten(0, 1).quantile(0.5, 0, interpolation="lower")[None, None],
    ),
}


@pytest.mark.parametrize("name", REDUCED)
def test_reductions_equal_torch(name):
    """A reduction would take another dimension than torch on the leaf, or another batch size."""
    call, on_leaf = REDUCED[name]
    found = assert_pure(call, td)

    assert_leaves(found, on_leaf(A))
    assert found.batch_size == on_leaf(A).shape[:-1]
    assert found["n"].batch_size == on_leaf(A).shape


WHOLE = ("max", "min", "nansum", "nanmean", "logsumexp", "norm", "quantile", "argmax", "argmin")


@pytest.mark.parametrize("name", WHOLE)
def test_whole_leaves_and_features(name):
    """A reduction of a whole leaf, or of the features of one, would see other elements."""
    arguments = [0.5] if name == "quantile" else []
    tree = TensorDict({"a": NAN if name.startswith("nan") else A}, [2])
    features = getattr(tree, name)(*arguments, dim="feature")
    flat = tree["a"].flatten(1)
    expected = getattr(flat, name)(*arguments, dim=1)

    dims = [0] if name == "logsumexp" else []
    assert torch.allclose(
        getattr(tree, name)(*arguments)["a"], getattr(tree["a"].flatten(), name)(*arguments, *dims), equal_nan=True
    )
    values = features.values if name in ("max", "min") else features
    assert torch.allclose(values["a"], expected[0] if name in ("max", "min") else expected, equal_nan=True)
    assert values.batch_size == (2,)


@pytest.mark.parametrize("name", ["max", "min", "nansum", "nanmean", "logsumexp", "norm", "quantile"])
def test_all_leaves_together(name):
    """`reduce=True` would count a leaf twice, or not at all."""
    arguments = [0.5] if name == "quantile" else []
    every = torch.cat([A.flatten(), B.flatten()])
    expected = every.logsumexp(0) if name == "logsumexp" else getattr(every, name)(*arguments)

    assert torch.allclose(
        getattr(TensorDict({"a": A, "n": {"b": B}}), name)(*arguments, reduce=True), expected, rtol=1e-6
    )


def test_features_keep_their_dimensions():
    """`keepdim` would lose one of the feature dimensions, or indices not count through them all."""
    tree = TensorDict({"a": A}, [2])
    values, indices = tree.max("feature", keepdim=True)

    assert values["a"].tolist() == [[[3.0]], [[5.0]]]
    assert indices["a"].tolist() == [[[2]], [[1]]]


def test_gradient_goes_to_one_of_equal_values():
    """`max` over a dimension would spread the gradient, as `amax` does, or not have one."""
    leaf = torch.tensor([1.0, 3.0, 3.0])
    gradient = torch.func.grad(lambda t: t.max(0).values["a"])(TensorDict({"a": leaf}, [3]))

    assert gradient["a"].tolist() == torch.func.grad(lambda x: x.max(0).values)(leaf).tolist()


def test_transforms():
    """The functions would not trace, or see dimensions that vmap took away."""

    def fn(t):
        return t.clamp(-1, 2).lerp(t * 2, 0.5).softmax(0).max(0).values

    tree = td.exclude("n", "s")
    alone = torch.stack([fn(row) for row in tree])

    assert_trees_equal(torch.vmap(fn)(tree).with_names(None), alone.with_names(None), atol=1e-6)
    assert_trees_equal(torch.compile(fn, fullgraph=True, backend="eager")(tree), fn(tree))


def test_lazy_stacks():
    """Trees of different length would have to be padded for what concerns each alone."""
    lazy = lazy_stack([TensorDict({"x": torch.arange(n) + 1.0}, [n]) for n in (2, 3)])

    assert [x.tolist() for x in lazy.clamp(2, 2.5)["x"]] == [[2, 2], [2, 2, 2.5]]
    assert [x.tolist() for x in lazy.lerp(lazy * 3, 0.5)["x"]] == [[2, 4], [2, 4, 6]]
    assert [x.tolist() for x in lazy.half()["x"]] == [[1, 2], [1, 2, 3]]


@pytest.mark.parametrize("name", _generate.CASTS)
def test_casts(name):
    """A cast would give another dtype than torch's method of that name, or copy what has it already."""
    leaf = torch.tensor([[0.0, 1.5], [2.0, -3.0]])
    found = getattr(TensorDict({"a": leaf, "b": leaf.long(), "s": "x"}, [2]), name)()

    assert torch.equal(found["a"], getattr(leaf, name)())
    assert torch.equal(found["b"], getattr(leaf.long(), name)())
    assert found["s"] == "x"
    assert getattr(found, name)() is found


def test_type():
    """`type` would not take every dtype."""
    assert TensorDict({"a": torch.ones(2)}, [2]).type(torch.int16)["a"].dtype is torch.int16


BIG = TensorDict({"a": torch.ones(5, 2, 3, 2)}, [5, 2, 3])
ERRORS = [
    (lambda: td.exclude("n", "s").lerp(BIG, 0.5), BatchSizeError, r"lerp: .*larger.*\n.*\[2, 3\]\n.*\[5, 2, 3\]"),
    (lambda: td.lerp(BIG, 0.5), TreeStructureError, r"lerp: .*different keys.*\n.*'a', 'n', 's'.*\n.*\['a'\]"),
    (lambda: td.lerp(torch.ones(2), 1), BatchSizeError, r"lerp: .*\n.*\[2, 3\]\n.*\[2\]"),
    (lambda: td.masked_fill(MASK[0], 1), ValueError, r"masked_fill: .*\n.*\[2, 3\].*\n.*bool of shape \[3\]"),
    (lambda: td.masked_fill(ROWS, 1), ValueError, r"masked_fill: .*\n.*bool.*\n.*float32"),
    (lambda: torch.nn.functional.log_softmax(td), TypeError, r"log_softmax: trees need a dimension.*\n.*dim=-1"),
    (lambda: td.softmax(2), IndexError, r"softmax: batch dimension 2.*\n.*-2 <= dim < 2"),
    (lambda: td.max((0, 1)), ValueError, r"max: no such.*\n.*one batch dim.*\n.*\(0, 1\)"),
    (lambda: td.max(0, reduce=True), ValueError, r"amax: reduce=True.*\n.*dim None\n.*0"),
    (lambda: td.argmin("rows"), ValueError, r"argmin: no such.*\n.*'feature'\n.*'rows'"),
    (lambda: td.quantile(torch.tensor([0.1, 0.2])), ValueError, r"quantile: .*\n.*a number\n.*\[2\]"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_errors_name_both_values(call, error, message):
    """A wrong call would return something, or not say what it was given."""
    with pytest.raises(error, match=message):
        call()


# -- memory -----------------------------------------------------------------------------------------------------


def test_gradients_are_read():
    """A gradient would be lost, or asking for one that cannot be there would warn."""
    w = torch.ones(2, requires_grad=True)
    tree = TensorDict({"w": w, "n": {"b": torch.zeros(3)}, "y": w * 2}, [])
    tree["y"].sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tree.grad

    assert found["w"] is w.grad
    assert list(found.keys(True)) == ["w", "n"]
    assert tree.requires_grad is True
    assert tree.data.requires_grad is False
    assert tree.data["w"].data_ptr() == w.data_ptr()


def test_layout():
    """A transposed leaf would count as contiguous, or one that is be copied."""
    leaf = torch.arange(6).reshape(2, 3).T
    tree = TensorDict({"a": leaf, "b": torch.zeros(3), "s": "x"}, [3])

    assert not tree.is_contiguous()
    assert tree.contiguous().is_contiguous()
    assert torch.equal(tree.contiguous()["a"], leaf)
    assert tree.contiguous()["b"] is tree["b"]
    assert tree.exclude("a").contiguous()["s"] == "x"
    dense = tree.exclude("a")
    assert dense.contiguous() is dense


def test_shared_memory():
    """A worker process would get a copy: the storage must move in place, as torch's does."""
    leaf = torch.zeros(3)
    tree = TensorDict({"a": leaf, "s": "x"}, [3])

    assert tree.share_memory_() is tree
    assert leaf.is_shared()
