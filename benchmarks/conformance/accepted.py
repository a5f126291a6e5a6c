"""The ways in which tdfunc and tensordict may differ; docs/differences.md explains each under its heading."""

from collections.abc import Callable

import torch

from benchmarks.conformance.conditions import (
    batch,
    both_bare,
    both_raise,
    detail,
    differs_bare_in,
    differs_in,
    elements_equal,
    equal_but_empty_fields,
    equal_but_words,
    equal_unstacked,
    equal_untyped,
    equal_without,
    given_to_each,
    grads_as_alone,
    has_dotted_key,
    has_empty,
    has_lazy,
    has_no_elements,
    has_typed,
    has_words,
    is_ragged,
    is_refused,
    learns,
    named,
    names_do_not_fit,
    only_ours_raises,
    only_theirs_raises,
    reads,
    returns_none,
    takes_rows,
    their_size,
    theirs_says,
    torch_refuses,
)
from benchmarks.conformance.random_cases import OPERATORS as OPERATOR_NAMES

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor")
MADE = ("new_zeros", "new_ones", "new_full")
REDUCTIONS = (
    "sum", "mean", "prod", "amax", "amin", "std", "var", "all", "any", "min", "max", "nansum", "nanmean", "logsumexp",
    "quantile", "norm",
)  # fmt: skip


class Accepted:
    """A heading of the page, and the conditions of the differences that it explains.

    `rare` is a program that meets it, for one that the slow test need not meet; the difference of a `newer` one is that
    of a newer tensordict than the pinned one.
    """

    def __init__(self, heading: str, *conditions: Callable, rare: tuple | None = None, newer: bool = False):
        self.heading, self.conditions, self.rare, self.newer = heading, conditions, rare, newer


EMPTY = "Empty trees and sub-trees stay."
CHECKED = "Every call is checked against the batch size."
NODE = "Names belong to one node."
NAMES = "Names follow their dimension."
WORDS = "Every operation includes non-tensor data."
CAST = "`stack` and `cat` never cast."
KEYS = "Two trees must have the same keys."
DIMS = "Dimensions must exist."
WHERE = "A condition has batch dimensions."
UNDER = "A leaf has no children."
EXPAND = "`-1` in `expand` keeps a dimension."
ZERO = "Batches of size 0."
OPERATORS = "All operators accept a tree on either side."
REDUCE = "Reductions keep nested batches."
PROMOTE = "Promotion follows torch."
FEATURES = "Leaves of two trees must have the same number of features."
NUMBERS = "Numbers are expanded."
MOVE = "An entry can move under itself."
ORDER = "Edits keep the order of keys."
FLATTEN = "`flatten` and `unflatten` return a correct batch size."

PAD = "`pad` never changes a value."
TORCH = "torch's errors are raised."

# Not a condition but a check: `explain_kinds` compares with dense and open trees in both libraries instead.
KINDS = Accepted("Lazy stacks and typed trees give the results of dense ones.")

HELD = "A stack of lazy stacks contains them."
TUPLE = "A key of a lazy stack is a tuple."
ONE_SHAPE = "Operations that need one shape raise an error."
NO_TREE = "An index must keep at least one tree."
FIELDS = "A `TensorClass` has only its fields."
LENGTH = "`len` and `numel` follow torch."
ROWS = "Rows must fit the tree."
GRAD = "`requires_grad` is decided leaf by leaf."

STATE = "State dicts support any key."
SOME = "Keys of only some trees are kept."

