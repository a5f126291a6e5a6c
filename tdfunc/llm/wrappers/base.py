"""`LLMWrapperBase`: a language model as a module of trees, over the two calls of a backend.

It reads conversations, texts or tokens as rows of ids, and makes the typed trees of the results. A subclass gives
`generate_tokens` and `score_tokens`.
"""

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor

from tdfunc import random
from tdfunc.core.errors import ImmutableError, UnsupportedError, error
from tdfunc.core.types import NestedKey
from tdfunc.llm.chat_history import ChatHistory
from tdfunc.llm.encode import text_tokenizer
from tdfunc.llm.generation.options import GenerationOptions
from tdfunc.llm.generation.response import Response
from tdfunc.llm.history import History
from tdfunc.llm.records import Text
from tdfunc.llm.templates.find import find_template
from tdfunc.llm.tokens import TokenTemplate
from tdfunc.llm.wrappers.backend import AbstractBackend
from tdfunc.llm.wrappers.inputs import (
    Inputs,
    TokenKeys,
    check_prompts,
    cut,
    encode_chats,
    encode_plain,
    read_chats,
    read_texts,
    read_tokens,
)
from tdfunc.llm.wrappers.options import WrapperOptions
from tdfunc.llm.wrappers.replies import decode_all, reply_of, reply_texts, row_of
from tdfunc.llm.wrappers.rows import Layout, Row, assembled, nest, padded_records, ragged_records, shaped_list
from tdfunc.modules.random import key_of
from tdfunc.nn.base import TensorDictModuleBase, as_key
from tdfunc.ops.reading import has

if TYPE_CHECKING:
    from typing_extensions import Self


