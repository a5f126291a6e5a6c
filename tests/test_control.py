"""Control flow over trees: against Python's statements, under transformations and compilers, and its errors."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size, Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import tdfunc as tdf
from tdfunc import BatchSizeError, LeafMismatchError, TensorClass, TensorDict, TreeStructureError, UnsupportedError
from tests.helpers import assert_pure, assert_trees_equal, quick
from tests.strategies import trees


class State(TensorClass):
    x: Tensor
    note: str = "kept"
    best: Tensor | None = None


class Pair(NamedTuple):
    tree: TensorDict
    number: Tensor


def tree():
    """A tree with names, a word, and empty trees of its own and of a longer batch."""
    entries = {"a": torch.arange(6.0).reshape(3, 2), "n": {"b": torch.ones(3)}, "s": "word", "e": {}}
    return TensorDict(entries | {"l": TensorDict({}, [3, 2])}, [3], names=["t"])


def tied():
    """A tree in which one tensor has two paths."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    return tdf.from_module(model).detach()


def assert_same(actual, expected):
    """Check equality of results, trees or containers of them."""
    if isinstance(expected, tuple | list):
        assert type(actual) is type(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    else:
        assert_trees_equal(actual, expected, rtol=1e-6, atol=1e-6)


def without_names(x):
    """A tree without names of its dimensions, or a tensor."""
    return x.with_names(None) if isinstance(x, TensorDict) else x


def double_or_next(t):
    """Either branch, by the sum of a leaf."""
    return tdf.cond(t["a"].sum() > 0, lambda t: t * 2, lambda t: t + 1, (t,))


def add_until(t):
    """Two carried values, a counter and a tree."""
    return tdf.while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t * 2), (torch.tensor(0), t))


def rows(t):
    """New keys for each row."""
    return tdf.map(lambda row: row.set("z", row["a"] * 2).delete("n"), t)


def sums(t):
    """A carry and a result with other keys."""
    return tdf.scan(lambda c, row: (c + row, (c * 2).set("z", row["a"])), t[0], t)


def backward_sums(t):
    """The same from the other end."""
    return tdf.scan(lambda c, row: (c + row, row * c), t[0], t, reverse=True)


FUNCTIONS = [double_or_next, add_until, rows, sums, backward_sums]

# -- against Python's statements --------------------------------------------------------------------------------


@pytest.mark.parametrize("given_as", [bool, torch.tensor, lambda pred: torch.tensor([pred])], ids=["bool", "0d", "1d"])
@given(t=trees(nontensor=True))
def test_cond_is_an_if(given_as, t):
    """A branch gets, and returns, the trees that Python's `if` gives."""
    found = [tdf.cond(given_as(pred), lambda t: (t, 1), lambda t: t.empty(), (t,)) for pred in (True, False)]

    assert_same(found, [(t, 1), t.empty()])


@given(trees(), st.integers(0, 4))
def test_while_loop_is_a_while(t, steps):
    """The loop does the steps of Python's `while`, and a tree that a step leaves alone stays as it is."""
    count, same = tdf.while_loop(lambda i, t: i < steps, lambda i, t: (i + 1, t.clone()), (torch.tensor(0), t))

    assert count == steps
    assert_trees_equal(same, t)


@given(trees().filter(lambda t: t.ndim and t.batch_size[0] and t.leaves()))
def test_map_is_a_loop(t):
    """Rows are those that vmap gives, and come back as they were."""
    seen = []
    out = tdf.map(lambda row: seen.append(row) or row.clone(), t)

    assert_trees_equal(out, t.with_names(None))
    assert len(seen) == t.batch_size[0]
    assert {row.batch_size for row in seen} == {t.batch_size[1:]}
    assert all(torch.equal(a, b[0]) for a, b in zip(seen[0].leaves(), t.leaves(), strict=True))


