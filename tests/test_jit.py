"""`jit`: what a replay gives, what makes a new trace, what is refused, threads, backends."""

import functools
import gc
import shutil
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from tdfunc import CaptureError, ImmutableError, TensorDict, UnsupportedError
from tdfunc._jit import jit
from tdfunc._jit.graph import _FASTER, clean
from tdfunc.optim import adam
from tests.helpers import TiedLM, assert_pure, assert_trees_equal

SCALE = 2.0
WEIGHT = torch.ones(3)


@dataclass(frozen=True)
class Config:
    scale: float


@jit
def inner(x):
    """Scale by a global, in a jitted function."""
    return x * SCALE


def helper(x):
    """Scale by a global."""
    return x * SCALE


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


# -- what a replay gives ----------------------------------------------------------------------------------------


def test_vmap_of_grad_is_exact(generator):
    """A replay would compute other gradients than the function, or lose names and batch sizes."""
    params, x, t = (
        make_params(generator),
        torch.randn(5, 3, generator=generator),
        torch.randn(5, 2, generator=generator),
    )
    traced = jit(member_grads)

    for scale in (1.0, -2.0, 0.0):
        other = params * scale
        assert_trees_equal(assert_pure(lambda p: traced(p, x, t), other), member_grads(other, x, t))
    assert traced.cache_info() == (2, 1, 64, 1)


def test_training_step_is_exact(generator):
    """A traced training loop would drift from the plain one."""
    x, t = torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator)
    opt = adam(lr=torch.linspace(0.01, 0.1, 4))

    def plain(params, state, x, t):
        return opt.update(params, member_grads(params, x, t), state)

    traced = jit(plain)
    mine = theirs = (make_params(generator), opt.init(make_params(generator)))
    for _ in range(5):
        mine, theirs = traced(*mine, x, t), plain(*theirs, x, t)

    for got, expected in zip(mine, theirs, strict=True):
        assert_trees_equal(got, expected)
    assert traced.cache_info().misses == 1


class Pair(NamedTuple):
    first: torch.Tensor
    rest: dict


def test_structures_come_back():
    """Containers, plain values or argument objects would come back as something else."""

    def fn(pair, tree, flag, *, scale=1.0):
        return Pair(pair.rest["b"] * scale, {"tree": tree, "same": pair.first, "none": None}), [
            flag,
            "text",
            (tree["n"],),
        ]

    tree = TensorDict({"a": torch.ones(2), "n": "word"}, [2])
    pair = Pair(torch.ones(3), {"b": torch.arange(3.0)})
    traced = jit(fn)

    for _ in range(2):
        out, extra = traced(pair, tree, True, scale=2.0)
        assert type(out) is Pair
        assert out.rest["tree"] is tree
        assert out.rest["same"] is pair.first
        assert extra == [True, "text", ("word",)]
        torch.testing.assert_close(out.first, torch.tensor([0.0, 2.0, 4.0]))


def test_ties_come_back():
    """A tied weight would come back as two."""
    params = TensorDict.from_module(TiedLM()).detach()

    out = jit(lambda p: p * 2)(params)

    assert_trees_equal(out, params * 2)
    assert out["emb", "weight"] is out["out", "weight"]


