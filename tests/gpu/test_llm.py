"""Scoring and generation of a tiny model in bfloat16 on a device: what the model itself computes there."""

import copy

import pytest
import torch

from tdfunc import TensorDict, random
from tdfunc.llm import Tokens, causal_lm, generate, score
from tests.llm.generation.test_functions import padded
from tests.llm.models import VOCAB, make, row_log_probs


@pytest.fixture
def model(device):
    """A Llama of two layers."""
    return copy.deepcopy(make("llama")).to(device, torch.bfloat16)


def test_scores(model, device):
    """Log-probs of rows are those of the model's logits."""
    lm, params, buffers = causal_lm(model)
    ids = torch.randint(VOCAB, (4, 12), generator=torch.Generator().manual_seed(0)).to(device)

    td = TensorDict({"tokens": Tokens(full=ids, batch_size=[4])}, [4])
    found = score(lm, params, td, buffers=buffers)["log_probs"].full

    assert found.device.type == device.type
    for i, row in enumerate(ids):
        torch.testing.assert_close(found[i, 1:].float(), row_log_probs(model, row), rtol=5e-2, atol=5e-2)


def test_greedy_generation(model, device):
    """Greedy tokens of a row are those of the model's own `generate`."""
    lm, params, buffers = causal_lm(model)
    td, rows = padded([6])

    found = generate(lm, params, td.to(device), buffers=buffers, max_new_tokens=8)["tokens"].response

    row = rows[0][None].to(device)
    options = {"attention_mask": torch.ones_like(row), "do_sample": False, "max_new_tokens": 8}
    expected = model.generate(row, **options)[:, row.shape[1] :]
    assert found.device.type == device.type
    assert torch.equal(found[:, : expected.shape[1]].cpu(), expected.cpu())


def test_samples_by_keys(model, device):
    """A key draws the same tokens again, and a row draws the same among other rows."""
    lm, params, buffers = causal_lm(model)
    td, _ = padded([5, 5, 5])
    options = {"key": random.key(3), "buffers": buffers, "max_new_tokens": 6, "temperature": 0.8}

    first, second = [generate(lm, params, td.to(device), **options)["tokens"].response for _ in range(2)]

    assert torch.equal(first, second)