# How a tree with lazy stacks or typed trees may differ from the dense and open one; ragged ones from tensordict's.
OF_KINDS = (
    Accepted(
        ONE_SHAPE, has_lazy, named("stack", "cat"), only_theirs_raises("torch.", "shape"), rare=("kinds", 201, 2682)
    ),
    Accepted(ONE_SHAPE, is_ragged, named("numel"), differs_in("value"), rare=("kinds", 202, 4528)),
    Accepted(
        ONE_SHAPE,
        is_ragged,
        named(*OPERATOR_NAMES),
        differs_in("names", "size", "shape", "dtype", "value", "class"),
        rare=("program", 202, 219),
    ),
    Accepted(ONE_SHAPE, has_lazy, is_refused),
    Accepted(NO_TREE, has_lazy, only_ours_raises("no tree of the lazy stack is left")),
    Accepted(FIELDS, has_typed, only_ours_raises("has no field")),
    Accepted(FIELDS, has_typed, named("delete", "pop"), only_ours_raises("no key"), rare=("program", 201, 191)),
    Accepted(
        TUPLE,
        has_lazy,
        named("set"),
        only_ours_raises("one value for each tree", "leading dimensions"),
        rare=("kinds", 201, 861),
    ),
    Accepted(TUPLE, has_lazy, equal_unstacked),
    Accepted(TUPLE, has_lazy, has_words, reads, equal_but_words, rare=("kinds", 201, 1547)),
    Accepted(SOME, has_lazy, equal_without("empty", "names"), rare=("kinds", 711, 1174)),
    Accepted(
        SOME,
        has_lazy,
        named("stack", "cat"),
        only_theirs_raises("sets of keys", "different keys"),
        rare=("kinds", 201, 3915),
    ),
    Accepted(TUPLE, has_lazy, named("flatten_keys"), differs_in("keys"), rare=("kinds", 201, 2878)),
    Accepted(ONE_SHAPE, is_ragged, named("where"), differs_in("dtype", "shape"), rare=("kinds", 713, 26777)),
    Accepted(
        ONE_SHAPE,
        is_ragged,
        only_ours_raises("does not fit the batch", "mask does not have", "is broadcast against"),
        rare=("kinds", 100, 214),
    ),
    Accepted(
        KINDS.heading,
        is_ragged,
        named("masked_select", "torch.masked_select"),
        elements_equal,
        rare=("program", 301, 399),
    ),
    Accepted(HELD, is_ragged, named("stack"), elements_equal, rare=("kinds", 100, 3546)),
    Accepted(ONE_SHAPE, is_ragged, only_theirs_raises()),
    Accepted(ONE_SHAPE, is_ragged, both_raise, rare=("program", 201, 805)),
    Accepted(
        ONE_SHAPE,
        is_ragged,
        named("set"),
        detail(lambda d: d[1] == "text"),
        differs_in("value", "class"),
        rare=("program", 201, 1032),
    ),
    Accepted(TUPLE, has_lazy, named("set"), given_to_each, rare=("kinds", 401, 6576)),
    Accepted(
        FIELDS,
        is_ragged,
        has_typed,
        named("to_dict", "to_namedtuple"),
        equal_but_empty_fields,
        rare=("kinds", 401, 7819),
    ),
    Accepted(EMPTY, is_ragged, named("to_namedtuple"), equal_but_empty_fields, rare=("program", 5, 247)),
    Accepted(
        SOME,
        is_ragged,
        named("delete", "pop"),
        only_ours_raises("no key", "not in all trees"),
        rare=("program", 402, 8795),
    ),
    Accepted(
        ONE_SHAPE,
        is_ragged,
        named("std", "var", "mean"),
        only_ours_raises("only support floating point", "could not infer output dtype"),
        rare=("program", 501, 5369),
    ),
)

