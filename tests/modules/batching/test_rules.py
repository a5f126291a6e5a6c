"""Rules of single functions: numbers and derivatives of a loop, without a warning of torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradgradcheck
from torch.func import jvp, vjp, vmap

import tdfunc as tdf
from tests.modules.batching.cases import CASES, MEMBERS, total

# torch says that some of its functions may change.
pytestmark = [pytest.mark.sample(3), pytest.mark.filterwarnings("ignore:index_reduce")]
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def looped(case, fn):
    """The results of a call for each member, stacked."""
    results = [fn(*case.member(i)) for i in range(MEMBERS)]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return torch.stack(results)


@pytest.fixture(params=CASES)
def case(request):
    """A function and its arguments."""
    return CASES[request.param]


def test_members_equal_a_loop(case):
    """The forward pass of each member."""
    torch.testing.assert_close(vmap(case.by_rule, case.dims)(*case.args), looped(case, case.fn), **TIGHT)


def test_gradients_equal_a_loop(case):
    """The gradients of all numbers that a function reads."""
    got = vmap(case.gradient(case.by_rule), case.dims)(*case.args)
    torch.testing.assert_close(got, looped(case, case.gradient(case.fn)), **TIGHT)


def test_a_gradient_outside_of_the_map(case):
    """`grad` of a sum over members."""
    args = [x.clone().requires_grad_(x.is_floating_point()) for x in case.args]
    total(vmap(case.by_rule, case.dims)(*args)).backward()

    grads = [torch.zeros_like(args[i]) if args[i].grad is None else args[i].grad for i in case.trained()]
    got = tuple([x.movedim(case.dims[i], 0) for i, x in zip(case.trained(), grads, strict=True)])
    torch.testing.assert_close(got, looped(case, case.gradient(case.fn)), **TIGHT)


def test_members_of_members(case):
    """Two levels of vmap."""
    args = [
        torch.stack([x, x.flip(dim)]) if dim is not None else x for x, dim in zip(case.args, case.dims, strict=True)
    ]
    outer = tuple([0 if dim is not None else None for dim in case.dims])

    got = vmap(vmap(case.by_rule, case.dims), outer)(*args)
    want = vmap(case.by_rule, case.dims)(*case.args)
    torch.testing.assert_close([x[0] for x in parts(got)], parts(want), **TIGHT)


def parts(out):
    """The tensors of an output."""
    return list(out) if isinstance(out, tuple) else [out]


def named(condition):
    """The names of the cases for which something holds."""
    return [name for name, case in CASES.items() if condition(case)]


@pytest.mark.parametrize("name", named(lambda case: case.recorded))
def test_recorded_gradients(name):
    """A replay of the gradient."""
    case = CASES[name]
    gradient = vmap(case.gradient(case.by_rule), case.dims)
    recorded = tdf.jit(gradient, captures="constants")
    recorded(*case.args)
    torch.testing.assert_close(recorded(*case.args), gradient(*case.args), **TIGHT)


@pytest.mark.parametrize("name", named(lambda case: case.recorded))
def test_a_vmap_in_a_recorded_function(name):
    """Without a forward around it: a record has the numbers of a loop, and torch warns of no function."""
    case = CASES[name]
    recorded = tdf.jit(vmap(case.fn, case.dims), captures="constants")
    recorded(*case.args)

    torch.testing.assert_close(recorded(*case.args), looped(case, case.fn), **TIGHT)


@pytest.mark.parametrize("name", named(lambda case: case.second))
def test_second_derivatives_by_differences(name):
    """The derivatives of the gradient, which torch's own kernels do not all have."""
    case = CASES[name]
    args = [x.clone().requires_grad_(x.is_floating_point()) for x in case.args]

    def of_members(*args):
        return tuple([x for x in parts(vmap(case.by_rule, case.dims)(*args)) if x.is_floating_point()])

    assert gradgradcheck(of_members, args, fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("name", named(lambda case: case.forward))
def test_forward_mode_is_the_transpose_of_the_gradient(name):
    """`<c, J t> = <J^T c, t>` for random tangents t and weights c."""
    case = CASES[name]
    places = case.trained()

    def fn(*trained):
        args = list(case.args)
        for i, x in zip(places, trained, strict=True):
            args[i] = x
        return [x for x in parts(vmap(case.by_rule, case.dims)(*args)) if x.is_floating_point()]

    primals = tuple([case.args[i] for i in places])
    tangents = tuple([torch.randn_like(x) for x in primals])
    _, pushed = jvp(fn, primals, tangents)
    _, pull = vjp(fn, *primals)
    weights = [torch.randn_like(x) for x in pushed]

    torch.testing.assert_close(product(weights, pushed), product(pull(weights), tangents), **TIGHT)


def product(first, second):
    """The inner product of lists of tensors."""
    return sum([(x * y).sum() for x, y in zip(first, second, strict=True)])


def test_a_function_that_a_library_wraps_has_its_rule(monkeypatch):
    """A library may put a wrapper in the place of a function of torch: the rule is the function's."""
    case = CASES["leaks of given slopes"]
    original = F.rrelu
    monkeypatch.setattr(F, "rrelu", lambda *args, **kwargs: original(*args, **kwargs))

    torch.testing.assert_close(vmap(case.by_rule, case.dims)(*case.args), looped(case, case.fn), **TIGHT)


class Turned(nn.Module):
    """A layer over the first dimension, as mixers and sequence-first layers have."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 48)

    def forward(self, x):
        return self.linear(x.transpose(0, 1))


def test_no_weight_is_copied_for_turned_inputs():
    """Inputs that are turned have one product for each member; torch copies the weights for each leading index."""
    apply, _, _ = tdf.functional(Turned())
    params = tdf.init_ensemble(Turned, MEMBERS)
    x = torch.randn(20, 30, 64)
    run = vmap(apply, (0, None))
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profile:
        run(params, x)
    products = [tuple(event.input_shapes[0]) for event in profile.events() if event.name == "aten::bmm"]

    assert set(products) == {(MEMBERS, 600, 64)}
