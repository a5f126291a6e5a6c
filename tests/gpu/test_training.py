"""Modules, ensembles, jit, compilers and optimizers on a device: what they give on the CPU."""

import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc import TensorDict, optim, random
from tests.helpers import assert_trees_equal, quick
from tests.jit.pools import on_cpu
from tests.jit.test_cudagraphs import MODELS, clone, make_step
from tests.optim.table import FUSED, RULES, random_tree, train

pytestmark = pytest.mark.sample(2)

CLOSE = {"rtol": 2e-4, "atol": 2e-5}
# It computes in bfloat16.
LOOSE = dict.fromkeys(("muon", "muon rms"), {"rtol": 5e-2, "atol": 1e-2})
WRAPS = {
    "eager": lambda fn, device: fn,
    "jit": lambda fn, device: tdf.jit(fn),
    "cudagraphs": lambda fn, device: tdf.jit(fn, backend="cudagraphs" if device.type == "cuda" else on_cpu()),
    "compile": lambda fn, device: torch.compile(fn, fullgraph=True, backend="aot_eager"),
}


@pytest.mark.filterwarnings("ignore:Ensemble. forward wrote the buffers:UserWarning")
@pytest.mark.parametrize("how", ["vmap", "loop", "traced"])
@pytest.mark.parametrize("name", MODELS)
def test_ensembles(name, how, device):
    """Members equal the modules that they are of, and their dropout is that of the CPU."""
    make, shape = MODELS[name]
    modules, x = [make() for _ in range(3)], torch.randn(5, *shape)
    apply, *_ = tdf.functional(modules[0])
    tree = tdf.stack_modules(modules).detach()
    drawn = tdf.Ensemble(apply, how="loop")(tree, x, rng=3)

    found = tdf.Ensemble(apply, how=how)(tree.to(device), x.to(device), rng=3)

    assert found.device.type == device.type
    torch.testing.assert_close(found.cpu(), drawn, **CLOSE)
    modules[0].to(device).eval()
    apply, *_ = tdf.functional(modules[0])
    params, buffers = tdf.split(tree[0].to(device))
    torch.testing.assert_close(apply(params, x.to(device), buffers=buffers), modules[0](x.to(device)), **CLOSE)


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("how", quick(WRAPS, "eager", "jit", "cudagraphs"))
@pytest.mark.parametrize("name", quick(MODELS, "mlp"))
def test_steps(name, how, donate, device):
    """Four steps with dropout and buffers end at the weights of the CPU, donated or not."""
    # Adam would make whole steps of gradients that are 0 but for rounding, such as those of the keys' biases.
    step, start, batch = make_step(name, opt=optim.sgd(0.05, momentum=0.9), donate=donate)
    begin, run = start(), WRAPS[how](step, device)
    now, data = [value.to(device) for value in clone(begin)], [x.to(device) for x in batch]
    losses, found = [], []
    for _ in range(4):
        *begin, loss = step(*begin, *batch)
        losses.append(loss.clone())
        *now, loss = run(*now, *data)
        found.append(loss.cpu())

    torch.testing.assert_close(found, losses, **CLOSE)
    assert_trees_equal(now[0].cpu(), begin[0].cpu(), rtol=2e-3, atol=2e-4)
    assert torch.equal(now[3].cpu(), begin[3])


def test_inductor(device):
    """A step under the default compiler."""
    step, start, batch = make_step("mlp", device, donate=False)
    now = same = start()
    run = torch.compile(step, fullgraph=True) if device.type == "cuda" else step
    for _ in range(2):
        *now, losses = run(*now, *batch)
        *same, expected = step(*same, *batch)
    torch.testing.assert_close(losses, expected, **CLOSE)


@pytest.mark.parametrize("name", quick(RULES, "adam", "momentum", "adagrad", "muon", "lion"))
def test_optimizers(name, device, generator):
    """A rule does the same steps, each leaf on the device; and those of torch's fused kernel, to its last bits."""
    make, cls, options = RULES[name]
    opt = make(**options)
    params = random_tree(generator, name=name)
    grads = [random_tree(generator, name=name) for _ in range(5)]
    expected, _ = train(opt.update, opt.init(params), params, grads)

    moved = params.to(device)
    found, state = train(opt.update, opt.init(moved), moved, [grad.to(device) for grad in grads])

    assert {leaf.device.type for leaf in (*found.leaves(), *state.leaves())} == {device.type}
    assert_trees_equal(found.cpu(), expected.cpu(), **LOOSE.get(name, CLOSE))
    if cls in FUSED:
        leaves = [nn.Parameter(leaf.to(device, copy=True)) for leaf in params.leaves()]
        optimizer = cls(leaves, fused=True, **options)
        for grad in grads:
            for leaf, value in zip(leaves, grad.leaves(), strict=True):
                leaf.grad = value.to(device)
            optimizer.step()
        for leaf, value in zip(leaves, found.leaves(), strict=True):
            torch.testing.assert_close(leaf.detach(), value, rtol=1e-6, atol=1e-7)


def test_rates_of_members(device):
    """Learning rates for each member, and members that have finished."""
    params = TensorDict({"w": torch.ones(3, 4)}, [3])
    opt = optim.adamw(lr=torch.tensor([0.1, 0.01, 0.001]))
    active = torch.tensor([True, False, True])
    expected, _ = opt.update(params, params, opt.init(params), active=active)

    moved = params.to(device)
    found, _ = opt.update(moved, moved, opt.init(moved).to(device), active=active.to(device))

    assert_trees_equal(found.cpu(), expected.cpu(), **CLOSE)


def test_masks_are_those_of_the_cpu(device):
    """Dropout by a key zeroes the same numbers."""
    apply, params, _ = tdf.functional(nn.Dropout(0.3))
    found = apply(params, torch.ones(64, 65, device=device), rng=random.key(5, device=device))

    assert torch.equal(found.cpu(), apply(params, torch.ones(64, 65), rng=random.key(5)))
