"""Conditions under which a difference is an accepted one: functions of (case, ours, theirs)."""

import numpy as np
import torch

from benchmarks.conformance.differential import Stack, Tree, Words, differences, same_tensor, settled, untyped
from benchmarks.conformance.random_cases import OPERATORS, UNARY
from benchmarks.conformance.random_trees import Branch, Lazy, parts


def sizes(case):
    """Every size in a shape of the inputs."""
    return [n for branch in case.inputs for n in (*branch.size, *(n for leaf in branch.leaves() for n in leaf.shape))]


def named(*names):
    """The operation is one of these, or one of these with the tree on the right."""
    return lambda case, ours, theirs: case.name in names or case.name.removeprefix("r") in names


def only_ours_raises(*texts):
    """Ours raises, with one of the texts in its message, and theirs does not."""
    return lambda case, ours, theirs: theirs.error is None and _says(ours.error, texts)


def only_theirs_raises(*texts):
    """Theirs raises, with one of the texts in its message, and ours does not."""
    return lambda case, ours, theirs: ours.error is None and _says(theirs.error, texts)


def theirs_says(*texts):
    """Theirs raises, with one of the texts in its message."""
    return lambda case, ours, theirs: _says(theirs.error, texts)


def _says(error, texts):
    return error is not None and (not texts or any(text in str(error) for text in texts))


def differs_in(*kinds):
    """Both return, and differ in these kinds only."""

    def holds(case, ours, theirs):
        returned = ours.error is None and theirs.error is None
        return returned and {kind for kind, _ in differences(ours.value, theirs.value)} <= set(kinds)

    return holds


def equal_without(*parts):
    """Both return, and are equal except for names, sizes, non-tensor data, or sub-trees without leaves."""

    def holds(case, ours, theirs):
        returned = ours.error is None and theirs.error is None
        return returned and not list(differences(_without(ours.value, parts), _without(theirs.value, parts)))

    return holds


def _without(value, parts):
    if isinstance(value, tuple):
        return tuple(_without(item, parts) for item in value)
    if isinstance(value, Stack):
        size = () if "sizes" in parts else value.size
        return Stack(size, value.dim, tuple(_without(item, parts) for item in value.trees))
    if not isinstance(value, Tree):
        return value
    entries = {key: _without(item, parts) for key, item in value.entries.items()}
    # tensordict leaves an empty tree where it dropped non-tensor data.
    dropped = (Words, Tree, Stack) if "words" in parts else (Tree, Stack)
    if "words" in parts or "empty" in parts:
        entries = {key: item for key, item in entries.items() if not (isinstance(item, dropped) and _is_bare(item))}
    return Tree(() if "sizes" in parts else value.size, () if "names" in parts else value.names, entries)


def _is_bare(value):
    if isinstance(value, Stack):
        return all(map(_is_bare, value.trees))
    return isinstance(value, Words) or not value.entries


def has_words(case, ours, theirs):
    """An input holds non-tensor data."""
    return any(map(_holds_words, case.inputs))


def _holds_words(tree):
    values = [v for part in parts(tree) if isinstance(part, Branch) for v in part.entries.values()]
    return any(not isinstance(v, Branch | Lazy | torch.Tensor) for v in values)


def has_empty(case, ours, theirs):
    """An input holds a sub-tree without tensors."""
    return any(map(_holds_empty, case.inputs))


def _holds_empty(branch):
    inner = [value for value in branch.entries.values() if isinstance(value, Branch | Lazy)]
    return any(not list(part.leaves()) or _holds_empty(part) for part in inner)


def has_no_elements(case, ours, theirs):
    """The batch, or every tensor, holds nothing."""
    return 0 in sizes(case)


def has_lazy(case, ours, theirs):
    """An input holds a lazy stack."""
    return any(isinstance(part, Lazy) for tree in case.inputs for part in parts(tree))


# The operations that docs/ragged.md lists for every lazy stack and all arguments. Of the others (indices, rows,
# shapes, joins, reductions over features) it lists some.
LISTED = frozenset((
    "get", "getitem", "delete", "pop", "select", "exclude", "flatten_keys", "unflatten_keys", "items", "leaves",
    "apply", "named_apply", "clone", "detach", "to_dtype", "to_device", "cast", "type", "transpose", "permute",
    "unsqueeze", "squeeze", "unbind", "zeros_like", "ones_like", "full_like", *OPERATORS, *UNARY,
))  # fmt: skip


def is_refused(case, ours, theirs):
    """Ours names `pad()` or `dense()` of a lazy stack, for an operation that docs/ragged.md does not list for it."""
    text = str(ours.error)
    if case.name in LISTED or (case.name == "index" and not takes_rows(case, ours, theirs)):
        return False
    return ours.error is not None and ("pad()" in text or "dense()" in text)


