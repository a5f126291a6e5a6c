"""Compiled regions: one graph, no recompile when only values change, nothing left in the module or the skeleton."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx

from tdfunc import from_module, functional
from tests.models import Norm, ResNet, Shared, Tied, make_mlp

X = torch.linspace(-1, 1, 15).reshape(5, 3)
IMAGES = torch.linspace(-1, 1, 216).reshape(2, 3, 6, 6)
MODELS = [(make_mlp, X), (Norm, X), (ResNet, IMAGES), (Tied, torch.arange(5)), (Shared, X)]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Each test counts its own graphs."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def scaled(tree, factor):
    """The tree with its floating-point leaves scaled."""
    return tree.apply(lambda p: p * factor if p.is_floating_point() else p.clone())


def assert_one_graph(function, calls):
    """Check that compiled calls give what plain ones give, in one graph for all of them."""
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for args in calls:
        ours, expected = compiled(*args), function(*args)
        torch.testing.assert_close(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(expected))

    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize(("make", "x"), MODELS)
def test_apply(make, x):
    """A step function with `apply` is one graph for all trees."""
    apply, params, buffers = functional(make())

    assert_one_graph(
        lambda p, b: apply.with_buffers(p, b, x), [(scaled(params, f), scaled(buffers, f)) for f in (1.0, 2.0, 3.0)]
    )


@pytest.mark.parametrize(("make", "x"), MODELS)
def test_a_block(make, x):
    """A compiled function with a block is one graph, and leaves the module as it was."""
    model = make()
    before = [*model.parameters(), *model.buffers()]
    tree = from_module(model).detach().clone()

    def run(tree):
        with tree.to_module(model):
            return model(x)

    assert_one_graph(run, [(scaled(tree, f),) for f in (1.0, 2.0, 3.0)])
    assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap of grad", "jvp"])
def test_transforms(transform):
    """A transform inside a compiled region does not break the graph."""
    apply, params, buffers = functional(Norm())
    trees = [torch.stack([scaled(params, f), params]) for f in (1.0, 2.0)]
    many = torch.stack([buffers, buffers])

    def loss(p, b):
        out, new = apply.with_buffers(p, b, X)
        return out.square().sum(), new

    function = {
        "grad": lambda p: torch.func.grad(loss, has_aux=True)(p[0], buffers),
        "vmap": lambda p: torch.vmap(loss)(p, many),
        "vmap of grad": lambda p: torch.vmap(torch.func.grad(loss, has_aux=True))(p, many),
        "jvp": lambda p: torch.func.jvp(lambda p: loss(p, buffers)[0], (p[0],), (p[1],)),
    }[transform]
    assert_one_graph(function, [(tree,) for tree in trees])


class Writer(nn.Module):
    """Writes on itself and around itself in forward, and counts what it finds of an earlier call."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.last, self.memo, self.log = nn.Linear(3, 2), nn.BatchNorm1d(2), None, {}, []
        self.register_buffer("reserved", None)

    def forward(self, x):
        found = (self.last is not None) + len(self.memo) + len(self.log) + hasattr(self, "new")
        found += (self.reserved is not None) + hasattr(self.linear, "child") + (not self.norm.training)
        self.last = self.linear(x)
        self.memo["w"], self.new, self.reserved = self.last, self.last, self.last
        self.log.append(self.last)
        self.linear.child = self.last
        self.norm.training = False
        self.register_buffer("late", x)
        return self.last * 2, found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:apply. forward of Writer writes the attributes:UserWarning")
def test_writes_are_put_back():
    """Nothing that a forward writes on itself goes from one compiled call to the next, or stays on the skeleton."""
    apply, params, buffers = functional(Writer())

    assert_one_graph(lambda p: apply(p, X, buffers=buffers), [(scaled(params, f),) for f in (1.0, 2.0, 3.0)])
    compiled = torch.compile(lambda p: apply(p, X, buffers=buffers), backend="eager", fullgraph=True)
    assert [compiled(params)[1] for _ in range(2)] == [0, 0]
    module = apply._traced.module
    kept = {name: getattr(module, name) for name in ("last", "memo", "log", "reserved")}
    assert kept == {"last": None, "memo": {}, "log": [], "reserved": None}
    assert module.norm.training is True
    assert [name for m in (module, module.linear) for name in ("new", "late", "child") if hasattr(m, name)] == []


def test_plain_calls_between_compiled_ones():
    """A plain call changes nothing that the compiled one guards on."""
    apply, params, buffers = functional(Norm())
    counter = CompileCounter()
    compiled = torch.compile(lambda p, b: apply.with_buffers(p, b, X), backend=counter, fullgraph=True)
    tree = params.clone()
    ours, plain = [], []
    for _ in range(3):
        for _ in range(2):
            ours.append(compiled(tree, buffers)[0])
            plain.append(apply.with_buffers(tree, buffers, X)[0])
        apply.eval()(tree, X, buffers=buffers)
        tree = scaled(tree, 2.0)

    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert counter.frame_count == 1


def test_a_trace_binds_in_a_block_only():
    """A load inside make_fx leaves no fake tensor in the module."""
    model = make_mlp()
    before = list(model.parameters())
    tree = from_module(model).detach()

    def run(tree, x):
        with tree.to_module(model):
            return model(x)

    traced = make_fx(run, tracing_mode="fake")(tree, X)
    assert torch.equal(traced(tree * 2.0, X), run(tree * 2.0, X))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_export():
    """An exported program takes the weights as arguments."""
    apply, params, buffers = functional(Norm())

    class Program(nn.Module):
        def forward(self, params, buffers, x):
            return apply(params, x, buffers=buffers)

    program = torch.export.export(Program(), (params, buffers, X))
    doubled = scaled(params, 2.0)
    torch.testing.assert_close(program.module()(doubled, buffers, X), apply(doubled, X, buffers=buffers))
    assert not program.state_dict
