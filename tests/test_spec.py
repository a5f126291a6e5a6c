"""Specs: `zero` is in them, they print as torchrl's, and `load(like=)` takes them."""

import itertools

import pytest
import torch
from hypothesis import given

import tdfunc as tdf
from tdfunc import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from tdfunc.core.collection import TensorCollection
from tdfunc.core.nontensor import NonTensorBase
from tdfunc.llm import History
from tdfunc.spec import Composite, NonTensor, Unbounded
from tests.strategies import trees


def spec_of(tree):
    """The spec of a tree, node by node."""
    made = {}
    for key in tree.keys():  # noqa: SIM118 - iterating a tree gives rows
        node = tree._get(key)
        if isinstance(node, TensorCollection):
            made[(key,)] = spec_of(node)
        elif isinstance(node, NonTensorBase):
            made[(key,)] = NonTensor(node.shape, example_data=node.value)
        else:
            made[(key,)] = Unbounded(node.shape, dtype=node.dtype)
    return Composite(made, tree.batch_size)


@given(trees(ties=False))
def test_a_tree_is_in_its_spec(tree):
    """So is the tree of zeros, which has its keys, shapes and dtypes."""
    spec = spec_of(tree)
    zero = spec.zero()

    assert spec.is_in(tree)
    assert spec.is_in(zero)
    assert set(zero.paths()) == set(tree.paths())
    assert all(not leaf.any() for leaf in zero.leaves() if isinstance(leaf, torch.Tensor))
    assert not Composite({**dict(spec.items()), "no such key": Unbounded(tree.batch_size)}, tree.batch_size).is_in(tree)


@pytest.fixture
def any_length():
    """Leaves of any length, one nested."""
    return Composite({"x": Unbounded((-1, 3)), ("n", "y"): Unbounded((-1,), dtype=torch.int64)}, (-1,))


def test_sizes_of_any_length(any_length):
    """-1 takes every length."""
    assert any_length.is_in(TensorDict({"x": torch.zeros(5, 3), "n": {"y": torch.arange(5)}}, [5]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": torch.zeros(5, 4), "n": {"y": torch.arange(5)}},
        {"x": torch.zeros(5, 3), "n": {"y": torch.zeros(5)}},
        {"x": torch.zeros(5, 3)},
    ],
    ids=["size", "dtype", "missing"],
)
def test_what_a_spec_of_any_length_refuses(any_length, wrong):
    """Features, dtypes and keys are compared beside a length of -1."""
    assert not any_length.is_in(TensorDict(wrong, [5]))


def test_zero_of_any_length(any_length):
    """-1 is 1 in zero, and a spec is read by its path."""
    assert any_length.zero()["n", "y"].shape == torch.Size([1])
    assert any_length["n", "y"] == Unbounded(-1, dtype=torch.int64)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_other_lengths_are_refused(n):
    """A length that is given is compared."""
    assert not Unbounded(2).is_in(torch.zeros(n))
    assert not Unbounded(n).is_in(torch.zeros(2))


def test_what_a_spec_of_values_refuses():
    """Tensors, and values of another shape, are no values of a spec."""
    assert not NonTensor(2).is_in(torch.zeros(2))
    assert not NonTensor(2).is_in(NonTensorData("a", [3]))


@pytest.fixture
def ragged():
    """A lazy stack of a tree of one row and a tree of two."""
    rows = [{"x": torch.zeros(n), "n": {"y": torch.zeros(n, 3)}, "s": NonTensorStack(*"ab"[:n])} for n in (1, 2)]
    return lazy_stack([TensorDict(row, [i + 1]) for i, row in enumerate(rows)])


def test_ragged_trees(ragged):
    """A lazy stack is in a spec when each of its trees is in the rest."""
    assert Composite({"x": Unbounded((2, -1), "cpu", torch.float32), "s": NonTensor((2, -1))}, (2, -1)).is_in(ragged)
    assert Composite({"x": Unbounded((-1, -1)), ("n", "y"): Unbounded((-1, -1, 3))}, (-1, -1)).is_in(ragged)


@pytest.mark.parametrize(
    ("x", "batch_size"),
    [
        (Unbounded((3, -1)), (3, -1)),
        (Unbounded((2, -1), dtype=torch.int64), (2, -1)),
        (Unbounded((2, -1), "meta"), (2, -1)),
        (Unbounded((-1, -1, -1)), (-1, -1)),
    ],
    ids=["rows", "dtype", "device", "dimensions"],
)
def test_ragged_trees_of_another_kind(ragged, x, batch_size):
    """A spec of other rows, of another dtype, device or number of dimensions is not theirs."""
    assert not Composite({"x": x}, batch_size).is_in(ragged)


