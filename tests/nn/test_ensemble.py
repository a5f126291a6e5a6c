"""`EnsembleModule` trains, moves and saves as a module does, and computes as `Ensemble` does."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tdfunc as tdf
from tdfunc.nn import EnsembleModule
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


def test_members_train_as_they_would_alone(tree):
    """A step of torch.optim on the module is a step of each member's own."""
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(3)]
    together = EnsembleModule(tdf.functional(models[0])[0], tdf.stack_modules(models))
    x, y = torch.randn(16, 3), torch.randn(16, 1)
    for group in ([together], models):
        opt = torch.optim.Adam([p for model in group for p in model.parameters()], lr=0.01)
        for _ in range(5):
            opt.zero_grad()
            outs = together(x) if group[0] is together else torch.stack([model(x) for model in models])
            (outs - y).square().mean((1, 2)).sum().backward()
            opt.step()

    for i, model in enumerate(models):
        for path, leaf in tdf.from_module(model).items(True, True):
            torch.testing.assert_close(together.tree[i][path], leaf)


def test_it_is_saved_copied_and_moved(apply, tree):
    """state_dict, deepcopy, pickle and dtypes, as of any module."""
    model, x = EnsembleModule(apply.eval(), tree), torch.randn(5, 3)
    other = EnsembleModule(apply.eval(), tree.apply(torch.zeros_like))
    other.load_state_dict(model.state_dict())

    assert list(model.state_dict()) == [f"members.{key}" for key in tree.state_dict()]
    for again in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(x), model(x))
    assert model.double()(x.double()).dtype == torch.float64
    assert not tree["0", "weight"].requires_grad
    assert model.tree[1].to_module(make().double()) is not None


def test_tied_weights_are_one_parameter():
    """A tie of the members is a tie of the module."""
    models = [TiedLM() for _ in range(2)]
    model = EnsembleModule(tdf.functional(models[0])[0], tdf.stack_modules(models))

    assert len(list(model.parameters())) == len(list(models[0].parameters()))
    tokens = torch.randint(0, 5, (2, 3))
    torch.testing.assert_close(model(tokens), torch.stack([m(tokens) for m in models]))


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


def test_distributed_data_parallel(apply, tree, tmp_path):
    """Its gradients are reduced as those of any module."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(EnsembleModule(apply, tree))
        model(torch.randn(5, 3)).square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


MESSAGES = [
    (lambda apply, tree: EnsembleModule(apply, tree[0]), tdf.BatchSizeError, r"params must be a stacked tree.*\[\]"),
    (
        lambda apply, tree: EnsembleModule(apply, tree.set("s", "text")),
        tdf.UnsupportedError,
        "leaf 's' must be a tensor.*NonTensorData",
    ),
]


@pytest.mark.parametrize(("call", "error", "pattern"), MESSAGES)
def test_messages(call, error, pattern, apply, tree):
    """Trees that are no members are refused."""
    with pytest.raises(error, match=f"(?s){pattern}"):
        call(apply, tree)
