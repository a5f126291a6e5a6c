"""Runs of the differential test: one case, a sequence of them, the shortest sequence that fails, and its script."""

import warnings
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.conformance.accepted import ACCEPTED, KINDS, OF_KINDS
from benchmarks.conformance.differential import (
    Outcome,
    Stack,
    Tree,
    UnfitError,
    describe,
    differences,
    has_deep_words,
    outcome,
    same_tensor,
    settled,
    untyped,
)
from benchmarks.conformance.random_cases import has_kinds, random_case
from benchmarks.conformance.random_trees import Branch, Lazy, dense, parts, plain, random_tree
from benchmarks.conformance.recorder import recorded, tree_source
from tdfunc import TensorDict
from tdfunc.core.collection import TensorCollection
from tests.incumbent import Incumbent

# The errors of tdfunc, and those of tensordict for the same mistake.
ERRORS = {
    "MissingKeyError": {"KeyError", "ValueError", "AttributeError", "RuntimeError", "TypeError"},
    "BatchSizeError": {"RuntimeError"},
    "LeafMismatchError": {
        "IndexError",
        "KeyError",
        "RuntimeError",
        "AttributeError",
        "TypeError",
        "RecursionError",
        "NotImplementedError",
    },
    "TreeStructureError": {"KeyError", "RuntimeError", "TypeError", "AttributeError", "NotImplementedError"},
    "IndexError": {
        "IndexError",
        "RuntimeError",
        "ValueError",
        "TypeError",
        "KeyError",
        "RecursionError",
        "AttributeError",
    },
    "ValueError": {"ValueError", "RuntimeError", "KeyError", "IndexError", "AttributeError"},
    "RuntimeError": {"RuntimeError", "ValueError", "AssertionError", "TypeError", "RecursionError"},
    "NotImplementedError": {"NotImplementedError", "RuntimeError", "TypeError", "AttributeError", "RecursionError"},
    "TypeError": {"TypeError", "AttributeError"},
}
# Operations that give an open tree, or an entry.
OPENING = {"pop", "to_tensordict", "get", "getitem", "empty", "empty_recurse", "flatten_keys", "unflatten_keys"}
# Beyond these a sequence ends: `repeat` and `stack` grow trees without bound.
MOST_DIMS, MOST_ELEMENTS = 5, 400


class MismatchError(AssertionError):
    """The two libraries, or tdfunc and plain torch, differ in a way that is not accepted."""

    def __init__(self, case, why):
        super().__init__(f"{case.name}({case.detail!r}): {why}")
        self.case = case


def check(case):
    """Run a case on trees that are built for it; return the accepted difference, if there is one."""
    return compare(case, *[_built(case.inputs, cls) for cls in (TensorDict, Incumbent)])[0]


def _built(inputs, cls):
    """Build trees in a library; an operand that is made unlike a tree may be none."""
    try:
        return [branch.build(cls) for branch in inputs]
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnfitError from error


def compare(case, ours_trees, theirs_trees):
    """Run a case on both sides and against plain torch; return the accepted difference or None, and our outcome.

    Raises:
        MismatchError: The sides differ in a way that is not accepted, or an input changed.
    """
    ours_leaves, their_leaves = list(tensors_of(ours_trees)), list(tensors_of(theirs_trees))
    before = [(leaf, leaf._version, leaf.detach().clone()) for leaf in ours_leaves]
    with warnings.catch_warnings():
        # torch and tensordict warn about degrees of freedom, lists as indices and slow paths; both sides alike.
        warnings.simplefilter("ignore")
        ours, theirs = outcome(case.ours, ours_trees), outcome(case.theirs, theirs_trees)
        for leaf, version, copy in before:
            require(leaf._version == version, case, "an input was written to")
            require(same_tensor(leaf, copy), case, "an input was changed")
        check_oracle(case, ours)
        if any(map(has_kinds, case.inputs)):
            check_class(case, ours)
            return explain_kinds(case, ours, theirs), ours, theirs
        accepted = None if agree(ours, theirs) else explain_difference(case, ours, theirs)
    if (
        accepted is None
        and ours.error is None
        and not _is_given_back(case)
        and _layouts(ours_leaves) == _layouts(their_leaves)
    ):
        mine, other = ({_memory(leaf) for leaf in leaves} for leaves in (ours_leaves, their_leaves))
        check_sharing(case, ours.value, theirs.value, mine, other)
    return accepted, ours, theirs


def _is_given_back(case):
    """Return True if tensordict returns its input, an error of torch being lost: equal, where no value is clamped."""
    return case.name in ("clamp_min", "clamp_max") and any(leaf.requires_grad for leaf in case.inputs[0].leaves())


