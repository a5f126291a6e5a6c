"""Pointwise operations, reductions, maps, casts, torch's functions and printing, against torch leaf by leaf."""

import operator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Size, nn
from torch.nn import UninitializedParameter

from tdfunc import (
    BatchSizeError,
    Kind,
    LeafMismatchError,
    TensorDict,
    TreeStructureError,
    UnsupportedError,
)
from tdfunc.ops import _generate, pointwise
from tests.helpers import assert_pure

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
OPERATORS = (
    "add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor",
)  # fmt: skip
VALUES = torch.tensor([[0.0, 1.0, 2.0], [-1.0, float("nan"), 0.5]])


def leaf_of(dtype):
    """Values that every dtype can hold in its way."""
    return (VALUES if dtype.is_floating_point or dtype.is_complex else VALUES.nan_to_num().abs()).to(dtype)


def outcome(fn):
    """A result, or the class of the error."""
    try:
        return fn()
    except (RuntimeError, TypeError) as error:
        return type(error)


def assert_same_outcome(found, expected):
    """Check that both raise alike, or both give the same dtype and values."""
    if isinstance(expected, type):
        assert isinstance(found, type)
        return
    assert found["a"].dtype is found["n", "b"].dtype is expected.dtype
    assert torch.equal(found["a"], expected) or torch.allclose(found["a"], expected, rtol=0, atol=0, equal_nan=True)