def test_batch_norm(generator):
    """BatchNorm's statistics would be lost, or written into the arguments."""
    x = torch.randn(8, 3, generator=generator)

    def fn(mean, var, x):
        mean, var = mean.clone(), var.clone()
        y = nn.functional.batch_norm(x, mean, var, training=True)
        return y, mean, var

    out = assert_pure(jit(fn), torch.zeros(3), torch.ones(3), x)

    for got, expected in zip(out, fn(torch.zeros(3), torch.ones(3), x), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_statistics_alone_are_updated(generator):
    """The normalisation would be dropped as dead code, and the update of its statistics with it."""

    def fn(mean, var, x):
        mean, var = mean.clone(), var.clone()
        nn.functional.batch_norm(x, mean, var, training=True)
        return mean, var

    args = (torch.zeros(3), torch.ones(3), torch.randn(8, 3, generator=generator))

    assert all(torch.equal(a, b) for a, b in zip(jit(fn)(*args), fn(*args), strict=True))


def test_random_numbers_are_drawn_again():
    """A replay would repeat the noise of the trace, or merge two draws into one."""
    fn = jit(lambda x: (x + torch.rand(3), x + torch.rand(3), nn.functional.dropout(x, 0.5)))
    x = torch.ones(3)
    fn(x)

    torch.manual_seed(0)
    traced = [fn(x) for _ in range(2)]
    torch.manual_seed(0)
    plain = [fn.__wrapped__(x) for _ in range(2)]

    assert all(torch.equal(a, b) for t, p in zip(traced, plain, strict=True) for a, b in zip(t, p, strict=True))
    assert not torch.equal(traced[0][0], traced[0][1])
    assert fn.draws(x)
    assert not jit(lambda x: x + 1).draws(x)


def test_generators_are_drawn_from():
    """A generator that the function is given, or closes over, would be used once."""
    closed, given = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    first, second = jit(lambda x: x + torch.rand(2, generator=closed)), jit(lambda x, g: x + torch.rand(2, generator=g))
    expected = torch.rand(4, generator=torch.Generator().manual_seed(0)).reshape(2, 2)

    for row in expected:
        assert torch.equal(first(torch.zeros(2)), row)
        assert torch.equal(second(torch.zeros(2), given), row)


def test_arguments_are_let_go():
    """A trace would keep the first call's tensors in memory."""
    fn = jit(lambda t: t.apply(lambda x: x * 2))
    first = TensorDict({"a": torch.ones(3)})
    alive = weakref.ref(first["a"])
    fn(first)
    del first
    gc.collect()

    assert alive() is None


def test_tracing_draws_nothing():
    """The first call would move the random generator twice."""
    state = torch.get_rng_state()

    jit(lambda x: x + torch.rand(3) * 0).graph(torch.ones(3))

    assert torch.equal(torch.get_rng_state(), state)


def test_side_effects_happen_once():
    """The function's own prints and counters would run at every call, or twice at the first."""
    calls = []
    fn = jit(lambda x: calls.append(1) or x + 1)

    for _ in range(3):
        fn(torch.ones(2))
    assert len(calls) == 1


def test_equal_outputs_are_separate():
    """Two results of one expression would share memory, so that donating one writes to the other."""
    a, b = jit(lambda x: (torch.zeros_like(x), torch.zeros_like(x)))(torch.ones(3))

    a.add_(1)
    assert b.tolist() == [0, 0, 0]


def test_constants_are_fresh():
    """A literal tensor would be shared between calls: writing to one result would change the next."""
    fn = jit(lambda x: torch.tensor([1.0, 2.0]))
    fn(torch.ones(1)).add_(5)

    assert fn(torch.ones(1)).tolist() == [1, 2]


def test_writes_to_own_tensors():
    """In-place operations on temporaries would be merged, dropped or moved."""

    def fn(x):
        y = x * 2
        before = y + 1
        y.add_(10)
        after = y + 1
        z = x * 2
        z[0] = 7
        return before, after, z, x * 2

    x = torch.arange(3.0)
    assert all(torch.equal(a, b) for a, b in zip(assert_pure(jit(fn), x), fn(x), strict=True))


def test_ones_that_are_written_are_kept():
    """A product with ones stays in the graph where the ones, or a view of them, are written."""

    def fn(x):
        mask = torch.ones_like(x)
        mask[0] = 0
        return x * mask

    assert jit(fn)(torch.ones(3)).tolist() == [0, 1, 1]


@pytest.mark.parametrize("fn", [torch.linalg.cholesky, lambda x: torch.linalg.solve(x * 0, x)])
def test_checks_of_operations_are_replayed(fn):
    """An operation that only checks its arguments stays in the graph, and raises in the replay."""
    with pytest.raises(torch.linalg.LinAlgError):
        jit(fn)(-torch.eye(2))


def test_views_and_strides():
    """A trace of one layout would be replayed on another."""
    fn = jit(lambda x: (x.reshape(-1), x.t().contiguous(), x.flatten() + 1))
    x = torch.arange(6.0).reshape(2, 3)

    for other in (x, torch.arange(6.0).reshape(3, 2).t(), x[:, ::1], torch.arange(12.0).reshape(2, 6)[:, ::2]):
        for got, expected in zip(fn(other), fn.__wrapped__(other), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
            assert got.stride() == expected.stride()


def test_one_tensor_given_twice():
    """A trace of f(x, x) would be replayed for f(x, y)."""
    fn = jit(lambda a, b: a - 2 * b)
    x, y = torch.ones(2), torch.full((2,), 5.0)

    assert [fn(x, x).tolist(), fn(x, y).tolist(), fn.cache_info().misses] == [[-1, -1], [-9, -9], 2]


def test_grad_without_graph():
    """Under no_grad an argument that requires grad would be refused, or its detached twin would be it."""
    w = nn.Parameter(torch.ones(3))

    with torch.no_grad():
        out, same, detached = jit(lambda w: (w * 2, w, w.detach()))(w)

    assert not out.requires_grad
    assert same is w
    assert not detached.requires_grad


def test_backward_inside(generator):
    """`torch.autograd.grad` inside the function would not be recorded."""

    def fn(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.pow(3).sum(), x)[0]

    x = torch.randn(3, generator=generator)
    torch.testing.assert_close(jit(fn)(x), 3 * x.square())


UNARY = [
    torch.exp,
    torch.tanh,
    lambda x: x.pow(2),
    lambda x: x * 1,
    lambda x: x.mT,
    lambda x: x.mT.mT,
    lambda x: x.sum(0, keepdim=True),
    lambda x: x.view(x.shape),
    lambda x: x.expand(*x.shape),
    lambda x: x.clone().add_(1),
    lambda x: x.square().mean(-1, keepdim=True),
    lambda x: torch.ones_like(x) * x,
    lambda x: x + x.detach(),
    lambda x: x.detach(),
    lambda x: x.grad_fn or x.unsqueeze(0).transpose(0, 1)[:, 0],
]


@given(st.lists(st.sampled_from(range(len(UNARY))), min_size=1, max_size=6), st.integers(0, 1000))
def test_programs_of_random_operations(choices, seed):
    """Cleaning the graph would change what it computes, or share memory between result and argument."""

    def fn(x):
        kept = [x]
        for choice in choices:
            kept.append(UNARY[choice](kept[-1]))
        return kept

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    for got, expected in zip(assert_pure(jit(fn), x), fn(x), strict=True):
        assert torch.equal(got, expected)
        assert (got.data_ptr() == x.data_ptr()) == (expected.data_ptr() == x.data_ptr())


def sample_calls():
    """Return for each fast spelling arguments that its aten overload takes."""
    x, y = torch.rand(3, 4) + 0.5, torch.rand(3, 4) + 0.5
    b = torch.rand(2, 3, 4)
    one, two, i = (x,), (x, y), torch.tensor([2, 0])
    aten = torch.ops.aten
    unary = ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "square", "reciprocal", "sign", "tanh", "sigmoid", "relu")
    calls = {getattr(aten, name).default: one for name in (*unary, "sum", "mean", "clone", "t")}
    calls |= {getattr(aten, name).default: two for name in ("maximum", "minimum")}
    calls |= {getattr(aten, name).Tensor: two for name in ("add", "sub", "mul", "div", "eq")}
    calls |= {
        getattr(aten, name).Scalar: (x, 2.0) for name in ("add", "sub", "mul", "div", "eq", "gt", "ge", "lt", "le")
    }
    return calls | {
        aten.mm.default: (x, y.t()),
        aten.bmm.default: (b, b.mT),
        aten.addmm.default: (torch.rand(3), x, y.t()),
        aten.baddbmm.default: (torch.rand(2, 3, 3), b, b.mT),
        aten.transpose.int: (b, 0, 2),
        aten.permute.default: (b, [2, 0, 1]),
        aten.unsqueeze.default: (x, 1),
        aten.squeeze.dim: (x[:1], 0),
        aten.select.int: (x, 0, 1),
        aten.cat.default: ([x, y], 1),
        aten.stack.default: ([x, y], 1),
        aten.index_select.default: (x, 0, i),
        aten.gather.default: (x, 1, i.reshape(2, 1)),
        aten.where.self: (x > y, x, y),
        aten.full.default: ([2, 3], 1.5),
        aten.sum.dim_IntList: (x, [1], True),
        aten.mean.dim: (x, [0], False),
        aten.amax.default: (x, [1], True),
        aten.pow.Tensor_Scalar: (x, 3),
        aten.lerp.Scalar: (x, y, 0.3),
        aten.addcmul.default: (x, y, y),
        aten.addcdiv.default: (x, y, y),
        aten.native_layer_norm.default: (x, [4], None, None, 1e-5),
    }


def test_fast_spellings_are_the_same():
    """A binding of torch would read its arguments in another way than the aten overload it stands for."""
    calls = sample_calls()

    assert set(_FASTER) <= set(calls)
    for overload, binding in _FASTER.items():
        got, expected = binding(*calls[overload]), overload(*calls[overload])
        pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
        assert all(torch.equal(a, b) for a, b in pairs), overload


def test_graph_is_cleaned(generator):
    """A replay would pay for views, copies and values that nothing uses."""
    x = torch.randn(3, 3, generator=generator)

    def fn(x):
        torch.exp(x)
        same = x.detach().view(3, 3).t().t() * 1
        return (same @ same) + (x @ x)

    code = jit(fn).graph(x).code
    assert code.count("torch.mm") == 1
    assert not any(word in code for word in ("detach", "view", "exp", "torch.t(", "mul"))


def test_cleaning_keeps_aten_for_backends():
    """A backend would get calls that it has no rule for."""
    module = make_fx(lambda x: (x + 1).relu(), tracing_mode="fake")(torch.ones(3))
    clean(module, faster=False)

    assert "torch.ops.aten.add.Tensor" in module.code


# -- what makes a new trace -------------------------------------------------------------------------------------


def tree(**options):
    """Return a tree of two leaves."""
    return TensorDict({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, [2], **options)


@pytest.mark.parametrize(
    "other",
    [
        tree().with_batch_size([2, 3]),
        tree(names=["x"]),
        tree(device="cpu"),
        TensorDict({"b": torch.ones(2, 3), "a": torch.ones(2, 3)}, [2]),
        tree().set("n", "text"),
        tree().set("a", torch.ones(2, 4)),
        tree().set("a", torch.ones(2, 3, dtype=torch.float64)),
        tree().set("a", torch.ones(3, 2).t()),
        tree().rename_key("b", "c"),
        TensorDict.from_module(nn.Linear(3, 2)).detach(),
    ],
)
def test_tree_data_is_in_the_key(other):
    """A trace for one tree would be replayed for another, giving its batch size, names, device or key order."""
    fn = jit(lambda t: t.apply(lambda x: x * 2))
    fn(tree())

    assert_trees_equal(fn(other), fn.__wrapped__(other))
    assert list(fn(other).keys()) == list(other.keys())
    assert fn.cache_info().misses == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("a", "b"),
        (None, 0),
        ((1,), [1]),
        ({"a": 1}, {"a": 2}),
        (torch.float32, torch.float64),
        (np.float64(0.0), np.float64(-0.0)),
        (range(0, 3, 2), range(0, 4, 2)),
        (Config(1), Config(1.0)),
        (deque([1]), deque([2])),
        (bytearray([1]), bytearray([2])),
    ],
)
def test_static_arguments_are_in_the_key(first, second):
    """Arguments that compare equal, or are no tensors, would share a trace."""
    fn = jit(lambda x, option: (x + 1, repr(option)))
    x = torch.ones(1)

    assert fn(x, first)[1] == repr(first)
    assert fn(x, second)[1] == repr(second)
    assert fn.cache_info().misses == 2


