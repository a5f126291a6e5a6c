"""Type checkers infer the fields and the constructor of a typed tree."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.typing.documented import MYPY, run_mypy

FOLDER = Path(__file__).parent
# A file with statements to check -> how many of them an editor marks.
SAMPLES = {"tensorclass_sample.py": 8, "functions_sample.py": 1, "guides_sample.py": 2, "users_sample.py": 7}
# What mypy reads as pyright does: the other samples use brackets for options, which mypy cannot know.
BOTH = ("users_sample.py", "guides_sample.py")


def check(path):
    """(line, rule) of pyright's findings in a file."""
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parent.parent, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {(each["range"]["start"]["line"] + 1, each.get("rule", each["message"])) for each in found}


def expected(path):
    """(line, rule) of the comments `# error: rule`."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return {(number, match[1]) for number, line in lines if (match := re.search(r"# error: (\w+)$", line))}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_sample(name):
    """Pyright infers the types that the sample names, and reports the errors that it marks."""
    pytest.importorskip("pyright")

    assert len(expected(FOLDER / name)) == SAMPLES[name]
    assert check(FOLDER / name) == expected(FOLDER / name)


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_samples_in_mypy(tmp_path):
    """Mypy infers the same types, and reports errors at the same lines."""
    for name in BOTH:
        (tmp_path / name).write_text((FOLDER / name).read_text())
    lines = {(name, line) for name in BOTH for line, _ in expected(FOLDER / name)}

    assert {
        (name, line) for name, line, _ in run_mypy(tmp_path, MYPY.replace("strict_optional = False\n", ""))
    } == lines
