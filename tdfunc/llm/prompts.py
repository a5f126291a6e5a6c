"""`PromptData`: rows of tokens that begin with a prompt.

B rows, T positions, V tokens of the vocabulary.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tdfunc._tensorclass import TensorClass
from tdfunc._tensordict import TensorDict

if TYPE_CHECKING:
    from typing_extensions import Self


class PromptData(TensorClass):
    """Rows of tokens that begin with a prompt.

    Args:
        input_ids: (B, T).
        attention_mask: True at tokens, False at pads (B, T).
        prompt_rindex: The position in its row of the last token of each prompt (B,).
        labels: The ids that a model learns to predict (B, T).
        logits: (B, T, V).
        loss: Any shape that begins with the batch size.

    Raises:
        TypeError: A field without default is missing.

    Source:
        `torchrl.data.PromptData`.
    """

    input_ids: Tensor
    attention_mask: Tensor
    prompt_rindex: Tensor
    labels: Tensor | None = None
    logits: Tensor | None = None
    loss: Tensor | None = None

    @classmethod
    def from_rows(cls, rows: TensorDict) -> "Self":
        """Return padded rows of prompts and responses, with their ids as labels.

        Args:
            rows: `input_ids`, `attention_mask`, and `assistant_masks`, which is True on the responses.

        Shapes:
            Entries are (B, T), `prompt_rindex` is (B,): -1, or the position before the first, where a prompt is empty.

        Examples:
            >>> rows = tdf.TensorDict({"input_ids": torch.tensor([[0, 5, 6, 7]])}, [1])
            >>> rows = rows.set("attention_mask", rows["input_ids"] > 0)
            >>> PromptData.from_rows(rows.set("assistant_masks", rows["input_ids"] > 5)).prompt_rindex
            tensor([1])
        """
        real = rows["attention_mask"]
        ids, pads = rows["input_ids"], (real.cumsum(-1) == 0).sum(-1)
        size = (real & ~rows["assistant_masks"]).sum(-1)
        return cls(ids, real, pads + size - 1, labels=ids, batch_size=rows.batch_size)

    def mask_label(self, pad_token_id: int) -> "Self":
        """Return the rows with everything after their prompts as pads, without labels and logits.

        Args:
            pad_token_id: The id to put there.

        Examples:
            >>> ids = torch.tensor([[0, 5, 6, 7], [1, 2, 3, 4]])
            >>> data = PromptData(ids, ids > 0, torch.tensor([2, 0]), labels=ids, batch_size=[2])
            >>> data.mask_label(pad_token_id=9).input_ids
            tensor([[0, 5, 6, 9],
                    [1, 9, 9, 9]])
        """
        positions = torch.arange(self.input_ids.shape[-1], device=self.input_ids.device)
        inside = positions <= self.prompt_rindex.unsqueeze(-1)
        return self.replace(
            input_ids=torch.where(inside, self.input_ids, pad_token_id),
            attention_mask=torch.where(inside, self.attention_mask, 0).to(self.attention_mask.dtype),
            labels=None,
            logits=None,
        )
