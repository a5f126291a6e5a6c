"""`RewardData`: rows of tokens with the rewards that a model of preferences gives them.

B rows, T positions.
"""

from torch import Tensor

from tdfunc._tensorclass import TensorClass


class RewardData(TensorClass):
    """Rows of tokens with their rewards.

    Args:
        input_ids: (B, T).
        attention_mask: True at tokens, False at pads (B, T).
        rewards: A reward for each token (B, T).
        end_scores: The reward of each row, which is the one of its last token (B,).

    Raises:
        TypeError: `input_ids` or `attention_mask` is missing.

    Source:
        `torchrl.data.RewardData`.

    Examples:
        >>> import torch
        >>> ids = torch.ones(2, 4, dtype=torch.int64)
        >>> data = RewardData(input_ids=ids, attention_mask=ids.bool(), batch_size=[2])
        >>> data.replace(end_scores=torch.tensor([0.5, -1.0]))[1].end_scores
        tensor(-1.)
    """

    input_ids: Tensor
    attention_mask: Tensor
    rewards: Tensor | None = None
    end_scores: Tensor | None = None
