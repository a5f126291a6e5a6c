"""`from_jax` and `to_jax`: the tests of jax_cases.py, where `make bench` has installed JAX."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import python_blocks

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "trees.md"
JAX_PYTHON = Path(os.environ.get("TDFUNC_JAX_PYTHON", Path(sys.prefix) / "jax" / "bin" / "python"))
PACKAGES = next(iter(JAX_PYTHON.parents[1].glob("lib/python*/site-packages")), None)
# Last in the path: torch and the packages of both environments come from this one.
SCRIPT = "import sys; sys.path.append(sys.argv.pop(1)); import pytest; sys.exit(pytest.main(sys.argv[1:]))"


def guide_blocks(text):
    """The blocks of a page that need JAX."""
    return [block.code for block in python_blocks(text) if block.tag == "{no-run}" and "jax" in block.code]


@pytest.mark.slow
@pytest.mark.skipif(PACKAGES is None, reason="no environment with JAX: `make bench` installs one")
def test_with_jax():
    """All cases pass in a process that finds JAX."""
    cases = str(ROOT / "tests" / "ops" / "jax_cases.py")
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(PACKAGES), "-q", "-p", "no:cacheprovider", cases],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stdout[-4000:]
