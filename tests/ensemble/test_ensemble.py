"""Every way of running an ensemble gives what a loop over plain modules gives."""

import copy

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from tdfunc import (
    Ensemble,
    TensorDict,
    UnsupportedError,
    functional,
    init_ensemble,
    split,
    stack_modules,
)
from tdfunc.ops.join import stack
from tests.ensemble.models import Returns, ensemble_of, make_mlp, make_resnet, make_transformer
from tests.helpers import TiedLM, assert_pure, assert_trees_equal

WAYS = ("loop", "vmap", "traced", "auto")


def call_often(ensemble, *args, **kwargs):
    """The results of four calls: `auto` runs the first two by vmap and replays a trace from the third on."""
    return [ensemble(*args, **kwargs) for _ in range(4)]


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


# The transformer's fast path in evaluation mode has no batching rule: torch loops inside its vmap, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_loop_of_plain_modules(name, how, generator):
    """A way of running would compute something else than the modules do."""
    make, data = MODELS[name]
    models, x = [make().eval() for _ in range(3)], data(generator)
    ensemble, tree = ensemble_of(models, how)

    for out in call_often(ensemble, tree, x):
        assert_close(out, torch.stack([model(x) for model in models]))


@pytest.mark.parametrize("how", WAYS)
def test_hugging_face_model(how, generator):
    """A tied Hugging Face model could not be run, or its ModelOutput would be lost."""
    models, ids = [gpt2() for _ in range(3)], torch.randint(0, 17, (2, 6), generator=generator)
    ensemble, tree = ensemble_of(models, how)
    out = call_often(ensemble, tree, ids, use_cache=False)[-1]

    assert type(out).__name__ == "CausalLMOutputWithCrossAttentions"
    assert_close(out.logits, torch.stack([model(ids).logits for model in models]))


@given(
    members=st.integers(1, 5),
    rows=st.integers(0, 4),
    chunk=st.none() | st.integers(1, 6),
    how=st.sampled_from(WAYS),
    mapped=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_law_member_i_is_apply_of_tree_i(members, rows, chunk, how, mapped, dtype):
    """Member i would depend on the other members, on the chunks or on the way that was chosen."""
    tree = init_ensemble(make_mlp, members).to(dtype)
    apply, _, _ = functional(make_mlp())
    x = torch.arange(members * rows * 3.0).sin().reshape(members, rows, 3).to(dtype)
    out = Ensemble(apply, how, chunk_size=chunk)(tree, x if mapped else x[0], in_dims=0 if mapped else None)
    expected = torch.stack([apply(tree[i], x[i] if mapped else x[0]) for i in range(members)])

    assert out.dtype == dtype
    # bfloat16 has 8 bits, and a batched product may round another way.
    assert_close(out.float(), expected.float(), rtol=1e-5, atol=2e-2 if dtype is torch.bfloat16 else 1e-6)


def test_oracle_vmap_of_functional_call(generator):
    """The numbers would differ from torch's own ensembling."""
    models, x = [make_mlp() for _ in range(4)], torch.randn(5, 3, generator=generator)
    params, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    expected = torch.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))(params, buffers)
    ensemble, tree = ensemble_of(models)

    assert_close(ensemble(tree, x), expected)


@pytest.mark.parametrize("how", WAYS)
def test_nothing_given_is_written(how, generator):
    """BatchNorm would update the caller's stacked statistics."""
    ensemble, tree = ensemble_of([make_resnet() for _ in range(3)], how)
    x = torch.randn(2, 3, 8, 8, generator=generator)

    assert_pure(lambda *_: call_often(ensemble, tree, x), tree, x)


# -- outputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
def test_structured_outputs(how):
    """Tuples, dicts, None and plain values beside the tensors would be lost."""
    models = [Returns(lambda y: {"y": y, "both": (y.sum(-1), [None, 3, "text"])}) for _ in range(3)]
    ensemble, tree = ensemble_of(models, how)
    x = torch.ones(5, 3)

    for out in call_often(ensemble, tree, x):
        assert_close(out["y"], torch.stack([model.linear(x) for model in models]))
        assert out["both"][0].shape == (3, 5)
        assert out["both"][1] == [None, 3, "text"]


@pytest.mark.parametrize("how", WAYS)
def test_tree_outputs_have_the_members_in_their_batch_size(how):
    """A TensorDict that forward returns would keep the batch size of one member."""
    models = [Returns(lambda y: TensorDict({"y": y, "note": "ok"}, [5])) for _ in range(3)]
    ensemble, tree = ensemble_of(models, how)
    x = torch.ones(5, 3)
    expected = stack([TensorDict({"y": model.linear(x), "note": "ok"}, [5]) for model in models]).detach()

    for out in call_often(ensemble, tree, x):
        assert out.batch_size == (3, 5)
        assert_close(out["y"], expected["y"])


