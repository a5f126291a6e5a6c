"""tdfunc against tensordict on thousands of random trees: single operations, and sequences of them.

Each step compares values, dtypes, batch sizes, names, key order, requires_grad, memory sharing and the class of the
error, checks plain torch on every leaf, and checks that no input changed. Lazy stacks and typed trees are compared
with tensordict's, and with the dense and open trees that they stand for. Every way in which the two libraries may
differ is one entry of benchmarks/conformance/accepted.py, with the heading of docs/differences.md that explains it.
"""

import os
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Size

import tdfunc.core.collection
from benchmarks.conformance.accepted import ACCEPTED, KINDS, OF_KINDS
from benchmarks.conformance.differential import differences, outcome
from benchmarks.conformance.random_cases import UnfitError, random_case
from benchmarks.conformance.random_trees import Branch, parts, random_tree
from benchmarks.conformance.runs import (
    Program,
    cases_of,
    failure_of,
    random_program,
    run_cases,
    run_sequences,
    script,
    shrink,
)
from tdfunc import TensorDict
from tdfunc._lazystack import stack as lazystack
from tdfunc.core.collection import iter_leaves
from tdfunc.core.ties import by_identity
from tdfunc.ops.base import cast, foreach
from tdfunc.ops.batch import join
from tdfunc.ops.edits.edit import restore_ties
from tests.incumbent import tensordict

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"
ENTRIES = (*ACCEPTED, *OF_KINDS, KINDS)
SEED = int(os.environ.get("TDFUNC_TEST_SEED", 100))


@pytest.mark.parametrize("seed", range(2))
def test_agrees_with_tensordict(seed):
    """An operation gives what tensordict and torch give, except in the accepted ways."""
    assert run_cases(seed, 600).total() > 500


@pytest.mark.parametrize("seed", range(2))
def test_lazy_and_typed_trees_agree(seed):
    """A lazy stack or a typed tree gives what tensordict's gives, or the dense and open tree."""
    assert run_cases(seed, 300, kinds=True).total() > 200


@pytest.mark.parametrize("seed", range(2))
def test_sequences_agree(seed):
    """Sequences of operations agree as single ones do."""
    assert run_sequences(seed, 40).total() > 80


# The entries and their rare cases are those of the pinned version; a newer one has mended some.
pinned = pytest.mark.skipif(tensordict.__version__ != "0.14.3", reason="entries of the pinned tensordict")


@pinned
@pytest.mark.slow
def test_agrees_with_tensordict_at_length():
    """A long run finds no other difference, and meets every entry of ACCEPTED."""
    met = run_cases(SEED, 6000) + run_cases(SEED, 6000, kinds=True) + run_sequences(SEED, 1200)

    common = [entry for entry in ENTRIES if entry.rare is None and not entry.newer]
    assert [(ENTRIES.index(entry), entry.heading) for entry in common if entry not in met] == []


RARE = [entry for entry in ENTRIES if entry.rare is not None]


@pinned
@pytest.mark.parametrize("entry", RARE, ids=[f"{ENTRIES.index(entry)}-{entry.rare}" for entry in RARE])
def test_rare_differences_are_met(entry):
    """Each entry that the long run need not meet is met by a case of its own."""
    kind, seed, i = entry.rare
    met = Counter()
    if kind == "program":
        met.update(accepted for _, accepted in cases_of(random_program((seed, i))))
    else:
        met = run_cases(seed, i + 1, kinds=kind == "kinds", first=i)

    assert entry in met


def test_every_difference_is_documented():
    """The page has a heading for each accepted difference, and for no other."""
    page = PAGE.read_text()

    for accepted in ENTRIES:
        assert f"\n- **{accepted.heading}** " in page, accepted.heading


# -- laws without a counterpart in tensordict ------------------------------------------------------------------


def _ours(case, trees):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(case.ours, trees)


def _fitting_cases(seed, count):
    for i in range(count):
        try:
            case = random_case(np.random.default_rng([seed, i]))
        except UnfitError:
            continue
        if len(case.inputs) == 1:
            yield case


# A write to one path of a tie writes all of them, and a reduction of a whole tree counts a tied leaf once.
APART = {"set", "at_key", "replace", "update", "rename_key", "sum_all"}


def test_ties_change_no_value():
    """An operation treats a tied leaf as two leaves of equal values."""
    compared = 0
    for case in _fitting_cases(0, 500):
        tree = case.inputs[0].build(TensorDict)
        found = [path for path, leaf in iter_leaves(tree) if len(path) == 1 and leaf.dim() >= tree.ndim]
        if not found or case.name in APART:
            continue
        untied = tree.set("tied", tree[found[0]])
        tied = restore_ties(untied, by_identity(iter_leaves(untied)))
        mine, other = _ours(case, [tied]), _ours(case, [untied])
        assert (mine.error is None) == (other.error is None), case
        if mine.error is None:
            assert not list(differences(mine.value, other.value)), case
            compared += 1

    assert compared > 100


