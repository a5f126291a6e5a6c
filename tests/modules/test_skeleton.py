"""Private copies: what is copied, shared and poisoned; what a forward writes and what is left of it."""

import copy
import functools
import gc
import pickle
import weakref
from collections import OrderedDict, deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tdfunc import LeakError, combine, from_module, functional
from tdfunc.modules.poison import Poison
from tests.models import make_mlp

X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Layer(nn.Module):
    """A linear layer; subclasses keep something beside it, or use it in another way."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x)


def assert_is_functional(model, x=X):
    """Check that apply gives what the module gives, with its own weights and with others."""
    apply, params, buffers = functional(model)
    torch.testing.assert_close(apply(params, x, buffers=buffers), model(x))
    other = params.apply(lambda p: p * 1.5)
    ours = apply(other, x, buffers=buffers)
    with combine(other, buffers).to_module(model):
        torch.testing.assert_close(ours, model(x))


# -- what refuses to be copied ------------------------------------------------------------------------------------


class WithAttribute(Layer):
    """Keeps any object."""

    def __init__(self, value):
        super().__init__()
        self.value = value


class Holder:
    """An object that holds another."""

    def __init__(self, value):
        self.value = value


# -- references that must follow the copy -------------------------------------------------------------------------


class Child(nn.Module):
    """Reaches its parent without registering it."""

    def __init__(self, parent):
        super().__init__()
        self.boxed = [parent]

    def forward(self, x):
        return F.linear(x, self.boxed[0].weight)


class Parent(nn.Module):
    """Modules that hold references to each other."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.child = Child(self)

    def forward(self, x):
        return self.child(x)


class Closures(Layer):
    """Calls itself through closures, partials, bound methods and default arguments."""

    def __init__(self):
        super().__init__()
        self.closure = lambda x: self.linear(x)
        self.bound = self.go
        self.partial = functools.partial(self.go, scale=2.0)
        self.nested = {"a": [lambda x: self.bound(x)]}
        self.default = lambda x, layer=self.linear: layer(x)

    def go(self, x, scale=1.0):
        return self.linear(x) * scale

    def forward(self, x):
        return self.closure(x) + self.bound(x) + self.partial(x) + self.nested["a"][0](x) + self.default(x)


class Listed(Layer):
    """Keeps its submodule in a plain list, and a compiled one in the registry."""

    def __init__(self):
        super().__init__()
        self.layers = [self.linear]
        self.compiled = torch.compile(nn.Linear(3, 3), backend="eager")

    def forward(self, x):
        return self.compiled(self.layers[0](x).detach())


class Lists(nn.Module):
    """Parameters in a list and in a dict."""

    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([torch.ones(3), torch.ones(3) * 2])
        self.dict = nn.ParameterDict({"a": torch.ones(3) * 3})

    def forward(self, x):
        return x * self.list[0] + self.list[1] + self.dict["a"]


class Recurrent(nn.Module):
    """A recurrent layer, which keeps its weights in a flat list and as weak references."""

    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(3, 5, 2, bidirectional=True)

    def forward(self, x):
        return self.rnn(x[None])[0]


@pytest.mark.parametrize(
    "make",
    [Parent, Closures, Listed, Lists, *[functools.partial(Recurrent, kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)]],
)
def test_references_follow_the_copy(make):
    """A reference would lead to the original module, whose weights are not those of the call."""
    assert_is_functional(make())


def test_hooks_follow_the_copy():
    """A hook that reaches the module would read the weights of the original."""
    model = Layer()
    model.register_forward_hook(lambda module, args, out: out + model.linear.weight.sum())
    model.linear.register_forward_pre_hook(lambda module, args: (args[0] * module.bias.sum(),))

    assert_is_functional(model)


def test_other_closures_stay_shared():
    """A hook that collects into the user's list would collect into a copy of it."""
    seen = []
    model = Layer()
    model.register_forward_hook(lambda module, args, out: seen.append((model.linear.weight.shape, out.shape)))
    apply, params, _ = functional(model)
    apply(params, X)

    assert seen == [((3, 3), (4, 3))]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal,
        nn.utils.parametrizations.spectral_norm, nn.utils.weight_norm, nn.utils.spectral_norm,
    ],
    ids=lambda wrap: f"{wrap.__module__}.{wrap.__name__}",
)  # fmt: skip
def test_parametrizations(wrap):
    """A weight computed from other parameters would be computed from the original ones, or not be copied at all."""
    assert_is_functional(wrap(nn.Linear(3, 3)).eval())


def test_stacked_parametrizations():
    """Two parametrizations of one weight would not be applied one after another."""
    model = nn.Linear(3, 3)
    for scale in (2.0, 3.0):
        nn.utils.parametrize.register_parametrization(model, "weight", Scaled(scale))

    assert_is_functional(model)


class Scaled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self, scale):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, weight):
        return weight * self.scale


# -- poison -------------------------------------------------------------------------------------------------------


