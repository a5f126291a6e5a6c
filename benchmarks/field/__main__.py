"""Prints reports of other projects and the tests of tdfunc: `python -m benchmarks.field [WORD ...]`.

Only reports that contain all words are printed, such as `python -m benchmarks.field optax schedule`.
"""

import argparse
import re
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("reports.md")
_HEAD = ["report", "what it describes", "tdfunc", "test"]
_ADDRESS = re.compile(r"\[[^\]]+\]\((https://[^)]+)\)")


class Report(NamedTuple):
    """The cells of a row: links to reports, the situation, the behaviour of tdfunc, and places of tests."""

    links: str
    situation: str
    behaviour: str
    tests: str

    def __str__(self) -> str:
        return "\n".join([*_ADDRESS.findall(self.links), self.situation, f"tdfunc: {self.behaviour}", self.tests])


def read_rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of all tables of a text."""
    lines = [line for line in text.splitlines() if line.startswith("|") and set(line) - set("|-")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row != _HEAD]


def reports(words: list[str]) -> list[Report]:
    """Return the reports that contain all words, in any case."""
    found = [Report(*row) for row in read_rows(FILE.read_text())]
    return [one for one in found if all(word.lower() in " ".join(one).lower() for word in words)]


def addresses() -> int:
    """Return how many reports there are; a row may have several."""
    return sum(len(_ADDRESS.findall(one.links)) for one in reports([]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="print only reports that contain these words")
    found = reports(parser.parse_args().words)
    print("\n\n".join(map(str, found)) or "No report contains these words.")


if __name__ == "__main__":
    main()