def test_arrays_are_read_again():
    """A numpy array that the function closes over would be frozen."""
    array = np.ones(2, dtype=np.float32)
    fn = jit(lambda x: x + torch.as_tensor(array))
    assert fn(torch.ones(2)).tolist() == [2, 2]

    array[0] = 5
    assert fn(torch.ones(2)).tolist() == [6, 2]


def test_nan_is_found_again():
    """A nan, which differs from itself, would make a trace at every call."""
    fn = jit(lambda x, fill: x.masked_fill(x > 0, fill))
    for _ in range(3):
        fn(torch.ones(2), float("nan"))

    assert fn.cache_info().misses == 1


def test_closures_defaults_and_globals_are_in_the_key(monkeypatch):
    """A changed learning rate or flag would be ignored."""
    factor = 1.0
    options = {"power": 1}

    def fn(x, *, offset=0.0):
        return helper(x) * factor ** options["power"] + offset

    traced = jit(fn)
    x = torch.ones(1)
    assert traced(x).item() == 2
    factor = 3.0
    assert traced(x).item() == 6
    options["power"] = 2
    assert traced(x).item() == 18
    fn.__kwdefaults__ = {"offset": 1.0}
    assert traced(x).item() == 19
    monkeypatch.setitem(globals(), "SCALE", 4.0)
    assert traced(x).item() == 37
    monkeypatch.setitem(globals(), "helper", lambda x: x)
    assert traced(x).item() == 10
    assert traced.cache_info().misses == 6


