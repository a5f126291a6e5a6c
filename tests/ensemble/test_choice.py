"""`auto` chooses by the rule that `plan()` prints, and falls back to the loop with the reason."""

import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from tdfunc import Ensemble, UnsupportedError
from tests.ensemble.models import Returns, ensemble_of, line, make_mlp, make_resnet
from tests.helpers import run_in_threads


def test_plan_names_the_way_of_the_last_call():
    """`plan` gives the way, the reason and the rule; repeated calls keep to vmap."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(4)])
    lines = [line(ensemble)]
    for _ in range(4):
        ensemble(tree, torch.ones(5, 3))
        lines.append(line(ensemble))

    assert lines == ["auto: not called yet.", *["vmap, 4 members: by the rule."] * 4]
    assert 'how="traced"' in ensemble.plan()


def test_one_member_runs_without_vmap():
    """One member runs as the loop, and its trace has no grouped convolutions."""
    ensemble, tree = ensemble_of([make_resnet().eval()])
    traced = Ensemble(ensemble.apply, "traced")
    x = torch.ones(2, 3, 8, 8)
    ensemble(tree, x)
    traced(tree, x)
    graph = next(iter(traced._jitted.values())).graph(
        ensemble.apply.leaves(tree, None, torch.Size([1])), (x,), {}, None
    )

    assert line(ensemble) == "loop, 1 member: one member needs no vmap."
    groups = [node.args[-1] for node in graph.graph.nodes if "convolution" in str(node.target)]
    assert groups == [1] * 7


OTHER_CALLS = {
    "same": lambda run, tree, x: run(tree, x[0]),
    "data of each member": lambda run, tree, x: run(tree, x, in_dims=0),
    "other data": lambda run, tree, x: run(tree, x[1]),
    "fewer members": lambda run, tree, x: run(tree[:2], x[0]),
    "with buffers": lambda run, tree, x: run.with_buffers(tree, None, x[0])[0],
    "by keyword": lambda run, tree, x: run(tree, input=x[0]),
    "other weights": lambda run, tree, x: run(tree * 0.0, x[0]),
}


@pytest.fixture
def recorded():
    """A function that makes an ensemble that has run four times, with its models, tree and data."""

    def make(how):
        models = [make_mlp().double() for _ in range(3)]
        ensemble, tree = ensemble_of(models, how)
        x = torch.randn(3, 5, 3, dtype=torch.float64)
        with torch.no_grad():
            for _ in range(4):
                ensemble(tree, x[0])
        return models, ensemble, tree, x

    return make


@torch.no_grad()
@pytest.mark.parametrize("how", ["auto", "traced"])
def test_the_next_call_may_take_other_arguments(how, recorded):
    """A trace is replayed only for the members, data, dimensions and results that it was made for."""
    models, ensemble, tree, x = recorded(how)
    one, other = [torch.stack([model(rows) for model in models]) for rows in x[:2]]
    own = torch.stack([model(rows) for model, rows in zip(models, x, strict=True)])

    found = {name: call(ensemble, tree, x) for name, call in OTHER_CALLS.items()}
    assert_close(
        found,
        {
            "same": one,
            "data of each member": own,
            "other data": other,
            "fewer members": one[:2],
            "with buffers": one,
            "by keyword": one,
            "other weights": one * 0.0,
        },
    )


@torch.no_grad()
@pytest.mark.parametrize("how", ["auto", "traced"])
def test_the_next_call_may_be_of_another_dtype(how, recorded):
    """A trace is not replayed for another dtype."""
    models, ensemble, tree, x = recorded(how)

    expected = torch.stack([model(x[0]) for model in models])
    assert_close(ensemble(tree.float(), x[0].float()).double(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("how", ["auto", "traced"])
def test_the_next_call_may_be_wrong(how, recorded):
    """A trace is not replayed for data of a wrong size, which raises as torch does."""
    _, ensemble, tree, x = recorded(how)

    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|Expected size"):
        ensemble(tree, x[0, :, :2])


@pytest.mark.parametrize("rng", [None, 0], ids=["plain", "rng"])
def test_autocast_runs_the_loop(rng):
    """Outputs have the dtype of the members' own, though torch's vmap of a linear layer loses autocast."""
    models = [make_mlp() for _ in range(3)]
    ensemble, tree = ensemble_of(models)
    x = torch.ones(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        outs = [ensemble(tree, x, rng=rng) for _ in range(4)]
        expected = torch.stack([model(x) for model in models])
        said = line(ensemble)
    ensemble(tree, x)

    assert all(out.dtype == torch.bfloat16 for out in outs)
    assert_close(outs, [expected] * 4)
    assert said == "loop, 3 members: autocast is on, which torch's vmap does not keep."
    assert line(ensemble) == "vmap, 3 members: by the rule."


def test_autocast_of_another_device():
    """Autocast of a device that the call does not use leaves the choice as it is."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)])
    torch.set_autocast_enabled("cuda", True)
    try:
        ensemble(tree, torch.ones(5, 3))
    finally:
        torch.set_autocast_enabled("cuda", False)

    assert line(ensemble) == "vmap, 3 members: by the rule."


