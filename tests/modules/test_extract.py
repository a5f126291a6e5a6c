"""`from_module` and `split`: what a module's tree holds, in which order, with which ties and kinds."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tdfunc import Kind, TensorDict, UnsupportedError, combine, from_module, functional, split, stack_modules
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


def test_split_needs_kinds():
    """A tree of unknown kinds would be split at random."""
    with pytest.raises(UnsupportedError, match=r"does not record what its leaves are[\s\S]*partition"):
        split(TensorDict({"a": torch.zeros(1)}))


def make_quantized():
    """A layer whose weights lie packed in an object of C++."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that quantized tensors will go
        return nn.Sequential(torch.ao.nn.quantized.dynamic.Linear(2, 2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (make_quantized, r"LinearPackedParams keeps its weights packed[\s\S]*from_module\(model.head\)"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), r"ScriptModule keeps its weights[\s\S]*scripted or traced from"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))), r"ScriptModule"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), r"DataParallel copies[\s\S]*\.module"),
        (lambda: nn.LazyLinear(3), r"'weight' of LazyLinear is uninitialised[\s\S]*run the module once"),
        (lambda: nn.Sequential(nn.LazyBatchNorm1d()), r"'0.weight' of LazyBatchNorm1d is uninitialised"),
    ],
)
def test_what_has_no_tree_is_refused(make, text):
    """A module whose weights cannot be replaced would fail later, with a message about something else."""
    with pytest.raises(UnsupportedError, match=text):
        from_module(make())


@pytest.mark.parametrize("call", [functional, lambda m: stack_modules([m, m]), lambda m: TensorDict().to_module(m)])
def test_packed_weights_are_refused_everywhere(call):
    """Every member of an ensemble would have the weights of the first, and a saved tree would lack them all."""
    with pytest.raises(UnsupportedError, match=r"keeps its weights packed[\s\S]*got: +torch.ao.*LinearPackedParams"):
        call(make_quantized())


def test_a_lazy_module_that_ran_is_ordinary():
    """The fix that the message names would not help."""
    model = nn.LazyLinear(3)
    model(torch.zeros(2, 4))

    assert from_module(model)["weight"].shape == (3, 4)


def test_no_module():
    """Any object would be walked, with an AttributeError deep inside."""
    with pytest.raises(TypeError, match=r"not a module[\s\S]*torch.nn.Module[\s\S]*dict"):
        from_module({})


def test_cycles_are_refused():
    """A submodule that registers its parent would recurse without end."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].parent = model

    with pytest.raises(UnsupportedError, match=r"'0.parent' is Sequential again[\s\S]*weakref"):
        from_module(model)


def test_a_stale_norm_buffer_is_live():
    """The tree of a module would show the statistics of the time when it was made."""
    model = Norm()
    tree = from_module(model)
    model(torch.randn(4, 3))

    assert tree["norm", "num_batches_tracked"] == 1
