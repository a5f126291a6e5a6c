"""Tokens read from ragged records; the padded ones are tested with scores and generations."""

import torch
from torch import Size

from tdfunc import TensorDict
from tdfunc.llm.rows.batch import Row, ragged_records
from tdfunc.llm.rows.read import TokenKeys, read_tokens


def test_masks_of_ragged_records():
    """A mask has the lengths of the tokens, or of the prompts that begin them; it may be missing in some rows."""
    rows = [Row(torch.arange(1, n), 2, assistant=torch.arange(1, n) > 2) for n in (4, 6)]
    made = ragged_records(rows, Size([2]), None)
    part = ragged_records([rows[0], Row(rows[1].ids, 2)], Size([2]), None)
    keys = TokenKeys("tokens", "mask", "masks")

    whole, prompts, some = (
        read_tokens(TensorDict({"tokens": each.tokens, "masks": each.masks}, [2]), keys, field, "score").rows()
        for each, field in ((made, "full"), (made, "prompt"), (part, "full"))
    )
    assert [row.ids.tolist() for row in prompts] == [[1, 2], [1, 2]]
    assert [row.ids.tolist() for row in whole] == [row.ids.tolist() for row in some] == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert [row.assistant.tolist() for row in whole] == [row.assistant.tolist() for row in rows]
    assert [row.assistant for row in [*prompts, *some]] == [None] * 4
