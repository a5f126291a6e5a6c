"""Private copies: what is copied, shared and poisoned; what a forward writes and what is left of it."""

import copy
import functools
import gc
import itertools
import pickle
import threading
import weakref
from collections import OrderedDict, deque
from datetime import date

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tdfunc import Ensemble, LeakError, combine, from_module, functional, stack
from tdfunc.modules.poison import Poison
from tdfunc.modules.skeletons.kept import is_stateless
from tests.models import make_mlp

X = torch.linspace(-1, 1, 12).reshape(4, 3)
# tests/modules/test_lost.py has the warning.
pytestmark = pytest.mark.filterwarnings("ignore:apply. forward of (Layer|Scribbler) writes the attributes:UserWarning")


class Layer(nn.Module):
    """A linear layer, any attributes, and a forward that is a function of the module and its input."""

    def __init__(self, fn=lambda self, x: self.linear(x), **attributes):
        super().__init__()
        self.linear, self.fn = nn.Linear(3, 3), fn
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args):
        return self.fn(self, *args)


class Holder:
    """An object that holds another."""

    def __init__(self, value):
        self.value = value


# -- references that must follow the copy -------------------------------------------------------------------------


class Closures(Layer):
    """Calls itself through closures, partials, bound methods, default arguments, hooks and plain containers."""

    def __init__(self):
        super().__init__()
        self.closure = lambda x: self.linear(x) * self.closure.scale
        self.closure.scale = 2.0
        self.bound = self.go
        self.partial = functools.partial(self.go, scale=2.0)
        self.nested = {"a": [lambda x: self.bound(x)]}
        self.default = lambda x, layer=self.linear: layer(x)
        self.layers = [self.linear]
        self.child = Layer(lambda child, x: child.boxed[0].linear(x), boxed=[self])
        self.compiled = torch.compile(nn.Linear(3, 3), backend="eager")
        if self.linear.bias is None:
            unassigned = self.linear
        self.child.open = lambda x: self.linear(x) if x is not None else unassigned(x)
        self.register_forward_hook(lambda module, args, out: out + self.linear.weight.sum())
        self.linear.register_forward_pre_hook(lambda module, args: (args[0] * module.bias.sum(),))

    def go(self, x, scale=1.0):
        return self.linear(x) * scale

    def forward(self, x):
        y = self.closure(x) + self.bound(x) + self.partial(x) + self.nested["a"][0](x) + self.default(x)
        return self.compiled((y + self.layers[0](x) + self.child(x) + self.child.open(x)).detach())


class Lists(nn.Module):
    """Parameters in a list and in a dict."""

    def __init__(self):
        super().__init__()
        self.list, self.empty = nn.ParameterList([torch.ones(3), torch.ones(3) * 2, torch.ones(0)]), torch.ones(0)
        self.dict = nn.ParameterDict({"a": torch.ones(3) * 3})

    def forward(self, x):
        return x * self.list[0] + self.list[1] + self.dict["a"] + self.empty.sum()


def make_recurrent(kind):
    """A recurrent layer, which keeps its weights in a flat list and as weak references."""
    model = Layer(lambda self, x: self.rnn(self.linear(x)[None])[0])
    model.rnn = kind(3, 5, 2, bidirectional=True)
    return model


def make_parametrized(wrap):
    """A layer whose weight is computed from other parameters."""
    return wrap(nn.Linear(3, 3)).eval()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        Closures,
        Lists,
        *[functools.partial(make_recurrent, kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)],
        *[
            functools.partial(make_parametrized, wrap)
            for wrap in (*vars(nn.utils.parametrizations).values(), nn.utils.weight_norm, nn.utils.spectral_norm)
            if getattr(wrap, "__name__", "") in ("weight_norm", "orthogonal", "spectral_norm")
        ],
    ],
)
def test_references_follow_the_copy(make):
    """References and computed weights lead to the copy, whose weights are those of the call."""
    model = make()
    apply, params, buffers = functional(model)
    torch.testing.assert_close(apply(params, X, buffers=buffers), model(X))
    other = params.apply(lambda p: p * 1.5)
    ours = apply(other, X, buffers=buffers)
    with combine(other, buffers).to_module(model):
        torch.testing.assert_close(ours, model(X))


