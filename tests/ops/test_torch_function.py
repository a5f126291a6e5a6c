"""Functions of torch that are given a tree, against the same function on every leaf."""

import pytest
import torch
from torch import Size
from torch.nn import functional as F

from tdfunc import TensorDict
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
    """A function without a method of trees is computed on every leaf."""
    fn, leaf = getattr(torch, name), X.to(torch.complex64) if name == "imag" else X

    assert_leaves(fn(tree_of(leaf)), fn(leaf))


@pytest.mark.parametrize("name", torch_function.PAIRWISE)
def test_functions_of_two_leaves(name):
    """The other operand is a tree, or a tensor over the batch on either side."""
    fn, whole = getattr(torch, name), name in ("gcd", "lcm") or name.startswith("bitwise")
    leaf, rows = (INTS, torch.tensor([1, 2])) if whole else (X, torch.tensor([1.0, 2.0]))

    assert_leaves(fn(tree_of(leaf), tree_of(leaf.flip(1))), fn(leaf, leaf.flip(1)))
    assert_leaves(fn(tree_of(leaf), rows), fn(leaf, rows[:, None]))
    assert_leaves(fn(rows, tree_of(leaf)), fn(rows[:, None].expand(2, 3), leaf))


@pytest.mark.parametrize("name", torch_function.ALIASES)
def test_other_names(name):
    """A function has one handler under all of its names."""
    assert (
        torch_function.FUNCTIONS[getattr(torch, name)]
        is torch_function.FUNCTIONS[getattr(torch, torch_function.ALIASES[name])]
    )


OPTIONS = {"leaky_relu": {"negative_slope": 0.3}, "elu": {"alpha": 0.5}, "gelu": {"approximate": "tanh"}}


@pytest.mark.parametrize("name", torch_function.ACTIVATIONS)
def test_activations(name):
    """An activation takes its arguments."""
    fn, options = getattr(F, name), OPTIONS.get(name, {})

    assert_leaves(fn(tree_of(X.clone()), **options), fn(X, **options))


@pytest.mark.parametrize("name", ["relu", "elu", "silu", "hardtanh"])
def test_activations_write_nothing(name):
    """An activation with `inplace` gives a new tree."""
    fn, tree = getattr(F, name), tree_of(X.clone())

    assert_leaves(fn(tree, inplace=True), fn(X))
    assert_leaves(tree, X)


