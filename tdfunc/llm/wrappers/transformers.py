"""`TransformersWrapper`: a causal language model of transformers as a backend."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tdfunc.core.context import is_compiling
from tdfunc.llm.generation.options import GenerationOptions, Response
from tdfunc.llm.generation.rows import generate_tokens
from tdfunc.llm.scoring.ids import logits_of_ids, score_rows
from tdfunc.llm.scoring.model import CausalLM, causal_lm
from tdfunc.llm.wrappers.base import LLMWrapperBase
from tdfunc.modules.extract import from_module, split

if TYPE_CHECKING:
    from typing_extensions import Self

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = frozenset((int, float, bool, str, type(None)))


class TransformersWrapper(LLMWrapperBase):
    """A causal language model of transformers as a module of trees.

    The wrapper uses the parameters of the model, `wrapper.model`: training the model trains the wrapper. The pure
    functions of this package run on a private copy of the model's structure, in evaluation mode.

    Args:
        model: The model.
        **options: The options of `LLMWrapperBase`.

    Raises:
        TypeError: The model is not from transformers, or an option is unknown.
        ValueError: An option has an invalid value, or two options contradict each other.

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
        # A model that is not one of transformers is refused now.
        _ = self.lm

    # Any: as in the base, a module here.
    def _set_model(self, model: Any) -> None:
        super()._set_model(model)
        self._prepared = _Prepared()
        # Other parameters and buffers than the model's own.
        self._trees: tuple[Any, Any] | None = None

    @property
    def lm(self) -> CausalLM:
        """The `CausalLM` of the model, for the pure functions of this package; made anew if the model changed."""
        lm = self._prepared.of(self.model)
        return lm.with_options(packed=self.pad_model_input is False, allow_long=self._options.allow_long)

    # Any: a tree.
    def _with_params(self, params: Any) -> "Self":
        new = self._shell()
        own = split(params)[1]
        # Rows of other threads have other parameters.
        new._batcher = None
        new._trees = params, None if own.leaves() else split(from_module(self.model))[1]
        return new

    # Any: trees of parameters and buffers.
    def _tree(self) -> tuple[Any, Any, torch.device]:
        """Return the parameters, with the buffers or beside them, and their device."""
        params, buffers = self._trees or (from_module(self.model), None)
        return params, buffers, next(iter(params.leaves())).device

    def generate_tokens(
        self,
        prompts: Sequence[Tensor],
        options: GenerationOptions,
        *,
        keys: Tensor | None = None,
        prompt_log_probs: bool = False,
    ) -> list[Response]:
        """Return the responses of the model, as `AbstractBackend` describes."""
        params, buffers, device = self._tree()
        return generate_tokens(
            self.lm,
            params,
            [row.to(device) for row in prompts],
            options,
            keys=None if keys is None else keys.to(device),
            buffers=buffers,
            tokenizer=self._text_tokenizer,
            prompt_log_probs=prompt_log_probs,
        )

    def score_tokens(self, rows: Sequence[Tensor], *, training: bool = False, rng: Any = None) -> list[Tensor]:
        """Return the log-probs of rows, as `AbstractBackend` describes."""
        params, buffers, device = self._tree()
        lm = self.lm.train() if training else self.lm
        return score_rows(lm, params, [row.to(device) for row in rows], buffers=buffers, rng=rng)

    def _logits(self, ids_NT: Tensor, mask_NT: Tensor, training: bool, key: Any) -> Tensor:
        params, buffers, device = self._tree()
        lm = self.lm.train() if training else self.lm
        found = logits_of_ids(lm, params, ids_NT.to(device), mask_NT.to(device), buffers=buffers, rng=key)
        return found.log_probs


class _Prepared:
    """The `CausalLM` of a model, and the structure from which it was made.

    A copy of a wrapper inside `functional` shares it, since calls inside a transform cannot make a new one. In another
    process it is made anew.
    """

    def __init__(self) -> None:
        # Any: descriptions are compared only.
        self._made: tuple[CausalLM, Any] | None = None

    def __deepcopy__(self, memo: Any) -> "_Prepared":
        return self

    def __reduce__(self) -> Any:
        return _Prepared, ()

    def of(self, model: nn.Module) -> CausalLM:
        """Return the `CausalLM` of a model."""
        made = self._made
        # The second has the tokens that end a response.
        found = [getattr(model, name, None) for name in ("config", "generation_config")]
        settings = [vars(each) for each in found if each is not None]
        # Dynamo would guard each attribute, so that it uses the value as it is.
        if made is None or not (is_compiling() or made[1] == (_modules(model), settings)):
            self._made = made = causal_lm(model, copy=False)[0], (_modules(model), copy.deepcopy(settings))
        return made[0]


# Any: attributes and hooks.
def _modules(model: nn.Module) -> list[tuple[Any, ...]]:
    """Return the classes, hooks, and attributes of the modules that are plain values or functions."""
    return [
        (
            path,
            type(module),
            {
                name: value
                for name, value in module.__dict__.items()
                if (type(value) in _PLAIN or callable(value)) and name != "training"
            },
            [hook for hooks in _HOOKS for hook in module.__dict__[hooks].values()],
        )
        for path, module in model.named_modules()
    ]
