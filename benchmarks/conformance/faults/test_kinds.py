"""What others get wrong with kinds of modules, stale weights and stacking: theirs is run and shown wrong, ours right.

The rows are those of a survey of torch.func (2.13) and tensordict (0.14.3). A test that fails on theirs means that
they fixed it: then the row, and the sentence in docs/differences.md, goes.
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.utils._pytree import tree_leaves

from benchmarks.conformance.faults.models import Cached
from tdfunc import (
    Ensemble,
    LeakError,
    TensorDict,
    TreeStructureError,
    UnsupportedError,
    from_module,
    functional,
    stack_modules,
)
from tests.faults.models import Branches, UsesOldFunction, constant
from tests.incumbent import Incumbent

X = torch.linspace(-1, 1, 15).reshape(5, 3)


def theirs_of(model):
    """The incumbent's tree of a module, unconnected to it."""
    return Incumbent.from_module(model).detach().clone()


# -- stale weights ------------------------------------------------------------------------------------------------


def test_a_cached_reference():
    """Both compute with the original weight, in silence."""
    model = Cached()
    expected = model(X)
    named = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert torch.equal(functional_call(model, named, (X,)), expected)
    with constant(Incumbent.from_module(model), 0.0).to_module(model):
        assert torch.equal(model(X), expected)

    apply, params, _ = functional(model)
    with pytest.raises(LeakError, match="'linear.weight'"):
        apply(constant(params, 0.0), X)


def test_meta_tensors_do_not_notice():
    """A skeleton on the meta device computes with memory that is not there; poison raises."""
    assert F.linear(X, torch.empty(2, 3, device="meta")).device.type == "cpu"

    weight = functional(nn.Linear(3, 2))[0].module.weight
    with pytest.raises(LeakError, match="'weight'"):
        F.linear(X, weight)


def test_a_parametrized_weight_by_its_own_name():
    """torch.func takes it, and then gradients cannot pass."""
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    weight = torch.ones(2, 3)
    assert functional_call(model, {"weight": weight}, (X,)).shape == (5, 2)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda w: functional_call(model, {"weight": w}, (X,)).sum())(weight)

    apply, params, _ = functional(model)
    with pytest.raises(TreeStructureError, match=r"'weight' is not one of its leaves"):
        apply(params.set("weight", weight), X)
    grads = torch.func.grad(lambda p: apply(p, X).sum())(params)
    assert grads["parametrizations", "weight", "original1"].any()


def test_cached_parametrizations():
    """torch.func uses the weight that was computed from other parameters, in silence."""
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    expected = model(X)
    named = {name: p * 3.0 for name, p in model.named_parameters()}
    with nn.utils.parametrize.cached():
        model(X)
        bias = expected - model.bias + named["bias"]
        torch.testing.assert_close(functional_call(model, named, (X,)), bias)

    apply, params, _ = functional(model)
    with nn.utils.parametrize.cached(), pytest.raises(UnsupportedError, match=r"parametrize.cached\(\)"):
        apply(params * 3.0, X)


def test_a_plain_tensor_attribute():
    """torch.func takes a name that is no parameter; ours names it as unknown."""
    model = nn.Linear(3, 2)
    model.scale = torch.ones(2)
    functional_call(model, {"scale": torch.zeros(2)}, (X,))

    apply, params, _ = functional(model)
    with pytest.raises(TreeStructureError, match="'scale'"):
        apply(params.set("scale", torch.zeros(2)), X)


# -- kinds of modules ---------------------------------------------------------------------------------------------


def test_spectral_norm_of_separate_members():
    """torch.func refuses members that were parametrized one by one; ours runs them, in training by the loop."""
    models = [nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)) for _ in range(2)]
    with pytest.raises(RuntimeError, match="same class"):
        stack_module_state(models)

    for model in models:
        # torch's own warm-up may have converged to the last bit; from here the iteration moves.
        model.parametrizations.weight[0]._u.copy_(torch.tensor([1.0, 0.0, 0.0]))
    apply, _, _ = functional(models[0])
    tree = stack_modules(models)
    out, new = Ensemble(apply).with_buffers(tree, None, X)
    before, after = (t["parametrizations", "weight", "0", "_u"] for t in (tree, new))
    torch.testing.assert_close(out, torch.stack([model(X) for model in models]))
    torch.testing.assert_close(after, torch.stack([model.parametrizations.weight[0]._u for model in models]))
    assert not torch.equal(after, before)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_weight_norm():
    """copy.deepcopy refuses the module, so that no skeleton of it can be made."""
    model = nn.utils.weight_norm(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)

    apply, params, _ = functional(model)
    torch.testing.assert_close(apply(params, X), model(X))
    assert torch.func.grad(lambda p: apply(p, X).sum())(params)["weight_g"].any()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell])
def test_recurrent_layers(kind):
    """torch.vmap has no rule for them; the ensemble runs rules of tdfunc."""
    models = [kind(3, 4) for _ in range(2)]
    params, _ = stack_module_state(models)
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(lambda p: functional_call(models[0], p, (X,)))(params)

    ensemble = Ensemble(functional(models[0])[0])
    ours = tree_leaves(ensemble(stack_modules(models), X))
    theirs = [tree_leaves(model(X)) for model in models]
    for i, leaf in enumerate(ours):
        torch.testing.assert_close(leaf, torch.stack([outs[i] for outs in theirs]))
    assert ensemble.plan().startswith("vmap")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("make", [lambda: nn.GRUCell(3, 4), lambda: nn.RNNCell(3, 4)])
