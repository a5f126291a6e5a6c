"""Every way of running an ensemble gives what a loop over plain modules gives."""

from itertools import pairwise

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure

import tdfunc as tdf
from tdfunc.ops.batch.join import stack
from tests.ensemble.models import Returns, ensemble_of, make_cnn, make_mlp, make_resnet, make_transformer
from tests.helpers import TiedLM, assert_pure, assert_trees_equal, examples, quick

pytestmark = pytest.mark.sample(2)

WAYS = ("loop", "vmap", "traced", "auto")


def gpt2():
    """A tied GPT2 of 2 layers from a config, in evaluation mode."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2, attn_implementation="eager"
    )
    return transformers.GPT2LMHeadModel(config).eval()


MODELS = {
    "mlp": (make_mlp, lambda g: torch.randn(5, 3, generator=g)),
    "resnet": (make_resnet, lambda g: torch.randn(2, 3, 8, 8, generator=g)),
    "transformer": (make_transformer, lambda g: torch.randn(2, 5, 8, generator=g)),
    "tied": (TiedLM, lambda g: torch.randint(0, 7, (2, 5), generator=g)),
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_loop_of_plain_modules(name, how, generator):
    """Every way of running gives the outputs of the modules."""
    make, data = MODELS[name]
    models, x = [make().eval() for _ in range(3)], data(generator)
    ensemble, tree = ensemble_of(models, how)

    out = ensemble(tree, x)

    assert_close(out, torch.stack([model(x) for model in models]))


@pytest.mark.parametrize("how", quick(WAYS, "loop", "vmap", "auto"))
def test_hugging_face_model(how, generator):
    """A tied Hugging Face model runs and returns its ModelOutput."""
    models, ids = [gpt2() for _ in range(3)], torch.randint(0, 17, (2, 6), generator=generator)
    ensemble, tree = ensemble_of(models, how)
    out = ensemble(tree, ids, use_cache=False)

    assert tree["lm_head", "weight"] is tree["transformer", "wte", "weight"]

    assert type(out).__name__ == "CausalLMOutputWithCrossAttentions"
    assert_close(out.logits, torch.stack([model(ids).logits for model in models]))


class Adds(nn.Module):
    """body(x) + scale * y["b"] + offset, with a keyword and a container among the arguments."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, y, *, scale=1.0, offset=None):
        out = self.body(x) + scale * y["b"]
        return out if offset is None else out + offset


@st.composite
def makers(draw):
    """A function that makes modules of one random architecture: (B, 3) to (B, 2)."""
    widths = [3, *draw(st.lists(st.integers(1, 4), max_size=2)), 2]
    layers = st.sampled_from([nn.BatchNorm1d, nn.LayerNorm, nn.PReLU, lambda width: nn.Tanh(), lambda width: nn.ReLU()])
    after = [draw(st.lists(layers, max_size=2)) for _ in widths[1:]]
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))

    def make():
        parts = [
            [nn.Linear(*pair), *[layer(pair[1]) for layer in layers]]
            for pair, layers in zip(pairwise(widths), after, strict=True)
        ]
        return Adds(nn.Sequential(*[layer for part in parts for layer in part])).to(dtype).eval()

    return make, dtype


@examples(0.6)
@given(
    maker=makers(),
    members=st.integers(1, 5),
    rows=st.integers(0, 4),
    chunk=st.none() | st.integers(1, 6),
    how=st.sampled_from(WAYS),
    dims=st.tuples(st.sampled_from([None, 0, 1, 2, -1, -2, -3]), st.sampled_from([None, 0, 1, -1, -2])),
    options=st.fixed_dictionaries({}, optional={"scale": st.sampled_from([2, 2.0, True]), "offset": st.just(3.0)}),
)
def test_law_an_ensemble_is_a_loop_over_its_members(maker, members, rows, chunk, how, dims, options):
    """Every way gives the members' own outputs, for any architecture, dimensions of the data and chunks."""
    make, dtype = maker
    models = [make() for _ in range(members)]
    data = torch.arange(members * rows * 3.0).sin().reshape(members, rows, 3).to(dtype)
    b = torch.arange(members * 2.0).cos().reshape(members, 2).to(dtype)
    x, y = [values[0] if dim is None else values.movedim(0, dim) for values, dim in zip((data, b), dims, strict=True)]
    ensemble, tree = ensemble_of(models, how, chunk_size=chunk)
    out = ensemble(tree, x, {"b": y, "name": "y"}, in_dims=(dims[0], {"b": dims[1], "name": None}), **options)
    each = [(0 if dims[0] is None else i, 0 if dims[1] is None else i) for i in range(members)]
    expected = [m(data[i], {"b": b[j]}, **options) for m, (i, j) in zip(models, each, strict=True)]

    assert out.dtype == dtype
    # bfloat16 has 8 bits, and a batched product may round another way.
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    assert_close(out, torch.stack(expected), **tolerance)