@pytest.mark.parametrize("how", WAYS)
def test_output_without_tensors(how):
    """A forward that returns nothing, or a constant for all members, could not be run."""
    nothing, tree = ensemble_of([Returns(lambda y: None) for _ in range(3)], how)
    constant, _ = ensemble_of([Returns(lambda y: torch.ones(2)) for _ in range(3)], how)

    assert call_often(nothing, tree, torch.ones(5, 3)) == [None] * 4
    assert_close(call_often(constant, tree, torch.ones(5, 3))[-1], torch.ones(3, 2))


class Opaque:
    """No container that torch's pytree knows."""


@pytest.mark.parametrize("how", WAYS)
def test_opaque_outputs_are_refused(how):
    """Tensors inside an unknown object would leave the vmap, dead, or be one member's alone."""
    ensemble, tree = ensemble_of([Returns(lambda y: (y, Opaque())) for _ in range(3)], how)

    with pytest.raises(UnsupportedError, match=r"(?s)Opaque.*pytree|result.*Opaque"):
        ensemble(tree, torch.ones(5, 3))


@pytest.mark.parametrize("how", ["loop", "auto"])
def test_plain_values_must_agree(how):
    """The first member's number would be returned as if it were everybody's."""
    models = [Returns(lambda y: y.sum().item()) for _ in range(2)]
    ensemble, tree = ensemble_of(models, how)
    values = [model(torch.ones(5, 3)) for model in models]

    with pytest.raises(UnsupportedError) as caught:
        ensemble(tree, torch.ones(5, 3))
    assert "member 1" in str(caught.value)
    assert all(str(value) in str(caught.value) for value in values)


def test_structures_must_agree():
    """Outputs of another structure would be zipped together."""
    ensemble, tree = ensemble_of([Returns(lambda y: [y] * (1 + int(y.sum() > 0))) for _ in range(2)], "loop")
    tree = tree.set(("linear", "bias"), torch.tensor([[-99.0] * 2, [99.0] * 2]))

    with pytest.raises(UnsupportedError, match=r"(?s)member 1 .*structure.*expected: .*\n  got: "):
        ensemble(tree, torch.ones(5, 3))


# -- data -------------------------------------------------------------------------------------------------------


class Adds(nn.Module):
    """x @ w + scale * y["b"], with a keyword and a tree among the arguments."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 2))

    def forward(self, x, y, *, scale=1.0, offset=None):
        out = x @ self.w + scale * y["b"]
        return out if offset is None else out + offset


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("chunk", [None, 2])
def test_nested_in_dims_and_keywords(how, chunk, generator):
    """Data of the members inside containers, negative dimensions or keywords would not reach their member."""
    models = [Adds() for _ in range(3)]
    ensemble, tree = ensemble_of(models, how, chunk_size=chunk)
    x, b = torch.randn(5, 3, 3, generator=generator), torch.randn(5, 2, 3, generator=generator)
    y, offset = {"b": b, "name": "y"}, torch.ones(2)
    expected = [m(x[:, i], {"b": b[..., i]}, scale=2.0, offset=offset) for i, m in enumerate(models)]

    for in_dims in ((1, {"b": -1, "name": None}), (1, -1), [1, -1]):
        out = call_often(ensemble, tree, x, y, in_dims=in_dims, scale=2.0, offset=offset)[-1]
        assert_close(out, torch.stack(expected))


def test_keyword_values_are_part_of_the_trace(generator):
    """A replay would use the keyword of an earlier call."""
    ensemble, tree = ensemble_of([Adds() for _ in range(3)])
    x, y = torch.randn(5, 3, generator=generator), {"b": torch.ones(2)}

    for scale in (1.0, 1, 2.0, True, 3.0, 1.0, 2.0, 3.0, 2.0, 1.0):
        out = ensemble(tree, x, y, scale=scale)
        assert_close(out, Ensemble(ensemble.apply, "loop")(tree, x, y, scale=scale))


@pytest.mark.parametrize("how", WAYS)
def test_tree_arguments(how):
    """A TensorDict argument would arrive with the members in its batch size, or with that of another call."""
    models = [Returns(lambda y, data: y + data["b"] + data.batch_dims) for _ in range(3)]
    ensemble, tree = ensemble_of(models, how)
    x = torch.ones(5, 3)
    for batch_size in ([3, 5], [3], [3, 5]):
        data = TensorDict({"b": torch.arange(30.0).reshape(3, 5, 2)}, batch_size)
        mapped = Ensemble(functional(Both())[0], how)
        out = call_often(mapped, tree, x, data, in_dims=(None, 0))[-1]

        assert_close(out, torch.stack([m.linear(x) + data["b"][i] + len(batch_size) - 1 for i, m in enumerate(models)]))
    assert ensemble(tree, x, data=data[0]).shape == (3, 5, 2)


class Both(nn.Module):
    """Adds a tree's leaf and its number of batch dimensions to linear(x)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.fn = None

    def forward(self, x, data):
        return self.linear(x) + data["b"] + data.batch_dims


