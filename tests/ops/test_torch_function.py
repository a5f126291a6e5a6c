"""Functions of torch that are given a tree, against the same function on every leaf."""

import numpy as np
import pytest
import torch
from torch import Size
from torch.nn import functional as F

from tdfunc import BatchSizeError, ImmutableError, TensorDict, TreeStructureError, UnsupportedError
from tdfunc._lazystack.stack import lazy_stack
from tdfunc.ops import torch_function
from tests.helpers import assert_pure, assert_trees_equal

X = torch.tensor([[0.5, -1.5, 2.0], [float("nan"), 0.25, -0.75]])
INTS = torch.tensor([[4, 6, 3], [9, 1, 2]])


def tree_of(leaf):
    """Two leaves over two rows, and a string for each."""
    return TensorDict({"a": leaf, "n": {"b": leaf.clone()}, "s": ["p", "q"]}, [2], names=["row"])


def assert_leaves(tree, expected):
    """Check both leaves, and that the strings are there."""
    torch.testing.assert_close(tree["a"], expected, equal_nan=True)
    torch.testing.assert_close(tree["n", "b"], expected, equal_nan=True)
    assert tree["s"] == ["p", "q"]


@pytest.mark.parametrize("name", torch_function.LEAFWISE)
def test_functions_of_one_leaf(name):
    """A function without a method of trees would be refused, or computed otherwise."""
    fn, leaf = getattr(torch, name), X.to(torch.complex64) if name == "imag" else X

    assert_leaves(fn(tree_of(leaf)), fn(leaf))


@pytest.mark.parametrize("name", torch_function.PAIRWISE)
def test_functions_of_two_leaves(name):
    """A tree, or a tensor over the batch on either side, would be refused or computed otherwise."""
    fn, whole = getattr(torch, name), name in ("gcd", "lcm") or name.startswith("bitwise")
    leaf, rows = (INTS, torch.tensor([1, 2])) if whole else (X, torch.tensor([1.0, 2.0]))

    assert_leaves(fn(tree_of(leaf), tree_of(leaf.flip(1))), fn(leaf, leaf.flip(1)))
    assert_leaves(fn(tree_of(leaf), rows), fn(leaf, rows[:, None]))
    assert_leaves(fn(rows, tree_of(leaf)), fn(rows[:, None].expand(2, 3), leaf))


@pytest.mark.parametrize("name", torch_function.ALIASES)
def test_other_names(name):
    """A function would be refused under its other name."""
    assert (
        torch_function.FUNCTIONS[getattr(torch, name)]
        is torch_function.FUNCTIONS[getattr(torch, torch_function.ALIASES[name])]
    )


@pytest.mark.parametrize("name", torch_function.SPECIAL)
def test_special_functions(name):
    """A special function would be refused, or computed as another."""
    fn = getattr(torch.special, name)

    assert_leaves(fn(tree_of(X)), fn(X))


@pytest.mark.parametrize("name", torch_function.SPECIAL_ALIASES)
def test_special_functions_of_two_leaves(name):
    """A special function of two trees would be refused, or take them in another order."""
    fn, leaf = getattr(torch.special, name), X.nan_to_num().abs()

    assert_leaves(fn(tree_of(leaf), tree_of(leaf.flip(1) + 1)), fn(leaf, leaf.flip(1) + 1))


@pytest.mark.parametrize("name", torch_function.ACTIVATIONS)
def test_activations(name):
    """An activation would be refused, lose its arguments, or write into the tree when it is asked to."""
    fn, tree = getattr(F, name), tree_of(X.clone())
    options = {"leaky_relu": {"negative_slope": 0.3}, "elu": {"alpha": 0.5}, "gelu": {"approximate": "tanh"}}

    assert_leaves(fn(tree, **options.get(name, {})), fn(X, **options.get(name, {})))
    if name in ("relu", "elu", "silu", "hardtanh"):
        assert_leaves(fn(tree, inplace=True), fn(X))
        assert_leaves(tree, X)


