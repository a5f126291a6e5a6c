"""A jitted function follows the attributes that it reads."""

import enum
import functools
import types
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc._jit import jit
from tdfunc._jit.attributes import Chain, chains_of
from tests.jit import settings

X = torch.ones(1)


class Slotted:
    """An object without a dict."""

    __slots__ = ("lr",)

    def __init__(self, lr=1.0):
        self.lr = lr


class Base:
    """A base with a method that reads an attribute."""

    def scaled(self, x):
        """Scale by an attribute."""
        return x * self.lr


class Config(Base):
    """A configuration with attributes of many kinds."""

    shared = 1.0

    def __init__(self, lr=1.0):
        self.lr = lr
        self.table = {"lr": lr}

    @property
    def rate(self):
        """An attribute that is computed."""
        return self.lr * 1

    @functools.cached_property
    def act(self):
        """A function that is made once."""
        return torch.relu

    def scaled(self, x):
        """Scale as the base does."""
        return super().scaled(x)

    def decorated(self, x):
        """Call a decorated method."""
        return self.without_grad(x)

    @torch.no_grad()
    def without_grad(self, x):
        """Scale by an attribute."""
        return x * self.lr

    @jit
    def step(self, x):
        """Scale by an attribute, as a step of a trainer."""
        return self.loss(x) * 1

    def loss(self, x):
        """Scale by an attribute of this object."""
        return x * self.lr

    @staticmethod
    def plain(x):
        """Scale by a global."""
        return x * GLOBAL.lr

    @classmethod
    def of_class(cls, x):
        """Scale by an attribute of the class."""
        return x * cls.shared

    def __call__(self, x):
        """Scale by an attribute."""
        return x * self.lr


@dataclass(frozen=True)
class Frozen:
    """A configuration that is compared by its fields."""

    lr: float = 1.0

    def loss(self, x):
        """Scale by a field and a global."""
        return x * self.lr * GLOBAL.lr


@dataclass(frozen=True)
class Box:
    """A dataclass around any object."""

    value: object


class Reads:
    """A callable object."""

    def __call__(self, x, cfg):
        """Read an attribute of an argument."""
        return x * cfg.lr


class Takes(nn.Module):
    """A module that takes an object."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x, options):
        """Scale by an attribute."""
        return x * options.lr * self.w.size(0)


class Holder:
    """An object with an object."""

    def __init__(self, cfg):
        self.cfg = cfg

    def by_call(self, x):
        """Call the object."""
        return self.cfg(x)

    def by_method(self, x):
        """Call a method of the object."""
        return self.cfg.loss(x)

    def by_function(self, x):
        """Hand the object on."""
        return penalize(x, self.cfg)

    def loss(self, x):
        """Read an attribute of an attribute."""
        return x * self.cfg.lr

    def by_alias(self, x):
        """Read an attribute of an object with another name."""
        cfg = self.cfg
        return x * cfg.lr

    def by_closure(self, x):
        """Read attributes in inner functions."""
        cfg = self.cfg
        scaled = [x * factor * self.cfg.lr for factor in (1.0,)]
        return (lambda y: y * cfg.lr / self.cfg.lr)(scaled[0])


class Scaled(nn.Module):
    """A module with a number."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0
        self.act = nn.Identity()
        self.inner = nn.Dropout(1.0).eval()

    def forward(self, x):
        """Scale by the number."""
        return self.inner(self.act(x)) * self.scale

    def loss(self, x):
        """Call a module in this one."""
        return self.inner(x) * self.scale


