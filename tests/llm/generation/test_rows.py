"""Responses to rows: greedy ones against transformers, each row against itself alone, and what is refused."""

import copy as copying

import pytest
import torch
import transformers as hf

from tdfunc import lazy_stack, random
from tdfunc.llm import GenerationOptions, LogProbs, causal_lm, generate_tokens, score_ids
from tdfunc.llm.encoding.encode import texts_behind
from tdfunc.llm.generation.probe import find_way
from tdfunc.llm.scoring.trees import keep_draws
from tests.helpers import quick
from tests.llm.kinds import tokenizer_of
from tests.llm.models import FAMILIES, VOCAB, make, row_log_probs

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Model config"),
]


def prompts(lengths, seed=0):
    """Random rows of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (length,), generator=generator) for length in lengths]


def parse(**kwargs):
    """Options for a few tokens."""
    return GenerationOptions.parse({"max_new_tokens": 8, **kwargs})


def hf_greedy(model, prompt, **kwargs):
    """The response of transformers to a prompt alone: the oracle."""
    out = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), do_sample=False, **kwargs)
    return out[0, len(prompt) :]


@pytest.mark.parametrize("is_even", [False, True], ids=["padded", "of one length"])
@pytest.mark.parametrize("name", quick(FAMILIES, "llama", "gpt2", "gemma2, window"))
def test_greedy_responses_are_those_of_transformers(name, is_even):
    """In one batch, with pads (and a penalty) and without, tokens and log-probs are those of each row alone."""
    model = make(name)
    lm, params, buffers = causal_lm(model)
    rows = prompts([9, 3, 9, 1, 6, 5, 5], seed=1)
    rows, options = (rows[5:], {}) if is_even else (rows[:5], {"repetition_penalty": 1.3})

    found = generate_tokens(lm, params, rows, parse(**options), buffers=buffers)
    expected = [hf_greedy(model, row, max_new_tokens=8, **options) for row in rows]
    assert [response.tokens.tolist() for response in found] == [ids.tolist() for ids in expected]
    reasons = ["stop" if int(ids[-1]) in lm.eos_ids else "length" for ids in expected]
    assert [response.finish_reason for response in found] == reasons
    pairs = zip(rows, expected, strict=True)
    scores = [row_log_probs(model, torch.cat([row, ids]))[len(row) - 1 :] for row, ids in pairs]
    # Gated delta nets amplify rounding.
    torch.testing.assert_close([response.log_probs for response in found], scores, atol=5e-4, rtol=1e-5)
    assert [response[3:6] for response in found] == [(None, None, None)] * len(rows)


@pytest.mark.parametrize("lengths", [(5,), (5, 5), (6, 2, 5)], ids=["alone", "one length", "pads"])
def test_positions_that_do_not_begin_at_zero_are_the_models_own(lengths):
    """RoBERTa counts positions from behind its padding id."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = hf.RobertaConfig(
        **sizes, num_hidden_layers=2, initializer_range=0.3, is_decoder=True, max_position_embeddings=64
    )
    torch.manual_seed(0)
    model = hf.RobertaForCausalLM(config).eval()
    lm, params, buffers = causal_lm(model)
    rows = prompts(lengths)

    found = generate_tokens(lm, params, rows, parse(eos_token_ids=()), buffers=buffers)

    scored = [response.log_probs for response in found]
    whole = [torch.cat([row, response.tokens]) for row, response in zip(rows, found, strict=True)]
    alone = [row_log_probs(model, ids)[len(row) - 1 :] for row, ids in zip(rows, whole, strict=True)]
    torch.testing.assert_close(scored, alone, atol=5e-4, rtol=0)


NUCLEUS = {"temperature": 0.9, "top_p": 0.8}


@pytest.fixture(scope="module")
def together():
    """Prompts, their keys and their responses in one batch."""
    lm, params, buffers = causal_lm(make("llama"))
    rows, keys = prompts([7, 2, 5, 12]), random.split(random.key(3), 4)
    return rows, keys, generate_tokens(lm, params, rows, parse(**NUCLEUS), keys=keys, buffers=buffers)


