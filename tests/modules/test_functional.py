"""`functional` and `apply`: oracles, transforms, buffers, extra state, ties, modes and copies."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tdfunc import (
    Ensemble,
    TensorDict,
    TieError,
    UnsupportedError,
    combine,
    from_module,
    functional,
    jit,
    partition,
    stack_modules,
)
from tests.helpers import assert_pure
from tests.models import CASES, Norm, ResNet, Shared, Tied, WithState, flat, make_case, make_mlp


class LateLayer(nn.Module):
    """A forward that builds its layer on the first call."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.late = None

    def forward(self, x):
        if self.late is None:
            self.late = nn.Linear(x.shape[-1], 2)
        return self.late(self.first(x))


class LateWeight(nn.Module):
    """A forward that fills a parameter on the first call."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
        self.register_parameter("weight", None)

    def forward(self, x):
        if self.weight is None:
            self.weight = nn.Parameter(torch.ones(x.shape[-1]))
        return x * self.weight + self.bias


class LateTable(nn.Module):
    """A forward that computes a constant on the first call."""

    def __init__(self):
        super().__init__()
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = nn.Parameter(torch.arange(3.0), requires_grad=False)
        return x * self.table


X = torch.linspace(-1, 1, 15).reshape(5, 3)
MLP = make_mlp()


def assert_same_leaves(tree, named, **tolerance):
    """Check a tree against leaves by dotted path."""
    ours = flat(tree)
    assert ours.keys() >= named.keys()
    for name, value in named.items():
        torch.testing.assert_close(ours[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


# -- oracles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_apply_is_the_module(name, training):
    """A call with the module's own weights gives what the module gives, in one tree or two, and writes to none."""
    model, x = make_case(name)
    model.train(training)
    apply, params, buffers = functional(model)
    torch.manual_seed(0)
    ours = assert_pure(lambda p, b: apply(p, x, buffers=b), params, buffers)
    torch.manual_seed(0)
    expected = copy.deepcopy(model)(x)
    torch.manual_seed(0)

    # Without a gradient attention takes a fused path, with other roundings.
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(apply(combine(params, buffers), x), ours)


@pytest.mark.parametrize("name", CASES)
def test_apply_is_functional_call(name):
    """A call with other weights gives the values and derivatives that torch's own way gives."""
    model, x = make_case(name)
    apply, params, buffers = functional(model.eval())
    params = params * 1.25
    named = {n: p for n, p in flat(params).items() if n in dict(model.named_parameters())}

    def oracle(named):
        return torch.func.functional_call(model, (named, flat(buffers)), (x,))

    def loss(p):
        return apply(p, x, buffers=buffers).square().sum()

    assert torch.equal(apply(params, x, buffers=buffers), oracle(named))
    grads = torch.func.grad(loss)(params)
    assert_same_leaves(grads, torch.func.grad(lambda p: oracle(p).square().sum())(named))
    if name not in ("encoder", "llama"):  # fused attention has no forward mode
        jvp = torch.func.jvp(loss, (params,), (params.apply(torch.ones_like),))[1]
        torch.testing.assert_close(jvp, sum(g.sum() for g in tree_leaves(grads)), rtol=1e-4, atol=1e-3)


def test_higher_derivatives():
    """Hessians, jacfwd, dual levels and gradients through an inner step are right."""
    apply, params, _ = functional(MLP)

    def loss(call):
        return lambda p: call(p).square().sum()

    def oracle(p):
        return torch.func.functional_call(MLP, p, (X,))

    def outer(call):
        grads = torch.func.grad(loss(call))
        return lambda p: loss(call)(tree_map(lambda w, g: w - 0.1 * g, p, grads(p)))

    ours, tangent = loss(lambda p: apply(p, X)), params.apply(torch.ones_like)
    expected = torch.func.hessian(loss(oracle))(flat(params))
    torch.testing.assert_close(
        torch.func.hessian(ours)(params)["0", "weight"]["3", "bias"], expected["0.weight"]["3.bias"]
    )
    assert_same_leaves(torch.func.jacfwd(ours)(params), flat(torch.func.grad(ours)(params)))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.unpack_dual(
            ours(params.apply(lambda p: torch.autograd.forward_ad.make_dual(p, torch.ones_like(p))))
        )
    torch.testing.assert_close(dual.tangent, torch.func.jvp(ours, (params,), (tangent,))[1])
    assert_same_leaves(
        torch.func.grad(outer(lambda p: apply(p, X)))(params), torch.func.grad(outer(oracle))(flat(params))
    )


