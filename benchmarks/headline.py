"""The table of the first pages: `python -m benchmarks.headline` measures its rows, in three minutes, and writes it.

The rows of each machine are kept in `headline.json`; the table shows the range over machines. JAX is measured where the
environment of `make bench` is there.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Before torch starts its pools.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from benchmarks import results
from benchmarks.measure import Effort, measure
from benchmarks.rows import OURS, Way
from benchmarks.training import EQUINOX, JAX_PYTHON, LOOP, STACKED, in_jax
from benchmarks.widths import width_ways

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs/index.md")
KEPT = Path(__file__).with_name("headline.json")
BEGIN, END = "<!-- written by `python -m benchmarks.headline` -->\n\n", "\n<!-- end -->"
MEMBERS = 64
ROWS = (
    ("MLP", 16),
    ("MLP", 64),
    ("MLP", 256),
    ("MLP", 512),
    ("MLP", 1024),
    ("transformer", 32),
    ("transformer", 64),
)
RIVALS = {
    LOOP: "a loop, fused Adam",
    STACKED: "`torch.func`, one fused Adam",
    EQUINOX: "equinox, donated",
}
# Shown as the end of the gain.
EVEN = 1.05


class Run(NamedTuple):
    """What one machine measured: for each row the microseconds of each way."""

    processor: str
    versions: str
    rows: dict[str, dict[str, float]]


def row_ways(model: str, width: int) -> dict[str, Way]:
    """Return the step of the guides, and the best step of each rival."""
    ways = width_ways(model, width, MEMBERS)
    found = {way: ways[way] for way in (OURS, LOOP, STACKED)}
    if JAX_PYTHON.exists():
        found[EQUINOX] = in_jax(EQUINOX, model.lower(), MEMBERS, 0.0, width)
    return found


def measure_rows(effort: Effort) -> Run:
    """Measure all rows on this machine."""
    torch.set_num_threads(1)
    machine = results.describe_machine()
    rows: dict[str, dict[str, float]] = {}
    for model, width in ROWS:
        timings = measure(row_ways(model, width), effort)
        rows[f"{model} {width}"] = {way: timing.cpu_us for way, timing in timings.items()}
        print(
            f"{model} {width}: "
            + ", ".join(f"{way} {us / 1000:.2f} ms" for way, us in rows[f"{model} {width}"].items())
        )
    return Run(machine["processor"], machine["versions"], rows)


def load() -> list[Run]:
    """Return the runs that are kept, one for each processor."""
    if not KEPT.exists():
        return []
    return [Run(*run) for run in json.loads(KEPT.read_text())]


def keep(run: Run) -> list[Run]:
    """Replace the run of this processor, and return all."""
    runs = sorted([*[old for old in load() if old.processor != run.processor], run])
    KEPT.write_text(json.dumps(runs, indent=1) + "\n")
    return runs


def render(runs: Sequence[Run]) -> str:
    """Return the table, and the machines under it."""
    lines = [
        f"| {MEMBERS} members of | width | " + " | ".join(f"against {name}" for name in RIVALS.values()) + " |",
        "|---|--:|" + "--:|" * len(RIVALS),
    ]
    for model, width in ROWS:
        cells = [_range([_ratio(run.rows[f"{model} {width}"], rival) for run in runs]) for rival in RIVALS]
        lines.append(f"| {model} | {width} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"*One thread of an {_name_machines(runs)}.*", ""])


def _name_machines(runs: Sequence[Run]) -> str:
    """Return the processors, each with its versions where they differ."""
    names = [run.processor.partition(", ")[0] for run in runs]
    versions = [run.versions.partition(", tensordict")[0] for run in runs]
    if len(set(versions)) == 1:
        return f"{' and of an '.join(names)}; {versions[0]}"
    return " and of an ".join([f"{name} ({version})" for name, version in zip(names, versions, strict=True)])


def _ratio(times: dict[str, float], rival: str) -> float | None:
    if rival not in times:
        return None
    return times[rival] / times[OURS]


def _range(ratios: Sequence[float | None]) -> str:
    found = sorted([ratio for ratio in ratios if ratio is not None])
    if not found:
        return "not measured"
    low, high = _spell(found[0]), _spell(found[-1])
    text = f"{low}x" if low == high else f"{low} to {high}x"
    if found[0] > EVEN:
        return f"**{text}**"
    return text


def _spell(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"


def write(runs: Sequence[Run]) -> None:
    """Replace the table on the first pages."""
    for page in PAGES:
        before, _, rest = page.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        page.write_text(before + BEGIN + render(runs) + END + after)


def main() -> None:
    """Measure, keep and write."""
    runs: list[Any] = keep(measure_rows(Effort(rounds=9, passes=2, round_s=0.05, longest_s=5)))
    write(runs)


if __name__ == "__main__":
    main()
