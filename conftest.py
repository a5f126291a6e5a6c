"""Doctests: those of tdfunc alone, with names that need no import; garbage collection of new objects alone; hangs."""

import faulthandler
import gc
import time
from collections import Counter
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule
from _pytest.faulthandler import fault_handler_stderr_fd_key

PACKAGE = Path(__file__).parent / "tdfunc"
# Python's alarm (`timeout` in pyproject.toml) does not reach a test that waits outside of Python for ever.
HANGS_S, ARMED_S = 360, 30
armed = -float("inf")

# The modules and tests of a run live until its end: a collection that walks over them all takes most of a second.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """Look for doctests in the package: other files are read once, and programs among them are not imported."""
    found = yield
    return found if file_path.is_relative_to(PACKAGE) else [one for one in found if not isinstance(one, DoctestModule)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Make all cases of a large table slow, except one of every n; CI runs them all."""
    numbers = Counter()
    for item in items:
        marker = item.get_closest_marker("sample")
        if marker is None:
            continue
        (n,) = marker.args
        if numbers[item.path] % n:
            item.add_marker(pytest.mark.slow)
        numbers[item.path] += 1


def pytest_collection_finish():
    """Leave out of later collections all that there is now."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End the process of a test that hangs, with its stacks; pytest's own option for it costs each test a thread."""
    global armed
    if time.monotonic() - armed > ARMED_S:
        armed = time.monotonic()
        faulthandler.dump_traceback_later(HANGS_S, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])
    return (yield)


def pytest_sessionfinish():
    """A worker may wait for others for long."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def _names_of_doctests(doctest_namespace):
    import torch

    import tdfunc

    # Classes only: a module's own functions, and builtins such as `map`, keep their meaning.
    classes = {name: value for name, value in vars(tdfunc).items() if isinstance(value, type)}
    doctest_namespace.update(classes, torch=torch, nn=torch.nn, tdf=tdfunc)
