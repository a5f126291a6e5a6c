"""Groups of tied paths: the arithmetic on groups, and every operation on a tree that has them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from tdfunc import TensorDict, combine
from tdfunc.core.ties import merge
from tdfunc.ops.edits.edit import restore_ties

PATHS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=2).map(tuple)
GROUPS = st.lists(st.lists(PATHS, min_size=2, max_size=3, unique=True).map(tuple), max_size=4).map(tuple)


def reached_from(path, groups):
    """The paths to which groups lead from a path."""
    reached, todo = set(), {path}
    while todo:
        reached |= todo
        todo = set().union(*[set(group) for group in groups if set(group) & todo]) - reached
    return reached


@given(GROUPS, GROUPS)
def test_merge_is_the_finest_join(first, second):
    """Merged groups are the connected components of the given ones."""
    merged, given_groups = merge(first, second), [*first, *second]
    paths = [path for group in merged for path in group]

    assert len(paths) == len(set(paths))
    assert set(paths) == {path for group in given_groups for path in group}
    assert [group for group in given_groups if not any(set(group) <= set(joined) for joined in merged)] == []
    assert [set(group) for group in merged] == [reached_from(group[0], given_groups) for group in merged]
    assert merge(merged) == merged


def tied():
    """Two groups, one across sub-trees, one between a sub-tree and the root."""
    w, b = torch.randn(2, 3), torch.randn(3)
    tree = TensorDict({"emb": {"w": w}, "out": {"w": w, "b": b}, "x": b})
    return restore_ties(tree, ((("emb", "w"), ("out", "w")), (("out", "b"), ("x",))))


BOTH = [["emb.w", "out.w"], ["out.b", "x"]]


def assert_tied(tree, groups=BOTH):
    """Check that the groups are recorded and each is one tensor."""
    assert tree.ties() == groups
    for group in tree._ties:
        assert len({id(tree[path]) for path in group}) == 1


# The laws of copies, joins, shapes, rows and arithmetic compare ties as well.
OPERATIONS = {
    "set": lambda t: t.set(("out", "w"), torch.zeros(2, 3)),
    "set a number": lambda t: t.set("x", 1.0),
    "set a list": lambda t: t.set("x", [1.0, 2.0, 3.0]),
    "set the same sub-tree": lambda t: t.set("out", {"w": t["emb", "w"], "b": t["x"]}),
    "update": lambda t: t.update({"x": 2.0}),
    "update inside": lambda t: t.update({"out": {"b": torch.ones(3), "new": 1.0}}).delete(("out", "new")),
    "detach": lambda t: t.detach(),
    "to": lambda t: t.to(torch.float64),
    "add a tree": lambda t: t + t,
    "apply": lambda t: t.apply(lambda x: x * 2),
    "named_apply": lambda t: t.named_apply(lambda name, x: x * 2, nested_keys=True),
    "tree_map": lambda t: pytree.tree_map(lambda x: x + 1, t),
    "tree_map to None": lambda t: pytree.tree_map(lambda _: None, t),
    "vmap": lambda t: torch.vmap(lambda p: p + 1)(torch.stack([t, t])),
    "grad": lambda t: torch.func.grad(lambda p: p["emb", "w"].sum() + p["x"].sum())(t),
    "constructor": TensorDict,
    "constructor on a device": lambda t: TensorDict(t, device="meta"),
    "with_batch_size": lambda t: torch.stack([t, t]).with_batch_size([]),
    "flatten_keys": lambda t: t.flatten_keys(),
    "equality": lambda t: t == t,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_kept(name):
    """An operation keeps tied paths one tensor."""
    assert_tied(OPERATIONS[name](tied()))


@pytest.mark.parametrize(
    ("operation", "groups"),
    [
        (lambda t: t.delete("x"), [["emb.w", "out.w"]]),
        (lambda t: t.delete("out"), []),
        (lambda t: t.exclude(("out", "b")), [["emb.w", "out.w"]]),
        (lambda t: t.select("out", "emb"), [["emb.w", "out.w"]]),
        (lambda t: t.untie("x"), [["emb.w", "out.w"]]),
        (lambda t: t.rename_key("emb", "e"), [["e.w", "out.w"], ["out.b", "x"]]),
        (lambda t: t.rename_key(("out", "w"), ("y", "z")), [["emb.w", "y.z"], ["out.b", "x"]]),
        (lambda t: t.apply(lambda x: x if x.dim() == 2 else None), [["emb.w", "out.w"]]),
        (lambda t: t.partition("x")[0], [["out.b", "x"]]),
        (lambda t: t.partition("x")[1], [["emb.w", "out.w"]]),
        (lambda t: combine(*t.partition("x")), BOTH[::-1]),
        (lambda t: TensorDict({"box": t}), [["box.emb.w", "box.out.w"], ["box.out.b", "box.x"]]),
        (lambda t: TensorDict().set("box", t)["box"], BOTH),
        (lambda t: t["out"], []),
        (lambda t: t.update({"out": {"b": {"deeper": 1.0}}}), [["emb.w", "out.w"]]),
    ],
)
def test_changed(operation, groups):
    """An edit leaves a group the paths that still hold its tensor."""
    assert_tied(operation(tied()), groups)


def test_one_leaf():
    """A tied tensor is counted, mapped and summed once."""
    tree, calls = tied(), []
    tree.apply(lambda x: calls.append(x) or x)

    assert len(pytree.tree_leaves(tree)) == len(tree.leaves()) == len(calls) == 2
    assert tree.paths() == [("emb", "w"), ("out", "b")]
    grads = torch.func.grad(lambda p: (p["emb", "w"] + p["out", "w"]).sum())(tree)
    assert (grads["out", "w"] == 2).all()
    torch.testing.assert_close(tree.sum(reduce=True), tree["emb", "w"].sum() + tree["x"].sum())
    assert list(tree.state_dict()) == ["emb.w", "out.w", "out.b", "x"]
    three = restore_ties(tree.set(("out", "v"), tree["emb", "w"]), ((("emb", "w"), ("out", "w"), ("out", "v")),))
    assert (three * 2)["out"].ties() == three["out"].ties() == [["w", "v"]]
