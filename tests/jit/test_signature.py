"""The key of a call: structure of trees, values in them, arguments that are one object, settings of the thread."""

import copy
import random
from collections import OrderedDict, defaultdict
from decimal import Decimal
from operator import is_

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import tdfunc
from tdfunc import NonTensorData, TensorDict, UnsupportedError
from tdfunc._jit import jit
from tdfunc._jit.signature import Arguments, Contexts, describe
from tdfunc.core.pytree import flatten
from tests.helpers import TiedLM, assert_trees_equal


def tree(**options):
    """Return a tree of two leaves."""
    return TensorDict({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, [2], **options)


@pytest.mark.parametrize(
    "other",
    [
        tree().with_batch_size([2, 3]),
        tree(names=["x"]),
        tree(device="cpu"),
        TensorDict({"b": torch.ones(2, 3), "a": torch.ones(2, 3)}, [2]),
        tree().set("n", "text"),
        tree().set("a", torch.ones(2, 4)),
        tree().set("a", torch.ones(2, 3, dtype=torch.float64)),
        tree().set("a", torch.ones(3, 2).t()),
        tree().rename_key("b", "c"),
        TensorDict.from_module(nn.Linear(3, 2)).detach(),
        TensorDict.from_module(TiedLM()).detach(),
    ],
)
def test_tree_data_is_in_the_key(other):
    """A trace for one tree is not replayed for another batch size, name, device, kind or key order."""
    fn = jit(lambda t: t.apply(lambda x: x * 2))
    fn(tree())

    assert_trees_equal(fn(other), fn.__wrapped__(other))
    assert fn(other).ties() == other.ties()
    assert list(fn(other).keys()) == list(other.keys())
    assert fn.cache_info().misses == 2


@pytest.mark.parametrize(
    "kind",
    [dict, OrderedDict, lambda items: defaultdict(float, items), lambda items: [dict(items)]],
    ids=["dict", "OrderedDict", "defaultdict", "dict in a list"],
)
def test_keys_and_their_order_are_in_the_key(kind):
    """A container whose keys, or their order, are others is recorded anew."""
    fn = jit(lambda given: torch.stack([x * i for x, i in zip(pytree.tree_leaves(given), (1, 3), strict=True)]))
    pairs = [("a", torch.tensor(2.0)), ("b", torch.tensor(5.0))]
    calls = [kind(items) for items in (pairs, pairs[::-1], [("c", pairs[0][1]), pairs[1]], pairs)]

    found = [fn(given) for given in calls]

    torch.testing.assert_close(found, [fn.__wrapped__(given) for given in calls], rtol=0, atol=0)
    assert fn.cache_info().misses == 3


def test_results_have_the_order_of_the_keys():
    """A dict that is made of an argument has its keys in the order of the argument."""
    pairs = [("a", torch.tensor(2.0)), ("b", torch.tensor(5.0))]
    read = lambda given: {str(key): x for key, x in given.items()}  # noqa: E731

    assert list(jit(read)(OrderedDict(pairs))) == ["a", "b"]
    assert list(jit(read)(OrderedDict(pairs[::-1]))) == ["b", "a"]


class Scaled:
    """A tensor and a number that is no leaf."""

    def __init__(self, x, scale):
        self.x, self.scale = x, scale


pytree.register_pytree_node(Scaled, lambda node: ([node.x], node.scale), lambda leaves, scale: Scaled(*leaves, scale))
ZEROS = torch.tensor([1, 2])
EQUAL = {
    "numpy": (lambda x, given: x * given, np.float32(0.0), np.float32(-0.0)),
    "a decimal": (lambda x, given: x * float(given), Decimal("0"), Decimal("-0")),
    "the key of a dict": (lambda x, given: x * next(iter(given)), {1.0: None}, {True: None}),
    "static data of a node": (lambda _, given: given.x * given.scale, Scaled(ZEROS, 1), Scaled(ZEROS, 1.0)),
    "static data in a tuple": (
        lambda _, given: given.x * given.scale[0],
        Scaled(ZEROS, (0.0,)),
        Scaled(ZEROS, (-0.0,)),
    ),
}


@pytest.mark.parametrize(("function", "first", "second"), EQUAL.values(), ids=EQUAL)
def test_values_that_are_equal_and_not_the_same_are_recorded_apart(function, first, second):
    """1 == 1.0 == True and 0.0 == -0.0, whose results have other dtypes and signs."""
    fn = jit(function)
    fn(ZEROS, first)
    found, expected = fn(ZEROS, second), function(ZEROS, second)

    assert found.dtype == expected.dtype
    assert torch.equal(found.double().signbit(), expected.double().signbit())


@pytest.mark.parametrize("make", [lambda: np.float32("nan"), lambda: np.float32(0.5), lambda: Decimal("0.5")])
def test_a_number_of_another_library_is_recorded_once(make):
    """Also nan, which does not equal itself."""
    fn = jit(lambda x, given: x * float(given))
    for _ in range(3):
        fn(torch.ones(2), make())

    assert fn.cache_info().misses == 1


def test_the_leaves_of_a_node_without_names_have_numbers():
    """Torch registers classes without names for their children."""
    with pytest.raises(UnsupportedError, match=r"argument 0\[0\] requires grad"):
        jit(lambda given: given.x * 2)(Scaled(torch.ones(2, requires_grad=True), 1))


def test_one_object_twice_comes_back_as_one():
    """An argument that is given twice is returned as the same object, recorded and replayed."""
    same, x = jit(lambda a, b: (a, b, a + b)), torch.ones(3)
    calls = [same(x, x)[:2] for _ in range(2)]

    assert [[y is x for y in pair] for pair in calls] == [[True, True], [True, True]]


def test_which_arguments_are_one_object_is_in_the_key():
    """Of three arguments, the pair that is one object is in the key."""
    fn = jit(lambda t, c: [x is c for x in t.values()])
    x, y = torch.ones(3), torch.ones(3)

    assert fn(TensorDict({"a": x, "b": y}), x) == [True, False]
    assert fn(TensorDict({"a": x, "b": y}), y) == [False, True]
    assert fn(TensorDict({"a": x, "b": x}), y) == [False, False]


def test_autocast_is_in_the_key():
    """Autocast makes a trace of its own, without a second cast."""
    fn, x = jit(lambda x: x @ x), torch.randn(4, 4)
    plain = fn(x)

    with torch.autocast("cpu", torch.bfloat16):
        low = fn(x)
        expected = x @ x
    torch.testing.assert_close(low, expected, rtol=0, atol=0)
    assert low.dtype is torch.bfloat16
    assert torch.equal(fn(x), plain)
    assert fn.cache_info().misses == 2


def test_grad_mode_is_in_the_key():
    """A trace with gradients is not replayed without them."""
    fn, x = jit(lambda x: torch.is_grad_enabled()), torch.ones(1)
    found = [fn(x)]
    with torch.no_grad():
        found.append(fn(x))
    found.append(fn(x))

    assert found == [True, False, True]
    assert fn.cache_info().misses == 2


def test_the_default_dtype_is_in_the_key():
    """A trace makes tensors of the default dtype of its call."""
    fn, x = jit(lambda x: torch.zeros(1)), torch.ones(1)
    found = [fn(x).dtype]
    torch.set_default_dtype(torch.float64)
    try:
        found.append(fn(x).dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    found.append(fn(x).dtype)

    assert found == [torch.float32, torch.float64, torch.float32]
    assert fn.cache_info().misses == 2


@pytest.mark.usefixtures("torch_defaults")
def test_deterministic_algorithms_are_in_the_key():
    """A trace with algorithms of either kind is not replayed with the other."""
    fn, x = jit(lambda x: torch.are_deterministic_algorithms_enabled()), torch.ones(1)
    found = [fn(x)]
    torch.use_deterministic_algorithms(True)
    found.append(fn(x))
    torch.use_deterministic_algorithms(False)
    found.append(fn(x))

    assert found == [False, True, False]
    assert fn.cache_info().misses == 2


@pytest.mark.usefixtures("torch_defaults")
def test_settings_make_a_trace_each():
    """Traces of one function under four settings are made beside each other, and found again."""
    fn, x = jit(lambda x: (x @ x, torch.zeros(1))), torch.randn(4, 4)
    plain = fn(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        fn(x)
    with torch.no_grad():
        fn(x)
    torch.set_default_dtype(torch.float64)
    try:
        fn(x)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True)
    fn(x)
    torch.use_deterministic_algorithms(False)

    assert torch.equal(fn(x)[0], plain)
    assert fn.cache_info().misses == 5


@pytest.fixture
def torch_defaults():
    """Put the default device and algorithms back."""
    yield
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


def test_a_region_of_autocast_follows_its_dtype():
    """A region in the function covers the same operations in the replay, and follows `torch.set_autocast_dtype`."""

    def fn(x):
        with torch.autocast("cpu"):
            low = x @ x
        return low, x @ x

    traced, x, old = jit(fn), torch.randn(4, 4), torch.get_autocast_dtype("cpu")
    dtypes, found, expected = [torch.bfloat16, torch.float16], [], []
    try:
        for dtype in dtypes:
            torch.set_autocast_dtype("cpu", dtype)
            found += [traced(x), traced(x)]
            expected += [fn(x), fn(x)]
    finally:
        torch.set_autocast_dtype("cpu", old)

    assert [low.dtype for low, _ in found[::2]] == dtypes
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("torch_defaults")
def test_the_default_device_is_in_the_key():
    """A trace made for one default device is not replayed under another."""
    fn, x = jit(lambda x: torch.zeros(2)), torch.ones(2)
    found = {"first": fn(x)}
    with torch.device("meta"):
        found["in a block"] = fn(x)
    found["after the block"] = fn(x)
    torch.set_default_device("meta")
    found["as the default"] = fn(x)
    with torch.device("cpu"):
        found["in a block inside"] = fn(x)
    torch.set_default_device(None)
    found["without a default"] = fn(x)

    assert {name: y.device.type for name, y in found.items()} == {
        "first": "cpu",
        "in a block": "meta",
        "after the block": "cpu",
        "as the default": "meta",
        "in a block inside": "cpu",
        "without a default": "cpu",
    }
    assert fn.cache_info().misses == 3


class Doubling(TorchFunctionMode):
    """Doubles what torch.exp returns."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call the function, and double the result of torch.exp."""
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.exp else out


def test_function_modes_see_the_function_itself():
    """Under a function mode the function runs, and nothing is traced."""
    fn = jit(torch.exp)
    x = torch.zeros(1)

    with Doubling():
        assert fn(x).item() == 2
        assert fn.cache_info().currsize == 0
    assert fn(x).item() == 1
    with Doubling(), torch.device("cpu"):
        assert fn(x).item() == 2


def _other_shape(tree):
    tree["a", "w"].data = torch.randn(len(tree["a", "w"]) + 1, 2)


MUTATIONS = {
    "values": lambda tree, _: tree["a", "w"].add_(1),
    "view": lambda tree, _: tree["a", "w"][0].zero_(),
    "data": lambda tree, _: _other_shape(tree),
    "strides": lambda tree, _: tree["b"].t_(),
    "trained": lambda tree, _: tree["b"].requires_grad_(not tree["b"].requires_grad),
    "list": lambda tree, _: tree["c", "names"].append("x"),
    "dict": lambda tree, _: tree["c", "box"]["k"].append(9),
    "array": lambda tree, _: tree["c", "row"].__iadd__(1),
    "forgotten": lambda _, fn: fn.cache_clear(),
    "dtype": lambda *_: torch.set_default_dtype(
        torch.float64 if torch.get_default_dtype() is torch.float32 else torch.float32
    ),
}


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_that_was_called_with_is_described_as_a_new_one(seed):
    """The note that a tree keeps from its second call on hides nothing that a user writes to what is in it."""
    rng, held = random.Random(seed), {"names": ["x"], "box": {"k": [2]}, "row": np.array([2])}
    inner = {
        "a": {"w": torch.randn(2, 2)},
        "b": torch.randn(2, 3),
        "c": {"v": torch.ones(2), **{key: NonTensorData(x) for key, x in held.items()}},
    }
    tree = TensorDict(inner)

    def fn(tree):
        rows = len(tree["c", "names"]) + len(tree["c", "box"]["k"]) + int(tree["c", "row"][0])
        return tree.apply(lambda leaf: leaf * 2), torch.zeros(rows)

    kept, other = jit(fn), jit(fn)
    mutations = {**MUTATIONS, "nothing": lambda *_: None}
    try:
        with torch.no_grad():
            for _ in range(40):
                name = rng.choice(list(mutations))
                mutations[name](tree, kept)
                if name == "forgotten":
                    other.cache_clear()
                equal = {key: NonTensorData(copy.deepcopy(x)) for key, x in held.items()}
                new = TensorDict({**tree._data, "a": TensorDict(tree["a"]._data), "c": tree["c"]._data | equal})
                got, expected = kept(tree), fn(tree)
                other(new)

                assert_trees_equal(got[0], expected[0])
                assert [key for key, x in held.items() if got[0]["c", key] is not x] == []
                assert got[1].dtype is torch.get_default_dtype()
                assert got[1].shape == expected[1].shape
                assert kept.cache_info() == other.cache_info(), name
    finally:
        torch.set_default_dtype(torch.float32)


def test_numbers_of_structures_take_bounded_memory():
    """After many structures all are forgotten, and none of their numbers is given again."""
    contexts = Contexts()
    kept = [flatten(TensorDict({str(i): torch.ones(1)}))[1] for i in range(4097)]

    assert len({contexts.number(TensorDict, context) for context in (*kept, kept[0])}) == 4098
    assert len(contexts._numbers) == 2


def test_many_live_trees_of_one_structure_are_recorded_once():
    """More trees than structures are remembered by identity: a call with each of them finds the same record."""
    fn = jit(lambda tree: tree["a"] * 2)
    trees = [TensorDict({"a": torch.ones(1)}) for _ in range(4200)]
    for tree in trees * 2:
        fn(tree)

    assert fn.cache_info().misses == 1


def make_dict(x):
    """Nested trees, and leaves between them, whose keys are not sorted."""
    return TensorDict({"w": x, "a": {"d": x, "c": {"e": x}}, "b": x + 1})


def make_named(x):
    """A batch size, names and a device."""
    return TensorDict({"z": x, "y": {"q": x}}, [2], names=["m"], device="cpu")


def make_lazy(x):
    """A stack of ragged trees."""
    return tdfunc.lazy_stack([TensorDict({"a": x}, [2]), TensorDict({"a": torch.cat([x, x], 1)}, [2])])


class Shouts:
    """A base without slots: instances of its classes have a dict."""

    def shout(self):
        """Return a word."""
        return "x!"


@tdfunc.tensorclass
class Loud(Shouts):
    """Typed fields over such a base."""

    x: torch.Tensor
    b: torch.Tensor


@pytest.mark.parametrize(
    "make", [make_dict, make_named, make_lazy, lambda x: TensorDict({"e": {}, "x": x}), lambda x: Loud(x=x, b=x + 1)]
)
def test_a_result_is_described_as_a_new_tree(make):
    """What a replay notes in its results is what the next call would find in them."""
    fn = jit(make)
    for _ in range(2):
        result = fn(torch.randn(2, 3))
    assert hasattr(result, "_note")
    noted, plain = (Arguments([], [], [], []) for _ in range(2))
    describe(fn._contexts, result, noted)
    object.__delattr__(result, "_note")
    describe(fn._contexts, result, plain)

    assert noted == plain
    assert all(map(is_, noted.nodes, plain.nodes))


def test_results_of_one_function_are_recorded_once_by_another():
    """The note of a result counts for the function that made it."""
    first, second = jit(make_dict), jit(lambda tree, x: make_dict(x + tree["a", "d"]))
    x = torch.randn(2)
    second(make_dict(x), x)
    for _ in range(3):
        assert_trees_equal(second(first(x), x), make_dict(x + x))

    assert second.cache_info().misses == 1


def test_a_tree_is_described_anew_for_each_function():
    """Functions number structures each in their own order: the note of one is not read by another."""
    x, y = TensorDict({"x": torch.ones(2)}), TensorDict({"y": torch.ones(2)})
    first, second = jit(lambda tree: tree * 2), jit(lambda tree: tree * 2)
    for _ in range(2):
        first(x), second(y)

    found = [fn(tree) for fn in (first, second) * 3 for tree in (x, x, y, y)]
    assert_trees_equal(found, [tree * 2 for _ in range(6) for tree in (x, x, y, y)])