def tree_of(leaf):
    """Two leaves, so that a kernel over lists is used."""
    return TensorDict({"a": leaf, "n": {"b": leaf.clone()}}, leaf.shape[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", _generate.UNARY | _generate.UNARY_LEAFWISE)
def test_unary_equals_torch(name, dtype):
    """A kernel over lists would promote, round or refuse otherwise than torch on a leaf."""
    leaf = leaf_of(dtype)
    expected = outcome(lambda: getattr(torch, name)(leaf))

    assert_same_outcome(outcome(lambda: getattr(tree_of(leaf), name)()), expected)
    assert_same_outcome(outcome(lambda: getattr(torch, name)(tree_of(leaf))), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", _generate.BINARY | _generate.BINARY_LEAFWISE)
def test_binary_equals_torch(name, dtype):
    """A number, tensor or tree as operand would promote or compute otherwise than torch on a leaf."""
    leaf, fn = leaf_of(dtype), getattr(torch, name)
    other, rows = leaf.flip(0), torch.tensor([1.0, 2.0])
    tree = tree_of(leaf)

    assert_same_outcome(outcome(lambda: getattr(tree, name)(tree_of(other))), outcome(lambda: fn(leaf, other)))
    assert_same_outcome(outcome(lambda: getattr(tree, name)(rows)), outcome(lambda: fn(leaf, rows[:, None])))
    assert_same_outcome(outcome(lambda: fn(rows, tree)), outcome(lambda: fn(rows[:, None], leaf)))
    zero_d = torch.tensor(2.0)
    assert_same_outcome(outcome(lambda: getattr(tree, name)(zero_d)), outcome(lambda: fn(leaf, zero_d)))
    if name not in ("maximum", "minimum") and not name.startswith("logical"):
        for number in (2, 0.5, True):
            assert_same_outcome(outcome(lambda n=number: getattr(tree, name)(n)), outcome(lambda n=number: fn(leaf, n)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_equal_torch(name, dtype):
    """An operator with the tree on either side would differ from torch on a leaf."""
    leaf, fn = leaf_of(dtype), getattr(operator, name)
    tree, rows = tree_of(leaf), torch.tensor([1.0, 2.0])

    for number in (2, 0.5, True):
        assert_same_outcome(outcome(lambda n=number: fn(tree, n)), outcome(lambda n=number: fn(leaf, n)))
        assert_same_outcome(outcome(lambda n=number: fn(n, tree)), outcome(lambda n=number: fn(n, leaf)))
    assert_same_outcome(outcome(lambda: fn(tree, rows)), outcome(lambda: fn(leaf, rows[:, None])))
    assert_same_outcome(outcome(lambda: fn(rows, tree)), outcome(lambda: fn(rows[:, None], leaf)))


def test_numbers_of_numpy_and_the_rest():
    """Numpy would take a tree for a sequence, or a maximum with a number fail inside vmap only."""
    tree = tree_of(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))

    assert torch.equal((np.float32(2) * tree)["a"], 2 * tree["a"])
    assert torch.equal((tree + np.float64(2))["a"], tree["a"] + 2)
    assert torch.equal((tree + np.array([1.0, 2.0], dtype=np.float32))["a"], tree["a"] + torch.tensor([[1.0], [2.0]]))
    assert torch.equal(tree.maximum(0)["a"], tree["a"].clamp_min(0))
    assert torch.equal(torch.vmap(lambda t: t.minimum(0.5))(tree)["a"], tree["a"].clamp_max(0.5))
    assert torch.equal(tree.add(tree, alpha=2)["a"], tree["a"] * 3)
    assert torch.equal(tree.div(3, rounding_mode="floor")["a"], tree["a"].div(3, rounding_mode="floor"))
    assert torch.equal((-tree)["a"], -tree["a"])
    assert torch.equal(abs(tree)["a"], tree["a"].abs())
    assert torch.equal((~(tree > 0))["a"], tree["a"] <= 0)
    assert (tree == "text") is False
    assert (tree != None) is True  # noqa: E711
    assert tree in [tree]


def test_trees_that_meet():
    """Keys in another order would be paired wrongly, or shapes that meet a batch be broadcast into it."""
    one = TensorDict({"a": torch.ones(3, 2), "b": torch.zeros(3)}, [3])
    other = TensorDict({"b": torch.full((3,), 5.0), "a": torch.full((3, 2), 7.0)}, [3])

    assert (one + other)["a"].unique().tolist() == [8]
    assert list((one + other).keys()) == ["a", "b"]
    scaled = TensorDict({"a": torch.ones(4, 2), "b": torch.ones(3)}) * TensorDict(
        {"a": torch.tensor(2.0), "b": torch.tensor(3.0)}
    )
    assert scaled["a"].shape == Size([4, 2])
    base = TensorDict({"a": torch.ones(2), "b": torch.tensor(1.0)})
    assert (base + one).batch_size == (one + base).batch_size == Size([3])
    assert (one + TensorDict({"a": torch.ones(3, 2), "b": torch.ones(3)}))["a"].unique().tolist() == [2]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t + torch.zeros(2), BatchSizeError, r"add(.|\n)*broadcasts to \[3\](.|\n)*\[2\]"),
        (lambda t: torch.zeros(2) - t, BatchSizeError, r"sub(.|\n)*broadcasts to \[3\](.|\n)*\[2\]"),
        (lambda t: t + t.exclude("b"), TreeStructureError, r"add: (.|\n)*keys\.(.|\n)*\['a', 'b'\](.|\n)*\['a'\]"),
        (lambda t: t + t.set("a", {"x": 1.0}), TreeStructureError, r"'a' is a leaf in(.|\n)*\[3, 2\](.|\n)*\['x'\]"),
        (lambda t: t.set("a", {"x": 1.0}) + t, TreeStructureError, r"'a' is a tree in(.|\n)*\['x'\](.|\n)*\[3, 2\]"),
        (lambda t: t + t.set("a", "word"), TreeStructureError, r"'a' is a leaf in(.|\n)*tensor(.|\n)*word"),
        (lambda t: t + t.set("a", torch.zeros(3)), LeafMismatchError, r"'a'(.|\n)*\[3, 2\](.|\n)*\[3\]"),
        (lambda t: t + t[:2], BatchSizeError, r"add(.|\n)*\[3\](.|\n)*\[2\]"),
        (lambda t: t + "word", TypeError, "add(.|\n)*number or tensor(.|\n)*str$"),
        (lambda t: t | {"a": 1}, TypeError, r"bitwise_or(.|\n)*number or tensor(.|\n)*dict(.|\n)*td\.update\(d\)"),
        (lambda t: t.sum(1), IndexError, "sum: batch dimension 1"),
        (lambda t: t.sum("x"), ValueError, "'feature'(.|\n)*'x'"),
        (lambda t: t.mean(0, reduce=True), ValueError, "mean: reduce=True(.|\n)*None(.|\n)*0"),
        (lambda t: TensorDict().sum(reduce=True), ValueError, "sum: the tree has no leaves"),
        (lambda t: t.apply(lambda x: x[0]), BatchSizeError, r"apply: the result for 'a'(.|\n)*\[3\](.|\n)*\[2\]"),
        (lambda t: t.apply(lambda x, y: x, t.exclude("b")), TreeStructureError, r"apply(.|\n)*'b'\](.|\n)*\['a'\]"),
        (lambda t: TensorDict([("a", 1)]), TypeError, "a mapping or a tree(.|\n)*list"),
    ],
)  # fmt: skip
def test_refused(call, error, message):
    """Operands that do not fit would be broadcast, or the message not name the leaf and both."""
    tree = TensorDict({"a": torch.zeros(3, 2), "b": torch.zeros(3)}, [3])
    with pytest.raises(error, match=message):
        call(tree)


REDUCTIONS = ["sum", "mean", "prod", "amax", "amin", "std", "var", "all", "any"]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_equal_torch(name):
    """A reduction would cover other elements than it says."""
    leaf = torch.tensor([[[1.0, 2.0], [3.0, 0.0], [5.0, 6.0]], [[7.0, 8.0], [9.0, 1.0], [1.0, 1.0]]])
    tree = TensorDict({"a": leaf, "n": TensorDict({"b": leaf}, [2, 3, 2])}, [2, 3], names=["r", "c"])
    fn, call = getattr(torch, name), getattr(tree, name)

    over = call(0)
    assert torch.equal(over["a"], fn(leaf, 0))
    assert (over.batch_size, over["n"].batch_size, over.names) == ((3,), (3, 2), ["c"])
    twice = {"sum", "prod", "amax", "amin", "all", "any"}
    both = fn(fn(leaf, 1), 0) if name in twice else fn(leaf, (0, 1))
    assert torch.equal(call((0, 1))["a"], both)
    assert torch.equal(getattr(torch, name)(tree, 1)["a"], fn(leaf, 1))
    if name in ("all", "any"):
        assert call() is bool(fn(leaf))
        return
    assert call(0, keepdim=True).names == ["r", "c"]
    assert torch.equal(call(0, keepdim=True)["a"], fn(leaf, 0, keepdim=True))
    whole = fn(leaf, (0, 1, 2)) if name in ("amax", "amin") else fn(leaf)
    torch.testing.assert_close(call()["a"], whole)
    torch.testing.assert_close(tree.select("a").apply(torch.clone).sum(reduce=True), leaf.sum())
    torch.testing.assert_close(getattr(tree.select("a"), name)(reduce=True), whole)


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "amax", "amin"])
def test_features_of_each_node(name):
    """A nested tree would reduce what is batch there, or a leaf without features be reduced over rows."""
    leaf = torch.rand(2, 3, 2)
    tree = TensorDict({"a": leaf, "n": TensorDict({"b": leaf}, [2, 3, 2])}, [2, 3])
    out = getattr(tree, name)(dim="feature")

    assert torch.equal(out["a"], getattr(torch, name)(leaf, -1))
    assert torch.equal(out["n", "b"], leaf)
    assert out["n"].batch_size == Size([2, 3, 2])


