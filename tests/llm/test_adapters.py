"""A language model with adapters scores and generates as the model into whose weights they are merged."""

import functools

import pytest
import torch

import tdfunc as tdf
from tdfunc.llm import GenerationOptions, Tokens, causal_lm, generate, generate_tokens, logits, score, score_ids
from tests.lora.layers import llama, trained

WHERE = {"body": "*_proj.weight", "head": "lm_head.weight", "both": tdf.Filter("*_proj.weight") | "lm_head.weight"}


def setup(where, dora=False, **options):
    """A language model, its trees, and adapters."""
    torch.manual_seed(0)
    lm, params, buffers = causal_lm(llama(eos_token_id=None, **options))
    lora = tdf.lora.Lora(where, rank=2, dora=dora)
    return lm, params, buffers, lora, trained(lora, params, lm.apply)


IDS = torch.randint(1, 32, (3, 7), generator=torch.Generator().manual_seed(1))
MASK = torch.arange(7) < torch.tensor([[7], [4], [5]])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("where", WHERE)
def test_scores_are_those_of_the_merged_model(where, dora, packed):
    """Also where the head has an adapter."""
    lm, params, buffers, lora, adapters = setup(WHERE[where], dora)
    lm = lm.with_options(packed=packed)

    found = score_ids(lora.attach(lm), (params, adapters), IDS, MASK, buffers=buffers)

    expected = score_ids(lm, lora.merge(params, adapters), IDS, MASK, buffers=buffers)
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=1e-4)


def test_scores_of_a_tied_head_are_those_of_the_merged_model():
    """The adapter of the table is that of the head."""
    lm, params, buffers, lora, adapters = setup("*embed_tokens.weight", tie_word_embeddings=True)

    found = score_ids(lora.attach(lm), (params, adapters), IDS, MASK, buffers=buffers)

    expected = score_ids(lm, lora.merge(params, adapters), IDS, MASK, buffers=buffers)
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=1e-4)


def test_gradients_are_those_of_the_merged_model():
    """Of the adapters, as in a step of training."""
    lm, params, buffers, lora, adapters = setup("*_proj.weight")
    run = lora.attach(lm)

    found = torch.func.grad(lambda a: score_ids(run, (params, a), IDS, buffers=buffers).log_probs.sum())(adapters)

    def loss(a):
        return score_ids(lm, lora.merge(params, a), IDS, buffers=buffers).log_probs.sum()

    tdf.assert_close(found, torch.func.grad(loss)(adapters), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("where", WHERE)
def test_responses_are_those_of_the_merged_model(where):
    """Greedy ones, of prompts of different lengths."""
    lm, params, buffers, lora, adapters = setup(WHERE[where])
    options = GenerationOptions.parse({"max_new_tokens": 5, "temperature": 0.0})
    prompts = [IDS[0, :3], IDS[1]]

    found = generate_tokens(lora.attach(lm), (params, adapters), prompts, options, buffers=buffers)

    expected = generate_tokens(lm, lora.merge(params, adapters), prompts, options, buffers=buffers)
    assert [row.tokens.tolist() for row in found] == [row.tokens.tolist() for row in expected]


def test_rows_of_a_language_model_are_refused():
    """They are compacted and sorted before they run."""
    lm, _, _, lora, _ = setup("*_proj.weight")

    with pytest.raises(tdf.UnsupportedError, match="rows of a CausalLM"):
        lora.attach(lm, rows=True)


@pytest.mark.parametrize("call", ["init", "load", "save"])
def test_functions_of_adapters_name_what_they_take(call, tmp_path):
    """The function inside of a language model."""
    lm, params, _, lora, adapters = setup("*_proj.weight")
    tdf.lora.save(tmp_path / "a", lora, adapters, lm.apply)
    calls = {
        "init": lambda: lora.init(params, key=0, apply=lm),
        "load": lambda: tdf.lora.load(tmp_path / "a", params, apply=lm),
        "save": lambda: tdf.lora.save(tmp_path / "a", lora, adapters, lm),
    }

    with pytest.raises(TypeError, match="pass lm.apply"):
        calls[call]()


CALLS = {
    "score": score,
    "logits": logits,
    "generate": functools.partial(generate, max_new_tokens=2),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("given", ["a model", "an apply", "adapters of an apply"])
def test_another_model_than_a_causal_lm_is_refused(call, given):
    """The message says how a `CausalLM` is made."""
    model = llama()
    apply = tdf.functional(model)[0]
    models = {
        "a model": model,
        "an apply": apply,
        "adapters of an apply": tdf.lora.Lora("*_proj.weight", rank=2).attach(apply),
    }
    td = tdf.TensorDict({"tokens": Tokens(full=IDS, prompt=IDS, batch_size=[3])}, [3])

    with pytest.raises(TypeError, match=rf"(?s){call}: the model is not a CausalLM.*causal_lm\(model\)"):
        CALLS[call](models[given], tdf.from_module(model), td)
