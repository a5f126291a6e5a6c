"""Modules, ensembles and optimizers without the faults of torch.func, tensordict and torch.optim.

`benchmarks/conformance/faults/` shows each fault by a test of the same name.
"""

import io
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

import tdfunc
from tdfunc import (
    ConcurrencyError,
    Ensemble,
    ImmutableError,
    LeafMismatchError,
    LeakError,
    TensorDict,
    TieError,
    TreeStructureError,
    UnsupportedError,
    from_module,
    functional,
    stack_modules,
)
from tdfunc.optim import adam, clip_by_member_norm, sgd
from tests.faults.models import (
    Branches,
    Cached,
    Meeting,
    UsesOldFunction,
    constant,
    fail_inside,
    holding,
    run_in_two_threads,
    weight_of,
)
from tests.models import Norm, Shared, Tied, make_gpt2, make_mlp

X = torch.linspace(-1, 1, 15).reshape(5, 3)


# -- blocks with other weights: exceptions, nesting, generators, threads ------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_exception_in_the_body(error):
    """An exception leaves a block unchanged, and the module has its own Parameter again."""
    model = nn.Linear(2, 2)
    original = model.weight

    with pytest.raises(error):
        fail_inside(constant(from_module(model), 0.0), model, error)

    assert model.weight is original


def test_exception_in_a_nested_block():
    """A block that is left by an exception gives back the weights of the block around it, which gives back its own."""
    model = nn.Linear(2, 2)
    original, tree = model.weight, from_module(model)

    with constant(tree, 1.0).to_module(model):
        with pytest.raises(ValueError, match="inside"):
            fail_inside(constant(tree, 2.0), model, ValueError)
        assert weight_of(model) == 1.0
        with constant(tree, 3.0).to_module(model):
            assert weight_of(model) == 3.0
        assert weight_of(model) == 1.0
    assert model.weight is original


def test_exception_in_an_unlocked_block():
    """A tree cannot be written to at any time."""
    with pytest.raises(ImmutableError):
        from_module(nn.Linear(2, 2))["weight"] = torch.zeros(2, 2)


def test_interleaved_generators():
    """Two generators that hold one module raise, and the module has its own weights in the end."""
    model = nn.Linear(2, 2)
    original, errors = model.weight, []
    runs = [holding(constant(from_module(model), value), model, []) for value in (0.0, 1.0)]
    for _ in range(3):
        for run in runs:
            try:
                next(run, None)
            except ConcurrencyError as err:
                errors.append(err)

    assert len(errors) == 2
    assert model.weight is original


def test_two_threads():
    """Two threads that call one function with other weights each get the results of their own."""
    barrier = threading.Barrier(2)
    apply, params, _ = functional(Meeting(lambda: barrier.wait(10)))

    out = run_in_two_threads(lambda i: apply(constant(params, i + 1.0), torch.ones(1, 3)))

    assert [one.item() for one in out] == [3.0, 6.0]


def test_two_threads_in_one_block():
    """A block of a second thread on one module raises."""
    model = nn.Linear(2, 2)
    tree = constant(from_module(model), 0.0)

    with tree.to_module(model):
        run_in_two_threads(lambda i: pytest.raises(ConcurrencyError, tree.to_module, model))


# -- trees that do not fit ----------------------------------------------------------------------------------------


def test_unknown_key_half_way():
    """An unknown key is found before the first leaf is bound."""
    model = make_mlp()
    originals = list(model.parameters())

    with pytest.raises(TreeStructureError, match="'3.nope'"):
        constant(from_module(model), 0.0).set(("3", "nope"), torch.zeros(1)).to_module(model)

    assert all(a is b for a, b in zip(originals, model.parameters(), strict=True))


def test_missing_extra_and_misshapen_keys():
    """Leaves that are missing, unknown or of another shape raise, in calls and in blocks."""
    model = nn.Linear(2, 2)
    apply, params, _ = functional(model)
    x = torch.ones(1, 2)

    for call in (lambda tree: apply(tree, x), lambda tree: tree.to_module(model)):
        with pytest.raises(TreeStructureError, match="bias"):
            call(params.delete("bias"))
        with pytest.raises(TreeStructureError, match="nope"):
            call(params.set("nope", x))
        with pytest.raises(LeafMismatchError, match=r"'weight'[\s\S]*\(2, 2\)[\s\S]*\(7, 2\)"):
            call(TensorDict({"weight": torch.zeros(7, 2), "bias": torch.zeros(7)}))
    with pytest.raises(LeafMismatchError, match=r"\(7, 5\)"):
        TensorDict({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}).to_module(nn.Linear(5, 7))


