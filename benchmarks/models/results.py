"""The rows by their tables, and `results.json`, which keeps what was found for each."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.models import layers
from benchmarks.models.architectures import FURTHER, NAMED, Architecture
from benchmarks.models.checks import RIGHT, Found
from benchmarks.models.rows import Example, Row

FILE = Path(__file__).with_name("results.json")
CHECKS = ("forward", "gradient", "training", "jit")


# Its masks are the product of float32 zeros and the smallest float64: NaN.
_ONLY_FLOAT32 = {"CANINE"}
# Its attention draws the keys that it looks at, also in evaluation mode.
_DRAWS = {"Informer"}


def _row_of(architecture: Architecture) -> Row:
    dtype = torch.float32 if architecture.name in _ONLY_FLOAT32 else torch.float64
    draws = architecture.name in _DRAWS
    return Row(architecture.name, architecture.make, lambda: Example((), architecture.inputs()), draws, dtype)


TABLES: dict[str, Sequence[Row]] = {
    "torch.nn": layers.ROWS,
    "transformers": [_row_of(architecture) for architecture in (*NAMED, *FURTHER)],
}


class Entry(NamedTuple):
    """What was found for a row, and its speed-up where it was measured."""

    found: Found
    speed: float | None


def third_of(name: str) -> int:
    """Return the third of the rows that a row belongs to: 0, 1 or 2, by the checksum of its name."""
    return zlib.crc32(name.encode()) % 3


def load(file: Path = FILE) -> dict[str, dict[str, Entry]]:
    """Return the kept entries by table and name."""
    if not file.exists():
        return {}
    tables = json.loads(file.read_text())["tables"]
    return {
        table: {name: Entry(Found(*found), speed) for name, (found, speed) in entries.items()}
        for table, entries in tables.items()
    }


def versions(file: Path = FILE) -> dict[str, str]:
    """Return the versions of the packages that the results are of, by their names."""
    if not file.exists():
        return {}
    return json.loads(file.read_text())["versions"]


def store(tables: dict[str, dict[str, Entry]], of: dict[str, str], file: Path = FILE) -> None:
    """Keep entries in the order of the rows, without entries of rows that are gone."""
    kept: dict[str, dict[str, Entry]] = {}
    for table, rows in TABLES.items():
        found = tables.get(table, {})
        kept[table] = {row.name: found[row.name] for row in rows if row.name in found}
    file.write_text(json.dumps({"versions": of, "tables": kept}, indent=1) + "\n")


def claims(found: Found) -> dict[str, bool]:
    """Return the good that is said of a row, by the name of each claim."""
    said = {check: getattr(found, check) == RIGHT for check in CHECKS}
    return {**said, "stacked": found.way == "vmap", "silent": not found.warns}