def test_generated_file_is_up_to_date():
    """The table and the methods would differ."""
    assert Path(pointwise.__file__).read_text() == _generate.source()


def test_apply():
    """A function would get other leaves, or its results be put elsewhere."""
    tree = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.zeros(3, dtype=torch.long)}, "s": "x"}, [3], names=["t"])
    other = TensorDict({"a": torch.full((3, 2), 4.0)}, [3])

    assert assert_pure(lambda t: t.apply(lambda x: x + 1), tree)["a"].unique().tolist() == [2]
    assert tree.apply(lambda x: x).names == ["t"]
    assert tree.apply(lambda x: x)["s"] == "x"
    assert list(tree.apply(lambda x: x if x.is_floating_point() else None).keys(True)) == ["a", "n", "s"]
    assert "n" not in tree.apply(lambda x: x if x.is_floating_point() else None, filter_empty=True)
    assert tree.exclude("n", "s").apply(torch.add, other)["a"].unique().tolist() == [5]
    assert tree.apply(lambda x, y: x if y is None else y, other, default=None)["a"].unique().tolist() == [4]
    flat = tree.apply(lambda x: x.sum(), batch_size=[], names=None, device="cpu")
    assert (flat.batch_size, flat["n"].batch_size, flat.device) == ((), (), torch.device("cpu"))
    assert tree.apply(lambda x: x[:, None], batch_size=[3, 1], names=["t", "u"]).names == ["t", "u"]
    seen = []
    tree.named_apply(lambda name, x: seen.append(name))
    tree.named_apply(lambda name, x: seen.append(name), nested_keys=True)
    assert seen == ["a", "b", "a", ("n", "b")]
    assert tree.exclude("n", "s").named_apply(lambda name, x, y: x + y, other)["a"].unique().tolist() == [5]


