"""Casting and moving leaves each to their own."""

import torch
from torch import nn

from tdfunc import Kind, TensorDict, from_module, lazy_stack


class Tied(nn.Module):
    """Two names of one weight."""

    def __init__(self):
        super().__init__()
        self.emb, self.out, self.norm = nn.Embedding(5, 4), nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.out.weight = self.emb.weight


def test_to_casts_each_leaf():
    """Mixed precision would need a map that knows paths, and lose ties and kinds."""
    tree = from_module(Tied()).detach()

    low = tree.to({"norm.*": torch.float32, Kind.PARAMETER: torch.bfloat16})

    assert low["emb", "weight"] is low["out", "weight"]
    assert low.ties() == tree.ties()
    assert low.kind(("out", "weight")) is Kind.PARAMETER
    assert low["out", "bias"].dtype is torch.bfloat16
    assert low["norm", "weight"] is tree["norm", "weight"]
    assert low["norm", "num_batches_tracked"].dtype is torch.float32
    assert torch.equal(low["emb", "weight"], tree["emb", "weight"].bfloat16())
    assert tree["emb", "weight"].dtype is torch.float32


def test_to_moves_each_leaf():
    """A tree whose leaves are apart would say that it is on one device."""
    tree = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}, "s": "text"}, [2], device="cpu")

    apart = tree.to({"n.*": "meta", "*": torch.device("cpu")}, non_blocking=True)

    assert apart.device is None
    assert apart["n", "b"].is_meta
    assert apart["a"] is tree["a"]
    assert apart["s"] == "text"
    assert tree.to({"*": "cpu"}) is tree


def test_to_in_a_lazy_stack():
    """The leaves of a stack are named by their trees."""
    stack = lazy_stack([TensorDict({"x": torch.ones(n), "y": torch.ones(1)}) for n in (1, 2)])

    low = stack.to({"*.x": torch.float16, "*": torch.float64})

    assert [x.dtype for x in low["x"] + low["y"]] == [torch.float16] * 2 + [torch.float64] * 2
    assert low.batch_size == stack.batch_size
