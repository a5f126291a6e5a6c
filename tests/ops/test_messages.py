"""The messages of mistakes: a call, its error, and the path, values and way out that the message names."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional as F

import tdfunc as tdf
from tdfunc import (
    BatchSizeError,
    FilterError,
    ImmutableError,
    Kind,
    LeafMismatchError,
    MissingKeyError,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TieError,
    TreeStructureError,
    UnsupportedError,
)
from tdfunc.core.walk import Difference
from tdfunc.ops.edits.edit import _UPDATE_OPTIONS
from tests.helpers import TiedLM

A, B = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2])
ROWS, MASK = torch.ones(3), torch.tensor([True, False, True])
# A batch of three; a batch of two dimensions with a longer one inside; a nested tree.
TD = TensorDict({"a": torch.arange(3.0), "n": {"b": torch.zeros(3, 2)}}, [3])
WIDE = TensorDict(
    {"a": torch.arange(12).reshape(2, 3, 2), "n": TensorDict({"b": torch.ones(2, 3, 4)}, [2, 3, 4]), "s": "x"}, [2, 3]
)
FLAT = TensorDict({"a": torch.zeros(3, 2), "b": torch.zeros(3)}, [3])
MIXED = TensorDict({"a": A, "b": B, "s": "x"}, [2])
BYTES = TensorDict({"a": torch.zeros(2, dtype=torch.uint8)}, [2])
COUNTS = torch.zeros(2, 3, dtype=torch.long)


def lacking(kind="Int64", **options):
    """A frame whose column lacks a value, as a tree."""
    return TensorDict.from_pandas(pd.DataFrame({"i": pd.array([2**53 + 1, None], dtype=kind)}), **options)


def tied(value):
    """A tree of tied leaves loaded from values that differ."""
    state = TiedLM().state_dict()
    return TensorDict.from_module(TiedLM()).load_state_dict(state | {"out.weight": state["emb.weight"] + value})


def ragged():
    """Three rows of different lengths."""
    return tdf.lazy_stack([TensorDict({"x": torch.arange(n)}, [n]) for n in (1, 2, 3)])


VALUES = [
    (lambda: TensorDict({"n": {"k": np.longdouble(1)}}), LeafMismatchError, "'n.k': torch does not have .*longdouble"),
    (lambda: TensorDict({"k": np.zeros(2, np.clongdouble)}), LeafMismatchError, "'k': .*of the numbers.*clongdouble"),
    (lambda: TensorDict({"k": np.zeros(2, "M8[s]")}), LeafMismatchError, "'k': .*numbers.*datetime64.*NonTensorData"),
    (lambda: TensorDict({"k": ["a"]}, [0]), BatchSizeError, r"'k': the leading.*\[0\].*\[1\]"),
    (lambda: TensorDict({"k": [A, B]}), LeafMismatchError, r"'k': the tensors of a list .*\[2, 3\] .*\[2\]"),
    (lambda: TensorDict([("a", 1)]), TypeError, "a mapping or a tree.*list"),
    (lambda: TensorDict(torch.ones(2)), TypeError, "the source is not a mapping.*Tensor"),
    (lambda: TensorDict({}, [1, 2], names=["a"]), ValueError, r"2 names.*\('a',\)"),
    (lambda: TensorDict({"p": {"q": 1}, ("p", "q"): 2}), MissingKeyError, "'p.q' is given twice"),
    (lambda: TensorDict({"p": {"q": 1}, ("p", "q", "r"): 2}), MissingKeyError, "'p.q' is given twice"),
    (lambda: TensorDict({("p", "q"): 1, "p": A}), MissingKeyError, "'p' is given twice"),
    (lambda: type(TensorDict)("Mine", (TensorDict,), {}), UnsupportedError, "TensorDict is final, Mine.*TensorClass"),
    # from and to other containers
    (lambda: TensorDict.from_any(3), TypeError, "a mapping or a tree.*int"),
    (
        lambda: TensorDict.from_dict({"a": A}, auto_batch_size=True, batch_size=[2]),
        TypeError, "from_dict: .*auto_batch_size.*both",
    ),
    (lambda: TensorDict.from_dict({"a": A}, batch_dims=1, batch_size=[2]), TypeError, "from_dict: .*batch_dims"),
    (lambda: TensorDict.from_dict({"a": A}, batch_size=[3]), BatchSizeError, r"'a'.*\[3\].*\[2, 3\]"),
    (lambda: TensorDict.from_any((A, torch.ones(5)), batch_size=[2]), BatchSizeError, "'1': the leading"),
    (lacking, LeafMismatchError, "'i' lacks values.*Int64.*fillna"),
    (lambda: lacking("Float64", dtype=torch.int64), LeafMismatchError, "'i' lacks values.*Float64.*fillna"),
    (
        lambda: TensorDict.from_pandas(pd.DataFrame([[1, 2]], columns=["a", "a"])),
        MissingKeyError, "two columns have one name.*'a', 'a'",
    ),
    (
        lambda: TensorDict({"n": {"x": torch.ones(2, dtype=torch.bfloat16)}}).numpy(),
        UnsupportedError, "numpy: 'n.x' does not have .*torch.bfloat16, torch.strided, on cpu.*float32",
    ),
    (
        lambda: TensorDict({"x": torch.ones(2, device="meta")}, [2]).to_pandas(),
        UnsupportedError, "to_pandas: 'x' does not have .*on meta$",
    ),
    (lambda: TensorDict({"x": torch.eye(2).to_sparse()}).numpy(), UnsupportedError, "'x' does not .*torch.sparse_coo"),
    (lambda: MIXED.unsqueeze(1).to_pandas(), BatchSizeError, r"rows are the batch.*\[2, 1\].*reshape"),
    (lambda: TD.exclude("a").to_pandas(), LeafMismatchError, "'n' is not a leaf.*TensorDict.*separator"),
    (lambda: MIXED.to_pandas(), LeafMismatchError, r"'a' is not a leaf with one value.*\[2, 3\]"),
    (lambda: tdf.scalars(TD), LeafMismatchError, r"'n.b' is not a real number.*float32 of shape \[3, 2\]"),
    (lambda: tdf.scalars(MIXED.exclude("a")), LeafMismatchError, "'s' is not a real number.*NonTensorData"),
    (lambda: tdf.scalars(TensorDict({"a": 1j})), LeafMismatchError, "'a' is not a real number.*complex"),
    (
        lambda: tdf.scalars(TensorDict({"a/b": 1.0, "a": {"b": 2.0}})),
        MissingKeyError, "two numbers have the name 'a/b'.*rename_key",
    ),
    (
        lambda: tdf.scalars(TensorDict({"a": torch.ones(2), "a/1": 2.0})),
        MissingKeyError, "two numbers have the name 'a/1'",
    ),
    (
        lambda: MIXED.load_state_dict({"a": A, "c": B}), MissingKeyError,
        r"load_state_dict: .*\['a', 'b'\].*missing \['b'\], unexpected \['c'\]",
    ),
    (lambda: MIXED.load_state_dict({"a": B, "b": B}), LeafMismatchError, r"'a' does not have.*\[2, 3\].*\[2\]"),
    (lambda: MIXED.load_state_dict({"a": 3, "b": B}), LeafMismatchError, r"'a' does not have the shape.*\[2, 3\].*int"),
    (lambda: tied(1), TieError, "'emb.weight' and 'out.weight' are one tensor"),
    (
        lambda: tdf.collate([TensorDict({"x": torch.ones(n)}) for n in (1, 2)]),
        LeafMismatchError, r"stack: leaf 'x' differs.*\[1\].*\[2\].*lazy_stack",
    ),
]  # fmt: skip

EDITS = [
    (lambda: TD.__setitem__("a", 1), ImmutableError, r"td = td.set\('a', value\)"),
    (lambda: TD.__setitem__(0, 1), ImmutableError, r"td = td.at\[index\].set\(value\)"),
    (lambda: TD.__delitem__("a"), ImmutableError, r"td = td.delete\('a'\)"),
    (lambda: setattr(TD, "batch_size", []), ImmutableError, r"td = td.with_batch_size\(value\)"),
    (lambda: setattr(TD, "field", 1), ImmutableError, r"td = td.set\('field', value\)"),
    (lambda: delattr(TD, "field"), ImmutableError, r"td = td.delete\('field'\)"),
    (lambda: TD.update({}, inplace=True), ImmutableError, r"td = td.update\(other\)"),
    (lambda: TD.select("a", inplace=True), ImmutableError, r"td = td.select\(\*keys\)"),
    (lambda: TD.lock_(), ImmutableError, "TensorDict is immutable: it has no 'lock_'.*nothing to lock"),
    (lambda: TD.zero_(), ImmutableError, r"td = torch.zeros_like\(td\)"),
    (lambda: ragged().rename_key_("x", "y"), AttributeError, r"LazyStack.*td = td.rename_key\(old, new\)"),
    (lambda: TD.exclude("a", inplace=True), ImmutableError, r"td = td.exclude\(\*keys\)"),
    (lambda: TD.flatten_keys(inplace=True), ImmutableError, r"td = td.flatten_keys\(separator\)"),
    (lambda: TD.unflatten_keys(inplace=True), ImmutableError, r"td = td.unflatten_keys\(separator\)"),
    (lambda: TD.apply(torch.neg, inplace=True), ImmutableError, r"td = td.apply\(fn\)"),
    (lambda: TD.named_apply(torch.neg, inplace=True), ImmutableError, r"td = td.named_apply\(fn\)"),
    (lambda: WIDE.__setitem__(torch.ones(2) > 0, 1), ImmutableError, r"td\[index\] = value.*td = td\.at\[index\]\.set"),
    (lambda: WIDE.__setitem__((0, B), 1), ImmutableError, r"td\[0, index\] = value"),
    (lambda: WIDE.__setitem__(slice(1, 2), 1), ImmutableError, r"td\[slice\(1, 2, None\)\] = value"),
    # A write in place has happened by the time that Python assigns its result.
    (lambda: TD.clone().__setitem__("a", TD["a"]), ImmutableError, r"td = td\.set\('a', value\)$"),
    (lambda: TD.__setitem__("a", TD["a"]), ImmutableError, r"td\.at\['a'\]\.add\(value\).*already written"),
    # keys
    (lambda: TD["a", "z"], MissingKeyError, "no key 'z' under 'a'.*no keys"),
    (lambda: ("n", "b") in TD.keys(), TypeError, r"\('n', 'b'\) is a nested key.*include_nested=True"),  # noqa: SIM118
    (lambda: TD.split_keys(["a"], ["a"]), MissingKeyError, "no key 'a'"),
    (lambda: TD.split_keys({"a": "b", "n": "b"}), MissingKeyError, "rename_key: 'b' exists.*'n'"),
    (lambda: TD.set(("a", "x"), 1), MissingKeyError, "'a' is a leaf, 'a.x' cannot"),
    (lambda: TD.update({("a", "x"): 1}), MissingKeyError, "'a' is a leaf, 'a.x' cannot"),
    (lambda: TD.rename_key("n", ("a", "x")), MissingKeyError, "'a' is a leaf, 'a.x' cannot"),
    (lambda: TD.rename_key("a", "n", safe=True), MissingKeyError, "rename_key: 'n' exists.*'a'"),
    (lambda: TensorDict({"a.b": 1, "a": {"b": 1}}).flatten_keys(), MissingKeyError, "'a.b'.*'a.b',.*and .'a', 'b'"),
    (lambda: TensorDict({"a.b": A, "a": {"b": B}}).state_dict(), MissingKeyError, "two paths become the key 'a.b'"),
    (lambda: TD.with_batch_size([3, 2]), BatchSizeError, r"'a'.*\[3, 2\].*\[3\]"),
    (lambda: TD.with_names(["a", "b"]), ValueError, r"1 names.*\('a', 'b'\)"),
    (lambda: tdf.partition(TD, "nothing"), FilterError, "matches no leaf"),
    (lambda: tdf.in_dims(TD, {"n.*": 0}), FilterError, r"in_dims: no filter matches the leaf 'a'.*\['n.\*'\]"),
    (lambda: tdf.combine(TD, TD.select("n")), ValueError, "two parts have the leaf 'n.b'"),
    (lambda: tdf.combine([TD]), TypeError, "combine: an argument is not a tree.*list"),
    # rows
    (lambda: TD.at[0].set(TensorDict({"a": 1.0})), MissingKeyError, r"\['a', 'n.b'\].*\['a'\]"),
    (lambda: TD.at[0].set(TD[0].set("z", 1)), MissingKeyError, r"\['a', 'n.b', 'z'\]"),
    (lambda: TD.at[0].set(TD[:1]), BatchSizeError, r"at\[...\].set.*\[\].*\[1\]"),
    (lambda: TD.at[0].set(TD[0].set("a", torch.zeros(2))), LeafMismatchError, r"'a'.*\[\].*\[2\]"),
    (lambda: TD.at[0].set(TD[0].to(torch.complex64)), LeafMismatchError, "'a'.*float32.*complex64"),
    (lambda: TD.at[0].set(np.complex64(1j)), LeafMismatchError, "'a'.*float32.*complex64"),
    (lambda: TD.to(torch.int64).at[0].set(1.5), LeafMismatchError, "'a'.*int64.*float32"),
    (lambda: BYTES.at[0].set(300), LeafMismatchError, "'a' do not fit.*uint8.*int64"),
    (lambda: TD.at[[0, 0]].mul(2), ValueError, r"at\[...\].mul: the index contains a row more than once.*\[0, 0\]"),
    (lambda: TD.at[[1, 1]].apply(torch.neg), ValueError, r"at\[...\].apply: the index contains a row more"),
    (lambda: TD.at[0].set("x"), TypeError, r"at\[...\].set: rows are not a tree.*str"),
    (lambda: TD.at["a"][1], TypeError, r"at\['a'\]\[...\]: one place.*td.at\[key\].apply"),
    (lambda: TD.at[:2].set(ROWS), BatchSizeError, r"broadcasts to \[2\].*\[3\]"),
    (lambda: TD.at[3].set(1), IndexError, "3 is out of range"),
    (lambda: MIXED.at["s"].add(1), TypeError, r"at\[...\].add: 's' is not a tensor or a tree.*str.*apply"),
    (lambda: TD.at[0].set({"a": 1.0}), MissingKeyError, r"other keys.*td.at\[i\].set\(td\[i\].update\(rows\)\)"),
    (lambda: TD.at["a"].set(ROWS[:, None]), LeafMismatchError, r"'a' does not have the shape.*\[3\].*\[3, 1\].*td.set"),
    (lambda: TD.at["a"].set("text"), TreeStructureError, "'a' is a leaf.*non-tensor data.*td.set"),
    (lambda: TD.at["n"].set(ROWS), TreeStructureError, "'n' is a tree.*a leaf"),
    (lambda: TD.at["n"].set({"b": ROWS}), LeafMismatchError, r"'n.b' does not have.*\[3, 2\].*\[3\]"),
    (lambda: TD.at["n"].set({"c": 1}), TreeStructureError, "different keys under 'n'.*td.set"),
    (lambda: TD.at[tdf.Filter("n.*")].set({"a": 1}), MissingKeyError, "other keys than the tree"),
    (lambda: TD.at[tdf.Filter("q.*")].set(1), FilterError, "matches no leaf"),
    (lambda: TensorDict({"x": torch.ones(2)}).at["x"].set(2**1999), LeafMismatchError, "torch does not have the dtype"),
    (lambda: BYTES.at[0].set(2**80), LeafMismatchError, r"at\[...\].set: torch does not have the dtype of the numbers"),
    (
        lambda: BYTES.at[0].set_(2**80),
        LeafMismatchError,
        r"at\[...\].set_: torch does not have the dtype",
    ),
    (lambda: tdf.pad(BYTES, [1, 0], 1.5), LeafMismatchError, "pad: the value would be altered.*1.5 for torch.uint8"),
    (lambda: tdf.pad(BYTES, [1, 0], float("nan")), LeafMismatchError, "nan for torch.uint8"),
]

# Each of these is raised before the first write.
WRITES = [
    (lambda t: t.set_("a", torch.zeros(2)), LeafMismatchError, r"'a'.*\[3\].*\[2\]"),
    (lambda t: t.set_("z", 1), MissingKeyError, "no key 'z'"),
    (lambda t: t.set_(("a", "z"), 1), MissingKeyError, "no key 'z' under 'a'"),
    (lambda t: t.set_("s", 1), LeafMismatchError, "'s': only tensors.*NonTensorData"),
    (lambda t: t.set_("e", 1), LeafMismatchError, r"'e': the leaf is expanded.*\[3, 2\] with strides \[1, 1\]"),
    (lambda t: t.update_({"e": A.T[:, :1]}), LeafMismatchError, "'e': the leaf is expanded or overlaps itself"),
    (lambda t: t.set_("a", 2**70), LeafMismatchError, "set_ 'a': torch does not have the dtype of the numbers"),
    (lambda t: t.set_("i", 300), LeafMismatchError, "uint8 can hold.*int64"),
    (lambda t: t.set_("i", torch.ones(3)), LeafMismatchError, "uint8 can hold.*float32"),
    (lambda t: t.set_("a", torch.ones(3, device="meta")), LeafMismatchError, "'a': the value does not have data; no"),
    (lambda t: t.update_({"a": ROWS, "i": torch.ones(3)}), LeafMismatchError, "'i'.*uint8 can hold.*float32"),
    (lambda t: t.update_(3), TypeError, "a mapping or a tree.*int"),
    (lambda t: t.update_({"a": ROWS, "z": 1}), MissingKeyError, "nothing was written.*'z'"),
    (lambda t: t.copy_({"a": ROWS}), MissingKeyError, r"nothing was written.*\['a'\]"),
    (lambda t: t.update_({"n": {"b": A.T[:, :1]}, "a": ROWS}), LeafMismatchError, r"'n.b'.*\[3, 2\].*\[3, 1\]"),
    (lambda t: t.at[0].set_(TensorDict({"a": A}, [2])), BatchSizeError, r"set_: the rows.*\[\].*\[2\]"),
    (lambda t: t.select("a", "e").at[0].set_({"a": 1.0, "e": A[0, :2]}), LeafMismatchError, "'e': the leaf is expan"),
    (lambda t: t.select("a").at[0].set_({"a": 1.0, "z": 1}), MissingKeyError, r"nothing was written.*'z'.*new_zeros"),
    (lambda t: t.select("a", "i").at[0].set_({"a": 1.0}), MissingKeyError, r"nothing was written.*'a', 'i'.*\['a'\]"),
    (lambda t: t.select("n").at[0].set_({"n": {"b": ROWS}}), LeafMismatchError, r"'n.b': .*\[2\].*\[3\]"),
    (
        lambda t: t.select("a").set(("d", "s"), "x").at[0].set_({"a": 1.0, "d": {"s": "y"}}),
        LeafMismatchError, "'d.s' is not a tensor.*nothing was written.*data=x.*data=y",
    ),
]  # fmt: skip

OPERATIONS = [
    (lambda: FLAT + torch.zeros(2), BatchSizeError, r"add.*broadcasts to \[3\].*\[2\]"),
    (lambda: FLAT + FLAT.exclude("b"), TreeStructureError, r"add: .*keys\..*\['a', 'b'\].*\['a'\]"),
    (lambda: FLAT + FLAT.set("a", "word"), TreeStructureError, "'a' is a leaf in.*tensor.*word"),
    (lambda: FLAT + FLAT.set("a", ROWS), LeafMismatchError, r"'a'.*\[3, 2\].*\[3\]"),
    (lambda: FLAT + FLAT[:2], BatchSizeError, r"add.*\[3\].*\[2\]"),
    (lambda: FLAT == {"a": 1}, TypeError, r"eq: an operand is not.*dict.*TensorDict\(d\) is a tree"),
    (lambda: FLAT != {"a": 1}, TypeError, "ne: an operand is not.*dict"),
    (lambda: ROWS @ FLAT, TypeError, "unsupported operand.*TensorDict"),
    (lambda: FLAT + "word", TypeError, "add: an operand is not a tree, number or tensor.*str$"),
    (lambda: FLAT | {"a": 1}, TypeError, r"bitwise_or.*number or tensor.*dict.*td\.update\(d\)"),
    (lambda: FLAT.select("a").apply(lambda x: x[0]), BatchSizeError, "apply: the result for 'a'"),
    (lambda: TensorDict({"n": FLAT}).apply(lambda x: x[0]), BatchSizeError, r"result for 'n.a'.*\[3\].*\[2\]"),
    (lambda: FLAT.apply(torch.add, FLAT.exclude("b")), TreeStructureError, r"apply.*'b'\].*\['a'\]"),
    (lambda: FLAT.apply(torch.add, ragged()), LeafMismatchError, "apply: a lazy stack has no one tensor"),
    (lambda: FLAT.lerp(FLAT.expand(2, 3), 0.5), BatchSizeError, r"lerp: .*largest.*\[3\].*\[2, 3\]"),
    (lambda: FLAT.lerp(FLAT.select("a"), 0.5), TreeStructureError, r"lerp: .*different keys.*'a', 'b'.*\['a'\]"),
    (lambda: FLAT.lerp(torch.ones(2), 1), BatchSizeError, r"lerp: .*\[3\].*\[2\]"),
    (lambda: WIDE.masked_fill(MASK, 1), ValueError, r"masked_fill: .*\[2, 3\].*bool of shape \[3\]"),
    (lambda: FLAT.masked_fill(ROWS, 1), ValueError, "masked_fill: .*bool.*float32"),
    # reductions
    (lambda: FLAT.sum("x"), ValueError, "sum: dim must be a batch dimension.*'feature'.*'x'"),
    (lambda: FLAT.mean(0, reduce=True), ValueError, "mean: with reduce=True dim must be one of None, .*0"),
    (lambda: FLAT.max(0, reduce=True), ValueError, "amax: with reduce=True dim must be one of None, .*0"),
    (lambda: TensorDict().sum(reduce=True), ValueError, "sum: the tree does not have a leaf"),
    (lambda: FLAT.max((0, 1)), ValueError, r"max: dim must be one batch dim.*\(0, 1\)"),
    (lambda: FLAT.argmin("rows"), ValueError, "argmin: dim must be.*'feature'.*'rows'"),
    (lambda: torch.quantile(FLAT, torch.ones(2), 0), ValueError, r"quantile: q must be a number.*\[2\].*torch.stack"),
    (lambda: ragged().sum(dim="feature", reduce=True), LeafMismatchError, "sum: a lazy stack has no one tensor"),
    (
        lambda: TensorDict({"l": ragged()}, [3]).mean(dim="feature", reduce=True),
        LeafMismatchError, "mean: a lazy stack has no one tensor",
    ),
    # shapes
    (lambda: WIDE.reshape(5), RuntimeError, r"reshape.*6 elements.*\(5,\)"),
    (lambda: WIDE.flatten(1, 0), RuntimeError, "start_dim comes after.*1 > 0"),
    (lambda: WIDE.unflatten(0, (3, 2)), RuntimeError, r"unflatten.*2 elements.*\(3, 2\)"),
    (lambda: WIDE.permute(0, 0), ValueError, r"\[0, 1\].*\[0, 0\]"),
    (lambda: WIDE.transpose(0, 2), IndexError, "transpose.*-2 <= dim < 2"),
    *[
        (lambda name=name, args=args: getattr(WIDE, name)(*args), IndexError, f"{name}: batch dimension {dim} does")
        for dim, name, *args in [
            (3, "unsqueeze", 3), (2, "squeeze", 2), (2, "split", 1, 2), (2, "unbind", 2), (2, "size", 2),
            (2, "gather", 2, COUNTS), (2, "flatten", 2), (2, "sum", 2), (2, "softmax", 2)]
    ],
    (lambda: WIDE.expand(3), RuntimeError, r"at least 2 dimensions that fits batch size \[2, 3\].*\[3\]"),
    (lambda: WIDE.expand(2, 4), RuntimeError, r"\[2, 3\].*\[2, 4\]"),
    (lambda: WIDE.expand(-1, 2, 3), RuntimeError, r"new dimensions come first.*\[-1, 2, 3\]"),
    (lambda: WIDE[:1].expand(-2, 3), RuntimeError, r"\[1, 3\].*\[-2, 3\]"),
    (lambda: WIDE.split([1, 2]), ValueError, r"2.*\[1, 2\] \(sum 3\)"),
    (lambda: WIDE.permute(1, 0).view(6), RuntimeError, "view size is not compatible"),
    (lambda: WIDE[2], IndexError, "2 is out of range"),
    (lambda: WIDE["a", 0], IndexError, r"'a' in \('a', 0\).*td\[index\]\[key\]"),
    (lambda: WIDE[torch.tensor([9])], IndexError, "index 9 is out of bounds for dimension 0 with size 2"),
    (lambda: WIDE.gather(0, torch.tensor([0])), ValueError, r"2 dimensions.*\[1\]"),
    (lambda: WIDE.masked_select(torch.tensor([1, 0])), TypeError, "the mask does not hold bools.*int64"),
    (lambda: WIDE.masked_select(MASK), IndexError, r"\[2\].*\[3\]"),
    (lambda: WIDE.where(MASK, 0), ValueError, r"\[2, 3\].*torch.bool of shape \[3\].*unsqueeze"),
    (lambda: WIDE.where(torch.zeros(2, 3), 0), ValueError, "bool.*torch.float32"),
    (lambda: WIDE.where(MASK[None, :2], 0), BatchSizeError, r"\[2, 3\].*\[1, 2\]"),
    (lambda: WIDE.where(torch.tensor(True), WIDE.exclude("s")), TreeStructureError, "where: .* different keys"),
    (lambda: torch.where(FLAT > 0, FLAT, FLAT), ValueError, "where: the condition is not a tensor.*TensorDict"),
    (lambda: torch.where(FLAT > 0, A, A), ValueError, "the condition is not a tensor"),
    (lambda: bool(WIDE), RuntimeError, "neither true nor false"),
    (lambda: len(WIDE[0, 0]), TypeError, r"batch size \[\] has no rows"),
    (lambda: iter(WIDE[0, 0]), TypeError, r"batch size \[\] has no rows"),
    (lambda: WIDE.repeat(2), ValueError, r"repeat: .*2 numbers.*\[2\]"),
    (lambda: WIDE.repeat(2, -1), ValueError, r"repeat: .*at least 0.*-1"),
    (lambda: tdf.pad(WIDE, [1]), ValueError, r"pad: .*2 pairs.*\[1\]"),
    (lambda: tdf.pad(WIDE, [1, -1]), ValueError, r"pad: .*0 or more.*\[1, -1\]"),
    (lambda: tdf.pad(WIDE, [0, 0] * 3), ValueError, "pad: .*2 pairs"),
    (lambda: tdf.pad(ragged(), [0, 0, 1, 0]), BatchSizeError, "dimension 1 is ragged"),
    # joins
    (lambda: tdf.stack([WIDE, WIDE[:, :2]]), LeafMismatchError, r"stack.*\[2, 3\].*\[2, 2\]"),
    (lambda: tdf.cat([WIDE, WIDE[:, :2]]), LeafMismatchError, r"cat.*dimension 0.*\[2, 3\].*\[2, 2\]"),
    (lambda: tdf.stack([WIDE, WIDE], 3), IndexError, "stack: batch dimension 3"),
    (lambda: tdf.cat([WIDE, WIDE], 2), IndexError, "cat: batch dimension 2"),
    # comparisons and functions of torch
    (lambda: tdf.assert_close(FLAT, FLAT.to_dict()), TypeError, r"argument is not a tree.*dict.*TensorDict\(value\)"),
    (lambda: tdf.assert_close({}, FLAT), TypeError, "assert_close: an argument is not a tree.*dict"),
    (lambda: tdf.assert_close(FLAT, FLAT.select("a")), TreeStructureError, r"assert_close: .*'a', 'b'.*\['a'\]"),
    (lambda: torch.equal(FLAT, A), TypeError, "torch.equal: an argument is not a tree.*Tensor"),
    (lambda: torch.allclose(FLAT, FLAT.select("a")), TreeStructureError, "allclose: .*'b'"),
    (lambda: torch.autograd.grad(FLAT, FLAT, ROWS), TypeError, "grad_outputs of a tree: an argument is not .*Tensor"),
    (lambda: torch.autograd.grad(FLAT, FLAT, FLAT.select("a")), TreeStructureError, r"grad: .*'a', 'b'.*\['a'\]"),
    (lambda: F.mse_loss(FLAT, FLAT[:1]), BatchSizeError, r"mse_loss: the batch sizes differ.*\[3\].*\[1\]"),
    (lambda: F.l1_loss(FLAT, A), TypeError, "l1_loss: an argument is not a tree.*Tensor"),
    (lambda: torch.add(FLAT, FLAT, out=FLAT), ImmutableError, "torch.add: out= would write to a tree"),
    (lambda: F.dropout(FLAT), UnsupportedError, r"functional.dropout is not.*: +td.apply\(lambda x: torch.nn.f"),
    (lambda: torch.hstack([FLAT]), UnsupportedError, r"torch.hstack is not.*\(lambda x, y: torch.hstack\(\(x, y\)"),
    (lambda: torch.special.bessel_j0(FLAT), UnsupportedError, "torch.special.bessel_j0 is not"),
    (lambda: torch.index_select(FLAT, 1, B), IndexError, "index_select: batch dimension 1"),
    (lambda: torch.select(FLAT, 1, 0), IndexError, "^select: batch dimension 1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), VALUES + EDITS + OPERATIONS)
def test_a_mistake_is_explained(call, error, message):
    """A wrong call raises an error that names the leaf, the values and a way out."""
    with pytest.raises(error, match=f"(?s){message}"):
        call()


@pytest.mark.parametrize(("write", "error", "message"), WRITES)
def test_a_refused_write_writes_nothing(write, error, message):
    """A value that does not fit is found before the first leaf is written."""
    tree = TD.clone().update({"s": "x", "e": torch.zeros(4).unfold(0, 2, 1), "i": torch.zeros(3, dtype=torch.uint8)})
    with pytest.raises(error, match=f"(?s){message}"):
        write(tree)

    assert tree["a"].tolist() == [0, 1, 2]
    assert not tree["n", "b"].any()
    assert not tree["e"].any()


# -- one mistake in many calls ------------------------------------------------------------------------------------

REFUSED = [
    (torch.zeros(4), BatchSizeError, r"'n.new': the leading.*\[3\].*\[4\]"),
    ({"deep": torch.zeros(4)}, BatchSizeError, r"'n.new.deep': the leading.*\[3\].*\[4\]"),
    (TensorDict({"deep": torch.zeros(2)}), BatchSizeError, r"'n.new.deep': the leading.*\[3\].*\[2\]"),
    ([1, 2], BatchSizeError, r"'n.new': the leading.*\[3\].*\[2\]"),
    (["a", "b"], BatchSizeError, r"'n.new': the leading.*\[3\].*\[2\]"),
    (NonTensorStack("a"), BatchSizeError, r"'n.new': the leading.*\[3\].*\[1\]"),
    (None, TypeError, "'n.new': None cannot be a value"),
    ([TensorDict()], TypeError, "'n.new': trees are in a list.*1 trees"),
    *[
        (value, LeafMismatchError, "'n.new': torch does not have the dtype of the numbers.*NonTensorData")
        for value in (2**63, -(2**63) - 1, 2**80, [1, 2**80, 3])
    ],
]


@pytest.mark.parametrize(("value", "error", "message"), REFUSED)
@pytest.mark.parametrize(
    "call",
    [
        lambda value: TD.set(("n", "new"), value),
        lambda value: TD.update({"n": {"new": value}}),
        lambda value: TensorDict({"n": {"new": value}}, [3]),
    ],
    ids=["set", "update", "constructor"],
)
def test_a_value_that_does_not_fit(value, error, message, call):
    """The constructor and every edit name the path and both sizes."""
    with pytest.raises(error, match=f"(?s){message}"):
        call(value)


def of_trees(*trees, **entries):
    """Call the constructor with trees instead of dicts."""
    return TensorDict(*map(TensorDict, trees), **entries)


def updated(*source, **entries):
    """Call `update`."""
    return TensorDict({"a": 0.0}).update(*source, **entries)


OPTIONS = [
    *[("TensorDict", TensorDict, name) for name in ("lock", "non_blocking")],
    ("TensorDict", of_trees, "auto_batch_size"),
    *[("update", updated, name) for name in sorted(_UPDATE_OPTIONS)],
]


@pytest.mark.parametrize(("call", "make", "name"), OPTIONS)
def test_options_of_tensordict_are_no_entries(call, make, name):
    """`TensorDict(d, lock=True)` raises where tensordict takes an option."""
    with pytest.raises(TypeError, match=rf"(?s){call}: .* '{name}' is an option.*{name}=True.*'{name}': value"):
        make({"b": 1.0}, **{name: True})


@pytest.mark.parametrize(("call", "make", "name"), OPTIONS)
def test_names_of_options_are_entries(call, make, name):
    """A keyword alone is an entry, whatever its name, and so is a key."""
    assert make(**{name: 2.0})[name] == 2.0
    assert make({name: 2.0})[name] == 2.0


# -- joins --------------------------------------------------------------------------------------------------------


SHORT = (
    WIDE.set(("n", "b"), WIDE["n", "b"][..., None]),
    WIDE.set(("n", "b"), WIDE["n", "b"][..., None].expand(2, 3, 4, 5)),
)
JOINS = [
    ([], ValueError, "there is no tree"),
    ([WIDE, torch.zeros(2, 3)], TypeError, "an argument is not a tree.*Tensor"),
    (WIDE[0, 0], TypeError, r"a tree with batch size \[\] has no rows"),
    ([WIDE, WIDE.exclude("a")], TreeStructureError, r"different keys\..*\['a', 'n', 's'\].*\['n', 's'\]"),
    ([WIDE, WIDE.exclude(("n", "b"))], TreeStructureError, r"keys under 'n'.*\['b'\].*\[\]"),
    ([WIDE, WIDE.exclude("a"), WIDE.set("n", COUNTS)], TreeStructureError, r"keys\..*\['n', 's'\]"),
    ([WIDE.set("e", {"x": 1.0}), WIDE.set("e", {}), WIDE.set("e", 1.0)], TreeStructureError, "keys under 'e'"),
    ([WIDE, WIDE.set("a", WIDE["a"].float())], LeafMismatchError, "'a' differs.*int64.*float32"),
    (SHORT, LeafMismatchError, r"'n.b'.*4, 1\].*4, 5\]"),
    ([WIDE, WIDE.set("n", COUNTS)], TreeStructureError, r"'n' is a tree in.*\['b'\].*int64"),
    ([WIDE, WIDE.set("s", COUNTS)], TreeStructureError, "'s' is non-.*data=x.*int64"),
    ([WIDE.set("a", COUNTS, kind=kind) for kind in (Kind.BUFFER, Kind.PARAMETER)], LeafMismatchError, "'a'.*BUF.*PAR"),
]


@pytest.mark.parametrize("join", [tdf.stack, tdf.cat])
@pytest.mark.parametrize(("trees", "error", "message"), JOINS)
def test_joins_that_are_refused(join, trees, error, message):
    """Trees that do not fit are not promoted or untied; the message names the leaf and both."""
    with pytest.raises(error, match=f"(?s){message}"):
        join(trees)


# Of two trees, every operation that zips or merges them.
PAIRS = {
    "stack": lambda a, b: tdf.stack([a, b]),
    "cat": lambda a, b: tdf.cat([a, b]),
    "add": lambda a, b: a + b,
    "eq": lambda a, b: a == b,
    "where": lambda a, b: a.where(torch.ones(2, dtype=torch.bool), b),
    "apply": lambda a, b: a.apply(torch.add, b),
    "lerp": lambda a, b: a.lerp(b, 0.5),
    "clamp": lambda a, b: a.clamp(b, b),
    "mse_loss": F.mse_loss,
    "assert_close": tdf.assert_close,
    "combine": tdf.combine,
    "update_": lambda a, b: a.update_(b),
    "copy_": lambda a, b: a.copy_(b),
    "set_": lambda a, b: a.set_("k", b["k"]),
    r"at\[\.\.\.\].set": lambda a, b: a.at[0].set(b[0]),
    r"at\[\.\.\.\].add": lambda a, b: a.at[0].add(b[0]),
    r"at\[\.\.\.\].set_": lambda a, b: a.at[0].set_(b[0]),
}


@pytest.mark.parametrize("call", PAIRS)
def test_a_leaf_against_a_tree(call):
    """The message names the one key that is of two kinds, and describes both."""
    leaf, tree = TensorDict({"k": torch.zeros(2)}, [2]), TensorDict({"k": {"y": torch.zeros(2)}}, [2])
    tensor, keys = r"a tensor of shape \[2?\], torch.float32", r"a TensorDict with the keys \['y'\]"

    with pytest.raises(TreeStructureError, match=rf"^{call}: 'k' is a leaf in one.*a tree in.*\n.*{tensor}\n.*{keys}"):
        PAIRS[call](leaf, tree)
    with pytest.raises(TreeStructureError, match=rf"^{call}: 'k' is a tree in one.*a leaf in.*\n.*{keys}\n.*{tensor}"):
        PAIRS[call](tree, leaf)


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (torch.zeros(2, 3), "a tensor of shape [2, 3], torch.float32"),
        (torch.nn.UninitializedParameter(), "a tensor of no shape, torch.float32"),
        (TensorDict({"b": 1, "a": 2}), "a TensorDict with the keys ['a', 'b']"),
        (NonTensorData("x" * 999), "non-tensor data NonTensorData(data=" + "x" * 165),
        (None, "a NoneType"),
    ],
)
def test_an_entry_is_described(node, text):
    """A message describes an entry in at most a line."""
    shown = str(Difference(("k",), "kind", node, TensorDict()).error("call")).splitlines()[1]

    assert shown.startswith("  expected: " + text)
    assert len(shown) <= 212
