"""`functional` and `apply`: oracles, transforms, buffers, ties, extra state, modes, and every refusal."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tdfunc import (
    TensorDict,
    TieError,
    UnsupportedError,
    combine,
    from_module,
    functional,
    partition,
    stack,
)
from tests.helpers import assert_pure
from tests.models import CASES, Norm, ResNet, Shared, Tied, WithState, make_case, make_gpt2, make_llama, make_mlp

X = torch.linspace(-1, 1, 15).reshape(5, 3)


def flat(*trees):
    """Leaves by dotted path, as `torch.func.functional_call` takes them."""
    return {".".join(path): leaf for tree in trees for path, leaf in tree.items(True, True)}


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
    """A call with the module's own weights would give something else than the module."""
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
    """A call with other weights would give something else than torch's own way, or differentiate otherwise."""
    model, x = make_case(name)
    apply, params, buffers = functional(model.eval())
    params = params * 1.25
    named = {n: p for n, p in flat(params).items() if n in dict(model.named_parameters())}

    def oracle(named):
        return torch.func.functional_call(model, (named, flat(buffers)), (x,))

    assert torch.equal(apply(params, x, buffers=buffers), oracle(named))
    grads = torch.func.grad(lambda p: apply(p, x, buffers=buffers).square().sum())(params)
    assert_same_leaves(grads, torch.func.grad(lambda p: oracle(p).square().sum())(named))


