"""Gradients by filter equal `torch.func.grad` of the chosen part."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tdfunc as tdf
from tests.helpers import TiedLM, assert_trees_equal, examples

FILTERS = ["*", "0.*", "*.weight", tdf.Filter("*.bias") | "2.weight", lambda path, leaf: leaf.dim() == 2,
           tdf.Kind.PARAMETER, torch.float64, re.compile("0.*")]  # fmt: skip


def make():
    """A module with parameters and buffers."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def reference(fn, tree, where):
    """Gradients by partition, `torch.func.grad` and combine."""
    part, rest = tdf.partition(tree, where)
    return torch.func.grad(lambda part: fn(tdf.combine(part, rest)))(part)


@examples(0.6)
@given(where=st.sampled_from(FILTERS), seed=st.integers(0, 2**32))
def test_a_filter_is_a_partition(where, seed):
    """The gradients are those of the chosen part, with its keys and kinds; the others count as constants."""
    torch.manual_seed(seed)
    apply, params, buffers = tdf.functional(make())
    x = torch.randn(5, 3, dtype=torch.float64)

    def loss(params):
        return apply(params, x, buffers=buffers).square().sum()

    grads = tdf.grad(loss, where)(params)
    value, again = tdf.value_and_grad(loss, where)(params)
    assert_trees_equal(grads, reference(loss, params, where))
    assert_trees_equal(again, grads)
    assert torch.equal(value, loss(params))


def test_buffers_and_integers_have_no_gradient():
    """A module's whole tree: statistics and counts are left out unless they are named."""
    model = make()
    apply = tdf.functional(model)[0]
    tree = tdf.from_module(model).detach()
    x = torch.randn(5, 3, dtype=torch.float64)

    grads = tdf.grad(lambda tree: apply(tree, x).square().sum())(tree)
    assert grads.paths() == tdf.split(tree)[0].paths()
    with pytest.raises(tdf.LeafMismatchError, match=r"grad: leaf '1.num_batches_tracked'(?s:.*)got:      int64"):
        tdf.grad(lambda tree: apply(tree, x).sum(), "1.*")(tree)


def test_a_tied_leaf_has_one_gradient():
    """It sums the uses under both names, and keeps the tie."""
    model = TiedLM()
    apply, params, buffers = tdf.functional(model)
    tokens = torch.randint(0, 5, (2, 3))
    path = params.paths()[0]

    grads = tdf.grad(lambda p: apply(p, tokens, buffers=buffers).square().sum(), ".".join(path))(params)
    model.load_state_dict(params.state_dict())
    model(tokens).square().sum().backward()
    torch.testing.assert_close(grads[path], tdf.from_module(model)[path].grad)


@pytest.fixture
def scaled():
    """A loss of parameters and scales with an auxiliary value, and its arguments for three members."""
    apply, params, _ = tdf.functional(nn.Linear(3, 2))
    stacked = tdf.stack([params, params * 2, params * 3])
    scales = tdf.TensorDict({"s": torch.rand(3, 2), "n": torch.arange(3)}, [3])

    def loss(params, scale, x):
        out = apply(params, x) * scale["s"]
        return (out * scale["n"]).square().sum(), out

    return loss, (stacked, scales, torch.randn(5, 3))


def test_several_trees_and_an_auxiliary_value(scaled):
    """Adapters and a part of the parameters at once, under vmap."""
    loss, (stacked, scales, x) = scaled
    step = tdf.value_and_grad(loss, ["weight", None], argnums=(0, 1), has_aux=True)
    (value, _), (grads, scale_grads) = torch.vmap(step, (0, 0, None))(stacked, scales, x)

    def alone(i):
        part, rest = tdf.partition(stacked[i], "weight")
        return torch.func.grad(lambda p: loss(tdf.combine(p, rest), scales[i], x)[0])(part)["weight"]

    assert grads.paths() == [("weight",)]
    assert scale_grads.paths() == [("s",)]
    torch.testing.assert_close(grads["weight"], torch.stack([alone(i) for i in range(3)]))
    torch.testing.assert_close(value, torch.stack([loss(stacked[i], scales[i], x)[0] for i in range(3)]))


def test_several_trees_and_an_auxiliary_value_in_a_replay(scaled):
    """The first call and the replay give the gradients and the auxiliary value of the function."""
    loss, args = scaled
    options = {"argnums": (0, 1), "has_aux": True}
    step = torch.vmap(tdf.value_and_grad(loss, ["weight", None], **options), (0, 0, None))
    jitted = tdf.jit(torch.vmap(tdf.grad(loss, ["weight", None], **options), (0, 0, None)))
    (_, out), (grads, _) = step(*args)

    found = [jitted(*args) for _ in range(2)]
    torch.testing.assert_close([again["weight"] for (again, _), _ in found], [grads["weight"]] * 2)
    torch.testing.assert_close([aux for _, aux in found], [out] * 2)


