"""Processes and ranks: public reports of other projects that no other test shows."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tdfunc as tdf
from tdfunc import TensorDict
from tests.distributed.ranks import run_ranks


class NotSentBackError(Exception):
    """An exception that pickle writes and cannot read: its arguments are not those of the constructor."""

    def __init__(self, row, value):
        super().__init__(f"row {row} has {value}")


def refuse(rows):
    """A function for workers that raises such an exception."""
    raise NotSentBackError(0, rows["x"][0].item())


@pytest.mark.slow
def test_an_exception_that_cannot_be_sent_ends_the_call():
    """It is an error with its text, and no worker waits."""
    rows = TensorDict({"x": torch.full((4,), 7.0)}, [4])

    with pytest.raises(tdf.WorkerError, match=r"row 0 has 7\.0"):
        rows.map(refuse, num_workers=2, chunksize=2)


def make_layers(width):
    """Two layers whose width the ranks do not divide."""
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))


def save_two_ways_sharded(rank, folder, width):
    """Save a model under tensor parallelism and FSDP2 on a mesh of 2 x 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(make_layers(width), mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    tdf.save(tdf.from_module(model), folder / "model.safetensors")
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("width", [5, 6])
def test_tensor_parallelism_under_fsdp_is_saved_as_the_plain_module(width, tmp_path):
    """Each leaf has the values of the module before it was sharded."""
    run_ranks(save_two_ways_sharded, 4, tmp_path, tmp_path, width)

    saved = tdf.load(tmp_path / "model.safetensors").state_dict()

    torch.testing.assert_close(dict(saved), dict(make_layers(width).state_dict()), rtol=0, atol=0)
