"""The programs of docs/examples: each runs as a stranger would run it, and stands on their page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_page_shows_every_program():
    """The page links to each program, includes its text, and to nothing else."""
    page = (EXAMPLES / "index.md").read_text()

    for path in PROGRAMS:
        assert f"[{path.name}]({path.name})" in page
        assert f'--8<-- "docs/examples/{path.name}"' in page
    assert page.count("--8<--") == len(PROGRAMS)


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