def has_typed(case, ours, theirs):
    """An input holds a typed tree."""
    return any(isinstance(part, Branch) and part.typed for tree in case.inputs for part in parts(tree))


def equal_unstacked(case, ours, theirs):
    """Both return, and are equal but for tuples of tensors that stand for a stacked one."""
    return ours.error is None and theirs.error is None and _same_unstacked(ours.value, theirs.value)


def _same_unstacked(a, b):
    if isinstance(a, tuple) and isinstance(b, np.ndarray):
        a, b = _as_tensors(a), torch.as_tensor(b)
    if isinstance(a, tuple) and isinstance(b, torch.Tensor):
        dims = range(b.dim())
        if len(_dtypes(a)) > 1:
            # tensordict promotes when it stacks.
            a = _cast(a, b.dtype)
        return any(len(a) == b.shape[d] and all(map(_same_unstacked, a, b.unbind(d))) for d in dims)
    if isinstance(a, Tree | dict) and isinstance(b, Tree | dict):
        a, b = (x.entries if isinstance(x, Tree) else x for x in (a, b))
        return a.keys() == b.keys() and all(_same_unstacked(a[key], b[key]) for key in a)
    if isinstance(a, Stack) and not isinstance(settled(a), Stack):
        return _same_unstacked(settled(a), b)
    if isinstance(a, Stack):
        return isinstance(b, Stack) and (a.size, a.dim) == (b.size, b.dim) and _same_unstacked(a.trees, b.trees)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same_unstacked, a, b))
    # The tensors of a tuple require grad one by one.
    return not [kind for kind, _ in differences(a, b) if kind != "grad"]


def _dtypes(value):
    return set().union(*map(_dtypes, value)) if isinstance(value, tuple) else {getattr(value, "dtype", None)}


def _cast(value, dtype):
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def _as_tensors(value):
    if isinstance(value, tuple):
        return tuple(map(_as_tensors, value))
    return torch.as_tensor(value) if isinstance(value, np.ndarray) else value


def has_dotted_key(case, ours, theirs):
    """A key of an input holds a dot."""
    return any("." in key for tree in case.inputs for part in parts(tree) for key in part.entries)


def is_ragged(case, ours, theirs):
    """An input holds a lazy stack of trees that cannot be stacked."""
    return any(isinstance(part, Lazy) and part.is_ragged for tree in case.inputs for part in parts(tree))


def reads(case, ours, theirs):
    """The operation reads values."""
    return case.name in ("get", "getitem", "to_dict", "items", "to_namedtuple", "pop", "leaves", "detach_numpy")


def equal_but_words(case, ours, theirs):
    """Both return, and are equal but for tuples of tensors, and for how non-tensor data nest."""
    return equal_unstacked(case, ours, theirs) or (
        ours.error is None and theirs.error is None and _same_unstacked(_no_words(ours.value), _no_words(theirs.value))
    )


def _no_words(value):
    if isinstance(value, Tree | dict):
        entries = value.entries if isinstance(value, Tree) else value
        return {key: _no_words(item) for key, item in entries.items()}
    if isinstance(value, Stack):
        return _no_words(settled(value)) if not isinstance(settled(value), Stack) else value
    if isinstance(value, tuple):
        done = tuple(map(_no_words, value))
        return None if all(item is None for item in done) else done
    return None if isinstance(value, str | Words) else value


def both_raise(case, ours, theirs):
    """Both raise, though not errors that correspond."""
    return ours.error is not None and theirs.error is not None


def equal_untyped(case, ours, theirs):
    """Both return, and differ in the classes of trees at most."""
    found = {kind for kind, _ in differences(untyped(ours.value), untyped(theirs.value))}
    return ours.error is None and theirs.error is None and found <= {"order"}


def both_bare(case, ours, theirs):
    """Both return trees without tensors."""
    return all(isinstance(x.value, Tree | Stack) and _is_bare(x.value) for x in (ours, theirs))


def grads_as_alone(case, ours, theirs):
    """Both return and differ in requires_grad, where ours is that of the leaves at the same path."""
    bare = [type(x)(_without(x.value, ("empty",))) for x in (ours, theirs)]
    if not isinstance(ours.value, Tree) or theirs.error is not None or not differs_in("grad")(case, *bare):
        return False
    learning = {path for tree in case.inputs for path, leaf in _paths(tree) if leaf.requires_grad}
    return all(leaf.requires_grad == (path in learning) for path, leaf in _paths(ours.value))


def _paths(tree, at=()):
    for key, value in tree.entries.items():
        if isinstance(value, torch.Tensor):
            yield (*at, key), value
        elif isinstance(value, Branch | Tree):
            yield from _paths(value, (*at, key))


def learns(case, ours, theirs):
    """An input has a leaf that requires grad."""
    return any(leaf.requires_grad for tree in case.inputs for leaf in tree.leaves())


