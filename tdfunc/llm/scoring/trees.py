"""`score`, `logits` and `distribution`: the scoring of token ids as pure functions from trees to trees.

A tree has its tokens under `tokens` and its mask under `attention_mask` or `masks`. The result is the tree with a new
entry. The rows may be padded on any side, or be a ragged stack; the result has the same layout.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributions import Categorical

from tdfunc._lazystack import lazy_stack
from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import MissingKeyError, UnsupportedError, as_count, check_choice
from tdfunc.core.keys import dotted, unravel
from tdfunc.core.types import NestedKey, Path
from tdfunc.llm.rows.batch import TokenBatch, flat_list, nest
from tdfunc.llm.rows.read import TokenKeys, read_tokens
from tdfunc.llm.rows.records import LogProbs
from tdfunc.llm.scoring.head import Wanted
from tdfunc.llm.scoring.ids import logits_of_ids, score_all
from tdfunc.llm.scoring.model import CausalLM
from tdfunc.ops.base.reading import get_value
from tdfunc.ops.edits.edit import EditMethods

T = TypeVar("T", bound=EditMethods)


def score(
    lm: CausalLM,
    params: Any,
    td: T,
    *,
    buffers: Any = None,
    at: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    under: Literal["raw", "behaviour"] = "raw",
    entropy: bool = False,
    topk: int = 0,
    rng: Any = None,
    tokens_key: NestedKey = "tokens",
    mask_key: NestedKey = "attention_mask",
    log_probs_key: NestedKey = "log_probs",
) -> T:
    """Return the tree with the log-prob of each of its tokens.

    Args:
        lm: The model, from `causal_lm`; `lm.with_options` selects a way to run it.
        params: The parameters, or the complete tree.
        td: A tree with `Tokens`, of which `full` is scored, or `prompt` and `response`.
        buffers: The buffers of the model, unless `params` has them.
        at: Other tokens to score at each position, such as a teacher's candidates.
        temperature: A divisor of the logits, one number or one for each element of the batch.
        under: "behaviour" adds `behaviour` to the result: the log-probs of the responses at this temperature, over the
            `support` of the tree's log-probs if they have one. Responses that were sampled with a repetition penalty
            or with `min_new_tokens` are refused, except for `min_new_tokens` with truncation.
        entropy: Add the entropy of the distribution of each token to the result, with gradients.
        topk: The number of the likeliest tokens of each position whose ids and log-probs are added to the result, such
            as a teacher's candidates.
        rng: A key for the dropout of `lm.train()`.
        tokens_key: The place of the tokens.
        mask_key: The place of the mask, True at tokens. Without it `("masks", "all_attention_mask")` is read; without
            both all positions are tokens.
        log_probs_key: The place of the result.

    Shapes:
        Tokens (*B, T) give `LogProbs` with `full` and `mask` (*B, T), and `prompt` and `response` if the tokens have
        these; with `at` (*B, T, K) the log-probs are (*B, T, K). `entropy` is (*B, T), and `topk_log_probs` and
        `topk_ids` are (*B, T, topk). Ragged tokens give a ragged stack.

    Raises:
        MissingKeyError: The tree has no tokens; or, for "behaviour", no record of their sampling at `log_probs_key`.
        LeafMismatchError: The mask has another shape than the tokens.
        ValueError: A row is longer than the model's positions, `under` is unknown, or `topk` is negative.
        UnsupportedError: Temperature and `support` do not describe the distributions that the responses were sampled
            from.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from tdfunc.llm import Tokens, causal_lm
        >>> config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20)
        >>> lm, params, buffers = causal_lm(GPT2LMHeadModel(config))
        >>> td = TensorDict({"tokens": Tokens(full=torch.arange(6).view(2, 3), batch_size=[2])}, [2])
        >>> score(lm, params, td, buffers=buffers)["log_probs"].full.shape
        torch.Size([2, 3])
    """
    check_choice("score: under", under, ("raw", "behaviour"))
    batch = _read(td, tokens_key, mask_key, "score")
    support = None
    if under == "behaviour":
        support = _read_support(td, batch, unravel(log_probs_key))
    wanted = batch.ids.unsqueeze(-1)
    if at is not None:
        wanted = at.reshape(len(batch.ids), *at.shape[-2:])
    chosen = wanted
    if support is not None:
        chosen = torch.cat([wanted, support.clamp(min=0)], -1)
    found, mask = score_all(
        lm,
        params,
        batch.ids,
        batch.mask,
        buffers=buffers,
        at=chosen,
        temperature=temperature,
        rng=rng,
        wanted=Wanted(entropy, as_count("score: topk", topk, 0)),
    )
    full = found.log_probs[..., : wanted.shape[-1]]
    behaviour = None
    if support is not None:
        behaviour = _over_support(full, found.log_probs[..., wanted.shape[-1] :], wanted, support, mask)
    elif under == "behaviour":
        behaviour = full
    if at is None:
        full = full.squeeze(-1)
        behaviour = None if behaviour is None else behaviour.squeeze(-1)
    results = found._asdict()
    del results["log_probs"]
    others = {name: values for name, values in results.items() if values is not None}
    log_probs = batch.log_probs(full, mask, behaviour, others)
    old = get_value(td, unravel(log_probs_key), None)
    return td.set(log_probs_key, keep_draws(log_probs, old))


def _over_support(full: Tensor, of_support: Tensor, ids: Tensor, support: Tensor, mask: Tensor) -> Tensor:
    """Return the log-probs of candidates after truncation to a support: -inf outside of it, 0 where `mask` is False.

    Args:
        full: The log-probs of the candidates before it (N, T, K).
        of_support: The log-probs of the ids of the support (N, T, S).
        ids: The candidates (N, T, K).
        support: The ids that truncation kept, padded with -1 (N, T, S); only -1 where it kept all.
        mask: True where a token is scored (N, T).
    """
    kept = torch.where(support >= 0, of_support, -torch.inf)
    is_whole = (support < 0).all(-1, keepdim=True)
    is_left = is_whole | (ids.unsqueeze(-1) == support.unsqueeze(-2)).any(-1)
    # Without truncation the sum over all tokens is 1.
    total = torch.where(is_whole, 0, kept.logsumexp(-1, keepdim=True))
    values = torch.where(is_left, full - total, -torch.inf)
    return torch.where(mask.unsqueeze(-1), values, 0)


def logits(
    lm: CausalLM,
    params: Any,
    td: T,
    *,
    buffers: Any = None,
    rng: Any = None,
    tokens_key: NestedKey = "tokens",
    mask_key: NestedKey = "attention_mask",
    logits_key: NestedKey = "logits",
) -> T:
    """Return the tree with the logits from which each of its tokens is sampled; arguments as for `score`.

    Args:
        lm: The model.
        params: Its parameters.
        td: A tree with tokens.
        buffers: The buffers.
        rng: A key for dropout.
        tokens_key: The place of the tokens.
        mask_key: The place of the mask.
        logits_key: The place of the result.

    Shapes:
        Tokens (*B, T) give (*B, T, V): the logits of token i are at position i. They are 0 at pads and at a
        row's first token. Ragged tokens give rows padded at the right.
    """
    batch = _read(td, tokens_key, mask_key, "logits")
    found, _ = logits_of_ids(lm, params, batch.ids, batch.mask, buffers=buffers, rng=rng)
    return td.set(logits_key, batch.shaped(found))


def distribution(
    lm: CausalLM,
    params: Any,
    td: TensorCollection,
    *,
    buffers: Any = None,
    rng: Any = None,
    tokens_key: NestedKey = "tokens",
    mask_key: NestedKey = "attention_mask",
) -> "MaskedCategorical":
    """Return the distribution from which each token of a tree is sampled; arguments as for `logits`.

    Args:
        lm: The model.
        params: Its parameters.
        td: A tree with tokens.
        buffers: The buffers.
        rng: A key for dropout.
        tokens_key: The place of the tokens.
        mask_key: The place of the mask.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from tdfunc.llm import Tokens, causal_lm
        >>> config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20)
        >>> lm, params, buffers = causal_lm(GPT2LMHeadModel(config))
        >>> td = TensorDict({"tokens": Tokens(full=torch.arange(6).view(2, 3), batch_size=[2])}, [2])
        >>> distribution(lm, params, td, buffers=buffers).log_prob(td["tokens"].full).shape
        torch.Size([2, 3])
    """
    batch = _read(td, tokens_key, mask_key, "distribution")
    found, mask = logits_of_ids(lm, params, batch.ids, batch.mask, buffers=buffers, rng=rng)
    return MaskedCategorical(batch.shaped(found), batch.shaped(mask))


class MaskedCategorical(Categorical):
    """Categorical distributions of tokens, whose log-prob and entropy are 0 at pads.

    Args:
        logits: The logits of each position, shape (*B, T, V).
        mask: True where a token is sampled, shape (*B, T).
    """

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        super().__init__(logits=wide, validate_args=False)  # pyright: ignore[reportUnknownMemberType]
        self.mask = mask

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probs of tokens (*B, T)."""
        return torch.where(self.mask, super().log_prob(torch.where(self.mask, value, 0)), 0)

    def entropy(self) -> Tensor:
        """Return the entropies (*B, T), in nats."""
        return torch.where(self.mask, super().entropy(), 0)


