"""`import tdfunc` loads its five dependencies and nothing else."""

import json
import subprocess
import sys

import pytest

DEPENDENCIES = "import torch, numpy, optree, xxhash"


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


@pytest.mark.slow
def test_import_loads_only_the_dependencies():
    """Every user would wait for transformers, sklearn, matplotlib, ... or need them installed."""
    assert extra_packages("import tdfunc") == set()


@pytest.mark.slow
def test_packages_are_imported_at_their_first_use():
    """After `import tdfunc` the packages that it gives lazily are not in memory; using one imports it."""
    code = "import sys, tdfunc\nfor n in ('llm', 'nn', 'sklearn', 'spec'): print('tdfunc.' + n in sys.modules)"

    assert run_fresh(code).split() == ["False"] * 4
    assert run_fresh(f"{code}\nprint(tdfunc.nn.dispatch, tdfunc.llm.History)").count("False") == 4


@pytest.mark.slow
def test_conversations_need_torch_only():
    """transformers, tokenizers and jinja2 are imported with the first tokenizer."""
    assert extra_packages("import tdfunc.llm; tdfunc.llm.chatml.parse('<|im_start|>user\\n')") == set()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["rich", "transformers", "sklearn", "matplotlib"])
def test_the_check_sees_an_import(package):
    """The test above would pass whatever tdfunc imports."""
    assert package in extra_packages(f"import torch, {package}")


@pytest.mark.slow
def test_the_first_writes_and_operations_import_nothing_large():
    """The first `update_` of a process would take half a second: some calls of torch import sympy."""
    calls = (
        "td = TensorDict({'a': torch.zeros(3, 4)}, [3, 4]); row = TensorDict({'a': torch.ones(4)}, [4]);"
        "td.update_({'a': torch.ones(3, 4)}); td.set_('a', torch.ones(4)); td.at[0].set_(row); td + row;"
        "td[torch.arange(3)[:, None], torch.arange(4)]"
    )

    assert "sympy" not in loaded_packages(f"import torch\nfrom tdfunc import TensorDict\n{calls}")
