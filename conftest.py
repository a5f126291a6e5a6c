"""Names that the doctests of tdfunc may use without importing them; and garbage collection of new objects alone."""

import gc

import pytest

# The modules and tests of a run live until its end: a collection that walks over them all takes most of a second.
gc.disable()


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
