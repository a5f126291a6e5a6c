"""Tokens read from ragged records; the padded ones are tested with scores and generations."""

from functools import partial

import pytest
import torch
from torch import Size

from tdfunc import TensorDict, lazy_stack
from tdfunc.core.errors import LeafMismatchError
from tdfunc.llm import causal_lm, generate, score
from tdfunc.llm.rows.batch import Row, ragged_records
from tdfunc.llm.rows.read import TokenKeys, read_tokens
from tdfunc.llm.rows.records import LogProbs, Masks, Tokens

transformers = pytest.importorskip("transformers")


def test_masks_of_ragged_records():
    """A mask has the lengths of the tokens, or of the prompts that begin them; it may be missing in some rows."""
    rows = [Row(torch.arange(1, n), 2, assistant=torch.arange(1, n) > 2) for n in (4, 6)]
    made, keys = ragged_records(rows, Size([2]), None), TokenKeys("tokens", "mask", "masks")
    masks = Masks(all_attention_mask=rows[0].ids > 1, all_assistant_mask=rows[0].assistant)
    part = made._replace(masks=lazy_stack([masks, Masks()]))

    whole, prompts, some = (
        read_tokens(TensorDict({"tokens": each.tokens, "masks": each.masks}, [2]), keys, field, "score").rows()
        for each, field in ((made, "full"), (made, "prompt"), (part, "full"))
    )
    found = [[row.ids.tolist() for row in each] for each in (whole, prompts, some)]
    assert found == [[[1, 2, 3], [1, 2, 3, 4, 5]], [[1, 2], [1, 2]], [[2, 3], [1, 2, 3, 4, 5]]]
    assert [row.assistant.tolist() for row in whole] == [row.assistant.tolist() for row in rows]
    assert [row.assistant for row in [*prompts, *some]] == [None] * 4


def test_a_prompt_has_the_first_part_of_the_mask():
    """A mask of prompts and responses serves the prompts, if they have none."""
    full = torch.arange(10).reshape(2, 5)
    td = TensorDict({"tokens": {"full": full, "prompt": full[:, :2]}, "masks": {"all_attention_mask": full % 3 > 0}})

    assert torch.equal(
        read_tokens(td, TokenKeys("tokens", "mask", "masks"), "prompt", "score").mask, full[:, :2] % 3 > 0
    )


def sampled(prompt, response, support):
    """A rollout as a row, as ragged generation makes it; `support` are the ids that truncation kept at each token."""
    parts = {"prompt": torch.tensor(prompt), "response": torch.tensor(response)}
    zeros = {name: torch.zeros(len(part)) for name, part in parts.items()}
    tokens = Tokens(**parts, full=torch.tensor(prompt + response), padded=False)
    log_probs = LogProbs(
        **zeros,
        full=torch.zeros(len(prompt + response)),
        behaviour=zeros["response"],
        support=torch.tensor(support),
        padded=False,
    )
    mask = torch.ones(len(prompt + response), dtype=torch.bool)
    masks = Masks(all_attention_mask=mask, padded=False)
    return TensorDict({"tokens": tokens, "masks": masks, "log_probs": log_probs})


def small_lm():
    """A tiny model with its trees."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, initializer_range=0.5)
    return causal_lm(transformers.GPT2LMHeadModel(config))


SHORT = sampled([5], [6, 7], [[6, 8], [7, 9]])
LONG = sampled([5, 4], [8, 7, 9], [[8, 3, 6], [7, 3, 6], [9, 3, 6]])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("call", [score, partial(generate, max_new_tokens=2)], ids=["score", "generate"])
def test_rollouts_padded_field_by_field_are_refused(call, side):
    """`pad` knows no prompts: responses would be read at the places of others."""
    lm, params, buffers = small_lm()
    padded = lazy_stack([SHORT, LONG]).pad(side=side)

    with pytest.raises(LeafMismatchError, match="ragged tokens were padded field by field"):
        call(lm, params, padded, buffers=buffers)


def padded_rollout(prompts, responses):
    """A padded rollout, as generation makes it."""
    tokens = Tokens(
        prompt=torch.tensor(prompts),
        response=torch.tensor(responses),
        full=torch.cat([torch.tensor(prompts), torch.tensor(responses)], -1),
        padded=True,
        batch_size=[2],
    )
    ones = torch.ones_like(tokens.full, dtype=torch.bool)
    return TensorDict({"tokens": tokens, "masks": Masks(all_attention_mask=ones, padded=True, batch_size=[2])}, [2])


NARROW = padded_rollout([[5], [6]], [[7, 8], [9, 7]])


@pytest.mark.parametrize(
    "wide",
    [
        padded_rollout([[5, 4], [6, 3]], [[7, 8, 9], [9, 7, 8]]),
        padded_rollout([[5, 4], [6, 3]], [[7], [9]]),
    ],
    ids=["of the same shape", "of another shape"],
)
@pytest.mark.parametrize("call", [score, partial(generate, max_new_tokens=2)], ids=["score", "generate"])
def test_rollouts_of_several_steps_padded_field_by_field_are_refused(call, wide):
    """Batches that generation padded, each to its own lengths, are ragged once more when they are stacked."""
    lm, params, buffers = small_lm()
    padded = lazy_stack([NARROW, wide]).pad()

    with pytest.raises(LeafMismatchError, match="ragged tokens were padded field by field"):
        call(lm, params, padded, buffers=buffers)


def test_pads_of_parts_may_have_another_id():
    """Only tokens under the mask are compared."""
    lm, params, buffers = small_lm()
    given = NARROW.set("masks", Masks(all_attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]).bool(), batch_size=[2]))
    other = given.set(("tokens", "prompt"), torch.tensor([[3], [6]]))

    found = score(lm, params, other, buffers=buffers)["log_probs"].response

    torch.testing.assert_close(found, score(lm, params, given, buffers=buffers)["log_probs"].response)


@pytest.mark.parametrize("value", [0, {("log_probs", "full"): -1.0}], ids=["one value", "a dict"])
def test_a_padded_support_has_no_further_ids(value):
    """Behaviour log-probs of samples of one prompt are those of the ragged stack after `pad`."""
    lm, params, buffers = small_lm()
    ragged = lazy_stack([SHORT, sampled([5], [8, 7, 9], LONG["log_probs"].support.tolist())])
    padded = ragged.pad(value)

    of_rows = score(lm, params, ragged, buffers=buffers, under="behaviour")["log_probs"]
    found = score(lm, params, padded, buffers=buffers, under="behaviour")["log_probs"].behaviour

    for row, expected in zip(found, of_rows.unbind(0), strict=True):
        torch.testing.assert_close(row[: len(expected.behaviour)], expected.behaviour)
