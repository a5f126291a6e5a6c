"""Replies to prompts that opened the thinking: a thought is never read as the answer."""

import pytest

from tdfunc.llm import JinjaTemplate, TokenTemplate, chatml, llama, qwen
from tdfunc.llm.generation.options import Response
from tdfunc.llm.templates.thinking import closing_tag
from tdfunc.llm.wrappers.replies import reply_messages
from tests.llm.templates.test_turns import LLAMA3, PHI3
from tests.llm.tokens import CHATML, ZEPHYR, make_tokenizer

OPENS = "{% if add_generation_prompt %}<think>\n{% endif %}"
# A template that ChatML parses, and others that no template of ours, or one without thinking, parses.
SOURCES = {"ChatML": CHATML, "Phi-3": PHI3, "Zephyr": ZEPHYR, "Llama 3": LLAMA3}
OPENED = {name: JinjaTemplate(make_tokenizer(source + OPENS)) for name, source in SOURCES.items()}
CLOSED = {name: JinjaTemplate(make_tokenizer(source)) for name, source in SOURCES.items()}
CUT = ["", "hm", "hm\nso", " 2+2 is", "<b>", "hm </thin"]


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize("text", CUT)
def test_a_thought_that_was_cut_is_an_error(name, text):
    """The raw text is the content, with the reason."""
    expected = {"role": "assistant", "content": text, "parse_error": "the thinking is not closed"}
    assert OPENED[name].parse_reply(text) == expected


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize(("thinking", "content"), [("hm", "4"), ("a\nb", "x\n\ny"), ("", "4"), ("hm", "")])
def test_a_thought_that_was_closed_is_apart(name, thinking, content):
    """Also by templates that know no thinking themselves."""
    message = OPENED[name].parse_reply(f"{thinking}\n</think>\n\n{content}")

    assert message.get("reasoning_content", "") == thinking
    assert message["content"] == content
    assert "parse_error" not in message


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("text", ["hm", "", "hm\nso"])
def test_a_prompt_that_opens_nothing_changes_nothing(name, text):
    """A reply is its content."""
    assert CLOSED[name].parse_reply(text) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("template", [chatml, qwen, llama])
@pytest.mark.parametrize("prompt", ["assistant\n<think>\n", "<think>", "[THINK]", "<seed:think>\n", "<thinking>\n"])
def test_the_prompt_of_a_call_decides(template, prompt):
    """A wrapper passes the text that the model read, which may end otherwise than the template does."""
    assert template.parse_after(prompt, "hm")["parse_error"] == "the thinking is not closed"


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "<|im_start|>assistant\n",
        "<think>\n\n</think>\n\n",
        "<think>hm",
        "<|assistant|>",
        "<start_of_turn>model\n",
        "</think>",
    ],
)
def test_prompts_that_open_nothing(prompt):
    """Headers of roles, and a thought that is closed or continued."""
    assert closing_tag(prompt) is None


def test_wrappers_pass_their_prompts():
    """Each response is read with the end of its own prompt."""
    template = TokenTemplate(make_tokenizer(CHATML), chatml)
    responses = [Response(None, "length", text="hm")] * 2

    found = reply_messages(template, ["<think>\n", "assistant\n"], responses, ["hm", "hm"], ())

    assert [message.get("parse_error") for message in found] == ["the thinking is not closed", None]


def test_a_call_behind_a_thought_is_parsed():
    """A broken one leaves the complete reply as the content."""
    broken = 'hm\n</think>\n\n{"name": "f"'
    assert OPENED["Llama 3"].parse_reply('hm\n</think>\n\n{"name": "f", "parameters": {}}')["tool_calls"]
    assert OPENED["Llama 3"].parse_reply(broken)["content"] == broken
