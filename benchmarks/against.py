"""Compares this version with another one on the same core: `python -m benchmarks.against FOLDER trees training`.

The folder has another version of the repository. Two processes, one for each version, run the cases of a part in
alternating rounds. The ratios are kept in `results/against.json`, which the page shows: they tell a slower version from
a slower machine.
"""

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

# Before torch starts its pools.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from benchmarks import results
from benchmarks.measure import _calls_for, _round
from benchmarks.rows import OURS, shown, time_shown

ROOT = Path(__file__).parent.parent
# New processes lie differently in memory.
PASSES, ROUNDS = 2, 15


def serve(part: str) -> None:
    """Name each case and how many calls fill a round; then run so many calls as each line of standard input says."""
    torch.set_num_threads(1)
    gc.disable()
    for case in importlib.import_module(f"benchmarks.{part}").SUITE.cases():
        way = case.ways[OURS]
        print(json.dumps([case.what, _calls_for(way, 0.003)]), flush=True)
        for line in iter(sys.stdin.readline, "\n"):
            print(json.dumps(_round(way, int(line))[0]), flush=True)


class Version:
    """A process that runs the cases of one version."""

    def __init__(self, folder: Path, part: str) -> None:
        # Any: its streams are there.
        self._process: Any = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", part],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(folder), "PYTHONHASHSEED": "0"}, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def read(self) -> Any:
        """The next answer, or None at the end."""
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def run(self, calls: int) -> float:
        """CPU microseconds of a call."""
        print(calls, file=self._process.stdin)
        return self.read()

    def close(self) -> None:
        """End the process."""
        with self._process as process:
            process.kill()

    def go_on(self) -> Any:
        """The next case."""
        print(file=self._process.stdin)
        return self.read()


def compare(folder: Path, part: str) -> list[tuple[str, float, float]]:
    """(case, microseconds of the other version, of this one) of the cases of a part: medians of all rounds."""
    times: dict[str, list[list[float]]] = {}
    for _ in range(PASSES):
        versions = [Version(folder, part), Version(ROOT, part)]
        cases = [one.read() for one in versions]
        while all(cases):
            if cases[0][0] != cases[1][0]:
                raise SystemExit(f"{part}: the cases differ from {cases[0][0]!r} and {cases[1][0]!r} on")
            calls = min(calls for _, calls in cases)
            times.setdefault(cases[0][0], []).extend([one.run(calls) for one in versions] for _ in range(ROUNDS))
            cases = [one.go_on() for one in versions]
        for one in versions:
            one.close()
    found: list[tuple[str, float, float]] = []
    for what, rounds in times.items():
        before, now = map(median, zip(*rounds, strict=True))
        print(f"{what:64} {time_shown(before):>9} {time_shown(now):>9} {shown(before / now)}", flush=True)
        found.append((f"{part}: {what}", before, now))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against")
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="+")
    options = parser.parse_args()
    # The cores of a shared machine may differ in speed.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    commit = subprocess.run(
        ["git", "-C", options.folder, "rev-parse", "--short=7", "HEAD"], stdout=subprocess.PIPE, check=True, text=True
    ).stdout.strip()
    results.store("against", (commit, [row for part in options.parts for row in compare(options.folder, part)]))


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1] == "--serve" else main()