def _layouts(leaves):
    """The strides of tensors: after other operations two equal trees need not lie alike in memory."""
    return Counter((leaf.shape, leaf.stride()) for leaf in leaves)


def check_class(case, ours):
    """Check that an operation on a typed tree gives an instance of its class, except for those that open it."""
    if not case.inputs or not _is_typed(case.inputs[0]) or case.name in OPENING:
        return
    kept = [x for x in (ours.value if isinstance(ours.value, tuple) else (ours.value,)) if isinstance(x, Tree | Stack)]
    require(all(map(_is_typed, kept)), case, "a typed tree has lost its class")


def _is_typed(tree):
    """Return True if a tree, described or returned, is a typed one or a stack of such."""
    inner = tree.branches if isinstance(tree, Lazy) else tree.trees if isinstance(tree, Stack) else ()
    return all(map(_is_typed, inner)) if inner else tree.typed


def explain_kinds(case, ours, theirs):
    """Check a case with lazy stacks or typed trees; return the entry by which a difference is accepted, or None.

    The result is that of the dense and open trees that the inputs stand for, on which both libraries are compared as
    well. Where tensordict's kinds agree with its own dense trees, so do ours with them.
    """
    if agree(ours, theirs):
        return None
    if agree(*[Outcome(settled(side.value), side.error) for side in (ours, theirs)]):
        return KINDS
    flat = [dense(plain(tree)) for tree in case.inputs]
    if None in flat:
        # Ours keep their class, which `check_class` looks at; theirs do not.
        if any(_holds_typed(tree) for tree in case.inputs):
            ours, theirs = _all_open(ours, theirs)
        return KINDS if agree(ours, theirs) else explain_difference(case, ours, theirs, (*OF_KINDS, *ACCEPTED))
    base = replace(case, inputs=flat)
    # tensordict's constructor refuses nested lists of non-tensor data, which its own operations make.
    if any(_has_deep_words(tree) for tree in flat):
        expected = outcome(base.ours, _built(flat, TensorDict))
    else:
        expected = compare(base, *[_built(flat, cls) for cls in (TensorDict, Incumbent)])[1]
    if holds_law(case, ours, expected) or _holds_exact_law(case, ours):
        return KINDS
    # A tree of a stack may have leaves without dimensions, which promote otherwise than those of the dense one.
    if any(map(_holds_typed, case.inputs)) and agree(*_all_open(ours, theirs)):
        return KINDS
    return explain_difference(case, ours, expected, OF_KINDS)


def _all_open(*sides):
    return [Outcome(untyped(side.value), side.error) for side in sides]


def _holds_typed(tree):
    return any(isinstance(part, Branch) and part.typed for part in parts(tree))


def _holds_exact_law(case, ours):
    """Return True if a result is that of the trees that `dense()` makes, with a non-tensor value for each row."""
    try:
        return holds_law(
            case, ours, outcome(case.ours, _built([dense(plain(t), False) for t in case.inputs], TensorDict))
        )
    except UnfitError:
        return False


def _has_deep_words(tree):
    """Return True if non-tensor data are nested lists, which tensordict's constructor takes for something else."""
    values = [value for part in parts(tree) for value in part.entries.values() if isinstance(value, list)]
    return any(isinstance(value, list) for values_ in values for value in values_) or [] in values


def holds_law(case, ours, expected):
    """Return True if a result is that of the dense and open trees, or both are errors."""
    if ours.error is not None and expected.error is not None:
        return True
    if ours.error is not None or expected.error is not None:
        return False
    lazy = any(map(_has_lazy, case.inputs))
    # A reduction of many trees at once may add in another order.
    both = (settled(untyped(side.value)) for side in (ours, expected))
    found = {kind for kind, _ in differences(*both, rtol=1e-5)}
    # The trees of a stack have names of their own.
    return not found - ({"names"} if lazy else set()) - {"order"}


def require(condition, case, why):
    """Raise unless the condition holds."""
    if not condition:
        raise MismatchError(case, why)


def tensors_of(trees):
    """Every tensor in some trees of either library."""
    for tree in trees:
        if isinstance(tree, TensorCollection):
            yield from tree.leaves()
        else:
            yield from _simple_tensors(outcome(lambda tree=tree: tree, []).value)


def _simple_tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    inner = value.entries.values() if isinstance(value, Tree) else value.trees if isinstance(value, Stack) else ()
    for node in inner:
        yield from _simple_tensors(node)


def agree(ours, theirs):
    """Return True if both raised errors that correspond, or both returned the same."""
    if ours.error is not None and theirs.error is not None:
        classes = {cls.__name__ for cls in type(theirs.error).__mro__}
        return bool(classes & ERRORS.get(_builtin_or_own(ours.error), set()))
    return ours.error is None and theirs.error is None and not list(differences(ours.value, theirs.value))