def test_globals_of_an_inner_jitted_function_are_in_the_key(monkeypatch):
    """A function that calls a jitted one is recorded anew when a global that the inner one reads changes."""
    outer = jit(lambda x: inner(x) + 0)
    assert outer(torch.ones(1)).item() == 2

    monkeypatch.setitem(globals(), "SCALE", 4.0)
    assert outer(torch.ones(1)).item() == 4


def test_through_vmap_and_grad_closures():
    """A value in the closure of a loss inside vmap(grad(loss)) would be frozen."""
    factor = 1.0

    def loss(p):
        return (p * factor).sum()

    traced = jit(torch.vmap(torch.func.grad(loss)))
    assert traced(torch.ones(2, 3))[0, 0].item() == 1
    factor = 5.0
    assert traced(torch.ones(2, 3))[0, 0].item() == 5


def test_partials_and_methods():
    """`functools.partial`, methods and callable objects could not be traced."""

    class Model:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, x):
            return x * self.scale

        def double(self, x):
            return self(x) * 2

        @jit
        def decorated(self, x):
            return x + self.scale

    x = torch.ones(1)
    assert jit(functools.partial(lambda a, x: x + a, 3))(x).item() == 4
    assert jit(Model(3))(x).item() == 3
    assert jit(Model(3).double)(x).item() == 6
    assert [Model(3).decorated(x).item(), Model(4).decorated(x).item()] == [4, 5]


