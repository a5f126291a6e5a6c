"""What `jit` refuses: each call, the class of the error, and the parts of its message."""

import functools
import random
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc import (
    CaptureError,
    ConcurrencyError,
    ImmutableError,
    LeafMismatchError,
    NonTensorData,
    TensorClass,
    TensorDict,
    UnsupportedError,
)
from tdfunc._jit import jit

WEIGHT = torch.ones(3)
LINE = "test_messages.py"


class Holder:
    """An object with a tensor inside."""

    def __init__(self):
        self.inner = {"mask": torch.ones(3)}


GENERATOR = torch.Generator().manual_seed(0)
STATE = GENERATOR.get_state()
HOLDER, MINE, THEIRS, OLD = Holder(), np.random.Generator(np.random.SFC64(0)), random.Random(0), np.random.RandomState()


@functools.lru_cache
def positions(n):
    """A table that is made once."""
    return torch.arange(n).sin()


def seed_and_draw(x):
    """Draw from the default generator after it was seeded."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.rand(3)


def seed_elsewhere(x):
    """The same, by a name that the code does not spell."""
    getattr(torch, "manual" + "_seed")(7)
    return torch.rand(3)


def set_state(x):
    """Draw after the present state of a generator was set."""
    GENERATOR.set_state(STATE)
    return torch.rand(3, generator=GENERATOR)


def make_captures():
    """Functions that use a tensor from outside, each with the name that the message gives it."""
    cell, params, holder, module = torch.ones(3), TensorDict({"a": {"w": torch.ones(3)}}), Holder(), nn.Linear(3, 3)
    inner = lambda x: x * cell  # noqa: E731
    frozen = torch.inference_mode()(torch.ones)(3)
    return [
        (lambda x: x + cell, "'cell'"),
        (lambda x: x + WEIGHT, "'WEIGHT'"),
        (lambda x: x + params["a", "w"], "params['a.w']"),
        (lambda x: x + holder.inner["mask"], "holder.inner['mask']"),
        (lambda x: module(x), "module.weight"),
        (lambda x: inner(x), "'cell'"),
        (functools.partial(lambda w, x: x + w, cell), "partial arguments"),
        (lambda x: cell, "'cell'"),
        (lambda x: x * frozen, "'frozen'"),
        (torch.vmap(lambda x: x + cell[0]), "cell'"),
        (module, "self.weight"),
    ]


@pytest.mark.parametrize("i", range(len(make_captures())))
def test_captured_tensors_are_constants(i):
    """On request they are constants of the record; as results they come out with their values."""
    fn, _ = make_captures()[i]
    traced, values = jit(fn, captures="constants"), [torch.arange(3.0), torch.arange(3.0) * 2]

    with torch.no_grad():
        found, expected = [[run(x) for x in values] for run in (traced, fn)]

    torch.testing.assert_close(found, expected)
    assert traced.cache_info().misses == 1


ALL = [
    *[(fn, f"{re.escape(name)}.*argument") for fn, name in make_captures()],
    (lambda x: (x * WEIGHT + X).sum() + TREE["a", "w"].sum(),
     r"'WEIGHT', 'X', .*w.*, tensors.*'X': shape.*test_messages"),
    (nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)]), "'self.0.weight', 'self.0.bias', .*'self.4.bias', tensors"),
    (nn.Sequential(*[nn.Linear(3, 3) for _ in range(7)]), "'self.0.weight', .*'self.4.bias', and 4 more, tensors"),
    (lambda x: torch.autograd.grad((x * TRAINED["w"]).sum(), TRAINED["w"]), r"TRAINED\['w'\]., a tensor that is not"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "pattern"), ALL)
def test_captured_tensors_are_named(fn, pattern):
    """Tensors that are not arguments are refused by their names in the function; of very many the first are named."""
    with pytest.raises(CaptureError, match=f"(?s){pattern}"):
        jit(fn)(torch.ones(3))


# What changes a captured tensor, and the error of the next call; another tensor is recorded anew.
REPLACED = {
    "another item": lambda box: box["list"].__setitem__(0, torch.full((3,), 7.0)),
    "another weight": lambda box: setattr(box["layer"], "weight", nn.Parameter(torch.eye(3), False)),
}
WRITTEN = {
    "a write": (lambda box: box["list"][0].add_(1), r"list'\]\[0\]. was written since.*cache_clear"),
    "a write to a view": (lambda box: box["list"][0][:1].zero_(), "written since"),
    "assigned data": (lambda box: setattr(box["layer"].weight, "data", torch.eye(3)), "layer.*weight.* was written"),
}


@pytest.fixture
def constants():
    """A function that holds a tensor and a layer as constants of its record, and what holds them."""
    box = {"list": [torch.ones(3)], "layer": nn.Linear(3, 3).requires_grad_(False)}
    traced = jit(lambda x: box["layer"](x) + box["list"][0], captures="constants")
    traced(torch.ones(3))
    return traced, box


@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_a_constant_that_is_replaced(constants, replace):
    """A call with another object in the place of a constant is recorded anew."""
    traced, box = constants
    replace(box)

    torch.testing.assert_close(traced(torch.ones(3)), box["layer"](torch.ones(3)) + box["list"][0])


@pytest.mark.parametrize(("write", "pattern"), WRITTEN.values(), ids=WRITTEN)
def test_a_constant_that_is_written(constants, write, pattern):
    """No call uses a value that is out of date: each is refused until the records are cleared."""
    (traced, box), x = constants, torch.ones(3)
    write(box)

    with pytest.raises(CaptureError, match=f"(?s){pattern}"):
        traced(x)
    with pytest.raises(CaptureError, match=f"(?s){pattern}"):
        traced(x)
    traced.cache_clear()
    torch.testing.assert_close(traced(x), box["layer"](x) + box["list"][0])


NOT_CONSTANTS = [
    (lambda x: X.add_(x), ImmutableError, rf"writes to 'X' in place.*{LINE}"),
    (nn.Linear(3, 3), UnsupportedError, "'self.weight' requires grad.*no_grad"),
    (lambda x: x * X.tolist()[0], CaptureError, "'X'"),
]


@pytest.mark.parametrize(("fn", "kind", "pattern"), NOT_CONSTANTS, ids=["written", "trained", "read"])
def test_what_is_not_a_constant(fn, kind, pattern):
    """A capture that is written or trained is refused, and so are reads of its values."""
    with pytest.raises(kind, match=f"(?s){pattern}"):
        jit(fn, captures="constants")(torch.ones(3))
    assert X.tolist() == [1, 1, 1]


def test_a_capture_in_vmap_of_grad_shows_the_users_line():
    """The message shows the line of the user's function, not one of torch."""
    hidden = torch.ones(3)

    def loss(p):
        return (p["w"] * hidden).sum()

    with pytest.raises(CaptureError, match=rf"(?s)hidden.*{LINE}:\d+: return \(p\[\"w\"\] \* hidden\)"):
        jit(torch.vmap(torch.func.grad(loss)))(TensorDict({"w": torch.ones(2, 3)}, [2]))


