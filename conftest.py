"""Names that the doctests of tdfunc may use without importing them."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _names_of_doctests(doctest_namespace):
    import tdfunc

    # Classes only: a module's own functions, and builtins such as `map`, keep their meaning.
    classes = {name: value for name, value in vars(tdfunc).items() if isinstance(value, type)}
    doctest_namespace.update(classes, torch=torch, nn=torch.nn, tdf=tdfunc)
