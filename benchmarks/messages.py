"""A message of 1,000 leaves between two gloo processes: against one tensor of the same bytes, and leaf by leaf.

Wall time, from the call until the other process has answered that it has everything. Both processes are on one machine,
and each has one torch thread.
"""

import atexit
import os
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tdfunc as tdf
from benchmarks.measure import Remote
from benchmarks.rows import Case, Row, Suite

LEAVES = 1000
SIZES = {"40 kB": 10, "4 MB": 1000, "64 MB": 16000}
ONE, EACH, ALLOWED = "one tensor", "leaf by leaf", "one tensor, and 3 us for each leaf"
_HOURS = timedelta(hours=12)


def make_tree(values: int, leaves: int = LEAVES) -> tdf.TensorDict:
    """A tree of matrices and vectors, in turn."""
    shapes = [(values // 5, 5) if i % 2 else (values,) for i in range(leaves)]
    return tdf.TensorDict({f"layer{i}": torch.ones(shape) for i, shape in enumerate(shapes)})


def exchange(rank: int, way: str, tree: tdf.TensorDict, flat: torch.Tensor) -> None:
    """Send a tree, or as many bytes, from rank 0 to rank 1, in one of the ways."""
    if way == "tdfunc":
        tree.send(1) if rank == 0 else tdf.distributed.recv(0)
    elif way == "tdfunc, isend and irecv":
        (tree.isend(1) if rank == 0 else tdf.distributed.irecv(0)).wait()
    elif way == "tdfunc, broadcast":
        tdf.distributed.broadcast(tree if rank == 0 else None, 0)
    else:
        for leaf in tree.leaves() if way == EACH else [flat]:
            dist.send(leaf, 1) if rank == 0 else dist.recv(torch.empty_like(leaf), 0)
        until = time.perf_counter_ns() + 3000 * LEAVES
        while way == ALLOWED and time.perf_counter_ns() < until:
            pass


def work(rank: int, meeting: str, values: int, tasks: Any, times: Any) -> None:
    """Run the calls that are asked for, and time them on rank 0, until the other rank has answered."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=_HOURS)
    tree, answer = make_tree(values), torch.zeros(1)
    flat = torch.cat([leaf.reshape(-1) for leaf in tree.leaves()])
    while True:
        way, calls = tasks.get()
        dist.barrier()
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(calls):
            exchange(rank, way, tree, flat)
        dist.recv(answer, 1) if rank == 0 else dist.send(answer, 0)
        if rank == 0:
            times.put((time.process_time_ns() - cpu, time.perf_counter_ns() - wall))


def message_ways(values: int) -> dict[str, Remote]:
    """Start two processes; each way asks both for some calls."""
    context = mp.get_context("spawn")
    tasks, times = [context.Queue(), context.Queue()], context.Queue()
    meeting = f"{tempfile.mkdtemp()}/meeting"
    ranks = [
        context.Process(target=work, args=(rank, meeting, values, tasks[rank], times), daemon=True) for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
        atexit.register(process.kill)

    def run(way: str, calls: int) -> tuple[float, float]:
        for queue in tasks:
            queue.put((way, calls))
        return times.get()

    ways = ("tdfunc", ONE, ALLOWED, EACH, "tdfunc, isend and irecv", "tdfunc, broadcast")
    return {way: Remote(lambda calls, way=way: run(way, calls)) for way in ways}


def message_cases() -> list[Case]:
    return [Case(what(size), dict(message_ways(values))) for size, values in SIZES.items()]


def what(size: str) -> str:
    """The name of a case."""
    return f"{LEAVES} leaves, {size}"


FIXED = (
    "3 us for each leaf are a fixed time; on a processor that runs Python 2.4 times as fast (a `get` takes 0.09 us "
    "there, and 0.24 us here), the value was 0.59x"
)
SUITE = Suite(
    "messages",
    "Messages between processes",
    "`td.send` sends a tree over gloo to a process that calls `recv` without a similar tree. The leaves are "
    "vectors and matrices in turn.",
    message_cases,
    (
        Row(
            "message of 1,000 leaves, from 4 MB on",
            ONE,
            2,
            "at most",
            (what("4 MB"), what("64 MB")),
            why="at 4 MB one tensor takes 1.3 ms, which are the system calls of both ends; 1,000 leaves take 0.4 ms "
            "to describe and 0.6 to 1.0 ms to pack (a second pass over the bytes) at one end, 0.7 ms to cut, 0.1 ms "
            "to put into a tree and 0.25 ms to free at the other, and two processes share two cores",
        ),
        Row("message of 1,000 leaves, below 4 MB", ALLOWED, 1, "at most", (what("40 kB"),), why=FIXED),
        Row("message of 1,000 leaves", EACH, 5, "faster", (what("40 kB"), what("4 MB"))),
    ),
    (exchange, work),
    clock="wall",
)
