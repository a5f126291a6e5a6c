"""Texts to tokens and back: the numbers of transformers' own calls, without a write to the tokenizer."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tdfunc as tdf
from tdfunc.llm import PromptData, detokenize, tokenize_prompts, tokenize_text, tokenizer_digest
from tests.llm.tokens import make_tokenizer, tokenizers, transformers

TEXTS = st.text(st.sampled_from("the quick brown\n<|im_end|>ü "), max_size=40)


def make_adding():
    """A tokenizer that puts one token before a text and two behind it."""
    made = make_tokenizer()
    made.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s> <|im_end|>",
        special_tokens=[(each, made.convert_tokens_to_ids(each)) for each in ("<s>", "</s>", "<|im_end|>")],
    )
    return made


PLAIN, ADDING = make_tokenizer(), make_adding()


def state_of(tokenizer):
    """Everything in a tokenizer that a call could write."""
    return tokenizer.backend_tokenizer.to_str(), dict(tokenizer.special_tokens_map), len(tokenizer)


@settings(max_examples=40)
@given(
    st.lists(TEXTS, min_size=1, max_size=4),
    st.sampled_from([PLAIN, ADDING]),
    st.sampled_from(["left", "right"]),
    st.sampled_from(["left", "right"]),
    st.sampled_from([None, 4, 9]),
    st.sampled_from([True, "max_length"]),
    st.booleans(),
)
def test_padded_texts_are_those_of_transformers(texts, tokenizer, side, cut_side, length, padding, special):
    """Oracle: the tokenizer's own call on a copy of it, with the same options."""
    other, before = copy.deepcopy(tokenizer), state_of(tokenizer)
    other.padding_side, other.truncation_side = side, cut_side
    padding = padding if length else True
    options = {"padding": padding, "truncation": length is not None, "max_length": length}
    expected = other(texts, add_special_tokens=special, return_tensors="pt", **options)

    options |= {"padding_side": side, "truncation_side": cut_side}
    out = tokenize_text(tokenizer, texts, add_special_tokens=special, **options)

    assert out.batch_size == (len(texts),)
    assert out["attention_mask"].dtype == torch.bool
    assert torch.equal(out["input_ids"], expected["input_ids"].long())
    assert torch.equal(out["attention_mask"], expected["attention_mask"].bool())
    assert state_of(tokenizer) == before


@settings(max_examples=20)
@given(st.lists(st.lists(TEXTS, min_size=1, max_size=3), max_size=3), st.booleans())
def test_texts_come_back(nested, padded):
    """`detokenize` of `tokenize_text` is the text, in lists nested as they were, ragged or padded."""
    if padded:
        nested = [each[:1] for each in nested if each]

    tree = tokenize_text(PLAIN, nested, padding=padded)

    assert detokenize(PLAIN, tree, skip_special_tokens=False) == nested
    assert isinstance(tree, tdf.LazyStack) == (bool(nested) and not padded)


def test_one_text_and_other_forms_of_ids():
    """A text has no batch; ids may be tensors with masks, lists, and lists of tensors."""
    tree = tokenize_text(PLAIN, "the fox .")
    ids = tree["input_ids"]

    assert tree.batch_size == ()
    assert [detokenize(PLAIN, each) for each in (tree, ids, ids.tolist())] == ["the fox ."] * 3
    assert detokenize(PLAIN, [ids, ids[:0]]) == ["the fox .", ""]
    assert detokenize(PLAIN, torch.stack([ids, ids]), torch.stack([ids > 0, ids < 0])) == ["the fox .", ""]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_mask_of_integers_marks_pads(dtype):
    """`detokenize` reads the masks of transformers, which are integers, as those of bools."""
    padded = tokenize_text(PLAIN, ["the fox", "the fox . the fox"], padding=True)
    encoded = padded.set("attention_mask", padded["attention_mask"].to(dtype))
    assert detokenize(PLAIN, encoded) == ["the fox", "the fox . the fox"]


