"""Writes docs/operations.md, the table of docs/transforms.md and docs/reliability.md."""

from benchmarks.pages import operations, transform_table
from benchmarks.reliability import __main__ as reliability

WRITERS = (operations, transform_table, reliability)

if __name__ == "__main__":
    for writer in WRITERS:
        writer.PAGE.write_text(writer.page())
