"""The report on templates: each property, on templates that have it and on templates that do not."""

import json

import pytest

from tdfunc.llm import JinjaTemplate, chatml, template_report
from tests.cli.helpers import run
from tests.llm.conversations.test_exact import HERMES
from tests.llm.encoding.test_text import make_adding
from tests.llm.templates.test_turns import DEFAULT
from tests.llm.tokens import CHATML, FORGETFUL, GENERATION, TEXT_ARGUMENTS, ZEPHYR, make_tokenizer

OVERDRAWN = "{% generation %}" + CHATML + "{% endgeneration %}"
NO_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
BOS = "{{ bos_token }}" + CHATML
# The tools, or the system message, stand before the last message: they move.
LAST_TOOLS = CHATML.replace("<|im_start|>{{", "{{ tools | tojson if tools and loop.last }}<|im_start|>{{", 1)
LAST_SYSTEM = NO_SYSTEM.replace("<|im_start|>{{", "{{ messages[0].content if loop.last }}<|im_start|>{{", 1)


def report(template, **options):
    """The report on a template."""
    return template_report(make_tokenizer(template, **options))


@pytest.mark.parametrize(
    ("name", "template", "good", "detail"),
    [
        ("append-only", CHATML, True, "prefix"),
        ("append-only", CHATML + "{% generation %}{% endgeneration %}", True, "prefix"),
        ("append-only with thinking", FORGETFUL, False, "to_training_rows"),
        ("append-only with thinking", HERMES, True, "prefix"),
        ("append-only", LAST_TOOLS, True, "prefix"),
        ("append-only with tools", LAST_TOOLS, False, "to_training_rows"),
        ("append-only with tools", CHATML, True, "prefix"),
        ("append-only with system", LAST_SYSTEM, False, "to_training_rows"),
        ("append-only with system", CHATML, True, "prefix"),
        ("thinking", CHATML, None, "not rendered"),
        ("thinking", FORGETFUL, False, "left out of earlier turns"),
        ("thinking", HERMES, True, "kept"),
        ("end of turn", CHATML, True, "'<|im_end|>'"),
        ("end of turn", ZEPHYR, False, "eos_token is '<|im_end|>'"),
        ("end of turn", "{{ messages[-1].content }}", False, "no control string"),
        ("assistant masks", CHATML, True, "end of turn"),
        ("assistant masks", GENERATION, True, "end of turn"),
        ("assistant masks", CHATML.replace("m['content']", "m['content'] | upper"), True, "end of turn"),
        ("assistant masks", "{{ messages[-1].content }}", False, ""),
        ("generation tag", CHATML, None, "none"),
        ("generation tag", GENERATION, True, "around replies"),
        ("generation tag", OVERDRAWN, False, "draws"),
        ("tools", CHATML, None, "not rendered"),
        ("tools", "{{ tools | tojson }}" + CHATML, True, "rendered"),
        ("tool calls", HERMES, True, "calls and results"),
        ("tool calls", CHATML, False, "only results"),
        ("arguments", FORGETFUL, True, "dict"),
        ("arguments", TEXT_ARGUMENTS, True, "text"),
        ("arguments", CHATML, True, "any"),
        ("system message", CHATML, True, "without a default"),
        ("system message", DEFAULT, False, "You help."),
        ("system message", NO_SYSTEM, False, "dropped"),
        ("control strings", CHATML, True, "ordinary text"),
        ("control strings", CHATML.replace("m['content']", "m['content'] | upper"), False, "edits"),
        ("parsing", "{% for m in messages %}{{ m.content | upper }}{% endfor %}", None, "no template"),
        ("parsing", CHATML.replace("m['role']", "loop.index"), None, "no template"),
    ],
)  # fmt: skip
def test_findings(name, template, good, detail):
    """A property is found where it is, and only there."""
    found = report(template)[name]

    assert found.good is good
    assert detail in found.detail


def test_a_doubled_bos_is_found():
    """The tokenizer adds one, and the template writes one."""
    tokenizer = make_adding()
    tokenizer.chat_template, tokenizer.bos_token = BOS, "<s>"

    assert template_report(tokenizer)["bos"][1:] == (False, "doubled by tokenizer(text): pass add_special_tokens=False")
    assert template_report(make_tokenizer(BOS, bos_token="<s>"))["bos"][1:] == (True, "not doubled")
    assert report(CHATML, split_special_tokens=True)["end of turn"][1:] == (False, "'<|im_end|>' is not one token")


def test_a_template_that_raises_is_reported():
    """Its error is the finding, of every property that needs a render."""
    made = report(no := "{{ raise_exception('no') }}")

    assert not any(each.good for each in made.checks if each.name != "arguments")
    assert "no" in made["append-only"].detail
    assert str(made).count("\n") == len(made.checks) - 1
    partly = "{% if messages[0].role == 'system' %}" + no + "{% endif %}" + CHATML
    assert [JinjaTemplate(make_tokenizer(each)).alike for each in (no, partly)] == [None, chatml]


def test_the_command(tmp_path, monkeypatch):
    """`tdfunc template check` prints a table or JSON, and its exit code tells; it runs no code and asks no server."""
    make_tokenizer(HERMES).save_pretrained(tmp_path / "good")
    make_tokenizer(FORGETFUL).save_pretrained(tmp_path / "bad")
    path = tmp_path / "good" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["code.Code", None]}}))

    good, bad = run("template", "check", tmp_path / "good"), run("template", "check", tmp_path / "bad", "--json")

    assert -1 < good.out.find("finding") < good.out.find("control strings"), good
    assert good.code == 0
    assert bad.code == 1
    assert json.loads(bad.out)["thinking"]["good"] is False
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("a server is asked"))
    assert "nobody/nothing: No such file" in run("template", "check", "nobody/nothing").err