class Global(nn.Module):
    """A module that reads a global."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        """Scale by a global."""
        return self.helper(x) * self.w

    def helper(self, x):
        """Scale by a global."""
        return x * GLOBAL.lr


class Mode(enum.Enum):
    """A choice."""

    A = 1


GLOBAL = Config()


def by_global(x):
    """Scale by a global object."""
    return x * GLOBAL.lr


LOSSES = {"scaled": by_global, "other": [torch.relu]}
PARAMS = TensorDict({"w": torch.ones(1)})


def set_lr(owner, value):
    """Assign the rate of an object."""
    owner.lr = value


def set_on(owner, name="lr"):
    """What assigns an attribute."""
    return lambda value: setattr(owner, name, value)


def set_global(value):
    """Assign an attribute of a global object."""
    GLOBAL.lr = value


def read_rate(cfg):
    """Return a number without any operation of torch."""
    return cfg.lr * 1


def penalize(x, config):
    """Read an attribute here, and one in a function that gets the object."""
    return x * read_rate(config)


def total(x, options):
    """A loss with options."""
    return penalize(x, options).sum()


@functools.cache
def scale_by(factor):
    """The function that scales by a factor."""
    return lambda x: x * factor


def of_slot(slotted):
    """A place that is a slot, or an attribute of any object."""
    return lambda x: x * slotted.lr, (X,), set_on(slotted)


def of_forward(module, cfg):
    """A place that is an attribute of an argument of a forward."""
    return lambda x: module(x, cfg), (X,), set_on(cfg)


def of_ensemble(module, cfg):
    """A place that is an attribute of an argument of an ensemble's forward."""
    ensemble = tdf.Ensemble(tdf.functional(module)[0])
    stacked = tdf.stack_modules([module, module])
    return lambda p, x, c: ensemble(p, x, c), (stacked.detach(), X, cfg), set_on(cfg)


# Each returns a function to jit, its arguments, and a function that assigns the value that it reads.
OBJECTS = {
    "object in a closure": lambda cfg: (lambda x: x * cfg.lr, (X,), set_on(cfg)),
    "object in a global": lambda cfg: (by_global, (X,), set_global),
    "slot": lambda cfg: of_slot(Slotted()),
    "dict in an object": lambda cfg: (lambda x: x * cfg.table["lr"], (X,), lambda value: cfg.table.update(lr=value)),
    "property": lambda cfg: (lambda x: x * cfg.rate, (X,), set_on(cfg)),
    "cached property": lambda cfg: (lambda x: cfg.act(x) * cfg.lr, (X,), set_on(cfg)),
    "attribute of its class": lambda cfg: (lambda x: x * cfg.shared, (X,), set_on(Config, "shared")),
    "attribute that hides its class": lambda cfg: (lambda x: x * cfg.shared, (X,), set_on(cfg, "shared")),
    "namespace": lambda cfg: of_slot(types.SimpleNamespace(lr=1.0)),
    "class as namespace": lambda cfg: (lambda x: x * Config.shared, (X,), set_on(Config, "shared")),
    "module of constants": lambda cfg: (lambda x: x * settings.LR, (X,), set_on(settings, "LR")),
    "function of a module": lambda cfg: (lambda x: settings.scale(x), (X,), set_on(settings, "LR")),
}
METHODS = {
    "method": lambda cfg: (lambda x: cfg.loss(x), (X,), set_on(cfg)),
    "method that calls super": lambda cfg: (lambda x: cfg.scaled(x), (X,), set_on(cfg)),
    "decorated method": lambda cfg: (lambda x: cfg.decorated(x), (X,), set_on(cfg)),
    "jitted method": lambda cfg: (lambda x: cfg.step(x), (X,), set_on(cfg)),
    "static method": lambda cfg: (lambda x: cfg.plain(x), (X,), set_global),
    "class method": lambda cfg: (lambda x: cfg.of_class(x), (X,), set_on(Config, "shared")),
    "callable object": lambda cfg: (lambda x: cfg(x), (X,), set_on(cfg)),
    "callable object that is jitted": lambda cfg: (cfg, (X,), set_on(cfg)),
    "bound method": lambda cfg: (cfg.loss, (X,), set_on(cfg)),
    "method that hides its class": lambda cfg: (
        lambda x: cfg.loss(x), (X,), lambda value: setattr(cfg, "loss", scale_by(value))),
    "attribute of an attribute": lambda cfg: (Holder(cfg).loss, (X,), set_on(cfg)),
    "alias": lambda cfg: (Holder(cfg).by_alias, (X,), set_on(cfg)),
    "inner functions": lambda cfg: (Holder(cfg).by_closure, (X,), set_on(cfg)),
    "vmap and grad": lambda cfg: (torch.vmap(torch.func.grad(Holder(cfg).loss)), (X,), set_on(cfg)),
    "function in a dict": lambda cfg: (lambda x: LOSSES["scaled"](x), (X,), set_global),
    "method in a list": lambda cfg: ((lambda fns: lambda x: fns[0](x))([cfg.loss]), (X,), set_on(cfg)),
    "method in a partial": lambda cfg: (functools.partial(lambda fn, x: fn(x), cfg.loss), (X,), set_on(cfg)),
}  # fmt: skip


