"""`jit`: results of a replay, transforms around it, threads, backends, copies."""

import copy
import gc
import shutil
import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.profiler import ProfilerActivity, profile

from tdfunc import TensorDict, UnsupportedError, functional
from tdfunc._jit import jit
from tdfunc.optim import adam
from tests.helpers import assert_trees_equal, run_in_threads


def member_loss(p, x, t):
    """Return the loss of a two-layer net of one member."""
    hidden = torch.tanh(nn.functional.linear(x, p["hidden", "weight"], p["hidden", "bias"]))
    return nn.functional.mse_loss(hidden @ p["out"], t)


def make_params(generator, members=4):
    """Return the stacked parameters of `member_loss`, with a name and keys out of order."""
    make = lambda *shape: torch.randn(members, *shape, generator=generator)  # noqa: E731
    return TensorDict(
        {"out": make(8, 2), "hidden": {"weight": make(8, 3), "bias": make(8)}}, [members], names=["member"]
    )


member_grads = torch.vmap(torch.func.grad(member_loss), in_dims=(0, None, None))
INDUCTOR = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")]


# -- results of a replay ----------------------------------------------------------------------------------------


def test_training_step_is_exact(generator):
    """A traced training loop stays equal to the plain one."""
    x, t = torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator)
    opt = adam(lr=torch.linspace(0.01, 0.1, 4))

    def plain(params, state, x, t):
        return opt.update(params, member_grads(params, x, t), state)

    traced = jit(plain)
    mine = theirs = (make_params(generator), opt.init(make_params(generator)))
    for _ in range(5):
        mine, theirs = traced(*mine, x, t), plain(*theirs, x, t)

    assert_trees_equal(mine, theirs)
    assert traced.cache_info().misses == 1


class Pair(NamedTuple):
    first: torch.Tensor
    rest: dict


@pytest.mark.parametrize("earlier", [0, 1], ids=["recorded", "replayed"])
def test_structures_come_back(earlier):
    """Containers, plain values and argument objects come back as themselves."""

    @jit
    def traced(pair, tree, flag, *, scale=1.0):
        return Pair(pair.rest["b"] * scale, {"tree": tree, "same": pair.first, "none": None}), [
            flag,
            "text",
            (tree["n"],),
        ]

    tree = TensorDict({"a": torch.ones(2), "n": "word"}, [2])
    pair = Pair(torch.ones(3), {"b": torch.arange(3.0)})
    for _ in range(earlier):
        traced(pair, tree, True, scale=2.0)

    out, extra = traced(pair, tree, True, scale=2.0)

    assert type(out) is Pair
    assert out.rest["tree"] is tree
    assert out.rest["same"] is pair.first
    assert extra == [True, "text", ("word",)]
    torch.testing.assert_close(out.first, torch.tensor([0.0, 2.0, 4.0]))


def test_random_numbers_are_drawn_again():
    """A trace draws nothing, and every replay draws anew, as often as the function does."""
    fn = jit(lambda x: (x + torch.rand(3), x + torch.rand(3), nn.functional.dropout(x, 0.5)))
    x, state = torch.ones(3), torch.get_rng_state()
    fn.graph(x)
    assert torch.equal(torch.get_rng_state(), state)

    torch.manual_seed(0)
    traced = [fn(x) for _ in range(2)]
    torch.manual_seed(0)
    plain = [fn.__wrapped__(x) for _ in range(2)]

    assert all(torch.equal(a, b) for t, p in zip(traced, plain, strict=True) for a, b in zip(t, p, strict=True))
    assert not torch.equal(traced[0][0], traced[0][1])
    assert fn.draws(x)
    assert not jit(lambda x: x + 1).draws(x)


def draw_from(g):
    """A jitted function that closes over a generator."""
    return jit(lambda x: x + torch.rand(2, generator=g))


def draw_from_argument(g):
    """A jitted function that is given a generator."""
    return partial(jit(lambda x, g: x + torch.rand(2, generator=g)), g=g)


GENERATORS = {
    "closed over": lambda: draw_from(torch.Generator().manual_seed(0)),
    "given": lambda: draw_from_argument(torch.Generator().manual_seed(0)),
    "default": lambda: draw_from(torch.manual_seed(0)),
}


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
def test_generators_are_drawn_from(make):
    """A generator that the function is given, or closes over, moves at every replay."""
    fn = make()
    expected = torch.rand(4, generator=torch.Generator().manual_seed(0)).reshape(2, 2)

    assert torch.equal(torch.stack([fn(torch.zeros(2)) for _ in range(2)]), expected)


