"""Runs tiny models stacked, next to a loop over the modules: `python -m benchmarks.models [--rows TABLE ...]`.

Each row is printed when it is done; `results.json` keeps it, and docs/models.md is written from that file. `--only`
takes names of rows, `--speed` measures the times as well, `--page` only writes the page. `--show` prints all kept rows
of tables and runs nothing.
"""

import argparse
import os
import sys
from collections.abc import Iterator

# Before torch starts its pools.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from benchmarks.models import page
from benchmarks.models.checks import RIGHT, check, speed
from benchmarks.models.results import CHECKS, TABLES, Entry, load, store, third_of
from benchmarks.models.rows import Row
from benchmarks.results import version_of
from benchmarks.terminal import show

_WIDTH = 48


def chosen(tables: list[str], only: list[str], thirds: list[int]) -> Iterator[tuple[str, Row]]:
    for table in tables:
        for row in TABLES[table]:
            if (not only or row.name in only) and third_of(row.name) in thirds:
                yield table, row


def shown(row: Row, entry: Entry) -> str:
    """Return the line of a row."""
    found = entry.found
    texts = [f"{check}: {getattr(found, check)}" for check in CHECKS if getattr(found, check) != RIGHT]
    texts = texts or ["right"]
    texts += [found.way] if found.way else []
    texts += ["torch warns"] if found.warns else []
    texts += [f"{entry.speed:.1f}x"] if entry.speed is not None else []
    return f"  {row.name:{_WIDTH}} {'; '.join(texts)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--rows", choices=list(TABLES), nargs="*", default=list(TABLES), help="these tables")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="only these rows")
    parser.add_argument("--third", type=int, choices=range(3), nargs="*", default=[0, 1, 2], help="only these thirds")
    parser.add_argument("--speed", action="store_true", help="measure the times as well")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--show", nargs="*", metavar="TABLE", help="print the kept rows of these tables, or list them")
    options = parser.parse_args()
    if options.show is not None:
        show(options.show, page.parts(), parser.prog)
        return
    torch.set_num_threads(1)
    results = load()
    for table, row in () if options.page else chosen(options.rows, options.only, options.third):
        kept = results.setdefault(table, {})
        found = check(row)
        speed_of = kept[row.name].speed if row.name in kept else None
        if options.speed:
            speed_of = round(speed(row), 1) if found.jit == RIGHT else None
        kept[row.name] = Entry(found, speed_of)
        print(shown(row, kept[row.name]), flush=True)
    if not options.page:
        packages = {name: version_of(name) for name in ("torch", "transformers")}
        store(results, {"Python": sys.version.split()[0], **packages})
    page.PAGE.write_text(page.page())
    print(f"written: {page.PAGE}")


if __name__ == "__main__":
    main()
