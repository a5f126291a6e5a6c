"""`RemoteWrapper`: a language model behind an OpenAI-compatible server.

Requests and answers contain token ids. The server never encodes a text, so that control strings in it stay text. The
endpoint is vLLM's `/inference/v1/generate` if the server has it, otherwise `/v1/completions`.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from tdfunc.core.errors import RemoteError, UnsupportedError, brief
from tdfunc.llm.generation.options import GenerationOptions, Response
from tdfunc.llm.scoring.model import CausalLM
from tdfunc.llm.wrappers.base import LLMWrapperBase
from tdfunc.llm.wrappers.push import (
    CANDIDATES,
    PROMPT,
    AbstractEngine,
    Probe,
    Push,
    proven_label,
    push_tree,
    send_by_folder,
)
from tdfunc.llm.wrappers.sampling import nothing_drawn, sampling_options, seeds_of
from tdfunc.llm.wrappers.server import Server, ServerOptions
from tdfunc.random.draws import KeyLike

T = TypeVar("T")
_IDS = "/inference/v1/generate"
_COMPLETIONS = "/v1/completions"
# The answers to the first by servers that do not have it; vLLM's is 403, without `--enable-scale-out`.
_ABSENT = (403, 404, 405, 501)
# The second gives ids, and names the ids of log-probs, on request.
_WITH_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
# The value of servers for a log-prob of minus infinity, which JSON does not have.
_LOWEST = -9999.0
# The ends of a response; together.ai and text-generation-inference tell an end-of-sequence token from a stop sequence.
_ENDS: dict[Any, Literal["stop", "length"]] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
}
# A log-prob may be above 0 by rounding, in nats.
_ROUNDING = 1e-4


class RemoteEngine(AbstractEngine):
    """The engine of vLLM behind a server, which reads weights from a folder that it shares with this process."""

    def __init__(self, wrapper: "RemoteWrapper", folder: "str | os.PathLike[str]", vocabulary: int) -> None:
        self.wrapper = wrapper
        self.folder: str = os.path.abspath(folder)
        self.vocabulary = vocabulary

    # Any: JSON.
    def _ask(self, path: str, body: dict[str, Any] | None, read: Callable[[Any], T]) -> T:
        try:
            return self.wrapper._server.request(path, body, lambda answers: read(answers[0]), where="push")
        except RemoteError as err:
            if err.status not in _ABSENT:
                raise
            raise UnsupportedError(
                "push: the server does not have vLLM's endpoints for weights.",
                expected=path,
                got=str(err),
                hint="VLLM_SERVER_DEV_MODE=1 vllm serve ..., where nobody else reaches it.",
            ) from err

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the weights with a new folder."""

        def reload(place: str) -> int:
            call = {"method": "reload_weights", "kwargs": {"weights_path": place}}
            # Any list is an answer.
            return self._ask("/collective_rpc", call, len)

        send_by_folder(weights, self.folder, reload)

    def reset_cache(self) -> bool:
        """Drop cached prefixes."""
        return self._ask("/reset_prefix_cache", {}, lambda answer: answer["success"] is True)

    def label(self) -> str:
        """Return the server's weight version."""
        return self._ask("/weight_info", None, lambda answer: str(answer["weight_version"]))

    def set_label(self, label: str) -> None:
        """Set the server's weight version."""
        self._ask("/update_weight_version", {"new_version": label}, lambda _: None)
        self.wrapper._engine = self

    def limits(self) -> tuple[int, int]:
        """Return the number of ids, and the length of a prompt of more than a block of the cache."""
        name = self.wrapper.model

        # Any: JSON.
        def read(answer: Any) -> int:
            lengths = {each["id"]: each["max_model_len"] for each in answer["data"]}
            return lengths[name]

        longest = self._ask("/v1/models", None, read)
        return self.vocabulary, min(longest - 1, PROMPT)

    def probe(self, ids: Tensor) -> Probe:
        """Score a prompt: its tokens without the cache, the next token with the cache."""
        row = ids.tolist()
        sampling = sampling_options("push", GenerationOptions.parse({"max_new_tokens": 1}))
        body = {"model": self.wrapper.model, "prompt": row, **_WITH_IDS, **sampling, "logprobs": CANDIDATES}

        # Any: JSON.
        def read(answer: Any) -> dict[int, float]:
            (found,) = answer["choices"][0]["logprobs"]["top_logprobs"]
            return {int(name.removeprefix("token_id:")): value for name, value in found.items()}

        scored = self.wrapper._request_scores(0, row)
        found = self._ask(_COMPLETIONS, body, read)
        return Probe(scored, torch.tensor(list(found)), torch.tensor(list(found.values()), dtype=torch.float32))