@pytest.mark.parametrize("part", [[0], [3, 1], [2, 2, 0]], ids=str)
def test_a_response_depends_on_its_key_and_its_prompt_alone(together, part):
    """Any part of a batch, in any order, has the same tokens."""
    lm, params, buffers = causal_lm(make("llama"))
    rows, keys, responses = together
    expected = [responses[i] for i in part]
    found = generate_tokens(lm, params, [rows[i] for i in part], parse(**NUCLEUS), keys=keys[part], buffers=buffers)

    assert [response.tokens.tolist() for response in found] == [response.tokens.tolist() for response in expected]
    behaviour = [response.behaviour for response in expected]
    torch.testing.assert_close([response.behaviour for response in found], behaviour, atol=1e-4, rtol=0)


def test_a_shorter_response_is_the_beginning_of_a_longer_one(together):
    """Of the same keys."""
    lm, params, buffers = causal_lm(make("llama"))
    rows, keys, responses = together
    short = generate_tokens(lm, params, rows, parse(**NUCLEUS, max_new_tokens=3), keys=keys, buffers=buffers)

    assert [each.tokens.tolist() for each in short] == [each.tokens[:3].tolist() for each in responses]


def test_samples_of_a_prompt_are_those_of_repeated_prompts():
    """N responses to each prompt lie next to each other, and are drawn from their own keys alone."""
    lm, params, buffers = causal_lm(make("llama"))
    rows, keys = prompts([3, 8]), random.split(random.key(2), 6)
    state, options = torch.get_rng_state(), {"temperature": 1.2, "repetition_penalty": 1.3}
    found = generate_tokens(lm, params, rows, parse(**options, n=3), keys=keys, buffers=buffers)

    repeated = [row for row in rows for _ in range(3)]
    expected = generate_tokens(lm, params, repeated, parse(**options), keys=keys, buffers=buffers)
    assert torch.equal(torch.get_rng_state(), state)
    assert [row.tokens.tolist() for row in found] == [row.tokens.tolist() for row in expected]
    assert len({tuple(row.tokens.tolist()) for row in found}) > 2


class Bare(hf.LlamaForCausalLM):
    """A family without a cache and positions, and without a choice of logits."""

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        return super().forward(input_ids, attention_mask=attention_mask, use_cache=use_cache)


def with_integers():
    """A Llama with a parameter of integers that nothing reads."""
    model = copying.deepcopy(make("llama"))
    model.counts = torch.nn.Parameter(torch.arange(4).view(2, 2), requires_grad=False)
    return model


def bare():
    """A Llama without a mask."""
    model = Bare(make("llama").config).eval()
    model.load_state_dict(make("llama").state_dict())
    return model


@pytest.mark.parametrize(
    ("build", "name", "way"),
    [
        pytest.param(lambda: make("mamba"), "mamba", (False, True), id="mamba"),
        pytest.param(with_integers, "llama", (True, True), id="llama"),
        pytest.param(bare, "llama", (False, False), id="bare llama"),
    ],
)
def test_families_that_read_pads_are_batched_by_length(build, name, way):
    """The proof finds that Mamba reads left pads and attention does not; each row has its own tokens."""
    lm, params, buffers = causal_lm(build())
    rows = prompts([9, 3, 9, 1])
    assert find_way(lm, params, buffers, 20) == way

    found = generate_tokens(lm, params, rows, parse(), buffers=buffers)
    expected = [hf_greedy(make(name), row, max_new_tokens=8).tolist() for row in rows]
    assert [response.tokens.tolist() for response in found] == expected


