"""Sequences that forward packs and pads: stacked members, and one member inside of transforms, against modules."""

import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

import tdfunc as tdf
from tests.modules.batching.cases import MEMBERS, total

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
LAYERS = {
    "gru": lambda first: nn.GRU(3, 4, batch_first=first, bidirectional=True, dtype=torch.float64),
    "lstm": lambda first: nn.LSTM(3, 4, 2, batch_first=first, dtype=torch.float64),
    "rnn": lambda first: nn.RNN(3, 4, batch_first=first, dtype=torch.float64),
}
CASES = [("gru", True), ("gru", False), ("lstm", True), ("rnn", False)]


class Tagger(nn.Module):
    """An embedding whose output is packed, and padded after a recurrent layer."""

    def __init__(self, kind, first):
        super().__init__()
        self.embedding = nn.Embedding(9, 3, dtype=torch.float64)
        self.layer = LAYERS[kind](first)
        self.first = first

    def forward(self, ids, lengths, ordered=False):
        rows = self.embedding(ids if self.first else ids.T)
        packed = pack_padded_sequence(rows, lengths, self.first, enforce_sorted=ordered)
        return pad_packed_sequence(self.layer(packed)[0], self.first, padding_value=0.5, total_length=7)[0]


def make(kind="gru", first=True):
    """Members, their function, and their stacked weights."""
    models = [Tagger(kind, first) for _ in range(MEMBERS)]
    return models, tdf.functional(models[0])[0], tdf.stack_modules(models).detach()


def batch():
    """Words, and lengths in an order that packing changes."""
    return torch.randint(9, (4, 6)), torch.tensor([3, 6, 1, 6])


def gradients_of(model, *args):
    """The gradients of a module's parameters."""
    return list(torch.autograd.grad(total(model(*args)), list(model.parameters())))


def leaves_of(model, tree):
    """The leaves of a tree in the order of a module's parameters."""
    return [tree[tuple(name.split("."))] for name, _ in model.named_parameters()]


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(("kind", "first"), CASES)
def test_outputs(kind, first):
    """Outputs of stacked members, without a warning of torch."""
    models, apply, params = make(kind, first)
    args = batch()
    got = tdf.Ensemble(apply, how="vmap")(params, *args)
    torch.testing.assert_close(got, torch.stack([model(*args) for model in models]), **TIGHT)


@pytest.mark.parametrize(("kind", "first"), CASES)
def test_gradients(kind, first):
    """`vmap` of `grad`."""
    models, apply, params = make(kind, first)
    args = batch()
    got = vmap(grad(lambda p: total(apply(p, *args))))(params)
    want = [torch.stack(grads) for grads in zip(*[gradients_of(model, *args) for model in models], strict=True)]
    torch.testing.assert_close(leaves_of(models[0], got), want, **TIGHT)


@pytest.mark.parametrize(("kind", "first"), CASES)
def test_gradients_of_one_member(kind, first):
    """`grad` without a `vmap`."""
    models, apply, params = make(kind, first)
    args = batch()
    got = grad(lambda p: total(apply(p, *args)))(params[0])
    torch.testing.assert_close(leaves_of(models[0], got), gradients_of(models[0], *args), **TIGHT)


@pytest.mark.parametrize("how", ["vmap", "loop"])
def test_a_gradient_outside_of_an_ensemble(how):
    """`grad` of a sum over members."""
    models, apply, params = make()
    args = batch()
    run = tdf.Ensemble(apply, how=how)
    got = grad(lambda p: total(run(p, *args)))(params)
    want = [torch.stack(grads) for grads in zip(*[gradients_of(model, *args) for model in models], strict=True)]
    torch.testing.assert_close(leaves_of(models[0], got), want, **TIGHT)


def test_lengths_in_order_as_numbers():
    """A list of lengths that torch does not sort."""
    models, apply, params = make()
    args = (torch.randint(9, (3, 6)), [6, 4, 1], True)
    got = grad(lambda p: total(apply(p, *args)))(params[0])
    torch.testing.assert_close(leaves_of(models[0], got), gradients_of(models[0], *args), **TIGHT)


WAYS = {
    "members": lambda apply, p, *args: tdf.Ensemble(apply)(p, *args),
    "gradients": lambda apply, p, *args: vmap(grad(lambda q: total(apply(q, *args))))(p),
    "one member": lambda apply, p, *args: apply(p[0], *args),
    "gradient of one member": lambda apply, p, *args: grad(lambda q: total(apply(q, *args)))(p[0]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_replay_with_other_lengths(way):
    """`jit` records again for lengths that it has not seen."""
    _, apply, params = make()
    ids, lengths = batch()

    def fn(*args):
        return WAYS[way](apply, *args)

    recorded = tdf.jit(fn)
    recorded(params, ids, lengths)
    others = (params, ids.flip(1), torch.tensor([2, 2, 6, 4]))
    torch.testing.assert_close(tree_leaves(recorded(*others)), tree_leaves(fn(*others)), **TIGHT)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode():
    """The product of a gradient and a tangent."""
    _, apply, params = make()
    args = batch()

    def loss(p):
        return total(apply(p, *args))

    _, got = jvp(loss, (params[0],), (params[1],))
    slopes = grad(loss)(params[0])
    want = sum([(slopes[path] * params[1][path]).sum() for path in slopes.keys(True, True)])
    torch.testing.assert_close(got, want, **TIGHT)


@pytest.mark.parametrize("lengths", [[6, 0, 2], [1, 2, 3]], ids=["empty", "not in order"])
def test_lengths_that_torch_refuses_are_refused(lengths):
    """The errors are torch's own."""
    models, apply, params = make()
    args = (torch.randint(9, (3, 6)), torch.tensor(lengths), True)
    with pytest.raises(RuntimeError) as refused:
        models[0](*args)
    with pytest.raises(RuntimeError) as got:
        grad(lambda p: total(apply(p, *args)))(params[0])
    assert str(got.value) == str(refused.value)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_lengths_of_each_member_are_refused_by_torch():
    """The numbers of rows would differ."""
    _, apply, params = make()
    ids, lengths = batch()
    with pytest.raises(RuntimeError, match="vmap"):
        vmap(lambda p, n: apply(p, ids, n))(params, lengths.expand(MEMBERS, -1))


def test_draws_between_layers_of_one_member_keep_their_numbers():
    """Dropout of torch's own layer, which the rules leave alone inside of `grad`."""
    layer = nn.LSTM(3, 4, 2, dropout=0.5, dtype=torch.float64)
    apply, params, _ = tdf.functional(layer)
    x = torch.randn(5, 2, 3, dtype=torch.float64)

    def drawn(fn):
        torch.manual_seed(0)
        return fn()

    out = drawn(lambda: layer(x)[0])
    _, got = drawn(lambda: grad(lambda p: (lambda y: (y.sum(), y))(apply(p, x)[0]), has_aux=True)(params))
    torch.testing.assert_close(got, out, rtol=0, atol=0)
