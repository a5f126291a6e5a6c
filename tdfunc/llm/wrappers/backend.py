"""The two calls of a backend: rows of token ids in, responses or log-probs out.

Rows are 1-d tensors without padding, so that a backend needs no rule for pads. The wrapper does everything else (texts,
templates, padding, trees).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tdfunc.llm.generation.options import GenerationOptions, Response


class AbstractBackend(ABC):
    """A language model as two calls on rows of ids."""

    @abstractmethod
    def generate_tokens(
        self,
        prompts: Sequence[Tensor],
        options: GenerationOptions,
        *,
        keys: Tensor | None = None,
        prompt_log_probs: bool = False,
    ) -> list[Response]:
        """Return the responses to each prompt, in order: `options.num_return_sequences` for each, one after another.

        Args:
            prompts: Rows of ids (P,), none of them empty.
            options: The options of sampling.
            keys: A random key (2,) for each response, in order; None for greedy and beam search.
            prompt_log_probs: Also score the prompts.
        """

    # Any: a random key or a seed.
    @abstractmethod
    def score_tokens(self, rows: Sequence[Tensor], *, training: bool = False, rng: Any = None) -> list[Tensor]:
        """Return the log-prob of each token of each row, 0 for its first.

        Args:
            rows: Rows of ids (L,), which may be empty.
            training: Score with dropout.
            rng: The key of dropout.
        """
