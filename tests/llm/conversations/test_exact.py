"""Token-exact conversations: ids only grow, replies keep theirs, and every change of earlier turns is reported."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdfunc.llm import (
    History,
    TokenTemplate,
    append_messages,
    chat_ids,
    chatml,
    deepseek,
    find_mismatch,
    gemma,
    is_append_only,
    llama,
    mistral,
    qwen,
    to_training_rows,
)
from tdfunc.llm.encoding.encode import texts_behind
from tdfunc.llm.messages.columns import conversation_in
from tdfunc.llm.templates.base import make_call
from tests.llm.encoding.test_chat import masked
from tests.llm.kinds import tokenizer_of
from tests.llm.templates.test_templates import TOOLS
from tests.llm.templates.test_turns import DEFAULT
from tests.llm.tokens import CHATML, FORGETFUL, SPECIAL, TEXT_ARGUMENTS, ZEPHYR, make_tokenizer

MARKS = [mark for each in (llama, deepseek, mistral, gemma) for mark in each.control]
HERMES = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
DRAWN = HARMONY.replace(
    "<|message|>{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}<|message|>{{ m.content }}{% endgeneration %}"
    "{% else %}<|message|>{{ m.content }}{% endif %}",
)
# A name, the template, whether it has a form for thinking, for tools, and for several calls.
TEMPLATES = {
    "chatml": (chatml, True, True, 2),
    "qwen": (qwen, True, True, 2),
    "llama": (llama, False, True, 1),
    "deepseek": (deepseek, False, True, 2),
    "mistral": (mistral, False, True, 2),
    "gemma": (gemma, False, False, 0),
    "hermes in Jinja": (HERMES, True, True, 2),
    "zephyr in Jinja": (ZEPHYR, False, True, 2),
    "text arguments in Jinja": (TEXT_ARGUMENTS, False, True, 2),
    "dropped thinking in Jinja": (FORGETFUL, True, True, 2),
}
# Each of them renders a conversation as a prefix of a longer one.
APPENDING = [name for name in TEMPLATES if name not in ("qwen", "mistral", "dropped thinking in Jinja")]


def make_template(name):
    """A template with a tokenizer that has its control strings."""
    source = TEMPLATES[name][0]
    tokenizer = make_tokenizer(
        source if isinstance(source, str) else CHATML, special=[*dict.fromkeys([*SPECIAL, *MARKS])], bos_token="<s>",
        eos_token="</s>" if source is ZEPHYR else "<|im_end|>",
    )  # fmt: skip
    return TokenTemplate(tokenizer, None if isinstance(source, str) else source)


def sampled(template, text, draws):
    """Ids of a text as a model may sample them: of pieces cut anywhere but in control strings."""
    ids = []
    for part in re.split(f"({'|'.join(map(re.escape, template.control))})", text):
        while part:
            n = len(part) if part in template.control else draws.randint(1, 6)
            ids += template.tokenizer(part[:n], add_special_tokens=False)["input_ids"]
            part = part[n:]
    return ids


def words(draws):
    """A text that tokenises in many ways, with line breaks and control strings."""
    parts = ["the quick", " brown", "fox ", "\n", " ", "über", "<|im_end|>", "jumps over", '{"a": 1}', "</s>"]
    return "".join(draws.choices(parts, k=draws.randint(1, 6)))


def make_reply(name, draws, n):
    """A random reply: text, thinking, or calls."""
    _, thinks, has_tools, most = TEMPLATES[name]
    reply = {"role": "assistant", "content": words(draws).replace("<|im_end|>", "").replace("</s>", "").strip() or "ok"}
    if thinks and draws.random() < 0.5:
        reply["reasoning_content"] = "hm " * draws.randint(1, 3) + "so"
    if has_tools and draws.random() < 0.5:
        made = [
            make_call(draws.choice(["now", "search"]), {"q": draws.choice(["x", "ü", 'a"b'])})
            for _ in range(draws.randint(1, most))
        ]
        calls = [{"id": f"call{n:02}{i:03}", **call} for i, call in enumerate(made)]
        reply |= {"tool_calls": calls, "content": None}
        reply.pop("reasoning_content", None)
    return reply


def roll_out(template, name, draws):
    """Play a conversation of several turns token by token; return its history, and the ids that came out."""
    chat = [{"role": "user", "content": words(draws)}]
    if TEMPLATES[name][2] and draws.random() < 0.5:
        chat = [{"role": "system", "content": words(draws)}, *chat]
    history = History.from_chats(chat)
    ids = chat_ids(template, history, add_generation_prompt=True)
    for n in range(draws.randint(1, 4)):
        reply = make_reply(name, draws, n)
        whole = template.marked([*history.tolist(), reply])
        prompt = template.marked(history.tolist(), prompt=True)
        start = len(prompt.text) if whole.text.startswith(prompt.text) else whole.replies[-1].start
        text = whole.text[start : whole.replies[-1].stop].removesuffix(template.template.end)
        own = sampled(template, text, draws)
        own += template.end_ids if draws.random() < 0.8 else []
        ids += own
        history = history.append(History.from_chats([{**reply, "token_ids": own}])[0])
        if reply.get("tool_calls"):
            news = [{"role": "tool", "content": words(draws), "tool_call_id": c["id"]} for c in reply["tool_calls"]]
        else:
            news = [{"role": "user", "content": words(draws)}]
        new = History.from_chats(news)
        longer = append_messages(template, ids, new)
        assert longer[: len(ids)] == ids, "the ids so far never change"
        ids, history = longer, history.extend(new)
    return history, ids


def check_roll_outs(name, count):
    """Count tokens that differ between rollouts and the ids of their histories."""
    template, draws, changed, tokens = make_template(name), random.Random(name), 0, 0
    control = set(template.tokenizer.convert_tokens_to_ids(list(template.control)))
    for _ in range(count):
        history, ids = roll_out(template, name, draws)
        again = chat_ids(template, history, add_generation_prompt=True)
        changed += sum(a != b for a, b in zip(ids, again, strict=False)) + abs(len(ids) - len(again))
        tokens += len(ids)
        if name in APPENDING and is_append_only(template, history):
            rendered = template.template.texts([conversation_in(history)], generation_prompt=True)[0]
            assert template.tokenizer.decode(ids) == rendered
            assert sum(i in control for i in ids) == sum(i in control for i in _rendered(template, history))
    assert tokens > 40 * count
    return changed


def _rendered(template, history):
    conversation = conversation_in(history)
    return template.encode(template.marked(conversation.messages, conversation.tools, prompt=True))


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_token_changes(name):
    """Replies cut anywhere, thinking, calls, cut-off turns: the ids of the history are those that were sampled."""
    assert check_roll_outs(name, 5) == 0


@pytest.mark.slow
def test_no_token_changes_in_a_thousand_conversations():
    """0 in 1,000, over 10 templates."""
    assert [check_roll_outs(name, 100) for name in TEMPLATES] == [0] * 10


def test_rendering_again_would_change_tokens():
    """The count above can fail: the renders of the same conversations have other ids."""
    template, draws = make_template("chatml"), random.Random(1)
    history, ids = roll_out(template, "chatml", draws)

    assert _rendered(template, history) != ids
    found = find_mismatch(template, history)
    assert found is not None
    kept = chat_ids(template, history)
    assert kept[: found.position] == template.encode(template.marked(history.tolist()))[: found.position]
    assert found.kept.startswith(template.tokenizer.decode(kept[found.position : found.position + 1]))


CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "hm"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d", "reasoning_content": "so"},
]


def generated_text(template, row):
    """The text of the tokens that a row trains."""
    return template.tokenizer.decode([i for i, own in zip(row.ids, row.generated, strict=True) if own])


def test_rows_where_thinking_is_dropped():
    """Each reply stands once, with its thinking, in a row that ends with it."""
    template = make_template("qwen")
    history = History.from_chats(CHAT)

    rows = to_training_rows(template, history)

    assert [row.replies for row in rows] == [(1,), (3,)]
    assert [len(row.history.tolist()) for row in rows] == [2, 4]
    assert [generated_text(template, row) for row in rows] == [
        "<think>\nhm\n</think>\n\nb<|im_end|>",
        "<think>\nso\n</think>\n\nd<|im_end|>",
    ]


def test_a_row_begins_with_the_prompt_of_its_reply():
    """As the template renders it, without the thinking of earlier turns."""
    template = make_template("qwen")
    history = History.from_chats(CHAT)

    last = to_training_rows(template, history)[-1]

    prompt = qwen.render(history[:3], add_generation_prompt=True)
    assert template.tokenizer.decode(last.ids).startswith(prompt)


@pytest.mark.parametrize("length", [3, 4])
def test_a_template_that_drops_thinking_does_not_only_append(length):
    """Whether the conversation ends with a question or a reply."""
    assert is_append_only(make_template("qwen"), History.from_chats(CHAT)[:length]) is False


def test_a_question_at_the_end_has_no_row():
    """Only the reply before it is trained."""
    (row,) = to_training_rows(make_template("qwen"), History.from_chats(CHAT)[:3])

    assert row.replies == (1,)


def test_one_row_where_a_template_only_appends():
    """All replies are trained in it, and its ids are those of the conversation."""
    template, history = make_template("chatml"), History.from_chats([CHAT, CHAT[:1]])

    rows = to_training_rows(template, history)

    assert is_append_only(template, history) == [True, True]
    assert [[row.replies for row in each] for each in rows] == [[(1, 3)], [()]]
    assert rows[0][0].ids == chat_ids(template, history)[0]
    assert find_mismatch(template, history) == [None, None]


def test_a_template_with_a_default_system_message_only_appends():
    """The message stays at the start."""
    plain = History.from_chats(CHAT[1:]).set("reasoning_content", None)

    assert is_append_only(TokenTemplate(make_tokenizer(DEFAULT)), plain)


def test_tools_that_move_begin_a_row():
    """Mistral writes the tools before the last message of the user."""
    history = History.from_chats({"messages": [{k: m[k] for k in ("role", "content")} for m in CHAT], "tools": TOOLS})

    cases = (mistral, history), (mistral, history.set("tools", None)), (llama, history)
    assert [is_append_only(*case) for case in cases] == [False, True, True]
    assert [row.replies for row in to_training_rows(make_template("mistral"), history)] == [(1,), (3,)]


@given(st.text("ab .", min_size=1, max_size=8), st.data())
@settings(max_examples=30, deadline=None)
def test_edited_messages_are_noticed(said, data):
    """Ids raise unless the text, spaces around it aside, is theirs: not if it is shorter, longer or another."""
    template = make_template("chatml")
    ids = template.tokenizer(said, add_special_tokens=False)["input_ids"] + data.draw(
        st.sampled_from([[], template.end_ids])
    )
    start = data.draw(st.integers(0, len(said)))
    cut = said[start : data.draw(st.integers(start, len(said)))]
    text = data.draw(st.sampled_from([cut, said, f" {said}\n", said + "b", cut + "a" + cut]))
    history = History.from_chats([CHAT[0], {"role": "assistant", "content": text, "token_ids": ids}])

    if text.strip() == said.strip():
        assert chat_ids(template, history)[-len(ids) :] == ids
    else:
        with pytest.raises(ValueError, match=r"message 1 \(assistant\): token_ids do not decode(?s:.*)retokenize=True"):
            chat_ids(template, history)
        again = chat_ids(template, history, retokenize=True)
        assert template.tokenizer.decode(again).endswith(f"{text}<|im_end|>")


def test_a_sampled_reply_may_begin_inside_a_word():
    """WordPiece writes such a piece as `##x` at the start of a text, and as `x` behind the prompt."""
    template = TokenTemplate(tokenizer_of("word pieces"))
    question = History.from_chats([{"role": "user", "content": "fox"}])
    prompt = chat_ids(template, question, add_generation_prompt=True)
    ids = template.text_tokenizer.convert_tokens_to_ids(["##o", "fox", "</s>"])
    (content,) = texts_behind(template.text_tokenizer, [prompt], [ids[:-1]])

    reply = History(role="assistant", content=content, token_ids=ids)

    assert chat_ids(template, question.append(reply)) == prompt + ids


def test_replies_of_other_fields_keep_their_ids():
    """A reply that was parsed into thinking and content has the ids of its whole text, and no others."""
    template = make_template("chatml")
    ids = template.tokenizer("<think>\nhm\n</think>\n\nb")["input_ids"]
    assert chat_ids(template, History.from_chats([CHAT[0], {**CHAT[1], "token_ids": ids}]))[-len(ids) :] == ids
    for change in ({"reasoning_content": "h"}, {"reasoning_content": None}, {"content": "hm b"}):
        with pytest.raises(ValueError, match="token_ids do not decode"):
            chat_ids(template, History.from_chats([CHAT[0], {**CHAT[1], **change, "token_ids": ids}]))


def test_a_reply_that_was_cut_gets_its_end():
    """Not as something that the assistant wrote."""
    template = make_template("chatml")
    ids = template.tokenizer("b")["input_ids"]
    history = History.from_chats([CHAT[0], {"role": "assistant", "content": "b", "token_ids": ids}, CHAT[2]])

    (row,) = to_training_rows(template, history)

    assert template.tokenizer.decode(row.ids) == chatml.render(history)
    assert [i for i, own in zip(row.ids, row.generated, strict=True) if own] == ids
    assert find_mismatch(template, history[:2])[1:] == ("", "<|im_end|>\n")
    nothing = History.from_chats([CHAT[0], {"role": "assistant", "content": "", "token_ids": []}, CHAT[2]])
    (row,) = to_training_rows(template, nothing)
    assert template.tokenizer.decode(row.ids) == chatml.render(nothing)
    assert row.generated == [False] * len(row.ids)


@pytest.mark.parametrize("sampled_end", ["<|return|>", "<|end|>", ""])
@pytest.mark.parametrize("source", [HARMONY, DRAWN])
def test_a_reply_ends_once(source, sampled_end):
    """Where a last turn ends in another way than an inner one: with the end that was sampled, else the inner one."""
    template = TokenTemplate(make_tokenizer(source, special=["<|start|>", "<|message|>", "<|end|>", "<|return|>"]))
    start = template.tokenizer("<|start|>user<|message|>a<|end|><|start|>assistant<|message|>b")["input_ids"]
    ids = start + template.tokenizer(sampled_end)["input_ids"]

    text = template.tokenizer.decode(append_messages(template, ids, History(role="user", content="c")))
    plain = History.from_chats([{key: each[key] for key in ("role", "content")} for each in CHAT])
    assert text.endswith(f"b{sampled_end or '<|end|>'}<|start|>user<|message|>c<|end|><|start|>assistant")
    assert masked(plain, template.tokenizer)[1] == ["<|message|>b<|end|>", "<|message|>d<|return|>"]
    assert template.template.end == "<|return|>"
    assert template.template.inner_end == "<|end|>"


def test_contents_between_which_nothing_stands():
    """They are text, also where a template writes neither headers nor ends of inner turns."""
    plain = TokenTemplate(make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}"))
    history = History.from_chats([CHAT[0], {"role": "assistant", "content": "<s>"}])
    ids = append_messages(plain, chat_ids(plain, history), History(role="user", content="<s><|im_end|>"))
    last = TokenTemplate(make_tokenizer(HARMONY.replace("'<|end|>'", "''"), special=["<|start|>", "<|return|>"]))
    longer = append_messages(last, last.tokenizer("b")["input_ids"], History(role="user", content="<|start|>"))

    assert plain.tokenizer.decode(ids) == "a<s><s><|im_end|>"
    assert not {*ids} & {*plain.tokenizer.convert_tokens_to_ids(SPECIAL)}
    assert last.tokenizer.decode(longer) == "b<|return|><|start|>user<|message|><|start|><|start|>assistant"
    assert longer.count(last.tokenizer.convert_tokens_to_ids("<|start|>")) == 2


def test_thinking_inside_a_content_begins_a_row():
    """A template that cuts it out, and ends its prompt with the tag, gives a row for each reply."""
    answer, text = {"role": "assistant", "content": "b"}, "user:a<|im_end|>assistant:<think>b<|im_end|>"
    jinja = (
        "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:<think>{% endif %}"
    )
    template = TokenTemplate(make_tokenizer(jinja))
    texts = ["hm</think>b", "so</think>d"]
    ids = [[*template.tokenizer(text)["input_ids"], *template.end_ids] for text in texts]
    replies = [{"role": "assistant", "content": text, "token_ids": own} for text, own in zip(texts, ids, strict=True)]
    history = History.from_chats([CHAT[0], replies[0], CHAT[2], replies[1]])

    rows = to_training_rows(template, history)

    assert is_append_only(template, history) is False
    assert [row.replies for row in rows] == [(1,), (3,)]
    assert [row.ids[-len(own) :] for row, own in zip(rows, ids, strict=True)] == ids
    assert template.tokenizer.decode(chat_ids(template, History.from_chats([CHAT[0], answer]))) == text
    assert template.tokenizer.decode(rows[1].ids).startswith("user:a<|im_end|>assistant:b<|im_end|>user:c<|im_end|>")
    start = template.tokenizer("user:a<|im_end|>assistant:")["input_ids"]
    assert find_mismatch(template, history).position == len(start)


def test_headers_are_appended_or_not():
    """Without messages only the header of a reply."""
    template = make_template("chatml")
    ids = chat_ids(template, History.from_chats(CHAT[:2]))
    text = template.tokenizer.decode(ids)

    none = append_messages(template, ids, History.from_chats([]))
    quiet = append_messages(template, ids, History(role="user", content="c"), add_generation_prompt=False)

    assert template.tokenizer.decode(none) == text + "\n<|im_start|>assistant\n"
    assert template.tokenizer.decode(quiet) == text + "\n<|im_start|>user\nc<|im_end|>\n"
