"""Cleaning a recorded graph: a replay gives the values, views and errors of the function, with fewer operations."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tdfunc import CaptureError, ImmutableError, TensorDict, UnsupportedError
from tdfunc._jit import jit
from tdfunc._jit.memory import written_by
from tdfunc._jit.replay.code import BINDINGS, METHODS
from tdfunc.optim import sgd
from tests.helpers import examples

CAPTURED = torch.full((3,), 2.0)


def write_row(a, b):
    """Assign to an index."""
    a[0] = b.sum()


def update_statistics(a, b):
    """Write to a tensor through an operation whose schema does not say so."""
    F.batch_norm(b.reshape(1, -1).expand(2, -1), a, torch.ones(a.numel()), training=True)


# Of two tensors of three numbers each; some write to the first, some only check, and some return None.
STEPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sin": lambda a, b: a.sin(),
    "add": lambda a, b: a + b,
    "times": lambda a, b: a * b,
    "times 1": lambda a, b: a * 1,
    "power 1": lambda a, b: a**1,
    "ones": lambda a, b: torch.ones_like(a),
    "zeros": lambda a, b: torch.zeros_like(a),
    "empty": lambda a, b: torch.empty_like(a).fill_(2),
    "literal": lambda a, b: torch.tensor([1.0, 2.0, 3.0]),
    "noise": lambda a, b: torch.rand(3),
    "clone": lambda a, b: a.clone(),
    "view": lambda a, b: a.view(3),
    "detach": lambda a, b: a.detach(),
    "data": lambda a, b: a.data,
    "turned": lambda a, b: a.reshape(3, 1).t()[0],
    "row": lambda a, b: torch.stack([a, b])[1],
    "expanded": lambda a, b: a[:1].expand(3),
    "add_": lambda a, b: a.add_(1),
    "mul_": lambda a, b: a.mul_(b),
    "out": lambda a, b: torch.sin(a, out=b),
    "row_": write_row,
    "copy_": lambda a, b: a[1:].copy_(b[:2]) and None,
    "spread_": lambda a, b: a.as_strided_((3,), (0,)) and None,
    "set_": lambda a, b: a.set_(b * 2) and None,
    "foreach_": lambda a, b: torch._foreach_mul_([a, b], 2),
    "statistics": update_statistics,
    "assert": lambda a, b: torch._assert_async((a < 100).all()),
    "cholesky": lambda a, b: torch.linalg.cholesky(torch.diag(a))[0],
    "solve": lambda a, b: torch.linalg.solve(torch.diag(a), b),
    "one_hot": lambda a, b: F.one_hot(a.long(), 3).sum(0) + a,
    "backward": lambda a, b: torch.autograd.grad((x := a.detach().requires_grad_()).pow(3).sum(), x)[0],
    "mapped classes": lambda a, b: torch.vmap(lambda x: F.one_hot(x.long() % 3, 3))(a)[0] + a,
    "total": lambda a, b: a.sum(0, True).view(1, 1)[0].expand(3),
    "complex": lambda a, b: (a * complex(-1, -0.0)).sqrt().imag,
    "select": lambda a, b: a[b.long() % 3],
    "capture": lambda a, b: a + CAPTURED,
    "read": lambda a, b: a * CAPTURED.tolist()[0],
    "grad": lambda a, b: a if a.grad is None else b,
    "branch": lambda a, b: a if a.sum() > 0 else b,
}
REFUSALS = (CaptureError, ImmutableError, UnsupportedError)
NAMES = r"not one of its arguments|argument 0|value of a tensor"


class Program(NamedTuple):
    """Steps of (name, place of the first tensor, place of the second), and the places that are returned."""

    steps: list[tuple[str, int, int]]
    returned: list[int]

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Run the steps on tensors that were made before, and on the argument."""
        kept = [x * 2, x]
        for name, first, second in self.steps:
            out = STEPS[name](kept[first % len(kept)], kept[second % len(kept)])
            if isinstance(out, Tensor):
                kept.append(out)
        return [kept[place % len(kept)] for place in self.returned]


PLACES = st.integers(0, 5)
PROGRAMS = st.builds(
    Program,
    st.lists(st.tuples(st.sampled_from(list(STEPS)), PLACES, PLACES), min_size=1, max_size=6),
    st.lists(PLACES, min_size=1, max_size=2),
)
NUMBERS = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, 60.0]), min_size=3, max_size=3)


def outcome(fn, values):
    """The results, and which of them share memory; "raises" for an error of torch; the name in a refusal."""
    torch.manual_seed(0)
    x = torch.tensor(values)
    try:
        out = [x, *fn(x)]
    except REFUSALS as err:
        return re.findall(NAMES, str(err))[0]
    except (RuntimeError, IndexError):
        return "raises"
    return str([t.tolist() for t in out]), [[a.data_ptr() == b.data_ptr() for a in out] for b in out]


