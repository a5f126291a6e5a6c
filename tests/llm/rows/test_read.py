"""Tokens read from ragged records; the padded ones are tested with scores and generations."""

import torch
from torch import Size

from tdfunc import TensorDict, lazy_stack
from tdfunc.llm.rows.batch import Row, ragged_records
from tdfunc.llm.rows.read import TokenKeys, read_tokens
from tdfunc.llm.rows.records import Masks


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
