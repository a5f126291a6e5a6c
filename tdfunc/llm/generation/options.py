"""`GenerationOptions`, the options of generation under one meaning for every engine, and `Response`, its results."""

import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tdfunc.core.errors import as_count, as_number, brief, check_choice, error

if TYPE_CHECKING:
    from transformers import GenerationConfig

# If both are given, the legacy name prevails.
_LEGACY = {"max_tokens": "max_new_tokens", "n": "num_return_sequences"}
_IDS = ("stop_token_ids", "eos_token_ids")
# The options that remove tokens.
_CUTS = ("top_k", "top_p", "min_p")
_SWITCHES = ("logprobs", "skip_special_tokens")
_NUMBERS = ("top_p", "min_p", "repetition_penalty", "length_penalty")
# The least value of each.
_COUNTS = {"max_new_tokens": 0, "min_new_tokens": 0, "num_return_sequences": 1, "num_beams": 1, "top_k": 1}
# The values at which options remove no tokens.
_OFF = {"top_p": 1, "min_p": 0}
# The names of a GenerationConfig, and ours.
_CONFIG = {"stop_strings": "stop_sequences", "eos_token_id": "eos_token_ids"}
# Entries of a GenerationConfig that concern the form of its results, which is another one here, or the way to them:
# caches, compilation and assisted decoding, which samples from the same distribution.
_IGNORED = frozenset(
    {
        "_from_model_config", "assistant_confidence_threshold", "assistant_lookbehind", "bos_token_id", "cache_config",
        "cache_implementation", "compile_config", "continuous_batching_config", "decoder_start_token_id",
        "disable_compile", "is_assistant", "low_memory", "max_cache_len", "max_matching_ngram_size",
        "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions", "output_hidden_states",
        "output_logits", "output_scores", "pad_token_id", "prefill_chunk_size", "prompt_lookup_num_tokens",
        "return_dict_in_generate", "target_lookbehind", "transformers_version", "use_cache",
    }
)  # fmt: skip
# The values at which entries of a GenerationConfig have no effect.
_WITHOUT_EFFECT: dict[str, Any] = {
    "top_k": 0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "diversity_penalty": 0.0,
    "num_beam_groups": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "min_length": 0, "renormalize_logits": False, "remove_invalid_values": False,
    "token_healing": False,
}  # fmt: skip


