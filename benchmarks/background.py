"""Saving in the background: how long the caller is blocked, and how much memory it takes, against copying first."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tdfunc as tdf
from benchmarks import storage
from benchmarks.measure import QUICK, Fresh
from benchmarks.rows import Case, Row, Suite, measure_cases
from benchmarks.storage import FEW, MANY, Leaves, scratch, tree_of

COPY, NEW = "copying the tree first", "copying it into new memory"


class Peak(NamedTuple):
    """Bytes that a way needs at its peak, above what was there before."""

    way: str
    size_bytes: int


def blocked_ways(leaves: Leaves, folder: Path) -> dict[str, Fresh]:
    """Submit a save, or copy what it would write; nothing else runs meanwhile, since earlier saves have ended."""
    tree, saver = tree_of(leaves), tdf.AsyncSaver(max_pending=64)

    def submit(_: None) -> Any:
        return saver.save(tree, folder / "tree.safetensors", fsync=False)

    return {
        "tdfunc": Fresh(saver.wait, submit),
        COPY: Fresh(saver.wait, lambda _: tree.clone()),
        NEW: Fresh(saver.wait, lambda _: tree.apply(copy_to_new_memory)),
    }


def copy_to_new_memory(leaf: Tensor) -> Tensor:
    """As an allocator does that has no memory left over: of leaves above 32 MB, malloc keeps none."""
    return torch.frombuffer(mmap.mmap(-1, leaf.nbytes), dtype=leaf.dtype).view(leaf.shape).copy_(leaf)


def peak_memory(leaves: Leaves, folder: Path) -> list[Peak]:
    """Save a tree in the background as it is, and copied first; each in a process of its own."""
    tree, path = tree_of(leaves), folder / "tree.safetensors"

    def in_background() -> None:
        tdf.AsyncSaver().save(tree, path, fsync=False).result()

    def copied() -> None:
        tdf.AsyncSaver().save(tree, path, fsync=False, copy=True).result()

    return [Peak("tdfunc", _peak(in_background)), Peak(COPY, _peak(copied))]


def _peak(work: Callable[[], None]) -> int:
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            before = _status("VmRSS")
            # Resets the highest mark of resident memory.
            Path("/proc/self/clear_refs").write_text("5")
            work()
            os.write(into, str(_status("VmHWM") - before).encode())
        finally:
            os._exit(0)
    os.close(into)
    os.waitpid(child, 0)
    size_bytes = int(os.read(out, 64))
    os.close(out)
    return size_bytes


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def async_cases() -> list[Case]:
    folder = scratch("async")
    return [
        Case(f"submit {what}", dict(blocked_ways(leaves, folder)))
        for what, leaves in ((FEW, storage.large_leaves()), (MANY, storage.small_leaves()))
    ]


WHY = (
    "each leaf is read once for its digest; a copy into memory that malloc has kept from the last one takes little "
    "longer, one into new memory several times as long"
)
SUITE = Suite(
    "async",
    "Saving in the background",
    "What the caller waits for: the digest of each leaf, against a copy of the tree.",
    async_cases,
    (Row("async save of 262 MB, time the caller is blocked", COPY, 0.2, "at most", (f"submit {FEW}",), why=WHY),),
    (blocked_ways, copy_to_new_memory),
    clock="wall",
)


def main() -> None:
    """Print the timings and the memory."""
    # As the page is measured; and a process that is forked after OpenMP has started its threads hangs.
    torch.set_num_threads(1)
    for measured in measure_cases(async_cases(), QUICK):
        times = {way: round(timing.wall_us / 1000, 2) for way, timing in measured.timings.items()}
        print(measured.what, "ms:", times, "ratio", round(times["tdfunc"] / times[COPY], 3))
    for peak in peak_memory(storage.large_leaves(), scratch("peak")):
        print(peak.way, round(peak.size_bytes / 1e6, 1), "MB")


if __name__ == "__main__":
    main()