MAMBA = {
    "Zamba2": {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "layers_block_type": ["mamba", "hybrid"]}
    | {"hybrid_layer_ids": [1], "num_mem_blocks": 1, "mamba_headdim": 8},
    "NemotronH": {"ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1}
    | {"layers_block_type": ["mamba", "attention"], "head_dim": 8, "chunk_size": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAMBA)
def test_a_cache_that_is_nearly_right_is_not_used(name):
    """A cached step that is off by a hundredth of a nat is found: log-probs are those of the scorer."""
    torch.manual_seed(2)
    config = getattr(hf, f"{name}Config")(**FAMILIES["llama"][1] | MAMBA[name])
    lm, params, buffers = causal_lm(getattr(hf, f"{name}ForCausalLM")(config).eval())
    rows = prompts([9, 1])

    assert find_way(lm, params, buffers, 20) == (False, False)
    for row, made in zip(rows, generate_tokens(lm, params, rows, parse(), buffers=buffers), strict=True):
        scored = score_ids(lm, params, torch.cat([row, made.tokens])[None], buffers=buffers).log_probs[0, len(row) :]
        torch.testing.assert_close(made.log_probs, scored, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MAMBA)
def test_the_way_of_a_precision_is_not_that_of_another(name):
    """The same cached step is within the rounding of bfloat16, in which the model runs first."""
    torch.manual_seed(2)
    config = getattr(hf, f"{name}Config")(**FAMILIES["llama"][1] | MAMBA[name])
    lm, params, buffers = causal_lm(getattr(hf, f"{name}ForCausalLM")(config).eval())
    find_way(lm, params.bfloat16(), buffers.bfloat16(), 20)

    assert find_way(lm, params, buffers, 20) == (False, False)


def test_positions_that_depend_on_the_length_are_those_of_each_prefix():
    """Dynamic rotary positions are computed anew beyond the trained length, without a cache of the old ones."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    torch.manual_seed(0)
    config = hf.LlamaConfig(**FAMILIES["llama"][1], max_position_embeddings=16, rope_parameters=rope)
    model = hf.LlamaForCausalLM(config).eval()
    lm, params, buffers = causal_lm(model)
    rows = prompts([12, 6])
    assert lm.first_length == 16
    assert find_way(lm, params, buffers, 16) == (False, True)
    assert find_way(lm, params, buffers, 17) == (False, False)

    found = generate_tokens(lm.with_options(allow_long=True), params, rows, parse(), buffers=buffers)
    assert [len(response.tokens) for response in found] == [8, 8]
    wholes = [torch.cat([row, response.tokens]) for row, response in zip(rows, found, strict=True)]
    prefixes = [whole[:i] for row, whole in zip(rows, wholes, strict=True) for i in range(len(row), len(whole))]
    with torch.no_grad():
        logits = [copying.deepcopy(model)(each[None], use_cache=False).logits[0, -1] for each in prefixes]
    logits = torch.stack(logits)
    assert torch.cat([response.tokens for response in found]).tolist() == logits.argmax(-1).tolist()
    log_probs = torch.cat([response.log_probs for response in found])
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).amax(-1), atol=1e-4, rtol=1e-5)


class Letters:
    """A tokenizer of one letter for each id."""

    def decode(self, ids, **options):
        """Return the text."""
        assert options == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return "".join(chr(33 + i) for i in ids)


def test_stops_end_a_response_with_the_token_that_completes_them():
    """By texts over several tokens, and not by those that do not occur."""
    lm, params, buffers = causal_lm(make("gpt2"))
    rows, letters = prompts([4, 2, 7]), Letters()
    plain = generate_tokens(lm, params, rows, parse(), buffers=buffers)
    ids = [response.tokens.tolist() for response in plain]
    text = letters.decode(ids[0][2:4], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    places = [
        min([i for i in range(8) if text in "".join(chr(33 + x) for x in row[: i + 1])], default=None) for row in ids
    ]

    found = generate_tokens(lm, params, rows, parse(stop_sequences=["no", text]), buffers=buffers, tokenizer=letters)
    expected = [row if place is None else row[: place + 1] for row, place in zip(ids, places, strict=True)]
    assert [response.tokens.tolist() for response in found] == expected
    reasons = ["length" if place is None else "stop" for place in places]
    assert [response.finish_reason for response in found] == reasons


def test_stops_are_ids_too_and_wait_for_the_least_length():
    """The response ends with the id, and has none of it before `min_new_tokens`."""
    lm, params, buffers = causal_lm(make("gpt2"))
    rows = prompts([4, 2, 7])[1:2]
    (plain,) = generate_tokens(lm, params, rows, parse(), buffers=buffers)
    ids = plain.tokens.tolist()

    (one,) = generate_tokens(lm, params, rows, parse(stop_token_ids=ids[3]), buffers=buffers)
    assert one.tokens.tolist() == ids[: ids.index(ids[3]) + 1]
    (late,) = generate_tokens(lm, params, rows, parse(stop_token_ids=ids[3], min_new_tokens=6), buffers=buffers)
    assert ids[3] not in late.tokens[:6].tolist()


@pytest.mark.parametrize(
    ("kind", "beams"),
    [("metaspace first with BOS", 1), ("metaspace first with BOS", 2), ("Llama 2", 1), ("word pieces", 1)],
)
def test_a_stop_sequence_may_begin_with_the_space_behind_the_prompt(kind, beams):
    """These tokenizers drop the space of a first token where a response is decoded alone."""
    tokenizer = tokenizer_of(kind)
    lm, params, buffers = causal_lm(make("gpt2", vocab_size=len(tokenizer)))
    prompt = torch.tensor(tokenizer("yes")["input_ids"])
    (plain,) = generate_tokens(lm, params, [prompt], parse(num_beams=beams), buffers=buffers)
    (text,) = texts_behind(tokenizer, [prompt.tolist()], [plain.tokens.tolist()])
    options = parse(num_beams=beams, stop_sequences=[text[:2]])

    (found,) = generate_tokens(lm, params, [prompt], options, buffers=buffers, tokenizer=tokenizer)

    assert text[0] == " "
    assert len(found.tokens) == 1
    assert found.finish_reason == "stop"


def test_no_new_tokens_are_empty_responses():
    """The model is not run; log-probs and behaviour are empty where there would be some."""
    lm, params, buffers = causal_lm(make("llama"))
    options = GenerationOptions.parse({"max_new_tokens": 0, "temperature": 1.0, "n": 2})
    found = generate_tokens(lm, params, prompts([3]), options, keys=random.split(random.key(0), 2), buffers=buffers)

    assert [[len(x) for x in response[:1] + response[2:4]] for response in found] == [[0, 0, 0]] * 2
    assert [response.finish_reason for response in found] == ["length"] * 2
    assert generate_tokens(lm, params, [], parse(), buffers=buffers) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_log_probs_have_the_dtype_of_the_scorer(dtype):
    """In float32 or wider, with tokens and values of the scorer."""
    lm, params, buffers = causal_lm(make("llama"))
    params, row = params.to(dtype), prompts([6])
    (found,) = generate_tokens(lm, params, row, parse(), buffers=buffers, prompt_log_probs=True)
    scores = score_ids(lm, params, torch.cat([row[0], found.tokens])[None], buffers=buffers).log_probs[0]

    assert found.log_probs.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.allclose(found.log_probs, scores[6:], atol=0.2 if dtype == torch.bfloat16 else 1e-6)
    assert torch.allclose(found.prompt_log_probs, scores[:6], atol=0.2 if dtype == torch.bfloat16 else 1e-6)
    assert not found.log_probs.requires_grad


def test_the_model_is_left_alone():
    """Its configurations, mode, hooks and weights are as they were, whatever other weights are drawn with."""
    model = copying.deepcopy(make("llama")).train()
    hook = model.register_forward_hook(lambda *_: None)
    before = {"config": str(model.config), "generation": str(model.generation_config)}
    weights = copying.deepcopy(model.state_dict())
    lm, params, buffers = causal_lm(model)
    rows = prompts([4])
    other = params.apply(lambda leaf: leaf * 1.5)
    found = generate_tokens(lm, other, rows, parse(), buffers=buffers)[0].tokens

    assert {"config": str(model.config), "generation": str(model.generation_config)} == before
    assert model.training is True
    assert list(model._forward_hooks) == [hook.id]
    torch.testing.assert_close(dict(model.state_dict()), dict(weights), rtol=0, atol=0)
    other.to_module(model.eval())
    assert torch.equal(found, hf_greedy(model, rows[0], max_new_tokens=8))


REFUSED = [
    ({"max_new_tokens": None}, {}, ValueError, "max_new_tokens is missing"),
    ({"temperature": 1.0}, {}, ValueError, "no random key for each response"),
    ({"temperature": 1.0}, {"keys": random.key(0)}, ValueError, r"shape \(2, 2\)"),
    ({"stop_sequences": "x"}, {}, ValueError, "stop sequences need a tokenizer"),
    ({}, {"rows": [3, 0]}, ValueError, "row 1 has no tokens"),
    ({"max_new_tokens": 2046}, {"rows": [2, 3]}, ValueError, "row 1 and its response are longer"),
    ({}, {"train": []}, ValueError, "is in training mode"),
]


@pytest.mark.parametrize(("options", "call", "kind", "pattern"), REFUSED, ids=str)
def test_wrong_calls_are_errors(options, call, kind, pattern):
    """Each before any work, with the row or the option."""
    lm, params, buffers = causal_lm(make("llama"))
    lm = lm.train(*call.get("train", [False]))
    with pytest.raises(kind, match=pattern):
        generate_tokens(
            lm, params, prompts(call.get("rows", [3, 2])), parse(**options), keys=call.get("keys"), buffers=buffers
        )


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        pytest.param({}, None, id="greedy"),
        pytest.param({"temperature": 1.0, "top_p": 0.5}, random.key(0)[None], id="sampled"),
    ],
)
def test_logits_that_are_not_numbers_are_errors(options, keys):
    """The message names the row."""
    lm, params, buffers = causal_lm(make("llama"))
    broken = params.apply(lambda leaf: leaf * torch.nan)
    with pytest.raises(ValueError, match="the logits of row 0 are not numbers"):
        generate_tokens(lm, broken, prompts([3]), parse(**options), keys=keys, buffers=buffers)


@pytest.mark.parametrize(("support", "expected"), [(None, [True, False]), (torch.zeros(2, 4, 1), [True, True])])
def test_scores_keep_the_record_of_draws(support, expected):
    """Draws that a penalty changed stay so; a support of another layout leaves nothing that is known of them."""
    new = LogProbs(full=torch.zeros(2, 3), response=torch.zeros(2, 2), batch_size=[2])
    old = LogProbs(adjusted=torch.tensor([True, False]), support=support, batch_size=[2])
    assert keep_draws(new, old).adjusted.tolist() == expected


@pytest.mark.parametrize("adjusted", [None, True], ids=["raw", "adjusted"])
@pytest.mark.parametrize("old_lazy", [False, True], ids=["from dense", "from ragged"])
@pytest.mark.parametrize("new_lazy", [False, True], ids=["to dense", "to ragged"])
def test_scores_keep_the_versions_of_weights(adjusted, old_lazy, new_lazy):
    """The version that sampled a response is still known when it is scored."""
    flags = None if adjusted is None else torch.ones(2, dtype=torch.bool)
    old = LogProbs(version=["7", "8"], adjusted=flags, response=torch.zeros(2, 2), batch_size=[2])
    new = LogProbs(full=torch.zeros(2, 3), response=torch.zeros(2, 2), batch_size=[2])
    old, new = (lazy_stack(each.unbind(0)) if lazy else each for each, lazy in ((old, old_lazy), (new, new_lazy)))

    kept = keep_draws(new, old)

    assert [row.version for row in kept.unbind(0)] == ["7", "8"]
