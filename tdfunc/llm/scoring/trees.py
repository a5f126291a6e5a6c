"""`score`, `logits` and `distribution`: the scoring of token ids as pure functions from trees to trees.

A tree has its tokens under `tokens` and its mask under `attention_mask` or `masks`; the result has everything that the
tree had, and the new entry. The rows may be padded on any side, or be a ragged stack, and the result is laid out alike.
"""

from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Size, Tensor
from torch.distributions import Categorical
from torch.nn.utils.rnn import pad_sequence

from tdfunc.core.collection import TensorCollection
from tdfunc.core.errors import LeafMismatchError, MissingKeyError, error
from tdfunc.core.keys import dotted, unravel
from tdfunc.core.types import NestedKey, Path
from tdfunc.llm.rows.batch import nest, ragged_mask, ragged_values
from tdfunc.llm.rows.read import read_mask
from tdfunc.llm.rows.records import LogProbs
from tdfunc.llm.scoring.ids import logits_of_ids, score_ids
from tdfunc.llm.scoring.model import CausalLM
from tdfunc.ops.edit import EditMethods
from tdfunc.ops.reading import get_value

T = TypeVar("T", bound=EditMethods)
_MASKS = ("masks", "all_attention_mask")
_PARTS = ("prompt", "response", "full")


def score(
    lm: CausalLM,
    params: Any,
    td: T,
    *,
    buffers: Any = None,
    at: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    under: Literal["raw", "behaviour"] = "raw",
    packed: bool = False,
    allow_long: bool = False,
    chunk_size: int | None = None,
    rng: Any = None,
    tokens_key: NestedKey = "tokens",
    mask_key: NestedKey = "attention_mask",
    log_probs_key: NestedKey = "log_probs",
) -> T:
    """Return the tree with the log-prob of each of its tokens.

    Args:
        lm: The model, from `causal_lm`.
        params: Its parameters, or the whole tree.
        td: A tree with `Tokens`, of which `full` is scored, or `prompt` and `response`.
        buffers: The buffers of the model, unless `params` has them.
        at: Other tokens to score at each position, such as a teacher's candidates.
        temperature: A divisor of the logits, for all or for each element of the batch.
        under: With "behaviour" the result has `behaviour` too: the log-probs of the responses at this temperature, over
            the `support` of the tree's log-probs if these have one.
        packed: Let several short rows share one row of the batch, where the family can; see `plan`.
        allow_long: Score rows that are longer than the model was trained for, if it can.
        chunk_size: How many positions have logits at the same time.
        rng: A key for the dropout of `lm.train()`.
        tokens_key: The place of the tokens.
        mask_key: The place of the mask, True at tokens; without it `("masks", "all_attention_mask")`, else all are
            tokens.
        log_probs_key: The place of the result.

    Shapes:
        Tokens (*B, T) give `LogProbs` with `full` and `mask` (*B, T), and `prompt` and `response` if the tokens have
        these; with `at` (*B, T, K) the log-probs are (*B, T, K). Ragged tokens give a ragged stack.

    Raises:
        MissingKeyError: The tree has no tokens.
        LeafMismatchError: The mask has another shape than the tokens.
        ValueError: A row is longer than the model's positions; or `under` is another word.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from tdfunc.llm import Tokens, causal_lm
        >>> config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20)
        >>> lm, params, buffers = causal_lm(GPT2LMHeadModel(config))
        >>> td = TensorDict({"tokens": Tokens(full=torch.arange(6).view(2, 3), batch_size=[2])}, [2])
        >>> score(lm, params, td, buffers=buffers)["log_probs"].full.shape
        torch.Size([2, 3])
    """
    if under not in ("raw", "behaviour"):
        raise error(ValueError, "score: under must be 'raw' or 'behaviour'.", got=repr(under))
    rows = _read(td, unravel(tokens_key), unravel(mask_key), "score")
    heat = temperature.reshape(-1) if isinstance(temperature, Tensor) and temperature.dim() else temperature
    options: Any = {
        "buffers": buffers,
        "packed": packed,
        "allow_long": allow_long,
        "chunk_size": chunk_size,
        "rng": rng,
    }
    support = _read_support(td, rows, unravel(log_probs_key)) if under == "behaviour" else None
    wanted = rows.ids_BT.unsqueeze(-1) if at is None else at.reshape(len(rows.ids_BT), *at.shape[-2:])
    chosen = wanted if support is None else torch.cat([wanted, support.clamp(min=0)], -1)
    found, mask = score_ids(lm, params, rows.ids_BT, rows.mask_BT, at=chosen, temperature=heat, **options)
    full, of_support = found[..., : wanted.shape[-1]], found[..., wanted.shape[-1] :]
    full = full.squeeze(-1) if at is None else full
    behaviour = full if under == "behaviour" else None
    if support is not None:
        kept = torch.where(support >= 0, of_support, -torch.inf)
        # Where nothing was cut the sum over all tokens is 1.
        total = torch.where((support >= 0).any(-1), kept.logsumexp(-1), 0)
        behaviour = torch.where(mask, full - (total if at is None else total.unsqueeze(-1)), 0)
    return td.set(log_probs_key, _write(rows, full, mask, behaviour))


