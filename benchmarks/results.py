"""Measurements by part, kept as JSON in `benchmarks/results/`, so that one part of the page can be measured again."""

import json
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compiled import Compiled
from benchmarks.ensembles import Cell
from benchmarks.measure import Line, Timing
from benchmarks.memory import Peak
from benchmarks.rows import Measured, Suite
from benchmarks.scaling import Depth, Growth

FOLDER = Path(__file__).with_name("results")


class Results(NamedTuple):
    """Measurements; parts that were not measured are empty. Machines, as `describe_machine` does, by part."""

    suites: Sequence[tuple[Suite, list[Measured]]] = ()
    newer: tuple[str, list[Measured]] | None = None
    growths: Sequence[Growth] = ()
    depths: Sequence[Depth] = ()
    cells: Sequence[Cell] = ()
    compiled: Sequence[Compiled] = ()
    peaks: Sequence[Peak] = ()
    machines: dict[str, dict[str, str]] = {}
    # Another version's commit; the case, its microseconds there and here.
    against: tuple[str, Sequence[tuple[str, float, float]]] | None = None
    # What `benchmarks.gpu` has stored, a dict for each device.
    gpus: Sequence[dict[str, Any]] = ()


def store(part: str, found: Any, folder: Path = FOLDER) -> None:
    """Replace the measurements of a part by tuples, lists and dicts that were just measured on this machine."""
    folder.mkdir(exist_ok=True)
    text = json.dumps({"machine": describe_machine(), "found": found}, indent=1)
    (folder / f"{part}.json").write_text(text + "\n")


def load(suites: Sequence[Suite], folder: Path = FOLDER) -> Results:
    """Return the measurements that are kept."""
    every = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    kept = {part: content for part, content in every.items() if "found" in content}
    found = {part: content["found"] for part, content in kept.items()}
    growths, depths = found.get("scaling", ((), ()))
    return Results(
        [(suite, read_measured(found[suite.name])) for suite in suites if suite.name in found],
        (found["newer"][0], read_measured(found["newer"][1])) if found.get("newer") else None,
        [Growth(what, {int(n): us for n, us in costs.items()}, Line(*line)) for what, costs, line in growths],
        [Depth(*depth) for depth in depths],
        [
            Cell(model, members, chosen, _read_timings(timings))
            for model, members, chosen, timings in found.get("ensembles", ())
        ],
        [Compiled(*row) for row in found.get("compiled", ())],
        [Peak(*row) for row in found.get("memory", ())],
        {part: content["machine"] for part, content in kept.items()},
        found.get("against"),
        tuple([content for content in every.values() if "found" not in content]),
    )


def read_measured(rows: Sequence[Any]) -> list[Measured]:
    """Return the cases that were written as JSON."""
    return [Measured(what, _read_timings(timings), *rest) for what, timings, *rest in rows]


def _read_timings(timings: dict[str, Any]) -> dict[str, Timing]:
    return {way: Timing(*timing) for way, timing in timings.items()}


def describe_machine() -> dict[str, str]:
    """Return the processor, the system and the versions."""
    names = ("torch", "tensordict", "optree", "numpy")
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores; one is used",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version_of(name)}" for name in ("tdfunc", *names)),
    }


def _processor() -> str:
    """Return the model's name, with its generation where one name stands for several."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor() or "unknown"
    fields = dict(re.findall(r"^([^\t\n]+)\t*: (.*)$", first, re.MULTILINE))
    name = fields.get("model name", "unknown")
    if fields.get("vendor_id") != "AuthenticAMD":
        return name
    generation = _amd_generation(int(fields["cpu family"]), int(fields["model"]))
    return f"{name} ({generation})"


def _amd_generation(family: int, model: int) -> str:
    """Return the name of a core by its family, as in AMD's revision guides: clouds call each of them "AMD EPYC"."""
    if family == 26:
        return "Zen 5"
    if family == 25:
        return "Zen 3" if model < 0x10 or 0x20 <= model < 0x60 else "Zen 4"
    return f"family {family}"


def version_of(name: str) -> str:
    """Return the version of a distribution, "?" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "?"