@examples(0.6)
@given(PROGRAMS, NUMBERS, NUMBERS)
def test_replays_equal_the_function(program, first, second):
    """A replay gives the values, shared memory and errors of the function, or the function is refused by name."""
    traced = jit(program)
    got = [outcome(traced, values) for values in (first, second, first)]

    refused = got[0] in NAMES.split("|") and got.count(got[0]) == 3
    assert refused or got == [outcome(program, values) for values in (first, second, first)]


MOVES = {
    "unsqueeze_": lambda v: v.unsqueeze_(0),
    "t_": lambda v: v.t_(),
    "as_strided_": lambda v: v.as_strided_((3,), (1,)),
    "resize_": lambda v: v.resize_(2),
    "set_": lambda v: v.set_(torch.ones(2, 2)),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("look", [Tensor.detach, lambda v: v.view(2, 2), lambda v: v.t().t()])
def test_a_view_keeps_its_shape_when_its_base_gets_another_in_place(move, look):
    """Two tensors of one memory are two objects in a replay, and equal views of one tensor, too."""

    def run(a):
        v = a.sin().view(2, 2)
        views = [look(v) for _ in range(2)]
        v.mul_(2)
        MOVES[move](v)
        MOVES[move](views[0])
        return [v * 1, *(view * 1 for view in views)]

    traced, values = jit(run), [torch.arange(4.0), torch.arange(4.0) * 2]

    torch.testing.assert_close([traced(a) for a in values], [run(a) for a in values], rtol=0, atol=0)


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
        # Without values that could differ.
        aten.empty.memory_format: ([2, 0],),
        aten.sum.dim_IntList: (x, [1], True),
        aten.mean.dim: (x, [0], False),
        aten.amax.default: (x, [1], True),
        aten.pow.Tensor_Scalar: (x, 3),
        aten.lerp.Scalar: (x, y, 0.3),
        aten.addcmul.default: (x, y, y),
        aten.addcdiv.default: (x, y, y),
        aten.native_layer_norm.default: (x, [4], None, None, 1e-5),
        aten.arange.default: (5,),
        aten.arange.start: (2, 5),
        **{getattr(aten, f"bitwise_{name}").Tensor: (i, i + 1) for name in ("and", "or", "xor")},
        **{getattr(aten, f"bitwise_{name}").Scalar: (i, 6) for name in ("and", "or", "xor")},
    }


def test_fast_spellings_have_samples():
    """Each overload that has a binding has arguments in the table."""
    assert set(BINDINGS) <= set(sample_calls())


def test_fast_spellings_are_the_same():
    """A binding of torch reads its arguments as the aten overload does that it stands for."""
    calls = sample_calls()
    differ = []
    for overload, name in BINDINGS.items():
        got, expected = getattr(torch, name)(*calls[overload]), overload(*calls[overload])
        pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
        if not all(torch.equal(a, b) for a, b in pairs):
            differ.append(overload)

    assert differ == []


@pytest.mark.parametrize("overload", METHODS, ids=str)
def test_methods_are_the_same(overload):
    """A method reads its arguments, a number or a tensor of one, as the overload does that it stands for."""
    name = METHODS[overload]
    dtype = torch.float32 if "div" in name else torch.int64
    x = torch.tensor([-7, 3, 1 << 62], dtype=dtype)
    other = torch.tensor([5, 6, 7], dtype=dtype) if overload._overloadname == "Tensor" else 5
    numbers = [other, torch.as_tensor(other, dtype=dtype)]

    found = [getattr(x.clone(), name)(number) for number in numbers]
    torch.testing.assert_close(found, [overload(x.clone(), other)] * 2, rtol=0, atol=0)


def test_graph_is_cleaned(generator):
    """A replay has no views, copies and values that nothing uses."""
    x = torch.randn(3, 3, generator=generator)

    def fn(x):
        torch.exp(x)
        same = x.detach().view(3, 3).t().t() * 1
        return (same @ same) + (x @ x)

    code = jit(fn).graph(x).code
    assert code.count("aten.mm") == 1
    assert not any(word in code for word in ("detach", "view", "exp", "aten.t.", "mul"))


