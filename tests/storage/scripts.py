"""Trees of one value, and scripts in other processes, for the tests of checkpoints."""

import os
import subprocess
import sys
import textwrap

import torch

from tdfunc import TensorDict


def tree_of(value):
    """A tree whose leaves all hold one value."""
    return TensorDict({"w": torch.full((4,), float(value)), "n": {"b": torch.full((2, 3), float(value))}})


def value_of(tree):
    """The one value of a tree; fails for a tree that was put together from two."""
    values = {float(value) for leaf in tree.leaves() for value in (leaf.min(), leaf.max())}
    assert len(values) == 1, values
    return values.pop()


def run(code, *args, timeout=250):
    """Start a script in a fresh interpreter."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def ended(process, *, status=0):
    """Wait for a script and return its output."""
    out, errors = process.communicate(timeout=250)
    assert process.returncode == status, errors
    return out