def test_order_after_a_part_is_loaded():
    """A load of some leaves keeps the order of the module's Parameters, on which an optimizer's state relies."""
    model = nn.Linear(2, 2)

    TensorDict({"weight": torch.zeros(2, 2)}).to_module(model, strict=False)

    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]


def test_memory_mapped_weights(tmp_path):
    """A saved tree, from a file or a memory-mapped folder, loads into a module as Parameters."""
    model = nn.Sequential(nn.Linear(3, 2))
    tdfunc.save(from_module(model), tmp_path / "file.safetensors")
    from_module(model).detach().memmap(tmp_path / "folder")

    for tree in (tdfunc.load(tmp_path / "file.safetensors"), TensorDict.load_memmap(tmp_path / "folder")):
        other = nn.Sequential(nn.Linear(3, 2))
        tree.to_module(other)
        assert torch.equal(other(X), model(X))
        assert all(isinstance(p, nn.Parameter) for p in other.parameters())


# -- derivatives --------------------------------------------------------------------------------------------------


def test_forward_mode():
    """Forward-mode derivatives pass through a call and a block."""
    model = make_mlp()
    apply, params, _ = functional(model)
    named = {".".join(path): leaf for path, leaf in params.items(True, True)}
    ones = {name: torch.ones_like(p) for name, p in named.items()}
    expected = torch.func.jvp(lambda p: functional_call(model, p, (X,)).sum(), (named,), (ones,))[1]

    ours = torch.func.jvp(lambda p: apply(p, X).sum(), (params,), (params.apply(torch.ones_like),))[1]
    with torch.autograd.forward_ad.dual_level():
        dual = params.apply(lambda p: torch.autograd.forward_ad.make_dual(p, torch.ones_like(p)))
        with dual.to_module(model):
            inside = torch.autograd.forward_ad.unpack_dual(model(X).sum()).tangent

    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(inside, expected)


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


def test_batch_norm_of_stacked_members():
    """Statistics under vmap are outputs, equal to those of each member; the given ones stay."""
    models = [Norm(), Norm()]
    apply, _, _ = functional(models[0])
    p, b = tdfunc.split(stack_modules(models))

    out, new = torch.vmap(lambda p, b: apply.with_buffers(p, b, X))(p, b)

    assert counts(b) == [0, 0]
    assert counts(new) == [1, 1]
    for i, model in enumerate(models):
        torch.testing.assert_close(out[i], model(X))
        torch.testing.assert_close(new["norm", "running_var"][i], model.norm.running_var)


def test_batch_norm_with_shared_buffers():
    """One set of statistics for all members raises with the remedy."""
    apply, _, buffers = functional(Norm())
    p, _ = tdfunc.split(stack_modules([Norm(), Norm()]))

    with pytest.raises(RuntimeError, match=r"buffers[\s\S]*apply.eval"):
        torch.vmap(lambda p: apply(p, X, buffers=buffers))(p)


def test_batch_norm_under_grad():
    """A gradient with new statistics beside it works."""
    apply, p, b = functional(Norm())

    def loss(p):
        out, new = apply.with_buffers(p, b, X)
        return out.square().sum(), new

    grads, new = torch.func.grad(loss, has_aux=True)(p)
    assert grads["linear", "weight"].shape == (4, 3)
    assert counts(new) == 1


def test_batch_norm_writes_to_what_it_was_given():
    """Calls and blocks write statistics neither to the tree that they were given nor to the module."""
    model = Norm()
    apply, params, buffers = functional(model)
    apply(params, X, buffers=buffers)
    tree = from_module(model).clone()
    with tree.to_module(model):
        model(X)

    assert counts(buffers) == counts(from_module(model)) == 0


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

    for i, model in enumerate(models):
        torch.testing.assert_close(out[i], model(X))
        torch.testing.assert_close(new["norm", "running_mean"][i], model.norm.running_mean)


def test_non_persistent_buffers():
    """Buffers that are not persistent are leaves, and not in the state dict."""
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.ones(2), persistent=False)

    tree = from_module(model)

    assert tree["cache"] is model.cache
    assert "cache" not in tree.state_dict()


