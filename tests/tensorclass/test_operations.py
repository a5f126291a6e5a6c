"""Every operation of a tree gives a typed tree of the same class, with the values that it gives for an open tree."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tdfunc as tdf
from tdfunc import LazyStack, LeafMismatchError, TensorClass, TensorDict
from tests.helpers import assert_pure, assert_trees_equal
from tests.ops.batch.test_shape import CASES
from tests.tensorclass.classes import Inner


class Foo(TensorClass):
    x: Tensor
    inner: Inner
    absent: Any = None


X, Y = torch.arange(12.0).reshape(2, 3, 2), torch.arange(6).reshape(2, 3)
MASK, ROWS = torch.tensor([True, False]), torch.tensor([1, 0])


def ours():
    """A batch of 2 by 3, with a nested instance and an empty field."""
    return Foo(X, Inner(Y, batch_size=[2, 3]), batch_size=[2, 3])


# Those of the batch, and edits and arithmetic.
OPERATIONS = {name: case[0] for name, case in CASES.items()} | {
    "view": lambda t: t.view(3, 2),
    "torch.split": lambda t: torch.split(t, 1)[1],
    "detach": lambda t: t.detach(),
    "to": lambda t: t.to(torch.float64),
    "replace": lambda t: t.replace(x=X + 1),
    "apply": lambda t: t.apply(lambda leaf: leaf * 2),
    "named_apply": lambda t: t.named_apply(lambda name, leaf: leaf * len(name)),
    "subtract trees": lambda t: t - t,
    "eq": lambda t: t == t,
    "abs": lambda t: t.abs(),
    "select": lambda t: t.select("x"),
    "exclude": lambda t: t.exclude("x"),
    "at int": lambda t: t.at[0].set(t[1]),
    "at mask": lambda t: t.at[MASK].mul(0),
    "at rows": lambda t: t.at[ROWS].add(t[ROWS]),
    "at path": lambda t: t.at["inner", "y"].apply(lambda leaf: leaf + 1),
    "set": lambda t: t.set("x", X + 1),
    "set nested": lambda t: t.set(("inner", "y"), Y + 1),
    "update": lambda t: t.update({"inner": {"y": Y + 1}}),
    "pop": lambda t: t.pop("x")[1],
    "torch.where": lambda t: torch.where(torch.ones(2, 3).bool(), t, 0),
    "with_batch_size": lambda t: t.with_batch_size([2]),
    "with_names": lambda t: t.with_names(["a", "b"]),
    "rename": lambda t: t.rename_key("x", "absent"),
    "apply drops": lambda t: t.apply(lambda leaf: leaf if leaf.is_floating_point() else None),
    "mean feature": lambda t: t.to(torch.float32).sum(dim="feature"),
    "tree on the right": lambda t: 2 - t,
    "torch.add": lambda t: torch.add(t, t),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_keeps_the_class(operation):
    """An operation gives the class that it was given, here and in fields, and what it gives for open trees."""
    out = assert_pure(operation, ours())

    assert type(out) is Foo
    assert out.inner is None or type(out.inner) is Inner
    assert_trees_equal(TensorDict(out), operation(TensorDict(ours())))


# -- shadow -----------------------------------------------------------------------------------------------------

PUBLIC = [
    name
    for name in dir(TensorClass)
    if not name.startswith("_") and hasattr(TensorClass, name) and name not in ("batch_size", "device", "names")
]


@pytest.fixture(scope="module")
def shadowed():
    """An instance whose fields have the names of all methods; each holds the place of its name in `PUBLIC`."""
    namespace = {"__annotations__": dict.fromkeys(PUBLIC, Tensor), "__module__": __name__}
    cls = type(TensorClass)("Shadowed", (TensorClass["shadow"],), namespace)
    return cls(*(torch.full((2, 3), float(i)) for i in range(len(PUBLIC))), batch_size=[2, 3])


def test_shadowed_names(shadowed):
    """A field may have the name of any method: it is read, shown and replaced by its name."""
    assert shadowed.reshape.sum() == 6 * PUBLIC.index("reshape")
    assert shadowed.__replace__(set=torch.zeros(2, 3)).set.sum() == 0
    assert "is_shared=Tensor(shape=torch.Size([2, 3])" in repr(shadowed)
    rows = TensorDict({"m": shadowed}, [2, 3]).tolist(convert_tensors=True)
    assert rows[1][2]["m"]["get"] == PUBLIC.index("get")


def test_stacks_of_shadowed_names(shadowed):
    """A stack of instances, and its rows, reach the methods in another way."""
    stacked = torch.stack([shadowed, shadowed])[0]

    assert type(stacked) is type(shadowed)
    assert torch.equal(stacked.keys, shadowed.keys)


def test_arithmetic_of_shadowed_names(shadowed):
    """Operators and torch's pointwise functions reach the methods in another way."""
    x = shadowed.get

    assert (shadowed * 2 + shadowed).sum.sum() == 18 * PUBLIC.index("sum")
    assert torch.addcmul(shadowed, shadowed, shadowed).get.sum() == torch.addcmul(x, x, x).sum()
    assert torch.addcdiv(shadowed, shadowed, shadowed + 1).get.sum() == torch.addcdiv(x, x, x + 1).sum()


