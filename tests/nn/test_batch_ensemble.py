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
    alone = [member_of(layer, i) for i in range(members)]

    torch.testing.assert_close(one(x), member_of(one, ...)(x))
    torch.testing.assert_close(layer(x), torch.stack([member(own) for member, own in zip(alone, x, strict=True)]))
    torch.testing.assert_close(layer(x[:1]), torch.stack([member(x[0]) for member in alone]))


@pytest.mark.parametrize("options", [{}, {"padding": 1, "stride": 2}, {"groups": 2, "dilation": 2, "bias": False}])
def test_convolution_is_the_loop(options):
    """With every option of the kernel."""
    layer = BatchEnsembleConv2d(4, 6, 3, 3, **options, init="normal", dtype=torch.float64)
    x = torch.randn(3, 2, 4, 7, 6, dtype=torch.float64)

    torch.testing.assert_close(layer(x), torch.stack([member_of(layer, i)(x[i]) for i in range(3)]))
    torch.testing.assert_close(layer(x[:1]), torch.stack([member_of(layer, i)(x[0]) for i in range(3)]))
    assert repr(layer).startswith("BatchEnsembleConv2d(4, 6, members=3, {'stride': ")
    assert repr(member_of(layer, 0)) == repr(nn.Conv2d(4, 6, 3, **options))


FEW = {
    "layer": lambda: (BatchEnsembleLinear(64, 64, 16), torch.randn(1, 3, 64)),
    "model": lambda: (
        batch_ensemble(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), 16, 0),
        torch.randn(3, 64),
    ),
}


@pytest.mark.parametrize("make", FEW.values(), ids=FEW)
def test_no_tensor_of_members_times_weights(make):
    """Forward and backward make none, in a layer and in a converted model; all parameters have gradients."""
    many, x = make()
    with Largest() as seen:
        many(x).square().sum().backward()

    assert seen.size <= 64 * 64
    assert [name for name, p in many.named_parameters() if p.grad is None] == []


def test_signs_are_the_papers():
    """Scales are 1 or -1, as often; biases are equal at first."""
    torch.manual_seed(0)
    signs = BatchEnsembleLinear(200, 100, 50, init="signs")

    assert set(signs.scale_in.unique().tolist()) == {-1.0, 1.0}
    assert set(signs.scale_out.unique().tolist()) == {-1.0, 1.0}
    assert abs(signs.scale_in.mean().item()) < 0.05
    assert (signs.bias == signs.bias[0]).all()


def test_normal_scales_and_ones_are_the_papers():
    """Scales are normal around 1, or ones."""
    torch.manual_seed(0)
    layer = BatchEnsembleLinear(200, 100, 50, init=("normal", "ones"))

    assert layer.scale_in.mean().item() == pytest.approx(1, abs=0.02)
    assert layer.scale_in.std().item() == pytest.approx(0.5, abs=0.02)
    assert (layer.scale_out == 1).all()


def test_a_layer_has_one_weight_for_all_members():
    """Parameters are one weight, and for each member its scales and biases."""
    layer = BatchEnsembleLinear(200, 100, 50)

    assert sum(p.numel() for p in layer.parameters()) == 200 * 100 + 50 * (200 + 100 + 100)


@pytest.fixture
def tabm():
    """Five members of two hidden layers."""
    return TabM(7, 3, 5, hidden_layer_sizes=(16, 8))


def test_tabm_begins_as_the_papers(tabm):
    """Signs in the first layer's inputs, and ones elsewhere."""
    first, second = tabm.body[0], tabm.body[3]

    assert set(first.scale_in.unique().tolist()) == {-1.0, 1.0}
    assert (first.scale_out == 1).all()
    assert (second.scale_in == 1).all()
    assert (second.scale_out == 1).all()


def test_heads_of_tabm_differ(tabm):
    """Each head begins with numbers of its own, in torch's bounds of a linear layer."""
    assert not torch.equal(tabm.heads.weight[0], tabm.heads.weight[1])
    bounds = {name: (p.abs().max() * 8**0.5).item() for name, p in tabm.heads.named_parameters()}
    assert [name for name, bound in bounds.items() if not 0.6 < bound <= 1] == []


def test_layers_of_tabm_are_shown(tabm):
    """The repr shows the layers with their members."""
    assert "(0): BatchEnsembleLinear(7, 16, members=5, bias=True)" in repr(tabm)
    assert "(heads): EnsembleLinear(8, 3, members=5, bias=True)" in repr(tabm)


def test_sizes_of_tabm(tabm):
    """Layers have the paper's default sizes, and parameters one weight for all members but those of heads."""
    count = 7 * 16 + 5 * (7 + 16 + 16) + 16 * 8 + 5 * (16 + 8 + 8) + 5 * (8 * 3 + 3)

    assert [len(p) for p in TabM(3, 2).parameters()][::4] == [512] * 3 + [32]
    assert sum(p.numel() for p in tabm.parameters()) == count


def test_outputs_of_tabm(tabm):
    """Outputs have a dimension of members, and are drawn with dropout when it trains."""
    one, other = tabm(torch.randn(1, 7).expand(2, 7)).unbind(1)

    assert tabm(torch.randn(4, 2, 7)).shape == (5, 4, 2, 3)
    assert not torch.equal(one, other)


def test_tabm_is_the_loop():
    """Each member is a plain perceptron with its own scaled weights."""
    model = TabM(4, 2, 3, hidden_layer_sizes=(6, 5), dtype=torch.float64).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(7, 4, dtype=torch.float64)
    members = []
    for i in range(3):
        head = nn.Linear(5, 2).double()
        head.weight.data, head.bias.data = model.heads.weight[i], model.heads.bias[i]
        members.append(
            nn.Sequential(member_of(model.body[0], i), nn.ReLU(), member_of(model.body[3], i), nn.ReLU(), head)
        )

    torch.testing.assert_close(model(x), torch.stack([member(x) for member in members]))


def test_heads_without_biases():
    """A layer without biases is its weights."""
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


@pytest.fixture
def plain():
    """A model of two linear layers, the second without biases."""
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False))


def test_a_converted_model_shares_its_parameters(plain):
    """The count is that of the model, and for each layer its scales and biases."""
    count = sum(p.numel() for p in plain.parameters()) - 8 + 4 * (3 + 8 + 8 + 8 + 2)

    assert sum(p.numel() for p in batch_ensemble(plain, 4, 7).parameters()) == count


@pytest.mark.parametrize(
    "again",
    [
        lambda many, plain: copy.deepcopy(many),
        lambda many, plain: pickle.loads(pickle.dumps(many)),
        lambda many, plain: batch_ensemble(plain, 4, random.key(7)),
    ],
    ids=["deepcopy", "pickle", "key"],
)
def test_a_converted_model_is_copied_and_repeated(plain, again):
    """A copy, a pickle and a second model of the same key give the same outputs."""
    many, x = batch_ensemble(plain, 4, 7), torch.randn(5, 3)

    assert torch.equal(again(many, plain)(x), many(x))


def test_converted_models_of_two_seeds_differ(plain):
    """Another seed draws other scales."""
    x = torch.randn(5, 3)

    assert not torch.equal(batch_ensemble(plain, 4, 8)(x), batch_ensemble(plain, 4, 7)(x))


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model[0]], ids=["model", "layer"])
def test_members_with_ones_are_the_model(plain, part):
    """A member whose scales are ones is the model, or the one layer, that was converted."""
    model, x = part(plain), torch.randn(5, 3)

    torch.testing.assert_close(batch_ensemble(model, 6, 7, init="ones")(x)[5], model(x))


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