class Branches(nn.Module):
    """A trunk with batch norm, tied weights in trunk and head, and a head with dropout: (B, 3) to (B, 3)."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.head[0].bias = self.trunk[0].bias

    def forward(self, x):
        return self.head(self.trunk(x))


@examples(0.4)
@given(
    members=st.integers(1, 4),
    how=st.sampled_from(WAYS),
    chunk=st.none() | st.integers(1, 4),
    training=st.booleans(),
    dim=st.sampled_from([None, 0, 1]),
    where=st.sampled_from(["trunk*", "*.weight", "*0.bias", "trunk.1.*", lambda path, leaf: False]),
)
@pytest.mark.filterwarnings("ignore:Ensemble. forward wrote the buffers:UserWarning")
def test_law_shared_leaves_are_stacked_copies(members, how, chunk, training, dim, where):
    """Members that share leaves compute what they compute with copies of them, and a shared leaf gets all gradients."""
    seed = 7 if training and how != "traced" else None
    apply = tdf.functional(Branches())[0].train(seed is not None)
    x = torch.arange(members * 12.0).sin().reshape(members, 4, 3)
    x = x[0] if dim is None else x.movedim(0, dim)
    # In training mode each member has its own statistics.
    where = tdf.Filter(where) if seed is None else tdf.Filter(where) & tdf.Kind.PARAMETER
    tree = tdf.init_ensemble(Branches, members)
    (one, _), (_, own) = tdf.partition(tree[0], where), tdf.partition(tree, where)
    ways = [
        (tdf.Ensemble(apply, "loop"), tdf.combine(stack([one] * members), own)),
        (tdf.Ensemble(apply, how, chunk_size=chunk, shared=where), tdf.combine(one, own)),
    ]
    expected, out = [run(tree, x, in_dims=dim, rng=seed) for run, tree in ways]
    assert_close(out, expected, rtol=1e-4, atol=1e-5)

    def gradient(run, tree):
        params, buffers = tdf.split(tree)
        return torch.func.grad(lambda p: run(tdf.combine(p, buffers), x, in_dims=dim, rng=seed).sin().sum())(params)

    for each, ours in zip(*[gradient(*way).leaves() for way in ways], strict=True) if how != "traced" else ():
        assert_close(ours, each if each.dim() == ours.dim() else each.sum(0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.filterwarnings("ignore:Ensemble. forward wrote the buffers:UserWarning")
def test_nothing_given_is_written(how, generator):
    """BatchNorm leaves the caller's stacked statistics as they are."""
    ensemble, tree = ensemble_of([make_cnn() for _ in range(3)], how)
    x = torch.randn(2, 3, 8, 8, generator=generator)

    assert_pure(lambda *_: ensemble(tree, x), tree, x)


# -- outputs ----------------------------------------------------------------------------------------------------