SCALE = 1.0


class Scaled(nn.Module):
    """Reads a global by way of a method."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x) * self.scale()

    def scale(self):
        return SCALE


@pytest.mark.parametrize("how", ["traced", "auto"])
def test_globals_are_part_of_the_trace(how, monkeypatch):
    """A global that forward reads is part of the key of its trace."""
    models = [Scaled() for _ in range(3)]
    ensemble, tree = ensemble_of(models, how)
    x, found, scales = torch.ones(5, 3), [], (1.0, 2.0, 2.0, 1.0, 3.0)
    for scale in scales:
        monkeypatch.setitem(globals(), "SCALE", scale)
        found.append(ensemble(tree, x))

    plain = torch.stack([model.linear(x) for model in models])
    assert_close(found, [plain * scale for scale in scales])


@pytest.mark.parametrize("how", ["auto", "vmap", "loop", "traced"])
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("make", [lambda: make_mlp(0.5).train(), lambda: Returns(F.dropout).eval()])
def test_draws_without_rng_are_refused(make, how, members):
    """A forward that draws, in training or in evaluation, needs `rng=` in every way to run it."""
    ensemble, tree = ensemble_of([make() for _ in range(members)], how)

    with pytest.raises(UnsupportedError, match="no rng was given"):
        ensemble(tree, torch.ones(5, 3))


def test_an_ensemble_is_pickled_without_its_traces():
    """A copy in another process makes its own traces."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)], "traced", chunk_size=2)
    expected = ensemble(tree, torch.ones(5, 3))
    copy = pickle.loads(pickle.dumps(ensemble))

    assert repr(copy) == repr(ensemble)
    assert torch.equal(copy(tree, torch.ones(5, 3)), expected)


@pytest.mark.parametrize("how", ["auto", "vmap", "traced"])
def test_auto_chunks_equal_the_whole(how):
    """Of activations that leave the cache, for each way to run the members."""
    ensemble, tree = ensemble_of([Outer() for _ in range(12)], how, chunk_size="auto")
    whole = Ensemble(ensemble.apply, how)
    x = torch.randn(600)
    torch.testing.assert_close(ensemble(tree, x), whole(tree, x))


def test_auto_chunks_have_activations_in_the_cache():
    """Of 1.4 MB a member, in chunks of two."""
    ensemble, tree = ensemble_of([Outer() for _ in range(12)], chunk_size="auto")
    seen = []
    run = ensemble._map
    ensemble._map = lambda call: seen.append(call.members) or run(call)
    ensemble(tree, torch.randn(600))
    # The first call is recorded, which shows the activations.
    assert seen[1:] == [2] * 6


def test_auto_chunks_of_what_cannot_be_recorded():
    """A forward that reads values runs without chunks."""
    ensemble, tree = ensemble_of([Reading() for _ in range(3)], chunk_size="auto")
    assert ensemble(tree, torch.ones(2)).shape == (3, 2)


# -- what vmap or a trace cannot run ----------------------------------------------------------------------------


class Outer(nn.Module):
    """An activation of n by n numbers for n."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return (self.weight * x).outer(x).tanh().sum(-1)


class Reading(nn.Module):
    """A forward that reads a value of its argument."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return self.weight * x if x.sum().item() > 0 else x


FALLBACKS = {
    "item": (lambda: Returns(lambda y: y * y.sum().item()), "item"),
    "branch": (lambda: Returns(lambda y: y if y.sum() > 0 else -y), "data-dependent"),
    "average": (lambda: nn.BatchNorm1d(3, momentum=None), "item"),
}


@pytest.mark.parametrize("name", FALLBACKS)
@pytest.mark.filterwarnings("ignore:Ensemble. forward wrote the buffers:UserWarning")
def test_falls_back_to_the_loop(name):
    """A forward that vmap cannot run goes to the loop, and the plan gives the reason."""
    make, reason = FALLBACKS[name]
    models = [make() for _ in range(3)]
    ensemble, tree = ensemble_of(models)
    x = torch.arange(15.0).sin().reshape(5, 3)
    found, expected, plans = [], [], []
    for _ in range(3):
        found.append(torch.utils._pytree.tree_leaves(ensemble(tree, x)))
        outs = [torch.utils._pytree.tree_leaves(model(x)) for model in models]
        expected.append([torch.stack(ys) for ys in zip(*outs, strict=True)])
        plans.append(line(ensemble))

    assert_close(found, expected)
    assert [plan.startswith("loop, 3 members: vmap cannot run the forward: ") for plan in plans] == [True] * 3
    assert [reason in plan for plan in plans] == [True] * 3


