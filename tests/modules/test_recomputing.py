"""Modules that checkpoint parts of their forward train as pure functions, with `backward` and inside transforms."""

import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import tdfunc as tdf

pytestmark = pytest.mark.sample(2)

IDS = torch.randint(0, 17, (2, 6))


def make_hf(name, reentrant):
    """A tiny model of transformers that checkpoints every layer."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "Llama": {"intermediate_size": 32, "num_key_value_heads": 2},
        "Bert": {"intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }
    config = getattr(transformers, f"{name}Config")(
        vocab_size=17, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32,
        use_cache=False, attn_implementation="eager", **sizes[name],
    )  # fmt: skip
    model = getattr(transformers, f"{name}Model")(config).double().train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def loss_of(apply, buffers):
    """The mean square of a model's output, as a function of its parameters."""
    return lambda params: apply(params, IDS, buffers=buffers)[0].square().mean()


def by_backward(loss, params):
    """The gradients that `backward` leaves."""
    live = params.apply(lambda p: p.clone().requires_grad_())
    loss(live).backward()
    return live.apply(lambda p: torch.zeros_like(p) if p.grad is None else p.grad)


WAYS = {
    "backward": by_backward,
    "tdf.grad": lambda loss, params: tdf.grad(loss)(params),
    "vmap of grad": lambda loss, params: vmap(grad(loss))(tdf.stack([params * 2, params]))[1],
    "grad of vmap": lambda loss, params: grad(lambda p: vmap(loss)(p).sum())(tdf.stack([params, params * 2]))[0],
    "backward of vmap": lambda loss, params: by_backward(
        lambda p: vmap(loss)(p).sum(), tdf.stack([params, params * 2])
    )[0],
}


@functools.cache
def expected_for(name, reentrant):
    """The model, and the gradients that it computes itself."""
    torch.manual_seed(0)
    model = make_hf(name, reentrant)
    model(IDS)[0].square().mean().backward()
    return model, tdf.split(tdf.from_module(model))[0].apply(
        lambda p: torch.zeros_like(p) if p.grad is None else p.grad
    )


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["Llama", "Bert", "GPT2"])
@pytest.mark.parametrize("way", WAYS)
def test_models_of_transformers(name, reentrant, way):
    """Each way of taking gradients gives those of the model, call after call."""
    model, expected = expected_for(name, reentrant)
    apply, params, buffers = tdf.functional(model)
    loss = loss_of(apply, buffers)
    found = [WAYS[way](loss, params).detach() for _ in range(3)]

    tdf.assert_close(tdf.stack(found), tdf.stack([expected.detach()] * 3))


RUNS = []


