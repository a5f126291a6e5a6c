"""Attention of stacked members: one call of torch's kernel, with the bits and the derivatives of each member's own."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jacfwd, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tdfunc as tdf
from tdfunc.modules.batching import Batching
from tests.helpers import assert_trees_equal

# Features whose rows are aligned in memory: the bits of a matrix product depend on it.
MEMBERS, BATCH, HEADS, QUERIES, KEYS, FEATURES = 3, 2, 4, 5, 7, 8
# By name: the shape of a mask, and its member dimension.
MASKS = {
    "none": (None, None),
    "plain": ((QUERIES, KEYS), None),
    "plain, by member": ((MEMBERS, QUERIES, KEYS), 0),
    "one example": ((1, 1, QUERIES, KEYS), None),
    "one example, by member": ((1, MEMBERS, 1, QUERIES, KEYS), 1),
    "each example": ((BATCH, 1, 1, KEYS), None),
    "each head, by member": ((MEMBERS, BATCH, HEADS, QUERIES, KEYS), 0),
}


def attend(*args, **options):
    """Attention by torch's function."""
    return F.scaled_dot_product_attention(*args, **options)


def by_rule(*args, **options):
    """Attention by the rule."""
    with Batching():
        return attend(*args, **options)


def heads(dim, count=HEADS, length=KEYS, dtype=torch.float32):
    """Queries, keys or values, in memory as a projection leaves them."""
    shape = (BATCH, length, count, FEATURES)
    if dim is None:
        return torch.randn(shape, dtype=dtype).transpose(1, 2)
    return torch.randn(MEMBERS, *shape, dtype=dtype).transpose(2, 3).movedim(0, dim)


def mask_of(kind, name, dtype):
    """A mask by its name, and its member dimension."""
    shape, dim = MASKS[name]
    if shape is None:
        return None, None
    if kind == "float":
        return torch.randn(shape).to(dtype), dim
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True
    return mask, dim


def member(args, dims, i):
    """The arguments of one member."""
    return [x if dim is None else x.select(dim, i) for x, dim in zip(args, dims, strict=True)]


def looped(fn, args, dims):
    """The results of a call for each member, stacked."""
    results = [fn(*member(args, dims, i)) for i in range(MEMBERS)]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return torch.stack(results)


