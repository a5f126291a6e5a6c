"""Writes operations*.md, reliability_counts.md, tables of transforms_table.md and random_quality.md, and the SBOM."""

from benchmarks.pages import operations, sbom, transform_table
from benchmarks.randomness import __main__ as randomness
from benchmarks.reliability import __main__ as reliability

WRITERS = (transform_table, reliability, randomness, sbom)

if __name__ == "__main__":
    for writer in WRITERS:
        writer.PAGE.write_text(writer.page())
    for name, text in operations.pages().items():
        (operations.DOCS / name).write_text(text)
