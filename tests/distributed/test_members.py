"""Ensembles whose members are spread over a mesh equal those of one process; linear layers do to the last bit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import tdfunc as tdf
from tdfunc import demo
from tdfunc.distributed import from_local, on_members, shard, to_local
from tests.distributed.ranks import run_ranks
from tests.storage.trees import assert_same


class Net(nn.Module):
    """Layers that DTensors do not run under vmap: a convolution, statistics, dropout, attention."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 3, bias=False), nn.BatchNorm1d(4)
        self.attention, self.drop = nn.MultiheadAttention(4, 2, batch_first=True), nn.Dropout(0.5)

    def forward(self, x):
        h = self.drop(self.norm(self.conv(x))).transpose(1, 2)
        return self.attention(h, h, h)[0].mean(1)


def _members(rank, folder):
    members, x = 7, torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0))
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("members", "data"))
    tree = tdf.init_ensemble(Net, members, key=0)
    apply, _, _ = tdf.functional(Net())
    params, buffers = tdf.split(tree)
    keys = tdf.random.fold_in(tdf.random.key(1), torch.arange(members))
    opt = tdf.optim.sgd(lr=0.1, momentum=0.9)

    @tdf.jit
    def step(params, buffers, state, x, keys):
        def loss(params):
            y, new = tdf.Ensemble(apply).with_buffers(params, buffers, x, rng=keys)
            return y.square().sum(), (new, y)

        grads, (new, y) = torch.func.grad(loss, has_aux=True)(params)
        return *opt.update(params, grads, state), new, y

    expected = step(params, buffers, opt.init(params), x, keys)
    assert_same(expected[0], step(params, buffers, opt.init(params), x, tdf.random.key(1))[0])
    spread = shard((params, buffers, opt.init(params), keys), line)
    assert spread[0]["conv", "weight"].placements == (Shard(0),)
    assert spread[0].batch_size == (members,)
    got = on_members(step, line)(*spread[:3], x, spread[3])
    for one, other in zip(got, expected, strict=True):
        if isinstance(one, DTensor):
            torch.testing.assert_close(one.full_tensor(), other)
        else:
            assert one.batch_size == other.batch_size
            tdf.assert_close(one.apply(lambda leaf: leaf.full_tensor()), other)
    local = to_local(spread[0])
    assert local.batch_size == ([2, 2, 2, 1][rank],)
    again = from_local(to_local(shard(params, grid)), grid)
    assert torch.equal(again["norm", "bias"].full_tensor(), params["norm", "bias"])

    # Members over one dimension, parts of the batch over the other.
    evaluate = apply.eval()
    run = on_members(lambda tree, x: tdf.Ensemble(evaluate)(tree, x), grid, [Shard(0), Shard(1)])
    y = run(shard(tree, grid), shard(x, grid, [Replicate(), Shard(0)]))
    torch.testing.assert_close(y.full_tensor(), tdf.Ensemble(evaluate)(tree, x))
    with pytest.raises(tdf.LeafMismatchError, match="dimension of the members"):
        from_local(torch.tensor(1.0), line)
    text = demo.run_distributed(8, 0, folder, 4)
    assert rank or "the same, bit for bit" in text
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.slow
def test_members_over_ranks(tmp_path):
    """A step with dropout, statistics and attention, jitted on four ranks, equals the step of one process."""
    run_ranks(_members, 4, tmp_path, tmp_path / "demo")