class Layer(nn.Module):
    """A layer with statistics, whose runs are counted."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        RUNS.append(1)
        return torch.tanh(self.norm(self.linear(x)))


class Stack(nn.Module):
    """Layers that run by a function: `run(model, layer, x)`."""

    def __init__(self, run, **attributes):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.run = run
        vars(self).update(attributes)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = self.run(self, layer, x)
        return x.square().sum()


def marked(model, layer, x):
    """As for the reentrant kind, whose inputs must require grad."""
    return model.again(layer, x.requires_grad_())


HELD = {
    "not reentrant": lambda: Stack(
        lambda m, f, x: m.again(f, x), again=functools.partial(checkpoint, use_reentrant=False)
    ),
    "reentrant": lambda: Stack(marked, again=functools.partial(checkpoint, use_reentrant=True)),
    "with its options": lambda: Stack(
        lambda m, f, x: m.again(f, x, use_reentrant=False, preserve_rng_state=False), again=checkpoint
    ),
    "in a dict": lambda: Stack(lambda m, f, x: m.kept["f"](f, x, use_reentrant=False), kept={"f": checkpoint}),
    "tdf.checkpoint": lambda: Stack(lambda m, f, x: tdf.checkpoint(f)(x)),
}
NAMED = {
    "not reentrant, by name": lambda: Stack(lambda m, f, x: checkpoint(f, x, use_reentrant=False)),
    "reentrant, by name": lambda: Stack(lambda m, f, x: checkpoint(f, x, use_reentrant=True)),
    "in sequence": lambda: Stack(lambda m, f, x: checkpoint_sequential([f, torch.sin], 2, x, use_reentrant=False)),
}  # fmt: skip
X = torch.randn(5, 3, dtype=torch.float64)


def reference(model):
    """The gradients and buffers of the module itself."""
    model.zero_grad()
    model(X).backward()
    params = tdf.split(tdf.from_module(model))[0]
    return params.apply(lambda p: p.grad.clone()).detach()


def recorded(fn, *args):
    """How often layers ran in a call, and its result."""
    RUNS.clear()
    out = fn(*args)
    return len(RUNS), out


@pytest.mark.parametrize("make", [*HELD.values(), *NAMED.values()], ids=[*HELD, *NAMED])
def test_backward(make):
    """Each part runs twice, with the weights of its call, also when calls and backwards are interleaved."""
    model = make().double()
    apply, params, buffers = tdf.functional(model)
    expected = reference(model)
    other = reference_of(model, params * 0.5)
    forwards, backwards, found = [], [], []
    for _ in range(2):
        lives = [tree.apply(lambda p: p.clone().requires_grad_()) for tree in (params, params * 0.5)]
        runs, losses = recorded(lambda lives=lives: [apply(live, X, buffers=buffers) for live in lives])
        forwards.append(runs)
        runs, _ = recorded(lambda losses=losses: [loss.backward() for loss in losses])
        backwards.append(runs)
        found += [live.apply(lambda p: p.grad).detach() for live in lives]

    assert forwards == [6, 6]
    assert backwards == [6, 6]
    tdf.assert_close(tdf.stack(found), tdf.stack([expected, other] * 2))


def reference_of(model, params):
    """The gradients of the module with other weights."""
    buffers = tdf.split(tdf.from_module(model))[1]
    with tdf.combine(params.apply(nn.Parameter), buffers.clone()).to_module(model):
        return reference(model)


@pytest.mark.parametrize("make", [*HELD.values(), *NAMED.values()], ids=[*HELD, *NAMED])
def test_inside_transforms(make):
    """A checkpoint recomputes inside `torch.func`: one in an attribute, by its name, or ours."""
    model = make().double()
    apply, params, buffers = tdf.functional(model)
    expected, other = reference(model), reference_of(model, params * 0.5)
    many, many_buffers = tdf.stack([params, params * 0.5]), tdf.stack([buffers] * 2)

    def loss(params, buffers):
        return apply(params, X, buffers=buffers)

    ways = {
        "grad": lambda: tdf.grad(loss)(params, buffers),
        "vmap of grad": lambda: vmap(grad(loss))(many, many_buffers),
        "backward of vmap": lambda: by_backward(lambda p: vmap(loss)(p, many_buffers).sum(), many).detach(),
    }
    first, second = [{way: recorded(run) for way, run in ways.items()} for _ in range(2)]
    both = tdf.stack([expected, other])

    assert [found["grad"][0] for found in (first, second)] == [6, 6]
    assert [found["vmap of grad"][0] for found in (first, second)] == [6, 6]
    tdf.assert_close(tdf.stack([first["grad"][1], second["grad"][1]]), tdf.stack([expected] * 2))
    tdf.assert_close(tdf.stack([first["vmap of grad"][1], second["vmap of grad"][1]]), tdf.stack([both] * 2))
    tdf.assert_close(tdf.stack([first["backward of vmap"][1], second["backward of vmap"][1]]), tdf.stack([both] * 2))


@pytest.mark.parametrize("make", [*HELD.values(), NAMED["in sequence"]], ids=[*HELD, "in sequence"])
def test_buffers_are_updated_once(make):
    """The buffers that a call returns are those after one run, also when the graph has run again."""
    model = make().double()
    apply, params, buffers = tdf.functional(model)
    with torch.no_grad():
        expected = apply.with_buffers(params, buffers, X)[1]

    live = params.apply(lambda p: p.clone().requires_grad_())
    out, new = apply.with_buffers(live, buffers, X)
    out.backward()
    tdf.assert_close(new.detach(), expected)
    _, new = tdf.grad(lambda p: apply.with_buffers(p, buffers, X), has_aux=True)(params)
    tdf.assert_close(new, expected)


@pytest.mark.parametrize("way", [by_backward, lambda loss, params: tdf.grad(loss)(params)], ids=["backward", "grad"])
def test_weights_are_released(way):
    """After the derivative nothing holds the weights of the call."""
    apply, params, buffers = tdf.functional(HELD["not reentrant"]().double())

    def held_by_a_call():
        """The leaves of a call's own tree that are alive after it."""
        tree = params.clone()
        way(lambda p: apply(p, X, buffers=buffers), tree)
        refs = [weakref.ref(leaf) for leaf in tree.leaves()]
        del tree
        gc.collect()
        return [ref for ref in refs if ref() is not None]

    assert [held_by_a_call() for _ in range(2)] == [[], []]


class Dropping(nn.Module):
    """Layers with dropout, three draws a layer, run by a function."""

    def __init__(self, run):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.run = run
        self.again = functools.partial(checkpoint, use_reentrant=False)

    def forward(self, x):
        def part(layer, x):
            return F.dropout(torch.tanh(layer(F.dropout(x, 0.3))), 0.2) + torch.randn_like(x)

        x = self.first(x)
        for layer in self.layers:
            x = self.run(self, functools.partial(part, layer), F.dropout(x, 0.1))
        return x.square().sum()


