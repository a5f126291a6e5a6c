"""What others get wrong with modules, buffers and stacking: each test runs theirs, shows it wrong, and ours right.

The rows are those of a survey of torch.func (2.13) and tensordict (0.14.3). A test that fails on theirs means that
they fixed it: then the row, and the sentence in docs/differences.md, goes.
"""

import copy
import math
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.utils._pytree import tree_leaves

import tdfunc
from benchmarks.conformance.faults.models import Meeting, fail_inside, holding, run_in_two_threads, weight_of
from tdfunc import (
    ConcurrencyError,
    Ensemble,
    ImmutableError,
    LeafMismatchError,
    TensorDict,
    TieError,
    TreeStructureError,
    from_module,
    functional,
    stack_modules,
)
from tests.faults.models import constant
from tests.incumbent import Incumbent, tensordict
from tests.models import Norm, Shared, Tied, make_gpt2, make_mlp

X = torch.linspace(-1, 1, 15).reshape(5, 3)


def theirs_of(model):
    """The incumbent's tree of a module, unconnected to it."""
    return Incumbent.from_module(model).detach().clone()


def flat(tree):
    """Leaves by dotted path."""
    return {".".join(path): leaf for path, leaf in tree.items(True, True)}


# -- swapping: exceptions, nesting, generators, threads -----------------------------------------------------------


def test_exception_in_the_body():
    """Theirs leaves the module with the tree's weights, and the optimizer with orphans."""
    model = nn.Linear(2, 2)
    original = model.weight
    with pytest.raises(ValueError, match="inside"):
        fail_inside(constant(Incumbent.from_module(model), 0.0), model, ValueError)
    assert model.weight is not original
    assert weight_of(model) == 0.0

    model.weight = original
    with pytest.raises(ValueError, match="inside"):
        fail_inside(constant(from_module(model), 0.0), model, ValueError)
    assert model.weight is original


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, SystemExit])
def test_base_exception_in_the_body(error):
    """Theirs replaces the user's exception by one about converting a tensordict to a boolean."""
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="[Cc]onverting a tensordict to boolean"):
        fail_inside(constant(Incumbent.from_module(model), 0.0), model, error)

    original = model.weight
    with pytest.raises(error):
        fail_inside(constant(from_module(model), 0.0), model, error)
    assert model.weight is original


def inner_weights(tree_type):
    """The weight seen in an outer block after an inner one raised."""
    model = nn.Linear(2, 2)
    trees = [constant(tree_type.from_module(model), value) for value in (1.0, 2.0)]
    with trees[0].to_module(model):
        with pytest.raises(ValueError, match="inside"):
            fail_inside(trees[1], model, ValueError)
        return weight_of(model)


def test_exception_in_a_nested_block():
    """Theirs leaves the outer block with the inner one's weights."""
    assert inner_weights(Incumbent) == 2.0
    assert inner_weights(TensorDict) == 1.0


def test_nested_blocks():
    """Both restore nested blocks that do not raise."""
    for tree_type in (Incumbent, TensorDict):
        model = nn.Linear(2, 2)
        original = weight_of(model)
        outer, inner = (constant(tree_type.from_module(model), value) for value in (1.0, 2.0))
        with outer.to_module(model):
            with inner.to_module(model):
                assert weight_of(model) == 2.0
            assert weight_of(model) == 1.0
        assert weight_of(model) == original


def interleave(tree_type):
    """Run two generators in turns on one module; return the weights that they met, and the module's at both ends."""
    model = nn.Linear(2, 2)
    before, seen, errors = weight_of(model), [], []
    runs = [holding(constant(tree_type.from_module(model), value), model, seen) for value in (0.0, 1.0)]
    for _ in range(3):
        for run in runs:
            try:
                next(run, None)
            except ConcurrencyError as err:
                errors.append(err)
    return seen, errors, before, weight_of(model)


def test_interleaved_generators():
    """Theirs shows each the other's weights and never restores the module, without an error."""
    seen, errors, before, after = interleave(Incumbent)
    assert seen == [0.0, 1.0, 1.0, 1.0]
    assert not errors
    assert after != before

    _, errors, before, after = interleave(TensorDict)
    assert after == before
    assert len(errors) == 2


