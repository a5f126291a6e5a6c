"""A memmap folder as a shared scratch space: one process writes, and two read."""

import torch
import torch.distributed as dist

import tdfunc as tdf
from tdfunc import TensorDict
from tests.distributed.ranks import run_ranks


def tree_of(value):
    """A tree whose leaves all hold one number."""
    return TensorDict({"x": torch.full((300, 64), value), "n": {"y": torch.full((5,), value)}, "v": value})


def _share(rank, folder):
    prefix = folder / "tree"
    if rank == 0:
        tree_of(0.0).memmap(prefix)
    dist.barrier()
    mine = TensorDict.load_memmap(prefix)
    dist.barrier()
    if rank == 0:
        for value in range(1, 60):
            tree_of(float(value)).memmap(prefix)
        (folder / "done").touch()
    last = -1.0
    while rank and not ((folder / "done").exists() and last == 59.0):
        mine = mine.memmap_refresh_()
        values = {float(x) for leaf in mine.leaves() for x in (leaf.min(), leaf.max())}
        # All leaves are of one writing, and never of an earlier one than before.
        assert len(values) == 1
        assert max(values) >= last
        last = max(values)
    dist.barrier()
    # Writes in place are seen by the readers; a message says that they are there.
    rows = TensorDict.load_memmap(prefix, mode="r+" if rank == 0 else "c")
    if rank == 0:
        rows["x"][7] = 5.0
        TensorDict({"row": 7}).send(1)
        TensorDict({"row": 7}).send(2)
    else:
        row = int(tdf.distributed.recv(0)["row"])
        assert rows["x"][row].unique().tolist() == [5.0]
    dist.barrier()


def test_readers_see_whole_trees(tmp_path):
    """While a folder is replaced again and again, each refresh of two readers has the leaves of one writing."""
    run_ranks(_share, 3, tmp_path, tmp_path)