def of_module(fn, module, name="scale", args=(X,)):
    """A place that is a number of a module."""
    return fn, args, set_on(module, name)


def make_apply():
    """A pure function whose forward reads a global, with its parameters."""
    apply, params, _ = tdf.functional(Global())
    return apply, params.detach()


def make_call(apply, params):
    """A place behind a pure function."""
    return lambda p, x: apply(p, x), (params, X), set_global


MODULES = {
    "number of a module": lambda m: of_module(lambda x: m(x), m),
    "number of a module in a module": lambda m: of_module((lambda s: lambda x: s(x))(nn.Sequential(m)), m),
    "number of the module that is jitted": lambda m: of_module(m, m),
    "module in an object": lambda m: of_module(Holder(m).by_call, m),
    "method of a module in an object": lambda m: of_module(Holder(m).by_method, m),
    "module that is an argument": lambda m: of_module(lambda x, m: m(x), m, args=(X, m)),
    "global of a forward": lambda m: make_call(*make_apply()),
    "global of a forward in an ensemble": lambda m: make_call(
        tdf.Ensemble(make_apply()[0]), tdf.stack([make_apply()[1]] * 2)),
}  # fmt: skip
ARGUMENTS = {
    "argument": lambda cfg: (lambda x, c: x * c.lr, (X, cfg), set_on(cfg)),
    "argument with a method": lambda cfg: (lambda x, h: h.loss(x), (X, Holder(cfg)), set_on(cfg)),
    "argument of a method": lambda cfg: (Holder.by_closure, (Holder(cfg), X), set_on(cfg)),
    "self of a jitted method": lambda cfg: (Config.step, (cfg, X), set_on(cfg)),
    "argument of a partial": lambda cfg: (functools.partial(lambda y, x, c: x * c.lr, 0), (X, cfg), set_on(cfg)),
    "argument of a callable object": lambda cfg: (Reads(), (X, cfg), set_on(cfg)),
    "argument handed on": lambda cfg: (lambda x, c: penalize(x, c), (X, cfg), set_on(cfg)),
    "closure handed on": lambda cfg: (lambda x: penalize(x, cfg), (X,), set_on(cfg)),
    "closure handed on to grad": lambda cfg: (lambda x: torch.func.grad(total)(x, cfg), (X,), set_on(cfg)),
    "attribute handed on": lambda cfg: (Holder(cfg).by_function, (X,), set_on(cfg)),
    "object handed on to a forward": lambda cfg: of_forward(Takes(), cfg),
    "argument of an ensemble's forward": lambda cfg: of_ensemble(Takes(), cfg),
    "function": lambda cfg: (lambda x, fn: fn(x), (X, by_global), set_global),
    "bound method": lambda cfg: (lambda x, fn: fn(x), (X, cfg.loss), set_on(cfg)),
    "class": lambda cfg: (lambda x, c: x * c.shared, (X, Config), set_on(Config, "shared")),
    "object in a dataclass": lambda cfg: (lambda x, c: x * c.value.lr, (X, Box(cfg)), set_on(cfg)),
    "method of a dataclass": lambda cfg: (lambda x, c: c.loss(x), (X, Frozen()), set_global),
}  # fmt: skip
PLACES = {name: (make, Scaled) for name, make in MODULES.items()}
PLACES |= {name: (make, Config) for name, make in {**OBJECTS, **METHODS, **ARGUMENTS}.items()}