def test_dropout_of_members():
    """A member's masks depend on the seed and its number, not on how many there are; no global state changes."""
    models = [make_mlp(dropout=0.5) for _ in range(4)]
    apply, _, _ = functional(models[0])
    tree, before = stack_modules(models), torch.get_rng_state()
    ensemble = Ensemble(apply, "vmap")

    out = ensemble(tree, X, rng=0)

    torch.testing.assert_close(Ensemble(apply, "loop")(tree, X, rng=0), out)
    torch.testing.assert_close(ensemble(tree[:2], X, rng=0), out[:2])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_modules_own_generator():
    """A generator of the module's own works in an ensemble."""

    class Own(nn.Linear):
        generator = torch.Generator()

        def forward(self, x):
            return super().forward(x) + torch.rand(2, generator=self.generator.manual_seed(0))

    models = [Own(3, 2), Own(3, 2)]
    out = Ensemble(functional(models[0])[0], "loop")(stack_modules(models), X)
    torch.testing.assert_close(out, torch.stack([model(X) for model in models]))


# -- ties ---------------------------------------------------------------------------------------------------------


def test_tied_weights_by_state_dict():
    """Equal copies of a tied weight, as a state dict holds them, are taken."""
    model, ids = Tied(), torch.arange(5)
    copies = {name: value.clone() * 2.0 for name, value in model.state_dict().items()}
    expected = functional_call(model, {name: p * 2.0 for name, p in model.named_parameters()}, (ids,))

    apply, _, _ = functional(model)

    torch.testing.assert_close(apply(TensorDict(copies).unflatten_keys("."), ids), expected)


def test_tied_weights_after_an_operation():
    """Tied weights are one leaf after a clone and arithmetic, and tied in the module that they are loaded into."""
    model = Tied()

    tree = from_module(model).clone() * 2.0
    tree.to_module(model)

    assert tree["emb", "weight"] is tree["out", "weight"]
    assert len(tree_leaves(tree)) == 1
    assert model.emb.weight is model.out.weight


def test_tied_weights_of_gpt2():
    """A stack has as many leaves as a member has Parameters."""
    models = [make_gpt2(), make_gpt2()]

    assert len(tree_leaves(stack_modules(models))) == len(list(models[0].parameters())) == 28
    assert len(tree_leaves(torch.stack([from_module(model) for model in models]))) == 28


def test_values_that_break_a_tie():
    """Two values for one tied weight raise."""
    values = {"emb": {"weight": torch.zeros(5, 4)}, "out": {"weight": torch.ones(5, 4)}}

    with pytest.raises(TieError, match=r"'emb.weight' and 'out.weight'"):
        TensorDict(values).to_module(Tied())


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


def test_the_leaves_are_the_modules_own():
    """`from_module`, as function and as method, takes the Parameters themselves; `functional` copies."""
    model = nn.Linear(2, 2)
    params = functional(model)[1]

    assert from_module(model)["weight"] is model.weight
    assert TensorDict.from_module(model)["weight"] is model.weight
    assert params["weight"].data_ptr() != model.weight.data_ptr()
    assert not hasattr(params, "zero_")


def test_registered_names_that_collide():
    """Names that differ only by how they are joined are three leaves."""
    assert len(tree_leaves(TensorDict({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(2), "a_b": torch.ones(3)}))) == 3


def test_trees_of_parameters_are_trees():
    """A tree of Parameters is as many leaves as it holds, for `tree_map`."""
    assert sorted(leaf.numel() for leaf in tree_leaves(from_module(nn.Linear(2, 2)))) == [2, 4]


def test_pickled_trees():
    """A state dict of a tree goes through torch's safe loader."""
    model, buffer = nn.Linear(2, 2), io.BytesIO()
    torch.save(from_module(model).state_dict(), buffer)
    buffer.seek(0)

    assert torch.equal(TensorDict(torch.load(buffer))["weight"], model.weight)


# -- stale weights ------------------------------------------------------------------------------------------------


def test_a_cached_reference():
    """A weight that the module keeps elsewhere raises when it is used; so does the skeleton's."""
    apply, params, _ = functional(Cached())

    with pytest.raises(LeakError, match="'linear.weight'"):
        apply(constant(params, 0.0), X)
    with pytest.raises(LeakError, match="'weight'"):
        nn.functional.linear(X, functional(nn.Linear(3, 2))[0].module.weight)


def test_a_parametrized_weight_by_its_own_name():
    """A parametrized module takes its original weights only, and gradients reach them."""
    apply, params, _ = functional(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))

    with pytest.raises(TreeStructureError, match="'weight'"):
        apply(params.set("weight", torch.ones(2, 3)), X)
    grads = torch.func.grad(lambda p: apply(p, X).sum())(params)
    assert grads["parametrizations", "weight", "original1"].any()


def test_cached_parametrizations():
    """A call inside `parametrize.cached()`, which keeps weights of other parameters, raises."""
    apply, params, _ = functional(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))

    with nn.utils.parametrize.cached(), pytest.raises(UnsupportedError, match=r"parametrize.cached\(\)"):
        apply(params * 3.0, X)


