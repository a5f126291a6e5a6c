"""What makes `jit` record anew: values in trees, arguments that are one object, settings of the thread, copies."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tdfunc import NonTensorData, TensorDict
from tdfunc._jit import jit


@pytest.mark.parametrize(
    ("values", "change"),
    [
        (lambda: [2], lambda v: v.__setitem__(0, 9)),
        (lambda: {"k": [2]}, lambda v: v["k"].append(9)),
        (lambda: np.array([2.0]), lambda v: v.__setitem__(0, 9)),
    ],
    ids=["list", "dict", "array"],
)
def test_changed_values_in_trees_are_read_again(values, change):
    """A trace would be replayed for a list or array in a tree that has changed since, or for one that is equal now."""

    def total(value):
        return sum(sum(v) for v in value.values()) if isinstance(value, dict) else float(sum(value))

    fn = jit(lambda t: (t["a"] * total(t["n"]), t, t.with_batch_size([1])))
    make = lambda value: TensorDict({"a": torch.ones(1)}).set("n", NonTensorData(value))  # noqa: E731
    value, later = values(), values()
    tree = make(value)
    assert fn(tree)[0].item() == 2

    change(value)
    change(later)
    assert fn(tree)[0].item() == total(value)
    assert fn(make(later))[0].item() == total(value)
    assert fn.cache_info().misses == 2
    fresh = values()
    out = fn(make(fresh))
    assert out[0].item() == 2
    assert out[1]["n"] is fresh
    assert out[2]["n"] is fresh
    assert fn.cache_info().misses == 2


@pytest.mark.parametrize(("first", "second"), [(1, True), (1, 1.0), (0.0, -0.0)])
def test_values_in_trees_that_compare_equal_are_told_apart(first, second):
    """A tree with True would be served the trace of one with 1."""
    fn = jit(lambda t: t["a"] + (1 if repr(t["n"]) == repr(first) else 2))
    make = lambda value: TensorDict({"a": torch.zeros(1)}).set("n", NonTensorData(value))  # noqa: E731

    assert fn(make(first)).item() == 1
    assert fn(make(second)).item() == 2


def test_arguments_that_are_one_object_are_in_the_key():
    """A function that asks `a is b` would be replayed for the other answer."""
    fn = jit(lambda a, b: a * 0 if a is b else a + b)
    x, y = torch.ones(3), torch.ones(3)

    assert fn(x, y).tolist() == [2, 2, 2]
    assert fn(x, x).tolist() == [0, 0, 0]
    assert fn(y, y).tolist() == [0, 0, 0]
    assert fn(y, x).tolist() == [2, 2, 2]
    assert fn.cache_info().misses == 2


def test_which_arguments_are_one_object_is_in_the_key():
    """Of three arguments, another two being the same would not be seen."""
    fn = jit(lambda t, c: [x is c for x in t.values()])
    x, y = torch.ones(3), torch.ones(3)

    assert fn(TensorDict({"a": x, "b": y}), x) == [True, False]
    assert fn(TensorDict({"a": x, "b": y}), y) == [False, True]
    assert fn(TensorDict({"a": x, "b": x}), y) == [False, False]


def test_one_object_given_twice_comes_back_as_one():
    """A replay would give other objects than the function where an argument is given twice."""
    fn = jit(lambda a, b: (a, b, a + b))
    x = torch.ones(3)

    for _ in range(2):
        first, second, total = fn(x, x)
        assert first is x
        assert second is x
        assert total.tolist() == [2, 2, 2]


@pytest.fixture
def torch_defaults():
    """Put the default device and algorithms back."""
    yield
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("torch_defaults")
def test_the_default_device_is_in_the_key():
    """A trace made for one default device would make its tensors there under another."""
    fn = jit(lambda x: torch.zeros(2))
    x = torch.ones(2)
    assert fn(x).device.type == "cpu"

    with torch.device("meta"):
        assert fn(x).device.type == "meta"
    assert fn(x).device.type == "cpu"
    torch.set_default_device("meta")
    assert fn(x).device.type == "meta"
    with torch.device("cpu"):
        assert fn(x).device.type == "cpu"
    torch.set_default_device(None)
    assert fn(x).device.type == "cpu"
    assert fn.cache_info().misses == 3


@pytest.mark.usefixtures("torch_defaults")
def test_deterministic_algorithms_are_in_the_key():
    """A function that asks for them would get the answer of its first call."""
    fn = jit(lambda x: (x, torch.are_deterministic_algorithms_enabled()))
    assert fn(torch.ones(1))[1] is False

    torch.use_deterministic_algorithms(True)
    assert fn(torch.ones(1))[1] is True
    torch.use_deterministic_algorithms(False)
    assert fn(torch.ones(1))[1] is False


class Doubling(TorchFunctionMode):
    """Doubles what torch.exp returns."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call the function, and double the result of torch.exp."""
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.exp else out


def test_function_modes_see_the_function_itself():
    """A mode would be baked into the trace, or see aten operations in place of the user's calls."""
    fn = jit(torch.exp)
    x = torch.zeros(1)

    with Doubling():
        assert fn(x).item() == 2
        assert fn.cache_info().currsize == 0
    assert fn(x).item() == 1
    with Doubling(), torch.device("cpu"):
        assert fn(x).item() == 2


@pytest.mark.parametrize("wrap", [lambda v: (v,), lambda v: ((1, v),), lambda v: {"k": v}, lambda v: [v]])
def test_what_a_closure_s_container_holds_may_change(wrap):
    """A trace would be replayed after a list inside a tuple, which is itself never another one, has changed."""
    inner = [2.0]
    held = wrap(inner)

    @jit
    def fn(x):
        return x * inner_of(held)

    assert fn(torch.ones(())).item() == 2
    assert fn(torch.ones(())).item() == 2
    inner[0] = 5.0
    assert fn(torch.ones(())).item() == 5
    assert fn.cache_info().misses == 2


def inner_of(value):
    """The first number in nested containers."""
    while not isinstance(value, float):
        value = list(value.values())[-1] if isinstance(value, dict) else value[-1]
    return value


def test_a_frozen_set_holds_modules_that_change_their_mode():
    """A trace of training would be replayed in evaluation: the set is the same, and so are the modules in it."""
    held = frozenset([torch.nn.Dropout(0.5)])
    fn = jit(lambda x: x * (1 if next(iter(held)).training else 3))

    assert fn(torch.ones(())).item() == 1
    next(iter(held)).eval()
    assert fn(torch.ones(())).item() == 3


class Scaling(nn.Module):
    """A module that keeps a jitted method of its own."""

    def __init__(self):
        super().__init__()
        self.scale = 2
        self.fast = jit(self.scaled)

    def scaled(self, x):
        """Scale by an attribute."""
        return x * self.scale


def test_deep_copies():
    """A copied module would be refused for the lock of its jitted method, or call the method of the original."""
    held = Scaling()
    x = torch.arange(3.0)
    held.fast(x)

    twin = copy.deepcopy(held)
    twin.scale = 5

    assert twin.fast(x).tolist() == [0.0, 5.0, 10.0]
    assert held.fast(x).tolist() == [0.0, 2.0, 4.0]
    plain = jit(torch.sin)
    assert copy.deepcopy(plain)(x).tolist() == plain(x).tolist()
