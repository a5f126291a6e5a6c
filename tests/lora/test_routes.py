"""Routes to one function of adapters agree: attached, merged, mapped, jitted, unmerged and extracted, in each dtype."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import tdfunc as tdf
from tdfunc.lora import Lora
from tests.lora.layers import MODULES, NO_BIAS, trained

# The second: the merged model, in training mode, as its own module.
pytestmark = [
    pytest.mark.sample(7),
    pytest.mark.filterwarnings("ignore:apply. forward of Sequential scales rows:UserWarning"),
]
OPTIONS = {
    "plain": {},
    "rslora": {"rslora": True, "alpha": 3.0},
    "dora": {"dora": True},
    "bias": {"bias": True},
    "dora bias": {"dora": True, "bias": True},
    "pissa": {"start": "pissa"},
    "olora": {"start": "olora"},
    "pissa dora": {"start": "pissa", "dora": True},
    "ranks": {"rank": {"*": 3}, "alpha": {"*": -2.0}},
}
TABLE = [
    pytest.param(name, options, id=f"{name} {label}")
    for name in MODULES
    for label, options in OPTIONS.items()
    if not (options.get("bias") and name in NO_BIAS) and not (options.get("dora") and name == "tied")
]
EXACT = {"atol": 1e-9, "rtol": 1e-9}
# The norm of these experts computes in float32.
CLOSE = {"experts with a norm": {"atol": 1e-5, "rtol": 1e-5}}


def setup(name, options, dtype=torch.float64, seed=0):
    """The function, the parameters, the choice, trained adapters and an input of a module, in a dtype."""
    torch.manual_seed(seed)
    make, where, inputs = MODULES[name]
    apply, params, _ = tdf.functional(make().to(dtype))
    lora = Lora(where, **{"rank": 2, "alpha": 3.0} | options)
    x = inputs()
    return apply, params, lora, trained(lora, params, apply, seed), x.to(dtype) if x.is_floating_point() else x


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "options"), TABLE)
def test_attached_is_merged(name, options, seed):
    """In float64 to rounding."""
    apply, params, lora, adapters, x = setup(name, options, seed=seed)

    out = lora.attach(apply)((params, adapters), x)

    torch.testing.assert_close(out, apply(lora.merge(params, adapters), x), **EXACT)


@pytest.mark.parametrize(("name", "options"), TABLE)
def test_gradients_of_attached_are_those_of_merged(name, options):
    """For the base and for the adapters, pads and counted rows included."""
    apply, params, lora, adapters, x = setup(name, options)
    run = lora.attach(apply)

    found = torch.func.grad(lambda trees: run(trees, x).square().sum())((params, adapters))

    expected = torch.func.grad(lambda trees: apply(lora.merge(*trees), x).square().sum())((params, adapters))
    tdf.assert_close(found[0], expected[0], **CLOSE.get(name, EXACT))
    tdf.assert_close(found[1], expected[1], **CLOSE.get(name, EXACT))


@pytest.mark.parametrize(("name", "options"), TABLE)
def test_a_merge_of_many_is_each_merge(name, options):
    """`torch.vmap` of merge over stacked adapters."""
    _, params, lora, adapters, _ = setup(name, options)
    many = torch.stack([adapters, adapters.apply(lambda leaf: leaf * 0.5)])

    merged = torch.vmap(lora.merge, (None, 0))(params, many)

    tdf.assert_close(merged[1], lora.merge(params, many[1]), **EXACT)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_jitted_run_is_the_run(options):
    """And a jitted merge is the merge."""
    apply, params, lora, adapters, x = setup("linear", options)
    run = lora.attach(apply)
    jitted = tdf.jit(lambda params, adapters, x: (run((params, adapters), x), lora.merge(params, adapters)))

    for _ in range(3):
        out, merged = jitted(params, adapters, x)

    torch.testing.assert_close(out, run((params, adapters), x), **EXACT)
    tdf.assert_close(merged, lora.merge(params, adapters), **EXACT)


@pytest.mark.parametrize(("name", "options"), [row for row in TABLE if "dora" not in row.values[1]])
def test_unmerge_undoes_merge(name, options):
    """In float64 to rounding."""
    _, params, lora, adapters, _ = setup(name, options)

    tdf.assert_close(lora.unmerge(lora.merge(params, adapters), adapters), params, **EXACT)


@pytest.mark.parametrize(("name", "options"), [row for row in TABLE if "start" not in row.values[1]])
def test_extracted_adapters_merge_to_the_tuned_model(name, options):
    """With a rank that suffices, in float64 to rounding: nothing is rounded to a narrower dtype on the way."""
    apply, params, lora, adapters, _ = setup(name, options)
    merged = lora.merge(params, adapters)
    wide = replace(lora, rank=99)

    found = wide.extract(params, merged, apply=apply)

    tdf.assert_close(wide.merge(params, found), merged, **EXACT)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_keeps_the_precision_of_its_weight(start):
    """The factors of a whole start give the weight in float64."""
    weight = torch.randn(5, 5, dtype=torch.float64)
    lora = Lora("w", rank=5, start=start)

    parts = lora.init(tdf.TensorDict({"w": weight}), key=0)["w"]

    torch.testing.assert_close(parts["B"] @ parts["A"], weight, **EXACT)


NARROW = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}


def exact(apply, params, lora, adapters, x):
    """The output of the merged weights in float64, from the same numbers."""
    x = x.double() if x.is_floating_point() else x
    return apply(lora.merge(params.double(), adapters.double()), x)


@pytest.mark.parametrize("of_adapters", [None, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("options", [{}, {"dora": True}, {"dora": True, "bias": True}, {"start": "pissa"}], ids=str)
@pytest.mark.parametrize("name", ["linear", "conv2d", "transposed"])
def test_narrow_routes_are_close_to_float64(name, options, dtype, of_adapters):
    """Attached and merged, with factors of the base's dtype, narrower ones and wider ones."""
    apply, params, lora, adapters, x = setup(name, options, dtype)
    adapters = adapters.to(of_adapters) if of_adapters is not None else adapters
    wanted = exact(apply, params, lora, adapters, x)
    scale = wanted.abs().max()
    tolerance = 4 * max(NARROW[dtype], NARROW.get(of_adapters, 0))

    attached = lora.attach(apply)((params, adapters), x).double()
    merged = apply(lora.merge(params, adapters), x).double()

    assert (attached - wanted).abs().max() < tolerance * scale
    assert (merged - wanted).abs().max() < tolerance * scale


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"dora": True, "bias": True}], ids=str)
def test_merge_and_unmerge_keep_dtypes(options, dtype):
    """Of weights and biases, with wider adapters."""
    _, params, lora, adapters, _ = setup("linear", options, dtype)

    merged = lora.merge(params, adapters.float())

    assert {leaf.dtype for leaf in merged.leaves()} == {dtype}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("dtype", "left", "tolerance"), [(torch.float32, 1e-3, 1e-3), (torch.float64, 1e-6, 1e-8)])
