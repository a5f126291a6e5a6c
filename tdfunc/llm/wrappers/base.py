"""`LLMWrapperBase`: a language model as a module of trees, over the two calls of a backend.

It reads conversations, texts or tokens as rows of ids, and makes the typed trees of the results. A subclass defines
`generate_tokens` and `score_tokens`.
"""

import inspect
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Size, Tensor

from tdfunc import random
from tdfunc.core.context import has_values
from tdfunc.core.errors import ImmutableError, LeafMismatchError, UnsupportedError, brief, check_choice, error
from tdfunc.core.keys import unravel
from tdfunc.core.types import NestedKey
from tdfunc.llm.conversations.exact import TokenTemplate
from tdfunc.llm.conversations.history import ChatHistory
from tdfunc.llm.encoding.padding import Layout, pad_id_of
from tdfunc.llm.generation.options import GenerationOptions, Response
from tdfunc.llm.generation.rows import joined_rows
from tdfunc.llm.messages.columns import with_replies
from tdfunc.llm.rows.batch import (
    Row,
    TokenBatch,
    flat_list,
    nest,
    nest_all,
    padded_batch,
    padded_records,
    ragged_records,
    rows_on,
    scored_rows,
)
from tdfunc.llm.rows.packing import as_mask
from tdfunc.llm.rows.read import TokenKeys
from tdfunc.llm.rows.records import Text
from tdfunc.llm.scoring.trees import MaskedCategorical, keep_draws
from tdfunc.llm.templates.base import text_tokenizer
from tdfunc.llm.templates.find import find_template
from tdfunc.llm.wrappers.backend import AbstractBackend
from tdfunc.llm.wrappers.batching import Batcher
from tdfunc.llm.wrappers.inputs import Inputs, Reader
from tdfunc.llm.wrappers.nested import NestedCategorical, moved_logits
from tdfunc.llm.wrappers.options import CUTS, WrapperOptions
from tdfunc.llm.wrappers.replies import reply_messages, reply_texts, row_texts
from tdfunc.nn.base import TensorDictModuleBase, as_key
from tdfunc.ops.base.reading import get_value, has
from tdfunc.random import key_of

if TYPE_CHECKING:
    from typing_extensions import Self


T = TypeVar("T")


