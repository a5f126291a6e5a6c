"""`td.map` over worker processes: against the function on one chunk after another, and against tensordict's `map`.

Wall time: the work is done by other processes. Every process has one torch thread.
"""

import atexit
from collections.abc import Callable
from typing import Any

import tensordict
import torch

import tdfunc as tdf
from benchmarks.rows import Case, Row, Suite

ROWS, FEATURES, CHUNK, WORKERS = 2000, 3072, 250, 2
SERIAL, OTHER = "one chunk after another", "tensordict"
WHAT = f"normalise and sort {ROWS} images"


def preprocess(rows):
    """A CPU-bound function of real images: normalised, sorted and summarised, row by row."""
    images = rows["image"].float().div(255)
    images = (images - images.mean(1, keepdim=True)) / (images.std(1, keepdim=True) + 1e-5)
    ranked = images.sort(1).values[:, :: FEATURES // 64]
    if isinstance(rows, tensordict.TensorDictBase):
        return tensordict.TensorDict({"ranked": ranked, "energy": images.pow(4).mean(1)}, rows.batch_size)
    return tdf.TensorDict({"ranked": ranked, "energy": images.pow(4).mean(1)}, rows.batch_size)


def make_images(rows: int = ROWS):
    """Return rows of bytes as large as CIFAR's images."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (rows, FEATURES), dtype=torch.uint8, generator=generator)


def map_ways(rows: int) -> dict[str, Callable[[], Any]]:
    """The pool is started before; forked workers start in the call. A program's first call starts the fork server."""
    images = make_images(rows)
    ours, theirs = tdf.TensorDict({"image": images}, [rows]), tensordict.TensorDict({"image": images}, [rows])
    pool = tdf.WorkerPool(WORKERS)
    atexit.register(pool.shutdown)
    pool.submit(torch.get_num_threads).result()
    options: dict[str, Any] = {"num_workers": WORKERS, "chunksize": CHUNK}
    return {
        "tdfunc": lambda: ours.map(preprocess, executor=pool, chunksize=CHUNK),
        SERIAL: lambda: ours.map(preprocess, num_workers=0, chunksize=CHUNK),
        "processes started in the call": lambda: ours.map(preprocess, **options),
        "threads": lambda: ours.map(preprocess, executor="threads", **options),
        OTHER: lambda: theirs.map(preprocess, mp_start_method="fork", **options),
    }


def map_cases() -> list[Case]:
    return [Case(WHAT, map_ways(ROWS))]


SUITE = Suite(
    "map",
    "Maps over workers",
    "The function processes images in chunks of 250, in 2 existing processes.",
    map_cases,
    (Row("map with 2 workers", SERIAL, 0.66, "at most", (WHAT,)),),
    (map_ways, preprocess),
    clock="wall",
)