Y = X.flip(0).nan_to_num()
TREE, OTHER = tree_of(Y), tree_of(Y + 1)
# name -> (call of torch on trees, the same on a leaf).
SAME = {
    "logcumsumexp": (lambda: torch.logcumsumexp(TREE, 0), torch.logcumsumexp(Y, 0)),
    "log_softmax": (lambda: torch.log_softmax(TREE, 0), torch.log_softmax(Y, 0)),
    "F.softmax": (lambda: F.softmax(TREE, dim=-1), torch.softmax(Y, 0)),
    "F.relu": (lambda: F.relu(TREE), torch.relu(Y)),
    "isclose": (lambda: torch.isclose(TREE, OTHER, 0, 1.5), torch.isclose(Y, Y + 1, 0, 1.5)),
    "isclose number": (lambda: torch.isclose(TREE, torch.tensor(0.0)), torch.isclose(Y, torch.tensor(0.0))),
    "max of two": (lambda: torch.max(TREE, OTHER), torch.max(Y, Y + 1)),
    "min of two": (lambda: torch.min(TREE, other=OTHER), torch.min(Y, Y + 1)),
    "mse": (lambda: F.mse_loss(TREE, OTHER * 2, reduction="none"), (Y + 2) ** 2),
    "huber": (lambda: F.huber_loss(TREE, OTHER, reduction="none", delta=0.5), torch.full((2, 3), 0.375)),
    "smooth": (lambda: F.smooth_l1_loss(TREE, OTHER, reduction="none", beta=0.5), torch.full((2, 3), 0.75)),
    "zeros": (lambda: torch.zeros_like(TREE, dtype=torch.int), torch.zeros(2, 3, dtype=torch.int)),
    "full": (lambda: torch.full_like(TREE, 3.0), torch.full((2, 3), 3.0)),
    "randint": (lambda: torch.randint_like(TREE, 2, 3), torch.full((2, 3), 2.0)),
    "index_select": (lambda: torch.index_select(TREE, 0, torch.tensor([0, 1])), Y),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_same_as_on_a_leaf(name):
    """A function would be refused, or give other numbers than on each leaf."""
    call, expected = SAME[name]

    assert_leaves(assert_pure(lambda *_: call(), TREE, OTHER), expected)


NUMBERS = TREE.exclude("s")
# name -> (reduction of trees, the same of a leaf, batch size of the result).
REDUCED = {
    "norm": (lambda: torch.norm(NUMBERS), Y.norm(), []),
    "norm 1": (lambda: torch.norm(NUMBERS, 1, 0), Y.norm(1, 0), []),
    "norm keepdim": (lambda: torch.norm(NUMBERS, p="fro", dim=0, keepdim=True), Y.norm(dim=0, keepdim=True), [1]),
    "vector_norm": (lambda: torch.linalg.vector_norm(NUMBERS, 3, 0), torch.linalg.vector_norm(Y, 3, 0), []),
    "quantile": (lambda: torch.quantile(NUMBERS, 0.25, 0), torch.quantile(Y, 0.25, 0), []),
    "std biased": (lambda: torch.std(NUMBERS, 0, False), torch.std(Y, 0, False), []),
    "std biased, of all": (lambda: torch.std(NUMBERS, False), torch.std(Y, False), []),
    "std kept": (lambda: torch.std(NUMBERS, 0, True, True), torch.std(Y, 0, True, True), [1]),
    "var": (lambda: torch.var(NUMBERS, dim=0, correction=0), torch.var(Y, dim=0, correction=0), []),
    "var of all": (lambda: torch.var(NUMBERS), torch.var(Y), []),
    "mse": (lambda: F.mse_loss(NUMBERS, NUMBERS + 2), torch.tensor(4.0), []),
    "l1": (lambda: F.l1_loss(NUMBERS, NUMBERS + 2, reduction="sum"), torch.tensor(12.0), []),
    "select": (lambda: torch.select(NUMBERS, 0, 1), Y[1], []),
    "split": (lambda: torch.split_with_sizes(NUMBERS, [1, 1])[1], Y[1:], [1]),
    "all": (lambda: torch.all(NUMBERS, 0, keepdim=True), Y.all(0, keepdim=True), [1]),
    "any": (lambda: torch.any(NUMBERS, 0, True), Y.any(0, True), [1]),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCED)
def test_reductions_and_shapes(name):
    """A position would be read as another argument than torch reads it, or the batch size be another."""
    call, expected, size = REDUCED[name]
    found = call()

    assert found.batch_size == found["n"].batch_size == Size(size)
    torch.testing.assert_close(found["a"], expected)
    torch.testing.assert_close(found["n", "b"], expected)


def test_like_on_another_device():
    """The tree would say that it is where its leaves are not."""
    made = torch.zeros_like(NUMBERS.to("cpu"), device="meta")

    assert made.device == made["n"].device == made["n", "b"].device == torch.device("meta")
    assert torch.ones_like(NUMBERS).device is None


def test_equal_and_allclose():
    """Two trees that differ in a value, string, shape or key would be equal, or raise where torch gives False."""
    assert torch.equal(TREE, TREE.clone())
    assert torch.allclose(TREE, TREE + 1e-9)
    assert not torch.equal(TREE, OTHER)
    assert not torch.allclose(TREE, OTHER)
    assert torch.allclose(TREE, OTHER, atol=1.5)
    assert not torch.equal(TREE, TREE.set("s", ["p", "r"]))
    assert not torch.allclose(TREE, TREE.set("s", ["p", "r"]))
    assert not torch.equal(TREE, NUMBERS)
    assert not torch.equal(NUMBERS, NUMBERS[:1])
    assert not torch.equal(NUMBERS, NUMBERS.set("a", Y[:, :1]))
    ragged = lazy_stack([TensorDict({"x": torch.ones(n)}, [n]) for n in (1, 2)])
    assert torch.equal(ragged, ragged.clone())
    assert not torch.allclose(ragged, ragged + 1)
    nan = TensorDict({"x": torch.tensor(float("nan"))})
    assert not torch.equal(nan, nan)
    assert torch.allclose(nan, nan, equal_nan=True)
    assert not torch.allclose(nan, nan)
    with pytest.raises(TreeStructureError, match=r"allclose: .*\n.*'s'"):
        torch.allclose(TREE, NUMBERS)
    with pytest.raises(TypeError, match=r"torch.equal: of two trees.\n.*a tree\n.*Tensor"):
        torch.equal(TREE, X)


def test_gradients_of_trees():
    """Gradients would not come back as trees, lose ties, or fill a leaf that is not used."""
    w, b = torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)
    params = TensorDict({"w": w, "n": {"b": b}})
    loss = (params["w"] ** 2).sum()

    found = torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
    assert found.paths() == [("w",)]
    assert torch.equal(found["w"], 2 * w)
    filled = torch.autograd.grad(loss, params, materialize_grads=True, retain_graph=True)
    assert torch.equal(filled["n", "b"], torch.zeros(2))
    pair = torch.autograd.grad(loss, (params.select("w"), w), retain_graph=True)
    assert torch.equal(pair[0]["w"], pair[1])
    outputs, weights = params * 3, TensorDict({"n": {"b": torch.ones(2)}, "w": torch.arange(3.0)})
    mapped = torch.autograd.grad(outputs, params, weights)
    assert torch.equal(mapped["w"], 3 * torch.arange(3.0))
    assert torch.equal(mapped["n", "b"], torch.full((2,), 3.0))
    eye = TensorDict({"w": torch.eye(3)}, [3])
    jacobian = torch.autograd.grad(params.select("w") * 2, params.select("w"), eye, is_grads_batched=True)
    assert jacobian.batch_size == Size([3])
    assert torch.equal(jacobian["w"], 2 * torch.eye(3))


