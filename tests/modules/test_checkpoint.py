"""`checkpoint` gives the numbers of the plain function under every transform, and keeps inputs alone."""

import functools
import types

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tdfunc as tdf
from tdfunc import TensorDict, UnsupportedError, checkpoint
from tests.helpers import quick


def by_closure(wrap, w, x, depth):
    """The weight and an earlier result are read from outside."""
    for _ in range(depth):
        earlier = x.sin()
        x = wrap(lambda x, earlier=earlier: torch.tanh(x @ w) + earlier)(x)
    return x.square().sum()


def nested(wrap, w, x, depth):
    """A recomputed function inside of one."""
    block = wrap(lambda w, x: wrap(lambda x: torch.tanh(x @ w))(x) * w.sum())
    for _ in range(depth):
        x = block(w, x)
    return x.square().sum()


def by_trees(wrap, w, x, depth):
    """Trees, numbers and text go in and out."""

    def layer(tree, scale, *, name):
        out = torch.tanh(tree["x"] @ tree["p", "w"]) * scale
        return {"state": tree.set("x", out), "count": tree["n"] + 1, name: [scale, None]}

    tree, layer = TensorDict({"p": {"w": w}, "x": x, "n": 3, "text": "a"}), wrap(layer)
    for _ in range(depth):
        out = layer(tree, 1.3, name="more")
        tree = out["state"].set("n", out["count"])
    return tree["x"].square().sum() * tree["n"]


def with_transforms(wrap, w, x, depth):
    """The function runs transforms of its own, one of them on the result of another, and reads a weight in them."""
    shift = w.cos().sum()

    def layer(w, x):
        rows = vmap(lambda row: (row @ w).sin().add_(shift))(x)
        return vmap(lambda row: row.mul_(2) + w[0])(rows * 1).tanh()

    for _ in range(depth):
        x = wrap(layer)(w, x)
    return x.square().sum()


def stacked(w):
    """Three different weights."""
    return torch.stack([w, w * 2, w * 0.3])


FORMS = [by_closure, nested, by_trees, with_transforms]


def leaf_grad(fn, w):
    """The gradient by plain autograd."""
    w = w.clone().requires_grad_()
    return torch.autograd.grad(fn(w), w)[0]


def leaf_grad_twice(fn, w):
    """A second derivative by plain autograd."""
    w = w.clone().requires_grad_()
    inner = torch.autograd.grad(fn(w), w, create_graph=True)[0]
    return torch.autograd.grad(inner.square().sum(), w)[0]


def pull_tangent(fn, w):
    """The tangent of a pullback that was made outside."""
    value, pull = vjp(fn, w)
    one = torch.ones_like(value)
    return jvp(lambda c: pull(c)[0], (one,), (one,))


