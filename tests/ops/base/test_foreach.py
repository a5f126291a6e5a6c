"""Operands that meet, and kernels over all leaves: each leaf is as it would be alone."""

import operator

import pytest
import torch
from torch import Size, nn

from tdfunc import TensorDict


def test_trees_that_meet():
    """Leaves are paired by key, and batches broadcast at their own dimensions."""
    one = TensorDict({"a": torch.ones(3, 2), "b": torch.zeros(3)}, [3])
    other = TensorDict({"b": torch.full((3,), 5.0), "a": torch.full((3, 2), 7.0)}, [3])

    assert (one + other)["a"].unique().tolist() == [8]
    assert list((one + other).keys()) == ["a", "b"]
    scaled = TensorDict({"a": torch.ones(4, 2), "b": torch.ones(3)}) * TensorDict(
        {"a": torch.tensor(2.0), "b": torch.tensor(3.0)}
    )
    assert scaled["a"].shape == Size([4, 2])
    base = TensorDict({"a": torch.ones(2), "b": torch.tensor(1.0)})
    assert (base + one).batch_size == (one + base).batch_size == Size([3])
    assert (one + TensorDict({"a": torch.ones(3, 2), "b": torch.ones(3)}))["a"].unique().tolist() == [2]


@pytest.mark.parametrize(
    "fn",
    [torch.Tensor.clone, torch.neg, lambda t: t * 2, lambda t: t + t.detach(), lambda t: t.clamp(0, 1), torch.exp],
    ids=["clone", "neg", "number", "tree", "clamp", "exp"],
)
@pytest.mark.parametrize("keys", [["w", "buffer"], ["w", "buffer", "ids"], ["buffer"], ["w"]])
def test_each_leaf_requires_grad_as_alone(fn, keys):
    """A buffer next to a Parameter does not begin to require grad because one kernel runs over both."""
    leaves = {"w": nn.Parameter(torch.ones(2)), "buffer": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64)}

    tree = TensorDict({key: leaves[key] for key in keys}, [2])
    new = tree.clone() if fn is torch.Tensor.clone else fn(tree)
    assert {key: new[key].requires_grad for key in keys} == {key: fn(leaves[key]).requires_grad for key in keys}


def test_a_tree_of_gradients_keeps_one_kernel_call():
    """Parameters times leaves that do not require grad run in one kernel."""
    params = TensorDict({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2))})
    with torch.profiler.profile() as profile:
        params + params.detach()

    assert any("foreach" in event.name for event in profile.events())


def test_is_finite_records_nothing_and_leaves_integers_alone():
    """The subtraction behind it is not recorded by autograd, and not done to integers."""
    weight = nn.Parameter(torch.tensor([1.0, torch.inf, torch.nan]))
    done = TensorDict({"w": weight, "n": torch.tensor([1, 2, 3])}, [3]).isfinite()

    assert done["w"].tolist() == [True, False, False]
    assert not done["w"].requires_grad
    assert done["n"].tolist() == [True, True, True]
    assert TensorDict({"w": torch.ones(2).to(torch.float8_e5m2)}).isfinite()["w"].tolist() == [True, True]
    mapped = torch.vmap(lambda t: t.isfinite())(TensorDict({"w": weight.detach()}, [3]))
    assert mapped["w"].tolist() == [True, False, False]


@pytest.mark.parametrize("fn", [operator.truediv, torch.div, operator.pow, torch.pow, operator.mod, torch.remainder])
def test_a_number_on_the_left_rounds_as_for_a_leaf(fn):
    """Operators of torch and its functions round quotients differently, in trees as well."""
    x = torch.rand(100) + 0.5

    assert torch.equal(fn(2.5, TensorDict({"x": x}))["x"], fn(2.5, x))
