"""Forwards that write their parameters: the caller's leaves stay as they were, and gradients reach them."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tdfunc import Ensemble, from_module, functional, jit, stack_modules
from tdfunc.modules.functional import Apply
from tests.helpers import assert_pure

pytestmark = pytest.mark.filterwarnings(
    "ignore:apply. forward of (Writes|Runs|ModuleList|Embedding|EmbeddingBag|Branches) (writes|scales):UserWarning"
)
IDS = torch.tensor([0, 2])


class Writes(nn.Module):
    """A weight, and a function that may write it before it is read."""

    def __init__(self, write):
        super().__init__()
        self.write, self.w = write, nn.Parameter(torch.tensor([[1.0, -2.0, 3.0], [0.1, 0.2, 0.3], [4.0, 5.0, 6.0]]))

    def forward(self, ids):
        self.write(self.w)
        return self.w[ids] ** 2


def clamp(w):
    """Write under no_grad; a function of the module, so that it can be pickled."""
    with torch.no_grad():
        w.clamp_(max=0.5)


MODELS = {
    "embedding": lambda: nn.Embedding(4, 3, max_norm=0.1),
    "bag": lambda: nn.EmbeddingBag(4, 3, max_norm=0.1),
    "clamp": lambda: Writes(clamp),
    "equal values": lambda: Writes(torch.no_grad()(lambda w: w.mul_(1.0))),
    "mul": lambda: Writes(torch.no_grad()(lambda w: w.mul_(2.0))),
    "data": lambda: Writes(lambda w: setattr(w, "data", w.data * 2)),
    "data in place": lambda: Writes(lambda w: w.data.clamp_(max=0.5)),
    "foreach": lambda: Writes(torch.no_grad()(lambda w: torch._foreach_mul_([w], 2.0))),
    "out": lambda: Writes(torch.no_grad()(lambda w: torch.mul(w, 2.0, out=w))),
    "numpy": lambda: Writes(lambda w: w.detach().numpy().clip(-0.1, 0.1, out=w.detach().numpy())),
}


def inputs(name):
    """What the model takes."""
    return IDS[None] if name == "bag" else IDS


def leaf_of(tree):
    """The only leaf of a tree, which may not be copied to look at it."""
    return next(iter(tree.values()))


@pytest.mark.parametrize("mode", ["plain", "no_grad", "inference"])
@pytest.mark.parametrize("name", MODELS)
def test_given_leaves_are_not_written(name, mode):
    """Neither the first call nor a later one writes into the caller's tree."""
    model = MODELS[name]()
    apply, params, buffers = functional(model)
    leaf, before = leaf_of(params), leaf_of(params).clone()
    memory, version = leaf.data_ptr(), leaf._version
    expected = copy.deepcopy(model)(inputs(name)).detach()
    outs, values = [], []
    with {"plain": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]():
        for _ in range(3):
            outs.append(apply(params, inputs(name)))
            values.append(leaf.clone())
        apply.with_buffers(params, buffers, inputs(name))

    torch.testing.assert_close(outs, [expected] * 3, rtol=0, atol=0)
    torch.testing.assert_close([*values, leaf], [before] * 4, rtol=0, atol=0)
    assert leaf.data_ptr() == memory
    assert leaf._version == version


def gradient_of(model, name):
    """The gradient that a copy of the module computes itself."""
    other = copy.deepcopy(model)
    return torch.autograd.grad(other(inputs(name)).square().sum(), list(other.parameters()))[0]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_the_given_leaves(name, warm):
    """Gradients of copies that forward writes are those of the leaves."""
    model = MODELS[name]()
    apply, params, _ = functional(model)
    before, expected, found = leaf_of(params).clone(), gradient_of(model, name), []
    if warm:
        apply(params, inputs(name))
    for _ in range(2):
        live = params.apply(lambda p: p.detach().requires_grad_())
        found += torch.autograd.grad(apply(live, inputs(name)).square().sum(), [leaf_of(live)])

    torch.testing.assert_close(found, [expected] * 2, rtol=0, atol=0)
    assert torch.equal(leaf_of(params), before)


@pytest.mark.parametrize("warm", [False, True])
# torch refuses to assign .data and to give an array inside a transform.
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("data", "numpy")])
def test_gradients_of_a_transform_reach_the_given_leaves(name, warm):
    """Gradients by `torch.func.grad`, also after calls by autograd, are those of the leaves."""
    model = MODELS[name]()
    apply, params, _ = functional(model)
    before, expected, found = leaf_of(params).clone(), gradient_of(model, name), []
    if warm:
        apply(params, inputs(name))
    for _ in range(2):
        grads = torch.func.grad(lambda p: apply(p, inputs(name)).square().sum())(params)
        found.append(leaf_of(grads))
        live = params.apply(lambda p: p.detach().requires_grad_())
        apply(live, inputs(name)).square().sum().backward()

    torch.testing.assert_close(found, [expected] * 2, rtol=0, atol=0)
    assert torch.equal(leaf_of(params), before)


