"""Writes the SBOM, and the tables of differences.md, reliability.md, transforms_table.md and models.md.

`--show methods functions arguments` prints all names of tensordict and their counterparts, `--show torchrl` the
differences from its wrappers, and `--show transforms` each operation under each transformation.
"""

import argparse
from pathlib import Path

from benchmarks.models import page as models
from benchmarks.pages import operations, sbom, transform_table
from benchmarks.terminal import show
from benchmarks.trust import __main__ as trust

# tests/test_pages.py compares their pages; the names of operations are compared beside a newer tensordict.
WRITERS = (transform_table, trust, models, sbom)
TORCHRL = Path(__file__).with_name("torchrl.md")


def parts() -> dict[str, str]:
    """Return the complete tables by their names."""
    return {**operations.full(), "torchrl": TORCHRL.read_text(), "transforms": transform_table.table()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--show", nargs="*", metavar="PART", help="print these tables, or list them")
    options = parser.parse_args()
    if options.show is not None:
        show(options.show, parts(), parser.prog)
        return
    for writer in (*WRITERS, operations):
        writer.PAGE.write_text(writer.page())


if __name__ == "__main__":
    main()
