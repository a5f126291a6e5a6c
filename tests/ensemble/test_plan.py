"""`plan` names the line that makes an ensemble a loop."""

import linecache

import pytest
import torch
from torch import nn

from tests.ensemble.models import ensemble_of


class Reads(nn.Module):
    """A forward that asks for a number."""

    def forward(self, x):
        scale = x.abs().max().item()  # the line: Reads
        return x / scale


class Branches(nn.Module):
    """A branch that depends on a value."""

    def forward(self, x):
        if x.mean() > 100:  # the line: Branches
            return -x
        return x


def halve_while_large(x):
    """A helper in which the value is read."""
    while x.abs().max() > 1:  # the line: Calls
        x = x / 2
    return x


class Calls(nn.Module):
    """A forward whose helper has the loop."""

    def forward(self, x):
        return torch.tanh(halve_while_large(x))


class Draws(nn.Module):
    """A draw that no key serves."""

    def forward(self, x):
        return x + torch.poisson(x.detach().exp())  # the line: Draws


class Hides(nn.Module):
    """A forward that turns an error into another one."""

    def forward(self, x):
        try:
            return x * float(x.sum())  # the line: Hides
        except RuntimeError as err:
            raise ValueError("no number") from err


@torch.jit.script
def scripted(x):
    """A part that is compiled by torch.jit: a branch on a value."""
    if bool(x.sum() > 100):
        return -x
    return x


class Scripts(nn.Module):
    """A forward that calls a scripted function."""

    def forward(self, x):
        return scripted(x)  # the line: Scripts


def run(kind):
    """The plan after a call of an ensemble whose last layer is of this class."""
    ensemble, tree = ensemble_of([nn.Sequential(nn.Linear(3, 3), kind()) for _ in range(3)])
    ensemble(tree, torch.randn(5, 3), rng=0 if kind is Draws else None)
    return ensemble, tree


def marked(kind):
    """The line of this file that has the mark of a class, as `plan` shows it."""
    for number, line in enumerate(linecache.getlines(__file__), 1):
        if line.rstrip().endswith(f"# the line: {kind.__name__}"):
            return f"  at {__file__}:{number}: {line.strip()}"
    raise AssertionError(f"no line is marked for {kind.__name__}")


@pytest.mark.parametrize("kind", [Reads, Branches, Calls, Draws, Hides, Scripts])
def test_the_line_of_the_loop_is_named(kind):
    """The second line of a plan has the file, the number and the text of the line that vmap refused."""
    ensemble, _ = run(kind)

    assert ensemble.plan().splitlines()[1] == marked(kind)


@pytest.mark.parametrize("kind", [Reads, Scripts])
def test_later_calls_keep_the_line(kind):
    """A call whose kind is known to be a loop names the line as well."""
    ensemble, tree = run(kind)
    first = ensemble.plan()
    ensemble(tree, torch.randn(5, 3))

    assert ensemble.plan() == first


def test_a_module_of_torch_is_named_by_its_own_line():
    """Where no line of the user's is between the ensemble and torch, the plan has the line of torch's module."""
    ensemble, tree = ensemble_of([nn.Sequential(nn.Linear(3, 3), nn.CrossMapLRN2d(2)) for _ in range(3)])
    ensemble(tree, torch.randn(2, 4, 3, 3))

    assert "normalization.py" in ensemble.plan().splitlines()[1]


def test_nothing_is_named_where_vmap_runs():
    """A plan of a stacked forward goes on with the rule."""
    ensemble, _ = run(nn.Tanh)

    assert ensemble.plan().splitlines()[1].startswith("The rule of")


def test_an_error_that_was_there_before_names_no_line():
    """The line is one of the forward, also while another error of the caller's is handled."""
    try:
        raise KeyError("the caller's")
    except KeyError:
        ensemble, _ = run(Branches)

    assert ensemble.plan().splitlines()[1] == marked(Branches)
