"""Members that share weights: each equals a plain model with the weight W * outer(scale_out, scale_in)."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tdfunc import random
from tdfunc.nn import BatchEnsembleConv2d, BatchEnsembleLinear, EnsembleLinear, TabM, batch_ensemble
from tests.lora.layers import Largest, Tied
from tests.models import ResNet


def member_of(layer, i):
    """A plain layer with the weights of one member."""
    bias = layer.bias is not None
    if isinstance(layer, BatchEnsembleLinear):
        scales = torch.outer(layer.scale_out[i], layer.scale_in[i])
        plain = nn.Linear(layer.in_features, layer.out_features, bias=bias)
    else:
        sizes = layer.scale_in.shape[1], layer.scale_out.shape[1]
        plain = nn.Conv2d(*sizes, layer.weight.shape[2:], bias=bias, **layer.options)
        # A row of the kernel reads the channels of its group.
        groups = layer.scale_in[i].reshape(layer.options["groups"], 1, -1)
        scales = (layer.scale_out[i].reshape(len(groups), -1, 1) * groups).flatten(0, 1)[:, :, None, None]
    plain = plain.to(layer.weight)
    with torch.no_grad():
        plain.weight.copy_(layer.weight * scales)
        if bias:
            plain.bias.copy_(layer.bias[i])
    return plain


@given(
    seed=st.integers(0, 2**32),
    members=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    batch=st.lists(st.integers(0, 3), max_size=2),
    init=st.sampled_from(["signs", "normal", ("signs", "ones")]),
    bias=st.booleans(),
)
def test_linear_is_the_loop(seed, members, sizes, batch, init, bias):
    """On data of their own and on shared data, with the gradients of all parameters."""
    layer = BatchEnsembleLinear(*sizes, members, bias=bias, init=init, dtype=torch.float64)
    if bias:
        layer.bias = nn.Parameter(random.normal(random.key(seed), (members, sizes[1]), dtype=torch.float64))
    x = random.normal(random.key(seed), (members, *batch, sizes[0]), dtype=torch.float64)
    one = BatchEnsembleLinear(*sizes, None, bias=bias, init=init, dtype=torch.float64)

    torch.testing.assert_close(one(x), member_of(one, ...)(x))
    for data in (x, x[:1]):
        expected = torch.stack([member_of(layer, i)(data[min(i, len(data) - 1)]) for i in range(members)])
        torch.testing.assert_close(layer(data), expected)


@pytest.mark.parametrize("options", [{}, {"padding": 1, "stride": 2}, {"groups": 2, "dilation": 2, "bias": False}])
def test_convolution_is_the_loop(options):
    """With every option of the kernel."""
    layer = BatchEnsembleConv2d(4, 6, 3, 3, **options, init="normal", dtype=torch.float64)
    x = torch.randn(3, 2, 4, 7, 6, dtype=torch.float64)

    torch.testing.assert_close(layer(x), torch.stack([member_of(layer, i)(x[i]) for i in range(3)]))
    torch.testing.assert_close(layer(x[:1]), torch.stack([member_of(layer, i)(x[0]) for i in range(3)]))
    assert repr(layer).startswith("BatchEnsembleConv2d(4, 6, members=3, {'stride': ")
    assert repr(member_of(layer, 0)) == repr(nn.Conv2d(4, 6, 3, **options))


def test_no_tensor_of_members_times_weights():
    """Forward and backward make none, in a layer and in a converted model."""
    members, width = 16, 64
    layer, model = BatchEnsembleLinear(width, width, members), nn.Sequential(nn.Linear(width, width), nn.ReLU())
    for many, x in ((layer, torch.randn(1, 3, width)), (batch_ensemble(model, members, 0), torch.randn(3, width))):
        with Largest() as seen:
            many(x).square().sum().backward()
        assert seen.size <= width * width < members * width * width
        assert all(p.grad is not None for p in many.parameters())


def test_initialisations_are_the_papers():
    """Random signs; normal around 1; ones. Biases are equal at first, and members with ones are the plain layer."""
    torch.manual_seed(0)
    signs, ones = (BatchEnsembleLinear(200, 100, 50, init=init) for init in ("signs", ("normal", "ones")))
    assert set(signs.scale_in.unique().tolist()) == set(signs.scale_out.unique().tolist()) == {-1.0, 1.0}
    assert abs(signs.scale_in.mean().item()) < 0.05
    assert (ones.scale_out == 1).all()
    assert ones.scale_in.mean().item() == pytest.approx(1, abs=0.02)
    assert ones.scale_in.std().item() == pytest.approx(0.5, abs=0.02)
    assert (signs.bias == signs.bias[0]).all()
    assert sum(p.numel() for p in signs.parameters()) == 200 * 100 + 50 * (200 + 100 + 100)


def test_tabm_begins_as_the_papers():
    """Signs in the first layer's inputs, ones elsewhere, and heads that differ."""
    model = TabM(7, 3, 5, hidden_layer_sizes=(16, 8))
    first, second = model.body[0], model.body[3]

    assert set(first.scale_in.unique().tolist()) == {-1.0, 1.0}
    assert all((scale == 1).all() for scale in (first.scale_out, second.scale_in, second.scale_out))
    assert "(0): BatchEnsembleLinear(7, 16, members=5, bias=True)" in repr(model)
    assert "(heads): EnsembleLinear(8, 3, members=5, bias=True)" in repr(model)
    assert not torch.equal(model.heads.weight[0], model.heads.weight[1])
    assert all(0.6 < p.abs().max() * 8**0.5 <= 1 for p in model.heads.parameters())
    assert [len(p) for p in TabM(3, 2).parameters()][::4] == [512] * 3 + [32]
    assert sum(p.numel() for p in model.parameters()) == (
        7 * 16 + 5 * (7 + 16 + 16) + 16 * 8 + 5 * (16 + 8 + 8) + 5 * (8 * 3 + 3)
    )
    assert model(torch.randn(4, 2, 7)).shape == (5, 4, 2, 3)
    assert not torch.equal(*model(torch.randn(1, 7).expand(2, 7)).unbind(1))  # dropout