def test_what_leads_to_no_weight_stays_shared():
    """A hook collects into the user's list, a module's generator moves on, and its lock is one for all copies."""
    seen = []
    model = Layer(lambda self, x: self.linear(x) + torch.rand(3, generator=self.generator), generator=torch.Generator())
    model.lock, model.condition = threading.Lock(), threading.Condition()
    model.register_forward_hook(lambda module, args, out: seen.append((model.linear.weight.shape, out.shape)))
    apply, params, _ = functional(model)

    assert not torch.equal(apply(params, X), apply(params, X))
    assert seen == [((3, 3), (4, 3))] * 2
    assert apply.module.lock is model.lock
    assert apply.module.condition._lock is model.condition._lock


# -- poison -------------------------------------------------------------------------------------------------------


class Cached(Layer):
    """Keeps references to its weight in many ways, and reads one of them."""

    def __init__(self, which):
        super().__init__(lambda self, x: F.linear(x, self.read(self.kept)))
        weight = self.linear.weight
        self.kept = {
            "list": [weight], "view": weight.T, "detached": weight.detach(), "nested": {"a": (weight,)},
            "data": weight.data.reshape(-1)[:9].view(3, 3), "computed": weight * 2, "holder": Holder(weight),
            "closure": lambda: weight, "default": lambda w=weight: w,
        }  # fmt: skip
        self.read = KEPT[which]


KEPT = {
    **{name: lambda kept, name=name: kept[name] for name in ("view", "detached", "data", "computed")},
    **{name: lambda kept, name=name: kept[name]() for name in ("closure", "default")},
    "list": lambda kept: kept["list"][0],
    "nested": lambda kept: kept["nested"]["a"][0],
    "holder": lambda kept: kept["holder"].value,
}


NAMES_OF_KEPT = {"computed": "'computed'"}


@pytest.mark.parametrize("earlier", [0, 1], ids=["first call", "second call"])
@pytest.mark.parametrize(
    "wrap",
    [lambda apply: apply, lambda apply: torch.func.grad(lambda p, x: apply(p, x).sum())],
    ids=["plain", "grad"],
)
@pytest.mark.parametrize("which", KEPT)
def test_a_kept_weight_is_named(which, wrap, earlier):
    """A cached reference to a weight, a view of one or a tensor computed from one raises at each call."""
    apply, params, _ = functional(Cached(which))
    for _ in range(earlier):
        with pytest.raises(LeakError):
            apply(params, X)

    with pytest.raises(LeakError, match=NAMES_OF_KEPT.get(which, "'linear.weight'")):
        wrap(apply)(params, X)


@pytest.mark.parametrize("which", KEPT)
def test_a_kept_weight_is_named_inside_vmap_and_autocast(which):
    """A cached reference to a weight raises inside vmap and autocast as well."""
    apply, params, _ = functional(Cached(which))

    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(LeakError, match=NAMES_OF_KEPT.get(which, "'linear.weight'")),
    ):
        torch.vmap(lambda x: apply(params, x))(X)


GLOBALS = {}


@pytest.mark.parametrize(
    "call",
    [
        lambda apply, params: apply(params, X),
        lambda apply, params: torch.vmap(lambda p: apply(p, X))(torch.stack([params, params])),
        lambda apply, params: torch.vmap(torch.func.grad(lambda p: apply(p, X).sum()))(torch.stack([params, params])),
        lambda apply, params: apply.train()(params, X),
    ],
)
def test_a_weight_in_a_global_is_named(call):
    """The first call names a weight that forward reads from a global variable."""
    GLOBALS["model"] = Layer(lambda self, x: F.linear(x, GLOBALS["model"].linear.weight.T[:, :3].detach()))
    apply, params, _ = functional(GLOBALS["model"])

    with pytest.raises(LeakError, match="'linear.weight'"):
        call(apply, params)


