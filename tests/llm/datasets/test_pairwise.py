"""`RewardData` and `PairwiseDataset`: their fields. Files and other operations are as for any typed tree."""

import json

import pytest
import torch

from tdfunc.core.errors import BatchSizeError, MissingKeyError
from tdfunc.llm import History, PairwiseDataset, RewardData, chatml, load_jsonl, load_tokens
from tests.llm.kinds import tokenizer_of
from tests.llm.tokens import CHATML, GENERATION, make_tokenizer, tokenizers

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


# Prompts and responses as TRL documents them: lists of messages.
MESSAGES = {
    "one turn": [user("a")],
    "a system message": [{"role": "system", "content": "be brief"}, user("a")],
    "earlier replies": [user("a"), reply("hello"), user("b")],
}
TEMPLATES = {"plain": CHATML, "generation": GENERATION}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", MESSAGES)
def test_prompts_and_responses_are_lists_of_messages(name, template):
    """Oracle: the complete conversations, without a prompt; masks are True at the response only."""
    tokenizer = make_tokenizer(TEMPLATES[template])
    prompt = MESSAGES[name]
    record = {"prompt": prompt, "chosen": [reply("yes")], "rejected": [reply("no and no")]}
    whole = {"chosen": [*prompt, reply("yes")], "rejected": [*prompt, reply("no and no")]}

    pairs = PairwiseDataset.from_dataset(tokenizer, [record])

    expected = PairwiseDataset.from_dataset(tokenizer, [whole], prompt=None)
    assert bool((pairs == expected).all())


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_response_of_several_messages_follows_its_prompt(template):
    """All of its replies are trained, none of the prompt's."""
    tokenizer = make_tokenizer(TEMPLATES[template])
    record = {"prompt": [user("a"), reply("old"), user("b")], "completion": [reply("yes"), user("c"), reply("no")]}

    row = load_tokens(tokenizer, [record], columns=("prompt", "completion"))[0]

    text = tokenizer.decode(row["input_ids"][row["assistant_masks"]])
    assert text.replace("<|im_end|>", " ").split() == ["yes", "no"]


@pytest.mark.parametrize("given", ["tools", "no tools"])
def test_tools_of_a_record_belong_to_prompt_and_response(given):
    """The template renders them as for one conversation."""
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    record = {"prompt": [user("a")], "chosen": [reply("yes")], "tools": [tool] if given == "tools" else None}
    whole = {"messages": [user("a"), reply("yes")], "tools": record["tools"]}

    found = load_tokens(make_tokenizer(), [record], columns=("prompt", "chosen"), chat_template=chatml)[0]

    expected = load_tokens(make_tokenizer(), [whole], columns="messages", chat_template=chatml)[0]
    assert bool((found == expected).all())


def test_a_prompt_that_pairs_contain_is_named():
    """TRL's implicit prompt: the message says how it is read."""
    record = {"chosen": [user("a"), reply("yes")], "rejected": [user("a"), reply("no")]}

    with pytest.raises(MissingKeyError, match="(?s)Record 0 has no 'prompt'.*prompt=None"):
        PairwiseDataset.from_dataset(make_tokenizer(), [record])


def test_a_text_before_conversations_is_refused():
    """As in data sets whose responses repeat the prompt."""
    record = {"prompt": "a", "chosen": [user("a"), reply("yes")], "rejected": [user("a"), reply("no")]}

    with pytest.raises(TypeError, match="(?s)'chosen' is not a text as 'prompt' is.*prompt=None"):
        PairwiseDataset.from_dataset(make_tokenizer(), [record])


def with_end(text, tokenizer):
    """A text that ends with the end token."""
    return text + tokenizer.eos_token


@pytest.mark.parametrize("kind", ["bytes", "Llama 2", "bytes with BOS"])
def test_an_end_token_is_appended_to_responses(kind):
    """Oracle: TRL appends its text to the responses. A response that has it is unchanged."""
    tokenizer = tokenizer_of(kind)
    record = {"prompt": "The fox", "chosen": " jumps over", "rejected": with_end(" yes", tokenizer)}
    ended = {**record, "chosen": with_end(" jumps over", tokenizer)}

    pairs = PairwiseDataset.from_dataset(tokenizer, [record], add_eos_token=True)

    assert bool((pairs == PairwiseDataset.from_dataset(tokenizer, [ended])).all())


