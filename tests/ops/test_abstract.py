"""`eval_shape`: the shapes of a result without the work."""

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

import tdfunc as tdf
from tdfunc import eval_shape
from tests.helpers import assert_pure
from tests.strategies import trees


def specs(value):
    """Shapes, dtypes and structure."""
    leaves, spec = tree_flatten(value)
    return spec, [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def double(tree):
    """A result with a tree and a number."""
    return {"all": torch.stack([tree, tree]), "n": 3}


@given(trees())
def test_the_shapes_of_the_result(tree):
    """Structure, shapes, dtypes and batch sizes are those of the function's own result; leaves have no memory."""
    spec, out = assert_pure(lambda tree: eval_shape(double, tree), tree), double(tree)

    assert specs(spec) == specs(out)
    assert spec["all"].batch_size == out["all"].batch_size
    assert all(leaf.device.type == "meta" for leaf in tree_leaves(spec["all"]))


def test_a_module_and_its_training_step():
    """A step of a model that was never allocated; specs go in as arguments."""
    make = lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))  # noqa: E731
    params, buffers = eval_shape(lambda: tdf.split(tdf.from_module(make())))
    apply, real, statistics = tdf.functional(make())

    def step(params, x, buffers):
        return tdf.value_and_grad(lambda p: apply(p, x, buffers=buffers).square().mean())(params)

    x = torch.randn(5, 6)
    value, grads = eval_shape(step, params, x, buffers=buffers)
    assert specs((value, grads)) == specs(step(real, x, buffers=statistics))
    assert [grads.kind(path) for path in grads.paths()] == [real.kind(path) for path in real.paths()]


def test_nothing_runs_twice_or_is_drawn():
    """Captured tensors count by their shape, and the generator stays; an argument keeps its class, and leaves meta."""
    state, w = torch.get_rng_state(), torch.randn(3, 2)
    torch.set_rng_state(state)

    spec = eval_shape(lambda x: torch.rand(4, 3) @ w + x, torch.ones(2, dtype=torch.float64))
    assert spec.shape == (4, 2)
    assert spec.dtype == torch.float64
    assert spec.requires_grad is False
    assert torch.equal(torch.get_rng_state(), state)
    w, m = nn.Parameter(w), torch.ones(2, device="meta")
    assert eval_shape(lambda w, m: (isinstance(w, nn.Parameter), m.device.type), w, m) == (True, "cpu")


def test_a_file_is_compared_with_it(tmp_path):
    """`load(like=)` takes the result, and names what a file has otherwise."""
    path = tmp_path / "a.safetensors"
    tdf.save(tdf.from_module(nn.Linear(3, 2)), path)

    tdf.load(path, like=eval_shape(lambda: tdf.from_module(nn.Linear(3, 2))))
    with pytest.raises(tdf.LeafMismatchError, match="weight"):
        tdf.load(path, like=eval_shape(lambda: tdf.from_module(nn.Linear(4, 2))))
