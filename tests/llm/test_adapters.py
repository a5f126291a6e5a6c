"""A language model with adapters scores and generates as the model into whose weights they are merged."""

import functools

import pytest
import torch

import tdfunc as tdf
from tdfunc.llm import (
    GenerationOptions,
    Tokens,
    TransformersWrapper,
    causal_lm,
    generate,
    generate_tokens,
    logits,
    losses,
    score,
    score_ids,
)
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


# -- wrappers ---------------------------------------------------------------------------------------------------


def wrapped(generates):
    """A wrapper of a model, its adapters, and rows of tokens."""
    torch.manual_seed(0)
    model = llama(eos_token_id=None)
    _, params, _ = causal_lm(model)
    lora = tdf.lora.Lora("*_proj.weight", rank=2)
    adapters = trained(lora, params, tdf.functional(model)[0])
    options = {"generate_kwargs": {"max_new_tokens": 4}} if generates else {}
    wrapper = TransformersWrapper(model, input_mode="tokens", generate=generates, pad_output=True, **options)
    kind = "prompt" if generates else "full"
    td = tdf.TensorDict({"tokens": Tokens(**{kind: IDS}, batch_size=[3]), "attention_mask": MASK}, [3])
    return wrapper, params, lora, adapters, td


@pytest.mark.parametrize("generates", [False, True])
def test_a_wrapper_with_adapters_runs_the_merged_model(generates):
    """Scores and greedy responses."""
    wrapper, params, lora, adapters, td = wrapped(generates)

    found = lora.attach(wrapper)(td, params=(params, adapters))

    expected = wrapper(td, params=lora.merge(params, adapters))
    torch.testing.assert_close(found["log_probs"].full, expected["log_probs"].full, atol=1e-5, rtol=1e-4)
    assert torch.equal(found["tokens"].full, expected["tokens"].full)


def test_a_wrapper_with_adapters_gives_their_logits():
    """With `logits_only=True`."""
    wrapper, params, lora, adapters, td = wrapped(False)

    found = lora.attach(wrapper)(td, params=(params, adapters), logits_only=True)["logits"]

    expected = wrapper(td, params=lora.merge(params, adapters), logits_only=True)["logits"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_gradients_of_adapters_pass_a_wrapper():
    """The wrapper is a function of both trees."""
    wrapper, params, lora, adapters, td = wrapped(False)
    run = lora.attach(wrapper)

    found = torch.func.grad(lambda a: run(td, params=(params, a))["log_probs"].full.sum())(adapters)

    def merged(a):
        return wrapper(td, params=lora.merge(params, a))["log_probs"].full.sum()

    tdf.assert_close(found, torch.func.grad(merged)(adapters), atol=1e-4, rtol=1e-3)


def test_a_wrapper_with_adapters_has_further_versions():
    """Options and copies keep the adapters."""
    wrapper, params, lora, adapters, td = wrapped(False)

    found = lora.attach(wrapper).get_new_version(pad_model_input=False)(td, params=(params, adapters))

    expected = wrapper(td, params=lora.merge(params, adapters))
    torch.testing.assert_close(found["log_probs"].full, expected["log_probs"].full, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("given", ["none", "a tree"])
def test_a_wrapper_with_adapters_names_its_parameters(given):
    """With the call that works."""
    wrapper, params, lora, _, td = wrapped(False)
    options = {"none": {}, "a tree": {"params": params}}[given]

    with pytest.raises(TypeError, match=r"(?s)params do not belong to the wrapper.*params=\(params, adapters\)"):
        lora.attach(wrapper)(td, **options)


def test_a_wrapper_without_adapters_refuses_a_pair():
    """The message says how adapters are attached."""
    wrapper, params, _, adapters, td = wrapped(False)

    with pytest.raises(TypeError, match=r"(?s)params do not belong to the wrapper.*lora.attach\(wrapper\)"):
        wrapper(td, params=(params, adapters))


# -- several adapters of one base -------------------------------------------------------------------------------


def policy_loss(run, policy, params, drawn, buffers):
    """GRPO of one adapter on its own responses."""
    found = score(run, (params, policy), drawn, buffers=buffers)["log_probs"]
    old = drawn["log_probs"]
    return losses.grpo(found.full, losses.advantages.group_normalized(drawn["reward"]), old.mask, old.full).loss


def drawn_by(run, params, policy, buffers, seed):
    """Responses of one adapter to its own prompts, with rewards."""
    ids = torch.randint(1, 32, (2, 4), generator=torch.Generator().manual_seed(seed))
    asked = tdf.TensorDict({"tokens": Tokens(prompt=ids, batch_size=[2])}, [2])
    options = {"max_new_tokens": 4, "temperature": 1.0, "num_return_sequences": 3}
    drawn = generate(run, (params, policy), asked, key=seed, buffers=buffers, **options)
    return drawn.set("reward", drawn["tokens"].response.float().mean(-1))


@pytest.mark.parametrize("records", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_of_grpo_trains_all_adapters_as_each_alone(records):
    """A map over stacked adapters, each with separate prompts and rewards, also in a record of `jit`."""
    torch.manual_seed(0)
    lm, params, buffers = causal_lm(llama(eos_token_id=None, attn_implementation="eager"))
    lora = tdf.lora.Lora("*_proj.weight", rank=2)
    run = lora.attach(lm)
    policies = tdf.stack([trained(lora, params, lm.apply, seed) for seed in range(3)])
    drawn = [drawn_by(run, params, policy, buffers, seed) for seed, policy in enumerate(policies)]
    grad = torch.func.grad(functools.partial(policy_loss, run))
    many = torch.vmap(grad, (0, None, 0, None))
    if records:
        many = tdf.jit(many)

    found = many(policies, params, tdf.pad_sequence(drawn, -1), buffers)

    expected = tdf.stack([grad(policy, params, own, buffers) for policy, own in zip(policies, drawn, strict=True)])
    tdf.assert_close(found, expected, atol=1e-5, rtol=1e-3)