RUNS_OF_PARTS = {
    "tdf.checkpoint": lambda m, f, x: tdf.checkpoint(f)(x),
    "nested": lambda m, f, x: tdf.checkpoint(lambda x: tdf.checkpoint(f)(F.dropout(x, 0.2)))(x),
    "held": lambda m, f, x: m.again(f, x),
}
# torch's own function, by its name.
RUNS_BY_NAME = {
    "by name": lambda m, f, x: checkpoint(f, x, use_reentrant=False),
    "reentrant": lambda m, f, x: checkpoint(f, x, use_reentrant=True),
    "nested by name": lambda m, f, x: checkpoint(
        lambda x: checkpoint(f, F.dropout(x, 0.2), use_reentrant=False), x, use_reentrant=False
    ),
    "nested reentrant": lambda m, f, x: checkpoint(
        lambda x: checkpoint(f, F.dropout(x, 0.2), use_reentrant=True), x, use_reentrant=True
    ),
}
DRAWN = {
    "backward": lambda loss, p, key: by_backward(lambda p: loss(p, key), p),
    "grad": lambda loss, p, key: grad(loss)(p, key),
    "grad of grad": lambda loss, p, key: grad(lambda p: tdf.ravel(grad(loss)(p, key))[0].square().sum())(p),
    "vmap over keys": lambda loss, p, key: vmap(grad(loss), (None, 0))(p, tdf.random.split(key, 3)),
    "vmap over members": lambda loss, p, key: vmap(grad(loss), (0, None))(tdf.stack([p, p * 2]), key),
    "backward of vmap": lambda loss, p, key: by_backward(
        lambda p: vmap(loss)(p, tdf.random.split(key, 2)).sum(), tdf.stack([p, p * 2])
    ),
    "jit": lambda loss, p, key: tdf.jit(vmap(grad(loss), (None, 0)))(p, tdf.random.split(key, 3)),
    "compiled": lambda loss, p, key: by_backward(
        lambda p: torch.compile(loss, fullgraph=True, backend="aot_eager")(p, key), p
    ),
    "Ensemble": lambda loss, p, key: loss.members(tdf.stack([p, p * 2]), key),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        # Making a trace takes seconds.
        pytest.param(name, way, marks=[pytest.mark.slow] * (way in ("jit", "compiled")))
        for names, ways in (
            (RUNS_OF_PARTS, [each for each in DRAWN if each != "compiled"]),
            (RUNS_BY_NAME, DRAWN),
        )
        for name in names
        for way in ways
    ],
)
# Torch's own warning of a reentrant checkpoint inside of another.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_draws_by_a_key_are_repeated(name, way):
    """The second run drops what the first one did: the gradients are those without a checkpoint."""
    found, way = [], DRAWN[way]
    for part in (
        (RUNS_OF_PARTS | RUNS_BY_NAME)[name],
        lambda m, f, x: f(F.dropout(x, 0.2) if "nested" in name else x),
    ):
        torch.manual_seed(0)
        apply, params, _ = tdf.functional(Dropping(part).double())

        def loss(params, key, apply=apply):
            return apply(params, torch.ones(5, 8, dtype=torch.float64), rng=key)

        def members(tree, key, apply=apply):
            x = torch.ones(5, 8, dtype=torch.float64)
            return grad(lambda tree: tdf.Ensemble(apply)(tree, x, rng=key).sum())(tree)

        loss.members = members
        found.append(way(loss, params, tdf.random.key(3)).detach())

    tdf.assert_close(*found)


class Forces(nn.Module):
    """A potential by recomputed layers, and its gradient by the inputs."""

    def __init__(self):
        super().__init__()
        self.layer, self.run = nn.Linear(3, 3), torch.utils.checkpoint.checkpoint

    def forward(self, x):
        def potential(x):
            return self.run(self.layer, x, use_reentrant=False).tanh().sum()

        return torch.func.grad(potential)(x)


def test_a_gradient_inside_forward():
    """What transforms mark inside of forward stays marked: without it their gradients are 0, in silence."""
    module = Forces().double()
    apply, params, _ = tdf.functional(module)
    x = torch.randn(2, 3, dtype=torch.float64)

    def wanted(params):
        def potential(x):
            return (x @ params["layer", "weight"].mT + params["layer", "bias"]).tanh().sum()

        return torch.func.grad(potential)(x).square().sum()

    found = tdf.grad(lambda params: apply(params, x).square().sum())(params)
    tdf.assert_close(found, tdf.grad(wanted)(params))