class Cached(nn.Module):
    """Keeps references to its weight in many ways, and reads one of them."""

    def __init__(self, which):
        super().__init__()
        self.linear, self.which = nn.Linear(3, 3), which
        weight = self.linear.weight
        self.kept = {
            "list": [weight], "view": weight.T, "detached": weight.detach(),
            "data": weight.data.reshape(-1)[:9].view(3, 3), "computed": weight * 2,
            "nested": {"a": (weight,)}, "holder": Holder(weight),
        }  # fmt: skip
        self.closure = lambda: weight
        self.default = lambda w=weight: w

    def forward(self, x):
        weight = {
            "list": lambda: self.kept["list"][0], "nested": lambda: self.kept["nested"]["a"][0],
            "holder": lambda: self.kept["holder"].value, "closure": self.closure, "default": self.default,
        }.get(self.which, lambda: self.kept[self.which])()  # fmt: skip
        return F.linear(x, weight)


KEPT = ["list", "view", "detached", "data", "nested", "holder", "closure", "default"]


@pytest.mark.parametrize("which", KEPT)
def test_a_kept_weight_is_named(which):
    """A cached reference would be used instead of the weights of the call, in silence, as elsewhere."""
    apply, params, _ = functional(Cached(which))

    with pytest.raises(
        LeakError,
        match=r"used the weight 'linear.weight'[\s\S]*a reference kept elsewhere[\s\S]*inside forward",
    ):
        apply(params, X)


def test_a_computed_tensor_is_named():
    """A tensor computed from a weight in the constructor would be stale under other weights."""
    apply, params, _ = functional(Cached("computed"))

    with pytest.raises(LeakError, match="'computed'"):
        apply(params, X)


class Global(Layer):
    """Reads its weight from a global variable."""

    def forward(self, x):
        return F.linear(x, GLOBALS["model"].linear.weight.T[:, :3].detach())


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
    """A notebook's `model` inside a forward or hook would bring the original weights, in silence."""
    GLOBALS["model"] = Global()
    apply, params, _ = functional(GLOBALS["model"])

    with pytest.raises(LeakError, match="'linear.weight'"):
        call(apply, params)


def test_the_live_weights_may_be_given():
    """A call with the module's own tensors, or with one as its input, would be a false alarm."""
    model = Layer()
    apply, params, _ = functional(model)
    live = from_module(model)
    expected = model(X)

    assert torch.equal(functional(model)[0](live, X), expected)
    torch.func.grad(lambda p: functional(model)[0](p, X).sum())(live)
    torch.vmap(lambda x: functional(model)[0](live, x))(X)
    assert apply(params, model.linear.weight).shape == (3, 3)
    assert functional(model, copy=False)[0](functional(model, copy=False)[1], X).shape == (4, 3)


def test_a_leak_in_a_transform_is_named():
    """A transform would hide the leak."""
    apply, params, _ = functional(Cached("list"))

    with pytest.raises(LeakError, match="'linear.weight'"):
        torch.vmap(lambda x: apply(params, x))(X)
    with pytest.raises(LeakError, match="'linear.weight'"):
        torch.func.grad(lambda p: apply(p, X).sum())(params)


def test_the_skeleton_recovers_from_a_leak():
    """A call that raised would leave weights in the skeleton, for the next one to use."""
    apply, params, _ = functional(Cached("list"))
    for _ in range(3):
        with pytest.raises(LeakError):
            apply(params, X)


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
    """An operation would compute with memory that is not there."""
    with pytest.raises(LeakError, match="'a.b'"):
        use(Poison.of(torch.zeros(3, 3), ("a", "b")))


def test_poison_under_autocast_raises():
    """Autocast's own copy of a weight would be taken from memory that is not there."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(LeakError, match="'w'"):
        F.linear(X, Poison.of(torch.zeros(3, 3), ("w",)))


def test_metadata_of_poison_is_free():
    """Listing a skeleton, its state dict, copies and pickles would be false alarms."""
    module = functional(Layer())[0].module
    weight = module.linear.weight

    assert isinstance(weight, Poison)
    assert (weight.shape, weight.dtype, weight.device, weight.stride()) == (
        (3, 3),
        torch.float32,
        torch.device("cpu"),
        (3, 1),
    )
    assert (weight.numel(), weight.dim(), weight.requires_grad, len(weight), weight.is_cuda) == (9, 2, False, 3, False)
    assert repr(weight) == "Poison(linear.weight, shape=(3, 3))"
    assert list(module.state_dict()) == ["linear.weight", "linear.bias"]
    assert [name for name, _ in module.named_parameters()] == ["linear.weight", "linear.bias"]
    assert "Linear(in_features=3" in repr(module)
    again = pickle.loads(pickle.dumps(module))
    assert isinstance(again.linear.weight, Poison)
    assert again.linear.weight.path == ("linear", "weight")
    assert copy.deepcopy(module).linear.weight is weight
    assert next(module.parameters()).dtype is torch.float32


def test_poison_has_the_layout_of_the_weight():
    """A forward that asks for strides would be told another layout than the weight's."""
    weight = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)

    assert Poison.of(weight, ("w",)).stride() == weight.stride()


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
        assert not hasattr(self, "late")
        assert not hasattr(self.linear, "child_trace")
        assert not self.linear._forward_hooks
        assert self.bn.training
        assert self.removed == 1
        assert self.rope.sum() == 3
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
        self.new = nn.Linear(3, 3)
        return self.bn(self.linear(x)) * self.rope


