"""Beam search against transformers, one row at a time."""

import pytest
import torch

from tdfunc.llm import GenerationOptions, causal_lm, generate_tokens
from tests.helpers import quick
from tests.llm.generation.test_rows import prompts
from tests.llm.models import make, row_log_probs

OPTIONS = [
    {"num_beams": 4, "num_return_sequences": 3},
    {"num_beams": 3, "early_stopping": True, "length_penalty": 0.5, "num_return_sequences": 2},
    {"num_beams": 3, "early_stopping": "never", "length_penalty": 2.0},
    {"num_beams": 3, "length_penalty": -1.0},
    {"num_beams": 2, "repetition_penalty": 1.5, "min_new_tokens": 4},
]
EOS = [1, 5, 6, 20, 47]
CASES = [(name, options) for name in ("llama", "gemma2, window", "qwen3_next", "bloom") for options in OPTIONS]


PAD = 96
EACH = pytest.mark.parametrize("searched", quick(CASES, CASES[0]), indirect=True, ids=str)


@pytest.fixture(scope="module")
def searched(request):
    """A case's model and options, and its prompts and responses: a prompt for each response."""
    name, options = request.param
    model = make(name)
    lm, params, buffers = causal_lm(model)
    # More ends, so that beams do end.
    options = {"max_new_tokens": 7, "eos_token_ids": EOS, **options}
    parsed, rows = GenerationOptions.parse(options), prompts([9, 3, 9, 1], seed=4)
    found = generate_tokens(lm, params, rows, parsed, buffers=buffers)
    return model, options, [row for row in rows for _ in range(parsed.num_return_sequences)], found


def hf_beams(model, row, *, eos_token_ids, **options):
    """The responses of transformers to a row alone, with pads."""
    kwargs = {"attention_mask": torch.ones_like(row[None]), "do_sample": False, "pad_token_id": PAD}
    return model.generate(row[None], eos_token_id=eos_token_ids, **kwargs, **options)[:, len(row) :].tolist()


@EACH
def test_beams_are_those_of_transformers(searched):
    """In a padded batch, and with several responses to a prompt."""
    model, options, rows, found = searched
    count = options.get("num_return_sequences", 1)
    expected = [ids for row in rows[::count] for ids in hf_beams(model, row, **options)]
    tokens = [response.tokens.tolist() for response in found]

    assert [ids + [PAD] * (len(to) - len(ids)) for ids, to in zip(tokens, expected, strict=True)] == expected


@EACH
def test_beams_end_with_an_end_or_at_the_most_tokens(searched):
    """The reason says which."""
    *_, found = searched
    ended = [int(response.tokens[-1]) in EOS for response in found]

    assert [response.finish_reason for response in found] == ["stop" if each else "length" for each in ended]
    assert {len(response.tokens) for response, each in zip(found, ended, strict=True) if not each} <= {7}


@pytest.mark.parametrize("searched", CASES[:1], indirect=True, ids=str)
def test_both_ends_occur(searched):
    """In the case that every run has."""
    assert {response.finish_reason for response in searched[-1]} == {"stop", "length"}


@EACH
def test_log_probs_of_beams_are_those_of_rows_alone(searched):
    """The raw ones of the model; beams have no distribution that they were drawn from."""
    model, _, rows, found = searched
    pairs = zip(rows, found, strict=True)
    expected = [row_log_probs(model, torch.cat([row, each.tokens]))[len(row) - 1 :] for row, each in pairs]

    torch.testing.assert_close([response.log_probs for response in found], expected, atol=1e-4, rtol=1e-5)
    assert [response.behaviour for response in found] == [None] * len(found)
