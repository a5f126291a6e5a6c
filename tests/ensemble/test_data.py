"""What forward does with the data: writes to arguments, changes extra state, asks for derivatives of attention."""

from functools import partial
from inspect import signature
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tdfunc import Ensemble, UnsupportedError, functional, split, stack_modules


class Centred(nn.Module):
    """Subtracts a buffer from its argument, in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.ones(2))

    def forward(self, x):
        """Write to the argument."""
        x -= self.mean
        return self.linear(x)


class Doubled(nn.Module):
    """Doubles its argument in place, and then does what vmap cannot."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        """Write to the argument."""
        x.mul_(2)
        out = self.linear(x)
        return out * (1 if out.sum().item() else 0)


def leaky():
    """A first layer that works in place."""
    return nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("make", "how", "chunk_size", "in_dims"),
    [
        (Centred, "loop", None, None),
        (Centred, "auto", None, None),
        (Doubled, "auto", None, None),
        (Doubled, "auto", None, 0),
        (leaky, "loop", None, None),
        (leaky, "vmap", 2, None),
        (leaky, "auto", 2, None),
    ],
)
def test_writes_to_shared_arguments_are_refused(make, how, chunk_size, in_dims):
    """An argument that forward writes, in one member or in a vmap that fails, is refused."""
    models = [make() for _ in range(3)]
    ensemble = Ensemble(functional(models[0])[0], how, chunk_size=chunk_size)

    with pytest.raises(UnsupportedError, match=r"writes to its argument.*\n.*only reads\n.*shape \[3, 2\]\n.*inplace"):
        ensemble(stack_modules(models), -torch.ones(3, 2), in_dims=in_dims)


PRIVATE = {
    "mapped": lambda run, tree, x: run(tree, x.repeat(3, 1, 1), in_dims=0),
    "inference": torch.inference_mode()(lambda run, tree, x: run(tree, x.clone())),
    "keyword": torch.inference_mode()(
        lambda run, tree, x: run(tree, **{next(iter(signature(run.apply.module.forward).parameters)): x.clone()})
    ),
    "one member": lambda run, tree, x: torch.cat([run(tree[i : i + 1], x.clone()) for i in range(3)]),
    "vmap": lambda run, tree, x: torch.vmap(lambda x: run(tree, x), out_dims=1)(x[None].repeat(2, 1, 1))[:, 0],
}


CASES = [case for case in product([Centred, Doubled, leaky], PRIVATE, ["loop"]) if case[:2] != (Doubled, "vmap")]


@pytest.mark.parametrize(("make", "way", "how"), [*CASES, (Doubled, "inference", "auto"), (Doubled, "keyword", "auto")])
def test_writes_that_no_other_member_sees(make, way, how):
    """Forward may write to data that only one member gets."""
    models = [make() for _ in range(3)]
    x = -torch.ones(1, 2)
    with torch.no_grad():
        expected = torch.stack([model(x.clone()) for model in models])

    out = PRIVATE[way](Ensemble(functional(models[0])[0], how), stack_modules(models), x)

    assert_close(out.detach(), expected)


class Remembers(nn.Module):
    """Adds to a list, dict, array or object among its arguments, and may do what vmap cannot."""

    def __init__(self, is_plain):
        super().__init__()
        self.linear, self.is_plain = nn.Linear(3, 3), is_plain

    def forward(self, x, memory):
        """Sum up the outputs, or count the calls."""
        y = self.linear(x)
        if isinstance(memory, np.ndarray):
            memory += 1
            return y * memory[0]
        held = vars(memory) if isinstance(memory, SimpleNamespace) else memory
        if isinstance(held, list):
            held.append(y)
            y = torch.stack(held).sum(0)
        else:
            y = held["sum"] = held.get("sum", 0) + y
        return y if self.is_plain or y.sum() > 0 else -y


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("how", ["loop", "auto"])
@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("make", [list, dict, lambda: np.ones(1), SimpleNamespace])
def test_arguments_that_forward_fills(make, by_keyword, how, is_plain):
    """Each member fills a container of its own, and the caller's stays as it was."""
    models, x, given = [Remembers(is_plain) for _ in range(3)], torch.randn(2, 3), make()
    ensemble = Ensemble(functional(models[0])[0], how)
    args, kwargs = ((x,), {"memory": given}) if by_keyword else ((x, given), {})
    out = ensemble(stack_modules(models), *args, **kwargs)

    assert_close(out, torch.stack([model(x, make()) for model in models]))
    assert given == make()


class Counting(nn.Module):
    """Multiplies by its extra state, which a forward may count up."""

    def __init__(self, step):
        super().__init__()
        self.linear, self.step, self.count = nn.Linear(3, 3), step, 2

    def get_extra_state(self):
        """How often it ran."""
        return {"count": self.count}

    def set_extra_state(self, state):
        """Go on from there."""
        self.count = state["count"]

    def forward(self, x):
        """Count, and multiply."""
        self.count += self.step
        return self.linear(x) * self.count


@pytest.mark.parametrize("how", ["auto", "loop", "vmap", "traced"])
def test_changed_extra_state_is_refused(how):
    """Extra state that forward changes is refused, as the buffers that come back cannot hold it."""
    models = [Counting(1) for _ in range(2)]
    params, buffers = split(stack_modules(models))

    with pytest.raises(UnsupportedError, match=r"'_extra_state' of a member.\n.*2.*before\n.*3.*\n.*with_buffers"):
        Ensemble(functional(models[0])[0], how).with_buffers(params, buffers, torch.ones(3))


@pytest.mark.parametrize("how", ["auto", "loop", "vmap", "traced"])
def test_extra_state_comes_back(how):
    """Extra state that forward does not change comes back, that of each member."""
    models = [Counting(0) for _ in range(2)]
    params, buffers = split(stack_modules(models))

    _, new = Ensemble(functional(models[0])[0], how).with_buffers(params, buffers, torch.ones(3))
    assert new["_extra_state"] == [{"count": 2}] * 2


ATTENTION = {
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), 3),
    "layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2), 1),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_gradients_of_attention_in_evaluation_mode(name):
    """Gradients are the loop's where torch's fast kernels, which have no derivatives, are at hand."""
    make, n = ATTENTION[name]
    models = [make().eval() for _ in range(2)]
    apply, tree = functional(models[0])[0], stack_modules(models).detach()
    args, ways = [torch.randn(2, 3, 4)] * n, ("loop", "vmap", "auto")

    def loss(tree, how):
        out = Ensemble(apply, how)(tree, *args)
        return (out[0] if n > 1 else out).pow(2).sum()

    def by_autograd(how):
        leaves = tree.apply(lambda p: p.clone().requires_grad_())
        loss(leaves, how).backward()
        return {path: leaves[path].grad for path in tree.paths()}

    def by_transform(how):
        grads = torch.func.grad(loss)(tree, how)
        return {path: grads[path] for path in tree.paths()}

    expected = by_autograd("loop")
    close = partial(assert_close, rtol=1e-4, atol=1e-5)
    close({how: by_autograd(how) for how in ways}, dict.fromkeys(ways, expected))
    close({how: by_transform(how) for how in ways}, dict.fromkeys(ways, expected))
