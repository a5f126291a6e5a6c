"""`generate_tokens`: responses to rows of tokens; each depends only on its key and its prompt."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tdfunc.core.context import has_values
from tdfunc.core.errors import UnsupportedError, brief, error
from tdfunc.llm.encoding.encode import texts_behind
from tdfunc.llm.generation.beams import Beams, search
from tdfunc.llm.generation.decode import BLOCK, Decoded, Stop, decode, pad_left
from tdfunc.llm.generation.options import GenerationOptions, Response, empty_response
from tdfunc.llm.generation.probe import Way, find_way
from tdfunc.llm.generation.sampling import Choice
from tdfunc.llm.rows.batch import Row, rows_on
from tdfunc.llm.rows.packing import equal_lengths
from tdfunc.llm.scoring.ids import score_rows
from tdfunc.llm.scoring.model import CausalLM, check_lm
from tdfunc.random import fold_in, uniform
from tdfunc.storage.progress import progress_bar


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
    scores: Sequence[Tensor | None] = [None] * len(rows)
    if not options.samples:
        keys = None
    elif keys is not None:
        keys = keys.to(device)
    with torch.no_grad():
        if prompt_log_probs:
            scores = score_rows(lm, params, rows, buffers=buffers)
        if options.max_new_tokens:
            stop = _stop_of(lm, options, tokenizer, device)
            call = _Call(lm, params, buffers, options, stop, keys)
            found = _generate(call, rows, progress)
            if options.num_beams != 1:
                found = _with_log_probs(call, rows, found)
        else:
            nothing = empty_response(options, drawn=options.samples, device=device)
            found = [nothing] * (count * len(rows))
        return [row._replace(prompt_log_probs=scores[i // count]) for i, row in enumerate(found)]


def joined_rows(
    prompts: Sequence[Row], responses: Sequence[Response], options: GenerationOptions, device: torch.device
) -> list[Row]:
    """Return each prompt and its response as one row, on a device."""
    rows: list[Row] = []
    for prompt, response in zip(prompts, responses, strict=True):
        assert response.tokens is not None
        n = len(prompt.ids)
        ids = torch.cat([prompt.ids.to(response.tokens.device), response.tokens])
        is_complete = torch.tensor(response.finish_reason == "stop")
        row = Row(ids, n, is_complete=is_complete, version=response.version)
        if response.log_probs is not None:
            row = _with_draws(row, n, response, options)
        rows.append(row)
    return rows_on(device, rows)


def _with_draws(row: Row, n: int, response: Response, options: GenerationOptions) -> Row:
    """Return a row, whose prompt has n tokens, with the log-probs of its response and the record of its sampling."""
    assert response.log_probs is not None
    before = response.prompt_log_probs
    if before is None:
        # The prompt has no log-probs, and so its tokens are not scored.
        before = response.log_probs.new_zeros(n)
        first_scored = n
    else:
        first_scored = 1
    adjusted = None
    # An engine that does not report its distribution does not report its truncation.
    if options.adjusts or (options.cuts and response.behaviour is None):
        adjusted = torch.tensor(True)
    return replace(
        row,
        log_probs=torch.cat([before, response.log_probs]),
        scored=torch.arange(len(row.ids)) >= first_scored,
        behaviour=response.behaviour,
        support=response.support,
        adjusted=adjusted,
    )


# Any: trees.
@dataclass(frozen=True)
class _Call:
    """The model and the options of a call of `generate_tokens`.

    Attributes:
        lm: The model.
        params: Its parameters.
        buffers: Its buffers, or None.
        options: The options, of which `max_new_tokens` is above 0.
        stop: The ends of a response.
        keys: A random key for each response; None for greedy and beam search.
    """

    lm: CausalLM
    params: Any
    buffers: Any
    options: GenerationOptions
    stop: Stop
    keys: Tensor | None


# Any: a tokenizer of transformers.
def _stop_of(lm: CausalLM, options: GenerationOptions, tokenizer: Any, device: torch.device) -> Stop:
    """Return the ends of a response: the ends in the options, else the model's own, and the stop tokens."""
    ends = lm.eos_ids if options.eos_token_ids is None else options.eos_token_ids
    ids = sorted({*ends, *options.stop_token_ids})
    text_of = None
    if options.stop_sequences:
        text_of = functools.partial(texts_behind, tokenizer)
    return Stop(torch.tensor(ids, dtype=torch.int64, device=device), options.stop_sequences, text_of)