Y = X.flip(0).nan_to_num()
TREE, OTHER, ONE = tree_of(Y), tree_of(Y + 1), torch.tensor(1.0)
# name -> (call of torch on trees, the same on a leaf).
SAME = {
    "logcumsumexp": (lambda: torch.logcumsumexp(TREE, 0), torch.logcumsumexp(Y, 0)),
    "log_softmax": (lambda: torch.log_softmax(TREE, 0), torch.log_softmax(Y, 0)),
    "F.softmax": (lambda: F.softmax(TREE, dim=-1), torch.softmax(Y, 0)),
    "F.relu": (lambda: F.relu(TREE), torch.relu(Y)),
    "isclose": (lambda: torch.isclose(TREE, OTHER, 0, 1.5), torch.isclose(Y, Y + 1, 0, 1.5)),
    "isclose to the tree": (lambda: torch.isclose(ONE, TREE, 1.0, 0.0), torch.isclose(ONE, Y, 1.0, 0.0)),
    "number first": (lambda: torch.float_power(2, TREE), torch.float_power(2, Y)),
    "option, tensor first": (lambda: torch.sub(ONE, TREE, alpha=3), torch.sub(ONE, Y, alpha=3)),
    "round": (lambda: torch.round(TREE, decimals=1), torch.round(Y, decimals=1)),
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
    """A function gives the numbers of torch on each leaf."""
    call, expected = SAME[name]

    assert_leaves(assert_pure(lambda *_: call(), TREE, OTHER), expected)


NUMBERS = TREE.exclude("s")
# name -> (reduction of trees, the same of a leaf, batch size of the result).
REDUCED = {
    "vector_norm": (lambda: torch.linalg.vector_norm(NUMBERS, 3, 0), torch.linalg.vector_norm(Y, 3, 0), []),
    "quantile": (lambda: torch.quantile(NUMBERS, 0.25, 0), torch.quantile(Y, 0.25, 0), []),
    "max": (lambda: torch.max(NUMBERS, 0).values, torch.max(Y, 0).values, []),
    "max without positions": (lambda: NUMBERS.max(0, return_indices=False), torch.max(Y, 0).values, []),
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
    """Positions are read as torch reads them, and the batch size follows."""
    call, expected, size = REDUCED[name]
    found = call()

    assert found.batch_size == found["n"].batch_size == Size(size)
    torch.testing.assert_close(found["a"], expected)
    torch.testing.assert_close(found["n", "b"], expected)


def test_like_on_another_device():
    """The device of the tree is that of its new leaves."""
    made = torch.zeros_like(NUMBERS.to("cpu"), device="meta")

    assert made.device == made["n"].device == made["n", "b"].device == torch.device("meta")
    assert torch.ones_like(NUMBERS).device is None


TRANSFORMED = {
    "std": lambda t: torch.std(t, 0, False),
    "mse": lambda t: F.mse_loss(t, t + 1),
    "zeros": torch.zeros_like,
    "index_select": lambda t: torch.index_select(t, 0, torch.tensor([0, 2])),
    "keyword": lambda t: torch.sum(TensorDict({"x": t["x"]}, t.batch_size), dim=0),
    # Dynamo calls `Tensor.__rsub__`.
    "tensor on the right": lambda t: t - torch.arange(3.0),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_inside_transforms(name):
    """A function sees the dimensions that vmap leaves, and its handler compiles into one graph."""
    torch._dynamo.reset()
    fn, batch = TRANSFORMED[name], TensorDict({"x": torch.rand(4, 3, 2), "n": {"y": torch.rand(4, 3)}}, [4, 3])
    mapped, compiled = torch.vmap(fn), torch.compile(fn, fullgraph=True, backend="eager")

    assert_trees_equal(mapped(batch), torch.stack([fn(row) for row in batch]), atol=1e-6)
    assert_trees_equal(compiled(batch[0]), fn(batch[0]))


GRID = TensorDict({"a": torch.arange(6.0).reshape(2, 3)}, [2])
GRID_ROW = GRID.unsqueeze(0)
SIZES = {
    "reshape": (lambda: torch.reshape(GRID, (1, 2)), [1, 2]),
    "unflatten": (lambda: torch.unflatten(GRID, 0, (1, 2)), [1, 2]),
    "permute": (lambda: torch.permute(GRID_ROW, (1, 0)), [2, 1]),
    "transpose": (lambda: torch.transpose(GRID_ROW, 0, 1), [2, 1]),
    "squeeze": (lambda: torch.squeeze(torch.unsqueeze(GRID, 0)), [2]),
    "flatten": (lambda: torch.flatten(GRID), [2]),
    "broadcast_to": (lambda: torch.broadcast_to(GRID, (5, 2)), [5, 2]),
    "masked_select": (lambda: torch.masked_select(GRID, torch.tensor([True, False])), [1]),
    "concatenate": (lambda: torch.concatenate([GRID, GRID]), [4]),
    "concat": (lambda: torch.concat([GRID, GRID], 0), [4]),
    "unbind": (lambda: torch.unbind(GRID)[0], []),
    "chunk": (lambda: torch.chunk(GRID, 2)[0], [1]),
    "split": (lambda: torch.split(GRID, split_size_or_sections=1, dim=0)[1], [1]),
    "rand_like": (lambda: torch.rand_like(GRID), [2]),
    "detach": (lambda: torch.detach(GRID), [2]),
}


@pytest.mark.parametrize(("call", "size"), SIZES.values(), ids=SIZES)
def test_functions_by_position_and_name(call, size):
    """A function of torch takes its arguments by position or by torch's names."""
    found = call()

    assert found.batch_size == Size(size)
    assert found["a"].shape == Size([*size, 3])


def test_gather_by_name():
    """`torch.gather` takes rows of every leaf."""
    index = torch.tensor([1, 1])

    assert torch.equal(torch.gather(GRID, dim=0, index=index)["a"], GRID["a"][index])


def test_where_with_a_number_on_either_side():
    """`torch.where` takes a number for one of two trees, on either side."""
    first = torch.tensor([True, False])

    assert torch.where(first, GRID, 0)["a"].tolist() == [[0, 1, 2], [0, 0, 0]]
    assert torch.where(first, 0, GRID)["a"].tolist() == [[0, 0, 0], [3, 4, 5]]


def test_clone_by_torch():
    """`torch.clone` copies leaves."""
    assert torch.clone(GRID)["a"] is not GRID["a"]


@pytest.mark.parametrize("fn", [torch.all, torch.any])
def test_truth_of_a_tree_by_torch(fn):
    """`torch.all` and `torch.any` give a bool of all leaves."""
    assert fn(GRID) is (fn is torch.any)


OPERATORS = {
    "__rsub__": lambda x, tree: x - tree,
    "__rpow__": lambda x, tree: x**tree,
    "__rmod__": lambda x, tree: x % tree,
    "__rdiv__": lambda x, tree: x / tree,
    "__rtruediv__": lambda x, tree: x / tree,
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", OPERATORS)
def test_an_operator_is_known_by_the_method_and_not_by_its_name(method, compiled, monkeypatch):
    """`tensor - tree` and its kin work where torch's method calls itself otherwise, as newer versions do."""
    torch._dynamo.reset()
    function, fn = getattr(torch.Tensor, method), OPERATORS[method]
    if hasattr(function, "__code__"):
        monkeypatch.setattr(function, "__name__", "wrapped")
    tree = TensorDict({"x": torch.tensor([1.0, 2.0, 3.0])}, [3])
    run = torch.compile(fn, fullgraph=True, backend="eager") if compiled else fn

    out = run(torch.tensor([4.0, 5.0, 7.0]), tree)

    assert torch.equal(out["x"], fn(torch.tensor([4.0, 5.0, 7.0]), tree["x"]))
