"""`RewardData` and `PairwiseDataset`: their fields. Files and other operations are as for any typed tree."""

import pytest
import torch

from tdfunc.core.errors import BatchSizeError
from tdfunc.llm import PairwiseDataset, RewardData, load_tokens
from tests.llm.kinds import tokenizer_of
from tests.llm.tokens import CHATML, GENERATION, make_tokenizer

ONES = torch.ones(2, 4)


def test_rewards_are_optional_and_tokens_are_not():
    """Lists are cast to tensors, positions are those of the fields; a missing or misshapen field is named."""
    data = RewardData([[1, 2]], [[True, False]])

    assert data.batch_size == torch.Size([])
    assert data.rewards is None
    assert data.end_scores is None
    assert data.input_ids.tolist() == [[1, 2]]
    with pytest.raises(TypeError, match="attention_mask"):
        RewardData(ONES, batch_size=[2])
    with pytest.raises(BatchSizeError, match="input_ids"):
        RewardData(ONES, ONES, batch_size=[3])


@pytest.mark.parametrize("side", ["left", "right"])
def test_pairs_have_the_masks_of_their_responses(side):
    """The losses of preferences need them: a mask of all tokens would also learn prompts."""
    tokenizer = tokenizer_of("Llama 2")
    records = [
        {"prompt": "The fox", "chosen": " jumps over", "rejected": " yes"},
        {"prompt": "hello the lazy dog", "chosen": " A:", "rejected": " Sure yes"},
    ]

    data = PairwiseDataset.from_dataset(tokenizer, records, padding_side=side)

    rows = load_tokens(tokenizer, records, columns={"chosen": ("prompt", "chosen"), "rejected": ("prompt", "rejected")})
    expected = rows.batch([0, 1], padding_side=side)
    assert torch.equal(data.chosen_data.assistant_masks, expected["chosen", "assistant_masks"])
    assert torch.equal(data.rejected_data.assistant_masks, expected["rejected", "assistant_masks"])


def test_pairs_of_complete_texts_have_no_masks():
    """It is not known where their responses begin."""
    records = [{"chosen": "The fox jumps", "rejected": "hello"}]

    data = PairwiseDataset.from_dataset(tokenizer_of("bytes"), records, prompt=None)

    assert data.chosen_data.assistant_masks is None


def user(text):
    """A message of a user."""
    return {"role": "user", "content": text}


def reply(text):
    """A message of an assistant."""
    return {"role": "assistant", "content": text}


ASKED = [user("a"), reply("hello"), user("b")]
# Pairs of conversations, with the replies that were chosen and rejected.
CHATS = {
    "one turn": ([user("a"), reply("yes")], [user("a"), reply("no")], "yes", "no"),
    "two turns": ([*ASKED, reply("yes")], [*ASKED, reply("no")], "yes", "no"),
    "one begins as the other": ([*ASKED, reply("yes")], [*ASKED, reply("yes and no")], "yes", "yes and no"),
    "another first reply": (
        [user("a"), reply("x"), *ASKED[:2]],
        [user("a"), reply("y"), *ASKED[:2]],
        "x hello",
        "y hello",
    ),
    "the rejected one is longer": ([*ASKED, reply("yes")], [*ASKED, reply("no"), user("c"), reply("d")], "yes", "no d"),
    "only one has a further reply": (ASKED[:2], [*ASKED, reply("no")], "hello", "hello no"),
    "equal": ([*ASKED, reply("no")], [*ASKED, reply("no")], "hello no", "hello no"),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("template", [CHATML, GENERATION])
@pytest.mark.parametrize("name", CHATS)
def test_replies_of_both_conversations_are_no_responses(name, template, side):
    """The losses that average over a response would count the turns before it."""
    tokenizer = make_tokenizer(template)
    chosen, rejected, *expected = CHATS[name]
    other = [user("the quick brown fox " * 3), reply("z")]
    records = [{"chosen": chosen, "rejected": rejected}, {"chosen": other, "rejected": [*other, user("b"), reply("c")]}]

    data = PairwiseDataset.from_dataset(tokenizer, records, prompt=None, padding_side=side)

    rows = [data.chosen_data[0], data.rejected_data[0]]
    texts = [tokenizer.decode(row.input_ids[row.assistant_masks]) for row in rows]
    assert [text.replace("<|im_end|>", " ").split() for text in texts] == [text.split() for text in expected]
