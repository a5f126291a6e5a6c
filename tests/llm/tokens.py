"""Tokenizers trained here, and random conversations."""

import functools
import json

import pytest
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thinking is left out of earlier turns, so renders are no prefixes of each other.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ (m.content or '') | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[call]{{ c.function.name }} {{ c.function.arguments | tojson }}[/call]"
    "{% endfor %}"
    "</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TEXT_ARGUMENTS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}A:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name + c.function.arguments }}</tool_call>{% endfor %}"
    "<|im_end|>{% else %}{{ m.role }}:{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]


@functools.cache
def _backend(special, plain=()):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog, user assistant yes"] * 20, trainer)
    made.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in plain])
    return made.to_str()


def make_tokenizer(template=CHATML, special=SPECIAL, plain=("<think>", "</think>"), **options):
    """A byte-level BPE tokenizer of a few hundred tokens, with control tokens."""
    options = {"pad_token": "<|pad|>", "eos_token": "<|im_end|>"} | options
    backend = tokenizers.Tokenizer.from_str(_backend(tuple(special), tuple(plain)))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    made.chat_template = template
    return made


WORDS = st.sampled_from(
    ["", "hi", "yes", "  two words ", "line\nbreak", '{"a": 1}', "ünï¢ode", "<b>", "{{ x }}", "a" * 30, "[1, 2]", "\n"]
)
NAMES = st.sampled_from(["now", "search", "f_1"])
VALUES = st.sampled_from(["x", "a\nb", 'quo"te', 1, 2.5, True, None, [1, "b"], {"k": "v"}, "ü"])


@st.composite
def calls(draw, ids=True):
    """Tool calls, with arguments as a dict or JSON text."""
    found = []
    for i in range(draw(st.integers(1, 2))):
        arguments = draw(st.dictionaries(st.sampled_from(["a", "b c"]), VALUES, max_size=2))
        if draw(st.booleans()):
            arguments = json.dumps(arguments)
        call = {"type": "function", "function": {"name": draw(NAMES), "arguments": arguments}}
        found.append({"id": f"call{i:05}", **call} if ids and draw(st.booleans()) else call)
    return found


@st.composite
def messages(draw, words=WORDS, tools=True, thinking=True, system=True):
    """A conversation as OpenAI writes it."""
    found = [{"role": "system", "content": draw(words)}] if system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        found.append({"role": "user", "content": draw(words)})
        if tools and draw(st.booleans()):
            made = draw(calls())
            call = {"role": "assistant", "content": draw(st.sampled_from([None, "", "let me see"])), "tool_calls": made}
            found.append(call)
            found += [
                {"role": "tool", "content": draw(words)} | ({"tool_call_id": c["id"]} if "id" in c else {})
                for c in made
            ]
        reply = {"role": "assistant", "content": draw(words)}
        if thinking and draw(st.booleans()):
            reply["reasoning_content"] = draw(words)
        found.append(reply)
    return found
