"""Trees under vmap, grad, jacobians, compile, export, optree, threads, and at great width and depth."""

import copy
import pickle
import subprocess
import sys
import time

import optree
import pytest
import torch
from torch import Size
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import tdfunc as tdf
from tdfunc import TensorClass, TensorDict
from tests.helpers import assert_trees_equal, quick, run_in_threads

# A tree in and two tensors: what each returns must be the same compiled.
BASE = TensorDict({"a": torch.arange(6.0).reshape(3, 2), "n": {"b": torch.arange(3.0)}}, [3], names=["t"])
# Beyond the rows of docs/transforms_table.md.
COMPILED = {
    "constructor": lambda x, y: TensorDict({"x": 1.0, "y": y, "s": "word"}, [3]),
    "pop": lambda x, y: BASE.set("a", x).pop("n")[1],
    "int": lambda x, y: BASE.set("s", "word").set("a", x)[0],
    "None": lambda x, y: BASE.set("a", x)[None],
    "list": lambda x, y: BASE.set("a", x)[[0, 2]],
    "Ellipsis": lambda x, y: BASE.set("a", x)[..., 0],
    "rows": lambda x, y: BASE.set("a", x).flip(0).repeat(2),
    "tensors": lambda x, y: (y - BASE.set("a", x)) / (y + 1) > y,
    "at": lambda x, y: BASE.set("a", x).at[0].set(0.0).at[torch.tensor([1, 1])].add(1.0),
}


@pytest.mark.parametrize("name", quick(COMPILED, "constructor", "rows"))
def test_compile(name):
    """An operation gives one graph and the same tree when compiled."""
    torch._dynamo.reset()
    x, y = torch.randn(3, 2), torch.randn(3)
    fn = COMPILED[name]

    assert_trees_equal(torch.compile(fn, fullgraph=True, backend="eager")(x, y), fn(x, y))


def test_nested_vmap():
    """A tree has the right batch size at each level of vmap, for all in_dims and out_dims."""
    tree = TensorDict({"a": torch.randn(2, 3, 4, 5), "n": TensorDict({"b": torch.randn(2, 3, 4)}, [2, 3, 4])}, [2, 3])
    seen = []

    def inner(t):
        seen.append((t.batch_size, t["n"].batch_size))
        return t * 2

    out = torch.vmap(torch.vmap(inner, in_dims=0, out_dims=0), in_dims=1, out_dims=1)(tree)

    assert seen == [((), (4,))]
    assert_trees_equal(out, tree * 2)
    swapped = torch.vmap(lambda t: t, in_dims=0, out_dims=1)(tree)
    assert swapped.batch_size == Size([3, 2])
    assert swapped["n"].batch_size == Size([3, 2, 4])
    assert torch.equal(swapped["a"], tree["a"].transpose(0, 1))
    dims = (tdf.in_dims(tree, {"a": None, "*": 0}),)
    assert torch.vmap(lambda t: t["a"].sum() + t["n", "b"].sum(), in_dims=dims)(tree).shape == Size([2])


def test_optree_paths_and_prefixes():
    """Optree gives leaves their paths, keeps None as values, and broadcasts a prefix."""
    tree = TensorDict({"b": torch.zeros(2), "a": {"c": torch.ones(2)}}, [2])

    assert optree.tree_paths(tree) == [("a", "c"), ("b",)]
    assert [accessor(tree) is leaf for accessor, leaf in zip(*optree.tree_flatten_with_accessor(tree)[:2], strict=True)]
    assert optree.tree_map(lambda x, y: x + y, tree, tree)["a", "c"].tolist() == [2, 2]
    assert optree.tree_map(lambda _: None, tree)["b"] is None
    assert optree.tree_map(lambda _: 3, tree)["a", "c"] == 3
    assert [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]] == ["['a']['c']", "['b']"]


def test_specs_of_anything():
    """A map to ints, shapes or sentinels carries them, and gives the batch size back."""
    tree = TensorDict({"a": torch.zeros(3, 2), "n": {"b": torch.ones(3)}, "e": {}}, [3])
    shapes = pytree.tree_map(lambda x: tuple(x.shape), tree)

    assert shapes["n", "b"] == (3,)
    assert shapes.batch_size == Size([3])
    dtypes = pytree.tree_map(lambda x: x.dtype, tree)
    back = pytree.tree_map(lambda dtype, x: x.to(dtype), dtypes, tree)
    assert_trees_equal(back, tree)
    assert pytree.tree_map(lambda x: x[0], tree)["e"].batch_size == Size([])
    assert pytree.tree_map(lambda x: x.unsqueeze(0), tree).batch_size == Size([1, 3])
    assert pytree.tree_map(lambda x: x.sum(), tree).batch_size == Size([])


