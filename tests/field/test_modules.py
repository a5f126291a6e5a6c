"""Modules and ensembles: public reports of other projects that no other test shows."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tdfunc as tdf
from tdfunc import optim
from tests.helpers import TiedLM

each_seed = pytest.mark.parametrize("seed", [0, 1])


def make_norm(seed):
    """A linear layer with a BatchNorm, in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()


def scanned(apply, params, buffers, data):
    """The last buffers and the outputs of a scan over batches."""

    def step(buffers, batch):
        out, buffers = apply.with_buffers(params, buffers, batch)
        return buffers, out

    return tdf.scan(step, buffers, data)


@each_seed
def test_statistics_are_the_carry_of_a_scan(seed):
    """They end as those of the module in a loop."""
    model = make_norm(seed)
    data = torch.randn(5, 6, 3, dtype=torch.float64)

    last, _ = scanned(*tdf.functional(model), data)

    for batch in data:
        model(batch)
    torch.testing.assert_close(last["1", "running_var"], model[1].running_var)


@each_seed
def test_a_scan_with_statistics_is_differentiated(seed):
    """The gradient is that of the module in a loop."""
    model = make_norm(seed)
    data = torch.randn(5, 6, 3, dtype=torch.float64)
    apply, params, buffers = tdf.functional(model)

    found = tdf.grad(lambda params: scanned(apply, params, buffers, data)[1].pow(3).sum())(params)

    sum(model(batch).pow(3).sum() for batch in data).backward()
    torch.testing.assert_close(found["0", "weight"], model[0].weight.grad)


@each_seed
def test_jacobians_of_each_sample_in_evaluation(seed):
    """With the statistics of a BatchNorm: those of the module, sample by sample."""
    model = make_norm(seed)
    model(torch.randn(32, 3, dtype=torch.float64))
    model.eval()
    apply, params, buffers = tdf.functional(model)
    samples = torch.randn(4, 3, dtype=torch.float64)

    def one(sample):
        return apply(params, sample[None], buffers=buffers)[0]

    found = torch.vmap(torch.func.jacrev(one))(samples)

    expected = [torch.autograd.functional.jacobian(lambda x: model(x[None])[0], sample) for sample in samples]
    torch.testing.assert_close(found, torch.stack(expected))


def clipped_by_loop(model, ids, norm):
    """The sum of clipped gradients, one backward for each sample."""
    total = torch.zeros_like(model.emb.weight)
    for row in ids:
        one = copy.deepcopy(model)
        F.cross_entropy(one(row[None])[0, :-1], row[1:]).backward()
        nn.utils.clip_grad_norm_(one.parameters(), norm)
        total += one.emb.weight.grad
    return total


@each_seed
def test_gradients_of_each_sample_of_a_tied_model(seed):
    """Mapped, clipped by sample and summed, as private training does: those of a loop of `backward`."""
    torch.manual_seed(seed)
    model = TiedLM().double()
    ids = torch.randint(7, (5, 6))
    apply, params, _ = tdf.functional(model)

    def loss(params, row):
        return F.cross_entropy(apply(params, row[None])[0, :-1], row[1:])

    grads = torch.vmap(tdf.grad(loss), (None, 0))(params, ids)
    found = optim.clip_by_member_norm(0.5)(grads).sum(0)

    torch.testing.assert_close(found["emb", "weight"], clipped_by_loop(model, ids, 0.5), rtol=1e-5, atol=1e-7)


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first

    def forward(self, x):
        return self.again(self.first(x))


@pytest.mark.parametrize("name", ["first", "again"])
def test_a_call_leaves_a_layer_with_two_names_as_it_is(name):
    """After a block with other weights the module has its own, the same objects with the same bits."""
    model = Twice()
    before = {key: (id(leaf), leaf.tolist()) for key, leaf in model.named_parameters()}
    other = tdf.from_module(model).detach().set((name, "weight"), torch.zeros(3, 3))

    with other.to_module(model):
        model(torch.ones(2, 3))

    assert {key: (id(leaf), leaf.tolist()) for key, leaf in model.named_parameters()} == before
