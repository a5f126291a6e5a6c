"""`score`, `logits` and `distribution`: the scoring of token ids as pure functions from trees to trees.

A tree has its tokens under `tokens` and its mask under `attention_mask` or `masks`; the result has everything that the
tree had, and the new entry. The rows may be padded on any side, or be a ragged stack, and the result is laid out alike.
"""

from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Size, Tensor
from torch.nn.utils.rnn import pad_sequence

from tdfunc._lazystack import lazy_stack
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, MissingKeyError, error
from tdfunc.core.keys import dotted, unravel
from tdfunc.llm.model import CausalLM
from tdfunc.llm.records import LogProbs
from tdfunc.llm.scoring import logits_of_ids, score_ids
from tdfunc.ops.reading import get

T = TypeVar("T", bound=TensorCollection)
Key = str | tuple[str, ...]


class _Rows(NamedTuple):
    """The tokens of a tree as rows: B of them for a batch size `lead` with that many elements."""

    ids_BT: Tensor
    mask_BT: Tensor
    lead: Size
    # The tokens of each prompt that stand before its response, if the tree has both; and of each row of a ragged stack.
    prompts: list[int] | None
    lengths: list[int] | None

    def shaped(self, values: Tensor) -> Tensor:
        """Return values of the rows with the batch size of the tree."""
        return values.reshape(*self.lead, *values.shape[1:])
