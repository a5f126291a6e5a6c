"""Passes with dropout are members: those of `Ensemble` over copies, and of a loop."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tdfunc as tdf
from tdfunc import random


def make():
    """A model with BatchNorm and two kinds of dropout."""
    return nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.AlphaDropout(0.3), nn.Linear(8, 2)
    )


class Products(TorchDispatchMode):
    """Counts the multiplications of matrices by their rows."""

    rows = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.rows += (args[-2].shape[0],)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def model():
    """A model whose statistics are not those of a new one."""
    net = make()
    net(torch.randn(64, 3) * 2 + 1)
    return net


@pytest.mark.parametrize("mode", [True, False])
def test_passes_are_the_loop(model, mode):
    """Pass i draws from `fold_in(key, i)`; BatchNorm is in evaluation, whatever the mode of the model."""
    apply, params, buffers = tdf.functional(model.train(mode))
    key, x = random.key(3), torch.randn(5, 3)
    passes = tdf.MCDropout(apply, 6)
    out = passes(params, x, buffers=buffers, rng=key)
    loop = [passes.apply(params, x, buffers=buffers, rng=random.fold_in(key, i)) for i in range(6)]

    torch.testing.assert_close(out, torch.stack(loop))
    torch.testing.assert_close(tdf.MCDropout(apply, 2)(params, x, buffers=buffers, rng=key), out[:2])
    torch.testing.assert_close(tdf.MCDropout(apply, 6, chunk_size=4)(params, x, buffers=buffers, rng=3), out)
    tree = tdf.combine(params, buffers)
    members = tdf.Ensemble(passes.apply)(tree.expand(6), x, rng=key)
    torch.testing.assert_close(members, out)
    assert not torch.equal(out[0], out[1])
    # A row does not depend on the others of its batch: BatchNorm reads its statistics.
    halves = [passes.apply(params, rows, buffers=buffers, rng=0) for rows in (x, torch.cat([x[:1], 100 + x[1:]]))]
    torch.testing.assert_close(halves[0][0], halves[1][0])


def test_layers_before_dropout_run_once(model):
    """The first product has the rows of the batch, the others those of all passes."""
    apply, params, buffers = tdf.functional(model)
    passes = tdf.MCDropout(apply, 7)
    passes(params, torch.randn(5, 3), buffers=buffers, rng=0)
    with Products() as seen:
        passes(params, torch.randn(5, 3), buffers=buffers, rng=0)

    assert seen.rows[0] == 5
    assert set(seen.rows[1:]) == {35}


class Own(nn.Module):
    """Dropout by a function, and a BatchNorm inside."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return nn.functional.dropout(self.norm(x), 0.5, self.training)


def test_further_layers_are_switched_on():
    """By their class, and not the layers inside of them."""
    apply, params, buffers = tdf.functional(Own())
    passes = tdf.MCDropout(apply, 4, layers=(Own,))
    out = passes(params, torch.ones(2, 3), buffers=buffers, rng=0)

    assert 0 < (out == 0).sum() < out.numel()
    assert [part.training for part in passes.apply.module.modules()] == [True, False]
