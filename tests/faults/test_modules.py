"""Modules and ensembles without the faults of torch.func and tensordict that no other test here asserts.

`benchmarks/conformance/faults/` shows each fault by a test of the same name.
"""

import io

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import tdfunc
from tdfunc import (
    Ensemble,
    TensorDict,
    TieError,
    TreeStructureError,
    UnsupportedError,
    from_module,
    functional,
    stack_modules,
)
from tests.faults.models import Branches, UsesOldFunction
from tests.models import Norm, Shared

X = torch.linspace(-1, 1, 15).reshape(5, 3)


# -- trees that do not fit ----------------------------------------------------------------------------------------


def test_order_after_a_part_is_loaded():
    """A load of some leaves keeps the order of the module's Parameters, on which an optimizer's state relies."""
    model = nn.Linear(2, 2)

    TensorDict({"weight": torch.zeros(2, 2)}).to_module(model, strict=False)

    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]


def from_file(tree, folder):
    """The tree after a save and a load."""
    tdfunc.save(tree, folder / "file.safetensors")
    return tdfunc.load(folder / "file.safetensors")


def from_folder(tree, folder):
    """The tree on mapped files, loaded."""
    tree.detach().memmap(folder / "folder")
    return TensorDict.load_memmap(folder / "folder")


@pytest.mark.parametrize("round_trip", [from_file, from_folder])
def test_memory_mapped_weights(round_trip, tmp_path):
    """A saved tree, from a file or a memory-mapped folder, loads into a module as Parameters."""
    model, other = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
    round_trip(from_module(model), tmp_path).to_module(other)

    assert torch.equal(other(X), model(X))
    assert [name for name, p in other.named_parameters() if not isinstance(p, nn.Parameter)] == []


# -- derivatives --------------------------------------------------------------------------------------------------


def test_reverse_mode_and_hessian():
    """A hessian passes through a block."""
    model = nn.Linear(3, 1)
    tree = from_module(model).detach()

    def run(weight):
        with tree.set("weight", weight).to_module(model):
            return model(X).square().sum()

    torch.testing.assert_close(torch.func.hessian(run)(tree["weight"])[0, :, 0], 2 * X.T @ X)


def test_gradients_to_what_a_leaf_was_computed_from():
    """A block binds the leaves themselves, so gradients reach their sources."""
    model = nn.Linear(2, 1)
    source = torch.ones(1, 2, requires_grad=True)
    named = {"weight": source * 2, "bias": torch.zeros(1)}

    with TensorDict(named).to_module(model):
        assert model.bias is named["bias"]
        assert model.weight is named["weight"]
        out = model(torch.ones(1, 2)).sum()

    assert torch.autograd.grad(out, source)[0].tolist() == [[2.0, 2.0]]


# -- buffers and randomness ---------------------------------------------------------------------------------------


def counts(tree):
    """The counts of batches that a norm has seen."""
    return tree["norm", "num_batches_tracked"].tolist()


def test_writes_to_buffers_under_vmap():
    """A block under vmap does not write to the stacked tree."""
    models = [Norm(), Norm()]
    tree = stack_modules(models)

    def run(tree):
        with tree.to_module(models[0]):
            return models[0](X)

    torch.vmap(run)(tree)
    assert counts(tree) == [0, 0]


def test_batch_norm_with_a_cumulative_average():
    """An ensemble of norms whose average vmap cannot compute is equal to each member."""
    models = [Norm(momentum=None), Norm(momentum=None)]

    out, new = Ensemble(functional(models[0])[0]).with_buffers(stack_modules(models), None, X)
    torch.testing.assert_close(out, torch.stack([model(X) for model in models]))
    means = torch.stack([model.norm.running_mean for model in models])
    torch.testing.assert_close(new["norm", "running_mean"], means)


# -- ties ---------------------------------------------------------------------------------------------------------