# Any: log-probs, or another entry in the place of the old ones.
def keep_draws(new: Any, old: Any) -> Any:
    """Return log-probs with what describes the tokens in the old entry: `support`, `adjusted` and `version`."""
    rows = [old]
    if isinstance(old, LogProbs) and old._is_lazy:
        rows = flat_list(old, len(old._batch_size))
    if not any([_has_draws(row) for row in rows]):
        return new
    if new._is_lazy:
        pairs = zip(new.unbind(0), old.unbind(0), strict=True)
        return lazy_stack([keep_draws(new_row, old_row) for new_row, old_row in pairs])
    if old._is_lazy:
        return _keep_ragged_draws(new, rows)
    support = old.support
    if new.response is None or support is None:
        is_of_other_layout = False
    else:
        is_of_other_layout = support.shape[:-1] != new.response.shape[: support.dim() - 1]
    if not is_of_other_layout:
        return new.replace(support=support, adjusted=old.adjusted, version=old.version)
    return new.replace(adjusted=_all_adjusted(new), version=old.version)


# Any: log-probs, or another entry in their place.
def _has_draws(entry: Any) -> bool:
    """Return True for log-probs with a field that describes the sampling of the tokens."""
    if not isinstance(entry, LogProbs):
        return False
    return not (entry.support is None and entry.adjusted is None and entry.version is None)