def test_the_live_weights_may_be_given():
    """A call with the module's own tensors, or with one as its input, is no leak."""
    model = Layer()
    apply, params, _ = functional(model)
    live = from_module(model)
    expected = model(X)

    assert torch.equal(functional(model)[0](live, X), expected)
    torch.func.grad(lambda p: functional(model)[0](p, X).sum())(live)
    torch.vmap(lambda x: functional(model)[0](live, x))(X)
    assert apply(params, model.linear.weight).shape == (3, 3)
    assert functional(model, copy=False)[0](functional(model, copy=False)[1], X).shape == (4, 3)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: F.linear(X, p), lambda p: X @ p, lambda p: p + 1, lambda p: p.sum(), lambda p: p.clone(),
        lambda p: p[0],
        lambda p: p.view(-1), lambda p: p.to(torch.float64), lambda p: p.mul_(2), lambda p: torch.stack([p, p]),
        lambda p: torch.equal(p, X), lambda p: torch._foreach_add([p], 1), lambda p: bool((p == 0).all()),
        lambda p: torch.vmap(lambda x: p @ x)(X), lambda p: p.T,
        lambda p: torch.func.grad(lambda x: (p @ x).sum())(X[0]),
    ],
)  # fmt: skip
def test_every_operation_on_poison_raises(use):
    """No operation computes with memory that is not there."""
    with pytest.raises(LeakError, match="'a.b'"):
        use(Poison.of(torch.zeros(3, 3), ("a", "b")))


@pytest.fixture
def skeleton():
    """The skeleton of a module of one linear layer."""
    return functional(nn.Sequential(nn.Linear(3, 3)))[0].module


def test_metadata_of_poison_is_free(skeleton):
    """Shape, dtype, strides, device and repr of a weight in a skeleton do not raise."""
    weight = skeleton[0].weight

    assert isinstance(weight, Poison)
    assert weight.shape == (3, 3)
    assert weight.dtype == torch.float32
    assert weight.stride() == (3, 1)
    assert weight.is_cuda is False
    assert repr(weight) == "Poison(0.weight, shape=(3, 3))"


def test_a_skeleton_is_listed(skeleton):
    """The names of weights, in the state dict as well, and the repr of a skeleton do not raise."""
    assert [name for name, _ in skeleton.named_parameters()] == ["0.weight", "0.bias"]
    assert list(skeleton.state_dict()) == ["0.weight", "0.bias"]
    assert "Linear(in_features=3" in repr(skeleton)


def test_a_skeleton_is_copied(skeleton):
    """A pickle of a skeleton keeps the path of each poison, and a deep copy keeps the poison itself."""
    assert pickle.loads(pickle.dumps(skeleton))[0].weight.path == ("0", "weight")
    assert copy.deepcopy(skeleton)[0].weight is skeleton[0].weight


# -- what a call leaves behind ------------------------------------------------------------------------------------


class Scribbler(nn.Module):
    """Writes everywhere it can, and raises when it finds anything that an earlier call wrote."""

    def __init__(self):
        super().__init__()
        self.linear, self.bn, self.other = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.register_buffer("rope", torch.ones(3))
        self.register_buffer("reserved", None)
        self.memo, self.log, self.seen, self.queue = {}, [], set(), deque()
        self.deep = {"a": [Holder(OrderedDict())]}
        self.last, self.count, self.removed = None, torch.zeros(3), 1

    def forward(self, x):
        traces = [self.memo, self.log, self.seen, self.queue, self.deep["a"][0].value, self.last, self.reserved]
        assert not any(traces)
        assert self.count.sum() == 0
        assert self.rope.sum() == 3
        assert self.removed == 1
        assert not hasattr(self, "late")
        assert not hasattr(self.linear, "child_trace")
        assert not self.linear._forward_hooks
        assert self.bn.training
        assert self.other is not self.linear
        w = self.linear.weight
        self.memo["w"], self.last, self.reserved = w, w, torch.ones(3)
        self.log.append(w)
        self.seen.add(w)
        self.queue.append(w)
        self.deep["a"][0].value["w"] = w
        self.deep["a"][0].extra = w
        self.deep["new"] = w
        self.count += 1
        self.register_buffer("late", x)
        self.register_buffer("rope", self.rope * 2, persistent=False)
        self.linear.child_trace = w
        self.linear.register_forward_hook(lambda *_: None)
        self.bn.eval()
        del self.removed
        self.other = self.linear
        self.new = nn.Tanh()
        return self.bn(self.linear(x)) * self.rope


