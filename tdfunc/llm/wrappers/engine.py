"""`vLLMWrapper`: vLLM's engine as a backend, and pushes of trees into it."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tdfunc.core.errors import ConcurrencyError, UnsupportedError
from tdfunc.llm.generation.options import GenerationOptions, Response
from tdfunc.llm.scoring.model import CausalLM, causal_lm
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
from tdfunc.random.draws import KeyLike


class Engine(AbstractEngine):
    """An `LLM` of vLLM, in this process or with workers."""

    # Any: vLLM is optional.
    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._engine = llm.llm_engine

    @property
    def _in_process(self) -> bool:
        return type(self._engine.engine_core).__name__ == "InprocClient"

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the weights: tensors are handed over in process, and in a folder to workers."""
        if self._in_process:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            return
        reload = partial(self.llm.collective_rpc, "reload_weights")
        send_by_folder(weights, None, lambda folder: reload(kwargs={"weights_path": folder}))

    def reset_cache(self) -> bool:
        """Drop cached prefixes."""
        return bool(self.llm.reset_prefix_cache())

    def label(self) -> str:
        """Return the engine's weight version."""
        return self.llm.get_weight_version()

    def set_label(self, label: str) -> None:
        """Set the engine's weight version."""
        self.llm.update_weight_version(label)

    def probe(self, ids: Tensor) -> Probe:
        """Score a prompt: its tokens without the cache, the next token with the cache."""
        (scored,) = self.run([ids], [{"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}])
        (cached,) = self.run([ids], [{"max_tokens": 1, "temperature": 0.0, "logprobs": CANDIDATES}])
        found = {token: each.logprob for token, each in cached.outputs[0].logprobs[0].items()}
        return Probe(_prompt_log_probs(scored), torch.tensor(list(found)), _float32(found.values()))

    def limits(self) -> tuple[int, int]:
        """Return the number of ids, and the length of a prompt of more than a block where the engine allows it."""
        config = self._engine.vllm_config
        length = max(PROMPT, config.cache_config.block_size + 8)
        return config.model_config.get_vocab_size(), min(config.model_config.max_model_len - 1, length)

    def run(self, prompts: Sequence[Tensor], params: list[dict[str, Any]]) -> list[Any]:
        """Return the outputs of requests, in order."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        rows = [{"prompt_token_ids": row.tolist()} for row in prompts]
        # The wrapper decodes ids; the engine decodes them only to find stop sequences.
        # Any: vLLM is optional.
        made: list[Any] = [SamplingParams(detokenize=bool(each.get("stop")), **each) for each in params]
        return self.llm.generate(rows, made, use_tqdm=False)


# The name that users of torchrl know.
class vLLMWrapper(LLMWrapperBase):  # noqa: N801
    """vLLM's engine as a module of trees.

    The engine samples with its own generator. Each response has its own seed, made from its key. Log-probs are vLLM's
    raw log-probs. `behaviour` equals them at temperature 1 without truncation and penalties; otherwise it is None. vLLM
    in process replaces `torch.set_num_threads` and starts torch.distributed.

    Args:
        model: A `vllm.LLM` with `logprobs_mode="raw_logprobs"`, the default of vLLM.
        **options: The options of `LLMWrapperBase`; `pad_model_input` has no effect.

    Raises:
        UnsupportedError: The engine returns processed log-probs.
        TypeError: An option is unknown.
        ValueError: An option has an invalid value, or two options contradict each other.

    Source:
        `torchrl.modules.llm.vLLMWrapper`.
    """

    # Any: a `vllm.LLM`.
    def _set_model(self, model: Any) -> None:
        engine = Engine(model)
        mode = engine.llm.llm_engine.vllm_config.model_config.logprobs_mode
        if mode != "raw_logprobs":
            raise UnsupportedError(
                "vLLMWrapper: the engine does not return raw log-probs.",
                expected="logprobs_mode='raw_logprobs'",
                got=mode,
            )
        super()._set_model(model)
        self.engine = engine
        # The model of transformers that the engine runs, made when a push first needs it.
        self._own: tuple[CausalLM, Any] | None = None

    @property
    def version(self) -> str:
        """The version of the engine's weights."""
        return proven_label(self.engine.label())

    # Any: a tree of parameters, and one of buffers.
    def push(
        self,
        tree: Any,
        *,
        version: str | int,
        buffers: Any = None,
        tolerance: float = 1e-3,
        proof: Literal["prompt", "full"] = "prompt",
        key: KeyLike | None = None,
    ) -> Push:
        """Replace the engine's weights with a tree, and verify the push: engine and tree score prompts.

        A passed verification means that engine and tree agree on the weights that its prompts read. By default it is
        one prompt of 256 random ids, with new ids for each push. It notices a wrong layer at once, and a stale
        embedding or row of the head when a prompt has the id. `proof="full"` scores every id once. No verification
        notices these errors:

        - differences below `tolerance`;
        - errors in experts that no token was routed to, which `unread` of a full verification names;
        - errors that only longer prompts show.

        Args:
            tree: The parameters of the same model in transformers, from `causal_lm` or `from_module`.
            version: The label of all further responses.
            buffers: The buffers of the model, if they differ from the buffers of its configuration.
            tolerance: The largest difference of a log-prob between engine and tree, in nats.
            proof: "prompt" scores one prompt; "full" scores every id, and computes gradients of the tree.
            key: The random key of the ids; None for a new key from the operating system.

        Raises:
            TreeStructureError: Names or shapes differ; nothing was sent.
            ValueError: The engine and the tree have different log-probs. The engine generates nothing until a push
                succeeds.
            ConcurrencyError: The engine did not read all leaves, or kept its cache. It also generates nothing until a
                push succeeds.
        """
        lm, own_buffers = self._model()
        buffers = own_buffers if buffers is None else buffers
        label = str(version)
        return push_tree(self.engine, lm, tree, buffers, version=label, tolerance=tolerance, proof=proof, key=key)

    # Any: a tree of buffers.
    def _model(self) -> tuple[CausalLM, Any]:
        """Return the engine's model as a `CausalLM`, and its buffers."""
        if self._own is None:
            from transformers import AutoModelForCausalLM

            config = self.engine.llm.llm_engine.vllm_config.model_config.hf_config
            # transformers 5.23 draws the first weights, which nothing uses, from torch's default generator.
            with torch.random.fork_rng(devices=[]):
                model = AutoModelForCausalLM.from_config(config)
            lm, _, buffers = causal_lm(model, copy=False)
            self._own = lm, buffers
        return self._own

    # -- the two calls of a backend -------------------------------------------------------------------------------

    def generate_tokens(
        self,
        prompts: Sequence[Tensor],
        options: GenerationOptions,
        *,
        keys: Tensor | None = None,
        prompt_log_probs: bool = False,
    ) -> list[Response]:
        """Return the engine's responses, as `AbstractBackend` describes.

        Raises:
            ConcurrencyError: A push has not ended, or failed.
            UnsupportedError: The options contain beams, or `top_p` with `min_p`.
            ValueError: `max_new_tokens` is missing.
        """
        version = self.version
        params = sampling_options("vLLMWrapper", options)
        rows = [prompt for prompt in prompts for _ in range(options.num_return_sequences)]
        if options.max_new_tokens == 0:
            scores: Sequence[Tensor | None] = [None] * len(rows)
            if prompt_log_probs:
                scores = self.score_tokens(rows)
            nothing = nothing_drawn(options)._replace(version=version)
            return [nothing._replace(prompt_log_probs=score) for score in scores]
        if prompt_log_probs:
            params["prompt_logprobs"] = 0
        seeds = [None] * len(rows) if keys is None else seeds_of(keys)
        made = self.engine.run(rows, [{**params, "seed": seed} for seed in seeds])
        return [_response(out, options, row.device) for row, out in zip(rows, made, strict=True)]

    # Any: for backends that draw.
    def score_tokens(self, rows: Sequence[Tensor], *, training: bool = False, rng: Any = None) -> list[Tensor]:
        """Return the engine's log-probs, as `AbstractBackend` describes.

        Raises:
            ConcurrencyError: A push has not ended, or failed.
            UnsupportedError: `training` is set, but an engine has no dropout.
        """
        _ = self.version
        if training:
            raise UnsupportedError("vLLMWrapper: the engine has no dropout.", got="training=True")
        filled = [i for i, row in enumerate(rows) if len(row)]
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        made = []
        if filled:
            made = self.engine.run([rows[i] for i in filled], [params] * len(filled))
        found = [_float32([]) for _ in rows]
        for i, out in zip(filled, made, strict=True):
            found[i] = _prompt_log_probs(out)
        return [each.to(row.device) for each, row in zip(found, rows, strict=True)]


# Any: outputs of vLLM.
def _response(out: Any, options: GenerationOptions, device: torch.device) -> Response:
    (made,) = out.outputs
    if made.finish_reason not in ("stop", "length"):
        raise ConcurrencyError("vLLMWrapper: the engine did not complete a response.", got=made.finish_reason)
    log_probs = None
    if made.logprobs is not None:
        pairs = zip(made.token_ids, made.logprobs, strict=True)
        log_probs = _float32([each[token].logprob for token, each in pairs]).to(device)
    prompt_log_probs = None
    if out.prompt_logprobs is not None:
        prompt_log_probs = _prompt_log_probs(out).to(device)
    version = None
    if made.weight_versions:
        version = made.weight_versions[-1].version
    return Response(
        torch.tensor(made.token_ids, dtype=torch.int64, device=device),
        made.finish_reason,
        log_probs,
        behaviour=log_probs if options.keeps_raw else None,
        prompt_log_probs=prompt_log_probs,
        version=version,
    )


def _prompt_log_probs(out: Any) -> Tensor:
    """Return the log-probs of a prompt's tokens, 0 for the first."""
    pairs = zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)
    return _float32([0.0, *[each[token].logprob for token, each in pairs]])


def _float32(log_probs: Iterable[float]) -> Tensor:
    """Return log-probs of Python in float32; 16 bits, if they are torch's default, would round them."""
    return torch.tensor(list(log_probs), dtype=torch.float32)