# -- buffers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None])
def test_new_buffers_are_returned(momentum):
    """`with_buffers` returns BatchNorm's new statistics in the tree that held the old ones, which it does not write."""
    model = Norm(momentum)
    apply, params, buffers = functional(model)
    out, new = assert_pure(lambda p, b: apply.with_buffers(p, b, X), params, buffers)
    inside = apply.with_buffers(combine(params, buffers), None, X)[1]
    expected = model(X)

    assert torch.equal(out, expected)
    assert_same_leaves(new, dict(model.named_buffers()))
    assert_same_leaves(inside, dict(model.named_buffers()))
    assert inside["linear", "weight"] is params["linear", "weight"]
    assert list(new.keys(True, True)) == list(buffers.keys(True, True))


def test_buffers_split_between_the_trees():
    """A buffer may come with the parameters and the rest in `buffers=`; the rest comes back."""
    apply, params, buffers = functional(Norm())
    mean, rest = partition(buffers, "*running_mean")
    out, new = apply.with_buffers(combine(params, mean), rest, X)
    expected, statistics = apply.with_buffers(params, buffers, X)

    assert torch.equal(out, expected)
    assert_same_leaves(statistics, flat(new))
    assert list(new.keys(True, True)) == list(rest.keys(True, True))


def test_training_steps_with_buffers_under_vmap_are_the_loop():
    """A step of an ensemble with BatchNorm, under vmap and grad, equals a loop of steps."""
    apply, params, buffers = functional(ResNet())
    x = torch.randn(2, 3, 6, 6)
    p, b = torch.stack([params, params * 0.5]), torch.stack([buffers, buffers])

    def step(p, b):
        def loss(p):
            out, new = apply.with_buffers(p, b, x)
            return out.square().mean(), new

        return torch.func.grad(loss, has_aux=True)(p)

    grads, new = assert_pure(lambda p, b: torch.vmap(step)(p, b), p, b)
    loop = [step(p[i], b[i]) for i in range(2)]
    assert_same_leaves(grads, flat(torch.stack([g for g, _ in loop])), rtol=1e-3, atol=1e-4)
    assert_same_leaves(new, flat(torch.stack([n for _, n in loop])))
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(leaf) for leaf in tree_leaves(loop))


# -- extra state --------------------------------------------------------------------------------------------------


def test_extra_state_comes_from_the_tree():
    """Forward runs under the tree's extra state, a copy of the module's; the module's later changes do not matter."""
    model, other = WithState(), WithState()
    other.state = {"scale": 3.0}
    apply, params, buffers = functional(model)
    out = apply(params, X)
    model(X)

    torch.testing.assert_close(apply(params, X, buffers=functional(other)[2]), 3.0 * out)
    torch.testing.assert_close(apply(params, X), out)
    torch.testing.assert_close(apply(params.set("note", "text"), X, buffers=buffers), out)


def test_changes_of_extra_state_are_returned():
    """Each call returns the extra state after it, and leaves the tree's as it was."""
    apply, params, buffers = functional(WithState())
    _, new = apply.with_buffers(params, buffers, X)
    _, newer = apply.with_buffers(params, new, X)

    states = [tree["_extra_state"] for tree in (buffers, new, newer)]
    assert states == [{"scale": 1.0}, {"scale": 2.0}, {"scale": 3.0}]


def test_an_ensemble_of_modules_with_extra_state_runs():
    """Members with extra state are called together."""
    tree = stack_modules([WithState(), WithState()])

    assert Ensemble(functional(WithState())[0])(tree, X).shape == (2, 5, 2)


# -- ties ---------------------------------------------------------------------------------------------------------

TIED = [(Tied, torch.arange(5)), (Shared, X)]


def is_tied(tree):
    """Return whether each group of paths still holds one tensor."""
    groups = tree._ties
    return bool(groups) and all(len({id(tree[path]) for path in group}) == 1 for group in groups)


