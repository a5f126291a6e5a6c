"""`NestedCategorical`: the distributions of tokens, with results as nested tensors."""

from typing import final

import torch
from torch import Tensor

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