def takes_rows(case, ours, theirs):
    """The index takes rows by number or mask."""
    items = case.detail if isinstance(case.detail, tuple) else (case.detail,)
    return any(isinstance(item, list | range | np.ndarray | torch.Tensor | bool) for item in items)


def torch_refuses(case, ours, theirs):
    """Plain torch refuses the operation for a tensor of the batch size."""
    size = case.inputs[0].size
    try:
        case.oracle(torch.zeros(size), len(size))
    except (IndexError, RuntimeError, ValueError):
        return True
    return False


def given_to_each(case, ours, theirs):
    """Ours has the items of a list in the trees of a lazy stack, in order."""
    path, value = case.detail
    path = path if isinstance(path, tuple) else (path,)
    return isinstance(value, list) and ours.error is None and _given(case.inputs[0], ours.value, path, value)


def _given(node, result, path, value):
    if isinstance(node, Lazy):
        return len(value) == len(result.trees) and all(
            map(_given, node.branches, result.trees, [path] * len(value), value)
        )
    if len(path) > 1:
        # None where the path began a sub-tree.
        inner = None if node is None else node.entries.get(path[0])
        return _given(inner, result.entries[path[0]], path[1:], value)
    mine, given = result.entries[path[0]], torch.as_tensor(value)
    return (mine.shape, mine.dtype) == (given.shape, given.dtype) and same_tensor(mine, given)


def equal_but_empty_fields(case, ours, theirs):
    """Both return dicts, and are equal but for None in theirs."""
    return ours.error is None and theirs.error is None and _no_fields(ours.value) == _no_fields(theirs.value)


def _no_fields(value):
    if isinstance(value, dict):
        return {key: _no_fields(item) for key, item in value.items() if item is not None}
    return {} if value == () else value


def elements_equal(case, ours, theirs):
    """Both return trees of one size, with equal elements but for classes, dtypes and entries that theirs has lost."""
    if not all(isinstance(x.value, Tree | Stack) for x in (ours, theirs)):
        return False
    try:
        return _same_elements(ours.value, theirs.value)
    except (IndexError, TypeError):  # tensordict's results need not have the shape of their batch size
        return False


def _same_elements(mine, other):
    if mine.size != other.size:
        return False
    mine, other = dict(_elements(mine)), dict(_elements(other))
    return mine.keys() == other.keys() and all(_same_element(mine[at], other[at]) for at in mine)


def _elements(value):
    """Yield each element of a tree or stack with its place."""
    if isinstance(value, Stack):
        for i, tree in enumerate(value.trees):
            yield from (((*at[: value.dim], i, *at[value.dim :]), element) for at, element in _elements(tree))
    elif not value.size:
        yield (), value
    else:
        for i in range(value.size[0]):
            yield from (((i, *at), element) for at, element in _elements(_row(value, i)))


def _row(value, i):
    if isinstance(value, Stack) and value.dim:
        return Stack(value.size[1:], value.dim - 1, tuple(_row(tree, i) for tree in value.trees))
    if isinstance(value, Tree):
        return Tree(value.size[1:], value.names[1:], {key: _row(item, i) for key, item in value.entries.items()})
    return (
        value.trees[i] if isinstance(value, Stack) else Words(value.values[i]) if isinstance(value, Words) else value[i]
    )


def _same_element(mine, other):
    """Return True if an element has the entries of another, with its values; an empty tree stands for a lost one."""
    if isinstance(other, Tree) and not other.entries:
        return True
    if isinstance(mine, Tree) and isinstance(other, Tree):
        return all(
            key in mine.entries and _same_element(mine.entries[key], item) for key, item in other.entries.items()
        )
    if isinstance(mine, Tree | Stack) and isinstance(other, Tree | Stack):
        return _same_elements(mine, other)
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
        return mine.shape == other.shape and same_tensor(mine.to(other.dtype), other)
    return not list(differences(mine, other))


def names_do_not_fit(case, ours, theirs):
    """Theirs has more or fewer names than dimensions."""
    return isinstance(theirs.value, Tree) and len(theirs.value.names) != len(theirs.value.size)


def differs_bare_in(*kinds):
    """As `differs_in`, sub-trees without tensors aside."""

    def holds(case, ours, theirs):
        bare = [type(x)(_without(x.value, ("empty",)), x.error) for x in (ours, theirs)]
        return differs_in(*kinds)(case, *bare)

    return holds


def detail(fn):
    """The arguments of the operation are such."""
    return lambda case, ours, theirs: fn(case.detail)


def their_size(fn):
    """Theirs returns a tree with such a batch size."""
    return lambda case, ours, theirs: theirs.error is None and fn(theirs.value.size)


def batch(fn):
    """The first input has such a batch size."""
    return lambda case, ours, theirs: fn(case.inputs[0].size, case.detail)


def returns_none(case, ours, theirs):
    """Ours returns a tree, theirs None."""
    return isinstance(ours.value, Tree | Stack) and theirs.error is None and theirs.value is None