@dataclass(frozen=True)
class GenerationOptions:
    """The options of generation, checked; `GenerationOptions.parse` also takes the names of other programs.

    Attributes:
        max_new_tokens: The maximum number of tokens of a response; None if it was not given.
        min_new_tokens: The number of tokens before an end-of-sequence or stop token is allowed.
        num_return_sequences: The number of responses to each prompt.
        temperature: The divisor of the logits; 0 selects the most probable token.
        top_k: The number of most probable tokens that are kept, or None for all.
        top_p: The total probability of the most probable tokens that are kept, or None for all.
        min_p: The probability of kept tokens relative to the most probable token, at least; None for all.
        repetition_penalty: The divisor of the positive logits, and factor of the negative logits, of tokens of the row.
        num_beams: The number of beams of beam search; 1 for no beam search.
        length_penalty: The exponent of the length by which the score of a beam is divided.
        early_stopping: The end of a beam search: True, False or "never", as in transformers.
        stop_sequences: Texts that end a response.
        stop_token_ids: Tokens that end a response.
        eos_token_ids: The tokens that end a response in place of the model's own, or None for the model's.
        skip_special_tokens: Decode the texts of responses without special tokens.
        logprobs: Compute the log-probs of the responses.

    Raises:
        TypeError: An option is of another type.
        ValueError: An option is out of range, or two options contradict each other.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    num_return_sequences: int = 1
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop_sequences: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = False
    logprobs: bool = True

    def __post_init__(self) -> None:
        """Keep plain values, which engines and servers read, and check them."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in _plain(given).items():
            object.__setattr__(self, name, value)
        self._check()

    @property
    def samples(self) -> bool:
        """True if tokens are sampled at random."""
        return self.temperature > 0

    @property
    def cuts(self) -> bool:
        """True if top-k, top-p or min-p may remove tokens."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None

    @property
    def adjusts(self) -> bool:
        """True if a penalty, or a minimum length without truncation, changes the distribution."""
        return self.samples and (self.repetition_penalty != 1.0 or (self.min_new_tokens > 0 and not self.cuts))

    @property
    def keeps_raw(self) -> bool:
        """True if tokens are sampled from the model's own distribution, which no option changes."""
        alone = self.repetition_penalty == 1.0 and not self.min_new_tokens
        return self.temperature == 1.0 and not self.cuts and alone

    @classmethod
    def parse(
        cls, kwargs: "Mapping[str, Any] | GenerationConfig | None" = None, *, num_samples: int | None = None
    ) -> "GenerationOptions":
        """Return checked options.

        Without `do_sample`, tokens are sampled if a temperature above 0 is given. None counts as not given. The same
        rules apply to the entries of a `GenerationConfig` that are set.

        Args:
            kwargs: Options by name: the attributes of this class, `do_sample`, and the legacy names `max_tokens` and
                `n`, which prevail over `max_new_tokens` and `num_return_sequences`.
            num_samples: The number of responses to each prompt, as `num_return_sequences`.

        Raises:
            TypeError: An option is unknown; the message names it.
            ValueError: An option is out of range, or two options contradict each other.

        Examples:
            >>> GenerationOptions.parse({"max_tokens": 8, "temperature": 0.7, "top_p": 1}).top_p is None
            True
        """
        given = _given(kwargs)
        known = {field.name for field in fields(cls)} | {"do_sample"}
        unknown = sorted(set(given) - known)
        if unknown:
            raise error(
                TypeError,
                f"generate: {unknown[0]!r} is not an option.",
                expected=", ".join(sorted({*known, *_LEGACY})),
                got=", ".join(map(repr, unknown[:10])),
            )
        if num_samples is not None and given.setdefault("num_return_sequences", num_samples) != num_samples:
            raise error(
                ValueError,
                "generate: num_samples and num_return_sequences differ.",
                expected=num_samples,
                got=given["num_return_sequences"],
            )
        temperature = _temperature(given.pop("do_sample", None), given.pop("temperature", None))
        return cls(**given, temperature=temperature)

    def _check(self) -> None:
        """Raise for options out of range, and for those that contradict each other."""
        check_choice("generate: early_stopping", self.early_stopping, (True, False, "never"))
        rule = self._find_bad_value() or self._find_contradiction()
        if rule is None:
            return
        changed: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                changed.append(f"{field.name}={brief(value)}")
        raise error(ValueError, f"generate: {rule}", got=", ".join(changed))

    def _find_bad_value(self) -> str | None:
        """Return the rule that an option out of range breaks, or None."""
        # A NaN is in no range.
        if self.top_p is not None and not 0 < self.top_p <= 1:
            return "top_p must be above 0 and at most 1."
        if self.min_p is not None and not 0 < self.min_p <= 1:
            return "min_p must be above 0 and at most 1."
        if not 0 < self.repetition_penalty < math.inf:
            return "repetition_penalty must be above 0."
        if "" in self.stop_sequences:
            return "a stop sequence must not be empty."
        return None

    def _find_contradiction(self) -> str | None:
        """Return the rule that two options break together, or None."""
        if self.cuts and not self.samples:
            cut = next(name for name in _CUTS if getattr(self, name) is not None)
            return f"{cut} has no effect without sampling: temperature=1.0 or do_sample=True."
        if self.num_beams != 1 and self.samples:
            return "beams exclude sampling."
        has_beam_options = self.length_penalty != 1.0 or self.early_stopping is not False
        if has_beam_options and self.num_beams == 1:
            return "length_penalty and early_stopping have no effect without beams."
        if not self.samples and self.num_return_sequences > self.num_beams:
            return "several responses to a prompt need sampling, or as many beams."
        return None


class Response(NamedTuple):
    """A response to one prompt.

    Attributes:
        tokens: The ids (R,), including the id that ended the response; None from an engine that returns only texts.
        finish_reason: "stop" after an end-of-sequence token, a stop token or a stop sequence, else "length".
        log_probs: The log-probs of the tokens (R,), in nats; None if they were not computed.
        behaviour: The log-probs under the sampler (the behavior policy) (R,). None for greedy and beam search, and if
            an engine returns raw log-probs but sampled from another distribution.
        support: The ids that top-k, top-p or min-p kept for each token, padded with -1 (R, K). A row of -1 means that
            nothing was removed. None if no token was restricted.
        prompt_log_probs: The log-probs of the prompt (P,), of which the first is 0; None if they were not computed.
        text: The text that an engine returned, or None.
        version: The version of the weights that an engine returned, or None.
    """

    tokens: Tensor | None
    finish_reason: Literal["stop", "length"]
    log_probs: Tensor | None = None
    behaviour: Tensor | None = None
    support: Tensor | None = None
    prompt_log_probs: Tensor | None = None
    text: str | None = None
    version: str | int | None = None