def test_a_plain_tensor_attribute():
    """A tensor that is neither Parameter nor buffer is not a key."""
    model = nn.Linear(3, 2)
    model.scale = torch.ones(2)
    apply, params, _ = functional(model)

    with pytest.raises(TreeStructureError, match="'scale'"):
        apply(params.set("scale", torch.zeros(2)), X)


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


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell, Branches, UsesOldFunction])
def test_modules_that_vmap_may_not_run(kind):
    """Recurrent layers, writes in place, data-dependent code and old functions run in an ensemble, as alone."""
    models = [kind(3, 4) for _ in range(2)]

    ours = tree_leaves(Ensemble(functional(models[0])[0])(stack_modules(models), X))

    expected = zip(*[tree_leaves(model(X)) for model in models], strict=True)
    for leaf, outs in zip(ours, expected, strict=True):
        torch.testing.assert_close(leaf, torch.stack(outs))


def test_lazy_modules():
    """Parameters without a shape raise with the remedy."""
    for call in (from_module, functional, lambda m: stack_modules([m, m])):
        with pytest.raises(UnsupportedError, match=r"'weight'[\s\S]*run the module once"):
            call(nn.LazyLinear(2))


def test_script_modules():
    """A scripted module raises with the remedy."""
    scripted = torch.jit.script(nn.Linear(3, 2))

    for call in (from_module, functional):
        with pytest.raises(UnsupportedError, match=r"ScriptModule[\s\S]*scripted or traced from"):
            call(scripted)


def test_compiled_modules():
    """The keys of a compiled module are those of the module."""
    tree = from_module(torch.compile(nn.Linear(3, 2), backend="eager"))

    assert list(tree.keys()) == ["weight", "bias"]
    tree.to_module(nn.Linear(3, 2))


def test_hooks_fire():
    """Hooks of the module fire, once for each call."""
    model, fired = nn.Linear(3, 2), []
    model.register_forward_hook(lambda *_: fired.append(1))
    apply, params, _ = functional(model)

    apply(params, X)

    assert fired == [1]


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ([nn.Identity(), nn.Tanh()], "1"),
        ([nn.Dropout(0.1), nn.Dropout(0.9)], "p"),
        ([nn.Conv1d(3, 3, 2, stride=1), nn.Conv1d(3, 3, 2, stride=2)], "stride"),
        ([nn.LayerNorm(3, eps=1e-5), nn.LayerNorm(3, eps=1.0)], "eps"),
        ([nn.ReLU().train(), nn.ReLU().eval()], "training"),
    ],
)
def test_members_with_different_layers(layers, name):
    """Members of other layers, hyperparameters or modes raise, and the message names the difference."""
    models = [nn.Sequential(nn.Linear(3, 3), layer) for layer in layers]

    with pytest.raises(TreeStructureError, match=rf"'{name}'"):
        stack_modules(models)
    with pytest.raises(TreeStructureError, match="'1'"):
        stack_modules([models[0], nn.Sequential(nn.Linear(3, 3))])


# -- optimizers ---------------------------------------------------------------------------------------------------

GRADS = torch.tensor([[3.0, 4.0], [30.0, 40.0], [3000.0, 4000.0]])


def test_clipping_couples_members():
    """Each member's gradient is clipped by its own norm."""
    clipped = clip_by_member_norm(1.0)(TensorDict({"w": GRADS}, [3]))

    torch.testing.assert_close(clipped["w"].norm(dim=1), torch.ones(3))


def test_a_learning_rate_for_each_member():
    """A tensor of learning rates is one for each member."""
    lrs = torch.tensor([0.1, 0.2, 0.3])
    params, opt = TensorDict({"w": torch.zeros(3, 2)}, [3]), sgd(lr=lrs)

    new, _ = opt.update(params, TensorDict({"w": GRADS}, [3]), opt.init(params))

    torch.testing.assert_close(new["w"], -lrs[:, None] * GRADS)


def test_an_update_inside_vmap():
    """A step is the same on the stack, inside vmap and for each member alone."""
    params, grads, opt = TensorDict({"w": torch.zeros(3, 2)}, [3]), TensorDict({"w": GRADS}, [3]), adam(lr=0.1)

    stacked, _ = opt.update(params, grads, opt.init(params))
    inside, _ = torch.vmap(opt.update)(params, grads, torch.vmap(opt.init)(params))
    alone, _ = opt.update(params[0], grads[0], opt.init(params[0]))

    torch.testing.assert_close(inside["w"], stacked["w"])
    torch.testing.assert_close(alone["w"], stacked["w"][0])