def _generate(call: _Call, rows: Sequence[Tensor], progress: bool) -> list[Response]:
    """Return the responses to each prompt, in batches of prompts that can be read together."""
    count = call.options.num_return_sequences
    limit = call.options.max_new_tokens or 0
    lengths = [len(row) for row in rows]
    # Adapters do not change how a family reads its cache and pads.
    base, own = call.lm.base_of(call.params)
    way = find_way(base, own, call.buffers, max(lengths) + limit)
    groups = [list(range(len(rows)))] if way.padded else equal_lengths(lengths)
    found: dict[int, Response] = {}
    total = len(groups) * limit
    with progress_bar("generate: progress=True", show=progress, unit="token", total=total) as tick:
        for members in groups:
            places = [i * count + n for i in members for n in range(count)]
            prompts = [rows[i] for i in members]
            if call.options.num_beams > 1:
                responses = _search(call, prompts, way, tick)
            else:
                responses = _decode(call, prompts, places, way, tick)
            found |= zip(places, responses, strict=True)
    for i, response in found.items():
        if response.log_probs is not None and bool(response.log_probs.isnan().any()):
            raise error(ValueError, f"generate: the logits of row {i // count} are not numbers.", got="NaN")
    return [found[i] for i in range(len(found))]


def _search(call: _Call, prompts: list[Tensor], way: Way, tick: Callable[[int], object]) -> list[Response]:
    """Return the best responses to prompts by beam search."""
    ids, mask = pad_left(prompts)
    fn = functools.partial(search, cached=way.cached, tick=tick)
    beams = call.lm.run(call.params, fn, ids, mask, call.options, call.stop, buffers=call.buffers)
    return _best_beams(beams, call.options.num_return_sequences)


def _decode(
    call: _Call, prompts: list[Tensor], places: list[int], way: Way, tick: Callable[[int], object]
) -> list[Response]:
    """Return greedy or sampled responses to prompts; `places` are the numbers of the responses."""
    ids, mask = pad_left(prompts)
    uniforms = None
    if call.keys is not None:
        uniforms = _uniforms(call.keys[places])
    repeats = call.options.num_return_sequences
    fn = functools.partial(decode, uniforms=uniforms, cached=way.cached, repeats=repeats, tick=tick)
    return _responses(call.lm.run(call.params, fn, ids, mask, call.options, call.stop, buffers=call.buffers))


def _best_beams(beams: Beams, count: int) -> list[Response]:
    """Return the `count` best responses to each prompt."""
    responses: list[Response] = []
    for tokens, stopped in zip(beams.tokens, beams.stopped, strict=True):
        for ids, is_stopped in zip(tokens[:count], stopped[:count], strict=True):
            responses.append(Response(ids, "stop" if is_stopped else "length"))
    return responses


def _with_log_probs(call: _Call, rows: Sequence[Tensor], responses: Sequence[Response]) -> list[Response]:
    """Return responses with their log-probs, by one pass over them."""
    if not call.options.logprobs:
        return list(responses)
    count = call.options.num_return_sequences
    prompts = [row for row in rows for _ in range(count)]
    whole: list[Tensor] = []
    for prompt, response in zip(prompts, responses, strict=True):
        assert response.tokens is not None
        whole.append(torch.cat([prompt, response.tokens]))
    log_probs = score_rows(call.lm.with_options(allow_long=True), call.params, whole, buffers=call.buffers)
    found: list[Response] = []
    for prompt, response, values in zip(prompts, responses, log_probs, strict=True):
        found.append(response._replace(log_probs=values[len(prompt) :]))
    return found