def test_shared_submodule():
    """A layer under two names is one: a value set at either is that of both, and two values raise."""
    model = Shared()
    tree = from_module(model).set(("again", "weight"), torch.full((3, 3), 7.0))
    first = dict(model.first.named_parameters())
    other = {"weight": torch.ones(3, 3), "bias": first["bias"]}

    assert (tree["first", "weight"] == 7.0).all()
    with tree.to_module(model):
        assert (model.again.weight == 7.0).all()
    with pytest.raises(TieError, match=r"'first.weight' and 'again.weight'"):
        TensorDict({"first": first, "again": other}).to_module(model)


# -- trees of a module --------------------------------------------------------------------------------------------


def test_registered_names_that_collide():
    """Names that differ only by how they are joined are three leaves."""
    assert len(tree_leaves(TensorDict({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(2), "a_b": torch.ones(3)}))) == 3


def test_pickled_trees():
    """A state dict of a tree goes through torch's safe loader."""
    model, buffer = nn.Linear(2, 2), io.BytesIO()
    torch.save(from_module(model).state_dict(), buffer)
    buffer.seek(0)

    assert torch.equal(TensorDict(torch.load(buffer))["weight"], model.weight)


# -- stale weights ------------------------------------------------------------------------------------------------


def test_a_parametrized_weight_by_its_own_name():
    """A parametrized module takes its original weights only, and gradients reach them."""
    apply, params, _ = functional(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))

    with pytest.raises(TreeStructureError, match="'weight'"):
        apply(params.set("weight", torch.ones(2, 3)), X)
    grads = torch.func.grad(lambda p: apply(p, X).sum())(params)
    assert grads["parametrizations", "weight", "original1"].any()


# -- kinds of modules ---------------------------------------------------------------------------------------------


def test_spectral_norm_of_separate_members():
    """Members that were parametrized one by one run in training, and their iteration moves as alone."""
    models = [nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)) for _ in range(2)]
    for model in models:
        # torch's own warm-up may have converged to the last bit; from here the iteration moves.
        model.parametrizations.weight[0]._u.copy_(torch.tensor([1.0, 0.0, 0.0]))
    tree = stack_modules(models)

    out, new = Ensemble(functional(models[0])[0]).with_buffers(tree, None, X)

    before, after = (t["parametrizations", "weight", "0", "_u"] for t in (tree, new))
    torch.testing.assert_close(out, torch.stack([model(X) for model in models]))
    torch.testing.assert_close(after, torch.stack([model.parametrizations.weight[0]._u for model in models]))
    assert not torch.equal(after, before)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_weight_norm():
    """A module that copy.deepcopy refuses has a function and gradients."""
    model = nn.utils.weight_norm(nn.Linear(3, 2))
    apply, params, _ = functional(model)

    torch.testing.assert_close(apply(params, X), model(X))
    assert torch.func.grad(lambda p: apply(p, X).sum())(params)["weight_g"].any()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell, Branches, UsesOldFunction])
def test_modules_that_vmap_may_not_run(kind):
    """Recurrent layers, writes in place, data-dependent code and old functions run in an ensemble, as alone."""
    models = [kind(3, 4) for _ in range(2)]

    ours = tree_leaves(Ensemble(functional(models[0])[0])(stack_modules(models), X))

    expected = zip(*[tree_leaves(model(X)) for model in models], strict=True)
    torch.testing.assert_close(ours, [torch.stack(outs) for outs in expected])


@pytest.mark.parametrize(
    "call",
    [from_module, functional, lambda m: stack_modules([m, m])],
    ids=["from_module", "functional", "stack_modules"],
)
def test_lazy_modules(call):
    """Parameters without a shape raise with the remedy."""
    with pytest.raises(UnsupportedError, match=r"'weight'[\s\S]*run the module once"):
        call(nn.LazyLinear(2))


@pytest.mark.parametrize("call", [from_module, functional])
def test_script_modules(call):
    """A scripted module raises with the remedy."""
    scripted = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises(UnsupportedError, match=r"ScriptModule[\s\S]*scripted or traced from"):
        call(scripted)
