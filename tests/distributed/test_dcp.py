"""Folders of torch.distributed.checkpoint: consolidated ones load, and all others are refused with the way out."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tdfunc as tdf
from tdfunc import UnsupportedError
from tests.distributed.ranks import run_ranks
from tests.storage.trees import assert_same

# torch 2.13 consolidates floating dtypes alone: of others it asks `torch.finfo`.
LEAVES = {
    "body.rows": (torch.arange(15.0).reshape(5, 3), Shard(0)),
    "body.columns": (torch.arange(14, dtype=torch.float64).reshape(2, 7), Shard(1)),
    "body.half": (torch.arange(6.0).to(torch.bfloat16), Shard(0)),
    "copies": (torch.arange(4.0), Replicate()),
}


def _save(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    tree = tdf.TensorDict(
        {name: distribute_tensor(x, mesh, [place], src_data_rank=None) for name, (x, place) in LEAVES.items()}
    ).unflatten_keys(".")
    state = tree.state_dict()
    for name, files in (("one", None), ("two", dict(zip(LEAVES, (1, 2, 2, 1), strict=True)))):
        options = {"save_distributed": True, "enable_consolidation": True, "fqn_to_index_mapping": files}
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder / name), **options))
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder / "parts"), save_distributed=True))
    dcp.save(state, checkpoint_id=folder / "own")
    if rank == 0:
        dcp_to_torch_save(folder / "own", folder / "own.pt")
    dist.barrier()
    # Each rank reads its part.
    like = tdf.load(folder / "two", like=tree)
    assert_same(like.apply(lambda x: x.to_local()), tree.apply(lambda x: x.to_local()))


@pytest.mark.slow
def test_folders_of_torch_distributed_checkpoint(tmp_path):
    """Two ranks save with torch; tdfunc loads what torch consolidated, whole and by slices."""
    run_ranks(_save, 2, tmp_path, tmp_path)

    expected = tdf.TensorDict({name: x for name, (x, _) in LEAVES.items()}).unflatten_keys(".")
    for name in ("one", "two"):
        assert_same(tdf.load(tmp_path / name), expected)
    with pytest.raises(UnsupportedError, match="a file of torch.save"):
        tdf.load(tmp_path / "own.pt")
    for name, pattern in (("own", r"\.metadata(?s:.)*hint: .*HuggingFaceStorageWriter"), ("parts", "shard-00001")):
        with pytest.raises(FileNotFoundError, match=pattern):
            tdf.load(tmp_path / name)
