"""Trees under vmap, grad, jacobians, compile, export, optree, threads, and at great width and depth."""

import copy
import io
import threading
import time

import optree
import pytest
import torch
from torch import Size
from torch.utils import _pytree as pytree

import tdfunc as tdf
from tdfunc import TensorDict
from tests.helpers import assert_trees_equal

# A tree in and two tensors: what each returns must be the same compiled.
BASE = TensorDict({"a": torch.arange(6.0).reshape(3, 2), "n": {"b": torch.arange(3.0)}}, [3], names=["t"])
COMPILED = {
    "constructor": lambda x, y: TensorDict({"x": x, "n": {"y": y}, ("t", "u"): x}, [3]),
    "constructor of numbers": lambda x, y: TensorDict({"x": 1.0, "y": y, "s": "word"}, [3]),
    "set": lambda x, y: BASE.set("z", x).set(("n", "q"), y),
    "update": lambda x, y: BASE.update({"a": x, "n": {"w": y}}),
    "delete": lambda x, y: BASE.set("a", x).delete("n"),
    "pop": lambda x, y: BASE.set("a", x).pop("n")[1],
    "rename": lambda x, y: BASE.set("a", x).rename_key("a", "r"),
    "select": lambda x, y: BASE.set("a", x).select("a"),
    "exclude": lambda x, y: BASE.set("a", x).exclude("n"),
    "flatten": lambda x, y: BASE.set("a", x).flatten_keys().unflatten_keys(),
    "int": lambda x, y: BASE.set("s", "word").set("a", x)[0],
    "slice": lambda x, y: BASE.set("a", x)[1:],
    "None": lambda x, y: BASE.set("a", x)[None],
    "list": lambda x, y: BASE.set("a", x)[[0, 2]],
    "Ellipsis": lambda x, y: BASE.set("a", x)[..., 0],
    "rows": lambda x, y: BASE.set("a", x)[torch.tensor([0, 2])],
    "stack": lambda x, y: torch.stack([BASE.set("a", x), BASE.set("a", x + 1)]),
    "cat": lambda x, y: tdf.cat([BASE.set("a", x), BASE]),
    "shapes": lambda x, y: BASE.set("a", x).unsqueeze(0).permute(1, 0).expand(3, 4).reshape(-1),
    "split": lambda x, y: BASE.set("a", x).split(2)[0],
    "unbind": lambda x, y: BASE.set("a", x).unbind(0)[1],
    "numbers": lambda x, y: 1 - BASE.set("a", x) * 2 + BASE,
    "tensors": lambda x, y: (y - BASE.set("a", x)) / (y + 1) > y,
    "apply": lambda x, y: BASE.set("a", x).apply(lambda v: v * 2),
    "sum": lambda x, y: BASE.set("a", x).sum(0),
    "features": lambda x, y: BASE.set("a", x).mean(dim="feature"),
    "casts": lambda x, y: BASE.set("a", x).to(torch.float64).clone().detach(),
    "at": lambda x, y: BASE.set("a", x).at[0].set(0.0).at[torch.tensor([1, 1])].add(1.0),
    "where": lambda x, y: BASE.set("a", x).where(y > 0, 0),
    "gather": lambda x, y: BASE.set("a", x).gather(0, torch.tensor([0, 0])),
    "tree_map": lambda x, y: pytree.tree_map(lambda v: v + 1, BASE.set("a", x)),
    "vmap": lambda x, y: torch.vmap(lambda t: t + 1)(BASE.set("a", x)),
    "grad": lambda x, y: torch.func.grad(lambda t: (t["a"] ** 2).sum())(TensorDict({"a": x})),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compile(name):
    """An operation would break the graph, or give another tree when compiled."""
    torch._dynamo.reset()
    x, y = torch.randn(3, 2), torch.randn(3)
    fn = COMPILED[name]

    assert_trees_equal(torch.compile(fn, fullgraph=True, backend="eager")(x, y), fn(x, y))


@pytest.mark.parametrize("name", ["constructor", "set", "int", "stack", "numbers", "at"])
def test_compile_with_autograd(name):
    """The graph could not be lowered, or its gradients be lost."""
    torch._dynamo.reset()
    x, y = torch.randn(3, 2, requires_grad=True), torch.randn(3)
    fn = COMPILED[name]
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")(x, y)
    grads = [
        torch.autograd.grad(sum(v.sum() for v in out.leaves() if v.requires_grad), x)[0] for out in (compiled, fn(x, y))
    ]

    assert_trees_equal(compiled.detach(), fn(x, y).detach())
    assert torch.equal(*grads)


def test_compile_does_not_recompile_for_values():
    """A step would be compiled again when only numbers changed."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    step = torch.compile(lambda t: t.set("a", t["a"] * 2) + 1, fullgraph=True, backend=counter)
    for _ in range(3):
        step(TensorDict({"a": torch.randn(3), "n": {"b": torch.randn(3)}}, [3]))

    assert counter.frame_count == 1


def test_export():
    """An exported program would not save, or lose ties, names or the batch of its trees."""

    class Double(torch.nn.Module):
        def forward(self, tree):
            return tree * 2

    tree = BASE.set("s", "word")
    buffer = io.BytesIO()
    exported = torch.export.export(Double(), (tree,))
    exported._example_inputs = None
    torch.export.save(exported, buffer)
    buffer.seek(0)

    assert_trees_equal(torch.export.load(buffer).module()(tree), tree * 2)


def test_nested_vmap():
    """A tree would have the wrong batch size at some level of vmap, or for some in_dims and out_dims."""
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


def test_jacobians_and_hessians():
    """A jacobian of a tree would have the wrong batch size, or wrong numbers."""
    tree = TensorDict({"w": torch.randn(3), "n": {"b": torch.randn(2)}})

    def loss(t):
        return (t["w"] ** 3).sum() + t["n", "b"].prod()

    hessian = torch.func.hessian(loss)(tree)
    jacobian = torch.func.jacrev(lambda t: t * 2)(tree)

    torch.testing.assert_close(hessian["w"]["w"], torch.diag(6 * tree["w"]))
    torch.testing.assert_close(jacobian["w"]["w"], 2 * torch.eye(3))
    batched = torch.vmap(torch.func.grad(loss))(torch.stack([tree, tree * 2]))
    assert batched.batch_size == Size([2])
    _, tangent = torch.func.jvp(loss, (tree,), (tree,))
    torch.testing.assert_close(tangent, 3 * (tree["w"] ** 3).sum() + 2 * tree["n", "b"].prod())


def test_optree_paths_and_prefixes():
    """Optree would name leaves otherwise, drop None as values, or not broadcast a prefix."""
    tree = TensorDict({"b": torch.zeros(2), "a": {"c": torch.ones(2)}}, [2])

    assert optree.tree_paths(tree) == [("a", "c"), ("b",)]
    assert [accessor(tree) is leaf for accessor, leaf in zip(*optree.tree_flatten_with_accessor(tree)[:2], strict=True)]
    assert optree.tree_map(lambda x, y: x + y, tree, tree)["a", "c"].tolist() == [2, 2]
    assert optree.tree_map(lambda _: None, tree)["b"] is None
    assert optree.tree_map(lambda _: 3, tree)["a", "c"] == 3
    assert [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]] == ["['a']['c']", "['b']"]


def test_specs_of_anything():
    """A map to ints, shapes or sentinels would not carry them, or lose the batch size on the way back."""
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
    """Two threads that use one tree would see each other's half-made state."""
    tree = TensorDict({f"k{i}": torch.full((4, 2), float(i)) for i in range(20)}, [4])
    errors = []

    def work(seed):
        for i in range(100):
            out = pytree.tree_map(lambda x: x + seed, tree).set("new", torch.full((4,), float(i)))[1:]
            if out["k3"].unique().tolist() != [3.0 + seed] or out.batch_size != (3,) or "new" in tree:
                errors.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

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
    """A call on ten times the leaves would take far more than ten times as long."""
    best = {}
    for n in (500, 5000):
        source = {f"k{i}": torch.zeros(3) for i in range(n)}
        tree = TensorDict(source, [3])
        times = []
        for _ in range(3):
            start = time.perf_counter()
            WIDE[name](source, tree)
            times.append(time.perf_counter() - start)
        best[n] = min(times)

    # Quadratic would be 100; caches, and other work on the machine, make ten times the leaves up to 40 times as slow.
    assert best[5000] < 60 * best[500] + 0.05


DEEP = {
    "add": lambda t: t + 1,
    "add a tree": lambda t: t + t,
    "index": lambda t: t[0],
    "stack": lambda t: torch.stack([t, t]),
    "tree_map": lambda t: pytree.tree_map(lambda x: x, t),
    "optree": lambda t: optree.tree_map(lambda x: x, t),
    "vmap": lambda t: torch.vmap(lambda x: x)(t),
    "repr": repr,
    "deepcopy": copy.deepcopy,
    "apply": lambda t: t.apply(lambda x: x),
    "flatten": lambda t: t.flatten_keys().unflatten_keys(),
    "to_dict": lambda t: TensorDict(t.to_dict(), [2]),
    "set": lambda t: t.set(("n",) * 300 + ("q",), torch.zeros(2)),
    "update": lambda t: t.update(t),
    "to": lambda t: t.to(torch.float64),
    "features": lambda t: t.sum(dim="feature"),
    "select": lambda t: t.select(("n",) * 250),
    "partition": lambda t: t.partition("v"),
    "where": lambda t: t.where(torch.tensor([True, False]), t),
    "at": lambda t: t.at[0].set(t[1]),
    "equality": lambda t: (t == t).all(),
}


@pytest.mark.parametrize("name", DEEP)
def test_depth(name):
    """A tree 300 levels deep would exhaust the stack."""
    tree = TensorDict({"x": torch.zeros(2)}, [2])
    for _ in range(300):
        tree = TensorDict({"n": tree, "v": torch.zeros(2)}, [2])

    assert DEEP[name](tree) is not None