def in_a_block(tree, model):
    """The model run in a block."""
    with tree.to_module(model):
        return model(torch.ones(1, 3))


@pytest.mark.parametrize("theirs", ["torch.func", "tensordict"])
def test_two_threads(theirs):
    """Theirs mix up two threads' weights without an exception, ours gives each its own."""
    barrier = threading.Barrier(2)
    model = Meeting(lambda: barrier.wait(10))
    named = [{"linear.weight": torch.full((1, 3), value)} for value in (1.0, 2.0)]
    trees = [Incumbent(tree, []).unflatten_keys(".") for tree in named]
    calls = {
        "torch.func": lambda i: functional_call(model, named[i], (torch.ones(1, 3),)),
        "tensordict": lambda i: in_a_block(trees[i], model),
    }
    results = [out.item() for out in run_in_two_threads(calls[theirs])]
    assert results != [3.0, 6.0]

    model = Meeting(lambda: barrier.wait(10))
    apply, params, _ = functional(model)
    ours = run_in_two_threads(lambda i: apply(constant(params, i + 1.0), torch.ones(1, 3)))
    assert [out.item() for out in ours] == [3.0, 6.0]


def test_two_threads_in_one_block():
    """Where the module itself is shared, a block of a second thread raises."""
    model = nn.Linear(2, 2)
    tree = constant(from_module(model), 0.0)
    with tree.to_module(model):
        errors = run_in_two_threads(lambda i: pytest.raises(ConcurrencyError, tree.to_module, model))

    assert all("another thread" in str(error.value) for error in errors)


# -- swapping: trees that do not fit ------------------------------------------------------------------------------


def test_unknown_key_half_way():
    """Theirs notices after other leaves are in, and leaves the module half swapped."""
    model = make_mlp()
    originals = list(model.parameters())
    tree = constant(Incumbent.from_module(model), 0.0)
    tree.unlock_()
    tree["3", "nope"] = torch.zeros(1)
    with pytest.raises(KeyError, match="nope"):
        tree.to_module(model)
    assert any(a is not b for a, b in zip(originals, model.parameters(), strict=False))

    model = make_mlp()
    originals = list(model.parameters())
    with pytest.raises(TreeStructureError, match="'3.nope'"):
        constant(from_module(model), 0.0).set(("3", "nope"), torch.zeros(1)).to_module(model)
    assert all(a is b for a, b in zip(originals, model.parameters(), strict=True))


def test_missing_extra_and_misshapen_keys():
    """torch.func takes all three in silence; with theirs a wrong shape and a missing key are silent."""
    model = nn.Linear(2, 2)
    apply, params, _ = functional(model)
    x = torch.ones(1, 2)
    wide = {"weight": torch.zeros(7, 2), "bias": torch.zeros(7)}
    assert functional_call(model, {"weight": torch.zeros(2, 2)}, (x,)).shape == (1, 2)
    assert functional_call(model, {"weight": torch.zeros(2, 2), "nope": x}, (x,)).shape == (1, 2)
    assert functional_call(model, wide, (x,)).shape == (1, 7)
    for tree in (Incumbent({"weight": torch.zeros(2, 2)}, []), Incumbent(wide, [])):
        other = copy.deepcopy(model)
        with tree.to_module(other):
            assert other(x).shape[0] == 1

    for call in (lambda tree: apply(tree, x), lambda tree: tree.to_module(model)):
        with pytest.raises(TreeStructureError, match="bias"):
            call(params.delete("bias"))
        with pytest.raises(TreeStructureError, match="nope"):
            call(params.set("nope", x))
        with pytest.raises(LeafMismatchError, match=r"'weight'[\s\S]*\(2, 2\)[\s\S]*\(7, 2\)"):
            call(TensorDict(wide))


def test_wrong_shapes_for_good():
    """Theirs loads a weight of another shape for good, in silence."""
    model = nn.Linear(2, 2)
    Incumbent({"weight": torch.zeros(7, 5), "bias": torch.zeros(2)}, []).to_module(model)
    assert model.weight.shape == (7, 5)

    with pytest.raises(LeafMismatchError, match=r"\(7, 5\)"):
        TensorDict({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}).to_module(model)


