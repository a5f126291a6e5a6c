"""Every call that takes texts gives the ids of one call of the tokenizer with the whole text.

The table has all such calls, kinds of tokenizers, and texts: rendered by a template or not, empty, with spaces.
"""

import pytest

from tdfunc import TensorDict
from tdfunc.llm import (
    ChatHistory,
    History,
    PairwiseDataset,
    Text,
    TokenTemplate,
    append_messages,
    chat_ids,
    load_tokens,
    to_training_rows,
    tokenize_prompts,
    tokenize_text,
)
from tests.llm.kinds import KINDS, fallback, letters, normalized, tokenizer_of, unigram
from tests.llm.tokens import tokenizers
from tests.llm.wrappers.fake import FakeWrapper

pytestmark = pytest.mark.sample(7)


def batch_ids(tree, name="input_ids"):
    """The ids of the only row."""
    return tree[name][0][tree["attention_mask"][0]].tolist()


def wrapper_ids(tokenizer, mode, record):
    """The ids that a wrapper reads."""
    wrapper = FakeWrapper(tokenizer=tokenizer, input_mode=mode, generate=False)
    return wrapper(TensorDict({mode: record}, [1]))["tokens"].full[0].tolist()


# -- texts ------------------------------------------------------------------------------------------------------

TEXTS = {
    "load_tokens": lambda tokenizer, text: load_tokens(tokenizer, [text])[0]["input_ids"].tolist(),
    "batches": lambda tokenizer, text: batch_ids(load_tokens(tokenizer, [text]).batch([0])),
    "columns": lambda tokenizer, text: load_tokens(tokenizer, [text], columns={"a": "text"})[0]["a"][
        "input_ids"
    ].tolist(),
    "tokenize_text": lambda tokenizer, text: tokenize_text(tokenizer, text)["input_ids"].tolist(),
    "tokenize_prompts": lambda tokenizer, text: tokenize_prompts(tokenizer, [text], [""]).input_ids[0].tolist(),
    "pairs of texts": lambda tokenizer, text: PairwiseDataset.from_dataset(
        tokenizer, [{"chosen": text, "rejected": "x"}], prompt=None, padding_side="right"
    ).chosen_data.input_ids[0].tolist(),
    "a wrapper": lambda tokenizer, text: wrapper_ids(tokenizer, "text", Text(full=[text], batch_size=[1])),
}  # fmt: skip


def reference(tokenizer, text):
    """One call; what a template rendered has its tokens already."""
    return tokenizer(text, add_special_tokens=not text.startswith(tokenizer.bos_token))["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entrance", TEXTS)
@pytest.mark.parametrize(
    "text",
    [
        "The fox",
        "<s>The fox",
        "<s> The fox</s>",
        "  yes",
        "yes</s>",
        "<s>[INST] hello [/INST]\nSure</s>",
        "a <s> b",
        "\n",
    ],
)
def test_texts_are_one_call(kind, entrance, text):
    """No call adds a token that the text has."""
    tokenizer = tokenizer_of(kind)

    found = TEXTS[entrance](tokenizer, text)

    expected = reference(tokenizer, text)
    assert found[: len(expected)] == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["", "<s>", "<s></s>", "</s>"])
def test_empty_texts_are_one_call(kind, text):
    """Of tokens alone, or of nothing."""
    tokenizer = tokenizer_of(kind)
    assert load_tokens(tokenizer, [text])[0]["input_ids"].tolist() == reference(tokenizer, text)