def test_a_call_leaves_nothing_on_its_skeleton():
    """What a forward writes on its modules and their containers is gone at the next call."""
    apply, params, buffers = functional(Scribbler())
    for _ in range(3):
        apply(params, X, buffers=buffers)

    assert len(apply._pool) <= 1
    assert apply._new_skeleton().module.log is not apply._new_skeleton().module.log
    assert torch.equal(apply.with_buffers(params, buffers, X)[1]["rope"], torch.full((3,), 2.0))


def test_a_call_leaves_nothing_on_the_module():
    """The module that a function was made of has none of what forward writes."""
    model = Scribbler()
    apply, params, buffers = functional(model)
    for _ in range(3):
        apply(params, X, buffers=buffers)

    assert from_module(model)["linear", "weight"] is model.linear.weight
    written = {name: getattr(model, name) for name in ("memo", "log", "seen", "queue", "last")}
    assert [name for name, value in written.items() if value] == []
    assert model.count.sum() == 0
    assert not hasattr(model, "late")


def look_and_change(self, x):
    """Return the children of modules that are torch's own, and change them."""
    found = [[(name, type(child)) for name, child in m._modules.items()] for m in (self.layers, self.spare, self.named)]
    found += [list(m._modules) for m in self.layers]
    self.change(self)
    return found


def reorder(m):
    """Put the first child of a dict of modules at its end."""
    m.named["a"] = m.named.pop("a")


CHILDREN = {
    "append": lambda m: m.layers.append(nn.Tanh()),
    "remove": lambda m: m.layers.pop(1),
    "replace": lambda m: m.layers.__setitem__(1, nn.ReLU()),
    "move": lambda m: m.spare.append(m.layers.pop(1)),
    "of a layer": lambda m: m.layers[0].add_module("late", nn.Tanh()),
    "reorder": reorder,
}


@pytest.mark.parametrize("name", CHILDREN)
def test_children_are_put_back(name):
    """Submodules that forward adds, moves or removes are as before at the next call."""
    layers, spare = nn.ModuleList([nn.Linear(3, 3), nn.Tanh()]), nn.ModuleList()
    named = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Tanh()})
    model = Layer(look_and_change, layers=layers, spare=spare, named=named, change=CHILDREN[name])
    apply, params, _ = functional(model)
    first, second, third = [apply(params, X) for _ in range(3)]

    assert first == second == third


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_call_that_raises_leaves_nothing_behind(error):
    """An exception does not skip the cleaning."""
    model, errors = Scribbler(), [error]
    model.register_forward_hook(lambda *_: (_ for _ in ()).throw(errors.pop()("stop")) if errors else None)
    apply, params, buffers = functional(model)

    with pytest.raises(error, match="stop"):
        apply(params, X, buffers=buffers)
    apply(params, X, buffers=buffers)


class Slotted:
    """State in one slot, which is private."""

    __slots__ = "__n"

    def step(self):
        self.__n = getattr(self, "_Slotted__n", 0.0) + 1.0
        return self.__n


class Reduced:
    """State that is copied in a way of its class's own."""

    def __init__(self, n=0.0):
        self.n = n

    def __reduce__(self):
        return Reduced, (self.n,)