def _builtin_or_own(error):
    return next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in ERRORS), None)


def explain_difference(case, ours, theirs, entries=ACCEPTED):
    """Return the entry by which the difference is accepted."""
    for accepted in entries:
        if all(condition(case, ours, theirs) for condition in accepted.conditions):
            return accepted
    found = sorted({kind for kind, _ in differences(ours.value, theirs.value)})
    raise MismatchError(case, f"differs in {found}:\n{ours}\n{theirs}\n{case.inputs}")


def check_oracle(case, ours):
    """Check every leaf of the first input against the same operation of plain torch on the leaves of all inputs."""
    if case.oracle is None or ours.error is not None or any(map(_has_lazy, case.inputs)):
        return
    first, *others = [dict(_walk(tree)) for tree in case.inputs]
    n = len(case.inputs[0].size)
    for path, leaf in first.items():
        twins = [leaves.get(path) for leaves in others]
        if any(twin is None or twin.shape != leaf.shape for twin in twins):
            continue
        expected = case.oracle(leaf, n, *twins)
        pairs = zip(ours.value, expected, strict=True) if isinstance(ours.value, tuple) else [(ours.value, expected)]
        for tree, wanted in pairs:
            found = tree
            for key in path:
                found = found.entries[key]
            require(found.dtype == wanted.dtype, case, f"dtype at {path}")
            require(same_tensor(found, wanted), case, f"value at {path}")
            require(found.requires_grad == wanted.requires_grad, case, f"requires_grad at {path}")


def _has_lazy(tree):
    return any(isinstance(part, Lazy) for part in parts(tree))


def _walk(branch, at=()):
    for key, value in branch.entries.items():
        if isinstance(value, Branch):
            yield from _walk(value, (*at, key))
        elif isinstance(value, torch.Tensor):
            yield (*at, key), value


def check_sharing(case, ours, theirs, mine, other):
    """Check that both results share memory with the inputs, or neither: a view where one will do, no alias else."""
    if isinstance(ours, Tree | dict):
        ours, theirs = (x.entries if isinstance(x, Tree) else x for x in (ours, theirs))
        for key in ours:
            check_sharing(case, ours[key], theirs[key], mine, other)
    elif isinstance(ours, tuple | Stack):
        ours, theirs = (x.trees if isinstance(x, Stack) else x for x in (ours, theirs))
        for a, b in zip(ours, theirs, strict=True):
            check_sharing(case, a, b, mine, other)
    elif isinstance(ours, torch.Tensor) and ours.numel() and not ours.is_meta:
        shared = _memory(ours) in mine, _memory(theirs) in other
        require(shared[0] == shared[1], case, f"shares memory with an input in one library only: {shared}")


def _memory(leaf):
    return leaf.untyped_storage().data_ptr()


# -- sequences --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A tree, and the seeds of the operations that follow one another on it."""

    tree: Branch | Lazy
    seeds: tuple


def random_program(seed, kinds=True):
    """A tree and one to eight operations."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, kinds=kinds)
    return Program(tree, tuple((*seed, i) for i in range(rng.integers(1, 9))))


def cases_of(program):
    """Run a program; yield each case with its outcome: the trees of both libraries are those of the step before.

    Raises:
        MismatchError: As `compare`.
    """
    branch = program.tree
    live = [branch.build(TensorDict), branch.build(Incumbent)]
    for seed in program.seeds:
        rng = np.random.default_rng(seed)
        case = _fitting_case(rng, branch)
        if case is None:
            continue
        try:
            rest = [_built(case.inputs[1:], cls) for cls in (TensorDict, Incumbent)]
        except UnfitError:
            continue
        # Views depend on strides, and equal trees need not lie alike in memory.
        if case.name == "view" and _layouts(tensors_of(live[:1])) != _layouts(tensors_of(live[1:])):
            continue
        accepted, ours, theirs = compare(case, [live[0], *rest[0]], [live[1], *rest[1]])
        yield case, accepted
        found = _next_tree(rng, ours, theirs)
        if found is None:
            continue
        try:
            branch = describe(found[0])
        except UnfitError:
            return
        if _is_large(branch):
            return
        # Theirs starts anew from ours after an accepted difference, and where non-tensor data lie in a stack of stacks:
        # the result of tensordict depends on the dimensions of the stacks, and not on the values.
        keeps = accepted is None and not has_deep_words(found[1])
        live = list(found) if keeps else [found[0], _rebuilt(branch)]
        if live[1] is None:
            return


def _fitting_case(rng, branch):
    for _ in range(10):
        try:
            return random_case(rng, branch)
        except UnfitError:
            continue
    return None


def _next_tree(rng, ours: Outcome, theirs: Outcome):
    """Return one tree of ours and its counterpart (None if there is none), or None where no tree came out."""
    raw, other = ours.raw, theirs.raw
    if isinstance(raw, tuple | list) and len(raw) and isinstance(raw[0], TensorCollection):
        i = int(rng.integers(len(raw)))
        raw, other = raw[i], other[i] if isinstance(other, tuple | list) and i < len(other) else None
    return (raw, other) if isinstance(raw, TensorCollection) else None


def _rebuilt(branch):
    try:
        return branch.build(Incumbent)
    except Exception:  # noqa: BLE001 - tensordict cannot hold it: the sequence ends
        return None


def _is_large(branch):
    return len(branch.size) > MOST_DIMS or sum(leaf.numel() for leaf in branch.leaves()) > MOST_ELEMENTS


# -- failures ---------------------------------------------------------------------------------------------------


def failure_of(program):
    """The mismatch that a program ends in, or None."""
    try:
        for _ in cases_of(program):
            pass
    except MismatchError as error:
        return error
    return None


def shrink(program):
    """The smallest program found that still fails: without some operations, and with fewer entries in its tree."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if failure_of(candidate) is not None:
                program, smaller = candidate, True
                break
    return program