def test_the_gain_of_weights_that_nearly_cancel_is_exact(dtype, left, tolerance, seed):
    """An adapter that is almost the opposite of its weight leaves a small sum, whose norm is not that of its parts."""
    torch.manual_seed(seed)
    module = nn.Linear(6, 5, bias=False).double()
    lora = Lora("0.weight", rank=5, dora=True)
    base = tdf.from_module(nn.Sequential(module))
    tuned = base.apply(lambda leaf: left * torch.randn_like(leaf))
    apply, _, _ = tdf.functional(nn.Sequential(module).to(dtype))
    params = base.to(dtype)
    adapters = lora.extract(base, tuned).to(dtype)
    x = torch.randn(4, 6, dtype=dtype)
    wanted = exact(apply, params, lora, adapters, x)

    out = lora.attach(apply)((params, adapters), x)

    assert (out.double() - wanted).abs().max() < tolerance * wanted.abs().max()


@pytest.mark.parametrize("layer", [nn.Linear(3, 4), nn.Conv1d(3, 4, 1)], ids=repr)
def test_magnitudes_of_a_layer_of_zeros_change_nothing(layer):
    """As layers start that are to be trained in: their outputs have no direction to scale."""
    for leaf in layer.parameters():
        nn.init.zeros_(leaf)
    apply, params, _ = tdf.functional(nn.Sequential(layer))
    lora = Lora("0.weight", rank=2, dora=True)
    adapters, x = lora.init(params, key=0, apply=apply), torch.randn(2, 3, 3)

    assert torch.equal(lora.attach(apply)((params, adapters), x), apply(params, x))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"dora": True}, {"bias": True}], ids=str)
def test_what_is_not_finite_is_handed_on(options, value):
    """Both by a merge and by an attached run."""
    apply, params, lora, adapters, x = setup("linear", options)
    adapters = adapters.apply(lambda leaf: torch.full_like(leaf, value))

    assert not lora.merge(params, adapters)["0", "weight"].isfinite().any()
    assert not lora.attach(apply)((params, adapters), x).isfinite().any()


def test_a_bias_of_two_layers_is_merged_for_both():
    """A bias that is tied takes only the adapter of all its layers."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].bias = module[0].bias
    apply, params, _ = tdf.functional(module)
    lora = Lora("*.weight", rank=2, bias=True)
    adapters = trained(lora, params, apply)

    with pytest.raises(tdf.UnsupportedError, match="'0.bias' is the bias of several layers"):
        lora.merge(params, adapters)


def narrow_biases(dtype):
    """A layer in float32, and adapters of 16 bits with a bias whose product with the scale has more digits."""
    apply, params, lora, adapters, x = setup("linear", {"bias": True, "rslora": True}, torch.float32)
    return apply, params, lora, adapters.to(dtype), x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_unmerge_takes_away_the_bias_that_merge_adds(dtype):
    """The product with the scale is not rounded to the dtype of the adapter by one of the two."""
    _, params, lora, adapters, _ = narrow_biases(dtype)

    undone = lora.unmerge(lora.merge(params, adapters), adapters)

    tdf.assert_close(undone, params, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_attached_bias_is_the_merged_one(dtype):
    """At an input of zeros, of which biases alone are left."""
    apply, params, lora, adapters, x = narrow_biases(dtype)
    nothing = torch.zeros_like(x)

    out = lora.attach(apply)((params, adapters), nothing)

    torch.testing.assert_close(out, apply(lora.merge(params, adapters), nothing), atol=1e-5, rtol=1e-5)
