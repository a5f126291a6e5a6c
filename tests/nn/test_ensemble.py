"""`EnsembleModule` trains, moves and saves as a module does, and computes as `Ensemble` does."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tdfunc as tdf
from tdfunc.nn import EnsembleModule
from tests.distributed.ranks import run_ranks
from tests.helpers import TiedLM, assert_trees_equal


def make():
    """A module with parameters, buffers and dropout."""
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


@pytest.fixture
def tree():
    """Four members."""
    return tdf.init_ensemble(make, 4)


@pytest.fixture
def apply():
    """The pure function of one member."""
    return tdf.functional(make())[0]


def test_outputs_are_those_of_the_ensemble(apply, tree):
    """In evaluation, and in training with a seed; new buffers are kept."""
    model, x = EnsembleModule(apply, tree), torch.randn(5, 3)
    params, buffers = tdf.split(tree)
    out, buffers = tdf.Ensemble(apply).with_buffers(params, buffers, x, rng=3)

    torch.testing.assert_close(model(x, rng=3), out)
    assert_trees_equal(tdf.split(model.tree)[1], buffers)
    torch.testing.assert_close(model.eval()(x), tdf.Ensemble(apply.eval())(params, x, buffers=buffers))


def test_training_seeds_come_from_the_default_generator(apply, tree):
    """`torch.manual_seed` repeats a call, and two calls draw differently."""
    model, x = EnsembleModule(apply, tree), torch.randn(5, 3)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(model(x))

    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[2], model(x))


def test_members_train_as_they_would_alone():
    """A step of torch.optim on the module is a step of each member's own."""
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(3)]
    together = EnsembleModule(tdf.functional(models[0])[0], tdf.stack_modules(models))
    x, y = torch.randn(16, 3), torch.randn(16, 1)

    def train(parameters, forward):
        opt = torch.optim.Adam(parameters, lr=0.01)
        for _ in range(5):
            opt.zero_grad()
            (forward() - y).square().mean((1, 2)).sum().backward()
            opt.step()

    train(together.parameters(), lambda: together(x))
    train([p for model in models for p in model.parameters()], lambda: torch.stack([model(x) for model in models]))

    trained, alone = together.tree.detach(), tdf.stack_modules(models).detach()
    assert trained.paths() == alone.paths()
    found, expected = [{path: tree[path] for path in tree.paths()} for tree in (trained, alone)]
    torch.testing.assert_close(found, expected)


def loaded(model, apply, tree):
    """Another module with the state dict of the first."""
    other = EnsembleModule(apply.eval(), tree.apply(torch.zeros_like))
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize(
    "again",
    [loaded, lambda model, *_: copy.deepcopy(model), lambda model, *_: pickle.loads(pickle.dumps(model))],
    ids=["state_dict", "deepcopy", "pickle"],
)
def test_it_is_saved_and_copied(apply, tree, again):
    """state_dict, deepcopy and pickle, as of any module."""
    model, x = EnsembleModule(apply.eval(), tree), torch.randn(5, 3)

    assert torch.equal(again(model, apply, tree)(x), model(x))


def test_its_state_dict_has_the_keys_of_the_tree(apply, tree):
    """Keys of the state dict are those of the tree, with a prefix."""
    assert list(EnsembleModule(apply, tree).state_dict()) == [f"members.{key}" for key in tree.state_dict()]


def test_it_is_moved(apply, tree):
    """A cast changes the module and its tree, and not the tree that it was made of."""
    model = EnsembleModule(apply.eval(), tree).double()

    assert model(torch.randn(5, 3).double()).dtype == torch.float64
    assert not tree["0", "weight"].requires_grad
    assert model.tree[1].to_module(make().double()) is not None


def test_tied_weights_are_one_parameter():
    """A tie of the members is a tie of the module."""
    models = [TiedLM() for _ in range(2)]
    model = EnsembleModule(tdf.functional(models[0])[0], tdf.stack_modules(models))

    assert len(list(model.parameters())) == len(list(models[0].parameters()))
    tokens = torch.randint(0, 5, (2, 3))
    torch.testing.assert_close(model(tokens), torch.stack([m(tokens) for m in models]))