def logits(
    lm: CausalLM,
    params: Any,
    td: T,
    *,
    buffers: Any = None,
    packed: bool = False,
    allow_long: bool = False,
    rng: Any = None,
    tokens_key: NestedKey = "tokens",
    mask_key: NestedKey = "attention_mask",
    logits_key: NestedKey = "logits",
) -> T:
    """Return the tree with the logits from which each of its tokens is drawn; arguments as for `score`.

    Args:
        lm: The model.
        params: Its parameters.
        td: A tree with tokens.
        buffers: The buffers.
        packed: Let short rows share one row of the batch.
        allow_long: Run rows that are longer than the model was trained for.
        rng: A key for dropout.
        tokens_key: The place of the tokens.
        mask_key: The place of the mask.
        logits_key: The place of the result.

    Shapes:
        Tokens (*B, T) give (*B, T, V): the logits at position i are of token i; 0 at pads and at a row's first token.
        Ragged tokens give rows padded at the right.
    """
    rows = _read(td, unravel(tokens_key), unravel(mask_key), "logits")
    options = {"buffers": buffers, "packed": packed, "allow_long": allow_long, "rng": rng}
    found, _ = logits_of_ids(lm, params, rows.ids_BT, rows.mask_BT, **options)
    return td.set(logits_key, rows.shaped(found))


def distribution(
    lm: CausalLM,
    params: Any,
    td: TensorCollection,
    *,
    buffers: Any = None,
    packed: bool = False,
    allow_long: bool = False,
    rng: Any = None,
    tokens_key: NestedKey = "tokens",
    mask_key: NestedKey = "attention_mask",
) -> "MaskedCategorical":
    """Return the distribution from which each token of a tree is drawn; arguments as for `logits`.

    Args:
        lm: The model.
        params: Its parameters.
        td: A tree with tokens.
        buffers: The buffers.
        packed: Let short rows share one row of the batch.
        allow_long: Run rows that are longer than the model was trained for.
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
    rows = _read(td, unravel(tokens_key), unravel(mask_key), "distribution")
    options = {"buffers": buffers, "packed": packed, "allow_long": allow_long, "rng": rng}
    found, mask = logits_of_ids(lm, params, rows.ids_BT, rows.mask_BT, **options)
    return MaskedCategorical(rows.shaped(found), rows.shaped(mask))


class MaskedCategorical(Categorical):
    """Categorical distributions of tokens, some of which are pads: log-prob and entropy are 0 there.

    Args:
        logits: (*B, T, V).
        mask: True where a token is drawn (*B, T).
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


class _Rows(NamedTuple):
    """The tokens of a tree as rows, one for each element of its batch."""

    ids_BT: Tensor
    mask_BT: Tensor | None
    lead: Size
    # The width of the prompt of each row, if prompt and response are given; the length of each row of a ragged stack.
    prompts: list[int] | None
    lengths: list[int] | None

    def shaped(self, values: Tensor) -> Tensor:
        """Return values of the rows with the batch size of the tree."""
        return values.reshape(*self.lead, *values.shape[1:])


