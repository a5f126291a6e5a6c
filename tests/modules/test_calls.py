"""Calls of `apply`: modes, copies, names of arguments, precision, inference, and every refusal."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tdfunc import (
    LeafMismatchError,
    TreeStructureError,
    UnsupportedError,
    combine,
    from_module,
    functional,
)
from tests.models import Norm, ResNet, make_mlp

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


def test_reserved_names():
    """`buffers=` and `rng=` would reach us or forward by chance."""
    with pytest.raises(UnsupportedError, match=r"Named has an argument called 'buffers'[\s\S]*call_only=True"):
        functional(Named())
    model = Named()
    apply, params, buffers = functional(model, call_only=True)
    expected = copy.deepcopy(model)(X, buffers=2.0, rng=1.0, params=3.0)
    kwargs = {"buffers": 2.0, "rng": 1.0, "params": 3.0}

    assert torch.equal(apply.call(params, (X,), kwargs, buffers=buffers), expected)
    with pytest.raises(UnsupportedError, match=r"Named has an argument called 'buffers' and 'rng'[\s\S]*apply.call\("):
        apply(params, X, buffers=buffers)
    with pytest.raises(UnsupportedError, match=r"called 'rng'"):
        apply.with_buffers(params, buffers, X)


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


@pytest.mark.parametrize(
    ("edit", "error", "text"),
    [
        (
            lambda p: p.set(("0", "weight"), torch.zeros(7, 5)),
            LeafMismatchError,
            r"leaf '0.weight' does not fit the module[\s\S]*shape \(4, 3\)[\s\S]*shape \(7, 5\)[\s\S]*architecture",
        ),
        (
            lambda p: torch.stack([p, p]),
            LeafMismatchError,
            r"'0.weight'[\s\S]*shape \(4, 3\)[\s\S]*shape \(2, 4, 3\)[\s\S]*tdfunc.Ensemble\(apply\)",
        ),
        (
            lambda p: tree_map(lambda _: 1, p),
            LeafMismatchError,
            r"'0.weight'[\s\S]*shape \(4, 3\)[\s\S]*int",
        ),
        (
            lambda p: p.delete(("0", "bias")),
            TreeStructureError,
            r"do not fit Sequential: '0.bias' is missing[\s\S]*3 of 4 leaves",
        ),
        (
            lambda p: p.set(("0", "nope"), torch.zeros(1)),
            TreeStructureError,
            r"'0.nope' is not one of its leaves[\s\S]*4 leaves of Sequential[\s\S]*unknown leaves \['0.nope'\]",
        ),
        (lambda p: p["0"], TreeStructureError, r"'0.weight' is missing[\s\S]*unknown leaves \['weight', 'bias'\]"),
        (lambda p: dict(p.items()), TypeError, r"must be trees[\s\S]*got:\s+dict[\s\S]*TensorDict\(d\) makes a tree"),
        (lambda p: p["0", "bias"], TypeError, r"must be trees[\s\S]*got:\s+Tensor[\s\S]*buffers=buffers"),
    ],
)
def test_trees_that_do_not_fit(edit, error, text):
    """A wrong tree would be run in part with the module's own weights, in silence."""
    apply, params, _ = functional(make_mlp())

    with pytest.raises(error, match=text):
        apply(edit(params), X)
    assert apply(params, X).shape == (5, 2)


def test_buffers_must_be_a_tree():
    """An input passed as `buffers=` would fail far away."""
    apply, params, _ = functional(Norm())

    with pytest.raises(TypeError, match=r"must be trees[\s\S]*got:\s+Tensor"):
        apply(params, X, buffers=X)


def test_one_leaf_in_both_trees():
    """Of two values for one leaf one would win in silence."""
    apply, params, buffers = functional(Norm())

    with pytest.raises(TreeStructureError, match=r"'linear.weight' is in params and in buffers[\s\S]*split\(tree\)"):
        apply(params, X, buffers=combine(params.clone(), buffers))


def test_cached_parametrizations_are_refused():
    """The weight computed from other parameters would be used, as by `functional_call`."""
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    apply, params, _ = functional(model)

    with (
        nn.utils.parametrize.cached(),
        pytest.raises(UnsupportedError, match=r"parametrize.cached\(\)[\s\S]*leave the"),
    ):
        apply(params, X)
    assert torch.equal(apply(params, X), model(X))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_under_vmap_say_what_to_do(kind):
    """Torch's message would name an operation and no way out."""
    apply, params, _ = functional(kind(3, 4))
    assert apply(params, X[None])[0].shape == (1, 5, 4)

    with pytest.raises(RuntimeError, match=r"Batching rule not implemented for aten::\w+[\s\S]*how=\"loop\""):
        torch.vmap(lambda p: apply(p, X[None])[0])(torch.stack([params, params]))


def test_fused_attention_in_forward_mode_says_what_to_do():
    """Torch's message would not name the option of the model."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            q = self.linear(x)[None, None]
            return nn.functional.scaled_dot_product_attention(q, q, q)

    apply, params, _ = functional(Attention())
    x = torch.randn(5, 4)

    with pytest.raises(NotImplementedError, match=r'no forward-mode derivative[\s\S]*attn_implementation="eager"'):
        torch.func.jvp(lambda p: apply(p, x), (params,), (params.apply(torch.ones_like),))


def test_other_errors_pass_as_they_are():
    """An error of the user's forward would be replaced."""
    apply, params, _ = functional(make_mlp())

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        apply(params, torch.zeros(2, 7))
