"""Saving in the background: how long the caller is blocked, and how much memory it takes, against copying first."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tdfunc as tdf
from benchmarks.measure import QUICK, Fresh
from benchmarks.rows import Case, Row, Suite, measure_cases
from benchmarks.storage import FEW, MANY, Leaves, large_leaves, scratch, small_leaves

COPY = "copying the tree first"


class Peak(NamedTuple):
    """Bytes that a way needs at its peak, above what was there before."""

    way: str
    size_bytes: int


def blocked_ways(leaves: Leaves, folder: Path) -> dict[str, Fresh]:
    """Submit a save, or copy what it would write; nothing else runs meanwhile, since earlier saves have ended."""
    tree, saver = tdf.TensorDict(leaves), tdf.AsyncSaver(max_pending=64)

    def submit(_: None) -> Any:
        return saver.save(tree, folder / "tree.safetensors", fsync=False)

    return {"tdfunc": Fresh(saver.wait, submit), COPY: Fresh(saver.wait, lambda _: tree.clone())}


def peak_memory(leaves: Leaves, folder: Path) -> list[Peak]:
    """Save a tree in the background as it is, and copied first; each in a process of its own."""
    tree, path = tdf.TensorDict(leaves), folder / "tree.safetensors"

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
        for what, leaves in ((FEW, large_leaves()), (MANY, small_leaves()))
    ]


SUITE = Suite(
    "async",
    "Saving in the background",
    "What the caller waits for: the digest of each leaf, against a copy of the tree.",
    async_cases,
    (Row("async save of 262 MB, time the caller is blocked", COPY, 0.2, "at most", (f"submit {FEW}",)),),
    (blocked_ways,),
    clock="wall",
)


def main() -> None:
    """Print the timings and the memory."""
    # As the page is measured; and a process that is forked after OpenMP has started its threads hangs.
    torch.set_num_threads(1)
    for measured in measure_cases(async_cases(), QUICK):
        times = {way: round(timing.wall_us / 1000, 2) for way, timing in measured.timings.items()}
        print(measured.what, "ms:", times, "ratio", round(times["tdfunc"] / times[COPY], 3))
    for peak in peak_memory(large_leaves(), scratch("peak")):
        print(peak.way, round(peak.size_bytes / 1e6, 1), "MB")


if __name__ == "__main__":
    main()
