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


@pytest.mark.parametrize(
    "package", ["transformers", "sklearn", "matplotlib", "rich", "typer", "tensordict", "jaxtyping"]
)
def test_the_check_sees_an_import(package):
    """The test above would pass whatever tdfunc imports."""
    assert package in extra_packages(f"import torch, {package}")


@pytest.mark.slow
def test_import_time():
    """`import tdfunc` would add a wait of its own to that for torch."""
    code = "import time, torch\nstart = time.perf_counter()\nimport tdfunc\nprint(time.perf_counter() - start)"

    assert min(float(run_fresh(code)) for _ in range(5)) < 0.3
