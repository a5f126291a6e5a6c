"""`PromptData.mask_label`: prompts stay, the rest becomes pads."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc.llm import PromptData
from tests.helpers import assert_pure, assert_trees_equal


def make_prompts(rows, width, seed=0, dtype=torch.bool):
    """Random rows, some positions pads, with labels, logits and a loss."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(9, (rows, width), generator=generator)
    return PromptData(
        input_ids=ids,
        attention_mask=(torch.rand(rows, width, generator=generator) < 0.7).to(dtype),
        prompt_rindex=torch.randint(width, (rows,), generator=generator),
        labels=ids,
        logits=torch.randn(rows, width, 3, generator=generator),
        loss=torch.randn(rows, generator=generator),
        batch_size=[rows],
    )


PROMPTS = st.builds(
    make_prompts,
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 999),
    st.sampled_from([torch.bool, torch.int64]),
)


def padded_behind(rows, ends, pad):
    """The rows as lists, with a pad at each position behind the end of its prompt."""
    pads = [[pad] * (len(row) - end - 1) for row, end in zip(rows, ends, strict=True)]
    return [row[: end + 1] + more for row, end, more in zip(rows, ends, pads, strict=True)]


@given(PROMPTS)
def test_mask_label_is_a_loop_over_positions(data):
    """Oracle: lists. Nothing is written."""
    ends = data.prompt_rindex.tolist()

    out = assert_pure(lambda tree: tree.mask_label(pad_token_id=50), data)

    assert out.input_ids.tolist() == padded_behind(data.input_ids.tolist(), ends, 50)
    assert out.attention_mask.tolist() == padded_behind(data.attention_mask.tolist(), ends, 0)


@given(PROMPTS)
def test_mask_label_keeps_the_rest(data):
    """Batch size, dtype of the mask, ends of prompts and losses; labels and logits fit no longer."""
    out = data.mask_label(pad_token_id=50)

    assert out.batch_size == data.batch_size
    assert out.attention_mask.dtype == data.attention_mask.dtype
    assert torch.equal(out.prompt_rindex, data.prompt_rindex)
    assert torch.equal(out.loss, data.loss)
    assert out.labels is None
    assert out.logits is None


@given(PROMPTS)
def test_mask_label_twice_is_once(data):
    """The prompts stay."""
    out = data.mask_label(pad_token_id=50)

    assert_trees_equal(out.mask_label(pad_token_id=50), out)


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=4), st.sampled_from(["left", "right"]))
def test_a_prompt_ends_before_the_first_response(turns, side):
    """Oracle: lists. Of rows with several turns, none, or an empty prompt, padded at either side."""
    made = [[i % 2 == 1 for i, length in enumerate(row) for _ in range(length)] for row in turns]
    width = max(map(len, made)) + 1
    mask, wrote = torch.zeros(2, len(made), width, dtype=torch.bool)
    starts = [0 if side == "right" else width - len(row) for row in made]
    for i, (row, start) in enumerate(zip(made, starts, strict=True)):
        mask[i, start : start + len(row)], wrote[i, start : start + len(row)] = True, torch.tensor(row).bool()
    rows = tdf.TensorDict({"input_ids": mask * 5, "attention_mask": mask, "assistant_masks": wrote}, [len(made)])

    ends = [start + (row.index(True) if True in row else len(row)) - 1 for row, start in zip(made, starts, strict=True)]
    assert PromptData.from_rows(rows).prompt_rindex.tolist() == [
        end if row or side == "left" else width - 1 for end, row in zip(ends, made, strict=True)
    ]