def test_meta_trees_have_the_shapes_of_real_ones():
    """An operation on a tree without data gives the structure, sizes and dtypes of one with data."""
    compared = 0
    for case in _fitting_cases(1, 500):
        meta = _on_meta(case.inputs[0])
        mine, other = _ours(case, [meta.build(TensorDict)]), _ours(case, [case.inputs[0].build(TensorDict)])
        # An operation that depends on values, or meets the operand of a case, has no result.
        if mine.error is None and other.error is None:
            assert not {kind for kind, _ in differences(mine.value, other.value)} - {"value", "class"}, case
            compared += 1

    assert compared > 150


def _on_meta(branch):
    entries = {
        key: _on_meta(value) if isinstance(value, Branch) else value.to("meta") if torch.is_tensor(value) else value
        for key, value in branch.entries.items()
    }
    return replace(branch, entries=entries)


# -- planted bugs are found --------------------------------------------------------------------------------------


def _first_failure(run, *args, **kwargs):
    with pytest.raises(AssertionError) as caught:
        run(*args, **kwargs)
    return str(caught.value)


def test_finds_an_axis_off_by_one(monkeypatch):
    """Stacking along the wrong axis is found."""
    right = join.dim_index
    monkeypatch.setattr(join, "dim_index", lambda dim, ndim, call: max(right(dim, ndim, call) - 1, 0))

    assert "stack(" in _first_failure(run_cases, 0, 400)


def test_finds_a_lost_name(monkeypatch):
    """Indexing that drops the names of dimensions is found."""
    monkeypatch.setattr(tdfunc.core.collection, "index_names", lambda index, names: None)

    assert "index(" in _first_failure(run_cases, 0, 400)


def test_finds_an_aliased_output(monkeypatch):
    """A clone that shares the memory of the original is found."""
    monkeypatch.setattr(cast, "clone", lambda tree, recurse: tree)

    assert "shares memory" in _first_failure(run_cases, 0, 1000)


def _cut_off(leaf):
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def test_finds_dropped_gradients(monkeypatch):
    """Rows that no longer require grad are found."""
    right = tdfunc.core.collection._row_select
    monkeypatch.setattr(tdfunc.core.collection, "_row_select", lambda rows: lambda x: right(rows)(_cut_off(x)))

    assert "grad" in _first_failure(run_cases, 0, 3000)


def test_finds_gained_gradients(monkeypatch):
    """A leaf that begins to require grad next to another one that does is found."""
    monkeypatch.setattr(foreach, "_requires_grad", lambda leaf: False)

    assert "grad" in _first_failure(run_cases, 0, 1500)


def test_finds_a_wrong_batch_size_of_a_lazy_stack(monkeypatch):
    """A stack that counts its trees at the wrong place is found."""
    monkeypatch.setattr(lazystack, "stacked_size", lambda size, dim, count: Size((*size, count)))

    assert "Lazy(" in _first_failure(run_cases, 0, 400, kinds=True)


def test_finds_a_changed_input(monkeypatch):
    """An operation that writes to the tree it was given is found."""

    def detach(tree):
        for leaf in tree.leaves():
            if leaf.is_contiguous() and leaf.numel():
                leaf.detach().zero_()
        return tree

    monkeypatch.setattr(cast, "detach", detach)

    assert "an input was" in _first_failure(run_cases, 0, 1500)


def test_finds_what_only_a_sequence_shows(monkeypatch):
    """An operation that spoils the input of the next one is found."""
    right = join.stack

    def stack(trees, dim):
        made = right(trees, dim)
        # Equal to the stack, but a later clone or reshape finds names.
        return made if made._names is None else made._replace(made._data, batch_size=made._batch_size, names=None)

    monkeypatch.setattr(join, "stack", stack)

    assert "program" in _first_failure(run_sequences, 0, 400)


# -- failures are made small ------------------------------------------------------------------------------------


def test_shrinks_to_the_one_operation_that_fails(monkeypatch):
    """A failure of eight operations is reduced to the one that matters."""
    right = join.dim_index
    monkeypatch.setattr(join, "dim_index", lambda dim, ndim, call: max(right(dim, ndim, call) - 1, 0))
    program = next(p for p in (random_program((0, i)) for i in range(300)) if len(p.seeds) > 3 and failure_of(p))

    small = shrink(program)

    assert failure_of(small) is not None
    assert len(small.seeds) == 1
    assert sum(1 for _ in parts(small.tree)) <= sum(1 for _ in parts(program.tree))


def test_scripts_run(capsys):
    """The script of a failure runs and does what its program did."""
    for i in range(25):
        program = random_program((3, i))
        exec(compile(script(program), "script", "exec"), {})  # noqa: S102 - our own text

    printed = capsys.readouterr().out
    assert printed.count("===== tdfunc") == printed.count("===== tensordict") == 25
    assert "NameError" not in printed
    assert "SyntaxError" not in printed


def test_a_script_prints_what_the_program_does(capsys):
    """A tree of a script is that of its program."""
    program = Program(random_tree(np.random.default_rng(5)), ((5, 0),))
    case, _ = next(cases_of(program))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(script(program), "script", "exec"), {})  # noqa: S102 - our own text

    wanted = _ours(case, [tree.build(TensorDict) for tree in case.inputs])
    assert str(wanted.raw if wanted.error is None else repr(wanted.error)) in capsys.readouterr().out
