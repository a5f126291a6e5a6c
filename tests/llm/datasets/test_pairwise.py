"""`RewardData`: its fields; files and other operations are those of any typed tree."""

import pytest
import torch

from tdfunc.core.errors import BatchSizeError
from tdfunc.llm import RewardData

ONES = torch.ones(2, 4)


def test_rewards_are_optional_and_tokens_are_not():
    """Lists are cast to tensors, positions are those of the fields; a missing or misshapen field is named."""
    data = RewardData([[1, 2]], [[True, False]])

    assert (data.batch_size, data.rewards, data.end_scores) == (torch.Size([]), None, None)
    assert data.input_ids.tolist() == [[1, 2]]
    with pytest.raises(TypeError, match="attention_mask"):
        RewardData(ONES, batch_size=[2])
    with pytest.raises(BatchSizeError, match="input_ids"):
        RewardData(ONES, ONES, batch_size=[3])