# Any: log-probs.
def _keep_ragged_draws(new: Any, rows: list[Any]) -> Any:
    """Return padded log-probs with the versions of ragged rows, whose supports have other places."""
    version = None
    versions = [row.version for row in rows]
    if any([each is not None for each in versions]):
        version = nest(versions, new._batch_size, list)
    adjusted = None
    if any([row.support is not None or row.adjusted is not None for row in rows]):
        adjusted = _all_adjusted(new)
    return new.replace(adjusted=adjusted, version=version)


# Any: log-probs.
def _all_adjusted(log_probs: Any) -> Tensor:
    """Return the `adjusted` of log-probs that lost the support of all their responses."""
    return torch.ones(log_probs._batch_size, dtype=torch.bool, device=log_probs.full.device)


def _read(td: TensorCollection, tokens_key: NestedKey, mask_key: NestedKey, call: str) -> TokenBatch:
    return read_tokens(td, TokenKeys(tokens_key, mask_key, "masks"), "full", call)


def _read_support(td: TensorCollection, batch: TokenBatch, path: Path) -> Tensor | None:
    """Return the support of the responses at the places of the rows, (N, T, K) with -1 for nothing; None without one.

    Raises:
        MissingKeyError: The rows are not prompts and responses, or the record of their sampling is missing.
        UnsupportedError: More than a support changed the distributions.
    """
    if batch.prompt is None:
        raise MissingKeyError(
            'score: under="behaviour" needs tokens with prompt and response.', got="full, of unknown parts"
        )
    record = get_value(td, path, None)
    if record is None:
        raise MissingKeyError(
            f'score: under="behaviour" needs the record of the sampling at {dotted(path)!r}.',
            expected="the log_probs of the generation (logprobs=True)",
            hint="for sampling with only a temperature, use the `response` of score(temperature=...).",
        )
    is_ragged = isinstance(record, TensorCollection) and record._is_lazy
    rows = flat_list(record, len(record._batch_size)) if is_ragged else [record]
    records = [row for row in rows if isinstance(row, TensorCollection)]
    if any([get_value(each, "adjusted", None) is not None for each in records]):
        raise UnsupportedError(
            'score: under="behaviour" supports only temperature, top-k, top-p and min-p.',
            got="responses with a penalty or a minimum length, or of an engine that does not report its truncation",
            hint='use under="raw"; the log_probs of the generation have the `behaviour` that the engine reports.',
        )
    # By the rows: a stack lacks what one of its rows lacks.
    supports: list[Any] = [get_value(each, "support", None) for each in records]
    given = [support for support in supports if support is not None]
    if not given:
        return None
    if not is_ragged:
        (padded,) = given
        supports = list(padded.reshape(len(batch.ids), *padded.shape[-2:]))
    starts = batch.prompt if isinstance(batch.prompt, list) else [batch.prompt] * len(supports)
    return _place_supports(batch, starts, supports)


def _place_supports(batch: TokenBatch, starts: Sequence[int], supports: Sequence[Tensor | None]) -> Tensor:
    """Return the supports of responses (R, K) at their places in the rows (N, T, K), -1 elsewhere."""
    width = max([support.shape[-1] for support in supports if support is not None])
    found = batch.ids.new_full((*batch.ids.shape, width), -1)
    for row, (start, support) in enumerate(zip(starts, supports, strict=True)):
        # A row without truncation has none.
        if support is not None:
            found[row, start : start + support.shape[0], : support.shape[1]] = support
    return found