@given(st.integers(1, 5), st.booleans(), st.integers(0, 1))
def test_scan_is_a_loop(length, reverse, dim):
    """A scan goes through the rows in order, and puts results at the places of their rows."""
    size = [length, 2] if dim == 0 else [2, length]
    t = TensorDict({"x": torch.arange(2.0 * length).reshape(size), "n": {"y": torch.ones(*size, 3)}}, size)
    last, out = tdf.scan(
        lambda c, row: (c + row, c * row), t.select("x", "n").unbind(dim)[0], t, dim=dim, reverse=reverse
    )

    carry, results = t.unbind(dim)[0], []
    for row in reversed(t.unbind(dim)) if reverse else t.unbind(dim):
        results.append(carry * row)
        carry = carry + row
    assert_trees_equal(last, carry)
    assert_trees_equal(out, torch.stack(results[::-1] if reverse else results, dim))


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_operands_are_not_written(fn):
    """A call writes to none of its operands."""
    assert_pure(fn, tree())


@pytest.fixture
def operands():
    """Typed trees, lazy stacks, ties, non-tensor data and containers; last a count in a pair, and a dict."""
    state = State(torch.ones(3, 2), batch_size=[3])
    lazy = tdf.lazy_stack([TensorDict({"x": torch.ones(2, n)}, [2]) for n in (1, 2)], dim=1)
    words = TensorDict({"x": torch.ones(3), "w": ["a", "b", "c"]}, [3])
    return state, lazy, words, tied(), Pair(tree(), torch.tensor(1)), {"k": [tree()]}


def test_every_kind_of_node_comes_back_from_a_branch(operands):
    """A branch returns what it was given."""
    assert tdf.cond(torch.tensor(True), lambda *t: t, lambda *t: t, operands) == operands


def test_every_kind_of_node_comes_back_from_a_loop(operands):
    """A loop returns what it does not change."""
    looped = tdf.while_loop(
        lambda *t: t[-2].number < 3, lambda *t: (*t[:-2], Pair(t[-2].tree, t[-2].number + 1), t[-1]), operands
    )

    assert [a is b for a, b in zip(looped[:-2], operands[:-2], strict=True)] == [True] * 4
    assert looped[-2].number == 3


def test_every_kind_of_node_comes_back_from_a_map(operands):
    """A map keeps typed trees, values for each row, ties, lazy stacks and containers."""
    state, lazy, words, *_ = operands

    assert_same(tdf.map(lambda rows: rows, (state, words)), (state, words))
    assert len(tdf.map(lambda t: t * 2, torch.stack([tied(), tied()])).leaves()) == 1
    assert tdf.map(lambda t: t * 2, lazy)["x"][1].tolist() == [[2, 2], [2, 2]]
    assert tdf.map(lambda x: ("s", {}), torch.ones(2)) == ("s", {})


# -- under transformations --------------------------------------------------------------------------------------


def test_cond_under_vmap_selects():
    """A condition that differs between members selects for each."""
    t = torch.stack([tree(), tree() - 100]).exclude("s")

    out = torch.vmap(double_or_next)(t)

    assert_trees_equal(out, torch.stack([double_or_next(t[0]), double_or_next(t[1])]).with_names(None))


# torch's own, for constants of what it linearizes.
def python_sums(t):
    """`sums` in Python."""
    carry, out = t[0], []
    for row in t.unbind(0):
        out.append((carry * 2).set("z", row["a"]))
        carry = carry + row
    return carry, torch.stack(out)


def loss_of(fn):
    """The sum of squares of what a function returns."""
    return lambda t: sum(x.square().sum() for x in pytree.tree_leaves(fn(t)) if x.is_floating_point())


STATEMENTS = {
    "cond": (double_or_next, lambda t: t * 2),
    "while_loop": (add_until, lambda t: t * 8),
    "map": (
        lambda t: tdf.map(lambda row: row.set("z", row["a"] * 2), t),
        lambda t: t.set("z", t["a"] * 2),
    ),
    "scan": (sums, python_sums),
}