def test_cells_that_vmap_can_run(make):
    """Both run them under vmap."""
    models = [make(), make()]
    params, _ = stack_module_state(models)
    theirs = torch.vmap(lambda p: functional_call(models[0], p, (X,)))(params)
    ours = Ensemble(functional(models[0])[0], "vmap")(stack_modules(models), X)
    torch.testing.assert_close(ours, theirs)


def test_lazy_modules():
    """Theirs has leaves without a shape, and no complaint."""
    theirs = Incumbent.from_module(nn.LazyLinear(2))
    assert isinstance(theirs["weight"], nn.UninitializedParameter)
    with pytest.raises(ValueError, match="uninitialized parameter"):
        stack_module_state([nn.LazyLinear(2), nn.LazyLinear(2)])

    for call in (from_module, functional, lambda m: stack_modules([m, m])):
        with pytest.raises(
            UnsupportedError, match=r"'weight' of LazyLinear is uninitialised[\s\S]*run the module once"
        ):
            call(nn.LazyLinear(2))


def test_script_modules():
    """torch.func refuses them too; theirs swaps attributes that compiled code may not read."""
    scripted = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="Jitted modules"):
        functional_call(scripted, dict(scripted.named_parameters()), (X,))
    assert set(Incumbent.from_module(scripted).keys()) == {"weight", "bias"}

    for call in (from_module, functional):
        with pytest.raises(UnsupportedError, match=r"ScriptModule[\s\S]*scripted or traced from"):
            call(scripted)


def test_compiled_modules():
    """The keys of both carry `_orig_mod`, so that no other module takes them."""
    model = torch.compile(nn.Linear(3, 2), backend="eager")
    assert "_orig_mod.weight" in dict(model.named_parameters())
    assert list(Incumbent.from_module(model).keys()) == ["_orig_mod"]

    assert list(from_module(model).keys()) == ["weight", "bias"]
    from_module(model).to_module(nn.Linear(3, 2))


def test_control_flow_and_in_place_writes():
    """A vmap cannot run them; the ensemble falls back to the loop."""
    models = [Branches(3, 2), Branches(3, 2)]
    params, _ = stack_module_state(models)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda p: functional_call(models[0], p, (X,)))(params)

    ensemble = Ensemble(functional(models[0])[0])
    torch.testing.assert_close(ensemble(stack_modules(models), X), torch.stack([model(X) for model in models]))
    assert ensemble.plan().startswith("loop")


def test_old_autograd_functions():
    """A vmap asks for setup_context; the ensemble falls back to the loop."""
    models = [UsesOldFunction(3, 2), UsesOldFunction(3, 2)]
    params, _ = stack_module_state(models)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.vmap(lambda p: functional_call(models[0], p, (X,)))(params)

    ensemble = Ensemble(functional(models[0])[0])
    torch.testing.assert_close(ensemble(stack_modules(models), X), torch.stack([model(X) for model in models]))


def test_hooks_fire():
    """Hooks fire in both, once for each call."""
    model, fired = nn.Linear(3, 2), []
    model.register_forward_hook(lambda *_: fired.append(1))
    functional_call(model, dict(model.named_parameters()), (X,))
    apply, params, _ = functional(model)
    apply(params, X)

    assert len(fired) == 2


# -- stacking -----------------------------------------------------------------------------------------------------


def members_of(*models):
    """Modules that are of one class, as torch.func asks for."""
    return [nn.Sequential(*layers) for layers in models]


def test_members_with_different_layers():
    """torch.func drops the second member's layer, and its output with it, in silence."""
    # Tanh changes every output; ReLU would leave those of some random layers as they are.
    models = members_of([nn.Linear(3, 3)], [nn.Linear(3, 3), nn.Tanh()])
    params, _ = stack_module_state(models)
    out = torch.vmap(lambda p: functional_call(models[0], p, (X,)))(params)
    assert not torch.allclose(out[1], models[1](X))

    with pytest.raises(TreeStructureError, match=r"member 1 differs from member 0 in 'modules'[\s\S]*'1'"):
        stack_modules(models)


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ([nn.Dropout(0.1), nn.Dropout(0.9)], "p"),
        ([nn.Conv1d(3, 3, 2, stride=1), nn.Conv1d(3, 3, 2, stride=2)], "stride"),
        ([nn.LayerNorm(3, eps=1e-5), nn.LayerNorm(3, eps=1.0)], "eps"),
        ([nn.ReLU().train(), nn.ReLU().eval()], "training"),
    ],
)
def test_members_with_different_hyperparameters(layers, name):
    """torch.func runs every member with the first one's hyperparameters, in silence (modes apart)."""
    models = members_of(*[[nn.Linear(3, 3), layer] for layer in layers])
    if name != "training":
        stack_module_state(models)

    with pytest.raises(TreeStructureError, match=rf"'{name}' of '1'"):
        stack_modules(models)


def test_pickled_trees():
    """Theirs cannot be loaded by torch's safe loader; ours writes a state dict that can."""
    model = nn.Linear(2, 2)
    buffer = io.BytesIO()
    torch.save(theirs_of(model), buffer)
    buffer.seek(0)
    with pytest.raises(Exception, match="[Ww]eights.only"):
        torch.load(buffer)

    buffer = io.BytesIO()
    torch.save(from_module(model).state_dict(), buffer)
    buffer.seek(0)
    loaded = TensorDict(torch.load(buffer))
    assert torch.equal(loaded["weight"], model.weight)
