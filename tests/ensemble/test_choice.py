"""`auto` chooses by the rule that `plan()` prints, and falls back to the loop with the reason."""

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tdfunc import CaptureError, Ensemble, UnsupportedError, functional, split, stack_modules
from tdfunc.ensemble import ensemble as module_under_test
from tests.ensemble.models import Returns, ensemble_of, line, make_mlp, make_resnet, make_transformer


def test_plan_before_and_after_calls():
    """A user could not see which way ran, why, and by which rule."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(4)])
    lines = [line(ensemble)]
    for _ in range(4):
        ensemble(tree, torch.ones(5, 3))
        lines.append(line(ensemble))

    assert lines == [
        "auto: not called yet.",
        "vmap, 4 members: call 1 with these shapes; traced from call 3 on.",
        "vmap, 4 members: call 2 with these shapes; traced from call 3 on.",
        "traced, 4 members: the trace for these shapes is replayed.",
        "traced, 4 members: the trace for these shapes is replayed.",
    ]
    assert "Measured on one CPU thread" in ensemble.plan()


@pytest.mark.parametrize("how", ["loop", "vmap", "traced"])
def test_a_way_that_was_asked_for(how):
    """Another way than the one asked for would run."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(4)], how)
    ensemble(tree, torch.ones(5, 3))

    assert line(ensemble) == f"{how}, 4 members: as asked for."
    assert repr(ensemble) == f"Ensemble(Sequential, how={how!r}, chunk_size=None)"


def test_one_member_runs_without_vmap():
    """One member would pay for the vmap, or for grouped convolutions in its trace."""
    ensemble, tree = ensemble_of([make_resnet().eval()])
    x = torch.ones(2, 3, 8, 8)
    ways = [(ensemble(tree, x), line(ensemble).split(",")[0])[1] for _ in range(4)]
    graph = next(iter(ensemble._jitted.values())).graph(ensemble.apply.leaves(tree, None, torch.Size([1])), (x,), {})

    assert ways == ["loop", "loop", "traced", "traced"]
    groups = [node.args[-1] for node in graph.graph.nodes if "convolution" in str(node.target)]
    assert groups == [1] * 7


@contextmanager
def global_hook():
    """A hook that torch keeps for all modules."""
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


