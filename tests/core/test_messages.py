"""The messages of mistakes with keys, filters, indices, sizes, non-tensor data, ties and assignments."""

import re

import pytest
import torch
from torch import Size, nn

from tdfunc import (
    BatchSizeError,
    Filter,
    FilterError,
    ImmutableError,
    LeafMismatchError,
    MissingKeyError,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TieError,
    TreeStructureError,
    lazy_stack,
    of_type,
)
from tdfunc.core.shapes import as_names, as_size, check_lead, dim_index
from tests.core.test_ties import tied

TREE = TensorDict({"layer": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2, 3)}, "x": torch.zeros(2, 3)}, [2, 3])
STACK = NonTensorStack("a", "b")
ONE, ROWS = TensorDict({"s": STACK, "x": 0.0}), TensorDict({"s": STACK, "x": torch.zeros(2)}, [2])
VALUES = [
    TensorDict({"n": {"s": NonTensorStack("a", "b", "c", "d").reshape(shape)}}, [2]) for shape in [(2, 2), (2, 2, 1)]
]

KEYS = [
    *[
        (lambda key=key: TREE.get(key), TypeError, rf"must be a str or a nested tuple.*in {re.escape(repr(key))}")
        for key in ["", (), ("a", ""), ("a", 0), 3, ("a", ()), None]
    ],
    (
        lambda: TREE["layer", "wieght"],
        MissingKeyError,
        r"no key 'wieght' under 'layer'.*'weight', 'bias'.*did you mean 'weight'",
    ),
    (lambda: TREE["x", "y"], MissingKeyError, "no key 'y' under 'x'.*'x' is a leaf"),
]
FILTERS = [
    *[
        (lambda spec=spec: TREE.partition(spec), FilterError, "'nothing.*3 leaves.*'layer.weight'")
        for spec in [Filter("nothing.*"), Filter(re.compile("nothing"))]
    ],
    (lambda: TensorDict().partition("*"), FilterError, "no leaves"),
    (lambda: Filter(3), FilterError, r"glob \(str\).*3 \(int\)"),
    (lambda: Filter(["a", "b"]), FilterError, r"\(list\).*hint: .*Filter\(.*\) \| "),
    (lambda: of_type(nn.Linear(1, 1), nn.LSTM), FilterError, r"of_type\(LSTM\).*Linear"),
]
INDICES = [
    (lambda index=index: TREE[index], IndexError, message)
    for index, message in [
        ((Ellipsis, Ellipsis), "more than one Ellipsis"),
        ((0, 0, 0), r"at most 2 for batch size \[2, 3\].*3 in \(0, 0, 0\)"),
        (("a", 0), r"'a' in \('a', 0\).*do not mix.*Keys are text: td\['a', '0'\]"),
        (("a", slice(2)), r"'a' in \('a', slice.*td\[index\]\[key\] reads, td.at\[key\].apply\(fn\) writes\.$"),
        (["a", "b"], r"\['a', 'b'\].*td\.select\('a', 'b'\)"),
        (1.5, "is not an index.*1.5"),
        (torch.tensor([0.5]), "int64, int32 or bool.*torch.float32"),
        ([0.5], "int64, int32 or bool.*torch.float32"),
        ([[0, 1], [1]], r"\[\[0, 1\], \[1\]\]"),
        (torch.ones(3, dtype=torch.bool), r"\[2\].*\[3\]"),
        ((Ellipsis, torch.ones(2, dtype=torch.bool)), r"\[3\].*\[2\]"),
        (2, "2 is out of range for batch dimension 0.*-2 <= index < 2"),
        ((0, -4), "-4 is out of range for batch dimension 1"),
    ]
]
SIZES = [
    (lambda: TensorDict({}, [0, 0])[..., [[-1]]], IndexError, r"an empty batch .*shape \[1, 1\], batch size \[0, 0\]"),
    *[(lambda n=n: TREE[::n], ValueError, rf"positive.*slice\(None, None, {n}\)") for n in (-1, 0)],
    (lambda: as_size([1.5]), TypeError, "'float'"),
    (lambda: as_size([2, -1]), ValueError, r"0 or more.*\[2, -1\]"),
    *[
        (lambda names=names: as_names(names, 2), ValueError, f"2 names.*{names[0]}")
        for names in [["a"], ["a", "a"], ["a", "b", "c"]]
    ],
    (lambda: as_names([1, "y"], 2), TypeError, r"must be a str or None.*\(1, 'y'\)"),
    (lambda: dim_index(3, 3, "squeeze"), IndexError, "squeeze: batch dimension 3.*-3 <= dim < 3"),
    (lambda: dim_index(0, 0, "squeeze"), IndexError, "this one has none"),
    (lambda: check_lead(Size((4, 2)), Size((3,)), "a.b"), BatchSizeError, r"'a.b'.*\[3\] \+.*\[4, 2\]"),
]
NON_TENSOR = [
    *[
        (lambda values=values: NonTensorStack.from_nested(values, 2), ValueError, "list is ragged.*lists of")
        for values in [[["a"], ["b", "c"]], [["a", "b"], ["c"]], [["a"], "b"]]
    ],
    (lambda: TensorDict({"s": [["a"], ["b", "c"]]}, [2, 1]), BatchSizeError, r"'s': .*list is ragged.*\[2, 1\]"),
    (lambda: STACK.unbind(1), IndexError, "unbind: .*dimension 1 does not.*-1 <= dim < 1"),
    (lambda: STACK[0].unbind(), IndexError, "unbind: .*dimension 0 does not.*this one has none"),
    (lambda: STACK.split(1, -2), IndexError, "split: .*dimension -2 does not.*-1 <= dim < 1"),
    (lambda: STACK.index_select(1, torch.tensor([0])), IndexError, "index_select: .*dimension 1 does not"),
    (lambda: STACK.expand(-1, 2), RuntimeError, "leading, non-existing dimension"),
    (lambda: torch.stack([STACK, STACK[:1]]), RuntimeError, r"stack: .*have different shapes.*\[2\].*\[1\]"),
    (lambda: torch.cat([STACK, STACK[None]]), RuntimeError, r"cat: .*have different shapes.*\[2\].*\[1, 2\]"),
    (lambda: torch.cat([STACK, STACK], 1), IndexError, "cat: .*dimension 1 does not"),
    (lambda: torch.sin(STACK), TypeError, "'torch.sin'.*returned NotImplemented"),
    (lambda: torch.vmap(lambda t: torch.stack([ONE, t]))(ROWS), BatchSizeError, "stack: .*laid out along.*in_dims=0"),
    (lambda: torch.stack(VALUES), LeafMismatchError, r"stack: leaf 'n.s' differs.*\[2, 2\].*\[2, 2, 1\]"),
    *[
        (lambda data=data: setattr(data, "_array", 2), ImmutableError, r"\._array = value")
        for data in (NonTensorData(1), STACK)
    ],
]
# A key that only some trees have is not a key of the stack.
PARTIAL = [lazy_stack([TensorDict(entries), TensorDict()]) for entries in ({}, {"a": 1.0}, {"a": {"b": 1.0}})]
LAZY = [
    *[
        (lambda a=a, b=b: PARTIAL[a].apply(torch.add, PARTIAL[b]), TreeStructureError, f"different keys.*{expected}")
        for a, b, expected in [(0, 1, r"\[\].*\['a'\]"), (1, 0, r"\['a'\].*\[\]"), (2, 1, r"\['b'\].*leaf of type Ten")]
    ],
    (lambda: PARTIAL[0].apply(torch.neg, batch_size=[2]), LeafMismatchError, "apply: a lazy stack has no one tensor"),
]
TIED = tied()
TIES = [
    (lambda: TIED.update({"x": torch.zeros(3), "out": {"b": torch.ones(3)}}), TieError, "'out.b' and 'x'"),
    (lambda: TIED.set("out", {"w": torch.zeros(2, 3), "b": torch.zeros(3)}), TieError, "'emb.w' and 'out.w'"),
    (lambda: torch.stack([TIED, TIED.untie("x")]), TieError, "stack: the trees tie different paths"),
    (lambda: TIED + TIED.untie("x"), TieError, "add: the trees tie.*'x'"),
    (lambda: TIED.apply(lambda a, b: a, TIED.untie("x")), TieError, "apply: the trees tie"),
    (lambda: TIED.untie(("out", "nothing")), MissingKeyError, "'nothing'"),
    (lambda: TIED["out"].untie("w"), TieError, r"untie: 'w' is not tied.*a path of \[\]"),
    (lambda: torch.stack([TIED]).at[0].set(TIED.clone().untie("x") + 0), TieError, "different rows"),
]


@pytest.mark.parametrize(("call", "error", "message"), KEYS + FILTERS + INDICES + SIZES + NON_TENSOR + LAZY + TIES)
def test_mistakes(call, error, message):
    """A mistake raises an error that names the key, path, dimension or value, and what must hold."""
    with pytest.raises(error, match=f"(?s){message}"):
        call()