def _uniforms(keys_B2: Tensor) -> Callable[[int], Tensor]:
    """Return a function of uniform numbers for blocks of steps, which depend only on the row's key and the step."""

    def block(number: int) -> Tensor:
        def of_row(key: Tensor) -> Tensor:
            return uniform(fold_in(key, number), (BLOCK,), dtype=torch.float64)

        return torch.vmap(of_row)(keys_B2)

    return block


def _responses(decoded: Decoded) -> list[Response]:
    """Return the steps of rows as responses."""
    steps = decoded.steps
    ids_BT = torch.stack([step.ids for step in steps], 1)
    log_probs_BT = _stacked([step.log_probs for step in steps])
    behaviour_BT = _stacked([step.behaviour for step in steps])
    found: list[Response] = []
    for row, (length, stopped) in enumerate(zip(decoded.lengths, decoded.stopped, strict=True)):
        response = Response(ids_BT[row, :length].clone(), "stop" if stopped else "length")
        if log_probs_BT is not None:
            response = response._replace(log_probs=log_probs_BT[row, :length].clone())
        if behaviour_BT is not None:
            response = response._replace(behaviour=behaviour_BT[row, :length].clone())
        found.append(response._replace(support=_support_of(steps[:length], row)))
    return found


def _stacked(values: list[Tensor | None]) -> Tensor | None:
    """Return the values of all steps (B, T); None if the steps have none."""
    given = [each for each in values if each is not None]
    return torch.stack(given, 1) if given else None


def _support_of(steps: Sequence[Choice], row: int) -> Tensor | None:
    """Return the ids that truncation kept at each step of a row, padded with -1; None if nothing was removed."""
    kept: list[Tensor] = []
    for step in steps:
        if step.support is None:
            return None
        ids = step.support[row]
        kept.append(ids[ids >= 0])
    if not any([len(ids) for ids in kept]):
        return None
    return torch.nn.utils.rnn.pad_sequence(kept, batch_first=True, padding_value=-1)


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
        raise error(ValueError, "generate: the model is in training mode.", hint="lm.train(False)")
    if options.max_new_tokens is None:
        raise error(ValueError, "generate: max_new_tokens is missing.")
    if options.samples:
        _check_keys(keys, len(prompts) * options.num_return_sequences)
    if options.stop_sequences and tokenizer is None:
        raise error(ValueError, "generate: stop sequences need a tokenizer.", got=brief(options.stop_sequences))
    for row, prompt in enumerate(prompts):
        _check_length(lm, row, len(prompt), options.max_new_tokens)


def _check_keys(keys: Tensor | None, count: int) -> None:
    """Raise unless there is a random key for each response."""
    if keys is not None and keys.shape == (count, 2):
        return
    got = None
    hint = "key=tdfunc.random.key(0)"
    if keys is not None:
        got = f"shape {tuple(keys.shape)}"
        hint = None
    raise error(
        ValueError,
        "generate: sampling has no random key for each response.",
        expected=f"shape {(count, 2)}",
        got=got,
        hint=hint,
    )


def _check_length(lm: CausalLM, row: int, length: int, max_new_tokens: int) -> None:
    """Raise if a prompt is empty, or if its longest response would not fit the model's positions."""
    if not length:
        raise error(ValueError, f"generate: row {row} has no tokens.", got="an empty prompt")
    if lm.max_length is None or length + max_new_tokens <= lm.max_length:
        return
    if lm.allow_long and lm.extendable:
        return
    hint = "use fewer max_new_tokens."
    if lm.extendable:
        hint = "use fewer max_new_tokens, or lm.with_options(allow_long=True)."
    raise error(
        ValueError,
        f"generate: row {row} and its response are longer than the positions of {lm.family}.",
        expected=f"at most {lm.max_length} tokens",
        got=f"{length} and {max_new_tokens}",
        hint=hint,
    )
