"""Outputs that hold caches of transformers: stacked by their fields, and nodes of the pytree inside transforms."""

import collections
import copy
import pickle

import pytest
import torch
from torch.utils._pytree import tree_leaves

import tdfunc as tdf
from tdfunc.core.objects import open_objects

transformers = pytest.importorskip("transformers")
WAYS = ["loop", "vmap", "auto", "traced"]


def gpt2():
    """Return a decoder with random weights."""
    config = transformers.GPT2Config(
        vocab_size=17, n_embd=8, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2Model(config).double().eval()


def t5():
    """Return an encoder and decoder with random weights."""
    config = transformers.T5Config(
        vocab_size=17, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5Model(config).double().eval()


def gemma2():
    """Return a decoder with a sliding window with random weights."""
    config = transformers.Gemma2Config(
        vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, sliding_window=4,
    )  # fmt: skip
    return transformers.Gemma2Model(config).double().eval()


INPUTS = {gpt2: ["input_ids"], t5: ["input_ids", "decoder_input_ids"], gemma2: ["input_ids"]}


def members(make, n=3):
    """Return models, the pure function of the first, and their stacked trees."""
    models = [make() for _ in range(n)]
    apply, _, _ = tdf.functional(models[0])
    return models, apply, *tdf.split(tdf.stack_modules(models))


def tensors(out):
    """Return the tensors of an output and of its caches."""
    return [leaf for leaf in tree_leaves(open_objects(out)) if isinstance(leaf, torch.Tensor)]


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("make", INPUTS)
def test_caches_are_stacked_by_their_fields(make, how, generator):
    """The cache of an ensemble holds the keys and values of each member."""
    models, apply, params, buffers = members(make)
    data = {name: torch.randint(17, (2, 6), generator=generator) for name in INPUTS[make]}

    out = tdf.Ensemble(apply, how=how)(params, buffers=buffers, **data)

    expected = [torch.stack(parts) for parts in zip(*[tensors(model(**data)) for model in models], strict=True)]
    torch.testing.assert_close(tensors(out), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_stacked_cache_is_a_cache(generator):
    """Its class is a subclass of the library's, and its methods work on stacked tensors."""
    _, apply, params, buffers = members(gpt2)
    ids = torch.randint(17, (2, 6), generator=generator)
    cache = tdf.Ensemble(apply)(params, ids, buffers=buffers).past_key_values

    assert isinstance(cache, transformers.DynamicCache)
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_the_class_of_the_library(copied, generator):
    """A pickle can be read without this package, and holds the same tensors."""
    _, apply, params, buffers = members(gpt2)
    ids = torch.randint(17, (2, 6), generator=generator)
    cache = tdf.Ensemble(apply, how="loop")(params, ids, buffers=buffers).past_key_values

    assert type(copied(cache)) is transformers.DynamicCache
    assert torch.equal(copied(cache).layers[0].keys, cache.layers[0].keys)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_cache_passes_through_vmap_and_back(generator):
    """Members continue a text from their own caches, as each model does."""
    models, apply, params, buffers = members(gpt2)
    ids, last = torch.randint(17, (2, 6), generator=generator), torch.randint(17, (2, 1), generator=generator)

    first = torch.vmap(lambda p, b: apply(p, ids, buffers=b))(params, buffers)
    got = torch.vmap(lambda p, b, cache: apply(p, last, buffers=b, past_key_values=cache).last_hidden_state)(
        params, buffers, first.past_key_values
    )

    expected = [model(torch.cat([ids, last], 1)).last_hidden_state[:, -1:] for model in models]
    torch.testing.assert_close(got, torch.stack(expected))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_nested_vmap_returns_a_cache(generator):
    """A cache that an inner vmap returns passes through the outer one."""
    _, apply, params, buffers = members(gpt2)
    ids = torch.randint(17, (2, 6), generator=generator)

    nested = torch.vmap(torch.vmap(lambda p, b: apply(p, ids, buffers=b).past_key_values))
    cache = nested(params.unsqueeze(0), buffers.unsqueeze(0))

    assert cache.layers[1].values.shape == (1, 3, 2, 2, 6, 4)


def test_a_cache_may_be_an_auxiliary_output_of_a_gradient(generator):
    """The tensors of a cache that `grad` returns are plain ones, outside of the gradient."""
    (model,), apply, params, buffers = members(gpt2, 1)
    ids = torch.randint(17, (2, 6), generator=generator)

    def loss(p):
        out = apply(p, ids, buffers=buffers[0])
        return out.last_hidden_state.square().sum(), out

    _, out = torch.func.grad(loss, has_aux=True)(params[0])

    torch.testing.assert_close(tensors(out), tensors(model(ids)))


def test_a_record_returns_a_cache(generator):
    """`jit` makes the cache again at each replay, around new tensors."""
    (model,), apply, params, buffers = members(gpt2, 1)
    step = tdf.jit(lambda p, b, ids: apply(p, ids, buffers=b))
    for _ in range(2):
        ids = torch.randint(17, (2, 6), generator=generator)
        out = step(params[0], buffers[0], ids)

    torch.testing.assert_close(tensors(out), tensors(model(ids)))


def test_a_cache_outside_of_transforms_is_the_library_s():
    """`apply` returns what forward returned, and does not copy it."""
    (_,), apply, params, buffers = members(gpt2, 1)

    out = apply(params[0], torch.tensor([[1, 2]]), buffers=buffers[0])

    assert type(out.past_key_values) is transformers.DynamicCache


class Chain:
    """An object that leads back to itself."""

    def __init__(self):
        self.tensor = torch.ones(2)
        self.me = self


class Slots:
    """An object whose tensor is in a slot, beside a dict."""

    __slots__ = ("__dict__", "tensor")

    def __init__(self):
        self.other = torch.ones(2)


@pytest.mark.parametrize("part", [Chain, Slots, lambda: collections.OrderedDict(a=torch.ones(2))])
def test_caches_that_cannot_be_made_again_stay(part):
    """A cache is left as it is, for torch or the ensemble to refuse, if a part of it holds tensors in another way."""
    cache = transformers.DynamicCache()
    cache.part = part()

    assert open_objects(cache) is cache


def test_parts_without_tensors_stay_the_same_objects():
    """A configuration in a cache is not copied."""
    cache = transformers.DynamicCache()
    cache.config = transformers.GPT2Config()
    node = open_objects({"cache": cache})["cache"]
    (again,) = torch.utils._pytree.tree_map(lambda x: x + 1, [node])

    assert again.config is cache.config
