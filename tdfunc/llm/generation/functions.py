"""`generate`: responses to the prompts of a tree, as a pure function from trees to trees."""

from typing import Any, TypeVar

import torch
from torch import Size, Tensor

from tdfunc.core.errors import error
from tdfunc.core.types import NestedKey
from tdfunc.llm.generation.options import GenerationOptions
from tdfunc.llm.generation.rows import generate_tokens, joined_rows
from tdfunc.llm.rows.batch import Records, Row, TokenBatch, check_prompts, padded_records, ragged_records
from tdfunc.llm.rows.read import TokenKeys, check_batch, read_tokens
from tdfunc.llm.scoring.model import CausalLM
from tdfunc.ops.edits.edit import EditMethods
from tdfunc.random import fold_in, key_of

T = TypeVar("T", bound=EditMethods)


def generate(
    lm: CausalLM,
    params: Any,
    td: T,
    *,
    key: Tensor | int | None = None,
    buffers: Any = None,
    options: GenerationOptions | None = None,
    # Any: a tokenizer of transformers.
    tokenizer: Any = None,
    prompt_log_probs: bool = False,
    pad_output: bool | None = None,
    progress: bool = False,
    tokens_key: NestedKey = "tokens",
    mask_key: NestedKey = "attention_mask",
    masks_key: NestedKey = "masks",
    log_probs_key: NestedKey = "log_probs",
    # Any: each option has its own type.
    **generate_kwargs: Any,
) -> T:
    """Return the tree with responses to its prompts, their masks and their log-probs.

    Response i of the batch is sampled with `fold_in(key, i)`. It depends only on this key and on its prompt. The
    log-probs are the model's; `behaviour` and `support` describe the distribution that was sampled from.

    Args:
        lm: The model, from `causal_lm`.
        params: The parameters, or the complete tree.
        td: A tree with `Tokens`, of which `prompt` is read, padded on any side or ragged.
        key: The random key of sampling, or a seed.
        buffers: The buffers of the model, unless `params` has them.
        options: Checked options, instead of `generate_kwargs`.
        tokenizer: The tokenizer that decodes responses to find stop sequences.
        prompt_log_probs: Also score the prompts.
        pad_output: Return rows of one length, with prompts padded at the left and responses at the right; otherwise a
            ragged stack. The default is the layout of the prompts.
        progress: Show a progress bar of the tokens that are generated for each row. Requires tqdm.
        tokens_key: The place of the tokens, of the prompts and of the result.
        mask_key: The place of the mask of the prompts, True at tokens. Without it the mask at `masks_key` is read;
            without both all positions are tokens.
        masks_key: The place of the masks of the result.
        log_probs_key: The place of the log-probs.
        **generate_kwargs: The options of `GenerationOptions.parse`, for example `max_new_tokens=32, temperature=0.7`.

    Shapes:
        Prompts (*B, P) give tokens with `prompt` (*B, P), `response` (*B, R) and `full` (*B, P + R). Several responses
        to a prompt give (*B, N, ...), to which the tree's own entries are expanded.

    Raises:
        MissingKeyError: The tree has no prompts.
        LeafMismatchError: The mask has another shape than the prompts.
        TypeError: An option is unknown.
        ImportError: `progress` is True and tqdm is not installed.
        ValueError: A prompt is empty or too long, options are out of range or contradict each other, or sampling has no
            key.
        UnsupportedError: The call is inside a transform.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from tdfunc.llm import Tokens, causal_lm
        >>> config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20)
        >>> lm, params, buffers = causal_lm(GPT2LMHeadModel(config))
        >>> td = TensorDict({"tokens": Tokens(prompt=torch.arange(6).view(2, 3), batch_size=[2])}, [2])
        >>> out = generate(lm, params, td, key=0, buffers=buffers, max_new_tokens=4, temperature=1.0)
        >>> out["tokens"].full.shape, out["log_probs"].response.shape
        (torch.Size([2, 7]), torch.Size([2, 4]))
    """
    if options is None:
        options = GenerationOptions.parse(generate_kwargs)
    elif generate_kwargs:
        given = ", ".join(map(repr, ["options", *generate_kwargs]))
        raise error(TypeError, "generate: options= excludes further options.", got=given)
    lead = td._batch_size
    count = options.num_return_sequences
    batch = read_tokens(td, TokenKeys(tokens_key, mask_key, masks_key), "prompt", "generate")
    check_batch(batch, td, tokens_key, "generate")
    prompts = batch.rows()
    check_prompts(prompts, lead)
    keys = None
    if key is not None:
        keys = fold_in(key_of(key), torch.arange(len(prompts) * count))
    responses = generate_tokens(
        lm,
        params,
        [row.ids for row in prompts],
        options,
        keys=keys,
        buffers=buffers,
        tokenizer=tokenizer,
        prompt_log_probs=prompt_log_probs,
        progress=progress,
    )
    rows = joined_rows([row for row in prompts for _ in range(count)], responses, options, batch.ids.device)
    # Any: it has the methods of a class in a higher layer.
    out: Any = td
    if count > 1:
        out = out.unsqueeze(len(lead)).expand(*lead, count)
        lead = Size((*lead, count))
    records = _records_of(rows, lead, batch, pad_output)
    for place, value in zip((tokens_key, masks_key, log_probs_key), records, strict=True):
        # The log-probs of an earlier call are of other tokens.
        if value is None:
            out = out.exclude(place)
        else:
            out = out.set(place, value)
    return out


def _records_of(rows: list[Row], lead: Size, batch: TokenBatch, pad_output: bool | None) -> Records:
    """Return the records of prompts and responses, by default in the layout of the prompts."""
    is_padded = batch.lengths is None
    if pad_output is None:
        pad_output = is_padded
    if rows and not pad_output:
        return ragged_records(rows, lead, None)
    # As wide as the given prompts, whose masks stay in the tree.
    least = batch.ids.shape[1] if is_padded else 0
    return padded_records(rows, lead, pad=0, least=least)
