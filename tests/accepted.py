"""The ways in which tdfunc and tensordict may differ; docs/differences.md explains each under its heading."""

from collections.abc import Callable

import numpy as np
import torch

from tests.differential import Tree, Words, differences
from tests.random_trees import Branch

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor")
MADE = ("new_zeros", "new_ones", "new_full")
REDUCTIONS = (
    "sum", "mean", "prod", "amax", "amin", "std", "var", "all", "any", "min", "max", "nansum", "nanmean", "logsumexp",
    "quantile", "cummax", "cummin", "norm",
)  # fmt: skip


class Accepted:
    """A heading of the page, and the conditions under which a difference is the one that it explains."""

    def __init__(self, heading: str, *conditions: Callable):
        self.heading, self.conditions = heading, conditions


def tensors(case):
    """Every tensor of the inputs."""
    return [leaf for branch in case.inputs for leaf in branch.leaves()]


def sizes(case):
    """Every size in a shape of the inputs."""
    return [n for branch in case.inputs for n in (*branch.size, *(n for leaf in branch.leaves() for n in leaf.shape))]


# -- conditions: functions of (case, ours, theirs) --------------------------------------------------------------


def named(*names):
    """The operation is one of these, or one of these with the tree on the right."""
    return lambda case, ours, theirs: case.name in names or case.name.removeprefix("r") in names


def only_ours_raises(*texts):
    """Ours raises, with one of the texts in its message, and theirs does not."""
    return lambda case, ours, theirs: theirs.error is None and _says(ours.error, texts)


def only_theirs_raises(*texts):
    """Theirs raises, with one of the texts in its message, and ours does not."""
    return lambda case, ours, theirs: ours.error is None and _says(theirs.error, texts)


def _says(error, texts):
    return error is not None and (not texts or any(text in str(error) for text in texts))


def differs_in(*kinds):
    """Both return, and differ in these kinds only."""

    def holds(case, ours, theirs):
        returned = ours.error is None and theirs.error is None
        return returned and {kind for kind, _ in differences(ours.value, theirs.value)} <= set(kinds)

    return holds


def equal_without(*parts):
    """Both return, and are equal less their names, sizes, non-tensor data, or sub-trees without leaves."""

    def holds(case, ours, theirs):
        returned = ours.error is None and theirs.error is None
        return returned and not list(differences(_without(ours.value, parts), _without(theirs.value, parts)))

    return holds


def _without(value, parts):
    if isinstance(value, tuple):
        return tuple(_without(item, parts) for item in value)
    if not isinstance(value, Tree):
        return value
    entries = {key: _without(item, parts) for key, item in value.entries.items()}
    # tensordict leaves an empty tree where it dropped non-tensor data.
    dropped = (Words, Tree) if "words" in parts else Tree
    if "words" in parts or "empty" in parts:
        entries = {key: item for key, item in entries.items() if not (isinstance(item, dropped) and _is_bare(item))}
    return Tree(() if "sizes" in parts else value.size, () if "names" in parts else value.names, entries)


def _is_bare(value):
    return isinstance(value, Words) or not value.entries


def has_words(case, ours, theirs):
    """An input holds non-tensor data."""
    return any(map(_holds_words, case.inputs))


def _holds_words(branch):
    values = branch.entries.values()
    return any(_holds_words(v) if isinstance(v, Branch) else not isinstance(v, torch.Tensor) for v in values)


def has_empty(case, ours, theirs):
    """An input holds a sub-tree without tensors."""
    return any(map(_holds_empty, case.inputs))


def _holds_empty(branch):
    inner = [value for value in branch.entries.values() if isinstance(value, Branch)]
    return any(not list(part.leaves()) or _holds_empty(part) for part in inner)


def has_no_elements(case, ours, theirs):
    """The batch, or every tensor, holds nothing."""
    return 0 in sizes(case)


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
    return isinstance(ours.value, Tree) and theirs.error is None and theirs.value is None