def test_a_refusal_is_one_of_its_kind_of_call():
    """A call that vmap cannot run sends only calls of its kind to the loop."""
    models = [Returns(lambda y, sync=False: y * y.sum().item() if sync else y) for _ in range(3)]
    ensemble, tree = ensemble_of(models)
    x, lines, found, syncs = torch.ones(5, 3), [], [], (True, False, True)
    for sync in syncs:
        found.append(ensemble(tree, x, sync=sync))
        lines.append(line(ensemble).split(",")[0])

    assert_close(found, [torch.stack([model(x, sync=sync) for model in models]) for sync in syncs])
    assert lines == ["loop", "vmap", "loop"]


def test_unhashable_arguments():
    """A keyword without a hash is taken by every way but the trace."""
    models = [Returns(lambda y, scale: y * scale.value) for _ in range(3)]
    ensemble, tree = ensemble_of(models)
    x, scales = torch.ones(5, 3), [SimpleNamespace(value=i) for i in range(5)]
    found = [ensemble(tree, x, scale=scale) for scale in scales]

    assert_close(found, [torch.stack([model(x, scale=scale) for model in models]) for scale in scales])
    assert line(ensemble) == "vmap, 3 members: by the rule."


@pytest.mark.parametrize("how", ["auto", "traced"])
def test_threads_share_an_ensemble(how):
    """Calls from several threads keep their members and traces apart."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)], how)
    trees = [tree * scale for scale in (0.5, 1.0, 2.0, 3.0)]
    x = torch.ones(5, 3)
    expected = [Ensemble(ensemble.apply, "loop")(tree, x) for tree in trees]
    wrong = []
    barrier = threading.Barrier(4)

    def work(i):
        barrier.wait()
        for _ in range(20):
            if not torch.allclose(ensemble(trees[i], x), expected[i], atol=1e-6):
                wrong.append(i)

    run_in_threads(work, range(4))

    assert wrong == []


def halve(module, grads, *_):
    """A hook that changes the gradient."""
    return (grads[0] * 0.5,)


HOOKS = {
    "full": lambda layer: layer.register_full_backward_hook(halve),
    "before": lambda layer: layer.register_full_backward_pre_hook(halve),
    "old": lambda layer: layer.register_backward_hook(lambda module, given, out: (given[0], *given[1:])),
}


def make_hooked(kind):
    """An MLP in float64 whose last layer has a hook of the backward pass."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    HOOKS[kind](model[2])
    return model


@pytest.mark.parametrize("kind", ["full", "before"])
def test_backward_hooks_change_the_gradients_of_each_member(kind):
    """Gradients of `auto` equal the gradients of the modules, in which vmap would leave out the hooks."""
    models = [make_hooked(kind) for _ in range(3)]
    ensemble, tree = ensemble_of(models)
    x = torch.randn(5, 3, dtype=torch.float64)
    live = tree.apply(lambda leaf: leaf.detach().clone().requires_grad_())
    ensemble(live, x).square().sum().backward()
    for model in models:
        model(x).square().sum().backward()

    assert_close(live["0", "weight"].grad, torch.stack([model[0].weight.grad for model in models]))


@pytest.mark.parametrize("kind", HOOKS)
def test_modules_with_backward_hooks_run_in_a_loop(kind):
    """The plan names the module of the hook."""
    ensemble, tree = ensemble_of([make_hooked(kind) for _ in range(3)])
    ensemble(tree, torch.ones(5, 3, dtype=torch.float64))

    assert line(ensemble).startswith("loop, 3 members: vmap cannot run the forward: apply: the backward hooks of ['2']")


def test_backward_hooks_do_not_matter_without_a_gradient():
    """Under no_grad the members run in vmap; a later call with gradients does not."""
    ensemble, tree = ensemble_of([make_hooked("full") for _ in range(3)])
    x = torch.ones(5, 3, dtype=torch.float64)
    with torch.no_grad():
        ensemble(tree, x)
    without = line(ensemble)
    ensemble(tree, x)

    assert (without[:4], line(ensemble)[:4]) == ("vmap", "loop")


@pytest.mark.parametrize("outer", [torch.vmap, lambda f: torch.vmap(torch.func.grad(lambda p: f(p).sum()))])
def test_apply_refuses_backward_hooks_in_vmap(outer):
    """Also without an Ensemble, the gradient would be another one."""
    models = [make_hooked("full") for _ in range(3)]
    ensemble, tree = ensemble_of(models)
    x = torch.ones(5, 3, dtype=torch.float64)

    with pytest.raises(UnsupportedError, match=r"backward hooks of \['2'\]"):
        outer(lambda p: ensemble.apply(p, x))(tree.detach())