@pytest.mark.parametrize("name", ["mlp", "resnet", "encoder", "tied", "shared", "gpt2", "llama"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_the_loop(name):
    """A member of a stacked tree would be run with another member's weights."""
    model, x = make_case(name)
    apply, params, buffers = functional(model.eval())
    members = [params, params * 0.5, params * 1.5]
    stacked = torch.stack(members)
    ours = torch.vmap(lambda p: apply(p, x, buffers=buffers))(stacked)

    torch.testing.assert_close(ours, torch.stack([apply(p, x, buffers=buffers) for p in members]))


@pytest.mark.parametrize("name", ["mlp", "resnet", "tied", "shared", "gpt2"])
def test_jvp_is_the_directional_derivative(name):
    """Forward-mode derivatives would be zero, as in the incumbent's default."""
    model, x = make_case(name)
    apply, params, buffers = functional(model.eval())
    tangent = params.apply(torch.ones_like)

    def loss(p):
        return apply(p, x, buffers=buffers).square().sum()

    jvp = torch.func.jvp(loss, (params,), (tangent,))[1]
    grads = torch.func.grad(loss)(params)
    torch.testing.assert_close(jvp, sum(g.sum() for g in tree_leaves(grads)), rtol=1e-4, atol=1e-4)


def test_higher_derivatives():
    """A Hessian, a jacfwd of a jacrev or a dual level would lose a level."""
    model = make_mlp()
    apply, params, _ = functional(model)

    def loss(p):
        return apply(p, X).square().sum()

    expected = torch.func.hessian(lambda p: torch.func.functional_call(model, p, (X,)).square().sum())(flat(params))
    ours = torch.func.hessian(loss)(params)
    torch.testing.assert_close(ours["0", "weight"]["3", "bias"], expected["0.weight"]["3.bias"])
    torch.testing.assert_close(
        torch.func.jacfwd(loss)(params)["3", "weight"], torch.func.grad(loss)(params)["3", "weight"]
    )
    with torch.autograd.forward_ad.dual_level():
        dual = params.apply(lambda p: torch.autograd.forward_ad.make_dual(p, torch.ones_like(p)))
        tangent = torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent
    torch.testing.assert_close(tangent, torch.func.jvp(loss, (params,), (params.apply(torch.ones_like),))[1])


def test_maml():
    """A gradient through an inner step would miss the second-order part."""
    apply, params, _ = functional(make_mlp())
    target = torch.ones(5, 2)

    def outer(p, call):
        grads = torch.func.grad(lambda p: (call(p) - target).square().mean())(p)
        return (call(tree_map(lambda w, g: w - 0.1 * g, p, grads)) - target).square().mean()

    ours = torch.func.grad(lambda p: outer(p, lambda p: apply(p, X)))(params)
    model = make_mlp()
    theirs = torch.func.grad(lambda p: outer(p, lambda p: torch.func.functional_call(model, p, (X,))))(flat(params))
    assert_same_leaves(ours, theirs)


def test_autograd_reaches_the_leaves():
    """Plain `.backward()` would not fill the leaves' gradients, or fill the module's."""
    model = make_mlp()
    apply, params, _ = functional(model)
    params = params.apply(lambda p: p.requires_grad_())
    apply(params, X).sum().backward()
    model(X).sum().backward()

    assert_same_leaves(params.apply(lambda p: p.grad), {n: p.grad for n, p in model.named_parameters()})


def test_per_sample_gradients():
    """Gradients of vmapped data under shared weights would be summed."""
    apply, params, _ = functional(make_mlp())
    per_sample = torch.vmap(torch.func.grad(lambda p, x: apply(p, x).square().sum()), (None, 0))(params, X)
    loop = torch.stack([torch.func.grad(lambda p, x=x: apply(p, x).square().sum())(params) for x in X])

    assert per_sample.batch_size == (5,)
    assert_same_leaves(per_sample, flat(loop))


# -- buffers ------------------------------------------------------------------------------------------------------


def train_once(model, x):
    """The output of a copy of the model in training mode, and its buffers afterwards by name."""
    model = copy.deepcopy(model).train()
    return model(x), dict(model.named_buffers())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_new_buffers_are_returned(momentum):
    """BatchNorm's statistics would be lost, or written into the given tree."""
    model = Norm(momentum)
    apply, params, buffers = functional(model)
    out, new = assert_pure(lambda p, b: apply.with_buffers(p, b, X), params, buffers)
    expected, statistics = train_once(model, X)

    assert torch.equal(out, expected)
    assert_same_leaves(new, statistics)
    assert type(new) is TensorDict
    assert list(new.keys(True, True)) == list(buffers.keys(True, True))


def test_buffers_inside_params_are_returned_there():
    """A tree that holds both would come back without its parameters."""
    apply, params, buffers = functional(ResNet())
    whole, x = combine(params, buffers), torch.randn(2, 3, 6, 6)
    out, new = apply.with_buffers(whole, None, x)
    _, expected = apply.with_buffers(params, buffers, x)

    assert out.shape == (2, 4)
    assert new["head", "weight"] is whole["head", "weight"]
    assert_same_leaves(new, flat(expected))


def test_buffers_split_between_the_trees():
    """A buffer given with the parameters and the rest in `buffers=` would be refused, or mixed up."""
    apply, params, buffers = functional(Norm())
    mean, rest = partition(buffers, "*running_mean")

    assert torch.equal(apply(combine(params, mean), X, buffers=rest), apply(params, X, buffers=buffers))


def test_batch_norm_under_vmap_is_the_loop():
    """Members would share their statistics, or write them into the stacked tree."""
    model = Norm()
    apply, params, buffers = functional(model)
    p, b = torch.stack([params, params * 2.0]), torch.stack([buffers, buffers])
    out, new = assert_pure(lambda p, b: torch.vmap(lambda p, b: apply.with_buffers(p, b, X))(p, b), p, b)
    loop = [apply.with_buffers(p[i], b[i], X) for i in range(2)]

    torch.testing.assert_close(out, torch.stack([y for y, _ in loop]))
    assert_same_leaves(new, flat(torch.stack([n for _, n in loop])))


def test_batch_norm_under_grad():
    """Statistics would be tensors of the inner level, or torch would refuse to mutate them."""
    model = Norm()
    apply, params, buffers = functional(model)

    def loss(p):
        out, new = apply.with_buffers(p, buffers, X)
        return out.square().sum(), new

    grads, new = torch.func.grad(loss, has_aux=True)(params)
    _, statistics = train_once(model, X)
    assert_same_leaves(new, statistics)
    assert grads["linear", "weight"].shape == (4, 3)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(new["norm", "running_mean"])


def test_vmap_of_grad_with_buffers_is_the_loop():
    """A training step of an ensemble with BatchNorm would not equal a loop of training steps."""
    apply, params, buffers = functional(ResNet())
    x = torch.randn(2, 3, 6, 6)
    p, b = torch.stack([params, params * 0.5]), torch.stack([buffers, buffers])

    def step(p, b):
        def loss(p):
            out, new = apply.with_buffers(p, b, x)
            return out.square().mean(), new

        return torch.func.grad(loss, has_aux=True)(p)

    grads, new = torch.vmap(step)(p, b)
    loop = [step(p[i], b[i]) for i in range(2)]
    assert_same_leaves(grads, flat(torch.stack([g for g, _ in loop])), rtol=1e-3, atol=1e-4)
    assert_same_leaves(new, flat(torch.stack([n for _, n in loop])))


class Rotary(nn.Module):
    """Registers a new tensor under a buffer's name in forward, as dynamic rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(3), persistent=False)

    def forward(self, x):
        self.register_buffer("scale", self.scale * 2, persistent=False)
        return x * self.weight * self.scale


def test_registered_again_in_forward():
    """The clone would be returned, not what forward registered in its place."""
    apply, params, buffers = functional(Rotary())
    for _ in range(2):
        out, new = apply.with_buffers(params, buffers, torch.ones(3))

        assert out.tolist() == [2.0, 2.0, 2.0]
        assert new["scale"].tolist() == [2.0, 2.0, 2.0]
        assert buffers["scale"].tolist() == [1.0, 1.0, 1.0]


class Sly(nn.Module):
    """Writes to the statistics of a norm that is in evaluation mode, when told to."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x, write=False):
        if write:
            self.norm.running_mean.add_(1.0)
        return self.norm(x)


def test_writes_in_evaluation_mode_at_each_call():
    """Statistics that are not cloned in evaluation mode would be written into the tree."""
    apply, params, buffers = functional(Sly().eval())
    for _ in range(3):
        assert_pure(lambda p, b: apply(p, X, True, buffers=b), params, buffers)


# -- extra state --------------------------------------------------------------------------------------------------


def test_extra_state_is_what_the_tree_holds():
    """A loaded extra state would be ignored: forward would use that of the time of `functional`."""
    model = WithState()
    apply, params, buffers = functional(model)
    other = WithState()
    other.state = {"scale": 3.0}
    loaded = functional(other)[2]

    torch.testing.assert_close(apply(params, X, buffers=loaded), 3.0 * apply(params, X, buffers=buffers))
    torch.testing.assert_close(apply(params, X), apply(params, X, buffers=buffers))


def test_extra_state_comes_back_new():
    """A state that forward changes would be lost, or changed in the tree or in the module."""
    model = WithState()
    apply, params, buffers = functional(model)
    _, new = apply.with_buffers(params, buffers, X)
    _, newer = apply.with_buffers(params, new, X)

    assert (new["_extra_state"], newer["_extra_state"]) == ({"scale": 2.0}, {"scale": 3.0})
    assert buffers["_extra_state"] == model.state == {"scale": 1.0}


def test_copies_have_their_own_extra_state():
    """Training the module would change the extra state of the copied tree."""
    model = WithState()
    _, _, buffers = functional(model)
    model(X)

    assert buffers["_extra_state"] == {"scale": 1.0}


# -- ties ---------------------------------------------------------------------------------------------------------

TIED = [(Tied, torch.arange(5)), (Shared, X)]


def is_tied(tree):
    """Whether each group of paths still holds one tensor, and is one leaf."""
    groups = tree._ties
    return bool(groups) and all(len({id(tree[path]) for path in group}) == 1 for group in groups)


@pytest.mark.parametrize(("make", "x"), TIED)
@pytest.mark.parametrize(
    "change",
    [
        lambda t: tree_map(lambda w: w * 1.5, t),
        lambda t: t.apply(lambda w: w * 1.5),
        lambda t: t * 1.5,
        lambda t: t.clone(),
        lambda t: torch.stack([t, t])[1],
        lambda t: stack([t, t * 2.0], 0)[1],
        lambda t: torch.vmap(lambda t: t * 1.0)(torch.stack([t, t]))[0],
        lambda t: t.set(t._ties[0][1], torch.ones_like(t[t._ties[0][0]])),
        lambda t: pickle.loads(pickle.dumps(t)),
        lambda t: copy.deepcopy(t),
        lambda t: t.to(torch.float64).to(torch.float32),
    ],
)
def test_ties_survive(make, x, change):
    """After an operation the two names of one weight would be two leaves: twice the memory, half the gradient."""
    model = make()
    apply, params, _ = functional(model)
    changed = change(params)

    assert is_tied(changed)
    assert len(tree_leaves(changed)) == len(list(model.parameters()))
    named = {n: p for n, p in flat(changed).items() if n in dict(model.named_parameters())}
    torch.testing.assert_close(apply(changed, x), torch.func.functional_call(model, named, (x,)))


@pytest.mark.parametrize(("make", "x"), TIED)
def test_gradients_of_ties_are_sums(make, x):
    """A tied weight would get the gradient of one of its uses."""
    model = make()
    apply, params, _ = functional(model)
    model(x).square().sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    grads = torch.func.grad(lambda p: apply(p, x).square().sum())(params)

    assert_same_leaves(grads, expected)
    assert is_tied(grads)
    stacked = torch.vmap(torch.func.grad(lambda p: apply(p, x).square().sum()))(torch.stack([params, params]))
    assert is_tied(stacked)
    assert_same_leaves(stacked[1], expected)


def test_copies_of_a_tied_weight():
    """Two equal copies would be accepted although a gradient is split, or refused although they are one value."""
    apply, params, _ = functional(Tied())
    weight = params["emb", "weight"]
    ids = torch.arange(5)

    def tree(first, second):
        return TensorDict({"emb": {"weight": first}, "out": {"weight": second}})

    expected = apply(params, ids)
    assert torch.equal(apply(tree(weight, weight), ids), expected)
    assert torch.equal(apply(tree(weight, weight.clone()), ids), expected)
    with pytest.raises(
        TieError, match=r"apply: 'emb.weight' and 'out.weight' are one tensor[\s\S]*two tensors that differ"
    ):
        apply(tree(weight, weight + 1), ids)
    with pytest.raises(TieError, match="whose gradients would be split"):
        apply(tree(weight.clone().requires_grad_(), weight.clone().requires_grad_()), ids)
    with pytest.raises(TieError):
        torch.func.grad(lambda t: apply(t, ids).sum())(tree(weight, weight.clone()))


def test_one_name_of_a_tied_weight_is_enough():
    """A checkpoint that stores a tied weight once would be refused."""
    apply, params, _ = functional(Tied())
    part = params.untie(("out", "weight")).delete(("out", "weight"))

    assert torch.equal(apply(part, torch.arange(5)), apply(params, torch.arange(5)))


@pytest.mark.parametrize("make", [make_gpt2, make_llama])
def test_language_models(make):
    """A model of transformers would keep weights alive, or count its tied embedding twice."""
    model = make()
    apply, params, buffers = functional(model)
    ids = torch.arange(6).reshape(1, 6)
    out = apply(params, input_ids=ids, labels=ids, buffers=buffers)
    expected = model(input_ids=ids, labels=ids)

    assert type(out) is type(expected)
    assert torch.equal(out.logits, expected.logits)
    assert torch.equal(out.loss, expected.loss)
    assert len(tree_leaves(params)) == len(list(model.parameters()))
    assert list(from_module(model).state_dict()) == list(model.state_dict())


# -- laws ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.lists(st.integers(1, 4), min_size=2, max_size=4), st.booleans(), st.data())
def test_law_apply_equals_a_loaded_module(rows, widths, norm, data):
    """Running a tree and loading it into the module would give different numbers."""
    layers = [[nn.Linear(a, b), *([nn.LayerNorm(b)] if norm else [])] for a, b in zip(widths, widths[1:], strict=False)]
    model = nn.Sequential(*[layer for block in layers for layer in block])
    apply, params, _ = functional(model)
    scale = data.draw(st.floats(-2, 2))
    tree = params * scale
    x = torch.linspace(-1, 1, rows * widths[0]).reshape(rows, widths[0])
    ours = apply(tree, x)
    other = copy.deepcopy(model)
    tree.to_module(other)

    assert torch.equal(ours, other(x))


@given(st.permutations(["0", "3"]), st.permutations(["weight", "bias"]))
def test_law_key_order_does_not_matter(nodes, leaves):
    """A tree built in another order would give its leaves to the wrong slots."""
    apply, params, _ = functional(MLP)
    shuffled = TensorDict({node: {leaf: params[node, leaf] for leaf in leaves} for node in nodes})

    assert torch.equal(apply(shuffled, X), apply(params, X))


MLP = make_mlp()


class _Forgets(nn.Module):
    """Takes one of its buffers away while it runs."""

    def __init__(self, deletes):
        super().__init__()
        self.fc, self.deletes = nn.Linear(2, 2), deletes
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        y = self.fc(x) * self.scale
        if self.deletes:
            del self.scale, self.fc.bias
        else:
            self.scale = None
        return y


@pytest.mark.parametrize("deletes", [False, True])
def test_a_buffer_that_forward_takes_away_is_named(deletes):
    """The new buffers would hold None, or a bare KeyError would name no module; the output alone is right each time."""
    module, x = _Forgets(deletes), torch.ones(2)
    apply, params, buffers = functional(module)
    expected = module.fc(x)

    for _ in range(2):
        with pytest.raises(UnsupportedError, match="forward of _Forgets left no tensor in the buffer 'scale'"):
            apply.with_buffers(params, buffers, x)
        assert torch.equal(apply(params, x, buffers=buffers), expected)