def test_gradients_of_ties_and_lazy_stacks():
    """A tied leaf would be differentiated twice, or a ragged tree not at all."""
    w = torch.randn(3, requires_grad=True)
    tied = TensorDict.from_module(_Twice(w))
    found = torch.autograd.grad((tied["a"] * tied["b"]).sum(), tied)
    rows = [TensorDict({"x": torch.ones(n, requires_grad=True)}, [n]) for n in (1, 2)]
    ragged = torch.autograd.grad(torch.cat((lazy_stack(rows) * 3)["x"]).sum(), lazy_stack(rows))

    assert found.ties() == tied.ties() == [["a", "b"]]
    assert torch.equal(found["b"], 2 * tied["a"])
    assert [x.tolist() for x in ragged["x"]] == [[3.0], [3.0, 3.0]]


class _Twice(torch.nn.Module):
    def __init__(self, w):
        super().__init__()
        self.a = self.b = torch.nn.Parameter(w.detach())


def test_errors():
    """A user could not see which argument is wrong, or a tree would be written."""
    with pytest.raises(TypeError, match=r"grad: grad_outputs has a tree.*\n.*\['TensorDict'\]\n.*\['Tensor'\]"):
        torch.autograd.grad(NUMBERS, NUMBERS, torch.ones(3))
    with pytest.raises(TreeStructureError, match=r"grad: .*\n.*'a', 'n'.*\n.*\['a'\]"):
        torch.autograd.grad(NUMBERS, NUMBERS, NUMBERS.select("a"))
    with pytest.raises(BatchSizeError, match=r"mse_loss: the batch sizes differ.\n.*\[2\]\n.*\[1\]"):
        F.mse_loss(NUMBERS, NUMBERS[:1])
    with pytest.raises(TypeError, match=r"l1_loss: of trees.\n.*two trees\n.*TensorDict and Tensor"):
        F.l1_loss(NUMBERS, Y)
    with pytest.raises(UnsupportedError, match=r"torch.norm: a leaf is a vector.\n.*a number\n.*'nuc'\n.*matrix_norm"):
        torch.norm(NUMBERS, "nuc")
    with pytest.raises(ImmutableError, match=r"torch.add: out= would write to a tree"):
        torch.add(NUMBERS, NUMBERS, out=NUMBERS)
    with pytest.raises(TypeError, match=r"torch.clone: on trees .*\n.*\(input\)\n.*memory_format"):
        torch.clone(NUMBERS, memory_format=torch.contiguous_format)
    with pytest.raises(UnsupportedError, match=r"torch.nn.functional.dropout is not"):
        F.dropout(NUMBERS)
    with pytest.raises(TypeError, match=r"where: the condition must be a tensor.*\n.*a bool tensor.*\n.*TensorDict"):
        torch.where(NUMBERS > 0, NUMBERS, NUMBERS)
    with pytest.raises(TypeError, match="the condition must be a tensor"):
        torch.where(NUMBERS > 0, Y, Y)
    with pytest.raises(IndexError, match="index_select: batch dimension 1"):
        torch.index_select(NUMBERS, 1, torch.tensor([0]))
    with pytest.raises(IndexError, match="^select: batch dimension 1"):
        torch.select(NUMBERS, 1, 0)