def test_mode_of_modules_is_in_the_key():
    """A dropout switched to eval would go on dropping."""
    dropout = nn.Dropout(1.0)
    fn = jit(lambda x: dropout(x))

    assert fn(torch.ones(2)).tolist() == [0, 0]
    dropout.eval()
    assert fn(torch.ones(2)).tolist() == [1, 1]


def test_thread_settings_are_in_the_key():
    """A trace under autocast, or another default dtype, would be replayed without, or cast twice."""
    fn = jit(lambda x: (x @ x, torch.zeros(1), torch.is_grad_enabled()))
    x = torch.randn(4, 4)
    plain = fn(x)[0]

    with torch.autocast("cpu", torch.bfloat16):
        low = fn(x)[0]
        torch.testing.assert_close(low, x @ x, rtol=0, atol=0)
    with torch.no_grad():
        assert fn(x)[2] is False
    torch.set_default_dtype(torch.float64)
    try:
        assert fn(x)[1].dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert low.dtype is torch.bfloat16
    assert torch.equal(fn(x)[0], plain)
    assert fn.cache_info().misses == 4


def test_autocast_inside_is_kept():
    """A region of autocast in the function would be lost or applied to the rest."""

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            low = x @ x
        return low, x @ x

    x = torch.randn(4, 4)
    assert all(torch.equal(a, b) for a, b in zip(jit(fn)(x), fn(x), strict=True))


