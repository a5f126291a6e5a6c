"""Random programs called with changing arguments and surroundings: a jitted function does as the function does."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tdfunc import UnsupportedError
from tdfunc._jit import jit
from tests.helpers import examples
from tests.jit.blocks import pool_all_sizes
from tests.jit.pools import on_cpu

# Around the widths of vectors, where kernels treat the rest apart.
SIZES = (1, 2, 3, 7, 8, 9, 16, 17, 33)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64)
NUMBERS = (0, 1, -1, 2, 0.5, -0.0, float("inf"), float("nan"))


def write_diagonal(a, b):
    """Write to a part of a tensor that a view reaches."""
    a.diagonal().add_(b[0])


# Of two square matrices and a number. Most results are read again later, as they are or through views.
STEPS: dict[str, Any] = {
    "add": lambda a, b, n: a + b,
    "add number": lambda a, b, n: a + n,
    "sub": lambda a, b, n: a - b,
    "sub number": lambda a, b, n: n - a,
    "mul": lambda a, b, n: a * b,
    "mul number": lambda a, b, n: a * n,
    "div": lambda a, b, n: a / b,
    "div number": lambda a, b, n: a / n,
    "scaled": lambda a, b, n: torch.add(a, b, alpha=2),
    "neg": lambda a, b, n: -a,
    "abs": lambda a, b, n: a.abs(),
    "exp": lambda a, b, n: a.exp(),
    "log": lambda a, b, n: a.log(),
    "sqrt": lambda a, b, n: a.sqrt(),
    "rsqrt": lambda a, b, n: a.rsqrt(),
    "square": lambda a, b, n: a.square(),
    "reciprocal": lambda a, b, n: a.reciprocal(),
    "tanh": lambda a, b, n: a.tanh(),
    "sigmoid": lambda a, b, n: a.sigmoid(),
    "relu": lambda a, b, n: a.relu(),
    "twice": lambda a, b, n: a + a,
    "clone": lambda a, b, n: a.clone(),
    "ones": lambda a, b, n: a * torch.ones_like(b),
    "power 1": lambda a, b, n: a**1,
    "mm": lambda a, b, n: a @ b,
    "turned": lambda a, b, n: a.t(),
    "contiguous": lambda a, b, n: a.t().contiguous(),
    "view": lambda a, b, n: a.reshape(-1).view(a.shape),
    "row": lambda a, b, n: a[0].expand(a.shape),
    "column sum": lambda a, b, n: b + a.sum(0, keepdim=True).reshape(-1),
    "where": lambda a, b, n: torch.where(b == b, a, b),
    "cast": lambda a, b, n: a.to(torch.promote_types(a.dtype, torch.float32)),
    "narrow": lambda a, b, n: torch.stack([a, b])[1],
    "softmax": lambda a, b, n: (a if a.is_floating_point() else a.abs().float()).softmax(0),
    "relu's derivative": lambda a, b, n: torch.func.grad(lambda x: (x.relu() * 2).sum())(a),
    "mapped": lambda a, b, n: torch.vmap(torch.mul, in_dims=(0, 1))(a, b),
    "add_": lambda a, b, n: a.add_(b),
    "mul_": lambda a, b, n: a.mul_(2),
    "zero_": lambda a, b, n: a.zero_(),
    "diagonal_": write_diagonal,
    "copy_": lambda a, b, n: a[0].copy_(b[:, 0]),
}


class Call(NamedTuple):
    """The arguments and the surroundings of one call."""

    size: int
    dtype: torch.dtype
    number: Any
    meta: bool
    turned: bool
    same: bool
    grad_mode: bool
    requires_grad: bool
    training: bool
    static: bool
    closure: int

    def arguments(self) -> tuple[Tensor, Tensor]:
        """Return two matrices, or one twice."""
        g = torch.Generator().manual_seed(self.size)
        a, b = torch.randn(2, self.size, self.size, generator=g).mul(2).to(self.dtype).unbind()
        a = a.t() if self.turned else a
        if self.requires_grad and self.dtype.is_floating_point:
            a = a.detach().requires_grad_()
        a, b = (x.to("meta").detach().requires_grad_(x.requires_grad) if self.meta else x for x in (a, b))
        return a, a if self.same else b


CALLS = st.builds(
    Call, st.sampled_from(SIZES), st.sampled_from(DTYPES), st.sampled_from(NUMBERS), *[st.booleans()] * 7,
    st.integers(0, 1),
)  # fmt: skip
PLACES = st.integers(0, 6)
STEP = st.tuples(st.sampled_from(list(STEPS)), PLACES, PLACES)


class Subject:
    """A function of random steps, which reads a static argument, a closure and the mode of a module."""

    def __init__(self, steps, read, returned):
        norm, closure = nn.BatchNorm1d(1, affine=False, track_running_stats=False), 0
        self.norm = norm

        def set_closure(value):
            nonlocal closure
            closure = value

        def fn(a, b, number, *, static):
            # Arguments are never written.
            kept = [a + 1, b * 2]
            for name, first, second in steps:
                out = STEPS[name](kept[first % len(kept)], [a, b, *kept][second % (2 + len(kept))], number)
                if isinstance(out, Tensor) and out.shape == a.shape:
                    kept.append(out)
            kept += [a, b]
            if static:
                kept.reverse()
            if norm.training:
                kept.append(kept[-1] * 3)
            # Of memory that is returned nothing can be overwritten; what is read here was made long before.
            total = sum([kept[place % len(kept)] * (2 + closure) for place in read], start=a * 0)
            return [kept[place % len(kept)] for place in returned] + [total]

        self.set_closure, self.fn = set_closure, fn


def outcome(fn, subject, call):
    """Call, and return everything that a caller may see."""
    subject.norm.train(call.training)
    subject.set_closure(call.closure)
    a, b = call.arguments()
    with torch.set_grad_enabled(call.grad_mode):
        try:
            out = fn(a, b, call.number, static=call.static)
        except UnsupportedError as err:
            return "requires grad" if "requires grad" in str(err) else repr(err)
        # Also what vmap, in-place casts and views that do not fit raise, each in a class of its own.
        except (RuntimeError, TypeError, IndexError, ValueError):
            return "raises"
    shared = [[x is y for y in (a, b, *out)] for x in out]
    memory = [[not x.is_meta and x.data_ptr() == y.data_ptr() for y in (a, b, *out)] for x in out]
    values = [repr(x.resolve_conj().view(torch.uint8).tolist()) if not x.is_meta else "meta" for x in map(dense, out)]
    kinds = [(x.dtype, x.shape, x.stride(), x.device, x.requires_grad) for x in out]
    return values, kinds, shared, memory


def dense(x):
    """Return the numbers without autograd, in one piece of memory, with one nan for all."""
    x = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return torch.where(x == x, x, torch.full_like(x, float("nan"))) if x.is_floating_point() else x


@pytest.mark.parametrize(
    ("backend", "around"),
    [
        pytest.param(lambda: None, nullcontext, id="code"),
        pytest.param(lambda: None, pool_all_sizes, id="pooled", marks=pytest.mark.slow),
        pytest.param(on_cpu, nullcontext, id="captured", marks=pytest.mark.slow),
    ],
)
@examples(0.6)
@given(
    st.lists(STEP, min_size=3, max_size=12),
    st.lists(PLACES, min_size=2, max_size=5),
    st.lists(PLACES, max_size=2),
    st.lists(CALLS, min_size=1, max_size=3),
)
def test_replays_follow_every_change(backend, around, steps, read, returned, calls):
    """Replays equal the function to the last bit while shapes, dtypes, modes, devices and closures change."""
    subject = Subject(steps, read, returned)
    traced, differ = jit(subject.fn, backend=backend()), []

    for call in [*calls, *calls]:
        # A capture is of one device.
        call = call._replace(meta=call.meta and traced._graphs is None)
        with around():
            got = outcome(traced, subject, call)
        expected = outcome(subject.fn, subject, call)
        if call.requires_grad and call.grad_mode and call.dtype.is_floating_point:
            wanted = "requires grad"
        else:
            wanted = expected
        # torch has no relu of complex numbers: it raises, but a replay leaves out what nothing reads.
        lenient = expected == "raises" and call.dtype.is_complex and any(name == "relu" for name, *_ in steps)
        if got != wanted and not lenient:
            differ.append((call, got, wanted))

    assert differ == []