X, TREE = torch.ones(3), TensorDict({"a": {"w": torch.ones(3)}})
SPARSE = TensorDict({"a": torch.eye(3).to_sparse()})
NESTED = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
TRAINED = TensorDict({"w": nn.Parameter(torch.ones(3))})
UNKEYED = [slice(1), object.__new__(type("L", (), {"__hash__": None}))]
LARGE = TensorDict({"a": torch.zeros(1)}).set("n", NonTensorData(np.zeros(1001)))
REFUSED = [
    (lambda x: x.add_(1), (X,), ImmutableError, "argument 0", LINE),
    (lambda t: t["a", "w"].mul_(2), (TREE,), ImmutableError, "argument 0['a']['w']", LINE),
    (lambda x: x[0].zero_(), (X,), ImmutableError, "argument 0", LINE),
    (lambda t, x: torch.add(x, 1, out=t["a", "w"]), (TREE, X), ImmutableError, "argument 0['a']['w']", LINE),
    (lambda x: nn.functional.batch_norm(torch.ones(4, 3), x, torch.ones(3), training=True), (X,), ImmutableError,
     "argument 0", LINE),
    (lambda x: x.tolist(), (X,), UnsupportedError, "value of a tensor", LINE, "torch.where"),
    (lambda t: t["w"] * 2, (TRAINED,), UnsupportedError, "argument 0['w'] requires grad", "torch.func.grad", "no_grad"),
    (lambda o: X, (UNKEYED,), UnsupportedError, "argument 0[1]", "hashable", "L"),
    (lambda t: t["a"], (LARGE,), UnsupportedError, "argument 0's non-tensor data", "hashable", "ndarray"),
    (lambda t: t, (SPARSE,), UnsupportedError, "argument 0['a']", "torch.sparse_coo"),
    (lambda x: x, (NESTED,), UnsupportedError, "argument 0", "subclass", "NestedTensor"),
    (lambda x: x * x.grad, (X,), UnsupportedError, "reads .grad of argument 0", LINE, "pass the value"),
    (lambda x: x * x.storage_offset(), (X,), UnsupportedError, "reads .storage_offset() of argument 0", LINE),
    (lambda x: setattr(x, "data", x * 2), (X,), UnsupportedError, "assigns to .data", LINE, "copy_()"),
    (lambda x: x * X.tolist()[0], (X,), CaptureError, "'X'", LINE),
    (lambda x: x * torch.from_numpy(X.numpy()), (X,), CaptureError, "'X'", LINE),
    (lambda x: x + torch.rand(3, generator=torch.Generator()), (X,), UnsupportedError, "function seeds or makes", LINE),
    (seed_and_draw, (X,), UnsupportedError, "seed_and_draw seeds or makes", "torch.Generator outside"),
    (seed_elsewhere, (X,), UnsupportedError, "function seeds or makes", LINE, "torch.Generator outside"),
    (set_state, (X,), UnsupportedError, "function seeds or makes", LINE, "torch.Generator outside"),
    (lambda x: x * np.random.rand(), (X,), UnsupportedError, "draws while it is recorded", "numpy's", "tdfunc.random"),
    (lambda x: x * random.random(), (X,), UnsupportedError, "draws while it is recorded", "Python's"),
    (lambda x: x * MINE.random(), (X,), UnsupportedError, "draws while it is recorded", "'MINE' generator"),
    (lambda x: x * THEIRS.random(), (X,), UnsupportedError, "draws while it is recorded", "'THEIRS' generator"),
    (lambda x: x * OLD.rand(), (X,), UnsupportedError, "draws while it is recorded", "'OLD' generator"),
    (lambda x: x * positions(3), (X,), UnsupportedError, "keeps a tensor", "sin", "[3]", "clear that cache"),
    (lambda x: HOLDER.inner.update(last=x), (X,), UnsupportedError, "keeps", "HOLDER.inner['last']", "argument 0"),
    (lambda x: Holder(), (X,), UnsupportedError, "the result", "Holder"),
    (lambda x: {"a": [x, Holder()]}, (X,), UnsupportedError, "the result['a'][1]", "Holder"),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(REFUSED)))