def bump(holder, name):
    """Count up in an attribute."""
    setattr(holder, name, getattr(holder, name) + 1.0)
    return getattr(holder, name)


def add(array):
    """Count up in place."""
    array[0] += 1
    return array[0]


def rename(table, key):
    """Give the value of the last key a longer key; return the length of the old one."""
    old = list(table)[-1]
    table[old + key] = table.pop(old)
    return len(old)


STATES = {
    "a key of a dict": (lambda: {"a": 0.0}, lambda m: rename(m.state, "a")),
    "a key of a dict in a list": (lambda: [{"a": 0.0}], lambda m: rename(m.state[0], "a")),
    "the name of an attribute": (lambda: 0.0, lambda m: rename(m.__dict__, "a")),
    "the name of an attribute of an object": (lambda: Holder(0.0), lambda m: rename(m.state.__dict__, "a")),
    "an attribute": (lambda: 0.0, lambda m: bump(m, "state")),
    "a layer of torch": (lambda: nn.LayerNorm(3), lambda m: bump(m.state, "eps")),
    "a layer in a list": (lambda: [nn.LayerNorm(3)], lambda m: bump(m.state[0], "eps")),
    "a list in a tuple": (lambda: ([],), lambda m: (m.state[0].append(0), len(m.state[0]))[1]),
    "an object": (lambda: Holder(0.0), lambda m: bump(m.state, "value")),
    "slots": (Slotted, lambda m: m.state.step()),
    "__reduce__": (Reduced, lambda m: bump(m.state, "n")),
    "a numpy array": (lambda: np.zeros(1), lambda m: add(m.state)),
    "a bytearray": (lambda: bytearray(1), lambda m: add(m.state)),
    "a tensor": (lambda: torch.zeros(1), lambda m: add(m.state)),
    "its data": (lambda: torch.zeros(1), lambda m: add(m.state.data)),
    "a view of it": (lambda: torch.zeros(1), lambda m: add(m.state)[None]),
    "a generator of numpy": (lambda: np.random.default_rng(0), lambda m: m.state.normal()),
}


@pytest.mark.parametrize("name", STATES)
def test_state_is_not_carried(name):
    """State of any kind that forward changes is as in the module at the next call, and in the next member of a loop."""
    make, step = STATES[name]
    models = [Layer(lambda self, x: (self.linear(x), step(self)), state=make()) for _ in range(2)]
    apply, params, _ = functional(models[0])
    members = Ensemble(functional(models[0])[0], how="loop")
    (_, first), (_, second), (_, third) = [apply(params, X) for _ in range(3)]
    expected = copy.deepcopy(models[0])(X)[1]

    assert float(first) == float(second) == float(third) == float(expected)
    _, steps = members(stack([from_module(model).detach() for model in models]), X)
    assert not isinstance(steps, torch.Tensor) or steps.flatten().tolist() == [float(expected)] * 2


class Memo(Layer):
    """Keeps a product of its weight outside of the module."""

    @functools.cache  # noqa: B019 - the cache holds the module, as a user's does
    def doubled(self):
        return self.linear.weight * 2


OUTLIVES = {
    "closure": lambda self, x, then=None: then(x) if then else lambda x: self.linear(x),
    "method": lambda self, x, then=None: then(x) if then else self.linear.forward,
    "module": lambda self, x, then=None: then(x) if then else self.linear,
}


@pytest.mark.parametrize("name", OUTLIVES)
def test_what_forward_returns_keeps_its_weights(name):
    """A function that forward returned has the weights of its call, also inside another call."""
    apply, params, _ = functional(Layer(OUTLIVES[name]))
    head = apply(params, X)
    expected = F.linear(X, *params["linear"].leaves())

    assert torch.equal(apply(params * 2.0, X, head), expected)
    assert torch.equal(head(X), expected)


