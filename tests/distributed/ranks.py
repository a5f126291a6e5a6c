"""Real processes of a gloo group, started from a server that has imported torch."""

import multiprocessing
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = ["tdfunc", "tdfunc.llm", "torch.distributed.tensor", "torch.distributed.fsdp"]


def run_ranks(fn, size, folder, *args, timeout_s=60, join=True, backend="gloo"):
    """Call `fn(rank, *args)` in each of `size` processes of a group; an error of one ends all and is raised here.

    Without `join` nothing is ended, and the processes' exit codes are returned.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    rendezvous = folder / f"rendezvous-{len(os.listdir(folder))}"
    call = (fn, size, str(rendezvous), timeout_s, args, backend)
    context = mp.start_processes(_begin, call, size, join=join, start_method="forkserver")
    for process in [] if join else context.processes:
        process.join()
    return None if join else [process.exitcode for process in context.processes]


def _begin(rank, fn, size, rendezvous, timeout_s, args, backend):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    options = {"init_method": f"file://{rendezvous}", "timeout": timedelta(seconds=timeout_s)}
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=size, **options)
    fn(rank, *args)
    dist.destroy_process_group()