def test_refusals_name_the_argument_or_the_line(i):
    """A function that a replay could not repeat is refused, and nothing is written or kept."""
    fn, args, error, *parts = REFUSED[i]
    traced = jit(fn)

    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts))):
        traced(*args)
    assert traced.cache_info().currsize == 0
    assert TREE["a", "w"].tolist() == X.tolist() == [1, 1, 1]
    HOLDER.inner.pop("last", None)


class Gate(nn.Module):
    """A module whose forward branches."""

    def forward(self, x):
        """Pass what is positive in sum."""
        return x if x.sum() > 0 else -x  # read here


def halve(x):
    """Loop until a tensor is small."""
    while x.norm() > 1:  # read here
        x = x / 2
    return x


# Each reads a value in the line that ends with a comment that says so, and in none of torch's or ours.
READERS = [
    Gate(),
    halve,
    lambda x: [x * 2 for value in x if value > 0],  # read here
    lambda x: (x * 1).masked_scatter(x > 0, x[x > 0]),  # read here
    lambda x: x * bool(x[0]),  # read here
    lambda x: x[: int(x[0])],  # read here
    lambda x: torch.masked_select(x, x > 0),  # read here
    lambda x: torch.unique(x),  # read here
    lambda x: torch.where(x > 0),  # read here
    lambda x: torch.repeat_interleave(x, x.long()),  # read here
    lambda x: torch.arange(x[0]),  # read here
    lambda x: np.square(x),  # read here
    lambda x: x.numpy().sum(),  # read here
    torch.func.grad(lambda x: (x[0] if x[0] > 0 else x[1]).sum()),  # read here
]


