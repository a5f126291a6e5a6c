"""`td.map` over worker processes: against the function on one chunk after another, and against tensordict's `map`.

Wall time: the work is done by other processes. Every process has one torch thread.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import tensordict
import torch

import tdfunc as tdf

ROWS, FEATURES, CHUNK, WORKERS = 24_000, 3072, 1000, 2


class Times(NamedTuple):
    """Seconds of each round, by what was run."""

    serial: list[float]
    cold: list[float]
    warm: list[float]
    fork: list[float]
    threads: list[float]
    incumbent: list[float]


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


def measure_map(rounds: int = 5, rows: int = ROWS) -> Times:
    """Run all ways `rounds` times, one after another.

    `cold` starts its workers in the call (the fork server runs from the second round on: the first round is the start
    of a program); `warm` has a pool; `fork` and `incumbent` fork their workers in the call.
    """
    images = make_images(rows)
    ours, theirs = tdf.TensorDict({"image": images}, [rows]), tensordict.TensorDict({"image": images}, [rows])
    times = Times([], [], [], [], [], [])
    with tdf.WorkerPool(WORKERS) as pool:
        ways: dict[str, Callable] = {
            "serial": lambda: ours.map(preprocess, num_workers=0, chunksize=CHUNK),
            "cold": lambda: ours.map(preprocess, num_workers=WORKERS, chunksize=CHUNK),
            "warm": lambda: ours.map(preprocess, executor=pool, chunksize=CHUNK),
            "fork": lambda: ours.map(preprocess, num_workers=WORKERS, chunksize=CHUNK, mp_start_method="fork"),
            "threads": lambda: ours.map(preprocess, num_workers=WORKERS, chunksize=CHUNK, executor="threads"),
            "incumbent": lambda: theirs.map(preprocess, num_workers=WORKERS, chunksize=CHUNK, mp_start_method="fork"),
        }
        for _ in range(rounds):
            for name, way in ways.items():
                begun = time.perf_counter()
                way()
                getattr(times, name).append(time.perf_counter() - begun)
    return times


def main() -> None:
    """Print seconds and ratios to the serial run of the same round."""
    torch.set_num_threads(1)
    times = measure_map()
    for name in times._fields:
        seconds = getattr(times, name)
        ratios = sorted(a / b for a, b in zip(seconds, times.serial, strict=True))
        shown = ", ".join([f"{s:.2f}" for s in seconds])
        print(f"{name:10} {shown} s; of serial: best {ratios[0]:.2f}, median {ratios[len(ratios) // 2]:.2f}")


if __name__ == "__main__":
    main()
