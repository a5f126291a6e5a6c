"""`WrapperOptions`: the arguments of a wrapper, and their rules."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from tdfunc.core.errors import ImmutableError, check_choice, error
from tdfunc.core.types import NestedKey

if TYPE_CHECKING:
    from transformers import GenerationConfig

MODES = ("history", "text", "tokens")
# Arguments of tokenizers that decide the form of ids, which is the wrapper's.
_OWN = (
    "add_generation_prompt", "continue_final_message", "padding", "padding_side", "return_assistant_tokens_mask",
    "return_attention_mask", "return_dict", "return_tensors", "tokenize", "tokenizer",
)  # fmt: skip
CUTS = ("max_length", "truncation", "truncation_side")


@dataclass(frozen=True, kw_only=True)
class WrapperOptions:
    """The arguments of a wrapper besides its model; `LLMWrapperBase` describes them."""

    # Any: a tokenizer or processor of transformers.
    tokenizer: Any = None
    input_mode: Literal["history", "text", "tokens"] = "history"
    input_key: "NestedKey | None" = None
    attention_mask_key: NestedKey = "attention_mask"
    generate: bool = True
    generate_kwargs: "Mapping[str, Any] | GenerationConfig | None" = None
    tokenizer_kwargs: Mapping[str, Any] | None = None
    pad_output: bool = False
    pad_model_input: bool | None = None
    inplace: Literal[False] | None = None
    device: torch.device | str | None = None
    layout: torch.layout | None = None
    num_samples: int | None = None
    chat_template_name: str | None = None
    # Any: a template, or a text in Jinja.
    chat_template: Any = None
    history_key: "NestedKey | None" = "history"
    text_key: "NestedKey | None" = "text"
    tokens_key: "NestedKey | None" = "tokens"
    masks_key: "NestedKey | None" = "masks"
    log_probs_key: "NestedKey | None" = "log_probs"
    prompt_log_probs: bool = False
    allow_long: bool = False
    batching: bool | None = None
    min_batch_size: int | None = None
    max_batch_size: int | None = None
    batching_timeout: float = 10.0

    def __post_init__(self) -> None:
        """Check the rules.

        Raises:
            ValueError: An option has an invalid value, or two options contradict each other.
            TypeError: Texts or histories need a tokenizer.
            ImmutableError: `inplace` would write to the given tree.
        """
        check_choice("LLMWrapper: input_mode", self.input_mode, MODES)
        self._check_inplace()
        if self.tokenizer is None and self.input_mode != "tokens":
            raise error(
                TypeError,
                f"LLMWrapper: input_mode={self.input_mode!r} needs a tokenizer.",
                hint="pass tokenizer=..., or input_mode='tokens'.",
            )
        check_choice("LLMWrapper: layout", self.layout, (None, torch.jagged, torch.strided))
        if self.batching is False and self._has_sizes:
            raise error(
                ValueError,
                "LLMWrapper: batching=False excludes batch sizes.",
                got=f"min_batch_size={self.min_batch_size}, max_batch_size={self.max_batch_size}",
            )
        self._check_tokenizer_kwargs()

    def _check_inplace(self) -> None:
        if self.inplace in (None, False):
            return
        hint = None
        if self.inplace == "empty":
            hint = "wrapper(td, tensordict_out=TensorDict(batch_size=td.batch_size)) has only the outputs."
        raise ImmutableError(
            "LLMWrapper: inplace must be None or False, because trees are never written to.",
            expected="td = wrapper(td), a new tree that shares the entries of the given tree",
            got=f"inplace={self.inplace!r}",
            hint=hint,
        )

    def _check_tokenizer_kwargs(self) -> None:
        # Histories pass other names on to the template.
        names: dict[str, tuple[str, ...]] = {"text": ("add_special_tokens", *CUTS), "tokens": ()}
        known = names.get(self.input_mode)
        for name in self.tokenizer_kwargs or ():
            if name not in _OWN and (known is None or name in known):
                continue
            raise error(
                ValueError,
                f"LLMWrapper: tokenizer_kwargs has {name!r}, which input_mode={self.input_mode!r} excludes.",
                expected=f"some of {'the options of the template' if known is None else known}",
                hint="the wrapper chooses the form of ids; pad_output= selects padded or ragged outputs.",
            )

    @property
    def _has_sizes(self) -> bool:
        return self.min_batch_size is not None or self.max_batch_size is not None

    @property
    def batches(self) -> bool:
        """True if requests of several threads run together."""
        return bool(self.batching) or self._has_sizes

    @property
    def source(self) -> NestedKey:
        """The key of the input, by default the key of the output of the same kind."""
        if self.input_key is not None:
            return self.input_key
        output: NestedKey | None = getattr(self, f"{self.input_mode}_key")
        if output is not None:
            return output
        return self.input_mode

    @property
    def outputs(self) -> dict[str, NestedKey]:
        """The keys of the outputs, by their kinds."""
        kinds = {"history": ("history", "text"), "text": ("text",), "tokens": ()}[self.input_mode]
        keys = {kind: getattr(self, f"{kind}_key") for kind in (*kinds, "tokens", "masks", "log_probs")}
        return {kind: key for kind, key in keys.items() if key is not None}