CASES = {
    "grad": lambda f, w, x: grad(f, argnums=(0, 1))(w, x),
    "grad of grad": lambda f, w, x: grad(lambda w: grad(f, argnums=1)(w, x).square().sum())(w),
    "three times": lambda f, w, x: grad(lambda w: grad(lambda w: grad(f)(w, x).square().sum())(w).square().sum())(w),
    "vmap of grad": lambda f, w, x: vmap(grad(f), (0, None))(stacked(w), x),
    "grad of vmap": lambda f, w, x: grad(lambda w: vmap(f, (0, None))(w, x).square().sum())(stacked(w)),
    "gradients of rows": lambda f, w, x: vmap(grad(f), (None, 0))(w, x[:, None]),
    "vmap of vmap": lambda f, w, x: vmap(vmap(grad(f), (None, 0)), (0, None))(stacked(w), x[:, None]),
    "jacrev": lambda f, w, x: jacrev(lambda w: grad(f)(w, x))(w),
    "jacrev twice": lambda f, w, x: jacrev(jacrev(lambda w: f(w, x)))(w),
    "hessian": lambda f, w, x: hessian(lambda w: f(w, x))(w),
    "reverse over forward": lambda f, w, x: jacrev(jacfwd(lambda w: f(w, x)))(w),
    "jvp": lambda f, w, x: jvp(lambda w: f(w, x), (w,), (w.cos(),)),
    "jvp of a pullback": lambda f, w, x: pull_tangent(lambda w: f(w, x), w),
    "backward": lambda f, w, x: leaf_grad(lambda w: f(w, x), w),
    "backward twice": lambda f, w, x: leaf_grad_twice(lambda w: f(w, x), w),
    "backward of vmap": lambda f, w, x: leaf_grad(lambda w: vmap(f, (0, None))(w, x).square().sum(), stacked(w)),
    "backward of vmap twice": lambda f, w, x: leaf_grad_twice(
        lambda w: vmap(f, (0, None))(w, x).square().sum(), stacked(w)
    ),
    "backward of grad": lambda f, w, x: leaf_grad(lambda w: grad(f)(w, x).square().sum(), w),
    "backward of grad by data": lambda f, w, x: leaf_grad(lambda w: grad(f, argnums=1)(w, x).square().sum(), w),
    "autograd.grad in grad": lambda f, w, x: grad(
        lambda w: torch.autograd.grad(f(w, x), w, create_graph=True)[0].square().sum()
    )(w),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_the_plain_function(case, form):
    """Derivatives of every order and kind are those of the function as it is."""
    w, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    plain, thrifty = (functools.partial(form, wrap, depth=2) for wrap in (lambda fn: fn, checkpoint))

    torch.testing.assert_close(CASES[case](thrifty, w, x), CASES[case](plain, w, x))


@pytest.mark.parametrize("form", quick(FORMS, by_trees))
def test_a_trace_has_the_numbers_of_the_plain_function(form):
    """A trace of mapped gradients replays the recomputation."""
    w, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    plain, thrifty = (
        vmap(grad(functools.partial(form, wrap, depth=2)), (0, None)) for wrap in (lambda fn: fn, checkpoint)
    )

    torch.testing.assert_close(tdf.jit(thrifty)(stacked(w), x), plain(stacked(w), x))


@pytest.mark.parametrize("case", ["grad", "three times", "vmap of grad", "grad of vmap", "backward of vmap twice"])
def test_a_gradient_inside(case):
    """The function takes a gradient itself, in a transform."""
    w, x = torch.randn(3, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)

    def fn(wrap, w, x):
        return wrap(lambda w, x: grad(lambda z: (z @ w).sin().sum())(x).tanh())(w, x).square().sum()

    plain, thrifty = (functools.partial(fn, wrap) for wrap in (lambda fn: fn, checkpoint))
    torch.testing.assert_close(CASES[case](thrifty, w, x), CASES[case](plain, w, x))


@st.composite
def programs(draw, depth=1, keeps=("in a list", "in an attribute", "the result")):
    """Calls: what each is given, reads, keeps and returns. Numbers choose among the values that there are."""
    places, ways = st.integers(0, 20), st.sampled_from(["closure", "list", "attribute", "tree"])
    return [
        {
            "args": draw(st.lists(places, min_size=1, max_size=2)),
            "reads": draw(st.lists(st.tuples(ways, places), max_size=3)),
            "keeps": draw(st.sets(st.sampled_from(keeps))) if keeps else set(),
            "returns": draw(st.sampled_from(["one", "capture", "argument", "tree"])),
            "inner": draw(programs(depth - 1, keeps)) if depth else [],
        }
        for _ in range(draw(st.integers(0, 1 + depth)))
    ]


def interpret(program, wrap, w, x):
    """The sum of everything that recomputed functions return and keep, when they read what was there before."""
    pool, shelf = [x @ w, (x @ w).sin(), x.cos()], []

    def call(block, pool):
        given, read = ([pool[i % len(pool)] for i in some] for some in (block["args"], [i for _, i in block["reads"]]))
        named = {f"v{i}": value for i, value in enumerate(read)}
        box, tree = types.SimpleNamespace(**named), TensorDict(named)

        def fn(*args):
            out = functools.reduce(lambda a, b: a * b.sin() + a, args)
            for i, (way, _) in enumerate(block["reads"]):
                reads = {"closure": named[f"v{i}"], "list": read[i], "tree": tree[f"v{i}"]}
                out = torch.tanh(out + reads.get(way, getattr(box, f"v{i}")) * 0.7)
            for inner in block["inner"]:
                out = out + sum(call(inner, [out, *args, *pool]))
            if "in an attribute" in block["keeps"]:
                box.kept = torch.exp(-out.square())
            shelf.extend(
                [value for key, value in (("in a list", out.sin()), ("the result", out)) if key in block["keeps"]]
            )
            tree_out = TensorDict({"a": out, "b": out.cos()})
            return {"one": [out], "capture": [out, pool[-1]], "argument": [args[0], out], "tree": tree_out}[
                block["returns"]
            ]

        found = wrap(fn)(*given)
        return [*(found.values() if isinstance(found, TensorDict) else found), *vars(box).values()]

    for block in program:
        pool = [*pool, *call(block, pool)]
    return sum([value.square().sum() for value in (*pool, *shelf)])


MODES = {
    "plain": lambda f, w, x: f(w, x),
    "vmap": lambda f, w, x: vmap(f, (0, None))(stacked(w), x),
    "no_grad": lambda f, w, x: torch.no_grad()(f)(w, x),
    **{case: CASES[case] for case in CASES if case != "three times"},
}


@given(program=programs(), mode=st.sampled_from(list(MODES)), seed=st.integers(0, 2**32))
def test_any_program(program, mode, seed):
    """Wherever values enter and leave (captures, lists, attributes, as themselves), no gradient is lost."""
    torch.manual_seed(seed)
    w, x = torch.randn(3, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    ways = {"ours": checkpoint}
    if mode == "backward":
        ways["torch's"] = lambda fn: functools.partial(torch_checkpoint.checkpoint, fn, use_reentrant=False)

    expected = MODES[mode](functools.partial(interpret, program, lambda fn: fn), w, x)
    found = {way: MODES[mode](functools.partial(interpret, program, wrap), w, x) for way, wrap in ways.items()}
    torch.testing.assert_close(found, dict.fromkeys(found, expected))


@pytest.mark.slow
@settings(max_examples=10)
@given(program=programs(keeps=()), seed=st.integers(0, 2**32))
def test_any_program_is_traced(program, seed):
    """The same in a trace of mapped gradients, which refuses tensors that live on."""
    torch.manual_seed(seed)
    w, x = torch.randn(3, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    plain, thrifty = (
        vmap(grad(functools.partial(interpret, program, wrap)), (0, None)) for wrap in (lambda fn: fn, checkpoint)
    )

    torch.testing.assert_close(tdf.jit(thrifty)(stacked(w), x), plain(stacked(w), x))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS[:2])
def test_compiled(form):
    """The compiler takes it whole, plainly and inside a transform."""
    w, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    plain, thrifty = (functools.partial(form, wrap, depth=2) for wrap in (lambda fn: fn, checkpoint))
    expected = grad(plain)(w, x)

    torch.testing.assert_close(torch.compile(grad(thrifty), backend="eager", fullgraph=True)(w, x), expected)
    compiled = torch.compile(thrifty, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(leaf_grad(lambda w: compiled(w, x), w), expected)


class Memory(TorchDispatchMode):
    """The largest number of bytes that results of operations held at one time."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self.live[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: pair for key, pair in self.live.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return out


def deep(wrap, params, x):
    """32 layers, eight to a segment; each keeps two results."""

    def segment(p, x):
        for _ in range(8):
            x = torch.tanh(x @ p["w"]).sin()
        return x

    for _ in range(4):
        x = wrap(segment)(params, x)
    return x.square().sum()


TRANSFORMS = {
    "grad": lambda f, p, x: grad(f)(p, x),
    "tdf.grad of grad": lambda f, p, x: tdf.grad(lambda p: grad(f, argnums=1)(p, x).square().sum())(p),
    "vmap of grad": lambda f, p, x: vmap(grad(f), (0, None))(tdf.stack([p] * 3), x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_memory(transform):
    """The peak is that of the inputs of segments and of one segment, not of all results."""
    params, x = TensorDict({"w": torch.randn(8, 8) / 3}), torch.randn(1000, 8)
    peaks = []
    for wrap in (checkpoint, lambda fn: fn):
        with Memory() as memory:
            transform(functools.partial(deep, wrap), params, x)
        peaks.append(memory.peak)

    assert peaks[0] < 0.25 * peaks[1]


def test_it_runs_again():
    """Once without derivatives, and once more for each; a result that is read twice in each layer is searched once."""
    runs = []
    fn = checkpoint(lambda x: (runs.append(1), functools.reduce(lambda y, _: y - 0.1 * y, range(64), x.sin()))[1])
    x = torch.randn(3)

    fn(x)
    assert len(runs) == 1
    grad(lambda x: fn(x).sum())(x)
    assert len(runs) == 3
    with torch.no_grad():
        fn(x.requires_grad_())
    assert len(runs) == 4
    fn(x).sum().backward()
    assert len(runs) == 6


def without_derivatives(x, index, *, use_reentrant, none=None):
    """Results of every kind that has no derivative, after one that has."""
    return x[index] * use_reentrant, index + 1, none, torch.ones(2), "text"


def test_what_has_no_derivative():
    """Whole numbers, None, text and tensors that depend on no argument come out as they are."""
    x, index = torch.randn(3, requires_grad=True), torch.tensor([0, 2])
    _, after, none, ones, text = checkpoint(without_derivatives)(x, index, use_reentrant=2.0)

    assert after.tolist() == [1, 3]
    assert none is None
    assert ones.tolist() == [1.0, 1.0]
    assert text == "text"


@pytest.mark.parametrize("way", [grad, lambda loss: lambda x: leaf_grad(loss, x)], ids=["grad", "backward"])
def test_gradients_beside_what_has_no_derivative(way):
    """Results without a derivative leave the gradient of the others, and come out of a transform as they are."""
    index, found = torch.tensor([0, 2]), []

    def loss(x):
        out, *rest = checkpoint(without_derivatives)(x, index, use_reentrant=2.0)
        found.append([rest[0].tolist(), rest[1], rest[2].tolist(), rest[3]])
        return out.sum()

    assert torch.equal(way(loss)(torch.randn(3)), torch.tensor([2.0, 0.0, 2.0]))
    assert found == [[[1, 3], None, [1.0, 1.0], "text"]]


def test_a_number_has_no_derivative():
    """A checkpoint of a function that returns a number adds nothing to the gradient."""
    assert grad(lambda x: x.sum() + checkpoint(lambda: 3)())(torch.randn(3)).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("make", [torch.randn, torch.inference_mode()(torch.randn)], ids=["plain", "inference"])
def test_results_may_be_written(make):
    """An operation in place on a result is differentiated; a variable of the function may be assigned later."""

    def loss(x, wrap):
        y, z = wrap(lambda x: (x.sin(), x.cos()) if len(x) else later)(x)
        later = None
        return (y.mul_(2) * z.add_(1)).sum()

    x = make(3)

    torch.testing.assert_close(grad(loss)(x, checkpoint), grad(loss)(x, lambda fn: fn))


DRAWING = {
    "grad": lambda f, x: grad(lambda x: f(x).square().sum())(x),
    "vmap": lambda f, x: vmap(grad(lambda x: f(x).square().sum()), randomness="different")(x),
    "backward of vmap": lambda f, x: leaf_grad(lambda x: vmap(f, randomness="different")(x).square().sum(), x),
    "backward": lambda f, x: leaf_grad(lambda x: f(x).square().sum(), x),
}


@pytest.mark.parametrize("transform", DRAWING.values(), ids=DRAWING.keys())
def test_draws_are_repeated(transform):
    """The second run draws what the first one did, and later draws go on from there."""
    x, found = torch.randn(4, 64), []
    for wrap in (checkpoint, lambda fn: fn):
        torch.manual_seed(0)
        fn = wrap(lambda x: F.dropout(x.sin(), 0.5) * torch.rand_like(x))
        found.append((transform(lambda x, fn=fn: fn(fn(x)), x), torch.rand(3)))

    torch.testing.assert_close(found[0], found[1])


def test_autocast():
    """The second run has the autocast of the first, not that of the derivative."""
    w, x = torch.randn(8, 8), torch.randn(4, 8)
    seen = []

    def loss(w, wrap):
        with torch.autocast("cpu", torch.bfloat16):
            out = wrap(lambda w, x: (seen.append(torch.is_autocast_enabled("cpu")), (x @ w).sin())[1])(w, x)
        return out.float().square().sum()

    expected = grad(loss)(w, lambda fn: fn)
    seen.clear()
    torch.testing.assert_close(grad(loss)(w, checkpoint), expected)
    assert seen == [True, True]


def test_the_default_device():
    """The second run makes its tensors where the first one did."""
    seen = []
    fn = checkpoint(lambda x: (seen.append(torch.ones(()).device.type), x.sin())[1])

    def loss(x):
        with torch.device("meta"):
            out = fn(x)
        return out.sum()

    grad(loss)(torch.ones(2))
    assert seen == ["meta", "meta"]


def late(transform):
    """A variable that changes between the two runs."""

    def loss(x):
        for layer in (torch.sin, torch.cos):
            x = checkpoint(lambda x: layer(x))(x)  # noqa: B023
        return x.sum()

    return transform(loss)


def trace(fn):
    """A recorded gradient."""
    return tdf.jit(grad(lambda x: checkpoint(fn)(x).sum()))(torch.ones(3))


def inside(transform):
    """A transform in the function, of a tensor that is not among its arguments."""
    w = torch.randn(3, 3)
    return grad(lambda w: checkpoint(lambda x: transform(lambda r: (x @ r).sin().sum())(w).sum())(w * 1).sum())(w)


class Hidden:
    """Holds a tensor that only its class reads."""

    def __init__(self, tensor):
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*[value.tensor if isinstance(value, Hidden) else value for value in args], **(kwargs or {}))


def hidden(w, make=lambda w: w * 3):
    """The function reads a tensor by such an object."""
    held = Hidden(make(w))
    return checkpoint(lambda x: torch.matmul(x, held))(w).sum()


def replaced(w):
    """The function reads the end of a list, which grows between its runs."""
    values = [w * 3]
    out = checkpoint(lambda x: x * values[-1])(w)
    values.append(w * 5)
    return out.sum()


def given_and_transformed(w):
    """The function gives its argument, which it also reads by its outer name, to a transform."""
    return checkpoint(lambda x: grad(lambda z: (z * x).sin().sum())(w) + x)(w).sum()


def test_attention_without_dropout_is_traced():
    """Its operation is tagged as random, and draws nothing."""
    q = torch.randn(1, 2, 4, 8)

    def total(q):
        return F.scaled_dot_product_attention(q, q, q).sum()

    found = tdf.jit(grad(checkpoint(total)))(q)
    torch.testing.assert_close(found, grad(total)(q))


MESSAGES = {
    "vmap over a tensor from outside": (lambda: inside(vmap), r"its own transform.*shape \[3, 3\].*argument"),
    "grad at a tensor from outside": (lambda: inside(grad), "its own transform"),
    "grad at an argument from outside": (lambda: grad(given_and_transformed)(torch.ones(3)), "its own transform"),
    "inside an object": (lambda: grad(hidden)(torch.eye(2)), "no torch function is given"),
    "a leaf inside an object": (lambda: grad(hidden)(torch.eye(2), lambda w: torch.ones(2, requires_grad=True)),
                                "no torch function is given"),
    "another item": (lambda: grad(replaced)(torch.ones(3)), "reads another tensor"),
    "another variable in grad": (lambda: late(lambda f: grad(f)(torch.ones(3))), "'layer' changed before.*lambda x, l"),
    "another variable in backward": (lambda: late(lambda f: leaf_grad(f, torch.ones(3))), "'layer' changed before"),
    "writing to an argument": (lambda: grad(lambda x: checkpoint(lambda x: x.mul_(2))(x * 1).sum())(torch.ones(3)),
                               "writes to one of its arguments.*clone"),
    "drawing in a trace": (lambda: trace(lambda x: x * torch.rand(3)), "draws random numbers in a trace.*rng=key"),
    "dropout in a trace": (lambda: trace(F.dropout), "draws random numbers in a trace"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "pattern"), MESSAGES.values(), ids=MESSAGES.keys())
def test_messages(call, pattern):
    """What would give wrong numbers is refused."""
    with pytest.raises(UnsupportedError, match=f"(?s)checkpoint: .*{pattern}"):
        call()


@pytest.mark.parametrize("x", [torch.ones(2), -torch.ones(2)], ids=["true", "false"])
def test_make_fx_records_a_condition_inside(x):
    """The mode that refuses draws lets operators of torch pass that have functions as arguments."""
    run = checkpoint(lambda x: tdf.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))

    assert torch.equal(make_fx(run)(torch.ones(2, requires_grad=True))(x), run(x))
