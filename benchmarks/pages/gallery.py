"""`python -m benchmarks.pages.gallery [NAME ...]`: run the example programs and keep the end of their output.

The sentences of docs/examples/index.md are written by hand; the block after each `<!-- NAME prints: -->` is not.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "examples"
PAGE = FOLDER / "index.md"
# A card of the page has room for so many lines.
LINES = 8


def run(path: Path) -> str:
    """Return what a program prints, run in an empty folder on one thread."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, path], cwd=folder, env=env, capture_output=True, text=True, check=True)
    return done.stdout


def end_of(printed: str) -> str:
    """Return the last lines of an output, after an ellipsis if some are left out."""
    lines = printed.rstrip().splitlines()
    return "\n".join(lines if len(lines) <= LINES else ["...", *lines[-LINES + 1 :]])


def block(name: str) -> re.Pattern[str]:
    """Return the pattern of a program's output on the page: its marker and fence, the text, and the closing fence."""
    fence = re.escape("```` { .text .output .no-copy }\n")
    return re.compile(rf"(<!-- {re.escape(name)} prints: -->\n\n{fence})(.*?)(\n?````\n)", re.DOTALL)


def replace(page: str, name: str, printed: str) -> str:
    """Return the page with the output of a program."""
    replaced, count = block(name).subn(lambda found: f"{found[1]}{end_of(printed)}\n````\n", page)
    if count != 1:
        raise ValueError(f"{PAGE} must have one block for {name}, and has {count}")
    return replaced


def main(names: list[str]) -> None:
    for path in [FOLDER / name for name in names] or sorted(FOLDER.glob("*.py")):
        PAGE.write_text(replace(PAGE.read_text(), path.name, run(path)))
        print(f"written: the output of {path.name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
