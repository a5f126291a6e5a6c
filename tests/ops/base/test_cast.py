"""`to`, `clone` and `detach`: devices, dtypes and copies of all leaves, or of each by filter."""

import pytest
import torch

from tdfunc import Kind, TensorDict, from_module, lazy_stack
from tdfunc.ops.base.cast import keeps_values
from tests.helpers import TiedLM


@pytest.fixture
def tree():
    """Leaves of two dtypes, one of them nested, and a value."""
    return TensorDict({"a": torch.ones(3), "n": {"b": torch.zeros(3, dtype=torch.long)}, "s": "x"}, [3])


def test_to_a_device(tree):
    """Every leaf is moved, the device is recorded at every node, and values stay."""
    moved = tree.to("meta")

    assert moved.device == moved["n"].device == torch.device("meta")
    assert moved["n", "b"].is_meta
    assert moved["s"] == "x"


def test_to_where_it_is(tree):
    """Nothing is copied in vain: leaves stay, and so does a tree that has recorded its device."""
    on_cpu = tree.cpu()

    assert tree.to("cpu") is not tree
    assert tree.to("cpu")["a"] is tree["a"]
    assert on_cpu.to("cpu") is on_cpu


def test_to_a_dtype(tree):
    """Every leaf is cast, with a device or without."""
    assert tree.to(torch.float64)["n", "b"].dtype is torch.float64
    assert tree.to("cpu").to("cpu", torch.float32).to(torch.float32)["n", "b"].dtype is torch.float32
    assert tree.to("cpu", torch.float16, True)["a"].dtype is torch.float16


def test_to_another(tree):
    """A tree or tensor gives its device, and a tensor its dtype."""
    assert tree.to(tree.cpu()).device == torch.device("cpu")
    assert tree.to(torch.zeros(1, dtype=torch.float64, device="meta"))["a"].dtype is torch.float64
    assert tree.to(tree) is tree


def test_to_casts_each_leaf():
    """Filters choose the dtype of each leaf, and ties and kinds stay."""
    tree = from_module(TiedLM()).detach()

    low = tree.to({"norm.*": torch.float32, Kind.PARAMETER: torch.bfloat16})

    assert low["emb", "weight"] is low["out", "weight"]
    assert low.ties() == tree.ties()
    assert low.kind(("out", "weight")) is Kind.PARAMETER
    assert low["norm", "weight"] is tree["norm", "weight"]
    assert torch.equal(low["emb", "weight"], tree["emb", "weight"].bfloat16())
    assert tree["emb", "weight"].dtype is torch.float32


def test_to_moves_each_leaf():
    """A tree whose leaves are apart has no device."""
    tree = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}, "s": "text"}, [2], device="cpu")

    apart = tree.to({"n.*": "meta", "*": torch.device("cpu")}, non_blocking=True)

    assert apart.device is None
    assert apart["n", "b"].is_meta
    assert apart["a"] is tree["a"]
    assert apart["s"] == "text"
    assert tree.to({"*": "cpu"}) is tree
    assert tree.to({"*": torch.float64}).device == torch.device("cpu")


def test_to_in_a_lazy_stack():
    """The leaves of a stack are named by their trees."""
    stack = lazy_stack([TensorDict({"x": torch.ones(n), "y": torch.ones(1)}) for n in (1, 2)])

    low = stack.to({"*.x": torch.float16, "*": torch.float64})

    assert [x.dtype for x in low["x"] + low["y"]] == [torch.float16] * 2 + [torch.float64] * 2
    assert low.batch_size == stack.batch_size


def test_clone():
    """A copy has its own memory and lets gradients through."""
    leaf = torch.ones(3, requires_grad=True)
    tree = TensorDict({"a": leaf, "b": torch.zeros(1).expand(3)}, [3])
    (tree.clone()["a"] * 2).sum().backward()

    assert leaf.grad.tolist() == [2, 2, 2]
    assert tree.clone()["b"].is_contiguous()
    assert tree.clone(recurse=False) is tree


def test_detach():
    """A detached leaf shares memory and lets no gradient through."""
    leaf = torch.ones(3, requires_grad=True)
    detached = TensorDict({"a": leaf}, [3]).detach()

    assert not detached["a"].requires_grad
    assert detached["a"].data_ptr() == leaf.data_ptr()


def test_is_shared():
    """A tree is shared if its leaves are; one without leaves, or inside vmap, is not."""
    mapped = torch.vmap(lambda x: (x, TensorDict({"a": x}).is_shared()), out_dims=(0, None))(torch.zeros(2))

    assert TensorDict({"a": torch.zeros(3).share_memory_()}).is_shared()
    assert not TensorDict({"a": torch.zeros(3)}).is_shared()
    assert not TensorDict().is_shared()
    assert not mapped[1]


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("target", INTEGERS, ids=str)
@pytest.mark.parametrize("source", INTEGERS, ids=str)
def test_casts_of_integers_that_keep_values(source, target):
    """A dtype keeps the values of another if torch promotes both to it."""
    assert keeps_values(source, target) == (torch.promote_types(source, target) is target)


@pytest.mark.parametrize(("source", "keeps"), [(torch.uint8, True), (torch.int8, False), (torch.int16, False)])
def test_casts_to_uint16_that_keep_values(source, keeps):
    """An unsigned dtype, to which torch promotes nothing, keeps the values of smaller unsigned ones."""
    assert keeps_values(source, torch.uint16) is keeps
