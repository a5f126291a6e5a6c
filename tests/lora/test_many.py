"""Many adapters of one base in one step equal as many runs of torch's layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tdfunc as tdf
from tdfunc.lora import Lora

K, STEPS, RANK, ALPHA, CLIP = 64, 50, 2, 4.0, 1.0


class Plain(nn.Module):
    """LoRA as torch's users write it."""

    def __init__(self, base, a, b):
        super().__init__()
        self.base, self.a, self.b = base, nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, x):
        return self.base(x) + (x @ self.a.mT) @ self.b.mT * (ALPHA / RANK)


def net():
    """A small network, whose linear layers get adapters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def many(lora, params, apply=None):
    """K fresh adapters."""
    return torch.stack([lora.init(params, key=i, apply=apply) for i in range(K)])


def optimizer(rates):
    """Adam with a rate for each adapter, of clipped gradients."""
    return tdf.optim.chain(tdf.optim.clip_by_member_norm(CLIP), tdf.optim.adam(lr=rates))


def train_plain(adapters, rate, xs, ts):
    """One run by `torch.optim`: the adapters at its end."""
    model = net().requires_grad_(False)
    for name in "02":
        setattr(model, name, Plain(model[int(name)], *(adapters[name, "weight", part] for part in "AB")))
    leaves = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.Adam(leaves, lr=rate)
    for x, t in zip(xs, ts, strict=True):
        opt.zero_grad()
        F.cross_entropy(model(x), t).backward()
        nn.utils.clip_grad_norm_(leaves, CLIP)
        opt.step()
    return [leaf.detach() for leaf in leaves]


@pytest.mark.slow
def test_sixty_four_adapters_equal_sixty_four_runs():
    """Each has its own start, rate, clip, data and state of Adam, in one jitted step without a tensor of K weights."""
    apply, params, _ = tdf.functional(net())
    lora = Lora("*.weight", rank=RANK, alpha=ALPHA)
    run, adapters, rates = lora.attach(apply), many(lora, params), torch.logspace(-5, -3.3, K)
    xs, ts = torch.randn(STEPS, K, 8, 6), torch.randint(3, (STEPS, K, 8))
    opt, start = optimizer(rates), adapters

    @tdf.jit
    def step(params, adapters, state, x, t):
        grad = torch.func.grad(lambda adapters, x, t: F.cross_entropy(run((params, adapters), x), t))
        return opt.update(adapters, torch.vmap(grad)(adapters, x, t), state)

    state = opt.init(adapters)
    for x, t in zip(xs, ts, strict=True):
        adapters, state = step(params, adapters, state, x, t)

    for i in range(K):
        expected = train_plain(start[i], float(rates[i]), xs[:, i], ts[:, i])
        for leaf, other in zip(adapters[i].leaves(), expected, strict=True):
            torch.testing.assert_close(leaf, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layer", [lambda: nn.Conv1d(2, 3, 3), lambda: nn.Conv2d(2, 3, 3)])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda lora, base, apply: lora.init(base, key=0, apply=apply),
        lambda lora, base, apply: lora.extract(base, base * 2, apply=apply),
    ],
)
def test_convolutions_of_an_ensemble_are_refused(layer, named, call):
    """Their members are no outputs."""
    apply = tdf.functional(layer())[0] if named else None

    with pytest.raises(tdf.BatchSizeError, match="the base is stacked"):
        call(Lora("weight", rank=1), tdf.split(tdf.init_ensemble(layer, 4))[0], apply)