@pytest.mark.parametrize("name", ["embedding", "bag"])
def test_blocks(name):
    """A table with max_norm does not renormalise the rows of a tree that is bound for a block."""
    model = MODELS[name]()
    tree = from_module(MODELS[name]()).clone().apply(lambda x: x.detach() * 5)
    before = tree.clone()
    with tree.to_module(model):
        model(inputs(name))

    assert (tree == before).all()


class Runs(nn.Module):
    """A module or parameter, and a function of it and the arguments."""

    def __init__(self, part, fn):
        super().__init__()
        self.part, self.fn = part, fn

    def forward(self, *args):
        return self.fn(self.part, *args)


def test_flags_of_given_leaves():
    """Forward does not change whether the caller's leaf takes gradients."""
    apply, params, _ = functional(Writes(lambda w: w.requires_grad_()))
    flags = []
    for _ in range(3):
        apply(params, IDS)
        flags.append(params["w"].requires_grad)

    assert flags == [False] * 3


def call_twice(function, params):
    """What the second of two calls returns, for which a forward's writes are known."""
    function(params, IDS)
    return function(params, IDS)


def writes_one_of_two():
    """A module of two layers that returns its weights, of which it writes the first."""
    model = nn.ModuleList([Writes(clamp), Writes(abs)])
    model.forward = lambda ids: [layer(ids) for layer in model] and [layer.w for layer in model]
    return functional(model)


def test_only_written_leaves_are_copied():
    """A later call copies the leaves that forward writes."""
    apply, params, _ = writes_one_of_two()
    written, kept = call_twice(apply, params)

    assert written is not params["0", "w"]
    assert kept is params["1", "w"]


def test_only_written_leaves_are_copied_in_another_mode():
    """A later call in evaluation mode, after calls in training mode, copies the leaves that forward writes."""
    apply, params, _ = writes_one_of_two()
    call_twice(apply, params)
    written, kept = call_twice(apply.eval(), params)

    assert written is not params["0", "w"]
    assert kept is params["1", "w"]


def test_written_leaves_are_copied_after_a_pickle():
    """A function that went through pickle copies the leaves that forward writes."""
    apply, params, _ = functional(Writes(clamp))
    again: Apply = pickle.loads(pickle.dumps(apply))
    before = params["w"].clone()
    call_twice(again, params)

    assert torch.equal(params["w"], before)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("factor", [1, 2], ids=["reads", "writes"])
def test_leaves_without_memory_of_their_own(factor, mode):
    """A sparse weight is not written; inference tensors count no writes, so that each call is watched there."""
    writes = factor > 1

    def run(w, x):
        if writes:
            with torch.no_grad():
                w.mul_(factor)
        return torch.sparse.mm(w, x)

    apply, params, _ = functional(Runs(nn.Parameter(torch.eye(3).to_sparse()), run))
    outs, values = [], []
    with mode():
        for _ in range(3):
            outs.append(apply(params, torch.eye(3)))
            values.append(params["part"].to_dense())
    apply(params, torch.eye(3))

    torch.testing.assert_close(outs, [torch.eye(3) * factor] * 3, rtol=0, atol=0)
    torch.testing.assert_close(values, [torch.eye(3)] * 3, rtol=0, atol=0)
    assert apply._learned[0] == [0] * writes
    assert apply._learned[1] == []


def test_a_call_on_meta_tensors_shows_nothing():
    """A dry run on meta tensors is not the watched call."""
    apply, params, _ = functional(MODELS["mul"]())
    apply(params.to("meta"), IDS.to("meta"))
    before = params["w"].clone()
    for _ in range(2):
        apply(params, IDS)

    assert torch.equal(params["w"], before)


def test_statistics_in_evaluation_mode_are_lent():
    """Statistics of a norm in evaluation mode come back as the tensors that were given."""
    apply, params, buffers = functional(nn.BatchNorm1d(3).eval())
    for _ in range(2):
        _, new = apply.with_buffers(params, buffers, torch.ones(2, 3))

    assert new["running_mean"] is buffers["running_mean"]
    assert new["running_var"] is buffers["running_var"]