OUTPUTS = {
    "containers": lambda y: {"y": y, "both": (y.sum(-1), [None, 3, "text"])},
    "a tree": lambda y: tdf.TensorDict({"y": y, "note": "ok"}, [5]),
    "nothing": lambda y: None,
    "a constant": lambda y: torch.ones(2),
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("fn", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs(fn, how):
    """Containers, trees, None and plain values come back with the tensors of all members stacked."""
    models = [Returns(fn) for _ in range(3)]
    ensemble, tree = ensemble_of(models, how, chunk_size=2)
    x = torch.ones(5, 3)
    flat, specs = zip(*[tree_flatten(model(x)) for model in models], strict=True)
    expected = [torch.stack(xs) if isinstance(xs[0], torch.Tensor) else xs[0] for xs in zip(*flat, strict=True)]

    out = ensemble(tree, x)

    assert getattr(out, "batch_size", (3, 5)) == (3, 5)
    assert tree_structure(out) == specs[0]
    assert_trees_equal(tree_leaves(out), expected, atol=1e-6, rtol=1e-5)


class Opaque:
    """No container that torch's pytree knows."""


@pytest.mark.parametrize("how", WAYS)
def test_opaque_outputs_are_refused(how):
    """An output that torch's pytree does not know is refused: its tensors cannot be stacked."""
    ensemble, tree = ensemble_of([Returns(lambda y: (y, Opaque())) for _ in range(3)], how)

    with pytest.raises(tdf.UnsupportedError, match=r"(?s)Opaque.*pytree|result.*Opaque"):
        ensemble(tree, torch.ones(5, 3))


@pytest.mark.parametrize("how", ["loop", "auto"])
def test_plain_values_must_agree(how):
    """Plain values that differ between members are refused."""
    models = [Returns(lambda y: y.sum().item()) for _ in range(2)]
    ensemble, tree = ensemble_of(models, how)
    values = [model(torch.ones(5, 3)) for model in models]

    with pytest.raises(tdf.UnsupportedError) as caught:
        ensemble(tree, torch.ones(5, 3))
    assert "member 1" in str(caught.value)
    assert all(str(value) in str(caught.value) for value in values)


def test_structures_must_agree():
    """Outputs of different structures are refused."""
    ensemble, tree = ensemble_of([Returns(lambda y: [y] * (1 + int(y.sum() > 0))) for _ in range(2)], "loop")
    tree = tree.set(("linear", "bias"), torch.tensor([[-99.0] * 2, [99.0] * 2]))

    with pytest.raises(tdf.UnsupportedError, match=r"(?s)member 1 .*structure.*expected: .*\n  got: "):
        ensemble(tree, torch.ones(5, 3))


# -- data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
def test_tree_arguments(how):
    """A TensorDict argument arrives with the batch size of one member of this call."""
    models = [Returns(lambda y, data: y + data["b"] + data.batch_dims) for _ in range(3)]
    ensemble, tree = ensemble_of(models, how)
    x, values, sizes = torch.ones(5, 3), torch.arange(30.0).reshape(3, 5, 2), ([3, 5], [3], [3, 5])
    found = [ensemble(tree, x, tdf.TensorDict({"b": values}, size), in_dims=(None, 0)) for size in sizes]

    plain = torch.stack([model.linear(x) for model in models]) + values
    assert_close(found, [plain + len(size) - 1 for size in sizes])


@pytest.mark.parametrize("how", WAYS)
def test_tree_arguments_of_all_members(how):
    """A TensorDict argument by keyword is one for all members."""
    models = [Returns(lambda y, data: y + data["b"] + data.batch_dims) for _ in range(3)]
    ensemble, tree = ensemble_of(models, how)
    data = tdf.TensorDict({"b": torch.arange(10.0).reshape(5, 2)}, [5])

    out = ensemble(tree, torch.ones(5, 3), data=data)
    assert_close(out, torch.stack([model.linear(torch.ones(5, 3)) for model in models]) + data["b"] + 1)


# -- buffers ----------------------------------------------------------------------------------------------------


def test_buffers_inside_params_or_beside_them(generator):
    """The whole tree of stack_modules and params with buffers= give the same."""
    last = Returns(lambda y: y + torch.zeros(0).add_(1).sum())
    last.register_buffer("empty", torch.zeros(0))
    ensemble, tree = ensemble_of([nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), last) for _ in range(3)])
    params, buffers = tdf.split(tree)
    whole, new = ensemble.with_buffers(tree, None, x := torch.randn(5, 3, generator=generator))

    with pytest.warns(UserWarning, match=r"(?s)wrote the buffers \['0\.[^12]*\],.*with_buffers") as caught:
        assert_close(whole, ensemble(params, x, buffers=buffers))
    assert caught[0].filename == __file__
    # Once.
    ensemble(params, x, buffers=buffers)
    tdf.Ensemble(ensemble.apply.eval())(params, x, buffers=buffers)
    assert_trees_equal(tdf.split(new)[1], ensemble.with_buffers(params, buffers, x)[1])
    assert torch.equal(new["0", "weight"], tree["0", "weight"])


