"""`generate_tokens`: responses to rows of tokens; each depends only on its key and its prompt."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tdfunc.core.context import has_values
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.llm.encoding.encode import texts_behind
from tdfunc.llm.generation.beams import Beams, search
from tdfunc.llm.generation.decode import BLOCK, Decoded, Stop, decode, pad_left
from tdfunc.llm.generation.options import GenerationOptions, Response, empty_response
from tdfunc.llm.generation.probe import find_way
from tdfunc.llm.rows.batch import Row, rows_on
from tdfunc.llm.rows.packing import equal_lengths
from tdfunc.llm.scoring.ids import score_rows
from tdfunc.llm.scoring.model import CausalLM, check_lm
from tdfunc.parallel.progress import progress_bar
from tdfunc.random import fold_in, uniform


def generate_tokens(
    lm: CausalLM,
    params: Any,
    prompts: Sequence[Tensor],
    options: GenerationOptions,
    *,
    keys: Tensor | None = None,
    buffers: Any = None,
    # Any: a tokenizer of transformers.
    tokenizer: Any = None,
    prompt_log_probs: bool = False,
    progress: bool = False,
) -> list[Response]:
    """Return responses to rows of tokens.

    A response depends only on its key and the tokens of its prompt, not on the other rows.

    Args:
        lm: The model, from `causal_lm`.
        params: The parameters, or the complete tree.
        prompts: Rows of tokens of any lengths.
        options: From `GenerationOptions.parse`.
        keys: A random key for each response (B * N, 2), in their order; None for greedy and beam search.
        buffers: The buffers of the model, unless `params` has them.
        tokenizer: The tokenizer that decodes responses to find stop sequences.
        prompt_log_probs: Also score the prompts.
        progress: Show a progress bar of the tokens that are generated for each row. Requires tqdm.

    Shapes:
        B prompts give B * N responses; the responses to one prompt are next to each other.

    Raises:
        ImportError: `progress` is True and tqdm is not installed.
        ValueError: A prompt is empty or too long for its response, `max_new_tokens` is missing, sampling has no keys,
            stop sequences have no tokenizer, or the logits of a row are NaN.
        UnsupportedError: The call is inside a transform, which hides the tokens.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from tdfunc.llm import GenerationOptions, causal_lm
        >>> config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20)
        >>> lm, params, buffers = causal_lm(GPT2LMHeadModel(config))
        >>> options = GenerationOptions.parse({"max_new_tokens": 4, "temperature": 1.0})
        >>> prompts, keys = [torch.tensor([1, 2]), torch.tensor([3])], tdf.random.split(tdf.random.key(0), 2)
        >>> [row.tokens.shape for row in generate_tokens(lm, params, prompts, options, keys=keys, buffers=buffers)]
        [torch.Size([4]), torch.Size([4])]
    """
    _check(lm, prompts, options, keys, tokenizer)
    if not prompts:
        return []
    # Any: the leaves of a tree.
    device: Any = next(iter(lm.base_of(params)[1].leaves())).device
    rows = [row.to(device, torch.int64) for row in prompts]
    count = options.num_return_sequences
    ends = {*(lm.eos_ids if options.eos_token_ids is None else options.eos_token_ids), *options.stop_token_ids}
    text_of = None
    if options.stop_sequences:
        text_of = functools.partial(texts_behind, tokenizer)
    stop = Stop(torch.tensor(sorted(ends), dtype=torch.int64, device=device), options.stop_sequences, text_of)
    keys = keys.to(device) if keys is not None and options.samples else None
    with torch.no_grad():
        if prompt_log_probs:
            scores = score_rows(lm, params, rows, buffers=buffers)
        else:
            scores = [None] * len(rows)
        if not options.max_new_tokens:
            found = [empty_response(options, drawn=options.samples, device=device)] * (count * len(rows))
        else:
            found = _generate(lm, params, rows, options, stop, keys, buffers, progress)
            if options.num_beams != 1:
                found = _scored(lm, params, rows, found, options, buffers)
        return [row._replace(prompt_log_probs=scores[i // count]) for i, row in enumerate(found)]


def joined_rows(
    prompts: Sequence[Row], responses: Sequence[Response], options: GenerationOptions, device: torch.device
) -> list[Row]:
    """Return each prompt and its response as one row, on a device."""
    rows: list[Row] = []
    for prompt, response in zip(prompts, responses, strict=True):
        assert response.tokens is not None
        n = len(prompt.ids)
        near = response.tokens.device
        ids = torch.cat([prompt.ids.to(near), response.tokens])
        row = Row(ids, n, is_complete=torch.tensor(response.finish_reason == "stop"), version=response.version)
        if response.log_probs is not None:
            before = response.prompt_log_probs
            scored = torch.arange(len(ids)) > (n - 1 if before is None else 0)
            if before is None:
                before = response.log_probs.new_zeros(n)
            log_probs = torch.cat([before, response.log_probs])
            drawn = {"behaviour": response.behaviour, "support": response.support}
            # An engine that does not report its distribution does not report its truncation.
            if options.adjusts or (options.cuts and response.behaviour is None):
                drawn["adjusted"] = torch.tensor(True)
            row = replace(row, log_probs=log_probs, scored=scored, **drawn)
        rows.append(row)
    return rows_on(device, rows)


def _generate(
    lm: CausalLM,
    params: Any,
    rows: Sequence[Tensor],
    options: GenerationOptions,
    stop: Stop,
    keys: Tensor | None,
    buffers: Any,
    progress: bool,
) -> list[Response]:
    """Return the responses to each prompt, in batches of prompts that can be read together."""
    count = options.num_return_sequences
    lengths = [len(row) for row in rows]
    # Adapters do not change how a family reads its cache and pads.
    base, own = lm.base_of(params)
    way = find_way(base, own, buffers, max(lengths) + (options.max_new_tokens or 0))
    if way.padded:
        groups = [list(range(len(rows)))]
    else:
        groups = equal_lengths(lengths)
    found: dict[int, Response] = {}
    steps = len(groups) * (options.max_new_tokens or 0)
    with progress_bar("generate: progress=True", show=progress, unit="token", total=steps) as tick:
        for members in groups:
            ids, mask = pad_left([rows[i] for i in members])
            places = [i * count + n for i in members for n in range(count)]
            if options.num_beams > 1:
                fn = functools.partial(search, cached=way.cached, tick=tick)
                beams = lm.run(params, fn, ids, mask, options, stop, buffers=buffers)
                responses = _best_beams(beams, count)
            else:
                draw = None
                if keys is not None:
                    draw = _uniforms(keys[places])
                fn = functools.partial(decode, uniforms=draw, cached=way.cached, repeats=count, tick=tick)
                responses = _responses(lm.run(params, fn, ids, mask, options, stop, buffers=buffers))
            found |= zip(places, responses, strict=True)
    for i, response in found.items():
        if response.log_probs is not None and bool(response.log_probs.isnan().any()):
            raise error(ValueError, f"generate: the logits of row {i // count} must be numbers.", got="NaN")
    return [found[i] for i in range(len(found))]


def _best_beams(beams: Beams, count: int) -> list[Response]:
    """Return the `count` best responses to each prompt."""
    responses: list[Response] = []
    for tokens, stopped in zip(beams.tokens, beams.stopped, strict=True):
        for ids, is_stopped in zip(tokens[:count], stopped[:count], strict=True):
            responses.append(Response(ids, "stop" if is_stopped else "length"))
    return responses


def _scored(
    lm: CausalLM,
    params: Any,
    rows: Sequence[Tensor],
    responses: Sequence[Response],
    options: GenerationOptions,
    buffers: Any,
) -> list[Response]:
    """Return responses with their log-probs, by one pass over them."""
    if not options.logprobs:
        return list(responses)
    count = options.num_return_sequences
    whole = [torch.cat([rows[i // count], each.tokens]) for i, each in enumerate(responses) if each.tokens is not None]
    found = score_rows(lm.with_options(allow_long=True), params, whole, buffers=buffers)
    return [
        each._replace(log_probs=values[len(rows[i // count]) :])
        for i, (each, values) in enumerate(zip(responses, found, strict=True))
    ]


def _uniforms(keys_B2: Tensor) -> Callable[[int], Tensor]:
    """Return a function of uniform numbers for blocks of steps, which depend only on the row's key and the step."""

    def block(number: int) -> Tensor:
        return torch.vmap(lambda key: uniform(fold_in(key, number), (BLOCK,), dtype=torch.float64))(keys_B2)

    return block


