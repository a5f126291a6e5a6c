"""A backend whose responses are known: each is the prompt's last token plus 1, 2, ... up to a length."""

import torch

from tdfunc.llm import LLMWrapperBase
from tdfunc.llm.generation.options import Response


class FakeWrapper(LLMWrapperBase):
    """Token i of a response is the last token of the prompt plus i + 1; response k has 1 + k % 3 tokens.

    The log-prob of a token is minus the token, so that each number tells where it came from.
    """

    def __init__(self, model=None, **options):
        super().__init__(model, **options)
        self.calls = []

    def generate_tokens(self, prompts, options, *, keys=None, prompt_log_probs=False):
        """Return responses, those of a prompt one after another."""
        self.calls.append((prompts, options, keys))
        count = options.num_return_sequences
        return [
            self._speak(k, prompt, prompt_log_probs)
            for k, prompt in enumerate(p for p in prompts for _ in range(count))
        ]

    def _speak(self, k, prompt, prompt_log_probs):
        tokens = prompt[-1] + 1 + torch.arange(1 + k % 3)
        return Response(
            tokens,
            "length" if k % 2 else "stop",
            log_probs=-tokens.float(),
            behaviour=-2 * tokens.float(),
            support=torch.stack([tokens, tokens + 1], -1) if k else None,
            prompt_log_probs=self.score_tokens([prompt])[0] if prompt_log_probs else None,
            version=k,
        )

    def score_tokens(self, rows, *, training=False, rng=None):
        """Return minus the tokens, 0 for the first of a row."""
        return [torch.where(torch.arange(len(row)) > 0, -row.float(), 0.0) for row in rows]
