"""The workflows of .github/ are valid, and have no more rights than they need; GitHub alone runs them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()


def check(*paths):
    """Run the checker of schemas, which has the schema of workflows; return its status and its output."""
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.github-workflows",
        *map(str, paths),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def steps(path):
    """All steps of a workflow."""
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def test_workflows_follow_the_schema():
    """Each workflow has the keys and the types that GitHub reads."""
    assert check(*WORKFLOWS)[0] == 0, check(*WORKFLOWS)[1]


def test_a_misspelt_key_is_found(tmp_path):
    """The check fails for a key that GitHub does not have."""
    path = tmp_path / "ci.yml"
    path.write_text("on: push\njobs:\n  a:\n    runs-on: ubuntu-latest\n    stepz: []\n")

    assert check(path)[0] == 1


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_rights_are_given_by_job(path):
    """A workflow may read the repository, and a job that needs more has it for itself."""
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned(path):
    """Each action has a version."""
    actions = [step["uses"] for step in steps(path) if "uses" in step]

    assert [name for name in actions if not re.search(r"@v\d", name)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_targets_exist(path):
    """A target of make in a workflow is a rule of the Makefile."""
    targets = [step["run"].split()[1] for step in steps(path) if step.get("run", "").startswith("make ")]

    assert targets
    assert [name for name in targets if not re.search(rf"^{name}:", MAKEFILE, re.MULTILINE)] == []


def test_a_release_tests_its_tag():
    """The step of release.yml ends with an error if the tag is not the version, and only then."""
    (script,) = [s["run"] for s in steps(ROOT / ".github/workflows/release.yml") if "TAG" in s.get("env", {})]
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    # The step runs Python 3.11, where tomllib is; any Python of these tests reads the same number.
    script = re.sub(r"\$\(python .*\)", version, script)
    codes = [
        subprocess.run(["bash", "-e", "-c", script], env={"TAG": tag}, capture_output=True).returncode
        for tag in (f"v{version}", "v0.0.1", version)
    ]

    assert codes == [0, 1, 1]
