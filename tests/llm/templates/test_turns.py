"""Texts of tokenizers' own templates read back: by a template of ours, or by the turns that renders show."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdfunc.llm import History, template_report
from tests.llm.tokens import CHATML, make_tokenizer, messages

LOOP = "{% for m in messages %}"
# What the families do, written for these tests. The control strings are those of the test's tokenizer.
DEFAULT = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
THINKS = CHATML.replace(
    "{{ m['content'] }}",
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}",
)
LLAMA3 = (
    LOOP + "{{ '<|begin_of_text|>' if loop.first }}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA4 = (
    LLAMA3.replace("start_header_id", "header_start").replace("end_header_id", "header_end").replace("eot_id", "eot")
)
PHI3 = (
    LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
DIALOGPT = LOOP + "{{ m.content }}{{ eos_token }}{% endfor %}"
FALCON = (
    LOOP + "{{ '' if loop.first else '\n\n' }}{{ 'Assistant' if m.role == 'assistant' else m.role | title }}: "
    "{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}\n\nAssistant:{% endif %}"
)
LLAMA2 = (
    LOOP + "{% if m.role == 'system' %}[INST] <<SYS>>\n{{ m.content }}\n<</SYS>>\n\n{% elif m.role == 'user' %}"
    "{% if not (loop.index0 == 1 and messages[0].role == 'system') %}[INST] {% endif %}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
JINJA = {
    "ChatML": (CHATML, "as ChatML"),
    "Qwen2.5": (DEFAULT, "as ChatML"),
    "Qwen3": (THINKS, "as ChatML"),
    "Llama 3": (LLAMA3, "as Llama"),
    "Llama 4": (LLAMA4, "by its turns"),
    "Phi-3": (PHI3, "by its turns"),
    "DialoGPT": (DIALOGPT, "by its turns"),
    "Falcon": (FALCON, "by its turns"),
    "Llama 2": (LLAMA2, "by its turns"),
    "no system": ("{{ raise_exception('') if messages[0].role == 'system' }}" + PHI3, "by its turns"),
}
TOKENIZERS = {name: make_tokenizer(source) for name, (source, _) in JINJA.items()}
PLAIN = st.sampled_from(["hi", "two words", "line\nbreak", '{"a": 1}', "ünï¢ode", "a: b", "x" * 30])


@pytest.mark.parametrize("name", JINJA)
@given(messages(words=PLAIN, tools=False, thinking=False), st.booleans())
def test_texts_of_a_family_parse_back(name, chat, prompt):
    """The messages are those that were rendered, and the header of a reply is none."""
    tokenizer = TOKENIZERS[name]
    # Without names of roles a system message is the user's.
    chat = chat[chat[0]["role"] == "system" :] if name in ("DialoGPT", "no system") else chat
    chat = chat if prompt is False else [*chat, {"role": "user", "content": "and?"}]
    history = History.from_chats(chat)
    text = history.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=prompt)

    assert History.from_text(text, tokenizer=tokenizer).tolist() == chat


@pytest.mark.parametrize("name", JINJA)
def test_the_report_says_how(name):
    """By a template of ours where it reads the same, which knows calls too; else by turns."""
    renamed = make_tokenizer(JINJA[name][0], name_or_path="qwen-llama")
    assert template_report(renamed)["parsing"][1:] == (True, JINJA[name][1])


@pytest.mark.parametrize("name", JINJA)
@given(st.text(max_size=12), st.text(max_size=12))
def test_a_text_that_parses_is_rendered_again(name, first, second):
    """Whatever the contents: other messages than those of the text are not made up."""
    tokenizer = TOKENIZERS[name]
    chat = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
    text = History.from_chats(chat).apply_chat_template(tokenizer=tokenizer, add_generation_prompt=False, unsafe=True)
    try:
        back = History.from_text(text, tokenizer=tokenizer)
    except ValueError:
        return

    for prompt in (False, True):
        again = back.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=prompt, unsafe=True)
        if again.startswith(text.rstrip()):
            return
    raise AssertionError((text, back.tolist()))


def test_cut_texts_are_incomplete():
    """A reply that is cut off is read as far as it goes, and a system message is not complete."""
    tokenizer = TOKENIZERS["Llama 4"]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a fox"}]
    text = History.from_chats(chat).apply_chat_template(tokenizer=tokenizer, add_generation_prompt=False)

    cut = {"role": "assistant", "content": "a fo", "is_complete": False}
    assert History.from_text(text[: text.index("x<")], tokenizer=tokenizer).tolist() == [chat[0], cut]
    with pytest.raises(ValueError, match="no template reads this text"):
        History.from_text("<|begin_of_text|><|header_start|>system<|header_end|>\n\nbe", tokenizer=tokenizer)