def test_statistics_in_evaluation_mode_that_forward_writes():
    """Statistics of a norm in evaluation mode are copied if forward writes them."""
    sly = Runs(nn.BatchNorm1d(3), lambda norm, x: norm.running_mean.add_(1.0) + norm(x)).eval()
    apply, params, buffers = functional(sly)
    means = []
    for _ in range(3):
        apply(params, torch.ones(2, 3), buffers=buffers)
        means.append(buffers["part", "running_mean"].tolist())

    assert means == [[0.0] * 3] * 3


@pytest.mark.parametrize("name", ["embedding", "clamp"])
def test_compiled(name):
    """A compiled call does not write into the caller's tree."""
    torch._dynamo.reset()
    apply, params, _ = functional(MODELS[name]())
    leaf, before = leaf_of(params), leaf_of(params).clone()
    compiled = torch.compile(lambda p: apply(p, IDS), backend="aot_eager")
    values = []
    for _ in range(2):
        ours = compiled(params)
        values.append(leaf.clone())

    torch.testing.assert_close(values, [before] * 2, rtol=0, atol=0)
    torch.testing.assert_close(ours, apply(params, IDS))


class Branches(nn.Module):
    """A forward that takes another branch by an argument, and writes other leaves there."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, momentum=None)])
        self.rows = nn.Embedding(5, 3, max_norm=0.1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, branch):
        if branch == 3:
            return x + self.rows(torch.tensor([0, 3]))
        if branch == 4:
            self.count += 1
            return x * self.count
        return self.norms[branch](x)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda apply, x, branch: lambda p, b: apply.with_buffers(p, b, x, branch)[0], id="with_buffers"),
        pytest.param(
            lambda apply, x, branch: lambda p, b: apply(p, x, branch, buffers=b),
            id="buffers=",
            marks=pytest.mark.slow,
        ),
    ],
)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=4))
def test_a_forward_that_branches_writes_no_given_leaf(call, branches):
    """Each call is pure, whichever branch the first one took."""
    module = Branches()
    apply, params, buffers = functional(module)
    x = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 5.0]])

    found = [assert_pure(call(apply, x, branch), params, buffers) for branch in branches]

    expected = [functional(module)[0].with_buffers(params, buffers, x, branch)[0] for branch in branches]
    torch.testing.assert_close(found, expected)


def warnings_of(run):
    """The texts of the warnings of tdfunc that a function makes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in caught if "apply: " in str(one.message)]


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("embedding", "bag")])
def test_a_write_to_a_parameter_warns_once(name):
    """Each way of writing is noticed in the first call, also one that leaves the values as they are."""
    apply, params, _ = functional(MODELS[name]())
    found = warnings_of(lambda: [apply(params, IDS) for _ in range(3)])

    assert len(found) == 1
    assert re.search(r"(?s)forward of Writes writes the parameters \['w'\].*writes are lost.*with_buffers", found[0])


@pytest.mark.parametrize("name", ["embedding", "bag"])
def test_rows_that_torch_scales_in_evaluation_warn_of_nothing(name):
    """An embedding with `max_norm` scales the same rows again in each call."""
    apply, params, _ = functional(MODELS[name]().eval())

    assert warnings_of(lambda: apply(params, inputs(name))) == []


WITHOUT_LOSS = {
    "frozen": lambda w: w.requires_grad_(False),
    "same values elsewhere": lambda w: setattr(w, "data", w.data.clone()),
}


@pytest.mark.parametrize("name", WITHOUT_LOSS)
def test_what_loses_no_value_warns_of_nothing(name):
    """Another flag, or other memory with the same values, loses nothing."""
    apply, params, _ = functional(Writes(WITHOUT_LOSS[name]))

    assert warnings_of(lambda: apply(params, IDS)) == []


def test_weights_that_are_not_numbers_warn_of_nothing():
    """NaN is not equal to itself, and still no write."""
    apply, params, _ = functional(nn.Linear(3, 2))
    params = params.set("weight", torch.full((2, 3), torch.nan))

    assert warnings_of(lambda: apply(params, torch.ones(3))) == []


class Momentum(nn.Module):
    """A copy of a layer that forward moves towards it, as MoCo and BYOL do."""

    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        with torch.no_grad():
            for new, old in zip(self.online.parameters(), self.target.parameters(), strict=True):
                old.lerp_(new, 0.5)
        return self.online(x) - self.target(x).detach()


def gradient(apply):
    """The gradient of a sum of outputs."""
    return torch.func.grad(lambda tree, x: apply(tree, x).sum())