def test_threads():
    """Threads that use one tree see whole trees only."""
    tree = TensorDict({f"k{i}": torch.full((4, 2), float(i)) for i in range(20)}, [4])
    errors = []

    def work(seed):
        for i in range(100):
            out = pytree.tree_map(lambda x: x + seed, tree).set("new", torch.full((4,), float(i)))[1:]
            if out["k3"].unique().tolist() != [3.0 + seed] or out.batch_size != (3,) or "new" in tree:
                errors.append((seed, i))

    run_in_threads(work, range(4))

    assert errors == []


WIDE = {
    "constructor": lambda source, tree: TensorDict(source, [3]),
    "nested keys": lambda source, tree: TensorDict({("a", key): leaf for key, leaf in source.items()}, [3]),
    "index": lambda source, tree: tree[0],
    "add": lambda source, tree: tree + tree,
    "update": lambda source, tree: tree.update(source),
    "exclude": lambda source, tree: tree.exclude(*list(source)[::2]),
    "select": lambda source, tree: tree.select(*list(source)[::2]),
    "flatten": lambda source, tree: TensorDict({"a": tree}, [3]).flatten_keys(),
    "unflatten": lambda source, tree: TensorDict({f"a.{key}": x for key, x in source.items()}, [3]).unflatten_keys(),
    "partition": lambda source, tree: tree.partition("k1*"),
    "rows": lambda source, tree: tree.at[0].set(tree[1]),
    "tree_map": lambda source, tree: pytree.tree_map(lambda x: x, tree),
    "repr": lambda source, tree: repr(tree),
}


@pytest.mark.parametrize("name", WIDE)
def test_cost_grows_linearly(name):
    """A call on ten times the leaves takes about ten times as long."""
    best = {}
    for n in (200, 2000):
        source = {f"k{i}": torch.zeros(3) for i in range(n)}
        tree = TensorDict(source, [3])
        times = []
        for _ in range(3):
            start = time.thread_time()
            WIDE[name](source, tree)
            times.append(time.thread_time() - start)
        best[n] = min(times)

    # Quadratic would be 100; caches make ten times the leaves up to 40 times as slow.
    assert best[2000] < 60 * best[200] + 0.02


DEEP = {
    "add": lambda t, n: t + 1,
    "add a tree": lambda t, n: t + t,
    "index": lambda t, n: t[0],
    "stack": lambda t, n: torch.stack([t, t]),
    "tree_map": lambda t, n: pytree.tree_map(lambda x: x, t),
    "optree": lambda t, n: optree.tree_map(lambda x: x, t),
    "vmap": lambda t, n: torch.vmap(lambda x: x)(t),
    "deepcopy": lambda t, n: copy.deepcopy(t),
    "apply": lambda t, n: t.apply(lambda x: x),
    "flatten": lambda t, n: t.flatten_keys().unflatten_keys(),
    "to_dict": lambda t, n: TensorDict(t.to_dict(), [2]),
    "set": lambda t, n: t.set(("n",) * n + ("q",), torch.zeros(2)),
    "update": lambda t, n: t.update(t),
    "to": lambda t, n: t.to(torch.float64),
    "features": lambda t, n: t.sum(dim="feature"),
    "select": lambda t, n: t.select(("n",) * (n - 2)),
    "partition": lambda t, n: t.partition(lambda path, leaf: path[-1] == "v")[0],
    "where": lambda t, n: t.where(torch.tensor([True, False]), t),
    "at": lambda t, n: t.at[0].set(t[1]),
}


def deep(levels):
    """A tree of so many levels, with other values in each."""
    tree = TensorDict({"x": torch.zeros(2)}, [2])
    for i in range(levels):
        tree = TensorDict({"n": tree, "v": torch.full((2,), float(i))}, [2])
    return tree


@pytest.mark.parametrize("name", DEEP)
def test_depth(name):
    """A tree 300 levels deep does not exhaust the stack; its inner levels become what those of a shallow tree do."""
    inner = DEEP[name](deep(300), 300)[("n",) * 297]

    assert_trees_equal(inner, DEEP[name](deep(3), 3))


def test_depth_of_other_results():
    """The same for a comparison and the text."""
    tree = deep(300)

    assert (tree == tree).all()
    assert not (tree == tree.set((*["n"] * 300, "x"), torch.ones(2))).all()
    assert "v" in repr(tree)


def counted(fn, trees):
    """The number of times that `fn` is compiled for these trees."""
    torch.compiler.reset()
    counter = CompileCounter()
    run = torch.compile(fn, fullgraph=True, backend=counter)
    for tree in trees:
        assert_trees_equal(run(tree), fn(tree))
    return counter.frame_count