EMPTY = "Empty trees and sub-trees stay."
CHECKED = "Calls are checked, whatever the tree holds."
NODE = "Names belong to one node."
NAMES = "Names survive what keeps the dimension."
WORDS = "Non-tensor data follow every operation."
CAST = "`stack` and `cat` never cast."
KEYS = "Two trees have the same keys."
DIMS = "Dimensions that do not exist raise."
WHERE = "A condition has the dimensions of the batch."
UNDER = "Nothing lies under a leaf."
EXPAND = "`-1` in `expand` keeps a dimension."
ZERO = "Batches of size 0."
OPERATORS = "All operators, with the tree on either side."
REDUCE = "Reductions over features and nested batches."
PROMOTE = "Promotion follows torch."
FEATURES = "Leaves of two trees have the same number of features."
NUMBERS = "Numbers are expanded."
MOVE = "Moving an entry under itself."
ORDER = "Order of keys."
FLATTEN = "The batch size after `flatten` and `unflatten`."

TORCH = "Errors of torch are raised."
REARRANGE = "Rearranging follows torch."

# Met about once in fifty thousand cases.
RARE = {PROMOTE}
ACCEPTED = (
    Accepted(EMPTY, returns_none),
    Accepted(EMPTY, equal_without("empty")),
    Accepted(EMPTY, named("auto_batch_size", "auto_batch_dims"), has_empty, differs_in("size", "names", "value")),
    Accepted(EMPTY, only_theirs_raises("at least one tensor", "call_on_nested=True", 'arguments: "dim"')),
    Accepted(CHECKED, named("index", "reshape", "view"), only_ours_raises(), torch_refuses),
    Accepted(CHECKED, named("narrow"), only_ours_raises("do not exist")),
    Accepted(CHECKED, named("rot90"), only_ours_raises("given twice")),
    Accepted(
        WORDS,
        has_words,
        named("narrow", "roll", "flip", "broadcast_to", "tensor_split", "repeat", "rot90"),
        equal_without("words", "names"),
    ),
    Accepted(TORCH, named("clamp_min", "clamp_max"), only_ours_raises("must match", "not implemented for")),
    Accepted(UNDER, named("split_keys", "split_keys_loose"), only_theirs_raises("Expected a TensorDictBase")),
    Accepted(WORDS, has_words, named("empty_recurse", *MADE), equal_without("words", "names")),
    Accepted(REARRANGE, named("atleast_3d"), differs_in("size", "shape", "names", "value")),
    Accepted(REARRANGE, named("roll"), detail(lambda d: d[1] < 0), differs_in("value")),
    Accepted(REARRANGE, named("roll"), detail(lambda d: d[1] < 0), has_words, differs_in("value", "class")),
    Accepted(REARRANGE, named("tensor_split"), only_theirs_raises("non-negative", "split_sizes")),
    Accepted(REARRANGE, named("tensor_split"), differs_in("size")),
    Accepted(CHECKED, named("rename_key", "unflatten_keys"), only_ours_raises("leading dimensions")),
    Accepted(CHECKED, named("split"), only_ours_raises("must add up")),
    Accepted(NODE, named("get", "getitem"), equal_without("names")),
    Accepted(NODE, named("stack_tensors", "cat_tensors"), only_theirs_raises("refine_names", "non-unique")),
    Accepted(NAMES, named("update", "masked_select", "flatten", "reshape", "view"), equal_without("names")),
    Accepted(NAMES, named("pad", "broadcast_to", "cummax", "cummin", "logsumexp", *MADE), equal_without("names")),
    Accepted(NAMES, named(*COMPARISONS), equal_without("names")),
    Accepted(NAMES, named(*REDUCTIONS), detail(lambda d: bool(d[1])), equal_without("names")),
    Accepted(NAMES, named("index"), takes_rows, equal_without("names")),
    Accepted(WORDS, has_words, named("gather", "unflatten", "rename_key"), equal_without("words", "names")),
    Accepted(WORDS, named("construct"), only_theirs_raises("incompatible with the batch-size")),
    Accepted(WORDS, has_words, named("index", *COMPARISONS, *REDUCTIONS), equal_without("words", "names")),
    Accepted(WORDS, has_words, only_theirs_raises("maximum recursion", "items cannot be empty", "not enough values")),
    Accepted(
        WORDS,
        has_words,
        only_theirs_raises("lazy stack", "scalar False mask", "list index out of range", "Incompatible dim", "'str'"),
    ),
    Accepted(WORDS, has_words, only_ours_raises("has a value for each row")),
    Accepted(CAST, named("stack", "cat"), only_ours_raises("torch.")),
    Accepted(KEYS, only_ours_raises("different keys")),
    Accepted(
        DIMS,
        named("cat", "flatten", "roll", "rot90", "flip", "repeat_interleave", "stack_tensors", "cat_tensors"),
        only_ours_raises("does not exist"),
    ),
    Accepted(DIMS, named("permute"), only_ours_raises("exactly once"), batch(lambda size, d: len(d) != len(size))),
    Accepted(WHERE, named("where"), only_ours_raises("where: the condition")),
    Accepted(UNDER, named("get", "exclude"), only_theirs_raises("Expected a TensorDictBase", "_exclude")),
    Accepted(CHECKED, named("unflatten_keys"), equal_without("sizes", "words")),
    Accepted(UNDER, named("set", "rename_key", "replace"), only_ours_raises("is a leaf")),
    Accepted(UNDER, named("unflatten_keys"), has_words, only_ours_raises("another key has taken")),
    Accepted(EXPAND, named("expand"), only_theirs_raises(), detail(lambda d: -1 in d)),
    Accepted(ZERO, named("chunk", "split"), has_no_elements, only_theirs_raises("split_size must be")),
    Accepted(ZERO, named("gather"), only_theirs_raises("empty index")),
    Accepted(ZERO, named("reshape", "view"), has_no_elements, only_theirs_raises("invalid")),
    Accepted(ZERO, named("reshape", "view"), has_no_elements, their_size(lambda size: 0 not in size)),
    Accepted(ZERO, named("squeeze_all"), only_theirs_raises("view()", "not enough values")),
    Accepted(OPERATORS, named("floordiv", "mod", "pow"), only_theirs_raises("unsupported operand", "'mod'", "rpow")),
    Accepted(REDUCE, named(*REDUCTIONS), only_theirs_raises("dim='feature'", "'<' not supp", "is invalid for")),
    Accepted(REDUCE, named(*REDUCTIONS), differs_in("size", "shape", "names")),
    Accepted(REDUCE, named(*REDUCTIONS), has_words, equal_without("words", "names", "sizes")),
    Accepted(PROMOTE, detail(lambda d: isinstance(d, torch.Tensor) and d.dim() == 0), differs_in("dtype", "value")),
    Accepted(
        PROMOTE,
        detail(lambda d: isinstance(d, torch.Tensor) and d.dim() == 0),
        has_empty,
        differs_in("dtype", "value", "keys"),
    ),
    Accepted(FEATURES, only_ours_raises("another number of features")),
    Accepted(
        NUMBERS,
        named("set"),
        detail(lambda d: isinstance(d[1], int | float | complex)),
        only_theirs_raises("dimension"),
    ),
    Accepted(NUMBERS, named("set"), detail(lambda d: isinstance(d[1], list | complex)), differs_in("class")),
    Accepted(NUMBERS, named("set"), detail(lambda d: isinstance(d[1], list)), only_theirs_raises("'shape'")),
    Accepted(MOVE, named("rename_key"), detail(lambda d: d[1][:1] == (d[0],)), equal_without("words")),
    Accepted(MOVE, named("rename_key"), detail(lambda d: d[1][:1] == (d[0],)), differs_in("keys")),
    Accepted(
        MOVE,
        named("rename_key"),
        detail(lambda d: d[1][:1] == (d[0],)),
        only_theirs_raises("already present", "for NonTensorData"),
    ),
    Accepted(ORDER, named("rename_key", "select", "unflatten_keys"), differs_in("order")),
    Accepted(REDUCE, named("prod"), detail(lambda d: bool(d[1])), differs_in("size", "shape", "value", "names")),
    Accepted(FLATTEN, named("unflatten"), differs_in("size", "names", "value"), their_size(lambda size: -1 in size)),
    Accepted(FLATTEN, named("flatten"), batch(lambda size, d: size == ()), differs_in("shape", "size", "value")),
    Accepted(
        FLATTEN,
        named("flatten"),
        batch(lambda size, d: size == ()),
        only_theirs_raises("Incompatible end_dim", "cannot come after"),
    ),
)