def _read(td: TensorCollection, tokens_path: Path, mask_path: Path, call: str) -> _Rows:
    """Return the rows of a tree's tokens.

    Raises:
        MissingKeyError: There are no tokens.
        LeafMismatchError: The mask has another shape.
    """
    tokens = get_value(td, tokens_path, None)
    if tokens is None:
        raise MissingKeyError(
            f"{call}: the tree must have tokens at {dotted(tokens_path)!r}.",
            got=f"a {type(td).__name__} without them",
            hint="Tokens(full=ids, batch_size=ids.shape[:-1]) has ids; tokens_key= names another place, as input_ids; "
            "history.apply_chat_template(tokenizer=tokenizer, return_dict=True) gives the ids of a history.",
        )
    is_record = isinstance(tokens, TensorCollection)
    places = {name: (*tokens_path, name) for name in _PARTS} if is_record else {"full": tokens_path}
    found = {name: get_value(td, place, None) for name, place in places.items()}
    # Any: tensors, or nested tuples of them.
    parts: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    known = "prompt" in parts and "response" in parts
    if "full" not in parts and not known:
        raise MissingKeyError(
            f"{call}: the tokens {dotted(tokens_path)!r} must have full, or prompt and response.",
            got="prompt alone" if "prompt" in parts else "none of them",
        )
    if not isinstance(parts["full" if "full" in parts else "prompt"], Tensor):
        ragged = {name: ragged_values(td, place) or [] for name, place in places.items()}
        lead = tokens._batch_size if is_record else td._batch_size
        return _ragged_rows(td, ragged, ragged["prompt"] if known else None, mask_path, lead=lead, call=call)
    full = parts["full"] if "full" in parts else torch.cat([parts["prompt"], parts["response"]], -1)
    lead = full.shape[:-1]
    rows = full.reshape(lead.numel(), full.shape[-1])
    mask = read_mask(td, full, (mask_path, _MASKS), call)
    prompts = [parts["prompt"].shape[-1]] * rows.shape[0] if known else None
    return _Rows(rows, None if mask is None else mask.reshape(rows.shape), lead, prompts, None)


def _ragged_rows(
    td: TensorCollection,
    parts: dict[str, list[Any]],
    prompts: list[Any] | None,
    mask_path: Path,
    *,
    lead: Size,
    call: str,
) -> _Rows:
    if -1 in lead:
        raise LeafMismatchError(
            f"{call}: only the length of the rows may be ragged.",
            expected="a batch size",
            got=f"batch size {list(lead)}",
            hint="td.reshape(-1)",
        )
    rows = parts["full"] or [torch.cat(pair) for pair in zip(parts["prompt"], parts["response"], strict=True)]
    masks = ragged_mask(td, rows, (mask_path, _MASKS), call)
    masks = [torch.ones_like(row, dtype=torch.bool) for row in rows] if masks is None else masks
    ids, mask = pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True)
    parts_of = None if prompts is None else [len(row) for row in prompts]
    return _Rows(ids, mask, lead, parts_of, [len(row) for row in rows])


def _read_support(td: TensorCollection, rows: _Rows, path: Path) -> Tensor | None:
    """Return the support of the responses at the places of the rows, (B, T, K) with -1 for nothing; None without one.

    Raises:
        MissingKeyError: The rows are not prompts and responses.
    """
    if rows.prompts is None:
        raise MissingKeyError(
            'score: under="behaviour" takes tokens that have prompt and response.', got="full, of unknown parts"
        )
    support = get_value(td, (*path, "support"), None)
    if support is None:
        return None
    dense = support.reshape(len(rows.ids_BT), *support.shape[-2:]) if isinstance(support, Tensor) else None
    parts: list[Any] = ragged_values(td, (*path, "support")) or [] if dense is None else list(dense)
    width = max([part.shape[-1] for part in parts if part is not None])
    found = rows.ids_BT.new_full((*rows.ids_BT.shape, width), -1)
    for row, (start, part) in enumerate(zip(rows.prompts, parts, strict=True)):
        # A row in which nothing was cut has none.
        if part is not None:
            found[row, start : start + part.shape[0], : part.shape[1]] = part
    return found


def _write(rows: _Rows, full: Tensor, mask: Tensor, behaviour: Tensor | None) -> Any:
    """Return log-probs of rows in the layout of the tree."""
    if rows.lengths is not None:
        found = [
            _log_probs(
                full[i, :length],
                mask[i, :length],
                None if behaviour is None else behaviour[i, :length],
                None if rows.prompts is None else rows.prompts[i],
                Size(()),
                padded=False,
            )
            for i, length in enumerate(rows.lengths)
        ]
        return nest(found, rows.lead)
    full, mask, behaviour = (
        rows.shaped(full),
        rows.shaped(mask),
        behaviour if behaviour is None else rows.shaped(behaviour),
    )
    return _log_probs(full, mask, behaviour, rows.prompts[0] if rows.prompts else None, rows.lead, padded=True)


def _log_probs(
    full: Tensor, mask: Tensor, behaviour: Tensor | None, prompt: int | None, lead: Size, *, padded: bool
) -> LogProbs:
    """Return the record of log-probs, cut into prompts and responses."""
    parts: dict[str, Any] = {"full": full, "mask": mask, "padded": padded}
    if prompt is not None:
        at = len(lead)
        parts["prompt"] = full.narrow(at, 0, prompt)
        parts["response"] = full.narrow(at, prompt, full.shape[at] - prompt)
        if behaviour is not None:
            parts["behaviour"] = behaviour.narrow(at, prompt, full.shape[at] - prompt)
    return LogProbs(**parts, batch_size=lead)