def test_quantile_through_torch_refuses_several():
    """Several quantiles would be taken for one."""
    with pytest.raises(ValueError, match=r"quantile: one quantile at a time.\n.*a number\n.*\[2\]"):
        torch.quantile(NUMBERS, torch.tensor([0.1, 0.9]), 0)


TRANSFORMED = {
    "norm": lambda t: torch.norm(t, 2, 0),
    "std": lambda t: torch.std(t, 0, False),
    "mse": lambda t: F.mse_loss(t, t + 1),
    "zeros": torch.zeros_like,
    "index_select": lambda t: torch.index_select(t, 0, torch.tensor([0, 2])),
    "keyword": lambda t: torch.sum(t, dim=0),
    "keyword of numpy": lambda t: torch.sum(t, axis=0, keepdims=True),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_inside_vmap(name):
    """A function would see dimensions that vmap has taken away, or put its batch size elsewhere."""
    fn, batch = TRANSFORMED[name], TensorDict({"x": torch.rand(4, 3, 2), "n": {"y": torch.rand(4, 3)}}, [4, 3])

    assert_trees_equal(torch.vmap(fn)(batch), torch.stack([fn(row) for row in batch]), atol=1e-6)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_compiled(name):
    """A handler would break the graph."""
    torch._dynamo.reset()
    fn, x = TRANSFORMED[name], torch.rand(3, 2)
    compiled = torch.compile(lambda x: fn(TensorDict({"x": x}, [3])), fullgraph=True, backend="eager")

    assert_trees_equal(compiled(x), fn(TensorDict({"x": x}, [3])))


def test_names_of_numpy():
    """`axis` and `keepdims`, which torch takes, would be refused of trees."""
    td = TensorDict({"a": torch.arange(6.0).reshape(2, 3)}, [2])

    assert torch.cat([td, td], axis=0).batch_size == (4,)
    assert torch.stack([td, td], axis=1).batch_size == (2, 2)
    assert torch.unsqueeze(td, axis=0).batch_size == (1, 2)
    assert torch.sum(td, axis=0, keepdims=True)["a"].tolist() == [[3, 5, 7]]


def test_other_arguments_are_named_without_inner_functions():
    """The message would speak of a lambda in place of torch's function."""
    with pytest.raises(TypeError, match=r"torch.clone: on trees.*\n.*\(input\)\n.*got: +got an unexpected.*'memory_"):
        torch.clone(TensorDict({"a": torch.ones(2)}), memory_format=torch.preserve_format)


def test_masks_of_numpy():
    """An array or list of bools, which indexing takes, would be refused with a message that it is one of bools."""
    td = TensorDict({"a": torch.arange(3)}, [3])

    for mask in (np.array([True, False, True]), np.array([True, False, True])[::-1], [True, False, True]):
        assert td.masked_select(mask)["a"].tolist() == [0, 2]
    with pytest.raises(TypeError, match=r"the mask must hold bools.\n.*bool\n.*int64"):
        td.masked_select(np.arange(3))