class _Option:
    """An option of a wrapper as its attribute; `get_new_version` changes it."""

    def __set_name__(self, owner: Any, name: str) -> None:
        self._name = name

    # Any: the option's own type.
    def __get__(self, wrapper: Any, owner: Any = None) -> Any:
        if wrapper is None:
            return self
        return getattr(wrapper._options, self._name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        raise ImmutableError(
            f"{type(wrapper).__name__}.{self._name} cannot be assigned.",
            hint=f"wrapper = wrapper.get_new_version({self._name}={brief(value)})",
        )


class LLMWrapperBase(TensorDictModuleBase, AbstractBackend):
    """A language model as a module of trees: it generates responses, or scores conversations.

    Args:
        model: The model.
        tokenizer: A tokenizer or processor of transformers, which is not changed; optional for tokens.
        input_mode: "history", "text" or "tokens".
        input_key: The place of the input, by default the key of the output of the same kind. The input is a
            `ChatHistory`, `Text` or `Tokens`, of which `prompt` is read to generate and `full` to score, or such an
            entry itself.
        attention_mask_key: The place of the mask of the tokens. Without it the masks at `masks_key` are read; without
            these all positions are tokens.
        generate: Generate responses; otherwise compute log-probs.
        generate_kwargs: The options of `GenerationOptions`, or a `GenerationConfig` of transformers.
        tokenizer_kwargs: `add_special_tokens` for texts, options of the template for histories, and for both
            `truncation`, `max_length` and `truncation_side`. Prompts of conversations are truncated at the left only.
        pad_output: Return rows of one length, with prompts padded at the left and responses at the right; scored
            tokens keep their places. Otherwise the results are ragged.
        pad_model_input: Score padded rows; False packs them if the model family allows it.
        inplace: None or False, since trees are never written to.
        device: The device of the results; by default the device of the input.
        layout: `torch.jagged` or `torch.strided` for ragged results as nested tensors, which have one batch dimension;
            None for lazy stacks.
        num_samples: The number of responses to each prompt, in a further batch dimension. The batch size of the result
            is [B, N], and the entries of the input are expanded to it.
        chat_template_name: The name of one of `tdfunc.llm.TEMPLATES`.
        chat_template: A template of `tdfunc.llm` or a Jinja text; by default the tokenizer's own template.
        history_key: The place of the `ChatHistory`; None leaves it out, as for the other outputs.
        text_key: The place of the `Text`.
        tokens_key: The place of the `Tokens`.
        masks_key: The place of the `Masks`.
        log_probs_key: The place of the `LogProbs`.
        prompt_log_probs: Also score the prompts of generated responses.
        allow_long: Run rows that are longer than the training length of the model, if the model can.
        batching: Run the rows of several threads together; batch sizes turn it on.
        min_batch_size: The number of rows that a batch waits for.
        max_batch_size: The maximum number of rows in a batch.
        batching_timeout: The longest time that a row waits for others, in seconds.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option has an invalid value, or two options contradict each other.
        ImmutableError: `inplace` would write to the given tree.

    Source:
        `torchrl.modules.llm.LLMWrapperBase`.
    """

    generate: _Option = _Option()
    input_mode: _Option = _Option()
    pad_output: _Option = _Option()
    pad_model_input: _Option = _Option()
    tokenizer: _Option = _Option()
    device: _Option = _Option()
    layout: _Option = _Option()
    num_samples: _Option = _Option()
    inplace: _Option = _Option()

    # Any: the arguments of a class statement.
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__: inspect.Signature = _with_options(cls)

    # Any: the object that a backend runs, and the options of `WrapperOptions`.
    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__()
        self._collector: weakref.ref[Any] | None = None
        self._set_options(WrapperOptions(**options))
        self._set_model(model)

    # Any: of any type.
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "model":
            raise ImmutableError(
                f"{type(self).__name__}.model cannot be assigned.",
                hint="wrapper = wrapper.get_new_version(model=...)",
            )
        super().__setattr__(name, value)

    # Any: the object that a backend runs.
    def _set_model(self, model: Any) -> None:
        """Put a model into this very module: one that nobody else has yet."""
        super().__setattr__("model", model)

    def _set_options(self, options: WrapperOptions) -> None:
        """Put options into this very module: one that nobody else has yet."""
        self._options = options
        self._generation = GenerationOptions.parse(options.generate_kwargs, num_samples=options.num_samples)
        self._draws = self._generation.samples
        self._batcher = self._new_batcher(options)
        self._text_tokenizer = text_tokenizer(options.tokenizer)
        self._pad = 0
        if self._text_tokenizer is not None:
            self._pad = pad_id_of(self._text_tokenizer)
        self._set_reader(options)
        self._set_keys(options)

    def _new_batcher(self, options: WrapperOptions) -> "Batcher[Any, Any] | None":
        """Return the batcher that the options ask for, or None."""
        if not options.batches:
            return None
        return Batcher(
            self._run_batch,
            min_batch_size=1 if options.min_batch_size is None else options.min_batch_size,
            max_batch_size=options.max_batch_size,
            timeout_s=options.batching_timeout,
        )

    def _set_reader(self, options: WrapperOptions) -> None:
        """Set the reader of inputs, and the template of histories."""
        side = getattr(self._text_tokenizer, "truncation_side", "right")
        given: dict[str, Any] = {"truncation_side": side, **(options.tokenizer_kwargs or {})}
        truncation = {name: given.pop(name) for name in CUTS if name in given}
        # Conversations have the special tokens of their template alone.
        adds_special_tokens = given.pop("add_special_tokens", True)
        self._template: TokenTemplate | None = None
        if options.input_mode == "history":
            chosen = options.chat_template_name or options.chat_template
            self._template = TokenTemplate(options.tokenizer, find_template(chosen, options.tokenizer, given))
        self._reader = Reader(
            options.input_mode,
            TokenKeys(options.source, options.attention_mask_key, options.masks_key or "masks"),
            type(self).__name__,
            self._text_tokenizer,
            self._template,
            Layout(**truncation),
            adds_special_tokens,
        )
        self._reader.layout.check("LLMWrapper")

    def _set_keys(self, options: WrapperOptions) -> None:
        """Set the keys of the input and the outputs; selected out keys stay selected."""
        selected = None
        if self._source is not None:
            selected = list(self.out_keys)
        self._outputs = {kind: as_key(key) for kind, key in options.outputs.items()}
        self.in_keys: Sequence[NestedKey] = [as_key(options.source)]
        self.out_keys: Sequence[NestedKey] = list(self._outputs.values())
        self._source = None
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
        key: Any = None,
        params: Any = None,
    ) -> Any:
        """Return the tree with the outputs.

        Args:
            tensordict: A tree with the input.
            tensordict_out: Another tree to add the outputs to.
            logits_only: Add the logits of each token, as from `tdfunc.llm.logits`, instead of the outputs.
            training: Score with dropout, whose masks come from `key`; by default the model is in evaluation mode.
            key: The random key of sampling, or a seed. Response i uses the key folded with i.
            params: A tree of parameters to run instead of the model's own. Without buffers in the tree, the model's
                buffers are used. For `lora.attach(wrapper)` it is the pair (params, adapters).

        Raises:
            MissingKeyError: The tree has no input.
            LeafMismatchError: The shape of the input does not fit the batch, or a mask does not fit the tokens.
            ValueError: Sampling needs a key, or a prompt has no tokens.
            UnsupportedError: The backend returns no logits, or it cannot run a tree of parameters.
        """
        if params is not None:
            given = {"tensordict_out": tensordict_out, "logits_only": logits_only, "training": training, "key": key}
            return self._with_params(params).forward(tensordict, **given)
        out = tensordict if tensordict_out is None else tensordict_out
        if logits_only:
            return out.set("logits", self._padded_logits(tensordict, training, key)[0])
        if not self.generate:
            return self._with_outputs(out, self._scored(tensordict, out, training, key))
        if training:
            raise error(ValueError, f"{type(self).__name__}: training=True excludes generate=True.")
        found = self._generated(tensordict, key)
        if self._samples and tensordict_out is None:
            dims = len(tensordict._batch_size)
            out = tensordict.unsqueeze(dims).expand(*tensordict._batch_size, self._samples)
        return self._with_outputs(out, found)

    # Any: trees.
    def _with_outputs(self, out: Any, found: dict[str, Any]) -> Any:
        """Return a tree with outputs, by their kinds; None removes the entry of an earlier call."""
        for kind, place in self._outputs.items():
            if place not in self.out_keys:
                continue
            value = found.get(kind)
            if value is not None:
                if kind == "log_probs" and not self.generate:
                    value = keep_draws(value, get_value(out, unravel(place), None))
                out = out.set(place, value)
            elif kind in found and has(out, place):
                # Of other tokens.
                out = out.delete(place)
        return out

    # Any: a tree.
    def _with_params(self, params: Any) -> "Self":
        """Return a wrapper that runs a tree of parameters."""
        raise UnsupportedError(
            f"{type(self).__name__}: params= is not supported, because the backend holds its own weights.",
            hint="push a tree into the engine first, or use TransformersWrapper.",
        )

    # The outputs are selected where they are added: outputs of several samples do not fit the given tree.
    def _keep_selected(self, tree: Any, out: Any) -> Any:
        return out

    @property
    def _samples(self) -> int | None:
        """The size of the dimension of responses to one prompt; None without such a dimension."""
        count = self._generation.num_return_sequences
        if self.num_samples is None and count == 1:
            return None
        return count

    def _device_of(self, td: Any, inputs: Inputs, results: list[Tensor]) -> torch.device:
        if self.device is not None:
            return torch.device(self.device)
        if td._device is not None:
            return td._device
        if self.input_mode == "tokens" and inputs.rows:
            return inputs.rows[0].ids.device
        if results:
            return results[0].device
        return torch.device("cpu")

    # -- scoring ------------------------------------------------------------------------------------------------

    def _scored(self, td: Any, out: Any, training: bool, key: Any) -> dict[str, Any]:
        """Return the outputs of scoring, by their kinds; the record that was read does not change."""
        lead = td._batch_size
        mode = self.input_mode
        inputs = self._reader.read(td, "full")
        rows = self._score_rows(td, inputs, training, key)
        if self.pad_output or not rows:
            records = self._batch(rows, inputs, lead).records(rows)
        else:
            records = ragged_records(rows, lead, self.layout)
        values: dict[str, Any] = records._asdict()
        is_in_place = out is td and self.in_keys[0] == self._outputs.get(mode)
        if mode != "tokens" and not is_in_place:
            if inputs.texts is not None:
                values[mode] = Text(full=nest(inputs.texts, lead, list), batch_size=lead)
            else:
                values[mode] = ChatHistory(full=nest(inputs.chats or [], lead), batch_size=lead)
        if mode == "history":
            texts = row_texts(self._text_tokenizer, inputs.rows)
            values["text"] = Text(full=nest(texts, lead, list), batch_size=lead)
        return values

    def _score_rows(self, td: Any, inputs: Inputs, training: bool, key: Any) -> list[Row]:
        """Return the rows of the input with their log-probs."""
        ids = [row.ids for row in inputs.rows]
        # Dropout is drawn for a call as a whole; threads of the batcher are outside of transforms.
        if self._batcher is None or training or not has_values():
            found = self.score_tokens(ids, training=training, rng=key)
        else:
            group = ("score", torch.is_grad_enabled())
            futures = [self._batcher.submit((group, row, None), group=group) for row in ids]
            found = [future.result() for future in futures]
        device = self._device_of(td, inputs, found)
        return scored_rows(inputs.rows, found, device)

    def _batch(self, rows: list[Row], inputs: Inputs, lead: Size, side: str = "left") -> TokenBatch:
        """Return the padded tokens as they came in; other rows padded at a side."""
        if inputs.batch is not None:
            if rows:
                return inputs.batch.to(rows[0].ids.device)
            return inputs.batch
        if side != "left":
            # Of parts that are not known, so that each row is in one piece.
            rows = [replace(row, prompt=None) for row in rows]
        return padded_batch(rows, lead, pad=self._pad, side=side)

    def log_prob(self, tensordict: Any, *, training: bool = False, key: Any = None) -> Tensor:
        """Return the log-prob of each token of the input's `full`, 0 at pads and at a row's first token.

        Args:
            tensordict: A tree with the input.
            training: As for `forward`.
            key: As for `forward`.

        Shapes:
            (*B, T), in the layout of the tokens; texts, histories and ragged tokens are padded at the left.
        """
        inputs = self._reader.read(tensordict, "full")
        rows = self._score_rows(tensordict, inputs, training, key)
        return self._batch(rows, inputs, tensordict._batch_size).records(rows).log_probs.full

    # Any: backends differ.
    def _logits(self, ids_NT: Tensor, mask_NT: Tensor, training: bool, key: Any) -> Tensor:
        """Return the logits from which each token is sampled (N, T, V)."""
        raise UnsupportedError(
            f"{type(self).__name__}: the backend returns no logits.",
            hint="use TransformersWrapper with the same weights.",
        )

    def _padded_logits(self, td: Any, training: bool, key: Any, side: str = "left") -> tuple[Tensor, Tensor]:
        """Return the logits from which tokens are sampled (*B, T, V), and the mask of the tokens (*B, T)."""
        batch = self._padded(td, side)
        found = self._logits(batch.ids, batch.mask, training, key)
        return batch.shaped(found), batch.shaped(batch.mask)

    def _padded(self, td: Any, side: str) -> TokenBatch:
        """Return the tokens of the input's `full`, padded."""
        return self._padded_inputs(td, self._reader.read(td, "full"), side)

    def _padded_inputs(self, td: Any, inputs: Inputs, side: str) -> TokenBatch:
        """Return the tokens of inputs, padded."""
        device = self._device_of(td, inputs, [])
        return self._batch(rows_on(device, inputs.rows), inputs, td._batch_size, side)

    def _stored_logits(self, td: Any, place: NestedKey, side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
        """Return logits of the tree (*B, T, V) and the mask of the tokens (*B, T), rows that were ragged at a side."""
        inputs = self._reader.read(td, "full")
        batch = self._padded_inputs(td, inputs, side)
        tokens = batch.shaped(batch.mask)
        logits = td[place]
        if not isinstance(logits, Tensor):
            # The entry of a lazy stack.
            logits = batch.shaped(torch.stack(flat_list(logits, len(td._batch_size))))
        _check_shape("the logits", logits.shape[:-1], tokens)
        if inputs.batch is None:
            rows_NTV = logits.reshape(*batch.mask.shape, logits.shape[-1])
            logits = batch.shaped(moved_logits(rows_NTV, batch.mask, side))
        return logits, tokens

    def get_dist(
        self,
        tensordict: Any,
        tensordict_out: None = None,
        logits_key: "NestedKey | None" = None,
        mask_key: "NestedKey | None" = None,
        *,
        as_padded_tensor: bool | None = None,
        as_nested_tensor: bool | None = None,
        padding_value: float | None = None,
        padding_side: Literal["left", "right"] = "left",
        layout: torch.layout | None = None,
        training: bool = False,
        key: Any = None,
    ) -> MaskedCategorical:
        """Return the distribution from which each token of the input's `full` is sampled.

        Its log-probs and entropies are 0 at pads and at a row's first token. Padded tokens keep their places.

        Args:
            tensordict: A tree with the input.
            tensordict_out: None, since a tree is not written to.
            logits_key: The place of logits from `logits_only=True` or `tdfunc.llm.logits`. Without it, or if the tree
                has no such entry, the logits are computed.
            mask_key: The place of a mask of the tokens that count, such as the assistant's tokens, shape (*B, T),
                padded at the same side.
            as_padded_tensor: Return padded results, which is the default.
            as_nested_tensor: Return results as nested tensors.
            padding_value: A number for all logits of a pad. It has no effect, since logits are normalized.
            padding_side: The side at which ragged tokens, texts and histories are padded.
            layout: The layout of nested results.
            training: As for `forward`.
            key: As for `forward`.

        Raises:
            UnsupportedError: The backend returns no logits, or `tensordict_out` is given.
            LeafMismatchError: The mask or the logits have another shape than the tokens.
            ValueError: Both `as_padded_tensor` and `as_nested_tensor` are set.

        Shapes:
            Logits are (*B, T, V), log-probs and entropies (*B, T).
        """
        if tensordict_out is not None:
            raise UnsupportedError(
                "get_dist: tensordict_out is not supported, because a tree cannot contain a distribution.",
                hint="wrapper(td, logits_only=True) adds the logits to a tree.",
            )
        if as_nested_tensor and as_padded_tensor:
            raise error(ValueError, "get_dist: padded and nested results exclude each other.", got="both")
        check_choice("get_dist: padding_side", padding_side, ("left", "right"))
        if logits_key is None or not has(tensordict, logits_key):
            logits, tokens = self._padded_logits(tensordict, training, key, padding_side)
        else:
            logits, tokens = self._stored_logits(tensordict, logits_key, padding_side)
        _check_shape("the logits", logits.shape[:-1], tokens)
        # A row's first token is not sampled.
        mask = tokens & (tokens.cumsum(-1) > 1)
        if mask_key is not None:
            own = as_mask(tensordict[mask_key], "get_dist")
            _check_shape("the mask", own.shape, tokens)
            mask = mask & own
        if as_nested_tensor or (layout is not None and not as_padded_tensor):
            return NestedCategorical(logits, mask, tokens, layout or torch.jagged)
        return MaskedCategorical(logits, mask)

    # -- generation ---------------------------------------------------------------------------------------------

    def _generated(self, td: Any, key: Any) -> dict[str, Any]:
        """Return the outputs of generation, by their kinds."""
        inputs = self._reader.read(td, "prompt")
        count = self._generation.num_return_sequences
        keys = self._keys(len(inputs.rows) * count, key)
        responses = self._draw_rows([row.ids for row in inputs.rows], keys)
        values = self._generated_tokens(td, inputs, responses)
        if self.input_mode != "tokens":
            values |= self._generated_texts(td, inputs, responses)
        return values

    def _size_of(self, td: Any) -> Size:
        """Return the batch size of the responses to the prompts of a tree."""
        if self._samples:
            return Size((*td._batch_size, self._samples))
        return td._batch_size

    def _repeated(self, items: Iterable[T]) -> list[T]:
        """Return an item of each prompt for each of its responses."""
        return [item for item in items for _ in range(self._generation.num_return_sequences)]

    def _generated_tokens(self, td: Any, inputs: Inputs, responses: list[Response]) -> dict[str, Any]:
        """Return the tokens, masks and log-probs of prompts with their responses."""
        # A server may give texts alone.
        if any([each.tokens is None for each in responses]):
            return {"tokens": None, "masks": None, "log_probs": None}
        lead = self._size_of(td)
        log_probs = [each.log_probs for each in responses if each.log_probs is not None]
        device = self._device_of(td, inputs, log_probs)
        rows = joined_rows(self._repeated(inputs.rows), responses, self._generation, device)
        if rows and not self.pad_output:
            return ragged_records(rows, lead, self.layout)._asdict()
        # As wide as the given prompts, whose masks stay in the tree.
        least = 0
        if inputs.batch is not None:
            least = inputs.batch.ids.shape[1]
        return padded_records(rows, lead, pad=self._pad, least=least)._asdict()

    def _generated_texts(self, td: Any, inputs: Inputs, responses: list[Response]) -> dict[str, Any]:
        """Return the texts of prompts with their responses, and for conversations the histories."""
        lead = self._size_of(td)
        prompts = self._repeated(inputs.rows)
        if inputs.texts is None:
            before = self._repeated(row_texts(self._text_tokenizer, inputs.rows))
        else:
            before = self._repeated(inputs.texts)
        texts = reply_texts(self._text_tokenizer, prompts, responses)
        values: dict[str, Any] = {}
        if inputs.chats is not None:
            # Templates read the control tokens of replies.
            values["history"] = self._replied(inputs.chats, before, responses, texts, lead)
        if self._generation.skip_special_tokens:
            texts = reply_texts(self._text_tokenizer, prompts, responses, skip_special_tokens=True)
        full = [prompt + text for prompt, text in zip(before, texts, strict=True)]
        ends = [each.finish_reason for each in responses]
        lists = nest_all(lead, list, prompt=before, response=texts, full=full, finish_reason=ends)
        values["text"] = Text(**lists, batch_size=lead)
        return values

    def _draw_rows(self, prompts: list[Tensor], keys: Tensor | None) -> list[Response]:
        """Return the responses of the backend to prompts, together with those to other threads' prompts."""
        options = self._generation
        scored = self._options.prompt_log_probs
        if self._batcher is None:
            return self.generate_tokens(prompts, options, keys=keys, prompt_log_probs=scored)
        group = ("generate", options, scored)
        own_keys = [None] * len(prompts)
        if keys is not None:
            own_keys = keys.split(options.num_return_sequences)
        futures: list[Future[Any]] = []
        for prompt, own in zip(prompts, own_keys, strict=True):
            futures.append(self._batcher.submit((group, prompt, own), group=group))
        responses: list[Response] = []
        for future in futures:
            responses += future.result()
        return responses

    # Any: conversations.
    def _replied(
        self, chats: list[Any], prompts: list[str], responses: list[Response], texts: list[str], lead: Size
    ) -> ChatHistory:
        """Return the conversations with their replies to prompts."""
        assert self._template is not None
        given = self._repeated(chats)
        messages = reply_messages(self._template, prompts, responses, texts, self._generation.stop_sequences)
        replies, full = with_replies(given, messages)
        parts = nest_all(lead, prompt=given, response=replies, full=full)
        return ChatHistory(**parts, batch_size=lead)

    def _keys(self, count: int, key: Any) -> Tensor | None:
        """Return a key for each response, or None without sampling.

        Raises:
            ValueError: Tokens are sampled, and there is no key.
        """
        if not self._draws:
            return None
        if key is None:
            raise error(
                ValueError,
                f"{type(self).__name__}: sampling has no random key, and wrappers have no random state.",
                expected="wrapper(td, key=tdfunc.random.key(0)), with another key for each call",
            )
        return random.fold_in(key_of(key), torch.arange(count))

    # -- batching -----------------------------------------------------------------------------------------------

    # Any: requests and results of either kind.
    def _run_batch(self, requests: list[Any]) -> list[Any]:
        """Return the results of requests of one group: scores, or the responses to each prompt."""
        kind, *how = requests[0][0]
        rows = [row for _, row, _ in requests]
        if kind == "score":
            with torch.set_grad_enabled(how[0]):
                return self.score_tokens(rows)
        options, scored = how
        keys = None
        if requests[0][2] is not None:
            keys = torch.cat([each for _, _, each in requests])
        found = self.generate_tokens(rows, options, keys=keys, prompt_log_probs=scored)
        count = options.num_return_sequences
        return [found[i * count : (i + 1) * count] for i in range(len(rows))]

    @property
    def batching(self) -> bool:
        """True if rows of several threads run together."""
        return self._batcher is not None

    def get_batching_state(self) -> dict[str, Any]:
        """Return the counts and options of `Batcher.state`, and `batching`."""
        if self._batcher is None:
            return {"batching": False}
        return {"batching": True, **self._batcher.state()}

    def cleanup_batching(self, *, flush: bool = False) -> "list[Future[Any]]":
        """Empty the queue, and return the futures of the rows that were in it, all done.

        Args:
            flush: Run these rows first, so that their callers receive results; otherwise cancel the calls.
        """
        if self._batcher is None:
            return []
        return self._batcher.cleanup(flush=flush)

    # -- versions -----------------------------------------------------------------------------------------------

    def get_new_version(self, **changes: Any) -> "Self":
        """Return a wrapper of the same model with some options changed.

        Args:
            **changes: Arguments of the constructor.

        Raises:
            TypeError: An option is unknown.
            MissingKeyError: The new wrapper does not have a selected out key.
        """
        new = self._shell()
        if "model" in changes:
            new._set_model(changes.pop("model"))
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
        if self._collector is None:
            return None
        return self._collector()

    def __getstate__(self) -> dict[str, Any]:
        # It has no meaning in another process.
        return {**self.__dict__, "_collector": None}


def _with_options(cls: type[LLMWrapperBase]) -> inspect.Signature:
    """Return the signature of a class of wrappers, its options by name, as `help` and notebooks show it."""
    own = list(inspect.signature(cls.__init__).parameters.values())[1:]
    parameters = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
    takes_options = len(parameters) < len(own)
    if takes_options:
        names = {each.name for each in parameters}
        for option in inspect.signature(WrapperOptions).parameters.values():
            if option.name not in names:
                parameters.append(option)
    return inspect.Signature(parameters)


def _check_shape(name: str, shape: Size, tokens: Tensor) -> None:
    """Raise unless logits or a mask have the shape of the tokens."""
    if shape != tokens.shape:
        raise LeafMismatchError(
            f"get_dist: {name} and the tokens differ in shape.",
            expected=f"shape {tuple(tokens.shape)}",
            got=f"shape {tuple(shape)}",
        )


LLMWrapperBase.__signature__ = _with_options(LLMWrapperBase)
