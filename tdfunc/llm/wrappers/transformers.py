"""`TransformersWrapper`: a causal language model of transformers as a backend."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tdfunc.core.context import is_compiling
from tdfunc.core.errors import error
from tdfunc.llm.generation.options import GenerationOptions, Response
from tdfunc.llm.generation.rows import generate_tokens
from tdfunc.llm.scoring.ids import logits_of_ids, score_rows
from tdfunc.llm.scoring.model import CausalLM, causal_lm
from tdfunc.llm.wrappers.base import LLMWrapperBase
from tdfunc.lora import Lora
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
    # The choice of the adapters that `params=` has beside the base's parameters.
    _lora: Lora | None = None

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        # A model that is not one of transformers is refused now.
        _ = self.lm

    # Any: as in the base, a module here.
    def _set_model(self, model: Any) -> None:
        super()._set_model(model)
        self._prepared = _Prepared(self._lora)
        # Other parameters and buffers than the model's own.
        self._trees: tuple[Any, Any] | None = None

    @property
    def lm(self) -> CausalLM:
        """The `CausalLM` of the model, for the pure functions of this package; made anew if the model changed."""
        lm = self._prepared.of(self.model)
        return lm.with_options(packed=self.pad_model_input is False, allow_long=self._options.allow_long)

    def with_adapters(self, lora: Lora, *, rows: bool = False) -> "Self":
        """Return the wrapper with adapters, as `lora.attach(wrapper)` does; a call takes `params=(params, adapters)`.

        Args:
            lora: The choice.
            rows: False: the rows of a language model cannot each have an adapter.

        Raises:
            UnsupportedError: `rows` is True.
        """
        if rows:
            # It has the reason.
            self.lm.with_adapters(lora, rows=True)
        new = self._shell()
        new._lora = lora
        new._set_model(self.model)
        # The batcher of this wrapper runs it without adapters.
        new._batcher = new._new_batcher(self._options)
        # A filter that matches no leaf is an error now.
        _ = new.lm
        return new

    # Any: a tree, or with adapters a pair of trees.
    def _with_params(self, params: Any) -> "Self":
        is_pair = isinstance(params, tuple) and len(params) == 2  # pyright: ignore[reportUnknownArgumentType]
        if is_pair != (self._lora is not None):
            raise self._other_params(params)
        # Any: a tree.
        base: Any = params[0] if is_pair else params
        new = self._shell()
        # Rows of other threads have other parameters.
        new._batcher = None
        buffers = None
        if not split(base)[1].leaves():
            buffers = split(from_module(self.model))[1]
        new._trees = params, buffers
        return new

    # Any: trees of parameters and buffers.
    def _tree(self) -> tuple[Any, Any, torch.device]:
        """Return the parameters, with the buffers or beside them, and their device."""
        if self._trees is None and self._lora is not None:
            raise self._other_params(None)
        params, buffers = self._trees or (from_module(self.model), None)
        base = params if self._lora is None else params[0]
        return params, buffers, next(iter(base.leaves())).device

    # Any: what came in the place of parameters.
    def _other_params(self, given: Any) -> Exception:
        """Return the error of parameters that do not belong to this wrapper."""
        if self._lora is None:
            expected = "a tree of parameters"
            hint = "lora.attach(wrapper) takes the pair of a base and adapters."
        else:
            expected = "params=(params, adapters), because the wrapper has adapters"
            hint = "wrapper(td, params=(params, adapters)), with tdf.from_module(wrapper.model) as the base."
        got = "no parameters" if given is None else f"a {type(given).__name__}"
        return error(
            TypeError,
            f"{type(self).__name__}: params do not belong to the wrapper.",
            expected=expected,
            got=got,
            hint=hint,
        )

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
        if keys is not None:
            keys = keys.to(device)
        return generate_tokens(
            self.lm,
            params,
            [row.to(device) for row in prompts],
            options,
            keys=keys,
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

    def __init__(self, lora: Lora | None = None) -> None:
        self._lora = lora
        # Any: descriptions are compared only.
        self._made: tuple[CausalLM, Any] | None = None

    def __deepcopy__(self, memo: Any) -> "_Prepared":
        return self

    def __reduce__(self) -> Any:
        return _Prepared, (self._lora,)

    def of(self, model: nn.Module) -> CausalLM:
        """Return the `CausalLM` of a model."""
        made = self._made
        # Dynamo would guard each attribute, so that it uses the value as it is.
        if made is not None and is_compiling():
            return made[0]
        settings = _settings(model)
        if made is None or made[1] != (_modules(model), settings):
            lm, _, _ = causal_lm(model, copy=False)
            if self._lora is not None:
                lm = self._lora.attach(lm)
            # The settings belong to the model, which may change them.
            made = lm, (_modules(model), copy.deepcopy(settings))
            self._made = made
        return made[0]


# Any: attributes and hooks.
class _Module(NamedTuple):
    """The description of one module."""

    path: str
    kind: type
    attributes: dict[str, Any]
    hooks: list[Any]


def _settings(model: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of a model's configurations."""
    # The second has the tokens that end a response.
    found = [getattr(model, name, None) for name in ("config", "generation_config")]
    return [vars(each) for each in found if each is not None]


def _modules(model: nn.Module) -> list[_Module]:
    """Return the classes, hooks, and attributes of the modules that are plain values or functions."""
    found: list[_Module] = []
    for path, module in model.named_modules():
        attributes: dict[str, Any] = {}
        for name, value in module.__dict__.items():
            is_compared = type(value) in _PLAIN or callable(value)
            if is_compared and name != "training":
                attributes[name] = value
        hooks: list[Any] = []
        for name in _HOOKS:
            hooks += module.__dict__[name].values()
        found.append(_Module(path, type(module), attributes, hooks))
    return found
