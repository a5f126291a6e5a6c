"""Optional packages: an error says what to install."""

import builtins

import pytest
import torch

import tdfunc as tdf
from tdfunc.llm import load_pretrained
from tdfunc.parallel.ray import RayExecutor
from tests.storage.scripts import ended, run

TREE = tdf.TensorDict({"a": torch.zeros(4)}, [4])
CALLS = {
    "summary": (lambda: TREE.summary(), "rich", "pip install rich"),
    "map": (lambda: TREE.map(abs, executor="threads", num_workers=2, pbar=True), "tqdm", r"tdfunc\[cli\]"),
    "to_pandas": (lambda: TREE.to_pandas(), "pandas", "pip install pandas"),
    "RayExecutor": (RayExecutor, "ray", r"tdfunc\[ray\]"),
    "load_pretrained": (lambda: load_pretrained("."), "transformers", r"tdfunc\[llm\]"),
    "sweep_table": (lambda: tdf.plots.sweep_table(TREE, torch.ones(4)), "matplotlib", r"tdfunc\[plot\]"),
    "from_jax": (lambda: tdf.from_jax({"a": 1}), "jax", r"tdfunc\[jax\]"),
    "to_jax": (lambda: tdf.to_jax(TREE), "jax", r"tdfunc\[jax\]"),
    "save": (lambda: tdf.save(TREE, "memory://a.safetensors"), "fsspec", r"tdfunc\[remote\]"),
}


@pytest.mark.parametrize(("call", "package", "install"), CALLS.values(), ids=CALLS)
def test_a_missing_package_is_named(call, package, install, monkeypatch):
    """With the line that installs it."""
    plain = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises((ImportError, tdf.UnsupportedError), match=install):
        call()


@pytest.mark.slow
def test_the_module_of_estimators_names_its_package():
    """`tdfunc.sklearn` imports scikit-learn when it is imported."""
    script = """
        import sys
        sys.modules["sklearn"] = None
        import tdfunc
        try:
            tdfunc.sklearn
        except ImportError as err:
            print(err)
    """

    assert 'pip install "tdfunc[demo]"' in ended(run(script))