def _responses(decoded: Decoded) -> list[Response]:
    """Return the steps of rows as responses."""
    steps = decoded.steps
    ids, log_probs, behaviour = (
        None if getattr(steps[0], name) is None else torch.stack([getattr(step, name) for step in steps], 1)
        for name in ("ids", "log_probs", "behaviour")
    )
    assert ids is not None
    found: list[Response] = []
    for row, (length, stopped) in enumerate(zip(decoded.lengths, decoded.stopped, strict=True)):
        support = None
        if steps[0].support is not None:
            parts = [step.support[row] for step in steps[:length] if step.support is not None]
            parts = [part[part >= 0] for part in parts]
            if any([len(part) for part in parts]):
                support = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-1)
        found.append(
            Response(
                ids[row, :length].clone(),
                "stop" if stopped else "length",
                None if log_probs is None else log_probs[row, :length].clone(),
                None if behaviour is None else behaviour[row, :length].clone(),
                support,
            )
        )
    return found


def _check(
    lm: CausalLM,
    prompts: Sequence[Tensor],
    options: GenerationOptions,
    keys: Tensor | None,
    tokenizer: Any,
) -> None:
    """Raise if the prompts, the options or the keys do not allow a generation."""
    check_lm("generate", lm)
    if not has_values():
        raise UnsupportedError(
            "generate: tokens cannot be sampled inside a transform.",
            expected="tensors with values",
            hint="call it for each member: generate(lm, params[i], td, ...).",
        )
    if lm.apply.training:
        raise error(ValueError, "generate: the model must be in evaluation mode.", hint="lm.train(False)")
    if options.max_new_tokens is None:
        raise error(ValueError, "generate: max_new_tokens must be given.")
    count = len(prompts) * options.num_return_sequences
    if options.samples and (keys is None or keys.shape != (count, 2)):
        raise error(
            ValueError,
            "generate: sampling must have a random key for each response.",
            expected=f"shape {(count, 2)}",
            got=None if keys is None else f"shape {tuple(keys.shape)}",
            hint="key=tdfunc.random.key(0)" if keys is None else None,
        )
    if options.stop_sequences and tokenizer is None:
        raise error(ValueError, "generate: stop sequences must come with a tokenizer.", got=options.stop_sequences)
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise error(ValueError, f"generate: row {row} must have tokens.", got="an empty prompt")
        total = len(prompt) + options.max_new_tokens
        if lm.max_length is not None and total > lm.max_length and not (lm.allow_long and lm.extendable):
            raise error(
                ValueError,
                f"generate: row {row} and its response must not be longer than the positions of {lm.family}.",
                expected=f"at most {lm.max_length} tokens",
                got=f"{len(prompt)} and {options.max_new_tokens}",
                hint="use fewer max_new_tokens" + (", or lm.with_options(allow_long=True)." if lm.extendable else "."),
            )