@pytest.mark.parametrize("kind", ["bytes", "Llama 2"])
@pytest.mark.parametrize("special", [True, False])
def test_an_end_token_is_appended_to_texts(kind, special):
    """Of a column of texts."""
    tokenizer = tokenizer_of(kind)
    options = {"add_special_tokens": special}

    found = load_tokens(tokenizer, ["The fox", "yes"], add_eos_token=True, **options)

    ended = load_tokens(tokenizer, [with_end(text, tokenizer) for text in ("The fox", "yes")], **options)
    assert bool((found.batch([0, 1]) == ended.batch([0, 1])).all())


def test_an_end_token_that_the_tokenizer_adds_is_not_added_again():
    """As of tokenizers that put it after each text."""
    tokenizer = make_tokenizer()
    end = tokenizer.eos_token_id
    tokenizer._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", end)]
    )

    row = load_tokens(tokenizer, [{"a": "the", "b": " fox"}], columns=("a", "b"), add_eos_token=True)[0]

    assert row["input_ids"].tolist().count(end) == 1


@pytest.mark.parametrize("columns", ["a", ("a", "b")])
def test_a_tokenizer_without_an_end_token_is_named(columns):
    """With the way out."""
    tokenizer = make_tokenizer(eos_token=None)

    with pytest.raises(ValueError, match=r"(?s)no end token.*tokenizer\.eos_token ="):
        load_tokens(tokenizer, [{"a": "the", "b": " fox"}], columns=columns, add_eos_token=True)


def test_a_truncated_response_has_no_end():
    """A model would learn to stop where the data were cut."""
    tokenizer = make_tokenizer()
    data = load_tokens(tokenizer, [{"a": "the", "b": " fox " * 9}], columns=("a", "b"), add_eos_token=True)

    batch = data.batch([0], truncation=True, max_length=8)

    assert tokenizer.eos_token_id not in batch["input_ids"][0].tolist()


# -- data sets of ShareGPT ---------------------------------------------------------------------------------------

SHAREGPT = [
    {"from": "system", "value": "be brief"},
    {"from": "human", "value": "the fox?"},
    {"from": "gpt", "value": "yes"},
    {"from": "tool", "value": "3"},
    {"from": "gpt", "value": "no"},
]
OPENAI = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the fox?"},
    {"role": "assistant", "content": "yes"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "no"},
]


def write_line(record, path):
    """A file of one line of JSON."""
    path.write_text(json.dumps(record) + "\n")
    return path


def test_records_of_sharegpt_are_conversations():
    """`load_tokens` reads them as messages of OpenAI."""
    tokenizer = make_tokenizer(GENERATION)

    found = load_tokens(tokenizer, [{"conversations": SHAREGPT}], columns="conversations")[0]

    expected = load_tokens(tokenizer, [{"messages": OPENAI}], columns="messages")[0]
    assert bool((found == expected).all())


READERS = {
    "a record": lambda _: History.from_chats({"conversations": SHAREGPT}),
    "messages": lambda _: History.from_chats(SHAREGPT),
    "several": lambda _: History.from_chats([{"conversations": SHAREGPT}])[0],
    "a line": lambda folder: load_jsonl(write_line({"conversations": SHAREGPT}, folder / "a.jsonl"))[0],
    "a line of messages": lambda folder: load_jsonl(write_line(SHAREGPT, folder / "a.jsonl"))[0],
}


@pytest.mark.parametrize("name", READERS)
def test_histories_are_read_from_sharegpt(name, tmp_path):
    """Roles have OpenAI's names."""
    assert READERS[name](tmp_path).tolist() == OPENAI


def test_an_unknown_author_is_named():
    """With its place."""
    with pytest.raises(ValueError, match="(?s)conversation 0, message 1: the author.*function_call"):
        History.from_chats([{"conversations": [SHAREGPT[1], {"from": "function_call", "value": "{}"}]}])