def test_cache_is_bounded():
    """Calls of ever new shapes would fill the memory, or the traces in use would be dropped first."""
    fn = jit(lambda x: x + 1, cache_size=2)
    for n in (1, 2, 1, 3, 1):
        fn(torch.ones(n))

    assert fn.cache_info() == (2, 3, 2, 2)
    fn.cache_clear()
    assert fn.cache_info() == (0, 0, 2, 0)
    with pytest.raises(ValueError, match=r"cache_size >= 1[\s\S]*0"):
        jit(lambda x: x, cache_size=0)


# -- what is refused --------------------------------------------------------------------------------------------


class Holder:
    def __init__(self):
        self.inner = {"mask": torch.ones(3)}


def captures():
    """Return functions that use a tensor from outside, with the name it must be refused by."""
    cell, params, holder, module = torch.ones(3), TensorDict({"a": {"w": torch.ones(3)}}), Holder(), nn.Linear(3, 3)
    inner = lambda x: x * cell  # noqa: E731
    return {
        "'cell'": lambda x: x + cell,
        "'WEIGHT'": lambda x: x + WEIGHT,
        "params['a.w']": lambda x: x + params["a", "w"],
        "holder.inner['mask']": lambda x: x + holder.inner["mask"],
        "module.weight": lambda x: module(x),
        "'cell'  ": lambda x: inner(x),
        "partial arguments": functools.partial(lambda w, x: x + w, cell),
        "'cell' ": lambda x: cell,
        "cell'": torch.vmap(lambda x: x + cell[0]),
        "self.weight": module,
    }


@pytest.mark.parametrize("name", captures())
def test_captured_tensors_are_named(name):
    """A weight that is not an argument would be frozen into the trace."""
    with pytest.raises(CaptureError) as err:
        jit(captures()[name])(torch.ones(3))

    assert name.strip() in str(err.value)
    assert "test_jit.py" in str(err.value) or "self" in name
    assert "argument" in str(err.value)


def test_capture_in_vmap_of_grad_points_at_the_line(generator):
    """The message would show a line of torch."""
    hidden = torch.ones(3)

    def loss(p):
        return (p["w"] * hidden).sum()

    with pytest.raises(CaptureError, match=r"(?s)hidden.*test_jit\.py:\d+: return \(p\[\"w\"\] \* hidden\)"):
        jit(torch.vmap(torch.func.grad(loss)))(TensorDict({"w": torch.ones(2, 3)}, [2]))


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda t, x: x.add_(1), "argument 1"),
        (lambda t, x: t["a", "w"].mul_(2), "argument 0['a']['w']"),
        (lambda t, x: x[0].zero_(), "argument 1"),
        (lambda t, x: torch.add(x, 1, out=t["a", "w"]), "argument 0['a']['w']"),
        (lambda t, x: nn.functional.batch_norm(torch.ones(4, 3), x, torch.ones(3), training=True), "argument 1"),
    ],
)
def test_writes_to_arguments_are_refused(fn, name):
    """A replay would write to what its caller passed in."""
    params, x = TensorDict({"a": {"w": torch.ones(3)}}), torch.ones(3)

    with pytest.raises(ImmutableError) as err:
        jit(fn)(params, x)

    assert name in str(err.value)
    assert "test_jit.py" in str(err.value)
    assert params["a", "w"].tolist() == x.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * 2 if x.sum() > 0 else x,
        lambda x: x * x[0].item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: [float(x[0])],
        lambda x: x.tolist(),
    ],
)
def test_values_are_refused_with_the_line(fn):
    """A branch taken once would be taken for all data."""
    with pytest.raises(UnsupportedError, match=r"(?s)value of a tensor.*test_jit\.py:\d+.*torch\.where"):
        jit(fn)(torch.ones(3))