FIRST_CALLS = {
    "plain": lambda apply, one, tree, x: apply(one, x),
    "grad": lambda apply, one, tree, x: gradient(apply)(one, x),
    "vmap": lambda apply, one, tree, x: torch.vmap(apply, in_dims=(0, None))(tree, x),
    "vmap of grad": lambda apply, one, tree, x: torch.vmap(gradient(apply), in_dims=(0, None))(tree, x),
    "jit": lambda apply, one, tree, x: jit(apply)(one, x),
    "jit of grad": lambda apply, one, tree, x: jit(gradient(apply))(one, x),
    "jit of vmap of grad": lambda apply, one, tree, x: jit(torch.vmap(gradient(apply), in_dims=(0, None)))(tree, x),
    "Ensemble": lambda apply, one, tree, x: Ensemble(apply)(tree, x),
    "Ensemble, loop": lambda apply, one, tree, x: Ensemble(apply, "loop")(tree, x),
    "Ensemble, traced": lambda apply, one, tree, x: Ensemble(apply, "traced")(tree, x),
    "Ensemble, chunks": lambda apply, one, tree, x: Ensemble(apply, chunk_size="auto")(tree, x),
    "jit of Ensemble": lambda apply, one, tree, x: jit(Ensemble(apply))(tree, x),
}


class Assigns(nn.Module):
    """A forward that puts a new parameter in the place of one, with values times a factor."""

    def __init__(self, factor):
        super().__init__()
        self.factor, self.layer = factor, nn.Linear(3, 2)

    def forward(self, x):
        self.layer.bias = nn.Parameter(self.layer.bias.detach() * self.factor)
        return self.layer(x)


# In a vmap that is recorded, torch's own modes refuse the new parameter.
@pytest.mark.parametrize("name", [name for name in FIRST_CALLS if name not in ("Ensemble, traced", "jit of Ensemble")])
def test_a_parameter_that_forward_replaces_warns(name):
    """A new parameter under an old name is lost like a write to the old one."""
    models = [Assigns(2.0) for _ in range(3)]
    apply, params, _ = functional(models[0])
    found = warnings_of(lambda: FIRST_CALLS[name](apply, params, stack_modules(models).detach(), torch.randn(4, 3)))

    assert [text.partition(". ")[0] for text in found] == [
        "apply: forward of Assigns writes the parameters ['layer.bias']"
    ]


def test_a_parameter_replaced_by_the_same_values_warns_of_nothing():
    """Nothing is lost."""
    apply, params, _ = functional(Assigns(1.0))

    assert warnings_of(lambda: apply(params, torch.randn(4, 3))) == []


@pytest.mark.parametrize("name", FIRST_CALLS)
def test_a_first_call_of_any_kind_warns(name):
    """Under transforms, in a trace and through an Ensemble, all written parameters are named once."""
    models = [Momentum() for _ in range(3)]
    apply, params, _ = functional(models[0])
    found = warnings_of(lambda: FIRST_CALLS[name](apply, params, stack_modules(models).detach(), torch.randn(4, 3)))

    assert len(found) == 1
    assert "writes the parameters ['target.weight', 'target.bias']." in found[0]


@pytest.mark.parametrize(
    "write", [lambda w: w.data.clamp_(max=0.5), torch.no_grad()(lambda w: torch._foreach_mul_([w], 2.0))]
)
def test_a_trace_shows_writes_past_the_version(write):
    """Writes that no version counter shows are noticed in a trace."""
    apply, params, _ = functional(Writes(write))

    assert len(warnings_of(lambda: jit(apply, captures="constants")(params, IDS))) == 1


def test_a_write_after_a_trace_warns_no_more():
    """The trace has warned, and a call with values does not warn again."""
    models = [Momentum() for _ in range(2)]
    apply, params, _ = functional(models[0])
    x = torch.randn(4, 3)
    warnings_of(lambda: jit(apply)(params, x))

    assert warnings_of(lambda: apply(params, x)) == []


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_leaves_an_ensemble():
    """`auto` does not take the warning for a refusal of vmap."""
    models = [Momentum() for _ in range(2)]
    apply, _, _ = functional(models[0])

    with pytest.raises(UserWarning, match="writes the parameters"):
        Ensemble(apply)(stack_modules(models), torch.randn(4, 3))


def test_the_warning_is_at_the_line_of_the_caller():
    """The line of the warning is not in this package or torch."""
    models = [Momentum() for _ in range(2)]
    apply, _, _ = functional(models[0])
    with pytest.warns(UserWarning, match="writes the parameters") as caught:
        Ensemble(apply)(stack_modules(models), torch.randn(4, 3))

    assert caught[0].filename == __file__
