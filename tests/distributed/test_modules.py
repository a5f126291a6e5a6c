"""Modules of torch's engines as trees and functions: FSDP2, DistributedDataParallel, tensor parallelism."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tdfunc as tdf
from tests.distributed.ranks import run_ranks
from tests.helpers import TiedLM, TinyMLP


class Normed(nn.Module):
    """Layers with a buffer, a hook of the user's own, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.inner = TinyMLP()
        self.norm = nn.BatchNorm1d(2, track_running_stats=True)
        self.again = self.inner
        self.inner.register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x):
        return self.norm(self.inner(x)) + self.again(x)


def whole(tree):
    """The tree of plain tensors."""
    return tree.apply(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf)


def loss_of(apply, buffers, x):
    """A scalar function of parameters."""
    return lambda params: apply(params, x, buffers=buffers).square().sum()


def check_alike(sharded, plain, x, everywhere):
    """Trees, forward and gradients of a sharded module are those of the plain one."""
    tree = tdf.from_module(sharded)
    tdf.assert_close(whole(tree), tdf.from_module(plain))
    assert list(tree.state_dict()) == list(sharded.state_dict())
    assert all(torch.equal(whole(tree * 1)[key], tree[key].full_tensor()) for key in tree.paths() if "weight" in key)
    before = {name: dict(vars(m)) for name, m in sharded.named_modules()}
    apply, params, buffers = tdf.functional(sharded)
    oracle, plain_params, plain_buffers = tdf.functional(plain)
    assert isinstance(next(iter(params.leaves())), DTensor)

    out = apply(params, everywhere(x), buffers=buffers.apply(everywhere))
    torch.testing.assert_close(out.full_tensor(), oracle(plain_params, x, buffers=plain_buffers))
    loss = loss_of(apply, buffers.apply(everywhere), everywhere(x))
    expected = torch.func.grad(loss_of(oracle, plain_buffers, x))(plain_params)
    leaves = params.apply(lambda leaf: leaf.detach().requires_grad_())
    loss(leaves).full_tensor().backward()
    tdf.assert_close(whole(leaves.grad), expected)
    # On whole tensors it is the plain function.
    assert torch.equal(apply(whole(params), x, buffers=buffers), oracle(plain_params, x, buffers=plain_buffers))
    assert {name: dict(vars(m)) for name, m in sharded.named_modules()} == before


def _modules(rank):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x = torch.randn(4, 3)

    def everywhere(tensor):
        return distribute_tensor(tensor, mesh, [Replicate()])

    plain = Normed().eval()
    sharded = copy.deepcopy(plain)
    fully_shard(sharded.inner, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    check_alike(sharded, plain, x, everywhere)
    (tdf.from_module(sharded) * 1).to_module(sharded)
    torch.testing.assert_close(sharded(x), plain(x))

    plain = TiedLM()
    sharded = fully_shard(copy.deepcopy(plain), mesh=mesh)
    assert tdf.functional(sharded)[1].ties() == tdf.functional(plain)[1].ties() != ()

    plain = Normed().eval()
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    apply, params, buffers = tdf.functional(wrapped)
    assert torch.equal(apply(params, x, buffers=buffers), plain(x))
    assert torch.equal(apply.eval()(tdf.from_module(wrapped), x), plain(x))
    assert list(tdf.from_module(wrapped).state_dict()) == list(wrapped.state_dict())
    members = torch.stack([params, params * 2])
    assert tdf.Ensemble(apply)(members, x, buffers=torch.stack([buffers] * 2)).shape == (2, 4, 2)

    plain = TinyMLP()
    parallel = parallelize_module(copy.deepcopy(plain), mesh, {"hidden": ColwiseParallel(), "out": RowwiseParallel()})
    tree = tdf.from_module(parallel)
    assert tree["hidden", "weight"].placements == (Shard(0),)
    tdf.assert_close(whole(tree), tdf.from_module(plain))
    apply, params, _ = tdf.functional(parallel)
    torch.testing.assert_close(apply(params, x), plain(x))
    assert list(tree.state_dict()) == list(parallel.state_dict())


@pytest.mark.slow
def test_modules_of_engines(tmp_path):
    """Trees, functions and gradients of sharded modules equal the plain module's, which stays as it is."""
    run_ranks(_modules, 2, tmp_path)
