"""Recurrent layers and cells of stacked members, against a loop over torch's own modules."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_flatten, tree_leaves

import tdfunc as tdf
from tdfunc import random
from tdfunc.modules.batching.recurrent import fold

MEMBERS = 3
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN, "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)}
FORMS = {
    "one layer": {},
    "layers": {"num_layers": 2},
    "both directions": {"num_layers": 2, "bidirectional": True},
    "without bias": {"bias": False, "num_layers": 2},
    "batch first": {"batch_first": True, "bidirectional": True},
    "projection": {"proj_size": 2, "num_layers": 2, "bidirectional": True},
    "projection without bias": {"proj_size": 2, "bias": False},
}
CASES = [(kind, form) for kind, form in itertools.product(KINDS, FORMS) if kind == "lstm" or "proj" not in form]


def make(kind, form="one layer", dtype=torch.float64, **options):
    """Members with weights of their own."""
    return [KINDS[kind](3, 4, dtype=dtype, **FORMS[form], **options) for _ in range(MEMBERS)]


def stacked(models):
    """The function of one member, and the stacked weights."""
    apply, _, _ = tdf.functional(models[0])
    return apply, tdf.split(tdf.stack_modules(models))[0]


def state_of(model, rows, *lead, dtype=torch.float64):
    """A first state for a layer."""
    groups = model.num_layers * (1 + model.bidirectional)
    h = torch.randn(*lead, groups, *rows, model.proj_size or 4, dtype=dtype)
    return (h, torch.randn(*lead, groups, *rows, 4, dtype=dtype)) if isinstance(model, nn.LSTM) else h


def total(out):
    """A number that all outputs change, each its own way."""
    tensors = [leaf for leaf in tree_leaves(out) if leaf.is_floating_point()]
    return sum(
        [(leaf * torch.arange(leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape).sin()).sum() for leaf in tensors]
    )


def loop(models, *args):
    """What each module returns, stacked leaf by leaf."""
    outs = [tree_flatten(model(*args)) for model in models]
    return [torch.stack(leaves) for leaves in zip(*[leaves for leaves, _ in outs], strict=True)]


def loop_grads(models, *args):
    """The gradient of each module's `total`, stacked."""
    grads = [torch.autograd.grad(total(model(*args)), list(model.parameters())) for model in models]
    return [torch.stack(leaves) for leaves in zip(*grads, strict=True)]


def leaves_of(tree):
    """The leaves of a tree in the order of a module's parameters."""
    return [tree[path] for path in tree.keys(include_nested=True, leaves_only=True)]