@pytest.mark.parametrize(("make", "x"), TIED)
@pytest.mark.parametrize(
    "change",
    [
        lambda t: tree_map(lambda w: w * 1.5, t),
        lambda t: torch.stack([t, t])[1],
        lambda t: torch.vmap(lambda t: t * 1.0)(torch.stack([t, t]))[0],
        lambda t: t.set(t._ties[0][1], torch.ones_like(t[t._ties[0][0]])),
        lambda t: pickle.loads(pickle.dumps(t)),
        lambda t: copy.deepcopy(t).to(torch.float64).to(torch.float32),
    ],
)
def test_ties_survive(make, x, change):
    """After an operation the two names of one weight are one leaf, and `apply` runs with it."""
    model = make()
    apply, params, _ = functional(model)
    changed = change(params)

    assert is_tied(changed)
    assert len(tree_leaves(changed)) == len(list(model.parameters()))
    named = {n: p for n, p in flat(changed).items() if n in dict(model.named_parameters())}
    torch.testing.assert_close(apply(changed, x), torch.func.functional_call(model, named, (x,)))


def tied_tree(first, second):
    """A tree of the module `Tied` with a tensor for each of its two names."""
    return TensorDict({"emb": {"weight": first}, "out": {"weight": second}})


@pytest.fixture
def tied_call():
    """A function of one argument, the tree, and the weight of the module."""
    apply, params, _ = functional(Tied())
    return lambda tree: apply(tree, torch.arange(5)), params["emb", "weight"]


@pytest.mark.parametrize("copied", [lambda w: w, torch.clone], ids=["itself", "copy"])
def test_copies_of_a_tied_weight(copied):
    """The weight under both names, and an equal copy of it, are accepted."""
    apply, params, _ = functional(Tied())
    weight, ids = params["emb", "weight"], torch.arange(5)

    assert torch.equal(apply(tied_tree(weight, copied(weight)), ids), apply(params, ids))


def test_views_of_a_tied_weight_inside_a_transform(tied_call):
    """A detached view is accepted inside a transform of something else."""
    call, weight = tied_call
    views = tied_tree(weight, weight.detach())

    found = torch.func.grad(lambda x: call(views).sum() * x)(torch.ones(()))
    torch.testing.assert_close(found, call(tied_tree(weight, weight)).sum())


@pytest.mark.parametrize("change", [lambda w: w + 1, torch.Tensor.double], ids=["values", "dtype"])
def test_other_tensors_than_the_tied_weight_are_refused(tied_call, change):
    """Two tensors that differ are no copies."""
    call, weight = tied_call

    with pytest.raises(TieError, match="tensors that differ"):
        call(tied_tree(weight, change(weight)))


def test_copies_that_split_a_gradient_are_refused(tied_call):
    """Copies whose gradients would be split are refused, by autograd and inside a transform."""
    call, weight = tied_call

    with pytest.raises(TieError, match="whose gradients would be split"):
        call(tied_tree(weight.clone().requires_grad_(), weight.clone().requires_grad_()))
    with pytest.raises(TieError):
        torch.func.grad(lambda t: call(t).sum())(tied_tree(weight, weight.clone()))


@pytest.mark.parametrize("place", range(4))
def test_one_of_four_tied_leaves_that_differs(place):
    """It is refused, wherever it is among the paths of the weight."""
    model = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(4)])
    for part in model[1:]:
        part.weight = model[0].weight
    apply, params, _ = functional(model)
    leaves = [params["0", "weight"]] * 4
    leaves[place] = leaves[place] + 1

    with pytest.raises(TieError, match="tensors that differ"):
        apply(TensorDict({str(i): {"weight": leaf} for i, leaf in enumerate(leaves)}), torch.ones(2, 3))
    rows = from_module(model).apply(lambda leaf: leaf.detach().clone()).expand(2)
    with pytest.raises(TieError, match="given different rows"):
        rows.at[0].set(TensorDict({str(i): {"weight": leaf} for i, leaf in enumerate(leaves)}))


# -- modes, copies, names -----------------------------------------------------------------------------------------


