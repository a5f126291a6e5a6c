"""`with_dropout_rates`: members with their own rates against real modules with these numbers."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tdfunc as tdf
from tdfunc import random
from tdfunc.nn import with_dropout_rates
from tests.helpers import assert_trees_equal

RATES = [0.0, 0.2, 0.5, 1.0]
KINDS = [nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout]


class Block(nn.Module):
    """A layer with dropout inside of a submodule, and a batch norm."""

    def __init__(self, kind=nn.Dropout, p=0.3):
        super().__init__()
        self.below = nn.Linear(3, 6)
        self.inner = nn.Sequential(nn.BatchNorm1d(6), nn.Tanh(), kind(p))
        self.above = nn.Linear(6, 2)
        self.last = kind(p)

    def forward(self, x):
        return self.last(self.above(self.inner(self.below(x))))


def make_members(kind=nn.Dropout):
    """A stack of members with a rate each, their apply, and modules with these rates as numbers."""
    modules = [Block(kind, p) for p in RATES]
    apply, _, _ = tdf.functional(with_dropout_rates(modules[0]))
    params, buffers = tdf.split(tdf.stack_modules([with_dropout_rates(module) for module in modules]))
    return apply, params, buffers, modules


def loop(modules, params, x, key):
    """Each module with its rate as a number, and its key."""
    outs = []
    for i, module in enumerate(modules):
        apply, _, buffers = tdf.functional(module)
        out, _ = apply.train().with_buffers(params[i], buffers, x, rng=random.fold_in(key, i))
        outs.append(out)
    return torch.stack(outs)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("wrap", [lambda f: f, tdf.jit], ids=["eager", "jit"])
def test_members_are_modules_with_these_rates(kind, wrap):
    """The same masks, by the same keys."""
    apply, params, buffers, modules = make_members(kind)
    x, key = torch.randn(5, 3), random.key(4)
    run = tdf.Ensemble(apply.train())

    out = wrap(lambda p, b, x, k: run.with_buffers(p, b, x, rng=k)[0])(params, buffers, x, key)

    torch.testing.assert_close(out, loop(modules, params, x, key), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_modules_with_these_rates():
    """Also inside of `tdf.grad`."""
    apply, params, buffers, modules = make_members()
    x, key = torch.randn(5, 3), random.key(4)
    run = tdf.Ensemble(apply.train())

    found = tdf.grad(lambda p: run.with_buffers(p, buffers, x, rng=key)[0].square().sum())(params)

    expected = tdf.grad(lambda p: loop(modules, p, x, key).square().sum())(params)
    assert_trees_equal(found, expected, rtol=1e-4, atol=1e-5)


@given(rate=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_a_rate_that_is_set_is_the_rate(rate, seed):
    """As a module of this rate."""
    apply, params, buffers = tdf.functional(with_dropout_rates(nn.Sequential(nn.Identity(), nn.Dropout(0.5))))
    x = torch.ones(40)
    buffers = buffers.at[tdf.Filter("*.p")].set(rate)

    out = apply.train()(params, x, buffers=buffers, rng=seed)

    p = float(torch.tensor(rate))
    plain, none, _ = tdf.functional(nn.Sequential(nn.Identity(), nn.Dropout(p)))
    torch.testing.assert_close(out, plain.train()(none, x, rng=seed))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_evaluation_drops_nothing(kind):
    """Members in evaluation are the plain modules in evaluation."""
    apply, params, buffers, modules = make_members(kind)
    x = torch.randn(5, 3)

    out = tdf.Ensemble(apply.eval())(params, x, buffers=buffers)

    expected = torch.stack([module.eval()(x) for module in modules])
    torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_members_are_mapped(mode):
    """And do not run in a loop."""
    apply, params, buffers, _ = make_members()
    run = tdf.Ensemble(getattr(apply, mode)())
    run.with_buffers(params, buffers, torch.randn(5, 3), rng=None if mode == "eval" else 0)

    assert run.plan().startswith("vmap")


def test_another_rate_is_no_new_trace():
    """A rate is an argument."""
    apply, params, buffers = tdf.functional(with_dropout_rates(Block()))
    calls = []

    @tdf.jit
    def run(params, buffers, x, key):
        calls.append(1)
        return apply.train().with_buffers(params, buffers, x, rng=key)

    for rate in (0.1, 0.5):
        run(params, buffers.at[tdf.Filter("*.p")].set(rate), torch.randn(5, 3), random.key(0))

    assert len(calls) == 1


def test_the_module_stays_as_it_is():
    """Also if its copy is trained."""
    module = Block()
    before = copy.deepcopy(module.state_dict())
    new = with_dropout_rates(module)
    new(torch.randn(5, 3))
    with torch.no_grad():
        new.below.weight.zero_()

    assert_trees_equal(dict(module.state_dict()), dict(before))


def test_the_copy_is_a_module_of_torch():
    """It drops by torch's own generator, with a state dict of weights and rates."""
    new = with_dropout_rates(nn.Sequential(nn.Dropout(0.25)))
    share = (new(torch.ones(10_000)) == 0).float().mean()

    assert abs(share - 0.25) < 0.03


def test_a_second_call_keeps_the_rates():
    """A copy of a copy has the same buffers."""
    once = with_dropout_rates(Block())

    assert list(with_dropout_rates(once).state_dict()) == list(once.state_dict())


def test_rates_are_saved_with_the_buffers(tmp_path):
    """A run continues with its rates."""
    _, _, buffers, _ = make_members()
    buffers.save(tmp_path / "buffers.td")

    assert_trees_equal(tdf.load(tmp_path / "buffers.td", like=buffers), buffers)


def test_a_module_without_dropout_is_refused():
    """With the layers that it has."""
    with pytest.raises(tdf.UnsupportedError, match=r"(?s)no dropout layer.*nn.Dropout.*Linear.*F.dropout"):
        with_dropout_rates(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5), r"\['self_attn\.dropout=0\.5'\]"),
        (lambda: nn.Sequential(nn.Dropout(0.1), nn.LSTM(2, 3, 2, dropout=0.25)), r"\['1\.dropout=0\.25'\]"),
    ],
)
def test_rates_that_are_not_of_layers_are_named(make, names):
    """A sweep would compare members that drop with another rate than theirs."""
    with pytest.warns(UserWarning, match=rf"these rates are not of dropout layers.*\n.*got: *{names}"):
        with_dropout_rates(make())
