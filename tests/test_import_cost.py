"""`import tdfunc` loads its five dependencies and nothing else."""

import json
import subprocess
import sys

import pytest

DEPENDENCIES = "import torch, numpy, optree, safetensors.torch, xxhash"


def run_fresh(code):
    """Run code in a fresh interpreter and return what it printed."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def loaded_packages(imports):
    """Names of the third-party packages in memory after `imports`."""
    modules = json.loads(run_fresh(f"{imports}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"))
    return {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names) - {"__main__"}


def extra_packages(imports):
    """What `imports` loads beyond tdfunc's dependencies."""
    return loaded_packages(imports) - loaded_packages(DEPENDENCIES) - {"tdfunc"}


def test_import_loads_only_the_dependencies():
    """Every user would wait for transformers, sklearn, matplotlib, ... or need them installed."""
    assert extra_packages("import tdfunc") == set()


# One is enough to show it; the others are slow to import.
@pytest.mark.parametrize(
    "package",
    ["rich", *(pytest.param(name, marks=pytest.mark.slow) for name in ("transformers", "sklearn", "matplotlib"))],
)
def test_the_check_sees_an_import(package):
    """The test above would pass whatever tdfunc imports."""
    assert package in extra_packages(f"import torch, {package}")