def test_complex_weights_train():
    """They are parameters, as in the members."""
    make = lambda: nn.Linear(4, 2, dtype=torch.complex64)  # noqa: E731
    model = EnsembleModule(tdf.functional(make())[0], tdf.init_ensemble(make, 2))
    model(torch.randn(5, 4, dtype=torch.complex64)).abs().sum().backward()

    assert [name for name, _ in model.named_parameters()] == ["members.weight", "members.bias"]
    assert model.members.weight.grad.abs().min() > 0


def test_modes_of_layers_are_those_of_apply():
    """A layer that was frozen in evaluation stays so, until train() or eval() sets all layers."""
    models = [make() for _ in range(2)]
    for model in models:
        model[1].eval()
        model[2].eval()
    together, x = EnsembleModule(tdf.functional(models[0])[0], tdf.stack_modules(models)), torch.randn(5, 3)

    torch.testing.assert_close(together(x), torch.stack([model(x) for model in models]))
    assert together.train()(x).shape == (2, 5, 2)
    assert together.tree["1", "num_batches_tracked"].tolist() == [1, 1]


def _trained(parallel, *batch):
    """The members after four steps, as they are or in a data-parallel module."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double() for _ in range(3)]
    module = EnsembleModule(tdf.functional(parts[0])[0], tdf.stack_modules(parts))
    model, start = parallel(module), module.tree.detach().clone()
    opt = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(4):
        opt.zero_grad()
        (model(batch[0]) - batch[1]).square().mean((1, 2)).sum().backward()
        opt.step()
    return module.tree.detach(), start


def _train_rank(rank, x, y, folder):
    tdf.save(_trained(DistributedDataParallel, x[rank], y[rank])[0], folder / f"{rank}.safetensors")


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """Gradients are averaged: members are those of one process on the joint batch, and equal on both."""
    x = torch.randn(2, 8, 3, dtype=torch.float64)
    y = x.sum(-1, keepdim=True).sin()
    run_ranks(_train_rank, 2, tmp_path, x, y, tmp_path)
    expected, start = _trained(nn.Identity(), x.flatten(0, 1), y.flatten(0, 1))

    trees = [tdf.load(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    assert_trees_equal(trees[0], trees[1])
    assert_trees_equal(trees[0], expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(expected["0", "weight"], start["0", "weight"], atol=0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_and_restores_it(tmp_path):
    """A Trainer's fit is the loop of torch.optim, and its checkpoint gives the members back."""
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            x, y = batch
            return (self.net(x) - y).square().mean((1, 2)).sum()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def plain():
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))

    apply, data = tdf.functional(plain())[0], (torch.randn(32, 3), torch.randn(32, 1))
    module, alone = (EnsembleModule(apply, tdf.init_ensemble(plain, 3)) for _ in range(2))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=8)
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=2, default_root_dir=tmp_path, enable_model_summary=False, **options)
    trainer.fit(Lit(module), loader)
    opt = torch.optim.Adam(alone.parameters(), lr=0.01)
    for _ in range(2):
        for x, y in loader:
            opt.zero_grad()
            (alone(x) - y).square().mean((1, 2)).sum().backward()
            opt.step()

    assert_trees_equal(module.tree, alone.tree, rtol=1e-5, atol=1e-6)
    assert module.tree["1", "num_batches_tracked"].tolist() == [8, 8, 8]
    fresh = EnsembleModule(apply, tdf.init_ensemble(plain, 3, key=1))
    restored = Lit.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, net=fresh)
    assert_trees_equal(restored.net.tree, module.tree)


def test_members_share_a_trunk():
    """With `shared=` the trunk is one parameter; outputs and gradients are those of `Ensemble`."""
    make = lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))  # noqa: E731
    heads, x = tdf.init_ensemble(make, 4), torch.randn(5, 3)
    trunk, heads = tdf.partition(heads[0], "0.*")[0], tdf.partition(heads, "2.*")[0]
    tree, apply = tdf.combine(trunk, heads), tdf.functional(make())[0]
    model = EnsembleModule(apply, tree, shared="0.*")

    def total(tree):
        return tdf.Ensemble(apply, shared="0.*")(tree, x).square().sum()

    model(x).square().sum().backward()
    grads = torch.func.grad(total)(tree)
    found = {name: parameter.grad for name, parameter in model.members.named_parameters()}
    assert model.members.get_parameter("0.weight").shape == (8, 3)
    torch.testing.assert_close(model.eval()(x), tdf.Ensemble(apply, shared="0.*")(tree, x))
    torch.testing.assert_close(found, {name: grads[tuple(name.split("."))] for name in found})