def test_a_prediction_in_training_mode_is_noticed(generator):
    """A call with the whole tree drops the new statistics with a warning; in evaluation mode nothing is written."""
    ensemble, tree = ensemble_of([nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(3)])
    x = torch.randn(5, 3, generator=generator)
    tdf.Ensemble(ensemble.apply.eval())(tree, x)

    with pytest.warns(UserWarning, match=r"(?s)wrote the buffers.*apply\.eval\(\) writes none"):
        ensemble(tree, x)


class Cached(nn.Module):
    """A layer that writes a buffer in every mode."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("cache", torch.zeros(3))

    def forward(self, x):
        self.cache.copy_(x.mean(0))
        return self.layer(x)


def test_a_buffer_written_in_evaluation_mode_is_noticed(generator):
    """The warning does not advise the mode that the module has already."""
    ensemble, tree = ensemble_of([Cached().eval() for _ in range(3)])

    with pytest.warns(UserWarning, match=r"(?s)wrote the buffers.*with_buffers\(params, buffers, x\) keeps them\.$"):
        ensemble(tree, torch.randn(5, 3, generator=generator))


# -- transforms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
def test_transforms_around_it(how, generator):
    """grad, vmap and jvp over an ensemble give the numbers of the loop."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)], how)
    loop = tdf.Ensemble(ensemble.apply, "loop")
    x = torch.randn(4, 5, 3, generator=generator)

    def loss(run):
        return lambda tree: run(tree, x[0]).square().sum()

    assert_trees_equal(torch.func.grad(loss(ensemble))(tree), torch.func.grad(loss(loop))(tree), rtol=1e-4, atol=1e-5)
    assert_close(torch.vmap(lambda x: ensemble(tree, x))(x), torch.stack([loop(tree, row) for row in x]))
    pairs = [torch.func.jvp(lambda x, run=run: run(tree, x), (x[0],), (x[1],)) for run in (ensemble, loop)]
    assert_close(*pairs)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loop", "vmap", "auto"])
@pytest.mark.parametrize("members", [1, 3])
def test_compile_in_one_graph(how, members, generator):
    """torch.compile(fullgraph=True) meets no break, and compiles once for all weights."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(members)], how)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda tree, x: ensemble(tree, x), fullgraph=True, backend=counter)
    x = torch.randn(5, 3, generator=generator)
    trees = [tree * scale for scale in (1.0, 2.0, 3.0)]

    assert_close([compiled(each, x) for each in trees], [ensemble(each, x) for each in trees])
    assert counter.frame_count == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(compiled(tree, x), ensemble(tree, x))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.filterwarnings("ignore:Ensemble. forward wrote the buffers:UserWarning")
def test_inference_mode(how, generator):
    """A call in inference mode gives the same outputs, and later calls are not affected."""
    ensemble, tree = ensemble_of([make_cnn() for _ in range(2)], how)
    x = torch.randn(2, 3, 8, 8, generator=generator)
    with torch.inference_mode():
        out = ensemble(tree, x)

    assert_close(out, ensemble(tree, x))


@pytest.mark.parametrize("how", ["loop", "vmap", "auto"])
def test_meta(how):
    """Meta tensors give the shapes without computing."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)], how)
    out = ensemble(tree.to("meta"), torch.ones(5, 3, device="meta"))

    assert out.is_meta is True
    assert out.shape == (3, 5, 2)


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad_calls", [1, 2, 3])
@pytest.mark.parametrize(("how", "plan"), [(how, "vmap" if how == "auto" else how) for how in WAYS])
def test_bad_input_is_the_inputs_fault(how, plan, bad_calls):
    """An input of a wrong shape raises at each call, and the next call runs as before."""
    ensemble, tree = ensemble_of([nn.Linear(3, 2) for _ in range(3)], how)
    for _ in range(bad_calls):
        with pytest.raises(RuntimeError, match=r"5x4|4x5|1x4|size|shape"):
            ensemble(tree, torch.ones(5, 4))

    assert ensemble(tree, torch.ones(5, 3)).shape == (3, 5, 2)
    assert ensemble.plan().startswith(plan)
