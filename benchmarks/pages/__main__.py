"""Writes the SBOM and the tables of reliability.md, transforms_table.md and models.md."""

from benchmarks.models import page as models
from benchmarks.pages import operations, sbom, transform_table
from benchmarks.trust import __main__ as trust

WRITERS = (transform_table, trust, models, sbom)

if __name__ == "__main__":
    for writer in WRITERS:
        writer.PAGE.write_text(writer.page())
    for name, text in operations.pages().items():
        (operations.DOCS / name).write_text(text)