def test_special_tokens_are_skipped_unless_they_are_asked_for():
    """The end of turn is one."""
    assert detokenize(PLAIN, [PLAIN.eos_token_id]) == ""
    assert detokenize(PLAIN, [PLAIN.eos_token_id], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.parametrize("make", [make_tokenizer, make_adding])
@pytest.mark.parametrize(
    "options", [{"truncation": True, "max_length": 3}, {"padding": True}, {"split_special_tokens": True}]
)
def test_states_that_calls_left_in_the_tokenizer_change_nothing(make, options):
    """Calls of transformers leave their options in the backend; ids are whole, and the options stay there."""
    tokenizer = make()
    texts = ["the quick brown fox<|im_end|>", "", "a"]
    expected = [tokenizer(text)["input_ids"] for text in texts]
    tokenizer(texts, **options)
    before = state_of(tokenizer)
    special = tokenizer.backend_tokenizer.encode_special_tokens

    out = tokenize_text(tokenizer, texts)

    assert [row["input_ids"].tolist() for row in out.unbind(0)] == expected
    assert state_of(tokenizer) == before
    assert tokenizer.backend_tokenizer.encode_special_tokens is special


@settings(max_examples=30)
@given(
    st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3),
    st.sampled_from([PLAIN, ADDING]),
    st.booleans(),
    st.sampled_from(["left", "right"]),
    st.sampled_from([None, 5]),
)
def test_prompts_end_where_their_positions_say(pairs, tokenizer, special, side, length):
    """Oracle: lists. No token is of a prompt and its response; added tokens stand around both."""
    prompts, responses = [list(each) for each in zip(*pairs, strict=True)]
    options = {"truncation": length is not None, "max_length": length}
    room = (length or 99) - int(special and tokenizer is ADDING)
    # Without a token of a response there is an error.
    assume(all(len(tokenizer.tokenize(prompt)) < room for prompt in prompts))

    out = tokenize_prompts(tokenizer, prompts, responses, padding_side=side, add_special_tokens=special, **options)

    assert type(out) is PromptData
    assert out.batch_size == (len(pairs),)
    assert torch.equal(out.labels, out.input_ids)
    first = [3] if special and tokenizer is ADDING else []
    last = [4, 2] if special and tokenizer is ADDING else []
    before = [first + tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    behind = [tokenizer(response, add_special_tokens=False)["input_ids"] + last for response in responses]
    ends = [int(index) + 1 for index in out.prompt_rindex]
    rows = list(zip(out.input_ids, out.attention_mask, ends, strict=True))
    assert [ids[mask].tolist() for ids, mask, _ in rows] == [
        (prompt + response)[:length] for prompt, response in zip(before, behind, strict=True)
    ]
    assert [ids[:end][mask[:end]].tolist() for ids, mask, end in rows] == [prompt[:length] for prompt in before]


def test_the_digest_is_of_what_ids_depend_on():
    """Calls with other options do not change it; a token, a template and a special token do."""
    tokenizer = make_tokenizer()
    digest = tokenizer_digest(tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=1)
    assert tokenizer_digest(tokenizer) == digest == tokenizer_digest(make_tokenizer())
    others = [make_adding(), make_tokenizer(template="{{ messages }}"), make_tokenizer(eos_token="</s>")]
    others.append(make_tokenizer())
    others[-1].add_tokens(["zz"])

    assert len({digest, *[tokenizer_digest(each) for each in others]}) == 5


def test_tokenizers_in_python():
    """Ids, texts and digests of a tokenizer without a backend in Rust."""
    tokenizer, texts = transformers.ByT5Tokenizer(), ["a fox .", "ü"]

    assert [row["input_ids"].tolist() for row in tokenize_text(tokenizer, texts)] == tokenizer(texts)["input_ids"]
    assert detokenize(tokenizer, tokenizer(texts)["input_ids"]) == texts
    digests = [tokenizer_digest(transformers.ByT5Tokenizer(extra_ids=n)) for n in (125, 125, 100)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("length", [-1, -8])
def test_a_length_is_not_negative(length):
    """Other programs write -1 for no limit, and here no token would be left."""
    with pytest.raises(ValueError, match="max_length must be at least 0"):
        tokenize_text(make_tokenizer(), "the quick fox", truncation=True, max_length=length)


@pytest.mark.parametrize("padding", [True, "max_length"])
def test_a_length_may_be_a_whole_float(padding):
    """As a count of other functions."""
    options = {"truncation": True, "padding": padding}
    found = tokenize_text(make_tokenizer(), ["the quick fox", "a"], max_length=2.0, **options)

    assert tdf.tree_equal(found, tokenize_text(make_tokenizer(), ["the quick fox", "a"], max_length=2, **options))