def test_shapes_of_shadowed_names(shadowed):
    """Torch's functions of shapes and of dimensions reach the methods in another way."""
    assert torch.reshape(shadowed, (6,)).replace.shape == (6,)
    assert torch.quantile(shadowed, 0.5, 1).get.shape == (2,)


def test_transforms_of_shadowed_names(shadowed):
    """`vmap` and torch's pytrees reach the methods in another way."""
    assert torch.vmap(lambda t: t + 1)(shadowed).is_shared.shape == (2, 3)
    assert torch.utils._pytree.tree_map(lambda x: x + 1, shadowed).get.sum() == 6 * (PUBLIC.index("get") + 1)


def test_shadowed_names_of_lazy_stacks():
    """Fields may have the names of a lazy stack's methods."""
    names = ("dense", "nested", "pad", "stack_dim", "trees")
    namespace = {"__annotations__": dict.fromkeys(names, Tensor), "__module__": __name__}
    cls = type(TensorClass)("LazyShadowed", (TensorClass["shadow"],), namespace)
    made = cls(*(torch.full((2,), float(i)) for i in range(5)), batch_size=[2])
    inner = tdf.lazy_stack([made, made])
    outer = tdf.lazy_stack([inner, inner + 1])

    assert torch.equal(torch.stack(inner.pad), torch.full((2, 2), 2.0))
    assert LazyStack.dense(outer).trees.shape == (2, 2, 2)
    assert LazyStack.pad(outer).stack_dim.shape == (2, 2, 2)
    grid = torch.stack([made, made])
    assert LazyStack.dense(tdf.lazy_stack([grid, grid]) + LazyStack.dense(outer)).nested.tolist() == [
        [[2.0] * 2] * 2,
        [[3.0] * 2] * 2,
    ]


class Sample(TensorClass):
    data: Tensor
    nested: Tensor | None = None
    kind: str = "a"
    leaves: Tensor | None = None
    paths: list | None = None
    summary: str = ""


def test_common_names_of_fields():
    """Fields may have some names of methods without `shadow`, and the methods stay in reach."""
    made = Sample(X, kind="b", batch_size=[2, 3])

    assert made.data is X
    assert made[0].kind == "b"
    assert TensorClass.paths(made) == [("data",)]
    assert torch.equal(torch.stack([made, made]).flatten(0, 2).data, torch.cat([X.flatten(0, 1)] * 2))
    assert torch.equal((made * 2).detach().data, X * 2)


def test_common_names_of_fields_in_lazy_stacks():
    """A lazy stack has fields with some names of its methods, which stay in reach."""
    stack = tdf.lazy_stack([Sample(x, x, batch_size=[len(x)]) for x in (torch.ones(2), torch.zeros(3))])

    assert stack.kind == ["a", "a"]
    assert [len(part) for part in stack.nested] == [2, 3]
    assert LazyStack.nested(stack)["nested"].is_nested
    assert stack.pad().nested.tolist() == [[1, 1, 0], [0, 0, 0]]


# -- several instances ------------------------------------------------------------------------------------------


class Other(TensorClass):
    x: Tensor
    inner: Inner
    absent: Any = None


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_unequal_classes(join):
    """Instances of two classes do not join."""
    other = Other(X, Inner(Y, batch_size=[2, 3]), batch_size=[2, 3])

    with pytest.raises(ValueError, match=r"different classes.\n.*expected: Foo\n.*got: +Other"):
        join([ours(), other])
    with pytest.raises(ValueError, match=r"different classes under 'n'.\n.*expected: Inner\n.*got: +TensorDict"):
        join([TensorDict({"n": n}, [2, 3]) for n in (other.inner, other.inner.to_tensordict())])
    with pytest.raises(ValueError, match=r"different keys.*\n.*'inner', 'x'\]\n.*'x'\]"):
        join([ours(), ours().delete("inner")])
    with pytest.raises(LeafMismatchError, match=r"leaf 'inner.y'|'inner.y' differs"):
        join([ours(), ours().set(("inner", "y"), Y.float())])


def test_fields_with_the_name_of_a_write():
    """Names of tensordict's writes are free for fields, are not listed, and raise where there is no such field."""
    cls = type(TensorClass)("Door", (TensorClass,), {"__annotations__": {"lock_": Tensor}, "__module__": __name__})
    door = cls(torch.ones(2))

    assert door.lock_.sum() == 2
    assert {"lock_", "zero_"} & set(dir(door)) == {"lock_"}
    assert [hasattr(tree, "lock_") for tree in (door, TensorDict({}))] == [True, False]