@pytest.mark.parametrize(("fn", "plain"), STATEMENTS.values(), ids=STATEMENTS)
def test_gradients_are_those_of_the_statement(fn, plain):
    """Gradients, alone or for each member, and tangents are those of the Python code."""
    t = TensorDict({"a": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}, [3])
    both = torch.stack([t, t + 1])

    found, expected = [torch.func.grad(loss_of(f)) for f in (fn, plain)]
    _, tangent = torch.func.jvp(loss_of(fn), (t,), (torch.ones_like(t),))
    assert_trees_equal(found(t), expected(t), rtol=1e-5)
    assert_trees_equal(torch.vmap(found)(both), torch.stack([expected(x) for x in both.unbind(0)]), rtol=1e-5)
    torch.testing.assert_close(tangent, torch.func.jvp(loss_of(plain), (t,), (torch.ones_like(t),))[1])


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")
def test_a_branch_is_linearized():
    """`torch.func.linearize` of a branch is its derivative."""
    t = TensorDict({"a": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}, [3])

    assert_trees_equal(torch.func.linearize(double_or_next, t)[1](t), t * 2)


@pytest.mark.parametrize("fn", [add_until, rows, sums, backward_sums])
def test_vmap_of_loops(fn):
    """Members stay apart, and a loop over rows under vmap keeps the batch dimensions."""
    t = torch.stack([tree(), tree() + 1]).exclude("s")

    found, alone = torch.vmap(fn)(t), [fn(x) for x in t.unbind(0)]
    expected = pytree.tree_map(lambda *xs: torch.stack(xs), *alone, is_leaf=lambda x: isinstance(x, TensorDict))
    assert_same(found, pytree.tree_map(without_names, expected, is_leaf=lambda x: isinstance(x, TensorDict)))


@pytest.mark.parametrize("fn", [double_or_next, rows, sums, backward_sums])
def test_jit(fn):
    """A branch follows the values of each call, and a loop over rows is recorded."""
    step, given_trees = tdf.jit(fn), [tree(), tree() - 100]

    assert_same([step(t) for t in given_trees], [fn(t) for t in given_trees])


def test_jit_of_a_loop_without_a_number_of_steps():
    """A loop whose number of steps depends on values is not recorded."""
    with pytest.raises(UnsupportedError, match=r"while_loop: the number of steps is not known[\s\S]*jit"):
        tdf.jit(add_until)(tree())


# -- under compilers --------------------------------------------------------------------------------------------