@pytest.fixture(params=PLACES)
def place(request):
    """A function to jit, its arguments, and what assigns the value that it reads."""
    make, kind = PLACES[request.param]
    yield make(kind())
    GLOBAL.lr = Config.shared = settings.LR = 1.0


def test_an_attribute_that_changes(place):
    """A call gives the result of the function with the present values."""
    fn, args, assign = place
    step = jit(fn)
    step(*args)
    assign(3.0)

    found = step(*args)
    assert torch.equal(found, fn(*args))
    assert found.flatten()[0] == 3


def test_an_attribute_that_stays(place):
    """Calls with the values of any earlier call make no new record."""
    fn, args, assign = place
    step = jit(fn)
    for value in (1.0, 1.0, 3.0, 3.0, 1.0, 3.0):
        assign(value)
        step(*args)

    assert step.cache_info().misses == 2


def read_nested(x):
    """Read attributes of objects in an object, whichever they are."""
    return x * TREE.left.lr + TREE.right.loss(x) * TREE.right.rate + TREE.shared


TREE = types.SimpleNamespace(left=Config(), right=Config(), shared=1.0)
NUMBERS = st.sampled_from([0.5, 1.0, 2.0])
CHANGES = st.one_of(
    st.tuples(st.sampled_from(["left.lr", "right.lr", "shared"]), NUMBERS),
    st.tuples(st.sampled_from(["left", "right"]), NUMBERS.map(Config)),
    st.tuples(st.sampled_from(["left.loss", "right.loss"]), NUMBERS.map(scale_by)),
)


@given(st.lists(CHANGES, min_size=1, max_size=6))
def test_a_jitted_function_equals_the_function(changes):
    """After any change of objects in objects, of their numbers and of their methods, the results are the same."""
    step = jit(read_nested)
    for path, value in changes:
        *parents, name = path.split(".")
        setattr(functools.reduce(getattr, parents, TREE), name, value)

        assert torch.equal(step(X * 3), read_nested(X * 3))


@dataclass
class Counts:
    """An object that its own methods change."""

    count: int = 0
    cache: object = None

    def add(self, x):
        """Count the calls."""
        self.count += 1
        return x * self.count

    def keep(self, x):
        """Make a value at the first call."""
        if self.cache is None:
            self.cache = Config()
        return x * self.cache.lr


def test_a_constant_in_an_attribute():
    """Another tensor in an attribute is recorded anew."""
    holder = Holder(torch.ones(1))
    step = jit(lambda x: x * holder.cfg, captures="constants")
    step(X)
    holder.cfg = torch.full((1,), 3.0)

    assert step(X).item() == 3


@pytest.mark.parametrize("name", ["add", "keep"])
def test_what_the_function_changes_itself(name):
    """An attribute that the recorded code assigns is read once."""
    step = jit(getattr(Counts(), name))
    results = [step(X).item() for _ in range(3)]

    assert results == [1, 1, 1]
    assert step.cache_info().misses == 1


def test_an_attribute_that_changes_during_the_record():
    """Where something else assigns it meanwhile, the record is of neither value, and is not kept."""
    cfg = Config()
    meanwhile = iter([2.0])

    def scale(x):
        y = x * cfg.lr
        for lr in meanwhile:
            vars(cfg).update(lr=lr)
        return y

    step = jit(scale)
    results = [step(X).item() for _ in range(3)]
    cfg.lr = 5.0

    assert results == [1, 2, 2]
    assert step(X).item() == 5


