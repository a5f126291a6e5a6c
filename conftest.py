"""Doctests: those of tdfunc alone, with names that need no import; and garbage collection of new objects alone."""

import gc
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

PACKAGE = Path(__file__).parent / "tdfunc"

# The modules and tests of a run live until its end: a collection that walks over them all takes most of a second.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """Look for doctests in the package: other files are read once, and programs among them are not imported."""
    found = yield
    return found if file_path.is_relative_to(PACKAGE) else [one for one in found if not isinstance(one, DoctestModule)]


def pytest_collection_finish():
    """Leave out of later collections all that there is now."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _names_of_doctests(doctest_namespace):
    import torch

    import tdfunc

    # Classes only: a module's own functions, and builtins such as `map`, keep their meaning.
    classes = {name: value for name, value in vars(tdfunc).items() if isinstance(value, type)}
    doctest_namespace.update(classes, torch=torch, nn=torch.nn, tdf=tdfunc)
