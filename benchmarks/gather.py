"""Random rows of a data set in memory-mapped files: against the same rows in memory, and against tensordict."""

import os
from pathlib import Path
from typing import Any

import tensordict
import torch

import tdfunc as tdf
from benchmarks.measure import Fresh
from benchmarks.rows import Case, Row, Suite
from benchmarks.storage import evicted, scratch

ROWS, ROW_BYTES, PICKED = 340_000, 3072, 256
RAM, OTHER = "rows in memory", "tensordict"
WARM, COLD = "256 rows of 1 GB, in the page cache", "256 rows of 1 GB, on disk"


def images(rows: int) -> tdf.TensorDict:
    """Rows of bytes as large as CIFAR's images."""
    return tdf.TensorDict({"image": torch.randint(256, (rows, ROW_BYTES), dtype=torch.uint8)}, [rows])


def gather_ways(folder: Path, rows: int) -> dict[str, dict[str, Any]]:
    """Other rows at each call, in memory and on a file that both libraries map."""
    held, cold = images(rows), folder / "cold"
    mapped = held.memmap(folder / "warm")
    # Pages that are mapped stay in memory: nothing keeps a mapping of these, and each call makes its own.
    held.memmap(cold)

    def pick() -> torch.Tensor:
        return torch.randint(rows, (PICKED,))

    def opened(load: Any) -> Any:
        for path in cold.glob("*.memmap"):
            evicted(path)
        return load(cold), pick()

    def gather(what: Any) -> Any:
        tree, picked = what
        return tree[picked]

    theirs = tensordict.TensorDict.load_memmap(folder / "warm")
    return {
        WARM: {
            "tdfunc": Fresh(pick, lambda picked: mapped[picked]),
            RAM: Fresh(pick, lambda picked: held[picked]),
            OTHER: Fresh(pick, lambda picked: theirs[picked]),
        },
        COLD: {
            "tdfunc": Fresh(lambda: opened(tdf.TensorDict.load_memmap), gather),
            OTHER: Fresh(lambda: opened(tensordict.TensorDict.load_memmap), gather),
        },
    }


def gather_cases() -> list[Case]:
    ways = gather_ways(scratch("gather"), ROWS)
    os.sync()
    return [Case(what, each) for what, each in ways.items()]


SUITE = Suite(
    "gather",
    "Rows of a data set on disk",
    "A row reads 256 random rows of 340,000, each with 3072 bytes. The time does not include opening files.",
    gather_cases,
    (
        Row("gather 256 random rows of a 1 GB memmap, warm", RAM, 1.1, "at most", (WARM,)),
        Row("gather 256 random rows of a 1 GB memmap, cold", OTHER, 30, "faster", (COLD,)),
    ),
    (gather_ways,),
    clock="wall",
)
