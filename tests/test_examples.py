"""The programs of docs/examples: each runs as a stranger would run it, and stands on their page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.pages import gallery

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
# A program that takes a minute is run with fewer steps.
SHORT = {"language_model": ("--text", "6", "--chats", "4", "--rewards", "2")}


def run_program(path, folder):
    """Run a program in a process of its own, which works in `folder`; return what it printed."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path), *SHORT.get(path.stem, ())]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "a program that people copy runs without warnings"
    assert list(folder.iterdir()) == [], "a program leaves no files behind"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_program_runs(path, tmp_path):
    """A program's assertions hold, it prints something, warns of nothing and cleans up."""
    assert run_program(path, tmp_path).strip()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_the_page_shows_every_program(path):
    """The page links to each program, includes its text and the end of its output."""
    page = gallery.PAGE.read_text()

    assert f"[{path.name}]({path.name})" in page
    assert f'--8<-- "docs/examples/{path.name}"' in page
    assert gallery.block(path.name).search(page)[2].strip()


def test_the_page_shows_no_other_program():
    """As many texts and outputs as there are programs."""
    page = gallery.PAGE.read_text()

    assert page.count("--8<--") == len(PROGRAMS)
    assert page.count(" prints: -->") == len(PROGRAMS)


def test_outputs_on_the_page_are_replaced():
    """The block of a program gets the last lines of its output, and a program without a block is an error."""
    page = "<!-- a.py prints: -->\n\n```` { .text .output .no-copy }\nold\n````\n"
    new = gallery.replace(page, "a.py", "".join(f"{number}\n" for number in range(20)))

    assert gallery.block("a.py").search(new)[2].splitlines() == ["...", *map(str, range(13, 20))]
    assert gallery.replace(new, "a.py", "old\n") == page
    with pytest.raises(ValueError, match="one block for b.py"):
        gallery.replace(page, "b.py", "")


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("assert 1 == 2", "1 == 2"),
        ("import warnings; warnings.warn('slow')", "without warnings"),
        ("open('left', 'w').close()", "leaves no files"),
    ],
    ids=["a failure", "a warning", "a file"],
)
def test_the_check_notices(code, complaint, tmp_path):
    """A program that fails, warns or leaves a file fails the check."""
    program, folder = tmp_path / "program.py", tmp_path / "empty"
    program.write_text(code)
    folder.mkdir()

    with pytest.raises(AssertionError, match=complaint):
        run_program(program, folder)