def _join_parts(rank):
    grid = init_device_mesh("cpu", (2, 2))
    twice = from_local(torch.full((rank + 1, 3), float(rank)), grid, [Shard(0), Shard(0)])
    assert twice.shape == (1 + 2 + 3 + 4, 3)
    rows, columns = (1, 3)[rank // 2], (2, 1)[rank % 2]
    block = from_local({"x": [torch.full((rows, columns), float(rank))]}, grid, [Shard(0), Shard(1)])
    assert block["x"][0].shape == (4, 3)
    copies = from_local(torch.ones(2), grid, [Replicate(), Replicate()])
    assert copies.full_tensor().tolist() == [1.0, 1.0]

    def fail():
        if rank == 2:
            raise FloatingPointError("rank 2 alone")
        return torch.ones(2, 2)

    # On a mesh of two dimensions, rank 1 is in no round of rank 2.
    with pytest.raises(FloatingPointError, match="rank 2 alone"):
        on_members(fail, grid, [Shard(0), Shard(1)])()
    assert on_members(lambda: torch.ones(2, 2), grid, [Shard(0), Shard(1)])().shape == (4, 4)
    # A rank that is not in a mesh has nothing of it.
    assert from_local(torch.ones(2), DeviceMesh("cpu", [0, 1, 2])).shape == ((6,) if rank < 3 else (2,))


@pytest.mark.slow
def test_parts_on_two_dimensions_of_a_mesh(tmp_path):
    """Lengths are summed along each dimension, twice for one that both shard; an error of one rank is raised on all."""
    run_ranks(_join_parts, 4, tmp_path)


def _differ(rank, placements):
    line = init_device_mesh("cpu", (2,)) if len(placements[0]) == 1 else init_device_mesh("cpu", (1, 2))
    with pytest.raises(ValueError, match=r"(?s)different calls.*expected: .*Replicate.*got: .*Shard"):
        from_local(torch.ones(2), line, placements[rank])
    assert from_local(torch.ones(2), line).shape == (4 // line.ndim,)


PLACEMENTS = {
    "one dimension": ([Replicate()], [Shard(0)]),
    "the other dimension": ([Replicate(), Replicate()], [Replicate(), Shard(0)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PLACEMENTS)
def test_placements_of_ranks_that_differ_in_what_is_sharded(tmp_path, case):
    """Also a rank that shards nothing hears of it, at once; the next equal call works."""
    run_ranks(_differ, 2, tmp_path, PLACEMENTS[case], timeout_s=20)


def _copies(rank):
    line = init_device_mesh("cpu", (2,))
    with pytest.raises(tdf.LeafMismatchError, match="differ in more than the number of members"):
        from_local(torch.ones(2 + rank), line, [Replicate()])


def test_copies_have_one_shape(tmp_path):
    """A leaf that is complete on each rank has the same shape on all."""
    run_ranks(_copies, 2, tmp_path, timeout_s=20)


LAZY_CALLS = {
    "shard": lambda rows, line: shard({"a": tdf.TensorDict({"rows": rows}, [4])}, line),
    "from_local": lambda rows, line: from_local(rows, line),
    "on_members": lambda rows, line: on_members(lambda: rows[:2], line)(),
}


def _lazy(rank, call):
    line = init_device_mesh("cpu", (2,))
    rows = tdf.lazy_stack([tdf.TensorDict({"w": torch.ones(2)}) for _ in range(4)])
    with pytest.raises(tdf.UnsupportedError, match="lazy stack do not have the dimension"):
        LAZY_CALLS[call](rows, line)


@pytest.mark.parametrize("call", LAZY_CALLS)
def test_members_of_a_lazy_stack_are_refused(tmp_path, call):
    """Their leaves do not have the dimension of the members, so that torch would divide the features."""
    run_ranks(_lazy, 2, tmp_path, call, timeout_s=20)


def _lazy_rows(rank):
    line = init_device_mesh("cpu", (2,))
    tree = tdf.lazy_stack([tdf.TensorDict({"w": torch.ones(4, 2 + n)}, [4]) for n in range(3)], 1)
    assert to_local(shard(tree, line)).batch_size == (2, 3)


@pytest.mark.slow
def test_a_lazy_stack_behind_the_members_is_spread(tmp_path):
    """Its leaves have the members first."""
    run_ranks(_lazy_rows, 2, tmp_path, timeout_s=20)
