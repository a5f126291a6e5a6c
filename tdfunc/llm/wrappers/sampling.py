"""The options and seeds of a generation for engines outside of this package, in vLLM's terms."""

from typing import Any

import torch
from torch import Tensor

from tdfunc import random
from tdfunc.core.errors import UnsupportedError, error
from tdfunc.llm.generation.options import GenerationOptions, Response, empty_response

# Stop sequences are looked for in the whole text, and texts are whole where there are no ids.
_WHOLE_TEXT: dict[str, Any] = {
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}


def sampling_options(call: str, options: GenerationOptions) -> dict[str, Any]:
    """Return options under vLLM's names, including options that are off, since an engine may have other defaults.

    Raises:
        UnsupportedError: The options contain beams, or options whose order differs between engines.
        ValueError: `max_new_tokens` is missing.
    """
    _check(call, options)
    found = {**_limits(options), **_truncation(options), **_stops(options), **_WHOLE_TEXT}
    if options.logprobs:
        found["logprobs"] = 0
    return found


def _check(call: str, options: GenerationOptions) -> None:
    """Raise for options that engines lack or treat in another way."""
    if options.num_beams > 1:
        raise UnsupportedError(
            f"{call}: beam search is not supported, because engines score beams in another way than transformers.",
            got=f"num_beams={options.num_beams}",
            hint="use TransformersWrapper.",
        )
    if options.min_p is not None and options.top_p is not None:
        raise UnsupportedError(
            f"{call}: top_p with min_p is not supported, because engines apply min_p before top_p.",
            got=f"top_p={options.top_p}, min_p={options.min_p}",
            hint="pass only one of them, or use TransformersWrapper.",
        )
    if options.max_new_tokens is None:
        raise error(ValueError, "generate: max_new_tokens is missing.")


def _limits(options: GenerationOptions) -> dict[str, Any]:
    """Return the lengths, the temperature and the penalties."""
    return {
        "max_tokens": options.max_new_tokens,
        "min_tokens": options.min_new_tokens,
        "temperature": options.temperature,
        "repetition_penalty": options.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def _truncation(options: GenerationOptions) -> dict[str, Any]:
    """Return the truncation of the distribution, with vLLM's values of truncation that is off."""
    return {
        "top_p": 1.0 if options.top_p is None else options.top_p,
        "top_k": -1 if options.top_k is None else options.top_k,
        "min_p": 0.0 if options.min_p is None else options.min_p,
    }


def _stops(options: GenerationOptions) -> dict[str, Any]:
    """Return the texts and tokens that end a response."""
    ids = [*options.stop_token_ids, *(options.eos_token_ids or ())]
    return {
        "stop": list(options.stop_sequences),
        "stop_token_ids": ids,
        # The tokens of the options take the place of the model's own.
        "ignore_eos": options.eos_token_ids is not None,
    }


def seeds_of(keys: Tensor) -> list[int]:
    """Return a seed, which engines take from 0 to 2**63 - 1, for each key (N, 2)."""
    return (torch.vmap(random.bits)(keys) & (2**63 - 1)).tolist()


def nothing_drawn(options: GenerationOptions) -> Response:
    """Return the response of no tokens."""
    return empty_response(options, drawn=options.keeps_raw and options.logprobs)._replace(text="")