def test_second_derivatives():
    """A gradient of a gradient is that of torch.func."""
    tree = tdf.TensorDict({"a": torch.rand(3, dtype=torch.float64), "b": torch.rand(3, dtype=torch.float64)})

    def fn(tree):
        return (tree["a"] ** 3 * tree["b"]).sum()

    inner = tdf.grad(lambda tree: tdf.grad(fn, "a")(tree)["a"].sum(), "b")(tree)
    torch.testing.assert_close(inner["b"], 3 * tree["a"] ** 2)


MESSAGES = [
    (lambda t: tdf.grad(lambda p: p["w"].sum())({"w": torch.ones(1)}), TypeError, "argument 0 is not a tree.*dict"),
    (lambda t: tdf.grad(lambda p: p["w"].sum(), "v")(t), tdf.FilterError, "'v'"),
    (lambda t: tdf.grad(lambda a, b: a["w"].sum(), argnums=(0, -2))(t, t), ValueError, r"an argument twice.*\(0, -2"),
    (lambda t: tdf.grad(lambda p: (p["w"] > 0).sum())(t), TypeError, "a floating-point number.*int64"),
    (lambda t: tdf.grad(lambda p: p["w"].sum())(p=t), TypeError, "positional argument 0.*0 positional arguments"),
    (lambda t: tdf.grad(lambda p: p)(tdf.lazy_stack([t, t])), tdf.LeafMismatchError, "grad: a lazy stack.*pad"),
    (lambda t: tdf.grad(lambda p: p, ["w"], argnums=(0, 1)), ValueError, "wrt has 1 filters for 2 arguments"),
]


@pytest.mark.parametrize(("call", "error", "pattern"), MESSAGES)
def test_messages(call, error, pattern):
    """Each refusal names the argument or filter."""
    with pytest.raises(error, match=f"(?s){pattern}"):
        call(tdf.TensorDict({"w": torch.ones(2)}))


AUX = [
    3, "loss", None, 2.5, True, {"rows": 2, "mean": torch.ones(1)}, (torch.zeros(2), "a", [1, torch.ones(1)]), (), [],
    torch.float64, torch.tensor(3), tdf.TensorDict({"x": torch.ones(2), "name": "run"}),
]  # fmt: skip


@pytest.mark.parametrize("aux", AUX, ids=lambda aux: type(aux).__name__)
@pytest.mark.parametrize("take", [tdf.grad, tdf.value_and_grad])
def test_the_second_value_may_be_anything(aux, take):
    """Plain values, and containers of them and of tensors, come back as they were."""
    params = tdf.TensorDict({"w": torch.tensor([1.0, 2.0])})

    out = take(lambda p: (p["w"].square().sum(), aux), has_aux=True)(params)

    got = out[1] if take is tdf.grad else out[0][1]
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(aux)
    pairs = zip(*[torch.utils._pytree.tree_leaves(value) for value in (got, aux)], strict=True)
    assert all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x is y for x, y in pairs)


@pytest.mark.parametrize("wrap", [lambda f: f, tdf.jit, torch.vmap], ids=["eager", "jit", "vmap"])
def test_tensors_of_the_second_value_leave_the_gradient(wrap):
    """A tensor beside plain values is usable outside, and follows further derivatives."""
    grad = tdf.grad(lambda p: (p["w"].square().sum(), {"twice": p["w"] * 2, "rows": 3}), has_aux=True)
    params = tdf.TensorDict({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, [2] if wrap is torch.vmap else [])

    twice = wrap(lambda p: grad(p)[1]["twice"])(params)

    assert twice.tolist() == [[2.0, 4.0], [6.0, 8.0]]
    second = torch.func.grad(lambda p: grad(p)[1]["twice"].sum())(params)
    assert second["w"].tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("out", [lambda p: p["w"].sum(), lambda p: (p["w"].sum(),), lambda p: (p["w"].sum(), 1, 2)])
def test_a_result_that_is_no_pair_is_refused(out):
    """With `has_aux` anything but a pair is an error, and nothing of it is dropped."""
    with pytest.raises(TypeError, match="returned no pair"):
        tdf.grad(out, has_aux=True)(tdf.TensorDict({"w": torch.ones(2)}))


@pytest.mark.slow
def test_made_in_a_compiled_function():
    """A function that `torch.compile` takes whole may make the gradient's function and call it."""

    def by_name(params, x):
        return tdf.grad(lambda p: (p["w"] * p["b"] * x).sum(), "w")(params)["w"]

    params, x = tdf.TensorDict({"w": torch.randn(3), "b": torch.randn(3)}), torch.randn(3)

    compiled = torch.compile(by_name, backend="eager", fullgraph=True)

    torch.testing.assert_close(compiled(params, x), by_name(params, x))
