"""`python -m benchmarks`: measure everything, print it, write docs/benchmarks.md."""

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

# Before torch starts its pools.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from benchmarks import (
    ENVIRON,
    background,
    compiled,
    ensembles,
    families,
    gather,
    llm,
    mapping,
    memory,
    modules,
    nn,
    optimizers,
    scaling,
    storage,
    tensorclass,
    training,
    trees,
)
from benchmarks.measure import QUICK, Effort, Timing
from benchmarks.page import Results, write
from benchmarks.rows import OURS, Measured, Suite, Verdict, judge, measure_cases, shown, time_shown

ROOT = Path(__file__).parent.parent
ALL = (
    trees.SUITE,
    families.SUITE,
    tensorclass.SUITE,
    modules.SUITE,
    nn.SUITE,
    llm.SUITE,
    training.SUITE,
    optimizers.SUITE,
    storage.SUITE,
    background.SUITE,
    gather.SUITE,
    mapping.SUITE,
)
SUITES = {suite.name: suite for suite in ALL}
OTHERS = ("newer", "scaling", "ensembles", "compiled", "memory")


def say(text: str) -> None:
    print(text, flush=True)


def run_suite(suite: Suite, effort: Effort) -> list[Measured]:
    say(f"\n{suite.title}")
    found = measure_cases(suite.cases(), effort)
    for m in found:
        times = "".join(
            f"  {rival} {time_shown(m.time_us(rival, suite.clock))} ({shown(m.ratio_to(rival, suite.clock))})"
            for rival in m.timings
            if rival != OURS
        )
        say(f"  {m.what:48} {time_shown(m.time_us(OURS, suite.clock)):>9}{times}")
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
    measured = [
        Measured(what, {k: Timing(*t) for k, t in timings.items()}, per) for what, timings, per in found["measured"]
    ]
    say(f"\nTree operations against tensordict {found['version']}")
    for m in measured:
        say(f"  {m.what:48} {shown(m.ratio_to(trees.OTHER))}")
    return found["version"], measured


def print_json(effort: Effort) -> None:
    measured = measure_cases(trees.SUITE.cases(), effort)
    print(json.dumps({"version": version("tensordict"), "measured": measured}))


def run(only: str | None, quick: bool, newer: Path) -> Results:
    effort = QUICK if quick else Effort()

    def wanted(name: str) -> bool:
        return only in (None, name)

    suites: list[tuple[Suite, list[Measured], list[Verdict]]] = []
    for name, suite in SUITES.items():
        if not wanted(name):
            continue
        measured = run_suite(suite, effort)
        verdicts = [judge(row, measured, suite.clock) for row in suite.rows]
        for verdict in verdicts:
            say(f"  {verdict.row.title}, against {verdict.row.rival}: {shown(verdict.value)}; {verdict.sentence}")
        suites.append((suite, measured, verdicts))
    leaves = scaling.QUICK_LEAVES if quick else scaling.LEAVES
    return Results(
        suites,
        run_newer(newer, quick) if wanted("newer") else None,
        scaling.growth(leaves, effort, say) if wanted("scaling") else [],
        scaling.depth(effort) if wanted("scaling") else [],
        ensembles.cells(effort, say) if wanted("ensembles") else [],
        compiled.compile_counts(say) if wanted("compiled") else [],
        memory.peaks(say) if wanted("memory") else [],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=[*SUITES, *OTHERS], help="measure one part and print it; no page is written")
    parser.add_argument("--quick", action="store_true", help="few and short rounds: shows that it runs, not how fast")
    parser.add_argument("--out", type=Path, help="the page to write (default: docs/benchmarks.md, if all is measured)")
    parser.add_argument(
        "--newer", type=Path, default=Path(sys.prefix) / "tensordict-newer", help="a folder with a newer tensordict"
    )
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.json:
        print_json(QUICK if options.quick else Effort())
        return
    results = run(options.only, options.quick, options.newer)
    complete = options.only is None and not options.quick
    out = options.out or (ROOT / "docs" / "benchmarks.md" if complete else None)
    if out is None:
        say("\nnot written: only a full run replaces docs/benchmarks.md (or pass --out)")
        return
    write(results, out)
    say(f"\nwritten: {out}")


if __name__ == "__main__":
    main()
