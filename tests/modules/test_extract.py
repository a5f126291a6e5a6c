"""`from_module` and `split`: what a module's tree holds, in which order, with which ties and kinds."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tdfunc import Kind, TensorDict, combine, from_module, split
from tests.models import CASES, Norm, ResNet, Shared, Tied, WithState, make_case, make_mlp


@pytest.mark.parametrize("name", CASES)
def test_state_dict_is_the_modules(name):
    """A state dict of the tree would lack keys or aliases, come in another order, or hold other tensors."""
    model, _ = make_case(name)
    ours, theirs = from_module(model).state_dict(), model.state_dict()

    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    model.load_state_dict(ours)


@pytest.mark.parametrize("name", CASES)
def test_leaves_are_the_live_tensors_once(name):
    """A leaf would be a copy, or a tied one would be counted twice."""
    model, _ = make_case(name)
    tree = from_module(model)
    live = [*model.parameters(), *model.buffers()]

    assert {id(leaf) for leaf in tree_leaves(tree)} == {id(t) for t in live}
    assert len(tree_leaves(tree)) == len(live)
    assert dict(model.named_parameters()).keys() <= {".".join(path) for path in map(as_path, tree.keys(True, True))}


def as_path(key):
    """A key of a nested view as a tuple."""
    return key if isinstance(key, tuple) else (key,)


def test_order_is_that_of_registration():
    """Keys would come sorted, so that a state dict and an optimizer's state would be permuted."""
    model = nn.Module()
    model.register_parameter("z", nn.Parameter(torch.zeros(1)))
    model.register_buffer("b", torch.zeros(1))
    model.register_parameter("a", nn.Parameter(torch.zeros(2)))

    assert list(from_module(model).keys()) == ["z", "a", "b"]


def test_kinds_are_recorded():
    """split, state_dict and filters could not tell parameters from buffers."""
    model = WithState()
    model.register_buffer("kept", torch.zeros(1))
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    tree = from_module(model)

    assert tree._kinds == {"kept": Kind.BUFFER, "cache": Kind.NON_PERSISTENT, "_extra_state": Kind.EXTRA_STATE}
    assert tree["linear"]._kinds == {"weight": Kind.PARAMETER, "bias": Kind.PARAMETER}
    assert "cache" not in tree.state_dict()
    assert tree.state_dict()["_extra_state"] is model.state


def test_ties_are_groups_of_paths():
    """Tied weights and the weights of a shared submodule would become independent leaves."""
    assert from_module(Tied())._ties == ((("emb", "weight"), ("out", "weight")),)
    assert from_module(Shared())._ties == (
        (("first", "weight"), ("again", "weight")),
        (("first", "bias"), ("again", "bias")),
    )


def test_equal_values_are_no_tie():
    """Two layers initialised to zero would be tied."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for p in model.parameters():
        nn.init.zeros_(p)

    assert from_module(model)._ties == ()


def test_none_slots_and_empty_modules_are_left_out():
    """An absent bias or a ReLU would be an empty node, and the tree would fit no other module."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    model.register_buffer("absent", None)

    assert list(from_module(model).keys(True, True)) == [("0", "weight")]
    assert list(from_module(nn.ReLU()).keys()) == []


def test_classmethod_is_the_function():
    """`TensorDict.from_module` would be another function than `from_module`."""
    model = make_mlp()

    assert TensorDict.from_module(model)["0", "weight"] is model[0].weight


def test_compiled_modules_are_unwrapped():
    """Keys would carry torch.compile's `_orig_mod`, at the root and inside."""
    inner = nn.Linear(3, 2)
    keys = [("weight",), ("bias",)]

    assert list(map(as_path, from_module(torch.compile(inner, backend="eager")).keys(True, True))) == keys
    assert list(from_module(nn.Sequential(torch.compile(inner, backend="eager"))).keys(True, True)) == [
        ("0", *key) for key in keys
    ]


def test_split_and_combine_are_inverse():
    """A buffer would be trained, or lost, or values would change on the way."""
    tree = from_module(ResNet())
    params, buffers = split(tree)

    assert {".".join(path) for path in params.keys(True, True)} == {n for n, _ in ResNet().named_parameters()}
    assert {".".join(path) for path in buffers.keys(True, True)} == {n for n, _ in ResNet().named_buffers()}
    whole = combine(params, buffers)
    assert set(whole.keys(True, True)) == set(tree.keys(True, True))
    assert all(whole[path] is tree[path] for path in tree.keys(True, True))


def test_a_stale_norm_buffer_is_live():
    """The tree of a module would show the statistics of the time when it was made."""
    model = Norm()
    tree = from_module(model)
    model(torch.randn(4, 3))

    assert tree["norm", "num_batches_tracked"] == 1