def test_order_after_a_part_is_loaded():
    """Theirs moves the loaded names to the end, which permutes an optimizer's state."""
    model = nn.Linear(2, 2)
    Incumbent({"weight": torch.zeros(2, 2)}, []).to_module(model)
    assert [name for name, _ in model.named_parameters()] == ["bias", "weight"]

    model = nn.Linear(2, 2)
    TensorDict({"weight": torch.zeros(2, 2)}).to_module(model, strict=False)
    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]


def test_memory_mapped_weights(tmp_path):
    """The incumbent's own recipe for loading a saved tree raises, and leaves the module without its weight."""
    model = nn.Sequential(nn.Linear(3, 2))
    theirs_of(model).memmap(tmp_path / "theirs")
    with pytest.raises(RuntimeError, match="MemoryMappedTensor"):
        Incumbent.load_memmap(tmp_path / "theirs").to_module(model)
    with pytest.raises(AttributeError, match="weight"):
        model(X)

    model = nn.Sequential(nn.Linear(3, 2))
    other = nn.Sequential(nn.Linear(3, 2))
    tdfunc.save(from_module(model), tmp_path / "ours.safetensors")
    tdfunc.load(tmp_path / "ours.safetensors").to_module(other)
    assert torch.equal(other(X), model(X))
    assert all(isinstance(p, nn.Parameter) for p in other.parameters())


# -- derivatives --------------------------------------------------------------------------------------------------


def jvp_in_a_block(tree, tangent, model):
    """The directional derivative of a sum through a block, by a dual level."""
    with torch.autograd.forward_ad.dual_level():
        dual = tree.apply(lambda p: torch.autograd.forward_ad.make_dual(p, torch.ones_like(p)))
        with dual.to_module(model):
            return torch.autograd.forward_ad.unpack_dual(model(X).sum()).tangent


def test_forward_mode():
    """Theirs wraps leaves into Parameters, which drops their tangents: the derivative is missing."""
    model = make_mlp()
    apply, params, _ = functional(model)
    expected = torch.func.jvp(
        lambda p: functional_call(model, p, (X,)).sum(),
        (flat(params),),
        ({name: torch.ones_like(p) for name, p in flat(params).items()},),
    )[1]
    assert jvp_in_a_block(theirs_of(model), None, model) is None

    torch.testing.assert_close(jvp_in_a_block(params, None, model), expected)
    ours = torch.func.jvp(lambda p: apply(p, X).sum(), (params,), (params.apply(torch.ones_like),))[1]
    torch.testing.assert_close(ours, expected)


def test_reverse_mode_and_hessian():
    """Both are right for grad and hessian through a block."""
    model = nn.Linear(3, 1)
    tree = from_module(model).detach()

    def run(tree):
        with tree.to_module(model):
            return model(X).square().sum()

    weight = tree["weight"]
    ours = torch.func.hessian(lambda w: run(tree.set("weight", w)))(weight)
    theirs = torch.func.hessian(lambda w: run(Incumbent({"weight": w, "bias": tree["bias"]}, [])))(weight)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours[0, :, 0], 2 * X.T @ X)


def test_gradients_to_what_a_leaf_was_computed_from():
    """0.14.0 of theirs cut them, 0.14.3 does not: tensors without a gradient it still wraps into new Parameters."""
    model = nn.Linear(2, 1)
    source = torch.ones(1, 2, requires_grad=True)
    named = {"weight": source * 2, "bias": torch.zeros(1)}
    for tree in (Incumbent(named, []), TensorDict(named)):
        with tree.to_module(model):
            out = model(torch.ones(1, 2)).sum()
        assert torch.autograd.grad(out, source, retain_graph=True)[0].tolist() == [[2.0, 2.0]]

    # What is bound is no longer the leaf: a gradient with respect to it, asked for inside, has nothing to reach.
    with Incumbent(named, []).to_module(model):
        assert model.bias is not named["bias"]
    with TensorDict(named).to_module(model):
        assert model.bias is named["bias"]
        assert model.weight is named["weight"]