ELSEWHERE = {
    "a hook of all modules": (global_hook, "vmap, 3 members: the modules have hooks"),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "loop, 3 members: autocast is on"),
    "a dual level": (torch.autograd.forward_ad.dual_level, "vmap, 3 members: gradients or an outer transform"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_the_next_call_runs_in(name):
    """The trace of the last call would be replayed where another way is to be chosen."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)])
    x = torch.ones(5, 3)
    inside, text = ELSEWHERE[name]
    with torch.no_grad():
        for _ in range(4):
            ensemble(tree, x)
        with inside():
            ensemble(tree, x)
            said = line(ensemble)
        ensemble(tree, x)

    assert said.startswith(text)
    assert line(ensemble) == "traced, 3 members: the trace for these shapes is replayed."


def test_the_next_call_may_take_other_arguments():
    """The trace of the last call would be replayed for members, data, dimensions or results that it is not of."""
    models = [make_mlp().double() for _ in range(3)]
    ensemble, tree = ensemble_of(models)
    x = torch.randn(3, 5, 3, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(4):
            ensemble(tree, x[0])
        expected = torch.stack([model(x[0]) for model in models])
        own = torch.stack([model(rows) for model, rows in zip(models, x, strict=True)])

        assert_close(ensemble(tree, x[0]), expected)
        assert_close(ensemble(tree, x, in_dims=0), own)
        assert_close(ensemble(tree, x[1]), torch.stack([model(x[1]) for model in models]))
        assert_close(ensemble(tree[:2], x[0]), expected[:2])
        assert_close(ensemble(tree.float(), x[0].float()).double(), expected, rtol=1e-4, atol=1e-5)
        assert_close(ensemble.with_buffers(tree, None, x[0])[0], expected)
        assert_close(ensemble(tree, input=x[0]), expected)
        assert_close(ensemble(tree * 0.0, x[0]), expected * 0.0)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            ensemble(tree, x[0, :, :2])


def test_options_may_change_between_calls():
    """The trace of the last call would be replayed although chunks, or another way, were asked for since."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)])
    x = torch.ones(5, 3)
    for _ in range(4):
        ensemble(tree, x)
    ensemble.chunk_size = 2
    ensemble(tree, x)
    chunks = line(ensemble)
    ensemble.how = "loop"
    ensemble(tree, x)

    assert chunks == "vmap, 3 members: the members run in chunks of 2."
    assert line(ensemble) == "loop, 3 members: as asked for."


def test_gradients_and_transforms_are_not_replayed():
    """Autograd cannot look into a replay."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)])
    for _ in range(4):
        torch.func.grad(lambda tree: ensemble(tree, torch.ones(5, 3)).sum())(tree)

    assert line(ensemble) == "vmap, 3 members: gradients or an outer transform go through the call."


def test_data_that_requires_grad_is_not_replayed():
    """Gradients with respect to the data would be refused from the third call on."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)])
    x = torch.ones(5, 3, requires_grad=True)
    for _ in range(4):
        ensemble(tree, x).sum().backward()

    assert line(ensemble).startswith("vmap, 3 members: gradients")
    with torch.no_grad():
        outs = [ensemble(tree, x) for _ in range(3)]
    assert line(ensemble).startswith("traced")
    assert not outs[-1].requires_grad


def test_chunks_are_not_replayed():
    """A trace of all chunks would hold the memory that chunks are to save."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)], chunk_size=2)
    for _ in range(4):
        ensemble(tree, torch.ones(5, 3))

    assert line(ensemble) == "vmap, 3 members: the members run in chunks of 2."


def test_hooks_are_called_at_every_call():
    """A replay would not call the modules' hooks."""
    seen = []
    models = [nn.Linear(3, 2) for _ in range(3)]
    hook = lambda *_: seen.append(1)  # noqa: E731
    for model in models:
        model.register_forward_hook(hook)
    ensemble, tree = Ensemble(functional(models[0])[0]), stack_modules(models)
    for _ in range(5):
        ensemble(tree, torch.ones(5, 3))

    assert len(seen) == 5
    assert line(ensemble) == "vmap, 3 members: the modules have hooks, which a replay would not call."


@pytest.mark.parametrize("rng", [None, 0], ids=["plain", "rng"])
def test_autocast_runs_the_loop(rng):
    """The vmap of a linear layer loses autocast: outputs would have another dtype than those of the members."""
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
    assert line(ensemble).startswith("vmap, 3 members: call 1 ")


def test_autocast_of_another_device():
    """Autocast of a device that the call does not use would slow it down."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)])
    torch.set_autocast_enabled("cuda", True)
    try:
        ensemble(tree, torch.ones(5, 3))
    finally:
        torch.set_autocast_enabled("cuda", False)

    assert line(ensemble).startswith("vmap, 3 members: call 1 ")


def test_hooks_of_all_modules_are_called():
    """A replay would not call a hook that torch keeps for all modules."""
    seen = []
    ensemble, tree = ensemble_of([nn.Linear(3, 2) for _ in range(3)])
    for _ in range(4):
        ensemble(tree, torch.ones(5, 3))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        ensemble(tree, torch.ones(5, 3))
    finally:
        handle.remove()

    assert seen == [1]
    assert line(ensemble) == "vmap, 3 members: the modules have hooks, which a replay would not call."


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
    """A replay would keep the value that a global had when it was recorded."""
    models = [Scaled() for _ in range(3)]
    ensemble, tree = ensemble_of(models, how)
    x = torch.ones(5, 3)
    for scale in (1.0, 2.0, 2.0, 2.0, 2.0, 1.0, 3.0):
        for _ in range(3):
            monkeypatch.setitem(globals(), "SCALE", scale)
            expected = torch.stack([model.linear(x) for model in models]) * scale

            assert_close(ensemble(tree, x), expected)


def test_traces_are_bounded(monkeypatch):
    """Data of ever new shapes would be traced again and again, a second each."""
    monkeypatch.setattr(module_under_test, "_MOST_TRACES", 2)
    monkeypatch.setattr(module_under_test, "_MOST_COUNTS", 4)
    ensemble, tree = ensemble_of([nn.Linear(3, 2) for _ in range(3)])
    for rows in range(1, 9):
        for _ in range(4):
            ensemble(tree, torch.ones(rows, 3))

    assert line(ensemble) == "vmap, 3 members: 2 other shapes have traces."
    ensemble(tree, torch.ones(1, 3))
    assert line(ensemble).startswith("traced")
    assert len(ensemble._calls) <= 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_trace_that_repeats_each_member_is_dropped():
    """The replay of operations without a batching rule is slower than their vmap, with many members."""
    models = [make_transformer().eval() for _ in range(32)]
    ensemble, tree = ensemble_of(models)
    x = torch.ones(2, 5, 8)
    with torch.no_grad():
        ways = [(ensemble(tree, x), line(ensemble).split(",")[0])[1] for _ in range(5)]
        out = ensemble(tree, x)

        assert_close(out, torch.stack([model(x) for model in models]))
    assert ways == ["vmap", "vmap", "traced", "vmap", "vmap"]
    assert "repeats them for each member" in line(ensemble)


# -- what vmap or a trace cannot run ----------------------------------------------------------------------------

FALLBACKS = {
    "lstm": (lambda: nn.LSTM(3, 4), "lstm"),
    "gru": (lambda: nn.GRU(3, 4), "gru"),
    "item": (lambda: Returns(lambda y: y * y.sum().item()), "item"),
    "branch": (lambda: Returns(lambda y: y if y.sum() > 0 else -y), "data-dependent"),
    "average": (lambda: nn.BatchNorm1d(3, momentum=None), "item"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_falls_back_to_the_loop(name):
    """A forward that vmap cannot run could not be an ensemble at all, or nobody would know why it is slow."""
    make, reason = FALLBACKS[name]
    models = [make() for _ in range(3)]
    ensemble, tree = ensemble_of(models)
    x = torch.arange(15.0).sin().reshape(5, 3)
    for _ in range(3):
        out = torch.utils._pytree.tree_leaves(ensemble(tree, x))
        expected = [torch.utils._pytree.tree_leaves(model(x)) for model in models]

        assert_close(out, [torch.stack(ys) for ys in zip(*expected, strict=True)])
        assert line(ensemble).startswith("loop, 3 members: vmap cannot run the forward: ")
        assert reason in line(ensemble)


def test_spectral_norm_in_training():
    """Its power iteration, which updates buffers in place, would fail or be lost."""
    models = [nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)).train() for _ in range(3)]
    ensemble, tree = ensemble_of(models)
    params, buffers = split(tree)
    x = torch.ones(5, 3)
    out, new = ensemble.with_buffers(params, buffers, x)

    assert_close(out, torch.stack([model(x) for model in models]))
    assert_close(
        new["parametrizations", "weight", "0", "_u"], torch.stack([m.parametrizations.weight[0]._u for m in models])
    )
    assert line(ensemble).startswith("loop, 3 members: vmap cannot run the forward: ")


def test_what_cannot_be_traced_stays_with_vmap():
    """A forward that uses a tensor of its own would be refused by the trace, or fall to the slow loop."""
    constant = torch.ones(2)
    models = [Returns(lambda y: y + constant) for _ in range(3)]
    ensemble, tree = ensemble_of(models)
    x = torch.ones(5, 3)
    for _ in range(4):
        assert_close(ensemble(tree, x), torch.stack([model(x) for model in models]))
    assert line(ensemble).startswith("vmap, 3 members: the forward is not traced: ")
    assert "not one of its arguments" in line(ensemble)


def test_asked_for_ways_do_not_fall_back():
    """how="traced" or "vmap" would run something else without saying so."""
    constant = torch.ones(2)
    traced, tree = ensemble_of([Returns(lambda y: y + constant) for _ in range(3)], "traced")
    vmapped, lstms = ensemble_of([nn.LSTM(3, 4) for _ in range(3)], "vmap")

    with pytest.raises(CaptureError):
        traced(tree, torch.ones(5, 3))
    with pytest.raises(RuntimeError, match="lstm"):
        vmapped(lstms, torch.ones(5, 3))


def test_traced_refuses_gradients_and_rng():
    """A replay would give no gradients, or draw the same numbers for every seed."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)], "traced")

    with pytest.raises(UnsupportedError, match="requires grad"):
        ensemble(tree.apply(lambda leaf: leaf.requires_grad_()), torch.ones(5, 3))
    with pytest.raises(UnsupportedError, match=r"(?s)how='traced'.*rng=None.*rng=0.*how='vmap'"):
        ensemble(tree, torch.ones(5, 3), rng=0)


def test_a_refusal_is_one_of_its_kind_of_call():
    """One call that vmap cannot run would send all others to the loop."""
    models = [Returns(lambda y, sync=False: y * y.sum().item() if sync else y) for _ in range(3)]
    ensemble, tree = ensemble_of(models)
    x = torch.ones(5, 3)
    lines = []
    for sync in (True, False, True):
        assert_close(ensemble(tree, x, sync=sync), torch.stack([model(x, sync=sync) for model in models]))
        lines.append(line(ensemble).split(",")[0])

    assert lines == ["loop", "vmap", "loop"]


def test_unhashable_arguments():
    """A keyword without a hash would be an error, though every way but the trace can run it."""
    models = [Returns(lambda y, scale: y * scale.value) for _ in range(3)]
    ensemble, tree = ensemble_of(models)
    x = torch.ones(5, 3)
    for i in range(5):
        scale = Unhashable(i)

        assert_close(ensemble(tree, x, scale=scale), torch.stack([model(x, scale=scale) for model in models]))
    assert line(ensemble).startswith("vmap, 3 members: the forward is not traced: ")


class Unhashable:
    """Equal by value, so without a hash."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Unhashable) and self.value == other.value


def test_threads_share_an_ensemble():
    """Calls from several threads would mix their members or their traces."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)])
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

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert line(ensemble).startswith("traced")