class RemoteWrapper(LLMWrapperBase):
    """A language model behind an OpenAI-compatible server as a module of trees.

    Each response and each scored row is a separate request. All sampling options are sent, and the server's defaults
    have no effect. Each response has its own seed, made from its key.

    Log-probs are the server's; vLLM returns raw log-probs by default. `behaviour` equals them at temperature 1 without
    truncation and penalties; otherwise it is None. A server without token ids returns only texts: tokens, masks and
    log-probs are None, and scoring is not supported.

    Args:
        model: The name of the model on the server.
        base_url: The address of the server, with or without `/v1`.
        api_key: The key, sent as a bearer token.
        timeout_s: The longest time without data from the server, in seconds. Without `stream` this is the time of a
            complete response, otherwise the time of the next token.
        max_retries: The number of repetitions of a request after a failed connection, or after the status 408, 429 or
            5xx except 501.
        backoff_s: The scale of the random time between attempts, in seconds, which doubles with each attempt. A time
            from the server takes precedence. If it is longer than a minute, the request is not repeated.
        max_concurrency: The number of requests that are open at the same time, for all threads together.
        stream: Receive responses token by token. An incomplete stream is an error.
        **options: The options of `LLMWrapperBase`.

    Raises:
        ValueError: An option has an invalid value, or two options contradict each other.
        TypeError: An option is unknown.
        UnsupportedError: httpx2 or tenacity is not installed.

    Examples:
        >>> from tdfunc.llm import RemoteWrapper
        >>> wrapper = RemoteWrapper("qwen", base_url="http://localhost:8000", input_mode="tokens")
        >>> wrapper.model
        'qwen'
    """

    model: str

    def __init__(
        self,
        model: str,
        *,
        base_url: str,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 5,
        backoff_s: float = 0.5,
        max_concurrency: int = 64,
        stream: bool = False,
        # Any: the options of `LLMWrapperBase`.
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self._server = Server(ServerOptions(base_url, api_key, timeout_s, max_retries, backoff_s, max_concurrency))
        self._stream = stream
        # Found by the first request.
        self._endpoint: str | None = None
        # Set by the first push, whose label is read from then on.
        self._engine: RemoteEngine | None = None

    # Any: a tree of parameters, and one of buffers.
    def push(
        self,
        tree: Any,
        *,
        lm: CausalLM,
        version: str | int,
        folder: "str | os.PathLike[str]",
        buffers: Any = None,
        tolerance: float = 1e-3,
        proof: Literal["prompt", "full"] = "prompt",
        key: KeyLike | None = None,
    ) -> Push:
        """Replace the weights of a vLLM server with a tree, and verify the push as `vLLMWrapper.push` does.

        The server needs `VLLM_SERVER_DEV_MODE=1`. It reads the weights from a new folder, which `tdfunc.save` writes.
        After the server has read the folder, its checksums are verified again, and it is removed. If the server dies,
        `push` raises an error, and the tree does not change.

        Until the verification has passed, the server's label marks the weights as unproven. This wrapper then generates
        nothing, and another `RemoteWrapper` raises an error for responses from `/inference/v1/generate`. Do not
        generate during a push.

        Args:
            tree: The parameters of the model, from `causal_lm` or `from_module`.
            lm: The model, from `causal_lm`.
            version: The label of the server's further responses.
            folder: A folder on a file system that the server's machine has under the same path.
            buffers: The buffers of the model, from `causal_lm`, unless the tree has them.
            tolerance: As for `vLLMWrapper.push`.
            proof: As for `vLLMWrapper.push`.
            key: As for `vLLMWrapper.push`.

        Raises:
            RemoteError: The server could not be reached, or refused the weights.
            UnsupportedError: The server does not have the endpoints.
            CorruptCheckpointError: The file changed after it was written.
            TreeStructureError: Names or shapes differ from `lm`; nothing was sent.
            ValueError: The server and the tree have different log-probs. The server generates nothing until a push
                succeeds.
            ConcurrencyError: The server kept its cache. It also generates nothing until a push succeeds.
        """
        module: Any = lm.apply.module
        engine = RemoteEngine(self, folder, len(module.get_input_embeddings().weight))
        label = str(version)
        return push_tree(engine, lm, tree, buffers, version=label, tolerance=tolerance, proof=proof, key=key)

    def generate_tokens(
        self,
        prompts: Sequence[Tensor],
        options: GenerationOptions,
        *,
        keys: Tensor | None = None,
        prompt_log_probs: bool = False,
    ) -> list[Response]:
        """Return the responses of the server, as `AbstractBackend` describes.

        Raises:
            RemoteError: The server could not be reached, refused a request, or returned an incomplete response.
            UnsupportedError: The options contain beams or `top_p` with `min_p`, or a server without token ids cannot
                score the prompts.
            ValueError: `max_new_tokens` is missing.
        """
        # Options that cannot be served raise before anything is sent.
        sampling_options("RemoteWrapper", options)
        self._check_proven()
        count = options.num_return_sequences
        rows = [row.tolist() for row in prompts for _ in range(count)]
        if options.max_new_tokens == 0:
            found = [nothing_drawn(options)] * len(rows)
        else:
            seeds = [None] * len(rows) if keys is None else seeds_of(keys)
            jobs = list(zip(range(len(rows)), rows, seeds, strict=True))
            found = self._server.each(lambda job: self._request_response(*job, options), jobs)
        if not (prompt_log_probs and options.logprobs):
            return found
        scores = [score for score in self.score_tokens(prompts) for _ in range(count)]
        return [each._replace(prompt_log_probs=score) for each, score in zip(found, scores, strict=True)]

    # Any: a random key or a seed, of which nothing is drawn.
    def score_tokens(self, rows: Sequence[Tensor], *, training: bool = False, rng: Any = None) -> list[Tensor]:
        """Return the log-probs of rows, as `AbstractBackend` describes.

        Raises:
            RemoteError: The server could not be reached, or refused a request.
            UnsupportedError: The server returns no token ids, or `training` is set.
        """
        if training:
            raise UnsupportedError("RemoteWrapper: a server has no dropout.", got="training=True")
        self._check_proven()
        jobs = [(i, row.tolist()) for i, row in enumerate(rows)]
        return self._server.each(lambda job: self._request_scores(*job), jobs)

    def _check_proven(self) -> None:
        if self._engine is not None:
            proven_label(self._engine.label())

    def _request_response(self, index: int, ids: list[int], seed: int | None, options: GenerationOptions) -> Response:
        """Return the response to one prompt, from the endpoint that the server has."""
        where = f"RemoteWrapper: response {index}"
        sampling = sampling_options("RemoteWrapper", options)
        tokens = options.max_new_tokens or 0
        if seed is not None:
            sampling["seed"] = seed

        def read(chunks: list[Any]) -> Response:
            return _read(chunks, ids, options, where)

        if self._endpoint != _COMPLETIONS:
            body = {"model": self.model, "token_ids": ids, "sampling_params": sampling}
            try:
                found = self._server.request(_IDS, body, read, where=where, stream=self._stream, tokens=tokens)
            except RemoteError as err:
                # A server that has the endpoint has it for every request.
                if err.status not in _ABSENT or self._endpoint == _IDS:
                    raise
            else:
                self._endpoint = _IDS
                return found
        body = {"model": self.model, "prompt": ids, **_WITH_IDS, **sampling}
        found = self._server.request(_COMPLETIONS, body, read, where=where, stream=self._stream, tokens=tokens)
        self._endpoint = _COMPLETIONS
        return found

    def _request_scores(self, index: int, ids: list[int]) -> Tensor:
        """Return the log-probs of one row."""
        if len(ids) < 2:
            return torch.zeros(len(ids), dtype=torch.float32)
        where = f"RemoteWrapper: row {index}"
        body = {"model": self.model, "prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 0, **_WITH_IDS}
        # The sampling options matter to servers that return log-probs after temperature and truncation.
        body |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}

        def read(chunks: list[Any]) -> Tensor | None:
            choices = _choices(chunks)
            if not _check_prompt(choices, ids):
                return None
            # A server may generate although no token is requested. The first token has no log-prob.
            rest = _labelled(choices)[1 : len(ids)]
            return _log_probs([_Labelled(0.0, None), *rest], ids)

        found = self._server.request(_COMPLETIONS, body, read, where=where)
        if found is None:
            raise UnsupportedError(
                f"{where}: only a server that returns token ids can score.", hint="use vLLM's server."
            )
        return found


# Any: JSON.
def _read(chunks: list[Any], ids: list[int], options: GenerationOptions, where: str) -> Response:
    """Return the response in an answer, which has one object or the objects of a stream.

    Raises:
        RemoteError: The response has no end, or was aborted.
    """
    choices = _choices(chunks)
    reason = _finish_reason(choices, where)
    _check_prompt(choices, ids)
    text = _text(choices)
    tokens = _tokens(choices)
    if tokens is None:
        if text is None:
            raise ValueError("neither token ids nor a text")
        return Response(None, reason, text=text)
    _check_tokens(tokens, options.max_new_tokens or 0)
    version = _version(choices)
    log_probs = None
    if options.logprobs:
        log_probs = _log_probs(_labelled(choices), tokens)
    return Response(
        torch.tensor(tokens, dtype=torch.int64),
        reason,
        log_probs,
        behaviour=log_probs if options.keeps_raw else None,
        text=text,
        version=version,
    )


# Any: JSON.
def _finish_reason(choices: list[Any], where: str) -> Literal["stop", "length"]:
    """Return the end of a response.

    Raises:
        RemoteError: The response has no end, or was aborted.
    """
    reason = next((choice["finish_reason"] for choice in choices if choice.get("finish_reason")), None)
    if reason in _ENDS:
        return _ENDS[reason]
    raise RemoteError(
        f"{where}: the response is not complete.",
        expected="finish_reason 'stop' or 'length'",
        got="none, because the stream ended early" if reason is None else repr(reason),
    )


# Any: JSON.
def _text(choices: list[Any]) -> str | None:
    """Return the text of a response, or None without one."""
    texts = [choice["text"] for choice in choices if choice.get("text") is not None]
    return "".join(texts) if texts else None


# Any: JSON.
def _tokens(choices: list[Any]) -> list[Any] | None:
    """Return the token ids of a response; None if the server returns none.

    Raises:
        ValueError: Only some parts of a stream have ids.
    """
    parts = [choice.get("token_ids") for choice in choices]
    if all([part is None for part in parts]):
        return None
    if None in parts:
        raise ValueError("token ids of only a part of the response")
    return [token for part in parts for token in part]


# Any: JSON.
def _check_tokens(tokens: list[Any], limit: int) -> None:
    """Raise unless tokens are ids, and not more than were asked for.

    Raises:
        ValueError: The message has the first wrong token, or the numbers.
    """
    for token in tokens:
        # A bool is an int of Python.
        if type(token) is not int or token < 0:
            raise ValueError(f"{brief(token)} as a token")
    if len(tokens) > limit:
        raise ValueError(f"{len(tokens)} tokens of {limit}")


# Any: JSON.
def _version(choices: list[Any]) -> str | None:
    """Return the versions of the weights that sampled a response, joined by "+"; None if the server returns none.

    Raises:
        ConcurrencyError: A part of the response was sampled from weights whose push has not ended, or failed.
    """
    labels: list[str] = []
    for choice in choices:
        for span in choice.get("weight_versions") or ():
            labels.append(str(span["version"]))
    for label in labels:
        proven_label(label)
    return "+".join(dict.fromkeys(labels)) or None


def _choices(chunks: list[Any]) -> list[Any]:
    """Return the choices of an answer, the parts of one response.

    Raises:
        ValueError: They belong to several responses.
    """
    found = [choice for chunk in chunks for choice in chunk["choices"]]
    has_index = any([choice.get("index", 0) for choice in found])
    has_several = any([len(chunk["choices"]) > 1 for chunk in chunks])
    if has_index or has_several:
        raise ValueError("several responses in place of one")
    return found


class _Labelled(NamedTuple):
    """A log-prob, and the id of its token if the server returns it."""

    log_prob: float
    token: int | None


# Any: JSON.
def _labelled(choices: list[Any]) -> list[_Labelled]:
    """Return the log-probs of the tokens, in the form of either endpoint.

    Raises:
        ValueError: The numbers of names and log-probs differ.
    """
    found: list[_Labelled] = []
    for choice in choices:
        part = choice.get("logprobs") or {}
        values = part.get("token_logprobs")
        if values:
            names = part.get("tokens") or [None] * len(values)
            found += [_Labelled(value, _id_of(name)) for value, name in zip(values, names, strict=True)]
            continue
        for entry in part.get("content") or ():
            name = entry.get("token_id", entry.get("token"))
            found.append(_Labelled(entry["logprob"], _id_of(name)))
    return found


# Any: JSON.
def _id_of(name: Any) -> int | None:
    """Return the id that a name of a token has; None for its text."""
    if isinstance(name, str):
        if name.startswith("token_id:"):
            return int(name.removeprefix("token_id:"))
        return None
    return name


def _log_probs(labelled: list[_Labelled], tokens: list[int]) -> Tensor:
    """Return the log-probs of tokens.

    Raises:
        ValueError: Their number or their tokens differ, or a value is not a log-prob.
    """
    values = [each.log_prob for each in labelled]
    for value in values:
        # A list of one number would make a tensor of another shape.
        if type(value) not in (int, float):
            raise ValueError(f"{str(value)[:80]!r} as a log-prob")
    found = torch.tensor(values, dtype=torch.float32)
    if len(values) != len(tokens) or not bool((found <= _ROUNDING).all()):
        largest = max(found.tolist(), default=0)
        raise ValueError(f"{len(values)} log-probs of {len(tokens)} tokens, the largest {largest}")
    for each, token in zip(labelled, tokens, strict=True):
        if each.token not in (None, token):
            raise ValueError(f"a log-prob of token {each.token} in the place of {token}")
    return found.masked_fill(found <= _LOWEST, -math.inf)


def _check_prompt(choices: list[Any], ids: list[int]) -> bool:
    """Return True where an answer repeats the prompt's ids.

    Raises:
        ValueError: The ids differ, because the server truncated the prompt or added tokens.
    """
    found = next((choice["prompt_token_ids"] for choice in choices if choice.get("prompt_token_ids")), None)
    if found is not None and found != ids:
        raise ValueError(f"a prompt of {len(found)} tokens, which are not the {len(ids)} that were sent")
    return found is not None
