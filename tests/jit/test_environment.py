"""The values that a jitted function reads from outside: a replay gives those of the present call."""

import functools
import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from tdfunc import NonTensorData, TensorDict
from tdfunc._jit import jit
from tdfunc._jit.environment import freeze

SCALE, HELD = 2.0, None
X = torch.ones(1)


@dataclass(frozen=True)
class Config:
    value: object


def helper(x):
    """Scale by a global."""
    return x * SCALE


# Many of them compare equal.
ATOMS = st.sampled_from([
    0, 1, True, False, 0.0, -0.0, 1.0, math.nan, 1 + 0j, complex(1, -0.0), np.float64(0), np.float64(-0.0), np.int64(1),
    "a", b"a", None, torch.float32, torch.float64, torch.device("cpu"), range(0, 3, 2), range(0, 4, 2),
])  # fmt: skip
VALUES = st.recursive(
    st.one_of(ATOMS, ATOMS.map(Config)),
    lambda inner: st.one_of(
        *[st.lists(inner, max_size=2).map(kind) for kind in (list, tuple, deque)],
        st.dictionaries(st.sampled_from(["a", "b"]), inner),
        st.binary(max_size=2).map(bytearray),
        st.lists(st.integers(0, 2), max_size=1).map(np.array),
    ),
    max_leaves=4,
)


def nested(depth):
    """Lists in lists."""
    return functools.reduce(lambda inner, _: [inner], range(depth), 0)


@pytest.mark.parametrize(("make", "most"), [(np.zeros, 1000), (lambda n: [0] * n, 1000), (nested, 9)])
def test_large_values_count_as_objects(make, most):
    """Arrays and containers of many items, or nested deep, have one key only if they are one object."""
    assert freeze(make(most)) == freeze(make(most))
    assert freeze(make(most + 1)) != freeze(make(most + 1))


def make_argument():
    """A function whose replay spells an argument, and the one that changes the argument."""
    fn = jit(lambda x, value: repr(value))
    return fn, lambda value: fn(X, value)


def make_cell():
    """The same of a variable of a closure."""
    held = None
    fn = jit(lambda x: repr(held))

    def call(value):
        nonlocal held
        held = value
        return fn(X)

    return fn, call


def make_global():
    """The same of a global variable."""
    fn = jit(lambda x: repr(HELD))

    def call(value):
        globals()["HELD"] = value
        return fn(X)

    return fn, call


def make_contents():
    """The same of the contents of a list in a tuple, which are never another object."""
    held = ([None],)
    fn = jit(lambda x: repr(held[0][0]))

    def call(value):
        held[0][0] = value
        return fn(X)

    return fn, call


def make_default(has_keyword=True):
    """The same of a default."""
    spell = (lambda x, *, value=None: repr(value)) if has_keyword else (lambda x, value=None: repr(value))
    fn = jit(spell)

    def call(value):
        setattr(spell, *(("__kwdefaults__", {"value": value}) if has_keyword else ("__defaults__", (value,))))
        return fn(X)

    return fn, call


def make_tree():
    """The same of non-tensor data in an argument."""
    fn = jit(lambda t: repr(t["n"]))
    return fn, lambda value: fn(TensorDict({"a": X}).set("n", NonTensorData(value)))


WAYS = [make_argument, make_cell, make_global, make_contents, make_default, lambda: make_default(False), make_tree]


@pytest.mark.parametrize("make", WAYS)
@given(st.lists(VALUES, min_size=2, max_size=3))
def test_values_are_those_of_the_call(make, values):
    """A value read in any way is the present one, down to its type and sign, and the same one is found again."""
    fn, call = make()

    assert [call(value) for value in [*values, *values]] == [repr(value) for value in [*values, *values]]
    # Another object of a class of one's own is read anew, although it is equal.
    assert len({repr(value) for value in values}) <= fn.cache_info().misses <= len(values)


def test_arrays_are_read_again():
    """A numpy array that the function closes over may be written between calls."""
    array = np.ones(2, dtype=np.float32)
    fn = jit(lambda x: x + torch.as_tensor(array))
    assert fn(torch.ones(2)).tolist() == [2, 2]

    array[0] = 5
    assert fn(torch.ones(2)).tolist() == [6, 2]


@pytest.mark.parametrize("wrap", [lambda fn: fn, jit], ids=["function", "jitted"])
def test_globals_of_helpers_are_in_the_key(wrap, monkeypatch):
    """A global that a function of the same package reads, or another such function, is read at each call."""
    monkeypatch.setitem(globals(), "helper", wrap(helper))
    traced = jit(lambda x: helper(x) + 0)
    assert traced(X).item() == 2

    monkeypatch.setitem(globals(), "SCALE", 4.0)
    assert traced(X).item() == 4
    monkeypatch.setitem(globals(), "helper", lambda x: x)
    assert traced(X).item() == 1
    assert traced.cache_info().misses == 3


def test_variables_that_appear_are_in_the_key(monkeypatch):
    """A variable that is assigned later, or a global that hides a builtin, is read from then on."""

    def late(x):
        try:
            return x * LATER + local
        except NameError:
            return x * abs(-2.0)

    traced = jit(late)
    assert traced(X).item() == 2
    monkeypatch.setitem(globals(), "abs", lambda value: 9.0)
    assert traced(X).item() == 9
    monkeypatch.setitem(globals(), "LATER", 3.0)
    local = 1.0
    assert traced(X).item() == 4


def test_through_vmap_and_grad_closures():
    """The closure of a loss inside vmap(grad(loss)) is read."""
    factor = 1.0

    def loss(p):
        return (p * factor).sum()

    traced = jit(torch.vmap(torch.func.grad(loss)))
    assert traced(torch.ones(2, 3))[0, 0].item() == 1
    factor = 5.0
    assert traced(torch.ones(2, 3))[0, 0].item() == 5


def test_partials_and_methods():
    """`functools.partial`, methods and callable objects are traced; closures of methods and names of keywords count."""
    factor = 2

    class Model:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, x):
            return x * self.scale

        def double(self, x):
            return self(x) * factor

        @jit
        def decorated(self, x):
            return x + self.scale

    double, keywords = jit(Model(3).double), jit(lambda x, **kw: x * kw.get("a", 1) + kw.get("b", 0))
    assert [fn(X).item() for fn in (jit(functools.partial(lambda a, x: x + a, 3)), jit(Model(3)), double)] == [4, 3, 6]
    assert [Model(3).decorated(X).item(), Model.decorated(Model(4), X).item()] == [4, 5]
    assert [keywords(X, a=3).item(), keywords(X, b=3).item()] == [3, 4]
    factor = 3
    assert double(X).item() == 9


@pytest.mark.parametrize("hold", [lambda m: m, lambda m: [m], lambda m: {"a": (m,)}, lambda m: frozenset([m])])
def test_mode_of_modules_is_in_the_key(hold):
    """A dropout switched to eval drops no more, wherever the function finds it."""
    dropout = nn.Dropout(1.0)
    held = hold(dropout)
    fn = jit(lambda x: pytree.tree_leaves(list(held) if isinstance(held, frozenset) else held)[0](x))

    assert fn(torch.ones(2)).tolist() == [0, 0]
    dropout.eval()
    assert fn(torch.ones(2)).tolist() == [1, 1]