def _smaller(program):
    for i in range(len(program.seeds)):
        yield replace(program, seeds=program.seeds[:i] + program.seeds[i + 1 :])
    tree = program.tree
    if isinstance(tree, Lazy):
        for inner in tree.branches:
            yield replace(program, tree=inner)
        return
    for key, value in tree.entries.items():
        yield replace(program, tree=replace(tree, entries={k: v for k, v in tree.entries.items() if k != key}))
        if isinstance(value, Branch | Lazy):
            yield replace(program, tree=value)
    if tree.names is not None:
        yield replace(program, tree=replace(tree, names=None))
    if tree.typed:
        yield replace(program, tree=replace(tree, typed=False))


def run_sequences(seed, count, kinds=True):
    """Check many programs; return how often each entry of ACCEPTED was met, and None for what agreed."""
    met = Counter()
    for i in range(count):
        program = random_program((seed, i), kinds)
        try:
            for _, accepted in cases_of(program):
                met[accepted] += 1
        except MismatchError as error:
            small = shrink(program)
            raise AssertionError(f"program {(seed, i)}: {failure_of(small) or error}\n\n{script(small)}") from error
        except Exception as error:
            raise AssertionError(f"program {(seed, i)}: {error!r}") from error
    return met


def run_cases(seed, count, kinds=False, first=0):
    """Check many single cases; return how often each entry of ACCEPTED was met, and None for what agreed."""
    met = Counter()
    for i in range(first, count):
        rng = np.random.default_rng([seed, i])
        try:
            met[check(random_case(rng, kinds=kinds))] += 1
        except UnfitError:
            continue
        except Exception as error:
            raise AssertionError(f"case [{seed}, {i}]: {error!r}") from error
    return met


def script(program):
    """A script that runs the program in tdfunc and in tensordict and prints what each step returns or raises."""
    lines = [HEAD, f"    tree = {tree_source(program.tree)}"]
    for case, mine, other in _steps(program):
        lines.append(f"    # {case.name}")
        lines += [f"    other{i} = {tree_source(tree)}" for i, tree in enumerate(case.inputs[1:], 1)]
        lines.append(f"    calls = {{'tdfunc': lambda: {mine}, 'tensordict': lambda: {other}}}")
        lines.append("    tree = step(tree, calls[library])")
    return "\n".join(lines)


def _steps(program):
    """The cases of a program, each with its two spellings, to the one that fails."""
    found = []
    try:
        for case, _ in cases_of(program):
            found.append(case)
    except MismatchError as error:
        found.append(error.case)
    count = len(found)
    return [(case, *[recorded(fn, len(case.inputs)) for fn in (case.ours, case.theirs)]) for case in found[:count]]


HEAD = """import numpy as np
import torch
import tdfunc
from tests.incumbent import Incumbent, tensordict
from benchmarks.conformance import random_cases
from benchmarks.conformance.random_cases import double, keep_floats, shrink
from benchmarks.conformance.random_trees import LAZY, TYPED


def step(tree, call):
    # A result that is not a tree, or an error, leaves the tree as it is.
    try:
        result = call()
    except Exception as error:
        print(repr(error))
        return tree
    print(result)
    part = result[0] if isinstance(result, tuple) and result else result
    return part if hasattr(part, "batch_size") else tree


for library, TensorDict in (("tdfunc", tdfunc.TensorDict), ("tensordict", Incumbent)):
    print("=====", library)
    Sample, lazy_stack = TYPED[TensorDict], LAZY[TensorDict]"""