class Heads(nn.Module):
    """An ensemble with dropout and statistics of a batch, inside a module."""

    def __init__(self):
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))  # noqa: E731
        self.heads = EnsembleModule(tdf.functional(make())[0], tdf.init_ensemble(make, 3))

    def forward(self, x):
        return self.heads(x).mean(0)


def train_heads(generator):
    """Return a training call of parameters, buffers, an input and a key, and arguments of it."""
    apply, params, buffers = tdf.functional(Heads())

    def call(params, buffers, x, key):
        return apply.with_buffers(params, buffers, x, rng=key)

    return call, (params, buffers, torch.randn(8, 3, generator=generator), tdf.random.key(4))


def test_an_ensemble_module_is_jitted_in_training(generator):
    """A replay has the outputs and the statistics of the call, and another key drops other units."""
    call, (params, buffers, x, key) = train_heads(generator)
    jitted = tdf.jit(call)
    jitted(params, buffers, x, tdf.random.key(5))

    out, new = jitted(params, buffers, x, key)

    expected, wanted = call(params, buffers, x, key)
    torch.testing.assert_close(out, expected)
    assert_trees_equal(new, wanted, rtol=1e-6, atol=1e-6)


def test_an_ensemble_module_is_mapped_in_training(generator):
    """Keys and gradients under vmap are those of a loop."""
    call, (params, buffers, x, _) = train_heads(generator)
    keys = tdf.random.split(tdf.random.key(6), 4)
    grad = torch.func.grad(lambda p, key: call(p, buffers, x, key)[0].square().mean())

    mapped = torch.vmap(grad, (None, 0))(params, keys)

    assert_trees_equal(mapped, torch.stack([grad(params, key) for key in keys]), rtol=1e-5, atol=1e-6)


def test_a_jitted_ensemble_module_draws_anew():
    """Without a key each replay takes another seed from torch's default generator, as the module does."""
    apply, params, buffers = tdf.functional(Heads())
    jitted = tdf.jit(lambda p, b, x: apply.with_buffers(p, b, x)[0])
    x = torch.ones(8, 3)
    jitted(params, buffers, x)
    torch.manual_seed(0)
    replayed = [jitted(params, buffers, x) for _ in range(2)]
    torch.manual_seed(0)
    expected = [apply.with_buffers(params, buffers, x)[0] for _ in range(2)]

    torch.testing.assert_close(torch.stack(replayed), torch.stack(expected))
    assert not torch.equal(*replayed)


def make_on_frozen_trunk():
    """A module whose first layer does not train."""
    return nn.Sequential(nn.Linear(3, 8).requires_grad_(False), nn.BatchNorm1d(8), nn.Linear(8, 2))


@pytest.mark.parametrize(
    "vary", [lambda apply: apply, lambda apply: apply.eval(), lambda apply: pickle.loads(pickle.dumps(apply))]
)
def test_frozen_parameters_stay_frozen(vary):
    """What does not require grad in the module does not in the ensemble of it."""
    apply, _, _ = tdf.functional(make_on_frozen_trunk())
    model = EnsembleModule(vary(apply), tdf.init_ensemble(make_on_frozen_trunk, 4))
    found = {name.removeprefix("members."): p.requires_grad for name, p in model.named_parameters()}
    assert found == {name: p.requires_grad for name, p in make_on_frozen_trunk().named_parameters()}


def test_a_shared_trunk_stays_frozen():
    """A leaf without a member dimension as well."""
    members = tdf.init_ensemble(make_on_frozen_trunk, 4)
    trunk, _ = tdf.partition(members[0], "0.*")
    _, others = tdf.partition(members, "0.*")
    model = EnsembleModule(tdf.functional(make_on_frozen_trunk())[0], tdf.combine(trunk, others), shared="0.*")
    assert not model.get_parameter("members.0.weight").requires_grad
