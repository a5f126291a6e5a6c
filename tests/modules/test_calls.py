"""Calls of `apply`: modes, copies, names of arguments, precision, inference, and every refusal."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tdfunc import (
    from_module,
    functional,
)
from tests.models import ResNet, make_mlp

X = torch.linspace(-1, 1, 15).reshape(5, 3)


def flat(*trees):
    """Leaves by dotted path, as `torch.func.functional_call` takes them."""
    return {".".join(path): leaf for tree in trees for path, leaf in tree.items(True, True)}


# -- modes, copies, names -----------------------------------------------------------------------------------------


def test_modes_are_values():
    """`train` and `eval` would change the function that they are called on."""
    model = make_mlp(dropout=0.5).eval()
    apply, params, _ = functional(model)
    train, again = apply.train(), apply.train().eval()
    torch.manual_seed(0)
    dropped = train(params, X)
    torch.manual_seed(0)

    assert (apply.training, train.training, again.training, train.train(False).training) == (False, True, False, False)
    assert torch.equal(dropped, copy.deepcopy(model).train()(X))
    assert torch.equal(apply(params, X), model(X))
    assert torch.equal(again(params, X), model(X))
    assert not model.training


def test_mixed_modes_are_kept():
    """A frozen norm in a training model would be set to training."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).train()
    model[0].eval()
    apply, params, buffers = functional(model)
    _, new = apply.with_buffers(params, buffers, X)

    assert [int(new[i, "num_batches_tracked"]) for i in "01"] == [0, 1]


def test_copy_or_share():
    """Training the module would change the copied trees, or `copy=False` would copy."""
    model = make_mlp()
    _, copied, _ = functional(model)
    _, shared, _ = functional(model, copy=False)
    with torch.no_grad():
        model[0].weight.fill_(3.0)

    assert not (copied["0", "weight"] == 3.0).any()
    assert (shared["0", "weight"] == 3.0).all()
    assert shared["0", "weight"].data_ptr() == model[0].weight.data_ptr()
    assert not any(leaf.requires_grad or isinstance(leaf, nn.Parameter) for leaf in tree_leaves((copied, shared)))


def test_apply_is_a_value():
    """A function could not be sent to another process, or a copy of it would be another function."""
    model = ResNet()
    apply, params, buffers = functional(model.eval())
    x = torch.randn(2, 3, 6, 6)
    again = pickle.loads(pickle.dumps(apply))

    assert torch.equal(again(params, x, buffers=buffers), apply(params, x, buffers=buffers))
    assert copy.deepcopy(apply) is apply
    assert copy.copy(apply) is apply
    assert repr(apply) == f"Apply(ResNet, eval, {len(model.state_dict())} leaves)"
    assert isinstance(apply.module, ResNet)


def test_trees_of_any_precision():
    """Weights in half precision would be refused, though forward takes them."""
    apply, params, _ = functional(make_mlp())
    half = params.to(torch.bfloat16)

    assert apply(half, X.bfloat16()).dtype is torch.bfloat16
    assert apply(params.to(torch.float64), X.double()).dtype is torch.float64


def test_autocast():
    """A call under autocast would compute with cached casts of other weights."""
    model = make_mlp()
    apply, params, _ = functional(model)
    live = from_module(model)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = apply(live, X), model(X)
        other, oracle = apply(params * 2.0, X), torch.func.functional_call(model, flat(params * 2.0), (X,))

    assert out.dtype is torch.bfloat16
    assert torch.equal(out, expected)
    assert torch.equal(other, oracle)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("training", [False, True])
def test_inference(mode, training):
    """Inference tensors have no versions, and must not stay in a skeleton that trains later."""
    model = ResNet().train(training)
    apply, params, buffers = functional(model)
    x = torch.randn(2, 3, 6, 6)
    with mode():
        first = apply(params, x, buffers=buffers)
        inside = functional(model)
        second = inside[0](inside[1], x, buffers=inside[2])
    third = inside[0](inside[1], x, buffers=inside[2])
    grads = torch.func.grad(lambda p: apply(p, x, buffers=buffers).sum())(params)

    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert grads["head", "bias"].shape == (4,)


class Named(nn.Module):
    """A forward whose arguments are called as ours."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x, buffers=1.0, rng=0.0, *, params=0.0):
        return self.norm(x) * buffers + rng + params


def test_call_only_of_an_ordinary_forward():
    """`call_only=True` would take away `apply` where nothing is in its way."""
    apply, params, _ = functional(make_mlp(), call_only=True)

    assert torch.equal(apply(params, X), apply.call(params, (X,)))


def test_an_argument_called_params():
    """A keyword argument of forward would collide with our own positional one."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, *, params):
            return self.weight * params

    apply, tree, _ = functional(Odd())

    assert apply(tree, params=2.0).tolist() == [2.0, 2.0, 2.0]
    assert apply.with_buffers(tree, None, params=2.0)[0].tolist() == [2.0, 2.0, 2.0]


def test_modules_without_leaves():
    """An activation alone would have no tree, or no function."""
    apply, params, buffers = functional(nn.ReLU())

    assert list(params.keys()) == list(buffers.keys()) == []
    assert torch.equal(apply(params, X), X.relu())
    assert torch.equal(apply(params, X, buffers=buffers), X.relu())


def test_forward_may_call_apply():
    """A forward that runs another apply, or itself, would find its skeleton taken."""

    class Twice(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.weight = inner, nn.Parameter(torch.ones(2))

        def forward(self, x, deep=True):
            y = self.inner[0](self.inner[1], x) * self.weight
            return y + function(tree, x, False) if deep else y

    inner = functional(make_mlp())[:2]
    function, tree, _ = functional(Twice(inner))
    torch.testing.assert_close(function(tree, X), 2 * inner[0](inner[1], X))


# -- refusals -----------------------------------------------------------------------------------------------------


def test_other_errors_pass_as_they_are():
    """An error of the user's forward would be replaced."""
    apply, params, _ = functional(make_mlp())

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        apply(params, torch.zeros(2, 7))