def test_apply_says_where_it_failed():
    """An error of the function would not tell the leaf."""
    tree = TensorDict({"a": torch.ones(3), "n": {"b": torch.zeros(2, 2)}})
    with pytest.raises(RuntimeError) as caught:
        tree.apply(lambda x: x @ torch.ones(3))

    assert caught.value.__notes__ == ["apply: raised at the leaf 'n.b'."]


def test_to():
    """A move or cast would miss a leaf, copy for nothing, or forget the device."""
    tree = TensorDict({"a": torch.ones(3), "n": {"b": torch.zeros(3, dtype=torch.long)}, "s": "x"}, [3])

    assert tree.to("meta").device == tree.to("meta")["n"].device == torch.device("meta")
    assert tree.to("meta")["n", "b"].is_meta
    assert tree.to(torch.float64)["n", "b"].dtype is torch.float64
    assert tree.to("cpu") is not tree
    assert tree.to("cpu")["a"] is tree["a"]
    assert tree.to("cpu").to("cpu", torch.float32).to(torch.float32)["n", "b"].dtype is torch.float32
    on_cpu = tree.cpu()
    assert on_cpu.to("cpu") is on_cpu
    assert tree.to(on_cpu).device == torch.device("cpu")
    assert tree.to(torch.zeros(1, dtype=torch.float64, device="meta"))["a"].dtype is torch.float64
    assert tree.to("cpu", torch.float16, True)["a"].dtype is torch.float16
    assert tree.to(tree) is tree
    assert tree.to("meta")["s"] == "x"


def test_clone_and_detach():
    """A copy would share memory, a view not, or gradients be cut."""
    leaf = torch.ones(3, requires_grad=True)
    tree = TensorDict({"a": leaf, "b": torch.zeros(1).expand(3)}, [3])
    (tree.clone()["a"] * 2).sum().backward()

    assert leaf.grad.tolist() == [2, 2, 2]
    assert tree.clone()["b"].is_contiguous()
    assert not tree.detach()["a"].requires_grad
    assert tree.detach()["a"].data_ptr() == leaf.data_ptr()
    assert tree.clone(recurse=False) is tree
    assert not tree.is_shared()
    assert TensorDict({"a": torch.zeros(3).share_memory_()}).is_shared()
    assert not TensorDict().is_shared()


def test_torch_functions():
    """A function of torch, by position or by name, would do something else than the method."""
    tree = TensorDict({"a": torch.arange(6.0).reshape(2, 3)}, [2])
    index = torch.tensor([1, 1])

    assert torch.equal(torch.gather(tree, dim=0, index=index)["a"], tree["a"][index])
    assert torch.equal(torch.where(torch.tensor([True, False]), tree, 0)["a"][1], torch.zeros(3))
    assert torch.equal(torch.where(torch.tensor([True, False]), 0, tree)["a"][0], torch.zeros(3))
    assert torch.split(tree, split_size_or_sections=1, dim=0)[1]["a"].shape == Size([1, 3])
    assert torch.chunk(tree, 2)[0].batch_size == Size([1])
    assert torch.reshape(tree, (1, 2)).batch_size == torch.unflatten(tree, 0, (1, 2)).batch_size == Size([1, 2])
    assert torch.permute(tree.unsqueeze(0), (1, 0)).batch_size == Size([2, 1])
    assert torch.transpose(tree.unsqueeze(0), 0, 1).batch_size == Size([2, 1])
    assert torch.squeeze(torch.unsqueeze(tree, 0)).batch_size == torch.flatten(tree).batch_size == Size([2])
    assert torch.broadcast_to(tree, (5, 2)).batch_size == Size([5, 2])
    assert torch.masked_select(tree, torch.tensor([True, False])).batch_size == Size([1])
    assert torch.concatenate([tree, tree]).batch_size == torch.concat([tree, tree], 0).batch_size == Size([4])
    assert torch.unbind(tree)[0].batch_size == Size([])
    assert torch.zeros_like(tree)["a"].sum() == 0
    assert torch.full_like(tree, 3, dtype=torch.int64)["a"].dtype is torch.int64
    assert torch.rand_like(tree)["a"].shape == Size([2, 3])
    assert torch.clone(tree)["a"] is not tree["a"]
    assert torch.detach(tree)["a"].shape == Size([2, 3])
    assert torch.all(tree) is False
    assert torch.any(tree) is True
    assert torch.sum(tree, 0)["a"].tolist() == [3, 5, 7]