@pytest.mark.parametrize(
    ("spec", "taken"),
    [
        (Composite({"x": Unbounded(2, "cpu")}, 2, "cpu"), True),
        (Composite({"x": Unbounded(2, "meta")}, 2), False),
        (Composite({}, 2, "meta"), False),
        (Composite({}, 2, data_cls=TensorDict), True),
        (Composite({}, 2, data_cls=tdf.TensorClass), False),
    ],
    ids=["device", "another device of a leaf", "another device", "class", "another class"],
)
def test_devices_and_classes(spec, taken):
    """A device or class that is given is compared."""
    assert spec.is_in(TensorDict({"x": torch.zeros(2)}, [2], device="cpu")) is taken


def test_zero_is_of_the_class():
    """The class that is given is that of zero."""
    zero = Composite(
        {"role": NonTensor(2, example_data="user"), "content": NonTensor(2, example_data="")}, 2, data_cls=History
    ).zero()

    assert type(zero) is History
    assert zero.batch_size == (2,)


@pytest.fixture
def both():
    """Two specs of the same parts in another order, with other examples."""
    one = Composite({"x": Unbounded(3), "s": NonTensor(3, example_data="a")}, 3)
    return one, Composite({"s": NonTensor(3, example_data="b"), "x": Unbounded(3)}, 3)


def test_equality_and_hash(both):
    """Specs compare by their parts; examples do not count."""
    one, other = both

    assert one == other
    assert hash(one) == hash(other)


def test_keys_of_a_spec(both):
    """A spec has the keys of its parts, those of a spec inside among them."""
    one, _ = both

    assert "x" in one
    assert one.keys() == ["x", "s"]
    assert Composite({"n": one, ("n", "s"): NonTensor(3)}, 3)["n"].keys() == ["x", "s"]


def make_specs(one):
    """Specs each of which differs from all others."""
    return [
        Unbounded(3), Unbounded(3, "cpu"), Unbounded(3, dtype=torch.int8), NonTensor(3), NonTensor(2), one,
        *[Composite({}, 3, device, data_cls=cls) for device in (None, "cpu") for cls in (None, History)],
    ]  # fmt: skip


def test_specs_with_other_parts_are_unequal(both):
    """A spec is equal to itself made anew, and to no other; so is its hash."""
    specs, again = make_specs(both[0]), make_specs(both[0])
    pairs = itertools.product(enumerate(specs), enumerate(again))

    assert [(a, b) for (i, a), (j, b) in pairs if (a == b) != (i == j)] == []
    assert len({*specs, *again}) == len(specs)


def test_repr_of_a_spec():
    """The text shows shape, device and dtype."""
    assert repr(Unbounded(3, "cpu")) == "Unbounded(\n    shape=torch.Size([3]),\n    device=cpu,\n    dtype=None)"


def test_like(tmp_path):
    """A spec with dimensions of any length is what a file is compared with."""
    tdf.save(TensorDict({"x": torch.zeros(4, 2), "s": "text"}, [4]), tmp_path / "x.safetensors")

    spec = Composite({"x": Unbounded((-1, 2), dtype=torch.float32), "s": NonTensor(-1)}, -1)
    assert tdf.load(tmp_path / "x.safetensors", like=spec)["x"].shape == torch.Size([4, 2])
    with pytest.raises(tdf.LeafMismatchError, match=r"x: expected \[-1, 3\], got \[4, 2\]"):
        tdf.load(tmp_path / "x.safetensors", like=Composite({"x": Unbounded((-1, 3))}, -1))


@pytest.mark.parametrize(
    ("call", "kind", "pattern"),
    [
        (lambda: Composite({"x": 3}), TypeError, "'x' is not a spec.*got: +3"),
        (lambda: Composite({"x": Unbounded(3)}, 2), tdf.BatchSizeError, r"'x'.*\[2\].*\[3\]"),
        (lambda: Composite({"x": Unbounded(3)})["y"], tdf.MissingKeyError, "y"),
    ],
)
def test_mistakes_are_explained(call, kind, pattern):
    """The error is of this class and names what is wrong."""
    with pytest.raises(kind, match=f"(?s){pattern}"):
        call()
