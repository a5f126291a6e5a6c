"""Tokenizers that get another chat template or more tokens while templates have them in use."""

import pytest

from tdfunc.llm import History, JinjaTemplate, TokenTemplate, load_tokens, to_training_rows
from tests.llm.tokens import CHATML, make_tokenizer

OTHER = CHATML.replace("<|im_end|>", "</s>").replace("<|im_start|>", "<s>")
CHAT = History.from_chats(
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "a <x> b"},
        {"role": "assistant", "content": "ok"},
    ]
)


def another_template(tokenizer):
    """Give a tokenizer another chat template."""
    tokenizer.chat_template = OTHER


def another_token(tokenizer):
    """Give a tokenizer one more special token."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})


def own(tokenizer):
    """Return the template of a tokenizer."""
    return TokenTemplate(tokenizer)


def given(tokenizer):
    """Return a template that was made before."""
    return TokenTemplate(tokenizer, JinjaTemplate(tokenizer))


def rows(template):
    """Return the ids and masks of training rows."""
    return [(row.ids, row.generated) for row in to_training_rows(template, CHAT)]


def mask(template):
    """Return the ids and the mask of a rendered conversation."""
    options = {"tokenizer": template.tokenizer, "chat_template": template.template}
    tree = CHAT.apply_chat_template(**options, return_assistant_tokens_mask=True)
    return tree["input_ids"].tolist(), tree["assistant_masks"].tolist()


@pytest.mark.parametrize("read", [rows, mask])
@pytest.mark.parametrize("make", [own, given])
@pytest.mark.parametrize("change", [another_template, another_token])
def test_a_template_follows_its_tokenizer(change, make, read):
    """What a template has read from a tokenizer counts as long as the tokenizer stays as it is."""
    tokenizer = make_tokenizer()
    template = make(tokenizer)
    read(template)
    change(tokenizer)
    assert read(template) == read(make(tokenizer))


def test_a_cache_of_tokens_counts_the_tokenizer_of_the_template(tmp_path):
    """Special tokens that a template writes may be those of another tokenizer."""
    tokenizer = make_tokenizer()
    text = "{{ eos_token }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    records = [{"messages": [{"role": "user", "content": "hi"}]}]
    templates = [JinjaTemplate(make_tokenizer(eos_token=end), text) for end in ("<|im_end|>", "</s>")]
    options = {"columns": "messages", "cache_dir": tmp_path}
    found = [load_tokens(tokenizer, records, chat_template=each, **options)[0]["input_ids"][0] for each in templates]
    assert found[0] != found[1]