class _Option:
    """An option of a wrapper as its attribute; `get_new_version` changes it."""

    def __set_name__(self, owner: Any, name: str) -> None:
        self._name = name

    # Any: the option's own type.
    def __get__(self, wrapper: Any, owner: Any = None) -> Any:
        return self if wrapper is None else getattr(wrapper._options, self._name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        raise ImmutableError(
            f"{type(wrapper).__name__}.{self._name} must not be assigned.",
            hint=f"wrapper = wrapper.get_new_version({self._name}={value!r})",
        )


class LLMWrapperBase(TensorDictModuleBase, AbstractBackend):
    """A language model as a module of trees: it generates responses, or scores conversations.

    Args:
        model: The model.
        tokenizer: A tokenizer or processor of transformers, which is not changed; optional for tokens.
        input_mode: "history", "text" or "tokens".
        input_key: The place of the input: a `ChatHistory`, `Text` or `Tokens` of which `prompt` is read to generate
            and `full` to score, or such an entry itself; by default the key of the output of the same kind.
        attention_mask_key: The place of the mask of tokens, of the shape of what is read; without it the masks at
            `masks_key`, else all are tokens.
        generate: Generate responses; otherwise compute log-probs.
        generate_kwargs: The options of `GenerationOptions`, or a `GenerationConfig` of transformers.
        tokenizer_kwargs: `add_special_tokens` for texts, options of the template for histories, and for both
            `truncation`, `max_length` and `truncation_side`.
        pad_output: Rows of one length, prompts padded at the left and responses at the right; scored tokens stay as
            they lie. Otherwise ragged ones.
        pad_model_input: Score padded rows; False packs them, where the family can.
        inplace: None or False; nothing else, since trees are not written.
        device: The device of the results; by default that of the input.
        layout: `torch.jagged` or `torch.strided` for ragged results as nested tensors; None for lazy stacks.
        num_samples: Responses to each prompt, in a further batch dimension: the result's batch size is [B, N], and the
            input's entries are expanded to it.
        chat_template_name: The name of one of `tdfunc.llm.TEMPLATES`.
        chat_template: A template of `tdfunc.llm` or a Jinja text; by default the tokenizer's own.
        history_key: The place of the `ChatHistory`; None leaves it out, as for the other outputs.
        text_key: The place of the `Text`.
        tokens_key: The place of the `Tokens`.
        masks_key: The place of the `Masks`.
        log_probs_key: The place of the `LogProbs`.
        prompt_log_probs: Score the prompts of generated responses, too.
        batching: Run the rows of several threads together; batch sizes turn it on.
        min_batch_size: The rows that a batch waits for.
        max_batch_size: The most rows of a batch.
        batching_timeout: How long a row waits for others, in seconds.

    Raises:
        TypeError: An option is not known.
        ValueError: An option has a value that is not allowed, or two contradict each other.
        ImmutableError: `inplace` would write to the given tree.

    Source:
        `torchrl.modules.llm.LLMWrapperBase`.
    """

    generate, input_mode, pad_output, pad_model_input = _Option(), _Option(), _Option(), _Option()
    tokenizer, device, layout, num_samples, inplace = _Option(), _Option(), _Option(), _Option(), _Option()

    # Any: what a backend runs, and the options of `WrapperOptions`.
    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__()
        self._collector: weakref.ref[Any] | None = None
        self._set_options(WrapperOptions(**options))
        self.model = model

    def _set_options(self, options: WrapperOptions) -> None:
        """Put options into this very module: one that nobody else has yet."""
        self._options = options
        self._generation = GenerationOptions.parse(options.generate_kwargs, num_samples=options.num_samples)
        self._template = None
        if options.input_mode == "history":
            extra = dict(options.tokenizer_kwargs or {})
            for name in ("truncation", "max_length", "truncation_side"):
                extra.pop(name, None)
            chosen = options.chat_template_name or options.chat_template
            template = find_template(chosen, options.tokenizer, extra)
            self._template = TokenTemplate(options.tokenizer, template)
        self.in_keys = [as_key(options.source)]
        selected = None if self._source is None else [key for key in self.out_keys]
        self.out_keys, self._source = [as_key(key) for key in options.outputs.values()], None
        if selected is not None:
            self._select(selected)

    # -- calls --------------------------------------------------------------------------------------------------

    # Any: trees, and random keys.
    def forward(
        self,
        tensordict: Any,
        *,
        tensordict_out: Any = None,
        logits_only: bool = False,
        training: bool = False,
        rng: Any = None,
    ) -> Any:
        """Return the tree with the outputs.

        Args:
            tensordict: A tree with the input.
            tensordict_out: Another tree to add the outputs to.
            logits_only: Add the logits of each token, as `tdfunc.llm.logits`, instead of the outputs.
            training: Score with dropout, drawn by `rng`; by default the model is in evaluation mode.
            rng: A random key, or a seed of one: for sampling. Response i is drawn by its fold with i.

        Raises:
            MissingKeyError: The tree has no input.
            LeafMismatchError: The input has another shape than the batch, or a mask another than the tokens.
            ValueError: Responses are to be sampled without a key, or a prompt has no tokens.
            UnsupportedError: Logits are to be given by a wrapper that generates, or that has none.
        """
        out = tensordict if tensordict_out is None else tensordict_out
        if logits_only:
            return out.set("logits", self._padded_logits(tensordict, training, rng)[0])
        if self.generate:
            found = self._generated(tensordict, rng)
            if self._samples and tensordict_out is None:
                dims = len(tensordict._batch_size)
                out = tensordict.unsqueeze(dims).expand(*tensordict._batch_size, self._samples)
        else:
            found = self._scored(tensordict, out, training, rng)
        for kind, key in self._options.outputs.items():
            if as_key(key) not in self.out_keys:
                continue
            value = found.get(kind)
            if value is not None:
                out = out.set(key, value)
            elif kind in found and has(out, key):
                # That of other tokens.
                out = out.delete(key)
        return out

    # The outputs are selected where they are added: those of several samples do not fit the given tree.
    def _keep_selected(self, tree: Any, out: Any) -> Any:
        return out

    @property
    def _samples(self) -> int | None:
        """The size of the dimension of responses to one prompt; None where there is no such dimension."""
        count = self._generation.num_return_sequences
        return count if self.num_samples is not None or count > 1 else None

    def _token_keys(self) -> TokenKeys:
        options = self._options
        masks = "masks" if options.masks_key is None else options.masks_key
        return TokenKeys(options.source, options.attention_mask_key, masks)

    def _read(self, td: Any, field: str) -> Inputs:
        """Return the rows of a field of the input."""
        call, options, source = type(self).__name__, self._options, self._options.source
        if options.input_mode == "tokens":
            return read_tokens(td, self._token_keys(), field, call)
        kwargs = options.tokenizer_kwargs or {}
        side = getattr(text_tokenizer(options.tokenizer), "truncation_side", "right")
        if options.input_mode == "text":
            texts = read_texts(td, source, field, call)
            return Inputs(cut(encode_plain(options.tokenizer, texts, kwargs), kwargs, side), texts=texts)
        assert self._template is not None
        chats = read_chats(td, source, field, call)
        return Inputs(cut(encode_chats(self._template, chats, prompts=field == "prompt"), kwargs, side), chats=chats)

    @property
    def _pad(self) -> int:
        """The id of pads: any will do, since masks tell them apart."""
        own = text_tokenizer(self.tokenizer)
        ids = (getattr(own, name, None) for name in ("pad_token_id", "eos_token_id"))
        return next((each for each in ids if each is not None), 0)

    @property
    def _source_key(self) -> NestedKey:
        return as_key(self._options.source)

    def _key_of(self, kind: str) -> "NestedKey | None":
        key = self._options.outputs.get(kind)
        return None if key is None else as_key(key)

    def _device_of(self, td: Any, inputs: Inputs, results: list[Tensor]) -> torch.device:
        if self.device is not None:
            return torch.device(self.device)
        if td._device is not None:
            return td._device
        near = inputs.rows[:1] if self.input_mode == "tokens" else []
        return next((each.device for each in [*[row.ids for row in near], *results]), torch.device("cpu"))

    # -- scoring ------------------------------------------------------------------------------------------------

    def _scored(self, td: Any, out: Any, training: bool, rng: Any) -> dict[str, Any]:
        """Return the outputs of scoring, by their kinds: the record that was read stays as it is."""
        inputs = self._read(td, "full")
        lead = td._batch_size
        rows = self._score_rows(td, inputs, training, rng)
        padded = self.pad_output or not rows
        values: dict[str, Any] = (
            padded_records(rows, self._layout(rows, inputs), lead)
            if padded
            else ragged_records(rows, lead, self.layout)
        )._asdict()
        if self.input_mode != "tokens" and (out is not td or self._source_key != self._key_of(self.input_mode)):
            values[self.input_mode] = (
                Text(full=shaped_list(inputs.texts, lead), batch_size=lead)
                if inputs.texts is not None
                else ChatHistory(full=nest(inputs.chats or [], lead), batch_size=lead)
            )
        if self.input_mode == "history":
            texts = decode_all(self.tokenizer, [row.ids for row in inputs.rows])
            values["text"] = Text(full=shaped_list(texts, lead), batch_size=lead)
        return values

    def _score_rows(self, td: Any, inputs: Inputs, training: bool, rng: Any) -> list[Row]:
        """Return the rows of the input with their log-probs."""
        found = self.score_tokens([row.ids for row in inputs.rows], training=training, rng=rng)
        device = self._device_of(td, inputs, found)
        return [
            replace(row, log_probs=values, scored=torch.arange(len(row.ids)) > 0).to(device)
            for row, values in zip(inputs.rows, found, strict=True)
        ]

    def _layout(self, rows: list[Row], inputs: Inputs) -> Layout:
        """Return the layout that tokens came in; of others, padded at the left."""
        if inputs.layout is not None:
            return inputs.layout if not rows else inputs.layout.to(rows[0].ids.device)
        return assembled(rows, pad=self._pad)

    def log_prob(self, tensordict: Any, *, training: bool = False, rng: Any = None) -> Tensor:
        """Return the log-prob of each token of the input's `full`, 0 at pads and at a row's first token.

        Args:
            tensordict: A tree with the input.
            training: As for `forward`.
            rng: As for `forward`.

        Shapes:
            (*B, T), laid out as the tokens are; texts, histories and ragged tokens are padded at the left.
        """
        inputs = self._read(tensordict, "full")
        rows = self._score_rows(tensordict, inputs, training, rng)
        return padded_records(rows, self._layout(rows, inputs), tensordict._batch_size).log_probs.full

    # Any: backends differ.
    def _logits(self, ids_NT: Tensor, mask_NT: Tensor, training: bool = False, rng: Any = None) -> Tensor:
        """Return the logits from which each token is drawn (N, T, V)."""
        raise UnsupportedError(
            f"{type(self).__name__}: the backend gives no logits.", hint="TransformersWrapper, with the same weights."
        )

    def _padded_logits(self, td: Any, training: bool = False, rng: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits (*B, T, V) of the input's `full`, the mask of its tokens, and the tokens."""
        inputs = self._read(td, "full")
        device = self._device_of(td, inputs, [])
        rows = [row.to(device) for row in inputs.rows]
        layout, lead = self._layout(rows, inputs), td._batch_size
        ids = layout.place([row.ids for row in rows], layout.pad) if layout.ids is None else layout.ids
        found = self._logits(ids, layout.mask, training, rng)
        return (
            found.reshape(*lead, *found.shape[1:]),
            layout.mask.reshape(*lead, -1),
            ids.reshape(*lead, -1),
        )

    # -- generation ---------------------------------------------------------------------------------------------

    def _generated(self, td: Any, rng: Any) -> dict[str, Any]:
        """Return the outputs of generation, by their kinds."""
        inputs = self._read(td, "prompt")
        check_prompts(inputs.rows, td._batch_size)
        options, count = self._generation, self._generation.num_return_sequences
        lead = Size((*td._batch_size, self._samples)) if self._samples else td._batch_size
        responses = self.generate_tokens(
            [row.ids for row in inputs.rows],
            options,
            keys=self._keys(len(inputs.rows) * count, rng),
            prompt_log_probs=self._options.prompt_log_probs,
        )
        prompts = [row for row in inputs.rows for _ in range(count)]
        values: dict[str, Any] = {"tokens": None, "masks": None, "log_probs": None}
        # A server may give texts alone.
        if all([each.tokens is not None for each in responses]):
            log_probs = [each.log_probs for each in responses if each.log_probs is not None]
            device = self._device_of(td, inputs, log_probs)
            rows = [row_of(*pair).to(device) for pair in zip(prompts, responses, strict=True)]
            if self.pad_output or not rows:
                # As wide as the given prompts, whose masks stay in the tree.
                least = 0 if inputs.layout is None else inputs.layout.mask.shape[1]
                values |= padded_records(rows, assembled(rows, pad=self._pad, least=least), lead)._asdict()
            else:
                values |= ragged_records(rows, lead, self.layout)._asdict()
        if self.input_mode == "tokens":
            return values
        texts = reply_texts(self.tokenizer, prompts, responses, skip_special_tokens=options.skip_special_tokens)
        before = inputs.texts
        if before is None:
            before = decode_all(self.tokenizer, [row.ids for row in inputs.rows])
        before = [text for text in before for _ in range(count)]
        values["text"] = Text(
            prompt=shaped_list(before, lead),
            response=shaped_list(texts, lead),
            full=shaped_list([a + b for a, b in zip(before, texts, strict=True)], lead),
            batch_size=lead,
        )
        if inputs.chats is not None:
            values["history"] = self._replied(inputs.chats, prompts, responses, lead)
        return values

    # Any: conversations.
    def _replied(self, chats: list[Any], prompts: list[Row], responses: list[Response], lead: Size) -> ChatHistory:
        """Return the conversations with their replies."""
        assert self._template is not None
        count = self._generation.num_return_sequences
        given = [chat for chat in chats for _ in range(count)]
        texts = reply_texts(self.tokenizer, prompts, responses, skip_special_tokens=False)
        stops = self._generation.stop_sequences
        replies = [
            History.from_chats([reply_of(self._template, response, text, stops)])
            for response, text in zip(responses, texts, strict=True)
        ]
        full = [chat.extend(reply) for chat, reply in zip(given, replies, strict=True)]
        return ChatHistory(
            prompt=nest(given, lead), response=nest(replies, lead), full=nest(full, lead), batch_size=lead
        )

    def _keys(self, count: int, rng: Any) -> Tensor | None:
        """Return a key for each response, or None where nothing is drawn.

        Raises:
            ValueError: Tokens are sampled, and there is no key.
        """
        if not self._generation.samples:
            return None
        if rng is None:
            raise error(
                ValueError,
                f"{type(self).__name__}: sampling takes a random key: there is no hidden state to draw from.",
                expected="wrapper(td, rng=tdfunc.random.key(0)), another key for each call",
            )
        return random.fold_in(key_of(rng), torch.arange(count))

    # -- versions -----------------------------------------------------------------------------------------------

    def get_new_version(self, **changes: Any) -> "Self":
        """Return a wrapper of the same model with other options; all that are not given stay.

        Args:
            **changes: Arguments of the constructor.

        Raises:
            TypeError: An option is not known.
            MissingKeyError: A selected out key is not one of the new wrapper.
        """
        new = self._shell()
        new._set_options(replace(self._options, **changes))
        return new

    def register_collector(self, collector: Any) -> None:
        """Keep a weak reference to the collector that runs this wrapper.

        Args:
            collector: Any object.
        """
        self._collector = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The collector that was registered, or None."""
        return None if self._collector is None else self._collector()

    def __getstate__(self) -> dict[str, Any]:
        # A weak reference has no meaning in another process.
        return {**self.__dict__, "_collector": None}