def grads_of(apply, params, *args):
    """The gradient of each member's `total`."""
    return leaves_of(torch.vmap(torch.func.grad(lambda p: total(apply(p, *args))))(params))


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_outputs(kind, form):
    """All outputs equal a loop over the modules, with a first state that members share."""
    models = make(kind, form)
    apply, params = stacked(models)
    x = torch.randn(5, 5, 3, dtype=torch.float64)
    state = state_of(models[0], [5])

    got = tdf.Ensemble(apply, "vmap")(params, x, state)
    torch.testing.assert_close(tree_leaves(got), loop(models, x, state), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_gradients(kind, form):
    """Gradients of all weights equal backward()."""
    models = make(kind, form)
    apply, params = stacked(models)
    x = torch.randn(5, 5, 3, dtype=torch.float64)
    state = state_of(models[0], [5])

    got = grads_of(apply, params, x, state)
    torch.testing.assert_close(got, loop_grads(models, x, state), rtol=1e-10, atol=1e-10)


def make_packed(lengths=(2, 5, 1, 5)):
    """Sequences in an order that packing changes."""
    return pack_sequence([torch.randn(n, 3, dtype=torch.float64) for n in lengths], enforce_sorted=False)


@pytest.mark.parametrize(("kind", "form"), [case for case in CASES if case[1] != "batch first"])
def test_packed_sequences(kind, form):
    """Sequences of several lengths, packed."""
    models = make(kind, form)
    apply, params = stacked(models)
    packed = make_packed()
    state = state_of(models[0], [4])

    got = torch.vmap(lambda p: _data(apply(p, packed, state)))(params)
    outs = [_data(model(packed, state)) for model in models]
    want = [torch.stack(leaves) for leaves in zip(*map(tree_leaves, outs), strict=True)]
    torch.testing.assert_close(tree_leaves(got), want, rtol=1e-10, atol=1e-10)


def _data(result):
    """The tensors of a result that depend on the weights."""
    return result[0].data, result[1]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_packed_sequences(kind):
    """Gradients through sequences of several lengths, in both directions."""
    models = make(kind, "both directions")
    apply, params = stacked(models)
    packed = make_packed()
    grads = torch.vmap(torch.func.grad(lambda p: total(_data(apply(p, packed)))))(params)

    want = [torch.autograd.grad(total(_data(model(packed))), list(model.parameters())) for model in models]
    want = [torch.stack(leaves) for leaves in zip(*want, strict=True)]
    got = leaves_of(grads)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_without_a_batch(kind):
    """Inputs (T, I) and states (L, H)."""
    models = make(kind, "layers")
    apply, params = stacked(models)
    x = torch.randn(5, 3, dtype=torch.float64)
    state = state_of(models[0], [])

    got = tdf.Ensemble(apply, "vmap")(params, x, state)
    torch.testing.assert_close(tree_leaves(got), loop(models, x, state), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_inputs_differ(kind, dtype):
    """Members share the weights, and have their own inputs and states."""
    (model, *_) = make(kind, dtype=dtype)
    apply, params, _ = tdf.functional(model)
    x = torch.randn(MEMBERS, 5, 2, 3, dtype=dtype)
    state = state_of(model, [2], MEMBERS, dtype=dtype)

    got = torch.vmap(lambda x, s: apply(params, x, s))(x, state)
    members = range(MEMBERS)
    states = [tuple([t[i] for t in state]) if isinstance(state, tuple) else state[i] for i in members]
    want = [torch.stack(y) for y in zip(*[tree_leaves(model(x[i], states[i])) for i in members], strict=True)]
    torch.testing.assert_close(tree_leaves(got), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_members_of_members(kind, dtype):
    """A vmap in a vmap: the weights differ along one, the inputs along the other, or along both."""
    models = make(kind, "both directions", dtype=dtype)
    apply, params = stacked(models)
    x = torch.randn(2, 5, 2, 3, dtype=dtype)

    grad = torch.func.grad(lambda p, x: total(apply(p, x)))
    got = torch.vmap(torch.vmap(grad, (None, 0)), (0, None))(params, x)
    got = leaves_of(got)
    want = [torch.stack(pair, 1) for pair in zip(*[loop_grads(models, each) for each in x], strict=True)]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_of_members_of_members(kind, dtype):
    """A vmap in a vmap, also around a gradient of something else, without a gradient of the layer."""
    models = make(kind, "both directions", dtype=dtype)
    apply, params = stacked(models)
    x = torch.randn(2, 5, 2, 3, dtype=dtype)

    def scaled(p, x, scale):
        return torch.func.grad(lambda scale: (scale * apply(p, x)[0]).sum())(scale)

    scale = torch.ones(5, 2, 8, dtype=dtype)
    inner = torch.vmap(scaled, (None, 0, None))
    got = torch.vmap(inner, (0, None, None), out_dims=1)(params, x, scale)
    torch.testing.assert_close(got, torch.stack([torch.stack([model(each)[0] for model in models]) for each in x]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_inputs_and_states(kind, dtype):
    """Gradients flow to what members share: an input, and the first state."""
    models = make(kind, "both directions", dtype=dtype)
    apply, params = stacked(models)
    x = torch.randn(5, 2, 3, dtype=dtype, requires_grad=True)
    h = torch.randn(4, 2, 4, dtype=dtype, requires_grad=True)
    state = (h, h.flip(0)) if kind == "lstm" else h

    got = torch.autograd.grad(total(tdf.Ensemble(apply, "vmap")(params, x, state)[0]), [x, h])
    want = torch.autograd.grad(total(torch.stack([model(x, state)[0] for model in models])), [x, h])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_second_derivatives(kind, dtype):
    """The derivative of a gradient in a direction, against finite differences of backward()."""
    models = make(kind, "both directions", dtype=dtype)
    apply, params = stacked(models)
    x = torch.randn(4, 2, 3, dtype=dtype)
    along = params.apply(torch.randn_like)

    def slope(p, v):
        grads = torch.func.grad(lambda p: total(apply(p, x)).square())(p)
        return sum([(g * v).sum() for g, v in zip(leaves_of(grads), leaves_of(v), strict=True)])

    got = torch.vmap(torch.func.grad(slope))(params, along)
    exact = [model.double() for model in models]
    moved = [_grads_near(model, along[i], x.double()) for i, model in enumerate(exact)]
    want = [torch.stack(leaves) for leaves in zip(*moved, strict=True)]
    got = [leaf.double() for leaf in leaves_of(got)]
    loose = {"rtol": 1e-3, "atol": 1e-2} if dtype == torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, want, **loose)


def _grads_near(model, along, x, step=1e-5):
    """The change of a module's gradient along a direction, by a central difference."""
    found = []
    start = [p.detach().clone() for p in model.parameters()]
    for sign in (1, -1):
        with torch.no_grad():
            for p, at, v in zip(model.parameters(), start, leaves_of(along), strict=True):
                p.copy_(at + sign * step * v)
        found.append(torch.autograd.grad(total(model(x)).square(), list(model.parameters())))
    return [(a - b) / (2 * step) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_mode(kind, dtype):
    """A product of the Jacobian with a direction equals the one by two derivatives in reverse mode."""
    models = make(kind, dtype=dtype)
    apply, params = stacked(models)
    x = torch.randn(4, 2, 3, dtype=dtype)
    v = torch.randn_like(x)

    _, got = torch.func.jvp(lambda x: torch.vmap(lambda p: apply(p, x)[0])(params), (x,), (v,))
    want = torch.stack([torch.autograd.functional.jvp(lambda x, model=model: model(x)[0], x, v)[1] for model in models])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_jacobians_in_both_modes(kind, dtype):
    """Many gradients of one forward, as `jacrev` asks for them, equal forward mode."""
    models = make(kind, dtype=dtype)
    apply, params = stacked(models)
    x = torch.randn(3, 2, 3, dtype=dtype)

    def last(p, x):
        return apply(p, x)[0][-1]

    got = torch.vmap(torch.func.jacrev(last, argnums=1), (0, None))(params, x)
    torch.testing.assert_close(got, torch.vmap(torch.func.jacfwd(last, argnums=1), (0, None))(params, x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_jit(kind, dtype):
    """A recorded gradient is the eager one, also for other numbers than it was recorded with."""
    models = make(kind, "both directions", dtype=dtype)
    apply, params = stacked(models)

    def run(params, x):
        return torch.vmap(torch.func.grad(lambda p: total(apply(p, x))))(params)

    recorded = tdf.jit(run)
    recorded(params, torch.randn(5, 2, 3, dtype=dtype))
    x = torch.randn(5, 2, 3, dtype=dtype)
    assert tdf.tree_equal(recorded(params, x), run(params, x))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_require_grad(kind):
    """`backward` of the leaves of the stack itself, without torch.func."""
    models = make(kind, "both directions", dtype=torch.float32)
    apply, params = stacked(models)
    params = params.apply(lambda p: p.detach().requires_grad_())
    x = torch.randn(5, 2, 3)
    leaves = leaves_of(params)

    out = tdf.Ensemble(apply, "vmap")(params, x)
    got = torch.autograd.grad(sum([total([leaf[i] for leaf in tree_leaves(out)]) for i in range(MEMBERS)]), leaves)
    torch.testing.assert_close(list(got), loop_grads(models, x))


def test_outputs_of_lstms_equal_their_modules_to_the_last_bit():
    """The LSTM kernel of torch runs each member, so that its numbers do not depend on the others."""
    models = make("lstm", "both directions", dtype=torch.float32)
    apply, params = stacked(models)
    x = torch.randn(5, 2, 3)

    found = tree_leaves(tdf.Ensemble(apply, "vmap")(params, x))

    # Without AVX-512, torch has other kernels for weights that require grad.
    with torch.no_grad():
        want = loop(models, x)
    assert [torch.equal(a, b) for a, b in zip(found, want, strict=True)] == [True] * len(want)


def test_gradients_of_lstms_equal_their_modules_to_the_last_bit():
    """The backward kernel runs each member as well."""
    models = make("lstm", "both directions", dtype=torch.float32)
    apply, params = stacked(models)
    x = torch.randn(5, 2, 3)

    found = grads_of(apply, params, x)

    want = loop_grads(models, x)
    assert [torch.equal(a, b) for a, b in zip(found, want, strict=True)] == [True] * len(want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_a_member_do_not_depend_on_the_others(kind, dtype):
    """Outputs and gradients of two members are the same to the last bit among many."""
    models = [KINDS[kind](3, 16, dtype=dtype) for _ in range(9)]
    apply, params = stacked(models)
    x = torch.randn(6, 8, 3, dtype=dtype)

    def run(params):
        return torch.vmap(torch.func.grad_and_value(lambda p: total(apply(p, x))))(params)

    (few, few_out), (many, many_out) = run(params[:2]), run(params)
    assert torch.equal(few_out, many_out[:2])
    assert tdf.tree_equal(few, many[:2])


@pytest.mark.parametrize("kind", KINDS)
def test_members_run_in_blocks(kind, monkeypatch):
    """More members than one block of a kernel holds: outputs, gradients, and rows of a Jacobian."""
    models = make(kind)
    apply, params = stacked(models)
    x = torch.randn(5, 2, 3, dtype=torch.float64)

    def run():
        rows = torch.vmap(torch.func.jacrev(lambda x, p: apply(p, x)[0][-1]), (None, 0))(x, params)
        return [*tree_leaves(tdf.Ensemble(apply, "vmap")(params, x)), *grads_of(apply, params, x), rows]

    want = run()
    monkeypatch.setattr(fold, "_BLOCK_BYTES", 1)
    torch.testing.assert_close(run(), want, rtol=1e-10, atol=1e-10)


def test_an_lstm_without_onednn():
    """Where oneDNN is turned off, the product of all members runs in float32."""
    models = make("lstm", "both directions", dtype=torch.float32)
    apply, params = stacked(models)
    x = torch.randn(5, 2, 3)
    enabled = torch.backends.mkldnn.enabled
    torch._C._set_mkldnn_enabled(False)
    try:
        found = grads_of(apply, params, x)
    finally:
        torch._C._set_mkldnn_enabled(enabled)

    torch.testing.assert_close(found, loop_grads(models, x))


@pytest.mark.parametrize("kind", KINDS)
def test_two_derivatives_of_the_leaves(kind):
    """A gradient of a gradient by `torch.autograd`, without torch.func, equals that of the modules in float64."""
    models = make(kind, dtype=torch.float32)
    apply, params = stacked(models)
    params = params.apply(lambda p: p.detach().requires_grad_())
    x = torch.randn(5, 2, 3)

    def twice(out, leaves):
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum([grad.square().sum() for grad in grads]), leaves)

    got = [leaf.double() for leaf in twice(tdf.Ensemble(apply, "vmap")(params, x)[0], leaves_of(params))]
    exact = [model.double() for model in models]
    wanted = [twice(model(x.double())[0], list(model.parameters())) for model in exact]
    torch.testing.assert_close(got, [torch.stack(leaves) for leaves in zip(*wanted, strict=True)], rtol=1e-4, atol=1e-4)


class Checkpointed(nn.Module):
    """An LSTM whose forward runs again for the gradient."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(3, 4, 2, dropout=0.5)

    def forward(self, x):
        return tdf.checkpoint(lambda x: self.layer(x)[0])(x)


def test_activation_checkpointing():
    """The second run of a checkpoint, which comes after forward, has the rules of the first, and its masks."""
    models = [Checkpointed() for _ in range(MEMBERS)]
    apply, params = stacked(models)
    plain, _ = stacked([model.layer for model in models])
    x = torch.randn(5, 2, 3)
    keys = random.split(random.key(0), MEMBERS)

    got = torch.vmap(torch.func.grad(lambda p, key: total(apply(p, x, rng=key))))(params, keys)
    want = torch.vmap(torch.func.grad(lambda p, key: total(plain(p, x, rng=key)[0])))(params["layer"], keys)
    assert tdf.tree_equal(got["layer"], want)


# -- dropout between layers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["layers", "both directions", "without bias"])
def test_dropout_by_keys(kind, form):
    """Member i draws from `fold_in(key, i)`: the same masks as alone."""
    models = make(kind, form, dropout=0.5)
    apply, params = stacked(models)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    key = random.key(7)

    got = tdf.Ensemble(apply, "vmap")(params, x, rng=key)
    alone = [apply(params[i], x, rng=random.fold_in(key, i)) for i in range(MEMBERS)]
    want = [torch.stack(leaves) for leaves in zip(*map(tree_leaves, alone), strict=True)]
    torch.testing.assert_close(tree_leaves(got), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_of_packed_sequences_by_keys(kind):
    """The masks of packed sequences also come from the key."""
    models = make(kind, "both directions", dropout=0.5)
    apply, params = stacked(models)
    packed = make_packed()
    keys = random.split(random.key(7), MEMBERS)

    got = torch.vmap(lambda p, key: _data(apply(p, packed, rng=key)))(params, keys)
    alone = [_data(apply(params[i], packed, rng=keys[i])) for i in range(MEMBERS)]
    want = [torch.stack(leaves) for leaves in zip(*map(tree_leaves, alone), strict=True)]
    torch.testing.assert_close(tree_leaves(got), want, rtol=1e-10, atol=1e-10)


def test_only_the_keys_differ():
    """One model and one input, with masks of each member."""
    (model, *_) = make("lstm", "layers", dropout=0.5)
    apply, params, _ = tdf.functional(model)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    keys = random.split(random.key(7), MEMBERS)

    got = torch.vmap(lambda key: apply(params, x, rng=key)[0])(keys)
    torch.testing.assert_close(got, torch.stack([apply(params, x, rng=key)[0] for key in keys]))


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_units_are_scaled(kind):
    """With a second layer that adds what it gets, a mask keeps half of the units, at twice their value."""
    model = KINDS[kind](3, 4, num_layers=2, dropout=0.5)
    apply, params, _ = tdf.functional(model)
    ones = torch.ones(400, 1, 3)
    outs = torch.stack([apply(params, ones, rng=seed)[0] for seed in range(2)])

    assert not torch.equal(*outs)
    assert torch.equal(outs[0], apply(params, ones, rng=0)[0])


def test_masks_under_a_key_are_the_ones_of_dropout():
    """Two layers in one module, under a key, are two modules with `nn.Dropout` between."""
    model = nn.LSTM(3, 4, 2, dropout=0.5)
    first, second = nn.LSTM(3, 4), nn.LSTM(4, 4)
    weights = model.state_dict()
    first.load_state_dict({name: weights[name] for name in weights if name.endswith("l0")})
    second.load_state_dict({name.replace("l1", "l0"): weights[name] for name in weights if name.endswith("l1")})

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.drop = first, second, nn.Dropout(0.5)

        def forward(self, x):
            return self.second(self.drop(self.first(x)[0]))[0]

    x = torch.randn(5, 2, 3)
    whole, parts = [tdf.functional(module)[:2] for module in (model, Parts())]
    assert torch.equal(whole[0](whole[1], x, rng=0)[0], parts[0](parts[1], x, rng=0))


# -- cells ----------------------------------------------------------------------------------------------------------

CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn": nn.RNNCell,
    "relu": lambda *a, **k: nn.RNNCell(*a, nonlinearity="relu", **k),
}


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3,), (5, 3)])
def test_cells(kind, bias, shape):
    """A step of each kind and its gradients, with and without bias and batch."""
    models = [CELLS[kind](3, 4, bias=bias, dtype=torch.float64) for _ in range(MEMBERS)]
    apply, params = stacked(models)
    x = torch.randn(*shape, dtype=torch.float64)
    h = torch.randn(*shape[:-1], 4, dtype=torch.float64)
    state = (h, h.flip(-1)) if kind == "lstm" else h

    found = [*tree_leaves(tdf.Ensemble(apply, "vmap")(params, x, state)), *grads_of(apply, params, x, state)]
    want = [*loop(models, x, state), *loop_grads(models, x, state)]
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)


# -- calls that are torch's own -------------------------------------------------------------------------------------


def test_a_layer_that_members_share_is_called_once():
    """Where nothing differs by member, torch's function runs, with the bits of the module."""
    model = nn.LSTM(3, 4)
    apply, params, _ = tdf.functional(model)
    x = torch.randn(5, 2, 3)
    got = torch.vmap(lambda y: apply(params, x)[0].sum() + y)(torch.zeros(2))

    assert torch.equal(got, model(x)[0].sum().expand(2))


def test_errors_are_torchs():
    """An input of a wrong size is reported as by the module."""
    apply, params = stacked(make("gru"))

    with pytest.raises(RuntimeError, match="must be equal to input_size"):
        tdf.Ensemble(apply, "vmap")(params, torch.randn(5, 2, 7, dtype=torch.float64))


def test_packed_sequences_are_returned():
    """A packed sequence goes in, and a packed sequence comes out."""
    apply, params, _ = tdf.functional(make("gru")[0])
    packed = make_packed()

    assert isinstance(apply(params, packed)[0], PackedSequence)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_compiled_function_of_one_member(kind):
    """Dynamo leaves recurrent layers to Python, and runs the code around them in parts."""
    model = KINDS[kind](3, 4)
    apply, params, _ = tdf.functional(model)
    x = torch.randn(5, 2, 3)
    compiled = torch.compile(lambda params, x: apply(params, x)[0], backend="eager")
    torch.testing.assert_close(compiled(params, x), model(x)[0])
