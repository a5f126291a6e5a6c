"""Responses to rows: greedy ones against transformers, each row against itself alone, and what is refused."""

import pytest
import torch

from tdfunc import random
from tdfunc.llm import causal_lm
from tdfunc.llm.generation.options import GenerationOptions
from tdfunc.llm.generation.rows import generate_tokens
from tests.llm.models import FAMILIES, VOCAB, make, row_log_probs

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Model config"),
]
QUICK = ("llama", "gpt2", "gemma2, window")


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


def check_greedy(name, seed):
    """Assert that greedy responses and their log-probs are those of transformers, one row at a time."""
    model = make(name)
    lm, params, buffers = causal_lm(model)
    rows = prompts([9, 3, 9, 1, 6], seed)
    found = generate_tokens(lm, params, rows, parse(), buffers=buffers)
    for row, response in zip(rows, found, strict=True):
        expected = hf_greedy(model, row, max_new_tokens=8)
        assert torch.equal(response.tokens, expected)
        assert response.finish_reason == ("stop" if int(expected[-1]) in lm.eos_ids else "length")
        scores = row_log_probs(model, torch.cat([row, expected]))[len(row) - 1 :]
        assert torch.allclose(response.log_probs, scores, atol=1e-4)
        assert response[3:6] == (None, None, None)


@pytest.mark.parametrize("name", QUICK)
def test_greedy_responses_are_those_of_transformers(name):
    """In one batch with pads, tokens and log-probs are those of each row alone."""
    check_greedy(name, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_responses_of_all_families(name):
    """The same for every family."""
    check_greedy(name, seed=2)


def test_a_response_depends_on_its_key_and_its_prompt_alone():
    """Any part of a batch, in any order, has the same tokens; a shorter response is the beginning of a longer one."""
    lm, params, buffers = causal_lm(make("llama"))
    rows, keys = prompts([7, 2, 5, 12]), random.split(random.key(3), 4)
    options = parse(temperature=0.9, top_p=0.8)
    together = generate_tokens(lm, params, rows, options, keys=keys, buffers=buffers)

    for part in ([0], [3, 1], [2, 2, 0]):
        found = generate_tokens(lm, params, [rows[i] for i in part], options, keys=keys[part], buffers=buffers)
        for i, response in zip(part, found, strict=True):
            assert torch.equal(response.tokens, together[i].tokens)
            torch.testing.assert_close(response.behaviour, together[i].behaviour, atol=1e-4, rtol=0)
    short = GenerationOptions.parse({"max_new_tokens": 3, "temperature": 0.9, "top_p": 0.8})
    for a, b in zip(generate_tokens(lm, params, rows, short, keys=keys, buffers=buffers), together, strict=True):
        assert torch.equal(a.tokens, b.tokens[:3])