def compiled(fn, *, backend="eager", dynamic=None):
    """Compile anew, so that a test does not depend on those before it."""
    torch.compiler.reset()
    return torch.compile(fn, fullgraph=True, backend=backend, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fn", quick(FUNCTIONS, double_or_next))
def test_compile(fn, dynamic):
    """`torch.compile` makes one graph that gives the same tree for all values, also of symbolic sizes."""
    run, given_trees = compiled(fn, dynamic=dynamic), [tree(), tree() - 100]

    assert_same([run(t) for t in given_trees], [fn(t) for t in given_trees])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_compile_with_autograd(fn, backend):
    """The compiled operator has the gradients of every leaf."""
    t = tree()

    def gradients(call):
        leaves = t.apply(lambda x: x.clone().requires_grad_())
        out = [x for x in pytree.tree_leaves(call(leaves)) if x.requires_grad]
        return torch.autograd.grad(sum(x.square().sum() for x in out), leaves.leaves(), materialize_grads=True)

    torch.testing.assert_close(gradients(compiled(fn, backend=backend)), gradients(fn))


@pytest.mark.slow
@pytest.mark.parametrize("fn", [double_or_next, rows, sums])
def test_compile_of_transforms(fn):
    """A compiled vmap or grad, for which torch's operators have no rules, gives the eager numbers."""
    both = torch.stack([tree(), tree() - 100]).exclude("s").with_names(None)

    def grad(t):
        return torch.func.grad(lambda t: sum(x.square().sum() for x in pytree.tree_leaves(fn(t))))(t)

    assert_same(compiled(torch.vmap(fn))(both), torch.vmap(fn)(both))
    assert_same(compiled(grad)(tree()), grad(tree()))


@pytest.fixture(scope="module")
def mixed():
    """A branch whose result holds typed trees, ties, values for each row and numbers; its operands; the program."""
    state = State(torch.ones(3, 2), "n", batch_size=[3])
    words = TensorDict({"x": torch.ones(3), "w": ["a", "b", "c"]}, [3])

    def fn(x, state, words, tied):
        def yes(state, words, tied):
            return Pair(state.replace(x=state.x * 2), words["x"]), {"k": [words, tied * 2, 3, None, "s"]}

        def no(state, words, tied):
            return Pair(state, words["x"] + 1), {"k": [words, tied, 3, None, "s"]}

        return tdf.cond(x.sum() > 0, yes, no, (state, words, tied))

    return fn, (state, words, tied()), compiled(fn)


@pytest.mark.slow
@pytest.mark.parametrize("x", [torch.ones(1), -torch.ones(1)], ids=["true", "false"])
def test_compile_keeps_what_is_not_a_tensor(mixed, x):
    """Typed trees, ties, values for each row and numbers of a result are kept when compiled."""
    fn, operands, run = mixed
    (pair, extra), (expected, other) = run(x, *operands), fn(x, *operands)

    assert type(pair) is Pair
    assert_trees_equal(pair.tree, expected.tree)
    assert pair.tree.note == "n"
    assert extra["k"][2:] == other["k"][2:]
    assert_trees_equal(extra["k"][0], other["k"][0])
    assert len(extra["k"][1].leaves()) == 1


def branches(change):
    """Both branches change the shape of a tree with a word."""
    return lambda t: tdf.cond(t["a"].sum() > 0, change, lambda t: change(t * 2), (t,))


WORDS = {
    "slice": branches(lambda t: t[:2]),
    "unsqueeze": branches(lambda t: t.unsqueeze(0)),
    "reshape": branches(lambda t: t.reshape(2, 6)),
    "int": branches(lambda t: t[0]),
    "another word": branches(lambda t: t.set("q", "z").set(("n", "r"), "y")),
    "map": lambda t: tdf.map(lambda row: row.set("q", "z") * 2, t),
    "map, unsqueeze": lambda t: tdf.map(lambda row: row.unsqueeze(1), t),
    "scan": lambda t: tdf.scan(lambda c, row: (c, row.set("q", "z")[1:]), t[0], t)[1],
    "scan of one row": lambda t: tdf.scan(lambda c, row: (c + row, row.set("q", "z")), t[0], t[:1])[1],
    "scan of columns": lambda t: tdf.scan(lambda c, row: (c, row.set("q", "z")), 1, t, dim=1, reverse=True)[1],
    "numbers": lambda t: tdf.scan(lambda c, row: (c, TensorDict({"n": {"m": row["a"].sum()}})), 1, t, dim=1)[1],
}


def wordy(a):
    """A tree of two batch dimensions with words at two levels."""
    return TensorDict({"a": a, "n": {"b": a * 3, "t": "x"}, "s": "w"}, a.shape)


class Calls(torch.nn.Module):
    """A function as a module."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, t):
        return self.fn(t)


def recorded(fn, a):
    """The graph of `make_fx`, and the structure of its result."""
    made = []

    def leaves(a):
        made.append(fn(wordy(a)))
        return pytree.tree_leaves(made[-1])

    graph = make_fx(leaves, tracing_mode="fake")(a)
    return lambda values: pytree.tree_unflatten(graph(values), pytree.tree_structure(made[0]))


def exported(fn, a):
    """The program of `torch.export`."""
    program = torch.export.export(Calls(fn), (wordy(a),)).module()
    return lambda values: program(wordy(values))


def whole(fn, a):
    """The function compiled as one graph."""
    run = compiled(fn)
    return lambda values: run(wordy(values))


QUICK = [("slice", recorded), ("scan of columns", recorded)]


def assert_words_follow(actual, expected):
    """Check equality, and that every word is seen with the batch size of its tree."""
    assert_same(actual, expected)
    for one, other in ((actual, expected), (actual["n"], expected["n"])):
        assert {key: node.shape for key, node in one._data.items()} == {k: n.shape for k, n in other._data.items()}


@pytest.mark.parametrize(
    ("name", "record"),
    [
        pytest.param(name, record, marks=[pytest.mark.slow] * ((name, record) not in QUICK))
        for name in WORDS
        for record in (whole, exported, recorded)
    ],
)
def test_words_of_captured_bodies(name, record):
    """A compiled, exported or recorded body may return a word whose batch size is not that of its operand."""
    fn, a = WORDS[name], torch.arange(12.0).reshape(4, 3)
    run = record(fn, a)

    for values in (a, a - 100):
        assert_words_follow(run(values), fn(wordy(values)))


@pytest.mark.slow
def test_compiled_branches_may_return_operands():
    """A branch may return its operand, a view of it, or one leaf twice, though torch allows no aliases."""

    def same(t):
        return TensorDict({"x": t["a"], "y": t["a"][:, :1], "z": t["a"]}, [3])

    def fn(t):
        return tdf.cond(t["a"].sum() > 0, same, lambda t: same(t) * 2, (t,))

    assert_same(compiled(fn)(tree()), fn(tree()))


@pytest.mark.slow
def test_recompiles():
    """Another value of the condition or the leaves does not compile again."""
    torch.compiler.reset()
    counter = CompileCounter()
    run = torch.compile(double_or_next, fullgraph=True, backend=counter)
    for t in (tree(), tree() - 100, tree() * 3):
        run(t)

    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("fn", "operator"), [(double_or_next, "cond"), (add_until, "while_loop"), (rows, "map_impl"), (sums, "scan")]
)
def test_export(fn, operator, strict):
    """An exported program holds both branches, the loop, and the tree."""
    t = tree().exclude("s")
    program = torch.export.export(Calls(fn), (t,), strict=strict)

    assert operator in {str(node.target) for node in program.graph.nodes}
    assert_same([program.module()(other) for other in (t, t - 100)], [fn(other) for other in (t, t - 100)])


def test_symbolic_sizes():
    """A condition on a symbolic size stays a condition."""
    total = lambda x: tdf.cond(x.shape[0] > 3, torch.sum, torch.prod, (x,))  # noqa: E731
    graph = make_fx(total, tracing_mode="symbolic")(torch.full((5,), 2.0))

    assert [graph(torch.full((n,), 2.0)).item() for n in (3, 4)] == [8, 8]


def test_meta_and_fake_tensors():
    """Shapes are found without values."""
    t = tree().exclude("s").to("meta")

    assert double_or_next(t)["a"].shape == Size([3, 2])
    assert tdf.cond(torch.ones((), device="meta"), lambda: ("s", 1), lambda: ("s", 1)) == ("s", 1)
    assert rows(t)["z"].shape == Size([3, 2])
    with pytest.raises(UnsupportedError, match="the number of steps is not known"):
        tdf.while_loop(lambda t: t["a"].sum() < 1, lambda t: (t,), (t,))
    with torch._subclasses.FakeTensorMode():
        assert double_or_next(TensorDict({"a": torch.ones(3, 2)}, [3]))["a"].shape == Size([3, 2])


# -- errors -----------------------------------------------------------------------------------------------------

T = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.ones(3)}}, [3])
DIFFERENT = {
    "shape": (lambda t: t.apply(lambda x: x[..., None]), LeafMismatchError, r"a'[\s\S]*\[3, 2\][\s\S]*\[3, 2, 1\]"),
    "dtype": (lambda t: t.to(torch.float64), LeafMismatchError, r"a'[\s\S]*float32[\s\S]*float64"),
    "keys": (lambda t: t.delete("a"), TreeStructureError, r"\['a', 'n'\][\s\S]*\['n'\]"),
    "inner keys": (lambda t: t.set(("n", "c"), t["n", "b"]), TreeStructureError,
                   r"n'[\s\S]*\['b'\][\s\S]*\['b', 'c'\]"),
    "class": (lambda t: State(t["a"], batch_size=[3]), TreeStructureError, r"TensorDict[\s\S]*State"),
    "type": (lambda t: (t, t), TreeStructureError, r"TensorDict[\s\S]*tuple"),
    "batch size": (lambda t: t.with_batch_size([]), BatchSizeError, r"batch size \[3\][\s\S]*batch size \[\]"),
    "word": (lambda t: t.set("a", "word"), TreeStructureError, r"a'[\s\S]*Tensor[\s\S]*NonTensorData"),
}  # fmt: skip


def one_after(first, second):
    """A function that calls the first and, from its second call on, the second."""
    later = iter([first, second])
    return lambda t: next(later)(t)


PLACES = {
    "cond: the branches": lambda change: tdf.cond(torch.ones((), device="meta"), lambda t: t, change, (T,)),
    "while_loop: body_fn": lambda change: tdf.while_loop(lambda t: True, lambda t: (change(t),), (T,)),
    "scan: combine_fn": lambda change: tdf.scan(lambda c, row: (change(c), c), T, torch.ones(2)),
    "map: the rows": lambda change: tdf.map(one_after(lambda t: t, change), torch.stack([T, T])),
    "scan: the steps": lambda change: scan_rows(one_after(lambda t: t, change)),
}


def scan_rows(change):
    """Scan two rows, and return what a function makes of each."""
    return tdf.scan(lambda c, row: (c, change(row)), T, torch.stack([T, T]))


@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("name", DIFFERENT)
def test_results_that_differ_are_named(name, what):
    """Branches, rows and steps give one structure, shape, dtype and batch size; the error names the leaf."""
    change, error, message = DIFFERENT[name]

    with pytest.raises(error, match=what + r"[\s\S]*" + message):
        PLACES[what](change)


CONTAINERS = {
    "length": (lambda: (1, 2), lambda: (1, 2, 3), "2 values[\\s\\S]*3 values"),
    "keys": (lambda: {"a": 1}, lambda: {"b": 1}, r"\['a'\][\s\S]*\['b'\]"),
    "order": (lambda: {"a": 1, "b": 2}, lambda: {"b": 2, "a": 1}, r"\['a', 'b'\][\s\S]*\['b', 'a'\]"),
    "number": (lambda: {"a": [1]}, lambda: {"a": [2]}, r"'a\.0'[\s\S]*1[\s\S]*2"),
    "ties": (lambda: tied(), lambda: tied().untie(("1", "weight")), r"ties[\s\S]*ties"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_that_differ(name):
    """Containers, Python values and ties that depend on the branch are refused."""
    one, other, message = CONTAINERS[name]

    with pytest.raises(TreeStructureError, match=message):
        tdf.cond(torch.ones((), device="meta"), one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [lambda t: t.delete("a"), lambda t: t.to(torch.float64), lambda t: t.unsqueeze(0)],
    ids=["structure", "dtype", "shape"],
)
def test_compiled_branches_that_differ(change):
    """A compiled program refuses branches of other structure, or of another dtype."""
    with pytest.raises(Exception, match="differing branch outputs"):
        compiled(lambda t: tdf.cond(t["a"].sum() > 0, lambda t: t, change, (t,)))(T)


REFUSED = [
    (lambda: tdf.cond(True, len, len, T), UnsupportedError, r"cond[\s\S]*tuple or list[\s\S]*TensorDict"),
    (lambda: tdf.while_loop(len, len, T), UnsupportedError, r"while_loop[\s\S]*tuple or list"),
    (lambda: torch.vmap(lambda t: tdf.while_loop(lambda x: x < 3, lambda x: (x + 1,), (t["n", "b"],)))(T),
     UnsupportedError, r"number of steps[\s\S]*vmap"),
    (lambda: tdf.map(len, {}), ValueError, r"map: xs has no leaf, or one without rows[\s\S]*\[\]"),
    (lambda: tdf.map(len, (torch.ones(2), 3)), ValueError, r"map: xs has no leaf, or one[\s\S]*int"),
    (lambda: tdf.map(len, torch.ones(())), ValueError, r"map: xs has no leaf, or one[\s\S]*dimension 0"),
    (lambda: tdf.map(len, torch.ones(0, 2)), ValueError, r"one length above 0[\s\S]*\[0\]"),
    (lambda: tdf.map(len, (torch.ones(2), torch.ones(3))), ValueError, r"one length[\s\S]*\[2, 3\]"),
    (lambda: tdf.scan(len, T, T, dim=1), ValueError, r"scan: xs has no leaf, or one without rows[\s\S]*dimension 1"),
    (lambda: tdf.scan(len, T, T, dim=-1), ValueError, r"scan: xs has no leaf[\s\S]*from the front[\s\S]*-1"),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(REFUSED)))
def test_refused(i):
    """A call without rows, or whose operands are not in a tuple, says what must hold."""
    call, error, message = REFUSED[i]

    with pytest.raises(error, match=message):
        call()
