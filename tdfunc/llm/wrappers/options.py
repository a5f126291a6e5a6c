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
        if self.inplace not in (None, False):
            raise ImmutableError(
                "LLMWrapper: inplace must be None or False, because trees are never written to.",
                expected="td = wrapper(td), a new tree that shares the entries of the given tree",
                got=f"inplace={self.inplace!r}",
                hint="wrapper(td, tensordict_out=TensorDict(batch_size=td.batch_size)) has only the outputs."
                if self.inplace == "empty"
                else None,
            )
        if self.tokenizer is None and self.input_mode != "tokens":
            raise error(
                TypeError,
                f"LLMWrapper: input_mode={self.input_mode!r} must come with a tokenizer.",
                hint="pass tokenizer=..., or input_mode='tokens'.",
            )
        check_choice("LLMWrapper: layout", self.layout, (None, torch.jagged, torch.strided))
        sizes = (self.min_batch_size, self.max_batch_size)
        if self.batching is False and sizes != (None, None):
            raise error(
                ValueError,
                "LLMWrapper: batching=False must come without batch sizes.",
                got=f"min_batch_size={sizes[0]}, max_batch_size={sizes[1]}",
            )
        known: dict[str, tuple[str, ...]] = {"text": ("add_special_tokens", *CUTS), "tokens": ()}
        for name in self.tokenizer_kwargs or ():
            if name in _OWN or name not in known.get(self.input_mode, (name,)):
                raise error(
                    ValueError,
                    f"LLMWrapper: tokenizer_kwargs must not have {name!r} for input_mode={self.input_mode!r}.",
                    expected=f"some of {known.get(self.input_mode, 'the options of the template')}",
                    hint="the wrapper chooses the form of ids; pad_output= selects padded or ragged outputs.",
                )

    @property
    def batches(self) -> bool:
        """True if requests of several threads run together."""
        return bool(self.batching) or (self.min_batch_size, self.max_batch_size) != (None, None)

    @property
    def source(self) -> NestedKey:
        """The key of the input, by default the key of the output of the same kind."""
        own = {"history": self.history_key, "text": self.text_key, "tokens": self.tokens_key}[self.input_mode]
        found = own if self.input_key is None else self.input_key
        return self.input_mode if found is None else found

    @property
    def outputs(self) -> dict[str, NestedKey]:
        """The keys of the outputs, by their kinds."""
        kinds = {"history": ("history", "text"), "text": ("text",), "tokens": ()}[self.input_mode]
        keys = {kind: getattr(self, f"{kind}_key") for kind in (*kinds, "tokens", "masks", "log_probs")}
        return {kind: key for kind, key in keys.items() if key is not None}
