"""`TransformersWrapper`: a causal language model of transformers as a backend."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tdfunc.llm.encoding.encode import text_tokenizer
from tdfunc.llm.generation.options import GenerationOptions, Response
from tdfunc.llm.generation.rows import generate_tokens
from tdfunc.llm.scoring.ids import logits_of_ids, score_ids
from tdfunc.llm.scoring.model import CausalLM, causal_lm
from tdfunc.llm.wrappers.base import LLMWrapperBase
from tdfunc.modules.extract import from_module


class TransformersWrapper(LLMWrapperBase):
    """A causal language model of transformers as a module of trees.

    The parameters are those of the model, `wrapper.model`; what trains them trains the wrapper. It is run on a private
    copy of its structure, in evaluation mode, by the pure functions of this package.

    Args:
        model: The model.
        **options: Those of `LLMWrapperBase`.

    Raises:
        TypeError: It is not a model of transformers, or an option is not known.
        ValueError: An option has a value that is not allowed, or two contradict each other.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from tdfunc.llm import Tokens, TransformersWrapper
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20))
        >>> wrapper = TransformersWrapper(model, input_mode="tokens", generate=False, pad_output=True)
        >>> td = TensorDict({"tokens": Tokens(full=torch.arange(6).view(2, 3), batch_size=[2])}, [2])
        >>> wrapper(td)["log_probs"].full.shape
        torch.Size([2, 3])
    """

    model: nn.Module

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._engine = causal_lm(model, copy=False)[0]

    @property
    def lm(self) -> CausalLM:
        """The specification of the model, for the pure functions of this package."""
        if self._engine is None:
            self._engine = causal_lm(self.model, copy=False)[0]
        return self._engine

    def generate_tokens(
        self,
        prompts: Sequence[Tensor],
        options: GenerationOptions,
        *,
        keys: Tensor | None = None,
        prompt_log_probs: bool = False,
    ) -> list[Response]:
        """Return the responses of the model, as `AbstractBackend` describes."""
        params = from_module(self.model)
        device = next(iter(params.leaves())).device
        return generate_tokens(
            self.lm,
            params,
            [row.to(device) for row in prompts],
            options,
            keys=None if keys is None else keys.to(device),
            tokenizer=text_tokenizer(self.tokenizer),
            prompt_log_probs=prompt_log_probs,
            allow_long=self._options.allow_long,
        )

    def score_tokens(self, rows: Sequence[Tensor], *, training: bool = False, rng: Any = None) -> list[Tensor]:
        """Return the log-probs of rows, as `AbstractBackend` describes."""
        params = from_module(self.model)
        device = next(iter(params.leaves())).device
        lengths = [len(row) for row in rows]
        if not any(lengths):
            return [torch.zeros(0, device=device) for _ in rows]
        ids = pad_sequence(list(rows), batch_first=True).to(device)
        mask = torch.arange(ids.shape[1], device=ids.device) < torch.tensor(lengths, device=ids.device).unsqueeze(-1)
        lm = self.lm.train() if training else self.lm
        found = score_ids(lm, params, ids, mask, rng=rng, **self._ways).log_probs
        return [found[i, :length] for i, length in enumerate(lengths)]

    def _logits(self, ids_NT: Tensor, mask_NT: Tensor, training: bool = False, key: Any = None) -> Tensor:
        params = from_module(self.model)
        device = next(iter(params.leaves())).device
        lm = self.lm.train() if training else self.lm
        return logits_of_ids(lm, params, ids_NT.to(device), mask_NT.to(device), rng=key, **self._ways).log_probs

    @property
    def _ways(self) -> dict[str, Any]:
        return {"packed": self.pad_model_input is False, "allow_long": self._options.allow_long}