# -- buffers ------------------------------------------------------------------------------------------------------


def stacked_norm():
    """Two norms, their stacked state by dotted name, and their trees stacked."""
    models = [Norm(), Norm()]
    params, buffers = stack_module_state(models)
    return models, params, buffers, stack_modules(models)


def test_batch_norm_of_stacked_members():
    """torch.func is right in its output, and writes the new statistics into the caller's tensors."""
    models, params, buffers, tree = stacked_norm()
    torch.vmap(lambda p, b: functional_call(models[0], (p, b), (X,)))(params, buffers)
    assert buffers["norm.num_batches_tracked"].tolist() == [1, 1]

    apply, _, _ = functional(models[0])
    p, b = tdfunc.split(tree)
    out, new = torch.vmap(lambda p, b: apply.with_buffers(p, b, X))(p, b)
    assert b["norm", "num_batches_tracked"].tolist() == [0, 0]
    assert new["norm", "num_batches_tracked"].tolist() == [1, 1]
    for i, model in enumerate(models):
        torch.testing.assert_close(out[i], model(X))
        torch.testing.assert_close(new["norm", "running_var"][i], model.norm.running_var)


def test_batch_norm_with_shared_buffers():
    """torch.func's message is torch's own, about a batched tensor."""
    models, params, _, tree = stacked_norm()
    buffers = dict(models[0].named_buffers())
    with pytest.raises(RuntimeError, match="Batch norm got a batched tensor"):
        torch.vmap(lambda p: functional_call(models[0], (p, buffers), (X,)))(params)

    apply, _, ours = functional(models[0])
    p, _ = tdfunc.split(tree)
    with pytest.raises(RuntimeError, match=r"(?s)its own statistics.*apply.eval"):
        torch.vmap(lambda p: apply(p, X, buffers=ours))(p)


def test_batch_norm_under_grad():
    """torch.func cannot take the gradient: the statistics are mutated inside the transform."""
    model = Norm()
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    with pytest.raises(RuntimeError, match="mutat|in-place|inplace"):
        torch.func.grad(lambda p: functional_call(model, (p, buffers), (X,)).sum())(params)

    apply, p, b = functional(model)
    grads, new = torch.func.grad(lambda p: both(apply.with_buffers(p, b, X)), has_aux=True)(p)
    assert grads["linear", "weight"].shape == (4, 3)
    assert int(new["norm", "num_batches_tracked"]) == 1


def both(result):
    """The loss and the new buffers, as grad wants them."""
    out, new = result
    return out.square().sum(), new


def test_batch_norm_writes_to_what_it_was_given():
    """Both write the statistics into the caller's tree in silence."""
    model = Norm()
    named = {name: value.clone() for name, value in model.state_dict().items()}
    functional_call(model, named, (X,))
    assert named["norm.num_batches_tracked"] == 1
    tree = theirs_of(model)
    with tree.to_module(model):
        model(X)
    assert tree["norm", "num_batches_tracked"] == 1

    apply, params, buffers = functional(model)
    apply(params, X, buffers=buffers)
    with from_module(model).clone().to_module(model):
        model(X)
    assert buffers["norm", "num_batches_tracked"] == 0
    assert model.norm.num_batches_tracked == 0


def test_batch_norm_with_a_cumulative_average():
    """A vmap cannot read the count; the ensemble runs the loop instead."""
    models = [Norm(momentum=None), Norm(momentum=None)]
    params, buffers = stack_module_state(models)
    with pytest.raises(RuntimeError, match="item"):
        torch.vmap(lambda p, b: functional_call(models[0], (p, b), (X,)))(params, buffers)

    ensemble = Ensemble(functional(models[0])[0])
    out, new = ensemble.with_buffers(stack_modules(models), None, X)
    for i, model in enumerate(models):
        torch.testing.assert_close(out[i], model(X))
        torch.testing.assert_close(new["norm", "running_mean"][i], model.norm.running_mean)


