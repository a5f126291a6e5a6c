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


@pytest.mark.parametrize("case", quick(CASES, CASES[0]), ids=str)
def test_beams_are_those_of_transformers(case):
    """In a padded batch, with several responses to a prompt, and with log-probs of a row alone; both ends occur."""
    name, options = case
    model = make(name)
    lm, params, buffers = causal_lm(model)
    # More ends, so that beams do end.
    options = {"max_new_tokens": 7, "eos_token_ids": EOS, **options}
    parsed, rows = GenerationOptions.parse(options), prompts([9, 3, 9, 1], seed=4)
    found = generate_tokens(lm, params, rows, parsed, buffers=buffers)
    count, reasons = parsed.num_return_sequences, set()
    options = {("eos_token_id" if name == "eos_token_ids" else name): value for name, value in options.items()}
    for i, row in enumerate(rows):
        kwargs = {"attention_mask": torch.ones_like(row[None]), "do_sample": False, "pad_token_id": 96}
        expected = model.generate(row[None], **kwargs, **options)[:, len(row) :]
        for ids, response in zip(expected, found[i * count : (i + 1) * count], strict=True):
            length = len(response.tokens)
            assert torch.equal(response.tokens, ids[:length])
            assert (ids[length:] == 96).all()
            is_ended = int(ids[length - 1]) in EOS
            assert response.finish_reason == ("stop" if is_ended else "length")
            assert is_ended or length == 7
            scores = row_log_probs(model, torch.cat([row, response.tokens]))[len(row) - 1 :]
            assert torch.allclose(response.log_probs, scores, atol=1e-4)
            assert response.behaviour is None
            reasons.add(response.finish_reason)
    assert case != CASES[0] or reasons == {"stop", "length"}
