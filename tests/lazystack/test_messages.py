"""The messages of mistakes with lazy stacks."""

import pytest
import torch

import tdfunc as tdf
from tdfunc import BatchSizeError, LeafMismatchError, MissingKeyError, TensorDict, TreeStructureError, lazy_stack
from tests.lazystack.trees import Message, ragged, tree, uniform

NO_ONE_TENSOR = (
    r"a lazy stack has no one tensor for each leaf(.|\n)*\[3, -1\], trees along dimension 0\n.*pad\(\) first"
)

ROWS = [
    (lambda t: lazy_stack([]), ValueError, "no trees were given"),
    (lambda t: lazy_stack([t, {}]), TypeError, r"an argument is not a tree(.|\n)*dict at 1"),
    (lambda t: lazy_stack([tree(2), Message("a", torch.zeros(2))]), TreeStructureError, "TensorDict\n.*Message"),
    (lambda t: lazy_stack([tree(2), tree(2)[0]]), BatchSizeError, r"numbers of batch dimensions.*\n.*\[2\]\n.*\[\]"),
    (lambda t: lazy_stack([tree(2)], 2), IndexError, "dimension 2 does not exist"),
    (lambda t: torch.cat([t, t.set("x", {"a": 1.0})]), TreeStructureError, "'x' is of different.*\n.*a tensor\n.*tree"),
    (lambda t: lazy_stack([t[0], t[0].set("x", {"a": 1.0})]), TreeStructureError, "'x' is of .*\n.*a tensor\n.*tree"),
    (lambda t: torch.stack([t, t.permute(1, 0)]), TreeStructureError, "hold their trees along different dimensions"),
    (lambda t: torch.stack([t, t.pad()]), TreeStructureError, "LazyStack\n.*TensorDict\n.*dense"),
    # One tensor for each leaf is needed.
    (lambda t: TensorDict(t), LeafMismatchError, f"TensorDict: {NO_ONE_TENSOR}"),
    (lambda t: tree(3).at[:2].set(t), LeafMismatchError, rf"at\[...\].set: {NO_ONE_TENSOR}"),
    (lambda t: tree(3).update(t), LeafMismatchError, f"update: {NO_ONE_TENSOR}"),
    (lambda t: TensorDict({"l": t}, [3]).rename_key(("l", "x"), "x"), LeafMismatchError, NO_ONE_TENSOR),
    (lambda t: TensorDict({"l": t}, [3]).rename_key(("l", "s"), ("n", "s")), LeafMismatchError, NO_ONE_TENSOR),
    *[
        (lambda t, name=name, args=args: getattr(t, name)(*args), LeafMismatchError, f"{name}: {NO_ONE_TENSOR}")
        for name, *args in [("sum",), ("mean", 1), ("cumsum", 0), ("reshape", -1), ("new_zeros", [2])]
    ],
    (lambda t: lazy_stack([tree(0), tree(0)]).reshape(3, 0), IndexError, "no tree of the lazy stack is left"),
    (lambda t: t.gather(0, torch.tensor([[0]])), LeafMismatchError, f"gather: {NO_ONE_TENSOR}"),
    (lambda t: t[[0, 1], [0, 1]], LeafMismatchError, f"index with index tensors across the trees: {NO_ONE_TENSOR}"),
    (lambda t: lazy_stack(uniform(), 1)[[0, 1], :, [0, 1]], LeafMismatchError, "index tensors across the trees"),
    (lambda t: t.at[0].set_(t[0]), LeafMismatchError, rf"at\[...\].set_: {NO_ONE_TENSOR}"),
    (lambda t: lazy_stack([t, t]).nested(), LeafMismatchError, f"nested: {NO_ONE_TENSOR}"),
    (lambda t: t.split(2, 1), BatchSizeError, r"is ragged, and has no single size.*\n.*-1"),
    # Indices and edits.
    (lambda t: t[3], IndexError, "out of range"),
    (lambda t: t[3:], IndexError, "no tree of the lazy stack is left"),
    (lambda t: t[0, 0, 0], IndexError, "more indices than batch dimensions"),
    (lambda t: t[[True, False]], IndexError, r"mask does not have the shape.*\n.*\[3\]\n.*\[2\]"),
    (lambda t: t["nope"], MissingKeyError, "no key 'nope'"),
    (lambda t: t["0", "x"], MissingKeyError, "no key '0'"),
    (lambda t: t.set("z", torch.zeros(4, 2)), BatchSizeError, r"one part for each tree.*\n.*3 at.*\n.*shape \[4, 2\]"),
    (lambda t: t.set("z", TensorDict({}, [4])), BatchSizeError, r"3 at dimension 0\n.*batch size \[4\]"),
    (lambda t: t.set("z", (1.0, 2.0)), BatchSizeError, "does not have one value for each tree.*\n.*3 values\n.*2"),
    (lambda t: t.set("z", torch.zeros(3, 2)), BatchSizeError, r"'z': the leading dim.*\n.*\[4\].*\n.*\[2\]"),
    (lambda t: t.set(("x", "z"), 1), MissingKeyError, "'x' is a leaf"),
    (lambda t: t.at[0].set(t[1].exclude("x")), TreeStructureError, r"different keys.*\n.*'x'\]\n.*\['n', 's'\]"),
    (lambda t: t.at[[[0, 1]]].set(t), LeafMismatchError, r"at\[...\].set with an index of several dimensions"),
    (lambda t: t.at[0].set(t[1].set(("n", "y"), 1.0)), LeafMismatchError, "rows for 'n.y'.*\n.*int64\n.*float32"),
    (lambda t: t.at[:, [0, 1]].mul(2), BatchSizeError, r"at\[...\]: .*ragged"),
    (lambda t: t.at[:2].set(t), BatchSizeError, r"do not have the batch size.*\n.*2 at dimension 0\n.*\[3, -1\]"),
    (lambda t: t.with_batch_size([2]), BatchSizeError, r"dimension 0 is not the number of trees.*\n.*3\n.*\[2\]"),
    (lambda t: t + lazy_stack([t[0].set("q", 1.0), t[1], t[2]]), TreeStructureError, "add.*different keys(.|\n)*'q'"),
    (lambda t: tdf.assert_close(t, lazy_stack([t[0].set("q", 1), t[1], t[2]])), TreeStructureError, "(?s)close.*'q'"),
    (lambda t: lazy_stack([lazy_stack([t[0].set("q", 1.0), t[1]])]).to_dict(), TreeStructureError, "'q' is not in all"),
    # One tree of all.
    (lambda t: t.pad(side="middle"), ValueError, "must be one of 'right', 'left'.*\n.*'middle'"),
    (lambda t: t.pad(1.5), LeafMismatchError, "leaf 'n.y' cannot hold.*\n.*int64\n.*1.5"),
    (lambda t: t.pad({"q": 1}), MissingKeyError, "pad: no key 'q'"),
    (lambda t: lazy_stack([t[0], t[1].double()]).pad(), LeafMismatchError, "'x' differs in more.*\n.*32\n.*float64"),
    (lambda t: lazy_stack([t[0], t[1].double()]).nested(), LeafMismatchError, "nested: .*'x' .*\n.*32\n.*float64"),
    (lambda t: lazy_stack([t[0], tree(4, width=3)]).nested(), LeafMismatchError, r"'x' (.|\n)*\[4, 3\]\n.*strided"),
    (lambda t: t.dense(), LeafMismatchError, r"stack: the batch sizes differ.\n.*\[2\]\n.*\[4\]\n.*pad"),
    (lambda t: lazy_stack([t[0].set("q", 1.0), t[0]]).dense(), TreeStructureError, r"different keys.*\n.*'q'"),
    (lambda t: lazy_stack([t[0].set("q", 1.0), t[1]]).pad(), TreeStructureError, "pad of trees 0 and 1: the trees"),
    (lambda t: t.nested(torch.sparse_coo), ValueError, "layout must be one of torch.jagged"),
    (lambda t: t.permute(1, 0).nested(), ValueError, "are not stacked along dimension 0.*\n.*stack_dim 1"),
    (lambda t: tdf.pad_sequence([]), ValueError, "no trees were given"),
    (lambda t: tdf.pad_sequence([t[0], tree(4, width=3)]), LeafMismatchError, r"'x' .*\n.*\[\[2, 2\], \[4, 3\]\]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "pattern"), ROWS)
def test_messages(call, error, pattern):
    """A call that does not fit raises before anything is changed, and names the place."""
    with pytest.raises(error, match=pattern):
        call(lazy_stack(ragged()))