# -- buffers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("chunk", [None, 2])
def test_batch_norm_trains_like_the_modules(how, chunk, generator):
    """Statistics would be lost, shared by the members, or those of an earlier step."""
    models = [make_resnet().train() for _ in range(3)]
    ensemble, tree = ensemble_of(models, how, chunk_size=chunk)
    params, buffers = split(tree)
    for _ in range(4):
        x = torch.randn(4, 3, 8, 8, generator=generator)
        out, buffers = ensemble.with_buffers(params, buffers, x)

        assert_close(out, torch.stack([model(x) for model in models]))
    assert_trees_equal(buffers, split(stack_modules(models))[1], rtol=1e-5, atol=1e-6)


def test_buffers_inside_params_or_beside_them(generator):
    """The whole tree of stack_modules, or params with buffers=, could not be passed."""
    ensemble, tree = ensemble_of([nn.BatchNorm1d(3) for _ in range(3)])
    params, buffers = split(tree)
    x = torch.randn(5, 3, generator=generator)
    whole, new = ensemble.with_buffers(tree, None, x)

    assert_close(whole, ensemble(params, x, buffers=buffers))
    assert_trees_equal(split(new)[1], ensemble.with_buffers(params, buffers, x)[1])
    assert torch.equal(new["weight"], tree["weight"])


# -- transforms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["loop", "vmap", "auto"])
def test_autograd_reaches_the_members(how, generator):
    """Training through an ensemble would give no gradients, or a replay would cut them off."""
    models, x = [make_mlp() for _ in range(3)], torch.randn(5, 3, generator=generator)
    ensemble, tree = ensemble_of(models, how)
    tree = tree.apply(lambda leaf: leaf.requires_grad_())
    for model in models:
        model(x).square().sum().backward()
    out = call_often(ensemble, tree, x)[-1]
    out.square().sum().backward()

    assert_close(tree["0", "weight"].grad, torch.stack([model[0].weight.grad for model in models]))


@pytest.mark.parametrize("how", WAYS)
def test_transforms_around_it(how, generator):
    """grad, vmap and jvp over an ensemble would fail or give other numbers than over the loop."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)], how)
    loop = Ensemble(ensemble.apply, "loop")
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
    """torch.compile(fullgraph=True) would meet a break, or recompile when only the weights change."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(members)], how)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda tree, x: ensemble(tree, x), fullgraph=True, backend=counter)
    x = torch.randn(5, 3, generator=generator)

    for scale in (1.0, 2.0, 3.0):
        assert_close(compiled(tree * scale, x), ensemble(tree * scale, x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("how", WAYS)
def test_inference_mode(how, generator):
    """An ensemble could not be used for inference, or a replay would keep inference tensors."""
    ensemble, tree = ensemble_of([make_resnet() for _ in range(2)], how)
    x = torch.randn(2, 3, 8, 8, generator=generator)
    with torch.inference_mode():
        outs = call_often(ensemble, tree, x)

    assert_close(outs[-1], ensemble(tree, x))


@pytest.mark.parametrize("how", ["loop", "vmap", "auto"])
def test_meta(how):
    """Shapes could not be asked for without computing."""
    ensemble, tree = ensemble_of([make_mlp() for _ in range(3)], how)
    out = call_often(ensemble, tree.to("meta"), torch.ones(5, 3, device="meta"))[-1]

    assert out.is_meta
    assert out.shape == (3, 5, 2)


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS)
def test_bad_input_is_the_inputs_fault(how):
    """An input of a wrong shape would be taken for a forward that vmap cannot run, for ever."""
    ensemble, tree = ensemble_of([nn.Linear(3, 2) for _ in range(3)], how)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"5x4|4x5|1x4|size|shape"):
            ensemble(tree, torch.ones(5, 4))
    assert ensemble(tree, torch.ones(5, 3)).shape == (3, 5, 2)
    assert ensemble.plan().startswith("vmap" if how == "auto" else how)
