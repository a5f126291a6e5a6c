"""Writes operations*.md, reliability_counts.md, the SBOM; tables of transforms_table, random_quality and models.md."""

from benchmarks.models import page as models
from benchmarks.pages import operations, sbom, transform_table
from benchmarks.randomness import __main__ as randomness
from benchmarks.reliability import __main__ as reliability

WRITERS = (transform_table, reliability, randomness, models, sbom)

if __name__ == "__main__":
    for writer in WRITERS:
        writer.PAGE.write_text(writer.page())
    for name, text in operations.pages().items():
        (operations.DOCS / name).write_text(text)