def test_non_persistent_buffers():
    """A state dict has none of them; ours keeps them, with their kind."""
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.ones(2), persistent=False)
    assert list(Incumbent.from_module(model, use_state_dict=True).keys()) == ["weight", "bias"]

    tree = from_module(model)
    assert tree["cache"] is model.cache
    assert "cache" not in tree.state_dict()


# -- randomness ---------------------------------------------------------------------------------------------------


def test_dropout_of_members():
    """torch.func refuses, or draws from the default generator: a call changes the numbers of everything after it."""
    models = [make_mlp(dropout=0.5) for _ in range(4)]
    params, _ = stack_module_state(models)

    def run(p):
        return functional_call(models[0], p, (X,))

    with pytest.raises(RuntimeError, match="random"):
        torch.vmap(run)(params)
    before = torch.get_rng_state()
    torch.vmap(run, randomness="different")(params)
    assert not torch.equal(torch.get_rng_state(), before)

    apply, _, _ = functional(models[0])
    tree, before = stack_modules(models), torch.get_rng_state()
    ours = Ensemble(apply, "vmap")(tree, X, rng=0)
    loop = torch.stack([apply(tree[i], X, rng=tdfunc.random.fold_in(tdfunc.random.key(0), i)) for i in range(4)])
    torch.testing.assert_close(ours, loop)
    torch.testing.assert_close(Ensemble(apply, "vmap")(tree[:2], X, rng=0), loop[:2])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_modules_own_generator():
    """An explicit generator in forward works in both."""

    class Own(nn.Linear):
        generator = torch.Generator()

        def forward(self, x):
            return super().forward(x) + torch.rand(2, generator=self.generator.manual_seed(0))

    models = [Own(3, 2), Own(3, 2)]
    expected = torch.stack([model(X) for model in models])
    params, _ = stack_module_state(models)
    theirs = torch.vmap(lambda p: functional_call(models[0], p, (X,)), randomness="same")(params)
    torch.testing.assert_close(theirs, expected)
    torch.testing.assert_close(Ensemble(functional(models[0])[0], "loop")(stack_modules(models), X), expected)


# -- ties ---------------------------------------------------------------------------------------------------------


def test_tied_weights_by_state_dict():
    """torch.func raises on a state dict of copies, or is wrong in silence without its tie check."""
    model, ids = Tied(), torch.arange(5)
    copies = {name: value.clone() * 2.0 for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="tied"):
        functional_call(model, copies, (ids,))
    named = {name: p * 2.0 for name, p in model.named_parameters()}
    expected = functional_call(model, named, (ids,))
    assert not torch.allclose(functional_call(model, named, (ids,), tie_weights=False), expected)

    apply, _, _ = functional(model)
    torch.testing.assert_close(apply(TensorDict(copies).unflatten_keys("."), ids), expected)


def test_tied_weights_after_an_operation():
    """Theirs makes two tensors of one weight: after a permanent load the tie is gone for good."""
    model = Tied()
    theirs = theirs_of(model) * 2.0
    assert theirs["emb", "weight"] is not theirs["out", "weight"]
    assert theirs["emb", "weight"].data_ptr() != theirs["out", "weight"].data_ptr()
    theirs.to_module(model)
    assert model.emb.weight is not model.out.weight

    model = Tied()
    ours = from_module(model).clone() * 2.0
    assert ours["emb", "weight"] is ours["out", "weight"]
    assert len(tree_leaves(ours)) == 1
    ours.to_module(model)
    assert model.emb.weight is model.out.weight


def test_tied_weights_of_gpt2():
    """Theirs stacks one leaf more than the model has parameters."""
    models = [make_gpt2(), make_gpt2()]
    count = len(list(models[0].parameters()))
    theirs = torch.stack([Incumbent.from_module(model).detach() for model in models])
    assert len(list(theirs.keys(True, True))) == count + 1
    assert theirs["lm_head", "weight"].data_ptr() != theirs["transformer", "wte", "weight"].data_ptr()

    assert len(tree_leaves(stack_modules(models))) == count == 28
    assert len(tree_leaves(torch.stack([from_module(model) for model in models]))) == count


