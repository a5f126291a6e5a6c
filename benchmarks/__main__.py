"""`python -m benchmarks`: measure all parts, or some, keep the numbers in `results/`, write docs/benchmarks.md.

`--show PART ...` prints all rows of parts from the kept numbers, and measures nothing.
"""

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before torch starts its pools.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from benchmarks import (
    ENVIRON,
    background,
    compiled,
    ensembles,
    families,
    first_calls,
    gather,
    guide,
    llm,
    lora,
    mapping,
    memory,
    messages,
    modules,
    nn,
    optimizers,
    recurrent,
    results,
    scaling,
    storage,
    tensorclass,
    training,
    trees,
    widths,
)
from benchmarks.measure import QUICK, Effort
from benchmarks.page import render, write
from benchmarks.rows import OURS, Measured, Suite, judge_suite, measure_suite, shown, time_shown
from benchmarks.terminal import show

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
ALL = (
    trees.SUITE,
    families.SUITE,
    tensorclass.SUITE,
    modules.SUITE,
    nn.SUITE,
    llm.SUITE,
    training.SUITE,
    first_calls.SUITE,
    widths.SUITE,
    guide.SUITE,
    recurrent.SUITE,
    lora.SUITE,
    optimizers.SUITE,
    storage.SUITE,
    background.SUITE,
    gather.SUITE,
    mapping.SUITE,
    messages.SUITE,
)
SUITES = {suite.name: suite for suite in ALL}
OTHERS = ("newer", "scaling", "ensembles", "compiled", "memory")


def say(text: str) -> None:
    print(text, flush=True)


def run_suite(suite: Suite, effort: Effort) -> list[Measured]:
    say(f"\n{suite.title}")
    found: list[Measured] = []
    for m in measure_suite(suite, effort):
        times = "".join(
            f"  {rival} {time_shown(m.time_us(rival, suite.clock))} ({shown(m.ratio_to(rival, suite.clock))})"
            for rival in m.timings
            if rival != OURS
        )
        left_out = "".join(f"  {rival} over {time_shown(us)}" for rival, us in m.over_us.items())
        say(f"  {m.what:48} {time_shown(m.time_us(OURS, suite.clock)):>9}{times}{left_out}")
        found.append(m)
    for verdict in judge_suite(suite, found):
        say(f"  {verdict.row.title}, against {verdict.row.rival}: {shown(verdict.value)}; {verdict.sentence}")
    return found


def run_newer(folder: Path, quick: bool) -> tuple[str, list[Measured]] | None:
    """Measure the tree operations against another tensordict, which needs a process of its own."""
    if not (folder / "tensordict").is_dir():
        say(f"\nno newer tensordict in {folder}: `make bench` puts one there")
        return None
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "benchmarks", "--json", *(["--quick"] if quick else [])]
    done = subprocess.run(
        command,
        env={**ENVIRON, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=Path.cwd(),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the process for the newer tensordict failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    measured = results.read_measured(found["measured"])
    say(f"\nTree operations against tensordict {found['version']}")
    for m in measured:
        say(f"  {m.what:48} {shown(m.ratio_to(trees.OTHER))}")
    return found["version"], measured


def print_json(effort: Effort) -> None:
    measured = list(measure_suite(trees.SUITE, effort))
    print(json.dumps({"version": version("tensordict"), "measured": measured}))


def measure_part(part: str, effort: Effort, newer: Path) -> Any:
    """Return the measurements of a part: what `results` stores and reads again."""
    if part in SUITES:
        return run_suite(SUITES[part], effort)
    if part == "newer":
        return run_newer(newer, effort == QUICK)
    if part == "scaling":
        leaves = scaling.QUICK_LEAVES if effort == QUICK else scaling.LEAVES
        return scaling.growth(leaves, effort, say), scaling.depth(effort)
    if part == "ensembles":
        return ensembles.cells(effort, say)
    return compiled.compile_counts(say) if part == "compiled" else memory.peaks(say)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", choices=[*SUITES, *OTHERS], nargs="*", metavar="PART", help="measure these parts again, or none"
    )
    parser.add_argument(
        "--show", nargs="*", metavar="PART", help="print the kept rows of these parts, or list the parts"
    )
    parser.add_argument("--quick", action="store_true", help="few and short rounds, only printed: shows that it runs")
    parser.add_argument(
        "--newer", type=Path, default=Path(sys.prefix) / "tensordict-newer", help="a folder with a newer tensordict"
    )
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.show is not None:
        show(options.show, render(results.load(ALL)), parser.prog)
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    effort = QUICK if options.quick else Effort()
    if options.json:
        print_json(effort)
        return
    for part in (*SUITES, *OTHERS) if options.only is None else options.only:
        found = measure_part(part, effort, options.newer)
        if not options.quick:
            results.store(part, found)
    if not options.quick:
        write(results.load(ALL), PAGE)
        say(f"\nwritten: {PAGE}")


if __name__ == "__main__":
    main()