@pytest.mark.parametrize("i", range(len(READERS)))
def test_a_value_that_is_read_is_named_by_its_line(i):
    """The message shows file, number and code of the user's line that reads the value of a tensor."""
    with pytest.raises(UnsupportedError, match=rf"(?s)value of a tensor.*{LINE}:(\d+): [^\n]*# read here") as caught:
        jit(READERS[i])(X)

    number = int(re.search(rf"{LINE}:(\d+):", str(caught.value))[1])
    code = READERS[i].forward.__code__ if i == 0 else getattr(READERS[i], "__wrapped__", READERS[i]).__code__
    assert code.co_firstlineno <= number <= code.co_firstlineno + 3


SCALE = 1.0


def test_a_thread_that_assigns_a_global_is_named(monkeypatch):
    """A global that is assigned during the first call, by other code than the function's, is refused by name."""

    def fn(x):
        thread = threading.Thread(target=lambda: monkeypatch.setitem(globals(), "SCALE", 2.0))
        thread.start()
        thread.join()
        return x * SCALE

    with pytest.raises(ConcurrencyError, match=r"(?s)'SCALE' was assigned while.*1.0, then 2.0.*call again"):
        jit(fn)(X)
    assert jit(fn)(X).tolist() == [2, 2, 2]


def test_numbers_that_are_recorded_anew_are_named():
    """The eighth value of a number among the arguments warns, once, with the cure; other numbers do not."""
    fn = jit(lambda x, i, options: x * i * options["power"])
    for i in range(7):
        fn(X, i, {"power": 2})

    with pytest.warns(UserWarning, match=r"(?s)argument 1 is a number that has had 8 values.*torch.tensor\(7\)"):
        fn(X, 7, {"power": 2})
    fn(X, 8, {"power": 2})


def test_the_cache_holds_a_record():
    """A cache for no records is refused, and so is an unknown way to treat captures."""
    with pytest.raises(ValueError, match=r"(?s)cache_size must be at least 1.*0"):
        jit(lambda x: x, cache_size=0)
    with pytest.raises(ValueError, match=r"(?s)captures must be one of 'refused', 'constants'.*'kept'"):
        jit(lambda x: x, captures="kept")


def test_a_gradient_by_integers_is_named():
    """The message of torch names no leaf; ours names one, and the function that separates buffers."""
    tree = tdf.stack_modules([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
    step = jit(torch.vmap(torch.func.grad(lambda tree: tree["weight"].sum())))

    with pytest.raises(
        LeafMismatchError, match=r"such as argument 0.*num_batches_tracked[\s\S]*int64[\s\S]*tdf\.split"
    ):
        step(tree)


class Typed(TensorClass):
    """A tree with a tensor as default."""

    x: torch.Tensor
    bias: torch.Tensor = torch.ones(2)


def test_the_default_of_a_field_is_named():
    """A default that is a tensor is captured, and the message names its class and field."""
    with pytest.raises(CaptureError, match=r"uses 'Typed\.bias'"):
        jit(lambda x: Typed(x=x).bias * 1)(torch.ones(2))