@pytest.mark.slow
def test_recompiles():
    """A new batch size is compiled once more, and others after it not again."""

    def step(t):
        return t.set("c", t["a"] * 2)[1:]

    sizes = [TensorDict({"a": torch.randn(n, 2), "n": {"b": torch.randn(n)}}, [n]) for n in (3, 4, 5, 6)]
    words = [TensorDict({"a": torch.ones(2), "s": word}, [2]) for word in ("x", "x", "y")]
    pairs = [("a", torch.ones(2)), ("b", torch.zeros(2))]

    assert counted(step, sizes) == 2
    assert counted(step, words) <= 2
    assert counted(step, [TensorDict(dict(entries), [2]) for entries in (pairs, pairs, pairs[::-1])]) <= 2


LOAD = """
import sys, torch, tdfunc
from tdfunc import TensorDict
tree = TensorDict({"w": torch.ones(3, 2), "n": {"b": torch.arange(3.0)}, "s": "word"}, [3], names=["t"])
out = torch.export.load(sys.argv[1]).module()(tree)
assert out.names == ["t"] and out.batch_size == (3,) and out["s"] == "word", out
assert out["n", "b"].tolist() == [0, 2, 4]
"""


@pytest.mark.slow
def test_export_in_a_fresh_process(tmp_path):
    """A program that another process saved loads, with its non-tensor data."""

    class Double(torch.nn.Module):
        def forward(self, tree):
            return tree * 2

    tree = TensorDict({"w": torch.ones(3, 2), "n": {"b": torch.arange(3.0)}, "s": "word"}, [3], names=["t"])
    program = torch.export.export(Double(), (tree,))
    program._example_inputs = None
    torch.export.save(program, tmp_path / "double.pt2")

    done = subprocess.run([sys.executable, "-c", LOAD, tmp_path / "double.pt2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# torch's own, when it copies a structure.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize("send", [copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec))], ids=["copy", "pickle"])
@pytest.mark.parametrize("registry", [pytree, optree], ids=["torch", "optree"])
def test_structures_are_sent(registry, send):
    """A structure that was copied, or sent to another process, builds the same tree."""
    tree = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.ones(3)}, "s": ["x", "y", "z"]}, [3], names=["t"])
    leaves, spec = registry.tree_flatten(tree)
    sent = send(spec)

    assert sent == spec
    back = registry.tree_unflatten(leaves, sent) if registry is pytree else registry.tree_unflatten(sent, leaves)
    assert_trees_equal(back, tree)


class Typed(TensorClass):
    x: torch.Tensor
    y: torch.Tensor


CHECKPOINTED = {
    "open": lambda x, y: TensorDict({"x": x, "n": {"y": y}, "s": "word"}, [3]),
    "rows": lambda x, y: TensorDict({"x": x, "y": y, "s": ["a", "b", "c"]}, [3]),
    "typed": lambda x, y: Typed(x=x, y=y, batch_size=[3]),
    "lazy": lambda x, y: tdf.lazy_stack([TensorDict({"x": x}, [3]), TensorDict({"x": y}, [3])], 1),
}


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", quick(CHECKPOINTED, "typed"))
def test_compiled_checkpoint(kind, backend):
    """A checkpoint that is given trees compiles with options, keyword arguments and gradients."""
    torch.compiler.reset()
    inputs = [torch.rand(3, requires_grad=True) for _ in range(3)]
    tree = CHECKPOINTED[kind](*inputs[:2])

    def step(t, w):
        return checkpoint(lambda w, t, *, by: (t.sin() * by, w * by), w, t=t, by=3.0, use_reentrant=False, debug=False)

    results = [run(tree, inputs[2]) for run in (step, torch.compile(step, fullgraph=True, backend=backend))]
    sums = [sum(leaf.square().sum() for leaf in pytree.tree_leaves(result)) for result in results]

    assert_trees_equal(results[1][0], results[0][0])
    torch.testing.assert_close(*[torch.autograd.grad(number, inputs) for number in sums])


WRAPPED = {"plain": {}, "static graph": {"static_graph": True}}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_distributed_data_parallel(name, process_group):
    """A module in `DistributedDataParallel` takes and returns trees."""

    class Adds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, t):
            return t.set("out", self.layer(t["a"]))

    module = torch.nn.parallel.DistributedDataParallel(Adds(), **WRAPPED[name])
    module(TensorDict({"a": torch.ones(4, 2)}, [4]))["out"].sum().backward()

    assert module.module.layer.weight.grad.tolist() == [[4, 4]]
