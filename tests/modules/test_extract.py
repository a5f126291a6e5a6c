"""`from_module` and `split`: what a module's tree holds, in which order, with which ties and kinds."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tdfunc import Kind, from_module, split
from tests.models import CASES, ResNet, Shared, Tied, WithState, make_case


@pytest.mark.parametrize("name", CASES)
def test_leaves_are_the_live_tensors_once(name):
    """Leaves are the module's own tensors, a tied one once."""
    model, _ = make_case(name)
    tree = from_module(model)
    live = [*model.parameters(), *model.buffers()]

    assert {id(leaf) for leaf in tree_leaves(tree)} == {id(t) for t in live}
    assert len(tree_leaves(tree)) == len(live)
    assert dict(model.named_parameters()).keys() <= {".".join(path) for path, _ in tree.items(True, True)}


def test_kinds_are_recorded():
    """The tree records the kind of each leaf."""
    model = WithState()
    model.register_buffer("kept", torch.zeros(1))
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    tree = from_module(model)

    assert tree._kinds == {"kept": Kind.BUFFER, "cache": Kind.NON_PERSISTENT, "_extra_state": Kind.EXTRA_STATE}
    assert tree["linear"]._kinds == {"weight": Kind.PARAMETER, "bias": Kind.PARAMETER}
    assert "cache" not in tree.state_dict()
    assert tree.state_dict()["_extra_state"] is model.state


def test_ties_are_groups_of_paths():
    """Tied weights and the weights of a shared submodule are groups of paths; equal values are not tied."""
    equal = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for p in equal.parameters():
        nn.init.zeros_(p)

    assert from_module(Tied())._ties == ((("emb", "weight"), ("out", "weight")),)
    assert from_module(Shared())._ties == (
        (("first", "weight"), ("again", "weight")),
        (("first", "bias"), ("again", "bias")),
    )
    assert from_module(equal)._ties == ()


def test_only_leaves_have_paths():
    """An absent bias, a ReLU and the wrapper of torch.compile leave no node."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), torch.compile(nn.Linear(3, 2), backend="eager"))
    model.register_buffer("absent", None)
    model.register_module("gone", None)

    assert list(from_module(model).keys(True, True)) == [("0", "weight"), ("2", "weight"), ("2", "bias")]
    assert list(from_module(nn.ModuleDict({"_orig_mod": model[0], "a": model[0]})).keys()) == ["_orig_mod", "a"]
    assert list(from_module(torch.compile(model[0], backend="eager")).keys()) == ["weight"]
    assert list(from_module(nn.ReLU()).keys()) == []


def test_a_split_is_by_kind():
    """The parameters of the module come first; the rest has its buffers and the leaves without a kind."""
    params, buffers = split(from_module(ResNet()).set("a", torch.zeros(1)))

    assert {".".join(path) for path in params.keys(True, True)} == {n for n, _ in ResNet().named_parameters()}
    assert {".".join(path) for path in buffers.keys(True, True)} == {n for n, _ in ResNet().named_buffers()} | {"a"}