def test_modes_are_values():
    """`train` and `eval` return another function; `functional` keeps the mode of each submodule."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).train()
    model[0].eval()
    apply, params, buffers = functional(model)
    train, again = apply.train(), apply.train().eval()

    def count(function):
        new = function.with_buffers(params, buffers, X)[1]
        return [int(new[i, "num_batches_tracked"]) for i in "01"]

    assert [count(function) for function in (apply, train, again)] == [[0, 1], [1, 1], [0, 0]]
    assert train.training is True
    assert again.training is False
    assert train.train(False).training is False
    assert model[0].training is False
    assert model[1].training is True


def test_copy_or_share():
    """The trees are copies that training the module does not change, or share its storage; both are detached."""
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
    """A function can be pickled, and its copies are itself."""
    model = ResNet()
    apply, params, buffers = functional(model.eval())
    x = torch.randn(2, 3, 6, 6)
    again = pickle.loads(pickle.dumps(apply))

    assert torch.equal(again(params, x, buffers=buffers), apply(params, x, buffers=buffers))
    assert copy.deepcopy(apply) is apply
    assert repr(apply) == f"Apply(ResNet, eval, {len(model.state_dict())} leaves)"
    assert isinstance(apply.module, ResNet)


def test_precision():
    """Weights of any dtype run, and autocast uses the weights of the call."""
    apply, params, _ = functional(MLP)
    assert apply(params.to(torch.bfloat16), X.bfloat16()).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = apply(from_module(MLP), X), MLP(X)
        other, oracle = apply(params * 2.0, X), torch.func.functional_call(MLP, flat(params * 2.0), (X,))

    assert out.dtype is torch.bfloat16
    assert torch.equal(out, expected)
    assert torch.equal(other, oracle)


@pytest.mark.parametrize("training", [False, True])
def test_inference(training):
    """Inference tensors run, inside and outside of inference mode, and none stays in a skeleton that trains later."""
    model = ResNet().train(training)
    model.constant = torch.ones(2)
    apply, params, buffers = functional(model)
    x = torch.randn(2, 3, 6, 6)
    with torch.inference_mode():
        first = apply(params, x, buffers=buffers)
        inside = functional(model)
        second = inside[0](inside[1], x, buffers=inside[2])
    third = inside[0](inside[1], x, buffers=inside[2])
    grads = torch.func.grad(lambda p: apply(p, x, buffers=buffers).sum())(params)

    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert grads["head", "bias"].shape == (4,)


class Named(nn.Module):
    """A forward whose arguments are called as those of `apply`."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x, buffers=1.0, rng=0.0, *, params=0.0):
        return self.norm(x) * buffers + rng + params


def test_any_names_of_arguments():
    """`apply.call` takes forward's arguments whatever they are called."""
    model = Named()
    apply, params, buffers = functional(model, call_only=True)
    kwargs = {"buffers": 2.0, "rng": 1.0, "params": 3.0}
    plain, tree, _ = functional(MLP, call_only=True)

    assert torch.equal(apply.call(params, (X,), kwargs, buffers=buffers), copy.deepcopy(model)(X, **kwargs))
    assert torch.equal(plain(tree, X), plain.call(tree, (X,)))


def test_forward_may_call_apply():
    """A forward may run another apply, or its own."""

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


def run_alone(model):
    """Call a model as a function."""
    apply, params, _ = functional(model)
    return apply(params, X)


def run_members(model):
    """Call a stack of two models of one class."""
    apply, _, _ = functional(model)
    return Ensemble(apply)(stack_modules([model, type(model)()]), X)


def run_in_a_trace(model):
    """Call a model in a recording of jit."""
    apply, params, _ = functional(model)
    return jit(apply)(params, X)


@pytest.mark.parametrize("run", [run_alone, run_members, run_in_a_trace])
@pytest.mark.parametrize(("make", "name"), [(LateLayer, "late.weight"), (LateWeight, "weight")])
def test_a_parameter_that_forward_makes_is_refused(make, name, run):
    """A layer that forward builds would be another one in each call, and never be trained."""
    with pytest.raises(UnsupportedError, match=f"made the parameter '{name}'"):
        run(make())


def test_a_layer_that_an_example_built_is_a_leaf():
    """After a call on an example input the trees hold the layer."""
    model = LateLayer()
    expected = model(X)
    assert torch.equal(run_alone(model), expected)


def test_a_constant_that_forward_makes_is_not_refused():
    """A frozen parameter that forward computes is a cache."""
    assert torch.equal(run_alone(LateTable()), X * torch.arange(3.0))


def test_hooks_of_parameters_are_named():
    """A hook belongs to the module's own tensor: `functional` warns once, and the gradient is without it."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[1].weight.register_hook(lambda grad: grad * 0.0)
    with pytest.warns(UserWarning, match=r"hooks of the parameters \['1\.weight'\] are not applied") as caught:
        apply, params, _ = functional(model)
    apply(params, torch.ones(3))

    assert [one.filename for one in caught] == [__file__]