def test_an_argument_that_requires_grad_is_refused():
    """Gradients through a replay would ignore the function's no_grad regions, or be missing."""
    fn = jit(lambda t: t["w"] * 2)
    with pytest.raises(UnsupportedError, match=r"(?s)argument 0\['w'\] requires grad.*torch\.func\.grad.*no_grad"):
        fn(TensorDict({"w": nn.Parameter(torch.ones(3))}))

    assert fn.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("fn", "args", "words"),
    [
        (lambda x, o: x, ([slice(1), object.__new__(type("L", (), {"__hash__": None}))],), ["argument 0[1]", "L"]),
        (lambda x: x, (TensorDict({"a": torch.eye(3).to_sparse()}),), ["argument 0['a']", "torch.sparse_coo"]),
        (lambda x: Holder(), (torch.ones(1),), ["the result", "Holder"]),
        (lambda x: {"a": [x, Holder()]}, (torch.ones(1),), ["the result['a'][1]", "Holder"]),
        (
            lambda x: x,
            (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),),
            ["argument 0", "subclass", "NestedTensor"],
        ),
    ],
)
def test_what_cannot_be_keyed_or_rebuilt(fn, args, words):
    """An object would be replayed stale, or returned with fake tensors in it."""
    with pytest.raises(UnsupportedError) as err:
        jit(fn)(*args)

    assert all(word in str(err.value) for word in words), str(err.value)


def test_errors_of_the_function_come_through():
    """A mistake in the user's code would be hidden behind a message of jit, or leave a broken trace behind."""
    fn = jit(lambda x, y: x @ y)

    with pytest.raises(RuntimeError, match="reduction dim"):
        fn(torch.ones(2, 3), torch.ones(2, 3))
    assert fn(torch.ones(2, 3), torch.ones(3, 2)).shape == (2, 2)


# -- inside other things ----------------------------------------------------------------------------------------


def test_inside_transforms_and_traces():
    """A jitted function could not be used in vmap, grad, another jit or torch.compile."""
    fn = jit(lambda x: (x * 3).sin())
    x = torch.randn(4)

    torch.testing.assert_close(torch.vmap(fn)(x), fn(x))
    torch.testing.assert_close(torch.func.grad(lambda y: fn(y).sum())(x), 3 * (3 * x).cos())
    torch.testing.assert_close(jit(lambda y: fn(y) + 1)(x), fn(x) + 1)
    torch.testing.assert_close(torch.compile(lambda y: fn(y) + 1, backend="eager", fullgraph=True)(x), fn(x) + 1)


def test_threads_share_a_trace():
    """Concurrent first calls would trace over each other, or mix their results."""
    fn = jit(lambda x, t: (x * 2 + t["a"], t))
    barrier, wrong = threading.Barrier(8), []

    def work(i):
        barrier.wait()
        for n in range(1, 20):
            x = torch.full((n % 3 + 1,), float(i))
            out, same = fn(x, t := TensorDict({"a": x * n}))
            if not torch.equal(out, x * 2 + x * n) or not torch.equal(same["a"], t["a"]):
                wrong.append((i, n))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

    assert wrong == []
    assert fn.cache_info().currsize == 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends(backend, generator):
    """A backend of torch.compile would get a graph that it cannot run, or give other numbers."""
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

    for mine, theirs in zip(got, expected, strict=True):
        assert_trees_equal(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
# torch 2.13 warns about itself when inductor is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
def test_inductor(generator):
    """`backend="inductor"` would not compile a training step."""
    x, t = torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator)
    params = make_params(generator)

    assert_trees_equal(
        jit(member_grads, backend="inductor")(params, x, t), member_grads(params, x, t), rtol=1e-4, atol=1e-5
    )
