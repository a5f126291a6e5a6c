"""Truncation that leaves nothing to train on is an error in every call, or is dropped with a count."""

import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc.llm import History, PairwiseDataset, load_tokens, tokenize_prompts
from tests.llm.tokens import make_tokenizer

TOKENIZER = make_tokenizer()
LONG = {"prompt": "the fox " * 40, "response": "yes"}
SHORT = {"prompt": "the fox", "response": "no"}
CUT = {"truncation": True, "max_length": 12}
COLUMNS = ("prompt", "response")
CHAT = [{"role": "user", "content": LONG["prompt"]}, {"role": "assistant", "content": "yes"}]
PAIR = {"prompt": LONG["prompt"], "chosen": "yes", "rejected": "no"}


def pairs(record=PAIR, **options):
    """The pairs of one record."""
    return PairwiseDataset.from_dataset(TOKENIZER, [record], max_length=12, **options)


NOTHING_LEFT = {
    "batch": lambda: load_tokens(TOKENIZER, [LONG, SHORT], columns=COLUMNS).batch([0, 1], **CUT),
    "batches": lambda: load_tokens(TOKENIZER, [SHORT, LONG], columns=COLUMNS).batches(1, **CUT),
    "a column": lambda: load_tokens(TOKENIZER, [LONG], columns={"a": COLUMNS, "b": "response"}).batch([0], **CUT),
    "conversations": lambda: load_tokens(TOKENIZER, [{"m": CHAT}], columns="m").batch([0], **CUT),
    "tokenize_prompts": lambda: tokenize_prompts(TOKENIZER, [LONG["prompt"]], ["yes"], **CUT),
    "pairs": pairs,
    "pairs of texts": lambda: PairwiseDataset.from_dataset(
        TOKENIZER, [{"chosen": "the fox " * 20 + "yes", "rejected": "the fox " * 20}], prompt=None, max_length=12
    ),
    "pairs, equal within the limit": lambda: pairs(
        {"prompt": "the", "chosen": "the fox " * 20, "rejected": "the fox " * 21}
    ),
    "columns of pairs": lambda: load_tokens(
        TOKENIZER,
        [{"prompt": "the", "chosen": "the fox " * 20, "rejected": "the fox " * 21}],
        columns={"a": ("prompt", "chosen"), "b": ("prompt", "rejected")},
    ).batch([0], **CUT),
}


@pytest.mark.parametrize("name", NOTHING_LEFT)
def test_nothing_to_train_on_is_an_error(name):
    """The message names the row and the way out."""
    with pytest.raises(ValueError, match=r"(?s)nothing to train on in row \d.*max_length"):
        NOTHING_LEFT[name]()


def test_masks_of_conversations_are_an_error():
    """The call that makes masks names the reply."""
    options = {"return_assistant_tokens_mask": True, "add_generation_prompt": False, **CUT}
    with pytest.raises(ValueError, match=r"(?s)conversation 0 is empty.*message 1 \(assistant\)"):
        History.from_chats(CHAT).apply_chat_template(tokenizer=TOKENIZER, **options)


def end_of_reply(limit):
    """The mask of the last tokens of a conversation."""
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    options = {"return_assistant_tokens_mask": True, "add_generation_prompt": False, "truncation_side": "left"}
    found = History.from_chats(CHAT).apply_chat_template(
        tokenizer=tokenizer, truncation=True, max_length=limit, **options
    )
    return found["assistant_masks"].tolist()


def test_a_mask_of_the_first_token_alone_is_empty():
    """Nothing predicts it, so that it is not trained."""
    with pytest.raises(ValueError, match="conversation 0 is empty"):
        end_of_reply(1)


def test_a_mask_of_the_second_token_is_not_empty():
    """The first token predicts it."""
    assert end_of_reply(2) == [False, True]


def test_an_error_comes_before_the_first_batch():
    """Not after hours of training."""
    data = load_tokens(TOKENIZER, [SHORT] * 5 + [LONG], columns=COLUMNS)
    with pytest.raises(ValueError, match="batches: truncation leaves nothing to train on in row 5"):
        data.batches(1, **CUT)


SIDES = {"left": lambda mask, limit: mask[-limit:], "right": lambda mask, limit: mask[:limit]}


@pytest.mark.parametrize(("side", "cut"), SIDES.items(), ids=SIDES)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=8), st.integers(1, 12))
def test_dropped_rows_are_those_without_a_trained_token(side, cut, lengths, limit):
    """Oracle: lists of masks. The rows that stay are as without the option, in their order."""
    records = [{"prompt": "0" * first, "response": "1" * last} for first, last in lengths]
    data = load_tokens(TOKENIZER, records, columns=COLUMNS)
    options = {"truncation": True, "max_length": limit, "truncation_side": side}
    # Texts of digits that no token of this tokenizer joins: a digit is a token. Nothing predicts the first token.
    masks = [[False] * first + [True] * last for first, last in lengths]
    kept = [i for i, mask in enumerate(masks) if not any(mask[1:]) or any(cut(mask, limit)[1:])]

    assume(kept)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = data.batch(range(len(records)), untrained="drop", **options)

    expected = data.batch(kept, **options)
    assert bool((batch == expected).all())
    lost = len(records) - len(kept)
    assert [f"{lost} of {len(records)} rows are left out" in str(each.message) for each in caught] == [True] * (
        lost > 0
    )


def test_a_batch_without_a_row_is_an_error():
    """An empty batch has no columns, and would be found far from its cause."""
    data = load_tokens(TOKENIZER, [LONG, LONG], columns=COLUMNS)

    with pytest.raises(ValueError, match="nothing to train on in row 0(?s:.)*2 of 2 rows"):
        data.batch([0, 1], untrained="drop", **CUT)


def test_batches_are_full_without_dropped_rows():
    """Rows are left out before batches are made, also of shuffled ones."""
    data = load_tokens(TOKENIZER, [SHORT, LONG] * 4, columns=COLUMNS)

    with pytest.warns(UserWarning, match="4 of 8 rows are left out"):
        batches = list(data.batches(2, key=tdf.random.key(0), untrained="drop", **CUT))

    assert [batch.batch_size[0] for batch in batches] == [2, 2]


def test_dropped_pairs_are_counted():
    """Pairs that stay differ."""
    record = {"prompt": "the", "chosen": "yes", "rejected": "no"}

    with pytest.warns(UserWarning, match="1 of 2 rows are left out"):
        found = PairwiseDataset.from_dataset(TOKENIZER, [PAIR, record], max_length=12, untrained="drop")

    assert found.batch_size == (1,)
    assert not torch.equal(found.chosen_data.input_ids, found.rejected_data.input_ids)


def test_rows_without_a_response_are_no_error():
    """What a record does not have is not lost: an empty response, a conversation of questions, equal pairs."""
    records = [{"prompt": LONG["prompt"], "response": "", "m": CHAT[:1]}]
    row = load_tokens(TOKENIZER, records, columns=COLUMNS).batch([0], **CUT)
    chat = load_tokens(TOKENIZER, records, columns="m").batch([0], **CUT)

    assert not bool(row["assistant_masks"].any())
    assert not bool(chat["assistant_masks"].any())
    assert pairs({**PAIR, "prompt": "a", "rejected": "yes"}).batch_size == (1,)


def test_the_option_is_checked():
    """Even without truncation."""
    with pytest.raises(ValueError, match="untrained must be one of"):
        load_tokens(TOKENIZER, ["a"]).batch([0], untrained="skip")