@pytest.mark.parametrize(
    "fn", [lambda x: x.view(()) + 1, lambda x: x.reshape(()).expand(()), lambda x: x.sum().view(1)]
)
def test_views_without_dimensions(fn):
    """A view of one number as a tensor without dimensions replays as it runs."""
    x = torch.randn(1)
    run = jit(fn)

    assert all(torch.equal(run(x), fn(x)) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize(
    "options", [{}, {"padding": 1}, {"stride": 1}, {"dilation": 2}, {"ceil_mode": True, "stride": 3}], ids=str
)
def test_pools_of_a_replay_are_those_of_torch(dtype, options, generator):
    """Values and places of the maxima of a pool are torch's, with equal maxima, NaN and infinities."""
    first, second = torch.randint(-3, 4, (2, 4, 16, 13, 15), generator=generator).to(dtype)
    if dtype.is_floating_point:
        second[torch.rand(second.shape, generator=generator) < 0.05] = float("nan")
        second[torch.rand(second.shape, generator=generator) < 0.2] = -float("inf")
    pool = jit(lambda x: F.max_pool2d(x, 3 if "padding" in options else 2, return_indices=True, **options))
    pool(first)

    got = pool(second)

    expected = F.max_pool2d(second, 3 if "padding" in options else 2, return_indices=True, **options)
    assert [x.stride() for x in got] == [x.stride() for x in expected]
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_of_all_selected_are_theirs(count, generator):
    """The gradient of a tensor of which each place is selected, in any order, is the plain one."""
    x = torch.randn(2, 3, 4, generator=generator)
    weights = torch.randn(3, 4, generator=generator)

    def loss(x, weights):
        return sum((x[:, i].sin() * weights[i]).sum() for i in (2, 0, 1)[:count])

    step = jit(torch.func.grad(loss))
    step(x * 2, weights)

    assert torch.equal(step(x, weights), torch.func.grad(loss)(x, weights))


def test_constants_of_a_replay_are_new_where_they_leave_it():
    """A constant that is returned or written to is new at each replay; one that is only read may be kept."""
    fn = jit(lambda x: (torch.zeros(3), torch.ones(3).add_(x), x + torch.arange(3), torch.tensor([1.0])))
    fn(torch.zeros(3))

    for out in fn(torch.ones(3)):
        out.fill_(7)

    assert [out.tolist() for out in fn(torch.ones(3))] == [[0, 0, 0], [2, 2, 2], [1, 2, 3], [1]]
    signs = jit(lambda x: 1 / (x * 0.0) - 1 / (x * -0.0))
    assert signs(torch.ones(1)) == signs(torch.ones(1)) == torch.inf


def test_a_copy_that_is_read_by_the_write_to_its_source_stays():
    """A copy is not dropped where its last reader writes to its source; a write through a view changes a value."""

    def fn(x):
        own, viewed = x * 2, x * 3
        copy, before = own.clone(), viewed.sin()
        viewed[0].add_(1)
        return torch.stack([own.index_add_(0, torch.tensor([1, 2, 0]), copy), viewed.sin() - before])

    x = torch.arange(3.0)
    assert torch.equal(jit(fn)(x), fn(x))


def test_a_copy_of_an_argument_on_donated_memory_stays():
    """Two arguments may share memory that torch does not know to be shared: a copy is made before the write."""
    optimizer = sgd(lr=0.1)

    def fn(params, grads, state, rows):
        before = rows.clone()
        params, _ = optimizer.update(params, grads, state, donate=True)
        return params, before * 2

    array = np.arange(4, dtype=np.float32)
    params = TensorDict({"w": torch.from_numpy(array)})
    _, rows = jit(fn)(params, torch.ones_like(params), optimizer.init(params), torch.from_numpy(array)[1:])

    assert rows.tolist() == [2, 4, 6]
    assert array[1] < 1


# torch's own functional forms, those for evaluation, and derivatives: they read the statistics.
_READERS = ("_functional", "_no_update", "_no_training", "_backward")


def test_every_schema_that_hides_a_write_is_known():
    """An operation of torch that is given running statistics says that it writes to them, or `written_by` knows it."""
    hidden, unknown = set(), []
    for schema in torch._C._jit_get_all_schemas():
        stats = [argument for argument in schema.arguments if argument.name == "running_mean"]
        namespace, _, name = schema.name.partition("::")
        if not stats or namespace != "aten" or name.endswith(_READERS):
            continue
        packet = getattr(torch.ops.aten, name)
        func = getattr(packet, schema.overload_name or "default")
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            continue  # Not recorded: the operations that it is made of are.
        args = [argument.name if "running" in argument.name else True for argument in schema.arguments]
        if not {"running_mean", "running_var"} <= set(written_by(func, args, {})):
            unknown.append(func)
        hidden |= set() if stats[0].alias_info else {packet}

    assert unknown == []
    assert hidden >= {torch.ops.aten.native_batch_norm, torch.ops.aten.batch_norm_update_stats}