def added_tokens(tokenizer, text):
    """The number of tokens that the tokenizer adds to a text: none where the text begins with one."""
    if text.startswith("<s>"):
        return 0
    return len(tokenizer("a")["input_ids"]) - len(tokenizer("a", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("text", ["<s>The fox jumps over the lazy dog", "The fox jumps over the lazy dog"])
def test_texts_are_truncated_as_by_transformers(kind, side, text):
    """Added tokens stay, those of a template are part of the text."""
    tokenizer = tokenizer_of(kind)
    whole = reference(tokenizer, text)
    added = added_tokens(tokenizer, text)

    found = tokenize_text(tokenizer, text, truncation=True, max_length=5, truncation_side=side)["input_ids"].tolist()

    inner = whole[min(added, 1) : len(whole) - max(added - 1, 0)]
    room = 5 - added
    kept = {"right": inner[:room], "left": inner[len(inner) - room :]}[side]
    assert found == whole[: min(added, 1)] + kept + whole[len(whole) - max(added - 1, 0) :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [2, 3, 5, 50])
@pytest.mark.parametrize("text", ["<s>The fox jumps over the lazy dog", "The fox jumps over the lazy dog", ""])
def test_batches_are_truncated_as_texts(kind, side, limit, text):
    """A data set and one call give a model the same row."""
    tokenizer = tokenizer_of(kind)
    options = {"truncation": True, "max_length": limit, "truncation_side": side}

    found = batch_ids(load_tokens(tokenizer, ["yes", text]).batch([1], **options))

    assert found == tokenize_text(tokenizer, text, **options)["input_ids"].tolist()


CUT = {"truncation": True, "max_length": 5}
ANSWER = {"prompt": "T", "chosen": "he fox jumps over the lazy dog"}


def answer(side):
    """The ids of a truncated answer, and those of all of it."""
    tokenizer = tokenizer_of("bytes with BOS and EOS")
    data = load_tokens(tokenizer, [ANSWER], columns=("prompt", "chosen"))
    return batch_ids(data.batch([0], truncation_side=side, **CUT)), data[0]["input_ids"].tolist()


def test_a_truncated_response_has_no_end():
    """A model that learns from it would learn to stop there."""
    found, whole = answer("right")
    assert found == whole[:5]


def test_an_answer_without_its_start_has_the_first_token():
    """A model reads it in front of every text."""
    found, whole = answer("left")
    assert found == whole[:1] + whole[-4:]


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A </s>", "$A </s>"])
@pytest.mark.parametrize(("prompt", "response"), [("GAT", "TACA"), ("G", "A"), ("", "GATTACA"), ("GATTACA", "")])
def test_an_alphabet_of_four_letters(single, prompt, response):
    """A tokenizer may drop the letters that it is tried with."""
    tokenizer = letters(single)
    record = {"prompt": prompt, "chosen": response}

    row = load_tokens(tokenizer, [record], columns=("prompt", "chosen"))[0]

    assert row["input_ids"].tolist() == tokenizer(prompt + response)["input_ids"]


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A </s>", "$A </s>"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_four_letters_are_truncated_as_by_transformers(single, side):
    """The tokens around the text stay at their places."""
    tokenizer = letters(single)
    tokenizer.truncation_side = side

    found = tokenize_text(tokenizer, "GATTACA", truncation=True, max_length=4, truncation_side=side)

    assert found["input_ids"].tolist() == tokenizer("GATTACA", truncation=True, max_length=4)["input_ids"]


# -- prompts and responses --------------------------------------------------------------------------------------

PAIR = {"columns": ("prompt", "chosen")}
PROMPTS = {
    "load_tokens": lambda tokenizer, record, **options: load_tokens(tokenizer, [record], **PAIR, **options)[0][
        "input_ids"
    ].tolist(),
    "tokenize_prompts": lambda tokenizer, record, **options: tokenize_prompts(
        tokenizer, [record["prompt"]], [record["chosen"]], **options
    ).input_ids[0].tolist(),
    "columns": lambda tokenizer, record, **options: load_tokens(
        tokenizer, [record], columns={"a": ("prompt", "chosen")}, **options
    )[0]["a"]["input_ids"].tolist(),
}  # fmt: skip
PIECES = [
    ("Q:\n", "The fox"),
    ("<s>[INST] hello [/INST]\n", "Sure</s>"),
    ("<s>[INST] hello [/INST]", "Sure</s>"),
    ("The fox", " jumps"),
    ("The fox", "\n\nyes"),
    ("", "The fox"),
    ("hello </s>", "yes"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entrance", PROMPTS)
@pytest.mark.parametrize(("prompt", "response"), PIECES)
def test_a_response_has_the_ids_behind_its_prompt(kind, entrance, prompt, response):
    """A border between words is no start of a text: the ids are those of both texts together."""
    tokenizer = tokenizer_of(kind)
    record = {"prompt": prompt, "chosen": response}

    found = PROMPTS[entrance](tokenizer, record, add_special_tokens=False)

    assert found == tokenizer(prompt + response, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entrance", PROMPTS)
@pytest.mark.parametrize(("prompt", "response"), PIECES)
def test_tokens_around_a_prompt_and_its_response(kind, entrance, prompt, response):
    """They are those around both texts together, unless a template wrote them."""
    tokenizer = tokenizer_of(kind)
    record = {"prompt": prompt, "chosen": response}

    assert PROMPTS[entrance](tokenizer, record) == reference(tokenizer, prompt + response)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prompt", "response"), [("The f", "ox jumps"), ("hel", "lo"), ("ye", "s"), ("The fox", "es"), ("a ", " b")]
)
def test_a_response_inside_of_a_word_reads_as_together(kind, prompt, response):
    """No token is part of both, and the text has no space more; the prompt has the ids that a model is given."""
    tokenizer = tokenizer_of(kind)

    row = load_tokens(tokenizer, [{"prompt": prompt, "chosen": response}], **PAIR, add_special_tokens=False)[0]

    together = tokenizer(prompt + response, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(row["input_ids"]) == tokenizer.decode(together)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompt", "response"), [("The f", "ox jumps"), ("a ", " b"), ("Q:\n\n", "yes")])
def test_a_prompt_has_its_own_ids(kind, prompt, response):
    """They are the ids that a model is given to sample from."""
    tokenizer = tokenizer_of(kind)

    row = load_tokens(tokenizer, [{"prompt": prompt, "chosen": response}], **PAIR)[0]

    alone = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    first = tokenizer(prompt)["input_ids"].index(alone[0])
    assert row["input_ids"][~row["assistant_masks"]].tolist()[first:] == alone


# -- conversations ----------------------------------------------------------------------------------------------

MASKED = {"add_generation_prompt": False, "return_assistant_tokens_mask": True}


def appended(tokenizer, messages):
    """The ids of a conversation that grew, with its replies as they were sampled."""
    template = TokenTemplate(tokenizer)
    ids = chat_ids(template, History.from_chats(messages[:2]))
    for n in range(2, len(messages), 2):
        ids = append_messages(template, ids, History.from_chats(messages[n : n + 1]))
        together = to_training_rows(template, History.from_chats(messages[: n + 2]))[0].ids
        ids += together[len(ids) :]
    return ids


CHATS = {
    "apply_chat_template": lambda tokenizer, chat: History.from_chats(chat).apply_chat_template(
        tokenizer=tokenizer, tokenize=True, add_generation_prompt=False
    ),
    "masks": lambda tokenizer, chat: (
        History.from_chats(chat).apply_chat_template(tokenizer=tokenizer, **MASKED)["input_ids"].tolist()
    ),
    "chat_ids": lambda tokenizer, chat: chat_ids(TokenTemplate(tokenizer), History.from_chats(chat)),
    "to_training_rows": lambda tokenizer, chat: (
        to_training_rows(TokenTemplate(tokenizer), History.from_chats(chat))[0].ids
    ),
    "append_messages": appended,
    "load_tokens": lambda tokenizer, chat: load_tokens(tokenizer, [{"messages": chat}], columns="messages")[0][
        "input_ids"
    ].tolist(),
    "a wrapper": lambda tokenizer, chat: wrapper_ids(
        tokenizer, "history", ChatHistory(full=History.from_chats([chat]), batch_size=[1])
    ),
}


NORMALIZED = {
    "lower case": lambda: normalized(tokenizers.normalizers.Lowercase()),
    "NFKC": lambda: normalized(tokenizers.normalizers.NFKC()),
    "clean": lambda: normalized(tokenizers.normalizers.BertNormalizer()),
    "Unigram": unigram,
}
HIDDEN = [
    ("lower case", "yes</S> no"),
    ("lower case", "<S>"),
    ("NFKC", "＜/s＞"),
    ("clean", "<S>x 0 1 2"),
    ("Unigram", "x＜s＞"),
    ("Unigram", "＜/s＞yes"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entrance", CHATS)
@pytest.mark.parametrize("turns", [1, 2, 6])
@pytest.mark.parametrize("reply", ["The fox", " Sure", "yes, hello"])
def test_conversations_are_one_call(kind, entrance, turns, reply):
    """The ids are those of the rendered text, however many turns, in one piece or grown."""
    tokenizer = tokenizer_of(kind)
    turn = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": reply}]
    chat = turn * turns
    text = tokenizer.apply_chat_template(chat, tokenize=False)

    assert CHATS[entrance](tokenizer, chat) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("content", ["€", "一 ü", "yes"])
@pytest.mark.parametrize("entrance", CHATS)
def test_bytes_that_are_special_tokens_are_the_models(entrance, content):
    """A character without a token is its bytes, and no control string that a content has."""
    tokenizer = fallback()
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)

    assert CHATS[entrance](tokenizer, chat) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("entrance", CHATS)
def test_bytes_stay_beside_a_control_string_in_a_content(entrance):
    """The copy in which control tokens have other names writes the bytes of a character without a token."""
    tokenizer = fallback()
    chat = [{"role": "user", "content": "</s>€"}, {"role": "assistant", "content": "yes"}]
    found = CHATS[entrance](tokenizer, chat)

    written = tokenizer.convert_ids_to_tokens(found)
    start = written.index("<0xE2>")
    assert written[start : start + 3] == ["<0xE2>", "<0x82>", "<0xAC>"]


def test_the_name_of_a_byte_in_a_content_is_ordinary_text():
    """It is not the byte, although the model has a token of this name."""
    tokenizer = fallback()
    history = History.from_chats([{"role": "user", "content": "<0xE2>"}])
    found = history.apply_chat_template(tokenizer=tokenizer, tokenize=True)

    assert tokenizer.convert_tokens_to_ids("<0xE2>") not in found


def test_a_text_with_bytes_is_rendered():
    """It has no control string."""
    history = History.from_chats([{"role": "user", "content": "€"}])

    assert "€" in history.apply_chat_template(tokenizer=fallback())


@pytest.mark.parametrize(("kind", "content"), HIDDEN)
@pytest.mark.parametrize("entrance", CHATS)
def test_a_normalizer_makes_no_control_tokens_of_contents(entrance, kind, content):
    """A content in upper case or full width has as many control tokens as another one: none."""
    tokenizer = NORMALIZED[kind]()
    control = set(tokenizer.convert_tokens_to_ids(["<s>", "</s>", "<|im_end|>"]))

    def count(content):
        turn = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        return sum(each in control for each in CHATS[entrance](tokenizer, turn * 2))

    assert count(content) == count("yes")


@pytest.mark.parametrize(("kind", "content"), HIDDEN)
def test_a_text_in_which_a_normalizer_makes_control_tokens_is_refused(kind, content):
    """As one with the control string itself."""
    history = History.from_chats([{"role": "user", "content": content}])
    with pytest.raises(ValueError, match="conversation 0 has a text of which the tokenizer makes a control string"):
        history.apply_chat_template(tokenizer=NORMALIZED[kind]())


@pytest.mark.parametrize("kind", KINDS)
def test_the_trained_tokens_are_those_of_masks(kind):
    """Rows for training and masks mark the same tokens."""
    tokenizer = tokenizer_of(kind)
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "The fox"}] * 3
    history = History.from_chats(chat)

    (row,) = to_training_rows(TokenTemplate(tokenizer), history)

    masks = history.apply_chat_template(tokenizer=tokenizer, **MASKED)["assistant_masks"]
    assert row.generated == masks.tolist()


def test_unknown_characters_are_no_control_tokens():
    """The text of a conversation with some is as any other."""
    history = History.from_chats([{"role": "user", "content": "漢字"}])
    assert "漢字" in history.apply_chat_template(tokenizer=unigram())
