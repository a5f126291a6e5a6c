"""`NestedCategorical`: the distributions of tokens, with results as nested tensors; and stored logits, moved to a side.

N rows, T positions, V ids of the vocabulary.
"""

from typing import Literal, final

import torch
from torch import Tensor

from tdfunc.core.context import is_known
from tdfunc.core.errors import UnsupportedError
from tdfunc.llm.scoring.trees import MaskedCategorical


@final
class NestedCategorical(MaskedCategorical):
    """Categorical distributions of the tokens of ragged rows: log-probs and entropies are nested tensors of the rows.

    Args:
        logits: The logits of each position, shape (N, T, V).
        mask: True where a token is sampled, shape (N, T); the results are 0 elsewhere.
        tokens: True at the tokens of the rows, shape (N, T).
        layout: `torch.jagged` or `torch.strided`.

    Raises:
        UnsupportedError: The number of batch dimensions is not one.
    """

    def __init__(self, logits: Tensor, mask: Tensor, tokens: Tensor, layout: torch.layout) -> None:
        if mask.dim() != 2:
            raise UnsupportedError(
                "get_dist: nested tensors have one batch dimension.", got=f"batch size {list(mask.shape[:-1])}"
            )
        super().__init__(logits, mask)
        self._tokens = tokens
        self._layout = layout

    def _nested(self, values_NT: Tensor) -> Tensor:
        rows = [row[valid] for row, valid in zip(values_NT, self._tokens, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=self._layout)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probs of tokens (N, T), or of nested rows."""
        if value.is_nested:
            flat = torch.cat(list(value.unbind()))
            value = torch.zeros_like(self._tokens, dtype=flat.dtype).masked_scatter(self._tokens, flat)
        return self._nested(super().log_prob(value))

    def entropy(self) -> Tensor:
        """Return the entropies, in nats."""
        return self._nested(super().entropy())


def moved_logits(logits_NTV: Tensor, mask_NT: Tensor, side: Literal["left", "right"]) -> Tensor:
    """Return logits with their pads moved to a side, 0 at pads.

    Args:
        logits_NTV: Logits that are 0 at pads. If their values cannot be read, the pads are at the left.
        mask_NT: True at the tokens of the rows, padded at `side`.
        side: The side of the result.
    """
    length = mask_NT.shape[1]
    pads_N1 = length - mask_NT.sum(1, keepdim=True)
    given: Literal["left", "right"] = "left"
    if is_known(logits_NTV) and _is_padded_right(logits_NTV, pads_N1):
        given = "right"
    if given == side:
        return logits_NTV
    forward_N1 = pads_N1 if given == "left" else -pads_N1
    source_NT = torch.arange(length, device=mask_NT.device) + forward_N1
    index = source_NT.clamp(0, max(length - 1, 0)).unsqueeze(-1).expand(logits_NTV.shape)
    return torch.where(mask_NT.unsqueeze(-1), logits_NTV.gather(1, index), 0)


def _is_padded_right(logits_NTV: Tensor, pads_N1: Tensor) -> bool:
    """Return whether the logits are 0 at the end of each row that has pads.

    At the start they are 0 with pads on either side, since a row's first token has no logits.
    """
    length = logits_NTV.shape[1]
    ends_NT = torch.arange(length, device=pads_N1.device) >= length - pads_N1
    is_zero_NT = (logits_NTV == 0).all(-1)
    return bool((is_zero_NT | ~ends_NT).all())