def test_odd_leaves():
    """An uninitialised parameter, a meta tensor or a parameter would break what does not need its values."""
    lazy = UninitializedParameter()
    tree = TensorDict({"lazy": lazy, "meta": torch.empty(3, device="meta"), "p": nn.Parameter(torch.ones(3))}, [])

    assert tree.select("lazy")["lazy"] is lazy
    assert "lazy: UninitializedParameter(uninitialized" in repr(tree)
    assert tree.with_names([])["lazy"] is lazy
    assert "p: Parameter(shape=torch.Size([3])" in repr(tree)
    assert torch.utils._pytree.tree_map(lambda x: x, tree)["lazy"] is lazy
    with torch.inference_mode():
        made = TensorDict({"a": torch.ones(2)}, [2])
        assert (made + 1)["a"].tolist() == [2, 2]
        assert made.at[0].set(5)["a"].tolist() == [5, 1]


def test_repr():
    """A tree would not print its names, kinds of values or nested trees in one form."""
    tree = TensorDict({"b": {"c": torch.zeros(2)}, "a": "word", "l": ["x", "y"]}, [2], names=["t"])

    assert (
        repr(tree)
        == """TensorDict(
    fields={
        a: NonTensorData(data=word, batch_size=torch.Size([2]), device=None),
        b: TensorDict(
            fields={
                c: Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([2]),
            device=None,
            is_shared=False),
        l: NonTensorStack(['x', 'y'], batch_size=torch.Size([2]), device=None)},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False,
    names=['t'])"""
    )
    assert "a: Tensor" in repr(TensorDict({"a": torch.zeros(2)}))
    seen = []
    torch.vmap(lambda t: seen.append(repr(t)) or t)(TensorDict({"a": torch.zeros(2)}, [2]))
    assert "batch_size=torch.Size([])" in seen[0]


def test_constructor():
    """A tree made from a tree or from keywords would lose batch, names, kinds or entries."""
    tree = TensorDict({"a": torch.zeros(3, 2)}, [3], names=["t"]).set("a", torch.ones(3, 2), kind=Kind.PARAMETER)
    same = TensorDict(tree)

    assert (same.batch_size, same.names, same.kind("a")) == ((3,), ["t"], Kind.PARAMETER)
    assert TensorDict(tree, [3, 2]).names == ["t", None]
    assert TensorDict(tree, []).names == []
    assert list(TensorDict(tree, b=torch.zeros(3)).keys()) == ["a", "b"]
    assert list(TensorDict(a=1, b=2).keys()) == ["a", "b"]
    assert TensorDict.fromkeys(["a", ("n", "b")], 0)["n", "b"] == 0
    assert TensorDict({}, 3).batch_size == Size([3])
    with pytest.raises(UnsupportedError, match="TensorDict is final, Mine(.|\n)*TensorClass"):

        class Mine(TensorDict):  # pyright: ignore
            pass


@pytest.mark.parametrize(
    "fn",
    [torch.Tensor.clone, torch.neg, lambda t: t * 2, lambda t: t + t, lambda t: t.clamp(0, 1), torch.exp],
    ids=["clone", "neg", "number", "tree", "clamp", "exp"],
)
def test_each_leaf_requires_grad_as_alone(fn):
    """A buffer beside a Parameter would begin to require grad, because one kernel ran over both."""
    leaves = {"w": nn.Parameter(torch.ones(2)), "buffer": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64)}

    for keys in (["w", "buffer"], ["w", "buffer", "ids"], ["buffer"], ["w"]):
        tree = TensorDict({key: leaves[key] for key in keys}, [2])
        new = tree.clone() if fn is torch.Tensor.clone else fn(tree)
        assert {key: new[key].requires_grad for key in keys} == {key: fn(leaves[key]).requires_grad for key in keys}


def test_a_tree_of_gradients_keeps_one_kernel_call():
    """Parameters times what does not require grad would run leaf by leaf, for no reason."""
    params = TensorDict({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2))})
    with torch.profiler.profile() as profile:
        params + params.detach()

    assert any("foreach" in event.name for event in profile.events())


def test_a_reduction_names_the_leaf_that_has_no_mean():
    """The counters of BatchNorm would make the mean of an ensemble fail without saying where."""
    tree = TensorDict({"w": torch.ones(2, 3), "norm": {"count": torch.ones(2, dtype=torch.int64)}}, [2])

    for name, torch_text in (("mean", "infer output dtype"), ("std", "floating")):
        with pytest.raises(RuntimeError, match=torch_text) as caught:
            getattr(tree, name)(0)
        assert caught.value.__notes__ == [f"{name}: raised at the leaf 'norm.count'."]
    assert tree.float().mean(0)["norm", "count"] == 1