def test_an_attribute_that_code_out_of_sight_changes():
    """What changes in each of three records counts as changed by the function, and is read once."""
    cfg = Config()

    def scale(x):
        vars(cfg).update(lr=cfg.lr + 1)
        return x * cfg.lr

    step = jit(scale)
    for _ in range(6):
        step(X)

    assert step.cache_info().misses == 4


def test_an_attribute_that_no_code_reads():
    """The attributes that the function does not read may change."""
    cfg = Config()
    step = jit(lambda x: x * cfg.lr)
    for value in range(3):
        cfg.other = value
        step(X)

    assert step.cache_info().misses == 1


def test_an_object_in_the_place_of_an_equal_one():
    """Where only attributes of an object are read, another object with the same values makes no record."""
    holder = Holder(Config())
    step = jit(holder.loss)
    for _ in range(3):
        holder.cfg = Config()
        step(X)

    assert step.cache_info().misses == 1


class Computed:
    """An object whose attributes are computed."""

    def __init__(self):
        self.values = {"lr": 1.0}

    def __getattr__(self, name):
        return self.values[name]


# Each returns a function whose value changes, and what assigns it.
NOT_FOLLOWED = {
    "attribute by a text": lambda cfg: (lambda x: x * getattr(cfg, "lr"), set_on(cfg)),  # noqa: B009
    "attribute that is computed": lambda cfg: (
        lambda one: (lambda x: x * one.lr, lambda value: one.values.update(lr=value))
    )(Computed()),
    "attribute of an item": lambda cfg: ((lambda items: lambda x: x * items[0].lr)([cfg]), set_on(cfg)),
    "attribute of a result": lambda cfg: ((lambda get: lambda x: x * get().lr)(lambda: cfg), set_on(cfg)),
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_attributes_that_are_read_once(name):
    """Values that the code does not read by names stay as they were at the first call."""
    fn, assign = NOT_FOLLOWED[name](Slotted())
    step = jit(fn)
    step(X)
    assign(3.0)

    assert step(X).item() == 1


def of_self(*attributes):
    """The chain of a parameter."""
    return Chain("parameter", "self", attributes)


CHAINS = [
    (lambda self: self.cfg.lr + self.lr, {of_self("cfg", "lr"), of_self("lr")}),
    (lambda x: X.shape[0], {Chain("global", "X", ("shape",))}),
    (lambda self: [self.lr for _ in range(2)], {of_self("lr"), Chain("global", "range")}),
    (lambda x: (lambda: x.a.b), {Chain("parameter", "x", ("a", "b"))}),
    (lambda x: x, {Chain("parameter", "x")}),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "chains"), CHAINS)
def test_chains(fn, chains):
    """The chains of code are the variables that it reads, each with the attributes that it reads of it."""
    assert chains <= set(chains_of(fn.__code__))


def test_numbers_from_outside_are_named():
    """The eighth value of an attribute warns once, with its name and the cure."""
    cfg = Config()
    step = jit(lambda x: x * cfg.lr)
    for value in range(7):
        cfg.lr = value
        step(X)
    cfg.lr = 7

    with pytest.warns(UserWarning, match=r"(?s)'cfg\.lr' is a number that has had 8 values.*argument.*tensor\(7\)"):
        step(X)
    cfg.lr = 8
    step(X)


def test_values_from_outside_that_fill_the_cache_are_named():
    """Where records end because a value from outside varies, the message has its name."""
    cfg = Config()
    step = jit(lambda x: x * cfg.lr, cache_size=2)
    for value in range(3):
        cfg.lr = value
        step(X)
    cfg.lr = 3

    with pytest.warns(UserWarning, match=r"(?s)got: *the value of 'cfg\.lr' varies.*arguments that are tensors"):
        step(X)