def test_tabm_is_the_loop():
    """Each member is a plain perceptron with its own scaled weights."""
    model = TabM(4, 2, 3, hidden_layer_sizes=(6, 5), dtype=torch.float64).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(7, 4, dtype=torch.float64)
    heads = [nn.Linear(5, 2).double() for _ in range(3)]
    for i, head in enumerate(heads):
        head.weight.data, head.bias.data = model.heads.weight[i], model.heads.bias[i]
        plain = nn.Sequential(member_of(model.body[0], i), nn.ReLU(), member_of(model.body[3], i), nn.ReLU(), head)
        torch.testing.assert_close(model(x)[i], plain(x))
    layer = EnsembleLinear(5, 2, 3, bias=False)
    torch.testing.assert_close(layer(torch.ones(1, 5)), layer.weight.sum(-1))


@pytest.mark.parametrize("init", ["normal", "ones"])
@pytest.mark.parametrize("make", [ResNet, lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))])
def test_a_converted_model_is_the_loop(make, init):
    """In training mode and in evaluation; statistics are those of each member."""
    model = make().double()
    many = batch_ensemble(model, 3, 0, init=init)
    x = torch.randn((4, 3, 5, 5) if isinstance(model, ResNet) else (4, 3), dtype=torch.float64)
    members = []
    for i in range(3):
        member = copy.deepcopy(model)
        for name, part in member.named_modules():
            if type(part) in (nn.Linear, nn.Conv2d):
                own = many.members.get_submodule(name)
                scales = torch.outer(own.scale_out[i], own.scale_in[i]).detach()
                part.weight.data *= scales.reshape(*scales.shape, *[1] * (part.weight.dim() - 2))
        members.append(member)

    torch.testing.assert_close(many(x), torch.stack([member(x) for member in members]))
    many.eval()
    torch.testing.assert_close(many(x), torch.stack([member.eval()(x) for member in members]))


def test_a_converted_model_shares_its_parameters():
    """The count is that of the model, and for each layer its scales and biases; it is saved, copied and repeated."""
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False))
    many, x = batch_ensemble(model, 4, 7), torch.randn(5, 3)
    count = sum(p.numel() for p in model.parameters()) - 8 + 4 * (3 + 8 + 8 + 8 + 2)

    assert sum(p.numel() for p in many.parameters()) == count
    for again in (copy.deepcopy(many), pickle.loads(pickle.dumps(many)), batch_ensemble(model, 4, random.key(7))):
        assert torch.equal(again(x), many(x))
    assert not torch.equal(batch_ensemble(model, 4, 8)(x), many(x))
    for part in (model, model[0]):
        torch.testing.assert_close(batch_ensemble(part, 6, 7, init="ones")(x)[5], part(x))


def test_tied_weights_stay_shared():
    """A linear layer tied to an embedding keeps the tie."""
    many = batch_ensemble(Tied(), 3, 0)

    assert many.members.head.weight is many.members.embed.weight
    assert many.members.head.weight.shape == (11, 6)
    assert many(torch.arange(5)).shape == (3, 5, 11)


class Reader(nn.Module):
    """A convolution of images without a batch, and one layer under two names that a hook changes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.first = self.second = nn.Linear(3, 3)
        self.first.register_forward_hook(lambda layer, args, out: 2 * out.tanh())

    def forward(self, x):
        return self.second(self.first(self.conv(x).mean((-2, -1))))


def test_a_layer_keeps_its_hooks_and_its_names():
    """Members that begin as the model give its outputs; a layer under two names has one set of scales."""
    model, x = Reader().double(), torch.randn(2, 5, 6, dtype=torch.float64)
    same, signs = batch_ensemble(model, 3, 0, init="ones"), batch_ensemble(model, 3, 0)

    torch.testing.assert_close(same(x), model(x).expand(3, 3))
    assert signs.members.first.scale_in is signs.members.second.scale_in
    assert signs.members.first.scale_in.shape == (3, 3)
    assert not torch.equal(*signs(x)[:2])