def empty_response(options: GenerationOptions, *, drawn: bool, device: torch.device | None = None) -> Response:
    """Return a response without tokens; with `drawn` it has the log-probs of a sampler."""
    nothing = torch.zeros(0, device=device)
    log_probs = nothing if options.logprobs else None
    behaviour = nothing if drawn else None
    return Response(nothing.to(torch.int64), "length", log_probs, behaviour)


# Any: the values are what the caller passed.
def _given(kwargs: "Mapping[str, Any] | GenerationConfig | None") -> dict[str, Any]:
    """Return the options that are not None, under their present names."""
    options = dict(kwargs) if isinstance(kwargs, Mapping) else _of_config(kwargs)
    given = {name: value for name, value in options.items() if value is not None}
    for old, new in _LEGACY.items():
        if old in given:
            given[new] = given.pop(old)
    return given


# Any: the values are what the caller passed.
def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all options in the types of `GenerationOptions`."""
    options = dict(given)
    for name in _SWITCHES:
        # A text of a configuration is true, also "false".
        check_choice(f"generate: {name}", options[name], (True, False))
        options[name] = bool(options[name])
    options["temperature"] = _temperature(None, options["temperature"])
    options["stop_sequences"] = _texts(options["stop_sequences"])
    for name in _IDS:
        if options[name] is not None:
            options[name] = _ids(name, options[name])
    for name, least in _COUNTS.items():
        if options[name] is not None:
            options[name] = as_count(f"generate: {name}", options[name], least)
    for name in _NUMBERS:
        if options[name] is not None:
            options[name] = as_number(f"generate: {name}", options[name])
    for name, off in _OFF.items():
        if options[name] == off:
            options[name] = None
    return options


# Any: the values are what the caller passed.
def _texts(given: Any) -> tuple[str, ...]:
    """Return one stop sequence, or several."""
    if isinstance(given, str) or not isinstance(given, Collection):
        texts = (given,)
    else:
        texts = tuple(given)
    for text in texts:
        if not isinstance(text, str):
            raise error(TypeError, "generate: a stop sequence is not a text.", got=brief(text))
    return texts


# Any: the values are what the caller passed.
def _ids(name: str, given: Any) -> tuple[int, ...]:
    """Return one id, or the ids of a list, set, array or tensor."""
    if isinstance(given, (Tensor, np.ndarray, np.generic)):
        given = given.tolist()
    ids: Iterable[Any] = (given,)
    if isinstance(given, Collection) and not isinstance(given, str):
        ids = given
    return tuple([as_count(f"generate: an id of {name}", each, -1) for each in ids])


def _temperature(do_sample: bool | None, temperature: float | None) -> float:
    """Return the temperature that do_sample and temperature mean, 0 for greedy."""
    if temperature is not None and not 0 <= temperature < math.inf:
        raise error(ValueError, "generate: temperature must be finite and at least 0.", got=temperature)
    if do_sample is None:
        return float(temperature or 0.0)
    # A text of a configuration is true, also "false".
    check_choice("generate: do_sample", do_sample, (True, False))
    if not do_sample:
        if temperature:
            got = f"temperature={temperature}"
            raise error(ValueError, "generate: do_sample=False excludes a temperature above 0.", got=got)
        return 0.0
    if temperature is None:
        return 1.0
    if temperature == 0:
        got = "temperature=0"
        raise error(ValueError, "generate: do_sample=True excludes temperature 0.", got=got)
    return float(temperature)


def _of_config(config: "GenerationConfig | None") -> dict[str, Any]:
    """Return the entries of a GenerationConfig that are set, under our names.

    Raises:
        ValueError: The config limits the total length instead of the response.
    """
    if config is None:
        return {}
    entries: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        is_off = name in _WITHOUT_EFFECT and value == _WITHOUT_EFFECT[name]
        if value is not None and name not in _IGNORED and not is_off:
            entries[name] = value
    _drop_foreign(entries, vars(type(config)()))
    limit = entries.pop("max_length", None)
    if limit is not None and "max_new_tokens" not in entries:
        raise error(
            ValueError,
            "generate: the GenerationConfig has max_length, and no max_new_tokens.",
            got=f"max_length={limit}",
        )
    return {_CONFIG.get(name, name): value for name, value in entries.items()}


# Any: the values are what the caller passed.
def _drop_foreign(entries: dict[str, Any], known: Mapping[str, Any]) -> None:
    """Remove the entries that transformers has no option of, which the code of some models reads."""
    foreign = sorted(entries.keys() - known.keys())
    if not foreign:
        return
    for name in foreign:
        del entries[name]
    warnings.warn(
        f"generate: the GenerationConfig has the entries {brief(foreign)}, which are not options of transformers and "
        "are not used.",
        stacklevel=5,
    )
