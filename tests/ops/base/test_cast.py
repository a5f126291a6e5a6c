"""`to`, `clone` and `detach`: devices, dtypes and copies of all leaves, or of each by filter."""

import itertools

import torch

from tdfunc import Kind, TensorDict, from_module, lazy_stack
from tdfunc.ops.base.cast import keeps_values
from tests.helpers import TiedLM


def test_to():
    """Every leaf is moved and cast, the device is recorded at every node, and nothing is copied in vain."""
    tree = TensorDict({"a": torch.ones(3), "n": {"b": torch.zeros(3, dtype=torch.long)}, "s": "x"}, [3])

    assert tree.to("meta").device == tree.to("meta")["n"].device == torch.device("meta")
    assert tree.to("meta")["n", "b"].is_meta
    assert tree.to(torch.float64)["n", "b"].dtype is torch.float64
    assert tree.to("cpu") is not tree
    assert tree.to("cpu")["a"] is tree["a"]
    assert tree.to("cpu").to("cpu", torch.float32).to(torch.float32)["n", "b"].dtype is torch.float32
    on_cpu = tree.cpu()
    assert on_cpu.to("cpu") is on_cpu
    assert tree.to(on_cpu).device == torch.device("cpu")
    assert tree.to(torch.zeros(1, dtype=torch.float64, device="meta"))["a"].dtype is torch.float64
    assert tree.to("cpu", torch.float16, True)["a"].dtype is torch.float16
    assert tree.to(tree) is tree
    assert tree.to("meta")["s"] == "x"


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


def test_clone_and_detach():
    """A copy has its own memory and lets gradients through; a detached leaf shares memory and has none."""
    leaf = torch.ones(3, requires_grad=True)
    tree = TensorDict({"a": leaf, "b": torch.zeros(1).expand(3)}, [3])
    (tree.clone()["a"] * 2).sum().backward()

    assert leaf.grad.tolist() == [2, 2, 2]
    assert tree.clone()["b"].is_contiguous()
    assert not tree.detach()["a"].requires_grad
    assert tree.detach()["a"].data_ptr() == leaf.data_ptr()
    assert tree.clone(recurse=False) is tree
    assert TensorDict({"a": torch.zeros(3).share_memory_()}).is_shared()
    assert not any(each.is_shared() for each in (tree, TensorDict()))
    assert not any(torch.vmap(lambda x: (x, TensorDict({"a": x}).is_shared()), out_dims=(0, None))(torch.zeros(2))[1:])


def test_casts_of_integers_that_keep_values():
    """A dtype keeps the values of another if torch promotes both to it."""
    dtypes = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]

    for source, target in itertools.product(dtypes, dtypes):
        assert keeps_values(source, target) == (torch.promote_types(source, target) is target)
    assert [keeps_values(source, torch.uint16) for source in dtypes[:3]] == [True, False, False]
