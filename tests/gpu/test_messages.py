"""Trees between ranks over nccl, a rank for each GPU; over gloo on the CPU."""

import pytest
import torch
import torch.distributed as dist

import tdfunc as tdf
from tdfunc import TensorDict
from tests.distributed.ranks import run_ranks
from tests.helpers import assert_trees_equal


def exchange(rank, kind):
    """Reduce, gather, broadcast, and send around the ring of ranks."""
    size, device = dist.get_world_size(), torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    tree = TensorDict({"a": torch.full((2, 3), float(rank)), "n": {"b": torch.arange(2) + rank}}, [2])
    mine = tree.to(device)

    total = tdf.distributed.all_reduce(mine).cpu()
    assert total["n", "b"].tolist() == [sum(range(size)), sum(range(size)) + size]
    for other, found in enumerate(tdf.distributed.all_gather(mine)):
        assert_trees_equal(found.cpu(), (tree - rank + other).cpu())
    found = tdf.distributed.broadcast(mine if rank == 0 else None, 0)
    assert_trees_equal(found.cpu(), (tree - rank).cpu())
    if size > 1:
        pending = tdf.distributed.isend(mine, (rank + 1) % size)
        found = tdf.distributed.recv((rank - 1) % size)
        pending.wait()
        assert_trees_equal(found.cpu(), (tree - rank + (rank - 1) % size).cpu())


@pytest.mark.slow
def test_messages(tmp_path, device):
    """Collectives and messages move trees from device to device."""
    is_gpu = device.type == "cuda"
    ranks, backend = (torch.cuda.device_count(), "nccl") if is_gpu else (2, "gloo")

    run_ranks(exchange, ranks, tmp_path, device.type, backend=backend)