def test_a_call_leaves_nothing_behind():
    """State that a forward keeps would go from one call to the next, or back into the module."""
    model = Scribbler()
    apply, params, buffers = functional(model)
    for _ in range(3):
        apply(params, X, buffers=buffers)

    assert len(apply._pool) == 1
    assert not any([model.memo, model.log, model.seen, model.queue, model.last])
    assert model.count.sum() == 0
    assert not hasattr(model, "late")
    assert torch.equal(apply.with_buffers(params, buffers, X)[1]["rope"], torch.full((3,), 2.0))


class Grows(nn.Module):
    """Changes the children of modules that are torch's own, and says what it found."""

    def __init__(self, change):
        super().__init__()
        self.layers, self.spare = nn.ModuleList([nn.Linear(3, 3), nn.Tanh()]), nn.ModuleList()
        self.named, self.change = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Tanh()}), change

    def forward(self, x):
        found = [[list(m._modules.items()) for m in (self.layers, self.spare, self.named, *self.layers)]]
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
    """A layer that forward appends to a list of modules, or takes out of it, would be there, or not, in later calls."""
    apply, params, _ = functional(Grows(CHILDREN[name]))
    first, second, third = [apply(params, X) for _ in range(3)]

    assert first == second == third


def test_a_call_that_raises_leaves_nothing_behind():
    """An exception would skip the cleaning."""
    model = Scribbler()
    apply, params, buffers = functional(model)
    for error in (RuntimeError, KeyboardInterrupt):
        handle = apply._pool[0].module.register_forward_hook(
            lambda *_, error=error: (_ for _ in ()).throw(error("stop"))
        )
        with pytest.raises(error, match="stop"):
            apply(params, X, buffers=buffers)
        handle.remove()

    apply(params, X, buffers=buffers)


@pytest.mark.parametrize("make", [Scribbler, functools.partial(Recurrent, nn.LSTM), make_mlp])
def test_no_weights_stay_alive_after_a_call(make):
    """A pooled skeleton would keep a tree of weights in memory until the next call."""
    apply, params, buffers = functional(make())
    tree = params.apply(torch.clone)
    apply(tree, X, buffers=buffers)
    refs = [weakref.ref(leaf) for leaf in tree.values(True, True)]
    del tree
    gc.collect()

    assert not any(ref() is not None for ref in refs)


def test_apply_keeps_no_weights():
    """The trees that functional returned would live as long as the function."""
    model = make_mlp()
    apply, params, _ = functional(model)
    refs = [weakref.ref(leaf) for leaf in [*params.values(True, True), *model.parameters()]]
    del params, model
    gc.collect()

    assert not any(ref() is not None for ref in refs)
    assert apply.training


def test_the_module_may_change_and_go():
    """The function would follow later changes of the module, or die with it."""
    model = make_mlp()
    apply, params, _ = functional(model)
    expected = model(X)
    model[1] = nn.ReLU()
    model.register_forward_hook(lambda *_: 0)
    with torch.no_grad():
        model[0].weight.zero_()
    del model

    torch.testing.assert_close(apply(params, X), expected)


def test_plain_tensors_are_constants_of_their_own():
    """A plain tensor attribute would be shared with the module, or leak from one call to the next."""
    model = Layer()
    model.scale = torch.full((3,), 2.0)
    apply, params, _ = functional(model)
    model.scale.zero_()

    assert apply.module.scale.tolist() == [2.0, 2.0, 2.0]


def test_skeletons_share_no_writable_state():
    """Two concurrent calls would write into one list."""
    apply, _, _ = functional(Scribbler())
    one, two = apply._new_skeleton(), apply._new_skeleton()

    assert one.module.log is not two.module.log
    assert one.module.count is not two.module.count
    assert one.module.linear is not two.module.linear


def test_generators_of_the_module_are_shared():
    """A module's own generator would restart at each call: every mask would be the same."""
    model = Layer()
    model.generator = torch.Generator().manual_seed(0)
    model.register_forward_hook(lambda module, args, out: out + torch.rand(3, generator=module.generator))
    apply, params, _ = functional(model)

    assert not torch.equal(apply(params, X), apply(params, X))


def test_from_module_is_not_disturbed():
    """Making a function of a module would change the module."""
    model = Scribbler()
    before = {name: (id(value), value._version) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    attributes = dict(model.__dict__)
    apply, params, buffers = functional(model)
    apply(params, X, buffers=buffers)

    assert {n: (id(v), v._version) for n, v in [*model.named_parameters(), *model.named_buffers()]} == before
    assert all(model.__dict__[name] is value for name, value in attributes.items())
    assert len(model.__dict__) == len(attributes)
    assert from_module(model)["linear", "weight"] is model.linear.weight