@pytest.mark.filterwarnings("ignore:.*was called in more ways")
@pytest.mark.parametrize("shapes", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_records_of_many_shapes_take_bounded_memory(shapes):
    """The last record stays, and neither its arguments nor graphs and fake tensors of the others."""
    fn = jit(lambda t: t.apply(lambda x: x * 2), cache_size=1)
    first = TensorDict({"a": torch.ones(shapes + 1)})
    alive = weakref.ref(first["a"])
    fn(first)
    del first
    gc.collect()
    kept, counts = alive(), []
    for n in range(1, shapes + 1):
        fn(TensorDict({"a": torch.ones(n)}))
        if n in (shapes // 2, shapes):
            gc.collect()
            counts.append(sum([issubclass(type(item), (torch.Tensor, fx.GraphModule)) for item in gc.get_objects()]))

    assert kept is None
    assert fn.cache_info().currsize == 1
    assert counts[1] <= counts[0]


def test_a_replay_frees_what_is_used_up():
    """The peak of a replay is not above that of the function: a chain needs two tensors at a time."""

    def fn(x):
        for _ in range(20):
            x = (x * 0.5).sin() @ x
        return x

    x = torch.zeros(64, 64)
    traced = jit(fn)
    traced(x)

    def peak(call):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call(x)
        held = highest = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                highest = max(highest, held)
        return highest

    assert 0 < peak(traced) <= peak(fn)


def test_side_effects_happen_once():
    """The function's own prints and counters run once, at the trace."""
    calls, count = [], 0

    @jit
    def fn(x):
        nonlocal count
        count += 1
        calls.append(1)
        return x + 1

    for size in (2, 2, 3, 2):
        fn(torch.ones(size))
    assert len(calls) == count == fn.cache_info().misses == 2


def test_grad_without_graph():
    """Under no_grad an argument may require grad: it comes back as itself, its detached twin as another."""
    w = nn.Parameter(torch.ones(3))

    with torch.no_grad():
        out, same, detached = jit(lambda w: (w * 2, w, w.detach()))(w)

    assert not out.requires_grad
    assert same is w
    assert not detached.requires_grad


# torch's own, of the fast path.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padded_encoders_differ_in_padded_rows_only():
    """A replay of a `TransformerEncoder` has numbers where torch's fast path has zeros, and is equal elsewhere."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    apply, params, _ = functional(nn.TransformerEncoder(layer, 1).eval())
    run = lambda params, x, pad: apply(params, x, src_key_padding_mask=pad)  # noqa: E731
    args = (params.detach(), torch.ones(1, 3, 4), torch.tensor([[False, False, True]]))

    fast, replayed = run(*args), jit(run)(*args)
    torch.testing.assert_close(fast[:, :2], replayed[:, :2])
    assert not fast[:, 2].any()
    assert replayed[:, 2].any()


def conv_gradient(x):
    """One result of a node is None, since the convolution has no bias."""
    weight = torch.ones(2, 3, 3, 3)
    return torch.func.grad(lambda x: F.conv2d(x, weight).square().sum())(x)


@pytest.mark.parametrize(
    "fn",
    [
        conv_gradient,
        pytest.param(lambda x: x.unbind(0)[0] + 1, id="one item"),
        pytest.param(lambda x: x[0].unbind(0)[1], id="one of three items"),
        pytest.param(lambda x: x[0].unbind(0)[::-1], id="all items, reversed"),
        pytest.param(lambda x: torch.stack(x.max(3)[::-1]), id="two items"),
        pytest.param(lambda x: [a * b for a, b in zip(*[x[0].unbind(0)] * 2, strict=True)], id="each item twice"),
    ],
)
def test_lists_of_results(fn):
    """An operation of several results gives each of them to those who use it."""
    x = torch.randn(1, 3, 4, 4)
    jitted = jit(fn, captures="constants")
    jitted(x)

    assert_trees_equal(jitted(x), fn(x))


def test_cache_is_bounded():
    """The trace that was not used for longest is dropped first."""
    fn = jit(lambda x: x + 1, cache_size=2)
    for n in (1, 2, 1, 3, 1, 3):
        fn(torch.ones(n))

    assert fn.cache_info()[:4] == (3, 3, 2, 2)
    fn.cache_clear()
    assert fn.cache_info() == (0, 0, 2, 0, 0)


# -- inside other things ----------------------------------------------------------------------------------------


def test_inside_transforms_and_traces():
    """A jitted function runs inside vmap, grad, another jit and torch.compile."""
    fn = jit(lambda x: (x * 3).sin())
    x = torch.randn(4)

    torch.testing.assert_close(torch.vmap(fn)(x), fn(x))
    torch.testing.assert_close(torch.func.grad(lambda y: fn(y).sum())(x), 3 * (3 * x).cos())
    torch.testing.assert_close(jit(lambda y: fn(y) + 1)(x), fn(x) + 1)
    torch.testing.assert_close(torch.compile(lambda y: fn(y) + 1, backend="eager", fullgraph=True)(x), fn(x) + 1)


def test_threads_share_a_trace():
    """Concurrent first calls make one trace for each shape, and each gets its own result."""
    fn = jit(lambda x, t: (x * 2 + t["a"], t))
    barrier, wrong = threading.Barrier(8), []

    def work(i):
        barrier.wait()
        for n in range(1, 20):
            x = torch.full((n % 3 + 1,), float(i))
            out, same = fn(x, t := TensorDict({"a": x * n}))
            if not torch.equal(out, x * 2 + x * n) or not torch.equal(same["a"], t["a"]):
                wrong.append((i, n))

    run_in_threads(work, range(8))

    assert wrong == []
    assert fn.cache_info().currsize == 3


# torch 2.13 warns about itself when inductor is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_backends(backend, generator):
    """A backend of torch.compile gets a graph that it can run, and gives the same numbers."""
    torch._dynamo.reset()
    opt = adam(lr=0.1)
    x, t = torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator)

    def step(params, state, x, t):
        return opt.update(params, member_grads(params, x, t), state, donate=True)

    params = make_params(generator)
    compiled, plain = jit(step, backend=backend), step
    got, expected = (params, opt.init(params)), (params.clone(), opt.init(params))
    for _ in range(3):
        got, expected = compiled(*got, x, t), plain(*expected, x, t)

    assert_trees_equal(got, expected, rtol=1e-4, atol=1e-5)


def test_a_backend_gets_the_record(generator):
    """A backend of one's own is called once for each record, with operations of aten and the tensors of the call."""
    seen = []

    def backend(module, inputs):
        seen.append(([node.target for node in module.graph.nodes if node.op == "call_function"], inputs))
        return module.forward

    fn, x = jit(lambda x: x.sin() + 1, backend=backend), torch.randn(3, generator=generator)

    assert torch.equal(fn(x), x.sin() + 1)
    assert torch.equal(fn(x.neg()), x.neg().sin() + 1)
    assert [targets for targets, _ in seen] == [[torch.ops.aten.sin.default, torch.ops.aten.add.Tensor]]
    assert torch.equal(seen[0][1][0], x)


def test_backends_cast_once(generator):
    """The casts of autocast are in the record; a backend that traced it under autocast would cast again."""
    x, w = torch.randn(4, 8, generator=generator), torch.randn(8, 8, generator=generator)

    def fn(x, w):
        # Outside of autocast, so in float32.
        with torch.autocast("cpu", enabled=False):
            return x @ w

    with torch.autocast("cpu", torch.bfloat16):
        found = jit(fn, backend="aot_eager")(x, w)

    assert torch.equal(found, x @ w)


class Scaling(nn.Module):
    """A module that keeps a jitted method of its own."""

    def __init__(self):
        super().__init__()
        self.scale = 2
        self.fast = jit(self.scaled)

    def scaled(self, x):
        """Scale by an attribute."""
        return x * self.scale


def test_deep_copies():
    """A copied module has a jitted method of its own."""
    held = Scaling()
    x = torch.arange(3.0)
    held.fast(x)

    twin = copy.deepcopy(held)
    twin.scale = 5

    assert twin.fast(x).tolist() == [0.0, 5.0, 10.0]
    assert held.fast(x).tolist() == [0.0, 2.0, 4.0]
    plain = jit(torch.sin)
    assert copy.deepcopy(plain)(x).tolist() == plain(x).tolist()


def fails(x):
    """Read a value, which a trace refuses."""
    return x.sum().item()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fn", [torch.sin, fails])
def test_a_trace_leaves_the_collection_of_garbage_as_it_was(enabled, fn):
    """It is off while a trace is made."""
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(UnsupportedError):
            jit(fn)(torch.ones(2))
        after = gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()

    assert after == enabled