def test_a_cache_outside_of_the_module():
    """A method that caches a product of a weight computes it for each call."""
    apply, params, _ = functional(Memo(lambda self, x: F.linear(x, self.doubled())))
    scales = (1.0, 2.0, 1.0)
    found = [apply(params * scale, X) for scale in scales]

    expected = [F.linear(X, params["linear", "weight"] * scale * 2) for scale in scales]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_skeletons_are_used_again():
    """One skeleton runs all calls of a module whose changes show, also while graphs of earlier calls are alive."""
    model = Layer(lambda self, x: self.rnn(self.linear(x)[None] * self.scale)[0], scale=torch.ones(3), kept={"a": [1]})
    model.rnn, model.box, model.table = nn.LSTM(3, 3), Holder([object(), date(2026, 1, 1)]), np.ones(3)
    model.kept["itself"] = model.kept
    apply, params, _ = functional(model)
    skeleton, live = apply._pool[0], params.apply(lambda p: p.requires_grad_())
    graphs = [apply(live, X) for _ in range(3)]

    assert list(apply._pool) == [skeleton]
    assert all(graph.requires_grad for graph in graphs)


@pytest.mark.parametrize("make", [Scribbler, functools.partial(make_recurrent, nn.LSTM), make_mlp])
def test_no_weights_stay_alive_after_a_call(make):
    """Neither a pooled skeleton nor the function keeps weights in memory."""
    apply, params, buffers = functional(make())
    apply(params, X, buffers=buffers)
    refs = [weakref.ref(leaf) for leaf in params.values(True, True)]
    del params
    gc.collect()

    assert not any(ref() is not None for ref in refs)


def test_the_module_may_change_and_go():
    """The function keeps structure and constants of the time of `functional`, and no weights."""
    model = make_mlp()
    model.scale = torch.full((3,), 2.0)
    apply, params, _ = functional(model)
    expected = model(X).detach()
    model[1] = nn.ReLU()
    model.scale.zero_()
    model.register_forward_hook(lambda *_: 0)
    with torch.no_grad():
        model[0].weight.zero_()
    ref = weakref.ref(model[0].weight)
    del model
    gc.collect()

    assert ref() is None
    assert apply.module.scale.tolist() == [2.0, 2.0, 2.0]
    torch.testing.assert_close(apply(params, X), expected)


CONSTANTS = {
    "tensor": (lambda m: m.scale, lambda x: x.mul_(10)),
    "dict": (lambda m: m.config, lambda config: config.update(k=10.0)),
}


@pytest.mark.parametrize(("read", "write"), CONSTANTS.values(), ids=CONSTANTS)
def test_a_returned_constant_is_the_callers(read, write):
    """A caller who writes to a constant that forward returned does not change the next call."""
    run = lambda self, x: (x * self.scale * self.config["k"], self.read(self))  # noqa: E731
    apply, params, _ = functional(Layer(run, scale=torch.ones(3), config={"k": 1.0}, read=read))
    found = []
    for _ in range(3):
        out, constant = apply(params, X)
        write(constant)
        found.append(out)

    torch.testing.assert_close(found, [X] * 3, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_modules_of_torch_write_nothing_on_themselves():
    """Whichever of torch's own modules counts as stateless has the same attributes and tensors after a forward."""
    # torch's list of its modules with inputs for each, which its own tests use.
    from torch.testing._internal.common_modules import module_db

    def marks(module):
        own = [{name: id(value) for name, value in m.__dict__.items()} for m in module.modules()]
        tables = [table for m in module.modules() for table in (m._parameters, m._buffers)]
        return own, [[(name, id(leaf)) for name, leaf in table.items()] for table in tables]

    seen, written = set(), []
    for info, training in itertools.product(module_db, (True, False)):
        options = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": training}
        for given in info.module_inputs_func(info, **options)[:8]:
            module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).train(training)
            if not is_stateless(module) or "FractionalMaxPool" in info.name:
                continue
            before = marks(module)
            module(*given.forward_input.args, **given.forward_input.kwargs)
            seen.add(info.name)
            if marks(module) != before:
                written.append((info.name, training))

    assert written == []
    assert len(seen) >= 90