ACCEPTED = (
    Accepted(
        WORDS,
        has_words,
        named("split"),
        differs_in("class"),
        equal_without("words", "names"),
        rare=("kinds", 100, 1432),
    ),
    Accepted(
        FLATTEN,
        named("flatten"),
        batch(lambda size, d: size == ()),
        differs_in("shape", "size", "value"),
        rare=("case", 302, 11405),
    ),
    Accepted(
        NUMBERS,
        named("set"),
        detail(lambda d: isinstance(d[1], list)),
        differs_in("class"),
        rare=("case", 302, 8898),
    ),
    Accepted(NAMES, only_theirs_raises("refine_names"), rare=("program", 201, 284)),
    Accepted(
        LENGTH,
        named("numel"),
        only_ours_raises("has no rows"),
        batch(lambda size, d: size == ()),
        rare=("case", 201, 2),
    ),
    Accepted(LENGTH, named("numel"), batch(lambda size, d: 0 in size), differs_in("value"), rare=("case", 201, 6343)),
    Accepted(ROWS, named("at_number", "at_mul", "at_add", "at_set"), only_theirs_raises("Index put requires")),
    Accepted(ROWS, named("at_number", "at_mul", "at_add", "at_set"), only_ours_raises("the rows")),
    Accepted(
        CHECKED,
        named("at_number", "at_mul", "at_add", "at_set"),
        only_ours_raises("out of range", "more indices than batch"),
        rare=("case", 201, 2835),
    ),
    Accepted(GRAD, learns, grads_as_alone),
    Accepted(TORCH, named("clamp_min", "clamp_max"), learns, differs_bare_in("value", "grad"), rare=("case", 201, 464)),
    Accepted(GRAD, learns, only_theirs_raises("Autograd not support dtype"), rare=("case", 201, 2915)),
    Accepted(EMPTY, returns_none),
    Accepted(EMPTY, both_bare),
    Accepted(WORDS, named("at_number"), has_words, equal_without("words", "names"), rare=("case", 201, 673)),
    Accepted(EMPTY, equal_without("empty")),
    Accepted(
        EMPTY,
        named("auto_batch_size", "auto_batch_dims"),
        has_empty,
        differs_in("size", "names", "value"),
        rare=("case", 201, 333),
    ),
    Accepted(EMPTY, only_theirs_raises("at least one tensor", "call_on_nested=True", 'arguments: "dim"')),
    Accepted(CHECKED, named("index", "reshape", "view", "split"), only_ours_raises(), torch_refuses),
    Accepted(
        TORCH,
        named("clamp_min", "clamp_max"),
        only_ours_raises("must match", "not implemented for"),
        rare=("kinds", 201, 2713),
    ),
    Accepted(
        UNDER,
        named("split_keys", "split_keys_loose"),
        only_theirs_raises("Expected a TensorDictBase"),
        rare=("case", 201, 3614),
    ),
    Accepted(
        WORDS, has_words, named("empty_recurse", *MADE), equal_without("words", "names"), rare=("case", 201, 3399)
    ),
    Accepted(
        CHECKED, named("rename_key", "unflatten_keys"), only_ours_raises("leading dimensions"), rare=("case", 201, 5605)
    ),
    Accepted(NODE, named("get", "getitem", "pop", "items"), equal_without("names"), rare=("case", 201, 1113)),
    Accepted(
        NAMES,
        named(
            "update",
            "masked_select",
            "flatten",
            "reshape",
            "view",
            "torch.flatten",
            "torch.reshape",
            "torch.masked_select",
        ),
        equal_without("names"),
    ),
    Accepted(NAMES, named("pad", "logsumexp", *MADE), equal_without("names")),
    Accepted(NAMES, named(*COMPARISONS), equal_without("names")),
    Accepted(NAMES, named(*REDUCTIONS), detail(lambda d: bool(d[1])), equal_without("names"), rare=("case", 201, 2765)),
    Accepted(NAMES, named("index"), takes_rows, equal_without("names")),
    Accepted(
        WORDS,
        has_words,
        named("gather", "unflatten", "rename_key", "reshape", "view", "flatten"),
        equal_without("words", "names"),
        rare=("case", 201, 1824),
    ),
    Accepted(
        WORDS, named("construct"), only_theirs_raises("incompatible with the batch-size"), rare=("case", 202, 6455)
    ),
    Accepted(WORDS, has_words, named("index", *COMPARISONS, *REDUCTIONS), equal_without("words", "names")),
    Accepted(WORDS, has_words, named("squeeze_all"), equal_without("words"), rare=("program", 701, 38041)),
    Accepted(
        WORDS,
        has_words,
        only_theirs_raises("maximum recursion", "items cannot be empty", "not enough values"),
        rare=("case", 201, 1689),
    ),
    Accepted(
        WORDS,
        has_words,
        only_theirs_raises(
            "lazy stack",
            "lazy TD",
            "stack_dim",
            "non-unique data",
            "Invalid indexing",
            "scalar False mask",
            "list index out of range",
            "Incompatible dim",
            "'str'",
            "Unexpected result type",
            "too big for batch size",
            "must equate the tensordict batch_dims",
        ),
        rare=("case", 201, 8195),
    ),
    Accepted(WORDS, has_words, only_ours_raises("has a value for each row"), rare=("case", 202, 8343)),
    Accepted(
        CAST,
        named(
            "stack",
            "cat",
        ),
        only_ours_raises("torch."),
        rare=("case", 201, 1446),
    ),
    Accepted(KEYS, only_ours_raises("different keys", " in one tree and "), rare=("case", 201, 899)),
    Accepted(
        DIMS,
        named(
            "cat",
            "flatten",
            "torch.flip",
            "torch.flatten",
            "flip",
            "repeat_interleave",
        ),
        only_ours_raises("does not exist"),
    ),
    Accepted(
        DIMS,
        named("permute"),
        only_ours_raises("missing, or named twice"),
        batch(lambda size, d: len(d) != len(size)),
        rare=("case", 201, 301),
    ),
    Accepted(WHERE, named("where"), only_ours_raises("where: the condition")),
    Accepted(UNDER, named("get", "exclude"), only_theirs_raises("Expected a TensorDictBase", "_exclude")),
    Accepted(CHECKED, named("unflatten_keys"), equal_without("sizes", "words"), rare=("case", 201, 3698)),
    Accepted(
        UNDER, named("set", "rename_key", "replace", "at_key"), only_ours_raises("is a leaf"), rare=("case", 201, 2613)
    ),
    Accepted(UNDER, named("unflatten_keys"), has_words, only_ours_raises("two keys become"), rare=("kinds", 201, 9403)),
    Accepted(EXPAND, named("expand"), only_theirs_raises(), detail(lambda d: -1 in d)),
    Accepted(
        ZERO,
        named("chunk", "split", "torch.chunk", "torch.split"),
        has_no_elements,
        only_theirs_raises("split_size must be"),
    ),
    Accepted(ZERO, named("gather"), only_theirs_raises("empty index")),
    Accepted(
        ZERO,
        named("reshape", "view", "torch.reshape"),
        has_no_elements,
        only_theirs_raises("invalid"),
        rare=("case", 201, 2276),
    ),
    Accepted(
        ZERO,
        named("reshape", "view", "torch.reshape"),
        has_no_elements,
        their_size(lambda size: 0 not in size),
        rare=("kinds", 202, 4883),
    ),
    Accepted(ROWS, named("at_number"), only_theirs_raises("indexed destination"), rare=("case", 201, 2197)),
    Accepted(WORDS, has_words, reads, equal_but_words, rare=("case", 201, 8446)),
    Accepted(
        STATE,
        named("state_dict"),
        only_theirs_raises("Cannot load state-dict"),
        has_dotted_key,
        rare=("case", 201, 8736),
    ),
    Accepted(ZERO, named("squeeze_all"), only_theirs_raises("view()", "not enough values"), rare=("case", 201, 271)),
    Accepted(OPERATORS, named("floordiv", "mod", "pow"), only_theirs_raises("unsupported operand", "'mod'", "rpow")),
    Accepted(REDUCE, named(*REDUCTIONS), only_theirs_raises("dim='feature'", "'<' not supp", "is invalid for")),
    Accepted(REDUCE, named(*REDUCTIONS), differs_in("size", "shape", "names"), rare=("case", 201, 867)),
    Accepted(
        REDUCE,
        named(*REDUCTIONS),
        has_words,
        lambda case, ours, theirs: (
            equal_without("words", "names", "sizes")(case, ours, theirs)
            or (case.detail[1] and differs_in("size", "shape", "names", "value")(case, ours, theirs))
        ),
        rare=("case", 201, 7918),
    ),
    Accepted(
        WORDS,
        has_words,
        named("flip", "torch.flip", "repeat"),
        equal_without("words", "names"),
        rare=("program", 100, 45),
    ),
    Accepted(
        PROMOTE,
        detail(lambda d: isinstance(d, torch.Tensor) and d.dim() == 0),
        differs_bare_in("dtype", "value"),
        rare=("case", 202, 6775),
    ),
    Accepted(FEATURES, only_ours_raises("another number of features"), rare=("kinds", 201, 3150)),
    Accepted(
        NUMBERS,
        named("set"),
        detail(lambda d: isinstance(d[1], int | float | complex)),
        only_theirs_raises("dimension"),
    ),
    Accepted(
        NUMBERS,
        named("set"),
        detail(lambda d: isinstance(d[1], list)),
        theirs_says("'shape'"),
        rare=("program", 201, 1870),
    ),
    Accepted(
        MOVE, named("rename_key"), detail(lambda d: d[1][:1] == (d[0],)), differs_in("keys"), rare=("case", 201, 715)
    ),
    Accepted(
        MOVE,
        named("rename_key"),
        detail(lambda d: d[1][:1] == (d[0],)),
        only_theirs_raises("already present", "for NonTensorData"),
        rare=("case", 201, 63),
    ),
    Accepted(ORDER, named("rename_key", "select", "unflatten_keys"), differs_in("order")),
    Accepted(FLATTEN, named("unflatten"), differs_in("size", "names", "value"), their_size(lambda size: -1 in size)),
    Accepted(FLATTEN, named("unflatten"), differs_in("names"), newer=True),
    Accepted(WORDS, named(*REDUCTIONS), only_theirs_raises("requires this object to be cast"), newer=True),
    Accepted(CHECKED, named("flatten"), has_lazy, only_ours_raises("start_dim comes after"), newer=True),
    Accepted(
        FLATTEN,
        named("flatten"),
        batch(lambda size, d: size == ()),
        only_theirs_raises("Incompatible end_dim", "cannot come after"),
        rare=("case", 201, 674),
    ),
    # A tree with typed ones inside is given to the constructor, and no input of the case.
    Accepted(KINDS.heading, named("construct"), equal_untyped, rare=("kinds", 402, 10448)),
    Accepted(
        WORDS,
        has_words,
        named("at_number"),
        theirs_says("Cannot update a NonTensorDataBase"),
        rare=("program", 401, 127),
    ),
    Accepted(
        WORDS,
        has_words,
        both_raise,
        theirs_says("list index out of range", "Invalid indexing"),
        rare=("program", 401, 1245),
    ),
    Accepted(
        NUMBERS,
        named("set"),
        detail(lambda d: isinstance(d[1], complex)),
        differs_in("class"),
        rare=("program", 401, 1237),
    ),
    Accepted(NAMES, names_do_not_fit, equal_without("names"), rare=("program", 402, 1701)),
    Accepted(
        PROMOTE,
        detail(lambda d: isinstance(d, torch.Tensor) and d.dim() == 0),
        learns,
        differs_bare_in("dtype", "value", "grad"),
        rare=("kinds", 403, 50678),
    ),
    Accepted(
        WORDS,
        named("auto_batch_size", "auto_batch_dims"),
        has_words,
        differs_in("names", "size", "class"),
        rare=("program", 501, 7674),
    ),
    Accepted(PAD, named("pad"), only_ours_raises("would be altered")),
    Accepted(ZERO, named("at_number"), has_no_elements, only_theirs_raises("tuple index"), rare=("program", 707, 2649)),
    Accepted(CHECKED, named("gather"), has_words, only_ours_raises("an empty batch"), rare=("kinds", 402, 9367)),
)