def exactly(got, want):
    """Check equality of bits."""
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def gradients(attention, loss=torch.square, **options):
    """The gradients of queries, keys and values."""

    def total(*args):
        return loss(attention(*args, **options)).sum()

    return grad(total, (0, 1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dims", [(0, 0, 0), (None, 0, 0), (0, None, None), (2, 0, 1)])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", MASKS)
def test_a_member_has_the_bits_of_its_own_call(name, kind, dims, dtype):
    """For every mask, and where members share queries, keys or values; torch prints no warning."""
    mask, mask_dim = mask_of(kind, name, dtype)
    args = [heads(dims[0], length=QUERIES, dtype=dtype), heads(dims[1], dtype=dtype), heads(dims[2], dtype=dtype), mask]
    dims = (*dims, mask_dim)

    exactly(vmap(by_rule, dims)(*args), looped(attend, args, dims))


@pytest.mark.parametrize("loss", [torch.square, torch.clone])
@pytest.mark.parametrize("dims", [(0, 0, 0), (None, 0, 0), (0, None, 1)])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_a_member_have_the_bits_of_its_own(name, dims, loss):
    """Queries, keys and values; the gradient of a sum is an expanded tensor."""
    mask, mask_dim = mask_of("float", name, torch.float32)
    args = [heads(dims[0], length=QUERIES), heads(dims[1]), heads(dims[2]), mask]
    dims = (*dims, mask_dim)

    exactly(vmap(gradients(by_rule, loss), dims)(*args), looped(gradients(attend, loss), args, dims))


@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_a_trained_mask_whose_gradient_is_taken_outside(name):
    """The gradient of a sum over members, with respect to masks (position biases), is the sum or stack of theirs."""
    mask, dim = mask_of("float", name, torch.float64)
    args = [heads(0, length=QUERIES, dtype=torch.float64), *[heads(0, dtype=torch.float64) for _ in "kv"]]
    dims = (0, 0, 0, dim)

    def total(mask):
        return vmap(by_rule, dims)(*args, mask).square().sum()

    def total_of_loop(mask):
        return looped(attend, [*args, mask], dims).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = grad(total)(mask)
    mask.requires_grad_()
    (want,) = torch.autograd.grad(total_of_loop(mask), mask)
    torch.testing.assert_close(got, want)


CAUSAL, GROUPED = {"is_causal": True}, {"enable_gqa": True}


@pytest.mark.parametrize("options", [CAUSAL, {"scale": 0.3}, GROUPED, CAUSAL | GROUPED], ids=str)
def test_options_of_the_call(options):
    """Causal attention, a scale, and groups of queries that share a key."""
    groups = 2 if options.get("enable_gqa") else HEADS
    args = [heads(0), heads(0, groups), heads(0, groups)]

    exactly(
        vmap(gradients(by_rule, **options))(*args),
        looped(gradients(attend, **options), args, (0, 0, 0)),
    )


@pytest.mark.parametrize("options", [{}, CAUSAL, GROUPED], ids=str)
def test_second_derivatives_are_those_of_the_formula(options):
    """The kernel of the gradient has none, so they come from the formula, here against torch's unfused attention."""
    groups = 2 if options.get("enable_gqa") else HEADS
    args = [heads(0, n, dtype=torch.float64) for n in (HEADS, groups, groups)]
    unfused = torch.ops.aten._scaled_dot_product_attention_math.default

    def second(attention):
        def norm(*args):
            return sum([x.square().sum() for x in gradients(attention)(*args)])

        return grad(norm, (0, 1, 2))

    def by_formula(*args):
        return unfused(*args, None, 0.0, options.get("is_causal", False), enable_gqa="enable_gqa" in options)[0]

    got = vmap(second(lambda *args: by_rule(*args, **options)))(*args)
    torch.testing.assert_close(got, looped(second(by_formula), args, (0, 0, 0)), rtol=1e-10, atol=1e-10)


def test_second_derivatives_with_a_mask():
    """A mask of each member is part of the formula."""
    args = [heads(0, length=QUERIES, dtype=torch.float64), heads(0, dtype=torch.float64), heads(0, dtype=torch.float64)]
    mask = torch.randn(MEMBERS, QUERIES, KEYS, dtype=torch.float64)
    unfused = torch.ops.aten._scaled_dot_product_attention_math.default

    def second(attention):
        return grad(lambda q, k, v, m: gradients(attention)(q, k, v, m)[0].square().sum(), 1)

    got = vmap(second(by_rule))(*args, mask)
    want = looped(second(lambda *args: unfused(*args)[0]), (*args, mask), (0, 0, 0, 0))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_forward_mode():
    """The kernel of torch has none; the rule takes the formula's tangent."""
    args = tuple([heads(0, dtype=torch.float64) for _ in range(3)])
    tangents = tuple([torch.randn_like(x) for x in args])

    got = vmap(lambda *both: jvp(by_rule, both[:3], both[3:])[1])(*args, *tangents)

    unfused = torch.ops.aten._scaled_dot_product_attention_math.default
    want = looped(lambda *both: jvp(lambda *x: unfused(*x)[0], both[:3], both[3:])[1], args + tangents, (0,) * 6)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_hessian():
    """Forward mode over a gradient."""
    args = [torch.randn(MEMBERS, 1, 1, 3, 2, dtype=torch.float64) for _ in range(3)]
    unfused = torch.ops.aten._scaled_dot_product_attention_math.default

    got = vmap(hessian(lambda *args: by_rule(*args).square().sum()))(*args)
    want = looped(hessian(lambda *args: unfused(*args)[0].square().sum()), args, (0, 0, 0))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_jacobian_of_the_queries_only():
    """Tensors without a tangent count as constants."""
    args = [torch.randn(MEMBERS, 1, 1, 3, 2, dtype=torch.float64) for _ in range(3)]
    unfused = torch.ops.aten._scaled_dot_product_attention_math.default

    got = vmap(jacfwd(by_rule))(*args)
    torch.testing.assert_close(got, looped(jacfwd(lambda *x: unfused(*x)[0]), args, (0, 0, 0)), rtol=1e-10, atol=1e-10)


def test_members_of_members():
    """Two levels of vmap are one call with the batch of both."""
    args = [torch.randn(2, MEMBERS, BATCH, HEADS, KEYS, FEATURES) for _ in range(3)]

    got = vmap(vmap(gradients(by_rule), (0, None, 0)), (0, 0, None))(args[0], args[1][:, 0], args[2][0])
    want = vmap(vmap(gradients(by_rule)))(args[0], args[1][:, :1].expand_as(args[0]), args[2][:1].expand_as(args[0]))
    exactly(got, want)


@pytest.mark.parametrize("rank", [2, 3])
def test_attention_without_heads_is_left_to_torch(rank):
    """The kernel takes four dimensions, and torch computes the others by its formula."""
    args = [torch.randn(MEMBERS, *(BATCH, 5, 6)[-rank:], dtype=torch.float64) for _ in range(3)]

    got = vmap(gradients(by_rule))(*args)
    torch.testing.assert_close(got, looped(gradients(attend), args, (0, 0, 0)))


def test_a_mask_that_is_trained_gets_its_gradient():
    """The kernel of torch would drop it."""
    args = [heads(0, dtype=torch.float64) for _ in range(3)]
    mask = torch.randn(MEMBERS, KEYS, KEYS, dtype=torch.float64)

    def of_mask(attention):
        return grad(lambda m, q, k, v: attention(q, k, v, m).square().sum())

    got = vmap(of_mask(by_rule))(mask, *args)
    torch.testing.assert_close(got, looped(of_mask(attend), (mask, *args), (0, 0, 0, 0)))


def test_a_mask_that_is_trained_through_a_shared_argument():
    """`grad` may be the outer transform."""
    args = [heads(0, dtype=torch.float64) for _ in range(3)]
    mask = torch.randn(KEYS, KEYS, dtype=torch.float64)

    got = grad(lambda m: vmap(lambda *args: by_rule(*args, m).square().sum())(*args).sum())(mask)
    want = grad(lambda m: looped(lambda *args: attend(*args, m), args, (0, 0, 0)).square().sum())(mask)
    torch.testing.assert_close(got, want)


def test_a_mask_beside_is_causal():
    """The kernel of torch takes both."""
    args = [heads(0), heads(0), heads(0), torch.randn(MEMBERS, KEYS, KEYS)]

    exactly(
        vmap(gradients(by_rule, is_causal=True))(*args),
        looped(gradients(attend, is_causal=True), args, (0, 0, 0, 0)),
    )


REFUSED = {
    "mask of another dtype": lambda q: attend(q, q, q, torch.zeros(KEYS, KEYS, dtype=torch.float64)),
    "keys of another dtype": lambda q: attend(q, q.double(), q),
    "keys of other features": lambda q: attend(q, q[..., :4], q),
    "mask of another size": lambda q: attend(q, q, q, torch.zeros(3, 3)),
    "heads that fit no group": lambda q: attend(q, q[:, :3], q[:, :3], enable_gqa=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_torch_refuses_are_refused(name):
    """By the rule as by the function."""
    queries = heads(0)
    with pytest.raises(RuntimeError):
        REFUSED[name](queries[0])

    def call(q):
        with Batching():
            return REFUSED[name](q)

    with pytest.raises(RuntimeError):
        vmap(call)(queries)


def test_a_rate_of_dropout_that_is_an_integer():
    """Zero is no dropout, of any type."""
    args = [heads(0) for _ in range(3)]

    exactly(vmap(lambda *args: by_rule(*args, dropout_p=0))(*args), looped(attend, args, (0, 0, 0)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_symbolic_sizes_are_left_to_torch():
    """A trace for any size holds no choice that depends on one."""
    args = [heads(0) for _ in range(3)]

    traced = make_fx(vmap(by_rule), tracing_mode="symbolic")(*args)
    torch.testing.assert_close(traced(*args), looped(attend, args, (0, 0, 0)))


def test_a_context_of_the_unfused_formula_is_kept():
    """`sdpa_kernel` chooses for the members as for one."""
    args = [heads(0) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        exactly(vmap(by_rule)(*args), looped(attend, args, (0, 0, 0)))


@pytest.mark.parametrize("empty", ["batch", "keys"])
def test_empty_tensors(empty):
    """No example, or no key."""
    shape = {"batch": (0, HEADS, KEYS, FEATURES), "keys": (BATCH, HEADS, 0, FEATURES)}[empty]
    args = [torch.randn(MEMBERS, *shape) for _ in range(3)]

    exactly(vmap(by_rule)(*args), looped(attend, args, (0, 0, 0)))


# -- models -----------------------------------------------------------------------------------------------------------


class Tower(nn.Module):
    """A layer of attention to its own input."""

    def __init__(self, kind):
        super().__init__()
        self.layer = kind()

    def forward(self, x):
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.layer(x, x, x)[0]
        return self.layer(x)


def encoder_layer(**options):
    """A small layer of an encoder."""
    return nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **options)


KINDS = {
    "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    "layer": lambda: encoder_layer(dropout=0.0),
    "norm first": lambda: encoder_layer(dropout=0.0, norm_first=True),
    "encoder": lambda: nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False),
    "nested": lambda: nn.TransformerEncoder(encoder_layer(), 2),
}


def stacked(kind, train):
    """Models of a kind, their pure function, and their stacked parameters."""
    models = [Tower(KINDS[kind]).double().train(train) for _ in range(MEMBERS)]
    apply, _, _ = tdf.functional(models[0])
    return models, apply, tdf.stack_modules(models)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", ["attention", "layer", "norm first"])
def test_models_with_attention_run_stacked(kind, train):
    """Each member equals its module, in training and in evaluation mode."""
    models, apply, params = stacked(kind, train)
    x = torch.randn(4, 5, 8, dtype=torch.float64)

    got = tdf.Ensemble(apply, "vmap")(params, x)
    torch.testing.assert_close(got, torch.stack([model(x) for model in models]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["attention", "layer", "norm first", "encoder", "nested"])
@pytest.mark.parametrize("how", ["vmap", "traced"])
def test_models_in_evaluation_mode_have_gradients(kind, how):
    """The fast path of torch's encoder layer has none."""
    models, apply, params = stacked(kind, train=False)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    grads = torch.func.grad(lambda p: tdf.Ensemble(apply, how)(p, x).square().sum())(params)

    for i, model in enumerate(models):
        model(x).square().sum().backward()
        want = tdf.from_module(model).apply(lambda leaf: leaf.grad)
        assert_trees_equal(grads[i], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_by_the_encoder_prints_nothing(kind):
    """No fast path is taken under vmap, whose kernel has no batching rule."""
    models, apply, params = stacked(kind, train=False)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.vmap(apply, (0, None))(params, x)
        want = torch.stack([model(x) for model in models])

    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_recorded_step():
    """The recorded gradient is that of the call."""
    _, apply, params = stacked("layer", train=True)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    step = torch.vmap(torch.func.grad(lambda p, x: apply(p, x).square().sum()), (0, None))

    recorded = tdf.jit(step)
    recorded(params, x)
    assert_trees_equal(recorded(params, 2 * x), step(params, 2 * x), rtol=1e-10, atol=1e-10)


def test_dropout_of_attention_by_keys():
    """A member's draws are those of its own call."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, FEATURES)

        def forward(self, x):
            return F.scaled_dot_product_attention(self.layer(x), x, x, dropout_p=0.5)

    models = [Dropping() for _ in range(MEMBERS)]
    apply, _, _ = tdf.functional(models[0])
    params = tdf.stack_modules(models)
    x = torch.randn(BATCH, HEADS, KEYS, FEATURES)
    key = tdf.random.key(7)

    got = tdf.Ensemble(apply, "vmap")(params, x, rng=key)
    torch.testing.assert_close(got, tdf.Ensemble(apply, "loop")(params, x, rng=key))