def test_values_that_break_a_tie():
    """Theirs takes two values for one tied weight in silence."""
    model = Tied()
    values = {"emb": {"weight": torch.zeros(5, 4)}, "out": {"weight": torch.ones(5, 4)}}
    with Incumbent(values, []).to_module(model):
        assert not torch.equal(model.emb.weight, model.out.weight)

    with pytest.raises(TieError, match=r"'emb.weight' and 'out.weight'"):
        TensorDict(values).to_module(model)


def test_shared_submodule():
    """Theirs ignores the second name of a shared layer in silence."""
    model = Shared()
    tree = theirs_of(model)
    tree.unlock_()
    tree["again", "weight"] = torch.full((3, 3), 7.0)
    with tree.to_module(model):
        assert not (model.again.weight == 7.0).any()

    ours = from_module(model).set(("again", "weight"), torch.full((3, 3), 7.0))
    assert (ours["first", "weight"] == 7.0).all()
    with ours.to_module(model):
        assert (model.again.weight == 7.0).all()
    first = dict(model.first.named_parameters())
    with pytest.raises(TieError, match=r"'first.weight' and 'again.weight'"):
        TensorDict({"first": first, "again": {"weight": torch.ones(3, 3), "bias": first["bias"]}}).to_module(model)


# -- trees that can be written ------------------------------------------------------------------------------------


def test_exception_in_an_unlocked_block():
    """Theirs stays unlocked after an exception; ours cannot be written at any time."""
    tree = theirs_of(nn.Linear(2, 2)).lock_()
    with pytest.raises(ValueError, match="inside"), tree.unlock_():
        raise ValueError("inside")
    assert not tree.is_locked

    with pytest.raises(ImmutableError):
        from_module(nn.Linear(2, 2))["weight"] = torch.zeros(2, 2)


def test_the_classmethod_and_the_function_differ():
    """Theirs locks in the function and not in the classmethod; ours are one."""
    model = nn.Linear(2, 2)
    assert not Incumbent.from_module(model).is_locked

    assert TensorDict.from_module(model)["weight"] is from_module(model)["weight"]


def test_the_leaves_are_the_modules_own():
    """In both from_module takes the Parameters themselves; their docstring promises copies."""
    model = nn.Linear(2, 2)

    assert Incumbent.from_module(model)["weight"] is model.weight
    assert from_module(model)["weight"] is model.weight
    assert functional(model)[1]["weight"].data_ptr() != model.weight.data_ptr()


def test_writes_to_buffers_under_vmap():
    """Theirs writes new statistics into the stacked tree that it was given."""
    models = [Norm(), Norm()]
    theirs = torch.stack([theirs_of(model) for model in models])

    def run(tree):
        with tree.to_module(models[0]):
            return models[0](X)

    torch.vmap(run)(theirs)
    assert theirs["norm", "num_batches_tracked"].tolist() == [1, 1]

    ours = stack_modules(models)
    torch.vmap(run)(ours)
    assert ours["norm", "num_batches_tracked"].tolist() == [0, 0]


def test_data_of_a_tree():
    """Theirs zeroes the live model through `.data`; ours has no such door, and `functional` copies."""
    model = nn.Linear(2, 2)
    Incumbent.from_module(model).data.zero_()
    assert not model.weight.any()

    model = nn.Linear(2, 2)
    _, params, _ = functional(model)
    assert not hasattr(params, "zero_")
    constant(params, 0.0)
    assert model.weight.any()
    assert params["weight"].any()


def test_registered_names_that_collide():
    """Theirs drops one of three parameters from the module that an optimizer sees."""
    values = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(2), "a_b": torch.ones(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = tensordict.nn.TensorDictParams(Incumbent(values, []))
    assert len(list(theirs.parameters())) == 2

    assert len(tree_leaves(TensorDict(values))) == 3


def test_trees_of_parameters_are_trees():
    """Theirs is one opaque leaf for `tree_map`."""
    theirs = tensordict.nn.TensorDictParams(theirs_of(nn.Linear(2, 2)))
    assert len(tree_leaves(theirs)) == 1

    assert len(tree_leaves(from_module(nn.Linear(2, 2)))) == 2
    assert math.isclose(sum(leaf.numel() for leaf in tree_leaves(from_module(nn.Linear(2, 2)))), 6)
